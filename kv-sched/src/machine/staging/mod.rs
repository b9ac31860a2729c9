//! Host staging: the way of a request's blocks between the engine's device memory and its host pool.
//!
//! ```text
//!  producer:  Waiting ──room──► Saving ──every rank done──► Saved ──lease granted──► Held ──lease over──► (room free)
//!  consumer:  Waiting ──room──► Loading ──load confirmed──► Restoring ──every rank done──► (room free)
//!                                  └──given up, load still held──► Held ──load over──► (room free)
//!  either:    Waiting ──no room in time──► (failed)
//!             Saving, Restoring ──failed, late, or given up──► Leaving ──every rank done or failed──► (room free)
//!                                                                └──no word for long──► Silent ──as Leaving──►
//! ```
//!
//! To the hand-over the host pool is the KV memory: offers and loads name its blocks. This machine gives its blocks out,
//! orders the copies, and tells the engine when device blocks are touched no more. The device's pool stays the engine's own; a
//! block of one pool is never in the other's accounts.
//!
//! A copy has ended on a rank when that rank says so, and by nothing else: as long as one rank has not, the copy's host blocks
//! are given to nobody, and the engine is told to keep its device blocks.

mod pool;
mod types;

use std::collections::{BTreeMap, BTreeSet};

use kv_proto::staging::{CopySide, check_list};
use kv_proto::{CopyGroup, CopyId, CopyNews, CopyOrder, CopyWay, Moment, Rank, Timers};

use crate::event::HoldId;
use pool::HostPool;
pub use types::{
    DeviceVerdict, StagedBlocks, StagingConfig, StagingConfigError, StagingError, StagingEvent,
    StagingFailure, StagingStats,
};

/// Blocks of one group on both sides, by their position in the sequence.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pair {
    first: u32,
    device: kv_proto::BlockList,
    host: kv_proto::BlockList,
}

/// A copy in the workers' hands.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Copying {
    pairs: Vec<Pair>,
    /// Ranks that have not ended it.
    ranks: BTreeSet<Rank>,
    until: Moment,
}

/// What a request has of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Record {
    /// It waits for room, the longest waiting first.
    Waiting { way: CopyWay, device: Vec<StagedBlocks>, until: Moment },
    /// Its blocks are on their way to the host.
    Saving(Copying),
    /// They are there, and the engine has not said what becomes of them.
    Saved { host: Vec<kv_proto::BlockList> },
    /// A lease or a load that the request no longer waits for holds its host blocks.
    Held { host: Vec<kv_proto::BlockList>, hold: HoldId },
    /// A load may write into its host blocks; that has a time limit of its own.
    Loading { pairs: Vec<Pair> },
    /// Its blocks are on their way to the device.
    Restoring(Copying),
    /// The copy is of no use any more, and not over on every rank.
    Leaving(Copying),
    /// As before, and the engine has been told that ranks are silent.
    Silent { pairs: Vec<Pair>, ranks: BTreeSet<Rank> },
}

impl Record {
    const fn name(&self) -> &'static str {
        match self {
            Self::Waiting { .. } => "waiting",
            Self::Saving(_) => "saving",
            Self::Saved { .. } => "saved",
            Self::Held { .. } => "held",
            Self::Loading { .. } => "loading",
            Self::Restoring(_) => "restoring",
            Self::Leaving(_) => "leaving",
            Self::Silent { .. } => "silent",
        }
    }
}

/// The machine. One per engine whose KV cache lies in device memory.
#[derive(Debug, Clone, Hash)]
pub struct Staging {
    config: StagingConfig,
    next_copy: u64,
    next_order: u64,
    pool: HostPool,
    /// In the order in which they were asked for, which is the order in which they get room.
    records: BTreeMap<CopyId, Record>,
    timers: Timers<CopyId>,
    orders: Vec<CopyOrder>,
    events: Vec<StagingEvent>,
    stats: StagingStats,
}

impl Staging {
    /// A machine whose host pool is all free.
    pub fn new(config: StagingConfig) -> Result<Self, StagingConfigError> {
        config.check()?;
        Ok(Self {
            pool: HostPool::new(config.host_blocks),
            config,
            next_copy: 1,
            next_order: 1,
            records: BTreeMap::new(),
            timers: Timers::default(),
            orders: Vec::new(),
            events: Vec::new(),
            stats: StagingStats::default(),
        })
    }

    /// The configuration in force.
    pub fn config(&self) -> &StagingConfig {
        &self.config
    }

    /// A request has finished and is about to be handed over: its blocks are to be copied to the host. `device` is what the
    /// end of the request itself lists, by group. [`StagingEvent::Saved`] or [`StagingEvent::Failed`] follows; until then
    /// the device blocks must stay as they are.
    pub fn save(&mut self, now: Moment, device: Vec<StagedBlocks>) -> Result<CopyId, StagingError> {
        self.ask(now, CopyWay::Save, device)
    }

    /// A request has device blocks that a load is to fill: it needs as many host blocks first. [`StagingEvent::RoomGiven`] or
    /// [`StagingEvent::Failed`] follows. The device blocks are not touched before [`Staging::restore`].
    pub fn room(&mut self, now: Moment, device: Vec<StagedBlocks>) -> Result<CopyId, StagingError> {
        self.ask(now, CopyWay::Restore, device)
    }

    fn ask(&mut self, now: Moment, way: CopyWay, device: Vec<StagedBlocks>) -> Result<CopyId, StagingError> {
        let needed = self.needed(&device)?;
        if needed > self.config.host_blocks {
            self.stats.no_room += 1;
            return Err(StagingError::TooLarge { needed, blocks: self.config.host_blocks });
        }
        let copy = CopyId(self.next_copy);
        self.next_copy += 1;
        let until = now + self.config.room_limit;
        self.records.insert(copy, Record::Waiting { way, device, until });
        self.timers.set(until, copy);
        self.grant(now);
        Ok(copy)
    }

    /// Checks lists of device blocks, and counts them.
    fn needed(&self, device: &[StagedBlocks]) -> Result<u32, StagingError> {
        if device.len() != self.config.groups as usize {
            return Err(StagingError::Groups { ours: self.config.groups, got: device.len() });
        }
        let mut needed = 0u32;
        for (group, staged) in (0..).zip(device) {
            check_list(group, CopySide::Device, &staged.blocks, self.config.device_blocks)?;
            needed = needed.saturating_add(staged.blocks.len());
        }
        if needed == 0 { Err(kv_proto::CopyError::Nothing.into()) } else { Ok(needed) }
    }

    /// Gives room to those that wait, in their order; nobody overtakes the first.
    fn grant(&mut self, now: Moment) {
        loop {
            let first = self.records.iter().find_map(|(copy, record)| match record {
                Record::Waiting { way, device, until } => Some((*copy, *way, device, *until)),
                _ => None,
            });
            let Some((copy, way, device, until)) = first else { return };
            let lists = device.iter().map(|staged| staged.blocks.len());
            let Some(host) = self.pool.take(lists) else { return };
            let pairs: Vec<Pair> = (device.iter().zip(host))
                .map(|(staged, host)| Pair { first: staged.first, device: staged.blocks.clone(), host })
                .collect();
            self.timers.clear(until, copy);
            let record = match way {
                CopyWay::Save => Record::Saving(self.order(now, copy, way, pairs)),
                CopyWay::Restore => {
                    self.events.push(StagingEvent::RoomGiven { copy, host: host_side(&pairs) });
                    Record::Loading { pairs }
                }
            };
            self.records.insert(copy, record);
        }
    }

    /// Orders a copy of all ranks.
    fn order(&mut self, now: Moment, copy: CopyId, way: CopyWay, pairs: Vec<Pair>) -> Copying {
        let part = |(group, pair): (u32, &Pair)| CopyGroup {
            group,
            device: pair.device.clone(),
            host: pair.host.clone(),
        };
        let groups = (0..).zip(&pairs).filter(|(_, pair)| !pair.host.is_empty()).map(part).collect();
        self.orders.push(CopyOrder { copy, number: self.next_order, way, groups });
        self.next_order += 1;
        let until = now + self.config.copy_limit;
        self.timers.set(until, copy);
        Copying { pairs, ranks: (0..self.config.ranks).map(Rank).collect(), until }
    }

    /// The load into a request's host blocks has ended: those before position `end` of the sequence (counted in blocks) hold
    /// confirmed bytes and are to be copied to the device; room behind them is free at once. [`StagingEvent::Restored`] or
    /// [`StagingEvent::Failed`] follows if the answer is true. False: there is nothing to copy, and the room is free.
    pub fn restore(&mut self, now: Moment, copy: CopyId, end: u32) -> Result<bool, StagingError> {
        let Some(Record::Loading { pairs }) = self.records.get_mut(&copy) else {
            return Err(self.wrong(copy, "restore"));
        };
        let mut kept = std::mem::take(pairs);
        for pair in &mut kept {
            let count = end.saturating_sub(pair.first) as usize;
            self.pool.give(pair.host.iter().skip(count));
            pair.host = pair.host.iter().take(count).collect();
            pair.device = pair.device.iter().take(count).collect();
        }
        let nothing = kept.iter().all(|pair| pair.host.is_empty());
        if nothing {
            self.records.remove(&copy);
        } else {
            let copying = self.order(now, copy, CopyWay::Restore, kept);
            self.records.insert(copy, Record::Restoring(copying));
        }
        self.grant(now);
        Ok(!nothing)
    }

    /// The request ended, or wants no copy any more, in whatever state it is. `hold` is what still holds its host
    /// blocks: the lease that was granted for what is saved, or the load whose request is gone; no other state has one. The
    /// answer says what is to become of its device blocks. Of a copy that is over, and of one let go before, there is nothing
    /// left.
    pub fn let_go(
        &mut self,
        now: Moment,
        copy: CopyId,
        hold: Option<HoldId>,
    ) -> Result<DeviceVerdict, StagingError> {
        let holdable = matches!(self.records.get(&copy), Some(Record::Saved { .. } | Record::Loading { .. }));
        if hold.is_some() && !holdable {
            // To let go of blocks that a peer may touch would be the fault that all of this is made against.
            return Err(self.wrong(copy, "hold"));
        }
        // What was to be told to the request is not news any more; that its device blocks are free is.
        self.events.retain(|event| event.copy() != copy || matches!(event, StagingEvent::Over { .. }));
        let verdict = match self.records.remove(&copy) {
            None => DeviceVerdict::Free,
            Some(Record::Waiting { until, .. }) => {
                self.timers.clear(until, copy);
                DeviceVerdict::Free
            }
            Some(Record::Saving(copying) | Record::Restoring(copying)) => self.leave(now, copy, copying),
            Some(Record::Saved { host }) => self.keep_or_give(copy, host, hold),
            Some(Record::Loading { pairs }) => {
                let host = pairs.into_iter().map(|pair| pair.host).collect();
                self.keep_or_give(copy, host, hold)
            }
            Some(record @ Record::Held { .. }) => {
                self.records.insert(copy, record);
                DeviceVerdict::Free
            }
            Some(record @ (Record::Leaving(_) | Record::Silent { .. })) => {
                self.records.insert(copy, record);
                DeviceVerdict::Hold
            }
        };
        self.grant(now);
        Ok(verdict)
    }

    fn keep_or_give(
        &mut self,
        copy: CopyId,
        host: Vec<kv_proto::BlockList>,
        hold: Option<HoldId>,
    ) -> DeviceVerdict {
        match hold {
            Some(hold) => drop(self.records.insert(copy, Record::Held { host, hold })),
            None => host.iter().for_each(|list| self.pool.give(list.iter())),
        }
        DeviceVerdict::Free
    }

    /// A copy is of no use any more. If no worker has heard of it, it is over.
    fn leave(&mut self, now: Moment, copy: CopyId, copying: Copying) -> DeviceVerdict {
        self.timers.clear(copying.until, copy);
        if let Some(unsent) = self.orders.iter().position(|order| order.copy == copy) {
            self.orders.remove(unsent);
            self.give(&copying.pairs);
            return DeviceVerdict::Free;
        }
        if copying.ranks.is_empty() {
            self.give(&copying.pairs);
            return DeviceVerdict::Free;
        }
        let until = now + self.config.copy_limit + self.config.report_grace;
        self.timers.set(until, copy);
        self.records.insert(copy, Record::Leaving(Copying { until, ..copying }));
        DeviceVerdict::Hold
    }

    fn give(&mut self, pairs: &[Pair]) {
        pairs.iter().for_each(|pair| self.pool.give(pair.host.iter()));
    }

    /// What held host blocks is over: the scheduler said [`SchedEvent::BlocksReleased`](crate::SchedEvent::BlocksReleased).
    /// A hold that is not known here does nothing.
    pub fn released(&mut self, now: Moment, hold: HoldId) {
        let by =
            |(_, record): &(&CopyId, &Record)| matches!(record, Record::Held { hold: of, .. } if *of == hold);
        let Some(copy) = self.records.iter().find(by).map(|(copy, _)| *copy) else { return };
        if let Some(Record::Held { host, .. }) = self.records.remove(&copy) {
            host.iter().for_each(|list| self.pool.give(list.iter()));
        }
        self.grant(now);
    }

    /// What one rank says of a copy. Repeated words, and those of ranks or copies that are not, are counted and do
    /// nothing.
    pub fn news(&mut self, now: Moment, rank: Rank, copy: CopyId, news: CopyNews) {
        let Some(record) = self.records.remove(&copy) else {
            self.stats.stray_news += 1;
            return;
        };
        let waits = match &record {
            Record::Saving(copying) | Record::Restoring(copying) | Record::Leaving(copying) => {
                copying.ranks.contains(&rank)
            }
            Record::Silent { ranks, .. } => ranks.contains(&rank),
            Record::Waiting { .. } | Record::Saved { .. } | Record::Held { .. } | Record::Loading { .. } => {
                false
            }
        };
        if !waits {
            self.stats.stray_news += 1;
            self.records.insert(copy, record);
            return;
        }
        match record {
            Record::Saving(copying) => self.copied(now, (rank, copy), CopyWay::Save, copying, news),
            Record::Restoring(copying) => self.copied(now, (rank, copy), CopyWay::Restore, copying, news),
            Record::Leaving(mut copying) => {
                if news != CopyNews::Late {
                    copying.ranks.remove(&rank);
                }
                if copying.ranks.is_empty() {
                    self.timers.clear(copying.until, copy);
                    self.over(now, copy, &copying.pairs);
                } else {
                    self.records.insert(copy, Record::Leaving(copying));
                }
            }
            Record::Silent { pairs, mut ranks } => {
                if news != CopyNews::Late {
                    ranks.remove(&rank);
                }
                if ranks.is_empty() {
                    self.over(now, copy, &pairs);
                } else {
                    self.records.insert(copy, Record::Silent { pairs, ranks });
                }
            }
            // No rank waits in these; the record goes back as it was.
            other => drop(self.records.insert(copy, other)),
        }
    }

    /// A word of a rank about a copy that a request waits for.
    fn copied(
        &mut self,
        now: Moment,
        (rank, copy): (Rank, CopyId),
        way: CopyWay,
        mut copying: Copying,
        news: CopyNews,
    ) {
        match news {
            CopyNews::Done(stats) => {
                copying.ranks.remove(&rank);
                self.stats.bytes = self.stats.bytes.saturating_add(stats.bytes);
                self.stats.ranges = self.stats.ranges.saturating_add(stats.ranges);
                if copying.ranks.is_empty() {
                    return self.done(now, copy, way, copying);
                }
                let record = match way {
                    CopyWay::Save => Record::Saving(copying),
                    CopyWay::Restore => Record::Restoring(copying),
                };
                self.records.insert(copy, record);
            }
            CopyNews::Failed { reason, detail } => {
                copying.ranks.remove(&rank);
                self.stats.failed += 1;
                self.fail(now, copy, copying, StagingFailure::Copy { rank, reason, detail });
            }
            CopyNews::Late => {
                self.stats.late += 1;
                self.fail(now, copy, copying, StagingFailure::Late { ranks: vec![rank] });
            }
        }
    }

    fn done(&mut self, now: Moment, copy: CopyId, way: CopyWay, copying: Copying) {
        self.timers.clear(copying.until, copy);
        match way {
            CopyWay::Save => {
                self.stats.saved += 1;
                let host = host_side(&copying.pairs);
                let lists = copying.pairs.into_iter().map(|pair| pair.host).collect();
                self.records.insert(copy, Record::Saved { host: lists });
                self.events.push(StagingEvent::Saved { copy, host });
            }
            CopyWay::Restore => {
                self.stats.restored += 1;
                self.give(&copying.pairs);
                self.events.push(StagingEvent::Restored { copy });
                self.grant(now);
            }
        }
    }

    /// The request is told now; the blocks wait for the last rank.
    fn fail(&mut self, now: Moment, copy: CopyId, copying: Copying, failure: StagingFailure) {
        let busy = self.leave(now, copy, copying) == DeviceVerdict::Hold;
        self.events.push(StagingEvent::Failed { copy, failure, busy });
        self.grant(now);
    }

    fn over(&mut self, now: Moment, copy: CopyId, pairs: &[Pair]) {
        self.give(pairs);
        self.events.push(StagingEvent::Over { copy });
        self.grant(now);
    }

    /// Lets deadlines pass that have come. To be called after the news that has arrived was taken.
    pub fn time_passed(&mut self, now: Moment) {
        while let Some(copy) = self.timers.due(now) {
            match self.records.remove(&copy) {
                Some(Record::Waiting { device, until, .. }) if until <= now => {
                    self.stats.no_room += 1;
                    let needed = device.iter().fold(0u32, |sum, s| sum.saturating_add(s.blocks.len()));
                    let failure = StagingFailure::NoRoom { needed, free: self.pool.free() };
                    self.events.push(StagingEvent::Failed { copy, failure, busy: false });
                    self.grant(now);
                }
                Some(Record::Saving(copying) | Record::Restoring(copying)) if copying.until <= now => {
                    self.stats.late += 1;
                    let ranks = copying.ranks.iter().copied().collect();
                    self.fail(now, copy, copying, StagingFailure::Late { ranks });
                }
                Some(Record::Leaving(Copying { pairs, ranks, until })) if until <= now => {
                    let missing = ranks.iter().copied().collect();
                    self.events.push(StagingEvent::RanksSilent { copy, missing });
                    self.records.insert(copy, Record::Silent { pairs, ranks });
                }
                // A reminder that outlived its state.
                Some(other) => drop(self.records.insert(copy, other)),
                None => {}
            }
        }
    }

    /// When [`Staging::time_passed`] has something to do at the latest.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.next()
    }

    /// The copies that the workers are to make, for the next plan.
    pub fn take_orders(&mut self) -> Vec<CopyOrder> {
        std::mem::take(&mut self.orders)
    }

    /// Puts orders back that could not be carried, in front of what has come since. Of copies that were let go meanwhile
    /// nothing becomes known here: take and put back without a call between.
    pub fn put_back(&mut self, mut orders: Vec<CopyOrder>) {
        orders.append(&mut self.orders);
        self.orders = orders;
    }

    /// Whether [`Staging::take_orders`] has something, so that an idle engine makes a step for it.
    pub fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }

    /// What happened since the last call, in order.
    pub fn take_events(&mut self) -> Vec<StagingEvent> {
        std::mem::take(&mut self.events)
    }

    /// Counters.
    pub fn stats(&self) -> StagingStats {
        self.stats
    }

    /// Host blocks that somebody has: requests, copies, or what holds them.
    pub fn host_blocks_held(&self) -> u32 {
        self.config.host_blocks - self.pool.free()
    }

    /// Records of every kind, and how many of them wait for room.
    pub fn counts(&self) -> (usize, usize) {
        let waiting = self.records.values().filter(|record| matches!(record, Record::Waiting { .. }));
        (self.records.len(), waiting.count())
    }

    fn wrong(&self, copy: CopyId, asked: &'static str) -> StagingError {
        let state = self.records.get(&copy).map_or("over", Record::name);
        StagingError::WrongState { copy, state, asked }
    }
}

/// Where the host's side of a request lies, by group.
fn host_side(pairs: &[Pair]) -> Vec<StagedBlocks> {
    pairs.iter().map(|pair| StagedBlocks { first: pair.first, blocks: pair.host.clone() }).collect()
}
