//! One look at a run, as a person or another program reads it: what shared memory, /proc and the run's files say,
//! put together.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::diagnose::{Diagnosis, diagnose};
use super::metrics::MetricsRecord;
use super::shares::Shares;
use crate::control::{Role, WorkerName};
use crate::launch::process::Standing;
use crate::shm::{
    self, Activity, LedgerCounts, RingCounts, SeatState, SeatView, SlotPhase, Snapshot, StepView,
};

/// What a run is busy with as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Workers start and load.
    Loading,
    /// Before the first step: held-out documents are prefilled and walked.
    Preparing,
    /// Steps are made.
    Training,
    /// A stop was asked for.
    Stopping,
    /// All units are trained: the last checkpoint and evaluation.
    Finishing,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Loading => "loading",
            Self::Preparing => "preparing",
            Self::Training => "training",
            Self::Stopping => "stopping",
            Self::Finishing => "finishing",
        })
    }
}

/// A slot in somebody's hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HeldSlot {
    /// The slot.
    pub slot: u32,
    /// `filling` or `held`.
    pub phase: SlotPhase,
    /// The unit in it, once it is written.
    pub unit: Option<u64>,
    /// The step that its holder takes part in with it.
    pub step: Option<u64>,
}

/// What would be stuck if a worker never moved again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holdings {
    /// Units that a target has leased and not published.
    pub units: Vec<u64>,
    /// Held-out units, likewise.
    pub held_out_units: Vec<u64>,
    /// Slots that it fills or trains on.
    pub slots: Vec<HeldSlot>,
}

impl Holdings {
    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.units.is_empty() && self.held_out_units.is_empty() && self.slots.is_empty()
    }
}

/// Most things that are named one by one in a line.
const NAMED: usize = 4;

fn list(what: &str, all: &[String]) -> Option<String> {
    let more = all.len().saturating_sub(NAMED);
    let named = all.iter().take(NAMED).cloned().collect::<Vec<_>>();
    let plural = if all.len() == 1 { "" } else { "s" };
    let rest = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    (!all.is_empty()).then(|| format!("{what}{plural} {}{rest}", named.join(", ")))
}

impl std::fmt::Display for Holdings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers =
            |units: &[u64]| -> Vec<String> { units.iter().map(ToString::to_string).collect() };
        let slot = |held: &HeldSlot| match held.unit {
            Some(unit) => format!("{} (unit {unit})", held.slot),
            None => format!("{} (being filled)", held.slot),
        };
        let slots: Vec<String> = self.slots.iter().map(slot).collect();
        let parts: Vec<String> = [
            list("leased unit", &numbers(&self.units)),
            list("leased held-out unit", &numbers(&self.held_out_units)),
            list("slot", &slots),
        ]
        .into_iter()
        .flatten()
        .collect();
        if parts.is_empty() {
            return f.write_str("nothing");
        }
        f.write_str(&parts.join(", "))
    }
}

/// One worker.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerLook {
    /// Who.
    #[serde(serialize_with = "as_text")]
    pub name: WorkerName,
    /// Where it runs, if the plan could be read.
    pub place: Option<String>,
    /// Its process; 0 before it has come.
    pub pid: u32,
    /// What /proc says of it; `None` when there is no such process.
    pub process: Option<Standing>,
    /// Processors that it used between the two looks; `None` with only one.
    pub cpu: Option<f64>,
    /// State of its seat.
    pub seat: SeatState,
    /// How often it was started again after a death.
    pub restarts: u32,
    /// The launcher saw the end of its pipe.
    pub suspect: bool,
    /// What it does.
    pub activity: Activity,
    /// The same in words, with the unit, step or ranks that it is about.
    pub doing: String,
    /// Whether that is waiting for somebody else.
    pub waiting: bool,
    /// Seconds that it has been at it.
    pub for_s: f64,
    /// Seconds since its last sign of life.
    pub silent_s: f64,
    /// Its step.
    pub step: u64,
    /// Tokens handled so far.
    pub tokens: u64,
    /// Units handled so far.
    pub units: u64,
    /// Tokens in a second, between the two looks; 0 with only one.
    pub tokens_per_s: f64,
    /// What it spent its time on between the two looks, or since its start with only one.
    pub shares: Shares,
    /// The same since its start.
    pub shares_total: Shares,
    /// What it holds.
    pub holds: Holdings,
}

impl WorkerLook {
    /// Stopped by SIGSTOP or Ctrl-Z.
    pub fn is_stopped(&self) -> bool {
        self.process.as_ref().is_some_and(Standing::is_stopped)
    }

    /// The debugger that holds it.
    pub fn tracer(&self) -> Option<u32> {
        self.process.as_ref()?.tracer
    }

    /// Sits at its seat, though its process is gone.
    pub fn is_dead(&self) -> bool {
        self.seat == SeatState::Occupied && self.process.is_none()
    }

    /// In one word for a table.
    pub fn condition(&self) -> &'static str {
        match (self.seat, &self.process) {
            (SeatState::Vacant, _) => "not there",
            (SeatState::Left, _) => "left",
            (SeatState::Occupied, None) => "dead",
            (SeatState::Occupied, Some(standing)) if standing.tracer.is_some() => "traced",
            (SeatState::Occupied, Some(standing)) if standing.is_stopped() => "STOPPED",
            (SeatState::Occupied, Some(standing)) if standing.state == 'D' => "in the kernel",
            (SeatState::Occupied, Some(_)) if self.suspect => "suspect",
            (SeatState::Occupied, Some(_)) => "alive",
        }
    }
}

fn as_text<S: serde::Serializer>(name: &WorkerName, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(name)
}

/// How training goes, from metrics.jsonl.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Training {
    /// The last step recorded.
    pub step: u32,
    /// Its loss.
    pub loss: f64,
    /// Its mean accepted length of a block.
    pub block_accepted_length: f64,
    /// Its learning rate.
    pub lr: f64,
    /// Tokens in a second over the last steps.
    pub tokens_per_s: f64,
    /// Seconds until the end at this rate, if a rate is known.
    pub remaining_s: Option<f64>,
}

/// Everything about a run at (about) one moment.
#[derive(Clone, Debug, Serialize)]
pub struct Look {
    /// Its output directory.
    pub run: String,
    /// Its launcher's process.
    pub launcher_pid: u32,
    /// What /proc says of the launcher.
    pub launcher: Option<Standing>,
    /// What it is busy with.
    pub phase: Phase,
    /// One line: how it stands, and what to do.
    pub diagnosis: Diagnosis,
    /// How training goes; `None` before the first step.
    pub training: Option<Training>,
    /// The step word.
    pub step: StepView,
    /// Training units by state.
    pub ledger: LedgerCounts,
    /// Held-out units by state.
    pub eval: LedgerCounts,
    /// The ring's slots by phase.
    pub ring: RingCounts,
    /// A stop that was asked for: the last step, and why.
    pub stop: Option<shm::Stop>,
    /// Seconds between the two looks that rates and shares are of; 0 with only one.
    pub window_s: f64,
    /// Every worker, targets first.
    pub workers: Vec<WorkerLook>,
}

impl Look {
    /// Share of the units that are settled, 0..=1.
    pub fn progress(&self) -> f64 {
        let total =
            self.ledger.pending + self.ledger.leased + self.ledger.done + self.ledger.quarantined;
        (self.ledger.done + self.ledger.quarantined) as f64 / total.max(1) as f64
    }

    /// Workers of one role.
    pub fn of_role(&self, role: Role) -> impl Iterator<Item = &WorkerLook> {
        self.workers
            .iter()
            .filter(move |worker| worker.name.role == role)
    }

    /// Processor time of each worker's process, in seconds: what the next look compares with.
    pub fn cpu_seconds(&self) -> BTreeMap<u32, f64> {
        let of = |worker: &WorkerLook| Some((worker.pid, worker.process.as_ref()?.cpu_s));
        self.workers.iter().filter_map(of).collect()
    }

    /// Tokens in a second of all workers of a role.
    pub fn tokens_per_s(&self, role: Role) -> f64 {
        self.of_role(role).map(|worker| worker.tokens_per_s).sum()
    }
}

/// What a look is made of.
pub struct Sight<'a> {
    /// The run's output directory.
    pub run: String,
    /// Its launcher: process and start, in clock ticks since boot.
    pub launcher: (u32, u64),
    /// Shared memory now.
    pub now: &'a Snapshot,
    /// Shared memory earlier, for rates.
    pub before: Option<&'a Snapshot>,
    /// Processor time of each process then, in seconds.
    pub cpu_before: &'a BTreeMap<u32, f64>,
    /// Where each worker runs, in words.
    pub places: &'a BTreeMap<WorkerName, String>,
    /// The last steps, oldest first.
    pub metrics: &'a VecDeque<MetricsRecord>,
}

impl Sight<'_> {
    /// Puts it together. Reads /proc for every worker.
    pub fn look(&self) -> Look {
        let now = self.now;
        let window_s = self.before.map_or(0.0, |before| {
            now.taken_ns.saturating_sub(before.taken_ns) as f64 / 1e9
        });
        let workers: Vec<WorkerLook> = now
            .seats
            .iter()
            .map(|seat| self.worker(seat, window_s))
            .collect();
        let (pid, started) = self.launcher;
        let mut look = Look {
            run: self.run.clone(),
            launcher_pid: pid,
            launcher: Standing::of(pid, started),
            phase: phase(now),
            diagnosis: Diagnosis::default(),
            training: self.training(),
            step: now.step,
            ledger: now.ledger,
            eval: now.eval,
            ring: now.ring,
            stop: now.finish.stop,
            window_s,
            workers,
        };
        look.diagnosis = diagnose(&look);
        look
    }

    fn worker(&self, seat: &SeatView, window_s: f64) -> WorkerLook {
        let name = name_of(seat);
        // Another incarnation's figures are not this one's past.
        let before = self
            .before
            .and_then(|before| before.seats.get(seat.seat as usize))
            .filter(|before| before.tokens <= seat.tokens);
        let shares_total = Shares::total(seat);
        let tokens = before.map_or(0, |before| seat.tokens - before.tokens);
        let sits = seat.state == SeatState::Occupied;
        let process = match sits {
            true => Standing::of(seat.pid, seat.start_time),
            false => None,
        };
        let cpu = process
            .as_ref()
            .zip(self.cpu_before.get(&seat.pid))
            .filter(|_| window_s > 0.0)
            .map(|(now, before)| ((now.cpu_s - before) / window_s).max(0.0));
        WorkerLook {
            name,
            place: self.places.get(&name).cloned(),
            pid: seat.pid,
            process,
            cpu,
            seat: seat.state,
            restarts: seat.incarnation.saturating_sub(1),
            suspect: seat.suspect,
            activity: seat.activity,
            doing: doing(seat, self.now.geometry.targets),
            waiting: seat.waiting,
            for_s: seat.for_ns as f64 / 1e9,
            silent_s: if sits {
                seat.heartbeat_age_ns as f64 / 1e9
            } else {
                0.0
            },
            step: seat.step,
            tokens: seat.tokens,
            units: seat.units,
            tokens_per_s: if window_s > 0.0 {
                tokens as f64 / window_s
            } else {
                0.0
            },
            shares: before.map_or(shares_total, |before| Shares::between(before, seat)),
            shares_total,
            holds: holdings(self.now, seat.seat),
        }
    }

    fn training(&self) -> Option<Training> {
        let last = self.metrics.back()?;
        let first = self.metrics.front()?;
        let seconds = last.time_s - first.time_s;
        let tokens: u64 = self.metrics.iter().skip(1).map(|step| step.tokens).sum();
        let steps = self.metrics.len() as f64 - 1.0;
        let tokens_per_s = if seconds > 0.0 {
            tokens as f64 / seconds
        } else {
            0.0
        };
        let drafters = || {
            let all = self.now.seats.iter();
            all.filter(|seat| seat.role == shm::Role::Drafter)
        };
        let (units, trained) = drafters().fold((0, 0), |(units, tokens), seat| {
            (units + seat.units, tokens + seat.tokens)
        });
        let left = (self.now.ledger.pending + self.now.ledger.leased) as f64;
        let by_units = (tokens_per_s > 0.0 && units > 0)
            .then(|| left * trained as f64 / units as f64 / tokens_per_s);
        let by_steps = self.now.finish.stop.and_then(|stop| {
            let steps_left = stop.after.saturating_sub(u64::from(last.step)) as f64;
            (steps > 0.0 && seconds > 0.0).then(|| steps_left * seconds / steps)
        });
        let remaining_s = match (by_units, by_steps) {
            (Some(units), Some(steps)) => Some(units.min(steps)),
            (known, other) => known.or(other),
        };
        Some(Training {
            step: last.step,
            loss: last.loss,
            block_accepted_length: last.block_accepted_length,
            lr: last.lr,
            tokens_per_s,
            remaining_s,
        })
    }
}

/// Who sits there.
pub fn name_of(seat: &SeatView) -> WorkerName {
    let role = match seat.role {
        shm::Role::Target => Role::Target,
        shm::Role::Drafter => Role::Drafter,
    };
    WorkerName::new(role, seat.rank)
}

fn phase(now: &Snapshot) -> Phase {
    let total = now.ledger.pending + now.ledger.leased + now.ledger.done + now.ledger.quarantined;
    let starts = |seat: &SeatView| match seat.state {
        SeatState::Vacant => seat.incarnation == 0,
        SeatState::Left => false,
        SeatState::Occupied => matches!(
            seat.activity,
            Activity::Starting | Activity::Loading | Activity::WaitLauncher
        ),
    };
    if now.step.step <= now.geometry.first_step && now.seats.iter().any(starts) {
        Phase::Loading
    } else if now
        .finish
        .stop
        .is_some_and(|stop| now.step.step > stop.after)
    {
        Phase::Stopping
    } else if now.ledger.done + now.ledger.quarantined == total {
        Phase::Finishing
    } else if now.step.step <= now.geometry.first_step && now.step.anchors == 0 {
        Phase::Preparing
    } else {
        Phase::Training
    }
}

/// What a seat's worker does, in words.
fn doing(seat: &SeatView, targets: u32) -> String {
    let detail = seat.detail;
    match seat.state {
        SeatState::Vacant => return "has not come".to_owned(),
        SeatState::Left => return "has left".to_owned(),
        SeatState::Occupied => {}
    }
    match seat.activity {
        Activity::Prefill => format!("prefill from unit {detail} on"),
        Activity::CopyOut => format!("copying unit {detail} into a slot"),
        Activity::Train => format!("training on unit {detail}"),
        Activity::WaitSpace => format!("waiting for a free slot for unit {detail}"),
        Activity::Optimizer => format!("optimizer, step {detail}"),
        Activity::Checkpoint => format!("writing the checkpoint of step {detail}"),
        Activity::WaitMembers | Activity::WaitSettle | Activity::WaitReduce => {
            let others: Vec<String> = (0..u64::BITS)
                .filter(|&rank| detail >> rank & 1 == 1 && targets + rank != seat.seat)
                .map(|rank| rank.to_string())
                .collect();
            let with = if others.is_empty() {
                String::new()
            } else {
                format!(" (with drafter {})", others.join(", "))
            };
            format!("{}{with}", seat.activity)
        }
        other => other.to_string(),
    }
}

fn holdings(now: &Snapshot, seat: u32) -> Holdings {
    let leased = |eval| {
        let mine = now.leases.iter();
        mine.filter(|lease| lease.seat == seat && lease.eval == eval)
            .map(|lease| lease.unit)
            .collect()
    };
    let held = |slot: &&crate::shm::SlotView| {
        slot.seat == Some(seat) && matches!(slot.phase, SlotPhase::Filling | SlotPhase::Held)
    };
    let (units, held_out_units) = if seat < now.geometry.targets {
        (leased(false), leased(true))
    } else {
        (Vec::new(), Vec::new())
    };
    Holdings {
        units,
        held_out_units,
        slots: now
            .slots
            .iter()
            .filter(held)
            .map(|slot| HeldSlot {
                slot: slot.slot,
                phase: slot.phase,
                unit: slot.unit,
                step: slot.tag,
            })
            .collect(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A look at a run of two targets and two drafters, all at work, that a test then changes.
    pub(crate) fn look() -> Look {
        let worker = |role, rank, activity| WorkerLook {
            name: WorkerName::new(role, rank),
            place: Some("1 CPU thread".to_owned()),
            pid: 100 + rank,
            process: Some(Standing {
                state: 'R',
                tracer: None,
                resident_memory: 64 << 20,
                waits_in: None,
                cpu_s: 1.0,
            }),
            cpu: None,
            seat: SeatState::Occupied,
            restarts: 0,
            suspect: false,
            activity,
            doing: activity.to_string(),
            waiting: activity.is_waiting(),
            for_s: 0.1,
            silent_s: 0.1,
            step: 7,
            tokens: 1000,
            units: 10,
            tokens_per_s: 500.0,
            shares: Shares([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            shares_total: Shares([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            holds: Holdings::default(),
        };
        Look {
            run: "runs/a".to_owned(),
            launcher_pid: 1,
            launcher: Some(Standing {
                state: 'S',
                tracer: None,
                resident_memory: 1 << 20,
                waits_in: None,
                cpu_s: 1.0,
            }),
            phase: Phase::Training,
            diagnosis: Diagnosis::default(),
            training: Some(Training {
                step: 7,
                loss: 1.25,
                block_accepted_length: 2.5,
                lr: 1e-3,
                tokens_per_s: 1000.0,
                remaining_s: Some(90.0),
            }),
            step: StepView {
                step: 8,
                generation: 1,
                state: shm::StepState::Gather,
                mask: 0,
                members: 3,
                anchors: 10,
                saved: 0,
            },
            ledger: LedgerCounts {
                pending: 60,
                leased: 10,
                done: 30,
                ..LedgerCounts::default()
            },
            eval: LedgerCounts::default(),
            ring: RingCounts {
                free: 4,
                filling: 2,
                ready: 3,
                held: 4,
            },
            stop: None,
            window_s: 1.0,
            workers: vec![
                worker(Role::Target, 0, Activity::Prefill),
                worker(Role::Target, 1, Activity::Prefill),
                worker(Role::Drafter, 0, Activity::Train),
                worker(Role::Drafter, 1, Activity::Train),
            ],
        }
    }

    #[test]
    fn holdings_are_named_and_counted() {
        let slot = |slot, unit| HeldSlot {
            slot,
            phase: SlotPhase::Held,
            unit,
            step: None,
        };
        let holds = Holdings {
            units: vec![12],
            held_out_units: Vec::new(),
            slots: vec![
                slot(1, Some(7)),
                slot(2, None),
                slot(3, Some(9)),
                slot(4, Some(10)),
                slot(5, Some(11)),
            ],
        };
        assert_eq!(
            holds.to_string(),
            "leased unit 12, slots 1 (unit 7), 2 (being filled), 3 (unit 9), 4 (unit 10) and 1 more"
        );
        assert_eq!(Holdings::default().to_string(), "nothing");
    }

    #[test]
    fn a_look_is_plain_json() {
        let value = serde_json::to_value(look()).unwrap();
        assert_eq!(value["workers"][2]["name"], "drafter-0");
        assert_eq!(value["workers"][0]["activity"], "prefill");
        assert_eq!(value["phase"], "training");
        assert_eq!(value["ring"]["ready"], 3);
        assert!((look().progress() - 0.3).abs() < 1e-12);
    }
}
