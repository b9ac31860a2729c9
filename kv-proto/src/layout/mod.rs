//! How a rank's KV cache lies in memory.

use std::fmt;

use serde::{Deserialize, Serialize};

mod check;

pub use check::LayoutError;

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

    /// Bytes of one block over all regions of this rank.
    pub fn bytes_per_block(&self) -> u64 {
        self.regions.iter().map(|r| r.block_bytes).sum()
    }
}
