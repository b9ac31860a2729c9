//! What a widely used scheduler decides about invalid blocks (found by running its functions), and what we decide.
//! Where the two differ, theirs stands beside ours and the comment says why. Blocks of 16 tokens.
#![allow(clippy::unwrap_used)] // A failed check is a failed test.

use std::num::NonZeroU32;

use kv_proto::BlockId;
use kv_recovery::{
    BlockRef, GroupTable, Holder, Judged, LoadState, Need, Policy, Resume, Situation, judge, resume,
};

const PARKED: LoadState = LoadState::Parked { cached_tokens: 0 };

struct Row {
    key: &'static str,
    computed: u32,
    scheduled: u32,
    blocks: Vec<BlockId>,
    state: LoadState,
    lost: bool,
}

fn row(key: &'static str, state: LoadState, computed: u32, scheduled: u32, blocks: &[u32]) -> Row {
    let blocks = blocks.iter().copied().map(BlockId).collect();
    Row { key, computed, scheduled, blocks, state, lost: false }
}

fn run(policy: Policy, rows: &[&Row], invalid: &[u32]) -> Judged<&'static str> {
    let requests: Vec<_> = rows
        .iter()
        .map(|row| Holder {
            key: row.key,
            tables: vec![GroupTable {
                group: 0,
                block_tokens: NonZeroU32::new(16).unwrap(),
                blocks: &row.blocks,
                need: Need::All,
            }],
            computed: row.computed,
            scheduled: row.scheduled,
            state: row.state,
            lost: row.lost,
        })
        .collect();
    let invalid: Vec<_> = invalid.iter().copied().map(BlockRef::any).collect();
    judge(&Situation { requests: &requests, invalid: &invalid, pool: 100, null: Some(BlockId(0)), policy })
}

/// Affected requests, tokens that each request keeps, ids to evict.
type Ours = (Vec<&'static str>, Vec<(&'static str, u32)>, Vec<u32>);

fn ours(judged: &Judged<&'static str>) -> Ours {
    let affected = judged.cuts.iter().filter(|cut| cut.affected).map(|cut| cut.key).collect();
    let kept = judged.cuts.iter().map(|cut| (cut.key, cut.keep_tokens)).collect();
    (affected, kept, judged.evict.iter().map(|block| block.block.0).collect())
}

#[test]
fn a_parked_request_keeps_what_stands_before_its_first_invalid_block() {
    // Theirs: the same under both policies; returned {} (it does not run) or {a}.
    let a = row("a", PARKED, 96, 0, &[1, 2, 3, 4, 5, 6]);
    let judged = run(Policy::Recompute, &[&a], &[4, 6]);
    assert_eq!(ours(&judged), (vec!["a"], vec![("a", 48)], vec![]));
    assert!(judged.end.is_empty());
    let judged = run(Policy::Fail, &[&a], &[4, 6]);
    assert_eq!(ours(&judged), (vec!["a"], vec![("a", 48)], vec![]));
    assert_eq!(judged.end, ["a"]);
}

#[test]
fn a_running_request_is_cut_and_its_tail_leaves_the_cache_under_every_policy() {
    let a = row("a", LoadState::Running, 100, 20, &[1, 2, 3, 4, 5, 6, 7]);
    // Theirs under fail: evicted 3..=7. The same.
    let judged = run(Policy::Fail, &[&a], &[3]);
    assert_eq!(ours(&judged), (vec!["a"], vec![("a", 32)], vec![3, 4, 5, 6, 7]));
    assert_eq!(judged.end, ["a"]);
    // Theirs under recompute: nothing is evicted. Then another request finds blocks 3 to 7 by their hash before they
    // have been computed again, or after their owner was aborted and never did, and reads wrong bytes as computed.
    let judged = run(Policy::Recompute, &[&a], &[3]);
    assert_eq!(ours(&judged), (vec!["a"], vec![("a", 32)], vec![3, 4, 5, 6, 7]));
    assert!(judged.end.is_empty());
}

#[test]
fn every_request_that_holds_a_shared_block_is_cut_there_whatever_the_order() {
    let a = row("a", LoadState::Running, 90, 10, &[1, 2, 3, 4, 5, 6]);
    let b = row("b", LoadState::Running, 70, 6, &[1, 2, 3, 9, 10]);
    // Theirs, with a before b: a 32, b 64, and evicted (fail only) 3..=6. Block 3 is left to a; b counts it, and 9
    // that was computed from it, as computed at once. If a is preempted, or takes longer than one step, b reads
    // wrong bytes; listed the other way round, it is a that does. Ours: both are cut at 32, and what b computed from
    // block 3 leaves the cache too.
    let (cut_a, cut_b, evicted) = (("a", 32), ("b", 32), vec![3, 4, 5, 6, 9, 10]);
    for policy in [Policy::Recompute, Policy::Fail, Policy::Retry] {
        // Theirs with {3, 9}: b 48, evicted 3..=6, 9, 10; ours is the same as with {3}, since 9 depends on 3.
        for invalid in [&[3][..], &[3, 9], &[9, 3, 9]] {
            let judged = run(policy, &[&a, &b], invalid);
            assert_eq!(ours(&judged), (vec!["a", "b"], vec![cut_a, cut_b], evicted.clone()));
            assert_eq!(judged.remarks.shared, 1);
            let turned = run(policy, &[&b, &a], invalid);
            assert_eq!(ours(&turned), (vec!["b", "a"], vec![cut_b, cut_a], evicted.clone()));
            assert_eq!((turned.evict, turned.remarks), (judged.evict, judged.remarks));
        }
    }
}

#[test]
fn what_this_step_computes_is_not_judged() {
    // Theirs: nothing happens. The same: the step writes block 7 after the load has ended. It is named as odd.
    let a = row("a", LoadState::Running, 100, 20, &[1, 2, 3, 4, 5, 6, 7]);
    for policy in [Policy::Recompute, Policy::Fail] {
        let judged = run(policy, &[&a], &[7]);
        assert_eq!(ours(&judged), (vec![], vec![("a", 100)], vec![]));
        assert_eq!(judged.remarks.unjudged, [BlockRef::any(7)]);
        assert!(judged.end.is_empty());
    }
}

#[test]
fn of_two_reports_about_one_request_the_more_cautious_counts() {
    // Theirs: 0 under recompute. The same: a rank that can only say that the whole failed may have lost blocks that
    // another rank, which names its own, does not know of.
    let mut a = row("a", PARKED, 96, 0, &[1, 2, 3, 4, 5, 6]);
    a.lost = true;
    assert_eq!(ours(&run(Policy::Recompute, &[&a], &[4, 6])), (vec!["a"], vec![("a", 0)], vec![]));
    // Theirs under fail: 48, for a request that ends anyway.
    let judged = run(Policy::Fail, &[&a], &[4, 6]);
    assert_eq!((ours(&judged).0, judged.end), (vec!["a"], vec!["a"]));
    // Theirs is 0 here too; ours keeps what the load did not touch.
    a.state = LoadState::Parked { cached_tokens: 32 };
    assert_eq!(ours(&run(Policy::Recompute, &[&a], &[])), (vec!["a"], vec![("a", 32)], vec![]));
}

#[test]
fn a_parked_request_goes_on_with_its_prefix_or_anew() {
    let with = |cache_tokens, zero_from, computed| Resume::With { cache_tokens, zero_from, computed };
    assert_eq!(resume(true, 48, 96), with(48, Some(48), 48));
    assert_eq!(resume(true, 0, 96), Resume::Anew);
    assert_eq!(resume(false, 96, 96), with(96, None, 95));
}

#[test]
fn a_request_that_took_what_was_computed_from_an_invalid_block_is_cut_too() {
    // c holds another copy of block 3's tokens, but 4, that was computed from the invalid copy.
    let a = row("a", LoadState::Running, 80, 0, &[1, 2, 3, 4, 5]);
    let c = row("c", LoadState::Running, 80, 0, &[1, 2, 13, 4, 14]);
    let d = row("d", LoadState::Running, 80, 0, &[1, 2, 13, 24, 14]);
    for rows in [[&a, &c, &d], [&d, &c, &a], [&c, &d, &a]] {
        let mut kept = ours(&run(Policy::Recompute, &rows, &[3])).1;
        kept.sort_unstable();
        assert_eq!(kept, [("a", 32), ("c", 48), ("d", 64)]);
    }
}

#[test]
fn what_a_parked_request_took_from_the_cache_is_evicted_and_what_it_loaded_is_not_in_there() {
    let a = row("a", LoadState::Parked { cached_tokens: 48 }, 96, 0, &[1, 2, 3, 4, 5, 6]);
    assert_eq!(ours(&run(Policy::Recompute, &[&a], &[2])).2, [2, 3]);
}

#[test]
fn odd_reports_are_named_and_harmless() {
    let a = row("a", LoadState::Running, 96, 0, &[1, 2, 3, 4, 5]);
    let b = row("b", LoadState::Running, 10, 20, &[500]);
    let judged = run(Policy::Fail, &[&a, &b, &b], &[0, 77, 77, 500]);
    // 77 may have been cached by a request that is gone.
    assert_eq!(ours(&judged), (vec![], vec![("a", 96), ("b", 10), ("b", 10)], vec![77]));
    let remarks = judged.remarks;
    assert_eq!(remarks.unknown, [BlockRef::any(77), BlockRef::any(500)]);
    assert_eq!((remarks.repeated, remarks.null, remarks.shared), (1, 1, 0));
    assert_eq!((remarks.short, remarks.twice), (vec!["a"], vec!["b"]));
    assert_eq!((remarks.contradicting, remarks.beyond_pool), (vec!["b", "b"], vec!["b", "b"]));
}

fn groups(computed: u32, tables: &[(u32, u32, Need, &[u32])], invalid: &[BlockRef]) -> Judged<u8> {
    let blocks: Vec<Vec<BlockId>> =
        tables.iter().map(|t| t.3.iter().copied().map(BlockId).collect()).collect();
    let tables = tables.iter().zip(&blocks).map(|(t, blocks)| GroupTable {
        group: t.0,
        block_tokens: NonZeroU32::new(t.1).unwrap(),
        blocks,
        need: t.2,
    });
    let (key, scheduled, lost) = (0, 0, false);
    let requests = [Holder { key, tables: tables.collect(), computed, scheduled, state: PARKED, lost }];
    let (pool, null, policy) = (100, Some(BlockId(0)), Policy::Recompute);
    judge(&Situation { requests: &requests, invalid, pool, null, policy })
}

#[test]
fn the_cut_is_valid_in_every_group() {
    let full = (0, 16, Need::All, &[1, 2, 3, 4, 5, 6][..]);
    let wide = (1, 32, Need::All, &[11, 12, 13][..]);
    let keep = |tables: &[_], invalid: &[_]| groups(96, tables, invalid).cuts[0].keep_tokens;
    assert_eq!(keep(&[full, wide], &[BlockRef::any(4)]), 32, "whole blocks of 32");
    assert_eq!(keep(&[full, wide], &[BlockRef::any(13)]), 64);
    assert_eq!(keep(&[full, wide], &[BlockRef::of(0, 13)]), 96, "another group's block");
    // A window of 32 tokens: the first blocks are gone and do not matter where the request stands.
    let window = (2, 16, Need::Window { tokens: 32 }, &[0, 0, 23, 24, 25, 26][..]);
    assert_eq!(keep(&[full, window], &[]), 96);
    assert_eq!(keep(&[full, window], &[BlockRef::any(23)]), 96, "before the window");
    assert_eq!(keep(&[full, window], &[BlockRef::any(6)]), 80, "the window before 80 is there");
    assert_eq!(keep(&[full, window], &[BlockRef::any(26)]), 80);
    // From 48 the window would need block 2, which is not there; from nothing it needs nothing.
    assert_eq!(keep(&[full, window], &[BlockRef::any(4)]), 0);
    // A state for one position: it cannot go back but to the start.
    let state = (3, 16, Need::From { block: 5 }, &[0, 0, 0, 0, 0, 36][..]);
    assert_eq!(keep(&[full, state], &[]), 96);
    assert_eq!(keep(&[full, state], &[BlockRef::any(36)]), 0);
    // Only later blocks matter where the request stands, but the earlier ones are there: it can go back to them.
    let kept = (3, 16, Need::From { block: 4 }, &[31, 32, 33, 34, 35, 36][..]);
    assert_eq!(keep(&[full, kept], &[BlockRef::any(32)]), 96);
    assert_eq!(keep(&[full, kept], &[BlockRef::any(36)]), 80);
    assert_eq!(keep(&[full, kept], &[BlockRef::any(36), BlockRef::any(32)]), 16);
}

#[test]
fn lists_by_group_are_blocks_of_their_groups() {
    let list = |ids: &[u32]| ids.iter().copied().map(BlockId).collect();
    let blocks = BlockRef::of_lists(&[list(&[4, 6]), list(&[]), list(&[1])]);
    assert_eq!(blocks, [BlockRef::of(0, 4), BlockRef::of(0, 6), BlockRef::of(2, 1)]);
}
