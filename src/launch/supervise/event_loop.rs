//! The loop: looks at all descriptors, handles what happened, and does what hooks ask for.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::worker::{Stage, Worker, end_now, reap};
use super::{Actions, Deadlines, Ended, Hooks, StopWhy, SuperviseError, WorkerId};
use crate::control::{Door, FromWorker, Incoming, SocketFolder, ToWorker};
use crate::launch::process;
use crate::launch::signals::{Signal, Signals};
use crate::launch::spawn::{Spawner, WorkerSpec};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Running,
    Stopping,
    Terminating,
    Killing,
}
/// Supervises the workers of one run.
pub struct Supervisor {
    pub(super) spawner: Spawner,
    pub(super) signals: Signals,
    pub(super) deadlines: Deadlines,
    pub(super) workers: Vec<Worker>,
    pub(super) folder: Option<SocketFolder>,
    pub(super) wake: Arc<OwnedFd>,
    pub(super) inbox: mpsc::Receiver<(WorkerId, Incoming)>,
    pub(super) deliver: mpsc::Sender<(WorkerId, Incoming)>,
    pub(super) began: Instant,
    /// Number of looks at the descriptors so far: what is noticed in one look has no order in time.
    pub(super) looks: u64,
    pub(super) phase: Phase,
    pub(super) phase_since: Instant,
    /// When deadlines were last looked at.
    pub(super) checked: Instant,
    pub(super) started: bool,
    pub(super) stopped: Option<StopWhy>,
    pub(super) interrupted: bool,
    pub(super) failed: Option<(Option<WorkerId>, String)>,
    pub(super) oom_kills: Option<u64>,
    pub(super) unkillable: Vec<String>,
    pub(super) time_limit: Option<Instant>,
}

/// How often the loop looks up even if nothing happens.
const TICK: Duration = Duration::from_millis(100);
/// How long a dead worker's last messages are waited for.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);

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
            checked: Instant::now(),
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
                worker.peak_memory = worker.peak_memory.max(*peak_memory);
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

    pub(super) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_since = Instant::now();
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
