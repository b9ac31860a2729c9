//! A load in portions: what is read at once, and then checked, so that a failure does not spoil what came before.

use kv_proto::{BlockLayout, BlockList, GroupBlocks, GroupKind};

use crate::shape::SourcePlan;

/// The blocks of a load that have not been ordered yet, first ones first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Portions {
    groups: Vec<GroupBlocks>,
    /// Local blocks of each group in a portion.
    step: u32,
    /// Local blocks of each group that have been taken.
    taken: u32,
    /// Local blocks of each group.
    total: u32,
    /// Tokens of a local block, and of a remote one.
    block_tokens: (u64, u64),
}

fn slice(list: &BlockList, from: u32, count: u32) -> BlockList {
    list.iter().skip(from as usize).take(count as usize).collect()
}

impl Portions {
    /// Cuts a load so that a portion has about so many bytes of ours, and at least one block of each group. Where groups
    /// have unequal lengths, or one of them makes sense only as a whole, nothing is cut.
    pub fn of(groups: Vec<GroupBlocks>, plan: &SourcePlan, layout: &BlockLayout, bytes: u64) -> Self {
        let total = groups.iter().map(|group| group.local.len()).max().unwrap_or(0);
        let in_parts = |group: &GroupBlocks| {
            group.local.len() == total && plan.group_kind(group.group) == Some(GroupKind::Full)
        };
        let alike = groups.iter().all(in_parts);
        let position: u64 = layout
            .regions
            .iter()
            .filter(|region| groups.iter().any(|group| group.group == region.group))
            .map(|region| region.block_bytes)
            .fold(0, u64::saturating_add);
        let step = if alike { bytes.checked_div(position).unwrap_or(u64::MAX).max(1) } else { u64::MAX };
        let step = u32::try_from(step).unwrap_or(u32::MAX).min(total.max(1));
        Self { groups, step, taken: 0, total, block_tokens: plan.block_tokens() }
    }

    /// The next portion. Empty when everything was taken.
    pub fn take(&mut self) -> Vec<GroupBlocks> {
        let (from, count) = (self.taken, self.step.min(self.total - self.taken));
        self.taken += count;
        if count == self.total {
            return self.groups.clone();
        }
        self.groups.iter().map(|group| self.part(group, from, count)).collect()
    }

    /// So many local blocks of a group, and the remote ones that hold their tokens.
    fn part(&self, group: &GroupBlocks, from: u32, count: u32) -> GroupBlocks {
        let (ours, theirs) = self.block_tokens;
        let first = group.first.saturating_add(from);
        let begin = u64::from(first) * ours;
        let end = (begin + u64::from(count) * ours).min(u64::from(group.tokens));
        // Both are positions of blocks in the list, whose length is a 32-bit number.
        let narrow = |position: u64| u32::try_from(position).unwrap_or(u32::MAX);
        let remote_first = narrow(begin / theirs.max(1)).max(group.remote_first);
        let remote_end = narrow(end.div_ceil(theirs.max(1)));
        let skipped = remote_first - group.remote_first;
        GroupBlocks {
            group: group.group,
            first,
            remote_first,
            tokens: narrow(end),
            remote: slice(&group.remote, skipped, remote_end.saturating_sub(remote_first)),
            local: slice(&group.local, from, count),
        }
    }

    /// Goes back, or forward, to where so many blocks of each group have been taken.
    pub fn resume_at(&mut self, taken: u32) {
        self.taken = taken.min(self.total);
    }

    /// The whole load, whatever was taken.
    pub fn into_groups(self) -> Vec<GroupBlocks> {
        self.groups
    }

    /// Blocks of each group that have been taken.
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Whether everything was taken.
    pub fn is_over(&self) -> bool {
        self.taken >= self.total
    }
}

#[cfg(test)]
mod tests {
    use kv_proto::{BlockId, BlockOrder, Dtype, RegionKind, RegionLayout};

    use super::*;

    fn layout(layers: u32) -> BlockLayout {
        let region = |layer: u32| RegionLayout {
            layer: format!("l{layer}"),
            kind: RegionKind::KeyValue,
            group: 0,
            memory: 0,
            base: 0,
            block_stride: 64,
            block_bytes: 64,
            dtype: Dtype::F32,
            heads: 1,
            heads_total: 0,
            head_size: 4,
        };
        let regions = (0..layers).map(region).collect();
        BlockLayout { block_tokens: 4, blocks: 100, kernel_tokens: 0, order: BlockOrder::HeadsTokens, groups: vec![], regions }
    }

    fn group(count: u32) -> GroupBlocks {
        let list = |from: u32| (from..from + count).map(BlockId).collect();
        GroupBlocks { group: 0, first: 3, remote: list(10), local: list(50) }
    }

    fn cut(count: u32, bytes: u64) -> Vec<(u32, u32)> {
        let mut portions = Portions::of(vec![group(count)], &layout(2), bytes);
        let mut cut = Vec::new();
        while !portions.is_over() {
            let groups = portions.take();
            assert_eq!(groups[0].remote.len(), groups[0].local.len());
            cut.push((groups[0].first, groups[0].local.len()));
        }
        assert_eq!(portions.taken(), count);
        cut
    }

    #[test]
    fn portions_cover_everything_in_order_and_once() {
        assert_eq!(cut(5, 256), [(3, 2), (5, 2), (7, 1)]);
        assert_eq!(cut(4, 256), [(3, 2), (5, 2)]);
        assert_eq!(cut(5, 1), [(3, 1), (4, 1), (5, 1), (6, 1), (7, 1)], "a block is the least");
        assert_eq!(cut(5, u64::MAX), [(3, 5)]);
        assert_eq!(cut(0, 256), []);
    }

    #[test]
    fn a_load_can_go_on_where_it_was() {
        let mut portions = Portions::of(vec![group(5)], &layout(2), 256);
        portions.take();
        portions.take();
        portions.resume_at(2);
        assert_eq!((portions.take()[0].first, portions.take()[0].local.len()), (5, 1));
        assert_eq!(portions.into_groups(), [group(5)]);
    }

    #[test]
    fn groups_of_unequal_lengths_are_read_at_once() {
        let mut portions = Portions::of(vec![group(5), group(3)], &layout(2), 1);
        assert_eq!(portions.take().len(), 2);
        assert!(portions.is_over());
    }
}
