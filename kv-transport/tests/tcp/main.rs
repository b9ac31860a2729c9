//! The tcp transport against the rules of the contract, against misuse, and against peers that misbehave.
//!
//! Misbehaving peers are plain sockets that speak the protocol by hand, so that these tests also pin the wire format.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed step is a failed test.

mod fairness;
mod faults;
mod links;
mod misuse;
mod names;
mod rules;
mod shortcut;
mod strangers;
mod support;
