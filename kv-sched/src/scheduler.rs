//! The scheduler half as an engine calls it: both policies, one plan.

use kv_proto::{
    BlockList, GroupKind, Moment, PeerLocator, Plan, ReleaseReason, RemotePrefill, Report, RequestId,
    TransferParams, token_digest,
};

use crate::config::{SchedConfig, SchedConfigError};
use crate::error::SchedError;
use crate::event::{Finish, HoldId, LoadResult, Remaining, RequestEnd, Role, SchedEvent, Verdict};
use crate::machine::consumer::{Consumer, ConsumerStats};
use crate::machine::producer::{Producer, ProducerStats, Prompt};
use crate::machine::staging::StagedBlocks;

/// Whether new hand-overs are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Mode {
    Open,
    /// What was accepted may finish until then.
    Draining {
        until: Moment,
    },
    /// What was left then has been told to end; that it has is waited for until this time.
    Ending {
        until: Moment,
    },
    /// Over; nothing is taken until [`Scheduler::resume`].
    Drained,
}

/// The scheduler half of one engine. It does no IO and reads no clock: each hook that needs the time takes it.
#[derive(Debug, Clone, Hash)]
pub struct Scheduler {
    config: SchedConfig,
    producer: Producer,
    consumer: Consumer,
    mode: Mode,
    plan: Plan,
    events: Vec<SchedEvent>,
}

impl Scheduler {
    /// A scheduler half without requests.
    pub fn new(config: SchedConfig) -> Result<Self, SchedConfigError> {
        config.check()?;
        Ok(Self {
            config,
            producer: Producer::new(),
            consumer: Consumer::new(),
            mode: Mode::Open,
            plan: Plan::default(),
            events: Vec::new(),
        })
    }

    /// The configuration in force.
    pub fn config(&self) -> &SchedConfig {
        &self.config
    }

    /// A request arrived, before it is queued. `prompt` is its token ids.
    ///
    /// An error costs this request alone. If the request brought offers that could be located, they are given back to
    /// their producers by the next plan, so that no block waits for a reader that will not come. One offer that does
    /// not fit refuses the request, also if it is not the first.
    pub fn request_arrived(
        &mut self,
        now: Moment,
        request: &RequestId,
        prompt: &[u32],
        params: Option<&TransferParams>,
    ) -> Result<Role, SchedError> {
        let Some(params) = params else { return Ok(Role::Plain) };
        match params {
            TransferParams::RemoteDecode { other } => {
                let tokens = self.admit(request, prompt)?;
                self.computes(request, prompt, tokens, other);
                Ok(Role::Producer)
            }
            TransferParams::RemotePrefill(remote) | TransferParams::Relay(remote) => {
                let relays = matches!(params, TransferParams::Relay(_));
                let fit = |tokens| {
                    let offers = std::iter::once(&**remote).chain(&remote.alternatives);
                    let usable = offers.map(|offer| match self.fits(offer, prompt, tokens) {
                        // An earlier turn's, and the conversation has gone another way.
                        Err(SchedError::PromptTooShort { .. } | SchedError::PromptDiffers { .. })
                            if relays =>
                        {
                            Ok(0)
                        }
                        other => other,
                    });
                    usable.collect::<Result<Vec<u32>, _>>().map(|usable| (tokens, usable))
                };
                match self.admit(request, prompt).and_then(fit) {
                    Ok((tokens, usable)) => {
                        if relays {
                            self.computes(request, prompt, tokens, &remote.other);
                        }
                        let remote = RemotePrefill::clone(remote);
                        let orders = &mut self.plan.consumer;
                        self.consumer.arrived(now, &self.config, request.clone(), remote, &usable, orders);
                        Ok(if relays { Role::Relay } else { Role::Consumer })
                    }
                    Err(error) => {
                        let reason = match error {
                            SchedError::Draining { .. } => ReleaseReason::Draining,
                            _ => ReleaseReason::Refused,
                        };
                        self.consumer.refused(remote, reason, &mut self.plan.consumer);
                        Err(error)
                    }
                }
            }
        }
    }

    /// A request was refused before it was shown here, for its parameters could not be read as a whole; these are the
    /// offers that could. They are given back.
    pub fn offers_refused(&mut self, offers: &[RemotePrefill]) {
        for offer in offers {
            self.consumer.refused(offer, ReleaseReason::Refused, &mut self.plan.consumer);
        }
    }

    /// A request computes for somebody else, by itself or from what it loads on.
    fn computes(
        &mut self,
        request: &RequestId,
        prompt: &[u32],
        tokens: u32,
        other: &serde_json::Map<String, serde_json::Value>,
    ) {
        let prompt = Prompt::of(prompt, tokens, self.config.block_tokens);
        self.producer.arrived(request.clone(), prompt, other.clone(), &mut self.plan.producer);
    }

    fn admit(&self, request: &RequestId, prompt: &[u32]) -> Result<u32, SchedError> {
        if self.producer.knows(request) || self.consumer.knows(request) {
            return Err(SchedError::DuplicateRequest { request: request.clone() });
        }
        if self.mode != Mode::Open {
            return Err(SchedError::Draining { request: request.clone() });
        }
        let tokens =
            u32::try_from(prompt.len()).ok().filter(|n| u64::from(*n) <= kv_proto::params::TOKENS_MAX);
        tokens.ok_or(SchedError::PromptTooLong { tokens: prompt.len() })
    }

    /// How many of the offered tokens are the prompt's own, from its start: all of them, or, of a prompt that was changed
    /// on the way, as many as the offer's marks say.
    fn fits(&self, remote: &RemotePrefill, prompt: &[u32], prompt_tokens: u32) -> Result<u32, SchedError> {
        if remote.blocks.len() != self.config.groups.len() {
            let (ours, theirs) = (self.config.groups.len(), remote.blocks.len());
            return Err(SchedError::Groups { ours, theirs });
        }
        if remote.block_tokens == 0 {
            return Err(SchedError::OfferBlockTokens);
        }
        let (tokens, needed) = (remote.tokens, remote.block_count());
        for (group, (list, kind)) in remote.blocks.iter().zip(&self.config.groups).enumerate() {
            // Parsed parameters cannot say so; made by hand they can.
            let got = remote.first(group).saturating_add(list.len());
            if got != needed || (list.is_empty() && needed > 0) {
                return Err(SchedError::OfferBlocks { tokens, needed, group, got });
            }
            let needed = kind.first_token(tokens);
            let begins = remote.first(group).saturating_mul(remote.block_tokens);
            if begins > needed && tokens > 0 {
                return Err(SchedError::OfferBegins { group, kind: *kind, begins, needed });
            }
        }
        let whole = prompt.get(..tokens as usize);
        let ours = whole.map(token_digest);
        if tokens == 0 || ours.as_ref() == Some(&remote.token_digest) {
            // The engine computes the last token itself; a state that has it already would count it twice.
            let has_state = self.config.groups.contains(&GroupKind::State);
            return Ok(if has_state && tokens >= prompt_tokens { 0 } else { tokens });
        }
        // Of a window the offer has the end alone, and of a state only that after the last token.
        let in_parts = self.config.groups.iter().all(|kind| *kind == GroupKind::Full);
        let common = if in_parts { remote.marks.common(prompt) } else { 0 };
        match ours {
            _ if common > 0 => Ok(common),
            None => Err(SchedError::PromptTooShort { offered: tokens, prompt: prompt_tokens }),
            Some(ours) => {
                let theirs = remote.token_digest.clone();
                Err(SchedError::PromptDiffers { tokens, ours, theirs })
            }
        }
    }

    /// How many tokens a load would bring beyond the `local_tokens` that the engine holds already (full blocks,
    /// from the start of the prompt). Zero: compute it here, or take the events first, if a
    /// load of the request has ended. Changes nothing, may be asked at any time.
    pub fn remote_tokens(&self, request: &RequestId, local_tokens: u32) -> u32 {
        if self.has_untold_end(request) {
            return 0;
        }
        self.consumer.remote_tokens(&self.config, request, local_tokens)
    }

    /// Whether a load of the request has ended and the engine has not taken that yet. Until it has, nothing further is
    /// begun for the request: its next load's end could not be told from this one's.
    fn has_untold_end(&self, request: &RequestId) -> bool {
        self.events
            .iter()
            .any(|event| matches!(event, SchedEvent::LoadEnded { request: of, .. } if of == request))
    }

    /// The producers from which a request that waits for blocks can be loaded, the next one first: those of its
    /// offers that are neither read nor given back. Empty while it loads.
    pub fn sources(&self, request: &RequestId) -> Vec<PeerLocator> {
        if self.has_untold_end(request) { Vec::new() } else { self.consumer.sources(request) }
    }

    /// Makes the n-th of [`Scheduler::sources`] the next one; the others stay behind it in their order. From then on
    /// [`Scheduler::remote_tokens`] answers for it. To be called before the load begins, the first or a further one, by
    /// an engine that knows better than the router, such as by a circuit breaker. Prolongs no wait.
    pub fn use_source(&mut self, request: &RequestId, n: usize) -> Result<(), SchedError> {
        self.consumer.use_source(request, n)
    }

    /// The engine allocated the request's blocks (by group, from the start of the sequence). With
    /// `remote_tokens > 0` the load begins with the next plan, and the request must wait for its
    /// [`SchedEvent::LoadEnded`]. With zero the request goes on at once, and an unused offer is given back.
    pub fn blocks_allocated(
        &mut self,
        now: Moment,
        request: &RequestId,
        local_tokens: u32,
        remote_tokens: u32,
        blocks: &[BlockList],
    ) -> Result<(), SchedError> {
        if remote_tokens > 0 && self.has_untold_end(request) {
            return Err(SchedError::NothingRemote { request: request.clone(), asked: remote_tokens });
        }
        let orders = &mut self.plan.consumer;
        self.consumer.allocated(now, &self.config, request, local_tokens, remote_tokens, blocks, orders)
    }

    /// The load that a request waits for, by the number that reports name; `None` if it waits for none.
    pub fn load_of(&self, request: &RequestId) -> Option<kv_proto::LoadId> {
        self.consumer.load_of(request)
    }

    /// The engine will compute the prompt although an offer came with it, for a reason of its own: its producer is known
    /// to fail, or the way there is too slow. All its offers are given back; from now on nothing remote is left. While
    /// it loads, the load goes on and is the last.
    pub fn request_declined(&mut self, request: &RequestId) {
        self.consumer.declined(request, &mut self.plan.consumer);
    }

    /// A request ended, whether complete or aborted, queued, loading or running. To be called once per request.
    ///
    /// For requests that hand nothing over the answer is [`Verdict::Free`]. A relay that is complete is handed over as
    /// a producer's request is, unless its load was not over, or had failed and the engine had not taken that: then its
    /// blocks may hold anything.
    pub fn request_finished(&mut self, now: Moment, request: &RequestId, end: &RequestEnd) -> Finish {
        let is_told = !self.has_untold_end(request);
        let untold = self.untold_end(request);
        if matches!(end, RequestEnd::Complete { .. }) && self.producer.knows(request) {
            // A relay that has loaded nothing did not want to.
            self.consumer.declined(request, &mut self.plan.consumer);
        }
        let loaded = self.consumer.finished(now, &self.config, request, &mut self.plan.consumer);
        let loaded = loaded.map(|finish| untold.map_or(finish.verdict, Verdict::Hold));
        let is_quiet = is_told && !matches!(loaded, Some(Verdict::Hold(_)));
        // What was to be ended must not begin anew.
        let hands_over = is_quiet && matches!(self.mode, Mode::Open | Mode::Draining { .. });
        let orders = &mut self.plan.producer;
        let held = self.producer.finished(now, &self.config, request, end, hands_over, orders);
        match (loaded, held) {
            (Some(verdict @ Verdict::Hold(_)), Some(Finish { params, .. })) => Finish { verdict, params },
            (_, Some(finish)) => finish,
            (Some(verdict), None) => Finish { verdict, params: None },
            (None, None) => Finish { verdict: Verdict::Free, params: None },
        }
    }

    /// What the end of a request would hand over, by group, of blocks in a pool of so many: what an engine with
    /// [staging](crate::Staging) copies to its host pool before it ends the request with the blocks there. Empty if that is
    /// nothing. Changes nothing.
    pub fn to_hand_over(&self, request: &RequestId, end: &RequestEnd, blocks: u32) -> Vec<StagedBlocks> {
        let config = SchedConfig { blocks, ..self.config.clone() };
        self.producer.to_hand_over(&config, request, end)
    }

    /// Which of the request's blocks a load would fill, by group, of blocks in a pool of so many; `blocks` are the request's
    /// from the start of the sequence. What an engine with [staging](crate::Staging) needs host blocks for before it calls
    /// [`Scheduler::blocks_allocated`] with those. Empty if nothing remote is left. Changes nothing.
    pub fn to_load(
        &self,
        request: &RequestId,
        local_tokens: u32,
        blocks: &[BlockList],
        pool: u32,
    ) -> Result<Vec<StagedBlocks>, SchedError> {
        let config = SchedConfig { blocks: pool, ..self.config.clone() };
        self.consumer.to_load(&config, request, local_tokens, blocks)
    }

    /// A request lost its blocks and will be scheduled anew: it was preempted, or its cache was reset. Not its end.
    ///
    /// One that loads goes on without its remote sources, tried or not; its blocks must be kept as long as the verdict says, since
    /// the transport may still write them, and no [`SchedEvent::LoadEnded`] comes. One that computes for somebody
    /// else needs nothing: what is handed over is what its end names.
    pub fn request_preempted(&mut self, now: Moment, request: &RequestId) -> Verdict {
        let untold = self.untold_end(request);
        let orders = &mut self.plan.consumer;
        let verdict = self.consumer.preempted(now, &self.config, request, orders).unwrap_or(Verdict::Free);
        untold.map_or(verdict, Verdict::Hold)
    }

    /// A load's end that the engine has not taken yet is told by the request's own end. Returns what holds blocks by
    /// it.
    fn untold_end(&mut self, request: &RequestId) -> Option<HoldId> {
        let of =
            |event: &SchedEvent| matches!(event, SchedEvent::LoadEnded { request: of, .. } if of == request);
        match self.events.iter().position(of).map(|index| self.events.remove(index)) {
            Some(SchedEvent::LoadEnded { result: LoadResult::Failed { hold, .. }, .. }) => hold,
            _ => None,
        }
    }

    /// Takes a lease back before its time, such as one that keeps an answer for a turn that may never come while others
    /// wait for room. Whoever reads under it finds it lapsed, and computes. Its blocks are free with
    /// [`SchedEvent::BlocksReleased`], as at any other end. True if there was something to take back: false for what is
    /// not held any more, was taken back before, or is a load's.
    pub fn take_back(&mut self, hold: HoldId) -> bool {
        match hold {
            HoldId::Lease(lease) => self.producer.take_back(lease, &mut self.plan.producer),
            HoldId::Load(_) => false,
        }
    }

    /// Takes nothing new from now on, lets what was accepted finish for `limit`, and then ends it: waiting requests
    /// give their offer back, loads are cancelled (their requests are told, and compute), leases are revoked (their
    /// consumers notice, and compute). [`SchedEvent::Drained`] says that it is over, at the latest
    /// [`SchedConfig::report_grace`] after the limit, and what is left if workers do not answer.
    ///
    /// With a limit of zero this is how an engine gets its blocks back before a cache reset or a sleep. Requests
    /// that compute for others are the engine's to finish or to abort; once their parameters are out their leases
    /// end like all others. A second call may only bring the limit nearer.
    pub fn drain(&mut self, now: Moment, limit: std::time::Duration) {
        let until = now + limit;
        match self.mode {
            Mode::Open => self.mode = Mode::Draining { until },
            Mode::Draining { until: was } => self.mode = Mode::Draining { until: was.min(until) },
            Mode::Ending { .. } => {}
            // What was left then is waited for again.
            Mode::Drained => self.mode = Mode::Ending { until: now + self.config.report_grace },
        }
        self.drained(now);
    }

    /// Whether a drain is over and nothing new is taken.
    pub fn has_drained(&self) -> bool {
        self.mode == Mode::Drained
    }

    /// Takes new hand-overs again. What was told to end still ends.
    pub fn resume(&mut self) {
        self.mode = Mode::Open;
    }

    /// What is not over.
    pub fn remaining(&self) -> Remaining {
        let (queued, loads) = self.consumer.remaining();
        let (computing, leases) = (self.producer.computing_count(), self.producer.held_count());
        Remaining { computing, leases, queued, loads }
    }

    /// Whether something is left is looked at only while draining.
    fn drained(&mut self, now: Moment) {
        if let Mode::Draining { until } = self.mode
            && until <= now
        {
            self.mode = Mode::Ending { until: now + self.config.report_grace };
            self.consumer.end_all(now, &self.config, &mut self.plan.consumer);
            self.producer.end_all(&mut self.plan.producer);
        }
        let until = match self.mode {
            Mode::Draining { until } | Mode::Ending { until } => until,
            Mode::Open | Mode::Drained => return,
        };
        let left = self.remaining();
        // Orders that the workers do not have yet tell peers that they need not wait.
        if (left.is_empty() && self.plan.is_empty()) || until <= now {
            self.mode = Mode::Drained;
            self.events.push(SchedEvent::Drained { left });
        }
    }

    /// What the workers are to do, to be carried to every rank with this step. Often empty.
    pub fn plan_step(&mut self, now: Moment) -> Plan {
        self.time_passed(now);
        let plan = std::mem::take(&mut self.plan);
        self.drained(now);
        plan
    }

    /// Puts a plan back that could not be carried, in front of what has come since.
    pub fn put_back(&mut self, mut plan: Plan) {
        plan.producer.append(&mut self.plan.producer);
        plan.consumer.append(&mut self.plan.consumer);
        self.plan = plan;
    }

    /// Whether [`Scheduler::plan_step`] has something to carry, so that an idle engine makes a step for it.
    pub fn has_plan(&self) -> bool {
        !self.plan.is_empty()
    }

    /// One rank's report. Reports of all ranks are aggregated here; repeated or unknown ends do nothing.
    pub fn take_report(&mut self, now: Moment, report: Report) {
        // First everything that has arrived, then the deadlines.
        for (lease, end) in report.leases {
            self.producer.lease_ended(&self.config, report.rank, lease, end, &mut self.events);
        }
        for (load, end) in report.loads {
            let (of, orders) = ((report.rank, load), &mut self.plan.consumer);
            self.consumer.load_ended(now, &self.config, of, end, orders, &mut self.events);
        }
        self.time_passed(now);
    }

    /// Lets deadlines pass that have come.
    pub fn time_passed(&mut self, now: Moment) {
        self.producer.time_passed(now, &self.config, &mut self.events);
        self.consumer.time_passed(now, &self.config, &mut self.plan.consumer, &mut self.events);
        self.drained(now);
    }

    /// When [`Scheduler::time_passed`] has something to do at the latest.
    pub fn next_deadline(&self) -> Option<Moment> {
        let drain = match self.mode {
            Mode::Draining { until } | Mode::Ending { until } => Some(until),
            Mode::Open | Mode::Drained => None,
        };
        [self.producer.next_deadline(), self.consumer.next_deadline(), drain].into_iter().flatten().min()
    }

    /// What happened since the last call, in order. To be taken after each report, plan, drain and call of
    /// [`Scheduler::time_passed`].
    pub fn take_events(&mut self) -> Vec<SchedEvent> {
        std::mem::take(&mut self.events)
    }

    /// Producer counters.
    pub fn producer_stats(&self) -> ProducerStats {
        self.producer.stats()
    }

    /// Consumer counters.
    pub fn consumer_stats(&self) -> &ConsumerStats {
        self.consumer.stats()
    }

    /// Leases and loads that hold blocks now.
    pub fn holds(&self) -> usize {
        self.producer.held_count() + self.consumer.load_count()
    }
}
