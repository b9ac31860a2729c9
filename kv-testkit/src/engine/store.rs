//! The engine's KV cache in memory that a transport can read.

use kv_proto::{BlockLayout, BlockOrder, Dtype, RegionKind, RegionLayout};
#[cfg(target_os = "linux")]
use kv_transport::Pages;
use kv_transport::{Memory, MemoryError};

use super::model::{KvStore, ModelConfig};

/// A paged cache: for each layer one region, in it for each block keys then values, each by head, then token.
#[derive(Debug)]
pub struct MemoryStore {
    memory: Memory,
    layout: BlockLayout,
    heads: usize,
    head_size: usize,
    scratch: Vec<u8>,
}

impl MemoryStore {
    /// Allocates the cache of one rank that holds `heads` KV heads.
    pub fn new(
        config: &ModelConfig,
        heads: usize,
        block_tokens: u32,
        blocks: u32,
    ) -> Result<Self, MemoryError> {
        Self::build(config, heads, block_tokens, blocks, false)
    }

    /// The same in memory that other processes of this host can map.
    pub fn new_shared(
        config: &ModelConfig,
        heads: usize,
        block_tokens: u32,
        blocks: u32,
    ) -> Result<Self, MemoryError> {
        Self::build(config, heads, block_tokens, blocks, true)
    }

    fn build(
        config: &ModelConfig,
        heads: usize,
        block_tokens: u32,
        blocks: u32,
        shared: bool,
    ) -> Result<Self, MemoryError> {
        let head_size = config.head_size();
        let block_bytes = (2 * heads * block_tokens as usize * head_size * 4) as u64;
        let layers = config.num_hidden_layers as u64;
        let regions = (0..layers)
            .map(|layer| RegionLayout {
                layer: format!("model.layers.{layer}"),
                kind: RegionKind::KeyValue,
                group: 0,
                memory: 0,
                base: layer * block_bytes * u64::from(blocks),
                block_stride: block_bytes,
                block_bytes,
                dtype: Dtype::F32,
                heads: heads as u32,
                heads_total: config.num_key_value_heads as u32,
                head_size: 2 * head_size as u32,
            })
            .collect();
        let layout = BlockLayout {
            block_tokens,
            blocks,
            kernel_tokens: 0,
            order: BlockOrder::HeadsTokens,
            groups: vec![],
            regions,
        };
        let bytes = layers * u64::from(blocks) * block_bytes;
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let memory = allocate(bytes, shared)?;
        Ok(Self { memory, layout, heads, head_size, scratch: Vec::new() })
    }

    /// Where the blocks lie.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// The memory, to be registered with a transport.
    pub fn memory(&self) -> Memory {
        self.memory.clone()
    }

    fn block_at(&self, layer: usize, block: u32) -> u64 {
        let region = &self.layout.regions[layer];
        region.base + u64::from(block) * region.block_stride
    }
}

impl KvStore for MemoryStore {
    fn write_token(&mut self, layer: usize, block: u32, slot: usize, keys: &[f32], values: &[f32]) {
        let at = self.block_at(layer, block);
        let row = self.head_size * 4;
        let side = self.heads * self.layout.block_tokens as usize * row;
        for (which, given) in [keys, values].into_iter().enumerate() {
            for (head, numbers) in given.chunks_exact(self.head_size).enumerate() {
                self.scratch.clear();
                self.scratch.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
                let slot_at = (head * self.layout.block_tokens as usize + slot) * row;
                let at = at + (which * side + slot_at) as u64;
                if let Err(error) = self.memory.write(at, &self.scratch) {
                    // The scheduler only names blocks of its pool; anything else is a defect of this engine.
                    tracing::error!(%error, "KV of a token could not be written");
                }
            }
        }
    }

    fn read_block(&self, layer: usize, block: u32, out: &mut [f32]) {
        let mut bytes = vec![0; out.len() * 4];
        if let Err(error) = self.memory.read(self.block_at(layer, block), &mut bytes) {
            tracing::error!(%error, "a block could not be read");
        }
        for (number, four) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *number = f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
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
    use super::super::model::VecStore;
    use super::*;

    #[test]
    fn it_agrees_with_the_plain_store() {
        let config = ModelConfig::tiny();
        let mut real = MemoryStore::new(&config, 2, 4, 3).unwrap();
        let mut plain = VecStore::new(config.num_hidden_layers, 3, 4, 2, config.head_size());
        real.layout().check(&[real.memory().len() as u64]).unwrap();
        let numbers = |from: usize| -> Vec<f32> { (0..32).map(|i| (from * 100 + i) as f32).collect() };
        for layer in 0..config.num_hidden_layers {
            for slot in 0..4 {
                let (keys, values) = (numbers(layer * 10 + slot), numbers(layer * 10 + slot + 5));
                real.write_token(layer, 2, slot, &keys, &values);
                plain.write_token(layer, 2, slot, &keys, &values);
            }
            for block in 0..3 {
                let (mut a, mut b) = (vec![0.0; 256], vec![1.0; 256]);
                real.read_block(layer, block, &mut a);
                plain.read_block(layer, block, &mut b);
                assert_eq!(a, b);
            }
        }
    }
}
