//! The launcher's event loop: it watches every worker, decides how a run ends, and leaves no process behind.
//!
//! A worker's liveness pipe at end-of-file only makes it *suspect*; it is dead once `waitid` has said so. The
//! first to be noticed, by this process's clock, is the root cause; all later deaths are consequences.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use super::process;
use super::report::{Death, Exit, Failure};
use super::signals::{Signal, Signals};
use super::spawn::{SpawnError, Spawned, Spawner, WorkerSpec};
use crate::control::{
    ControlError, Door, FromWorker, Incoming, Orders, SocketFolder, ToWorker, WorkerName,
};

/// Why supervision itself failed.
#[derive(Debug, thiserror::Error)]
pub enum SuperviseError {
    /// A worker could not be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// Its channel could not be made.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// How long things may take. Deadlines pause while a debugger holds any worker.
#[derive(Clone, Debug)]
pub struct Deadlines {
    /// From the start of a process to its Hello.
    pub hello: Duration,
    /// Between two signs of life of a worker that loads.
    pub loading: Duration,
    /// From a stop to the end of all workers, a checkpoint included.
    pub stop: Duration,
    /// From SIGTERM to SIGKILL.
    pub terminate: Duration,
    /// From SIGKILL until a process is given up as unkillable.
    pub kill: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(60),
            loading: Duration::from_secs(900),
            stop: Duration::from_secs(300),
            terminate: Duration::from_secs(2),
            kill: Duration::from_secs(10),
        }
    }
}

/// Why a run stops before its end, in an orderly way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopWhy {
    /// The first Ctrl-C.
    Interrupt,
    /// SIGTERM, SIGUSR1 or SIGHUP.
    Signal(Signal),
    /// `--time-limit`.
    TimeLimit,
    /// `--max-steps`.
    MaxSteps,
}

impl StopWhy {
    /// In words.
    pub fn words(self) -> String {
        match self {
            Self::Interrupt => "Ctrl-C".to_owned(),
            Self::Signal(signal) => signal.to_string(),
            Self::TimeLimit => "the time limit".to_owned(),
            Self::MaxSteps => "--max-steps".to_owned(),
        }
    }
}

/// A worker's number: workers are counted in the order in which they were added.
pub type WorkerId = usize;

/// What hooks want done after an event.
#[derive(Debug, Default)]
pub struct Actions {
    stop: Option<StopWhy>,
    fail: Option<(Option<WorkerId>, String)>,
    orders: Vec<(WorkerId, ToWorker)>,
}

impl Actions {
    /// Stop in an orderly way; only the first reason counts.
    pub fn stop(&mut self, why: StopWhy) {
        self.stop.get_or_insert(why);
    }

    /// End the run as failed, naming the worker at fault if it is one's.
    pub fn fail(&mut self, culprit: Option<WorkerId>, what: impl Into<String>) {
        self.fail.get_or_insert((culprit, what.into()));
    }

    /// Send an order to one worker.
    pub fn order(&mut self, worker: WorkerId, order: ToWorker) {
        self.orders.push((worker, order));
    }
}

/// What the run does at each event; supervision itself knows neither shared memory nor training.
pub trait Hooks {
    /// The worker said Hello: its plan, in postcard.
    fn plan(&mut self, worker: WorkerId) -> Vec<u8>;

    /// A message other than Hello.
    fn message(&mut self, worker: WorkerId, message: FromWorker, actions: &mut Actions);

    /// Everybody is ready; [`ToWorker::Start`] goes to all of them after this.
    fn all_ready(&mut self, actions: &mut Actions) {
        let _ = actions;
    }

    /// End-of-file on a worker's liveness pipe: mark its seat, so that the others abort what needs it. It is not
    /// yet known to be dead: nothing of its may be reclaimed.
    fn suspect(&mut self, worker: WorkerId) {
        let _ = worker;
    }

    /// `waitid` proved its death. Called for orderly leavers too.
    fn dead(&mut self, worker: WorkerId) {
        let _ = worker;
    }

    /// The run is to stop in an orderly way: ask for it in shared memory; [`ToWorker::Stop`] follows.
    fn stop(&mut self, why: StopWhy) {
        let _ = why;
    }

    /// Several times a second.
    fn tick(&mut self, actions: &mut Actions) {
        let _ = actions;
    }
}

/// How a run ended, all workers being gone.
#[derive(Debug)]
pub struct Ended {
    /// Why it was stopped early, if it was.
    pub stopped: Option<StopWhy>,
    /// Whether all workers had begun to train.
    pub started: bool,
    /// The second Ctrl-C ended it.
    pub interrupted: bool,
    /// The root cause and its consequences, if it failed.
    pub failure: Option<Failure>,
    /// Processes that even SIGKILL did not end, with where they wait.
    pub unkillable: Vec<String>,
    /// Largest memory of each worker by its own account, in bytes.
    pub peak_memory: Vec<(WorkerName, u64)>,
}

impl Ended {
    /// What the launcher exits with.
    pub fn exit_code(&self) -> u8 {
        if self.interrupted {
            return 130;
        }
        if let Some(failure) = &self.failure {
            return failure.exit_code();
        }
        match self.stopped {
            // Nothing was saved, so it is not the orderly stop that 0 stands for.
            Some(StopWhy::Interrupt) if !self.started => 130,
            Some(StopWhy::Signal(_) | StopWhy::TimeLimit) => 75,
            _ => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Started; has not said Hello.
    Silent,
    /// Has its plan; loads.
    Loading,
    /// Waits for the start, or works.
    Ready,
    /// Said that all its work is done.
    Done,
}

#[derive(Debug)]
struct Worker {
    spawned: Spawned,
    orders: Orders,
    stage: Stage,
    /// The last sign of life while loading.
    heard: Instant,
    /// When its liveness pipe came to its end, or its death was seen.
    noticed: Option<(Instant, u64)>,
    dead: Option<Exit>,
    channel_closed: bool,
    failed: Option<String>,
    ended_by_us: bool,
    peak_memory: u64,
    stopped_since: Option<Instant>,
}

impl Worker {
    fn name(&self) -> WorkerName {
        self.spawned.worker
    }

    /// Left as it should: done, and with exit code 0.
    fn left_well(&self) -> bool {
        self.stage == Stage::Done && self.dead == Some(Exit::Code(0))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Stopping,
    Terminating,
    Killing,
}

/// Supervises the workers of one run.
pub struct Supervisor {
    spawner: Spawner,
    signals: Signals,
    deadlines: Deadlines,
    workers: Vec<Worker>,
    folder: Option<SocketFolder>,
    wake: Arc<OwnedFd>,
    inbox: mpsc::Receiver<(WorkerId, Incoming)>,
    deliver: mpsc::Sender<(WorkerId, Incoming)>,
    began: Instant,
    /// Number of looks at the descriptors so far: what is noticed in one look has no order in time.
    looks: u64,
    phase: Phase,
    phase_since: Instant,
    started: bool,
    stopped: Option<StopWhy>,
    interrupted: bool,
    failed: Option<(Option<WorkerId>, String)>,
    oom_kills: Option<u64>,
    unkillable: Vec<String>,
    time_limit: Option<Instant>,
}

/// How often the loop looks up even if nothing happens.
const TICK: Duration = Duration::from_millis(100);
/// How long a dead worker's last messages are waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// A wait longer than this is spoken of.
const SPEAK_AFTER: Duration = Duration::from_secs(30);

impl Supervisor {
    /// Catches signals and makes the folder for sockets. On the main thread: workers die with the thread that
    /// starts them.
    ///
    /// # Errors
    ///
    /// [`SuperviseError`] with what the system refused.
    pub fn new(deadlines: Deadlines) -> Result<Self, SuperviseError> {
        let system = |what| move |source: io::Error| SuperviseError::System { what, source };
        let spawner = Spawner::new()?;
        let folder = SocketFolder::create()?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| system("making an eventfd")(error.into()))?;
        let signals = Signals::catch().map_err(system("catching signals"))?;
        let (deliver, inbox) = mpsc::channel();
        Ok(Self {
            spawner,
            signals,
            deadlines,
            workers: Vec::new(),
            folder: Some(folder),
            wake: Arc::new(wake),
            inbox,
            deliver,
            began: Instant::now(),
            looks: 0,
            phase: Phase::Running,
            phase_since: Instant::now(),
            started: false,
            stopped: None,
            interrupted: false,
            failed: None,
            oom_kills: process::oom_kills(),
            unkillable: Vec::new(),
            time_limit: None,
        })
    }

    /// Stops the run in an orderly way at this time.
    pub fn stop_at(&mut self, time: Instant) {
        self.time_limit = Some(time);
    }

    /// Where the sockets of the start-up lie, for run.json.
    pub fn socket_folder(&self) -> Option<&std::path::Path> {
        self.folder.as_ref().map(SocketFolder::path)
    }

    /// Starts a worker.
    ///
    /// # Errors
    ///
    /// [`SuperviseError`]; workers that already run are ended when the supervisor is dropped.
    pub fn add(&mut self, spec: &WorkerSpec<'_>) -> Result<WorkerId, SuperviseError> {
        let folder = match &self.folder {
            Some(folder) => folder.clone(),
            None => SocketFolder::create()?,
        };
        let id = self.workers.len();
        let door = Door::open(&folder, spec.worker)?;
        self.folder = Some(folder);
        let spawned = self.spawner.spawn(spec, door.path())?;
        tracing::info!("started {} as process {}", spec.worker, spawned.pid);
        let (deliver, wake) = (self.deliver.clone(), Arc::clone(&self.wake));
        let attended = door.attend(move |incoming| {
            // The loop has ended when nobody receives.
            let _ = deliver.send((id, incoming));
            let _ = rustix::io::write(&*wake, &1_u64.to_ne_bytes());
        });
        let orders = match attended {
            Ok(orders) => orders,
            Err(error) => {
                end_now(&spawned);
                return Err(error.into());
            }
        };
        self.workers.push(Worker {
            spawned,
            orders,
            stage: Stage::Silent,
            heard: Instant::now(),
            noticed: None,
            dead: None,
            channel_closed: false,
            failed: None,
            ended_by_us: false,
            peak_memory: 0,
            stopped_since: None,
        });
        Ok(id)
    }

    /// The process of a worker.
    pub fn pid(&self, worker: WorkerId) -> u32 {
        self.workers[worker].spawned.pid
    }

    /// Runs until every worker is gone.
    ///
    /// # Errors
    ///
    /// [`SuperviseError::System`] when the loop itself cannot go on; all workers are killed then.
    pub fn run(&mut self, hooks: &mut dyn Hooks) -> Result<Ended, SuperviseError> {
        loop {
            let mut actions = Actions::default();
            for event in self.look()? {
                self.handle(event, hooks, &mut actions);
            }
            self.meet_deadlines(&mut actions);
            if self.time_limit.is_some_and(|limit| Instant::now() >= limit) {
                actions.stop(StopWhy::TimeLimit);
            }
            hooks.tick(&mut actions);
            self.act(actions, hooks);
            if self.workers.iter().all(|worker| worker.dead.is_some())
                || self.phase == Phase::Killing && self.give_up()
            {
                return Ok(self.ended());
            }
        }
    }

    /// Waits for something to happen and says what did, in the order in which it is to be handled.
    fn look(&mut self) -> Result<VecDeque<Event>, SuperviseError> {
        self.looks += 1;
        let pause = Timespec::try_from(TICK).expect("a tenth of a second is a time");
        let mut sources = vec![Source::Signals, Source::Inbox];
        let mut polled = vec![
            PollFd::new(self.signals.descriptor(), PollFlags::IN),
            PollFd::new(&*self.wake, PollFlags::IN),
        ];
        for (id, worker) in self.workers.iter().enumerate() {
            if worker.noticed.is_none() {
                sources.push(Source::Liveness(id));
                polled.push(PollFd::new(&worker.spawned.liveness, PollFlags::IN));
            }
            if worker.dead.is_none() {
                sources.push(Source::Pidfd(id));
                polled.push(PollFd::new(&worker.spawned.pidfd, PollFlags::IN));
            }
        }
        match poll(&mut polled, Some(&pause)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(SuperviseError::System {
                    what: "waiting for workers",
                    source: error.into(),
                });
            }
        }
        let fired: Vec<Source> = sources
            .into_iter()
            .zip(&polled)
            .filter(|(_, polled)| !polled.revents().is_empty())
            .map(|(source, _)| source)
            .collect();
        drop(polled);

        let mut events = VecDeque::new();
        while let Some(signal) = self.signals.next() {
            events.push_back(Event::Signal(signal));
        }
        for source in &fired {
            if let Source::Liveness(id) = *source {
                events.push_back(Event::Suspect(id));
            }
        }
        self.drain(&mut events);
        for source in &fired {
            if let Source::Pidfd(id) = *source {
                events.push_back(Event::Ended(id));
            }
        }
        Ok(events)
    }

    /// Takes what the channels brought.
    fn drain(&mut self, events: &mut VecDeque<Event>) {
        let mut count = [0_u8; 8];
        // Only resets the eventfd; that it was at zero is fine.
        let _ = rustix::io::read(&*self.wake, &mut count);
        while let Ok((id, incoming)) = self.inbox.try_recv() {
            events.push_back(Event::Channel(id, incoming));
        }
    }

    /// Hears the last messages of a process that has ended, before its death is declared.
    fn last_words(&mut self, id: WorkerId, hooks: &mut dyn Hooks, actions: &mut Actions) {
        self.workers[id].orders.stop_waiting();
        let until = Instant::now() + LAST_WORDS;
        while !self.workers[id].channel_closed {
            let left = until.saturating_duration_since(Instant::now());
            match self.inbox.recv_timeout(left) {
                Ok((who, incoming)) => self.handle(Event::Channel(who, incoming), hooks, actions),
                Err(_) => break,
            }
        }
    }

    fn handle(&mut self, event: Event, hooks: &mut dyn Hooks, actions: &mut Actions) {
        let now = Instant::now();
        let look = self.looks;
        match event {
            Event::Signal(signal) => self.on_signal(signal, actions),
            Event::Suspect(id) => {
                self.workers[id].noticed.get_or_insert((now, look));
                if self.workers[id].stage != Stage::Done {
                    hooks.suspect(id);
                }
            }
            Event::Channel(id, Incoming::Hello { pid }) => {
                let worker = &mut self.workers[id];
                worker.heard = now;
                if pid != worker.spawned.pid {
                    // Started through a wrapper, such as a debugger: the one that matters is the child.
                    tracing::info!("{} says that its process is {pid}", worker.name());
                }
                worker.stage = Stage::Loading;
                worker.orders.give(ToWorker::Plan(hooks.plan(id)));
                if self
                    .workers
                    .iter()
                    .all(|worker| worker.stage != Stage::Silent)
                {
                    self.folder = None;
                }
            }
            Event::Channel(id, Incoming::Closed(why)) => {
                self.workers[id].channel_closed = true;
                if let Some(why) = why {
                    tracing::warn!(
                        "the control channel of {} ended: {why}",
                        self.workers[id].name()
                    );
                }
            }
            Event::Channel(id, Incoming::Message(message)) => {
                self.on_message(id, message, hooks, actions)
            }
            Event::Ended(id) => {
                self.last_words(id, hooks, actions);
                let Some(exit) = reap(&self.workers[id].spawned) else {
                    return;
                };
                let worker = &mut self.workers[id];
                worker.noticed.get_or_insert((now, look));
                worker.dead = Some(exit);
                tracing::info!("{} (process {}) {exit}", worker.name(), worker.spawned.pid);
                hooks.dead(id);
                let worker = &self.workers[id];
                if !worker.left_well() && !worker.ended_by_us {
                    let what = worker.failed.clone().unwrap_or_default();
                    actions.fail(Some(id), what);
                }
            }
        }
    }

    fn on_message(
        &mut self,
        id: WorkerId,
        message: FromWorker,
        hooks: &mut dyn Hooks,
        actions: &mut Actions,
    ) {
        let worker = &mut self.workers[id];
        worker.heard = Instant::now();
        match &message {
            FromWorker::Ready(_) => worker.stage = Stage::Ready,
            FromWorker::Failed(what) => {
                worker.noticed.get_or_insert((worker.heard, self.looks));
                worker.failed.get_or_insert_with(|| what.clone());
                actions.fail(Some(id), what.clone());
            }
            FromWorker::Done { peak_memory } => {
                worker.stage = Stage::Done;
                worker.peak_memory = *peak_memory;
            }
            _ => {}
        }
        let became_ready = matches!(message, FromWorker::Ready(_));
        hooks.message(id, message, actions);
        if became_ready
            && !self.started
            && self
                .workers
                .iter()
                .all(|worker| worker.stage == Stage::Ready)
        {
            self.started = true;
            hooks.all_ready(actions);
            for worker in &self.workers {
                worker.orders.give(ToWorker::Start);
            }
        }
    }

    fn on_signal(&mut self, signal: Signal, actions: &mut Actions) {
        tracing::info!("received {signal}");
        if signal == Signal::INT && (self.stopped.is_some() || self.phase != Phase::Running) {
            self.interrupted |= self.failed.is_none();
            match self.phase {
                Phase::Running | Phase::Stopping => self.terminate("the second Ctrl-C"),
                Phase::Terminating => self.kill(),
                Phase::Killing => {}
            }
        } else if signal == Signal::INT {
            actions.stop(StopWhy::Interrupt);
        } else {
            actions.stop(StopWhy::Signal(signal));
        }
    }

    /// Does what the events and the hooks asked for.
    fn act(&mut self, actions: Actions, hooks: &mut dyn Hooks) {
        for (id, order) in actions.orders {
            self.workers[id].orders.give(order);
        }
        if let Some((culprit, what)) = actions.fail
            && self.failed.is_none()
            && !self.interrupted
        {
            let words = match culprit {
                Some(id) => format!("{} failed", self.workers[id].name()),
                None => what.clone(),
            };
            self.failed = Some((culprit, what));
            self.terminate(&words);
        }
        if let Some(why) = actions.stop
            && self.stopped.is_none()
            && self.phase == Phase::Running
        {
            self.stopped = Some(why);
            hooks.stop(why);
            if self.started {
                self.enter(Phase::Stopping);
                for worker in &self.workers {
                    worker.orders.give(ToWorker::Stop(why.words()));
                }
            } else {
                // Nothing was trained, so there is nothing to save or to wait for.
                self.terminate(&why.words());
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_since = Instant::now();
    }

    /// Ends all workers: told, SIGTERM, and SIGKILL at the deadline.
    fn terminate(&mut self, why: &str) {
        if matches!(self.phase, Phase::Terminating | Phase::Killing) {
            return;
        }
        self.enter(Phase::Terminating);
        tracing::info!("ending all workers: {why}");
        for worker in self
            .workers
            .iter_mut()
            .filter(|worker| worker.dead.is_none())
        {
            worker.orders.give(ToWorker::Abort(why.to_owned()));
            // One that is already ending of itself shall show how.
            if worker.noticed.is_none() {
                worker.ended_by_us = true;
                send(&worker.spawned, rustix::process::Signal::TERM);
            }
        }
    }

    fn kill(&mut self) {
        self.enter(Phase::Killing);
        for worker in self
            .workers
            .iter_mut()
            .filter(|worker| worker.dead.is_none())
        {
            tracing::info!("{} has not ended in time; killing it", worker.name());
            // One that said why it fails, and then did not leave, ends by this and not by its own doing.
            worker.ended_by_us |= worker.failed.is_some();
            // SIGKILL ends a stopped process too; SIGCONT is for one held by a job-control stop of its group.
            send(&worker.spawned, rustix::process::Signal::KILL);
            send(&worker.spawned, rustix::process::Signal::CONT);
        }
    }

    /// After SIGKILL: whether what is left will not go, and is named.
    fn give_up(&mut self) -> bool {
        if self.phase_since.elapsed() < self.deadlines.kill {
            return false;
        }
        for worker in self.workers.iter().filter(|worker| worker.dead.is_none()) {
            let pid = worker.spawned.pid;
            let state = process::state(pid).unwrap_or('?');
            let place = process::waits_in(pid).unwrap_or_else(|| "unknown".to_owned());
            self.unkillable.push(format!(
                "{} (process {pid}) does not die of SIGKILL: state {state}, waits in {place}",
                worker.name()
            ));
        }
        true
    }

    fn meet_deadlines(&mut self, actions: &mut Actions) {
        match self.phase {
            Phase::Terminating if self.phase_since.elapsed() >= self.deadlines.terminate => {
                self.kill()
            }
            Phase::Terminating | Phase::Killing => {}
            Phase::Running | Phase::Stopping => {
                if self.workers.iter().any(|worker| process_is_traced(worker)) {
                    // A person looks at one of them; everything begins anew when they are done.
                    self.phase_since = Instant::now();
                    self.workers
                        .iter_mut()
                        .for_each(|worker| worker.heard = Instant::now());
                    return;
                }
                self.speak_of_stopped();
                for (id, worker) in self.workers.iter().enumerate() {
                    if worker.dead.is_some() {
                        continue;
                    }
                    let silent = worker.heard.elapsed();
                    let pid = worker.spawned.pid;
                    if worker.stage == Stage::Silent && silent > self.deadlines.hello {
                        let after = silent.as_secs();
                        actions.fail(
                            Some(id),
                            format!(
                                "no sign of life {after} s after its start{}",
                                stopped_note(pid)
                            ),
                        );
                    } else if worker.stage == Stage::Loading && silent > self.deadlines.loading {
                        let after = silent.as_secs();
                        actions.fail(
                            Some(id),
                            format!(
                                "stuck while loading: nothing heard for {after} s{}",
                                stopped_note(pid)
                            ),
                        );
                    }
                }
                if self.phase == Phase::Stopping && self.phase_since.elapsed() > self.deadlines.stop
                {
                    let after = self.phase_since.elapsed().as_secs();
                    let alive = |(_, worker): &(usize, &Worker)| worker.dead.is_none();
                    let hung = |(_, worker): &(usize, &Worker)| {
                        process::state(worker.spawned.pid) == Some('T')
                    };
                    let mut left = self.workers.iter().enumerate().filter(alive);
                    let first = left.clone().find(hung).or_else(|| left.next());
                    if let Some((id, worker)) = first {
                        let note = stopped_note(worker.spawned.pid);
                        actions.fail(
                            Some(id),
                            format!("still running {after} s after it was told to stop{note}"),
                        );
                    }
                }
            }
        }
    }

    /// Names a worker that is stopped (SIGSTOP, Ctrl-Z): everybody else may be waiting for it.
    fn speak_of_stopped(&mut self) {
        for worker in self
            .workers
            .iter_mut()
            .filter(|worker| worker.dead.is_none())
        {
            if process::state(worker.spawned.pid) != Some('T') {
                worker.stopped_since = None;
                continue;
            }
            let since = worker.stopped_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= SPEAK_AFTER {
                let (name, pid) = (worker.spawned.worker, worker.spawned.pid);
                tracing::warn!(
                    "{name} has been stopped for {} s; `kill -CONT {pid}` lets it go on",
                    SPEAK_AFTER.as_secs()
                );
                // Said again after as long.
                *since = Instant::now();
            }
        }
    }

    /// The end: who was first, and what followed.
    fn ended(&mut self) -> Ended {
        let failure = match self.failed.take() {
            Some(failed) if !self.interrupted => Some(self.failure(failed)),
            _ => None,
        };
        Ended {
            stopped: self.stopped,
            started: self.started,
            interrupted: self.interrupted,
            failure,
            unkillable: std::mem::take(&mut self.unkillable),
            peak_memory: self
                .workers
                .iter()
                .map(|worker| (worker.name(), worker.peak_memory))
                .collect(),
        }
    }

    fn failure(&self, (culprit, what): (Option<WorkerId>, String)) -> Failure {
        // A worker that fails because another one is gone may end before that one does: the order is that of
        // notice. Within one look there is none, and a signal is never a consequence of another worker's end.
        let own_fault = |(_, worker): &(usize, &Worker)| !worker.ended_by_us && !worker.left_well();
        let order = |(_, worker): &(usize, &Worker)| {
            let (_, look) = worker.noticed.unwrap_or((Instant::now(), u64::MAX));
            let by_signal = matches!(worker.dead, Some(Exit::Signal(_)));
            (look, !by_signal)
        };
        let named_alive = culprit.filter(|id| self.workers[*id].ended_by_us);
        let root = named_alive.or_else(|| {
            let first = self
                .workers
                .iter()
                .enumerate()
                .filter(own_fault)
                .min_by_key(order);
            culprit.and(first.map(|(id, _)| id))
        });
        let deaths = |id: WorkerId| {
            let worker = &self.workers[id];
            let at = worker
                .noticed
                .map_or_else(|| self.began.elapsed(), |(at, _)| at - self.began);
            Death {
                worker: worker.name(),
                pid: worker.spawned.pid,
                exit: worker.dead,
                ended_by_launcher: worker.ended_by_us,
                what: worker.failed.clone(),
                at,
                log: worker.spawned.log.clone(),
            }
        };
        let mut consequences: Vec<WorkerId> = (0..self.workers.len())
            .filter(|id| Some(*id) != root && !self.workers[*id].left_well())
            .collect();
        consequences.sort_by_key(|id| self.workers[*id].noticed.map(|(at, _)| at));
        let oom = match (self.oom_kills, process::oom_kills()) {
            (Some(before), Some(now)) => now > before,
            _ => false,
        };
        let explained = match root {
            Some(id) if root != culprit => self.workers[id].failed.clone(),
            _ => Some(what).filter(|what| !what.is_empty()),
        };
        Failure {
            root: root.map(deaths),
            what: explained,
            oom_killer_acted: oom,
            consequences: consequences.into_iter().map(deaths).collect(),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        for worker in &self.workers {
            if worker.dead.is_none() {
                end_now(&worker.spawned);
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Source {
    Signals,
    Inbox,
    Liveness(WorkerId),
    Pidfd(WorkerId),
}

enum Event {
    Signal(Signal),
    Suspect(WorkerId),
    Channel(WorkerId, Incoming),
    Ended(WorkerId),
}

/// Through the pidfd, so that it can only reach the process that was started.
fn send(spawned: &Spawned, signal: rustix::process::Signal) {
    // One that has just ended needs no signal.
    let _ = pidfd_send_signal(&spawned.pidfd, signal);
}

/// Kills and reaps, without waiting for long.
fn end_now(spawned: &Spawned) {
    send(spawned, rustix::process::Signal::KILL);
    let until = Instant::now() + LAST_WORDS;
    while reap(spawned).is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How the process ended, if it has.
fn reap(spawned: &Spawned) -> Option<Exit> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::PidFd(spawned.pidfd.as_fd()), options).ok()??;
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(Exit::Code(code)),
        (_, Some(signal)) => Some(Exit::Signal(Signal(signal))),
        _ => None,
    }
}

fn process_is_traced(worker: &Worker) -> bool {
    worker.dead.is_none() && process::is_traced(worker.spawned.pid)
}

fn stopped_note(pid: u32) -> String {
    match process::state(pid) {
        Some('T') => "; it is stopped (SIGSTOP)".to_owned(),
        Some('D') => format!(
            "; it waits in the kernel ({})",
            process::waits_in(pid).unwrap_or_default()
        ),
        _ => String::new(),
    }
}
