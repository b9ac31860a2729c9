//! Groups of ours whose blocks lie in the same bytes: a load must not fill such bytes twice.
//!
//! A paged cache may give one memory to several groups, block by block, so that blocks of different groups are never in
//! use at once. Lists that name such a block for both groups would have one fill what the other has just filled.

use kv_proto::{BlockLayout, GroupBlocks, GroupKind, RegionLayout};

use super::error::BlocksError;

/// A region of one group and one of a later group that have bytes in common, for some of their blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Overlap {
    memory: u32,
    groups: (u32, u32),
    places: (Places, Places),
}

/// Where a region's bytes are: `kernels` pieces of each block, at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Places {
    base: u64,
    block: u64,
    kernel: u64,
    kernels: u64,
    bytes: u64,
}

impl Places {
    fn of(layout: &BlockLayout, region: &RegionLayout) -> Self {
        let is_state = layout.group_kind(region.group) == GroupKind::State;
        let kernels = if is_state { 1 } else { u64::from(layout.kernel_blocks().max(1)) };
        let (block, bytes) = (region.block_stride, region.block_bytes / kernels);
        Self { base: region.base, block, kernel: block / kernels, kernels, bytes }
    }

    /// Where a block's kernel block begins. Blocks are counted with a sign, since all that matters is how far two are apart.
    fn at(&self, block: i128, kernel: u64) -> i128 {
        i128::from(self.base) + block * i128::from(self.block) + i128::from(kernel * self.kernel)
    }

    /// From a block's first byte to behind its last one.
    fn span(&self) -> i128 {
        i128::from((self.kernels - 1) * self.kernel + self.bytes)
    }
}

/// All overlaps of a layout. Regions that lie to each other as two others do make no second one.
pub(super) fn overlaps(layout: &BlockLayout) -> Vec<Overlap> {
    let mut regions: Vec<&RegionLayout> = layout.regions.iter().collect();
    regions.sort_by_key(|region| (region.memory, region.base));
    let mut found: Vec<Overlap> = Vec::new();
    for (index, first) in regions.iter().enumerate() {
        let last = Places::of(layout, first);
        let end = last.at(i128::from(layout.blocks) - 1, 0) + last.span();
        let near = |other: &&&RegionLayout| other.memory == first.memory && i128::from(other.base) < end;
        for second in regions[index + 1..].iter().take_while(near).filter(|other| other.group != first.group)
        {
            let (a, b) = if first.group < second.group { (first, second) } else { (second, first) };
            let places = (Places::of(layout, a), Places::of(layout, b));
            let new = Overlap { memory: first.memory, groups: (a.group, b.group), places };
            if new.is_possible(layout.blocks) && !found.iter().any(|known| known.is_like(&new)) {
                found.push(new);
            }
        }
    }
    found
}

impl Overlap {
    fn is_like(&self, other: &Self) -> bool {
        let shape = |of: &Self| {
            let place = |p: &Places| (p.block, p.kernel, p.kernels, p.bytes);
            let apart = i128::from(of.places.1.base) - i128::from(of.places.0.base);
            (of.groups, apart, place(&of.places.0), place(&of.places.1))
        };
        shape(self) == shape(other)
    }

    /// Whether any two blocks of the pool have bytes in common.
    fn is_possible(&self, blocks: u32) -> bool {
        // At unequal distances blocks come close sooner or later.
        self.places.0.block != self.places.1.block
            || self
                .partners(0)
                .any(|apart| apart.unsigned_abs() < u128::from(blocks) && self.common(0, apart).is_some())
    }

    /// The second group's blocks that lie near a block of the first.
    fn partners(&self, block: i128) -> impl Iterator<Item = i128> + use<> {
        let (a, b) = &self.places;
        let from = a.at(block, 0) - i128::from(b.base);
        let step = i128::from(b.block.max(1));
        (from - b.span()).div_euclid(step) + 1..=(from + a.span() - 1).div_euclid(step)
    }

    /// The first bytes that a block of each group have in common.
    fn common(&self, first: i128, second: i128) -> Option<(i128, i128)> {
        let (a, b) = &self.places;
        let (mut of_a, mut of_b) = (0, 0);
        while of_a < a.kernels && of_b < b.kernels {
            let (a_at, b_at) = (a.at(first, of_a), b.at(second, of_b));
            let (a_end, b_end) = (a_at + i128::from(a.bytes), b_at + i128::from(b.bytes));
            let (from, to) = (a_at.max(b_at), a_end.min(b_end));
            if from < to {
                return Some((from, to));
            }
            if a_end <= b_end { of_a += 1 } else { of_b += 1 }
        }
        None
    }

    /// Refuses lists that would have bytes filled twice.
    fn check(&self, groups: &[GroupBlocks]) -> Result<(), BlocksError> {
        let of = |group: u32| groups.iter().filter(move |g| g.group == group).flat_map(|g| g.local.iter());
        let mut others: Vec<i128> = of(self.groups.1).map(|block| block.0.into()).collect();
        others.sort_unstable();
        if others.is_empty() {
            return Ok(());
        }
        for block in of(self.groups.0) {
            for other in self.partners(block.0.into()).filter(|other| others.binary_search(other).is_ok()) {
                let Some((from, to)) = self.common(block.0.into(), other) else { continue };
                return Err(BlocksError::Aliased {
                    group: self.groups.0,
                    block: block.0,
                    other_group: self.groups.1,
                    other_block: u32::try_from(other).unwrap_or(u32::MAX),
                    memory: self.memory,
                    from: u64::try_from(from).unwrap_or(0),
                    to: u64::try_from(to).unwrap_or(u64::MAX),
                });
            }
        }
        Ok(())
    }
}

/// Refuses a load whose lists would have bytes filled twice, through two groups.
pub(super) fn check(overlaps: &[Overlap], groups: &[GroupBlocks]) -> Result<(), BlocksError> {
    overlaps.iter().try_for_each(|overlap| overlap.check(groups))
}
