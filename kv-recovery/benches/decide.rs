//! How long it takes to judge the requests of a step: 1,000 requests of 1,000 blocks, all affected.
#![allow(missing_docs)] // The macros' own items.

use std::num::NonZeroU32;

use divan::Bencher;
use kv_proto::BlockId;
use kv_recovery::{BlockRef, GroupTable, Holder, LoadState, Need, Policy, Situation, judge};

fn main() {
    divan::main();
}

const REQUESTS: usize = 1_000;
const BLOCKS: usize = 1_000;

/// Tables with the first `shared` blocks in common, the rest scattered over the pool.
fn tables(shared: usize) -> Vec<Vec<BlockId>> {
    let pool = (REQUESTS * BLOCKS) as u64;
    (0..REQUESTS)
        .map(|r| {
            let id = |b: usize| if b < shared { b } else { r * BLOCKS + b } as u64;
            // A step that is coprime to the pool's size visits each id once, neighbours far apart.
            (0..BLOCKS).map(|b| BlockId((id(b) * 611_953 % pool) as u32)).collect()
        })
        .collect()
}

fn bench(bencher: Bencher<'_, '_>, shared: usize, at: &[usize], state: LoadState) {
    let tables = tables(shared);
    let block_tokens = NonZeroU32::MIN.saturating_add(15);
    let requests: Vec<Holder<'_, u32>> = (tables.iter().enumerate())
        .map(|(key, blocks)| Holder {
            key: key as u32,
            tables: vec![GroupTable { group: 0, block_tokens, blocks, need: Need::All }],
            computed: (BLOCKS * 16) as u32,
            scheduled: 0,
            state,
            lost: false,
        })
        .collect();
    let invalid: Vec<BlockRef> =
        tables.iter().flat_map(|t| at.iter().map(|at| BlockRef::any(t[*at].0))).collect();
    let situation = Situation {
        requests: &requests,
        invalid: &invalid,
        pool: (REQUESTS * BLOCKS) as u32,
        null: None,
        policy: Policy::Recompute,
    };
    assert!(judge(&situation).cuts.iter().all(|cut| cut.affected));
    bencher.bench_local(|| judge(divan::black_box(&situation)));
}

/// Each request lost its last block.
#[divan::bench]
fn parked_last_block(bencher: Bencher<'_, '_>) {
    bench(bencher, 0, &[BLOCKS - 1], LoadState::Parked { cached_tokens: 0 });
}

/// Each request lost a block in the middle.
#[divan::bench]
fn parked_middle(bencher: Bencher<'_, '_>) {
    bench(bencher, 0, &[BLOCKS / 2], LoadState::Parked { cached_tokens: 0 });
}

/// As before, with ten blocks lost by each.
#[divan::bench]
fn parked_ten_blocks(bencher: Bencher<'_, '_>) {
    let at: Vec<usize> = (0..10).map(|i| 500 + i * 37).collect();
    bench(bencher, 0, &at, LoadState::Parked { cached_tokens: 0 });
}

/// Running requests: half of the pool leaves the cache.
#[divan::bench]
fn running_middle(bencher: Bencher<'_, '_>) {
    bench(bencher, 0, &[BLOCKS / 2], LoadState::Running);
}

/// Running requests with half of their blocks in common, the last common one invalid.
#[divan::bench]
fn running_shared(bencher: Bencher<'_, '_>) {
    bench(bencher, BLOCKS / 2, &[BLOCKS / 2 - 1], LoadState::Running);
}
