//! The contract between whoever moves bytes and whoever owns blocks.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{LossReason, ReadError, TransportError};
use crate::memory::Memory;

/// Longest address or key that a transport may give out, in bytes (rule T-10).
pub const OPAQUE_MAX_BYTES: usize = 1024;

/// Longest message that any transport must carry, in bytes. A transport may refuse longer ones by name.
pub const MESSAGE_MAX_BYTES: usize = 1 << 20;

macro_rules! opaque {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Vec<u8>);

        impl $name {
            /// Wraps bytes that a transport gave out, here or at a peer.
            pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, TransportError> {
                if bytes.is_empty() || bytes.len() > OPAQUE_MAX_BYTES {
                    return Err(TransportError::OpaqueLength {
                        what: stringify!($name),
                        bytes: bytes.len(),
                        limit: OPAQUE_MAX_BYTES,
                    });
                }
                Ok(Self(bytes))
            }

            /// The bytes, to be carried to a peer unchanged.
            pub fn as_bytes(&self) -> &[u8] {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({} bytes)"), self.0.len())
            }
        }
    };
}

opaque!(
    /// Where a transport can be reached. Opaque: only the transport that made it, or its like at a peer, reads it.
    Address
);
opaque!(
    /// What a peer needs in order to read a registered region. Opaque, and void once the region is gone.
    RegionKey
);

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

handle!(
    /// A peer of one transport instance: one connection in the sense of the contract. A peer that was lost and is
    /// connected again gets a new id.
    PeerId,
    "peer-"
);
handle!(
    /// A registered region of one transport instance.
    RegionId,
    "region-"
);
handle!(
    /// An operation. The caller chooses it, and must not use one twice at the same time.
    OpId,
    "op-"
);

/// Consecutive bytes to be read: from an offset in the peer's region to an offset in the local one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRange {
    /// Offset in the peer's region, in bytes.
    pub remote_offset: u64,
    /// Offset in the local region, in bytes.
    pub local_offset: u64,
    /// Number of bytes, more than zero.
    pub len: u64,
}

/// Ranges that lie in one remote and one local region.
#[derive(Debug, Clone)]
pub struct ReadPart {
    /// The peer's key for its region.
    pub key: RegionKey,
    /// The local region.
    pub region: RegionId,
    /// What to read. Local ranges of one request must not overlap.
    pub ranges: Vec<ReadRange>,
}

/// How long a read may take. Both limits are always in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadLimits {
    /// From submission to completion.
    pub total: Duration,
    /// Without a single byte arriving for this read.
    pub stall: Duration,
}

/// A read of many ranges from one peer.
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// The caller's name for it.
    pub op: OpId,
    /// Whom to read from.
    pub peer: PeerId,
    /// What to read; any number of ranges.
    pub parts: Vec<ReadPart>,
    /// How long it may take.
    pub limits: ReadLimits,
}

impl ReadRequest {
    /// Number of ranges over all parts.
    pub fn range_count(&self) -> usize {
        self.parts.iter().map(|p| p.ranges.len()).sum()
    }

    /// Number of bytes over all ranges; `None` if the sum does not fit.
    pub fn byte_count(&self) -> Option<u64> {
        self.parts.iter().flat_map(|p| &p.ranges).try_fold(0u64, |sum, r| sum.checked_add(r.len))
    }
}

/// A set of range indices, counted through all parts of a request in order.
#[derive(Clone, PartialEq, Eq)]
pub struct RangeSet {
    bits: Vec<u64>,
    size: usize,
}

impl RangeSet {
    /// None of `size` ranges.
    pub fn none(size: usize) -> Self {
        Self { bits: vec![0; size.div_ceil(64)], size }
    }

    /// All of `size` ranges.
    pub fn all(size: usize) -> Self {
        let mut bits = vec![u64::MAX; size.div_ceil(64)];
        if let Some(last) = bits.last_mut()
            && !size.is_multiple_of(64)
        {
            *last = (1 << (size % 64)) - 1;
        }
        Self { bits, size }
    }

    /// Adds a range; an index beyond the request's ranges changes nothing.
    pub fn insert(&mut self, index: usize) {
        if index < self.size {
            self.bits[index / 64] |= 1 << (index % 64);
        }
    }

    /// Whether the range is in the set.
    pub fn contains(&self, index: usize) -> bool {
        index < self.size && self.bits[index / 64] & (1 << (index % 64)) != 0
    }

    /// How many ranges are in the set.
    pub fn count(&self) -> usize {
        self.bits.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether every range of the request is in the set.
    pub fn is_all(&self) -> bool {
        self.count() == self.size
    }

    /// Number of ranges of the request.
    pub fn size(&self) -> usize {
        self.size
    }
}

impl fmt::Debug for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} ranges", self.count(), self.size)
    }
}

/// How a read ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOutcome {
    /// `Ok` means that every range arrived (rule T-2).
    pub result: Result<(), ReadError>,
    /// The ranges whose bytes are all in place. Others may hold old bytes, new bytes or a mixture.
    pub arrived: RangeSet,
}

/// What a transport tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A connection asked for with [`Transport::connect`] stands.
    Connected {
        /// The id that `connect` returned.
        peer: PeerId,
    },
    /// A peer connected to us.
    Accepted {
        /// Its new id.
        peer: PeerId,
    },
    /// A message arrived, whole (rule T-5).
    Message {
        /// From whom.
        peer: PeerId,
        /// What it sent.
        bytes: Vec<u8>,
    },
    /// A read ended, well or not. Its destination is never written again (rule T-3).
    ReadCompleted {
        /// The caller's name for it.
        op: OpId,
        /// How it ended.
        outcome: ReadOutcome,
    },
    /// A peer is gone, or could not be reached. Told once per peer, after the completions of its reads (rule T-6).
    PeerLost {
        /// Which one.
        peer: PeerId,
        /// Why.
        reason: LossReason,
    },
}

/// A transport under whose name a peer may reach regions of another; see [`Transport::faces`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Face {
    /// Its name.
    pub name: &'static str,
    /// Where it can be reached.
    pub address: Address,
    /// Its keys, in the order of the regions asked for.
    pub keys: Vec<RegionKey>,
}

/// What a transport can do. What is not claimed is refused by name (rule T-12).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Longest message, at least [`MESSAGE_MAX_BYTES`].
    pub message_max_bytes: usize,
    /// Whether regions may lie in host memory.
    pub host_memory: bool,
    /// Whether regions may lie in device memory.
    pub device_memory: bool,
    /// Whether a read of host memory needs no step of the peer's processor.
    pub one_sided: bool,
    /// Whether peers on other machines can be reached.
    pub across_hosts: bool,
}

impl Capabilities {
    /// What every transport starts from: host memory and messages, nothing else.
    pub const fn basic() -> Self {
        Self {
            message_max_bytes: MESSAGE_MAX_BYTES,
            host_memory: true,
            device_memory: false,
            one_sided: false,
            across_hosts: false,
        }
    }
}

/// Moves bytes from a peer's registered memory into ours, and small messages both ways.
///
/// A transport knows nothing of leases, requests or blocks. Its caller submits operations under ids of its own
/// and takes [`Event`]s; nothing here blocks. One task takes the events; any thread may submit.
///
/// # The rules
///
/// Each has a number that code and tests cite. [`crate::rules`] writes out what each demands of both sides;
/// `kv_testkit::conformance` tries them.
///
/// * **T-1** An accepted operation completes exactly once; a refused one (an `Err` returned) changes nothing.
/// * **T-2** A successful read put exactly the source's bytes into exactly the destination ranges.
/// * **T-3** After a read's completion, successful or not, its destination is never written again.
/// * **T-4** A region stays registered, and its memory alive, while an operation uses it.
/// * **T-5** A message arrives whole and at most once. Order between messages is not promised.
/// * **T-6** Losing a peer ends every operation on it, and is announced once, after those completions.
/// * **T-7** A cancel is a request; the completion still comes.
/// * **T-8** Nothing blocks the caller, and every wait has a limit.
/// * **T-9** A key of a region or a peer that is gone fails cleanly, never with wrong bytes.
/// * **T-10** Addresses and keys are opaque and bounded, and those of others are distrusted.
/// * **T-11** Dropping a transport ends its threads and sockets in bounded time.
/// * **T-12** What a capability claims works; what is not claimed is refused by name.
///
/// # What "completed" means
///
/// For the reader: the bytes are in its memory. The source may be written to again only when the *owner* of the
/// blocks knows that the read has ended; a transport does not tell it. That is the business of leases.
#[async_trait]
pub trait Transport: Send + Sync + fmt::Debug {
    /// The word by which a configuration names it.
    fn name(&self) -> &'static str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Where peers reach this instance.
    fn address(&self) -> Address;

    /// Makes memory known. The transport keeps it alive until it is deregistered and unused.
    fn register(&self, memory: Memory) -> Result<RegionId, TransportError>;

    /// What a peer needs in order to read the region.
    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError>;

    /// Forgets a region: peers' reads of it fail from now on (rule T-9). Refused with
    /// [`TransportError::RegionInUse`] while an own read writes into it (rule T-4).
    fn deregister(&self, region: RegionId) -> Result<(), TransportError>;

    /// Starts to connect. [`Event::Connected`] or [`Event::PeerLost`] follows within `limit`.
    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError>;

    /// Lets go of a peer. Its operations complete, then [`Event::PeerLost`] with
    /// [`LossReason::Disconnected`] follows.
    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError>;

    /// Submits a read. The destination belongs to the transport until [`Event::ReadCompleted`].
    fn read(&self, request: ReadRequest) -> Result<(), TransportError>;

    /// Asks a read to end early. Nothing happens if it is unknown or has ended.
    fn cancel(&self, op: OpId);

    /// Queues a message. `Ok` means accepted, not delivered: a message can be lost with its peer.
    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError>;

    /// The next event; `None` once the transport has shut down and every event was taken. Dropping the future
    /// loses nothing.
    async fn next_event(&self) -> Option<Event>;

    /// In words for people: what carries the bytes of a peer, if there is anything to say. It can change with use.
    fn lane(&self, peer: PeerId) -> Option<String> {
        let _ = peer;
        None
    }

    /// Other transports under whose names peers may reach these regions, for a transport that is made of others.
    fn faces(&self, regions: &[RegionId]) -> Result<Vec<Face>, TransportError> {
        let _ = regions;
        Ok(vec![])
    }

    /// Address and keys for [`Transport::connect`] and [`Transport::read`], made from those of a peer that has only one of
    /// this transport's parts; `None` if this transport has no such part.
    fn adopt(&self, name: &str, address: &Address, keys: &[RegionKey]) -> Option<(Address, Vec<RegionKey>)> {
        let _ = (name, address, keys);
        None
    }

    /// Ends everything: operations complete, peers are lost, sockets are closed. Returns when that is done, or
    /// after `limit` at the latest.
    async fn shutdown(&self, limit: Duration);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_sets_count_what_they_hold() {
        let mut set = RangeSet::none(130);
        assert!(!set.is_all());
        for index in [0, 63, 64, 129, 129, 500] {
            set.insert(index);
        }
        assert_eq!(set.count(), 4);
        assert!(set.contains(64) && !set.contains(65) && !set.contains(500));
        assert!(RangeSet::all(130).is_all() && RangeSet::none(0).is_all());
    }

    #[test]
    fn opaque_bytes_are_bounded() {
        assert!(Address::from_bytes(vec![]).is_err());
        assert!(RegionKey::from_bytes(vec![0; OPAQUE_MAX_BYTES + 1]).is_err());
        assert!(RegionKey::from_bytes(vec![0; OPAQUE_MAX_BYTES]).is_ok());
    }

    #[test]
    fn a_request_whose_lengths_overflow_has_no_byte_count() {
        let range = ReadRange { remote_offset: 0, local_offset: 0, len: u64::MAX };
        let key = RegionKey::from_bytes(vec![1]).unwrap();
        let part = ReadPart { key, region: RegionId(0), ranges: vec![range, range] };
        let limits = ReadLimits { total: Duration::from_secs(1), stall: Duration::from_secs(1) };
        let request = ReadRequest { op: OpId(0), peer: PeerId(0), parts: vec![part], limits };
        assert_eq!((request.range_count(), request.byte_count()), (2, None));
    }
}
