//! `kvx explore`: every order in which a few things can happen to the real state machines.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::{Args, ValueEnum};
use comfy_table::Table;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use kv_testkit::explore::{Bounds, Found, Inside, Mutant, explore_with};
use serde_json::{Value, json};

use crate::error::Failure;
use crate::sim::table;

#[derive(Clone, Copy, ValueEnum)]
enum Size {
    /// Seconds: what every test run explores.
    Small,
    /// Minutes: two requests over two ranks, more faults in one story.
    Full,
}

#[derive(Clone, Copy, ValueEnum)]
enum Pace {
    /// Nothing: plans and reports arrive at once.
    Brisk,
    /// P's plans, to each rank by itself, and D's reports.
    Usual,
    /// D's plans as well, to each rank by itself.
    Late,
}

impl Pace {
    const fn inside(self) -> Inside {
        match self {
            Self::Brisk => Inside::Brisk,
            Self::Usual => Inside::Usual,
            Self::Late => Inside::Late,
        }
    }
}

#[derive(Args)]
pub(crate) struct ExploreArgs {
    /// How much may happen in one story. Each size is a list of bounds; each is explored by itself.
    #[arg(long, value_enum, default_value_t = Size::Small)]
    bounds: Size,
    /// Take a guard out, by its name, or every guard in turn with `all`; each must be noticed.
    #[arg(long, value_name = "NAME|all", conflicts_with_all = ["requests", "ranks", "faults", "jumps", "inside", "checksums"])]
    mutant: Option<String>,
    /// Bounds of your own instead: so many requests; 1, if not given.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=2))]
    requests: Option<u8>,
    /// Bounds of your own instead: so many ranks on both engines; 1, if not given.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=2))]
    ranks: Option<u8>,
    /// Bounds of your own instead: so many faults in one story, each of any kind; 1, if not given.
    #[arg(long)]
    faults: Option<u8>,
    /// Bounds of your own instead: so many jumps of time in one story; 1, if not given.
    #[arg(long)]
    jumps: Option<u8>,
    /// Bounds of your own instead: what takes time between a scheduler half and its workers;
    /// usual, if not given.
    #[arg(long, value_enum)]
    inside: Option<Pace>,
    /// With checksums in D, and reads that bring wrong bytes without a word among the faults.
    #[arg(long)]
    checksums: bool,
    /// See at most so many states of each bound; a thousand million take about 40 GB.
    #[arg(long)]
    states: Option<usize>,
    /// Threads, one for each bound at a time; as many as there are cores, if not given.
    #[arg(long)]
    jobs: Option<usize>,
    /// Print one JSON object as the last line of standard output.
    #[arg(long)]
    json: bool,
}

impl ExploreArgs {
    fn all_bounds(&self) -> Vec<Bounds> {
        let own = [self.requests, self.ranks, self.faults, self.jumps];
        let mut all = if own.iter().any(Option::is_some) || self.inside.is_some() {
            let [requests, ranks, faults, jumps] = own;
            let bounds = Bounds::of(
                usize::from(requests.unwrap_or(1)),
                usize::from(ranks.unwrap_or(1)),
                faults.unwrap_or(1),
                jumps.unwrap_or(1),
            );
            vec![Bounds { inside: self.inside.map_or(bounds.inside, Pace::inside), ..bounds }]
        } else {
            match self.bounds {
                Size::Small => Bounds::small().to_vec(),
                Size::Full => Bounds::full().to_vec(),
            }
        };
        for bounds in &mut all {
            bounds.states = self.states.unwrap_or(bounds.states);
            if self.checksums {
                *bounds = bounds.checked();
            }
        }
        all
    }
}

struct Explored {
    bounds: Bounds,
    mutant: Option<Mutant>,
    found: Found,
    seconds: f64,
}

/// Explores several bounds on several threads. The answers come in the order of the questions.
fn explore_all(all: &[(Bounds, Option<Mutant>)], jobs: usize) -> Vec<Explored> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Explored)>> = Mutex::new(Vec::new());
    let bars = MultiProgress::new();
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(all.len()) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some((bounds, mutant)) = all.get(number) else { return };
                    let bar = bars.add(bar(bounds.name));
                    let started = Instant::now();
                    let found = explore_with(bounds, *mutant, &mut |states, longest| {
                        bar.set_position(states as u64);
                        bar.set_message(format!("stories of {longest} steps"));
                    });
                    bar.finish_and_clear();
                    let seconds = started.elapsed().as_secs_f64();
                    let explored = Explored { bounds: *bounds, mutant: *mutant, found, seconds };
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((number, explored));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, explored)| explored).collect()
}

fn bar(name: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix:<28} {human_pos} states, {msg}") {
        bar.set_style(style);
    }
    bar.with_prefix(name)
}

pub(crate) fn run(args: &ExploreArgs) -> Result<ExitCode, Failure> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or_else(cores).max(1);
    match args.mutant.as_deref() {
        None => Ok(promises(args, jobs)),
        Some("all") => Ok(mutants(args, jobs, Mutant::ALL)),
        Some(name) => match Mutant::from_name(name) {
            Some(mutant) => Ok(mutants(args, jobs, &[mutant])),
            None => {
                let known: Vec<&str> = Mutant::ALL.iter().map(|mutant| mutant.name()).collect();
                Err(Failure::new("--mutant", format!("{name:?} is none of {known:?}")))
            }
        },
    }
}

fn told(explored: &Explored) -> Value {
    let Explored { bounds, mutant, found, seconds } = explored;
    let violation = found.violation.as_ref().map(|(story, what)| json!({ "what": what, "story": story }));
    json!({
        "bounds": {
            "name": bounds.name,
            "requests": bounds.requests,
            "ranks": bounds.ranks,
            "faults": bounds.faults,
            "losses": bounds.losses,
            "repeats": bounds.repeats,
            "breaks": bounds.breaks,
            "aborts": bounds.aborts,
            "producer_deaths": bounds.producer_deaths,
            "consumer_deaths": bounds.consumer_deaths,
            "spoils": bounds.spoils,
            "checksums": bounds.checksums,
            "jumps": bounds.jumps,
            "inside": bounds.inside.name(),
            "greeted": bounds.greeted,
            "states": bounds.states,
        },
        "mutant": mutant.map(Mutant::name),
        "states": found.states,
        "steps": found.steps,
        "longest": found.longest,
        "complete": found.complete,
        "loaded": found.loaded,
        "failed": found.failed,
        "calm": found.calm,
        "seconds": (seconds * 10.0).round() / 10.0,
        "violation": violation,
    })
}

fn promises(args: &ExploreArgs, jobs: usize) -> ExitCode {
    let all: Vec<_> = args.all_bounds().into_iter().map(|bounds| (bounds, None)).collect();
    let started = Instant::now();
    let explored = explore_all(&all, jobs);
    let mut shown =
        table(["bounds", "inside", "faults", "jumps", "states", "steps", "longest", "seen", "seconds"]);
    for Explored { bounds, found, seconds, .. } in &explored {
        let seen = match (&found.violation, found.complete) {
            (Some(_), _) => "VIOLATION".to_owned(),
            (None, true) => "all".to_owned(),
            (None, false) => format!("the first {}", bounds.states),
        };
        shown.add_row([
            bounds.name.to_owned(),
            bounds.inside.name().to_owned(),
            bounds.faults.to_string(),
            bounds.jumps.to_string(),
            found.states.to_string(),
            found.steps.to_string(),
            found.longest.to_string(),
            seen,
            format!("{seconds:.1}"),
        ]);
    }
    let states: usize = explored.iter().map(|e| e.found.states).sum();
    let broken: Vec<&Explored> = explored.iter().filter(|e| e.found.violation.is_some()).collect();
    let object = json!({
        "states": states,
        "violations": broken.len(),
        "complete": explored.iter().all(|e| e.found.complete),
        "seconds": started.elapsed().as_secs_f64().round(),
        "explored": explored.iter().map(told).collect::<Vec<_>>(),
    });
    say(args, &shown, &format!("{states} states, {} violations", broken.len()), &object);
    for Explored { bounds, found, .. } in &broken {
        if let Some((story, what)) = &found.violation {
            eprint!("{}", readable(bounds.name, what, story));
        }
    }
    if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A story, a step a line, and what it ends in.
fn readable(name: &str, what: &str, story: &[String]) -> String {
    let mut text = format!("\n{name}: {what}\n");
    for (number, step) in story.iter().enumerate() {
        text.push_str(&format!("{:>4}  {step}\n", number + 1));
    }
    text
}

fn mutants(args: &ExploreArgs, jobs: usize, mutants: &[Mutant]) -> ExitCode {
    let all: Vec<_> = mutants.iter().map(|mutant| (mutant.bounds(), Some(*mutant))).collect();
    let explored = explore_all(&all, jobs);
    let mut shown = table(["mutant", "steps to it", "states", "what was seen"]);
    let mut killed = 0;
    for Explored { bounds, found, .. } in &explored {
        let noticed = found.violation.as_ref();
        killed += usize::from(noticed.is_some());
        shown.add_row([
            bounds.name.to_owned(),
            noticed.map_or("NOT KILLED".to_owned(), |(story, _)| story.len().to_string()),
            found.states.to_string(),
            noticed.map_or_else(String::new, |(_, what)| what.clone()),
        ]);
    }
    let table = explored.iter().map(told).collect::<Vec<_>>();
    let object = json!({ "mutants": all.len(), "killed": killed, "table": table });
    // Of one mutant, the story is what was asked for.
    if let [Explored { bounds, found: Found { violation: Some((story, what)), .. }, .. }] = &explored[..] {
        eprint!("{}", readable(bounds.name, what, story));
    }
    say(args, &shown, &format!("{killed} of {} mutants were noticed", all.len()), &object);
    if killed == all.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn say(args: &ExploreArgs, table: &Table, sum: &str, object: &Value) {
    if args.json {
        eprintln!("{table}\n{sum}");
        println!("{object}");
    } else {
        println!("{table}\n{sum}");
    }
}
