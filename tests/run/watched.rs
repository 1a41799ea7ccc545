//! Runs that somebody looks at: status, top, the endpoint, the records, the page.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{ENDLESS, Run, Scene};

/// What a command says about a run.
fn says(scene: &Scene, words: &[&str], run: &Run) -> String {
    let path = run.path.display().to_string();
    let words = [words, &[path.as_str()]].concat();
    scene.succeeds(scene.launcher(&words)).stdout
}

fn status(scene: &Scene, run: &Run) -> Value {
    let text = says(scene, &["status", "--json"], run);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Documents cost targets their tokens and drafters almost nothing: one anchor each.
const STARVED: [&str; 8] = [
    "--anchors",
    "1",
    "--unit-anchors",
    "6",
    "--batch-anchors",
    "36",
    "--block-size",
    "2",
];

#[test]
fn a_stopped_target_is_named_by_status_top_and_log_with_what_it_holds() {
    let scene = Scene::new();
    let run = scene.run("run");
    let mut running = scene.start(scene.train(&run, "1:1", &ENDLESS));
    running.wait_for_steps(&run, 3);
    let target = running.wait_for_worker("target-0");
    // One that is stopped between two units holds nothing; it is let go and caught again.
    let stopped = loop {
        target.signal(Signal::SIGSTOP);
        let since = Instant::now();
        let seen = status(&scene, &run);
        if seen["workers"][0]["holds"]["units"] != Value::Array(Vec::new()) {
            assert_eq!(seen["diagnosis"]["verdict"], "stopped", "{seen:#}");
            assert_eq!(seen["diagnosis"]["worker"], "target-0");
            assert_eq!(seen["workers"][0]["process"]["state"], "T");
            break since;
        }
        target.signal(Signal::SIGCONT);
    };
    let named = format!("target-0 (process {}) is stopped", target.pid);
    let text = says(&scene, &["status"], &run);
    assert!(text.contains(&named) && text.contains("STOPPED"), "{text}");
    let frame = says(&scene, &["top", "--once"], &run);
    assert!(frame.contains(&named), "{frame}");
    assert!(frame.contains("holds leased unit"), "{frame}");
    running.wait_for("a line about the stopped target", |running| {
        running.said().contains(&named).then_some(())
    });
    let after = stopped.elapsed();
    assert!(after < Duration::from_secs(30), "only after {after:?}");
    target.signal(Signal::SIGCONT);
    running.signal(Signal::SIGINT);
    assert_eq!(running.end().code(), Some(0));
    let over = status(&scene, &run);
    assert_eq!(
        (&over["running"], &over["summary"]["outcome"]),
        (&Value::Bool(false), &"stopped".into())
    );
}

/// Many wide blocks for each document, through more layers.
const SLOW_DRAFTER: [&str; 8] = [
    "--draft-layers",
    "2",
    "--block-size",
    "8",
    "--anchors",
    "24",
    "--unit-anchors",
    "48",
];

#[test]
fn a_starved_run_is_told_from_one_whose_drafters_are_slow() {
    let scene = Scene::new();
    for (name, cpu, more, verdict, words) in [
        (
            "starved",
            "1:1",
            STARVED,
            "targets",
            "targets are the bottleneck",
        ),
        (
            "slow",
            "2:1",
            SLOW_DRAFTER,
            "drafters",
            "drafters are the bottleneck",
        ),
    ] {
        let run = scene.run(name);
        let more = [&ENDLESS[..], &more].concat();
        let mut running = scene.start(scene.train(&run, cpu, &more));
        running.wait_for_steps(&run, 10);
        let frame = says(&scene, &["top", "--once", "--every", "2"], &run);
        assert!(frame.contains(words), "{name}: {frame}");
        assert_eq!(
            status(&scene, &run)["diagnosis"]["verdict"],
            verdict,
            "{name}"
        );
        running.signal(Signal::SIGINT);
        assert_eq!(running.end().code(), Some(0));
    }
}

#[test]
fn a_run_is_recorded_for_every_kind_of_reader() {
    let scene = Scene::new();
    let run = scene.run("run");
    let more = [
        "--epochs",
        "40",
        "--metrics-port",
        "0",
        "--tensorboard",
        "--eval-every",
        "20",
    ];
    let mut running = scene.start(scene.train(&run, "1:2", &more));
    let address = running.wait_for("the address", |running| {
        let said = running.said();
        let rest = said.split("metrics: http://").nth(1)?;
        Some(rest.split("/metrics").next()?.to_owned())
    });
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    running.wait_for_steps(&run, 5);
    let mut client = TcpStream::connect(&address).expect("the endpoint");
    client
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        .expect("a request");
    let mut page = String::new();
    client.read_to_string(&mut page).expect("an answer");
    for wanted in [
        "slipstream_loss ",
        "slipstream_units{state=\"done\"} ",
        "slipstream_worker_up{worker=\"drafter-1\"} 1",
        "slipstream_held_out_accepted_length{tree=\"chain\"} ",
        "slipstream_worker_busy_share{worker=\"target-0\"} ",
    ] {
        assert!(page.contains(wanted), "{wanted}: {page}");
    }
    let ended = running.end();
    assert_eq!(ended.code(), Some(0), "{ended}");

    let workers = run.lines("workers.jsonl");
    let last = workers.last().expect("a line");
    for name in ["target-0", "drafter-0", "drafter-1"] {
        let shares = last["workers"][name]["shares"].as_object().expect("shares");
        let sum: f64 = shares.values().filter_map(Value::as_f64).sum();
        assert!((sum - 1.0).abs() < 0.02, "{last}");
    }
    let evaluations = run.lines("evaluations.jsonl");
    assert!(evaluations.len() >= 3, "{evaluations:?}");
    assert_eq!(evaluations[0]["step"], 0);
    let events: Vec<_> = std::fs::read_dir(run.file("tensorboard"))
        .expect("a folder")
        .flatten()
        .collect();
    assert_eq!(events.len(), 1);
    let bytes = std::fs::read(events[0].path()).expect("the events");
    let holds = |tag: &[u8]| bytes.windows(tag.len()).any(|part| part == tag);
    assert!(holds(b"train/loss") && holds(b"eval/accepted_length/chain"));
    assert!(holds(b"busy/drafter-1"));

    let page = says(&scene, &["report"], &run);
    let path = PathBuf::from(page.trim());
    assert_eq!(path, run.file("report.html"));
    let html = std::fs::read_to_string(&path).expect("the page");
    assert!(
        html.contains("Complete: ") && html.matches("<svg").count() >= 9,
        "{html}"
    );
    assert!(!html.contains("nothing was recorded"), "{html}");
    picture(&scene, &path);
}

/// Looks at the page in a browser, if there is one; `SLIPSTREAM_BROWSER` names one, `SLIPSTREAM_PICTURE` keeps the
/// picture.
fn picture(scene: &Scene, page: &std::path::Path) {
    let named = std::env::var("SLIPSTREAM_BROWSER").ok();
    let known = [
        "chromium",
        "chromium-browser",
        "google-chrome",
        "chrome-headless-shell",
    ];
    let browser = named.iter().map(String::as_str).chain(known).find(|name| {
        let version = Command::new(name).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    });
    let Some(browser) = browser else {
        eprintln!("no browser: no picture of the report was taken");
        return;
    };
    let png = std::env::var_os("SLIPSTREAM_PICTURE")
        .map_or_else(|| scene.path("report.png"), PathBuf::from);
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        .arg("--window-size=1400,2600")
        .arg(format!(
            "--user-data-dir={}",
            scene.path("browser").display()
        ))
        .arg(format!("--screenshot={}", png.display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("the browser runs");
    let bytes = std::fs::read(&png).unwrap_or_default();
    assert!(
        bytes.starts_with(b"\x89PNG") && bytes.len() > 50_000,
        "{} bytes: {}",
        bytes.len(),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_newest_run_is_looked_at_by_default() {
    let scene = Scene::new();
    let none = scene.play(scene.launcher(&["status"]));
    assert_eq!(none.code(), Some(2));
    assert!(
        none.stderr.contains("no run is going on under ./runs"),
        "{none}"
    );
    let run = scene.run("runs/a");
    let mut running = scene.start(scene.train(&run, "1:1", &ENDLESS));
    running.wait_for_steps(&run, 1);
    let found = scene.succeeds(scene.launcher(&["status"]));
    assert!(found.stdout.starts_with("runs/a: training"), "{found}");
    running.signal(Signal::SIGINT);
    assert_eq!(running.end().code(), Some(0));
}
