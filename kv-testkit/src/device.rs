//! A device made of host memory, to try without a GPU what is done with one.
//!
//! Its addresses are no addresses of this process: whoever follows one instead of asking the device to copy crashes. Copies are
//! done by a thread of its own, in order; a test can hold them back, make them fail, and lose the device.
#![allow(unsafe_code)] // It copies by raw addresses, as devices do; each block states its reason.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kv_transport::device::{CopyRange, Copying, Direction};
use kv_transport::{Device, DeviceError, DeviceId, Memory, MemoryError};

/// No process has user memory up here.
const FIRST_ADDRESS: u64 = 1 << 60;
/// Between allocations: what runs beyond one is in none.
const GAP_BYTES: u64 = 1 << 20;

static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// See the module. Its thread ends when it and its copies are gone.
#[derive(Debug, Clone)]
pub struct HostDevice(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: DeviceId,
    state: Arc<Shared>,
    /// Tells the thread to end.
    _end: EndOnDrop,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct EndOnDrop(Arc<Shared>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.changed.notify_all();
    }
}

#[derive(Debug, Default)]
struct State {
    id: Option<DeviceId>,
    blocks: BTreeMap<u64, Memory>,
    next: u64,
    queue: VecDeque<Job>,
    /// Copies that wait until [`HostDevice::release`].
    held: bool,
    delay: Duration,
    /// After so many copies one fails.
    fail_after: Option<u64>,
    lost: bool,
    pinned: usize,
    pinned_max: Option<usize>,
    started: u64,
    done: u64,
    over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Job {
    direction: Direction,
    ranges: Vec<CopyRange>,
    outcome: Arc<Mutex<Option<Result<(), DeviceError>>>>,
}

// SAFETY: who submits a copy keeps its memory valid until the copy has ended, on whatever thread it is done.
unsafe impl Send for Job {}

impl HostDevice {
    /// A device with no memory allocated.
    pub fn new() -> std::io::Result<Self> {
        let id = DeviceId { kind: "host", number: NUMBERS.fetch_add(1, Ordering::Relaxed) };
        let shared = Arc::<Shared>::default();
        shared.lock().id = Some(id);
        let working = Arc::clone(&shared);
        std::thread::Builder::new().name("host-device".into()).spawn(move || run(&working))?;
        Ok(Self(Arc::new(Inner { id, state: Arc::clone(&shared), _end: EndOnDrop(shared) })))
    }

    /// Zeroed memory on the device.
    pub fn allocate(&self, bytes: usize) -> Result<Memory, MemoryError> {
        let block = Memory::allocate(bytes)?;
        let address = {
            let mut state = self.0.state.lock();
            let address = FIRST_ADDRESS + state.next;
            state.next += (bytes as u64).next_multiple_of(GAP_BYTES) + GAP_BYTES;
            state.blocks.insert(address, block);
            address
        };
        let keep = Arc::new(Block { device: self.clone(), address });
        // SAFETY: the block stays in the device's list until `keep` is dropped.
        unsafe { Memory::device(Arc::new(self.clone()), address, bytes, keep) }
    }

    /// Holds all copies back from now on. They count as under way.
    pub fn hold(&self) {
        self.0.state.lock().held = true;
    }

    /// Lets copies go on.
    pub fn release(&self) {
        self.change(|state| state.held = false);
    }

    /// Every copy takes so long from now on.
    pub fn delay(&self, delay: Duration) {
        self.change(|state| state.delay = delay);
    }

    /// Lets so many copies succeed; the one after them fails, and those after that succeed again.
    pub fn fail_after(&self, copies: u64) {
        self.change(|state| state.fail_after = Some(copies));
    }

    /// Loses the device: copies under way fail, and so does whatever is asked for from now on.
    pub fn lose(&self) {
        self.change(|state| {
            state.lost = true;
            state.held = false;
        });
    }

    /// Most bytes of pinned memory that it gives out.
    pub fn limit_pinned(&self, bytes: usize) {
        self.change(|state| state.pinned_max = Some(bytes));
    }

    /// Looks at bytes past the queue of copies: what is there now, whatever is on its way. `false` if they are in no allocation.
    pub fn peek(&self, address: u64, into: &mut [u8]) -> bool {
        let state = self.0.state.lock();
        state.find(address).is_some_and(|(block, offset)| block.read(offset, into).is_ok())
    }

    /// Changes bytes past the queue of copies; as [`HostDevice::peek`].
    pub fn poke(&self, address: u64, from: &[u8]) -> bool {
        let state = self.0.state.lock();
        state.find(address).is_some_and(|(block, offset)| block.write(offset, from).is_ok())
    }

    /// Bytes of pinned memory that are given out.
    pub fn pinned(&self) -> usize {
        self.0.state.lock().pinned
    }

    /// Allocations that are not freed.
    pub fn allocations(&self) -> usize {
        self.0.state.lock().blocks.len()
    }

    /// Copies asked for and copies ended so far.
    pub fn copies(&self) -> (u64, u64) {
        let state = self.0.state.lock();
        (state.started, state.done)
    }

    /// Waits until the copies asked for and ended are as wanted; `false` if that does not happen within the limit.
    pub fn wait_for(&self, limit: Duration, wanted: impl Fn(u64, u64) -> bool) -> bool {
        let state = self.0.state.lock();
        let waiting = |state: &mut State| !wanted(state.started, state.done);
        let (state, _) = self
            .0
            .state
            .changed
            .wait_timeout_while(state, limit, waiting)
            .unwrap_or_else(PoisonError::into_inner);
        wanted(state.started, state.done)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.0.state.lock());
        self.0.state.changed.notify_all();
    }

    fn lost(&self) -> DeviceError {
        DeviceError::Lost { device: self.0.id, meaning: "it was lost on purpose".into() }
    }
}

impl Device for HostDevice {
    fn id(&self) -> DeviceId {
        self.0.id
    }

    fn name(&self) -> String {
        "a device made of host memory".into()
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError> {
        {
            let mut state = self.0.state.lock();
            if state.lost {
                return Err(self.lost());
            }
            if state.pinned_max.is_some_and(|max| state.pinned + bytes > max) {
                let meaning = "no pinned memory is left".into();
                let operation = "allocate pinned memory";
                return Err(DeviceError::Failed { device: self.0.id, operation, code: 2, meaning });
            }
            state.pinned += bytes;
        }
        let keep = Pinned { device: self.clone(), bytes, memory: Memory::allocate(bytes) };
        let base = keep.memory.as_ref().ok().and_then(|memory| memory.base().ok());
        let base = base.ok_or(DeviceError::BadPlace { device: self.0.id, address: 0, bytes })?;
        // SAFETY: the allocation lives in `keep`, and nobody refers to it.
        Ok(unsafe { Memory::foreign(base, bytes, Arc::new(keep)) })
    }

    unsafe fn copy(
        &self,
        direction: Direction,
        ranges: &[CopyRange],
    ) -> Result<Box<dyn Copying>, DeviceError> {
        let mut state = self.0.state.lock();
        if state.lost {
            return Err(self.lost());
        }
        let outcome = Arc::<Mutex<_>>::default();
        state.started += 1;
        state.queue.push_back(Job { direction, ranges: ranges.to_vec(), outcome: Arc::clone(&outcome) });
        drop(state);
        self.0.state.changed.notify_all();
        Ok(Box::new(UnderWay(outcome)))
    }
}

struct UnderWay(Arc<Mutex<Option<Result<(), DeviceError>>>>);

impl Copying for UnderWay {
    fn poll(&mut self) -> Result<bool, DeviceError> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(error)) => Err(error.clone()),
        }
    }
}

/// Frees an allocation.
#[derive(Debug)]
struct Block {
    device: HostDevice,
    address: u64,
}

impl Drop for Block {
    fn drop(&mut self) {
        let freed = self.device.0.state.lock().blocks.remove(&self.address);
        drop(freed);
    }
}

#[derive(Debug)]
struct Pinned {
    device: HostDevice,
    bytes: usize,
    memory: Result<Memory, MemoryError>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.device.0.state.lock().pinned -= self.bytes;
    }
}

fn run(shared: &Shared) {
    loop {
        let (job, delay) = {
            let state = shared.lock();
            let waiting = |state: &mut State| !state.over && (state.queue.is_empty() || state.held);
            let mut state = shared.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner);
            let Some(job) = state.queue.pop_front() else { return };
            (job, state.delay)
        };
        pause(shared, delay);
        let mut state = shared.lock();
        let outcome = state.copy(&job);
        *job.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        state.done += 1;
        drop(state);
        shared.changed.notify_all();
    }
}

/// A slow copy; losing the device ends it.
fn pause(shared: &Shared, delay: Duration) {
    if delay.is_zero() {
        return;
    }
    let start = Instant::now();
    let state = shared.lock();
    let waiting = |state: &mut State| !state.lost && start.elapsed() < delay;
    drop(shared.changed.wait_timeout_while(state, delay, waiting));
}

impl State {
    /// The allocation in which an address can be, and the offset in it.
    fn find(&self, address: u64) -> Option<(&Memory, u64)> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        Some((block, address - start))
    }

    fn copy(&mut self, job: &Job) -> Result<(), DeviceError> {
        let device = self.id.unwrap_or(DeviceId { kind: "host", number: 0 });
        if self.lost {
            return Err(DeviceError::Lost { device, meaning: "it was lost on purpose".into() });
        }
        match &mut self.fail_after {
            Some(0) => {
                self.fail_after = None;
                let meaning = "it was told to fail".into();
                return Err(DeviceError::Failed { device, operation: "copy", code: 1, meaning });
            }
            Some(left) => *left -= 1,
            None => {}
        }
        for range in &job.ranges {
            let bad = || DeviceError::BadPlace { device, address: range.device, bytes: range.len };
            let (block, offset) = self.find(range.device).ok_or_else(bad)?;
            // SAFETY: who submitted the copy keeps so many bytes of host memory valid until it has ended, and no reference
            // to them exists. It has not ended yet.
            let host = unsafe { std::slice::from_raw_parts_mut(range.host, range.len) };
            match job.direction {
                Direction::ToHost => block.read(offset, host),
                Direction::ToDevice => block.write(offset, host),
            }
            .map_err(|_| bad())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_on_it_is_copied_and_never_touched() {
        let device = HostDevice::new().unwrap();
        let memory = device.allocate(3 << 20).unwrap();
        let bytes: Vec<u8> = (0..2_500_000u32).map(|i| (i % 251) as u8).collect();
        memory.write(7, &bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        memory.read(7, &mut back).unwrap();
        assert_eq!(back, bytes);
        assert_eq!(memory.base(), Err(MemoryError::OnDevice { device: device.id() }));
        assert_eq!(memory.place().device, Some(device.id()));
        assert!(matches!(memory.read(3 << 20, &mut [0]), Err(MemoryError::OutOfRange { .. })));
        device.fail_after(1);
        memory.write(0, &[1]).unwrap();
        let failed = memory.write(0, &[1]).unwrap_err();
        assert!(failed.to_string().contains("told to fail"), "{failed}");
        memory.write(0, &[1]).unwrap();
        device.lose();
        let lost = memory.read(0, &mut [0]).unwrap_err();
        assert!(matches!(lost, MemoryError::Device(DeviceError::Lost { .. })), "{lost}");
        drop(memory);
        assert_eq!(device.allocations(), 0);
    }

    #[test]
    fn digests_of_blocks_on_a_device_are_those_of_the_same_bytes_in_host_memory() {
        use kv_proto::message::GroupList;
        use kv_proto::{BlockId, BlockLayout, BlockOrder, Dtype, RegionKind, RegionLayout};

        let bytes = 1_300_000;
        let region = RegionLayout {
            layer: "l0".into(),
            kind: RegionKind::KeyValue,
            group: 0,
            memory: 0,
            base: 5,
            block_stride: bytes + 3,
            block_bytes: bytes,
            dtype: Dtype::U8,
            heads: 10,
            heads_total: 0,
            head_size: 1024,
        };
        let layout =
            BlockLayout { block_tokens: 4, blocks: 3, kernel_tokens: 0, order: BlockOrder::HeadsTokens, groups: vec![], regions: vec![region] };
        let device = HostDevice::new().unwrap();
        let far = device.allocate(5 + 3 * (bytes as usize + 3)).unwrap();
        let near = Memory::allocate(far.len()).unwrap();
        let content: Vec<u8> = (0..far.len()).map(|i| (i * i % 251) as u8).collect();
        let groups = [GroupList { group: 0, blocks: [2, 0].into_iter().map(BlockId).collect() }];
        let digest = |memory: &Memory| {
            memory.write(0, &content).unwrap();
            kv_worker::digest::Digester::new(layout.clone(), vec![memory.clone()]).digest(&groups)
        };
        let digests = digest(&far).unwrap();
        assert_eq!(digests, digest(&near).unwrap());
        assert_ne!(digests[0], digests[1]);
        device.lose();
        let lost = kv_worker::digest::Digester::new(layout.clone(), vec![far]).digest(&groups);
        assert!(matches!(lost, Err(MemoryError::Device(DeviceError::Lost { .. }))), "{lost:?}");
    }

    #[test]
    fn copies_can_be_held_back() {
        let device = HostDevice::new().unwrap();
        let memory = device.allocate(64).unwrap();
        let pinned = device.allocate_pinned(64).unwrap();
        assert_eq!(device.pinned(), 64);
        device.hold();
        let range = CopyRange { device: memory.place().address, host: pinned.base().unwrap(), len: 64 };
        // SAFETY: both memories outlive the copy, which is waited for.
        let mut copying = unsafe { device.copy(Direction::ToDevice, &[range]) }.unwrap();
        assert_eq!(copying.wait(Duration::from_millis(20)), Ok(false));
        // What looks past the queue sees that.
        pinned.write(0, &[7; 64]).unwrap();
        let (address, mut bytes) = (memory.place().address, [1; 64]);
        assert!(device.peek(address, &mut bytes) && bytes == [0; 64]);
        assert!(device.poke(address + 60, &[9; 4]) && device.peek(address, &mut bytes));
        assert_eq!(bytes[59..], [0, 9, 9, 9, 9]);
        assert!(!device.poke(address + 1, &bytes) && !device.peek(address - 1, &mut bytes));
        device.release();
        assert_eq!(copying.wait(Duration::from_secs(10)), Ok(true));
        assert!(device.peek(address, &mut bytes) && bytes == [7; 64]);
        drop((memory, pinned));
        assert_eq!((device.pinned(), device.allocations(), device.copies()), (0, 0, (1, 1)));
    }
}
