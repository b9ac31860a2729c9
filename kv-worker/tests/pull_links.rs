//! One worker's pulls when their connection is lost and another takes its place: what is news of which.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::{LoadFailure, LoadId};
use kv_worker::Failure;
use kv_worker::machine::io::{Fact, PullId};

/// Load 1 under lease 5 is read over d0; with these limits.
fn reading_with(limits: kv_worker::WorkerLimits) -> Rig {
    let mut rig = Rig::with(limits);
    rig.order(0, &[load(1, 5, 1)]);
    assert!(rig.ready(0, 1, 0).iter().any(|line| line.starts_with("d0: read")));
    rig
}

fn reading() -> Rig {
    reading_with(limits())
}

/// Block by block; the first of two is under way.
fn portioned() -> Rig {
    reading_with(kv_worker::WorkerLimits { portion_bytes: 1, ..limits() })
}

/// The same, and tried again once or twice.
fn patient() -> Rig {
    reading_with(kv_worker::WorkerLimits { portion_bytes: 1, retries: 2, ..limits() })
}

/// The read of load 1 ends over a connection that need not be the one of now.
fn read_failed_over(rig: &mut Rig, now: u64, link: u64, reason: LoadFailure) -> Vec<String> {
    let pull = PullId::first(LoadId(1));
    rig.take(now, Fact::ReadEnded { pull, link: dialled(link), result: Err(Failure::new(reason, "late")) })
}

/// d0 was lost and d1 took its place while the read over d0 still wrote.
fn replaced(mut rig: Rig) -> Rig {
    assert_eq!(rig.lost(200, dialled(0)), ["shake hands with 1"]);
    assert_eq!(rig.ready(210, 1, 1), ["d1: renew all +[5]"]);
    rig
}

// H-25
#[test]
fn a_read_that_ends_with_a_replaced_connection_gives_the_lease_back_over_the_one_of_now() {
    let mut rig = replaced(reading());
    assert_eq!(read_failed_over(&mut rig, 220, 0, LoadFailure::PeerLost), ["d1: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
    rig.rest();
    assert_eq!(rig.m.stats().peers.releases_dropped, 0);
}

// H-25
#[test]
fn a_read_that_ends_with_the_connection_of_now_waits_for_the_next_also_when_its_result_counts_no_more() {
    let mut rig = reading();
    assert_eq!(rig.order(150, &[cancel(1)]), ["cancel 1"]);
    assert_eq!(rig.read_failed(200, 1, LoadFailure::PeerLost), NOTHING, "nobody would hear it over d0");
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
    rig.lost(201, dialled(0));
    let told = rig.ready(210, 1, 1);
    assert!(told.contains(&"d1: release 5/1 aborted".to_owned()), "{told:?}");
}

// H-25
#[test]
fn what_else_is_given_back_before_the_loss_is_told_waits_for_the_next_connection_too() {
    let mut rig = reading();
    assert_eq!(rig.order(1, &[load(1, 6, 2), track(1, 7)]), ["d0: read 128 bytes for 2"]);
    rig.read_ended(150, 2);
    rig.read_failed(200, 1, LoadFailure::PeerLost);
    // Neither of these was read when the connection went.
    let given_up = [cancel(2), release(1, 7, kv_proto::ReleaseReason::Aborted)];
    assert_eq!(rig.order(200, &given_up), NOTHING, "nobody would hear it over d0");
    rig.lost(201, dialled(0));
    let told = rig.ready(210, 1, 1);
    for release in ["d1: release 5/1 load_failed", "d1: release 6/2 aborted", "d1: release 7/0 aborted"] {
        assert!(told.contains(&release.to_owned()), "{release}: {told:?}");
    }
}

// H-25
#[test]
fn p3_the_end_of_a_read_over_an_older_connection_is_not_the_end_of_the_one_under_way() {
    for reason in [None, Some(LoadFailure::PeerLost), Some(LoadFailure::ReadFailed)] {
        let mut rig = patient();
        rig.read_failed(200, 1, LoadFailure::PeerLost);
        rig.lost(200, dialled(0));
        rig.ready(210, 1, 1);
        assert_eq!(rig.pass(200 + RETRY_MIN_MS), ["d1: read 64 bytes for 1"]);
        let result = reason.map_or(Ok(()), |reason| Err(Failure::new(reason, "late")));
        let pull = PullId::first(LoadId(1));
        assert_eq!(rig.take(310, Fact::ReadEnded { pull, link: dialled(0), result }), NOTHING, "{reason:?}");
        assert_eq!(rig.loads(), [], "the transport still writes");
        // What follows is told over d1: no news of d0 has made it a doubtful one.
        assert_eq!(rig.order(320, &[cancel(1)]), ["cancel 1"]);
        assert_eq!(rig.read_failed(330, 1, LoadFailure::Cancelled), ["d1: release 5/1 aborted"]);
    }
}

// H-25
#[test]
fn a_portion_that_ends_over_a_replaced_connection_counts_and_the_next_is_read_over_the_one_of_now() {
    let mut rig = replaced(portioned());
    assert_eq!(rig.read_ended(220, 1), ["d1: check 5/1 of 1", "d1: read 64 bytes for 1"]);
    assert_eq!(rig.read_failed(230, 1, LoadFailure::PeerLost), NOTHING, "now it is d1 that is gone");
    rig.lost(230, dialled(1));
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
}

// H-18, H-25
#[test]
fn p1_an_answer_over_a_replaced_connection_counts_for_nothing_and_the_question_is_asked_again() {
    let mut rig = reading();
    rig.read_ended(150, 1);
    rig.lost(200, dialled(0));
    assert_eq!(rig.ready(210, 1, 1), ["d1: renew all +[5]", "d1: read done 5/1"]);
    for answer in [confirmed(5, 1), lapsed(5, 1)] {
        assert_eq!(rig.hear(220, dialled(0), answer), NOTHING);
    }
    assert_eq!(rig.loads(), []);
    rig.hear(230, dialled(1), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-20
#[test]
fn p4_the_loss_of_a_connection_that_came_after_a_failed_read_is_a_try_of_its_own() {
    let one_more = kv_worker::WorkerLimits { retries: 1, ..limits() };
    let mut rig = replaced(reading_with(one_more));
    rig.read_failed(220, 1, LoadFailure::PeerLost);
    assert_eq!(rig.loads(), [], "tried again once");
    // d1 had nothing to do with it.
    rig.lost(230, dialled(1));
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
    // Nor has a connection that is made while the pull waits.
    let mut rig = reading_with(one_more);
    rig.read_failed(200, 1, LoadFailure::PeerLost);
    rig.lost(200, dialled(0));
    rig.ready(210, 1, 1);
    rig.lost(220, dialled(1));
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
}
