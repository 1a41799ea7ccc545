//! The ledger: one word per unit, the record of truth for "each unit trained exactly once".

use super::atomics::{AcqRel, Acquire, AtomicU64, Relaxed};
use super::error::{Result, ShmError};
use super::label::{Label, label};
use super::segment::Segment;
use super::words::{LedgerWord, SlotPhase, UnitState};

/// A ledger as a checkpoint keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LedgerImage {
    /// One word per training unit; what was not DONE by the checkpoint's step is PENDING.
    pub words: Vec<u64>,
}

impl LedgerImage {
    /// The words as bytes, little-endian, 8 each.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    }

    /// The reverse of [`LedgerImage::to_bytes`]; `None` for bytes that are no whole words.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        rest.is_empty().then_some(Self { words })
    }

    /// Whether a unit is DONE.
    pub fn is_done(&self, unit: u64) -> bool {
        let word = self.words.get(unit as usize);
        word.is_some_and(|&word| LedgerWord::unpack(word).state == UnitState::Done)
    }

    /// Units that are DONE.
    pub fn done(&self) -> u64 {
        let done = |word: &&u64| LedgerWord::unpack(**word).state == UnitState::Done;
        self.words.iter().filter(done).count() as u64
    }
}

/// Units by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LedgerCounts {
    /// To be prefilled.
    pub pending: u64,
    /// In the hands of a target, or in a slot.
    pub leased: u64,
    /// Trained.
    pub done: u64,
    /// Left out.
    pub quarantined: u64,
    /// Deaths counted against units.
    pub deaths: u64,
}

impl LedgerCounts {
    pub(crate) fn of(words: &[AtomicU64]) -> Self {
        let mut counts = Self::default();
        for word in words {
            let word = LedgerWord::unpack(word.load(Acquire));
            let count = match word.state {
                UnitState::Pending => &mut counts.pending,
                UnitState::Leased => &mut counts.leased,
                UnitState::Done => &mut counts.done,
                UnitState::Quarantined => &mut counts.quarantined,
            };
            *count += 1;
            counts.deaths += u64::from(word.deaths);
        }
        counts
    }
}

impl Segment {
    /// The eval units' words.
    pub(crate) fn eval_ledger(&self) -> &[AtomicU64] {
        &self.memory().ledger()[..self.geometry().eval_units as usize]
    }

    /// The training units' words.
    pub(crate) fn ledger(&self) -> &[AtomicU64] {
        &self.memory().ledger()[self.geometry().eval_units as usize..]
    }

    pub(crate) fn unit_word(&self, unit: u64, eval: bool) -> &AtomicU64 {
        let words = if eval {
            self.eval_ledger()
        } else {
            self.ledger()
        };
        &words[unit as usize]
    }

    /// A training unit's word.
    pub fn unit(&self, unit: u64) -> LedgerWord {
        LedgerWord::unpack(self.unit_word(unit, false).load(Acquire))
    }

    /// Training units by state.
    pub fn ledger_counts(&self) -> LedgerCounts {
        LedgerCounts::of(self.ledger())
    }

    /// p0: leases the lowest pending training unit; everything before `floor` is known to be settled.
    pub(crate) fn try_lease(&self, seat: u32, floor: u64) -> Option<u64> {
        let words = self.ledger();
        let cursor = &self.control().cursor.training;
        // Acquire, and AcqRel below: a raised cursor comes after the leases that raised it. It is advisory:
        // the units before it are looked at when none follows.
        let from = cursor.load(Acquire).min(words.len() as u64);
        if let Some(unit) = lease_first(words, from, seat) {
            // Fails when recovery lowered the cursor meanwhile, as it must.
            let _ = cursor.compare_exchange(from, unit + 1, AcqRel, Relaxed);
            return Some(unit);
        }
        lease_first(&words[..from as usize], floor, seat)
    }

    /// p0 for the held-out units.
    pub(crate) fn try_lease_eval(&self, seat: u32) -> Option<u64> {
        lease_first(self.eval_ledger(), 0, seat)
    }

    /// Recovery made `unit` pending again.
    pub(crate) fn lower_cursor(&self, unit: u64) {
        self.control().cursor.training.fetch_min(unit, AcqRel);
    }

    /// c2: the unit's effect has happened in `step`.
    pub(crate) fn complete(&self, unit: u64, seat: u32, step: u64) -> Result<()> {
        label(Label::C2);
        let cell = self.unit_word(unit, false);
        let word = cell.load(Acquire);
        let now = LedgerWord::unpack(word);
        let done = LedgerWord {
            state: UnitState::Done,
            seat,
            step,
            ..now
        };
        // Release: comes before c3's; partners: whoever finds all units DONE, and r3.
        let swapped = now.state == UnitState::Leased
            && cell
                .compare_exchange(word, done.pack(), AcqRel, Relaxed)
                .is_ok();
        if swapped {
            return Ok(());
        }
        let what = format!("ledger word of unit {unit}");
        Err(ShmError::Stolen {
            seat,
            what,
            word: cell.load(Acquire),
        })
    }

    /// Whether all training units are DONE or QUARANTINED; everything before `floor` is known to be.
    pub(crate) fn all_settled(&self, floor: &mut u64) -> bool {
        let words = self.ledger();
        // Acquire: partner: c2's Release.
        let settled = |word: &&AtomicU64| LedgerWord::unpack(word.load(Acquire)).is_settled();
        *floor += words[*floor as usize..].iter().take_while(settled).count() as u64;
        *floor == words.len() as u64
    }

    /// Whether every unit, held-out ones too, is DONE, QUARANTINED, or sits in a published or held slot;
    /// every training unit before `floor` is known to be settled.
    pub(crate) fn all_published(&self, floor: u64) -> bool {
        let mut leased = Vec::new();
        let training = &self.ledger()[floor as usize..];
        for (eval, first, words) in [(true, 0, self.eval_ledger()), (false, floor, training)] {
            for (word, unit) in words.iter().zip(first..) {
                match LedgerWord::unpack(word.load(Acquire)).state {
                    UnitState::Pending => return false,
                    UnitState::Leased => leased.push((unit, eval)),
                    UnitState::Done | UnitState::Quarantined => {}
                }
            }
        }
        let published = self.published_units();
        leased.iter().all(|&(unit, eval)| {
            // Not found: it may have been freed since, and then its word says DONE by now (c2 before c3).
            published.contains(&(unit, eval))
                || LedgerWord::unpack(self.unit_word(unit, eval).load(Acquire)).is_settled()
        })
    }

    /// (unit, eval) of every published or held slot.
    pub(crate) fn published_units(&self) -> std::collections::HashSet<(u64, bool)> {
        let slots = self.memory().slots().iter().zip(0..);
        slots
            .filter_map(|(cell, slot)| Some((cell.occupant().1?, slot >= self.geometry().slots)))
            .collect()
    }

    /// Whether a published or held slot has the unit.
    pub(crate) fn is_published(&self, unit: u64, eval: bool) -> bool {
        if eval {
            let phase = self
                .slot(self.geometry().slots + unit as u32)
                .occupant()
                .0
                .phase;
            return phase == SlotPhase::Ready;
        }
        self.ring()
            .iter()
            .any(|cell| cell.occupant().1 == Some(unit))
    }

    /// The ledger of a checkpoint of step `step`.
    pub fn export_ledger(&self, step: u64) -> LedgerImage {
        let words = self.ledger().iter().map(|word| {
            let word = LedgerWord::unpack(word.load(Acquire));
            let kept = match word.state {
                UnitState::Done => word.step <= step,
                UnitState::Quarantined => true,
                UnitState::Pending | UnitState::Leased => false,
            };
            if kept {
                word.pack()
            } else {
                pending(word).pack()
            }
        });
        LedgerImage {
            words: words.collect(),
        }
    }

    /// Starts from a checkpoint's ledger; before any worker sits.
    ///
    /// # Errors
    /// [`ShmError::LedgerSize`] when the run has another number of units.
    pub fn restore_ledger(&self, image: &LedgerImage) -> Result<()> {
        let (saved, units) = (image.words.len() as u64, self.geometry().units);
        if saved != units {
            return Err(ShmError::LedgerSize { saved, units });
        }
        for (cell, &word) in self.ledger().iter().zip(&image.words) {
            let word = LedgerWord::unpack(word);
            let kept = if word.is_settled() {
                word
            } else {
                pending(word)
            };
            cell.store(kept.pack(), super::atomics::Release);
        }
        Ok(())
    }
}

/// The same unit, to be prefilled again; its deaths stay.
pub(crate) fn pending(word: LedgerWord) -> LedgerWord {
    LedgerWord {
        state: UnitState::Pending,
        seat: 0,
        step: 0,
        ..word
    }
}

/// p0 on the first pending word at or after `from`.
fn lease_first(words: &[AtomicU64], from: u64, seat: u32) -> Option<u64> {
    (from..words.len() as u64).find(|&unit| {
        let cell = &words[unit as usize];
        let word = cell.load(Relaxed);
        let now = LedgerWord::unpack(word);
        if now.state != UnitState::Pending {
            return false;
        }
        label(Label::P0);
        let leased = LedgerWord {
            state: UnitState::Leased,
            seat,
            ..now
        };
        // AcqRel: a unit requeued by recovery comes after its dead lease; partner: r3's CAS.
        cell.compare_exchange(word, leased.pack(), AcqRel, Relaxed)
            .is_ok()
    })
}
