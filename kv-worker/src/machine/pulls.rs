//! The consumer's pulls: this rank's parts of loads, from the order to the one end that is reported.
//!
//! A load has a pull for each source, that is, for each of the producer's workers that this rank has to do with. Each goes
//! its own way, with its own lease at its own worker; the load ends when the last of them has.
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

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use kv_proto::message::OfferName;
use kv_proto::{
    Attempt, BlockLayout, ConsumerOrder, GroupBlocks, LoadFailure, LoadId, LoadStats, Moment, PeerLocator,
    Plan, PullEnd, ReleaseReason, Timers,
};
use kv_transport::RegionId;

use crate::config::WorkerConfig;
use crate::machine::io::{Decision, DigestOf, Failure, LinkId, PullId, SourceKey};
use crate::machine::peers::{End, Peers, Standing};
use crate::portions::Portions;
use crate::shape::{Side, check_blocks};

mod again;
mod ask;
mod changes;
mod compare;
mod parts;

use compare::Comparison;
use parts::Parts;

#[derive(Debug, Clone, Hash)]
enum State {
    /// For its peer, and not before a time. `outage_counted`: the failure that it waits after was a try; the news that its
    /// connection is lost is no other. The loss of a later connection is.
    Waiting { groups: Vec<GroupBlocks>, until: Moment, not_before: Moment, outage_counted: bool },
    /// The transport owns the destination. `link`: the connection that the portion is read over; another may have taken
    /// its place meanwhile. `left` is what is not ordered yet, `doomed` why the result no longer counts.
    Reading { link: LinkId, left: Portions, portion: Moved, until: Moment, doomed: Option<Failure> },
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
    /// Whom it reads from.
    key: SourceKey,
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
    pulls: BTreeMap<PullId, Pull>,
    loads: BTreeMap<LoadId, Parts>,
    timers: Timers<PullId>,
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
            loads: BTreeMap::new(),
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

    fn set(&mut self, id: PullId, at: Moment) {
        self.timers.set(at, id);
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
        let keys = self.peers.load_began(now, config, peer, out);
        let until = now + config.limits.peer_wait;
        let Some(SourceKey { peer, .. }) = keys.first() else { return };
        self.open_load(load, peer);
        let pulls = keys.into_iter().map(|key| {
            let state =
                State::Waiting { groups: groups.clone(), until, not_before: now, outage_counted: false };
            Pull {
                name,
                key,
                ordered_at: now,
                read: 0,
                verified: 0,
                retries: 0,
                stats: LoadStats::default(),
                comparison: config.checksums.then(Comparison::default),
                state,
            }
        });
        self.begin_pulls(now, config, local, load, pulls.collect(), out);
    }

    /// Starts to read if the peer is ready, fails if it failed.
    fn begin(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        id: PullId,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let State::Waiting { groups, until: waited_until, not_before, .. } = &mut pull.state else { return };
        let (waited_until, not_before) = (*waited_until, *not_before);
        if not_before > now {
            return;
        }
        let portion_bytes = config.limits.portion_bytes;
        let checked = match self.peers.standing(&pull.key) {
            Standing::Pending => return,
            Standing::Failed(failure) => Err(failure.clone()),
            Standing::Ready(link, remote) => check_blocks(&remote.plan, groups)
                .map(|()| {
                    (link, Portions::of(std::mem::take(groups), &remote.plan, &local.layout, portion_bytes))
                })
                .map_err(|error| Failure::new(LoadFailure::BadBlocks, error.to_string())),
        };
        let (link, mut left) = match checked {
            Ok(checked) => checked,
            Err(failure) => return self.fail_or_wait(now, config, id, failure, out),
        };
        // A worker that has nothing for this rank is only told.
        let is_silent =
            matches!(self.peers.standing(&pull.key), Standing::Ready(_, r) if r.plan.copies.is_empty());
        left.resume_at(if is_silent { u32::MAX } else { pull.read });
        // The transport ends each read within its own limit; this one is for one that does not, and for all portions.
        let until = now + config.limits.read + config.limits.stall;
        pull.state = State::Reading { link, left, portion: Moved::default(), until, doomed: None };
        self.timers.clear(waited_until, id);
        self.timers.clear(not_before, id);
        self.set(id, until);
        if is_silent {
            return self.read_ended(now, config, local, id, link, Ok(()), out);
        }
        self.read_portion(now, config, local, id, out);
    }

    /// Orders the next portion of a load that this source has something of.
    fn read_portion(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        id: PullId,
        out: &mut Vec<Decision>,
    ) {
        loop {
            let Some(pull) = self.pulls.get_mut(&id) else { return };
            let State::Reading { link: over, left, portion, .. } = &mut pull.state else { return };
            let groups = left.take();
            let is_last = left.is_over();
            let (link, parts) = match self.peers.standing(&pull.key) {
                Standing::Ready(link, remote) => {
                    let side = Side { regions: &local.regions, keys: &remote.keys };
                    (link, remote.plan.read_parts(side, &groups))
                }
                Standing::Pending => {
                    let failure =
                        Failure::new(LoadFailure::PeerLost, "the connection was lost between two portions");
                    return self.fail_or_read_again(now, config, id, failure, out);
                }
                Standing::Failed(failure) => {
                    let failure = failure.clone();
                    return self.fail_or_read_again(now, config, id, failure, out);
                }
            };
            *over = link;
            let parts = match parts {
                Ok(parts) => parts,
                Err(error) => {
                    let failure = Failure::new(LoadFailure::BadBlocks, error.to_string());
                    return self.fail(now, config, id, failure, out);
                }
            };
            if let Some(comparison) = &mut pull.comparison {
                comparison.ordered(groups);
            }
            let ranges = parts.iter().flat_map(|part| &part.ranges);
            let bytes: u64 = ranges.clone().map(|r| r.len).sum();
            *portion = Moved { bytes, ranges: ranges.count() as u64 };
            if bytes == 0 {
                // Of these tokens the worker has nothing.
                if is_last {
                    return self.read_ended(now, config, local, id, link, Ok(()), out);
                }
                continue;
            }
            // A long read must not outlive a lease whose first life is short.
            if bytes >= config.limits.prolong_bytes {
                let key = pull.key.clone();
                self.peers.renew(now, config, &key, out);
            }
            return out.push(Decision::Read { pull: id, link, parts });
        }
    }

    /// Ends a pull badly, and tells the producer if it can be told. Only to be called when the destination is
    /// quiet.
    fn fail(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        id: PullId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        let reason = match failure.reason {
            LoadFailure::Cancelled => ReleaseReason::Aborted,
            _ => ReleaseReason::LoadFailed,
        };
        let end = match failure.reason {
            LoadFailure::Lapsed => End::Lapsed,
            _ => End::GivenUp { reason },
        };
        let verified = self.pulls.get(&id).map_or(0, |pull| pull.verified);
        self.end(now, config, id, end, out);
        let Failure { reason, detail } = failure;
        self.part_ended(now, config, id, PullEnd::Failed { reason, detail, verified }, out);
    }

    fn end(&mut self, now: Moment, config: &WorkerConfig, id: PullId, end: End, out: &mut Vec<Decision>) {
        let Some(Pull { name, key, state, .. }) = self.pulls.remove(&id) else { return };
        let asked = match state {
            State::Waiting { until, not_before, .. } => {
                self.timers.clear(until, id);
                self.timers.clear(not_before, id);
                false
            }
            State::Reading { until, .. } => {
                self.timers.clear(until, id);
                false
            }
            State::Comparing { until, repeat_at, .. } => {
                self.timers.clear(until, id);
                self.timers.clear(repeat_at, id);
                false
            }
            State::Confirming { until, repeat_at, .. } => {
                self.timers.clear(until, id);
                self.timers.clear(repeat_at, id);
                true
            }
        };
        self.peers.pull_ended(now, config, &key, name, Attempt(id.load.0), asked, end, out);
    }

    fn cancel(&mut self, now: Moment, config: &WorkerConfig, load: LoadId, out: &mut Vec<Decision>) {
        let cancelled = Failure::new(LoadFailure::Cancelled, "cancelled by the engine");
        self.spoil_load(now, config, load, &cancelled, out);
    }

    /// Ends a pull badly: now if the destination is quiet, else when it is.
    fn spoil(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        id: PullId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        match self.pulls.get_mut(&id).map(|pull| &mut pull.state) {
            None => {}
            Some(State::Waiting { .. } | State::Comparing { .. } | State::Confirming { .. }) => {
                self.fail(now, config, id, failure, out)
            }
            Some(State::Reading { doomed, .. }) => {
                doomed.get_or_insert(failure);
                out.push(Decision::CancelRead { pull: id });
            }
        }
    }

    /// The transport is done with a read over a connection: its destination is quiet.
    #[allow(clippy::too_many_arguments)] // What an end consists of, with time, configuration and output.
    pub fn read_ended(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        id: PullId,
        over: LinkId,
        result: Result<(), Failure>,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let State::Reading { link, left, portion, until, doomed } = &mut pull.state else { return };
        // The end of an earlier read, again. The one that is under way still writes.
        if *link != over {
            return;
        }
        // Also of one whose result counts no more: it is news of the connection.
        if matches!(&result, Err(failure) if failure.reason == LoadFailure::PeerLost) {
            self.peers.read_lost(&pull.key, over);
        }
        if let Some(failure) = doomed.take() {
            return self.fail(now, config, id, failure, out);
        }
        if let Err(failure) = result {
            return self.fail_or_read_again(now, config, id, failure, out);
        }
        pull.stats.bytes += portion.bytes;
        pull.stats.ranges += portion.ranges;
        let from = std::mem::replace(&mut pull.read, left.taken());
        if let Some(groups) = pull.comparison.as_mut().and_then(|comparison| comparison.arrived(from)) {
            out.push(Decision::Digest { of: DigestOf::Pull { pull: id, from }, groups });
        }
        if !left.is_over() {
            if pull.comparison.is_none() {
                self.check(id, out);
            }
            return self.read_portion(now, config, local, id, out);
        }
        pull.stats.read_us = micros(now.since(pull.ordered_at));
        self.timers.clear(*until, id);
        if pull.comparison.as_ref().is_none_or(Comparison::is_over) {
            return self.confirm(now, config, id, now, out);
        }
        let until = now + config.limits.confirm;
        let repeat_at = now + config.limits.confirm_repeat;
        pull.state = State::Comparing { read_at: now, until, repeat_at };
        self.set(id, until);
        self.set(id, repeat_at);
    }

    /// Everything is here and, with checksums, equal: did the lease hold?
    fn confirm(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        id: PullId,
        read_at: Moment,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let more = self.peers.pull_asks(&pull.key, pull.name);
        let until = now + config.limits.confirm;
        let repeat_at = now + config.limits.confirm_repeat;
        pull.state = State::Confirming { read_at, until, repeat_at, more };
        self.set(id, until);
        self.set(id, repeat_at);
        self.ask(id, out);
    }

    /// The peers, for facts that concern connections alone.
    pub fn peers_mut(&mut self) -> &mut Peers {
        &mut self.peers
    }

    /// The worker ends: pulls that the transport does not own end now; reads end when the transport says so.
    pub fn close(&mut self, now: Moment, config: &WorkerConfig, out: &mut Vec<Decision>) {
        let closed = || Failure::new(LoadFailure::Closed, "the worker is shutting down");
        let all: Vec<PullId> = self.pulls.keys().copied().collect();
        for id in all {
            self.spoil(now, config, id, closed(), out);
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
        while let Some(id) = self.timers.due(now) {
            self.late(now, config, local, id, out);
        }
    }

    fn late(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        id: PullId,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let engine = &pull.key.peer.engine;
        match &mut pull.state {
            State::Waiting { until, .. } if *until <= now => {
                let detail = format!("engine {engine} was not ready within {:?}", config.limits.peer_wait);
                self.fail(now, config, id, Failure::new(LoadFailure::ConnectFailed, detail), out);
            }
            State::Reading { until, doomed, .. } if *until <= now => {
                let detail = format!("not read within {:?}", config.limits.read);
                doomed.get_or_insert(Failure::new(LoadFailure::ReadTimedOut, detail));
                *until = now + config.limits.read;
                self.timers.set(*until, id);
                out.push(Decision::CancelRead { pull: id });
            }
            State::Comparing { until, .. } if *until <= now => {
                let detail =
                    format!("not compared with what engine {engine} has within {:?}", config.limits.confirm);
                self.fail(now, config, id, Failure::new(LoadFailure::ConfirmTimedOut, detail), out);
            }
            State::Comparing { repeat_at, .. } if *repeat_at <= now => {
                *repeat_at = now + config.limits.confirm_repeat;
                self.timers.set(*repeat_at, id);
                self.ask_to_compare(id, 0..u32::MAX, out);
            }
            State::Confirming { until, .. } if *until <= now => {
                let detail = format!("engine {engine} did not confirm within {:?}", config.limits.confirm);
                self.fail(now, config, id, Failure::new(LoadFailure::ConfirmTimedOut, detail), out);
            }
            State::Confirming { repeat_at, .. } if *repeat_at <= now => {
                *repeat_at = now + config.limits.confirm_repeat;
                self.timers.set(*repeat_at, id);
                self.ask(id, out);
            }
            // Its peer may be ready again. If it is still failed that was counted when it failed; it is tried by itself.
            State::Waiting { not_before, .. } if *not_before <= now => {
                if !matches!(self.peers.standing(&pull.key), Standing::Failed(_)) {
                    self.begin(now, config, local, id, out);
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
