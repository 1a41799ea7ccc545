//! What a set of conversations held, and why rows were left out.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// How many examples of each reason are kept.
pub const EXAMPLES: usize = 5;

/// Why a row was skipped before the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The line is not JSON.
    Malformed,
    /// The line is not UTF-8.
    InvalidUtf8,
    /// The line holds a NUL byte, as files do that were being written when a machine went down.
    NulByte,
    /// A row after the first without a known conversation key.
    NoConversation,
    /// A conversation without messages.
    Empty,
    /// A message of a shape that is neither OpenAI's nor ShareGPT's.
    MalformedMessage,
    /// A role outside the map of roles.
    UnknownRole,
    /// Images, audio or video.
    Multimodal,
    /// No assistant turn.
    NoAssistant,
    /// An assistant turn without text and without tool calls.
    EmptyAssistant,
    /// A row that was tokenised elsewhere, with ids that are not the tokenizer's or a mask that does not fit.
    BadTokens,
    /// The template cannot show the row's tools, tool calls or tool results.
    ToolsUnsupported,
    /// The template raised an error.
    TemplateError,
    /// No assistant turn is a stable part of the whole render.
    NoLossTokens,
    /// All supervised tokens lie behind the maximum length.
    NoLossTokensAfterTruncation,
    /// Fewer supervised tokens than asked for.
    TooShort,
    /// No two supervised tokens in a row, so no anchor.
    NoAnchor,
}

impl SkipReason {
    /// The name used in summaries and logs.
    pub fn name(self) -> &'static str {
        match self {
            SkipReason::Malformed => "malformed",
            SkipReason::InvalidUtf8 => "invalid_utf8",
            SkipReason::NulByte => "nul_byte",
            SkipReason::NoConversation => "no_conversation",
            SkipReason::Empty => "empty",
            SkipReason::MalformedMessage => "malformed_message",
            SkipReason::UnknownRole => "unknown_role",
            SkipReason::Multimodal => "multimodal",
            SkipReason::NoAssistant => "no_assistant",
            SkipReason::EmptyAssistant => "empty_assistant",
            SkipReason::BadTokens => "bad_tokens",
            SkipReason::ToolsUnsupported => "tools_unsupported",
            SkipReason::TemplateError => "template_error",
            SkipReason::NoLossTokens => "no_loss_tokens",
            SkipReason::NoLossTokensAfterTruncation => "no_loss_tokens_after_truncation",
            SkipReason::TooShort => "too_short",
            SkipReason::NoAnchor => "no_anchor",
        }
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One reason to leave out one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Skip {
    pub(super) reason: SkipReason,
    /// Column in the line, in bytes from 1, where one is known.
    pub(super) column: Option<u64>,
    pub(super) message: String,
}

impl Skip {
    pub(super) fn new(reason: SkipReason, message: impl Into<String>) -> Skip {
        Skip {
            reason,
            column: None,
            message: message.into(),
        }
    }

    pub(super) fn at(reason: SkipReason, column: usize, message: impl Into<String>) -> Skip {
        Skip {
            reason,
            column: Some(column as u64),
            message: message.into(),
        }
    }
}

/// One of the first rows skipped for a reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkipExample {
    /// Position of the file in the list of data files.
    pub file: u32,
    /// Line in that file, from 1.
    pub line: u64,
    /// Column in bytes from 1, where one is known.
    pub column: Option<u64>,
    /// What was wrong.
    pub message: String,
}

/// Rows skipped for one reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkipCount {
    /// How many.
    pub count: u64,
    /// The first [`EXAMPLES`] of them, in file order.
    pub examples: Vec<SkipExample>,
}

/// What a set of conversations held.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DataReport {
    /// The data files, as they were given this time.
    #[serde(skip)]
    pub files: Vec<String>,
    /// Lines read, blank ones aside.
    pub rows: u64,
    /// Rows kept.
    pub documents: u64,
    /// Tokens of the documents, after truncation.
    pub tokens: u64,
    /// Supervised tokens among them.
    pub supervised: u64,
    /// Documents cut at the maximum length.
    pub truncated: u64,
    /// Tokens lost to that, skipped rows included.
    pub truncated_tokens: u64,
    /// Tokens before truncation of all rows that could be tokenised.
    pub tokens_before: u64,
    /// Assistant turns that are context only, because the whole conversation renders them otherwise
    /// than its beginning does.
    pub context_only_turns: u64,
    /// The template writes today's date, so a set made on another day differs.
    pub uses_date: bool,
    /// Rows left out, by reason.
    pub skipped: BTreeMap<SkipReason, SkipCount>,
}

impl DataReport {
    /// Share of all tokens that lay behind the maximum length, from 0 to 1.
    pub fn truncated_share(&self) -> f64 {
        match self.tokens_before {
            0 => 0.0,
            all => self.truncated_tokens as f64 / all as f64,
        }
    }

    /// Rows left out for any reason.
    pub fn skipped_rows(&self) -> u64 {
        self.skipped.values().map(|s| s.count).sum()
    }

    /// One line per example, `file:line[:column]: reason: message`.
    pub fn example_lines(&self) -> Vec<String> {
        self.skipped
            .iter()
            .flat_map(|(reason, skip)| {
                skip.examples
                    .iter()
                    .map(move |e| format!("{}: {reason}: {}", self.place(e), e.message))
            })
            .collect()
    }

    /// Things a person should know that are not errors, one per line.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.truncated_tokens > 0 {
            notes.push(format!(
                "{} of {} documents are longer than --max-length; {:.1} % of all tokens are lost",
                self.truncated,
                self.documents,
                100.0 * self.truncated_share()
            ));
        }
        if self.context_only_turns > 0 {
            notes.push(format!(
                "{} assistant turns are context only: the template renders them differently later in the conversation",
                self.context_only_turns
            ));
        }
        if self.uses_date {
            notes.push(
                "the chat template writes today's date; fix it with --template-kwarg (often date_string=…) to get the same tokens on another day"
                    .to_owned(),
            );
        }
        notes
    }

    pub(super) fn add(&mut self, skip: Skip, file: u32, line: u64) {
        let entry = self.skipped.entry(skip.reason).or_default();
        entry.count += 1;
        if entry.examples.len() < EXAMPLES {
            entry.examples.push(SkipExample {
                file,
                line,
                column: skip.column,
                message: shortened(skip.message),
            });
        }
    }

    /// `file:line[:column]`.
    pub fn place(&self, e: &SkipExample) -> String {
        let line = self.line(e.file, e.line);
        match e.column {
            Some(column) => format!("{line}:{column}"),
            None => line,
        }
    }

    /// `file:line` of a line, from 1, of the `file`-th file.
    pub fn line(&self, file: u32, line: u64) -> String {
        let file = self.files.get(file as usize).map_or("?", String::as_str);
        format!("{file}:{line}")
    }

    /// `3 no_assistant (chat.jsonl:7), …`, for messages.
    pub(super) fn reasons(&self) -> String {
        self.skipped
            .iter()
            .map(|(reason, skip)| match skip.examples.first() {
                Some(e) => format!("{} {reason} ({}: {})", skip.count, self.place(e), e.message),
                None => format!("{} {reason}", skip.count),
            })
            .collect::<Vec<_>>()
            .join(", ")
    }
}

/// Templates may raise with the whole conversation as their message.
fn shortened(mut message: String) -> String {
    const MOST: usize = 300;
    if let Some((end, _)) = message.char_indices().nth(MOST) {
        message.truncate(end);
        message.push('…');
    }
    message.replace(['\n', '\r'], " ")
}
