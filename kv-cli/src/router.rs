//! `kvx route`: the router between a prefill and a decode engine, as small as such a router can be.
//!
//! A request goes to P with `max_tokens` 1, then, with the parameters that P answered, to D, whose answer is passed
//! on. The router keeps nothing and proves nothing: if it dies in between, P's lease ends by itself. With a second
//! prefill engine both compute the prompt at the same time, and D is told of both: it reads from the first, and from
//! the second if that fails.
//!
//! A client that will say more asks with the parameters `do_remote_decode: true`: D keeps what it holds of the answer,
//! and the answer's end says where. With its next turn the client brings these parameters, again with
//! `do_remote_decode: true`: P reads back from D what it lacks itself.

mod resend;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::Sse;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use self::resend::Decode;
use crate::error::Failure;
use crate::serve::{parent_gone, runtime};

#[derive(Args)]
pub(crate) struct RouteArgs {
    /// Address of the router; port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0")]
    http: SocketAddr,
    /// Base URL of the prefill engine.
    #[arg(long)]
    prefill: String,
    /// Base URL of another prefill engine, which computes every prompt as well.
    #[arg(long, value_name = "URL")]
    second_prefill: Option<String>,
    /// Base URL of the decode engine.
    #[arg(long)]
    decode: String,
    /// Send a request again, for so many seconds, when the decode engine that had it in hand is gone.
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    resend_for: u64,
    /// End when standard input ends.
    #[arg(long)]
    with_parent: bool,
}

/// A demonstration's wish that its client be taken for gone at a certain point; see [`abort_wish`].
pub(crate) const ABORT_HEADER: &str = "x-demo-abort";
/// A demonstration's wish that D be told this port as P's handshake port.
pub(crate) const PORT_HEADER: &str = "x-demo-handshake-port";
/// Says that P did not answer.
pub(crate) const NOT_PREFILLED: u16 = 502;
/// Says that the client was taken for gone before D was asked.
pub(crate) const CLIENT_GONE: u16 = 499;

#[derive(Clone)]
struct Routes {
    client: reqwest::Client,
    prefill: String,
    second_prefill: Option<String>,
    decode: String,
    resend_for: Duration,
    gate: Arc<Gate>,
}

/// Where the demonstration stops requests between P and D, so that it can do something to either in between.
struct Gate {
    shut: watch::Sender<bool>,
    waiting: AtomicUsize,
}

impl Gate {
    async fn pass(&self) {
        let mut shut = self.shut.subscribe();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // The sender lives as long as the gate.
        let _ = shut.wait_for(|shut| !shut).await;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Deserialize)]
struct GateBody {
    shut: bool,
}

async fn set_gate(State(routes): State<Routes>, body: Bytes) -> Response {
    match serde_json::from_slice::<GateBody>(&body) {
        Ok(GateBody { shut }) => {
            routes.gate.shut.send_replace(shut);
            StatusCode::OK.into_response()
        }
        Err(error) => refuse(400, error),
    }
}

async fn see_gate(State(routes): State<Routes>) -> Json<Value> {
    Json(json!({ "waiting": routes.gate.waiting.load(Ordering::SeqCst) }))
}

pub(crate) fn run(args: &RouteArgs) -> Result<(), Failure> {
    let routes = Routes {
        client: reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(Duration::from_secs(5))
            .build()
            .map_err(|e| Failure::new("make an HTTP client", e))?,
        prefill: format!("{}/v1/completions", args.prefill),
        second_prefill: args.second_prefill.as_ref().map(|url| format!("{url}/v1/completions")),
        decode: format!("{}/v1/completions", args.decode),
        resend_for: Duration::from_secs(args.resend_for),
        gate: Arc::new(Gate { shut: watch::channel(false).0, waiting: AtomicUsize::new(0) }),
    };
    let app = Router::new()
        .route("/v1/completions", post(completions))
        .route("/demo/gate", get(see_gate).post(set_gate))
        .route("/health", get(|| async { StatusCode::OK }))
        .layer(DefaultBodyLimit::max(64 << 20))
        .with_state(routes);
    runtime()?.block_on(async {
        let listener = tokio::net::TcpListener::bind(args.http)
            .await
            .map_err(|e| Failure::new(format!("listen at {} (--http)", args.http), e))?;
        let address = listener.local_addr().map_err(|e| Failure::new("listen", e))?;
        println!("{}", json!({ "ready": address.to_string() }));
        let server = axum::serve(listener, app);
        tokio::select! {
            served = async { server.await } => served.map_err(|e| Failure::new("serve", e)),
            () = parent_gone(args.with_parent) => Ok(()),
        }
    })
}

fn refuse(status: u16, message: impl std::fmt::Display) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    let error = json!({ "error": { "message": message.to_string(), "code": status.as_u16() } });
    (status, Json(error)).into_response()
}

/// What the demonstration wants to happen to this request, if anything.
fn abort_wish(headers: &HeaderMap) -> Option<&str> {
    headers.get(ABORT_HEADER).and_then(|v| v.to_str().ok())
}

async fn completions(State(routes): State<Routes>, headers: HeaderMap, body: Bytes) -> Response {
    let body: Value = match serde_json::from_slice(&body) {
        Ok(body @ Value::Object(_)) => body,
        Ok(_) => return refuse(400, "the request must be an object"),
        Err(error) => return refuse(400, error),
    };
    // Passed on as it is: a name need not be ASCII.
    let id = match headers.get("x-request-id") {
        Some(id) => id.clone(),
        None => return refuse(400, "x-request-id is missing"),
    };
    let talk = Talk::of(&body);
    let mut params = match routes.prefills(&id, &body, &talk).await {
        Ok(params) => params,
        Err(refusal) => return refusal,
    };
    if abort_wish(&headers) == Some("after-finish") {
        // The client is gone: P is told so, as servers tell, although the request has left it; D is never asked.
        let name = String::from_utf8_lossy(id.as_bytes());
        let mut unreached = None;
        for url in [Some(&routes.prefill), routes.second_prefill.as_ref()].into_iter().flatten() {
            let url = url.replace("/v1/completions", "/abort");
            let told = routes.client.post(url).json(&json!({ "request_id": name })).send().await;
            unreached = unreached.or(told.err());
        }
        if let Some(error) = unreached {
            return refuse(NOT_PREFILLED, error);
        }
        return refuse(CLIENT_GONE, "the client went away after the prefill");
    }
    if let Some(port) = headers.get(PORT_HEADER).and_then(|v| v.to_str().ok()?.parse::<u16>().ok()) {
        params["remote_port"] = json!(port);
    }
    routes.gate.pass().await;
    if talk.goes_on {
        if params.is_null() {
            params = json!({});
        }
        params["do_remote_decode"] = json!(true);
    }
    routes.decode(&id, body, params, abort_wish(&headers) == Some("before-schedule")).await
}

/// Where a request stands in a conversation, by the parameters that its client sent.
struct Talk {
    /// Where the turn before was answered.
    earlier: Option<Value>,
    /// The client means to say more.
    goes_on: bool,
}

impl Talk {
    fn of(body: &Value) -> Self {
        let params = &body["kv_transfer_params"];
        let earlier = (params["do_remote_prefill"] == true).then(|| params.clone());
        Self { earlier, goes_on: params["do_remote_decode"] == true }
    }

    /// What P is told: to compute for D, from where the earlier turn ended if there was one.
    fn for_prefill(&self) -> Value {
        match self.earlier.clone() {
            Some(mut params) => {
                params["do_remote_decode"] = json!(true);
                params
            }
            None => fresh(),
        }
    }
}

/// Asks P to compute a prompt from its start.
fn fresh() -> Value {
    json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    })
}

/// How long an offer waits for that of the other prefill engine: well below the life of a lease.
const SECOND_WAIT: Duration = Duration::from_secs(2);

/// What comes within the limit, if there is one.
async fn within<T>(limit: Option<Duration>, future: impl Future<Output = T>) -> Option<T> {
    match limit {
        None => Some(future.await),
        Some(limit) => tokio::time::timeout(limit, future).await.ok(),
    }
}

impl Routes {
    /// The parameters for D of what one or two prefill engines answered: those of the first, with the second's beside
    /// them. One that fails, hands nothing over, or takes much longer than the other is left out: an offer that nobody
    /// brings to D is lost when its lease ends.
    async fn prefills(&self, id: &HeaderValue, body: &Value, talk: &Talk) -> Result<Value, Response> {
        let first = self.prefill(&self.prefill, id, body, talk.for_prefill());
        match &self.second_prefill {
            None => first.await,
            Some(second) => {
                // What D keeps is for one reader.
                let second = self.prefill(second, id, body, fresh());
                let (mut first, mut second) = (std::pin::pin!(first), std::pin::pin!(second));
                let answers = tokio::select! {
                    answer = &mut first => {
                        let usable = matches!(answer, Ok(Value::Object(_)));
                        let other = within(usable.then_some(SECOND_WAIT), second).await;
                        (answer, other.unwrap_or(Ok(Value::Null)))
                    }
                    answer = &mut second => {
                        let usable = matches!(answer, Ok(Value::Object(_)));
                        let other = within(usable.then_some(SECOND_WAIT), first).await;
                        (other.unwrap_or(Ok(Value::Null)), answer)
                    }
                };
                match answers {
                    (Ok(mut first @ Value::Object(_)), Ok(second @ Value::Object(_))) => {
                        first["alternatives"] = json!([second]);
                        Ok(first)
                    }
                    (Ok(Value::Null) | Err(_), Ok(second @ Value::Object(_))) => Ok(second),
                    (first, _) => first,
                }
            }
        }
    }

    async fn prefill(
        &self,
        url: &str,
        id: &HeaderValue,
        body: &Value,
        params: Value,
    ) -> Result<Value, Response> {
        let mut ask = body.clone();
        ask["max_tokens"] = json!(1);
        ask["stream"] = json!(false);
        ask["kv_transfer_params"] = params;
        let failed = |why: String| refuse(NOT_PREFILLED, format!("prefill: {why}"));
        let answer = self
            .client
            .post(url)
            .header("x-request-id", id)
            .json(&ask)
            .send()
            .await
            .map_err(|e| failed(e.to_string()))?;
        let status = answer.status();
        let answer: Value = answer.json().await.map_err(|e| failed(e.to_string()))?;
        if !status.is_success() {
            // A request that P refuses is the client's business, not an outage.
            return Err(if status.is_client_error() {
                (status, Json(answer)).into_response()
            } else {
                failed(answer["error"]["message"].to_string())
            });
        }
        Ok(answer["kv_transfer_params"].clone())
    }

    async fn decode(&self, id: &HeaderValue, mut ask: Value, params: Value, gone: bool) -> Response {
        // Never the client's own: they were meant for P.
        ask["kv_transfer_params"] = params;
        let ask = Decode { client: self.client.clone(), url: self.decode.clone(), id: id.clone(), ask, gone };
        let until = Instant::now() + self.resend_for;
        let answer = match ask.send_until(until).await {
            Ok(answer) => answer,
            Err(error) => return refuse(503, format!("decode: {error}")),
        };
        if !self.resend_for.is_zero() && answer.status().is_success() && ask.streams() {
            return Sse::new(resend::follow(ask, answer, self.resend_for)).into_response();
        }
        let status = StatusCode::from_u16(answer.status().as_u16()).unwrap_or(StatusCode::BAD_GATEWAY);
        let kind = answer.headers().get(header::CONTENT_TYPE).cloned();
        let mut response = Response::new(Body::from_stream(answer.bytes_stream()));
        *response.status_mut() = status;
        if let Some(kind) = kind {
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
        }
        response
    }
}
