//! Running tokens through a shard.

use super::attention::{Attention, Geometry, Latent, Span};
use super::error::ModelError;
use super::ops::{argmax, gate_with_silu, rms_norm, rotate};
use super::reduce::GroupReduce;
use super::shard::{Cached, Layer, Shard};
use super::store::KvStore;

/// Some consecutive positions of one sequence: a piece of a prompt, or the one token of a decode step.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first token. Keys and values of all positions before it are in the store.
    pub start: usize,
    /// The sequence's blocks of the first block group in the order of its positions, at least up to the chunk's last
    /// position. Blocks of positions that a window has left are not looked at.
    pub blocks: &'a [u32],
    /// Those of the second block group, if the model has one ([`ModelConfig::block_groups`](super::ModelConfig)).
    pub window_blocks: &'a [u32],
    /// Whether the token that follows the chunk is asked for.
    pub wants_token: bool,
}

impl Chunk<'_> {
    /// The blocks of a block group.
    const fn table(&self, group: usize) -> &[u32] {
        if group == 0 { self.blocks } else { self.window_blocks }
    }
}

/// Memory that is used again from call to call.
#[derive(Debug, Clone, Default)]
pub(super) struct Scratch {
    attention: Attention,
    /// The residual stream, `[tokens][hidden]`.
    stream: Vec<f32>,
    /// The stream after a norm, in the same shape.
    normed: Vec<f32>,
    /// `[tokens][query heads * head_dim]`, and the outcome of attention in the same shape.
    queries: Vec<f32>,
    mixed: Vec<f32>,
    /// `[tokens][KV heads * head_dim]`, or the latent and the rotated part of the keys.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Both of these as they come out of one product.
    latents: Vec<f32>,
    /// `[tokens][ffn columns]`.
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `[groups][tokens][hidden]`.
    partials: Vec<f32>,
    /// Cosines and sines of the tokens' positions, `[tokens][rotated dimensions / 2]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
    logits: Vec<f32>,
}

impl Shard {
    /// Runs a batch of chunks: writes the keys and values of their tokens into the store, and gives for each
    /// chunk that wants it the token that follows (the most likely one, of equal ones the lowest id).
    ///
    /// `block_tokens` is the number of tokens in a block of the store. The answers and what is written do
    /// not depend, to the bit, on how tokens are cut into chunks and batches, on the size of the blocks, or
    /// on the number of ranks.
    ///
    /// With several ranks, all of them make the same calls with stores of their own: `reduce` is called twice
    /// per layer. Every rank gives the same tokens.
    ///
    /// # Errors
    ///
    /// [`ModelError::EmptyChunk`], [`ModelError::Token`], [`ModelError::TooLong`],
    /// [`ModelError::TooFewBlocks`] or [`ModelError::Zero`] (for `block_tokens`) if a chunk does not fit;
    /// nothing is written then. [`ModelError::Reduce`] or [`ModelError::ReducedLength`] if the ranks fail to
    /// add up their results; the chunks' positions in the store then hold nothing of use.
    pub fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        block_tokens: usize,
        store: &mut dyn KvStore,
        reduce: &mut dyn GroupReduce,
    ) -> Result<Vec<Option<u32>>, ModelError> {
        self.check(chunks, block_tokens)?;
        if chunks.is_empty() {
            return Ok(Vec::new());
        }
        // Taken out so that the layers can be borrowed beside it.
        let mut scratch = std::mem::take(&mut self.scratch);
        let done = self.run(chunks, block_tokens, store, reduce, &mut scratch);
        self.scratch = scratch;
        done
    }

    fn check(&self, chunks: &[Chunk<'_>], block_tokens: usize) -> Result<(), ModelError> {
        if block_tokens == 0 {
            return Err(ModelError::Zero { field: "block_tokens" });
        }
        let (vocab_size, max) = (self.config.vocab_size, self.config.max_position_embeddings);
        for (index, chunk) in chunks.iter().enumerate() {
            if chunk.tokens.is_empty() {
                return Err(ModelError::EmptyChunk { chunk: index });
            }
            let end = chunk.start.saturating_add(chunk.tokens.len());
            if end > max {
                return Err(ModelError::TooLong { position: end - 1, max });
            }
            for group in 0..self.config.block_groups().len() {
                let (needed, given) = (end.div_ceil(block_tokens), chunk.table(group).len());
                if given < needed {
                    return Err(ModelError::TooFewBlocks { needed, given, block_tokens });
                }
            }
            for (position, &token) in (chunk.start..).zip(chunk.tokens) {
                if token as usize >= vocab_size {
                    return Err(ModelError::Token { token, position, vocab_size });
                }
            }
        }
        Ok(())
    }

    fn run(
        &self,
        chunks: &[Chunk<'_>],
        block_tokens: usize,
        store: &mut dyn KvStore,
        reduce: &mut dyn GroupReduce,
        scratch: &mut Scratch,
    ) -> Result<Vec<Option<u32>>, ModelError> {
        let hidden = self.config.hidden_size;
        let tokens = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        self.prepare(chunks, tokens, scratch);
        for (index, layer) in self.layers.iter().enumerate() {
            self.norm(&layer.attention_norm, &scratch.stream, &mut scratch.normed);
            self.attend(index, layer, chunks, block_tokens, store, scratch);
            let columns = self.config.queries_per_group() * self.config.head_size();
            let width = self.groups * columns;
            for (group, output) in layer.output.iter().enumerate() {
                let partial = &mut scratch.partials[group * tokens * hidden..][..tokens * hidden];
                output.multiply(&scratch.mixed[group * columns..], width, partial);
            }
            add(&mut scratch.stream, &reduce.reduce(&scratch.partials, self.groups, tokens * hidden)?)?;

            self.norm(&layer.ffn_norm, &scratch.stream, &mut scratch.normed);
            layer.gate.multiply(&scratch.normed, hidden, &mut scratch.gate);
            layer.up.multiply(&scratch.normed, hidden, &mut scratch.up);
            gate_with_silu(&mut scratch.gate, &scratch.up);
            let columns = self.config.intermediate_size / self.config.groups();
            let width = self.groups * columns;
            for (group, down) in layer.down.iter().enumerate() {
                let partial = &mut scratch.partials[group * tokens * hidden..][..tokens * hidden];
                down.multiply(&scratch.gate[group * columns..], width, partial);
            }
            add(&mut scratch.stream, &reduce.reduce(&scratch.partials, self.groups, tokens * hidden)?)?;
        }
        Ok(self.next_tokens(chunks, scratch))
    }

    /// Sizes the buffers, looks up the embeddings and computes the rotations.
    fn prepare(&self, chunks: &[Chunk<'_>], tokens: usize, scratch: &mut Scratch) {
        let hidden = self.config.hidden_size;
        let queries = self.groups * self.config.queries_per_group() * self.config.head_size();
        let ffn = self.config.intermediate_size / self.config.groups() * self.groups;
        let (key, value) = self.config.cache_sizes();
        scratch.normed.resize(tokens * hidden, 0.0);
        scratch.queries.resize(tokens * queries, 0.0);
        scratch.mixed.resize(tokens * queries, 0.0);
        scratch.keys.resize(tokens * self.cache_heads() * key, 0.0);
        scratch.values.resize(tokens * self.cache_heads() * value, 0.0);
        scratch.gate.resize(tokens * ffn, 0.0);
        scratch.up.resize(tokens * ffn, 0.0);
        scratch.partials.resize(self.groups * tokens * hidden, 0.0);
        scratch.stream.clear();
        scratch.cos.clear();
        scratch.sin.clear();
        for chunk in chunks {
            for (position, &token) in (chunk.start..).zip(chunk.tokens) {
                scratch.stream.extend_from_slice(&self.embedding[token as usize * hidden..][..hidden]);
                for frequency in &self.frequencies {
                    let (sin, cos) = (position as f64 * frequency).sin_cos();
                    scratch.cos.push(cos as f32);
                    scratch.sin.push(sin as f32);
                }
            }
        }
    }

    fn norm(&self, gain: &[f32], stream: &[f32], out: &mut [f32]) {
        let hidden = self.config.hidden_size;
        for (row, out) in stream.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden)) {
            rms_norm(row, gain, self.config.rms_norm_eps as f32, out);
        }
    }

    /// From `normed` to `mixed`: projections, rotation, writing to the store, and attention.
    fn attend(
        &self,
        index: usize,
        layer: &Layer,
        chunks: &[Chunk<'_>],
        block_tokens: usize,
        store: &mut dyn KvStore,
        scratch: &mut Scratch,
    ) {
        let (hidden, head_dim) = (self.config.hidden_size, self.config.head_size());
        let queries_width = self.groups * self.config.queries_per_group() * head_dim;
        let (key, value) = self.config.cache_sizes();
        let (keys_width, values_width) = (self.cache_heads() * key, self.cache_heads() * value);
        layer.query.multiply(&scratch.normed, hidden, &mut scratch.queries);
        self.make_entries(layer, scratch);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (rotated, pairs) = (self.config.rotated(), self.frequencies.len());
        let angles = scratch.cos.chunks_exact(pairs).zip(scratch.sin.chunks_exact(pairs));
        let queries = scratch.queries.chunks_exact_mut(queries_width);
        // With a latent, what is rotated of the keys stands where values stand otherwise.
        let latent = matches!(layer.cached, Cached::Latent { .. });
        let (turned, width) =
            if latent { (&mut scratch.values, values_width) } else { (&mut scratch.keys, keys_width) };
        for (((cos, sin), queries), keys) in angles.zip(queries).zip(turned.chunks_exact_mut(width)) {
            for head in queries.chunks_exact_mut(head_dim) {
                rotate(&mut head[head_dim - rotated..], cos, sin);
                // Scaling the queries once is cheaper than scaling every score.
                head.iter_mut().for_each(|value| *value *= scale);
            }
            for head in keys.chunks_exact_mut(rotated) {
                rotate(head, cos, sin);
            }
        }

        let queries = self.groups * self.config.queries_per_group() / self.heads;
        let window = self.config.window_of(index);
        let latent = match &layer.cached {
            Cached::Latent { up, .. } => Some(Latent { up, width: key, rotated }),
            Cached::Heads { .. } => None,
        };
        let geometry = Geometry { groups: self.heads, queries, head_dim, block_tokens, window, latent };
        let group = self.config.block_group_of(index);
        // All chunks are written before any is read: two chunks of a batch may belong to one sequence.
        let rows = scratch.keys.chunks_exact(keys_width).zip(scratch.values.chunks_exact(values_width));
        let places = chunks.iter().flat_map(|chunk| {
            let table = chunk.table(group);
            (chunk.start..chunk.start + chunk.tokens.len())
                .map(move |position| (table[position / block_tokens], position % block_tokens))
        });
        for ((block, slot), (keys, values)) in places.zip(rows) {
            store.write_token(index, block, slot, keys, values);
        }
        let mut at = 0;
        for chunk in chunks {
            let len = chunk.tokens.len();
            let span = Span { start: chunk.start, len, blocks: chunk.table(group) };
            let rows = at * queries_width..(at + len) * queries_width;
            let queries = &scratch.queries[rows.clone()];
            scratch.attention.run(geometry, &*store, index, span, queries, &mut scratch.mixed[rows]);
            at += len;
        }
    }

    /// From `normed` to `keys` and `values`, not yet rotated.
    fn make_entries(&self, layer: &Layer, scratch: &mut Scratch) {
        let hidden = self.config.hidden_size;
        match &layer.cached {
            Cached::Heads { key, value } => {
                key.multiply(&scratch.normed, hidden, &mut scratch.keys);
                value.multiply(&scratch.normed, hidden, &mut scratch.values);
            }
            Cached::Latent { down, norm, .. } => {
                let (latent, shared) = self.config.cache_sizes();
                let tokens = scratch.keys.len() / latent;
                scratch.latents.resize(tokens * (latent + shared), 0.0);
                down.multiply(&scratch.normed, hidden, &mut scratch.latents);
                let rows = scratch.latents.chunks_exact(latent + shared);
                let into = scratch.keys.chunks_exact_mut(latent).zip(scratch.values.chunks_exact_mut(shared));
                for (row, (key, value)) in rows.zip(into) {
                    rms_norm(&row[..latent], norm, self.config.rms_norm_eps as f32, key);
                    value.copy_from_slice(&row[latent..]);
                }
            }
        }
    }

    /// The tokens that follow the chunks that ask for one.
    fn next_tokens(&self, chunks: &[Chunk<'_>], scratch: &mut Scratch) -> Vec<Option<u32>> {
        let hidden = self.config.hidden_size;
        scratch.logits.resize(self.config.vocab_size, 0.0);
        let mut end = 0;
        let mut next = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            end += chunk.tokens.len();
            next.push(chunk.wants_token.then(|| {
                let normed = &mut scratch.normed[..hidden];
                self.norm(&self.final_norm, &scratch.stream[(end - 1) * hidden..end * hidden], normed);
                self.lm_head.multiply(normed, hidden, &mut scratch.logits);
                argmax(&scratch.logits)
            }));
        }
        next
    }
}

fn add(stream: &mut [f32], sum: &[f32]) -> Result<(), ModelError> {
    if sum.len() != stream.len() {
        return Err(ModelError::ReducedLength { given: sum.len(), expected: stream.len() });
    }
    for (value, &added) in stream.iter_mut().zip(sum) {
        *value += added;
    }
    Ok(())
}
