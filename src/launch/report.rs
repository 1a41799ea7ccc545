//! The last thing a run prints, and the files that say how it stands and how it ended.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc;
use serde::{Deserialize, Serialize};

use super::signals::Signal;
use crate::control::WorkerName;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// With this code.
    Code(i32),
    /// By this signal.
    Signal(Signal),
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was killed by {signal}"),
        }
    }
}

/// One worker's end, or hang.
#[derive(Clone, Debug)]
pub struct Death {
    /// Who.
    pub worker: WorkerName,
    /// Its process.
    pub pid: u32,
    /// How it ended; `None` if it could not be killed.
    pub exit: Option<Exit>,
    /// The launcher ended it.
    pub ended_by_launcher: bool,
    /// What it said itself.
    pub what: Option<String>,
    /// When it was noticed, from the launcher's start.
    pub at: Duration,
    /// Its log.
    pub log: PathBuf,
}

impl Death {
    fn says(&self) -> String {
        match (self.exit, self.ended_by_launcher) {
            (_, true) => "ended by the launcher".to_owned(),
            (Some(Exit::Code(0)), _) => "exited with code 0 before its work was done".to_owned(),
            (Some(exit), _) => exit.to_string(),
            (None, _) => "could not be ended".to_owned(),
        }
    }
}

/// Why a run failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The worker that is the root cause, if one is.
    pub root: Option<Death>,
    /// What is known about the cause beyond how the process ended.
    pub what: Option<String>,
    /// The kernel's out-of-memory killer ended some process of this machine during the run.
    pub oom_killer_acted: bool,
    /// The ends of others that followed.
    pub consequences: Vec<Death>,
}

impl Failure {
    /// 128 + n when the root cause died of signal n, else 1.
    pub fn exit_code(&self) -> u8 {
        match &self.root {
            Some(Death {
                exit: Some(Exit::Signal(signal)),
                ended_by_launcher: false,
                ..
            }) => u8::try_from(128 + signal.0).unwrap_or(1),
            _ => 1,
        }
    }

    /// The `what` of summary.json, in one line.
    pub fn summary(&self) -> String {
        let how = self
            .root
            .as_ref()
            .filter(|root| !root.ended_by_launcher)
            .map(Death::says);
        match (how, &self.what) {
            (Some(how), Some(what)) => format!("{how}: {what}"),
            (Some(how), None) => how,
            (None, Some(what)) => what.clone(),
            (None, None) => "unknown".to_owned(),
        }
    }

    fn hint(&self) -> Option<String> {
        let root = self.root.as_ref().filter(|root| !root.ended_by_launcher)?;
        let Some(Exit::Signal(Signal(number))) = root.exit else {
            return None;
        };
        match number {
            libc::SIGKILL if self.oom_killer_acted => Some(
                "the kernel's out-of-memory killer acted during this run: give it more memory, or fewer or smaller ring slots (--ring-slots, --slot-tokens)"
                    .to_owned(),
            ),
            libc::SIGKILL => Some(
                "somebody sent it, or the out-of-memory killer did (`dmesg | grep -i oom`; a container's limit shows in its memory.events)"
                    .to_owned(),
            ),
            libc::SIGBUS => Some(
                "a page of mapped memory could not be had: shared memory or a mapped file is gone, cut short or over a memory limit; is the machine (or the container's /dev/shm) out of memory, or was a model file replaced during the run?"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// The root-cause block, printed last.
#[derive(Debug)]
pub struct RootCause<'a> {
    /// Why.
    pub failure: &'a Failure,
    /// How to go on, in one line.
    pub resume: String,
}

impl fmt::Display for RootCause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failure = self.failure;
        match &failure.root {
            None => writeln!(f, "error: the run failed: {}", failure.summary())?,
            Some(root) => {
                let (role, rank, pid) = (root.worker.role, root.worker.rank, root.pid);
                let seconds = root.at.as_secs_f64();
                writeln!(
                    f,
                    "error: {role} {rank} (process {pid}) {}, {seconds:.1} s after the start",
                    failure.summary()
                )?;
                if let Some(hint) = failure.hint() {
                    writeln!(f, "  hint: {hint}")?;
                }
                let lines = last_error_lines(&root.log);
                if !lines.is_empty() {
                    writeln!(f, "  its last lines:")?;
                    for line in lines {
                        writeln!(f, "    | {line}")?;
                    }
                }
                writeln!(f, "  its log: {}", root.log.display())?;
            }
        }
        for death in &failure.consequences {
            let (role, rank, pid) = (death.worker.role, death.worker.rank, death.pid);
            let what = death
                .what
                .as_ref()
                .map_or(String::new(), |what| format!(": {what}"));
            writeln!(
                f,
                "  then: {role} {rank} (process {pid}) {}{what}",
                death.says()
            )?;
        }
        write!(f, "  {}", self.resume)
    }
}

/// How to go on after a run that ended early, in one line: from its checkpoint, if it has one.
pub fn how_to_resume(output: &Path, checkpoint: Option<&Path>) -> String {
    let output = output.display();
    match checkpoint {
        Some(checkpoint) => format!(
            "to go on from {}: the same command with --output {output} --resume",
            checkpoint.display()
        ),
        None => format!("no checkpoint was saved: start again with --output {output} --overwrite"),
    }
}

/// Bytes of a log that are looked at from its end.
const TAIL: u64 = 64 * 1024;
/// Lines shown.
const SHOWN: usize = 8;
/// Of these, before the last one that speaks of an error.
const BEFORE: usize = 3;

/// The last line of a log that speaks of an error, with a few before it and what follows it; without such a line
/// simply the last ones.
pub fn last_error_lines(log: &Path) -> Vec<String> {
    let Ok(text) = tail(log) else {
        return Vec::new();
    };
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let speaks = |line: &&str| {
        let lower = line.to_lowercase();
        lower.contains("error") || lower.contains("panicked") || lower.contains("fatal")
    };
    let recent = lines.len().saturating_sub(4 * SHOWN);
    let from = match lines[recent..].iter().rposition(speaks) {
        Some(last) => (recent + last).saturating_sub(BEFORE),
        None => lines.len().saturating_sub(SHOWN / 2),
    };
    lines[from..]
        .iter()
        .take(SHOWN)
        .map(|line| (*line).to_owned())
        .collect()
}

fn tail(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// All units were trained.
    Complete,
    /// Stopped early and saved.
    Stopped,
    /// Anything else.
    #[default]
    Failed,
}

/// Held-out acceptance by the decoding walk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AcceptedLength {
    /// Before the first step.
    pub before: Option<f64>,
    /// After the last one.
    pub after: Option<f64>,
}

/// The worker at fault, in summary.json.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootCauseSummary {
    /// Its role; none if no worker is at fault.
    pub role: Option<String>,
    /// Its rank.
    pub rank: Option<u32>,
    /// Its process.
    pub pid: Option<u32>,
    /// What happened, in one line.
    pub what: String,
}

/// summary.json; other programs read it, so names and meaning stay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How it ended.
    pub outcome: Outcome,
    /// Steps committed over the whole run, resumes included.
    pub steps: u32,
    /// Passes over the data.
    pub epochs: u32,
    /// Units of all epochs.
    pub units_total: u64,
    /// Of these, trained.
    pub units_done: u64,
    /// Documents packed.
    pub documents: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Rows skipped, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Seconds from start to end.
    pub wall_s: f64,
    /// Held-out acceptance.
    pub accepted_length: AcceptedLength,
    /// Workers restarted.
    pub restarts: u32,
    /// Units set aside.
    pub quarantined: Vec<u64>,
    /// Largest memory of each worker, by name, in bytes.
    pub peak_memory: BTreeMap<String, u64>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// Only after a failure.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub root_cause: Option<RootCauseSummary>,
}

impl From<&Failure> for RootCauseSummary {
    fn from(failure: &Failure) -> Self {
        let root = failure.root.as_ref();
        Self {
            role: root.map(|root| root.worker.role.to_string()),
            rank: root.map(|root| root.worker.rank),
            pid: root.map(|root| root.pid),
            what: failure.summary(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Role;

    fn death(exit: Option<Exit>) -> Death {
        Death {
            worker: WorkerName::new(Role::Target, 2),
            pid: 99,
            exit,
            ended_by_launcher: false,
            what: None,
            at: Duration::from_millis(12_340),
            log: PathBuf::from("/no/log"),
        }
    }

    fn failure(exit: Exit) -> Failure {
        Failure {
            root: Some(death(Some(exit))),
            what: None,
            oom_killer_acted: false,
            consequences: Vec::new(),
        }
    }

    #[test]
    fn the_exit_code_is_that_of_the_root_causes_signal() {
        assert_eq!(failure(Exit::Signal(Signal::KILL)).exit_code(), 137);
        assert_eq!(
            failure(Exit::Signal(Signal(libc::SIGSEGV))).exit_code(),
            139
        );
        assert_eq!(failure(Exit::Code(3)).exit_code(), 1);
        let mut by_us = failure(Exit::Signal(Signal::KILL));
        by_us.root.as_mut().unwrap().ended_by_launcher = true;
        assert_eq!(by_us.exit_code(), 1);
    }

    #[test]
    fn the_out_of_memory_killer_is_named_when_it_acted() {
        let mut failure = failure(Exit::Signal(Signal::KILL));
        assert!(
            failure
                .hint()
                .unwrap()
                .contains("or the out-of-memory killer did")
        );
        failure.oom_killer_acted = true;
        assert!(
            failure
                .hint()
                .unwrap()
                .contains("the kernel's out-of-memory killer acted")
        );
    }

    #[test]
    fn the_block_begins_with_who_and_ends_with_how_to_go_on() {
        let failure = failure(Exit::Signal(Signal(libc::SIGSEGV)));
        let resume = how_to_resume(
            Path::new("runs/a"),
            Some(Path::new("runs/a/checkpoints/step-30")),
        );
        let text = RootCause {
            failure: &failure,
            resume,
        }
        .to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "error: target 2 (process 99) was killed by SIGSEGV, 12.3 s after the start"
        );
        assert_eq!(lines[1], "  its log: /no/log");
        assert!(lines[2].contains("runs/a/checkpoints/step-30") && lines[2].contains("--resume"));
    }

    #[test]
    fn the_last_error_is_shown_with_its_surroundings() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let show = |lines: &[&str]| {
            std::fs::write(&log, lines.join("\n")).unwrap();
            last_error_lines(&log)
        };
        assert_eq!(show(&["a", "b", "", "c", "d", "e"]), ["b", "c", "d", "e"]);
        let shown = show(&[
            "1",
            "2",
            "3",
            "4",
            "thread panicked at x",
            "because",
            "note",
        ]);
        assert_eq!(
            shown,
            ["2", "3", "4", "thread panicked at x", "because", "note"]
        );
        let mut long = vec!["an old Error"];
        long.extend(["quiet"; 40]);
        assert_eq!(show(&long), ["quiet"; 4]);
        assert!(last_error_lines(Path::new("/no/log")).is_empty());
    }

    #[test]
    fn a_summary_has_the_documented_fields() {
        let mut summary = Summary::default();
        let fields = |summary: &Summary| -> Vec<String> {
            let value = serde_json::to_value(summary).unwrap();
            value.as_object().unwrap().keys().cloned().collect()
        };
        let mut wanted: Vec<&str> =
            "outcome steps epochs units_total units_done documents tokens skipped wall_s \
            accepted_length restarts quarantined peak_memory checkpoint"
                .split_whitespace()
                .collect();
        let sorted = |mut names: Vec<String>| {
            names.sort_unstable();
            names
        };
        wanted.sort_unstable();
        assert_eq!(sorted(fields(&summary)), wanted);
        summary.root_cause = Some((&failure(Exit::Signal(Signal::KILL))).into());
        let value = serde_json::to_value(&summary).unwrap();
        assert_eq!(value["outcome"], "failed");
        assert_eq!(
            value["root_cause"],
            serde_json::json!({"role": "target", "rank": 2, "pid": 99, "what": "was killed by SIGKILL"})
        );
    }
}
