//! Engines of a simulated world: a pool of blocks, requests that come and go, and the scheduler half.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use kv_proto::handshake::{EngineCard, TransportCard, WorkerCard};
use kv_proto::{
    BlockId, BlockLayout, BlockList, BlockOrder, ConsumerOrder, Dtype, EngineId, Fingerprint, Incarnation,
    LoadId, Plan, PullEnd, Rank, RegionKind, RegionLayout, Report, RequestId, Topology, TransferParams,
};
use kv_sched::{HoldId, LoadResult, RequestEnd, Role as Task, SchedConfig, SchedEvent, Scheduler, Verdict};
use serde_json::{Value, json};

use super::canary::Canary;
use super::dice::Dice;
use super::faults::FaultKind;
use super::invariants::Invariant;
use super::worker::WorkerNode;
use super::world::{Clock, Event, MS, Time, WorkerAt, World};

/// Tokens in a block.
pub(super) const BLOCK_TOKENS: u32 = 4;
/// Layers of the world's model.
pub(super) const LAYERS: usize = 2;
/// Bytes of a block in one layer: the unit in which memory is simulated.
pub(super) const CELL_BYTES: u64 = 64;
/// What an aborted, freed or never written cell holds.
const GARBAGE: u64 = 0;

/// What an engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Producer,
    Consumer,
}

/// Where a request is in its engine.
#[derive(Debug, Clone, PartialEq)]
enum Stage {
    /// Without blocks.
    Waiting,
    /// On P: so many ticks to go. On D: decoding.
    Running { ticks: u64 },
    /// On D.
    Loading,
}

#[derive(Debug, Clone)]
pub(super) struct Request {
    prompt: usize,
    task: Task,
    stage: Stage,
    blocks: Vec<u32>,
    local_blocks: u32,
    /// On P: when every worker has the plan that announced it. No token is computed before, since the plan comes with
    /// the work (H-8).
    announced_at: Option<Time>,
}

/// A pool of blocks. `tags` says which load may write a block of a consumer.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    pub(super) size: u32,
    free: Vec<u32>,
    pub(super) tags: Vec<Option<LoadId>>,
    held: BTreeMap<HoldId, Vec<u32>>,
}

impl Pool {
    fn new(size: u32) -> Self {
        Self { size, free: (0..size).collect(), tags: vec![None; size as usize], held: BTreeMap::new() }
    }

    pub(super) fn free_count(&self) -> usize {
        self.free.len()
    }
}

/// One engine.
pub(super) struct Engine {
    pub(super) role: Role,
    pub(super) ranks: usize,
    pub(super) alive: bool,
    pub(super) life: u32,
    pub(super) clock: Clock,
    pub(super) paused_until: Time,
    pub(super) scheduler: Option<Scheduler>,
    pub(super) workers: Vec<WorkerNode>,
    pub(super) pool: Pool,
    pub(super) requests: BTreeMap<RequestId, Request>,
    pub(super) card: Option<EngineCard>,
    /// Request ids that are over but whose P's blocks are held, for an abort that comes too late.
    handed_over: BTreeMap<RequestId, HoldId>,
    ticking: bool,
    /// An engine that schedules ahead: its plans reach the workers that much later than its answers leave it.
    lag: Time,
}

impl Engine {
    pub(super) fn new(_index: usize, role: Role, ranks: usize, draw: &mut Dice) -> Self {
        // Small pools now and then, so that requests wait for room.
        let size = if draw.chance(400) { draw.between(6, 10) } else { draw.between(12, 40) } as u32;
        Self {
            role,
            ranks,
            alive: false,
            life: 0,
            clock: Clock::draw(draw),
            paused_until: 0,
            scheduler: None,
            workers: Vec::new(),
            pool: Pool::new(size),
            requests: BTreeMap::new(),
            card: None,
            handed_over: BTreeMap::new(),
            ticking: false,
            lag: if draw.chance(400) { draw.between(5, 40) * MS } else { 0 },
        }
    }

    pub(super) fn incarnation(index: usize, life: u32, same: bool) -> Incarnation {
        let life = if same { 1 } else { life };
        Incarnation::from_random((index as u64 + 1) << 32 | u64::from(life))
    }
}

/// What a cell must hold: this rank's and layer's part of a block of a prompt.
pub(super) fn stamp(prompt: usize, position: usize, layer: usize, rank: usize) -> u64 {
    1 + (((prompt as u64 * 1000 + position as u64) * 10 + layer as u64) * 10 + rank as u64)
}

fn layout(blocks: u32) -> BlockLayout {
    let region = |layer: u64| RegionLayout {
        layer: format!("layers.{layer}"),
        kind: RegionKind::KeyValue,
        group: 0,
        memory: 0,
        base: layer * u64::from(blocks) * CELL_BYTES,
        block_stride: CELL_BYTES,
        block_bytes: CELL_BYTES,
        dtype: Dtype::F32,
        heads: 1,
        head_size: 4,
    };
    BlockLayout {
        block_tokens: BLOCK_TOKENS,
        blocks,
        order: BlockOrder::HeadsTokens,
        regions: (0..LAYERS as u64).map(region).collect(),
    }
}

fn ids(blocks: &[u32]) -> BlockList {
    blocks.iter().copied().map(BlockId).collect()
}

impl World {
    /// Begins a life of an engine.
    pub(super) fn start_engine(&mut self, index: usize) {
        let same_life = self.has(Canary::SameLife);
        let engine = &mut self.engines[index];
        engine.life += 1;
        engine.alive = true;
        engine.paused_until = 0;
        let incarnation = Engine::incarnation(index, engine.life, same_life);
        let topology = Topology { ranks: engine.ranks as u32 };
        let size = engine.pool.size;
        engine.pool = Pool::new(size);
        engine.requests.clear();
        engine.handed_over.clear();
        engine.ticking = false;
        let Ok(id) = EngineId::new(format!("engine-{index}")) else { return };
        let layout = layout(size);
        let fingerprint = Fingerprint::of("model", &layout, topology);
        let life = engine.life;
        let workers = (0..engine.ranks)
            .map(|rank| WorkerCard {
                rank: Rank(rank as u32),
                memory_sizes: vec![LAYERS as u64 * u64::from(size) * CELL_BYTES],
                layout: layout.clone(),
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
            block_tokens: BLOCK_TOKENS,
            blocks: size,
            groups: 1,
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
                WorkerNode::new(id.clone(), incarnation, rank, topology, layout.clone(), fingerprint.clone())
            })
            .collect();
    }

    /// Wakes an engine's loop, if it is not awake.
    fn wake(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        if engine.alive && !engine.ticking {
            engine.ticking = true;
            let life = engine.life;
            let wait = self.dice.between(1, 8) * MS;
            self.after(wait, Event::Tick { engine: index, life });
        }
    }

    pub(super) fn request_at_p(&mut self, request: usize) {
        let index = self.prompts[request].producer;
        self.tell(|| format!("request {request} reaches P {index}"));
        let id = format!("r{request}");
        let params = json!({ "do_remote_decode": true });
        self.arrive(index, request, id.clone(), &params);
        if self.strikes(FaultKind::ClientGone) {
            let life = self.engines[index].life;
            let wait = self.dice.between(1, 120) * MS;
            self.after(wait, Event::ClientGone { engine: index, life, id });
        }
    }

    pub(super) fn request_at_d(&mut self, index: usize, request: usize, params: &Value, copy: u32) {
        self.tell(|| format!("request {request} reaches D {index}{}", if copy > 0 { " again" } else { "" }));
        // A retry to the same consumer may come under the same name, while the first is still there.
        let id = if copy > 0 && self.dice.chance(500) {
            format!("r{request}-{copy}")
        } else {
            format!("r{request}")
        };
        self.arrive(index, request, id.clone(), params);
        if self.strikes(FaultKind::ClientGone) {
            let life = self.engines[index].life;
            let wait = self.dice.between(0, 60) * MS;
            self.after(wait, Event::ClientGone { engine: index, life, id });
        }
    }

    fn arrive(&mut self, index: usize, prompt: usize, id: String, params: &Value) {
        let mut tokens = self.prompts[prompt].tokens.clone();
        let now = self.now;
        let mut params = params.clone();
        if self.engines[index].role == Role::Consumer && self.strikes(FaultKind::PromptChanged) {
            tokens[0] += 7;
            if self.has(Canary::DigestIgnored) {
                let count = params["kv_connector"]["tokens"].as_u64().unwrap_or(0) as usize;
                params["kv_connector"]["token_digest"] = json!(kv_proto::token_digest(&tokens[..count]));
            }
        }
        if self.engines[index].role == Role::Consumer && self.strikes(FaultKind::OfferForged) {
            forge_blocks(&mut params);
        }
        let changed = tokens != self.prompts[prompt].tokens;
        let engine = &mut self.engines[index];
        let (Some(scheduler), Ok(id)) = (&mut engine.scheduler, RequestId::new(id)) else { return };
        if !engine.alive {
            return;
        }
        let local = engine.clock.read(now);
        let parsed = match TransferParams::parse(&params) {
            Ok(parsed) => parsed,
            Err(error) => return self.violate(Invariant::Calm, format!("own parameters refused: {error}")),
        };
        let answer = scheduler.request_arrived(local, &id, &tokens, parsed.as_ref());
        match answer {
            Ok(task) => {
                // A changed prompt that was accepted stands for content that this world does not know.
                let prompt = if changed && task == Task::Consumer { prompt + 5_000 } else { prompt };
                let request = Request {
                    prompt,
                    task,
                    stage: Stage::Waiting,
                    blocks: Vec::new(),
                    local_blocks: 0,
                    announced_at: None,
                };
                engine.requests.insert(id, request);
            }
            Err(error) => self.tell(|| format!("engine {index} refuses {id}: {error}")),
        }
        self.wake(index);
    }

    /// P has answered: the router goes on to D, if all goes well.
    pub(super) fn params_at_router(&mut self, request: usize, params: &Rc<Value>) {
        if self.strikes(FaultKind::RouterLost) {
            return self.tell(|| format!("the router loses request {request}"));
        }
        let engine = self.prompts[request].consumer;
        let mut wait = self.dice.between(1, 10) * MS;
        if self.strikes(FaultKind::RouterLate) {
            wait += self.dice.between(400, 1_500) * MS;
        }
        self.after(wait, Event::RequestAtD { engine, request, params: params.clone(), copy: 0 });
        if self.strikes(FaultKind::RouterRetry) {
            let producers = self.engines.iter().filter(|e| e.role == Role::Producer).count();
            let consumers = self.engines.len() - producers;
            let engine = producers + self.dice.below(consumers as u64) as usize;
            let wait = wait + self.dice.between(0, 1_200) * MS;
            let copy = 1 + self.dice.below(100) as u32;
            self.after(wait, Event::RequestAtD { engine, request, params: params.clone(), copy });
        }
    }

    /// One turn of an engine's loop.
    pub(super) fn tick(&mut self, index: usize, life: u32) {
        let engine = &mut self.engines[index];
        if !engine.alive || engine.life != life {
            return;
        }
        if engine.paused_until > self.now {
            let until = engine.paused_until;
            return self.at(until, Event::Tick { engine: index, life });
        }
        engine.ticking = false;
        self.take_events(index);
        let names: Vec<RequestId> = self.engines[index].requests.keys().cloned().collect();
        for id in names {
            self.advance(index, &id);
        }
        self.send_plan(index);
        let engine = &self.engines[index];
        let deadline = engine.scheduler.as_ref().and_then(Scheduler::next_deadline);
        if !engine.requests.is_empty() {
            self.wake(index);
        } else if let Some(deadline) = deadline {
            // Asleep until a deadline of the scheduler half; another event wakes it earlier.
            let when = self.engines[index].clock.when(deadline);
            self.at(when.max(self.now + MS), Event::Tick { engine: index, life });
        }
    }

    /// Moves one request on by a turn.
    fn advance(&mut self, index: usize, id: &RequestId) {
        let Some(request) = self.engines[index].requests.get(id).cloned() else { return };
        match (request.stage.clone(), request.task) {
            (Stage::Waiting, _) => self.admit(index, id, &request),
            (Stage::Loading, _) => {}
            (Stage::Running { ticks: 0 }, Task::Producer)
                if request.announced_at.is_none_or(|at| at > self.now) => {}
            (Stage::Running { ticks: 0 }, _) => self.complete(index, id),
            (Stage::Running { ticks }, _) => {
                if self.engines[index].role == Role::Producer && self.strikes(FaultKind::Preempted) {
                    self.tell(|| format!("{id} is preempted on engine {index}"));
                    self.release(index, &request.blocks);
                    if let Some(request) = self.engines[index].requests.get_mut(id) {
                        request.stage = Stage::Waiting;
                        request.blocks.clear();
                    }
                } else if let Some(request) = self.engines[index].requests.get_mut(id) {
                    request.stage = Stage::Running { ticks: ticks - 1 };
                }
            }
        }
    }

    fn admit(&mut self, index: usize, id: &RequestId, request: &Request) {
        let tokens = self.prompt_len(request.prompt);
        let needed = tokens.div_ceil(BLOCK_TOKENS) as usize;
        if self.engines[index].pool.free.len() < needed {
            return;
        }
        // A consumer finds a part of the prompt in its own cache now and then, up to the whole of it.
        let full = tokens / BLOCK_TOKENS;
        let cached = if request.task == Task::Consumer && self.dice.chance(300) {
            self.dice.between(0, u64::from(full)) as u32
        } else {
            0
        };
        let local_tokens = cached * BLOCK_TOKENS;
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        let remote = scheduler.remote_tokens(id, local_tokens);
        let blocks: Vec<u32> = engine.pool.free.drain(..needed).collect();
        let now = engine.clock.read(self.now);
        let mut stage = Stage::Running { ticks: self.dice.between(1, 6) };
        if request.task == Task::Consumer {
            match scheduler.blocks_allocated(now, id, local_tokens, remote, &[ids(&blocks)]) {
                Ok(()) if remote > 0 => stage = Stage::Loading,
                Ok(()) => {}
                Err(error) => {
                    let what = format!("blocks of {id} refused on engine {index}: {error}");
                    return self.violate(Invariant::Calm, what);
                }
            }
        }
        if let Some(record) = engine.requests.get_mut(id) {
            record.blocks.clone_from(&blocks);
            record.stage = stage;
            record.local_blocks = cached;
        }
        for (position, block) in blocks.iter().enumerate() {
            let known = position < cached as usize;
            self.fill(index, *block, |layer, rank| {
                if known { stamp(request.prompt, position, layer, rank) } else { GARBAGE }
            });
        }
    }

    fn prompt_len(&self, prompt: usize) -> u32 {
        self.prompts[prompt % 5_000].tokens.len() as u32
    }

    fn fill(&mut self, index: usize, block: u32, what: impl Fn(usize, usize) -> u64) {
        let engine = &mut self.engines[index];
        let size = engine.pool.size as usize;
        for (rank, worker) in engine.workers.iter_mut().enumerate() {
            for layer in 0..LAYERS {
                worker.memory[layer * size + block as usize] = what(layer, rank);
            }
        }
    }

    /// A request has run to its end.
    fn complete(&mut self, index: usize, id: &RequestId) {
        let Some(request) = self.engines[index].requests.remove(id) else { return };
        if self.engines[index].role == Role::Producer {
            for (position, block) in request.blocks.iter().enumerate() {
                self.fill(index, *block, |layer, rank| stamp(request.prompt, position, layer, rank));
            }
        }
        let end = RequestEnd::Complete {
            computed_tokens: self.prompt_len(request.prompt),
            blocks: vec![ids(&request.blocks)],
        };
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        let now = engine.clock.read(self.now);
        let finish = scheduler.request_finished(now, id, &end);
        self.tell(|| format!("{id} finishes on engine {index}: {:?}", finish.verdict));
        self.follow(index, id, &request.blocks, finish.verdict);
        if let Some(params) = finish.params {
            let params = Rc::new(TransferParams::RemotePrefill(Box::new(params)).to_json());
            let wait = self.dice.between(0, 6) * MS;
            self.after(wait, Event::ParamsAtRouter { request: request.prompt, params });
        }
    }

    /// Does with blocks what the scheduler half says.
    fn follow(&mut self, index: usize, id: &RequestId, blocks: &[u32], verdict: Verdict) {
        let freed = match verdict {
            Verdict::Free => true,
            Verdict::Hold(HoldId::Lease(_)) => self.has(Canary::BlocksFreedAtFinish),
            Verdict::Hold(HoldId::Load(_)) => self.has(Canary::DestinationFreedOnAbort),
        };
        if let Verdict::Hold(hold) = verdict {
            let kept = if freed { Vec::new() } else { blocks.to_vec() };
            let engine = &mut self.engines[index];
            if engine.pool.held.insert(hold, kept).is_some() {
                return self.violate(Invariant::EndsOnce, format!("{hold:?} holds twice on engine {index}"));
            }
            if matches!(hold, HoldId::Lease(_)) {
                engine.handed_over.insert(id.clone(), hold);
            }
        }
        if freed {
            self.release(index, blocks);
        }
    }

    /// Blocks go back to the pool, and their contents are gone.
    fn release(&mut self, index: usize, blocks: &[u32]) {
        for block in blocks {
            if self.engines[index].pool.free.contains(block) {
                let what = format!("block {block} of engine {index} is freed twice");
                return self.violate(Invariant::Conserved, what);
            }
            self.engines[index].pool.tags[*block as usize] = None;
            self.engines[index].pool.free.push(*block);
            self.fill(index, *block, |_, _| GARBAGE);
        }
        self.wake(index);
    }

    pub(super) fn client_gone(&mut self, index: usize, life: u32, id: &str) {
        let engine = &mut self.engines[index];
        let (true, Ok(id)) = (engine.alive && engine.life == life, RequestId::new(id)) else { return };
        let Some(request) = engine.requests.remove(&id) else {
            // Too late: the hand-over owns the blocks now.
            if self.canary == Some(Canary::AbortFreesHandedOver)
                && let Some(hold) = engine.handed_over.get(&id).copied()
                && let Some(blocks) = engine.pool.held.get_mut(&hold).map(std::mem::take)
            {
                self.release(index, &blocks);
            }
            return;
        };
        let Some(scheduler) = &mut engine.scheduler else { return };
        let finish = scheduler.request_finished(engine.clock.read(self.now), &id, &RequestEnd::Aborted);
        self.tell(|| format!("the client of {id} is gone, engine {index}: {:?}", finish.verdict));
        self.follow(index, &id, &request.blocks, finish.verdict);
        self.wake(index);
    }

    fn send_plan(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        let mut plan = scheduler.plan_step(engine.clock.read(self.now));
        if plan.is_empty() {
            return;
        }
        for order in &mut plan.consumer {
            if let ConsumerOrder::Load { load, groups, .. } = order {
                for group in groups {
                    for BlockId(block) in group.local.iter() {
                        engine.pool.tags[block as usize] = Some(*load);
                    }
                    if self.canary == Some(Canary::PairedFromTail) && group.first > 0 {
                        // Shorter lists are matched at their ends only if both end together; here one does not.
                        let shifted: Vec<BlockId> =
                            group.remote.iter().map(|b| BlockId(b.0.saturating_sub(1))).collect();
                        group.remote = shifted.into_iter().collect();
                    }
                }
            }
        }
        let (life, ranks) = (engine.life, engine.ranks);
        let Ok(bytes) = plan.encode() else { return };
        let bytes = Rc::new(bytes);
        let mut last = self.now;
        for rank in 0..ranks {
            let mut wait = self.engines[index].lag + self.dice.between(0, 4) * MS;
            if self.strikes(FaultKind::PlanLate) {
                wait += self.dice.between(5, 150) * MS;
            }
            let at = WorkerAt { engine: index, life, rank };
            // Plans reach a worker in their order.
            let worker = &mut self.engines[index].workers[rank];
            let when = (self.now + wait).max(worker.plans_until);
            worker.plans_until = when;
            last = last.max(when);
            self.at(when, Event::PlanAtWorker { at, plan: bytes.clone() });
            if self.has(Canary::FailureBeforeQuiet) {
                self.report_cancelled_at_once(at, &plan);
            }
        }
        for request in self.engines[index].requests.values_mut() {
            request.announced_at.get_or_insert(last);
        }
    }

    /// The canary: a worker that reports a cancelled load as ended without waiting for the transport.
    fn report_cancelled_at_once(&mut self, at: WorkerAt, plan: &Plan) {
        let mut report = Report::new(Rank(at.rank as u32));
        for order in &plan.consumer {
            if let ConsumerOrder::Cancel { load } = order {
                let reason = kv_proto::LoadFailure::Cancelled;
                report.loads.push((*load, PullEnd::Failed { reason, detail: String::new() }));
            }
        }
        if let (false, Ok(report)) = (report.is_empty(), report.encode()) {
            self.after(MS, Event::ReportAtScheduler { engine: at.engine, life: at.life, report });
        }
    }

    pub(super) fn report_at_scheduler(&mut self, index: usize, life: u32, report: &[u8]) {
        let engine = &mut self.engines[index];
        if !engine.alive || engine.life != life {
            return;
        }
        if engine.paused_until > self.now {
            let until = engine.paused_until;
            let report = report.to_vec();
            return self.at(until, Event::ReportAtScheduler { engine: index, life, report });
        }
        let (Some(scheduler), Ok(report)) = (&mut engine.scheduler, Report::decode(report)) else { return };
        let now = engine.clock.read(self.now);
        let ranks = engine.ranks as u32;
        let one_is_all = match self.canary {
            Some(Canary::FreedByFirstRank) => !report.leases.is_empty(),
            Some(Canary::OneRankEnough) => report.loads.iter().any(|(_, e)| matches!(e, PullEnd::Loaded(_))),
            _ => false,
        };
        if one_is_all {
            for rank in 0..ranks {
                scheduler.take_report(now, Report { rank: Rank(rank), ..report.clone() });
            }
        } else {
            scheduler.take_report(now, report);
        }
        self.take_events(index);
        self.wake(index);
    }

    fn take_events(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        scheduler.time_passed(engine.clock.read(self.now));
        for event in scheduler.take_events() {
            match event {
                SchedEvent::LoadEnded { request, result } => self.load_ended(index, &request, result),
                SchedEvent::BlocksReleased { hold, request, .. } => {
                    self.tell(|| format!("{hold:?} of {request} ends on engine {index}"));
                    let engine = &mut self.engines[index];
                    if engine.handed_over.get(&request) == Some(&hold) {
                        engine.handed_over.remove(&request);
                    }
                    match engine.pool.held.remove(&hold) {
                        Some(blocks) => self.release(index, &blocks),
                        None => {
                            let what = format!("{hold:?} is released on engine {index}, but holds nothing");
                            self.violate(Invariant::EndsOnce, what);
                        }
                    }
                }
                SchedEvent::Drained { left } => {
                    self.tell(|| format!("engine {index} has drained, left {left:?}"));
                }
                SchedEvent::WorkersSilent { hold, missing } => {
                    self.tell(|| format!("{hold:?} on engine {index}: no word from {missing:?}"));
                }
            }
        }
    }

    fn load_ended(&mut self, index: usize, id: &RequestId, result: LoadResult) {
        let Some(request) = self.engines[index].requests.get(id).cloned() else {
            return self.violate(Invariant::EndsOnce, format!("a load of {id} ends, which is not there"));
        };
        if request.stage != Stage::Loading {
            return self
                .violate(Invariant::EndsOnce, format!("a load of {id} ends, which is {:?}", request.stage));
        }
        self.tell(|| format!("the load of {id} on D {index} ends: {}", short(&result)));
        let taken_as_good = self.has(Canary::FailedTakenAsLoaded);
        let mut blocks = request.blocks.clone();
        match result {
            LoadResult::Loaded { .. } => {
                self.loaded += 1;
                self.judge(index, id, &request);
            }
            LoadResult::Failed { .. } if taken_as_good => {
                self.failed += 1;
                self.judge(index, id, &request);
            }
            LoadResult::Failed { hold, reason, .. } => {
                self.failed += 1;
                if self.faults.is_empty() {
                    let what = format!("no fault, and yet the load of {id} fails: {}", reason.name());
                    self.violate(Invariant::Calm, what);
                }
                if let Some(hold) = hold {
                    let lost = blocks.split_off(request.local_blocks as usize);
                    self.engines[index].pool.held.insert(hold, lost);
                }
            }
        }
        for block in &blocks {
            self.engines[index].pool.tags[*block as usize] = None;
        }
        // Whatever is missing is computed here, which takes the same turns.
        let ticks = self.dice.between(1, 6);
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.blocks = blocks;
            record.stage = Stage::Running { ticks };
        }
    }

    /// A load was reported good: its blocks must hold this prompt's content, each at its place.
    fn judge(&mut self, index: usize, id: &RequestId, request: &Request) {
        let engine = &self.engines[index];
        let size = engine.pool.size as usize;
        for (position, block) in request.blocks.iter().enumerate() {
            for (rank, worker) in engine.workers.iter().enumerate() {
                for layer in 0..LAYERS {
                    let holds = worker.memory[layer * size + *block as usize];
                    let wanted = stamp(request.prompt, position, layer, rank);
                    if holds != wanted {
                        let what = format!(
                            "{id} on D {index} was reported loaded, but block {position} (rank {rank}, layer {layer}) \
                             holds {holds} instead of {wanted}"
                        );
                        return self.violate(Invariant::Content, what);
                    }
                }
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
        }
    }

    /// Process 0 is the scheduler's, the others are workers.
    pub(super) fn pause(&mut self, index: usize, process: usize, until: Time) {
        self.tell(|| format!("process {process} of engine {index} stands still"));
        let engine = &mut self.engines[index];
        match process.checked_sub(1).and_then(|rank| engine.workers.get_mut(rank)) {
            Some(worker) => worker.paused_until = until,
            None => engine.paused_until = until,
        }
    }

    pub(super) fn clock_jump(&mut self, index: usize, process: usize, by: Time) {
        self.tell(|| format!("the clock of process {process} of engine {index} jumps"));
        let life = self.engines[index].life;
        let engine = &mut self.engines[index];
        match process.checked_sub(1) {
            Some(rank) if rank < engine.workers.len() => {
                engine.workers[rank].clock.jump(by);
                self.set_timer(WorkerAt { engine: index, life, rank });
            }
            _ => {
                engine.clock.jump(by);
                self.wake(index);
            }
        }
    }
}

/// A client that names other blocks of P than it was told.
fn forge_blocks(params: &mut Value) {
    for group in params["remote_block_ids"].as_array_mut().into_iter().flatten() {
        for id in group.as_array_mut().into_iter().flatten() {
            *id = json!(id.as_u64().unwrap_or(0) ^ 1);
        }
    }
}

fn short(result: &LoadResult) -> String {
    match result {
        LoadResult::Loaded { tokens, .. } => format!("{tokens} tokens loaded"),
        LoadResult::Failed { reason, detail, .. } => format!("failed, {} ({detail})", reason.name()),
    }
}
