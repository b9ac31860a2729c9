//! What callers and the IO thread share: who is registered, connected and in flight, and the events.
//!
//! Everything a call may be refused for is decided here, under one lock held for moments, so that an `Err` has
//! changed nothing (rule T-1). The lock also makes the end of a peer one step: its operations complete, its loss is
//! announced and its id is void, with nothing in between (rule T-6).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use super::commands::{AcceptedRead, Command, Control, after};
use super::core::system;
use super::key::{Key, Nonce};
use super::limits::{LINKS_LIMIT, Limits};
use super::local::{LocalPath, Taken};
use super::plan::{Cursor, Intervals, Plan};
use super::shortcut::{Prepared, Shortcut};
use super::staging::Staging;
use super::state::{Flight, Peer, Phase, Region, State};
use super::target::Target;
use super::work::{Share, Work};
use crate::contract::{
    Event, MESSAGE_MAX_BYTES, OpId, PeerId, ReadLimits, ReadPart, ReadRequest, RegionId, RegionKey,
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

/// Reads of at least so many bytes are spread over all connections of a peer. Below it there is little to gain, and the
/// first connection has the short way.
const SPREAD_BYTES: u64 = 1 << 20;

/// What a connection's task is given.
pub(crate) struct Link {
    pub(crate) peer: PeerId,
    /// It carries messages and small reads.
    pub(crate) first: bool,
    /// Leads to the task.
    pub(crate) mail: UnboundedSender<Command>,
    pub(crate) commands: UnboundedReceiver<Command>,
    pub(crate) shortcut: Arc<Shortcut>,
    /// How many connections the peer has.
    pub(crate) count: Arc<AtomicU64>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Limits,
    /// How peers' memory is read without their help, if there is a way.
    pub(crate) local: Option<Arc<dyn LocalPath>>,
    /// Bytes asked for from all peers and not received.
    pub(crate) in_flight: AtomicU64,
    /// How bytes of devices are had.
    pub(crate) staging: Staging,
    state: Mutex<State>,
    news: Notify,
    finished: Condvar,
}

impl Shared {
    pub(crate) fn new(config: Limits, local: Option<Arc<dyn LocalPath>>) -> Self {
        let state = State::new(config.name);
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
        let link = self.add_peer(&mut state, None)?;
        let peer = link.peer;
        let deadline = after(Instant::now(), limit);
        if control.send(Control::Connect { link, target, deadline }).is_err() {
            state.peers.remove(&peer);
            state.slots -= 1;
            return Err(TransportError::Closed { transport: self.config.name });
        }
        Ok(peer)
    }

    fn add_peer(&self, state: &mut State, ticket: Option<Nonce>) -> Result<Link, TransportError> {
        if state.slots >= self.config.peers_max {
            return Err(TransportError::TooManyPeers { limit: self.config.peers_max });
        }
        let peer = PeerId(state.number());
        let (mail, commands) = unbounded_channel();
        let entry = Peer::new(peer, mail.clone(), ticket);
        let (shortcut, count) = (Arc::clone(&entry.shortcut), Arc::clone(&entry.count));
        state.slots += 1;
        state.peers.insert(peer, entry);
        Ok(Link { peer, first: true, mail, commands, shortcut, count })
    }

    pub(crate) fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        let mut state = self.lock();
        state.open()?;
        let entry = state.peer(peer)?;
        entry.let_go = true;
        // If its task is gone, so is the peer in a moment, with the same end. The other connections follow the first, which has
        // messages to send.
        entry.hand(Command::Close(LossReason::Disconnected)).ok();
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
        let cursor = prepared.as_ref().map_or_else(Cursor::default, Prepared::cursor);
        let work = Arc::new(Work::new(plan, cursor, submitted));
        let entry = state.peer(peer)?;
        // Chunks for a device wait for slots, each in its order.
        let spread = self.local.is_none() && work.plan.total() >= SPREAD_BYTES && !work.plan.to_device();
        let mut shares = if spread { entry.links.len() } else { 1 };
        let read = AcceptedRead { op, serial, work: Arc::clone(&work), shares, limits };
        if spread {
            shares = entry.hand_all(|| Command::Read(read.clone()));
            if shares == 0 {
                return Err(TransportError::UnknownPeer { peer });
            }
        } else if self.local.is_none() && prepared.is_none() {
            entry.hand(Command::Read(read.clone()))?;
        }
        for region in &regions {
            if let Some(region) = state.regions.get_mut(region) {
                region.reads += 1;
            }
        }
        let (arrived, failed, cancelled) = (vec![], None, false);
        state.flights.insert(op, Flight { peer, serial, regions, work, shares, arrived, failed, cancelled });
        drop(state);
        // From here on it is accepted, and completes even if its peer is lost in this moment.
        if let Some(prepared) = prepared {
            if prepared.send(read) {
                self.hand(peer, Command::Resume);
            }
        } else if let Some(local) = &self.local {
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

    /// Hands a command to a peer's first connection; one that is gone has ended everything.
    pub(crate) fn hand(&self, peer: PeerId, command: Command) {
        if let Some(entry) = self.lock().peers.get(&peer) {
            entry.hand(command).ok();
        }
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
            // Without its tasks the peer is about to be lost, and the read with it.
            peer.hand_all(|| Command::Cancel { op, serial: flight.serial });
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
        entry.hand(Command::Send(message))?;
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
                        entry.hand(Command::Resume).ok();
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

    /// A stranger became a peer, whose further connections show this ticket.
    pub(crate) fn accepted(&self, ticket: Option<Nonce>) -> Result<Link, TransportError> {
        let mut state = self.lock();
        state.open()?;
        let link = self.add_peer(&mut state, ticket)?;
        state.events.push_back(Event::Accepted { peer: link.peer });
        drop(state);
        self.news.notify_one();
        Ok(link)
    }

    /// The peer that was given a ticket.
    pub(crate) fn holder(&self, ticket: Nonce) -> Option<PeerId> {
        let state = self.lock();
        state.peers.iter().find(|(_, entry)| entry.ticket == Some(ticket)).map(|(peer, _)| *peer)
    }

    /// A further connection of a peer stands, on probation, unless the peer is on its way out or has enough of them.
    /// [`Shared::tie`] or [`Shared::withdraw`] follows.
    pub(crate) fn join(&self, peer: PeerId) -> Option<Link> {
        let mut state = self.lock();
        let entry = state.peer(peer).ok()?;
        if entry.links.len() + entry.untied >= LINKS_LIMIT as usize {
            return None;
        }
        entry.untied += 1;
        let (mail, commands) = unbounded_channel();
        let count = Arc::clone(&entry.count);
        // The short way leads over the first connection only.
        Some(Link { peer, first: false, mail, commands, shortcut: Arc::default(), count })
    }

    /// A further connection has proved itself: from now on it does its share of the reads, and its end is the peer's.
    /// `false` if the peer is on its way out.
    pub(crate) fn tie(&self, peer: PeerId, mail: UnboundedSender<Command>) -> bool {
        let mut state = self.lock();
        let Ok(entry) = state.peer(peer) else { return false };
        entry.untied = entry.untied.saturating_sub(1);
        entry.links.push(mail);
        entry.tasks += 1;
        entry.count.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// A further connection has ended before it proved itself.
    pub(crate) fn withdraw(&self, peer: PeerId) {
        if let Some(entry) = self.lock().peers.get_mut(&peer) {
            entry.untied = entry.untied.saturating_sub(1);
        }
    }

    /// How many connections a peer has.
    pub(crate) fn links(&self, peer: PeerId) -> usize {
        self.lock().peers.get(&peer).map_or(0, |entry| entry.links.len())
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

    /// A connection, or a local path, has done its share of a read, which writes nothing any more.
    pub(crate) fn complete_share(
        &self,
        op: OpId,
        serial: u64,
        result: Result<(), ReadError>,
        arrived: Intervals,
    ) {
        let failed = self.lock().end_share(op, serial, result, arrived);
        if let Some(failed) = failed {
            let outcome = failed.outcome();
            self.lock().complete(op, serial, outcome);
        }
        self.news.notify_one();
    }

    /// A connection of a peer has ended, and with it all will: nothing more is accepted from now on. Says how its reads end.
    pub(crate) fn leaving(&self, peer: PeerId, reason: LossReason) -> ReadError {
        self.lock().leaving(peer, reason)
    }

    /// Ends shares of a connection that has ended and writes nothing for them any more.
    pub(crate) fn end_shares(&self, mut shares: Vec<Share>, error: &ReadError) {
        shares.sort_unstable_by_key(|share| share.serial);
        for Share { op, serial, arrived } in shares {
            self.complete_share(op, serial, Err(error.clone()), arrived);
        }
    }

    /// A connection of a peer is gone, and writes nothing any more. The others follow; with the last the peer is lost.
    pub(crate) fn leave(&self, peer: PeerId, reason: LossReason, shares: Vec<Share>) {
        let error = self.leaving(peer, reason);
        if self.lock().left(peer, &shares) {
            self.lose(peer);
        } else {
            self.end_shares(shares, &error);
        }
    }

    fn lose(&self, peer: PeerId) {
        let remains = self.lock().remains(peer);
        let arrived = remains.into_iter().map(|(op, _, work, arrived)| (op, work.plan.arrived(arrived)));
        let arrived = arrived.collect();
        self.lock().lose(peer, arrived);
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
            peer.hand(Command::Close(LossReason::Closed)).ok();
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
        for peer in &left {
            let error = self.leaving(*peer, LossReason::Closed);
            let shares = self.local.as_ref().map(|local| local.detach(*peer)).unwrap_or_default();
            self.end_shares(shares, &error);
        }
        for peer in left {
            self.lose(peer);
        }
        let mut state = self.lock();
        state.regions.clear();
        drop(state);
        // Whoever learns that it is over may count on it.
        self.staging.close();
        self.lock().phase = Phase::Finished;
        self.finished.notify_all();
        self.news.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::TcpConfig;

    #[tokio::test]
    async fn t6_a_peer_let_go_of_is_disconnected_even_if_it_was_faster() {
        let shared = Shared::new(TcpConfig::default().limits(), None);
        let peer = shared.accepted(None).unwrap().peer;
        shared.disconnect(peer).unwrap();
        assert_eq!(shared.send(peer, vec![]), Err(TransportError::UnknownPeer { peer }));
        for reason in [LossReason::ClosedByPeer, LossReason::Silent] {
            shared.leave(peer, reason, vec![]);
        }
        shared.finish();
        assert_eq!(shared.next_event().await, Some(Event::Accepted { peer }));
        let reason = LossReason::Disconnected;
        assert_eq!(shared.next_event().await, Some(Event::PeerLost { peer, reason }));
        assert_eq!(shared.next_event().await, None);
    }

    #[tokio::test]
    async fn t3_t6_a_peer_is_lost_when_the_last_of_its_connections_has_ended() {
        let shared = Shared::new(TcpConfig::default().limits(), None);
        let mut first = shared.accepted(None).unwrap();
        let peer = first.peer;
        let mut second = shared.join(peer).unwrap();
        assert_eq!(shared.links(peer), 1, "on probation");
        assert!(shared.tie(peer, second.mail.clone()));
        let region = shared.register(Memory::allocate(4 << 20).unwrap(), 1).unwrap();
        let range = crate::contract::ReadRange { remote_offset: 0, local_offset: 0, len: 4 << 20 };
        let part = ReadPart { key: shared.key(region).unwrap(), region, ranges: vec![range] };
        let limits = ReadLimits { total: Duration::from_secs(9), stall: Duration::from_secs(9) };
        shared.read(ReadRequest { op: OpId(1), peer, parts: vec![part], limits }).unwrap();
        assert_eq!(shared.next_event().await, Some(Event::Accepted { peer }));

        let Ok(Command::Read(read)) = first.commands.try_recv() else { panic!() };
        let share = Share { op: OpId(1), serial: read.serial, arrived: vec![(0, 4 << 20)] };
        shared.leave(peer, LossReason::Silent, vec![share]);
        // The other may still be writing: it is told to end, and nothing is told of it.
        assert!(shared.lock().events.is_empty());
        let told: Vec<_> = std::iter::from_fn(|| second.commands.try_recv().ok()).collect();
        assert!(
            matches!(told[..], [Command::Read(_), Command::Close(_), Command::Cancel { .. }]),
            "{told:?}"
        );
        assert_eq!(shared.send(peer, vec![]), Err(TransportError::UnknownPeer { peer }));
        assert!(shared.join(peer).is_none());
        assert!(!shared.tie(peer, second.mail.clone()));

        shared.leave(peer, LossReason::Closed, vec![]);
        let Some(Event::ReadCompleted { op: OpId(1), outcome }) = shared.next_event().await else { panic!() };
        assert_eq!(outcome.result, Err(ReadError::PeerLost(LossReason::Silent)));
        assert!(outcome.arrived.is_all(), "{:?}", outcome.arrived);
        let reason = LossReason::Silent;
        assert_eq!(shared.next_event().await, Some(Event::PeerLost { peer, reason }));
        shared.deregister(region).unwrap();
    }
}
