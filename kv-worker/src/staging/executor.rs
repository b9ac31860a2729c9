//! The thread that asks the device for copies and watches them.
#![allow(unsafe_code)] // `Device::copy` copies by raw addresses; its one call states its reason.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kv_proto::{CopyFailure, CopyId, CopyNews, CopyOrder, CopyStats, CopyWay};
use kv_transport::device::{Copying, Direction};

use super::ranges::Pairing;
use super::{Counters, StagingLimits, Tell};

/// Between two looks at copies that are under way; doubled up to the second of these as long as nothing ends.
const LOOK: Duration = Duration::from_micros(50);
const LOOK_MAX: Duration = Duration::from_millis(2);

/// A copy that the device has in hand.
struct UnderWay {
    copy: CopyId,
    copying: Box<dyn Copying>,
    stats: CopyStats,
    since: Instant,
    until: Instant,
    is_late: bool,
}

pub(super) struct Executor {
    pairing: Arc<Pairing>,
    limits: StagingLimits,
    tell: Tell,
    counters: Arc<Counters>,
    /// Orders that wait for their turn, until when.
    queue: VecDeque<(CopyOrder, Instant)>,
    under_way: Vec<UnderWay>,
    /// The highest number of an order so far.
    last: Option<u64>,
    /// Why the device is not asked for anything any more.
    lost: Option<String>,
    /// What is to be told.
    news: Vec<(CopyId, CopyNews)>,
}

fn failed(reason: CopyFailure, detail: impl Into<String>) -> CopyNews {
    CopyNews::Failed { reason, detail: detail.into() }
}

impl Executor {
    pub(super) fn new(pairing: Pairing, limits: StagingLimits, tell: Tell, counters: Arc<Counters>) -> Self {
        Self {
            pairing: Arc::new(pairing),
            limits,
            tell,
            counters,
            queue: VecDeque::new(),
            under_way: Vec::new(),
            last: None,
            lost: None,
            news: Vec::new(),
        }
    }

    /// Runs until nobody can order any more and nothing is under way.
    pub(super) fn run(mut self, orders: &Receiver<Vec<CopyOrder>>) {
        let mut pause = LOOK;
        let mut open = true;
        while open || !self.under_way.is_empty() {
            let idle = self.under_way.is_empty() && self.queue.is_empty();
            let next = if !open {
                std::thread::sleep(pause);
                Err(RecvTimeoutError::Timeout)
            } else if idle {
                orders.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                orders.recv_timeout(pause)
            };
            match next {
                Ok(new) => self.take(new),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    open = false;
                    for (order, _) in std::mem::take(&mut self.queue) {
                        self.news
                            .push((order.copy, failed(CopyFailure::Closed, "the worker is shutting down")));
                    }
                }
            }
            self.look();
            self.begin();
            pause = if self.news.is_empty() { (pause * 2).min(LOOK_MAX) } else { LOOK };
            if !self.news.is_empty() {
                (self.tell)(std::mem::take(&mut self.news));
            }
        }
    }

    fn take(&mut self, new: Vec<CopyOrder>) {
        let until = Instant::now() + self.limits.copy;
        for order in new {
            if self.last.is_some_and(|last| order.number <= last) {
                // The copy that it names may be under way: to answer would be to say that it is over.
                self.counters.repeated.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(copy = %order.copy, order.number, "an order came again; it is not followed");
                continue;
            }
            self.last = Some(order.number);
            self.queue.push_back((order, until));
        }
    }

    /// Begins copies whose turn has come. One that fails at once makes room for the next.
    fn begin(&mut self) {
        let now = Instant::now();
        while let Some((_, until)) = self.queue.front() {
            let is_due = *until <= now;
            if !is_due && self.under_way.len() >= self.limits.copies {
                return;
            }
            let Some((order, until)) = self.queue.pop_front() else { return };
            if is_due {
                let detail = format!("it waited for its turn for {:?}", self.limits.copy);
                self.news.push((order.copy, failed(CopyFailure::NotBegun, detail)));
            } else {
                self.start(&order, until);
            }
        }
    }

    fn start(&mut self, order: &CopyOrder, until: Instant) {
        let copy = order.copy;
        if let Some(why) = &self.lost {
            return self.news.push((copy, failed(CopyFailure::Device, why.clone())));
        }
        let ranges = match self.pairing.ranges(order) {
            Ok(ranges) => ranges,
            Err(why) => return self.news.push((copy, failed(CopyFailure::BadBlocks, why))),
        };
        let direction = match order.way {
            CopyWay::Save => Direction::ToHost,
            CopyWay::Restore => Direction::ToDevice,
        };
        let bytes = ranges.iter().map(|range| range.len as u64).sum();
        let stats = CopyStats { bytes, ranges: ranges.len() as u64, copy_us: 0 };
        let since = Instant::now();
        let pairing = Arc::clone(&self.pairing);
        // SAFETY: every range lies in a block of the memories that `pairing` keeps alive, and this value keeps it until the copy
        // is over (see `give_up` for when that is never known). Written ranges do not overlap. The scheduler's side gives the
        // blocks of an order to nobody else until every rank has said that it is over; the memories of KV caches are
        // reached by copies alone, so that no reference to their bytes exists.
        let started = catch_unwind(AssertUnwindSafe(|| unsafe { pairing.device().copy(direction, &ranges) }));
        self.counters.begun.fetch_add(1, Ordering::Relaxed);
        match started {
            Ok(Ok(copying)) => {
                self.under_way.push(UnderWay { copy, copying, stats, since, until, is_late: false });
            }
            Ok(Err(error)) => {
                self.counters.over.fetch_add(1, Ordering::Relaxed);
                self.news.push((copy, failed(CopyFailure::Device, error.to_string())));
            }
            Err(_) => self.give_up(copy),
        }
    }

    /// The device's code, which is not ours, panicked: nobody knows whether it still copies, and nobody will. The blocks
    /// stay out of use, the memory is never freed, and nothing more is asked for.
    fn give_up(&mut self, copy: CopyId) {
        std::mem::forget(Arc::clone(&self.pairing));
        let device = self.pairing.device().id();
        tracing::error!(%device, %copy, "the device's code panicked; no more copies are asked for");
        self.lost = Some(format!("device {device} is lost: its code panicked"));
        self.news.push((copy, CopyNews::Late));
    }

    /// Looks which copies are over, and which are late.
    fn look(&mut self) {
        let now = Instant::now();
        for mut one in std::mem::take(&mut self.under_way) {
            let word = match catch_unwind(AssertUnwindSafe(|| one.copying.poll())) {
                Ok(Ok(true)) => {
                    let took = u64::try_from(one.since.elapsed().as_micros()).unwrap_or(u64::MAX);
                    CopyNews::Done(CopyStats { copy_us: took, ..one.stats })
                }
                Ok(Ok(false)) => {
                    if !one.is_late && one.until <= now {
                        one.is_late = true;
                        self.news.push((one.copy, CopyNews::Late));
                    }
                    self.under_way.push(one);
                    continue;
                }
                Ok(Err(error)) => failed(CopyFailure::Device, error.to_string()),
                Err(_) => {
                    self.give_up(one.copy);
                    continue;
                }
            };
            self.counters.over.fetch_add(1, Ordering::Relaxed);
            self.news.push((one.copy, word));
        }
    }
}
