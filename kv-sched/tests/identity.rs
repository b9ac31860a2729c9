//! Ids that come twice, and offers that come twice.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::{LeaseEnd, LoadFailure, ReleaseReason, RemotePrefill};
use kv_sched::{RequestEnd, Role, SchedError, SchedEvent};

/// An offer that came with a request which was refused.
fn refused(lease: u64) -> kv_proto::Plan {
    consumer(&[track(lease), release(lease, ReleaseReason::Refused)])
}

fn duplicate(name: &str) -> SchedError {
    SchedError::DuplicateRequest { request: req(name) }
}

#[test]
fn r079_an_id_in_use_is_refused_and_its_owner_is_untouched() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("x"), &prompt(8), Some(&ask())).unwrap();
    s.planned(at(0));
    let before = format!("{s:?}");
    assert_eq!(s.request_arrived(at(1), &req("x"), &prompt(4), Some(&ask())), Err(duplicate("x")));
    assert_eq!(format!("{s:?}"), before, "nothing changed");
}

// R027
#[test]
fn r079_an_id_in_use_on_one_side_is_refused_on_the_other() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "x", 5, 8);
    assert_eq!(s.request_arrived(at(1), &req("x"), &prompt(4), Some(&ask())), Err(duplicate("x")));
    assert!(!s.has_plan());
}

// H-2
#[test]
fn r079_an_id_may_come_again_while_its_old_lease_is_held_and_the_two_do_not_mix() {
    let mut s = scheduler(1);
    let first = hand_over(&mut s, 0, "x", 8);
    let second = hand_over(&mut s, 1, "x", 12);
    assert_ne!(first.lease, second.lease);
    assert_eq!(s.holds(), 2);
    s.take_report(at(2), lease_report(0, 2, LeaseEnd::Confirmed));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(2), "x", run(8, 3))]);
    s.take_report(at(3), lease_report(0, 1, LeaseEnd::Confirmed));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "x", run(8, 2))]);
    assert_forgotten(&s);
}

// H-2
#[test]
fn r079_an_id_may_come_again_while_its_aborted_load_is_not_quiet_and_the_two_do_not_mix() {
    let mut s = scheduler(1);
    start_load(&mut s, 0, "x", 5, 8);
    let _ = s.request_finished(at(1), &req("x"), &RequestEnd::Aborted);
    s.planned(at(1));
    start_load(&mut s, 2, "x", 6, 8);
    s.take_report(at(3), load_report(0, 1, failed(LoadFailure::Cancelled)));
    assert_eq!(s.take_events(), [blocks_released(load_hold(1), "x", run(40, 2))]);
    assert_eq!(s.remote_tokens(&req("x"), 0), 0, "the new one is still loading");
    s.take_report(at(4), load_report(0, 2, loaded(1)));
    assert!(matches!(s.take_events()[..], [SchedEvent::LoadEnded { .. }]));
    let _ = s.request_finished(at(5), &req("x"), &complete(8, &[run(40, 2)]));
    assert_forgotten(&s);
}

// H-22
#[test]
fn r001_a_refused_duplicate_gives_its_own_offer_back() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "x", 5, 8);
    let again = s.request_arrived(at(1), &req("x"), &prompt(8), Some(&params(offer(6, 8))));
    assert_eq!(again, Err(duplicate("x")));
    assert_eq!(s.planned(at(1)), refused(6));
}

// H-22
#[test]
fn p2_a_refused_duplicate_does_not_give_back_the_lease_of_the_queued_one() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "x", 5, 8);
    let again = s.request_arrived(at(1), &req("x"), &prompt(8), Some(&params(offer(5, 8))));
    assert_eq!(again, Err(duplicate("x")));
    assert_eq!(s.planned(at(1)), refused(5), "a user of the offer that came and went");
    assert_eq!(s.remote_tokens(&req("x"), 0), 8);
}

// H-22, R084
#[test]
fn p2_each_request_that_lives_by_an_offer_is_one_user_of_it() {
    // The workers count users, and give the offer back with the last: whoever tracks it reads or releases it, once.
    let mut s = scheduler(1);
    start_load(&mut s, 0, "a", 5, 8);
    for name in ["b", "c", "d"] {
        queue(&mut s, 0, name, 5, 8);
    }
    let _ = s.request_finished(at(1), &req("b"), &RequestEnd::Aborted);
    assert_eq!(s.planned(at(1)), consumer(&[release(5, ReleaseReason::Aborted)]));
    s.blocks_allocated(at(2), &req("c"), 8, 0, &[run(0, 2)]).unwrap();
    assert_eq!(s.planned(at(2)), consumer(&[release(5, ReleaseReason::NotNeeded)]));
    s.time_passed(at(QUEUE_MS));
    let late = s.planned(at(QUEUE_MS)).consumer;
    assert_eq!(late, [release(5, ReleaseReason::WaitedTooLong)]);
    assert_eq!(s.consumer_stats().released.get(&ReleaseReason::Aborted), Some(&1));
    for name in ["a", "b", "c", "d"] {
        let _ = s.request_finished(at(QUEUE_MS + 1), &req(name), &RequestEnd::Aborted);
    }
    s.planned(at(QUEUE_MS + 1));
    s.take_report(at(QUEUE_MS + 2), load_report(0, 1, failed(LoadFailure::Cancelled)));
    assert_forgotten(&s);
}

// H-22
#[test]
fn a_forged_copy_of_an_offer_with_another_address_is_given_back_there() {
    // Workers renew at the address that the copy names; without an order they would do so for ever.
    let mut s = scheduler(1);
    queue(&mut s, 0, "a", 5, 8);
    let forged = RemotePrefill { host: "elsewhere".to_owned(), ..offer(5, 8) };
    let role = s.request_arrived(at(0), &req("b"), &prompt(8), Some(&params(forged)));
    assert_eq!(role, Ok(Role::Consumer));
    s.planned(at(0));
    let _ = s.request_finished(at(1), &req("b"), &RequestEnd::Aborted);
    let there = kv_proto::PeerLocator { host: "elsewhere".to_owned(), ..peer() };
    let order = kv_proto::ConsumerOrder::Release {
        offer: BLANK,
        lease: their_lease(5),
        peer: there,
        reason: ReleaseReason::Aborted,
    };
    assert_eq!(s.planned(at(1)), consumer(&[order]));
}

#[test]
fn two_twins_may_both_load_and_each_has_a_load_of_its_own() {
    let mut s = scheduler(1);
    start_load(&mut s, 0, "a", 5, 8);
    queue(&mut s, 0, "b", 5, 8);
    s.blocks_allocated(at(1), &req("b"), 0, 8, &[run(50, 2)]).unwrap();
    assert_eq!(s.planned(at(1)), consumer(&[load(2, 5, 0, run(20, 2), run(50, 2))]));
    s.take_report(at(2), load_report(0, 2, failed(LoadFailure::Lapsed)));
    s.take_report(at(2), load_report(0, 1, loaded(1)));
    let ended: Vec<_> = s.take_events();
    assert!(matches!(&ended[0], SchedEvent::LoadEnded { request, .. } if *request == req("b")));
    assert!(matches!(&ended[1], SchedEvent::LoadEnded { request, .. } if *request == req("a")));
}
