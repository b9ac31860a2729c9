//! Who is registered, connected and in flight, and what has to be told of it. [`Shared`](super::shared::Shared) keeps it
//! behind its lock.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::sync::mpsc::UnboundedSender;

use super::commands::Command;
use super::key::Nonce;
use super::plan::Intervals;
use super::shortcut::Shortcut;
use super::work::{Share, Work};
use crate::contract::{Event, OpId, PeerId, RangeSet, ReadOutcome, RegionId};
use crate::error::{LossReason, ReadError, TransportError};
use crate::memory::Memory;

#[derive(Debug)]
pub(super) struct Region {
    pub(super) memory: Memory,
    pub(super) nonce: u64,
    pub(super) reads: usize,
}

/// A peer and its connections, which stand and fall together.
#[derive(Debug)]
pub(super) struct Peer {
    id: PeerId,
    /// The ways to the tasks of its connections. The first carries messages.
    pub(super) links: Vec<UnboundedSender<Command>>,
    /// How many there are, for connections, which divide by it without the lock.
    pub(super) count: Arc<AtomicU64>,
    /// Connections that are on probation.
    pub(super) untied: usize,
    /// Tasks that have not ended, of those that are not on probation. The peer is lost when none is left.
    pub(super) tasks: usize,
    /// By which its further connections are known; only of those who connected to us.
    pub(super) ticket: Option<Nonce>,
    /// `disconnect` was called.
    pub(super) let_go: bool,
    /// Why the first of its connections ended.
    ended: Option<LossReason>,
    pub(super) outgoing: usize,
    pub(super) outgoing_bytes: usize,
    pub(super) incoming: usize,
    pub(super) incoming_bytes: usize,
    pub(super) paused: bool,
    pub(super) shortcut: Arc<Shortcut>,
}

impl Peer {
    pub(super) fn new(id: PeerId, link: UnboundedSender<Command>, ticket: Option<Nonce>) -> Self {
        Self {
            id,
            links: vec![link],
            count: Arc::new(AtomicU64::new(1)),
            untied: 0,
            tasks: 1,
            ticket,
            let_go: false,
            ended: None,
            outgoing: 0,
            outgoing_bytes: 0,
            incoming: 0,
            incoming_bytes: 0,
            paused: false,
            shortcut: Arc::default(),
        }
    }

    /// Not let go of, and none of its connections has ended; else nothing more is accepted.
    fn stays(&self) -> bool {
        !self.let_go && self.ended.is_none()
    }

    /// Why it is lost, as it is told.
    fn told(&self, phase: Phase) -> LossReason {
        match (&self.ended, phase) {
            // Whoever asked for the end is told so, whatever else came first.
            _ if self.let_go => LossReason::Disconnected,
            (Some(reason), Phase::Open) => reason.clone(),
            _ => LossReason::Closed,
        }
    }

    /// Hands a command to its first connection, or says that there is none.
    pub(super) fn hand(&self, command: Command) -> Result<(), TransportError> {
        let gone = || TransportError::UnknownPeer { peer: self.id };
        self.links.first().ok_or_else(gone)?.send(command).map_err(|_| gone())
    }

    /// Hands a command to each connection. How many took it: one that has ended takes nothing.
    pub(super) fn hand_all(&self, command: impl Fn() -> Command) -> usize {
        self.links.iter().filter(|link| link.send(command()).is_ok()).count()
    }
}

/// How reads from a lost peer end.
fn lost(reason: &LossReason) -> ReadError {
    match reason {
        LossReason::Closed => ReadError::Closed,
        reason => ReadError::PeerLost(reason.clone()),
    }
}

/// A read that was accepted.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) peer: PeerId,
    pub(super) serial: u64,
    pub(super) regions: Vec<RegionId>,
    pub(super) work: Arc<Work>,
    /// Connections that have not ended their share of it.
    pub(super) shares: usize,
    /// What arrived of shares that have ended.
    pub(super) arrived: Intervals,
    /// Why the first share failed.
    pub(super) failed: Option<ReadError>,
    /// A cancel came. It may have been faster than the read itself.
    pub(super) cancelled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Open,
    Closing,
    Finished,
}

#[derive(Debug)]
pub(super) struct State {
    name: &'static str,
    pub(super) phase: Phase,
    pub(super) regions: HashMap<RegionId, Region>,
    pub(super) peers: HashMap<PeerId, Peer>,
    pub(super) flights: HashMap<OpId, Flight>,
    pub(super) events: VecDeque<Event>,
    /// Peers whose loss has not been taken yet.
    pub(super) slots: usize,
    numbers: u64,
}

/// A read failed, and its last share has ended: what its outcome follows from.
pub(super) struct Failed {
    work: Arc<Work>,
    arrived: Intervals,
    error: ReadError,
}

impl Failed {
    /// Takes milliseconds for a read of very many ranges: not to be asked under the lock.
    pub(super) fn outcome(self) -> ReadOutcome {
        ReadOutcome { result: Err(self.error), arrived: self.work.plan.arrived(self.arrived) }
    }
}

impl State {
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            phase: Phase::Open,
            regions: HashMap::new(),
            peers: HashMap::new(),
            flights: HashMap::new(),
            events: VecDeque::new(),
            slots: 0,
            numbers: 0,
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn open(&self) -> Result<(), TransportError> {
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Closing | Phase::Finished => Err(TransportError::Closed { transport: self.name }),
        }
    }

    pub(super) fn peer(&mut self, peer: PeerId) -> Result<&mut Peer, TransportError> {
        self.peers.get_mut(&peer).filter(|entry| entry.stays()).ok_or(TransportError::UnknownPeer { peer })
    }

    /// Whether a read under this name may begin.
    pub(super) fn check(&mut self, op: OpId, peer: PeerId) -> Result<(), TransportError> {
        self.open()?;
        if self.flights.contains_key(&op) {
            return Err(TransportError::DuplicateOp { op });
        }
        self.peer(peer).map(|_| ())
    }

    /// A connection has ended its share of a read. With the last one the read completes if all went well; else it is for
    /// the caller to work out the outcome and to complete it. The others end theirs after the first failure.
    pub(super) fn end_share(
        &mut self,
        op: OpId,
        serial: u64,
        result: Result<(), ReadError>,
        arrived: Intervals,
    ) -> Option<Failed> {
        let flight = self.flights.get_mut(&op).filter(|flight| flight.serial == serial)?;
        flight.shares = flight.shares.saturating_sub(1);
        if flight.arrived.is_empty() {
            flight.arrived = arrived;
        } else {
            flight.arrived.extend(arrived);
        }
        let others = self.peers.get(&flight.peer).filter(|_| flight.shares > 0);
        match result {
            // Nothing is left to be asked for; who has nothing outstanding has done its share.
            Ok(()) => drop(others.map(|peer| peer.hand_all(|| Command::Resume))),
            Err(error) if flight.failed.is_none() => {
                flight.failed = Some(error);
                others.map(|peer| peer.hand_all(|| Command::Cancel { op, serial }));
            }
            Err(_) => {}
        }
        if flight.shares > 0 {
            return None;
        }
        let Some(error) = flight.failed.take() else {
            let arrived = RangeSet::all(flight.work.plan.range_count());
            self.complete(op, serial, ReadOutcome { result: Ok(()), arrived });
            return None;
        };
        let arrived = std::mem::take(&mut flight.arrived);
        Some(Failed { work: Arc::clone(&flight.work), arrived, error })
    }

    pub(super) fn complete(&mut self, op: OpId, serial: u64, outcome: ReadOutcome) {
        if self.flights.get(&op).is_none_or(|flight| flight.serial != serial) {
            return;
        }
        if let Some(flight) = self.flights.remove(&op) {
            for region in flight.regions {
                if let Some(region) = self.regions.get_mut(&region) {
                    region.reads -= 1;
                }
            }
            self.events.push_back(Event::ReadCompleted { op, outcome });
        }
    }

    /// A connection of a peer has ended, and the others shall: nothing more is accepted. Says how its reads end.
    pub(super) fn leaving(&mut self, peer: PeerId, reason: LossReason) -> ReadError {
        let phase = self.phase;
        let Some(entry) = self.peers.get_mut(&peer) else { return ReadError::Closed };
        if entry.ended.is_none() {
            entry.ended = Some(reason);
            entry.hand_all(|| Command::Close(LossReason::Closed));
        }
        lost(&entry.told(phase))
    }

    /// A connection of a peer is gone. `true` if it was the last; then it is noted what it had of the peer's reads.
    pub(super) fn left(&mut self, peer: PeerId, shares: &[Share]) -> bool {
        let Some(entry) = self.peers.get_mut(&peer) else { return false };
        entry.tasks = entry.tasks.saturating_sub(1);
        let last = entry.tasks == 0;
        for share in shares.iter().filter(|_| last) {
            if let Some(flight) =
                self.flights.get_mut(&share.op).filter(|flight| flight.serial == share.serial)
            {
                flight.arrived.extend_from_slice(&share.arrived);
            }
        }
        last
    }

    /// The reads of a peer that is about to be lost, in order, with what arrived of them.
    pub(super) fn remains(&mut self, peer: PeerId) -> Vec<(OpId, u64, Arc<Work>, Intervals)> {
        let mut left: Vec<_> = self
            .flights
            .iter_mut()
            .filter(|(_, flight)| flight.peer == peer)
            .map(|(op, flight)| {
                (*op, flight.serial, Arc::clone(&flight.work), std::mem::take(&mut flight.arrived))
            })
            .collect();
        left.sort_unstable_by_key(|(_, serial, ..)| *serial);
        left
    }

    /// The end of a peer in one step: its reads complete, its loss is announced and its id is void (rule T-6).
    pub(super) fn lose(&mut self, peer: PeerId, mut arrived: HashMap<OpId, RangeSet>) {
        let Some(entry) = self.peers.remove(&peer) else { return };
        let reason = entry.told(self.phase);
        let error = lost(&reason);
        // Usually the same as before; what was accepted since then has nothing.
        for (op, serial, work, _) in self.remains(peer) {
            let ranges = work.plan.range_count();
            let arrived = arrived.remove(&op).unwrap_or_else(|| RangeSet::none(ranges));
            self.complete(op, serial, ReadOutcome { result: Err(error.clone()), arrived });
        }
        self.events.push_back(Event::PeerLost { peer, reason });
    }
}
