//! The producer's ledger: which leases are held, and who has ended them.
//!
//! ```text
//!  Announced ──grant──► Held ──every reader ended, or time over──► Ended ──remembered long enough──► (gone)
//!      └──forget──────────────────────────────────────────────────────┘
//! ```
//!
//! The one thing that matters: [`Answer::Confirmed`] is given for a lease only while it is held and its end has
//! not been reported to the scheduler half. Blocks are freed on that report alone, so a confirmed read cannot have
//! seen a block's next owner.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::time::Duration;

use kv_proto::{Attempt, Incarnation, LeaseEnd, LeaseId, LeaseTerms, Moment, OfferDigest, Rank, Timers};

/// Who ends a lease: one rank of one life of a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reader {
    /// The consumer's life.
    pub incarnation: Incarnation,
    /// Its rank.
    pub rank: Rank,
}

/// How a reader ends a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ending {
    /// It has read, and wants to know whether the lease held.
    ReadDone,
    /// It will not read, or not any more.
    Released,
}

/// What a reader is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The lease held until now.
    Confirmed,
    /// It did not.
    Lapsed,
}

/// An answer that could not be given when it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LateAnswer {
    /// Whom to tell.
    pub reader: Reader,
    /// The lease.
    pub lease: LeaseId,
    /// Which try is answered.
    pub attempt: Attempt,
    /// What to tell.
    pub answer: Answer,
}

/// One reader's ending, with the number of readers its consumer has on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReaderEnding {
    /// Who.
    pub reader: Reader,
    /// Which try.
    pub attempt: Attempt,
    /// How.
    pub ending: Ending,
    /// How many readers this reader's consumer has on this rank, from the two topologies.
    pub expected: u32,
    /// The offer that it read, or will not read, as it reached the reader.
    pub offer: OfferDigest,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Lease {
    /// Endings that came early, in the order in which they came.
    Announced {
        early: Vec<ReaderEnding>,
    },
    Held {
        offer: OfferDigest,
        expires: Moment,
        renewal: Duration,
        latest: Moment,
        ends: BTreeMap<Reader, (Attempt, Ending)>,
    },
    Ended {
        confirmed: BTreeSet<(Reader, Attempt, OfferDigest)>,
        forget_at: Moment,
    },
}

/// Most early endings kept for one announced lease; a consumer has as many as it has readers here.
const EARLY_MAX: usize = 64;
/// Most readers kept for one held lease, over all consumers that try.
const READERS_MAX: usize = 256;

/// Counters. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LedgerStats {
    /// `ReadDone` answered with `Confirmed`, repetitions excluded.
    pub confirmed: u64,
    /// `ReadDone` answered with `Lapsed`.
    pub lapsed: u64,
    /// Endings that came before their lease was granted.
    pub early: u64,
    /// Endings that were known already, or of leases that were not.
    pub strays: u64,
    /// Endings for an offer that was not made: parameters were changed on the way.
    pub foreign_offers: u64,
    /// Leases that ended by time.
    pub expired: u64,
    /// Renewals that found their lease held.
    pub renewed: u64,
}

impl Hash for LedgerStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The machine.
#[derive(Debug, Clone, Hash)]
pub struct Ledger {
    remember: Duration,
    /// The lowest id never seen: announcements come in order, so a lower one that is unknown is over for good.
    next: u64,
    leases: BTreeMap<LeaseId, Lease>,
    timers: Timers<LeaseId>,
    ended: Vec<(LeaseId, LeaseEnd)>,
    late: Vec<LateAnswer>,
    stats: LedgerStats,
}

impl Ledger {
    /// An empty ledger that remembers ended leases for so long.
    pub fn new(remember: Duration) -> Self {
        Self {
            remember,
            next: 0,
            leases: BTreeMap::new(),
            timers: Timers::default(),
            ended: Vec::new(),
            late: Vec::new(),
            stats: LedgerStats::default(),
        }
    }

    /// Counters.
    pub fn stats(&self) -> LedgerStats {
        self.stats
    }

    /// Leases in the ledger, in whatever state.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// When [`Ledger::time_passed`] wants to be called.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.next()
    }

    /// Ends since the last call, for the report.
    pub fn take_ended(&mut self) -> Vec<(LeaseId, LeaseEnd)> {
        std::mem::take(&mut self.ended)
    }

    /// Answers that were kept back until now.
    pub fn take_late_answers(&mut self) -> Vec<LateAnswer> {
        std::mem::take(&mut self.late)
    }

    /// Whether the id is a new one, which it is once.
    fn is_new(&mut self, lease: LeaseId) -> bool {
        let new = lease.0 >= self.next;
        if new {
            self.next = lease.0.saturating_add(1);
        }
        new
    }

    /// The request that may become this lease begins. Leases are announced in the order of their ids.
    pub fn announce(&mut self, lease: LeaseId) {
        if self.is_new(lease) {
            self.leases.insert(lease, Lease::Announced { early: Vec::new() });
        }
    }

    /// The lease begins. Endings that came early count from now.
    pub fn grant(&mut self, now: Moment, lease: LeaseId, terms: LeaseTerms, offer: OfferDigest) {
        let early = match self.leases.remove(&lease) {
            Some(Lease::Announced { early }) => early,
            None if self.is_new(lease) => Vec::new(),
            // A lease is granted once, or "held now" would not mean "held throughout". A second grant, also of one
            // that is forgotten here, is the own scheduler's mistake and changes nothing.
            None => return,
            Some(other) => {
                self.leases.insert(lease, other);
                return;
            }
        };
        let expires = now + Duration::from_millis(terms.ttl_ms);
        let latest = now + Duration::from_millis(terms.max_ms);
        let renewal = Duration::from_millis(terms.renewal_ms);
        self.timers.set(expires, lease);
        self.leases.insert(lease, Lease::Held { offer, expires, renewal, latest, ends: BTreeMap::new() });
        for ending in early {
            let answer = self.ending(now, lease, ending);
            self.answer_late(lease, ending, answer);
        }
    }

    /// The announced request hands nothing over.
    pub fn forget(&mut self, now: Moment, lease: LeaseId) {
        let Some(Lease::Announced { .. }) = self.leases.get(&lease) else { return };
        let Some(Lease::Announced { early }) = self.leases.remove(&lease) else { return };
        self.remember_end(now, lease, BTreeSet::new());
        for ending in early {
            let answer = self.ending(now, lease, ending);
            self.answer_late(lease, ending, answer);
        }
    }

    fn answer_late(&mut self, lease: LeaseId, ending: ReaderEnding, answer: Option<Answer>) {
        if let (Ending::ReadDone, Some(answer)) = (ending.ending, answer) {
            let ReaderEnding { reader, attempt, .. } = ending;
            self.late.push(LateAnswer { reader, lease, attempt, answer });
        }
    }

    /// A reader ends a lease. The answer is for a `ReadDone`; `None` means that it comes later, when the lease is
    /// granted or forgotten.
    pub fn ending(&mut self, now: Moment, lease: LeaseId, ending: ReaderEnding) -> Option<Answer> {
        let ReaderEnding { reader, attempt, ending: how, expected, offer: named } = ending;
        match self.leases.get_mut(&lease) {
            None => {
                self.stats.strays += 1;
                Some(self.lapse(how))
            }
            Some(Lease::Announced { early }) => {
                self.stats.early += 1;
                if early.contains(&ending) {
                    None
                } else if early.len() < EARLY_MAX {
                    early.push(ending);
                    None
                } else {
                    Some(self.lapse(how))
                }
            }
            Some(Lease::Ended { confirmed, .. }) => {
                self.stats.strays += 1;
                if confirmed.contains(&(reader, attempt, named)) {
                    Some(Answer::Confirmed)
                } else {
                    Some(self.lapse(how))
                }
            }
            Some(Lease::Held { offer, ends, .. }) => {
                if named != *offer {
                    // It speaks of something else than was offered. Who guesses a lease's number ends nothing.
                    self.stats.foreign_offers += 1;
                    return Some(self.lapse(how));
                }
                if let Some((first, first_how)) = ends.get(&reader) {
                    // The reader has ended once. The same try gets the same answer, another one came too late.
                    let same = (*first, *first_how) == (attempt, Ending::ReadDone);
                    self.stats.strays += 1;
                    return Some(if same { Answer::Confirmed } else { self.lapse(how) });
                }
                if ends.len() >= READERS_MAX {
                    return Some(self.lapse(how));
                }
                ends.insert(reader, (attempt, how));
                let of_consumer = ends.iter().filter(|(r, _)| r.incarnation == reader.incarnation);
                let complete = of_consumer.clone().count() >= expected as usize;
                let all_read = of_consumer.clone().all(|(_, (_, how))| *how == Ending::ReadDone);
                if complete {
                    let end = if all_read { LeaseEnd::Confirmed } else { LeaseEnd::Released };
                    self.end(now, lease, end);
                }
                match how {
                    Ending::ReadDone => {
                        self.stats.confirmed += 1;
                        Some(Answer::Confirmed)
                    }
                    Ending::Released => Some(Answer::Lapsed),
                }
            }
        }
    }

    fn lapse(&mut self, how: Ending) -> Answer {
        if how == Ending::ReadDone {
            self.stats.lapsed += 1;
        }
        Answer::Lapsed
    }

    fn end(&mut self, now: Moment, lease: LeaseId, end: LeaseEnd) {
        let Some(Lease::Held { offer, expires, ends, .. }) = self.leases.remove(&lease) else { return };
        self.timers.clear(expires, lease);
        let confirmed = ends
            .into_iter()
            .filter(|(_, (_, how))| *how == Ending::ReadDone)
            .map(|(reader, (attempt, _))| (reader, attempt, offer))
            .collect();
        self.ended.push((lease, end));
        self.remember_end(now, lease, confirmed);
    }

    fn remember_end(
        &mut self,
        now: Moment,
        lease: LeaseId,
        confirmed: BTreeSet<(Reader, Attempt, OfferDigest)>,
    ) {
        let forget_at = now + self.remember;
        self.timers.set(forget_at, lease);
        self.leases.insert(lease, Lease::Ended { confirmed, forget_at });
    }

    /// A consumer still wants these. Returns those that are not held and will not be.
    pub fn renew(&mut self, now: Moment, leases: &[LeaseId]) -> Vec<LeaseId> {
        let mut not_held = Vec::new();
        for lease in leases {
            match self.leases.get_mut(lease) {
                Some(Lease::Held { expires, renewal, latest, .. }) => {
                    let until = (now + *renewal).min(*latest);
                    if until > *expires {
                        self.timers.clear(*expires, *lease);
                        self.timers.set(until, *lease);
                        *expires = until;
                    }
                    self.stats.renewed += 1;
                }
                // Its request is still being computed: nothing to extend, and nothing lost.
                Some(Lease::Announced { .. }) => {}
                Some(Lease::Ended { .. }) | None => not_held.push(*lease),
            }
        }
        not_held
    }

    /// Ends leases whose time is over and forgets those that ended long ago. To be called after everything that
    /// has arrived was handed in, so that a message that came in time counts.
    pub fn time_passed(&mut self, now: Moment) {
        while let Some(lease) = self.timers.due(now) {
            match self.leases.get(&lease) {
                Some(Lease::Held { expires, .. }) if *expires <= now => {
                    self.stats.expired += 1;
                    self.end(now, lease, LeaseEnd::Expired);
                }
                Some(Lease::Ended { forget_at, .. }) if *forget_at <= now => {
                    self.leases.remove(&lease);
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
