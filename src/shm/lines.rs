//! The protocol's lines one by one, without the handles' bookkeeping, for the loom tests: what a model
//! checker explores must be short.

use super::error::Result;
use super::geometry::Geometry;
use super::segment::Segment;
use super::slot::SlotHeader;
use super::step::{Agreed, Arrival, Vote};

/// A slot in some phase, by index and generation.
#[derive(Clone, Copy, Debug)]
pub struct Grip {
    /// Slot index.
    pub slot: u32,
    /// Generation.
    pub generation: u64,
}

impl Segment {
    /// A segment that the rule on slots is not applied to.
    pub fn small(geometry: &Geometry) -> Self {
        Self::unchecked(geometry, super::segment::RunId([7; 16])).expect("the heap does not refuse")
    }

    /// p0.
    pub fn line_p0(&self, seat: u32) -> Option<u64> {
        self.try_lease(seat, 0)
    }

    /// p1.
    pub fn line_p1(&self, seat: u32) -> Option<Grip> {
        let (slot, generation) = self.try_claim(seat)?;
        Some(Grip { slot, generation })
    }

    /// p2: payload and header of `unit`.
    pub fn line_p2(&self, grip: Grip, unit: u64, producer: u32) {
        let probe = self.memory().probe(grip.slot as usize);
        // SAFETY: loom checks that nothing else reaches the cell meanwhile.
        probe.with_mut(|cell| unsafe { *cell = unit });
        let header = SlotHeader {
            unit,
            sequence: self.draw_sequence(),
            anchors: 1,
            tokens: 1,
            documents: 1,
            weightless: false,
            producer,
            incarnation: 1,
            payload_sum: 0,
        };
        self.write_header(grip.slot, &header);
    }

    /// p3 and p4.
    ///
    /// # Errors
    /// When the claim was lost.
    pub fn line_p3(&self, grip: Grip, seat: u32) -> Result<()> {
        self.publish_slot(grip.slot, grip.generation, seat)
    }

    /// c0 on the slot with the lowest sequence.
    pub fn line_c0(&self, seat: u32) -> Option<Grip> {
        let ready = self.lowest_ready()?;
        let (slot, generation) = (ready.slot, ready.generation);
        self.try_hold(slot, generation, seat)
            .then_some(Grip { slot, generation })
    }

    /// c0t.
    pub fn line_c0t(&self, grip: Grip, step: u64) {
        self.tag(grip.slot, step);
    }

    /// c1: the unit in the header, and the one in the payload.
    ///
    /// # Errors
    /// When the header is torn.
    pub fn line_c1(&self, grip: Grip) -> Result<(u64, u64)> {
        let header = self.read_header(grip.slot)?;
        let probe = self.memory().probe(grip.slot as usize);
        // SAFETY: loom checks that nobody writes the cell meanwhile.
        let payload = probe.with(|cell| unsafe { *cell });
        Ok((header.unit, payload))
    }

    /// c2.
    ///
    /// # Errors
    /// When the unit is not leased.
    pub fn line_c2(&self, unit: u64, seat: u32, step: u64) -> Result<()> {
        self.complete(unit, seat, step)
    }

    /// c3.
    ///
    /// # Errors
    /// When the slot was lost.
    pub fn line_c3(&self, grip: Grip, seat: u32) -> Result<()> {
        self.free_slot(grip.slot, grip.generation, seat)
    }

    /// Reserves anchors; whether they were granted.
    pub fn line_reserve(&self, step: u64, generation: u32, anchors: u64) -> bool {
        self.reserve(step, generation, anchors) == super::budget::Reserve::Granted
    }

    /// Gives a reservation back.
    pub fn line_give_back(&self, step: u64, generation: u32, anchors: u64) {
        self.give_back(step, generation, anchors);
    }

    /// g1; whether it counts.
    pub fn line_g1(&self, rank: u32, step: u64, generation: u32, units: &[(u64, u32)]) -> bool {
        self.write_record(rank, (step, generation), units, Vote::default());
        self.arrive_closed(rank, step, generation) != Arrival::Moved
    }

    /// What all members say in REDUCE.
    pub fn line_agreed(&self, step: u64, generation: u32) -> Option<Agreed> {
        let word = self.step_word();
        let all = (word.step, word.generation, word.state)
            == (step, generation, super::words::StepState::Reduce);
        all.then(|| self.read_agreed(step, generation)).flatten()
    }

    /// g2; whether it counts.
    pub fn line_g2(&self, rank: u32, step: u64, generation: u32) -> bool {
        self.arrive_reduced(rank, step, generation) != Arrival::Moved
    }

    /// Sets a finish bit.
    pub fn line_finish(&self, target: u32) -> bool {
        self.set_finish_bit(target, self.epoch())
    }

    /// Whether every unit sits in a slot or is settled.
    pub fn line_all_published(&self) -> bool {
        self.all_published(0)
    }

    /// Takes a sentinel.
    pub fn line_sentinel(&self, rank: u32) -> bool {
        self.take_sentinel(rank)
    }

    /// Whether a slot is ready.
    pub fn line_any_ready(&self) -> bool {
        self.any_ready()
    }
}
