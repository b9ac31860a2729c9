//! The prefix cache of a simulated consumer: blocks by what they hold.
//!
//! A block is entered under its content, which is that of its prompt up to its end. It stays entered when its last user
//! has ended, until it is taken for something else. Whoever begins with the same tokens takes it over.

use std::collections::BTreeMap;

use super::world::World;

/// What a full block holds: a block of a prompt, by the prompt that first had it and the position.
pub(super) type Key = (usize, usize);

#[derive(Debug, Clone, Copy)]
struct Entry {
    block: u32,
    /// A load may still write it, and nobody takes it.
    loading: bool,
}

/// The cache.
#[derive(Debug, Clone, Default)]
pub(super) struct PrefixCache {
    entries: BTreeMap<Key, Entry>,
    keys: BTreeMap<u32, Key>,
}

impl PrefixCache {
    /// Whether the block is entered.
    pub(super) fn holds(&self, block: u32) -> bool {
        self.keys.contains_key(&block)
    }

    /// Enters a block. If another one with that content is there, that one stays.
    pub(super) fn enter(&mut self, key: Key, block: u32, loading: bool) {
        match self.entries.get_mut(&key) {
            Some(entry) if entry.block == block => entry.loading = loading,
            Some(_) => {}
            None => {
                self.evict(block);
                self.entries.insert(key, Entry { block, loading });
                self.keys.insert(block, key);
            }
        }
    }

    /// Nobody writes the block any more.
    pub(super) fn settle(&mut self, block: u32) {
        if let Some(entry) = self.keys.get(&block).and_then(|key| self.entries.get_mut(key)) {
            entry.loading = false;
        }
    }

    /// The block holds what it was entered for no longer.
    pub(super) fn evict(&mut self, block: u32) {
        if let Some(key) = self.keys.remove(&block) {
            self.entries.remove(&key);
        }
    }

    fn find(&self, key: Key) -> Option<u32> {
        self.entries.get(&key).filter(|entry| !entry.loading).map(|entry| entry.block)
    }
}

impl World {
    /// The content of a prompt's blocks, as far as they are full.
    pub(super) fn keys_of(&self, prompt: usize) -> Vec<Key> {
        let full = self.full_blocks(prompt);
        (0..full).map(|position| (self.origin(prompt, position), position)).collect()
    }

    /// The blocks of an engine's cache that a prompt begins with.
    pub(super) fn cached_prefix(&self, index: usize, prompt: usize) -> Vec<u32> {
        let cache = &self.engines[index].pool.cache;
        self.keys_of(prompt).into_iter().map_while(|key| cache.find(key)).collect()
    }

    /// Enters blocks of a prompt, those at these positions.
    pub(super) fn enter(
        &mut self,
        index: usize,
        prompt: usize,
        blocks: &[u32],
        positions: std::ops::Range<usize>,
        loading: bool,
    ) {
        if !self.engines[index].caches {
            return;
        }
        let keys = self.keys_of(prompt);
        let cache = &mut self.engines[index].pool.cache;
        for position in positions {
            let (Some(key), Some(block)) = (keys.get(position), blocks.get(position)) else { return };
            cache.enter(*key, *block, loading);
        }
    }
}
