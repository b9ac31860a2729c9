//! One state of the explored world, what can happen in it, and what then is.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kv_proto::handshake::{EngineCard, TransportCard, WorkerCard};
use kv_proto::message::WorkerMessage;
use kv_proto::{
    BlockId, BlockLayout, BlockList, BlockOrder, Dtype, EngineId, Fingerprint, Incarnation, LoadFailure,
    LoadId, Moment, PeerLocator, Plan, Rank, RegionKind, RegionLayout, Report, RequestId, Topology,
    TransferParams,
};
use kv_sched::{LoadResult, RequestEnd, SchedConfig, SchedEvent, Scheduler, Verdict};
use kv_transport::RegionId;
use kv_worker::machine::io::{Decision, Fact, LinkId};
use kv_worker::machine::pulls::LocalMemory;
use kv_worker::machine::worker::WorkerMachine;
use kv_worker::{Failure, WorkerConfig, WorkerLimits};

use super::Bounds;

/// Blocks of each pool: one per request.
const BLOCKS: u32 = 2;
const P: usize = 0;
const D: usize = 1;

/// A guard that can be taken out, to see that the explorer notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// A load is good without asking.
    NoConfirmation,
    /// P's blocks are free when the request has finished.
    FreedAtFinish,
    /// P's blocks are free when the first rank's lease has ended.
    FreedByFirstRank,
    /// D's blocks are free when the client has gone.
    FreedOnAbort,
}

/// Something that can happen next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    PFinishes(usize),
    RouterTellsD(usize),
    DAllocates(usize),
    ClientGone(usize, usize),
    PlanArrives(usize, usize),
    ReportArrives(usize),
    MessageArrives(usize),
    MessageLost(usize),
    MessageTwice(usize),
    ReadCopies(usize),
    ReadEnds(usize),
    TimeJumps,
    PDies,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |s: &usize| if *s == P { "P" } else { "D" };
        match self {
            Self::PFinishes(r) => write!(f, "P finishes request {r}; its parameters go out"),
            Self::RouterTellsD(r) => write!(f, "request {r} reaches D"),
            Self::DAllocates(r) => write!(f, "D allocates blocks for request {r}"),
            Self::ClientGone(s, r) => write!(f, "the client of request {r} leaves {}", side(s)),
            Self::PlanArrives(s, rank) => write!(f, "a plan reaches {}'s rank {rank}", side(s)),
            Self::ReportArrives(s) => write!(f, "a report reaches {}'s scheduler half", side(s)),
            Self::MessageArrives(n) => write!(f, "message {n} arrives"),
            Self::MessageLost(n) => write!(f, "message {n} is lost"),
            Self::MessageTwice(n) => write!(f, "message {n} arrives, and will again"),
            Self::ReadCopies(n) => write!(f, "read {n} copies its bytes"),
            Self::ReadEnds(n) => write!(f, "read {n} ends"),
            Self::TimeJumps => f.write_str("time passes until the next deadline"),
            Self::PDies => f.write_str("P dies, and is back at the same address"),
        }
    }
}

#[derive(Debug, Clone)]
struct Half {
    scheduler: Scheduler,
    workers: Vec<WorkerMachine>,
    /// Plans on their way, by rank, in order.
    plans: Vec<VecDeque<Plan>>,
    /// Reports on their way.
    reports: VecDeque<Report>,
}

/// A message under way between the workers of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Flying {
    to: usize,
    rank: usize,
    message: WorkerMessage,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Read {
    load: LoadId,
    rank: usize,
    request: usize,
    copied: bool,
    cancelled: bool,
}

/// Where a request of the story is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    ComputingAtP,
    AtRouter,
    WaitingAtD,
    LoadingAtD,
    Over,
}

#[derive(Debug, Clone)]
pub(super) struct State {
    bounds: Bounds,
    mutant: Option<Mutant>,
    now: Duration,
    halves: Vec<Half>,
    stages: Vec<Stage>,
    params: Vec<Option<TransferParams>>,
    /// Whether P's block of a request still holds its content.
    source: Vec<bool>,
    /// What D's block of a request holds, by rank: its content, or anything.
    copied: BTreeMap<(usize, usize), bool>,
    /// The load that may write D's block of a request.
    owner: Vec<Option<LoadId>>,
    life: u64,
    connected: bool,
    flying: Vec<Flying>,
    reads: Vec<Read>,
    pub(super) loaded: u8,
    pub(super) failed: u8,
    violation: Option<String>,
}

fn layout() -> BlockLayout {
    let region = RegionLayout {
        layer: "l".to_owned(),
        kind: RegionKind::KeyValue,
        group: 0,
        memory: 0,
        base: 0,
        block_stride: 64,
        block_bytes: 64,
        dtype: Dtype::F32,
        heads: 1,
        head_size: 4,
    };
    BlockLayout { block_tokens: 4, blocks: BLOCKS, order: BlockOrder::HeadsTokens, regions: vec![region] }
}

fn engine(side: usize) -> EngineId {
    // Both texts are short and plain; the fallback is never needed.
    EngineId::new(if side == P { "p" } else { "d" }).unwrap_or_else(|_| unreachable_id())
}

#[allow(clippy::panic)] // Only reached if a constant of this file is not an id.
fn unreachable_id() -> EngineId {
    panic!("the names of this file are ids")
}

fn request_id(request: usize) -> Option<RequestId> {
    RequestId::new(format!("r{request}")).ok()
}

fn prompt(request: usize) -> Vec<u32> {
    vec![request as u32; 4]
}

fn block(request: usize) -> Vec<BlockList> {
    vec![[BlockId(request as u32)].into_iter().collect()]
}

fn half(side: usize, life: u64, ranks: usize) -> Option<Half> {
    let topology = Topology { ranks: ranks as u32 };
    let incarnation = Incarnation::from_random(life);
    let config = SchedConfig {
        engine: engine(side),
        incarnation,
        topology,
        host: "h".to_owned(),
        port: 1,
        block_tokens: 4,
        blocks: BLOCKS,
        groups: 1,
        lease_ttl: Duration::from_millis(100),
        lease_renewal: Duration::from_millis(100),
        lease_max: Duration::from_millis(400),
        lease_grace: Duration::from_millis(50),
        min_remote_tokens: 1,
        queue_limit: Duration::from_secs(10),
        load_limit: Duration::from_secs(20),
        report_grace: Duration::from_secs(10),
    };
    let limits = WorkerLimits {
        confirm: Duration::from_millis(250),
        confirm_repeat: Duration::from_millis(120),
        renew_every: Duration::from_millis(60),
        peer_idle: Duration::from_secs(600),
        ..WorkerLimits::default()
    };
    let worker = |rank: usize| {
        let config =
            WorkerConfig { engine: engine(side), incarnation, rank: Rank(rank as u32), topology, limits };
        WorkerMachine::new(config, LocalMemory { layout: layout(), regions: vec![RegionId(0)] }, "x")
    };
    Some(Half {
        scheduler: Scheduler::new(config).ok()?,
        workers: (0..ranks).map(worker).collect(),
        plans: vec![VecDeque::new(); ranks],
        reports: VecDeque::new(),
    })
}

impl State {
    pub(super) fn new(bounds: Bounds, mutant: Option<Mutant>) -> Self {
        let ranks = bounds.ranks;
        let mut state = Self {
            bounds,
            mutant,
            now: Duration::ZERO,
            halves: [half(P, 1, ranks), half(D, 9, ranks)].into_iter().flatten().collect(),
            stages: vec![Stage::ComputingAtP; bounds.requests],
            params: vec![None; bounds.requests],
            source: vec![false; bounds.requests],
            copied: BTreeMap::new(),
            owner: vec![None; bounds.requests],
            life: 1,
            connected: true,
            flying: Vec::new(),
            reads: Vec::new(),
            loaded: 0,
            failed: 0,
            violation: None,
        };
        for request in 0..bounds.requests {
            if let Some(id) = request_id(request) {
                let ask = TransferParams::RemoteDecode { other: serde_json::Map::new() };
                let arrived = state.halves[P].scheduler.request_arrived(
                    Moment::START,
                    &id,
                    &prompt(request),
                    Some(&ask),
                );
                debug_assert!(arrived.is_ok(), "a plain prompt is accepted");
            }
        }
        // The announcement comes with the work, so it is there before anything else happens.
        state.step(P);
        for rank in 0..ranks {
            state.plan_arrives(P, rank);
        }
        state.greet();
        state
    }

    fn moment(&self) -> Moment {
        Moment::from_start(self.now)
    }

    pub(super) fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Everything that makes a state, as text.
    pub(super) fn print(&self) -> String {
        // The order of what is under way says nothing: messages may overtake each other.
        let mut flying: Vec<String> = self.flying.iter().map(|f| format!("{f:?}")).collect();
        flying.sort();
        let mut reads: Vec<String> = self.reads.iter().map(|r| format!("{r:?}")).collect();
        reads.sort();
        format!(
            "{:?}|{:?}|{:?}|{:?}|{:?}|{:?}|{:?}|{}|{}|{flying:?}|{reads:?}|{:?}",
            self.now,
            self.halves,
            self.stages,
            self.source,
            self.copied,
            self.owner,
            self.params.len(),
            self.life,
            self.connected,
            self.bounds
        )
    }

    pub(super) fn actions(&self) -> Vec<Action> {
        let mut all = Vec::new();
        for (request, stage) in self.stages.iter().enumerate() {
            match stage {
                Stage::ComputingAtP => {
                    all.push(Action::PFinishes(request));
                    if self.bounds.aborts > 0 {
                        all.push(Action::ClientGone(P, request));
                    }
                }
                Stage::AtRouter => all.push(Action::RouterTellsD(request)),
                Stage::WaitingAtD => {
                    all.push(Action::DAllocates(request));
                    if self.bounds.aborts > 0 {
                        all.push(Action::ClientGone(D, request));
                    }
                }
                Stage::LoadingAtD if self.bounds.aborts > 0 => all.push(Action::ClientGone(D, request)),
                Stage::LoadingAtD | Stage::Over => {}
            }
        }
        for (side, half) in self.halves.iter().enumerate() {
            for (rank, plans) in half.plans.iter().enumerate() {
                if !plans.is_empty() {
                    all.push(Action::PlanArrives(side, rank));
                }
            }
            if !half.reports.is_empty() {
                all.push(Action::ReportArrives(side));
            }
        }
        for number in 0..self.flying.len() {
            all.push(Action::MessageArrives(number));
            if self.bounds.losses > 0 {
                all.push(Action::MessageLost(number));
            }
            if self.bounds.repeats > 0 {
                all.push(Action::MessageTwice(number));
            }
        }
        for (number, read) in self.reads.iter().enumerate() {
            if !read.copied && self.connected {
                all.push(Action::ReadCopies(number));
            }
            if read.copied || read.cancelled || !self.connected {
                all.push(Action::ReadEnds(number));
            }
        }
        if self.bounds.jumps > 0 && self.next_deadline().is_some() {
            all.push(Action::TimeJumps);
        }
        if self.bounds.crashes > 0 {
            all.push(Action::PDies);
        }
        all
    }

    fn next_deadline(&self) -> Option<Moment> {
        let all = self.halves.iter().flat_map(|half| {
            let workers = half.workers.iter().map(WorkerMachine::next_deadline);
            workers.chain([half.scheduler.next_deadline()])
        });
        all.flatten().min()
    }

    pub(super) fn act(&mut self, action: &Action) {
        match action {
            Action::PFinishes(request) => self.p_finishes(*request),
            Action::RouterTellsD(request) => self.d_hears(*request),
            Action::DAllocates(request) => self.d_allocates(*request),
            Action::ClientGone(side, request) => self.client_gone(*side, *request),
            Action::PlanArrives(side, rank) => self.plan_arrives(*side, *rank),
            Action::ReportArrives(side) => self.report_arrives(*side),
            Action::MessageArrives(number) => {
                let flying = self.flying.remove(*number);
                self.message_arrives(flying);
            }
            Action::MessageLost(number) => {
                self.bounds.losses -= 1;
                self.flying.remove(*number);
            }
            Action::MessageTwice(number) => {
                self.bounds.repeats -= 1;
                let flying = self.flying[*number].clone();
                self.message_arrives(flying);
            }
            Action::ReadCopies(number) => self.read_copies(*number),
            Action::ReadEnds(number) => self.read_ends(*number),
            Action::TimeJumps => self.time_jumps(),
            Action::PDies => self.p_dies(),
        }
        self.step(P);
        self.step(D);
    }

    fn p_finishes(&mut self, request: usize) {
        let Some(id) = request_id(request) else { return };
        let now = self.moment();
        self.source[request] = true;
        let end = RequestEnd::Complete { computed_tokens: 4, blocks: block(request) };
        let finish = self.halves[P].scheduler.request_finished(now, &id, &end);
        self.params[request] = finish.params.map(|params| TransferParams::RemotePrefill(Box::new(params)));
        self.stages[request] = Stage::AtRouter;
        if finish.verdict == Verdict::Free || self.mutant == Some(Mutant::FreedAtFinish) {
            self.source[request] = false;
        }
    }

    fn d_hears(&mut self, request: usize) {
        let (Some(id), Some(params)) = (request_id(request), self.params[request].clone()) else { return };
        let now = self.moment();
        let answer = self.halves[D].scheduler.request_arrived(now, &id, &prompt(request), Some(&params));
        self.stages[request] = if answer.is_ok() { Stage::WaitingAtD } else { Stage::Over };
    }

    fn d_allocates(&mut self, request: usize) {
        let Some(id) = request_id(request) else { return };
        let now = self.moment();
        let half = &mut self.halves[D];
        let remote = half.scheduler.remote_tokens(&id, 0);
        if half.scheduler.blocks_allocated(now, &id, 0, remote, &block(request)).is_err() {
            self.violation = Some(format!("D refuses its own blocks for request {request}"));
        }
        for rank in 0..self.bounds.ranks {
            self.copied.insert((request, rank), false);
        }
        self.stages[request] = if remote > 0 { Stage::LoadingAtD } else { Stage::Over };
    }

    fn client_gone(&mut self, side: usize, request: usize) {
        self.bounds.aborts -= 1;
        let Some(id) = request_id(request) else { return };
        let now = self.moment();
        let finish = self.halves[side].scheduler.request_finished(now, &id, &RequestEnd::Aborted);
        self.stages[request] = Stage::Over;
        if finish.verdict == Verdict::Free || self.mutant == Some(Mutant::FreedOnAbort) {
            self.owner[request] = None;
        }
    }

    /// A step of an engine: its plan goes out.
    fn step(&mut self, side: usize) {
        let now = self.moment();
        let plan = self.halves[side].scheduler.plan_step(now);
        self.hear(side);
        if plan.is_empty() {
            return;
        }
        for order in &plan.consumer {
            if let kv_proto::ConsumerOrder::Load { load, groups, .. } = order {
                for BlockId(block) in groups.iter().flat_map(|g| g.local.iter()) {
                    self.owner[block as usize] = Some(*load);
                }
            }
        }
        for queue in &mut self.halves[side].plans {
            queue.push_back(plan.clone());
        }
    }

    fn plan_arrives(&mut self, side: usize, rank: usize) {
        if let Some(plan) = self.halves[side].plans[rank].pop_front() {
            self.give(side, rank, Fact::PlanTaken(plan));
        }
    }

    fn report_arrives(&mut self, side: usize) {
        let now = self.moment();
        let ranks = self.bounds.ranks as u32;
        if let Some(report) = self.halves[side].reports.pop_front() {
            if self.mutant == Some(Mutant::FreedByFirstRank) && side == P {
                for rank in 0..ranks {
                    self.halves[side]
                        .scheduler
                        .take_report(now, Report { rank: Rank(rank), ..report.clone() });
                }
            } else {
                self.halves[side].scheduler.take_report(now, report);
            }
        }
        self.hear(side);
    }

    fn hear(&mut self, side: usize) {
        for event in self.halves[side].scheduler.take_events() {
            match event {
                SchedEvent::BlocksReleased { request, .. } => {
                    let Some(number) =
                        (0..self.bounds.requests).find(|n| request_id(*n).as_ref() == Some(&request))
                    else {
                        continue;
                    };
                    if side == P {
                        self.source[number] = false;
                    } else {
                        self.owner[number] = None;
                    }
                }
                SchedEvent::LoadEnded { request, result } => self.load_ended(&request, &result),
                SchedEvent::WorkersSilent { .. } | SchedEvent::Drained { .. } => {}
            }
        }
    }

    fn load_ended(&mut self, id: &RequestId, result: &LoadResult) {
        let Some(request) = (0..self.bounds.requests).find(|n| request_id(*n).as_ref() == Some(id)) else {
            return;
        };
        if self.stages[request] != Stage::LoadingAtD {
            self.violation = Some(format!("a load of request {request} ends that nobody waits for"));
            return;
        }
        self.stages[request] = Stage::Over;
        self.owner[request] = None;
        match result {
            LoadResult::Loaded { .. } => {
                self.loaded += 1;
                for rank in 0..self.bounds.ranks {
                    if self.copied.get(&(request, rank)) != Some(&true) {
                        self.violation = Some(format!(
                            "the load of request {request} is good, but rank {rank} holds something else"
                        ));
                    }
                }
            }
            LoadResult::Failed { .. } => self.failed += 1,
        }
    }

    fn give(&mut self, side: usize, rank: usize, fact: Fact) {
        let now = self.moment();
        let mut decisions = Vec::new();
        self.halves[side].workers[rank].take(now, fact, &mut decisions);
        self.settle(side, rank, decisions);
    }

    fn settle(&mut self, side: usize, rank: usize, decisions: Vec<Decision>) {
        for decision in decisions {
            match decision {
                Decision::Send { message, .. } => self.send(side, rank, message),
                Decision::Read { load, parts, .. } => {
                    let offset = parts[0].ranges[0].local_offset;
                    let request = (offset / 64) as usize;
                    self.reads.push(Read { load, rank, request, copied: false, cancelled: false });
                }
                Decision::CancelRead { load } => {
                    for read in self.reads.iter_mut().filter(|r| r.load == load && r.rank == rank) {
                        read.cancelled = true;
                    }
                }
                Decision::ShakeHands { peer } => {
                    // P in its former life does not answer; nor does it in another.
                    let failure = Failure::new(LoadFailure::WrongPeer, "another life answers");
                    self.give(side, rank, Fact::HandshakeEnded { peer, result: Err(failure) });
                }
                Decision::Connect { .. } | Decision::Disconnect { .. } => {}
            }
        }
        let report = self.halves[side].workers[rank].take_report();
        if !report.is_empty() {
            self.halves[side].reports.push_back(report);
        }
    }

    fn send(&mut self, side: usize, rank: usize, message: WorkerMessage) {
        if let (WorkerMessage::ReadDone { lease, attempt, .. }, Some(Mutant::NoConfirmation)) =
            (&message, self.mutant)
        {
            let message = WorkerMessage::Confirmed { lease: *lease, attempt: *attempt };
            self.flying.push(Flying { to: D, rank, message });
        }
        if self.connected {
            self.flying.push(Flying { to: 1 - side, rank, message });
        }
    }

    fn message_arrives(&mut self, flying: Flying) {
        let link = if flying.to == P { LinkId::Accepted(0) } else { LinkId::Dialled(0) };
        self.give(flying.to, flying.rank, Fact::MessageArrived { link, message: Ok(flying.message) });
    }

    fn read_copies(&mut self, number: usize) {
        let read = &mut self.reads[number];
        read.copied = true;
        let (request, rank, load) = (read.request, read.rank, read.load);
        self.copied.insert((request, rank), self.source[request]);
        if self.owner[request] != Some(load) {
            self.violation = Some(format!("{load} writes a block of D that is not its own"));
        }
    }

    fn read_ends(&mut self, number: usize) {
        let read = self.reads.remove(number);
        let result = if !self.connected {
            Err(Failure::new(LoadFailure::PeerLost, "P is gone"))
        } else if read.copied {
            Ok(())
        } else {
            Err(Failure::new(LoadFailure::Cancelled, "cancelled"))
        };
        self.give(D, read.rank, Fact::ReadEnded { load: read.load, result });
    }

    fn time_jumps(&mut self) {
        self.bounds.jumps -= 1;
        if let Some(next) = self.next_deadline() {
            self.now = self.now.max(next.since_start());
        }
        let now = self.moment();
        for side in [P, D] {
            for rank in 0..self.bounds.ranks {
                let mut decisions = Vec::new();
                self.halves[side].workers[rank].time_passed(now, &mut decisions);
                self.settle(side, rank, decisions);
            }
            self.halves[side].scheduler.time_passed(now);
            self.hear(side);
        }
    }

    fn p_dies(&mut self) {
        self.bounds.crashes -= 1;
        self.life += 1;
        if let Some(reborn) = half(P, self.life, self.bounds.ranks) {
            self.halves[P] = reborn;
        }
        // Its memory is another's now, and requests that it computed are gone.
        self.source.fill(false);
        for stage in &mut self.stages {
            if *stage == Stage::ComputingAtP {
                *stage = Stage::Over;
            }
        }
        self.connected = false;
        self.flying.clear();
        let reads = 0..self.reads.len();
        for _ in reads {
            self.read_ends(0);
        }
        for rank in 0..self.bounds.ranks {
            let lost = Fact::LinkLost { link: LinkId::Dialled(0), detail: "P is gone".to_owned() };
            self.give(D, rank, lost);
        }
    }

    /// Brings both sides to where they have greeted each other.
    fn greet(&mut self) {
        let ranks = self.bounds.ranks;
        let topology = Topology { ranks: ranks as u32 };
        let fingerprint = Fingerprint::of("m", &layout(), topology);
        let worker = |rank: u32| WorkerCard {
            rank: Rank(rank),
            memory_sizes: vec![u64::from(BLOCKS) * 64],
            layout: layout(),
            fingerprint: fingerprint.clone(),
            transports: vec![TransportCard {
                name: "x".to_owned(),
                address: vec![1],
                keys: vec![vec![1].into()],
            }],
        };
        let incarnation = Incarnation::from_random(1);
        let card = EngineCard {
            engine: engine(P),
            incarnation,
            topology,
            workers: (0..ranks as u32).map(worker).collect(),
            renew_every_ms: 0,
        };
        let peer = PeerLocator { engine: engine(P), incarnation, host: "h".to_owned(), port: 1 };
        for rank in 0..ranks {
            let now = self.moment();
            let mut out = Vec::new();
            // A release of nothing makes D shake hands; what it is of does not matter to P, which does not know it.
            let release = kv_proto::ConsumerOrder::Release {
                lease: kv_proto::LeaseRef { incarnation, lease: kv_proto::LeaseId(0) },
                offer: kv_proto::OfferDigest::from_bytes([0; 16]),
                peer: peer.clone(),
                reason: kv_proto::ReleaseReason::Other,
            };
            let plan = Plan { producer: Vec::new(), consumer: vec![release] };
            self.halves[D].workers[rank].take(now, Fact::PlanTaken(plan), &mut out);
            let result = Ok(Box::new(card.clone()));
            self.halves[D].workers[rank].take(
                now,
                Fact::HandshakeEnded { peer: Arc::new(peer.clone()), result },
                &mut out,
            );
            self.halves[P].workers[rank].take(
                now,
                Fact::LinkAccepted { link: LinkId::Accepted(0) },
                &mut out,
            );
            out.clear();
            self.halves[D].workers[rank].take(
                now,
                Fact::LinkConnected { link: LinkId::Dialled(0) },
                &mut out,
            );
            // Greetings go to and fro until nobody says anything more.
            let mut to = P;
            while let Some(Decision::Send { message, .. }) = out.pop() {
                let mut answers = Vec::new();
                let link = if to == P { LinkId::Accepted(0) } else { LinkId::Dialled(0) };
                self.halves[to].workers[rank].take(
                    now,
                    Fact::MessageArrived { link, message: Ok(message) },
                    &mut answers,
                );
                out = answers;
                to = 1 - to;
            }
        }
    }
}
