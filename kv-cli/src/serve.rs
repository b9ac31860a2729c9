//! `kvx serve`: one engine.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kv_connector::Config;
use kv_connector::recovery::Policy;
use kv_testkit::engine::cache_layout::CacheLayout;
use kv_testkit::engine::http;
use kv_testkit::engine::model::ModelKind;
use kv_testkit::engine::process::{Engine, EngineOptions};
use kv_testkit::engine::wire::ModelSource;
use serde_json::json;

use crate::error::Failure;

/// How often a read is tried again under the policy `retry`, if the configuration does not say.
const LOAD_RETRIES: u32 = 2;

#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Address of the HTTP server; port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0")]
    http: SocketAddr,
    /// Worker processes, each with a share of the KV heads.
    #[arg(long, default_value_t = 1)]
    ranks: u32,
    /// A Llama-architecture folder (config.json and safetensors). Without it: a tiny model from a seed.
    #[arg(long, conflicts_with_all = ["model_kind", "kv_heads"])]
    model: Option<PathBuf>,
    /// Attention of the tiny model: grouped-query (gqa), one latent for all heads that every rank holds (mla), or
    /// grouped-query with every other layer's attention in a sliding window (hybrid).
    #[arg(long, default_value = "gqa")]
    model_kind: KindArg,
    /// KV heads of the tiny model; ranks must divide them, or be a multiple of them.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    kv_heads: u32,
    /// Seed of the tiny model.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// How the KV cache lies in memory: heads before tokens (hnd) or after them (nhd), keys and values apart (-apart),
    /// the layers of a block side by side (-rows); for example nhd-apart.
    #[arg(long, default_value = "hnd")]
    cache_layout: CacheLayout,
    /// Tokens in a block.
    #[arg(long, default_value_t = 16)]
    block_tokens: u32,
    /// Blocks in the pool.
    #[arg(long, default_value_t = 2048)]
    kv_blocks: u32,
    /// Where the KV cache lies: in host memory, or on a device (made of host memory that no transport sees), from where
    /// hand-overs go through a pool of host memory.
    #[arg(long, value_enum, default_value_t = MemoryArg::Host)]
    memory: MemoryArg,
    /// Blocks in that pool.
    #[arg(long, default_value_t = STAGING_BLOCKS, value_parser = clap::value_parser!(u32).range(1..))]
    staging_blocks: u32,
    /// Most tokens in one step.
    #[arg(long, default_value_t = 512)]
    step_tokens: u32,
    /// Schedule one step ahead.
    #[arg(long)]
    async_schedule: bool,
    /// What follows a failed load: recompute, fail, or retry and then recompute.
    #[arg(long, default_value = "recompute", value_parser = parse_policy)]
    policy: Policy,
    /// Without a connector: an engine that stands alone.
    #[arg(long)]
    alone: bool,
    /// The connector's configuration as JSON; without it, KV_CONNECTOR_* of the environment.
    #[arg(long)]
    connector: Option<String>,
    /// End when standard input ends, so that a parent that dies takes its engines along.
    #[arg(long)]
    with_parent: bool,
    /// A file of faults that the workers' transports suffer, to see what follows from them.
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// Claim every read without doing it.
    #[arg(long, hide = true)]
    unmoved: bool,
}

/// Blocks of a host pool: some requests of the demonstration's at a time.
pub(crate) const STAGING_BLOCKS: u32 = 256;

/// Where a KV cache lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MemoryArg {
    /// In host memory.
    Host,
    /// On a device.
    Device,
}

/// [`ModelKind`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KindArg {
    /// Grouped-query attention.
    Gqa,
    /// Multi-head latent attention.
    Mla,
    /// Full attention and sliding windows in turn.
    Hybrid,
}

impl From<KindArg> for ModelKind {
    fn from(kind: KindArg) -> Self {
        match kind {
            KindArg::Gqa => Self::Gqa,
            KindArg::Mla => Self::Mla,
            KindArg::Hybrid => Self::Hybrid,
        }
    }
}

/// The policies that this engine follows.
pub(crate) fn parse_policy(name: &str) -> Result<Policy, String> {
    name.parse::<Policy>().map_err(|error| error.to_string())
}

/// A plan of faults, read and checked here, so that a mistake in it is told before anything starts.
fn plan_of_faults(file: &std::path::Path) -> Result<String, Failure> {
    let name = || format!("--faults {}", file.display());
    let text = std::fs::read_to_string(file).map_err(|e| Failure::new(name(), e))?;
    kv_testkit::faults::FaultPlan::parse(&text).map_err(|e| Failure::new(name(), e))?;
    Ok(text)
}

/// The command that runs a worker of this very program.
fn worker_command() -> Result<Vec<String>, Failure> {
    let program = std::env::current_exe().map_err(|e| Failure::new("find this program", e))?;
    Ok(vec![program.to_string_lossy().into_owned(), "engine-worker".to_owned()])
}

/// A runtime for an HTTP server.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::new("start a runtime", e))
}

/// Waits until standard input ends, if that is asked for.
pub(crate) async fn parent_gone(asked: bool) {
    if !asked {
        return std::future::pending().await;
    }
    let (gone, told) = tokio::sync::oneshot::channel::<()>();
    // Standard input can only be waited for by a thread of its own.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        drop(gone);
    });
    // Told by the drop: there is nothing else to hear.
    let _ = told.await;
}

pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let connector = match (args.alone, &args.connector) {
        (true, _) => None,
        (false, Some(json)) => Some(Config::from_json(json).map_err(|e| Failure::new("--connector", e))?),
        (false, None) => Some(Config::from_env().map_err(|e| Failure::new("environment", e))?),
    };
    // Reading again is the connector's part of that policy.
    let connector = connector.map(|config| match (args.policy, config.load_retries) {
        (Policy::Retry, 0) => Config { load_retries: LOAD_RETRIES, ..config },
        _ => config,
    });
    let model = match &args.model {
        Some(folder) => ModelSource::Folder(folder.to_string_lossy().into_owned()),
        None => ModelSource::Seed { seed: args.seed, kind: args.model_kind.into(), kv_heads: args.kv_heads },
    };
    let mut engine = Engine::start(EngineOptions {
        ranks: args.ranks,
        model,
        layout: args.cache_layout,
        block_tokens: args.block_tokens,
        blocks: args.kv_blocks,
        staging_blocks: (args.memory == MemoryArg::Device).then_some(args.staging_blocks),
        step_tokens: args.step_tokens,
        run_ahead: args.async_schedule,
        policy: args.policy,
        connector,
        unmoved: args.unmoved,
        faults: args.faults.as_deref().map(plan_of_faults).transpose()?,
        worker_command: worker_command()?,
    })
    .map_err(|e| Failure::new("start the engine", e))?;
    runtime()?.block_on(async {
        let listener = tokio::net::TcpListener::bind(args.http)
            .await
            .map_err(|e| Failure::new(format!("listen at {} (--http)", args.http), e))?;
        let address = listener.local_addr().map_err(|e| Failure::new("listen", e))?;
        println!("{}", json!({ "ready": address.to_string(), "handshake_port": engine.handshake_port() }));
        let server = axum::serve(listener, http::routes(engine.handle()));
        tokio::select! {
            served = async { server.await } => served.map_err(|e| Failure::new("serve", e)),
            reason = engine.ended() => Err(Failure::new("engine", reason)),
            () = parent_gone(args.with_parent) => Ok(()),
        }
    })
}
