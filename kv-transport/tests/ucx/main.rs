//! The ucx transport, rule by rule, over the lanes that every machine has. Where UCX is missing each test says so and
//! is skipped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed step is a failed test.
#![cfg(target_os = "linux")]

mod again;
mod ends;
mod misuse;
mod owner;
mod processes;
mod rules;
mod support;
