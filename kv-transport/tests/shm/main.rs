//! The `shm` transport: its three lanes, and what happens when memory or its owner goes away.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // A failed step is a failed test.
#![cfg(target_os = "linux")]

mod lanes;
mod process;
mod support;
