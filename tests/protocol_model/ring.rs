//! Targets, drafters, slots and the ledger, without steps: a unit's effect happens at its own c2.
//!
//! It answers one question: whatever line a member dies before, is each unit's effect made exactly once, and
//! can all units still be brought to DONE? Recovery is a process of its own here, one access at a time.

use crate::bits::{Codec, Reader, Writer};
use crate::explore::{Model, Steps, explore, label};

const MAX_UNITS: usize = 4;
const MAX_SLOTS: usize = 3;
const MAX_MEMBERS: usize = 4;
const NONE: u8 = 7;

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutant {
    /// p3 before p2.
    PublishBeforePayload,
    /// c3 before c2.
    FreeBeforeDone,
    /// r2 makes a held slot READY without asking the ledger whether its unit is DONE.
    RedeliverWithoutLedger,
    /// r3 puts a lease back without looking for its unit in the slots.
    RequeueWithoutLooking,
    /// r3 overwrites the ledger word instead of comparing and swapping it.
    RequeueByStore,
    /// r3 counts only READY slots as holding the unit.
    OverlookHeld,
    /// A target claims a slot by a store, after having seen it FREE.
    ClaimByStore,
}

struct Ring {
    targets: usize,
    drafters: usize,
    slots: usize,
    units: usize,
    kills: u8,
    mutant: Option<Mutant>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ledger {
    Pending,
    Leased,
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Word {
    state: Ledger,
    seat: u8,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Free,
    Filling,
    Ready,
    Held,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Slot {
    phase: Phase,
    owner: u8,
    unit: u8,
    /// Header and payload are those of the last claim.
    written: bool,
}

/// The line a member comes to next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Line {
    Start,
    P1,
    P1Store,
    P2,
    P3,
    C1,
    C2,
    C3,
    Dead,
    /// The launcher works through the dead member's slots (r1 or r2).
    Slots,
    R3,
    R3Look,
    R3Swap,
}

const LINES: [Line; 13] = [
    Line::Start,
    Line::P1,
    Line::P1Store,
    Line::P2,
    Line::P3,
    Line::C1,
    Line::C2,
    Line::C3,
    Line::Dead,
    Line::Slots,
    Line::R3,
    Line::R3Look,
    Line::R3Swap,
];

#[derive(Clone, Copy, Debug, PartialEq)]
struct Member {
    line: Line,
    unit: u8,
    slot: u8,
}

const IDLE: Member = Member {
    line: Line::Start,
    unit: NONE,
    slot: NONE,
};

#[derive(Clone, Debug)]
struct State {
    ledger: [Word; MAX_UNITS],
    slots: [Slot; MAX_SLOTS],
    members: [Member; MAX_MEMBERS],
    effects: [u8; MAX_UNITS],
    kills: u8,
}

impl Ring {
    fn visit(&self, state: &mut State, codec: &mut impl Codec) {
        for unit in 0..self.units {
            let word = &mut state.ledger[unit];
            codec.choice(
                &mut word.state,
                &[Ledger::Pending, Ledger::Leased, Ledger::Done],
            );
            codec.bits(&mut word.seat, 2);
            codec.bits(&mut state.effects[unit], 2);
        }
        for slot in &mut state.slots[..self.slots] {
            codec.choice(
                &mut slot.phase,
                &[Phase::Free, Phase::Filling, Phase::Ready, Phase::Held],
            );
            codec.bits(&mut slot.owner, 2);
            codec.bits(&mut slot.unit, 3);
            codec.flag(&mut slot.written);
        }
        for member in &mut state.members[..self.targets + self.drafters] {
            codec.choice(&mut member.line, &LINES);
            codec.bits(&mut member.unit, 3);
            codec.bits(&mut member.slot, 3);
        }
        codec.bits(&mut state.kills, 2);
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// The lines of a live target: p0 to p3 (p4 only wakes).
    fn target(&self, state: &State, seat: usize, out: &mut Steps<State>) {
        let Member { line, unit, slot } = state.members[seat];
        let (u, s) = (unit as usize, slot as usize);
        let mut go = |line: &'static str, item: usize, change: &dyn Fn(&mut State)| {
            let mut next = state.clone();
            change(&mut next);
            out.step(label("target", seat, line, item), next);
        };
        match line {
            Line::Start => {
                for unit in 0..self.units {
                    if state.ledger[unit].state == Ledger::Pending {
                        go("p0 leases unit", unit, &|next| {
                            next.ledger[unit] = leased(seat);
                            next.members[seat] = member(Line::P1, unit as u8, NONE);
                        });
                    }
                }
            }
            Line::P1 => {
                for slot in 0..self.slots {
                    if state.slots[slot].phase != Phase::Free {
                        continue;
                    }
                    if self.is(Mutant::ClaimByStore) {
                        go("p1 sees FREE slot", slot, &|next| {
                            next.members[seat] = member(Line::P1Store, unit, slot as u8);
                        });
                    } else {
                        go("p1 claims slot", slot, &|next| {
                            next.slots[slot] = filling(seat);
                            let line = match self.is(Mutant::PublishBeforePayload) {
                                true => Line::P3,
                                false => Line::P2,
                            };
                            next.members[seat] = member(line, unit, slot as u8);
                        });
                    }
                }
            }
            Line::P1Store => go("p1 stores its claim on slot", s, &|next| {
                next.slots[s] = filling(seat);
                next.members[seat].line = Line::P2;
            }),
            Line::P2 => go("p2 writes header and payload of slot", s, &|next| {
                next.slots[s].unit = unit;
                next.slots[s].written = true;
                next.members[seat] = match self.is(Mutant::PublishBeforePayload) {
                    true => IDLE,
                    false => member(Line::P3, unit, slot),
                };
            }),
            Line::P3 if !owns(&state.slots[s], Phase::Filling, seat) => out.violation(
                label("target", seat, "p3", s),
                "a slot was taken from a live target",
            ),
            Line::P3 => go("p3 publishes slot", s, &|next| {
                next.slots[s].phase = Phase::Ready;
                next.slots[s].owner = 0;
                next.members[seat] = match self.is(Mutant::PublishBeforePayload) {
                    true => member(Line::P2, unit, slot),
                    false => IDLE,
                };
            }),
            _ => unreachable!("a target never comes to {line:?} of unit {u}"),
        }
    }

    /// The lines of a live drafter: c0 to c3, each unit committed for itself.
    fn drafter(&self, state: &State, seat: usize, out: &mut Steps<State>) {
        let Member { line, unit, slot } = state.members[seat];
        let (u, s) = (unit as usize, slot as usize);
        let mut next = state.clone();
        match line {
            Line::Start => {
                for slot in 0..self.slots {
                    if state.slots[slot].phase == Phase::Ready {
                        let mut next = state.clone();
                        next.slots[slot].phase = Phase::Held;
                        next.slots[slot].owner = seat as u8;
                        next.members[seat] = member(Line::C1, NONE, slot as u8);
                        out.step(label("drafter", seat, "c0 takes slot", slot), next);
                    }
                }
            }
            Line::C1 if !state.slots[s].written => out.violation(
                label("drafter", seat, "c1", s),
                "a drafter read a slot before its payload was written",
            ),
            Line::C1 => {
                let line = match self.is(Mutant::FreeBeforeDone) {
                    true => Line::C3,
                    false => Line::C2,
                };
                next.members[seat] = member(line, state.slots[s].unit, slot);
                out.step(label("drafter", seat, "c1 reads slot", s), next);
            }
            Line::C2 if state.ledger[u].state == Ledger::Done => out.violation(
                label("drafter", seat, "c2", u),
                "a unit took effect twice: its second c2 found it DONE",
            ),
            Line::C2 => {
                next.ledger[u] = DONE;
                next.effects[u] += 1;
                next.members[seat] = match self.is(Mutant::FreeBeforeDone) {
                    true => IDLE,
                    false => member(Line::C3, unit, slot),
                };
                out.step(label("drafter", seat, "c2 marks DONE unit", u), next);
            }
            Line::C3 if !owns(&state.slots[s], Phase::Held, seat) => out.violation(
                label("drafter", seat, "c3", s),
                "a slot was taken from a live drafter",
            ),
            Line::C3 => {
                next.slots[s] = FREE;
                next.members[seat] = match self.is(Mutant::FreeBeforeDone) {
                    true => member(Line::C2, unit, slot),
                    false => IDLE,
                };
                out.step(label("drafter", seat, "c3 frees slot", s), next);
            }
            _ => unreachable!("a drafter never comes to {line:?}"),
        }
    }

    /// The launcher's recovery of the dead member in `seat`; its next access is that member's line.
    fn recovery(&self, state: &State, seat: usize, out: &mut Steps<State>) {
        let Member { line, unit, slot } = state.members[seat];
        let u = unit as usize;
        let mut next = state.clone();
        let mut go = |line: &'static str, item: Option<usize>, next: State| {
            out.step(label("launcher for seat ", seat, line, item), next);
        };
        match line {
            Line::Dead => {
                next.members[seat].line = Line::Slots;
                go("waitid", None, next);
            }
            Line::Slots => match state.slots[..self.slots].iter().position(|slot| {
                slot.phase != Phase::Ready && slot.phase != Phase::Free && slot.owner == seat as u8
            }) {
                Some(slot) if state.slots[slot].phase == Phase::Filling => {
                    next.slots[slot] = FREE;
                    go("r1 frees slot", Some(slot), next);
                }
                Some(slot) => {
                    let held = &mut next.slots[slot];
                    let done = state.ledger[held.unit as usize].state == Ledger::Done;
                    if done && !self.is(Mutant::RedeliverWithoutLedger) {
                        *held = FREE;
                        go("r2 frees slot", Some(slot), next);
                    } else {
                        held.phase = Phase::Ready;
                        held.owner = 0;
                        go("r2 redelivers slot", Some(slot), next);
                    }
                }
                None => {
                    next.members[seat] = match seat < self.targets {
                        true => member(Line::R3, 0, NONE),
                        false => IDLE,
                    };
                    go("has freed all slots", None, next);
                }
            },
            Line::R3 if u == self.units => {
                next.members[seat] = IDLE;
                go("gives the seat to a new member", None, next);
            }
            Line::R3 => {
                let line = match state.ledger[u] == leased(seat) {
                    true => Line::R3Look,
                    false => Line::R3,
                };
                let on = u8::from(line == Line::R3);
                next.members[seat] = member(line, unit + on, NONE);
                go("r3 reads the ledger of unit", Some(u), next);
            }
            Line::R3Look => {
                let found = !self.is(Mutant::RequeueWithoutLooking)
                    && state.slots[..self.slots].iter().any(|slot| {
                        let live = slot.phase == Phase::Ready
                            || slot.phase == Phase::Held && !self.is(Mutant::OverlookHeld);
                        live && slot.unit == unit
                    });
                next.members[seat] = match found {
                    true => member(Line::R3, unit + 1, NONE),
                    false => member(Line::R3Swap, unit, slot),
                };
                go("r3 looks in the slots for unit", Some(u), next);
            }
            Line::R3Swap => {
                if state.ledger[u] == leased(seat) || self.is(Mutant::RequeueByStore) {
                    next.ledger[u] = PENDING;
                }
                next.members[seat] = member(Line::R3, unit + 1, NONE);
                go("r3 puts back unit", Some(u), next);
            }
            _ => unreachable!("recovery never comes to {line:?}"),
        }
    }
}

const PENDING: Word = Word {
    state: Ledger::Pending,
    seat: 0,
};
const DONE: Word = Word {
    state: Ledger::Done,
    seat: 0,
};
const FREE: Slot = Slot {
    phase: Phase::Free,
    owner: 0,
    unit: NONE,
    written: false,
};

fn leased(seat: usize) -> Word {
    Word {
        state: Ledger::Leased,
        seat: seat as u8,
    }
}

fn filling(seat: usize) -> Slot {
    Slot {
        phase: Phase::Filling,
        owner: seat as u8,
        ..FREE
    }
}

fn member(line: Line, unit: u8, slot: u8) -> Member {
    Member { line, unit, slot }
}

fn owns(slot: &Slot, phase: Phase, seat: usize) -> bool {
    slot.phase == phase && slot.owner == seat as u8
}

impl Model for Ring {
    type State = State;
    type Key = [u64; 2];

    fn initial(&self) -> State {
        State {
            ledger: [PENDING; MAX_UNITS],
            slots: [FREE; MAX_SLOTS],
            members: [IDLE; MAX_MEMBERS],
            effects: [0; MAX_UNITS],
            kills: 0,
        }
    }

    fn pack(&self, state: &State) -> [u64; 2] {
        let mut writer = Writer::new();
        self.visit(&mut state.clone(), &mut writer);
        writer.finish()
    }

    fn unpack(&self, key: &[u64; 2]) -> State {
        let mut state = self.initial();
        self.visit(&mut state, &mut Reader::new(key));
        state
    }

    fn steps(&self, state: &State, out: &mut Steps<State>) {
        for seat in 0..self.targets + self.drafters {
            match state.members[seat].line {
                Line::Dead | Line::Slots | Line::R3 | Line::R3Look | Line::R3Swap => {
                    self.recovery(state, seat, out);
                    continue;
                }
                _ if seat < self.targets => self.target(state, seat, out),
                _ => self.drafter(state, seat, out),
            }
            if state.kills < self.kills {
                let mut next = state.clone();
                next.kills += 1;
                next.members[seat] = member(Line::Dead, NONE, NONE);
                out.fault(label("seat ", seat, "is killed", None), next);
            }
        }
    }

    fn check(&self, state: &State) -> Result<(), String> {
        match state.effects.iter().position(|effects| *effects > 1) {
            Some(unit) => Err(format!("unit {unit} took effect twice")),
            None => Ok(()),
        }
    }

    fn is_right_end(&self, state: &State) -> bool {
        state.ledger[..self.units].iter().all(|word| *word == DONE)
            && state.effects[..self.units].iter().all(|made| *made == 1)
            && state.slots.iter().all(|slot| slot.phase == Phase::Free)
    }
}

/// Targets, drafters, slots, units and kills of the default size.
const SMALL: Ring = Ring {
    targets: 2,
    drafters: 2,
    slots: 2,
    units: 2,
    kills: 2,
    mutant: None,
};

fn mutant(mutant: Mutant) -> Ring {
    Ring {
        mutant: Some(mutant),
        ..SMALL
    }
}

#[test]
fn each_unit_takes_effect_exactly_once() {
    explore(&SMALL, 10_000_000).expect_clean("ring", 10_000);
}

#[test]
#[ignore = "a larger size"]
fn each_unit_takes_effect_exactly_once_at_a_larger_size() {
    let ring = Ring { units: 3, ..SMALL };
    explore(&ring, 40_000_000).expect_clean("ring of three units", 500_000);
}

#[test]
fn every_planted_mistake_is_found() {
    let twice = "took effect twice";
    for (mistake, rule) in [
        (Mutant::PublishBeforePayload, "before its payload"),
        (Mutant::FreeBeforeDone, twice),
        (Mutant::RedeliverWithoutLedger, twice),
        (Mutant::RequeueWithoutLooking, twice),
        (Mutant::RequeueByStore, twice),
        (Mutant::OverlookHeld, twice),
        (Mutant::ClaimByStore, "taken from a live target"),
    ] {
        let name = format!("ring with {mistake:?}");
        explore(&mutant(mistake), 10_000_000).expect_broken(&name, rule);
    }
}
