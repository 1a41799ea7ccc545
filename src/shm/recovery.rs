//! Recovery: what the launcher does after `waitid` has proved a death, and when a replacement has loaded.
//!
//! Only the launcher calls these, one at a time, and never for a process that might still run. Every line is
//! an idempotent compare-and-swap, so that an interrupted recovery is simply run again.

use super::atomics::{AcqRel, Acquire, Relaxed, Release};
use super::error::{Result, ShmError};
use super::label::{Label, label};
use super::ledger::pending;
use super::payload::{View, view_of};
use super::seat::{Role, SeatState, item_of};
use super::segment::Segment;
use super::slot::SlotHeader;
use super::step::ranks;
use super::words::{
    BudgetWord, LedgerWord, MAX_GENERATION, QUARANTINE_DEATHS, SlotPhase, SlotWord, StepState,
    StepWord, UnitState, stamp,
};

/// Bytes of a NCCL unique id.
pub const UNIQUE_ID_BYTES: usize = 128;

/// What becomes of a dead target's seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Another incarnation will take it.
    Respawn,
    /// Nobody will: its finish bit is set.
    GiveUp,
}

/// A unit left out because it was the current item of three deaths.
#[derive(Clone, Copy, Debug)]
pub struct Quarantined<'a> {
    /// Unit, or eval unit.
    pub unit: u64,
    /// Whether it is a held-out unit.
    pub eval: bool,
    /// Deaths counted against it.
    pub deaths: u8,
    /// Its header and payload, when it died in a drafter's hands: save it before returning.
    pub payload: Option<(SlotHeader, View<'a>)>,
}

/// What a recovery did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Recovered {
    /// Slots that were being filled and are free again.
    pub freed: u32,
    /// Units whose step had committed: DONE in the dead drafter's name.
    pub committed: Vec<u64>,
    /// Units published again.
    pub redelivered: Vec<u64>,
    /// Units to be prefilled again.
    pub requeued: Vec<u64>,
    /// Units, or (true) eval units, left out.
    pub quarantined: Vec<(u64, bool)>,
    /// No target is left and this many units are not published: the run has failed.
    pub stranded: u64,
    /// Members after it.
    pub members: u32,
}

/// Recovers dead seats and admits replacements.
#[derive(Clone, Debug)]
pub struct Recovery {
    segment: Segment,
    quarantine: bool,
}

impl Recovery {
    /// For the launcher. `quarantine` false (tests): deaths are counted, but no unit is left out.
    pub fn new(segment: &Segment, quarantine: bool) -> Self {
        Self {
            segment: segment.clone(),
            quarantine,
        }
    }

    /// A target has died: r1, r3, r4.
    pub fn target_died(
        &self,
        target: u32,
        fate: Fate,
        mut on_quarantine: impl FnMut(&Quarantined<'_>),
    ) -> Recovered {
        let mut report = Recovered::default();
        self.count_death(target, &mut report, &mut on_quarantine);
        self.r1(target, &mut report);
        self.r3(target, &mut report);
        if fate == Fate::GiveUp {
            self.r4(target, &mut report);
        }
        report.members = self.segment.step_word().members;
        self.segment.vacate(target);
        self.segment.wake_all();
        report
    }

    /// A drafter has died: r0, r2, r5, r6. `unique_id` is what the next communicator is made from, where
    /// one is used.
    ///
    /// # Errors
    /// [`ShmError::GenerationsExhausted`].
    pub fn drafter_died(
        &self,
        rank: u32,
        unique_id: Option<&[u8; UNIQUE_ID_BYTES]>,
        mut on_quarantine: impl FnMut(&Quarantined<'_>),
    ) -> Result<Recovered> {
        let seat = self.segment.geometry().drafter_seat(rank);
        let mut report = Recovered::default();
        // An admission that was cut short also waits for its r6.
        let word = self.segment.step_word();
        let member = word.members >> rank & 1 == 1 || word.state == StepState::Aborted;
        if member {
            self.r0();
        }
        self.count_death(seat, &mut report, &mut on_quarantine);
        self.r2(seat, &mut report, &mut on_quarantine);
        let members = self.segment.step_word().members & !(1 << rank);
        if member {
            self.r5(members, unique_id)?;
            self.r6(members);
        }
        report.members = members;
        self.segment.vacate(seat);
        self.segment.wake_all();
        Ok(report)
    }

    /// A replacement has loaded and becomes a member: r0, r5, r6 with itself added. It makes no g1 until a
    /// member has sent it its state, which holds the step in GATHER. Should all who have it die first, the
    /// newcomers end with [`ShmError::Orphaned`], and are recovered like them.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] when no member with weights is there: they have left, which ends the run, or
    /// died, and then the run rolls back; [`ShmError::GenerationsExhausted`].
    pub fn admit(&self, rank: u32, unique_id: Option<&[u8; UNIQUE_ID_BYTES]>) -> Result<()> {
        let members = self.segment.step_word().members;
        let there = |&holder: &u32| {
            let seat = self.segment.geometry().drafter_seat(holder);
            holder != rank && self.segment.seat_state(seat) != SeatState::Left
        };
        let mut holders = ranks(self.segment.members_with_state()).filter(there);
        if holders.next().is_none() {
            let seat = self.segment.geometry().drafter_seat(rank);
            let state = "no member is there to send weights".to_owned();
            return Err(ShmError::OutOfOrder {
                seat,
                called: "admit",
                state,
            });
        }
        let members = members | 1 << rank;
        self.r0();
        self.r5(members, unique_id)?;
        self.r6(members);
        Ok(())
    }

    /// All drafters are dead and recovered, replacements that were waiting to be admitted too: the run goes on from the checkpoint of `step`, with `members`
    /// (a mask of ranks) as founders, which are started afterwards. Units trained after it become pending;
    /// how many.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] while there are members; [`ShmError::GenerationsExhausted`].
    pub fn roll_back(
        &self,
        step: u64,
        members: u32,
        unique_id: Option<&[u8; UNIQUE_ID_BYTES]>,
    ) -> Result<u64> {
        let segment = &self.segment;
        let word = segment.step_word();
        if word.members != 0 {
            let state = format!("members {:#x} have not been recovered", word.members);
            return Err(ShmError::OutOfOrder {
                seat: 0,
                called: "roll_back",
                state,
            });
        }
        let mut rolled = 0;
        for (cell, unit) in segment.ledger().iter().zip(0..) {
            let now = cell.load(Acquire);
            let unpacked = LedgerWord::unpack(now);
            if unpacked.state == UnitState::Done && unpacked.step > step {
                let again = pending(unpacked).pack();
                // Nobody trains now, and a DONE unit is in no slot: it cannot fail.
                rolled += u64::from(cell.compare_exchange(now, again, AcqRel, Relaxed).is_ok());
                segment.lower_cursor(unit);
            }
        }
        segment.clear_finish();
        // Drafters that had left, since all units were trained, are needed again: their seats are free.
        for rank in 0..segment.geometry().drafters {
            let seat = segment.geometry().drafter_seat(rank);
            if segment.seat_state(seat) == SeatState::Left {
                segment.vacate(seat);
            }
        }
        segment.control().step.saved.store(step, Release);
        let next = StepWord {
            step: step + 1,
            generation: self.next_generation()?,
            state: StepState::Aborted,
            mask: 0,
            members: 0,
        };
        segment.store_step(StepWord {
            generation: word.generation,
            ..next
        });
        self.r5(members, unique_id)?;
        self.r6(members);
        Ok(rolled)
    }

    fn next_generation(&self) -> Result<u32> {
        let generation = self.segment.step_word().generation;
        if generation >= MAX_GENERATION {
            return Err(ShmError::GenerationsExhausted(generation));
        }
        Ok(generation + 1)
    }

    /// r0: no member may commit, or open a step, from here to r6.
    pub fn r0(&self) {
        loop {
            let now = self.segment.step_word();
            let next = match now.state {
                StepState::Aborted => break,
                StepState::Gather | StepState::Reduce => StepWord {
                    state: StepState::Aborted,
                    ..now
                },
                // The committed step stands; it is the next one that starts again.
                StepState::Committed => StepWord {
                    step: now.step + 1,
                    state: StepState::Aborted,
                    mask: 0,
                    ..now
                },
            };
            label(Label::R0);
            if self.segment.change_step(now, next) {
                break;
            }
        }
        self.segment.wake_all();
    }

    /// Counts a death against the unit that the seat had in hand, if it will be made or delivered again:
    /// once per incarnation, whatever is interrupted, since the count it starts from is noted first.
    fn count_death(
        &self,
        seat: u32,
        report: &mut Recovered,
        on_quarantine: &mut dyn FnMut(&Quarantined<'_>),
    ) {
        let segment = &self.segment;
        let cell = segment.seat(seat);
        let Some((unit, eval)) = item_of(cell.record.current_item.load(Acquire)) else {
            return;
        };
        let held = self.held_again(seat, unit, eval);
        let again = match segment.role(seat) {
            Role::Target => self.leased_by(seat, unit, eval) && !segment.is_published(unit, eval),
            Role::Drafter => held.is_some(),
        };
        if !again {
            return;
        }
        let word = segment.unit_word(unit, eval);
        let before = LedgerWord::unpack(word.load(Acquire));
        let incarnation = cell.identity.incarnation.load(Relaxed);
        let noted = u64::from(incarnation) << 32 | u64::from(before.deaths) << 1 | 1;
        let note = &cell.record.death_note;
        label(Label::Count);
        if note.load(Acquire) >> 32 != u64::from(incarnation) {
            note.store(noted, Release);
        }
        let deaths = (note.load(Acquire) >> 1) as u8;
        if before.deaths != deaths || before.is_settled() {
            return;
        }
        let deaths = deaths.saturating_add(1);
        let out = self.quarantine && deaths >= QUARANTINE_DEATHS;
        let state = if out {
            UnitState::Quarantined
        } else {
            before.state
        };
        let next = LedgerWord {
            state,
            deaths,
            ..before
        };
        let counted = word
            .compare_exchange(before.pack(), next.pack(), AcqRel, Relaxed)
            .is_ok();
        // A drafter's unit is reported by r2, which frees its slot.
        if counted && out && held.is_none() {
            report.quarantined.push((unit, eval));
            on_quarantine(&Quarantined {
                unit,
                eval,
                deaths,
                payload: None,
            });
        }
    }

    fn leased_by(&self, seat: u32, unit: u64, eval: bool) -> bool {
        let word = LedgerWord::unpack(self.segment.unit_word(unit, eval).load(Acquire));
        word.state == UnitState::Leased && word.seat == seat
    }

    /// The slot in which the dead drafter holds the unit, if its step has not committed.
    fn held_again(&self, seat: u32, unit: u64, eval: bool) -> Option<u32> {
        let step = self.segment.step_word().step;
        let mut slots = self.segment.ring().iter().zip(0..);
        let (_, slot) = slots.find(|(cell, _)| {
            let (word, occupant) = cell.occupant();
            let tag = cell.tag.load(Acquire);
            word.phase == SlotPhase::Held
                && word.seat == seat
                && occupant == Some(unit)
                && (tag == 0 || tag >= step)
        })?;
        (!eval).then_some(slot)
    }

    /// r1: slots that the dead target was filling are free.
    pub fn r1(&self, seat: u32, report: &mut Recovered) {
        for cell in self.segment.memory().slots() {
            let now = cell.word.load(Acquire);
            let word = SlotWord::unpack(now);
            if word.phase == SlotPhase::Filling && word.seat == seat {
                label(Label::R1);
                let free = SlotWord::free(word.generation + 1);
                let swapped = cell.word.compare_exchange(now, free, AcqRel, Relaxed);
                report.freed += u32::from(swapped.is_ok());
            }
        }
    }

    /// r2: slots that the dead drafter held are freed if their unit's effect has happened, or published
    /// again with the same sequence.
    pub fn r2(
        &self,
        seat: u32,
        report: &mut Recovered,
        on_quarantine: &mut dyn FnMut(&Quarantined<'_>),
    ) {
        let segment = &self.segment;
        for (cell, slot) in segment.ring().iter().zip(0..) {
            let (word, Some(unit)) = cell.occupant() else {
                continue;
            };
            if word.phase != SlotPhase::Held || word.seat != seat {
                continue;
            }
            let tag = cell.tag.load(Acquire);
            let ledger = segment.unit_word(unit, false);
            let state = LedgerWord::unpack(ledger.load(Acquire));
            let free = match state.state {
                UnitState::Done => true,
                UnitState::Quarantined => {
                    self.report_quarantined(slot, unit, state.deaths, report, on_quarantine);
                    true
                }
                // After r0, a step below the word's is one that has committed with this member in it.
                _ if tag != 0 && tag < segment.step_word().step => {
                    label(Label::R2);
                    let done = LedgerWord {
                        state: UnitState::Done,
                        seat,
                        step: tag,
                        ..state
                    };
                    // Nobody else may change the word of a unit in a dead drafter's slot.
                    let _ = ledger.compare_exchange(state.pack(), done.pack(), AcqRel, Relaxed);
                    report.committed.push(unit);
                    true
                }
                _ => {
                    cell.tag.store(0, Release);
                    false
                }
            };
            label(Label::R2);
            let next = if free {
                SlotWord::free(word.generation)
            } else {
                report.redelivered.push(unit);
                SlotWord::ready(word.generation)
            };
            // Release: the cleared tag and the ledger come before; partners: c0's and p1's Acquire.
            let _ = cell
                .word
                .compare_exchange(word.pack(), next, AcqRel, Relaxed);
        }
    }

    fn report_quarantined(
        &self,
        slot: u32,
        unit: u64,
        deaths: u8,
        report: &mut Recovered,
        on_quarantine: &mut dyn FnMut(&Quarantined<'_>),
    ) {
        report.quarantined.push((unit, false));
        let payload = self.segment.read_header(slot).ok().map(|header| {
            // SAFETY: the slot's holder is dead and the slot is freed after the call.
            let view = unsafe { view_of(&self.segment, slot, &header) };
            (header, view)
        });
        on_quarantine(&Quarantined {
            unit,
            eval: false,
            deaths,
            payload,
        });
    }

    /// r3: units that the dead target leased and has not published are pending again.
    pub fn r3(&self, seat: u32, report: &mut Recovered) {
        let segment = &self.segment;
        for (eval, words) in [(true, segment.eval_ledger()), (false, segment.ledger())] {
            for (cell, unit) in words.iter().zip(0..) {
                // Loaded before the slots are looked at: a unit that is trained and freed meanwhile makes
                // the CAS fail.
                let now = cell.load(Acquire);
                let word = LedgerWord::unpack(now);
                let leased = word.state == UnitState::Leased && word.seat == seat;
                if !leased || segment.is_published(unit, eval) {
                    continue;
                }
                label(Label::R3);
                let again = pending(word).pack();
                if cell.compare_exchange(now, again, AcqRel, Relaxed).is_err() {
                    continue;
                }
                report.requeued.push(unit);
                if !eval {
                    segment.lower_cursor(unit);
                }
            }
        }
    }

    /// r4: the target will not come back. With no target left and units unpublished the run has failed, and
    /// the bit stays clear.
    pub fn r4(&self, target: u32, report: &mut Recovered) {
        let segment = &self.segment;
        let given_up = segment.give_up_target(target);
        let none_left = given_up.count_ones() == segment.geometry().targets;
        if none_left && !segment.all_published(0) {
            report.stranded = self.unpublished();
            return;
        }
        label(Label::R4);
        // A roll-back cannot come between: it is the launcher's as well.
        segment.set_finish_bit(target, segment.epoch());
    }

    fn unpublished(&self) -> u64 {
        let segment = &self.segment;
        let published = segment.published_units();
        [(true, segment.eval_ledger()), (false, segment.ledger())]
            .into_iter()
            .flat_map(|(eval, words)| {
                words
                    .iter()
                    .zip(0..)
                    .map(move |(word, unit)| (word, unit, eval))
            })
            .filter(|(word, unit, eval)| {
                !LedgerWord::unpack(word.load(Acquire)).is_settled()
                    && !published.contains(&(*unit, *eval))
            })
            .count() as u64
    }

    /// r5: the budget is the survivors' tagged anchors; the next communicator's id is written.
    ///
    /// A survivor may be between c0 and c0t: what is counted is noted in the slot, and the survivor adds the
    /// rest when it joins.
    ///
    /// # Errors
    /// [`ShmError::GenerationsExhausted`].
    pub fn r5(&self, members: u32, unique_id: Option<&[u8; UNIQUE_ID_BYTES]>) -> Result<()> {
        let segment = &self.segment;
        let generation = self.next_generation()?;
        let step = segment.step_word().step;
        let targets = segment.geometry().targets;
        let mut anchors = 0;
        for cell in segment.ring() {
            let word = SlotWord::unpack(cell.word.load(Acquire));
            let member = word.seat >= targets && members >> (word.seat - targets) & 1 == 1;
            let tagged = cell.tag.load(Acquire) == step;
            if word.phase == SlotPhase::Held && member && tagged {
                anchors += cell.anchors.load(Acquire);
                // Release: partner: the load when the holder joins.
                cell.counted.store(stamp(step, generation), Release);
            }
        }
        label(Label::R5);
        segment.set_budget(BudgetWord {
            step,
            generation,
            anchors,
        });
        if let Some(id) = unique_id {
            segment.write_unique_id(generation, id);
        }
        Ok(())
    }

    /// r6: the group goes on as `members`, in the same step, one generation up.
    pub fn r6(&self, members: u32) {
        let now = self.segment.step_word();
        label(Label::R6);
        // AcqRel: all of the recovery comes before; partner: the Acquire of whoever joins. Nobody else
        // changes an aborted word.
        self.segment.change_step(
            now,
            StepWord {
                generation: now.generation + 1,
                state: StepState::Gather,
                mask: 0,
                members,
                ..now
            },
        );
        self.segment.wake_all();
    }
}

impl Segment {
    /// Writes what the communicator of `generation` is made from.
    pub fn write_unique_id(&self, generation: u32, id: &[u8; UNIQUE_ID_BYTES]) {
        let comm = &self.control().comm;
        comm.generation.store(0, Release);
        for (word, bytes) in comm.unique_id.iter().zip(id.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Release);
        }
        // Release: partner: `unique_id`'s Acquire.
        comm.generation.store(generation.into(), Release);
    }

    /// What the communicator of `generation` is made from, if it is written.
    pub fn unique_id(&self, generation: u32) -> Option<[u8; UNIQUE_ID_BYTES]> {
        let comm = &self.control().comm;
        let written = || comm.generation.load(Acquire) == u64::from(generation);
        if !written() {
            return None;
        }
        let mut id = [0; UNIQUE_ID_BYTES];
        for (word, bytes) in comm.unique_id.iter().zip(id.as_chunks_mut::<8>().0) {
            *bytes = word.load(Acquire).to_le_bytes();
        }
        written().then_some(id)
    }

    /// Members as ranks.
    pub fn member_ranks(&self) -> Vec<u32> {
        ranks(self.step_word().members).collect()
    }
}
