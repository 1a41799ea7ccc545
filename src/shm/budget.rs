//! The budget word: anchors reserved for the step, over all drafters, before any unit is taken.

use super::atomics::{AcqRel, Acquire, Relaxed};
use super::label::{Label, label};
use super::segment::Segment;
use super::words::BudgetWord;

/// Answer to a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reserve {
    /// The anchors are reserved.
    Granted,
    /// The step has reached its batch.
    Full,
    /// The group has changed.
    Moved,
}

impl Segment {
    /// Reserves `anchors` for (step, generation), only while below the batch.
    pub(crate) fn reserve(&self, step: u64, generation: u32, anchors: u64) -> Reserve {
        let batch = u64::from(self.geometry().batch_anchors);
        self.raise(step, generation, anchors, Some(batch))
    }

    /// Counts an item that already belongs to the step into the budget of a new generation.
    pub(crate) fn reserve_again(&self, step: u64, generation: u32, anchors: u64) -> Reserve {
        self.raise(step, generation, anchors, None)
    }

    fn raise(&self, step: u64, generation: u32, anchors: u64, below: Option<u64>) -> Reserve {
        let cell = &self.control().budget.word;
        loop {
            // Acquire and AcqRel: each reservation comes after those it adds to; r5's partner likewise.
            let word = cell.load(Acquire);
            let now = BudgetWord::unpack(word);
            if now.generation > generation || (now.generation == generation && now.step > step) {
                return Reserve::Moved;
            }
            let same = (now.step, now.generation) == (step, generation);
            let reserved = if same { now.anchors } else { 0 };
            if below.is_some_and(|batch| reserved >= batch) {
                return Reserve::Full;
            }
            label(Label::Reserve);
            let next = BudgetWord {
                step,
                generation,
                anchors: reserved + anchors,
            };
            if cell
                .compare_exchange(word, next.pack(), AcqRel, Relaxed)
                .is_ok()
            {
                return Reserve::Granted;
            }
        }
    }

    /// Gives back what was reserved for a unit that another drafter took. Under another generation the word
    /// has been set anew, without it.
    pub(crate) fn give_back(&self, step: u64, generation: u32, anchors: u64) {
        let cell = &self.control().budget.word;
        loop {
            let word = cell.load(Acquire);
            let now = BudgetWord::unpack(word);
            if (now.step, now.generation) != (step, generation) {
                return;
            }
            label(Label::GiveBack);
            let next = BudgetWord {
                anchors: now.anchors.saturating_sub(anchors),
                ..now
            };
            if cell
                .compare_exchange(word, next.pack(), AcqRel, Relaxed)
                .is_ok()
            {
                return;
            }
        }
    }

    /// Whether the batch is reached.
    pub(crate) fn budget_reached(&self, step: u64, generation: u32) -> bool {
        let now = BudgetWord::unpack(self.control().budget.word.load(Acquire));
        (now.step, now.generation) == (step, generation)
            && now.anchors >= u64::from(self.geometry().batch_anchors)
    }

    /// The budget word.
    pub fn budget(&self) -> BudgetWord {
        BudgetWord::unpack(self.control().budget.word.load(Acquire))
    }

    /// r5: the budget of a new generation; before anyone can be in it.
    pub(crate) fn set_budget(&self, word: BudgetWord) {
        // Release: partner: the Acquire loads above; r6 publishes the generation afterwards.
        self.control().budget.word.swap(word.pack(), AcqRel);
    }
}
