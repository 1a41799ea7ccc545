//! The step word: who takes part in a step, and whether it happened, decided once for all drafters.

use super::atomics::{AcqRel, Acquire, Relaxed, Release};
use super::label::{Label, label};
use super::segment::Segment;
use super::words::{StepState, StepWord, stamp};

/// What a drafter says about a step when it closes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vote {
    /// End the run after this step (a requested stop is added by the protocol itself).
    pub stop: bool,
    /// Evaluate after this step.
    pub evaluate: bool,
    /// Hash of its parameter values, compared across drafters; 0 = none.
    pub hash: u64,
}

const STOP: u64 = 1;
const EVALUATE: u64 = 2;

/// One member's part in a step.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MemberRecord {
    /// Rank.
    pub rank: u32,
    /// Its units, in the order taken.
    pub units: Vec<u64>,
    /// Their anchors.
    pub anchors: u64,
    /// It wants to stop after this step.
    pub stop: bool,
    /// It wants an evaluation after this step.
    pub evaluate: bool,
    /// Hash of its parameter values; 0 = none.
    pub hash: u64,
}

/// What all members know of a step in REDUCE, from each other's seats, without a collective.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Agreed {
    /// Step.
    pub step: u64,
    /// Generation of the group.
    pub generation: u32,
    /// Every member, by rank.
    pub members: Vec<MemberRecord>,
}

impl Agreed {
    /// Units of the step. 0: no collective, no optimizer step, no line in trained.jsonl.
    pub fn items(&self) -> usize {
        self.members.iter().map(|member| member.units.len()).sum()
    }

    /// Anchors of the step.
    pub fn anchors(&self) -> u64 {
        self.members.iter().map(|member| member.anchors).sum()
    }

    /// Whether the run ends after this step.
    pub fn stop(&self) -> bool {
        self.members.iter().any(|member| member.stop)
    }

    /// Whether an evaluation follows this step.
    pub fn evaluate(&self) -> bool {
        self.members.iter().any(|member| member.evaluate)
    }

    /// Members as a mask of ranks.
    pub fn mask(&self) -> u32 {
        self.members
            .iter()
            .fold(0, |mask, member| mask | 1 << member.rank)
    }

    /// The parameter hashes that were given, when they are not all the same: (rank, hash).
    pub fn hash_mismatch(&self) -> Option<Vec<(u32, u64)>> {
        let given = self.members.iter().filter(|member| member.hash != 0);
        let hashes: Vec<_> = given.map(|member| (member.rank, member.hash)).collect();
        let differ = hashes.windows(2).any(|pair| pair[0].1 != pair[1].1);
        differ.then_some(hashes)
    }
}

/// Answer to g1 and g2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Our bit is in.
    In {
        /// We were the last.
        completed: bool,
    },
    /// The group has changed, or the step was aborted.
    Moved,
}

impl Segment {
    /// The step word.
    pub fn step_word(&self) -> StepWord {
        // Acquire: partner: the AcqRel of every change.
        StepWord::unpack(self.control().step.word.load(Acquire))
    }

    pub(crate) fn store_step(&self, word: StepWord) {
        self.control().step.word.store(word.pack(), Release);
    }

    /// Replaces `from` by `to`; false when the word has changed.
    pub(crate) fn change_step(&self, from: StepWord, to: StepWord) -> bool {
        let cell = &self.control().step.word;
        // AcqRel: what every member did before its own arrival comes before what any does after the last.
        cell.compare_exchange(from.pack(), to.pack(), AcqRel, Relaxed)
            .is_ok()
    }

    /// Writes a drafter's record of (step, generation), before its g1.
    pub(crate) fn write_record(
        &self,
        rank: u32,
        (step, generation): (u64, u32),
        units: &[(u64, u32)],
        vote: Vote,
    ) {
        label(Label::Record);
        let slots = self.geometry().slots as usize;
        let list = &self.memory().unit_lists()[rank as usize * slots..][..slots];
        for (cell, (unit, _)) in list.iter().zip(units) {
            cell.store(*unit, Release);
        }
        let anchors = units.iter().map(|(_, anchors)| u64::from(*anchors)).sum();
        let record = self.record(rank);
        // Release, all: whoever sees a field of the new record has our view of the step word before it;
        // partner: the second look at the step word in `read_agreed`.
        record.items.store(units.len() as u64, Release);
        record.anchors.store(anchors, Release);
        let votes = if vote.stop { STOP } else { 0 } | if vote.evaluate { EVALUATE } else { 0 };
        record.votes.store(votes, Release);
        record.hash.store(vote.hash, Release);
        record.stamp.store(stamp(step, generation), Release);
    }

    /// g1: `rank` has closed (step, generation).
    pub(crate) fn arrive_closed(&self, rank: u32, step: u64, generation: u32) -> Arrival {
        let bit = 1 << rank;
        loop {
            let now = self.step_word();
            let opens = now.state == StepState::Committed && now.step + 1 == step;
            let joins = now.state == StepState::Gather && now.step == step;
            if now.generation != generation || !(opens || joins) {
                return Arrival::Moved;
            }
            // The first to close a step opens it with its own bit alone.
            let mask = if opens { bit } else { now.mask | bit };
            let completed = mask == now.members;
            let next = if completed {
                StepWord {
                    step,
                    state: StepState::Reduce,
                    mask: 0,
                    ..now
                }
            } else {
                StepWord {
                    step,
                    state: StepState::Gather,
                    mask,
                    ..now
                }
            };
            label(Label::G1);
            if self.change_step(now, next) {
                return Arrival::In { completed };
            }
        }
    }

    /// g2: `rank` has reduced (step, generation).
    pub(crate) fn arrive_reduced(&self, rank: u32, step: u64, generation: u32) -> Arrival {
        loop {
            let now = self.step_word();
            let reducing = now.state == StepState::Reduce && now.step == step;
            if now.generation != generation || !reducing {
                return Arrival::Moved;
            }
            let mask = now.mask | 1 << rank;
            let completed = mask == now.members;
            let state = if completed {
                StepState::Committed
            } else {
                StepState::Reduce
            };
            label(Label::G2);
            if self.change_step(now, StepWord { state, mask, ..now }) {
                return Arrival::In { completed };
            }
        }
    }

    /// All members' records of (step, generation), or nothing when the group has changed. Only between
    /// REDUCE and the caller's own g2: nobody can leave the step without it.
    pub(crate) fn read_agreed(&self, step: u64, generation: u32) -> Option<Agreed> {
        let before = self.step_word();
        let slots = self.geometry().slots as usize;
        let mut members = Vec::new();
        for rank in ranks(before.members) {
            let record = self.record(rank);
            // Acquire, all: partner: `write_record`.
            if record.stamp.load(Acquire) != stamp(step, generation) {
                return None;
            }
            let items = (record.items.load(Acquire) as usize).min(slots);
            let list = &self.memory().unit_lists()[rank as usize * slots..][..items];
            let votes = record.votes.load(Acquire);
            members.push(MemberRecord {
                rank,
                units: list.iter().map(|unit| unit.load(Acquire)).collect(),
                anchors: record.anchors.load(Acquire),
                stop: votes & STOP != 0,
                evaluate: votes & EVALUATE != 0,
                hash: record.hash.load(Acquire),
            });
        }
        // A record may have been rewritten for a later generation only after the word had moved to it.
        let after = self.step_word();
        let stands =
            (after.step, after.generation, after.state) == (step, generation, StepState::Reduce);
        stands.then_some(Agreed {
            step,
            generation,
            members,
        })
    }

    /// Whether another member's seat shows items of (step, generation).
    pub(crate) fn others_show_items(&self, rank: u32, step: u64, generation: u32) -> bool {
        ranks(self.step_word().members & !(1 << rank)).any(|other| {
            let record = self.record(other);
            record.stamp.load(Acquire) == stamp(step, generation) && record.items.load(Acquire) > 0
        })
    }
}

/// The ranks in a mask, ascending.
pub(crate) fn ranks(mask: u32) -> impl Iterator<Item = u32> {
    (0..32).filter(move |rank| mask >> rank & 1 == 1)
}
