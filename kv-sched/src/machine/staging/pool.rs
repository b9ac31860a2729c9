//! Which blocks of the host pool are free.

use std::collections::BTreeSet;

use kv_proto::{BlockId, BlockList};

/// The free blocks. Block groups share the pool; a block is of one of them at a time.
#[derive(Debug, Clone, Hash)]
pub(super) struct HostPool {
    free: BTreeSet<BlockId>,
}

impl HostPool {
    pub(super) fn new(blocks: u32) -> Self {
        Self { free: (0..blocks).map(BlockId).collect() }
    }

    /// Number of free blocks.
    pub(super) fn free(&self) -> u32 {
        u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    /// Takes lists of so many blocks, the lowest first since neighbours make one range, or nothing if there are fewer.
    pub(super) fn take(&mut self, lists: impl Iterator<Item = u32> + Clone) -> Option<Vec<BlockList>> {
        let needed = lists.clone().fold(0u64, |sum, count| sum + u64::from(count));
        if needed > self.free.len() as u64 {
            return None;
        }
        let mut list = |count| (0..count).filter_map(|_| self.free.pop_first()).collect();
        Some(lists.map(&mut list).collect())
    }

    /// Gives blocks back.
    pub(super) fn give(&mut self, blocks: impl Iterator<Item = BlockId>) {
        for block in blocks {
            let is_new = self.free.insert(block);
            debug_assert!(is_new, "{block} was free already");
        }
    }
}
