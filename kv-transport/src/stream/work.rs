//! A read as it is being worked on. With several connections to a peer each cuts off the next piece when it has room, so
//! that the faster one does more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::commands::AcceptedRead;
use super::plan::{Cursor, Cut, Intervals, Plan};
use crate::contract::OpId;
use crate::device::Device;

/// So much keeps a connection busy.
const BUSY_BYTES: u64 = 1 << 20;

/// See the module.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) plan: Plan,
    cursor: Mutex<Cursor>,
    pub(crate) submitted: Instant,
    /// When bytes came last, over whichever connection: microseconds after `submitted`.
    progress: AtomicU64,
}

impl Work {
    /// A read of which so much has been cut.
    pub(crate) fn new(plan: Plan, cursor: Cursor, submitted: Instant) -> Self {
        Self { plan, cursor: Mutex::new(cursor), submitted, progress: AtomicU64::new(0) }
    }

    fn cursor(&self) -> MutexGuard<'_, Cursor> {
        self.cursor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request, as in [`Plan::cut`].
    pub(crate) fn cut(&self, max_bytes: u32, max_ranges: usize) -> Option<Cut> {
        self.plan.cut(&mut self.cursor(), max_bytes, max_ranges)
    }

    /// The device to which the next bytes to be cut go, if they do.
    pub(crate) fn next_device(&self) -> Option<&Arc<dyn Device>> {
        self.plan.next_device(&self.cursor())
    }

    /// Whether everything has been cut.
    pub(crate) fn is_cut(&self) -> bool {
        self.plan.is_cut(&self.cursor())
    }

    /// Bytes that have been cut so far.
    pub(crate) fn taken(&self) -> u64 {
        self.cursor().taken()
    }

    /// How many bytes one of so many connections may have asked for and not received, so that there is something left for the
    /// others: its part of what is still to be cut, and enough to keep it busy to the end.
    pub(crate) fn part(&self, shares: usize) -> u64 {
        let left = self.plan.total().saturating_sub(self.taken());
        BUSY_BYTES.max(left / shares.max(1) as u64)
    }

    /// Bytes came.
    pub(crate) fn note(&self, now: Instant) {
        let after = now.saturating_duration_since(self.submitted).as_micros();
        self.progress.fetch_max(u64::try_from(after).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// When bytes came last; the beginning if there were none.
    pub(crate) fn last_byte(&self) -> Instant {
        self.submitted + Duration::from_micros(self.progress.load(Ordering::Relaxed))
    }
}

/// What a connection has done of a read that ends.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) op: OpId,
    pub(crate) serial: u64,
    pub(crate) arrived: Intervals,
}

impl Share {
    /// Nothing of a read.
    pub(crate) fn none(read: &AcceptedRead) -> Self {
        Self { op: read.op, serial: read.serial, arrived: vec![] }
    }
}
