//! `kvx`: demonstrations and tools for kv-connector.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A command line speaks on both.

mod bench;
mod demo;
mod error;
mod explore;
mod fault_proxy;
mod plan;
mod router;
mod serve;
mod sim;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Failure;

#[derive(Parser)]
#[command(name = "kvx", version, about = "Demonstrations and tools for kv-connector", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Hand over real prompts between two engines and compare every token with a third that works alone.
    Demo(demo::DemoArgs),
    /// Run one engine: scheduler process, workers, and an HTTP server that speaks completions.
    Serve(serve::ServeArgs),
    /// Run the router between a prefill and a decode engine.
    Route(router::RouteArgs),
    /// Run the real state machines in simulated worlds full of faults.
    Sim(sim::SimArgs),
    /// Run the real state machines through every order in which a few things can happen.
    Explore(explore::ExploreArgs),
    /// Measure what a transport moves, beside memcpy and a plain TCP program in the same run.
    Bench(bench::BenchArgs),
    /// Compile the shapes of two engines: whether they fit, and who reads what from whom.
    Plan(plan::PlanArgs),
    /// Forward TCP connections and do to them what a plan says: cut, stall, corrupt, delay and the like.
    FaultProxy(fault_proxy::FaultProxyArgs),
    /// One side of a measurement. Started by `kvx bench`.
    #[command(hide = true)]
    BenchSide,
    /// One worker process of an engine. Started by `kvx serve`.
    #[command(hide = true)]
    EngineWorker {
        /// Socket of the scheduler process.
        socket: std::path::PathBuf,
    },
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("KVX_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn")),
        )
        .with_writer(std::io::stderr)
        .init();
    let outcome = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Serve(args) => serve::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Route(args) => router::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Sim(args) => sim::run(&args),
        Command::Explore(args) => explore::run(&args),
        Command::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Plan(args) => plan::run(&args),
        Command::BenchSide => bench::run_side().map(|()| ExitCode::SUCCESS),
        Command::FaultProxy(args) => fault_proxy::run(&args).map(|()| ExitCode::SUCCESS),
        Command::EngineWorker { socket } => kv_testkit::engine::worker::run(&socket)
            .map(|()| ExitCode::SUCCESS)
            .map_err(|e| Failure::new("engine worker", e)),
    };
    outcome.unwrap_or_else(|failure| {
        eprintln!("kvx: {failure}");
        ExitCode::from(2)
    })
}
