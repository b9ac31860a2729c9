//! A load and its pulls: when it ends, and how.

use std::sync::Arc;

use kv_proto::{LoadFailure, LoadId, LoadStats, Moment, PeerLocator, PullEnd};

use super::{Comparison, LocalMemory, Pull, Pulls, State, not_held};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, PullId, SourceKey};

/// A load that has not ended.
#[derive(Debug, Clone, Hash)]
pub(super) struct Parts {
    peer: Arc<PeerLocator>,
    /// Whether it is known how many sources there are.
    planned: bool,
    /// What the first pull that failed said.
    failed: Option<Failure>,
    /// Blocks of each group that every pull which failed had verified.
    verified: u32,
    /// Over all pulls that have ended well.
    stats: LoadStats,
}

impl Pulls {
    /// A load begins, with a pull from each source that is known.
    pub(super) fn open_load(&mut self, load: LoadId, peer: &Arc<PeerLocator>) {
        let planned = self.peers.planned(peer).is_some();
        let peer = peer.clone();
        let parts = Parts { peer, planned, failed: None, verified: u32::MAX, stats: LoadStats::default() };
        self.loads.insert(load, parts);
    }

    /// Pulls of a load that have not ended.
    fn open(&self, load: LoadId) -> impl Iterator<Item = PullId> {
        let (first, last) = (PullId { load, source: 0 }, PullId { load, source: u32::MAX });
        self.pulls.range(first..=last).map(|(id, _)| *id)
    }

    /// A load's pulls from some sources begin. All of them are known before the first does, which may end at once: the load
    /// ends with the last that it has.
    pub(super) fn begin_pulls(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        load: LoadId,
        pulls: Vec<Pull>,
        out: &mut Vec<Decision>,
    ) {
        let mut begun = Vec::with_capacity(pulls.len());
        for pull in pulls {
            let State::Waiting { until, .. } = pull.state else { continue };
            let id = PullId { load, source: pull.key.source };
            begun.push((id, self.peers.pull_began(now, config, &pull.key, pull.name)));
            self.pulls.insert(id, pull);
            self.set(id, until);
        }
        for (id, is_void) in begun {
            if is_void {
                self.spoil(now, config, id, not_held(), out);
            } else {
                self.begin(now, config, local, id, out);
            }
        }
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
            grown.push(*load);
        }
        for load in grown {
            // A load that is not planned has one pull, which waits; it is what the others are like.
            let Some(first) = self.pulls.get(&PullId::first(load)).cloned() else { continue };
            let pulls = (1..count).map(|source| {
                let key = SourceKey { peer: peer.clone(), source };
                let comparison = first.comparison.as_ref().map(|_| Comparison::default());
                Pull { key, comparison, ..first.clone() }
            });
            self.begin_pulls(now, config, local, load, pulls.collect(), out);
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
        let is_last = self.open(load).next().is_none();
        let Some(parts) = self.loads.get_mut(&load) else { return };
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
        if is_last {
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
        let open: Vec<PullId> = self.open(load).collect();
        for id in open {
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
