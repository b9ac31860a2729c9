//! What checksums cost: digests of blocks beside a copy of the same bytes.
//!
//! `cargo bench -p kv-worker --bench digest`
#![allow(clippy::unwrap_used)] // A benchmark that cannot be set up has nothing to say.

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use kv_proto::message::GroupList;
use kv_proto::{BlockId, BlockLayout, BlockOrder, Dtype, RegionKind, RegionLayout};
use kv_transport::Memory;
use kv_worker::digest::Digester;

/// More than the caches hold.
const BYTES: u64 = 256 << 20;
/// Bytes of a block in one region.
const SIZES: [u64; 3] = [16 << 10, 64 << 10, 1 << 20];

fn main() {
    divan::main();
}

fn memory() -> Memory {
    let memory = Memory::allocate(BYTES as usize).unwrap();
    let page: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for at in (0..BYTES).step_by(page.len()) {
        memory.write(at, &page).unwrap();
    }
    memory
}

/// Eight layers, so that a position's bytes do not lie together.
fn layout(size: u64) -> BlockLayout {
    let blocks = BYTES / 8 / size;
    let region = |layer: u64| RegionLayout {
        layer: format!("layers.{layer}"),
        kind: RegionKind::KeyValue,
        group: 0,
        memory: 0,
        base: layer * blocks * size,
        block_stride: size,
        block_bytes: size,
        dtype: Dtype::U8,
        heads: 1,
        heads_total: 0,
        head_size: (size / 16) as u32,
    };
    BlockLayout {
        block_tokens: 16,
        blocks: blocks as u32,
        kernel_tokens: 0,
        order: BlockOrder::HeadsTokens,
        groups: vec![],
        regions: (0..8).map(region).collect(),
    }
}

/// Blocks in an order without neighbours.
fn order(blocks: u32) -> impl Iterator<Item = u32> {
    (0..blocks).map(move |i| i / 2 + (i % 2) * (blocks / 2))
}

#[divan::bench(args = SIZES, sample_count = 20, sample_size = 1)]
fn digest(bencher: Bencher<'_, '_>, size: u64) {
    let layout = layout(size);
    let groups = [GroupList { group: 0, blocks: order(layout.blocks).map(BlockId).collect() }];
    let digester = Digester::new(layout, vec![memory()]);
    bencher.counter(BytesCount::new(BYTES)).bench_local(|| digester.digest(black_box(&groups)).unwrap());
}

#[divan::bench(args = SIZES, sample_count = 20, sample_size = 1)]
fn memcpy(bencher: Bencher<'_, '_>, size: u64) {
    let layout = layout(size);
    let (from, mut into) = (memory(), vec![0; BYTES as usize]);
    bencher.counter(BytesCount::new(BYTES)).bench_local(|| {
        let mut places = into.chunks_mut(size as usize);
        for block in order(layout.blocks) {
            for region in &layout.regions {
                let at = region.base + u64::from(block) * region.block_stride;
                from.read(at, places.next().unwrap()).unwrap();
            }
        }
        black_box(&mut into);
    });
}
