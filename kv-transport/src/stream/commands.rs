//! What callers ask of the IO thread.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use super::plan::Plan;
use super::pool::Handed;
use super::staging::Copied;
use super::target::Target;
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
#[derive(Debug)]
pub(crate) enum Control {
    Connect { peer: PeerId, target: Target, deadline: Instant, commands: UnboundedReceiver<Command> },
    Shutdown,
}

/// A read that was accepted: it completes exactly once.
#[derive(Debug)]
pub(crate) struct AcceptedRead {
    pub(crate) op: OpId,
    /// Tells it from a later read under the same id.
    pub(crate) serial: u64,
    pub(crate) plan: Plan,
    pub(crate) submitted: Instant,
    pub(crate) limits: ReadLimits,
}

/// The instant after so long. A limit beyond the calendar is one of many years.
pub(crate) fn after(start: Instant, limit: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
    start.checked_add(limit.min(FAR)).unwrap_or(start)
}
