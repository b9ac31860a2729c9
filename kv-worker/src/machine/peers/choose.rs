//! What follows from a handshake: whom this rank has to do with, and what it reads from whom.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use kv_proto::handshake::{EngineCard, WorkerCard};
use kv_proto::{BlockLayout, LoadFailure, Moment, PeerLocator};
use kv_transport::{Address, RegionKey};
use twox_hash::XxHash3_64;

use super::{Change, Peer, Peers, Remote, SourceKey, State, TimerKey};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, LinkId};
use crate::shape::{RemoteRank, ShapeError, SourcePlan, compile};

/// The digest of a plan, and its sources.
type Chosen = (u64, Vec<Remote>);

impl Peers {
    /// A handshake ended. The layout is that of our own blocks.
    pub fn handshake_ended(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        layout: &BlockLayout,
        key: &SourceKey,
        result: Result<Box<EngineCard>, Failure>,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        if !matches!(self.get(key)?.state, State::Dialling { .. }) {
            return None;
        }
        let chosen = result.and_then(|card| self.choose(config, layout, &card));
        let (plan, remotes) = match chosen.and_then(|chosen| self.as_before(&key.peer, chosen)) {
            Ok(chosen) => chosen,
            Err(failure) => {
                self.stats.handshakes_failed += 1;
                return self.fail(now, config, key, failure);
            }
        };
        let count = remotes.len() as u32;
        let is_first = self.planned(&key.peer).is_none();
        if is_first {
            self.add_sources(now, &key.peer, plan, count);
        }
        for (source, remote) in (0..count).zip(remotes) {
            let of = SourceKey { peer: key.peer.clone(), source };
            // Who dials at the same time need not wait for its own answer. Others have their connections.
            let dials = self.get(&of).is_some_and(|peer| matches!(peer.state, State::Dialling { .. }));
            if is_first || dials {
                self.connect(now, config, &of, remote, out);
            }
        }
        is_first.then(|| Change::Planned(key.peer.clone(), count))
    }

    fn connect(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        remote: Remote,
        out: &mut Vec<Decision>,
    ) {
        self.stop_timers(key);
        let link = LinkId::Dialled(self.next_link);
        self.next_link += 1;
        out.push(Decision::Connect { link, address: remote.address.clone() });
        let until = now + config.limits.connect;
        self.timers.set(until, TimerKey::State(key.clone()));
        if let Some(peer) = self.get_mut(key) {
            peer.state = State::Connecting { link, remote: Box::new(remote), until };
        }
    }

    /// Whether the producer is cut as it was when it was first met.
    fn as_before(&self, peer: &Arc<PeerLocator>, chosen: Chosen) -> Result<Chosen, Failure> {
        match self.producers.get(peer).and_then(|producer| producer.plan) {
            Some(before) if before != chosen.0 => {
                let detail =
                    format!("engine {} tells another shape than before in the same life", peer.engine);
                Err(Failure::new(LoadFailure::HandshakeMalformed, detail))
            }
            _ => Ok(chosen),
        }
    }

    /// The sources beside the first one, for which everything that lives by the first one's offers waits too.
    fn add_sources(&mut self, now: Moment, peer: &Arc<PeerLocator>, plan: u64, count: u32) {
        let Some(producer) = self.producers.get_mut(peer) else { return };
        producer.plan = Some(plan);
        let Some(first) = producer.sources.first() else { return };
        let claims = first.claims.iter().map(|(name, claim)| (*name, claim.anew())).collect();
        let new = Peer { claims, releases: first.releases.clone(), ..Peer::new(now) };
        producer.sources.resize(count.max(1) as usize, new);
    }

    /// The workers of a producer that this rank has to do with, in the order of the plan.
    fn choose(
        &self,
        config: &WorkerConfig,
        layout: &BlockLayout,
        card: &EngineCard,
    ) -> Result<Chosen, Failure> {
        let ranks: Vec<RemoteRank<'_>> =
            card.workers.iter().map(|w| RemoteRank { rank: w.rank, layout: &w.layout }).collect();
        let plan = compile(layout, config.rank, config.topology, &ranks, card.topology).map_err(|error| {
            let detail = format!("the cache of engine {} cannot be brought into ours: {error}", card.engine);
            let reason = match error {
                ShapeError::NoSuchRank { .. } | ShapeError::Topology(_) => LoadFailure::HandshakeMalformed,
                ShapeError::Heads { side: "theirs", .. } => LoadFailure::HandshakeMalformed,
                _ => LoadFailure::Incompatible,
            };
            Failure::new(reason, detail)
        })?;
        let renew_every = (card.renew_every_ms > 0).then(|| Duration::from_millis(card.renew_every_ms));
        let mut digest = XxHash3_64::default();
        plan.hash(&mut digest);
        let sources = plan.sources.into_iter();
        let remotes = sources.map(|source| self.remote(config, card, renew_every, source));
        Ok((digest.finish(), remotes.collect::<Result<_, _>>()?))
    }

    fn remote(
        &self,
        config: &WorkerConfig,
        card: &EngineCard,
        renew_every: Option<Duration>,
        plan: SourcePlan,
    ) -> Result<Remote, Failure> {
        let malformed = |detail: String| Failure::new(LoadFailure::HandshakeMalformed, detail);
        let rank = plan.rank;
        let is_it = |worker: &&WorkerCard| worker.rank == rank;
        let worker = card.workers.iter().find(is_it);
        let worker =
            worker.ok_or_else(|| malformed(format!("engine {} describes no {rank}", card.engine)))?;
        if config.checksums && !plan.is_identical() {
            let detail = format!(
                "checksums are on, and can be compared only where blocks are the same byte for byte; those of {rank} of \
                 engine {} are not like ours",
                card.engine
            );
            return Err(Failure::new(LoadFailure::Incompatible, detail));
        }
        let transport = worker.transports.iter().find(|t| t.name == self.transport).ok_or_else(|| {
            let theirs: Vec<&str> = worker.transports.iter().map(|t| t.name.as_str()).collect();
            Failure::new(
                LoadFailure::Incompatible,
                format!("transport: ours {}, engine {} offers {theirs:?}", self.transport, card.engine),
            )
        })?;
        let address = Address::from_bytes(transport.address.clone()).map_err(|e| malformed(e.to_string()))?;
        let keys = transport
            .keys
            .iter()
            .map(|key| RegionKey::from_bytes(key.to_vec()).map_err(|e| malformed(e.to_string())))
            .collect::<Result<_, _>>()?;
        Ok(Remote { plan, keys, renew_every, address, rank })
    }
}
