//! The engine's KV cache in memory that a transport can read.

use kv_proto::{BlockLayout, Dtype, GroupKind, RegionKind, RegionLayout};
#[cfg(target_os = "linux")]
use kv_transport::Pages;
use kv_transport::{Device, Memory, MemoryError};

use super::cache_layout::CacheLayout;
use super::model::{KvStore, ModelConfig};
use crate::device::HostDevice;

/// Bytes of a number.
const NUMBER: usize = 4;

/// What a cache is made for.
#[derive(Debug, Clone, Copy)]
pub struct CacheSpec<'a> {
    /// The model.
    pub model: &'a ModelConfig,
    /// Heads of the cache that this rank holds.
    pub heads: usize,
    /// How it lies in memory.
    pub layout: CacheLayout,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u32,
    /// In which memory.
    pub place: CachePlace<'a>,
}

/// In which memory a cache lies.
#[derive(Debug, Clone, Copy)]
pub enum CachePlace<'a> {
    /// The host's.
    Host {
        /// Other processes of this host can map it.
        shared: bool,
    },
    /// A device's.
    Device(&'a HostDevice),
    /// The host's, pinned for a device: a pool through which blocks pass.
    Pinned(&'a HostDevice),
}

/// What the cache holds of a model's block groups.
pub fn group_kinds(model: &ModelConfig) -> Vec<GroupKind> {
    let kind = |window: Option<usize>| match window {
        None => GroupKind::Full,
        Some(tokens) => GroupKind::Window { tokens: u32::try_from(tokens).unwrap_or(u32::MAX) },
    };
    model.block_groups().into_iter().map(kind).collect()
}

/// A paged cache.
///
/// The blocks of all block groups have their ids from one pool, so that a block belongs to one group at a time. The
/// first layers of all groups therefore lie in the same place, as do the second ones, and so on.
#[derive(Debug)]
pub struct MemoryStore {
    memory: Memory,
    /// The device that has it.
    device: Option<HostDevice>,
    layout: BlockLayout,
    heads: usize,
    /// Numbers of one head of one token: of its keys, and of its values.
    sizes: (usize, usize),
    /// Regions of each layer: one, or one for keys and one for values.
    parts: usize,
    scratch: Vec<u8>,
}

impl MemoryStore {
    /// Allocates the cache of one rank that holds `heads` KV heads, in the usual layout.
    pub fn new(
        model: &ModelConfig,
        heads: usize,
        block_tokens: u32,
        blocks: u32,
    ) -> Result<Self, MemoryError> {
        let (layout, place) = (CacheLayout::default(), CachePlace::Host { shared: false });
        Self::build(CacheSpec { model, heads, layout, block_tokens, blocks, place })
    }

    /// Allocates a cache.
    pub fn build(spec: CacheSpec<'_>) -> Result<Self, MemoryError> {
        let CacheSpec {
            model,
            heads,
            layout: CacheLayout { order, apart, rows },
            block_tokens,
            blocks,
            place,
        } = spec;
        let sizes = model.cache_sizes();
        let parts = if apart {
            vec![(RegionKind::Key, sizes.0), (RegionKind::Value, sizes.1)]
        } else {
            vec![(RegionKind::KeyValue, sizes.0 + sizes.1)]
        };
        let bytes_of = |numbers: usize| (heads * block_tokens as usize * numbers * NUMBER) as u64;
        let layer_bytes = bytes_of(sizes.0 + sizes.1);
        let mut places: Vec<u64> = vec![0; model.block_groups().len()];
        let mut regions = Vec::new();
        for layer in 0..model.num_hidden_layers {
            let group = model.block_group_of(layer);
            let mut at = places[group] * layer_bytes;
            places[group] += 1;
            for (kind, numbers) in &parts {
                let block_bytes = bytes_of(*numbers);
                regions.push(RegionLayout {
                    layer: format!("model.layers.{layer}"),
                    kind: *kind,
                    group: group as u32,
                    memory: 0,
                    base: if rows { at } else { at * u64::from(blocks) },
                    block_stride: block_bytes,
                    block_bytes,
                    dtype: Dtype::F32,
                    heads: heads as u32,
                    heads_total: model.cache_heads() as u32,
                    head_size: *numbers as u32,
                });
                at += block_bytes;
            }
        }
        let row = places.into_iter().max().unwrap_or(0) * layer_bytes;
        if rows {
            regions.iter_mut().for_each(|region| region.block_stride = row);
        }
        let groups = group_kinds(model);
        let layout = BlockLayout { block_tokens, blocks, kernel_tokens: 0, order, groups, regions };
        let bytes = usize::try_from(row.saturating_mul(u64::from(blocks))).unwrap_or(usize::MAX);
        let (memory, device) = match place {
            CachePlace::Host { shared } => (allocate(bytes, shared)?, None),
            CachePlace::Device(device) => (device.allocate(bytes)?, Some(device.clone())),
            CachePlace::Pinned(device) => (device.allocate_pinned(bytes)?, None),
        };
        Ok(Self { memory, device, layout, heads, sizes, parts: parts.len(), scratch: Vec::new() })
    }

    /// Where the blocks lie.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// The memory, to be registered with a transport.
    pub fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// Writes bytes as a kernel does: past the queue of copies.
    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        match &self.device {
            Some(device) if device.poke(self.memory.place().address + at, bytes) => Ok(()),
            Some(_) => Err(self.beyond(at, bytes.len())),
            None => self.memory.write(at, bytes),
        }
    }

    /// Reads bytes as a kernel does.
    fn get(&self, at: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        match &self.device {
            Some(device) if device.peek(self.memory.place().address + at, bytes) => Ok(()),
            Some(_) => Err(self.beyond(at, bytes.len())),
            None => self.memory.read(at, bytes),
        }
    }

    fn beyond(&self, offset: u64, len: usize) -> MemoryError {
        MemoryError::OutOfRange { offset, len: len as u64, size: self.memory.len() as u64 }
    }

    /// Where keys, and then where values are in a layer: the region, and the place of the first number in the row of a
    /// head of a token.
    fn sides(&self, layer: usize) -> [(&RegionLayout, usize, usize); 2] {
        let first = layer * self.parts;
        let keys = (&self.layout.regions[first], 0, self.sizes.0);
        let behind = if self.parts == 1 { self.sizes.0 } else { 0 };
        [keys, (&self.layout.regions[first + self.parts - 1], behind, self.sizes.1)]
    }

    /// How far apart heads and tokens are in a block of a region.
    fn steps(&self, region: &RegionLayout) -> (u64, u64) {
        let row = u64::from(region.head_size) * NUMBER as u64;
        self.layout.order.steps(self.heads as u64, u64::from(self.layout.block_tokens), row)
    }
}

fn block_at(region: &RegionLayout, block: u32) -> u64 {
    region.base + u64::from(block) * region.block_stride
}

impl KvStore for MemoryStore {
    fn write_token(&mut self, layer: usize, block: u32, slot: usize, keys: &[f32], values: &[f32]) {
        let mut scratch = std::mem::take(&mut self.scratch);
        for ((region, first, size), given) in self.sides(layer).into_iter().zip([keys, values]) {
            let (head_step, token_step) = self.steps(region);
            let at = block_at(region, block) + slot as u64 * token_step + (first * NUMBER) as u64;
            for (head, numbers) in given.chunks_exact(size).enumerate() {
                scratch.clear();
                scratch.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
                if let Err(error) = self.put(at + head as u64 * head_step, &scratch) {
                    // The scheduler only names blocks of its pool; anything else is a defect of this engine.
                    tracing::error!(%error, "KV of a token could not be written");
                }
            }
        }
        self.scratch = scratch;
    }

    fn read_block(&self, layer: usize, block: u32, out: &mut [f32]) {
        let tokens = self.layout.block_tokens as usize;
        let (keys, values) = out.split_at_mut(self.heads * tokens * self.sizes.0);
        let mut bytes = Vec::new();
        let mut read = None;
        for ((region, first, size), out) in self.sides(layer).into_iter().zip([keys, values]) {
            // Together, both are in the bytes that are read for the first of them.
            if read != Some(region.base) {
                read = Some(region.base);
                bytes.resize(region.block_bytes as usize, 0);
                if let Err(error) = self.get(block_at(region, block), &mut bytes) {
                    tracing::error!(%error, "a block could not be read");
                }
            }
            let (head_step, token_step) = self.steps(region);
            for (index, row) in out.chunks_exact_mut(size).enumerate() {
                let (head, token) = ((index / tokens) as u64, (index % tokens) as u64);
                let at = (head * head_step + token * token_step) as usize + first * NUMBER;
                let (numbers, _) = bytes[at..at + size * NUMBER].as_chunks::<NUMBER>();
                for (number, bytes) in row.iter_mut().zip(numbers) {
                    *number = f32::from_le_bytes(*bytes);
                }
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn allocate(bytes: usize, shared: bool) -> Result<Memory, MemoryError> {
    if shared { Memory::allocate_shared(bytes, Pages::Normal) } else { Memory::allocate(bytes) }
}

#[cfg(not(target_os = "linux"))]
fn allocate(bytes: usize, _shared: bool) -> Result<Memory, MemoryError> {
    Memory::allocate(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::model::{ModelKind, VecStore};
    use super::*;

    fn numbers(from: usize, count: usize) -> Vec<f32> {
        (0..count).map(|i| (from * 100 + i) as f32).collect()
    }

    fn store(model: &ModelConfig, heads: usize, layout: CacheLayout) -> MemoryStore {
        let place = CachePlace::Host { shared: false };
        let spec = CacheSpec { model, heads, layout, block_tokens: 4, blocks: 3, place };
        let store = MemoryStore::build(spec).unwrap();
        store.layout().check(&[store.memory().len() as u64]).unwrap();
        store
    }

    #[test]
    fn in_every_layout_it_agrees_with_the_plain_store() {
        for (kind, heads) in [(ModelKind::Gqa, 2), (ModelKind::Mla, 1)] {
            let config = ModelConfig::tiny_of(kind, 4);
            let sizes = config.cache_sizes();
            for layout in CacheLayout::all() {
                let mut real = store(&config, heads, layout);
                let mut plain = VecStore::with_sizes(config.num_hidden_layers, 3, 4, heads, sizes);
                for layer in 0..config.num_hidden_layers {
                    for slot in 0..4 {
                        let keys = numbers(layer * 10 + slot, heads * sizes.0);
                        let values = numbers(layer * 10 + slot + 5, heads * sizes.1);
                        real.write_token(layer, 2, slot, &keys, &values);
                        plain.write_token(layer, 2, slot, &keys, &values);
                    }
                }
                for (layer, block) in (0..config.num_hidden_layers).flat_map(|l| [(l, 0), (l, 1), (l, 2)]) {
                    let (mut a, mut b) = (vec![0.0; plain.block_len()], vec![1.0; plain.block_len()]);
                    real.read_block(layer, block, &mut a);
                    plain.read_block(layer, block, &mut b);
                    assert_eq!(a, b, "{kind:?} {layout} layer {layer} block {block}");
                }
            }
        }
    }

    /// What the layout says of the bytes is what is there: whoever follows it finds each number.
    #[test]
    fn the_bytes_lie_as_the_layout_says() {
        let config = ModelConfig::tiny();
        let (heads, width) = (2, config.head_size());
        for layout in CacheLayout::all() {
            let mut store = store(&config, heads, layout);
            let (keys, values) = (numbers(1, heads * width), numbers(2, heads * width));
            store.write_token(3, 1, 2, &keys, &values);
            let told = store.layout();
            for region in told.regions.iter().filter(|region| region.layer == "model.layers.3") {
                let row = u64::from(region.head_size) * 4;
                let expected = |head: usize| -> Vec<f32> {
                    let part = head * width..(head + 1) * width;
                    match region.kind {
                        RegionKind::Key => keys[part].to_vec(),
                        RegionKind::Value => values[part].to_vec(),
                        _ => [&keys[part.clone()], &values[part]].concat(),
                    }
                };
                for head in 0..heads {
                    let place = match told.order {
                        kv_proto::BlockOrder::HeadsTokens => head * 4 + 2,
                        _ => 2 * heads + head,
                    };
                    let at = region.base + region.block_stride + place as u64 * row;
                    let mut bytes = vec![0; row as usize];
                    store.memory().read(at, &mut bytes).unwrap();
                    let (found, _) = bytes.as_chunks::<4>();
                    let found: Vec<f32> = found.iter().map(|four| f32::from_le_bytes(*four)).collect();
                    assert_eq!(found, expected(head), "{layout} {} head {head}", region.kind);
                }
            }
        }
    }

    #[test]
    fn groups_share_their_places_and_tell_their_windows() {
        let config = ModelConfig::tiny_of(ModelKind::Hybrid, 4);
        for layout in CacheLayout::all() {
            let half = store(&config, 4, layout);
            let all = store(&ModelConfig::tiny(), 4, layout);
            assert_eq!(half.layout().groups, [GroupKind::Full, GroupKind::Window { tokens: 40 }]);
            assert_eq!(2 * half.memory().len(), all.memory().len(), "{layout}");
        }
    }
}
