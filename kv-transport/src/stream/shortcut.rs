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
