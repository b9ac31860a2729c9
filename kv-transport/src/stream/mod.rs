//! Connections over byte streams: messages, liveness and reads of a peer's memory, whatever kind of socket carries them.
//!
//! One thread per instance does all the work of the sockets. A destination has one writer: that thread, or whoever copies on a
//! local path (`local.rs`). One connection per peer carries reads and messages of both sides. What is on the wire is described in `frame.rs`.

pub(crate) mod commands;
pub(crate) mod connection;
pub(crate) mod core;
pub(crate) mod establish;
pub(crate) mod frame;
pub(crate) mod iothread;
pub(crate) mod key;
pub(crate) mod limits;
pub(crate) mod local;
pub(crate) mod plan;
pub(crate) mod pool;
pub(crate) mod reader;
pub(crate) mod reads;
pub(crate) mod serve;
pub(crate) mod shared;
pub(crate) mod shortcut;
pub(crate) mod socket;
pub(crate) mod spans;
pub(crate) mod staging;
pub(crate) mod target;
pub(crate) mod vectored;
pub(crate) mod writer;
