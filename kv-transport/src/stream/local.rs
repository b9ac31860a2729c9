//! Where a transport can read a peer's memory without the peer's help, beside the connection that carries everything else.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use super::commands::AcceptedRead;
use super::target::Target;
use super::work::Share;
use crate::contract::{OpId, PeerId};
use crate::error::LossReason;

/// Work of a local path that has to wait for something.
pub(crate) type Waiting<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What became of a read that was handed over.
#[derive(Debug)]
pub(crate) enum Taken {
    /// It completes by itself.
    Yes,
    /// The peer has to be asked first, with [`LocalPath::resolve`].
    Unresolved(AcceptedRead),
    /// It cannot be done locally; the connection has to carry it.
    No(AcceptedRead),
}

/// A way to read the memory of peers to which we connected.
pub(crate) trait LocalPath: Send + Sync + fmt::Debug {
    /// A connection to a peer stands: finds out whether and how its memory can be reached. An error ends the connection.
    fn attach<'a>(&'a self, peer: PeerId, target: &'a Target) -> Waiting<'a, Result<(), LossReason>>;

    /// Takes a read over if it can be done locally. Never waits; a small one may be done when this returns.
    fn take(&self, peer: PeerId, read: AcceptedRead) -> Taken;

    /// Asks the peer about memory that a read names and that is not known yet, and hands the read on. Returns it if the
    /// connection has to carry it.
    fn resolve(&self, peer: PeerId, read: AcceptedRead) -> Waiting<'_, Option<AcceptedRead>>;

    /// Ends a read early, if it is here.
    fn cancel(&self, op: OpId, serial: u64);

    /// A peer is gone. When this returns, no read of it writes anything any more; says what had arrived of those that had not ended.
    fn detach(&self, peer: PeerId) -> Vec<Share>;
}
