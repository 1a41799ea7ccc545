//! The lines of a live target.

use super::members::{Target, TargetLine};
use super::state::{FREE, NONE, Phase, Slot, State, UnitState, bit, has};
use super::{Config, Mutant, rules};
use crate::explore::{Steps, label};

/// Adds every access that target `seat` may make next.
pub fn steps(config: &Config, state: &State, seat: usize, out: &mut Steps<State>) {
    let target = &state.targets[seat];
    let (unit, slot) = (target.unit as usize, target.slot as usize);
    let mut go = |line: &'static str, item: Option<usize>, change: &dyn Fn(&mut State)| {
        let mut next = state.clone();
        change(&mut next);
        out.step(label("target", seat, line, item), next);
    };
    match target.line {
        TargetLine::P0 => {
            let pending = |unit: &usize| state.ledger[*unit].state == UnitState::Pending;
            match (0..config.all_units()).find(pending) {
                // Evaluation units come first; the training units are alike, so the order of data is kept.
                Some(unit) => go("p0 leases unit", Some(unit), &|next| {
                    next.ledger[unit].state = UnitState::Leased;
                    next.ledger[unit].by = seat as u8;
                    next.targets[seat].unit = unit as u8;
                    next.targets[seat].line = TargetLine::P1;
                }),
                None => go("finds nothing to lease", None, &|next| {
                    next.targets[seat] = Target {
                        unit: 0,
                        epoch: state.finish.epoch,
                        ..Target::at(TargetLine::Scan)
                    };
                }),
            }
        }
        TargetLine::P1 => {
            for slot in config.slots_for(unit) {
                if state.slots[slot].phase == Phase::Free {
                    let line = match config.is(Mutant::PublishBeforePayload) {
                        true => TargetLine::P3,
                        false => TargetLine::P2,
                    };
                    go("p1 claims slot", Some(slot), &|next| {
                        next.slots[slot] = Slot {
                            phase: Phase::Filling,
                            owner: seat as u8,
                            tag: state.slots[slot].tag,
                            ..FREE
                        };
                        next.targets[seat].slot = slot as u8;
                        next.targets[seat].line = line;
                    });
                }
            }
        }
        TargetLine::P2 => go("p2 writes slot", Some(slot), &|next| {
            let header = &mut next.slots[slot];
            header.unit = target.unit;
            header.written = true;
            if !config.is(Mutant::TagOutlivesTheSlot) {
                header.tag = 0;
            }
            next.targets[seat].line = match config.is(Mutant::PublishBeforePayload) {
                true => TargetLine::P4,
                false => TargetLine::P3,
            };
        }),
        TargetLine::P3 if !state.slots[slot].is_with(Phase::Filling, seat) => out.violation(
            label("target", seat, "p3", slot),
            "a slot was taken from a live target",
        ),
        TargetLine::P3 => go("p3 publishes slot", Some(slot), &|next| {
            next.slots[slot].phase = Phase::Ready;
            next.slots[slot].owner = 0;
            next.targets[seat].line = match config.is(Mutant::PublishBeforePayload) {
                true => TargetLine::P2,
                false => TargetLine::P4,
            };
        }),
        TargetLine::P4 => go("p4 wakes the drafters", None, &|next| {
            next.targets[seat] = Target::starting();
        }),
        TargetLine::Scan => {
            let fine = rules::needs_no_target(state, unit)
                || config.is(Mutant::FinishCountsLeased)
                    && state.ledger[unit].state == UnitState::Leased;
            go("looks at unit", Some(unit), &|next| {
                if fine {
                    next.targets[seat].unit += 1;
                } else {
                    next.targets[seat] = Target::starting();
                }
            });
        }
        TargetLine::Finish
            if target.epoch != state.finish.epoch && !config.is(Mutant::FinishWithoutEpoch) =>
        {
            go("finds its scan out of date", None, &|next| {
                next.targets[seat] = Target::starting();
            })
        }
        TargetLine::Finish => go("sets its finish bit", None, &|next| {
            let before = next.finish.done;
            next.finish.done |= bit(seat);
            let last = before != next.finish.done && next.finish.done == config.all_targets();
            next.targets[seat] = Target {
                epoch: target.epoch,
                ..Target::at(match last {
                    true => TargetLine::Publish,
                    false => TargetLine::Parked,
                })
            };
        }),
        TargetLine::Publish => go("publishes the sentinels", None, &|next| {
            publish_sentinels(config, next, target.epoch);
            next.targets[seat] = Target::at(TargetLine::Parked);
        }),
        TargetLine::Parked if !has(state.finish.done, seat) => {
            go("sees finish cleared", None, &|next| {
                next.targets[seat] = Target::starting();
            })
        }
        TargetLine::Parked => {
            if state.finish.done == config.all_targets()
                && state.finish.published == 0
                && !config.is(Mutant::NobodyHelpsToPublish)
            {
                go("helps to publish the sentinels", None, &|next| {
                    publish_sentinels(config, next, state.finish.epoch);
                });
            }
        }
        TargetLine::Dead | TargetLine::Gone => {}
    }
}

/// Goes on to the next line that touches shared memory.
pub fn skip_local_lines(config: &Config, state: &mut State, seat: usize) {
    let target = &mut state.targets[seat];
    if target.line == TargetLine::Scan && target.unit as usize == config.all_units() {
        target.line = TargetLine::Finish;
        target.unit = NONE;
    }
    // p4 only wakes, and nobody sleeps for good here; what matters is that the seat still names the unit.
    if target.line == TargetLine::P4 && config.quarantine == 0 {
        *target = Target::starting();
    }
}

/// The compare-and-swap from zero that publishes one sentinel per drafter, under the count of roll-backs that
/// was read with the finish bits.
pub fn publish_sentinels(config: &Config, state: &mut State, epoch: u8) {
    let sentinels = config.drafters as u8;
    let finish = &mut state.finish;
    if config.is(Mutant::SentinelsAreAdded) {
        finish.published += sentinels;
    } else if finish.published == 0
        && (finish.epoch == epoch || config.is(Mutant::PublishWithoutEpoch))
    {
        finish.published = sentinels;
    }
}
