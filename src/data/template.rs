//! Chat templates: Jinja2 text that turns messages into the one string a model was trained on.
//!
//! Templates are written for `transformers`: blocks trimmed, loop controls, Python methods on strings
//! and dicts, `tojson` as `json.dumps`, `raise_exception`, `strftime_now`, `{% generation %}` blocks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use minijinja::{Environment, Error, Value, context};
use serde::Deserialize;

use super::DataError;
use super::jinja::{as_jinja_reads, environment};
use super::rows::with_key;
use super::tokenizer::{ChatTokenizer, read_json};

const DEFAULT: &str = "chat_template";
const TOOL_USE: &str = "tool_use";

/// A compiled chat template with everything it may refer to.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    /// The special tokens and the caller's arguments, as the template sees them.
    globals: Value,
    tool_use: bool,
    /// Content goes to the template as a list of parts: it shows no other.
    in_parts: bool,
    hash: blake3::Hash,
    date_used: Arc<AtomicBool>,
}

/// Template text by name, with the file it came from.
struct Source {
    origin: PathBuf,
    default: String,
    tool_use: Option<String>,
}

impl ChatTemplate {
    /// Finds and compiles the template of the model in `dir`: `explicit` if given, else
    /// `chat_template.jinja`, `chat_template.json`, or `chat_template` in `tokenizer_config.json`
    /// (a string, or a list of named templates, of which `default` and `tool_use` are used).
    ///
    /// `kwargs` are extra variables (`enable_thinking`, …), each seen by the template under its name.
    ///
    /// # Errors
    /// No template, an unreadable file, or text that does not compile.
    pub fn load(
        dir: &Path,
        explicit: Option<&Path>,
        tokenizer: &ChatTokenizer,
        kwargs: &[(String, serde_json::Value)],
    ) -> Result<ChatTemplate, DataError> {
        let source = find(dir, explicit)?;
        ChatTemplate::compile(source, tokenizer.special_tokens(), kwargs)
    }

    /// Whether the template in a file compiles, where there is no tokenizer to use it with.
    ///
    /// # Errors
    /// As [`ChatTemplate::load`].
    pub(super) fn check(explicit: &Path) -> Result<(), DataError> {
        let source = find(Path::new(""), Some(explicit))?;
        ChatTemplate::compile(source, std::iter::empty(), &[]).map(drop)
    }

    /// Compiles template text given directly.
    ///
    /// # Errors
    /// Text that does not compile.
    pub fn from_text(
        text: &str,
        tokenizer: &ChatTokenizer,
        kwargs: &[(String, serde_json::Value)],
    ) -> Result<ChatTemplate, DataError> {
        let source = Source {
            origin: PathBuf::from("chat template"),
            default: text.to_owned(),
            tool_use: None,
        };
        ChatTemplate::compile(source, tokenizer.special_tokens(), kwargs)
    }

    fn compile<'a>(
        source: Source,
        special_tokens: impl Iterator<Item = (&'a str, &'a str)>,
        kwargs: &[(String, serde_json::Value)],
    ) -> Result<ChatTemplate, DataError> {
        let date_used = Arc::new(AtomicBool::new(false));
        let mut env = environment(date_used.clone());
        let mut hasher = blake3::Hasher::new();
        let named = [
            (DEFAULT, Some(&source.default)),
            (TOOL_USE, source.tool_use.as_ref()),
        ];
        for (name, text) in named {
            let Some(text) = text else { continue };
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
            env.add_template_owned(name, as_jinja_reads(text))
                .map_err(|e| DataError::BadTemplate {
                    origin: source.origin.display().to_string(),
                    message: message_of(&e),
                })?;
        }
        let mut globals: Vec<(String, Value)> = special_tokens
            .map(|(k, v)| (k.to_owned(), Value::from(v)))
            .collect();
        for (key, value) in kwargs {
            globals.retain(|(k, _)| k != key);
            let seen = Value::deserialize(value).expect("JSON is always a template value");
            globals.push((key.clone(), seen));
            hasher.update(format!("{key}={value}\n").as_bytes());
        }
        let mut template = ChatTemplate {
            env,
            globals: Value::from_pairs(globals),
            tool_use: source.tool_use.is_some(),
            in_parts: false,
            hash: hasher.finalize(),
            date_used,
        };
        template.in_parts = !template.shows_content() && {
            template.in_parts = true;
            template.shows_content()
        };
        // The probe has no row and so tells nothing of what rows ask for.
        template.date_used.store(false, Ordering::Relaxed);
        Ok(template)
    }

    /// Whether a plain conversation's words are in its render. Templates of vision-language models go
    /// through a message's parts, and leave out a content that is one string without a word.
    fn shows_content(&self) -> bool {
        let message = |role: &str, content: &str| context! { role, content };
        let messages = [message("user", "ask7f3a"), message("assistant", "tell9c1b")];
        self.render(&messages, None, false)
            .is_ok_and(|text| text.contains("ask7f3a") && text.contains("tell9c1b"))
    }

    /// Renders `messages` (each a map with `role` and `content`) to the model's text.
    ///
    /// # Errors
    /// Whatever the template raises, as its message.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let name = if tools.is_some() && self.tool_use {
            TOOL_USE
        } else {
            DEFAULT
        };
        let template = self
            .env
            .get_template(name)
            .expect("both templates are compiled in `compile`");
        let messages: Vec<Value> = match self.in_parts {
            true => messages.iter().map(in_parts).collect(),
            false => messages.to_vec(),
        };
        template
            .render(context! {
                messages => Value::from(messages),
                tools => tools.cloned().unwrap_or(Value::from(())),
                documents => Value::from(()),
                add_generation_prompt,
                ..self.globals.clone()
            })
            .map_err(|e| message_of(&e))
    }

    /// Hash of the template's text and of the arguments given to it.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Whether a render so far has asked for today's date.
    pub fn date_used(&self) -> bool {
        self.date_used.load(Ordering::Relaxed)
    }
}

/// Reads `KEY=VALUE` of `--template-kwarg`: the value as JSON where it is JSON (`false`, `3`,
/// `"text"`), else as a string.
///
/// # Errors
/// An argument without `=` or with a key that is not a name.
pub fn parse_template_kwarg(argument: &str) -> Result<(String, serde_json::Value), DataError> {
    let bad = || DataError::BadTemplateKwarg {
        argument: argument.to_owned(),
    };
    let (key, value) = argument.split_once('=').ok_or_else(bad)?;
    let is_name = key.chars().all(|c| c.is_alphanumeric() || c == '_')
        && key.chars().next().is_some_and(|c| !c.is_numeric());
    if !is_name {
        return Err(bad());
    }
    let value =
        serde_json::from_str(value).unwrap_or_else(|_| serde_json::Value::String(value.to_owned()));
    Ok((key.to_owned(), value))
}

/// A message whose content is a list of one text part where it was a string.
fn in_parts(message: &Value) -> Value {
    match message.get_attr("content") {
        Ok(content) if content.as_str().is_some() => {
            let part = Value::from_pairs([("type", Value::from("text")), ("text", content)]);
            with_key(message, "content", Value::from(vec![part]))
        }
        _ => message.clone(),
    }
}

fn message_of(error: &Error) -> String {
    let mut text = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line} of the template)"));
    }
    text
}

fn find(dir: &Path, explicit: Option<&Path>) -> Result<Source, DataError> {
    if let Some(path) = explicit {
        if path.extension().is_some_and(|e| e == "json") {
            return from_json(path)?.ok_or_else(|| DataError::BadTemplate {
                origin: path.display().to_string(),
                message: "the file has no `chat_template`".to_owned(),
            });
        }
        return Ok(Source {
            origin: path.to_owned(),
            default: read_text(path)?,
            tool_use: None,
        });
    }
    let jinja = dir.join("chat_template.jinja");
    if jinja.exists() {
        let extra = dir.join("additional_chat_templates/tool_use.jinja");
        return Ok(Source {
            default: read_text(&jinja)?,
            tool_use: extra.exists().then(|| read_text(&extra)).transpose()?,
            origin: jinja,
        });
    }
    for name in ["chat_template.json", "tokenizer_config.json"] {
        let path = dir.join(name);
        if path.exists()
            && let Some(source) = from_json(&path)?
        {
            return Ok(source);
        }
    }
    Err(DataError::NoTemplate {
        dir: dir.to_owned(),
    })
}

/// The field `chat_template` of a JSON file, or `None` if it has none.
fn from_json(path: &Path) -> Result<Option<Source>, DataError> {
    let config = read_json(path)?;
    let text = |v: &serde_json::Value| v.as_str().map(str::to_owned);
    Ok(match config.get("chat_template") {
        Some(serde_json::Value::String(default)) => Some(Source {
            origin: path.to_owned(),
            default: default.clone(),
            tool_use: None,
        }),
        Some(serde_json::Value::Array(list)) => {
            let named = |name: &str| {
                list.iter()
                    .find(|t| t.get("name").and_then(|n| n.as_str()) == Some(name))
                    .and_then(|t| t.get("template"))
                    .and_then(text)
            };
            named("default").map(|default| Source {
                origin: path.to_owned(),
                default,
                tool_use: named(TOOL_USE),
            })
        }
        _ => None,
    })
}

fn read_text(path: &Path) -> Result<String, DataError> {
    let text = std::fs::read_to_string(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => DataError::Missing {
            path: path.to_owned(),
            flag: "--chat-template",
        },
        _ => DataError::Read {
            path: path.to_owned(),
            source,
        },
    })?;
    if super::files::is_lfs_pointer(text.as_bytes()) {
        return Err(DataError::LfsPointer {
            path: path.to_owned(),
        });
    }
    Ok(text)
}
