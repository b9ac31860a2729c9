//! Canaries: worlds in which one guard does not work. A simulator that does not see a canary die proves nothing.
//!
//! The machines themselves carry no switch. A canary undoes a guard where the machine meets the world: it changes
//! what the machine is told, or how its decision is followed, exactly as if the machine had decided without the
//! guard.

/// A guard that can be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Canary {
    /// P1: a load counts as good when its bytes are here, without asking.
    NoConfirmation,
    /// P1: `Lapsed` is taken for `Confirmed`.
    LapsedIgnored,
    /// P2: a second load under a lease takes the first one's confirmation.
    AttemptIgnored,
    /// P7: another life of P is taken for the one that granted the lease.
    IncarnationIgnored,
    /// P7: a restarted engine draws the same incarnation again.
    SameLife,
    /// P5: an ending that comes before the grant is answered with `Lapsed`.
    EarlyEndRefused,
    /// P3: D gives the blocks of an aborted load back at once.
    DestinationFreedOnAbort,
    /// P3: P gives the blocks of a finished request back at once.
    BlocksFreedAtFinish,
    /// P3: P gives blocks back when the first rank's lease has ended.
    FreedByFirstRank,
    /// P3: an abort that comes after the hand-over began gives P's blocks back.
    AbortFreesHandedOver,
    /// P3: a cancelled load is reported as ended before the transport is quiet.
    FailureBeforeQuiet,
    /// T-3: a read goes on writing after it was reported as failed.
    LateWrite,
    /// T-2: a read that brought only a part is reported as whole.
    PartialTakenAsWhole,
    /// P1: a load counts as good when one rank has it.
    OneRankEnough,
    /// P8: of a failed load a block more is kept than was verified.
    KeptTooLong,
    /// P1: what was read before a failure is kept although the lease had not held.
    CheckIgnored,
    /// P8: a failed load is used like a good one.
    FailedTakenAsLoaded,
    /// P4: D's worker lets no deadline pass.
    NoDeadlines,
    /// P4: a load that fails is noted, and its request is not told.
    FailureUntold,
    /// P2: P's worker lets no lease expire.
    NeverExpires,
    /// H-13: timers run only when the engine makes a step.
    RenewalTiedToSteps,
    /// H-11: blocks are paired from the tail of the two lists.
    PairedFromTail,
    /// H-3: an offer for another prompt is accepted, and confirmed.
    DigestIgnored,
    /// H-18: a read of other blocks than were offered is confirmed.
    OfferIgnored,
    /// P6: P's worker remembers ended leases for ever.
    EndedNeverForgotten,
    /// P6: D's worker keeps every producer that it ever knew.
    PeersNeverForgotten,
    /// P6: a connection that a worker lets go of stays open.
    DisconnectIgnored,
    /// P2: a rank that repeats its report counts for another rank.
    ReportsCounted,
    /// P2: a lease's end that is reported again frees its blocks again.
    DuplicateReleaseFreesTwice,
    /// H-2: held blocks are found by the request's id, not by the lease's.
    RequestIdTakenForLease,
    /// H-12: P's worker looks for leases to expire only until it meets one that lives.
    ReaperStopsAtFirstLive,
    /// H-13: a renewal that arrives at P prolongs nothing.
    RenewalForgotten,
    /// P3: D takes the loss of a peer for the end of the writes that it is still owed.
    PeerLossTakenAsQuiet,
    /// T-2: a read that brought other bytes than the source's is reported as whole.
    WrongBytesTaken,
    /// H-7: P hands over a prompt that was not computed to its end.
    HalfPromptHandedOver,
    /// H-28: D takes blocks that P found unequal for equal ones.
    UnequalTakenAsEqual,
    /// H-28: D's worker does not ask P to compare, although its transport may bring wrong bytes.
    NotCompared,
    /// P8: blocks of a failed load stay in D's prefix cache.
    CacheNotEvicted,
    /// H-30: a failed load is tried again however many others were.
    RetryWithoutBudget,
    /// H-30: a failed load is tried again however often it was.
    RetryWithoutEnd,
    /// H-30: a load begins although its producer's breaker is open.
    BreakerIgnored,
    /// H-11: each head is read where the next one is.
    OffByOneHead,
    /// H-11: of a window's blocks the first ones are read, as if it had not been clipped.
    WindowNotClipped,
    /// H-31: the layers of a pipeline stage are paired by their places in it, not by their names.
    StagesPairedByPlace,
    /// H-31: of tokens that are dealt out each rank's are taken for the next one's.
    DealtToNextRank,
    /// H-11: a state that has a token more in it than was offered is handed over.
    StateRanAhead,
    /// H-32: of a kept answer as many tokens are read back as it has, whatever the history says.
    HistoryCounted,
    /// H-17: one rank's ending counts for another rank of the same consumer too.
    ConsumerCountedTwice,
}

impl Canary {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::NoConfirmation,
        Self::LapsedIgnored,
        Self::AttemptIgnored,
        Self::IncarnationIgnored,
        Self::SameLife,
        Self::EarlyEndRefused,
        Self::DestinationFreedOnAbort,
        Self::BlocksFreedAtFinish,
        Self::FreedByFirstRank,
        Self::AbortFreesHandedOver,
        Self::FailureBeforeQuiet,
        Self::LateWrite,
        Self::PartialTakenAsWhole,
        Self::OneRankEnough,
        Self::KeptTooLong,
        Self::CheckIgnored,
        Self::FailedTakenAsLoaded,
        Self::NoDeadlines,
        Self::FailureUntold,
        Self::NeverExpires,
        Self::RenewalTiedToSteps,
        Self::PairedFromTail,
        Self::DigestIgnored,
        Self::OfferIgnored,
        Self::EndedNeverForgotten,
        Self::PeersNeverForgotten,
        Self::DisconnectIgnored,
        Self::ReportsCounted,
        Self::DuplicateReleaseFreesTwice,
        Self::RequestIdTakenForLease,
        Self::ReaperStopsAtFirstLive,
        Self::RenewalForgotten,
        Self::PeerLossTakenAsQuiet,
        Self::WrongBytesTaken,
        Self::HalfPromptHandedOver,
        Self::UnequalTakenAsEqual,
        Self::NotCompared,
        Self::CacheNotEvicted,
        Self::RetryWithoutBudget,
        Self::RetryWithoutEnd,
        Self::BreakerIgnored,
        Self::OffByOneHead,
        Self::WindowNotClipped,
        Self::StagesPairedByPlace,
        Self::DealtToNextRank,
        Self::StateRanAhead,
        Self::HistoryCounted,
        Self::ConsumerCountedTwice,
    ];

    /// A word for the command line and for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoConfirmation => "no-confirmation",
            Self::LapsedIgnored => "lapsed-ignored",
            Self::AttemptIgnored => "attempt-ignored",
            Self::IncarnationIgnored => "incarnation-ignored",
            Self::SameLife => "same-life",
            Self::EarlyEndRefused => "early-end-refused",
            Self::DestinationFreedOnAbort => "destination-freed-on-abort",
            Self::BlocksFreedAtFinish => "blocks-freed-at-finish",
            Self::FreedByFirstRank => "freed-by-first-rank",
            Self::AbortFreesHandedOver => "abort-frees-handed-over",
            Self::FailureBeforeQuiet => "failure-before-quiet",
            Self::LateWrite => "late-write",
            Self::PartialTakenAsWhole => "partial-taken-as-whole",
            Self::OneRankEnough => "one-rank-enough",
            Self::KeptTooLong => "kept-too-long",
            Self::CheckIgnored => "check-ignored",
            Self::FailedTakenAsLoaded => "failed-taken-as-loaded",
            Self::NoDeadlines => "no-deadlines",
            Self::FailureUntold => "failure-untold",
            Self::NeverExpires => "never-expires",
            Self::RenewalTiedToSteps => "renewal-tied-to-steps",
            Self::PairedFromTail => "paired-from-tail",
            Self::DigestIgnored => "digest-ignored",
            Self::OfferIgnored => "offer-ignored",
            Self::EndedNeverForgotten => "ended-never-forgotten",
            Self::PeersNeverForgotten => "peers-never-forgotten",
            Self::DisconnectIgnored => "disconnect-ignored",
            Self::ReportsCounted => "reports-counted",
            Self::DuplicateReleaseFreesTwice => "duplicate-release-frees-twice",
            Self::RequestIdTakenForLease => "request-id-taken-for-lease",
            Self::ReaperStopsAtFirstLive => "reaper-stops-at-first-live",
            Self::RenewalForgotten => "renewal-forgotten",
            Self::PeerLossTakenAsQuiet => "peer-loss-taken-as-quiet",
            Self::WrongBytesTaken => "wrong-bytes-taken",
            Self::HalfPromptHandedOver => "half-prompt-handed-over",
            Self::UnequalTakenAsEqual => "unequal-taken-as-equal",
            Self::NotCompared => "not-compared",
            Self::CacheNotEvicted => "cache-not-evicted",
            Self::RetryWithoutBudget => "retry-without-budget",
            Self::RetryWithoutEnd => "retry-without-end",
            Self::BreakerIgnored => "breaker-ignored",
            Self::OffByOneHead => "off-by-one-head",
            Self::WindowNotClipped => "window-not-clipped",
            Self::StagesPairedByPlace => "stages-paired-by-place",
            Self::DealtToNextRank => "dealt-to-next-rank",
            Self::StateRanAhead => "state-ran-ahead",
            Self::HistoryCounted => "history-counted",
            Self::ConsumerCountedTwice => "consumer-counted-twice",
        }
    }

    /// The canary of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|canary| canary.name() == name)
    }
}
