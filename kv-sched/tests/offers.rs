//! The consumer's policy up to the load: offers, questions, allocations, and what is given back unread.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::{
    BlockList, ConsumerOrder, GroupBlocks, GroupKind, LoadId, ReleaseReason, RemotePrefill, token_digest,
};
use kv_sched::{ConsumerStats, Finish, RequestEnd, Role, SchedError, SchedEvent, Scheduler, Verdict};

fn nothing_pinned() -> RemotePrefill {
    RemotePrefill { tokens: 0, lease: None, blocks: vec![BlockList::default()], ..offer(5, 0) }
}

/// What became of an offer for a prompt of 8 tokens, and the plan that followed.
fn arrive(offer: RemotePrefill) -> (Result<Role, SchedError>, kv_proto::Plan, Scheduler) {
    let mut s = scheduler(1);
    let role = s.request_arrived(at(0), &req("r"), &prompt(8), Some(&params(offer)));
    let plan = s.planned(at(0));
    (role, plan, s)
}

/// The same for an offer that must be refused: it is given back, and nothing of the request is kept.
fn refuse(offer: RemotePrefill) -> SchedError {
    let (role, plan, mut s) = arrive(offer);
    assert_eq!(plan, consumer(&[track(5), release(5, ReleaseReason::Refused)]), "given back once");
    assert_forgotten(&s);
    assert_eq!(
        s.request_arrived(at(1), &req("r"), &prompt(8), Some(&ask())),
        Ok(Role::Producer),
        "the id is free"
    );
    role.unwrap_err()
}

#[test]
fn r043_an_offer_is_tracked_as_soon_as_it_arrives() {
    let (role, plan, s) = arrive(offer(5, 8));
    assert_eq!(role, Ok(Role::Consumer));
    assert_eq!(plan, consumer(&[track(5)]));
    assert_eq!(s.next_deadline(), Some(at(QUEUE_MS)));
}

#[test]
fn an_offer_may_cover_less_than_the_prompt() {
    let (role, _, s) = arrive(offer(5, 6));
    assert_eq!((role, s.remote_tokens(&req("r"), 0)), (Ok(Role::Consumer), 6));
}

// H-3, H-22, R070
#[test]
fn r001_another_number_of_groups_is_refused_with_both_values_and_given_back() {
    let error = refuse(RemotePrefill { blocks: vec![run(20, 2), run(30, 2)], ..offer(5, 8) });
    assert_eq!(error, SchedError::Groups { ours: 1, theirs: 2 });
}

// H-3, H-22
#[test]
fn r001_an_offer_for_another_prompt_is_refused_with_both_digests_and_given_back() {
    let theirs = token_digest(&[1, 2, 3]);
    let error = refuse(RemotePrefill { token_digest: theirs.clone(), ..offer(5, 8) });
    assert_eq!(error, SchedError::PromptDiffers { tokens: 8, ours: token_digest(&prompt(8)), theirs });
}

// H-3, H-22
#[test]
fn r001_an_offer_longer_than_the_prompt_is_refused_with_both_values_and_given_back() {
    assert_eq!(refuse(offer(5, 9)), SchedError::PromptTooShort { offered: 9, prompt: 8 });
}

// H-3, H-22
#[test]
fn r001_an_offer_without_the_blocks_that_its_tokens_need_is_refused_and_given_back() {
    let error = refuse(RemotePrefill { blocks: vec![run(20, 1)], ..offer(5, 8) });
    assert_eq!(error, SchedError::OfferBlocks { tokens: 8, needed: 2, group: 0, got: 1 });
}

// H-9
#[test]
fn r004_when_nothing_is_pinned_nothing_is_loaded_and_nothing_given_back() {
    let (role, plan, mut s) = arrive(nothing_pinned());
    assert_eq!((role, s.remote_tokens(&req("r"), 0)), (Ok(Role::Consumer), 0));
    assert!(plan.is_empty());
    s.blocks_allocated(at(1), &req("r"), 0, 0, &[run(0, 2)]).unwrap();
    let finish = s.request_finished(at(2), &req("r"), &complete(8, &[run(0, 2)]));
    assert_eq!(finish, Finish { verdict: Verdict::Free, params: None });
    assert!(s.planned(at(2)).is_empty());
    assert_forgotten(&s);
}

// H-9
#[test]
fn a_refused_offer_that_pins_nothing_is_not_given_back() {
    let mut s = scheduler(1);
    let offer = RemotePrefill { blocks: vec![BlockList::default(); 2], ..nothing_pinned() };
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&params(offer))).unwrap_err();
    assert_forgotten(&s);
}

#[test]
fn r014_the_question_is_pure_and_may_be_repeated() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    let before = format!("{s:?}");
    for _ in 0..3 {
        assert_eq!([0, 4].map(|local| s.remote_tokens(&req("r"), local)), [8, 4]);
    }
    assert_eq!(format!("{s:?}"), before);
}

#[test]
fn unknown_requests_have_nothing_remote() {
    assert_eq!(scheduler(1).remote_tokens(&req("r"), 0), 0);
}

#[test]
fn r052_below_the_threshold_nothing_is_worth_a_load() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 7);
    assert_eq!([0, 3, 4, 7, 8].map(|local| s.remote_tokens(&req("r"), local)), [7, 4, 0, 0, 0]);
}

// H-22
#[test]
fn r052_an_offer_below_the_threshold_is_given_back() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 7);
    s.blocks_allocated(at(1), &req("r"), 4, 0, &[run(40, 2)]).unwrap();
    assert_eq!(s.planned(at(1)), consumer(&[release(5, ReleaseReason::NotNeeded)]));
    assert_eq!(s.next_deadline(), None);
}

// H-22
#[test]
fn r050_a_full_prefix_hit_gives_the_offer_back_at_once() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    s.blocks_allocated(at(1), &req("r"), 8, 0, &[run(40, 2)]).unwrap();
    assert_eq!(s.planned(at(1)), consumer(&[release(5, ReleaseReason::NotNeeded)]));
    let _ = s.request_finished(at(2), &req("r"), &complete(8, &[run(40, 2)]));
    assert!(!s.has_plan(), "given back once");
    assert_forgotten(&s);
}

// H-11, R069, R071
#[test]
fn an_allocation_orders_the_whole_load() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 7);
    s.blocks_allocated(at(1), &req("r"), 0, 7, &[list(&[9, 3, 60])]).unwrap();
    assert_eq!(s.planned(at(1)), consumer(&[load_to(7, 1, 5, 0, run(20, 2), list(&[9, 3]))]));
    assert_eq!((s.holds(), s.next_deadline()), (1, Some(at(1 + LOAD_MS))));
    assert_eq!(s.consumer_stats(), &ConsumerStats { loads: 1, ..ConsumerStats::default() });
}

// H-11
#[test]
fn blocks_pair_by_their_position_in_the_sequence() {
    let mut s = scheduler(1);
    let remote = [31, 7, 30, 12];
    let offer = RemotePrefill { blocks: vec![list(&remote)], ..offer(5, 15) };
    s.request_arrived(at(0), &req("r"), &prompt(15), Some(&params(offer))).unwrap();
    s.planned(at(0));
    s.blocks_allocated(at(1), &req("r"), 8, 7, &[list(&[2, 50, 1, 49, 48])]).unwrap();
    assert_eq!(s.planned(at(1)), consumer(&[load_to(15, 1, 5, 2, list(&[30, 12]), list(&[1, 49]))]));
}

// H-11
#[test]
fn each_group_pairs_its_own_blocks() {
    let mut s =
        Scheduler::new(kv_sched::SchedConfig { groups: vec![GroupKind::Full; 2], ..config(1) }).unwrap();
    let offer = RemotePrefill { blocks: vec![run(20, 2), run(30, 2)], firsts: vec![0, 0], ..offer(5, 8) };
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&params(offer))).unwrap();
    s.blocks_allocated(at(1), &req("r"), 4, 4, &[run(40, 2), run(50, 2)]).unwrap();
    let ConsumerOrder::Load { load: LoadId(1), groups, .. } = s.planned(at(1)).consumer.remove(1) else {
        panic!("no load")
    };
    let group = |group, remote, local| GroupBlocks {
        group,
        first: 1,
        remote_first: 1,
        tokens: 8,
        remote: list(&[remote]),
        local: list(&[local]),
    };
    assert_eq!(groups, [group(0, 21, 41), group(1, 31, 51)]);
}

/// A queued request of 8 tokens whose allocation must be refused without a trace.
fn refuse_allocation(local: u32, remote: u32, blocks: &[BlockList]) -> SchedError {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    let before = format!("{s:?}");
    let error = s.blocks_allocated(at(1), &req("r"), local, remote, blocks).unwrap_err();
    assert_eq!(format!("{s:?}"), before, "a refused call changes nothing");
    error
}

#[test]
fn another_number_than_offered_is_refused() {
    let differs = |asked, offered| SchedError::TokensDiffer { request: req("r"), asked, offered };
    assert_eq!(refuse_allocation(0, 7, &[run(40, 2)]), differs(7, 8));
    assert_eq!(refuse_allocation(0, 0, &[run(40, 2)]), differs(0, 8));
    assert_eq!(refuse_allocation(4, 8, &[run(40, 2)]), differs(8, 4));
    assert_eq!(refuse_allocation(u32::MAX, 1, &[run(40, 2)]), differs(1, 0));
}

#[test]
fn local_tokens_that_end_inside_a_block_are_refused() {
    let error = refuse_allocation(3, 5, &[run(40, 2)]);
    assert_eq!(error, SchedError::NotAligned { request: req("r"), local_tokens: 3, block_tokens: 4 });
}

#[test]
fn too_few_blocks_are_refused() {
    let error = refuse_allocation(0, 8, &[run(40, 1)]);
    assert_eq!(error, SchedError::TooFewBlocks { request: req("r"), needed: 2, got: 1 });
}

#[test]
fn r066_a_block_beyond_the_pool_is_refused() {
    let error = refuse_allocation(0, 8, &[list(&[40, POOL])]);
    assert_eq!(
        error,
        SchedError::BlockBeyondPool { request: req("r"), highest: u64::from(POOL), blocks: POOL }
    );
}

#[test]
fn another_number_of_groups_is_refused() {
    assert_eq!(refuse_allocation(0, 8, &[]), SchedError::Groups { ours: 0, theirs: 1 });
}

#[test]
fn remote_tokens_for_a_request_without_any_are_refused() {
    let mut s = scheduler(1);
    let error = s.blocks_allocated(at(0), &req("r"), 0, 4, &[run(40, 1)]).unwrap_err();
    assert_eq!(error, SchedError::NothingRemote { request: req("r"), asked: 4 });
}

// H-21, R014
#[test]
fn r067_the_source_is_void_after_its_one_use() {
    let mut s = scheduler(1);
    start_load(&mut s, 0, "r", 5, 8);
    assert_eq!(s.remote_tokens(&req("r"), 0), 0, "while it loads");
    let again = SchedError::NothingRemote { request: req("r"), asked: 8 };
    assert_eq!(s.blocks_allocated(at(1), &req("r"), 0, 8, &[run(40, 2)]), Err(again.clone()));
    s.take_report(at(2), load_report(0, 1, loaded(1)));
    assert_eq!(s.remote_tokens(&req("r"), 0), 0, "preempted after it loaded");
    assert_eq!(s.blocks_allocated(at(3), &req("r"), 0, 8, &[run(40, 2)]), Err(again));
    assert_eq!(s.blocks_allocated(at(3), &req("r"), 0, 0, &[run(40, 2)]), Ok(()));
    assert!(!s.has_plan());
}

// H-22
#[test]
fn r001_an_abort_in_the_queue_gives_the_offer_back() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    let finish = s.request_finished(at(1), &req("r"), &RequestEnd::Aborted);
    assert_eq!(finish, Finish { verdict: Verdict::Free, params: None });
    assert_eq!(s.planned(at(1)), consumer(&[release(5, ReleaseReason::Aborted)]));
    assert_forgotten(&s);
}

// H-21, H-22, R075, R076
#[test]
fn p4_a_request_that_waits_too_long_gives_its_offer_back_and_is_computed_here() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    s.time_passed(at(QUEUE_MS - 1));
    assert!(!s.has_plan());
    assert_eq!(s.planned(at(QUEUE_MS)), consumer(&[release(5, ReleaseReason::WaitedTooLong)]));
    assert_eq!((s.remote_tokens(&req("r"), 0), s.next_deadline()), (0, None));
    assert_eq!(s.take_events(), Vec::<SchedEvent>::new());
    s.blocks_allocated(at(QUEUE_MS + 1), &req("r"), 0, 0, &[run(40, 2)]).unwrap();
    let finish = s.request_finished(at(QUEUE_MS + 2), &req("r"), &complete(8, &[run(40, 2)]));
    assert_eq!(finish.verdict, Verdict::Free);
    assert_eq!(s.consumer_stats().released, [(ReleaseReason::WaitedTooLong, 1)].into());
    assert_forgotten(&s);
}

#[test]
fn an_allocation_ends_the_wait_in_the_queue() {
    let mut s = scheduler(1);
    start_load(&mut s, 0, "r", 5, 8);
    assert!(s.planned(at(QUEUE_MS + 1)).is_empty());
}

// H-21, H-22
#[test]
fn an_offer_that_the_engine_declines_is_given_back_once_and_its_source_is_void() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    s.request_declined(&req("r"));
    s.request_declined(&req("r"));
    s.request_declined(&req("nobody"));
    assert_eq!(s.planned(at(1)), consumer(&[release(5, ReleaseReason::NotNeeded)]));
    assert_eq!(s.remote_tokens(&req("r"), 0), 0);
    s.blocks_allocated(at(2), &req("r"), 0, 0, &[run(40, 2)]).unwrap();
    let _ = s.request_finished(at(3), &req("r"), &RequestEnd::Aborted);
    assert_forgotten(&s);
}
