//! Says in the log, in time and with names, when a run does not get on.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use super::process;
use crate::monitor::diagnose::Verdict;
use crate::monitor::look::Sight;
use crate::shm::{Segment, Snapshot};

/// How often it looks: each look reads some files of every worker in /proc.
const EVERY: Duration = Duration::from_secs(5);
/// Trouble that lasts this long is spoken of; most of it is over at the next look.
const SPEAK_AFTER: Duration = Duration::from_secs(15);
/// Trouble that lasts is spoken of again.
const AGAIN: Duration = Duration::from_secs(60);

/// Watches one run.
#[derive(Debug)]
pub struct Stalls {
    run: String,
    looked: Instant,
    before: Option<Snapshot>,
    cpu: BTreeMap<u32, f64>,
    trouble: Option<Trouble>,
}

#[derive(Debug)]
struct Trouble {
    verdict: Verdict,
    worker: Option<String>,
    since: Instant,
    spoken: Option<Instant>,
}

impl Stalls {
    /// Of the run in this output directory.
    pub fn new(run: &Path) -> Self {
        Self {
            run: run.display().to_string(),
            looked: Instant::now(),
            before: None,
            cpu: BTreeMap::new(),
            trouble: None,
        }
    }

    /// Looks if it is time; gives the line to be warned with, if there is one.
    pub fn look(&mut self, segment: &Segment) -> Option<String> {
        if self.looked.elapsed() < EVERY {
            return None;
        }
        self.looked = Instant::now();
        let me = std::process::id();
        let now = segment.snapshot();
        let look = Sight {
            run: self.run.clone(),
            launcher: (me, process::start_time(me).unwrap_or(0)),
            now: &now,
            before: self.before.as_ref(),
            cpu_before: &self.cpu,
            places: &BTreeMap::new(),
            metrics: &VecDeque::new(),
        }
        .look();
        self.cpu = look.cpu_seconds();
        self.before = Some(now);
        let found = look.diagnosis;
        self.consider(found.verdict, found.worker, found.text)
    }

    fn consider(
        &mut self,
        verdict: Verdict,
        worker: Option<String>,
        text: String,
    ) -> Option<String> {
        // Deaths are the supervisor's, which reports them itself.
        if !verdict.is_trouble() || verdict == Verdict::Dead {
            self.trouble = None;
            return None;
        }
        let same = |trouble: &Trouble| trouble.verdict == verdict && trouble.worker == worker;
        if !self.trouble.as_ref().is_some_and(same) {
            self.trouble = Some(Trouble {
                verdict,
                worker,
                since: Instant::now(),
                spoken: None,
            });
        }
        let trouble = self.trouble.as_mut()?;
        // Diagnoses of long waits have waited already.
        let waited = verdict != Verdict::Stopped || trouble.since.elapsed() >= SPEAK_AFTER;
        let due = trouble
            .spoken
            .is_none_or(|spoken| spoken.elapsed() >= AGAIN);
        (waited && due).then(|| {
            trouble.spoken = Some(Instant::now());
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_is_spoken_of_once_and_after_a_while() {
        let mut stalls = Stalls::new(Path::new("runs/a"));
        let mut say = |verdict, worker: &str| {
            stalls.consider(verdict, Some(worker.to_owned()), worker.to_owned())
        };
        assert_eq!(say(Verdict::Balanced, "a"), None);
        assert_eq!(say(Verdict::Stopped, "a"), None);
        assert_eq!(say(Verdict::Stuck, "b"), Some("b".to_owned()));
        assert_eq!(say(Verdict::Stuck, "b"), None);
        assert_eq!(say(Verdict::Dead, "b"), None);
        assert_eq!(say(Verdict::Stuck, "b"), Some("b".to_owned()));
    }
}
