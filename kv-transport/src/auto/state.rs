//! Who is reached by which member, and what is in flight where.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::NONE_LEFT;
use crate::contract::{Address, Event, OpId, PeerId, RegionId};
use crate::error::{LossReason, TransportError};

/// A peer, and how it is reached.
#[derive(Debug)]
pub(super) enum Route {
    Connecting {
        /// What can still be tried, the next one last.
        left: Vec<(usize, Address)>,
        deadline: Instant,
        /// What is being tried.
        current: Option<(usize, PeerId)>,
        /// What failed and how, in words.
        failed: Vec<String>,
        /// The last failure.
        reason: Option<LossReason>,
        leaving: bool,
    },
    Standing {
        member: usize,
        theirs: PeerId,
        /// Why no better one.
        why: Option<String>,
        leaving: bool,
    },
}

/// The next thing to try.
pub(super) struct Attempt {
    pub(super) member: usize,
    pub(super) address: Address,
    pub(super) limit: Duration,
}

#[derive(Debug)]
struct Region {
    /// By member; one that had ended by then has none.
    theirs: Vec<Option<RegionId>>,
    reads: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) peers: HashMap<PeerId, Route>,
    pub(super) events: VecDeque<Event>,
    pub(super) closed: bool,
    names: HashMap<(usize, PeerId), PeerId>,
    regions: HashMap<RegionId, Region>,
    flights: HashMap<OpId, (usize, Vec<RegionId>)>,
    numbers: u64,
    turns: usize,
}

impl State {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn turn(&mut self, of: usize) -> usize {
        self.turns = self.turns.wrapping_add(1);
        self.turns % of.max(1)
    }

    // Peers.

    pub(super) fn ours(&self, member: usize, theirs: PeerId) -> Option<PeerId> {
        self.names.get(&(member, theirs)).copied()
    }

    pub(super) fn accepted(&mut self, member: usize, theirs: PeerId) -> PeerId {
        let peer = PeerId(self.number());
        self.names.insert((member, theirs), peer);
        self.peers.insert(peer, Route::Standing { member, theirs, why: None, leaving: false });
        peer
    }

    pub(super) fn connecting(
        &mut self,
        mut candidates: Vec<(usize, Address)>,
        now: Instant,
        limit: Duration,
    ) -> PeerId {
        const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
        let peer = PeerId(self.number());
        candidates.reverse();
        let deadline = now.checked_add(limit.min(FAR)).unwrap_or(now);
        let route = Route::Connecting {
            left: candidates,
            deadline,
            current: None,
            failed: vec![],
            reason: None,
            leaving: false,
        };
        self.peers.insert(peer, route);
        peer
    }

    /// What to try next; if there is nothing, the peer is lost, and that is told.
    pub(super) fn attempt(&mut self, peer: PeerId, now: Instant) -> Option<Attempt> {
        let Some(Route::Connecting { left, deadline, reason, failed, .. }) = self.peers.get_mut(&peer) else {
            return None;
        };
        let rest = deadline.saturating_duration_since(now);
        // Each gets its share, so that one that hangs leaves time for the others.
        let share = rest / left.len().max(1) as u32;
        if let Some((member, address)) = left.pop() {
            return Some(Attempt { member, address, limit: share });
        }
        let reason = reason.take().unwrap_or(NONE_LEFT);
        tracing::info!(%peer, failed = failed.join("; "), "a peer is reached by no transport");
        self.peers.remove(&peer);
        self.events.push_back(Event::PeerLost { peer, reason });
        None
    }

    pub(super) fn begun(&mut self, peer: PeerId, member: usize, theirs: PeerId) {
        if let Some(Route::Connecting { current, .. }) = self.peers.get_mut(&peer) {
            *current = Some((member, theirs));
            self.names.insert((member, theirs), peer);
        }
    }

    pub(super) fn refused(&mut self, peer: PeerId, name: &str, why: &str) {
        if let Some(Route::Connecting { failed, .. }) = self.peers.get_mut(&peer) {
            failed.push(format!("{name}: {why}"));
        }
    }

    /// It stands. Says why not by a better one, if one was tried.
    pub(super) fn connected(&mut self, peer: PeerId) -> Option<String> {
        let Some(Route::Connecting { current: Some((member, theirs)), failed, leaving, .. }) =
            self.peers.get(&peer)
        else {
            return None;
        };
        let why = (!failed.is_empty()).then(|| failed.join("; "));
        let route = Route::Standing { member: *member, theirs: *theirs, why: why.clone(), leaving: *leaving };
        self.peers.insert(peer, route);
        why
    }

    pub(super) fn why(&self, peer: PeerId) -> Option<String> {
        match self.peers.get(&peer)? {
            Route::Standing { why, .. } => why.clone(),
            Route::Connecting { .. } => None,
        }
    }

    /// Begins to let go of a peer. Which member is to be told, and whether that may fail because it has just told a failure.
    pub(super) fn leave(&mut self, peer: PeerId) -> Result<(usize, PeerId, bool), TransportError> {
        let unknown = TransportError::UnknownPeer { peer };
        match self.peers.get_mut(&peer) {
            Some(Route::Standing { member, theirs, leaving, .. }) if !*leaving => {
                *leaving = true;
                Ok((*member, *theirs, false))
            }
            Some(Route::Connecting { left, current: Some(current), leaving, .. }) if !*leaving => {
                *leaving = true;
                left.clear();
                Ok((current.0, current.1, true))
            }
            _ => Err(unknown),
        }
    }

    /// A member lost a peer. `None` if something else is to be tried.
    pub(super) fn lost(&mut self, peer: PeerId, why: LossReason, words: String) -> Option<Event> {
        let mut why = why;
        match self.peers.get_mut(&peer)? {
            Route::Connecting { current, failed, reason, leaving, .. } => {
                if let Some(name) = current.take() {
                    self.names.remove(&name);
                }
                if !*leaving && !self.closed {
                    failed.push(words);
                    *reason = Some(why);
                    return None;
                }
                if *leaving {
                    why = LossReason::Disconnected;
                }
            }
            Route::Standing { member, theirs, .. } => {
                self.names.remove(&(*member, *theirs));
            }
        }
        self.peers.remove(&peer);
        Some(Event::PeerLost { peer, reason: why })
    }

    /// All members have ended: whoever is left is lost.
    pub(super) fn end(&mut self) {
        let mut left: Vec<_> = self.peers.drain().map(|(peer, _)| peer).collect();
        left.sort_unstable();
        for peer in left {
            self.events.push_back(Event::PeerLost { peer, reason: LossReason::Closed });
        }
        self.names.clear();
    }

    // Regions and reads.

    pub(super) fn registered(&mut self, theirs: Vec<Option<RegionId>>) -> RegionId {
        let region = RegionId(self.number());
        self.regions.insert(region, Region { theirs, reads: 0 });
        region
    }

    pub(super) fn region(&self, region: RegionId) -> Result<Vec<Option<RegionId>>, TransportError> {
        let entry = self.regions.get(&region).ok_or(TransportError::UnknownRegion { region })?;
        Ok(entry.theirs.clone())
    }

    pub(super) fn region_at(&self, region: RegionId, member: usize) -> Result<RegionId, TransportError> {
        let entry = self.regions.get(&region);
        entry
            .and_then(|entry| entry.theirs.get(member).copied().flatten())
            .ok_or(TransportError::UnknownRegion { region })
    }

    pub(super) fn deregistered(&mut self, region: RegionId) -> Result<Vec<Option<RegionId>>, TransportError> {
        match self.regions.get(&region) {
            None => Err(TransportError::UnknownRegion { region }),
            Some(Region { reads, .. }) if *reads > 0 => {
                Err(TransportError::RegionInUse { region, reads: *reads })
            }
            Some(_) => Ok(self.regions.remove(&region).map(|entry| entry.theirs).unwrap_or_default()),
        }
    }

    pub(super) fn reading(
        &mut self,
        op: OpId,
        member: usize,
        mut regions: Vec<RegionId>,
    ) -> Result<(), TransportError> {
        if self.flights.contains_key(&op) {
            return Err(TransportError::DuplicateOp { op });
        }
        regions.sort_unstable();
        regions.dedup();
        if let Some(region) = regions.iter().find(|region| !self.regions.contains_key(region)) {
            return Err(TransportError::UnknownRegion { region: *region });
        }
        for region in &regions {
            if let Some(entry) = self.regions.get_mut(region) {
                entry.reads += 1;
            }
        }
        self.flights.insert(op, (member, regions));
        Ok(())
    }

    pub(super) fn completed(&mut self, op: OpId) {
        if let Some((_, regions)) = self.flights.remove(&op) {
            for region in regions {
                if let Some(entry) = self.regions.get_mut(&region) {
                    entry.reads -= 1;
                }
            }
        }
    }

    pub(super) fn member_of(&self, op: OpId) -> Option<usize> {
        self.flights.get(&op).map(|(member, _)| *member)
    }
}
