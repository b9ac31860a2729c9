//! The `shm` transport: its three lanes, and what happens when memory or its owner goes away.
#![cfg(target_os = "linux")]

mod lanes;
mod process;
mod support;
