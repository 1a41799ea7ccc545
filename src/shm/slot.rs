//! Slots: one word decides who owns a slot; its header says what lies in it.

use super::atomics::{AcqRel, Acquire, Relaxed, Release};
use super::error::{Result, ShmError};
use super::geometry::Geometry;
use super::label::{Label, label};
use super::layout::Slot;
use super::segment::Segment;
use super::wake::On;
use super::words::{SlotPhase, SlotWord};

/// A published slot that a drafter might take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub slot: u32,
    pub generation: u64,
    pub sequence: u64,
    pub anchors: u64,
}

/// What a slot's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotHeader {
    /// Unit, or eval unit in an eval slot.
    pub unit: u64,
    /// Order of publication.
    pub sequence: u64,
    /// Anchors of the unit.
    pub anchors: u32,
    /// Tokens.
    pub tokens: u32,
    /// Documents.
    pub documents: u32,
    /// The hidden states are not finite: the unit costs its micro-step with weight 0.
    pub weightless: bool,
    /// Seat that wrote it.
    pub producer: u32,
    /// Incarnation of that seat.
    pub incarnation: u32,
    /// Checksum of the payload; 0 unless payloads are checked.
    pub payload_sum: u64,
}

const WEIGHTLESS: u64 = 1;

fn pair(high: u32, low: u32) -> u64 {
    (u64::from(high) << 32) | u64::from(low)
}

fn shape_of(geometry: &Geometry) -> u64 {
    let final_width = if geometry.final_hidden {
        geometry.hidden
    } else {
        0
    };
    pair(geometry.captured_width, final_width)
}

/// Mixes words into a 64-bit checksum: enough to tell a torn or overwritten header from a whole one.
pub(crate) fn checksum(words: impl IntoIterator<Item = u64>) -> u64 {
    let mix = |hash: u64, word: u64| {
        (hash ^ word)
            .rotate_left(29)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    let hash = words.into_iter().fold(0x51a7_57a7_e51a_57a7, mix);
    // Never 0, which stands for "none".
    (hash ^ (hash >> 32)).max(1)
}

/// Checksum of a payload's bytes.
pub(crate) fn checksum_bytes(parts: &[&[u8]]) -> u64 {
    let words = parts.iter().flat_map(|part| {
        let (chunks, rest) = part.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let whole = chunks.iter().map(|chunk| u64::from_le_bytes(*chunk));
        whole.chain([u64::from_le_bytes(last), part.len() as u64])
    });
    checksum(words)
}

impl Slot {
    fn header_sum(&self) -> u64 {
        checksum([
            self.unit.load(Acquire),
            self.sequence.load(Acquire),
            self.anchors.load(Acquire),
            self.size.load(Relaxed),
            self.shape.load(Relaxed),
            self.kind.load(Relaxed),
            self.producer.load(Relaxed),
            self.payload_sum.load(Relaxed),
        ])
    }

    /// The word and, while the slot is published or held, its unit; both of one moment.
    pub(crate) fn occupant(&self) -> (SlotWord, Option<u64>) {
        loop {
            // Acquire: partner: p3's Release, so that the header read below is at least this claim's.
            let word = self.word.load(Acquire);
            let unpacked = SlotWord::unpack(word);
            if matches!(unpacked.phase, SlotPhase::Free | SlotPhase::Filling) {
                return (unpacked, None);
            }
            // Acquire: partner: the Release stores of p2. Had this load seen a later claim's header, the
            // load below would see that claim's word.
            let unit = self.unit.load(Acquire);
            if self.word.load(Acquire) == word {
                return (unpacked, Some(unit));
            }
        }
    }
}

impl Segment {
    /// p1: claims a free slot of the ring for `seat`; its index and new generation.
    pub(crate) fn try_claim(&self, seat: u32) -> Option<(u32, u64)> {
        (0..self.geometry().slots).find_map(|slot| Some((slot, self.try_claim_slot(slot, seat)?)))
    }

    /// p1 on one slot.
    pub(crate) fn try_claim_slot(&self, slot: u32, seat: u32) -> Option<u64> {
        let cell = &self.slot(slot).word;
        let word = cell.load(Relaxed);
        let SlotWord {
            phase: SlotPhase::Free,
            generation,
            ..
        } = SlotWord::unpack(word)
        else {
            return None;
        };
        let generation = generation + 1;
        label(Label::P1);
        // Acquire: the last holder's reads come before our writes; partner: c3's Release.
        cell.compare_exchange(word, SlotWord::filling(seat, generation), AcqRel, Relaxed)
            .ok()?;
        Some(generation)
    }

    /// p2: writes the header of a slot that the caller is filling; the payload is complete.
    pub(crate) fn write_header(&self, slot: u32, header: &SlotHeader) {
        label(Label::P2);
        let cell = self.slot(slot);
        // Release, all: whoever sees one of these has the claim before it; partner: `occupant`.
        cell.tag.store(0, Release);
        cell.counted.store(0, Release);
        cell.unit.store(header.unit, Release);
        cell.sequence.store(header.sequence, Release);
        cell.anchors.store(header.anchors.into(), Release);
        cell.size
            .store(pair(header.documents, header.tokens), Relaxed);
        cell.shape.store(shape_of(self.geometry()), Relaxed);
        let flags = if header.weightless { WEIGHTLESS } else { 0 };
        cell.kind.store(
            (flags << 32) | u64::from(self.geometry().dtype.code()),
            Relaxed,
        );
        cell.producer
            .store(pair(header.incarnation, header.producer), Relaxed);
        cell.payload_sum.store(header.payload_sum, Relaxed);
        cell.checksum.store(cell.header_sum(), Relaxed);
    }

    /// The publication's place in the order; drawn before p3.
    pub(crate) fn draw_sequence(&self) -> u64 {
        // Relaxed: only the numbers' order matters, and p3 publishes the number.
        self.control().sequence.next.fetch_add(1, Relaxed) + 1
    }

    /// p3 and p4: publishes a slot that `seat` has filled.
    pub(crate) fn publish_slot(&self, slot: u32, generation: u64, seat: u32) -> Result<()> {
        label(Label::P3);
        let ready = SlotWord::ready(generation);
        // Release: header and payload come before; partner: c0's Acquire.
        self.change(slot, SlotWord::filling(seat, generation), ready, seat)?;
        label(Label::P4);
        self.wake(On::Items);
        Ok(())
    }

    /// Published slots that nobody has taken.
    fn ready(&self) -> impl Iterator<Item = Candidate> {
        self.ring().iter().zip(0..).filter_map(|(cell, slot)| {
            // Acquire: partner: p3's Release. A header that changes meanwhile makes c0 fail.
            let word = SlotWord::unpack(cell.word.load(Acquire));
            (word.phase == SlotPhase::Ready).then(|| Candidate {
                slot,
                generation: word.generation,
                sequence: cell.sequence.load(Acquire),
                anchors: cell.anchors.load(Acquire),
            })
        })
    }

    /// The published slot with the lowest sequence.
    pub(crate) fn lowest_ready(&self) -> Option<Candidate> {
        self.ready().min_by_key(|candidate| candidate.sequence)
    }

    /// The published slot that holds `unit`.
    pub(crate) fn ready_with(&self, unit: u64) -> Option<Candidate> {
        self.ready()
            .find(|candidate| self.slot(candidate.slot).unit.load(Acquire) == unit)
    }

    /// Whether any slot of the ring is published and not taken.
    pub(crate) fn any_ready(&self) -> bool {
        self.ring()
            .iter()
            .any(|cell| SlotWord::unpack(cell.word.load(Acquire)).phase == SlotPhase::Ready)
    }

    /// c0: takes a published slot; false when somebody else was faster.
    pub(crate) fn try_hold(&self, slot: u32, generation: u64, seat: u32) -> bool {
        label(Label::C0);
        let (ready, held) = (
            SlotWord::ready(generation),
            SlotWord::held(seat, generation),
        );
        // Acquire: header and payload are visible after; partner: p3's Release (through redelivery's, if
        // the slot was given back).
        self.slot(slot)
            .word
            .compare_exchange(ready, held, AcqRel, Relaxed)
            .is_ok()
    }

    /// c0t: the holder takes part in `step` with this slot.
    pub(crate) fn tag(&self, slot: u32, step: u64) {
        label(Label::C0t);
        // Release: recovery reads it after waitid, which orders everything; the holder's g1 comes later.
        self.slot(slot).tag.store(step, Release);
    }

    /// c1: reads and verifies the header of a slot that the caller holds or that is kept for good.
    pub(crate) fn read_header(&self, slot: u32) -> Result<SlotHeader> {
        label(Label::C1);
        let cell = self.slot(slot);
        let unit = cell.unit.load(Acquire);
        let producer = cell.producer.load(Relaxed);
        let (found, expected) = (cell.header_sum(), cell.checksum.load(Relaxed));
        let kind = cell.kind.load(Relaxed);
        let shape = shape_of(self.geometry());
        let same = cell.shape.load(Relaxed) == shape && kind as u32 == self.geometry().dtype.code();
        if found != expected || !same {
            let what = "the header";
            let producer = producer as u32;
            return Err(ShmError::Corrupt {
                what,
                slot,
                unit,
                producer,
                found,
                expected,
            });
        }
        let size = cell.size.load(Relaxed);
        Ok(SlotHeader {
            unit,
            sequence: cell.sequence.load(Acquire),
            anchors: cell.anchors.load(Acquire) as u32,
            tokens: size as u32,
            documents: (size >> 32) as u32,
            weightless: (kind >> 32) & WEIGHTLESS != 0,
            producer: producer as u32,
            incarnation: (producer >> 32) as u32,
            payload_sum: cell.payload_sum.load(Relaxed),
        })
    }

    /// c3: frees a slot that `seat` holds; its unit is DONE.
    pub(crate) fn free_slot(&self, slot: u32, generation: u64, seat: u32) -> Result<()> {
        label(Label::C3);
        // Release: our reads of the payload and c2 come before; partners: p1's Acquire and, for c2, the
        // slot load of r3.
        self.change(
            slot,
            SlotWord::held(seat, generation),
            SlotWord::free(generation),
            seat,
        )?;
        self.wake(On::Space);
        Ok(())
    }

    /// Gives a slot back, published as before.
    pub(crate) fn give_back_slot(&self, slot: u32, generation: u64, seat: u32) -> Result<()> {
        self.slot(slot).tag.store(0, Release);
        // Release: our reads and the cleared tag come before the next holder's; partner: c0's Acquire.
        self.change(
            slot,
            SlotWord::held(seat, generation),
            SlotWord::ready(generation),
            seat,
        )?;
        self.wake(On::Items);
        Ok(())
    }

    /// A change that only `seat` may make and that therefore cannot fail while it lives.
    fn change(&self, slot: u32, from: u64, to: u64, seat: u32) -> Result<()> {
        let swapped = self
            .slot(slot)
            .word
            .compare_exchange(from, to, AcqRel, Relaxed);
        swapped.map(|_| ()).map_err(|word| {
            let what = format!("slot {slot}");
            ShmError::Stolen { seat, what, word }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_notice_order_length_and_bits() {
        let base = checksum([1, 2, 3]);
        for other in [
            checksum([2, 1, 3]),
            checksum([1, 2]),
            checksum([1, 2, 3, 0]),
        ] {
            assert_ne!(base, other);
        }
        let bytes = [7u8; 21];
        let base = checksum_bytes(&[&bytes]);
        assert_ne!(base, checksum_bytes(&[&bytes[..20]]));
        for at in 0..bytes.len() {
            let mut other = bytes;
            other[at] ^= 0x10;
            assert_ne!(base, checksum_bytes(&[&other]));
        }
    }
}
