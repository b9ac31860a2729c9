//! Help for the tests of the model.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Chunk, GroupReduce, KvStore, ModelConfig, Shard, SoloReduce, VecStore, Weights};

/// A folder of its own that is removed at the end.
pub(super) struct TempFolder(PathBuf);

impl TempFolder {
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kv-testkit-model-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Tokens in a block in most tests.
pub(super) const BLOCK_TOKENS: usize = 16;

/// A sequence of one rank with a store of its own.
pub(super) struct Sequence<'a> {
    pub(super) shard: &'a mut Shard,
    pub(super) store: VecStore,
    pub(super) blocks: Vec<u32>,
}

impl<'a> Sequence<'a> {
    /// Room for `positions` positions, in blocks that are not in the order of the positions.
    pub(super) fn new(shard: &'a mut Shard, positions: usize) -> Self {
        let blocks = positions.div_ceil(BLOCK_TOKENS);
        let store = store_for(shard, blocks + 1, BLOCK_TOKENS);
        Self { shard, store, blocks: (1..=blocks as u32).rev().collect() }
    }

    /// Runs one chunk and gives its token.
    pub(super) fn step(&mut self, tokens: &[u32], start: usize) -> u32 {
        let chunk =
            Chunk { tokens, start, blocks: &self.blocks, window_blocks: &self.blocks, wants_token: true };
        let out = self.shard.forward(&[chunk], BLOCK_TOKENS, &mut self.store, &mut SoloReduce).unwrap();
        out[0].unwrap()
    }

    /// Decodes up to `count` tokens after `first`, which follows `len` positions; `first` is one of them.
    pub(super) fn decode(&mut self, first: u32, len: usize, count: usize) -> Vec<u32> {
        let mut answer = vec![first];
        while answer.len() < count {
            let token = answer[answer.len() - 1];
            answer.push(self.step(&[token], len + answer.len() - 1));
        }
        answer
    }

    /// Sets all of the store to one number.
    pub(super) fn fill(&mut self, value: f32) {
        for layer in 0..self.shard.config().num_hidden_layers {
            for block in 0..=self.blocks.len() as u32 {
                self.store.block_mut(layer, block).fill(value);
            }
        }
    }

    /// Sets the keys and values of some positions to zero, in all layers.
    pub(super) fn zero(&mut self, positions: std::ops::Range<usize>) {
        let config = self.shard.config().clone();
        let (heads, (key, value)) = (self.shard.cache_heads(), config.cache_sizes());
        let (keys, values) = (vec![0.0; heads * key], vec![0.0; heads * value]);
        for layer in 0..config.num_hidden_layers {
            for position in positions.clone() {
                let (block, slot) = (self.blocks[position / BLOCK_TOKENS], position % BLOCK_TOKENS);
                self.store.write_token(layer, block, slot, &keys, &values);
            }
        }
    }
}

/// An empty store that fits a shard.
pub(super) fn store_for(shard: &Shard, blocks: usize, block_tokens: usize) -> VecStore {
    let config = shard.config();
    let (heads, sizes) = (shard.cache_heads(), config.cache_sizes());
    VecStore::with_sizes(config.num_hidden_layers, blocks, block_tokens, heads, sizes)
}

/// The greedy answer of `count` tokens to a prompt.
pub(super) fn answer(shard: &mut Shard, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut sequence = Sequence::new(shard, prompt.len() + count);
    let first = sequence.step(prompt, 0);
    sequence.decode(first, prompt.len(), count)
}

/// The tiny model on one rank.
pub(super) fn tiny_shard(seed: u64) -> Shard {
    seeded_shard(&ModelConfig::tiny(), seed)
}

/// A made-up model on one rank.
pub(super) fn seeded_shard(config: &ModelConfig, seed: u64) -> Shard {
    Shard::new(config, &Weights::seeded(config, seed).unwrap(), 0, 1).unwrap()
}

/// A reduction that counts its calls, to show that the model calls it as often as documented.
pub(super) struct Counting(pub(super) usize);

impl GroupReduce for Counting {
    fn reduce(
        &mut self,
        partials: &[f32],
        groups: usize,
        len: usize,
    ) -> Result<Vec<f32>, super::ReduceError> {
        self.0 += 1;
        SoloReduce.reduce(partials, groups, len)
    }
}

/// Text to cut prompts from.
pub(super) const TEXT: &str = "\
The harbour master kept two ledgers, one for ships that came and one for ships that left, and he trusted \
neither. When the fog lay on the water he walked to the end of the pier and counted the bells by ear. Twelve \
strokes meant that the ferry was late; eleven, that somebody had stopped listening. \"How long does a letter \
take to reach the island?\" asked the girl who sold oranges by the gate. \"As long as the wind wants,\" he \
said, and wrote the answer down in case anybody should ask again.\n\nTo make the soup, cut 3 onions, 2 carrots \
and half a celery root into small pieces. Fry them in butter until they smell sweet, add 1.5 litres of water, \
salt, and a handful of lentils, then leave the pot alone for forty minutes. Do not stir more than twice. The \
recipe is said to be older than the bridge, which was built in 1764 and has been repaired in every war since.\n\
\nfn main() { let mut total = 0; for day in 1..=31 { total += day * day; } assert_eq!(total, 10416); }\n";

/// The model once more in `f64`, written down as the formulas are, token by token and without a cache. Gives
/// for each layer and position what the cache should hold (the keys of all heads and then the values, or the latent
/// and the rotated part of the keys), and the token that follows.
pub(super) fn naive_kv(config: &ModelConfig, weights: &Weights, tokens: &[u32]) -> (Vec<Vec<Vec<f64>>>, u32) {
    let (hidden, head_dim) = (config.hidden_size, config.head_size());
    let tensor =
        |name: &str| -> Vec<f64> { weights.tensor(name).unwrap().iter().map(|&x| f64::from(x)).collect() };
    let times = |matrix: &[f64], x: &[f64]| -> Vec<f64> {
        matrix.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let norm = |x: &[f64], gain: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(gain).map(|(x, g)| x / (mean + config.rms_norm_eps).sqrt() * g).collect()
    };
    let rotated = config.rotated();
    let turn = |x: &mut [f64], width: usize, position: usize| {
        for head in x.chunks_exact_mut(width) {
            let head = &mut head[width - rotated..];
            for i in 0..rotated / 2 {
                let angle = position as f64 / config.rope_theta.powf(2.0 * i as f64 / rotated as f64);
                let (a, b) = (head[i], head[i + rotated / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + rotated / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    };
    let embedding = tensor("model.embed_tokens.weight");
    let mut stream: Vec<Vec<f64>> =
        tokens.iter().map(|&token| embedding[token as usize * hidden..][..hidden].to_vec()).collect();
    let mut kept = Vec::new();
    for layer in 0..config.num_hidden_layers {
        let part = |name: &str| tensor(&format!("model.layers.{layer}.{name}.weight"));
        let (q, o) = (part("self_attn.q_proj"), part("self_attn.o_proj"));
        let (before, after) = (part("input_layernorm"), part("post_attention_layernorm"));
        let (gate, up, down) = (part("mlp.gate_proj"), part("mlp.up_proj"), part("mlp.down_proj"));
        // What the cache holds of a token, and its keys and values for every KV head.
        let entry = |normed: &[f64], position: usize| -> (Vec<f64>, Vec<f64>, Vec<f64>) {
            let Some(latent) = config.kv_lora_rank else {
                let (mut keys, values) =
                    (times(&part("self_attn.k_proj"), normed), times(&part("self_attn.v_proj"), normed));
                turn(&mut keys, head_dim, position);
                return ([keys.clone(), values.clone()].concat(), keys, values);
            };
            let low = times(&part("self_attn.kv_a_proj_with_mqa"), normed);
            let (low, shared) = low.split_at(latent);
            let (low, mut shared) = (norm(low, &part("self_attn.kv_a_layernorm")), shared.to_vec());
            turn(&mut shared, rotated, position);
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for head in times(&part("self_attn.kv_b_proj"), &low).chunks_exact(2 * head_dim - rotated) {
                let (key, value) = head.split_at(head_dim - rotated);
                keys.extend([key, &shared].concat());
                values.extend(value);
            }
            ([low, shared].concat(), keys, values)
        };
        let (mut rows, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (position, x) in stream.iter_mut().enumerate() {
            let normed = norm(x, &before);
            let mut query = times(&q, &normed);
            turn(&mut query, head_dim, position);
            let (row, key, value) = entry(&normed, position);
            rows.push(row);
            keys.push(key);
            values.push(value);
            let seen = config.window_of(layer).map_or(0, |window| (position + 1).saturating_sub(window));
            let per_head = config.num_attention_heads / config.num_key_value_heads;
            let mut mixed = Vec::new();
            for (head, query) in query.chunks_exact(head_dim).enumerate() {
                let at = head / per_head * head_dim;
                let dot = |key: &Vec<f64>| key[at..].iter().zip(query).map(|(a, b)| a * b).sum::<f64>();
                let scores: Vec<f64> =
                    keys[seen..].iter().map(|key| (dot(key) / (head_dim as f64).sqrt()).exp()).collect();
                let total: f64 = scores.iter().sum();
                for i in at..at + head_dim {
                    mixed.push(scores.iter().zip(&values[seen..]).map(|(s, v)| s / total * v[i]).sum());
                }
            }
            x.iter_mut().zip(times(&o, &mixed)).for_each(|(x, added)| *x += added);
            let normed = norm(x, &after);
            let gated: Vec<f64> = times(&gate, &normed)
                .iter()
                .zip(times(&up, &normed))
                .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                .collect();
            x.iter_mut().zip(times(&down, &gated)).for_each(|(x, added)| *x += added);
        }
        kept.push(rows);
    }
    let head = if config.tie_word_embeddings { embedding } else { tensor("lm_head.weight") };
    let logits = times(&head, &norm(&stream[tokens.len() - 1], &tensor("model.norm.weight")));
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    (kept, best as u32)
}

/// What a store holds of one token: the keys of all its heads and then the values.
pub(super) fn entry(
    store: &VecStore,
    config: &ModelConfig,
    layer: usize,
    block: u32,
    slot: usize,
) -> Vec<f32> {
    let (key, value) = config.cache_sizes();
    let heads = config.cache_heads();
    let (keys, values) = store.block(layer, block).split_at(heads * BLOCK_TOKENS * key);
    let of = |side: &[f32], size: usize| -> Vec<f32> {
        (0..heads).flat_map(|head| side[(head * BLOCK_TOKENS + slot) * size..][..size].to_vec()).collect()
    };
    [of(keys, key), of(values, value)].concat()
}
