//! The shape of the model, under the names of a `config.json`.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::ModelError;

/// The shape of a Llama-style model. The field names are those of a Hugging Face `config.json`.
///
/// Reading one with serde or [`ModelConfig::from_json`] rejects what the model does not implement (scaled
/// rotary embeddings, biases, other activations) instead of ignoring it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawConfig")]
pub struct ModelConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer; a multiple of `num_key_value_heads`.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of query heads; a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    /// Number of heads of keys and values, which is also the number of groups.
    pub num_key_value_heads: usize,
    /// Width of a head; where absent, `hidden_size / num_attention_heads`. See [`ModelConfig::head_size`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// What is added to the mean square before the root is taken, so that it is never zero.
    pub rms_norm_eps: f64,
    /// Base of the wavelengths of the rotary embedding.
    pub rope_theta: f64,
    /// Whether the output layer uses the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Number of positions a sequence may have.
    pub max_position_embeddings: usize,
    /// The token that starts a text, if there is one.
    pub bos_token_id: Option<u32>,
    /// The token that ends a text, if there is one.
    pub eos_token_id: Option<u32>,
    /// Width of the latent from which every head's keys and values are computed (multi-head latent attention); it
    /// is what the cache holds, the same for all heads. Absent: each KV head has keys and values of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_lora_rank: Option<usize>,
    /// Width of the part of a key that is rotated, where there is a latent: one for all heads, kept beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_rope_head_dim: Option<usize>,
    /// Positions that a layer with sliding-window attention sees, the token's own included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// What each layer sees; absent: all of them see everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
    /// Groups into which the query heads of one KV head are cut: as many ranks can hold that head alike. Not a
    /// field of other programs, where the number of ranks decides it; here it must not, since sums are taken group
    /// by group.
    pub groups_per_kv_head: usize,
}

/// What a layer's attention sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// All positions before the token's own, and that one.
    FullAttention,
    /// The last [`ModelConfig::sliding_window`] of them.
    SlidingAttention,
}

/// What kind of attention a made-up model has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// Grouped-query attention.
    #[default]
    Gqa,
    /// Multi-head latent attention: one latent for all heads, which every rank holds.
    Mla,
    /// Grouped-query attention that in every other layer sees a sliding window only.
    Hybrid,
}

/// A `config.json` as it stands in the file, with the fields that are only read to be rejected.
#[derive(Deserialize)]
struct RawConfig {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    tie_word_embeddings: Option<bool>,
    max_position_embeddings: Option<usize>,
    bos_token_id: Option<Value>,
    eos_token_id: Option<Value>,
    model_type: Option<Value>,
    hidden_act: Option<Value>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<RopeParameters>,
    attention_bias: Option<Value>,
    mlp_bias: Option<Value>,
    kv_lora_rank: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<LayerType>>,
    groups_per_kv_head: Option<usize>,
}

/// Newer files keep all that concerns the rotary embedding in one object.
#[derive(Deserialize)]
struct RopeParameters {
    rope_type: Option<Value>,
    rope_theta: Option<f64>,
}

impl TryFrom<RawConfig> for ModelConfig {
    type Error = ModelError;

    fn try_from(raw: RawConfig) -> Result<Self, ModelError> {
        only("model_type", raw.model_type, &Value::from("llama"))?;
        only("hidden_act", raw.hidden_act, &Value::from("silu"))?;
        only("rope_scaling", raw.rope_scaling, &Value::Null)?;
        only("attention_bias", raw.attention_bias, &Value::from(false))?;
        only("mlp_bias", raw.mlp_bias, &Value::from(false))?;
        let (rope_type, inner_theta) =
            raw.rope_parameters.map_or((None, None), |r| (r.rope_type, r.rope_theta));
        only("rope_parameters.rope_type", rope_type, &Value::from("default"))?;
        let config = Self {
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim: raw.head_dim,
            vocab_size: raw.vocab_size,
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: raw.rope_theta.or(inner_theta).unwrap_or(10_000.0),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(2048),
            bos_token_id: token_id("bos_token_id", raw.bos_token_id)?,
            eos_token_id: token_id("eos_token_id", raw.eos_token_id)?,
            kv_lora_rank: raw.kv_lora_rank,
            qk_rope_head_dim: raw.qk_rope_head_dim,
            sliding_window: raw.sliding_window,
            layer_types: raw.layer_types,
            groups_per_kv_head: raw.groups_per_kv_head.unwrap_or(1),
        };
        config.validate()?;
        Ok(config)
    }
}

/// Rejects a value other than the one that is implemented; an absent field counts as that one.
fn only(field: &'static str, found: Option<Value>, implemented: &Value) -> Result<(), ModelError> {
    match found {
        Some(value) if value != *implemented && !value.is_null() => {
            Err(ModelError::Unsupported { field, value: value.to_string() })
        }
        _ => Ok(()),
    }
}

/// Reads a token id. Some models give a list of them, which is rejected: using one of several would let
/// answers run on past their end.
fn token_id(field: &'static str, found: Option<Value>) -> Result<Option<u32>, ModelError> {
    let Some(value) = found.filter(|value| !value.is_null()) else { return Ok(None) };
    match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
        Some(id) => Ok(Some(id)),
        None => Err(ModelError::Unsupported { field, value: value.to_string() }),
    }
}

impl ModelConfig {
    /// The model of the tests and the demo: 4 layers, 8 query heads over 4 KV heads of width 16, and the
    /// vocabulary of [`Tokenizer`](super::Tokenizer). About 230,000 weights; a token's KV is 2 KiB.
    pub fn tiny() -> Self {
        Self {
            hidden_size: 64,
            intermediate_size: 128,
            num_hidden_layers: 4,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: Some(16),
            vocab_size: 257,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            tie_word_embeddings: false,
            max_position_embeddings: 8192,
            bos_token_id: None,
            eos_token_id: Some(256),
            kv_lora_rank: None,
            qk_rope_head_dim: None,
            sliding_window: None,
            layer_types: None,
            groups_per_kv_head: 1,
        }
    }

    /// [`ModelConfig::tiny`] with so many KV heads and another kind of attention. Its query heads are two for each KV
    /// head, and never fewer than 8, so that with 1 or 2 KV heads several ranks hold one of them. A latent model has as
    /// many heads as that, and one latent of 24 numbers for all of them. A window is 40 positions.
    pub fn tiny_of(kind: ModelKind, kv_heads: usize) -> Self {
        let queries = 8.max(2 * kv_heads);
        let per_head = queries.checked_div(kv_heads).unwrap_or(1);
        let config = Self {
            num_attention_heads: queries,
            num_key_value_heads: kv_heads,
            intermediate_size: 128.max(32 * kv_heads),
            groups_per_kv_head: if per_head > 2 { per_head } else { 1 },
            ..Self::tiny()
        };
        match kind {
            ModelKind::Gqa => config,
            ModelKind::Mla => Self {
                num_key_value_heads: queries,
                groups_per_kv_head: 1,
                kv_lora_rank: Some(24),
                qk_rope_head_dim: Some(4),
                ..config
            },
            ModelKind::Hybrid => {
                let types = [LayerType::FullAttention, LayerType::SlidingAttention];
                let layers = config.num_hidden_layers;
                Self {
                    sliding_window: Some(40),
                    layer_types: Some(types.into_iter().cycle().take(layers).collect()),
                    ..config
                }
            }
        }
    }

    /// Reads the text of a `config.json` and validates it.
    ///
    /// # Errors
    ///
    /// [`ModelError::Json`] if the text is not JSON or lacks a field, [`ModelError::Unsupported`] if it asks
    /// for what is not implemented, and whatever [`ModelConfig::validate`] says.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        Self::parse(text, Path::new("config.json"))
    }

    /// Like [`ModelConfig::from_json`], with the file's path in the errors.
    pub(super) fn parse(text: &str, origin: &Path) -> Result<Self, ModelError> {
        let raw: RawConfig = serde_json::from_str(text)
            .map_err(|source| ModelError::Json { origin: origin.to_path_buf(), source })?;
        Self::try_from(raw)
    }

    /// Width of a head: `head_dim`, or where that is absent `hidden_size / num_attention_heads`.
    pub fn head_size(&self) -> usize {
        self.head_dim.unwrap_or_else(|| self.hidden_size.checked_div(self.num_attention_heads).unwrap_or(0))
    }

    /// Number of groups: query heads that read one KV head, all of them or an equal part, with an equal slice of the
    /// feed-forward layer.
    pub fn groups(&self) -> usize {
        self.num_key_value_heads * self.groups_per_kv_head
    }

    /// Number of query heads in a group.
    pub fn queries_per_group(&self) -> usize {
        self.num_attention_heads.checked_div(self.groups()).unwrap_or(0)
    }

    /// Number of groups each of `ranks` ranks holds: those of an equal share of the KV heads, or, where there are
    /// more ranks than KV heads, an equal share of the groups of one.
    ///
    /// # Errors
    ///
    /// [`ModelError::Zero`] if there are no ranks, [`ModelError::NotDivisible`] if the groups cannot be shared
    /// out evenly.
    pub fn groups_per_rank(&self, ranks: usize) -> Result<usize, ModelError> {
        at_least_one("ranks", ranks)?;
        let (heads, per_head) = (self.num_key_value_heads, self.groups_per_kv_head);
        if ranks > heads && per_head > 1 && ranks.is_multiple_of(heads) {
            divisible("groups_per_kv_head", per_head, "ranks of a KV head", ranks / heads)?;
        } else {
            divisible("num_key_value_heads", heads, "ranks", ranks)?;
        }
        Ok(self.groups() / ranks)
    }

    /// KV heads of the cache of the whole model; a latent counts as one, of which every rank holds the whole.
    pub fn cache_heads(&self) -> usize {
        if self.kv_lora_rank.is_some() { 1 } else { self.num_key_value_heads }
    }

    /// Numbers that the cache holds for each of its heads of a token, as keys and as values: as many as a head is wide,
    /// or those of the latent and of the rotated part of the keys.
    pub fn cache_sizes(&self) -> (usize, usize) {
        match self.kv_lora_rank {
            Some(latent) => (latent, self.rotated()),
            None => (self.head_size(), self.head_size()),
        }
    }

    /// Dimensions of a head that are rotated: all, or with a latent the last ones.
    pub fn rotated(&self) -> usize {
        if self.kv_lora_rank.is_some() { self.qk_rope_head_dim.unwrap_or(0) } else { self.head_size() }
    }

    /// The positions that a layer sees, if they are not all.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        let kind = self.layer_types.as_ref().and_then(|types| types.get(layer));
        if kind == Some(&LayerType::SlidingAttention) { self.sliding_window } else { None }
    }

    /// The block groups of the cache by what their layers see: those that see everything, then those with a window.
    /// There are one or two.
    pub fn block_groups(&self) -> Vec<Option<usize>> {
        let windows: Vec<Option<usize>> = (0..self.num_hidden_layers).map(|l| self.window_of(l)).collect();
        let mut groups = vec![None];
        groups.extend(self.sliding_window.map(Some));
        groups.retain(|group| windows.contains(group));
        groups
    }

    /// A layer's block group.
    pub fn block_group_of(&self, layer: usize) -> usize {
        let window = self.window_of(layer);
        self.block_groups().iter().position(|group| *group == window).unwrap_or(0)
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    ///
    /// A [`ModelError`] that names the field at fault, its value, and what it clashes with.
    pub fn validate(&self) -> Result<(), ModelError> {
        at_least_one("hidden_size", self.hidden_size)?;
        at_least_one("intermediate_size", self.intermediate_size)?;
        at_least_one("num_hidden_layers", self.num_hidden_layers)?;
        at_least_one("num_attention_heads", self.num_attention_heads)?;
        at_least_one("num_key_value_heads", self.num_key_value_heads)?;
        at_least_one("vocab_size", self.vocab_size)?;
        at_least_one("max_position_embeddings", self.max_position_embeddings)?;
        let groups = self.num_key_value_heads;
        if self.head_dim.is_none() {
            let heads = self.num_attention_heads;
            divisible("hidden_size", self.hidden_size, "num_attention_heads", heads)?;
        }
        at_least_one("head_dim", self.head_size())?;
        at_least_one("groups_per_kv_head", self.groups_per_kv_head)?;
        let heads = product("num_key_value_heads", groups, "groups_per_kv_head", self.groups_per_kv_head)?;
        let field =
            if heads == groups { "num_key_value_heads" } else { "num_key_value_heads * groups_per_kv_head" };
        divisible("num_attention_heads", self.num_attention_heads, field, heads)?;
        divisible("intermediate_size", self.intermediate_size, field, heads)?;
        self.validate_attention()?;
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("rope_theta", self.rope_theta)?;
        let width = product("num_attention_heads", self.num_attention_heads, "head_dim", self.head_size())?;
        product("hidden_size", self.hidden_size, "num_attention_heads * head_dim", width)?;
        product("hidden_size", self.hidden_size, "intermediate_size", self.intermediate_size)?;
        product("hidden_size", self.hidden_size, "vocab_size", self.vocab_size)?;
        for (field, id) in [("bos_token_id", self.bos_token_id), ("eos_token_id", self.eos_token_id)] {
            match id {
                Some(id) if id as usize >= self.vocab_size => {
                    return Err(ModelError::SpecialToken { field, id, vocab_size: self.vocab_size });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What latents and windows need beyond what every model needs.
    fn validate_attention(&self) -> Result<(), ModelError> {
        let unsupported = |field, value: String| Err(ModelError::Unsupported { field, value });
        let (layers, head_dim) = (self.num_hidden_layers, self.head_size());
        if let Some(latent) = self.kv_lora_rank {
            at_least_one("kv_lora_rank", latent)?;
            at_least_one("qk_rope_head_dim", self.rotated())?;
            divisible("qk_rope_head_dim", self.rotated(), "the halves of a rotation", 2)?;
            if self.rotated() >= head_dim {
                return unsupported(
                    "qk_rope_head_dim",
                    format!("{}, of a head of {head_dim}", self.rotated()),
                );
            }
            if self.groups_per_kv_head > 1 {
                return unsupported(
                    "groups_per_kv_head",
                    format!("{} with a latent", self.groups_per_kv_head),
                );
            }
        } else {
            divisible("head_dim", head_dim, "the halves of a rotation", 2)?;
        }
        let types = self.layer_types.as_deref().unwrap_or_default();
        if !types.is_empty() && types.len() != layers {
            return unsupported("layer_types", format!("{} of them for {layers} layers", types.len()));
        }
        match (self.sliding_window, types.contains(&LayerType::SlidingAttention)) {
            (None, false) => Ok(()),
            (None, true) => at_least_one("sliding_window", 0),
            (Some(window), true) => at_least_one("sliding_window", window),
            (Some(window), false) => {
                unsupported("sliding_window", format!("{window} without a layer that slides"))
            }
        }
    }
}

fn at_least_one(field: &'static str, value: usize) -> Result<(), ModelError> {
    if value == 0 { Err(ModelError::Zero { field }) } else { Ok(()) }
}

fn divisible(
    field: &'static str,
    value: usize,
    divisor_field: &'static str,
    divisor: usize,
) -> Result<(), ModelError> {
    if value.is_multiple_of(divisor) {
        Ok(())
    } else {
        Err(ModelError::NotDivisible { field, value, divisor_field, divisor })
    }
}

fn positive(field: &'static str, value: f64) -> Result<(), ModelError> {
    if value.is_finite() && value > 0.0 { Ok(()) } else { Err(ModelError::NotPositive { field, value }) }
}

/// Multiplies two sizes; their product times four bytes must fit in memory's address range.
fn product(
    first_field: &'static str,
    first: usize,
    second_field: &'static str,
    second: usize,
) -> Result<usize, ModelError> {
    let limit = isize::MAX as usize / size_of::<f32>();
    first.checked_mul(second).filter(|&elements| elements <= limit).ok_or(ModelError::TooLarge {
        first_field,
        first,
        second_field,
        second,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(change: impl FnOnce(&mut Value)) -> String {
        let mut value = serde_json::to_value(ModelConfig::tiny()).unwrap();
        change(&mut value);
        value.to_string()
    }

    fn message(change: impl FnOnce(&mut Value)) -> String {
        ModelConfig::from_json(&text(change)).unwrap_err().to_string()
    }

    #[test]
    fn the_tiny_model_is_valid_and_survives_json() {
        let tiny = ModelConfig::tiny();
        tiny.validate().unwrap();
        assert_eq!(ModelConfig::from_json(&text(|_| {})).unwrap(), tiny);
        assert_eq!(serde_json::from_str::<ModelConfig>(&text(|_| {})).unwrap(), tiny);
    }

    #[test]
    fn what_is_absent_has_the_usual_value() {
        let config = ModelConfig::from_json(
            r#"{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                "vocab_size": 10, "rope_scaling": null, "hidden_act": "silu", "torch_dtype": "bfloat16",
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}"#,
        )
        .unwrap();
        assert_eq!(config.num_key_value_heads, 4);
        assert_eq!(config.head_size(), 8);
        assert_eq!(config.queries_per_group(), 1);
        assert_eq!(config.rope_theta, 500_000.0);
        assert_eq!(config.eos_token_id, None);
    }

    #[test]
    fn what_is_not_implemented_is_rejected_by_name() {
        let scaled = message(|c| c["rope_scaling"] = serde_json::json!({"rope_type": "llama3"}));
        assert_eq!(scaled, r#"rope_scaling = {"rope_type":"llama3"} is not supported"#);
        assert_eq!(message(|c| c["attention_bias"] = true.into()), "attention_bias = true is not supported");
        assert_eq!(message(|c| c["mlp_bias"] = true.into()), "mlp_bias = true is not supported");
        assert!(message(|c| c["hidden_act"] = "gelu".into()).starts_with("hidden_act = "));
        assert!(message(|c| c["model_type"] = "qwen2".into()).starts_with("model_type = "));
        assert!(message(|c| c["eos_token_id"] = vec![1, 2].into()).starts_with("eos_token_id = [1,2]"));
        let yarn = serde_json::json!({"rope_type": "yarn"});
        assert!(message(|c| c["rope_parameters"] = yarn).starts_with("rope_parameters.rope_type = "));
    }

    #[test]
    fn sizes_that_do_not_fit_are_named_with_both_values() {
        assert_eq!(
            message(|c| c["intermediate_size"] = 126.into()),
            "intermediate_size = 126 is not a multiple of num_key_value_heads = 4"
        );
        assert_eq!(
            message(|c| c["num_attention_heads"] = 6.into()),
            "num_attention_heads = 6 is not a multiple of num_key_value_heads = 4"
        );
        assert!(message(|c| c["head_dim"] = 15.into()).starts_with("head_dim = 15 is not a multiple"));
        assert_eq!(
            message(|c| c["num_hidden_layers"] = 0.into()),
            "num_hidden_layers is 0, it must be at least 1"
        );
        assert_eq!(
            message(|c| c["eos_token_id"] = 257.into()),
            "eos_token_id = 257 lies outside vocab_size = 257"
        );
        assert!(message(|c| c["rms_norm_eps"] = 0.0.into()).starts_with("rms_norm_eps = 0"));
        assert!(message(|c| c["vocab_size"] = u64::MAX.into()).contains("overflow"));
        assert!(message(|c| c["hidden_size"] = "x".into()).starts_with("config.json: invalid type"));
    }

    #[test]
    fn groups_are_shared_out_evenly_or_not_at_all() {
        let tiny = ModelConfig::tiny();
        assert_eq!(tiny.groups_per_rank(2).unwrap(), 2);
        let message = tiny.groups_per_rank(3).unwrap_err().to_string();
        assert_eq!(message, "num_key_value_heads = 4 is not a multiple of ranks = 3");
        assert!(matches!(tiny.groups_per_rank(0), Err(ModelError::Zero { field: "ranks" })));
    }
}
