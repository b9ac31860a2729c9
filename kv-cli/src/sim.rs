//! `kvx sim`: many simulated worlds, or canaries that must die in them.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stderr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Args;
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use indicatif::{ProgressBar, ProgressStyle};
use kv_testkit::sim::{Canary, FaultKind, FaultPlan, Outcome, Settings, run as run_world};
use serde_json::{Value, json};

use crate::error::Failure;

#[derive(Args)]
pub(crate) struct SimArgs {
    /// Worlds to run: A..B, or one seed.
    #[arg(long, default_value = "0..1000", value_parser = parse_seeds)]
    seeds: (u64, u64),
    /// Take a guard out, by its name, or every guard in turn with `all`; each must be noticed.
    #[arg(long, value_name = "NAME|all")]
    canary: Option<String>,
    /// Tell the story of the first world, with times.
    #[arg(long)]
    trace: bool,
    /// Leave these kinds of faults out.
    #[arg(long, value_delimiter = ',', value_name = "KIND,…")]
    without: Vec<String>,
    /// At most so many requests in a world.
    #[arg(long)]
    requests: Option<usize>,
    /// Threads; as many as there are cores, if not given.
    #[arg(long)]
    jobs: Option<usize>,
    /// Print one JSON object as the last line of standard output.
    #[arg(long)]
    json: bool,
}

fn parse_seeds(text: &str) -> Result<(u64, u64), String> {
    let number = |t: &str| t.parse::<u64>().map_err(|e| format!("{t:?}: {e}"));
    let range = match text.split_once("..") {
        Some((from, to)) => (number(from)?, number(to)?),
        None => {
            let seed = number(text)?;
            (seed, seed.saturating_add(1))
        }
    };
    if range.0 >= range.1 {
        return Err(format!("{text} names no seed"));
    }
    Ok(range)
}

/// A fault plan for a seed without some kinds; `None` if nothing is left out.
fn plan_without(seed: u64, left_out: &[FaultKind], settings: &Settings) -> Option<FaultPlan> {
    if left_out.is_empty() {
        return None;
    }
    let drawn = run_world(seed, &Settings { requests: Some(0), trace: false, ..settings.clone() }).faults;
    Some(left_out.iter().fold(drawn, |plan, kind| plan.without(*kind)))
}

struct Sum {
    worlds: u64,
    healed: u64,
    loaded: u64,
    failed: u64,
    kept: u64,
    retried: u64,
    recovered: u64,
    refused: u64,
    cache_hits: u64,
    events: u64,
    struck: BTreeMap<FaultKind, u64>,
    broken: Option<Outcome>,
    violations: u64,
}

/// Runs seeds on several threads; stops at the first violation if asked to.
fn run_seeds(
    seeds: (u64, u64),
    jobs: usize,
    stop_at_first: bool,
    settings: &(dyn Fn(u64) -> Settings + Sync),
    bar: &ProgressBar,
) -> Sum {
    let next = AtomicU64::new(seeds.0);
    let sum = Mutex::new(Sum {
        worlds: 0,
        healed: 0,
        loaded: 0,
        failed: 0,
        kept: 0,
        retried: 0,
        recovered: 0,
        refused: 0,
        cache_hits: 0,
        events: 0,
        struck: BTreeMap::new(),
        broken: None,
        violations: 0,
    });
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.1 {
                        return;
                    }
                    let outcome = run_world(seed, &settings(seed));
                    bar.inc(1);
                    let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
                    sum.worlds += 1;
                    sum.healed += u64::from(outcome.healed);
                    sum.loaded += outcome.loaded;
                    sum.failed += outcome.failed;
                    sum.kept += outcome.kept;
                    sum.retried += outcome.retried;
                    sum.recovered += outcome.recovered;
                    sum.refused += outcome.refused;
                    sum.cache_hits += outcome.cache_hits;
                    sum.events += outcome.events;
                    sum.violations += outcome.violations.len() as u64;
                    for (kind, count) in &outcome.struck {
                        *sum.struck.entry(*kind).or_default() += count;
                    }
                    // The lowest seed is told, so that two runs tell the same.
                    let lower = sum.broken.as_ref().is_none_or(|b| outcome.seed < b.seed);
                    if !outcome.violations.is_empty() && lower {
                        sum.broken = Some(outcome);
                    }
                    if stop_at_first && sum.broken.is_some() {
                        return next.store(u64::MAX, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    sum.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn bar(worlds: u64) -> ProgressBar {
    let bar = ProgressBar::new(worlds);
    if let Ok(style) = ProgressStyle::with_template("{msg:<28} {wide_bar} {pos}/{len} {per_sec}") {
        bar.set_style(style);
    }
    bar
}

pub(crate) fn run(args: &SimArgs) -> Result<ExitCode, Failure> {
    let jobs =
        args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)).max(1);
    let left_out = args
        .without
        .iter()
        .map(|name| {
            let kind = FaultKind::ALL.iter().copied().find(|kind| kind.name() == name);
            let known: Vec<&str> = FaultKind::ALL.iter().map(|kind| kind.name()).collect();
            kind.ok_or_else(|| Failure::new("--without", format!("{name:?} is none of {known:?}")))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let base = Settings { requests: args.requests, ..Settings::default() };
    match args.canary.as_deref() {
        Some("all") => Ok(canaries(args, jobs, Canary::ALL)),
        Some(name) => match Canary::from_name(name) {
            Some(canary) if args.trace => {
                Ok(story(args, &left_out, Settings { canary: Some(canary), ..base }))
            }
            Some(canary) => Ok(canaries(args, jobs, &[canary])),
            None => {
                let known: Vec<&str> = Canary::ALL.iter().map(|canary| canary.name()).collect();
                Err(Failure::new("--canary", format!("{name:?} is none of {known:?}")))
            }
        },
        None if args.trace => Ok(story(args, &left_out, base)),
        None => Ok(worlds(args, jobs, &left_out, &base)),
    }
}

fn worlds(args: &SimArgs, jobs: usize, left_out: &[FaultKind], base: &Settings) -> ExitCode {
    let started = Instant::now();
    let bar = bar(args.seeds.1 - args.seeds.0).with_message("worlds");
    let settings = |seed| Settings { faults: plan_without(seed, left_out, base), ..base.clone() };
    let sum = run_seeds(args.seeds, jobs, false, &settings, &bar);
    bar.finish_and_clear();
    let per_second = sum.worlds as f64 / started.elapsed().as_secs_f64();
    let faults: BTreeMap<&str, u64> =
        FaultKind::ALL.iter().map(|kind| (kind.name(), sum.struck.get(kind).copied().unwrap_or(0))).collect();
    let object = json!({
        "worlds": sum.worlds,
        "violations": sum.violations,
        "healed": sum.healed,
        "worlds_per_s": per_second.round(),
        "loaded": sum.loaded,
        "failed": sum.failed,
        "kept": sum.kept,
        "retried": sum.retried,
        "recovered": sum.recovered,
        "refused": sum.refused,
        "cache_hits": sum.cache_hits,
        "events": sum.events,
        "faults": faults,
    });
    let mut table = table(["fault", "struck"]);
    for (name, count) in &faults {
        table.add_row([(*name).to_owned(), count.to_string()]);
    }
    say(
        args,
        &format!(
            "{table}\n{} worlds, {} healed, {} violations; {} loads ended well, {} failed, {} of these in part; {per_second:.0} worlds/s on {jobs} threads",
            sum.worlds, sum.healed, sum.violations, sum.loaded, sum.failed, sum.kept
        ),
        &object,
    );
    match sum.broken {
        None => ExitCode::SUCCESS,
        Some(outcome) => {
            shrink(outcome, left_out, base);
            ExitCode::FAILURE
        }
    }
}

/// Takes faults and requests away as long as the world still breaks, and says how to see it again.
fn shrink(outcome: Outcome, left_out: &[FaultKind], base: &Settings) {
    let seed = outcome.seed;
    let mut without = left_out.to_vec();
    let mut requests = base.requests.unwrap_or(outcome.requests);
    let mut least = outcome;
    let try_with = |without: &[FaultKind], requests: usize| {
        let settings = Settings { requests: Some(requests), ..base.clone() };
        let faults = plan_without(seed, without, &settings);
        let outcome = run_world(seed, &Settings { faults, ..settings });
        (!outcome.violations.is_empty()).then_some(outcome)
    };
    for kind in FaultKind::ALL {
        if without.contains(kind) || !least.faults.kinds().any(|k| k == *kind) {
            continue;
        }
        let mut fewer = without.clone();
        fewer.push(*kind);
        if let Some(smaller) = try_with(&fewer, requests) {
            without = fewer;
            least = smaller;
        }
    }
    while requests > 1 {
        let Some(smaller) = try_with(&without, requests - 1) else { break };
        requests -= 1;
        least = smaller;
    }
    if let Some(violation) = least.violations.first() {
        eprintln!(
            "\nseed {seed}, at {:.3} ms: {}: {}",
            violation.at_ms,
            violation.invariant.name(),
            violation.what
        );
    }
    eprintln!("faults left: {}", least.faults);
    let names: Vec<&str> = without.iter().map(|kind| kind.name()).collect();
    let more = if names.is_empty() { String::new() } else { format!(" --without {}", names.join(",")) };
    eprintln!("see it again: kvx sim --seeds {seed} --trace --requests {requests}{more}");
}

fn story(args: &SimArgs, left_out: &[FaultKind], base: Settings) -> ExitCode {
    let seed = args.seeds.0;
    let faults = plan_without(seed, left_out, &base);
    let outcome = run_world(seed, &Settings { faults, trace: true, ..base });
    println!("seed {seed}; faults: {}", outcome.faults);
    for (at, what) in &outcome.story {
        println!("{at:>11.3} ms  {what}");
    }
    if outcome.violations.is_empty() {
        println!("no violation");
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn canaries(args: &SimArgs, jobs: usize, all: &[Canary]) -> ExitCode {
    let mut rows: Vec<Value> = Vec::new();
    let mut shown = table(["canary", "killed by", "seed", "worlds", "what was seen"]);
    let mut killed = 0;
    for canary in all {
        let bar = bar(args.seeds.1 - args.seeds.0).with_message(canary.name());
        let settings = |_| Settings { canary: Some(*canary), requests: args.requests, ..Settings::default() };
        let sum = run_seeds(args.seeds, jobs, true, &settings, &bar);
        bar.finish_and_clear();
        let first = sum.broken.as_ref().and_then(|b| b.violations.first().map(|v| (b.seed, v)));
        killed += usize::from(first.is_some());
        let by = first.map(|(_, v)| v.invariant.name());
        let seed = first.map(|(seed, _)| seed);
        let what = first.map_or("", |(_, v)| v.what.as_str());
        shown.add_row([
            canary.name().to_owned(),
            by.unwrap_or("NOT KILLED").to_owned(),
            seed.map_or_else(String::new, |s| s.to_string()),
            sum.worlds.to_string(),
            what.to_owned(),
        ]);
        rows.push(json!({ "name": canary.name(), "killed_by": by, "seed": seed, "worlds": sum.worlds, "what": what }));
    }
    let object = json!({ "canaries": all.len(), "killed": killed, "table": rows });
    say(args, &format!("{shown}\n{killed} of {} canaries were noticed", all.len()), &object);
    if killed == all.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

pub(crate) fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
    if !stderr().is_terminal() {
        table.force_no_tty();
    }
    table
}

fn say(args: &SimArgs, text: &str, object: &Value) {
    if args.json {
        eprintln!("{text}");
        println!("{object}");
    } else {
        println!("{text}");
    }
}
