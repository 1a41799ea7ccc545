//! What a run holds in memory does not grow with its steps.

use std::collections::BTreeMap;

use slipstream::launch::process::resident_memory;

use crate::support::{Run, Scene};

/// Growth that is allowed, in bytes per step: a megabyte in a thousand steps.
const SLOPE: f64 = (1 << 20) as f64 / 1000.0;

/// Resident memory of every process over the steps of a run: name → (step, bytes).
type Curves = BTreeMap<String, Vec<(f64, f64)>>;

/// Looks at every process of a run about `looks` times from step `from` to `to`.
fn watch(scene: &Scene, run: &Run, command: std::process::Command, from: u64, to: u64) -> Curves {
    let mut running = scene.start(command);
    let mut curves = Curves::new();
    let mut next = from;
    while next < to {
        let now = next;
        running.wait_for("a step", |_| {
            (run.whole_lines("metrics.jsonl") as u64 >= now).then_some(())
        });
        let step = run.whole_lines("metrics.jsonl") as f64;
        for process in scene.processes() {
            let name = process.worker.unwrap_or_else(|| "launcher".to_owned());
            if let Some(bytes) = resident_memory(process.pid as u32) {
                curves.entry(name).or_default().push((step, bytes as f64));
            }
        }
        next += (to - from) / 40;
    }
    let ended = running.end();
    assert_eq!(ended.code(), Some(0), "{ended}");
    curves
}

/// Slope of the least-squares line, in bytes per step.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let (mut top, mut bottom) = (0.0, 0.0);
    for (step, bytes) in points {
        top += (step - x) * (bytes - y);
        bottom += (step - x) * (step - x);
    }
    top / bottom
}

fn is_steady(curves: &Curves, workers: usize) {
    assert_eq!(curves.len(), workers + 1, "{:?}", curves.keys());
    for (name, points) in curves {
        assert!(points.len() >= 20, "{name}: {} looks", points.len());
        let slope = slope(points);
        println!(
            "{name}: {:.0} bytes a step, {:.1} MiB at the end",
            slope,
            points[points.len() - 1].1 / 1048576.0
        );
        assert!(
            slope < SLOPE,
            "{name} grows by {slope:.0} bytes a step: {points:?}"
        );
    }
}

/// `cargo test --release --test run -- --ignored demo_steps --nocapture`.
#[test]
#[ignore = "takes two minutes"]
fn memory_does_not_grow_over_two_thousand_demo_steps() {
    let scene = Scene::new();
    let run = scene.run("run");
    let output = run.file("").display().to_string();
    let words = [
        "--cpu",
        "2:2",
        "--epochs",
        "3",
        "--max-steps",
        "2000",
        "--output",
        &output,
    ];
    let curves = watch(&scene, &run, scene.launcher(&words), 300, 1990);
    is_steady(&curves, 4);
}
