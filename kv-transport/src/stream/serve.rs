//! The serving side of a connection: requests of the peer, waiting for their turn.
//!
//! Each operation of the peer has a queue of its own. Most turns go to the operation that was sent the least so far, so
//! that a small read passes a large one whose requests came before; every fourth goes to the one that waited longest,
//! so that each is served after as many of those turns as there were operations before it, whatever comes behind.
//!
//! Chunks of device memory are copied to the host before they are sent, some of them ahead of the one that is sent next.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;

use super::commands::Command;
use super::frame::{EndCode, Header, ReadBody, ServeLimits};
use super::key::Key;
use super::pool::{Customer, Handed, Slot};
use super::shared::Shared;
use super::spans::Spans;
use super::staging::For;
use crate::device::{Device, DeviceError, DeviceId, Direction};
use crate::memory::Memory;

/// Every so many turns the operation that waited longest is served, whatever it was sent before.
const PATIENCE: u32 = 4;

/// So many chunks are copied out of devices before they are sent.
const AHEAD: usize = 8;

struct Request {
    chunk: u64,
    read: ReadBody,
}

/// Requests of one operation that wait, in the order in which they came.
#[derive(Default)]
struct Op {
    queue: VecDeque<Request>,
    cancelled: bool,
    /// Bytes that were sent since its queue was last empty, more or less: what a turn took, it counts.
    sent: u64,
}

/// A chunk that is being sent. It keeps the region's memory alive (rule T-4).
pub(crate) struct Sending {
    pub(crate) chunk: u64,
    key: Key,
    pub(crate) memory: Memory,
    pub(crate) spans: Spans,
    /// Where the bytes are, if the region is on a device.
    slot: Option<Slot>,
}

impl Sending {
    /// How it ended. To be asked after the last byte has been handed to the system: a region that is still
    /// registered then was registered throughout (rule T-9).
    pub(crate) fn end(&self, shared: &Shared) -> Header {
        let code = if shared.source(self.key).is_some() { EndCode::Done } else { EndCode::UnknownKey };
        Header::End { chunk: self.chunk, code }
    }
}

/// Where a chunk stands that has had its turn.
enum Stage {
    /// In host memory.
    Host,
    /// A slot is wanted.
    Wanted,
    Copying,
    Ready(Slot),
    Failed,
}

/// A chunk that has had its turn.
struct Ahead {
    /// Ours, unlike the peer's numbers of chunks, which may be anything.
    number: u64,
    op: u64,
    cancelled: bool,
    chunk: u64,
    key: Key,
    memory: Memory,
    ranges: Vec<(u64, u32)>,
    stage: Stage,
}

/// See the module.
pub(crate) struct Serve {
    granted: ServeLimits,
    customer: Customer,
    /// Only while there are chunks of devices.
    ahead: VecDeque<Ahead>,
    numbers: u64,
    ops: HashMap<u64, Op>,
    /// The operations of which something waits; the first has waited longest for a turn.
    ring: VecDeque<u64>,
    waiting: usize,
    turns: u32,
}

impl Serve {
    pub(crate) fn new(granted: ServeLimits, mail: UnboundedSender<Command>) -> Self {
        Self {
            granted,
            customer: Customer::new(mail),
            ahead: VecDeque::new(),
            numbers: 0,
            ops: HashMap::new(),
            ring: VecDeque::new(),
            waiting: 0,
            turns: 0,
        }
    }

    pub(crate) fn granted(&self) -> ServeLimits {
        self.granted
    }

    /// Queues a request, unless there are more than were granted.
    pub(crate) fn add(&mut self, chunk: u64, read: ReadBody) -> Result<(), &'static str> {
        if self.waiting >= self.granted.chunk_queue as usize {
            return Err("more reads at a time than granted");
        }
        self.waiting += 1;
        let number = read.op;
        let op = self.ops.entry(number).or_default();
        if op.queue.is_empty() {
            self.ring.push_back(number);
        }
        op.queue.push_back(Request { chunk, read });
        Ok(())
    }

    /// Marks what waits of an operation. Each request keeps its place until its end is sent, so that a peer that
    /// asks and cancels without ever reading the answers cannot pile them up here.
    pub(crate) fn cancel(&mut self, op: u64) {
        if let Some(op) = self.ops.get_mut(&op) {
            op.cancelled = true;
        }
        self.ahead.iter_mut().filter(|ahead| ahead.op == op).for_each(|ahead| ahead.cancelled = true);
    }

    /// The request whose turn it is, and whether it was cancelled.
    fn take(&mut self) -> Option<(Request, bool)> {
        self.turns = self.turns.wrapping_add(1);
        let sent = |number: &u64| self.ops.get(number).map_or(0, |op| op.sent);
        let place = if self.turns.is_multiple_of(PATIENCE) {
            0
        } else {
            // The first of those with least: `min_by_key` keeps to the order of the ring.
            self.ring.iter().enumerate().min_by_key(|(_, number)| sent(number)).map_or(0, |(place, _)| place)
        };
        let number = self.ring.remove(place)?;
        let op = self.ops.get_mut(&number)?;
        let request = op.queue.pop_front()?;
        self.waiting -= 1;
        op.sent += request.read.ranges.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        let cancelled = op.cancelled;
        if op.queue.is_empty() {
            self.ops.remove(&number);
        } else {
            self.ring.push_back(number);
        }
        Some((request, cancelled))
    }

    /// The next chunk to be sent. Ends of those that cannot be served are appended to `out`. `None` can also mean that
    /// [`Command::Copied`] or [`Command::Slot`] has to come first.
    pub(crate) fn next(&mut self, shared: &Shared, out: &mut Vec<u8>) -> Option<Sending> {
        let mut sending = self.finished(out);
        let staged = sending.as_ref().is_some_and(|sending| sending.slot.is_some());
        while self.ahead.len() < AHEAD && (sending.is_none() || staged || !self.ahead.is_empty()) {
            let Some(next) = self.prepare(shared, out) else { break };
            if sending.is_none() && self.ahead.is_empty() && matches!(next.stage, Stage::Host) {
                sending = next.send();
            } else {
                self.ahead.push_back(next);
            }
        }
        self.start_copies(shared);
        sending.or_else(|| self.finished(out))
    }

    /// The request whose turn it is, once it is found that it can be served.
    fn prepare(&mut self, shared: &Shared, out: &mut Vec<u8>) -> Option<Ahead> {
        while let Some((Request { chunk, read: ReadBody { op, key, ranges } }, cancelled)) = self.take() {
            let code = match shared.source(key) {
                _ if cancelled => EndCode::Cancelled,
                None => EndCode::UnknownKey,
                Some(memory) => {
                    if ranges.iter().all(|(offset, len)| memory.contains(*offset, u64::from(*len))) {
                        self.numbers += 1;
                        let number = self.numbers;
                        let stage = if memory.on_device().is_some() { Stage::Wanted } else { Stage::Host };
                        return Some(Ahead { number, op, cancelled, chunk, key, memory, ranges, stage });
                    }
                    EndCode::Range
                }
            };
            out.extend_from_slice(&Header::End { chunk, code }.encode());
        }
        None
    }

    fn start_copies(&mut self, shared: &Shared) {
        // One device without a free slot is no reason for others to wait.
        let mut short = vec![];
        for ahead in self.ahead.iter_mut() {
            let Some(device) = ahead.wants().filter(|device| !short.contains(&device.id())) else { continue };
            match shared.staging.slot(&*device, Direction::ToHost, &self.customer) {
                Ok(Some(slot)) => ahead.copy(shared, slot, &self.customer),
                Ok(None) => short.push(device.id()),
                Err(error) => ahead.fail(shared, device.id(), &error),
            }
        }
    }

    /// A slot that was waited for.
    pub(crate) fn handed(&mut self, shared: &Shared, handed: Handed) {
        let wants = |ahead: &&mut Ahead| ahead.wants().is_some_and(|device| device.id() == handed.device);
        let mut wanting = self.ahead.iter_mut().filter(wants);
        match handed.result {
            // If nobody wants it any more, it goes back.
            Ok(slot) => {
                if let Some(first) = wanting.next() {
                    first.copy(shared, slot, &self.customer);
                }
            }
            Err(error) => wanting.for_each(|ahead| ahead.fail(shared, handed.device, &error)),
        }
    }

    /// A copy that was started for this connection has ended.
    pub(crate) fn copied(
        &mut self,
        shared: &Shared,
        number: u64,
        slot: Option<Slot>,
        result: Result<(), DeviceError>,
    ) {
        let Some(ahead) = self.ahead.iter_mut().find(|ahead| ahead.number == number) else { return };
        let device = ahead.memory.on_device().map(|device| device.id());
        match (result, slot, device) {
            (Ok(()), Some(slot), _) => ahead.stage = Stage::Ready(slot),
            (Err(error), _, Some(device)) => ahead.fail(shared, device, &error),
            _ => ahead.stage = Stage::Failed,
        }
    }

    /// Whether chunks that wait to be sent have slots.
    pub(crate) fn has_ready(&self) -> bool {
        self.ahead.iter().any(|ahead| matches!(ahead.stage, Stage::Ready(_)))
    }

    /// The peer takes nothing: others get the slots of chunks that wait, which are copied anew when it goes on.
    pub(crate) fn yield_slots(&mut self) {
        for ahead in &mut self.ahead {
            if matches!(ahead.stage, Stage::Ready(_)) {
                ahead.stage = Stage::Wanted;
            }
        }
    }

    /// The first chunk of those ahead that can be sent.
    fn finished(&mut self, out: &mut Vec<u8>) -> Option<Sending> {
        loop {
            let place = self.ahead.iter().position(|ahead| match ahead.stage {
                Stage::Host | Stage::Ready(_) | Stage::Failed => true,
                Stage::Wanted => ahead.cancelled,
                Stage::Copying => false,
            })?;
            let ahead = self.ahead.remove(place)?;
            let code = if ahead.cancelled { EndCode::Cancelled } else { EndCode::Device };
            let chunk = ahead.chunk;
            match ahead.send() {
                Some(sending) => return Some(sending),
                None => out.extend_from_slice(&Header::End { chunk, code }.encode()),
            }
        }
    }
}

impl Ahead {
    /// The device that has its bytes, if a slot is wanted for them.
    fn wants(&self) -> Option<Arc<dyn Device>> {
        let wanted = matches!(self.stage, Stage::Wanted) && !self.cancelled;
        self.memory.on_device().filter(|_| wanted).map(Arc::clone)
    }

    fn copy(&mut self, shared: &Shared, slot: Slot, customer: &Customer) {
        let (what, ranges) = (For::Serve { number: self.number }, self.ranges.clone());
        let device = slot.device().id();
        match shared.staging.copy(what, slot, self.memory.clone(), ranges, customer.mail()) {
            Ok(()) => self.stage = Stage::Copying,
            Err(error) => self.fail(shared, device, &error),
        }
    }

    fn fail(&mut self, shared: &Shared, device: DeviceId, error: &DeviceError) {
        shared.staging.report(device, error);
        self.stage = Stage::Failed;
    }

    /// `None` if it has no bytes, or nobody wants them.
    fn send(self) -> Option<Sending> {
        let Self { cancelled, chunk, key, memory, ranges, stage, .. } = self;
        let mut spans = Spans::default();
        let (memory, slot) = match stage {
            _ if cancelled => return None,
            Stage::Host => {
                ranges.iter().for_each(|(offset, len)| spans.push(*offset, *len));
                (memory, None)
            }
            Stage::Ready(slot) => {
                let mut at = 0;
                for (_, len) in &ranges {
                    spans.push(at, *len);
                    at += u64::from(*len);
                }
                (slot.memory()?.clone(), Some(slot))
            }
            Stage::Wanted | Stage::Copying | Stage::Failed => return None,
        };
        Some(Sending { chunk, key, memory, spans, slot })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve() -> Serve {
        let limits = ServeLimits { chunk_queue: 64, chunk_bytes: 1 << 20, chunk_ranges: 16 };
        Serve::new(limits, tokio::sync::mpsc::unbounded_channel().0)
    }

    fn add(serve: &mut Serve, op: u64, chunk: u64, len: u32) {
        let key = Key { region: 1, nonce: 1 };
        serve.add(chunk, ReadBody { op, key, ranges: vec![(0, len)] }).unwrap();
    }

    fn order(serve: &mut Serve) -> Vec<u64> {
        std::iter::from_fn(|| serve.take().map(|(request, _)| request.chunk)).collect()
    }

    #[test]
    fn a_small_operation_passes_a_large_one() {
        let mut serve = serve();
        (0..8).for_each(|chunk| add(&mut serve, 1, chunk, 1000));
        assert_eq!(serve.take().unwrap().0.chunk, 0);
        (100..103).for_each(|chunk| add(&mut serve, 2, chunk, 100));
        // The fourth turn is that of the one that waited longest.
        assert_eq!(order(&mut serve), [100, 101, 1, 102, 2, 3, 4, 5, 6, 7]);
        assert!(serve.ops.is_empty() && serve.ring.is_empty() && serve.waiting == 0);
    }

    #[test]
    fn small_operations_that_keep_coming_do_not_starve_a_large_one() {
        let mut serve = serve();
        (0..8).for_each(|chunk| add(&mut serve, 1, chunk, 1000));
        let (mut large, mut since, mut bound) = (0, 0, 1);
        for turn in 100..200 {
            if large == 8 {
                return;
            }
            add(&mut serve, turn, turn, 10);
            since += 1;
            if serve.take().unwrap().0.chunk < 8 {
                assert!(since <= bound, "{since} turns for one chunk, {bound} at most");
                // Before its next turn come those that wait now, at one turn in four if others are always smaller.
                (large, since, bound) = (large + 1, 0, PATIENCE as usize * serve.ring.len());
            }
        }
        panic!("{large} of 8 chunks in a hundred turns");
    }

    #[test]
    fn a_cancel_concerns_what_waits_of_one_operation_and_keeps_its_place() {
        let mut serve = serve();
        [1, 2, 1].into_iter().zip(0..).for_each(|(op, chunk)| add(&mut serve, op, chunk, 10));
        serve.cancel(1);
        serve.cancel(99);
        assert_eq!(serve.waiting, 3);
        let mut taken: Vec<_> = std::iter::from_fn(|| serve.take())
            .map(|(request, cancelled)| (request.chunk, cancelled))
            .collect();
        taken.sort_unstable();
        assert_eq!(taken, [(0, true), (1, false), (2, true)]);
        // The mark goes with what it marked.
        add(&mut serve, 1, 7, 10);
        assert!(!serve.take().unwrap().1);
    }

    #[test]
    fn more_than_granted_is_refused_whatever_operation_it_is_of() {
        let mut serve = serve();
        (0..64).for_each(|chunk| add(&mut serve, chunk % 3, chunk, 10));
        let key = Key { region: 1, nonce: 1 };
        assert!(serve.add(64, ReadBody { op: 9, key, ranges: vec![(0, 1)] }).is_err());
        assert_eq!(serve.ops.len(), 3);
    }
}
