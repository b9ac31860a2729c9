//! What the demonstration can be asked for.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kv_connector::recovery::Policy;
use kv_testkit::engine::cache_layout::CacheLayout;

use crate::serve::KindArg;

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
    /// Reads bring wrong bytes and say that all is well; checksums are on, so both engines must be alike.
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
    /// Worker processes of the decode engine.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) decode_ranks: u32,
    /// How the prefill engine's KV cache lies in memory: hnd or nhd, then -apart (keys and values apart) and -rows (the
    /// layers of a block side by side) as wanted.
    #[arg(long, default_value = "hnd", value_name = "LAYOUT")]
    pub(crate) prefill_layout: CacheLayout,
    /// How the decode engine's does.
    #[arg(long, default_value = "hnd", value_name = "LAYOUT")]
    pub(crate) decode_layout: CacheLayout,
    /// Tokens in a block of the prefill engine.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prefill_block: u32,
    /// Tokens in a block of the decode engine.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) decode_block: u32,
    /// Attention of the tiny model: grouped-query (gqa), one latent for all heads that every rank holds (mla), or
    /// grouped-query with every other layer's attention in a sliding window (hybrid).
    #[arg(long, default_value = "gqa", conflicts_with = "model")]
    pub(crate) model_kind: KindArg,
    /// KV heads of the tiny model; without it as many as both engines' ranks can share out: 4, 8, 12 or 24.
    #[arg(long, conflicts_with = "model", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) kv_heads: Option<u32>,
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

/// How one engine's cache is cut and laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) ranks: u32,
    pub(crate) layout: CacheLayout,
    pub(crate) block_tokens: u32,
}

/// Both engines, and what they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shapes {
    pub(crate) producer: Shape,
    pub(crate) consumer: Shape,
    /// Kind and KV heads of the tiny model, if it is that one.
    pub(crate) tiny: Option<(KindArg, u32)>,
}

/// Numbers of KV heads of which the demonstration takes the first that fits both engines.
const KV_HEADS: [u32; 4] = [4, 8, 12, 24];

impl DemoArgs {
    /// KV heads of the tiny model.
    pub(crate) fn heads(&self) -> u32 {
        let fits =
            |heads: &u32| heads.is_multiple_of(self.prefill_ranks) && heads.is_multiple_of(self.decode_ranks);
        // Where none fits the workers say so, with both figures.
        self.kv_heads.or_else(|| KV_HEADS.into_iter().find(fits)).unwrap_or(KV_HEADS[0])
    }

    /// What both engines are like.
    pub(crate) fn shapes(&self) -> Shapes {
        Shapes {
            producer: Shape {
                ranks: self.prefill_ranks,
                layout: self.prefill_layout,
                block_tokens: self.prefill_block,
            },
            consumer: Shape {
                ranks: self.decode_ranks,
                layout: self.decode_layout,
                block_tokens: self.decode_block,
            },
            // A folder's model says by itself what it is.
            tiny: self.model.is_none().then(|| (self.model_kind, self.heads())),
        }
    }

    /// Whether both engines have the same ranks, blocks and layout.
    pub(crate) fn is_even(&self) -> bool {
        (self.prefill_ranks, self.prefill_layout, self.prefill_block)
            == (self.decode_ranks, self.decode_layout, self.decode_block)
    }
}
