//! The rule over block tables against a slow model of it.
#![allow(clippy::unwrap_used)] // A failed check is a failed test.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use kv_proto::BlockId;
use kv_recovery::{BlockRef, GroupTable, Holder, LoadState, Need, Policy, Situation, judge};
use proptest::prelude::*;

const POOL: u32 = 24;

#[derive(Debug, Clone)]
struct Table {
    block_tokens: u32,
    blocks: Vec<u32>,
    need: Need,
}

#[derive(Debug, Clone)]
struct Request {
    tables: Vec<Table>,
    computed: u32,
    scheduled: u32,
    state: LoadState,
    lost: bool,
}

fn need() -> impl Strategy<Value = Need> {
    prop_oneof![
        3 => Just(Need::All),
        1 => (0u32..40).prop_map(|tokens| Need::Window { tokens }),
        1 => (0u32..6).prop_map(|block| Need::From { block }),
    ]
}

fn table() -> impl Strategy<Value = Table> {
    // Few ids, so that tables share blocks; 0 is null, and some are beyond the pool.
    let blocks = prop::collection::vec(0..POOL + 1, 0..9);
    (prop_oneof![Just(4u32), Just(8), Just(6)], blocks, need())
        .prop_map(|(block_tokens, blocks, need)| Table { block_tokens, blocks, need })
}

fn request() -> impl Strategy<Value = Request> {
    let state = prop_oneof![
        Just(LoadState::Running),
        (0u32..40).prop_map(|cached_tokens| LoadState::Parked { cached_tokens })
    ];
    (prop::collection::vec(table(), 1..3), 0u32..60, 0u32..12, state, prop::bool::weighted(0.1)).prop_map(
        |(tables, computed, scheduled, state, lost)| Request { tables, computed, scheduled, state, lost },
    )
}

fn reports() -> impl Strategy<Value = Vec<(Option<u32>, u32)>> {
    prop::collection::vec((prop::option::weighted(0.3, 0u32..3), 0..POOL + 2), 0..5)
}

/// Cuts, evictions.
type Answer = (Vec<(bool, u32)>, BTreeSet<(Option<u32>, u32)>);

fn ours(requests: &[Request], reports: &[(Option<u32>, u32)]) -> Answer {
    let ids: Vec<Vec<Vec<BlockId>>> = (requests.iter())
        .map(|r| r.tables.iter().map(|t| t.blocks.iter().copied().map(BlockId).collect()).collect())
        .collect();
    let holders: Vec<_> = requests
        .iter()
        .zip(&ids)
        .enumerate()
        .map(|(key, (r, ids))| Holder {
            key,
            tables: (r.tables.iter().zip(ids).enumerate())
                .map(|(group, (t, blocks))| GroupTable {
                    group: group as u32,
                    block_tokens: NonZeroU32::new(t.block_tokens).unwrap(),
                    blocks,
                    need: t.need,
                })
                .collect(),
            computed: r.computed,
            scheduled: r.scheduled,
            state: r.state,
            lost: r.lost,
        })
        .collect();
    let invalid: Vec<_> =
        reports.iter().map(|(group, id)| BlockRef { group: *group, block: BlockId(*id) }).collect();
    let judged = judge(&Situation {
        requests: &holders,
        invalid: &invalid,
        pool: POOL,
        null: Some(BlockId(0)),
        policy: Policy::Fail,
    });
    let affected: Vec<usize> = judged.cuts.iter().filter(|c| c.affected).map(|c| c.key).collect();
    assert_eq!(judged.end, affected);
    assert!(judged.evict.is_sorted_by(|a, b| a < b), "in order and each once");
    let cuts = judged.cuts.iter().map(|cut| (cut.affected, cut.keep_tokens)).collect();
    (cuts, judged.evict.iter().map(|b| (b.group, b.block.0)).collect())
}

/// Positions that a group needs so that its request can go on from a token.
fn needed(table: &Table, token: u32, stands: bool) -> impl Iterator<Item = u32> {
    let from = match table.need {
        Need::All => 0,
        Need::Window { tokens } => token.saturating_sub(tokens) / table.block_tokens,
        Need::From { block } => {
            if stands {
                block
            } else {
                0
            }
        }
    };
    from..token.div_ceil(table.block_tokens)
}

type Bad = BTreeSet<(u32, u32)>;

fn is_block(id: u32) -> bool {
    id != 0 && id < POOL
}

/// First token that a request has from a load that was lost.
fn lost_from(r: &Request, table: &Table) -> u32 {
    match r.state {
        _ if !r.lost => u32::MAX,
        LoadState::Running => 0,
        LoadState::Parked { cached_tokens } => cached_tokens / table.block_tokens,
    }
}

/// Tokens at which needed bad blocks begin, where the request stands.
fn bad_tokens(r: &Request, bad: &Bad) -> Vec<u32> {
    let base = r.computed.saturating_sub(r.scheduled);
    let mut tokens = Vec::new();
    for (group, table) in r.tables.iter().enumerate() {
        for p in needed(table, base, true) {
            let id = table.blocks.get(p as usize).copied();
            // A lost load may have lost blocks that the table does not even show.
            let lost = p >= lost_from(r, table);
            if lost || id.is_some_and(|id| is_block(id) && bad.contains(&(group as u32, id))) {
                tokens.push(p * table.block_tokens);
            }
        }
    }
    tokens
}

fn model(requests: &[Request], reports: &[(Option<u32>, u32)]) -> (Answer, Bad) {
    let mut bad = Bad::new();
    for (group, id) in reports.iter().filter(|(_, id)| is_block(*id)) {
        bad.extend((0..3).filter(|g| group.is_none_or(|group| group == *g)).map(|g| (g, *id)));
    }
    let reported = bad.clone();
    let mut evict = Bad::new();
    loop {
        let before = bad.clone();
        for r in requests {
            let Some(first) = bad_tokens(r, &before).into_iter().min() else { continue };
            for (group, table) in r.tables.iter().enumerate() {
                for (p, id) in table.blocks.iter().enumerate() {
                    let (start, end) = (p as u32 * table.block_tokens, (p as u32 + 1) * table.block_tokens);
                    let cached = match r.state {
                        LoadState::Running => true,
                        LoadState::Parked { cached_tokens } => end <= cached_tokens,
                    };
                    if is_block(*id) && cached && (start >= first || end > first) {
                        bad.insert((group as u32, *id));
                        evict.insert((group as u32, *id));
                    }
                }
            }
        }
        if bad == before {
            break;
        }
    }
    // Reported blocks in the cache that no request stands on, and those that nobody holds.
    let mut evict: BTreeSet<_> = evict.into_iter().map(|(group, id)| (Some(group), id)).collect();
    for r in requests {
        let base = r.computed.saturating_sub(r.scheduled);
        for (group, table) in r.tables.iter().enumerate() {
            for (p, id) in table.blocks.iter().enumerate() {
                let (start, end) = (p as u32 * table.block_tokens, (p as u32 + 1) * table.block_tokens);
                let cached = match r.state {
                    LoadState::Running => true,
                    LoadState::Parked { cached_tokens } => end <= cached_tokens,
                };
                if reported.contains(&(group as u32, *id)) && cached && start < base {
                    evict.insert((Some(group as u32), *id));
                }
            }
        }
    }
    for (group, id) in reports.iter().filter(|(_, id)| is_block(*id)) {
        let holds = |r: &Request| {
            r.tables
                .iter()
                .enumerate()
                .any(|(g, t)| group.is_none_or(|group| group == g as u32) && t.blocks.contains(id))
        };
        if !requests.iter().any(holds) {
            evict.insert((*group, *id));
        }
    }
    let cuts = requests.iter().map(|r| {
        if bad_tokens(r, &bad).is_empty() {
            return (false, r.computed);
        }
        let sound = |token: u32| {
            r.tables.iter().enumerate().all(|(group, table)| {
                token.is_multiple_of(table.block_tokens)
                    && needed(table, token, false).all(|p| {
                        p < lost_from(r, table)
                            && table
                                .blocks
                                .get(p as usize)
                                .is_some_and(|id| is_block(*id) && !bad.contains(&(group as u32, *id)))
                    })
            })
        };
        let first = bad_tokens(r, &bad).into_iter().min().unwrap_or(0);
        (true, (0..=first).rev().find(|token| sound(*token)).unwrap_or(0))
    });
    ((cuts.collect(), evict), bad)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// P8: nobody counts a bad block as computed, and nobody gives up more than the model says is needed.
    #[test]
    fn the_rule_is_the_models(requests in prop::collection::vec(request(), 1..5), reports in reports()) {
        let (expected, bad) = model(&requests, &reports);
        let answer = ours(&requests, &reports);
        for (r, (affected, keep)) in requests.iter().zip(&answer.0) {
            let stands = if *affected { *keep } else { r.computed.saturating_sub(r.scheduled) };
            for (group, table) in r.tables.iter().enumerate() {
                for p in needed(table, stands, !affected) {
                    let id = table.blocks.get(p as usize).copied().unwrap_or(0);
                    prop_assert!(!bad.contains(&(group as u32, id)), "block {id} of group {group} counts as computed");
                }
            }
        }
        prop_assert_eq!(answer, expected);
    }

    /// The order of requests and of reports changes nothing but the order of the answers.
    #[test]
    fn order_does_not_matter(
        requests in prop::collection::vec(request(), 1..6),
        reports in reports(),
        turn in 0usize..6,
    ) {
        let (cuts, evict) = ours(&requests, &reports);
        let mut turned = requests.clone();
        turned.reverse();
        let turn = turn % requests.len();
        turned.rotate_left(turn);
        let back: Vec<_> = reports.iter().rev().copied().collect();
        let (mut other, other_evict) = ours(&turned, &back);
        other.rotate_right(turn);
        other.reverse();
        prop_assert_eq!((other, other_evict), (cuts, evict));
    }
}
