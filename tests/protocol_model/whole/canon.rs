//! Which states are one: those that differ in what nobody can read any more, or in names only.

use super::members::{DrafterLine, EMPTY_SEAT, Seat, Target};
use super::state::{
    Budget, FREE, MAX_SLOTS, Mask, NONE, Phase, Slot, State, UnitState, Word, bit, has, members_of,
};
use super::{Config, Mutant};

impl State {
    /// Clears what no later access can read, so that states which differ only there are one.
    pub fn forget_the_unreadable(&mut self, config: &Config) {
        let passed = (self.word.generation, self.word.step);
        for slot in &mut self.slots {
            if slot.phase == Phase::Free {
                let tag = slot.tag;
                *slot = FREE;
                if config.is(Mutant::TagOutlivesTheSlot) {
                    slot.tag = tag;
                }
            }
            if slot.counted < self.word.generation {
                slot.counted = 0;
            }
        }
        let mut oldest = passed;
        for drafter in &mut self.drafters[..config.drafters] {
            // A stamp is compared with the word's pair only. Generations never fall, and steps never fall
            // within one, so a stamp that has been passed stays passed.
            let seat = &mut drafter.seat;
            if (seat.generation, seat.step) < passed {
                *seat = Seat {
                    c2_done: seat.c2_done,
                    ..EMPTY_SEAT
                };
            }
            if drafter.has_weights() && drafter.line != DrafterLine::Left {
                oldest = oldest.min((drafter.generation, drafter.step));
            }
        }
        // A budget older than every drafter is replaced by the next reservation, whatever it says.
        if (self.budget.generation, self.budget.step) < oldest {
            self.budget = Budget {
                step: 0,
                generation: 0,
                anchors: 0,
            };
        }
        for word in &mut self.ledger {
            // Steps are compared with this checkpoint's or a later one's.
            if word.state == UnitState::Done {
                word.by = word.by.max(self.checkpoint.step);
            }
        }
    }

    /// Makes one of all states that differ only in which slot of the ring is which.
    ///
    /// Nobody prefers a slot for its number: a free one is as good as another, and whoever has a choice among
    /// slots with units goes by the unit (or tries all).
    pub fn sort_slots(&mut self, config: &Config) {
        let mut order: [usize; MAX_SLOTS] = std::array::from_fn(|slot| slot);
        let order = &mut order[..config.slots];
        order.sort_by_key(|slot| {
            let slot = &self.slots[*slot];
            (slot.phase as u8, slot.unit, slot.owner, slot.tag)
        });
        let slots = self.slots;
        // Evaluation slots, and no slot, keep their numbers.
        let mut place: [u8; NONE as usize + 1] = std::array::from_fn(|slot| slot as u8);
        for (new, old) in order.iter().enumerate() {
            self.slots[new] = slots[*old];
            place[*old] = new as u8;
        }
        let moved = |mask: Mask| members_of(mask).map(|slot| bit(place[slot] as usize)).sum();
        for target in &mut self.targets[..config.targets] {
            target.slot = place[target.slot as usize];
        }
        for drafter in &mut self.drafters[..config.drafters] {
            drafter.slot = place[drafter.slot as usize];
            drafter.items = moved(drafter.items);
            drafter.spare = moved(drafter.spare);
            drafter.uncounted = moved(drafter.uncounted);
        }
        self.launcher.looked_at = moved(self.launcher.looked_at);
    }

    /// Makes one of all states that differ only in which of two targets is which: all targets are alike.
    pub fn sort_targets(&mut self, config: &Config) {
        if config.targets == 2 && self.all_about_target(0) > self.all_about_target(1) {
            self.targets.swap(0, 1);
            let done = self.finish.done;
            self.finish.done = done >> 1 | (done & 1) << 1;
            for word in &mut self.ledger {
                if word.state == UnitState::Leased {
                    word.by ^= 1;
                }
            }
            for slot in &mut self.slots {
                if slot.phase == Phase::Filling {
                    slot.owner ^= 1;
                }
            }
            if self.launcher.is_about_a_target() {
                self.launcher.seat ^= 1;
            }
        }
    }

    /// Everything that names target `seat`. It fills one slot at most.
    fn all_about_target(&self, seat: usize) -> impl Ord + use<> {
        let Target {
            line, unit, epoch, ..
        } = self.targets[seat];
        let leases = |word: &Word| word.state == UnitState::Leased && word.by == seat as u8;
        let fills = |slot: &Slot| slot.is_with(Phase::Filling, seat).then_some(slot.written);
        (
            (line as u8, unit, epoch),
            has(self.finish.done, seat),
            self.ledger.each_ref().map(leases),
            self.slots.each_ref().map(fills).into_iter().max(),
            self.launcher.is_about_a_target() && self.launcher.seat == seat as u8,
        )
    }

    /// The first of `slots` by the number of its unit.
    pub fn first_by_unit(&self, slots: impl Iterator<Item = usize>) -> Option<usize> {
        slots.min_by_key(|slot| self.slots[*slot].unit)
    }
}
