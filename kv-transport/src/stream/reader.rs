//! The receiving half of a connection.
//!
//! While data may come, never more is received than what is known to come: the rest of a body, and the header behind it. So
//! the bytes of a chunk go from the socket to their destination without a stop in a buffer. Otherwise a small frame is
//! received at once with its header.

use std::io;
use std::sync::Arc;

use super::socket::Socket;
use tokio::time::Instant;

use super::frame::{HEADER_BYTES, Header, decode_read};
use super::reads::Reads;
use super::serve::Serve;
use super::shared::{Inbox, Shared};
use super::vectored;
use super::writer::{Turn, Writer, broken};
use crate::contract::PeerId;
use crate::error::LossReason;

/// Buffer for data that nobody wants any more.
const SCRATCH_BYTES: usize = 64 << 10;
/// What is received at once while no data can come.
const AHEAD_BYTES: usize = 512;
/// A body grows by this much as it arrives, so that a length alone costs no memory.
const GROWTH_BYTES: usize = 64 << 10;

enum Body {
    None,
    /// A message that may not be received yet, because too many wait.
    Held {
        len: usize,
    },
    Bytes {
        of: Header,
        bytes: Vec<u8>,
        filled: usize,
        len: usize,
    },
    Data {
        chunk: u64,
        left: u64,
    },
}

/// See the module.
pub(crate) struct Reader {
    shared: Arc<Shared>,
    peer: PeerId,
    /// Whether messages may come.
    messages: bool,
    /// Bytes whose meaning is not known yet. Empty while a body is being received.
    head: [u8; AHEAD_BYTES],
    filled: usize,
    body: Body,
    /// The chunk whose end has to come next.
    ending: Option<u64>,
    scratch: Vec<u8>,
}

/// The halves that a frame can concern.
pub(crate) struct Others<'a> {
    pub(crate) reads: &'a mut Reads,
    pub(crate) serve: &'a mut Serve,
    pub(crate) writer: &'a mut Writer,
}

impl Reader {
    pub(crate) fn new(shared: Arc<Shared>, peer: PeerId, messages: bool) -> Self {
        let head = [0; AHEAD_BYTES];
        Self { shared, peer, messages, head, filled: 0, body: Body::None, ending: None, scratch: vec![] }
    }

    /// Receives until the socket is empty or the budget is used up; `Idle` means that messages have to be taken
    /// before more may be received. The flag says whether anything arrived.
    pub(crate) fn turn(
        &mut self,
        stream: &Socket,
        others: &mut Others<'_>,
        now: Instant,
        mut budget: usize,
    ) -> Result<(Turn, bool), LossReason> {
        let mut any = false;
        loop {
            if let Body::Held { len } = self.body {
                match self.shared.inbox(self.peer) {
                    Inbox::Full => return Ok((Turn::Idle, any)),
                    Inbox::Open if len == 0 => {
                        self.body = Body::None;
                        self.shared.deliver(self.peer, vec![]);
                        self.parse(others).map_err(LossReason::Protocol)?;
                        continue;
                    }
                    Inbox::Open => {
                        self.begin_bytes(Header::Message { len: len as u32 }, len);
                        self.parse(others).map_err(LossReason::Protocol)?;
                        continue;
                    }
                }
            }
            if budget == 0 {
                return Ok((Turn::More, any));
            }
            match self.receive(stream, others.reads) {
                Ok(0) => return Err(LossReason::ClosedByPeer),
                Ok(bytes) => {
                    any = true;
                    budget = budget.saturating_sub(bytes);
                    self.advance(bytes, others, now).map_err(LossReason::Protocol)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok((Turn::Blocked, any)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken(&error)),
            }
        }
    }

    fn receive(&mut self, stream: &Socket, reads: &mut Reads) -> io::Result<usize> {
        match &mut self.body {
            Body::None | Body::Held { .. } => {
                let end = if reads.expects_data() { HEADER_BYTES } else { AHEAD_BYTES };
                vectored::receive(stream, None, &mut self.head[self.filled..end])
            }
            Body::Bytes { bytes, filled, len, .. } => {
                let target = (*len).min(*filled + GROWTH_BYTES);
                if bytes.len() < target {
                    bytes.resize(target, 0);
                }
                let mut pieces = [
                    io::IoSliceMut::new(&mut bytes[*filled..]),
                    io::IoSliceMut::new(&mut self.head[..HEADER_BYTES]),
                ];
                let known = if target == *len { 2 } else { 1 };
                vectored::read(stream, &mut pieces[..known])
            }
            // After data come its end and then another header.
            Body::Data { chunk, left } => match reads.destination(*chunk) {
                Some(to) => {
                    let behind = &mut self.head[..2 * HEADER_BYTES];
                    vectored::receive(stream, Some((&to.memory, &to.spans)), behind)
                }
                None => {
                    self.scratch.resize(SCRATCH_BYTES, 0);
                    let take = usize::try_from(*left).unwrap_or(usize::MAX).min(SCRATCH_BYTES);
                    let mut pieces = [
                        io::IoSliceMut::new(&mut self.scratch[..take]),
                        io::IoSliceMut::new(&mut self.head[..2 * HEADER_BYTES]),
                    ];
                    let known = if take as u64 == *left { 2 } else { 1 };
                    vectored::read(stream, &mut pieces[..known])
                }
            },
        }
    }

    fn advance(&mut self, bytes: usize, others: &mut Others<'_>, now: Instant) -> Result<(), &'static str> {
        let mut bytes = bytes;
        match &mut self.body {
            Body::None | Body::Held { .. } => {}
            Body::Bytes { filled, len, .. } => {
                let here = bytes.min(*len - *filled);
                *filled += here;
                bytes -= here;
                if filled == len {
                    self.finish_bytes(others)?;
                }
            }
            Body::Data { chunk, left } => {
                let here = (*left).min(bytes as u64);
                others.reads.received(*chunk, here, now);
                *left -= here;
                bytes -= here as usize;
                if *left == 0 {
                    self.ending = Some(*chunk);
                    self.body = Body::None;
                }
            }
        }
        self.filled += bytes;
        self.parse(others)
    }

    /// Makes sense of what is in `head`.
    fn parse(&mut self, others: &mut Others<'_>) -> Result<(), &'static str> {
        loop {
            match &mut self.body {
                Body::None if self.filled >= HEADER_BYTES => {
                    let Some(head) = self.head.first_chunk::<HEADER_BYTES>() else { return Ok(()) };
                    let header = Header::decode(head, others.serve.granted())?;
                    self.drop_front(HEADER_BYTES);
                    self.frame(header, others)?;
                }
                Body::Bytes { bytes, filled, len, .. } if self.filled > 0 => {
                    let here = self.filled.min(*len - *filled);
                    bytes.truncate(*filled);
                    bytes.extend_from_slice(&self.head[..here]);
                    *filled += here;
                    let whole = filled == len;
                    self.drop_front(here);
                    if whole {
                        self.finish_bytes(others)?;
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    fn drop_front(&mut self, bytes: usize) {
        self.head.copy_within(bytes..self.filled, 0);
        self.filled -= bytes;
    }

    fn frame(&mut self, header: Header, others: &mut Others<'_>) -> Result<(), &'static str> {
        if let Some(chunk) = self.ending.take()
            && !matches!(header, Header::End { chunk: ended, .. } if ended == chunk)
        {
            return Err("data without its end");
        }
        match header {
            Header::Read { len, .. } => self.begin_bytes(header, len as usize),
            Header::Message { .. } if !self.messages => return Err("a message on an added connection"),
            Header::Message { len } => self.body = Body::Held { len: len as usize },
            Header::Data { chunk, len } => {
                others.reads.begin_data(chunk, len)?;
                self.body = Body::Data { chunk, left: u64::from(len) };
            }
            Header::End { chunk, code } => others.reads.end(chunk, code, &mut others.writer.control)?,
            Header::Ping { id } => others.writer.pong(id),
            Header::Pong { .. } => {}
            Header::Cancel { op } => others.serve.cancel(op),
        }
        Ok(())
    }

    fn begin_bytes(&mut self, of: Header, len: usize) {
        self.body = Body::Bytes { of, bytes: vec![], filled: 0, len };
    }

    fn finish_bytes(&mut self, others: &mut Others<'_>) -> Result<(), &'static str> {
        if let Body::Bytes { of, bytes, .. } = std::mem::replace(&mut self.body, Body::None) {
            match of {
                Header::Read { chunk, .. } => {
                    others.serve.add(chunk, decode_read(&bytes, others.serve.granted())?)?;
                }
                _ => self.shared.deliver(self.peer, bytes),
            }
        }
        Ok(())
    }
}
