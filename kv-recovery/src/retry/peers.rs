//! What is remembered about peers: a circuit breaker and a budget of retries each, in a bounded table.
//!
//! ```text
//!            failures in a row, or one if the peer is gone
//!   Closed ──────────────────────────────────────────────► Open ◄───────────────┐
//!     ▲  └─idle─► (forgotten)                               │ its time is over  │ a failure: twice as long
//!     │                                                     ▼                   │
//!     ├──────────────── an answer ◄──────────────────── HalfOpen ───────────────┤
//!     │                                                  │     ▲ no news        │
//!     │                                           admit  ▼     │                │
//!     └──────────────── an answer ◄──────────────────── Probing ────────────────┘
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use kv_proto::{LoadFailure, Moment, Timers};

use super::advice::Evidence;
use super::budget::Bucket;
use super::{Admission, BreakerState, RecoveryConfig, RecoveryStats, Refusal};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Breaker {
    /// Loads may start. Forgotten at `until` unless something is heard.
    Closed { failures: u32, until: Moment },
    /// No load may start before `until`.
    Open { until: Moment, wait: Duration, reason: LoadFailure },
    /// The next load is the probe. Forgotten at `until`.
    HalfOpen { until: Moment, wait: Duration, reason: LoadFailure },
    /// A probe is out; if it is not heard of by `until`, another may go.
    Probing { until: Moment, wait: Duration, reason: LoadFailure },
}

impl Breaker {
    fn until(self) -> Moment {
        match self {
            Self::Closed { until, .. }
            | Self::Open { until, .. }
            | Self::HalfOpen { until, .. }
            | Self::Probing { until, .. } => until,
        }
    }

    /// What is forgotten first when there is no room: least of what protects others.
    fn worth(self) -> u8 {
        match self {
            Self::Closed { .. } => 0,
            Self::HalfOpen { .. } => 1,
            Self::Probing { .. } => 2,
            Self::Open { .. } => 3,
        }
    }
}

#[derive(Debug, Clone)]
struct Peer {
    breaker: Breaker,
    bucket: Bucket,
}

/// The table.
#[derive(Debug, Clone)]
pub(super) struct Peers<P> {
    entries: BTreeMap<P, Peer>,
    timers: Timers<P>,
}

impl<P: Ord + Clone> Peers<P> {
    pub(super) fn new() -> Self {
        Self { entries: BTreeMap::new(), timers: Timers::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn next_deadline(&self) -> Option<Moment> {
        self.timers.next()
    }

    pub(super) fn state(&self, peer: &P) -> BreakerState {
        match self.entries.get(peer).map(|entry| entry.breaker) {
            None | Some(Breaker::Closed { .. }) => BreakerState::Closed,
            Some(Breaker::Open { until, .. }) => BreakerState::Open { until },
            Some(Breaker::HalfOpen { .. }) => BreakerState::HalfOpen,
            Some(Breaker::Probing { until, .. }) => BreakerState::Probing { until },
        }
    }

    fn set(&mut self, peer: &P, breaker: Breaker) {
        if let Some(entry) = self.entries.get_mut(peer) {
            self.timers.clear(entry.breaker.until(), peer.clone());
            self.timers.set(breaker.until(), peer.clone());
            entry.breaker = breaker;
        }
    }

    /// Makes sure that there is an entry, and that there are not too many.
    fn remember(&mut self, now: Moment, config: &RecoveryConfig, peer: &P, stats: &mut RecoveryStats) {
        if self.entries.contains_key(peer) {
            return;
        }
        if self.entries.len() >= config.peers_max as usize {
            let least = self.entries.iter().min_by_key(|(_, e)| (e.breaker.worth(), e.breaker.until()));
            if let Some((key, at)) = least.map(|(key, entry)| (key.clone(), entry.breaker.until())) {
                self.entries.remove(&key);
                self.timers.clear(at, key);
                stats.peers_evicted += 1;
            }
        }
        let until = now + config.forget_after;
        let breaker = Breaker::Closed { failures: 0, until };
        self.timers.set(until, peer.clone());
        self.entries.insert(peer.clone(), Peer { breaker, bucket: Bucket::full(config.peer_budget, now) });
    }

    /// Whether no load could start at that time, as far as is known now.
    pub(super) fn shut_at(&self, at: Moment, peer: &P) -> bool {
        match self.entries.get(peer).map(|entry| entry.breaker) {
            Some(Breaker::Open { until, .. } | Breaker::Probing { until, .. }) => until > at,
            Some(Breaker::Closed { .. } | Breaker::HalfOpen { .. }) | None => false,
        }
    }

    /// A load wants to start.
    pub(super) fn admit(
        &mut self,
        now: Moment,
        config: &RecoveryConfig,
        peer: &P,
        stats: &mut RecoveryStats,
    ) -> Admission {
        let Some(breaker) = self.entries.get(peer).map(|entry| entry.breaker) else { return Admission::Go };
        let (wait, reason) = match breaker {
            Breaker::Closed { .. } => return Admission::Go,
            Breaker::Open { until, reason, .. } if until > now => {
                return Admission::Refuse { until, reason: Refusal::Open { after: reason } };
            }
            Breaker::Probing { until, .. } if until > now => {
                return Admission::Refuse { until, reason: Refusal::Probing };
            }
            // What was due is taken as if the time had been told already.
            Breaker::Open { wait, reason, .. }
            | Breaker::HalfOpen { wait, reason, .. }
            | Breaker::Probing { wait, reason, .. } => (wait, reason),
        };
        stats.probes += 1;
        self.set(peer, Breaker::Probing { until: now + config.probe_limit, wait, reason });
        Admission::Probe
    }

    /// Whether the peer's budget allows one more retry.
    pub(super) fn has_budget(
        &mut self,
        now: Moment,
        config: &RecoveryConfig,
        peer: &P,
        stats: &mut RecoveryStats,
    ) -> bool {
        self.remember(now, config, peer, stats);
        let (burst, refill) = (config.peer_budget, config.peer_budget_refill);
        self.entries.get_mut(peer).is_some_and(|entry| entry.bucket.has(now, burst, refill))
    }

    pub(super) fn take_budget(&mut self, peer: &P) {
        if let Some(entry) = self.entries.get_mut(peer) {
            entry.bucket.take();
        }
    }

    /// A load from it failed.
    pub(super) fn failed(
        &mut self,
        now: Moment,
        config: &RecoveryConfig,
        peer: &P,
        reason: LoadFailure,
        evidence: Evidence,
        stats: &mut RecoveryStats,
    ) {
        let gone = match evidence {
            Evidence::Gone => true,
            Evidence::Fault => false,
            Evidence::Answered => return self.answered(now, config, peer, stats),
            Evidence::Nothing => return,
        };
        self.remember(now, config, peer, stats);
        let Some(breaker) = self.entries.get(peer).map(|entry| entry.breaker) else { return };
        let wait = match breaker {
            Breaker::Closed { failures, .. } => {
                let failures = failures.saturating_add(1);
                if failures < config.open_after && !(gone && config.open_when_gone) {
                    return self.set(peer, Breaker::Closed { failures, until: now + config.forget_after });
                }
                config.open_first
            }
            // Loads that were under way when it opened fail one after the other: one death, not many.
            Breaker::Open { until, .. } if until > now => return,
            Breaker::Open { wait, .. } | Breaker::HalfOpen { wait, .. } | Breaker::Probing { wait, .. } => {
                wait.saturating_mul(2).min(config.open_max)
            }
        };
        stats.breakers_opened += 1;
        self.set(peer, Breaker::Open { until: now + wait, wait, reason });
    }

    /// It answered, so it is there.
    pub(super) fn answered(
        &mut self,
        now: Moment,
        config: &RecoveryConfig,
        peer: &P,
        stats: &mut RecoveryStats,
    ) {
        let Some(entry) = self.entries.get(peer) else { return };
        if !matches!(entry.breaker, Breaker::Closed { .. }) {
            stats.breakers_closed += 1;
        }
        self.set(peer, Breaker::Closed { failures: 0, until: now + config.forget_after });
    }

    /// The probe ended without saying anything about the peer.
    pub(super) fn probe_void(&mut self, now: Moment, config: &RecoveryConfig, peer: &P) {
        if let Some(Breaker::Probing { wait, reason, .. }) = self.entries.get(peer).map(|e| e.breaker) {
            self.set(peer, Breaker::HalfOpen { until: now + config.forget_after, wait, reason });
        }
    }

    /// Looks at every peer whose time has come.
    pub(super) fn time_passed(&mut self, now: Moment, config: &RecoveryConfig, stats: &mut RecoveryStats) {
        while let Some(peer) = self.timers.due(now) {
            let Some(breaker) = self.entries.get(&peer).map(|entry| entry.breaker) else { continue };
            match breaker {
                Breaker::Closed { .. } | Breaker::HalfOpen { .. } => {
                    self.entries.remove(&peer);
                    stats.peers_forgotten += 1;
                }
                Breaker::Open { wait, reason, .. } | Breaker::Probing { wait, reason, .. } => {
                    let until = now + config.forget_after;
                    self.set(&peer, Breaker::HalfOpen { until, wait, reason });
                }
            }
        }
    }
}
