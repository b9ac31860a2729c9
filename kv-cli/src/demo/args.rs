//! What the demonstration can be asked for.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kv_connector::recovery::Policy;

/// When clients go away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AbortMode {
    /// Never.
    None,
    /// Before D's scheduler has looked at the request.
    BeforeSchedule,
    /// While D reads from P.
    WhileLoading,
    /// After P has finished, before D is asked: only the lease frees P's blocks.
    AfterFinish,
    /// Each of these in turn.
    Mixed,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FaultMode {
    /// Nothing.
    None,
    /// P is killed when it has answered and D has not begun to read.
    KillPrefill,
    /// D is killed while it has requests in hand, and comes back; the router sends them again.
    KillDecode,
    /// P stands still (SIGSTOP) when it has answered, and goes on later.
    StopPrefill,
    /// P is killed when it has answered, and is back, at the same ports, before D reads.
    RestartPrefill,
    /// Connections between the workers break in the middle of reads.
    DropConnection,
    /// Reads bring no byte until their limit.
    Stall,
    /// Reads bring wrong bytes and say that all is well; checksums are on.
    Corrupt,
    /// Nobody listens where D is to shake hands.
    HandshakeRefused,
    /// Whoever listens there never answers.
    HandshakeHang,
    /// Whoever listens there answers something else.
    HandshakeGarbage,
    /// A lease ends before the read does.
    Lapse,
    /// Kills, stops, cuts and stalls at random moments, again and again.
    Mixed,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct DemoArgs {
    /// A file with one prompt per line, instead of prompts cut from the text that comes with the program.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<PathBuf>,
    /// How many requests.
    #[arg(long, default_value_t = 28)]
    pub(crate) requests: usize,
    /// How many at the same time.
    #[arg(long, default_value_t = 4)]
    pub(crate) concurrency: usize,
    /// Tokens to sample for each.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Worker processes of the prefill engine.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prefill_ranks: u32,
    /// Worker processes of the decode engine. So far as many as the prefill engine has.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) decode_ranks: u32,
    /// Both engines schedule one step ahead.
    #[arg(long)]
    pub(crate) async_schedule: bool,
    /// When clients go away; every third request is aborted.
    #[arg(long, value_enum, default_value_t = AbortMode::None)]
    pub(crate) abort: AbortMode,
    /// What goes wrong.
    #[arg(long, value_enum, default_value_t = FaultMode::None)]
    pub(crate) fault: FaultMode,
    /// What follows a failed load: recompute, fail, or retry and then recompute.
    #[arg(long, default_value = "recompute", value_parser = crate::serve::parse_policy)]
    pub(crate) policy: Policy,
    /// How many times the mixed fault strikes.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Seed of the moments and kinds of the mixed fault.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The transport that moves the blocks.
    #[arg(long, default_value = "tcp")]
    pub(crate) transport: String,
    /// A Llama-architecture folder (config.json and safetensors) instead of the tiny built-in model.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Blocks in the decode engine's pool; a small pool makes requests wait for room.
    #[arg(long, default_value_t = 2048)]
    pub(crate) kv_blocks: u32,
    /// A request without an answer for so many seconds counts as hung.
    #[arg(long, default_value_t = 120)]
    pub(crate) hang_limit_s: u64,
    /// Print one JSON object as the last line of standard output; everything else goes to standard error.
    #[arg(long)]
    pub(crate) json: bool,
    /// The control: D claims its reads without doing them, so every answer that needs them must be wrong.
    #[arg(long, hide = true)]
    pub(crate) unmoved: bool,
}
