//! The paged KV cache as the model sees it.

/// Where a model keeps keys and values: blocks of a fixed number of token slots, for each layer.
///
/// Sizes are those the store was made with. "Local heads" are the KV heads of the rank. Keys and values of a head are
/// as wide as [`ModelConfig::cache_sizes`](super::ModelConfig::cache_sizes) says; with a latent there is one head,
/// the latent stands for its keys, and the rotated part of all keys for its values.
pub trait KvStore {
    /// Writes one token's keys and values of a layer into a block's slot. `keys` have the shape
    /// `[local heads][key size]`, `values` likewise.
    fn write_token(&mut self, layer: usize, block: u32, slot: usize, keys: &[f32], values: &[f32]);

    /// Copies a block of a layer into `out`: keys `[local heads][block_tokens][key size]`, then values
    /// likewise. Slots that were never written may hold anything.
    fn read_block(&self, layer: usize, block: u32, out: &mut [f32]);
}

/// A KV cache in ordinary memory, laid out as [`KvStore::read_block`] gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct VecStore {
    blocks: usize,
    heads: usize,
    block_tokens: usize,
    /// Width of a head's keys and of its values.
    sizes: (usize, usize),
    data: Vec<f32>,
}

impl VecStore {
    /// A store of zeros for `layers` layers of `blocks` blocks, each of `block_tokens` tokens with `heads`
    /// heads of `head_dim` numbers, once for keys and once for values.
    pub fn new(layers: usize, blocks: usize, block_tokens: usize, heads: usize, head_dim: usize) -> Self {
        Self::with_sizes(layers, blocks, block_tokens, heads, (head_dim, head_dim))
    }

    /// The same for heads whose keys and values are of these widths.
    pub fn with_sizes(
        layers: usize,
        blocks: usize,
        block_tokens: usize,
        heads: usize,
        sizes: (usize, usize),
    ) -> Self {
        let data = vec![0.0; layers * blocks * heads * block_tokens * (sizes.0 + sizes.1)];
        Self { blocks, heads, block_tokens, sizes, data }
    }

    /// Numbers in one block of one layer: keys and values of all its slots.
    pub fn block_len(&self) -> usize {
        self.heads * self.block_tokens * (self.sizes.0 + self.sizes.1)
    }

    /// One block of one layer, in the layout of [`KvStore::read_block`].
    ///
    /// # Panics
    ///
    /// If the store has no such layer or block, as slices do.
    pub fn block(&self, layer: usize, block: u32) -> &[f32] {
        let len = self.block_len();
        let at = (layer * self.blocks + block as usize) * len;
        &self.data[at..at + len]
    }

    /// Like [`VecStore::block`], to write to; for handing blocks over, and for spoiling them in tests.
    ///
    /// # Panics
    ///
    /// If the store has no such layer or block, as slices do.
    pub fn block_mut(&mut self, layer: usize, block: u32) -> &mut [f32] {
        let len = self.block_len();
        let at = (layer * self.blocks + block as usize) * len;
        &mut self.data[at..at + len]
    }
}

impl KvStore for VecStore {
    fn write_token(&mut self, layer: usize, block: u32, slot: usize, keys: &[f32], values: &[f32]) {
        let (heads, block_tokens, sizes) = (self.heads, self.block_tokens, self.sizes);
        assert!(slot < block_tokens, "slot {slot} in a block of {block_tokens}");
        let whole = self.block_mut(layer, block);
        let (all_keys, all_values) = whole.split_at_mut(heads * block_tokens * sizes.0);
        for (side, given, size) in [(all_keys, keys, sizes.0), (all_values, values, sizes.1)] {
            for (head, row) in given.chunks_exact(size).enumerate() {
                let at = (head * block_tokens + slot) * size;
                side[at..at + size].copy_from_slice(row);
            }
        }
    }

    fn read_block(&self, layer: usize, block: u32, out: &mut [f32]) {
        out.copy_from_slice(self.block(layer, block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_lands_in_its_slot_of_every_head() {
        let mut store = VecStore::new(2, 3, 4, 2, 2);
        store.write_token(1, 2, 3, &[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0, 7.0, 8.0]);
        let mut out = vec![f32::NAN; store.block_len()];
        store.read_block(1, 2, &mut out);
        let mut expected = vec![0.0; 32];
        expected[6..8].copy_from_slice(&[1.0, 2.0]);
        expected[14..16].copy_from_slice(&[3.0, 4.0]);
        expected[22..24].copy_from_slice(&[5.0, 6.0]);
        expected[30..32].copy_from_slice(&[7.0, 8.0]);
        assert_eq!(out, expected);
        assert!(store.block(0, 2).iter().all(|&x| x == 0.0));
        assert!(store.block(1, 1).iter().all(|&x| x == 0.0));
    }

    #[test]
    fn blocks_can_be_handed_over() {
        let mut from = VecStore::new(1, 2, 1, 1, 2);
        let mut to = from.clone();
        from.write_token(0, 1, 0, &[1.0, 2.0], &[3.0, 4.0]);
        to.block_mut(0, 0).copy_from_slice(from.block(0, 1));
        assert_eq!(to.block(0, 0), [1.0, 2.0, 3.0, 4.0]);
    }
}
