//! From blocks to bytes: the ranges that a load reads.

use std::collections::BTreeMap;

use kv_proto::{BlockLayout, GroupBlocks};
use kv_transport::{ReadPart, ReadRange, RegionId, RegionKey};
use thiserror::Error;

/// Why a load's blocks cannot be turned into ranges.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RangeError {
    /// A block that a pool does not have.
    #[error("{side} block {highest} of group {group} is beyond the pool of {blocks}")]
    BeyondPool {
        /// `local` or `remote`.
        side: &'static str,
        /// The group.
        group: u32,
        /// Highest id named.
        highest: u64,
        /// Blocks in that pool.
        blocks: u32,
    },
    /// Lists of unequal length.
    #[error("group {group}: {remote} remote blocks for {local} local ones")]
    Unequal {
        /// The group.
        group: u32,
        /// Remote blocks.
        remote: u32,
        /// Local blocks.
        local: u32,
    },
    /// A group without a region.
    #[error("group {group} has no region here")]
    UnknownGroup {
        /// The group.
        group: u32,
    },
    /// The two layouts do not have the same regions; the handshake should have refused.
    #[error("region {index}: ours has {ours} bytes a block, theirs {theirs}")]
    Regions {
        /// Index of the region.
        index: usize,
        /// Our block bytes, 0 if we have no such region.
        ours: u64,
        /// Their block bytes, 0 if they have no such region.
        theirs: u64,
    },
}

/// One side of a pair: its layout, and by memory index whatever names the memory to the transport.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a, M> {
    /// Where blocks lie.
    pub layout: &'a BlockLayout,
    /// Names of the memories.
    pub memories: &'a [M],
}

/// The reads that bring `groups` from the remote pool into the local one, neighbours merged.
///
/// Item `i` of a group's remote list goes to item `i` of its local list, in every region of the group. Ranges
/// that touch on both sides become one.
pub fn read_parts(
    local: Side<'_, RegionId>,
    remote: Side<'_, RegionKey>,
    groups: &[GroupBlocks],
) -> Result<Vec<ReadPart>, RangeError> {
    check_groups(local.layout, remote.layout, groups)?;
    let mut parts: BTreeMap<(u32, u32), Vec<ReadRange>> = BTreeMap::new();
    let pairs = local.layout.regions.len().max(remote.layout.regions.len());
    for index in 0..pairs {
        let (ours, theirs) = (local.layout.regions.get(index), remote.layout.regions.get(index));
        let bytes = |r: Option<&kv_proto::RegionLayout>| r.map_or(0, |r| r.block_bytes);
        let (Some(our), Some(their)) = (ours, theirs) else {
            return Err(RangeError::Regions { index, ours: bytes(ours), theirs: bytes(theirs) });
        };
        if our.block_bytes != their.block_bytes {
            return Err(RangeError::Regions { index, ours: our.block_bytes, theirs: their.block_bytes });
        }
        for group in groups.iter().filter(|g| g.group == our.group) {
            let ranges = parts.entry((their.memory, our.memory)).or_default();
            ranges.reserve(group.local.len() as usize);
            for (from, to) in group.remote.iter().zip(group.local.iter()) {
                ranges.push(ReadRange {
                    remote_offset: their.base + u64::from(from.0) * their.block_stride,
                    local_offset: our.base + u64::from(to.0) * our.block_stride,
                    len: our.block_bytes,
                });
            }
        }
    }
    let mut read = Vec::with_capacity(parts.len());
    for ((theirs, ours), ranges) in parts {
        let (Some(key), Some(region)) =
            (remote.memories.get(theirs as usize), local.memories.get(ours as usize))
        else {
            // Both layouts were checked against their memories; a card that lies about it stops here.
            return Err(RangeError::Regions { index: 0, ours: u64::from(ours), theirs: u64::from(theirs) });
        };
        if !ranges.is_empty() {
            read.push(ReadPart { key: key.clone(), region: *region, ranges: merge(ranges) });
        }
    }
    Ok(read)
}

/// Whether both pools have these blocks, in lists of equal length.
pub fn check_groups(
    local: &BlockLayout,
    remote: &BlockLayout,
    groups: &[GroupBlocks],
) -> Result<(), RangeError> {
    groups.iter().try_for_each(|group| check_group(local, remote, group))
}

fn check_group(local: &BlockLayout, remote: &BlockLayout, group: &GroupBlocks) -> Result<(), RangeError> {
    for (side, list, blocks) in
        [("local", &group.local, local.blocks), ("remote", &group.remote, remote.blocks)]
    {
        if !list.fits(blocks) {
            let highest = list.highest().map_or(u64::MAX, |b| u64::from(b.0));
            return Err(RangeError::BeyondPool { side, group: group.group, highest, blocks });
        }
    }
    let (theirs, ours) = (group.remote.len(), group.local.len());
    if theirs != ours {
        return Err(RangeError::Unequal { group: group.group, remote: theirs, local: ours });
    }
    if !local.regions.iter().any(|r| r.group == group.group) {
        return Err(RangeError::UnknownGroup { group: group.group });
    }
    Ok(())
}

/// Joins ranges that touch on both sides.
fn merge(mut ranges: Vec<ReadRange>) -> Vec<ReadRange> {
    if !ranges.is_sorted_by_key(|r| r.local_offset) {
        ranges.sort_unstable_by_key(|r| r.local_offset);
    }
    let mut merged: Vec<ReadRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last)
                if last.local_offset + last.len == range.local_offset
                    && last.remote_offset + last.len == range.remote_offset =>
            {
                last.len += range.len;
            }
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use kv_proto::{BlockId, BlockList, BlockOrder, Dtype, RegionKind, RegionLayout};

    use super::*;

    fn layout(layers: u64, blocks: u32, gap: u64) -> BlockLayout {
        let region = |i: u64| RegionLayout {
            layer: format!("layers.{i}"),
            kind: RegionKind::KeyValue,
            group: 0,
            memory: 0,
            base: i * u64::from(blocks) * (64 + gap),
            block_stride: 64 + gap,
            block_bytes: 64,
            dtype: Dtype::F32,
            heads: 1,
            head_size: 4,
        };
        BlockLayout {
            block_tokens: 4,
            blocks,
            order: BlockOrder::HeadsTokens,
            regions: (0..layers).map(region).collect(),
        }
    }

    fn group(remote: &[u32], local: &[u32]) -> GroupBlocks {
        let list = |ids: &[u32]| ids.iter().copied().map(BlockId).collect::<BlockList>();
        GroupBlocks { group: 0, first: 0, remote: list(remote), local: list(local) }
    }

    fn parts(
        ours: &BlockLayout,
        theirs: &BlockLayout,
        group: GroupBlocks,
    ) -> Result<Vec<ReadPart>, RangeError> {
        let key = [RegionKey::from_bytes(vec![1]).unwrap()];
        let local = Side { layout: ours, memories: &[RegionId(0)] };
        read_parts(local, Side { layout: theirs, memories: &key }, &[group])
    }

    #[test]
    fn each_block_goes_to_its_partner_in_every_layer() {
        let (ours, theirs) = (layout(2, 8, 0), layout(2, 4, 0));
        let parts = parts(&ours, &theirs, group(&[3, 0], &[1, 6])).unwrap();
        let got: Vec<_> = parts[0].ranges.iter().map(|r| (r.remote_offset, r.local_offset, r.len)).collect();
        assert_eq!(got, [(192, 64, 64), (0, 384, 64), (448, 576, 64), (256, 896, 64)]);
    }

    #[test]
    fn neighbours_on_both_sides_merge_and_others_do_not() {
        let plain = layout(1, 8, 0);
        let ranges = |remote: &[u32], local: &[u32]| {
            parts(&plain, &plain, group(remote, local)).unwrap()[0].ranges.clone()
        };
        assert_eq!(ranges(&[2, 3, 4], &[5, 6, 7]).len(), 1);
        assert_eq!(ranges(&[2, 3, 4], &[5, 6, 7])[0].len, 192);
        assert_eq!(ranges(&[2, 3, 4], &[7, 6, 5]).len(), 3);
        assert_eq!(ranges(&[4, 3, 2], &[7, 6, 5]).len(), 1, "the order in the list does not matter");
        let gapped = layout(1, 8, 16);
        assert_eq!(parts(&plain, &gapped, group(&[2, 3], &[5, 6])).unwrap()[0].ranges.len(), 2);
        // All layers of one pool, whole: one range.
        let two = layout(2, 2, 0);
        assert_eq!(parts(&two, &two, group(&[0, 1], &[0, 1])).unwrap()[0].ranges.len(), 1);
    }

    #[test]
    fn bad_lists_are_refused_with_both_values() {
        let pool = layout(1, 8, 0);
        let refuse = |g: GroupBlocks| parts(&pool, &layout(1, 4, 0), g).unwrap_err().to_string();
        assert_eq!(refuse(group(&[4], &[0])), "remote block 4 of group 0 is beyond the pool of 4");
        assert_eq!(refuse(group(&[0], &[8])), "local block 8 of group 0 is beyond the pool of 8");
        assert_eq!(refuse(group(&[0, 1], &[0])), "group 0: 2 remote blocks for 1 local ones");
        assert_eq!(refuse(GroupBlocks { group: 3, ..group(&[0], &[0]) }), "group 3 has no region here");
        let other = parts(&pool, &layout(2, 8, 0), group(&[0], &[0])).unwrap_err();
        assert_eq!(other, RangeError::Regions { index: 1, ours: 0, theirs: 64 });
    }
}
