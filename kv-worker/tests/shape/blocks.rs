//! Blocks of a load: which of them are refused, in which words, and into how many ranges the others go.

use kv_proto::{
    BlockId, BlockLayout, BlockOrder, Dtype, GroupBlocks, GroupKind, Rank, RegionKind, RegionLayout, Topology,
};
use kv_transport::{ReadRange, RegionId, RegionKey};
use kv_worker::shape::{RemoteRank, Side, SourcePlan, check_blocks, compile};

const ROW: u64 = 8;

/// Two heads of eight bytes, in as many layers as there are groups; layers one after the other.
fn layout(block_tokens: u32, groups: &[GroupKind]) -> BlockLayout {
    let blocks = 12;
    let region = |group: u32| {
        let tokens = if groups[group as usize] == GroupKind::State { 1 } else { block_tokens };
        let block_bytes = 2 * ROW * u64::from(tokens);
        RegionLayout {
            layer: format!("layer.{group}"),
            kind: if tokens == 1 { RegionKind::Ssm } else { RegionKind::KeyValue },
            group,
            memory: 0,
            base: u64::from(group) * u64::from(blocks) * 2 * ROW * u64::from(block_tokens),
            block_stride: block_bytes,
            block_bytes,
            dtype: Dtype::U8,
            heads: 2,
            heads_total: 0,
            head_size: ROW as u32,
        }
    };
    let layout = BlockLayout {
        block_tokens,
        kernel_tokens: 0,
        blocks,
        order: BlockOrder::HeadsTokens,
        groups: groups.to_vec(),
        regions: (0..groups.len() as u32).map(region).collect(),
    };
    assert_eq!(layout.check(&[1 << 16]), Ok(()));
    layout
}

fn plan(ours: &BlockLayout, theirs: &BlockLayout) -> SourcePlan {
    let one = Topology::of(1);
    let remotes = [RemoteRank { rank: Rank(0), layout: theirs }];
    compile(ours, Rank(0), one, &remotes, one).unwrap().sources.remove(0)
}

fn group(tokens: u32, (first, local): (u32, &[u32]), (remote_first, remote): (u32, &[u32])) -> GroupBlocks {
    let list = |ids: &[u32]| ids.iter().copied().map(BlockId).collect();
    GroupBlocks { group: 0, first, remote_first, tokens, remote: list(remote), local: list(local) }
}

fn ranges(plan: &SourcePlan, groups: &[GroupBlocks]) -> Result<Vec<ReadRange>, String> {
    let key = RegionKey::from_bytes(vec![7]).unwrap();
    let side = Side { regions: &[RegionId(9)], keys: &[key] };
    let parts = plan.read_parts(side, groups).map_err(|e| e.to_string())?;
    Ok(parts.into_iter().flat_map(|part| part.ranges).collect())
}

/// Blocks of four tokens here and of eight there; a window of six tokens.
fn refusal(kind: GroupKind, group: GroupBlocks) -> String {
    let plan = plan(&layout(4, &[kind]), &layout(8, &[kind]));
    let checked = check_blocks(&plan, std::slice::from_ref(&group)).map_err(|e| e.to_string());
    let read = ranges(&plan, &[group]).map(|_| ());
    // Only a repeated block shows when the tokens are laid out.
    assert!(checked == read || checked.is_ok(), "{checked:?} {read:?}");
    read.unwrap_err()
}

const FULL: GroupKind = GroupKind::Full;
const WINDOW: GroupKind = GroupKind::Window { tokens: 6 };

#[test]
fn lists_that_do_not_hold_the_tokens_are_refused() {
    // Ten tokens: blocks 0 to 2 of ours, 0 and 1 of theirs.
    let local: (u32, &[u32]) = (0, &[4, 5, 6]);
    let remote: (u32, &[u32]) = (0, &[2, 3]);
    let sound = plan(&layout(4, &[FULL]), &layout(8, &[FULL]));
    assert_eq!(check_blocks(&sound, &[group(10, local, remote)]), Ok(()));
    let ends = |side, needed, got: u64| {
        format!(
            "group 0: 10 tokens end in {side} block {needed} of the sequence, the list ends with block {got}"
        )
    };
    assert_eq!(refusal(FULL, group(10, (0, &[4, 5]), remote)), ends("local", 3, 2));
    assert_eq!(refusal(FULL, group(10, (0, &[4, 5, 6, 7]), remote)), ends("local", 3, 4));
    assert_eq!(refusal(FULL, group(10, (1, &[4, 5, 6]), remote)), ends("local", 3, 4));
    assert_eq!(refusal(FULL, group(10, local, (0, &[2]))), ends("remote", 2, 1));
    assert_eq!(refusal(FULL, group(10, local, (0, &[2, 3, 4]))), ends("remote", 2, 3));
    assert_eq!(refusal(FULL, group(10, (0, &[]), remote)), ends("local", 3, 0));
    assert_eq!(refusal(FULL, group(10, (u32::MAX, &[1]), remote)), ends("local", 3, 1 << 32));
}

#[test]
fn blocks_beyond_a_pool_are_refused() {
    let local: (u32, &[u32]) = (0, &[4, 5, 6]);
    assert_eq!(
        refusal(FULL, group(10, (0, &[4, 12, 6]), (0, &[2, 3]))),
        "local block 12 of group 0 is beyond the pool of 12"
    );
    assert_eq!(
        refusal(FULL, group(10, local, (0, &[2, 4_000_000]))),
        "remote block 4000000 of group 0 is beyond the pool of 12"
    );
    assert_eq!(
        refusal(FULL, group(10, local, (0, &[2, u32::MAX]))),
        "remote block 4294967295 of group 0 is beyond the pool of 12"
    );
    let unknown = GroupBlocks { group: 3, ..group(10, local, (0, &[2, 3])) };
    assert_eq!(refusal(FULL, unknown), "group 3 has no region here");
}

#[test]
fn a_block_that_would_be_filled_twice_is_refused() {
    let twice = "group 0: local block 4 is named twice";
    assert_eq!(refusal(FULL, group(10, (0, &[4, 5, 4]), (0, &[2, 3]))), twice);
    let equal = plan(&layout(4, &[FULL]), &layout(4, &[FULL]));
    assert_eq!(ranges(&equal, &[group(8, (0, &[4, 4]), (0, &[2, 3]))]).unwrap_err(), twice);
    // To read a block of theirs twice does no harm.
    assert!(ranges(&equal, &[group(8, (0, &[4, 5]), (0, &[2, 2]))]).is_ok());
}

/// Groups that lie in the same memory: as [`layout`], with the bytes of each group's region changed.
fn aliased(groups: &[GroupKind], change: impl Fn(&mut BlockLayout)) -> SourcePlan {
    let mut ours = layout(4, groups);
    change(&mut ours);
    assert_eq!(ours.check(&[1 << 16]), Ok(()));
    plan(&ours, &layout(4, groups))
}

/// What is said of a load that names these blocks of ours for groups 0 and 1.
fn together(plan: &SourcePlan, first: &[u32], second: &[u32]) -> Result<(), String> {
    let of = |group: u32, local: &[u32]| {
        let is_state = plan.group_kind(group) == Some(GroupKind::State);
        let remote: Vec<u32> = (0..local.len() as u32).collect();
        let tokens = if is_state { 4 } else { 4 * local.len() as u32 };
        let list = |ids: &[u32]| ids.iter().copied().map(BlockId).collect();
        GroupBlocks { group, first: 0, remote_first: 0, tokens, remote: list(&remote), local: list(local) }
    };
    let groups = [of(0, first), of(1, second)];
    let checked = check_blocks(plan, &groups).map_err(|e| e.to_string());
    assert_eq!(ranges(plan, &groups).map(drop), checked, "what is read is what was checked");
    checked
}

fn shared(block: (u32, u32), bytes: (u64, u64)) -> Result<(), String> {
    let ((first, second), (from, to)) = (block, bytes);
    Err(format!(
        "local block {first} of group 0 and local block {second} of group 1 share bytes {from} to {to} of memory 0"
    ))
}

#[test]
fn one_block_for_two_groups_that_share_a_memory_is_refused() {
    // Block by block the memory is the one group's or the other's.
    let plan = aliased(&[FULL, WINDOW], |l| l.regions[1].base = 0);
    assert_eq!(together(&plan, &[1, 5], &[2, 4, 0]), Ok(()), "different blocks are no matter");
    assert_eq!(together(&plan, &[1, 5], &[2, 5]), shared((5, 5), (5 * 64, 6 * 64)));
    assert_eq!(together(&plan, &[7, 3, 2], &[3, 2]), shared((3, 3), (3 * 64, 4 * 64)), "the first of ours");
    // Groups that lie apart have blocks of the same number and no byte in common.
    let apart = aliased(&[FULL, WINDOW], |_| {});
    assert_eq!(together(&apart, &[1, 5], &[1, 5]), Ok(()));
    // Nor have groups whose blocks lie side by side in rows.
    let rows = aliased(&[FULL, WINDOW], |l| {
        l.regions.iter_mut().zip([0, 64]).for_each(|(r, base)| (r.base, r.block_stride) = (base, 128));
    });
    assert_eq!(together(&rows, &[1, 5], &[1, 5]), Ok(()));
}

#[test]
fn blocks_of_two_groups_that_share_a_few_bytes_are_refused() {
    // Shifted by half a block: each block of the one lies over two of the other.
    let shifted = aliased(&[FULL, WINDOW], |l| l.regions[1].base = 32);
    assert_eq!(together(&shifted, &[3], &[3]), shared((3, 3), (224, 256)));
    assert_eq!(together(&shifted, &[4], &[3]), shared((4, 3), (256, 288)));
    assert_eq!(together(&shifted, &[5], &[3]), Ok(()));
    // A state takes less than a block, at distances of its own.
    let state = |stride| {
        aliased(&[FULL, GroupKind::State], move |l| {
            (l.regions[1].base, l.regions[1].block_stride) = (0, stride)
        })
    };
    assert_eq!(together(&state(64), &[2], &[2]), shared((2, 2), (128, 144)));
    assert_eq!(together(&state(128), &[6], &[3]), shared((6, 3), (384, 400)));
    assert_eq!(together(&state(128), &[3], &[3]), Ok(()));
    assert_eq!(together(&state(48), &[0], &[1]), shared((0, 1), (48, 64)));
    assert_eq!(together(&state(48), &[1], &[1]), Ok(()));
    // Where the first blocks have nothing in common, later ones do.
    let later = aliased(&[FULL, GroupKind::State], |l| {
        (l.regions[1].base, l.regions[1].block_stride) = (100, 128);
    });
    assert_eq!(together(&later, &[1, 0], &[0]), shared((1, 0), (100, 116)));
    assert_eq!(together(&later, &[0, 2], &[0]), Ok(()));
}

#[test]
fn kernel_blocks_of_two_groups_may_lie_between_each_other() {
    // Two kernel blocks of 32 bytes, 128 apart: a block of the other group fits between them.
    let between = |base| {
        aliased(&[FULL, WINDOW], move |l| {
            l.kernel_tokens = 2;
            l.regions.iter_mut().zip([0, base]).for_each(|(r, base)| (r.base, r.block_stride) = (base, 256));
        })
    };
    assert_eq!(together(&between(32), &[1], &[1]), Ok(()));
    assert_eq!(together(&between(64), &[1], &[0]), Ok(()));
    assert_eq!(
        together(&between(128), &[1], &[1]),
        shared((1, 1), (384, 416)),
        "the second kernel block is the first"
    );
    assert_eq!(together(&between(128), &[2], &[1]), shared((2, 1), (512, 544)));
    assert_eq!(together(&between(128), &[3], &[1]), Ok(()));
}

#[test]
fn a_remote_list_may_begin_late_only_where_nobody_looks() {
    // Twenty tokens: the window begins at token 14, in the second of their blocks.
    let local: (u32, &[u32]) = (0, &[0, 1, 2, 3, 4]);
    assert_eq!(
        refusal(FULL, group(20, local, (1, &[1, 2]))),
        "group 0: the remote list begins at token 8, tokens from 0 on are needed"
    );
    assert_eq!(
        refusal(WINDOW, group(20, local, (2, &[2]))),
        "group 0: the remote list begins at token 16, tokens from 14 on are needed"
    );
    let plan = plan(&layout(4, &[WINDOW]), &layout(8, &[WINDOW]));
    let late = ranges(&plan, &[group(20, local, (1, &[1, 2]))]).unwrap();
    let first = late.iter().map(|range| range.local_offset).min().unwrap();
    assert_eq!(first, 2 * 2 * 4 * ROW, "blocks 0 and 1 of ours are not touched");
}

#[test]
fn a_state_is_one_block_on_each_side() {
    let state = GroupKind::State;
    let plan = plan(&layout(4, &[FULL, state]), &layout(8, &[FULL, state]));
    let of = |local: &[u32], remote: &[u32]| {
        let blocks = GroupBlocks { group: 1, ..group(10, (0, local), (0, remote)) };
        check_blocks(&plan, &[blocks]).map_err(|e| e.to_string())
    };
    assert_eq!(of(&[3], &[7]), Ok(()));
    let words = |side: &str, got: u32| {
        Err(format!("group 1: the state after 10 tokens is one block, the {side} list has {got}"))
    };
    assert_eq!(of(&[3, 4], &[7]), words("local", 2));
    assert_eq!(of(&[3], &[]), words("remote", 0));
}

#[test]
fn neighbours_on_both_sides_are_one_range() {
    let equal = plan(&layout(4, &[FULL]), &layout(4, &[FULL]));
    let block = 2 * 4 * ROW;
    let count = |local: &[u32], remote: &[u32]| {
        let tokens = 4 * local.len() as u32;
        ranges(&equal, &[group(tokens, (0, local), (0, remote))]).unwrap().len()
    };
    assert_eq!(count(&[0, 1, 2, 3], &[5, 6, 7, 8]), 1);
    assert_eq!(count(&[0, 1, 2, 3], &[5, 6, 8, 9]), 2);
    assert_eq!(count(&[3, 2, 1, 0], &[8, 7, 6, 5]), 1, "backwards on both sides is forwards");
    assert_eq!(count(&[3, 2, 1, 0], &[5, 6, 7, 8]), 4);
    assert_eq!(count(&[0, 2, 1, 3], &[5, 7, 6, 8]), 1, "in the same disorder on both sides");
    let all = ranges(&equal, &[group(16, (0, &[0, 1, 2, 3]), (0, &[5, 6, 7, 8]))]).unwrap();
    assert_eq!(all, [ReadRange { local_offset: 0, remote_offset: 5 * block, len: 4 * block }]);
}

#[test]
fn heads_lie_apart_where_blocks_are_cut() {
    // Blocks of eight tokens here and of four there: of each of theirs, each head's tokens are a piece of their own.
    let plan = plan(&layout(8, &[FULL]), &layout(4, &[FULL]));
    let load = [group(16, (0, &[1, 0]), (0, &[0, 1, 2, 3]))];
    assert_eq!(ranges(&plan, &load).unwrap().len(), 8);
    assert_eq!(plan.piece_count(&load), Ok(8));
    // The same, cut into single tokens by the other order: nothing but rows.
    let mut theirs = layout(4, &[FULL]);
    theirs.order = BlockOrder::TokensHeads;
    let plan = self::plan(&layout(8, &[FULL]), &theirs);
    assert_eq!(ranges(&plan, &load).unwrap().len(), 32);
}
