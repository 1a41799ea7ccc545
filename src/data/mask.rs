//! Token ids and loss mask of a row, from render boundaries.
//!
//! A template need not mark what the assistant said. The conversation is rendered up to a turn with
//! the generation prompt, and with the turn; the difference is the turn's span in the whole render,
//! which is tokenised once. A token is supervised if it lies inside a span.

use std::ops::Range;

use minijinja::Value;

use super::report::{Skip, SkipReason};
use super::rows::{Message, Role, Row, with_parsed_arguments, without_key};
use super::template::ChatTemplate;
use super::tokenizer::{ChatTokenizer, Tokens};
use super::{TextOptions, eligible};

/// A tokenised row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    /// 1 where the token is supervised, `[tokens]`.
    pub(super) mask: Vec<u8>,
    /// Assistant turns that are context only.
    pub(super) context_only: u64,
    /// The first message of a template that refused a beginning of the conversation.
    refusal: Option<String>,
}

/// Renders and tokenises a row, whole.
pub(super) fn encode(
    row: &Row,
    tokenizer: &ChatTokenizer,
    template: Option<&ChatTemplate>,
    options: &TextOptions,
) -> Result<Encoded, Skip> {
    let last_turn_only = options.last_turn_only;
    match (row, template) {
        (Row::Tokens { ids, mask }, _) => {
            let known = tokenizer.ids();
            if let Some(at) = ids.iter().position(|&id| id >= known) {
                return Err(Skip::new(
                    SkipReason::BadTokens,
                    format!(
                        "token id {} at position {at}; the model's tokenizer ends at {}",
                        ids[at],
                        known.saturating_sub(1)
                    ),
                ));
            }
            let mut row = Encoded {
                ids: ids.clone(),
                mask: mask.clone(),
                context_only: 0,
                refusal: None,
            };
            if last_turn_only {
                keep_last_stretch(&mut row.mask);
            }
            Ok(row)
        }
        (Row::Text(text), _) => {
            let tokens = tokenize(tokenizer.encode_plain(text))?;
            let whole = 0..text.len();
            Ok(Encoded {
                mask: mask_of(&tokens, &[whole]),
                ids: tokens.ids,
                context_only: 0,
                refusal: None,
            })
        }
        (Row::Chat { .. }, None) if !options.raw_text => Err(Skip::new(
            SkipReason::TemplateError,
            "a conversation, but the model has no chat template; give one with --chat-template",
        )),
        (Row::Chat { messages, .. }, None) => encode_joined(messages, tokenizer, last_turn_only),
        (Row::Chat { messages, tools }, Some(template)) => {
            let mut chat = Chat {
                messages,
                values: messages.iter().map(|m| m.value.clone()).collect(),
                tools: tools.as_ref(),
                template,
            };
            match chat.encode(tokenizer, last_turn_only) {
                // Some templates take a call's arguments only as an object, some only as a string.
                Err(skip) if skip.reason == SkipReason::ToolsUnsupported => {
                    match chat.parse_arguments() {
                        true => chat.encode(tokenizer, last_turn_only),
                        false => Err(skip),
                    }
                }
                done => done,
            }
        }
    }
}

/// Leaves only the last stretch of supervised tokens.
fn keep_last_stretch(mask: &mut [u8]) {
    let end = mask.iter().rposition(|&m| m == 1).map_or(0, |p| p + 1);
    let start = mask[..end]
        .iter()
        .rposition(|&m| m == 0)
        .map_or(0, |p| p + 1);
    mask[..start].fill(0);
}

/// What is left of a row after truncation, or why nothing is.
pub(super) fn truncate(mut row: Encoded, options: &TextOptions) -> Result<Encoded, Skip> {
    let supervised = |mask: &[u8]| mask.iter().filter(|&&m| m == 1).count();
    if supervised(&row.mask) == 0 {
        return Err(match row.refusal {
            Some(message) => Skip::new(SkipReason::TemplateError, message),
            None => Skip::new(
                SkipReason::NoLossTokens,
                "no assistant turn is a stable part of the render",
            ),
        });
    }
    let all = row.ids.len();
    row.ids.truncate(options.max_length);
    row.mask.truncate(options.max_length);
    let left = supervised(&row.mask);
    if left == 0 {
        return Err(Skip::new(
            SkipReason::NoLossTokensAfterTruncation,
            format!(
                "all supervised tokens lie behind --max-length {} ({all} tokens)",
                options.max_length
            ),
        ));
    }
    if left < options.min_loss_tokens {
        return Err(Skip::new(
            SkipReason::TooShort,
            format!(
                "{left} supervised tokens, fewer than --min-loss-tokens {}",
                options.min_loss_tokens
            ),
        ));
    }
    if eligible(&row.mask) == 0 {
        return Err(Skip::new(
            SkipReason::NoAnchor,
            "no two supervised tokens in a row",
        ));
    }
    Ok(row)
}

struct Chat<'a> {
    messages: &'a [Message],
    values: Vec<Value>,
    tools: Option<&'a Value>,
    template: &'a ChatTemplate,
}

impl Chat<'_> {
    fn encode(&self, tokenizer: &ChatTokenizer, last_turn_only: bool) -> Result<Encoded, Skip> {
        let uses_tools = self.tools.is_some()
            || self
                .messages
                .iter()
                .any(|m| m.calls_tools || m.role == Role::Tool);
        let whole = self
            .template
            .render(&self.values, self.tools, false)
            .map_err(|message| match uses_tools {
                true => Skip::new(SkipReason::ToolsUnsupported, message),
                false => Skip::new(SkipReason::TemplateError, message),
            })?;
        if uses_tools {
            self.check_tools_shown(&whole)?;
        }
        let tokens = tokenize(tokenizer.encode(&whole))?;

        let mut spans = Vec::new();
        let mut context_only = 0;
        let mut refusal = None;
        let turns = self
            .messages
            .iter()
            .enumerate()
            .filter(|(_, m)| m.role == Role::Assistant);
        let skip = match last_turn_only {
            true => turns.clone().count().saturating_sub(1),
            false => 0,
        };
        for (i, message) in turns.skip(skip) {
            match self.span(i, &whole) {
                Ok(Some(span)) => {
                    let end = supervised_end(&whole, &span, message, &tokens, tokenizer);
                    spans.push(span.start..end);
                }
                Ok(None) => context_only += 1,
                Err(message) => {
                    context_only += 1;
                    refusal.get_or_insert(message);
                }
            }
        }
        Ok(Encoded {
            mask: mask_of(&tokens, &spans),
            ids: tokens.ids,
            context_only,
            refusal,
        })
    }

    /// Turns arguments of tool calls from JSON in strings to objects; whether there were any.
    fn parse_arguments(&mut self) -> bool {
        let mut any = false;
        for value in &mut self.values {
            if let Some(parsed) = with_parsed_arguments(value) {
                *value = parsed;
                any = true;
            }
        }
        any
    }

    /// Bytes of the whole render that turn `i` adds, or `None` if the render of the conversation up
    /// to there is not how the whole begins.
    fn span(&self, i: usize, whole: &str) -> Result<Option<Range<usize>>, String> {
        let before = self.template.render(&self.values[..i], self.tools, true)?;
        if !whole.starts_with(&before) {
            return Ok(None);
        }
        let with = match i + 1 == self.values.len() {
            true => whole.len(),
            false => {
                let with = self
                    .template
                    .render(&self.values[..=i], self.tools, false)?;
                if !whole.starts_with(&with) {
                    return Ok(None);
                }
                with.len()
            }
        };
        Ok((before.len() <= with).then_some(before.len()..with))
    }

    /// A template that leaves tools, calls or results out would train on a conversation that was
    /// never held. What changes nothing when taken away was not shown.
    fn check_tools_shown(&self, whole: &str) -> Result<(), Skip> {
        let unsupported = |what: &str| {
            Err(Skip::new(
                SkipReason::ToolsUnsupported,
                format!("the template does not show {what}"),
            ))
        };
        let same = |values: &[Value], tools: Option<&Value>| {
            self.template
                .render(values, tools, false)
                .is_ok_and(|text| text == whole)
        };
        if self.tools.is_some() && same(&self.values, None) {
            return unsupported("tool definitions");
        }
        for (i, message) in self.messages.iter().enumerate() {
            if message.calls_tools {
                let mut without = self.values.clone();
                without[i] = without_key(&without[i], "tool_calls");
                if same(&without, self.tools) {
                    return unsupported("tool calls");
                }
            }
            if message.role == Role::Tool {
                let mut without = self.values.clone();
                without.remove(i);
                if same(&without, self.tools) {
                    return unsupported("messages of role `tool`");
                }
            }
        }
        Ok(())
    }
}

/// Where supervision of a turn ends: behind the last special token inside its span, else behind the
/// message's text. The end token of an answer cut by length is the template's, not the model's.
fn supervised_end(
    whole: &str,
    span: &Range<usize>,
    message: &Message,
    tokens: &Tokens,
    tokenizer: &ChatTokenizer,
) -> usize {
    let first = tokens.offsets.partition_point(|o| o.0 < span.start);
    let last_special = tokens.ids[first..]
        .iter()
        .zip(&tokens.offsets[first..])
        .take_while(|(_, offset)| offset.0 < span.end)
        .filter(|(id, offset)| offset.1 <= span.end && tokenizer.is_special(**id))
        .last()
        .map(|(_, offset)| *offset);
    match last_special {
        Some((_, end)) if !message.cut => end,
        special => text_end(&whole[span.clone()], &message.text)
            .map(|end| span.start + end)
            .or(special.map(|(start, _)| start))
            .unwrap_or_else(|| span.start + whole[span.clone()].trim_end().len()),
    }
}

/// End of a message's text within its span; templates often trim it.
fn text_end(span: &str, text: &str) -> Option<usize> {
    [text, text.trim()]
        .into_iter()
        .filter(|t| !t.is_empty())
        .find_map(|t| Some(span.rfind(t)? + t.len()))
}

/// With `--raw-text` and no template a conversation is its texts, one after the other on lines of
/// their own; the assistant's are supervised.
fn encode_joined(
    messages: &[Message],
    tokenizer: &ChatTokenizer,
    last_turn_only: bool,
) -> Result<Encoded, Skip> {
    let mut text = String::new();
    let mut spans = Vec::new();
    for message in messages {
        if message.calls_tools || message.role == Role::Tool {
            return Err(Skip::new(
                SkipReason::ToolsUnsupported,
                "plain text cannot show tools",
            ));
        }
        if !text.is_empty() {
            text.push('\n');
        }
        let start = text.len();
        text.push_str(&message.text);
        if message.role == Role::Assistant {
            spans.push(start..text.len());
        }
    }
    if last_turn_only {
        spans.drain(..spans.len().saturating_sub(1));
    }
    let tokens = tokenize(tokenizer.encode_plain(&text))?;
    Ok(Encoded {
        mask: mask_of(&tokens, &spans),
        ids: tokens.ids,
        context_only: 0,
        refusal: None,
    })
}

fn tokenize(tokens: Result<Tokens, String>) -> Result<Tokens, Skip> {
    tokens.map_err(|e| {
        Skip::new(
            SkipReason::TemplateError,
            format!("cannot be tokenised: {e}"),
        )
    })
}

/// 1 for each token that lies inside one of the ascending `spans`.
fn mask_of(tokens: &Tokens, spans: &[Range<usize>]) -> Vec<u8> {
    tokens
        .offsets
        .iter()
        .map(|&(start, end)| {
            let inside = |span: &Range<usize>| span.start <= start && end <= span.end;
            u8::from(start < end && spans.iter().any(inside))
        })
        .collect()
}
