//! What the engine does about failed loads: the circuit breaker of each producer, and the policy.
//!
//! Reading again from the same producer is the connector's business (`load_retries`); what is left here is whether a load
//! is begun at all, and how a request goes on when it has failed: from another producer, or without.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_connector::recovery::{Admission, Directive, LoadFacts, Policy, Recovery, RecoveryConfig, Source};
use kv_proto::{EngineId, LoadFailure, Moment, PeerLocator};

/// The machine of `kv-recovery`, with the engine's clock.
pub(super) struct Recovering {
    machine: Option<Recovery<u64>>,
    policy: Policy,
    started: Instant,
    /// When something was last said of a producer and a reason, and how much was not said since.
    said: BTreeMap<(EngineId, LoadFailure), (Instant, Unsaid)>,
    /// Requests whose load is the probe of a breaker, and of whose.
    probes: BTreeMap<u64, PeerLocator>,
}

/// Between two lines about one producer and one reason.
const QUIET: Duration = Duration::from_secs(1);
/// Pairs of producer and reason that are remembered; beyond them a line is written each time.
const SAID_MAX: usize = 256;

/// What was not said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Unsaid {
    pub(super) requests: u64,
    pub(super) tokens: u64,
}

/// Figures for whoever looks at the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BreakerStats {
    /// Times that a breaker opened.
    pub opened: u64,
    /// Loads that were not begun because of one.
    pub refused: u64,
}

/// What becomes of a request whose load failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It is loaded from that one of the other producers.
    Elsewhere(usize),
    /// It is computed from that many tokens on.
    ResumeFrom(u32),
    /// It ends with an error.
    End,
}

impl Recovering {
    pub(super) fn new(policy: Policy) -> Self {
        let config = RecoveryConfig {
            policy,
            // A load that ran into its time-out has cost enough; the next one is a probe.
            open_after: 1,
            // A probe that ends without a word about its producer must not keep others away for long.
            probe_limit: Duration::from_secs(5),
            ..RecoveryConfig::default()
        };
        // The configuration is this file's own and is in order; without a machine every load would be admitted.
        Self {
            machine: Recovery::new(config).ok(),
            policy,
            started: Instant::now(),
            said: BTreeMap::new(),
            probes: BTreeMap::new(),
        }
    }

    /// Whether to say that a load failed, for a producer that many may be failing with: at most once in a while per
    /// producer and reason. `Some` says how much was left out since the last line.
    pub(super) fn may_say(
        &mut self,
        peer: Option<&PeerLocator>,
        reason: LoadFailure,
        tokens: u32,
    ) -> Option<Unsaid> {
        let Some(peer) = peer else { return Some(Unsaid::default()) };
        let now = Instant::now();
        let key = (peer.engine.clone(), reason);
        if let Some((last, unsaid)) = self.said.get_mut(&key) {
            if now.duration_since(*last) < QUIET {
                unsaid.requests += 1;
                unsaid.tokens += u64::from(tokens);
                return None;
            }
            *last = now;
            return Some(std::mem::take(unsaid));
        }
        if self.said.len() >= SAID_MAX {
            self.said.retain(|_, (last, _)| now.duration_since(*last) < QUIET);
        }
        if self.said.len() < SAID_MAX {
            self.said.insert(key, (now, Unsaid::default()));
        }
        Some(Unsaid::default())
    }

    fn now(&self) -> Moment {
        Moment::from_start(self.started.elapsed())
    }

    /// Whether a load from this producer may begin.
    pub(super) fn admits(&mut self, request: u64, peer: &PeerLocator) -> bool {
        let now = self.now();
        match self.machine.as_mut().map(|machine| machine.admit(now, peer)) {
            Some(Admission::Refuse { .. }) => false,
            Some(Admission::Probe) => {
                self.probes.insert(request, peer.clone());
                true
            }
            Some(Admission::Go) | None => true,
        }
    }

    /// If the request's load was the probe of a breaker, that is over, whatever it has said.
    fn probe_over(&mut self, request: u64) {
        let now = self.now();
        if let (Some(machine), Some(peer)) = (&mut self.machine, self.probes.remove(&request)) {
            machine.load_abandoned(now, &peer);
        }
    }

    pub(super) fn succeeded(&mut self, request: u64, peer: &PeerLocator) {
        let now = self.now();
        if let Some(machine) = &mut self.machine {
            machine.load_succeeded(now, &request, peer);
        }
        self.probe_over(request);
    }

    /// What becomes of a request whose load failed with so many tokens in place, of those that it wanted.
    pub(super) fn failed(
        &mut self,
        request: u64,
        peer: PeerLocator,
        reason: LoadFailure,
        others: &[PeerLocator],
        (tokens_valid, tokens_wanted): (u32, u32),
    ) -> Next {
        let now = self.now();
        let mut directives = Vec::new();
        if let Some(machine) = &mut self.machine {
            // The connector has given the lease of this one back.
            let (lease_alive, alternatives) = (false, others.to_vec());
            let facts = LoadFacts {
                key: request,
                peer,
                reason,
                tokens_valid,
                tokens_wanted,
                lease_alive,
                alternatives,
            };
            machine.load_failed(now, facts, &mut directives);
        }
        self.probe_over(request);
        match directives.pop() {
            Some(Directive::Retry { source: Source::Alternative(n), .. }) => Next::Elsewhere(n),
            Some(Directive::Recompute { keep_tokens, .. }) => Next::ResumeFrom(keep_tokens),
            Some(Directive::Fail { .. }) => Next::End,
            _ if self.policy == Policy::Fail => Next::End,
            _ => Next::ResumeFrom(tokens_valid),
        }
    }

    /// A request went away, perhaps with a load under way.
    pub(super) fn gone(&mut self, request: u64) {
        let now = self.now();
        self.probe_over(request);
        if let Some(machine) = &mut self.machine {
            machine.request_gone(now, &request);
            // Nothing waits here for an attempt, so nothing is decided; peers that were quiet for long are forgotten.
            machine.time_passed(now, &mut Vec::new());
        }
    }

    pub(super) fn stats(&self) -> BreakerStats {
        self.machine.as_ref().map_or_else(BreakerStats::default, |machine| BreakerStats {
            opened: machine.stats().breakers_opened,
            refused: machine.stats().loads_refused,
        })
    }
}

#[cfg(test)]
mod tests {
    use kv_proto::Incarnation;

    use super::*;

    fn peer(life: u64) -> PeerLocator {
        let engine = EngineId::new("p").unwrap();
        PeerLocator { engine, incarnation: Incarnation::from_random(life), host: "h".to_owned(), port: 1 }
    }

    #[test]
    fn a_producer_that_cost_a_time_out_costs_the_next_request_none() {
        let mut recovering = Recovering::new(Policy::Recompute);
        assert!(recovering.admits(1, &peer(1)));
        let others = [peer(2)];
        let next = recovering.failed(1, peer(1), LoadFailure::ReadTimedOut, &others, (16, 64));
        assert_eq!(next, Next::ResumeFrom(16), "without the policy for it nobody else is asked");
        assert!(!recovering.admits(1, &peer(1)), "until a probe finds it well");
        assert!(recovering.admits(1, &peer(2)), "another life is another peer");
        assert_eq!(recovering.stats(), BreakerStats { opened: 1, refused: 1 });
    }

    #[test]
    fn many_failures_of_one_kind_are_one_line_that_counts_the_others() {
        let mut recovering = Recovering::new(Policy::Recompute);
        let (one, reason) = (peer(1), LoadFailure::PeerLost);
        assert_eq!(recovering.may_say(Some(&one), reason, 10), Some(Unsaid::default()));
        for _ in 0..3 {
            assert_eq!(recovering.may_say(Some(&one), reason, 10), None);
        }
        assert!(recovering.may_say(Some(&one), LoadFailure::Lapsed, 10).is_some(), "another reason");
        if let Some((last, _)) = recovering.said.get_mut(&(one.engine.clone(), reason)) {
            *last -= QUIET;
        }
        assert_eq!(recovering.may_say(Some(&one), reason, 10), Some(Unsaid { requests: 3, tokens: 30 }));
    }

    #[test]
    fn the_policy_decides_what_follows() {
        let mut recovering = Recovering::new(Policy::Fail);
        let others = [peer(2), peer(3)];
        assert_eq!(recovering.failed(1, peer(1), LoadFailure::Lapsed, &others, (0, 64)), Next::End);
        assert!(recovering.admits(1, &peer(1)), "a lapsed lease says nothing about its producer");
        let mut recovering = Recovering::new(Policy::Retry);
        recovering.failed(9, peer(2), LoadFailure::PeerLost, &[], (0, 64));
        let next = recovering.failed(1, peer(1), LoadFailure::Lapsed, &others, (16, 64));
        assert_eq!(next, Next::Elsewhere(1), "loads from the first of them fail");
        let next = recovering.failed(1, peer(3), LoadFailure::PeerLost, &others[..1], (32, 64));
        assert_eq!(next, Next::ResumeFrom(32), "none is left that is not known to fail");
    }
}
