//! Connections over byte streams: messages, liveness and reads of a peer's memory, whatever kind of socket carries them.
//!
//! One thread per instance does the work of the sockets, but for the connections that are added to a peer when one is not
//! enough (`further.rs`). A range of a destination has one writer: the task of the connection over which it was asked for, or
//! whoever copies on a local path (`local.rs`). The first connection of a peer carries reads and messages of both sides.
//! What is on the wire is described in `frame.rs`.

pub(crate) mod commands;
pub(crate) mod connection;
pub(crate) mod core;
pub(crate) mod establish;
pub(crate) mod frame;
mod further;
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
pub(crate) mod state;
pub(crate) mod target;
pub(crate) mod vectored;
pub(crate) mod work;
pub(crate) mod writer;
