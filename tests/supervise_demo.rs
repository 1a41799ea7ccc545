//! The demo's own processes, interrupted and killed: what is left, what is said, and with which exit code.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use slipstream::launch::process;

/// One run at a time: each has as many processes as the machine has cores, or more.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Demo {
    _turn: MutexGuard<'static, ()>,
    folder: tempfile::TempDir,
    launcher: Child,
    workers: Vec<(String, i32)>,
}

impl Demo {
    /// Starts the demo and waits until it trains.
    fn training() -> Self {
        let turn = turn();
        let folder = tempfile::tempdir().expect("a folder");
        let errors = std::fs::File::create(folder.path().join("errors")).expect("writable");
        let launcher = command(&folder.path().join("run"))
            .stderr(errors)
            .spawn()
            .expect("the launcher runs");
        let mut demo = Self {
            _turn: turn,
            folder,
            launcher,
            workers: Vec::new(),
        };
        let metrics = demo.run().join("metrics.jsonl");
        let lines = || std::fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
        wait("three steps", Duration::from_secs(60), || lines() >= 3);
        demo.workers = children(demo.launcher.id());
        assert_eq!(demo.workers.len(), 4, "{:?}", demo.workers);
        demo
    }

    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.launcher.id() as i32), signal).expect("the launcher lives");
    }

    fn worker(&self, name: &str) -> i32 {
        let found = self.workers.iter().find(|(worker, _)| worker == name);
        found.expect("it runs").1
    }

    /// Waits for the launcher's end: its exit code (minus the signal) and what it printed.
    fn end(&mut self, patience: Duration) -> (i32, String) {
        let pid = self.launcher.id();
        wait("the end", patience, || process::state(pid) == Some('Z'));
        let status = self.launcher.wait().expect("an end");
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        let code = status.code().unwrap_or_else(|| -signal.expect("a signal"));
        let text = std::fs::read_to_string(self.folder.path().join("errors")).expect("readable");
        (code, text)
    }

    fn assert_no_worker(&self, patience: Duration) {
        let alive = |(_, pid): &&(String, i32)| {
            process::state(*pid as u32).is_some_and(|state| state != 'Z')
        };
        wait("the workers' end", patience, || {
            !self.workers.iter().any(|worker| alive(&worker))
        });
    }

    fn summary(&self) -> serde_json::Value {
        let text = std::fs::read_to_string(self.run().join("summary.json")).expect("a summary");
        serde_json::from_str(&text).expect("JSON")
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

fn command(output: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launcher"));
    command
        .arg("--output")
        .arg(output)
        .args(["--eval-fraction", "0"]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn wait(what: &str, patience: Duration, ready: impl Fn() -> bool) {
    let until = Instant::now() + patience;
    while !ready() {
        assert!(Instant::now() < until, "waited {patience:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Name and pid of each worker of a launcher.
fn children(launcher: u32) -> Vec<(String, i32)> {
    let list = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"))
        .expect("a list");
    let name = |pid: &str| {
        let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).expect("it lives");
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let words: Vec<&str> = text.split('\0').collect();
        let role = if words[0].ends_with("target_worker") {
            "target"
        } else {
            "drafter"
        };
        let rank = words
            .iter()
            .position(|word| *word == "--rank")
            .expect("a rank");
        (
            format!("{role}-{}", words[rank + 1]),
            pid.parse().expect("a pid"),
        )
    };
    list.split_whitespace().map(name).collect()
}

#[test]
fn the_first_ctrl_c_saves_and_stops() {
    let mut demo = Demo::training();
    demo.send(Signal::SIGINT);
    let (code, text) = demo.end(Duration::from_secs(30));
    assert_eq!(code, 0, "{text}");
    demo.assert_no_worker(Duration::ZERO);
    let summary = demo.summary();
    assert_eq!(summary["outcome"], "stopped");
    let checkpoint = PathBuf::from(summary["checkpoint"].as_str().expect("one was saved"));
    let checkpoint = demo.folder.path().join(checkpoint);
    assert!(
        checkpoint.join("model.safetensors").is_file(),
        "{}",
        checkpoint.display()
    );
    assert!(!demo.run().join("run.json").exists());
    let trained = std::fs::read_to_string(demo.run().join("trained.jsonl")).expect("steps");
    assert_eq!(
        trained.lines().count() as u64,
        summary["steps"].as_u64().expect("steps")
    );
}

#[test]
fn a_second_ctrl_c_does_not_wait_for_who_cannot_stop() {
    let mut demo = Demo::training();
    let stopped = Pid::from_raw(demo.worker("drafter-1"));
    kill(stopped, Signal::SIGSTOP).expect("it lives");
    demo.send(Signal::SIGINT);
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        demo.launcher.try_wait().expect("a state").is_none(),
        "the first one waits for all"
    );
    demo.send(Signal::SIGINT);
    let (code, text) = demo.end(Duration::from_secs(10));
    assert_eq!(code, 130, "{text}");
    demo.assert_no_worker(Duration::ZERO);
}

#[test]
fn a_killed_worker_is_named_last_within_15_seconds() {
    for name in ["drafter-1", "target-0"] {
        let mut demo = Demo::training();
        kill(Pid::from_raw(demo.worker(name)), Signal::SIGKILL).expect("it lives");
        let (code, text) = demo.end(Duration::from_secs(15));
        assert_eq!(code, 137, "{text}");
        demo.assert_no_worker(Duration::ZERO);
        let (role, rank) = name.split_once('-').expect("a name");
        let errors: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("error: "))
            .collect();
        assert_eq!(errors.len(), 1, "{text}");
        let wanted = format!(
            "error: {role} {rank} (process {}) was killed by SIGKILL",
            demo.worker(name)
        );
        assert!(errors[0].starts_with(&wanted), "{text}");
        assert!(text.contains(&format!("{name}.log")));
        let cause = &demo.summary()["root_cause"];
        assert_eq!(cause["role"], role);
        assert_eq!(cause["rank"].to_string(), rank);
    }
}

#[test]
fn a_killed_launcher_leaves_no_worker_and_its_directory_can_be_used_again() {
    let mut demo = Demo::training();
    demo.send(Signal::SIGKILL);
    let (code, _) = demo.end(Duration::from_secs(5));
    assert_eq!(code, -9);
    demo.assert_no_worker(Duration::from_secs(5));
    assert!(demo.run().join("run.json").exists());
    let refused = command(&demo.run()).output().expect("the launcher runs");
    assert_eq!(refused.status.code(), Some(2));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(
        text.contains("already holds a run") && text.contains("--overwrite"),
        "{text}"
    );
    let again = command(&demo.run())
        .args(["--overwrite", "--max-steps", "2"])
        .output()
        .expect("the launcher runs");
    assert_eq!(
        again.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&again.stderr)
    );
    assert_eq!(demo.summary()["steps"], 2);
}
