//! A small hand-over beside a large one, at the same peer: how long does it wait?

use std::collections::VecDeque;
use std::time::Instant;

use serde::Serialize;

use super::args::Plan;
use super::measure::Pair;
use super::shape::{SMALL, Shape};
use super::side::Side;
use super::stats::{GB, quantile, seconds};
use super::wire::{Answer, Ask, Job, Way};
use crate::error::Failure;

/// Small reads for each figure.
const SMALL_READS: u64 = 300;
/// Blocks of the large read.
const LARGE_BLOCK: u64 = 64 << 10;

/// What small reads came to while large ones were under way.
#[derive(Debug, Clone, Serialize)]
pub(super) struct BesideRow {
    pub(super) transport: String,
    /// Bytes of the large reads, of which one is always under way.
    pub(super) large_bytes: u64,
    pub(super) small: &'static str,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// What the large reads moved meanwhile.
    pub(super) large_gbps: f64,
}

/// The half of this that the large reads leave must hold the larger of the small ones.
pub(super) const POOL_MIN: u64 = 4 << 20;

/// Measures both small shapes.
pub(super) fn measure(plan: &Plan, name: &str, pair: &mut Pair) -> Result<Vec<BesideRow>, Failure> {
    let blocks = (plan.common.pool_bytes / 2 / LARGE_BLOCK).max(1);
    let large = Shape { block_bytes: LARGE_BLOCK, blocks };
    let mut rows = vec![];
    for (label, small) in SMALL {
        pair.consumer.tell(&Ask::Beside { large, small, reads: SMALL_READS })?;
        let (times, gbps) = pair.consumer.beside()?;
        let (Some(p50), Some(p99)) = (quantile(&times, 0.5), quantile(&times, 0.99)) else { continue };
        rows.push(BesideRow {
            transport: name.to_owned(),
            large_bytes: large.bytes(),
            small: label,
            p50_us: p50 * 1e6,
            p99_us: p99 * 1e6,
            large_gbps: gbps,
        });
    }
    Ok(rows)
}

impl Side {
    /// Small reads one after another, while a large one is always under way.
    pub(super) async fn beside(&mut self, large: Shape, small: Shape, reads: u64) -> Result<Answer, String> {
        let job = |shape| Job { way: Way::Transport, shape, inflight: 1 };
        // The two must not write to the same bytes: the large one has the first part of the pool to itself.
        let edge = large.block_bytes * large.blocks;
        let draws = (0..4).map(|_| self.draw_between(large, 0, edge));
        let mut large_ids = draws.collect::<Result<VecDeque<_>, _>>()?;
        let draws = (0..16).map(|_| self.draw_between(small, edge, self.pool_bytes()));
        let small_ids = draws.collect::<Result<Vec<_>, _>>()?;
        let mut large_ops = vec![];
        let (mut times, mut large_reads, began) = (vec![], 0.0, Instant::now());
        for ids in small_ids.iter().cycle().take(reads as usize) {
            if large_ops.is_empty() {
                large_ops = self.submit(&job(large), &large_ids[0])?;
                large_ids.rotate_left(1);
            }
            let began = Instant::now();
            let op = self.submit(&job(small), ids)?;
            let mut done = false;
            while !done {
                match self.next_end().await? {
                    ended if op.contains(&ended) => done = true,
                    ended if large_ops.contains(&ended) => {
                        large_reads += 1.0;
                        large_ops = self.submit(&job(large), &large_ids[0])?;
                        large_ids.rotate_left(1);
                    }
                    ended => return Err(format!("the end of {ended}, which nobody asked for")),
                }
            }
            times.push(seconds(began.elapsed()));
        }
        let wall_s = seconds(began.elapsed());
        // The last large read counts in part, which is not known; at least its end must not be left behind.
        while !large_ops.is_empty() {
            let ended = self.next_end().await?;
            large_ops.retain(|op| *op != ended);
        }
        Ok(Answer::Beside { seconds: times, gbps: large_reads * large.bytes() as f64 / GB / wall_s })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_pool_holds_any_small_read_beside_a_large_one() {
        for (label, small) in SMALL {
            assert!(small.bytes() <= POOL_MIN / 2, "{label}");
        }
        assert_eq!(POOL_MIN / 2 % LARGE_BLOCK, 0);
    }
}
