//! Whether a layout can be: sizes, strides, heads and groups, and that no two blocks share bytes.

use std::collections::BTreeSet;

use thiserror::Error;

use super::{BlockLayout, Dtype, GroupKind, REGIONS_MAX, RegionKind, RegionLayout};
use crate::params::GROUPS_MAX;

/// Why a layout cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A number that must not be zero is.
    #[error("layout: {field} is 0")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// No regions, or too many.
    #[error("layout has {regions} regions, 1 to {limit} are allowed")]
    RegionCount {
        /// How many there are.
        regions: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Blocks would overlap.
    #[error("region {layer}: a block of {block_bytes} bytes does not fit the stride of {block_stride}")]
    Stride {
        /// The layer.
        layer: String,
        /// Bytes of a block.
        block_bytes: u64,
        /// Distance between blocks.
        block_stride: u64,
    },
    /// Heads, tokens and element size do not make the block's bytes.
    #[error(
        "region {layer}: {heads} heads x {tokens} tokens x {head_size} elements of {dtype} make {computed} bytes, \
         the block has {block_bytes}"
    )]
    BlockBytes {
        /// The layer.
        layer: String,
        /// Heads.
        heads: u32,
        /// Tokens of a block.
        tokens: u32,
        /// Elements of a head.
        head_size: u32,
        /// Element type.
        dtype: Dtype,
        /// Their product, or the largest number if it does not fit.
        computed: u64,
        /// What the layout says.
        block_bytes: u64,
    },
    /// A region reaches beyond its memory.
    #[error("region {layer}: its last block ends at byte {end}, memory {memory} has {size}")]
    BeyondMemory {
        /// The layer.
        layer: String,
        /// Which memory.
        memory: u32,
        /// Where the region ends.
        end: u64,
        /// Size of the memory; zero if there is none of that index.
        size: u64,
    },
    /// Block groups that are not numbered from 0 without a gap, or too many.
    #[error("layout: groups are {groups:?}; 0 to at most {last} without a gap are allowed")]
    Groups {
        /// The groups that regions name, shortened.
        groups: Vec<u32>,
        /// The highest that is allowed.
        last: u32,
    },
    /// A kernel block that does not divide a block.
    #[error(
        "layout: a block of {block_tokens} tokens is no whole number of kernel blocks of {kernel_tokens}"
    )]
    KernelTokens {
        /// Tokens of a block.
        block_tokens: u32,
        /// Tokens of a kernel block.
        kernel_tokens: u32,
    },
    /// Kernel blocks that do not lie at equal distances.
    #[error(
        "region {layer}: a stride of {block_stride} bytes cannot be cut into {kernel_blocks} kernel blocks"
    )]
    KernelStride {
        /// The layer.
        layer: String,
        /// Distance between blocks.
        block_stride: u64,
        /// Kernel blocks in a block.
        kernel_blocks: u32,
    },
    /// More kinds of groups are told than there are groups.
    #[error("layout tells the kinds of {kinds} groups, but has {groups}")]
    GroupKinds {
        /// Kinds told.
        kinds: usize,
        /// Groups that regions name.
        groups: usize,
    },
    /// A rank that holds more heads than there are.
    #[error("region {layer}: this rank holds {heads} heads of {total}")]
    Heads {
        /// The layer.
        layer: String,
        /// Heads of this rank.
        heads: u32,
        /// Heads over all ranks.
        total: u32,
    },
    /// Two regions of one group that share some bytes, and are not the same.
    #[error("regions {layer} and {other} of group {group} overlap in memory {memory}")]
    Overlap {
        /// The one layer.
        layer: String,
        /// The other.
        other: String,
        /// Their group.
        group: u32,
        /// The memory.
        memory: u32,
    },
    /// Too many regions that lie between each other's blocks to be looked through.
    #[error("layout: too many regions lie between each other's blocks")]
    Interleaved,
    /// Two regions of the same layer and kind.
    #[error("layout has two {kind} regions of layer {layer}")]
    Twice {
        /// The layer.
        layer: String,
        /// The kind.
        kind: RegionKind,
    },
}

/// Most pairs of regions whose blocks lie between each other's that are looked at: those of some 3,000 regions in one
/// group.
const PAIRS_MAX: u32 = 1 << 22;

impl BlockLayout {
    /// Checks the layout against the sizes of the memories that it speaks of, in bytes and by index.
    pub fn check(&self, memory_sizes: &[u64]) -> Result<(), LayoutError> {
        for (field, value) in [("block_tokens", self.block_tokens), ("blocks", self.blocks)] {
            if value == 0 {
                return Err(LayoutError::Zero { field });
            }
        }
        let (block_tokens, kernel_tokens) = (self.block_tokens, self.tokens_of_kernel());
        if !block_tokens.is_multiple_of(kernel_tokens) {
            return Err(LayoutError::KernelTokens { block_tokens, kernel_tokens });
        }
        if self.regions.is_empty() || self.regions.len() > REGIONS_MAX {
            return Err(LayoutError::RegionCount { regions: self.regions.len(), limit: REGIONS_MAX });
        }
        let mut seen = BTreeSet::new();
        for region in &self.regions {
            if !seen.insert((region.layer.as_str(), region.kind)) {
                return Err(LayoutError::Twice { layer: region.layer.clone(), kind: region.kind });
            }
            self.check_region(region, memory_sizes)?;
        }
        let groups: BTreeSet<u32> = self.regions.iter().map(|r| r.group).collect();
        let without_gap = groups.iter().enumerate().all(|(index, group)| *group == index as u32);
        if !without_gap || groups.len() > GROUPS_MAX {
            let groups = groups.into_iter().take(8).collect();
            return Err(LayoutError::Groups { groups, last: GROUPS_MAX as u32 - 1 });
        }
        if self.groups.len() > groups.len() {
            return Err(LayoutError::GroupKinds { kinds: self.groups.len(), groups: groups.len() });
        }
        if let Some(GroupKind::Window { .. }) =
            self.groups.iter().find(|kind| matches!(kind, GroupKind::Window { tokens: 0 }))
        {
            return Err(LayoutError::Zero { field: "window" });
        }
        self.check_overlaps()
    }

    fn check_region(&self, region: &RegionLayout, memory_sizes: &[u64]) -> Result<(), LayoutError> {
        if region.block_bytes == 0 {
            return Err(LayoutError::Zero { field: "block_bytes" });
        }
        if region.block_bytes > region.block_stride {
            return Err(LayoutError::Stride {
                layer: region.layer.clone(),
                block_bytes: region.block_bytes,
                block_stride: region.block_stride,
            });
        }
        if region.heads > region.all_heads() {
            let (heads, total) = (region.heads, region.all_heads());
            return Err(LayoutError::Heads { layer: region.layer.clone(), heads, total });
        }
        let is_state = self.group_kind(region.group) == GroupKind::State;
        let tokens = if is_state { 1 } else { self.block_tokens };
        let computed = u64::from(region.heads)
            .saturating_mul(u64::from(tokens))
            .saturating_mul(u64::from(region.head_size))
            .saturating_mul(region.dtype.bytes());
        if computed != region.block_bytes {
            return Err(LayoutError::BlockBytes {
                layer: region.layer.clone(),
                heads: region.heads,
                tokens,
                head_size: region.head_size,
                dtype: region.dtype,
                computed,
                block_bytes: region.block_bytes,
            });
        }
        let kernel_blocks = if is_state { 1 } else { self.kernel_blocks() };
        if !region.block_stride.is_multiple_of(u64::from(kernel_blocks)) {
            return Err(LayoutError::KernelStride {
                layer: region.layer.clone(),
                block_stride: region.block_stride,
                kernel_blocks,
            });
        }
        let size = memory_sizes.get(region.memory as usize).copied().unwrap_or(0);
        // Kernel blocks lie at equal distances, so that the last one may end later than the bytes alone would.
        let last_kernel = region.block_stride / u64::from(kernel_blocks) * u64::from(kernel_blocks - 1)
            + region.block_bytes / u64::from(kernel_blocks);
        let end = u64::from(self.blocks - 1)
            .checked_mul(region.block_stride)
            .and_then(|last| last.checked_add(last_kernel))
            .and_then(|span| span.checked_add(region.base))
            .unwrap_or(u64::MAX);
        if end > size {
            return Err(LayoutError::BeyondMemory {
                layer: region.layer.clone(),
                memory: region.memory,
                end,
                size,
            });
        }
        Ok(())
    }

    /// Blocks of one group must not share bytes, or one would be overwritten with another.
    fn check_overlaps(&self) -> Result<(), LayoutError> {
        let mut regions: Vec<&RegionLayout> = self.regions.iter().collect();
        regions.sort_by_key(|r| (r.group, r.memory, r.base));
        let end = |r: &RegionLayout| {
            let (stride, bytes, count) = self.kernels(r);
            r.base + (count - 1) * stride + bytes
        };
        // Where the regions up to each one end, of the same group in the same memory.
        let mut ends: Vec<u64> = Vec::with_capacity(regions.len());
        let mut looked_at = 0u32;
        for (index, later) in regions.iter().enumerate() {
            let place = |r: &RegionLayout| (r.group, r.memory);
            let first = index == 0 || place(regions[index - 1]) != place(later);
            let before = if first { 0 } else { ends[index - 1] };
            ends.push(before.max(end(later)));
            if before <= later.base {
                continue;
            }
            for (earlier, ends) in regions[..index].iter().zip(&ends).rev() {
                if place(earlier) != place(later) || *ends <= later.base {
                    break;
                }
                looked_at += 1;
                if looked_at > PAIRS_MAX {
                    return Err(LayoutError::Interleaved);
                }
                if end(earlier) > later.base && self.overlap(earlier, later) {
                    return Err(LayoutError::Overlap {
                        layer: earlier.layer.clone(),
                        other: later.layer.clone(),
                        group: later.group,
                        memory: later.memory,
                    });
                }
            }
        }
        Ok(())
    }

    /// A region's kernel blocks, which lie at equal distances: the distance, the bytes of one, and how many there are.
    fn kernels(&self, region: &RegionLayout) -> (u64, u64, u64) {
        let is_state = self.group_kind(region.group) == GroupKind::State;
        let kernels = if is_state { 1 } else { u64::from(self.kernel_blocks()) };
        (region.block_stride / kernels, region.block_bytes / kernels, u64::from(self.blocks) * kernels)
    }

    /// Whether two regions of which `b` does not begin before `a` share some bytes and are not the same.
    fn overlap(&self, a: &RegionLayout, b: &RegionLayout) -> bool {
        let same = (a.base, a.block_stride, a.block_bytes) == (b.base, b.block_stride, b.block_bytes);
        if same {
            return false;
        }
        if a.block_stride != b.block_stride {
            // Blocks at different distances between each other come close sooner or later.
            return true;
        }
        let ((stride, a_bytes, count), (_, b_bytes, _)) = (self.kernels(a), self.kernels(b));
        let (whole, part) = ((b.base - a.base) / stride, (b.base - a.base) % stride);
        (whole < count && part < a_bytes) || (whole + 1 < count && stride - part < b_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::BlockOrder;

    fn layout() -> BlockLayout {
        let region = |i: u64| RegionLayout {
            layer: format!("layers.{i}"),
            kind: RegionKind::KeyValue,
            group: 0,
            memory: 0,
            base: i * 4096,
            block_stride: 1024,
            block_bytes: 1024,
            dtype: Dtype::F32,
            heads: 2,
            heads_total: 0,
            head_size: 8,
        };
        BlockLayout {
            block_tokens: 16,
            kernel_tokens: 0,
            blocks: 4,
            order: BlockOrder::HeadsTokens,
            groups: vec![],
            regions: vec![region(0), region(1)],
        }
    }

    #[test]
    fn a_sound_layout_passes_and_knows_its_size() {
        assert_eq!(layout().check(&[8192]), Ok(()));
        assert_eq!(layout().bytes_per_block(), 2048);
    }

    #[test]
    fn unsound_layouts_are_refused_with_both_values() {
        let check = |change: fn(&mut BlockLayout)| {
            let mut layout = layout();
            change(&mut layout);
            layout.check(&[8192]).unwrap_err().to_string()
        };
        assert_eq!(
            layout().check(&[8191]).unwrap_err().to_string(),
            "region layers.1: its last block ends at byte 8192, memory 0 has 8191"
        );
        assert_eq!(
            check(|l| l.regions[1].block_stride = 512),
            "region layers.1: a block of 1024 bytes does not fit the stride of 512"
        );
        assert_eq!(check(|l| l.blocks = 0), "layout: blocks is 0");
        assert!(check(|l| l.regions[0].heads = u32::MAX).contains("the block has 1024"));
        assert!(check(|l| l.regions[0].base = u64::MAX).contains("memory 0 has 8192"));
        assert!(check(|l| l.regions[0].memory = 7).contains("memory 7 has 0"));
        assert_eq!(
            check(|l| l.regions[1].layer = "layers.0".into()),
            "layout has two key_value regions of layer layers.0"
        );
        assert_eq!(
            check(|l| l.regions[1].group = 2),
            "layout: groups are [0, 2]; 0 to at most 63 without a gap are allowed"
        );
        assert!(check(|l| l.regions[1].group = u32::MAX).contains("without a gap"));
        assert_eq!(check(|l| l.regions.clear()), "layout has 0 regions, 1 to 16384 are allowed");
    }

    #[test]
    fn regions_of_a_group_share_no_bytes_unless_they_are_the_same() {
        let check = |change: fn(&mut BlockLayout)| {
            let mut layout = layout();
            change(&mut layout);
            layout.check(&[1 << 20]).map_err(|e| e.to_string())
        };
        let overlap = Err("regions layers.0 and layers.1 of group 0 overlap in memory 0".to_owned());
        assert_eq!(check(|l| l.regions[1].base = 4095), overlap);
        assert_eq!(
            check(|l| l.regions[1].base = 1024),
            overlap,
            "block 0 of the one is block 1 of the other"
        );
        assert_eq!(
            check(|l| l.regions[1].base = 0),
            Ok(()),
            "the second layer looks at the first one's cache"
        );
        assert_eq!(check(|l| (l.regions[1].base, l.regions[1].group) = (512, 1)), Ok(()), "groups may share");
        // The blocks of both, side by side.
        let rows = |l: &mut BlockLayout| {
            (l.regions[0].block_stride, l.regions[1].block_stride, l.regions[1].base) = (2048, 2048, 1024);
        };
        let mut layout = layout();
        rows(&mut layout);
        assert_eq!(layout.check(&[8192]), Ok(()));
        layout.regions[1].base = 1023;
        assert!(matches!(layout.check(&[8192]), Err(LayoutError::Overlap { .. })));
        layout.regions[1].base = 1025;
        assert!(matches!(layout.check(&[1 << 20]), Err(LayoutError::Overlap { .. })), "the next row");
        layout.regions[1].block_stride = 4096;
        assert!(matches!(layout.check(&[1 << 20]), Err(LayoutError::Overlap { .. })));
    }

    #[test]
    fn kernel_blocks_of_layers_may_lie_between_each_other() {
        let rows = |second: u64| {
            let mut layout = layout();
            layout.kernel_tokens = 8;
            for (region, base) in layout.regions.iter_mut().zip([0, second]) {
                (region.base, region.block_stride) = (base, 2048);
            }
            layout.check(&[1 << 20]).map_err(|e| e.to_string())
        };
        let overlap = Err("regions layers.0 and layers.1 of group 0 overlap in memory 0".to_owned());
        // Kernel blocks of 512 bytes, a kilobyte apart.
        assert_eq!(rows(512), Ok(()), "side by side in each row");
        assert_eq!(rows(511), overlap);
        assert_eq!(rows(513), overlap, "the next row");
        assert_eq!(rows(1024), overlap, "the second kernel block of the one is the first of the other");
    }

    #[test]
    fn kernel_blocks_groups_and_heads_are_checked() {
        let check = |change: fn(&mut BlockLayout)| {
            let mut layout = layout();
            change(&mut layout);
            layout.check(&[8192]).map_err(|e| e.to_string())
        };
        assert_eq!(check(|l| l.kernel_tokens = 8), Ok(()));
        assert_eq!(
            check(|l| l.kernel_tokens = 5).unwrap_err(),
            "layout: a block of 16 tokens is no whole number of kernel blocks of 5"
        );
        assert_eq!(
            check(|l| l.groups = vec![GroupKind::Full; 2]).unwrap_err(),
            "layout tells the kinds of 2 groups, but has 1"
        );
        assert_eq!(
            check(|l| l.groups = vec![GroupKind::Window { tokens: 0 }]).unwrap_err(),
            "layout: window is 0"
        );
        assert_eq!(
            check(|l| l.regions[0].heads_total = 1).unwrap_err(),
            "region layers.0: this rank holds 2 heads of 1"
        );
        // A state has no tokens.
        let state = check(|l| {
            l.groups = vec![GroupKind::State];
            l.regions.iter_mut().for_each(|r| r.head_size = 128);
        });
        assert_eq!(state, Ok(()));
    }
}
