//! Whom to connect to.

use std::net::SocketAddr;

use super::key::Nonce;

/// Where a peer listens, and which life of it is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) place: Place,
    pub(crate) nonce: Nonce,
}

/// Where a socket listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A host, by name or address, and a port.
    Tcp { host: String, port: u16 },
    /// An address that was reached before.
    At(SocketAddr),
    /// A name in the abstract namespace of Unix sockets.
    #[cfg(target_os = "linux")]
    Unix { name: Vec<u8> },
}
