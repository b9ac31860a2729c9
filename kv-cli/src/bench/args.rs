//! What can be asked for, and what of it cannot be.

use std::time::Duration;

use clap::Args;
use kv_connector::Config;

use super::beside::POOL_MIN;
use super::harness::HarnessShape;
use super::shape::{SMALL, Shape, parse_bytes};
use crate::error::Failure;

/// More than this many processes is no measurement any more.
const PEERS_MAX: u64 = 1024;
const ROUNDS_MAX: u64 = 10_000;
const INFLIGHT_MAX: u64 = 4096;
const SECONDS_MAX: u64 = 3600;

/// Two processes on this machine, a consumer that reads scattered blocks out of a producer's pool. In the same run,
/// by turns, the machine's memcpy and a plain TCP program move the same blocks, so that ratios mean something on a
/// machine that others use too. The first transfer of every shape is compared byte for byte.
///
/// A GB is 1e9 bytes. Figures are medians over the rounds, with the lowest and the highest round.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Transports to measure, one after another, by the names that a configuration knows.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", default_value = "tcp")]
    transport: Vec<String>,
    /// Sizes of a block, such as 16k or 1m; each is a shape of its own.
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…", value_parser = parse_bytes, default_value = "16k,32k,64k,128k,1m")]
    block_bytes: Vec<u64>,
    /// Bytes of one transfer, rounded down to whole blocks.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "256m")]
    total_bytes: u64,
    /// Blocks of one transfer, instead of its bytes.
    #[arg(long, value_name = "N", conflicts_with = "total_bytes")]
    blocks: Option<u64>,
    /// Pool of each side, from which the blocks are drawn at random; at least 4m.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "512m")]
    pool_bytes: u64,
    /// Consumers that pull from the one producer at the same time, each a process. With more than one, a second
    /// table tells the slowest from the fastest; a transfer's bytes are divided among them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    peers: u64,
    /// How long the many consumers pull, for each block size.
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    peer_seconds: u64,
    /// Reads into which a transfer is divided, all of them submitted at once.
    #[arg(long, value_name = "N", default_value_t = 1)]
    inflight: u64,
    /// Connections of `tcp` to each peer; 0: as many as it would choose.
    #[arg(long, value_name = "N", default_value_t = 0)]
    connections: u32,
    /// Pools of huge pages instead of small ones.
    #[arg(long)]
    huge_pages: bool,
    /// The producer's pool in memory that other processes can map (`shm` then copies out of a mapping).
    #[arg(long)]
    shared_memory: bool,
    /// How often everything is measured, by turns.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u64,
    /// Draws the block ids; the same seed draws the same ones.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object as the last line of standard output instead of tables.
    #[arg(long)]
    json: bool,
    /// Print one row per shape for a harness that runs several transfer libraries by turns, one JSON object a line.
    #[arg(long, requires = "config", conflicts_with_all = ["json", "rounds", "peers", "blocks", "block_bytes", "total_bytes"])]
    peers_row: bool,
    /// Name that the harness puts into its rows.
    #[arg(long, value_name = "NAME", requires = "peers_row")]
    config: Option<String>,
    /// Shapes of the harness, such as bulk-64k or small-1x4k; all of them if not given.
    #[arg(long, value_delimiter = ',', value_name = "SHAPE,…", requires = "peers_row")]
    shapes: Vec<String>,
    /// 1: the harness wants one transfer of each shape compared byte for byte.
    #[arg(long, value_name = "0|1", requires = "peers_row", value_parser = clap::value_parser!(u8).range(0..=1))]
    verify: Option<u8>,
}

/// What every process is told.
#[derive(Debug, Clone)]
pub(super) struct Common {
    pub(super) pool_bytes: u64,
    pub(super) huge_pages: bool,
    pub(super) shared_memory: bool,
    pub(super) inflight: u64,
    pub(super) seed: u64,
}

/// What is to be measured.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) common: Common,
    pub(super) configs: Vec<Config>,
    pub(super) shapes: Vec<Shape>,
    pub(super) rounds: u64,
    pub(super) peers: u64,
    pub(super) peer_time: Duration,
    pub(super) json: bool,
}

/// What the harness wants.
#[derive(Debug, Clone)]
pub(super) struct Harness {
    pub(super) common: Common,
    pub(super) config: Config,
    pub(super) name: String,
    pub(super) shapes: Vec<HarnessShape>,
    pub(super) verify: bool,
}

/// What was asked for, found sound.
#[derive(Debug, Clone)]
pub(super) enum Wanted {
    Tables(Plan),
    Harness(Harness),
}

fn within(what: &str, value: u64, max: u64) -> Result<u64, Failure> {
    if (1..=max).contains(&value) {
        return Ok(value);
    }
    Err(Failure::new(format!("--{what} {value}"), format!("it must be 1 to {max}")))
}

impl BenchArgs {
    /// Refuses what cannot be measured, by name.
    pub(super) fn check(&self) -> Result<Wanted, Failure> {
        let common = Common {
            pool_bytes: self.pool_bytes,
            huge_pages: self.huge_pages,
            shared_memory: self.shared_memory,
            inflight: within("inflight", self.inflight, INFLIGHT_MAX)?,
            seed: self.seed,
        };
        let mut configs = vec![];
        for name in &self.transport {
            // Whether there is such a transport is the facade's to say.
            let config = Config {
                transport: name.trim().to_owned(),
                transport_connections: self.connections,
                ..Config::default()
            };
            configs.push(config);
        }
        let fits = |shape: Shape| shape.check(self.pool_bytes).map_err(|why| Failure::new("a shape", why));
        if self.peers_row {
            let known = HarnessShape::all();
            let mut shapes = vec![];
            for name in &self.shapes {
                let shape = known.iter().find(|shape| shape.name == name.as_str()).ok_or_else(|| {
                    let names: Vec<_> = known.iter().map(|shape| shape.name).collect();
                    Failure::new(format!("--shapes {name}"), format!("known are {}", names.join(", ")))
                })?;
                shapes.push(*shape);
            }
            if shapes.is_empty() {
                shapes = known.to_vec();
            }
            shapes.iter().try_for_each(|shape| fits(shape.shape).map(drop))?;
            let [config] = configs.as_slice() else {
                return Err(Failure::new("--transport", "rows are of one transport"));
            };
            return Ok(Wanted::Harness(Harness {
                common,
                config: config.clone(),
                name: self.config.clone().unwrap_or_default(),
                shapes,
                verify: self.verify == Some(1),
            }));
        }
        let mut shapes = vec![];
        for block_bytes in self.block_bytes.iter().copied() {
            let blocks = self.blocks.unwrap_or(self.total_bytes / block_bytes.max(1));
            shapes.push(fits(Shape { block_bytes, blocks })?);
        }
        if self.pool_bytes < POOL_MIN {
            let why = format!("it must be at least {POOL_MIN}, for small reads beside large ones");
            return Err(Failure::new(format!("--pool-bytes {}", self.pool_bytes), why));
        }
        SMALL.iter().try_for_each(|(_, shape)| fits(*shape).map(drop))?;
        let seconds = within("peer-seconds", self.peer_seconds, SECONDS_MAX)?;
        Ok(Wanted::Tables(Plan {
            common,
            configs,
            shapes,
            rounds: within("rounds", self.rounds, ROUNDS_MAX)?,
            peers: within("peers", self.peers, PEERS_MAX)?,
            peer_time: Duration::from_secs(seconds),
            json: self.json,
        }))
    }
}
