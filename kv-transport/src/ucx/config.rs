//! What can be set, and why the defaults are what they are.

use std::path::PathBuf;
use std::time::Duration;

use super::NAME;
use crate::error::TransportError;

/// Settings of a [`UcxTransport`](super::UcxTransport). Every wait and every queue of it has its limit here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UcxConfig {
    /// Folder or file of libucp, if it is neither loaded already nor the one that the system finds. Default none;
    /// the variable `KV_UCX_LIBRARY` says the same.
    pub library: Option<PathBuf>,
    /// Settings of UCX, without the prefix `UCX_`: for instance `("TLS", "rc,cuda,sm")` and
    /// `("NET_DEVICES", "mlx5_0:1")`. They come before what the environment says. Default none. Four settings are
    /// made by the transport, unless they are set here or in the environment: `MM_ERROR_HANDLING`,
    /// `KEEPALIVE_INTERVAL`, `TCP_TX_SEG_SIZE` and `TCP_RX_SEG_SIZE`.
    pub settings: Vec<(String, String)>,
    /// Messages that may wait to be sent to one peer. Default 4096.
    pub message_queue_max: usize,
    /// Bytes of messages that may wait to be sent to one peer; a single message always fits. Default 64 MiB.
    pub message_queue_bytes: usize,
    /// Messages from one peer that may wait to be taken with `next_event`. The peer sends no more until some are
    /// taken. Default 1024.
    pub incoming_max: u32,
    /// Bytes of messages from one peer that may wait to be taken, with the same effect. Default 16 MiB.
    pub incoming_bytes: u64,
    /// Bytes that may be asked for from one peer and not yet there. Default 16 MiB: a link of 100 Gbit/s stays
    /// busy over a round trip of 1 ms. It also bounds what a cancelled read waits for.
    pub bytes_in_flight_per_peer: u64,
    /// Reads of consecutive bytes that may be under way from one peer. Default 64.
    pub gets_in_flight_per_peer: usize,
    /// Longest piece that is asked for at once. Default 1 MiB: over CMA the thread copies that long without looking
    /// up, and a piece that comes slowly shows no sign of life before it is complete.
    pub get_max_bytes: u64,
    /// After this long without a word from a peer it is pinged. UCX's own keepalive has the same interval.
    /// Default 1 s.
    pub keep_alive: Duration,
    /// After this long without a word from a peer, pings and all, it is given up as silent. Default 5 s. At least
    /// twice `keep_alive`.
    pub silence_limit: Duration,
    /// How long a read that was cancelled or has run out of time waits for what it has asked for. After that its
    /// endpoint is closed by force and the peer is lost, because only then UCX is known to write no more. Default
    /// 500 ms.
    pub quiet_limit: Duration,
    /// How long UCX may take to close an endpoint by force while it still owes the end of reads. After that the
    /// worker is destroyed, which ends the transport. Default 2 s.
    pub force_limit: Duration,
    /// How long the thread looks for news before it sleeps, while something is under way. Default zero: with more
    /// threads than processors it takes the time of those that it waits for.
    pub spin: Duration,
    /// Most peers at a time. One that was lost counts until its loss has been taken with `next_event`.
    /// Default 1024.
    pub peers_max: usize,
}

impl Default for UcxConfig {
    fn default() -> Self {
        Self {
            library: None,
            settings: vec![],
            message_queue_max: 4096,
            message_queue_bytes: 64 << 20,
            incoming_max: 1024,
            incoming_bytes: 16 << 20,
            bytes_in_flight_per_peer: 16 << 20,
            gets_in_flight_per_peer: 64,
            get_max_bytes: 1 << 20,
            keep_alive: Duration::from_secs(1),
            silence_limit: Duration::from_secs(5),
            quiet_limit: Duration::from_millis(500),
            force_limit: Duration::from_secs(2),
            spin: Duration::ZERO,
            peers_max: 1024,
        }
    }
}

impl UcxConfig {
    /// Refuses what cannot work, by name.
    pub(super) fn check(&self) -> Result<(), TransportError> {
        let rules = [
            (self.message_queue_max == 0, "`message_queue_max` is zero"),
            (self.message_queue_bytes == 0, "`message_queue_bytes` is zero"),
            (self.incoming_max == 0, "`incoming_max` is zero"),
            (self.incoming_bytes == 0, "`incoming_bytes` is zero"),
            (self.gets_in_flight_per_peer == 0, "`gets_in_flight_per_peer` is zero"),
            (!(1..=1 << 30).contains(&self.get_max_bytes), "`get_max_bytes` must be 1 byte to 1 GiB"),
            (
                self.bytes_in_flight_per_peer < self.get_max_bytes,
                "`bytes_in_flight_per_peer` is less than `get_max_bytes`",
            ),
            (self.keep_alive.is_zero(), "`keep_alive` is zero"),
            (
                self.keep_alive.checked_mul(2).is_none_or(|twice| self.silence_limit < twice),
                "`silence_limit` is less than twice `keep_alive`",
            ),
            (self.force_limit.is_zero(), "`force_limit` is zero"),
            (self.peers_max == 0, "`peers_max` is zero"),
            (
                self.settings.iter().any(|(name, _)| name.is_empty() || name.starts_with("UCX_")),
                "a name in `settings` is empty or begins with `UCX_`",
            ),
        ];
        match rules.into_iter().find(|(broken, _)| *broken) {
            Some((_, what)) => Err(TransportError::BadConfig { transport: NAME, what }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_sound_and_nonsense_is_refused_by_name() {
        let refusal = |change: fn(&mut UcxConfig)| {
            let mut config = UcxConfig::default();
            change(&mut config);
            match config.check() {
                Err(TransportError::BadConfig { what, .. }) => what,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(UcxConfig::default().check(), Ok(()));
        assert!(refusal(|c| c.get_max_bytes = 0).contains("get_max_bytes"));
        assert!(refusal(|c| c.bytes_in_flight_per_peer = 1).contains("bytes_in_flight"));
        assert!(refusal(|c| c.keep_alive = Duration::MAX).contains("silence_limit"));
        assert!(refusal(|c| c.settings = vec![("UCX_TLS".into(), "tcp".into())]).contains("settings"));
    }
}
