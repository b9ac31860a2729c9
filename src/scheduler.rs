//! The connector of an engine's scheduler process.

use std::time::Instant;

use kv_handshake::{Listener, ListenerConfig, ListenerStats};
use kv_proto::handshake::{EngineCard, WorkerCard};
use kv_proto::{BlockList, Moment, PeerLocator, RemotePrefill, Report, RequestId, TransferParams};
use kv_sched::{
    ConsumerStats, HoldId, ProducerStats, Remaining, RequestEnd, Role, SchedConfig, SchedEvent, Scheduler,
    Staging, Verdict,
};
use serde_json::Value;

use crate::config::{Config, ms};
use crate::error::ConnectorError;
use crate::identity::EngineIdentity;

/// Answer to the end of a request.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "blocks freed against a Hold are read or written by a peer"]
pub struct Finished {
    /// What is to become of the blocks.
    pub verdict: Verdict,
    /// `kv_transfer_params` to give to whoever asked, on a producer.
    pub params: Option<Value>,
}

/// Counters of the scheduler half.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SchedulerStats {
    /// As a producer.
    pub producer: ProducerStats,
    /// As a consumer.
    pub consumer: ConsumerStats,
    /// Of the handshake listener.
    pub handshakes: ListenerStats,
    /// Leases and loads that hold blocks now.
    pub holds: usize,
}

/// The scheduler half: who may read which blocks, and for how long.
///
/// It answers hooks, makes plans and takes reports; no call waits for anything. It owns the handshake listener,
/// which has a thread of its own.
#[derive(Debug)]
pub struct SchedulerConnector {
    pub(crate) scheduler: Scheduler,
    pub(crate) staging: Option<Staging>,
    listener: Listener,
    started: Instant,
}

impl SchedulerConnector {
    /// Starts the scheduler half of an engine whose workers have started: `cards` are what their
    /// [`card`](crate::WorkerConnector::card) returned, by rank. The listener is bound when this returns.
    pub fn start(
        config: &Config,
        identity: &EngineIdentity,
        cards: &[Vec<u8>],
    ) -> Result<Self, ConnectorError> {
        config.check()?;
        let workers = cards.iter().map(|card| WorkerCard::decode(card)).collect::<Result<Vec<_>, _>>()?;
        let card = EngineCard {
            engine: identity.engine.clone(),
            incarnation: identity.incarnation,
            topology: identity.topology,
            workers,
            renew_every_ms: (config.lease_ttl_ms.min(config.lease_renewal_ms) / 3).max(1),
        };
        card.check()?;
        let layout = card.workers[0].layout.clone();
        let groups = card.workers.iter().map(|worker| worker.layout.group_kinds().collect::<Vec<_>>());
        let groups = groups.max_by_key(Vec::len).unwrap_or_default();
        let listener = Listener::bind(
            ListenerConfig {
                bind_host: config.handshake_host.clone(),
                port: config.handshake_port,
                ..ListenerConfig::default()
            },
            card,
        )?;
        let scheduler = Scheduler::new(SchedConfig {
            engine: identity.engine.clone(),
            incarnation: identity.incarnation,
            topology: identity.topology,
            host: config.told_host().to_owned(),
            port: listener.port(),
            block_tokens: layout.block_tokens.saturating_mul(identity.topology.context),
            blocks: layout.blocks,
            groups,
            lease_ttl: ms(config.lease_ttl_ms),
            lease_renewal: ms(config.lease_renewal_ms),
            lease_max: ms(config.lease_max_ms),
            lease_grace: ms(config.lease_grace_ms),
            min_remote_tokens: config.min_remote_tokens,
            queue_limit: ms(config.queue_limit_ms),
            load_limit: ms(config.load_limit_ms),
            report_grace: ms(config.report_grace_ms),
        })?;
        Ok(Self { scheduler, staging: None, listener, started: Instant::now() })
    }

    pub(crate) fn now(&self) -> Moment {
        Moment::from_start(self.started.elapsed())
    }

    /// Port at which the handshake listener listens.
    pub fn handshake_port(&self) -> u16 {
        self.listener.port()
    }

    /// A request arrived, before it is queued. `params` is what came with it as `kv_transfer_params`.
    ///
    /// An error costs this request alone; the engine answers it with the error's text, or computes the request by
    /// itself. Offers that could be located are given back to their producers.
    pub fn request_arrived(
        &mut self,
        request: &RequestId,
        prompt: &[u32],
        params: Option<&Value>,
    ) -> Result<Role, ConnectorError> {
        let params = match params.map(TransferParams::parse).transpose() {
            Ok(params) => params.flatten(),
            Err(error) => {
                // One of several offers cannot be read; the producers of the others wait all the same.
                let offers = params.map(RemotePrefill::readable).unwrap_or_default();
                self.scheduler.offers_refused(&offers);
                return Err(error.into());
            }
        };
        let now = self.now();
        Ok(self.scheduler.request_arrived(now, request, prompt, params.as_ref())?)
    }

    /// Tokens that a load would bring beyond the `local_tokens` that are here; see
    /// [`Scheduler::remote_tokens`].
    pub fn remote_tokens(&self, request: &RequestId, local_tokens: u32) -> u32 {
        self.scheduler.remote_tokens(request, local_tokens)
    }

    /// The producers from which a request can be loaded, the next one first; see [`Scheduler::sources`]. After a load
    /// that failed they are those that [`LoadResult::Failed`](kv_sched::LoadResult::Failed) names as `others`.
    pub fn sources(&self, request: &RequestId) -> Vec<PeerLocator> {
        self.scheduler.sources(request)
    }

    /// Makes the n-th of [`SchedulerConnector::sources`] the next one; see [`Scheduler::use_source`].
    ///
    /// After a failed load an engine that wants another producer calls this (for the first it need not), asks
    /// [`SchedulerConnector::remote_tokens`] with the full blocks that are valid, allocates what is missing, and calls
    /// [`SchedulerConnector::blocks_allocated`] as for a first load. One that would rather compute calls
    /// [`SchedulerConnector::request_declined`].
    pub fn use_source(&mut self, request: &RequestId, n: usize) -> Result<(), ConnectorError> {
        Ok(self.scheduler.use_source(request, n)?)
    }

    /// The engine allocated the request's blocks; see [`Scheduler::blocks_allocated`].
    pub fn blocks_allocated(
        &mut self,
        request: &RequestId,
        local_tokens: u32,
        remote_tokens: u32,
        blocks: &[BlockList],
    ) -> Result<(), ConnectorError> {
        let now = self.now();
        Ok(self.scheduler.blocks_allocated(now, request, local_tokens, remote_tokens, blocks)?)
    }

    /// The load that a request waits for; see [`Scheduler::load_of`].
    pub fn load_of(&self, request: &RequestId) -> Option<kv_proto::LoadId> {
        self.scheduler.load_of(request)
    }

    /// A request ended, in whatever way; see [`Scheduler::request_finished`].
    pub fn request_finished(&mut self, request: &RequestId, end: &RequestEnd) -> Finished {
        let finish = self.scheduler.request_finished(self.now(), request, end);
        let params = finish.params.map(|p| TransferParams::RemotePrefill(Box::new(p)).to_json());
        Finished { verdict: finish.verdict, params }
    }

    /// The engine will compute the prompt although offers came with it, or what is left of it; see [`Scheduler::request_declined`].
    pub fn request_declined(&mut self, request: &RequestId) {
        self.scheduler.request_declined(request);
    }

    /// A request lost its blocks and will be scheduled anew; see [`Scheduler::request_preempted`].
    pub fn request_preempted(&mut self, request: &RequestId) -> Verdict {
        let now = self.now();
        self.scheduler.request_preempted(now, request)
    }

    /// Takes a lease back before its time; see [`Scheduler::take_back`].
    pub fn take_back(&mut self, hold: HoldId) -> bool {
        self.scheduler.take_back(hold)
    }

    /// Takes nothing new, lets what was accepted finish for `limit`, then ends it; [`SchedEvent::Drained`] says when
    /// it is over. See [`Scheduler::drain`]. Consumers can still shake hands until then.
    pub fn drain(&mut self, limit: std::time::Duration) {
        let now = self.now();
        self.scheduler.drain(now, limit);
    }

    /// Takes new hand-overs again.
    pub fn resume(&mut self) {
        self.scheduler.resume();
        self.listener.set_available(true);
    }

    /// What is not over: hand-overs that hold blocks, or wait for some.
    pub fn remaining(&self) -> Remaining {
        self.scheduler.remaining()
    }

    /// The plan of this step as bytes, to be carried to every worker; `None` if there is nothing to carry.
    pub fn plan_step(&mut self) -> Result<Option<Vec<u8>>, ConnectorError> {
        let now = self.now();
        let mut plan = self.scheduler.plan_step(now);
        plan.copies = self.copies();
        if plan.is_empty() {
            return Ok(None);
        }
        match plan.encode() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => {
                self.put_back_copies(std::mem::take(&mut plan.copies));
                self.scheduler.put_back(plan);
                Err(error.into())
            }
        }
    }

    /// Whether a plan waits, so that an idle engine should make a step.
    pub fn has_plan(&self) -> bool {
        self.scheduler.has_plan() || self.staging.as_ref().is_some_and(Staging::has_orders)
    }

    /// Takes a worker's report, as bytes. What follows from it is among [`SchedulerConnector::events`].
    pub fn take_report(&mut self, report: &[u8]) -> Result<(), ConnectorError> {
        let mut report = Report::decode(report)?;
        let ranks = self.scheduler.config().topology.ranks;
        if report.rank.0 >= ranks {
            return Err(ConnectorError::ReportRank { rank: report.rank, ranks });
        }
        let now = self.now();
        self.copy_news(now, report.rank, std::mem::take(&mut report.copies));
        self.scheduler.take_report(now, report);
        Ok(())
    }

    /// What happened since the last call, in order. To be taken once per step, reports or not.
    pub fn events(&mut self) -> Vec<SchedEvent> {
        let now = self.now();
        self.scheduler.time_passed(now);
        self.listener.set_available(!self.scheduler.has_drained());
        self.scheduler.take_events()
    }

    /// How long an idle engine may sleep until [`SchedulerConnector::events`] has something to say; `None`: until
    /// something comes in.
    pub fn next_wake(&self) -> Option<std::time::Duration> {
        let copies = self.staging.as_ref().and_then(Staging::next_deadline);
        let next = [self.scheduler.next_deadline(), copies].into_iter().flatten().min();
        next.map(|at| at.since(self.now()))
    }

    /// Counters.
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            producer: self.scheduler.producer_stats(),
            consumer: self.scheduler.consumer_stats().clone(),
            handshakes: self.listener.stats(),
            holds: self.scheduler.holds(),
        }
    }
}
