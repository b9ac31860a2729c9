//! What the worker's machine is told and what it decides: its whole surface towards the driver.

use std::sync::Arc;

use kv_proto::handshake::EngineCard;
use kv_proto::message::{BlockDigest, GroupList, WorkerMessage};
use kv_proto::{CodecError, LoadFailure, LoadId, PeerLocator, Plan};
use kv_transport::{Address, ReadPart};
use thiserror::Error;

/// A connection, named by the machine that wanted it or by the driver that accepted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkId {
    /// To a producer; numbered by the machine.
    Dialled(u64),
    /// From a consumer; numbered by the driver, never twice the same.
    Accepted(u64),
}

/// One worker of a producer that this rank has to do with.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceKey {
    /// The producer.
    pub peer: Arc<PeerLocator>,
    /// The worker's place among those that this rank has to do with, counted from 0; see
    /// [`ShapePlan::sources`](crate::shape::ShapePlan::sources). How many there are is known after the handshake, that
    /// there is a first one before.
    pub source: u32,
}

impl SourceKey {
    /// The producer's first source, the only one that is known before the handshake.
    pub const fn first(peer: Arc<PeerLocator>) -> Self {
        Self { peer, source: 0 }
    }
}

/// A load's part that one source brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PullId {
    /// The load.
    pub load: LoadId,
    /// The source, see [`SourceKey::source`].
    pub source: u32,
}

impl PullId {
    /// The part of the first source; the whole load where there is no other.
    pub const fn first(load: LoadId) -> Self {
        Self { load, source: 0 }
    }
}

/// What digests are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DigestOf {
    /// A portion of a load of ours.
    Pull {
        /// The load's part.
        pull: PullId,
        /// Position of the portion's first block.
        from: u32,
    },
    /// A consumer's question, by its number.
    Question(u64),
}

/// What a self check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SelfCheck {
    /// Own memory can be read over the own transport.
    Readable,
    /// It cannot.
    Unreadable,
    /// Nothing: the check itself could not be made.
    Unknown,
}

/// Why something that the driver was asked to do failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Error)]
#[error("{detail}")]
pub struct Failure {
    /// The counter that it belongs to.
    pub reason: LoadFailure,
    /// For a person: who, both values, the native code.
    pub detail: String,
}

impl Failure {
    /// A failure with its words.
    pub fn new(reason: LoadFailure, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}

/// Something that happened.
#[derive(Debug, Clone)]
pub enum Fact {
    /// The engine's scheduler half sent a plan.
    PlanTaken(Plan),
    /// A handshake ended.
    HandshakeEnded {
        /// With whom, and for which of its workers.
        key: SourceKey,
        /// What the producer says of itself, checked; or why there is no answer.
        result: Result<Box<EngineCard>, Failure>,
    },
    /// A connection that was asked for stands.
    LinkConnected {
        /// Which one.
        link: LinkId,
    },
    /// A consumer connected.
    LinkAccepted {
        /// Its new name.
        link: LinkId,
    },
    /// A connection is gone, or was never made. The ends of its reads were told before.
    LinkLost {
        /// Which one.
        link: LinkId,
        /// For a person: why.
        detail: String,
    },
    /// A message arrived.
    MessageArrived {
        /// Over which connection.
        link: LinkId,
        /// What it says, if it could be understood.
        message: Result<WorkerMessage, CodecError>,
    },
    /// A read ended: nothing writes its destination any more.
    ReadEnded {
        /// What it was for.
        pull: PullId,
        /// The connection that it was ordered over.
        link: LinkId,
        /// Whether every byte arrived.
        result: Result<(), Failure>,
    },
    /// Digests were computed.
    Digested {
        /// What they are for.
        of: DigestOf,
        /// One for each position; or why there is none.
        digests: Result<Vec<BlockDigest>, Failure>,
    },
    /// A self check ended.
    SelfChecked {
        /// What it found.
        found: SelfCheck,
    },
}

/// Something to be done by the driver. None of it is waited for; what comes of it is a later [`Fact`].
#[derive(Debug, Clone)]
pub enum Decision {
    /// Shake hands with a producer.
    ShakeHands {
        /// Whom, and for which of its workers.
        key: SourceKey,
    },
    /// Connect to a producer's worker.
    Connect {
        /// The connection's name from now on.
        link: LinkId,
        /// Where.
        address: Address,
    },
    /// Let go of a connection. [`Fact::LinkLost`] is not needed for it, and does no harm.
    Disconnect {
        /// Which one.
        link: LinkId,
    },
    /// Send a message. It may be lost with its connection.
    Send {
        /// Over which connection.
        link: LinkId,
        /// What.
        message: WorkerMessage,
    },
    /// Read. [`Fact::ReadEnded`] follows, whatever happens.
    Read {
        /// For what.
        pull: PullId,
        /// Over which connection.
        link: LinkId,
        /// What.
        parts: Vec<ReadPart>,
    },
    /// Let a read end early. Its [`Fact::ReadEnded`] still follows.
    CancelRead {
        /// For what.
        pull: PullId,
    },
    /// Compute digests of own blocks. [`Fact::Digested`] follows, whatever happens.
    Digest {
        /// What they are for.
        of: DigestOf,
        /// The blocks.
        groups: Vec<GroupList>,
    },
    /// Find out whether own memory can be read over the own transport. [`Fact::SelfChecked`] follows; if it does not
    /// follow in time, that is an answer too.
    CheckSelf,
}
