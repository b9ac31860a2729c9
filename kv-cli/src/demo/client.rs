//! One client: asks for a completion, follows its stages, and goes away when it is told to.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kv_testkit::engine::model::Tokenizer;
use serde_json::{Value, json};

use super::args::AbortMode;
use crate::router::{ABORT_HEADER, CLIENT_GONE, NOT_PREFILLED, PORT_HEADER};

/// How a request ended for its client.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ending {
    /// With tokens, and with the parameters that lead to what was kept of it.
    Answered { tokens: Vec<u32>, usage: Value, params: Value },
    /// The client went away, as planned.
    Aborted,
    /// P did not answer.
    NotPrefilled(String),
    /// With an error.
    Error(String),
    /// Not at all.
    Hung,
}

/// What a client saw.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) ending: Ending,
    /// From the request to the first token.
    pub(crate) first_token: Option<Duration>,
}

/// What a client asks for.
#[derive(Debug, Clone)]
pub(crate) struct Wish {
    pub(crate) id: String,
    pub(crate) prompt: String,
    /// In a later turn of a conversation: what was answered and said since, as tokens.
    pub(crate) since: Vec<u32>,
    /// What the client will say in the turns that follow.
    pub(crate) more: Vec<String>,
    /// What comes as `kv_transfer_params`; null: nothing.
    pub(crate) params: Value,
    pub(crate) max_tokens: u32,
    pub(crate) abort: AbortMode,
    /// Port that D is to be told as P's handshake port.
    pub(crate) handshake_port: Option<u16>,
}

impl Wish {
    /// All that the engines are given to go on from.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        let mut tokens = Tokenizer.encode(&self.prompt);
        tokens.extend(&self.since);
        tokens
    }

    /// The conversation's next turn, when this one was answered. `None` if it was the last, or had no answer.
    pub(crate) fn next(&self, seen: &Seen) -> Option<Self> {
        let Ending::Answered { tokens, params, .. } = &seen.ending else { return None };
        let (words, more) = self.more.split_first()?;
        let mut since = [&self.since[..], tokens].concat();
        since.extend(Tokenizer.encode(words));
        let name = self.id.split('/').next().unwrap_or_default();
        let turn = self.id.split('/').nth(1).map_or(2, |turn| turn.parse().unwrap_or(1) + 1);
        let id = format!("{name}/{turn}");
        Some(Self { id, since, more: more.to_vec(), params: talk(params), ..self.clone() })
    }
}

/// What a client says that will come again: whatever there was, with the wish that the answer be kept.
pub(crate) fn talk(params: &Value) -> Value {
    let mut params = if params.is_object() { params.clone() } else { json!({}) };
    params["do_remote_decode"] = json!(true);
    params
}

/// Asks, and sees it through, for `limit` at most.
pub(crate) async fn ask(client: &reqwest::Client, url: &str, wish: &Wish, limit: Duration) -> Seen {
    let started = Instant::now();
    let mut first_token = None;
    let ending = match tokio::time::timeout(limit, follow(client, url, wish, started, &mut first_token)).await
    {
        Ok(ending) => ending,
        Err(_) => Ending::Hung,
    };
    Seen { ending, first_token }
}

async fn follow(
    client: &reqwest::Client,
    url: &str,
    wish: &Wish,
    started: Instant,
    first_token: &mut Option<Duration>,
) -> Ending {
    // Tokens that were sampled need not make a text.
    let prompt = if wish.since.is_empty() { json!(wish.prompt) } else { json!(wish.tokens()) };
    let body = json!({
        "prompt": prompt,
        "max_tokens": wish.max_tokens,
        "stream": true,
        "ignore_eos": true,
        "kv_transfer_params": wish.params,
    });
    let mut request =
        client.post(format!("{url}/v1/completions")).header("x-request-id", &wish.id).json(&body);
    let planned = match wish.abort {
        AbortMode::BeforeSchedule => Some("before-schedule"),
        AbortMode::AfterFinish => Some("after-finish"),
        // This one we do ourselves, by going away.
        AbortMode::WhileLoading | AbortMode::None | AbortMode::Mixed => None,
    };
    if let Some(planned) = planned {
        request = request.header(ABORT_HEADER, planned);
    }
    if let Some(port) = wish.handshake_port {
        request = request.header(PORT_HEADER, port.to_string());
    }
    let answer = match request.send().await {
        Ok(answer) => answer,
        Err(error) => return Ending::Error(error.to_string()),
    };
    let status = answer.status().as_u16();
    if status != 200 {
        let text = answer.text().await.unwrap_or_default();
        return match status {
            NOT_PREFILLED => Ending::NotPrefilled(text),
            CLIENT_GONE => Ending::Aborted,
            _ => Ending::Error(format!("status {status}: {text}")),
        };
    }
    let mut tokens = Vec::new();
    let mut stream = answer.bytes_stream();
    let mut pending: Vec<u8> = Vec::new();
    while let Some(piece) = stream.next().await {
        match piece {
            Ok(piece) => pending.extend_from_slice(&piece),
            Err(error) => return Ending::Error(error.to_string()),
        }
        while let Some(end) = pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end();
            if line.starts_with(": loading") && wish.abort == AbortMode::WhileLoading {
                // Going away is dropping the connection; nothing is said.
                return Ending::Aborted;
            }
            let Some(data) = line.strip_prefix("data: ") else { continue };
            match event(data, &mut tokens) {
                Ok(None) => {
                    if first_token.is_none() && !tokens.is_empty() {
                        *first_token = Some(started.elapsed());
                    }
                }
                Ok(Some((usage, params))) => return Ending::Answered { tokens, usage, params },
                Err(message) => return Ending::Error(message),
            }
        }
    }
    Ending::Error("the answer ended without an end".to_owned())
}

/// Takes one event: tokens, or the figures and the parameters that come with the last one.
fn event(data: &str, tokens: &mut Vec<u32>) -> Result<Option<(Value, Value)>, String> {
    let event: Value = serde_json::from_str(data).map_err(|e| format!("{e}: {data}"))?;
    if let Some(error) = event.get("error") {
        return Err(error["message"].as_str().unwrap_or("an error without words").to_owned());
    }
    let new = event["choices"][0]["token_ids"].as_array().into_iter().flatten();
    tokens.extend(new.filter_map(Value::as_u64).map(|t| t as u32));
    Ok(event.get("usage").map(|usage| (usage.clone(), event["kv_transfer_params"].clone())))
}
