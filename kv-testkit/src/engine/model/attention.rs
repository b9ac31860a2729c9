//! Attention over the paged KV cache.
//!
//! The positions of a sequence are taken in tiles of [`TILE`], counted from position 0 whatever the size of
//! the KV blocks. A tile is read once per chunk and layer, and each token of the chunk that sees it brings its
//! own softmax up to date (its maximum so far, its sum so far, and its weighted values so far). A token thus
//! goes through the same operations whether it comes alone or in a chunk.

use super::ops::{LANES, Lanes, Packed, exp, fold_max, fold_sum, larger, sums};
use super::store::KvStore;

/// Positions that are worked on together.
const TILE: usize = 128;

/// The sizes that attention works with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry<'a> {
    /// KV heads of this rank.
    pub(super) groups: usize,
    /// Query heads that read one KV head.
    pub(super) queries: usize,
    /// Width of a head.
    pub(super) head_dim: usize,
    /// Tokens in a KV block.
    pub(super) block_tokens: usize,
    /// Positions that a token sees, its own included, if they are not all.
    pub(super) window: Option<usize>,
    /// How a latent becomes keys and values, if that is what the store holds.
    pub(super) latent: Option<Latent<'a>>,
}

/// What a store of latents holds, and how heads' keys and values come of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Latent<'a> {
    /// For each head from the latent to the part of its keys that is not rotated, then to its values.
    pub(super) up: &'a Packed,
    /// Width of the latent.
    pub(super) width: usize,
    /// Width of the rotated part of the keys.
    pub(super) rotated: usize,
}

impl Geometry<'_> {
    /// The first position that the token at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// A chunk's place in its sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span<'a> {
    /// Position of the chunk's first token.
    pub(super) start: usize,
    /// Number of tokens.
    pub(super) len: usize,
    /// The sequence's blocks, in the order of its positions.
    pub(super) blocks: &'a [u32],
}

/// Memory that is used again from call to call.
#[derive(Debug, Clone, Default)]
pub(super) struct Attention {
    /// One KV block as the store gives it, or, of latents, as they become heads' keys and values.
    block: Vec<f32>,
    /// A block of latents as the store gives it, and what comes of each of them.
    latents: Vec<f32>,
    raised: Vec<f32>,
    /// Keys of a tile: per group and panel of [`LANES`] positions, `[head_dim][LANES]`.
    keys: Vec<f32>,
    /// Values of a tile: per group and panel of [`LANES`] dimensions, `[TILE][LANES]`.
    values: Vec<f32>,
    /// For each token and query head, the largest score and the sum of the weights so far.
    softmax: Vec<(f32, f32)>,
}

impl Attention {
    /// Computes attention of a chunk's tokens, whose own keys and values are in the store already.
    ///
    /// `queries` holds the rotated and scaled queries, `[len][groups * queries * head_dim]`; `out` gets the
    /// result in the same shape.
    pub(super) fn run(
        &mut self,
        geometry: Geometry<'_>,
        store: &dyn KvStore,
        layer: usize,
        span: Span<'_>,
        queries: &[f32],
        out: &mut [f32],
    ) {
        let Geometry { groups, queries: per_group, head_dim, block_tokens, .. } = geometry;
        let heads = groups * per_group;
        let width = heads * head_dim;
        let key_len = TILE * head_dim;
        let value_len = TILE * head_dim.next_multiple_of(LANES);
        self.block.resize(2 * groups * block_tokens * head_dim, 0.0);
        self.keys.resize(groups * key_len, 0.0);
        self.values.resize(groups * value_len, 0.0);
        self.softmax.clear();
        self.softmax.resize(span.len * heads, (f32::NEG_INFINITY, 0.0));
        out.fill(0.0);

        let end = span.start + span.len;
        let mut loaded = None;
        let first_seen = geometry.first_seen(span.start);
        for tile_start in (first_seen / TILE * TILE..end).step_by(TILE) {
            let tile_end = end.min(tile_start + TILE);
            // What no token of the chunk sees is not read: its blocks may be somebody else's by now.
            let unseen = first_seen.saturating_sub(tile_start);
            self.load(geometry, store, layer, span.blocks, (tile_start, unseen, tile_end), &mut loaded);
            for group in 0..groups {
                let keys = &self.keys[group * key_len..(group + 1) * key_len];
                let values = &self.values[group * value_len..(group + 1) * value_len];
                let tile = Tile { keys, values, head_dim };
                for token in tile_start.saturating_sub(span.start)..span.len {
                    let from = geometry.first_seen(span.start + token).saturating_sub(tile_start);
                    if from >= TILE {
                        continue;
                    }
                    let count = (tile_end - tile_start).min(span.start + token + 1 - tile_start);
                    let row = token * width + group * per_group * head_dim;
                    let row = row..row + per_group * head_dim;
                    let first = token * heads + group * per_group;
                    let softmax = &mut self.softmax[first..first + per_group];
                    tile.update((from, count), &queries[row.clone()], softmax, &mut out[row]);
                }
            }
        }
        for (row, &(_, sum)) in out.chunks_exact_mut(head_dim).zip(&self.softmax) {
            for value in row {
                *value /= sum;
            }
        }
    }

    /// Reads a tile's positions from the store, those from `unseen` on; those before count for nothing. `loaded` is the
    /// index of the block that `self.block` holds: a block that reaches into the next tile is not read again.
    fn load(
        &mut self,
        geometry: Geometry<'_>,
        store: &dyn KvStore,
        layer: usize,
        blocks: &[u32],
        (start, unseen, end): (usize, usize, usize),
        loaded: &mut Option<usize>,
    ) {
        let Geometry { groups, head_dim, block_tokens, .. } = geometry;
        let value_panels = head_dim.div_ceil(LANES);
        let half = groups * block_tokens * head_dim;
        if unseen > 0 {
            // Their weights are zero, and zero times what is no number is none.
            self.values.fill(0.0);
        }
        let mut position = start + unseen;
        while position < end {
            let index = position / block_tokens;
            if *loaded != Some(index) {
                self.read(geometry, store, layer, blocks[index]);
                *loaded = Some(index);
            }
            let slot = position % block_tokens;
            let count = (block_tokens - slot).min(end - position);
            let (block_keys, block_values) = self.block.split_at(half);
            for group in 0..groups {
                let rows = (group * block_tokens + slot) * head_dim;
                let rows = rows..rows + count * head_dim;
                let at = position - start;

                let tile = &mut self.keys[group * TILE * head_dim..][..TILE * head_dim];
                for (place, row) in (at..).zip(block_keys[rows.clone()].chunks_exact(head_dim)) {
                    let panel = &mut tile[place / LANES * LANES * head_dim..][..LANES * head_dim];
                    for (lanes, &value) in panel.as_chunks_mut::<LANES>().0.iter_mut().zip(row) {
                        lanes[place % LANES] = value;
                    }
                }

                let tile =
                    &mut self.values[group * TILE * value_panels * LANES..][..TILE * value_panels * LANES];
                for (place, row) in (at..).zip(block_values[rows].chunks_exact(head_dim)) {
                    let (whole, rest) = row.as_chunks::<LANES>();
                    let (lanes, _) = tile.as_chunks_mut::<LANES>();
                    for (panel, part) in whole.iter().enumerate() {
                        lanes[panel * TILE + place] = *part;
                    }
                    if !rest.is_empty() {
                        lanes[whole.len() * TILE + place][..rest.len()].copy_from_slice(rest);
                    }
                }
            }
            position += count;
        }
    }

    /// Reads a block; latents become keys and values of every head.
    fn read(&mut self, geometry: Geometry<'_>, store: &dyn KvStore, layer: usize, block: u32) {
        let Geometry { groups, head_dim, block_tokens, .. } = geometry;
        let Some(Latent { up, width, rotated }) = geometry.latent else {
            return store.read_block(layer, block, &mut self.block);
        };
        let plain = head_dim - rotated;
        let row = groups * (plain + head_dim);
        self.latents.resize(block_tokens * (width + rotated), 0.0);
        self.raised.resize(block_tokens * row, 0.0);
        store.read_block(layer, block, &mut self.latents);
        let (latents, shared) = self.latents.split_at(block_tokens * width);
        up.multiply(latents, width, &mut self.raised);
        let (keys, values) = self.block.split_at_mut(groups * block_tokens * head_dim);
        let tokens = self.raised.chunks_exact(row).zip(shared.chunks_exact(rotated)).enumerate();
        for (slot, (raised, shared)) in tokens {
            for (head, raised) in raised.chunks_exact(plain + head_dim).enumerate() {
                let at = (head * block_tokens + slot) * head_dim;
                keys[at..at + plain].copy_from_slice(&raised[..plain]);
                keys[at + plain..at + head_dim].copy_from_slice(shared);
                values[at..at + head_dim].copy_from_slice(&raised[plain..]);
            }
        }
    }
}

/// One group's keys and values of a tile.
struct Tile<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    head_dim: usize,
}

impl Tile<'_> {
    /// Takes the tile's positions from the one to before the other into account for one token's query heads of the group.
    fn update(&self, seen: (usize, usize), queries: &[f32], softmax: &mut [(f32, f32)], out: &mut [f32]) {
        let head_dim = self.head_dim;
        // Two heads at a time share what is loaded of keys and values.
        let mut out = out.chunks_exact_mut(2 * head_dim);
        let mut queries = queries.chunks_exact(2 * head_dim);
        let mut softmax = softmax.chunks_exact_mut(2);
        for ((out, queries), softmax) in (&mut out).zip(&mut queries).zip(&mut softmax) {
            let (upper, lower) = queries.split_at(head_dim);
            let scores = self.weigh([upper, lower], seen, softmax);
            self.add(scores, seen.1, out);
        }
        let (queries, softmax, out) = (queries.remainder(), softmax.into_remainder(), out.into_remainder());
        if !queries.is_empty() {
            let scores = self.weigh([queries], seen, softmax);
            self.add(scores, seen.1, out);
        }
    }

    /// Computes the weights of the positions that are seen and brings maximum and sum up to date. With the weights
    /// comes the factor by which what was added up under the old maximum must shrink.
    #[inline(always)]
    fn weigh<const HEADS: usize>(
        &self,
        queries: [&[f32]; HEADS],
        (from, count): (usize, usize),
        softmax: &mut [(f32, f32)],
    ) -> [(f32, [f32; TILE]); HEADS] {
        let mut result = [(1.0, [0.0; TILE]); HEADS];
        let panels = count.div_ceil(LANES);
        for (panel, keys) in self.keys.chunks_exact(LANES * self.head_dim).take(panels).enumerate() {
            for ((_, scores), lanes) in result.iter_mut().zip(sums(queries, keys)) {
                scores[panel * LANES..][..LANES].copy_from_slice(&lanes);
            }
        }
        for ((factor, scores), (maximum, sum)) in result.iter_mut().zip(softmax) {
            // What the window has left, what lies behind the token, or was never written, must count for nothing.
            scores[..from].fill(f32::NEG_INFINITY);
            scores[count..panels * LANES].fill(f32::NEG_INFINITY);
            let (scores, _) = scores[..panels * LANES].as_chunks_mut::<LANES>();
            let mut largest = [*maximum; LANES];
            for lanes in scores.iter() {
                for (largest, &score) in largest.iter_mut().zip(lanes) {
                    *largest = larger(score, *largest);
                }
            }
            let largest = fold_max(largest);
            let mut weights: Lanes = [0.0; LANES];
            for lanes in scores {
                for (weight, score) in weights.iter_mut().zip(lanes) {
                    *score = exp(*score - largest);
                    *weight += *score;
                }
            }
            *factor = exp(*maximum - largest);
            *maximum = largest;
            *sum = *sum * *factor + fold_sum(weights);
        }
        result
    }

    /// Shrinks what was added up so far and adds the tile's weighted values.
    #[inline(always)]
    fn add<const HEADS: usize>(&self, scores: [(f32, [f32; TILE]); HEADS], count: usize, out: &mut [f32]) {
        let weights: [&[f32]; HEADS] = std::array::from_fn(|head| &scores[head].1[..count]);
        for (panel, values) in self.values.chunks_exact(TILE * LANES).enumerate() {
            let added = sums(weights, &values[..count * LANES]);
            for ((row, lanes), (factor, _)) in out.chunks_exact_mut(self.head_dim).zip(added).zip(&scores) {
                for (value, lane) in row.iter_mut().skip(panel * LANES).zip(lanes) {
                    *value = *value * *factor + lane;
                }
            }
        }
    }
}
