//! What people feed the launcher, one small input for each line of the field's list of troubles: the exit code, what
//! is counted, and what is said.
//!
//! Conversations are looked at by `launcher check-data`, which reads them as a run does. Models are the demo's with
//! the files of `tests/inputs/models/NAME` in place of its own (and those removed that its REMOVE names), given to a
//! run. Output directories are refused in `tests/run/refused.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// One input and what must come of it.
struct Case {
    /// The trouble, in the field's words.
    trouble: &'static str,
    /// A file or folder of `tests/inputs`.
    input: &'static str,
    /// Further words; those that begin with `@` are files of `tests/inputs`.
    words: &'static [&'static str],
    /// The launcher's exit code.
    exit: i32,
    /// Documents kept.
    documents: u64,
    /// Rows skipped, by reason; all that are.
    skipped: &'static [(&'static str, u64)],
    /// Other figures of the report.
    figures: &'static [(&'static str, u64)],
    /// What must be among the examples, notes and refusals; `place: message` for an example.
    said: &'static [&'static str],
}

const CASE: Case = Case {
    trouble: "",
    input: "",
    words: &[],
    exit: 0,
    documents: 0,
    skipped: &[],
    figures: &[],
    said: &[],
};

const ROWS: &[Case] = &[
    Case {
        trouble: "template without generation markers: spans from render boundaries",
        input: "openai.jsonl",
        words: &["--chat-template", "@templates/plain.jinja"],
        documents: 2,
        figures: &[("context_only_turns", 0)],
        ..CASE
    },
    Case {
        trouble: "both renders must be prefixes of the whole: else that turn is context only",
        input: "openai.jsonl",
        words: &["--chat-template", "@templates/thinking.jinja"],
        documents: 2,
        figures: &[("context_only_turns", 1)],
        said: &["1 assistant turns are context only"],
        ..CASE
    },
    Case {
        trouble: "no supervised token left after truncation; longer than max length",
        input: "long.jsonl",
        words: &["--max-length", "50"],
        documents: 2,
        skipped: &[("no_loss_tokens_after_truncation", 1)],
        figures: &[("truncated_documents", 1)],
        said: &[
            "long.jsonl:3: all supervised tokens lie behind --max-length 50",
            "of all tokens are lost",
        ],
        ..CASE
    },
    Case {
        trouble: "[]; single user message; empty or blank assistant text",
        input: "empty_kinds.jsonl",
        documents: 1,
        skipped: &[("empty", 2), ("empty_assistant", 3), ("no_assistant", 2)],
        said: &[
            "empty_kinds.jsonl:2: no messages",
            "empty_kinds.jsonl:4: no assistant turn",
            "empty_kinds.jsonl:6: message 2 has no text",
        ],
        ..CASE
    },
    Case {
        trouble: "starts with assistant; roles do not alternate: the template decides",
        input: "roles.jsonl",
        words: &["--chat-template", "@templates/alternating.jinja"],
        documents: 1,
        skipped: &[("template_error", 2), ("unknown_role", 2)],
        said: &["roles.jsonl:1: turns must alternate, starting with the user"],
        ..CASE
    },
    Case {
        trouble: "role aliases: explicit map; unknown: skip",
        input: "roles.jsonl",
        documents: 3,
        skipped: &[("unknown_role", 2)],
        said: &["roles.jsonl:4: message 2: role `narrator`"],
        ..CASE
    },
    Case {
        trouble: "template raises for this row",
        input: "template_raises.jsonl",
        words: &["--chat-template", "@templates/alternating.jinja"],
        documents: 2,
        skipped: &[("template_error", 1)],
        said: &["template_raises.jsonl:2: asked to raise (line 7 of the template)"],
        ..CASE
    },
    Case {
        trouble: "tool calls, role tool: kept and passed to the template",
        input: "tools.jsonl",
        words: &["--chat-template", "@templates/tools.jinja"],
        documents: 5,
        ..CASE
    },
    Case {
        trouble: "tools that the template cannot show: never stripped",
        input: "tools.jsonl",
        words: &["--chat-template", "@templates/plain.jinja"],
        documents: 1,
        skipped: &[("tools_unsupported", 4)],
        said: &["tools.jsonl:1: the template does not show tool definitions"],
        ..CASE
    },
    Case {
        trouble: "content as a list of parts; images and audio",
        input: "parts.jsonl",
        documents: 2,
        skipped: &[("multimodal", 4)],
        said: &["parts.jsonl:3: message 1: a content part of type `image_url`"],
        ..CASE
    },
    Case {
        trouble: "ShareGPT and OpenAI keys; extra keys ignored",
        input: "sharegpt.jsonl",
        documents: 4,
        ..CASE
    },
    Case {
        trouble: "no known conversation key: refuse at row 1 with the keys seen",
        input: "no_key.jsonl",
        exit: 2,
        said: &[
            "no_key.jsonl:1: row 1 has no known conversation key (keys: title, body, id); rename the key",
        ],
        ..CASE
    },
    Case {
        trouble: "plain text without --raw-text",
        input: "text_key.jsonl",
        exit: 2,
        said: &["(keys: text); train on the plain text under `text` with --raw-text"],
        ..CASE
    },
    Case {
        trouble: "plain text with --raw-text",
        input: "text_key.jsonl",
        words: &["--raw-text"],
        documents: 2,
        skipped: &[("empty", 1)],
        ..CASE
    },
    Case {
        trouble: "messages of odd shapes",
        input: "shapes.jsonl",
        documents: 1,
        skipped: &[("malformed_message", 6), ("no_conversation", 3)],
        said: &["shapes.jsonl:2: message 1: is a string, not an object"],
        ..CASE
    },
    Case {
        trouble: "prompt and response, instruction and output",
        input: "columns.jsonl",
        documents: 6,
        skipped: &[("empty_assistant", 2), ("malformed_message", 2)],
        said: &[
            "columns.jsonl:6: message 2 has no text",
            "columns.jsonl:8: `prompt` is a number",
            "columns.jsonl:9: a turn of `history` has 1 parts, not question and answer",
        ],
        ..CASE
    },
    Case {
        trouble: "rows tokenised elsewhere",
        input: "tokens.jsonl",
        documents: 3,
        skipped: &[("bad_tokens", 6), ("empty", 1), ("no_loss_tokens", 1)],
        figures: &[("tokens", 15), ("supervised", 9)],
        said: &[
            "tokens.jsonl:4: 4 `input_ids` but 3 `loss_mask`",
            "tokens.jsonl:5: `loss_mask` holds 2 at position 1, neither 0 nor 1",
            "tokens.jsonl:6: token id 70000 at position 2; the model's tokenizer ends at 1023",
            "tokens.jsonl:7: `input_ids` holds -6 at position 1",
            "tokens.jsonl:8: `labels` holds 6 at position 0, neither -100 nor the token there (5)",
        ],
        ..CASE
    },
    Case {
        trouble: "ids without a mask",
        input: "tokens_without_mask.jsonl",
        exit: 2,
        said: &[
            "(keys: input_ids, attention_mask); say which tokens are supervised under `loss_mask`",
        ],
        ..CASE
    },
    Case {
        trouble: "answer cut by length: the end token the template adds is not supervised",
        input: "cut.jsonl",
        documents: 4,
        // Twice with the end token and twice without.
        figures: &[("supervised", 4 * 11 + 2)],
        ..CASE
    },
    Case {
        trouble: "two BOS tokens: a rendered template is tokenised without special tokens",
        input: "one_row.jsonl",
        words: &[
            "--chat-template",
            "@templates/alternating.jinja",
            "--rows",
            "0",
        ],
        documents: 1,
        said: &[
            "<|im_start|>[user]How many legs has a spider?[assistant]A spider has eight legs.<|im_end|>",
        ],
        ..CASE
    },
    Case {
        trouble: "shorter than min-loss-tokens",
        input: "short.jsonl",
        documents: 2,
        skipped: &[("too_short", 1)],
        said: &["short.jsonl:2: 1 supervised tokens, fewer than --min-loss-tokens 2"],
        ..CASE
    },
    Case {
        trouble: "no eligible anchor",
        input: "no_anchor.jsonl",
        documents: 1,
        skipped: &[("no_anchor", 1)],
        said: &["no_anchor.jsonl:1: no two supervised tokens in a row"],
        ..CASE
    },
    Case {
        trouble: "malformed JSON line: skip with file:line:column",
        input: "malformed_few.jsonl",
        documents: 99,
        skipped: &[("malformed", 1)],
        said: &["malformed_few.jsonl:58:"],
        ..CASE
    },
    Case {
        trouble: "over 1 % malformed refuses",
        input: "malformed_many.jsonl",
        exit: 2,
        documents: 20,
        skipped: &[("malformed", 3)],
        said: &[
            "3 of 23 lines are not valid JSON (over 1 %)",
            "malformed_many.jsonl:11:15: expected value",
        ],
        ..CASE
    },
    Case {
        trouble: "BOM and CRLF accepted, blank ignored; the first record is not lost",
        input: "bom_crlf_blank.jsonl",
        documents: 3,
        ..CASE
    },
    Case {
        trouble: "invalid UTF-8 skipped with its offset",
        input: "invalid_utf8.jsonl",
        documents: 2,
        skipped: &[("invalid_utf8", 1)],
        said: &["invalid_utf8.jsonl:2:47: invalid UTF-8 at byte 46 of the line"],
        ..CASE
    },
    Case {
        trouble: "NUL",
        input: "nul.jsonl",
        documents: 3,
        skipped: &[("nul_byte", 2)],
        said: &["nul.jsonl:2:1: NUL at byte 0 of the line"],
        ..CASE
    },
    Case {
        trouble: "UTF-16",
        input: "utf16.jsonl",
        exit: 2,
        said: &[
            "utf16.jsonl: this is UTF-16 text",
            "iconv -f UTF-16 -t UTF-8",
        ],
        ..CASE
    },
    Case {
        trouble: "one JSON array",
        input: "array.json",
        exit: 2,
        said: &["array.json: this is one JSON array", "jq -c '.[]'"],
        ..CASE
    },
    Case {
        trouble: "Git-LFS pointer for data",
        input: "lfs_pointer.jsonl",
        exit: 2,
        said: &[
            "lfs_pointer.jsonl: this is a Git LFS pointer",
            "git lfs pull",
        ],
        ..CASE
    },
    Case {
        trouble: "a folder stands for its data files",
        input: "folder",
        documents: 3,
        ..CASE
    },
    Case {
        trouble: "a folder without data files",
        input: "templates",
        exit: 2,
        said: &["templates: the folder holds no .jsonl"],
        ..CASE
    },
    Case {
        trouble: "0 rows refuses: no byte",
        input: "zero_bytes.jsonl",
        exit: 2,
        said: &["zero_bytes.jsonl: the file holds no record"],
        ..CASE
    },
    Case {
        trouble: "0 rows refuses: only blank lines",
        input: "blank.jsonl",
        exit: 2,
        said: &["blank.jsonl: the file holds no record"],
        ..CASE
    },
    Case {
        trouble: "no usable row: refuses with a reason per skipped row",
        input: "nothing_usable.jsonl",
        exit: 2,
        skipped: &[("empty", 1), ("empty_assistant", 1), ("no_assistant", 1)],
        said: &["none of the 3 rows can be trained on: 1 empty"],
        ..CASE
    },
    Case {
        trouble: "1 row",
        input: "one_row.jsonl",
        documents: 1,
        ..CASE
    },
    Case {
        trouble: "no such file",
        input: "nowhere.jsonl",
        exit: 2,
        said: &["nowhere.jsonl: no such file"],
        ..CASE
    },
    Case {
        trouble: "gzip, of two members",
        input: "packed/chat.jsonl.gz",
        documents: 4,
        skipped: &[("no_assistant", 1)],
        said: &["packed/chat.jsonl.gz:3: no assistant turn"],
        ..CASE
    },
    Case {
        trouble: "zstd, of two frames",
        input: "packed/chat.jsonl.zst",
        documents: 4,
        skipped: &[("no_assistant", 1)],
        said: &["packed/chat.jsonl.zst:3: no assistant turn"],
        ..CASE
    },
    Case {
        trouble: "Parquet",
        input: "packed/chat.parquet",
        documents: 4,
        skipped: &[("no_assistant", 1)],
        said: &["packed/chat.parquet:3: no assistant turn"],
        ..CASE
    },
    Case {
        trouble: "Parquet of columns",
        input: "packed/columns.parquet",
        documents: 2,
        skipped: &[("empty_assistant", 1)],
        ..CASE
    },
    Case {
        trouble: "Parquet of tokens",
        input: "packed/tokens.parquet",
        documents: 2,
        figures: &[("tokens", 11), ("supervised", 6)],
        ..CASE
    },
    Case {
        trouble: "Parquet without a known column",
        input: "packed/no_key.parquet",
        exit: 2,
        said: &["no_key.parquet:1: row 1 has no known conversation key (keys: title, body)"],
        ..CASE
    },
    Case {
        trouble: "gzip that breaks off",
        input: "packed/cut.jsonl.gz",
        exit: 2,
        said: &["cut.jsonl.gz: the gzip data cannot be read after row"],
        ..CASE
    },
    Case {
        trouble: "zstd that breaks off",
        input: "packed/cut.jsonl.zst",
        exit: 2,
        said: &["cut.jsonl.zst: the zstd data cannot be read after row"],
        ..CASE
    },
    Case {
        trouble: "Parquet that breaks off",
        input: "packed/cut.parquet",
        exit: 2,
        said: &["cut.parquet: the Parquet data cannot be read after row 0"],
        ..CASE
    },
    Case {
        trouble: "Parquet with spoilt pages",
        input: "packed/spoilt.parquet",
        exit: 2,
        said: &["spoilt.parquet: the Parquet data cannot be read after row 0"],
        ..CASE
    },
];

/// A model that must be refused: its folder in `tests/inputs/models`, and what must be said in one line.
const MODELS: &[(&str, &str, &[&str])] = &[
    (
        "index naming missing shards: all of them listed",
        "missing_shards",
        &[
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ],
    ),
    (
        "Git-LFS pointer",
        "lfs_pointer",
        &["model.safetensors", "Git LFS pointer", "git lfs pull"],
    ),
    (
        "truncated safetensors",
        "truncated",
        &["model.safetensors", "truncated"],
    ),
    (
        "untied but no lm_head",
        "untied",
        &["lm_head", "--assume-tied"],
    ),
    ("AWQ", "awq", &["awq", "quant"]),
    ("GPTQ", "gptq", &["gptq", "quant"]),
    ("GGUF", "gguf", &["safetensors"]),
    ("fp8 without scales", "fp8_without_scales", &["fp8"]),
    (
        "tokenizer of another model",
        "foreign_tokenizer",
        &["tokenizer.json", "151935", "tokenizer of another model"],
    ),
    (
        "no tokenizer.json",
        "no_tokenizer",
        &["no tokenizer.json", "copy it"],
    ),
    (
        "no chat template",
        "no_template",
        &["no chat template", "--chat-template FILE", "--raw-text"],
    ),
    (
        "a family that is not implemented",
        "unknown_family",
        &["MambaForCausalLM"],
    ),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn input(name: &str) -> PathBuf {
    root().join("tests/inputs").join(name)
}

fn launcher(dir: &Path, words: &[String]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_launcher"))
        .args(words)
        .current_dir(dir)
        .env("SLIPSTREAM_CACHE", dir.join("cache"))
        .output()
        .expect("the launcher runs")
}

#[test]
fn each_trouble_with_conversations_ends_as_it_should() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for case in ROWS {
        if let Err(what) = check(case, dir.path()) {
            wrong.push(format!("{} ({}): {what}", case.trouble, case.input));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

fn check(case: &Case, dir: &Path) -> Result<(), String> {
    let path = |name: &str| input(name).display().to_string();
    let mut words = vec![
        "check-data".to_owned(),
        path(case.input),
        "--json".to_owned(),
    ];
    words.extend(case.words.iter().map(|word| match word.strip_prefix('@') {
        Some(name) => path(name),
        None => (*word).to_owned(),
    }));
    let output = launcher(dir, &words);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() != Some(case.exit) {
        return Err(format!("exit {:?}: {stderr}", output.status.code()));
    }
    let errors = stderr
        .lines()
        .filter(|line| line.starts_with("error: "))
        .count();
    if errors != usize::from(case.exit == 2) || stderr.lines().count() != errors {
        return Err(format!("not one line: {stderr}"));
    }
    // What a person reads: refusals, examples with their places, notes, and the rows that were asked for.
    let mut said = stderr.into_owned();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let skipped = report["skipped"].as_object().cloned().unwrap_or_default();
    for example in skipped
        .values()
        .flat_map(|skip| skip["examples"].as_array().into_iter().flatten())
    {
        let text = |key: &str| example[key].as_str().unwrap_or_default().to_owned();
        said.push_str(&format!("{}: {}\n", text("place"), text("message")));
    }
    for note in report["notes"].as_array().into_iter().flatten() {
        said.push_str(&format!("{}\n", note.as_str().unwrap_or_default()));
    }
    for row in report["shown"].as_array().into_iter().flatten() {
        said.push_str(&format!("{}\n", row["text"].as_str().unwrap_or_default()));
    }
    if let Some(missing) = case.said.iter().find(|words| !said.contains(**words)) {
        return Err(format!("does not say {missing:?} but\n{said}"));
    }
    let found: Vec<(String, u64)> = skipped
        .iter()
        .map(|(reason, skip)| (reason.clone(), skip["rows"].as_u64().unwrap_or(0)))
        .collect();
    let expected: Vec<(String, u64)> = case
        .skipped
        .iter()
        .map(|&(reason, rows)| (reason.to_owned(), rows))
        .collect();
    if found != expected {
        return Err(format!("skips {found:?} and not {expected:?}"));
    }
    let documents = [("documents", case.documents)];
    for &(name, expected) in documents.iter().chain(case.figures) {
        let found = report[name].as_u64().unwrap_or(0);
        if found != expected {
            return Err(format!("{name}: {found} and not {expected}"));
        }
    }
    Ok(())
}

/// The demo's model with an overlay.
fn model(dir: &Path, name: &str) -> PathBuf {
    let to = dir.join(name);
    fs::create_dir(&to).unwrap();
    let overlay = input("models").join(name);
    for from in [root().join("assets/tiny-target"), overlay.clone()] {
        for entry in fs::read_dir(from).unwrap().flatten() {
            if entry.file_name() != "REMOVE" {
                fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
            }
        }
    }
    for line in fs::read_to_string(overlay.join("REMOVE"))
        .unwrap_or_default()
        .lines()
    {
        fs::remove_file(to.join(line)).unwrap();
    }
    to
}

#[test]
fn each_trouble_with_a_model_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (trouble, name, said) in MODELS {
        let words = [
            "--target-model".to_owned(),
            model(dir.path(), name).display().to_string(),
            "--data".to_owned(),
            input("one_row.jsonl").display().to_string(),
            "--output".to_owned(),
            format!("run-{name}"),
        ];
        let output = launcher(dir.path(), &words);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let errors: Vec<&str> = stderr
            .lines()
            .filter(|line| line.starts_with("error: "))
            .collect();
        let whole = errors.len() == 1
            && errors[0].contains(name)
            && said.iter().all(|words| errors[0].contains(words));
        if output.status.code() != Some(2) || !whole {
            let code = output.status.code();
            wrong.push(format!("{trouble} ({name}): exit {code:?}: {stderr}"));
        }
        if dir.path().join(format!("run-{name}/run.json")).exists() {
            wrong.push(format!("{trouble} ({name}): a run was begun"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Everything that is wrong with data, model and template is told together, each in one line.
#[test]
fn all_troubles_are_told_in_one_go() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| input(name).display().to_string();
    let mut words = vec!["--target-model".to_owned()];
    words.push(model(dir.path(), "awq").display().to_string());
    let template = dir.path().join("broken.jinja");
    fs::write(&template, "{% if %}").unwrap();
    words.extend(["--chat-template".to_owned(), template.display().to_string()]);
    words.push("--data".to_owned());
    for name in [
        "nowhere.jsonl",
        "no_key.jsonl",
        "packed/cut.parquet",
        "one_row.jsonl",
    ] {
        words.push(path(name));
    }
    words.extend(["--output".to_owned(), "run".to_owned()]);
    let output = launcher(dir.path(), &words);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for part in [
        "nowhere.jsonl",
        "no_key.jsonl",
        "cut.parquet",
        "broken.jinja",
        "awq",
    ] {
        let lines = stderr.lines().filter(|line| line.contains(part));
        assert_eq!(lines.count(), 1, "{part}: {stderr}");
    }
    assert_eq!(stderr.lines().count(), 5, "{stderr}");
}
