//! Closing a step, deciding it, and what follows a commit.

use super::super::atomics::Release;
use super::super::error::Result;
use super::super::seat::{Activity, SeatState};
use super::super::step::{Arrival, Vote, ranks};
use super::super::wake::On;
use super::super::words::{StepState, StepWord};
use super::{Closed, Drafter, Item, Reduce, Settled, State};

impl Drafter {
    /// g1: closes the step. Collectives wait for [`Drafter::wait_reduce`]; computing may go on.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Evicted`, `ShmError::Interrupted`.
    pub fn close(&mut self, vote: Vote) -> Result<Closed> {
        let waiter = self.waiter.clone();
        waiter.wait(On::Step, Activity::WaitJoin, 0, || self.poll_close(vote))
    }

    /// [`Drafter::close`] without waiting for the group to form again, should it have changed.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`,
    /// `ShmError::Evicted`.
    pub fn poll_close(&mut self, vote: Vote) -> Result<Option<Closed>> {
        self.expect("close", &[State::Gathering])?;
        if self.moved() {
            return Ok(self.poll_join()?.map(Closed::Joined));
        }
        let segment = self.segment().clone();
        let asked = segment.stop().is_some_and(|stop| stop.ends(self.step));
        let vote = Vote {
            stop: vote.stop || asked,
            ..vote
        };
        let anchors = |item: &Item| (item.unit(), item.header.anchors);
        let units: Vec<_> = self.items.iter().map(anchors).collect();
        segment.write_record(self.rank, (self.step, self.generation), &units, vote);
        match segment.arrive_closed(self.rank, self.step, self.generation) {
            Arrival::Moved => Ok(self.poll_join()?.map(Closed::Joined)),
            Arrival::In { completed } => {
                self.state = State::Closed;
                // Members without items look at our record.
                segment.wake(On::Items);
                if completed {
                    segment.wake(On::Step);
                }
                Ok(Some(Closed::Closed))
            }
        }
    }

    /// Waits until all members have closed the step.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Evicted`, `ShmError::Interrupted`.
    pub fn wait_reduce(&mut self) -> Result<Reduce> {
        self.expect("wait_reduce", &[State::Closed])?;
        let waiter = self.waiter.clone();
        let members = u64::from(self.segment().step_word().members);
        waiter.wait(On::Step, Activity::WaitMembers, members, || {
            self.poll_reduce()
        })
    }

    /// [`Drafter::wait_reduce`] without waiting.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Evicted`.
    pub fn poll_reduce(&mut self) -> Result<Option<Reduce>> {
        self.expect("wait_reduce", &[State::Closed])?;
        if self.moved() {
            return Ok(self.poll_join()?.map(Reduce::Joined));
        }
        let word = self.segment().step_word();
        if (word.step, word.state) != (self.step, StepState::Reduce) {
            if !self.is_over() && !self.is_deserted(word) {
                return Ok(None);
            }
            self.state = State::Gathering;
            return Ok(Some(Reduce::Leave));
        }
        let agreed = self.segment().read_agreed(self.step, self.generation);
        Ok(agreed.map(|agreed| {
            self.state = State::Reducing;
            self.agreed = agreed.mask();
            self.empty = agreed.items() == 0;
            self.stops = agreed.stop();
            Reduce::Agreed(agreed)
        }))
    }

    /// Whether a member that has not closed the step has left: all members had agreed to stop before this one
    /// came, and the step can never be closed.
    fn is_deserted(&self, word: StepWord) -> bool {
        let segment = self.segment();
        let left = |rank| {
            let seat = segment.geometry().drafter_seat(rank);
            segment.seat_state(seat) == SeatState::Left
        };
        let gathers = (word.step, word.state) == (self.step, StepState::Gather);
        gathers && ranks(word.members & !word.mask).any(left)
    }

    /// g2 and the decision. `healthy`: the collectives are complete and so is the communicator; otherwise no
    /// g2 is made and the group's abort is awaited.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Evicted`, `ShmError::Interrupted`.
    pub fn settle(&mut self, healthy: bool) -> Result<Settled> {
        self.arrive(healthy)?;
        let waiter = self.waiter.clone();
        let members = u64::from(self.agreed);
        waiter.wait(On::Step, Activity::WaitSettle, members, || {
            self.poll_settled()
        })
    }

    /// g2 alone.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`.
    pub fn arrive(&mut self, healthy: bool) -> Result<()> {
        self.expect("settle", &[State::Reducing])?;
        self.segment().set_current(self.seat, None);
        self.state = State::Settling;
        if healthy
            && self
                .segment()
                .arrive_reduced(self.rank, self.step, self.generation)
                == (Arrival::In { completed: true })
        {
            self.segment().wake(On::Step);
        }
        Ok(())
    }

    /// The decision on a step, without waiting.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Evicted`.
    pub fn poll_settled(&mut self) -> Result<Option<Settled>> {
        self.expect("settle", &[State::Settling])?;
        let word = self.segment().step_word();
        // First: a commit stands, whatever has happened since.
        if word.step > self.step || (word.step == self.step && word.state == StepState::Committed) {
            self.state = State::Committed;
            return Ok(Some(Settled::Committed));
        }
        if self.moved() {
            return Ok(self.poll_join()?.map(Settled::Aborted));
        }
        if self.empty && self.is_over() {
            // Others may have left without their g2: nothing hangs on this step.
            self.state = State::Gathering;
            return Ok(Some(Settled::Leave));
        }
        Ok(None)
    }

    /// c2 and c3 of all items, after the optimizer step; then the next step begins.
    ///
    /// # Errors
    /// `ShmError::OutOfOrder`, `ShmError::Stolen`.
    pub fn finish_step(&mut self) -> Result<()> {
        self.expect("finish_step", &[State::Committed])?;
        let segment = self.segment().clone();
        for item in &self.items {
            segment.complete(item.unit(), self.seat, self.step)?;
        }
        // Release: every c2 comes before; partner: `wait_save`.
        segment.record(self.rank).c2_done.store(self.step, Release);
        for item in self.items.drain(..) {
            segment.free_slot(item.slot, item.generation, self.seat)?;
            self.waiter.live.count(item.header.tokens.into(), 1);
        }
        segment.wake(On::Items);
        self.step += 1;
        self.barriers = 0;
        self.live().set_step(self.step);
        self.leaves = self.stops;
        self.state = State::Gathering;
        Ok(())
    }
}
