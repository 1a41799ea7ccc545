//! What fuzzers call: any bytes may end in an error, and nothing else. `fuzz/` runs these under libFuzzer,
//! `tests/fuzz_smoke.rs` with mutated seeds.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use slipstream::data::{ChatTemplate, ChatTokenizer, TextOptions, encode_row};
use slipstream::model::TargetFiles;

fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|dir| dir.join("assets/tiny-target"))
        .find(|dir| dir.is_dir())
        .expect("the demo model is in the repository")
}

static TOKENIZER: LazyLock<ChatTokenizer> =
    LazyLock::new(|| ChatTokenizer::load(&model_dir()).expect("the demo's tokenizer"));

/// One record of a data file: a mask beside each id, and nothing supervised behind the longest length.
pub fn row(bytes: &[u8]) {
    static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
        ChatTemplate::load(&model_dir(), None, &TOKENIZER, &[]).expect("the demo's template")
    });
    for raw_text in [false, true] {
        let options = TextOptions {
            max_length: 64,
            raw_text,
            ..TextOptions::default()
        };
        let template = (!raw_text).then_some(&*TEMPLATE);
        if let Ok(row) = encode_row(bytes, &TOKENIZER, template, &options) {
            assert_eq!(row.ids.len(), row.mask.len());
            assert!(row.ids.len() <= 64 && row.mask.contains(&1));
        }
    }
}

/// The text of a chat template.
pub fn template(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(template) = ChatTemplate::from_text(text, &TOKENIZER, &[]) else {
        return;
    };
    let rows: [&[u8]; 2] = [
        br#"{"messages":[{"role":"user","content":"Hi."},{"role":"assistant","content":"Hello."}]}"#,
        br#"{"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"messages":[{"role":"user","content":"Hi."},{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]},{"role":"tool","content":"x"},{"role":"assistant","content":"Hello."}]}"#,
    ];
    for row in rows {
        let _ = encode_row(row, &TOKENIZER, Some(&template), &TextOptions::default());
    }
}

/// `config.json` of a target.
pub fn config(bytes: &[u8]) {
    model_with("config.json", bytes);
}

/// The beginning of a safetensors file: its length, its header, and perhaps some of its data.
pub fn safetensors(bytes: &[u8]) {
    model_with("model.safetensors", bytes);
}

/// Opens the demo's model with one of its files replaced.
fn model_with(name: &str, bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(model_dir()).expect("the demo model").flatten() {
        let file = entry.file_name();
        if file != name {
            std::os::unix::fs::symlink(entry.path(), dir.path().join(file)).expect("a link");
        }
    }
    fs::write(dir.path().join(name), bytes).expect("a file");
    for assume_tied in [false, true] {
        let _ = TargetFiles::open(dir.path(), assume_tied);
    }
}
