//! Many consumers at one producer: is anybody starved, and what does it cost the producer?

use std::time::{Duration, Instant};

use kv_connector::Config;
use serde::Serialize;

use super::args::Plan;
use super::child::Process;
use super::measure::verified;
use super::progress::Progress;
use super::shape::{SMALL, Shape};
use super::stats::{GB, seconds};
use super::wire::{Ask, Job, Setup, Way};
use crate::error::Failure;

/// How long idle processes are watched.
const IDLE_TIME: Duration = Duration::from_millis(1500);

/// What many consumers came to, each by its bytes over its own time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct PeersRow {
    pub(super) transport: String,
    pub(super) peers: u64,
    pub(super) block_bytes: u64,
    /// Bytes of one transfer of one consumer.
    pub(super) transfer_bytes: u64,
    pub(super) slowest_gbps: f64,
    pub(super) mean_gbps: f64,
    pub(super) fastest_gbps: f64,
    pub(super) sum_gbps: f64,
    /// 1 is perfect fairness.
    pub(super) ratio_slowest_mean: f64,
    /// Largest resident memory of the producer, its pool included.
    pub(super) producer_peak_bytes: u64,
    /// Whether that is of this row alone. Where the system cannot forget a peak, it is since the producer's start.
    pub(super) producer_peak_of_row: bool,
    pub(super) producer_pool_bytes: u64,
    /// Cores used by the producer while all are connected and nobody asks for anything.
    pub(super) producer_idle_cores: f64,
}

/// A consumer's share of a transfer: whole blocks, at least one.
fn share(shape: Shape, peers: u64) -> Shape {
    Shape { blocks: (shape.blocks / peers).max(1), ..shape }
}

/// Measures one transport in all shapes.
pub(super) fn measure(plan: &Plan, config: &Config, progress: &Progress) -> Result<Vec<PeersRow>, Failure> {
    let name = config.transport.as_str();
    progress.say(&format!("{name}: {} consumers", plan.peers));
    let shapes: Vec<_> = plan.shapes.iter().map(|shape| share(*shape, plan.peers)).collect();
    let largest = shapes.iter().copied().chain(SMALL.map(|(_, shape)| shape)).map(Shape::bytes).max();
    let setup = Setup {
        config: config.clone(),
        pool_bytes: plan.common.pool_bytes,
        huge_pages: plan.common.huge_pages,
        shared_memory: plan.common.shared_memory,
        seed: plan.common.seed,
        producer: None,
        floors: false,
    };
    let mut producer = Process::start("producer")?;
    let at = producer.set_up(setup.clone())?;
    let mut consumers = vec![];
    for index in 0..plan.peers {
        let setup = Setup {
            producer: at.clone(),
            // All pools together are about as large as one of the other measurement.
            pool_bytes: (plan.common.pool_bytes / plan.peers).max(largest.unwrap_or(0)),
            seed: plan.common.seed.wrapping_add(index + 1),
            ..setup.clone()
        };
        let mut consumer = Process::start("consumer")?;
        consumer.set_up(setup)?;
        consumers.push(consumer);
    }
    let (before, began) = (producer.used()?, Instant::now());
    std::thread::sleep(IDLE_TIME);
    let producer_idle_cores = (producer.used()?.cpu_s - before.cpu_s) / seconds(began.elapsed());
    let mut rows = vec![];
    for shape in shapes {
        progress.say(&format!("{name}: {} consumers, blocks of {} bytes", plan.peers, shape.block_bytes));
        let job = Job { way: Way::Transport, shape, inflight: plan.common.inflight };
        let peak_of_row = producer.forget_peak()?;
        // All at once: bytes that go astray between connections would be seen.
        consumers.iter_mut().try_for_each(|consumer| consumer.tell(&Ask::Check(job)))?;
        consumers.iter_mut().try_for_each(|consumer| verified(job, consumer.checked()?))?;
        let ask = Ask::Count { job, seconds: seconds(plan.peer_time) };
        consumers.iter_mut().try_for_each(|consumer| consumer.tell(&ask))?;
        let mut gbps = vec![];
        for consumer in &mut consumers {
            let (transfers, wall_s) = consumer.counted()?;
            gbps.push((shape.bytes() * transfers) as f64 / GB / wall_s.max(1e-9));
        }
        let peak = (producer.used()?.peak_bytes, peak_of_row);
        rows.push(row(plan, name, shape, &gbps, peak, producer_idle_cores));
        progress.step();
    }
    Ok(rows)
}

fn row(plan: &Plan, name: &str, shape: Shape, gbps: &[f64], peak: (u64, bool), idle: f64) -> PeersRow {
    let sum: f64 = gbps.iter().sum();
    let mean = sum / gbps.len().max(1) as f64;
    let slowest = gbps.iter().copied().fold(f64::INFINITY, f64::min);
    PeersRow {
        transport: name.to_owned(),
        peers: plan.peers,
        block_bytes: shape.block_bytes,
        transfer_bytes: shape.bytes(),
        slowest_gbps: slowest,
        mean_gbps: mean,
        fastest_gbps: gbps.iter().copied().fold(0.0, f64::max),
        sum_gbps: sum,
        ratio_slowest_mean: if mean > 0.0 { slowest / mean } else { 0.0 },
        producer_peak_bytes: peak.0,
        producer_peak_of_row: peak.1,
        producer_pool_bytes: plan.common.pool_bytes,
        producer_idle_cores: idle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::args::Common;

    #[test]
    fn the_slowest_is_set_against_the_mean() {
        let plan = Plan {
            common: Common {
                pool_bytes: 1 << 20,
                huge_pages: false,
                shared_memory: false,
                inflight: 1,
                seed: 1,
            },
            configs: vec![],
            shapes: vec![],
            rounds: 1,
            peers: 3,
            peer_time: Duration::from_secs(1),
            json: false,
        };
        let shape = Shape { block_bytes: 4096, blocks: 4 };
        let row = row(&plan, "tcp", shape, &[1.0, 2.0, 3.0], (5, true), 0.25);
        assert_eq!((row.slowest_gbps, row.mean_gbps, row.fastest_gbps, row.sum_gbps), (1.0, 2.0, 3.0, 6.0));
        assert_eq!((row.ratio_slowest_mean, row.transfer_bytes, row.producer_idle_cores), (0.5, 16384, 0.25));
    }

    #[test]
    fn everybody_moves_at_least_one_block() {
        let shape = Shape { block_bytes: 4096, blocks: 10 };
        assert_eq!((share(shape, 3).blocks, share(shape, 64).blocks), (3, 1));
    }
}
