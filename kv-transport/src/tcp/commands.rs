//! What callers ask of the IO thread.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use super::address::Endpoint;
use super::plan::Plan;
use crate::contract::{OpId, PeerId, ReadLimits};
use crate::error::LossReason;

/// To the task of a peer.
#[derive(Debug)]
pub(super) enum Command {
    Read(AcceptedRead),
    Cancel {
        op: OpId,
        serial: u64,
    },
    Send(Vec<u8>),
    /// Messages were taken; reading may go on.
    Resume,
    Close(LossReason),
}

/// To the thread.
#[derive(Debug)]
pub(super) enum Control {
    Connect { peer: PeerId, endpoint: Endpoint, deadline: Instant, commands: UnboundedReceiver<Command> },
    Shutdown,
}

/// A read that was accepted: it completes exactly once.
#[derive(Debug)]
pub(super) struct AcceptedRead {
    pub(super) op: OpId,
    /// Tells it from a later read under the same id.
    pub(super) serial: u64,
    pub(super) plan: Plan,
    pub(super) submitted: Instant,
    pub(super) limits: ReadLimits,
}

/// The instant after so long. A limit beyond the calendar is one of many years.
pub(super) fn after(start: Instant, limit: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
    start.checked_add(limit.min(FAR)).unwrap_or(start)
}
