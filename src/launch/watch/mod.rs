//! Looking at runs and into their processes: `launcher status`, `top`, `stacks`, `attach`, `report`. All of it only
//! reads; it works on a hung run too, and from any other terminal of the same user.

pub mod attach;
pub mod report;
pub mod stacks;
pub mod status;
pub mod top;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::gpus::UseWatch;
use super::output::RunFile;
use super::plan::Plan;
use super::process;
use crate::control::WorkerName;
use crate::monitor::look::{Look, Sight};
use crate::monitor::metrics::MetricsRecord;
use crate::monitor::tail::Tail;
use crate::shm::{Observer, ShmError, Snapshot};

/// Why a run cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// None was named and none is going on.
    #[error(
        "no run is going on under ./runs; name one: the command followed by the run's output directory"
    )]
    NoneRunning,
    /// It is no run's directory.
    #[error("{} holds no run (no plan.toml and no run.json); name a run's output directory", .0.display())]
    NoRun(PathBuf),
    /// It has ended.
    #[error("no run is going on in {}: it has ended; `launcher report {}` shows how it went", .0.display(), .0.display())]
    Over(PathBuf),
    /// Its shared memory cannot be opened.
    #[error("the shared memory of {}: {source}; the run must be yours and of this version", path.display())]
    Memory {
        /// The run.
        path: PathBuf,
        /// What was refused.
        source: ShmError,
    },
    /// There is no such worker.
    #[error("{worker} is not in {}; it has {present}", path.display())]
    NoWorker {
        /// The run.
        path: PathBuf,
        /// Who was asked for.
        worker: WorkerName,
        /// Who is there.
        present: String,
    },
    /// The worker has no process now.
    #[error("{worker} of {} has no process now: {why}", path.display())]
    NoProcess {
        /// The run.
        path: PathBuf,
        /// Who was asked for.
        worker: WorkerName,
        /// What its seat says.
        why: String,
    },
    /// No debugger is installed.
    #[error("no debugger was found: install gdb or lldb, or name one with --debugger")]
    NoDebugger,
    /// The named debugger does not run.
    #[error("{program}: {source}; is it installed?")]
    Debugger {
        /// What was tried.
        program: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// A run that was found.
#[derive(Debug)]
pub enum Found {
    /// It is going on.
    Live(Box<LiveRun>),
    /// It has ended; its files are there.
    Over(PathBuf),
}

/// How many of the last steps rates are taken over.
const STEPS: usize = 64;

/// A run that is going on.
#[derive(Debug)]
pub struct LiveRun {
    /// Its output directory.
    pub path: PathBuf,
    /// Its launcher and memory.
    pub file: RunFile,
    observer: Observer,
    places: BTreeMap<WorkerName, String>,
    metrics: Tail<MetricsRecord>,
    before: Option<Snapshot>,
    cpu: BTreeMap<u32, f64>,
}

/// The run in `path`, or the newest that is going on under ./runs.
///
/// # Errors
/// [`WatchError`].
pub fn find(path: Option<&Path>) -> Result<Found, WatchError> {
    let path = match path {
        Some(path) => path.to_owned(),
        None => newest(Path::new("runs")).ok_or(WatchError::NoneRunning)?,
    };
    if let Some(file) = RunFile::read(&path)
        && process::is_alive(file.pid, file.start_time)
    {
        return LiveRun::open(path, file).map(|run| Found::Live(Box::new(run)));
    }
    if path.join("plan.toml").is_file() || path.join("run.json").is_file() {
        return Ok(Found::Over(path));
    }
    Err(WatchError::NoRun(path))
}

/// As [`find`], for what makes sense only while a run is going on.
///
/// # Errors
/// [`WatchError`], also when it is over.
pub fn find_live(path: Option<&Path>) -> Result<Box<LiveRun>, WatchError> {
    match find(path)? {
        Found::Live(run) => Ok(run),
        Found::Over(path) => Err(WatchError::Over(path)),
    }
}

/// The directory in `runs` whose run is going on and began last.
fn newest(runs: &Path) -> Option<PathBuf> {
    let running = |entry: fs::DirEntry| {
        let path = entry.path();
        let file = RunFile::read(&path)?;
        process::is_alive(file.pid, file.start_time).then_some((file.start_time, file.pid, path))
    };
    let all = fs::read_dir(runs).ok()?.flatten();
    all.filter_map(running).max().map(|(_, _, path)| path)
}

impl LiveRun {
    fn open(path: PathBuf, file: RunFile) -> Result<Self, WatchError> {
        let memory = PathBuf::from(format!("/proc/{}/fd/{}", file.pid, file.fd));
        let observer = Observer::open(&memory).map_err(|source| WatchError::Memory {
            path: path.clone(),
            source,
        })?;
        // A plan of another version leaves the places out.
        let plan = Plan::read(&path.join("plan.toml"));
        let places = plan.map(|plan| plan.places).unwrap_or_default();
        Ok(Self {
            places: places
                .iter()
                .map(|place| (place.worker, place.device.to_string()))
                .collect(),
            metrics: Tail::new(&path.join("metrics.jsonl"), STEPS),
            path,
            file,
            observer,
            before: None,
            cpu: BTreeMap::new(),
        })
    }

    /// Whether it is still going on.
    pub fn is_live(&self) -> bool {
        process::is_alive(self.file.pid, self.file.start_time)
    }

    /// The last steps recorded, oldest first, as of the last look.
    pub fn metrics(&self) -> &std::collections::VecDeque<MetricsRecord> {
        self.metrics.records()
    }

    /// Follows its GPUs, if it runs on any; without, there are no figures of them.
    pub fn watch_gpus(&self) -> Option<UseWatch> {
        let on_gpus = self.places.values().any(|place| place.starts_with("GPU"));
        if !on_gpus {
            return None;
        }
        // Ordinals count what the run sees, not what this process does.
        let environment = fs::read(format!("/proc/{}/environ", self.file.pid)).ok()?;
        let visible = environment.split(|byte| *byte == 0).find_map(|pair| {
            std::str::from_utf8(pair)
                .ok()?
                .strip_prefix("CUDA_VISIBLE_DEVICES=")
        });
        UseWatch::start(visible).ok()
    }

    /// Looks at it; rates and shares are of the time since the last call.
    pub fn look(&mut self) -> (Look, Snapshot) {
        self.metrics.look();
        let now = self.observer.snapshot();
        let look = Sight {
            run: self.path.display().to_string(),
            launcher: (self.file.pid, self.file.start_time),
            now: &now,
            before: self.before.as_ref(),
            cpu_before: &self.cpu,
            places: &self.places,
            metrics: self.metrics.records(),
        }
        .look();
        self.cpu = look.cpu_seconds();
        self.before = Some(now.clone());
        (look, now)
    }
}

/// Prints an error and gives the exit code of refused input.
pub(crate) fn refuse(error: &dyn std::fmt::Display) -> u8 {
    eprintln!("error: {error}");
    2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_run_is_refused_and_an_old_one_is_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert!(matches!(find(Some(path)), Err(WatchError::NoRun(_))));
        fs::write(path.join("plan.toml"), "").unwrap();
        assert!(matches!(find(Some(path)), Ok(Found::Over(_))));
        // A launcher that was killed leaves its run.json behind; another process may have its number now.
        let stale = RunFile {
            pid: std::process::id(),
            start_time: 1,
            fd: 3,
            sockets: None,
        };
        let text = serde_json::to_string(&stale).unwrap();
        fs::write(path.join("run.json"), text).unwrap();
        assert!(matches!(find(Some(path)), Ok(Found::Over(_))));
        let error = find_live(Some(path)).unwrap_err().to_string();
        assert!(error.contains("has ended"), "{error}");
        assert_eq!(newest(path), None);
    }
}
