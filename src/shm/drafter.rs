//! A drafter's handle: take units, close the step, settle it, and the ways in and out of the group.

use super::atomics::{Acquire, Release};
use super::budget::Reserve;
use super::error::{Result, ShmError};
use super::finish::Stop;
use super::label::{Label, label};
use super::payload::{Payload, View};
use super::seat::{Activity, LiveSeat};
use super::segment::Segment;
use super::slot::SlotHeader;
use super::step::{Agreed, Arrival, Vote, ranks};
use super::wake::{Interrupt, On, Waiter};
use super::words::{LedgerWord, StepState, StepWord, UnitState, stamp};

/// How a drafter comes into the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A member from the start, or from a roll-back, with the weights it has loaded.
    Founder,
    /// A replacement, which is sent weights, moments and position by a member.
    Replacement,
}

/// A unit that this drafter holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    slot: u32,
    generation: u64,
    header: SlotHeader,
    prefetched: bool,
}

impl Item {
    /// Unit.
    pub fn unit(&self) -> u64 {
        self.header.unit
    }

    /// Slot index: stays the same from [`Drafter::prefetch`] to [`Take::Item`].
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// What its header says.
    pub fn header(&self) -> &SlotHeader {
        &self.header
    }

    /// It was handed out by [`Drafter::prefetch`] before, so its copy may be there already.
    pub fn was_prefetched(&self) -> bool {
        self.prefetched
    }
}

/// The group has formed again under a higher generation, for the same step. Items are kept.
///
/// A communicator made for an earlier generation is dead. When [`Joined::send`] is not 0 the caller now
/// sends its state with [`Drafter::send_state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Step at hand.
    pub step: u64,
    /// Generation.
    pub generation: u32,
    /// Members, as a mask of ranks.
    pub members: u32,
    /// Newcomers without weights that this drafter must send its state to, as a mask of ranks; 0 when there
    /// are none or another drafter sends.
    pub send: u32,
}

/// What a drafter does next while a step gathers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Train this unit: one micro-step.
    Item(Item),
    /// Close the step.
    Close,
    /// The group formed again; what was accumulated for the step stays valid. Look at [`Joined::send`], then
    /// go on taking.
    Joined(Joined),
    /// All units are trained, or the run was stopped: leave.
    Leave,
}

/// Answer to closing a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// g1 is done; go on with [`Drafter::wait_reduce`].
    Closed,
    /// The group formed again; go back to taking, with what was accumulated.
    Joined(Joined),
}

/// Answer to waiting for all to close a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// All have closed it: reduce, then [`Drafter::settle`].
    Agreed(Agreed),
    /// The group formed again; go back to taking, with what was accumulated.
    Joined(Joined),
}

/// The decision on a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It has happened for all: make the optimizer step, then [`Drafter::finish_step`].
    Committed,
    /// It has not happened for anyone: drop the reduced gradient, keep [`Drafter::items`] and train them
    /// again, go back to taking.
    Aborted(Joined),
}

/// Answer to waiting until a step may be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Save {
    /// This drafter writes the checkpoint.
    Write,
    /// The lowest member writes it.
    NotMine,
    /// The group formed again: look again, after [`Joined::send`].
    Joined(Joined),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not yet in the group.
    Outside,
    /// In the group, without weights.
    Receiving,
    /// Taking units.
    Gathering,
    /// After g1.
    Closed,
    /// All have closed; collectives may run.
    Reducing,
    /// After g2, undecided.
    Settling,
    /// Committed; c2 and c3 are due.
    Committed,
}

/// One drafter's seat.
#[derive(Debug)]
pub struct Drafter {
    pub(super) waiter: Waiter,
    pub(super) rank: u32,
    seat: u32,
    entry: Entry,
    state: State,
    pub(super) step: u64,
    pub(super) generation: u32,
    items: Vec<Item>,
    prefetched: Option<Item>,
    pub(super) agreed: u32,
    stops: bool,
    leaves: bool,
    settled_floor: u64,
    /// Barriers passed in this (step, generation).
    pub(super) barriers: u64,
    pub(super) reduce_deadline: Option<std::time::Duration>,
}

impl Segment {
    /// Takes the seat of drafter `rank` for this process. Incarnations count from 1.
    ///
    /// # Errors
    /// [`ShmError::Seat`] when it is not vacant.
    pub fn drafter(&self, rank: u32, incarnation: u32, entry: Entry) -> Result<Drafter> {
        let seat = self.geometry().drafter_seat(rank);
        if rank >= self.geometry().drafters {
            let why = format!("there are {} drafters", self.geometry().drafters);
            return Err(ShmError::Seat {
                seat,
                incarnation,
                why,
            });
        }
        let live = self.sit(seat, incarnation, entry == Entry::Replacement)?;
        let record = &self.seat(seat).record;
        record.stamp.store(0, Release);
        record.c2_done.store(0, Release);
        Ok(Drafter {
            waiter: Waiter {
                segment: self.clone(),
                live,
                interrupt: Interrupt::default(),
            },
            rank,
            seat,
            entry,
            state: State::Outside,
            step: 0,
            generation: 0,
            items: Vec::new(),
            prefetched: None,
            agreed: 0,
            stops: false,
            leaves: false,
            settled_floor: 0,
            barriers: 0,
            reduce_deadline: None,
        })
    }
}

impl Drafter {
    /// The live record that others watch.
    pub fn live(&self) -> &LiveSeat {
        &self.waiter.live
    }

    /// Ends this handle's waits from another thread.
    pub fn interrupt(&self) -> Interrupt {
        self.waiter.interrupt.clone()
    }

    /// The segment.
    pub fn segment(&self) -> &Segment {
        &self.waiter.segment
    }

    /// Rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The step at hand; 0 before [`Drafter::enter`].
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The generation of the group that this drafter has joined.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Units held for the step at hand, in the order taken.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Whether this drafter is the lowest member.
    pub fn is_lowest(&self) -> bool {
        self.segment().step_word().members.trailing_zeros() == self.rank
    }

    /// Longest wait for another member inside a collective; none by default.
    pub fn set_reduce_deadline(&mut self, deadline: Option<std::time::Duration>) {
        self.reduce_deadline = deadline;
    }

    fn expect(&self, called: &'static str, allowed: &[State]) -> Result<()> {
        if allowed.contains(&self.state) {
            return Ok(());
        }
        let state = format!("step {} is {:?}", self.step, self.state);
        Err(ShmError::OutOfOrder {
            seat: self.seat,
            called,
            state,
        })
    }

    pub(super) fn expect_reducing(&self, called: &'static str) -> Result<()> {
        self.expect(called, &[State::Reducing])
    }

    pub(super) fn expect_receiving(&self) -> Result<()> {
        self.expect("receive_state", &[State::Receiving])
    }

    // ---- into the group -------------------------------------------------------------------------------

    /// Waits until this drafter is a member of a gathering step. `None`: there is nothing left to train;
    /// leave. A founder is ready then; a replacement goes on with [`Drafter::receive_state`].
    ///
    /// # Errors
    /// [`ShmError::Interrupted`].
    pub fn enter(&mut self) -> Result<Option<Joined>> {
        self.expect("enter", &[State::Outside])?;
        let waiter = self.waiter.clone();
        waiter.wait(On::Step, Activity::WaitJoin, 0, || self.poll_enter())
    }

    /// [`Drafter::enter`] without waiting.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`].
    pub fn poll_enter(&mut self) -> Result<Option<Option<Joined>>> {
        self.expect("enter", &[State::Outside, State::Receiving])?;
        let word = self.segment().step_word();
        let member = word.members >> self.rank & 1 == 1;
        if member && word.state == StepState::Gather && word.generation > self.generation {
            let joined = self.adopt(word);
            self.state = match self.entry {
                Entry::Founder => State::Gathering,
                Entry::Replacement => State::Receiving,
            };
            return Ok(Some(Some(joined)));
        }
        let stopped = self.stop().is_some_and(|stop| stop.after == 0) && !member;
        if stopped || self.all_settled() {
            return Ok(Some(None));
        }
        Ok(None)
    }

    /// A replacement has its weights: it is like any other member from here on.
    pub(super) fn received(&mut self) {
        label(Label::Received);
        let identity = &self.segment().seat(self.seat).identity;
        // Release: partner: the sender's look at who still needs its state.
        identity.needs_state.store(0, Release);
        self.segment().wake(On::Reduce);
        self.state = State::Gathering;
    }

    /// Takes over (step, generation) from a word that has this drafter as a member.
    fn adopt(&mut self, word: StepWord) -> Joined {
        label(Label::Join);
        let segment = self.segment().clone();
        let StepWord {
            step,
            generation,
            members,
            ..
        } = word;
        self.step = step;
        self.generation = generation;
        self.barriers = 0;
        // Nothing of an earlier step is outstanding here.
        self.segment()
            .record(self.rank)
            .c2_done
            .store(step - 1, Release);
        self.live().set_step(step);
        let needs = |rank: &u32| {
            let seat = segment.geometry().drafter_seat(*rank);
            segment.seat(seat).identity.needs_state.load(Acquire) == 1
        };
        let needy = ranks(members)
            .filter(needs)
            .fold(0, |mask, rank| mask | 1 << rank);
        let sender = (members & !needy).trailing_zeros();
        let send = if sender == self.rank { needy } else { 0 };
        Joined {
            step,
            generation,
            members,
            send,
        }
    }

    /// Whether the group has left (step, generation) behind.
    pub(super) fn moved(&self) -> bool {
        let word = self.segment().step_word();
        word.generation > self.generation
            || (word.step == self.step && word.state == StepState::Aborted)
    }

    /// After an abort: writes nothing, looks for GATHER(step, higher generation), adopts it and counts the
    /// items that r5 has not seen tagged.
    fn poll_join(&mut self) -> Result<Option<Joined>> {
        let word = self.segment().step_word();
        if word.generation <= self.generation || word.state != StepState::Gather {
            return Ok(None);
        }
        if word.members >> self.rank & 1 == 0 || word.step != self.step {
            let (rank, generation) = (self.rank, word.generation);
            return Err(ShmError::Evicted { rank, generation });
        }
        let joined = self.adopt(word);
        let counted = stamp(self.step, self.generation);
        for item in &self.items {
            // Acquire: partner: r5's Release, through r6.
            if self.segment().slot(item.slot).counted.load(Acquire) != counted {
                let anchors = item.header.anchors.into();
                // Moved: the next join counts it.
                self.segment()
                    .reserve_again(self.step, self.generation, anchors);
            }
        }
        self.state = State::Gathering;
        self.agreed = 0;
        self.stops = false;
        self.segment().set_current(self.seat, None);
        Ok(Some(joined))
    }

    /// Waits for the group to form again, after a look that found it gone.
    fn join(&mut self) -> Result<Joined> {
        let waiter = self.waiter.clone();
        waiter.wait(On::Step, Activity::WaitJoin, 0, || self.poll_join())
    }

    // ---- taking ---------------------------------------------------------------------------------------

    fn stop(&self) -> Option<Stop> {
        self.segment().stop()
    }

    fn all_settled(&mut self) -> bool {
        let segment = self.segment().clone();
        segment.all_settled(&mut self.settled_floor)
    }

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
                return Ok(Some(Take::Close));
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
        (self.items.is_empty() && self.all_settled()).then_some(Take::Leave)
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

    // ---- the step -------------------------------------------------------------------------------------

    /// g1: closes the step. Collectives wait for [`Drafter::wait_reduce`]; computing may go on.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`], [`ShmError::Evicted`], [`ShmError::Interrupted`].
    pub fn close(&mut self, vote: Vote) -> Result<Closed> {
        self.expect("close", &[State::Gathering])?;
        if self.moved() {
            return Ok(Closed::Joined(self.join()?));
        }
        let segment = self.segment().clone();
        let asked = segment.stop().is_some_and(|stop| stop.ends(self.step));
        let vote = Vote {
            stop: vote.stop || asked,
            ..vote
        };
        let units: Vec<_> = self
            .items
            .iter()
            .map(|item| (item.unit(), item.header.anchors))
            .collect();
        segment.write_record(self.rank, (self.step, self.generation), &units, vote);
        match segment.arrive_closed(self.rank, self.step, self.generation) {
            Arrival::In { completed } => {
                self.state = State::Closed;
                // Members without items look at our record.
                segment.wake(On::Items);
                if completed {
                    segment.wake(On::Step);
                }
                Ok(Closed::Closed)
            }
            Arrival::Moved => Ok(Closed::Joined(self.join()?)),
        }
    }

    /// Waits until all members have closed the step.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`], [`ShmError::Evicted`], [`ShmError::Interrupted`].
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
    /// [`ShmError::OutOfOrder`], [`ShmError::Evicted`].
    pub fn poll_reduce(&mut self) -> Result<Option<Reduce>> {
        if self.state == State::Closed && !self.moved() {
            let word = self.segment().step_word();
            let all = (word.step, word.state) == (self.step, StepState::Reduce);
            let agreed = all
                .then(|| self.segment().read_agreed(self.step, self.generation))
                .flatten();
            return Ok(agreed.map(|agreed| {
                self.state = State::Reducing;
                self.agreed = agreed.mask();
                self.stops = agreed.stop();
                Reduce::Agreed(agreed)
            }));
        }
        self.expect("wait_reduce", &[State::Closed])?;
        Ok(self.poll_join()?.map(Reduce::Joined))
    }

    /// g2 and the decision. `healthy`: the collectives are complete and so is the communicator; otherwise no
    /// g2 is made and the group's abort is awaited.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`], [`ShmError::Evicted`], [`ShmError::Interrupted`].
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
    /// [`ShmError::OutOfOrder`].
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
    /// [`ShmError::OutOfOrder`], [`ShmError::Evicted`].
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
        Ok(None)
    }

    /// c2 and c3 of all items, after the optimizer step; then the next step begins.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`], [`ShmError::Stolen`].
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

    // ---- checkpoints and the end ----------------------------------------------------------------------

    /// After [`Drafter::finish_step`] of a step to be saved, before anything else: waits, on the lowest
    /// member, until every member's c2 of that step is done.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`], [`ShmError::Evicted`], [`ShmError::Interrupted`].
    pub fn wait_save(&mut self) -> Result<Save> {
        self.expect("wait_save", &[State::Gathering])?;
        let waiter = self.waiter.clone();
        let members = u64::from(self.segment().step_word().members);
        waiter.wait(On::Items, Activity::WaitSave, members, || self.poll_save())
    }

    fn poll_save(&mut self) -> Result<Option<Save>> {
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
    /// [`ShmError::Evicted`], [`ShmError::Interrupted`].
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

    /// Leaves in good order; a prefetched unit is given back.
    ///
    /// # Errors
    /// [`ShmError::Stolen`].
    pub fn leave(mut self) -> Result<()> {
        let segment = self.segment().clone();
        if let Some(item) = self.prefetched.take() {
            segment.give_back_slot(item.slot, item.generation, self.seat)?;
        }
        segment.set_current(self.seat, None);
        segment.mark_left(self.seat);
        segment.wake_all();
        Ok(())
    }

    // ---- held-out units -------------------------------------------------------------------------------

    /// Waits until every held-out unit is written; their numbers, without quarantined ones. `None`: stop.
    ///
    /// # Errors
    /// [`ShmError::Interrupted`].
    pub fn wait_eval(&mut self) -> Result<Option<Vec<u32>>> {
        let waiter = self.waiter.clone();
        waiter.wait(On::Items, Activity::WaitEval, 0, || {
            let stopped = self.stop().is_some_and(|stop| stop.after == 0);
            let written = self.segment().eval_written();
            Ok(if stopped {
                Some(None)
            } else {
                written.map(Some)
            })
        })
    }

    /// The header and payload of a held-out unit.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] when it is not written; [`ShmError::Corrupt`].
    pub fn eval_view(&self, unit: u32) -> Result<(SlotHeader, View<'_>)> {
        self.segment().eval_view(unit)
    }
}

impl Segment {
    /// The checkpoint of `step` is complete on disk.
    pub fn mark_saved(&self, step: u64) {
        self.control()
            .step
            .saved
            .fetch_max(step, super::atomics::AcqRel);
        self.wake(On::Items);
    }

    /// Step of the last complete checkpoint; 0 = none.
    pub fn saved(&self) -> u64 {
        self.control().step.saved.load(Acquire)
    }

    /// The held-out units once all are written or quarantined.
    pub(crate) fn eval_written(&self) -> Option<Vec<u32>> {
        let mut written = Vec::new();
        for (word, unit) in self.eval_ledger().iter().zip(0..) {
            let quarantined =
                LedgerWord::unpack(word.load(Acquire)).state == UnitState::Quarantined;
            match quarantined {
                true => {}
                false if self.is_published(unit.into(), true) => written.push(unit),
                false => return None,
            }
        }
        Some(written)
    }

    /// The header and payload of a held-out unit.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] when it is not written; [`ShmError::Corrupt`].
    pub fn eval_view(&self, unit: u32) -> Result<(SlotHeader, View<'_>)> {
        if unit >= self.geometry().eval_units || !self.is_published(unit.into(), true) {
            let state = format!("held-out unit {unit} is not written");
            return Err(ShmError::OutOfOrder {
                seat: 0,
                called: "eval_view",
                state,
            });
        }
        let slot = self.geometry().slots + unit;
        let header = self.read_header(slot)?;
        // SAFETY: a published eval slot is kept for good.
        let view = unsafe { view_of(self, slot, &header) };
        Ok((header, checked(self, slot, &header, view)?))
    }
}

/// # Safety
/// The slot keeps its payload for as long as `'a`.
pub(super) unsafe fn view_of<'a>(segment: &'a Segment, slot: u32, header: &SlotHeader) -> View<'a> {
    let payload = Payload::new(segment, slot, header.tokens, header.documents);
    // SAFETY: the caller's.
    unsafe { View::new(payload) }
}

/// The view, once its bytes match the published checksum (when payloads are checked).
fn checked<'a>(
    segment: &Segment,
    slot: u32,
    header: &SlotHeader,
    view: View<'a>,
) -> Result<View<'a>> {
    if !segment.geometry().check_payload {
        return Ok(view);
    }
    let (found, expected) = (view.checksum(), header.payload_sum);
    if found == expected {
        return Ok(view);
    }
    let (what, unit, producer) = ("the payload", header.unit, header.producer);
    Err(ShmError::Corrupt {
        what,
        slot,
        unit,
        producer,
        found,
        expected,
    })
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use crate::shm::testing::{geometry, train_alone};
    use crate::shm::*;

    #[test]
    fn one_target_and_one_drafter_train_every_unit_once() {
        let segment = Segment::create(&geometry(1, 1, 8, 10), RunId::fresh()).unwrap();
        let steps = train_alone(&segment);
        let units: Vec<Vec<u64>> = steps
            .iter()
            .map(|step| step.members[0].units.clone())
            .collect();
        assert_eq!(units, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
        let counts = segment.ledger_counts();
        assert_eq!((counts.done, counts.pending, counts.leased), (10, 0, 0));
        assert_eq!(segment.ring_counts().free, 8);
        assert_eq!(segment.finish_view().taken, 1);
        assert_eq!(segment.unit(9).step, 3);
    }
}
