//! Device memory for transports that only know sockets: bounded pinned memory, and a thread that copies.
//!
//! For each device that a registered region lies on there are two pools of pinned slots, one for what is sent and one for what
//! is received, so that neither direction can starve the other. A slot holds one whole chunk: a chunk is sent only when all of it
//! is there, so nobody who holds a slot waits for a slot. One thread per device asks it for copies and waits for their end; the
//! thread of the sockets never does.
//!
//! A copy that was asked for is always waited for. It keeps the region's memory and the slot alive (rule T-4), and a read
//! that has come to its end completes only after the last copy into its destination (rules T-2 and T-3).
#![allow(unsafe_code)] // Copies by raw addresses are asked for here; each block states its reason.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedSender, WeakUnboundedSender};

use super::commands::Command;
use crate::device::{CopyRange, Copying, Device, DeviceError, DeviceId, Direction};
use crate::memory::Memory;

/// How long the thread waits for the oldest copy before it looks for new ones.
const LOOK: Duration = Duration::from_micros(200);
/// After so long a copy is spoken of in the log.
const SLOW: Duration = Duration::from_secs(10);

/// What a copy is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    /// A chunk that is to be sent.
    Serve { number: u64 },
    /// A chunk that was received for an operation.
    Read { op: u64, interval: (u64, u64) },
}

/// A copy that has ended.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) what: For,
    pub(crate) slot: Slot,
    pub(crate) result: Result<(), DeviceError>,
}

/// What a thread is asked for.
enum Job {
    Allocate(Arc<Pool>),
    Copy(Order),
}

/// A copy to be made between a slot, from its start, and ranges of a region.
struct Order {
    what: For,
    slot: Slot,
    memory: Memory,
    ranges: Vec<(u64, u32)>,
    reply: UnboundedSender<Command>,
    /// Counts copies that write to regions.
    writing: Option<Writing>,
}

/// One copy under way into a region.
struct Writing(Arc<AtomicUsize>);

impl Writing {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Pinned memory for one chunk. Back in its pool when dropped.
pub(crate) struct Slot {
    memory: Option<Memory>,
    pool: Arc<Pool>,
}

impl Slot {
    /// Its memory; `None` never, but for a slot on its way back.
    pub(crate) fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.put(memory);
        }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

/// Slots of one device and direction.
struct Pool {
    device: Arc<dyn Device>,
    slot_bytes: usize,
    slots_max: usize,
    jobs: Sender<Job>,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    free: Vec<Memory>,
    /// Slots that exist or are being made.
    total: usize,
    /// Why the last one could not be made, if there is none at all.
    failed: Option<DeviceError>,
    waiting: Vec<WeakUnboundedSender<Command>>,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot; `None` if all are in use, and then [`Command::Resume`] follows when one may be had.
    fn take(self: &Arc<Self>, waiter: &UnboundedSender<Command>) -> Result<Option<Slot>, DeviceError> {
        let mut state = self.lock();
        if let Some(memory) = state.free.pop() {
            return Ok(Some(Slot { memory: Some(memory), pool: Arc::clone(self) }));
        }
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        if state.total < self.slots_max {
            state.total += 1;
            // Without its thread there is no slot; the transport is at its end then.
            self.jobs.send(Job::Allocate(Arc::clone(self))).ok();
        }
        // One sender for each connection is enough, however often it asks.
        state.waiting.retain(|other| other.strong_count() > 0);
        if !state.waiting.iter().any(|other| other.upgrade().is_some_and(|other| other.same_channel(waiter)))
        {
            state.waiting.push(waiter.downgrade());
        }
        Ok(None)
    }

    fn put(&self, memory: Memory) {
        let mut state = self.lock();
        state.free.push(memory);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        wake(waiting);
    }

    /// Makes a slot. If that fails, those that exist have to do; if there are none, one who asks is told.
    fn allocate(&self) {
        match self.device.allocate_pinned(self.slot_bytes) {
            Ok(memory) => self.put(memory),
            Err(error) => {
                let mut state = self.lock();
                state.total -= 1;
                if state.total == 0 {
                    state.failed = Some(error);
                } else {
                    tracing::debug!(%error, slots = state.total, "no more pinned memory");
                }
                let waiting = if state.total == 0 { std::mem::take(&mut state.waiting) } else { vec![] };
                drop(state);
                wake(waiting);
            }
        }
    }
}

fn wake(waiting: Vec<WeakUnboundedSender<Command>>) {
    for waiter in waiting.into_iter().filter_map(|waiter| waiter.upgrade()) {
        // A connection that is gone wants no slot.
        waiter.send(Command::Resume).ok();
    }
}

/// A device in use.
struct Lane {
    sending: Arc<Pool>,
    receiving: Arc<Pool>,
    jobs: Sender<Job>,
}

/// See the module.
pub(crate) struct Staging {
    name: &'static str,
    slot_bytes: usize,
    slots_max: usize,
    lanes: Mutex<Lanes>,
    writing: Arc<AtomicUsize>,
}

#[derive(Default)]
struct Lanes {
    closed: bool,
    by_device: HashMap<DeviceId, Lane>,
    threads: Vec<JoinHandle<()>>,
}

impl Staging {
    /// Slots of `slot_bytes`, which is the largest chunk, and of `bytes` in all for each device and direction, but one at least.
    pub(crate) fn new(name: &'static str, slot_bytes: u32, bytes: usize) -> Self {
        let slot_bytes = slot_bytes as usize;
        let slots_max = (bytes / slot_bytes).max(1);
        Self { name, slot_bytes, slots_max, lanes: Mutex::default(), writing: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes ready for memory of a device. At the end of the transport that does nothing.
    pub(crate) fn open(&self, device: &Arc<dyn Device>) -> std::io::Result<()> {
        let mut lanes = self.lock();
        let id = device.id();
        if lanes.closed || lanes.by_device.contains_key(&id) {
            return Ok(());
        }
        let (jobs, receiver) = channel();
        let copying = Arc::clone(device);
        let name = format!("kv-{}-{}", self.name, id.kind);
        let thread = std::thread::Builder::new().name(name).spawn(move || run(&*copying, &receiver))?;
        lanes.threads.push(thread);
        let pool = || {
            let state = Mutex::default();
            let (device, jobs) = (Arc::clone(device), jobs.clone());
            Arc::new(Pool { device, slot_bytes: self.slot_bytes, slots_max: self.slots_max, jobs, state })
        };
        let lane = Lane { sending: pool(), receiving: pool(), jobs };
        lanes.by_device.insert(id, lane);
        Ok(())
    }

    fn gone(device: &dyn Device) -> DeviceError {
        DeviceError::Lost { device: device.id(), meaning: "the transport does not use it any more".into() }
    }

    /// A slot for a chunk of this device's memory, as [`Pool::take`] has it.
    pub(crate) fn slot(
        &self,
        device: &dyn Device,
        direction: Direction,
        waiter: &UnboundedSender<Command>,
    ) -> Result<Option<Slot>, DeviceError> {
        let pool = self.lock().by_device.get(&device.id()).map(|lane| match direction {
            Direction::ToHost => Arc::clone(&lane.sending),
            Direction::ToDevice => Arc::clone(&lane.receiving),
        });
        pool.ok_or_else(|| Self::gone(device))?.take(waiter)
    }

    /// Has a slot filled from ranges of a region ([`For::Serve`]), or emptied into them ([`For::Read`]).
    /// [`Command::Copied`] follows, unless this fails.
    pub(crate) fn copy(
        &self,
        what: For,
        slot: Slot,
        memory: Memory,
        ranges: Vec<(u64, u32)>,
        reply: &UnboundedSender<Command>,
    ) -> Result<(), DeviceError> {
        let device = Arc::clone(&slot.pool.device);
        let writing = matches!(what, For::Read { .. }).then(|| Writing::new(&self.writing));
        let order = Order { what, slot, memory, ranges, reply: reply.clone(), writing };
        let sent = self.lock().by_device.get(&device.id()).map(|lane| lane.jobs.send(Job::Copy(order)));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(Self::gone(&*device)),
        }
    }

    /// Whether a copy into a region is under way.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst) > 0
    }

    /// Takes no more: the threads end when the copies that they were asked for have.
    pub(crate) fn close(&self) {
        let mut lanes = self.lock();
        lanes.closed = true;
        let gone = std::mem::take(&mut lanes.by_device);
        drop(lanes);
        for lane in gone.into_values() {
            for pool in [&lane.sending, &lane.receiving] {
                let free = std::mem::take(&mut pool.lock().free);
                drop(free);
            }
        }
    }

    /// Waits for the threads, for so long at most. One whose device hangs is left behind.
    pub(crate) fn join(&self, limit: Duration) {
        const PAUSE: Duration = Duration::from_millis(1);
        let start = Instant::now();
        for thread in std::mem::take(&mut self.lock().threads) {
            while !thread.is_finished() && start.elapsed() < limit {
                std::thread::sleep(PAUSE);
            }
            if thread.is_finished() {
                // A panic has been noticed by those whose copies never ended.
                thread.join().ok();
            } else {
                tracing::warn!(
                    transport = self.name,
                    "a device does not end its copies; its thread is left behind"
                );
            }
        }
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("writing", &self.writing).finish_non_exhaustive()
    }
}

/// A copy under way.
struct UnderWay {
    order: Order,
    copying: Box<dyn Copying>,
    since: Instant,
    told: bool,
}

/// Asks the device for copies, and tells of their end in the order in which they were asked for, as the device does them.
fn run(device: &dyn Device, jobs: &Receiver<Job>) {
    let mut under_way = VecDeque::<UnderWay>::new();
    let mut open = true;
    while open || !under_way.is_empty() {
        loop {
            let next = if under_way.is_empty() && open {
                jobs.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                jobs.try_recv()
            };
            match next {
                Ok(Job::Allocate(pool)) => pool.allocate(),
                Ok(Job::Copy(order)) => match start(device, &order) {
                    Ok(copying) => {
                        let since = Instant::now();
                        under_way.push_back(UnderWay { order, copying, since, told: false });
                    }
                    Err(error) => order.end(Err(error)),
                },
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    open = false;
                    break;
                }
            }
        }
        if let Some(oldest) = under_way.front_mut() {
            let result = match oldest.copying.wait(LOOK) {
                Ok(false) => {
                    if !oldest.told && oldest.since.elapsed() > SLOW {
                        oldest.told = true;
                        tracing::warn!(device = %device.id(), "a copy does not end; reads that need it wait");
                    }
                    continue;
                }
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            if let Some(ended) = under_way.pop_front() {
                ended.order.end(result);
            }
        }
    }
}

fn start(device: &dyn Device, order: &Order) -> Result<Box<dyn Copying>, DeviceError> {
    let place = order.memory.place();
    let bad = |offset, len: u32| DeviceError::BadPlace {
        device: device.id(),
        address: place.address.wrapping_add(offset),
        bytes: len as usize,
    };
    let host = order.slot.memory().and_then(|memory| Some((memory.base().ok()?, memory.len())));
    let (host, room) = host.ok_or_else(|| bad(0, 0))?;
    let mut ranges = Vec::with_capacity(order.ranges.len());
    let mut used = 0;
    for (offset, len) in &order.ranges {
        let bytes = *len as usize;
        if !order.memory.contains(*offset, u64::from(*len)) || room - used < bytes {
            return Err(bad(*offset, *len));
        }
        let device = place.address + offset;
        ranges.push(CopyRange { device, host: host.wrapping_add(used), len: bytes });
        used += bytes;
    }
    let direction = match order.what {
        For::Serve { .. } => Direction::ToHost,
        For::Read { .. } => Direction::ToDevice,
    };
    // SAFETY: all ranges were just checked to lie inside the region and the slot, one after the other. The order keeps both
    // alive until it is told that the copy has ended. The slot is this order's alone and nobody refers to its bytes; the
    // region's bytes are the source or the destination of a read, and those of one read were checked not to overlap.
    unsafe { device.copy(direction, &ranges) }
}

impl Order {
    fn end(self, result: Result<(), DeviceError>) {
        let Self { what, slot, memory, reply, writing, .. } = self;
        // Whoever is told may free the region, and count on it.
        drop((memory, writing));
        // Without its connection there is nobody to tell; the slot goes back.
        reply.send(Command::Copied(Copied { what, slot, result })).ok();
    }
}
