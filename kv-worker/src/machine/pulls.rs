//! The consumer's pulls: this rank's parts of loads, from the order to the one end that is reported.
//!
//! ```text
//!  Waiting ──peer ready──► Reading ──every byte here──► Confirming ──Confirmed──► Loaded
//!     │                       │  └──with checksums──► Comparing ──equal──┘│
//!     │                       │                          └──not equal, ───┴──Lapsed, no answer──► Failed
//!     │                       │                             no answer
//!     └──peer failed, ────────┴──failed, cancelled──► Failed
//!        late, cancelled         (reported when the transport is quiet, not before)
//! ```
//!
//! A large load is read in portions. While the next one is read, the producer is asked whether the lease held for the
//! last one; what it confirmed stays good whatever becomes of the rest. With checksums it is asked to compare instead.
//!
//! *Read, then ask*: what was read counts only when the producer has confirmed, after the last byte, that the lease
//! held all the while.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use kv_proto::message::OfferName;
use kv_proto::{
    Attempt, BlockLayout, ConsumerOrder, GroupBlocks, LoadFailure, LoadId, LoadStats, Moment, PeerLocator,
    Plan, PullEnd, ReleaseReason, Timers,
};
use kv_transport::RegionId;

use crate::config::WorkerConfig;
use crate::machine::io::{Decision, DigestOf, Failure};
use crate::machine::peers::{Change, End, Peers, Standing};
use crate::portions::Portions;
use crate::ranges::{Side, check_groups, read_parts};

mod again;
mod ask;
mod compare;

use compare::Comparison;

#[derive(Debug, Clone, Hash)]
enum State {
    /// For its peer, and not before a time. `outage_counted`: the failure that it waits after was a try; the news that its
    /// connection is lost is no other.
    Waiting { groups: Vec<GroupBlocks>, until: Moment, not_before: Moment, outage_counted: bool },
    /// The transport owns the destination. `left` is what is not ordered yet, `doomed` why the result no longer counts.
    Reading { left: Portions, portion: Moved, until: Moment, doomed: Option<Failure> },
    /// Every byte is here; the producer has not yet said of all of them that they are its own.
    Comparing { read_at: Moment, until: Moment, repeat_at: Moment },
    /// Every byte is here; the producer is asked.
    /// `more`: others of ours still read under the lease. It is said alike each time that it is asked.
    Confirming { read_at: Moment, until: Moment, repeat_at: Moment, more: bool },
}

/// What one portion moves.
#[derive(Debug, Clone, Copy, Hash, Default)]
struct Moved {
    bytes: u64,
    ranges: u64,
}

#[derive(Debug, Clone, Hash)]
struct Pull {
    name: OfferName,
    peer: Arc<PeerLocator>,
    ordered_at: Moment,
    /// Blocks of each group that are in place, first ones first.
    read: u32,
    /// Of these, how many the producer has confirmed.
    verified: u32,
    /// How often it was tried again.
    retries: u32,
    /// What has arrived, over all tries.
    stats: LoadStats,
    /// With checksums.
    comparison: Option<Comparison>,
    state: State,
}

/// Where this rank's blocks lie, and what the transport calls its memories.
#[derive(Debug, Clone, Hash)]
pub struct LocalMemory {
    /// The layout.
    pub layout: BlockLayout,
    /// Regions by memory index.
    pub regions: Vec<RegionId>,
}

/// The machine.
#[derive(Debug, Clone, Hash)]
pub struct Pulls {
    peers: Peers,
    /// The lowest load never seen: loads are ordered in the order of their ids, and each once.
    next: u64,
    pulls: BTreeMap<LoadId, Pull>,
    timers: Timers<LoadId>,
    ended: Vec<(LoadId, PullEnd)>,
    stats: PullStats,
}

/// Counters. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PullStats {
    /// Times that a pull was tried again.
    pub retried: u64,
}

impl Hash for PullStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl Pulls {
    /// Without pulls, over peers.
    pub fn new(peers: Peers) -> Self {
        Self {
            peers,
            next: 0,
            pulls: BTreeMap::new(),
            timers: Timers::default(),
            ended: Vec::new(),
            stats: PullStats::default(),
        }
    }

    /// The producers known.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Counters.
    pub fn stats(&self) -> PullStats {
        self.stats
    }

    /// Pulls that have not ended.
    pub fn len(&self) -> usize {
        self.pulls.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pulls.is_empty()
    }

    /// When [`Pulls::time_passed`] wants to be called.
    pub fn next_deadline(&self) -> Option<Moment> {
        [self.peers.next_deadline(), self.timers.next()].into_iter().flatten().min()
    }

    /// Ends since the last call, for the report.
    pub fn take_ended(&mut self) -> Vec<(LoadId, PullEnd)> {
        std::mem::take(&mut self.ended)
    }

    fn set(&mut self, load: LoadId, at: Moment) {
        self.timers.set(at, load);
    }

    /// Takes the consumer's part of a plan.
    pub fn plan_taken(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        plan: Plan,
        out: &mut Vec<Decision>,
    ) {
        for order in plan.consumer {
            match order {
                ConsumerOrder::Track { lease, offer, peer } => {
                    self.peers.track(now, config, &peer, (lease.lease, offer), out);
                }
                ConsumerOrder::Load { load, lease, offer, peer, groups } => {
                    self.load(now, config, local, load, (lease.lease, offer), &peer, groups, out);
                }
                ConsumerOrder::Release { lease, offer, peer, reason } => {
                    self.peers.given_up(now, config, &peer, (lease.lease, offer), reason, out);
                }
                ConsumerOrder::Cancel { load } => self.cancel(now, config, load, out),
                _ => {}
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // The order's own parts, with time, configuration and output.
    fn load(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        load: LoadId,
        name: OfferName,
        peer: &PeerLocator,
        groups: Vec<GroupBlocks>,
        out: &mut Vec<Decision>,
    ) {
        // A repeated order must not write into blocks that were given back when the load ended.
        if load.0 < self.next {
            return;
        }
        self.next = load.0.saturating_add(1);
        let (key, void) = self.peers.pull_began(now, config, peer, name, out);
        let until = now + config.limits.peer_wait;
        let state = State::Waiting { groups, until, not_before: now, outage_counted: false };
        self.set(load, until);
        let comparison = config.checksums.then(Comparison::default);
        let (read, verified, retries) = (0, 0, 0);
        let stats = LoadStats::default();
        let pull =
            Pull { name, peer: key, ordered_at: now, read, verified, retries, stats, comparison, state };
        self.pulls.insert(load, pull);
        if void {
            return self.fail(now, config, load, not_held(), out);
        }
        self.begin(now, config, local, load, out);
    }

    /// Starts to read if the peer is ready, fails if it failed.
    fn begin(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        load: LoadId,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&load) else { return };
        let State::Waiting { groups, until: waited_until, not_before, .. } = &mut pull.state else { return };
        let (waited_until, not_before) = (*waited_until, *not_before);
        if not_before > now {
            return;
        }
        let checked = match self.peers.standing(&pull.peer) {
            Standing::Pending => return,
            Standing::Failed(failure) => Err(failure.clone()),
            Standing::Ready(_, remote) => check_groups(&local.layout, &remote.layout, groups)
                .map_err(|error| Failure::new(LoadFailure::BadBlocks, error.to_string())),
        };
        if let Err(failure) = checked {
            return self.fail_or_wait(now, config, load, failure, out);
        }
        let mut left = Portions::of(std::mem::take(groups), &local.layout, config.limits.portion_bytes);
        left.resume_at(pull.read);
        // The transport ends each read within its own limit; this one is for one that does not, and for all portions.
        let until = now + config.limits.read + config.limits.stall;
        pull.state = State::Reading { left, portion: Moved::default(), until, doomed: None };
        self.timers.clear(waited_until, load);
        self.timers.clear(not_before, load);
        self.set(load, until);
        self.read_portion(now, config, local, load, out);
    }

    /// Orders the next portion of a load.
    fn read_portion(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        load: LoadId,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&load) else { return };
        let State::Reading { left, portion, .. } = &mut pull.state else { return };
        let groups = left.take();
        let (link, parts) = match self.peers.standing(&pull.peer) {
            Standing::Ready(link, remote) => {
                let ours = Side { layout: &local.layout, memories: &local.regions };
                let theirs = Side { layout: &remote.layout, memories: &remote.keys };
                (link, read_parts(ours, theirs, &groups))
            }
            Standing::Pending => {
                let failure =
                    Failure::new(LoadFailure::PeerLost, "the connection was lost between two portions");
                return self.fail_or_read_again(now, config, load, failure, out);
            }
            Standing::Failed(failure) => {
                let failure = failure.clone();
                return self.fail_or_read_again(now, config, load, failure, out);
            }
        };
        let parts = match parts {
            Ok(parts) => parts,
            Err(error) => {
                let failure = Failure::new(LoadFailure::BadBlocks, error.to_string());
                return self.fail(now, config, load, failure, out);
            }
        };
        if let Some(comparison) = &mut pull.comparison {
            comparison.ordered(groups);
        }
        let ranges = parts.iter().flat_map(|part| &part.ranges);
        let bytes: u64 = ranges.clone().map(|r| r.len).sum();
        *portion = Moved { bytes, ranges: ranges.count() as u64 };
        if bytes == 0 {
            return self.read_ended(now, config, local, load, Ok(()), out);
        }
        // A long read must not outlive a lease whose first life is short.
        if bytes >= config.limits.prolong_bytes {
            let peer = pull.peer.clone();
            self.peers.renew(now, config, &peer, out);
        }
        out.push(Decision::Read { load, link, parts });
    }

    /// Ends a pull badly, and tells the producer if it can be told. Only to be called when the destination is
    /// quiet.
    fn fail(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        load: LoadId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        let reason = match failure.reason {
            LoadFailure::Cancelled => ReleaseReason::Aborted,
            _ => ReleaseReason::LoadFailed,
        };
        let end = match failure.reason {
            LoadFailure::Lapsed => End::Lapsed,
            other => End::GivenUp { reason, link_is_lost: other == LoadFailure::PeerLost },
        };
        let verified = self.pulls.get(&load).map_or(0, |pull| pull.verified);
        self.end(now, config, load, end, out);
        let Failure { reason, detail } = failure;
        self.ended.push((load, PullEnd::Failed { reason, detail, verified }));
    }

    fn end(&mut self, now: Moment, config: &WorkerConfig, load: LoadId, end: End, out: &mut Vec<Decision>) {
        let Some(Pull { name, peer, state, .. }) = self.pulls.remove(&load) else { return };
        let asked = match state {
            State::Waiting { until, not_before, .. } => {
                self.timers.clear(until, load);
                self.timers.clear(not_before, load);
                false
            }
            State::Reading { until, .. } => {
                self.timers.clear(until, load);
                false
            }
            State::Comparing { until, repeat_at, .. } => {
                self.timers.clear(until, load);
                self.timers.clear(repeat_at, load);
                false
            }
            State::Confirming { until, repeat_at, .. } => {
                self.timers.clear(until, load);
                self.timers.clear(repeat_at, load);
                true
            }
        };
        self.peers.pull_ended(now, config, &peer, name, Attempt(load.0), asked, end, out);
    }

    fn cancel(&mut self, now: Moment, config: &WorkerConfig, load: LoadId, out: &mut Vec<Decision>) {
        let cancelled = Failure::new(LoadFailure::Cancelled, "cancelled by the engine");
        self.spoil(now, config, load, cancelled, out);
    }

    /// Ends a pull badly: now if the destination is quiet, else when it is.
    fn spoil(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        load: LoadId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        match self.pulls.get_mut(&load).map(|pull| &mut pull.state) {
            None => {}
            Some(State::Waiting { .. } | State::Comparing { .. } | State::Confirming { .. }) => {
                self.fail(now, config, load, failure, out)
            }
            Some(State::Reading { doomed, .. }) => {
                doomed.get_or_insert(failure);
                out.push(Decision::CancelRead { load });
            }
        }
    }

    /// The transport is done with a read: its destination is quiet.
    pub fn read_ended(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        load: LoadId,
        result: Result<(), Failure>,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&load) else { return };
        let State::Reading { left, portion, until, doomed } = &mut pull.state else { return };
        if let Some(failure) = doomed.take() {
            return self.fail(now, config, load, failure, out);
        }
        if let Err(failure) = result {
            return self.fail_or_read_again(now, config, load, failure, out);
        }
        pull.stats.bytes += portion.bytes;
        pull.stats.ranges += portion.ranges;
        let from = std::mem::replace(&mut pull.read, left.taken());
        if let Some(groups) = pull.comparison.as_mut().and_then(|comparison| comparison.arrived(from)) {
            out.push(Decision::Digest { of: DigestOf::Load { load, from }, groups });
        }
        if !left.is_over() {
            if pull.comparison.is_none() {
                self.check(load, out);
            }
            return self.read_portion(now, config, local, load, out);
        }
        pull.stats.read_us = micros(now.since(pull.ordered_at));
        self.timers.clear(*until, load);
        if pull.comparison.as_ref().is_none_or(Comparison::is_over) {
            return self.confirm(now, config, load, now, out);
        }
        let until = now + config.limits.confirm;
        let repeat_at = now + config.limits.confirm_repeat;
        pull.state = State::Comparing { read_at: now, until, repeat_at };
        self.set(load, until);
        self.set(load, repeat_at);
    }

    /// Everything is here and, with checksums, equal: did the lease hold?
    fn confirm(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        load: LoadId,
        read_at: Moment,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&load) else { return };
        let more = self.peers.pull_asks(&pull.peer, pull.name);
        let until = now + config.limits.confirm;
        let repeat_at = now + config.limits.confirm_repeat;
        pull.state = State::Confirming { read_at, until, repeat_at, more };
        self.set(load, until);
        self.set(load, repeat_at);
        self.ask(load, out);
    }

    /// Takes what became of peers.
    pub fn changed(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        change: Change,
        out: &mut Vec<Decision>,
    ) {
        match change {
            Change::Ready(peer) => {
                for load in self.of_peer(&peer) {
                    match self.pulls.get(&load).map(|pull| &pull.state) {
                        Some(State::Waiting { .. }) => {
                            // Of an earlier try, whose connection took question or answer with it.
                            self.ask_to_compare(load, 0..u32::MAX, out);
                            self.begin(now, config, local, load, out);
                        }
                        Some(State::Comparing { .. }) => self.ask_to_compare(load, 0..u32::MAX, out),
                        Some(State::Confirming { .. }) => self.ask(load, out),
                        Some(State::Reading { .. }) | None => {}
                    }
                }
            }
            Change::Failed(peer, failure) => {
                for load in self.of_peer(&peer) {
                    if let Some(State::Waiting { .. }) = self.pulls.get(&load).map(|pull| &pull.state) {
                        self.fail_or_wait(now, config, load, failure.clone(), out);
                    }
                }
            }
            Change::NotHeld(peer, leases) => {
                let leases: BTreeSet<OfferName> = leases.into_iter().collect();
                for load in self.of_peer(&peer) {
                    match self.pulls.get(&load) {
                        // The lease is over because we ended it; the answer is on its way.
                        Some(Pull { state: State::Confirming { .. }, .. }) => {}
                        Some(Pull { name, .. }) if leases.contains(name) => {
                            self.spoil(now, config, load, not_held(), out);
                        }
                        _ => {}
                    }
                }
            }
            Change::Checked(peer, lease, attempt, blocks, held) => {
                self.checked(now, config, &peer, lease, LoadId(attempt.0), (blocks, held), out);
            }
            Change::Compared(peer, lease, attempt, answer) => {
                self.compared(now, config, &peer, lease, LoadId(attempt.0), answer, out);
            }
            Change::Answered(peer, lease, attempt, confirmed) => {
                self.answered(now, config, &peer, lease, attempt, confirmed, out);
            }
        }
    }

    fn of_peer(&self, peer: &Arc<PeerLocator>) -> Vec<LoadId> {
        self.pulls.iter().filter(|(_, pull)| pull.peer == *peer).map(|(load, _)| *load).collect()
    }

    /// The peers, for facts that concern connections alone.
    pub fn peers_mut(&mut self) -> &mut Peers {
        &mut self.peers
    }

    /// The worker ends: pulls that the transport does not own end now; reads end when the transport says so.
    pub fn close(&mut self, now: Moment, config: &WorkerConfig, out: &mut Vec<Decision>) {
        let closed = || Failure::new(LoadFailure::Closed, "the worker is shutting down");
        let all: Vec<LoadId> = self.pulls.keys().copied().collect();
        for load in all {
            self.spoil(now, config, load, closed(), out);
        }
    }

    /// Lets deadlines pass that have come.
    pub fn time_passed(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        out: &mut Vec<Decision>,
    ) {
        for change in self.peers.time_passed(now, config, out) {
            self.changed(now, config, local, change, out);
        }
        while let Some(load) = self.timers.due(now) {
            self.late(now, config, local, load, out);
        }
    }

    fn late(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        load: LoadId,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&load) else { return };
        let engine = &pull.peer.engine;
        match &mut pull.state {
            State::Waiting { until, .. } if *until <= now => {
                let detail = format!("engine {engine} was not ready within {:?}", config.limits.peer_wait);
                self.fail(now, config, load, Failure::new(LoadFailure::ConnectFailed, detail), out);
            }
            State::Reading { until, doomed, .. } if *until <= now => {
                let detail = format!("not read within {:?}", config.limits.read);
                doomed.get_or_insert(Failure::new(LoadFailure::ReadTimedOut, detail));
                *until = now + config.limits.read;
                self.timers.set(*until, load);
                out.push(Decision::CancelRead { load });
            }
            State::Comparing { until, .. } if *until <= now => {
                let detail =
                    format!("not compared with what engine {engine} has within {:?}", config.limits.confirm);
                self.fail(now, config, load, Failure::new(LoadFailure::ConfirmTimedOut, detail), out);
            }
            State::Comparing { repeat_at, .. } if *repeat_at <= now => {
                *repeat_at = now + config.limits.confirm_repeat;
                self.timers.set(*repeat_at, load);
                self.ask_to_compare(load, 0..u32::MAX, out);
            }
            State::Confirming { until, .. } if *until <= now => {
                let detail = format!("engine {engine} did not confirm within {:?}", config.limits.confirm);
                self.fail(now, config, load, Failure::new(LoadFailure::ConfirmTimedOut, detail), out);
            }
            State::Confirming { repeat_at, .. } if *repeat_at <= now => {
                *repeat_at = now + config.limits.confirm_repeat;
                self.timers.set(*repeat_at, load);
                self.ask(load, out);
            }
            // Its peer may be ready again. If it is still failed that was counted when it failed; it is tried by itself.
            State::Waiting { not_before, .. } if *not_before <= now => {
                if !matches!(self.peers.standing(&pull.peer), Standing::Failed(_)) {
                    self.begin(now, config, local, load, out);
                }
            }
            State::Waiting { .. }
            | State::Reading { .. }
            | State::Comparing { .. }
            | State::Confirming { .. } => {}
        }
    }
}

fn not_held() -> Failure {
    Failure::new(LoadFailure::Lapsed, "the producer no longer holds the lease")
}

fn micros(span: std::time::Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
