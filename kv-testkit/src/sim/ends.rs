//! Ends of loads in a simulated world: what the engine makes of them, and what memory really holds.

use std::num::NonZeroU32;

use kv_proto::{BlockId, BlockList, RequestId};
use kv_recovery::{BlockRef, GroupTable, Holder, LoadState, Need, Policy, Situation};
use kv_sched::LoadResult;

use super::canary::Canary;
use super::engine::Role;
use super::invariants::Invariant;
use super::requests::{Request, Stage};
use super::shape::{stamp, state};
use super::world::World;

impl World {
    pub(super) fn load_ended(&mut self, index: usize, id: &RequestId, result: LoadResult) {
        let Some(request) = self.engines[index].requests.get(id).cloned() else {
            return self.violate(Invariant::EndsOnce, format!("a load of {id} ends, which is not there"));
        };
        if request.stage != Stage::Loading {
            return self
                .violate(Invariant::EndsOnce, format!("a load of {id} ends, which is {:?}", request.stage));
        }
        self.tell(|| format!("the load of {id} on D {index} ends: {}", short(&result)));
        // What is held may still be written.
        let held = matches!(result, LoadResult::Failed { hold: Some(_), .. });
        let quiet = if held { request.local_blocks as usize } else { request.blocks.len() };
        for (position, block) in request.blocks.iter().enumerate() {
            let pool = &mut self.engines[index].pool;
            if position < quiet {
                pool.tags[*block as usize] = None;
            }
            pool.cache.settle(*block);
        }
        match &result {
            LoadResult::Loaded { .. } => {
                self.loaded += 1;
                self.read_back += u64::from(self.engines[index].role == Role::Producer);
                self.recovered += u64::from(request.retries > 0);
            }
            LoadResult::Failed { .. } => self.failed += 1,
        }
        match result {
            LoadResult::Failed { .. } if !self.has(Canary::FailedTakenAsLoaded) => {
                self.load_failed(index, id, request, result);
            }
            LoadResult::Loaded { tokens, .. } => self.load_good(index, id, &request, tokens),
            LoadResult::Failed { .. } => self.load_good(index, id, &request, u32::MAX),
        }
    }

    /// A load is taken as good: so many tokens, or all that there are.
    fn load_good(&mut self, index: usize, id: &RequestId, request: &Request, tokens: u32) {
        self.judge_tokens(index, id, request, tokens);
        self.enter(index, request.prompt, &request.blocks, 0..request.blocks.len(), false);
        self.load_was_good(index, id, request);
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.good = record.blocks.len() as u32;
        }
        self.run_on(index, id);
    }

    fn load_failed(&mut self, index: usize, id: &RequestId, request: Request, result: LoadResult) {
        let LoadResult::Failed { hold, reason, detail, valid_tokens, invalid, .. } = result else { return };
        // What is kept of it is used like what was loaded.
        let block_tokens = self.engines[index].shape.block_tokens;
        let kept = valid_tokens / block_tokens;
        if kept > request.local_blocks {
            self.kept += 1;
            self.judge(index, id, &request, kept as usize);
        }
        if self.faults.is_empty() {
            let what = format!("no fault, and yet the load of {id} fails: {} ({detail})", reason.name());
            self.violate(Invariant::Calm, what);
        }
        let keep_tokens = self.cut(index, id, &invalid);
        let mut blocks = request.blocks.clone();
        if let Some(hold) = hold {
            let lost = blocks.split_off(request.local_blocks as usize);
            self.engines[index].pool.held.insert(hold, lost);
        }
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.blocks = blocks;
            record.good = keep_tokens / block_tokens;
            record.stage = Stage::Between;
        }
        self.ask_recovery(index, id, &request, reason, keep_tokens);
    }

    /// What invalid blocks do to the requests and the cache of an engine. Returns the tokens that the request of the
    /// failed load keeps.
    fn cut(&mut self, index: usize, id: &RequestId, invalid: &[BlockList]) -> u32 {
        let engine = &self.engines[index];
        let tables: Vec<(&RequestId, &Request, Vec<BlockId>)> = engine
            .requests
            .iter()
            .map(|(key, request)| (key, request, request.blocks.iter().copied().map(BlockId).collect()))
            .collect();
        let block_tokens = NonZeroU32::new(engine.shape.block_tokens).unwrap_or(NonZeroU32::MIN);
        let holders: Vec<Holder<'_, &RequestId>> = tables
            .iter()
            .map(|(key, request, blocks)| {
                let good_tokens = request.good * engine.shape.block_tokens;
                let all = self.prompt_len(request.prompt);
                // The others stand on what is good; whatever else they have is being written.
                let computed = if *key == id { request.covered } else { good_tokens.min(all) };
                let table = GroupTable { group: 0, block_tokens, blocks, need: Need::All };
                let state = if engine.enters_early {
                    LoadState::Running
                } else {
                    LoadState::Parked { cached_tokens: good_tokens }
                };
                Holder { key: *key, tables: vec![table], computed, scheduled: 0, state, lost: false }
            })
            .collect();
        let judged = kv_recovery::judge(&Situation {
            requests: &holders,
            // Where there are several groups, what is lost of the first one is lost of all.
            invalid: &BlockRef::of_lists(&invalid[..invalid.len().min(1)]),
            pool: engine.pool.size,
            null: None,
            policy: Policy::Recompute,
        });
        let keep = judged.cuts.iter().find(|cut| cut.key == id).map_or(0, |cut| cut.keep_tokens);
        let other = judged.cuts.iter().find(|cut| cut.affected && cut.key != id).map(|cut| cut.key.clone());
        if !self.has(Canary::CacheNotEvicted) {
            for BlockRef { block: BlockId(block), .. } in judged.evict {
                self.engines[index].pool.cache.evict(block);
            }
        }
        if let Some(other) = other {
            let what =
                format!("the failed load of {id} on D {index} spoils {other}, which had no part of it");
            self.violate(Invariant::Content, what);
        }
        keep
    }

    /// A request has what it can get, and whatever is missing is computed here, which takes the same turns.
    pub(super) fn run_on(&mut self, index: usize, id: &RequestId) {
        let turns = self.dice.between(1, 6);
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.stage = Stage::Running { left: turns, of: turns };
        }
    }

    /// So many blocks are taken as good: they must hold this prompt's content, each at its place.
    pub(super) fn judge(&mut self, index: usize, id: &RequestId, request: &Request, blocks: usize) {
        let block_tokens = u64::from(self.engines[index].shape.block_tokens);
        let tokens = (blocks as u64).saturating_mul(block_tokens);
        self.judge_tokens(index, id, request, u32::try_from(tokens).unwrap_or(u32::MAX));
    }

    fn judge_tokens(&mut self, index: usize, id: &RequestId, request: &Request, good: u32) {
        let engine = &self.engines[index];
        let (size, shape, tokens) = (engine.pool.size, engine.shape, self.prompt_len(request.prompt));
        let offered = shape.asked_of_producer(tokens);
        let here = good.min(offered);
        for (rank, worker) in engine.workers.iter().enumerate() {
            let (first, heads) = shape.heads_of(rank);
            for layer in shape.layers_of(rank) {
                if shape.is_state(layer) {
                    // It comes with the last token that is offered, or not at all.
                    let last = request.blocks.last().filter(|_| here == offered);
                    let cells = last.into_iter().flat_map(|block| (0..heads).map(move |head| (block, head)));
                    for (block, head) in cells {
                        let Some(cell) = shape.cell(size, rank, layer, *block, head, 0) else { continue };
                        let wanted = state(request.prompt, offered, layer, first + head);
                        if worker.memory[cell] != wanted {
                            let holds = worker.memory[cell];
                            let what = format!(
                                "{id} on D {index} goes on from a state (rank {rank}, layer {layer}, head {}) of \
                                 {holds} instead of {wanted}",
                                first + head
                            );
                            return self.violate(Invariant::Content, what);
                        }
                    }
                    continue;
                }
                for token in shape.first_token(layer, tokens)..here {
                    let position = token / shape.block_tokens;
                    let Some(block) = request.blocks.get(position as usize) else { continue };
                    for head in 0..heads {
                        let slot = token % shape.block_tokens;
                        let Some(cell) = shape.cell(size, rank, layer, *block, head, slot) else { continue };
                        let holds = worker.memory[cell];
                        let origin = self.origin_of_token(request.prompt, token);
                        let wanted = stamp(origin, token, layer, first + head);
                        if holds != wanted {
                            let what = format!(
                                "{id} on D {index} takes block {position} as good, but token {token} of it (rank \
                                 {rank}, layer {layer}, head {}) holds {holds} instead of {wanted}",
                                first + head
                            );
                            return self.violate(Invariant::Content, what);
                        }
                    }
                }
            }
        }
    }
}

fn short(result: &LoadResult) -> String {
    match result {
        LoadResult::Loaded { tokens, .. } => format!("{tokens} tokens loaded"),
        LoadResult::Failed { reason, detail, .. } => format!("failed, {} ({detail})", reason.name()),
    }
}
