//! One transport, measured by turns with the machine's memcpy and the plain TCP program.

use std::time::{Duration, Instant};

use kv_connector::Config;
use serde::Serialize;

use super::args::{Common, Plan};
use super::beside::{self, BesideRow};
use super::child::{Process, Timed, Used};
use super::progress::Progress;
use super::shape::{SMALL, Shape};
use super::stats::{GB, Spread, median, quantile, seconds};
use super::wire::{Ask, Job, Setup, Way};
use crate::error::Failure;

/// Transfers of one shape and way in one round.
const BULK_TRANSFERS: u64 = 2;
/// Small transfers in one round: enough for a 99th percentile over the rounds.
const SMALL_TRANSFERS: [u64; 2] = [400, 100];
/// Small transfers before those that count.
const WARM_TRANSFERS: u64 = 20;
/// How long idle processes are watched.
const IDLE_TIME: Duration = Duration::from_millis(1500);

/// A figure of the consumer and the producer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct BothSides {
    pub(super) consumer: f64,
    pub(super) producer: f64,
}

/// Microseconds of a small transfer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Latency {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

/// By the names of [`SMALL`].
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Latencies {
    #[serde(rename = "1x4k")]
    pub(super) one: Latency,
    #[serde(rename = "64x32k")]
    pub(super) some: Latency,
}

/// What was measured of one transport and shape. These fields are what `--json` promises.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) transport: String,
    pub(super) lane: String,
    pub(super) block_bytes: u64,
    pub(super) total_bytes: u64,
    pub(super) gbps: Spread,
    pub(super) memcpy_gbps: f64,
    pub(super) plain_tcp_gbps: f64,
    pub(super) ratio_memcpy: f64,
    pub(super) ratio_plain_tcp: f64,
    pub(super) cpu_s_per_gb: BothSides,
    pub(super) latency_us: Latencies,
    pub(super) idle_cores: f64,
}

/// What one transport came to.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    pub(super) rows: Vec<Row>,
    /// The same small transfers by the plain TCP program, for comparison.
    pub(super) plain_latency: Latencies,
    /// CPU seconds per GB of the plain program, shape by shape.
    pub(super) plain_cpu: Vec<BothSides>,
    /// Small reads beside large ones.
    pub(super) beside: Vec<BesideRow>,
}

/// Producer and consumer, connected.
pub(super) struct Pair {
    pub(super) consumer: Process,
    pub(super) producer: Process,
}

impl Pair {
    pub(super) fn start(config: &Config, common: &Common, floors: bool) -> Result<Self, Failure> {
        let setup = Setup {
            config: config.clone(),
            pool_bytes: common.pool_bytes,
            huge_pages: common.huge_pages,
            shared_memory: common.shared_memory,
            seed: common.seed,
            producer: None,
            floors: false,
        };
        let mut producer = Process::start("producer")?;
        let mut consumer = Process::start("consumer")?;
        let at = producer.set_up(setup.clone())?;
        consumer.set_up(Setup { producer: at, floors, ..setup })?;
        Ok(Self { consumer, producer })
    }

    /// Compares one transfer; anything but the producer's bytes in the right blocks alone is a failure.
    pub(super) fn verify(&mut self, job: Job) -> Result<(), Failure> {
        verified(job, self.consumer.check(job)?)
    }

    /// Times transfers. Returns them with the producer's CPU seconds.
    pub(super) fn time(
        &mut self,
        job: Job,
        least: u64,
        most: u64,
        limit_s: f64,
    ) -> Result<(Timed, f64), Failure> {
        let before = self.producer.used()?;
        self.consumer.tell(&Ask::Time { job, least, most, seconds: limit_s })?;
        let timed = self.consumer.timed()?;
        Ok((timed, self.producer.used()?.cpu_s - before.cpu_s))
    }

    /// Cores that both processes use while nothing is asked of them.
    fn idle_cores(&mut self) -> Result<f64, Failure> {
        let sum = |pair: &mut Self| -> Result<f64, Failure> {
            let [consumer, producer]: [Used; 2] = [pair.consumer.used()?, pair.producer.used()?];
            Ok(consumer.cpu_s + producer.cpu_s)
        };
        let (before, began) = (sum(self)?, Instant::now());
        std::thread::sleep(IDLE_TIME);
        Ok((sum(self)? - before).max(0.0) / seconds(began.elapsed()))
    }
}

/// What a check found, as a result.
pub(super) fn verified(job: Job, (bad, spilled): (u64, u64)) -> Result<(), Failure> {
    if (bad, spilled) == (0, 0) {
        return Ok(());
    }
    let Shape { block_bytes, blocks } = job.shape;
    Err(Failure::new(
        format!("compare {blocks} blocks of {block_bytes} bytes, moved by {:?}", job.way),
        format!("{bad} blocks are wrong, {spilled} others changed"),
    ))
}

/// The rounds of one way and shape.
#[derive(Debug, Default)]
struct Rounds {
    gbps: Vec<f64>,
    consumer_cpu: Vec<f64>,
    producer_cpu: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, shape: Shape, timed: &Timed, producer_cpu: f64) {
        let moved = (shape.bytes() * timed.seconds.len() as u64) as f64 / GB;
        // A clock that did not move measured nothing.
        self.gbps.push(shape.bytes() as f64 / GB / median(&timed.seconds).max(1e-9));
        self.consumer_cpu.push(timed.cpu_s / moved);
        self.producer_cpu.push(producer_cpu / moved);
    }

    fn cpu(&self) -> BothSides {
        BothSides { consumer: median(&self.consumer_cpu), producer: median(&self.producer_cpu) }
    }

    /// Median of the ratios, each within its round.
    fn ratio(&self, floor: &Self) -> f64 {
        let ratios: Vec<_> = self.gbps.iter().zip(&floor.gbps).map(|(own, floor)| own / floor).collect();
        median(&ratios)
    }
}

const WAYS: [Way; 3] = [Way::Memcpy, Way::PlainTcp, Way::Transport];

/// Measures one transport in all shapes.
pub(super) fn measure(plan: &Plan, config: &Config, progress: &Progress) -> Result<Measured, Failure> {
    let name = config.transport.as_str();
    progress.say(&format!("{name}: pools and processes"));
    let mut pair = Pair::start(config, &plan.common, true)?;
    let job = |way, shape| Job { way, shape, inflight: plan.common.inflight };
    let idle_cores = pair.idle_cores()?;
    for shape in plan.shapes.iter().copied().chain(SMALL.map(|(_, shape)| shape)) {
        progress.say(&format!("{name}: comparing blocks of {} bytes", shape.block_bytes));
        WAYS.into_iter().try_for_each(|way| pair.verify(job(way, shape)))?;
    }
    let mut rounds: Vec<[Rounds; 3]> = plan.shapes.iter().map(|_| Default::default()).collect();
    // By way (plain, transport) and small shape.
    let mut small: [[Vec<f64>; 2]; 2] = Default::default();
    for round in 0..plan.rounds {
        for (shape, rounds) in plan.shapes.iter().zip(&mut rounds) {
            progress.say(&format!("{name}: round {}, blocks of {} bytes", round + 1, shape.block_bytes));
            for (way, rounds) in WAYS.into_iter().zip(rounds) {
                let (timed, cpu) = pair.time(job(way, *shape), BULK_TRANSFERS, BULK_TRANSFERS, 0.0)?;
                rounds.add(*shape, &timed, cpu);
            }
            progress.step();
        }
        for (way, times) in [Way::PlainTcp, Way::Transport].into_iter().zip(&mut small) {
            for (((_, shape), count), times) in SMALL.into_iter().zip(SMALL_TRANSFERS).zip(times) {
                let job = Job { way, shape, inflight: 1 };
                pair.time(job, WARM_TRANSFERS, WARM_TRANSFERS, 0.0)?;
                times.extend(pair.time(job, count, count, 0.0)?.0.seconds);
            }
        }
        progress.step();
    }
    let beside = beside::measure(plan, name, &mut pair)?;
    let lane = pair.consumer.lane()?;
    let [plain_latency, latency_us] = small.map(|times| latencies(&times));
    let mut rows = vec![];
    for (shape, [memcpy, plain, own]) in plan.shapes.iter().zip(&rounds) {
        let Some(gbps) = Spread::of(&own.gbps) else { continue };
        rows.push(Row {
            transport: name.to_owned(),
            lane: lane.clone(),
            block_bytes: shape.block_bytes,
            total_bytes: shape.bytes(),
            gbps,
            memcpy_gbps: median(&memcpy.gbps),
            plain_tcp_gbps: median(&plain.gbps),
            ratio_memcpy: own.ratio(memcpy),
            ratio_plain_tcp: own.ratio(plain),
            cpu_s_per_gb: own.cpu(),
            latency_us,
            idle_cores,
        });
    }
    let plain_cpu = rounds.iter().map(|[_, plain, _]| plain.cpu()).collect();
    Ok(Measured { rows, plain_latency, plain_cpu, beside })
}

fn latencies(times: &[Vec<f64>; 2]) -> Latencies {
    let of = |times: &[f64]| Latency {
        p50: quantile(times, 0.5).unwrap_or(0.0) * 1e6,
        p99: quantile(times, 0.99).unwrap_or(0.0) * 1e6,
    };
    Latencies { one: of(&times[0]), some: of(&times[1]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { block_bytes: 1 << 20, blocks: 100 };

    fn rounds(each: &[f64]) -> Rounds {
        let mut rounds = Rounds::default();
        for gbps in each {
            let took = SHAPE.bytes() as f64 / GB / gbps;
            let timed = Timed { seconds: vec![took, took], cpu_s: 0.1, wall_s: 2.0 * took };
            rounds.add(SHAPE, &timed, 0.2);
        }
        rounds
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let (own, floor) = (rounds(&[1.0, 4.0, 3.0]), rounds(&[2.0, 4.0, 12.0]));
        assert!((own.ratio(&floor) - 0.5).abs() < 1e-9);
        let moved = 2.0 * SHAPE.bytes() as f64 / GB;
        let cpu = own.cpu();
        assert!((cpu.consumer - 0.1 / moved).abs() < 1e-9 && (cpu.producer - 0.2 / moved).abs() < 1e-9);
    }

    #[test]
    fn a_wrong_block_is_a_failure() {
        let job = Job { way: Way::Transport, shape: SHAPE, inflight: 1 };
        assert!(verified(job, (0, 0)).is_ok());
        for found in [(1, 0), (0, 1)] {
            let said = verified(job, found).unwrap_err().to_string();
            assert!(said.contains("Transport") && said.contains("1 "), "{said}");
        }
    }
}
