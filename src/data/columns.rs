//! Rows that hold a question and its answer under keys of their own instead of a list of messages.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::report::Skip;
use super::rows::{field, has_key, items, malformed};

/// Keys of questions, in order of preference.
const QUESTIONS: [&str; 4] = ["prompt", "instruction", "question", "query"];
/// Keys of answers, in order of preference.
const ANSWERS: [&str; 4] = ["response", "completion", "output", "answer"];
/// What an `instruction` is to be applied to; a paragraph of its own behind it.
const INPUTS: [&str; 2] = ["input", "context"];
const SYSTEMS: [&str; 2] = ["system", "system_prompt"];
/// Earlier turns, as pairs of question and answer.
const HISTORY: &str = "history";

/// The keys of a row's question and answer, if it has both.
pub(super) fn keys(row: &Value) -> Option<(&'static str, &'static str)> {
    let find = |names: [&'static str; 4]| names.into_iter().find(|k| has_key(row, k));
    Some((find(QUESTIONS)?, find(ANSWERS)?))
}

/// Whether a key of this name is read here.
pub(super) fn is_known_key(name: &str) -> bool {
    let lists = [&QUESTIONS[..], &ANSWERS, &INPUTS, &SYSTEMS];
    name == HISTORY || lists.into_iter().any(|list| list.contains(&name))
}

/// The row's conversation as messages. Question and answer may themselves be lists of messages.
pub(super) fn messages(row: &Value, question: &str, answer: &str) -> Result<Vec<Value>, Skip> {
    let mut messages = Vec::new();
    let system = SYSTEMS.iter().find_map(|k| text(row, k).transpose());
    if let Some(system) = system.transpose()? {
        messages.push(message("system", system));
    }
    if let Some(history) = field(row, HISTORY) {
        for pair in items(&history, "`history`")? {
            match items(&pair, "a turn of `history`")?.as_slice() {
                [question, answer] => {
                    for (role, said) in [("user", question), ("assistant", answer)] {
                        let said = said.as_str().ok_or_else(|| {
                            malformed(format!("`history` holds a {}", said.kind()))
                        })?;
                        messages.push(message(role, said.to_owned()));
                    }
                }
                other => {
                    let count = other.len();
                    return Err(malformed(format!(
                        "a turn of `history` has {count} parts, not question and answer"
                    )));
                }
            }
        }
    }
    let list = |key| field(row, key).filter(|value| value.kind() == ValueKind::Seq);
    match list(question) {
        Some(earlier) => messages.extend(items(&earlier, question)?),
        None => {
            let mut words = text(row, question)?.unwrap_or_default();
            if question == "instruction" {
                for input in INPUTS {
                    if let Some(more) = text(row, input)? {
                        words = format!("{words}\n\n{more}");
                    }
                }
            }
            messages.push(message("user", words));
        }
    }
    match list(answer) {
        Some(answers) => messages.extend(items(&answers, answer)?),
        None => messages.push(message("assistant", text(row, answer)?.unwrap_or_default())),
    }
    Ok(messages)
}

/// The text under a key, unless it is absent, null or blank.
fn text(row: &Value, key: &str) -> Result<Option<String>, Skip> {
    let Some(value) = field(row, key) else {
        return Ok(None);
    };
    match value.as_str() {
        Some(text) => Ok((!text.trim().is_empty()).then(|| text.to_owned())),
        None => Err(malformed(format!("`{key}` is a {}", value.kind()))),
    }
}

fn message(role: &str, content: String) -> Value {
    Value::from_pairs([("role", role.to_owned()), ("content", content)])
}
