//! A worker's look at itself: can what it registered be read over its own transport?
//!
//! ```text
//!  Idle ──asked──► Connecting ──connected──► Reading ──read ended──► Idle
//!                      └──────────lost──────────┴──lost──► Idle
//! ```
//!
//! A consumer that says that a load from here failed may be right or may have failed itself. The worker connects to its
//! own address and reads the start of each memory the way a consumer does: what fails there fails for every consumer.

use std::sync::Arc;

use kv_transport::{
    Event, LossReason, Memory, OpId, PeerId, ReadError, ReadLimits, ReadPart, ReadRange, ReadRequest,
    RegionId, Transport,
};

use crate::config::WorkerLimits;
use crate::machine::io::SelfCheck as Found;

/// Loads are numbered from one; none gets this number.
const OP: OpId = OpId(u64::MAX);

/// Read of each memory.
const BYTES: u64 = 4 << 10;

#[derive(Debug)]
enum State {
    Idle,
    Connecting { peer: PeerId, limits: ReadLimits },
    Reading { peer: PeerId, scratch: RegionId },
}

/// What comes of it, and why: `None` while it goes on.
pub(crate) type End = Option<(Found, String)>;

/// The driver's part. It ends within the limits of a connection and of a read, since the transport does.
#[derive(Debug)]
pub(crate) struct SelfCheck {
    transport: Arc<dyn Transport>,
    /// The worker's own regions, and how long they are.
    regions: Vec<(RegionId, u64)>,
    state: State,
}

impl SelfCheck {
    pub(crate) fn new(transport: Arc<dyn Transport>, regions: Vec<(RegionId, u64)>) -> Self {
        Self { transport, regions, state: State::Idle }
    }

    /// Begins. While one is under way another changes nothing.
    pub(crate) fn begin(&mut self, limits: &WorkerLimits) -> End {
        if !matches!(self.state, State::Idle) {
            return None;
        }
        match self.transport.connect(&self.transport.address(), limits.connect) {
            Ok(peer) => {
                let limits = ReadLimits { total: limits.read, stall: limits.stall };
                self.state = State::Connecting { peer, limits };
                None
            }
            // What a transport refuses it refuses for a reason of its own: it is closed, or has no room.
            Err(error) => Some((Found::Unknown, error.to_string())),
        }
    }

    /// Takes an event that is about this check. `Err` gives back one that is not.
    pub(crate) fn event(&mut self, event: Event) -> Result<End, Event> {
        match (&self.state, &event) {
            (State::Connecting { peer, limits }, Event::Connected { peer: connected })
                if peer == connected =>
            {
                let (peer, limits) = (*peer, *limits);
                Ok(self.read(peer, limits).err().and_then(|why| self.end(Some(peer), Found::Unknown, why)))
            }
            (State::Reading { peer, .. }, Event::ReadCompleted { op: OP, outcome }) => {
                let (found, why) = match &outcome.result {
                    Ok(()) => (Found::Readable, String::new()),
                    Err(error @ (ReadError::Closed | ReadError::Cancelled)) => {
                        (Found::Unknown, error.to_string())
                    }
                    Err(error) => (Found::Unreadable, error.to_string()),
                };
                Ok(self.end(Some(*peer), found, why))
            }
            (
                State::Connecting { peer, .. } | State::Reading { peer, .. },
                Event::PeerLost { peer: lost, reason },
            ) if peer == lost => {
                let closed = matches!(reason, LossReason::Closed | LossReason::Disconnected);
                let found = if closed { Found::Unknown } else { Found::Unreadable };
                Ok(self.end(None, found, reason.to_string()))
            }
            _ => Err(event),
        }
    }

    fn read(&mut self, peer: PeerId, limits: ReadLimits) -> Result<(), String> {
        let refused = |error: &dyn std::fmt::Display| error.to_string();
        let lens = self.regions.iter().map(|(_, len)| (*len).min(BYTES));
        let memory = Memory::allocate(lens.sum::<u64>() as usize).map_err(|e| refused(&e))?;
        let scratch = self.transport.register(memory).map_err(|e| refused(&e))?;
        self.state = State::Reading { peer, scratch };
        let mut parts = Vec::with_capacity(self.regions.len());
        let mut local_offset = 0;
        for (region, len) in &self.regions {
            let key = self.transport.key(*region).map_err(|e| refused(&e))?;
            let range = ReadRange { remote_offset: 0, local_offset, len: (*len).min(BYTES) };
            local_offset += range.len;
            parts.push(ReadPart { key, region: scratch, ranges: vec![range] });
        }
        self.transport.read(ReadRequest { op: OP, peer, parts, limits }).map_err(|e| refused(&e))
    }

    fn end(&mut self, peer: Option<PeerId>, found: Found, why: String) -> End {
        if let State::Reading { scratch, .. } = std::mem::replace(&mut self.state, State::Idle)
            && let Err(error) = self.transport.deregister(scratch)
        {
            tracing::debug!(%error, "the memory of a self check stays registered");
        }
        if let Some(Err(error)) = peer.map(|peer| self.transport.disconnect(peer)) {
            tracing::debug!(%error, "the connection of a self check was gone already");
        }
        Some((found, why))
    }
}
