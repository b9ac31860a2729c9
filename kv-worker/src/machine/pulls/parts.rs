//! A load and its pulls: when it ends, and how.

use std::sync::Arc;

use kv_proto::{LoadFailure, LoadId, LoadStats, Moment, PeerLocator, PullEnd};

use super::{Comparison, LocalMemory, Pull, Pulls, State};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, PullId, SourceKey};

/// A load that has not ended.
#[derive(Debug, Clone, Hash)]
pub(super) struct Parts {
    peer: Arc<PeerLocator>,
    /// Whether it is known how many sources there are.
    planned: bool,
    /// Pulls that have not ended.
    open: u32,
    /// What the first pull that failed said.
    failed: Option<Failure>,
    /// Blocks of each group that every pull which failed had verified.
    verified: u32,
    /// Over all pulls that have ended well.
    stats: LoadStats,
}

impl Pulls {
    /// A load begins, with so many pulls.
    pub(super) fn open_load(&mut self, load: LoadId, keys: &[SourceKey]) {
        let Some(SourceKey { peer, .. }) = keys.first() else { return };
        let planned = self.peers.planned(peer).is_some();
        let (open, peer) = (keys.len() as u32, peer.clone());
        let parts =
            Parts { peer, planned, open, failed: None, verified: u32::MAX, stats: LoadStats::default() };
        self.loads.insert(load, parts);
    }

    /// Why a pull of this load need not begin, if the load has failed and not all of its pulls have ended.
    pub(super) fn failed(&self, load: LoadId) -> Option<Failure> {
        self.loads.get(&load)?.failed.as_ref().map(elsewhere)
    }

    /// It is known how many sources a producer has: loads that waited for that pull from all of them.
    pub(super) fn planned(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        peer: &Arc<PeerLocator>,
        count: u32,
        out: &mut Vec<Decision>,
    ) {
        let waiting = |(_, parts): &(&LoadId, &mut Parts)| parts.peer == *peer && !parts.planned;
        let mut grown = Vec::new();
        for (load, parts) in self.loads.iter_mut().filter(waiting) {
            parts.planned = true;
            parts.open += count.saturating_sub(1);
            grown.push(*load);
        }
        for load in grown {
            // A load that is not planned has one pull, which waits; it is what the others are like.
            let Some(first) = self.pulls.get(&PullId::first(load)).cloned() else { continue };
            for source in 1..count {
                let key = SourceKey { peer: peer.clone(), source };
                let comparison = first.comparison.as_ref().map(|_| Comparison::default());
                let pull = Pull { key, comparison, ..first.clone() };
                self.begin_pull(now, config, local, load, pull, out);
            }
        }
    }

    /// A pull has ended. With a failure those beside it are of no use: they end too, when their destinations are quiet.
    /// When all have ended, so has the load.
    pub(super) fn part_ended(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        id: PullId,
        end: PullEnd,
        out: &mut Vec<Decision>,
    ) {
        let PullId { load, .. } = id;
        let Some(parts) = self.loads.get_mut(&load) else { return };
        parts.open = parts.open.saturating_sub(1);
        let mut first_failure = None;
        match end {
            PullEnd::Loaded(stats) => {
                parts.stats.bytes += stats.bytes;
                parts.stats.ranges += stats.ranges;
                parts.stats.read_us = parts.stats.read_us.max(stats.read_us);
                parts.stats.confirm_us = parts.stats.confirm_us.max(stats.confirm_us);
            }
            PullEnd::Failed { reason, detail, verified } => {
                parts.verified = parts.verified.min(verified);
                if parts.failed.is_none() {
                    let failure = Failure { reason, detail };
                    parts.failed = Some(failure.clone());
                    first_failure = Some(failure);
                }
            }
        }
        if parts.open == 0 {
            let Some(Parts { failed, verified, stats, .. }) = self.loads.remove(&load) else { return };
            let end = match failed {
                None => PullEnd::Loaded(stats),
                Some(Failure { reason, detail }) => PullEnd::Failed { reason, detail, verified },
            };
            self.ended.push((load, end));
        } else if let Some(failure) = first_failure {
            self.spoil_load(now, config, load, &elsewhere(&failure), out);
        }
    }

    /// Ends what is left of a load badly.
    pub(super) fn spoil_load(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        load: LoadId,
        failure: &Failure,
        out: &mut Vec<Decision>,
    ) {
        let (first, last) = (PullId { load, source: 0 }, PullId { load, source: u32::MAX });
        let pulls: Vec<PullId> = self.pulls.range(first..=last).map(|(id, _)| *id).collect();
        for id in pulls {
            self.spoil(now, config, id, failure.clone(), out);
        }
    }

    /// Whether a pull waits for its source.
    pub(super) fn is_waiting(&self, id: PullId) -> bool {
        self.pulls.get(&id).is_some_and(|pull| matches!(pull.state, State::Waiting { .. }))
    }
}

/// What ends the pulls beside one that failed. Their own workers, and the connections to these, have done nothing wrong.
fn elsewhere(failure: &Failure) -> Failure {
    Failure::new(LoadFailure::Cancelled, format!("failed at another worker: {failure}"))
}
