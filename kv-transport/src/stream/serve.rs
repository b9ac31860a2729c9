//! The serving side of a connection: requests of the peer, waiting for their turn.
//!
//! Each operation of the peer has a queue of its own. Most turns go to the operation that was sent the least so far, so
//! that a small read passes a large one whose requests came before; every fourth goes to the one that waited longest,
//! so that each is served after as many of those turns as there were operations before it, whatever comes behind.

use std::collections::{HashMap, VecDeque};

use super::frame::{EndCode, Header, ReadBody, ServeLimits};
use super::key::Key;
use super::shared::Shared;
use super::spans::Spans;
use crate::memory::Memory;

/// Every so many turns the operation that waited longest is served, whatever it was sent before.
const PATIENCE: u32 = 4;

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
}

impl Sending {
    /// How it ended. To be asked after the last byte has been handed to the system: a region that is still
    /// registered then was registered throughout (rule T-9).
    pub(crate) fn end(&self, shared: &Shared) -> Header {
        let code = if shared.source(self.key).is_some() { EndCode::Done } else { EndCode::UnknownKey };
        Header::End { chunk: self.chunk, code }
    }
}

/// See the module.
pub(crate) struct Serve {
    granted: ServeLimits,
    ops: HashMap<u64, Op>,
    /// The operations of which something waits; the first has waited longest for a turn.
    ring: VecDeque<u64>,
    waiting: usize,
    turns: u32,
}

impl Serve {
    pub(crate) fn new(granted: ServeLimits) -> Self {
        Self { granted, ops: HashMap::new(), ring: VecDeque::new(), waiting: 0, turns: 0 }
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

    /// The next chunk to be sent. Ends of those that cannot be served are appended to `out`.
    pub(crate) fn next(&mut self, shared: &Shared, out: &mut Vec<u8>) -> Option<Sending> {
        while let Some((Request { chunk, read }, cancelled)) = self.take() {
            let code = match shared.source(read.key) {
                _ if cancelled => EndCode::Cancelled,
                None => EndCode::UnknownKey,
                Some(memory) => {
                    if read.ranges.iter().all(|(offset, len)| memory.contains(*offset, u64::from(*len))) {
                        let mut spans = Spans::default();
                        read.ranges.iter().for_each(|(offset, len)| spans.push(*offset, *len));
                        return Some(Sending { chunk, key: read.key, memory, spans });
                    }
                    EndCode::Range
                }
            };
            out.extend_from_slice(&Header::End { chunk, code }.encode());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve() -> Serve {
        Serve::new(ServeLimits { chunk_queue: 64, chunk_bytes: 1 << 20, chunk_ranges: 16 })
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
