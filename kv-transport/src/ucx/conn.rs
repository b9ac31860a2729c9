//! What the thread knows of a connection, of an endpoint under it, and of a read.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::{Endpoint, Life};
use super::fabric::Mapped;
use super::frame::{Frame, Window};
use super::plan::{Cursor, Plan};
use super::shared::after;
use super::worker::{EpId, Rkey};
use crate::contract::{OpId, PeerId};
use crate::error::{LossReason, ReadError};

/// Where a connection stands.
#[derive(Debug)]
pub(super) enum Phase {
    /// Hello was sent.
    Connecting { deadline: Instant, again: Again },
    /// Both sides know each other.
    Open,
    /// It is over, and its loss is told when nothing read from it is still on its way: by itself until `by`, then
    /// by force.
    Leaving { reason: LossReason, by: Instant },
}

/// How to try once more, and how often that may be.
#[derive(Debug)]
pub(super) struct Again {
    pub(super) endpoint: Endpoint,
    pub(super) tries: u32,
}

/// Endpoints that a connection is tried with, if one after the other fails.
const CONNECT_TRIES: u32 = 4;

impl Again {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, tries: CONNECT_TRIES }
    }
}

/// Regions that a peer is reading from: number, nonce and the memory, which they keep.
pub(super) type Pins = Vec<(u64, u64, Arc<Mapped>)>;

/// A peer.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) ep: EpId,
    pub(super) life: Life,
    /// By what the peer names this connection to us, and what we name it by to the peer.
    pub(super) own_token: u64,
    pub(super) peer_token: u64,
    pub(super) phase: Phase,
    /// What the peer takes, and how much of it is used up.
    pub(super) window: Window,
    pub(super) used: Window,
    /// What the peer has sent us and nobody has taken yet.
    pub(super) untaken: Window,
    pub(super) queue: VecDeque<Vec<u8>>,
    /// Frames that overtook the Welcome.
    pub(super) early: Vec<Frame>,
    pub(super) early_bytes: u64,
    pub(super) heard: Instant,
    pub(super) last_get: Instant,
    pub(super) pinged: bool,
    /// Reads that have not asked for all their bytes. They take turns, so that a small one passes a large one.
    pub(super) ring: VecDeque<u64>,
    /// Reads that wait until others have ended.
    pub(super) waiting: VecDeque<u64>,
    pub(super) opened: usize,
    pub(super) gets: usize,
    pub(super) get_bytes: u64,
    /// UCX would emulate gets here, so the owner is asked to send instead.
    pub(super) by_message: bool,
    /// What it was asked for and has not sent.
    pub(super) fetches: usize,
    pub(super) fetch_bytes: u64,
    pub(super) pins: HashMap<u64, Pins>,
}

impl Conn {
    pub(super) fn new(ep: EpId, life: Life, own_token: u64, phase: Phase, now: Instant) -> Self {
        let none = Window { messages: 0, bytes: 0 };
        Self {
            ep,
            life,
            own_token,
            peer_token: 0,
            phase,
            window: none,
            used: none,
            untaken: none,
            queue: VecDeque::new(),
            early: vec![],
            early_bytes: 0,
            heard: now,
            last_get: now,
            pinged: false,
            ring: VecDeque::new(),
            waiting: VecDeque::new(),
            opened: 0,
            gets: 0,
            get_bytes: 0,
            by_message: false,
            fetches: 0,
            fetch_bytes: 0,
            pins: HashMap::new(),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    /// Whether the peer takes one more message of so many bytes.
    pub(super) fn may_send(&self, bytes: u64) -> bool {
        self.used.messages < self.window.messages
            && (self.used.messages == 0 || self.used.bytes + bytes <= self.window.bytes)
    }

    /// Whether the peer has been silent for too long. Bytes that it serves count for it, but not for ever: memory
    /// that is shared can be read long after its owner has gone.
    pub(super) fn is_silent(&self, now: Instant, limit: Duration) -> bool {
        let since = |then: Instant| now.saturating_duration_since(then);
        since(self.heard) > limit && (since(self.last_get) > limit || since(self.heard) > limit * 4)
    }
}

/// Where an endpoint stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkPhase {
    Open,
    /// Nobody needs it any more; last words are on their way, for which it is kept until then.
    Draining {
        by: Instant,
    },
    /// Made in search of another. A hello may still come by it until then.
    Spare {
        by: Instant,
    },
    /// It is being closed by force, which must have ended its reads until then.
    Closing {
        by: Instant,
    },
}

/// An endpoint of UCX. Usually one connection uses it; two that connect to each other at once share it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) phase: LinkPhase,
    pub(super) peers: Vec<PeerId>,
    pub(super) gets: usize,
    pub(super) sends: usize,
    /// UCX says that it is closed. It may still owe the last word about gets: it was seen to forget them.
    pub(super) closed: bool,
    /// What the other side may still be served from until this is closed.
    pub(super) pins: Vec<Pins>,
}

impl Link {
    pub(super) fn new(peer: Option<PeerId>) -> Self {
        let peers = peer.into_iter().collect();
        Self { phase: LinkPhase::Open, peers, gets: 0, sends: 0, closed: false, pins: vec![] }
    }
}

/// Where a read stands.
#[derive(Debug)]
pub(super) enum Stage {
    /// Too many others are under way with this peer.
    Waiting,
    /// The owner was asked whether it has the regions.
    Opening,
    /// Bytes are asked for.
    Reading,
    /// All bytes are there; the owner was asked whether it still has the regions.
    Confirming,
    /// It failed, and what was asked for has not ended yet. After `by` it is ended by force.
    Ending { error: ReadError, by: Instant },
}

/// A read.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) id: OpId,
    pub(super) peer: PeerId,
    pub(super) plan: Plan,
    pub(super) cursor: Cursor,
    pub(super) rkeys: Vec<Rc<Rkey>>,
    /// Gets that UCX has not ended: they may still write.
    pub(super) outstanding: usize,
    /// Fetches that have not been answered in full. What comes for them is written by nobody but us.
    pub(super) fetches: usize,
    pub(super) stage: Stage,
    pub(super) deadline: Instant,
    pub(super) stall: Duration,
    pub(super) last_byte: Instant,
}

impl Op {
    /// When something has to be done about it at the latest.
    pub(super) fn alarm(&self) -> Instant {
        match self.stage {
            Stage::Ending { by, .. } => by,
            _ => self.deadline.min(after(self.last_byte, self.stall)),
        }
    }
}

/// What an owner was asked to send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fetch {
    pub(super) serial: u64,
    pub(super) peer: PeerId,
    pub(super) len: u64,
    /// Bytes that have not come yet.
    pub(super) left: u64,
}

/// What was posted, until UCX says that it has ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum Post {
    Get { serial: u64, peer: PeerId, ep: EpId, bytes: u64 },
    Send { ep: EpId, message: Option<(PeerId, usize)> },
    Close { ep: EpId },
}
