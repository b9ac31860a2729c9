//! The sending half of a connection.
//!
//! In each round go out: what controls the connection, some messages, and one chunk of data. So data does not hold
//! back messages for longer than one chunk takes, and messages do not hold back data.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::socket::Socket;
use tokio::time::Instant;

use super::frame::Header;
use super::serve::{Sending, Serve};
use super::shared::Shared;
use super::shortcut::Shortcut;
use super::vectored;
use crate::contract::PeerId;
use crate::error::LossReason;

/// Bytes of messages in one round.
const ROUND_MESSAGE_BYTES: usize = 64 << 10;
/// Messages up to this length are copied together, which costs less than handling them one by one.
const SMALL_MESSAGE_BYTES: usize = 4 << 10;

/// A chunk of up to so many bytes is copied once more: that costs less than another call.
const SMALL_DATA_BYTES: u64 = 16 << 10;

/// How a turn of a half ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There is more to do, and it is others' turn.
    More,
    /// The socket takes or gives nothing now.
    Blocked,
    /// Nothing to do.
    Idle,
}

/// Bytes that are sent as they are, and the messages that end with them.
#[derive(Default)]
struct Piece {
    bytes: Vec<u8>,
    messages: usize,
    message_bytes: usize,
}

/// See the module.
pub(crate) struct Writer {
    shared: Arc<Shared>,
    peer: PeerId,
    shortcut: Arc<Shortcut>,
    /// Frames that control the connection. Bounded, because each kind is: requests by the peer's grant, ends by
    /// ours, pings and pongs by one, cancels by the operations.
    pub(crate) control: Vec<u8>,
    messages: VecDeque<Vec<u8>>,
    ping: bool,
    pong: Option<u64>,
    /// The round being sent; `sent` counts bytes of its first piece.
    round: VecDeque<Piece>,
    sent: usize,
    data: Option<Sending>,
    blocked_since: Option<Instant>,
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>, peer: PeerId, shortcut: Arc<Shortcut>) -> Self {
        Self {
            shared,
            peer,
            shortcut,
            control: vec![],
            messages: VecDeque::new(),
            ping: false,
            pong: None,
            round: VecDeque::new(),
            sent: 0,
            data: None,
            blocked_since: None,
        }
    }

    pub(crate) fn message(&mut self, message: Vec<u8>) {
        self.messages.push_back(message);
    }

    /// Asks for a sign of life; once, however often this is called before it is sent.
    pub(crate) fn ping(&mut self) {
        self.ping = true;
    }

    /// Gives a sign of life. Only the latest ping is answered if several wait.
    pub(crate) fn pong(&mut self, id: u64) {
        self.pong = Some(id);
    }

    /// Lets go of the chunk that is being sent.
    pub(crate) fn abandon(&mut self) {
        self.data = None;
    }

    /// Since when the socket has taken nothing, although something waits.
    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since
    }

    /// Sends until the socket is full, the budget is used up, or nothing is left.
    pub(crate) fn turn(
        &mut self,
        stream: &Socket,
        serve: &mut Serve,
        now: Instant,
        budget: usize,
    ) -> Result<Turn, LossReason> {
        let shortcut = Arc::clone(&self.shortcut);
        let mut posts = shortcut.lock();
        let rest = posts.take_rest();
        if !rest.is_empty() {
            // Callers write only when nothing else is unfinished.
            self.round.push_front(Piece { bytes: rest, ..Piece::default() });
        }
        let turn = self.send_all(stream, serve, now, budget);
        posts.set_idle(matches!(turn, Ok(Turn::Idle)));
        turn
    }

    fn send_all(
        &mut self,
        stream: &Socket,
        serve: &mut Serve,
        now: Instant,
        mut budget: usize,
    ) -> Result<Turn, LossReason> {
        loop {
            if self.round.is_empty() && self.data.is_none() {
                self.fill(serve);
            }
            if self.round.is_empty() && self.data.is_none() {
                self.blocked_since = None;
                return Ok(Turn::Idle);
            }
            match self.send(stream) {
                Ok(sent) => {
                    self.blocked_since = None;
                    self.advance(sent);
                    budget = budget.saturating_sub(sent);
                    if budget == 0 {
                        return Ok(Turn::More);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked_since.get_or_insert(now);
                    return Ok(Turn::Blocked);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken(&error)),
            }
        }
    }

    fn fill(&mut self, serve: &mut Serve) {
        if std::mem::take(&mut self.ping) {
            self.control.extend_from_slice(&Header::Ping { id: 0 }.encode());
        }
        if let Some(id) = self.pong.take() {
            self.control.extend_from_slice(&Header::Pong { id }.encode());
        }
        let mut piece = Piece { bytes: std::mem::take(&mut self.control), ..Piece::default() };
        let mut room = ROUND_MESSAGE_BYTES;
        while room > 0
            && let Some(message) = self.messages.pop_front()
        {
            room = room.saturating_sub(message.len().max(1));
            piece.bytes.extend_from_slice(&Header::Message { len: message.len() as u32 }.encode());
            if message.len() <= SMALL_MESSAGE_BYTES {
                piece.messages += 1;
                piece.message_bytes += message.len();
                piece.bytes.extend_from_slice(&message);
            } else {
                self.round.push_back(std::mem::take(&mut piece));
                self.round.push_back(Piece { message_bytes: message.len(), messages: 1, bytes: message });
            }
        }
        self.data = serve.next(&self.shared, &mut piece.bytes);
        if let Some(data) = &self.data {
            let header = Header::Data { chunk: data.chunk, len: data.spans.left() as u32 };
            piece.bytes.extend_from_slice(&header.encode());
            if copy_small(data, &mut piece.bytes) {
                // Decided after the bytes were taken: what happens to the region now does not concern them.
                piece.bytes.extend_from_slice(&data.end(&self.shared).encode());
                self.data = None;
            }
        }
        if !piece.bytes.is_empty() {
            self.round.push_back(piece);
        }
    }

    fn send(&self, stream: &Socket) -> io::Result<usize> {
        let skip = |index: usize| if index == 0 { self.sent } else { 0 };
        let heads = self.round.iter().enumerate().map(|(index, piece)| &piece.bytes[skip(index)..]);
        vectored::send(stream, heads, self.data.as_ref().map(|data| (&data.memory, &data.spans)))
    }

    fn advance(&mut self, mut bytes: usize) {
        let (mut messages, mut message_bytes) = (0, 0);
        while bytes > 0
            && let Some(piece) = self.round.front()
        {
            let left = piece.bytes.len() - self.sent;
            if bytes < left {
                self.sent += bytes;
                bytes = 0;
            } else {
                bytes -= left;
                self.sent = 0;
                messages += piece.messages;
                message_bytes += piece.message_bytes;
                self.round.pop_front();
            }
        }
        if messages > 0 {
            self.shared.sent(self.peer, messages, message_bytes);
        }
        if let Some(data) = &mut self.data {
            data.spans.advance(bytes as u64);
            if data.spans.left() == 0 {
                let mut bytes = data.end(&self.shared).encode().to_vec();
                bytes.append(&mut self.control);
                self.data = None;
                self.control = bytes;
            }
        }
    }
}

/// Copies a small chunk, so that it goes out together with its end.
fn copy_small(data: &Sending, out: &mut Vec<u8>) -> bool {
    if data.spans.left() > SMALL_DATA_BYTES || data.memory.on_device().is_some() {
        return false;
    }
    let start = out.len();
    for (offset, len) in data.spans.rest() {
        let at = out.len();
        out.resize(at + len as usize, 0);
        if data.memory.read(offset, &mut out[at..]).is_err() {
            // The ordinary way tells what is wrong.
            out.truncate(start);
            return false;
        }
    }
    true
}

/// A failed connection in the words of the contract. A reset is what a killed process leaves behind.
pub(crate) fn broken(error: &io::Error) -> LossReason {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            LossReason::ClosedByPeer
        }
        kind => LossReason::Broken { kind, code: error.raw_os_error() },
    }
}
