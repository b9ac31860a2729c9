//! How an engine's KV cache lies in memory, and what two engines must agree on.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::ids::Rank;
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
    /// Keys and values of a block side by side.
    KeyValue,
    /// Keys only.
    Key,
    /// Values only.
    Value,
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeyValue => "key_value",
            Self::Key => "key",
            Self::Value => "value",
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

impl fmt::Display for BlockOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HeadsTokens => "heads_tokens",
            Self::TokensHeads => "tokens_heads",
        })
    }
}

/// One area of memory that holds a layer's part of every block.
///
/// Block `i` occupies the bytes from `base + i * block_stride` to `block_bytes` further, in the memory that the
/// worker registered under index `memory`.
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
    /// Heads that this rank holds.
    pub heads: u32,
    /// Elements of one head of one token (keys and values together, where a region holds both).
    pub head_size: u32,
}

/// One rank's whole cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockLayout {
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in use, the same for every region. A region's memory may have room for more.
    pub blocks: u32,
    /// Order inside a block.
    pub order: BlockOrder,
    /// The regions, in an order that both sides share.
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
    /// Two regions of the same layer and kind.
    #[error("layout has two {kind} regions of layer {layer}")]
    Twice {
        /// The layer.
        layer: String,
        /// The kind.
        kind: RegionKind,
    },
}

impl BlockLayout {
    /// Checks the layout against the sizes of the memories that it speaks of, in bytes and by index.
    pub fn check(&self, memory_sizes: &[u64]) -> Result<(), LayoutError> {
        for (field, value) in [("block_tokens", self.block_tokens), ("blocks", self.blocks)] {
            if value == 0 {
                return Err(LayoutError::Zero { field });
            }
        }
        if self.regions.is_empty() || self.regions.len() > REGIONS_MAX {
            return Err(LayoutError::RegionCount { regions: self.regions.len(), limit: REGIONS_MAX });
        }
        let mut seen = std::collections::BTreeSet::new();
        for region in &self.regions {
            if !seen.insert((region.layer.as_str(), region.kind)) {
                return Err(LayoutError::Twice { layer: region.layer.clone(), kind: region.kind });
            }
            self.check_region(region, memory_sizes)?;
        }
        let groups: std::collections::BTreeSet<u32> = self.regions.iter().map(|r| r.group).collect();
        let without_gap = groups.iter().enumerate().all(|(index, group)| *group == index as u32);
        if !without_gap || groups.len() > GROUPS_MAX {
            let groups = groups.into_iter().take(8).collect();
            return Err(LayoutError::Groups { groups, last: GROUPS_MAX as u32 - 1 });
        }
        Ok(())
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
        let computed = u64::from(region.heads)
            .saturating_mul(u64::from(self.block_tokens))
            .saturating_mul(u64::from(region.head_size))
            .saturating_mul(region.dtype.bytes());
        if computed != region.block_bytes {
            return Err(LayoutError::BlockBytes {
                layer: region.layer.clone(),
                heads: region.heads,
                tokens: self.block_tokens,
                head_size: region.head_size,
                dtype: region.dtype,
                computed,
                block_bytes: region.block_bytes,
            });
        }
        let size = memory_sizes.get(region.memory as usize).copied().unwrap_or(0);
        let end = u64::from(self.blocks - 1)
            .checked_mul(region.block_stride)
            .and_then(|last| last.checked_add(region.block_bytes))
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

    /// Bytes of one block over all regions of this rank.
    pub fn bytes_per_block(&self) -> u64 {
        self.regions.iter().map(|r| r.block_bytes).sum()
    }
}

/// How an engine is cut into ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Topology {
    /// Tensor-parallel ranks.
    pub ranks: u32,
}

impl Topology {
    /// The consumer ranks that read from a producer's rank, or why the two topologies do not fit.
    ///
    /// Both sides compute their expectations with this one function: the producer how many endings a lease
    /// needs, the consumer whom to read from.
    pub fn readers_of(self, rank: Rank, consumer: Self) -> Result<Vec<Rank>, TopologyMismatch> {
        self.fits(consumer)?;
        Ok(vec![rank])
    }

    /// The producer rank that a consumer's rank reads from, or why the two topologies do not fit.
    pub fn source_of(self, rank: Rank, consumer: Self) -> Result<Rank, TopologyMismatch> {
        self.fits(consumer)?;
        Ok(rank)
    }

    fn fits(self, consumer: Self) -> Result<(), TopologyMismatch> {
        if self.ranks == consumer.ranks && self.ranks > 0 {
            Ok(())
        } else {
            Err(TopologyMismatch { producer: self, consumer })
        }
    }
}

/// Producer and consumer are cut in ways that do not fit each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the producer has {} ranks and the consumer {}; only equal numbers are supported", producer.ranks, consumer.ranks)]
pub struct TopologyMismatch {
    /// The producer's cut.
    pub producer: Topology,
    /// The consumer's cut.
    pub consumer: Topology,
}

/// What two engines must agree on before a block of one makes sense to the other, as named text fields.
///
/// Everything that determines the meaning of a block's bytes is in here and nothing else, so that equality is
/// the whole test and a difference can be printed as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(BTreeMap<String, String>);

/// Most fields a fingerprint may have, and most bytes of a name or a value.
const FINGERPRINT_FIELDS_MAX: usize = 64;
const FINGERPRINT_TEXT_MAX_BYTES: usize = 4096;

/// One field in which two fingerprints differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldDifference {
    /// The field's name.
    pub field: String,
    /// Our value, if we have the field.
    pub ours: Option<String>,
    /// The peer's value, if it has the field.
    pub theirs: Option<String>,
}

impl fmt::Display for FieldDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |v: &Option<String>| v.clone().unwrap_or_else(|| "(absent)".to_owned());
        write!(f, "{}: ours {}, theirs {}", self.field, or_none(&self.ours), or_none(&self.theirs))
    }
}

impl Fingerprint {
    /// Derives it from a rank's layout, the rank count and the model's name.
    ///
    /// `model` is whatever names the weights beyond doubt: a path is not enough where two hosts differ, a digest
    /// of the weights is best.
    pub fn of(model: &str, layout: &BlockLayout, topology: Topology) -> Self {
        let mut fields = BTreeMap::new();
        let mut set = |name: &str, value: String| {
            fields.insert(name.to_owned(), value);
        };
        set("model", model.to_owned());
        set("block_tokens", layout.block_tokens.to_string());
        set("block_order", layout.order.to_string());
        set("ranks", topology.ranks.to_string());
        set("regions", layout.regions.len().to_string());
        let mut digest = Sha256::new();
        let mut shapes = std::collections::BTreeSet::new();
        for region in &layout.regions {
            digest.update(format!(
                "{}\n{}\n{}\n{} {} {} {}\n",
                region.layer,
                region.kind,
                region.group,
                region.heads,
                region.head_size,
                region.dtype,
                region.block_bytes
            ));
            shapes.insert(format!(
                "{} {} heads x {} {} = {} bytes a block",
                region.kind, region.heads, region.head_size, region.dtype, region.block_bytes
            ));
        }
        set("layers_sha256", hex(&digest.finalize()));
        set("region_shapes", shapes.into_iter().collect::<Vec<_>>().join("; "));
        Self(fields)
    }

    /// Adds a field of the engine's own, such as a quantisation scheme or the draft model.
    pub fn with(mut self, field: &str, value: impl Into<String>) -> Self {
        self.0.insert(field.to_owned(), value.into());
        self
    }

    /// The fields, in order of their names.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// Whether it is small enough to be believed; peers' fingerprints are checked with this first.
    pub fn is_bounded(&self) -> bool {
        self.0.len() <= FINGERPRINT_FIELDS_MAX
            && self.0.iter().all(|(k, v)| k.len().max(v.len()) <= FINGERPRINT_TEXT_MAX_BYTES)
    }

    /// The fields in which a peer's differs, in order of their names; empty when they are equal.
    pub fn differences(&self, theirs: &Self) -> Vec<FieldDifference> {
        let names: std::collections::BTreeSet<&String> = self.0.keys().chain(theirs.0.keys()).collect();
        names
            .into_iter()
            .filter(|name| self.0.get(*name) != theirs.0.get(*name))
            .map(|name| FieldDifference {
                field: name.clone(),
                ours: self.0.get(name).cloned(),
                theirs: theirs.0.get(name).cloned(),
            })
            .collect()
    }

    /// A short digest of all fields, for logs.
    pub fn digest(&self) -> String {
        let mut digest = Sha256::new();
        for (name, value) in &self.0 {
            digest.update((name.len() as u64).to_le_bytes());
            digest.update(name);
            digest.update((value.len() as u64).to_le_bytes());
            digest.update(value);
        }
        hex(&digest.finalize()[..8])
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
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
            head_size: 8,
        };
        BlockLayout {
            block_tokens: 16,
            blocks: 4,
            order: BlockOrder::HeadsTokens,
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
    fn a_mismatch_prints_the_fields_that_differ_with_both_values() {
        let ours = Fingerprint::of("llama", &layout(), Topology { ranks: 2 });
        let mut other = layout();
        other.block_tokens = 32;
        let theirs = Fingerprint::of("qwen", &other, Topology { ranks: 2 }).with("draft", "none");
        let text: Vec<String> = ours.differences(&theirs).iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            [
                "block_tokens: ours 16, theirs 32",
                "draft: ours (absent), theirs none",
                "model: ours llama, theirs qwen"
            ]
        );
        assert!(ours.differences(&ours.clone()).is_empty());
        assert_ne!(ours.digest(), theirs.digest());
    }

    #[test]
    fn layers_that_swap_their_shapes_are_noticed() {
        let shaped = |first: (u32, Dtype), second: (u32, Dtype)| {
            let mut layout = layout();
            for (region, (head_size, dtype)) in layout.regions.iter_mut().zip([first, second]) {
                (region.head_size, region.dtype) = (head_size, dtype);
            }
            Fingerprint::of("m", &layout, Topology { ranks: 1 })
        };
        let (half, float) = ((16, Dtype::F16), (8, Dtype::F32));
        assert_eq!(shaped(half, float).differences(&shaped(float, half))[0].field, "layers_sha256");
    }

    #[test]
    fn the_order_of_layers_is_part_of_the_fingerprint() {
        let mut swapped = layout();
        swapped.regions.swap(0, 1);
        let of = |l: &BlockLayout| Fingerprint::of("m", l, Topology { ranks: 1 });
        let differences = of(&layout()).differences(&of(&swapped));
        assert_eq!(differences[0].field, "layers_sha256");
    }

    #[test]
    fn unequal_rank_counts_are_refused_with_both_values() {
        let refused = Topology { ranks: 2 }.readers_of(Rank(0), Topology { ranks: 4 }).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the producer has 2 ranks and the consumer 4; only equal numbers are supported"
        );
        assert_eq!(Topology { ranks: 2 }.source_of(Rank(1), Topology { ranks: 2 }), Ok(Rank(1)));
    }
}
