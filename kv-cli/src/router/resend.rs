//! Sending again what a decode engine had in hand when it went away. Sampling is greedy, so a second engine says what
//! the first one said; what the client has already is left out.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::http::HeaderValue;
use axum::response::sse::Event;
use futures_util::{Stream, StreamExt, stream};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// The wait before a decode engine that is not there is asked again.
const AGAIN: Duration = Duration::from_millis(50);

/// A request to a decode engine, to be sent as often as it takes.
pub(super) struct Decode {
    pub(super) client: reqwest::Client,
    pub(super) url: String,
    pub(super) id: HeaderValue,
    pub(super) ask: Value,
    pub(super) gone: bool,
}

impl Decode {
    /// Whether the answer comes in pieces.
    pub(super) fn streams(&self) -> bool {
        self.ask["stream"] == true
    }

    async fn send(&self) -> reqwest::Result<reqwest::Response> {
        let mut request = self.client.post(&self.url).header("x-request-id", &self.id).json(&self.ask);
        if self.gone {
            request = request.header(kv_testkit::engine::http::GONE_HEADER, "1");
        }
        request.send().await
    }

    /// Sends, again and again until then if nobody answers; at least once.
    pub(super) async fn send_until(&self, until: Instant) -> reqwest::Result<reqwest::Response> {
        loop {
            match self.send().await {
                Err(_) if Instant::now() < until => tokio::time::sleep(AGAIN).await,
                other => return other,
            }
        }
    }
}

/// How one answer ended.
enum Ending {
    /// The client has all of it, or is gone.
    Whole,
    /// It broke off.
    Broken(String),
    /// It is not what the client has already.
    Contradicts,
}

/// The events of an answer. If it breaks off, the request is sent again for as long as is allowed.
pub(super) fn follow(
    ask: Decode,
    first: reqwest::Response,
    resend_for: Duration,
) -> impl Stream<Item = Result<Event, Infallible>> {
    let (events, passed_on) = mpsc::channel(64);
    tokio::spawn(async move {
        let mut answer = first;
        let mut delivered = Vec::new();
        loop {
            let why = match pass_on(answer, &mut delivered, &events).await {
                Ending::Whole => return,
                Ending::Broken(why) => why,
                Ending::Contradicts => {
                    return fail(&events, "decode, asked again: another answer than before").await;
                }
            };
            // One that breaks off at once is not asked again at once.
            tokio::time::sleep(AGAIN).await;
            let delivered = delivered.len();
            tracing::warn!(id = ?ask.id, why, delivered, "a decode engine is gone; its request is sent again");
            answer = match ask.send_until(Instant::now() + resend_for).await {
                Ok(answer) if answer.status().is_success() => answer,
                Ok(answer) => {
                    let message = format!("decode, asked again: status {}", answer.status());
                    return fail(&events, &message).await;
                }
                Err(error) => return fail(&events, &format!("decode, asked again: {error}")).await,
            };
        }
    });
    stream::unfold(passed_on, |mut events| async { events.recv().await.map(|event| (Ok(event), events)) })
}

async fn fail(events: &mpsc::Sender<Event>, message: &str) {
    let error = json!({ "error": { "message": message, "code": 503 } });
    // A client that is gone hears nothing.
    let _ = events.send(Event::default().data(error.to_string())).await;
}

/// Passes an answer on, without the first tokens if the client has them already.
async fn pass_on(
    answer: reqwest::Response,
    delivered: &mut Vec<Value>,
    events: &mpsc::Sender<Event>,
) -> Ending {
    let mut pieces = answer.bytes_stream();
    let mut pending: Vec<u8> = Vec::new();
    let mut seen = 0;
    while let Some(piece) = pieces.next().await {
        match piece {
            Ok(piece) => pending.extend_from_slice(&piece),
            Err(error) => return Ending::Broken(error.to_string()),
        }
        while let Some(end) = pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end();
            let event = if let Some(data) = line.strip_prefix("data: ") {
                let value: Value = serde_json::from_str(data).unwrap_or_default();
                if value["error"]["code"] == 503 {
                    return Ending::Broken(value["error"]["message"].to_string());
                }
                let tokens = value["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
                let over = value.get("usage").is_some() || value.get("error").is_some();
                let known = delivered.len().saturating_sub(seen).min(tokens.len());
                if delivered.get(seen..seen + known).is_some_and(|known| known != &tokens[..known.len()]) {
                    return Ending::Contradicts;
                }
                seen += tokens.len();
                if !tokens.is_empty() && seen <= delivered.len() {
                    continue;
                }
                delivered.extend(tokens.into_iter().skip(known));
                (Event::default().data(data), over)
            } else if let Some(comment) = line.strip_prefix(": ") {
                (Event::default().comment(comment), false)
            } else {
                continue;
            };
            if events.send(event.0).await.is_err() || event.1 {
                return Ending::Whole;
            }
        }
    }
    Ending::Broken("the answer ended without an end".to_owned())
}
