//! Requests that load and are handed over in their turn: D keeps an answer for a conversation's next turn, and P reads
//! it back before it computes that.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::params::PrefixMarks;
use kv_proto::{
    BlockList, ConsumerOrder, GroupKind, LeaseEnd, LeaseId, LoadFailure, ProducerOrder, ReleaseReason,
    RemotePrefill, TransferParams, token_digest,
};
use kv_sched::{LoadResult, RequestEnd, Role, SchedConfig, SchedError, SchedEvent, Scheduler, Verdict};

fn relay(offer: RemotePrefill) -> TransferParams {
    TransferParams::Relay(Box::new(offer))
}

/// A request's end with what it sampled.
fn answered(computed_tokens: u32, blocks: &[BlockList], sampled: &[u32]) -> RequestEnd {
    RequestEnd::Complete { computed_tokens, blocks: blocks.to_vec(), sampled: sampled.to_vec() }
}

/// A relay named `r` over `tokens` that are all offered, loaded into the blocks from 40 on.
fn load_relay(s: &mut Scheduler, tokens: u32) {
    let role = s.request_arrived(at(0), &req("r"), &prompt(tokens), Some(&relay(offer(5, tokens))));
    assert_eq!(role, Ok(Role::Relay));
    s.blocks_allocated(at(1), &req("r"), 0, tokens, &[run(40, tokens.div_ceil(BLOCK_TOKENS))]).unwrap();
}

// H-32
#[test]
fn a_relay_is_a_consumer_first_and_a_producer_after() {
    let mut s = scheduler(1);
    load_relay(&mut s, 8);
    let announce = ProducerOrder::Announce { lease: LeaseId(1) };
    let plan = s.planned(at(1));
    assert_eq!(plan.producer, [announce]);
    assert_eq!(plan.consumer, [track(5), load(1, 5, 0, run(20, 2), run(40, 2))]);
    s.take_report(at(2), load_report(0, 1, loaded(64)));
    assert!(matches!(s.take_events()[..], [SchedEvent::LoadEnded { .. }]));

    // 8 tokens of prompt and 5 sampled, the last of which has no KV yet.
    let finish = s.request_finished(at(3), &req("r"), &answered(12, &[run(40, 4)], &[7, 8, 9, 10, 11]));
    assert_eq!(finish.verdict, Verdict::Hold(lease_hold(1)));
    let offer = finish.params.unwrap();
    let all = [&prompt(8)[..], &[7, 8, 9, 10]].concat();
    assert_eq!((offer.tokens, &offer.blocks), (12, &vec![run(40, 3)]));
    assert_eq!(offer.token_digest, token_digest(&all));
    assert_eq!(offer.marks, PrefixMarks::of(&all, BLOCK_TOKENS));
    let granted = s.plan_step(at(3)).producer;
    assert!(matches!(granted[..], [ProducerOrder::Grant { offer: of, .. }] if of == offer.digest()));
    s.take_report(at(4), lease_report(0, 1, LeaseEnd::Confirmed));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(40, 3))]);
    assert_forgotten(&s);
}

// H-32
#[test]
fn r003_a_kept_answer_that_no_turn_comes_for_is_free_when_its_lease_is_over() {
    let mut s = scheduler(1);
    load_relay(&mut s, 8);
    s.planned(at(1));
    s.take_report(at(2), load_report(0, 1, loaded(64)));
    s.take_events();
    let finish = s.request_finished(at(3), &req("r"), &answered(9, &[run(40, 3)], &[7, 8]));
    assert_eq!(finish.verdict, Verdict::Hold(lease_hold(1)));
    s.planned(at(3));
    s.take_report(at(4 + TTL_MS), lease_report(0, 1, LeaseEnd::Expired));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(40, 3))]);
    assert_eq!(s.producer_stats().expired, 1);
    assert_forgotten(&s);
}

#[test]
fn a_kept_answer_can_be_taken_back_once_before_its_time() {
    let mut s = scheduler(1);
    hand_over(&mut s, 0, "r", 8);
    assert!(!s.take_back(lease_hold(2)), "nobody's");
    assert!(!s.take_back(load_hold(1)), "a load is cancelled by its request's end");
    assert!(!s.has_plan());
    assert!(s.take_back(lease_hold(1)));
    assert!(!s.take_back(lease_hold(1)), "it is on its way");
    assert_eq!(s.planned(at(1)), producer(&[ProducerOrder::Revoke { lease: LeaseId(1) }]));
    assert_eq!(s.holds(), 1, "a reader may still read");
    s.take_report(at(2), lease_report(0, 1, LeaseEnd::Revoked));
    assert_eq!(s.take_events(), [blocks_released(lease_hold(1), "r", run(8, 2))]);
    assert!(!s.take_back(lease_hold(1)), "gone");
    assert_forgotten(&s);
}

/// What P is offered of an earlier turn: these tokens, from the blocks from 20 on, with marks.
fn earlier(tokens: &[u32]) -> RemotePrefill {
    RemotePrefill {
        token_digest: token_digest(tokens),
        marks: PrefixMarks::of(tokens, BLOCK_TOKENS),
        ..offer(5, tokens.len() as u32)
    }
}

/// How much of an earlier turn's tokens is read back for a prompt.
fn read_back(earlier_turn: &[u32], turn: &[u32]) -> u32 {
    let mut s = scheduler(1);
    assert_eq!(
        s.request_arrived(at(0), &req("r"), turn, Some(&relay(earlier(earlier_turn)))),
        Ok(Role::Relay)
    );
    let tokens = s.remote_tokens(&req("r"), 0);
    if tokens > 0 {
        let blocks = [run(40, tokens.div_ceil(BLOCK_TOKENS))];
        s.blocks_allocated(at(1), &req("r"), 0, tokens, &blocks).unwrap();
        let orders = s.planned(at(1)).consumer;
        let loads = orders.iter().filter_map(|order| match order {
            ConsumerOrder::Load { groups, .. } => Some(groups[0].tokens),
            _ => None,
        });
        assert_eq!(loads.collect::<Vec<_>>(), [tokens]);
    }
    tokens
}

// H-32, H-11
#[test]
fn of_an_edited_history_the_common_prefix_is_read_back_and_not_as_many_tokens_as_agree_in_number() {
    let held: Vec<u32> = (0..22).collect();
    let turn = |change: fn(&mut Vec<u32>)| {
        let mut history = held.clone();
        change(&mut history);
        history.extend(900..910);
        history
    };
    assert_eq!(read_back(&held, &turn(|_| {})), 22, "all of it, also a block's beginning");
    assert_eq!(read_back(&held, &turn(|h| h[13] = 77)), 12, "an edited answer");
    assert_eq!(read_back(&held, &turn(|h| h.insert(13, 77))), 12, "a token more");
    assert_eq!(read_back(&held, &turn(|h| _ = h.remove(13))), 12, "a token less");
    assert_eq!(read_back(&held, &turn(|h| h.truncate(21))), 20, "the last one less");
    assert_eq!(read_back(&held, &held[..9]), 8, "a turn that was taken back");
    assert_eq!(read_back(&held, &turn(|h| h[0] = 77)), 0, "another conversation");
}

// H-32, H-22
#[test]
fn an_earlier_turn_of_which_nothing_is_left_is_given_back_and_the_request_is_computed_and_handed_over() {
    let mut s = scheduler(1);
    let other: Vec<u32> = (900..912).collect();
    let role = s.request_arrived(at(0), &req("r"), &other, Some(&relay(offer(5, 8))));
    assert_eq!((role, s.remote_tokens(&req("r"), 0)), (Ok(Role::Relay), 0));
    s.blocks_allocated(at(1), &req("r"), 0, 0, &[run(40, 3)]).unwrap();
    assert_eq!(s.planned(at(1)).consumer, [track(5), release(5, ReleaseReason::NotNeeded)]);
    let finish = s.request_finished(at(2), &req("r"), &complete(12, &[run(40, 3)]));
    assert_eq!(finish.params.unwrap().token_digest, token_digest(&other));
    // A consumer has nobody else to compute its prompt for, and its router made a mistake.
    let mut d = scheduler(1);
    let refused = d.request_arrived(at(0), &req("r"), &other, Some(&params(offer(5, 8))));
    assert!(matches!(refused, Err(SchedError::PromptDiffers { .. })));
    // What cannot be an offer at all is refused of a relay too, and nothing is announced for it.
    let bad = RemotePrefill { blocks: vec![run(20, 2); 2], firsts: vec![0, 0], ..offer(5, 8) };
    let refused = d.request_arrived(at(0), &req("r"), &prompt(8), Some(&relay(bad)));
    assert!(matches!(refused, Err(SchedError::Groups { .. })), "{refused:?}");
    assert_eq!(d.planned(at(0)).producer, []);
    assert_eq!(d.remaining(), kv_sched::Remaining::default());
}

// H-32, H-19
#[test]
fn a_relay_that_ends_while_it_loads_hands_nothing_over_and_its_blocks_wait_for_the_load() {
    for end in [RequestEnd::Aborted, answered(9, &[run(40, 3)], &[7, 8])] {
        let mut s = scheduler(1);
        load_relay(&mut s, 8);
        s.planned(at(1));
        let finish = s.request_finished(at(2), &req("r"), &end);
        assert_eq!(finish.verdict, Verdict::Hold(load_hold(1)), "{end:?}");
        assert_eq!(finish.params.and_then(|p| p.lease), None, "{end:?}");
        let plan = s.planned(at(2));
        assert_eq!(plan.producer, [ProducerOrder::Forget { lease: LeaseId(1) }], "{end:?}");
        assert_eq!(plan.consumer, [cancel(1)], "{end:?}");
        s.take_report(at(3), load_report(0, 1, failed(LoadFailure::Cancelled)));
        assert_eq!(s.take_events(), [blocks_released(load_hold(1), "r", run(40, 2))]);
        assert_forgotten(&s);
    }
}

// H-32, P8
#[test]
fn p8_a_relay_whose_load_failed_unheard_hands_nothing_over() {
    let mut s = scheduler(1);
    load_relay(&mut s, 8);
    s.planned(at(1));
    s.take_report(at(2), load_report(0, 1, failed(LoadFailure::Lapsed)));
    // The engine has not taken the event: it may believe that its blocks are good.
    let finish = s.request_finished(at(3), &req("r"), &answered(9, &[run(40, 3)], &[7, 8]));
    assert_eq!((finish.verdict, finish.params.unwrap().lease), (Verdict::Free, None));
    assert_eq!(s.take_events(), []);

    // One that has, and computed them again, hands them over.
    let mut s = scheduler(1);
    load_relay(&mut s, 8);
    s.planned(at(1));
    s.take_report(at(2), load_report(0, 1, failed(LoadFailure::Lapsed)));
    let [SchedEvent::LoadEnded { result: LoadResult::Failed { hold: None, .. }, .. }] = &s.take_events()[..]
    else {
        panic!("it did not fail");
    };
    let finish = s.request_finished(at(3), &req("r"), &answered(9, &[run(40, 3)], &[7, 8]));
    assert_eq!((finish.verdict, finish.params.unwrap().tokens), (Verdict::Hold(lease_hold(1)), 9));
}

#[test]
fn a_relay_that_was_preempted_while_it_loaded_is_computed_and_handed_over() {
    let mut s = scheduler(1);
    load_relay(&mut s, 8);
    s.planned(at(1));
    assert_eq!(s.request_preempted(at(2), &req("r")), Verdict::Hold(load_hold(1)));
    assert_eq!(s.remote_tokens(&req("r"), 0), 0);
    let finish = s.request_finished(at(3), &req("r"), &answered(9, &[run(50, 3)], &[7, 8]));
    assert_eq!(finish.verdict, Verdict::Hold(lease_hold(1)), "other blocks than those of the load");
}

// H-26
#[test]
fn a_draining_engine_refuses_a_relay_and_gives_its_offer_back() {
    let mut s = scheduler(1);
    s.drain(at(0), std::time::Duration::from_millis(10));
    let refused = s.request_arrived(at(1), &req("r"), &prompt(8), Some(&relay(offer(5, 8))));
    assert!(matches!(refused, Err(SchedError::Draining { .. })));
    let plan = s.planned(at(1));
    assert_eq!((plan.producer, plan.consumer), (vec![], vec![track(5), release(5, ReleaseReason::Draining)]));
}

// H-32
#[test]
fn a_name_is_one_requests_in_both_roles() {
    let mut s = scheduler(1);
    load_relay(&mut s, 8);
    for again in [relay(offer(6, 8)), params(offer(6, 8)), ask()] {
        let refused = s.request_arrived(at(1), &req("r"), &prompt(8), Some(&again));
        assert!(matches!(refused, Err(SchedError::DuplicateRequest { .. })));
    }
}

// H-32, H-7
#[test]
fn what_is_not_named_or_not_computed_is_not_handed_over_with_an_answer() {
    let tokens_of = |end: &RequestEnd| {
        let mut s = scheduler(1);
        s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
        s.request_finished(at(1), &req("r"), end).params.unwrap().tokens
    };
    assert_eq!(tokens_of(&answered(11, &[run(40, 3)], &[1, 2, 3, 4])), 11);
    assert_eq!(tokens_of(&answered(11, &[run(40, 3)], &[1, 2])), 10, "the third was not named");
    assert_eq!(tokens_of(&answered(11, &[run(40, 3)], &[])), 8, "the prompt alone");
    assert_eq!(tokens_of(&answered(7, &[run(40, 3)], &[1, 2])), 0, "the prompt was not computed whole");
    assert_eq!(tokens_of(&answered(11, &[run(40, 2)], &[1, 2, 3])), 0, "a block too few");
}

// H-32
#[test]
fn windows_and_states_are_kept_as_they_are_after_the_last_computed_token() {
    let kinds = [GroupKind::Window { tokens: 6 }, GroupKind::State];
    let mut s = Scheduler::new(SchedConfig { groups: kinds.to_vec(), ..config(1) }).unwrap();
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&ask())).unwrap();
    // 8 and 11 more: the window looks at tokens 13 to 18, in blocks 3 and 4.
    let sampled: Vec<u32> = (0..12).collect();
    let gone = list(&[99_999, 99_999, 99_999, 33, 34]);
    let finish = s.request_finished(at(1), &req("r"), &answered(19, &[gone, list(&[50])], &sampled));
    let offer = finish.params.unwrap();
    assert_eq!((offer.tokens, offer.firsts.clone()), (19, vec![3, 4]));
    assert_eq!(offer.blocks, vec![list(&[33, 34]), list(&[50])]);
    // The next turn goes on from there, or from nowhere: of a window or a state no prefix is of use.
    let turn = [&prompt(8)[..], &sampled[..], &[900, 901]].concat();
    for (change, tokens) in [(None, 19), (Some(15), 0)] {
        let mut p = Scheduler::new(SchedConfig { groups: kinds.to_vec(), ..config(1) }).unwrap();
        let mut turn = turn.clone();
        if let Some(at) = change {
            turn[at] = 77;
        }
        p.request_arrived(at(0), &req("r"), &turn, Some(&relay(offer.clone()))).unwrap();
        assert_eq!(p.remote_tokens(&req("r"), 0), tokens, "{change:?}");
    }
}
