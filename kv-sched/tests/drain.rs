//! Draining, and preemption: what an engine does before it sleeps, resets its cache or ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use std::time::Duration;

use common::*;
use kv_proto::{LeaseEnd, LeaseId, LoadFailure, ProducerOrder, ReleaseReason};
use kv_sched::{LoadResult, Remaining, RequestEnd, SchedError, SchedEvent, Scheduler, Verdict};

const LIMIT: Duration = Duration::from_millis(500);

/// One of each: a request that computes, a lease, a request that waits, a load.
fn busy() -> Scheduler {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "lent", 8);
    s.request_arrived(at(0), &req("computing"), &prompt(8), Some(&ask())).unwrap();
    s.planned(at(0));
    start_load(&mut s, 0, "loading", 5, 8);
    queue(&mut s, 0, "waiting", 6, 8);
    assert_eq!(s.remaining(), Remaining { computing: 1, leases: 1, queued: 1, loads: 1 });
    s
}

fn drained(events: &[SchedEvent]) -> Vec<Remaining> {
    let left = |event: &SchedEvent| match event {
        SchedEvent::Drained { left } => Some(*left),
        _ => None,
    };
    events.iter().filter_map(left).collect()
}

// H-26
#[test]
fn a_draining_engine_refuses_what_is_new_and_gives_its_offer_back() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "lent", 8);
    s.drain(at(1), LIMIT);
    let refused = |name| Err(SchedError::Draining { request: req(name) });
    assert_eq!(s.request_arrived(at(2), &req("p"), &prompt(8), Some(&ask())), refused("p"));
    let offered = params(offer(5, 8));
    assert_eq!(s.request_arrived(at(2), &req("d"), &prompt(8), Some(&offered)), refused("d"));
    assert_eq!(s.planned(at(2)), consumer(&[track(5), release(5, ReleaseReason::Draining)]));
    assert!(s.request_arrived(at(2), &req("plain"), &prompt(8), None).is_ok(), "no business of ours");
    s.resume();
    assert!(s.request_arrived(at(3), &req("p"), &prompt(8), Some(&ask())).is_ok());
}

// H-26
#[test]
fn what_ends_by_itself_within_the_limit_is_not_disturbed() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "lent", 8);
    s.drain(at(1), LIMIT);
    assert!(s.planned(at(2)).is_empty());
    assert_eq!(s.next_deadline(), Some(at(501)));
    s.take_report(at(3), lease_report(0, 1, LeaseEnd::Confirmed));
    assert_eq!(drained(&s.take_events()), [Remaining::default()], "over at once, not at the limit");
    assert_forgotten(&s);
}

// H-26
#[test]
fn p4_what_is_left_at_the_limit_is_ended_and_what_does_not_end_is_named() {
    let mut s = busy();
    s.drain(at(1), LIMIT);
    assert!(s.planned(at(500)).is_empty());
    let plan = s.planned(at(501));
    assert_eq!(plan.producer, [ProducerOrder::Revoke { lease: LeaseId(1) }]);
    assert_eq!(plan.consumer, [release(6, ReleaseReason::Draining), cancel(1)]);
    assert_eq!(s.remote_tokens(&req("waiting"), 0), 0, "it is computed here");
    assert_eq!(drained(&s.take_events()), []);
    // A request that ends now hands nothing over any more.
    let finish = s.request_finished(at(502), &req("computing"), &complete(8, &[run(8, 2)]));
    assert_eq!((finish.verdict, finish.params.unwrap().lease), (Verdict::Free, None));
    s.take_report(at(503), load_report(0, 1, failed(LoadFailure::Cancelled)));
    let events = s.take_events();
    assert!(matches!(
        &events[..],
        [SchedEvent::LoadEnded { result: LoadResult::Failed { hold: None, .. }, .. }]
    ));
    // The lease's worker says nothing.
    s.time_passed(at(501 + GRACE_MS));
    let left = Remaining { leases: 1, ..Remaining::default() };
    assert_eq!(drained(&s.take_events()), [left]);
    s.take_report(at(502 + GRACE_MS), lease_report(0, 1, LeaseEnd::Revoked));
    assert_eq!(s.take_events().len(), 1, "its blocks come back all the same");
    assert_eq!(s.producer_stats().revoked, 1);
}

// H-22, H-26
#[test]
fn a_drain_is_over_when_its_last_orders_are_with_the_workers() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    s.drain(at(1), Duration::ZERO);
    assert_eq!((drained(&s.take_events()), s.has_drained()), (vec![], false));
    assert_eq!(s.planned(at(2)), consumer(&[release(5, ReleaseReason::Draining)]));
    assert_eq!((drained(&s.take_events()), s.has_drained()), (vec![Remaining::default()], true));
    s.drain(at(3), Duration::ZERO);
    assert_eq!(drained(&s.take_events()), [Remaining::default()], "asked again, told again");
    s.resume();
    assert!(!s.has_drained());
}

// H-19
#[test]
fn p3_an_end_that_was_not_taken_yet_is_told_by_the_requests_own_end() {
    for preempted in [false, true] {
        let mut s = scheduler(1);
        start_load(&mut s, 0, "r", 5, 8);
        s.time_passed(at(LOAD_MS));
        s.time_passed(at(LOAD_MS + GRACE_MS));
        let verdict = if preempted {
            s.request_preempted(at(LOAD_MS + GRACE_MS), &req("r"))
        } else {
            s.request_finished(at(LOAD_MS + GRACE_MS), &req("r"), &RequestEnd::Aborted).verdict
        };
        assert_eq!(verdict, Verdict::Hold(load_hold(1)), "the workers are silent: somebody may write still");
        let ends = s.take_events();
        assert!(!ends.iter().any(|event| matches!(event, SchedEvent::LoadEnded { .. })), "{ends:?}");
    }
}

// H-26
#[test]
fn a_second_drain_may_only_hurry() {
    let mut s = busy();
    s.drain(at(1), LIMIT);
    s.drain(at(2), 2 * LIMIT);
    assert_eq!(s.next_deadline(), Some(at(501)));
    s.drain(at(3), Duration::ZERO);
    assert_eq!(s.planned(at(3)).producer.len(), 1, "before a cache reset or a sleep");
    s.drain(at(4), Duration::ZERO);
    assert!(s.planned(at(4)).is_empty(), "once");
}

// H-19, H-21, R024
#[test]
fn p3_a_request_preempted_while_it_loads_leaves_its_blocks_to_the_transport() {
    let mut s = scheduler(2);
    start_load(&mut s, 0, "r", 5, 8);
    assert_eq!(s.request_preempted(at(1), &req("r")), Verdict::Hold(load_hold(1)));
    assert_eq!(s.planned(at(1)), consumer(&[cancel(1)]));
    assert_eq!(s.request_preempted(at(1), &req("r")), Verdict::Free, "it has nothing more to lose");
    assert_eq!(s.remote_tokens(&req("r"), 0), 0);
    s.take_report(at(2), load_report(0, 1, failed(LoadFailure::Cancelled)));
    assert_eq!(s.take_events(), []);
    s.take_report(at(3), load_report(1, 1, loaded(1)));
    assert_eq!(
        s.take_events(),
        [blocks_released(load_hold(1), "r", run(40, 2))],
        "no LoadEnded: nobody waits"
    );
    assert_eq!(s.request_finished(at(4), &req("r"), &RequestEnd::Aborted).verdict, Verdict::Free);
    assert_forgotten(&s);
}

// H-7
#[test]
fn a_producers_request_that_was_preempted_hands_over_the_blocks_that_it_ends_with() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
    assert_eq!(s.request_preempted(at(1), &req("r")), Verdict::Free);
    let finish = s.request_finished(at(2), &req("r"), &complete(8, &[run(30, 2)]));
    assert_eq!(finish.params.unwrap().blocks, [run(30, 2)]);
    assert_eq!(s.request_preempted(at(3), &req("plain")), Verdict::Free);
}
