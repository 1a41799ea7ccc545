//! The launcher: recovery, replacement and roll-back, one access at a time beside everybody else.

use super::members::{DrafterLine, IDLE, LauncherLine, Target, TargetLine};
use super::state::{
    Budget, FREE, Phase, State, StepState, StepWord, UnitState, bit, has, members_of,
};
use super::target::publish_sentinels;
use super::{Config, Mutant, Recount, rules};
use crate::explore::{Steps, label};

/// Adds every access that the launcher may make next.
pub fn steps(config: &Config, state: &State, out: &mut Steps<State>) {
    let mut here = Here {
        config,
        state,
        seat: state.launcher.seat as usize,
        out,
    };
    match state.launcher.line {
        LauncherLine::Idle => return here.idle(),
        LauncherLine::R1 => here.r1(),
        LauncherLine::R3 => here.r3(),
        LauncherLine::R3Look => here.r3_look(),
        LauncherLine::R3Swap => here.r3_swap(),
        LauncherLine::R4 => here.r4(),
        LauncherLine::R4Publish => here.r4_publish(),
        LauncherLine::R0 => here.r0(),
        LauncherLine::R2 => here.r2(),
        LauncherLine::R5 => here.r5(),
        LauncherLine::R5Budget => here.r5_budget(),
        LauncherLine::R6 => here.r6(),
        LauncherLine::Roll => return here.roll(),
        LauncherLine::RollFinish => return here.roll_finish(),
        LauncherLine::RollStep => return here.roll_step(),
        LauncherLine::Failed => return,
    }
    if state.reruns < config.reruns && state.launcher.line != LauncherLine::R4Publish {
        here.rerun();
    }
}

struct Here<'a> {
    config: &'a Config,
    state: &'a State,
    seat: usize,
    out: &'a mut Steps<State>,
}

impl Here<'_> {
    fn go(
        &mut self,
        line: &'static str,
        item: impl Into<Option<usize>>,
        change: impl FnOnce(&mut State),
    ) {
        let mut next = self.state.clone();
        change(&mut next);
        self.out.step(
            label("launcher for seat ", self.seat, line, item.into()),
            next,
        );
    }

    fn idle(&mut self) {
        let (config, state) = (self.config, self.state);
        for seat in 0..config.targets {
            if state.targets[seat].line == TargetLine::Dead {
                self.seat = seat;
                self.go("waitid: a target", None, |next| {
                    next.launcher.line = LauncherLine::R1;
                    next.launcher.seat = seat as u8;
                });
            }
        }
        let drafters = &state.drafters[..config.drafters];
        for (seat, drafter) in drafters.iter().enumerate() {
            if drafter.line == DrafterLine::Dead {
                self.seat = seat;
                self.go("waitid: a drafter", None, |next| {
                    next.launcher.line = match config.is(Mutant::RecoveryBeforeR0) {
                        true => LauncherLine::R2,
                        false => LauncherLine::R0,
                    };
                    next.launcher.seat = seat as u8;
                });
            }
        }

        let model_lives = drafters.iter().any(|drafter| drafter.has_weights());
        let all_dead_are_recovered = drafters
            .iter()
            .all(|drafter| drafter.line != DrafterLine::Dead);
        if model_lives {
            self.offer_replacement();
        } else if let Some(seat) = drafters
            .iter()
            .position(|drafter| drafter.line == DrafterLine::Boot)
        {
            self.seat = seat;
            self.go(
                "ends a newcomer whom nobody can give weights",
                None,
                |next| {
                    next.drafters[seat].end(DrafterLine::Dead);
                },
            );
        } else if all_dead_are_recovered {
            self.go("finds all drafters dead", None, |next| {
                next.launcher.line = match config.is(Mutant::FinishClearedFirst) {
                    true => LauncherLine::RollFinish,
                    false => LauncherLine::Roll,
                };
                next.launcher.seat = 0;
            });
        }
    }

    fn offer_replacement(&mut self) {
        let (config, state) = (self.config, self.state);
        let wanted = state.respawns < config.respawns
            && !rules::all_settled(config, state)
            && state.finish.stop == 0;
        let gone =
            (0..config.drafters).find(|seat| state.drafters[*seat].line == DrafterLine::Gone);
        if let Some(seat) = gone.filter(|_| wanted) {
            self.seat = seat;
            self.go("has a replacement", None, |next| {
                next.launcher.line = LauncherLine::R0;
                next.launcher.seat = seat as u8;
                next.launcher.grows = true;
                next.respawns += 1;
            });
        }
    }

    /// All lines are idempotent: the launcher may begin a recovery again.
    fn rerun(&mut self) {
        let target = matches!(
            self.state.launcher.line,
            LauncherLine::R1
                | LauncherLine::R3
                | LauncherLine::R3Look
                | LauncherLine::R3Swap
                | LauncherLine::R4
        );
        let forgets = self.config.is(Mutant::RerunCountsAgain);
        self.go("begins the recovery again", None, |next| {
            next.reruns += 1;
            next.launcher.at = 0;
            next.launcher.looked_at = 0;
            next.launcher.anchors = 0;
            next.launcher.counted &= !forgets;
            next.launcher.line = match target {
                true => LauncherLine::R1,
                false => LauncherLine::R0,
            };
        });
    }

    fn r1(&mut self) {
        let slot = filling(self.config, self.state, self.seat);
        let slot = slot.expect("without such a slot the launcher has gone on");
        self.go("r1 frees slot", slot, |next| next.slots[slot] = FREE);
    }

    /// Whether the seat's death is still to be counted against `unit`.
    fn blames(&self, seat_unit: u8, unit: usize) -> bool {
        self.config.quarantine > 0 && !self.state.launcher.counted && seat_unit == unit as u8
    }

    /// The ledger CAS of its own that counts the death.
    fn count(&mut self, unit: usize) {
        let limit = self.config.quarantine;
        self.go("counts the death against unit", unit, |next| {
            next.launcher.counted = true;
            let word = &mut next.ledger[unit];
            word.deaths += 1;
            if word.deaths >= limit {
                word.state = UnitState::Quarantined;
                word.by = 0;
            }
        });
    }

    fn r3(&mut self) {
        let blamed = self.state.targets[self.seat].unit;
        let unit = self.state.launcher.at as usize;
        if self.config.is(Mutant::QuarantinesPublishedUnit) && self.blames(blamed, unit) {
            return self.count(unit);
        }
        self.go("r3 reads LEASED for unit", unit, |next| {
            next.launcher.line = LauncherLine::R3Look;
        });
    }

    fn r3_look(&mut self) {
        let unit = self.state.launcher.at as usize;
        let slots = match self.config.is(Mutant::EvaluationSlotsOverlooked) {
            true => self.config.slots,
            false => self.config.all_slots(),
        };
        let found = self.state.slots[..slots]
            .iter()
            .any(|slot| slot.carries(unit))
            && !self.config.is(Mutant::RequeueWithoutLooking);
        self.go("r3 looks in the slots for unit", unit, |next| {
            if found {
                next.launcher.line = LauncherLine::R3;
                next.launcher.at += 1;
            } else {
                next.launcher.line = LauncherLine::R3Swap;
            }
        });
    }

    fn r3_swap(&mut self) {
        let unit = self.state.launcher.at as usize;
        let blamed = self.state.targets[self.seat].unit;
        let leased = is_leased(self.state, self.seat, unit);
        if leased && self.blames(blamed, unit) {
            return self.count(unit);
        }
        let store = self.config.is(Mutant::RequeueByStore);
        self.go("r3 puts back unit", unit, |next| {
            if leased || store {
                next.ledger[unit].state = UnitState::Pending;
                next.ledger[unit].by = 0;
            }
            next.launcher.line = LauncherLine::R3;
            next.launcher.at += 1;
        });
    }

    fn r4(&mut self) {
        let (config, state, seat) = (self.config, self.state, self.seat);
        let may_respawn = state.respawns < config.respawns;
        if may_respawn {
            self.go("r4 lets the target be replaced", None, |next| {
                next.targets[seat] = Target::starting();
                next.respawns += 1;
                next.launcher = IDLE;
            });
        }
        let others = (0..config.targets)
            .any(|other| other != seat && state.targets[other].line != TargetLine::Gone);
        if others || rules::nothing_needs_a_target(config, state) {
            self.go("r4 gives the target up", None, |next| {
                next.finish.done |= bit(seat);
                next.targets[seat] = Target::at(TargetLine::Gone);
                let full = next.finish.done == config.all_targets();
                next.launcher = IDLE;
                if full && next.finish.published == 0 && !config.is(Mutant::NobodyHelpsToPublish) {
                    next.launcher.line = LauncherLine::R4Publish;
                }
            });
        } else if !may_respawn {
            self.go("has no target left and fails the run", None, |next| {
                next.launcher = IDLE;
                next.launcher.line = LauncherLine::Failed;
            });
        }
    }

    fn r4_publish(&mut self) {
        let config = self.config;
        self.go("r4 publishes the sentinels", None, |next| {
            let epoch = next.finish.epoch;
            publish_sentinels(config, next, epoch);
            next.launcher = IDLE;
        });
    }

    fn r0(&mut self) {
        let late_r2 =
            self.config.is(Mutant::R6BeforeR2) || self.config.is(Mutant::RecoveryBeforeR0);
        let next_line = match self.state.launcher.grows {
            true if self.config.is(Mutant::GrowthWithoutR5) => LauncherLine::R6,
            false if !late_r2 => LauncherLine::R2,
            _ => after_r2(self.config),
        };
        self.go("r0 aborts", None, |next| {
            let word = &mut next.word;
            if word.state == StepState::Committed {
                word.step += 1;
            }
            word.state = StepState::Aborted;
            word.mask = 0;
            next.launcher.line = next_line;
        });
    }

    /// One access per visit, for the first slot that the dead drafter still holds.
    fn r2(&mut self) {
        let (config, state, seat) = (self.config, self.state, self.seat);
        let slot = held(config, state, seat);
        let slot = slot.expect("without such a slot the launcher has gone on");
        let (unit, tag) = (state.slots[slot].unit as usize, state.slots[slot].tag);
        let word = &state.word;
        let committed =
            tag != 0 && (tag < word.step || tag == word.step && word.state == StepState::Committed);
        let settled = state.ledger[unit].is_settled() && !config.is(Mutant::RedeliverWithoutLedger);
        if settled {
            self.go("r2 frees slot", slot, |next| next.slots[slot] = FREE);
        } else if committed && !config.is(Mutant::RedeliverWithoutLedger) {
            self.go("r2 marks DONE unit", unit, |next| {
                next.ledger[unit].state = UnitState::Done;
                next.ledger[unit].by = tag;
            });
        } else if self.blames(state.drafters[seat].unit, unit) {
            self.count(unit);
        } else if tag != 0 && !config.is(Mutant::RedeliveryKeepsTag) {
            self.go("r2 takes the tag from slot", slot, |next| {
                next.slots[slot].tag = 0;
            });
        } else {
            self.go("r2 redelivers slot", slot, |next| {
                next.slots[slot].phase = Phase::Ready;
                next.slots[slot].owner = 0;
            });
        }
    }

    fn r5(&mut self) {
        let (config, state, seat) = (self.config, self.state, self.seat);
        for at in 0..config.slots {
            if has(state.launcher.looked_at, at) {
                continue;
            }
            let slot = &state.slots[at];
            let survivor = slot.phase == Phase::Held
                && has(state.word.members, slot.owner as usize)
                && (state.launcher.grows || slot.owner != seat as u8);
            let counts = survivor && slot.tag == state.word.step;
            self.go("r5 looks at slot", at, |next| {
                next.launcher.looked_at |= bit(at);
                if counts {
                    next.slots[at].counted = next.word.generation + 1;
                    next.launcher.anchors += config.anchors_of(next.slots[at].unit);
                }
            });
        }
    }

    fn r5_budget(&mut self) {
        let carried = self.config.is(Mutant::BudgetNotReset)
            && self.state.budget.step == self.state.word.step;
        self.go("r5 sets the budget", None, |next| {
            next.budget = Budget {
                step: next.word.step,
                generation: next.word.generation + 1,
                anchors: match carried {
                    true => next.budget.anchors,
                    false => next.launcher.anchors,
                },
            };
            next.launcher.line = LauncherLine::R6;
        });
    }

    fn r6(&mut self) {
        let (config, seat) = (self.config, self.seat);
        let grows = self.state.launcher.grows;
        let late_r2 = config.is(Mutant::R6BeforeR2) && !grows;
        let line = match grows {
            true => "r6 publishes the group with the newcomer",
            false => "r6 publishes the smaller group",
        };
        self.go(line, None, |next| {
            if !config.is(Mutant::GenerationNotRaised) {
                next.word.generation += 1;
            }
            next.word.state = StepState::Gather;
            next.word.mask = 0;
            if late_r2 {
                next.word.members &= !bit(seat);
                next.launcher.line = LauncherLine::R2;
                return;
            }
            next.launcher = IDLE;
            if grows {
                next.word.members |= bit(seat);
                next.drafters[seat].begin(DrafterLine::Boot, &next.word);
                if !config.is(Mutant::NewcomerOwesC2) {
                    next.drafters[seat].seat.c2_done = next.word.step - 1;
                }
            } else {
                next.word.members &= !bit(seat);
                next.drafters[seat].end(DrafterLine::Gone);
            }
        });
    }

    fn roll(&mut self) {
        let (config, state) = (self.config, self.state);
        let newer = |unit: &usize| {
            let word = &state.ledger[*unit];
            word.state == UnitState::Done && word.by > state.checkpoint.step
        };
        match config.training_units().find(newer) {
            Some(unit) => self.go("rolls back to PENDING unit", unit, |next| {
                next.ledger[unit].state = UnitState::Pending;
                next.ledger[unit].by = 0;
            }),
            None => self.go("has rolled back the ledger", None, |next| {
                next.launcher.line = match config.is(Mutant::FinishClearedFirst) {
                    true => LauncherLine::RollStep,
                    false => LauncherLine::RollFinish,
                };
            }),
        }
    }

    fn roll_finish(&mut self) {
        let config = self.config;
        self.go("clears finish", None, |next| {
            let given_up = (0..config.targets)
                .filter(|target| next.targets[*target].line == TargetLine::Gone)
                .map(bit)
                .sum();
            next.finish.epoch += 1;
            next.finish.done = match config.is(Mutant::RollForgetsGivenUp) {
                true => 0,
                false => given_up,
            };
            if !config.is(Mutant::SentinelsOutliveRoll) {
                next.finish.published = 0;
                next.finish.taken = 0;
            }
            next.finish.stop = 0;
            next.launcher.line = match config.is(Mutant::FinishClearedFirst) {
                true => LauncherLine::Roll,
                false => LauncherLine::RollStep,
            };
        });
    }

    fn roll_step(&mut self) {
        let (config, state) = (self.config, self.state);
        let no_target = (0..config.targets).all(|seat| !state.targets[seat].may_work());
        if no_target && !rules::nothing_needs_a_target(config, state) {
            return self.go("has no target left and fails the run", None, |next| {
                next.launcher.line = LauncherLine::Failed;
            });
        }
        self.go("starts new drafters from the checkpoint", None, |next| {
            let step = next.checkpoint.step + 1;
            next.word = StepWord {
                step,
                generation: next.word.generation + 1,
                state: StepState::Gather,
                mask: 0,
                members: bit(config.drafters) - 1,
            };
            next.budget = Budget {
                step,
                generation: next.word.generation,
                anchors: 0,
            };
            for seat in members_of(next.word.members) {
                let c2_done = next.drafters[seat].seat.c2_done;
                let drafter = &mut next.drafters[seat];
                drafter.begin(DrafterLine::Start, &next.word);
                drafter.weights = next.checkpoint.units;
                drafter.trained = next.checkpoint.step;
                drafter.seat.c2_done = match config.is(Mutant::C2DoneOutlivesRoll) {
                    true => c2_done,
                    false => next.checkpoint.step,
                };
            }
            next.launcher = IDLE;
        });
    }
}

/// The first slot that the dead target was filling.
fn filling(config: &Config, state: &State, seat: usize) -> Option<usize> {
    (0..config.all_slots())
        .find(|slot| state.slots[*slot].is_with(Phase::Filling, seat))
        .filter(|_| !config.is(Mutant::NoR1))
}

/// The first slot that the dead drafter held.
fn held(config: &Config, state: &State, seat: usize) -> Option<usize> {
    let held = |slot: &usize| state.slots[*slot].is_with(Phase::Held, seat);
    state.first_by_unit((0..config.slots).filter(held))
}

fn is_leased(state: &State, seat: usize, unit: usize) -> bool {
    let word = &state.ledger[unit];
    word.state == UnitState::Leased && word.by == seat as u8
}

fn after_r2(config: &Config) -> LauncherLine {
    match config.recount {
        Recount::ByTheHolder => LauncherLine::R6,
        Recount::Stamped | Recount::Unstamped => LauncherLine::R5,
    }
}

/// Goes on to the next line that touches what others can change: nobody but the dead member could have made
/// another slot or lease of its own.
pub fn skip_local_lines(config: &Config, state: &mut State) {
    loop {
        let launcher = &state.launcher;
        let (seat, at) = (launcher.seat as usize, launcher.at as usize);
        let (line, at) = match launcher.line {
            LauncherLine::R1 if filling(config, state, seat).is_none() => (LauncherLine::R3, 0),
            LauncherLine::R3 if at == config.all_units() => (LauncherLine::R4, 0),
            LauncherLine::R3 if !is_leased(state, seat, at) => (LauncherLine::R3, at + 1),
            LauncherLine::R2 if held(config, state, seat).is_none() => {
                if config.is(Mutant::R6BeforeR2) {
                    state.launcher = IDLE;
                    state.drafters[seat].end(DrafterLine::Gone);
                    return;
                }
                match config.is(Mutant::RecoveryBeforeR0) {
                    true => (LauncherLine::R0, 0),
                    false => (after_r2(config), 0),
                }
            }
            LauncherLine::R5 if launcher.looked_at == bit(config.slots) - 1 => {
                (LauncherLine::R5Budget, 0)
            }
            _ => return,
        };
        state.launcher.line = line;
        state.launcher.at = at as u8;
    }
}
