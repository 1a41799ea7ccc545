//! Into the group, again into the group, and out of it.

use super::super::members::DrafterLine;
use super::super::state::{Mask, StepState, bit, members_of};
use super::super::{Leftover, Mutant, Recount, rules};
use super::{Here, reserve};

impl Here<'_> {
    pub(super) fn join(&mut self) {
        let (word, me, config) = (&self.state.word, self.me, self.config);
        if word.step != me.step
            || word.generation <= me.generation
            || word.state == StepState::Aborted
        {
            return;
        }
        self.go("joins generation", word.generation as usize, |next, me| {
            me.generation = next.word.generation;
            me.line = DrafterLine::Take;
            let held = me.items | me.spare;
            let stamped = |slot: &usize| next.slots[*slot].counted == me.generation;
            let counted: Mask = match config.recount {
                Recount::Stamped => members_of(held).filter(stamped).map(bit).sum(),
                Recount::ByTheHolder => 0,
                Recount::Unstamped => return,
            };
            if config.leftover == Leftover::Exceed {
                me.uncounted = me.items & !counted;
                me.line = DrafterLine::Recount;
            } else {
                me.items = counted;
                me.spare = held & !counted;
            }
        });
    }

    /// Until the group changes again; then the next join looks at what r5 has counted.
    pub(super) fn recount(&mut self) {
        self.join_if_aborted();
        let (config, budget, me) = (self.config, &self.state.budget, self.me);
        if (budget.generation, budget.step) > (me.generation, me.step) {
            return;
        }
        let slot = self.first(me.uncounted);
        let unit = self.state.slots[slot].unit;
        self.go("reserves again the anchors of slot", slot, |next, me| {
            reserve(config, next, me, unit);
            me.uncounted &= !bit(slot);
        });
    }

    pub(super) fn leaving(&mut self) {
        let (config, state, me) = (self.config, self.state, self.me);
        let saved = !config.checkpoints
            || state.checkpoint.step >= rules::step_to_save(config, me)
            || config.is(Mutant::LeaveBeforeCheckpoint);
        if saved {
            self.go("leaves", None, |_, me| {
                me.line = DrafterLine::Left;
                me.items = 0;
                me.spare = 0;
            });
        } else if rules::may_checkpoint(config, state, self.seat) {
            self.checkpoint();
        }
    }

    pub(super) fn boot(&mut self) {
        let (config, state, me, seat) = (self.config, self.state, self.me, self.seat);
        if rules::all_settled(config, state) || state.finish.stop > 0 {
            self.go("leaves without weights", None, |_, me| {
                me.end(match config.is(Mutant::NewcomerLeavesAsMember) {
                    true => DrafterLine::Gone,
                    false => DrafterLine::Dead,
                });
            });
        }
        if state.word.generation > me.generation {
            if state.word.state != StepState::Aborted {
                self.go("starts again in the new generation", None, |next, me| {
                    me.step = next.word.step;
                    me.generation = next.word.generation;
                });
            }
            return;
        }
        if config.is(Mutant::NewcomerSkipsWeights) {
            self.go("begins without weights", None, |_, me| {
                me.line = DrafterLine::Take;
            });
        }
        let joined = |other: &usize| {
            let other = &state.drafters[*other];
            if config.is(Mutant::WeightsOfAnyMember) {
                return other.has_weights() && other.line != DrafterLine::Left;
            }
            let before_g2 = matches!(
                other.line,
                DrafterLine::Take
                    | DrafterLine::Recount
                    | DrafterLine::C0
                    | DrafterLine::C0t
                    | DrafterLine::GiveBack
                    | DrafterLine::C1
                    | DrafterLine::Tag
                    | DrafterLine::Record
                    | DrafterLine::G1
                    | DrafterLine::Gather
            );
            before_g2 && (other.step, other.generation) == (me.step, me.generation)
        };
        if let Some(other) = (0..config.drafters).find(|other| *other != seat && joined(other)) {
            self.go("gets the weights of drafter", other, |next, me| {
                me.weights = next.drafters[other].weights;
                me.trained = next.drafters[other].trained;
                me.line = DrafterLine::Take;
            });
        }
    }
}
