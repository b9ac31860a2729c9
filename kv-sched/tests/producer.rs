//! The producer's policy: what is handed over, under which lease, and when its blocks are free again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::params::PrefixMarks;
use kv_proto::{
    ConsumerOrder, LeaseEnd, LeaseId, ProducerOrder, Rank, RemotePrefill, TransferParams, token_digest,
};
use kv_sched::{Finish, ProducerStats, RequestEnd, Role, SchedEvent, Verdict};

const L1: LeaseId = LeaseId(1);

fn announce(lease: u64) -> ProducerOrder {
    ProducerOrder::Announce { lease: LeaseId(lease) }
}

fn forget(lease: u64) -> ProducerOrder {
    ProducerOrder::Forget { lease: LeaseId(lease) }
}

fn grant(lease: u64) -> ProducerOrder {
    ProducerOrder::Grant { lease: LeaseId(lease), terms: config(1).terms(), offer: BLANK }
}

/// What this engine offers of a request named `r`.
fn offered(tokens: u32, blocks: kv_proto::BlockList) -> RemotePrefill {
    RemotePrefill {
        engine: config(1).engine,
        request: req("r"),
        host: "10.0.0.1".to_owned(),
        port: 5600,
        ranks: 1,
        tokens,
        block_tokens: BLOCK_TOKENS,
        blocks: vec![blocks],
        firsts: vec![0],
        incarnation: ours(),
        lease: Some(L1),
        token_digest: token_digest(&prompt(tokens)),
        marks: PrefixMarks::of(&prompt(tokens), BLOCK_TOKENS),
        alternatives: vec![],
        other: serde_json::Map::new(),
    }
}

/// What it offers when there is nothing to take.
fn nothing() -> RemotePrefill {
    RemotePrefill { lease: None, token_digest: String::new(), ..offered(0, list(&[])) }
}

// H-8
#[test]
fn an_arrival_is_announced_to_the_workers_with_the_next_plan() {
    let mut s = scheduler(1);
    assert_eq!(s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())), Ok(Role::Producer));
    assert!(s.has_plan());
    assert_eq!(s.planned(at(0)), producer(&[announce(1)]));
    assert!(s.planned(at(1)).is_empty(), "a plan is given out once");
}

#[test]
fn a_plain_request_leaves_no_trace() {
    let mut s = scheduler(1);
    assert_eq!(s.request_arrived(at(0), &req("r"), &prompt(8), None), Ok(Role::Plain));
    s.blocks_allocated(at(0), &req("r"), 0, 0, &[run(0, 2)]).unwrap();
    let finish = s.request_finished(at(0), &req("r"), &complete(8, &[run(0, 2)]));
    assert_eq!(finish, Finish { verdict: Verdict::Free, params: None });
    assert_forgotten(&s);
}

// H-7, H-8, H-9, R007
#[test]
fn a_prompt_of_whole_blocks_hands_over_exactly_its_blocks() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
    let finish = s.request_finished(at(1), &req("r"), &complete(8, &[run(8, 2)]));
    let expected = Finish { verdict: Verdict::Hold(lease_hold(1)), params: Some(offered(8, run(8, 2))) };
    assert_eq!(finish, expected);
    assert_eq!(s.planned(at(1)), producer(&[announce(1), grant(1)]));
}

#[test]
fn h18_the_grant_and_the_load_name_the_same_offer() {
    let mut p = scheduler(1);
    p.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
    let finish = p.request_finished(at(1), &req("r"), &complete(8, &[run(8, 2)]));
    let params = finish.params.unwrap();
    let Some(ProducerOrder::Grant { offer: granted, .. }) = p.plan_step(at(1)).producer.pop() else {
        panic!("no grant")
    };
    assert_eq!(granted, params.digest());

    let mut d = scheduler(1);
    let params = TransferParams::RemotePrefill(Box::new(params));
    let carried = TransferParams::parse(&params.to_json()).unwrap().unwrap();
    d.request_arrived(at(0), &req("r"), &prompt(8), Some(&carried)).unwrap();
    d.blocks_allocated(at(1), &req("r"), 0, 8, &[run(30, 2)]).unwrap();
    let Some(ConsumerOrder::Load { offer: read, .. }) = d.plan_step(at(1)).consumer.pop() else {
        panic!("no load")
    };
    assert_eq!(read, granted);
}

// H-7
#[test]
fn r004_a_partial_last_block_is_handed_over_too() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(9), Some(&ask())).unwrap();
    let finish = s.request_finished(at(1), &req("r"), &complete(9, &[list(&[3, 1, 2])]));
    assert_eq!(finish.params, Some(offered(9, list(&[3, 1, 2]))));
}

// H-7, H-9
#[test]
fn r004_a_prompt_shorter_than_a_block_is_handed_over_and_pinned() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(3), Some(&ask())).unwrap();
    let finish = s.request_finished(at(1), &req("r"), &complete(3, &[list(&[5])]));
    assert_eq!(finish.verdict, Verdict::Hold(lease_hold(1)));
    assert_eq!(finish.params, Some(offered(3, list(&[5]))));
}

// H-8, H-9
#[test]
fn r004_an_empty_prompt_pins_nothing_and_says_so() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &[], Some(&ask())).unwrap();
    let finish = s.request_finished(at(1), &req("r"), &complete(0, &[list(&[])]));
    assert_eq!(finish, Finish { verdict: Verdict::Free, params: Some(nothing()) });
    assert_eq!(s.planned(at(1)), producer(&[announce(1), forget(1)]));
    assert_forgotten(&s);
}

// H-7, H-8, R093
#[test]
fn an_aborted_request_offers_nothing_at_all() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
    let finish = s.request_finished(at(1), &req("r"), &RequestEnd::Aborted);
    assert_eq!(finish, Finish { verdict: Verdict::Free, params: None });
    assert_eq!(s.planned(at(1)), producer(&[announce(1), forget(1)]));
    assert_eq!(s.producer_stats(), ProducerStats { forgotten: 1, ..ProducerStats::default() });
    assert_forgotten(&s);
}

// H-7, H-8, R092
#[test]
fn r022_an_incomplete_prompt_is_never_offered() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
    let finish = s.request_finished(at(1), &req("r"), &complete(7, &[run(8, 2)]));
    assert_eq!(finish, Finish { verdict: Verdict::Free, params: Some(nothing()) });
    assert_eq!(s.planned(at(1)), producer(&[announce(1), forget(1)]));
}

// H-7
#[test]
fn blocks_that_do_not_hold_the_prompt_are_never_offered() {
    for blocks in [vec![run(8, 1)], vec![], vec![run(8, 2), run(8, 2)], vec![list(&[8, POOL])]] {
        let mut s = scheduler(1);
        s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
        let finish = s.request_finished(at(1), &req("r"), &complete(8, &blocks));
        assert_eq!(finish.verdict, Verdict::Free, "{blocks:?}");
        assert_eq!(finish.params, Some(nothing()), "{blocks:?}");
    }
}

// H-7, R069
#[test]
fn only_the_prompts_blocks_are_handed_over_of_a_request_that_went_on() {
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(6), Some(&ask())).unwrap();
    let finish = s.request_finished(at(1), &req("r"), &complete(11, &[run(8, 3)]));
    assert_eq!(finish.params, Some(offered(6, run(8, 2))));
}

#[test]
fn what_is_offered_can_be_carried_by_a_router() {
    let mut s = scheduler(1);
    for (name, tokens) in [("a", 8), ("b", 9)] {
        let params = TransferParams::RemotePrefill(Box::new(hand_over(&mut s, 0, name, tokens)));
        assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
    }
    let params = TransferParams::RemotePrefill(Box::new(nothing()));
    assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
}

// H-17
#[test]
fn p3_the_blocks_are_free_when_the_lease_has_ended() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "r", 9);
    assert_eq!(s.holds(), 1);
    s.take_report(at(10), lease_report(0, 1, LeaseEnd::Confirmed));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(8, 3))]);
    assert_eq!(s.producer_stats(), ProducerStats { granted: 1, confirmed: 1, ..ProducerStats::default() });
    assert_forgotten(&s);
}

// H-17, R003
#[test]
fn p3_the_blocks_are_free_only_when_the_lease_has_ended_on_every_rank() {
    let mut s = scheduler(3);
    hand_over(&mut s, 0, "r", 8);
    for rank in [2, 0] {
        s.take_report(at(10), lease_report(rank, 1, LeaseEnd::Confirmed));
        assert_eq!((s.take_events(), s.holds()), (vec![], 1));
    }
    s.take_report(at(11), lease_report(1, 1, LeaseEnd::Confirmed));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(8, 2))]);
}

// H-17, R028
#[test]
fn p2_a_rank_that_repeats_itself_does_not_stand_for_another() {
    let mut s = scheduler(2);
    hand_over(&mut s, 0, "r", 8);
    for _ in 0..3 {
        s.take_report(at(10), lease_report(0, 1, LeaseEnd::Confirmed));
    }
    assert_eq!((s.take_events(), s.holds()), (vec![], 1));
    assert_eq!(s.producer_stats().stray_ends, 2);
}

// H-17, R005
#[test]
fn r026_unknown_leases_and_ranks_are_counted_and_do_nothing() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "r", 8);
    s.take_report(at(10), lease_report(0, 99, LeaseEnd::Confirmed));
    s.take_report(at(10), lease_report(1, 1, LeaseEnd::Confirmed));
    s.take_report(at(10), lease_report(u32::MAX, 1, LeaseEnd::Expired));
    assert_eq!((s.take_events(), s.holds()), (vec![], 1));
    assert_eq!(s.producer_stats().stray_ends, 3);
}

// H-17, R003
#[test]
fn p2_an_end_that_is_reported_again_afterwards_is_counted_and_does_nothing() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "r", 8);
    s.take_report(at(10), lease_report(0, 1, LeaseEnd::Expired));
    s.take_events();
    s.take_report(at(11), lease_report(0, 1, LeaseEnd::Expired));
    assert_eq!(s.take_events(), []);
    assert_eq!((s.producer_stats().expired, s.producer_stats().stray_ends), (1, 1));
}

#[test]
fn the_worst_end_of_any_rank_is_the_leases() {
    let counted = |ends: [LeaseEnd; 2]| {
        let mut s = scheduler(2);
        hand_over(&mut s, 0, "r", 8);
        s.take_report(at(10), lease_report(0, 1, ends[0]));
        s.take_report(at(10), lease_report(1, 1, ends[1]));
        let stats = s.producer_stats();
        [stats.confirmed, stats.released, stats.expired]
    };
    assert_eq!(counted([LeaseEnd::Confirmed, LeaseEnd::Confirmed]), [1, 0, 0]);
    assert_eq!(counted([LeaseEnd::Released, LeaseEnd::Confirmed]), [0, 1, 0]);
    assert_eq!(counted([LeaseEnd::Expired, LeaseEnd::Released]), [0, 0, 1]);
}

// H-17
#[test]
fn p3_time_alone_never_frees_blocks_but_silence_is_told_once() {
    let mut s = scheduler(2);
    hand_over(&mut s, 0, "r", 8);
    s.take_report(at(10), lease_report(0, 1, LeaseEnd::Expired));
    let overdue = LEASE_MAX_MS + GRACE_MS;
    assert_eq!(s.next_deadline(), Some(at(overdue)));
    s.time_passed(at(overdue - 1));
    assert_eq!(s.take_events(), []);
    s.time_passed(at(overdue));
    assert_eq!(s.take_events(), [SchedEvent::WorkersSilent { hold: lease_hold(1), missing: vec![Rank(1)] }]);
    s.time_passed(at(10 * overdue));
    assert_eq!((s.take_events(), s.holds(), s.next_deadline()), (vec![], 1, None));
    s.take_report(at(10 * overdue), lease_report(1, 1, LeaseEnd::Expired));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(8, 2))]);
    assert_forgotten(&s);
}

// H-16
#[test]
fn r015_a_report_that_has_arrived_counts_before_the_deadline_that_has_passed() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "r", 8);
    s.take_report(at(10 * LEASE_MAX_MS), lease_report(0, 1, LeaseEnd::Confirmed));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(8, 2))]);
}

// H-10
#[test]
fn r005_an_abort_after_the_hand_over_leaves_the_lease_alone() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "r", 8);
    let _ = s.request_finished(at(1), &req("r"), &RequestEnd::Aborted);
    assert!(s.planned(at(1)).is_empty());
    assert_eq!(s.holds(), 1);
    s.take_report(at(10), lease_report(0, 1, LeaseEnd::Confirmed));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(8, 2))]);
}

// H-2, R081
#[test]
fn leases_are_numbered_in_order_and_never_again() {
    let mut s = scheduler(1);
    for n in 1..=3 {
        s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
        let _ = s.request_finished(at(0), &req("r"), &RequestEnd::Aborted);
        assert_eq!(s.planned(at(0)), producer(&[announce(n), forget(n)]));
    }
}
