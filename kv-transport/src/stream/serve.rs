//! The serving side of a connection: requests of the peer, waiting for their turn.

use std::collections::VecDeque;

use super::frame::{EndCode, Header, ReadBody, ServeLimits};
use super::key::Key;
use super::shared::Shared;
use super::spans::Spans;
use crate::memory::Memory;

struct Request {
    chunk: u64,
    read: ReadBody,
    cancelled: bool,
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
    queue: VecDeque<Request>,
}

impl Serve {
    pub(crate) fn new(granted: ServeLimits) -> Self {
        Self { granted, queue: VecDeque::new() }
    }

    pub(crate) fn granted(&self) -> ServeLimits {
        self.granted
    }

    /// Queues a request, unless there are more than were granted.
    pub(crate) fn add(&mut self, chunk: u64, read: ReadBody) -> Result<(), &'static str> {
        if self.queue.len() >= self.granted.chunk_queue as usize {
            return Err("more reads at a time than granted");
        }
        self.queue.push_back(Request { chunk, read, cancelled: false });
        Ok(())
    }

    /// Marks what waits of an operation. Each request keeps its place until its end is sent, so that a peer that
    /// asks and cancels without ever reading the answers cannot pile them up here.
    pub(crate) fn cancel(&mut self, op: u64) {
        for request in self.queue.iter_mut().filter(|request| request.read.op == op) {
            request.cancelled = true;
        }
    }

    /// The next chunk to be sent. Ends of those that cannot be served are appended to `out`.
    pub(crate) fn next(&mut self, shared: &Shared, out: &mut Vec<u8>) -> Option<Sending> {
        while let Some(Request { chunk, read, cancelled }) = self.queue.pop_front() {
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
