//! The packed words of the protocol and their fields.
//!
//! Every decision is one compare-and-swap on one 64-bit word, so a word carries all that the decision
//! depends on: a claim names its owner, a ledger word its seat and deaths, the step word who has come.

/// Most drafters that the step word can hold.
pub const MAX_DRAFTERS: u32 = 12;
/// Most targets that the finish mask can hold.
pub const MAX_TARGETS: u32 = 48;
/// Largest step number.
pub const MAX_STEP: u64 = (1 << 24) - 1;
/// Largest generation of the group of drafters.
pub const MAX_GENERATION: u32 = (1 << 14) - 1;
/// Largest anchor count of a step.
pub const MAX_ANCHORS: u64 = (1 << 26) - 1;
/// Deaths after which a unit is quarantined.
pub const QUARANTINE_DEATHS: u8 = 3;

fn field(word: u64, shift: u32, bits: u32) -> u64 {
    (word >> shift) & ((1 << bits) - 1)
}

/// Phase of a slot. The third bit of its field is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SlotPhase {
    /// Nobody's.
    Free,
    /// Claimed by a target that is writing it.
    Filling,
    /// Published, not taken.
    Ready,
    /// Taken by a drafter.
    Held,
}

/// `[phase:3 | owner seat:13 | generation:48]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotWord {
    /// Phase.
    pub phase: SlotPhase,
    /// Owner in [`SlotPhase::Filling`] and [`SlotPhase::Held`]; 0 otherwise.
    pub seat: u32,
    /// Raised by every claim, so that a word never returns to an earlier value.
    pub generation: u64,
}

impl SlotWord {
    /// The word's bits.
    pub fn pack(self) -> u64 {
        let phase = match self.phase {
            SlotPhase::Free => 0,
            SlotPhase::Filling => 1,
            SlotPhase::Ready => 2,
            SlotPhase::Held => 3,
        };
        (phase << 61) | (u64::from(self.seat & 0x1fff) << 48) | field(self.generation, 0, 48)
    }

    /// The fields of `word`.
    pub fn unpack(word: u64) -> Self {
        let phase = match field(word, 61, 2) {
            0 => SlotPhase::Free,
            1 => SlotPhase::Filling,
            2 => SlotPhase::Ready,
            _ => SlotPhase::Held,
        };
        Self {
            phase,
            seat: field(word, 48, 13) as u32,
            generation: field(word, 0, 48),
        }
    }

    /// A free slot's word.
    pub(crate) fn free(generation: u64) -> u64 {
        let (phase, seat) = (SlotPhase::Free, 0);
        Self {
            phase,
            seat,
            generation,
        }
        .pack()
    }

    /// The word of a slot that `seat` is filling.
    pub(crate) fn filling(seat: u32, generation: u64) -> u64 {
        let phase = SlotPhase::Filling;
        Self {
            phase,
            seat,
            generation,
        }
        .pack()
    }

    /// A published slot's word.
    pub(crate) fn ready(generation: u64) -> u64 {
        let (phase, seat) = (SlotPhase::Ready, 0);
        Self {
            phase,
            seat,
            generation,
        }
        .pack()
    }

    /// The word of a slot that `seat` holds.
    pub(crate) fn held(seat: u32, generation: u64) -> u64 {
        let phase = SlotPhase::Held;
        Self {
            phase,
            seat,
            generation,
        }
        .pack()
    }
}

/// State of a unit in the ledger. The third bit of its field is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UnitState {
    /// To be prefilled.
    Pending,
    /// Leased by a target: being prefilled, or in a slot.
    Leased,
    /// Trained, in the step that the word names.
    Done,
    /// Left out: it was the current item of three deaths.
    Quarantined,
}

/// `[state:3 | seat:13 | deaths:8 | step:40]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerWord {
    /// State.
    pub state: UnitState,
    /// The target that leased the unit, or the drafter that trained it.
    pub seat: u32,
    /// Deaths whose current item it was.
    pub deaths: u8,
    /// Step of [`UnitState::Done`]; 0 otherwise.
    pub step: u64,
}

impl LedgerWord {
    /// The word's bits.
    pub fn pack(self) -> u64 {
        let state = match self.state {
            UnitState::Pending => 0,
            UnitState::Leased => 1,
            UnitState::Done => 2,
            UnitState::Quarantined => 3,
        };
        (state << 61)
            | (u64::from(self.seat & 0x1fff) << 48)
            | (u64::from(self.deaths) << 40)
            | field(self.step, 0, 40)
    }

    /// The fields of `word`.
    pub fn unpack(word: u64) -> Self {
        let state = match field(word, 61, 2) {
            0 => UnitState::Pending,
            1 => UnitState::Leased,
            2 => UnitState::Done,
            _ => UnitState::Quarantined,
        };
        Self {
            state,
            seat: field(word, 48, 13) as u32,
            deaths: field(word, 40, 8) as u8,
            step: field(word, 0, 40),
        }
    }

    /// Whether the unit needs no more work.
    pub fn is_settled(self) -> bool {
        matches!(self.state, UnitState::Done | UnitState::Quarantined)
    }
}

/// State of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StepState {
    /// Members take units and arrive at g1.
    Gather,
    /// All have arrived; collectives run; members arrive at g2.
    Reduce,
    /// All have reduced: the step's effect has happened for all of them.
    Committed,
    /// A member died: the step starts again under a higher generation.
    Aborted,
}

/// `[step:24 | generation:14 | state:2 | mask:12 | members:12]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepWord {
    /// The step being worked on.
    pub step: u64,
    /// Generation of the group of drafters.
    pub generation: u32,
    /// State.
    pub state: StepState,
    /// Bit per rank: who has arrived at g1 (in Gather) or g2 (in Reduce).
    pub mask: u32,
    /// Bit per rank: who must arrive.
    pub members: u32,
}

impl StepWord {
    /// The word's bits.
    pub fn pack(self) -> u64 {
        let state = match self.state {
            StepState::Gather => 0,
            StepState::Reduce => 1,
            StepState::Committed => 2,
            StepState::Aborted => 3,
        };
        stamp(self.step, self.generation)
            | (state << 24)
            | (u64::from(self.mask & 0xfff) << 12)
            | u64::from(self.members & 0xfff)
    }

    /// The fields of `word`.
    pub fn unpack(word: u64) -> Self {
        let state = match field(word, 24, 2) {
            0 => StepState::Gather,
            1 => StepState::Reduce,
            2 => StepState::Committed,
            _ => StepState::Aborted,
        };
        Self {
            step: field(word, 40, 24),
            generation: field(word, 26, 14) as u32,
            state,
            mask: field(word, 12, 12) as u32,
            members: field(word, 0, 12) as u32,
        }
    }
}

/// `[step:24 | generation:14 | anchors:26]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetWord {
    /// Step that the anchors are reserved for.
    pub step: u64,
    /// Generation of the group of drafters.
    pub generation: u32,
    /// Anchors reserved.
    pub anchors: u64,
}

impl BudgetWord {
    /// The word's bits.
    pub fn pack(self) -> u64 {
        stamp(self.step, self.generation) | field(self.anchors, 0, 26)
    }

    /// The fields of `word`.
    pub fn unpack(word: u64) -> Self {
        Self {
            step: field(word, 40, 24),
            generation: field(word, 26, 14) as u32,
            anchors: field(word, 0, 26),
        }
    }
}

/// (step, generation) as the upper bits of the step and budget words; never 0, since both count from 1.
pub(crate) fn stamp(step: u64, generation: u32) -> u64 {
    (field(step, 0, 24) << 40) | (u64::from(generation & 0x3fff) << 26)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_word_survives_packing(a in any::<u64>(), b in any::<u64>()) {
            let reserved = !(1 << 63);
            let slot = SlotWord::unpack(a & reserved);
            prop_assert_eq!(slot.pack(), a & reserved);
            let ledger = LedgerWord::unpack(b & reserved);
            prop_assert_eq!(ledger.pack(), b & reserved);
            prop_assert_eq!(StepWord::unpack(a).pack(), a);
            prop_assert_eq!(BudgetWord::unpack(b).pack(), b);
        }
    }

    #[test]
    fn zeroed_memory_is_free_and_pending() {
        assert_eq!(SlotWord::unpack(0).phase, SlotPhase::Free);
        assert_eq!(LedgerWord::unpack(0).state, UnitState::Pending);
    }

    #[test]
    fn step_and_budget_share_their_stamp() {
        let (step, generation) = (77, 9);
        let word = BudgetWord {
            step,
            generation,
            anchors: 5,
        };
        assert_eq!(word.pack() - 5, stamp(step, generation));
    }
}
