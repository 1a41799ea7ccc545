//! Ending workers, and what is done when something takes too long.

use std::time::{Duration, Instant};

use super::Actions;
use super::event_loop::{Phase, Supervisor};
use super::worker::{Stage, Worker, send};
use crate::control::ToWorker;
use crate::launch::process;

/// A wait longer than this is spoken of.
const SPEAK_AFTER: Duration = Duration::from_secs(30);

/// How often deadlines are looked at.
const CHECK_EVERY: Duration = Duration::from_millis(250);

impl Supervisor {
    /// Ends all workers: told, SIGTERM, and SIGKILL at the deadline.
    pub(super) fn terminate(&mut self, why: &str) {
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

    pub(super) fn kill(&mut self) {
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
    pub(super) fn give_up(&mut self) -> bool {
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

    pub(super) fn meet_deadlines(&mut self, actions: &mut Actions) {
        match self.phase {
            Phase::Terminating if self.phase_since.elapsed() >= self.deadlines.terminate => {
                self.kill();
            }
            Phase::Terminating | Phase::Killing => {}
            Phase::Running | Phase::Stopping => {
                // Each look reads some files of every worker in /proc.
                if self.checked.elapsed() < CHECK_EVERY {
                    return;
                }
                self.checked = Instant::now();
                if self.look_at_processes() {
                    // A person looks at one of them; everything begins anew when they are done.
                    self.phase_since = Instant::now();
                    for worker in &mut self.workers {
                        worker.heard = Instant::now();
                    }
                    return;
                }
                self.fail_who_is_silent(actions);
                if self.phase == Phase::Stopping {
                    self.fail_who_does_not_stop(actions);
                }
            }
        }
    }

    fn fail_who_is_silent(&self, actions: &mut Actions) {
        let alive = |(_, worker): &(usize, &Worker)| worker.dead.is_none();
        for (id, worker) in self.workers.iter().enumerate().filter(alive) {
            let silent = worker.heard.elapsed();
            let what = match worker.stage {
                Stage::Silent if silent > self.deadlines.hello => "no sign of life since its start",
                Stage::Loading if silent > self.deadlines.loading => {
                    "stuck while loading: last sign of life"
                }
                _ => continue,
            };
            let note = stopped_note(worker.spawned.pid);
            actions.fail(
                Some(id),
                format!("{what}, {} s ago{note}", silent.as_secs()),
            );
        }
    }

    fn fail_who_does_not_stop(&self, actions: &mut Actions) {
        let waited = self.phase_since.elapsed();
        if waited <= self.deadlines.stop {
            return;
        }
        let alive = |(_, worker): &(usize, &Worker)| worker.dead.is_none();
        let is_stopped =
            |(_, worker): &(usize, &Worker)| process::state(worker.spawned.pid) == Some('T');
        let mut left = self.workers.iter().enumerate().filter(alive);
        // The others may only be waiting for the one that cannot move.
        let culprit = left.clone().find(is_stopped).or_else(|| left.next());
        if let Some((id, worker)) = culprit {
            let (after, note) = (waited.as_secs(), stopped_note(worker.spawned.pid));
            actions.fail(
                Some(id),
                format!("still running {after} s after it was told to stop{note}"),
            );
        }
    }

    /// Keeps the memory of each worker and names one that is stopped (SIGSTOP, Ctrl-Z), since everybody else
    /// may be waiting for it. True when a debugger holds any of them.
    fn look_at_processes(&mut self) -> bool {
        let mut any_traced = false;
        for worker in self
            .workers
            .iter_mut()
            .filter(|worker| worker.dead.is_none())
        {
            let pid = worker.spawned.pid;
            let Some(status) = process::Status::of(pid) else {
                continue;
            };
            worker.peak_memory = worker.peak_memory.max(status.peak_memory);
            any_traced |= status.is_traced;
            if !status.is_stopped {
                worker.stopped_since = None;
                continue;
            }
            let since = worker.stopped_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= SPEAK_AFTER {
                let (name, after) = (worker.spawned.worker, SPEAK_AFTER.as_secs());
                tracing::warn!(
                    "{name} has been stopped for {after} s; `kill -CONT {pid}` lets it go on"
                );
                // Said again after as long.
                *since = Instant::now();
            }
        }
        any_traced
    }
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
