//! The whole protocol at once: targets, slots, the ledger, steps, the budget, prefetch, finish with its
//! sentinels, stop, checkpoints, quarantine, evaluation units, replacements, and the death of all drafters.
//!
//! What the model leaves out, and why nothing is lost by it:
//!
//! - *Slot generations and sequence numbers.* A reader that checks the word before and after the header sees
//!   one moment of the slot, so reading a slot is one access; a claim that would fail on a generation fails
//!   here on the unit. A drafter may take any READY slot, not only the oldest: more runs, not fewer.
//! - *Wake-ups.* A waiting process looks again at any time, as with a futex that has a timeout.
//! - *Scans that find nothing.* Recovery goes straight to the next slot or lease of the dead member: nobody
//!   else can make another one.
//! - *Copies, compute and collectives.* They touch no shared word. A collective may end well even though a
//!   member died inside it, or never end until the abort.
//! - *Snapshot and write of a checkpoint* are one access: dying between them is dying before both.

mod canon;
mod drafter;
mod launcher;
mod members;
mod mistakes;
mod rules;
mod sound;
mod state;
mod target;

use std::ops::Range;

use crate::bits::{Reader, Writer};
use crate::explore::{Model, Steps, label};
use members::{Drafter, DrafterLine, LauncherLine, Target, TargetLine};
use state::{MAX_UNITS, Mask, NONE, State, bit};

/// When c0t is made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tags {
    /// Right after the slot is taken for the step.
    AtOnce,
    /// For all items when the step is closed.
    AtClose,
}

/// How the items that survivors hold get into the budget of a new generation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Recount {
    /// r5 counts the slots tagged with the step and stamps each with the new generation. Who joins keeps what
    /// is stamped and reserves the rest again: it was not yet tagged when r5 passed.
    Stamped,
    /// r5 is left out: who joins reserves all its items again.
    ByTheHolder,
    /// To the letter of the text: r5 counts the tagged slots, who joins keeps its items.
    Unstamped,
}

/// What becomes of items that must be reserved again when the budget is full already.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Leftover {
    /// They stay in the step, which may then exceed its budget once.
    Exceed,
    /// One is kept, like a prefetched unit; the others are made READY again.
    HandBack,
    /// They are kept for the next step.
    Keep,
}

/// How a drafter leaves that has made its g1 of an empty step when all units turn out to be settled.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Leave {
    /// From wherever it waits: all others do the same.
    FromAnyWait,
    /// From GATHER only, by a swap that takes its bit back.
    TakesG1Back,
}

/// Sizes and bounds of one exploration.
#[derive(Clone, Copy, Debug)]
struct Config {
    /// 0: all units lie in slots from the start.
    targets: usize,
    drafters: usize,
    /// Slots of the ring.
    slots: usize,
    /// Training units.
    units: usize,
    /// Evaluation units; each has a slot of its own and the lowest unit numbers.
    evaluation: usize,
    /// Anchors per unit, evaluation units included.
    anchors: [u8; MAX_UNITS],
    /// Anchors per step.
    batch: u8,
    prefetch: bool,
    /// A checkpoint after every step; without, the last drafter with weights is never killed.
    checkpoints: bool,
    /// A step without items is followed by a checkpoint too.
    saves_empty_steps: bool,
    /// A stop may be asked at any time.
    stop: bool,
    /// Deaths that quarantine a unit; 0 is never.
    quarantine: u8,
    kills: u8,
    /// Replacements of dead members.
    respawns: u8,
    /// Recoveries that the launcher begins again.
    reruns: u8,
    tags: Tags,
    recount: Recount,
    leftover: Leftover,
    leave: Leave,
    mutant: Option<Mutant>,
}

impl Config {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    fn all_units(&self) -> usize {
        self.evaluation + self.units
    }

    fn all_slots(&self) -> usize {
        self.slots + self.evaluation
    }

    fn all_targets(&self) -> Mask {
        bit(self.targets) - 1
    }

    fn training_units(&self) -> Range<usize> {
        self.evaluation..self.all_units()
    }

    /// The slots that may hold `unit`.
    fn slots_for(&self, unit: usize) -> Range<usize> {
        match unit < self.evaluation {
            true => self.slots + unit..self.slots + unit + 1,
            false => 0..self.slots,
        }
    }

    fn anchors_of(&self, unit: u8) -> u8 {
        self.anchors[unit as usize]
    }
}

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutant {
    /// p3 before p2.
    PublishBeforePayload,
    /// p2 leaves the tag of the slot's last use.
    TagOutlivesTheSlot,
    /// c3 before c2.
    FreeBeforeDone,
    /// r2 asks neither the ledger nor the tag.
    RedeliverWithoutLedger,
    /// r3 does not look in the slots.
    RequeueWithoutLooking,
    /// r3 stores PENDING whatever the word has become.
    RequeueByStore,
    /// r1 is left out.
    NoR1,
    /// c0t is left out.
    NoTag,
    /// A prefetched slot is tagged with the step under way.
    PrefetchIsTagged,
    /// r2 redelivers a slot with its tag.
    RedeliveryKeepsTag,
    /// A slot that found no room in the new generation keeps its tag.
    LeftoverKeepsTag,
    /// r2 before r0.
    RecoveryBeforeR0,
    /// r6 before r2.
    R6BeforeR2,
    /// g1 before the seat is written.
    RecordAfterG1,
    /// r6 publishes the old generation.
    GenerationNotRaised,
    /// After g2 a drafter looks for an abort before it looks for the commit.
    AbortTestedFirst,
    /// A lost c0 does not give its anchors back.
    LostReservationIsKept,
    /// A lost c0 gives its anchors back to whatever budget stands.
    GiveBackToAnyGeneration,
    /// r5 carries the anchors of the old generation over.
    BudgetNotReset,
    /// A replacement joins by r0 and r6 alone.
    GrowthWithoutR5,
    /// A prefetched unit is an item of the next step without a reservation.
    PrefetchIsNotReserved,
    /// A drafter closes without items while nobody has any.
    CloseWithoutItems,
    /// A drafter that has made its g1 does not look whether all units are settled.
    StaysInGather,
    /// It leaves from GATHER without taking its g1 back, but not from REDUCE.
    LeavesItsG1,
    /// A target finishes while a unit is only LEASED.
    FinishCountsLeased,
    /// A drafter leaves once it has its sentinel and finds nothing to take.
    LeavesOnSentinel,
    /// Sentinels are added instead of swapped from zero.
    SentinelsAreAdded,
    /// The last finisher is the only one that publishes.
    NobodyHelpsToPublish,
    /// Sentinels are items of a queue; who has taken one remembers it itself.
    SentinelInOwnMemory,
    /// A finish bit is set although a roll-back came since the scan.
    FinishWithoutEpoch,
    /// Sentinels are published although a roll-back came since the last finish bit.
    PublishWithoutEpoch,
    /// A roll-back clears finish before it puts units back.
    FinishClearedFirst,
    /// A roll-back clears the bits of targets that were given up.
    RollForgetsGivenUp,
    /// A roll-back leaves the sentinels.
    SentinelsOutliveRoll,
    /// A roll-back leaves what the dead seats showed of their c2.
    C2DoneOutlivesRoll,
    /// A newcomer's seat shows no c2 done.
    NewcomerOwesC2,
    /// A newcomer that leaves without weights stays a member.
    NewcomerLeavesAsMember,
    /// A newcomer takes part without waiting for weights.
    NewcomerSkipsWeights,
    /// A newcomer takes the weights of a member that has not joined its generation.
    WeightsOfAnyMember,
    /// A drafter stops when it is asked itself, not when a seat of the step asks.
    StopNotAgreed,
    /// A checkpoint does not wait for the others' c2.
    CheckpointBeforeC2,
    /// A drafter leaves before the last checkpoint is written.
    LeaveBeforeCheckpoint,
    /// A recovery that begins again counts its death again.
    RerunCountsAgain,
    /// A dead target's death is counted before r3 has looked in the slots.
    QuarantinesPublishedUnit,
    /// Drafters do not wait for the evaluation units.
    StartsEarly,
    /// r3 looks for an evaluation unit among the slots of the ring only.
    EvaluationSlotsOverlooked,
    /// Drafters wait for a quarantined evaluation unit.
    EvaluationUnitMustBeWritten,
}

impl Model for Config {
    type State = State;
    type Key = [u64; 6];

    fn initial(&self) -> State {
        State::initial(self)
    }

    fn pack(&self, state: &State) -> Self::Key {
        let mut state = self.at_shared_lines(state);
        state.sort_targets(self);
        state.sort_slots(self);
        self.write(state)
    }

    fn unpack(&self, key: &Self::Key) -> State {
        let mut state = State::initial(self);
        state.visit(self, &mut Reader::new(key));
        state
    }

    fn steps(&self, state: &State, out: &mut Steps<State>) {
        if state.launcher.line == LauncherLine::Failed {
            return;
        }
        for seat in 0..self.targets {
            target::steps(self, state, seat, out);
        }
        for seat in 0..self.drafters {
            drafter::steps(self, state, seat, out);
        }
        launcher::steps(self, state, out);
        if state.kills < self.kills {
            self.kills(state, out);
        }
        if self.stop && !state.stop_asked {
            let mut next = state.clone();
            next.stop_asked = true;
            out.fault(label("user ", 0, "asks to stop", None), next);
        }
    }

    fn check(&self, state: &State) -> Result<(), String> {
        rules::check(self, state)
    }

    fn is_right_end(&self, state: &State) -> bool {
        rules::is_right_end(self, state)
    }
}

impl Config {
    /// `state` after every access that touches no shared word, without what nobody can read.
    fn at_shared_lines(&self, state: &State) -> State {
        let mut state = state.clone();
        for seat in 0..self.targets {
            target::skip_local_lines(self, &mut state, seat);
        }
        for seat in 0..self.drafters {
            drafter::skip_local_lines(self, &mut state, seat);
        }
        launcher::skip_local_lines(self, &mut state);
        state.forget_the_unreadable(self);
        state
    }

    fn write(&self, mut state: State) -> [u64; 6] {
        let mut writer = Writer::new();
        state.visit(self, &mut writer);
        writer.finish()
    }

    /// Any living member may be killed before its next access.
    fn kills(&self, state: &State, out: &mut Steps<State>) {
        for seat in 0..self.targets {
            let target = &state.targets[seat];
            if target.is_alive() {
                let mut next = state.clone();
                next.targets[seat] = Target {
                    unit: target.current_item(),
                    ..Target::at(TargetLine::Dead)
                };
                self.kill(next, "target", seat, target.current_item(), out);
            }
        }
        let with_weights = state.drafters[..self.drafters]
            .iter()
            .filter(|drafter| drafter.has_weights())
            .count();
        for seat in 0..self.drafters {
            let drafter = &state.drafters[seat];
            let spared = !self.checkpoints && drafter.has_weights() && with_weights == 1;
            if drafter.is_alive() && drafter.line != DrafterLine::Left && !spared {
                let item = self.current_item(drafter);
                let mut next = state.clone();
                next.drafters[seat].end(DrafterLine::Dead);
                next.drafters[seat].unit = item;
                self.kill(next, "drafter", seat, item, out);
            }
        }
    }

    fn kill(
        &self,
        mut next: State,
        who: &'static str,
        seat: usize,
        item: u8,
        out: &mut Steps<State>,
    ) {
        next.kills += 1;
        if item != NONE && self.quarantine > 0 {
            next.ledger[item as usize].blamed += 1;
        }
        out.fault(label(who, seat, "is killed", None), next);
    }

    /// A drafter's seat names a unit from after c0 until its micro-step is over.
    fn current_item(&self, drafter: &Drafter) -> u8 {
        match drafter.line {
            DrafterLine::C1 if self.quarantine > 0 => drafter.unit,
            _ => NONE,
        }
    }
}
