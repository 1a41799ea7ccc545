//! Chat rendering, tokens and loss mask of the demo target against `chat_tiny.json`.

use std::ops::ControlFlow;
use std::path::Path;

use serde::Deserialize;
use slipstream::data::{ChatTemplate, ChatTokenizer, PrepareRequest, TextOptions, prepare};

#[derive(Deserialize)]
struct Case {
    messages: Vec<minijinja::Value>,
    text: String,
    ids: Vec<u32>,
    mask: Vec<u8>,
}

#[test]
fn chat_tiny() {
    let Some(path) = super::path("chat_tiny.json") else {
        return;
    };
    let text = std::fs::read_to_string(path).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    assert!(!cases.is_empty());
    let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-target");
    let tokenizer = ChatTokenizer::load(&model_dir).unwrap();
    let template = ChatTemplate::load(&model_dir, None, &tokenizer, &[]).unwrap();

    // Each case is a row as it stands: its extra keys are ignored.
    let rows: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let lines: Vec<String> = rows.iter().map(|r| format!("{r}\n")).collect();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("chat.jsonl");
    std::fs::write(&data, lines.concat()).unwrap();
    let prepared = prepare(
        &PrepareRequest {
            data: vec![data],
            flag: "--data",
            model_dir,
            chat_template: None,
            options: TextOptions::default(),
            cache_dir: dir.path().join("cache"),
        },
        &mut |_| ControlFlow::Continue(()),
    )
    .unwrap();

    assert_eq!(prepared.set.len(), cases.len());
    for (i, (case, document)) in cases.iter().zip(prepared.set.documents()).enumerate() {
        assert_eq!(
            template.render(&case.messages, None, false).as_deref(),
            Ok(case.text.as_str()),
            "text of case {i}"
        );
        assert_eq!(document.ids, case.ids, "ids of case {i}");
        assert_eq!(document.mask, case.mask, "mask of case {i}");
    }
}
