//! `launcher check-data`: what data files hold, before a run is spent on them.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::ops::ControlFlow;

use serde_json::{Value, json};

use super::options::CheckDataOptions;
use super::prepare::{Refusal, say_progress};
use crate::data::statistics::{Duplicates, Lengths, Spread, duplicates, lengths};
use crate::data::{
    self, DataReport, Document, EXAMPLES, Inspection, PrepareRequest, Prepared, demo,
};
use crate::monitor::console::Console;

/// Documents that are shown unless rows were chosen, and how many tokens of each.
const SHOWN: usize = 3;
const SHOWN_TOKENS: usize = 400;
/// Columns of the longest bar of the histogram.
const BAR: u64 = 40;

/// Checks; returns the launcher's exit code: 2 where a run would refuse this data.
pub fn check_data(options: &CheckDataOptions) -> u8 {
    let refuse = |lines: Vec<String>| {
        for line in lines {
            eprintln!("error: {line}");
        }
        2
    };
    let found = match inspect(options) {
        Ok(found) => found,
        Err(Refusal(lines)) => return refuse(lines),
    };
    let text = match options.json {
        true => format!("{:#}\n", figures(options, &found)),
        false => report(options, &found),
    };
    // A closed pipe leaves nobody to tell.
    let _ = io::stdout().lock().write_all(text.as_bytes());
    match found.inspection.refusal {
        Some(error) => refuse(vec![error.to_string()]),
        None => 0,
    }
}

struct Found {
    inspection: Inspection,
    lengths: Lengths,
    duplicates: Duplicates,
}

fn inspect(options: &CheckDataOptions) -> Result<Found, Refusal> {
    let model_dir = match &options.target_model {
        Some(model) => model.clone(),
        None => demo::write(&data::default_cache_dir().join("demo"))?.model_dir,
    };
    let request = PrepareRequest {
        data: options.files.clone(),
        flag: "check-data",
        model_dir,
        chat_template: options.chat_template.clone(),
        options: options.text.clone(),
        cache_dir: data::default_cache_dir(),
    };
    let console = Console::new(options.json);
    if options.target_model.is_none() {
        console.line("with the tokenizer and template of the demo model; --target-model DIR gives a real model's figures");
    }
    let problems = |error: data::DataError| {
        Refusal(error.into_list().iter().map(ToString::to_string).collect())
    };
    let mut say = say_progress(&console);
    let inspection = data::inspect(&request, &mut |now| {
        say(now);
        ControlFlow::Continue(())
    })
    .map_err(problems);
    console.end_live();
    let inspection = inspection?;
    let set = &inspection.prepared.set;
    Ok(Found {
        lengths: lengths(set),
        duplicates: duplicates(set, EXAMPLES),
        inspection,
    })
}

/// `file:line` of a document.
fn place(prepared: &Prepared, document: usize) -> String {
    let info = prepared.set.info(document);
    prepared.report.line(info.file, info.line)
}

fn report(options: &CheckDataOptions, found: &Found) -> String {
    let prepared = &found.inspection.prepared;
    let report = &prepared.report;
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    let share = |part: u64, all: u64| 100.0 * part as f64 / all.max(1) as f64;
    line(format!(
        "{} rows, {} documents, {} tokens of which {} supervised ({:.1} %)",
        report.rows,
        report.documents,
        report.tokens,
        report.supervised,
        share(report.supervised, report.tokens)
    ));
    let lengths = &found.lengths;
    for (name, spread) in [
        ("tokens", &lengths.tokens),
        ("supervised", &lengths.supervised),
    ] {
        line(format!(
            "{name:>10}: min {}, median {}, mean {:.1}, 95 % {}, 99 % {}, max {}",
            spread.min, spread.median, spread.mean, spread.p95, spread.p99, spread.max
        ));
    }
    let most = lengths.histogram.iter().map(|bin| bin.documents).max();
    for bin in &lengths.histogram {
        let bar = (bin.documents * BAR).div_ceil(most.unwrap_or(1).max(1));
        let range = format!("{}–{}", bin.from, bin.to);
        let bar = "█".repeat(bar as usize);
        line(format!("{range:>16} {bar} {}", bin.documents));
    }
    line(format!("skipped: {} rows", report.skipped_rows()));
    for (reason, skip) in &report.skipped {
        line(format!("  {} {reason}", skip.count));
        for example in &skip.examples {
            let message = visible(&example.message);
            line(format!("    {}: {message}", report.place(example)));
        }
    }
    line(format!(
        "duplicates: {} documents repeat an earlier one",
        found.duplicates.documents
    ));
    for &(repeat, first) in &found.duplicates.examples {
        line(format!(
            "    {} repeats {}",
            place(prepared, repeat),
            place(prepared, first)
        ));
    }
    for note in report.notes() {
        line(format!("note: {note}"));
    }
    let colour = Colours::of_stdout();
    match &options.rows {
        Some(rows) => {
            for &row in rows {
                match document_of(prepared, row) {
                    Some(document) => view(&mut out, prepared, document, usize::MAX, colour),
                    None => writeln!(out, "\nrow {row}: {}", why_not(report, row))
                        .expect("writing to a String does not fail"),
                }
            }
        }
        None => {
            for document in 0..prepared.set.len().min(SHOWN) {
                view(&mut out, prepared, document, SHOWN_TOKENS, colour);
            }
        }
    }
    out
}

fn why_not(report: &DataReport, row: u32) -> String {
    match u64::from(row) < report.rows {
        true => "was skipped".to_owned(),
        false => format!(
            "does not exist (rows 0 to {})",
            report.rows.saturating_sub(1)
        ),
    }
}

/// The document of a row; rows ascend with documents.
fn document_of(prepared: &Prepared, row: u32) -> Option<usize> {
    let set = &prepared.set;
    let (mut from, mut to) = (0, set.len());
    while from < to {
        let middle = from.midpoint(to);
        match set.info(middle).row.cmp(&u64::from(row)) {
            std::cmp::Ordering::Less => from = middle + 1,
            std::cmp::Ordering::Equal => return Some(middle),
            std::cmp::Ordering::Greater => to = middle,
        }
    }
    None
}

/// How supervised tokens and the others are told apart.
#[derive(Clone, Copy)]
struct Colours {
    supervised: &'static str,
    context: &'static str,
    end: &'static str,
}

impl Colours {
    /// Colours on a terminal that wants them (<https://no-color.org>).
    fn of_stdout() -> Colours {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        match wanted && io::stdout().is_terminal() {
            true => Colours {
                supervised: "\x1b[1;32m",
                context: "\x1b[2m",
                end: "\x1b[0m",
            },
            false => Colours {
                supervised: "",
                context: "",
                end: "",
            },
        }
    }
}

/// Shows a document as stretches of equal mask: positions, text and ids of each.
fn view(out: &mut String, prepared: &Prepared, number: usize, most: usize, colours: Colours) {
    let document = prepared.set.document(number);
    let info = prepared.set.info(number);
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    line(String::new());
    line(format!(
        "row {} ({}): {} tokens, {} supervised",
        info.row,
        place(prepared, number),
        info.tokens,
        info.supervised
    ));
    for (start, end) in stretches(document) {
        if start >= most {
            line(format!(
                "  … {} more tokens; --rows {} shows them",
                document.ids.len() - start,
                info.row
            ));
            break;
        }
        let ids = &document.ids[start..end];
        let (colour, what) = match document.mask[start] {
            1 => (colours.supervised, "mask 1"),
            _ => (colours.context, "mask 0"),
        };
        let text = prepared.tokenizer.decode(ids).unwrap_or_default();
        line(format!("  {start}–{} {what}", end - 1));
        for part in text.split_inclusive('\n') {
            line(format!("    {colour}{}{}", visible(part), colours.end));
        }
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        line(format!("    {colour}{}{}", ids.join(" "), colours.end));
    }
}

/// Start and end of each stretch of equal mask.
fn stretches(document: Document<'_>) -> Vec<(usize, usize)> {
    let mut at = 0;
    let runs = document.mask.chunk_by(|a, b| a == b).map(|run| {
        let start = at;
        at += run.len();
        (start, at)
    });
    runs.collect()
}

/// Text that a terminal shows as it is: no control characters, line ends as ⏎.
fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => shown.push('⏎'),
            c if c.is_control() => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown
}

fn figures(options: &CheckDataOptions, found: &Found) -> Value {
    let prepared = &found.inspection.prepared;
    let report = &prepared.report;
    let spread = |spread: &Spread| json!(spread);
    let skipped: serde_json::Map<String, Value> = report
        .skipped
        .iter()
        .map(|(reason, skip)| {
            let examples: Vec<Value> = skip
                .examples
                .iter()
                .map(|e| json!({"place": report.place(e), "message": e.message}))
                .collect();
            let entry = json!({"rows": skip.count, "examples": examples});
            (reason.name().to_owned(), entry)
        })
        .collect();
    let repeats: Vec<Value> = found
        .duplicates
        .examples
        .iter()
        .map(|&(repeat, first)| {
            json!({"place": place(prepared, repeat), "repeats": place(prepared, first)})
        })
        .collect();
    let rows: Vec<Value> = options
        .rows
        .iter()
        .flatten()
        .map(|&row| match document_of(prepared, row) {
            Some(number) => {
                let document = prepared.set.document(number);
                json!({
                    "row": row,
                    "place": place(prepared, number),
                    "text": prepared.tokenizer.decode(document.ids).unwrap_or_default(),
                    "ids": document.ids,
                    "mask": document.mask,
                })
            }
            None => json!({"row": row, "problem": why_not(report, row)}),
        })
        .collect();
    json!({
        "files": report.files,
        "rows": report.rows,
        "documents": report.documents,
        "tokens": report.tokens,
        "supervised": report.supervised,
        "truncated_documents": report.truncated,
        "truncated_tokens": report.truncated_tokens,
        "context_only_turns": report.context_only_turns,
        "tokens_per_document": spread(&found.lengths.tokens),
        "supervised_per_document": spread(&found.lengths.supervised),
        "histogram": found.lengths.histogram,
        "skipped": skipped,
        "duplicates": {"documents": found.duplicates.documents, "examples": repeats},
        "notes": report.notes(),
        "shown": rows,
        "refused": found.inspection.refusal.as_ref().map(ToString::to_string),
    })
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn text_from_a_file_cannot_command_a_terminal() {
        assert_eq!(visible("a\x1b[2Jb\n\u{9b}é\t"), "a\\u{1b}[2Jb⏎\\u{9b}é\\t");
    }
}
