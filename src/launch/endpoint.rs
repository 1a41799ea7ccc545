//! An OpenAI-compatible server: chat completions over HTTP or HTTPS, with retries.

use std::time::Duration;

use minijinja::Value;
use serde::{Deserialize, Serialize};

/// First wait before a further try; the next ones double.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Longest wait before a further try.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Bytes of a server's message that are shown.
const SHOWN: usize = 300;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// The address cannot be used.
    #[error("--endpoint {url}: {what}")]
    Address {
        /// As given.
        url: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The server does not want this request; others may be fine.
    #[error("{url} refused with status {status}: {message}")]
    Refused {
        /// Which resource.
        url: String,
        /// HTTP's.
        status: u16,
        /// The server's words.
        message: String,
    },
    /// The server cannot be used at all, or not any more.
    #[error("{url}: {what} (tried {tries} times)")]
    Unusable {
        /// Which resource.
        url: String,
        /// The last failure.
        what: String,
        /// Tries.
        tries: u32,
    },
}

/// How to ask.
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// Further tries after a failure that may pass.
    pub retries: u32,
    /// Longest wait for an answer.
    pub timeout: Duration,
    /// Sent as a bearer token.
    pub key: Option<String>,
}

/// A server and its model.
#[derive(Debug)]
pub struct Endpoint {
    agent: ureq::Agent,
    base: String,
    model: String,
    options: EndpointOptions,
}

/// A request for an answer.
#[derive(Clone, Copy, Debug)]
pub struct ChatRequest<'a> {
    /// The conversation so far.
    pub messages: &'a [Value],
    /// Longest answer in tokens.
    pub max_tokens: usize,
    /// 0: greedily.
    pub temperature: f64,
    /// Of the draws, where the server has such.
    pub seed: u64,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatAnswer {
    /// The assistant's message.
    pub message: Value,
    /// `stop`, `length`, or what else the server says.
    pub finish_reason: String,
    /// Its tokens, where the server counts them.
    pub tokens: u64,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: &'a [Value],
    max_tokens: usize,
    temperature: f64,
    seed: u64,
    stream: bool,
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// What one try led to.
enum Tried<T> {
    Done(T),
    /// May pass; the wait that the server asked for.
    Again(String, Option<Duration>),
    Refused(u16, String),
    /// Will not pass.
    Never(String),
}

impl Endpoint {
    /// Finds the server's model unless it is named.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub fn connect(
        url: &str,
        model: Option<&str>,
        options: EndpointOptions,
    ) -> Result<Self, EndpointError> {
        let base = base(url)?;
        let mut config = ureq::Agent::config_builder()
            .timeout_global(Some(options.timeout))
            .http_status_as_error(false);
        if is_local(&base) {
            config = config.proxy(None);
        }
        let mut endpoint = Self {
            agent: config.build().into(),
            base,
            model: model.unwrap_or_default().to_owned(),
            options,
        };
        if model.is_none() {
            let models: Models = endpoint.ask("models", |agent, url| agent.get(url).call())?;
            let first = models.data.into_iter().next();
            endpoint.model = match first {
                Some(model) => model.id,
                None => {
                    return Err(EndpointError::Unusable {
                        url: endpoint.base,
                        what: "lists no model; name one with --model".to_owned(),
                        tries: 1,
                    });
                }
            };
        }
        Ok(endpoint)
    }

    /// The server's name of the model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The next message of a conversation.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub fn answer(&self, request: &ChatRequest<'_>) -> Result<ChatAnswer, EndpointError> {
        let body = Body {
            model: &self.model,
            messages: request.messages,
            max_tokens: request.max_tokens,
            temperature: request.temperature,
            // Servers read it as a signed number.
            seed: request.seed >> 1,
            stream: false,
        };
        let key = self.options.key.as_ref();
        let found: Completion = self.ask("chat/completions", |agent, url| {
            let mut post = agent.post(url);
            if let Some(key) = key {
                post = post.header("Authorization", format!("Bearer {key}"));
            }
            post.send_json(&body)
        })?;
        let Some(choice) = found.choices.into_iter().next() else {
            return Err(EndpointError::Unusable {
                url: format!("{}/chat/completions", self.base),
                what: "gave no choice".to_owned(),
                tries: 1,
            });
        };
        let content = choice.message.content.unwrap_or_default();
        let mut pairs = vec![
            ("role", Value::from("assistant")),
            ("content", Value::from(content)),
        ];
        if let Some(reasoning) = choice.message.reasoning_content {
            pairs.push(("reasoning_content", Value::from(reasoning)));
        }
        Ok(ChatAnswer {
            message: Value::from_pairs(pairs),
            finish_reason: choice.finish_reason.unwrap_or_else(|| "stop".to_owned()),
            tokens: found
                .usage
                .and_then(|usage| usage.completion_tokens)
                .unwrap_or(0),
        })
    }

    /// Sends until there is an answer, or a failure that will not pass.
    fn ask<T: serde::de::DeserializeOwned>(
        &self,
        resource: &str,
        send: impl Fn(&ureq::Agent, &str) -> Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<T, EndpointError> {
        let url = format!("{}/{resource}", self.base);
        let mut wait = FIRST_WAIT;
        for tries in 1.. {
            let unusable = |what| EndpointError::Unusable {
                url: url.clone(),
                what,
                tries,
            };
            match judge(send(&self.agent, &url)) {
                Tried::Done(answer) => return Ok(answer),
                Tried::Refused(status, message) => {
                    return Err(EndpointError::Refused {
                        url,
                        status,
                        message,
                    });
                }
                Tried::Never(what) => return Err(unusable(what)),
                Tried::Again(what, _) if tries > self.options.retries => {
                    return Err(unusable(what));
                }
                Tried::Again(what, asked) => {
                    tracing::debug!("{url}: {what}; trying again");
                    std::thread::sleep(asked.unwrap_or(wait).min(LONGEST_WAIT));
                    wait = (2 * wait).min(LONGEST_WAIT);
                }
            }
        }
        unreachable!("tries are counted up to the limit");
    }
}

fn judge<T: serde::de::DeserializeOwned>(
    sent: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
) -> Tried<T> {
    let mut response = match sent {
        Ok(response) => response,
        Err(error @ (ureq::Error::BadUri(_) | ureq::Error::Json(_) | ureq::Error::TlsRequired)) => {
            return Tried::Never(error.to_string());
        }
        Err(error) => return Tried::Again(error.to_string(), None),
    };
    let status = response.status().as_u16();
    if (200..300).contains(&status) {
        return match response.body_mut().read_json() {
            Ok(answer) => Tried::Done(answer),
            Err(ureq::Error::Json(error)) => Tried::Never(format!("no chat completion: {error}")),
            Err(error) => Tried::Again(error.to_string(), None),
        };
    }
    let asked = response
        .headers()
        .get("retry-after")
        .and_then(|value| value.to_str().ok()?.trim().parse().ok())
        .map(Duration::from_secs);
    let text = response.body_mut().read_to_string().unwrap_or_default();
    let message: String = text.trim().chars().take(SHOWN).collect();
    match status {
        408 | 425 | 429 | 500.. => Tried::Again(format!("status {status}: {message}"), asked),
        400 | 413 | 422 => Tried::Refused(status, message),
        _ => Tried::Never(format!("status {status}: {message}")),
    }
}

/// The address that resources are named behind.
fn base(url: &str) -> Result<String, EndpointError> {
    let refuse = |what| EndpointError::Address {
        url: url.to_owned(),
        what,
    };
    let schemes = ["http://", "https://"];
    let split = |scheme: &'static str| Some((scheme, url.strip_prefix(scheme)?));
    let Some((scheme, rest)) = schemes.into_iter().find_map(split) else {
        return Err(refuse("is no address such as http://localhost:8000/v1"));
    };
    let rest = rest.trim_end_matches('/');
    let rest = rest.strip_suffix("/chat/completions").unwrap_or(rest);
    if rest.is_empty() {
        return Err(refuse("names no server"));
    }
    Ok(match rest.contains('/') {
        true => format!("{scheme}{rest}"),
        false => format!("{scheme}{rest}/v1"),
    })
}

/// Whether the server runs on this machine, where no proxy leads to.
fn is_local(base: &str) -> bool {
    let host = base.trim_start_matches("http://");
    let host = host.trim_start_matches("https://");
    ["localhost", "127.", "[::1]"]
        .iter()
        .any(|name| host.starts_with(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_understood_or_refused() {
        for (given, found) in [
            ("http://localhost:8000", "http://localhost:8000/v1"),
            ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
            ("http://h/api/chat/completions", "http://h/api"),
            ("https://h", "https://h/v1"),
        ] {
            assert_eq!(base(given).unwrap(), found);
        }
        for (given, says) in [
            ("ftp://h/v1", "is no address"),
            ("localhost:8000", "is no address"),
            ("http:///", "names no server"),
        ] {
            let error = base(given).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert!(is_local("http://127.0.0.1:1/v1") && !is_local("http://gpu1:8000/v1"));
    }
}
