//! The pool of KV blocks: reference counts, a prefix cache by chained hashes, and fences for blocks that a step in
//! flight may still touch.

use std::collections::{BTreeMap, VecDeque};

use kv_proto::BlockId;
use sha2::{Digest, Sha256};

/// Stands in block lists for blocks that are gone, in a pool that keeps it for that; nobody writes or reads it.
pub const PLACEHOLDER: BlockId = BlockId(0);

/// Names a block's contents: its own tokens and all before them.
pub type BlockHash = [u8; 32];

/// The hash of a block whose predecessor has the hash `parent`.
pub fn chain(parent: Option<&BlockHash>, tokens: &[u32]) -> BlockHash {
    let mut digest = Sha256::new();
    digest.update(parent.map_or(&[0u8; 32][..], |hash| &hash[..]));
    for token in tokens {
        digest.update(token.to_le_bytes());
    }
    digest.finalize().into()
}

#[derive(Debug, Clone, Default)]
struct Slot {
    users: u32,
    hash: Option<BlockHash>,
    /// Its place in the order of reuse while nobody uses it.
    age: u64,
}

/// The pool. A block is used by whoever allocated it or found it by its hash, until all have released it; then it
/// keeps its contents until it is needed for something else.
#[derive(Debug, Clone)]
pub struct BlockPool {
    slots: Vec<Slot>,
    unused: BTreeMap<u64, BlockId>,
    by_hash: BTreeMap<BlockHash, BlockId>,
    fenced: VecDeque<(u64, Vec<BlockId>)>,
    next_age: u64,
    /// Blocks that are never given out.
    kept: usize,
}

impl BlockPool {
    /// A pool of so many blocks, all unused.
    pub fn new(blocks: u32) -> Self {
        let mut pool = Self {
            slots: vec![Slot::default(); blocks as usize],
            unused: BTreeMap::new(),
            by_hash: BTreeMap::new(),
            fenced: VecDeque::new(),
            next_age: 0,
            kept: 0,
        };
        for id in 0..blocks {
            pool.retire(BlockId(id));
        }
        pool
    }

    /// The same, with [`PLACEHOLDER`] never given out.
    pub fn with_placeholder(blocks: u32) -> Self {
        let mut pool = Self::new(blocks);
        pool.unused.retain(|_, block| *block != PLACEHOLDER);
        pool.kept = pool.slots.len() - pool.unused.len();
        pool
    }

    fn retire(&mut self, block: BlockId) {
        let age = self.next_age;
        self.next_age += 1;
        self.slots[block.0 as usize].age = age;
        self.unused.insert(age, block);
    }

    /// Blocks that can be allocated now.
    pub fn free(&self) -> usize {
        self.unused.len()
    }

    /// Blocks that somebody uses, or that wait behind a fence.
    pub fn held(&self) -> usize {
        self.size() - self.unused.len()
    }

    /// Blocks that will be free when the steps that they wait for have ended.
    pub fn returning(&self) -> usize {
        let waiting = self.fenced.iter().flat_map(|(_, blocks)| blocks);
        waiting.filter(|block| self.slots[block.0 as usize].users == 1).count()
    }

    /// Whether others may find the block by its contents, so that nobody may write it.
    pub fn is_findable(&self, block: BlockId) -> bool {
        self.slots.get(block.0 as usize).is_some_and(|slot| slot.hash.is_some())
    }

    /// Blocks that can be given out, in all.
    pub fn size(&self) -> usize {
        self.slots.len() - self.kept
    }

    /// Takes `count` blocks, the longest unused first, or none if there are fewer.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if self.unused.len() < count {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let (_, block) = self.unused.pop_first()?;
            let slot = &mut self.slots[block.0 as usize];
            slot.users = 1;
            if let Some(hash) = slot.hash.take() {
                self.by_hash.remove(&hash);
            }
            taken.push(block);
        }
        Some(taken)
    }

    /// The longest run of cached blocks that hold `tokens` from their start, each now used once more.
    pub fn find_prefix(&mut self, tokens: &[u32], block_tokens: usize) -> Vec<BlockId> {
        let mut found = Vec::new();
        let mut parent = None;
        for part in tokens.chunks_exact(block_tokens) {
            let hash = chain(parent.as_ref(), part);
            let Some(block) = self.by_hash.get(&hash).copied() else { break };
            let slot = &mut self.slots[block.0 as usize];
            if slot.users == 0 {
                self.unused.remove(&slot.age);
            }
            slot.users += 1;
            found.push(block);
            parent = Some(hash);
        }
        found
    }

    /// Makes the full blocks among `blocks`, which hold `tokens`, findable. Only for blocks whose contents are
    /// beyond doubt: computed here, or loaded and confirmed.
    pub fn publish(&mut self, tokens: &[u32], blocks: &[BlockId], block_tokens: usize) {
        let mut parent = None;
        for (part, block) in tokens.chunks_exact(block_tokens).zip(blocks) {
            let hash = chain(parent.as_ref(), part);
            let slot = &mut self.slots[block.0 as usize];
            if slot.hash.is_none() && !self.by_hash.contains_key(&hash) {
                slot.hash = Some(hash);
                self.by_hash.insert(hash, *block);
            }
            parent = Some(hash);
        }
    }

    /// Gives blocks back. With a fence they can be allocated only after [`BlockPool::step_done`] of that step,
    /// since a step in flight may still write them.
    pub fn release(&mut self, blocks: Vec<BlockId>, fence: Option<u64>) {
        match fence {
            Some(step) if !blocks.is_empty() => self.fenced.push_back((step, blocks)),
            Some(_) => {}
            None => {
                for block in blocks.into_iter().rev() {
                    let slot = &mut self.slots[block.0 as usize];
                    debug_assert!(slot.users > 0, "{block} released once too often");
                    slot.users = slot.users.saturating_sub(1);
                    if slot.users == 0 {
                        self.retire(block);
                    }
                }
            }
        }
    }

    /// A step has ended on every rank: what waited for it is free.
    pub fn step_done(&mut self, step: u64) {
        while self.fenced.front().is_some_and(|(fence, _)| *fence <= step) {
            if let Some((_, blocks)) = self.fenced.pop_front() {
                self.release(blocks, None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(blocks: &[BlockId]) -> Vec<u32> {
        blocks.iter().map(|b| b.0).collect()
    }

    #[test]
    fn blocks_are_used_until_all_users_have_released_them() {
        let mut pool = BlockPool::new(4);
        let tokens: Vec<u32> = (0..8).collect();
        let mine = pool.allocate(2).unwrap();
        pool.publish(&tokens, &mine, 4);
        let found = pool.find_prefix(&tokens, 4);
        assert_eq!(found, mine);
        pool.release(mine, None);
        assert_eq!(pool.held(), 2, "the second user is still there");
        pool.release(found, None);
        assert_eq!((pool.held(), pool.free()), (0, 4));
    }

    #[test]
    fn a_prefix_is_found_as_far_as_it_agrees_and_only_while_its_blocks_live() {
        let mut pool = BlockPool::new(3);
        let mine = pool.allocate(3).unwrap();
        pool.publish(&[1, 2, 3, 4, 5, 6], &mine, 2);
        pool.release(mine, None);
        let found = pool.find_prefix(&[1, 2, 3, 4, 9, 9], 2);
        assert_eq!(ids(&found), [0, 1]);
        pool.release(found, None);
        assert!(pool.find_prefix(&[3, 4], 2).is_empty(), "the same tokens elsewhere are another block");
        let all = pool.allocate(3).unwrap();
        assert!(pool.find_prefix(&[1, 2], 2).is_empty());
        pool.release(all, None);
    }

    #[test]
    fn the_tail_of_a_sequence_is_reused_before_its_head() {
        let mut pool = BlockPool::new(3);
        let mine = pool.allocate(3).unwrap();
        pool.publish(&[1, 2, 3], &mine, 1);
        pool.release(mine, None);
        let other = pool.allocate(1).unwrap();
        assert_eq!(ids(&other), [2]);
        assert_eq!(pool.find_prefix(&[1, 2, 3], 1).len(), 2);
    }

    #[test]
    fn fenced_blocks_wait_for_their_step() {
        let mut pool = BlockPool::new(2);
        let mine = pool.allocate(2).unwrap();
        pool.release(mine, Some(7));
        assert_eq!((pool.free(), pool.held(), pool.returning()), (0, 2, 2));
        pool.step_done(6);
        assert!(pool.allocate(1).is_none());
        pool.step_done(7);
        assert_eq!((pool.free(), pool.held(), pool.returning()), (2, 0, 0));
    }

    #[test]
    fn the_placeholder_is_never_given_out_and_not_counted() {
        let mut pool = BlockPool::with_placeholder(3);
        assert_eq!((pool.size(), pool.free(), pool.held()), (2, 2, 0));
        assert_eq!(ids(&pool.allocate(2).unwrap()), [1, 2]);
        assert!(pool.allocate(1).is_none());
    }

    #[test]
    fn nothing_is_taken_when_there_is_too_little() {
        let mut pool = BlockPool::new(2);
        assert!(pool.allocate(3).is_none());
        assert_eq!(pool.free(), 2);
    }
}
