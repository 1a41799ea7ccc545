//! The lines of a live drafter, from taking units to writing its seat.

mod group;
mod settle;

use super::members::{Drafter, DrafterLine};
use super::state::{Budget, Mask, NONE, Phase, State, StepState, bit, has, members_of};
use super::{Config, Leftover, Mutant, Tags, rules};
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
