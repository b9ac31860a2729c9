//! What can be set, and why the defaults are what they are.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::NAME;
use super::address::host_is_sound;
use crate::error::TransportError;
use crate::stream::limits::{CHUNK_BYTES_LIMIT, CHUNK_QUEUE_LIMIT, CHUNK_RANGES_LIMIT, LINKS_LIMIT, Limits};

/// Settings of a [`TcpTransport`](super::TcpTransport). Every wait and every queue of it has its limit here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// Where to listen: IPv4 or IPv6; port 0 lets the system choose. Default `127.0.0.1:0`, because nothing should
    /// be reachable from other machines unless somebody asked for it.
    pub bind: SocketAddr,
    /// The host name or IP address that peers are told, if it differs from `bind`. It is required when `bind` is a
    /// wildcard, which is no place that a peer could connect to.
    pub advertise: Option<String>,
    /// Messages that may wait to be sent to one peer. Default 4096: more than a batch of renewals for every
    /// request of a large engine, so that only a peer that has stopped reading makes it overflow.
    pub message_queue_max: usize,
    /// Bytes of messages that may wait to be sent to one peer; a single message always fits. Default 64 MiB: it
    /// bounds the memory that a stopped peer can cost.
    pub message_queue_bytes: usize,
    /// Messages from one peer that may wait to be taken with `next_event`. Beyond it nothing more is read from
    /// that peer, its data included, until some are taken; only connections that were added go on. Default 1024.
    pub incoming_max: usize,
    /// Bytes of messages from one peer that may wait to be taken, with the same effect. Default 16 MiB.
    pub incoming_bytes: usize,
    /// Bytes of reads that may be requested from one peer and not yet received. Default 16 MiB: a link of
    /// 100 Gbit/s stays busy over a round trip of 1 ms. The first 2 MiB of every read are asked for all the same,
    /// as far as requests are granted, so that a small read does not wait for a large one.
    pub bytes_in_flight_per_peer: u64,
    /// Bytes of reads that may be requested from all peers together and not yet received. Each connection is asked for one piece
    /// whatever the others do, and for the first 2 MiB of each read, so that none waits for another. Default 256 MiB.
    pub bytes_in_flight_max: u64,
    /// Connections to each peer that is connected to, 1 to 8. Reads of 1 MiB and more are spread over all of them, each
    /// taking the next piece when it has room; smaller reads and all messages go over the first. The others have threads of
    /// their own, on both sides. The window of `bytes_in_flight_per_peer` is divided among them, and what a peer may have
    /// waiting here (`chunk_queue_max`) is counted for each. If the peer cannot be reached by more than one, one does.
    /// Default: one for each processor, at most 4. Two were 1.2 to 1.3 times as fast as one between processes of a machine with
    /// two processors; across hosts one stream fills only a part of a fast link.
    pub connections_per_peer: u32,
    /// Largest piece into which reads are cut, asked for and granted. Messages travel between pieces. Default
    /// 512 KiB: large enough that the work per piece vanishes, small enough to pass in well under a millisecond.
    pub chunk_max_bytes: u32,
    /// Most ranges in one such piece, asked for and granted. Default 1024, which makes a request of 12 KiB.
    pub chunk_max_ranges: u32,
    /// Requests that one peer may have waiting here. Default 128: with the default sizes four times what a peer
    /// with the default window asks for, and 1.5 MiB of memory at most.
    pub chunk_queue_max: u32,
    /// Pinned host memory through which the bytes of device memory go, for each device and direction; made when it is needed.
    /// Always enough for one piece. Default 32 MiB: twice what one peer may have on its way.
    pub staging_bytes: usize,
    /// After this long without a byte from a peer it is pinged. Default 1 s.
    pub keep_alive: Duration,
    /// After this long without a byte from a peer, pings and all, it is given up as silent. Default 5 s: several
    /// pings, and longer than a healthy process ever pauses. At least twice `keep_alive`.
    pub silence_limit: Duration,
    /// A peer to which nothing can be written for this long, although something waits, is given up as a slow
    /// reader. Default 10 s. What it reads from stays in memory until then.
    pub serve_limit: Duration,
    /// How long one who connects may take to say who it is. Default 5 s.
    pub handshake_limit: Duration,
    /// Most peers at a time. One that was lost counts until its loss has been taken with `next_event`.
    /// Default 1024. It bounds peers and not connections: each may have up to 8, whatever
    /// `connections_per_peer` says here, so there are up to 8 times as many, each with a descriptor. Beside them up to 256 may be
    /// open that have not said yet who they are, each for `handshake_limit`; more wait to be accepted.
    pub peers_max: usize,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertise: None,
            message_queue_max: 4096,
            message_queue_bytes: 64 << 20,
            incoming_max: 1024,
            incoming_bytes: 16 << 20,
            bytes_in_flight_per_peer: 16 << 20,
            bytes_in_flight_max: 256 << 20,
            connections_per_peer: default_connections(),
            chunk_max_bytes: 512 << 10,
            chunk_max_ranges: 1024,
            chunk_queue_max: 128,
            staging_bytes: 32 << 20,
            keep_alive: Duration::from_secs(1),
            silence_limit: Duration::from_secs(5),
            serve_limit: Duration::from_secs(10),
            handshake_limit: Duration::from_secs(5),
            peers_max: 1024,
        }
    }
}

fn default_connections() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    processors.clamp(1, 4) as u32
}

impl TcpConfig {
    /// Refuses what cannot work, by name.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        let rules = [
            (
                self.bind.ip().is_unspecified() && self.advertise.is_none(),
                "a wildcard `bind` needs an `advertise`d host",
            ),
            (
                self.advertise.as_deref().is_some_and(|host| !host_is_sound(host)),
                "`advertise` is neither a host name nor an IP address",
            ),
            (
                self.advertise
                    .as_deref()
                    .and_then(|host| host.parse::<IpAddr>().ok())
                    .is_some_and(|ip| ip.is_unspecified()),
                "`advertise` is a wildcard",
            ),
            (self.message_queue_max == 0, "`message_queue_max` is zero"),
            (self.message_queue_bytes == 0, "`message_queue_bytes` is zero"),
            (self.incoming_max == 0, "`incoming_max` is zero"),
            (self.incoming_bytes == 0, "`incoming_bytes` is zero"),
            (self.peers_max == 0, "`peers_max` is zero"),
            (
                !(1..=CHUNK_BYTES_LIMIT).contains(&self.chunk_max_bytes),
                "`chunk_max_bytes` must be 1 byte to 1 GiB",
            ),
            (
                !(1..=CHUNK_RANGES_LIMIT).contains(&self.chunk_max_ranges),
                "`chunk_max_ranges` must be 1 to 65536",
            ),
            (
                !(1..=CHUNK_QUEUE_LIMIT).contains(&self.chunk_queue_max),
                "`chunk_queue_max` must be 1 to 65536",
            ),
            (
                self.bytes_in_flight_per_peer < u64::from(self.chunk_max_bytes),
                "`bytes_in_flight_per_peer` is less than `chunk_max_bytes`",
            ),
            (
                self.bytes_in_flight_max < u64::from(self.chunk_max_bytes),
                "`bytes_in_flight_max` is less than `chunk_max_bytes`",
            ),
            (
                !(1..=LINKS_LIMIT).contains(&self.connections_per_peer),
                "`connections_per_peer` must be 1 to 8",
            ),
            (self.keep_alive.is_zero(), "`keep_alive` is zero"),
            (
                self.keep_alive.checked_mul(2).is_none_or(|twice| self.silence_limit < twice),
                "`silence_limit` is less than twice `keep_alive`",
            ),
            (self.serve_limit.is_zero(), "`serve_limit` is zero"),
            (self.handshake_limit.is_zero(), "`handshake_limit` is zero"),
        ];
        match rules.into_iter().find(|(broken, _)| *broken) {
            Some((_, what)) => Err(TransportError::BadConfig { transport: NAME, what }),
            None => Ok(()),
        }
    }

    /// What the connections keep to.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            name: NAME,
            message_queue_max: self.message_queue_max,
            message_queue_bytes: self.message_queue_bytes,
            incoming_max: self.incoming_max,
            incoming_bytes: self.incoming_bytes,
            bytes_in_flight_per_peer: self.bytes_in_flight_per_peer,
            bytes_in_flight_max: self.bytes_in_flight_max,
            connections_per_peer: self.connections_per_peer,
            further_granted: LINKS_LIMIT - 1,
            chunk_max_bytes: self.chunk_max_bytes,
            chunk_max_ranges: self.chunk_max_ranges,
            chunk_queue_max: self.chunk_queue_max,
            staging_bytes: self.staging_bytes,
            keep_alive: self.keep_alive,
            silence_limit: self.silence_limit,
            serve_limit: self.serve_limit,
            handshake_limit: self.handshake_limit,
            peers_max: self.peers_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut TcpConfig)) -> &'static str {
        let mut config = TcpConfig::default();
        change(&mut config);
        match config.check() {
            Err(TransportError::BadConfig { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_default_is_sound_and_nonsense_is_refused_by_name() {
        assert_eq!(TcpConfig::default().check(), Ok(()));
        assert!(refusal(|c| c.bind = "0.0.0.0:0".parse().unwrap()).contains("wildcard"));
        assert!(refusal(|c| c.bind = "[::]:0".parse().unwrap()).contains("wildcard"));
        assert!(refusal(|c| c.advertise = Some("two words".into())).contains("advertise"));
        assert!(refusal(|c| c.advertise = Some("::".into())).contains("wildcard"));
        assert!(refusal(|c| c.bytes_in_flight_per_peer = 1).contains("bytes_in_flight"));
        assert!(refusal(|c| c.bytes_in_flight_max = 1).contains("bytes_in_flight_max"));
        assert!(refusal(|c| c.connections_per_peer = 0).contains("connections_per_peer"));
        assert!(refusal(|c| c.connections_per_peer = 9).contains("connections_per_peer"));
        assert!(refusal(|c| c.keep_alive = Duration::MAX).contains("silence_limit"));
        assert!(refusal(|c| c.chunk_max_bytes = 0).contains("chunk_max_bytes"));
    }

    #[test]
    fn an_advertised_host_makes_a_wildcard_usable() {
        let bind = "[::]:0".parse().unwrap();
        let config = TcpConfig { bind, advertise: Some("node-7.example".into()), ..TcpConfig::default() };
        assert_eq!(config.check(), Ok(()));
    }
}
