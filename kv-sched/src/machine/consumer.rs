//! The consumer's policy: which requests take their prompt from a producer, and what became of it.
//!
//! ```text
//!  request:  arrived ──► Queued ──blocks allocated──► Loading ──ranks reported──► Settled
//!                           └──not needed, aborted, waited too long──► Settled
//!  load:     Running ──every rank reported──► (ended)
//!               └──request gone, or ranks late──► Abandoned ──every rank reported──► (blocks released)
//! ```
//!
//! The remote source of a request is void once it was used or given back: from then on the request is computed
//! here, however often the engine asks.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use kv_proto::{
    BlockList, ConsumerOrder, GroupBlocks, LeaseRef, LoadFailure, LoadId, LoadStats, Moment, PeerLocator,
    PullEnd, Rank, ReleaseReason, RemotePrefill, RequestId, Timers,
};

use crate::config::SchedConfig;
use crate::error::SchedError;
use crate::event::{Finish, HoldId, LoadResult, SchedEvent, Verdict};

/// Where a request's prompt is, as far as the remote side is concerned.
#[derive(Debug, Clone, PartialEq, Hash)]
enum Request {
    /// Offered, nothing allocated; workers renew its lease.
    Queued { remote: Box<RemotePrefill>, lease: LeaseRef, until: Moment },
    /// Being read.
    Loading { load: LoadId },
    /// Used or given back.
    Settled,
}

/// One load, from its order until every rank has reported.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Load {
    request: RequestId,
    blocks: Vec<BlockList>,
    local_tokens: u32,
    tokens: u32,
    ended: BTreeMap<Rank, PullEnd>,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    /// A request waits for it until this time; then it is cancelled.
    Running { until: Moment },
    /// Cancelled for lateness; the request waits until this time for the word that it is quiet.
    Cancelling { until: Moment },
    /// No request waits for it any more, but its blocks are still in the workers' hands.
    Abandoned { until: Moment },
    /// As before, and the engine has been told that the workers are silent.
    Overdue,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum TimerKey {
    Request(RequestId),
    Load(LoadId),
}

/// Counters of the consumer side. They only grow.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct ConsumerStats {
    /// Loads ordered.
    pub loads: u64,
    /// Loads that ended well on every rank.
    pub loaded: u64,
    /// Tokens taken from producers.
    pub remote_tokens: u64,
    /// Tokens of failed loads that are good all the same: read, and confirmed, before the failure.
    pub kept_tokens: u64,
    /// Bytes read, over all ranks.
    pub bytes: u64,
    /// Loads that failed, by reason.
    pub failed: BTreeMap<LoadFailure, u64>,
    /// Offers given back unread, by reason.
    pub released: BTreeMap<ReleaseReason, u64>,
    /// Reports of ends that were known or of loads that were not: harmless.
    pub stray_ends: u64,
}

impl Hash for ConsumerStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The machine. One per engine.
#[derive(Debug, Clone, Hash)]
pub struct Consumer {
    next_load: u64,
    requests: BTreeMap<RequestId, Request>,
    loads: BTreeMap<LoadId, Load>,
    timers: Timers<TimerKey>,
    stats: ConsumerStats,
}

impl Default for Consumer {
    fn default() -> Self {
        Self::new()
    }
}

fn locator(remote: &RemotePrefill) -> PeerLocator {
    PeerLocator {
        engine: remote.engine.clone(),
        incarnation: remote.incarnation,
        host: remote.host.clone(),
        port: remote.port,
    }
}

impl Consumer {
    /// A machine without requests.
    pub fn new() -> Self {
        Self {
            next_load: 1,
            requests: BTreeMap::new(),
            loads: BTreeMap::new(),
            timers: Timers::default(),
            stats: ConsumerStats::default(),
        }
    }

    /// Whether the request is one of this machine's.
    pub fn knows(&self, request: &RequestId) -> bool {
        self.requests.contains_key(request)
    }

    /// The load that the request waits for.
    pub fn load_of(&self, request: &RequestId) -> Option<LoadId> {
        match self.requests.get(request)? {
            Request::Loading { load, .. } => Some(*load),
            Request::Queued { .. } | Request::Settled => None,
        }
    }

    /// Counters.
    pub fn stats(&self) -> &ConsumerStats {
        &self.stats
    }

    /// Loads whose blocks are in the workers' hands.
    pub fn load_count(&self) -> usize {
        self.loads.len()
    }

    /// When [`Consumer::time_passed`] wants to be called.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.next()
    }

    /// A request arrived whose prompt was computed elsewhere. The caller checked the offer against the prompt and
    /// made sure that the id is not in use.
    pub fn arrived(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: RequestId,
        remote: RemotePrefill,
        orders: &mut Vec<ConsumerOrder>,
    ) {
        let Some(lease) = remote.lease_ref() else {
            // The producer pinned nothing: nothing to read, nothing to give back.
            self.requests.insert(request, Request::Settled);
            return;
        };
        orders.push(ConsumerOrder::Track { lease, offer: remote.digest(), peer: locator(&remote) });
        let until = now + config.queue_limit;
        self.timers.set(until, TimerKey::Request(request.clone()));
        self.requests.insert(request, Request::Queued { remote: Box::new(remote), lease, until });
    }

    /// An offer that came with a request which is refused: it is given back at once, unless another request lives
    /// by it.
    pub fn refused(
        &mut self,
        remote: &RemotePrefill,
        reason: ReleaseReason,
        orders: &mut Vec<ConsumerOrder>,
    ) {
        if let Some(lease) = remote.lease_ref() {
            let (offer, peer) = (remote.digest(), locator(remote));
            orders.push(ConsumerOrder::Track { lease, offer, peer });
            self.give_back(lease, remote, reason, orders);
        }
    }

    /// The workers know which other requests live by the same offer, and tell the producer when it was the last.
    fn give_back(
        &mut self,
        lease: LeaseRef,
        remote: &RemotePrefill,
        reason: ReleaseReason,
        orders: &mut Vec<ConsumerOrder>,
    ) {
        *self.stats.released.entry(reason).or_default() += 1;
        let (offer, peer) = (remote.digest(), locator(remote));
        orders.push(ConsumerOrder::Release { lease, offer, peer, reason });
    }

    /// Tokens that a load would bring beyond those that are here. Asked as often as the engine likes.
    pub fn remote_tokens(&self, config: &SchedConfig, request: &RequestId, local_tokens: u32) -> u32 {
        match self.requests.get(request) {
            Some(Request::Queued { remote, .. }) => {
                let tokens = remote.tokens.saturating_sub(local_tokens);
                if tokens < config.min_remote_tokens { 0 } else { tokens }
            }
            Some(Request::Loading { .. } | Request::Settled) | None => 0,
        }
    }

    /// The engine allocated blocks for a request: `remote_tokens` is what it was answered when it asked, and
    /// `blocks` are the request's, by group, from the start of the sequence.
    #[allow(clippy::too_many_arguments)] // The hook's own arguments, with time, configuration and output.
    pub fn allocated(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: &RequestId,
        local_tokens: u32,
        remote_tokens: u32,
        blocks: &[BlockList],
        orders: &mut Vec<ConsumerOrder>,
    ) -> Result<(), SchedError> {
        let Some(Request::Queued { remote, lease, until }) = self.requests.get(request) else {
            // After its one use the source is void; an engine that asks again was answered 0.
            return if remote_tokens == 0 {
                Ok(())
            } else {
                Err(SchedError::NothingRemote { request: request.clone(), asked: remote_tokens })
            };
        };
        let offered = self.remote_tokens(config, request, local_tokens);
        if remote_tokens != offered {
            return Err(SchedError::TokensDiffer { request: request.clone(), asked: remote_tokens, offered });
        }
        let (lease, until) = (*lease, *until);
        if remote_tokens == 0 {
            let remote = remote.clone();
            self.timers.clear(until, TimerKey::Request(request.clone()));
            self.requests.insert(request.clone(), Request::Settled);
            self.give_back(lease, &remote, ReleaseReason::NotNeeded, orders);
            return Ok(());
        }
        let first = local_tokens / config.block_tokens;
        if !local_tokens.is_multiple_of(config.block_tokens) {
            return Err(SchedError::NotAligned {
                request: request.clone(),
                local_tokens,
                block_tokens: config.block_tokens,
            });
        }
        let count = remote.block_count();
        if blocks.len() != remote.blocks.len() {
            return Err(SchedError::Groups { ours: blocks.len(), theirs: remote.blocks.len() });
        }
        for group in blocks {
            if group.len() < count {
                return Err(SchedError::TooFewBlocks {
                    request: request.clone(),
                    needed: count,
                    got: group.len(),
                });
            }
            if !group.fits(config.blocks) {
                return Err(SchedError::BlockBeyondPool {
                    request: request.clone(),
                    highest: group.highest().map_or(u64::MAX, |b| u64::from(b.0)),
                    blocks: config.blocks,
                });
            }
        }
        // Both lists are counted from the start of the sequence, so positions pair by themselves.
        let part = |list: &BlockList| -> BlockList {
            list.iter().skip(first as usize).take((count - first) as usize).collect()
        };
        let groups: Vec<GroupBlocks> = remote
            .blocks
            .iter()
            .zip(blocks)
            .enumerate()
            .map(|(group, (theirs, ours))| GroupBlocks {
                group: group as u32,
                first,
                remote: part(theirs),
                local: part(ours),
            })
            .collect();
        let load = LoadId(self.next_load);
        self.next_load += 1;
        let offer = remote.digest();
        let record = Load {
            request: request.clone(),
            blocks: groups.iter().map(|g| g.local.clone()).collect(),
            local_tokens,
            tokens: remote.tokens,
            ended: BTreeMap::new(),
            stage: Stage::Running { until: now + config.load_limit },
        };
        orders.push(ConsumerOrder::Load { load, lease, offer, peer: locator(remote), groups });
        self.timers.clear(until, TimerKey::Request(request.clone()));
        self.timers.set(now + config.load_limit, TimerKey::Load(load));
        self.loads.insert(load, record);
        self.requests.insert(request.clone(), Request::Loading { load });
        self.stats.loads += 1;
        Ok(())
    }

    /// A request ended, in whatever way. `None` if it is not one of this machine's.
    pub fn finished(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: &RequestId,
        orders: &mut Vec<ConsumerOrder>,
    ) -> Option<Finish> {
        let verdict = match self.requests.remove(request)? {
            Request::Settled => Verdict::Free,
            Request::Queued { remote, lease, until } => {
                self.timers.clear(until, TimerKey::Request(request.clone()));
                self.give_back(lease, &remote, ReleaseReason::Aborted, orders);
                Verdict::Free
            }
            Request::Loading { load } => {
                orders.push(ConsumerOrder::Cancel { load });
                self.abandon(now, config, load);
                Verdict::Hold(HoldId::Load(load))
            }
        };
        Some(Finish { verdict, params: None })
    }

    /// A request lost its blocks while it waited or loaded: it goes on without its remote source, and what a load
    /// may still write is held. `None` if it is not one of this machine's.
    pub fn preempted(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: &RequestId,
        orders: &mut Vec<ConsumerOrder>,
    ) -> Option<Verdict> {
        match self.requests.get(request)? {
            // Nothing is allocated yet, or everything was used.
            Request::Queued { .. } | Request::Settled => Some(Verdict::Free),
            Request::Loading { load } => {
                let load = *load;
                orders.push(ConsumerOrder::Cancel { load });
                self.abandon(now, config, load);
                self.requests.insert(request.clone(), Request::Settled);
                Some(Verdict::Hold(HoldId::Load(load)))
            }
        }
    }

    /// The engine does not want what was offered.
    pub fn declined(&mut self, request: &RequestId, orders: &mut Vec<ConsumerOrder>) {
        self.settle(request.clone(), ReleaseReason::NotNeeded, orders);
    }

    /// A queued request is computed here.
    fn settle(&mut self, request: RequestId, reason: ReleaseReason, orders: &mut Vec<ConsumerOrder>) {
        let Some(record) = self.requests.get_mut(&request) else { return };
        match std::mem::replace(record, Request::Settled) {
            Request::Queued { remote, lease, until } => {
                self.timers.clear(until, TimerKey::Request(request));
                self.give_back(lease, &remote, reason, orders);
            }
            other @ (Request::Loading { .. } | Request::Settled) => *record = other,
        }
    }

    /// Requests that wait, and loads in the workers' hands.
    pub fn remaining(&self) -> (usize, usize) {
        let queued = self.requests.values().filter(|r| matches!(r, Request::Queued { .. })).count();
        (queued, self.loads.len())
    }

    /// Gives back what waits and cancels what loads: the requests go on by themselves.
    pub fn end_all(&mut self, now: Moment, config: &SchedConfig, orders: &mut Vec<ConsumerOrder>) {
        let queued: Vec<RequestId> = self.requests.keys().cloned().collect();
        for request in queued {
            self.settle(request, ReleaseReason::Draining, orders);
        }
        let loads: Vec<LoadId> = self.loads.keys().copied().collect();
        for load in loads {
            self.cancel_late(now, config, load, orders);
        }
    }

    fn cancel_late(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        load: LoadId,
        orders: &mut Vec<ConsumerOrder>,
    ) {
        let Some(Load { stage, .. }) = self.loads.get_mut(&load) else { return };
        let Stage::Running { until } = *stage else { return };
        orders.push(ConsumerOrder::Cancel { load });
        self.timers.clear(until, TimerKey::Load(load));
        let until = now + config.report_grace;
        *stage = Stage::Cancelling { until };
        self.timers.set(until, TimerKey::Load(load));
    }

    fn abandon(&mut self, now: Moment, config: &SchedConfig, load: LoadId) {
        let Some(record) = self.loads.get_mut(&load) else { return };
        if let Stage::Running { until } | Stage::Cancelling { until } = record.stage {
            self.timers.clear(until, TimerKey::Load(load));
        }
        let until = now + config.load_limit + config.report_grace;
        record.stage = Stage::Abandoned { until };
        self.timers.set(until, TimerKey::Load(load));
    }

    /// A worker reported that a load ended on its rank.
    pub fn load_ended(
        &mut self,
        config: &SchedConfig,
        rank: Rank,
        load: LoadId,
        end: PullEnd,
        events: &mut Vec<SchedEvent>,
    ) {
        let Some(record) = self.loads.get_mut(&load) else {
            self.stats.stray_ends += 1;
            return;
        };
        if rank.0 >= config.topology.ranks || record.ended.contains_key(&rank) {
            self.stats.stray_ends += 1;
            return;
        }
        record.ended.insert(rank, end);
        if record.ended.len() < config.topology.ranks as usize {
            return;
        }
        let Some(record) = self.loads.remove(&load) else { return };
        match record.stage {
            Stage::Running { until } | Stage::Cancelling { until } => {
                self.timers.clear(until, TimerKey::Load(load));
                let request = record.request.clone();
                let result = self.outcome(config, record);
                self.requests.insert(request.clone(), Request::Settled);
                events.push(SchedEvent::LoadEnded { request, result });
            }
            Stage::Abandoned { until } => {
                self.timers.clear(until, TimerKey::Load(load));
                events.push(released(load, record));
            }
            Stage::Overdue => events.push(released(load, record)),
        }
    }

    /// A failure of any rank fails the load. What every rank has verified is kept.
    fn outcome(&mut self, config: &SchedConfig, record: Load) -> LoadResult {
        let mut sum = LoadStats::default();
        let mut failed = None;
        let mut verified = u32::MAX;
        for end in record.ended.values() {
            match end {
                PullEnd::Loaded(stats) => {
                    sum.bytes = sum.bytes.saturating_add(stats.bytes);
                    sum.ranges = sum.ranges.saturating_add(stats.ranges);
                    sum.read_us = sum.read_us.max(stats.read_us);
                    sum.confirm_us = sum.confirm_us.max(stats.confirm_us);
                }
                PullEnd::Failed { reason, detail, verified: blocks } => {
                    failed.get_or_insert((*reason, detail.clone()));
                    verified = verified.min(*blocks);
                }
            }
        }
        if let Some((reason, detail)) = failed {
            *self.stats.failed.entry(reason).or_default() += 1;
            let kept = verified.min(record.blocks.iter().map(BlockList::len).min().unwrap_or(0));
            // The last block may be filled in part.
            let valid_tokens = record
                .local_tokens
                .saturating_add(kept.saturating_mul(config.block_tokens))
                .min(record.tokens);
            self.stats.kept_tokens += u64::from(valid_tokens - record.local_tokens);
            let invalid =
                record.blocks.iter().map(|list| list.iter().skip(kept as usize).collect()).collect();
            return LoadResult::Failed { reason, detail, invalid, valid_tokens, hold: None };
        }
        let remote_tokens = record.tokens - record.local_tokens;
        self.stats.loaded += 1;
        self.stats.remote_tokens += u64::from(remote_tokens);
        self.stats.bytes = self.stats.bytes.saturating_add(sum.bytes);
        LoadResult::Loaded { tokens: record.tokens, remote_tokens, stats: sum }
    }

    /// Ends what has waited too long.
    pub fn time_passed(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        orders: &mut Vec<ConsumerOrder>,
        events: &mut Vec<SchedEvent>,
    ) {
        while let Some(key) = self.timers.due(now) {
            match key {
                TimerKey::Request(request) => self.request_late(now, request, orders),
                TimerKey::Load(load) => self.load_late(now, config, load, orders, events),
            }
        }
    }

    fn request_late(&mut self, now: Moment, request: RequestId, orders: &mut Vec<ConsumerOrder>) {
        match self.requests.get(&request) {
            Some(Request::Queued { until, .. }) if *until <= now => {
                self.settle(request, ReleaseReason::WaitedTooLong, orders);
            }
            _ => {}
        }
    }

    fn load_late(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        load: LoadId,
        orders: &mut Vec<ConsumerOrder>,
        events: &mut Vec<SchedEvent>,
    ) {
        let Some(record) = self.loads.get_mut(&load) else { return };
        match record.stage {
            Stage::Running { until } if until <= now => self.cancel_late(now, config, load, orders),
            Stage::Cancelling { until } if until <= now => {
                let request = record.request.clone();
                let missing = missing(record, config);
                let result = LoadResult::Failed {
                    reason: LoadFailure::ReportMissing,
                    detail: format!("no report from {missing:?}"),
                    invalid: record.blocks.clone(),
                    valid_tokens: record.local_tokens,
                    hold: Some(HoldId::Load(load)),
                };
                record.stage = Stage::Overdue;
                *self.stats.failed.entry(LoadFailure::ReportMissing).or_default() += 1;
                self.requests.insert(request.clone(), Request::Settled);
                events.push(SchedEvent::WorkersSilent { hold: HoldId::Load(load), missing });
                events.push(SchedEvent::LoadEnded { request, result });
            }
            Stage::Abandoned { until } if until <= now => {
                let missing = missing(record, config);
                record.stage = Stage::Overdue;
                events.push(SchedEvent::WorkersSilent { hold: HoldId::Load(load), missing });
            }
            Stage::Running { .. } | Stage::Cancelling { .. } | Stage::Abandoned { .. } | Stage::Overdue => {}
        }
    }
}

fn missing(record: &Load, config: &SchedConfig) -> Vec<Rank> {
    (0..config.topology.ranks).map(Rank).filter(|r| !record.ended.contains_key(r)).collect()
}

fn released(load: LoadId, record: Load) -> SchedEvent {
    SchedEvent::BlocksReleased { hold: HoldId::Load(load), request: record.request, blocks: record.blocks }
}
