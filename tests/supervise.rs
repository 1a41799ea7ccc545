//! Supervision, with real processes: this program plays the test driver, the launcher and the workers.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::unistd::Pid;
use slipstream::control::{
    FromWorker, Loaded, Role, ToWorker, WorkerLink, WorkerName, clean_stale, worker_main,
};
use slipstream::launch::process;
use slipstream::launch::report::{RootCause, how_to_resume};
use slipstream::launch::spawn::WorkerSpec;
use slipstream::launch::supervise::{Actions, Deadlines, Hooks, StopWhy, Supervisor, WorkerId};
use slipstream::monitor::console::{Console, Tail};

const PART: &str = "SLIPSTREAM_TEST_PART";
const FOLDER: &str = "SLIPSTREAM_TEST_FOLDER";
const WORKERS: &str = "SLIPSTREAM_TEST_WORKERS";

fn main() -> ExitCode {
    match std::env::var(PART).as_deref() {
        Ok("launcher") => launcher(),
        Ok(part) => worker(part),
        Err(_) => {
            hang_up(SigHandler::SigDfl);
            drive()
        }
    }
}

/// What SIGHUP does to this process and those that it starts: nohup ignores it, however the tests were started.
fn hang_up(handler: SigHandler) {
    // SAFETY: neither the default nor ignoring runs code of ours.
    unsafe { signal(Signal::SIGHUP, handler) }.expect("SIGHUP may be set");
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).expect("the driver passes it"))
}

// ---------------------------------------------------------------- the workers

fn worker(part: &str) -> ExitCode {
    match part {
        "exits-early" => {
            println!("loading some library");
            println!("error: libodd.so cannot be found");
            return ExitCode::from(3);
        }
        "killed-early" => raise(Signal::SIGKILL),
        "silent" => sleep_for_ever(),
        _ => {}
    }
    worker_main(Role::Drafter, |link| play(part, link))
}

fn raise(signal: Signal) {
    nix::sys::signal::raise(signal).expect("a signal to this process");
}

fn sleep_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn play(part: &str, link: &WorkerLink) -> Result<(), String> {
    let said = |error: slipstream::control::ControlError| error.to_string();
    let number: u32 = link.plan().map_err(said)?;
    if number != 40 + link.name().rank {
        return Err(format!("the plan of somebody else: {number}"));
    }
    if part == "stuck-loading" {
        sleep_for_ever();
    }
    if part == "killed-loading" {
        raise(Signal::SIGKILL);
    }
    link.reporter().loading("weights", 0.5).map_err(said)?;
    link.reporter().ready(Loaded::default()).map_err(said)?;
    if !link.wait_start().map_err(said)? {
        return Ok(());
    }
    match part {
        "quick" => {}
        "chatty" => {
            for number in 0..200 {
                println!("line {number} of {}", link.name());
            }
        }
        "killed" => raise(Signal::SIGKILL),
        "dies-slowly" => {
            // As after a kill that has much memory to give back: the pipe is closed long before the end.
            let words: Vec<String> = std::env::args().collect();
            let number = words
                .iter()
                .find_map(|word| word.strip_prefix("liveness="))
                .expect("passed");
            // SAFETY: the descriptor is open, and nothing in this process uses it.
            drop(unsafe { OwnedFd::from_raw_fd(number.parse().expect("a number")) });
            std::thread::sleep(Duration::from_millis(300));
            raise(Signal::SIGKILL);
        }
        // The first only takes the runtime's own handler away; a real one comes again by itself.
        "bus" => (0..2).for_each(|_| raise(Signal::SIGBUS)),
        "fails" => return Err("the data is odd".to_owned()),
        "leaves" => std::process::exit(0),
        "panics" => panic!("seven is not eight"),
        "panics-aside" => {
            std::thread::spawn(|| panic!("aside"));
            sleep_for_ever();
        }
        "fails-when-suspect" => {
            while !folder().join("suspect").exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return Err("a peer is gone".to_owned());
        }
        "ignores-term" => {
            // SAFETY: ignoring a signal runs no code of ours.
            unsafe {
                nix::sys::signal::signal(Signal::SIGTERM, nix::sys::signal::SigHandler::SigIgn)
            }
            .expect("SIGTERM can be ignored");
            println!("deaf");
            sleep_for_ever();
        }
        "stops-itself" => {
            raise(Signal::SIGSTOP);
            sleep_for_ever();
        }
        "ignores-stop" => sleep_for_ever(),
        "no-death-signal" => {
            rustix::process::set_parent_process_death_signal(None).expect("it can be cleared");
            println!("clear");
            sleep_for_ever();
        }
        "lists-descriptors" => {
            for entry in std::fs::read_dir("/proc/self/fd").expect("/proc") {
                let Ok(path) = std::fs::read_link(entry.expect("an entry").path()) else {
                    continue;
                };
                println!("descriptor {}", path.display());
            }
            let file = link.descriptor("extra").map_err(said)?;
            let text = std::io::read_to_string(std::fs::File::from(file)).expect("readable");
            println!("extra says {text}");
        }
        "trains" => {
            println!("error: this one was harmless");
            let until = Instant::now() + Duration::from_secs(60);
            while link.stop_asked().is_none() {
                if Instant::now() > until {
                    return Err("nobody stopped it".to_owned());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        other => return Err(format!("no such part: {other}")),
    }
    Ok(())
}

// ---------------------------------------------------------------- the launcher

struct Run {
    stopped: Option<StopWhy>,
    asks: Option<(Instant, StopWhy)>,
    pids: BTreeMap<WorkerId, u32>,
}

impl Hooks for Run {
    fn plan(&mut self, worker: WorkerId) -> Vec<u8> {
        postcard::to_allocvec(&(40 + worker as u32)).expect("a number")
    }

    fn message(&mut self, worker: WorkerId, message: FromWorker, _: &mut Actions) {
        if let FromWorker::Failed(what) = message {
            println!("message from {worker}: {what}");
        }
    }

    fn all_ready(&mut self, actions: &mut Actions) {
        std::fs::write(folder().join("started"), "").expect("writable");
        actions.order(0, ToWorker::Checkpoint);
    }

    fn suspect(&mut self, worker: WorkerId) {
        assert!(
            process::state(self.pids[&worker]).is_some(),
            "suspect, and not yet reaped"
        );
        std::fs::write(folder().join("suspect"), "").expect("writable");
    }

    fn dead(&mut self, worker: WorkerId) {
        assert!(
            process::state(self.pids[&worker]).is_none(),
            "dead means reaped"
        );
    }

    fn stop(&mut self, why: StopWhy) {
        self.stopped = Some(why);
    }

    fn tick(&mut self, actions: &mut Actions) {
        if let Some((at, why)) = self.asks
            && Instant::now() > at
        {
            actions.stop(why);
        }
    }
}

fn launcher() -> ExitCode {
    let folder = folder();
    if folder.join("nohup").exists() {
        hang_up(SigHandler::SigIgn);
    }
    let text = std::env::var(WORKERS).expect("the driver passes it");
    let console = Console::new(false);
    let short = Deadlines {
        hello: Duration::from_secs(2),
        loading: Duration::from_secs(2),
        stop: Duration::from_secs(2),
        terminate: Duration::from_millis(500),
        kill: Duration::from_secs(5),
    };
    let mut supervisor = Supervisor::new(short).expect("a supervisor");
    let sockets = supervisor.socket_folder().expect("a folder").to_owned();
    std::fs::write(folder.join("sockets"), sockets.to_str().expect("text")).expect("writable");
    let extra = std::fs::File::open(folder.join("extra")).expect("the driver wrote it");
    let mut run = Run {
        stopped: None,
        asks: None,
        pids: BTreeMap::new(),
    };
    let mut tails = Vec::new();
    for (rank, part) in text.split(',').enumerate() {
        let worker = WorkerName::new(Role::Drafter, rank as u32);
        let log = folder.join(format!("{worker}.log"));
        if part == "chatty" {
            tails.push(
                Tail::start(log.clone(), worker.to_string(), console.clone()).expect("a thread"),
            );
        }
        let spec = WorkerSpec {
            worker,
            program: std::env::current_exe().expect("this program"),
            arguments: Vec::new(),
            environment: vec![(PART.into(), part.into())],
            threads: 1,
            descriptors: vec![("extra", std::os::fd::AsFd::as_fd(&extra))],
            log,
            terminal: false,
        };
        let id = supervisor.add(&spec).expect("a worker");
        run.pids.insert(id, supervisor.pid(id));
        let line = format!("{}\n", supervisor.pid(id));
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(folder.join("pids"))
            .expect("writable");
        file.write_all(line.as_bytes()).expect("writable");
    }
    if text.contains("trains") && folder.join("limit").exists() {
        supervisor.stop_at(Instant::now() + Duration::from_millis(300));
    }
    if folder.join("max-steps").exists() {
        run.asks = Some((
            Instant::now() + Duration::from_millis(300),
            StopWhy::MaxSteps,
        ));
    }
    let ended = supervisor.run(&mut run).expect("a loop");
    drop(tails);
    println!(
        "stopped {:?} hook {:?} started {}",
        ended.stopped, run.stopped, ended.started
    );
    assert!(ended.unkillable.is_empty(), "{:?}", ended.unkillable);
    if let Some(failure) = &ended.failure {
        let resume = how_to_resume(Path::new("runs/x"), None);
        eprintln!("{}", RootCause { failure, resume });
    }
    ExitCode::from(ended.exit_code())
}

// ---------------------------------------------------------------- the driver

/// A launcher at work.
struct Stage {
    folder: tempfile::TempDir,
    child: Option<Child>,
    count: usize,
    began: Instant,
}

struct Ended {
    code: i32,
    out: String,
    report: String,
    took: Duration,
}

impl Stage {
    fn open(workers: &str) -> Self {
        Self::open_with(workers, &[])
    }

    fn open_with(workers: &str, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("extra"), "something").expect("writable");
        for flag in flags {
            std::fs::write(folder.path().join(flag), "").expect("writable");
        }
        let child = Command::new(std::env::current_exe().expect("this program"))
            .env(PART, "launcher")
            .env(FOLDER, folder.path())
            .env(WORKERS, workers)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a launcher");
        Self {
            folder,
            child: Some(child),
            count: workers.split(',').count(),
            began: Instant::now(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn wait_for(&self, what: &str, ready: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !ready() {
            assert!(Instant::now() < until, "waited too long for {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait_for_file(&self, name: &str) {
        self.wait_for(name, || self.path(name).exists());
    }

    fn wait_for_line(&self, log: &str, line: &str) {
        let path = self.path(log);
        self.wait_for(line, || {
            std::fs::read_to_string(&path).is_ok_and(|text| text.contains(line))
        });
    }

    fn wait_started(&self) -> &Self {
        self.wait_for_file("started");
        self
    }

    fn pids(&self) -> Vec<i32> {
        self.wait_for("all pids", || {
            std::fs::read_to_string(self.path("pids"))
                .is_ok_and(|text| text.lines().count() == self.count)
        });
        let text = std::fs::read_to_string(self.path("pids")).expect("pids");
        text.lines()
            .map(|line| line.parse().expect("a pid"))
            .collect()
    }

    fn send(&self, signal: Signal) -> &Self {
        let pid = self.child.as_ref().expect("running").id() as i32;
        kill(Pid::from_raw(pid), signal).expect("the launcher lives");
        self
    }

    fn send_worker(&self, rank: usize, signal: Signal) -> &Self {
        kill(Pid::from_raw(self.pids()[rank]), signal).expect("the worker lives");
        self
    }

    /// The launcher's end; no worker and no socket may be left.
    fn end(mut self) -> Ended {
        let pid = self.child.as_ref().expect("running").id();
        self.wait_for("the launcher's end", || process::state(pid) == Some('Z'));
        let child = self.child.take().expect("running");
        let Output {
            status,
            stdout,
            stderr,
        } = child.wait_with_output().expect("an end");
        let took = self.began.elapsed();
        let pids = self.pids();
        let patience = if status.signal().is_some() {
            Duration::from_secs(5)
        } else {
            Duration::ZERO
        };
        let until = Instant::now() + patience;
        for pid in pids {
            while process::state(pid as u32).is_some_and(|state| state != 'Z') {
                assert!(
                    Instant::now() < until,
                    "worker {pid} is left after {patience:?}"
                );
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let sockets =
            PathBuf::from(std::fs::read_to_string(self.path("sockets")).expect("sockets"));
        if status.signal().is_some() {
            // What the next start does with a folder that run.json names.
            clean_stale(&sockets);
        }
        assert!(!sockets.exists(), "{} is left", sockets.display());
        let ended = Ended {
            code: status
                .code()
                .unwrap_or_else(|| -status.signal().expect("a signal")),
            out: String::from_utf8_lossy(&stdout).into_owned(),
            report: String::from_utf8_lossy(&stderr).into_owned(),
            took,
        };
        println!(
            "code {} after {took:?}\n{}{}",
            ended.code, ended.out, ended.report
        );
        ended
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn lines(report: &str) -> Vec<&str> {
    report.lines().collect()
}

fn all_work_done_is_0() {
    let ended = Stage::open("quick,quick,quick").end();
    assert_eq!((ended.code, ended.report.as_str()), (0, ""));
    assert!(ended.out.contains("stopped None hook None started true"));
}

fn a_killed_worker_is_named_and_its_signal_is_the_exit_code() {
    let ended = Stage::open("trains,killed,trains").end();
    assert_eq!(ended.code, 137);
    let lines = lines(&ended.report);
    assert!(
        lines[0].starts_with("error: drafter 1 (process "),
        "{}",
        lines[0]
    );
    assert!(lines[0].contains("was killed by SIGKILL"), "{}", lines[0]);
    assert!(ended.report.contains("hint: ") && ended.report.contains("out-of-memory"));
    assert!(ended.report.contains("drafter-1.log"));
    assert!(
        ended.report.contains("then: drafter 0 (process ")
            && ended.report.contains("then: drafter 2 ")
    );
    assert!(ended.report.contains("ended by the launcher"));
    assert!(
        lines
            .last()
            .expect("lines")
            .contains("no checkpoint was saved")
    );
    assert!(ended.took < Duration::from_secs(10));
}

fn a_worker_killed_from_outside_is_named() {
    let stage = Stage::open("trains,trains");
    stage.wait_started().send_worker(0, Signal::SIGKILL);
    let ended = stage.end();
    assert_eq!(ended.code, 137);
    assert!(
        ended.report.starts_with("error: drafter 0 "),
        "{}",
        ended.report
    );
}

fn the_first_death_is_the_root_cause_and_not_who_complains_of_it() {
    let ended = Stage::open("fails-when-suspect,trains,dies-slowly").end();
    assert_eq!(ended.code, 137);
    assert!(ended.out.contains("message from 0: a peer is gone"));
    assert!(
        ended.report.starts_with("error: drafter 2 "),
        "{}",
        ended.report
    );
    assert!(ended.report.contains("then: drafter 0 "));
}

fn a_bus_error_has_a_hint_on_shared_memory() {
    let ended = Stage::open("bus,trains").end();
    assert_eq!(ended.code, 128 + 7);
    assert!(
        ended.report.contains("was killed by SIGBUS")
            && ended.report.contains("hint: a page of mapped memory")
    );
}

fn a_failing_worker_tells_why() {
    let ended = Stage::open("trains,fails").end();
    assert_eq!(ended.code, 1);
    let lines = lines(&ended.report);
    assert!(
        lines[0].starts_with("error: drafter 1 ")
            && lines[0].contains("exited with code 1: the data is odd"),
        "{}",
        lines[0]
    );
    assert!(ended.report.contains("    | ") && ended.report.contains("ERROR"));
    assert!(ended.out.contains("message from 1: the data is odd"));
}

fn a_panic_on_any_thread_ends_the_run() {
    for (part, words) in [("panics", "seven is not eight"), ("panics-aside", "aside")] {
        let ended = Stage::open(&format!("{part},trains")).end();
        assert_eq!(ended.code, 1);
        let first = lines(&ended.report)[0];
        assert!(
            first.starts_with("error: drafter 0 ") && first.contains("code 101: panicked at "),
            "{first}"
        );
        assert!(first.contains(words), "{first}");
    }
}

fn leaving_before_the_work_is_done_is_a_failure() {
    let ended = Stage::open("trains,leaves").end();
    assert_eq!(ended.code, 1);
    assert!(
        ended.report.contains("drafter 1 ") && ended.report.contains("before its work was done")
    );
}

fn a_death_before_hello_is_noticed_at_once() {
    let ended = Stage::open("exits-early,trains").end();
    assert_eq!(ended.code, 1);
    assert!(ended.report.contains("drafter 0 ") && ended.report.contains("exited with code 3"));
    assert!(ended.report.contains("| error: libodd.so cannot be found"));
    assert!(ended.took < Duration::from_millis(1900), "{:?}", ended.took);
    let ended = Stage::open("trains,killed-early").end();
    assert_eq!(ended.code, 137);
    assert!(ended.report.starts_with("error: drafter 1 "));
    assert!(ended.took < Duration::from_millis(1900), "{:?}", ended.took);
}

fn a_death_while_others_load_is_noticed() {
    let ended = Stage::open("stuck-loading,killed-loading").end();
    assert_eq!(ended.code, 137);
    assert!(ended.report.starts_with("error: drafter 1 "));
    assert!(ended.took < Duration::from_millis(1900), "{:?}", ended.took);
}

fn who_says_nothing_is_named() {
    let ended = Stage::open("silent,trains").end();
    assert_eq!(ended.code, 1);
    let first = lines(&ended.report)[0];
    assert!(
        first.starts_with("error: drafter 0 ") && first.contains("no sign of life"),
        "{first}"
    );
    let ended = Stage::open("trains,stuck-loading").end();
    assert_eq!(ended.code, 1);
    let first = lines(&ended.report)[0];
    assert!(
        first.starts_with("error: drafter 1 ") && first.contains("stuck while loading"),
        "{first}"
    );
}

fn a_child_that_ignores_sigterm_does_not_hang_the_end() {
    let stage = Stage::open("ignores-term,trains");
    stage.wait_started().wait_for_line("drafter-0.log", "deaf");
    stage.send_worker(1, Signal::SIGKILL);
    let ended = stage.end();
    assert_eq!(ended.code, 137);
    assert!(ended.report.starts_with("error: drafter 1 "));
}

fn a_stopped_child_does_not_hang_the_end() {
    let stage = Stage::open("stops-itself,trains");
    let pid = stage.wait_started().pids()[0];
    stage.wait_for("the stop", || process::state(pid as u32) == Some('T'));
    stage.send_worker(1, Signal::SIGKILL);
    let ended = stage.end();
    assert_eq!(ended.code, 137);
    assert!(ended.report.starts_with("error: drafter 1 "));
}

fn a_stopped_child_is_the_one_named_when_the_stop_takes_too_long() {
    let stage = Stage::open("ignores-stop,stops-itself");
    let pid = stage.wait_started().pids()[1];
    stage.wait_for("the stop", || process::state(pid as u32) == Some('T'));
    stage.send(Signal::SIGINT);
    let ended = stage.end();
    assert_eq!(ended.code, 1);
    let first = lines(&ended.report)[0];
    assert!(
        first.starts_with("error: drafter 1 ") && first.contains("it is stopped (SIGSTOP)"),
        "{first}"
    );
}

fn the_first_ctrl_c_stops_in_order() {
    let stage = Stage::open("trains,trains");
    stage.wait_started().send(Signal::SIGINT);
    let ended = stage.end();
    assert_eq!((ended.code, ended.report.as_str()), (0, ""));
    assert!(
        ended
            .out
            .contains("stopped Some(Interrupt) hook Some(Interrupt) started true")
    );
}

fn the_second_ctrl_c_stops_now() {
    let stage = Stage::open("ignores-stop,trains");
    stage.wait_started().send(Signal::SIGINT);
    std::thread::sleep(Duration::from_millis(300));
    let ended = stage.send(Signal::SIGINT);
    let since = Instant::now();
    let _ = ended;
    let ended = stage.end();
    assert_eq!(ended.code, 130);
    assert!(since.elapsed() < Duration::from_millis(1500));
}

fn ctrl_c_while_loading_leaves_nothing() {
    let stage = Stage::open("stuck-loading,trains");
    stage.pids();
    stage.send(Signal::SIGINT);
    let ended = stage.end();
    assert_eq!(ended.code, 130);
    assert!(ended.out.contains("started false"));
    assert!(ended.took < Duration::from_millis(1900), "{:?}", ended.took);
}

fn requests_to_end_are_75() {
    for signal in [Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGHUP] {
        let stage = Stage::open("trains,trains");
        stage.wait_started().send(signal);
        let ended = stage.end();
        assert_eq!((ended.code, ended.report.as_str()), (75, ""), "{signal}");
    }
    let ended = Stage::open_with("trains,trains", &["limit"]).end();
    assert_eq!(ended.code, 75);
    assert!(ended.out.contains("stopped Some(TimeLimit)"));
    let ended = Stage::open_with("trains,trains", &["max-steps"]).end();
    assert_eq!(ended.code, 0);
    assert!(ended.out.contains("stopped Some(MaxSteps)"));
}

fn a_launcher_under_nohup_outlives_its_terminal() {
    let stage = Stage::open_with("trains,trains", &["nohup", "max-steps"]);
    stage.wait_started().send(Signal::SIGHUP);
    let ended = stage.end();
    assert_eq!(ended.code, 0);
    assert!(ended.out.contains("stopped Some(MaxSteps)"));
}

fn a_signal_to_every_process_of_the_job_is_an_orderly_stop() {
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGUSR1,
    ] {
        let stage = Stage::open("trains,trains");
        stage.wait_started();
        stage
            .send_worker(0, signal)
            .send_worker(1, signal)
            .send(signal);
        let ended = stage.end();
        let wanted = if signal == Signal::SIGINT { 0 } else { 75 };
        assert_eq!(
            (ended.code, ended.report.as_str()),
            (wanted, ""),
            "{signal}"
        );
    }
}

fn a_sigterm_to_one_worker_ends_it_and_the_run() {
    let stage = Stage::open("trains,trains");
    stage.wait_started().send_worker(1, Signal::SIGTERM);
    let ended = stage.end();
    assert_eq!(ended.code, 143);
    assert!(
        ended.report.starts_with("error: drafter 1 ")
            && ended.report.contains("was killed by SIGTERM")
    );
}

fn no_worker_survives_a_killed_launcher() {
    for workers in [
        "trains,trains",
        "ignores-stop,silent",
        "stuck-loading,trains",
    ] {
        let stage = Stage::open(workers);
        stage.pids();
        if workers.starts_with("trains") {
            stage.wait_started();
        }
        stage.send(Signal::SIGKILL);
        assert_eq!(stage.end().code, -9);
    }
    let stage = Stage::open("ignores-term,ignores-term");
    stage.wait_started();
    stage.wait_for_line("drafter-0.log", "deaf");
    stage.wait_for_line("drafter-1.log", "deaf");
    stage.send(Signal::SIGKILL);
    assert_eq!(stage.end().code, -9);
}

fn the_watchdog_ends_a_worker_that_got_no_death_signal() {
    let stage = Stage::open("no-death-signal");
    stage.wait_started();
    stage.wait_for_line("drafter-0.log", "clear");
    stage.send(Signal::SIGKILL);
    let log = stage.path("drafter-0.log");
    let keep = std::fs::File::open(&log).expect("the log");
    assert_eq!(stage.end().code, -9);
    let text = std::io::read_to_string(keep).expect("the log");
    assert!(text.contains("the launcher has ended"), "{text}");
}

fn nothing_is_inherited_that_is_not_on_the_list() {
    let stage = Stage::open("trains,trains,lists-descriptors");
    stage.wait_for_line("drafter-2.log", "extra says something");
    let text = std::fs::read_to_string(stage.path("drafter-2.log")).expect("the log");
    stage.send(Signal::SIGTERM);
    assert_eq!(stage.end().code, 75);
    let known = |line: &str| {
        ["/dev/null", ".log", "[pidfd]", "pipe:", "/extra", "/proc/"]
            .iter()
            .any(|part| line.contains(part))
    };
    let descriptors: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("descriptor "))
        .collect();
    let sockets = descriptors
        .iter()
        .filter(|line| line.contains("socket:"))
        .count();
    let pipes = descriptors
        .iter()
        .filter(|line| line.contains("pipe:"))
        .count();
    // Its own channel in both directions; its own liveness pipe.
    assert_eq!((sockets, pipes), (2, 1), "{text}");
    for line in descriptors {
        assert!(known(line) || line.contains("socket:"), "{line}");
    }
}

fn copied_logs_are_whole_lines_under_a_name() {
    let ended = Stage::open("chatty,chatty").end();
    assert_eq!(ended.code, 0);
    for rank in 0..2 {
        let prefix = format!("[drafter-{rank}] line ");
        let copied: Vec<&str> = ended
            .report
            .lines()
            .filter(|line| line.starts_with(&prefix))
            .collect();
        assert_eq!(copied.len(), 200);
        assert!(
            copied
                .iter()
                .all(|line| line.ends_with(&format!(" of drafter-{rank}")))
        );
    }
    assert!(
        ended
            .report
            .lines()
            .all(|line| line.starts_with("[drafter-")),
        "{}",
        ended.report
    );
}

type Test = (&'static str, fn());

macro_rules! tests {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name)),*] };
}

const TESTS: &[Test] = tests![
    all_work_done_is_0,
    a_killed_worker_is_named_and_its_signal_is_the_exit_code,
    a_worker_killed_from_outside_is_named,
    the_first_death_is_the_root_cause_and_not_who_complains_of_it,
    a_bus_error_has_a_hint_on_shared_memory,
    a_failing_worker_tells_why,
    a_panic_on_any_thread_ends_the_run,
    leaving_before_the_work_is_done_is_a_failure,
    a_death_before_hello_is_noticed_at_once,
    a_death_while_others_load_is_noticed,
    who_says_nothing_is_named,
    a_child_that_ignores_sigterm_does_not_hang_the_end,
    a_stopped_child_does_not_hang_the_end,
    a_stopped_child_is_the_one_named_when_the_stop_takes_too_long,
    the_first_ctrl_c_stops_in_order,
    the_second_ctrl_c_stops_now,
    ctrl_c_while_loading_leaves_nothing,
    requests_to_end_are_75,
    a_launcher_under_nohup_outlives_its_terminal,
    a_signal_to_every_process_of_the_job_is_an_orderly_stop,
    a_sigterm_to_one_worker_ends_it_and_the_run,
    no_worker_survives_a_killed_launcher,
    the_watchdog_ends_a_worker_that_got_no_death_signal,
    nothing_is_inherited_that_is_not_on_the_list,
    copied_logs_are_whole_lines_under_a_name,
];

/// Runs the tests whose names contain one of the words given, four at a time: they mostly wait.
fn drive() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let listing = words.iter().any(|word| word == "--list");
    let names: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let chosen: Vec<&Test> = TESTS
        .iter()
        .filter(|(name, _)| {
            names.is_empty() || names.iter().any(|word| name.contains(word.as_str()))
        })
        .collect();
    if listing {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((name, test)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let began = Instant::now();
                    let passed = std::panic::catch_unwind(test).is_ok();
                    let word = if passed { "ok" } else { "FAILED" };
                    println!(
                        "test {name} ... {word} ({:.1} s)",
                        began.elapsed().as_secs_f64()
                    );
                    if !passed {
                        failed.lock().expect("no panic holds it").push(*name);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no panic holds it");
    println!(
        "\ntest result: {} passed; {} failed {failed:?}",
        chosen.len() - failed.len(),
        failed.len()
    );
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(101)
    }
}
