//! Limits of the worker half.

use std::time::Duration;

use kv_proto::topology::TopologyError;
use kv_proto::{EngineId, Incarnation, Rank, Topology};
use thiserror::Error;

/// Who this worker is, and how long it waits for what. All of it is plain data.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WorkerConfig {
    /// This engine's id.
    pub engine: EngineId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// This worker's rank.
    pub rank: Rank,
    /// How the engine is cut.
    pub topology: Topology,
    /// Whether a load counts as good only if the producer has found the digests of its blocks equal to its own. For
    /// what others read from here, their configuration decides.
    pub checksums: bool,
    /// Limits.
    pub limits: WorkerLimits,
}

/// How long a worker waits for what, and how much it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkerLimits {
    /// A handshake, from looking up the host to the whole answer.
    pub handshake: Duration,
    /// A connection to a producer's worker, greeting included.
    pub connect: Duration,
    /// The wait before a peer that failed is tried again; doubled with each failure up to `retry_max`.
    pub retry_min: Duration,
    /// Longest wait before a peer that failed is tried again.
    pub retry_max: Duration,
    /// A load's wait for its peer to be ready.
    pub peer_wait: Duration,
    /// A read, from submission to the last byte.
    pub read: Duration,
    /// A read without a single byte arriving.
    pub stall: Duration,
    /// A producer's answer to `ReadDone`, repetitions included; and, with checksums, as long again before that for its
    /// answer to `Compare`.
    pub confirm: Duration,
    /// The wait before `ReadDone` or `Compare` is repeated.
    pub confirm_repeat: Duration,
    /// Time between two renewals to one peer.
    pub renew_every: Duration,
    /// A read of at least so many bytes has its lease renewed before it begins.
    pub prolong_bytes: u64,
    /// How often a read that failed for a reason that may pass is tried again, from where it was, while the lease lives.
    pub retries: u32,
    /// A load is read in portions of about so many bytes; what was read is checked while the next is under way.
    pub portion_bytes: u64,
    /// How long a producer's worker remembers how a lease ended, to answer a repeated `ReadDone` alike.
    pub remember_ended: Duration,
    /// How long a connection to a producer is kept without any business.
    pub peer_idle: Duration,
    /// Between two self checks, however many loads from here are said to have failed.
    pub self_check_every: Duration,
}

impl Default for WorkerLimits {
    /// Sized for one data centre: a healthy peer answers in milliseconds, so seconds mean that it is not.
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            connect: Duration::from_secs(3),
            retry_min: Duration::from_millis(500),
            retry_max: Duration::from_secs(30),
            peer_wait: Duration::from_secs(10),
            read: Duration::from_secs(10),
            stall: Duration::from_secs(3),
            confirm: Duration::from_secs(3),
            confirm_repeat: Duration::from_millis(500),
            renew_every: Duration::from_secs(2),
            prolong_bytes: 16 << 20,
            retries: 0,
            portion_bytes: 64 << 20,
            remember_ended: Duration::from_secs(60),
            peer_idle: Duration::from_secs(600),
            self_check_every: Duration::from_secs(10),
        }
    }
}

/// Why a configuration cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WorkerConfigError {
    /// A limit that must not be zero is.
    #[error("{field} is 0")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A topology that cannot be.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The rank is not one of the engine's.
    #[error("rank is {rank}, the engine has ranks 0 to {last}")]
    Rank {
        /// The rank given.
        rank: u32,
        /// The last rank there is.
        last: u32,
    },
}

impl WorkerConfig {
    /// Checks ranges.
    pub fn check(&self) -> Result<(), WorkerConfigError> {
        self.topology.check()?;
        if self.rank.0 >= self.topology.ranks {
            return Err(WorkerConfigError::Rank { rank: self.rank.0, last: self.topology.ranks - 1 });
        }
        let l = &self.limits;
        for (field, value) in [
            ("handshake", l.handshake),
            ("connect", l.connect),
            ("retry_min", l.retry_min),
            ("retry_max", l.retry_max),
            ("peer_wait", l.peer_wait),
            ("read", l.read),
            ("stall", l.stall),
            ("confirm", l.confirm),
            ("confirm_repeat", l.confirm_repeat),
            ("renew_every", l.renew_every),
            ("remember_ended", l.remember_ended),
            ("peer_idle", l.peer_idle),
            ("self_check_every", l.self_check_every),
        ] {
            if value.is_zero() {
                return Err(WorkerConfigError::Zero { field });
            }
        }
        if l.portion_bytes == 0 {
            return Err(WorkerConfigError::Zero { field: "portion_bytes" });
        }
        Ok(())
    }
}
