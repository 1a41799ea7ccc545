//! A run that was stopped goes on as if it had not been, and only where it may.

use std::collections::BTreeMap;

use crate::records::{difference, each_unit_once, floats, trained, units_trained};
use crate::support::{Run, Scene};

fn masters(run: &Run) -> BTreeMap<String, Vec<f32>> {
    floats(&run.checkpoint_file("training.safetensors"), "master.")
}

/// Every norm weight has left 1.0, where all of them begin.
fn norms_have_moved(run: &Run) {
    let norms: Vec<_> = masters(run)
        .into_iter()
        .filter(|(name, _)| name.contains("norm"))
        .collect();
    assert!(norms.len() >= 5, "{} norms", norms.len());
    for (name, values) in norms {
        let moved = values.iter().filter(|&&value| value != 1.0).count();
        assert!(
            moved * 10 > values.len() * 9,
            "{name}: {moved} of {}",
            values.len()
        );
    }
}

#[test]
fn stopped_and_resumed_is_the_same_to_the_bit() {
    let scene = Scene::new();
    let (straight, halves) = (scene.run("straight"), scene.run("halves"));
    let steps: [&[&str]; 5] = [
        &["--max-steps", "3"],
        // Nothing is left to do up to there.
        &["--max-steps", "3", "--resume"],
        &["--max-steps", "2", "--resume"],
        &["--max-steps", "5", "--resume"],
        &["--resume"],
    ];
    scene.succeeds(scene.train(&straight, "1:1", &[]));
    let mut before = None;
    for (more, wanted) in steps.iter().zip([3, 3, 3, 5, 7]) {
        let ended = scene.succeeds(scene.train(&halves, "1:1", more));
        assert_eq!(halves.latest(), Some(wanted), "{more:?}");
        assert_eq!(trained(&halves).len() as u64, wanted, "{more:?}");
        let outcome = if wanted == 7 { "complete" } else { "stopped" };
        assert_eq!(halves.summary()["outcome"], outcome, "{more:?}");
        assert_eq!(halves.summary()["steps"], wanted);
        if let Some(before) = before.replace(wanted) {
            let line = format!("step-{before}, after step {before}");
            assert!(ended.stderr.contains(&line), "{line}: {ended}");
        }
        norms_have_moved(&halves);
        scene.is_clean();
    }
    assert_eq!(straight.latest(), Some(7));
    for name in ["model.safetensors", "training.safetensors", "ledger.bin"] {
        let same = straight.checkpoint_file(name) == halves.checkpoint_file(name);
        assert!(same, "{name} differs");
    }
    assert_eq!(trained(&straight), trained(&halves));
    let told = |run: &Run| {
        let line = |line: serde_json::Value| {
            ["step", "loss", "lr", "grad_norm", "tokens"].map(|name| line[name].to_string())
        };
        run.lines("metrics.jsonl")
            .into_iter()
            .map(line)
            .collect::<Vec<_>>()
    };
    assert_eq!(told(&straight), told(&halves));
    for name in ["tokens", "units_done", "units_total"] {
        assert_eq!(straight.summary()[name], halves.summary()[name], "{name}");
    }
    let early: Run = scene.run("early");
    scene.succeeds(scene.train(&early, "1:1", &["--max-steps", "3"]));
    let (early, late) = (masters(&early), masters(&halves));
    for (name, values) in &early {
        assert!(
            difference(&late[name], values) > 1e-6,
            "{name} moves after resuming too"
        );
    }
}

#[test]
fn another_number_of_drafters_goes_on_with_the_units_that_are_left() {
    let scene = Scene::new();
    let stopped = scene.run("stopped");
    scene.succeeds(scene.train(&stopped, "2:2", &["--max-steps", "3"]));
    let done = units_trained(&stopped);
    for cpu in ["2:2", "2:1", "1:3"] {
        let run = scene.run(&cpu.replace(':', "-"));
        stopped.copy_to(&run);
        scene.succeeds(scene.train(&run, cpu, &["--resume"]));
        scene.is_clean();
        each_unit_once(&run);
        let first: Vec<_> = trained(&run).into_iter().take(3).collect();
        assert_eq!(first, trained(&stopped), "{cpu}: what was trained stands");
        assert!(
            first
                .iter()
                .flat_map(|step| step.all())
                .all(|unit| done.contains(&unit))
        );
        let summary = run.summary();
        assert_eq!(summary["outcome"], "complete");
        assert_eq!(summary["units_done"], summary["units_total"]);
    }
}

#[test]
fn steps_behind_the_checkpoint_are_cut_and_trained_again() {
    let scene = Scene::new();
    let run = scene.run("run");
    let save = ["--save-every", "2", "--max-steps", "5"];
    scene.succeeds(scene.train(&run, "1:1", &save));
    assert_eq!(run.latest(), Some(5));
    // The newest checkpoint is damaged as a bad disk would; the one before it is whole.
    let weights = run.file("checkpoints/step-5/training.safetensors");
    let bytes = std::fs::read(&weights).expect("weights");
    scene.write(
        "run/checkpoints/step-5/training.safetensors",
        &bytes[..bytes.len() / 2],
    );
    let ended = scene.succeeds(scene.train(&run, "1:1", &["--resume"]));
    assert!(
        ended.stderr.contains("step-5"),
        "what was passed over: {ended}"
    );
    assert!(ended.stderr.contains("step-4, after step 4"), "{ended}");
    each_unit_once(&run);
    let straight = scene.run("straight");
    scene.succeeds(scene.train(&straight, "1:1", &[]));
    assert!(
        straight.checkpoint_file("model.safetensors") == run.checkpoint_file("model.safetensors")
    );
}

#[test]
fn another_plan_is_refused_with_what_differs() {
    let scene = Scene::new();
    let run = scene.run("run");
    scene.succeeds(scene.train(&run, "1:1", &["--max-steps", "2"]));
    let before = std::fs::read(run.file("trained.jsonl")).expect("trained.jsonl");
    let other = scene
        .write("other.jsonl", crate::support::rows(0, 90))
        .display()
        .to_string();
    let plans: [(&[&str], &[&str]); 6] = [
        (&["--lr", "1e-3"], &["optimizer.lr"]),
        (&["--seed", "3", "--epochs", "2"], &["seed", "epochs"]),
        (&["--anchors", "7"], &["batch.anchors"]),
        (&["--data", &other], &["data.fingerprint"]),
        (&["--gamma", "3"], &["loss.gamma"]),
        (&["--draft-layers", "2"], &["drafter.layers"]),
    ];
    for (more, names) in plans {
        let ended = scene.play(scene.train(&run, "1:1", &[more, &["--resume"]].concat()));
        assert_eq!(ended.code(), Some(2), "{more:?}: {ended}");
        for name in names {
            let line = format!("error: {name}: ");
            let told = ended
                .stderr
                .lines()
                .any(|l| l.starts_with(&line) && l.contains(" then, "));
            assert!(told, "{name}: {ended}");
        }
        assert!(scene.processes().is_empty() && !run.file("run.json").exists());
        let after = std::fs::read(run.file("trained.jsonl")).expect("trained.jsonl");
        assert_eq!(before, after, "a refusal changes nothing");
    }
    // What does not change the outcome may differ.
    let more = [
        "--resume",
        "--save-every",
        "2",
        "--check-payload",
        "--ring-slots",
        "40",
        "--quiet",
    ];
    scene.succeeds(scene.train(&run, "1:2", &more));
    each_unit_once(&run);
}

#[test]
fn nothing_to_resume_from_is_refused() {
    let scene = Scene::new();
    let run = scene.run("run");
    let ended = scene.play(scene.train(&run, "1:1", &["--resume"]));
    assert_eq!(ended.code(), Some(2), "{ended}");
    assert!(
        ended.stderr.contains("holds no run to go on with"),
        "{ended}"
    );
    scene.succeeds(scene.train(&run, "1:1", &["--max-steps", "1"]));
    std::fs::remove_dir_all(run.file("checkpoints")).expect("removed");
    let ended = scene.play(scene.train(&run, "1:1", &["--resume"]));
    assert_eq!(ended.code(), Some(2), "{ended}");
    assert!(
        ended.stderr.contains("holds no checkpoint to resume from"),
        "{ended}"
    );
}

#[test]
fn an_overwritten_run_stays_until_the_new_one_can_begin() {
    let scene = Scene::new();
    let run = scene.run("run");
    scene.succeeds(scene.train(&run, "1:1", &["--max-steps", "2"]));
    let model = run.checkpoint_file("model.safetensors");
    let broken = scene
        .write("broken.jsonl", "{\n".repeat(9))
        .display()
        .to_string();
    for refused in [
        ["--data", &broken],
        ["--slot-tokens", "9"],
        ["--ring-slots", "2"],
    ] {
        let ended =
            scene.play(scene.train(&run, "1:1", &[&refused[..], &["--overwrite"]].concat()));
        assert_eq!(ended.code(), Some(2), "{ended}");
        assert!(
            model == run.checkpoint_file("model.safetensors"),
            "{refused:?}"
        );
    }
    let ended = scene.succeeds(scene.train(&run, "1:1", &["--overwrite", "--seed", "5"]));
    assert!(!ended.stderr.contains("resuming"), "{ended}");
    each_unit_once(&run);
    assert!(!run.file("checkpoints/step-2").exists());
}

#[test]
fn a_run_may_begin_with_the_weights_of_another() {
    let scene = Scene::new();
    let (first, second) = (scene.run("first"), scene.run("second"));
    scene.succeeds(scene.train(&first, "1:1", &["--epochs", "4", "--lr", "3e-3"]));
    let from = first.file("checkpoints/latest").display().to_string();
    scene.succeeds(scene.train(&second, "1:1", &["--init-from", &from, "--seed", "9"]));
    each_unit_once(&second);
    let loss = |run: &Run, step: usize| {
        run.lines("metrics.jsonl")[step]["loss"]
            .as_f64()
            .expect("a loss")
    };
    let last = first.lines("metrics.jsonl").len() - 1;
    assert!(
        loss(&second, 0) < 0.7 * loss(&first, 0),
        "{} {}",
        loss(&second, 0),
        loss(&first, 0)
    );
    assert!(
        loss(&second, 0) < 1.5 * loss(&first, last),
        "{} {}",
        loss(&second, 0),
        loss(&first, last)
    );
    norms_have_moved(&second);
}
