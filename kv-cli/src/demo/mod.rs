//! `kvx demo`: P, D, a router and a reference, as processes of their own, and many clients.

pub(crate) mod args;
mod children;
mod client;
mod prompts;
mod report;

use std::io::{IsTerminal, stderr, stdout};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use self::args::AbortMode;
pub(crate) use self::args::DemoArgs;
use self::children::Running;
use self::client::{Ending, Seen, Wish, ask};
use self::report::{Figures, Outcome, Row};
use crate::error::Failure;
use crate::serve::runtime;

/// How long blocks may still be held after the last answer, beyond the life of a lease: steps, reports, loads
/// that were cancelled.
const SETTLE: Duration = Duration::from_secs(15);
/// Life of a lease in the demonstration. Short, so that what only a lease can free is freed while one watches.
const LEASE_TTL: Duration = Duration::from_secs(6);

pub(crate) fn run(args: &DemoArgs) -> Result<ExitCode, Failure> {
    if args.requests == 0 || args.concurrency == 0 {
        return Err(Failure::new("--requests and --concurrency", "must be at least 1"));
    }
    let wishes = wishes(args)?;
    if args.prefill_ranks != args.decode_ranks {
        // Every load would be refused in the handshake and computed instead: right answers that show nothing.
        let why =
            format!("{} and {} differ; both engines need as many", args.prefill_ranks, args.decode_ranks);
        return Err(Failure::new("--prefill-ranks and --decode-ranks", why));
    }
    kv_connector::Config::from_json(&config(args, "demo").to_string())
        .map_err(|e| Failure::new("--transport", e))?;
    let longest = wishes.iter().map(|w| w.prompt.len() as u64 + u64::from(w.max_tokens)).max().unwrap_or(0);
    let needed = longest.div_ceil(prompts::BLOCK_TOKENS as u64);
    if u64::from(args.kv_blocks) < needed {
        let why = format!("the longest request needs {needed} blocks, the pool has {}", args.kv_blocks);
        return Err(Failure::new("--kv-blocks", why));
    }
    let outcome = runtime()?.block_on(play(args, wishes))?;
    let colour = if args.json { stderr().is_terminal() } else { stdout().is_terminal() };
    let text = outcome.text(colour);
    if args.json {
        eprintln!("{text}");
        println!("{}", outcome.json());
    } else {
        println!("{text}");
    }
    Ok(if outcome.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn wishes(args: &DemoArgs) -> Result<Vec<Wish>, Failure> {
    let texts = match &args.prompts {
        Some(file) => prompts::read(file)?.into_iter().cycle().take(args.requests).collect(),
        None => prompts::cut(args.requests),
    };
    let modes = [AbortMode::BeforeSchedule, AbortMode::WhileLoading, AbortMode::AfterFinish];
    let wish = |(number, prompt): (usize, String)| {
        let abort = match args.abort {
            // Every third, so that aborted ones stand between those that go on.
            AbortMode::Mixed if number % 3 == 2 => modes[(number / 3) % modes.len()],
            mode if number % 3 == 2 => mode,
            _ => AbortMode::None,
        };
        Wish { id: format!("demo-{number:03}"), prompt, max_tokens: args.max_tokens, abort }
    };
    Ok(texts.into_iter().enumerate().map(wish).collect())
}

/// Arguments of an engine of the demonstration.
fn engine(args: &DemoArgs, ranks: u32, blocks: u32, more: &[String]) -> Vec<String> {
    let mut all: Vec<String> = ["serve", "--ranks"].map(str::to_owned).into();
    all.push(ranks.to_string());
    all.extend(["--block-tokens".to_owned(), prompts::BLOCK_TOKENS.to_string()]);
    all.extend(["--kv-blocks".to_owned(), blocks.to_string()]);
    if let Some(model) = &args.model {
        all.extend(["--model".to_owned(), model.to_string_lossy().into_owned()]);
    }
    if args.async_schedule {
        all.push("--async-schedule".to_owned());
    }
    all.extend_from_slice(more);
    all
}

fn config(args: &DemoArgs, engine_id: &str) -> Value {
    json!({
        "engine_id": engine_id,
        "transport": args.transport,
        "lease_ttl_ms": LEASE_TTL.as_millis() as u64,
        "lease_renewal_ms": LEASE_TTL.as_millis() as u64,
        "renew_every_ms": 1000,
    })
}

fn connector(args: &DemoArgs, engine_id: &str) -> Vec<String> {
    vec!["--connector".to_owned(), config(args, engine_id).to_string()]
}

async fn play(args: &DemoArgs, wishes: Vec<Wish>) -> Result<Outcome, Failure> {
    let client =
        reqwest::Client::builder().no_proxy().build().map_err(|e| Failure::new("make an HTTP client", e))?;
    let limit = Duration::from_secs(args.hang_limit_s);

    let references = {
        let alone = Running::start("the reference engine", &engine(args, 1, 2048, &["--alone".to_owned()]))?;
        let asked: Vec<Wish> = wishes.iter().cloned().map(|w| Wish { abort: AbortMode::None, ..w }).collect();
        let seen = ask_all(&client, &alone.url, &asked, args.concurrency, limit, "reference").await;
        seen.into_iter().map(tokens_of).collect::<Result<Vec<_>, _>>()?
    };

    let mut more = connector(args, "demo-prefill");
    let prefill = Running::start("the prefill engine", &engine(args, args.prefill_ranks, 2048, &more))?;
    more = connector(args, "demo-decode");
    if args.unmoved {
        more.push("--unmoved".to_owned());
    }
    let decode =
        Running::start("the decode engine", &engine(args, args.decode_ranks, args.kv_blocks, &more))?;
    let route = ["route", "--prefill", &prefill.url, "--decode", &decode.url].map(str::to_owned);
    let router = Running::start("the router", &route)?;

    let seen = ask_all(&client, &router.url, &wishes, args.concurrency, limit, "hand-over").await;
    let figures = settle(&client, &prefill.url, &decode.url).await;
    for mut process in [prefill, decode, router] {
        if process.has_ended() {
            eprintln!("kvx: {} ended before its time", process.name());
        }
    }
    let rows = wishes
        .into_iter()
        .zip(references)
        .zip(seen)
        .map(|((wish, reference), seen)| Row { wish, reference: Some(reference), seen })
        .collect();
    Ok(Outcome::new(rows, figures))
}

fn tokens_of(seen: Seen) -> Result<Vec<u32>, Failure> {
    match seen.ending {
        Ending::Answered { tokens, .. } => Ok(tokens),
        other => Err(Failure::new("the reference engine", format!("{other:?}"))),
    }
}

async fn ask_all(
    client: &reqwest::Client,
    url: &str,
    wishes: &[Wish],
    concurrency: usize,
    limit: Duration,
    title: &'static str,
) -> Vec<Seen> {
    // Drawn on standard error, and only where that is a terminal.
    let bar = ProgressBar::new(wishes.len() as u64).with_message(title);
    if let Ok(style) = ProgressStyle::with_template("{msg:<10} {wide_bar} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    let bar = Arc::new(bar);
    let seen = stream::iter(wishes)
        .map(|wish| {
            let bar = bar.clone();
            async move {
                let seen = ask(client, url, wish, limit).await;
                bar.inc(1);
                seen
            }
        })
        .buffered(concurrency)
        .collect()
        .await;
    bar.finish();
    seen
}

/// Waits until neither engine holds a block, for the life of a lease and a little more.
async fn settle(client: &reqwest::Client, prefill: &str, decode: &str) -> Figures {
    let until = Instant::now() + LEASE_TTL + SETTLE;
    loop {
        let figures =
            Figures { producer: stats(client, prefill).await, consumer: stats(client, decode).await };
        let idle = |v: &Value| v["blocks_held"] == 0 && v["unfinished"] == 0;
        let done = (idle(&figures.producer) && idle(&figures.consumer)) || Instant::now() >= until;
        if done {
            return figures;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn stats(client: &reqwest::Client, url: &str) -> Value {
    let answer = client.get(format!("{url}/stats")).timeout(Duration::from_secs(10)).send().await;
    match answer {
        Ok(answer) => answer.json().await.unwrap_or(Value::Null),
        Err(_) => Value::Null,
    }
}
