//! The lines of a live drafter.

use super::state::{
    Budget, Drafter, DrafterLine, FREE, Mask, NONE, Phase, State, StepState, UnitState, bit, has,
    members_of,
};
use super::{Config, Leave, Leftover, Mutant, Recount, Tags, rules};
use crate::explore::{Steps, label};

/// Adds every access that drafter `seat` may make next.
pub fn steps(config: &Config, state: &State, seat: usize, out: &mut Steps<State>) {
    let mut here = Here {
        config,
        state,
        seat,
        me: &state.drafters[seat],
        out,
    };
    match here.me.line {
        DrafterLine::Start => here.start(),
        DrafterLine::Take => here.take(),
        DrafterLine::C0 => here.c0(),
        DrafterLine::GiveBack => here.give_back(),
        DrafterLine::C0t => here.c0t(),
        DrafterLine::C1 => here.c1(),
        DrafterLine::Tag => here.tag(),
        DrafterLine::Record => here.record(),
        DrafterLine::G1 => here.g1(),
        DrafterLine::Gather => here.gather(),
        DrafterLine::G2 => here.g2(),
        DrafterLine::Test => here.test(),
        DrafterLine::C2 => here.c2(),
        DrafterLine::C3 => here.c3(),
        DrafterLine::C2Done => here.c2_done(),
        DrafterLine::Stop => here.stop(),
        DrafterLine::Join => here.join(),
        DrafterLine::Recount => here.recount(),
        DrafterLine::Leaving => here.leaving(),
        DrafterLine::Boot => here.boot(),
        DrafterLine::Left | DrafterLine::Dead | DrafterLine::Gone => {}
    }
}

const UNWRITTEN: &str = "a drafter read a slot before its payload was written";

struct Here<'a> {
    config: &'a Config,
    state: &'a State,
    seat: usize,
    me: &'a Drafter,
    out: &'a mut Steps<State>,
}

impl Here<'_> {
    fn go(
        &mut self,
        line: &'static str,
        item: impl Into<Option<usize>>,
        change: impl FnOnce(&mut State, &mut Drafter),
    ) {
        let mut next = self.state.clone();
        let mut me = *self.me;
        change(&mut next, &mut me);
        next.drafters[self.seat] = me;
        self.out
            .step(label("drafter", self.seat, line, item.into()), next);
    }

    fn violation(&mut self, line: &'static str, rule: &str) {
        self.out
            .violation(label("drafter", self.seat, line, None), rule);
    }

    /// Whether the step word says that my (step, gen) is over without a commit.
    fn aborted(&self) -> bool {
        let word = &self.state.word;
        word.generation > self.me.generation
            || word.step == self.me.step && word.state == StepState::Aborted
    }

    fn join_if_aborted(&mut self) {
        if self.aborted() {
            self.go("sees the abort", None, |_, me| {
                me.line = DrafterLine::Join;
                me.slot = NONE;
                me.unit = NONE;
                me.reduced = 0;
                me.uncounted = 0;
                me.stopping = false;
            });
        }
    }

    /// The slots of the ring in which a unit waits.
    fn ready(&self) -> impl Iterator<Item = usize> + use<> {
        let mut ready = Vec::new();
        for slot in 0..self.config.slots {
            if self.state.slots[slot].phase == Phase::Ready {
                ready.push(slot);
            }
        }
        ready.into_iter()
    }

    /// The first slot of a set that is not empty.
    fn first(&self, slots: Mask) -> usize {
        let first = self.state.first_by_unit(members_of(slots));
        first.expect("the set of slots is not empty")
    }

    fn start(&mut self) {
        if rules::evaluation_units_are_written(self.config, self.state)
            || self.config.is(Mutant::StartsEarly)
        {
            self.go("sees all evaluation units", None, |_, me| {
                me.line = DrafterLine::Take;
            });
        }
    }

    fn take(&mut self) {
        let (config, state, me) = (self.config, self.state, self.me);
        self.join_if_aborted();

        if rules::all_settled(config, state) {
            self.go("sees all units DONE", None, |_, me| {
                me.line = DrafterLine::Leaving;
            });
        }
        if config.is(Mutant::LeavesOnSentinel)
            && self.has_sentinel()
            && self.ready().next().is_none()
            && me.items == 0
        {
            self.go("leaves, being drained", None, |_, me| {
                me.line = DrafterLine::Leaving;
            });
        }

        if rules::may_checkpoint(config, state, self.seat) {
            self.checkpoint();
        }

        let room = self.room_in_budget();
        if room && self.me.spare != 0 {
            let slot = self.first(self.me.spare);
            let unit = state.slots[slot].unit;
            self.go("reserves the anchors of held slot", slot, |next, me| {
                reserve(config, next, me, unit);
                me.spare &= !bit(slot);
                me.items |= bit(slot);
                me.line = DrafterLine::C0t;
                me.slot = slot as u8;
            });
        } else if room {
            for slot in self.ready() {
                if !state.slots[slot].written {
                    return self.violation("reads the header", UNWRITTEN);
                }
                let unit = state.slots[slot].unit;
                self.go("reserves the anchors of slot", slot, |next, me| {
                    reserve(config, next, me, unit);
                    me.line = DrafterLine::C0;
                    me.slot = slot as u8;
                    me.unit = unit;
                });
            }
        }

        if config.is(Mutant::SentinelInOwnMemory) {
            if state.finish.taken < state.finish.published && !me.drained {
                self.go("takes a sentinel from the queue", None, |next, me| {
                    next.finish.taken += 1;
                    me.drained = true;
                });
            }
        } else if state.finish.published > 0 && !self.has_sentinel() {
            let seat = self.seat;
            self.go("takes its sentinel", None, |next, _| {
                next.finish.taken |= bit(seat);
            });
        }

        self.close();
    }

    fn has_sentinel(&self) -> bool {
        match self.config.is(Mutant::SentinelInOwnMemory) {
            true => self.me.drained,
            false => has(self.state.finish.taken, self.seat),
        }
    }

    /// The anchors of (step, gen) reserved so far, or none when the word is of an earlier pair.
    fn room_in_budget(&self) -> bool {
        let (budget, me) = (&self.state.budget, self.me);
        match (budget.generation, budget.step).cmp(&(me.generation, me.step)) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => budget.anchors < self.config.batch,
            std::cmp::Ordering::Greater => false,
        }
    }

    fn budget_is_full(&self) -> bool {
        let (budget, me) = (&self.state.budget, self.me);
        (budget.step, budget.generation) == (me.step, me.generation)
            && budget.anchors >= self.config.batch
    }

    fn close(&mut self) {
        let (config, state, me) = (self.config, self.state, self.me);
        let stop = state.stop_asked || state.finish.stop > 0;
        let empty = self.has_sentinel() && self.ready().next().is_none() && me.spare == 0;
        if !(stop || empty || self.budget_is_full()) {
            return;
        }
        let others_have_items = (0..config.drafters).any(|other| {
            let seat = &state.drafters[other].seat;
            other != self.seat
                && has(state.word.members, other)
                && (seat.step, seat.generation) == (me.step, me.generation)
                && seat.units != 0
        });
        if me.items == 0 && !stop && !others_have_items && !config.is(Mutant::CloseWithoutItems) {
            return;
        }
        if rules::owes_checkpoint(config, state, self.seat) {
            return;
        }
        self.go("closes its step", None, |_, me| {
            me.line = DrafterLine::Tag;
        });
    }

    fn checkpoint(&mut self) {
        let step = rules::step_to_save(self.config, self.me);
        let units = rules::units_done_up_to(self.config, self.state, step);
        if units != self.me.weights {
            self.violation(
                "writes a checkpoint",
                "a checkpoint's ledger and its weights differ",
            );
            return;
        }
        self.go("writes the checkpoint of step", step as usize, |next, _| {
            next.checkpoint.step = step;
            next.checkpoint.units = units;
        });
    }

    fn c0(&mut self) {
        let (slot, unit, seat) = (self.me.slot as usize, self.me.unit, self.seat as u8);
        let found = &self.state.slots[slot];
        if found.phase == Phase::Ready && found.unit == unit {
            self.go("c0 takes slot", slot, |next, me| {
                next.slots[slot].phase = Phase::Held;
                next.slots[slot].owner = seat;
                me.line = DrafterLine::C0t;
            });
        } else {
            self.go("loses c0 for slot", slot, |_, me| {
                me.line = DrafterLine::GiveBack;
                me.slot = NONE;
            });
        }
    }

    fn give_back(&mut self) {
        let (config, me, budget) = (self.config, self.me, &self.state.budget);
        let anchors = config.anchors_of(me.unit);
        let stands = (budget.step, budget.generation) == (me.step, me.generation)
            && !config.is(Mutant::LostReservationIsKept)
            || config.is(Mutant::GiveBackToAnyGeneration);
        if stands && budget.anchors < anchors {
            return self.violation("gives back", "more anchors were given back than reserved");
        }
        self.go("gives the anchors back", None, |next, me| {
            if stands {
                next.budget.anchors -= anchors;
            }
            me.line = DrafterLine::Take;
            me.unit = NONE;
        });
    }

    fn c0t(&mut self) {
        let (slot, step) = (self.me.slot as usize, self.me.step);
        let prefetched = has(self.me.items, slot);
        self.go("c0t tags slot", slot, |next, me| {
            next.slots[slot].tag = step;
            me.after_c0t(prefetched);
        });
    }

    fn c1(&mut self) {
        let slot = self.me.slot as usize;
        if !self.state.slots[slot].written {
            return self.violation("c1", UNWRITTEN);
        }
        self.go("c1 reads slot", slot, |_, me| {
            me.items |= bit(slot);
            me.slot = NONE;
            me.unit = NONE;
            me.line = DrafterLine::Take;
        });
    }

    /// One access per visit: tag an item, untag a slot that found no room, hand it back.
    fn tag(&mut self) {
        let step = self.me.step;
        match next_tag(self.config, self.state, self.me) {
            Some(TagAccess::Tag(slot)) => self.go("c0t tags slot", slot, |next, _| {
                next.slots[slot].tag = step;
            }),
            Some(TagAccess::Untag(slot)) => self.go("takes the tag from slot", slot, |next, _| {
                next.slots[slot].tag = 0;
            }),
            Some(TagAccess::HandBack(slot)) => self.go("hands back slot", slot, |next, me| {
                next.slots[slot].phase = Phase::Ready;
                next.slots[slot].owner = 0;
                me.spare &= !bit(slot);
            }),
            None => unreachable!("a drafter with nothing to tag has gone on"),
        }
    }

    fn record(&mut self) {
        let units = self.units_of(self.me.items);
        let late = self.config.is(Mutant::RecordAfterG1);
        self.go("writes its seat", None, |next, me| {
            me.seat.step = me.step;
            me.seat.generation = me.generation;
            me.seat.units = units;
            me.seat.stop = next.stop_asked || next.finish.stop > 0;
            me.line = match late {
                true => DrafterLine::Gather,
                false => DrafterLine::G1,
            };
        });
    }

    fn units_of(&self, slots: Mask) -> Mask {
        members_of(slots)
            .map(|slot| bit(self.state.slots[slot].unit as usize))
            .fold(0, |units, unit| units | unit)
    }

    fn g1(&mut self) {
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

    fn gather(&mut self) {
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

    fn leave_empty_step(&mut self) {
        self.go("leaves the empty step: all units DONE", None, |_, me| {
            me.stopping = false;
            me.line = DrafterLine::Leaving;
        });
    }

    fn g2(&mut self) {
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

    fn test(&mut self) {
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

    fn c2(&mut self) {
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

    fn c3(&mut self) {
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

    fn c2_done(&mut self) {
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

    fn stop(&mut self) {
        self.go(
            "writes the stop after step",
            self.me.step as usize - 1,
            |next, me| {
                next.finish.stop = me.step - 1;
                me.line = DrafterLine::Leaving;
            },
        );
    }

    fn join(&mut self) {
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
    fn recount(&mut self) {
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

    fn leaving(&mut self) {
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

    fn boot(&mut self) {
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

enum TagAccess {
    Tag(usize),
    Untag(usize),
    HandBack(usize),
}

fn next_tag(config: &Config, state: &State, me: &Drafter) -> Option<TagAccess> {
    let tag_of = |slot: &usize| state.slots[*slot].tag;
    let untagged = members_of(me.items).filter(|slot| tag_of(slot) != me.step);
    let stale = members_of(me.spare).filter(|slot| tag_of(slot) != 0);
    if let Some(slot) = state.first_by_unit(untagged)
        && !config.is(Mutant::NoTag)
    {
        Some(TagAccess::Tag(slot))
    } else if let Some(slot) = state.first_by_unit(stale)
        && !config.is(Mutant::LeftoverKeepsTag)
    {
        Some(TagAccess::Untag(slot))
    } else if me.spare.count_ones() > 1 && config.leftover == Leftover::HandBack {
        let slot = state.first_by_unit(members_of(me.spare));
        slot.map(TagAccess::HandBack)
    } else {
        None
    }
}

impl Drafter {
    /// A slot that was prefetched has been read already.
    fn after_c0t(&mut self, prefetched: bool) {
        self.line = DrafterLine::C1;
        if prefetched {
            self.line = DrafterLine::Take;
            self.slot = NONE;
        }
    }
}

/// Goes on to the next line that touches shared memory.
pub fn skip_local_lines(config: &Config, state: &mut State, seat: usize) {
    let me = &state.drafters[seat];
    state.drafters[seat].line = match me.line {
        DrafterLine::Start if config.evaluation == 0 => DrafterLine::Take,
        DrafterLine::C0t if config.tags == Tags::AtClose || config.is(Mutant::NoTag) => {
            let me = &mut state.drafters[seat];
            return me.after_c0t(has(me.items, me.slot as usize));
        }
        DrafterLine::Recount if me.uncounted == 0 => DrafterLine::Take,
        DrafterLine::Tag if next_tag(config, state, me).is_none() => {
            match config.is(Mutant::RecordAfterG1) {
                true => DrafterLine::G1,
                false => DrafterLine::Record,
            }
        }
        DrafterLine::C2 if me.items == 0 => DrafterLine::C2Done,
        line => line,
    };
}

fn reserve(config: &Config, state: &mut State, me: &Drafter, unit: u8) {
    let anchors = config.anchors_of(unit);
    let budget = &mut state.budget;
    if (budget.step, budget.generation) == (me.step, me.generation) {
        budget.anchors += anchors;
    } else {
        *budget = Budget {
            step: me.step,
            generation: me.generation,
            anchors,
        };
    }
}
