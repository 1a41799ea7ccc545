//! A recorded run, to be trained again step by step: which rank trained which units.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::monitor::metrics::TrainedRecord;

/// Why a trained.jsonl cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// It cannot be read.
    #[error("--replay {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It does not fit this run.
    #[error("--replay {}:{line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
}

/// What every rank trained in every committed step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    steps: BTreeMap<u64, BTreeMap<u32, Vec<u64>>>,
}

impl Replay {
    /// Reads a trained.jsonl of a run of `units` units for this one's `drafters`.
    ///
    /// # Errors
    /// [`ReplayError`]: a line that is no record, steps that do not rise, a unit that is not of this run or is
    /// trained twice, a rank that this run does not have.
    pub fn read(path: &Path, units: u64, drafters: u32) -> Result<Self, ReplayError> {
        let text = std::fs::read_to_string(path).map_err(|source| ReplayError::Read {
            path: path.to_owned(),
            source,
        })?;
        let mut replay = Self::default();
        let mut seen = vec![false; units as usize];
        for (number, line) in text.lines().enumerate() {
            replay
                .add(line, &mut seen, drafters)
                .map_err(|what| ReplayError::Line {
                    path: path.to_owned(),
                    line: number + 1,
                    what,
                })?;
        }
        Ok(replay)
    }

    fn add(&mut self, line: &str, seen: &mut [bool], drafters: u32) -> Result<(), String> {
        let record: TrainedRecord =
            serde_json::from_str(line).map_err(|error| error.to_string())?;
        let step = u64::from(record.step);
        if step <= self.last() {
            return Err(format!(
                "step {step} does not come after step {}",
                self.last()
            ));
        }
        for (&rank, units) in &record.units {
            if rank >= drafters && !units.is_empty() {
                return Err(format!(
                    "rank {rank} has units, but this run has {drafters} drafters"
                ));
            }
            for &unit in units {
                match seen.get_mut(unit as usize) {
                    None => {
                        return Err(format!(
                            "unit {unit} is not one of this run's {}",
                            seen.len()
                        ));
                    }
                    Some(true) => return Err(format!("unit {unit} is trained a second time")),
                    Some(fresh) => *fresh = true,
                }
            }
        }
        self.steps.insert(step, record.units);
        Ok(())
    }

    /// The last recorded step; 0 without any.
    pub fn last(&self) -> u64 {
        self.steps.last_key_value().map_or(0, |(&step, _)| step)
    }

    /// What `rank` trained in `step`, in order.
    pub fn units(&self, step: u64, rank: u32) -> &[u64] {
        let units = self.steps.get(&step).and_then(|ranks| ranks.get(&rank));
        units.map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &str) -> Result<Replay, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trained.jsonl");
        std::fs::write(&path, lines).unwrap();
        Replay::read(&path, 8, 2).map_err(|error| error.to_string())
    }

    #[test]
    fn a_record_is_read_by_step_and_rank() {
        let replay = read("{\"step\":1,\"units\":{\"0\":[3],\"1\":[]}}\n{\"step\":3,\"units\":{\"0\":[],\"1\":[5,4]}}\n").unwrap();
        assert_eq!(replay.units(1, 0), [3]);
        assert!(replay.units(2, 0).is_empty());
        assert_eq!(replay.units(3, 1), [5, 4]);
        assert_eq!(replay.last(), 3);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_line() {
        for (lines, what) in [
            (
                "{\"step\":1,\"units\":{\"0\":[8]}}",
                "not one of this run's 8",
            ),
            (
                "{\"step\":1,\"units\":{\"0\":[1],\"1\":[1]}}",
                "second time",
            ),
            (
                "{\"step\":1,\"units\":{\"2\":[1]}}",
                "this run has 2 drafters",
            ),
            (
                "{\"step\":2,\"units\":{}}\n{\"step\":2,\"units\":{}}",
                ":2: step 2 does not come after step 2",
            ),
            ("{\"step\":", "EOF"),
        ] {
            let error = read(lines).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}
