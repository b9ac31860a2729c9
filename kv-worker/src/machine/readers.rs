//! The producer's side of connections: who is at the other end, and what it says about leases.
//!
//! ```text
//!  Ungreeted ──Hello fits──► Greeted ──lost──► (gone)
//!      └──Hello does not fit, anything else, or too late──► (let go)
//! ```

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use kv_proto::message::{HelloRefusal, LEASES_PER_MESSAGE_MAX, WorkerMessage};
use kv_proto::{Attempt, CodecError, LeaseId, Moment, PROTOCOL_VERSION, Plan, ProducerOrder, Timers};

use crate::config::WorkerConfig;
use crate::machine::io::{Decision, LinkId};
use crate::machine::ledger::{Answer, Ending, LateAnswer, Ledger, Reader, ReaderEnding};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Link {
    Ungreeted { until: Moment },
    Greeted { reader: Reader, expected: u32 },
}

/// Counters of what consumers did wrong. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReaderStats {
    /// Consumers greeted.
    pub greeted: u64,
    /// Consumers whose `Hello` did not fit.
    pub unwelcome: u64,
    /// Connections let go because they broke the protocol or never said who they are.
    pub expelled: u64,
}

impl Hash for ReaderStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The machine.
#[derive(Debug, Clone, Hash)]
pub struct Readers {
    ledger: Ledger,
    links: BTreeMap<LinkId, Link>,
    timers: Timers<LinkId>,
    stats: ReaderStats,
}

impl Readers {
    /// Without connections, over a ledger.
    pub fn new(ledger: Ledger) -> Self {
        Self { ledger, links: BTreeMap::new(), timers: Timers::default(), stats: ReaderStats::default() }
    }

    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Counters.
    pub fn stats(&self) -> ReaderStats {
        self.stats
    }

    /// When [`Readers::time_passed`] wants to be called.
    pub fn next_deadline(&self) -> Option<Moment> {
        [self.ledger.next_deadline(), self.timers.next()].into_iter().flatten().min()
    }

    /// Ends of leases since the last call, for the report.
    pub fn take_ended(&mut self) -> Vec<(LeaseId, kv_proto::LeaseEnd)> {
        self.ledger.take_ended()
    }

    /// Takes the producer's part of a plan.
    pub fn plan_taken(&mut self, now: Moment, plan: &Plan, out: &mut Vec<Decision>) {
        for order in &plan.producer {
            match order {
                ProducerOrder::Announce { lease } => self.ledger.announce(*lease),
                ProducerOrder::Grant { lease, terms, offer } => {
                    self.ledger.grant(now, *lease, *terms, *offer)
                }
                ProducerOrder::Forget { lease } => self.ledger.forget(now, *lease),
                _ => {}
            }
        }
        for late in self.ledger.take_late_answers() {
            self.answer_late(late, out);
        }
    }

    /// An early reader is answered over its newest connection; if it has none, it asks again when it has.
    fn answer_late(&self, late: LateAnswer, out: &mut Vec<Decision>) {
        let link = self.links.iter().rev().find_map(|(id, link)| match link {
            Link::Greeted { reader, .. } if *reader == late.reader => Some(*id),
            Link::Greeted { .. } | Link::Ungreeted { .. } => None,
        });
        if let Some(link) = link {
            out.push(Decision::Send { link, message: told(late.lease, late.attempt, late.answer) });
        }
    }

    /// A consumer connected; it has until the limit to say who it is.
    pub fn accepted(&mut self, now: Moment, config: &WorkerConfig, link: LinkId) {
        let until = now + config.limits.connect;
        self.timers.set(until, link);
        self.links.insert(link, Link::Ungreeted { until });
    }

    /// A consumer's connection is gone. Its leases live on until they are renewed elsewhere or expire.
    pub fn lost(&mut self, link: LinkId) {
        if let Some(Link::Ungreeted { until }) = self.links.remove(&link) {
            self.timers.clear(until, link);
        }
    }

    fn expel(&mut self, link: LinkId, out: &mut Vec<Decision>) {
        self.lost(link);
        self.stats.expelled += 1;
        out.push(Decision::Disconnect { link });
    }

    /// A consumer said something.
    pub fn message(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        link: LinkId,
        message: Result<WorkerMessage, CodecError>,
        out: &mut Vec<Decision>,
    ) {
        let Some(state) = self.links.get(&link).copied() else { return };
        let Ok(message) = message else { return self.expel(link, out) };
        match (state, message) {
            (
                Link::Ungreeted { until },
                WorkerMessage::Hello { version, incarnation, rank, topology, to, to_rank, .. },
            ) => {
                let readers = config.topology.readers_of(config.rank, topology);
                let refusal = if version != PROTOCOL_VERSION {
                    Some(HelloRefusal::Version)
                } else if to != config.incarnation {
                    Some(HelloRefusal::Incarnation)
                } else if to_rank != config.rank {
                    Some(HelloRefusal::Rank)
                } else if !readers.as_ref().is_ok_and(|readers| readers.contains(&rank)) {
                    Some(HelloRefusal::Topology)
                } else {
                    None
                };
                if let Some(reason) = refusal {
                    self.stats.unwelcome += 1;
                    let message = WorkerMessage::Unwelcome { reason, incarnation: config.incarnation };
                    out.push(Decision::Send { link, message });
                    // It is let go when it has gone by itself, or at the limit that is running.
                    return;
                }
                self.timers.clear(until, link);
                let expected = readers.map_or(1, |readers| readers.len() as u32);
                self.links.insert(link, Link::Greeted { reader: Reader { incarnation, rank }, expected });
                self.stats.greeted += 1;
                let message = WorkerMessage::Welcome { incarnation: config.incarnation, rank: config.rank };
                out.push(Decision::Send { link, message });
            }
            (Link::Greeted { .. }, WorkerMessage::Renew { leases })
                if leases.len() <= LEASES_PER_MESSAGE_MAX =>
            {
                let not_held = self.ledger.renew(now, &leases);
                if !not_held.is_empty() {
                    out.push(Decision::Send { link, message: WorkerMessage::NotHeld { leases: not_held } });
                }
            }
            (Link::Greeted { reader, expected }, WorkerMessage::ReadDone { lease, attempt, offer }) => {
                let ending = ReaderEnding { reader, attempt, ending: Ending::ReadDone, expected, offer };
                if let Some(answer) = self.ledger.ending(now, lease, ending) {
                    out.push(Decision::Send { link, message: told(lease, attempt, answer) });
                }
            }
            (Link::Greeted { reader, expected }, WorkerMessage::Release { lease, attempt, offer, .. }) => {
                let ending = ReaderEnding { reader, attempt, ending: Ending::Released, expected, offer };
                // A release is not answered.
                let _ = self.ledger.ending(now, lease, ending);
            }
            (Link::Ungreeted { .. } | Link::Greeted { .. }, _) => self.expel(link, out),
        }
    }

    /// Lets deadlines pass that have come.
    pub fn time_passed(&mut self, now: Moment, out: &mut Vec<Decision>) {
        self.ledger.time_passed(now);
        while let Some(link) = self.timers.due(now) {
            if let Some(Link::Ungreeted { until }) = self.links.get(&link)
                && *until <= now
            {
                self.expel(link, out);
            }
        }
    }
}

fn told(lease: LeaseId, attempt: Attempt, answer: Answer) -> WorkerMessage {
    match answer {
        Answer::Confirmed => WorkerMessage::Confirmed { lease, attempt },
        Answer::Lapsed => WorkerMessage::Lapsed { lease, attempt },
    }
}
