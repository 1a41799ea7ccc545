//! A disk that is full when a checkpoint is to be written. The limit of a file's size stands in for it: both
//! fail a write half-way.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use nix::sys::signal::Signal;
use slipstream::train::checkpoint::{Checkpoint, newest_checkpoint};

use crate::records::units_trained;
use crate::support::{ENDLESS, Process, Run, Scene};

/// The soft limit of `pid`, 0 being the caller.
fn limit_of(pid: i32, bytes: libc::rlim_t) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: prlimit reads the structure and writes nothing.
    let set = unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, &limit, std::ptr::null_mut()) };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A write beyond the limit is to fail, and not to end the process by a signal; workers inherit that.
fn survive_limits() {
    // SAFETY: signal takes plain numbers.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Files of the command, and of what it starts, cannot grow beyond `bytes`.
pub fn limit_files(command: &mut Command, bytes: u64) {
    let limit = move || {
        survive_limits();
        limit_of(0, bytes)
    };
    // SAFETY: the closure makes system calls only.
    unsafe {
        command.pre_exec(limit);
    }
}

/// More than the log grows, less than a checkpoint's weights.
const FULL: libc::rlim_t = 64 << 10;

/// A run that goes on for long and saves every second step, and its drafter.
fn saving<'a>(scene: &'a Scene, run: &Run) -> (crate::support::Running<'a>, Process) {
    let mut command = scene.train(run, "1:1", &[&ENDLESS[..], &["--save-every", "2"]].concat());
    limit_files(&mut command, libc::RLIM_INFINITY);
    let mut running = scene.start(command);
    running.wait_for("checkpoint", |_| run.latest());
    let drafter = running.wait_for_worker("drafter-0");
    (running, drafter)
}

#[test]
fn a_full_disk_leaves_the_run_alive_with_its_checkpoint() {
    let scene = Scene::new();
    let run = scene.run("run");
    let (mut running, drafter) = saving(&scene, &run);
    limit_of(drafter.pid, FULL).expect("a limit");
    running.wait_for("warning", |running| {
        running
            .said()
            .contains("checkpoint not written")
            .then_some(())
    });
    let (kept, steps) = (run.latest(), run.whole_lines("metrics.jsonl"));
    running.wait_for_steps(&run, steps + 10);
    assert_eq!(run.latest(), kept, "nothing can be saved");
    Checkpoint::open(&run.file("checkpoints/latest")).expect("it is whole");

    limit_of(drafter.pid, libc::RLIM_INFINITY).expect("no limit");
    running.wait_for("new checkpoint", |_| (run.latest() > kept).then_some(()));
    running.signal(Signal::SIGINT);
    let ended = running.end();
    assert_eq!(ended.code(), Some(0), "{ended}");
    scene.is_clean();
    assert_eq!(run.latest(), run.summary()["steps"].as_u64());
}

#[test]
fn a_last_checkpoint_that_cannot_be_written_is_the_cause_that_is_named() {
    let scene = Scene::new();
    let run = scene.run("run");
    let (running, drafter) = saving(&scene, &run);
    limit_of(drafter.pid, FULL).expect("a limit");
    running.signal(Signal::SIGINT);
    let ended = running.end();
    assert_eq!(ended.code(), Some(1), "{ended}");
    scene.is_clean();
    let block = ended.last_block();
    let begin = format!("error: drafter 0 (process {})", drafter.pid);
    assert!(block[0].starts_with(&begin), "{ended}");
    assert!(block[0].contains("checkpoint not written"), "{ended}");
    let kept = run.latest().expect("one was saved before");
    let told = format!("step-{kept}: the same command");
    assert!(block[block.len() - 1].contains(&told), "{told}: {ended}");
    let summary = run.summary();
    assert_eq!(summary["outcome"], "failed");
    assert_eq!(summary["root_cause"]["role"], "drafter");

    let found = newest_checkpoint(&run.file("checkpoints"))
        .expect("readable")
        .expect("one");
    assert_eq!(found.checkpoint.state.progress.step, kept);
    let last = (kept + 3).to_string();
    let more = ["--resume", "--max-steps", &last];
    let ended = scene.succeeds(scene.train(&run, "1:1", &[&ENDLESS[..], &more].concat()));
    assert!(
        ended
            .stderr
            .contains(&format!("step-{kept}, after step {kept}")),
        "{ended}"
    );
    assert_eq!(run.latest(), Some(kept + 3));
    units_trained(&run);
}
