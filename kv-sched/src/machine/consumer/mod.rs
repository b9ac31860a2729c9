//! The consumer's policy: which requests take their prompt from a producer, and what became of it.
//!
//! ```text
//!  request:  arrived ──► Queued ──blocks allocated──► Loading ──ranks reported──► Settled
//!                         │  ^                          │
//!                         │  └──failed, others remain───┘
//!                         └──not needed, aborted, waited too long──► Settled
//!  load:     Running ──every rank reported──► (ended)
//!               └──request gone, or ranks late──► Abandoned ──every rank reported──► (blocks released)
//! ```
//!
//! A remote source of a request is void once it was used or given back. A request may have several, from a router
//! that had several producers compute its prompt; when the last is void it is computed here, however often the
//! engine asks.

mod load;
mod source;

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use kv_proto::{
    BlockList, ConsumerOrder, LoadFailure, LoadId, Moment, PeerLocator, ReleaseReason, RemotePrefill,
    RequestId, Timers,
};

use crate::config::SchedConfig;
use crate::error::SchedError;
use crate::event::{Finish, HoldId, SchedEvent, Verdict};
use crate::machine::staging::StagedBlocks;
use load::Load;
use source::Source;

/// Where a request's prompt is, as far as the remote side is concerned.
#[derive(Debug, Clone, PartialEq, Hash)]
enum Request {
    /// To be read from the first of these, of which there is at least one; workers renew their leases.
    Queued { sources: Vec<Source>, until: Moment },
    /// Being read; if that fails, the others may be tried.
    Loading { load: LoadId, others: Vec<Source> },
    /// Used or given back.
    Settled,
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

    /// A request arrived whose prompt was computed elsewhere. The caller checked the offers against the prompt (`usable`:
    /// how many tokens of each are the prompt's own) and made sure that the id is not in use.
    pub fn arrived(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: RequestId,
        remote: RemotePrefill,
        usable: &[u32],
        orders: &mut Vec<ConsumerOrder>,
    ) {
        let sources = source::of(remote, usable);
        if sources.is_empty() {
            // No producer pinned anything: nothing to read, nothing to give back.
            self.requests.insert(request, Request::Settled);
            return;
        }
        orders.extend(sources.iter().map(Source::track));
        self.queue(now, config, request, sources);
    }

    /// The request waits for blocks to load into.
    fn queue(&mut self, now: Moment, config: &SchedConfig, request: RequestId, sources: Vec<Source>) {
        let until = now + config.queue_limit;
        self.timers.set(until, TimerKey::Request(request.clone()));
        self.requests.insert(request, Request::Queued { sources, until });
    }

    /// The offers that came with a request which is refused: they are given back at once, unless other requests live
    /// by them.
    pub fn refused(
        &mut self,
        remote: &RemotePrefill,
        reason: ReleaseReason,
        orders: &mut Vec<ConsumerOrder>,
    ) {
        let sources = source::of(remote.clone(), &[]);
        orders.extend(sources.iter().map(Source::track));
        self.give_back(sources, reason, orders);
    }

    /// The workers know which other requests live by the same offers, and tell a producer when it was the last.
    fn give_back(&mut self, sources: Vec<Source>, reason: ReleaseReason, orders: &mut Vec<ConsumerOrder>) {
        for source in sources {
            *self.stats.released.entry(reason).or_default() += 1;
            orders.push(source.release(reason));
        }
    }

    /// The producers from which a queued request can be loaded, the next one first. Empty while it loads, and when
    /// nothing remote is left.
    pub fn sources(&self, request: &RequestId) -> Vec<PeerLocator> {
        match self.requests.get(request) {
            Some(Request::Queued { sources, .. }) => sources.iter().map(Source::peer).collect(),
            Some(Request::Loading { .. } | Request::Settled) | None => Vec::new(),
        }
    }

    /// The engine wants the n-th of a queued request's producers to be the next one. The others stay behind it, in
    /// their order.
    pub fn use_source(&mut self, request: &RequestId, n: usize) -> Result<(), SchedError> {
        match self.requests.get_mut(request) {
            Some(Request::Queued { sources, .. }) if n < sources.len() => {
                sources[..=n].rotate_right(1);
                Ok(())
            }
            _ => {
                let held = self.sources(request).len();
                Err(SchedError::NoSuchSource { request: request.clone(), asked: n, held })
            }
        }
    }

    /// Tokens that a load would bring beyond those that are here. Asked as often as the engine likes.
    pub fn remote_tokens(&self, config: &SchedConfig, request: &RequestId, local_tokens: u32) -> u32 {
        match self.requests.get(request) {
            Some(Request::Queued { sources, .. }) => {
                let tokens = sources.first().map_or(0, |first| first.tokens().saturating_sub(local_tokens));
                if tokens < config.min_remote_tokens { 0 } else { tokens }
            }
            Some(Request::Loading { .. } | Request::Settled) | None => 0,
        }
    }

    /// Which of a request's blocks a load from the next producer would fill, by group; `blocks` as for
    /// [`Consumer::allocated`]. Empty if nothing remote is left.
    pub fn to_load(
        &self,
        config: &SchedConfig,
        request: &RequestId,
        local_tokens: u32,
        blocks: &[BlockList],
    ) -> Result<Vec<StagedBlocks>, SchedError> {
        let Some(Request::Queued { sources, .. }) = self.requests.get(request) else { return Ok(Vec::new()) };
        let Some(source) = sources.first() else { return Ok(Vec::new()) };
        let groups = source.groups(config, request, local_tokens, blocks)?;
        Ok(groups.into_iter().map(|group| StagedBlocks { first: group.first, blocks: group.local }).collect())
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
        let Some(Request::Queued { sources, until }) = self.requests.get(request) else {
            // After its use a source is void; an engine that asks again was answered 0.
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
        let (until, mut others) = (*until, sources.clone());
        if remote_tokens == 0 || others.is_empty() {
            self.settle(request.clone(), ReleaseReason::NotNeeded, orders);
            return Ok(());
        }
        let source = others.remove(0);
        let groups = source.groups(config, request, local_tokens, blocks)?;
        let load = LoadId(self.next_load);
        self.next_load += 1;
        let record =
            Load::new(request.clone(), &groups, local_tokens, source.tokens(), now + config.load_limit);
        orders.push(source.load(load, groups));
        self.timers.clear(until, TimerKey::Request(request.clone()));
        self.timers.set(now + config.load_limit, TimerKey::Load(load));
        self.loads.insert(load, record);
        self.requests.insert(request.clone(), Request::Loading { load, others });
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
            Request::Queued { sources, until } => {
                self.timers.clear(until, TimerKey::Request(request.clone()));
                self.give_back(sources, ReleaseReason::Aborted, orders);
                Verdict::Free
            }
            Request::Loading { load, others } => {
                orders.push(ConsumerOrder::Cancel { load });
                self.give_back(others, ReleaseReason::Aborted, orders);
                self.abandon(now, config, load);
                Verdict::Hold(HoldId::Load(load))
            }
        };
        Some(Finish { verdict, params: None })
    }

    /// A request lost its blocks while it waited or loaded. One that waits goes on waiting, with all its sources. One
    /// that loads goes on without any, also without those that were not tried: it is about to be computed anew, and what
    /// the load may still write is held. `None` if it is not one of this machine's.
    pub fn preempted(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: &RequestId,
        orders: &mut Vec<ConsumerOrder>,
    ) -> Option<Verdict> {
        let record = self.requests.get_mut(request)?;
        match std::mem::replace(record, Request::Settled) {
            Request::Loading { load, others } => {
                orders.push(ConsumerOrder::Cancel { load });
                self.give_back(others, ReleaseReason::NotNeeded, orders);
                self.abandon(now, config, load);
                Some(Verdict::Hold(HoldId::Load(load)))
            }
            // No load writes into its blocks: none has begun, or all have ended.
            other @ (Request::Queued { .. } | Request::Settled) => {
                *record = other;
                Some(Verdict::Free)
            }
        }
    }

    /// The engine does not want what was offered. A load under way goes on; it is the last.
    pub fn declined(&mut self, request: &RequestId, orders: &mut Vec<ConsumerOrder>) {
        self.settle(request.clone(), ReleaseReason::NotNeeded, orders);
    }

    /// Gives back every offer of a request that is not being read. If none is read, the request is computed here.
    fn settle(&mut self, request: RequestId, reason: ReleaseReason, orders: &mut Vec<ConsumerOrder>) {
        let Some(record) = self.requests.get_mut(&request) else { return };
        match std::mem::replace(record, Request::Settled) {
            Request::Queued { sources, until } => {
                self.timers.clear(until, TimerKey::Request(request));
                self.give_back(sources, reason, orders);
            }
            Request::Loading { load, others } => {
                *record = Request::Loading { load, others: Vec::new() };
                self.give_back(others, reason, orders);
            }
            Request::Settled => {}
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
}
