//! A drafter's handle: take units, close the step, settle it, and the ways in and out of the group.

mod save;
mod settle;
mod take;

use super::atomics::{Acquire, Release};
use super::error::{Result, ShmError};
use super::finish::Stop;
use super::label::{Label, label};
use super::seat::{Activity, LiveSeat};
use super::segment::Segment;
use super::slot::SlotHeader;
use super::step::{Agreed, ranks};
use super::wake::{Interrupt, On, Waiter};
use super::words::{StepState, StepWord, stamp};

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
    /// All units are trained, or the others had agreed to stop before this drafter came: the step will never
    /// be closed by all. Leave.
    Leave,
}

/// The decision on a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It has happened for all: make the optimizer step, then [`Drafter::finish_step`].
    Committed,
    /// It has not happened for anyone: drop the reduced gradient, keep [`Drafter::items`] and train them
    /// again, go back to taking.
    Aborted(Joined),
    /// All units are trained and the step was empty: leave.
    Leave,
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
    /// No member has items in the step.
    empty: bool,
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
            empty: false,
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

    /// The last step that this drafter has committed: the one a final checkpoint is of.
    pub fn committed(&self) -> u64 {
        self.step.saturating_sub(1)
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
        let stopped = self.stop().is_some_and(|stop| stop.after == 0);
        let outside = !member && (stopped || self.segment().drafters_left());
        if outside || self.all_settled() {
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

    /// Whether the group has left this drafter's (step, generation) behind: a collective that is under way can
    /// no longer complete, and is to be given up.
    pub fn has_moved(&self) -> bool {
        self.moved()
    }

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

    pub(super) fn stop(&self) -> Option<Stop> {
        self.segment().stop()
    }

    fn all_settled(&mut self) -> bool {
        let segment = self.segment().clone();
        segment.all_settled(&mut self.settled_floor)
    }

    /// Whether nobody holds anything any more. True once, true for ever, for every member: whoever sees it
    /// leaves from wherever it waits, without the others.
    fn is_over(&mut self) -> bool {
        self.items.is_empty() && self.all_settled()
    }
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
