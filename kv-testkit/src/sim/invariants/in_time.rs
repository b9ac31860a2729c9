//! **P4, P1: a lease lives as long as its terms say.** A lease that expires does so not before its own time, nor before
//! the renewal's span is over since a consumer named it for the first time over a connection that still stands (H-12,
//! H-13); and not later than a moment after its own time or after the last sign of life of any consumer, never after its
//! longest life; what one reader has ended and others have not lives on for the grace. Kept by a second account of
//! grants, endings and renewals, in the clock of P's worker. A worker that stood still, or whose clock jumped, may be
//! late for what fell into that time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_proto::message::WorkerMessage;
use kv_proto::{LeaseEnd, LeaseId, LeaseTerms, Moment, OfferDigest};

use super::super::world::{WorkerAt, World};
use super::Invariant;

pub(super) const NAME: &str = "in-time";

/// How late a worker's timer may be.
const SLACK: Duration = Duration::from_millis(5);

/// What must become of a lease.
#[derive(Debug, Clone)]
pub(in super::super) struct Terms {
    own: Moment,
    latest: Moment,
    renewal: Duration,
    grace: Duration,
    /// How long it lives at least, by the connections over which it was named.
    sure: BTreeMap<u64, Moment>,
    /// Readers that have ended their part, whatever of theirs is still on its way.
    over: BTreeSet<WorkerAt>,
    /// When the last of these ended: what others may still want lives on for the grace.
    ended: Option<Moment>,
}

impl Terms {
    fn granted(now: Moment, terms: LeaseTerms, over: BTreeSet<WorkerAt>) -> Self {
        Self {
            ended: (!over.is_empty()).then_some(now),
            over,
            own: now + Duration::from_millis(terms.ttl_ms),
            latest: now + Duration::from_millis(terms.max_ms),
            renewal: Duration::from_millis(terms.renewal_ms),
            grace: Duration::from_millis(terms.grace_ms),
            sure: BTreeMap::new(),
        }
    }
}

/// What a worker of P has heard.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Heard {
    /// The last sign of life of any consumer.
    last: Option<Moment>,
    /// The newest whole list of each connection; an older one counts no more.
    lists: BTreeMap<u64, u64>,
    /// Endings of leases that were not granted yet, with the offer that they speak of.
    early: BTreeMap<LeaseId, Vec<(WorkerAt, OfferDigest)>>,
}

impl World {
    /// A grant has arrived at P's worker. Endings that came before it count from now.
    pub(in super::super) fn begin_terms(
        &mut self,
        at: WorkerAt,
        lease: LeaseId,
        terms: LeaseTerms,
        offer: OfferDigest,
    ) {
        let now = self.now;
        let Some(worker) = self.worker(at) else { return };
        let early = worker.heard.early.remove(&lease).unwrap_or_default();
        let over = early.into_iter().filter(|(_, named)| *named == offer).map(|(reader, _)| reader).collect();
        let local = worker.clock.read(now);
        worker.terms.entry(lease).or_insert_with(|| Terms::granted(local, terms, over));
    }

    /// A renewal has arrived at P's worker over a connection.
    pub(in super::super) fn renew_terms(&mut self, at: WorkerAt, link: u64, message: &WorkerMessage) {
        let now = self.now;
        if let (WorkerMessage::Hello { .. }, Some(worker)) = (message, self.worker(at)) {
            worker.heard.last = Some(worker.clock.read(now));
        }
        let reader = self.links.get(&link).map(|link| link.consumer);
        // Who has ended its part wants the lease no more, whether others of its engine still read or not.
        if let WorkerMessage::ReadDone { lease, offer, more: false, .. }
        | WorkerMessage::Release { lease, offer, .. } = message
        {
            let granted = self.granted(at, *lease);
            let Some(worker) = self.worker(at) else { return };
            match granted {
                Some(granted) if granted == *offer => {
                    if let Some(terms) = worker.terms.get_mut(lease) {
                        terms.ended = Some(worker.clock.read(now));
                        terms.sure.remove(&link);
                        terms.over.extend(reader);
                    }
                }
                // It speaks of something else than was offered, and ends nothing.
                Some(_) => {}
                None => {
                    let early = worker.heard.early.entry(*lease).or_default();
                    early.extend(reader.map(|reader| (reader, *offer)));
                }
            }
        }
        let WorkerMessage::Renew { seq, all, wanted, dropped } = message else { return };
        let held: Vec<LeaseId> = wanted
            .iter()
            .filter(|(lease, offer)| self.granted(at, *lease) == Some(*offer))
            .map(|(lease, _)| *lease)
            .collect();
        let Some(worker) = self.worker(at) else { return };
        let local = worker.clock.read(now);
        worker.heard.last = Some(local);
        for (lease, _) in dropped {
            if let Some(terms) = worker.terms.get_mut(lease) {
                terms.sure.remove(&link);
            }
        }
        if !*all || worker.heard.lists.get(&link).is_some_and(|newest| newest >= seq) {
            return;
        }
        worker.heard.lists.insert(link, *seq);
        for (lease, terms) in &mut worker.terms {
            let is_over = reader.is_some_and(|reader| terms.over.contains(&reader));
            if held.contains(lease) && !is_over {
                terms.sure.insert(link, (local + terms.renewal).min(terms.latest));
            } else {
                terms.sure.remove(&link);
            }
        }
    }

    /// A connection is gone: nobody can be sure any more of what was named over it.
    pub(in super::super) fn terms_unsure(&mut self, at: WorkerAt, link: u64) {
        let Some(worker) = self.worker(at) else { return };
        worker.heard.lists.remove(&link);
        for terms in worker.terms.values_mut() {
            terms.sure.remove(&link);
        }
    }

    /// P's worker reports ends.
    pub(in super::super) fn judge_ends(&mut self, at: WorkerAt, ends: &[(LeaseId, LeaseEnd)]) {
        let now = self.now;
        for (lease, end) in ends {
            let Some(worker) = self.worker(at) else { return };
            let Some(terms) = worker.terms.remove(lease) else { continue };
            let local = worker.clock.read(now);
            if *end != LeaseEnd::Expired {
                continue;
            }
            let not_before = terms.sure.values().copied().fold(terms.own, Moment::max);
            let heard = worker.heard.last.map_or(terms.own, |at| at + terms.renewal.max(terms.grace));
            let ended = terms.ended.map_or(terms.own, |at| at + terms.grace);
            let not_after = terms.own.max(heard).max(ended).min(terms.latest);
            let excused = not_after <= worker.late_until;
            let (early, late) = (not_before.since(local), local.since(not_after));
            if !early.is_zero() {
                self.violate(
                    Invariant::InTime,
                    format!("{lease} expires on worker {at} {early:?} too early"),
                );
            } else if late > SLACK && !excused {
                self.violate(Invariant::InTime, format!("{lease} expires on worker {at} {late:?} too late"));
            }
        }
    }
}
