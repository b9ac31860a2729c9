//! **P8: what a failure costs is bounded.** A request is loaded again at most as often as the configuration says; all
//! requests of a consumer together, and all at one producer, at most as often as their budget and the time since the
//! first failure allow; and nothing is asked of a producer that fails before its breaker's time is over. Kept
//! by a second account of failures and attempts, in the consumer's clock.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_proto::{Moment, PeerLocator};
use kv_recovery::{Evidence, RecoveryConfig};

pub(super) const NAME: &str = "sparing";

/// What is known of a producer.
#[derive(Debug, Clone, Default)]
struct Known {
    retries: u32,
    standing: Standing,
}

/// How a producer stands, as far as it is sure.
#[derive(Debug, Clone, Copy, Default)]
enum Standing {
    /// Nothing is against it.
    #[default]
    Good,
    /// So many failures in a row, the last one then.
    Failing { failures: u32, last: Moment },
    /// Nothing may be asked of it before `until`, and after it one failure more shuts it for twice as long.
    Shut { until: Moment, wait: Duration, last: Moment },
    /// Its last failure is so long ago that it may be forgotten, or not.
    Unsure,
}

/// What one life of a consumer has done.
#[derive(Debug, Clone)]
pub(in super::super) struct Account {
    limits: RecoveryConfig,
    first_failure: Option<Moment>,
    retries: u32,
    peers: BTreeMap<PeerLocator, Known>,
}

/// So many at once, and one more after each interval.
fn allowed(burst: u32, refill: Duration, span: Duration) -> u128 {
    if burst == 0 { 0 } else { u128::from(burst) + span.as_nanos() / refill.as_nanos().max(1) }
}

impl Account {
    pub(in super::super) fn new(limits: RecoveryConfig) -> Self {
        Self { limits, first_failure: None, retries: 0, peers: BTreeMap::new() }
    }

    /// A load from a producer failed.
    pub(in super::super) fn failed(&mut self, now: Moment, peer: &PeerLocator, evidence: Evidence) {
        self.first_failure.get_or_insert(now);
        let (gone, limits) = (evidence == Evidence::Gone, &self.limits);
        match evidence {
            Evidence::Gone | Evidence::Fault => {}
            Evidence::Answered => return self.answered(peer),
            Evidence::Nothing => return,
        }
        let standing = &mut self.peers.entry(peer.clone()).or_default().standing;
        let shut = |wait: Duration| Standing::Shut { until: now + wait, wait, last: now };
        *standing = match *standing {
            Standing::Failing { last, .. } | Standing::Shut { last, .. }
                if last + limits.forget_after <= now =>
            {
                Standing::Unsure
            }
            // Loads that were under way fail one after the other.
            Standing::Shut { until, wait, .. } if until > now => Standing::Shut { until, wait, last: now },
            Standing::Shut { wait, .. } => shut((wait * 2).min(limits.open_max)),
            Standing::Unsure => Standing::Unsure,
            Standing::Good | Standing::Failing { .. } => {
                let before = if let Standing::Failing { failures, .. } = *standing { failures } else { 0 };
                let failures = before + 1;
                let opens = failures >= limits.open_after || gone && limits.open_when_gone;
                if opens { shut(limits.open_first) } else { Standing::Failing { failures, last: now } }
            }
        };
    }

    /// A producer has answered.
    pub(in super::super) fn answered(&mut self, peer: &PeerLocator) {
        if let Some(known) = self.peers.get_mut(peer) {
            known.standing = Standing::Good;
        }
    }

    /// For how long nothing may be asked of a producer, if it is so.
    pub(in super::super) fn shut(&self, now: Moment, peer: &PeerLocator) -> Option<Duration> {
        match self.peers.get(peer)?.standing {
            Standing::Shut { until, .. } if until > now => Some(until.since(now)),
            _ => None,
        }
    }

    /// A request is loaded again, for the time of that number. Says what is too much.
    pub(in super::super) fn retried(
        &mut self,
        now: Moment,
        peer: &PeerLocator,
        times: u32,
    ) -> Option<String> {
        let limits = &self.limits;
        let span = now.since(self.first_failure.unwrap_or(now));
        let all = allowed(limits.budget, limits.budget_refill, span);
        let at_one = allowed(limits.peer_budget, limits.peer_budget_refill, span);
        self.retries += 1;
        let known = self.peers.entry(peer.clone()).or_default();
        known.retries += 1;
        if times > limits.retries_per_request {
            return Some(format!("{times} times, {} are allowed", limits.retries_per_request));
        }
        if u128::from(self.retries) > all {
            return Some(format!("{} further attempts within {span:?}, {all} are allowed", self.retries));
        }
        if u128::from(known.retries) > at_one {
            return Some(format!(
                "{} further attempts at {} within {span:?}, {at_one} are allowed",
                known.retries, peer.engine
            ));
        }
        None
    }
}
