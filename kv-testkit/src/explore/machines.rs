//! The machines as numbers, and what each does when it is told something, asked once and then remembered.
//!
//! A machine is deterministic: the same machine that is told the same at the same time becomes the same machine and
//! decides the same. In millions of worlds there are only thousands of different machines, so nearly every step is
//! two look-ups.

use std::rc::Rc;
use std::time::Duration;

use kv_proto::message::{BlockDigest, WorkerMessage};
use kv_proto::{
    BlockId, ConsumerOrder, LeaseId, LoadFailure, LoadId, Moment, Plan, Rank, Report, TransferParams,
};
use kv_sched::{LoadResult, RequestEnd, SchedEvent, Scheduler, Verdict};
use kv_worker::Failure;
use kv_worker::machine::io::{Decision, DigestOf, Fact, LinkId, PullId, SelfCheck, SourceKey};
use kv_worker::machine::worker::WorkerMachine;

use super::pool::{Lookup, Pool};
use super::setup::{BLOCK_BYTES, Names, PROMPT, TOKENS, blocks};
use super::world::Load;

/// What a scheduler half can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Call {
    /// A request arrives, with an offer or to be handed over.
    Arrives { request: u8, offer: Option<u32> },
    /// A request's prompt is computed, in this block.
    Computed { request: u8, block: u8 },
    /// A request is over: aborted, or its client has what it wants.
    Over { request: u8 },
    /// A request gets the block of its number, and loads if there is something to load.
    Allocated { request: u8 },
    /// A rank's report.
    Report(u32),
    /// A rank's report, taken for one of every rank.
    ReportOfAll(u32),
    /// Time has passed.
    Time,
}

/// What a scheduler half says to its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// The request's blocks are free.
    Released(u8),
    /// The request's load ended well.
    Loaded(u8),
    /// The request's load ended badly; whether its block is still held.
    Failed(u8, bool),
}

/// What came of a call.
#[derive(Debug, Default)]
pub(super) struct CallEnd {
    /// The scheduler half that it is now.
    pub(super) next: u32,
    /// The plan of the step that follows at once.
    pub(super) plan: Option<u32>,
    /// Loads that the plan orders: D's block and the load.
    pub(super) loads: Vec<(u8, Load)>,
    /// What the engine is told.
    pub(super) words: Vec<Word>,
    /// Whether a request's blocks must be kept.
    pub(super) hold: bool,
    /// The offer that goes to the router.
    pub(super) offer: Option<u32>,
    /// The lease of that offer.
    pub(super) lease: Option<LeaseId>,
    /// Whether the call was refused.
    pub(super) refused: bool,
    /// Whether the request waits for a load.
    pub(super) loading: bool,
}

/// A connection's name at one of its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Name {
    /// At D.
    Dialled(u8),
    /// At P.
    Accepted(u8),
}

impl Name {
    fn of(link: LinkId) -> Self {
        match link {
            LinkId::Dialled(n) => Self::Dialled(n as u8),
            LinkId::Accepted(n) => Self::Accepted(n as u8),
        }
    }

    fn id(self) -> LinkId {
        match self {
            Self::Dialled(n) => LinkId::Dialled(n.into()),
            Self::Accepted(n) => LinkId::Accepted(n.into()),
        }
    }
}

/// How a read ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ReadEnd {
    /// Every byte is here.
    Whole,
    /// It was cancelled.
    Cancelled,
    /// Its connection is gone.
    PeerLost,
}

/// What a worker can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Input {
    /// A plan.
    Plan(u32),
    /// The handshake with a life of P ended: with its card, or with another life's.
    Handshake { life: u64, answered: bool },
    /// A connection that was asked for stands.
    Connected(u8),
    /// A consumer connected.
    Accepted(u8),
    /// A connection is gone.
    Lost(Name),
    /// A message.
    Message { link: Name, message: u32 },
    /// A read ended.
    Read { load: Load, link: Name, end: ReadEnd },
    /// A block was digested; whether it holds what was offered.
    Digested { of: DigestOf, right: bool },
    /// A self check ended.
    SelfChecked,
    /// Time has passed.
    Time,
}

/// What a worker decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Deed {
    /// Shake hands with a life of P.
    ShakeHands(u64),
    /// Connect.
    Connect(u8),
    /// Let a connection go.
    Disconnect(Name),
    /// Send.
    Send { link: Name, message: u32 },
    /// Read one block into another.
    Read { load: Load, link: Name, from: u8, to: u8 },
    /// Cancel a read.
    Cancel(Load),
    /// Digest a block.
    Digest { of: DigestOf, block: u8 },
    /// Look at itself.
    CheckSelf,
}

/// What came of telling a worker something.
#[derive(Debug, Default)]
pub(super) struct InputEnd {
    /// The worker that it is now.
    pub(super) next: u32,
    /// What it decided, in order.
    pub(super) deeds: Vec<Deed>,
    /// What it reports.
    pub(super) report: Option<u32>,
}

/// All machines that were ever seen, and what they did.
#[derive(Debug)]
pub(super) struct Machines {
    pub(super) names: Names,
    schedulers: Pool<Scheduler>,
    workers: Pool<WorkerMachine>,
    plans: Pool<Plan>,
    reports: Pool<Report>,
    messages: Pool<WorkerMessage>,
    offers: Pool<TransferParams>,
    calls: Lookup<(u32, u32, Call), Rc<CallEnd>>,
    inputs: Lookup<(u32, u32, Input), Rc<InputEnd>>,
}

fn at(now: u32) -> Moment {
    Moment::from_start(Duration::from_millis(u64::from(now)))
}

/// All limits of the story are whole milliseconds.
fn millis(moment: Option<Moment>) -> Option<u32> {
    moment.map(|m| m.since_start().as_millis() as u32)
}

impl Machines {
    pub(super) fn new(names: Names) -> Self {
        Self {
            names,
            schedulers: Pool::default(),
            workers: Pool::default(),
            plans: Pool::default(),
            reports: Pool::default(),
            messages: Pool::default(),
            offers: Pool::default(),
            calls: Lookup::default(),
            inputs: Lookup::default(),
        }
    }

    /// A scheduler half at the beginning of a life; `None` if its configuration is refused, which a test shows that
    /// it is not.
    pub(super) fn new_scheduler(&mut self, side: usize, life: u8) -> Option<u32> {
        let scheduler = self.names.scheduler(side, life)?;
        Some(self.schedulers.number(scheduler))
    }

    /// A worker at the beginning of a life.
    pub(super) fn new_worker(&mut self, side: usize, life: u8, rank: usize) -> u32 {
        let worker = self.names.worker(side, life, rank);
        self.workers.number(worker)
    }

    /// A plan that comes from nowhere and makes D shake hands.
    pub(super) fn knock(&mut self) -> u32 {
        let plan = self.names.knock();
        self.plans.number(plan)
    }

    pub(super) fn message(&self, message: u32) -> &WorkerMessage {
        self.messages.get(message)
    }

    pub(super) fn message_number(&mut self, message: WorkerMessage) -> u32 {
        self.messages.number(message)
    }

    pub(super) fn plan(&self, plan: u32) -> &Plan {
        self.plans.get(plan)
    }

    pub(super) fn report(&self, report: u32) -> &Report {
        self.reports.get(report)
    }

    pub(super) fn scheduler_deadline(&self, scheduler: u32) -> Option<u32> {
        millis(self.schedulers.get(scheduler).next_deadline())
    }

    pub(super) fn worker_deadline(&self, worker: u32) -> Option<u32> {
        millis(self.workers.get(worker).next_deadline())
    }

    pub(super) fn scheduler(&self, scheduler: u32) -> &Scheduler {
        self.schedulers.get(scheduler)
    }

    pub(super) fn worker(&self, worker: u32) -> &WorkerMachine {
        self.workers.get(worker)
    }

    /// Different machines seen, scheduler halves and workers together.
    pub(super) fn len(&self) -> usize {
        self.schedulers.len() + self.workers.len()
    }

    /// Tells a scheduler half something; its engine makes a step at once, so that the plan goes out.
    pub(super) fn call(&mut self, scheduler: u32, now: u32, call: Call) -> Rc<CallEnd> {
        if let Some(end) = self.calls.get(&(scheduler, now, call)) {
            return end.clone();
        }
        let mut machine = self.schedulers.get(scheduler).clone();
        let mut end = CallEnd::default();
        let moment = at(now);
        match call {
            Call::Arrives { request, offer } => {
                let ask = TransferParams::RemoteDecode { other: serde_json::Map::new() };
                let params = offer.map_or(&ask, |offer| self.offers.get(offer));
                let id = self.names.request(request);
                end.refused = machine.request_arrived(moment, id, &PROMPT, Some(params)).is_err();
            }
            Call::Computed { request, block } => {
                let how =
                    RequestEnd::Complete { computed_tokens: TOKENS, blocks: blocks(block), sampled: vec![] };
                let finish = machine.request_finished(moment, self.names.request(request), &how);
                end.hold = finish.verdict != Verdict::Free;
                end.lease = finish.params.as_ref().and_then(|params| params.lease);
                let params = finish.params.map(|params| TransferParams::RemotePrefill(Box::new(params)));
                end.offer = params.map(|params| self.offers.number(params));
            }
            Call::Over { request } => {
                let id = self.names.request(request);
                let finish = machine.request_finished(moment, id, &RequestEnd::Aborted);
                end.hold = finish.verdict != Verdict::Free;
            }
            Call::Allocated { request } => {
                let id = self.names.request(request);
                let tokens = machine.remote_tokens(id, 0);
                end.loading = tokens > 0;
                end.refused = machine.blocks_allocated(moment, id, 0, tokens, &blocks(request)).is_err();
            }
            Call::Report(report) => machine.take_report(moment, self.reports.get(report).clone()),
            Call::ReportOfAll(report) => {
                for rank in 0..self.names.ranks {
                    let report = self.reports.get(report).clone();
                    machine.take_report(moment, Report { rank: Rank(rank as u32), ..report });
                }
            }
            Call::Time => machine.time_passed(moment),
        }
        let plan = machine.plan_step(moment);
        for order in &plan.consumer {
            if let ConsumerOrder::Load { load, groups, .. } = order {
                let all = groups.iter().flat_map(|g| g.local.iter());
                end.loads.extend(all.map(|BlockId(block)| (block as u8, load.0 as Load)));
            }
        }
        end.plan = (!plan.is_empty()).then(|| self.plans.number(plan));
        for event in machine.take_events() {
            let word = match event {
                SchedEvent::BlocksReleased { request, .. } => self.names.number(&request).map(Word::Released),
                SchedEvent::LoadEnded { request, result } => {
                    self.names.number(&request).map(|request| match result {
                        LoadResult::Loaded { .. } => Word::Loaded(request),
                        LoadResult::Failed { hold, .. } => Word::Failed(request, hold.is_some()),
                    })
                }
                SchedEvent::WorkersSilent { .. } | SchedEvent::Drained { .. } => None,
            };
            end.words.extend(word);
        }
        end.next = self.schedulers.number(machine);
        let end = Rc::new(end);
        self.calls.insert((scheduler, now, call), end.clone());
        end
    }

    fn fact(&self, input: Input) -> Option<Fact> {
        let fact = match input {
            Input::Plan(plan) => Fact::PlanTaken(self.plans.get(plan).clone()),
            Input::Handshake { life, answered } => {
                let life = kv_proto::Incarnation::from_random(life);
                let result = if answered {
                    Ok(Box::new(self.names.card(life)))
                } else {
                    Err(Failure::new(LoadFailure::WrongPeer, "another life answers"))
                };
                Fact::HandshakeEnded { key: SourceKey::first(self.names.peer(life)), result }
            }
            Input::Connected(link) => Fact::LinkConnected { link: LinkId::Dialled(link.into()) },
            Input::Accepted(link) => Fact::LinkAccepted { link: LinkId::Accepted(link.into()) },
            Input::Lost(link) => Fact::LinkLost { link: link.id(), detail: "gone".to_owned() },
            Input::Message { link, message } => {
                Fact::MessageArrived { link: link.id(), message: Ok(self.messages.get(message).clone()) }
            }
            Input::Read { load, link, end } => {
                let result = match end {
                    ReadEnd::Whole => Ok(()),
                    ReadEnd::Cancelled => Err(Failure::new(LoadFailure::Cancelled, "cancelled")),
                    ReadEnd::PeerLost => Err(Failure::new(LoadFailure::PeerLost, "gone")),
                };
                Fact::ReadEnded { pull: PullId::first(LoadId(load.into())), link: link.id(), result }
            }
            Input::Digested { of, right } => {
                Fact::Digested { of, digests: Ok(vec![BlockDigest(u64::from(right))]) }
            }
            Input::SelfChecked => Fact::SelfChecked { found: SelfCheck::Readable },
            Input::Time => return None,
        };
        Some(fact)
    }

    /// Tells a worker something.
    pub(super) fn tell(&mut self, worker: u32, now: u32, input: Input) -> Rc<InputEnd> {
        if let Some(end) = self.inputs.get(&(worker, now, input)) {
            return end.clone();
        }
        let mut machine = self.workers.get(worker).clone();
        let mut decisions = Vec::new();
        match self.fact(input) {
            Some(fact) => machine.take(at(now), fact, &mut decisions),
            None => machine.time_passed(at(now), &mut decisions),
        }
        let mut end = InputEnd::default();
        for decision in decisions {
            end.deeds.extend(self.deed(decision));
        }
        let report = machine.take_report();
        end.report = (!report.is_empty()).then(|| self.reports.number(report));
        end.next = self.workers.number(machine);
        let end = Rc::new(end);
        self.inputs.insert((worker, now, input), end.clone());
        end
    }

    fn deed(&mut self, decision: Decision) -> Option<Deed> {
        Some(match decision {
            Decision::ShakeHands { key } => Deed::ShakeHands(key.peer.incarnation.get()),
            Decision::Connect { link: LinkId::Dialled(link), .. } => Deed::Connect(link as u8),
            // A worker never asks for a connection that somebody else makes.
            Decision::Connect { .. } => return None,
            Decision::Disconnect { link } => Deed::Disconnect(Name::of(link)),
            Decision::Send { link, message } => {
                Deed::Send { link: Name::of(link), message: self.messages.number(message) }
            }
            Decision::Read { pull, link, parts } => {
                let range = parts.first().and_then(|part| part.ranges.first())?;
                let block = |offset: u64| (offset / BLOCK_BYTES) as u8;
                let (from, to) = (block(range.remote_offset), block(range.local_offset));
                Deed::Read { load: pull.load.0 as Load, link: Name::of(link), from, to }
            }
            Decision::CancelRead { pull } => Deed::Cancel(pull.load.0 as Load),
            Decision::Digest { of, groups } => {
                let BlockId(block) = groups.first().and_then(|group| group.blocks.iter().next())?;
                Deed::Digest { of, block: block as u8 }
            }
            Decision::CheckSelf => Deed::CheckSelf,
        })
    }
}
