#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // Bindings to a C library are the subject of this crate; each block states its reason.

pub mod abi;
mod api;
mod load;

pub use api::Api;
pub use load::{LIBRARY_VARIABLE, LoadError, OLDEST_MINOR, load, setting};
