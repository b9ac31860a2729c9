//! The part of a model that one rank computes with.

use super::config::ModelConfig;
use super::error::ModelError;
use super::forward::Scratch;
use super::ops::Packed;
use super::weights::{EMBEDDING, FINAL_NORM, LM_HEAD, Weights, layer_tensor};

/// One rank's share of a model, ready to run: a contiguous range of its groups, and a copy of what is not
/// cut up (embedding, norms, output layer).
///
/// See [`Shard::forward`] for how to run it.
#[derive(Debug, Clone)]
pub struct Shard {
    pub(super) config: ModelConfig,
    /// Number of groups of this rank.
    pub(super) groups: usize,
    /// Number of KV heads that they read, all of them or, of one, a part of its groups.
    pub(super) heads: usize,
    /// `[vocab][hidden]`.
    pub(super) embedding: Vec<f32>,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Vec<f32>,
    pub(super) lm_head: Packed,
    /// Angle per position of each pair of a head's dimensions.
    pub(super) frequencies: Vec<f64>,
    pub(super) scratch: Scratch,
}

/// One layer of a rank. Matrices with one entry per group give that group's partial result.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    pub(super) query: Packed,
    pub(super) cached: Cached,
    pub(super) output: Vec<Packed>,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) gate: Packed,
    pub(super) up: Packed,
    pub(super) down: Vec<Packed>,
}

/// What makes the entries of the cache.
#[derive(Debug, Clone)]
pub(super) enum Cached {
    /// Keys and values of each KV head.
    Heads { key: Packed, value: Packed },
    /// One latent, and beside it the part of the keys that is rotated.
    Latent {
        down: Packed,
        norm: Vec<f32>,
        /// For each KV head of the rank, from the latent to the part of its keys that is not rotated, then to its values.
        up: Packed,
    },
}

impl Shard {
    /// Cuts out what rank `rank` of `ranks` computes: groups `rank * n .. (rank + 1) * n`, where `n` is the
    /// number of groups per rank.
    ///
    /// # Errors
    ///
    /// What [`ModelConfig::validate`] and [`ModelConfig::groups_per_rank`] say, [`ModelError::Rank`] if there
    /// is no such rank, and [`ModelError::MissingTensor`] or [`ModelError::TensorShape`] if the weights are
    /// not those of this configuration.
    pub fn new(
        config: &ModelConfig,
        weights: &Weights,
        rank: usize,
        ranks: usize,
    ) -> Result<Self, ModelError> {
        config.validate()?;
        let groups = config.groups_per_rank(ranks)?;
        if rank >= ranks {
            return Err(ModelError::Rank { rank, ranks });
        }
        let per_head = config.groups_per_kv_head;
        let first = rank * groups;
        let heads = (first / per_head, groups.div_ceil(per_head));
        let cutter = Cutter { config, weights, groups, first, heads };
        let layers =
            (0..config.num_hidden_layers).map(|layer| cutter.layer(layer)).collect::<Result<_, _>>()?;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = cutter.matrix(EMBEDDING, vocab, hidden)?;
        let lm_head =
            if config.tie_word_embeddings { embedding } else { cutter.matrix(LM_HEAD, vocab, hidden)? };
        let rotated = config.rotated();
        let frequency = |pair| config.rope_theta.powf(-((2 * pair) as f64) / rotated as f64);
        Ok(Self {
            config: config.clone(),
            groups,
            heads: heads.1,
            embedding: embedding.to_vec(),
            layers,
            final_norm: cutter.vector(FINAL_NORM, hidden)?.to_vec(),
            lm_head: Packed::cut(lm_head, hidden, (0, vocab), (0, hidden)),
            frequencies: (0..rotated / 2).map(frequency).collect(),
            scratch: Scratch::default(),
        })
    }

    /// The configuration of the whole model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Number of groups of this rank.
    pub fn local_groups(&self) -> usize {
        self.groups
    }

    /// Number of heads that this rank's store holds; see [`ModelConfig::cache_heads`].
    pub fn cache_heads(&self) -> usize {
        if self.config.kv_lora_rank.is_some() { 1 } else { self.heads }
    }
}

/// Cuts a rank's share out of the weights.
struct Cutter<'a> {
    config: &'a ModelConfig,
    weights: &'a Weights,
    groups: usize,
    first: usize,
    /// The first of the rank's KV heads, and how many they are.
    heads: (usize, usize),
}

impl<'a> Cutter<'a> {
    fn tensor(&self, name: &str, expected: &[usize]) -> Result<&'a [f32], ModelError> {
        let missing = || ModelError::MissingTensor { name: name.to_owned(), expected: expected.to_vec() };
        let values = self.weights.tensor(name).ok_or_else(missing)?;
        if values.len() != expected.iter().product::<usize>() {
            let found = self.weights.shape(name).unwrap_or_else(|| vec![values.len()]);
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                expected: expected.to_vec(),
                found,
            });
        }
        Ok(values)
    }

    fn vector(&self, name: &str, len: usize) -> Result<&'a [f32], ModelError> {
        self.tensor(name, &[len])
    }

    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<&'a [f32], ModelError> {
        self.tensor(name, &[rows, columns])
    }

    /// The rows of a matrix that belong to the rank's groups, `rows` of them to each group.
    fn rows(&self, name: &str, rows: usize) -> Result<Packed, ModelError> {
        let hidden = self.config.hidden_size;
        let matrix = self.matrix(name, rows * self.config.groups(), hidden)?;
        Ok(Packed::cut(matrix, hidden, (self.first * rows, self.groups * rows), (0, hidden)))
    }

    /// The rows of a matrix of so many inputs that belong to the rank's KV heads, `rows` of them to each.
    fn head_rows(&self, name: &str, rows: usize, inputs: usize) -> Result<Packed, ModelError> {
        let (first, heads) = self.heads;
        let matrix = self.matrix(name, rows * self.config.num_key_value_heads, inputs)?;
        Ok(Packed::cut(matrix, inputs, (first * rows, heads * rows), (0, inputs)))
    }

    /// For each of the rank's groups, the columns of a matrix that belong to it, `columns` of them.
    fn columns(&self, name: &str, columns: usize) -> Result<Vec<Packed>, ModelError> {
        let hidden = self.config.hidden_size;
        let width = columns * self.config.groups();
        let matrix = self.matrix(name, hidden, width)?;
        let cut = |group| Packed::cut(matrix, width, (0, hidden), (group * columns, columns));
        Ok((self.first..self.first + self.groups).map(cut).collect())
    }

    fn cached(&self, layer: usize) -> Result<Cached, ModelError> {
        let name = |part| layer_tensor(layer, part);
        let (hidden, head_dim) = (self.config.hidden_size, self.config.head_size());
        let Some(latent) = self.config.kv_lora_rank else {
            return Ok(Cached::Heads {
                key: self.head_rows(&name("self_attn.k_proj"), head_dim, hidden)?,
                value: self.head_rows(&name("self_attn.v_proj"), head_dim, hidden)?,
            });
        };
        let width = latent + self.config.rotated();
        let down = self.matrix(&name("self_attn.kv_a_proj_with_mqa"), width, hidden)?;
        let rows = 2 * head_dim - self.config.rotated();
        Ok(Cached::Latent {
            down: Packed::cut(down, hidden, (0, width), (0, hidden)),
            norm: self.vector(&name("self_attn.kv_a_layernorm"), latent)?.to_vec(),
            up: self.head_rows(&name("self_attn.kv_b_proj"), rows, latent)?,
        })
    }

    fn layer(&self, layer: usize) -> Result<Layer, ModelError> {
        let name = |part| layer_tensor(layer, part);
        let hidden = self.config.hidden_size;
        let queries = self.config.queries_per_group() * self.config.head_size();
        let slice = self.config.intermediate_size / self.config.groups();
        Ok(Layer {
            attention_norm: self.vector(&name("input_layernorm"), hidden)?.to_vec(),
            query: self.rows(&name("self_attn.q_proj"), queries)?,
            cached: self.cached(layer)?,
            output: self.columns(&name("self_attn.o_proj"), queries)?,
            ffn_norm: self.vector(&name("post_attention_layernorm"), hidden)?.to_vec(),
            gate: self.rows(&name("mlp.gate_proj"), slice)?,
            up: self.rows(&name("mlp.up_proj"), slice)?,
            down: self.columns(&name("mlp.down_proj"), slice)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_weights_must_fit() {
        let config = ModelConfig::tiny();
        let weights = Weights::seeded(&config, 1).unwrap();
        assert_eq!(Shard::new(&config, &weights, 1, 2).unwrap().local_groups(), 2);
        let message = |config: &ModelConfig, rank, ranks| {
            Shard::new(config, &weights, rank, ranks).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(message(&config, 0, 3), "num_key_value_heads = 4 is not a multiple of ranks = 3");
        assert_eq!(message(&config, 2, 2), "rank 2 does not exist among 2 ranks");
        let wider = ModelConfig { intermediate_size: 256, ..config.clone() };
        assert_eq!(
            message(&wider, 0, 1),
            "tensor model.layers.0.mlp.gate_proj.weight has shape [128, 64] instead of [256, 64]"
        );
        let deeper = ModelConfig { num_hidden_layers: 5, ..config };
        assert!(message(&deeper, 0, 1).starts_with("tensor model.layers.4."));
    }
}
