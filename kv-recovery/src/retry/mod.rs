//! Whether a failed load is tried again, from whom and when, and whether a new one may start at all.
//!
//! ```text
//!  request:  load failed ──► Waiting ──its time has come──► Trying ──► (ended, or failed again)
//!                 ├── another producer, at once ───────────────┘
//!                 └──► recompute or fail
//! ```
//!
//! A retry is decided when it starts, not when it is planned: until then its producer may have turned out to be
//! dead. So each failure that is taken gets exactly one decision, at once or from [`Recovery::time_passed`], unless
//! the request goes away first. States of peers are drawn in the source of their table; both are printed in full
//! under `docs/states`.

mod advice;
mod budget;
mod config;
mod peers;
mod types;

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use kv_proto::{Moment, PeerLocator, RequestId, Timers};

use crate::Policy;
use budget::Bucket;
use peers::Peers;

pub use advice::{Advice, Evidence, advice};
pub use config::{ConfigError, Fallback, RecoveryConfig};
pub use types::{Admission, BreakerState, Directive, LoadFacts, RecoveryStats, Refusal, Source};

/// A request between two attempts, or in one that is not its first.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Record<K, P> {
    /// Its next attempt, at the same producer, starts at `at`; `attempts` were made before.
    Waiting { at: Moment, facts: Box<LoadFacts<K, P>>, attempts: u32 },
    /// An attempt is under way. Forgotten if nothing is heard of it by `until`.
    Trying { until: Moment, peer: P, attempts: u32, probe: bool },
}

impl<K, P> Record<K, P> {
    fn until(&self) -> Moment {
        match self {
            Self::Waiting { at, .. } => *at,
            Self::Trying { until, .. } => *until,
        }
    }
}

/// Why no further attempt is made.
#[derive(Debug, Clone, Copy)]
enum Stop {
    Policy,
    Unhelpful,
    Spent,
    Budget,
    Breaker,
}

/// The machine: one per consumer engine. `K` names requests, `P` names one life of a producer: a producer that
/// was born again must be another `P`, so that it does not inherit its forebear's breaker.
#[derive(Debug, Clone)]
pub struct Recovery<K = RequestId, P = PeerLocator> {
    config: RecoveryConfig,
    requests: BTreeMap<K, Record<K, P>>,
    timers: Timers<K>,
    peers: Peers<P>,
    /// Filled from the first time that the machine is told.
    budget: Option<Bucket>,
    stats: RecoveryStats,
}

/// FNV-1a: the same in every build and on every machine with the same byte order.
struct Fnv(u64);

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// Wait before an attempt: between half and all of what doubling gives. Where in between is a hash of the request's
/// key and the attempt's number, so that requests which failed together do not return together, and the same
/// history gives the same times.
fn backoff(config: &RecoveryConfig, key: &impl Hash, attempts: u32) -> Duration {
    let full = config.backoff_first.saturating_mul(1u32 << attempts.min(30)).min(config.backoff_max);
    let half = u64::try_from(full.as_nanos() / 2).unwrap_or(u64::MAX / 2).max(1);
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    key.hash(&mut hash);
    attempts.hash(&mut hash);
    // The low bits of the hash are its weakest; the high ones are folded in.
    let spot = hash.finish();
    Duration::from_nanos(half.saturating_add((spot ^ spot >> 32) % half.saturating_add(1)))
}

impl<K: Ord + Clone + Hash, P: Ord + Clone> Recovery<K, P> {
    /// A machine that remembers nothing yet.
    pub fn new(config: RecoveryConfig) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            config,
            requests: BTreeMap::new(),
            timers: Timers::default(),
            peers: Peers::new(),
            budget: None,
            stats: RecoveryStats::default(),
        })
    }

    /// Policy and limits.
    pub fn config(&self) -> &RecoveryConfig {
        &self.config
    }

    /// Counters.
    pub fn stats(&self) -> &RecoveryStats {
        &self.stats
    }

    /// Requests between two attempts or in one that is not their first.
    pub fn request_count(&self) -> usize {
        self.requests.len()
    }

    /// Peers that are remembered; never more than [`RecoveryConfig::peers_max`].
    pub fn peer_count(&self) -> usize {
        self.peers.len()
    }

    /// When a request whose load failed will hear what becomes of it; `None` if nothing is owed.
    pub fn waits_until(&self, key: &K) -> Option<Moment> {
        match self.requests.get(key)? {
            Record::Waiting { at, .. } => Some(*at),
            Record::Trying { .. } => None,
        }
    }

    /// A peer's breaker. Of a peer that is not remembered it is closed.
    pub fn breaker(&self, peer: &P) -> BreakerState {
        self.peers.state(peer)
    }

    /// When [`Recovery::time_passed`] wants to be called. After that call it lies in the future.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.next().into_iter().chain(self.peers.next_deadline()).min()
    }

    /// Asked before the first load of a request starts. A refusal costs that request nothing but the tokens it then
    /// computes; without it, every request for a dead peer would spend a whole time limit. Retries that this machine
    /// decides on have been admitted by it.
    pub fn admit(&mut self, now: Moment, peer: &P) -> Admission {
        let admission = self.peers.admit(now, &self.config, peer, &mut self.stats);
        if let Admission::Refuse { .. } = admission {
            self.stats.loads_refused += 1;
        }
        admission
    }

    /// A load that was admitted as [`Admission::Probe`] has ended, and not well: its request went away, the engine did
    /// without it, or it failed for a reason that says nothing about its producer. Another probe may be sent now and need
    /// not wait for this one's time to be over. After a failure that did say something it changes nothing, so that it may
    /// be called after [`Recovery::load_failed`] in any case. Of a load that was not a probe it must not be said.
    pub fn load_abandoned(&mut self, now: Moment, peer: &P) {
        self.peers.probe_void(now, &self.config, peer);
    }

    /// A load failed, and its destination blocks are quiet. One decision follows: in `out` now, or from
    /// [`Recovery::time_passed`] at [`Recovery::waits_until`]. A second report about a request that waits is counted
    /// and changes nothing.
    pub fn load_failed(&mut self, now: Moment, facts: LoadFacts<K, P>, out: &mut Vec<Directive<K>>) {
        let attempts = match self.requests.get(&facts.key) {
            Some(Record::Waiting { .. }) => {
                self.stats.stray += 1;
                return;
            }
            Some(Record::Trying { attempts, peer, probe, .. }) => {
                let (attempts, other) = (*attempts, (*probe && *peer != facts.peer).then(|| peer.clone()));
                if let Some(peer) = other {
                    self.peers.probe_void(now, &self.config, &peer);
                }
                attempts
            }
            None => 0,
        };
        let probe = matches!(self.remove(&facts.key), Some(Record::Trying { probe: true, .. }));
        *self.stats.failures.entry(facts.reason).or_default() += 1;
        let advice = advice(facts.reason);
        let (config, stats) = (&self.config, &mut self.stats);
        if probe && advice.evidence == Evidence::Nothing {
            self.peers.probe_void(now, config, &facts.peer);
        }
        self.peers.failed(now, config, &facts.peer, facts.reason, advice.evidence, stats);
        match config.policy {
            Policy::Recompute | Policy::Fail => self.stop(Stop::Policy, &facts, out),
            Policy::Retry if facts.tokens_valid >= facts.tokens_wanted => self.lacks_nothing(facts, out),
            Policy::Retry => self.again(now, facts, advice, attempts, out),
        }
    }

    /// A load went well, a first one or a retry.
    pub fn load_succeeded(&mut self, now: Moment, key: &K, peer: &P) {
        match self.requests.get(key) {
            Some(Record::Trying { peer: tried, probe, .. }) => {
                let void = (*probe && tried != peer).then(|| tried.clone());
                if let Some(tried) = void {
                    self.peers.probe_void(now, &self.config, &tried);
                }
                self.remove(key);
                self.stats.recovered += 1;
            }
            // It was reported failed before, and that has had its consequences.
            Some(Record::Waiting { .. }) => self.stats.stray += 1,
            None => {}
        }
        self.peers.answered(now, &self.config, peer, &mut self.stats);
    }

    /// A request ended for a reason of its own. Nothing more is decided about it.
    pub fn request_gone(&mut self, now: Moment, key: &K) {
        match self.remove(key) {
            Some(Record::Waiting { .. }) => self.stats.gone += 1,
            Some(Record::Trying { peer, probe: true, .. }) => {
                self.peers.probe_void(now, &self.config, &peer);
            }
            Some(Record::Trying { .. }) | None => {}
        }
    }

    /// Time has passed. Decides about every request whose wait is over.
    pub fn time_passed(&mut self, now: Moment, out: &mut Vec<Directive<K>>) {
        // Peers first: a breaker whose time is over may let one of the requests through.
        self.peers.time_passed(now, &self.config, &mut self.stats);
        while let Some(key) = self.timers.due(now) {
            match self.requests.remove(&key) {
                Some(Record::Waiting { at, facts, attempts }) => {
                    let peer = facts.peer.clone();
                    match self.peers.admit(now, &self.config, &peer, &mut self.stats) {
                        Admission::Refuse { .. } => {
                            // Its share of the common budget is spent already.
                            let elsewhere = advice(facts.reason).elsewhere;
                            if let Err(stop) = self.elsewhere(now, &facts, elsewhere, attempts, false, out) {
                                let stop = if let Stop::Unhelpful = stop { Stop::Breaker } else { stop };
                                self.stop(stop, &facts, out);
                            }
                        }
                        admission => {
                            self.stats.retries_same += 1;
                            self.attempt(now, &key, peer, attempts, admission);
                            out.push(Directive::Retry { key, source: Source::Same, at });
                        }
                    }
                }
                Some(Record::Trying { peer, probe, .. }) => {
                    self.stats.silent += 1;
                    if probe {
                        self.peers.probe_void(now, &self.config, &peer);
                    }
                }
                None => {}
            }
        }
    }

    fn remove(&mut self, key: &K) -> Option<Record<K, P>> {
        let record = self.requests.remove(key)?;
        self.timers.clear(record.until(), key.clone());
        Some(record)
    }

    fn insert(&mut self, key: K, record: Record<K, P>) {
        self.timers.set(record.until(), key.clone());
        self.requests.insert(key, record);
    }

    fn attempt(&mut self, now: Moment, key: &K, peer: P, attempts: u32, admission: Admission) {
        let (until, probe) = (now + self.config.attempt_limit, admission == Admission::Probe);
        self.insert(key.clone(), Record::Trying { until, peer, attempts: attempts.saturating_add(1), probe });
    }

    /// Whether the common budget allows one more retry.
    fn has_budget(&mut self, now: Moment) -> bool {
        let (burst, refill) = (self.config.budget, self.config.budget_refill);
        self.budget.get_or_insert_with(|| Bucket::full(burst, now)).has(now, burst, refill)
    }

    fn take_budget(&mut self) {
        if let Some(bucket) = &mut self.budget {
            bucket.take();
        }
    }

    /// All was verified before the load failed, for instance when only the last word about it did not come: another
    /// attempt would bring nothing.
    fn lacks_nothing(&mut self, facts: LoadFacts<K, P>, out: &mut Vec<Directive<K>>) {
        self.stats.recomputed += 1;
        self.stats.tokens_kept += u64::from(facts.tokens_wanted);
        out.push(Directive::Recompute { key: facts.key, keep_tokens: facts.tokens_wanted });
    }

    /// Another attempt, if there is one to make: first at the same producer, then at another.
    fn again(
        &mut self,
        now: Moment,
        facts: LoadFacts<K, P>,
        advice: Advice,
        attempts: u32,
        out: &mut Vec<Directive<K>>,
    ) {
        if attempts >= self.config.retries_per_request {
            return self.stop(Stop::Spent, &facts, out);
        }
        let same = advice.same && facts.lease_alive;
        let others = advice.elsewhere && facts.alternatives.iter().any(|peer| *peer != facts.peer);
        if !same && !others {
            return self.stop(Stop::Unhelpful, &facts, out);
        }
        if !self.has_budget(now) {
            return self.stop(Stop::Budget, &facts, out);
        }
        let mut why = Stop::Unhelpful;
        if same {
            let at = now + backoff(&self.config, &facts.key, attempts);
            if self.peers.shut_at(at, &facts.peer) {
                why = Stop::Breaker;
            } else if !self.peers.has_budget(now, &self.config, &facts.peer, &mut self.stats) {
                why = Stop::Budget;
            } else {
                // Taken now, so that those for whom nothing is left need not wait to hear it.
                self.take_budget();
                self.peers.take_budget(&facts.peer);
                let key = facts.key.clone();
                return self.insert(key, Record::Waiting { at, facts: Box::new(facts), attempts });
            }
        }
        if let Err(stop) = self.elsewhere(now, &facts, advice.elsewhere, attempts, true, out) {
            self.stop(if let Stop::Unhelpful = stop { why } else { stop }, &facts, out);
        }
    }

    /// An attempt at the first other producer that may be asked. It needs no wait: nothing is known against it.
    fn elsewhere(
        &mut self,
        now: Moment,
        facts: &LoadFacts<K, P>,
        helps: bool,
        attempts: u32,
        take: bool,
        out: &mut Vec<Directive<K>>,
    ) -> Result<(), Stop> {
        let mut why = Stop::Unhelpful;
        for (n, peer) in
            facts.alternatives.iter().enumerate().filter(|(_, peer)| helps && **peer != facts.peer)
        {
            if self.peers.shut_at(now, peer) {
                why = Stop::Breaker;
                continue;
            }
            if !self.peers.has_budget(now, &self.config, peer, &mut self.stats) {
                why = Stop::Budget;
                continue;
            }
            let admission = self.peers.admit(now, &self.config, peer, &mut self.stats);
            if take {
                self.take_budget();
            }
            self.peers.take_budget(peer);
            self.stats.retries_elsewhere += 1;
            self.attempt(now, &facts.key, peer.clone(), attempts, admission);
            out.push(Directive::Retry { key: facts.key.clone(), source: Source::Alternative(n), at: now });
            return Ok(());
        }
        Err(why)
    }

    /// The last decision about a load.
    fn stop(&mut self, stop: Stop, facts: &LoadFacts<K, P>, out: &mut Vec<Directive<K>>) {
        match stop {
            Stop::Policy => {}
            Stop::Unhelpful => self.stats.unhelpful += 1,
            Stop::Spent => self.stats.attempts_spent += 1,
            Stop::Budget => self.stats.refused_by_budget += 1,
            Stop::Breaker => self.stats.refused_by_breaker += 1,
        }
        let recompute = match self.config.policy {
            Policy::Recompute => true,
            Policy::Fail => false,
            Policy::Retry => self.config.fallback == Fallback::Recompute,
        };
        let (key, reason) = (facts.key.clone(), facts.reason);
        if recompute {
            // Nobody can keep more than was wanted.
            let keep_tokens = facts.tokens_valid.min(facts.tokens_wanted);
            self.stats.recomputed += 1;
            self.stats.tokens_kept += u64::from(keep_tokens);
            self.stats.tokens_recomputed += u64::from(facts.tokens_wanted - keep_tokens);
            out.push(Directive::Recompute { key, keep_tokens });
        } else {
            self.stats.failed += 1;
            out.push(Directive::Fail { key, reason });
        }
    }
}
