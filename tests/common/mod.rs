//! A toy engine: a scheduler half and its workers in one process, over real TCP and real ZeroMQ on the loopback,
//! with memory whose every byte says where it comes from.
#![allow(unreachable_pub, dead_code, unused_imports)] // Each test file uses a part of it.

pub mod spoiler;
pub mod valve;
pub mod world;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kv_connector::proto::{BlockOrder, Dtype, LoadFailure, RegionKind, RegionLayout};
use kv_connector::transport::Memory;
use kv_connector::{
    BlockId, BlockLayout, BlockList, Config, ConnectorError, EngineIdentity, HoldId, LoadResult, Rank,
    RequestEnd, RequestId, Role, SchedEvent, SchedulerConnector, Verdict, WorkerConnector, WorkerSetup,
};
use serde_json::{Value, json};

use self::spoiler::{Spoil, Spoiler};
use self::valve::Valve;
pub use self::world::{World, refuse_load};

/// For what must happen, and on a busy machine may take its time.
pub const SOON: Duration = Duration::from_secs(20);

/// The engines of most tests, in the order in which they are added.
pub const P: usize = 0;
pub const D: usize = 1;

/// Limits short enough for tests, and long enough for a machine that does other things too.
pub fn config(name: &str) -> Config {
    Config {
        engine_id: name.to_owned(),
        renew_every_ms: 200,
        handshake_limit_ms: 2_000,
        connect_limit_ms: 2_000,
        peer_wait_ms: 5_000,
        read_limit_ms: 5_000,
        stall_limit_ms: 2_000,
        confirm_limit_ms: 2_000,
        load_limit_ms: 15_000,
        report_grace_ms: 2_000,
        retry_min_ms: 50,
        retry_max_ms: 200,
        ..Config::default()
    }
}

/// What an engine is made of.
#[derive(Clone)]
pub struct Shape {
    pub config: Config,
    pub ranks: u32,
    pub model: &'static str,
    pub blocks: u32,
    pub layers: u32,
    pub groups: u32,
    pub block_tokens: u32,
    pub heads: u32,
    /// Bytes between two blocks that belong to nobody.
    pub gap: u64,
    /// Whether peers reach the workers through a valve.
    pub valve: bool,
    /// What its workers read can be spoilt by this.
    pub spoil: Option<Spoil>,
}

impl Shape {
    pub fn named(name: &str) -> Self {
        Self {
            config: config(name),
            ranks: 1,
            model: "toy",
            blocks: 32,
            layers: 2,
            groups: 1,
            block_tokens: 4,
            heads: 2,
            gap: 16,
            valve: false,
            spoil: None,
        }
    }

    /// Blocks of 64 KiB and a valve, so that a read can be caught in the middle.
    pub fn slow(name: &str) -> Self {
        Self { heads: 2048, valve: true, ..Self::named(name) }
    }

    pub fn layout(&self) -> BlockLayout {
        const HEAD_SIZE: u32 = 4;
        let block_bytes = u64::from(self.heads * self.block_tokens * HEAD_SIZE) * Dtype::F16.bytes();
        let block_stride = block_bytes + self.gap;
        let region = |layer: u32| RegionLayout {
            layer: format!("layers.{layer}"),
            kind: RegionKind::KeyValue,
            group: layer % self.groups,
            memory: 0,
            base: self.gap + u64::from(layer) * u64::from(self.blocks) * block_stride,
            block_stride,
            block_bytes,
            dtype: Dtype::F16,
            heads: self.heads,
            heads_total: self.heads * self.ranks,
            head_size: HEAD_SIZE,
        };
        BlockLayout {
            block_tokens: self.block_tokens,
            blocks: self.blocks,
            kernel_tokens: 0,
            order: BlockOrder::HeadsTokens,
            groups: vec![],
            regions: (0..self.layers).map(region).collect(),
        }
    }
}

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Bytes that say whose they are.
fn stamp(bytes: &mut [u8], seed: u64, rank: u32, layer: u64, block: u32) {
    let place = mix(mix(mix(mix(seed) ^ u64::from(rank)) ^ layer) ^ u64::from(block));
    for (at, bytes) in bytes.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&mix(place ^ at as u64).to_le_bytes()[..bytes.len()]);
    }
}

/// Wakes whoever waits for a report.
#[derive(Default)]
pub struct Signal {
    rung: Mutex<bool>,
    wake: Condvar,
}

impl Signal {
    pub fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.wake.notify_all();
    }

    /// Until it was rung since the last call, or until the time is over.
    fn wait(&self, limit: Duration) {
        let rung = self.rung.lock().unwrap();
        let (mut rung, _) = self.wake.wait_timeout_while(rung, limit, |rung| !*rung).unwrap();
        *rung = false;
    }
}

pub fn request(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

pub fn list(ids: &[u32]) -> BlockList {
    ids.iter().copied().map(BlockId).collect()
}

/// A prompt that no other name has.
pub fn prompt(name: &str, tokens: u32) -> Vec<u32> {
    let seed = name.bytes().fold(0, |seed, byte| mix(seed ^ u64::from(byte)));
    (0..tokens).map(|i| mix(seed ^ u64::from(i)) as u32 % 50_000).collect()
}

/// What a producer offers of a finished request.
#[derive(Clone)]
pub struct Offer {
    pub prompt: Vec<u32>,
    pub blocks: Vec<u32>,
    pub params: Value,
    pub hold: HoldId,
}

impl Offer {
    /// The same offer with its parameters changed on the way.
    pub fn forged(&self, change: impl FnOnce(&mut Value)) -> Self {
        let mut forged = self.clone();
        change(&mut forged.params);
        forged
    }
}

/// One engine in one life.
pub struct Engine {
    pub shape: Shape,
    pub identity: EngineIdentity,
    pub sched: SchedulerConnector,
    pub workers: Vec<WorkerConnector>,
    pub layout: BlockLayout,
    pub valves: Vec<Valve>,
    /// Where its workers listen, and the number that names their transport's life.
    pub listening: Vec<(u16, [u8; 16])>,
    /// What the engine was told, in order.
    pub log: Vec<SchedEvent>,
    /// Plans are made, but wait here instead of being carried.
    pub hold_back: bool,
    held_back: Vec<Vec<u8>>,
    memories: Vec<Memory>,
    /// What the memories should hold.
    images: Vec<Vec<u8>>,
}

impl Engine {
    pub fn start(shape: Shape, seed: u64, signal: &Arc<Signal>) -> Result<Self, ConnectorError> {
        let mut config = shape.config.clone();
        if shape.valve {
            config.transport_advertise_host = "127.0.0.2".to_owned();
        }
        let identity = EngineIdentity::draw(&config, shape.ranks)?;
        let layout = shape.layout();
        let last = layout.regions.last().unwrap();
        let bytes = last.base + u64::from(shape.blocks) * last.block_stride;
        let (mut workers, mut memories, mut cards) = (Vec::new(), Vec::new(), Vec::new());
        let (mut valves, mut listening, mut images) = (Vec::new(), Vec::new(), Vec::new());
        for rank in 0..shape.ranks {
            let memory = Memory::allocate(bytes as usize).unwrap();
            let mut image = vec![0; bytes as usize];
            stamp(&mut image, seed, rank, u64::MAX, u32::MAX);
            memory.write(0, &image).unwrap();
            let signal = signal.clone();
            let setup = WorkerSetup {
                rank: Rank(rank),
                model: shape.model.to_owned(),
                layout: layout.clone(),
                memories: vec![memory.clone()],
                on_report: Box::new(move || signal.ring()),
            };
            let worker = match &shape.spoil {
                None => WorkerConnector::start(&config, &identity, setup)?,
                Some(spoil) => {
                    let inner = kv_connector::worker::open_transport(&config)?;
                    let spoiler = Spoiler { inner, memory: memory.clone(), spoil: spoil.clone() };
                    WorkerConnector::start_over(&config, &identity, setup, Arc::new(spoiler))?
                }
            };
            let card = worker.card()?;
            let seen = kv_connector::proto::handshake::WorkerCard::decode(&card).unwrap();
            let address = &seen.transports[0].address;
            let port = u16::from_le_bytes([address[3], address[4]]);
            listening.push((port, address[5..21].try_into().unwrap()));
            if shape.valve {
                valves.push(Valve::open(port));
            }
            workers.push(worker);
            cards.push(card);
            memories.push(memory);
            images.push(image);
        }
        let sched = SchedulerConnector::start(&config, &identity, &cards)?;
        let mut engine = Self {
            shape,
            identity,
            sched,
            workers,
            layout,
            valves,
            listening,
            log: Vec::new(),
            hold_back: false,
            held_back: Vec::new(),
            memories,
            images,
        };
        let all: Vec<u32> = (0..engine.layout.blocks).collect();
        engine.stamp(seed, &all);
        Ok(engine)
    }

    /// Where a block's bytes lie, region by region.
    pub fn places(&self, block: u32) -> Vec<(usize, std::ops::Range<usize>)> {
        let regions = self.layout.regions.iter().enumerate();
        regions
            .map(|(index, r)| {
                let start = (r.base + u64::from(block) * r.block_stride) as usize;
                (index, start..start + r.block_bytes as usize)
            })
            .collect()
    }

    /// Writes new bytes into blocks, as a new owner of them would.
    pub fn stamp(&mut self, seed: u64, blocks: &[u32]) {
        for block in blocks {
            for (region, place) in self.places(*block) {
                for rank in 0..self.memories.len() {
                    let bytes = &mut self.images[rank][place.clone()];
                    stamp(bytes, seed, rank as u32, region as u64, *block);
                    self.memories[rank].write(place.start as u64, bytes).unwrap();
                }
            }
        }
    }

    fn memory(&self, rank: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.memories[rank].len()];
        self.memories[rank].read(0, &mut bytes).unwrap();
        bytes
    }

    /// Rank and place of each byte that is not as it should be.
    pub fn wrong_bytes(&self) -> Vec<(usize, usize)> {
        let wrong = |rank: usize| {
            let (is, should) = (self.memory(rank), &self.images[rank]);
            (0..is.len()).filter(|at| is[*at] != should[*at]).map(move |at| (rank, at)).collect::<Vec<_>>()
        };
        (0..self.memories.len()).flat_map(wrong).collect()
    }

    /// Every byte is as it should be, those between the blocks included.
    pub fn assert_memory(&self) {
        for rank in 0..self.memories.len() {
            let (is, should) = (self.memory(rank), &self.images[rank]);
            if let Some(at) = (0..is.len()).find(|at| is[*at] != should[*at]) {
                let inside = (0..self.layout.blocks)
                    .flat_map(|block| self.places(block).into_iter().map(move |(r, place)| (block, r, place)))
                    .find(|(_, _, place)| place.contains(&at));
                panic!("{} rank {rank}: byte {at} is wrong, in {inside:?}", self.identity.engine);
            }
        }
    }

    /// As [`Engine::assert_memory`], but these blocks may hold anything.
    pub fn assert_memory_except(&mut self, blocks: &[u32]) {
        for rank in 0..self.memories.len() {
            let is = self.memory(rank);
            for block in blocks {
                for (_, place) in self.places(*block) {
                    self.images[rank][place.clone()].copy_from_slice(&is[place]);
                }
            }
        }
        self.assert_memory();
    }

    fn step(&mut self) {
        for worker in &self.workers {
            while let Some(report) = worker.report().unwrap() {
                self.sched.take_report(&report).unwrap();
            }
        }
        self.log.extend(self.sched.events());
        if let Some(plan) = self.sched.plan_step().unwrap() {
            self.held_back.push(plan);
        }
        if !self.hold_back {
            for plan in self.held_back.drain(..) {
                for worker in &self.workers {
                    // A worker that a test has shut down takes none.
                    let _ = worker.begin_step(&plan);
                }
            }
        }
    }

    pub fn is_released(&self, hold: HoldId) -> bool {
        self.log.iter().any(|event| matches!(event, SchedEvent::BlocksReleased { hold: h, .. } if *h == hold))
    }

    pub fn load_result(&self, name: &str) -> Option<&LoadResult> {
        self.log.iter().find_map(|event| match event {
            SchedEvent::LoadEnded { request, result } if request.as_str() == name => Some(result),
            _ => None,
        })
    }
}
