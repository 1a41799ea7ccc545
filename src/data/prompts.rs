//! Conversations to be answered: what others than the assistant say, turn by turn.

use std::path::PathBuf;

use minijinja::Value;

use super::prepare::refusal;
use super::records::{self, Records};
use super::report::{DataReport, Skip, SkipReason};
use super::rows::{self, Message, Role, Row};
use super::{DataError, files};

/// What is said before each answer of a conversation. The answers that the row holds are left out.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// Position of its file in the list.
    pub file: u32,
    /// Its row over all files, from 0.
    pub row: u64,
    /// The messages before each answer, at least one message in each turn.
    turns: Vec<Vec<Value>>,
}

impl Conversation {
    /// Answers that it takes.
    pub fn turns(&self) -> usize {
        self.turns.len()
    }

    /// The messages up to the first answer that is not in `answers`. All are maps with `role` and `content`.
    pub fn messages(&self, answers: &[Value]) -> Vec<Value> {
        let mut messages = Vec::new();
        for (i, turn) in self.turns.iter().take(answers.len() + 1).enumerate() {
            messages.extend(turn.iter().cloned());
            if let Some(answer) = answers.get(i) {
                messages.push(answer.clone());
            }
        }
        messages
    }

    /// The messages with as many answers as there are.
    pub fn answered(&self, answers: &[Value]) -> Vec<Value> {
        let mut messages = self.messages(answers);
        if let Some(next) = self.turns.get(answers.len()) {
            messages.truncate(messages.len() - next.len());
        }
        messages
    }
}

/// What some files held.
#[derive(Debug)]
pub struct Prompts {
    /// Rows that can be answered, in order.
    pub conversations: Vec<Conversation>,
    /// What was skipped, and why.
    pub report: DataReport,
    /// Hash of the files' content.
    pub hash: blake3::Hash,
}

/// Reads the conversations of `paths`, which were given to `flag`.
///
/// # Errors
/// All problems of the files that can be seen beforehand, together; then over 1 % malformed lines, or no usable row.
pub fn read_prompts(paths: &[PathBuf], flag: &'static str) -> Result<Prompts, DataError> {
    let mut problems = Vec::new();
    let files = files::list(paths, flag, false, &mut problems).files;
    DataError::from_list(problems)?;
    let mut report = DataReport {
        files: files.iter().map(|f| f.display().to_string()).collect(),
        ..DataReport::default()
    };
    let mut conversations = Vec::new();
    let mut hasher = blake3::Hasher::new();
    for (number, path) in files.iter().enumerate() {
        let facts = records::facts(path)?;
        let mut records = Records::open(path, number as u32, report.rows)?;
        while let Some(record) = records.next()? {
            match rows::parse_prompt(&record.bytes).and_then(turns) {
                Ok(turns) => conversations.push(Conversation {
                    file: record.file,
                    row: record.row,
                    turns,
                }),
                Err(skip) => report.add(skip, record.file, record.line),
            }
        }
        if !records.unchanged(&facts) {
            return Err(DataError::Changed { path: path.clone() });
        }
        report.rows = records.rows();
        hasher.update(facts.hash.as_bytes());
    }
    report.documents = conversations.len() as u64;
    if let Some(error) = refusal(&report) {
        return Err(error);
    }
    Ok(Prompts {
        conversations,
        report,
        hash: hasher.finalize(),
    })
}

fn turns(row: Row) -> Result<Vec<Vec<Value>>, Skip> {
    let Row::Chat { messages, tools } = row else {
        return Err(Skip::new(
            SkipReason::NoConversation,
            "text or tokens without messages",
        ));
    };
    let uses_tools = |message: &Message| message.calls_tools || message.role == Role::Tool;
    if tools.is_some() || messages.iter().any(uses_tools) {
        return Err(Skip::new(
            SkipReason::ToolsUnsupported,
            "answers that may call tools are not made here",
        ));
    }
    let mut turns: Vec<Vec<Value>> = vec![Vec::new()];
    for message in messages {
        if message.role == Role::Assistant {
            turns.push(Vec::new());
        } else if let Some(turn) = turns.last_mut() {
            turn.push(message.value);
        }
    }
    turns.retain(|turn| !turn.is_empty());
    match turns.is_empty() {
        true => Err(Skip::new(
            SkipReason::Empty,
            "nobody but the assistant speaks",
        )),
        false => Ok(turns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Prompts, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prompts.jsonl");
        std::fs::write(&path, text).unwrap();
        read_prompts(&[path], "--prompts")
    }

    fn said(messages: &[Value]) -> Vec<String> {
        let text = |m: &Value| {
            format!(
                "{} {}",
                m.get_attr("role").unwrap(),
                m.get_attr("content").unwrap()
            )
        };
        messages.iter().map(text).collect()
    }

    #[test]
    fn answers_of_the_rows_are_left_out_and_given_ones_put_in() {
        let prompts = read(concat!(
            r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]}"#,
            "\n",
            r#"{"conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "c"}, {"from": "gpt", "value": ""}]}"#,
            "\n",
            r#"{"messages": [{"role": "user", "content": "d"}, {"role": "tool", "content": "1"}]}"#,
            "\n",
            r#"{"messages": [{"role": "assistant", "content": "alone"}]}"#,
            "\n",
        ))
        .unwrap();
        let [two, one] = &prompts.conversations[..] else {
            panic!("{prompts:?}");
        };
        assert_eq!((two.turns(), two.row, one.turns(), one.row), (2, 0, 1, 1));
        assert_eq!(said(&two.messages(&[])), ["system s", "user a"]);
        let answer = |text: &str| Value::from_pairs([("role", "assistant"), ("content", text)]);
        let first = [answer("y")];
        assert_eq!(
            said(&two.messages(&first)),
            ["system s", "user a", "assistant y", "user b"]
        );
        assert_eq!(
            said(&two.answered(&first)),
            ["system s", "user a", "assistant y"]
        );
        let both = [answer("y"), answer("z")];
        assert_eq!(said(&two.answered(&both)).last().unwrap(), "assistant z");
        assert_eq!(said(&one.messages(&[])), ["user c"]);
        assert_eq!(prompts.report.skipped.len(), 2);
        assert_eq!(prompts.report.rows, 4);
    }

    #[test]
    fn files_without_a_usable_row_are_refused() {
        let error = read(r#"{"messages": []}"#).unwrap_err().to_string();
        assert!(error.contains("empty"), "{error}");
        let error = read_prompts(&["/no/such".into()], "--prompts")
            .unwrap_err()
            .to_string();
        assert!(error.contains("--prompts"), "{error}");
    }
}
