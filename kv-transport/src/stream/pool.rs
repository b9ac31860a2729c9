//! Pinned memory of one device and direction, shared out among connections.
//!
//! Whoever finds none free waits in a queue, and a slot that comes free goes to the first there who may have it. One who holds none
//! may always have one; others only while they hold fewer than are left for everybody else. So a connection that does
//! not get on, because its peer has stopped, keeps a share, and a newcomer finds something.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedSender, WeakUnboundedSender};

use super::commands::Command;
use super::staging::Job;
use crate::device::{Device, DeviceError, DeviceId, Direction};
use crate::memory::Memory;

/// After the device refused pinned memory it is asked again after so long, as long as there is some.
const RETRY: Duration = Duration::from_secs(1);

/// One direction of a connection, which wants slots.
pub(crate) struct Customer {
    id: u64,
    mail: UnboundedSender<Command>,
}

impl Customer {
    pub(crate) fn new(mail: UnboundedSender<Command>) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Self { id: NUMBERS.fetch_add(1, Ordering::Relaxed), mail }
    }

    /// Leads to the connection.
    pub(crate) fn mail(&self) -> &UnboundedSender<Command> {
        &self.mail
    }
}

/// What one who waited for a slot gets.
#[derive(Debug)]
pub(crate) struct Handed {
    pub(crate) direction: Direction,
    pub(crate) device: DeviceId,
    /// An error if there is no slot at all.
    pub(crate) result: Result<Slot, DeviceError>,
}

/// Pinned memory for one chunk. Back in its pool when dropped.
pub(crate) struct Slot {
    memory: Option<Memory>,
    pool: Arc<Pool>,
    holder: u64,
}

impl Slot {
    /// Its memory; `None` never, but for a slot on its way back.
    pub(crate) fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }

    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.pool.device
    }

    /// Never uses it again: somebody may write there whenever it pleases him.
    pub(super) fn leak(mut self) {
        std::mem::forget(self.memory.take());
        self.pool.lock().release(self.holder);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.put(memory, self.holder);
        }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

/// See the module.
pub(super) struct Pool {
    device: Arc<dyn Device>,
    id: DeviceId,
    direction: Direction,
    slot_bytes: usize,
    slots_max: usize,
    jobs: Sender<Job>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<Memory>,
    /// Slots that exist or are being made.
    total: usize,
    making: usize,
    /// Slots of each who has any.
    held: HashMap<u64, usize>,
    /// Each at most once.
    waiting: VecDeque<Waiter>,
    /// When the device last had no pinned memory for one more.
    refused: Option<Instant>,
    lost: Option<DeviceError>,
}

struct Waiter {
    id: u64,
    mail: WeakUnboundedSender<Command>,
}

type Granted = Vec<(Waiter, Result<Slot, DeviceError>)>;

impl State {
    fn release(&mut self, holder: u64) {
        if let Some(held) = self.held.get_mut(&holder) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&holder);
            }
        }
    }

    /// Whether one more slot of so many may go to somebody.
    fn may(&self, id: u64, slots_max: usize) -> bool {
        let unmade = if self.refused.is_some() { 0 } else { slots_max - self.total };
        let held = self.held.get(&id).copied().unwrap_or(0);
        held == 0 || held < self.free.len() + self.making + unmade
    }
}

impl Pool {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        direction: Direction,
        slot_bytes: usize,
        slots_max: usize,
        jobs: &Sender<Job>,
    ) -> Arc<Self> {
        let (device, id, jobs) = (Arc::clone(device), device.id(), jobs.clone());
        Arc::new(Self { device, id, direction, slot_bytes, slots_max, jobs, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot; `None` if there is none for this one now, and then [`Command::Slot`] follows, once however often it is asked for.
    pub(super) fn take(self: &Arc<Self>, who: &Customer) -> Result<Option<Slot>, DeviceError> {
        let mut state = self.lock();
        if let Some(lost) = &state.lost {
            return Err(lost.clone());
        }
        if !state.waiting.iter().any(|waiter| waiter.id == who.id) {
            state.waiting.push_back(Waiter { id: who.id, mail: who.mail.downgrade() });
        }
        let mut granted = self.share(&mut state);
        drop(state);
        let own = granted.iter().position(|(waiter, _)| waiter.id == who.id);
        let own = own.map(|place| granted.remove(place).1);
        self.hand(granted);
        own.transpose()
    }

    fn put(self: &Arc<Self>, memory: Memory, holder: u64) {
        let mut state = self.lock();
        state.free.push(memory);
        state.release(holder);
        let granted = self.share(&mut state);
        drop(state);
        self.hand(granted);
    }

    /// Shares out what is free, and has slots made for those who may have more.
    fn share(self: &Arc<Self>, state: &mut State) -> Granted {
        state.waiting.retain(|waiter| waiter.mail.strong_count() > 0);
        let mut granted = vec![];
        while !state.free.is_empty()
            && let Some(place) = state.waiting.iter().position(|waiter| state.may(waiter.id, self.slots_max))
            && let Some(waiter) = state.waiting.remove(place)
        {
            *state.held.entry(waiter.id).or_default() += 1;
            let slot = Slot { memory: state.free.pop(), pool: Arc::clone(self), holder: waiter.id };
            granted.push((waiter, Ok(slot)));
        }
        let tired = state.total > 0 && state.refused.is_some_and(|since| since.elapsed() < RETRY);
        let wanted = state.waiting.iter().filter(|waiter| state.may(waiter.id, self.slots_max)).count();
        while !tired && state.making < wanted && state.total < self.slots_max {
            state.total += 1;
            state.making += 1;
            // Without its thread there is no slot; the transport is at its end then.
            self.jobs.send(Job::Allocate(Arc::clone(self))).ok();
        }
        granted
    }

    /// Without the lock: what nobody takes comes back.
    fn hand(&self, granted: Granted) {
        for (waiter, result) in granted {
            let Some(mail) = waiter.mail.upgrade() else { continue };
            let handed = Handed { direction: self.direction, device: self.id, result };
            mail.send(Command::Slot(handed)).ok();
        }
    }

    /// What a new slot is made of.
    pub(super) fn allocate(&self) -> Result<Memory, DeviceError> {
        self.device.allocate_pinned(self.slot_bytes)
    }

    /// A slot was made, or not. If there is none at all, those who wait now are told, and nobody later.
    pub(super) fn made(self: &Arc<Self>, result: Result<Memory, DeviceError>) {
        let mut state = self.lock();
        state.making -= 1;
        let granted = match result {
            Ok(memory) => {
                state.refused = None;
                state.free.push(memory);
                self.share(&mut state)
            }
            Err(error) => {
                state.total -= 1;
                state.refused = Some(Instant::now());
                if state.total == 0 {
                    state.waiting.drain(..).map(|waiter| (waiter, Err(error.clone()))).collect()
                } else {
                    tracing::debug!(%error, slots = state.total, "no more pinned memory");
                    vec![]
                }
            }
        };
        drop(state);
        self.hand(granted);
    }

    /// The device can no longer be used: all who ask are told so.
    pub(super) fn lose(&self, error: &DeviceError) {
        let mut state = self.lock();
        state.lost = Some(error.clone());
        let granted = state.waiting.drain(..).map(|waiter| (waiter, Err(error.clone()))).collect();
        drop(state);
        self.hand(granted);
    }

    /// Frees what nobody has.
    pub(super) fn close(&self) {
        let free = std::mem::take(&mut self.lock().free);
        drop(free);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;
    use crate::device::{CopyRange, Copying};

    const BYTES: usize = 64;

    /// Has host memory for pinned memory, and copies nothing.
    #[derive(Debug)]
    struct Idle;

    impl Device for Idle {
        fn id(&self) -> DeviceId {
            DeviceId { kind: "idle", number: 0 }
        }

        fn name(&self) -> String {
            "idle".into()
        }

        fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError> {
            Ok(Memory::allocate(bytes).unwrap())
        }

        #[allow(unsafe_code)] // The trait says so; nothing is copied.
        unsafe fn copy(&self, _: Direction, _: &[CopyRange]) -> Result<Box<dyn Copying>, DeviceError> {
            Err(refusal())
        }
    }

    fn refusal() -> DeviceError {
        DeviceError::Lost { device: Idle.id(), meaning: "full".into() }
    }

    struct Bench {
        pool: Arc<Pool>,
        jobs: Receiver<Job>,
    }

    impl Bench {
        fn new(slots: usize) -> Self {
            let (sender, jobs) = channel();
            let device: Arc<dyn Device> = Arc::new(Idle);
            Self { pool: Pool::new(&device, Direction::ToHost, BYTES, slots, &sender), jobs }
        }

        /// Makes what was asked for.
        fn make(&self, with: impl Fn(&Pool) -> Result<Memory, DeviceError>) {
            while let Ok(Job::Allocate(pool)) = self.jobs.try_recv() {
                pool.made(with(&pool));
            }
        }

        /// One slot, or a place in the queue.
        fn ask(&self, of: &mut Connection) -> bool {
            let taken = self.pool.take(&of.customer).unwrap();
            self.make(Pool::allocate);
            let got = taken.is_some();
            of.slots.extend(taken);
            of.collect() || got
        }

        /// As many slots as somebody gets.
        fn grab(&self, of: &mut Connection) -> usize {
            loop {
                match self.pool.take(&of.customer).unwrap() {
                    Some(slot) => of.slots.push(slot),
                    None => {
                        self.make(Pool::allocate);
                        if !of.collect() {
                            return of.slots.len();
                        }
                    }
                }
            }
        }
    }

    struct Connection {
        customer: Customer,
        mail: UnboundedReceiver<Command>,
        slots: Vec<Slot>,
    }

    impl Connection {
        fn new() -> Self {
            let (sender, mail) = unbounded_channel();
            Self { customer: Customer::new(sender), mail, slots: vec![] }
        }

        fn handed(&mut self) -> Option<Result<Slot, DeviceError>> {
            match self.mail.try_recv() {
                Ok(Command::Slot(handed)) => Some(handed.result),
                _ => None,
            }
        }

        fn collect(&mut self) -> bool {
            let before = self.slots.len();
            while let Some(slot) = self.handed() {
                self.slots.push(slot.unwrap());
            }
            self.slots.len() > before
        }
    }

    #[test]
    fn nobody_holds_more_than_are_left_for_others() {
        let bench = Bench::new(64);
        let mut greedy: Vec<_> = (0..8).map(|_| Connection::new()).collect();
        let got: Vec<_> = greedy.iter_mut().map(|each| bench.grab(each)).collect();
        assert_eq!(got, [32, 16, 8, 4, 2, 1, 1, 0]);
    }

    #[test]
    fn what_comes_free_goes_to_who_waits_longest() {
        let bench = Bench::new(1);
        let mut all: Vec<_> = (0..3).map(|_| Connection::new()).collect();
        let got: Vec<_> = all.iter_mut().map(|each| bench.ask(each)).collect();
        assert_eq!(got, [true, false, false]);
        // The first wants one more and is behind the others, however fast it is.
        assert!(!bench.ask(&mut all[0]));
        for turn in [1, 2, 0] {
            let before = if turn == 0 { 2 } else { turn - 1 };
            all[before].slots.clear();
            let got: Vec<_> = all.iter_mut().map(Connection::collect).collect();
            assert_eq!(got.iter().position(|got| *got), Some(turn));
        }
        assert_eq!(bench.pool.lock().total, 1);
    }

    #[test]
    fn a_slot_for_one_who_is_gone_goes_to_the_next() {
        let bench = Bench::new(1);
        let mut all: Vec<_> = (0..3).map(|_| Connection::new()).collect();
        let got: Vec<_> = all.iter_mut().map(|each| bench.ask(each)).collect();
        assert_eq!(got, [true, false, false]);
        drop(all.remove(1));
        all[0].slots.clear();
        assert!(all[1].collect());
        assert!(bench.pool.lock().waiting.is_empty());
    }

    #[test]
    fn without_memory_those_who_wait_are_told_and_nobody_later() {
        let bench = Bench::new(2);
        let mut all: Vec<_> = (0..2).map(|_| Connection::new()).collect();
        all.iter().for_each(|each| assert!(bench.pool.take(&each.customer).unwrap().is_none()));
        bench.make(|_| Err(refusal()));
        for each in &mut all {
            assert_eq!(each.handed().map(|handed| handed.map(drop)), Some(Err(refusal())));
        }
        // One who gives up before the refusal leaves nothing behind.
        assert!(bench.pool.take(&all[0].customer).unwrap().is_none());
        drop(all.remove(0));
        bench.make(|_| Err(refusal()));
        let mut next = Connection::new();
        assert_eq!(bench.grab(&mut next), 1);
    }

    #[test]
    fn memory_that_is_short_is_shared() {
        let bench = Bench::new(8);
        let (mut first, mut second) = (Connection::new(), Connection::new());
        assert!(bench.pool.take(&first.customer).unwrap().is_none());
        bench.make(Pool::allocate);
        assert!(first.collect() && bench.pool.take(&second.customer).unwrap().is_none());
        bench.make(|_| Err(refusal()));
        assert!(!second.collect());
        first.slots.clear();
        assert!(second.collect());
    }
}
