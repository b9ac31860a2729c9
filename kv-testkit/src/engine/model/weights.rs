//! The tensors of a model, and how to make them up from a seed.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::config::ModelConfig;
use super::error::ModelError;

pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(super) const FINAL_NORM: &str = "model.norm.weight";
pub(super) const LM_HEAD: &str = "lm_head.weight";

/// All tensors of a model as `f32`, under their Hugging Face names, before they are cut up for ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    config: ModelConfig,
    tensors: BTreeMap<String, Vec<f32>>,
}

/// The name of a tensor of a layer, for example `model.layers.3.mlp.up_proj.weight`.
pub(super) fn layer_tensor(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
}

/// Names and shapes of all tensors that a model of this configuration has.
pub(super) fn tensor_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
    let queries = config.num_attention_heads * config.head_size();
    let mut shapes = vec![(EMBEDDING.to_owned(), vec![config.vocab_size, hidden])];
    for layer in 0..config.num_hidden_layers {
        for (part, shape) in cached_shapes(config) {
            shapes.push((layer_tensor(layer, part), shape));
        }
        for (part, shape) in [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![ffn, hidden]),
            ("mlp.up_proj", vec![ffn, hidden]),
            ("mlp.down_proj", vec![hidden, ffn]),
        ] {
            shapes.push((layer_tensor(layer, part), shape));
        }
    }
    shapes.push((FINAL_NORM.to_owned(), vec![hidden]));
    if !config.tie_word_embeddings {
        shapes.push((LM_HEAD.to_owned(), vec![config.vocab_size, hidden]));
    }
    shapes
}

/// The tensors of a layer that make what the cache holds and what is read from it.
fn cached_shapes(config: &ModelConfig) -> Vec<(&'static str, Vec<usize>)> {
    let (hidden, heads, head_dim) = (config.hidden_size, config.num_key_value_heads, config.head_size());
    match config.kv_lora_rank {
        None => vec![
            ("self_attn.k_proj", vec![heads * head_dim, hidden]),
            ("self_attn.v_proj", vec![heads * head_dim, hidden]),
        ],
        Some(latent) => vec![
            ("self_attn.kv_a_proj_with_mqa", vec![latent + config.rotated(), hidden]),
            ("self_attn.kv_a_layernorm", vec![latent]),
            // For each head the part of its keys that is not rotated, then its values.
            ("self_attn.kv_b_proj", vec![heads * (2 * head_dim - config.rotated()), latent]),
        ],
    }
}

/// How strongly the parts of a seeded model act: the standard deviation of what a part puts out when its
/// input has a mean square of one.
///
/// Found by trial, so that a wrong KV cache shows in the answer. Attention that is spread widely averages
/// thousands of positions into the same nothing, so the scores spread far more than in a trained model, and
/// few positions get most of the weight. The feed-forward layer is strong because it is what turns small
/// differences into large ones from layer to layer.
mod gain {
    /// Queries and keys. The square of this, about 4.8, is the standard deviation of the attention scores.
    pub(super) const QUERY_KEY: f32 = 2.2;
    /// The rotated part of keys with a latent, and what comes of the latent.
    pub(super) const LATENT: f32 = 2.2;
    /// Values.
    pub(super) const VALUE: f32 = 1.0;
    /// Attention's output, before it is weakened by averaging over positions.
    pub(super) const ATTENTION: f32 = 4.0;
    /// Gate and up projections.
    pub(super) const GATE_UP: f32 = 1.4;
    /// Output of the feed-forward layer.
    pub(super) const DOWN: f32 = 2.0;
}

impl Weights {
    /// Weights from tensors whose names and shapes were checked.
    pub(super) fn from_parts(config: ModelConfig, tensors: BTreeMap<String, Vec<f32>>) -> Self {
        Self { config, tensors }
    }

    /// Makes up weights from a seed, the same bits on every machine.
    ///
    /// The weights are random but scaled so that the answers to a prompt depend on all of it: attention picks
    /// out few of the positions, and what it picks outweighs the token's own embedding. The token that ends a
    /// text never wins, so that answers are as long as was asked for (not so if word embeddings are tied).
    ///
    /// # Errors
    ///
    /// Whatever [`ModelConfig::validate`] says.
    pub fn seeded(config: &ModelConfig, seed: u64) -> Result<Self, ModelError> {
        config.validate()?;
        let mut tensors = BTreeMap::new();
        for (name, shape) in tensor_shapes(config) {
            let count = shape.iter().product();
            let inputs = shape.last().copied().unwrap_or(1) as f32;
            let part = name.strip_suffix("_proj.weight").or(name.strip_suffix("_proj_with_mqa.weight"));
            let part = part.and_then(|name| name.rsplit('.').next());
            let gain = match part {
                Some("q" | "k") => gain::QUERY_KEY,
                Some("v") => gain::VALUE,
                Some("kv_a" | "kv_b") => gain::LATENT,
                Some("o") => gain::ATTENTION,
                Some("gate" | "up") => gain::GATE_UP,
                Some("down") => gain::DOWN,
                _ => 1.0,
            };
            let deviation = if name == EMBEDDING { 1.0 } else { gain / inputs.sqrt() };
            let mut random = Random::new(seed, &name);
            let mut values: Vec<f32> = if shape.len() == 1 {
                vec![1.0; count]
            } else {
                (0..count).map(|_| random.normal() * deviation).collect()
            };
            if let (LM_HEAD, Some(end)) = (name.as_str(), config.eos_token_id) {
                // Zeros give the logit 0, which the largest of many random logits always beats.
                values
                    .iter_mut()
                    .skip(end as usize * config.hidden_size)
                    .take(config.hidden_size)
                    .for_each(|x| *x = 0.0);
            }
            tensors.insert(name, values);
        }
        Ok(Self { config: config.clone(), tensors })
    }

    /// The configuration the weights belong to.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// A tensor's numbers, row after row, under its Hugging Face name; `None` if the model has no such tensor.
    pub fn tensor(&self, name: &str) -> Option<&[f32]> {
        self.tensors.get(name).map(Vec::as_slice)
    }

    /// A tensor's shape, as the configuration has it.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        tensor_shapes(&self.config).into_iter().find(|(other, _)| other == name).map(|(_, shape)| shape)
    }

    /// SHA-256 of the configuration and of all tensors. Two engines with the same fingerprint compute the
    /// same answers.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        // The debug text names all fields and gives numbers in full.
        hash.update(format!("{:?}\n", self.config));
        for (name, values) in &self.tensors {
            hash.update(format!("{name} {}\n", values.len()));
            let mut bytes = Vec::with_capacity(values.len() * size_of::<f32>());
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            hash.update(&bytes);
        }
        hash.finalize().into()
    }
}

/// A stream of random numbers (SplitMix64), one for each tensor, so that no tensor depends on the order in
/// which they are made.
struct Random {
    state: u64,
}

impl Random {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a of the name.
        let tag = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut seeded = Self { state: seed };
        Self { state: seeded.next() ^ tag }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Nearly normal with mean 0 and standard deviation 1: the sum of four uniform numbers of 16 bits, which
    /// needs no function that could differ between machines.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        // Four times the mean 65535 / 2, and 65536 times the deviation of four uniforms, root of 4 / 12.
        (sum as f32 - 131_070.0) / 37_837.227
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_bits_and_another_seed_others() {
        let tiny = ModelConfig::tiny();
        let weights = Weights::seeded(&tiny, 1).unwrap();
        assert_eq!(weights, Weights::seeded(&tiny, 1).unwrap());
        assert_eq!(weights.fingerprint(), Weights::seeded(&tiny, 1).unwrap().fingerprint());
        let other = Weights::seeded(&tiny, 2).unwrap();
        assert_ne!(weights.fingerprint(), other.fingerprint());
        assert_ne!(weights.tensor(EMBEDDING), other.tensor(EMBEDDING));
        assert_eq!(weights.tensor("nothing"), None);
    }

    #[test]
    fn the_bits_of_a_seed_never_change() {
        let weights = Weights::seeded(&ModelConfig::tiny(), 7).unwrap();
        let hex: String = weights.fingerprint()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "fa14bd5d09203d95");
    }

    #[test]
    fn the_numbers_are_spread_as_asked() {
        let weights = Weights::seeded(&ModelConfig::tiny(), 3).unwrap();
        let spread = |name: &str| {
            let values = weights.tensor(name).unwrap();
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            let variance = values.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / values.len() as f32;
            (mean, variance.sqrt())
        };
        let (mean, deviation) = spread(EMBEDDING);
        assert!(mean.abs() < 0.03 && (deviation - 1.0).abs() < 0.03, "{mean} {deviation}");
        let (mean, deviation) = spread("model.layers.2.mlp.up_proj.weight");
        assert!(mean.abs() < 0.01 && (deviation - gain::GATE_UP / 8.0).abs() < 0.01, "{mean} {deviation}");
        assert_eq!(spread("model.layers.0.input_layernorm.weight"), (1.0, 0.0));
    }

    #[test]
    fn a_configuration_that_does_not_fit_is_refused() {
        let config = ModelConfig { intermediate_size: 130, ..ModelConfig::tiny() };
        assert!(matches!(Weights::seeded(&config, 1), Err(ModelError::NotDivisible { value: 130, .. })));
    }
}
