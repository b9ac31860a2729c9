//! What a simulated consumer does after failed loads: the real machine, with a configuration drawn for each engine.
//!
//! A request has one offer. A further attempt brings the same one again, as a router would, for what is missing.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_proto::{LoadFailure, Moment, PeerLocator, RequestId, TransferParams};
use kv_recovery::{
    Admission, Directive, Fallback, LoadFacts, Policy, Recovery, RecoveryConfig, Resume, advice, resume,
};
use kv_sched::RequestEnd;

use super::canary::Canary;
use super::dice::Dice;
use super::invariants::Invariant;
use super::invariants::sparing::Account;
use super::requests::{Request, Stage};
use super::shape::BLOCK_TOKENS;
use super::world::World;

/// Longer than every limit on a load of a world.
const ATTEMPT_LIMIT: Duration = Duration::from_millis(6_000);
/// After it a peer is forgotten.
const FORGET_AFTER: Duration = Duration::from_millis(7_000);

/// One life's machine, and a second account of what it may do.
pub(super) struct Recovering {
    pub(super) machine: Recovery<RequestId, PeerLocator>,
    pub(super) account: Account,
    /// Requests whose load is the probe of a breaker, and of whose.
    probes: BTreeMap<RequestId, PeerLocator>,
}

/// A configuration: any policy, small budgets, short waits.
pub(super) fn draw_config(draw: &mut Dice) -> RecoveryConfig {
    let mut millis = |low, high| Duration::from_millis(draw.between(low, high));
    let (backoff_first, backoff_max) = (millis(1, 50), millis(50, 400));
    let (budget_refill, peer_budget_refill) = (millis(100, 2_000), millis(100, 2_000));
    let (open_first, open_max) = (millis(50, 400), millis(400, 2_000));
    RecoveryConfig {
        policy: [Policy::Recompute, Policy::Fail, Policy::Retry, Policy::Retry][draw.below(4) as usize],
        fallback: if draw.chance(700) { Fallback::Recompute } else { Fallback::Fail },
        retries_per_request: draw.between(0, 3) as u32,
        backoff_first,
        backoff_max,
        attempt_limit: ATTEMPT_LIMIT,
        budget: draw.between(0, 4) as u32,
        budget_refill,
        peer_budget: draw.between(0, 3) as u32,
        peer_budget_refill,
        open_after: draw.between(1, 4) as u32,
        open_when_gone: draw.chance(500),
        open_first,
        open_max,
        probe_limit: ATTEMPT_LIMIT,
        forget_after: FORGET_AFTER,
        peers_max: 64,
    }
}

impl Recovering {
    /// A machine at the beginning of a life. Some canaries are no more than another configuration of it.
    pub(super) fn new(limits: &RecoveryConfig, canary: Option<Canary>) -> Option<Self> {
        let mut config = limits.clone();
        match canary {
            Some(Canary::RetryWithoutBudget) => {
                (config.budget, config.peer_budget) = (1_000_000, 7_000);
                (config.budget_refill, config.peer_budget_refill) =
                    (Duration::from_millis(1), Duration::from_millis(1));
            }
            Some(Canary::RetryWithoutEnd) => config.retries_per_request = u32::MAX,
            _ => {}
        }
        let machine = Recovery::new(config).ok()?;
        Some(Self { machine, account: Account::new(limits.clone()), probes: BTreeMap::new() })
    }
}

/// Where an offer is to be had.
fn peer_of(offer: &TransferParams) -> Option<PeerLocator> {
    let (TransferParams::RemotePrefill(remote) | TransferParams::Relay(remote)) = offer else { return None };
    Some(PeerLocator {
        engine: remote.engine.clone(),
        incarnation: remote.incarnation,
        host: remote.host.clone(),
        port: remote.port,
    })
}

impl World {
    /// Whether the first load of a request may begin.
    pub(super) fn load_may_begin(&mut self, index: usize, id: &RequestId, request: &Request) -> bool {
        let ignores = self.has(Canary::BreakerIgnored);
        let engine = &mut self.engines[index];
        let now = engine.clock.read(self.now);
        let (Some(recovery), Some(peer)) = (&mut engine.recovery, request.offer.as_deref().and_then(peer_of))
        else {
            return true;
        };
        match recovery.machine.admit(now, &peer) {
            Admission::Refuse { .. } if !ignores => {
                self.refused += 1;
                self.tell(|| format!("{id} does not load from {}: its breaker is open", peer.engine));
                return false;
            }
            Admission::Probe => {
                recovery.probes.insert(id.clone(), peer.clone());
            }
            Admission::Go | Admission::Refuse { .. } => {}
        }
        self.judge_begin(index, id, now, &peer);
        true
    }

    /// A load went well.
    pub(super) fn load_was_good(&mut self, index: usize, id: &RequestId, request: &Request) {
        let engine = &mut self.engines[index];
        let now = engine.clock.read(self.now);
        if let (Some(recovery), Some(peer)) =
            (&mut engine.recovery, request.offer.as_deref().and_then(peer_of))
        {
            recovery.machine.load_succeeded(now, id, &peer);
            recovery.probes.remove(id);
            recovery.account.answered(&peer);
        }
    }

    /// A load failed, and its request waits for what becomes of it.
    pub(super) fn ask_recovery(
        &mut self,
        index: usize,
        id: &RequestId,
        request: &Request,
        reason: LoadFailure,
        keep_tokens: u32,
    ) {
        let wanted = self.prompt_len(request.prompt);
        let engine = &mut self.engines[index];
        let now = engine.clock.read(self.now);
        let (Some(recovery), Some(peer)) = (&mut engine.recovery, request.offer.as_deref().and_then(peer_of))
        else {
            return self.recompute(index, id, keep_tokens);
        };
        recovery.account.failed(now, &peer, advice(reason).evidence);
        let facts = LoadFacts {
            key: id.clone(),
            peer,
            reason,
            tokens_valid: keep_tokens,
            tokens_wanted: wanted,
            // It may have been given back: then the producer says so.
            lease_alive: true,
            alternatives: Vec::new(),
        };
        let mut out = Vec::new();
        recovery.machine.load_failed(now, facts, &mut out);
        if let Some(peer) = recovery.probes.remove(id) {
            recovery.machine.load_abandoned(now, &peer);
        }
        self.follow_directives(index, out);
    }

    /// A request is over.
    pub(super) fn recovery_over(&mut self, index: usize, id: &RequestId) {
        let engine = &mut self.engines[index];
        let now = engine.clock.read(self.now);
        if let Some(recovery) = &mut engine.recovery {
            recovery.machine.request_gone(now, id);
            if let Some(peer) = recovery.probes.remove(id) {
                recovery.machine.load_abandoned(now, &peer);
            }
        }
    }

    /// Time has passed for the recovery machine of an engine.
    pub(super) fn recover(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        let now = engine.clock.read(self.now);
        let Some(recovery) = &mut engine.recovery else { return };
        let mut out = Vec::new();
        recovery.machine.time_passed(now, &mut out);
        self.follow_directives(index, out);
    }

    fn follow_directives(&mut self, index: usize, directives: Vec<Directive<RequestId>>) {
        for directive in directives {
            match directive {
                Directive::Recompute { key, keep_tokens } => self.recompute(index, &key, keep_tokens),
                Directive::Fail { key, reason } => {
                    self.tell(|| format!("{key} ends on D {index} with an error: {}", reason.name()));
                    self.end_badly(index, &key);
                }
                Directive::Retry { key, .. } => self.retry(index, &key),
            }
        }
    }

    /// The request of a directive, if it waits for one.
    fn between(&self, index: usize, id: &RequestId) -> Option<Request> {
        let request = self.engines[index].requests.get(id)?;
        (request.stage == Stage::Between).then(|| request.clone())
    }

    /// A request goes on by itself with what is good.
    fn recompute(&mut self, index: usize, id: &RequestId, keep_tokens: u32) {
        let Some(request) = self.between(index, id) else { return };
        let total = self.prompt_len(request.prompt);
        match resume(true, keep_tokens, total) {
            Resume::Anew => self.begin_anew(index, id, &request),
            Resume::With { cache_tokens, .. } => {
                let blocks = (cache_tokens / self.engines[index].shape.block_tokens) as usize;
                self.judge(index, id, &request, blocks);
                self.enter(index, request.prompt, &request.blocks, 0..blocks, false);
                self.run_on(index, id);
            }
        }
    }

    fn end_badly(&mut self, index: usize, id: &RequestId) {
        if self.between(index, id).is_none() {
            return;
        }
        let engine = &mut self.engines[index];
        let (Some(request), Some(scheduler)) = (engine.requests.remove(id), &mut engine.scheduler) else {
            return;
        };
        let finish = scheduler.request_finished(engine.clock.read(self.now), id, &RequestEnd::Aborted);
        self.follow(index, id, &request.blocks, finish.verdict);
    }

    /// A load is begun again, for what is missing, into the same blocks.
    fn retry(&mut self, index: usize, id: &RequestId) {
        let (Some(request), now) = (self.between(index, id), self.now) else { return };
        let Some(offer) = request.offer.clone() else { return };
        if self.engines[index].draining {
            self.recovery_over(index, id);
            return self.recompute(index, id, request.good * BLOCK_TOKENS);
        }
        let tokens = self.tokens_of(request.prompt);
        self.judge_retry(index, id, &request, peer_of(&offer));
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        let now = engine.clock.read(now);
        let finish = scheduler.request_finished(now, id, &RequestEnd::Aborted);
        if let Err(error) = scheduler.request_arrived(now, id, &tokens, Some(&offer)) {
            self.tell(|| format!("D {index} does not take {id} again: {error}"));
            let request = self.engines[index].requests.remove(id);
            self.recovery_over(index, id);
            let blocks = request.map_or_else(Vec::new, |request| request.blocks);
            return self.follow(index, id, &blocks, finish.verdict);
        }
        let local_tokens = request.good * BLOCK_TOKENS;
        let remote = scheduler.remote_tokens(id, local_tokens);
        self.tell(|| format!("{id} loads again on D {index}, {remote} tokens"));
        self.retried += 1;
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.retries += 1;
            // It arrived again, and a relay's lease is announced again.
            record.announced_at = None;
            record.local_blocks = request.good;
        }
        self.order_load(index, id, now, (local_tokens, remote));
        if remote == 0 {
            self.recovery_over(index, id);
            self.recompute(index, id, local_tokens);
        }
    }

    /// Blocks of a request are there: its load begins, or it goes on by itself.
    pub(super) fn order_load(
        &mut self,
        index: usize,
        id: &RequestId,
        now: Moment,
        (local_tokens, remote): (u32, u32),
    ) {
        let engine = &mut self.engines[index];
        let early = engine.enters_early;
        let lists = engine.requests.get(id).map_or_else(Vec::new, |record| engine.lists(&record.blocks));
        let (Some(scheduler), Some(record)) = (&mut engine.scheduler, engine.requests.get_mut(id)) else {
            return;
        };
        if let Err(error) = scheduler.blocks_allocated(now, id, local_tokens, remote, &lists) {
            let what = format!("blocks of {id} refused on engine {index}: {error}");
            return self.violate(Invariant::Calm, what);
        }
        if remote == 0 {
            return;
        }
        record.stage = Stage::Loading;
        record.covered = local_tokens + remote;
        let (prompt, blocks) = (record.prompt, record.blocks.clone());
        if early {
            let from = (local_tokens / BLOCK_TOKENS) as usize;
            self.enter(index, prompt, &blocks, from..blocks.len(), true);
        }
    }

    fn judge_begin(&mut self, index: usize, id: &RequestId, now: Moment, peer: &PeerLocator) {
        let recovery = &self.engines[index].recovery;
        let Some(until) = recovery.as_ref().and_then(|r| r.account.shut(now, peer)) else { return };
        let what =
            format!("a load of {id} begins on D {index} although {} is shut for {until:?}", peer.engine);
        self.violate(Invariant::Sparing, what);
    }

    fn judge_retry(&mut self, index: usize, id: &RequestId, request: &Request, peer: Option<PeerLocator>) {
        let engine = &mut self.engines[index];
        let now = engine.clock.read(self.now);
        let (Some(recovery), Some(peer)) = (&mut engine.recovery, peer) else { return };
        let odd = recovery.account.retried(now, &peer, request.retries + 1);
        self.judge_begin(index, id, now, &peer);
        if let Some(what) = odd {
            let what = format!("{id} is loaded again on D {index}: {what}");
            self.violate(Invariant::Sparing, what);
        }
    }
}
