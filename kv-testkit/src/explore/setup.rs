//! Who takes part: two engines that differ in nothing but their names and lives.

use std::sync::Arc;
use std::time::Duration;

use kv_proto::handshake::{EngineCard, TransportCard, WorkerCard};
use kv_proto::{
    BlockId, BlockLayout, BlockList, BlockOrder, ConsumerOrder, Dtype, EngineId, Fingerprint, GroupKind,
    Incarnation, LeaseId, LeaseRef, OfferDigest, PeerLocator, Plan, Rank, RegionKind, RegionLayout,
    ReleaseReason, RequestId, Topology,
};
use kv_sched::{SchedConfig, Scheduler};
use kv_transport::RegionId;
use kv_worker::machine::pulls::LocalMemory;
use kv_worker::machine::worker::WorkerMachine;
use kv_worker::{WorkerConfig, WorkerLimits};

use super::Mutant;
use super::world::{D, P};

/// Blocks of each pool: one per request.
pub(super) const BLOCKS: usize = 2;
/// Most ranks of an engine.
pub(super) const RANKS: usize = 2;
/// Most requests of a story.
pub(super) const REQUESTS: usize = 2;
/// Bytes of a block.
pub(super) const BLOCK_BYTES: u64 = 64;
/// Tokens of a prompt, which is one block.
pub(super) const TOKENS: u32 = 4;

/// What the story's people are called. Made once, since making and checking them again is most of a step's cost.
#[derive(Debug)]
pub(super) struct Names {
    engines: [EngineId; 2],
    requests: [RequestId; REQUESTS],
    /// Ranks of each engine.
    pub(super) ranks: usize,
    /// Whether every life of P has the same number.
    pub(super) one_life: bool,
    /// Whether loads are compared.
    checksums: bool,
    /// Whether anybody at D looks at the clock.
    pub(super) clock_at_d: bool,
}

impl Names {
    /// The names; `None` if the texts of this file were no ids.
    pub(super) fn new(ranks: usize, checksums: bool, mutant: Option<Mutant>) -> Option<Self> {
        Some(Self {
            engines: [EngineId::new("p").ok()?, EngineId::new("d").ok()?],
            requests: [RequestId::new("r0").ok()?, RequestId::new("r1").ok()?],
            ranks,
            checksums,
            one_life: mutant == Some(Mutant::IncarnationIgnored),
            clock_at_d: mutant != Some(Mutant::NoDeadlines),
        })
    }

    /// A request's id.
    pub(super) fn request(&self, request: u8) -> &RequestId {
        &self.requests[usize::from(request)]
    }

    /// The request of an id.
    pub(super) fn number(&self, id: &RequestId) -> Option<u8> {
        self.requests.iter().position(|r| r == id).map(|n| n as u8)
    }

    fn topology(&self) -> Topology {
        Topology::of(self.ranks as u32)
    }

    /// The number of an engine's life.
    pub(super) fn incarnation(&self, side: usize, life: u8) -> Incarnation {
        let life = if side == P && self.one_life { 1 } else { u64::from(life) };
        Incarnation::from_random(life + 100 * side as u64)
    }

    /// Where D finds a life of P.
    pub(super) fn locator(&self, incarnation: Incarnation) -> PeerLocator {
        PeerLocator { engine: self.engines[P].clone(), incarnation, host: "h".to_owned(), port: 1 }
    }

    /// What a life of P says of itself.
    pub(super) fn card(&self, incarnation: Incarnation) -> EngineCard {
        let worker = |rank: u32| WorkerCard {
            rank: Rank(rank),
            memory_sizes: vec![BLOCKS as u64 * BLOCK_BYTES],
            layout: layout(self.ranks),
            fingerprint: Fingerprint::of("m", &layout(self.ranks)),
            transports: vec![TransportCard {
                name: "x".to_owned(),
                address: vec![1],
                keys: vec![vec![1].into()],
            }],
        };
        EngineCard {
            engine: self.engines[P].clone(),
            incarnation,
            topology: self.topology(),
            workers: (0..self.ranks as u32).map(worker).collect(),
            renew_every_ms: 0,
        }
    }

    /// An engine's scheduler half at the beginning of a life.
    ///
    /// The limits are such that all kinds of deadlines come within a few jumps of time: a lease lives for less than
    /// a repeated question needs, a confirmation is given up before a lease's longest life is over.
    pub(super) fn scheduler(&self, side: usize, life: u8) -> Option<Scheduler> {
        Scheduler::new(SchedConfig {
            engine: self.engines[side].clone(),
            incarnation: self.incarnation(side, life),
            topology: self.topology(),
            host: "h".to_owned(),
            port: 1,
            block_tokens: TOKENS,
            blocks: BLOCKS as u32,
            groups: vec![GroupKind::Full],
            lease_ttl: Duration::from_millis(100),
            lease_renewal: Duration::from_millis(100),
            lease_max: Duration::from_millis(400),
            lease_grace: Duration::from_millis(50),
            min_remote_tokens: 1,
            queue_limit: Duration::from_secs(2),
            load_limit: Duration::from_secs(3),
            report_grace: Duration::from_secs(2),
        })
        .ok()
    }

    /// One rank's worker at the beginning of a life.
    pub(super) fn worker(&self, side: usize, life: u8, rank: usize) -> WorkerMachine {
        let limits = WorkerLimits {
            confirm: Duration::from_millis(250),
            confirm_repeat: Duration::from_millis(120),
            renew_every: Duration::from_millis(60),
            retry_min: Duration::from_millis(20),
            retry_max: Duration::from_millis(200),
            connect: Duration::from_millis(200),
            handshake: Duration::from_millis(200),
            peer_wait: Duration::from_millis(500),
            read: Duration::from_millis(500),
            stall: Duration::from_millis(100),
            prolong_bytes: u64::MAX,
            portion_bytes: u64::MAX,
            retries: 0,
            remember_ended: Duration::from_secs(10),
            peer_idle: Duration::from_secs(60),
            // The rest between two checks would tell apart worlds that differ in nothing else.
            self_check_every: Duration::ZERO,
        };
        let config = WorkerConfig {
            engine: self.engines[side].clone(),
            incarnation: self.incarnation(side, life),
            rank: Rank(rank as u32),
            topology: self.topology(),
            checksums: self.checksums,
            limits,
        };
        WorkerMachine::new(
            config,
            LocalMemory { layout: layout(self.ranks), regions: vec![RegionId(0)] },
            "x",
        )
    }

    /// A release of nothing: it makes D shake hands. What it is of does not matter to P, which does not know it.
    pub(super) fn knock(&self) -> Plan {
        let incarnation = self.incarnation(P, 1);
        let release = ConsumerOrder::Release {
            lease: LeaseRef { incarnation, lease: LeaseId(0) },
            offer: OfferDigest::from_bytes([0; 16]),
            peer: self.locator(incarnation),
            reason: ReleaseReason::Other,
        };
        Plan { producer: Vec::new(), consumer: vec![release], ..Plan::default() }
    }

    /// The handle of a life's locator.
    pub(super) fn peer(&self, incarnation: Incarnation) -> Arc<PeerLocator> {
        Arc::new(self.locator(incarnation))
    }
}

/// Where blocks lie: one layer, one memory.
fn layout(ranks: usize) -> BlockLayout {
    let region = RegionLayout {
        layer: "l".to_owned(),
        kind: RegionKind::KeyValue,
        group: 0,
        memory: 0,
        base: 0,
        block_stride: BLOCK_BYTES,
        block_bytes: BLOCK_BYTES,
        dtype: Dtype::F32,
        heads: 1,
        heads_total: ranks as u32,
        head_size: 4,
    };
    BlockLayout {
        block_tokens: TOKENS,
        blocks: BLOCKS as u32,
        kernel_tokens: 0,
        order: BlockOrder::HeadsTokens,
        groups: vec![],
        regions: vec![region],
    }
}

/// The prompt, the same for all requests: an offer is then told from another by its lease and life alone.
pub(super) const PROMPT: [u32; TOKENS as usize] = [7; TOKENS as usize];

/// A list of one block.
pub(super) fn blocks(block: u8) -> Vec<BlockList> {
    vec![[BlockId(u32::from(block))].into_iter().collect()]
}

/// How the sides are called in stories.
pub(super) const fn side_name(side: usize) -> &'static str {
    if side == D { "D" } else { "P" }
}
