//! Device memory for transports that only know sockets: bounded pinned memory, and a thread that copies.
//!
//! For each device that a registered region lies on there are two pools of pinned slots, one for what is sent and one for what
//! is received, so that neither direction can starve the other. A slot holds one whole chunk: a chunk is sent only when all of it
//! is there, so nobody who holds a slot waits for a slot. One thread per device asks it for copies and waits for their end; the
//! thread of the sockets never does. The code of a device is not ours: if it panics, the device is lost and nothing else is.
//!
//! A copy that was asked for is always waited for. It keeps the region's memory and the slot alive (rule T-4), and a read
//! that has come to its end completes only after the last copy into its destination (rules T-2 and T-3).
#![allow(unsafe_code)] // Copies by raw addresses are asked for here; each block states its reason.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::commands::Command;
use super::pool::{Customer, Pool, Slot};
use crate::device::{CopyRange, Copying, Device, DeviceError, DeviceId, Direction};
use crate::memory::Memory;

/// How long the thread waits for the oldest copy before it looks for new ones.
const LOOK: Duration = Duration::from_micros(200);
/// After so long a copy is spoken of in the log.
const SLOW: Duration = Duration::from_secs(10);
/// Failures of one device are spoken of at most this often.
const LOG_PAUSE: Duration = Duration::from_secs(10);

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
    /// Gone if nobody knows whether the device still uses it.
    pub(crate) slot: Option<Slot>,
    pub(crate) result: Result<(), DeviceError>,
}

/// What a thread is asked for.
pub(super) enum Job {
    Allocate(Arc<Pool>),
    Copy(Order),
}

/// A copy to be made between a slot, from its start, and ranges of a region.
pub(super) struct Order {
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
    reports: Mutex<Reports>,
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
        let (lanes, reports) = (Mutex::default(), Mutex::default());
        Self { name, slot_bytes, slots_max, lanes, writing: Arc::default(), reports }
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
        let pool = |direction| Pool::new(device, direction, self.slot_bytes, self.slots_max, &jobs);
        let (sending, receiving) = (pool(Direction::ToHost), pool(Direction::ToDevice));
        // Without a hold on them: they have the sender of the thread's jobs.
        let pools = [Arc::downgrade(&sending), Arc::downgrade(&receiving)];
        let mut copier =
            Copier { device: Arc::clone(device), id, pools, lost: None, under_way: VecDeque::new() };
        let name = format!("kv-{}-{}", self.name, id.kind);
        let thread = std::thread::Builder::new().name(name).spawn(move || copier.run(&receiver))?;
        lanes.threads.push(thread);
        let lane = Lane { sending, receiving, jobs };
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
        who: &Customer,
    ) -> Result<Option<Slot>, DeviceError> {
        let pool = self.lock().by_device.get(&device.id()).map(|lane| match direction {
            Direction::ToHost => Arc::clone(&lane.sending),
            Direction::ToDevice => Arc::clone(&lane.receiving),
        });
        pool.ok_or_else(|| Self::gone(device))?.take(who)
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
        let device = Arc::clone(slot.device());
        let writing = matches!(what, For::Read { .. }).then(|| Writing::new(&self.writing));
        let order = Order { what, slot, memory, ranges, reply: reply.clone(), writing };
        let sent = self.lock().by_device.get(&device.id()).map(|lane| lane.jobs.send(Job::Copy(order)));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(Self::gone(&*device)),
        }
    }

    /// A peer's read fails because of a device; the log has to say so once and not for every chunk.
    pub(crate) fn report(&self, device: DeviceId, error: &DeviceError) {
        let due = self.reports.lock().unwrap_or_else(PoisonError::into_inner).due(device, Instant::now());
        if let Some(kept_back) = due {
            tracing::warn!(%error, kept_back, "reads of peers fail");
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
            lane.sending.close();
            lane.receiving.close();
        }
    }

    /// Waits for the threads, for so long at most. One whose device hangs is left behind.
    pub(crate) fn join(&self, limit: Duration) {
        const PAUSE: Duration = Duration::from_millis(1);
        let start = Instant::now();
        // Others need the lock meanwhile.
        let threads = std::mem::take(&mut self.lock().threads);
        for thread in threads {
            while !thread.is_finished() && start.elapsed() < limit {
                std::thread::sleep(PAUSE);
            }
            if thread.is_finished() {
                // What a device's code does wrong is caught before; the rest has been told by the log.
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

/// The thread of a device: asks it for copies, and tells of their end in the order in which they were asked for, as the device does
/// them.
struct Copier {
    device: Arc<dyn Device>,
    id: DeviceId,
    pools: [Weak<Pool>; 2],
    /// Set once its code has panicked: it is not asked for anything any more.
    lost: Option<DeviceError>,
    under_way: VecDeque<UnderWay>,
}

impl Copier {
    fn run(&mut self, jobs: &Receiver<Job>) {
        let mut open = true;
        while open || !self.under_way.is_empty() {
            loop {
                let next = if self.under_way.is_empty() && open {
                    jobs.recv().map_err(|_| TryRecvError::Disconnected)
                } else {
                    jobs.try_recv()
                };
                match next {
                    Ok(Job::Allocate(pool)) => self.allocate(&pool),
                    Ok(Job::Copy(order)) => self.start(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        open = false;
                        break;
                    }
                }
            }
            self.look();
        }
    }

    /// Calls the device's code, which is not ours: `None` if it panicked, and then the device is lost.
    fn guarded<T>(&mut self, call: impl FnOnce() -> T) -> Option<T> {
        if let Ok(done) = catch_unwind(AssertUnwindSafe(call)) {
            return Some(done);
        }
        let error = DeviceError::Lost { device: self.id, meaning: "its code panicked".into() };
        tracing::error!(%error, "no more copies are asked for");
        self.pools.iter().filter_map(Weak::upgrade).for_each(|pool| pool.lose(&error));
        self.lost = Some(error);
        None
    }

    fn allocate(&mut self, pool: &Arc<Pool>) {
        // Those who wait for slots of a lost device were told.
        if self.lost.is_none()
            && let Some(made) = self.guarded(|| pool.allocate())
        {
            pool.made(made);
        }
    }

    fn start(&mut self, order: Order) {
        if let Some(lost) = self.lost.clone() {
            return order.end(Err(lost));
        }
        let device = Arc::clone(&self.device);
        match self.guarded(|| start(&*device, &order)) {
            Some(Ok(copying)) => {
                let since = Instant::now();
                self.under_way.push_back(UnderWay { order, copying, since, told: false });
            }
            Some(Err(error)) => order.end(Err(error)),
            None => order.give_up(self.lost()),
        }
    }

    fn lost(&self) -> DeviceError {
        self.lost.clone().unwrap_or(DeviceError::Lost { device: self.id, meaning: String::new() })
    }

    /// Looks whether the oldest copy has ended.
    fn look(&mut self) {
        let Some(mut oldest) = self.under_way.pop_front() else { return };
        let result = match self.guarded(|| oldest.copying.wait(LOOK)) {
            Some(Ok(false)) => {
                if !oldest.told && oldest.since.elapsed() > SLOW {
                    oldest.told = true;
                    tracing::warn!(device = %self.id, "a copy does not end; reads that need it wait");
                }
                self.under_way.push_front(oldest);
                return;
            }
            Some(Ok(true)) => Ok(()),
            Some(Err(error)) => Err(error),
            None => {
                let UnderWay { order, copying, .. } = oldest;
                std::mem::forget(copying);
                return order.give_up(self.lost());
            }
        };
        let UnderWay { order, copying, .. } = oldest;
        self.guarded(|| drop(copying));
        order.end(result);
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
        reply.send(Command::Copied(Copied { what, slot: Some(slot), result })).ok();
    }

    /// Nobody knows whether the copy goes on, and nobody can ask any more: its memory is never freed.
    fn give_up(self, error: DeviceError) {
        let Self { what, slot, memory, reply, .. } = self;
        std::mem::forget(memory);
        slot.leak();
        reply.send(Command::Copied(Copied { what, slot: None, result: Err(error) })).ok();
    }
}

/// Keeps failures that peers can provoke by asking again from filling the log.
#[derive(Default)]
struct Reports(HashMap<DeviceId, (Instant, u64)>);

impl Reports {
    /// Whether to speak of a device's failure now; then also how many were not spoken of.
    fn due(&mut self, device: DeviceId, now: Instant) -> Option<u64> {
        match self.0.get_mut(&device) {
            Some((last, kept_back)) if now.saturating_duration_since(*last) < LOG_PAUSE => {
                *kept_back += 1;
                None
            }
            known => {
                let kept_back = known.map_or(0, |(_, kept_back)| *kept_back);
                self.0.insert(device, (now, 0));
                Some(kept_back)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Fault {
        Hang,
        PanicInCopy,
        PanicInPoll,
    }

    /// Its copies do not end until they are let go, or its code panics.
    #[derive(Debug)]
    struct Faulty {
        fault: Fault,
        copies: Arc<Copies>,
    }

    #[derive(Debug, Default)]
    struct Copies {
        asked: AtomicBool,
        end: AtomicBool,
    }

    struct Pending(Fault, Arc<Copies>);

    impl Device for Faulty {
        fn id(&self) -> DeviceId {
            DeviceId { kind: "faulty", number: 0 }
        }

        fn name(&self) -> String {
            "faulty".into()
        }

        fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError> {
            Ok(Memory::allocate(bytes).unwrap())
        }

        unsafe fn copy(&self, _: Direction, _: &[CopyRange]) -> Result<Box<dyn Copying>, DeviceError> {
            assert_ne!(self.fault, Fault::PanicInCopy, "on purpose");
            Ok(Box::new(Pending(self.fault, Arc::clone(&self.copies))))
        }
    }

    impl Copying for Pending {
        fn poll(&mut self) -> Result<bool, DeviceError> {
            assert_ne!(self.0, Fault::PanicInPoll, "on purpose");
            self.1.asked.store(true, Ordering::SeqCst);
            Ok(self.1.end.load(Ordering::SeqCst))
        }
    }

    struct Bench {
        staging: Arc<Staging>,
        device: Arc<dyn Device>,
        copies: Arc<Copies>,
        customer: Customer,
        mail: UnboundedReceiver<Command>,
        /// Lives as long as the region's memory does.
        life: Arc<()>,
    }

    impl Bench {
        fn new(fault: Fault) -> Self {
            let copies = Arc::<Copies>::default();
            let device: Arc<dyn Device> = Arc::new(Faulty { fault, copies: Arc::clone(&copies) });
            let staging = Arc::new(Staging::new("test", 64, 256));
            staging.open(&device).unwrap();
            let (sender, mail) = unbounded_channel();
            Self { staging, device, copies, customer: Customer::new(sender), mail, life: Arc::default() }
        }

        fn next(&mut self) -> Command {
            let start = Instant::now();
            loop {
                match self.mail.try_recv() {
                    Ok(command) => return command,
                    Err(_) => assert!(start.elapsed() < LIMIT, "nothing was told"),
                }
                std::thread::yield_now();
            }
        }

        fn slot(&mut self) -> Slot {
            let direction = Direction::ToDevice;
            if let Some(slot) = self.staging.slot(&*self.device, direction, &self.customer).unwrap() {
                return slot;
            }
            match self.next() {
                Command::Slot(handed) => handed.result.unwrap(),
                other => panic!("{other:?}"),
            }
        }

        /// Has one copied into the region.
        fn copy(&mut self, slot: Slot) {
            let device = Arc::clone(&self.device);
            // SAFETY: this device never copies anything.
            let memory = unsafe { Memory::device(device, 1 << 40, 64, Arc::clone(&self.life) as _) }.unwrap();
            let what = For::Read { op: 1, interval: (0, 64) };
            self.staging.copy(what, slot, memory, vec![(0, 64)], self.customer.mail()).unwrap();
        }

        fn lost(&mut self) -> bool {
            let Command::Copied(Copied { slot, result, .. }) = self.next() else { return false };
            let kept = slot.is_some();
            assert!(matches!(result, Err(DeviceError::Lost { .. })), "{result:?}");
            kept
        }
    }

    #[test]
    fn a_device_whose_code_panics_is_lost_and_what_it_may_use_is_never_freed() {
        for fault in [Fault::PanicInCopy, Fault::PanicInPoll] {
            let mut bench = Bench::new(fault);
            let slots = [bench.slot(), bench.slot()];
            let mut kept = 0;
            for slot in slots {
                bench.copy(slot);
                kept += u32::from(bench.lost());
            }
            // The first was given to the device, which may use it for ever; the second was not.
            assert_eq!((kept, Arc::strong_count(&bench.life)), (1, 2), "{fault:?}");
            assert!(!bench.staging.is_writing());
            let refused = bench.staging.slot(&*bench.device, Direction::ToHost, &bench.customer);
            assert!(matches!(refused, Err(DeviceError::Lost { .. })), "{refused:?}");
            bench.staging.close();
            let start = Instant::now();
            bench.staging.join(LIMIT);
            assert!(start.elapsed() < LIMIT / 2, "the thread does not end");
        }
    }

    #[test]
    fn a_thread_that_hangs_is_waited_for_without_the_lock() {
        let mut bench = Bench::new(Fault::Hang);
        let slot = bench.slot();
        bench.copy(slot);
        let start = Instant::now();
        while !bench.copies.asked.load(Ordering::SeqCst) && start.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        let staging = Arc::clone(&bench.staging);
        let joining = std::thread::spawn(move || staging.join(LIMIT));
        // Once it has the threads it waits.
        while !bench.staging.lock().threads.is_empty() && start.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        bench.staging.open(&bench.device).unwrap();
        assert!(start.elapsed() < LIMIT / 2, "others wait as long as the one who joins");
        bench.copies.end.store(true, Ordering::SeqCst);
        // Its slot goes back: whoever has one keeps the thread.
        drop(bench.next());
        bench.staging.close();
        joining.join().unwrap();
        assert!(start.elapsed() < LIMIT / 2, "the thread does not end");
    }

    #[test]
    fn failures_of_a_device_are_spoken_of_now_and_then() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        let [one, two] = [1, 2].map(|number| DeviceId { kind: "x", number });
        let told: Vec<_> = (0..100).filter_map(|_| reports.due(one, now)).collect();
        assert_eq!((told, reports.due(two, now)), (vec![0], Some(0)));
        assert_eq!(reports.due(one, now + LOG_PAUSE), Some(99));
        assert_eq!(reports.due(one, now + LOG_PAUSE), None);
    }
}
