//! The producer's side of connections: who is at the other end, and what it says about leases.
//!
//! ```text
//!  Ungreeted ──Hello fits──► Greeted ──lost──► (gone)
//!      └──Hello does not fit, anything else, or too late──► (let go)
//! ```

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use kv_proto::message::{HelloRefusal, LEASES_PER_MESSAGE_MAX, OfferName, WorkerMessage};
use kv_proto::{
    Attempt, BlockLayout, CodecError, LeaseId, Moment, PROTOCOL_VERSION, Plan, ProducerOrder, ReleaseReason,
    Timers,
};

use crate::config::WorkerConfig;
use crate::machine::io::{Decision, LinkId, SelfCheck};
use crate::machine::ledger::{Answer, Ending, LateAnswer, Ledger, READERS_MAX, Reader, ReaderEnding};

mod questions;

use questions::{Asked, Questions};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum TimerKey {
    Link(LinkId),
    Question(u64),
    SelfCheck,
}

/// Whether this worker looks at itself, as a consumer would.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Looking {
    Idle,
    Running {
        until: Moment,
    },
    /// The last one is over; the next begins no sooner.
    Resting {
        until: Moment,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Link {
    Ungreeted { until: Moment },
    Greeted { reader: Reader, expected: u32, next_seq: u64 },
}

/// Counters of what consumers did wrong. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct ReaderStats {
    /// Consumers greeted.
    pub greeted: u64,
    /// Consumers whose `Hello` did not fit.
    pub unwelcome: u64,
    /// Connections let go because they broke the protocol or never said who they are.
    pub expelled: u64,
    /// Checks that were answered: the lease held for a portion of a load.
    pub checks: u64,
    /// Releases that say that a load from here failed: a reason for a self check.
    pub loads_failed: u64,
    /// Self checks that ended with an answer: own memory was to be read over the own transport.
    pub self_checks: u64,
    /// Of these, how many failed: consumers can read nothing from here.
    pub self_checks_failed: u64,
    /// Questions whether blocks are like ours that were looked into.
    pub compared: u64,
    /// Of these, how many found a difference.
    pub unequal: u64,
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
    questions: Questions,
    looking: Looking,
    timers: Timers<TimerKey>,
    stats: ReaderStats,
}

impl Readers {
    /// Without connections, over a ledger.
    pub fn new(ledger: Ledger) -> Self {
        Self {
            ledger,
            links: BTreeMap::new(),
            questions: Questions::default(),
            looking: Looking::Idle,
            timers: Timers::default(),
            stats: ReaderStats::default(),
        }
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
                ProducerOrder::Revoke { lease } => self.ledger.revoke(now, *lease),
                _ => {}
            }
        }
        for late in self.ledger.take_late_answers() {
            self.answer_late(late, out);
        }
        self.answer_waiting(out);
        self.tell_not_held(out);
    }

    /// An early reader is answered over its newest connection; if it has none, it asks again when it has.
    fn answer_late(&self, late: LateAnswer, out: &mut Vec<Decision>) {
        if let Some(link) = self.newest_link(late.reader) {
            out.push(Decision::Send { link, message: told(late.lease, late.attempt, late.answer) });
        }
    }

    fn newest_link(&self, wanted: Reader) -> Option<LinkId> {
        self.links.iter().rev().find_map(|(id, link)| match link {
            Link::Greeted { reader, .. } if *reader == wanted => Some(*id),
            Link::Greeted { .. } | Link::Ungreeted { .. } => None,
        })
    }

    /// Tells readers which of their leases are over; one that cannot be told finds out when it asks.
    fn tell_not_held(&mut self, out: &mut Vec<Decision>) {
        let mut by_reader: BTreeMap<Reader, Vec<OfferName>> = BTreeMap::new();
        for (reader, name) in self.ledger.take_notices() {
            by_reader.entry(reader).or_default().push(name);
        }
        for (reader, names) in by_reader {
            let Some(link) = self.newest_link(reader) else { continue };
            for leases in names.chunks(LEASES_PER_MESSAGE_MAX) {
                out.push(Decision::Send {
                    link,
                    message: WorkerMessage::NotHeld { leases: leases.to_vec() },
                });
            }
        }
    }

    /// A consumer connected; it has until the limit to say who it is.
    pub fn accepted(&mut self, now: Moment, config: &WorkerConfig, link: LinkId) {
        let until = now + config.limits.connect;
        self.timers.set(until, TimerKey::Link(link));
        self.links.insert(link, Link::Ungreeted { until });
    }

    /// A consumer's connection is gone. If it was its last one, it has the leases' grace to come back.
    pub fn lost(&mut self, now: Moment, link: LinkId) {
        self.questions_lost(link);
        match self.links.remove(&link) {
            Some(Link::Ungreeted { until }) => self.timers.clear(until, TimerKey::Link(link)),
            Some(Link::Greeted { reader, .. }) if self.newest_link(reader).is_none() => {
                self.ledger.reader_lost(now, reader);
            }
            Some(Link::Greeted { .. }) | None => {}
        }
    }

    fn expel(&mut self, now: Moment, link: LinkId, out: &mut Vec<Decision>) {
        self.lost(now, link);
        self.stats.expelled += 1;
        out.push(Decision::Disconnect { link });
    }

    /// A consumer said something. The layout is that of our blocks.
    pub fn message(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        layout: &BlockLayout,
        link: LinkId,
        message: Result<WorkerMessage, CodecError>,
        out: &mut Vec<Decision>,
    ) {
        let Some(state) = self.links.get(&link).copied() else { return };
        let Ok(message) = message else { return self.expel(now, link, out) };
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
                } else if !readers.as_ref().is_ok_and(|r| r.contains(&rank) && r.len() <= READERS_MAX) {
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
                self.timers.clear(until, TimerKey::Link(link));
                let expected = readers.map_or(1, |readers| readers.len() as u32);
                let reader = Reader { incarnation, rank };
                self.links.insert(link, Link::Greeted { reader, expected, next_seq: 0 });
                self.ledger.heard(now, reader);
                self.stats.greeted += 1;
                let message = WorkerMessage::Welcome { incarnation: config.incarnation, rank: config.rank };
                out.push(Decision::Send { link, message });
            }
            (Link::Greeted { reader, .. }, WorkerMessage::Renew { seq, all, wanted, dropped })
                if wanted.len().max(dropped.len()) <= LEASES_PER_MESSAGE_MAX =>
            {
                self.renewed(now, link, reader, (seq, all), &wanted, &dropped, out);
            }
            (
                Link::Greeted { reader, expected, .. },
                WorkerMessage::ReadDone { lease, attempt, offer, more },
            ) => {
                let how = if more { Ending::ReadMore } else { Ending::ReadDone };
                let ending = ReaderEnding { reader, attempt, ending: how, expected, offer };
                if let Some(answer) = self.ledger.ending(now, lease, ending) {
                    out.push(Decision::Send { link, message: told(lease, attempt, answer) });
                }
            }
            (Link::Greeted { reader, .. }, WorkerMessage::Check { lease, attempt, offer, blocks }) => {
                if let Some(held) = self.ledger.holds(lease, reader, offer) {
                    self.stats.checks += u64::from(held);
                    let message = WorkerMessage::Checked { lease, attempt, blocks, held };
                    out.push(Decision::Send { link, message });
                }
            }
            (
                Link::Greeted { reader, .. },
                WorkerMessage::Compare { lease, attempt, offer, from, groups, digests },
            ) if questions::fits(layout, &groups, &digests) => {
                let asked = Asked { name: (lease, offer), attempt, from, theirs: digests };
                self.compare(now, config, link, reader, asked, groups, out);
            }
            (
                Link::Greeted { reader, expected, .. },
                WorkerMessage::Release { lease, attempt, offer, reason },
            ) => {
                if reason == ReleaseReason::LoadFailed {
                    self.stats.loads_failed += 1;
                    self.check_self(now, config, out);
                }
                let ending = ReaderEnding { reader, attempt, ending: Ending::Released, expected, offer };
                // A release is not answered.
                let _ = self.ledger.ending(now, lease, ending);
            }
            (Link::Ungreeted { .. } | Link::Greeted { .. }, _) => self.expel(now, link, out),
        }
        self.tell_not_held(out);
    }

    /// A load from here failed. Many may fail at once: one look is enough for a while.
    fn check_self(&mut self, now: Moment, config: &WorkerConfig, out: &mut Vec<Decision>) {
        match self.looking {
            Looking::Idle => {}
            Looking::Resting { until } if until <= now => {}
            Looking::Resting { .. } | Looking::Running { .. } => return,
        }
        let until = now + config.limits.connect + config.limits.read + config.limits.stall;
        self.looking = Looking::Running { until };
        self.timers.set(until, TimerKey::SelfCheck);
        out.push(Decision::CheckSelf);
    }

    /// A self check ended. One that was late has been counted as failed.
    pub fn self_checked(&mut self, now: Moment, config: &WorkerConfig, found: SelfCheck) {
        let Looking::Running { until } = self.looking else { return };
        self.timers.clear(until, TimerKey::SelfCheck);
        let rest = config.limits.self_check_every;
        self.looking = if rest.is_zero() { Looking::Idle } else { Looking::Resting { until: now + rest } };
        self.stats.self_checks += u64::from(found != SelfCheck::Unknown);
        self.stats.self_checks_failed += u64::from(found == SelfCheck::Unreadable);
    }

    /// A renewal is a sign of life in any case; what it names counts only in its turn.
    #[allow(clippy::too_many_arguments)] // The message's own parts, with time, connection and output.
    fn renewed(
        &mut self,
        now: Moment,
        link: LinkId,
        from: Reader,
        (seq, all): (u64, bool),
        wanted: &[OfferName],
        dropped: &[OfferName],
        out: &mut Vec<Decision>,
    ) {
        // What is still under way over a connection of before says no more than that the reader lived.
        if self.newest_link(from) != Some(link) {
            return self.ledger.heard(now, from);
        }
        let Some(Link::Greeted { next_seq, .. }) = self.links.get_mut(&link) else { return };
        let in_turn = if all { seq >= *next_seq } else { seq == *next_seq };
        if in_turn {
            *next_seq = seq.saturating_add(1);
            if all {
                self.ledger.relisted(now, from);
            }
            self.ledger.drop_wishes(now, from, dropped);
            let leases = self.ledger.want(now, from, wanted);
            if !leases.is_empty() {
                out.push(Decision::Send { link, message: WorkerMessage::NotHeld { leases } });
            }
        } else if seq > *next_seq {
            // Something before it is missing. What is wanted can be taken all the same; the new list corrects the rest.
            let leases = self.ledger.want(now, from, wanted);
            if !leases.is_empty() {
                out.push(Decision::Send { link, message: WorkerMessage::NotHeld { leases } });
            }
            out.push(Decision::Send { link, message: WorkerMessage::Relist {} });
        }
        self.ledger.heard(now, from);
    }

    /// Lets deadlines pass that have come.
    pub fn time_passed(&mut self, now: Moment, out: &mut Vec<Decision>) {
        self.ledger.time_passed(now);
        while let Some(key) = self.timers.due(now) {
            match key {
                TimerKey::Link(link) => {
                    if let Some(Link::Ungreeted { until }) = self.links.get_mut(&link)
                        && *until <= now
                    {
                        match self.looking {
                            // It may be this worker's own, which has nothing to say.
                            Looking::Running { until: later } if later > now => {
                                *until = later;
                                self.timers.set(later, TimerKey::Link(link));
                            }
                            _ => self.expel(now, link, out),
                        }
                    }
                }
                TimerKey::Question(number) => self.question_late(now, number),
                TimerKey::SelfCheck => {
                    if let Looking::Running { until } = self.looking
                        && until <= now
                    {
                        self.looking = Looking::Idle;
                        self.stats.self_checks += 1;
                        self.stats.self_checks_failed += 1;
                    }
                }
            }
        }
        self.tell_not_held(out);
    }
}

fn told(lease: LeaseId, attempt: Attempt, answer: Answer) -> WorkerMessage {
    match answer {
        Answer::Confirmed => WorkerMessage::Confirmed { lease, attempt },
        Answer::Lapsed => WorkerMessage::Lapsed { lease, attempt },
    }
}
