//! One line about a run: what holds it up, who, and what to do about it.
//!
//! From the surest cause to the least sure: a process that cannot move is named before any that waits for it.

use serde::Serialize;

use super::look::{Look, Phase, WorkerLook};
use super::shares::{Shares, Spent};
use crate::control::Role;
use crate::shm::SeatState;

/// A wait or a computation longer than this is spoken of, in seconds.
pub const LONG: f64 = 20.0;
/// Share of a role's time from which on it counts as waiting.
const MUCH: f64 = 0.10;

/// What kind of line it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The launcher is gone or stopped.
    Launcher,
    /// A process is stopped by SIGSTOP or Ctrl-Z.
    Stopped,
    /// A process is dead and its seat not recovered yet.
    Dead,
    /// A debugger holds a process.
    Traced,
    /// A process gives no sign of life and does not compute, while others wait for it.
    Stuck,
    /// A process computes for very long, and others wait for it.
    Long,
    /// Everybody waits for somebody else.
    Waiting,
    /// Not training yet, or not any more.
    Phase,
    /// Drafters wait for units: targets limit the speed.
    Targets,
    /// Targets wait for slots: drafters limit the speed.
    Drafters,
    /// Drafters wait for each other.
    Uneven,
    /// Nobody waits much.
    #[default]
    Balanced,
}

impl Verdict {
    /// Whether the run does not get on, or soon will not.
    pub fn is_trouble(self) -> bool {
        matches!(
            self,
            Self::Launcher | Self::Stopped | Self::Dead | Self::Stuck | Self::Waiting
        )
    }
}

/// The line, and its kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// Its kind.
    pub verdict: Verdict,
    /// The worker at fault, if one is.
    pub worker: Option<String>,
    /// In words.
    pub text: String,
}

/// What holds this run up.
pub fn diagnose(look: &Look) -> Diagnosis {
    let of = |verdict, worker: Option<&WorkerLook>, text: String| Diagnosis {
        verdict,
        worker: worker.map(|worker| worker.name.to_string()),
        text,
    };
    let launcher = look.launcher_pid;
    match &look.launcher {
        None => {
            let text = format!("the launcher (process {launcher}) is gone");
            return of(Verdict::Launcher, None, text);
        }
        Some(standing) if standing.is_stopped() => {
            let text = format!(
                "the launcher (process {launcher}) is stopped: nobody watches the workers; `kill -CONT {launcher}` lets it go on"
            );
            return of(Verdict::Launcher, None, text);
        }
        Some(_) => {}
    }
    let find = |pick: &dyn Fn(&WorkerLook) -> bool| look.workers.iter().find(|worker| pick(worker));
    if let Some(worker) = find(&WorkerLook::is_stopped) {
        let (name, pid) = (worker.name, worker.pid);
        let text = format!(
            "{name} (process {pid}) is stopped (SIGSTOP or Ctrl-Z), silent for {:.0} s, and holds {}; `kill -CONT {pid}` lets it go on",
            worker.silent_s, worker.holds
        );
        return of(Verdict::Stopped, Some(worker), text);
    }
    if let Some(worker) = find(&WorkerLook::is_dead) {
        let text = format!(
            "{} (process {}) is dead and held {}; the launcher recovers it or ends the run",
            worker.name, worker.pid, worker.holds
        );
        return of(Verdict::Dead, Some(worker), text);
    }
    if let Some(worker) = find(&|worker| worker.tracer().is_some()) {
        let text = format!(
            "{} (process {}) is in the hands of a debugger (process {}) and holds {}; deadlines wait for it",
            worker.name,
            worker.pid,
            worker.tracer().unwrap_or(0),
            worker.holds
        );
        return of(Verdict::Traced, Some(worker), text);
    }
    let sits = |worker: &&WorkerLook| worker.seat == SeatState::Occupied;
    let longest = look
        .workers
        .iter()
        .filter(sits)
        .filter(|worker| !worker.waiting && worker.silent_s > LONG && look.phase != Phase::Loading)
        .max_by(|a, b| a.silent_s.total_cmp(&b.silent_s));
    if let Some(worker) = longest
        && look.workers.iter().any(|other| {
            other.waiting && other.seat == SeatState::Occupied && other.for_s > LONG / 2.0
        })
    {
        let kernel = worker
            .process
            .as_ref()
            .filter(|standing| standing.state == 'D')
            .map(|standing| {
                let place = standing.waits_in.as_deref().unwrap_or("unknown");
                format!(", waiting in the kernel ({place})")
            });
        // A thread that waits for a GPU may spin, so processor time says something on CPUs only.
        let on_cpu = worker
            .place
            .as_deref()
            .is_none_or(|place| !place.starts_with("GPU"));
        if on_cpu && worker.cpu.is_some_and(|cores| cores > 0.05) {
            let text = format!(
                "{} has been computing for {:.0} s ({}), and others wait for it: its units are large for one processor (--slot-tokens, --prefill-tokens)",
                worker.name, worker.silent_s, worker.doing
            );
            return of(Verdict::Long, Some(worker), text);
        }
        let text = format!(
            "{} has given no sign of life for {:.0} s ({}{}) and holds {}; others wait for it: see `launcher stacks {}`",
            worker.name,
            worker.silent_s,
            worker.doing,
            kernel.unwrap_or_default(),
            worker.holds,
            look.run,
        );
        return of(Verdict::Stuck, Some(worker), text);
    }
    if look.phase == Phase::Loading {
        return loading(look);
    }
    let mut sitting = look.workers.iter().filter(sits).peekable();
    if sitting.peek().is_some() && sitting.all(|worker| worker.waiting && worker.for_s > LONG) {
        let each: Vec<String> = look
            .workers
            .iter()
            .filter(sits)
            .map(|worker| format!("{} is {}", worker.name, worker.doing))
            .collect();
        let text = format!(
            "nobody has worked for {LONG:.0} s: {}; see `launcher stacks {}`",
            each.join(", "),
            look.run
        );
        return of(Verdict::Waiting, None, text);
    }
    match look.phase {
        Phase::Loading | Phase::Training => balance(look),
        Phase::Preparing => of(
            Verdict::Phase,
            None,
            "held-out documents are prefilled and walked before the first step".to_owned(),
        ),
        Phase::Stopping => of(
            Verdict::Phase,
            None,
            "a stop was asked for: the step is finished and saved".to_owned(),
        ),
        Phase::Finishing => of(
            Verdict::Phase,
            None,
            "all units are trained: the last checkpoint and evaluation".to_owned(),
        ),
    }
}

fn loading(look: &Look) -> Diagnosis {
    let late: Vec<String> = look
        .workers
        .iter()
        .filter(|worker| {
            worker.seat == SeatState::Vacant || worker.shares_total.share(Spent::Idle) == 0.0
        })
        .map(|worker| worker.name.to_string())
        .collect();
    let text = if late.is_empty() {
        "everybody has loaded; the start is due".to_owned()
    } else {
        format!("loading: {} not ready yet", late.join(", "))
    };
    Diagnosis {
        verdict: Verdict::Phase,
        worker: None,
        text,
    }
}

/// Who limits the speed, from what each role spends its time on.
fn balance(look: &Look) -> Diagnosis {
    let mean = |role| {
        let alive = look
            .of_role(role)
            .filter(|worker| worker.seat == SeatState::Occupied);
        Shares::mean(alive.map(|worker| &worker.shares))
    };
    let (targets, drafters) = (mean(Role::Target), mean(Role::Drafter));
    let starved = drafters.share(Spent::Data);
    let full = targets.share(Spent::Slot);
    let together = drafters.share(Spent::Peers) + drafters.share(Spent::Reduce);
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let overbooked = overbooked(look);
    let of = |verdict, text: String| Diagnosis {
        verdict,
        worker: None,
        text: text + &overbooked,
    };
    if starved >= MUCH && starved >= full {
        let text = format!(
            "drafters wait {} of the time for data: targets are the bottleneck{}",
            percent(starved),
            advice(look, Role::Target)
        );
        of(Verdict::Targets, text)
    } else if together >= 2.0 * MUCH && together >= full && busiest_gap(look) > 0.25 {
        let text = format!(
            "drafters wait {} of the time for each other: one is slower, or the batch is too small for so many (--batch-anchors, --unit-anchors)",
            percent(together)
        );
        of(Verdict::Uneven, text)
    } else if full >= MUCH {
        let text = format!(
            "targets wait {} of the time for a free slot: drafters are the bottleneck{}",
            percent(full),
            advice(look, Role::Drafter)
        );
        of(Verdict::Drafters, text)
    } else {
        let text = format!(
            "balanced: targets compute {} of the time, drafters {}",
            percent(targets.share(Spent::Busy)),
            percent(drafters.share(Spent::Busy))
        );
        of(Verdict::Balanced, text)
    }
}

/// A remark where workers on CPUs get far less processor time than they could use: whoever is slow then may only be
/// crowded out.
fn overbooked(look: &Look) -> String {
    let threads = |worker: &WorkerLook| {
        let place = worker.place.as_deref()?;
        let (count, _) = place.split_once(" CPU thread")?;
        count.parse::<f64>().ok()
    };
    let (mut wanted, mut got) = (0.0, 0.0);
    for worker in &look.workers {
        let (Some(threads), Some(cpu)) = (threads(worker), worker.cpu) else {
            return String::new();
        };
        wanted += threads * worker.shares.share(Spent::Busy);
        got += cpu;
    }
    if wanted > 1.0 && got < 0.7 * wanted {
        format!(
            "; all are slowed by crowded processors: {wanted:.1} threads' worth of work gets {got:.1}"
        )
    } else {
        String::new()
    }
}

/// Between the busiest and the least busy drafter.
fn busiest_gap(look: &Look) -> f64 {
    let busy = || {
        look.of_role(Role::Drafter)
            .map(|worker| worker.shares.share(Spent::Busy))
    };
    busy().fold(0.0, f64::max) - busy().fold(1.0, f64::min)
}

/// What another split of the same workers would give, where each has a device of its own: the measured rate of
/// each role while it computes, times the workers it would have.
fn advice(look: &Look, more: Role) -> String {
    let own_gpu = |worker: &WorkerLook| {
        let same = look
            .workers
            .iter()
            .filter(|other| other.place == worker.place);
        worker
            .place
            .as_deref()
            .is_some_and(|place| place.starts_with("GPU"))
            && same.count() == 1
    };
    let other = match more {
        Role::Target => ", a faster or smaller target or another target would help",
        Role::Drafter => {
            ", which is as it should be: targets are the cheaper role to have in excess"
        }
    };
    if !look.workers.iter().all(own_gpu) {
        return other.to_owned();
    }
    let counts = [Role::Target, Role::Drafter].map(|role| look.of_role(role).count());
    let busy_rate = |role| {
        let (tokens, busy) = look
            .of_role(role)
            .fold((0.0, 0.0), |(tokens, busy), worker| {
                (
                    tokens + worker.tokens_per_s,
                    busy + worker.shares.share(Spent::Busy),
                )
            });
        (busy > 0.0).then(|| tokens / busy)
    };
    let (Some(target), Some(drafter)) = (busy_rate(Role::Target), busy_rate(Role::Drafter)) else {
        return other.to_owned();
    };
    let speed =
        |targets: usize, drafters: usize| (targets as f64 * target).min(drafters as f64 * drafter);
    let [targets, drafters] = counts;
    let total = targets + drafters;
    let best = (1..total)
        .map(|targets| (targets, total - targets))
        .max_by(|a, b| speed(a.0, a.1).total_cmp(&speed(b.0, b.1)));
    match best {
        Some((t, d)) if speed(t, d) > 1.05 * speed(targets, drafters) => format!(
            "; --split {t}:{d} is predicted to give {:+.0} %",
            100.0 * (speed(t, d) / speed(targets, drafters) - 1.0)
        ),
        _ => "; no other split of these GPUs would be faster".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::look::tests::look;
    use super::*;
    use crate::launch::process::Standing;
    use crate::shm::Activity;

    fn standing(state: char, tracer: Option<u32>) -> Option<Standing> {
        Some(Standing {
            state,
            tracer,
            resident_memory: 0,
            waits_in: None,
            cpu_s: 0.0,
        })
    }

    fn shares(busy: f64, slot: f64, data: f64, peers: f64) -> Shares {
        Shares([busy, slot, data, 0.0, peers, 0.0, 0.0])
    }

    #[test]
    fn a_stopped_process_is_named_before_those_that_wait_for_it() {
        let mut look = look();
        for worker in &mut look.workers {
            (worker.waiting, worker.for_s) = (true, 40.0);
        }
        look.workers[1].process = standing('T', None);
        look.workers[1].holds.units = vec![5];
        look.workers[1].silent_s = 12.0;
        let found = diagnose(&look);
        assert_eq!(found.verdict, Verdict::Stopped);
        assert_eq!(found.worker.as_deref(), Some("target-1"));
        assert_eq!(
            found.text,
            "target-1 (process 101) is stopped (SIGSTOP or Ctrl-Z), silent for 12 s, and holds leased unit 5; `kill -CONT 101` lets it go on"
        );
        look.workers[1].process = standing('t', Some(77));
        assert_eq!(diagnose(&look).verdict, Verdict::Traced);
        assert!(!diagnose(&look).verdict.is_trouble());
    }

    #[test]
    fn a_long_computation_is_stuck_only_if_somebody_waits_for_it() {
        let mut look = look();
        // Long work that gives signs of life, such as an evaluation, is no trouble.
        look.workers[3].for_s = 45.0;
        (look.workers[2].waiting, look.workers[2].for_s) = (true, 44.0);
        assert_eq!(diagnose(&look).verdict, Verdict::Balanced);
        look.workers[2].waiting = false;
        look.workers[3].silent_s = 45.0;
        assert_eq!(diagnose(&look).verdict, Verdict::Balanced);
        (look.workers[2].waiting, look.workers[2].for_s) = (true, 44.0);
        let found = diagnose(&look);
        assert_eq!(found.verdict, Verdict::Stuck);
        assert!(
            found
                .text
                .starts_with("drafter-1 has given no sign of life for 45 s"),
            "{}",
            found.text
        );
    }

    #[test]
    fn a_process_that_computes_is_not_called_stuck() {
        let mut look = look();
        look.workers[0].silent_s = 45.0;
        look.workers[0].cpu = Some(0.9);
        (look.workers[2].waiting, look.workers[2].for_s) = (true, 44.0);
        let found = diagnose(&look);
        assert_eq!(found.verdict, Verdict::Long);
        assert!(!found.verdict.is_trouble());
        look.workers[0].place = Some("GPU 0".to_owned());
        assert_eq!(diagnose(&look).verdict, Verdict::Stuck);
    }

    #[test]
    fn everybody_waiting_lists_what_for() {
        let mut look = look();
        for worker in &mut look.workers {
            worker.activity = Activity::WaitItem;
            (worker.waiting, worker.for_s) = (true, 31.0);
        }
        assert_eq!(diagnose(&look).verdict, Verdict::Waiting);
        look.workers[0].for_s = 1.0;
        assert_ne!(diagnose(&look).verdict, Verdict::Waiting);
    }

    #[test]
    fn the_bottleneck_is_the_role_that_the_other_waits_for() {
        let mut look = look();
        for worker in &mut look.workers[2..] {
            worker.shares = shares(0.6, 0.0, 0.31, 0.09);
        }
        let found = diagnose(&look);
        assert_eq!(found.verdict, Verdict::Targets);
        assert!(
            found
                .text
                .starts_with("drafters wait 31 % of the time for data: targets are the bottleneck"),
            "{}",
            found.text
        );
        for worker in &mut look.workers[..2] {
            worker.shares = shares(0.3, 0.7, 0.0, 0.0);
        }
        assert_eq!(diagnose(&look).verdict, Verdict::Drafters);
        for worker in &mut look.workers[..2] {
            worker.shares = shares(1.0, 0.0, 0.0, 0.0);
        }
        look.workers[2].shares = shares(1.0, 0.0, 0.0, 0.0);
        look.workers[3].shares = shares(0.5, 0.0, 0.0, 0.5);
        assert_eq!(diagnose(&look).verdict, Verdict::Uneven);
    }

    #[test]
    fn crowded_processors_are_spoken_of() {
        let mut look = look();
        for worker in &mut look.workers {
            worker.cpu = Some(0.95);
        }
        assert!(!diagnose(&look).text.contains("crowded"));
        for worker in &mut look.workers {
            worker.cpu = Some(0.5);
        }
        let text = diagnose(&look).text;
        assert!(
            text.ends_with("crowded processors: 4.0 threads' worth of work gets 2.0"),
            "{text}"
        );
        look.workers[0].cpu = None;
        assert!(!diagnose(&look).text.contains("crowded"));
    }

    #[test]
    fn another_split_is_proposed_where_every_worker_has_a_gpu() {
        let mut look = look();
        let template = look.workers.clone();
        look.workers = (0..5)
            .map(|rank| (&template[0], rank))
            .chain((0..3).map(|rank| (&template[2], rank)))
            .map(|(like, rank)| WorkerLook {
                name: crate::control::WorkerName::new(like.name.role, rank),
                ..like.clone()
            })
            .collect();
        for (gpu, worker) in look.workers.iter_mut().enumerate() {
            worker.place = Some(format!("GPU {gpu}"));
            // Targets at 1000 each, always busy; drafters could do 2500 each and wait a third of the time.
            let is_target = worker.name.role == Role::Target;
            worker.tokens_per_s = if is_target { 1000.0 } else { 5000.0 / 3.0 };
            worker.shares = if is_target {
                shares(1.0, 0.0, 0.0, 0.0)
            } else {
                shares(2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0)
            };
        }
        let found = diagnose(&look);
        assert!(
            found
                .text
                .ends_with("; --split 5:3 is predicted to give +0 %")
                || found
                    .text
                    .ends_with("; no other split of these GPUs would be faster"),
            "{}",
            found.text
        );
        for worker in &mut look.workers[5..] {
            // Now at 4000 each while they compute.
            worker.shares = shares(5.0 / 12.0, 0.0, 7.0 / 12.0, 0.0);
        }
        let found = diagnose(&look);
        assert!(
            found
                .text
                .ends_with("; --split 6:2 is predicted to give +20 %"),
            "{}",
            found.text
        );
    }
}
