//! Why two shapes do not fit, and why a load's blocks do not fit their plan.

use kv_proto::handshake::CardError;
use kv_proto::topology::TopologyError;
use kv_proto::{Dtype, GroupKind, Rank, RegionKind};
use thiserror::Error;

/// Why a producer's cache cannot be brought into ours. Every one is found when two workers meet, before anything is read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A topology that cannot be.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// A rank does not hold the heads that its topology gives it.
    #[error("{side}: {source}")]
    Heads {
        /// `ours` or `theirs`.
        side: &'static str,
        /// What is wrong.
        source: CardError,
    },
    /// More workers than one rank will have to do with.
    #[error("this rank would have to do with {sources} workers of the producer; {limit} are allowed")]
    Sources {
        /// How many there would be.
        sources: usize,
        /// How many there may be.
        limit: usize,
    },
    /// The producer describes no worker of a rank that it must have.
    #[error("the producer describes no {rank}")]
    NoSuchRank {
        /// The rank.
        rank: Rank,
    },
    /// A layer that the producer does not have.
    #[error("layer {layer}: ours has {kind}, theirs has {theirs}")]
    Layer {
        /// The layer.
        layer: String,
        /// What we have of it.
        kind: RegionKind,
        /// What they have of it, in words.
        theirs: String,
    },
    /// Another element type.
    #[error("layer {layer}: dtype ours {ours}, theirs {theirs}; elements are not converted")]
    Dtype {
        /// The layer.
        layer: String,
        /// Ours.
        ours: Dtype,
        /// Theirs.
        theirs: Dtype,
    },
    /// A number that must be equal.
    #[error("layer {layer}: {field} ours {ours}, theirs {theirs}")]
    Number {
        /// The layer.
        layer: String,
        /// What it is.
        field: &'static str,
        /// Ours.
        ours: u32,
        /// Theirs.
        theirs: u32,
    },
    /// Another kind of block group.
    #[error("layer {layer}: its blocks hold {ours} here, {theirs} there")]
    Group {
        /// The layer.
        layer: String,
        /// Ours.
        ours: GroupKind,
        /// Theirs.
        theirs: GroupKind,
    },
    /// Two layers that use the same bytes here, and different ones there.
    #[error("layers {other} and {layer} share their cache here, and each has its own there")]
    Shared {
        /// The later layer.
        layer: String,
        /// The one whose cache it uses.
        other: String,
    },
    /// Tokens that are dealt out over ranks in blocks of unequal size.
    #[error(
        "tokens are dealt out over ranks in blocks of {ours} here and of {theirs} there; the sizes must be equal"
    )]
    Dealt {
        /// Tokens of our block on one rank.
        ours: u32,
        /// Tokens of theirs.
        theirs: u32,
    },
    /// A group that only makes sense as a whole, with tokens that are dealt out.
    #[error("layer {layer}: {kind} cannot be dealt out over ranks")]
    DealtGroup {
        /// The layer.
        layer: String,
        /// What its blocks hold.
        kind: GroupKind,
    },
    /// A layer that two stages of a producer have which deals tokens out. Each has its own tokens of it, and which of the two
    /// has the right ones is not known.
    #[error(
        "layer {layer}: stages {first} and {second} of theirs both have it, and its tokens are dealt out over ranks; only one \
         stage may have such a layer"
    )]
    TwoStages {
        /// The layer.
        layer: String,
        /// The first stage that has it.
        first: u32,
        /// The next one.
        second: u32,
    },
    /// The plan does not cover what it must. A fault of this library, found before it could do harm.
    #[error("layer {layer}: the plan covers {covered} of {bytes} bytes of a block")]
    Cover {
        /// The layer.
        layer: String,
        /// Bytes that it covers, those that are covered twice counted twice.
        covered: u64,
        /// Bytes of a block.
        bytes: u64,
    },
}

/// Why a load's blocks cannot be turned into ranges.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BlocksError {
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
    /// A list that ends before the tokens do, or goes on behind them.
    #[error(
        "group {group}: {tokens} tokens end in {side} block {needed} of the sequence, the list ends with block {got}"
    )]
    Length {
        /// The group.
        group: u32,
        /// `local` or `remote`.
        side: &'static str,
        /// Tokens handed over.
        tokens: u32,
        /// The block that they end in, counted from 1.
        needed: u64,
        /// The block that the list ends with.
        got: u64,
    },
    /// A state that is not one block.
    #[error("group {group}: the state after {tokens} tokens is one block, the {side} list has {got}")]
    State {
        /// The group.
        group: u32,
        /// `local` or `remote`.
        side: &'static str,
        /// Tokens that the state is after.
        tokens: u32,
        /// Blocks in the list.
        got: u32,
    },
    /// A remote list that begins behind the first token that is needed.
    #[error("group {group}: the remote list begins at token {begins}, tokens from {needed} on are needed")]
    Begins {
        /// The group.
        group: u32,
        /// The list's first token.
        begins: u64,
        /// The first token that is needed.
        needed: u64,
    },
    /// A block that is to be filled twice.
    #[error("group {group}: local block {block} is named twice")]
    Twice {
        /// The group.
        group: u32,
        /// The block.
        block: u32,
    },
    /// Blocks of two groups that lie in the same bytes, so that one would be filled over the other.
    #[error(
        "local block {block} of group {group} and local block {other_block} of group {other_group} share bytes {from} to {to} \
         of memory {memory}"
    )]
    Aliased {
        /// The first group.
        group: u32,
        /// Its block.
        block: u32,
        /// The other group.
        other_group: u32,
        /// Its block.
        other_block: u32,
        /// The memory that both lie in.
        memory: u32,
        /// The first byte that both have.
        from: u64,
        /// Behind the last byte in a row that both have.
        to: u64,
    },
    /// A group without a region.
    #[error("group {group} has no region here")]
    UnknownGroup {
        /// The group.
        group: u32,
    },
    /// A layout that speaks of a memory which has no key.
    #[error("{side} memory {memory} is not registered")]
    UnknownMemory {
        /// `local` or `remote`.
        side: &'static str,
        /// The memory.
        memory: u32,
    },
    /// A read of more pieces than are kept in hand.
    #[error(
        "the blocks lie so differently on the two sides that a read would have more than {limit} ranges; equal orders of \
         heads and tokens, or smaller portions, have fewer"
    )]
    Ranges {
        /// Most that are allowed.
        limit: usize,
    },
}
