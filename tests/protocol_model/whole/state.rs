//! What the whole protocol's state consists of, and how it is packed.

use super::Config;
use super::members::{Drafter, IDLE, Launcher, Target};
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
            target.visit(codec);
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
        self.launcher.visit(codec);
        codec.bits(&mut self.checkpoint.step, 3);
        codec.bits(&mut self.checkpoint.units, 4);
        codec.flag(&mut self.stop_asked);
        codec.bits(&mut self.kills, 2);
        codec.bits(&mut self.respawns, 2);
        codec.bits(&mut self.reruns, 1);
    }
}

/// The numbers in a mask, from the lowest.
pub fn members_of(mask: Mask) -> impl Iterator<Item = usize> {
    (0..8).filter(move |number| has(mask, *number))
}

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
