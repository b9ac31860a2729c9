//! Workers of a simulated world: the real machine, and a driver over simulated time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use kv_proto::message::WorkerMessage;
use kv_proto::{
    Attempt, BlockLayout, EngineId, Fingerprint, Incarnation, LeaseId, LoadId, Moment, OfferDigest, Plan,
    ProducerOrder, Rank, Topology,
};
use kv_transport::RegionId;
use kv_worker::machine::io::{Decision, Fact};
use kv_worker::machine::pulls::LocalMemory;
use kv_worker::machine::worker::WorkerMachine;
use kv_worker::{WorkerConfig, WorkerLimits};

use super::canary::Canary;
use super::clock::Clock;
use super::dice::Dice;
use super::engine::Role;
use super::faults::FaultKind;
use super::invariants::in_time::{Heard, Terms};
use super::shape::{BLOCK_TOKENS, CELL_BYTES, LAYERS};
use super::world::{Event, MS, Time, WorkerAt, World};

/// Bytes of a block of a rank that holds one head.
const BLOCK_BYTES: u64 = BLOCK_TOKENS as u64 * CELL_BYTES * LAYERS as u64;

/// Limits of a world's workers: a tenth of what data centres use, so that more of them pass.
const LIMITS: WorkerLimits = WorkerLimits {
    handshake: Duration::from_millis(500),
    connect: Duration::from_millis(300),
    retry_min: Duration::from_millis(50),
    retry_max: Duration::from_millis(1_000),
    peer_wait: Duration::from_millis(1_000),
    read: Duration::from_millis(1_000),
    stall: Duration::from_millis(300),
    confirm: Duration::from_millis(400),
    confirm_repeat: Duration::from_millis(100),
    renew_every: Duration::from_millis(100),
    // Some reads of a world are that long, others are not.
    prolong_bytes: 3 * BLOCK_BYTES,
    retries: 1,
    portion_bytes: 2 * BLOCK_BYTES,
    remember_ended: Duration::from_millis(2_000),
    peer_idle: Duration::from_millis(5_000),
    self_check_every: Duration::from_secs(10),
};

/// For a canary: a time that no world lives to see.
const EVER: Duration = Duration::from_secs(1_000_000);

/// Longest a read may take in all, as the transport is told.
pub(super) const READ_TOTAL: Time = 1_000 * MS;
pub(super) const HANDSHAKE_LIMIT: Time = 500 * MS;

/// One worker process.
pub(super) struct WorkerNode {
    pub(super) machine: WorkerMachine,
    pub(super) fingerprint: Fingerprint,
    pub(super) clock: Clock,
    pub(super) paused_until: Time,
    /// What its cells hold; see [`super::shape`].
    pub(super) memory: Vec<u64>,
    /// When the last plan on its way arrives.
    pub(super) plans_until: Time,
    /// On their way, in order.
    pub(super) plans: VecDeque<Rc<Vec<u8>>>,
    pub(super) next_accepted: u64,
    /// Leases whose grant has reached it; for canaries.
    granted: BTreeMap<LeaseId, OfferDigest>,
    /// Those of them whose end it has not reported, with how long they must live.
    pub(super) terms: BTreeMap<LeaseId, Terms>,
    pub(super) heard: Heard,
    /// What should have happened before this moment of its clock happens then, if at all: it stood still, or its
    /// clock jumped.
    pub(super) late_until: Moment,
    /// The earliest timer that is set.
    timer_at: Option<Time>,
}

/// How a worker is configured; some canaries are no more than that.
pub(super) fn worker_config(
    engine: EngineId,
    incarnation: Incarnation,
    rank: usize,
    topology: Topology,
    checksums: bool,
    canary: Option<Canary>,
) -> WorkerConfig {
    let mut limits = LIMITS;
    match canary {
        Some(Canary::EndedNeverForgotten) => limits.remember_ended = EVER,
        Some(Canary::PeersNeverForgotten) => limits.peer_idle = EVER,
        _ => {}
    }
    let checksums = checksums && canary != Some(Canary::NotCompared);
    WorkerConfig { engine, incarnation, rank: Rank(rank as u32), topology, checksums, limits }
}

impl WorkerNode {
    pub(super) fn new(
        config: WorkerConfig,
        layout: BlockLayout,
        cells: usize,
        fingerprint: Fingerprint,
    ) -> Self {
        let mut dice = Dice::new(config.incarnation.get() ^ u64::from(config.rank.0) << 7);
        let local = LocalMemory { layout, regions: vec![RegionId(0)] };
        Self {
            machine: WorkerMachine::new(config, local, "sim"),
            fingerprint,
            clock: Clock::draw(&mut dice),
            paused_until: 0,
            memory: vec![0; cells],
            plans_until: 0,
            plans: VecDeque::new(),
            next_accepted: 0,
            granted: BTreeMap::new(),
            terms: BTreeMap::new(),
            heard: Heard::default(),
            late_until: Moment::START,
            timer_at: None,
        }
    }

    /// The canary: whether the first lease that is held is not over, although another one is.
    fn first_lives(&self, now: Moment) -> bool {
        let mut trial = self.machine.clone();
        trial.time_passed(now, &mut Vec::new());
        let over: BTreeSet<LeaseId> =
            trial.take_report().leases.into_iter().map(|(lease, _)| lease).collect();
        !over.is_empty() && self.terms.keys().next().is_some_and(|first| !over.contains(first))
    }

    pub(super) fn pause(&mut self, until: Time) {
        self.paused_until = until;
        self.late_until = self.late_until.max(self.clock.read(until + MS));
    }

    pub(super) fn jump(&mut self, now: Time, by: Time) {
        self.clock.jump(by);
        self.late_until = self.late_until.max(self.clock.read(now + MS));
    }
}

impl World {
    pub(super) fn worker(&mut self, at: WorkerAt) -> Option<&mut WorkerNode> {
        let engine = self.engines.get_mut(at.engine)?;
        (engine.alive && engine.life == at.life).then(|| engine.workers.get_mut(at.rank)).flatten()
    }

    /// Until when a worker stands still, if it does.
    pub(super) fn stands_still(&mut self, at: WorkerAt) -> Option<Time> {
        let now = self.now;
        self.worker(at).map(|worker| worker.paused_until).filter(|until| *until > now)
    }

    pub(super) fn plan_at_worker(&mut self, at: WorkerAt) {
        if let Some(until) = self.stands_still(at) {
            return self.at(until, Event::PlanAtWorker { at });
        }
        let Some(plan) = self.worker(at).and_then(|worker| worker.plans.pop_front()) else { return };
        let tied = self.has(Canary::RenewalTiedToSteps);
        let Ok(plan) = Plan::decode(&plan) else { return };
        if self.worker(at).is_none() {
            return;
        }
        for order in &plan.producer {
            if let ProducerOrder::Grant { lease, offer, terms } = order {
                self.begin_terms(at, *lease, *terms, *offer);
                if let Some(worker) = self.worker(at) {
                    worker.granted.insert(*lease, *offer);
                }
            }
        }
        self.give(at, Fact::PlanTaken(plan));
        if tied {
            self.let_time_pass(at);
        }
    }

    /// Hands a fact to a worker's machine and carries out what it decides.
    pub(super) fn give(&mut self, at: WorkerAt, fact: Fact) {
        let now = self.now;
        let Some(worker) = self.worker(at) else { return };
        let mut decisions = Vec::new();
        let moment = worker.clock.read(now);
        worker.machine.take(moment, fact, &mut decisions);
        self.settle(at, decisions);
    }

    fn let_time_pass(&mut self, at: WorkerAt) {
        let reaper = self.has(Canary::ReaperStopsAtFirstLive);
        let now = self.now;
        let Some(worker) = self.worker(at) else { return };
        let mut decisions = Vec::new();
        let moment = worker.clock.read(now);
        if reaper && worker.first_lives(moment) {
            worker.timer_at = Some(now + MS);
            return self.after(MS, Event::Timer { at });
        }
        worker.machine.time_passed(moment, &mut decisions);
        self.settle(at, decisions);
    }

    fn settle(&mut self, at: WorkerAt, decisions: Vec<Decision>) {
        for decision in decisions {
            self.carry_out(at, decision);
        }
        self.send_report(at);
        self.set_timer(at);
    }

    fn send_report(&mut self, at: WorkerAt) {
        let Some(worker) = self.worker(at) else { return };
        let report = worker.machine.take_report();
        if report.is_empty() {
            return;
        }
        self.judge_ends(at, &report.leases);
        let Ok(report) = report.encode() else { return };
        let arrives =
            |report, again| Event::ReportAtScheduler { engine: at.engine, life: at.life, report, again };
        let mut wait = self.dice.between(0, 5) * MS;
        if self.strikes(FaultKind::ReportLate) {
            wait += self.dice.between(20, 400) * MS;
            self.tell(|| format!("a report of worker {at} is late"));
        }
        if self.strikes(FaultKind::ReportTwice) {
            let again = wait + self.dice.between(0, 300) * MS;
            self.tell(|| format!("a report of worker {at} will arrive twice"));
            self.after(again, arrives(report.clone(), true));
        }
        self.after(wait, arrives(report, false));
    }

    /// Sets the timer for a machine's next deadline.
    pub(super) fn set_timer(&mut self, at: WorkerAt) {
        let role = self.engines[at.engine].role;
        let dead = match self.canary {
            Some(Canary::NoDeadlines) => role == Role::Consumer,
            Some(Canary::NeverExpires) => role == Role::Producer,
            Some(Canary::RenewalTiedToSteps) => true,
            _ => false,
        };
        let now = self.now;
        let Some(worker) = self.worker(at) else { return };
        if dead {
            return;
        }
        let Some(deadline) = worker.machine.next_deadline() else { return };
        let when = worker.clock.when(deadline).max(now + 1);
        if worker.timer_at.is_none_or(|set| set > when || set <= now) {
            worker.timer_at = Some(when);
            self.at(when, Event::Timer { at });
        }
    }

    pub(super) fn timer(&mut self, at: WorkerAt) {
        if let Some(until) = self.stands_still(at) {
            // Behind everything else that waits for this process: first what has arrived, then the deadlines.
            return self.at(until + 1, Event::Timer { at });
        }
        let now = self.now;
        let Some(worker) = self.worker(at) else { return };
        if worker.timer_at.is_some_and(|set| set > now) {
            return;
        }
        worker.timer_at = None;
        self.let_time_pass(at);
    }

    fn carry_out(&mut self, at: WorkerAt, decision: Decision) {
        match decision {
            Decision::ShakeHands { key } => self.shake_hands(at, key),
            Decision::Connect { link, address } => self.connect(at, link, &address),
            Decision::Disconnect { .. } if self.has(Canary::DisconnectIgnored) => {}
            Decision::Disconnect { link } => self.disconnect(at, link),
            Decision::Send { link, message } => self.send(at, link, message),
            Decision::Read { pull, link, parts } => self.begin_read(at, pull, link, &parts),
            Decision::CancelRead { pull } => self.cancel_read(at, pull),
            Decision::Digest { of, groups } => self.digest(at, of, groups),
            // Nothing of this world is read without a connection of its own; silence counts as a failed check.
            Decision::CheckSelf => {}
        }
    }

    /// What was offered under a lease, if its grant has reached the worker.
    pub(super) fn granted(&mut self, at: WorkerAt, lease: LeaseId) -> Option<OfferDigest> {
        self.worker(at).and_then(|worker| worker.granted.get(&lease).copied())
    }

    /// The canary: a consumer's worker that does not ask.
    pub(super) fn confirm_unasked(&mut self, at: WorkerAt, load: LoadId, lease: LeaseId) {
        let link = self.links.iter().find_map(|(id, l)| (l.consumer == at && l.is_open()).then_some(*id));
        if let Some(link) = link {
            let message = WorkerMessage::Confirmed { lease, attempt: Attempt(load.0) };
            if let Ok(bytes) = message.encode() {
                self.after(1, Event::Message { link, to_producer: false, bytes });
            }
        }
    }
}
