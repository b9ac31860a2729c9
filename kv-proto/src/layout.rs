//! How a rank's KV cache lies in memory.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::params::GROUPS_MAX;

/// Most regions one rank may describe: layers times regions per layer, with room to spare.
pub const REGIONS_MAX: usize = 16_384;

/// Element type of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 8-bit float, 4 exponent bits.
    F8E4m3,
    /// 8-bit float, 5 exponent bits.
    F8E5m2,
    /// Bytes without a type of their own.
    U8,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 | Self::F8E5m2 | Self::U8 => 1,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3 => "f8_e4m3",
            Self::F8E5m2 => "f8_e5m2",
            Self::U8 => "u8",
        })
    }
}

/// What a region holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RegionKind {
    /// Keys and values of each head of each token side by side, or one latent for both (MLA).
    KeyValue,
    /// Keys only.
    Key,
    /// Values only.
    Value,
    /// The state of a convolution: one per request.
    Conv,
    /// The state of a state-space layer: one per request.
    Ssm,
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeyValue => "key_value",
            Self::Key => "key",
            Self::Value => "value",
            Self::Conv => "conv",
            Self::Ssm => "ssm",
        })
    }
}

/// Order of heads and tokens inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BlockOrder {
    /// Heads outermost, then tokens, then the head's elements (HND).
    HeadsTokens,
    /// Tokens outermost, then heads, then the head's elements (NHD).
    TokensHeads,
}

impl BlockOrder {
    /// How far apart heads, and tokens, are in a kernel block of so many of them, with `row` bytes for one head of one
    /// token.
    pub const fn steps(self, heads: u64, tokens: u64, row: u64) -> (u64, u64) {
        match self {
            Self::HeadsTokens => (row * tokens, row),
            Self::TokensHeads => (row, row * heads),
        }
    }
}

impl fmt::Display for BlockOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HeadsTokens => "heads_tokens",
            Self::TokensHeads => "tokens_heads",
        })
    }
}

/// What a block group's table means: which of a request's tokens its blocks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GroupKind {
    /// Every token, block by block.
    #[default]
    Full,
    /// As `Full`, but only the last so many tokens are ever looked at (sliding window); older ones need not be there.
    Window {
        /// Tokens that are looked at.
        tokens: u32,
    },
    /// One block per request, which holds the state after its last token (state space).
    State,
}

impl GroupKind {
    /// The first of a sequence's `tokens` that whoever goes on with it looks at.
    pub const fn first_token(self, tokens: u32) -> u32 {
        match self {
            Self::Full => 0,
            Self::Window { tokens: window } => tokens.saturating_sub(window),
            Self::State => tokens.saturating_sub(1),
        }
    }
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full attention"),
            Self::Window { tokens } => write!(f, "window of {tokens} tokens"),
            Self::State => f.write_str("state"),
        }
    }
}

/// One area of memory that holds a layer's part of every block.
///
/// Block `i` occupies the bytes from `base + i * block_stride` to `block_bytes` further, in the memory that the
/// worker registered under index `memory`. A block that is made of several kernel blocks
/// ([`BlockLayout::kernel_tokens`]) holds them one after the other, at equal distances within its stride.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegionLayout {
    /// The layer's name, the same on both sides.
    pub layer: String,
    /// What the region holds.
    pub kind: RegionKind,
    /// Block group: layers whose blocks one block table names.
    pub group: u32,
    /// Which of the worker's registered memories it lies in.
    pub memory: u32,
    /// Offset of block 0 in that memory, in bytes.
    pub base: u64,
    /// Distance from one block to the next, in bytes.
    pub block_stride: u64,
    /// Bytes of one block, at most the stride.
    pub block_bytes: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Heads that this rank holds; for the state of a state-space layer, the parts that can be shared out over ranks.
    pub heads: u32,
    /// Heads of the layer over all ranks of the engine; each rank holds its share of them, or one of them where there are
    /// more ranks than heads, see [`crate::Topology::heads_of`]. 0: as many as this rank holds, which holds all of them.
    #[serde(default)]
    pub heads_total: u32,
    /// Elements of one head of one token (keys and values together, where a region holds both: first the keys').
    pub head_size: u32,
}

impl RegionLayout {
    /// Heads of the layer over all ranks.
    pub const fn all_heads(&self) -> u32 {
        if self.heads_total == 0 { self.heads } else { self.heads_total }
    }
}

/// One rank's whole cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockLayout {
    /// Tokens of one block that this rank holds. Block ids are those of the scheduler's block table.
    pub block_tokens: u32,
    /// Tokens in a kernel block, of which a block is made of a whole number; 0: a block is one.
    #[serde(default)]
    pub kernel_tokens: u32,
    /// Blocks in use, the same for every region. A region's memory may have room for more.
    pub blocks: u32,
    /// Order inside a kernel block.
    pub order: BlockOrder,
    /// What each block group is; groups beyond the list are [`GroupKind::Full`].
    #[serde(default)]
    pub groups: Vec<GroupKind>,
    /// The regions. Two of one group may be the very same bytes: layers that share their cache.
    pub regions: Vec<RegionLayout>,
}

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
    #[error("layout: a block of {block_tokens} tokens is no whole number of kernel blocks of {kernel_tokens}")]
    KernelTokens {
        /// Tokens of a block.
        block_tokens: u32,
        /// Tokens of a kernel block.
        kernel_tokens: u32,
    },
    /// Kernel blocks that do not lie at equal distances.
    #[error("region {layer}: a stride of {block_stride} bytes cannot be cut into {kernel_blocks} kernel blocks")]
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
    /// Tokens in a kernel block.
    pub const fn tokens_of_kernel(&self) -> u32 {
        if self.kernel_tokens == 0 { self.block_tokens } else { self.kernel_tokens }
    }

    /// Kernel blocks in a block.
    pub const fn kernel_blocks(&self) -> u32 {
        match self.tokens_of_kernel() {
            0 => 1,
            tokens => self.block_tokens / tokens,
        }
    }

    /// What a group is.
    pub fn group_kind(&self, group: u32) -> GroupKind {
        self.groups.get(group as usize).copied().unwrap_or_default()
    }

    /// Block groups that regions name.
    pub fn group_count(&self) -> u32 {
        self.regions.iter().map(|r| r.group.saturating_add(1)).max().unwrap_or(0)
    }

    /// What each group is, in their order.
    pub fn group_kinds(&self) -> impl Iterator<Item = GroupKind> + '_ {
        let count = self.group_count().max(u32::try_from(self.groups.len()).unwrap_or(u32::MAX));
        (0..count.max(1)).map(|group| self.group_kind(group))
    }

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
        let end = |r: &RegionLayout| r.base + u64::from(self.blocks - 1) * r.block_stride + r.block_bytes;
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
        let last = u64::from(self.blocks - 1);
        let (whole, part) = ((b.base - a.base) / a.block_stride, (b.base - a.base) % a.block_stride);
        (whole <= last && part < a.block_bytes)
            || (whole < last && a.block_stride - part < b.block_bytes)
    }

    /// Bytes of one block over all regions of this rank.
    pub fn bytes_per_block(&self) -> u64 {
        self.regions.iter().map(|r| r.block_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(check(|l| l.regions[1].base = 1024), overlap, "block 0 of the one is block 1 of the other");
        assert_eq!(check(|l| l.regions[1].base = 0), Ok(()), "the second layer looks at the first one's cache");
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
        assert_eq!(check(|l| l.groups = vec![GroupKind::Window { tokens: 0 }]).unwrap_err(), "layout: window is 0");
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
