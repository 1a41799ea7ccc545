//! The output directory of a run: whether it can be used, and the files in it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::process;
use crate::control::{WorkerName, clean_stale};

/// Why an output directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// It holds an earlier run.
    #[error("{} already holds a run; choose another --output, or --resume to go on with it, or --overwrite to remove it", .0.display())]
    Exists(PathBuf),
    /// It holds something else.
    #[error("{} is not empty and holds no run ({} is in it); choose another --output", path.display(), found.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// One thing in it.
        found: PathBuf,
    },
    /// A run in it is going on.
    #[error("a run is going on in {} (process {pid}); wait for its end, or choose another --output", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
        /// That run's launcher.
        pid: u32,
    },
    /// Nothing to go on from.
    #[error("{} holds no run to go on with (no plan.toml); check --output, or leave out --resume", .0.display())]
    Nothing(PathBuf),
    /// It cannot be written.
    #[error("{}: cannot {what}: {source}; choose another --output or make room", path.display())]
    Write {
        /// The directory or file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A record in it does not read.
    #[error("{}, line {line}: {what}; the file is damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
}

/// What a run may do with what it finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Refuse an earlier run.
    Refuse,
    /// Remove an earlier run.
    Overwrite,
    /// Go on with it.
    Resume,
}

/// How much is written to see whether there is room.
const TEST_WRITE: usize = 4 << 20;
/// What a run leaves behind; nothing else is ever removed.
const FILES: [&str; 9] = [
    "run.json",
    "plan.toml",
    "trained.jsonl",
    "units.jsonl",
    "metrics.jsonl",
    "workers.jsonl",
    "evaluations.jsonl",
    "summary.json",
    "report.html",
];
const FOLDERS: [&str; 3] = ["logs", "checkpoints", "tensorboard"];

/// An output directory that can be used.
#[derive(Clone, Debug)]
pub struct OutputDir {
    path: PathBuf,
    overwrite: bool,
}

impl OutputDir {
    /// Takes `path` for a run, made if need be: it is writable, has room for a test write, and no other run is
    /// going on in it. Removes what a killed launcher left of its start-up; an earlier run stays until
    /// [`OutputDir::begin`], since this one may still be refused.
    ///
    /// # Errors
    ///
    /// [`OutputError`].
    pub fn take(path: &Path, existing: Existing) -> Result<Self, OutputError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |source| OutputError::Write { path, what, source }
        };
        if existing == Existing::Resume && !path.join("plan.toml").is_file() {
            return Err(OutputError::Nothing(path.to_owned()));
        }
        fs::create_dir_all(path).map_err(failed("make the directory", path))?;
        if let Some(run) = RunFile::read(path) {
            if process::is_alive(run.pid, run.start_time) {
                return Err(OutputError::Busy {
                    path: path.to_owned(),
                    pid: run.pid,
                });
            }
            if let Some(sockets) = &run.sockets {
                clean_stale(sockets);
            }
        }
        let holds_run = path.join("plan.toml").exists() || path.join("run.json").exists();
        match existing {
            Existing::Refuse if holds_run => return Err(OutputError::Exists(path.to_owned())),
            Existing::Refuse | Existing::Overwrite if !holds_run => {
                let entries = fs::read_dir(path).map_err(failed("read the directory", path))?;
                // Logs alone are what a start that was refused leaves.
                let foreign = entries.flatten().find(|entry| entry.file_name() != "logs");
                if let Some(entry) = foreign {
                    return Err(OutputError::Foreign {
                        path: path.to_owned(),
                        found: entry.file_name().into(),
                    });
                }
            }
            _ => {}
        }
        test_write(path).map_err(failed("write into it", path))?;
        let output = Self {
            path: path.to_owned(),
            overwrite: existing == Existing::Overwrite,
        };
        let _ = fs::remove_file(path.join("run.json"));
        output.make_logs()?;
        Ok(output)
    }

    /// The run is to begin: what [`Existing::Overwrite`] allows to remove goes now.
    ///
    /// # Errors
    ///
    /// [`OutputError::Write`].
    pub fn begin(&self) -> Result<(), OutputError> {
        if self.overwrite {
            self.remove_run()?;
        }
        self.make_logs()
    }

    fn make_logs(&self) -> Result<(), OutputError> {
        fs::create_dir_all(self.logs()).map_err(|source| OutputError::Write {
            path: self.logs(),
            what: "make the directory",
            source,
        })
    }

    /// The first directory of `runs/NAME`, `runs/NAME-2`, … that does not exist.
    pub fn free_name(name: &str) -> PathBuf {
        let runs = Path::new("runs");
        let mut path = runs.join(name);
        let mut number = 2;
        while path.exists() {
            path = runs.join(format!("{name}-{number}"));
            number += 1;
        }
        path
    }

    fn remove_run(&self) -> Result<(), OutputError> {
        let failed = |path: &Path, result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(OutputError::Write {
                path: path.to_owned(),
                what: "remove what an earlier run left",
                source: error,
            }),
            _ => Ok(()),
        };
        for name in FOLDERS {
            let path = self.path.join(name);
            failed(&path, fs::remove_dir_all(&path))?;
        }
        // The plan goes last: while it is there, this is known to be a run's directory.
        for name in FILES.iter().rev() {
            let path = self.path.join(name);
            failed(&path, fs::remove_file(&path))?;
        }
        Ok(())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where logs go.
    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    /// The log of one worker.
    pub fn log(&self, worker: WorkerName) -> PathBuf {
        self.logs().join(format!("{worker}.log"))
    }

    /// The launcher's own log.
    pub fn launcher_log(&self) -> PathBuf {
        self.logs().join("launcher-0.log")
    }

    /// Where checkpoints go.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// The checkpoint that `checkpoints/latest` names, if there is one.
    pub fn latest_checkpoint(&self) -> Option<PathBuf> {
        let found = fs::canonicalize(self.checkpoints().join("latest")).ok()?;
        Some(self.checkpoints().join(found.file_name()?))
    }

    /// A file of the run by its name in CLI.md's list, such as `metrics.jsonl`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a whole file so that a reader sees the old one or the new one and nothing between.
    ///
    /// # Errors
    ///
    /// [`OutputError::Write`].
    pub fn write_whole(&self, name: &str, text: &str) -> Result<(), OutputError> {
        let path = self.file(name);
        let part = self.file(&format!(".{name}.part"));
        let write = || {
            let mut file = File::create(&part)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&part, &path)
        };
        write().map_err(|source| {
            // Half a file is of no use to anybody.
            let _ = fs::remove_file(&part);
            OutputError::Write {
                path: path.clone(),
                what: "write it",
                source,
            }
        })
    }
}

/// Writes some megabytes and takes them away again.
fn test_write(folder: &Path) -> io::Result<()> {
    let mut file = tempfile::Builder::new()
        .prefix(".test-")
        .tempfile_in(folder)?;
    file.write_all(&vec![0x5a; TEST_WRITE])?;
    file.as_file().sync_all()
}

/// run.json: how other programs find a run that is going on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFile {
    /// The launcher.
    pub pid: u32,
    /// When it began, in clock ticks since the machine did (field 22 of /proc/PID/stat): with the pid it names
    /// the process for good.
    pub start_time: u64,
    /// Number of the descriptor of the shared memory in the launcher: /proc/PID/fd/FD.
    pub fd: i32,
    /// The folder of the control sockets during the start-up.
    pub sockets: Option<PathBuf>,
}

impl RunFile {
    /// Of this process.
    pub fn of_this_process(fd: i32, sockets: Option<&Path>) -> Self {
        let pid = std::process::id();
        Self {
            pid,
            start_time: process::start_time(pid).unwrap_or(0),
            fd,
            sockets: sockets.map(Path::to_owned),
        }
    }

    /// The run.json in an output directory, if there is one that reads.
    pub fn read(output: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(output.join("run.json")).ok()?).ok()
    }

    /// Writes it; it is removed with the guard.
    ///
    /// # Errors
    ///
    /// [`OutputError::Write`].
    pub fn write(&self, output: &OutputDir) -> Result<RunFileGuard, OutputError> {
        let text = serde_json::to_string(self).expect("numbers and a path are JSON");
        output.write_whole("run.json", &format!("{text}\n"))?;
        Ok(RunFileGuard {
            path: output.file("run.json"),
        })
    }
}

/// Removes run.json when the run is over.
#[derive(Debug)]
pub struct RunFileGuard {
    path: PathBuf,
}

impl Drop for RunFileGuard {
    fn drop(&mut self) {
        // A stale one is recognised by its pid and start time.
        let _ = fs::remove_file(&self.path);
    }
}

/// A file of one JSON object a line, each complete on disk before the next begins.
#[derive(Debug)]
pub struct JsonLines {
    file: File,
    path: PathBuf,
}

impl JsonLines {
    /// Opens the file at `path` for appending, making it if need be.
    ///
    /// # Errors
    ///
    /// [`OutputError::Write`].
    pub fn append_to(path: &Path) -> Result<Self, OutputError> {
        let opened = OpenOptions::new().create(true).append(true).open(path);
        let file = opened.map_err(|source| OutputError::Write {
            path: path.to_owned(),
            what: "open it",
            source,
        })?;
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    /// Adds one line, in one write.
    ///
    /// # Errors
    ///
    /// [`OutputError::Write`].
    pub fn add<T: Serialize>(&mut self, record: &T) -> Result<(), OutputError> {
        let mut line = serde_json::to_vec(record).expect("records hold only what JSON can say");
        line.push(b'\n');
        self.file
            .write_all(&line)
            .map_err(|source| OutputError::Write {
                path: self.path.clone(),
                what: "write to it",
                source,
            })
    }
}

/// Cuts a file of lines with a `step` after the last line of `step`, which is where a run goes on. A last line
/// without its end, left by a kill, goes too. A file that does not exist stays so. Those who have it open for
/// appending may keep it.
///
/// # Errors
///
/// [`OutputError::Damaged`] for a complete line without a step, [`OutputError::Write`].
pub fn cut_after_step(path: &Path, step: u32) -> Result<(), OutputError> {
    #[derive(Deserialize)]
    struct Line {
        step: u32,
    }

    let failed = |source| OutputError::Write {
        path: path.to_owned(),
        what: "cut it to a checkpoint",
        source,
    };
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened.map_err(failed)?,
    };
    let mut reader = BufReader::new(&file);
    let mut kept = 0;
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let length = reader.read_until(b'\n', &mut text).map_err(failed)?;
        if text.last() != Some(&b'\n') {
            break;
        }
        let read: Line = serde_json::from_slice(&text).map_err(|error| OutputError::Damaged {
            path: path.to_owned(),
            line,
            what: error.to_string(),
        })?;
        if read.step > step {
            break;
        }
        kept += length as u64;
    }
    file.set_len(kept).map_err(failed)?;
    file.sync_all().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(path: &Path, existing: Existing) -> Result<OutputDir, String> {
        OutputDir::take(path, existing).map_err(|error| error.to_string())
    }

    fn earlier_run(path: &Path) {
        fs::create_dir_all(path.join("logs")).unwrap();
        fs::create_dir_all(path.join("checkpoints/step-3")).unwrap();
        for name in [
            "plan.toml",
            "metrics.jsonl",
            "notes.txt",
            "logs/drafter-0.log",
        ] {
            fs::write(path.join(name), "x").unwrap();
        }
    }

    #[test]
    fn a_new_directory_is_made_and_left_clean() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs/a");
        let output = take(&path, Existing::Refuse).unwrap();
        let entries: Vec<_> = fs::read_dir(&path)
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        assert_eq!(entries, ["logs"]);
        // A start that was refused later may be repeated.
        take(&path, Existing::Refuse).unwrap();
        assert_eq!(output.latest_checkpoint(), None);
    }

    #[test]
    fn an_earlier_run_is_kept_unless_told_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        earlier_run(folder.path());
        let refused = take(folder.path(), Existing::Refuse).unwrap_err();
        assert!(refused.contains("already holds a run") && refused.contains("--overwrite"));
        take(folder.path(), Existing::Resume).unwrap();
        assert!(folder.path().join("metrics.jsonl").exists());
        let output = take(folder.path(), Existing::Overwrite).unwrap();
        assert!(
            folder.path().join("plan.toml").exists(),
            "it may be refused"
        );
        output.begin().unwrap();
        assert!(
            !folder.path().join("plan.toml").exists()
                && !folder.path().join("checkpoints").exists()
        );
        assert!(folder.path().join("logs").is_dir());
        assert!(!folder.path().join("logs/drafter-0.log").exists());
        assert!(
            folder.path().join("notes.txt").exists(),
            "only a run's own files are removed"
        );
    }

    #[test]
    fn what_is_no_run_is_never_touched() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("thesis.tex"), "x").unwrap();
        for existing in [Existing::Refuse, Existing::Overwrite] {
            let refused = take(folder.path(), existing).unwrap_err();
            assert!(
                refused.contains("holds no run (thesis.tex is in it)"),
                "{refused}"
            );
        }
        let refused = take(folder.path(), Existing::Resume).unwrap_err();
        assert!(refused.contains("no run to go on with"), "{refused}");
        assert!(folder.path().join("thesis.tex").exists());
    }

    #[test]
    fn a_run_that_goes_on_is_not_disturbed() {
        let folder = tempfile::tempdir().unwrap();
        let output = take(folder.path(), Existing::Refuse).unwrap();
        let sockets = tempfile::tempdir().unwrap();
        let stale = sockets.path().join("slipstream-aaaaaa");
        fs::create_dir(&stale).unwrap();
        let mut run = RunFile::of_this_process(7, Some(&stale));
        let guard = run.write(&output).unwrap();
        assert_eq!(RunFile::read(folder.path()), Some(run.clone()));
        for existing in [Existing::Refuse, Existing::Overwrite] {
            assert!(
                take(folder.path(), existing)
                    .unwrap_err()
                    .contains("a run is going on")
            );
        }
        assert!(stale.exists());
        drop(guard);
        assert_eq!(RunFile::read(folder.path()), None);
        // Another process had this pid: that launcher was killed.
        run.start_time += 1;
        std::mem::forget(run.write(&output).unwrap());
        fs::write(folder.path().join("plan.toml"), "x").unwrap();
        take(folder.path(), Existing::Overwrite).unwrap();
        assert!(!stale.exists() && !folder.path().join("run.json").exists());
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_found_by_a_test_write() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        let refused = take(&file.join("run"), Existing::Refuse).unwrap_err();
        assert!(refused.contains("cannot make the directory"), "{refused}");
        // Files can be neither made nor written there, even by root.
        let refused = take(Path::new("/proc/self"), Existing::Overwrite).unwrap_err();
        assert!(refused.contains("/proc/self"), "{refused}");
    }

    #[test]
    fn lines_are_cut_to_a_step_while_the_file_is_open() {
        #[derive(Serialize)]
        struct Line {
            step: u32,
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trained.jsonl");
        cut_after_step(&path, 3).unwrap();
        assert!(!path.exists());
        let mut lines = JsonLines::append_to(&path).unwrap();
        for step in 1..=5 {
            lines.add(&Line { step }).unwrap();
        }
        fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"step\":6,")
            .unwrap();
        cut_after_step(&path, 9).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 5);
        cut_after_step(&path, 3).unwrap();
        lines.add(&Line { step: 4 }).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4}\n"
        );
        cut_after_step(&path, 0).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        fs::write(&path, "{\"step\":1}\nnonsense\n").unwrap();
        let damaged = cut_after_step(&path, 3).unwrap_err().to_string();
        assert!(damaged.contains("trained.jsonl, line 2: "), "{damaged}");
    }

    #[test]
    fn whole_files_are_replaced_and_leave_no_part() {
        let folder = tempfile::tempdir().unwrap();
        let output = take(folder.path(), Existing::Refuse).unwrap();
        output.write_whole("summary.json", "1").unwrap();
        output.write_whole("summary.json", "2").unwrap();
        assert_eq!(
            fs::read_to_string(output.file("summary.json")).unwrap(),
            "2"
        );
        assert!(!output.file(".summary.json.part").exists());
    }
}
