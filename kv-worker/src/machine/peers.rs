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
//! One handshake per peer, however many requests wait. A peer that failed answers everybody at once until it is
//! tried again, so that it delays nobody. A peer is one *life* of an engine: another life is another peer.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use kv_proto::handshake::{EngineCard, Query};
use kv_proto::message::{HelloRefusal, LEASES_PER_MESSAGE_MAX, OfferName, WorkerMessage};
use kv_proto::{
    Attempt, BlockLayout, LeaseId, LoadFailure, Moment, PROTOCOL_VERSION, PeerLocator, Rank, ReleaseReason,
    Timers,
};
use kv_transport::{Address, RegionKey};

use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, LinkId};

mod claim;
mod claims;

pub use claim::End;
use claim::{Claim, Renewal};

/// However often a producer wants its leases renewed, it is not more often than this.
const RENEW_MIN: Duration = Duration::from_millis(10);

/// What is needed of a producer's worker to read from it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Where its blocks lie.
    pub layout: BlockLayout,
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
    Dialling { until: Moment },
    Connecting { link: LinkId, remote: Box<Remote>, until: Moment },
    Greeting { link: LinkId, remote: Box<Remote>, until: Moment },
    Ready { link: LinkId, remote: Box<Remote>, since: Moment, idle_at: Moment, renewal: Renewal },
    Failed { failure: Failure, retry_at: Moment },
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
    State(Arc<PeerLocator>),
    Renew(Arc<PeerLocator>),
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
    /// The peer is ready.
    Ready(Arc<PeerLocator>),
    /// The peer failed.
    Failed(Arc<PeerLocator>, Failure),
    /// The peer says that these leases are not held.
    NotHeld(Arc<PeerLocator>, Vec<OfferName>),
    /// The peer answers a `Check`: of how many blocks, and whether they are good.
    Checked(Arc<PeerLocator>, LeaseId, Attempt, u32, bool),
    /// The peer answers a `Compare`: from which position on, how many were equal, and whether the lease held.
    Compared(Arc<PeerLocator>, LeaseId, Attempt, (u32, u32, bool)),
    /// The peer answers a `ReadDone`.
    Answered(Arc<PeerLocator>, LeaseId, Attempt, bool),
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
    peers: BTreeMap<Arc<PeerLocator>, Peer>,
    timers: Timers<TimerKey>,
    stats: PeerStats,
}

impl Peers {
    /// Without peers. `transport` is the name of the transport in use.
    pub fn new(transport: &'static str) -> Self {
        Self {
            transport,
            next_link: 0,
            peers: BTreeMap::new(),
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
        self.peers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// When [`Peers::time_passed`] wants to be called.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.next()
    }

    /// The one handle to a locator, so that its text is kept once. Begins the handshake if the peer is new, or
    /// failed and may be tried again.
    fn want(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        locator: &PeerLocator,
        out: &mut Vec<Decision>,
    ) -> Arc<PeerLocator> {
        if let Some((key, _)) = self.peers.get_key_value(locator) {
            let key = key.clone();
            if let Some(peer) = self.peers.get_mut(&key) {
                peer.wanted_at = now;
                if matches!(peer.state, State::Failed { retry_at, .. } if retry_at <= now) {
                    self.dial(now, config, &key, out);
                }
            }
            return key;
        }
        let key = Arc::new(locator.clone());
        let peer = Peer {
            state: State::Dialling { until: now },
            failures: 0,
            claims: BTreeMap::new(),
            renew_at: None,
            releases: BTreeMap::new(),
            users: 0,
            wanted_at: now,
        };
        self.peers.insert(key.clone(), peer);
        self.dial(now, config, &key, out);
        key
    }

    fn dial(&mut self, now: Moment, config: &WorkerConfig, key: &Arc<PeerLocator>, out: &mut Vec<Decision>) {
        if let Some(peer) = self.peers.get_mut(key) {
            // The handshake ends within its own limit; this one is for a dialler that does not.
            let until = now + config.limits.handshake + config.limits.connect;
            self.timers.set(until, TimerKey::State(key.clone()));
            peer.state = State::Dialling { until };
            self.stats.handshakes += 1;
            out.push(Decision::ShakeHands { peer: key.clone() });
        }
    }

    /// How the peer stands now.
    pub fn standing(&self, key: &Arc<PeerLocator>) -> Standing<'_> {
        match self.peers.get(key).map(|peer| &peer.state) {
            Some(State::Ready { link, remote, .. }) => Standing::Ready(*link, remote),
            Some(State::Failed { failure, .. }) => Standing::Failed(failure),
            Some(State::Dialling { .. } | State::Connecting { .. } | State::Greeting { .. }) | None => {
                Standing::Pending
            }
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

    /// A handshake ended.
    pub fn handshake_ended(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &Arc<PeerLocator>,
        result: Result<Box<EngineCard>, Failure>,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        if !matches!(self.peers.get(key)?.state, State::Dialling { .. }) {
            return None;
        }
        let remote = match result.and_then(|card| self.choose(config, &card)) {
            Ok(remote) => remote,
            Err(failure) => {
                self.stats.handshakes_failed += 1;
                return self.fail(now, config, key, failure);
            }
        };
        self.stop_timers(key);
        let link = LinkId::Dialled(self.next_link);
        self.next_link += 1;
        out.push(Decision::Connect { link, address: remote.address.clone() });
        let until = now + config.limits.connect;
        self.timers.set(until, TimerKey::State(key.clone()));
        self.peers.get_mut(key)?.state = State::Connecting { link, remote: Box::new(remote), until };
        None
    }

    /// The worker of a producer that this rank reads from, and how.
    fn choose(&self, config: &WorkerConfig, card: &EngineCard) -> Result<Remote, Failure> {
        let malformed = |detail: String| Failure::new(LoadFailure::HandshakeMalformed, detail);
        let rank = card
            .topology
            .source_of(config.rank, config.topology)
            .map_err(|e| Failure::new(LoadFailure::Incompatible, e.to_string()))?;
        let worker = card
            .workers
            .iter()
            .find(|worker| worker.rank == rank)
            .ok_or_else(|| malformed(format!("engine {} describes no {rank}", card.engine)))?;
        let transport = worker.transports.iter().find(|t| t.name == self.transport).ok_or_else(|| {
            let theirs: Vec<&str> = worker.transports.iter().map(|t| t.name.as_str()).collect();
            Failure::new(
                LoadFailure::Incompatible,
                format!("transport: ours {}, engine {} offers {theirs:?}", self.transport, card.engine),
            )
        })?;
        let address = Address::from_bytes(transport.address.clone()).map_err(|e| malformed(e.to_string()))?;
        let keys = transport
            .keys
            .iter()
            .map(|key| RegionKey::from_bytes(key.to_vec()).map_err(|e| malformed(e.to_string())))
            .collect::<Result<_, _>>()?;
        let renew_every = (card.renew_every_ms > 0).then(|| Duration::from_millis(card.renew_every_ms));
        Ok(Remote { layout: worker.layout.clone(), keys, renew_every, address, rank })
    }

    fn by_link(&self, link: LinkId) -> Option<Arc<PeerLocator>> {
        self.peers.iter().find_map(|(key, peer)| match &peer.state {
            State::Connecting { link: l, .. }
            | State::Greeting { link: l, .. }
            | State::Ready { link: l, .. } => (*l == link).then(|| key.clone()),
            State::Dialling { .. } | State::Failed { .. } => None,
        })
    }

    /// A connection stands: say who we are.
    pub fn connected(&mut self, config: &WorkerConfig, link: LinkId, out: &mut Vec<Decision>) {
        let Some(key) = self.by_link(link) else { return out.push(Decision::Disconnect { link }) };
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let State::Connecting { remote, until, .. } = &peer.state else { return };
        let message = WorkerMessage::Hello {
            version: PROTOCOL_VERSION,
            engine: config.engine.clone(),
            incarnation: config.incarnation,
            rank: config.rank,
            topology: config.topology,
            to: key.incarnation,
            to_rank: remote.rank,
        };
        out.push(Decision::Send { link, message });
        peer.state = State::Greeting { link, remote: remote.clone(), until: *until };
    }

    /// A connection is gone.
    pub fn lost(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        link: LinkId,
        detail: &str,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        let key = self.by_link(link)?;
        let peer = self.peers.get_mut(&key)?;
        let State::Ready { since, .. } = peer.state else {
            let failure = Failure::new(LoadFailure::ConnectFailed, detail);
            return self.fail(now, config, &key, failure);
        };
        self.stats.lost += 1;
        self.stop_timers(&key);
        let peer = self.peers.get_mut(&key)?;
        if now.since(since) < config.limits.retry_min {
            // Ready and lost again and again would be a storm of handshakes.
            return self.fail(now, config, &key, Failure::new(LoadFailure::PeerLost, detail));
        }
        peer.failures = 0;
        if peer.is_wanted() {
            self.dial(now, config, &key, out);
        } else {
            self.peers.remove(&key);
        }
        None
    }

    fn stop_timers(&mut self, key: &Arc<PeerLocator>) {
        let Some(peer) = self.peers.get_mut(key) else { return };
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
        }
    }

    fn fail(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &Arc<PeerLocator>,
        failure: Failure,
    ) -> Option<Change> {
        self.stop_timers(key);
        let peer = self.peers.get_mut(key)?;
        self.stats.releases_dropped += peer.releases.len() as u64;
        peer.releases.clear();
        let wait = config.limits.retry_min.saturating_mul(1 << peer.failures.min(20));
        peer.failures = peer.failures.saturating_add(1);
        let retry_at = now + Duration::min(wait, config.limits.retry_max);
        peer.state = State::Failed { failure: failure.clone(), retry_at };
        self.timers.set(retry_at, TimerKey::State(key.clone()));
        Some(Change::Failed(key.clone(), failure))
    }

    /// A producer said something.
    pub fn message(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        link: LinkId,
        message: Option<WorkerMessage>,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        let key = self.by_link(link)?;
        let peer = self.peers.get(&key)?;
        match (&peer.state, message) {
            (State::Greeting { remote, .. }, Some(WorkerMessage::Welcome { incarnation, rank }))
                if incarnation == key.incarnation && rank == remote.rank =>
            {
                self.greeted(now, config, &key, out);
                Some(Change::Ready(key))
            }
            (State::Greeting { .. }, Some(WorkerMessage::Unwelcome { reason, incarnation })) => {
                let reason_code = match reason {
                    HelloRefusal::Incarnation | HelloRefusal::Rank => LoadFailure::WrongPeer,
                    _ => LoadFailure::Incompatible,
                };
                let detail = format!(
                    "engine {} in life {} was wanted; life {incarnation} answers and refuses: {reason:?}",
                    key.engine, key.incarnation
                );
                out.push(Decision::Disconnect { link });
                self.fail(now, config, &key, Failure::new(reason_code, detail))
            }
            // The contract promises no order: an answer to what was asked over an earlier connection may overtake
            // the greeting. It is dropped, since it is asked for again.
            (
                State::Greeting { .. },
                Some(
                    WorkerMessage::Confirmed { .. }
                    | WorkerMessage::Lapsed { .. }
                    | WorkerMessage::Checked { .. }
                    | WorkerMessage::Compared { .. }
                    | WorkerMessage::NotHeld { .. }
                    | WorkerMessage::Relist {},
                ),
            ) => None,
            (State::Ready { .. }, Some(WorkerMessage::NotHeld { leases }))
                if leases.len() <= LEASES_PER_MESSAGE_MAX =>
            {
                if let Some(peer) = self.peers.get_mut(&key) {
                    for name in &leases {
                        peer.void(*name);
                    }
                }
                Some(Change::NotHeld(key, leases))
            }
            (State::Ready { .. }, Some(WorkerMessage::Relist {})) => {
                self.relist(now, &key);
                None
            }
            (State::Ready { .. }, Some(WorkerMessage::Checked { lease, attempt, blocks, held })) => {
                Some(Change::Checked(key, lease, attempt, blocks, held))
            }
            (State::Ready { .. }, Some(WorkerMessage::Compared { lease, attempt, from, equal, held })) => {
                Some(Change::Compared(key, lease, attempt, (from, equal, held)))
            }
            (State::Ready { .. }, Some(WorkerMessage::Confirmed { lease, attempt })) => {
                Some(Change::Answered(key, lease, attempt, true))
            }
            (State::Ready { .. }, Some(WorkerMessage::Lapsed { lease, attempt })) => {
                Some(Change::Answered(key, lease, attempt, false))
            }
            // Anything else breaks the protocol: this connection is not worth having.
            _ => {
                out.push(Decision::Disconnect { link });
                let detail = format!("engine {} broke the protocol of the workers", key.engine);
                self.fail(now, config, &key, Failure::new(LoadFailure::PeerLost, detail))
            }
        }
    }

    fn greeted(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &Arc<PeerLocator>,
        out: &mut Vec<Decision>,
    ) {
        self.stop_timers(key);
        let Some(peer) = self.peers.get_mut(key) else { return };
        let State::Greeting { link, remote, .. } = &peer.state else { return };
        let link = *link;
        let idle_at = now + config.limits.peer_idle;
        let renewal = Renewal::from_start(peer.claims.iter());
        peer.state = State::Ready { link, remote: remote.clone(), since: now, idle_at, renewal };
        self.timers.set(idle_at, TimerKey::State(key.clone()));
        for (((lease, offer), attempt), reason) in std::mem::take(&mut peer.releases) {
            out.push(Decision::Send {
                link,
                message: WorkerMessage::Release { lease, attempt, offer, reason },
            });
        }
        self.stats.ready += 1;
        self.renew(now, config, key, out);
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
                    if self.peers.get(&key).is_some_and(|p| p.renew_at.is_some_and(|at| at <= now)) {
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
        key: &Arc<PeerLocator>,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        let peer = self.peers.get_mut(key)?;
        match &mut peer.state {
            State::Dialling { until } if *until <= now => {
                let detail = format!("the handshake with engine {} did not end", key.engine);
                self.fail(now, config, key, Failure::new(LoadFailure::HandshakeUnreachable, detail))
            }
            State::Connecting { link, until, .. } | State::Greeting { link, until, .. } if *until <= now => {
                let link = *link;
                out.push(Decision::Disconnect { link });
                let detail =
                    format!("engine {} was not connected within {:?}", key.engine, config.limits.connect);
                self.fail(now, config, key, Failure::new(LoadFailure::ConnectFailed, detail))
            }
            State::Failed { retry_at, .. } if *retry_at <= now => {
                if peer.is_wanted() {
                    self.dial(now, config, key, out);
                } else {
                    self.peers.remove(key);
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
                    self.peers.remove(key);
                }
                None
            }
            _ => None,
        }
    }
}

impl Peer {
    fn is_wanted(&self) -> bool {
        self.users > 0 || !self.claims.is_empty() || !self.releases.is_empty()
    }
}
