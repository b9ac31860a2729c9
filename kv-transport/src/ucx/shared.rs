//! What callers and the thread share: who is registered, connected and in flight, and the events.
//!
//! Everything a call may be refused for is decided here, under one lock held for moments, so that an `Err` has
//! changed nothing (rule T-1). Commands are queued under the same lock, so the thread sees them in the order in
//! which they were accepted.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use tokio::sync::Notify;

use super::NAME;
use super::address::{Endpoint, Key, Life};
use super::config::UcxConfig;
use super::fabric::{Fabric, Mapped};
use super::frame::{REGIONS_MAX, Window};
use super::plan::Plan;
use crate::contract::{
    Event, MESSAGE_MAX_BYTES, OpId, PeerId, RangeSet, ReadLimits, ReadOutcome, ReadPart, ReadRequest,
    RegionId, RegionKey,
};
use crate::error::{LossReason, ReadError, TransportError};
use crate::memory::Memory;

/// A read that was accepted.
#[derive(Debug)]
pub(super) struct AcceptedRead {
    pub(super) op: OpId,
    pub(super) serial: u64,
    pub(super) peer: PeerId,
    pub(super) plan: Plan,
    pub(super) submitted: Instant,
    pub(super) limits: ReadLimits,
}

/// What callers ask of the thread.
#[derive(Debug)]
pub(super) enum Command {
    Connect {
        peer: PeerId,
        endpoint: Endpoint,
        deadline: Instant,
    },
    Disconnect {
        peer: PeerId,
    },
    Read(AcceptedRead),
    Cancel {
        serial: u64,
    },
    Send {
        peer: PeerId,
        bytes: Vec<u8>,
    },
    /// Messages of this peer were taken, so it may send as many again.
    Taken {
        peer: PeerId,
        taken: Window,
    },
    Shutdown,
}

#[derive(Debug)]
struct Region {
    mapped: Arc<Mapped>,
    nonce: u64,
    reads: usize,
}

#[derive(Debug)]
struct Peer {
    /// `disconnect` was called: nothing more is accepted.
    leaving: bool,
    outgoing: usize,
    outgoing_bytes: usize,
    /// Taken by the application and not yet told to the peer.
    taken: Window,
    lanes: Vec<String>,
}

#[derive(Debug)]
struct Flight {
    peer: PeerId,
    serial: u64,
    regions: Vec<RegionId>,
    ranges: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    Closing,
    Finished,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    regions: HashMap<RegionId, Region>,
    peers: HashMap<PeerId, Peer>,
    flights: HashMap<OpId, Flight>,
    events: VecDeque<Event>,
    commands: Vec<Command>,
    /// Peers whose loss has not been taken yet.
    slots: usize,
    numbers: u64,
}

impl State {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn open(&self) -> Result<(), TransportError> {
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Closing | Phase::Finished => Err(TransportError::Closed { transport: NAME }),
        }
    }

    fn peer(&mut self, peer: PeerId) -> Result<&mut Peer, TransportError> {
        self.peers.get_mut(&peer).filter(|entry| !entry.leaving).ok_or(TransportError::UnknownPeer { peer })
    }

    fn check(&mut self, op: OpId, peer: PeerId) -> Result<(), TransportError> {
        self.open()?;
        if self.flights.contains_key(&op) {
            return Err(TransportError::DuplicateOp { op });
        }
        self.peer(peer).map(|_| ())
    }

    fn complete(&mut self, op: OpId, serial: u64, result: Result<(), ReadError>) {
        if self.flights.get(&op).is_none_or(|flight| flight.serial != serial) {
            return;
        }
        let Some(flight) = self.flights.remove(&op) else { return };
        for region in flight.regions {
            if let Some(region) = self.regions.get_mut(&region) {
                region.reads -= 1;
            }
        }
        // Without the owner's word at the end nothing is known to be right, so nothing has arrived.
        let arrived = match result {
            Ok(()) => RangeSet::all(flight.ranges),
            Err(_) => RangeSet::none(flight.ranges),
        };
        self.events.push_back(Event::ReadCompleted { op, outcome: ReadOutcome { result, arrived } });
    }

    fn lose(&mut self, peer: PeerId, reason: LossReason) {
        let Some(entry) = self.peers.remove(&peer) else { return };
        let reason = match self.phase {
            _ if entry.leaving => LossReason::Disconnected,
            Phase::Open => reason,
            Phase::Closing | Phase::Finished => LossReason::Closed,
        };
        let error = match reason {
            LossReason::Closed => ReadError::Closed,
            ref reason => ReadError::PeerLost(reason.clone()),
        };
        let of_peer = |flight: &&Flight| flight.peer == peer;
        let mut ended: Vec<_> = self
            .flights
            .iter()
            .filter(|(_, flight)| of_peer(flight))
            .map(|(op, flight)| (flight.serial, *op))
            .collect();
        ended.sort_unstable();
        for (serial, op) in ended {
            self.complete(op, serial, Err(error.clone()));
        }
        self.events.push_back(Event::PeerLost { peer, reason });
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: UcxConfig,
    pub(super) life: Life,
    fabric: Arc<Fabric>,
    wake: OwnedFd,
    state: Mutex<State>,
    news: Notify,
    finished: Condvar,
}

impl Shared {
    pub(super) fn new(config: UcxConfig, life: Life, fabric: Arc<Fabric>, wake: OwnedFd) -> Self {
        let state = State {
            phase: Phase::Open,
            regions: HashMap::new(),
            peers: HashMap::new(),
            flights: HashMap::new(),
            events: VecDeque::new(),
            commands: vec![],
            slots: 0,
            numbers: 0,
        };
        let (news, finished) = (Notify::new(), Condvar::new());
        Self { config, life, fabric, wake, state: Mutex::new(state), news, finished }
    }

    /// No code that holds the lock leaves the state half changed, so a poisoned lock is no reason to stop.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn command(&self, state: &mut State, command: Command) {
        let sleeps = state.commands.is_empty();
        state.commands.push(command);
        if sleeps {
            // It can only fail when the counter is full, and then the thread is awake.
            rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
        }
    }

    // Called by anybody.

    pub(super) fn register(&self, memory: Memory, nonce: u64) -> Result<RegionId, TransportError> {
        self.lock().open()?;
        // Pinning much memory takes long, and is done without the lock.
        let mapped = Arc::new(self.fabric.map(memory)?);
        let mut state = self.lock();
        state.open()?;
        let region = RegionId(state.number());
        state.regions.insert(region, Region { mapped, nonce, reads: 0 });
        Ok(region)
    }

    pub(super) fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        let state = self.lock();
        state.open()?;
        let entry = state.regions.get(&region).ok_or(TransportError::UnknownRegion { region })?;
        let memory = &entry.mapped.memory;
        let key = Key {
            life: self.life,
            region: region.0,
            nonce: entry.nonce,
            base: memory.place().address,
            len: memory.len() as u64,
            rkey: entry.mapped.rkey.clone(),
        };
        key.encode()
    }

    pub(super) fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        let mut state = self.lock();
        state.open()?;
        let removed = match state.regions.get(&region) {
            None => return Err(TransportError::UnknownRegion { region }),
            Some(entry) if entry.reads > 0 => {
                return Err(TransportError::RegionInUse { region, reads: entry.reads });
            }
            Some(_) => state.regions.remove(&region),
        };
        drop(state);
        // Unmapped here, unless a peer still reads: then when it has ended.
        drop(removed);
        Ok(())
    }

    pub(super) fn connect(&self, endpoint: Endpoint, limit: Duration) -> Result<PeerId, TransportError> {
        let mut state = self.lock();
        state.open()?;
        let peer = self.add_peer(&mut state)?;
        let deadline = after(Instant::now(), limit);
        self.command(&mut state, Command::Connect { peer, endpoint, deadline });
        Ok(peer)
    }

    fn add_peer(&self, state: &mut State) -> Result<PeerId, TransportError> {
        if state.slots >= self.config.peers_max {
            return Err(TransportError::TooManyPeers { limit: self.config.peers_max });
        }
        let peer = PeerId(state.number());
        state.slots += 1;
        let taken = Window { messages: 0, bytes: 0 };
        state
            .peers
            .insert(peer, Peer { leaving: false, outgoing: 0, outgoing_bytes: 0, taken, lanes: vec![] });
        Ok(peer)
    }

    pub(super) fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        let mut state = self.lock();
        state.open()?;
        state.peer(peer)?.leaving = true;
        self.command(&mut state, Command::Disconnect { peer });
        Ok(())
    }

    pub(super) fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        let submitted = Instant::now();
        let ReadRequest { op, peer, parts, limits } = request;
        let mut regions: Vec<_> = parts.iter().map(|part| part.region).collect();
        let locals = self.check_read(op, peer, limits, &parts)?;
        // Sorting a hundred thousand ranges takes milliseconds: that is done without the lock.
        let plan = Plan::new(op, parts, locals)?;
        if plan.remote_regions().len() > REGIONS_MAX {
            let what = "a read from more than 65536 regions";
            return Err(TransportError::Unsupported { transport: NAME, what });
        }
        regions.sort_unstable();
        regions.dedup();

        let mut state = self.lock();
        state.check(op, peer)?;
        if let Some(region) = regions.iter().find(|region| !state.regions.contains_key(region)) {
            return Err(TransportError::UnknownRegion { region: *region });
        }
        let serial = state.number();
        for region in &regions {
            if let Some(region) = state.regions.get_mut(region) {
                region.reads += 1;
            }
        }
        state.flights.insert(op, Flight { peer, serial, regions, ranges: plan.range_count() });
        self.command(&mut state, Command::Read(AcceptedRead { op, serial, peer, plan, submitted, limits }));
        Ok(())
    }

    fn check_read(
        &self,
        op: OpId,
        peer: PeerId,
        limits: ReadLimits,
        parts: &[ReadPart],
    ) -> Result<Vec<Arc<Mapped>>, TransportError> {
        let mut state = self.lock();
        state.check(op, peer)?;
        if limits.total.is_zero() {
            return Err(TransportError::ZeroLimit { op, limit: "total" });
        }
        if limits.stall.is_zero() {
            return Err(TransportError::ZeroLimit { op, limit: "stall" });
        }
        parts
            .iter()
            .map(|part| {
                let region = part.region;
                let entry = state.regions.get(&region).ok_or(TransportError::UnknownRegion { region })?;
                Ok(Arc::clone(&entry.mapped))
            })
            .collect()
    }

    pub(super) fn cancel(&self, op: OpId) {
        let mut state = self.lock();
        if let Some(serial) = state.flights.get(&op).map(|flight| flight.serial) {
            self.command(&mut state, Command::Cancel { serial });
        }
    }

    pub(super) fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        let mut state = self.lock();
        state.open()?;
        let UcxConfig { message_queue_max, message_queue_bytes, .. } = self.config;
        let (entry, bytes) = (state.peer(peer)?, message.len());
        let full = entry.outgoing >= message_queue_max
            || (entry.outgoing > 0 && entry.outgoing_bytes + bytes > message_queue_bytes);
        if full {
            return Err(TransportError::SendQueueFull { peer, queued: entry.outgoing });
        }
        entry.outgoing += 1;
        entry.outgoing_bytes += bytes;
        self.command(&mut state, Command::Send { peer, bytes: message });
        Ok(())
    }

    pub(super) fn lanes(&self, peer: PeerId) -> Result<Vec<String>, TransportError> {
        self.lock().peer(peer).map(|entry| entry.lanes.clone())
    }

    pub(super) async fn next_event(&self) -> Option<Event> {
        loop {
            {
                let mut state = self.lock();
                if let Some(event) = state.events.pop_front() {
                    self.taken(&mut state, &event);
                    return Some(event);
                }
                if state.phase == Phase::Finished {
                    // Whoever else waits must see it too.
                    self.news.notify_one();
                    return None;
                }
            }
            self.news.notified().await;
        }
    }

    fn taken(&self, state: &mut State, event: &Event) {
        match event {
            Event::Message { peer, bytes } => {
                let Some(entry) = state.peers.get_mut(peer) else { return };
                entry.taken.messages += 1;
                entry.taken.bytes += bytes.len() as u64;
                // Told in good time, and not for every message.
                let due = entry.taken.messages >= self.config.incoming_max.div_ceil(4)
                    || entry.taken.bytes >= self.config.incoming_bytes.div_ceil(4)
                    // Or else the longest message might not fit, with nothing left to be taken.
                    || entry.taken.bytes + MESSAGE_MAX_BYTES as u64 > self.config.incoming_bytes;
                if due {
                    let taken = std::mem::replace(&mut entry.taken, Window { messages: 0, bytes: 0 });
                    let peer = *peer;
                    self.command(state, Command::Taken { peer, taken });
                }
            }
            Event::PeerLost { .. } => state.slots -= 1,
            _ => {}
        }
    }

    /// Starts to close.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Open {
            state.phase = Phase::Closing;
            self.command(&mut state, Command::Shutdown);
        }
    }

    /// Blocks until the thread has ended its work, or the limit is over. Says which.
    pub(super) fn wait_finished(&self, limit: Duration) -> bool {
        let state = self.lock();
        let waiting = |state: &mut State| state.phase != Phase::Finished;
        let (state, _) =
            self.finished.wait_timeout_while(state, limit, waiting).unwrap_or_else(PoisonError::into_inner);
        state.phase == Phase::Finished
    }

    // Called by the thread.

    /// What to sleep on.
    pub(super) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// Takes the commands.
    pub(super) fn commands(&self) -> Vec<Command> {
        let mut state = self.lock();
        if state.commands.is_empty() {
            return vec![];
        }
        let mut counter = [0; 8];
        // It can only fail when nobody wrote.
        rustix::io::read(&self.wake, &mut counter).ok();
        std::mem::take(&mut state.commands)
    }

    /// One who knows our address became a peer.
    pub(super) fn accepted(&self) -> Result<PeerId, TransportError> {
        let mut state = self.lock();
        state.open()?;
        let peer = self.add_peer(&mut state)?;
        state.events.push_back(Event::Accepted { peer });
        drop(state);
        self.news.notify_one();
        Ok(peer)
    }

    pub(super) fn connected(&self, peer: PeerId) {
        self.lock().events.push_back(Event::Connected { peer });
        self.news.notify_one();
    }

    pub(super) fn set_lanes(&self, peer: PeerId, lanes: Vec<String>) {
        if let Some(entry) = self.lock().peers.get_mut(&peer) {
            entry.lanes = lanes;
        }
    }

    pub(super) fn deliver(&self, peer: PeerId, bytes: Vec<u8>) {
        let mut state = self.lock();
        if state.peers.contains_key(&peer) {
            state.events.push_back(Event::Message { peer, bytes });
        }
        drop(state);
        self.news.notify_one();
    }

    /// A message has left.
    pub(super) fn sent(&self, peer: PeerId, bytes: usize) {
        if let Some(entry) = self.lock().peers.get_mut(&peer) {
            entry.outgoing -= 1;
            entry.outgoing_bytes -= bytes;
        }
    }

    /// A read is over, and nothing writes to its destination any more.
    pub(super) fn complete(&self, op: OpId, serial: u64, result: Result<(), ReadError>) {
        self.lock().complete(op, serial, result);
        self.news.notify_one();
    }

    /// A peer is gone, and nothing that was read from it is still on its way. Only the first call for it counts.
    pub(super) fn lose(&self, peer: PeerId, reason: LossReason) {
        self.lock().lose(peer, reason);
        self.news.notify_one();
    }

    /// The memory of a region, if that registration still stands.
    pub(super) fn source(&self, region: u64, nonce: u64) -> Option<Arc<Mapped>> {
        let state = self.lock();
        let entry = state.regions.get(&RegionId(region))?;
        (entry.nonce == nonce).then(|| Arc::clone(&entry.mapped))
    }

    /// The thread is at its end, and UCX with it: whatever is left ends too.
    pub(super) fn finish(&self) {
        let mut state = self.lock();
        state.phase = Phase::Closing;
        let mut left: Vec<_> = state.peers.keys().copied().collect();
        left.sort_unstable();
        for peer in left {
            state.lose(peer, LossReason::Closed);
        }
        let (regions, commands) = (std::mem::take(&mut state.regions), std::mem::take(&mut state.commands));
        drop(state);
        // Unmapping takes time, and must be over when whoever waits for the end goes on.
        drop((regions, commands));
        self.lock().phase = Phase::Finished;
        self.finished.notify_all();
        self.news.notify_one();
    }
}

/// A time so long after another, or one that never comes.
pub(super) fn after(from: Instant, duration: Duration) -> Instant {
    const AGES: Duration = Duration::from_secs(60 * 60 * 24 * 365 * 30);
    from.checked_add(duration.min(AGES)).unwrap_or(from)
}
