//! The producer's side of one worker: who may speak, and what is answered about leases.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::message::{HelloRefusal, LEASES_PER_MESSAGE_MAX, WorkerMessage};
use kv_proto::{CodecError, LeaseEnd, LeaseId, PROTOCOL_VERSION, ProducerOrder, Rank};
use kv_worker::machine::io::{Fact, SelfCheck};

fn connected() -> Rig {
    let mut rig = Rig::new();
    assert_eq!(rig.take(0, Fact::LinkAccepted { link: accepted(0) }), NOTHING);
    rig
}

fn greeted() -> Rig {
    let mut rig = Rig::new();
    rig.greet(0, 0, 7);
    rig
}

/// With lease 1 granted at 0.
fn lending() -> Rig {
    let mut rig = greeted();
    assert_eq!(rig.own(0, &[announce(1), grant(1)]), NOTHING);
    rig
}

fn ended(rig: &mut Rig) -> Vec<(LeaseId, LeaseEnd)> {
    rig.m.take_report().leases
}

const MALFORMED: CodecError = CodecError::TooLong { what: "worker message", bytes: 2, limit: 1 };

// H-24
#[test]
fn a_fitting_hello_is_welcome() {
    let rig = greeted();
    assert_eq!((rig.m.stats().readers.greeted, rig.m.next_deadline()), (1, None));
}

// H-24
#[test]
fn whoever_speaks_before_greeting_is_expelled() {
    let early = [welcome(1), read_done(1, 1), released(1, 1), renew(&[1])];
    for message in early {
        let mut rig = connected();
        assert_eq!(rig.hear(1, accepted(0), message), ["disconnect a0"]);
        assert_eq!((rig.m.stats().readers.expelled, rig.m.next_deadline()), (1, None));
        assert_eq!(rig.hear(2, accepted(0), hello(7, 100)), NOTHING, "it is gone");
    }
}

// H-24, R089
#[test]
fn whoever_sends_what_cannot_be_decoded_is_expelled() {
    for mut rig in [connected(), greeted()] {
        let fact = Fact::MessageArrived { link: accepted(0), message: Err(MALFORMED) };
        assert_eq!(rig.take(1, fact), ["disconnect a0"]);
        assert_eq!(rig.m.stats().readers.expelled, 1);
    }
}

// H-24
#[test]
fn a_producers_words_from_a_consumer_expel_it() {
    for message in [hello(7, 100), welcome(7), confirmed(1, 1), lapsed(1, 1)] {
        assert_eq!(greeted().hear(1, accepted(0), message), ["disconnect a0"]);
    }
}

// H-24
#[test]
fn whoever_never_says_who_it_is_is_expelled_at_the_limit() {
    let mut rig = connected();
    assert_eq!(rig.m.next_deadline(), Some(at(CONNECT_MS)));
    assert_eq!(rig.pass(CONNECT_MS - 1), NOTHING);
    assert_eq!(rig.pass(CONNECT_MS), ["disconnect a0"]);
    assert_eq!((rig.m.stats().readers.expelled, rig.m.next_deadline()), (1, None));
}

#[test]
fn a_connection_that_goes_before_it_greeted_leaves_no_timer() {
    let mut rig = connected();
    assert_eq!(rig.lost(1, accepted(0)), NOTHING);
    assert_eq!(rig.m.next_deadline(), None);
}

/// A greeting with one thing changed, and what is said to it.
fn refused(change: fn(&mut WorkerMessage)) -> Rig {
    let mut message = hello(7, 100);
    change(&mut message);
    let mut rig = connected();
    let said = rig.hear(1, accepted(0), message);
    assert_eq!(said.len(), 1);
    assert!(said[0].starts_with("a0: unwelcome"), "{said:?}");
    assert_eq!((rig.m.stats().readers.unwelcome, rig.m.stats().readers.greeted), (1, 0));
    assert_eq!(rig.pass(CONNECT_MS), ["disconnect a0"], "let go at the limit");
    rig
}

fn reason(change: fn(&mut WorkerMessage)) -> HelloRefusal {
    let mut message = hello(7, 100);
    change(&mut message);
    let mut rig = connected();
    let mut out = Vec::new();
    rig.m.take(at(1), Fact::MessageArrived { link: accepted(0), message: Ok(message) }, &mut out);
    match &out[..] {
        [
            kv_worker::machine::io::Decision::Send {
                message: WorkerMessage::Unwelcome { reason, incarnation },
                ..
            },
        ] => {
            assert_eq!(*incarnation, life(100), "it says who it is");
            *reason
        }
        other => panic!("{other:?}"),
    }
}

fn other_version(message: &mut WorkerMessage) {
    if let WorkerMessage::Hello { version, .. } = message {
        *version = PROTOCOL_VERSION + 1;
    }
}

fn other_life(message: &mut WorkerMessage) {
    if let WorkerMessage::Hello { to, .. } = message {
        *to = life(99);
    }
}

fn other_rank(message: &mut WorkerMessage) {
    if let WorkerMessage::Hello { to_rank, .. } = message {
        *to_rank = Rank(1);
    }
}

fn other_topology(message: &mut WorkerMessage) {
    if let WorkerMessage::Hello { topology, .. } = message {
        topology.stages = 2;
    }
}

fn not_a_reader(message: &mut WorkerMessage) {
    if let WorkerMessage::Hello { rank, .. } = message {
        *rank = Rank(1);
    }
}

// H-24
#[test]
fn another_version_is_unwelcome() {
    refused(other_version);
    assert_eq!(reason(other_version), HelloRefusal::Version);
}

// H-1, H-24
#[test]
fn p7_a_hello_to_another_life_is_unwelcome() {
    refused(other_life);
    assert_eq!(reason(other_life), HelloRefusal::Incarnation);
}

// H-24, R041
#[test]
fn a_hello_to_another_rank_is_unwelcome() {
    refused(other_rank);
    assert_eq!(reason(other_rank), HelloRefusal::Rank);
}

// H-24
#[test]
fn a_topology_that_does_not_fit_is_unwelcome() {
    refused(other_topology);
    assert_eq!(reason(other_topology), HelloRefusal::Topology);
}

// H-24
#[test]
fn a_rank_that_reads_nothing_here_is_unwelcome() {
    refused(not_a_reader);
    assert_eq!(reason(not_a_reader), HelloRefusal::Topology);
}

// H-12, H-18
#[test]
fn p1_a_read_under_a_held_lease_is_confirmed_and_ends_it() {
    let mut rig = lending();
    assert_eq!(rig.hear(10, accepted(0), read_done(1, 4)), ["a0: confirmed 1/4"]);
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::Confirmed)]);
    assert_eq!(ended(&mut rig), [], "reported once");
}

// H-18
#[test]
fn p1_after_the_lease_was_reported_over_no_read_is_confirmed() {
    let mut rig = lending();
    assert_eq!(rig.pass(1_000), NOTHING);
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::Expired)]);
    assert_eq!(rig.hear(1_000, accepted(0), read_done(1, 4)), ["a0: lapsed 1/4"]);
    assert_eq!(rig.hear(REMEMBER_MS * 2, accepted(0), read_done(1, 4)), ["a0: lapsed 1/4"]);
}

// H-18
#[test]
fn p1_a_lease_that_was_never_here_lapses() {
    assert_eq!(greeted().hear(1, accepted(0), read_done(9, 4)), ["a0: lapsed 9/4"]);
}

// H-2
#[test]
fn p1_a_lease_is_granted_once_also_when_it_has_been_forgotten() {
    let mut rig = lending();
    rig.pass(1_000);
    rig.pass(1_000 + REMEMBER_MS);
    assert_eq!(rig.m.stats().leases, 0);
    for orders in
        [vec![grant(1)], vec![announce(1), grant(1)], vec![ProducerOrder::Forget { lease: LeaseId(1) }]]
    {
        rig.own(9_000, &orders);
    }
    assert_eq!(rig.m.stats().leases, 0);
    assert_eq!(rig.hear(9_001, accepted(0), read_done(1, 4)), ["a0: lapsed 1/4"]);
}

// H-14, H-25
#[test]
fn p2_a_repeated_read_done_gets_the_same_answer_over_whatever_connection() {
    let mut rig = lending();
    rig.hear(10, accepted(0), read_done(1, 4));
    rig.lost(11, accepted(0));
    rig.greet(12, 1, 7);
    assert_eq!(rig.hear(13, accepted(1), read_done(1, 4)), ["a1: confirmed 1/4"]);
    assert_eq!(ended(&mut rig).len(), 1);
}

// H-14, R031
#[test]
fn p1_another_attempt_or_another_life_cannot_take_that_answer() {
    let mut rig = lending();
    rig.greet(0, 1, 8);
    rig.hear(10, accepted(0), read_done(1, 4));
    assert_eq!(rig.hear(11, accepted(0), read_done(1, 5)), ["a0: lapsed 1/5"]);
    assert_eq!(rig.hear(11, accepted(1), read_done(1, 4)), ["a1: lapsed 1/4"]);
}

// H-12
#[test]
fn a_release_ends_the_lease_and_is_not_answered() {
    let mut rig = lending();
    assert_eq!(rig.hear(10, accepted(0), released(1, 0)), NOTHING);
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::Released)]);
    assert_eq!(rig.hear(11, accepted(0), released(1, 0)), NOTHING);
    assert_eq!(ended(&mut rig), []);
}

// H-15
#[test]
fn p5_a_read_that_was_over_before_the_grant_is_confirmed_by_it() {
    let mut rig = greeted();
    rig.own(0, &[announce(1)]);
    assert_eq!(rig.hear(1, accepted(0), read_done(1, 4)), NOTHING);
    assert_eq!(rig.hear(2, accepted(0), read_done(1, 4)), NOTHING, "repeated");
    assert_eq!(rig.own(3, &[grant(1)]), ["a0: confirmed 1/4"], "answered once");
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::Confirmed)]);
}

// H-15
#[test]
fn p5_an_early_reader_is_answered_over_its_newest_connection() {
    let mut rig = greeted();
    rig.own(0, &[announce(1)]);
    rig.hear(1, accepted(0), read_done(1, 4));
    rig.greet(2, 1, 8);
    rig.greet(2, 2, 7);
    assert_eq!(rig.own(3, &[grant(1)]), ["a2: confirmed 1/4"]);
}

// H-15, H-25
#[test]
fn p5_an_early_reader_that_is_gone_asks_again_and_hears_the_same() {
    let mut rig = greeted();
    rig.own(0, &[announce(1)]);
    rig.hear(1, accepted(0), read_done(1, 4));
    rig.lost(2, accepted(0));
    assert_eq!(rig.own(3, &[grant(1)]), NOTHING);
    rig.greet(4, 1, 7);
    assert_eq!(rig.hear(5, accepted(1), read_done(1, 4)), ["a1: confirmed 1/4"]);
}

// H-15, R093
#[test]
fn r022_an_early_reader_of_a_request_that_was_aborted_hears_that_it_lapsed() {
    let mut rig = greeted();
    rig.own(0, &[announce(1)]);
    rig.hear(1, accepted(0), read_done(1, 4));
    assert_eq!(rig.own(2, &[ProducerOrder::Forget { lease: LeaseId(1) }]), ["a0: lapsed 1/4"]);
    assert_eq!(ended(&mut rig), [], "what was never granted has no end to report");
}

// H-13
#[test]
fn r002_a_renewal_keeps_the_lease_and_answers_only_what_is_not_held() {
    let mut rig = lending();
    rig.own(0, &[announce(2)]);
    assert_eq!(rig.hear(900, accepted(0), renew(&[1, 2])), NOTHING);
    assert_eq!(rig.hear(900, accepted(0), renew_next(1, &[3], &[])), ["a0: not held [3]"]);
    rig.pass(1_699);
    assert_eq!(ended(&mut rig), []);
    assert_eq!(rig.hear(1_699, accepted(0), renew_next(2, &[], &[])), NOTHING, "a sign of life, no list");
    rig.pass(2_498);
    assert_eq!(ended(&mut rig), []);
    rig.pass(2_499);
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::Expired)]);
    assert_eq!(rig.hear(2_500, accepted(0), renew_next(3, &[1, 2], &[])), ["a0: not held [1]"]);
}

// H-13
#[test]
fn r002_a_renewal_that_is_missing_is_noticed_and_one_that_repeats_does_nothing() {
    let mut rig = lending();
    rig.own(0, &[announce(2), grant(2), announce(3), grant(3)]);
    rig.hear(10, accepted(0), renew(&[1]));
    assert_eq!(
        rig.hear(20, accepted(0), renew_next(2, &[3], &[1])),
        ["a0: relist"],
        "the one before it is missing"
    );
    assert_eq!(rig.hear(30, accepted(0), renew_next(1, &[2], &[])), NOTHING, "it was only late");
    assert_eq!(rig.hear(40, accepted(0), renew_next(1, &[], &[2])), NOTHING, "an old one");
    let all = WorkerMessage::Renew { seq: 3, all: true, wanted: names(&[1, 2]), dropped: vec![] };
    assert_eq!(rig.hear(50, accepted(0), all), NOTHING);
    assert_eq!(rig.hear(60, accepted(0), renew(&[3])), NOTHING, "the list of before");
    for n in 1..5 {
        rig.hear(n * 700, accepted(0), renew_next(3 + n, &[], &[]));
        rig.pass(n * 700);
    }
    assert_eq!(ended(&mut rig), [(LeaseId(3), LeaseEnd::Expired)], "nobody wanted that one");
}

// H-13
#[test]
fn a_reader_hears_when_a_lease_that_it_wants_is_over() {
    let mut rig = lending();
    rig.hear(10, accepted(0), renew(&[1]));
    assert_eq!(rig.own(20, &[ProducerOrder::Revoke { lease: LeaseId(1) }]), ["a0: not held [1]"]);
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::Revoked)]);
    assert_eq!(rig.hear(30, accepted(0), read_done(1, 4)), ["a0: lapsed 1/4"]);
}

// H-25
#[test]
fn r003_a_lost_consumer_costs_its_lease_and_nothing_else() {
    let mut rig = lending();
    rig.own(0, &[announce(2), grant(2)]);
    rig.hear(5, accepted(0), renew(&[1]));
    rig.lost(10, accepted(0));
    assert_eq!(rig.pass(309), NOTHING);
    assert_eq!(ended(&mut rig), []);
    rig.pass(310);
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::ConsumerLost)]);
    rig.pass(1_000);
    assert_eq!(ended(&mut rig), [(LeaseId(2), LeaseEnd::Expired)], "nobody had named that one");
}

// H-25
#[test]
fn what_comes_late_over_a_connection_of_before_is_only_a_sign_of_life() {
    let mut rig = lending();
    rig.greet(5, 1, 7);
    rig.hear(10, accepted(1), renew(&[1]));
    assert_eq!(rig.hear(900, accepted(0), renew(&[])), NOTHING, "no list: the lease is wanted still");
    rig.pass(1_699);
    assert_eq!(ended(&mut rig), []);
    rig.pass(1_700);
    assert_eq!(ended(&mut rig).len(), 1);
}

// H-25
#[test]
fn a_consumer_that_comes_back_within_the_grace_keeps_its_leases() {
    let mut rig = lending();
    rig.hear(5, accepted(0), renew(&[1]));
    rig.greet(8, 1, 7);
    rig.lost(10, accepted(0));
    rig.pass(400);
    assert_eq!(ended(&mut rig), [], "it has another connection");
    rig.lost(500, accepted(1));
    rig.greet(700, 2, 7);
    rig.pass(810);
    assert_eq!(ended(&mut rig), [], "it is back");
}

// H-16
#[test]
fn r015_a_read_done_that_arrived_in_time_counts_although_it_is_looked_at_late() {
    let mut rig = lending();
    assert_eq!(rig.hear(5_000, accepted(0), read_done(1, 4)), ["a0: confirmed 1/4"]);
    rig.pass(5_000);
    assert_eq!(ended(&mut rig), [(LeaseId(1), LeaseEnd::Confirmed)]);
}

#[test]
fn a_message_with_more_leases_than_one_may_name_expels_its_sender() {
    let many = |count| renew(&(0..count as u64).collect::<Vec<_>>());
    assert_eq!(greeted().hear(1, accepted(0), many(LEASES_PER_MESSAGE_MAX)), ["a0: not held 8192 leases"]);
    assert_eq!(greeted().hear(1, accepted(0), many(LEASES_PER_MESSAGE_MAX + 1)), ["disconnect a0"]);
}

// R037
#[test]
fn p6_leases_are_forgotten_when_they_ended_long_ago() {
    let mut rig = lending();
    rig.own(0, &[announce(2), ProducerOrder::Forget { lease: LeaseId(2) }]);
    rig.rest();
    assert_eq!((rig.m.stats().leases, rig.m.next_deadline()), (0, None));
}

// H-27
#[test]
fn p1_a_check_is_answered_by_what_is_held_and_ends_nothing() {
    let check = |lease: u64| WorkerMessage::Check {
        lease: LeaseId(lease),
        attempt: kv_proto::Attempt(4),
        offer: OFFER,
        blocks: 3,
    };
    let mut rig = lending();
    rig.own(0, &[announce(2)]);
    assert_eq!(rig.hear(10, accepted(0), check(1)), ["a0: held 1/4 of 3"]);
    assert_eq!(rig.hear(10, accepted(0), check(2)), NOTHING, "not granted yet: it cannot be said");
    assert_eq!(rig.hear(10, accepted(0), check(9)), ["a0: not held 9/4 of 3"]);
    let mut forged = check(1);
    if let WorkerMessage::Check { offer, .. } = &mut forged {
        *offer = kv_proto::OfferDigest::from_bytes([8; 16]);
    }
    assert_eq!(rig.hear(10, accepted(0), forged), ["a0: not held 1/4 of 3"]);
    assert_eq!(ended(&mut rig), []);
    assert_eq!(rig.hear(20, accepted(0), read_done(1, 4)), ["a0: confirmed 1/4"]);
    assert_eq!(rig.hear(30, accepted(0), check(1)), ["a0: not held 1/4 of 3"], "it is over");
}

fn failed(lease: u64) -> WorkerMessage {
    let (reason, attempt) = (kv_proto::ReleaseReason::LoadFailed, kv_proto::Attempt(1));
    WorkerMessage::Release { lease: LeaseId(lease), attempt, offer: OFFER, reason }
}

fn self_checks(rig: &Rig) -> (u64, u64) {
    let stats = rig.m.stats().readers;
    (stats.self_checks, stats.self_checks_failed)
}

fn self_checked(found: SelfCheck) -> Fact {
    Fact::SelfChecked { found }
}

// H-19
#[test]
fn a_producer_looks_at_itself_when_a_load_from_it_failed_and_not_for_each_of_many() {
    let mut rig = lending();
    assert_eq!(rig.hear(10, accepted(0), released(1, 1)), NOTHING, "an aborted one says nothing about us");
    assert_eq!(rig.hear(20, accepted(0), failed(2)), ["check self"]);
    assert_eq!(rig.hear(21, accepted(0), failed(3)), NOTHING, "it is under way");
    rig.take(30, self_checked(SelfCheck::Readable));
    assert_eq!(rig.hear(30 + SELF_CHECK_MS - 1, accepted(0), failed(4)), NOTHING);
    assert_eq!(rig.hear(30 + SELF_CHECK_MS, accepted(0), failed(5)), ["check self"]);
    rig.take(40 + SELF_CHECK_MS, self_checked(SelfCheck::Unreadable));
    assert_eq!(self_checks(&rig), (2, 1));
    assert_eq!(rig.hear(40 + 2 * SELF_CHECK_MS, accepted(0), failed(6)), ["check self"]);
    rig.take(50 + 2 * SELF_CHECK_MS, self_checked(SelfCheck::Unknown));
    assert_eq!(self_checks(&rig), (2, 1), "one that could not be made says nothing");
    assert_eq!(rig.m.stats().readers.loads_failed, 5);
}

// H-20
#[test]
fn p4_a_self_check_without_an_end_has_failed() {
    let mut rig = lending();
    assert_eq!(rig.hear(20, accepted(0), failed(2)), ["check self"]);
    let limit = 20 + CONNECT_MS + READ_MS + STALL_MS;
    rig.pass(limit - 1);
    assert_eq!(self_checks(&rig), (0, 0));
    rig.pass(limit);
    assert_eq!(self_checks(&rig), (1, 1));
    rig.take(limit + 1, self_checked(SelfCheck::Readable));
    assert_eq!(self_checks(&rig), (1, 1), "it comes too late");
    assert_eq!(rig.hear(limit + 2, accepted(0), failed(3)), ["check self"]);
}

#[test]
fn a_worker_does_not_expel_itself_while_it_looks_at_itself() {
    let mut rig = lending();
    rig.hear(20, accepted(0), failed(2));
    assert_eq!(rig.take(21, Fact::LinkAccepted { link: accepted(1) }), NOTHING, "its own, or a stranger's");
    rig.pass(21 + CONNECT_MS);
    assert_eq!(rig.m.stats().readers.expelled, 0);
    // When the look is over, a stranger's is let go as ever.
    rig.take(22 + CONNECT_MS, self_checked(SelfCheck::Readable));
    let limit = 20 + CONNECT_MS + READ_MS + STALL_MS;
    assert_eq!(rig.pass(limit), ["disconnect a1"]);
    assert_eq!(rig.m.stats().readers.expelled, 1);
}
