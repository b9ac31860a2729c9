//! A small but real engine to hand over between: a transformer with a paged KV cache, continuous batching with
//! chunked prefill, a prefix cache, and one process per rank.
//!
//! ```text
//!  HTTP ──► [scheduler process: core + SchedulerConnector] ──step──► [worker process per rank: shard + WorkerConnector]
//!                                                          ◄──tokens, report──
//! ```

pub mod cache_layout;
pub mod core;
pub mod gather;
pub mod http;
mod links;
pub mod model;
pub mod pool;
pub mod process;
pub mod recovering;
pub mod request;
mod running;
pub mod store;
pub mod wire;
pub mod worker;
