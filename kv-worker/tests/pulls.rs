//! One worker's pulls: each state, each fact, and the one end that is reported.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::message::WorkerMessage;
use kv_proto::{ConsumerOrder, LoadFailure, LoadId, LoadStats, PullEnd};
use kv_worker::machine::io::{Decision, Fact};

/// Load 1 under lease 5 waits for producer 1.
fn waiting() -> Rig {
    let mut rig = Rig::new();
    assert_eq!(rig.order(0, &[load(1, 5, 1)]), ["shake hands with 1"]);
    rig
}

/// It is being read over d0.
fn reading() -> Rig {
    let mut rig = waiting();
    assert_eq!(rig.ready(0, 1, 0), ["d0: renew all +[5]", "d0: read 128 bytes for 1"]);
    rig
}

/// It was read at 10, and the producer was asked.
fn confirming() -> Rig {
    let mut rig = reading();
    assert_eq!(rig.read_ended(10, 1), ["d0: read done 5/1"]);
    rig
}

// H-18
#[test]
fn p1_a_load_is_good_when_its_read_was_confirmed_and_not_before() {
    let mut rig = confirming();
    assert_eq!(rig.loads(), []);
    assert_eq!(rig.hear(12, dialled(0), confirmed(5, 1)), NOTHING);
    let stats = LoadStats { bytes: 128, ranges: 1, read_us: 10_000, confirm_us: 2_000 };
    assert_eq!(rig.m.take_report().loads, [(LoadId(1), PullEnd::Loaded(stats))]);
    assert_eq!(rig.m.stats().pulls, 0);
}

// H-18
#[test]
fn p1_a_lapsed_lease_fails_the_load_and_needs_no_release() {
    let mut rig = confirming();
    assert_eq!(rig.hear(12, dialled(0), lapsed(5, 1)), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
}

// H-18
#[test]
fn p1_a_confirmation_before_the_read_has_ended_counts_for_nothing() {
    let mut rig = reading();
    assert_eq!(rig.hear(1, dialled(0), confirmed(5, 1)), NOTHING);
    assert_eq!(rig.loads(), []);
    assert_eq!(rig.read_ended(2, 1), ["d0: read done 5/1"], "it is asked all the same");
}

// H-18
#[test]
fn p1_a_confirmation_of_another_attempt_or_lease_counts_for_nothing() {
    let mut rig = confirming();
    for message in [confirmed(5, 0), confirmed(5, 2), confirmed(6, 1), lapsed(6, 1), lapsed(5, 2)] {
        assert_eq!(rig.hear(11, dialled(0), message), NOTHING);
    }
    assert_eq!(rig.loads(), []);
}

#[test]
fn p2_answers_that_come_again_do_nothing() {
    let mut rig = confirming();
    rig.hear(11, dialled(0), confirmed(5, 1));
    rig.hear(12, dialled(0), confirmed(5, 1));
    rig.hear(12, dialled(0), lapsed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-18, H-22, R013
#[test]
fn a_read_that_failed_fails_the_load_and_gives_the_lease_back() {
    let mut rig = reading();
    assert_eq!(rig.read_failed(5, 1, LoadFailure::ReadFailed), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "read_failed")]));
}

#[test]
fn p2_a_second_end_of_a_read_does_nothing() {
    let mut rig = confirming();
    assert_eq!(rig.read_failed(11, 1, LoadFailure::ReadFailed), NOTHING);
    rig.hear(12, dialled(0), confirmed(5, 1));
    assert_eq!(rig.read_ended(13, 1), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-19
#[test]
fn p3_an_order_that_comes_again_never_writes_again() {
    let mut rig = confirming();
    assert_eq!(rig.order(11, &[load(1, 5, 1)]), NOTHING);
    rig.hear(12, dialled(0), confirmed(5, 1));
    assert_eq!(rig.order(13, &[load(1, 5, 1)]), NOTHING, "the blocks have been given back");
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-3
#[test]
fn blocks_that_a_pool_does_not_have_fail_the_load() {
    for (remote, local) in [(vec![BLOCKS], vec![1]), (vec![1], vec![BLOCKS]), (vec![1, 2], vec![1])] {
        let mut rig = reading();
        let ConsumerOrder::Load { lease, peer, .. } = load(1, 6, 2) else { panic!() };
        let order = ConsumerOrder::Load {
            load: LoadId(2),
            lease,
            offer: OFFER,
            peer,
            groups: groups(&remote, &local),
        };
        assert_eq!(rig.order(1, &[order]), ["d0: release 6/2 load_failed"]);
        assert_eq!(rig.loads(), ends(&[(2, "bad_blocks")]));
    }
}

#[test]
fn r050_a_load_of_nothing_is_only_confirmed() {
    let mut rig = reading();
    let ConsumerOrder::Load { lease, peer, .. } = load(1, 6, 2) else { panic!() };
    let order = ConsumerOrder::Load { load: LoadId(2), lease, offer: OFFER, peer, groups: groups(&[], &[]) };
    assert_eq!(rig.order(1, &[order]), ["d0: read done 6/2"]);
}

// H-11
#[test]
fn each_block_is_read_to_its_partner() {
    let mut rig = reading();
    let ConsumerOrder::Load { lease, peer, .. } = load(1, 6, 2) else { panic!() };
    let order =
        ConsumerOrder::Load { load: LoadId(2), lease, offer: OFFER, peer, groups: groups(&[3, 0], &[1, 6]) };
    let mut out = Vec::new();
    let plan = kv_proto::Plan { producer: vec![], consumer: vec![order] };
    rig.m.take(at(1), Fact::PlanTaken(plan), &mut out);
    let [Decision::Read { parts, .. }] = &out[..] else { panic!("{out:?}") };
    let got: Vec<_> = parts[0].ranges.iter().map(|r| (r.remote_offset, r.local_offset, r.len)).collect();
    assert_eq!(got, [(192, 64, 64), (0, 384, 64)]);
}

// H-22, R021
#[test]
fn cancelled_while_waiting_it_ends_at_once() {
    let mut rig = waiting();
    assert_eq!(rig.order(1, &[cancel(1)]), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
    assert_eq!(rig.ready(2, 1, 0), ["d0: release 5/1 aborted"], "told when the producer can be told");
}

// H-19, H-22
#[test]
fn r019_cancelled_while_reading_it_ends_when_the_transport_is_quiet() {
    let mut rig = reading();
    assert_eq!(rig.order(1, &[cancel(1)]), ["cancel 1"]);
    assert_eq!(rig.loads(), [], "the transport may still write");
    assert_eq!(rig.read_failed(2, 1, LoadFailure::Cancelled), ["d0: release 5/1 aborted"]);
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
}

#[test]
fn a_read_that_ended_well_after_the_cancel_is_cancelled_all_the_same() {
    let mut rig = reading();
    rig.order(1, &[cancel(1)]);
    assert_eq!(rig.read_ended(2, 1), ["d0: release 5/1 aborted"]);
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
}

#[test]
fn cancelled_while_confirming_it_ends_once_whatever_the_answer() {
    let mut rig = confirming();
    assert_eq!(rig.order(11, &[cancel(1)]), ["d0: release 5/1 aborted"]);
    rig.hear(12, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
}

// R026
#[test]
fn a_cancel_of_what_is_not_there_does_nothing() {
    let mut rig = confirming();
    rig.hear(11, dialled(0), confirmed(5, 1));
    assert_eq!(rig.order(12, &[cancel(1), cancel(77)]), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-20, R012
#[test]
fn p4_a_load_waits_for_its_peer_no_longer_than_the_limit() {
    let mut rig = waiting();
    // Everything that the peer does stays within its own limits, and still it is not ready.
    rig.shaken(HANDSHAKE_MS + 250, 1);
    rig.connected(PEER_WAIT_MS - 1, 0);
    assert_eq!(rig.pass(PEER_WAIT_MS), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "connect_failed")]));
}

// H-19, H-20, R023, R072
#[test]
fn r025_a_read_that_takes_too_long_is_cancelled_and_its_end_awaited() {
    let mut rig = reading();
    let limit = READ_MS + STALL_MS;
    assert!(!rig.pass(limit - 1).contains(&"cancel 1".to_owned()));
    assert_eq!(rig.pass(limit), ["cancel 1"]);
    assert_eq!(rig.loads(), []);
    assert!(rig.pass(limit + READ_MS).contains(&"cancel 1".to_owned()), "asked again");
    assert_eq!(rig.read_ended(limit + READ_MS + 1, 1), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "read_timed_out")]));
}

#[test]
fn not_held_in_answer_to_the_first_renewal_dooms_the_read() {
    let mut rig = reading();
    assert_eq!(rig.hear(1, dialled(0), not_held(&[5])), ["cancel 1"]);
    assert_eq!(rig.read_failed(2, 1, LoadFailure::Cancelled), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]), "not cancelled: nobody asked for that");
}

// H-19, R002
#[test]
fn not_held_dooms_a_read_and_spares_others() {
    let mut rig = reading();
    rig.order(1, &[load(1, 6, 2)]);
    assert_eq!(rig.hear(2, dialled(0), not_held(&[5])), ["cancel 1"]);
    assert_eq!(rig.loads(), [], "the transport may still write");
    assert_eq!(rig.read_ended(3, 1), NOTHING, "over is over: no release, no question");
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
    assert_eq!(rig.read_ended(4, 2), ["d0: read done 6/2"]);
}

#[test]
fn not_held_that_crosses_a_read_done_does_not_spoil_it() {
    let mut rig = confirming();
    assert_eq!(rig.hear(11, dialled(0), not_held(&[5])), NOTHING);
    assert_eq!(rig.loads(), []);
    rig.hear(12, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

#[test]
fn not_held_of_another_producer_dooms_nothing() {
    let mut rig = reading();
    rig.order(1, &[track(2, 5)]);
    rig.ready(1, 2, 1);
    assert_eq!(rig.hear(2, dialled(1), not_held(&[5])), NOTHING);
    assert_eq!(rig.read_ended(3, 1), ["d0: read done 5/1"]);
}

// H-14, H-20, R017, R089
#[test]
fn an_unanswered_read_done_is_repeated_with_the_same_attempt_and_given_up_at_the_limit() {
    let mut rig = confirming();
    assert_eq!(rig.pass(10 + REPEAT_MS - 1), NOTHING);
    assert_eq!(rig.pass(10 + REPEAT_MS), ["d0: read done 5/1"]);
    let second = rig.pass(10 + 2 * REPEAT_MS);
    assert!(second.contains(&"d0: read done 5/1".to_owned()), "{second:?}");
    assert_eq!(rig.loads(), []);
    assert_eq!(rig.pass(10 + CONFIRM_MS), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "confirm_timed_out")]));
    assert_eq!(rig.hear(11 + CONFIRM_MS, dialled(0), confirmed(5, 1)), NOTHING, "too late");
    assert_eq!(rig.loads(), []);
}

// H-25
#[test]
fn p1_a_link_lost_while_confirming_costs_nothing_but_time() {
    let mut rig = reading();
    rig.read_ended(150, 1);
    assert_eq!(rig.lost(160, dialled(0)), ["shake hands with 1"]);
    assert_eq!(rig.ready(161, 1, 1), ["d1: renew all +[5]", "d1: read done 5/1"]);
    rig.hear(162, dialled(1), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-20
#[test]
fn a_link_lost_while_confirming_that_cannot_be_made_again_ends_at_the_limit() {
    let mut rig = reading();
    rig.read_ended(150, 1);
    rig.lost(160, dialled(0));
    rig.not_shaken(161, 1);
    assert_eq!(rig.loads(), [], "back-off may be over in time");
    assert_eq!(rig.pass(161 + RETRY_MIN_MS), ["shake hands with 1"]);
    rig.pass(150 + CONFIRM_MS);
    assert_eq!(rig.loads(), ends(&[(1, "confirm_timed_out")]));
}

#[test]
fn a_link_lost_while_reading_ends_with_the_transports_word() {
    let mut rig = reading();
    // The transport tells the end of the read before the loss.
    rig.read_failed(200, 1, LoadFailure::PeerLost);
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
    // The producer is told as soon as it can be reached again, or keeps the blocks until the lease's time is over.
    assert_eq!(rig.lost(200, dialled(0)), ["shake hands with 1"]);
    rig.shaken(210, 1);
    rig.connected(220, 1);
    let told = rig.hear(230, dialled(1), welcome(1));
    assert!(told.iter().any(|line| line.contains("release")), "{told:?}");
}

/// Loads 1 and 2 read under the same lease.
fn twins() -> Rig {
    let mut rig = reading();
    assert_eq!(rig.order(1, &[load(1, 5, 2)]), ["d0: read 128 bytes for 2"]);
    rig
}

// H-22, R084
#[test]
fn p2_a_load_that_ends_does_not_give_back_the_lease_that_another_reads_under() {
    let mut rig = twins();
    rig.order(2, &[cancel(1)]);
    assert_eq!(rig.read_failed(3, 1, LoadFailure::Cancelled), NOTHING);
    assert_eq!(rig.pass(RENEW_MS), ["d0: renew"], "and it is still renewed");
    assert_eq!(rig.read_ended(RENEW_MS + 1, 2), ["d0: read done 5/2"]);
    rig.hear(RENEW_MS + 2, dialled(0), confirmed(5, 2));
    assert_eq!(rig.loads(), ends(&[(1, "cancelled"), (2, "ok")]));
    assert_eq!(rig.pass(2 * RENEW_MS), NOTHING, "nobody renews it now");
}

// H-22
#[test]
fn p2_the_last_of_two_loads_gives_their_lease_back() {
    let mut rig = twins();
    assert_eq!(rig.read_failed(2, 2, LoadFailure::ReadFailed), NOTHING);
    assert_eq!(rig.read_failed(3, 1, LoadFailure::ReadFailed), ["d0: release 5/1 load_failed"]);
}

// H-18, R082
#[test]
fn p1_of_two_loads_under_one_lease_each_needs_an_answer_of_its_own() {
    let mut rig = twins();
    assert_eq!(rig.read_ended(2, 1), ["d0: read more 5/1"], "the other still reads");
    assert_eq!(rig.read_ended(2, 2), ["d0: read more 5/2"], "the other has not ended");
    assert_eq!(rig.pass(2 + REPEAT_MS), ["d0: read more 5/1", "d0: read more 5/2"], "in whatever order");
    rig.hear(103, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
    assert_eq!(rig.hear(103, dialled(0), lapsed(5, 2)), NOTHING);
    assert_eq!(rig.loads(), ends(&[(2, "lapsed")]));
}

// H-12, H-22
#[test]
fn the_last_answer_ends_a_lease_that_nobody_else_has_ended() {
    let mut rig = twins();
    rig.read_ended(2, 1);
    assert_eq!(rig.read_failed(3, 2, LoadFailure::ReadFailed), NOTHING, "the other waits for its answer");
    assert_eq!(rig.hear(4, dialled(0), confirmed(5, 1)), ["d0: read done 5/1"]);
    assert_eq!(rig.hear(5, dialled(0), confirmed(5, 1)), NOTHING);
    assert_eq!(rig.loads(), ends(&[(2, "read_failed"), (1, "ok")]));
}

// H-12
#[test]
fn two_loads_that_ask_at_once_are_both_good_and_the_last_answer_ends_the_lease() {
    let mut rig = twins();
    rig.read_ended(2, 2);
    rig.read_ended(2, 1);
    assert_eq!(rig.hear(3, dialled(0), confirmed(5, 1)), NOTHING);
    assert_eq!(rig.hear(4, dialled(0), confirmed(5, 2)), ["d0: read done 5/2"]);
    assert_eq!(rig.loads(), ends(&[(1, "ok"), (2, "ok")]));
}

// H-12
#[test]
fn a_request_that_comes_when_the_last_one_has_asked_reads_nothing() {
    let mut rig = reading();
    assert_eq!(rig.read_ended(2, 1), ["d0: read done 5/1"]);
    rig.order(3, &[track(1, 5)]);
    rig.hear(4, dialled(0), confirmed(5, 1));
    assert_eq!(rig.order(5, &[load(1, 5, 2)]), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "ok"), (2, "lapsed")]));
}

// H-13
#[test]
fn a_load_under_a_lease_that_is_known_to_be_over_is_not_read() {
    let mut rig = reading();
    rig.order(1, &[track(1, 6)]);
    rig.hear(2, dialled(0), not_held(&[6]));
    assert_eq!(rig.order(3, &[load(1, 6, 2)]), NOTHING);
    assert_eq!(rig.loads(), ends(&[(2, "lapsed")]));
}

// H-13
#[test]
fn a_long_read_has_its_lease_prolonged_before_it_begins() {
    let config = |prolong_bytes| kv_worker::WorkerLimits { prolong_bytes, ..limits() };
    for (bytes, told) in [(128, vec!["d0: renew all +[5]", "d0: renew", "d0: read 128 bytes for 1"])]
        .into_iter()
        .chain([(129, vec!["d0: renew all +[5]", "d0: read 128 bytes for 1"])])
    {
        let mut rig = Rig::with(config(bytes));
        rig.order(0, &[load(1, 5, 1)]);
        assert_eq!(rig.ready(0, 1, 0), told);
    }
}

#[test]
fn p6_when_all_has_ended_nothing_is_waited_for() {
    for (mut rig, end) in [(waiting(), "handshake_unreachable"), (confirming(), "confirm_timed_out")] {
        rig.rest();
        assert_eq!(rig.loads(), ends(&[(1, end)]));
        let stats = rig.m.stats();
        assert_eq!((stats.pulls, stats.producers, rig.m.next_deadline()), (0, 0, None));
    }
}

/// Load 1 of two blocks is read block by block; the first is under way.
fn portioned() -> Rig {
    let mut rig = Rig::with(kv_worker::WorkerLimits { portion_bytes: 1, ..limits() });
    rig.order(0, &[load(1, 5, 1)]);
    assert_eq!(rig.ready(0, 1, 0), ["d0: renew all +[5]", "d0: read 64 bytes for 1"]);
    rig
}

fn checked(blocks: u32, held: bool) -> WorkerMessage {
    WorkerMessage::Checked { lease: kv_proto::LeaseId(5), attempt: kv_proto::Attempt(1), blocks, held }
}

// H-27
#[test]
fn p8_a_load_is_checked_while_its_next_portion_is_read_and_what_was_verified_is_kept() {
    let mut rig = portioned();
    assert_eq!(rig.read_ended(10, 1), ["d0: check 5/1 of 1", "d0: read 64 bytes for 1"]);
    assert_eq!(rig.hear(20, dialled(0), checked(1, true)), NOTHING);
    assert_eq!(rig.read_failed(30, 1, LoadFailure::ReadFailed), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "read_failed after 1")]));
}

// H-27
#[test]
fn p1_what_was_read_and_not_verified_is_not_kept() {
    let mut rig = portioned();
    rig.read_ended(10, 1);
    rig.read_failed(30, 1, LoadFailure::PeerLost);
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]), "the answer never came");
    // An answer about more than is here, or for another try, verifies no more than is here.
    let mut rig = portioned();
    rig.hear(5, dialled(0), checked(2, true));
    rig.read_failed(6, 1, LoadFailure::ReadFailed);
    assert_eq!(rig.loads(), ends(&[(1, "read_failed")]));
}

// H-18, H-27
#[test]
fn p1_a_portion_whose_lease_had_not_held_ends_the_load_and_is_not_kept() {
    let mut rig = portioned();
    rig.read_ended(10, 1);
    assert_eq!(rig.hear(20, dialled(0), checked(1, false)), ["cancel 1"]);
    assert_eq!(rig.read_failed(30, 1, LoadFailure::Cancelled), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
}

// H-18, H-27
#[test]
fn p1_an_answer_that_nothing_was_held_ends_a_load_that_waits_to_be_tried_again() {
    let mut rig = patient();
    rig.read_ended(10, 1);
    rig.read_failed(20, 1, LoadFailure::ReadFailed);
    assert_eq!(rig.hear(21, dialled(0), checked(1, false)), NOTHING, "there is nothing to give back");
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
}

#[test]
fn a_load_that_was_tried_again_says_all_that_it_moved_and_nothing_twice() {
    let mut rig = patient();
    rig.read_ended(10, 1);
    rig.read_failed(20, 1, LoadFailure::ReadFailed);
    rig.pass(20 + RETRY_MIN_MS);
    rig.read_ended(200, 1);
    rig.hear(201, dialled(0), confirmed(5, 1));
    let loads = rig.m.take_report().loads;
    let [(_, kv_proto::PullEnd::Loaded(stats))] = &loads[..] else { panic!("{loads:?}") };
    assert_eq!((stats.bytes, stats.ranges), (128, 2));
}

// H-18, H-27
#[test]
fn p1_the_last_portion_needs_the_confirmation_and_earlier_ones_stay_verified_without() {
    let mut rig = portioned();
    rig.read_ended(10, 1);
    rig.hear(20, dialled(0), checked(1, true));
    assert_eq!(rig.read_ended(30, 1), ["d0: read done 5/1"]);
    rig.hear(40, dialled(0), lapsed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "lapsed after 1")]));
    let mut rig = portioned();
    rig.read_ended(10, 1);
    rig.read_ended(30, 1);
    rig.hear(40, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]), "the confirmation covers all, checked or not");
}

// H-20, H-27
#[test]
fn p4_the_limit_of_a_read_is_for_all_its_portions() {
    let mut rig = portioned();
    rig.read_ended(READ_MS, 1);
    assert_eq!(rig.pass(READ_MS + STALL_MS), ["d0: renew", "cancel 1"]);
    rig.read_failed(READ_MS + STALL_MS + 1, 1, LoadFailure::Cancelled);
    assert_eq!(rig.loads(), ends(&[(1, "read_timed_out")]));
}

/// As [`portioned`], and tried again once or twice.
fn patient() -> Rig {
    let mut rig = Rig::with(kv_worker::WorkerLimits { portion_bytes: 1, retries: 2, ..limits() });
    rig.order(0, &[load(1, 5, 1)]);
    rig.ready(0, 1, 0);
    rig
}

// H-27
#[test]
fn p8_a_read_that_may_pass_is_tried_again_from_where_it_was_while_its_lease_is_renewed() {
    let mut rig = patient();
    rig.read_ended(10, 1);
    assert_eq!(rig.read_failed(20, 1, LoadFailure::ReadFailed), NOTHING, "its lease is not given back");
    assert_eq!(rig.loads(), []);
    assert_eq!(rig.pass(20 + RETRY_MIN_MS - 1), NOTHING);
    assert_eq!(rig.pass(20 + RETRY_MIN_MS), ["d0: read 64 bytes for 1"], "only what was not here");
    assert_eq!(rig.pass(RENEW_MS), ["d0: renew"]);
    assert_eq!(rig.read_ended(RENEW_MS + 1, 1), ["d0: read done 5/1"]);
    rig.hear(RENEW_MS + 2, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-25
#[test]
fn a_read_that_lost_its_connection_goes_on_over_the_next() {
    let mut rig = patient();
    rig.read_failed(200, 1, LoadFailure::PeerLost);
    assert_eq!(rig.lost(200, dialled(0)), ["shake hands with 1"]);
    rig.shaken(210, 1);
    rig.connected(220, 1);
    assert_eq!(rig.hear(230, dialled(1), welcome(1)), ["d1: renew all +[5]"]);
    assert_eq!(rig.pass(200 + RETRY_MIN_MS), ["d1: read 64 bytes for 1"]);
}

// H-20
#[test]
fn p4_tries_are_counted_and_what_cannot_pass_is_not_tried_again() {
    let mut rig = patient();
    for (now, again) in [(10, true), (20 + 2 * RETRY_MIN_MS, true), (900, false)] {
        rig.read_failed(now, 1, LoadFailure::ReadTimedOut);
        assert_eq!(rig.loads().is_empty(), again, "{now}");
        rig.pass(now + 2 * RETRY_MIN_MS);
    }
    let mut rig = patient();
    rig.read_failed(10, 1, LoadFailure::Other);
    assert_eq!(rig.loads(), ends(&[(1, "other")]));
    // A peer that is away is waited for, for as long as a pull waits for a peer.
    let mut rig = Rig::with(kv_worker::WorkerLimits { retries: 2, ..limits() });
    rig.order(0, &[load(1, 5, 1)]);
    rig.not_shaken(1, 1);
    assert_eq!(rig.loads(), []);
    assert_eq!(rig.pass(1 + RETRY_MIN_MS), ["shake hands with 1"]);
    assert_eq!(rig.ready(150, 1, 0), ["d0: renew all +[5]", "d0: read 128 bytes for 1"]);
    // An aborted one is over at once.
    let mut rig = patient();
    rig.read_failed(10, 1, LoadFailure::ReadFailed);
    assert_eq!(rig.order(20, &[cancel(1)]), ["d0: release 5/1 aborted"]);
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
    rig.rest();
}
