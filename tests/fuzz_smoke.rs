//! The fuzzers' entries on stable Rust: seeds from the repository with a few bytes changed, put in, left out or
//! repeated. `PROPTEST_CASES=100000` makes it a long run.

mod fuzz_entries;

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::Index;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(root().join(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(ending))
        .collect();
    files.sort();
    files
}

/// Each line of the field's inputs.
fn rows() -> Vec<Vec<u8>> {
    files("tests/inputs", ".jsonl")
        .iter()
        .flat_map(|path| {
            let bytes = fs::read(path).unwrap();
            let lines = bytes.split(|&b| b == b'\n').map(<[u8]>::to_vec);
            lines
                .filter(|line| line.len() < 2000)
                .take(12)
                .collect::<Vec<_>>()
        })
        .collect()
}

fn templates() -> Vec<Vec<u8>> {
    let read = |path: &PathBuf| fs::read(path).unwrap();
    files("tests/templates", ".jinja")
        .iter()
        .map(read)
        .collect()
}

fn configs() -> Vec<Vec<u8>> {
    let folder = root().join("tests/inputs/models");
    let overlays = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let own = root().join("assets/tiny-target");
    let mut files: Vec<PathBuf> = overlays
        .chain([own])
        .map(|dir| dir.join("config.json"))
        .collect();
    files.sort();
    files
        .iter()
        .filter_map(|path| fs::read(path).ok())
        .collect()
}

/// The demo's weights, cut behind the header; and a file that ends too early.
fn headers() -> Vec<Vec<u8>> {
    let whole = fs::read(root().join("assets/tiny-target/model.safetensors")).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let truncated = root().join("tests/inputs/models/truncated/model.safetensors");
    vec![whole[..8 + header].to_vec(), fs::read(truncated).unwrap()]
}

/// One change of some bytes.
#[derive(Debug, Clone)]
enum Change {
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize),
    Cut(Index),
}

fn change() -> impl Strategy<Value = Change> {
    let words = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        "{%",
        "%}",
        "{{",
        "}}",
        "-",
        "null",
        "1e999",
        "-1",
        "99999999999999999999",
        "\u{feff}",
        "\\ud800",
        "\0",
        "'",
        "|tojson(indent=9)",
        "[::-1]",
        "é",
        "true",
        ",",
        ":",
    ]);
    let at = any::<Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(i, b)| Change::Set(i, b)),
        (at(), words).prop_map(|(i, word)| Change::Insert(i, word.as_bytes().to_vec())),
        (at(), 1usize..40).prop_map(|(i, n)| Change::Remove(i, n)),
        (at(), 1usize..40).prop_map(|(i, n)| Change::Repeat(i, n)),
        at().prop_map(Change::Cut),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    let place = |i: &Index, len: usize| i.index(len.max(1)).min(len);
    let len = bytes.len();
    match change {
        Change::Set(i, b) if len > 0 => bytes[i.index(len)] = *b,
        Change::Set(..) => {}
        Change::Insert(i, word) => {
            let at = place(i, len);
            bytes.splice(at..at, word.iter().copied());
        }
        Change::Remove(i, n) => {
            let at = place(i, len);
            bytes.drain(at..(at + n).min(len));
        }
        Change::Repeat(i, n) => {
            let at = place(i, len);
            let piece = bytes[at..(at + n).min(len)].to_vec();
            bytes.splice(at..at, piece);
        }
        Change::Cut(i) => bytes.truncate(place(i, len)),
    }
}

fn mutated(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec(change(), 0..6);
    (prop::sample::select(seeds), changes).prop_map(|(mut bytes, changes)| {
        for change in &changes {
            apply(&mut bytes, change);
        }
        bytes
    })
}

proptest! {
    #[test]
    fn rows_never_panic(bytes in mutated(rows())) {
        fuzz_entries::row(&bytes);
    }

    #[test]
    fn templates_never_panic(bytes in mutated(templates())) {
        fuzz_entries::template(&bytes);
    }

    #[test]
    fn configs_never_panic(bytes in mutated(configs())) {
        fuzz_entries::config(&bytes);
    }

    #[test]
    fn safetensors_never_panic(bytes in mutated(headers())) {
        fuzz_entries::safetensors(&bytes);
    }
}
