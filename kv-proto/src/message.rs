//! Worker-to-worker messages: small typed frames over a transport.
//!
//! The consumer's worker speaks first. `Hello` names both ends; after `Welcome` every message belongs to that pair
//! of lives, so that a frame of a former life cannot reach this one. A peer that speaks before it was greeted is
//! let go.

use serde::{Deserialize, Serialize};

use crate::blocks::BlockList;
use crate::codec::{self, CodecError, WORKER_MESSAGE_MAX_BYTES};
use crate::ids::{Attempt, EngineId, Incarnation, LeaseId, Rank};
use crate::topology::Topology;
use crate::params::OfferDigest;
use crate::step::ReleaseReason;

/// Most leases one list of a message names; more are split over several messages.
pub const LEASES_PER_MESSAGE_MAX: usize = 8_192;

/// An offer as a consumer names it: the lease, and the digest of what was offered under it. Who does not know the
/// digest renews nothing and ends nothing.
pub type OfferName = (LeaseId, OfferDigest);

/// Most positions one `Compare` speaks of; more are split over several messages.
pub const COMPARED_MAX: u32 = 32_768;

/// A digest of the bytes at one position of a load: of each region, in the layout's order, those of the block that
/// the region's group names for the position. XXH3 of 64 bits: it tells accidents, not attacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockDigest(pub u64);

/// Blocks of one group, by position.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupList {
    /// The block group.
    pub group: u32,
    /// Its blocks. Groups may have fewer than others.
    pub blocks: BlockList,
}

/// Why a `Hello` was not welcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HelloRefusal {
    /// The version spoken is another one.
    Version,
    /// The life asked for is not this one.
    Incarnation,
    /// The rank asked for is not this one.
    Rank,
    /// The topologies do not fit, or this rank serves no such reader.
    Topology,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

/// One message. C: consumer to producer; P: producer to consumer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WorkerMessage {
    /// C: who I am, and whom I believe to speak to.
    Hello {
        /// Protocol version.
        version: u32,
        /// The consumer's engine.
        engine: EngineId,
        /// Its life.
        incarnation: Incarnation,
        /// Its rank.
        rank: Rank,
        /// How it is cut.
        topology: Topology,
        /// The producer's life that I shook hands with.
        to: Incarnation,
        /// The producer's rank that I want.
        to_rank: Rank,
    },
    /// P: it is me.
    Welcome {
        /// The producer's life.
        incarnation: Incarnation,
        /// Its rank.
        rank: Rank,
    },
    /// P: it is not me, or we do not fit.
    Unwelcome {
        /// Why.
        reason: HelloRefusal,
        /// The producer's life.
        incarnation: Incarnation,
    },
    /// C: I live, and want what I have named so far. A lease is named once per connection, not once per renewal, so
    /// that renewing costs the same however many leases live.
    Renew {
        /// Numbers the renewals of a connection, from 0. After a gap P asks for all ([`WorkerMessage::Relist`]).
        seq: u64,
        /// Whether `wanted` begins a new list: what was named before counts no more.
        all: bool,
        /// Leases wanted from now on.
        wanted: Vec<OfferName>,
        /// Leases wanted no more.
        dropped: Vec<OfferName>,
    },
    /// P: a renewal is missing; name all again.
    Relist {},
    /// P: of those you named, these are not held, or not any more.
    NotHeld {
        /// The leases.
        leases: Vec<OfferName>,
    },
    /// C: my reads under this lease have all ended well. Did it hold?
    ReadDone {
        /// The lease.
        lease: LeaseId,
        /// Which try; a repetition carries the same number.
        attempt: Attempt,
        /// What was offered under the lease, as it reached the consumer.
        offer: OfferDigest,
        /// Whether others of mine on this rank still read under the lease: it is to go on.
        more: bool,
    },
    /// C: the first blocks of a load are here, the rest is being read. Does the lease hold until now? An answer that
    /// it does makes these blocks good, whatever becomes of the rest.
    Check {
        /// The lease.
        lease: LeaseId,
        /// Which try.
        attempt: Attempt,
        /// What was offered under the lease, as it reached the consumer.
        offer: OfferDigest,
        /// How many blocks of the load are here.
        blocks: u32,
    },
    /// P: whether the lease held until I got your `Check`. Not remembered, and not said of a lease that is not granted
    /// yet.
    Checked {
        /// The lease.
        lease: LeaseId,
        /// The try answered.
        attempt: Attempt,
        /// How many blocks it was about.
        blocks: u32,
        /// Whether it held.
        held: bool,
    },
    /// C: these are the digests of what is here. Are they those of your blocks?
    Compare {
        /// The lease.
        lease: LeaseId,
        /// Which try.
        attempt: Attempt,
        /// What was offered under the lease, as it reached the consumer.
        offer: OfferDigest,
        /// The position in the load that the first digest is of.
        from: u32,
        /// The producer's blocks that were read, each group once, in the order of the groups.
        groups: Vec<GroupList>,
        /// One digest for each position.
        digests: Vec<BlockDigest>,
    },
    /// P: how many of your digests are those of my blocks, and whether the lease held until I had looked. Not
    /// remembered, and not said of a lease that is not granted yet.
    Compared {
        /// The lease.
        lease: LeaseId,
        /// The try answered.
        attempt: Attempt,
        /// The position that the first digest was of.
        from: u32,
        /// How many are equal before the first that is not.
        equal: u32,
        /// Whether the lease held. If not, the number says nothing.
        held: bool,
    },
    /// P: it held until I got your `ReadDone`, and the offer is mine; unless you said `more`, for you it has ended.
    Confirmed {
        /// The lease.
        lease: LeaseId,
        /// The try answered.
        attempt: Attempt,
    },
    /// P: it did not hold, or the offer is not what I offered. What you read may be anything.
    Lapsed {
        /// The lease.
        lease: LeaseId,
        /// The try answered.
        attempt: Attempt,
    },
    /// C: I will not read under this lease, or not any more.
    Release {
        /// The lease.
        lease: LeaseId,
        /// Which try.
        attempt: Attempt,
        /// What was offered under the lease, as it reached the consumer: who does not know it ends nothing.
        offer: OfferDigest,
        /// Why.
        reason: ReleaseReason,
    },
}

impl WorkerMessage {
    /// As bytes.
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode("worker message", WORKER_MESSAGE_MAX_BYTES, self)
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode("worker message", WORKER_MESSAGE_MAX_BYTES, bytes)
    }
}
