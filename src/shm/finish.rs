//! The end of a run: an idempotent set of finished targets, one sentinel per drafter, and stop.

use super::atomics::{AcqRel, Acquire, AtomicU64, Relaxed};
use super::label::{Label, label};
use super::seat::SeatState;
use super::segment::Segment;
use super::step::ranks;
use super::wake::On;
use super::words::{MAX_TARGETS, StepState};

/// Why a run is asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// `--max-steps`.
    MaxSteps,
    /// The first Ctrl-C.
    Interrupt,
    /// SIGTERM or SIGUSR1.
    Terminate,
    /// A time limit.
    TimeLimit,
    /// The run cannot go on.
    Failure,
}

impl StopReason {
    const ALL: [StopReason; 5] = [
        StopReason::MaxSteps,
        StopReason::Interrupt,
        StopReason::Terminate,
        StopReason::TimeLimit,
        StopReason::Failure,
    ];
}

/// A requested stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Stop {
    /// The last step to be trained whole; 0: close the step at hand with what it has.
    pub after: u64,
    /// Why.
    pub why: StopReason,
}

impl Stop {
    /// Whether a drafter in `step` closes it at once.
    pub fn closes(self, step: u64) -> bool {
        step > self.after
    }

    /// Whether `step` is the last one.
    pub fn ends(self, step: u64) -> bool {
        step >= self.after
    }

    fn pack(self) -> u64 {
        ((self.why as u64 + 1) << 56) | self.after
    }

    fn unpack(word: u64) -> Option<Self> {
        let why = *StopReason::ALL.get((word >> 56).checked_sub(1)? as usize)?;
        Some(Self {
            after: word & ((1 << 56) - 1),
            why,
        })
    }
}

/// What the finish words say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct FinishView {
    /// Targets that have set their bit.
    pub targets_done: u64,
    /// Targets that will not come back.
    pub given_up: u64,
    /// Sentinels published: 0, or one per drafter.
    pub published: u32,
    /// Ranks that have taken theirs.
    pub taken: u32,
    /// Times that the run went back to a checkpoint.
    pub roll_backs: u32,
    /// A requested stop.
    pub stop: Option<Stop>,
}

const MASK: u64 = (1 << MAX_TARGETS) - 1;

impl Segment {
    /// Number of roll-backs: every finish word carries it.
    pub(crate) fn epoch(&self) -> u64 {
        self.control().finish.done.load(Acquire) >> MAX_TARGETS
    }

    fn all_targets(&self) -> u64 {
        (1 << self.geometry().targets) - 1
    }

    /// Whether the target's bit is set.
    pub(crate) fn finish_bit(&self, target: u32) -> bool {
        self.control().finish.done.load(Acquire) >> target & 1 == 1
    }

    /// Sets a target's bit, which was found due under `epoch`; false when a roll-back came between. The
    /// last finisher publishes the sentinels.
    pub(crate) fn set_finish_bit(&self, target: u32, epoch: u64) -> bool {
        let cell = &self.control().finish.done;
        let full = self.all_targets();
        loop {
            let previous = cell.load(Acquire);
            if previous >> MAX_TARGETS != epoch {
                return false;
            }
            label(Label::FinishBit);
            let next = previous | 1 << target;
            // AcqRel: all that this target published comes before the sentinels; partner: the other bits'
            // CASes, then `take_sentinel`.
            if cell
                .compare_exchange(previous, next, AcqRel, Relaxed)
                .is_ok()
            {
                if previous & MASK != full && next & MASK == full {
                    self.publish_sentinels(epoch);
                }
                return true;
            }
        }
    }

    /// Publishes exactly one sentinel per drafter: a CAS from zero, so that only one publication counts.
    fn publish_sentinels(&self, epoch: u64) {
        let (zero, all) = (
            epoch << 32,
            (epoch << 32) | u64::from(self.geometry().drafters),
        );
        label(Label::Publish);
        // AcqRel: partner: `take_sentinel`'s Acquire.
        let cell = &self.control().finish.published;
        if cell.compare_exchange(zero, all, AcqRel, Relaxed).is_ok() {
            self.wake(On::Items);
        }
    }

    /// All targets have finished and none has published: whoever sees that may.
    pub(crate) fn help_publish(&self) {
        let done = self.control().finish.done.load(Acquire);
        let epoch = done >> MAX_TARGETS;
        if done & MASK == self.all_targets()
            && self.control().finish.published.load(Acquire) == epoch << 32
        {
            self.publish_sentinels(epoch);
        }
    }

    /// Takes this rank's sentinel: no new unit will be made. Taking again is harmless, so that a
    /// replacement learns what its predecessor knew.
    pub(crate) fn take_sentinel(&self, rank: u32) -> bool {
        self.help_publish();
        let finish = &self.control().finish;
        // Acquire: everything published before the last bit is visible; partner: `set_finish_bit`.
        let published = finish.published.load(Acquire);
        if published as u32 == 0 {
            return false;
        }
        loop {
            let taken = finish.taken.load(Acquire);
            if taken >> 32 != published >> 32 {
                return false;
            }
            if taken >> rank & 1 == 1 {
                return true;
            }
            label(Label::Sentinel);
            if finish
                .taken
                .compare_exchange(taken, taken | 1 << rank, AcqRel, Relaxed)
                .is_ok()
            {
                return true;
            }
        }
    }

    /// Targets that will not come back; with `target` among them.
    pub(crate) fn give_up_target(&self, target: u32) -> u64 {
        self.control().finish.given_up.fetch_or(1 << target, AcqRel) | 1 << target
    }

    /// A roll-back: all bits but those of given-up targets are cleared, and so are the sentinels.
    pub(crate) fn clear_finish(&self) {
        let finish = &self.control().finish;
        let next = self.epoch() + 1;
        let set = |cell: &AtomicU64, value| cell.swap(value, AcqRel);
        set(&finish.published, next << 32);
        set(&finish.taken, next << 32);
        // Last: an evaluation that began under the old count cannot set its bit any more.
        set(
            &finish.done,
            (next << MAX_TARGETS) | finish.given_up.load(Acquire),
        );
    }

    /// Asks the run to stop after `after`; `None`: now. An earlier end that was already asked for stays.
    pub fn request_stop(&self, after: Option<u64>, why: StopReason) {
        let wanted = Stop {
            after: after.unwrap_or(0),
            why,
        };
        let cell = &self.control().finish.stop;
        loop {
            let word = cell.load(Acquire);
            if Stop::unpack(word).is_some_and(|stop| stop.after <= wanted.after) {
                return;
            }
            // AcqRel: partner: `stop`'s Acquire.
            if cell
                .compare_exchange(word, wanted.pack(), AcqRel, Relaxed)
                .is_ok()
            {
                self.wake_all();
                return;
            }
        }
    }

    /// The stop that was asked for.
    pub fn stop(&self) -> Option<Stop> {
        Stop::unpack(self.control().finish.stop.load(Acquire))
    }

    /// Whether targets have nothing more to do because the last step of a stop is behind.
    pub(crate) fn stop_reached(&self) -> bool {
        self.stop().is_some_and(|stop| {
            let word = self.step_word();
            stop.closes(word.step) || (word.state == StepState::Committed && stop.ends(word.step))
        })
    }

    /// Whether there are members and all of them have left in good order.
    pub fn drafters_left(&self) -> bool {
        let members = self.step_word().members;
        let left = |rank| self.seat_state(self.geometry().drafter_seat(rank)) == SeatState::Left;
        members != 0 && ranks(members).all(left)
    }

    /// What the finish words say.
    pub fn finish_view(&self) -> FinishView {
        let finish = &self.control().finish;
        let done = finish.done.load(Acquire);
        FinishView {
            targets_done: done & MASK,
            given_up: finish.given_up.load(Acquire),
            published: finish.published.load(Acquire) as u32,
            taken: finish.taken.load(Acquire) as u32,
            roll_backs: (done >> MAX_TARGETS) as u32,
            stop: self.stop(),
        }
    }
}
