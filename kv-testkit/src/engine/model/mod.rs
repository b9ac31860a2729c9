//! The transformer of the test engine: small, real, and the same to the bit however it is run.
//!
//! Two engines that hand over KV-cache blocks must answer exactly as one engine would. That can only be
//! checked by a model whose arithmetic does not depend on how the work is cut up, so everything here follows
//! one rule: **the floating-point operations that make up a number, and their order, depend on the token's
//! absolute position and on nothing else.** Neither the chunks of a prefill, nor the sequences that share a
//! batch, nor the number of tensor-parallel ranks, nor the size of the KV blocks changes a bit.
//!
//! - [`ModelConfig`] holds the shape of a Llama-style model under the names of a `config.json`.
//! - [`Weights`] are its tensors: [seeded](Weights::seeded), or [read from a folder](Weights::from_folder) of
//!   safetensors files.
//! - [`Shard`] is what one rank computes with: a contiguous range of the *groups* of the model. A group is a
//!   KV head with the query heads that read it (or an equal part of these), and an equal slice of the feed-forward
//!   layer.
//! - Attention is over heads' own keys and values, over a latent that all heads share
//!   ([`ModelConfig::kv_lora_rank`]), or over the last positions only ([`ModelConfig::sliding_window`]).
//! - [`GroupReduce`] adds up the groups' partial results, always in the groups' order.
//! - [`KvStore`] is the paged KV cache; [`VecStore`] is a plain one in memory.
//! - [`Tokenizer`] maps bytes to tokens and back.
//!
//! ```text
//! embedding ─▶ [ norm ─▶ attention ─▶ reduce ─▶ + ─▶ norm ─▶ feed-forward ─▶ reduce ─▶ + ] x layers
//!           ─▶ norm ─▶ lm_head ─▶ argmax
//! ```
//!
//! All arithmetic is `f32` and uses only operations that IEEE 754 defines exactly, with one exception: the
//! sines and cosines of the rotary embedding come from the standard library, whose last bit may differ
//! between platforms.

mod attention;
mod config;
mod error;
mod folder;
mod forward;
mod ops;
mod reduce;
mod shard;
mod store;
mod tokenizer;
mod weights;

#[cfg(test)]
mod sensitivity_tests;
#[cfg(test)]
mod support;
#[cfg(test)]
mod tests;

pub use config::{LayerType, ModelConfig, ModelKind};
pub use error::ModelError;
pub use forward::Chunk;
pub use reduce::{GroupReduce, ReduceError, SoloReduce, sum_in_order};
pub use shard::Shard;
pub use store::{KvStore, VecStore};
pub use tokenizer::Tokenizer;
pub use weights::Weights;
