//! What callers ask of the IO thread.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::frame::{Preface, ServeLimits};
use super::key::Nonce;
use super::pool::Handed;
use super::shared::Link;
use super::socket::Socket;
use super::staging::Copied;
use super::target::Target;
use super::work::Work;
use crate::contract::{OpId, PeerId, ReadLimits};
use crate::error::LossReason;

/// To the task of a peer.
#[derive(Debug)]
pub(crate) enum Command {
    Read(AcceptedRead),
    /// A read that the connection has to carry, although there is a local path.
    Carry(AcceptedRead),
    Cancel {
        op: OpId,
        serial: u64,
    },
    Send(Vec<u8>),
    /// Messages were taken; what waited for that may go on.
    Resume,
    /// A slot of pinned memory that was waited for.
    Slot(Handed),
    /// A copy from or to a device has ended.
    Copied(Copied),
    Close(LossReason),
}

/// To the thread.
pub(crate) enum Control {
    Connect {
        link: Link,
        target: Target,
        deadline: Instant,
    },
    /// A peer that we connected to allows further connections to who shows this ticket.
    Further {
        peer: PeerId,
        target: Target,
        ticket: Nonce,
        count: u32,
    },
    /// A peer that connected to us has added a connection.
    Joined(Box<Joined>),
    Shutdown,
}

/// A further connection of a peer, before it is served.
pub(crate) struct Joined {
    pub(crate) link: Link,
    pub(crate) stream: Socket,
    pub(crate) answer: Preface,
    pub(crate) granted: ServeLimits,
}

/// A read that was accepted: it completes exactly once. Each connection that works on it has a copy.
#[derive(Debug, Clone)]
pub(crate) struct AcceptedRead {
    pub(crate) op: OpId,
    /// Tells it from a later read under the same id.
    pub(crate) serial: u64,
    pub(crate) work: Arc<Work>,
    /// Among how many connections it is divided.
    pub(crate) shares: usize,
    pub(crate) limits: ReadLimits,
}

/// The instant after so long. A limit beyond the calendar is one of many years.
pub(crate) fn after(start: Instant, limit: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
    start.checked_add(limit.min(FAR)).unwrap_or(start)
}
