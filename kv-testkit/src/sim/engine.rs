//! Engines of a simulated world: their lives, their clocks and what they are made of.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_proto::handshake::{EngineCard, TransportCard, WorkerCard};
use kv_proto::{BlockId, BlockList, EngineId, Fingerprint, Incarnation, Moment, Rank, RequestId};
use kv_recovery::RecoveryConfig;
use kv_sched::{HoldId, SchedConfig, Scheduler};

use super::canary::Canary;
use super::clock::Clock;
use super::dice::Dice;
use super::faults::FaultKind;
use super::pool::Pool;
use super::recovery::{Recovering, draw_config};
use super::requests::Request;
use super::shape::{CELL_BYTES, PROMPT_MAX_TOKENS, Shape};
use super::worker::{WorkerNode, worker_config};
use super::world::{Event, MS, Time, WorkerAt, World};

/// What an engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Producer,
    Consumer,
}

/// One engine.
pub(super) struct Engine {
    pub(super) role: Role,
    pub(super) shape: Shape,
    pub(super) ranks: usize,
    pub(super) alive: bool,
    pub(super) life: u32,
    pub(super) clock: Clock,
    pub(super) paused_until: Time,
    /// Its step is not over before.
    pub(super) busy_until: Time,
    pub(super) scheduler: Option<Scheduler>,
    pub(super) workers: Vec<WorkerNode>,
    pub(super) pool: Pool,
    pub(super) requests: BTreeMap<RequestId, Request>,
    pub(super) card: Option<EngineCard>,
    /// Request ids that are over but whose P's blocks are held, for an abort that comes too late.
    pub(super) handed_over: BTreeMap<RequestId, HoldId>,
    pub(super) ticking: bool,
    /// An engine that schedules ahead: its plans reach the workers that much later than its answers leave it.
    pub(super) lag: Time,
    /// It has said that it takes nothing new.
    pub(super) draining: bool,
    /// On D: it has a prefix cache.
    pub(super) caches: bool,
    /// On D: blocks are entered into the prefix cache when their load is ordered, and taken out again if it fails. Else
    /// they are entered when they are good.
    pub(super) enters_early: bool,
    /// On D: what follows failed loads, unless it computes by itself whatever is missing.
    pub(super) recovery_limits: Option<RecoveryConfig>,
    pub(super) recovery: Option<Recovering>,
}

impl Engine {
    pub(super) fn new(role: Role, shape: Shape, draw: &mut Dice) -> Self {
        // Small pools now and then, so that requests wait for room.
        let size = if draw.chance(400) { draw.between(6, 10) } else { draw.between(12, 40) } as u32;
        // The longest prompt must find room.
        let size = size.max(PROMPT_MAX_TOKENS.div_ceil(shape.block_tokens));
        Self {
            role,
            shape,
            ranks: shape.ranks as usize,
            alive: false,
            life: 0,
            clock: Clock::draw(draw),
            paused_until: 0,
            busy_until: 0,
            scheduler: None,
            workers: Vec::new(),
            pool: Pool::new(size),
            requests: BTreeMap::new(),
            card: None,
            handed_over: BTreeMap::new(),
            ticking: false,
            lag: if draw.chance(400) { draw.between(5, 40) * MS } else { 0 },
            draining: false,
            // Of a layer with a window, or a state, a finished request leaves the end alone, which is no prefix.
            caches: draw.chance(500) && shape.odd.is_none() && role == Role::Consumer,
            enters_early: draw.chance(700),
            recovery_limits: draw.chance(700).then(|| draw_config(draw)),
            recovery: None,
        }
    }

    /// The block lists of a request, by group: a group has its own regions, and the same blocks stand for it there.
    pub(super) fn lists(&self, blocks: &[u32]) -> Vec<BlockList> {
        let list: BlockList = blocks.iter().copied().map(BlockId).collect();
        vec![list; self.shape.groups().len()]
    }

    /// Until when its scheduler process does not look at anything new, if it is so.
    pub(super) fn waits(&self, now: Time) -> Option<Time> {
        Some(self.paused_until.max(self.busy_until)).filter(|until| *until > now)
    }

    /// When one of the machines of its scheduler process wants to be called.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        let scheduler = self.scheduler.as_ref().and_then(Scheduler::next_deadline);
        let recovery = self.recovery.as_ref().and_then(|recovery| recovery.machine.next_deadline());
        scheduler.into_iter().chain(recovery).min()
    }

    pub(super) fn incarnation(index: usize, life: u32, same: bool) -> Incarnation {
        let life = if same { 1 } else { life };
        Incarnation::from_random((index as u64 + 1) << 32 | u64::from(life))
    }
}

impl World {
    /// Begins a life of an engine.
    pub(super) fn start_engine(&mut self, index: usize) {
        let same_life = self.has(Canary::SameLife);
        let (canary, checksums) = (self.canary, self.checksums);
        let engine = &mut self.engines[index];
        engine.life += 1;
        engine.alive = true;
        engine.paused_until = 0;
        engine.busy_until = 0;
        let incarnation = Engine::incarnation(index, engine.life, same_life);
        let (shape, topology) = (engine.shape, engine.shape.topology());
        let size = engine.pool.size;
        engine.pool = Pool::new(size);
        engine.requests.clear();
        engine.handed_over.clear();
        engine.ticking = false;
        engine.draining = false;
        engine.recovery = match (engine.role, &engine.recovery_limits) {
            (Role::Consumer, Some(limits)) => Recovering::new(limits, canary),
            (Role::Producer, _) | (_, None) => None,
        };
        let Ok(id) = EngineId::new(format!("engine-{index}")) else { return };
        let layout = |rank| shape.layout(rank, size);
        let fingerprint = Fingerprint::of("model", &layout(0));
        let life = engine.life;
        let workers = (0..engine.ranks)
            .map(|rank| WorkerCard {
                rank: Rank(rank as u32),
                memory_sizes: vec![shape.cells(rank, size) as u64 * CELL_BYTES],
                layout: layout(rank),
                fingerprint: fingerprint.clone(),
                transports: vec![TransportCard {
                    name: "sim".to_owned(),
                    address: format!("{index} {life} {rank}").into_bytes(),
                    keys: vec![format!("{index} {life} {rank}").into_bytes().into()],
                }],
            })
            .collect();
        engine.card =
            Some(EngineCard { engine: id.clone(), incarnation, topology, workers, renew_every_ms: 100 });
        let config = SchedConfig {
            engine: id.clone(),
            incarnation,
            topology,
            host: "sim".to_owned(),
            port: index as u16 + 1,
            block_tokens: shape.block_tokens,
            blocks: size,
            groups: shape.groups(),
            lease_ttl: Duration::from_millis(500),
            lease_renewal: Duration::from_millis(500),
            lease_max: Duration::from_millis(4_000),
            lease_grace: Duration::from_millis(300),
            min_remote_tokens: 1,
            queue_limit: Duration::from_millis(3_000),
            load_limit: Duration::from_millis(4_000),
            report_grace: Duration::from_millis(1_000),
        };
        engine.scheduler = Scheduler::new(config).ok();
        engine.workers = (0..engine.ranks)
            .map(|rank| {
                let config = worker_config(id.clone(), incarnation, rank, topology, checksums, canary);
                WorkerNode::new(config, layout(rank), shape.cells(rank, size), fingerprint.clone())
            })
            .collect();
        self.draw_drift(index);
    }

    /// Clocks of a new life that run fast or slow.
    fn draw_drift(&mut self, index: usize) {
        for process in 0..=self.engines[index].ranks {
            if !self.strikes(FaultKind::ClockDrift) {
                continue;
            }
            self.tell(|| format!("the clock of process {process} of engine {index} drifts"));
            let engine = &mut self.engines[index];
            match process.checked_sub(1).and_then(|rank| engine.workers.get_mut(rank)) {
                Some(worker) => worker.clock.drift(&mut self.dice),
                None => engine.clock.drift(&mut self.dice),
            }
        }
    }

    pub(super) fn die(&mut self, index: usize, back_after: Option<Time>) {
        if !self.engines[index].alive {
            return;
        }
        self.tell(|| format!("engine {index} dies"));
        let life = self.engines[index].life;
        let engine = &mut self.engines[index];
        engine.alive = false;
        engine.scheduler = None;
        engine.recovery = None;
        engine.card = None;
        let workers = std::mem::take(&mut engine.workers);
        for (rank, worker) in workers.into_iter().enumerate() {
            self.graveyard.insert(WorkerAt { engine: index, life, rank }, worker.memory);
        }
        self.break_links_of(index, life);
        if let Some(wait) = back_after {
            self.after(wait, Event::Return { engine: index });
        }
    }

    pub(super) fn come_back(&mut self, index: usize) {
        if !self.engines[index].alive {
            self.start_engine(index);
            let life = self.engines[index].life;
            self.tell(|| format!("engine {index} is back, in life {life}"));
            self.producer_is_back(index);
        }
    }

    /// Process 0 is the scheduler's, the others are workers.
    pub(super) fn pause(&mut self, index: usize, process: usize, until: Time) {
        self.tell(|| format!("process {process} of engine {index} stands still"));
        let engine = &mut self.engines[index];
        match process.checked_sub(1).and_then(|rank| engine.workers.get_mut(rank)) {
            Some(worker) => worker.pause(until),
            None => engine.paused_until = until,
        }
    }

    pub(super) fn clock_jump(&mut self, index: usize, process: usize, by: Time) {
        self.tell(|| format!("the clock of process {process} of engine {index} jumps"));
        let life = self.engines[index].life;
        let engine = &mut self.engines[index];
        match process.checked_sub(1) {
            Some(rank) if rank < engine.workers.len() => {
                engine.workers[rank].jump(self.now, by);
                self.set_timer(WorkerAt { engine: index, life, rank });
            }
            _ => {
                engine.clock.jump(by);
                self.wake(index);
            }
        }
    }
}
