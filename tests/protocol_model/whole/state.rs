//! What the whole protocol's state consists of, and how it is packed.

use super::{Config, Mutant};
use crate::bits::Codec;

/// Most units of any configuration, evaluation units included.
pub const MAX_UNITS: usize = 4;
/// Most slots of any configuration, those of the evaluation region included.
pub const MAX_SLOTS: usize = 5;
/// Most targets of any configuration.
pub const MAX_TARGETS: usize = 2;
/// Most drafters of any configuration.
pub const MAX_DRAFTERS: usize = 3;
/// No unit, or no slot.
pub const NONE: u8 = 7;

/// A set of units, slots, targets or drafters: bit `i` for number `i`.
pub type Mask = u8;

/// The mask of one number.
pub fn bit(number: usize) -> Mask {
    1 << number
}

/// Whether `mask` holds `number`.
pub fn has(mask: Mask, number: usize) -> bool {
    mask & bit(number) != 0
}

/// State of a unit in the ledger.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UnitState {
    /// To be prefilled.
    Pending,
    /// Leased by target `by`.
    Leased,
    /// Trained in step `by`.
    Done,
    /// Left out for good.
    Quarantined,
}

/// One word of the ledger.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Word {
    /// State.
    pub state: UnitState,
    /// The target of a lease, or the step of a DONE.
    pub by: u8,
    /// Deaths counted against the unit.
    pub deaths: u8,
    /// Not in the protocol: deaths that truly had this unit as their current item.
    pub blamed: u8,
}

/// Phase of a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// Nobody's.
    Free,
    /// Being written by its owner, a target.
    Filling,
    /// Published.
    Ready,
    /// Taken by its owner, a drafter.
    Held,
}

/// One slot: its word and its header. A generation is not needed: who reads the word, the header and the word
/// again sees one moment of the slot, and a compare-and-swap that fails on another generation is one that
/// fails on another unit here, since no unit is published twice while a drafter lives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    /// Phase.
    pub phase: Phase,
    /// Target in Filling, drafter in Held.
    pub owner: u8,
    /// Unit of the header.
    pub unit: u8,
    /// Step tag; 0 is none.
    pub tag: u8,
    /// Generation into whose budget r5 counted the slot; 0 is none.
    pub counted: u8,
    /// Header and payload are complete.
    pub written: bool,
}

/// A slot without an owner and content.
pub const FREE: Slot = Slot {
    phase: Phase::Free,
    owner: 0,
    unit: NONE,
    tag: 0,
    counted: 0,
    written: false,
};

/// The line that a target comes to next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TargetLine {
    /// Looks for a PENDING unit.
    P0,
    P1,
    P2,
    P3,
    /// Has published; wakes the drafters and clears its current item.
    P4,
    /// Looks at one unit after the other: will any of them still need a target?
    Scan,
    /// Sets its finish bit.
    Finish,
    /// Was the last to finish.
    Publish,
    /// Has finished; stays until the drafters have left.
    Parked,
    /// Killed, not yet recovered; `unit` is its seat's current item.
    Dead,
    /// Given up.
    Gone,
}

const TARGET_LINES: [TargetLine; 11] = [
    TargetLine::P0,
    TargetLine::P1,
    TargetLine::P2,
    TargetLine::P3,
    TargetLine::P4,
    TargetLine::Scan,
    TargetLine::Finish,
    TargetLine::Publish,
    TargetLine::Parked,
    TargetLine::Dead,
    TargetLine::Gone,
];

/// A target's own memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Next line.
    pub line: TargetLine,
    /// The unit it works on, or the one it scans.
    pub unit: u8,
    /// The slot it fills.
    pub slot: u8,
    /// Count of roll-backs that it read before scanning.
    pub epoch: u8,
}

/// The line that a drafter comes to next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DrafterLine {
    /// Waits for the evaluation units.
    Start,
    /// Takes, closes, or finds that all is done.
    Take,
    /// Has reserved the anchors of `unit` in `slot`.
    C0,
    /// Has lost c0 and gives the anchors back.
    GiveBack,
    /// Tags the slot just taken.
    C0t,
    C1,
    /// Writes the tags (c0t) and hands back what found no room in the step.
    Tag,
    /// Writes its seat.
    Record,
    G1,
    /// Waits for REDUCE, then reads the seats and reduces.
    Gather,
    G2,
    /// Has arrived at g2 or failed to; asks the step word what became of the step.
    Test,
    C2,
    C3,
    /// All of the step's c2 are made; says so in its seat.
    C2Done,
    /// The stop was agreed for the step just committed; writes it down.
    Stop,
    /// Waits for a new generation.
    Join,
    /// Has joined; puts the items that r5 did not count into the budget, whatever it says.
    Recount,
    /// Waits for the last checkpoint, then leaves.
    Leaving,
    /// Has left.
    Left,
    /// A replacement without weights.
    Boot,
    /// Killed, not yet recovered; `unit` is its seat's current item.
    Dead,
    /// Not replaced so far.
    Gone,
}

const DRAFTER_LINES: [DrafterLine; 23] = [
    DrafterLine::Start,
    DrafterLine::Take,
    DrafterLine::C0,
    DrafterLine::GiveBack,
    DrafterLine::C0t,
    DrafterLine::C1,
    DrafterLine::Tag,
    DrafterLine::Record,
    DrafterLine::G1,
    DrafterLine::Gather,
    DrafterLine::G2,
    DrafterLine::Test,
    DrafterLine::C2,
    DrafterLine::C3,
    DrafterLine::C2Done,
    DrafterLine::Stop,
    DrafterLine::Join,
    DrafterLine::Recount,
    DrafterLine::Leaving,
    DrafterLine::Left,
    DrafterLine::Boot,
    DrafterLine::Dead,
    DrafterLine::Gone,
];

/// What a drafter's seat shows the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seat {
    /// Step that the next three belong to.
    pub step: u8,
    /// Generation that they belong to.
    pub generation: u8,
    /// Units of its items.
    pub units: Mask,
    /// Asks for a stop after this step.
    pub stop: bool,
    /// Every c2 of the steps up to this one is made.
    pub c2_done: u8,
}

/// A drafter's own memory and its seat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drafter {
    /// Next line.
    pub line: DrafterLine,
    /// The step it works on.
    pub step: u8,
    /// The generation it has joined.
    pub generation: u8,
    /// Slots whose anchors are reserved for (step, gen).
    pub items: Mask,
    /// Slots it holds without a reservation: prefetched, or left from an aborted generation.
    pub spare: Mask,
    /// Items that are not in the budget of the new generation yet.
    pub uncounted: Mask,
    /// The slot in hand.
    pub slot: u8,
    /// The unit in hand.
    pub unit: u8,
    /// Units in the reduced gradient.
    pub reduced: Mask,
    /// A stop was agreed for this step.
    pub stopping: bool,
    /// Units whose gradient is in its weights.
    pub weights: Mask,
    /// The last step that changed them.
    pub trained: u8,
    /// Only with [`Mutant::SentinelInOwnMemory`]: it has taken a sentinel.
    pub drained: bool,
    /// Its seat.
    pub seat: Seat,
}

/// State of the step word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepState {
    Gather,
    Reduce,
    Committed,
    Aborted,
}

/// The step word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepWord {
    pub step: u8,
    pub generation: u8,
    pub state: StepState,
    pub mask: Mask,
    pub members: Mask,
}

/// The budget word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    pub step: u8,
    pub generation: u8,
    pub anchors: u8,
}

/// The finish group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finish {
    /// Count of roll-backs; every change of the next three names it.
    pub epoch: u8,
    /// Targets that have finished.
    pub done: Mask,
    /// Sentinels published.
    pub published: u8,
    /// Drafters that have taken theirs.
    pub taken: Mask,
    /// Stop after this step; 0 is none.
    pub stop: u8,
}

/// The line that the launcher comes to next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LauncherLine {
    Idle,
    /// A dead target's slots.
    R1,
    /// Reads the ledger word of `at`.
    R3,
    /// Looks in the slots for unit `at`.
    R3Look,
    /// No slot holds unit `at`: counts the death and puts the unit back.
    R3Swap,
    /// Gives the target up or lets it be replaced.
    R4,
    /// The last finish bit was the launcher's own.
    R4Publish,
    R0,
    /// A dead drafter's slots.
    R2,
    /// Counts survivors' slots into the new budget.
    R5,
    /// Writes the budget.
    R5Budget,
    R6,
    /// Puts back the units trained after the last checkpoint.
    Roll,
    /// Clears finish.
    RollFinish,
    /// Writes the step word for new drafters.
    RollStep,
    /// The run has ended as failed.
    Failed,
}

const LAUNCHER_LINES: [LauncherLine; 16] = [
    LauncherLine::Idle,
    LauncherLine::R1,
    LauncherLine::R3,
    LauncherLine::R3Look,
    LauncherLine::R3Swap,
    LauncherLine::R4,
    LauncherLine::R4Publish,
    LauncherLine::R0,
    LauncherLine::R2,
    LauncherLine::R5,
    LauncherLine::R5Budget,
    LauncherLine::R6,
    LauncherLine::Roll,
    LauncherLine::RollFinish,
    LauncherLine::RollStep,
    LauncherLine::Failed,
];

/// The launcher's own memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launcher {
    /// Next line.
    pub line: LauncherLine,
    /// The seat it recovers or fills.
    pub seat: u8,
    /// The unit it has come to.
    pub at: u8,
    /// Slots that r5 has looked at.
    pub looked_at: Mask,
    /// Anchors counted so far by r5.
    pub anchors: u8,
    /// This recovery adds the seat to the group instead of removing it.
    pub grows: bool,
    /// The death was counted against its unit.
    pub counted: bool,
}

impl Launcher {
    /// Whether `seat` is a target's.
    fn is_about_a_target(&self) -> bool {
        matches!(
            self.line,
            LauncherLine::R1
                | LauncherLine::R3
                | LauncherLine::R3Look
                | LauncherLine::R3Swap
                | LauncherLine::R4
        )
    }
}

/// At rest.
pub const IDLE: Launcher = Launcher {
    line: LauncherLine::Idle,
    seat: 0,
    at: 0,
    looked_at: 0,
    anchors: 0,
    grows: false,
    counted: false,
};

/// The last checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoint {
    /// Its step; 0 is the start of the run.
    pub step: u8,
    /// Units in its weights.
    pub units: Mask,
}

/// Everything: shared memory, each member's own memory, and the counts that bound the exploration.
#[derive(Clone, Debug)]
pub struct State {
    pub ledger: [Word; MAX_UNITS],
    pub slots: [Slot; MAX_SLOTS],
    pub targets: [Target; MAX_TARGETS],
    pub drafters: [Drafter; MAX_DRAFTERS],
    pub word: StepWord,
    pub budget: Budget,
    pub finish: Finish,
    pub launcher: Launcher,
    pub checkpoint: Checkpoint,
    /// A stop was asked from outside.
    pub stop_asked: bool,
    pub kills: u8,
    pub respawns: u8,
    pub reruns: u8,
}

impl State {
    /// Before the first access.
    pub fn initial(config: &Config) -> Self {
        let word = Word {
            state: UnitState::Pending,
            by: 0,
            deaths: 0,
            blamed: 0,
        };
        let mut state = Self {
            ledger: [word; MAX_UNITS],
            slots: [FREE; MAX_SLOTS],
            targets: [Target::starting(); MAX_TARGETS],
            drafters: [Drafter::starting(); MAX_DRAFTERS],
            word: StepWord {
                step: 1,
                generation: 1,
                state: StepState::Gather,
                mask: 0,
                members: bit(config.drafters) - 1,
            },
            budget: Budget {
                step: 1,
                generation: 1,
                anchors: 0,
            },
            finish: Finish {
                epoch: 0,
                done: 0,
                published: 0,
                taken: 0,
                stop: 0,
            },
            launcher: IDLE,
            checkpoint: Checkpoint { step: 0, units: 0 },
            stop_asked: false,
            kills: 0,
            respawns: 0,
            reruns: 0,
        };
        if config.targets == 0 {
            state.prefill_everything(config);
        }
        state
    }

    /// Without targets, all units lie in slots from the start and the sentinels are published.
    fn prefill_everything(&mut self, config: &Config) {
        for unit in 0..config.units {
            self.ledger[unit].state = UnitState::Leased;
            self.slots[unit] = Slot {
                phase: Phase::Ready,
                unit: unit as u8,
                written: true,
                ..FREE
            };
        }
        self.finish.published = config.drafters as u8;
    }

    /// Visits every field that a later access can read.
    pub fn visit(&mut self, config: &Config, codec: &mut impl Codec) {
        for word in &mut self.ledger[..config.all_units()] {
            word.visit(config, codec);
        }
        for slot in &mut self.slots[..config.all_slots()] {
            slot.visit(codec);
        }
        for target in &mut self.targets[..config.targets] {
            codec.choice(&mut target.line, &TARGET_LINES);
            codec.bits(&mut target.unit, 3);
            codec.bits(&mut target.slot, 3);
            codec.bits(&mut target.epoch, 2);
        }
        for drafter in &mut self.drafters[..config.drafters] {
            drafter.visit(codec);
        }
        self.word.visit(codec);
        codec.bits(&mut self.budget.step, 3);
        codec.bits(&mut self.budget.generation, 3);
        codec.bits(&mut self.budget.anchors, 3);
        codec.bits(&mut self.finish.epoch, 2);
        codec.bits(&mut self.finish.done, 2);
        codec.bits(&mut self.finish.published, 3);
        codec.bits(&mut self.finish.taken, 3);
        codec.bits(&mut self.finish.stop, 3);
        codec.choice(&mut self.launcher.line, &LAUNCHER_LINES);
        codec.bits(&mut self.launcher.seat, 2);
        codec.bits(&mut self.launcher.at, 3);
        codec.bits(&mut self.launcher.looked_at, 4);
        codec.bits(&mut self.launcher.anchors, 3);
        codec.flag(&mut self.launcher.grows);
        codec.flag(&mut self.launcher.counted);
        codec.bits(&mut self.checkpoint.step, 3);
        codec.bits(&mut self.checkpoint.units, 4);
        codec.flag(&mut self.stop_asked);
        codec.bits(&mut self.kills, 2);
        codec.bits(&mut self.respawns, 2);
        codec.bits(&mut self.reruns, 1);
    }

    /// Clears what no later access can read, so that states which differ only there are one.
    pub fn forget_the_unreadable(&mut self, config: &Config) {
        let passed = (self.word.generation, self.word.step);
        for slot in &mut self.slots {
            if slot.phase == Phase::Free {
                let tag = slot.tag;
                *slot = FREE;
                if config.is(Mutant::TagOutlivesTheSlot) {
                    slot.tag = tag;
                }
            }
            if slot.counted < self.word.generation {
                slot.counted = 0;
            }
        }
        let mut oldest = passed;
        for drafter in &mut self.drafters[..config.drafters] {
            // A stamp is compared with the word's pair only. Generations never fall, and steps never fall
            // within one, so a stamp that has been passed stays passed.
            let seat = &mut drafter.seat;
            if (seat.generation, seat.step) < passed {
                *seat = Seat {
                    c2_done: seat.c2_done,
                    ..EMPTY_SEAT
                };
            }
            if drafter.has_weights() && drafter.line != DrafterLine::Left {
                oldest = oldest.min((drafter.generation, drafter.step));
            }
        }
        // A budget older than every drafter is replaced by the next reservation, whatever it says.
        if (self.budget.generation, self.budget.step) < oldest {
            self.budget = Budget {
                step: 0,
                generation: 0,
                anchors: 0,
            };
        }
        for word in &mut self.ledger {
            // Steps are compared with this checkpoint's or a later one's.
            if word.state == UnitState::Done {
                word.by = word.by.max(self.checkpoint.step);
            }
        }
    }

    /// Makes one of all states that differ only in which slot of the ring is which.
    ///
    /// Nobody prefers a slot for its number: a free one is as good as another, and whoever has a choice among
    /// slots with units goes by the unit (or tries all).
    pub fn sort_slots(&mut self, config: &Config) {
        let mut order: [usize; MAX_SLOTS] = std::array::from_fn(|slot| slot);
        let order = &mut order[..config.slots];
        order.sort_by_key(|slot| {
            let slot = &self.slots[*slot];
            (slot.phase as u8, slot.unit, slot.owner, slot.tag)
        });
        let slots = self.slots;
        let mut place = [NONE; NONE as usize + 1];
        for (new, old) in order.iter().enumerate() {
            self.slots[new] = slots[*old];
            place[*old] = new as u8;
        }
        for slot in config.slots..config.all_slots() {
            place[slot] = slot as u8;
        }
        let moved = |mask: Mask| members_of(mask).map(|slot| bit(place[slot] as usize)).sum();
        for target in &mut self.targets[..config.targets] {
            target.slot = place[target.slot as usize];
        }
        for drafter in &mut self.drafters[..config.drafters] {
            drafter.slot = place[drafter.slot as usize];
            drafter.items = moved(drafter.items);
            drafter.spare = moved(drafter.spare);
            drafter.uncounted = moved(drafter.uncounted);
        }
        self.launcher.looked_at = moved(self.launcher.looked_at);
    }

    /// Makes one of all states that differ only in which of two targets is which: all targets are alike.
    pub fn sort_targets(&mut self, config: &Config) {
        if config.targets == 2 && self.all_about_target(0) > self.all_about_target(1) {
            self.targets.swap(0, 1);
            let done = self.finish.done;
            self.finish.done = done >> 1 | (done & 1) << 1;
            for word in &mut self.ledger {
                if word.state == UnitState::Leased {
                    word.by ^= 1;
                }
            }
            for slot in &mut self.slots {
                if slot.phase == Phase::Filling {
                    slot.owner ^= 1;
                }
            }
            if self.launcher.is_about_a_target() {
                self.launcher.seat ^= 1;
            }
        }
    }

    /// Everything that names target `seat`. It fills one slot at most.
    fn all_about_target(&self, seat: usize) -> impl Ord + use<> {
        let Target {
            line, unit, epoch, ..
        } = self.targets[seat];
        let leases = |word: &Word| word.state == UnitState::Leased && word.by == seat as u8;
        let fills = |slot: &Slot| slot.is_with(Phase::Filling, seat).then_some(slot.written);
        (
            (line as u8, unit, epoch),
            has(self.finish.done, seat),
            self.ledger.each_ref().map(leases),
            self.slots.each_ref().map(fills).into_iter().max(),
            self.launcher.is_about_a_target() && self.launcher.seat == seat as u8,
        )
    }

    /// The first of `slots` by the number of its unit.
    pub fn first_by_unit(&self, slots: impl Iterator<Item = usize>) -> Option<usize> {
        slots.min_by_key(|slot| self.slots[*slot].unit)
    }
}

/// The numbers in a mask, from the lowest.
pub fn members_of(mask: Mask) -> impl Iterator<Item = usize> {
    (0..8).filter(move |number| has(mask, *number))
}

const EMPTY_SEAT: Seat = Seat {
    step: 0,
    generation: 0,
    units: 0,
    stop: false,
    c2_done: 0,
};

impl Word {
    fn visit(&mut self, config: &Config, codec: &mut impl Codec) {
        codec.choice(
            &mut self.state,
            &[
                UnitState::Pending,
                UnitState::Leased,
                UnitState::Done,
                UnitState::Quarantined,
            ],
        );
        codec.bits(&mut self.by, 3);
        if config.quarantine > 0 {
            codec.bits(&mut self.deaths, 2);
            codec.bits(&mut self.blamed, 2);
        }
    }

    /// Needs no more work.
    pub fn is_settled(&self) -> bool {
        matches!(self.state, UnitState::Done | UnitState::Quarantined)
    }
}

impl Slot {
    fn visit(&mut self, codec: &mut impl Codec) {
        codec.choice(
            &mut self.phase,
            &[Phase::Free, Phase::Filling, Phase::Ready, Phase::Held],
        );
        codec.bits(&mut self.owner, 2);
        codec.bits(&mut self.unit, 3);
        codec.bits(&mut self.tag, 3);
        codec.bits(&mut self.counted, 3);
        codec.flag(&mut self.written);
    }

    /// Whether the slot holds `unit` where a drafter can get at it.
    pub fn carries(&self, unit: usize) -> bool {
        matches!(self.phase, Phase::Ready | Phase::Held) && self.unit == unit as u8
    }

    /// Whether `owner` has it in `phase`.
    pub fn is_with(&self, phase: Phase, owner: usize) -> bool {
        self.phase == phase && self.owner == owner as u8
    }
}

impl Target {
    /// Looking for work.
    pub fn starting() -> Self {
        Self::at(TargetLine::P0)
    }

    /// At `line`, with nothing in hand.
    pub fn at(line: TargetLine) -> Self {
        Self {
            line,
            unit: NONE,
            slot: NONE,
            epoch: 0,
        }
    }

    /// Neither killed nor given up.
    pub fn is_alive(&self) -> bool {
        !matches!(self.line, TargetLine::Dead | TargetLine::Gone)
    }

    /// Works, or will once it has been recovered.
    pub fn may_work(&self) -> bool {
        self.line != TargetLine::Gone
    }

    /// The unit that its seat names: from p0 until after p3.
    pub fn current_item(&self) -> u8 {
        match self.line {
            TargetLine::P1 | TargetLine::P2 | TargetLine::P3 | TargetLine::P4 => self.unit,
            _ => NONE,
        }
    }
}

impl Drafter {
    fn starting() -> Self {
        Self {
            line: DrafterLine::Start,
            step: 1,
            generation: 1,
            items: 0,
            spare: 0,
            uncounted: 0,
            slot: NONE,
            unit: NONE,
            reduced: 0,
            stopping: false,
            weights: 0,
            trained: 0,
            drained: false,
            seat: EMPTY_SEAT,
        }
    }

    /// Begins the word's step in `line`, without weights, in a seat that owes no c2.
    pub fn begin(&mut self, line: DrafterLine, word: &StepWord) {
        *self = Self {
            line,
            step: word.step,
            generation: word.generation,
            ..Self::starting()
        };
    }

    /// Ends a member in `line`; what its seat shows stays readable.
    pub fn end(&mut self, line: DrafterLine) {
        *self = Self {
            line,
            step: 0,
            generation: 0,
            seat: self.seat,
            ..Self::starting()
        };
    }

    fn visit(&mut self, codec: &mut impl Codec) {
        codec.choice(&mut self.line, &DRAFTER_LINES);
        codec.bits(&mut self.step, 3);
        codec.bits(&mut self.generation, 3);
        codec.bits(&mut self.items, 4);
        codec.bits(&mut self.spare, 4);
        codec.bits(&mut self.uncounted, 4);
        codec.bits(&mut self.slot, 3);
        codec.bits(&mut self.unit, 3);
        codec.bits(&mut self.reduced, 4);
        codec.flag(&mut self.stopping);
        codec.bits(&mut self.weights, 4);
        codec.bits(&mut self.trained, 3);
        codec.flag(&mut self.drained);
        codec.bits(&mut self.seat.step, 3);
        codec.bits(&mut self.seat.generation, 3);
        codec.bits(&mut self.seat.units, 4);
        codec.flag(&mut self.seat.stop);
        codec.bits(&mut self.seat.c2_done, 3);
    }

    /// Neither killed nor away; has left counts as alive.
    pub fn is_alive(&self) -> bool {
        !matches!(self.line, DrafterLine::Dead | DrafterLine::Gone)
    }

    /// Alive, and holding the model.
    pub fn has_weights(&self) -> bool {
        self.is_alive() && self.line != DrafterLine::Boot
    }

    /// The last step whose commit it has seen.
    pub fn applied(&self) -> u8 {
        match self.line {
            DrafterLine::C2 | DrafterLine::C3 | DrafterLine::C2Done => self.step,
            _ => self.step - 1,
        }
    }
}

impl StepWord {
    fn visit(&mut self, codec: &mut impl Codec) {
        codec.bits(&mut self.step, 3);
        codec.bits(&mut self.generation, 3);
        codec.choice(
            &mut self.state,
            &[
                StepState::Gather,
                StepState::Reduce,
                StepState::Committed,
                StepState::Aborted,
            ],
        );
        codec.bits(&mut self.mask, 3);
        codec.bits(&mut self.members, 3);
    }

    /// Whether it is at (step, gen) in `state`.
    pub fn is_at(&self, step: u8, generation: u8, state: StepState) -> bool {
        (self.step, self.generation, self.state) == (step, generation, state)
    }
}
