//! The limits of a connection, whatever carries it.

use std::time::Duration;

use super::frame::ServeLimits;

/// Largest values that may be configured: what a peer announces is believed up to these.
pub(crate) const CHUNK_BYTES_LIMIT: u32 = 1 << 30;
pub(crate) const CHUNK_RANGES_LIMIT: u32 = 1 << 16;
pub(crate) const CHUNK_QUEUE_LIMIT: u32 = 1 << 16;
/// Most connections of one peer, the first included.
pub(crate) const LINKS_LIMIT: u32 = 8;

/// What a transport over byte streams keeps to; [`TcpConfig`](crate::tcp::TcpConfig) says what each means.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// The transport's name, for its errors.
    pub(crate) name: &'static str,
    pub(crate) message_queue_max: usize,
    pub(crate) message_queue_bytes: usize,
    pub(crate) incoming_max: usize,
    pub(crate) incoming_bytes: usize,
    pub(crate) bytes_in_flight_per_peer: u64,
    pub(crate) bytes_in_flight_max: u64,
    /// Connections to each peer that we connect to.
    pub(crate) connections_per_peer: u32,
    /// How many more than the first a peer that connects to us may have.
    pub(crate) further_granted: u32,
    pub(crate) chunk_max_bytes: u32,
    pub(crate) chunk_max_ranges: u32,
    pub(crate) chunk_queue_max: u32,
    pub(crate) staging_bytes: usize,
    pub(crate) keep_alive: Duration,
    pub(crate) silence_limit: Duration,
    pub(crate) serve_limit: Duration,
    pub(crate) handshake_limit: Duration,
    pub(crate) peers_max: usize,
}

impl Limits {
    /// What this instance grants to those who read from it.
    pub(crate) fn serve_limits(&self) -> ServeLimits {
        ServeLimits {
            chunk_queue: self.chunk_queue_max,
            chunk_bytes: self.chunk_max_bytes,
            chunk_ranges: self.chunk_max_ranges,
        }
    }
}
