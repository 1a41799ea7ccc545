//! The best checkpoint by the held-out figure.

use serde_json::Value;

use crate::support::{Run, Scene};

/// Where `best` leads to, and the figure that it stands for.
fn best(run: &Run) -> (u64, f64) {
    let name = std::fs::read_link(run.file("checkpoints/best")).expect("the link");
    let name = name.to_str().expect("a name");
    let step: u64 = name
        .strip_prefix("step-")
        .expect("step-N")
        .parse()
        .expect("a number");
    let text = std::fs::read_to_string(run.file("checkpoints/best.json")).expect("best.json");
    let found: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(found["step"], step);
    assert!(
        run.file("checkpoints")
            .join(name)
            .join("model.safetensors")
            .is_file()
    );
    (step, found["accepted_length"].as_f64().expect("a figure"))
}

fn steps(run: &Run) -> Vec<u64> {
    let entries = std::fs::read_dir(run.file("checkpoints"))
        .expect("a folder")
        .flatten();
    let name = |entry: std::fs::DirEntry| entry.file_name().into_string().expect("a name");
    let mut steps: Vec<u64> = entries
        .map(name)
        .filter_map(|name| name.strip_prefix("step-")?.parse().ok())
        .collect();
    steps.sort_unstable();
    steps
}

#[test]
fn the_best_survives_what_comes_after_and_is_known_after_a_resume() {
    let scene = Scene::new();
    let run = scene.run("run");
    // A constant rate: each step changes the figure.
    let words = [
        "--eval-every",
        "2",
        "--keep",
        "1",
        "--schedule",
        "constant",
        "--warmup",
        "0",
    ];
    let ended =
        scene.succeeds(scene.train(&run, "1:2", &[&words[..], &["--max-steps", "4"]].concat()));
    let (step, figure) = best(&run);
    assert!([2, 4].contains(&step));
    let line = format!(
        "best: {}/checkpoints/best, of step {step}",
        run.path.display()
    );
    assert!(
        ended.stderr.contains(&line) || ended.stdout.contains(&line),
        "{ended}"
    );
    // A figure that nothing reaches: the checkpoint stays, however many follow.
    let unreachable =
        serde_json::json!({"step": step, "accepted_length": 99.0, "tokens": 99, "rounds": 1});
    std::fs::write(run.file("checkpoints/best.json"), unreachable.to_string()).expect("best.json");
    scene.succeeds(scene.train(&run, "1:2", &[&words[..], &["--resume"]].concat()));
    assert_eq!(run.latest(), Some(7));
    assert_eq!(best(&run), (step, 99.0));
    assert_eq!(steps(&run), [step, 7]);

    // One that everything reaches: a later step takes its place, and the old one goes with the next save.
    let low =
        serde_json::json!({"step": step, "accepted_length": 0.01, "tokens": 1, "rounds": 100});
    std::fs::write(run.file("checkpoints/best.json"), low.to_string()).expect("best.json");
    let more = ["--resume", "--epochs", "1"];
    scene.succeeds(scene.train(&run, "1:2", &[&words[..], &more].concat()));
    let (later, again) = best(&run);
    assert_eq!(
        later, 7,
        "the figure of the step that it begins with counts"
    );
    assert!(again > 0.9 && figure > 0.9);
}
