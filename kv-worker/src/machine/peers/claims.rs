//! Which offers requests of ours live by: renewed while there are any, and ended by the last one.

use kv_proto::message::{OfferName, WorkerMessage};
use kv_proto::{Attempt, Moment, PeerLocator, ReleaseReason};

use super::claim::{Claim, End, Last, News};
use super::{Peer, Peers, RENEW_MIN, State, TimerKey, peer_mut};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, SourceKey};

impl Peers {
    /// A request waits that lives by an offer: its lease is renewed until the last such request has ended with it.
    pub fn track(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        locator: &PeerLocator,
        name: OfferName,
        out: &mut Vec<Decision>,
    ) {
        for key in self.want_all(now, config, locator, out) {
            if let Some(claim) = self.claim(now, config, &key, name) {
                claim.waiting += 1;
            }
        }
    }

    /// A load begins. Returns the producer's handle, and how many sources are known to it: a pull begins for each of
    /// them, and the others' when [`Change::Planned`](super::Change::Planned) says how many there are.
    pub fn load_began(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        locator: &PeerLocator,
        out: &mut Vec<Decision>,
    ) -> Vec<SourceKey> {
        self.want_all(now, config, locator, out)
    }

    /// A pull begins: it takes the place of the request that waited. Returns whether the producer has said meanwhile that
    /// it does not hold the lease.
    pub fn pull_began(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        name: OfferName,
    ) -> bool {
        let Some(claim) = self.claim(now, config, key, name) else { return false };
        claim.waiting = claim.waiting.saturating_sub(1);
        claim.reading += 1;
        let void = claim.void;
        if let Some(peer) = self.get_mut(key) {
            peer.users += 1;
        }
        void
    }

    fn claim(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        name: OfferName,
    ) -> Option<&mut Claim> {
        let peer = peer_mut(&mut self.producers, key)?;
        if let State::Ready { remote, renewal, .. } = &mut peer.state {
            if !peer.claims.contains_key(&name) {
                renewal.news.insert(name, News::Wanted);
            }
            if peer.renew_at.is_none() {
                let at = now + remote.pace(config);
                peer.renew_at = Some(at);
                self.timers.set(at, TimerKey::Renew(key.clone()));
            }
        }
        // A release that waits to be told would end the lease under this claim; the claim answers for it now.
        peer.releases.retain(|(released, _), _| *released != name);
        Some(peer.claims.entry(name).or_default())
    }

    /// A pull has read everything and is about to ask. Returns whether others under the same offer have not ended.
    pub fn pull_asks(&mut self, key: &SourceKey, name: OfferName) -> bool {
        let claim = self.get_mut(key).and_then(|peer| peer.claims.get_mut(&name));
        claim.is_some_and(|claim| {
            claim.reading = claim.reading.saturating_sub(1);
            // Answers may come in any order, so that one who was asked before has not ended either.
            let more = claim.reading + claim.waiting + claim.asking > 0;
            claim.asking += 1;
            more
        })
    }

    /// A pull ended.
    #[allow(clippy::too_many_arguments)] // What an end consists of, with time, configuration and output.
    pub fn pull_ended(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        name: OfferName,
        attempt: Attempt,
        asked: bool,
        end: End,
        out: &mut Vec<Decision>,
    ) {
        self.let_go(key);
        let Some(peer) = peer_mut(&mut self.producers, key) else { return };
        let Some(claim) = peer.claims.get_mut(&name) else { return };
        if asked {
            claim.asking = claim.asking.saturating_sub(1);
        } else {
            claim.reading = claim.reading.saturating_sub(1);
        }
        match (claim.ended(end), end) {
            (Last::No, _) => {}
            (Last::Settled, _) => peer.forsake(name, false),
            // Every request has read and none said that it was the last: this one says so now.
            (Last::Unsettled, End::Confirmed { .. }) => {
                peer.forsake(name, true);
                if let State::Ready { link, .. } = &peer.state {
                    let (lease, offer) = name;
                    let message = WorkerMessage::ReadDone { lease, attempt, offer, more: false };
                    out.push(Decision::Send { link: *link, message });
                }
            }
            (Last::Unsettled, End::Lapsed) => peer.forsake(name, true),
            (Last::Unsettled, End::GivenUp { reason }) => {
                self.release(now, config, key, name, attempt, reason, out);
            }
        }
    }

    /// A request that waited gives its offer up.
    #[allow(clippy::too_many_arguments)] // What a release consists of, with time, configuration and output.
    pub fn given_up(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        locator: &PeerLocator,
        name: OfferName,
        reason: ReleaseReason,
        out: &mut Vec<Decision>,
    ) {
        for key in self.want_all(now, config, locator, out) {
            if let Some(claim) = self.get_mut(&key).and_then(|peer| peer.claims.get_mut(&name)) {
                claim.waiting = claim.waiting.saturating_sub(1);
                if claim.is_used() {
                    continue;
                }
            }
            self.release(now, config, &key, name, Attempt(0), reason, out);
        }
    }

    /// Tells a producer that a lease will not be read, now or as soon as it can be reached.
    #[allow(clippy::too_many_arguments)] // What a release consists of, with time, configuration and output.
    fn release(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        name: OfferName,
        attempt: Attempt,
        reason: ReleaseReason,
        out: &mut Vec<Decision>,
    ) {
        self.want(now, config, key, out);
        let Some(peer) = peer_mut(&mut self.producers, key) else { return };
        peer.forsake(name, true);
        match &peer.state {
            State::Ready { link, is_gone: false, .. } => {
                let (lease, offer) = name;
                let message = WorkerMessage::Release { lease, attempt, offer, reason };
                out.push(Decision::Send { link: *link, message });
            }
            // It cannot be told, and its lease ends by time.
            State::Failed { .. } => self.stats.releases_dropped += 1,
            // Its loss will be told; what is sent over it is lost. It waits for the next.
            State::Ready { is_gone: true, .. }
            | State::Idle
            | State::Dialling { .. }
            | State::Connecting { .. }
            | State::Greeting { .. } => {
                peer.releases.insert((name, attempt), reason);
            }
        }
    }

    /// Renews what the peer is wanted for, and tells it what is new since the last time.
    pub fn renew(&mut self, now: Moment, config: &WorkerConfig, key: &SourceKey, out: &mut Vec<Decision>) {
        let Some(peer) = peer_mut(&mut self.producers, key) else { return };
        let State::Ready { link, remote, renewal, .. } = &mut peer.state else { return };
        let pace = remote.pace(config);
        if let Some(at) = peer.renew_at.take() {
            self.timers.clear(at, TimerKey::Renew(key.clone()));
        }
        if peer.claims.is_empty() && renewal.news.is_empty() && !renewal.asked {
            return;
        }
        for message in renewal.messages() {
            self.stats.renewals += 1;
            out.push(Decision::Send { link: *link, message });
        }
        let at = now + pace;
        peer.renew_at = Some(at);
        self.timers.set(at, TimerKey::Renew(key.clone()));
    }

    /// The producer misses a renewal: it is told all again, soon, but not as often as it asks.
    pub(super) fn relist(&mut self, now: Moment, key: &SourceKey) {
        let Some(peer) = peer_mut(&mut self.producers, key) else { return };
        let State::Ready { renewal, .. } = &mut peer.state else { return };
        if !std::mem::replace(&mut renewal.asked, true) {
            renewal.restart(peer.claims.iter());
        }
        let at = now + RENEW_MIN;
        if peer.renew_at.is_none_or(|was| was > at) {
            if let Some(was) = peer.renew_at.replace(at) {
                self.timers.clear(was, TimerKey::Renew(key.clone()));
            }
            self.timers.set(at, TimerKey::Renew(key.clone()));
        }
    }

    /// A pull needs the peer no more.
    fn let_go(&mut self, key: &SourceKey) {
        if let Some(peer) = self.get_mut(key) {
            peer.users = peer.users.saturating_sub(1);
        }
    }
}

impl Peer {
    /// No request lives by the offer any more. `tell`: the producer may still think so.
    pub(super) fn forsake(&mut self, name: OfferName, tell: bool) {
        if self.claims.remove(&name).is_none() {
            return;
        }
        let State::Ready { renewal, .. } = &mut self.state else { return };
        let was_new = renewal.news.remove(&name) == Some(News::Wanted);
        if tell && !was_new {
            renewal.news.insert(name, News::Dropped);
        }
    }

    /// The producer does not hold it: there is nothing to renew.
    pub(super) fn void(&mut self, name: OfferName) {
        let Some(claim) = self.claims.get_mut(&name) else { return };
        claim.void = true;
        if let State::Ready { renewal, .. } = &mut self.state {
            renewal.news.remove(&name);
        }
    }
}
