//! Every fault happens as planned and as nothing else, and the contract holds around it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod messages;
mod plans;
mod proxy;
mod reads;
mod rig;
mod rules;
