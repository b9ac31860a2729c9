//! Plan and report: what crosses between an engine's scheduler half and its workers, once per step, as bytes.
//!
//! The engine carries them by whatever it uses already; to it they are opaque. Every rank of an engine takes the
//! same plan.

use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::blocks::BlockList;
use crate::codec::{self, CodecError, STEP_MAX_BYTES};
use crate::ids::{CopyId, EngineId, Incarnation, LeaseId, LeaseRef, LoadId, Rank};
use crate::params::OfferDigest;
use crate::staging::{CopyNews, CopyOrder};

/// How long a lease lives. Durations in milliseconds; they count from when a worker takes the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LeaseTerms {
    /// Life without any renewal.
    pub ttl_ms: u64,
    /// A renewal moves the end to at least this far from its arrival; it never brings the end nearer.
    pub renewal_ms: u64,
    /// Longest life, however often it is renewed.
    pub max_ms: u64,
    /// Life that is left when the last connection of the only consumer that wants it is lost.
    pub grace_ms: u64,
}

/// A decision about one lease, from the producer's scheduler half to its workers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProducerOrder {
    /// The request that may become this lease begins: an ending that arrives early is to be kept.
    Announce {
        /// The lease.
        lease: LeaseId,
    },
    /// The request has finished and its blocks are pinned.
    Grant {
        /// The lease, announced before.
        lease: LeaseId,
        /// How long it lives.
        terms: LeaseTerms,
        /// What was offered under it.
        offer: OfferDigest,
    },
    /// The announced request hands nothing over.
    Forget {
        /// The lease.
        lease: LeaseId,
    },
    /// The lease is to end now: its blocks are needed, or their memory goes away.
    Revoke {
        /// The lease.
        lease: LeaseId,
    },
}

/// Where the consumer finds a producer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PeerLocator {
    /// The producer's engine id.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Host of its handshake listener.
    pub host: String,
    /// Port of its handshake listener.
    pub port: u16,
}

/// Why a consumer will not read what it was offered, or not again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReleaseReason {
    /// The consumer has all of it already.
    NotNeeded,
    /// The request was aborted.
    Aborted,
    /// The request was refused, or does not match what was offered.
    Refused,
    /// The load failed.
    LoadFailed,
    /// The request waited too long for room.
    WaitedTooLong,
    /// The consumer is draining.
    Draining,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

impl ReleaseReason {
    /// A word for tables and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotNeeded => "not_needed",
            Self::Aborted => "aborted",
            Self::Refused => "refused",
            Self::LoadFailed => "load_failed",
            Self::WaitedTooLong => "waited_too_long",
            Self::Draining => "draining",
            Self::Other => "other",
        }
    }
}

/// The blocks of one group that a load moves. Both lists are counted from the start of the request's sequence, each in
/// its own side's blocks, so that a token has the same position in both whatever the sizes of the blocks are.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupBlocks {
    /// The block group.
    pub group: u32,
    /// Position in the sequence of the first local block, in local blocks. What lies before it is not touched.
    pub first: u32,
    /// Position in the sequence of the first remote block, in remote blocks.
    #[serde(default)]
    pub remote_first: u32,
    /// Tokens from the start of the sequence that are handed over. Both lists reach at least to there, and no block of
    /// either begins behind it.
    #[serde(default)]
    pub tokens: u32,
    /// The producer's blocks.
    pub remote: BlockList,
    /// The consumer's blocks.
    pub local: BlockList,
}

/// A decision about one hand-over, from the consumer's scheduler half to its workers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ConsumerOrder {
    /// A request is queued: shake hands early, and renew its lease. Each is followed by one `Load` or one `Release`;
    /// several requests may live by one offer, which is given back when the last of them gives it up.
    Track {
        /// Its lease.
        lease: LeaseRef,
        /// What was offered under it, as it reached us.
        offer: OfferDigest,
        /// Whose lease.
        peer: PeerLocator,
    },
    /// Blocks are allocated: read.
    Load {
        /// This load.
        load: LoadId,
        /// The lease to read under.
        lease: LeaseRef,
        /// What was offered under it, as it reached us.
        offer: OfferDigest,
        /// Whom to read from.
        peer: PeerLocator,
        /// What goes where.
        groups: Vec<GroupBlocks>,
    },
    /// The request that was tracked will not read: tell the producer, unless another lives by the same offer.
    Release {
        /// The lease.
        lease: LeaseRef,
        /// What was offered under it, as it reached us.
        offer: OfferDigest,
        /// Whose lease.
        peer: PeerLocator,
        /// Why.
        reason: ReleaseReason,
    },
    /// The load is not wanted any more: end it soon, and report when its blocks are quiet.
    Cancel {
        /// The load.
        load: LoadId,
    },
}

/// All that one engine step asks of each worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Plan {
    /// Orders about own leases, to be taken in this order.
    #[serde(default)]
    pub producer: Vec<ProducerOrder>,
    /// Orders about loads, to be taken in this order.
    #[serde(default)]
    pub consumer: Vec<ConsumerOrder>,
    /// Copies between device blocks and the host pool, to be begun in this order. They depend on no order beside them.
    #[serde(default)]
    pub copies: Vec<CopyOrder>,
}

impl Plan {
    /// Whether it asks for nothing. Such a plan need not be carried.
    pub fn is_empty(&self) -> bool {
        self.producer.is_empty() && self.consumer.is_empty() && self.copies.is_empty()
    }

    /// As bytes.
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_kind("plan", STEP_MAX_BYTES, self)
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode_kind("plan", STEP_MAX_BYTES, bytes)
    }
}

/// How a lease ended on one producer rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LeaseEnd {
    /// Every expected reader read and was told so.
    Confirmed,
    /// Every expected reader has ended, at least one of them without a confirmed read.
    Released,
    /// Its time was over.
    Expired,
    /// Every consumer that wanted it is gone.
    ConsumerLost,
    /// The producer took it back.
    Revoked,
}

impl LeaseEnd {
    /// A word for tables and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Released => "released",
            Self::Expired => "expired",
            Self::ConsumerLost => "consumer_lost",
            Self::Revoked => "revoked",
        }
    }
}

/// Why a load failed. Each is one counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoadFailure {
    /// The handshake got no answer in time, or its host could not be found or reached.
    HandshakeUnreachable,
    /// The producer refused the handshake.
    HandshakeRefused,
    /// The two engines do not fit each other.
    Incompatible,
    /// What the producer answered makes no sense.
    HandshakeMalformed,
    /// The producer at that address is another engine, or another life of it.
    WrongPeer,
    /// No connection to the producer's worker could be made.
    ConnectFailed,
    /// The connection was lost.
    PeerLost,
    /// The order names blocks that one of the two pools does not have.
    BadBlocks,
    /// The transport refused the read.
    ReadRefused,
    /// The read took too long.
    ReadTimedOut,
    /// The read failed.
    ReadFailed,
    /// The producer did not answer whether the lease held.
    ConfirmTimedOut,
    /// The producer answered that the lease did not hold.
    Lapsed,
    /// What arrived is not what the producer has.
    Corrupt,
    /// It was cancelled by the engine.
    Cancelled,
    /// The worker is shutting down.
    Closed,
    /// The ranks did not report in time.
    ReportMissing,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

impl LoadFailure {
    /// A word for tables and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HandshakeUnreachable => "handshake_unreachable",
            Self::HandshakeRefused => "handshake_refused",
            Self::Incompatible => "incompatible",
            Self::HandshakeMalformed => "handshake_malformed",
            Self::WrongPeer => "wrong_peer",
            Self::ConnectFailed => "connect_failed",
            Self::PeerLost => "peer_lost",
            Self::BadBlocks => "bad_blocks",
            Self::ReadRefused => "read_refused",
            Self::ReadTimedOut => "read_timed_out",
            Self::ReadFailed => "read_failed",
            Self::ConfirmTimedOut => "confirm_timed_out",
            Self::Lapsed => "lapsed",
            Self::Corrupt => "corrupt",
            Self::Cancelled => "cancelled",
            Self::Closed => "closed",
            Self::ReportMissing => "report_missing",
            Self::Other => "other",
        }
    }

    /// Whether the same load from the same producer can go well while its lease lives: what broke may be whole again,
    /// or another connection may do. A reason that this version does not know may not: to compute is always right.
    pub const fn may_pass(self) -> bool {
        match self {
            Self::HandshakeUnreachable
            | Self::ConnectFailed
            | Self::PeerLost
            | Self::ReadTimedOut
            | Self::ReadFailed
            | Self::ConfirmTimedOut
            // The producer has compared: its own blocks are good, what came over the road is not.
            | Self::Corrupt => true,
            // The same question gets the same answer: another life, another engine, other blocks, no lease.
            Self::HandshakeRefused
            | Self::Incompatible
            | Self::HandshakeMalformed
            | Self::WrongPeer
            | Self::BadBlocks
            | Self::ReadRefused
            | Self::Lapsed => false,
            // Nobody wants it, or the destination may still be written.
            Self::Cancelled | Self::Closed | Self::ReportMissing | Self::Other => false,
        }
    }
}

/// What a good load moved on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LoadStats {
    /// Bytes of portions that arrived whole, over all tries.
    pub bytes: u64,
    /// Ranges that they arrived in, after neighbours were merged.
    pub ranges: u64,
    /// From the order to the last byte, in microseconds.
    pub read_us: u64,
    /// From the last byte to the confirmation, in microseconds.
    pub confirm_us: u64,
}

impl Hash for LoadStats {
    /// What moved, not how long it took: two machines that differ in measured times alone behave alike.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
        self.ranges.hash(state);
    }
}

/// How one rank's part of a load ended. Its destination blocks are quiet: nothing writes them any more.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PullEnd {
    /// The bytes are in place and the producer confirmed the lease.
    Loaded(LoadStats),
    /// Of the destination blocks only the first ones may be used.
    Failed {
        /// Why.
        reason: LoadFailure,
        /// For a person: which peer, both values, the native code.
        detail: String,
        /// Blocks of each group, from the first one of the load, that are in place and whose lease was confirmed after
        /// they were.
        #[serde(default)]
        verified: u32,
    },
}

/// What one worker has to say since its last report.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Report {
    /// Who reports.
    pub rank: Rank,
    /// Own leases that ended.
    #[serde(default)]
    pub leases: Vec<(LeaseId, LeaseEnd)>,
    /// Loads that ended.
    #[serde(default)]
    pub loads: Vec<(LoadId, PullEnd)>,
    /// What became of copies.
    #[serde(default)]
    pub copies: Vec<(CopyId, CopyNews)>,
}

impl Report {
    /// An empty one.
    pub const fn new(rank: Rank) -> Self {
        Self { rank, leases: Vec::new(), loads: Vec::new(), copies: Vec::new() }
    }

    /// Whether it says nothing. Such a report need not be carried.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.loads.is_empty() && self.copies.is_empty()
    }

    /// As bytes.
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_kind("report", STEP_MAX_BYTES, self)
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode_kind("report", STEP_MAX_BYTES, bytes)
    }
}
