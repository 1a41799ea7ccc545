//! Checkpoints, and the way out.

use super::super::atomics::{AcqRel, Acquire};
use super::super::error::Result;
use super::super::seat::Activity;
use super::super::segment::Segment;
use super::super::step::ranks;
use super::super::wake::On;
use super::{Drafter, Joined, Save, State};

impl Drafter {
    /// After [`Drafter::finish_step`] of a step to be saved, before anything else: waits, on the lowest
    /// member, until every member's c2 of that step is done.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Evicted`, `ShmError::Interrupted`.
    pub fn wait_save(&mut self) -> Result<Save> {
        let waiter = self.waiter.clone();
        let members = u64::from(self.segment().step_word().members);
        waiter.wait(On::Items, Activity::WaitSave, members, || self.poll_save())
    }

    /// [`Drafter::wait_save`] without waiting.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Evicted`.
    pub fn poll_save(&mut self) -> Result<Option<Save>> {
        self.expect("wait_save", &[State::Gathering])?;
        if self.moved() {
            return Ok(self.poll_join()?.map(Save::Joined));
        }
        if !self.is_lowest() {
            return Ok(Some(Save::NotMine));
        }
        let members = self.segment().step_word().members;
        // Acquire: partner: the Release in `finish_step`.
        let done = |rank| self.segment().record(rank).c2_done.load(Acquire) + 1 >= self.step;
        Ok(ranks(members).all(done).then_some(Save::Write))
    }

    /// The checkpoint of `step` is complete on disk.
    pub fn mark_saved(&self, step: u64) {
        self.segment().mark_saved(step);
    }

    /// Waits until the checkpoint of `step` is complete, so that nobody leaves while it could be lost. The
    /// group may form again meanwhile; then whoever is lowest writes it.
    ///
    /// # Errors
    /// `ShmError::Evicted`, `ShmError::Interrupted`.
    pub fn wait_saved(&mut self, step: u64) -> Result<Option<Joined>> {
        let waiter = self.waiter.clone();
        waiter.wait(On::Items, Activity::WaitSave, step, || {
            if self.segment().saved() >= step {
                return Ok(Some(None));
            }
            if self.moved() {
                Ok(self.poll_join()?.map(Some))
            } else {
                Ok(None)
            }
        })
    }

    /// Leaves in good order; units that are still held are given back.
    ///
    /// # Errors
    /// `ShmError::Stolen`.
    pub fn leave(mut self) -> Result<()> {
        let segment = self.segment().clone();
        for item in self.items.drain(..).chain(self.prefetched.take()) {
            segment.give_back_slot(item.slot, item.generation, self.seat)?;
        }
        segment.set_current(self.seat, None);
        segment.mark_left(self.seat);
        segment.wake_all();
        Ok(())
    }
}

impl Segment {
    /// The checkpoint of `step` is complete on disk.
    pub fn mark_saved(&self, step: u64) {
        self.control().step.saved.fetch_max(step, AcqRel);
        self.wake(On::Items);
    }

    /// Step of the last complete checkpoint; 0 = none.
    pub fn saved(&self) -> u64 {
        self.control().step.saved.load(Acquire)
    }
}
