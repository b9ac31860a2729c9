#![doc = include_str!("../README.md")]

pub mod config;
pub mod digest;
mod driver;
pub mod machine;
pub mod portions;
mod self_check;
pub mod shape;
pub mod staging;
pub mod worker;

pub use config::{WorkerConfig, WorkerConfigError, WorkerLimits};
pub use driver::Dial;
pub use machine::io::Failure;
pub use machine::worker::WorkerStats;
pub use worker::{Worker, WorkerError, WorkerParts};
