//! Taking units while a step gathers, and one ahead of the next.

use super::super::budget::Reserve;
use super::super::error::{Result, ShmError};
use super::super::payload::{View, checked, view_of};
use super::super::seat::Activity;
use super::super::wake::On;
use super::{Drafter, Item, State, Take};

impl Drafter {
    /// What to do next while the step gathers; waits for it.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`], [`ShmError::Evicted`], [`ShmError::Interrupted`], [`ShmError::Corrupt`].
    pub fn take(&mut self) -> Result<Take> {
        if let Some(take) = self.poll_take()? {
            return Ok(take);
        }
        self.working_on(None);
        let waiter = self.waiter.clone();
        waiter.wait(On::Items, Activity::WaitItem, 0, || self.poll_take())
    }

    /// [`Drafter::take`] without waiting; `None` when only somebody else can bring it about.
    ///
    /// # Errors
    /// As [`Drafter::take`], but for the interrupt.
    pub fn poll_take(&mut self) -> Result<Option<Take>> {
        if self.leaves {
            return Ok(Some(Take::Leave));
        }
        self.expect("take", &[State::Gathering])?;
        loop {
            if self.moved() {
                return Ok(self.poll_join()?.map(Take::Joined));
            }
            if self.stop().is_some_and(|stop| stop.closes(self.step)) {
                let over = self.is_over();
                return Ok(Some(if over { Take::Leave } else { Take::Close }));
            }
            let segment = self.segment().clone();
            if let Some(item) = self.prefetched {
                match segment.reserve(self.step, self.generation, item.header.anchors.into()) {
                    Reserve::Granted => {
                        segment.tag(item.slot, self.step);
                        self.prefetched = None;
                        self.items.push(item);
                        return Ok(Some(Take::Item(item)));
                    }
                    Reserve::Full => return Ok(self.closes().then_some(Take::Close)),
                    Reserve::Moved => continue,
                }
            }
            if segment.budget_reached(self.step, self.generation) {
                return Ok(self.closes().then_some(Take::Close));
            }
            let Some(ready) = segment.lowest_ready() else {
                // The sentinel first: after it no new unit can come, so "no slot is ready" then stands.
                let drained = segment.take_sentinel(self.rank);
                if drained && segment.any_ready() {
                    continue;
                }
                return Ok(self.without_ready(drained));
            };
            match segment.reserve(self.step, self.generation, ready.anchors) {
                Reserve::Granted => {}
                Reserve::Full => return Ok(self.closes().then_some(Take::Close)),
                Reserve::Moved => continue,
            }
            if segment.try_hold(ready.slot, ready.generation, self.seat) {
                segment.tag(ready.slot, self.step);
                let item = self.held(ready.slot, ready.generation)?;
                self.items.push(item);
                return Ok(Some(Take::Item(item)));
            }
            segment.give_back(self.step, self.generation, ready.anchors);
            // Whoever found the batch reached looks again.
            segment.wake(On::Items);
        }
    }

    /// Takes one particular unit, whatever the budget says: for replaying a run whose every step is known. Waits
    /// until it is published.
    ///
    /// # Errors
    /// As [`Drafter::take`].
    pub fn take_unit(&mut self, unit: u64) -> Result<Take> {
        self.working_on(None);
        let waiter = self.waiter.clone();
        waiter.wait(On::Items, Activity::WaitItem, unit, || {
            self.poll_take_unit(unit)
        })
    }

    fn poll_take_unit(&mut self, unit: u64) -> Result<Option<Take>> {
        if self.leaves {
            return Ok(Some(Take::Leave));
        }
        self.expect("take_unit", &[State::Gathering])?;
        if self.moved() {
            return Ok(self.poll_join()?.map(Take::Joined));
        }
        if self.stop().is_some_and(|stop| stop.closes(self.step)) {
            let over = self.is_over();
            return Ok(Some(if over { Take::Leave } else { Take::Close }));
        }
        let segment = self.segment().clone();
        let Some(ready) = segment.ready_with(unit) else {
            return Ok(self.is_over().then_some(Take::Leave));
        };
        if segment.reserve_again(self.step, self.generation, ready.anchors) == Reserve::Moved {
            return Ok(None);
        }
        if !segment.try_hold(ready.slot, ready.generation, self.seat) {
            segment.give_back(self.step, self.generation, ready.anchors);
            return Ok(None);
        }
        segment.tag(ready.slot, self.step);
        let item = self.held(ready.slot, ready.generation)?;
        self.items.push(item);
        Ok(Some(Take::Item(item)))
    }

    /// c1 of a slot just taken.
    fn held(&self, slot: u32, generation: u64) -> Result<Item> {
        let header = self.segment().read_header(slot)?;
        Ok(Item {
            slot,
            generation,
            header,
            prefetched: false,
        })
    }

    /// A drafter without items closes only when it is sure that the step is not empty.
    fn closes(&self) -> bool {
        !self.items.is_empty()
            || self
                .segment()
                .others_show_items(self.rank, self.step, self.generation)
    }

    /// No slot is ready: closes, leaves or waits. Without a sentinel all units may still be settled, when
    /// targets died after their last one.
    fn without_ready(&mut self, drained: bool) -> Option<Take> {
        if drained && self.closes() {
            return Some(Take::Close);
        }
        self.is_over().then_some(Take::Leave)
    }

    /// Takes a unit ahead of the next step, without waiting; at most one, after closing a step.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] while the step gathers; [`ShmError::Corrupt`].
    pub fn prefetch(&mut self) -> Result<Option<Item>> {
        let after_g1 = [
            State::Closed,
            State::Reducing,
            State::Settling,
            State::Committed,
        ];
        self.expect("prefetch", &after_g1)?;
        let last = self.stop().is_some_and(|stop| stop.ends(self.step));
        if self.prefetched.is_some() || self.stops || last {
            return Ok(None);
        }
        while let Some(ready) = self.segment().lowest_ready() {
            if self
                .segment()
                .try_hold(ready.slot, ready.generation, self.seat)
            {
                let item = self.held(ready.slot, ready.generation)?;
                self.prefetched = Some(Item {
                    prefetched: true,
                    ..item
                });
                return Ok(self.prefetched);
            }
        }
        Ok(None)
    }

    /// c1: the payload of a unit that this drafter holds, which becomes the unit in hand.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] when it is no longer held; [`ShmError::Corrupt`] with checked payloads.
    pub fn view(&self, item: &Item) -> Result<View<'_>> {
        let same = |held: &&Item| (held.slot, held.generation) == (item.slot, item.generation);
        if self
            .items
            .iter()
            .chain(&self.prefetched)
            .find(same)
            .is_none()
        {
            let state = format!("unit {} is not held", item.unit());
            return Err(ShmError::OutOfOrder {
                seat: self.seat,
                called: "view",
                state,
            });
        }
        self.segment()
            .set_current(self.seat, Some((item.unit(), false)));
        // SAFETY: the slot is held until `finish_step` or `leave`, which need this handle for themselves.
        let view = unsafe { view_of(self.segment(), item.slot, &item.header) };
        checked(self.segment(), item.slot, &item.header, view)
    }

    /// Names the unit in hand; a death from here on counts against it. [`Drafter::view`] does so too.
    pub fn working_on(&self, item: Option<&Item>) {
        self.segment()
            .set_current(self.seat, item.map(|item| (item.unit(), false)));
    }
}
