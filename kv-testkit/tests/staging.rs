//! A worker's copies between a device and its host pool: which bytes move, and what is said of copies that are slow, that fail,
//! and that never end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(unsafe_code)] // Names memory of a device that never copies.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kv_proto::{
    BlockId, BlockLayout, BlockOrder, CopyFailure, CopyGroup, CopyId, CopyNews, CopyOrder, CopyWay, Dtype,
    RegionKind, RegionLayout,
};
use kv_testkit::device::HostDevice;
use kv_transport::device::{CopyRange, Copying, Direction};
use kv_transport::{Device, DeviceError, DeviceId, Memory};
use kv_worker::staging::{DeviceCache, HostPool, Stager, StagerError, StagingLimits};

const LIMIT: Duration = Duration::from_secs(20);
const BLOCK: usize = 64;
const DEVICE_BLOCKS: u32 = 8;
const HOST_BLOCKS: u32 = 4;

/// Two layers of blocks. On the device each has an area of its own; in rows both of a block lie side by side.
fn layout(blocks: u32, rows: bool) -> BlockLayout {
    let region = |layer: u64| RegionLayout {
        layer: format!("l{layer}"),
        kind: RegionKind::KeyValue,
        group: 0,
        memory: 0,
        base: layer * BLOCK as u64 * if rows { 1 } else { u64::from(blocks) },
        block_stride: BLOCK as u64 * if rows { 2 } else { 1 },
        block_bytes: BLOCK as u64,
        dtype: Dtype::U8,
        heads: 1,
        heads_total: 0,
        head_size: 16,
    };
    let regions = vec![region(0), region(1)];
    BlockLayout {
        block_tokens: 4,
        blocks,
        kernel_tokens: 0,
        order: BlockOrder::HeadsTokens,
        groups: vec![],
        regions,
    }
}

struct Rig {
    device: HostDevice,
    far: Memory,
    near: Memory,
    rows: bool,
    stager: Stager,
    news: Receiver<(CopyId, CopyNews)>,
}

fn limits(copies: usize, ms: u64) -> StagingLimits {
    StagingLimits { copies, copy: Duration::from_millis(ms) }
}

impl Rig {
    fn new(rows: bool, limits: StagingLimits) -> Self {
        let device = HostDevice::new().unwrap();
        let far = device.allocate(DEVICE_BLOCKS as usize * 2 * BLOCK).unwrap();
        let near = device.allocate_pinned(HOST_BLOCKS as usize * 2 * BLOCK).unwrap();
        let (tell, news) = channel();
        let cache = DeviceCache { layout: layout(DEVICE_BLOCKS, false), memories: vec![far.clone()], limits };
        let host = HostPool { layout: layout(HOST_BLOCKS, rows), memories: vec![near.clone()] };
        let tell =
            move |all: Vec<(CopyId, CopyNews)>| all.into_iter().for_each(|one| tell.send(one).unwrap());
        let stager = Stager::start(cache, host, Box::new(tell)).unwrap();
        Self { device, far, near, rows, stager, news }
    }

    fn order(&self, copy: u64, way: CopyWay, device: &[u32], host: &[u32]) {
        self.stager.order(vec![order(copy, way, device, host)]);
    }

    fn next(&self) -> (u64, CopyNews) {
        let (copy, news) = self.news.recv_timeout(LIMIT).expect("no word in time");
        (copy.0, news)
    }

    /// The ranges of a copy that went well.
    fn done(&self, copy: u64) -> u64 {
        match self.next() {
            (of, CopyNews::Done(stats)) if of == copy => stats.ranges,
            other => panic!("{other:?}"),
        }
    }

    /// Why a copy failed.
    fn failed(&self, copy: u64) -> (CopyFailure, String) {
        match self.next() {
            (of, CopyNews::Failed { reason, detail }) if of == copy => (reason, detail),
            other => panic!("{other:?}"),
        }
    }

    /// What a block of the device holds, past the queue of copies.
    fn far(&self, layer: u64, block: u32) -> [u8; BLOCK] {
        let offset = (layer * u64::from(DEVICE_BLOCKS) + u64::from(block)) * BLOCK as u64;
        let mut bytes = [0; BLOCK];
        assert!(self.device.peek(self.far.place().address + offset, &mut bytes));
        bytes
    }

    fn near(&self, layer: u64, block: u32) -> [u8; BLOCK] {
        let block = u64::from(block);
        let at = if self.rows { block * 2 + layer } else { layer * u64::from(HOST_BLOCKS) + block };
        let mut bytes = [0; BLOCK];
        self.near.read(at * BLOCK as u64, &mut bytes).unwrap();
        bytes
    }

    fn fill(&self) {
        for (layer, block) in (0..2).flat_map(|layer| (0..DEVICE_BLOCKS).map(move |block| (layer, block))) {
            let offset = (layer * u64::from(DEVICE_BLOCKS) + u64::from(block)) * BLOCK as u64;
            assert!(self.device.poke(self.far.place().address + offset, &mark(layer, block)));
        }
    }
}

fn mark(layer: u64, block: u32) -> [u8; BLOCK] {
    std::array::from_fn(|i| (layer as u8 * 100 + block as u8 * 7 + i as u8) | 1)
}

fn order(copy: u64, way: CopyWay, device: &[u32], host: &[u32]) -> CopyOrder {
    let list = |ids: &[u32]| ids.iter().copied().map(BlockId).collect();
    let group = CopyGroup { group: 0, device: list(device), host: list(host) };
    CopyOrder { copy: CopyId(copy), number: copy, way, groups: vec![group] }
}

#[test]
fn blocks_go_to_the_host_and_back_by_their_places_and_no_other_byte_moves() {
    for rows in [false, true] {
        let rig = Rig::new(rows, limits(4, 10_000));
        rig.fill();
        rig.order(1, CopyWay::Save, &[5, 0, 2], &[1, 2, 3]);
        rig.done(1);
        for layer in 0..2 {
            let host = [[0; BLOCK], mark(layer, 5), mark(layer, 0), mark(layer, 2)];
            assert_eq!([0, 1, 2, 3].map(|block| rig.near(layer, block)), host);
        }
        rig.order(2, CopyWay::Restore, &[7, 6], &[1, 3]);
        rig.done(2);
        for layer in 0..2 {
            let held = |block| match block {
                7 => mark(layer, 5),
                6 => mark(layer, 2),
                block => mark(layer, block),
            };
            (0..DEVICE_BLOCKS).for_each(|block| assert_eq!(rig.far(layer, block), held(block), "{block}"));
        }
    }
}

#[test]
fn neighbours_on_both_sides_are_one_range() {
    let rig = Rig::new(false, limits(4, 10_000));
    // Per layer: 3 to 5 go to 1 to 3; 0 stands alone.
    rig.order(1, CopyWay::Save, &[3, 0, 4, 5], &[1, 0, 2, 3]);
    assert_eq!(rig.done(1), 2 * 2);
    let rig = Rig::new(true, limits(4, 10_000));
    rig.order(1, CopyWay::Save, &[3, 4], &[0, 1]);
    assert_eq!(rig.done(1), 4, "the host's rows part what are neighbours on the device");
}

#[test]
fn orders_that_cannot_be_are_answered_with_the_field_and_both_values_and_copy_nothing() {
    let rig = Rig::new(false, limits(4, 10_000));
    let bad: &[(&[u32], &[u32], &str)] = &[
        (&[8], &[0], "group 0: device names block 8, its pool has 8 blocks"),
        (&[0], &[4], "group 0: host names block 4, its pool has 4 blocks"),
        (&[1, 1], &[0, 1], "group 0: device names block-1 twice"),
        (&[0, 1], &[2, 2], "group 0: host names block-2 twice"),
        (&[0, 1], &[2], "group 0: 2 device blocks for 1 host blocks"),
        (&[], &[], "the copy names no block"),
        (&[u32::MAX], &[0], "group 0: device names block 4294967295, its pool has 8 blocks"),
    ];
    for (copy, (device, host, why)) in (1..).zip(bad) {
        rig.order(copy, CopyWay::Restore, device, host);
        assert_eq!(rig.failed(copy), (CopyFailure::BadBlocks, (*why).to_owned()));
    }
    let mut other = order(20, CopyWay::Save, &[0], &[0]);
    other.groups[0].group = 1;
    rig.stager.order(vec![other]);
    assert_eq!(rig.failed(20).1, "group 1 of the copy: there are 1 groups");
    assert_eq!(rig.device.copies(), (0, 0));
}

#[test]
fn a_copy_that_fails_is_told_and_those_behind_it_go_well() {
    let rig = Rig::new(false, limits(4, 10_000));
    rig.fill();
    rig.device.fail_after(1);
    rig.order(1, CopyWay::Save, &[1], &[1]);
    rig.done(1);
    rig.order(2, CopyWay::Save, &[2], &[2]);
    let (reason, detail) = rig.failed(2);
    assert!(reason == CopyFailure::Device && detail.contains("told to fail"), "{detail}");
    rig.order(3, CopyWay::Save, &[3], &[3]);
    rig.done(3);
    assert_eq!([1, 2, 3].map(|block| rig.near(0, block)), [mark(0, 1), [0; BLOCK], mark(0, 3)]);
    rig.device.lose();
    rig.order(4, CopyWay::Save, &[1], &[1]);
    assert_eq!(rig.failed(4).0, CopyFailure::Device);
}

#[test]
fn a_copy_that_does_not_end_is_told_late_and_its_last_word_comes_when_it_is_over() {
    let rig = Rig::new(false, limits(2, 60));
    rig.fill();
    rig.device.hold();
    rig.order(1, CopyWay::Save, &[1], &[1]);
    rig.order(2, CopyWay::Save, &[2], &[2]);
    rig.order(3, CopyWay::Save, &[3], &[3]);
    let mut said: Vec<_> = (0..3).map(|_| rig.next()).collect();
    said.sort_by_key(|(copy, _)| *copy);
    assert_eq!(&said[..2], [(1, CopyNews::Late), (2, CopyNews::Late)]);
    let CopyNews::Failed { reason, detail } = &said[2].1 else { panic!("{said:?}") };
    assert_eq!((said[2].0, *reason), (3, CopyFailure::NotBegun), "{detail}");
    // No more than two at once, and nothing is told twice while it stays so.
    assert_eq!(rig.device.copies(), (2, 0));
    assert!(rig.news.recv_timeout(Duration::from_millis(150)).is_err());
    assert_eq!(rig.near(0, 1), [0; BLOCK]);
    rig.device.release();
    rig.done(1);
    rig.done(2);
    assert_eq!((rig.near(0, 1), rig.near(0, 3)), (mark(0, 1), [0; BLOCK]));
    // Its turn comes again once the device goes on.
    rig.order(4, CopyWay::Save, &[4], &[3]);
    rig.done(4);
    assert_eq!(rig.near(0, 3), mark(0, 4));
}

#[test]
fn slow_copies_wait_for_their_turn_and_all_come_to_their_end() {
    let rig = Rig::new(false, limits(2, 10_000));
    rig.fill();
    rig.device.delay(Duration::from_millis(5));
    for copy in 1..=4 {
        rig.order(copy, CopyWay::Save, &[copy as u32], &[copy as u32 - 1]);
    }
    for copy in 1..=4 {
        rig.done(copy);
    }
    assert_eq!((rig.stager.stats().begun, rig.stager.stats().over), (4, 4));
}

#[test]
fn an_order_that_comes_twice_is_followed_and_answered_once() {
    let rig = Rig::new(false, limits(4, 10_000));
    rig.device.hold();
    rig.order(2, CopyWay::Save, &[1], &[1]);
    // To answer these would say that the copy under way is over.
    rig.order(2, CopyWay::Save, &[9], &[9]);
    rig.order(1, CopyWay::Save, &[9], &[9]);
    rig.order(3, CopyWay::Save, &[9], &[1]);
    assert_eq!(rig.failed(3).0, CopyFailure::BadBlocks);
    assert_eq!(rig.stager.stats().repeated, 2);
    rig.device.release();
    rig.done(2);
    // The numbers tell, and not the ids: loads end in any order.
    let later = CopyOrder { number: 4, ..order(1, CopyWay::Save, &[3], &[3]) };
    rig.stager.order(vec![later]);
    rig.done(1);
}

#[test]
fn what_a_copy_uses_outlives_the_worker() {
    let Rig { device, far, near, mut stager, news, .. } = Rig::new(false, limits(1, 10_000));
    device.hold();
    stager.order(vec![order(1, CopyWay::Save, &[1], &[1]), order(2, CopyWay::Save, &[2], &[2])]);
    assert!(device.wait_for(LIMIT, |begun, _| begun == 1));
    stager.shut_down(Duration::from_millis(30));
    drop((far, near, stager));
    let (copy, word) = news.recv_timeout(LIMIT).unwrap();
    let closed = matches!(word, CopyNews::Failed { reason: CopyFailure::Closed, .. });
    assert!(closed && copy == CopyId(2), "{copy} {word:?}");
    assert_eq!((device.allocations(), device.pinned()), (1, HOST_BLOCKS as usize * 2 * BLOCK));
    device.release();
    assert!(matches!(news.recv_timeout(LIMIT).unwrap(), (CopyId(1), CopyNews::Done(_))));
    // The thread ends, and with it the last that kept the memories.
    assert!(news.recv_timeout(LIMIT).is_err());
    assert_eq!((device.allocations(), device.pinned()), (0, 0));
}

#[test]
fn a_device_whose_code_panics_is_asked_for_nothing_more_and_its_copy_is_never_over() {
    #[derive(Debug)]
    struct Panics;
    impl Device for Panics {
        fn id(&self) -> DeviceId {
            DeviceId { kind: "panics", number: 0 }
        }
        fn name(&self) -> String {
            "panics".into()
        }
        fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError> {
            Ok(Memory::allocate(bytes).unwrap())
        }
        unsafe fn copy(&self, _: Direction, _: &[CopyRange]) -> Result<Box<dyn Copying>, DeviceError> {
            panic!("on purpose")
        }
    }
    let life = Arc::new(());
    let bytes = DEVICE_BLOCKS as usize * 2 * BLOCK;
    // SAFETY: this device never copies anything.
    let far = unsafe { Memory::device(Arc::new(Panics), 1 << 40, bytes, Arc::clone(&life) as _) }.unwrap();
    let near = Memory::allocate(HOST_BLOCKS as usize * 2 * BLOCK).unwrap();
    let (tell, news) = channel();
    let cache =
        DeviceCache { layout: layout(DEVICE_BLOCKS, false), memories: vec![far], limits: limits(4, 10_000) };
    let host = HostPool { layout: layout(HOST_BLOCKS, false), memories: vec![near] };
    let tell = move |all: Vec<(CopyId, CopyNews)>| all.into_iter().for_each(|one| tell.send(one).unwrap());
    let stager = Stager::start(cache, host, Box::new(tell)).unwrap();
    stager.order(vec![order(1, CopyWay::Save, &[1], &[1]), order(2, CopyWay::Save, &[2], &[2])]);
    assert_eq!(news.recv_timeout(LIMIT).unwrap(), (CopyId(1), CopyNews::Late));
    let (copy, word) = news.recv_timeout(LIMIT).unwrap();
    let CopyNews::Failed { detail, .. } = word else { panic!("{word:?}") };
    assert!(copy == CopyId(2) && detail.contains("panicked"), "{copy} {detail}");
    drop(stager);
    assert_eq!(Arc::strong_count(&life), 2, "the memory may be in use for ever");
}

#[test]
fn a_cache_and_a_pool_that_do_not_hold_the_same_are_refused_with_both_values() {
    let device = HostDevice::new().unwrap();
    let far = device.allocate(DEVICE_BLOCKS as usize * 2 * BLOCK).unwrap();
    let near = Memory::allocate(HOST_BLOCKS as usize * 2 * BLOCK).unwrap();
    let refused = |layout: BlockLayout, far: &Memory, near: &Memory, host: BlockLayout, limits| {
        let cache = DeviceCache { layout, memories: vec![far.clone()], limits };
        let host = HostPool { layout: host, memories: vec![near.clone()] };
        Stager::start(cache, host, Box::new(|_| {})).unwrap_err()
    };
    let (good, host) = (layout(DEVICE_BLOCKS, false), layout(HOST_BLOCKS, true));
    let usual = StagingLimits::default();
    let mut other = host.clone();
    other.regions[1].layer = "l7".to_owned();
    let error = refused(good.clone(), &far, &near, other, usual);
    assert_eq!(error.to_string(), "layer of region 1 is l1 on the device and l7 in the host pool");
    let error = refused(good.clone(), &far, &far, host.clone(), usual);
    assert!(matches!(error, StagerError::HostMemory { index: 0, .. }), "{error}");
    let error = refused(good.clone(), &near, &near, host.clone(), usual);
    assert!(matches!(error, StagerError::Layout(_)), "the memory is too small: {error}");
    let error = refused(host.clone(), &near, &near, host.clone(), usual);
    assert_eq!(error, StagerError::NoDevice);
    let error = refused(good, &far, &near, host, limits(0, 1));
    assert_eq!(error, StagerError::Zero { field: "copies" });
}
