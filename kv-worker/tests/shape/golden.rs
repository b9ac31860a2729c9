//! Which ranks read from which: the mappings of vLLM's connector, asked of ours. Where ours does better, the test says so.

use kv_proto::{BlockLayout, BlockOrder, Dtype, GroupKind, Rank, RegionKind, RegionLayout, Topology};
use kv_worker::shape::{RemoteRank, ShapePlan, SourcePlan, compile};

const BLOCK_TOKENS: u32 = 4;
const HEAD_SIZE: u32 = 8;

/// One layer, and beside it the state of another where there are parts of one.
fn layout(topology: Topology, rank: u32, heads: u32, state: u32) -> BlockLayout {
    let region = |layer: &str, kind, group, total: u32, tokens: u32| {
        let (_, share) = topology.heads_of(Rank(rank), total).unwrap();
        let block_bytes = u64::from(share * tokens * HEAD_SIZE) * Dtype::Bf16.bytes();
        RegionLayout {
            layer: layer.to_owned(),
            kind,
            group,
            memory: group,
            base: 0,
            block_stride: block_bytes,
            block_bytes,
            dtype: Dtype::Bf16,
            heads: share,
            heads_total: total,
            head_size: HEAD_SIZE,
        }
    };
    let mut regions = vec![region("attention", RegionKind::KeyValue, 0, heads, BLOCK_TOKENS)];
    let mut groups = vec![GroupKind::Full];
    if state > 0 {
        regions.push(region("mamba", RegionKind::Ssm, 1, state, 1));
        groups.push(GroupKind::State);
    }
    let layout = BlockLayout {
        block_tokens: BLOCK_TOKENS,
        kernel_tokens: 0,
        blocks: 8,
        order: BlockOrder::HeadsTokens,
        groups,
        regions,
    };
    assert_eq!(layout.check(&[1 << 20, 1 << 20]), Ok(()));
    layout
}

/// What a consumer's rank does, in the words of the reference.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    /// Ranks that it has to do with.
    targets: Vec<u32>,
    /// Ranks that it reads attention from.
    sources: Vec<u32>,
    /// Which slot of its own heads, counted in what one source gives, each source fills.
    slots: Vec<(u32, u64)>,
    /// At which share of ours in their heads it begins to read, one for each source.
    offsets: Vec<u64>,
    /// Ranks that it reads a state from.
    state: Vec<u32>,
}

fn compiled(p: Topology, d: Topology, heads: u32, state: u32) -> Vec<ShapePlan> {
    let theirs: Vec<BlockLayout> = (0..p.ranks).map(|rank| layout(p, rank, heads, state)).collect();
    let remotes: Vec<RemoteRank<'_>> =
        theirs.iter().zip(0..).map(|(layout, rank)| RemoteRank { rank: Rank(rank), layout }).collect();
    let of = |rank| compile(&layout(d, rank, heads, state), Rank(rank), d, &remotes, p).unwrap();
    (0..d.ranks).map(of).collect()
}

fn rows(p: Topology, d: Topology, heads: u32, state: u32) -> Vec<Row> {
    let row = |plan: &ShapePlan| {
        let reads = |group: u32| -> Vec<&SourcePlan> {
            let has = |s: &&SourcePlan| s.copies.iter().any(|c| c.group == group);
            plan.sources.iter().filter(has).collect()
        };
        let head_bytes = u64::from(HEAD_SIZE * BLOCK_TOKENS) * Dtype::Bf16.bytes();
        let attention = reads(0);
        // Where blocks lie alike on both sides a copy is of whole blocks and has no heads of its own.
        let first = |s: &SourcePlan| s.copies.iter().copied().find(|c| c.group == 0).unwrap();
        let one = heads / heads.min(p.tensor().max(d.tensor()));
        let slot = |s: &SourcePlan| first(s).local.at / head_bytes / u64::from(one);
        let offset = |s: &SourcePlan| first(s).remote.at / head_bytes / u64::from(one);
        Row {
            targets: plan.sources.iter().map(|s| s.rank.0).collect(),
            sources: attention.iter().map(|s| s.rank.0).collect(),
            slots: attention.iter().map(|s| (s.rank.0, slot(s))).collect(),
            offsets: attention.iter().map(|s| offset(s)).collect(),
            state: reads(1).iter().map(|s| s.rank.0).collect(),
        }
    };
    compiled(p, d, heads, state).iter().map(row).collect()
}

/// A rank that reads from one other and has to do with no more.
fn one(source: u32, offset: u64) -> Row {
    Row {
        targets: vec![source],
        sources: vec![source],
        slots: vec![(source, 0)],
        offsets: vec![offset],
        state: vec![],
    }
}

fn several(targets: &[u32], sources: &[u32]) -> Row {
    Row {
        targets: targets.to_vec(),
        sources: sources.to_vec(),
        slots: sources.iter().copied().zip(0..).collect(),
        offsets: vec![0; sources.len()],
        state: vec![],
    }
}

/// How many consumers each rank of the producer has, where all have as many.
fn consumers(p: Topology, d: Topology) -> usize {
    let of = |rank| p.readers_of(Rank(rank), d).unwrap().len();
    let first = of(0);
    assert!((0..p.ranks).all(|rank| of(rank) == first), "{p:?} {d:?}");
    first
}

const fn tp(ranks: u32) -> Topology {
    Topology::of(ranks)
}

const fn dealt(ranks: u32) -> Topology {
    Topology { ranks, stages: 1, context: ranks }
}

#[test]
fn as_many_ranks_on_both_sides() {
    assert_eq!(rows(tp(2), tp(2), 8, 0), [one(0, 0), one(1, 0)]);
    assert_eq!(consumers(tp(2), tp(2)), 1);
}

#[test]
fn more_ranks_in_the_consumer() {
    assert_eq!(rows(tp(2), tp(4), 8, 0), [one(0, 0), one(0, 1), one(1, 0), one(1, 1)]);
    assert_eq!(consumers(tp(2), tp(4)), 2);
}

#[test]
fn more_ranks_in_the_producer() {
    assert_eq!(rows(tp(4), tp(2), 8, 0), [several(&[0, 1], &[0, 1]), several(&[2, 3], &[2, 3])]);
    assert_eq!(consumers(tp(4), tp(2)), 1);
}

#[test]
fn several_ranks_of_the_consumer_hold_the_same_head() {
    let expected = [one(0, 0), one(0, 0), one(0, 1), one(0, 1), one(1, 0), one(1, 0), one(1, 1), one(1, 1)];
    assert_eq!(rows(tp(2), tp(8), 4, 0), expected);
    assert_eq!(consumers(tp(2), tp(8)), 4);
    assert_eq!(rows(tp(1), tp(4), 2, 0), [one(0, 0), one(0, 0), one(0, 1), one(0, 1)]);
    assert_eq!(consumers(tp(1), tp(4)), 4);
}

/// The reference computes this mapping and then refuses it for plain attention; here it works.
#[test]
fn several_ranks_of_the_producer_hold_the_same_head() {
    let expected = [several(&[0, 1, 2, 3], &[0, 2]), several(&[4, 5, 6, 7], &[4, 6])];
    assert_eq!(rows(tp(8), tp(2), 4, 0), expected);
    assert_eq!(consumers(tp(8), tp(2)), 1);
}

/// The reference gives ranks 1 and 3 slots of attention heads too, which it does not read; a slot here is what is read.
#[test]
fn a_state_is_read_from_all_that_hold_a_part_of_it() {
    let expected = [
        Row { state: vec![0, 1, 2, 3], ..several(&[0, 1, 2, 3], &[0, 2]) },
        Row { state: vec![4, 5, 6, 7], ..several(&[4, 5, 6, 7], &[4, 6]) },
    ];
    assert_eq!(rows(tp(8), tp(2), 4, 8), expected);
}

#[test]
fn a_latent_is_read_once_and_the_others_are_only_told() {
    assert_eq!(rows(tp(4), tp(2), 1, 0), [several(&[0, 1], &[0]), several(&[2, 3], &[2])]);
    assert_eq!(consumers(tp(4), tp(2)), 1);
    assert_eq!(rows(tp(2), tp(4), 1, 0), [one(0, 0), one(0, 0), one(1, 0), one(1, 0)]);
    assert_eq!(consumers(tp(2), tp(4)), 2);
}

#[test]
fn tokens_that_are_dealt_out() {
    assert_eq!(rows(tp(4), dealt(4), 1, 0), [one(0, 0), one(1, 0), one(2, 0), one(3, 0)]);
    assert_eq!(consumers(tp(4), dealt(4)), 1);

    let sources = |p, d| -> Vec<Vec<u32>> { rows(p, d, 1, 0).into_iter().map(|row| row.sources).collect() };
    assert_eq!(sources(dealt(4), tp(2)), [[0, 1, 2, 3], [0, 1, 2, 3]]);
    assert_eq!(consumers(dealt(4), tp(2)), 2);
    assert_eq!(sources(dealt(4), dealt(2)), [[0, 2], [1, 3]]);
    assert_eq!(consumers(dealt(4), dealt(2)), 1);
    assert_eq!(sources(dealt(2), dealt(4)), [[0], [1], [0], [1]]);
    assert_eq!(consumers(dealt(2), dealt(4)), 2);
}

/// The reference refuses sizes of which neither divides the other. Here each rank's heads have to come out even, and
/// nothing else.
#[test]
fn sizes_of_which_neither_divides_the_other() {
    let targets: Vec<Vec<u32>> = rows(tp(2), tp(3), 6, 0).into_iter().map(|row| row.targets).collect();
    assert_eq!(targets, [vec![0], vec![0, 1], vec![1]]);
    // Rank of the producer, our first head, their first head: two heads each, from ranks with three.
    let head = u64::from(HEAD_SIZE * BLOCK_TOKENS) * Dtype::Bf16.bytes();
    let of = |s: &SourcePlan| (s.rank.0, s.copies[0].local.at / head, s.copies[0].remote.at / head);
    let plans = compiled(tp(2), tp(3), 6, 0);
    let firsts: Vec<Vec<(u32, u64, u64)>> =
        plans.iter().map(|p| p.sources.iter().map(of).collect()).collect();
    assert_eq!(firsts, [vec![(0, 0, 0)], vec![(0, 0, 2), (1, 1, 0)], vec![(1, 0, 1)]]);
}
