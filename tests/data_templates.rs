//! What `transformers` makes of conversations and templates, and that we make the same of them.
//!
//! `tests/templates/cases.json` holds the conversations, one or more for each feature that templates in the field
//! use; `expected.json` is written by `scripts/make-template-golden.py`.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use slipstream::data::{
    Document, PrepareRequest, Prepared, SkipReason, TextOptions, inspect, prepare,
};

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    #[serde(default)]
    kwargs: serde_json::Map<String, serde_json::Value>,
    /// Keeps the order of keys, which templates show.
    row: minijinja::Value,
}

#[derive(Deserialize)]
struct Expected {
    cases: Vec<Render>,
}

#[derive(Deserialize)]
struct Render {
    name: String,
    raises: Option<String>,
    #[serde(default)]
    text: String,
    #[serde(default)]
    ids: Vec<u32>,
    #[serde(default)]
    prompt: String,
    #[serde(default)]
    prompt_begins_text: bool,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

fn read<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let text = fs::read_to_string(folder().join(name)).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The request of one case, with its row in a file of its own in `dir`.
fn request(case: &Case, dir: &Path) -> PrepareRequest {
    let data = dir.join("row.jsonl");
    let row = serde_json::to_string(&case.row).unwrap();
    fs::write(&data, row + "\n").unwrap();
    PrepareRequest {
        data: vec![data],
        flag: "--data",
        model_dir: folder().join("../../assets/tiny-target"),
        chat_template: Some(folder().join(format!("{}.jinja", case.template))),
        options: TextOptions {
            last_turn_only: true,
            min_loss_tokens: 1,
            template_kwargs: case.kwargs.clone().into_iter().collect(),
            ..TextOptions::default()
        },
        cache_dir: dir.join("cache"),
    }
}

fn supervised(document: &Document<'_>) -> Option<(usize, usize)> {
    let first = document.mask.iter().position(|&m| m == 1)?;
    let last = document.mask.iter().rposition(|&m| m == 1)?;
    Some((first, last))
}

#[test]
fn every_feature_renders_as_transformers_renders_it() {
    let cases: Vec<Case> = read("cases.json");
    let expected: Expected = read("expected.json");
    assert!(cases.len() >= 20);
    assert_eq!(
        cases.len(),
        expected.cases.len(),
        "write expected.json anew"
    );
    let mut wrong = Vec::new();
    for (case, expected) in cases.iter().zip(&expected.cases) {
        assert_eq!(case.name, expected.name, "write expected.json anew");
        if let Err(what) = compare(case, expected) {
            wrong.push(format!("{} ({}): {what}", case.name, case.template));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn compare(case: &Case, expected: &Render) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let request = request(case, dir.path());
    let found = inspect(&request, &mut |_| ControlFlow::Continue(())).map_err(|e| e.to_string())?;
    let Prepared {
        set,
        report,
        tokenizer,
        ..
    } = &found.prepared;
    if let Some(message) = &expected.raises {
        let skip = report.skipped.get(&SkipReason::TemplateError);
        let told = skip.map(|skip| skip.examples[0].message.as_str());
        return match told {
            Some(told) if told.starts_with(message.as_str()) => Ok(()),
            other => Err(format!("should raise {message:?}, but {other:?}")),
        };
    }
    if !expected.prompt_begins_text {
        // The render up to the answer is not how the whole begins: nothing may be supervised.
        let skip = report.skipped.get(&SkipReason::NoLossTokens);
        return skip
            .map(drop)
            .ok_or_else(|| format!("supervised: {report:?}"));
    }
    if set.len() != 1 {
        return Err(report.example_lines().join("; "));
    }
    let document = set.document(0);
    let text = tokenizer.decode(document.ids).unwrap();
    if text != expected.text {
        return Err(format!("renders\n{text:?}\nand not\n{:?}", expected.text));
    }
    if document.ids != expected.ids {
        return Err(format!("{:?} and not {:?}", document.ids, expected.ids));
    }
    // The first supervised token is the first behind the prompt. One that joins the prompt's end with the answer's
    // beginning belongs to neither.
    let (first, last) = supervised(&document).ok_or("nothing is supervised")?;
    let before = tokenizer.decode(&document.ids[..first]).unwrap();
    let joined = tokenizer
        .decode(&document.ids[..first.saturating_sub(1)])
        .unwrap();
    let begins = before == expected.prompt
        || (before.len() > expected.prompt.len() && joined.len() < expected.prompt.len());
    if !begins {
        return Err(format!(
            "supervised from behind {before:?}, but the prompt is {:?}",
            expected.prompt
        ));
    }
    // The last is the last special token, else the end of the words.
    let end = tokenizer.decode(&document.ids[..=last]).unwrap();
    let rest = &expected.text[end.len()..];
    match rest.contains("<|") || !expected.text.starts_with(&end) {
        true => Err(format!("supervised up to {end:?}")),
        false => Ok(()),
    }
}

/// A template that writes the date renders the same all through a run, and says that it does.
#[test]
fn a_template_that_asks_for_the_date_is_told_of() {
    let mut cases: Vec<Case> = read("cases.json");
    let case = cases
        .iter_mut()
        .find(|case| case.template == "dates")
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let given = prepare(&request(case, dir.path()), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(!given.report.uses_date);

    case.kwargs.clear();
    let asked = prepare(&request(case, dir.path()), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(asked.report.uses_date);
    let notes = asked.report.notes();
    assert!(notes.iter().any(|note| note.contains("date")), "{notes:?}");
}
