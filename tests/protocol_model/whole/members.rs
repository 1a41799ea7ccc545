//! What each member keeps for itself, and what its seat shows the others.

use super::state::{Mask, NONE, StepWord};
use crate::bits::Codec;

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
    /// Visits every field.
    pub fn visit(&mut self, codec: &mut impl Codec) {
        codec.choice(&mut self.line, &LAUNCHER_LINES);
        codec.bits(&mut self.seat, 2);
        codec.bits(&mut self.at, 3);
        codec.bits(&mut self.looked_at, 4);
        codec.bits(&mut self.anchors, 3);
        codec.flag(&mut self.grows);
        codec.flag(&mut self.counted);
    }

    /// Whether `seat` is a target's.
    pub fn is_about_a_target(&self) -> bool {
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

/// A seat that shows nothing.
pub const EMPTY_SEAT: Seat = Seat {
    step: 0,
    generation: 0,
    units: 0,
    stop: false,
    c2_done: 0,
};

impl Target {
    pub fn visit(&mut self, codec: &mut impl Codec) {
        codec.choice(&mut self.line, &TARGET_LINES);
        codec.bits(&mut self.unit, 3);
        codec.bits(&mut self.slot, 3);
        codec.bits(&mut self.epoch, 2);
    }

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
    /// At the start of the run.
    pub fn starting() -> Self {
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

    /// Visits every field.
    pub fn visit(&mut self, codec: &mut impl Codec) {
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
