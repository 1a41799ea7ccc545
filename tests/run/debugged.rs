//! Runs whose processes a debugger holds.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::records::each_unit_once;
use crate::support::{ENDLESS, Run, Scene};

/// gdb, unless it is not installed; then a line says so.
fn gdb(words: &[&str]) -> Option<Command> {
    let mut command = Command::new("gdb");
    let there = Command::new("gdb")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !there.is_ok_and(|status| status.success()) {
        eprintln!("gdb is not installed: nothing is tested");
        return None;
    }
    command
        .args(["-nx", "-batch", "-iex", "set debuginfod enabled off"])
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Some(command)
}

/// How long a debugger holds a drafter: seconds by default, longer when somebody has the time.
fn hold() -> u64 {
    let given = std::env::var("SLIPSTREAM_TEST_HOLD_SECONDS").ok();
    given.and_then(|text| text.parse().ok()).unwrap_or(4)
}

fn launcher_says(scene: &Scene, words: &[&str], run: &Run) -> String {
    let path = run.path.display().to_string();
    let words: Vec<&str> = words
        .iter()
        .map(|word| if *word == "RUN" { path.as_str() } else { word })
        .collect();
    scene.succeeds(scene.launcher(&words)).stdout
}

#[test]
fn a_drafter_held_by_gdb_inside_a_step_goes_on_and_the_run_is_right() {
    let pause = format!("shell sleep {}", hold());
    let Some(mut gdb) = gdb(&["-ex", &pause]) else {
        return;
    };
    let scene = Scene::new();
    let run = scene.run("run");
    let mut running = scene.start(scene.train(&run, "1:2", &["--epochs", "40"]));
    running.wait_for_steps(&run, 3);
    let drafter = running.wait_for_worker("drafter-1");
    let mut held = gdb
        .args(["-p", &drafter.pid.to_string()])
        .spawn()
        .expect("gdb runs");
    // Inside a step: the other drafter soon waits for it.
    running.wait_for("a verdict", |_| {
        let text = launcher_says(&scene, &["status", "RUN", "--json"], &run);
        let status: Value = serde_json::from_str(&text).ok()?;
        (status["diagnosis"]["verdict"] == "traced" && status["diagnosis"]["worker"] == "drafter-1")
            .then_some(())
    });
    let before = run.whole_lines("metrics.jsonl");
    assert!(held.wait().expect("gdb ends").success());
    let ended = running.end();
    assert_eq!(ended.code(), Some(0), "{ended}");
    assert!(run.whole_lines("metrics.jsonl") > before);
    each_unit_once(&run);
    assert_eq!(run.summary()["outcome"], "complete");
    scene.is_clean();
}

#[test]
fn stacks_and_attach_know_every_process() {
    let scene = Scene::new();
    let run = scene.run("run");
    let mut running = scene.start(scene.train(&run, "1:1", &ENDLESS));
    running.wait_for_steps(&run, 1);
    let drafter = running.wait_for_worker("drafter-0");
    let command = launcher_says(
        &scene,
        &[
            "attach",
            "RUN",
            "drafter:0",
            "--print",
            "--debugger",
            "mydb",
        ],
        &run,
    );
    assert_eq!(command, format!("mydb -p {}\n", drafter.pid));
    let path = run.path.display().to_string();
    let nobody = scene.play(scene.launcher(&["attach", &path, "drafter:7", "--print"]));
    assert_eq!(nobody.code(), Some(2));
    assert!(
        nobody.stderr.contains("drafter-7 is not in")
            && nobody.stderr.contains("target-0, drafter-0"),
        "{nobody}"
    );
    let text = launcher_says(&scene, &["stacks", "RUN"], &run);
    for name in ["launcher", "target-0", "drafter-0"] {
        assert!(text.contains(&format!("== {name} (process ")), "{text}");
    }
    if gdb(&[]).is_some() {
        // Frames with names of our own.
        assert!(text.contains("slipstream::"), "{text}");
    }
    running.signal(nix::sys::signal::Signal::SIGINT);
    assert_eq!(running.end().code(), Some(0));
}

#[test]
fn a_worker_waits_for_its_debugger() {
    let Some(mut gdb) = gdb(&[]) else {
        return;
    };
    let scene = Scene::new();
    let run = scene.run("run");
    let words = ["--wait-for-debugger", "drafter:0", "--max-steps", "5"];
    let mut running = scene.start(scene.train(&run, "1:1", &words));
    running.wait_for("the worker's word", |running| {
        running
            .said()
            .contains("drafter-0: waits for a debugger")
            .then_some(())
    });
    let drafter = running.wait_for_worker("drafter-0");
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        assert_eq!(run.whole_lines("metrics.jsonl"), 0);
        std::thread::sleep(Duration::from_millis(50));
    }
    // Attached for a moment, which is long enough to be seen.
    let held = gdb
        .args([
            "-ex",
            "continue&",
            "-ex",
            "shell sleep 1",
            "-ex",
            "interrupt",
        ])
        .args(["-p", &drafter.pid.to_string()])
        .status()
        .expect("gdb runs");
    assert!(held.success());
    let ended = running.end();
    assert_eq!(ended.code(), Some(0), "{ended}");
    assert_eq!(run.whole_lines("metrics.jsonl"), 5);
}

#[test]
fn a_worker_is_started_through_a_debugger() {
    if gdb(&[]).is_none() {
        return;
    }
    let scene = Scene::new();
    let run = scene.run("run");
    let prefix = "drafter:0=gdb -nx -batch -iex 'set debuginfod enabled off' -ex run --args";
    let words = ["--debugger-prefix", prefix, "--max-steps", "3"];
    let ended = scene.succeeds(scene.train(&run, "1:2", &words));
    // What gdb says comes to the launcher's own output.
    assert!(ended.stdout.contains("exited normally"), "{ended}");
    scene.is_clean();
    let wrong = scene.play(scene.train(
        &run,
        "1:1",
        &["--overwrite", "--debugger-prefix", "drafter:5=gdb"],
    ));
    assert_eq!(wrong.code(), Some(2));
    assert!(wrong.stderr.contains("there is no drafter-5"), "{wrong}");
}
