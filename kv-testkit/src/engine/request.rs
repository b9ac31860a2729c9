//! A request inside the engine, and what its client is told.

use kv_connector::{RequestId, Role};
use kv_proto::{LoadFailure, LoadStats, PeerLocator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::core::{Staged, Tables};

/// What a client asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// Its name.
    pub id: RequestId,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens to sample.
    pub max_tokens: u32,
    /// Whether to go on after the end-of-text token.
    pub ignore_eos: bool,
    /// `kv_transfer_params`.
    pub params: Option<Value>,
}

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// In the queue, without blocks.
    Waiting,
    /// Its blocks are being filled from elsewhere.
    Loading,
    /// In the batch.
    Running,
    /// Finished, and its blocks are on their way to the host pool.
    Saving,
}

/// Figures of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that were in the prefix cache.
    pub cached_tokens: u32,
    /// Tokens of the prompt that came from the producer.
    pub external_tokens: u32,
    /// Tokens sampled.
    pub completion_tokens: u32,
    /// Bytes read for it, over all ranks.
    pub load_bytes: u64,
    /// Ranges read for it, over all ranks.
    pub load_ranges: u64,
    /// The slowest rank's read, in microseconds.
    pub read_us: u64,
    /// The slowest rank's confirmation, in microseconds.
    pub confirm_us: u64,
}

/// What a client is told, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Happening {
    /// Accepted and queued.
    Queued,
    /// Its blocks are being filled from elsewhere.
    Loading {
        /// Tokens that are coming.
        tokens: u32,
    },
    /// They are filled.
    Loaded {
        /// Figures.
        stats: LoadStats,
    },
    /// They are not; it goes on or ends by the policy.
    LoadFailed {
        /// Why.
        reason: LoadFailure,
        /// In words.
        detail: String,
    },
    /// A token was sampled.
    Token(u32),
    /// It has ended as asked for.
    Finished {
        /// Figures.
        usage: Usage,
        /// `kv_transfer_params` for the client.
        params: Option<Value>,
    },
    /// It has ended otherwise.
    Failed {
        /// Whether the client is to blame.
        client: bool,
        /// Why.
        message: String,
    },
}

/// A request.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) ask: Ask,
    pub(super) role: Role,
    pub(super) stage: Stage,
    pub(super) output: Vec<u32>,
    pub(super) blocks: Tables,
    /// Tokens whose KV is there or ordered.
    pub(super) scheduled: u32,
    /// Tokens whose KV is there for certain.
    pub(super) computed: u32,
    /// Tokens being sampled by steps in flight.
    pub(super) pending: u32,
    /// Counts preemptions, so that a result from before one is not taken for one from after.
    pub(super) epoch: u32,
    pub(super) usage: Usage,
    /// Tokens that its load was to bring.
    pub(super) loading: u32,
    /// What it has to do with the host pool.
    pub(super) staged: Staged,
    /// Where its prompt was computed.
    pub(super) producer: Option<PeerLocator>,
}

impl Request {
    pub(super) fn new(ask: Ask, role: Role) -> Self {
        let usage = Usage { prompt_tokens: ask.prompt.len() as u32, ..Usage::default() };
        Self {
            ask,
            role,
            stage: Stage::Waiting,
            output: Vec::new(),
            blocks: Tables::default(),
            scheduled: 0,
            computed: 0,
            pending: 0,
            epoch: 0,
            usage,
            loading: 0,
            staged: Staged::No,
            producer: None,
        }
    }

    /// Tokens known by value.
    pub(super) fn known(&self) -> u32 {
        (self.ask.prompt.len() + self.output.len()) as u32
    }

    /// Tokens known by value or being sampled.
    pub(super) fn total(&self) -> u32 {
        self.known() + self.pending
    }

    pub(super) fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.ask.prompt.iter().chain(&self.output).copied()
    }

    /// Whether every token that was asked for is sampled or being sampled.
    pub(super) fn is_covered(&self) -> bool {
        self.output.len() as u32 + self.pending >= self.ask.max_tokens
    }
}
