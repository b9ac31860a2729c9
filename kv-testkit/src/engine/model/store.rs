//! The paged KV cache as the model sees it.

/// Where a model keeps keys and values: blocks of a fixed number of token slots, for each layer.
///
/// Sizes are those the store was made with. "Local heads" are the KV heads of the rank.
pub trait KvStore {
    /// Writes one token's keys and values of a layer into a block's slot. `keys` and `values` have the shape
    /// `[local heads][head_dim]`.
    fn write_token(&mut self, layer: usize, block: u32, slot: usize, keys: &[f32], values: &[f32]);

    /// Copies a block of a layer into `out`: keys `[local heads][block_tokens][head_dim]`, then values in the
    /// same shape. Slots that were never written may hold anything.
    fn read_block(&self, layer: usize, block: u32, out: &mut [f32]);
}

/// A KV cache in ordinary memory, laid out as [`KvStore::read_block`] gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct VecStore {
    blocks: usize,
    heads: usize,
    block_tokens: usize,
    head_dim: usize,
    data: Vec<f32>,
}

impl VecStore {
    /// A store of zeros for `layers` layers of `blocks` blocks, each of `block_tokens` tokens with `heads`
    /// heads of `head_dim` numbers, once for keys and once for values.
    pub fn new(layers: usize, blocks: usize, block_tokens: usize, heads: usize, head_dim: usize) -> Self {
        let data = vec![0.0; layers * blocks * 2 * heads * block_tokens * head_dim];
        Self { blocks, heads, block_tokens, head_dim, data }
    }

    /// Numbers in one block of one layer: keys and values of all its slots.
    pub fn block_len(&self) -> usize {
        2 * self.heads * self.block_tokens * self.head_dim
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
        let (heads, block_tokens, head_dim) = (self.heads, self.block_tokens, self.head_dim);
        assert!(slot < block_tokens, "slot {slot} in a block of {block_tokens}");
        let whole = self.block_mut(layer, block);
        let (all_keys, all_values) = whole.split_at_mut(heads * block_tokens * head_dim);
        for (side, given) in [(all_keys, keys), (all_values, values)] {
            for (head, row) in given.chunks_exact(head_dim).enumerate() {
                let at = (head * block_tokens + slot) * head_dim;
                side[at..at + head_dim].copy_from_slice(row);
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
