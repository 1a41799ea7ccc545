//! Tokenising takes the memory of a few batches, however many rows there are. Alone in its process, so that nobody
//! else's memory is measured.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use slipstream::data::{PrepareRequest, prepare};

/// Memory of this process that is its own, in KiB; pages of mapped files are the kernel's to drop.
fn anonymous_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.unwrap().parse().unwrap()
}

fn write_rows(path: &Path, rows: usize) {
    let mut out = std::io::BufWriter::new(fs::File::create(path).unwrap());
    for row in 0..rows {
        // The tokenizer remembers words, up to a number of them: these have few, so that all are met early.
        let (a, b) = (row % 97, row / 97 % 89);
        let question = format!("What is {a} and {b}?");
        let answer = format!("It is {}, of course.", a + b);
        let line = serde_json::json!({"messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]});
        writeln!(out, "{line}").unwrap();
    }
    out.flush().unwrap();
}

/// The most memory while a file of so many rows is tokenised.
fn peak_kib(dir: &Path, rows: usize) -> u64 {
    let data = dir.join(format!("{rows}.jsonl"));
    write_rows(&data, rows);
    let request = PrepareRequest {
        data: vec![data],
        flag: "--data",
        model_dir: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-target"),
        chat_template: None,
        options: Default::default(),
        cache_dir: dir.join("cache"),
    };
    let mut peak = 0;
    let prepared = prepare(&request, &mut |_| {
        peak = peak.max(anonymous_kib());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(prepared.set.len(), rows);
    peak.max(anonymous_kib())
}

#[test]
fn ten_times_the_rows_take_no_more_memory() {
    let rows: usize = std::env::var("DATA_MEMORY_ROWS")
        .ok()
        .and_then(|rows| rows.parse().ok())
        .unwrap_or(10_000);
    let dir = tempfile::tempdir().unwrap();
    // The first pass fills caches and pools of threads.
    peak_kib(dir.path(), rows / 2);
    let few = peak_kib(dir.path(), rows);
    let many = peak_kib(dir.path(), 10 * rows);
    println!("{rows} rows: {few} KiB; {} rows: {many} KiB", 10 * rows);
    assert!(
        many < few + few / 10 + 1024,
        "{rows} rows take {few} KiB, ten times as many {many} KiB"
    );
}
