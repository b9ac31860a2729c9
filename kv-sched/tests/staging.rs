//! Host staging: who has which host blocks, and when device blocks are touched no more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use common::{at, run};
use kv_proto::{
    BlockId, BlockList, CopyFailure, CopyId, CopyNews, CopyOrder, CopyStats, CopyWay, LeaseId, LoadId, Rank,
};
use kv_sched::{
    DeviceVerdict, HoldId, StagedBlocks, Staging, StagingConfig, StagingError, StagingEvent, StagingFailure,
};
use proptest::prelude::*;

const ROOM_MS: u64 = 1_000;
const COPY_MS: u64 = 5_000;

fn config(ranks: u32, groups: u32, host_blocks: u32) -> StagingConfig {
    StagingConfig {
        ranks,
        groups,
        device_blocks: 100,
        host_blocks,
        room_limit: Duration::from_millis(ROOM_MS),
        copy_limit: Duration::from_millis(COPY_MS),
        report_grace: Duration::from_millis(500),
    }
}

fn staging(ranks: u32, host_blocks: u32) -> Staging {
    Staging::new(config(ranks, 1, host_blocks)).unwrap()
}

fn from(first: u32, blocks: BlockList) -> StagedBlocks {
    StagedBlocks { first, blocks }
}

fn blocks(first: u32, count: u32) -> Vec<StagedBlocks> {
    vec![from(0, run(first, count))]
}

fn done() -> CopyNews {
    CopyNews::Done(CopyStats { bytes: 10, ranges: 1, copy_us: 5 })
}

fn failed() -> CopyNews {
    CopyNews::Failed { reason: CopyFailure::Device, detail: "broken".into() }
}

/// A copy that was ordered, and the workers' to be made from now on.
fn ordered(s: &mut Staging) -> Vec<CopyOrder> {
    s.take_orders()
}

#[test]
fn r053_every_block_that_the_end_lists_is_staged_before_anything_is_handed_over() {
    let mut s = Staging::new(config(2, 2, 10)).unwrap();
    // A window's group begins later in the sequence; the lists are in no order of ids.
    let full: BlockList = [9, 3, 40, 4].map(BlockId).into_iter().collect();
    let copy = s.save(at(0), vec![from(0, full.clone()), from(2, run(50, 2))]).unwrap();
    let orders = ordered(&mut s);
    let [order] = &orders[..] else { panic!("{orders:?}") };
    assert_eq!((order.copy, order.way), (copy, CopyWay::Save));
    assert_eq!(order.check(100, 10, 2), Ok(()));
    assert_eq!((&order.groups[0].device, &order.groups[0].host), (&full, &run(0, 4)));
    assert_eq!((&order.groups[1].device, &order.groups[1].host), (&run(50, 2), &run(4, 2)));
    s.news(at(1), Rank(0), copy, done());
    s.news(at(1), Rank(0), copy, done());
    assert_eq!(s.take_events(), [], "the other rank has not copied its part");
    s.news(at(2), Rank(1), copy, done());
    let host = vec![from(0, run(0, 4)), from(2, run(4, 2))];
    assert_eq!(host[1].from_start(), [0, 0, 4, 5].map(BlockId).into_iter().collect());
    assert_eq!(s.take_events(), [StagingEvent::Saved { copy, host }]);
    assert_eq!((s.stats().saved, s.stats().bytes, s.stats().stray_news), (1, 20, 1));
}

#[test]
fn r114_host_blocks_come_back_to_their_pool_by_the_end_of_what_holds_them_and_by_nothing_else() {
    let (lease, load) = (HoldId::Lease(LeaseId(1)), HoldId::Load(LoadId(1)));
    let mut s = staging(1, 4);
    let copy = s.save(at(0), blocks(20, 4)).unwrap();
    ordered(&mut s);
    s.news(at(1), Rank(0), copy, done());
    assert_eq!(s.let_go(at(1), copy, Some(lease)), Ok(DeviceVerdict::Free));
    // The load of the same number is another hold; neither that, nor letting go again, nor a late word is the lease's end.
    s.released(at(2), load);
    assert_eq!(s.let_go(at(2), copy, None), Ok(DeviceVerdict::Free));
    s.news(at(2), Rank(0), copy, done());
    assert_eq!(s.host_blocks_held(), 4);
    let waiting = s.room(at(3), blocks(30, 2)).unwrap();
    assert_eq!(s.take_events(), [], "there is no room, and what was let go is no news");
    s.released(at(4), lease);
    let host = blocks(0, 2);
    assert_eq!(s.take_events(), [StagingEvent::RoomGiven { copy: waiting, host }]);
    assert_eq!(s.let_go(at(5), waiting, Some(load)), Ok(DeviceVerdict::Free), "no copy has begun");
    s.released(at(6), load);
    s.released(at(6), load);
    assert_eq!((s.host_blocks_held(), s.counts()), (0, (0, 0)));
}

#[test]
fn r115_a_copy_that_nobody_has_begun_needs_no_word_to_be_over() {
    let mut s = staging(2, 4);
    let copy = s.save(at(0), blocks(20, 4)).unwrap();
    assert!(s.has_orders());
    assert_eq!(s.let_go(at(1), copy, None), Ok(DeviceVerdict::Free));
    assert!(!s.has_orders() && s.host_blocks_held() == 0 && s.next_deadline().is_none());
    // The same if the limit passes before a plan was carried.
    let copy = s.save(at(2), blocks(20, 4)).unwrap();
    s.time_passed(at(2 + COPY_MS));
    let failure = StagingFailure::Late { ranks: vec![Rank(0), Rank(1)] };
    assert_eq!(s.take_events(), [StagingEvent::Failed { copy, failure, busy: false }]);
    assert!(!s.has_orders() && s.host_blocks_held() == 0);
}

#[test]
fn blocks_of_a_copy_that_never_ends_are_used_by_nobody() {
    let mut s = staging(2, 4);
    let copy = s.save(at(0), blocks(20, 3)).unwrap();
    ordered(&mut s);
    s.news(at(1), Rank(0), copy, done());
    s.time_passed(at(COPY_MS));
    let failure = StagingFailure::Late { ranks: vec![Rank(1)] };
    assert_eq!(s.take_events(), [StagingEvent::Failed { copy, failure, busy: true }]);
    assert_eq!(s.let_go(at(COPY_MS), copy, None), Ok(DeviceVerdict::Hold));
    let next = s.save(at(COPY_MS), blocks(30, 2)).unwrap();
    assert_eq!(ordered(&mut s), [], "one block is free, and not two");
    let long = 3 * COPY_MS;
    s.time_passed(at(long));
    let missing = vec![Rank(1)];
    assert!(s.take_events().contains(&StagingEvent::RanksSilent { copy, missing }));
    assert_eq!(s.host_blocks_held(), 3);
    s.news(at(long + 1), Rank(1), copy, failed());
    assert_eq!(s.take_events(), [StagingEvent::Over { copy }]);
    assert_eq!(s.let_go(at(long + 2), next, None), Ok(DeviceVerdict::Free), "it had no room in time");
    assert_eq!(s.host_blocks_held(), 0);
}

#[test]
fn requests_get_room_in_their_order_and_nobody_overtakes() {
    let mut s = staging(1, 4);
    let first = s.room(at(0), blocks(20, 3)).unwrap();
    let large = s.room(at(1), blocks(30, 3)).unwrap();
    let small = s.room(at(2), blocks(40, 1)).unwrap();
    assert_eq!((s.take_events().len(), s.counts()), (1, (3, 2)), "the small one would fit");
    assert_eq!(s.restore(at(3), first, 0), Ok(false));
    let given = s.take_events();
    assert_eq!(given.iter().map(StagingEvent::copy).collect::<Vec<_>>(), [large, small]);
    // Who waits in front and gives up makes room for those behind.
    let large = s.room(at(4), blocks(50, 4)).unwrap();
    let small = s.save(at(5), blocks(60, 1)).unwrap();
    assert_eq!(s.let_go(at(6), large, None), Ok(DeviceVerdict::Free));
    assert!(ordered(&mut s).is_empty(), "all four are taken");
    s.time_passed(at(5 + ROOM_MS));
    let failure = StagingFailure::NoRoom { needed: 1, free: 0 };
    assert_eq!(s.take_events(), [StagingEvent::Failed { copy: small, failure, busy: false }]);
    assert_eq!(s.stats().no_room, 1);
}

#[test]
fn orders_are_numbered_as_they_are_given_in_whatever_order_loads_end() {
    let mut s = staging(1, 4);
    let first = s.room(at(0), blocks(20, 2)).unwrap();
    let second = s.room(at(0), blocks(30, 2)).unwrap();
    assert_eq!(s.restore(at(1), second, 9), Ok(true));
    let unsent = ordered(&mut s);
    assert_eq!(s.restore(at(2), first, 9), Ok(true));
    s.put_back(unsent);
    let orders: Vec<_> = ordered(&mut s).iter().map(|order| (order.copy, order.number)).collect();
    assert_eq!(orders, [(second, 1), (first, 2)]);
}

#[test]
fn what_can_never_be_staged_is_refused_with_the_values_and_changes_nothing() {
    let mut s = staging(1, 4);
    let refused = |s: &mut Staging, device| s.save(at(0), device).unwrap_err().to_string();
    assert_eq!(refused(&mut s, blocks(20, 5)), "5 blocks are to be staged, the host pool has 4");
    assert_eq!(refused(&mut s, vec![]), "0 lists of blocks for 1 groups");
    assert_eq!(refused(&mut s, blocks(20, 0)), "the copy names no block");
    let beyond = "group 0: device names block 100, its pool has 100 blocks";
    assert_eq!(refused(&mut s, blocks(98, 3)), beyond);
    let twice = [1, 2, 1].map(BlockId).into_iter().collect();
    assert_eq!(refused(&mut s, vec![from(0, twice)]), "group 0: device names block-1 twice");
    let error = StagingError::WrongState { copy: CopyId(1), state: "over", asked: "restore" };
    assert_eq!(s.restore(at(0), CopyId(1), 1), Err(error));
    assert_eq!((s.counts(), s.host_blocks_held(), s.stats().no_room), ((0, 0), 0, 1));
    for (field, config) in [
        ("ranks", config(0, 1, 1)),
        ("host_blocks", config(1, 1, 0)),
        ("room_limit", StagingConfig { room_limit: Duration::ZERO, ..config(1, 1, 1) }),
    ] {
        assert_eq!(Staging::new(config).unwrap_err().to_string(), format!("{field} is 0"));
    }
}

/// What is asked of a machine, or happens to it.
#[derive(Debug, Clone)]
enum Step {
    Save(u32),
    Room(u32),
    LetGo(usize, bool),
    Restore(usize, u32),
    Released(usize),
    News(u32, usize, u8),
    Carry,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let some = 0..6usize;
    prop_oneof![
        (1..5u32).prop_map(Step::Save),
        (1..5u32).prop_map(Step::Room),
        (some.clone(), any::<bool>()).prop_map(|(n, held)| Step::LetGo(n, held)),
        (some.clone(), 0..5u32).prop_map(|(n, end)| Step::Restore(n, end)),
        some.clone().prop_map(Step::Released),
        (0..3u32, some, 0..4u8).prop_map(|(rank, n, kind)| Step::News(rank, n, kind)),
        Just(Step::Carry),
        (1..2 * COPY_MS).prop_map(Step::Pass),
    ]
}

/// Who may touch which host blocks, by what came out of the machine and not by what it remembers.
#[derive(Default)]
struct Oracle {
    /// Copies in the workers' hands: ranks that are not over, and the host blocks.
    copies: BTreeMap<CopyId, (BTreeSet<Rank>, Vec<BlockId>)>,
    /// Blocks that a load writes or a lease covers.
    loading: BTreeMap<CopyId, Vec<BlockId>>,
    held: BTreeMap<HoldId, Vec<BlockId>>,
    saved: BTreeMap<CopyId, Vec<BlockId>>,
    device_held: BTreeSet<CopyId>,
    all: Vec<CopyId>,
    /// Of the last order.
    number: u64,
}

impl Oracle {
    fn in_use(&self) -> BTreeSet<BlockId> {
        let copies = self.copies.values().filter(|(ranks, _)| !ranks.is_empty()).map(|(_, blocks)| blocks);
        let others = self.loading.values().chain(self.held.values()).chain(self.saved.values());
        copies.chain(others).flatten().copied().collect()
    }

    fn fresh(&self, blocks: &[BlockId]) {
        let used = self.in_use();
        assert!(blocks.iter().all(|block| !used.contains(block)), "{blocks:?} of {used:?} given out again");
    }

    fn carry(&mut self, s: &mut Staging) {
        for order in s.take_orders() {
            assert_eq!(order.check(100, 6, 1), Ok(()));
            assert!(std::mem::replace(&mut self.number, order.number) < order.number);
            let host: Vec<BlockId> = order.groups[0].host.iter().collect();
            match order.way {
                CopyWay::Save => self.fresh(&host),
                // A part of what was loaded, and nothing else.
                CopyWay::Restore => assert!(
                    self.loading.remove(&order.copy).unwrap().starts_with(&host),
                    "restores what was not loaded"
                ),
            }
            assert!(!self.copies.contains_key(&order.copy), "{} is ordered twice", order.copy);
            self.copies.insert(order.copy, ([Rank(0), Rank(1)].into(), host));
        }
    }

    fn hear(&mut self, s: &mut Staging) {
        for event in s.take_events() {
            match event {
                StagingEvent::RoomGiven { copy, host } => {
                    let host: Vec<BlockId> = host[0].blocks.iter().collect();
                    self.fresh(&host);
                    self.loading.insert(copy, host);
                }
                StagingEvent::Saved { copy, host } => {
                    assert!(self.copies[&copy].0.is_empty(), "a rank still copies");
                    self.saved.insert(copy, host[0].blocks.iter().collect());
                }
                StagingEvent::Restored { copy } => assert!(self.copies[&copy].0.is_empty()),
                StagingEvent::Failed { copy, busy, .. } => {
                    let begun = self.copies.get(&copy).is_some_and(|(ranks, _)| !ranks.is_empty());
                    assert_eq!(busy, begun, "whether the device still works on it");
                    if busy {
                        self.device_held.insert(copy);
                    }
                }
                StagingEvent::Over { copy } => {
                    assert!(self.copies[&copy].0.is_empty(), "told over while a rank copies");
                    self.device_held.remove(&copy);
                }
                StagingEvent::RanksSilent { .. } => {}
            }
        }
    }

    fn apply(&mut self, s: &mut Staging, now: &mut u64, holds: &mut u64, step: &Step) {
        *now += 1;
        let pick =
            |n: usize| (!self.all.is_empty()).then(|| self.all[self.all.len() - 1 - n % self.all.len()]);
        match *step {
            Step::Save(count) => self.all.extend(s.save(at(*now), blocks(10, count))),
            Step::Room(count) => self.all.extend(s.room(at(*now), blocks(10, count))),
            Step::LetGo(n, held) => {
                let Some(copy) = pick(n) else { return };
                *holds += 1;
                let hold = held.then_some(HoldId::Lease(LeaseId(*holds)));
                let Ok(verdict) = s.let_go(at(*now), copy, hold) else { return };
                let begun = self.copies.get(&copy).is_some_and(|(ranks, _)| !ranks.is_empty());
                assert_eq!(verdict == DeviceVerdict::Hold, begun, "{verdict:?} while it is copied: {begun}");
                let host = self.loading.remove(&copy).or_else(|| self.saved.remove(&copy));
                if let (Some(hold), Some(host)) = (hold, host) {
                    self.held.insert(hold, host);
                }
                if begun {
                    self.device_held.insert(copy);
                }
            }
            Step::Restore(n, end) => {
                let Some(copy) = pick(n) else { return };
                if s.restore(at(*now), copy, end) == Ok(false) {
                    self.loading.remove(&copy);
                } else if let Some(host) = self.loading.get_mut(&copy) {
                    host.truncate(end as usize);
                }
                // Room that is free again is given to others at once.
                self.carry(s);
            }
            Step::Released(n) => {
                let Some(hold) = self.held.keys().copied().nth(n) else { return };
                self.held.remove(&hold);
                s.released(at(*now), hold);
            }
            Step::News(rank, n, kind) => {
                let Some(copy) = pick(n) else { return };
                let news = [done(), failed(), CopyNews::Late, done()][kind as usize].clone();
                // A worker speaks of what it was told.
                let Some((ranks, _)) = self.copies.get_mut(&copy) else { return };
                if news != CopyNews::Late {
                    ranks.remove(&Rank(rank));
                }
                s.news(at(*now), Rank(rank), copy, news);
            }
            Step::Carry => self.carry(s),
            Step::Pass(ms) => {
                *now += ms;
                s.time_passed(at(*now));
            }
        }
        self.carry(s);
        self.hear(s);
        assert!(s.host_blocks_held() as usize >= self.in_use().len(), "blocks in use count as free");
    }
}

proptest! {
    #[test]
    fn no_block_is_given_out_while_anything_may_touch_it_and_in_the_end_all_are_free(
        steps in prop::collection::vec(step(), 1..120)
    ) {
        let (mut s, mut oracle) = (staging(2, 6), Oracle::default());
        let (mut now, mut holds) = (0, 0);
        for step in &steps {
            oracle.apply(&mut s, &mut now, &mut holds, step);
        }
        // Everything comes to its end; then nothing is left of it.
        now += 10 * COPY_MS;
        s.time_passed(at(now));
        oracle.carry(&mut s);
        oracle.hear(&mut s);
        for copy in oracle.all.clone() {
            let _ = s.let_go(at(now), copy, None).unwrap();
        }
        for (copy, (ranks, _)) in &mut oracle.copies {
            for rank in std::mem::take(ranks) {
                s.news(at(now), rank, *copy, failed());
            }
        }
        oracle.hear(&mut s);
        for hold in oracle.held.keys() {
            s.released(at(now), *hold);
        }
        prop_assert_eq!((s.host_blocks_held(), s.counts(), s.next_deadline()), (0, (0, 0), None));
        prop_assert!(oracle.device_held.is_empty(), "device blocks of {:?} never came back", oracle.device_held);
    }
}
