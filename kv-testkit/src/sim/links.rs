//! The network of a simulated world: handshakes, connections between workers, and their messages.

use kv_proto::handshake::{Answer, EngineCard, HandshakeError, Query};
use kv_proto::message::{OfferName, WorkerMessage};
use kv_proto::{Attempt, LoadFailure, LoadId, PeerLocator};
use kv_transport::Address;
use kv_worker::Failure;
use kv_worker::machine::io::{Fact, LinkId, SourceKey};
use kv_worker::machine::peers::Peers;

use super::canary::Canary;
use super::faults::FaultKind;
use super::invariants::Invariant;
use super::worker::HANDSHAKE_LIMIT;
use super::world::{Event, MS, Time, WorkerAt, World};

/// How far a connection has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Dialled,
    Accepted,
    Open,
    /// Broken, but D's transport still has writes in flight, and D is not told before it is quiet.
    Draining,
    Gone,
}

/// A connection between two workers.
#[derive(Debug, Clone)]
pub(super) struct Link {
    pub(super) consumer: WorkerAt,
    pub(super) producer: WorkerAt,
    dialled: LinkId,
    accepted: Option<LinkId>,
    stage: Stage,
    /// It passes nothing before.
    clogged_until: Time,
    /// A side has let go of it and hears nothing of it any more: D, P.
    let_go: [bool; 2],
    /// The attempt asked for last; for a canary.
    asked: Attempt,
}

impl Link {
    pub(super) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Until when it passes nothing, if it is so.
    pub(super) fn clogged(&self, now: Time) -> Option<Time> {
        Some(self.clogged_until).filter(|until| *until > now)
    }
}

impl World {
    pub(super) fn shake_hands(&mut self, from: WorkerAt, key: SourceKey) {
        let peer = &key.peer;
        let Some(worker) = self.worker(from) else { return };
        let query: Query = Peers::query(worker.machine.config(), peer);
        let Ok(query) = query.encode(&worker.fingerprint) else { return };
        self.tell(|| format!("worker {from} shakes hands with {}", peer.engine));
        let to = usize::from(peer.port) - 1;
        let limit = Event::HandshakeAtD { to: from, key: key.clone(), result: Err(unanswered(peer)) };
        if !self.passes(from.engine, to) || self.strikes(FaultKind::HandshakeLost) {
            self.tell(|| "   …which is lost".to_owned());
            return self.after(HANDSHAKE_LIMIT, limit);
        }
        // The answer comes before the limit, or the limit comes.
        self.after(HANDSHAKE_LIMIT, limit);
        let wait = self.dice.between(1, 6) * MS;
        self.after(wait, Event::HandshakeAtP { from, key, query });
    }

    pub(super) fn handshake_at_p(&mut self, from: WorkerAt, key: SourceKey, query: Vec<u8>) {
        let peer = &key.peer;
        let index = usize::from(peer.port) - 1;
        let engine = &self.engines[index];
        if engine.paused_until > self.now {
            let until = engine.paused_until;
            return self.at(until, Event::HandshakeAtP { from, key, query });
        }
        let Some(card) = &engine.card else { return };
        let answer = kv_handshake::answer(card, true, &query);
        if !self.passes(index, from.engine) || self.strikes(FaultKind::HandshakeLost) {
            return self.tell(|| format!("the answer to the handshake of {from} is lost"));
        }
        let ignores_life = self.has(Canary::IncarnationIgnored);
        let Some(worker) = self.worker(from) else { return };
        let ours = worker.fingerprint.clone();
        let mut result = Answer::decode(&answer, &ours, &peer.engine, peer.incarnation);
        if ignores_life && let Err(HandshakeError::WrongEngine { got_life, .. }) = &result {
            result = Answer::decode(&answer, &ours, &peer.engine, *got_life);
        }
        let result = result.map(Box::new).map_err(|error| refusal(&error));
        let wait = self.dice.between(1, 6) * MS;
        self.after(wait, Event::HandshakeAtD { to: from, key, result });
    }

    pub(super) fn handshake_at_d(
        &mut self,
        to: WorkerAt,
        key: SourceKey,
        result: Result<Box<EngineCard>, Failure>,
    ) {
        if let Some(until) = self.stands_still(to) {
            return self.at(until, Event::HandshakeAtD { to, key, result });
        }
        self.give(to, Fact::HandshakeEnded { key, result });
    }

    pub(super) fn connect(&mut self, from: WorkerAt, dialled: LinkId, address: &Address) {
        let text = String::from_utf8_lossy(address.as_bytes()).into_owned();
        let mut parts = text.split(' ').filter_map(|part| part.parse::<u32>().ok());
        let (Some(engine), Some(life), Some(rank)) = (parts.next(), parts.next(), parts.next()) else {
            return self.violate(Invariant::Calm, format!("address {text:?} was not made here"));
        };
        let producer = WorkerAt { engine: engine as usize, life, rank: rank as usize };
        let id = self.fresh();
        let link = Link {
            consumer: from,
            producer,
            dialled,
            accepted: None,
            stage: Stage::Dialled,
            clogged_until: 0,
            let_go: [false; 2],
            asked: Attempt(0),
        };
        self.links.insert(id, link);
        let wait = self.dice.between(1, 4) * MS;
        if self.passes(from.engine, producer.engine) {
            self.after(wait, Event::LinkAtP { link: id });
        } else {
            self.after(250 * MS, Event::LinkGone { link: id });
        }
    }

    pub(super) fn link_at_p(&mut self, id: u64) {
        let Some(link) = self.links.get(&id).cloned() else { return };
        let wait = self.dice.between(1, 4) * MS;
        let Some(worker) = self.worker(link.producer) else {
            return self.after(wait, Event::LinkGone { link: id });
        };
        let accepted = LinkId::Accepted(worker.next_accepted);
        worker.next_accepted += 1;
        if let Some(link) = self.links.get_mut(&id) {
            link.accepted = Some(accepted);
            link.stage = Stage::Accepted;
        }
        self.give(link.producer, Fact::LinkAccepted { link: accepted });
        self.after(wait, Event::LinkAtD { link: id });
    }

    pub(super) fn link_at_d(&mut self, id: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.stage != Stage::Accepted {
            return;
        }
        link.stage = Stage::Open;
        let (consumer, dialled) = (link.consumer, link.dialled);
        self.give(consumer, Fact::LinkConnected { link: dialled });
    }

    /// A connection breaks: reads over it end first, then both sides hear of it.
    pub(super) fn link_gone(&mut self, id: u64) {
        if let Some(producer) = self.links.get(&id).map(|link| link.producer) {
            self.terms_unsure(producer, id);
        }
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.stage == Stage::Gone {
            return;
        }
        let detail = || "connection lost".to_owned();
        let was = std::mem::replace(&mut link.stage, Stage::Draining);
        let link = link.clone();
        self.tell(|| format!("the connection of {} and {} is lost", link.consumer, link.producer));
        if let (Some(accepted), false) = (link.accepted, was == Stage::Draining) {
            self.give(link.producer, Fact::LinkLost { link: accepted, detail: detail() });
        }
        if was == Stage::Open
            && let Some(wait) = self.writes_in_flight(id)
        {
            return self.after(wait, Event::LinkGone { link: id });
        }
        if let Some(link) = self.links.get_mut(&id) {
            link.stage = Stage::Gone;
        }
        self.fail_reads_over(id);
        self.links.remove(&id);
        self.give(link.consumer, Fact::LinkLost { link: link.dialled, detail: detail() });
    }

    pub(super) fn break_links_of(&mut self, engine: usize, life: u32) {
        let of = |at: WorkerAt| at.engine == engine && at.life == life;
        let broken: Vec<u64> =
            self.links.iter().filter(|(_, l)| of(l.consumer) || of(l.producer)).map(|(id, _)| *id).collect();
        for link in broken {
            let wait = self.dice.between(1, 20) * MS;
            self.after(wait, Event::LinkGone { link });
        }
    }

    fn find(&self, at: WorkerAt, name: LinkId) -> Option<u64> {
        self.links.iter().find_map(|(id, link)| {
            let mine = match name {
                LinkId::Dialled(_) => link.consumer == at && link.dialled == name,
                LinkId::Accepted(_) => link.producer == at && link.accepted == Some(name),
            };
            mine.then_some(*id)
        })
    }

    pub(super) fn disconnect(&mut self, at: WorkerAt, name: LinkId) {
        let Some(id) = self.find(at, name) else { return };
        if let Some(link) = self.links.get_mut(&id) {
            link.let_go[usize::from(matches!(name, LinkId::Accepted(_)))] = true;
        }
        self.after(MS, Event::LinkGone { link: id });
    }

    pub(super) fn link_of(&self, at: WorkerAt, name: LinkId) -> Option<u64> {
        self.find(at, name).filter(|id| self.links.get(id).is_some_and(Link::is_open))
    }

    pub(super) fn send(&mut self, at: WorkerAt, name: LinkId, message: WorkerMessage) {
        let Some(id) = self.find(at, name) else { return };
        let Some(link) = self.links.get(&id).cloned() else { return };
        let to_producer = matches!(name, LinkId::Dialled(_));
        let (from, to) =
            if to_producer { (link.consumer, link.producer) } else { (link.producer, link.consumer) };
        let Ok(bytes) = message.encode() else {
            return self.violate(Invariant::Calm, "a message cannot be encoded".to_owned());
        };
        if let WorkerMessage::ReadDone { lease, attempt, .. } = &message
            && self.has(Canary::NoConfirmation)
        {
            self.confirm_unasked(at, LoadId(attempt.0), *lease);
        }
        if let WorkerMessage::ReadDone { attempt, .. } = &message {
            let load = LoadId(attempt.0);
            self.client_of_load_goes(at.engine, load, FaultKind::GoneConfirming, "while P is asked");
        }
        self.tell(|| format!("{from} to {to}: {}", words(&message)));
        if !self.passes(from.engine, to.engine) || self.strikes(FaultKind::MessageLost) {
            return self.tell(|| "   …which is lost".to_owned());
        }
        let mut wait = self.dice.between(1, 5) * MS;
        if self.strikes(FaultKind::MessageLate) {
            wait += self.dice.between(20, 900) * MS;
            self.tell(|| "   …which is late".to_owned());
        }
        if self.strikes(FaultKind::LinkClogged) {
            let span = self.dice.between(50, 1_200) * MS;
            self.tell(|| format!("the connection of {from} and {to} passes nothing for {} ms", span / MS));
            if let Some(link) = self.links.get_mut(&id) {
                link.clogged_until = self.now + span;
            }
        }
        if self.strikes(FaultKind::MessageTwice) {
            let again = wait + self.dice.between(1, 600) * MS;
            self.tell(|| "   …which will arrive twice".to_owned());
            self.after(again, Event::Message { link: id, to_producer, bytes: bytes.clone() });
        }
        self.after(wait, Event::Message { link: id, to_producer, bytes });
        if self.strikes(FaultKind::LinkBroken) {
            let wait = self.dice.between(0, 10) * MS;
            self.after(wait, Event::LinkGone { link: id });
        }
    }

    pub(super) fn message(&mut self, id: u64, to_producer: bool, bytes: Vec<u8>) {
        let Some(link) = self.links.get(&id).cloned() else { return };
        let to = if to_producer { link.producer } else { link.consumer };
        let name = if to_producer { link.accepted } else { Some(link.dialled) };
        let passes =
            !matches!(link.stage, Stage::Draining | Stage::Gone) && !link.let_go[usize::from(to_producer)];
        let (true, Some(name)) = (passes, name) else { return };
        if let Some(until) = link.clogged(self.now) {
            return self.at(until, Event::Message { link: id, to_producer, bytes });
        }
        if let Some(until) = self.stands_still(to) {
            return self.at(until, Event::Message { link: id, to_producer, bytes });
        }
        let message = WorkerMessage::decode(&bytes).map(|m| {
            self.renew_terms(to, id, &m);
            self.mutate(id, &link, m)
        });
        if let (true, Ok(WorkerMessage::ReadDone { more: false, .. })) = (to_producer, &message)
            && self.has(Canary::ConsumerCountedTwice)
        {
            for sibling in self.siblings(&link) {
                self.give(to, Fact::MessageArrived { link: sibling, message: message.clone() });
            }
        }
        self.give(to, Fact::MessageArrived { link: name, message });
    }

    /// Connections of other ranks of the same consumer to the same worker.
    fn siblings(&self, of: &Link) -> Vec<LinkId> {
        let beside = |link: &&Link| {
            link.is_open()
                && link.producer == of.producer
                && link.consumer != of.consumer
                && (link.consumer.engine, link.consumer.life) == (of.consumer.engine, of.consumer.life)
        };
        self.links.values().filter(beside).filter_map(|link| link.accepted).collect()
    }

    /// What a canary makes of a message.
    fn mutate(&mut self, id: u64, link: &Link, message: WorkerMessage) -> WorkerMessage {
        match (self.canary, message) {
            (Some(Canary::RenewalForgotten), WorkerMessage::Renew { seq, all, .. }) => {
                WorkerMessage::Renew { seq, all, wanted: Vec::new(), dropped: Vec::new() }
            }
            (Some(Canary::CheckIgnored), WorkerMessage::Checked { lease, attempt, blocks, .. }) => {
                WorkerMessage::Checked { lease, attempt, blocks, held: true }
            }
            // The list of what is not held would end the load before its check is answered.
            (Some(Canary::CheckIgnored), WorkerMessage::NotHeld { .. }) => {
                WorkerMessage::NotHeld { leases: Vec::new() }
            }
            (
                Some(Canary::UnequalTakenAsEqual),
                WorkerMessage::Compared { lease, attempt, from, held, .. },
            ) => WorkerMessage::Compared { lease, attempt, from, equal: u32::MAX, held },
            (Some(Canary::LapsedIgnored), WorkerMessage::Lapsed { lease, attempt }) => {
                WorkerMessage::Confirmed { lease, attempt }
            }
            (Some(Canary::AttemptIgnored), WorkerMessage::ReadDone { lease, attempt, offer, more }) => {
                if let Some(link) = self.links.get_mut(&id) {
                    link.asked = attempt;
                }
                WorkerMessage::ReadDone { lease, attempt: Attempt(1), offer, more }
            }
            (Some(Canary::AttemptIgnored), WorkerMessage::Confirmed { lease, .. }) => {
                WorkerMessage::Confirmed { lease, attempt: link.asked }
            }
            (Some(Canary::AttemptIgnored), WorkerMessage::Lapsed { lease, .. }) => {
                WorkerMessage::Lapsed { lease, attempt: link.asked }
            }
            (Some(Canary::EarlyEndRefused), WorkerMessage::Confirmed { lease, attempt })
                if self.granted(link.producer, lease).is_none() =>
            {
                WorkerMessage::Lapsed { lease, attempt }
            }
            (Some(Canary::EarlyEndRefused), WorkerMessage::ReadDone { lease, attempt, offer, more })
                if self.granted(link.producer, lease).is_none() =>
            {
                // As if the ledger had answered at once that it does not know the lease.
                if let Ok(bytes) = (WorkerMessage::Lapsed { lease, attempt }).encode() {
                    self.after(MS, Event::Message { link: id, to_producer: false, bytes });
                }
                WorkerMessage::ReadDone { lease, attempt, offer, more }
            }
            (
                Some(
                    Canary::OfferIgnored
                    | Canary::DigestIgnored
                    | Canary::HistoryCounted
                    | Canary::SameLife
                    | Canary::IncarnationIgnored,
                ),
                WorkerMessage::Renew { seq, all, mut wanted, dropped },
            ) => {
                for (lease, offer) in &mut wanted {
                    *offer = self.granted(link.producer, *lease).unwrap_or(*offer);
                }
                WorkerMessage::Renew { seq, all, wanted, dropped }
            }
            (
                Some(
                    Canary::OfferIgnored
                    | Canary::DigestIgnored
                    | Canary::HistoryCounted
                    | Canary::SameLife
                    | Canary::IncarnationIgnored,
                ),
                WorkerMessage::ReadDone { lease, attempt, offer, more },
            ) => {
                // The offer's digest covers life, prompt and blocks; who ignores one of them ignores it.
                let offer = self.granted(link.producer, lease).unwrap_or(offer);
                WorkerMessage::ReadDone { lease, attempt, offer, more }
            }
            (
                Some(Canary::IncarnationIgnored),
                WorkerMessage::Hello { version, engine, incarnation, rank, topology, to_rank, .. },
            ) => {
                let to = self.life_of(link.producer).unwrap_or(incarnation);
                WorkerMessage::Hello { version, engine, incarnation, rank, topology, to, to_rank }
            }
            (Some(Canary::IncarnationIgnored), WorkerMessage::Welcome { rank, .. }) => {
                // Whatever life it is, it is taken for the one that was wanted.
                let wanted = super::engine::Engine::incarnation(link.producer.engine, 1, false);
                WorkerMessage::Welcome { incarnation: wanted, rank }
            }
            (_, message) => message,
        }
    }

    fn life_of(&mut self, at: WorkerAt) -> Option<kv_proto::Incarnation> {
        self.worker(at).map(|worker| worker.machine.config().incarnation)
    }
}

fn unanswered(peer: &PeerLocator) -> Failure {
    Failure::new(LoadFailure::HandshakeUnreachable, format!("{} does not answer", peer.engine))
}

fn refusal(error: &HandshakeError) -> Failure {
    let reason = match error {
        HandshakeError::WrongEngine { .. } => LoadFailure::WrongPeer,
        HandshakeError::Refused { .. } => LoadFailure::HandshakeRefused,
        HandshakeError::Incompatible { .. } | HandshakeError::Version { .. } => LoadFailure::Incompatible,
        _ => LoadFailure::HandshakeMalformed,
    };
    Failure::new(reason, error.to_string())
}

fn words(message: &WorkerMessage) -> String {
    match message {
        WorkerMessage::Hello { to, .. } => format!("Hello to life {to}"),
        WorkerMessage::Renew { seq, all, wanted, dropped } => {
            let list = if *all { " all" } else { "" };
            format!("Renew {seq}{list}, wanted {}, dropped {}", leases(wanted), leases(dropped))
        }
        WorkerMessage::NotHeld { leases: names } => format!("NotHeld {}", leases(names)),
        other => format!("{other:?}"),
    }
}

fn leases(names: &[OfferName]) -> String {
    format!("{:?}", names.iter().map(|(lease, _)| lease.0).collect::<Vec<_>>())
}
