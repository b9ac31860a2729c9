//! The short way of a small read: the caller's own thread writes the request, so that one wake-up of the IO thread is
//! saved before the peer even hears of it.
//!
//! Whoever holds the lock may write to the socket. The connection's task holds it while it writes, and says when it lets go
//! whether it left a frame unfinished. A caller only ever tries for it; if it cannot have it, or the read is not small, the
//! read goes the ordinary way. What was posted is collected by the task before it looks at what came back, before it obeys
//! a cancel and before it sleeps.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::commands::{AcceptedRead, after};
use super::frame::{ServeLimits, encode_read};
use super::plan::{Cursor, Cut, Plan};
use super::socket::Socket;

/// Requests that may be posted and not have ended. They are kept free of what the peer grants.
const POSTED_MAX: u32 = 16;
/// Largest read that is posted: copying more than this takes longer than the wake-up that is saved.
const POSTED_BYTES: u32 = 64 << 10;
/// Most ranges of such a read.
const POSTED_RANGES: u32 = 64;
/// Chunks with this bit were numbered here, others by the task. They are operations of one chunk each.
const POSTED: u64 = 1 << 63;

/// Whether a chunk's number was given out here.
pub(crate) fn is_posted(chunk: u64) -> bool {
    chunk & POSTED != 0
}

/// How many of the peer's granted requests are kept for posting.
fn kept(granted: ServeLimits) -> u32 {
    if granted.chunk_queue > 2 * POSTED_MAX { POSTED_MAX } else { 0 }
}

/// A read whose request is on its way already.
#[derive(Debug)]
pub(crate) struct Posted {
    /// Of the chunk and of the operation.
    pub(crate) number: u64,
    pub(crate) read: AcceptedRead,
    pub(crate) cut: Cut,
}

#[derive(Debug, Default)]
pub(crate) struct Posts {
    /// There while the connection stands.
    socket: Option<Arc<Socket>>,
    granted: Option<ServeLimits>,
    /// No frame is unfinished and none waits.
    idle: bool,
    /// What is left of a frame that the socket did not take whole.
    rest: Vec<u8>,
    posted: VecDeque<Posted>,
    numbers: u64,
    /// When the task, which sleeps, looks again by itself.
    wakes: Option<Instant>,
}

impl Posts {
    /// What a caller could not finish. It has to be sent before anything else.
    pub(crate) fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.rest)
    }

    /// The task lets go of the socket: whether everything has been sent.
    pub(crate) fn set_idle(&mut self, idle: bool) {
        self.idle = idle;
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Shortcut {
    posts: Mutex<Posts>,
    /// Posted and not ended.
    open: AtomicU32,
}

impl Shortcut {
    /// The right to write to the socket. It is held over writes that do not wait and over looks at what is shared, not longer.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Posts> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection stands. Returns how many of the granted requests are kept for posting.
    pub(crate) fn open(&self, socket: &Arc<Socket>, granted: ServeLimits) -> u32 {
        let kept = kept(granted);
        if kept > 0 {
            let mut posts = self.lock();
            posts.socket = Some(Arc::clone(socket));
            posts.granted = Some(granted);
        }
        kept
    }

    /// The connection is gone. Returns what was posted and not collected.
    pub(crate) fn close(&self) -> VecDeque<Posted> {
        let mut posts = self.lock();
        posts.socket = None;
        std::mem::take(&mut posts.posted)
    }

    /// What was posted since the last call.
    pub(crate) fn collect(&self) -> VecDeque<Posted> {
        std::mem::take(&mut self.lock().posted)
    }

    /// The task is about to sleep until then; it must not if this says `false`.
    pub(crate) fn may_sleep(&self, until: Instant) -> bool {
        let mut posts = self.lock();
        posts.wakes = Some(until);
        posts.posted.is_empty() && posts.rest.is_empty()
    }

    /// Whether something is posted and has not ended. It is counted before it is written.
    pub(crate) fn is_used(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    /// A posted chunk ended.
    pub(crate) fn ended(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Prepares to post a read, if it is small and the way is free. Nothing has happened until it is sent.
    pub(crate) fn prepare(&self, plan: &Plan) -> Option<Prepared<'_>> {
        let mut posts = match self.posts.try_lock() {
            Ok(posts) => posts,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return None,
        };
        let granted = posts.granted.filter(|_| posts.idle && posts.socket.is_some())?;
        let mut cursor = Cursor::default();
        let bytes = granted.chunk_bytes.min(POSTED_BYTES);
        // What goes to a device needs a slot first.
        if plan.to_device()
            || plan.total() > u64::from(bytes)
            || self.open.load(Ordering::Relaxed) >= POSTED_MAX
        {
            return None;
        }
        let cut = plan.cut(&mut cursor, bytes, granted.chunk_ranges.min(POSTED_RANGES) as usize)?;
        if !plan.is_cut(&cursor) {
            return None;
        }
        posts.numbers += 1;
        let number = POSTED | posts.numbers;
        Some(Prepared { shortcut: self, posts, number, cursor, cut })
    }
}

/// A read that can be posted now, since the socket is held.
pub(crate) struct Prepared<'a> {
    shortcut: &'a Shortcut,
    posts: MutexGuard<'a, Posts>,
    number: u64,
    cursor: Cursor,
    cut: Cut,
}

impl Prepared<'_> {
    /// How much of the plan is in the request: all of it.
    pub(crate) fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Writes the request. Says whether the task has to be woken, because it would sleep beyond a limit of the read or has
    /// to finish the frame.
    pub(crate) fn send(self, read: AcceptedRead) -> bool {
        let Self { shortcut, mut posts, number, cut, .. } = self;
        let mut frame = vec![];
        encode_read(&mut frame, number, number, cut.key, &cut.remote);
        let alarm = after(read.work.submitted, read.limits.total.min(read.limits.stall));
        shortcut.open.fetch_add(1, Ordering::AcqRel);
        posts.posted.push_back(Posted { number, read, cut });
        // A connection that breaks is the task's to notice: its socket says so.
        let sent = posts.socket.as_ref().and_then(|socket| socket.try_write(&frame).ok()).unwrap_or(0);
        if sent < frame.len() {
            posts.rest = frame.split_off(sent);
            posts.idle = false;
            return true;
        }
        posts.wakes.is_some_and(|wakes| alarm < wakes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::time::Duration;

    use tokio::net::TcpStream;

    use super::*;
    use crate::contract::{Event, OpId, ReadLimits, ReadPart, ReadRange, ReadRequest};
    use crate::memory::Memory;
    use crate::stream::connection::Connection;
    use crate::stream::frame::{EndCode, HEADER_BYTES, Header, PREFACE_BYTES, Preface};
    use crate::stream::shared::Shared;
    use crate::tcp::TcpConfig;

    const LIMIT: Duration = Duration::from_secs(20);
    /// Ranges of a read, and bytes of each. They are apart, so that each stands in the request.
    const RANGES: u64 = 64;
    const BYTES: u64 = 8;

    /// Two ends of a connection whose buffers take next to nothing.
    fn narrow() -> (Socket, std::net::TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let far = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        far.set_recv_buffer_size(1).unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        far.connect(&address.into()).unwrap();
        let near = listener.accept().unwrap().0;
        socket2::SockRef::from(&near).set_send_buffer_size(1).unwrap();
        near.set_nonblocking(true).unwrap();
        let far = std::net::TcpStream::from(far);
        far.set_read_timeout(Some(LIMIT)).unwrap();
        (Socket::Tcp(TcpStream::from_std(near).unwrap()), far)
    }

    /// Answers requests until as many have come. Each byte says which request it is of.
    fn answer(mut far: std::net::TcpStream, count: usize, granted: ServeLimits) -> std::net::TcpStream {
        let mut preface = [0; PREFACE_BYTES];
        far.read_exact(&mut preface).unwrap();
        for number in 1..=count {
            let mut head = [0; HEADER_BYTES];
            far.read_exact(&mut head).unwrap();
            let Ok(Header::Read { chunk, len }) = Header::decode(&head, granted) else { panic!("{head:?}") };
            assert!(is_posted(chunk), "request {number} went the ordinary way");
            let mut body = vec![0; len as usize];
            far.read_exact(&mut body).unwrap();
            let read = crate::stream::frame::decode_read(&body, granted).unwrap();
            assert_eq!(read.ranges.len() as u64, RANGES);
            let len = (RANGES * BYTES) as u32;
            far.write_all(&Header::Data { chunk, len }.encode()).unwrap();
            far.write_all(&vec![number as u8; len as usize]).unwrap();
            far.write_all(&Header::End { chunk, code: EndCode::Done }.encode()).unwrap();
        }
        far
    }

    #[tokio::test]
    async fn what_the_socket_did_not_take_of_a_request_follows_and_the_read_completes() {
        let (near, far) = narrow();
        let shared = Arc::new(Shared::new(TcpConfig::default().limits(), None));
        let link = shared.accepted(None).unwrap();
        let (peer, shortcut) = (link.peer, Arc::clone(&link.shortcut));
        let granted = ServeLimits { chunk_queue: 128, chunk_bytes: 1 << 20, chunk_ranges: 1024 };
        let own = Preface { limits: granted, further: 0, nonce: [1; 16], expected: [0; 16] };
        let connection = Connection::new(Arc::clone(&shared), link);
        let task = tokio::spawn(connection.run_accepted(near, own, granted));
        let start = Instant::now();
        let is_idle = || {
            let posts = shortcut.lock();
            posts.idle && posts.socket.is_some()
        };
        while !is_idle() {
            assert!(start.elapsed() < LIMIT);
            tokio::task::yield_now().await;
        }

        let memory = Memory::allocate(1 << 20).unwrap();
        let region = shared.register(memory.clone(), 7).unwrap();
        let key = shared.key(region).unwrap();
        let limits = ReadLimits { total: LIMIT, stall: LIMIT };
        // The task runs in this thread and so not now: what a post leaves stays where it can be seen.
        let (mut count, mut rest) = (0, 0);
        while rest == 0 {
            count += 1;
            assert!(count <= u64::from(POSTED_MAX), "the socket took everything");
            let range = |index| ReadRange {
                remote_offset: index * 2 * BYTES,
                local_offset: (count * RANGES + index) * 2 * BYTES,
                len: BYTES,
            };
            let part = ReadPart { key: key.clone(), region, ranges: (0..RANGES).map(range).collect() };
            shared.read(ReadRequest { op: OpId(count), peer, parts: vec![part], limits }).unwrap();
            rest = shortcut.lock().rest.len();
        }

        let far = std::thread::spawn(move || answer(far, count as usize, granted));
        assert_eq!(shared.next_event().await, Some(Event::Accepted { peer }));
        for op in 1..=count {
            let event = tokio::time::timeout(LIMIT, shared.next_event()).await.unwrap();
            let Some(Event::ReadCompleted { op: ended, outcome }) = event else { panic!("{event:?}") };
            assert_eq!((ended, outcome.result), (OpId(op), Ok(())), "{rest} bytes were left");
            let mut bytes = [0; BYTES as usize];
            for index in 0..RANGES {
                memory.read((op * RANGES + index) * 2 * BYTES, &mut bytes).unwrap();
                assert_eq!(bytes, [op as u8; BYTES as usize], "read {op}, range {index}");
            }
        }
        drop(far.join().unwrap());
        tokio::time::timeout(LIMIT, task).await.unwrap().unwrap();
    }
}
