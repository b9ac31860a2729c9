//! What cases work with: endpoints whose events can be taken out of turn, memory with known bytes, held reads.
//!
//! A case judges its own rule and forgives everything else: what it does not ask for stays in a node's backlog, and
//! what goes wrong on the way is charged to the rule that it breaks.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_transport::{
    Event, LossReason, Memory, OpId, PeerId, ReadLimits, ReadOutcome, ReadPart, ReadRange, ReadRequest,
    RegionId, RegionKey, Transport,
};
use tokio::runtime::Runtime;

use super::case::{End, broken, check};
use super::harness::{Harness, REMOTE_BYTES, Remote};

/// What destinations hold before they are read into.
pub(super) const OLD: u8 = 0xa5;

/// Bytes that differ everywhere and from seed to seed.
pub(super) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(super) fn range(remote_offset: u64, local_offset: u64, len: u64) -> ReadRange {
    ReadRange { remote_offset, local_offset, len }
}

pub(super) fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    if !super::device::peek(memory, &mut bytes) {
        // Reading as many bytes as there are cannot fail; if it did, the zeros would be noticed.
        memory.read(0, &mut bytes).ok();
    }
    bytes
}

/// What a case has.
pub(super) struct Bench {
    pub(super) harness: &'static dyn Harness,
    pub(super) repeats: u32,
    runtime: Rc<Runtime>,
}

/// Two endpoints that are connected.
pub(super) struct Pair {
    pub(super) server: Node,
    pub(super) client: Node,
    /// The server, at the client.
    pub(super) peer: PeerId,
    /// The client, at the server.
    pub(super) back: PeerId,
}

/// A region that peers may read.
pub(super) struct Source {
    pub(super) region: RegionId,
    pub(super) key: RegionKey,
    pub(super) memory: Memory,
    pub(super) bytes: Vec<u8>,
}

/// A region to read into.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) region: RegionId,
    pub(super) memory: Memory,
}

/// A peer elsewhere, and an endpoint connected to it.
pub(super) struct Away {
    pub(super) node: Node,
    pub(super) remote: Box<dyn Remote>,
    pub(super) peer: PeerId,
    pub(super) key: RegionKey,
}

impl Bench {
    pub(super) fn new(harness: &'static dyn Harness, repeats: u32) -> Result<Self, End> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| broken!(T1, "no runtime for the suite: {error}"))?;
        Ok(Self { harness, repeats, runtime: Rc::new(runtime) })
    }

    pub(super) fn node(&self) -> Result<Node, End> {
        let transport = self.harness.endpoint().map_err(|error| broken!(T1, "no endpoint: {error}"))?;
        Ok(Node {
            transport,
            runtime: Rc::clone(&self.runtime),
            patience: self.harness.patience(),
            backlog: RefCell::default(),
            ops: Cell::new(0),
        })
    }

    pub(super) fn pair(&self) -> Result<Pair, End> {
        let (server, client) = (self.node()?, self.node()?);
        let (peer, back) = client.link(&server)?;
        let start = Instant::now();
        while !self.harness.is_settled(&*client.transport, peer) {
            check!(
                T12,
                start.elapsed() < client.patience,
                "a pair does not become what it is to be tried as"
            );
            std::thread::yield_now();
        }
        Ok(Pair { server, client, peer, back })
    }

    pub(super) fn away(&self) -> Result<Away, End> {
        let remote = self.harness.remote()?;
        let node = self.node()?;
        let peer = node.connect(&remote.address())?;
        let key = remote.key();
        Ok(Away { node, remote, peer, key })
    }

    /// As [`Bench::away`], for cases that need reads which a stopped peer holds up.
    pub(super) fn away_two_sided(&self) -> Result<Away, End> {
        let away = self.away()?;
        if away.node.transport.capabilities().one_sided {
            return Err(End::Cannot("reads need no step of the peer, so a stopped one holds none up".into()));
        }
        Ok(away)
    }

    pub(super) fn memory(&self, bytes: usize) -> Result<Memory, End> {
        self.harness.memory(bytes).map_err(|error| broken!(T1, "no memory of {bytes} bytes: {error}"))
    }

    /// Registers bytes for peers to read.
    pub(super) fn offer(&self, node: &Node, bytes: Vec<u8>) -> Result<Source, End> {
        let memory = self.memory(bytes.len())?;
        memory.write(0, &bytes).map_err(|error| broken!(T1, "memory cannot be written: {error}"))?;
        let region = node.register(memory.clone())?;
        let key = node.transport.key(region).map_err(|error| broken!(T1, "no key of {region}: {error}"))?;
        Ok(Source { region, key, memory, bytes })
    }

    /// Registers memory to read into.
    pub(super) fn place(&self, node: &Node, bytes: usize) -> Result<Place, End> {
        let memory = self.memory(bytes)?;
        fill(&memory, OLD)?;
        Ok(Place { region: node.register(memory.clone())?, memory })
    }
}

impl Away {
    /// A place, and a read of a MiB into it.
    pub(super) fn read(&self, bench: &Bench, limits: ReadLimits) -> Result<(Place, OpId), End> {
        let place = bench.place(&self.node, 1 << 20)?;
        let ranges = vec![range(0, 0, 1 << 20)];
        let op = self.node.read_within(self.peer, &self.key, place.region, ranges, limits)?;
        Ok((place, op))
    }

    /// A read of all that the peer has.
    pub(super) fn read_all(&self, bench: &Bench) -> Result<(Place, OpId), End> {
        let place = bench.place(&self.node, REMOTE_BYTES)?;
        let ranges = (0..16).map(|part| range(part << 20, part << 20, 1 << 20)).collect();
        let op = self.node.read(self.peer, &self.key, place.region, ranges)?;
        Ok((place, op))
    }
}

/// Overwrites memory, as its next owner would.
pub(super) fn fill(memory: &Memory, byte: u8) -> Result<(), End> {
    let bytes = vec![byte; memory.len()];
    if super::device::poke(memory, &bytes) {
        return Ok(());
    }
    memory.write(0, &bytes).map_err(|error| broken!(T1, "memory cannot be written: {error}"))
}

/// Bytes that are all the same.
pub(super) fn is_filled(memory: &Memory, byte: u8) -> bool {
    contents(memory).iter().all(|found| *found == byte)
}

/// An endpoint.
pub(super) struct Node {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) patience: Duration,
    runtime: Rc<Runtime>,
    backlog: RefCell<VecDeque<Event>>,
    ops: Cell<u64>,
}

/// What waiting for an event came to.
pub(super) enum Polled {
    Event(Event),
    Quiet,
    Closed,
}

impl Node {
    pub(super) fn patient(&self) -> ReadLimits {
        ReadLimits { total: self.patience * 2, stall: self.patience * 2 }
    }

    /// An id that this node has not used.
    pub(super) fn op(&self) -> OpId {
        self.ops.set(self.ops.get() + 1);
        OpId(self.ops.get())
    }

    pub(super) fn register(&self, memory: Memory) -> Result<RegionId, End> {
        self.transport.register(memory).map_err(|error| broken!(T12, "memory is not registered: {error}"))
    }

    /// Connects to an address, and waits until the connection stands.
    pub(super) fn connect(&self, address: &kv_transport::Address) -> Result<PeerId, End> {
        let peer = self
            .transport
            .connect(address, self.patience)
            .map_err(|error| broken!(T8, "a good address is refused: {error}"))?;
        let connected = self.wait(self.patience, |event| match event {
            Event::Connected { peer: other } if *other == peer => Some(Ok(())),
            Event::PeerLost { peer: other, reason } if *other == peer => Some(Err(reason.clone())),
            _ => None,
        });
        match connected {
            Some(Ok(())) => Ok(peer),
            Some(Err(reason)) => Err(broken!(T8, "a good address is not reached: {reason}")),
            None => Err(broken!(T8, "nothing was told of a connect within {:?}", self.patience)),
        }
    }

    /// Connects to another node: its id here, and ours there.
    pub(super) fn link(&self, to: &Self) -> Result<(PeerId, PeerId), End> {
        let there = self.connect(&to.transport.address())?;
        Ok((there, to.accepted()?))
    }

    pub(super) fn accepted(&self) -> Result<PeerId, End> {
        let accepted = self.wait(self.patience, |event| match event {
            Event::Accepted { peer } => Some(*peer),
            _ => None,
        });
        accepted.ok_or_else(|| broken!(T8, "a connection was not told to the one connected to"))
    }

    pub(super) fn request(
        &self,
        op: OpId,
        peer: PeerId,
        key: &RegionKey,
        region: RegionId,
        ranges: Vec<ReadRange>,
    ) -> ReadRequest {
        let parts = vec![ReadPart { key: key.clone(), region, ranges }];
        ReadRequest { op, peer, parts, limits: self.patient() }
    }

    /// Submits a good read.
    pub(super) fn read(
        &self,
        peer: PeerId,
        key: &RegionKey,
        region: RegionId,
        ranges: Vec<ReadRange>,
    ) -> Result<OpId, End> {
        self.read_within(peer, key, region, ranges, self.patient())
    }

    pub(super) fn read_within(
        &self,
        peer: PeerId,
        key: &RegionKey,
        region: RegionId,
        ranges: Vec<ReadRange>,
        limits: ReadLimits,
    ) -> Result<OpId, End> {
        let op = self.op();
        let request = ReadRequest { limits, ..self.request(op, peer, key, region, ranges) };
        self.submit(request)?;
        Ok(op)
    }

    pub(super) fn submit(&self, request: ReadRequest) -> Result<(), End> {
        self.transport.read(request).map_err(|error| broken!(T1, "a good read is refused: {error}"))
    }

    /// Reads, and waits for the end.
    pub(super) fn fetch(
        &self,
        peer: PeerId,
        key: &RegionKey,
        region: RegionId,
        ranges: Vec<ReadRange>,
    ) -> Result<ReadOutcome, End> {
        let op = self.read(peer, key, region, ranges)?;
        self.completion(op)
    }

    /// Whether a plain read works: it brings the first bytes of a source.
    pub(super) fn works(&self, bench: &Bench, peer: PeerId, source: &Source) -> Result<bool, End> {
        let len = source.bytes.len().min(4096);
        let place = bench.place(self, len)?;
        let outcome = self.fetch(peer, &source.key, place.region, vec![range(0, 0, len as u64)])?;
        if outcome.result.is_ok() {
            check!(T2, contents(&place.memory) == source.bytes[..len], "a plain read brought wrong bytes");
        }
        Ok(outcome.result.is_ok())
    }

    pub(super) fn poll(&self, limit: Duration) -> Polled {
        let next = async { tokio::time::timeout(limit, self.transport.next_event()).await };
        match self.runtime.block_on(next) {
            Ok(Some(event)) => Polled::Event(event),
            Ok(None) => Polled::Closed,
            Err(_) => Polled::Quiet,
        }
    }

    /// Takes the first event that is wanted, out of turn if need be.
    pub(super) fn wait<T>(&self, limit: Duration, mut wanted: impl FnMut(&Event) -> Option<T>) -> Option<T> {
        let found =
            self.backlog.borrow().iter().enumerate().find_map(|(at, event)| Some((at, wanted(event)?)));
        if let Some((at, found)) = found {
            self.backlog.borrow_mut().remove(at);
            return Some(found);
        }
        let start = Instant::now();
        loop {
            match self.poll(limit.saturating_sub(start.elapsed())) {
                Polled::Event(event) => match wanted(&event) {
                    Some(found) => return Some(found),
                    None => self.backlog.borrow_mut().push_back(event),
                },
                Polled::Quiet | Polled::Closed => return None,
            }
        }
    }

    /// The completion of a read, if it comes within a limit.
    pub(super) fn completed_within(&self, op: OpId, limit: Duration) -> Option<ReadOutcome> {
        self.wait(limit, |event| match event {
            Event::ReadCompleted { op: other, outcome } if *other == op => Some(outcome.clone()),
            _ => None,
        })
    }

    pub(super) fn completion(&self, op: OpId) -> Result<ReadOutcome, End> {
        let outcome = self.completed_within(op, self.patience);
        outcome
            .ok_or_else(|| broken!(T1, "{op} was accepted and did not complete within {:?}", self.patience))
    }

    /// The completion of a read that was cancelled.
    pub(super) fn cancelled(&self, op: OpId) -> Result<ReadOutcome, End> {
        let outcome = self.completed_within(op, self.patience);
        outcome
            .ok_or_else(|| broken!(T7, "{op} was cancelled and did not complete within {:?}", self.patience))
    }

    pub(super) fn loss(&self, peer: PeerId) -> Result<LossReason, End> {
        let lost = self.wait(self.patience, |event| match event {
            Event::PeerLost { peer: other, reason } if *other == peer => Some(reason.clone()),
            _ => None,
        });
        lost.ok_or_else(|| {
            broken!(T6, "{peer} is gone, and its loss was not told within {:?}", self.patience)
        })
    }

    pub(super) fn message(&self) -> Option<(PeerId, Vec<u8>)> {
        self.wait(self.patience, |event| match event {
            Event::Message { peer, bytes } => Some((*peer, bytes.clone())),
            _ => None,
        })
    }

    pub(super) fn shutdown(&self) -> Result<(), End> {
        let start = Instant::now();
        self.runtime.block_on(self.transport.shutdown(self.patience));
        check!(T11, start.elapsed() <= self.patience * 2, "shutdown took {:?}", start.elapsed());
        Ok(())
    }

    /// Ends the transport: every event that was not taken yet, in order. What is asked for last is told last, so
    /// nothing can come after it.
    pub(super) fn drain(&self) -> Result<Vec<Event>, End> {
        self.shutdown()?;
        let mut events: Vec<Event> = self.backlog.take().into();
        loop {
            match self.poll(self.patience) {
                Polled::Event(event) => events.push(event),
                Polled::Closed => return Ok(events),
                Polled::Quiet => {
                    return Err(broken!(T11, "after shutdown next_event neither tells an event nor the end"));
                }
            }
        }
    }

    /// Runs something on the case's own executor, with a limit.
    pub(super) fn block_on<F: Future>(&self, limit: Duration, future: F) -> Option<F::Output> {
        self.runtime.block_on(async { tokio::time::timeout(limit, future).await.ok() })
    }
}
