//! A run: shared memory is made, workers are started and watched, files are written, and one report ends it.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::gpus;
use super::memory::{Estimate, gib};
use super::options::Options;
use super::output::{JsonLines, OutputDir, OutputError, RunFile};
use super::places::{Device, Place};
use super::prepare::{BeginError, Prepared, Refusal, prepare};
use super::process;
use super::recorder::Recorder;
use super::report::{AcceptedLength, Outcome, RootCause, Summary, how_to_resume};
use super::spawn::{WorkerSpec, program};
use super::stalls::Stalls;
use super::supervise::{
    Actions, Deadlines, Ended, Hooks, StopWhy, SuperviseError, Supervisor, WorkerId,
};
use crate::control::{Evaluation, FromWorker, Role, StepReport, WorkerName};
use crate::monitor::console::{Console, Tail};
use crate::monitor::live::{LiveLine, LiveView, duration};
use crate::monitor::logs;
use crate::monitor::metrics::{MetricsRecord, TrainedRecord};
use crate::shm::{RunId, Segment, ShmError, StopReason};
use crate::train::best::Best;
use crate::worker::WorkerPlan;

/// Why a run could not begin, or could not go on by the launcher's own fault.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Shared memory.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// The output directory cannot be prepared.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// A file of the run.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// Supervision.
    #[error(transparent)]
    Supervise(#[from] SuperviseError),
    /// A program is missing.
    #[error(transparent)]
    Spawn(#[from] super::spawn::SpawnError),
    /// The launcher's log.
    #[error("the launcher's log: {0}")]
    Log(std::io::Error),
}

/// Trains; returns the launcher's exit code. On the main thread: workers die with the thread that starts them.
pub fn train(options: &Options) -> u8 {
    let console = Console::new(options.watch.quiet);
    let began = Instant::now();
    let prepared = match prepare(options, &console) {
        Ok(prepared) => prepared,
        Err(Refusal(lines)) => {
            for line in lines {
                eprintln!("error: {line}");
            }
            return 2;
        }
    };
    match run(options, prepared, &console, began) {
        Ok(code) => code,
        Err(RunError::Shm(
            error @ (ShmError::NotEnoughMemory { .. } | ShmError::TooFewSlots { .. }),
        )) => {
            eprintln!("error: {error}");
            2
        }
        Err(error) => {
            console.end_live();
            eprintln!("error: {error}");
            1
        }
    }
}

fn run(
    options: &Options,
    prepared: Prepared,
    console: &Console,
    began: Instant,
) -> Result<u8, RunError> {
    process::allow_debuggers();
    let programs = [program(Role::Target)?, program(Role::Drafter)?];
    let run_id = RunId::fresh();
    let segment = Segment::create(&prepared.geometry, run_id)?;
    prepared.begin()?;
    logs::start_launcher(&prepared.output.launcher_log(), console).map_err(RunError::Log)?;
    if let Some(ledger) = &prepared.ledger {
        segment.restore_ledger(ledger)?;
    }
    if let Some(last) = prepared.last_step {
        // Behind it already: at once, without held-out documents.
        let after = (last > prepared.first_step).then_some(last);
        segment.request_stop(after, StopReason::MaxSteps);
    }
    introduce(&prepared, console);

    let mut supervisor = Supervisor::new(Deadlines::default())?;
    if let Some(limit) = options.training.time_limit {
        supervisor.stop_at(began + limit);
    }
    let _run_file = RunFile::of_this_process(
        std::os::fd::AsRawFd::as_raw_fd(&segment.fd()),
        supervisor.socket_folder(),
    )
    .write(&prepared.output)?;
    let mut tails = Vec::new();
    for Place { worker, device } in &prepared.plan.places {
        let log = prepared.output.log(*worker);
        let mut spec = WorkerSpec {
            worker: *worker,
            program: programs[usize::from(worker.role == Role::Drafter)].clone(),
            arguments: Vec::new(),
            environment: match device {
                Device::Cpu { .. } => Vec::new(),
                Device::Gpu { .. } => vec![("LD_LIBRARY_PATH".into(), gpus::library_path())],
            },
            threads: device.threads(),
            descriptors: vec![("segment", segment.fd())],
            log: log.clone(),
            terminal: false,
        };
        options.faults.debug.apply(&mut spec);
        supervisor.add(&spec)?;
        if options.watch.show.contains(worker) {
            let tail = Tail::start(log, worker.to_string(), console.clone());
            tails.push(tail.map_err(RunError::Log)?);
        }
    }
    let recorder = Recorder::start(
        &prepared.output,
        &options.watch.record,
        &segment,
        &prepared.plan.places,
    )?;
    if let Some(address) = recorder.address() {
        console.line(&format!("metrics: http://{address}/metrics"));
    }
    let mut hooks = Run::new(&prepared, segment, run_id, console, recorder)?;
    let ended = supervisor.run(&mut hooks)?;
    drop(tails);
    console.end_live();
    hooks.report(&prepared, ended, began)
}

/// What a person sees before the first step.
fn introduce(prepared: &Prepared, console: &Console) {
    let geometry = &prepared.geometry;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    console.line(&prepared.plan.to_string());
    console.line(&format!(
        "work: {} units of {} documents each epoch, {} anchors in all, held out: {} documents",
        prepared.work.units.len(),
        prepared
            .work
            .units
            .iter()
            .map(|unit| unit.documents.len())
            .sum::<usize>(),
        prepared.work.planned_anchors(),
        held_out_documents(prepared),
    ));
    console.line(&format!(
        "shared memory: {:.1} MiB, {} slots of {:.2} MiB ({} tokens), {} for held-out documents",
        mib(geometry.total_bytes().unwrap_or(0)),
        geometry.slots,
        mib(geometry.slot_bytes()),
        geometry.slot_tokens,
        geometry.eval_units,
    ));
    for line in prepared.estimate.lines(&prepared.plan.places) {
        console.line(&line);
    }
}

fn held_out_documents(prepared: &Prepared) -> u64 {
    let documents = |unit: crate::data::units::Unit<'_>| unit.documents.len() as u64;
    prepared.work.eval_units.iter().map(documents).sum()
}

/// How long the rates of the live line look back.
const WINDOW: Duration = Duration::from_secs(10);

/// One look at the seats, for rates.
struct Look {
    at: Instant,
    /// Tokens and nanoseconds of work, by seat.
    seats: Vec<(u64, u64)>,
}

struct Run<'a> {
    segment: Segment,
    console: Console,
    output: OutputDir,
    template: &'a WorkerPlan,
    run_id: RunId,
    names: Vec<WorkerName>,
    devices: Vec<Device>,
    planned_anchors: u64,
    anchors_by_unit: &'a crate::data::Workload,
    held_out: u64,
    live: LiveLine,
    looks: VecDeque<Look>,
    trained: JsonLines,
    metrics: JsonLines,
    /// What a worker said of its parameters.
    parameters: BTreeMap<WorkerId, String>,
    evaluations: BTreeMap<u32, Evaluation>,
    best: Option<Best>,
    began_training: Option<Instant>,
    ready: usize,
    anchors: u64,
    last: Option<StepReport>,
    steps: u32,
    tokens: u64,
    stopping: bool,
    stalls: Stalls,
    recorder: Recorder,
    checkpoint: Option<PathBuf>,
    /// Most bytes of tensors that workers on GPUs held.
    device_peaks: BTreeMap<WorkerId, u64>,
    estimate: Estimate,
}

impl<'a> Run<'a> {
    fn new(
        prepared: &'a Prepared,
        segment: Segment,
        run_id: RunId,
        console: &Console,
        recorder: Recorder,
    ) -> Result<Self, RunError> {
        let output = prepared.output.clone();
        let (mut anchors, mut tokens) = (0, 0);
        if let Some(ledger) = &prepared.ledger {
            let work = &prepared.work;
            for unit in (0..u64::from(work.order.len())).filter(|&unit| ledger.is_done(unit)) {
                anchors += u64::from(work.anchors(unit));
                tokens += u64::from(work.tokens(unit));
            }
        }
        Ok(Self {
            trained: JsonLines::append_to(&output.file("trained.jsonl"))?,
            metrics: JsonLines::append_to(&output.file("metrics.jsonl"))?,
            checkpoint: output.latest_checkpoint(),
            stalls: Stalls::new(output.path()),
            recorder,
            output,
            segment,
            console: console.clone(),
            template: &prepared.worker,
            run_id,
            names: prepared
                .plan
                .places
                .iter()
                .map(|place| place.worker)
                .collect(),
            devices: prepared
                .plan
                .places
                .iter()
                .map(|place| place.device)
                .collect(),
            planned_anchors: prepared.work.planned_anchors(),
            anchors_by_unit: &prepared.work,
            held_out: held_out_documents(prepared),
            live: LiveLine::new(console.clone()),
            device_peaks: BTreeMap::new(),
            estimate: prepared.estimate,
            looks: VecDeque::new(),
            parameters: BTreeMap::new(),
            evaluations: BTreeMap::new(),
            // One behind the step from which the run goes on belongs to what is trained again.
            best: Best::read(&prepared.output.checkpoints())
                .filter(|best| best.step <= prepared.first_step),
            began_training: None,
            ready: 0,
            anchors,
            last: None,
            steps: prepared.first_step as u32,
            tokens,
            stopping: false,
        })
    }

    fn seat(&self, worker: WorkerId) -> u32 {
        let WorkerName { role, rank } = self.names[worker];
        match role {
            Role::Target => rank,
            Role::Drafter => self.segment.geometry().drafter_seat(rank),
        }
    }

    /// A committed step: its lines in trained.jsonl and metrics.jsonl.
    fn step(&mut self, report: StepReport) -> Result<(), OutputError> {
        let units = report.units.iter().flat_map(|(_, units)| units);
        self.anchors += units
            .map(|&unit| u64::from(self.anchors_by_unit.anchors(unit)))
            .sum::<u64>();
        self.steps = report.step;
        self.tokens += report.tokens;
        self.trained.add(&TrainedRecord {
            step: report.step,
            units: report.units.iter().cloned().collect(),
        })?;
        let (targets, drafters, busy) = self.rates();
        let ring = self.segment.ring_counts();
        let record = MetricsRecord {
            step: report.step,
            time_s: self
                .began_training
                .map_or(0.0, |at| at.elapsed().as_secs_f64()),
            loss: report.loss,
            block_accepted_length: report.block_accepted_length,
            lr: report.lr,
            grad_norm: report.grad_norm,
            tokens: report.tokens,
            target_tokens_per_s: targets,
            drafter_tokens_per_s: drafters,
            ring_ready: ring.ready,
            ring_free: ring.free,
            busy: busy.into_iter().collect(),
            position_accuracy: report.position_accuracy.clone(),
        };
        self.metrics.add(&record)?;
        self.recorder.step(&record);
        self.last = Some(report);
        Ok(())
    }

    /// Adds one drafter's share of an evaluation; says the figure once all shares are there.
    fn evaluation(&mut self, share: Evaluation) {
        let step = share.step;
        let sum = self.evaluations.entry(step).or_default();
        sum.add(share);
        if sum.documents == self.held_out
            && let Some(length) = sum.accepted_length()
        {
            self.recorder.evaluation(sum);
            let when = if step == 0 {
                "before training".to_owned()
            } else {
                format!("after step {step}")
            };
            let trees: Vec<String> = sum
                .trees
                .iter()
                .map(|&(budget, tokens, rounds)| {
                    format!(
                        "tree of {budget}: {:.2}",
                        tokens as f64 / rounds.max(1) as f64
                    )
                })
                .collect();
            self.console.line(&format!(
                "held-out accepted length {when}: {length:.3} ({})",
                trees.join(", ")
            ));
            self.consider(step);
        }
    }

    /// Keeps the checkpoint of `step` as the best, if it is saved, evaluated and better than the best so far.
    fn consider(&mut self, step: u32) {
        let root = self.output.checkpoints();
        let found = self.evaluations.get(&step);
        let found = found.filter(|found| found.documents == self.held_out);
        let candidate = found.and_then(|f| Best::new(u64::from(step), f.tokens, f.rounds));
        let Some(candidate) = candidate.filter(|_| root.join(format!("step-{step}")).is_dir())
        else {
            return;
        };
        let beaten = |best: &Best| best.is_beaten_by(&candidate);
        if self.best.as_ref().is_none_or(beaten) {
            match candidate.keep(&root) {
                Ok(()) => self.best = Some(candidate),
                Err(error) => self.console.warn(&format!("the best checkpoint: {error}")),
            }
        }
    }

    fn accepted_length(&self, step: u32) -> Option<f64> {
        let found = self.evaluations.get(&step)?;
        (found.documents == self.held_out).then(|| found.accepted_length())?
    }

    /// Tokens per second of targets and of drafters, and the busy share of each worker, over the last seconds.
    fn rates(&mut self) -> (f64, f64, Vec<(String, f64)>) {
        let snapshot = self.segment.snapshot();
        let seats: Vec<(u64, u64)> = snapshot
            .seats
            .iter()
            .map(|seat| (seat.tokens, seat.busy_and_waiting_ns().0))
            .collect();
        let now = Instant::now();
        self.looks.push_back(Look { at: now, seats });
        while self.looks.len() > 2 && now - self.looks[1].at > WINDOW {
            self.looks.pop_front();
        }
        let (Some(old), Some(new)) = (self.looks.front(), self.looks.back()) else {
            return (0.0, 0.0, Vec::new());
        };
        let seconds = (new.at - old.at).as_secs_f64();
        if seconds <= 0.0 {
            return (0.0, 0.0, Vec::new());
        }
        let since = |pick: fn(&(u64, u64)) -> u64, seat: usize| {
            pick(&new.seats[seat]).saturating_sub(pick(&old.seats[seat])) as f64
        };
        let mut rates = [0.0; 2];
        let mut busy = Vec::new();
        for (worker, name) in self.names.iter().enumerate() {
            let seat = self.seat(worker) as usize;
            rates[usize::from(name.role == Role::Drafter)] += since(|seat| seat.0, seat) / seconds;
            let share = since(|seat| seat.1, seat) / (seconds * 1e9);
            busy.push((name.to_string(), share.min(1.0)));
        }
        (rates[0], rates[1], busy)
    }

    fn view(&mut self) -> LiveView {
        let (targets, drafters, busy) = self.rates();
        let ring = self.segment.ring_counts();
        let progress = self.anchors as f64 / self.planned_anchors.max(1) as f64;
        let phase = match (self.stopping, self.began_training) {
            (true, _) => "stopping",
            (_, None) => "loading",
            _ if self.steps == 0 => "preparing",
            _ => "training",
        };
        let elapsed = self.began_training.map(|at| at.elapsed().as_secs_f64());
        let remaining = elapsed
            .filter(|_| progress > 0.0 && self.steps > 0)
            .map(|elapsed| elapsed * (1.0 - progress) / progress);
        let expected = |anchors: u64| {
            (f64::from(self.steps) * self.planned_anchors as f64 / anchors as f64).round() as u32
        };
        let short = |name: &str| {
            let (role, rank) = name.split_once('-').unwrap_or((name, ""));
            format!("{}{rank}", &role[..1])
        };
        LiveView {
            phase: phase.to_owned(),
            step: self.steps,
            steps: (self.anchors > 0).then(|| expected(self.anchors)),
            progress,
            loss: self.last.as_ref().map(|last| last.loss),
            block_accepted_length: self.last.as_ref().map(|last| last.block_accepted_length),
            target_tokens_per_s: targets,
            drafter_tokens_per_s: drafters,
            ring_ready: ring.ready,
            ring_slots: ring.total(),
            busy: busy
                .into_iter()
                .map(|(name, share)| (short(&name), share))
                .collect(),
            remaining_s: remaining,
        }
    }

    /// The last words of the run, its summary, and the exit code.
    fn report(mut self, prepared: &Prepared, ended: Ended, began: Instant) -> Result<u8, RunError> {
        let counts = self.segment.ledger_counts();
        let total = self.segment.geometry().units;
        let trained_all = counts.done + counts.quarantined == total;
        let failure = ended.failure.as_ref();
        // A run that was to train and did not make one step has not succeeded, whatever its workers say.
        let idle = self.steps == 0 && ended.stopped.is_none() && failure.is_none();
        let outcome = match failure {
            Some(_) => Outcome::Failed,
            None if idle || ended.interrupted => Outcome::Failed,
            None if trained_all => Outcome::Complete,
            None => Outcome::Stopped,
        };
        let first = self.evaluations.keys().next().copied().unwrap_or(0);
        let after = (self.steps > first).then(|| self.accepted_length(self.steps));
        let accepted_length = AcceptedLength {
            before: self.accepted_length(first),
            after: after.flatten(),
        };
        let skipped = prepared.report.skipped.iter();
        let summary = Summary {
            outcome,
            steps: self.steps,
            epochs: prepared.plan.epochs,
            units_total: total,
            units_done: counts.done,
            documents: prepared
                .work
                .units
                .iter()
                .map(|unit| unit.documents.len() as u64)
                .sum(),
            tokens: self.tokens,
            skipped: skipped
                .map(|(reason, skip)| (reason.name().to_owned(), skip.count))
                .collect(),
            wall_s: began.elapsed().as_secs_f64(),
            accepted_length,
            restarts: 0,
            quarantined: Vec::new(),
            peak_memory: self.peak_memory(&ended.peak_memory),
            checkpoint: self.checkpoint.take(),
            root_cause: failure.map(Into::into),
        };
        let text =
            serde_json::to_string_pretty(&summary).expect("a summary holds only what JSON can say");
        self.output
            .write_whole("summary.json", &format!("{text}\n"))?;
        for line in &ended.unkillable {
            self.console.warn(line);
        }
        if let Some(failure) = failure {
            let resume = how_to_resume(self.output.path(), summary.checkpoint.as_deref());
            eprintln!("{}", RootCause { failure, resume });
            return Ok(ended.exit_code());
        }
        if idle {
            eprintln!(
                "error: no step was made: {} units of {total} were trained",
                counts.done
            );
            return Ok(1);
        }
        self.farewell(&summary, ended.stopped);
        Ok(ended.exit_code())
    }

    /// Of each worker: what its tensors took of the GPU, where it had one, else resident memory.
    fn peak_memory(&self, resident: &[(WorkerName, u64)]) -> BTreeMap<String, u64> {
        let mut peaks: BTreeMap<String, u64> = resident
            .iter()
            .map(|(name, bytes)| (name.to_string(), *bytes))
            .collect();
        for (&worker, &peak) in &self.device_peaks {
            peaks.insert(self.names[worker].to_string(), peak);
        }
        peaks
    }

    fn farewell(&self, summary: &Summary, stopped: Option<StopWhy>) {
        let how = match (summary.outcome, stopped) {
            (Outcome::Complete, _) => "complete".to_owned(),
            (_, Some(why)) => format!("stopped by {}", why.words()),
            (_, None) => "stopped by --max-steps".to_owned(),
        };
        self.console.line(&format!(
            "{how}: {} steps, {} of {} units, {} tokens in {}",
            summary.steps,
            summary.units_done,
            summary.units_total,
            summary.tokens,
            duration(summary.wall_s)
        ));
        for (&worker, &peak) in &self.device_peaks {
            let name = self.names[worker];
            self.console.line(&format!(
                "{name}: {} of GPU memory at most, {} estimated",
                gib(peak),
                gib(self.estimate.of(name.role).total()),
            ));
        }
        if let AcceptedLength {
            before: Some(before),
            after: Some(after),
        } = summary.accepted_length
        {
            self.console.line(&format!(
                "held-out accepted length: {before:.2} before, {after:.2} after"
            ));
        }
        if let Some(checkpoint) = &summary.checkpoint {
            let run = self.output.path().display();
            self.console
                .line(&format!("checkpoint: {}", checkpoint.display()));
            if let Some(best) = &self.best {
                self.console.line(&format!(
                    "best: {run}/checkpoints/best, of step {}, held-out accepted length {:.3}",
                    best.step, best.accepted_length
                ));
            }
            self.console.line(&format!("next: launcher eval {run}"));
        }
    }
}

impl Hooks for Run<'_> {
    fn plan(&mut self, worker: WorkerId) -> Vec<u8> {
        let plan = WorkerPlan {
            seat: self.seat(worker),
            gpu: match self.devices[worker] {
                Device::Cpu { .. } => None,
                Device::Gpu { ordinal } => Some(ordinal),
            },
            run_id: self.run_id.to_string(),
            ..self.template.clone()
        };
        postcard::to_allocvec(&plan).expect("a plan is plain data in memory")
    }

    fn message(&mut self, worker: WorkerId, message: FromWorker, actions: &mut Actions) {
        match message {
            FromWorker::Ready(loaded) => {
                self.ready += 1;
                if let Some(hash) = loaded.parameters {
                    self.parameters.insert(worker, hash);
                }
            }
            FromWorker::Step(report) => {
                if let Err(error) = self.step(report) {
                    actions.fail(None, error.to_string());
                }
            }
            FromWorker::Evaluation(share) => self.evaluation(share),
            FromWorker::CheckpointSaved { step, path } => {
                tracing::info!("checkpoint of step {step}: {}", path.display());
                self.checkpoint = Some(path);
                self.consider(step);
            }
            FromWorker::DeviceMemory { peak } => {
                self.device_peaks.insert(worker, peak);
            }
            FromWorker::Warning(what) => {
                self.console
                    .warn(&format!("{}: {what}", self.names[worker]));
            }
            FromWorker::Hello { .. }
            | FromWorker::Loading { .. }
            | FromWorker::Failed(_)
            | FromWorker::Done { .. } => {}
        }
    }

    fn all_ready(&mut self, actions: &mut Actions) {
        self.began_training = Some(Instant::now());
        let mut hashes = self.parameters.iter();
        if let Some((first, hash)) = hashes.next()
            && let Some((other, _)) = hashes.find(|(_, other)| *other != hash)
        {
            let what = format!(
                "{} and {} begin with different parameters",
                self.names[*first], self.names[*other]
            );
            actions.fail(Some(*other), what);
        }
    }

    fn suspect(&mut self, worker: WorkerId) {
        self.segment.mark_suspect(self.seat(worker));
    }

    fn stop(&mut self, why: StopWhy) {
        self.stopping = true;
        self.console.line(&format!(
            "stopping ({}): this step is finished and saved; Ctrl-C again stops now",
            why.words()
        ));
        let reason = match why {
            StopWhy::Interrupt => StopReason::Interrupt,
            StopWhy::Signal(_) => StopReason::Terminate,
            StopWhy::TimeLimit => StopReason::TimeLimit,
            StopWhy::MaxSteps => StopReason::MaxSteps,
        };
        self.segment.request_stop(None, reason);
    }

    fn tick(&mut self, _: &mut Actions) {
        if let Some(trouble) = self.stalls.look(&self.segment) {
            tracing::warn!("{trouble}");
        }
        if self.began_training.is_some() {
            self.recorder.tick(&self.segment, self.steps);
        }
        if self.live.is_due() {
            let view = self.view();
            self.live.show(&view);
        }
    }
}
