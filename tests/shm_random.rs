//! Random orders of operations by several targets and drafters, with kills before any line of the protocol,
//! interrupted recoveries, replacements and roll-backs. One thread plays everybody, so that a failing order
//! can be shrunk.
#![cfg(not(feature = "loom"))]

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use proptest::prelude::*;
use slipstream::shm::*;

const TARGETS: u32 = 2;
const DRAFTERS: u32 = 3;
const UNITS: u64 = 14;
const EVAL: u32 = 1;
const BATCH: u32 = 6;
const SLOTS: u32 = 13;
const SAVE_EVERY: u64 = 2;
const LARGEST: u32 = 3;

/// Anchors of a unit: 1 to 3.
fn anchors(unit: u64) -> u32 {
    1 + (unit % 3) as u32
}

fn geometry() -> Geometry {
    Geometry {
        targets: TARGETS,
        drafters: DRAFTERS,
        slots: SLOTS,
        units: UNITS,
        eval_units: EVAL,
        slot_tokens: 4,
        slot_documents: 1,
        captured_width: 3,
        hidden: 1,
        final_hidden: true,
        dtype: Dtype::F32,
        batch_anchors: BATCH,
        units_per_step: units_per_step((0..UNITS).map(anchors), 1, BATCH),
        reduce_floats: 0,
        broadcast_bytes: 64,
        check_payload: true,
        first_step: 1,
    }
}

thread_local! {
    /// Lines until this thread's worker dies.
    static LINES_LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// What unwinds when a worker is killed.
struct Killed;

fn install_hook() {
    install_label_hook(|_| {
        let left = LINES_LEFT.take();
        match left {
            None => {}
            Some(0) => resume_unwind(Box::new(Killed)),
            Some(lines) => LINES_LEFT.set(Some(lines - 1)),
        }
    });
}

/// Runs `work`, killed before its line number `kill`; `None` when it died.
fn mortal<T>(kill: Option<u32>, work: impl FnOnce() -> T) -> Option<T> {
    LINES_LEFT.set(kill);
    let result = catch_unwind(AssertUnwindSafe(work));
    LINES_LEFT.set(None);
    match result {
        Ok(value) => Some(value),
        Err(cause) if cause.is::<Killed>() => None,
        Err(cause) => resume_unwind(cause),
    }
}

/// How often each unit has changed a drafter's weights: what must be the same on all and end at 1.
type Weights = Vec<u8>;

struct TargetSim {
    handle: Target,
    lease: Option<Lease>,
    filling: Option<Filling>,
}

#[derive(Debug)]
enum Phase {
    Enter,
    Receive,
    Send(Joined),
    Take,
    Closing,
    Reduce,
    Arrive(Agreed),
    Settle(Agreed),
    Save,
}

struct DrafterSim {
    handle: Drafter,
    founder: bool,
    phase: Phase,
    weights: Weights,
}

enum Seat<T> {
    Vacant,
    Lives(T),
    /// Killed, and not recovered yet.
    Dead,
    Left,
}

impl<T> Seat<T> {
    fn name(&self) -> &'static str {
        match self {
            Seat::Vacant => "vacant",
            Seat::Lives(_) => "lives",
            Seat::Dead => "dead",
            Seat::Left => "left",
        }
    }
}

struct World {
    segment: Segment,
    recovery: Recovery,
    targets: Vec<Seat<TargetSim>>,
    drafters: Vec<Seat<DrafterSim>>,
    incarnations: Vec<u32>,
    /// Weights after each committed step.
    history: BTreeMap<u64, Weights>,
    saved: (u64, Weights),
    kills: u32,
}

impl World {
    fn new() -> Self {
        let segment = Segment::create(&geometry(), RunId::fresh()).unwrap();
        let recovery = Recovery::new(&segment, false);
        let fresh = vec![0; UNITS as usize];
        let mut world = Self {
            segment,
            recovery,
            targets: (0..TARGETS).map(|_| Seat::Vacant).collect(),
            drafters: (0..DRAFTERS).map(|_| Seat::Vacant).collect(),
            incarnations: vec![0; (TARGETS + DRAFTERS) as usize],
            history: BTreeMap::from([(0, fresh.clone())]),
            saved: (0, fresh.clone()),
            kills: 0,
        };
        (0..TARGETS).for_each(|target| world.seat_target(target));
        (0..DRAFTERS).for_each(|rank| world.seat_drafter(rank, Some(fresh.clone())));
        world
    }

    fn incarnate(&mut self, seat: u32) -> u32 {
        self.incarnations[seat as usize] += 1;
        self.incarnations[seat as usize]
    }

    fn seat_target(&mut self, target: u32) {
        let incarnation = self.incarnate(target);
        let handle = self.segment.target(target, incarnation).unwrap();
        self.targets[target as usize] = Seat::Lives(TargetSim {
            handle,
            lease: None,
            filling: None,
        });
    }

    /// A founder has weights; a replacement gets them sent.
    fn seat_drafter(&mut self, rank: u32, weights: Option<Weights>) {
        let incarnation = self.incarnate(TARGETS + rank);
        let founder = weights.is_some();
        let entry = if founder {
            Entry::Founder
        } else {
            Entry::Replacement
        };
        let handle = self.segment.drafter(rank, incarnation, entry).unwrap();
        self.drafters[rank as usize] = Seat::Lives(DrafterSim {
            handle,
            founder,
            phase: Phase::Enter,
            weights: weights.unwrap_or_default(),
        });
    }

    fn step_target(&mut self, target: u32, kill: Option<u32>) {
        let Seat::Lives(sim) = &mut self.targets[target as usize] else {
            return;
        };
        let outcome = mortal(kill, || {
            if let Some(filling) = sim.filling.take() {
                let unit = filling.unit();
                let weight = UnitInfo {
                    anchors: anchors(unit),
                    weightless: false,
                };
                sim.handle.publish(filling, weight).unwrap();
            } else if let Some(lease) = sim.lease.take() {
                match sim.handle.try_claim(lease, 4, 1).unwrap() {
                    Ok(mut filling) => {
                        let unit = filling.unit() as u32;
                        filling.captured::<f32>().unwrap().fill(unit as f32);
                        filling.final_hidden::<f32>().unwrap().fill(0.5);
                        filling.ids().fill(unit);
                        filling.mask().fill(1);
                        filling.offsets().copy_from_slice(&[0, 4]);
                        filling.rows().fill(unit);
                        sim.filling = Some(filling);
                    }
                    Err(_) if sim.handle.is_stopped() => return true,
                    Err(lease) => sim.lease = Some(lease),
                }
            } else {
                match sim.handle.poll_next() {
                    Some(Next::Unit(lease)) => sim.lease = Some(lease),
                    Some(Next::Finished | Next::Stopped) => return true,
                    None => {}
                }
            }
            false
        });
        match outcome {
            Some(false) => {}
            Some(true) => {
                let seat = std::mem::replace(&mut self.targets[target as usize], Seat::Left);
                if let Seat::Lives(sim) = seat {
                    sim.handle.leave();
                }
            }
            None => {
                self.kills += 1;
                self.targets[target as usize] = Seat::Dead;
            }
        }
    }

    fn step_drafter(&mut self, rank: u32, kill: Option<u32>) {
        if let Seat::Lives(DrafterSim {
            phase: Phase::Send(joined),
            ..
        }) = &self.drafters[rank as usize]
        {
            let joined = *joined;
            return self.send(rank, joined);
        }
        let Seat::Lives(sim) = &mut self.drafters[rank as usize] else {
            return;
        };
        if matches!(sim.phase, Phase::Receive) {
            match sim.handle.poll_receive() {
                Ok(Some(Received::Leave)) => return self.leave(rank),
                Ok(_) => {}
                Err(ShmError::Orphaned { .. }) => self.drafters[rank as usize] = Seat::Dead,
                Err(other) => panic!("{other}"),
            }
            return;
        }
        let (history, saved) = (&mut self.history, &mut self.saved);
        match mortal(kill, || advance(sim, history, saved)) {
            Some(true) => {}
            Some(false) => self.leave(rank),
            None => {
                self.kills += 1;
                self.drafters[rank as usize] = Seat::Dead;
            }
        }
    }

    fn leave(&mut self, rank: u32) {
        let seat = std::mem::replace(&mut self.drafters[rank as usize], Seat::Left);
        if let Seat::Lives(sim) = seat {
            sim.handle.leave().unwrap();
        }
    }

    /// Sends weights to newcomers, if they are all there to take them or the group has changed again.
    fn send(&mut self, rank: u32, joined: Joined) {
        let word = self.segment.step_word();
        let moved = word.generation != joined.generation || word.state == StepState::Aborted;
        let ready = |seat: &Seat<DrafterSim>| {
            let Seat::Lives(sim) = seat else {
                return matches!(seat, Seat::Left);
            };
            matches!(sim.phase, Phase::Receive) && sim.handle.generation() == joined.generation
        };
        let newcomers: Vec<usize> = (0..DRAFTERS as usize)
            .filter(|newcomer| joined.send >> newcomer & 1 == 1)
            .collect();
        if !moved
            && !newcomers
                .iter()
                .all(|&newcomer| ready(&self.drafters[newcomer]))
        {
            return;
        }
        let mut sender = None;
        let mut receivers = Vec::new();
        for (other, seat) in self.drafters.iter_mut().enumerate() {
            let Seat::Lives(sim) = seat else {
                continue;
            };
            if other == rank as usize {
                sender = Some(sim);
            } else if newcomers.contains(&other) && !moved {
                receivers.push(sim);
            }
        }
        let sender = sender.expect("the sender lives");
        let state = sender.weights.clone();
        std::thread::scope(|scope| {
            for sim in receivers {
                scope.spawn(move || {
                    let mut weights = Weights::new();
                    let done = sim.handle.receive_state(|offset, bytes, total| {
                        assert_eq!(offset as usize, weights.len());
                        assert_eq!(total, UNITS);
                        weights.extend_from_slice(bytes);
                    });
                    assert_eq!(done.unwrap(), Received::Done);
                    sim.weights = weights;
                    sim.phase = Phase::Take;
                });
            }
            let sent = sender
                .handle
                .send_state(joined.send, UNITS, |offset, bytes| {
                    let offset = offset as usize;
                    bytes.copy_from_slice(&state[offset..offset + bytes.len()]);
                });
            let expected = if moved { Sent::Moved } else { Sent::Done };
            assert_eq!(sent.unwrap(), expected);
        });
        sender.phase = Phase::Take;
    }

    /// The launcher: recovers a death, seats a replacement, admits it, or goes back to the checkpoint.
    fn supervise(&mut self, seat: u32, kill: Option<u32>) {
        if seat < TARGETS {
            match self.targets[seat as usize] {
                Seat::Dead => {
                    let died = || self.recovery.target_died(seat, Fate::Respawn, |_| {});
                    if mortal(kill, died).is_some() {
                        self.targets[seat as usize] = Seat::Vacant;
                    }
                }
                Seat::Vacant => self.seat_target(seat),
                _ => {}
            }
            return;
        }
        let rank = seat - TARGETS;
        match &self.drafters[rank as usize] {
            Seat::Dead => {
                let died = || self.recovery.drafter_died(rank, None, |_| {}).unwrap();
                if mortal(kill, died).is_some() {
                    self.drafters[rank as usize] = Seat::Vacant;
                }
            }
            Seat::Vacant if self.segment.step_word().members == 0 => self.roll_back(),
            Seat::Vacant if self.segment.members_with_state() != 0 => self.seat_drafter(rank, None),
            Seat::Lives(sim) if !sim.founder && matches!(sim.phase, Phase::Enter) => {
                let members = self.segment.step_word().members;
                if members == 0 {
                    self.roll_back();
                } else if members >> rank & 1 == 0 && self.segment.members_with_state() != 0 {
                    // Refused when all who could send weights have left.
                    let admit = || self.recovery.admit(rank, None).is_ok();
                    // An admission that was cut short is run again before anything else.
                    if mortal(kill, admit).is_none() {
                        admit();
                    }
                }
            }
            _ => {}
        }
    }

    /// All drafters are dead: whoever waits to be admitted ends too, and founders start from the checkpoint.
    fn roll_back(&mut self) {
        if self.drafters.iter().any(|seat| matches!(seat, Seat::Dead)) {
            return;
        }
        for rank in 0..DRAFTERS {
            if matches!(self.drafters[rank as usize], Seat::Lives(_)) {
                self.drafters[rank as usize] = Seat::Dead;
                self.recovery.drafter_died(rank, None, |_| {}).unwrap();
            }
            self.drafters[rank as usize] = Seat::Vacant;
        }
        let (step, weights) = self.saved.clone();
        self.history.split_off(&(step + 1));
        let members = (1 << DRAFTERS) - 1;
        self.recovery.roll_back(step, members, None).unwrap();
        for rank in 0..DRAFTERS {
            self.seat_drafter(rank, Some(weights.clone()));
        }
    }

    fn check(&self) {
        let snapshot = self.segment.snapshot();
        let ring = snapshot.ring;
        assert_eq!(ring.free + ring.filling + ring.ready + ring.held, SLOTS);
        let mut seen = HashSet::new();
        for slot in &snapshot.slots[..SLOTS as usize] {
            if let Some(unit) = slot.unit {
                assert!(seen.insert(unit), "unit {unit} is in two slots");
                let state = self.segment.unit(unit).state;
                assert_ne!(state, UnitState::Pending, "unit {unit} is in a slot");
                if slot.phase == SlotPhase::Ready {
                    assert_eq!(state, UnitState::Leased, "unit {unit} is published");
                }
            }
        }
        // Every held slot is in the hands of somebody who knows it, or who is dead.
        let known: usize = self
            .drafters
            .iter()
            .map(|seat| match seat {
                Seat::Lives(sim) => sim.handle.items().len(),
                _ => 0,
            })
            .sum();
        let dead = self.drafters.iter().any(|seat| matches!(seat, Seat::Dead));
        let most = known + DRAFTERS as usize;
        assert!(dead || (ring.held as usize) <= most, "{snapshot:?}");
    }

    /// Who is where, for a failing order.
    fn describe(&self) -> String {
        let targets = self.targets.iter().map(|seat| match seat {
            Seat::Lives(sim) => format!("lives {:?} {:?}", sim.lease, sim.filling.is_some()),
            other => other.name().to_owned(),
        });
        let drafters = self.drafters.iter().map(|seat| match seat {
            Seat::Lives(sim) => format!("lives {:?}", sim.phase),
            other => other.name().to_owned(),
        });
        let seats: Vec<_> = targets.chain(drafters).collect();
        let snapshot = self.segment.snapshot();
        let (step, ring, ledger) = (snapshot.step, snapshot.ring, snapshot.ledger);
        format!(
            "{seats:?}\n{step:?}\n{ring:?}\n{ledger:?}\n{:?}",
            snapshot.finish
        )
    }

    fn all_left(&self) -> bool {
        self.targets.iter().all(|seat| matches!(seat, Seat::Left))
            && self.drafters.iter().all(|seat| matches!(seat, Seat::Left))
    }

    /// Without further kills everything comes to its end.
    fn finish(mut self) -> u32 {
        for _ in 0..3000 {
            for seat in 0..TARGETS + DRAFTERS {
                self.supervise(seat, None);
            }
            (0..TARGETS).for_each(|target| self.step_target(target, None));
            (0..DRAFTERS).for_each(|rank| self.step_drafter(rank, None));
            self.check();
            if self.all_left() {
                break;
            }
        }
        let snapshot = self.segment.snapshot();
        assert!(self.all_left(), "the run hangs: {}", self.describe());
        let (_, weights) = self.history.last_key_value().expect("step 0 is there");
        let trained = weights.iter().filter(|times| **times == 1).count() as u64;
        assert!(weights.iter().all(|times| *times <= 1), "{weights:?}");
        assert_eq!(trained, snapshot.ledger.done, "{weights:?}");
        if snapshot.finish.stop.is_none() {
            assert_eq!(trained, UNITS, "each unit has had its effect once");
            assert_eq!(snapshot.ring.free, SLOTS);
        }
        self.kills
    }
}

/// One operation of a living drafter; false when it has left.
fn advance(
    sim: &mut DrafterSim,
    history: &mut BTreeMap<u64, Weights>,
    saved: &mut (u64, Weights),
) -> bool {
    let drafter = &mut sim.handle;
    let joined = |joined: Joined| {
        if joined.send == 0 {
            Phase::Take
        } else {
            Phase::Send(joined)
        }
    };
    let phase = std::mem::replace(&mut sim.phase, Phase::Take);
    sim.phase = match phase {
        Phase::Enter => match drafter.poll_enter().unwrap() {
            Some(Some(entered)) if sim.founder => joined(entered),
            Some(Some(_)) => Phase::Receive,
            Some(None) => return false,
            None => Phase::Enter,
        },
        Phase::Receive => Phase::Receive,
        Phase::Send(joined) => Phase::Send(joined),
        Phase::Take => match drafter.poll_take().unwrap() {
            Some(Take::Item(item)) => {
                let view = drafter.view(&item).unwrap();
                assert_eq!(view.ids(), [item.unit() as u32; 4]);
                assert_eq!(view.captured::<f32>().unwrap(), [item.unit() as f32; 12]);
                Phase::Take
            }
            Some(Take::Close) => Phase::Closing,
            Some(Take::Joined(again)) => joined(again),
            Some(Take::Leave) => return false,
            None => Phase::Take,
        },
        Phase::Closing => match drafter.poll_close(Vote::default()).unwrap() {
            Some(Closed::Closed) => Phase::Reduce,
            Some(Closed::Joined(again)) => joined(again),
            None => Phase::Closing,
        },
        Phase::Reduce => {
            drafter.prefetch().unwrap();
            match drafter.poll_reduce().unwrap() {
                Some(Reduce::Agreed(agreed)) => Phase::Arrive(agreed),
                Some(Reduce::Joined(again)) => joined(again),
                Some(Reduce::Leave) => return false,
                None => Phase::Reduce,
            }
        }
        Phase::Arrive(agreed) => {
            let most = u64::from(BATCH - 1 + LARGEST + DRAFTERS * LARGEST);
            assert!(agreed.anchors() <= most, "{agreed:?}");
            drafter.arrive(true).unwrap();
            Phase::Settle(agreed)
        }
        Phase::Settle(agreed) => match drafter.poll_settled().unwrap() {
            Some(Settled::Committed) => {
                for unit in agreed.members.iter().flat_map(|member| &member.units) {
                    sim.weights[*unit as usize] += 1;
                }
                let known = history.entry(agreed.step).or_insert(sim.weights.clone());
                assert_eq!(
                    known, &sim.weights,
                    "weights differ after step {}",
                    agreed.step
                );
                drafter.finish_step().unwrap();
                if agreed.step % SAVE_EVERY == 0 {
                    Phase::Save
                } else {
                    Phase::Take
                }
            }
            Some(Settled::Aborted(again)) => joined(again),
            Some(Settled::Leave) => return false,
            None => Phase::Settle(agreed),
        },
        Phase::Save => match drafter.poll_save().unwrap() {
            Some(Save::Write) => {
                let step = drafter.committed();
                *saved = (step, sim.weights.clone());
                let ledger = drafter.segment().export_ledger(step);
                let trained = sim.weights.iter().filter(|times| **times == 1).count();
                assert_eq!(ledger.done(), trained as u64, "checkpoint of step {step}");
                drafter.mark_saved(step);
                Phase::Take
            }
            Some(Save::NotMine) => Phase::Take,
            Some(Save::Joined(again)) => joined(again),
            None => Phase::Save,
        },
    };
    true
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Target(u32, Option<u32>),
    Drafter(u32, Option<u32>),
    Launcher(u32, Option<u32>),
    /// A stop after some step, or now.
    Stop(Option<u64>),
}

/// Mostly work; one operation in `odds` dies before one of its first lines, and sometimes a stop is asked.
fn ops(odds: u32) -> impl Strategy<Value = Vec<Op>> {
    let kill = prop::option::weighted(1.0 / f64::from(odds), 0u32..6);
    let op = (0u32..10, 0u32..60, kill).prop_map(|(kind, who, kill)| match kind {
        0..4 => Op::Target(who % TARGETS, kill),
        4..9 => Op::Drafter(who % DRAFTERS, kill),
        _ => Op::Launcher(who % (TARGETS + DRAFTERS), kill),
    });
    let stop = prop::option::of((0usize..400, prop::option::of(1u64..6)));
    (prop::collection::vec(op, 0..400), stop).prop_map(|(mut ops, stop)| {
        if let Some((place, after)) = stop {
            ops.insert(place.min(ops.len()), Op::Stop(after));
        }
        ops
    })
}

fn play(ops: Vec<Op>) -> u32 {
    install_hook();
    let mut world = World::new();
    for op in ops {
        match op {
            Op::Target(target, kill) => world.step_target(target, kill),
            Op::Drafter(rank, kill) => world.step_drafter(rank, kill),
            Op::Launcher(seat, kill) => world.supervise(seat, kill),
            Op::Stop(after) => world.segment.request_stop(after, StopReason::Interrupt),
        }
        world.check();
    }
    world.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_trains_every_unit_once(ops in ops(1_000_000)) {
        play(ops);
    }

    #[test]
    fn any_order_with_kills_trains_every_unit_once(ops in ops(20)) {
        play(ops);
    }

    #[test]
    fn many_kills_in_a_row_change_nothing(ops in ops(5)) {
        play(ops);
    }
}
