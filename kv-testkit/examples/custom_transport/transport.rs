//! A complete transport between endpoints of one process: the contract in its smallest form.
//!
//! All endpoints live in one table under one lock, so that every fact changes for both sides at once. A read is a copy
//! in memory, done within the call: nobody is waited for, and it is over before anybody could cancel it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kv_transport::{
    Address, Capabilities, Event, LossReason, MESSAGE_MAX_BYTES, Memory, OpId, PeerId, RangeSet, ReadError,
    ReadOutcome, ReadPart, ReadRange, ReadRequest, RegionId, RegionKey, Transport, TransportError,
};
use tokio::sync::Notify;

const NAME: &str = "inproc";
/// Bytes of messages that may wait for their receiver.
const INBOX_BYTES: usize = 64 << 20;

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

/// All endpoints that live, and the last number given to anything: ids are never used again.
#[derive(Default)]
struct Table(HashMap<u64, Endpoint>, u64);

#[derive(Default)]
struct Endpoint {
    news: Arc<Notify>,
    closed: bool,
    events: VecDeque<Event>,
    inbox_bytes: usize,
    /// Each with its endpoint, and our id there.
    peers: HashMap<PeerId, (u64, PeerId)>,
    regions: HashMap<RegionId, (Memory, u64)>,
}

/// An endpoint.
#[derive(Debug)]
pub(crate) struct Inproc(u64, Arc<Notify>);

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nobody can guess an address or a key, and none of a former life is good again (T-9, T-10).
fn random() -> Result<u64, TransportError> {
    getrandom::u64()
        .map_err(|_| TransportError::Unsupported { transport: NAME, what: "without random numbers" })
}

fn unpack(bytes: &[u8], tag: u8) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.strip_prefix(&[tag])?.try_into().ok()?))
}

impl Endpoint {
    fn tell(&mut self, event: Event) {
        self.events.push_back(event);
        self.news.notify_one();
    }

    /// T-1: everything that a read can be refused for, before anything is changed.
    fn check(&self, request: &ReadRequest) -> Result<u64, TransportError> {
        let (far, _) =
            self.peers.get(&request.peer).ok_or(TransportError::UnknownPeer { peer: request.peer })?;
        request.check(|region| Some(self.regions.get(&region)?.0.clone()))?;
        let keys = request.parts.iter().all(|part| unpack(part.key.as_bytes(), b'k').is_some());
        keys.then_some(*far).ok_or(TransportError::BadKey { transport: NAME })
    }
}

impl Table {
    fn number(&mut self) -> u64 {
        self.1 += 1;
        self.1
    }

    fn open(&mut self, id: u64) -> Result<&mut Endpoint, TransportError> {
        let closed = TransportError::Closed { transport: NAME };
        self.0.get_mut(&id).filter(|endpoint| !endpoint.closed).ok_or(closed)
    }

    /// T-6: the loss is told on both sides, and the ids are void with it. No read is ever in flight here.
    fn part(&mut self, id: u64, peer: PeerId, reason: LossReason) {
        let Some(near) = self.0.get_mut(&id) else { return };
        let Some((far, back)) = near.peers.remove(&peer) else { return };
        near.tell(Event::PeerLost { peer, reason });
        let Some(there) = self.0.get_mut(&far) else { return };
        if there.peers.remove(&back).is_some() {
            there.tell(Event::PeerLost { peer: back, reason: LossReason::ClosedByPeer });
        }
    }

    /// One range. Memory checks its own bounds, on the peer's side too.
    fn copy(&self, near: u64, far: u64, part: &ReadPart, range: &ReadRange) -> Result<(), ReadError> {
        let nonce = unpack(part.key.as_bytes(), b'k');
        let source = self.0.get(&far).and_then(|far| far.regions.values().find(|(_, of)| Some(*of) == nonce));
        let (source, _) = source.ok_or(ReadError::UnknownKey)?;
        let place = self.0.get(&near).and_then(|near| near.regions.get(&part.region));
        let (place, _) = place.ok_or(ReadError::Closed)?;
        let mut bytes = vec![0; range.len as usize];
        source.read(range.remote_offset, &mut bytes).map_err(|_| ReadError::RemoteRange)?;
        place.write(range.local_offset, &bytes).map_err(|_| ReadError::Closed)
    }

    fn close(&mut self, id: u64) {
        while let Some(peer) = self.0.get(&id).and_then(|endpoint| endpoint.peers.keys().next().copied()) {
            self.part(id, peer, LossReason::Closed);
        }
        let Some(endpoint) = self.0.get_mut(&id) else { return };
        endpoint.closed = true;
        endpoint.regions.clear();
        endpoint.news.notify_one();
    }
}

impl Inproc {
    /// A new endpoint, which others can connect to at once.
    pub(crate) fn new() -> Result<Self, TransportError> {
        let new = Self(random()?, Arc::default());
        table().0.insert(new.0, Endpoint { news: Arc::clone(&new.1), ..Endpoint::default() });
        Ok(new)
    }
}

impl Drop for Inproc {
    fn drop(&mut self) {
        let mut table = table();
        table.close(self.0);
        table.0.remove(&self.0);
    }
}

#[async_trait]
impl Transport for Inproc {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::basic()
    }

    fn address(&self) -> Address {
        Address::from_bytes([&b"a"[..], &self.0.to_le_bytes()].concat()).unwrap_or_else(|_| unreachable!())
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        if memory.on_device().is_some() {
            return Err(TransportError::Unsupported { transport: NAME, what: "device memory" });
        }
        let (nonce, mut table) = (random()?, table());
        let region = RegionId(table.number());
        table.open(self.0)?.regions.insert(region, (memory, nonce));
        Ok(region)
    }

    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        let unknown = TransportError::UnknownRegion { region };
        let nonce = table().open(self.0)?.regions.get(&region).ok_or(unknown)?.1;
        RegionKey::from_bytes([&b"k"[..], &nonce.to_le_bytes()].concat())
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        let gone = table().open(self.0)?.regions.remove(&region);
        gone.map(drop).ok_or(TransportError::UnknownRegion { region })
    }

    fn connect(&self, address: &Address, _limit: Duration) -> Result<PeerId, TransportError> {
        let bad = TransportError::BadAddress { transport: NAME, reason: "not made by this transport" };
        let far = unpack(address.as_bytes(), b'a').ok_or(bad)?;
        let mut table = table();
        let (peer, back) = (PeerId(table.number()), PeerId(table.number()));
        table.open(self.0)?.peers.insert(peer, (far, back));
        let Ok(there) = table.open(far) else {
            table.part(self.0, peer, LossReason::Stranger("nobody lives there"));
            return Ok(peer);
        };
        there.peers.insert(back, (self.0, peer));
        there.tell(Event::Accepted { peer: back });
        table.open(self.0)?.tell(Event::Connected { peer });
        Ok(peer)
    }

    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        let mut table = table();
        table.open(self.0)?.peers.get(&peer).ok_or(TransportError::UnknownPeer { peer })?;
        table.part(self.0, peer, LossReason::Disconnected);
        Ok(())
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        let mut table = table();
        let far = table.open(self.0)?.check(&request)?;
        let (mut arrived, mut result) = (RangeSet::none(request.range_count()), Ok(()));
        let ranges = request.parts.iter().flat_map(|part| part.ranges.iter().map(move |range| (part, range)));
        for (index, (part, range)) in ranges.enumerate() {
            result = result.and_then(|()| table.copy(self.0, far, part, range));
            result.iter().for_each(|()| arrived.insert(index));
        }
        let outcome = ReadOutcome { result, arrived };
        table.open(self.0)?.tell(Event::ReadCompleted { op: request.op, outcome });
        Ok(())
    }

    fn cancel(&self, _op: OpId) {}

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        if message.len() > MESSAGE_MAX_BYTES {
            return Err(TransportError::MessageTooLong { bytes: message.len(), limit: MESSAGE_MAX_BYTES });
        }
        let mut table = table();
        let unknown = TransportError::UnknownPeer { peer };
        let (far, back) = *table.open(self.0)?.peers.get(&peer).ok_or(unknown.clone())?;
        let there = table.open(far).map_err(|_| unknown)?;
        if there.inbox_bytes + message.len() > INBOX_BYTES {
            return Err(TransportError::SendQueueFull { peer, queued: there.events.len() });
        }
        there.inbox_bytes += message.len();
        there.tell(Event::Message { peer: back, bytes: message });
        Ok(())
    }

    async fn next_event(&self) -> Option<Event> {
        loop {
            if let Some(endpoint) = table().0.get_mut(&self.0) {
                let event = endpoint.events.pop_front();
                if let Some(Event::Message { bytes, .. }) = &event {
                    endpoint.inbox_bytes -= bytes.len();
                }
                if event.is_some() || endpoint.closed {
                    // Whoever else waits looks too.
                    endpoint.news.notify_one();
                    return event;
                }
            }
            self.1.notified().await;
        }
    }

    async fn shutdown(&self, _limit: Duration) {
        table().close(self.0);
    }
}
