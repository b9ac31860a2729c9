//! Errors, sorted by who must act.

use thiserror::Error;

use crate::contract::{OpId, PeerId, RegionId};
use crate::device::DeviceError;

/// A call was refused and changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransportError {
    // You called it wrong.
    /// An address or key has an impossible length.
    #[error("{what} is {bytes} bytes long; 1 to {limit} are allowed")]
    OpaqueLength {
        /// Type of the value.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// Longest length allowed.
        limit: usize,
    },
    /// An address was not made by a transport of this kind, or is damaged.
    #[error("address is not one of transport {transport}: {reason}")]
    BadAddress {
        /// The transport asked.
        transport: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A region key was not made by a transport of this kind, or is damaged.
    #[error("region key is not one of transport {transport}")]
    BadKey {
        /// The transport asked.
        transport: &'static str,
    },
    /// No such region.
    #[error("{region} is not registered")]
    UnknownRegion {
        /// The region named.
        region: RegionId,
    },
    /// The region is the destination of a read in flight.
    #[error("{region} is the destination of {reads} reads in flight")]
    RegionInUse {
        /// The region named.
        region: RegionId,
        /// How many reads use it.
        reads: usize,
    },
    /// No such peer, or it is gone.
    #[error("{peer} is not connected")]
    UnknownPeer {
        /// The peer named.
        peer: PeerId,
    },
    /// The operation id is in use.
    #[error("{op} is already in flight")]
    DuplicateOp {
        /// The operation named.
        op: OpId,
    },
    /// A read asks for no range at all.
    #[error("{op} has no ranges")]
    NoRanges {
        /// The operation named.
        op: OpId,
    },
    /// A range is empty or reaches beyond the local region.
    #[error("{op}: range {index} covers local bytes {offset}+{len}, the region has {region_len}")]
    LocalRange {
        /// The operation named.
        op: OpId,
        /// Index of the range through all parts.
        index: usize,
        /// Its local offset.
        offset: u64,
        /// Its length.
        len: u64,
        /// Length of the region.
        region_len: u64,
    },
    /// Two ranges of one read write the same bytes.
    #[error("{op}: two ranges write to local byte {offset} of {region}")]
    Overlap {
        /// The operation named.
        op: OpId,
        /// The region written to.
        region: RegionId,
        /// First byte that both cover.
        offset: u64,
    },
    /// A limit of a read is zero.
    #[error("{op}: the {limit} limit is zero")]
    ZeroLimit {
        /// The operation named.
        op: OpId,
        /// Which limit.
        limit: &'static str,
    },
    /// A message is longer than the transport carries.
    #[error("message of {bytes} bytes is longer than the {limit} that this transport carries")]
    MessageTooLong {
        /// Its length.
        bytes: usize,
        /// Longest length allowed.
        limit: usize,
    },
    /// The peer takes messages more slowly than they are sent; this one was refused.
    #[error("{peer} has {queued} messages waiting to be sent; no more are taken")]
    SendQueueFull {
        /// The peer named.
        peer: PeerId,
        /// Messages waiting.
        queued: usize,
    },
    /// A configuration that cannot work.
    #[error("configuration of transport {transport}: {what}")]
    BadConfig {
        /// The transport configured.
        transport: &'static str,
        /// What is wrong with it.
        what: &'static str,
    },
    /// No more peers are taken until others are gone and their loss was taken note of.
    #[error("{limit} peers are connected or not yet reported lost; no more are taken")]
    TooManyPeers {
        /// The limit that is reached.
        limit: usize,
    },
    /// A capability that this transport does not claim.
    #[error("transport {transport} cannot do this: {what}")]
    Unsupported {
        /// The transport asked.
        transport: &'static str,
        /// What was asked for.
        what: &'static str,
    },
    /// A library that the transport is made of is missing, too old or damaged.
    #[error("transport {transport}: {problem}")]
    Library {
        /// The transport asked.
        transport: &'static str,
        /// What is wrong with which file.
        problem: String,
    },
    // The fabric failed.
    /// The fabric refused something that every operation needs.
    #[error("transport {transport}: {operation} failed: {meaning} (code {code})")]
    Fabric {
        /// The transport asked.
        transport: &'static str,
        /// What was tried.
        operation: &'static str,
        /// The native code.
        code: i64,
        /// What the fabric says that it means.
        meaning: String,
    },
    /// The transport has been shut down, or its thread is gone.
    #[error("transport {transport} is closed")]
    Closed {
        /// The transport asked.
        transport: &'static str,
    },
    /// A socket, a thread or memory could not be had.
    #[error("{operation} {subject}: {kind} (os error {code:?})")]
    System {
        /// What was tried.
        operation: &'static str,
        /// On what: an address, a name.
        subject: String,
        /// The kind of failure.
        kind: std::io::ErrorKind,
        /// The system's own number, if it gave one.
        code: Option<i32>,
    },
}

/// Why a read did not bring every range.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// It took longer than allowed in all.
    #[error("not finished within its limit")]
    TimedOut,
    /// No byte arrived for longer than allowed.
    #[error("no byte arrived within the stall limit")]
    Stalled,
    /// The peer was lost.
    #[error("peer lost: {0}")]
    PeerLost(LossReason),
    /// The peer does not know the region: deregistered, or of another life.
    #[error("the peer does not know this region key")]
    UnknownKey,
    /// The peer refused a range beyond its region.
    #[error("the peer refused a range beyond its region")]
    RemoteRange,
    /// The fabric reported a failure of its own.
    #[error("the fabric failed with its code {code}")]
    Fabric {
        /// The native code.
        code: i64,
    },
    /// The peer's region lies on a device, which did not give the bytes.
    #[error("the peer's device did not give the bytes")]
    RemoteDevice,
    /// The device that the bytes were for did not take them.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The transport was shut down.
    #[error("transport closed")]
    Closed,
}

impl ReadError {
    /// Whether the same read may succeed when it is submitted again.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::TimedOut | Self::Stalled | Self::PeerLost(_) | Self::Fabric { .. } | Self::RemoteDevice => {
                true
            }
            Self::Device(_) | Self::Cancelled | Self::UnknownKey | Self::RemoteRange | Self::Closed => false,
        }
    }
}

/// Why a peer is gone.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LossReason {
    /// We let go of it.
    #[error("disconnected by us")]
    Disconnected,
    /// It closed the connection, or its process ended.
    #[error("closed by the peer")]
    ClosedByPeer,
    /// It could not be reached.
    #[error("could not be reached: {kind} (os error {code:?})")]
    Unreachable {
        /// The kind of failure.
        kind: std::io::ErrorKind,
        /// The system's own number, if it gave one.
        code: Option<i32>,
    },
    /// The connection was not established in time.
    #[error("not connected within the limit")]
    ConnectTimedOut,
    /// It did not answer in time.
    #[error("silent for too long")]
    Silent,
    /// It is not a transport of this kind, or of another version.
    #[error("does not speak this protocol: {0}")]
    Stranger(&'static str),
    /// It broke the protocol.
    #[error("broke the protocol: {0}")]
    Protocol(&'static str),
    /// It reads so slowly that what waits for it exceeds the limit.
    #[error("reads too slowly")]
    SlowReader,
    /// The connection failed.
    #[error("connection failed: {kind} (os error {code:?})")]
    Broken {
        /// The kind of failure.
        kind: std::io::ErrorKind,
        /// The system's own number, if it gave one.
        code: Option<i32>,
    },
    /// The transport was shut down.
    #[error("transport closed")]
    Closed,
}
