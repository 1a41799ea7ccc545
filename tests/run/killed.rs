//! Processes that are killed, at any time.

use std::time::Duration;

use nix::sys::signal::Signal;
use slipstream::train::checkpoint::newest_checkpoint;

use crate::records::{each_unit_once, units_trained};
use crate::support::{ENDLESS, Scene};

/// No worker is left so long after its launcher was killed.
const ORPHANS: Duration = Duration::from_secs(5);
/// A run has ended so long after one of its workers was killed.
const END: Duration = Duration::from_secs(15);

#[test]
fn no_worker_outlives_a_launcher_killed_while_they_load() {
    // One of them is stopped as soon as it is seen, so that the others wait for it.
    for held in ["target-0", "drafter-1"] {
        let scene = Scene::new();
        let run = scene.run("run");
        let mut running = scene.start(scene.train(&run, "2:2", &ENDLESS));
        running.wait_for_worker(held).signal(Signal::SIGSTOP);
        running.wait_for("workers", |_| (scene.workers().len() == 4).then_some(()));
        running.signal(Signal::SIGKILL);
        scene.empties(ORPHANS);
        running.end();
        // What it left does not stand in the way, and is tidied up.
        let again = ["--overwrite", "--max-steps", "1"];
        scene.succeeds(scene.train(&run, "2:2", &again));
        scene.is_clean();
    }
}

#[test]
fn no_worker_outlives_a_launcher_killed_as_soon_as_there_is_one() {
    let scene = Scene::new();
    for rank in 0..3 {
        let run = scene.run(&format!("run-{rank}"));
        let mut running = scene.start(scene.train(&run, "3:1", &ENDLESS));
        running.wait_for_worker(&format!("target-{rank}"));
        running.signal(Signal::SIGKILL);
        scene.empties(ORPHANS);
        running.end();
    }
}

#[test]
fn no_worker_outlives_a_launcher_killed_while_they_train() {
    let scene = Scene::new();
    let run = scene.run("run");
    let mut running = scene.start(scene.train(&run, "2:2", &ENDLESS));
    running.wait_for_steps(&run, 5);
    // A stopped process cannot leave by itself.
    scene.workers()["drafter-0"].signal(Signal::SIGSTOP);
    running.signal(Signal::SIGKILL);
    scene.empties(ORPHANS);
    running.end();
}

/// Kills everything in the midst of `kills` saves, each at another moment, resumes each time, and comes to the end.
fn killed_while_saving(kills: u64, epochs: &str) {
    let scene = Scene::new();
    let run = scene.run("run");
    let more = [
        "--epochs",
        epochs,
        "--save-every",
        "1",
        "--keep",
        "2",
        "--eval-fraction",
        "0",
    ];
    let mut kept = None;
    let (mut cut, mut moment) = (0, 1_u64);
    for _ in 0..kills {
        let resume: &[&str] = if kept.is_some() { &["--resume"] } else { &[] };
        let mut running = scene.start(scene.train(&run, "2:2", &[&more[..], resume].concat()));
        running.wait_for("checkpoint", |_| {
            run.latest().filter(|&step| Some(step) > kept)
        });
        running.wait_for("a save", |_| run.is_saving().then_some(()));
        // A save takes milliseconds: the moments are spread over it, and beyond, by a multiplicative generator.
        moment = moment * 48_271 % 2_147_483_647;
        std::thread::sleep(Duration::from_micros(moment % 4_000));
        for process in scene.processes() {
            process.signal(Signal::SIGKILL);
        }
        scene.empties(ORPHANS);
        cut += u64::from(run.is_saving());
        let ended = running.end();
        if let Some(kept) = kept {
            let told = format!("step-{kept}, after step {kept}");
            assert!(ended.stderr.contains(&told), "{told}: {ended}");
        }
        let found = newest_checkpoint(&run.file("checkpoints")).expect("readable");
        let found = found.expect("there was one");
        assert!(
            found.passed_over.is_empty(),
            "every checkpoint in place is whole"
        );
        kept = Some(found.checkpoint.state.progress.step);
    }
    assert!(cut * 4 > kills, "{cut} of {kills} saves were cut short");
    scene.succeeds(scene.train(&run, "2:2", &[&more[..], &["--resume"]].concat()));
    scene.is_clean();
    each_unit_once(&run);
    let names = std::fs::read_dir(run.file("checkpoints")).expect("checkpoints");
    assert_eq!(
        names.count(),
        3,
        "two checkpoints and the link, no leftovers"
    );
}

/// Killed over and over while it saves, a run still trains each unit once.
#[test]
fn a_run_that_is_killed_again_and_again_comes_to_its_end() {
    killed_while_saving(6, "8");
}

/// The same at length: `cargo test --release --test run -- --ignored fifty_saves`.
#[test]
#[ignore = "takes minutes"]
fn fifty_saves_are_cut_short_and_nothing_is_lost() {
    killed_while_saving(50, "60");
}

fn a_killed_worker_is_the_cause(name: &str) {
    let scene = Scene::new();
    let run = scene.run("run");
    let more = [&ENDLESS[..], &["--save-every", "2"]].concat();
    let mut running = scene.start(scene.train(&run, "2:2", &more));
    running.wait_for_steps(&run, 5);
    let workers = scene.workers();
    let victim = &workers[name];
    victim.signal(Signal::SIGKILL);
    let ended = running.end();
    assert!(ended.took < END, "{:?}", ended.took);
    assert_eq!(ended.code(), Some(137), "{ended}");
    scene.is_clean();

    let (role, rank) = name.split_once('-').expect("ROLE-RANK");
    let block = ended.last_block();
    let cause = format!(
        "error: {role} {rank} (process {}) was killed by SIGKILL",
        victim.pid
    );
    assert!(block[0].starts_with(&cause), "{ended}");
    let log = run.file(&format!("logs/{name}.log")).display().to_string();
    assert!(block.iter().any(|line| line.ends_with(&log)), "{ended}");
    for (other, process) in workers.iter().filter(|(other, _)| *other != name) {
        let (role, rank) = other.split_once('-').expect("ROLE-RANK");
        let line = format!("  then: {role} {rank} (process {})", process.pid);
        let told = block
            .iter()
            .filter(|found| found.starts_with(&line))
            .count();
        assert_eq!(told, 1, "{line}: {ended}");
    }
    let resume = block[block.len() - 1];
    assert!(resume.contains("--resume"), "{ended}");

    let summary = run.summary();
    assert_eq!(summary["outcome"], "failed");
    let told = &summary["root_cause"];
    assert_eq!(told["role"], role);
    assert_eq!(told["rank"].to_string(), rank);
    assert_eq!(told["pid"], victim.pid);
    assert!(
        told["what"]
            .as_str()
            .is_some_and(|what| what.contains("SIGKILL"))
    );
    assert!(!run.file("run.json").exists());
    units_trained(&run);

    let last = (run.latest().expect("one was saved") + 2).to_string();
    let more = [&ENDLESS[..], &["--resume", "--max-steps", &last]].concat();
    scene.succeeds(scene.train(&run, "2:2", &more));
    units_trained(&run);
}

#[test]
fn a_killed_target_is_the_cause_that_is_named() {
    a_killed_worker_is_the_cause("target-1");
}

#[test]
fn a_killed_drafter_is_the_cause_that_is_named() {
    a_killed_worker_is_the_cause("drafter-0");
}
