//! What a run does not depend on: a second start, the number of drafters, who trained what.

use std::collections::BTreeSet;

use crate::records::{difference, each_unit_once, floats, trained, units_trained};
use crate::support::{Run, Scene};

const WHOLE: [&str; 2] = ["model.safetensors", "training.safetensors"];

#[test]
fn one_target_and_one_drafter_repeat_bit_for_bit() {
    let scene = Scene::new();
    let train = |name: &str, seed: &str| {
        let run = scene.run(name);
        scene.succeeds(scene.train(&run, "1:1", &["--seed", seed]));
        each_unit_once(&run);
        run
    };
    let (first, again, other) = (train("a", "7"), train("b", "7"), train("c", "8"));
    assert_eq!(trained(&first), trained(&again));
    for name in WHOLE {
        let bytes = |run: &Run| run.checkpoint_file(name);
        assert!(bytes(&first) == bytes(&again), "{name} differs");
        assert!(bytes(&first) != bytes(&other), "{name}: another seed");
    }
    let sets = [&first, &other].map(|run| {
        let numbers = |line: &serde_json::Value| line["loss"].to_string();
        run.lines("metrics.jsonl")
            .iter()
            .map(numbers)
            .collect::<Vec<_>>()
    });
    assert_ne!(sets[0], sets[1], "another seed learns otherwise");
}

#[test]
fn two_targets_and_two_drafters_train_the_same_units_again() {
    let scene = Scene::new();
    let tokens = ["a", "b"].map(|name| {
        let run = scene.run(name);
        scene.succeeds(scene.train(&run, "2:2", &["--epochs", "2"]));
        each_unit_once(&run);
        let order = std::fs::read_to_string(run.file("units.jsonl")).expect("units.jsonl");
        (run.summary()["tokens"].clone(), order)
    });
    assert_eq!(tokens[0], tokens[1]);
}

/// The first moment after one step without clipping is a tenth of the gradient.
fn gradient_of(scene: &Scene, name: &str, cpu: &str, split: &str) -> Run {
    let record = format!("{{\"step\":1,\"units\":{split}}}\n");
    let record = scene.write(&format!("{name}.jsonl"), record);
    let run = scene.run(name);
    let record = record.display().to_string();
    let more = [
        "--replay",
        &record,
        "--clip",
        "0",
        "--batch-anchors",
        "100000",
    ];
    scene.succeeds(scene.train(&run, cpu, &more));
    scene.is_clean();
    run
}

#[test]
fn the_gradient_does_not_depend_on_who_trains_what() {
    let scene = Scene::new();
    let alone = gradient_of(&scene, "alone", "1:1", r#"{"0":[0,1,2,3,4,5,6,7]}"#);
    let wanted = floats(&alone.checkpoint_file("training.safetensors"), "m.");
    assert!(wanted.len() > 10, "{:?}", wanted.keys());
    let norm = |run: &Run| run.lines("metrics.jsonl")[0]["grad_norm"].as_f64();
    for (name, cpu, split) in [
        ("uneven", "1:2", r#"{"0":[5],"1":[7,0,1,2,3,4,6]}"#),
        ("even", "2:2", r#"{"0":[0,2,4,6],"1":[1,3,5,7]}"#),
        ("idle", "1:3", r#"{"0":[3,2,1,0],"1":[],"2":[4,5,6,7]}"#),
    ] {
        let run = gradient_of(&scene, name, cpu, split);
        assert_eq!(units_trained(&run), (0..8).collect::<BTreeSet<u64>>());
        let found = floats(&run.checkpoint_file("training.safetensors"), "m.");
        assert!(found.keys().eq(wanted.keys()));
        for (tensor, values) in &wanted {
            let apart = difference(&found[tensor], values);
            assert!(apart <= 1e-5, "{name}: {tensor} is {apart:e} away");
        }
        let (mine, theirs) = (
            norm(&run).expect("a number"),
            norm(&alone).expect("a number"),
        );
        assert!((mine / theirs - 1.0).abs() < 1e-5, "{mine} {theirs}");
    }
    let other = gradient_of(&scene, "other", "1:1", r#"{"0":[0,1,2,3,4,5,6,8]}"#);
    let other = floats(&other.checkpoint_file("training.safetensors"), "m.");
    let apart = wanted
        .iter()
        .map(|(tensor, values)| difference(&other[tensor], values));
    assert!(
        apart.fold(0.0, f64::max) > 1e-2,
        "one unit more or less is seen"
    );
}
