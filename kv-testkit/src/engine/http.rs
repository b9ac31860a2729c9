//! The engine's HTTP face: the part of the completions API that routers speak, with `kv_transfer_params`.

use std::convert::Infallible;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use kv_connector::RequestId;
use serde::Deserialize;
use serde_json::{Value, json};

use super::model::Tokenizer;
use super::process::{EngineHandle, SubmitError, Ticket};
use super::request::{Ask, Happening, Usage};

/// Longest request body.
const BODY_MAX_BYTES: usize = 64 << 20;

/// A request with this header is treated as one whose client goes away between its acceptance and the first time
/// the scheduler looks at it: the moment that a test can hardly hit from outside.
pub const GONE_HEADER: &str = "x-client-gone";

#[derive(Deserialize)]
#[serde(untagged, expecting = "a prompt must be a text or a list of token ids")]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

fn one() -> u32 {
    1
}

fn sixteen() -> u32 {
    16
}

/// What is read of a completions request. Other keys of that API are passed over.
#[derive(Deserialize)]
struct Body {
    prompt: Prompt,
    #[serde(default = "sixteen")]
    max_tokens: u32,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    ignore_eos: bool,
    #[serde(default = "one")]
    n: u32,
    #[serde(default)]
    kv_transfer_params: Option<Value>,
}

#[derive(Deserialize)]
struct AbortBody {
    request_id: String,
}

/// The routes of an engine: `POST /v1/completions`, `POST /abort`, `GET /stats`, `GET /health`.
pub fn routes(engine: EngineHandle) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/abort", post(abort))
        .route("/stats", get(stats))
        .route("/health", get(|| async { StatusCode::OK }))
        .layer(DefaultBodyLimit::max(BODY_MAX_BYTES))
        .with_state(engine)
}

/// 499, which servers log for a client that closed its connection; the standard has no number for it.
fn client_gone() -> StatusCode {
    StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST)
}

fn refuse(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": { "message": message, "code": status.as_u16() } }))).into_response()
}

async fn stats(State(engine): State<EngineHandle>) -> Response {
    match engine.stats().await {
        Some(stats) => Json(stats).into_response(),
        None => refuse(StatusCode::SERVICE_UNAVAILABLE, "the engine has ended"),
    }
}

async fn abort(State(engine): State<EngineHandle>, body: Bytes) -> Response {
    let parsed = serde_json::from_slice::<AbortBody>(&body).map_err(|e| e.to_string());
    match parsed.and_then(|b| RequestId::new(b.request_id).map_err(|e| e.to_string())) {
        Ok(id) => {
            engine.abort(id);
            StatusCode::OK.into_response()
        }
        Err(reason) => refuse(StatusCode::BAD_REQUEST, &reason),
    }
}

async fn completions(State(engine): State<EngineHandle>, headers: HeaderMap, body: Bytes) -> Response {
    // With the path, since the decoder's own words do not name the field.
    let mut decoder = serde_json::Deserializer::from_slice(&body);
    let body: Body = match serde_path_to_error::deserialize(&mut decoder) {
        Ok(body) => body,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    if let Err(error) = decoder.end() {
        return refuse(StatusCode::BAD_REQUEST, &error.to_string());
    }
    if body.n != 1 {
        // One prefill is handed over to one decode; samples beyond the first would have nothing to load.
        return refuse(StatusCode::BAD_REQUEST, &format!("n is {}; only 1 is supported", body.n));
    }
    let id = match headers.get("x-request-id") {
        Some(value) => String::from_utf8_lossy(value.as_bytes()).into_owned(),
        None => match getrandom::u64() {
            Ok(number) => format!("cmpl-{number:016x}"),
            Err(error) => return refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        },
    };
    let id = match RequestId::new(id) {
        Ok(id) => id,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let prompt = match body.prompt {
        Prompt::Text(text) => Tokenizer.encode(&text),
        Prompt::Tokens(tokens) => tokens,
    };
    let ask = Ask {
        id: id.clone(),
        prompt,
        max_tokens: body.max_tokens,
        ignore_eos: body.ignore_eos,
        params: body.kv_transfer_params,
    };
    let ignore_eos = body.ignore_eos;
    if headers.contains_key(GONE_HEADER) {
        return match engine.submit_gone(ask).await {
            Ok(()) => refuse(client_gone(), "the client went away before the request was scheduled"),
            Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
        };
    }
    match engine.submit(ask).await {
        Err(SubmitError::Refused(reason)) => refuse(StatusCode::BAD_REQUEST, &reason),
        Err(error) => refuse(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()),
        Ok(ticket) if body.stream => streamed(ticket, id, ignore_eos),
        Ok(ticket) => whole(ticket, id, ignore_eos).await,
    }
}

/// Why an answer ended, in the words of that API.
fn finish_reason(last: Option<u32>, ignore_eos: bool) -> &'static str {
    if last == Some(Tokenizer::END_OF_TEXT) && !ignore_eos { "stop" } else { "length" }
}

async fn whole(mut ticket: Ticket, id: RequestId, ignore_eos: bool) -> Response {
    let mut tokens = Vec::new();
    while let Some(happening) = ticket.next().await {
        match happening {
            Happening::Token(token) => tokens.push(token),
            Happening::Finished { usage, params } => {
                let choice = json!({
                    "index": 0,
                    "text": Tokenizer.decode(&tokens),
                    "token_ids": tokens,
                    "finish_reason": finish_reason(tokens.last().copied(), ignore_eos),
                });
                let mut answer = json!({
                    "id": id.as_str(),
                    "object": "text_completion",
                    "choices": [choice],
                    "usage": usage_json(&usage),
                });
                if let Some(params) = params {
                    answer["kv_transfer_params"] = params;
                }
                return Json(answer).into_response();
            }
            Happening::Failed { client, message } => {
                let status = if client { StatusCode::BAD_REQUEST } else { StatusCode::INTERNAL_SERVER_ERROR };
                return refuse(status, &message);
            }
            Happening::Queued
            | Happening::Loading { .. }
            | Happening::Loaded { .. }
            | Happening::LoadFailed { .. } => {}
        }
    }
    refuse(StatusCode::SERVICE_UNAVAILABLE, "the engine ended before the request did")
}

fn usage_json(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens, "external_tokens": usage.external_tokens },
        "load": {
            "bytes": usage.load_bytes,
            "ranges": usage.load_ranges,
            "read_us": usage.read_us,
            "confirm_us": usage.confirm_us,
        },
    })
}

/// Server-sent events: tokens as data, the request's stages as comments.
fn streamed(ticket: Ticket, id: RequestId, ignore_eos: bool) -> Response {
    let events = futures_util::stream::unfold(Some((ticket, None)), move |state| {
        let id = id.clone();
        async move {
            let (mut ticket, mut last) = state?;
            let Some(happening) = ticket.next().await else {
                let event = error_event(503, "the engine ended before the request did");
                return Some((Ok::<_, Infallible>(event), None));
            };
            let (event, more) = match happening {
                Happening::Queued => (Event::default().comment("queued"), true),
                Happening::Loading { tokens } => {
                    (Event::default().comment(format!("loading {tokens} tokens")), true)
                }
                Happening::Loaded { stats } => {
                    (Event::default().comment(format!("loaded {} bytes", stats.bytes)), true)
                }
                Happening::LoadFailed { reason, .. } => {
                    (Event::default().comment(format!("load failed: {}", reason.name())), true)
                }
                Happening::Token(token) => {
                    last = Some(token);
                    let text = Tokenizer.decode(&[token]);
                    let choice = json!({ "index": 0, "text": text, "token_ids": [token] });
                    (data_event(&json!({ "id": id.as_str(), "choices": [choice] })), true)
                }
                Happening::Finished { usage, params } => {
                    let reason = finish_reason(last, ignore_eos);
                    let choice = json!({ "index": 0, "text": "", "token_ids": [], "finish_reason": reason });
                    let mut end = json!({
                        "id": id.as_str(),
                        "choices": [choice],
                        "usage": usage_json(&usage),
                    });
                    if let Some(params) = params {
                        end["kv_transfer_params"] = params;
                    }
                    (data_event(&end), false)
                }
                Happening::Failed { client, message } => {
                    (error_event(if client { 400 } else { 500 }, &message), false)
                }
            };
            Some((Ok(event), more.then_some((ticket, last))))
        }
    });
    Sse::new(events).into_response()
}

fn data_event(value: &Value) -> Event {
    Event::default().data(value.to_string())
}

fn error_event(code: u16, message: &str) -> Event {
    data_event(&json!({ "error": { "message": message, "code": code } }))
}
