//! A load, from its order until every rank has reported.

use std::collections::BTreeMap;

use kv_proto::{
    BlockList, ConsumerOrder, GroupBlocks, GroupKind, LoadFailure, LoadId, LoadStats, Moment, PullEnd, Rank,
    ReleaseReason, RequestId,
};

use super::source::Source;
use super::{Consumer, Request, TimerKey};
use crate::config::SchedConfig;
use crate::event::{HoldId, LoadResult, SchedEvent};

/// One load, from its order until every rank has reported.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Load {
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

impl Load {
    pub(super) fn new(
        request: RequestId,
        groups: &[GroupBlocks],
        local_tokens: u32,
        tokens: u32,
        until: Moment,
    ) -> Self {
        Self {
            request,
            blocks: groups.iter().map(|g| g.local.clone()).collect(),
            local_tokens,
            tokens,
            ended: BTreeMap::new(),
            stage: Stage::Running { until },
        }
    }
}

impl Consumer {
    pub(super) fn cancel_late(
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

    pub(super) fn abandon(&mut self, now: Moment, config: &SchedConfig, load: LoadId) {
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
        now: Moment,
        config: &SchedConfig,
        (rank, load): (Rank, LoadId),
        end: PullEnd,
        orders: &mut Vec<ConsumerOrder>,
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
                let mut result = self.outcome(config, record);
                self.go_on(now, config, &request, &mut result, orders);
                events.push(SchedEvent::LoadEnded { request, result });
            }
            Stage::Abandoned { until } => {
                self.timers.clear(until, TimerKey::Load(load));
                events.push(released(load, record));
            }
            Stage::Overdue => events.push(released(load, record)),
        }
    }

    /// What becomes of the other offers of a request whose load has ended: they are of no use, or the next to be tried.
    fn go_on(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: &RequestId,
        result: &mut LoadResult,
        orders: &mut Vec<ConsumerOrder>,
    ) {
        let sources = match self.requests.insert(request.clone(), Request::Settled) {
            Some(Request::Loading { others, .. }) => others,
            Some(Request::Queued { .. } | Request::Settled) | None => Vec::new(),
        };
        match result {
            LoadResult::Loaded { .. } => self.give_back(sources, ReleaseReason::NotNeeded, orders),
            LoadResult::Failed { others, .. } if !sources.is_empty() => {
                *others = sources.iter().map(Source::peer).collect();
                self.queue(now, config, request.clone(), sources);
            }
            LoadResult::Failed { .. } => {}
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
            // Of a window or a state the first blocks alone are of no use.
            let in_parts = config.groups.iter().all(|kind| *kind == GroupKind::Full);
            let whole = record.blocks.iter().map(BlockList::len).min().unwrap_or(0);
            let kept = if in_parts { verified.min(whole) } else { 0 };
            // The last block may be filled in part.
            let valid_tokens = record
                .local_tokens
                .saturating_add(kept.saturating_mul(config.block_tokens))
                .min(record.tokens);
            self.stats.kept_tokens += u64::from(valid_tokens - record.local_tokens);
            let invalid =
                record.blocks.iter().map(|list| list.iter().skip(kept as usize).collect()).collect();
            return LoadResult::Failed { reason, detail, invalid, valid_tokens, hold: None, others: vec![] };
        }
        let remote_tokens = record.tokens - record.local_tokens;
        self.stats.loaded += 1;
        self.stats.remote_tokens += u64::from(remote_tokens);
        self.stats.bytes = self.stats.bytes.saturating_add(sum.bytes);
        LoadResult::Loaded { tokens: record.tokens, remote_tokens, stats: sum }
    }

    pub(super) fn load_late(
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
                let mut result = LoadResult::Failed {
                    reason: LoadFailure::ReportMissing,
                    detail: format!("no report from {missing:?}"),
                    invalid: record.blocks.clone(),
                    valid_tokens: record.local_tokens,
                    hold: Some(HoldId::Load(load)),
                    others: Vec::new(),
                };
                record.stage = Stage::Overdue;
                *self.stats.failed.entry(LoadFailure::ReportMissing).or_default() += 1;
                self.go_on(now, config, &request, &mut result, orders);
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
