//! One record of a data file to one conversation, or to the reason why not.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::report::{Skip, SkipReason};
use super::{columns, row_tokens};

/// Keys under which a row may hold its conversation, in order of preference.
const CONVERSATION_KEYS: [&str; 3] = ["messages", "conversations", "conversation"];

/// Keys of a row that say it belongs to images, audio or video.
const MEDIA_KEYS: [&str; 6] = ["image", "images", "audio", "audios", "video", "videos"];

/// Who speaks, in the names that templates know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// The explicit map of role names; anything else is unknown.
    fn from_name(name: &str) -> Option<Role> {
        Some(match name {
            "system" | "developer" => Role::System,
            "user" | "human" | "prompter" => Role::User,
            "assistant" | "gpt" | "bot" | "chatgpt" | "model" | "chatbot" => Role::Assistant,
            "tool" | "function" | "observation" | "tool_response" | "ipython" => Role::Tool,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message, as it goes to the template.
#[derive(Debug, Clone)]
pub(super) struct Message {
    pub(super) role: Role,
    /// The text; empty for an assistant turn that only calls tools.
    pub(super) text: String,
    /// The answer was cut by a length limit, so its end token is not the model's.
    pub(super) cut: bool,
    pub(super) calls_tools: bool,
    /// `role`, `content` and every other key of the message.
    pub(super) value: Value,
}

/// One row.
#[derive(Debug, Clone)]
pub(super) enum Row {
    /// Messages, and the tools offered to the assistant.
    Chat {
        messages: Vec<Message>,
        tools: Option<Value>,
    },
    /// Plain text, with `--raw-text`.
    Text(String),
    /// Tokens that were made elsewhere, and which of them are supervised (1), `[tokens]` each.
    Tokens { ids: Vec<u32>, mask: Vec<u8> },
}

/// What a row holds, told from its keys alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Token ids and which of them are supervised.
    Tokens,
    /// A list of messages under this key.
    Messages(&'static str),
    /// A question under the first key, its answer under the second.
    Columns(&'static str, &'static str),
    /// Plain text under `text`, with `--raw-text`.
    Text,
}

/// The form of a row: the first of [`Form`]'s, in their order, that it has all keys of.
pub(super) fn form(row: &Value, raw_text: bool) -> Option<Form> {
    if row_tokens::keys(row).is_some() {
        return Some(Form::Tokens);
    }
    if let Some(key) = CONVERSATION_KEYS.into_iter().find(|k| has_key(row, k)) {
        return Some(Form::Messages(key));
    }
    if let Some((question, answer)) = columns::keys(row) {
        return Some(Form::Columns(question, answer));
    }
    (raw_text && has_key(row, "text")).then_some(Form::Text)
}

/// Whether a row's key of this name means anything here; a table's other columns are never read.
pub(super) fn is_known_key(name: &str) -> bool {
    CONVERSATION_KEYS.contains(&name)
        || MEDIA_KEYS.contains(&name)
        || columns::is_known_key(name)
        || row_tokens::is_known_key(name)
        || ["tools", "finish_reason", "text"].contains(&name)
}

/// Whether a row has a key, be its value null.
pub(super) fn has_key(row: &Value, key: &str) -> bool {
    row.get_attr(key).is_ok_and(|v| !v.is_undefined())
}

/// Reads one record of a conversation to train on.
pub(super) fn parse(line: &[u8], raw_text: bool) -> Result<Row, Skip> {
    let row = read(line, raw_text)?;
    if let Row::Chat { messages, .. } = &row {
        check_assistants(messages)?;
    }
    Ok(row)
}

/// Reads one record of a conversation to be answered; it needs no answer.
pub(super) fn parse_prompt(line: &[u8]) -> Result<Row, Skip> {
    read(line, false)
}

fn read(line: &[u8], raw_text: bool) -> Result<Row, Skip> {
    let text = std::str::from_utf8(line).map_err(|e| {
        Skip::at(
            SkipReason::InvalidUtf8,
            e.valid_up_to() + 1,
            format!("invalid UTF-8 at byte {} of the line", e.valid_up_to()),
        )
    })?;
    if let Some(at) = text.bytes().position(|b| b == 0) {
        return Err(Skip::at(
            SkipReason::NulByte,
            at + 1,
            format!("NUL at byte {at} of the line"),
        ));
    }
    let row: Value = serde_json::from_str(text).map_err(|e| {
        // serde_json appends its own line and column, always of line 1 here.
        let message = e.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        Skip::at(SkipReason::Malformed, e.column(), message)
    })?;
    match row.kind() {
        ValueKind::Map => parse_object(&row, raw_text),
        ValueKind::Seq if row.len() == Some(0) => Err(Skip::new(SkipReason::Empty, "no messages")),
        other => Err(Skip::new(
            SkipReason::NoConversation,
            format!("the row is a {other}, not an object"),
        )),
    }
}

fn parse_object(row: &Value, raw_text: bool) -> Result<Row, Skip> {
    let list = match form(row, raw_text) {
        Some(Form::Tokens) => return row_tokens::read(row),
        Some(Form::Text) => return read_text(row),
        Some(Form::Columns(question, answer)) => columns::messages(row, question, answer)?,
        Some(Form::Messages(key)) => {
            let list = field(row, key)
                .ok_or_else(|| Skip::new(SkipReason::Empty, format!("`{key}` is null")))?;
            items(&list, "the conversation")?
        }
        None => {
            return Err(Skip::new(
                SkipReason::NoConversation,
                "no `messages`, `conversations`, `prompt` or other known key",
            ));
        }
    };
    if list.is_empty() {
        return Err(Skip::new(SkipReason::Empty, "no messages"));
    }
    if let Some(key) = MEDIA_KEYS
        .iter()
        .find(|k| field(row, k).is_some_and(|v| v.is_true()))
    {
        return Err(Skip::new(
            SkipReason::Multimodal,
            format!("the row has `{key}`"),
        ));
    }
    let mut messages = list
        .iter()
        .enumerate()
        .map(|(i, m)| parse_message(i, m))
        .collect::<Result<Vec<_>, _>>()?;
    if is_length(field(row, "finish_reason"))
        && let Some(last) = messages.iter_mut().rfind(|m| m.role == Role::Assistant)
    {
        last.cut = true;
    }
    Ok(Row::Chat {
        messages,
        tools: tools(row)?,
    })
}

fn read_text(row: &Value) -> Result<Row, Skip> {
    let none = Skip::new(SkipReason::Empty, "no text");
    let text = field(row, "text").ok_or_else(|| none.clone())?;
    match text.as_str() {
        Some(t) if !t.trim().is_empty() => Ok(Row::Text(t.to_owned())),
        Some(_) => Err(none),
        None => Err(malformed(format!("`text` is a {}", text.kind()))),
    }
}

/// The items of a list; a list may also be written as a JSON string.
pub(super) fn items(list: &Value, what: &str) -> Result<Vec<Value>, Skip> {
    let parsed = list.as_str().map(serde_json::from_str::<Value>);
    let list = match &parsed {
        Some(Ok(parsed)) if parsed.kind() == ValueKind::Seq => parsed,
        _ => list,
    };
    if list.kind() != ValueKind::Seq {
        return Err(malformed(format!(
            "{what} is a {}, not a list",
            list.kind()
        )));
    }
    let items = list.try_iter().map_err(|e| malformed(e.to_string()))?;
    Ok(items.collect())
}

fn check_assistants(messages: &[Message]) -> Result<(), Skip> {
    let mut assistants = messages
        .iter()
        .enumerate()
        .filter(|(_, m)| m.role == Role::Assistant)
        .peekable();
    if assistants.peek().is_none() {
        return Err(Skip::new(SkipReason::NoAssistant, "no assistant turn"));
    }
    match assistants.find(|(_, m)| m.text.trim().is_empty() && !m.calls_tools) {
        Some((i, _)) => Err(Skip::new(
            SkipReason::EmptyAssistant,
            format!("message {} has no text", i + 1),
        )),
        None => Ok(()),
    }
}

/// Tool definitions of a row: a list, or a list written as a JSON string.
fn tools(row: &Value) -> Result<Option<Value>, Skip> {
    let Some(tools) = field(row, "tools") else {
        return Ok(None);
    };
    let tools = match tools.as_str() {
        Some(text) if text.trim().is_empty() => return Ok(None),
        Some(text) => serde_json::from_str(text)
            .map_err(|e| malformed(format!("`tools` is a string that is not JSON: {e}")))?,
        None => tools,
    };
    Ok(tools.is_true().then_some(tools))
}

fn parse_message(index: usize, message: &Value) -> Result<Message, Skip> {
    let at = |what: String| malformed(format!("message {}: {what}", index + 1));
    if message.kind() != ValueKind::Map {
        return Err(at(format!("is a {}, not an object", message.kind())));
    }
    let (role_key, name) = ["role", "from"]
        .into_iter()
        .find_map(|k| Some((k, field(message, k)?)))
        .ok_or_else(|| at("no `role` or `from`".to_owned()))?;
    let name = name
        .as_str()
        .ok_or_else(|| at(format!("`{role_key}` is a {}", name.kind())))?
        .to_owned();
    let role = Role::from_name(&name).ok_or_else(|| {
        Skip::new(
            SkipReason::UnknownRole,
            format!("message {}: role `{name}`", index + 1),
        )
    })?;
    let calls_tools = field(message, "tool_calls").is_some_and(|v| v.is_true());
    let content = ["content", "value"]
        .into_iter()
        .find_map(|k| field(message, k));
    let text = match &content {
        Some(content) => Some(text_of(index, content)?),
        None => None,
    };
    if text.is_none() && role != Role::Assistant {
        return Err(at("no `content` or `value`".to_owned()));
    }
    let mut pairs = vec![(Value::from("role"), Value::from(role.name()))];
    if let Some(text) = &text {
        pairs.push((Value::from("content"), Value::from(text.as_str())));
    }
    // Keys that are null are left out, as `transformers` does: tables give every message every key, and
    // templates test for presence or would write "None".
    for key in message.try_iter().map_err(|e| at(e.to_string()))? {
        let name = key.as_str().unwrap_or_default();
        if !matches!(name, "role" | "from" | "content" | "value")
            && let Some(value) = field(message, name)
        {
            pairs.push((key, value));
        }
    }
    add_reasoning(message, &mut pairs);
    Ok(Message {
        role,
        text: text.unwrap_or_default(),
        cut: role == Role::Assistant && is_length(field(message, "finish_reason")),
        calls_tools: calls_tools && role == Role::Assistant,
        value: Value::from_pairs(pairs),
    })
}

/// Reasoning goes by three names; templates read `reasoning_content`, some `thinking`.
fn add_reasoning(message: &Value, pairs: &mut Vec<(Value, Value)>) {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(reasoning) = names.iter().find_map(|k| field(message, k)) else {
        return;
    };
    for name in ["reasoning_content", "thinking"] {
        if field(message, name).is_none() {
            pairs.push((Value::from(name), reasoning.clone()));
        }
    }
}

/// A message whose tool calls' arguments are objects where they were JSON in a string, as some
/// templates need them; `None` if there is no such argument.
pub(super) fn with_parsed_arguments(message: &Value) -> Option<Value> {
    let mut changed = false;
    let calls: Vec<Value> = field(message, "tool_calls")?
        .try_iter()
        .ok()?
        .map(|call| {
            let function = field(&call, "function").unwrap_or_else(|| call.clone());
            let parsed: Option<Value> = field(&function, "arguments")
                .and_then(|a| serde_json::from_str(a.as_str()?).ok())
                .filter(|a: &Value| a.kind() == ValueKind::Map);
            let Some(parsed) = parsed else { return call };
            changed = true;
            let function = with_key(&function, "arguments", parsed);
            match field(&call, "function") {
                Some(_) => with_key(&call, "function", function),
                None => function,
            }
        })
        .collect();
    changed.then(|| with_key(message, "tool_calls", Value::from(calls)))
}

/// A copy of a map with one key's value replaced, its place kept.
pub(super) fn with_key(map: &Value, key: &str, value: Value) -> Value {
    let keys = map.try_iter().into_iter().flatten();
    Value::from_pairs(keys.map(|k| {
        let old = map.get_item(&k).unwrap_or_default();
        let new = if k.as_str() == Some(key) {
            value.clone()
        } else {
            old
        };
        (k, new)
    }))
}

/// A copy of a map without one key.
pub(super) fn without_key(map: &Value, key: &str) -> Value {
    let keys = map.try_iter().into_iter().flatten();
    Value::from_pairs(
        keys.filter(|k| k.as_str() != Some(key))
            .map(|k| (k.clone(), map.get_item(&k).unwrap_or_default())),
    )
}

/// The text of a message's content: a string, or the text parts of a list joined.
fn text_of(index: usize, content: &Value) -> Result<String, Skip> {
    if let Some(text) = content.as_str() {
        return Ok(text.to_owned());
    }
    let at = |what: String| malformed(format!("message {}: {what}", index + 1));
    if content.kind() != ValueKind::Seq {
        return Err(at(format!("its content is a {}", content.kind())));
    }
    let mut joined = String::new();
    for part in content.try_iter().map_err(|e| at(e.to_string()))? {
        if let Some(text) = part.as_str() {
            joined.push_str(text);
            continue;
        }
        let kind = field(&part, "type");
        match kind.as_ref().and_then(|k| k.as_str()) {
            Some("text" | "input_text" | "output_text") | None => {
                let text = field(&part, "text");
                let text = text.as_ref().and_then(|t| t.as_str());
                joined
                    .push_str(text.ok_or_else(|| at("a content part without `text`".to_owned()))?);
            }
            Some(other) => {
                return Err(Skip::new(
                    SkipReason::Multimodal,
                    format!("message {}: a content part of type `{other}`", index + 1),
                ));
            }
        }
    }
    Ok(joined)
}

fn is_length(reason: Option<Value>) -> bool {
    reason.is_some_and(|r| matches!(r.as_str(), Some("length" | "max_tokens")))
}

/// A key's value; `None` where it is absent or null.
pub(super) fn field(map: &Value, key: &str) -> Option<Value> {
    map.get_attr(key)
        .ok()
        .filter(|v| !v.is_undefined() && !v.is_none())
}

pub(super) fn malformed(message: impl Into<String>) -> Skip {
    Skip::new(SkipReason::MalformedMessage, message)
}
