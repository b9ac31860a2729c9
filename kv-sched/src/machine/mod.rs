//! The state machines: facts and a time go in, decisions and a next deadline come out.
//!
//! Nothing in this folder reads a clock, draws a random number, does IO or iterates an unordered map; a test of
//! the workspace enforces it.

pub mod consumer;
pub mod producer;
pub mod staging;
