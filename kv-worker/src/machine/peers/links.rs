//! The connections to producers' workers: from the first word to the loss.

use kv_proto::message::{HelloRefusal, LEASES_PER_MESSAGE_MAX, WorkerMessage};
use kv_proto::{LoadFailure, Moment, PROTOCOL_VERSION};

use super::claim::Renewal;
use super::{Change, Peer, Peers, State, TimerKey, peer_mut};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, LinkId, SourceKey};

impl Peers {
    fn by_link(&self, link: LinkId) -> Option<SourceKey> {
        let has = |peer: &Peer| match &peer.state {
            State::Connecting { link: l, .. }
            | State::Greeting { link: l, .. }
            | State::Ready { link: l, .. } => *l == link,
            State::Idle | State::Dialling { .. } | State::Failed { .. } => false,
        };
        self.producers.iter().find_map(|(peer, producer)| {
            let source = producer.sources.iter().position(has)? as u32;
            Some(SourceKey { peer: peer.clone(), source })
        })
    }

    /// A connection stands: say who we are.
    pub fn connected(&mut self, config: &WorkerConfig, link: LinkId, out: &mut Vec<Decision>) {
        let Some(key) = self.by_link(link) else { return out.push(Decision::Disconnect { link }) };
        let Some(peer) = peer_mut(&mut self.producers, &key) else { return };
        let State::Connecting { remote, until, .. } = &peer.state else { return };
        let message = WorkerMessage::Hello {
            version: PROTOCOL_VERSION,
            engine: config.engine.clone(),
            incarnation: config.incarnation,
            rank: config.rank,
            topology: config.topology,
            to: key.peer.incarnation,
            to_rank: remote.rank,
        };
        out.push(Decision::Send { link, message });
        peer.state = State::Greeting { link, remote: remote.clone(), until: *until };
    }

    /// A read has ended because its connection is gone. Reads end before the loss is told; what is to be told to the
    /// producer waits for the next connection. Of one that was replaced this is no news.
    pub fn read_lost(&mut self, key: &SourceKey, over: LinkId) {
        if let Some(Peer { state: State::Ready { link, is_gone, .. }, .. }) = self.get_mut(key) {
            *is_gone |= *link == over;
        }
    }

    /// A connection is gone.
    pub fn lost(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        link: LinkId,
        detail: &str,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        let key = self.by_link(link)?;
        let peer = peer_mut(&mut self.producers, &key)?;
        let State::Ready { since, .. } = peer.state else {
            let failure = Failure::new(LoadFailure::ConnectFailed, detail);
            return self.fail(now, config, &key, failure);
        };
        self.stats.lost += 1;
        self.stop_timers(&key);
        let peer = peer_mut(&mut self.producers, &key)?;
        if now.since(since) < config.limits.retry_min {
            // Ready and lost again and again would be a storm of handshakes.
            return self.fail(now, config, &key, Failure::new(LoadFailure::PeerLost, detail));
        }
        peer.failures = 0;
        if peer.is_wanted() {
            self.dial(now, config, &key, out);
        } else {
            self.retire(&key);
        }
        None
    }

    /// A producer said something.
    pub fn message(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        link: LinkId,
        message: Option<WorkerMessage>,
        out: &mut Vec<Decision>,
    ) -> Option<Change> {
        let key = self.by_link(link)?;
        let peer = self.get(&key)?;
        match (&peer.state, message) {
            (State::Greeting { remote, .. }, Some(WorkerMessage::Welcome { incarnation, rank }))
                if incarnation == key.peer.incarnation && rank == remote.rank =>
            {
                self.greeted(now, config, &key, out);
                Some(Change::Ready(key))
            }
            (State::Greeting { .. }, Some(WorkerMessage::Unwelcome { reason, incarnation })) => {
                let reason_code = match reason {
                    HelloRefusal::Incarnation | HelloRefusal::Rank => LoadFailure::WrongPeer,
                    _ => LoadFailure::Incompatible,
                };
                let detail = format!(
                    "engine {} in life {} was wanted; life {incarnation} answers and refuses: {reason:?}",
                    key.peer.engine, key.peer.incarnation
                );
                out.push(Decision::Disconnect { link });
                self.fail(now, config, &key, Failure::new(reason_code, detail))
            }
            // The contract promises no order: an answer to what was asked over an earlier connection may overtake
            // the greeting. It is dropped, since it is asked for again.
            (
                State::Greeting { .. },
                Some(
                    WorkerMessage::Confirmed { .. }
                    | WorkerMessage::Lapsed { .. }
                    | WorkerMessage::Checked { .. }
                    | WorkerMessage::Compared { .. }
                    | WorkerMessage::NotHeld { .. }
                    | WorkerMessage::Relist {},
                ),
            ) => None,
            (State::Ready { .. }, Some(WorkerMessage::NotHeld { leases }))
                if leases.len() <= LEASES_PER_MESSAGE_MAX =>
            {
                if let Some(peer) = self.get_mut(&key) {
                    for name in &leases {
                        peer.void(*name);
                    }
                }
                Some(Change::NotHeld(key, leases))
            }
            (State::Ready { .. }, Some(WorkerMessage::Relist {})) => {
                self.relist(now, &key);
                None
            }
            (State::Ready { .. }, Some(WorkerMessage::Checked { lease, attempt, blocks, held })) => {
                Some(Change::Checked(key, lease, attempt, blocks, held))
            }
            (State::Ready { .. }, Some(WorkerMessage::Compared { lease, attempt, from, equal, held })) => {
                Some(Change::Compared(key, lease, attempt, (from, equal, held)))
            }
            (State::Ready { .. }, Some(WorkerMessage::Confirmed { lease, attempt })) => {
                Some(Change::Answered(key, lease, attempt, true))
            }
            (State::Ready { .. }, Some(WorkerMessage::Lapsed { lease, attempt })) => {
                Some(Change::Answered(key, lease, attempt, false))
            }
            // Anything else breaks the protocol: this connection is not worth having.
            _ => {
                out.push(Decision::Disconnect { link });
                let detail = format!("engine {} broke the protocol of the workers", key.peer.engine);
                self.fail(now, config, &key, Failure::new(LoadFailure::PeerLost, detail))
            }
        }
    }

    fn greeted(&mut self, now: Moment, config: &WorkerConfig, key: &SourceKey, out: &mut Vec<Decision>) {
        self.stop_timers(key);
        let Some(peer) = peer_mut(&mut self.producers, key) else { return };
        let State::Greeting { link, remote, .. } = &peer.state else { return };
        let link = *link;
        let idle_at = now + config.limits.peer_idle;
        let renewal = Renewal::from_start(peer.claims.iter());
        peer.state =
            State::Ready { link, remote: remote.clone(), since: now, idle_at, renewal, is_gone: false };
        self.timers.set(idle_at, TimerKey::State(key.clone()));
        for (((lease, offer), attempt), reason) in std::mem::take(&mut peer.releases) {
            out.push(Decision::Send {
                link,
                message: WorkerMessage::Release { lease, attempt, offer, reason },
            });
        }
        self.stats.ready += 1;
        self.renew(now, config, key, out);
    }
}
