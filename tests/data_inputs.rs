//! What the field gets wrong about conversations: a small file for each line of trouble under
//! `tests/inputs`, and what must come of it.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use slipstream::data::{
    DataError, PrepareRequest, Prepared, SkipReason, TextOptions, check, prepare,
};
use tempfile::TempDir;

const CHATML: &str = "";
const ALTERNATING: &str = "alternating.jinja";
const TOOLS: &str = "tools.jinja";
const THINKING: &str = "thinking.jinja";
const PLAIN: &str = "plain.jinja";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn input(name: &str) -> PathBuf {
    root().join("tests/inputs").join(name)
}

/// A request for one input with the demo's tokenizer; an empty template name means the demo's own.
fn request(name: &str, template: &str, cache: &TempDir) -> PrepareRequest {
    PrepareRequest {
        data: vec![input(name)],
        flag: "--data",
        model_dir: root().join("assets/tiny-target"),
        chat_template: (!template.is_empty()).then(|| input("templates").join(template)),
        options: TextOptions::default(),
        cache_dir: cache.path().to_owned(),
    }
}

fn run(request: &PrepareRequest) -> Result<Prepared, DataError> {
    prepare(request, &mut |_| ControlFlow::Continue(()))
}

/// Row numbers of the documents.
fn rows(prepared: &Prepared) -> Vec<u64> {
    prepared.set.documents().map(|d| d.row).collect()
}

/// The supervised text of a document, spans joined by `|`.
fn supervised(prepared: &Prepared, i: usize) -> String {
    let document = prepared.set.document(i);
    let spans: Vec<String> = document
        .answers()
        .map(|span| prepared.tokenizer.decode(&document.ids[span]).unwrap())
        .collect();
    spans.join("|")
}

struct Case {
    file: &'static str,
    template: &'static str,
    /// Rows kept.
    rows: &'static [u64],
    /// Reason, count and the first example as `line[:column] message`.
    skipped: &'static [(SkipReason, u64, &'static str)],
}

#[test]
fn each_row_is_kept_or_skipped_for_its_reason() {
    use SkipReason::*;
    let cases = [
        Case {
            file: "one_row.jsonl",
            template: CHATML,
            rows: &[0],
            skipped: &[],
        },
        Case {
            file: "openai.jsonl",
            template: CHATML,
            rows: &[0, 1],
            skipped: &[],
        },
        Case {
            file: "sharegpt.jsonl",
            template: CHATML,
            rows: &[0, 1, 2, 3],
            skipped: &[],
        },
        Case {
            file: "empty_kinds.jsonl",
            template: CHATML,
            rows: &[0],
            skipped: &[
                (Empty, 2, "2 no messages"),
                (NoAssistant, 2, "4 no assistant turn"),
                (EmptyAssistant, 3, "5 message 2 has no text"),
            ],
        },
        Case {
            file: "roles.jsonl",
            template: CHATML,
            rows: &[0, 1, 2],
            skipped: &[(UnknownRole, 2, "4 message 2: role `narrator`")],
        },
        Case {
            file: "roles.jsonl",
            template: ALTERNATING,
            rows: &[2],
            skipped: &[
                (UnknownRole, 2, "4 message 2: role `narrator`"),
                (
                    TemplateError,
                    2,
                    "1 turns must alternate, starting with the user (line 4 of the template)",
                ),
            ],
        },
        Case {
            file: "template_raises.jsonl",
            template: ALTERNATING,
            rows: &[0, 2],
            skipped: &[(
                TemplateError,
                1,
                "2 asked to raise (line 7 of the template)",
            )],
        },
        Case {
            file: "tools.jsonl",
            template: TOOLS,
            rows: &[0, 1, 2, 3, 4],
            skipped: &[],
        },
        // The demo's template cannot show calls, and shows no definitions.
        Case {
            file: "tools.jsonl",
            template: CHATML,
            rows: &[3, 4],
            skipped: &[(
                ToolsUnsupported,
                3,
                "1 tried to use + operator on unsupported types string and undefined",
            )],
        },
        // This one leaves tool results out without a word.
        Case {
            file: "tools.jsonl",
            template: PLAIN,
            rows: &[3],
            skipped: &[(
                ToolsUnsupported,
                4,
                "1 the template does not show tool definitions",
            )],
        },
        Case {
            file: "parts.jsonl",
            template: CHATML,
            rows: &[0, 1],
            skipped: &[(
                Multimodal,
                4,
                "3 message 1: a content part of type `image_url`",
            )],
        },
        Case {
            file: "shapes.jsonl",
            template: CHATML,
            rows: &[0],
            skipped: &[
                (
                    NoConversation,
                    3,
                    "7 no `messages`, `conversations`, `prompt` or other known key",
                ),
                (
                    MalformedMessage,
                    6,
                    "2 message 1: is a string, not an object",
                ),
            ],
        },
        Case {
            file: "no_anchor.jsonl",
            template: CHATML,
            rows: &[1],
            skipped: &[(NoAnchor, 1, "1 no two supervised tokens in a row")],
        },
        Case {
            file: "short.jsonl",
            template: CHATML,
            rows: &[0, 2],
            skipped: &[(
                TooShort,
                1,
                "2 1 supervised tokens, fewer than --min-loss-tokens 2",
            )],
        },
        Case {
            file: "bom_crlf_blank.jsonl",
            template: CHATML,
            rows: &[0, 1, 2],
            skipped: &[],
        },
        Case {
            file: "invalid_utf8.jsonl",
            template: CHATML,
            rows: &[0, 2],
            skipped: &[(InvalidUtf8, 1, "2:47 invalid UTF-8 at byte 46 of the line")],
        },
        Case {
            file: "nul.jsonl",
            template: CHATML,
            rows: &[0, 3, 4],
            skipped: &[(NulByte, 2, "2:1 NUL at byte 0 of the line")],
        },
        Case {
            file: "folder",
            template: CHATML,
            rows: &[0, 1, 2],
            skipped: &[],
        },
    ];
    for case in cases {
        let cache = tempfile::tempdir().unwrap();
        let what = format!("{} with {:?}", case.file, case.template);
        let prepared = run(&request(case.file, case.template, &cache))
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(rows(&prepared), case.rows, "{what}");
        let report = &prepared.report;
        assert_eq!(report.documents, case.rows.len() as u64, "{what}");
        assert_eq!(
            report.rows,
            report.documents + report.skipped_rows(),
            "{what}"
        );
        let skipped: Vec<(SkipReason, u64, String)> = report
            .skipped
            .iter()
            .map(|(reason, skip)| {
                let first = &skip.examples[0];
                let column = first.column.map(|c| format!(":{c}")).unwrap_or_default();
                let text = format!("{}{column} {}", first.line, first.message);
                (*reason, skip.count, text)
            })
            .collect();
        let as_expected = |(found, &(reason, count, text)): (&(SkipReason, u64, String), _)| {
            (found.0, found.1) == (reason, count) && found.2.starts_with(text)
        };
        assert!(
            skipped.len() == case.skipped.len()
                && skipped.iter().zip(case.skipped).all(as_expected),
            "{what}: {skipped:?}"
        );
    }
}

#[test]
fn each_file_that_cannot_be_used_refuses() {
    for (name, message) in [
        (
            "nowhere.jsonl",
            "no such file or folder; check the path given to --data",
        ),
        ("zero_bytes.jsonl", "holds no record"),
        ("blank.jsonl", "holds no record"),
        (
            "no_key.jsonl",
            "no_key.jsonl:1: row 1 has no known conversation key (keys: title, body, id)",
        ),
        (
            "text_key.jsonl",
            "(keys: text); train on the plain text under `text` with --raw-text",
        ),
        (
            "array.json",
            "one JSON array, not JSON lines in UTF-8 or Parquet; write one record per line",
        ),
        ("array_one_line.json", "one JSON array"),
        (
            "lfs_pointer.jsonl",
            "Git LFS pointer, not the file; run `git lfs pull`",
        ),
        ("utf16.jsonl", "UTF-16 text"),
        ("templates", "the folder holds no .jsonl"),
        (
            "nothing_usable.jsonl",
            "none of the 3 rows can be trained on: 1 empty",
        ),
        (
            "malformed_many.jsonl",
            "3 of 23 lines are not valid JSON (over 1 %)",
        ),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let error = run(&request(name, CHATML, &cache)).unwrap_err().to_string();
        assert!(error.contains(message), "{name}: {error}");
        assert!(
            error.contains(name) || name == "blank.jsonl",
            "{name}: {error}"
        );
        assert!(!error.contains('\n'), "{name}: {error}");
        let left = std::fs::read_dir(cache.path()).unwrap().count();
        assert_eq!(left, 0, "{name} left something in the cache");
    }
}

#[test]
fn malformed_lines_are_named_by_line_and_column() {
    let cache = tempfile::tempdir().unwrap();
    let error = run(&request("malformed_many.jsonl", CHATML, &cache))
        .unwrap_err()
        .to_string();
    for place in [
        "malformed_many.jsonl:11:15: expected value",
        "malformed_many.jsonl:12:2: expected ident",
        "malformed_many.jsonl:13:18: trailing characters",
    ] {
        assert!(error.contains(place), "{error}");
    }

    // One line in a hundred is allowed.
    let few = run(&request("malformed_few.jsonl", CHATML, &cache)).unwrap();
    assert_eq!(few.report.rows, 100);
    assert_eq!(few.report.documents, 99);
    let skip = &few.report.skipped[&SkipReason::Malformed];
    assert_eq!((skip.count, skip.examples[0].line), (1, 58));
    assert_eq!(few.set.info(57).row, 58);
    assert_eq!(few.set.info(57).line, 59);
}

#[test]
fn all_problems_of_files_come_together() {
    let cache = tempfile::tempdir().unwrap();
    let request = PrepareRequest {
        data: vec![
            input("nowhere.jsonl"),
            input("zero_bytes.jsonl"),
            input("one_row.jsonl"),
            input("no_key.jsonl"),
        ],
        model_dir: root().join("no-such-model"),
        ..request("one_row.jsonl", CHATML, &cache)
    };
    let DataError::Several(list) = run(&request).unwrap_err() else {
        panic!("expected several problems");
    };
    let lines: Vec<String> = list.iter().map(ToString::to_string).collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    for (line, part) in lines
        .iter()
        .zip(["nowhere", "zero_bytes", "no_key", "no-such-model"])
    {
        assert!(line.contains(part), "{line}");
    }
    assert_eq!(check(&request).len(), 4);
}

#[test]
fn several_files_count_rows_through() {
    let cache = tempfile::tempdir().unwrap();
    let request = PrepareRequest {
        data: vec![input("openai.jsonl"), input("parts.jsonl"), input("folder")],
        ..request("openai.jsonl", CHATML, &cache)
    };
    let prepared = run(&request).unwrap();
    assert_eq!(rows(&prepared), [0, 1, 2, 3, 8, 9, 10]);
    let info = prepared.set.info(4);
    assert_eq!((info.file, info.line), (2, 1));
    let example = &prepared.report.example_lines()[0];
    assert!(
        example
            .ends_with("parts.jsonl:3: multimodal: message 1: a content part of type `image_url`"),
        "{example}"
    );
}

#[test]
fn spans_are_the_assistants_words_up_to_the_end_token() {
    let cache = tempfile::tempdir().unwrap();
    let end = "<|im_end|>";
    let openai = run(&request("openai.jsonl", CHATML, &cache)).unwrap();
    assert_eq!(
        supervised(&openai, 0),
        format!("A spider has eight legs.{end}")
    );
    assert_eq!(supervised(&openai, 1), format!("Hello.{end}|Goodbye.{end}"));

    let parts = run(&request("parts.jsonl", CHATML, &cache)).unwrap();
    assert_eq!(parts.set.document(0).ids, parts.set.document(1).ids);

    // A template that trims, without a line end behind the end token, and that writes its own bos.
    let trimmed = run(&request("openai.jsonl", ALTERNATING, &cache)).unwrap();
    assert_eq!(
        supervised(&trimmed, 1),
        format!("Hello.{end}|Goodbye.{end}")
    );
    let bos = trimmed.tokenizer.special_id("bos_token").unwrap();
    let ids = trimmed.set.document(0).ids;
    assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1);

    // No special token at all: the end of the text, not the template's blank line. The space before
    // the answer belongs to the prompt, so a token that joins it to the first word is not supervised.
    let plain = run(&request("openai.jsonl", PLAIN, &cache)).unwrap();
    assert!(supervised(&plain, 0).ends_with("spider has eight legs."));
    let text = plain.tokenizer.decode(plain.set.document(0).ids).unwrap();
    assert_eq!(
        text,
        "Q: How many legs has a spider?\nA: A spider has eight legs.\n"
    );

    // Calls are the assistant's words too.
    let tools = run(&request("tools.jsonl", TOOLS, &cache)).unwrap();
    let call = format!("<call>weather city=Oslo</call>{end}|It rains.{end}");
    assert_eq!(supervised(&tools, 0), call);
    assert_eq!(supervised(&tools, 1), call);
}

#[test]
fn the_end_of_a_cut_answer_is_not_supervised() {
    let cache = tempfile::tempdir().unwrap();
    let cut = run(&request("cut.jsonl", CHATML, &cache)).unwrap();
    let text = "A spider has eight legs.";
    let end = "<|im_end|>";
    assert_eq!(supervised(&cut, 0), format!("{text}{end}"));
    assert_eq!(supervised(&cut, 1), text);
    assert_eq!(supervised(&cut, 2), format!("{text}{end}"));
    assert_eq!(supervised(&cut, 3), text);
    assert_eq!(cut.set.document(0).ids, cut.set.document(1).ids);
}

#[test]
fn a_turn_that_renders_otherwise_later_is_context() {
    let cache = tempfile::tempdir().unwrap();
    let set = run(&request("openai.jsonl", THINKING, &cache)).unwrap();
    // The first answer of two has an empty thought only while it is the last.
    assert_eq!(
        supervised(&set, 1),
        "<think>\n\n</think>\n\nGoodbye.<|im_end|>"
    );
    assert_eq!(set.report.context_only_turns, 1);
    assert!(set.report.notes()[0].contains("1 assistant turns are context only"));
}

#[test]
fn long_rows_are_cut_and_the_loss_is_reported() {
    let cache = tempfile::tempdir().unwrap();
    let mut request = request("long.jsonl", CHATML, &cache);
    let whole = run(&request).unwrap();
    assert_eq!(whole.report.truncated_share(), 0.0);
    let all: u64 = whole.set.tokens();
    assert_eq!(whole.report.tokens, all);

    request.options.max_length = 50;
    let cut = run(&request).unwrap();
    assert_eq!(rows(&cut), [0, 1]);
    assert_eq!(cut.set.info(1).tokens, 50);
    let skip = &cut.report.skipped[&SkipReason::NoLossTokensAfterTruncation];
    assert_eq!((skip.count, skip.examples[0].line), (1, 3));
    assert_eq!(cut.report.truncated, 1);
    let kept = cut.set.tokens() + 50;
    assert_eq!(cut.report.truncated_tokens, all - kept);
    let share = (all - kept) as f64 / all as f64;
    assert!((cut.report.truncated_share() - share).abs() < 1e-12);
    assert!(cut.report.notes()[0].contains("of all tokens are lost"));
}

#[test]
fn only_the_last_turn_if_asked() {
    let cache = tempfile::tempdir().unwrap();
    let mut request = request("openai.jsonl", CHATML, &cache);
    request.options.last_turn_only = true;
    let set = run(&request).unwrap();
    assert_eq!(supervised(&set, 1), "Goodbye.<|im_end|>");
}

#[test]
fn raw_text_needs_no_template() {
    let cache = tempfile::tempdir().unwrap();
    let mut request = request("text_key.jsonl", CHATML, &cache);
    request.options.raw_text = true;
    let text = run(&request).unwrap();
    assert!(text.template.is_none());
    assert_eq!(rows(&text), [0, 2]);
    assert_eq!(supervised(&text, 0), "Plain text without turns.");
    assert!(text.report.skipped.contains_key(&SkipReason::Empty));

    request.data = vec![input("openai.jsonl")];
    let chat = run(&request).unwrap();
    let ids = chat.set.document(1).ids;
    assert_eq!(
        chat.tokenizer.decode(ids).unwrap(),
        "Be brief.\nHi.\nHello.\nBye.\nGoodbye."
    );
    assert_eq!(supervised(&chat, 1), "Hello.|Goodbye.");
}

#[test]
fn a_template_variable_reaches_the_template() {
    let cache = tempfile::tempdir().unwrap();
    let template = cache.path().join("t.jinja");
    std::fs::write(
        &template,
        "{{ mood }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    .unwrap();
    let mut request = request("one_row.jsonl", CHATML, &cache);
    request.chat_template = Some(template);
    let kwarg = slipstream::data::parse_template_kwarg("mood=calm").unwrap();
    request.options.template_kwargs = vec![kwarg];
    let set = run(&request).unwrap();
    let text = set.tokenizer.decode(set.set.document(0).ids).unwrap();
    assert!(text.starts_with("calm[user]How"), "{text}");
}

#[test]
fn the_same_rows_are_the_same_set_however_they_are_packed() {
    let cache = tempfile::tempdir().unwrap();
    let set = |name: &str| run(&request(name, CHATML, &cache)).unwrap().set;
    for (plain, others) in [
        (
            "packed/chat.jsonl",
            &[
                "packed/chat.jsonl.gz",
                "packed/chat.jsonl.zst",
                "packed/chat.parquet",
            ][..],
        ),
        ("packed/columns.jsonl", &["packed/columns.parquet"]),
        ("packed/tokens.jsonl", &["packed/tokens.parquet"]),
    ] {
        let plain = set(plain);
        assert!(plain.len() >= 2);
        for name in others {
            assert_eq!(set(name).content_hash(), plain.content_hash(), "{name}");
        }
    }
}

#[test]
fn columns_become_turns() {
    let cache = tempfile::tempdir().unwrap();
    let set = run(&request("columns.jsonl", CHATML, &cache)).unwrap();
    assert_eq!(rows(&set), [0, 1, 2, 3, 4, 9]);
    let text = |i: usize| set.tokenizer.decode(set.set.document(i).ids).unwrap();
    let turn = |role: &str, said: &str| format!("<|im_start|>{role}\n{said}<|im_end|>\n");
    let spider = turn("user", "How many legs has a spider?")
        + &turn("assistant", "A spider has eight legs.");
    assert_eq!(text(0), spider);
    assert_eq!(text(2), spider);
    assert_eq!(
        text(1),
        turn("system", "Be brief.")
            + &turn("user", "Sort these.\n\nb a")
            + &turn("assistant", "a b")
    );
    assert_eq!(
        text(3),
        turn("system", "Be brief.") + &turn("user", "Hi.") + &turn("assistant", "Hello.")
    );
    assert_eq!(
        supervised(&set, 4),
        "First.<|im_end|>|Second.<|im_end|>|Now this.<|im_end|>"
    );
    // Cut by length: its end token is the template's.
    assert_eq!(supervised(&set, 5), "A spider has");
}

#[test]
fn tokens_made_elsewhere_need_no_template_and_stay_as_they_are() {
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let tokenizer = root().join("assets/tiny-target/tokenizer.json");
    std::fs::copy(tokenizer, model.join("tokenizer.json")).unwrap();
    let mut request = PrepareRequest {
        model_dir: model,
        ..request("tokens.jsonl", CHATML, &cache)
    };
    let set = run(&request).unwrap();
    assert!(set.template.is_none());
    assert_eq!(rows(&set), [0, 1, 2]);
    assert_eq!(set.set.document(0).ids, [1, 88, 901, 202, 42, 734, 2]);
    assert_eq!(set.set.document(0).mask, [0, 0, 0, 0, 1, 1, 1]);
    assert_eq!(set.set.document(1).mask, [0, 1, 1, 1]);
    assert_eq!(set.set.document(2).mask, [0, 1, 1, 1]);

    // A conversation among them cannot be rendered, and one at the beginning refuses.
    request.data.push(input("one_row.jsonl"));
    let error = run(&request).unwrap_err().to_string();
    assert!(error.contains("no chat template"), "{error}");

    request.data = vec![input("packed/tokens.jsonl")];
    request.options.last_turn_only = true;
    request.options.min_loss_tokens = 1;
    let last = run(&request).unwrap();
    assert_eq!(last.set.document(0).mask, [0, 0, 0, 0, 1, 1, 1]);
    // Its last stretch is one token, which gives no anchor.
    assert_eq!(last.report.skipped[&SkipReason::NoAnchor].count, 1);
}
