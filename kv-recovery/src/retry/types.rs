//! What goes into the retry machine and what comes out.

use std::collections::BTreeMap;

use kv_proto::{LoadFailure, Moment, PeerLocator, RequestId};

/// A load that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadFacts<K = RequestId, P = PeerLocator> {
    /// The request.
    pub key: K,
    /// Whom it was read from.
    pub peer: P,
    /// Why it failed.
    pub reason: LoadFailure,
    /// Tokens from the start of the prompt that are good whatever comes, as [`judge`](crate::judge) says.
    pub tokens_valid: u32,
    /// Tokens that the request would have had after the load.
    pub tokens_wanted: u32,
    /// Whether the producer may still hold the blocks. A wrong `true` costs an attempt, never a wrong token: the
    /// producer is asked again after every read.
    pub lease_alive: bool,
    /// Others that hold the same prefix, best first, as a router named them.
    pub alternatives: Vec<P>,
}

/// Where the next attempt reads from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The producer of the attempt that failed.
    Same,
    /// That item of [`LoadFacts::alternatives`].
    Alternative(usize),
}

/// What is to be done about a failed load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Directive<K = RequestId> {
    /// Load again, now. Its end is to be told, well or failed.
    Retry {
        /// The request.
        key: K,
        /// Whom to read from.
        source: Source,
        /// When it was to start.
        at: Moment,
    },
    /// Compute everything behind these tokens.
    Recompute {
        /// The request.
        key: K,
        /// Tokens from the start of the prompt that are kept.
        keep_tokens: u32,
    },
    /// End the request with an error.
    Fail {
        /// The request.
        key: K,
        /// Why its last load failed.
        reason: LoadFailure,
    },
}

/// Whether a load may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Yes.
    Go,
    /// Yes, and it is the one by which it is found out whether the peer is back. Until its end is told, others are
    /// refused.
    Probe,
    /// No: compute the prompt instead, or read from another producer.
    Refuse {
        /// When to ask again at the earliest.
        until: Moment,
        /// Why.
        reason: Refusal,
    },
}

/// Why a load may not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Loads from this peer fail.
    Open {
        /// The failure that was one too many.
        after: LoadFailure,
    },
    /// One load finds out whether the peer is back.
    Probing,
}

/// A peer's breaker, for people and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// Loads may start.
    Closed,
    /// No load may start.
    Open {
        /// Before this time.
        until: Moment,
    },
    /// The next load is the probe.
    HalfOpen,
    /// The probe is out.
    Probing {
        /// So long it is waited for.
        until: Moment,
    },
}

/// Counters. They only grow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecoveryStats {
    /// Failed loads that were taken, by reason.
    pub failures: BTreeMap<LoadFailure, u64>,
    /// Requests sent back to compute what is missing.
    pub recomputed: u64,
    /// Requests that end with an error.
    pub failed: u64,
    /// Attempts at the same producer.
    pub retries_same: u64,
    /// Attempts at another producer.
    pub retries_elsewhere: u64,
    /// Retries that ended well.
    pub recovered: u64,
    /// Tokens that requests sent back kept.
    pub tokens_kept: u64,
    /// Tokens that requests sent back have to compute.
    pub tokens_recomputed: u64,
    /// Failures without a retry because no attempt can help.
    pub unhelpful: u64,
    /// Failures without a retry because the request has had its attempts.
    pub attempts_spent: u64,
    /// Failures without a retry because a budget was used up.
    pub refused_by_budget: u64,
    /// Failures without a retry because breakers are open.
    pub refused_by_breaker: u64,
    /// First loads that were not admitted.
    pub loads_refused: u64,
    /// Loads that were admitted as probes, retries included.
    pub probes: u64,
    /// Times that a breaker opened, probes that failed included.
    pub breakers_opened: u64,
    /// Times that a breaker closed because its peer answered.
    pub breakers_closed: u64,
    /// Peers forgotten because nothing was heard of them.
    pub peers_forgotten: u64,
    /// Peers forgotten to make room.
    pub peers_evicted: u64,
    /// Requests that went away while they waited for an attempt.
    pub gone: u64,
    /// Attempts of which nothing was heard in time.
    pub silent: u64,
    /// Reports about requests that were waiting for an attempt: harmless.
    pub stray: u64,
}
