//! The retry machine under any sequence of facts.
#![allow(clippy::unwrap_used)] // A failed check is a failed test.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_proto::{LoadFailure, Moment};
use kv_recovery::retry::BreakerState;
use kv_recovery::{Admission, Directive, LoadFacts, Policy, Recovery, RecoveryConfig};
use proptest::prelude::*;

const REASONS: [LoadFailure; 6] = [
    LoadFailure::PeerLost,
    LoadFailure::ReadFailed,
    LoadFailure::ReadTimedOut,
    LoadFailure::Lapsed,
    LoadFailure::BadBlocks,
    LoadFailure::Cancelled,
];

#[derive(Debug, Clone)]
enum Fact {
    Failed { key: u8, peer: u8, reason: usize, lease_alive: bool, alternatives: Vec<u8> },
    Succeeded { key: u8, peer: u8 },
    Gone { key: u8 },
    Admit { peer: u8 },
    Passed { ms: u64 },
}

fn fact() -> impl Strategy<Value = Fact> {
    let failed = (0u8..6, 0u8..5, 0..REASONS.len(), any::<bool>(), prop::collection::vec(0u8..5, 0..3));
    prop_oneof![
        5 => failed.prop_map(|(key, peer, reason, lease_alive, alternatives)| {
            Fact::Failed { key, peer, reason, lease_alive, alternatives }
        }),
        1 => (0u8..6, 0u8..5).prop_map(|(key, peer)| Fact::Succeeded { key, peer }),
        1 => (0u8..6).prop_map(|key| Fact::Gone { key }),
        2 => (0u8..5).prop_map(|peer| Fact::Admit { peer }),
        4 => prop_oneof![0u64..60, 0u64..3000, 0u64..100_000].prop_map(|ms| Fact::Passed { ms }),
    ]
}

fn config() -> RecoveryConfig {
    RecoveryConfig {
        policy: Policy::Retry,
        retries_per_request: 2,
        budget: 4,
        budget_refill: Duration::from_millis(700),
        peer_budget: 3,
        attempt_limit: Duration::from_secs(20),
        probe_limit: Duration::from_secs(5),
        open_max: Duration::from_secs(8),
        forget_after: Duration::from_secs(30),
        peers_max: 3,
        ..RecoveryConfig::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_happens(facts in prop::collection::vec(fact(), 1..80)) {
        let config = config();
        let mut m: Recovery<u8, u8> = Recovery::new(config.clone()).unwrap();
        let mut now = Moment::START;
        // Requests that are owed a decision, and attempts under way with how many there were.
        let mut owed = BTreeSet::new();
        let mut tries: BTreeMap<u8, u32> = BTreeMap::new();
        let (mut retries, mut probes): (u64, BTreeMap<u8, u32>) = (0, BTreeMap::new());
        for fact in facts {
            let mut out = Vec::new();
            let silent = m.stats().silent;
            match fact {
                Fact::Failed { key, peer, reason, lease_alive, alternatives } => {
                    let accepted = !owed.contains(&key);
                    let (tokens_valid, tokens_wanted) = (16, 64);
                    let reason = REASONS[reason];
                    m.load_failed(
                        now,
                        LoadFacts { key, peer, reason, tokens_valid, tokens_wanted, lease_alive, alternatives },
                        &mut out,
                    );
                    if accepted {
                        owed.insert(key);
                    }
                }
                Fact::Succeeded { key, peer } => {
                    m.load_succeeded(now, &key, &peer);
                    prop_assert_eq!(m.breaker(&peer), BreakerState::Closed, "an answer closes");
                    if !owed.contains(&key) {
                        tries.remove(&key);
                    }
                }
                Fact::Gone { key } => {
                    m.request_gone(now, &key);
                    owed.remove(&key);
                    tries.remove(&key);
                }
                Fact::Admit { peer } => {
                    if m.admit(now, &peer) == Admission::Probe {
                        *probes.entry(peer).or_default() += 1;
                        let again = m.admit(now, &peer);
                        prop_assert!(matches!(again, Admission::Refuse { .. }), "one probe at a time: {again:?}");
                    }
                }
                Fact::Passed { ms } => {
                    now = now + Duration::from_millis(ms);
                    m.time_passed(now, &mut out);
                    prop_assert!(m.next_deadline().is_none_or(|next| next > now), "a deadline in the past is left");
                }
            }
            for directive in out {
                match directive {
                    Directive::Retry { key, at, .. } => {
                        prop_assert!(owed.remove(&key), "{key} had its decision");
                        prop_assert!(at <= now);
                        retries += 1;
                        let tried = tries.entry(key).or_default();
                        *tried += 1;
                        // An attempt of which nothing was heard is forgotten, and its number with it.
                        prop_assert!(*tried <= config.retries_per_request || m.stats().silent > 0);
                    }
                    Directive::Recompute { key, .. } | Directive::Fail { key, .. } => {
                        prop_assert!(owed.remove(&key), "{key} had its decision");
                        tries.remove(&key);
                    }
                }
            }
            for key in 0..6u8 {
                prop_assert_eq!(m.waits_until(&key).is_some(), owed.contains(&key), "request {}", key);
            }
            if m.stats().silent > silent {
                tries.retain(|key, _| owed.contains(key));
            }
            prop_assert!(m.peer_count() <= config.peers_max as usize);
            prop_assert!(m.request_count() <= 6);
            let most = u64::from(config.budget)
                + (now.since_start().as_nanos() / config.budget_refill.as_nanos()) as u64;
            prop_assert!(retries <= most, "{} retries, {} allowed", retries, most);
        }
        // The faults stop: what is owed is decided, and nothing is left.
        let mut out = Vec::new();
        let mut steps = 0;
        while let Some(next) = m.next_deadline() {
            m.time_passed(next, &mut out);
            steps += 1;
            prop_assert!(steps < 1000);
        }
        let told: BTreeSet<u8> = out.iter().map(|directive| match directive {
            Directive::Retry { key, .. } | Directive::Recompute { key, .. } | Directive::Fail { key, .. } => *key,
        }).collect();
        prop_assert_eq!((told.len(), &told), (out.len(), &owed), "each exactly once");
        prop_assert_eq!((m.peer_count(), m.request_count()), (0, 0));
        let s = m.stats();
        prop_assert_eq!(
            s.failures.values().sum::<u64>(),
            s.recomputed + s.failed + s.retries_same + s.retries_elsewhere + s.gone,
            "the books balance"
        );
    }

    /// The same facts at the same times give the same machine.
    #[test]
    fn it_is_deterministic(keys in prop::collection::vec((0u8..6, 0u8..4), 1..20)) {
        let run = || {
            let mut m: Recovery<u8, u8> = Recovery::new(config()).unwrap();
            let mut out = Vec::new();
            for (n, (key, peer)) in keys.iter().enumerate() {
                let now = Moment::START + Duration::from_millis(40 * n as u64);
                m.time_passed(now, &mut out);
                let facts = LoadFacts {
                    key: *key,
                    peer: *peer,
                    reason: LoadFailure::ReadFailed,
                    tokens_valid: 0,
                    tokens_wanted: 9,
                    lease_alive: true,
                    alternatives: vec![],
                };
                m.load_failed(now, facts, &mut out);
            }
            format!("{m:?} {out:?}")
        };
        prop_assert_eq!(run(), run());
    }
}
