//! What requests of ours claim of one producer, and what it has been told of that.
//!
//! Several requests may live by one offer: a prompt that is sampled several times, a router that tries again. The
//! lease is renewed as long as one of them is left, and only the last one ends it.

use std::collections::BTreeMap;

use kv_proto::ReleaseReason;
use kv_proto::message::{LEASES_PER_MESSAGE_MAX, OfferName, WorkerMessage};

/// One offer that requests live by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Claim {
    /// Requests that wait for their blocks.
    pub(crate) waiting: u32,
    /// Pulls that have not asked yet.
    pub(crate) reading: u32,
    /// Pulls that have asked.
    pub(crate) asking: u32,
    /// The producer has heard, and answered, that the last one has read.
    settled: bool,
    /// The producer does not hold the lease.
    pub(crate) void: bool,
}

/// How a pull ended, as far as its lease is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Confirmed. `more`: it had said that others still read.
    Confirmed {
        /// What it said when it asked.
        more: bool,
    },
    /// The lease did not hold.
    Lapsed,
    /// Without asking, or without an answer.
    GivenUp {
        /// Why, for the producer.
        reason: ReleaseReason,
    },
}

/// Whether a pull was the last user of its offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    /// Others are left.
    No,
    /// It was, and the producer has ended the lease.
    Settled,
    /// It was, and the producer does not know.
    Unsettled,
}

impl Claim {
    /// As many requests, which all wait: for another worker of the same producer.
    pub(crate) fn anew(&self) -> Self {
        Self { waiting: self.waiting + self.reading + self.asking, ..Self::default() }
    }

    /// Whether any request lives by it.
    pub(crate) fn is_used(&self) -> bool {
        self.waiting + self.reading + self.asking > 0
    }

    /// A pull that was counted out already ended like that.
    pub(crate) fn ended(&mut self, end: End) -> Last {
        self.settled |= end == End::Confirmed { more: false };
        // Whoever came after the last one had asked has nothing to read.
        self.void |= self.settled;
        match (self.is_used(), self.settled) {
            (true, _) => Last::No,
            (false, true) => Last::Settled,
            (false, false) => Last::Unsettled,
        }
    }
}

/// What a producer has to be told of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum News {
    /// It is new.
    Wanted,
    /// It is over.
    Dropped,
}

/// What has been told over one connection, and what has not.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Renewal {
    seq: u64,
    /// The next message begins a new list.
    all: bool,
    /// The producer has asked for it.
    pub(crate) asked: bool,
    pub(crate) news: BTreeMap<OfferName, News>,
}

impl Renewal {
    /// Nothing has been told yet.
    pub(crate) fn from_start<'a>(claims: impl Iterator<Item = (&'a OfferName, &'a Claim)>) -> Self {
        let mut new = Self { seq: 0, all: true, asked: false, news: BTreeMap::new() };
        new.restart(claims);
        new
    }

    /// Everything is to be told again.
    pub(crate) fn restart<'a>(&mut self, claims: impl Iterator<Item = (&'a OfferName, &'a Claim)>) {
        self.all = true;
        self.news = claims.filter(|(_, claim)| !claim.void).map(|(name, _)| (*name, News::Wanted)).collect();
    }

    /// The messages that tell the news; at least one, the sign of life.
    pub(crate) fn messages(&mut self) -> Vec<WorkerMessage> {
        self.asked = false;
        let (mut wanted, mut dropped) = (Vec::new(), Vec::new());
        for (name, news) in std::mem::take(&mut self.news) {
            match news {
                News::Wanted => wanted.push(name),
                News::Dropped => dropped.push(name),
            }
        }
        let (mut wanted, mut dropped) = (wanted.into_iter(), dropped.into_iter());
        let mut messages = Vec::with_capacity(1);
        loop {
            let next = |names: &mut std::vec::IntoIter<OfferName>| {
                names.by_ref().take(LEASES_PER_MESSAGE_MAX).collect::<Vec<_>>()
            };
            let (wanted, dropped) = (next(&mut wanted), next(&mut dropped));
            if !messages.is_empty() && wanted.is_empty() && dropped.is_empty() {
                return messages;
            }
            messages.push(WorkerMessage::Renew { seq: self.seq, all: self.all, wanted, dropped });
            self.seq += 1;
            self.all = false;
        }
    }
}
