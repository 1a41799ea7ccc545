//! One supervised process.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::process::{WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use super::event_loop::LAST_WORDS;
use crate::control::{Orders, WorkerName};
use crate::launch::report::Exit;
use crate::launch::signals::Signal;
use crate::launch::spawn::Spawned;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
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
pub(super) struct Worker {
    pub(super) spawned: Spawned,
    pub(super) orders: Orders,
    pub(super) stage: Stage,
    /// The last sign of life while loading.
    pub(super) heard: Instant,
    /// When its liveness pipe came to its end, or its death was seen.
    pub(super) noticed: Option<(Instant, u64)>,
    pub(super) dead: Option<Exit>,
    pub(super) channel_closed: bool,
    pub(super) failed: Option<String>,
    pub(super) ended_by_us: bool,
    pub(super) peak_memory: u64,
    pub(super) stopped_since: Option<Instant>,
}

impl Worker {
    pub(super) fn name(&self) -> WorkerName {
        self.spawned.worker
    }

    /// Left as it should: done, and with exit code 0.
    pub(super) fn left_well(&self) -> bool {
        self.stage == Stage::Done && self.dead == Some(Exit::Code(0))
    }
}
/// Through the pidfd, so that it can only reach the process that was started.
pub(super) fn send(spawned: &Spawned, signal: rustix::process::Signal) {
    // One that has just ended needs no signal.
    let _ = pidfd_send_signal(&spawned.pidfd, signal);
}

/// Kills and reaps, without waiting for long.
pub(super) fn end_now(spawned: &Spawned) {
    send(spawned, rustix::process::Signal::KILL);
    let until = Instant::now() + LAST_WORDS;
    while reap(spawned).is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How the process ended, if it has.
pub(super) fn reap(spawned: &Spawned) -> Option<Exit> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::PidFd(spawned.pidfd.as_fd()), options).ok()??;
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(Exit::Code(code)),
        (_, Some(signal)) => Some(Exit::Signal(Signal(signal))),
        _ => None,
    }
}
