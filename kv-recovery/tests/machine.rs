//! The retry machine and its breakers, one rule at a time.
#![allow(clippy::unwrap_used)] // A failed check is a failed test.

use std::time::Duration;

use kv_proto::{LoadFailure, Moment};
use kv_recovery::retry::BreakerState;
use kv_recovery::{
    Admission, Advice, ConfigError, Directive, Evidence, Fallback, LoadFacts, Policy, Recovery,
    RecoveryConfig, Refusal, Source, advice,
};

type Machine = Recovery<u32, &'static str>;

fn at(ms: u64) -> Moment {
    Moment::START + Duration::from_millis(ms)
}

fn config() -> RecoveryConfig {
    RecoveryConfig { backoff_first: Duration::from_millis(100), ..RecoveryConfig::default() }
}

fn machine(config: RecoveryConfig) -> Machine {
    Recovery::new(config).unwrap()
}

fn facts(key: u32, peer: &'static str, reason: LoadFailure) -> LoadFacts<u32, &'static str> {
    LoadFacts {
        key,
        peer,
        reason,
        tokens_valid: 32,
        tokens_wanted: 96,
        lease_alive: true,
        alternatives: Vec::new(),
    }
}

fn failed(m: &mut Machine, ms: u64, facts: LoadFacts<u32, &'static str>) -> Vec<Directive<u32>> {
    let mut out = Vec::new();
    m.load_failed(at(ms), facts, &mut out);
    out
}

fn passed(m: &mut Machine, ms: u64) -> Vec<Directive<u32>> {
    let mut out = Vec::new();
    m.time_passed(at(ms), &mut out);
    out
}

fn recompute(key: u32) -> Directive<u32> {
    Directive::Recompute { key, keep_tokens: 32 }
}

#[test]
fn recompute_and_fail_decide_at_once_and_remember_nothing_of_the_request() {
    let mut m = machine(RecoveryConfig { policy: Policy::Recompute, ..config() });
    assert_eq!(failed(&mut m, 0, facts(1, "p", LoadFailure::ReadFailed)), [recompute(1)]);
    assert_eq!((m.stats().tokens_kept, m.stats().tokens_recomputed), (32, 64));
    let mut m = machine(RecoveryConfig { policy: Policy::Fail, ..config() });
    let reason = LoadFailure::ReadFailed;
    assert_eq!(failed(&mut m, 0, facts(1, "p", reason)), [Directive::Fail { key: 1, reason }]);
    assert_eq!(m.request_count(), 0);
}

#[test]
fn a_retry_waits_starts_and_ends_with_the_fallback_when_its_attempts_are_spent() {
    let mut m = machine(config());
    let mut now = 0;
    for attempt in 0..2u64 {
        assert_eq!(failed(&mut m, now, facts(1, "p", LoadFailure::ReadTimedOut)), []);
        let due = m.waits_until(&1).unwrap();
        let wait = due.since(at(now)).as_millis() as u64;
        assert!((50 << attempt..=100 << attempt).contains(&wait), "attempt {attempt} waits {wait} ms");
        assert_eq!(m.next_deadline(), Some(due));
        now = due.since_start().as_millis() as u64 + 1;
        assert_eq!(passed(&mut m, now), [Directive::Retry { key: 1, source: Source::Same, at: due }]);
        assert_eq!(m.waits_until(&1), None);
    }
    assert_eq!(failed(&mut m, now, facts(1, "p", LoadFailure::ReadTimedOut)), [recompute(1)]);
    assert_eq!((m.stats().attempts_spent, m.stats().retries_same, m.request_count()), (1, 2, 0));

    let mut m = machine(RecoveryConfig { fallback: Fallback::Fail, retries_per_request: 0, ..config() });
    let reason = LoadFailure::ReadFailed;
    assert_eq!(failed(&mut m, 0, facts(1, "p", reason)), [Directive::Fail { key: 1, reason }]);
}

#[test]
fn a_probe_that_ends_without_a_word_about_its_producer_makes_room_for_another() {
    let mut m = machine(config());
    failed(&mut m, 0, facts(1, "p", LoadFailure::ConnectFailed));
    passed(&mut m, 1000);
    assert_eq!(m.admit(at(1000), &"p"), Admission::Probe);
    m.load_abandoned(at(1001), &"p");
    assert_eq!(m.admit(at(1002), &"p"), Admission::Probe, "its request went away");
    failed(&mut m, 1003, facts(9, "p", LoadFailure::BadBlocks));
    assert!(matches!(m.admit(at(1003), &"p"), Admission::Refuse { .. }), "it was another load");
    failed(&mut m, 1003, facts(2, "p", LoadFailure::BadBlocks));
    m.load_abandoned(at(1003), &"p");
    assert_eq!(m.admit(at(1004), &"p"), Admission::Probe, "its failure was the offer's");
    // It is no amnesty: after a failure that said something the breaker stays as it is.
    failed(&mut m, 1005, facts(3, "p", LoadFailure::ConnectFailed));
    m.load_abandoned(at(1006), &"p");
    assert!(matches!(m.admit(at(1006), &"p"), Admission::Refuse { .. }));
}

#[test]
fn a_load_that_lacks_nothing_is_not_tried_again() {
    let mut m = machine(RecoveryConfig { fallback: Fallback::Fail, ..config() });
    let whole = facts(1, "p", LoadFailure::ConfirmTimedOut);
    let whole = LoadFacts { tokens_valid: whole.tokens_wanted, ..whole };
    let kept = Directive::Recompute { key: 1, keep_tokens: whole.tokens_wanted };
    assert_eq!(failed(&mut m, 0, whole), [kept]);
    assert_eq!((m.request_count(), m.stats().recomputed, m.stats().tokens_recomputed), (0, 1, 0));
    // It still says something about the peer.
    assert_eq!(m.stats().failures[&LoadFailure::ConfirmTimedOut], 1);
}

#[test]
fn a_lapsed_lease_is_never_read_again_but_another_producer_may_help() {
    let mut m = machine(config());
    assert_eq!(failed(&mut m, 0, facts(1, "p", LoadFailure::Lapsed)), [recompute(1)]);
    let lapsed = LoadFacts { alternatives: vec!["p", "q"], ..facts(2, "p", LoadFailure::Lapsed) };
    let retry = Directive::Retry { key: 2, source: Source::Alternative(1), at: at(0) };
    assert_eq!(failed(&mut m, 0, lapsed), [retry]);
    let dead = LoadFacts { lease_alive: false, ..facts(3, "p", LoadFailure::ReadFailed) };
    assert_eq!(failed(&mut m, 0, dead), [recompute(3)]);
    assert_eq!((m.stats().unhelpful, m.stats().retries_elsewhere), (2, 1));
    m.load_succeeded(at(5), &2, &"q");
    assert_eq!((m.stats().recovered, m.request_count()), (1, 0));
}

#[test]
fn the_table_of_reasons_is_as_intended() {
    let words = |reason| {
        let Advice { same, elsewhere, evidence } = advice(reason);
        (if same { "same" } else { "-" }, if elsewhere { "elsewhere" } else { "-" }, evidence)
    };
    use {Evidence as E, LoadFailure as L};
    for (reason, expected) in [
        (L::HandshakeUnreachable, ("same", "elsewhere", E::Gone)),
        (L::HandshakeRefused, ("-", "elsewhere", E::Answered)),
        (L::Incompatible, ("-", "elsewhere", E::Answered)),
        (L::HandshakeMalformed, ("-", "elsewhere", E::Fault)),
        (L::WrongPeer, ("-", "elsewhere", E::Gone)),
        (L::ConnectFailed, ("same", "elsewhere", E::Gone)),
        (L::PeerLost, ("same", "elsewhere", E::Gone)),
        (L::BadBlocks, ("-", "elsewhere", E::Nothing)),
        (L::ReadRefused, ("-", "elsewhere", E::Nothing)),
        (L::ReadTimedOut, ("same", "elsewhere", E::Fault)),
        (L::ReadFailed, ("same", "elsewhere", E::Fault)),
        (L::ConfirmTimedOut, ("same", "elsewhere", E::Fault)),
        (L::Corrupt, ("same", "elsewhere", E::Fault)),
        (L::Lapsed, ("-", "elsewhere", E::Answered)),
        (L::Cancelled, ("-", "-", E::Nothing)),
        (L::Closed, ("-", "-", E::Nothing)),
        (L::ReportMissing, ("-", "-", E::Nothing)),
        (L::Other, ("-", "-", E::Nothing)),
    ] {
        assert_eq!(words(reason), expected, "{}", reason.name());
    }
}

#[test]
fn after_a_peers_death_no_further_request_spends_a_time_limit_on_it() {
    let mut m = machine(config());
    assert_eq!(m.admit(at(0), &"p"), Admission::Go);
    // Its own retry would come before the breaker lets anybody through.
    assert_eq!(failed(&mut m, 0, facts(1, "p", LoadFailure::PeerLost)), [recompute(1)]);
    let refused =
        Admission::Refuse { until: at(1000), reason: Refusal::Open { after: LoadFailure::PeerLost } };
    for ms in [0, 1, 999] {
        assert_eq!(m.admit(at(ms), &"p"), refused);
        assert_eq!(m.admit(at(ms), &"q"), Admission::Go);
    }
    // Those that were under way fail one after the other; that is one death.
    assert_eq!(failed(&mut m, 500, facts(2, "p", LoadFailure::ReadTimedOut)), [recompute(2)]);
    assert_eq!(m.admit(at(999), &"p"), refused);
    assert_eq!((m.stats().loads_refused, m.stats().breakers_opened, m.stats().refused_by_breaker), (4, 1, 2));
}

// H-30
#[test]
fn one_probe_finds_out_whether_a_peer_is_back_and_each_failure_doubles_the_wait() {
    let mut m = machine(RecoveryConfig { open_max: Duration::from_secs(3), ..config() });
    failed(&mut m, 0, facts(1, "p", LoadFailure::ConnectFailed));
    let mut now = 0;
    for wait in [1000, 2000, 3000, 3000] {
        assert_eq!(m.breaker(&"p"), BreakerState::Open { until: at(now + wait) });
        now += wait;
        passed(&mut m, now);
        assert_eq!(m.breaker(&"p"), BreakerState::HalfOpen);
        assert_eq!(m.admit(at(now), &"p"), Admission::Probe);
        assert!(matches!(m.admit(at(now), &"p"), Admission::Refuse { reason: Refusal::Probing, .. }));
        failed(&mut m, now, facts(2, "p", LoadFailure::ReadTimedOut));
    }
    passed(&mut m, now + 3000);
    assert_eq!(m.admit(at(now + 3000), &"p"), Admission::Probe);
    m.load_succeeded(at(now + 3001), &3, &"p");
    assert_eq!(m.breaker(&"p"), BreakerState::Closed);
    assert_eq!(m.admit(at(now + 3001), &"p"), Admission::Go);
    assert_eq!((m.stats().probes, m.stats().breakers_opened, m.stats().breakers_closed), (5, 5, 1));
    // Closed, it starts from the beginning.
    failed(&mut m, now + 3001, facts(4, "p", LoadFailure::PeerLost));
    assert_eq!(m.breaker(&"p"), BreakerState::Open { until: at(now + 4001) });
}

#[test]
fn failures_in_a_row_open_and_an_answer_between_them_starts_the_count_anew() {
    let mut m = machine(RecoveryConfig { open_when_gone: false, policy: Policy::Recompute, ..config() });
    for (n, reason) in [LoadFailure::PeerLost, LoadFailure::ReadFailed].into_iter().enumerate() {
        failed(&mut m, n as u64, facts(1, "p", reason));
    }
    // A lapsed lease is an answer; a block that does not exist says nothing.
    failed(&mut m, 3, facts(1, "p", LoadFailure::Lapsed));
    for (n, open) in [(4, false), (5, false), (6, true)] {
        failed(&mut m, n, facts(1, "p", LoadFailure::BadBlocks));
        failed(&mut m, n, facts(1, "p", LoadFailure::ReadFailed));
        assert_eq!(m.breaker(&"p") != BreakerState::Closed, open, "at {n}");
    }
}

#[test]
fn a_probe_that_says_nothing_makes_room_for_another() {
    let mut m = machine(config());
    failed(&mut m, 0, facts(1, "p", LoadFailure::PeerLost));
    passed(&mut m, 1000);
    // A retry that is the probe: its request goes away.
    let from_q = LoadFacts { alternatives: vec!["p"], ..facts(2, "q", LoadFailure::Lapsed) };
    assert_eq!(failed(&mut m, 1000, from_q).len(), 1);
    assert!(matches!(m.breaker(&"p"), BreakerState::Probing { .. }));
    m.request_gone(at(1001), &2);
    assert_eq!(m.breaker(&"p"), BreakerState::HalfOpen);
    // A load that is the probe: nothing is heard of it.
    assert_eq!(m.admit(at(1002), &"p"), Admission::Probe);
    passed(&mut m, 1002 + 60_000);
    assert_eq!(m.breaker(&"p"), BreakerState::HalfOpen);
}

// H-30
#[test]
fn budgets_keep_a_storm_away() {
    let mut m = machine(RecoveryConfig { budget: 5, peer_budget: 3, open_after: 1000, ..config() });
    for key in 0..100 {
        let peer = if key % 2 == 0 { "p" } else { "q" };
        failed(&mut m, 0, facts(key, peer, LoadFailure::ReadFailed));
    }
    assert_eq!((m.request_count(), m.stats().refused_by_budget, m.stats().recomputed), (5, 95, 95));
    let mut dues: Vec<_> = (0..100).filter_map(|key| m.waits_until(&key)).collect();
    dues.sort_unstable();
    dues.dedup();
    assert_eq!(dues.len(), 5, "they do not come back together");
    // Each peer's own: 3 of q's, though the common one had more.
    let mut m = machine(RecoveryConfig { budget: 50, peer_budget: 3, open_after: 1000, ..config() });
    for key in 0..20 {
        failed(&mut m, 0, facts(key, "q", LoadFailure::ReadFailed));
    }
    assert_eq!(m.request_count(), 3);
    // One more after each interval.
    assert_eq!(failed(&mut m, 500, facts(50, "q", LoadFailure::ReadFailed)), []);
    assert_eq!(failed(&mut m, 500, facts(51, "q", LoadFailure::ReadFailed)).len(), 1);
}

#[test]
fn a_retry_whose_peer_died_meanwhile_goes_elsewhere_or_ends() {
    for (alternatives, expected) in [
        (vec!["q"], Directive::Retry { key: 1, source: Source::Alternative(0), at: at(200) }),
        (vec![], recompute(1)),
    ] {
        let mut m = machine(config());
        let first = LoadFacts { alternatives, ..facts(1, "p", LoadFailure::ReadFailed) };
        assert_eq!(failed(&mut m, 0, first), []);
        failed(&mut m, 1, facts(2, "p", LoadFailure::PeerLost));
        assert_eq!(passed(&mut m, 200), [expected]);
    }
}

#[test]
fn repeated_and_late_reports_are_counted_and_change_nothing() {
    let mut m = machine(config());
    assert_eq!(failed(&mut m, 0, facts(1, "p", LoadFailure::ReadFailed)), []);
    let due = m.waits_until(&1);
    assert_eq!(failed(&mut m, 1, facts(1, "p", LoadFailure::PeerLost)), []);
    m.load_succeeded(at(2), &1, &"p");
    assert_eq!((m.waits_until(&1), m.stats().stray), (due, 2));
    m.request_gone(at(3), &1);
    m.request_gone(at(3), &1);
    assert_eq!((m.request_count(), m.stats().gone), (0, 1));
    assert_eq!(passed(&mut m, 10_000), []);
}

#[test]
fn a_time_that_was_set_for_something_else_does_nothing() {
    let mut m = machine(config());
    failed(&mut m, 0, facts(1, "p", LoadFailure::ReadFailed));
    m.request_gone(at(90), &1);
    // The same name again: the wait begins anew.
    failed(&mut m, 90, facts(1, "p", LoadFailure::ReadFailed));
    assert_eq!(passed(&mut m, 110), []);
    assert!(m.waits_until(&1).is_some_and(|due| due >= at(140)));
    // A peer that is heard of is not forgotten when it would have been.
    m.request_gone(at(110), &1);
    m.load_succeeded(at(400_000), &2, &"p");
    passed(&mut m, 700_000);
    assert_eq!(m.peer_count(), 1);
    passed(&mut m, 1_000_000);
    assert_eq!((m.peer_count(), m.next_deadline()), (0, None));
}

#[test]
fn the_table_of_peers_is_bounded_and_forgets_the_idle() {
    let mut m = machine(RecoveryConfig { peers_max: 2, policy: Policy::Recompute, ..config() });
    failed(&mut m, 0, facts(1, "dead", LoadFailure::PeerLost));
    failed(&mut m, 1, facts(1, "slow", LoadFailure::ReadTimedOut));
    failed(&mut m, 2, facts(1, "other", LoadFailure::ReadTimedOut));
    assert_eq!((m.peer_count(), m.stats().peers_evicted), (2, 1));
    assert!(matches!(m.breaker(&"dead"), BreakerState::Open { .. }), "what protects others stays");
    passed(&mut m, 10_000_000);
    passed(&mut m, 20_000_000);
    assert_eq!((m.peer_count(), m.next_deadline()), (0, None));
}

#[test]
fn a_configuration_that_cannot_be_is_refused_with_field_and_values() {
    let text = |config: RecoveryConfig| config.check().unwrap_err().to_string();
    assert_eq!(RecoveryConfig::default().check(), Ok(()));
    let none = RecoveryConfig { open_after: 0, ..config() };
    assert_eq!(none.check(), Err(ConfigError::TooSmall { field: "open_after", value: 0, least: 1 }));
    assert_eq!(
        text(RecoveryConfig { probe_limit: Duration::ZERO, ..config() }),
        "probe_limit is 0ns, at least 1ms is needed"
    );
    assert_eq!(
        text(RecoveryConfig { backoff_max: Duration::from_millis(5), ..config() }),
        "backoff_first of 100ms is longer than backoff_max of 5ms"
    );
    assert_eq!(
        text(RecoveryConfig { peer_budget_refill: Duration::from_secs(100), ..config() }),
        "peer_budget times peer_budget_refill of 800s is longer than forget_after of 600s"
    );
}
