//! A scene for one test: a few conversations, a cache and a temporary directory of its own, and the built
//! launcher playing in it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// How long anything may take on a machine that has much else to do.
const PATIENCE: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(5);

/// A run of a second or two: 28 units of 84 documents from 100 rows, four units a step.
const SMALL: [(&str, &str); 7] = [
    ("--draft-layers", "1"),
    ("--block-size", "4"),
    ("--target-layers", "1,3,5"),
    ("--slot-tokens", "256"),
    ("--unit-anchors", "24"),
    ("--batch-anchors", "96"),
    ("--anchors", "8"),
];
/// Rows of the conversations of a small run.
pub const ROWS: usize = 100;
/// Epochs of a run that does not come to its end while a test looks on.
pub const ENDLESS: [&str; 2] = ["--epochs", "2000"];

/// A file or directory of the repository's assets.
pub fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("assets")
        .join(name)
}

/// `count` rows of the demo's conversations, after `skip` others, one on each line.
pub fn rows(skip: usize, count: usize) -> String {
    let file = File::open(asset("demo-chat.jsonl")).expect("the demo's conversations");
    let lines = BufReader::new(file).lines().skip(skip).take(count);
    lines.map(|line| line.expect("a row") + "\n").collect()
}

/// Where one test plays.
pub struct Scene {
    dir: tempfile::TempDir,
    started: AtomicUsize,
}

impl Scene {
    /// With [`ROWS`] conversations.
    pub fn new() -> Self {
        Self::with_rows(ROWS)
    }

    /// With the first `count` conversations of the demo.
    pub fn with_rows(count: usize) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let scene = Self {
            dir,
            started: AtomicUsize::new(0),
        };
        fs::create_dir(scene.path("tmp")).expect("a folder");
        scene.write("data.jsonl", rows(0, count));
        scene
    }

    /// Something in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).expect("a file of the scene");
        path
    }

    /// An output directory.
    pub fn run(&self, name: &str) -> Run {
        Run {
            path: self.path(name),
        }
    }

    /// The launcher, with these words.
    pub fn launcher<S: AsRef<std::ffi::OsStr>>(&self, words: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_launcher"));
        command
            .args(words)
            .current_dir(self.dir.path())
            .env("SLIPSTREAM_CACHE", self.path("cache"))
            .env("TMPDIR", self.path("tmp"))
            .env_remove("RUST_LOG")
            .stdin(Stdio::null());
        command
    }

    /// A small training run; `more` comes last and wins over what makes it small.
    pub fn train(&self, run: &Run, cpu: &str, more: &[&str]) -> Command {
        let target = asset("tiny-target").display().to_string();
        let data = self.path("data.jsonl").display().to_string();
        let output = run.path.display().to_string();
        let always = [
            ("--target-model", target.as_str()),
            ("--data", data.as_str()),
            ("--output", output.as_str()),
            ("--cpu", cpu),
        ];
        let given = |name: &str| more.contains(&name);
        let mut words = Vec::new();
        for (name, value) in always.into_iter().chain(SMALL) {
            if !given(name) {
                words.extend([name, value]);
            }
        }
        words.extend(more);
        self.launcher(&words)
    }

    /// Starts it.
    pub fn start(&self, mut command: Command) -> Running<'_> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let stdout = self.path(&format!("stdout-{number}"));
        let stderr = self.path(&format!("stderr-{number}"));
        command.stdout(File::create(&stdout).expect("a file of the scene"));
        command.stderr(File::create(&stderr).expect("a file of the scene"));
        Running {
            child: command.spawn().expect("the launcher starts"),
            scene: self,
            stdout,
            stderr,
        }
    }

    /// Runs it to its end.
    pub fn play(&self, command: Command) -> Ended {
        self.start(command).end()
    }

    /// Runs it to its end, which must be exit code 0.
    pub fn succeeds(&self, command: Command) -> Ended {
        let ended = self.play(command);
        assert_eq!(ended.code(), Some(0), "{ended}");
        ended
    }

    /// Every process that was started in this scene and is not dead, launchers included.
    pub fn processes(&self) -> Vec<Process> {
        let here = self.dir.path().as_os_str().as_encoded_bytes();
        let found = fs::read_dir("/proc").expect("/proc").flatten();
        let numbers = found.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers
            .filter_map(|pid: i32| Process::of_scene(pid, here))
            .collect()
    }

    /// The workers that live, by name.
    pub fn workers(&self) -> BTreeMap<String, Process> {
        let worker = |process: Process| Some((process.worker.clone()?, process));
        self.processes().into_iter().filter_map(worker).collect()
    }

    /// No process is left, and nothing in the temporary directory.
    pub fn is_clean(&self) {
        let left = self.processes();
        assert!(left.is_empty(), "processes are left: {left:?}");
        let files: Vec<_> = fs::read_dir(self.path("tmp"))
            .expect("a folder")
            .flatten()
            .map(|entry| entry.path())
            .collect();
        assert!(files.is_empty(), "temporary files are left: {files:?}");
    }

    /// All processes are gone within `limit`; says how long that took.
    pub fn empties(&self, limit: Duration) -> Duration {
        let since = Instant::now();
        loop {
            let left = self.processes();
            if left.is_empty() {
                return since.elapsed();
            }
            assert!(since.elapsed() < limit, "after {limit:?}: {left:?}");
            std::thread::sleep(POLL);
        }
    }
}

/// A live process of a scene.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// `target-0`, `drafter-1`; nothing for a launcher.
    pub worker: Option<String>,
}

impl Process {
    /// By its environment, which names the scene and is empty once a process is dead.
    fn of_scene(pid: i32, here: &[u8]) -> Option<Self> {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        if !environment.windows(here.len()).any(|part| part == here) {
            return None;
        }
        let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<&str> = words
            .split(|&byte| byte == 0)
            .filter_map(|word| std::str::from_utf8(word).ok())
            .collect();
        let program = Path::new(words.first()?).file_name()?.to_str()?;
        let worker = program.strip_suffix("_worker").and_then(|role| {
            let rank = words.iter().position(|word| *word == "--rank")?;
            Some(format!("{role}-{}", words.get(rank + 1)?))
        });
        Some(Self { pid, worker })
    }

    /// Sends it a signal; that it is gone already is fine.
    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.pid), signal);
    }
}

/// A launcher that runs.
pub struct Running<'a> {
    child: Child,
    scene: &'a Scene,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Running<'_> {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("it has not been waited for");
    }

    /// What it has printed so far.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap_or_default()
    }

    /// Waits for `ready` to give something while it runs.
    pub fn wait_for<T>(&mut self, what: &str, mut ready: impl FnMut(&Self) -> Option<T>) -> T {
        let since = Instant::now();
        loop {
            if let Some(value) = ready(self) {
                return value;
            }
            let over = self.child.try_wait().expect("its status");
            assert!(over.is_none(), "no {what} before {over:?}: {}", self.said());
            let late = since.elapsed() > PATIENCE;
            assert!(!late, "no {what} in {PATIENCE:?}: {}", self.said());
            std::thread::sleep(POLL);
        }
    }

    /// Waits until `run` has made `steps` steps.
    pub fn wait_for_steps(&mut self, run: &Run, steps: usize) {
        self.wait_for(&format!("step {steps}"), |_| {
            (run.whole_lines("metrics.jsonl") >= steps).then_some(())
        });
    }

    /// Waits for this worker to be there.
    pub fn wait_for_worker(&mut self, name: &str) -> Process {
        self.wait_for(name, |running| running.scene.workers().remove(name))
    }

    /// Waits for its end.
    pub fn end(mut self) -> Ended {
        let since = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("its status") {
                break status;
            }
            let late = since.elapsed() > PATIENCE;
            assert!(!late, "it still runs after {PATIENCE:?}: {}", self.said());
            std::thread::sleep(POLL);
        };
        let read = |path: &Path| fs::read_to_string(path).expect("what it printed");
        Ended {
            status,
            stdout: read(&self.stdout),
            stderr: read(&self.stderr),
            took: since.elapsed(),
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // Only a test that failed leaves it running; its workers end with it.
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// How a launcher ended.
pub struct Ended {
    /// Its status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How long its end was waited for.
    pub took: Duration,
}

impl Ended {
    /// Its exit code.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The lines from the last `error:` on, which must be the last thing that was printed.
    pub fn last_block(&self) -> Vec<&str> {
        let lines: Vec<&str> = self.stderr.lines().collect();
        let begin = lines.iter().rposition(|line| line.starts_with("error: "));
        let begin = begin.unwrap_or_else(|| panic!("there is no error in {self}"));
        let block = &lines[begin..];
        let belongs = block[1..].iter().all(|line| line.starts_with("  "));
        assert!(belongs, "something was printed after the error: {self}");
        block.to_vec()
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (status, signal) = (self.status, self.status.signal());
        let (stdout, stderr) = (&self.stdout, &self.stderr);
        write!(f, "{status} {signal:?}\n{stdout}\n{stderr}")
    }
}

/// A run's output directory.
pub struct Run {
    /// Where.
    pub path: PathBuf,
}

impl Run {
    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The bytes of a file of the checkpoint that `latest` leads to.
    pub fn checkpoint_file(&self, name: &str) -> Vec<u8> {
        let path = self.file("checkpoints/latest").join(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Step of the checkpoint that `latest` leads to; `None` before there is one.
    pub fn latest(&self) -> Option<u64> {
        let name = fs::read_link(self.file("checkpoints/latest")).ok()?;
        let step = name.to_str().and_then(|name| name.strip_prefix("step-"));
        Some(step.expect("it leads to step-N").parse().expect("a number"))
    }

    /// Whether a checkpoint is being written, under its temporary name.
    pub fn is_saving(&self) -> bool {
        let found = fs::read_dir(self.file("checkpoints")).into_iter().flatten();
        found
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().starts_with(".writing-"))
    }

    /// summary.json.
    pub fn summary(&self) -> Value {
        let text = fs::read_to_string(self.file("summary.json")).expect("summary.json");
        serde_json::from_str(&text).expect("JSON")
    }

    /// How many complete lines a file has.
    pub fn whole_lines(&self, name: &str) -> usize {
        let bytes = fs::read(self.file(name)).unwrap_or_default();
        bytes.iter().filter(|&&byte| byte == b'\n').count()
    }

    /// The objects of a .jsonl file.
    pub fn lines(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.file(name)).expect("a file of lines");
        assert!(text.ends_with('\n'), "{name} ends within a line: {text}");
        let read = |line: &str| serde_json::from_str(line).expect("each line is JSON");
        text.lines().map(read).collect()
    }

    /// The file again, in another directory.
    pub fn copy_to(&self, other: &Run) {
        copy(&self.path, &other.path);
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new folder");
    for entry in fs::read_dir(from).expect("a folder").flatten() {
        let (path, copied) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().expect("its kind");
        if kind.is_symlink() {
            let target = fs::read_link(&path).expect("a link");
            std::os::unix::fs::symlink(target, copied).expect("a link");
        } else if kind.is_dir() {
            copy(&path, &copied);
        } else {
            fs::copy(&path, copied).expect("a copy");
        }
    }
}
