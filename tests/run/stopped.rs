//! Runs that are stopped in an orderly way, and those that refuse to be.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::records::{each_unit_once, trained, units_trained};
use crate::support::{ENDLESS, Run, Scene};

/// Saved at its last step: that is what `latest` and the summary say.
fn is_saved(run: &Run) {
    let summary = run.summary();
    let steps = trained(run).len() as u64;
    assert_eq!(summary["outcome"], "stopped");
    assert_eq!(summary["steps"], steps);
    assert_eq!(summary["units_done"], units_trained(run).len());
    assert_eq!(run.latest(), Some(steps));
    let path = run.file(&format!("checkpoints/step-{steps}"));
    assert_eq!(summary["checkpoint"], path.display().to_string());
    assert!(summary.get("root_cause").is_none());
}

fn stops(signal: Signal, code: i32, cpu: &str) {
    let scene = Scene::new();
    let run = scene.run("run");
    // An end that is far away at one step's pace, and near enough to be reached after resuming.
    let more = ["--epochs", "30", "--eval-fraction", "0"];
    let mut running = scene.start(scene.train(&run, cpu, &more));
    running.wait_for_steps(&run, 5);
    running.signal(signal);
    let ended = running.end();
    assert_eq!(ended.code(), Some(code), "{ended}");
    scene.is_clean();
    assert!(
        ended
            .stderr
            .contains(&format!("stopping ({})", words(signal))),
        "{ended}"
    );
    is_saved(&run);

    let resume = [&more[..], &["--resume"]].concat();
    scene.succeeds(scene.train(&run, "2:2", &resume));
    each_unit_once(&run);
}

fn words(signal: Signal) -> &'static str {
    match signal {
        Signal::SIGINT => "Ctrl-C",
        other => other.as_str(),
    }
}

#[test]
fn the_first_ctrl_c_saves_and_is_a_success() {
    stops(Signal::SIGINT, 0, "2:2");
}

#[test]
fn sigterm_saves_and_asks_to_be_continued() {
    stops(Signal::SIGTERM, 75, "1:3");
}

#[test]
fn sigusr1_saves_and_asks_to_be_continued() {
    stops(Signal::SIGUSR1, 75, "3:1");
}

#[test]
fn a_time_limit_asks_to_be_continued() {
    let scene = Scene::new();
    let run = scene.run("run");
    let more = [&ENDLESS[..], &["--time-limit", "3"]].concat();
    let ended = scene.play(scene.train(&run, "1:1", &more));
    assert_eq!(ended.code(), Some(75), "{ended}");
    scene.is_clean();
    assert_eq!(run.summary()["outcome"], "stopped");
    assert!(
        run.summary()["wall_s"]
            .as_f64()
            .is_some_and(|wall| wall >= 3.0)
    );
}

#[test]
fn the_second_ctrl_c_ends_even_what_is_held() {
    for held in ["target-0", "drafter-1"] {
        let scene = Scene::new();
        let run = scene.run("run");
        let mut running = scene.start(scene.train(&run, "2:2", &ENDLESS));
        running.wait_for_steps(&run, 3);
        scene.workers()[held].signal(Signal::SIGSTOP);
        running.signal(Signal::SIGINT);
        running.wait_for("word of stopping", |running| {
            running.said().contains("stopping (Ctrl-C)").then_some(())
        });
        assert!(scene.workers().contains_key(held), "the first one waits");
        running.signal(Signal::SIGINT);
        let ended = running.end();
        assert_eq!(ended.code(), Some(130), "{ended}");
        // Two seconds to end by themselves, then SIGKILL.
        assert!(ended.took < Duration::from_secs(15), "{:?}", ended.took);
        scene.is_clean();
        units_trained(&run);
    }
}

/// As soon as there is a worker; usually all of them still load, and then there is nothing to save.
#[test]
fn ctrl_c_at_the_start_leaves_nothing() {
    let scene = Scene::new();
    for first in ["target-0", "target-1", "drafter-0"] {
        let run = scene.run(first);
        let mut running = scene.start(scene.train(&run, "2:1", &ENDLESS));
        running.wait_for_worker(first);
        running.signal(Signal::SIGINT);
        let ended = running.end();
        scene.is_clean();
        assert!(!run.file("run.json").exists());
        match ended.code() {
            Some(0) => is_saved(&run),
            code => assert_eq!((code, run.latest()), (Some(130), None), "{ended}"),
        }
    }
}
