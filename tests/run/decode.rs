//! A drafter that has learnt something: it decodes as its run's figures say.

use std::sync::OnceLock;

use serde_json::Value;

use crate::records::each_unit_once;
use crate::support::{Run, Scene, asset};

/// Rows that it learns from, its own held-out ones included.
const LEARNT: usize = 400;

/// One run that all tests of this file look at.
fn learnt() -> (&'static Scene, Run) {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    let scene = SCENE.get_or_init(|| {
        let scene = Scene::with_rows(LEARNT);
        let run = scene.run("run");
        let more = [
            ("--epochs", "3"),
            ("--block-size", "8"),
            ("--slot-tokens", "512"),
            ("--unit-anchors", "48"),
            ("--batch-anchors", "48"),
            ("--anchors", "16"),
            ("--lr", "5e-3"),
        ];
        let more: Vec<&str> = more
            .iter()
            .flat_map(|&(name, value)| [name, value])
            .collect();
        scene.succeeds(scene.train(&run, "1:1", &more));
        each_unit_once(&run);
        scene
    });
    (scene, scene.run("run"))
}

fn accepted(value: &Value) -> f64 {
    value.as_f64().expect("an accepted length")
}

#[test]
fn decoding_accepts_what_the_run_said_and_changes_no_token() {
    let (scene, run) = learnt();
    let summary = run.summary();
    let length = &summary["accepted_length"];
    let (before, after) = (accepted(&length["before"]), accepted(&length["after"]));
    assert!(before < 1.2 && after > 1.8, "{before} {after}");

    let output = scene.path("eval.json").display().to_string();
    let ended =
        scene.succeeds(scene.launcher(&["eval", "run", "--tree", "1,8,64", "--json", &output]));
    let text = std::fs::read_to_string(&output).expect("the figures");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    let prompts = report["plain"]["prompts"].as_u64();
    assert_eq!(prompts, Some(16), "the documents that the run held out");
    let drafts = report["drafts"].as_array().expect("a list");
    let names: Vec<&Value> = drafts.iter().map(|draft| &draft["draft"]).collect();
    assert_eq!(names, ["chain", "tree 1", "tree 8", "tree 64"]);
    for draft in drafts {
        assert_eq!(draft["differ"], 0, "{draft}");
        assert_eq!(
            draft["equal"]
                .as_u64()
                .zip(draft["ties"].as_u64())
                .map(|(a, b)| a + b),
            prompts
        );
        assert!(
            ended
                .stdout
                .contains(draft["draft"].as_str().expect("a name")),
            "{ended}"
        );
    }
    let lengths: Vec<f64> = drafts
        .iter()
        .map(|draft| accepted(&draft["accepted_length"]))
        .collect();
    let [chain, one, eight, many] = lengths[..] else {
        panic!("{lengths:?}");
    };
    assert!(
        (chain / after - 1.0).abs() < 0.05,
        "{chain} decoding, {after} by the run"
    );
    assert!(
        one < chain && chain < many && eight < many && one <= 2.0,
        "{lengths:?}"
    );
}

#[test]
fn the_export_is_what_serves() {
    let (scene, run) = learnt();
    let ended = scene.succeeds(scene.launcher(&["export", "run", "served"]));
    assert!(ended.stdout.contains("served"), "{ended}");
    for name in ["model.safetensors", "config.json", "provenance.json"] {
        let bytes = std::fs::read(scene.path("served").join(name)).expect("an exported file");
        assert!(bytes == run.checkpoint_file(name), "{name}");
    }
    let bytes = std::fs::read(scene.path("served/model.safetensors")).expect("weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(file.len(), 2 + 1 + 11, "one layer");
    assert!(
        file.iter()
            .all(|(_, view)| view.dtype() == safetensors::Dtype::BF16)
    );
    assert!(!scene.path("served/training.safetensors").exists());
    let again = scene.play(scene.launcher(&["export", "run", "served"]));
    assert_eq!(again.code(), Some(2), "{again}");
    scene.succeeds(scene.launcher(&["export", "run", "served", "--overwrite"]));

    // Without the run it needs to be told what it is for.
    let target = asset("tiny-target").display().to_string();
    let ended = scene.play(scene.launcher(&["eval", "served", "--data", "data.jsonl"]));
    assert_eq!(ended.code(), Some(2), "{ended}");
    assert!(
        ended.stderr.contains("--target-model is missing"),
        "{ended}"
    );
    let words = [
        "eval",
        "served",
        "--data",
        "data.jsonl",
        "--documents",
        "3",
        "--target-model",
        &target,
    ];
    let ended = scene.succeeds(scene.launcher(&words));
    assert!(
        ended.stdout.contains("chain: 3 of 3 answers equal"),
        "{ended}"
    );
}
