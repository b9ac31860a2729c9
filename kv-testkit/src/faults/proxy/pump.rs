//! One direction of a connection: bytes in, bytes out, and the faults in between.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;

use super::plan::{Direction, Place, ProxyFault};
use super::shared::Shared;
use crate::faults::choose::chance;
use crate::sim::Dice;

/// Most bytes that are read at once.
const CHUNK_BYTES: usize = 16 << 10;

/// How one direction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The sender has ended its stream, and the receiver knows.
    Ended,
    /// Both streams are to end.
    Cut,
    /// Both connections are to be reset.
    Reset,
}

/// A fault that a rule has chosen for one direction.
#[derive(Debug)]
pub(super) struct Active {
    fault: ProxyFault,
    place: Place,
    draw: u64,
    dice: Dice,
    done: bool,
}

impl Active {
    pub(super) fn new(fault: ProxyFault, place: Place, draw: u64, direction: Direction) -> Self {
        // The two directions of a connection throw dice of their own.
        Self { fault, place, draw, dice: Dice::new(draw.wrapping_add(direction as u64)), done: false }
    }

    /// Where it strikes next in a chunk, if it does. What ends a stream after so many bytes does so at once when the
    /// last of them has passed, and does not wait for one more.
    fn strikes(&mut self, start: u64, len: u64) -> Option<u64> {
        if self.done {
            return None;
        }
        let last = if self.fault == ProxyFault::Corrupt { len } else { len + 1 };
        match self.place {
            Place::After(at) => (at >= start && at - start < last).then_some(at),
            Place::PerChunk(probability) => {
                let struck = len > 0 && chance(&mut self.dice, probability);
                let within = if self.fault == ProxyFault::Corrupt { self.dice.below(len) } else { 0 };
                struck.then_some(start + within)
            }
        }
    }
}

/// One direction of one connection.
pub(super) struct Pump<'a> {
    pub(super) shared: &'a Shared,
    pub(super) connection: u64,
    pub(super) direction: Direction,
    pub(super) active: Vec<Active>,
    /// Told when nothing will pass any more although no stream has ended.
    pub(super) stuck: &'a Notify,
}

struct Pace {
    delay: Duration,
    bytes_per_s: Option<u64>,
}

impl Pump<'_> {
    /// Forwards until the stream ends or a fault ends it.
    pub(super) async fn run(
        mut self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
    ) -> Verdict {
        let mut pace = Pace { delay: Duration::ZERO, bytes_per_s: None };
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut offset = 0;
        // What strikes before the first byte does not wait for it.
        let mut filled = 0;
        loop {
            let mut strikes: Vec<(u64, usize)> = (0..self.active.len())
                .filter_map(|index| Some((self.active[index].strikes(offset, filled as u64)?, index)))
                .collect();
            strikes.sort_unstable();
            let (mut sent, mut delayed) = (0, false);
            for (at, index) in strikes {
                let until = (at - offset) as usize;
                let Active { fault, place, draw, .. } = self.active[index];
                if fault != ProxyFault::Corrupt
                    && self
                        .forward(&mut to, &buffer[sent..until.max(sent)], &pace, &mut delayed)
                        .await
                        .is_err()
                {
                    return Verdict::Cut;
                }
                if fault != ProxyFault::Corrupt {
                    sent = until.max(sent);
                }
                self.active[index].done = matches!(place, Place::After(_));
                self.shared.struck(self.connection, self.direction, at, fault, draw);
                match fault {
                    ProxyFault::Corrupt => {
                        buffer[until] ^= Dice::new(draw ^ at).between(1, 255) as u8;
                    }
                    ProxyFault::Delay { delay_ms } => pace.delay += Duration::from_millis(delay_ms),
                    ProxyFault::Throttle { bytes_per_s } => pace.bytes_per_s = Some(bytes_per_s),
                    ProxyFault::Stall { for_ms: Some(ms) } => {
                        tokio::time::sleep(Duration::from_millis(ms)).await;
                    }
                    ProxyFault::Stall { for_ms: None } => return self.never().await,
                    ProxyFault::Cut => return Verdict::Cut,
                    ProxyFault::Reset => return Verdict::Reset,
                    ProxyFault::HalfClose => {
                        if to.shutdown().await.is_err() {
                            return Verdict::Cut;
                        }
                        swallow(&mut from).await;
                        return Verdict::Ended;
                    }
                    ProxyFault::Silence => {
                        swallow(&mut from).await;
                        return self.never().await;
                    }
                    // Of the connection; it has no streams.
                    ProxyFault::Refuse | ProxyFault::Hang | ProxyFault::Garbage { .. } => {}
                }
            }
            if self.forward(&mut to, &buffer[sent..filled], &pace, &mut delayed).await.is_err() {
                return Verdict::Cut;
            }
            offset += filled as u64;
            filled = match from.read(&mut buffer).await {
                Ok(0) => {
                    return if to.shutdown().await.is_ok() { Verdict::Ended } else { Verdict::Cut };
                }
                Ok(count) => count,
                // A connection that broke on one side is reset on the other.
                Err(_) => return Verdict::Reset,
            };
        }
    }

    async fn never(&self) -> Verdict {
        self.stuck.notify_one();
        std::future::pending().await
    }

    async fn forward(
        &self,
        to: &mut (impl AsyncWrite + Unpin),
        bytes: &[u8],
        pace: &Pace,
        delayed: &mut bool,
    ) -> std::io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if !pace.delay.is_zero() && !*delayed {
            tokio::time::sleep(pace.delay).await;
            *delayed = true;
        }
        // Twenty pieces a second are smooth enough, and few enough timers.
        let piece = pace.bytes_per_s.map_or(bytes.len(), |rate| (rate / 20).clamp(1, 1 << 20) as usize);
        for part in bytes.chunks(piece) {
            to.write_all(part).await?;
            self.shared.forwarded(self.direction, part.len());
            if let Some(rate) = pace.bytes_per_s {
                tokio::time::sleep(Duration::from_secs_f64(part.len() as f64 / rate as f64)).await;
            }
        }
        Ok(())
    }
}

/// Reads and forgets until the stream ends.
pub(super) async fn swallow(from: &mut (impl AsyncRead + Unpin)) {
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(1..) = from.read(&mut buffer).await {}
}
