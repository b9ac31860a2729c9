//! `kvx demo`: P, D, a router and a reference, as processes of their own, and many clients.

pub(crate) mod args;
mod children;
mod client;
mod prompts;
mod report;
mod stage;
mod strike;

use std::collections::BTreeMap;
use std::io::{IsTerminal, stderr, stdout};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

pub(crate) use self::args::DemoArgs;
use self::args::{AbortMode, FaultMode};
use self::client::{Ending, Seen, Wish, ask};
use self::report::{Figures, Outcome, Row};
use self::stage::Stage;
use crate::error::Failure;
use crate::serve::{KindArg, runtime};

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
    if args.fault == FaultMode::Corrupt && !args.is_even() {
        // Digests are of blocks, and blocks of unequal shapes have none in common.
        let why = "corrupt needs both engines alike in ranks, layout and block: only then can checksums be compared";
        return Err(Failure::new("--fault", why));
    }
    if args.fault != FaultMode::None && args.abort != AbortMode::None {
        return Err(Failure::new(
            "--fault and --abort",
            "one at a time, or nobody knows what followed from what",
        ));
    }
    let args = &Arc::new(args.clone());
    kv_connector::Config::from_json(&stage::config(args, "demo", 0).to_string())
        .map_err(|e| Failure::new("--transport", e))?;
    let longest = wishes.iter().map(|w| w.prompt.len() as u64 + u64::from(w.max_tokens)).max().unwrap_or(0);
    // A hybrid model has two block groups, and a placeholder.
    let (groups, spare) = if args.model_kind == KindArg::Hybrid { (2, 1) } else { (1, 0) };
    let needed = longest.div_ceil(u64::from(args.decode_block)) * groups + spare;
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
        let (id, max_tokens) = (format!("demo-{number:03}"), args.max_tokens);
        Wish { id, prompt, max_tokens, abort, handshake_port: None }
    };
    Ok(texts.into_iter().enumerate().map(wish).collect())
}

async fn play(args: &Arc<DemoArgs>, wishes: Vec<Wish>) -> Result<Outcome, Failure> {
    let client =
        reqwest::Client::builder().no_proxy().build().map_err(|e| Failure::new("make an HTTP client", e))?;
    let limit = Duration::from_secs(args.hang_limit_s);
    let mut asker =
        Asker { client: client.clone(), url: String::new(), concurrency: args.concurrency, limit };

    let references = {
        let alone = stage::reference(args)?;
        asker.url = alone.url.clone();
        let asked: Vec<Wish> = wishes.iter().cloned().map(|w| Wish { abort: AbortMode::None, ..w }).collect();
        let seen = asker.all(asked, "reference").await;
        seen.into_iter()
            .map(|(wish, seen)| Ok((wish.prompt, tokens_of(seen)?)))
            .collect::<Result<BTreeMap<_, _>, Failure>>()?
    };

    let mut stage = Stage::set(args, &client)?;
    asker.url = stage.url();
    let seen = strike::play(&mut stage, &asker, wishes).await?;
    let mut figures = settle(&stage).await;
    figures.ended = stage.ended();
    for name in &figures.ended {
        eprintln!("kvx: {name} ended before its time");
    }
    let row = |(wish, seen): (Wish, Seen)| {
        let reference = references.get(&wish.prompt).cloned();
        Row { wish, reference, seen }
    };
    Ok(Outcome::new(seen.into_iter().map(row).collect(), figures, args.fault, args.policy, args.shapes()))
}

fn tokens_of(seen: Seen) -> Result<Vec<u32>, Failure> {
    match seen.ending {
        Ending::Answered { tokens, .. } => Ok(tokens),
        other => Err(Failure::new("the reference engine", format!("{other:?}"))),
    }
}

/// Asks for completions, some at the same time.
pub(crate) struct Asker {
    client: reqwest::Client,
    url: String,
    concurrency: usize,
    limit: Duration,
}

impl Asker {
    async fn all(&self, wishes: Vec<Wish>, title: &'static str) -> Vec<(Wish, Seen)> {
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
                    let seen = ask(&self.client, &self.url, &wish, self.limit).await;
                    bar.inc(1);
                    (wish, seen)
                }
            })
            .buffered(self.concurrency)
            .collect()
            .await;
        bar.finish();
        seen
    }
}

/// Waits until neither engine holds a block, for the life of a lease and a little more.
async fn settle(stage: &Stage) -> Figures {
    let until = Instant::now() + LEASE_TTL + SETTLE;
    loop {
        let figures = Figures {
            producer: stage.producer().await,
            consumer: stage.consumer().await,
            former: stage.former().to_vec(),
            ended: Vec::new(),
        };
        let idle = |v: &Value| v["blocks_held"] == 0 && v["unfinished"] == 0;
        let done = figures.producer.as_ref().is_none_or(idle) && idle(&figures.consumer);
        if done || Instant::now() >= until {
            return figures;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
