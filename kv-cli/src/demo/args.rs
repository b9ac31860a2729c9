//! What the demonstration can be asked for.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

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

#[derive(Args)]
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
