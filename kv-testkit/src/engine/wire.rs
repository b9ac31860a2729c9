//! What an engine's scheduler process and its workers tell each other, over a Unix socket.

use std::io::{self, Read, Write};

use kv_connector::{Config, EngineIdentity};
use kv_proto::GroupKind;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::cache_layout::CacheLayout;
use super::model::ModelKind;

/// Longest frame; a step of this engine stays far below.
const FRAME_MAX_BYTES: usize = 256 << 20;

/// Which weights an engine runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelSource {
    /// A tiny model, its weights made from a seed.
    Seed {
        /// The seed.
        seed: u64,
        /// Its attention.
        kind: ModelKind,
        /// Its KV heads.
        kv_heads: u32,
    },
    /// A Llama-architecture folder with `config.json` and safetensors.
    Folder(String),
}

/// What a worker needs to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStart {
    /// Its rank.
    pub rank: u32,
    /// Ranks in all.
    pub ranks: u32,
    /// The weights.
    pub model: ModelSource,
    /// How the cache lies in memory.
    pub layout: CacheLayout,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u32,
    /// Blocks in the host pool through which those of the cache pass, which then lies on a device of its own; `None`: the cache
    /// is in the host's memory.
    pub staging_blocks: Option<u32>,
    /// The connector's configuration and identity; `None` for an engine that stands alone.
    pub connector: Option<(Config, EngineIdentity)>,
    /// A Unix socket over which ranks add up their results; unused with one rank.
    pub gather_socket: String,
    /// Claim every read without doing it: the control that shows that a missing transfer is noticed.
    pub unmoved: bool,
    /// A plan of faults, as text, that this worker's transport suffers.
    pub faults: Option<String>,
}

/// A piece of work of one step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The request, by a number that is never reused.
    pub request: u64,
    /// Tokens to run; none means the token that was sampled last for this request.
    pub tokens: Vec<u32>,
    /// Position of the first of them.
    pub start: u32,
    /// The request's blocks, by block group.
    pub blocks: Vec<Vec<u32>>,
    /// Whether to sample the token that follows.
    pub wants_token: bool,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOrder {
    /// Its number.
    pub step: u64,
    /// The connector's plan.
    pub plan: Option<ByteBuf>,
    /// What to compute.
    pub work: Vec<Work>,
    /// Requests that will not come again.
    pub ended: Vec<u64>,
}

/// To a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker {
    /// The first message.
    Start(Box<WorkerStart>),
    /// Run a step.
    Step(StepOrder),
    /// End.
    Stop,
}

/// Counters of a worker's connector that the engine shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WorkerCounters {
    /// `ReadDone` answered with `Lapsed`.
    pub lapsed: u64,
    /// Endings that came before their lease was granted.
    pub early_ends: u64,
    /// Handshakes begun.
    pub handshakes: u64,
    /// Renewal messages sent.
    pub renewals: u64,
    /// Connections let go because they broke the protocol.
    pub expelled: u64,
    /// Pulls that have not ended.
    pub pulls: u64,
    /// Times that a pull was tried again.
    pub retried: u64,
    /// Consumers' loads from here that failed, as they say.
    pub loads_failed: u64,
    /// Self checks that followed from that.
    pub self_checks: u64,
    /// Of these, how many failed.
    pub self_checks_failed: u64,
}

/// From a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
    /// It has loaded its shard; its connector's card, if it has a connector.
    Ready {
        /// Who.
        rank: u32,
        /// The card.
        card: Option<ByteBuf>,
        /// Tokens that the model can number.
        vocab_size: u32,
        /// Positions that the model knows.
        max_positions: u32,
        /// What the block groups of the cache are.
        groups: Vec<GroupKind>,
    },
    /// A step has ended.
    Done {
        /// Which one.
        step: u64,
        /// What was sampled, for each piece of work.
        tokens: Vec<Option<u32>>,
        /// The connector's report.
        report: Option<ByteBuf>,
        /// Counters.
        counters: WorkerCounters,
    },
    /// A report waits: make a step.
    Nudge,
    /// It cannot go on.
    Failed {
        /// Why.
        message: String,
    },
}

/// Writes one frame.
pub fn send<T: Serialize>(stream: &mut impl Write, value: &T) -> io::Result<()> {
    let bytes = rmp_serde::to_vec_named(value).map_err(io::Error::other)?;
    let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&len.to_le_bytes())?;
    stream.write_all(&bytes)?;
    stream.flush()
}

/// Reads one frame.
pub fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > FRAME_MAX_BYTES {
        return Err(io::Error::other(format!("a frame of {len} bytes is longer than {FRAME_MAX_BYTES}")));
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    rmp_serde::from_slice(&bytes).map_err(io::Error::other)
}
