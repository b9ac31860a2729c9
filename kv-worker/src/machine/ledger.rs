//! The producer's ledger: which leases are held, who wants them, and who has ended them.
//!
//! ```text
//!  Announced ──grant──► Held ──every reader ended, time over, readers dead, revoked──► Ended ──remembered──► (gone)
//!      └──forget──────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The one thing that matters: [`Answer::Confirmed`] is given for a lease only while it is held and its end has
//! not been reported to the scheduler half. Blocks are freed on that report alone, so a confirmed read cannot have
//! seen a block's next owner.
//!
//! A reader names a lease once, and then only says that it lives: what it costs to keep a hundred thousand leases
//! is one small message per reader and interval, and one moved deadline.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use kv_proto::message::OfferName;
use kv_proto::{Attempt, Incarnation, LeaseEnd, LeaseId, LeaseTerms, Moment, OfferDigest, Rank, Timers};

mod wishes;

use wishes::Living;

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
    /// As before, but others of the same reader's requests still read: the lease goes on.
    ReadMore,
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
    Announced {
        /// Endings that came early, in the order in which they came.
        early: Vec<ReaderEnding>,
        /// Who wants it already, and as what.
        wanted: Vec<(Reader, OfferDigest)>,
    },
    Held {
        offer: OfferDigest,
        /// The end, as long as nobody wants it.
        expires: Moment,
        /// The end, whoever wants it.
        latest: Moment,
        /// Who wants it, each one of [`Ledger::living`]. Empty: it ends at `expires`.
        wanted: Vec<Reader>,
        /// Reads that were confirmed without ending it.
        confirmed: Vec<(Reader, Attempt)>,
        ends: BTreeMap<Reader, (Attempt, Ending)>,
    },
    Ended {
        confirmed: Vec<(Reader, Attempt, OfferDigest)>,
        forget_at: Moment,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum TimerKey {
    Lease(LeaseId),
    Reader(Reader),
}

/// Most early endings, and most early wishes, kept for one announced lease; a consumer has as many as it has readers
/// here.
const EARLY_MAX: usize = READERS_MAX;
/// Most readers kept for one held lease, over all consumers that try.
pub(crate) const READERS_MAX: usize = 256;

/// Counters. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
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
    /// Leases that ended because every consumer that wanted them is gone.
    pub consumer_lost: u64,
    /// Leases that the own scheduler half took back.
    pub revoked: u64,
    /// Signs of life of readers that want leases.
    pub renewed: u64,
}

/// A lease that a reader wants and that is held no more.
pub type Notice = (Reader, OfferName);

impl Hash for LedgerStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The machine.
#[derive(Debug, Clone, Hash)]
pub struct Ledger {
    remember: Duration,
    /// Those of the newest grant; they are an engine's, not a lease's.
    terms: Option<LeaseTerms>,
    /// The lowest id never seen: announcements come in order, so a lower one that is unknown is over for good.
    next: u64,
    leases: BTreeMap<LeaseId, Lease>,
    living: BTreeMap<Reader, Living>,
    timers: Timers<TimerKey>,
    ended: Vec<(LeaseId, LeaseEnd)>,
    late: Vec<LateAnswer>,
    notices: Vec<Notice>,
    stats: LedgerStats,
}

impl Ledger {
    /// An empty ledger that remembers ended leases for so long.
    pub fn new(remember: Duration) -> Self {
        Self {
            remember,
            terms: None,
            next: 0,
            leases: BTreeMap::new(),
            living: BTreeMap::new(),
            timers: Timers::default(),
            ended: Vec::new(),
            late: Vec::new(),
            notices: Vec::new(),
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

    /// Leases that readers want and that are held no more, since the last call.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
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
            self.leases.insert(lease, Lease::Announced { early: Vec::new(), wanted: Vec::new() });
        }
    }

    /// The lease begins. Endings that came early count from now.
    pub fn grant(&mut self, now: Moment, lease: LeaseId, terms: LeaseTerms, offer: OfferDigest) {
        let (early, wishes) = match self.leases.remove(&lease) {
            Some(Lease::Announced { early, wanted }) => (early, wanted),
            None if self.is_new(lease) => (Vec::new(), Vec::new()),
            // A lease is granted once, or "held now" would not mean "held throughout". A second grant, also of one
            // that is forgotten here, is the own scheduler's mistake and changes nothing.
            None => return,
            Some(other) => {
                self.leases.insert(lease, other);
                return;
            }
        };
        if self.terms.replace(terms).is_none() {
            // Until now nobody knew how long a reader may be silent.
            let until = now + self.renewal();
            let readers: Vec<Reader> = self.living.keys().copied().collect();
            readers.into_iter().for_each(|reader| self.shorten(reader, until));
        }
        let expires = now + Duration::from_millis(terms.ttl_ms);
        let latest = now + Duration::from_millis(terms.max_ms);
        let mut wanted = Vec::new();
        wanted.extend(wishes.iter().filter(|(_, named)| *named == offer).map(|(reader, _)| *reader));
        for (reader, named) in wishes.into_iter().filter(|(_, named)| *named != offer) {
            if !wanted.contains(&reader) {
                self.forsake(reader, lease);
            }
            self.notices.push((reader, (lease, named)));
        }
        self.timers.set(if wanted.is_empty() { expires } else { latest }, TimerKey::Lease(lease));
        let (confirmed, ends) = (Vec::new(), BTreeMap::new());
        self.leases.insert(lease, Lease::Held { offer, expires, latest, wanted, confirmed, ends });
        for ending in early {
            let answer = self.ending(now, lease, ending);
            self.answer_late(lease, ending, answer);
        }
    }

    /// The announced request hands nothing over.
    pub fn forget(&mut self, now: Moment, lease: LeaseId) {
        let Some(Lease::Announced { .. }) = self.leases.get(&lease) else { return };
        let Some(Lease::Announced { early, wanted }) = self.leases.remove(&lease) else { return };
        for (reader, named) in wanted {
            self.forsake(reader, lease);
            self.notices.push((reader, (lease, named)));
        }
        self.remember_end(now, lease, Vec::new());
        for ending in early {
            let answer = self.ending(now, lease, ending);
            self.answer_late(lease, ending, answer);
        }
    }

    /// The own scheduler half takes a lease back.
    pub fn revoke(&mut self, now: Moment, lease: LeaseId) {
        match self.leases.get(&lease) {
            Some(Lease::Held { .. }) => {
                self.stats.revoked += 1;
                self.end(now, lease, LeaseEnd::Revoked);
            }
            Some(Lease::Announced { .. }) => self.forget(now, lease),
            Some(Lease::Ended { .. }) | None => {}
        }
    }

    fn answer_late(&mut self, lease: LeaseId, ending: ReaderEnding, answer: Option<Answer>) {
        if let (Ending::ReadDone | Ending::ReadMore, Some(answer)) = (ending.ending, answer) {
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
            Some(Lease::Announced { early, .. }) => {
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
            Some(Lease::Held { offer, confirmed, ends, .. }) => {
                if named != *offer {
                    // It speaks of something else than was offered. Who guesses a lease's number ends nothing.
                    self.stats.foreign_offers += 1;
                    return Some(self.lapse(how));
                }
                let again = confirmed.contains(&(reader, attempt));
                if let Some((first, first_how)) = ends.get(&reader) {
                    // The reader has ended once. The same try gets the same answer, another one came too late.
                    let same = again || (*first, *first_how) == (attempt, Ending::ReadDone);
                    self.stats.strays += 1;
                    return Some(if same { Answer::Confirmed } else { self.lapse(how) });
                }
                if how == Ending::ReadMore {
                    // One more than are remembered is true all the same; only its repetition after the end is not.
                    if again {
                        self.stats.strays += 1;
                    } else if confirmed.len() < READERS_MAX {
                        confirmed.push((reader, attempt));
                    }
                    self.stats.confirmed += u64::from(!again);
                    return Some(Answer::Confirmed);
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
                } else if self.wants(reader, lease) {
                    // Who has ended wants it no more, and must not keep it for readers that may be dead.
                    self.forsake(reader, lease);
                    self.unwanted(reader, lease, now + self.grace());
                }
                if how == Ending::Released {
                    return Some(Answer::Lapsed);
                }
                self.stats.confirmed += u64::from(!again);
                Some(Answer::Confirmed)
            }
        }
    }

    /// Whether a reader may count on what it has read so far. `None`: it cannot be said yet.
    pub fn holds(&self, lease: LeaseId, reader: Reader, named: OfferDigest) -> Option<bool> {
        match self.leases.get(&lease) {
            Some(Lease::Held { offer, ends, .. }) => Some(*offer == named && !ends.contains_key(&reader)),
            Some(Lease::Announced { .. }) => None,
            Some(Lease::Ended { .. }) | None => Some(false),
        }
    }

    fn lapse(&mut self, how: Ending) -> Answer {
        if how != Ending::Released {
            self.stats.lapsed += 1;
        }
        Answer::Lapsed
    }

    fn end(&mut self, now: Moment, lease: LeaseId, end: LeaseEnd) {
        let Some(Lease::Held { offer, expires, latest, wanted, confirmed, ends }) =
            self.leases.remove(&lease)
        else {
            return;
        };
        self.timers.clear(if wanted.is_empty() { expires } else { latest }, TimerKey::Lease(lease));
        for reader in wanted {
            self.forsake(reader, lease);
            if !ends.contains_key(&reader) {
                self.notices.push((reader, (lease, offer)));
            }
        }
        let read = ends.into_iter().filter(|(_, (_, how))| *how == Ending::ReadDone);
        let mut remembered: Vec<_> =
            confirmed.into_iter().map(|(reader, try_)| (reader, try_, offer)).collect();
        remembered.extend(read.map(|(reader, (attempt, _))| (reader, attempt, offer)));
        self.ended.push((lease, end));
        self.remember_end(now, lease, remembered);
    }

    fn remember_end(&mut self, now: Moment, lease: LeaseId, confirmed: Vec<(Reader, Attempt, OfferDigest)>) {
        let forget_at = now + self.remember;
        self.timers.set(forget_at, TimerKey::Lease(lease));
        self.leases.insert(lease, Lease::Ended { confirmed, forget_at });
    }

    /// How long a sign of life keeps a reader's leases. Before the first grant there is nothing to keep but wishes.
    fn renewal(&self) -> Duration {
        self.terms.map_or(self.remember, |terms| Duration::from_millis(terms.renewal_ms))
    }

    fn grace(&self) -> Duration {
        self.terms.map_or(Duration::ZERO, |terms| Duration::from_millis(terms.grace_ms))
    }

    /// Ends leases whose time is over and forgets those that ended long ago. To be called after everything that
    /// has arrived was handed in, so that a message that came in time counts.
    pub fn time_passed(&mut self, now: Moment) {
        while let Some(key) = self.timers.due(now) {
            match key {
                TimerKey::Reader(reader) => self.reader_late(now, reader),
                TimerKey::Lease(lease) => match self.leases.get(&lease) {
                    Some(Lease::Held { expires, latest, wanted, .. })
                        if *latest <= now || (wanted.is_empty() && *expires <= now) =>
                    {
                        self.stats.expired += 1;
                        self.end(now, lease, LeaseEnd::Expired);
                    }
                    Some(Lease::Ended { forget_at, .. }) if *forget_at <= now => {
                        self.leases.remove(&lease);
                    }
                    _ => {}
                },
            }
        }
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
