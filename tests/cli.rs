//! The command line of the built launcher: what it refuses, in which words, and with which exit code.

use std::path::Path;
use std::process::{Command, Output};

fn launcher(words: &[&str]) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let output = Command::new(env!("CARGO_BIN_EXE_launcher"))
        .args(words)
        .current_dir(folder.path())
        .output()
        .expect("the launcher runs");
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .expect("a folder")
        .collect();
    assert!(
        left.is_empty(),
        "nothing is left where it was started: {left:?}"
    );
    output
}

/// Exit code 2, and exactly these lines on standard error.
fn refuses(words: &[&str], lines: &[&str]) {
    let output = launcher(words);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
    assert_eq!(text.lines().collect::<Vec<_>>(), lines, "{words:?}");
    assert!(output.stdout.is_empty());
}

#[test]
fn each_wrong_option_is_one_line() {
    refuses(
        &[
            "--lr",
            "0",
            "--cpu",
            "0:2",
            "--anchors",
            "many",
            "--schedule",
            "step",
        ],
        &[
            "error: --cpu: `0:2` is not TARGETS:DRAFTERS, two counts from 1 to 4096 such as 2:2",
            "error: --anchors: `many` is not a whole number",
            "error: --lr: 0 is out of range (above 0 to 1)",
            "error: --schedule: `step` is not one of constant, cosine, wsd",
        ],
    );
    refuses(
        &["--gpus", "7-0"],
        &["error: --gpus: `7-0` runs backwards; write 0-7"],
    );
    refuses(&["--gpus", "0,0"], &["error: --gpus: GPU 0 is named twice"]);
    refuses(
        &["--gpus", "0", "--cpu", "1:1"],
        &["error: --gpus: and --cpu exclude each other"],
    );
    refuses(
        &["--config", "/no/such.toml"],
        &["error: --config /no/such.toml: No such file or directory (os error 2)"],
    );
}

#[test]
fn files_that_are_missing_are_named_before_anything_starts() {
    refuses(
        &[
            "--target-model",
            "/no/model",
            "--data",
            "/no/data.jsonl",
            "--output",
            "out",
        ],
        &[
            "error: /no/data.jsonl: no such file or folder; check the path given to --data",
            "error: /no/model: no such file or folder; check the path given to --target-model",
        ],
    );
}

#[test]
fn an_unknown_flag_is_refused_with_its_neighbour() {
    let output = launcher(&["--epoch", "3"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("'--epoch'") && text.contains("'--epochs'"),
        "{text}"
    );
}

#[test]
fn help_and_version_are_answers_and_not_errors() {
    let output = launcher(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    for heading in [
        "Places:",
        "Target:",
        "Drafter:",
        "Data:",
        "Training:",
        "Loss:",
        "Ring:",
        "Output:",
    ] {
        assert!(text.contains(heading), "{heading}");
    }
    assert!(text.contains("Exit codes:"));
    let output = launcher(&["--version"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("(commit ") && text.contains("features: cpu"),
        "{text}"
    );
}

#[test]
fn workers_say_who_starts_them() {
    for program in [
        env!("CARGO_BIN_EXE_target_worker"),
        env!("CARGO_BIN_EXE_drafter_worker"),
    ] {
        let output = Command::new(program).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8_lossy(&output.stderr);
        let name = Path::new(program)
            .file_name()
            .expect("a name")
            .to_string_lossy();
        assert!(
            text.starts_with(&format!("error: {name} is started by the launcher")),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1);
        let output = Command::new(program)
            .arg("--version")
            .output()
            .expect("it runs");
        assert!(output.status.success());
        assert!(String::from_utf8_lossy(&output.stdout).starts_with(&format!("{name} ")));
    }
}

#[test]
fn a_plan_is_made_without_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_launcher"))
            .args(words)
            .env("SLIPSTREAM_CACHE", folder.path().join("cache"))
            .current_dir(folder.path())
            .output()
            .expect("the launcher runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{text}");
        text
    };
    let text = plan(&["plan", "--cpu", "1:1"]);
    for name in [
        "target ",
        "drafter ",
        "work ",
        "ring ",
        "best split",
        "time ",
    ] {
        let there = text.lines().any(|line| line.starts_with(name));
        assert!(there, "{name}: {text}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&plan(&["plan", "--cpu", "1:2", "--json"])).expect("JSON");
    assert_eq!(
        (&json["targets"]["workers"], &json["drafters"]["workers"]),
        (&1.into(), &2.into())
    );
    assert!(
        json["targets"]["operations_per_s"].as_f64() > Some(1e8),
        "{json}"
    );
    assert!(
        json["slots"].as_u64() >= json["slots_needed"].as_u64(),
        "{json}"
    );
    let slots = json["slots"].as_u64().zip(json["slot_bytes"].as_u64());
    let payload = slots.map(|(slots, bytes)| slots * bytes);
    assert!(json["shared_bytes"].as_u64() > payload, "{json}");
    assert!(
        json["seconds"].as_f64() > Some(0.0) && json["steps"].as_u64() > Some(100),
        "{json}"
    );
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .expect("a folder")
        .flatten()
        .collect();
    assert_eq!(left.len(), 1, "only the cache is left: {left:?}");
    refuses(
        &["plan", "--lr", "0"],
        &["error: --lr: 0 is out of range (above 0 to 1)"],
    );
}

#[test]
fn the_doctor_finds_this_machine_fit() {
    let output = launcher(&["doctor"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let graded = |line: &str| line.starts_with("ok ") || line.starts_with("warning ");
    assert!(text.lines().all(graded), "{text}");
    assert!(text.contains("output disk"), "{text}");
}

#[test]
fn commands_that_look_refuse_what_is_no_run() {
    for command in ["top", "status", "stacks", "report"] {
        refuses(
            &[command, "/proc/self"],
            &[
                "error: /proc/self holds no run (no plan.toml and no run.json); name a run's output directory",
            ],
        );
    }
    refuses(
        &["attach", "someone"],
        &["error: attach: `someone` is not ROLE:RANK such as drafter:1"],
    );
    refuses(
        &["--metrics-port", "here", "--wait-for-debugger", "who"],
        &[
            "error: --metrics-port: `here` is no port such as 9400 and no ADDRESS:PORT such as 0.0.0.0:9400",
            "error: --wait-for-debugger: `who` is not ROLE:RANK such as drafter:1, and not `all`",
        ],
    );
}
