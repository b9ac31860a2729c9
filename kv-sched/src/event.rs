//! What the hooks return and what the engine is told.

use kv_proto::{
    BlockList, LeaseId, LoadFailure, LoadId, LoadStats, PeerLocator, Rank, RemotePrefill, RequestId,
};

/// What a request is to the scheduler half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Nothing is handed over; the other hooks may be called and do nothing.
    Plain,
    /// It computes a prompt that somebody else will decode.
    Producer,
    /// Its prompt, or a part of it, was computed elsewhere.
    Consumer,
    /// Both: it loads as a consumer does, and at its end it is handed over as a producer's is.
    Relay,
}

impl Role {
    /// Whether it may have something to load.
    pub const fn loads(self) -> bool {
        matches!(self, Self::Consumer | Self::Relay)
    }

    /// Whether its end may hand something over.
    pub const fn hands_over(self) -> bool {
        matches!(self, Self::Producer | Self::Relay)
    }
}

/// How a request ended in the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestEnd {
    /// It finished as asked for.
    Complete {
        /// Tokens whose KV the blocks hold, from the start of the prompt.
        computed_tokens: u32,
        /// Its blocks by group, from the start of the sequence.
        blocks: Vec<BlockList>,
        /// What was sampled behind the prompt, if it is to be handed over as well: then the offer covers all tokens that
        /// are computed and named, for a prompt that goes on from there. Empty: the prompt alone is handed over.
        sampled: Vec<u32>,
    },
    /// It was aborted, rejected or failed, at whatever point.
    Aborted,
}

/// Something that keeps blocks from being used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HoldId {
    /// A lease on the producer.
    Lease(LeaseId),
    /// A load on the consumer whose request is gone.
    Load(LoadId),
}

/// What is to become of a finished request's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "blocks freed against a Hold are read or written by a peer"]
pub enum Verdict {
    /// They may be used again at once.
    Free,
    /// Those that a peer may touch must be kept as they are until [`SchedEvent::BlocksReleased`] names this hold. An
    /// engine that cannot tell them from the request's other blocks keeps all of them until then.
    Hold(HoldId),
}

/// Answer to the end of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// What is to become of the blocks.
    pub verdict: Verdict,
    /// Parameters to give to whoever asked, on a producer.
    pub params: Option<RemotePrefill>,
}

/// How a load ended over all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LoadResult {
    /// Every rank has its bytes, and every rank of the producer confirmed its lease.
    Loaded {
        /// Tokens from the start of the prompt whose KV is now here.
        tokens: u32,
        /// Of these, how many came from the producer.
        remote_tokens: u32,
        /// Summed over the ranks; times are the slowest rank's.
        stats: LoadStats,
    },
    /// At least one rank failed.
    Failed {
        /// Why, on the lowest rank that failed.
        reason: LoadFailure,
        /// For a person.
        detail: String,
        /// Blocks that may hold wrong bytes, by group.
        invalid: Vec<BlockList>,
        /// Tokens from the start of the prompt that are not touched by the failure: what was here before, and what
        /// every rank had read and was confirmed before it failed.
        valid_tokens: u32,
        /// `None`: the invalid blocks are quiet and stay the request's. `Some`: somebody may still write them;
        /// the request must let go of them, and they come back with [`SchedEvent::BlocksReleased`].
        hold: Option<HoldId>,
        /// Producers whose offers the request still holds, the next one first. If there are any, the request is queued
        /// again: the engine asks [`Scheduler::remote_tokens`](crate::Scheduler::remote_tokens) and allocates as for
        /// the first load, or declines. An engine that does neither keeps them until the queue's limit or the request's
        /// end. A drain may have ended them by the time that this is read; then the answer is zero tokens.
        others: Vec<PeerLocator>,
    },
}

/// What hand-overs are not over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Remaining {
    /// Requests that compute for somebody else. The engine ends these.
    pub computing: usize,
    /// Leases on blocks of this engine.
    pub leases: usize,
    /// Requests that wait for blocks to load into.
    pub queued: usize,
    /// Loads whose blocks are in the workers' hands.
    pub loads: usize,
}

impl Remaining {
    /// Whether nothing is left.
    pub const fn is_empty(&self) -> bool {
        self.computing + self.leases + self.queued + self.loads == 0
    }
}

/// What the engine is told. Take all of them after each report and each call of `time_passed`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SchedEvent {
    /// A load that a request waits for has ended.
    LoadEnded {
        /// The request.
        request: RequestId,
        /// How it ended.
        result: LoadResult,
    },
    /// Blocks that were held are free.
    BlocksReleased {
        /// What held them.
        hold: HoldId,
        /// The request that they were of; a label, the id may be in use again.
        request: RequestId,
        /// The blocks by group that a peer could touch. The request may have had more, before or behind them.
        blocks: Vec<BlockList>,
    },
    /// A drain is over: nothing is left, or it could not be ended in time.
    Drained {
        /// What is left. Blocks that it holds may still be touched by somebody.
        left: Remaining,
    },
    /// Workers have not reported an end that they must have reached: they are dead or stuck.
    WorkersSilent {
        /// What waits for them.
        hold: HoldId,
        /// The ranks that are missing.
        missing: Vec<Rank>,
    },
}
