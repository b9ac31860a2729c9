//! The consumer's side of connections: one handshake per producer, back-off, renewals, releases, letting go.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::message::{HelloRefusal, LEASES_PER_MESSAGE_MAX, WorkerMessage};
use kv_proto::{CodecError, Rank, ReleaseReason, Topology};
use kv_worker::machine::io::{Fact, SourceKey};

/// Producer 1 is ready over d0, wanted for lease 5, renewed at 0.
fn tracking() -> Rig {
    let mut rig = Rig::new();
    assert_eq!(rig.order(0, &[track(1, 5)]), ["shake hands with 1"]);
    assert_eq!(rig.ready(0, 1, 0), ["d0: renew all +[5]"]);
    rig
}

// H-6, H-24
#[test]
fn r043_one_handshake_serves_however_many_requests_wait() {
    let mut rig = Rig::new();
    assert_eq!(
        rig.order(0, &[track(1, 5), track(1, 6), load(1, 7, 1), load(1, 8, 2)]),
        ["shake hands with 1"]
    );
    assert_eq!(rig.shaken(1, 1), ["connect d0"]);
    assert_eq!(rig.connected(2, 0), ["d0: hello to 1"]);
    let begun = ["d0: renew all +[5, 6, 7, 8]", "d0: read 128 bytes for 1", "d0: read 128 bytes for 2"];
    assert_eq!(rig.hear(3, dialled(0), welcome(1)), begun);
    assert_eq!(rig.m.stats().peers.handshakes, 1);
}

// H-1, R034
#[test]
fn p7_another_life_is_another_peer() {
    let mut rig = tracking();
    assert_eq!(rig.order(1, &[track(2, 5)]), ["shake hands with 2"]);
    assert_eq!(rig.ready(2, 2, 1), ["d1: renew all +[5]"]);
    rig.order(3, &[load(1, 5, 1)]);
    rig.order(3, &[load(2, 5, 2)]);
    rig.read_ended(4, 1);
    rig.read_ended(4, 2);
    assert_eq!(rig.hear(5, dialled(1), confirmed(5, 1)), NOTHING, "an answer of the other life");
    assert_eq!(rig.loads(), []);
    rig.hear(6, dialled(1), confirmed(5, 2));
    rig.hear(6, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(2, "ok"), (1, "ok")]));
}

// H-24
#[test]
fn p7_a_producer_that_is_not_the_one_wanted_is_not_read_from() {
    for (reason, told) in [
        (HelloRefusal::Incarnation, "wrong_peer"),
        (HelloRefusal::Rank, "wrong_peer"),
        (HelloRefusal::Version, "incompatible"),
        (HelloRefusal::Topology, "incompatible"),
    ] {
        let mut rig = Rig::new();
        rig.order(0, &[load(1, 5, 1)]);
        rig.shaken(0, 1);
        rig.connected(0, 0);
        let unwelcome = WorkerMessage::Unwelcome { reason, incarnation: life(9) };
        assert_eq!(rig.hear(1, dialled(0), unwelcome), ["disconnect d0"]);
        assert_eq!(rig.loads(), ends(&[(1, told)]));
    }
}

// H-1, H-24
#[test]
fn p7_a_welcome_of_another_life_or_rank_is_none() {
    let other_rank = WorkerMessage::Welcome { incarnation: life(1), rank: Rank(1) };
    for message in [welcome(2), other_rank] {
        let mut rig = Rig::new();
        rig.order(0, &[load(1, 5, 1)]);
        rig.shaken(0, 1);
        rig.connected(0, 0);
        assert_eq!(rig.hear(1, dialled(0), message), ["disconnect d0"]);
        assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
    }
}

// H-24
#[test]
fn a_producer_that_breaks_the_protocol_is_let_go() {
    let many = names(&(0..=LEASES_PER_MESSAGE_MAX as u64).collect::<Vec<_>>());
    for message in [hello(1, 100), read_done(5, 1), welcome(1), WorkerMessage::NotHeld { leases: many }] {
        assert_eq!(tracking().hear(1, dialled(0), message), ["disconnect d0"]);
    }
    let malformed = Err(CodecError::TooLong { what: "worker message", bytes: 2, limit: 1 });
    let fact = Fact::MessageArrived { link: dialled(0), message: malformed };
    assert_eq!(tracking().take(1, fact), ["disconnect d0"]);
}

// H-25
#[test]
fn an_answer_that_overtakes_the_welcome_is_dropped_and_asked_for_again() {
    let mut rig = tracking();
    rig.order(0, &[load(1, 5, 1)]);
    rig.read_ended(150, 1);
    assert_eq!(rig.lost(200, dialled(0)), ["shake hands with 1"]);
    rig.shaken(200, 1);
    rig.connected(200, 1);
    assert_eq!(rig.hear(201, dialled(1), confirmed(5, 1)), NOTHING, "not greeted: it could be anyone");
    assert_eq!(rig.loads(), []);
    assert_eq!(rig.hear(202, dialled(1), welcome(1)), ["d1: renew all +[5]", "d1: read done 5/1"]);
    rig.hear(203, dialled(1), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

#[test]
fn r045_cards_that_do_not_fit_fail_the_load_as_incompatible() {
    let mut no_transport = card(1);
    no_transport.workers[0].transports[0].name = "other".to_owned();
    let region = |change: fn(&mut kv_proto::RegionLayout)| {
        let mut card = card(1);
        change(&mut card.workers[0].layout.regions[0]);
        card
    };
    let other_layer = region(|r| r.layer.push('0'));
    let other_type = region(|r| (r.dtype, r.head_size) = (kv_proto::Dtype::F16, 8));
    for card in [no_transport, other_layer, other_type] {
        let mut rig = Rig::new();
        rig.order(0, &[load(1, 5, 1)]);
        assert_eq!(
            rig.take(1, Fact::HandshakeEnded { key: SourceKey::first(peer(1)), result: Ok(card) }),
            NOTHING
        );
        assert_eq!(rig.loads(), ends(&[(1, "incompatible")]));
    }
}

#[test]
fn r044_cards_that_make_no_sense_fail_the_load_as_malformed() {
    let mut no_address = card(1);
    no_address.workers[0].transports[0].address = vec![];
    let mut no_worker = card(1);
    no_worker.workers.clear();
    let mut cut = card(1);
    cut.topology = Topology::of(2);
    for card in [no_address, no_worker, cut] {
        let mut rig = Rig::new();
        rig.order(0, &[load(1, 5, 1)]);
        assert_eq!(
            rig.take(1, Fact::HandshakeEnded { key: SourceKey::first(peer(1)), result: Ok(card) }),
            NOTHING
        );
        assert_eq!(rig.loads(), ends(&[(1, "handshake_malformed")]));
    }
}

// H-6
#[test]
fn r016_a_failed_handshake_fails_every_load_that_waits_for_it_and_no_other() {
    let mut rig = tracking();
    rig.order(1, &[load(2, 1, 1), load(2, 2, 2), load(3, 3, 3)]);
    rig.not_shaken(2, 2);
    assert_eq!(rig.loads(), ends(&[(1, "handshake_unreachable"), (2, "handshake_unreachable")]));
    assert_eq!(
        rig.order(3, &[load(1, 5, 4)]),
        ["d0: read 128 bytes for 4"],
        "another producer is unaffected"
    );
    assert_eq!(rig.m.stats().pulls, 2);
}

// H-6, R033
#[test]
fn r016_a_load_during_back_off_fails_at_once_and_a_later_one_tries_again() {
    let mut rig = Rig::new();
    rig.order(0, &[load(1, 5, 1)]);
    rig.not_shaken(10, 1);
    rig.loads();
    assert_eq!(rig.order(10 + RETRY_MIN_MS - 1, &[load(1, 6, 2)]), NOTHING);
    assert_eq!(rig.loads(), ends(&[(2, "handshake_unreachable")]));
    assert_eq!(rig.order(10 + RETRY_MIN_MS, &[load(1, 7, 3)]), ["shake hands with 1"]);
    assert_eq!(rig.loads(), []);
}

// H-6
#[test]
fn r033_back_off_doubles_up_to_its_maximum_as_long_as_somebody_wants_the_peer() {
    let mut rig = Rig::new();
    rig.order(0, &[track(1, 5)]);
    let mut now = 0;
    for wait in [RETRY_MIN_MS, 2 * RETRY_MIN_MS, RETRY_MAX_MS, RETRY_MAX_MS] {
        rig.not_shaken(now, 1);
        assert_eq!(rig.m.next_deadline(), Some(at(now + wait)));
        assert_eq!(rig.pass(now + wait - 1), NOTHING);
        now += wait;
        assert_eq!(rig.pass(now), ["shake hands with 1"]);
    }
}

#[test]
fn r037_a_failed_peer_that_nobody_wants_is_forgotten() {
    let mut rig = Rig::new();
    rig.order(0, &[load(1, 5, 1)]);
    rig.not_shaken(0, 1);
    assert_eq!(rig.m.stats().producers, 1);
    assert_eq!(rig.pass(RETRY_MIN_MS), NOTHING);
    assert_eq!((rig.m.stats().producers, rig.m.next_deadline()), (0, None));
}

// H-20
#[test]
fn p4_a_dialler_that_never_returns_is_given_up() {
    let mut rig = Rig::new();
    rig.order(0, &[load(1, 5, 1)]);
    assert_eq!(rig.pass(HANDSHAKE_MS + CONNECT_MS), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "handshake_unreachable")]));
    assert_eq!(rig.shaken(HANDSHAKE_MS + CONNECT_MS + 1, 1), NOTHING, "too late");
}

// H-20, H-24
#[test]
fn p4_a_connection_that_is_never_made_or_never_greeted_is_given_up() {
    for connect in [false, true] {
        let mut rig = Rig::new();
        rig.order(0, &[load(1, 5, 1)]);
        rig.shaken(0, 1);
        if connect {
            rig.connected(100, 0);
        }
        assert_eq!(rig.pass(CONNECT_MS - 1), NOTHING);
        assert_eq!(rig.pass(CONNECT_MS), ["disconnect d0"]);
        assert_eq!(rig.loads(), ends(&[(1, "connect_failed")]));
        assert_eq!(rig.hear(CONNECT_MS + 1, dialled(0), welcome(1)), NOTHING);
        assert_eq!(rig.connected(CONNECT_MS + 1, 0), ["disconnect d0"], "not one of ours any more");
    }
}

#[test]
fn a_connection_that_fails_fails_the_load() {
    let mut rig = Rig::new();
    rig.order(0, &[load(1, 5, 1)]);
    rig.shaken(0, 1);
    assert_eq!(rig.lost(1, dialled(0)), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "connect_failed")]));
}

// H-13
#[test]
fn r011_renewals_are_batched_per_peer_and_need_no_plan() {
    let mut rig = tracking();
    rig.order(10, &[track(1, 6), track(1, 7)]);
    for beat in 1..=3 {
        assert_eq!(rig.pass(beat * RENEW_MS - 1), NOTHING);
        let told = if beat == 1 { "d0: renew +[6, 7]" } else { "d0: renew" };
        assert_eq!(rig.pass(beat * RENEW_MS), [told], "a lease is named once");
    }
    assert_eq!(rig.m.stats().peers.renewals, 4);
}

// H-13
#[test]
fn r030_renewals_are_split_at_the_most_leases_of_a_message() {
    let mut rig = tracking();
    let many: Vec<_> = (0..LEASES_PER_MESSAGE_MAX as u64 + 2).map(|lease| track(1, lease)).collect();
    rig.order(1, &many);
    assert_eq!(rig.pass(RENEW_MS), ["d0: renew +8192 leases", "d0: renew +[8193]"]);
}

#[test]
fn a_lease_is_renewed_while_its_load_reads_and_no_longer() {
    let mut rig = tracking();
    rig.order(1, &[load(1, 5, 1)]);
    assert_eq!(rig.pass(RENEW_MS), ["d0: renew"]);
    rig.read_failed(RENEW_MS + 1, 1, kv_proto::LoadFailure::ReadFailed);
    assert_eq!(rig.pass(2 * RENEW_MS), ["d0: renew -[5]"], "should the release be lost");
    assert_eq!(rig.pass(3 * RENEW_MS), NOTHING);
}

// H-13
#[test]
fn a_producer_that_misses_a_renewal_is_told_all_again_but_not_as_often_as_it_asks() {
    let mut rig = tracking();
    rig.order(1, &[track(1, 6)]);
    rig.pass(RENEW_MS);
    assert_eq!(rig.hear(RENEW_MS + 1, dialled(0), WorkerMessage::Relist {}), NOTHING);
    assert_eq!(rig.hear(RENEW_MS + 2, dialled(0), WorkerMessage::Relist {}), NOTHING);
    assert_eq!(rig.pass(RENEW_MS + 11), ["d0: renew all +[5, 6]"]);
    assert_eq!(rig.pass(RENEW_MS + 12), NOTHING);
    assert_eq!(rig.pass(2 * RENEW_MS + 11), ["d0: renew"]);
}

// H-22
#[test]
fn r084_an_offer_that_several_requests_live_by_is_given_back_by_the_last_of_them() {
    let mut rig = tracking();
    rig.order(1, &[track(1, 5), track(1, 5)]);
    assert_eq!(rig.order(2, &[release(1, 5, ReleaseReason::Aborted)]), NOTHING);
    assert_eq!(
        rig.order(3, &[track(1, 5), release(1, 5, ReleaseReason::Refused)]),
        NOTHING,
        "refused at once"
    );
    assert_eq!(rig.order(4, &[load(1, 5, 1)]), ["d0: read 128 bytes for 1"]);
    assert_eq!(rig.read_ended(5, 1), ["d0: read more 5/1"], "another waits");
    rig.hear(6, dialled(0), confirmed(5, 1));
    assert_eq!(rig.order(7, &[release(1, 5, ReleaseReason::Aborted)]), ["d0: release 5/0 aborted"]);
}

#[test]
fn a_lease_that_is_not_held_is_renewed_no_more() {
    let mut rig = tracking();
    rig.order(1, &[track(1, 6)]);
    assert_eq!(rig.hear(2, dialled(0), not_held(&[5])), NOTHING);
    assert_eq!(rig.pass(RENEW_MS), ["d0: renew +[6]"]);
}

// H-22
#[test]
fn a_release_is_told_at_once_to_a_peer_that_is_ready() {
    let mut rig = tracking();
    let told = rig.order(1, &[release(1, 5, ReleaseReason::NotNeeded)]);
    assert_eq!(told, ["d0: release 5/0 not_needed"]);
    assert_eq!(rig.pass(RENEW_MS), ["d0: renew -[5]"]);
    assert_eq!(rig.pass(2 * RENEW_MS), NOTHING, "and the lease is renewed no more");
}

// H-22
#[test]
fn p2_a_release_that_waits_is_taken_back_by_a_request_that_brings_the_offer_again() {
    let mut rig = Rig::new();
    rig.order(0, &[track(1, 5)]);
    rig.order(1, &[release(1, 5, ReleaseReason::Aborted)]);
    rig.order(2, &[track(1, 5)]);
    assert_eq!(rig.ready(3, 1, 0), ["d0: renew all +[5]"]);
}

// H-13
#[test]
fn a_producer_that_asks_for_the_list_of_one_that_wants_nothing_is_told_so() {
    let mut rig = tracking();
    rig.order(1, &[release(1, 5, ReleaseReason::NotNeeded)]);
    rig.hear(2, dialled(0), WorkerMessage::Relist {});
    assert_eq!(rig.pass(12), ["d0: renew all"]);
}

// H-22
#[test]
fn r050_a_release_waits_for_a_peer_that_is_not_ready_yet() {
    let mut rig = Rig::new();
    assert_eq!(rig.order(0, &[release(1, 5, ReleaseReason::Refused)]), ["shake hands with 1"]);
    assert_eq!(rig.ready(1, 1, 0), ["d0: release 5/0 refused"]);
    assert_eq!(rig.m.stats().peers.releases_dropped, 0);
}

#[test]
fn a_release_to_a_peer_that_cannot_be_reached_is_counted_and_dropped() {
    let mut rig = Rig::new();
    rig.order(0, &[release(1, 5, ReleaseReason::Refused)]);
    rig.not_shaken(1, 1);
    assert_eq!(rig.order(2, &[release(1, 6, ReleaseReason::Refused)]), NOTHING);
    assert_eq!(rig.m.stats().peers.releases_dropped, 2);
    rig.rest();
    assert_eq!(rig.m.stats().producers, 0);
}

// H-25
#[test]
fn r032_a_lost_connection_is_made_again_while_it_is_wanted() {
    let mut rig = tracking();
    assert_eq!(rig.lost(500, dialled(0)), ["shake hands with 1"]);
    assert_eq!(rig.ready(501, 1, 1), ["d1: renew all +[5]"]);
    assert_eq!(rig.m.stats().peers.lost, 1);
}

// H-25, R032
#[test]
fn a_lost_connection_that_nobody_wants_is_forgotten() {
    let mut rig = tracking();
    rig.order(1, &[release(1, 5, ReleaseReason::NotNeeded)]);
    assert_eq!(rig.lost(500, dialled(0)), NOTHING);
    assert_eq!((rig.m.stats().producers, rig.m.next_deadline()), (0, None));
}

#[test]
fn a_connection_that_is_lost_as_soon_as_it_stands_is_no_reason_for_a_storm() {
    let mut rig = tracking();
    assert_eq!(rig.lost(RETRY_MIN_MS - 1, dialled(0)), NOTHING);
    assert_eq!(rig.pass(2 * RETRY_MIN_MS - 1), ["shake hands with 1"]);
}

#[test]
fn r037_an_idle_peer_is_let_go() {
    let mut rig = tracking();
    rig.order(1, &[release(1, 5, ReleaseReason::NotNeeded)]);
    rig.pass(RENEW_MS);
    assert_eq!(rig.pass(IDLE_MS), NOTHING, "it was wanted a moment later");
    assert_eq!(rig.pass(IDLE_MS + 1), ["disconnect d0"]);
    assert_eq!((rig.m.stats().producers, rig.m.next_deadline()), (0, None));
}

#[test]
fn a_peer_with_business_now_and_then_is_not_idle() {
    let mut rig = tracking();
    rig.order(1, &[release(1, 5, ReleaseReason::NotNeeded)]);
    rig.order(IDLE_MS - 1, &[load(1, 6, 1)]);
    rig.read_ended(IDLE_MS - 1, 1);
    rig.hear(IDLE_MS - 1, dialled(0), confirmed(6, 1));
    assert_eq!(rig.pass(IDLE_MS), ["d0: renew -[5]"]);
    assert_eq!(rig.pass(2 * IDLE_MS - 1), ["disconnect d0"]);
}

#[test]
fn r023_a_peer_that_is_read_from_is_never_idle() {
    let mut rig = tracking();
    rig.order(1, &[load(1, 5, 1)]);
    rig.hear(2, dialled(0), not_held(&[5]));
    for now in (0..=2 * IDLE_MS).step_by(1_000) {
        assert!(!rig.pass(now).contains(&"disconnect d0".to_owned()));
    }
    assert_eq!(rig.m.stats().producers, 1);
}
