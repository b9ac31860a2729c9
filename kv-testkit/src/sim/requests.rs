//! Requests of a simulated world: how they reach engines, run, and end; the router and clients.

use std::rc::Rc;

use kv_proto::{LoadId, RequestId, TransferParams};
use kv_sched::{RequestEnd, Role as Task, SchedError};
use serde_json::{Value, json};

use super::canary::Canary;
use super::engine::Role;
use super::faults::FaultKind;
use super::invariants::Invariant;
use super::pool::GARBAGE;
use super::shape::BLOCK_TOKENS;
use super::world::{Event, HEAL_AT, MS, Next, Prompt, Time, World};

/// Added to a prompt's number if it was changed on its way: content that this world does not know.
const CHANGED: usize = 5_000;

/// Where a request is in its engine.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Stage {
    /// Without blocks.
    Waiting,
    /// Of so many turns some are to go. On P it computes a chunk of its prompt in each; on D it decodes.
    Running { left: u64, of: u64 },
    /// On D.
    Loading,
    /// On D, between a load that failed and what follows from it.
    Between,
}

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) prompt: usize,
    task: Task,
    pub(super) stage: Stage,
    pub(super) blocks: Vec<u32>,
    pub(super) local_blocks: u32,
    /// On D: the offer that came with it.
    pub(super) offer: Option<Rc<TransferParams>>,
    /// On D: blocks at the start that hold what they must.
    pub(super) good: u32,
    /// On D: how often a load of it was begun again.
    pub(super) retries: u32,
    /// Tokens from the start that are here when its load has ended well.
    pub(super) covered: u32,
    /// On P: tokens that will have been computed when it ends.
    computes: u32,
    /// On P: it goes on by a token before it ends, as an engine does that schedules ahead. A state cannot go back.
    runs_ahead: bool,
    /// On P: when every worker has the plan that announced it. No token is computed before, since the plan comes with
    /// the work (H-8).
    pub(super) announced_at: Option<Time>,
}

impl World {
    /// A prompt reaches a producer under a name.
    pub(super) fn request_at_p(
        &mut self,
        index: usize,
        request: usize,
        name: usize,
        kept: Option<&Rc<Value>>,
    ) {
        if let Some(until) = self.engines[index].waits(self.now) {
            let kept = kept.cloned();
            return self.at(until, Event::RequestAtP { engine: index, request, name, kept });
        }
        self.tell(|| format!("prompt {request} reaches P {index} as r{name}"));
        self.prompts[request].sent = true;
        let Ok(id) = RequestId::new(format!("r{name}")) else { return };
        let mut params = kept.map_or_else(|| json!({}), |kept| Value::clone(kept));
        params["do_remote_decode"] = json!(true);
        self.arrive(index, request, &id, &params);
        if self.strikes(FaultKind::GoneBeforePrefill) {
            self.client_goes(index, &id, 0, "before it is scheduled");
        }
        if self.strikes(FaultKind::ClientGone) {
            let wait = self.dice.between(1, 120) * MS;
            self.client_goes(index, &id, wait, "after a while");
        }
        if self.strikes(FaultKind::IdReused) {
            let request = self.dice.below(self.prompts.len() as u64) as usize;
            let wait = self.dice.between(0, 600) * MS;
            self.tell(|| format!("r{name} will come again, for prompt {request}"));
            self.after(wait, Event::RequestAtP { engine: index, request, name, kept: None });
        }
    }

    pub(super) fn request_at_d(&mut self, index: usize, request: usize, params: &Rc<Value>, copy: u32) {
        if let Some(until) = self.engines[index].waits(self.now) {
            let params = params.clone();
            return self.at(until, Event::RequestAtD { engine: index, request, params, copy });
        }
        // The router keeps the name that P knew it by, unless it tries again and makes up another.
        let name = params["remote_request_id"].as_str().unwrap_or_default();
        let renamed = copy > 0 && !self.strikes(FaultKind::IdReused);
        let name = if renamed { format!("{name}-{copy}") } else { name.to_owned() };
        self.tell(|| format!("prompt {request} reaches D {index} as {name}"));
        let Ok(id) = RequestId::new(name) else { return };
        self.arrive(index, request, &id, params);
        if self.strikes(FaultKind::GoneQueued) {
            let wait = self.dice.between(0, 3) * MS;
            self.client_goes(index, &id, wait, "while it is queued");
        }
        if self.strikes(FaultKind::ClientGone) {
            let wait = self.dice.between(0, 60) * MS;
            self.client_goes(index, &id, wait, "after a while");
        }
    }

    /// The client of a request will go away.
    pub(super) fn client_goes(&mut self, index: usize, id: &RequestId, wait: Time, when: &str) {
        self.tell(|| format!("the client of {id} on engine {index} goes away {when}"));
        let life = self.engines[index].life;
        self.after(wait, Event::ClientGone { engine: index, life, id: id.clone() });
    }

    /// At a point that only the worker sees: the client of the request that a load is for may go away.
    pub(super) fn client_of_load_goes(&mut self, index: usize, load: LoadId, kind: FaultKind, when: &str) {
        let Some(id) = self.waits_for(index, load) else { return };
        if self.strikes(kind) {
            let wait = self.dice.between(0, 4) * MS;
            self.client_goes(index, &id, wait, when);
        }
    }

    /// The request that waits for a load.
    pub(super) fn waits_for(&self, index: usize, load: LoadId) -> Option<RequestId> {
        let engine = &self.engines[index];
        let tagged = |block: &u32| engine.pool.tags.get(*block as usize) == Some(&Some(load));
        let waiting = engine.requests.iter().find(|(_, r)| r.blocks.iter().any(tagged));
        waiting.map(|(id, _)| id.clone())
    }

    fn arrive(&mut self, index: usize, prompt: usize, id: &RequestId, params: &Value) {
        if !self.engines[index].alive {
            return;
        }
        let mut tokens = self.prompts[prompt].tokens.clone();
        if self.engines[index].role == Role::Producer {
            tokens.truncate(self.engines[index].shape.asked_of_producer(tokens.len() as u32) as usize);
        }
        let asked = tokens.clone();
        let now = self.now;
        let mut params = params.clone();
        if self.engines[index].role == Role::Consumer && self.strikes(FaultKind::PromptChanged) {
            self.tell(|| "   …with another prompt than P computed".to_owned());
            tokens[0] += 7;
            if self.has(Canary::DigestIgnored) {
                let count = params["kv_connector"]["tokens"].as_u64().unwrap_or(0) as usize;
                params["kv_connector"]["token_digest"] = json!(kv_proto::token_digest(&tokens[..count]));
            }
        }
        if self.engines[index].role == Role::Producer && self.has(Canary::HistoryCounted) {
            let count = params["kv_connector"]["tokens"].as_u64().unwrap_or(0) as usize;
            if let Some(counted) = tokens.get(..count).filter(|_| count > 0) {
                params["kv_connector"]["token_digest"] = json!(kv_proto::token_digest(counted));
            }
        }
        // Guards that a digest covers are taken out one at a time.
        let forgeable = !matches!(
            self.canary,
            Some(Canary::DigestIgnored | Canary::SameLife | Canary::IncarnationIgnored)
        );
        if self.engines[index].role == Role::Consumer && forgeable && self.strikes(FaultKind::OfferForged) {
            self.tell(|| "   …naming other blocks than P did".to_owned());
            forge_blocks(&mut params);
        }
        let changed = tokens != asked;
        let parsed = match TransferParams::parse(&params) {
            Ok(parsed) => parsed,
            Err(error) => return self.violate(Invariant::Calm, format!("own parameters refused: {error}")),
        };
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        let local = engine.clock.read(now);
        let answer = scheduler.request_arrived(local, id, &tokens, parsed.as_ref());
        let lives = engine.requests.contains_key(id);
        let refused = matches!(answer, Err(SchedError::DuplicateRequest { .. }));
        if lives != refused {
            // H-2: a name is refused while its request lives, and good again when that has ended.
            let what = format!("{id} on engine {index}: lives {lives}, refused as a duplicate {refused}");
            return self.violate(Invariant::EndsOnce, what);
        }
        match answer {
            Ok(task) => {
                let prompt = if changed && task.loads() { prompt + CHANGED } else { prompt };
                let request = Request {
                    prompt,
                    task,
                    stage: Stage::Waiting,
                    blocks: Vec::new(),
                    local_blocks: 0,
                    offer: parsed.map(Rc::new),
                    good: 0,
                    retries: 0,
                    covered: 0,
                    computes: 0,
                    runs_ahead: false,
                    announced_at: None,
                };
                engine.requests.insert(id.clone(), request);
            }
            Err(error) => self.tell(|| format!("engine {index} refuses {id}: {error}")),
        }
        self.wake(index);
    }

    /// P has answered: the router goes on to D, if all goes well.
    pub(super) fn params_at_router(&mut self, producer: usize, request: usize, params: &Rc<Value>) {
        self.routed.push((producer, request, params.clone()));
        if self.strikes(FaultKind::RouterLost) {
            return self.tell(|| format!("the router loses prompt {request}"));
        }
        let engine = self.prompts[request].consumer;
        let mut wait = self.dice.between(1, 10) * MS;
        if self.strikes(FaultKind::RouterLate) {
            wait += self.dice.between(400, 1_500) * MS;
            self.tell(|| format!("the router keeps prompt {request} back"));
        }
        let params = &if self.prompts[request].next.is_some() {
            let mut params = Value::clone(params);
            params["do_remote_decode"] = json!(true);
            Rc::new(params)
        } else {
            params.clone()
        };
        let at_d = |engine, copy| Event::RequestAtD { engine, request, params: params.clone(), copy };
        self.after(wait, at_d(engine, 0));
        let producers = self.engines.iter().filter(|e| e.role == Role::Producer).count();
        let consumers = self.engines.len() - producers;
        if self.strikes(FaultKind::RouterRetry) {
            let engine = producers + self.dice.below(consumers as u64) as usize;
            let wait = wait + self.dice.between(0, 1_200) * MS;
            let copy = 1 + self.dice.below(100) as u32;
            self.tell(|| format!("the router will try prompt {request} again, on D {engine}"));
            self.after(wait, at_d(engine, copy));
        }
        if consumers > 1 && self.strikes(FaultKind::RouterElsewhere) {
            let next = self.dice.between(1, consumers as u64 - 1) as usize;
            let engine = producers + (engine - producers + next) % consumers;
            let wait = wait + self.dice.between(0, 300) * MS;
            self.tell(|| format!("the router brings prompt {request} to D {engine} as well"));
            self.after(wait, at_d(engine, 0));
        }
    }

    /// What follows from a producer's return: clients send again what they had sent, under the same names, and the
    /// router may bring what belongs to the former life.
    pub(super) fn producer_is_back(&mut self, index: usize) {
        if self.now >= HEAL_AT {
            return;
        }
        for request in 0..self.prompts.len() {
            let Prompt { producer, sent, .. } = self.prompts[request];
            if producer == index && sent && self.dice.chance(600) {
                let wait = self.dice.between(1, 40) * MS;
                self.after(wait, Event::RequestAtP { engine: index, request, name: request, kept: None });
            }
        }
        let routed: Vec<_> = self.routed.iter().filter(|(of, ..)| *of == index).cloned().collect();
        for (_, request, params) in routed {
            if self.strikes(FaultKind::RouterStale) {
                // Early, so that the new life's leases of the same numbers are still held.
                let wait = self.dice.between(1, 150) * MS;
                let engine = self.prompts[request].consumer;
                let copy = 101 + self.dice.below(100) as u32;
                self.tell(|| {
                    format!("the router will bring prompt {request}, of a former life, to D {engine}")
                });
                self.after(wait, Event::RequestAtD { engine, request, params, copy });
            }
        }
    }

    /// Moves one request on by a turn.
    pub(super) fn advance(&mut self, index: usize, id: &RequestId) {
        let Some(request) = self.engines[index].requests.get(id).cloned() else { return };
        let Stage::Running { left, of } = request.stage else {
            if request.stage == Stage::Waiting {
                self.admit(index, id, &request);
            }
            return;
        };
        let produces = self.engines[index].role == Role::Producer;
        if left == 0 {
            if !request.task.hands_over() || request.announced_at.is_some_and(|at| at <= self.now) {
                self.complete(index, id);
            }
            return;
        }
        if self.strikes(FaultKind::Preempted) {
            return self.preempt(index, id, &request);
        }
        let gone = if produces { FaultKind::GoneInPrefill } else { FaultKind::GoneDecoding };
        if self.strikes(gone) {
            self.client_goes(index, id, 0, if produces { "while P computes" } else { "while D decodes" });
        }
        if produces {
            self.compute_chunk(index, &request, left, of);
        }
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.stage = Stage::Running { left: left - 1, of };
        }
    }

    fn preempt(&mut self, index: usize, id: &RequestId, request: &Request) {
        self.tell(|| format!("{id} is preempted on engine {index}"));
        self.begin_anew(index, id, request);
    }

    /// A request lets go of its blocks and waits for others.
    pub(super) fn begin_anew(&mut self, index: usize, id: &RequestId, request: &Request) {
        self.release(index, &request.blocks);
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.stage = Stage::Waiting;
            record.blocks.clear();
            record.good = 0;
        }
    }

    /// A prompt is computed in chunks: the blocks of this turn get their content.
    fn compute_chunk(&mut self, index: usize, request: &Request, left: u64, of: u64) {
        let all = request.computes.div_ceil(self.engines[index].shape.block_tokens) as usize;
        let after = |left: u64| all * (of - left) as usize / of as usize;
        for position in after(left)..after(left - 1) {
            let Some(block) = request.blocks.get(position) else { return };
            let is_last = position + 1 == request.blocks.len();
            let after = is_last.then_some(request.computes + u32::from(request.runs_ahead));
            self.fill_with(index, *block, request.prompt, position, after);
        }
    }

    /// On D: what was missing was computed in the turns that are over.
    fn compute_missing(&mut self, index: usize, request: &Request) {
        for (position, block) in request.blocks.iter().enumerate().skip(request.good as usize) {
            let is_last = position + 1 == request.blocks.len();
            let after = is_last.then(|| self.prompt_len(request.prompt));
            self.fill_with(index, *block, request.prompt, position, after);
        }
        self.enter(index, request.prompt, &request.blocks, 0..request.blocks.len(), false);
    }

    fn admit(&mut self, index: usize, id: &RequestId, request: &Request) {
        let (shape, mut tokens) = (self.engines[index].shape, self.prompt_len(request.prompt));
        let consumes = self.engines[index].role == Role::Consumer;
        if !consumes {
            tokens = shape.asked_of_producer(tokens);
        }
        let held = self.kept_of(index, request).map_or(tokens, |kept| self.prompt_len(kept));
        let needed = held.div_ceil(shape.block_tokens) as usize;
        let found = if consumes { self.cached_prefix(index, request.prompt) } else { Vec::new() };
        let Some(blocks) = self.engines[index].pool.take(&found, needed) else { return };
        // Now and then more of it was computed by requests outside the story, up to the whole.
        let full = tokens / BLOCK_TOKENS;
        let mut cached = found.len() as u32;
        if consumes && self.dice.chance(200) {
            cached = cached.max(self.dice.between(0, u64::from(full)) as u32);
        }
        let mut computes = tokens;
        if request.task == Task::Producer && self.strikes(FaultKind::PrefillShort) {
            computes = self.dice.below(u64::from(tokens)) as u32;
            self.tell(|| format!("{id} will end after {computes} of {tokens} tokens"));
        }
        // Of nothing else is a token more than was asked for too much.
        let runs_ahead =
            computes < self.prompt_len(request.prompt) && computes == tokens && self.dice.chance(250);
        let turns = self.dice.between(1, 6);
        if let Some(record) = self.engines[index].requests.get_mut(id) {
            record.blocks.clone_from(&blocks);
            record.stage = Stage::Running { left: turns, of: turns };
            record.local_blocks = cached;
            record.good = cached;
            record.computes = computes;
            record.runs_ahead = runs_ahead;
        }
        for (position, block) in blocks.iter().enumerate().skip(found.len()) {
            if position < cached as usize {
                self.fill_with(index, *block, request.prompt, position, None);
            } else {
                self.fill(index, *block, |_, _, _| GARBAGE);
            }
        }
        if request.task.loads() {
            self.begin_here(index, id, found.len());
        }
    }

    /// What a consumer's request will hold when it has ended, if that is kept for a next turn.
    fn kept_of(&self, index: usize, request: &Request) -> Option<usize> {
        let relays = request.task == Task::Relay && self.engines[index].role == Role::Consumer;
        self.prompts.get(request.prompt).filter(|_| relays)?.next.map(|next| next.kept)
    }

    /// A consumer's request has its blocks, the first of them from the cache.
    fn begin_here(&mut self, index: usize, id: &RequestId, found: usize) {
        let Some(request) = self.engines[index].requests.get(id).cloned() else { return };
        self.cache_hits += found as u64;
        if found > 0 {
            self.tell(|| format!("{id} finds {found} blocks in the cache of D {index}"));
        }
        self.judge(index, id, &request, found);
        self.enter(index, request.prompt, &request.blocks, found..request.good as usize, false);
        let local_tokens = request.good * BLOCK_TOKENS;
        let engine = &self.engines[index];
        let mut remote = engine.scheduler.as_ref().map_or(0, |s| s.remote_tokens(id, local_tokens));
        if remote > 0 && !self.load_may_begin(index, id, &request) {
            if let Some(scheduler) = &mut self.engines[index].scheduler {
                scheduler.request_declined(id);
            }
            remote = 0;
        }
        let now = self.engines[index].clock.read(self.now);
        self.order_load(index, id, now, (local_tokens, remote));
    }

    /// The prompt that the content of a full block of a consumer is first of.
    pub(super) fn origin(&self, prompt: usize, position: usize) -> usize {
        self.origin_of_token(prompt, (position as u32 + 1) * BLOCK_TOKENS - 1)
    }

    /// The prompt that a token's content is first of.
    pub(super) fn origin_of_token(&self, prompt: usize, token: u32) -> usize {
        let known = self.prompts.get(prompt).and_then(|prompt| prompt.origin.get(token as usize));
        known.copied().unwrap_or(prompt)
    }

    /// Blocks of a prompt that are full.
    pub(super) fn full_blocks(&self, prompt: usize) -> usize {
        (self.prompt_len(prompt) / BLOCK_TOKENS) as usize
    }

    /// A prompt's tokens, as its consumer has them.
    pub(super) fn tokens_of(&self, prompt: usize) -> Vec<u32> {
        let mut tokens = self.prompts[prompt % CHANGED].tokens.clone();
        if prompt >= CHANGED {
            tokens[0] += 7;
        }
        tokens
    }

    pub(super) fn prompt_len(&self, prompt: usize) -> u32 {
        self.prompts[prompt % CHANGED].tokens.len() as u32
    }

    /// A request has run to its end.
    fn complete(&mut self, index: usize, id: &RequestId) {
        let Some(request) = self.engines[index].requests.remove(id) else { return };
        if self.engines[index].role == Role::Consumer {
            self.compute_missing(index, &request);
            self.recovery_over(index, id);
        }
        let kept = self.kept_of(index, &request);
        let mut sampled = Vec::new();
        if let Some(kept) = kept {
            let asked = self.prompt_len(request.prompt);
            for position in (asked / BLOCK_TOKENS) as usize..request.blocks.len() {
                self.fill_with(index, request.blocks[position], kept, position, None);
            }
            sampled = self.prompts[kept].tokens[asked as usize..].to_vec();
        }
        let pretends = self.has(Canary::HalfPromptHandedOver);
        let whole = self.engines[index].shape.asked_of_producer(self.prompt_len(request.prompt));
        let ahead = u32::from(request.runs_ahead && !self.has(Canary::StateRanAhead));
        let end = RequestEnd::Complete {
            computed_tokens: match kept {
                // The last one that was sampled has no KV.
                Some(kept) => self.prompt_len(kept) - 1,
                None if pretends => whole,
                None => request.computes + ahead,
            },
            blocks: self.engines[index].lists(&request.blocks),
            sampled,
        };
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        let now = engine.clock.read(self.now);
        let finish = scheduler.request_finished(now, id, &end);
        self.tell(|| format!("{id} finishes on engine {index}: {:?}", finish.verdict));
        self.follow(index, id, &request.blocks, finish.verdict);
        let Some(params) = finish.params else { return };
        if self.strikes(FaultKind::GoneBeforeDecode) {
            // Nobody is there to go on to D. P is told to abort, and the lease decides (H-10).
            return self.client_goes(index, id, 0, "before D knows of it");
        }
        let params = Rc::new(TransferParams::RemotePrefill(Box::new(params)).to_json());
        let wait = self.dice.between(0, 6) * MS;
        if self.engines[index].role == Role::Consumer {
            let next = self.prompts.get(request.prompt).and_then(|prompt| prompt.next);
            let Some(Next { turn, .. }) = next else { return };
            if self.strikes(FaultKind::RouterLost) {
                return self.tell(|| format!("the next turn of prompt {} never comes", request.prompt));
            }
            self.tell(|| format!("{id} is kept for prompt {turn}"));
            let (engine, kept) = (self.prompts[turn].producer, Some(params));
            return self.after(wait + 5 * MS, Event::RequestAtP { engine, request: turn, name: turn, kept });
        }
        self.after(wait, Event::ParamsAtRouter { producer: index, request: request.prompt, params });
    }

    pub(super) fn client_gone(&mut self, index: usize, life: u32, id: &RequestId) {
        let engine = &mut self.engines[index];
        if !engine.alive || engine.life != life {
            return;
        }
        if let Some(until) = engine.waits(self.now) {
            return self.at(until, Event::ClientGone { engine: index, life, id: id.clone() });
        }
        let Some(request) = engine.requests.remove(id) else {
            // Too late: the hand-over owns the blocks now.
            if self.canary == Some(Canary::AbortFreesHandedOver)
                && let Some(hold) = engine.handed_over.get(id).copied()
                && let Some(blocks) = engine.pool.held.get_mut(&hold).map(std::mem::take)
            {
                self.release(index, &blocks);
            }
            return;
        };
        let Some(scheduler) = &mut engine.scheduler else { return };
        let finish = scheduler.request_finished(engine.clock.read(self.now), id, &RequestEnd::Aborted);
        self.tell(|| format!("the client of {id} is gone, engine {index}: {:?}", finish.verdict));
        if request.stage == Stage::Loading {
            for block in request.blocks.iter().skip(request.good as usize) {
                self.engines[index].pool.cache.evict(*block);
            }
        }
        self.recovery_over(index, id);
        self.follow(index, id, &request.blocks, finish.verdict);
        self.wake(index);
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
