//! The engine's scheduler: continuous batching with chunked prefill over a paged cache.
//!
//! It decides what each step computes, and calls the connector's hooks where engines call them. It does no IO:
//! [`Core::next_step`] gives an order for the workers, [`Core::step_done`] takes what they answered.

mod loading;
mod staged;
mod tables;

use std::collections::{BTreeMap, VecDeque};

use kv_connector::recovery::Policy;
use kv_connector::{
    HoldId, RequestEnd, RequestId, Role, SchedEvent, SchedulerConnector, StagedBlocks, Verdict,
};
use kv_proto::{BlockId, GroupKind};
use serde_bytes::ByteBuf;
use serde_json::Value;

pub(super) use self::staged::Staged;
use self::tables::Cut;
pub(super) use self::tables::Tables;
use super::model::Tokenizer;
use super::pool::BlockPool;
use super::recovering::{BreakerStats, Recovering};
use super::request::{Ask, Happening, Request, Stage};
use super::wire::{StepOrder, Work};

/// How an engine schedules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreSettings {
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u32,
    /// Most tokens in one step.
    pub step_tokens: u32,
    /// Run one step ahead: order step n+1 before the tokens of step n are known.
    pub run_ahead: bool,
    /// What follows a failed load.
    pub policy: Policy,
    /// Tokens that the model can number.
    pub vocab_size: u32,
    /// Positions that the model knows.
    pub max_positions: u32,
    /// What the block groups of the cache are. Where one is a window, block 0 is kept as a placeholder, blocks that the
    /// window has left are given back, and prefixes are not cached.
    pub groups: Vec<GroupKind>,
}

/// Figures of an engine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoreStats {
    /// Requests accepted.
    pub requests: u64,
    /// Requests aborted.
    pub aborted: u64,
    /// Aborts of requests that were not there (any more).
    pub stray_aborts: u64,
    /// Requests preempted for want of blocks.
    pub preempted: u64,
    /// Steps ordered.
    pub steps: u64,
    /// What failed loads cost.
    pub recovered: Recovered,
}

/// What failed loads cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recovered {
    /// Requests that went on after their load had failed.
    pub requests: u64,
    /// Requests that ended with it.
    pub ended: u64,
    /// Loads that were begun at another producer, for what the one before had not brought.
    pub retried_elsewhere: u64,
    /// Tokens that were to come from a producer and are computed here.
    pub tokens_recomputed: u64,
    /// Tokens that had come, and were confirmed, before the load failed.
    pub tokens_kept: u64,
}

struct Ordered {
    request: u64,
    epoch: u32,
    tokens: u32,
    wants_token: bool,
}

struct InFlight {
    step: u64,
    work: Vec<Ordered>,
}

/// The scheduler of one engine.
pub struct Core {
    settings: CoreSettings,
    cut: Cut,
    connector: Option<SchedulerConnector>,
    pool: BlockPool,
    requests: BTreeMap<u64, Request>,
    numbers: BTreeMap<RequestId, u64>,
    waiting: VecDeque<u64>,
    running: Vec<u64>,
    held: BTreeMap<HoldId, Vec<BlockId>>,
    /// Of what is held, answers that are kept for a next turn, the oldest first. It may never come, so they are taken
    /// back when others wait for room.
    kept_answers: VecDeque<HoldId>,
    /// The one that was taken back last.
    taken_back: Option<HoldId>,
    in_flight: VecDeque<InFlight>,
    ended: Vec<u64>,
    next_request: u64,
    next_step: u64,
    nudged: bool,
    /// A running request found no room the last time; it goes before those that wait.
    short_of_blocks: bool,
    happenings: Vec<(u64, Happening)>,
    recovering: Recovering,
    copies: staged::Copies,
    stats: CoreStats,
}

impl Core {
    /// An idle engine; without a connector it stands alone.
    pub fn new(settings: CoreSettings, connector: Option<SchedulerConnector>) -> Self {
        let cut = Cut { block_tokens: settings.block_tokens, groups: settings.groups.clone() };
        let new = if cut.caches_prefixes() { BlockPool::new } else { BlockPool::with_placeholder };
        Self {
            pool: new(settings.blocks),
            cut,
            recovering: Recovering::new(settings.policy),
            settings,
            connector,
            requests: BTreeMap::new(),
            numbers: BTreeMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            held: BTreeMap::new(),
            kept_answers: VecDeque::new(),
            taken_back: None,
            in_flight: VecDeque::new(),
            ended: Vec::new(),
            next_request: 1,
            next_step: 1,
            nudged: false,
            short_of_blocks: false,
            happenings: Vec::new(),
            copies: staged::Copies::default(),
            stats: CoreStats::default(),
        }
    }

    /// The connector, if there is one.
    pub fn connector(&self) -> Option<&SchedulerConnector> {
        self.connector.as_ref()
    }

    /// The pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Figures.
    pub fn stats(&self) -> &CoreStats {
        &self.stats
    }

    /// Figures of the producers' circuit breakers.
    pub fn breakers(&self) -> BreakerStats {
        self.recovering.stats()
    }

    /// Requests that have not ended.
    pub fn request_count(&self) -> usize {
        self.requests.len()
    }

    /// The number of the request that has this id now.
    pub fn number_of(&self, id: &RequestId) -> Option<u64> {
        self.numbers.get(id).copied()
    }

    /// What happened since the last call, by request number.
    pub fn take_happenings(&mut self) -> Vec<(u64, Happening)> {
        std::mem::take(&mut self.happenings)
    }

    /// How long the engine may sleep when nothing comes in.
    pub fn next_wake(&self) -> Option<std::time::Duration> {
        self.connector.as_ref().and_then(SchedulerConnector::next_wake)
    }

    /// Accepts a request and returns its number, or says why not.
    pub fn arrive(&mut self, ask: Ask) -> Result<u64, String> {
        if let Err(reason) = self.admissible(&ask) {
            self.give_back(&ask);
            return Err(reason);
        }
        let role = match &mut self.connector {
            Some(connector) => connector
                .request_arrived(&ask.id, &ask.prompt, ask.params.as_ref())
                .map_err(|e| format!("kv_transfer_params: {e}"))?,
            None => Role::Plain,
        };
        let number = self.next_request;
        self.next_request += 1;
        self.numbers.insert(ask.id.clone(), number);
        let sources = self.connector.as_ref().map(|connector| connector.sources(&ask.id));
        let producer = sources.and_then(|sources| sources.into_iter().next());
        self.requests.insert(number, Request { producer, ..Request::new(ask, role) });
        self.waiting.push_back(number);
        self.stats.requests += 1;
        self.happenings.push((number, Happening::Queued));
        Ok(number)
    }

    /// What a refused request would have loaded is given back, so that no block waits for a reader that will not
    /// come.
    fn give_back(&mut self, ask: &Ask) {
        let Some(connector) = &mut self.connector else { return };
        let offer = ask.params.as_ref().is_some_and(|params| params["do_remote_prefill"] == true);
        // The connector gives back what it refuses by itself.
        if offer && connector.request_arrived(&ask.id, &ask.prompt, ask.params.as_ref()).is_ok() {
            // Nothing was allocated, so there is nothing to hold.
            let _ = connector.request_finished(&ask.id, &RequestEnd::Aborted);
        }
    }

    fn admissible(&self, ask: &Ask) -> Result<(), String> {
        if self.numbers.contains_key(&ask.id) {
            return Err(format!("request {} is already here", ask.id));
        }
        if ask.prompt.is_empty() {
            return Err("prompt is empty".to_owned());
        }
        if ask.max_tokens == 0 {
            return Err("max_tokens is 0".to_owned());
        }
        if let Some(token) = ask.prompt.iter().find(|t| **t >= self.settings.vocab_size) {
            return Err(format!("token {token} is beyond the vocabulary of {}", self.settings.vocab_size));
        }
        let tokens = ask.prompt.len() as u64 + u64::from(ask.max_tokens);
        if tokens > u64::from(self.settings.max_positions) {
            let most = self.settings.max_positions;
            return Err(format!("prompt and max_tokens make {tokens} tokens, at most {most} are allowed"));
        }
        let needed = tokens.div_ceil(u64::from(self.settings.block_tokens)) * self.cut.groups.len() as u64;
        if needed > self.pool.size() as u64 {
            return Err(format!("the request needs {needed} blocks, the pool has {}", self.pool.size()));
        }
        Ok(())
    }

    /// A client went away. Unknown names are those of requests that have ended: nothing is left to do for them.
    pub fn abort(&mut self, id: &RequestId) {
        match self.numbers.get(id).copied() {
            Some(number) => {
                self.stats.aborted += 1;
                self.finish(number, false);
                // Whoever aborted it need not be the one who waits for it.
                let message = "the request was aborted".to_owned();
                self.happenings.push((number, Happening::Failed { client: true, message }));
            }
            None => self.stats.stray_aborts += 1,
        }
    }

    /// A worker has a report waiting.
    pub fn nudge(&mut self) {
        self.nudged = true;
    }

    /// The next order for the workers; `None` if there is nothing to do, or as much is in flight as may be.
    pub fn next_step(&mut self) -> Option<StepOrder> {
        self.hear_connector();
        let depth = if self.settings.run_ahead { 2 } else { 1 };
        if self.in_flight.len() >= depth {
            return None;
        }
        let mut work = Vec::new();
        let mut ordered = Vec::new();
        let mut budget = self.settings.step_tokens;
        if !self.short_of_blocks {
            self.admit();
        }
        self.short_of_blocks = false;
        for number in self.running.clone() {
            if let Some((piece, order)) = self.order(number, budget) {
                budget -= order.tokens;
                work.push(piece);
                ordered.push(order);
            }
            if budget == 0 {
                break;
            }
        }
        let plan = match &mut self.connector {
            None => None,
            Some(connector) => connector.plan_step().unwrap_or_else(|error| {
                tracing::error!(%error, "the plan of this step could not be encoded");
                None
            }),
        };
        if work.is_empty() && plan.is_none() && self.ended.is_empty() && !self.nudged {
            return None;
        }
        self.nudged = false;
        let step = self.next_step;
        self.next_step += 1;
        self.stats.steps += 1;
        self.in_flight.push_back(InFlight { step, work: ordered });
        Some(StepOrder { step, plan: plan.map(ByteBuf::from), work, ended: std::mem::take(&mut self.ended) })
    }

    /// What a running request computes in this step.
    fn order(&mut self, number: u64, budget: u32) -> Option<(Work, Ordered)> {
        let request = self.requests.get(&number)?;
        if request.stage != Stage::Running || request.is_covered() {
            return None;
        }
        let (start, total) = (request.scheduled, request.total());
        let tokens = (total - start).min(budget);
        if tokens == 0 {
            return None;
        }
        if !self.grow(number, start, start + tokens) {
            self.short_of_blocks = true;
            return None;
        }
        let request = self.requests.get_mut(&number)?;
        let wants_token = start + tokens == total;
        // Beyond what is known by value there is only the one token that a step in flight samples.
        let values = if start >= request.known() {
            Vec::new()
        } else {
            request.tokens().skip(start as usize).take(tokens as usize).collect()
        };
        request.scheduled += tokens;
        request.pending += u32::from(wants_token);
        let blocks = request.blocks.ids();
        let work = Work { request: number, tokens: values, start, blocks, wants_token };
        Some((work, Ordered { request: number, epoch: request.epoch, tokens, wants_token }))
    }

    /// Makes room for a request's tokens from `start` to before `end`, by preempting the youngest others if need be.
    fn grow(&mut self, number: u64, start: u32, end: u32) -> bool {
        loop {
            let Some(request) = self.requests.get(&number) else { return false };
            let missing = request.blocks.missing(&self.cut, start, end);
            if let Some(blocks) = self.pool.allocate(missing) {
                if let Some(request) = self.requests.get_mut(&number) {
                    request.blocks.fill(&self.cut, start, end, blocks);
                }
                return true;
            }
            if self.pool.free() + self.pool.returning() >= missing {
                // What is on its way back is enough: nobody else need be preempted.
                return false;
            }
            if self.take_back() {
                return false;
            }
            let Some(victim) = self.running.last().copied().filter(|last| *last != number) else {
                return false;
            };
            self.preempt(victim);
        }
    }

    fn preempt(&mut self, number: u64) {
        self.running.retain(|n| *n != number);
        let Some(request) = self.requests.get_mut(&number) else { return };
        let blocks = request.blocks.take();
        request.stage = Stage::Waiting;
        request.scheduled = 0;
        request.computed = 0;
        request.pending = 0;
        request.epoch += 1;
        self.waiting.push_front(number);
        self.stats.preempted += 1;
        self.release(blocks);
    }

    /// Blocks go back to the pool when no step in flight can touch them any more.
    fn release(&mut self, blocks: Vec<BlockId>) {
        let fence = self.in_flight.back().map(|last| last.step);
        self.pool.release(blocks, fence);
    }

    /// Takes requests from the queue as long as there is room.
    fn admit(&mut self) {
        while let Some(number) = self.waiting.front().copied() {
            let Some(request) = self.requests.get(&number) else {
                self.waiting.pop_front();
                continue;
            };
            let tokens: Vec<u32> = request.tokens().collect();
            let id = request.ask.id.clone();
            // The last token is run in any case, so its block must be the request's own: nobody writes into a
            // block that others may be reading.
            let findable = &tokens[..tokens.len() - 1];
            let block_tokens = self.settings.block_tokens;
            let found = if self.cut.caches_prefixes() {
                self.pool.find_prefix(findable, block_tokens as usize)
            } else {
                Vec::new()
            };
            let local = found.len() as u32 * block_tokens;
            let mut blocks = Tables::of_first(found);
            let remote = self.connector.as_ref().map_or(0, |c| c.remote_tokens(&id, local));
            let (there, target) =
                if remote > 0 { (local + remote, local + remote) } else { (local, tokens.len() as u32) };
            let missing = blocks.missing(&self.cut, there, target);
            let Some(new) = self.pool.allocate(missing) else {
                self.pool.release(blocks.take(), None);
                self.take_back();
                return;
            };
            blocks.fill(&self.cut, there, target, new);
            self.waiting.pop_front();
            if remote == 0 || self.may_load(number, &id, local, remote) {
                self.start(number, local, remote, blocks);
            } else {
                self.start_without(number, &id, local, blocks);
            }
        }
    }

    fn start(&mut self, number: u64, local: u32, remote: u32, mut blocks: Tables) {
        let Some(request) = self.requests.get_mut(&number) else { return self.release(blocks.take()) };
        let lists = blocks.lists();
        request.blocks = blocks;
        request.usage.cached_tokens = local;
        if self.stage_load(number, local, remote) {
            return;
        }
        let Some(request) = self.requests.get_mut(&number) else { return };
        if let Some(connector) = &mut self.connector
            && request.role.loads()
            && let Err(error) = connector.blocks_allocated(&request.ask.id, local, remote, &lists)
        {
            self.happenings.push((number, Happening::Failed { client: false, message: error.to_string() }));
            return self.finish(number, false);
        }
        if remote > 0 {
            request.stage = Stage::Loading;
            request.loading = remote;
            self.happenings.push((number, Happening::Loading { tokens: remote }));
        } else {
            self.run(number, local);
        }
    }

    /// Puts a request into the batch, with the KV of `tokens` tokens in place.
    fn run(&mut self, number: u64, tokens: u32) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        // At least the last token is run, for what follows it.
        let tokens = tokens.min(request.known() - 1);
        request.stage = Stage::Running;
        request.scheduled = tokens;
        request.computed = tokens;
        self.running.push(number);
    }

    /// Takes what the workers sampled in a step; `tokens` by piece of work.
    pub fn step_done(&mut self, step: u64, tokens: &[Option<u32>]) {
        // First what the workers reported, then what was sampled: a load that ended is news of this step.
        self.hear_connector();
        let Some(done) = self.in_flight.pop_front() else { return };
        debug_assert_eq!(done.step, step, "steps end in the order in which they were ordered");
        self.pool.step_done(done.step);
        for (order, token) in done.work.iter().zip(tokens) {
            let Some(request) = self.requests.get_mut(&order.request) else { continue };
            if request.epoch != order.epoch {
                continue;
            }
            request.computed += order.tokens;
            if let (true, Some(token)) = (order.wants_token, token) {
                request.pending -= 1;
                request.output.push(*token);
                self.happenings.push((order.request, Happening::Token(*token)));
            }
            self.publish(order.request);
            self.leave(order.request);
            let Some(request) = self.requests.get(&order.request) else { continue };
            let stopped = !request.ask.ignore_eos && request.output.last() == Some(&Tokenizer::END_OF_TEXT);
            if stopped || request.output.len() as u32 >= request.ask.max_tokens {
                self.finish(order.request, true);
            }
        }
    }

    /// Lets others find the full blocks of a request that are computed.
    fn publish(&mut self, number: u64) {
        let Some(request) = self.requests.get(&number).filter(|_| self.cut.caches_prefixes()) else { return };
        let tokens: Vec<u32> = request.tokens().take(request.computed as usize).collect();
        self.pool.publish(&tokens, &request.blocks.first(), self.settings.block_tokens as usize);
    }

    /// Gives back the blocks that a request's window has left. What is to be handed over is kept: the window at the end of
    /// what is computed.
    fn leave(&mut self, number: u64) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let left = request.blocks.leave(&self.cut, request.computed);
        self.release(left);
    }

    /// A request ends; its blocks go wherever the connector says.
    fn finish(&mut self, number: u64, complete: bool) {
        if !complete || !self.save(number) {
            self.end(number, complete, None);
        }
    }

    /// A request ends; `saved` is where it was copied to in the host pool.
    fn end(&mut self, number: u64, complete: bool, saved: Option<&[StagedBlocks]>) {
        let Some(mut request) = self.requests.remove(&number) else { return };
        self.numbers.remove(&request.ask.id);
        if request.producer.is_some() {
            self.recovering.gone(number);
        }
        self.waiting.retain(|n| *n != number);
        self.running.retain(|n| *n != number);
        self.ended.push(number);
        let sampled = request.output.len() as u32;
        let end = if complete { self.end_of(&request, saved) } else { RequestEnd::Aborted };
        let mut params: Option<Value> = None;
        let mut verdict = Verdict::Free;
        if let Some(connector) = &mut self.connector {
            let finished = connector.request_finished(&request.ask.id, &end);
            params = finished.params;
            verdict = finished.verdict;
        }
        self.give_up(&mut request, verdict);
        if complete {
            let mut usage = request.usage;
            usage.completion_tokens = sampled;
            self.happenings.push((number, Happening::Finished { usage, params }));
        }
    }

    /// Takes the oldest kept answer back, one at a time, and says whether one is on its way: its blocks come with a
    /// report.
    fn take_back(&mut self) -> bool {
        if self.taken_back.is_some_and(|hold| self.held.contains_key(&hold)) {
            return true;
        }
        let Some(connector) = &mut self.connector else { return false };
        self.taken_back = self.kept_answers.pop_front();
        self.taken_back.is_some_and(|hold| connector.take_back(hold))
    }

    fn hold(&mut self, hold: HoldId, blocks: Vec<BlockId>) {
        self.held.entry(hold).or_default().extend(blocks);
    }

    /// Hands a worker's report to the connector.
    pub fn take_report(&mut self, report: &[u8]) {
        let Some(connector) = &mut self.connector else { return };
        if let Err(error) = connector.take_report(report) {
            tracing::error!(%error, "a worker's report was refused");
        }
    }

    fn hear_connector(&mut self) {
        let Some(connector) = &mut self.connector else { return };
        for event in connector.events() {
            match event {
                SchedEvent::LoadEnded { request, result } => {
                    if let Some(number) = self.numbers.get(&request).copied() {
                        self.load_ended(number, result);
                    }
                }
                SchedEvent::BlocksReleased { hold, .. } => self.hold_over(hold),
                SchedEvent::Drained { left } if left.is_empty() => tracing::info!("drained"),
                SchedEvent::Drained { left } => tracing::warn!(?left, "the drain's limit is over"),
                SchedEvent::WorkersSilent { hold, missing } => {
                    tracing::error!(?hold, ?missing, "workers do not report");
                }
            }
        }
        self.hear_copies();
    }
}
