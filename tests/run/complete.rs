//! A run to the end of its data, and everything it leaves behind.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::records::{Packed, each_unit_once, trained};
use crate::support::{ENDLESS, ROWS, Run, Scene, rows};

/// Held out of a small set.
const HELD_OUT: usize = 16;
/// Anchors of a small run's step.
const BATCH: u64 = 96;

fn keys(value: &Value) -> BTreeSet<&str> {
    let object = value.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}

fn numbers(lines: &[Value], name: &str) -> Vec<f64> {
    let number = |line: &Value| line[name].as_f64().expect("a number");
    lines.iter().map(number).collect()
}

/// `target-0`, … of T:D.
fn names(targets: usize, drafters: usize) -> BTreeSet<String> {
    let targets = (0..targets).map(|rank| format!("target-{rank}"));
    let drafters = (0..drafters).map(|rank| format!("drafter-{rank}"));
    targets.chain(drafters).collect()
}

/// Steps are as large as was asked for, whoever trained what.
fn check_steps(run: &Run, drafters: usize) {
    let packed = Packed::of(run);
    let steps = trained(run);
    for step in &steps {
        let ranks: Vec<u64> = step.units.keys().copied().collect();
        assert!(ranks.into_iter().eq(0..drafters as u64), "every member");
        let anchors: Vec<u64> = step.all().map(|g| packed.unit(g).anchors).collect();
        let sum: u64 = anchors.iter().sum();
        let last = step.step == steps.len() as u64;
        assert!(last || sum >= BATCH, "step {} is too small", step.step);
        let largest = anchors.iter().max().expect("a step has units");
        assert!(sum - largest < BATCH, "step {} is too large", step.step);
    }
}

fn check_metrics(run: &Run, workers: &BTreeSet<String>, slots: f64) {
    let packed = Packed::of(run);
    let steps = trained(run);
    let lines = run.lines("metrics.jsonl");
    assert_eq!(lines.len(), steps.len());
    for (line, step) in lines.iter().zip(&steps) {
        let fields = [
            "step",
            "time_s",
            "loss",
            "block_accepted_length",
            "position_accuracy",
            "lr",
            "grad_norm",
            "tokens",
            "target_tokens_per_s",
            "drafter_tokens_per_s",
            "ring_ready",
            "ring_free",
            "busy",
        ];
        assert_eq!(keys(line), BTreeSet::from(fields));
        assert_eq!(line["step"], step.step);
        let tokens: u64 = step.all().map(|g| packed.unit(g).tokens).sum();
        assert_eq!(line["tokens"], tokens);
        let busy = line["busy"].as_object().expect("an object");
        assert_eq!(busy.keys().cloned().collect::<BTreeSet<_>>(), *workers);
        let share = |value: &Value| (0.0..=1.0).contains(&value.as_f64().expect("a number"));
        assert!(busy.values().all(share), "{busy:?}");
        // Blocks of four: the anchor, which is given, and three guesses.
        let guessed = line["position_accuracy"].as_array().expect("an array");
        assert_eq!(guessed.len(), 3);
        assert!(guessed.iter().all(share), "{guessed:?}");
        let number = |name: &str| line[name].as_f64().expect("a number");
        assert!(number("ring_ready") + number("ring_free") <= slots);
        assert!((1.0..=4.0).contains(&number("block_accepted_length")));
        assert!(number("loss") > 0.0 && number("grad_norm") > 0.0 && number("lr") >= 0.0);
    }
    assert!(numbers(&lines, "time_s").is_sorted());
    assert!(numbers(&lines, "lr").iter().any(|&lr| lr > 1e-4));
    let loss = numbers(&lines, "loss");
    assert!(loss[loss.len() - 1] < loss[0], "it learns: {loss:?}");
}

fn check_summary(run: &Run, workers: &BTreeSet<String>, epochs: u64) {
    let packed = Packed::of(run);
    let summary = run.summary();
    let fields = [
        "outcome",
        "steps",
        "epochs",
        "units_total",
        "units_done",
        "documents",
        "tokens",
        "skipped",
        "wall_s",
        "accepted_length",
        "restarts",
        "quarantined",
        "peak_memory",
        "checkpoint",
    ];
    let mut found = keys(&summary);
    // Added for other readers over time.
    found.retain(|key| fields.contains(key) || *key == "root_cause");
    assert_eq!(found, BTreeSet::from(fields));
    let steps = trained(run).len();
    let documents: usize = packed.units.iter().map(|unit| unit.documents.len()).sum();
    let tokens: u64 = packed.units.iter().map(|unit| unit.tokens).sum();
    assert_eq!(summary["outcome"], "complete");
    assert_eq!(summary["steps"], steps);
    assert_eq!(summary["epochs"], epochs);
    assert_eq!(summary["units_total"], packed.total());
    assert_eq!(summary["units_done"], packed.total());
    assert_eq!(summary["documents"], documents);
    assert_eq!(summary["tokens"], tokens * epochs);
    assert_eq!(summary["skipped"], serde_json::json!({"empty": 1}));
    assert_eq!(summary["restarts"], 0);
    assert_eq!(summary["quarantined"], serde_json::json!([]));
    assert!(summary["wall_s"].as_f64().expect("a number") > 0.0);
    for when in ["before", "after"] {
        let length = summary["accepted_length"][when].as_f64().expect("a number");
        assert!((1.0..=4.0).contains(&length), "{length} {when}");
    }
    let memory: BTreeMap<String, u64> =
        serde_json::from_value(summary["peak_memory"].clone()).expect("bytes by worker");
    assert_eq!(memory.keys().cloned().collect::<BTreeSet<_>>(), *workers);
    assert!(memory.values().all(|&bytes| bytes > 1 << 20), "{memory:?}");
    let checkpoint = Path::new(summary["checkpoint"].as_str().expect("a path"));
    assert_eq!(
        checkpoint,
        run.file(&format!("checkpoints/step-{steps}")),
        "the last step's"
    );
    assert_eq!(run.latest(), Some(steps as u64));
}

/// One run of `cpu` places.
fn trains_each_unit_once(targets: usize, drafters: usize) {
    let scene = Scene::new();
    scene.write("data.jsonl", rows(0, ROWS) + "{\"messages\":[]}\n");
    let (run, epochs) = (scene.run("run"), 2);
    let workers = names(targets, drafters);
    let command = scene.train(
        &run,
        &format!("{targets}:{drafters}"),
        &["--epochs", "2", "--lr", "3e-3"],
    );
    let ended = scene.succeeds(command);
    scene.is_clean();
    assert!(!run.file("run.json").exists());

    each_unit_once(&run);
    let packed = Packed::of(&run);
    let documents: Vec<u64> = packed
        .units
        .iter()
        .flat_map(|unit| unit.documents.clone())
        .collect();
    let distinct: BTreeSet<u64> = documents.iter().copied().collect();
    assert_eq!(
        (documents.len(), distinct.len()),
        (ROWS - HELD_OUT, ROWS - HELD_OUT)
    );
    check_steps(&run, drafters);
    let slots = started_slots(&ended.stderr);
    check_metrics(&run, &workers, slots);
    check_summary(&run, &workers, epochs);

    let logs: BTreeSet<String> = std::fs::read_dir(run.file("logs"))
        .expect("logs")
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let mut wanted: BTreeSet<String> = workers.iter().map(|name| format!("{name}.log")).collect();
    wanted.insert("launcher-0.log".to_owned());
    assert_eq!(logs, wanted);
    let plan = std::fs::read_to_string(run.file("plan.toml")).expect("plan.toml");
    let plan: toml::Table = plan.parse().expect("TOML");
    assert_eq!(plan["places"].as_array().map(Vec::len), Some(workers.len()));
}

/// The size of the ring, from what is said at the start: `… 10 slots of …`.
fn started_slots(said: &str) -> f64 {
    let words: Vec<&str> = said.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "slots");
    let count = at.and_then(|at| words[at - 1].parse().ok());
    count.unwrap_or_else(|| panic!("the ring's slots are not told: {said}"))
}

#[test]
fn two_targets_and_two_drafters_train_each_unit_once() {
    trains_each_unit_once(2, 2);
}

#[test]
fn one_target_and_three_drafters_train_each_unit_once() {
    trains_each_unit_once(1, 3);
}

#[test]
fn three_targets_and_one_drafter_train_each_unit_once() {
    trains_each_unit_once(3, 1);
}

#[test]
fn a_run_that_goes_on_can_be_found_and_shares_memory_without_a_name() {
    let scene = Scene::new();
    let run = scene.run("run");
    let mut running = scene.start(scene.train(&run, "2:1", &ENDLESS));
    running.wait_for_steps(&run, 2);
    let workers: BTreeSet<String> = scene.workers().into_keys().collect();
    assert_eq!(workers, names(2, 1));
    let text = std::fs::read_to_string(run.file("run.json")).expect("run.json");
    let found: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(found["pid"], running.pid());
    assert!(found["start_time"].as_u64().is_some_and(|at| at > 0));
    let number = &found["fd"];
    let memory = std::fs::read_link(format!("/proc/{}/fd/{number}", running.pid()));
    let memory = memory.expect("the descriptor").display().to_string();
    assert!(memory.starts_with("/memfd:"), "{memory}");
    for process in scene.processes() {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.pid));
        let maps = maps.expect("it runs");
        assert!(
            maps.contains("/memfd:") && !maps.contains("/dev/shm"),
            "{process:?}"
        );
    }
    let second = scene.play(scene.train(&run, "1:1", &["--overwrite"]));
    assert_eq!(second.code(), Some(2), "{second}");
    assert!(second.stderr.contains("a run is going on"), "{second}");
    running.signal(Signal::SIGINT);
    assert_eq!(running.end().code(), Some(0));
    scene.is_clean();
}

#[test]
fn one_row_is_enough_for_three_drafters() {
    let scene = Scene::with_rows(1);
    let run = scene.run("run");
    scene.succeeds(scene.train(&run, "2:3", &[]));
    scene.is_clean();
    each_unit_once(&run);
    let summary = run.summary();
    assert_eq!(
        (&summary["outcome"], &summary["steps"]),
        (&"complete".into(), &1.into())
    );
}

/// Soft labels, checked payloads, a window, evaluations and checkpoints on the way, a separate held-out file.
#[test]
fn a_run_may_use_everything_at_once() {
    let scene = Scene::new();
    let run = scene.run("run");
    let held_out = scene
        .write("held-out.jsonl", rows(ROWS, 5))
        .display()
        .to_string();
    let more = [
        "--use-soft-labels",
        "--check-payload",
        "--sliding-window",
        "8",
        "--eval-every",
        "4",
        "--save-every",
        "3",
        "--keep",
        "2",
        "--show",
        "drafter:1",
        "--eval-data",
        &held_out,
    ];
    let ended = scene.succeeds(scene.train(&run, "2:2", &more));
    scene.is_clean();
    each_unit_once(&run);
    check_steps(&run, 2);
    let documents: usize = Packed::of(&run)
        .units
        .iter()
        .map(|unit| unit.documents.len())
        .sum();
    assert_eq!(documents, ROWS, "nothing is held out of the data itself");
    let steps = trained(&run).len();
    for when in [
        "before training",
        "after step 4",
        &format!("after step {steps}"),
    ] {
        let line = format!("held-out accepted length {when}: ");
        assert!(ended.stderr.contains(&line), "{when}: {ended}");
    }
    assert!(ended.stderr.contains("[drafter-1] "), "{ended}");
    let kept: BTreeSet<String> = std::fs::read_dir(run.file("checkpoints"))
        .expect("checkpoints")
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    // Saved are every third step and those that were evaluated; two are kept, and the best.
    let before = (1..steps).rfind(|step| step % 3 == 0 || step % 4 == 0);
    let best = std::fs::read_link(run.file("checkpoints/best")).expect("a link");
    let wanted = [
        format!("step-{}", before.expect("there are more than three steps")),
        format!("step-{steps}"),
        best.to_str().expect("step-N").to_owned(),
        "latest".to_owned(),
        "best".to_owned(),
        "best.json".to_owned(),
    ];
    assert_eq!(kept, BTreeSet::from(wanted));
}
