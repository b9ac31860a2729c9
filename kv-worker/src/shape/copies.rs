//! One rectangle of bytes that goes from a region of theirs into one of ours, for every token that a load brings.

use kv_proto::{BlockLayout, GroupKind, RegionLayout};

/// Where one side of a [`RegionCopy`] lies in its memory, and how far apart things are there. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Index of the memory.
    pub memory: u32,
    /// The first head's first element of the first token of block 0.
    pub at: u64,
    /// From one block to the next.
    pub block: u64,
    /// From one kernel block to the next.
    pub kernel: u64,
    /// From one head to the next.
    pub head: u64,
    /// From one token to the next, inside a kernel block.
    pub token: u64,
}

impl Place {
    /// The place of a region's elements from `element` on of the heads from `head` on, both counted in this rank's.
    pub(super) fn of(layout: &BlockLayout, region: &RegionLayout, head: u32, element: u32) -> Self {
        let is_state = layout.group_kind(region.group) == GroupKind::State;
        let tokens = if is_state { 1 } else { layout.tokens_of_kernel() };
        let kernels = if is_state { 1 } else { layout.kernel_blocks() };
        let row = u64::from(region.head_size) * region.dtype.bytes();
        let (head_step, token_step) = layout.order.steps(u64::from(region.heads), u64::from(tokens), row);
        Self {
            memory: region.memory,
            at: region.base + u64::from(head) * head_step + u64::from(element) * region.dtype.bytes(),
            block: region.block_stride,
            kernel: region.block_stride / u64::from(kernels.max(1)),
            head: head_step,
            token: token_step,
        }
    }
}

/// Some elements of some heads of one layer: theirs go into ours, for every token that a load brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionCopy {
    /// The block group.
    pub group: u32,
    /// Index of our region; of the first one, where neighbours were joined.
    pub local_region: u32,
    /// Index of their region.
    pub remote_region: u32,
    /// Where it goes.
    pub local: Place,
    /// Where it comes from.
    pub remote: Place,
    /// Heads.
    pub heads: u32,
    /// Bytes of one head of one token; of a whole block, if these are.
    pub row: u64,
    /// Blocks are copied whole, so that heads and tokens do not matter.
    pub is_whole: bool,
}

/// What one copy reads of some tokens that lie one after the other on both sides: `outer` times `inner` pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pieces {
    pub(super) len: u64,
    pub(super) inner: Steps,
    pub(super) outer: Steps,
}

/// How often, and how far apart on each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) count: u64,
    pub(super) local: u64,
    pub(super) remote: u64,
}

impl Steps {
    const ONCE: Self = Self { count: 1, local: 0, remote: 0 };

    /// Whether pieces of so many bytes lie without a gap on both sides.
    const fn are_close(self, len: u64) -> bool {
        self.count == 1 || (self.local == len && self.remote == len)
    }
}

impl RegionCopy {
    /// The fewest pieces for `tokens` tokens of one kernel block on both sides.
    pub(super) const fn pieces(&self, tokens: u32) -> Pieces {
        let heads = Steps { count: self.heads as u64, local: self.local.head, remote: self.remote.head };
        let tokens = Steps { count: tokens as u64, local: self.local.token, remote: self.remote.token };
        let row = self.row;
        if self.is_whole {
            return Pieces { len: row, inner: Steps::ONCE, outer: Steps::ONCE };
        }
        if tokens.are_close(row) {
            let len = tokens.count * row;
            if heads.are_close(len) {
                return Pieces { len: heads.count * len, inner: Steps::ONCE, outer: Steps::ONCE };
            }
            return Pieces { len, inner: Steps::ONCE, outer: heads };
        }
        if heads.are_close(row) {
            let len = heads.count * row;
            if tokens.are_close(len) {
                return Pieces { len: tokens.count * len, inner: Steps::ONCE, outer: Steps::ONCE };
            }
            return Pieces { len, inner: Steps::ONCE, outer: tokens };
        }
        // Our own order outermost first, so that what is written ascends.
        if heads.local > tokens.local {
            Pieces { len: row, inner: tokens, outer: heads }
        } else {
            Pieces { len: row, inner: heads, outer: tokens }
        }
    }
}
