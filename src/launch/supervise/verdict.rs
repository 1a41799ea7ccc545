//! Who was first, and what followed.

use std::time::Instant;

use super::event_loop::Supervisor;
use super::worker::Worker;
use super::{Ended, WorkerId};
use crate::launch::process;
use crate::launch::report::{Death, Exit, Failure};

impl Supervisor {
    /// The end: who was first, and what followed.
    pub(super) fn ended(&mut self) -> Ended {
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

    pub(super) fn failure(&self, (culprit, what): (Option<WorkerId>, String)) -> Failure {
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
