//! **P4, P1: a lease lives as long as its terms say.** A lease that expires does so neither before its time, counted from
//! its grant and from each renewal that has arrived (H-12, H-13), nor later than a moment after it. Kept by a second
//! account of grants and renewals, in the clock of P's worker. A worker that stood still, or whose clock jumped, may be
//! late for what fell into that time.

use std::time::Duration;

use kv_proto::{LeaseEnd, LeaseId, LeaseTerms, Moment};

use super::super::world::{WorkerAt, World};
use super::Invariant;

pub(super) const NAME: &str = "in-time";

/// How late a worker's timer may be.
const SLACK: Duration = Duration::from_millis(5);

/// What must become of a lease.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Terms {
    expires: Moment,
    latest: Moment,
    renewal: Duration,
}

impl Terms {
    pub(in super::super) fn granted(now: Moment, terms: LeaseTerms) -> Self {
        Self {
            expires: now + Duration::from_millis(terms.ttl_ms),
            latest: now + Duration::from_millis(terms.max_ms),
            renewal: Duration::from_millis(terms.renewal_ms),
        }
    }
}

impl World {
    /// A renewal has arrived at P's worker.
    pub(in super::super) fn renew_terms(&mut self, at: WorkerAt, leases: &[LeaseId]) {
        let now = self.now;
        let Some(worker) = self.worker(at) else { return };
        let local = worker.clock.read(now);
        for lease in leases {
            if let Some(terms) = worker.terms.get_mut(lease) {
                terms.expires = terms.expires.max((local + terms.renewal).min(terms.latest));
            }
        }
    }

    /// P's worker reports ends.
    pub(in super::super) fn judge_ends(&mut self, at: WorkerAt, ends: &[(LeaseId, LeaseEnd)]) {
        let now = self.now;
        for (lease, end) in ends {
            let Some(worker) = self.worker(at) else { return };
            let Some(terms) = worker.terms.remove(lease) else { continue };
            let local = worker.clock.read(now);
            let excused = terms.expires <= worker.late_until;
            if *end != LeaseEnd::Expired {
                continue;
            }
            let (early, late) = (terms.expires.since(local), local.since(terms.expires));
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
