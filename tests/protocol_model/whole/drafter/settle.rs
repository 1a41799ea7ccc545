//! From g1 to the end of a step.

use super::super::members::DrafterLine;
use super::super::state::{FREE, NONE, Phase, StepState, UnitState, bit, members_of};
use super::super::{Leave, Mutant, rules};
use super::{Here, UNWRITTEN};

impl Here<'_> {
    pub(super) fn g1(&mut self) {
        self.join_if_aborted();
        let (word, me) = (&self.state.word, self.me);
        let opens = word.is_at(me.step - 1, me.generation, StepState::Committed);
        let enters = word.is_at(me.step, me.generation, StepState::Gather);
        if !opens && !enters {
            return;
        }
        let mask = bit(self.seat) | if enters { word.mask } else { 0 };
        let all = mask == word.members;
        let late = self.config.is(Mutant::RecordAfterG1);
        if let Some(rule) = (all && !late)
            .then(|| rules::broken_at_reduce(self.config, self.state, me.step, me.generation))
            .flatten()
        {
            return self.violation("g1 completes the group", rule);
        }
        let line = match all {
            true => "g1 completes the group",
            false => "g1",
        };
        self.go(line, None, |next, me| {
            next.word.step = me.step;
            next.word.state = if all {
                StepState::Reduce
            } else {
                StepState::Gather
            };
            next.word.mask = if all { 0 } else { mask };
            me.line = match late {
                true => DrafterLine::Record,
                false => DrafterLine::Gather,
            };
        });
    }

    pub(super) fn gather(&mut self) {
        let (config, state, me, seat) = (self.config, self.state, self.me, self.seat);
        self.join_if_aborted();

        let mine = |state_| state.word.is_at(me.step, me.generation, state_);
        let over = rules::all_settled(config, state) && !config.is(Mutant::StaysInGather);
        let bound = config.leave == Leave::TakesG1Back && !config.is(Mutant::LeavesItsG1);
        if over && mine(StepState::Gather) && bound {
            self.go("takes its g1 back: all units DONE", None, |next, me| {
                next.word.mask &= !bit(seat);
                me.line = DrafterLine::Leaving;
            });
        } else if over && mine(StepState::Gather) {
            self.leave_empty_step();
        }

        if mine(StepState::Reduce) {
            let (mut reduced, mut stopping) = (0, false);
            for member in members_of(state.word.members) {
                let seat = &state.drafters[member].seat;
                if (seat.step, seat.generation) != (me.step, me.generation) {
                    return self
                        .violation("reads the seats", "a seat in REDUCE is of another step");
                }
                if reduced & seat.units != 0 {
                    return self.violation("reduces", "one step sums a unit's gradient twice");
                }
                reduced |= seat.units;
                stopping |= seat.stop;
            }
            self.go("reads the seats and reduces", None, |_, me| {
                me.reduced = reduced;
                me.stopping = match config.is(Mutant::StopNotAgreed) {
                    true => me.seat.stop,
                    false => stopping,
                };
                me.line = DrafterLine::G2;
            });
        }

        if config.prefetch && me.spare == 0 {
            for slot in self.ready() {
                if !state.slots[slot].written {
                    return self.violation("prefetches", UNWRITTEN);
                }
                let step = me.step;
                self.go("c0 prefetches slot", slot, |next, me| {
                    next.slots[slot].phase = Phase::Held;
                    next.slots[slot].owner = seat as u8;
                    if config.is(Mutant::PrefetchIsTagged) {
                        next.slots[slot].tag = step;
                    }
                    me.spare |= bit(slot);
                });
            }
        }
    }

    pub(super) fn leave_empty_step(&mut self) {
        self.go("leaves the empty step: all units DONE", None, |_, me| {
            me.stopping = false;
            me.line = DrafterLine::Leaving;
        });
    }

    pub(super) fn g2(&mut self) {
        let (word, me, seat) = (&self.state.word, self.me, self.seat);
        if !word.is_at(me.step, me.generation, StepState::Reduce) {
            return self.go("finds g2 closed", None, |_, me| {
                me.line = DrafterLine::Test;
            });
        }
        let all = word.mask | bit(seat) == word.members;
        let line = match all {
            true => "g2 commits",
            false => "g2",
        };
        self.go(line, None, |next, me| {
            next.word.mask |= bit(seat);
            if all {
                next.word.state = StepState::Committed;
            }
            me.line = DrafterLine::Test;
        });
    }

    pub(super) fn test(&mut self) {
        let (word, me) = (&self.state.word, self.me);
        let committed =
            word.step > me.step || word.step == me.step && word.state == StepState::Committed;
        if !committed || self.config.is(Mutant::AbortTestedFirst) {
            self.join_if_aborted();
        }
        if committed && !(self.config.is(Mutant::AbortTestedFirst) && self.aborted()) {
            if me.weights & me.reduced != 0 {
                return self.violation("steps", "a unit's gradient was applied twice");
            }
            return self.go("makes the optimizer step", None, |_, me| {
                me.weights |= me.reduced;
                if me.reduced != 0 {
                    me.trained = me.step;
                }
                me.reduced = 0;
                me.line = DrafterLine::C2;
            });
        }
        if self.me.reduced == 0
            && rules::all_settled(self.config, self.state)
            && self.config.leave == Leave::FromAnyWait
            && !self.config.is(Mutant::StaysInGather)
        {
            self.leave_empty_step();
        }
    }

    pub(super) fn c2(&mut self) {
        let slot = self.first(self.me.items);
        let unit = self.state.slots[slot].unit as usize;
        if self.state.ledger[unit].state != UnitState::Leased {
            return self.violation("c2", "c2 found a unit that is not LEASED");
        }
        let free_first = self.config.is(Mutant::FreeBeforeDone);
        let line = match free_first {
            true => "c3, before c2, for unit",
            false => "c2 marks DONE unit",
        };
        self.go(line, unit, |next, me| {
            if free_first {
                next.slots[slot] = FREE;
                me.items &= !bit(slot);
                me.unit = unit as u8;
            } else {
                next.ledger[unit].state = UnitState::Done;
                next.ledger[unit].by = me.step;
            }
            me.line = DrafterLine::C3;
        });
    }

    pub(super) fn c3(&mut self) {
        if self.config.is(Mutant::FreeBeforeDone) {
            let unit = self.me.unit as usize;
            return self.go("c2 marks DONE unit", unit, |next, me| {
                next.ledger[unit].state = UnitState::Done;
                next.ledger[unit].by = me.step;
                me.unit = NONE;
                me.line = DrafterLine::C2;
            });
        }
        let slot = self.first(self.me.items);
        if !self.state.slots[slot].is_with(Phase::Held, self.seat) {
            return self.violation("c3", "a slot was taken from a live drafter");
        }
        self.go("c3 frees slot", slot, |next, me| {
            let tag = next.slots[slot].tag;
            next.slots[slot] = FREE;
            next.slots[slot].tag = tag;
            me.items &= !bit(slot);
            me.line = DrafterLine::C2;
        });
    }

    pub(super) fn c2_done(&mut self) {
        let unreserved = self.config.is(Mutant::PrefetchIsNotReserved);
        self.go("shows its c2 done", None, |_, me| {
            if unreserved {
                me.items = std::mem::take(&mut me.spare);
            }
            me.seat.c2_done = me.step;
            me.step += 1;
            me.line = match me.stopping {
                true => DrafterLine::Stop,
                false => DrafterLine::Take,
            };
            me.stopping = false;
        });
    }

    pub(super) fn stop(&mut self) {
        self.go(
            "writes the stop after step",
            self.me.step as usize - 1,
            |next, me| {
                next.finish.stop = me.step - 1;
                me.line = DrafterLine::Leaving;
            },
        );
    }
}
