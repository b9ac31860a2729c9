//! `kvx bench`: what a transport moves on this machine, beside what the machine itself can do.

mod args;
mod beside;
mod child;
mod harness;
mod measure;
mod pages;
mod peers;
mod plain;
mod pool;
mod progress;
mod report;
mod shape;
mod side;
mod stats;
mod wire;

pub(crate) use self::args::BenchArgs;
use self::args::Wanted;
use self::progress::Progress;
pub(crate) use self::side::run as run_side;
use crate::error::Failure;

/// Measures and prints.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let plan = match args.check()? {
        Wanted::Harness(harness) => return harness::run(&harness),
        Wanted::Tables(plan) => plan,
    };
    let shapes = plan.shapes.len() as u64;
    let many = plan.peers > 1;
    let steps = plan.configs.len() as u64 * (plan.rounds * (shapes + 1) + if many { shapes } else { 0 });
    let progress = Progress::new(steps);
    let (mut measured, mut peers) = (vec![], vec![]);
    for config in &plan.configs {
        measured.push(measure::measure(&plan, config, &progress)?);
        if many {
            peers.extend(peers::measure(&plan, config, &progress)?);
        }
    }
    drop(progress);
    if plan.json {
        println!("{}", report::as_json(&measured, &peers));
    } else {
        print!("{}", report::as_tables(&measured, &peers));
    }
    Ok(())
}
