//! The consumer's side of connections: producers, from an address in a request to a greeted worker.
//!
//! ```text
//!  (unknown) ──wanted──► Dialling ──card fits──► Connecting ──connected──► Greeting ──Welcome──► Ready
//!                          ▲   └──────────────┬──────┴──────────────────────┘                      │
//!                          │               failed                                                lost
//!                    wanted, at retry         ▼                                                     │
//!                          └────────────── Failed ◄──────────── lost again and again ───────────────┘
//! ```
//!
//! One handshake per producer, however many requests wait. What the producer says of all its workers is compiled into a
//! plan ([`crate::shape`]); each worker that this rank has to do with is then a *source*, with a connection and a state of
//! its own. A source that failed answers everybody at once until it is tried again, so that it delays nobody. A producer
//! is one *life* of an engine: another life is another producer.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use kv_proto::handshake::Query;
use kv_proto::message::OfferName;
use kv_proto::{Attempt, LeaseId, LoadFailure, Moment, PeerLocator, Rank, ReleaseReason, Timers};
use kv_transport::{Address, RegionKey};

use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, LinkId, SourceKey};
use crate::shape::SourcePlan;

mod choose;
mod claim;
mod claims;
mod links;

pub use claim::End;
use claim::{Claim, Renewal};

/// However often a producer wants its leases renewed, it is not more often than this.
const RENEW_MIN: Duration = Duration::from_millis(10);

/// What is needed of a producer's worker to read from it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Remote {
    /// What is read from it.
    pub plan: SourcePlan,
    /// Keys of its memories, by index.
    pub keys: Vec<RegionKey>,
    /// How often it wants its leases renewed, if it says so.
    renew_every: Option<Duration>,
    address: Address,
    rank: Rank,
}

impl Remote {
    /// Time between two renewals: what the producer wishes, if that is more often than we would.
    fn pace(&self, config: &WorkerConfig) -> Duration {
        let own = config.limits.renew_every;
        // No wish makes us send without pause.
        self.renew_every.map_or(own, |wish| wish.clamp(RENEW_MIN, own.max(RENEW_MIN)))
    }
}

#[derive(Debug, Clone, Hash)]
enum State {
    /// Nobody wants it.
    Idle,
    Dialling {
        until: Moment,
    },
    Connecting {
        link: LinkId,
        remote: Box<Remote>,
        until: Moment,
    },
    Greeting {
        link: LinkId,
        remote: Box<Remote>,
        until: Moment,
    },
    Ready {
        link: LinkId,
        remote: Box<Remote>,
        since: Moment,
        idle_at: Moment,
        renewal: Renewal,
        /// A read has ended because of its loss, which has not been told.
        is_gone: bool,
    },
    Failed {
        failure: Failure,
        retry_at: Moment,
    },
}

/// A producer, from when it is first wanted until none of its sources is.
#[derive(Debug, Clone, Hash)]
struct Producer {
    /// The digest of the plan, when the handshake has told what there is. One life of a producer has one shape: loads under
    /// way are cut for it.
    plan: Option<u64>,
    /// By their place in the plan; the first one before there is a plan.
    sources: Vec<Peer>,
}

#[derive(Debug, Clone, Hash)]
struct Peer {
    state: State,
    /// Failures since it was last ready for a while.
    failures: u32,
    /// Offers that requests of ours live by.
    claims: BTreeMap<OfferName, Claim>,
    renew_at: Option<Moment>,
    /// Releases to be told when it is ready.
    releases: BTreeMap<(OfferName, Attempt), ReleaseReason>,
    /// Pulls that need it.
    users: u32,
    /// When it was last asked for.
    wanted_at: Moment,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum TimerKey {
    State(SourceKey),
    Renew(SourceKey),
}

/// What a pull finds when it looks for its peer.
#[derive(Debug)]
pub enum Standing<'a> {
    /// It can be read from.
    Ready(LinkId, &'a Remote),
    /// It is on its way.
    Pending,
    /// It failed a moment ago.
    Failed(&'a Failure),
}

/// A change that pulls must hear of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It is known how many sources the producer has for this rank.
    Planned(Arc<PeerLocator>, u32),
    /// The peer is ready.
    Ready(SourceKey),
    /// The peer failed.
    Failed(SourceKey, Failure),
    /// The peer says that these leases are not held.
    NotHeld(SourceKey, Vec<OfferName>),
    /// The peer answers a `Check`: of how many blocks, and whether they are good.
    Checked(SourceKey, LeaseId, Attempt, u32, bool),
    /// The peer answers a `Compare`: from which position on, how many were equal, and whether the lease held.
    Compared(SourceKey, LeaseId, Attempt, (u32, u32, bool)),
    /// The peer answers a `ReadDone`.
    Answered(SourceKey, LeaseId, Attempt, bool),
}

/// Counters. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct PeerStats {
    /// Handshakes begun.
    pub handshakes: u64,
    /// Handshakes that failed.
    pub handshakes_failed: u64,
    /// Times that a peer became ready.
    pub ready: u64,
    /// Connections lost that stood.
    pub lost: u64,
    /// Renewal messages sent.
    pub renewals: u64,
    /// Releases that could not be told, because their peer failed.
    pub releases_dropped: u64,
}

impl Hash for PeerStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The machine.
#[derive(Debug, Clone, Hash)]
pub struct Peers {
    transport: &'static str,
    next_link: u64,
    producers: BTreeMap<Arc<PeerLocator>, Producer>,
    timers: Timers<TimerKey>,
    stats: PeerStats,
}

impl Peers {
    /// Without peers. `transport` is the name of the transport in use.
    pub fn new(transport: &'static str) -> Self {
        Self {
            transport,
            next_link: 0,
            producers: BTreeMap::new(),
            timers: Timers::default(),
            stats: PeerStats::default(),
        }
    }

    /// Counters.
    pub fn stats(&self) -> PeerStats {
        self.stats
    }

    /// Producers known, in whatever state.
    pub fn len(&self) -> usize {
        self.producers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.producers.is_empty()
    }

    /// When [`Peers::time_passed`] wants to be called.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.next()
    }

    fn get(&self, key: &SourceKey) -> Option<&Peer> {
        self.producers.get(&key.peer)?.sources.get(key.source as usize)
    }

    fn get_mut(&mut self, key: &SourceKey) -> Option<&mut Peer> {
        peer_mut(&mut self.producers, key)
    }

    /// The keys of a producer's sources, as many as are known, with the one handle to its locator, so that its text is
    /// kept once. Begins the handshake of those that are new, or failed and may be tried again.
    fn want_all(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        locator: &PeerLocator,
        out: &mut Vec<Decision>,
    ) -> Vec<SourceKey> {
        let peer = match self.producers.get_key_value(locator) {
            Some((peer, _)) => peer.clone(),
            None => {
                let peer = Arc::new(locator.clone());
                let producer = Producer { plan: None, sources: vec![Peer::new(now)] };
                self.producers.insert(peer.clone(), producer);
                peer
            }
        };
        let count = self.producers.get(&peer).map_or(0, |producer| producer.sources.len());
        let keys = (0..count as u32).map(|source| SourceKey { peer: peer.clone(), source });
        let keys: Vec<SourceKey> = keys.collect();
        keys.iter().for_each(|key| self.want(now, config, key, out));
        keys
    }

    fn want(&mut self, now: Moment, config: &WorkerConfig, key: &SourceKey, out: &mut Vec<Decision>) {
        let Some(peer) = peer_mut(&mut self.producers, key) else { return };
        peer.wanted_at = now;
        match peer.state {
            State::Failed { retry_at, .. } if retry_at <= now => self.dial(now, config, key, out),
            State::Idle => self.dial(now, config, key, out),
            _ => {}
        }
    }

    /// How many sources a producer has for this rank; `None` as long as it has not said so.
    pub fn planned(&self, peer: &Arc<PeerLocator>) -> Option<u32> {
        self.producers.get(peer).filter(|p| p.plan.is_some()).map(|p| p.sources.len() as u32)
    }

    fn dial(&mut self, now: Moment, config: &WorkerConfig, key: &SourceKey, out: &mut Vec<Decision>) {
        // The handshake ends within its own limit; this one is for a dialler that does not.
        let until = now + config.limits.handshake + config.limits.connect;
        if let Some(peer) = self.get_mut(key) {
            peer.state = State::Dialling { until };
            self.timers.set(until, TimerKey::State(key.clone()));
            self.stats.handshakes += 1;
            out.push(Decision::ShakeHands { key: key.clone() });
        }
    }

    /// Nobody wants a source any more. A producer of which none is wanted is forgotten.
    fn retire(&mut self, key: &SourceKey) {
        let Some(producer) = self.producers.get_mut(&key.peer) else { return };
        if let Some(peer) = producer.sources.get_mut(key.source as usize) {
            peer.state = State::Idle;
            peer.failures = 0;
            // One that waited for another connection than this one. Its lease ends by time.
            self.stats.releases_dropped += peer.releases.len() as u64;
            peer.releases.clear();
        }
        if producer.sources.iter().all(|peer| matches!(peer.state, State::Idle) && !peer.is_wanted()) {
            self.producers.remove(&key.peer);
        }
    }

    /// How the peer stands now.
    pub fn standing(&self, key: &SourceKey) -> Standing<'_> {
        match self.get(key).map(|peer| &peer.state) {
            Some(State::Ready { link, remote, .. }) => Standing::Ready(*link, remote),
            Some(State::Failed { failure, .. }) => Standing::Failed(failure),
            Some(
                State::Idle | State::Dialling { .. } | State::Connecting { .. } | State::Greeting { .. },
            )
            | None => Standing::Pending,
        }
    }

    /// What to ask a producer in the handshake.
    pub fn query(config: &WorkerConfig, peer: &PeerLocator) -> Query {
        Query {
            engine: config.engine.clone(),
            incarnation: config.incarnation,
            rank: config.rank,
            topology: config.topology,
            wanted: peer.engine.clone(),
        }
    }

    fn stop_timers(&mut self, key: &SourceKey) {
        let Some(peer) = peer_mut(&mut self.producers, key) else { return };
        if let Some(at) = peer.renew_at.take() {
            self.timers.clear(at, TimerKey::Renew(key.clone()));
        }
        match peer.state {
            State::Connecting { until, .. } | State::Greeting { until, .. } => {
                self.timers.clear(until, TimerKey::State(key.clone()));
            }
            State::Ready { idle_at, .. } => self.timers.clear(idle_at, TimerKey::State(key.clone())),
            State::Failed { retry_at, .. } => self.timers.clear(retry_at, TimerKey::State(key.clone())),
            State::Dialling { until } => self.timers.clear(until, TimerKey::State(key.clone())),
            State::Idle => {}
        }
    }

    fn fail(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        failure: Failure,
    ) -> Option<Change> {
        self.stop_timers(key);
        let peer = peer_mut(&mut self.producers, key)?;
        self.stats.releases_dropped += peer.releases.len() as u64;
        peer.releases.clear();
        let wait = config.limits.retry_min.saturating_mul(1 << peer.failures.min(20));
        peer.failures = peer.failures.saturating_add(1);
        let retry_at = now + Duration::min(wait, config.limits.retry_max);
        peer.state = State::Failed { failure: failure.clone(), retry_at };
        self.timers.set(retry_at, TimerKey::State(key.clone()));
        Some(Change::Failed(key.clone(), failure))
    }

    /// Lets deadlines pass that have come.
    pub fn time_passed(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        out: &mut Vec<Decision>,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        while let Some(timer) = self.timers.due(now) {
            match timer {
                TimerKey::Renew(key) => {
                    if self.get(&key).is_some_and(|p| p.renew_at.is_some_and(|at| at <= now)) {
                        self.renew(now, config, &key, out);
                    }
                }
                TimerKey::State(key) => changes.extend(self.state_late(now, config, &key, out)),
            }
        }
        changes
    }

    fn state_late(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        let peer = peer_mut(&mut self.producers, key)?;
        match &mut peer.state {
            State::Dialling { until } if *until <= now => {
                let detail = format!("the handshake with engine {} did not end", key.peer.engine);
                self.fail(now, config, key, Failure::new(LoadFailure::HandshakeUnreachable, detail))
            }
            State::Connecting { link, until, .. } | State::Greeting { link, until, .. } if *until <= now => {
                let link = *link;
                out.push(Decision::Disconnect { link });
                let detail = format!(
                    "engine {} was not connected within {:?}",
                    key.peer.engine, config.limits.connect
                );
                self.fail(now, config, key, Failure::new(LoadFailure::ConnectFailed, detail))
            }
            State::Failed { retry_at, .. } if *retry_at <= now => {
                if peer.is_wanted() {
                    self.dial(now, config, key, out);
                } else {
                    self.retire(key);
                }
                None
            }
            State::Ready { link, idle_at, .. } if *idle_at <= now => {
                let link = *link;
                let until = peer.wanted_at + config.limits.peer_idle;
                if peer.users > 0 || !peer.claims.is_empty() || until > now {
                    *idle_at = if until > now { until } else { now + config.limits.peer_idle };
                    self.timers.set(*idle_at, TimerKey::State(key.clone()));
                } else {
                    out.push(Decision::Disconnect { link });
                    self.stop_timers(key);
                    self.retire(key);
                }
                None
            }
            _ => None,
        }
    }
}

/// One source, borrowing the producers alone.
fn peer_mut<'a>(
    producers: &'a mut BTreeMap<Arc<PeerLocator>, Producer>,
    key: &SourceKey,
) -> Option<&'a mut Peer> {
    producers.get_mut(&key.peer)?.sources.get_mut(key.source as usize)
}

impl Peer {
    fn new(now: Moment) -> Self {
        Self {
            state: State::Idle,
            failures: 0,
            claims: BTreeMap::new(),
            renew_at: None,
            releases: BTreeMap::new(),
            users: 0,
            wanted_at: now,
        }
    }

    fn is_wanted(&self) -> bool {
        self.users > 0 || !self.claims.is_empty() || !self.releases.is_empty()
    }
}
