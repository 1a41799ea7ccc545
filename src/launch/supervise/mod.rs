//! The launcher's event loop: it watches every worker, decides how a run ends, and leaves no process behind.
//!
//! A worker's liveness pipe at end-of-file only makes it *suspect*; it is dead once `waitid` has said so. The
//! first to be noticed, by this process's clock, is the root cause; all later deaths are consequences.

mod deadline;
mod event_loop;
mod verdict;
mod worker;

pub use event_loop::Supervisor;

use std::io;
use std::time::Duration;

use super::report::Failure;
use super::signals::Signal;
use super::spawn::SpawnError;
use crate::control::{ControlError, FromWorker, ToWorker, WorkerName};

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
    /// Largest resident memory of each worker, in bytes.
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
