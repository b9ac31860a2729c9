//! The compiler for pairs of shapes: known mappings, a model that looks at each byte, and blocks that cannot be.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.
#![allow(clippy::print_stdout)] // It prints how often it saw what.

#[path = "shape/blocks.rs"]
mod blocks;
#[path = "shape/caches.rs"]
mod caches;
#[path = "shape/golden.rs"]
mod golden;
#[path = "shape/model.rs"]
mod model;
#[path = "shape/random.rs"]
mod random;
#[path = "shape/refusals.rs"]
mod refusals;
#[path = "shape/world.rs"]
mod world;
