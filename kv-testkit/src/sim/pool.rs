//! Blocks of an engine in a simulated world: who has them, and what they hold.

use std::collections::BTreeMap;

use kv_proto::{LoadId, RequestId};
use kv_sched::{HoldId, Verdict};

use super::cache::PrefixCache;
use super::canary::Canary;
use super::invariants::Invariant;
use super::shape::{stamp, state};
use super::world::{Event, HEAL_AT, Time, World};

/// What an aborted, freed or never written cell holds.
pub(super) const GARBAGE: u64 = 0;
/// What a cell holds that belongs to a request outside the story.
const FOREIGN: u64 = 7;

/// A pool of blocks. `tags` says which load may write a block of a consumer.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    pub(super) size: u32,
    free: Vec<u32>,
    /// How many have each block: a consumer's requests share what they found in the cache.
    users: Vec<u32>,
    /// What a consumer's blocks are known to hold, used or free.
    pub(super) cache: PrefixCache,
    pub(super) tags: Vec<Option<LoadId>>,
    pub(super) held: BTreeMap<HoldId, Vec<u32>>,
    /// Blocks of requests outside the story, and until when these take what they can get.
    foreign: Vec<u32>,
    pressed_until: Time,
    /// What holds had that were released; for a canary.
    released: BTreeMap<HoldId, Vec<u32>>,
}

impl Pool {
    pub(super) fn new(size: u32) -> Self {
        Self {
            size,
            free: (0..size).collect(),
            users: vec![0; size as usize],
            cache: PrefixCache::default(),
            tags: vec![None; size as usize],
            held: BTreeMap::new(),
            foreign: Vec::new(),
            pressed_until: 0,
            released: BTreeMap::new(),
        }
    }

    pub(super) fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Takes so many blocks, if there are as many. The first of them are these, which are in the cache; others leave it
    /// when they are taken.
    pub(super) fn take(&mut self, found: &[u32], count: usize) -> Option<Vec<u32>> {
        let idle = found.iter().filter(|block| self.users[**block as usize] == 0).count();
        let more = count.saturating_sub(found.len());
        if self.free.len() < idle + more {
            return None;
        }
        self.free.retain(|block| !found.contains(block));
        let mut blocks = found.to_vec();
        blocks.extend(self.free.drain(..more));
        for block in &blocks[found.len()..] {
            self.cache.evict(*block);
        }
        for block in &blocks {
            self.users[*block as usize] += 1;
        }
        Some(blocks)
    }
}

impl World {
    /// Writes a block on every rank: what each layer, head and token of the block, counted from 0, is to hold. Of a state
    /// the first token's stands for the whole.
    pub(super) fn fill(&mut self, index: usize, block: u32, what: impl Fn(usize, u32, u32) -> u64) {
        let engine = &mut self.engines[index];
        let (size, shape) = (engine.pool.size, engine.shape);
        for (rank, worker) in engine.workers.iter_mut().enumerate() {
            let (first, heads) = shape.heads_of(rank);
            for layer in shape.layers_of(rank) {
                for head in 0..heads {
                    for slot in shape.slots_of(rank) {
                        if let Some(cell) = shape.cell(size, rank, layer, block, head, slot) {
                            worker.memory[cell] = what(layer, first + head, slot);
                        }
                    }
                }
            }
        }
    }

    /// Writes a block of a prompt on every rank. What has left a layer's window is gone. With `after` it gets the state after
    /// so many tokens too, where there is one.
    pub(super) fn fill_with(
        &mut self,
        index: usize,
        block: u32,
        prompt: usize,
        position: usize,
        after: Option<u32>,
    ) {
        let shape = self.engines[index].shape;
        let tokens = self.prompt_len(prompt);
        let first = position as u32 * shape.block_tokens;
        let origin: Vec<usize> =
            (first..first + shape.block_tokens).map(|token| self.origin_of_token(prompt, token)).collect();
        self.fill(index, block, |layer, head, slot| {
            if shape.is_state(layer) {
                return after.map_or(GARBAGE, |tokens| state(prompt, tokens, layer, head));
            }
            let token = first + slot;
            let left = token < shape.first_token(layer, tokens);
            if left { GARBAGE } else { stamp(origin[slot as usize], token, layer, head) }
        });
    }

    /// Does with blocks what the scheduler half says.
    pub(super) fn follow(&mut self, index: usize, id: &RequestId, blocks: &[u32], verdict: Verdict) {
        let freed = match verdict {
            Verdict::Free => true,
            Verdict::Hold(HoldId::Lease(_)) => self.has(Canary::BlocksFreedAtFinish),
            Verdict::Hold(HoldId::Load(_)) => self.has(Canary::DestinationFreedOnAbort),
        };
        if let Verdict::Hold(hold) = verdict {
            let kept = if freed { Vec::new() } else { blocks.to_vec() };
            let engine = &mut self.engines[index];
            if engine.pool.held.insert(hold, kept).is_some() {
                return self.violate(Invariant::EndsOnce, format!("{hold:?} holds twice on engine {index}"));
            }
            if matches!(hold, HoldId::Lease(_)) {
                engine.handed_over.insert(id.clone(), hold);
            }
        }
        if freed {
            self.release(index, blocks);
        }
    }

    /// A user lets go of blocks. Those without another one go back to the pool, and their contents are gone, unless the
    /// cache knows what they hold.
    pub(super) fn release(&mut self, index: usize, blocks: &[u32]) {
        for block in blocks {
            if self.engines[index].pool.free.contains(block) {
                let what = format!("block {block} of engine {index} is freed twice");
                return self.violate(Invariant::Conserved, what);
            }
            let pool = &mut self.engines[index].pool;
            let users = &mut pool.users[*block as usize];
            *users = users.saturating_sub(1);
            if *users > 0 {
                continue;
            }
            pool.tags[*block as usize] = None;
            pool.free.push(*block);
            if !pool.cache.holds(*block) {
                self.fill(index, *block, |_, _, _| GARBAGE);
            }
        }
        self.wake(index);
    }

    /// A hold has ended: its blocks are free.
    pub(super) fn release_hold(&mut self, index: usize, hold: HoldId, request: &RequestId) {
        self.tell(|| format!("{hold:?} of {request} ends on engine {index}"));
        let by_name = self.has(Canary::RequestIdTakenForLease);
        let keeps = self.has(Canary::DuplicateReleaseFreesTwice);
        let engine = &mut self.engines[index];
        let newest = engine.handed_over.get(request).copied();
        if newest == Some(hold) || by_name {
            engine.handed_over.remove(request);
        }
        let hold = newest.filter(|_| by_name).unwrap_or(hold);
        let Some(blocks) = engine.pool.held.remove(&hold) else {
            let what = format!("{hold:?} is released on engine {index}, but holds nothing");
            return self.violate(Invariant::EndsOnce, what);
        };
        if keeps {
            engine.pool.released.insert(hold, blocks.clone());
        }
        self.release(index, &blocks);
    }

    /// The canary: an end that is reported again.
    pub(super) fn release_again(&mut self, index: usize, hold: HoldId) {
        if let Some(blocks) = self.engines[index].pool.released.get(&hold).cloned() {
            self.release(index, &blocks);
        }
    }

    /// Requests outside the story take every free block, until a time.
    pub(super) fn press_pool(&mut self, index: usize, until: Time) {
        if !self.engines[index].alive || self.now >= HEAL_AT {
            return;
        }
        let until = until.min(HEAL_AT);
        self.tell(|| format!("other requests take the free blocks of engine {index} for a while"));
        let engine = &mut self.engines[index];
        engine.pool.pressed_until = until;
        let life = engine.life;
        self.take_foreign(index);
        self.at(until, Event::PoolEased { engine: index, life });
    }

    /// As long as others press, they are faster than the requests of the story.
    pub(super) fn take_foreign(&mut self, index: usize) {
        let pool = &mut self.engines[index].pool;
        if pool.pressed_until <= self.now {
            return;
        }
        let taken = std::mem::take(&mut pool.free);
        pool.foreign.extend(&taken);
        for block in taken {
            let pool = &mut self.engines[index].pool;
            pool.cache.evict(block);
            pool.users[block as usize] = 1;
            self.fill(index, block, |_, _, _| FOREIGN);
        }
    }

    pub(super) fn ease_pool(&mut self, index: usize, life: u32) {
        if self.engines[index].life == life && self.engines[index].alive {
            self.tell(|| format!("the other requests of engine {index} have ended"));
            let blocks = std::mem::take(&mut self.engines[index].pool.foreign);
            self.release(index, &blocks);
        }
    }
}
