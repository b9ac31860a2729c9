//! What callers and the IO thread share: who is registered, connected and in flight, and the events.
//!
//! Everything a call may be refused for is decided here, under one lock held for moments, so that an `Err` has
//! changed nothing (rule T-1). The lock also makes the end of a peer one step: its operations complete, its loss is
//! announced and its id is void, with nothing in between (rule T-6).

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use super::commands::{AcceptedRead, Command, Control, after};
use super::core::system;
use super::key::Key;
use super::limits::Limits;
use super::local::{LocalPath, Taken};
use super::plan::Plan;
use super::shortcut::Shortcut;
use super::staging::Staging;
use super::target::Target;
use crate::contract::{
    Event, MESSAGE_MAX_BYTES, OpId, PeerId, RangeSet, ReadLimits, ReadOutcome, ReadPart, ReadRequest,
    RegionId, RegionKey,
};
use crate::error::{LossReason, ReadError, TransportError};
use crate::memory::Memory;

/// Whether a message was taken over.
#[derive(Debug)]
pub(crate) enum Inbox {
    Open,
    /// Too many wait; [`Command::Resume`] follows when some were taken.
    Full,
}

#[derive(Debug)]
struct Region {
    memory: Memory,
    nonce: u64,
    reads: usize,
}

#[derive(Debug)]
struct Peer {
    id: PeerId,
    commands: UnboundedSender<Command>,
    /// `disconnect` was called: nothing more is accepted.
    leaving: bool,
    /// Its connection has ended, and copies for its reads have not: nothing more is accepted.
    ending: bool,
    outgoing: usize,
    outgoing_bytes: usize,
    incoming: usize,
    incoming_bytes: usize,
    paused: bool,
    shortcut: Arc<Shortcut>,
}

#[derive(Debug)]
struct Flight {
    peer: PeerId,
    serial: u64,
    regions: Vec<RegionId>,
    ranges: usize,
    /// A cancel came. It may have been faster than the read itself.
    cancelled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    Closing,
    Finished,
}

#[derive(Debug)]
struct State {
    name: &'static str,
    phase: Phase,
    regions: HashMap<RegionId, Region>,
    peers: HashMap<PeerId, Peer>,
    flights: HashMap<OpId, Flight>,
    events: VecDeque<Event>,
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
            Phase::Closing | Phase::Finished => Err(TransportError::Closed { transport: self.name }),
        }
    }

    fn peer(&mut self, peer: PeerId) -> Result<&mut Peer, TransportError> {
        let entry = self.peers.get_mut(&peer).filter(|entry| !entry.leaving && !entry.ending);
        entry.ok_or(TransportError::UnknownPeer { peer })
    }

    fn complete(&mut self, op: OpId, serial: u64, outcome: ReadOutcome) {
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

    /// What is told of a loss.
    fn reason(&self, entry: &Peer, reason: LossReason) -> LossReason {
        match self.phase {
            _ if entry.leaving => LossReason::Disconnected,
            Phase::Open => reason,
            Phase::Closing | Phase::Finished => LossReason::Closed,
        }
    }

    fn lose(&mut self, peer: PeerId, reason: LossReason, arrived: HashMap<OpId, RangeSet>) {
        let Some(entry) = self.peers.remove(&peer) else { return };
        let reason = self.reason(&entry, reason);
        self.end_reads(peer, &lost(&reason), arrived, &HashSet::new());
        self.events.push_back(Event::PeerLost { peer, reason });
    }

    /// Ends the reads from a peer, but for some.
    fn end_reads(
        &mut self,
        peer: PeerId,
        error: &ReadError,
        mut arrived: HashMap<OpId, RangeSet>,
        but: &HashSet<OpId>,
    ) {
        let mut ended: Vec<_> = self
            .flights
            .iter()
            .filter(|(op, flight)| flight.peer == peer && !but.contains(op))
            .map(|(op, flight)| (flight.serial, *op, flight.ranges))
            .collect();
        ended.sort_unstable();
        for (serial, op, ranges) in ended {
            let arrived = arrived.remove(&op).unwrap_or_else(|| RangeSet::none(ranges));
            self.complete(op, serial, ReadOutcome { result: Err(error.clone()), arrived });
        }
    }
}

/// How reads from a lost peer end.
fn lost(reason: &LossReason) -> ReadError {
    match reason {
        LossReason::Closed => ReadError::Closed,
        reason => ReadError::PeerLost(reason.clone()),
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Limits,
    /// How peers' memory is read without their help, if there is a way.
    pub(crate) local: Option<Arc<dyn LocalPath>>,
    /// Bytes asked for from all peers and not received. Only the IO thread counts here.
    pub(crate) in_flight: AtomicU64,
    /// How bytes of devices are had.
    pub(crate) staging: Staging,
    state: Mutex<State>,
    news: Notify,
    finished: Condvar,
}

impl Shared {
    pub(crate) fn new(config: Limits, local: Option<Arc<dyn LocalPath>>) -> Self {
        let state = State {
            name: config.name,
            phase: Phase::Open,
            regions: HashMap::new(),
            peers: HashMap::new(),
            flights: HashMap::new(),
            events: VecDeque::new(),
            slots: 0,
            numbers: 0,
        };
        let staging = Staging::new(config.name, config.chunk_max_bytes, config.staging_bytes);
        Self {
            config,
            local,
            in_flight: AtomicU64::new(0),
            staging,
            state: Mutex::new(state),
            news: Notify::new(),
            finished: Condvar::new(),
        }
    }

    /// No code that holds the lock leaves the state half changed, so a poisoned lock is no reason to stop.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Called by anybody.

    pub(crate) fn register(&self, memory: Memory, nonce: u64) -> Result<RegionId, TransportError> {
        if let Some(device) = memory.on_device() {
            self.staging.open(device).map_err(|error| system("start", "a thread that copies", &error))?;
        }
        let mut state = self.lock();
        state.open()?;
        let region = RegionId(state.number());
        state.regions.insert(region, Region { memory, nonce, reads: 0 });
        Ok(region)
    }

    pub(crate) fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        let state = self.lock();
        state.open()?;
        let entry = state.regions.get(&region).ok_or(TransportError::UnknownRegion { region })?;
        Key { region: region.0, nonce: entry.nonce }.encode()
    }

    pub(crate) fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        let mut state = self.lock();
        state.open()?;
        match state.regions.get(&region) {
            None => Err(TransportError::UnknownRegion { region }),
            Some(entry) if entry.reads > 0 => Err(TransportError::RegionInUse { region, reads: entry.reads }),
            Some(_) => {
                state.regions.remove(&region);
                Ok(())
            }
        }
    }

    pub(crate) fn connect(
        &self,
        target: Target,
        limit: Duration,
        control: &UnboundedSender<Control>,
    ) -> Result<PeerId, TransportError> {
        let mut state = self.lock();
        state.open()?;
        let (peer, commands) = self.add_peer(&mut state)?;
        let deadline = after(Instant::now(), limit);
        if control.send(Control::Connect { peer, target, deadline, commands }).is_err() {
            state.peers.remove(&peer);
            state.slots -= 1;
            return Err(TransportError::Closed { transport: self.config.name });
        }
        Ok(peer)
    }

    fn add_peer(&self, state: &mut State) -> Result<(PeerId, UnboundedReceiver<Command>), TransportError> {
        if state.slots >= self.config.peers_max {
            return Err(TransportError::TooManyPeers { limit: self.config.peers_max });
        }
        let peer = PeerId(state.number());
        let (commands, receiver) = unbounded_channel();
        state.slots += 1;
        state.peers.insert(
            peer,
            Peer {
                id: peer,
                commands,
                leaving: false,
                ending: false,
                outgoing: 0,
                outgoing_bytes: 0,
                incoming: 0,
                incoming_bytes: 0,
                paused: false,
                shortcut: Arc::default(),
            },
        );
        Ok((peer, receiver))
    }

    pub(crate) fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        let mut state = self.lock();
        state.open()?;
        let entry = state.peer(peer)?;
        entry.leaving = true;
        // If its task is gone, so is the peer in a moment, with the same end.
        entry.commands.send(Command::Close(LossReason::Disconnected)).ok();
        Ok(())
    }

    pub(crate) fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        let submitted = Instant::now();
        let ReadRequest { op, peer, parts, limits } = request;
        let mut regions: Vec<_> = parts.iter().map(|part| part.region).collect();
        let (memories, shortcut) = self.check_read(op, peer, limits, &parts)?;
        // Sorting a hundred thousand ranges takes milliseconds: that is done without the lock.
        let plan = Plan::new(self.config.name, op, parts, memories)?;
        regions.sort_unstable();
        regions.dedup();

        // A local path is shorter still.
        let prepared = if self.local.is_none() { shortcut.prepare(&plan) } else { None };

        let mut state = self.lock();
        state.check(op, peer)?;
        if let Some(region) = regions.iter().find(|region| !state.regions.contains_key(region)) {
            return Err(TransportError::UnknownRegion { region: *region });
        }
        let serial = state.number();
        let flight = Flight { peer, serial, regions, ranges: plan.range_count(), cancelled: false };
        let read = AcceptedRead { op, serial, plan, submitted, limits };
        let mut read = Some(read);
        if self.local.is_none() && prepared.is_none() {
            state.peer(peer)?.hand(&mut read, Command::Read)?;
        }
        for region in &flight.regions {
            if let Some(region) = state.regions.get_mut(region) {
                region.reads += 1;
            }
        }
        state.flights.insert(op, flight);
        drop(state);
        // From here on it is accepted, and completes even if its peer is lost in this moment.
        if let Some(prepared) = prepared {
            if read.is_some_and(|read| prepared.send(read)) {
                self.hand(peer, Command::Resume);
            }
        } else if let (Some(local), Some(read)) = (&self.local, read) {
            match local.take(peer, read) {
                Taken::Yes if self.is_cancelled(op, serial) => local.cancel(op, serial),
                Taken::Yes => {}
                Taken::Unresolved(read) => self.hand(peer, Command::Read(read)),
                Taken::No(read) => self.hand(peer, Command::Carry(read)),
            }
        }
        Ok(())
    }

    /// Whether a cancel came for a read that has not ended.
    pub(crate) fn is_cancelled(&self, op: OpId, serial: u64) -> bool {
        self.lock().flights.get(&op).is_some_and(|flight| flight.serial == serial && flight.cancelled)
    }

    /// Hands a command to a peer's task; one that is gone has ended everything.
    pub(crate) fn hand(&self, peer: PeerId, command: Command) {
        let mail = self.mail(peer);
        if let Some(mail) = mail {
            mail.send(command).ok();
        }
    }

    /// The way to a peer's task.
    fn mail(&self, peer: PeerId) -> Option<UnboundedSender<Command>> {
        self.lock().peers.get(&peer).map(|entry| entry.commands.clone())
    }

    /// All ways to a peer: to its task, and past it.
    pub(crate) fn ways(&self, peer: PeerId) -> Option<(UnboundedSender<Command>, Arc<Shortcut>)> {
        self.lock().peers.get(&peer).map(|entry| (entry.commands.clone(), Arc::clone(&entry.shortcut)))
    }

    fn check_read(
        &self,
        op: OpId,
        peer: PeerId,
        limits: ReadLimits,
        parts: &[ReadPart],
    ) -> Result<(Vec<Memory>, Arc<Shortcut>), TransportError> {
        let mut state = self.lock();
        state.check(op, peer)?;
        if limits.total.is_zero() {
            return Err(TransportError::ZeroLimit { op, limit: "total" });
        }
        if limits.stall.is_zero() {
            return Err(TransportError::ZeroLimit { op, limit: "stall" });
        }
        let memory = |part: &ReadPart| {
            let region = part.region;
            let entry = state.regions.get(&region).ok_or(TransportError::UnknownRegion { region })?;
            Ok(entry.memory.clone())
        };
        let memories = parts.iter().map(memory).collect::<Result<_, TransportError>>()?;
        Ok((memories, Arc::clone(&state.peer(peer)?.shortcut)))
    }

    pub(crate) fn cancel(&self, op: OpId) {
        let mut state = self.lock();
        let State { flights, peers, .. } = &mut *state;
        if let Some(flight) = flights.get_mut(&op)
            && let Some(peer) = peers.get(&flight.peer)
        {
            flight.cancelled = true;
            // Without its task the peer is about to be lost, and the read with it.
            peer.commands.send(Command::Cancel { op, serial: flight.serial }).ok();
        }
    }

    pub(crate) fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        if message.len() > MESSAGE_MAX_BYTES {
            return Err(TransportError::MessageTooLong { bytes: message.len(), limit: MESSAGE_MAX_BYTES });
        }
        let mut state = self.lock();
        state.open()?;
        let Limits { message_queue_max, message_queue_bytes, .. } = self.config;
        let (entry, bytes) = (state.peer(peer)?, message.len());
        let full = entry.outgoing >= message_queue_max
            || (entry.outgoing > 0 && entry.outgoing_bytes + bytes > message_queue_bytes);
        if full {
            return Err(TransportError::SendQueueFull { peer, queued: entry.outgoing });
        }
        if entry.commands.send(Command::Send(message)).is_err() {
            return Err(TransportError::UnknownPeer { peer });
        }
        entry.outgoing += 1;
        entry.outgoing_bytes += bytes;
        Ok(())
    }

    pub(crate) async fn next_event(&self) -> Option<Event> {
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
                if let Some(entry) = state.peers.get_mut(peer) {
                    entry.incoming -= 1;
                    entry.incoming_bytes -= bytes.len();
                    if entry.paused && self.has_room(entry) {
                        entry.paused = false;
                        // Without its task there is nothing to resume.
                        entry.commands.send(Command::Resume).ok();
                    }
                }
            }
            Event::PeerLost { .. } => state.slots -= 1,
            _ => {}
        }
    }

    fn has_room(&self, peer: &Peer) -> bool {
        peer.incoming < self.config.incoming_max && peer.incoming_bytes < self.config.incoming_bytes
    }

    /// Starts to close; `false` if that happened before.
    pub(crate) fn close(&self) -> bool {
        let mut state = self.lock();
        let first = state.phase == Phase::Open;
        if first {
            state.phase = Phase::Closing;
        }
        first
    }

    /// Blocks until the thread has ended its work, or the limit is over. Says which.
    pub(crate) fn wait_finished(&self, limit: Duration) -> bool {
        let state = self.lock();
        let waiting = |state: &mut State| state.phase != Phase::Finished;
        let (state, _) =
            self.finished.wait_timeout_while(state, limit, waiting).unwrap_or_else(PoisonError::into_inner);
        state.phase == Phase::Finished
    }

    // Called by the IO thread.

    /// A stranger became a peer.
    pub(crate) fn accepted(&self) -> Result<(PeerId, UnboundedReceiver<Command>), TransportError> {
        let mut state = self.lock();
        state.open()?;
        let (peer, commands) = self.add_peer(&mut state)?;
        state.events.push_back(Event::Accepted { peer });
        drop(state);
        self.news.notify_one();
        Ok((peer, commands))
    }

    pub(crate) fn connected(&self, peer: PeerId) {
        self.lock().events.push_back(Event::Connected { peer });
        self.news.notify_one();
    }

    /// Whether a message of this peer may be received; if not, [`Command::Resume`] follows.
    pub(crate) fn inbox(&self, peer: PeerId) -> Inbox {
        let mut state = self.lock();
        match state.peers.get_mut(&peer) {
            Some(entry) if !self.has_room(entry) => {
                entry.paused = true;
                Inbox::Full
            }
            _ => Inbox::Open,
        }
    }

    pub(crate) fn deliver(&self, peer: PeerId, bytes: Vec<u8>) {
        let mut state = self.lock();
        if let Some(entry) = state.peers.get_mut(&peer) {
            entry.incoming += 1;
            entry.incoming_bytes += bytes.len();
            state.events.push_back(Event::Message { peer, bytes });
        }
        drop(state);
        self.news.notify_one();
    }

    /// Messages were written to the socket.
    pub(crate) fn sent(&self, peer: PeerId, messages: usize, bytes: usize) {
        if let Some(entry) = self.lock().peers.get_mut(&peer) {
            entry.outgoing -= messages;
            entry.outgoing_bytes -= bytes;
        }
    }

    pub(crate) fn complete(&self, op: OpId, serial: u64, outcome: ReadOutcome) {
        self.lock().complete(op, serial, outcome);
        self.news.notify_one();
    }

    /// A peer's connection has ended, and its loss is not to be told yet: nothing more is accepted from now on. Says how its
    /// reads end.
    pub(crate) fn leave(&self, peer: PeerId, reason: LossReason) -> ReadError {
        let mut state = self.lock();
        let reason = state.peers.get(&peer).map_or(LossReason::Closed, |entry| state.reason(entry, reason));
        if let Some(entry) = state.peers.get_mut(&peer) {
            entry.ending = true;
        }
        lost(&reason)
    }

    /// Ends the reads from such a peer, but for some.
    pub(crate) fn end_reads(
        &self,
        peer: PeerId,
        error: &ReadError,
        arrived: HashMap<OpId, RangeSet>,
        but: &HashSet<OpId>,
    ) {
        self.lock().end_reads(peer, error, arrived, but);
        self.news.notify_one();
    }

    /// A peer is gone. Only the first call for it counts.
    pub(crate) fn lose(&self, peer: PeerId, reason: LossReason, arrived: HashMap<OpId, RangeSet>) {
        self.lock().lose(peer, reason, arrived);
        self.news.notify_one();
    }

    /// The memory of a region, if the key is good.
    pub(crate) fn source(&self, key: Key) -> Option<Memory> {
        let state = self.lock();
        let entry = state.regions.get(&RegionId(key.region))?;
        (entry.nonce == key.nonce).then(|| entry.memory.clone())
    }

    /// Asks every peer's task to end.
    pub(crate) fn close_peers(&self) {
        for peer in self.lock().peers.values() {
            // A task that is gone has ended.
            peer.commands.send(Command::Close(LossReason::Closed)).ok();
        }
    }

    /// The thread is at its end, one way or another: whatever is left ends too.
    pub(crate) fn finish(&self) {
        let mut left: Vec<_> = {
            let mut state = self.lock();
            state.phase = Phase::Closing;
            state.peers.keys().copied().collect()
        };
        left.sort_unstable();
        // Quiet first, then told.
        let mut arrived: Vec<_> = left
            .iter()
            .map(|peer| self.local.as_ref().map(|local| local.detach(*peer)).unwrap_or_default())
            .collect();
        let mut state = self.lock();
        for (peer, arrived) in left.into_iter().zip(arrived.drain(..)) {
            state.lose(peer, LossReason::Closed, arrived);
        }
        state.regions.clear();
        drop(state);
        // Whoever learns that it is over may count on it.
        self.staging.close();
        self.lock().phase = Phase::Finished;
        self.finished.notify_all();
        self.news.notify_one();
    }
}

impl Peer {
    /// Hands a read to the peer's task, or says that there is none.
    fn hand(
        &self,
        read: &mut Option<AcceptedRead>,
        command: impl FnOnce(AcceptedRead) -> Command,
    ) -> Result<(), TransportError> {
        let gone = read.take().is_none_or(|read| self.commands.send(command(read)).is_err());
        if gone { Err(TransportError::UnknownPeer { peer: self.id }) } else { Ok(()) }
    }
}

impl State {
    fn check(&mut self, op: OpId, peer: PeerId) -> Result<(), TransportError> {
        self.open()?;
        if self.flights.contains_key(&op) {
            return Err(TransportError::DuplicateOp { op });
        }
        self.peer(peer).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::TcpConfig;

    #[tokio::test]
    async fn t6_a_peer_let_go_of_is_disconnected_even_if_it_was_faster() {
        let shared = Shared::new(TcpConfig::default().limits(), None);
        let (peer, _commands) = shared.accepted().unwrap();
        shared.disconnect(peer).unwrap();
        assert_eq!(shared.send(peer, vec![]), Err(TransportError::UnknownPeer { peer }));
        for reason in [LossReason::ClosedByPeer, LossReason::Silent] {
            shared.lose(peer, reason, HashMap::new());
        }
        shared.finish();
        assert_eq!(shared.next_event().await, Some(Event::Accepted { peer }));
        let reason = LossReason::Disconnected;
        assert_eq!(shared.next_event().await, Some(Event::PeerLost { peer, reason }));
        assert_eq!(shared.next_event().await, None);
    }
}
