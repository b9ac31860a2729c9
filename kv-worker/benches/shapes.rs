//! What a pair of shapes costs: to compile it when two engines meet, and to apply it to the blocks of each load.
//!
//! ```text
//! cargo bench -p kv-worker --bench shapes
//! ```

#![allow(clippy::unwrap_used)] // A benchmark that cannot be set up has no result.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use kv_proto::{
    BlockId, BlockLayout, BlockOrder, Dtype, GroupBlocks, Rank, RegionKind, RegionLayout, Topology,
};
use kv_transport::{ReadPart, RegionId, RegionKey};
use kv_worker::shape::{RemoteRank, ShapePlan, Side, SourcePlan, compile};

const LAYERS: u32 = 80;
const HEADS: u32 = 8;
const BLOCKS: u32 = 4096;

fn main() {
    divan::main();
}

/// A rank's cache, as vLLM has it: each layer's keys and values in a memory of their own.
fn layout(topology: Topology, rank: u32, order: BlockOrder, together: bool) -> BlockLayout {
    let (_, heads) = topology.heads_of(Rank(rank), HEADS).unwrap();
    let kinds: &[(RegionKind, u32)] = if together {
        &[(RegionKind::KeyValue, 256)]
    } else {
        &[(RegionKind::Key, 128), (RegionKind::Value, 128)]
    };
    let mut regions = Vec::new();
    for layer in 0..LAYERS {
        for (part, (kind, head_size)) in kinds.iter().enumerate() {
            let block_bytes = u64::from(heads * 16 * head_size) * Dtype::Bf16.bytes();
            regions.push(RegionLayout {
                layer: format!("model.layers.{layer}.self_attn.attn"),
                kind: *kind,
                group: 0,
                memory: layer,
                base: part as u64 * u64::from(BLOCKS) * block_bytes,
                block_stride: block_bytes,
                block_bytes,
                dtype: Dtype::Bf16,
                heads,
                heads_total: HEADS,
                head_size: *head_size,
            });
        }
    }
    BlockLayout { block_tokens: 16, kernel_tokens: 0, blocks: BLOCKS, order, groups: vec![], regions }
}

const HND: BlockOrder = BlockOrder::HeadsTokens;

struct Pair {
    ours: BlockLayout,
    theirs: Vec<BlockLayout>,
    p: Topology,
    d: Topology,
}

impl Pair {
    fn of(p: u32, d: u32, theirs: (BlockOrder, bool), ours: (BlockOrder, bool)) -> Self {
        let (p, d) = (Topology::of(p), Topology::of(d));
        Self {
            ours: layout(d, 0, ours.0, ours.1),
            theirs: (0..p.ranks).map(|rank| layout(p, rank, theirs.0, theirs.1)).collect(),
            p,
            d,
        }
    }

    fn compile(&self) -> ShapePlan {
        let remotes =
            self.theirs.iter().zip(0..).map(|(layout, rank)| RemoteRank { rank: Rank(rank), layout });
        let remotes: Vec<RemoteRank<'_>> = remotes.collect();
        compile(&self.ours, Rank(0), self.d, &remotes, self.p).unwrap()
    }
}

/// One rank's plan: ranks of P, ranks of D.
#[divan::bench(args = [(8, 8), (1, 8), (8, 1)])]
fn compile_80_layers(bencher: Bencher<'_, '_>, (p, d): (u32, u32)) {
    let pair = Pair::of(p, d, (HND, false), (HND, false));
    bencher.bench_local(|| black_box(&pair).compile());
}

/// The same with keys and values apart there and together here.
#[divan::bench(args = [(8, 8), (1, 8), (8, 1)])]
fn compile_80_layers_together(bencher: Bencher<'_, '_>, (p, d): (u32, u32)) {
    let pair = Pair::of(p, d, (HND, false), (BlockOrder::TokensHeads, true));
    bencher.bench_local(|| black_box(&pair).compile());
}

struct Load {
    source: SourcePlan,
    groups: Vec<GroupBlocks>,
    regions: Vec<RegionId>,
    keys: Vec<RegionKey>,
    pieces: u64,
}

impl Load {
    fn of(pair: &Pair, scattered: bool, blocks: u32) -> Self {
        let source = pair.compile().sources.swap_remove(0);
        // Odd steps through a pool of a power of two: each block once. As the steps differ, no two of the blocks are
        // neighbours on both sides.
        let steps = if scattered { (1_657, 2_731) } else { (1, 1) };
        let list = |from: u32, step: u32| (0..blocks).map(|i| BlockId((from + i * step) % BLOCKS)).collect();
        let (local, remote) = (list(0, steps.0), list(7, steps.1));
        let groups =
            vec![GroupBlocks { group: 0, first: 0, remote_first: 0, tokens: blocks * 16, remote, local }];
        let pieces = source.piece_count(&groups).unwrap();
        let regions = (0..u64::from(LAYERS)).map(RegionId).collect();
        let keys = (0..LAYERS).map(|i| RegionKey::from_bytes(i.to_be_bytes().to_vec()).unwrap()).collect();
        let load = Self { source, groups, regions, keys, pieces };
        let ranges: usize = load.read().iter().map(|part| part.ranges.len()).sum();
        assert_eq!(ranges as u64 == pieces, scattered, "{ranges} ranges of {pieces} pieces");
        load
    }

    fn read(&self) -> Vec<ReadPart> {
        let side = Side { regions: &self.regions, keys: &self.keys };
        self.source.read_parts(side, black_box(&self.groups)).unwrap()
    }

    fn run(&self, bencher: Bencher<'_, '_>) {
        bencher.counter(ItemsCount::new(self.pieces)).bench_local(|| self.read());
    }
}

/// Items are ranges: no two of the blocks are neighbours.
#[divan::bench(args = [64, 1024, 4096])]
fn apply_equal_scattered(bencher: Bencher<'_, '_>, blocks: u32) {
    Load::of(&Pair::of(1, 1, (HND, false), (HND, false)), true, blocks).run(bencher);
}

/// Items are the blocks of each region, all of which become one range.
#[divan::bench(args = [64, 1024, 4088])]
fn apply_equal_merged(bencher: Bencher<'_, '_>, blocks: u32) {
    Load::of(&Pair::of(1, 1, (HND, false), (HND, false)), false, blocks).run(bencher);
}

/// Items are ranges: one for each head and block, as heads come from several ranks.
#[divan::bench(args = [64, 1024])]
fn apply_heads_scattered(bencher: Bencher<'_, '_>, blocks: u32) {
    Load::of(&Pair::of(1, 2, (HND, true), (HND, true)), true, blocks).run(bencher);
}

/// Items are ranges: one for each head of each token, as the order differs.
#[divan::bench(args = [64, 256])]
fn apply_another_order(bencher: Bencher<'_, '_>, blocks: u32) {
    Load::of(&Pair::of(1, 1, (HND, false), (BlockOrder::TokensHeads, false)), true, blocks).run(bencher);
}

/// What the ranges of a load move, in memory: as a transport does that copies straight out of a peer's mapped memory.
/// Blocks of 16 KiB (4 heads of 16 tokens) of one layer's keys and values, of which a third of a pool is moved.
fn copy(bencher: Bencher<'_, '_>, theirs: BlockOrder) {
    const MOVED: u32 = 1365;
    let pair = Pair::of(2, 2, (theirs, false), (HND, false));
    let load = Load::of(&pair, true, MOVED);
    let ranges = load.read().swap_remove(0).ranges;
    let bytes: u64 = ranges.iter().map(|range| range.len).sum();
    let size = 2 * BLOCKS as usize * (16 << 10);
    let source = vec![7u8; size];
    let mut destination = vec![1u8; size];
    bencher.counter(divan::counter::BytesCount::new(bytes)).bench_local(|| {
        for range in &ranges {
            let (from, to, len) =
                (range.remote_offset as usize, range.local_offset as usize, range.len as usize);
            destination[to..to + len].copy_from_slice(black_box(&source[from..from + len]));
        }
        black_box(&mut destination);
    });
}

/// Blocks as they are: what memcpy moves.
#[divan::bench]
fn copy_whole_blocks(bencher: Bencher<'_, '_>) {
    copy(bencher, HND);
}

/// Each head of each token by itself, since the order differs.
#[divan::bench]
fn copy_in_another_order(bencher: Bencher<'_, '_>) {
    copy(bencher, BlockOrder::TokensHeads);
}
