//! The readers that are alive, and what they wish to be kept for them.
//!
//! A reader is known here as long as it wants a lease. Its list names what it wants, and each of these leases names it: a
//! lease without a name runs towards its own end.

use std::collections::BTreeSet;

use kv_proto::message::OfferName;
use kv_proto::{LeaseEnd, LeaseId, Moment};

use super::{EARLY_MAX, Lease, Ledger, READERS_MAX, Reader, TimerKey};

/// A reader that wants leases, and until when it counts as alive.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Living {
    pub(super) until: Moment,
    /// Whether it has no connection.
    lost: bool,
    leases: BTreeSet<LeaseId>,
}

impl Ledger {
    /// A reader wants these from now on, until it drops them or dies. Returns those that are not held and will not
    /// be, or were never offered like that.
    pub fn want(&mut self, now: Moment, reader: Reader, names: &[OfferName]) -> Vec<OfferName> {
        let until = now + self.renewal();
        let mut not_held = Vec::new();
        for (lease, named) in names {
            let added = match self.leases.get_mut(lease) {
                Some(Lease::Held { offer, expires, latest, wanted, ends, .. }) if offer == named => {
                    if wanted.contains(&reader) {
                        continue;
                    }
                    if ends.contains_key(&reader) {
                        // For this reader it is over.
                        not_held.push((*lease, *named));
                        continue;
                    }
                    if wanted.is_empty() {
                        self.timers.clear(*expires, TimerKey::Lease(*lease));
                        self.timers.set(*latest, TimerKey::Lease(*lease));
                        wanted.reserve_exact(1);
                    }
                    let room = wanted.len() < READERS_MAX;
                    if room {
                        wanted.push(reader);
                    }
                    room
                }
                // Its request is still being computed.
                Some(Lease::Announced { wanted, .. }) => {
                    if wanted.contains(&(reader, *named)) {
                        continue;
                    }
                    // Of two names that one reader has for one lease, the grant will say which is true.
                    let room = wanted.len() < EARLY_MAX;
                    if room {
                        wanted.push((reader, *named));
                    }
                    room
                }
                Some(Lease::Held { .. } | Lease::Ended { .. }) | None => false,
            };
            if !added {
                not_held.push((*lease, *named));
                continue;
            }
            let timers = &mut self.timers;
            let living = self.living.entry(reader).or_insert_with(|| {
                timers.set(until, TimerKey::Reader(reader));
                Living { until, lost: false, leases: BTreeSet::new() }
            });
            living.leases.insert(*lease);
        }
        not_held
    }

    /// A reader wants these no more.
    pub fn drop_wishes(&mut self, now: Moment, reader: Reader, names: &[OfferName]) {
        for (lease, named) in names {
            let is_of = match self.leases.get(lease) {
                Some(Lease::Held { offer, .. }) => offer == named,
                Some(Lease::Announced { wanted, .. }) => wanted.contains(&(reader, *named)),
                Some(Lease::Ended { .. }) | None => false,
            };
            if is_of && self.wants(reader, *lease) {
                self.forsake(reader, *lease);
                self.unwanted(reader, *lease, now + self.grace());
            }
        }
    }

    /// A reader begins its list of what it wants anew. What it does not name again lives on for the grace.
    pub fn relisted(&mut self, now: Moment, reader: Reader) {
        let Some(living) = self.living.remove(&reader) else { return };
        self.timers.clear(living.until, TimerKey::Reader(reader));
        // No lease lives shorter than the last sign of life promised.
        let floor = living.until.max(now + self.grace());
        for lease in living.leases {
            self.unwanted(reader, lease, floor);
        }
    }

    /// A reader gave a sign of life: what it wants is kept.
    pub fn heard(&mut self, now: Moment, reader: Reader) {
        let until = now + self.renewal();
        let Some(living) = self.living.get_mut(&reader) else { return };
        self.stats.renewed += 1;
        living.lost = false;
        self.timers.clear(living.until, TimerKey::Reader(reader));
        self.timers.set(until, TimerKey::Reader(reader));
        living.until = until;
    }

    /// A reader's last connection is lost. If it does not come back within the grace, it is dead, and so is what only
    /// it wanted.
    pub fn reader_lost(&mut self, now: Moment, reader: Reader) {
        let until = now + self.grace();
        let Some(living) = self.living.get_mut(&reader) else { return };
        living.lost = true;
        self.shorten(reader, until);
    }

    /// Brings the time nearer until which a reader counts as alive.
    pub(super) fn shorten(&mut self, reader: Reader, until: Moment) {
        if let Some(living) = self.living.get_mut(&reader).filter(|living| living.until > until) {
            self.timers.clear(living.until, TimerKey::Reader(reader));
            self.timers.set(until, TimerKey::Reader(reader));
            living.until = until;
        }
    }

    /// Takes a lease out of a reader's list.
    pub(super) fn forsake(&mut self, reader: Reader, lease: LeaseId) {
        let Some(living) = self.living.get_mut(&reader) else { return };
        living.leases.remove(&lease);
        if living.leases.is_empty() {
            self.timers.clear(living.until, TimerKey::Reader(reader));
            self.living.remove(&reader);
        }
    }

    /// Takes a reader out of a lease's list. If it was the last one, the lease's own time runs, at least to `floor`.
    /// Returns whether that is so.
    pub(super) fn unwanted(&mut self, reader: Reader, lease: LeaseId, floor: Moment) -> bool {
        match self.leases.get_mut(&lease) {
            Some(Lease::Held { expires, latest, wanted, .. }) => {
                wanted.retain(|other| *other != reader);
                if !wanted.is_empty() {
                    return false;
                }
                self.timers.clear(*latest, TimerKey::Lease(lease));
                *expires = floor.max(*expires).min(*latest);
                self.timers.set(*expires, TimerKey::Lease(lease));
                true
            }
            Some(Lease::Announced { wanted, .. }) => {
                wanted.retain(|(other, _)| *other != reader);
                false
            }
            Some(Lease::Ended { .. }) | None => false,
        }
    }

    /// Whether a lease is on a reader's list.
    pub(super) fn wants(&self, reader: Reader, lease: LeaseId) -> bool {
        self.living.get(&reader).is_some_and(|living| living.leases.contains(&lease))
    }

    /// A reader's time is over, if it has not been heard of meanwhile.
    pub(super) fn reader_late(&mut self, now: Moment, reader: Reader) {
        if self.living.get(&reader).is_none_or(|living| living.until > now) {
            return;
        }
        let Some(living) = self.living.remove(&reader) else { return };
        for lease in living.leases {
            // One that is only silent may have its leases read by another consumer, within their own time.
            if self.unwanted(reader, lease, now) && living.lost {
                self.stats.consumer_lost += 1;
                self.end(now, lease, LeaseEnd::ConsumerLost);
            }
        }
    }
}
