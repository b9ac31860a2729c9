//! Offers of engines with other blocks, groups that are not handed over whole, and prompts that were changed on the way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::params::PrefixMarks;
use kv_proto::{
    BlockList, ConsumerOrder, GroupBlocks, GroupKind, LoadFailure, RemotePrefill, TransferParams,
};
use kv_sched::{LoadResult, SchedConfig, SchedError, SchedEvent, Scheduler, Verdict};

fn with_groups(groups: &[GroupKind]) -> Scheduler {
    Scheduler::new(SchedConfig { groups: groups.to_vec(), ..config(1) }).unwrap()
}

/// The groups of the one load that is ordered.
fn ordered(s: &mut Scheduler, now: u64) -> Vec<GroupBlocks> {
    let orders = s.planned(at(now)).consumer;
    let mut loads = orders.into_iter().filter_map(|order| match order {
        ConsumerOrder::Load { groups, .. } => Some(groups),
        _ => None,
    });
    let groups = loads.next().expect("no load");
    assert!(loads.next().is_none());
    groups
}

fn load_of(
    s: &mut Scheduler,
    offer: RemotePrefill,
    tokens: u32,
    local: u32,
    blocks: &[BlockList],
) -> Vec<GroupBlocks> {
    s.request_arrived(at(0), &req("r"), &prompt(tokens), Some(&params(offer))).unwrap();
    let remote = s.remote_tokens(&req("r"), local);
    s.blocks_allocated(at(1), &req("r"), local, remote, blocks).unwrap();
    ordered(s, 1)
}

fn one(first: u32, remote_first: u32, tokens: u32, remote: BlockList, local: BlockList) -> Vec<GroupBlocks> {
    vec![GroupBlocks { group: 0, first, remote_first, tokens, remote, local }]
}

// H-11
#[test]
fn blocks_of_another_size_pair_by_the_position_of_their_tokens() {
    // 22 tokens: three blocks of 8 there, six of 4 here.
    let larger = || RemotePrefill { block_tokens: 8, blocks: vec![run(20, 3)], ..offer(5, 22) };
    let groups = load_of(&mut scheduler(1), larger(), 24, 0, &[run(40, 6)]);
    assert_eq!(groups, one(0, 0, 22, run(20, 3), run(40, 6)));
    let groups = load_of(&mut scheduler(1), larger(), 24, 12, &[run(40, 6)]);
    assert_eq!(groups, one(3, 1, 22, run(21, 2), run(43, 3)), "token 12 is in their second block");
    let groups = load_of(&mut scheduler(1), larger(), 24, 16, &[run(40, 6)]);
    assert_eq!(groups, one(4, 2, 22, run(22, 1), run(44, 2)));
    // Blocks of 2 there.
    let smaller = RemotePrefill { block_tokens: 2, blocks: vec![run(20, 11)], ..offer(5, 22) };
    let groups = load_of(&mut scheduler(1), smaller, 24, 8, &[run(40, 6)]);
    assert_eq!(groups, one(2, 4, 22, run(24, 7), run(42, 4)));
    // Of 6: neither is a multiple of the other.
    let odd = RemotePrefill { block_tokens: 6, blocks: vec![run(20, 4)], ..offer(5, 22) };
    let groups = load_of(&mut scheduler(1), odd, 24, 8, &[run(40, 6)]);
    assert_eq!(groups, one(2, 1, 22, run(21, 3), run(42, 4)));
}

#[test]
fn of_a_window_only_its_tail_is_handed_over() {
    let kinds = [GroupKind::Full, GroupKind::Window { tokens: 6 }];
    let mut p = with_groups(&kinds);
    p.request_arrived(at(0), &req("r"), &prompt(22), Some(&ask())).unwrap();
    // The engine has given back what left the window; whatever it names there is not looked at.
    let window = list(&[99_999, 99_999, 99_999, 99_999, 34, 35]);
    let finish = p.request_finished(at(1), &req("r"), &complete(22, &[run(20, 6), window]));
    assert_eq!(finish.verdict, Verdict::Hold(kv_sched::HoldId::Lease(kv_proto::LeaseId(1))));
    let offer = finish.params.unwrap();
    assert_eq!((offer.blocks.clone(), offer.firsts.clone()), (vec![run(20, 6), list(&[34, 35])], vec![0, 4]));

    // After more tokens the window has left blocks that the prompt's end looks at.
    let mut late = with_groups(&kinds);
    late.request_arrived(at(0), &req("r"), &prompt(22), Some(&ask())).unwrap();
    let finish = late.request_finished(at(1), &req("r"), &complete(26, &[run(20, 7), run(30, 7)]));
    assert_eq!((finish.verdict, finish.params.unwrap().lease), (Verdict::Free, None));

    let mut d = with_groups(&kinds);
    let groups = load_of(&mut d, offer, 23, 8, &[run(40, 6), run(50, 6)]);
    let window = GroupBlocks {
        group: 1,
        first: 4,
        remote_first: 4,
        tokens: 22,
        remote: list(&[34, 35]),
        local: run(54, 2),
    };
    assert_eq!(groups, [one(2, 2, 22, run(22, 4), run(42, 4)), vec![window]].concat());
}

#[test]
fn a_window_in_blocks_of_another_size_reaches_back_to_its_first_token() {
    let kinds = [GroupKind::Window { tokens: 6 }];
    // The window of 22 tokens begins at token 16, which is in their third block of 8.
    let offer =
        || RemotePrefill { block_tokens: 8, blocks: vec![run(22, 1)], firsts: vec![2], ..offer(5, 22) };
    let groups = load_of(&mut with_groups(&kinds), offer(), 22, 0, &[run(40, 6)]);
    assert_eq!(groups, one(4, 2, 22, run(22, 1), run(44, 2)));
    let late = RemotePrefill { block_tokens: 2, blocks: vec![run(20, 2)], firsts: vec![9], ..offer() };
    let mut s = with_groups(&kinds);
    let error = s.request_arrived(at(0), &req("r"), &prompt(22), Some(&params(late))).unwrap_err();
    let kind = kinds[0];
    assert_eq!(error, SchedError::OfferBegins { group: 0, kind, begins: 18, needed: 16 });
    assert_eq!(
        error.to_string(),
        "the offer's group 0 (window of 6 tokens) begins at token 18; tokens from 16 on are needed"
    );
}

#[test]
fn of_a_state_the_last_block_is_handed_over_if_it_stopped_with_the_prompt() {
    let kinds = [GroupKind::Full, GroupKind::State];
    let computed = |tokens: u32| {
        let mut p = with_groups(&kinds);
        p.request_arrived(at(0), &req("r"), &prompt(22), Some(&ask())).unwrap();
        p.request_finished(at(1), &req("r"), &complete(tokens, &[run(20, 6), list(&[30, 31])]))
            .params
            .unwrap()
    };
    let offer = computed(22);
    assert_eq!((offer.blocks.clone(), offer.firsts.clone()), (vec![run(20, 6), list(&[31])], vec![0, 5]));
    assert_eq!(computed(23).lease, None, "the state is one token further than the prompt");

    // D computes the last token of its prompt itself, which the state must not have yet.
    let mut same = with_groups(&kinds);
    same.request_arrived(at(0), &req("r"), &prompt(22), Some(&params(offer.clone()))).unwrap();
    assert_eq!(same.remote_tokens(&req("r"), 0), 0);

    let mut d = with_groups(&kinds);
    let groups = load_of(&mut d, offer, 23, 8, &[run(40, 6), list(&[50])]);
    let state = GroupBlocks {
        group: 1,
        first: 5,
        remote_first: 5,
        tokens: 22,
        remote: list(&[31]),
        local: list(&[50]),
    };
    assert_eq!(groups[1], state);
}

// H-11
#[test]
fn of_a_prompt_that_was_changed_on_the_way_what_is_the_same_is_loaded() {
    let marked = || RemotePrefill { marks: PrefixMarks::of(&prompt(22), BLOCK_TOKENS), ..offer(5, 22) };
    let arrive = |tokens: Vec<u32>| {
        let mut s = scheduler(1);
        let role = s.request_arrived(at(0), &req("r"), &tokens, Some(&params(marked())));
        (role.map(|_| s.remote_tokens(&req("r"), 0)), s)
    };
    let mut changed = prompt(24);
    changed[13] = 9_999;
    let (tokens, mut s) = arrive(changed.clone());
    assert_eq!(tokens, Ok(12));
    s.blocks_allocated(at(1), &req("r"), 4, 8, &[run(40, 6)]).unwrap();
    assert_eq!(ordered(&mut s, 1), one(1, 1, 12, run(21, 2), run(41, 2)));
    // A token that was put in: nothing behind it is the same.
    let mut longer = prompt(24);
    longer.insert(9, 9_999);
    assert_eq!(arrive(longer).0, Ok(8));
    // The router cut the prompt: what is left of it is there.
    assert_eq!(arrive(prompt(17)).0, Ok(16));
    changed[0] = 9_999;
    assert!(matches!(arrive(changed).0, Err(SchedError::PromptDiffers { tokens: 22, .. })));
    assert_eq!(arrive(prompt(3)).0, Err(SchedError::PromptTooShort { offered: 22, prompt: 3 }));
}

#[test]
fn of_a_window_or_a_state_no_prefix_alone_is_of_use() {
    for kind in [GroupKind::Window { tokens: 64 }, GroupKind::State] {
        let mut s = with_groups(&[kind]);
        let blocks =
            if kind == GroupKind::State { (vec![run(20, 1)], vec![5]) } else { (vec![run(20, 6)], vec![0]) };
        let marks = PrefixMarks::of(&prompt(22), BLOCK_TOKENS);
        let offer = RemotePrefill { blocks: blocks.0, firsts: blocks.1, marks, ..offer(5, 22) };
        let mut changed = prompt(24);
        changed[13] = 9_999;
        let error = s.request_arrived(at(0), &req("r"), &changed, Some(&params(offer))).unwrap_err();
        assert!(matches!(error, SchedError::PromptDiffers { .. }), "{error}");
    }
}

#[test]
fn of_a_failed_load_of_a_window_nothing_is_kept() {
    for (kinds, kept) in [(vec![GroupKind::Full], 8), (vec![GroupKind::Window { tokens: 64 }], 0)] {
        let mut s = with_groups(&kinds);
        load_of(&mut s, offer(5, 16), 17, 0, &[run(40, 4)]);
        s.take_report(at(2), load_report(0, 1, failed_after(LoadFailure::PeerLost, 2)));
        let events = s.take_events();
        let [SchedEvent::LoadEnded { result: LoadResult::Failed { valid_tokens, invalid, .. }, .. }] =
            &events[..]
        else {
            panic!("{events:?}")
        };
        assert_eq!((*valid_tokens, invalid[0].len()), (kept, 4 - kept / 4));
    }
}

/// What is offered is read again from JSON as it was.
#[test]
fn an_offer_survives_the_router() {
    let mut p = with_groups(&[GroupKind::Full, GroupKind::Window { tokens: 6 }]);
    p.request_arrived(at(0), &req("r"), &prompt(22), Some(&ask())).unwrap();
    let finish = p.request_finished(at(1), &req("r"), &complete(22, &[run(20, 6), run(30, 6)]));
    let sent = TransferParams::RemotePrefill(Box::new(finish.params.unwrap()));
    assert_eq!(TransferParams::parse(&sent.to_json()), Ok(Some(sent)));
}

#[test]
fn an_offer_of_blocks_without_tokens_is_refused() {
    let mut s = scheduler(1);
    let none = RemotePrefill { block_tokens: 0, blocks: vec![BlockList::default()], ..offer(5, 8) };
    let error = s.request_arrived(at(0), &req("r"), &prompt(8), Some(&params(none))).unwrap_err();
    assert_eq!(error, SchedError::OfferBlockTokens);
}

// H-29
#[test]
fn an_offer_of_which_only_a_part_is_of_use_is_tried_after_the_whole_ones() {
    let other = |lease, tokens: Vec<u32>| RemotePrefill {
        token_digest: kv_proto::token_digest(&tokens),
        marks: PrefixMarks::of(&tokens, BLOCK_TOKENS),
        ..offer(lease, 8)
    };
    let mut changed = prompt(8);
    changed[6] = 9_999;
    let offers = RemotePrefill { alternatives: vec![other(6, prompt(8))], ..other(5, changed) };
    let mut s = scheduler(1);
    s.request_arrived(at(0), &req("r"), &prompt(8), Some(&params(offers))).unwrap();
    assert_eq!(s.remote_tokens(&req("r"), 0), 8);
}
