//! Host staging: copies between the engine's KV cache on a device and the host pool that is registered.
//!
//! The scheduler's process orders them (`kv_sched::Staging`); a thread of their own asks the device for them, a few at a
//! time, and says how each ended. Neither the engine's step nor the driver, with its renewals, waits for a copy.
//!
//! A copy that was asked for is watched until it has ended, however late: only then is its last word said. Its memory is kept
//! alive as long, also when the worker is gone.

mod executor;
mod ranges;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kv_proto::layout::LayoutError;
use kv_proto::{BlockLayout, CopyId, CopyNews, CopyOrder};
use kv_transport::{DeviceId, Memory, MemoryError};
use thiserror::Error;

use executor::Executor;
use ranges::Pairing;

/// How long dropping a [`Stager`] waits for its thread.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// Bounds of staging on one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagingLimits {
    /// Most copies that the device has in hand at once; others wait for their turn.
    pub copies: usize,
    /// How long one may take, its wait included. One that has not begun by then fails; of one that has, it is told that it is
    /// late.
    pub copy: Duration,
}

impl Default for StagingLimits {
    /// Some copies keep a device busy. One of gigabytes takes a tenth of a second: seconds mean that the device is stuck.
    fn default() -> Self {
        Self { copies: 4, copy: Duration::from_secs(10) }
    }
}

/// The engine's KV cache on its device.
#[derive(Debug, Clone)]
pub struct DeviceCache {
    /// Where its blocks lie: as in the host pool, but for their number, places and distances.
    pub layout: BlockLayout,
    /// The memories that the layout speaks of, by index, all on one device.
    pub memories: Vec<Memory>,
    /// Bounds.
    pub limits: StagingLimits,
}

/// The host pool, which is what peers see.
#[derive(Debug, Clone)]
pub struct HostPool {
    /// Where its blocks lie.
    pub layout: BlockLayout,
    /// The memories that the layout speaks of, by index. Memory that the device has pinned is copied without a stop.
    pub memories: Vec<Memory>,
}

/// Why copies cannot be made between a cache and a host pool.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StagerError {
    /// A limit that must not be zero is.
    #[error("{field} is 0")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// The cache's layout cannot be.
    #[error("the cache on the device: {0}")]
    Layout(LayoutError),
    /// The host pool's layout cannot be.
    #[error("the host pool: {0}")]
    HostLayout(LayoutError),
    /// The two do not hold the same.
    #[error("{field} is {device} on the device and {host} in the host pool")]
    Differ {
        /// What differs.
        field: String,
        /// On the device.
        device: String,
        /// In the host pool.
        host: String,
    },
    /// A memory of the cache is not on the device that the others are on.
    #[error("memory {index} of the cache is on {found}, memory 0 is on {first}")]
    NotOnDevice {
        /// Index of the memory.
        index: usize,
        /// Where it is.
        found: String,
        /// Where the first one is.
        first: DeviceId,
    },
    /// The cache has no memory on any device.
    #[error("the cache has no memory on a device")]
    NoDevice,
    /// A memory of the host pool cannot be touched by the processor.
    #[error("memory {index} of the host pool: {source}")]
    HostMemory {
        /// Index of the memory.
        index: usize,
        /// Why.
        source: MemoryError,
    },
    /// The thread could not be started.
    #[error("the thread of copies cannot be started: {kind}")]
    Thread {
        /// The kind of failure.
        kind: std::io::ErrorKind,
    },
}

/// Counters of one worker's copies. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StagerStats {
    /// Copies that the device was asked for.
    pub begun: u64,
    /// Of these, how many are over.
    pub over: u64,
    /// Orders whose number was not above all before; they are not followed, and not answered.
    pub repeated: u64,
}

#[derive(Debug, Default)]
struct Counters {
    begun: AtomicU64,
    over: AtomicU64,
    repeated: AtomicU64,
}

/// Where answers go. It must not block.
pub type Tell = Box<dyn Fn(Vec<(CopyId, CopyNews)>) + Send + Sync>;

/// Makes copies as ordered. Dropping it ends its thread when the copies that the device has in hand are over; it waits for
/// that for two seconds at most.
pub struct Stager {
    orders: Option<Sender<Vec<CopyOrder>>>,
    counters: Arc<Counters>,
    over: Receiver<()>,
}

impl std::fmt::Debug for Stager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stager").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl Stager {
    /// Checks that the cache and the pool hold the same, and starts the thread. `tell` is called on it.
    pub fn start(cache: DeviceCache, host: HostPool, tell: Tell) -> Result<Self, StagerError> {
        let limits = cache.limits;
        for (field, is_zero) in [("copies", limits.copies == 0), ("copy", limits.copy.is_zero())] {
            if is_zero {
                return Err(StagerError::Zero { field });
            }
        }
        let pairing = Pairing::new(cache, host)?;
        let counters = Arc::<Counters>::default();
        let (orders, queue) = channel();
        let (end, over) = channel();
        let executor = Executor::new(pairing, limits, tell, Arc::clone(&counters));
        std::thread::Builder::new()
            .name("kv-staging".to_owned())
            .spawn(move || {
                executor.run(&queue);
                // Nobody listens any more if the handle gave up waiting.
                let _ = end.send(());
            })
            .map_err(|e| StagerError::Thread { kind: e.kind() })?;
        Ok(Self { orders: Some(orders), counters, over })
    }

    /// Takes orders. Each is answered, but for those that came before. Never blocks.
    pub fn order(&self, orders: Vec<CopyOrder>) {
        if let Some(to_thread) = &self.orders {
            // The thread ends after this handle; what it does not take is not begun either.
            let _ = to_thread.send(orders);
        }
    }

    /// Counters, as of a moment ago.
    pub fn stats(&self) -> StagerStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StagerStats {
            begun: load(&self.counters.begun),
            over: load(&self.counters.over),
            repeated: load(&self.counters.repeated),
        }
    }

    /// Takes no more orders: those that have not begun fail. Waits until the device has none in hand, for so long at most.
    pub fn shut_down(&mut self, limit: Duration) {
        if self.orders.take().is_some() && self.over.recv_timeout(limit).is_err() {
            tracing::warn!("a device does not end its copies; the thread that waits for them is left behind");
        }
    }
}

impl Drop for Stager {
    fn drop(&mut self) {
        self.shut_down(DROP_LIMIT);
    }
}

/// A worker's stager, once it has one.
#[derive(Debug, Default)]
pub(crate) struct Slot(RwLock<Option<Stager>>);

impl Slot {
    pub(crate) fn put(&self, stager: Stager) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(stager);
    }

    /// Hands orders on; `false` if there is nobody to take them.
    pub(crate) fn order(&self, orders: Vec<CopyOrder>) -> bool {
        match &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            Some(stager) => {
                stager.order(orders);
                true
            }
            None => false,
        }
    }

    pub(crate) fn stats(&self) -> StagerStats {
        let slot = self.0.read().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref().map_or_else(StagerStats::default, Stager::stats)
    }
}
