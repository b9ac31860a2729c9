//! What can go wrong in a simulated world, as data: drawn from a seed, printed, taken out one by one.

use std::collections::BTreeMap;
use std::fmt;

use super::dice::Dice;

/// A kind of fault. Each world draws some; a whole run shows each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// A worker message is lost.
    MessageLost,
    /// A worker message arrives twice.
    MessageTwice,
    /// A worker message is late, so that later ones overtake it.
    MessageLate,
    /// A handshake query or its answer is lost.
    HandshakeLost,
    /// A connection between two workers breaks.
    LinkBroken,
    /// A connection passes nothing for a while, then everything at once and in order. It never breaks.
    LinkClogged,
    /// Nothing passes from one worker to another for a while; the way back is open.
    OneWayPartition,
    /// An engine dies and comes back at the same address with the same id.
    Restart,
    /// An engine dies and stays away until the world is healed.
    Crash,
    /// A process stands still for longer than a lease lives.
    Pause,
    /// A process's clock jumps ahead.
    ClockJump,
    /// A process's clock runs fast or slow all its life.
    ClockDrift,
    /// An engine's step takes long: plans, reports and arrivals wait for its end.
    SlowStep,
    /// Other requests take every block of an engine that is free, for a while.
    PoolPressure,
    /// An engine drains: it takes nothing new, ends the old by a limit, and comes back after a while.
    Drained,
    /// A request is preempted while it computes: its blocks are gone, and it begins again.
    Preempted,
    /// A prefill ends before its prompt does; nothing may be handed over.
    PrefillShort,
    /// A read fails at some time, with some of its bytes in place.
    ReadFailed,
    /// A read makes no progress until its limit.
    ReadStalled,
    /// A read is slower than the lease lives.
    ReadSlow,
    /// A transfer completes, but brought only a part of what was asked for; its transport says so.
    ReadPartial,
    /// A transfer brings bytes that are not the source's, all of them in place when its transport notices.
    ReadWrong,
    /// A transfer puts a wrong value into one cell and says that all is well. Only in worlds with checksums: without
    /// them nobody can notice.
    ReadCorrupt,
    /// A read is cancelled, or loses its peer, and goes on writing for long before its transport says that it is quiet.
    QuietLate,
    /// A report from a worker reaches the scheduler half late.
    ReportLate,
    /// A report from a worker reaches the scheduler half twice.
    ReportTwice,
    /// A plan reaches one worker late.
    PlanLate,
    /// A client goes away at any moment.
    ClientGone,
    /// A client goes away before its request is scheduled on the producer.
    GoneBeforePrefill,
    /// A client goes away while the producer computes.
    GoneInPrefill,
    /// A client goes away when the producer has finished and no consumer knows of it.
    GoneBeforeDecode,
    /// A client goes away while its request is queued on the consumer.
    GoneQueued,
    /// A client goes away when its request's read begins.
    GoneLoading,
    /// A client goes away when the bytes are here and the producer is asked.
    GoneConfirming,
    /// A client goes away while the consumer decodes.
    GoneDecoding,
    /// The router brings the same parameters a second time, to whatever consumer.
    RouterRetry,
    /// The router does not wait for one consumer and brings the same parameters to another as well.
    RouterElsewhere,
    /// The router keeps the parameters back until the lease is over.
    RouterLate,
    /// The router loses the parameters.
    RouterLost,
    /// The router brings parameters of a producer's former life.
    RouterStale,
    /// A request comes under an id that is in use, or was a moment ago, at the same engine.
    IdReused,
    /// The prompt is changed on its way to the consumer.
    PromptChanged,
    /// A client names other blocks than it was told.
    OfferForged,
}

impl FaultKind {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::MessageLost,
        Self::MessageTwice,
        Self::MessageLate,
        Self::HandshakeLost,
        Self::LinkBroken,
        Self::LinkClogged,
        Self::OneWayPartition,
        Self::Restart,
        Self::Crash,
        Self::Pause,
        Self::ClockJump,
        Self::ClockDrift,
        Self::SlowStep,
        Self::PoolPressure,
        Self::Drained,
        Self::Preempted,
        Self::PrefillShort,
        Self::ReadFailed,
        Self::ReadStalled,
        Self::ReadSlow,
        Self::ReadPartial,
        Self::ReadWrong,
        Self::ReadCorrupt,
        Self::QuietLate,
        Self::ReportLate,
        Self::ReportTwice,
        Self::PlanLate,
        Self::ClientGone,
        Self::GoneBeforePrefill,
        Self::GoneInPrefill,
        Self::GoneBeforeDecode,
        Self::GoneQueued,
        Self::GoneLoading,
        Self::GoneConfirming,
        Self::GoneDecoding,
        Self::RouterRetry,
        Self::RouterElsewhere,
        Self::RouterLate,
        Self::RouterLost,
        Self::RouterStale,
        Self::IdReused,
        Self::PromptChanged,
        Self::OfferForged,
    ];

    /// A word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MessageLost => "message_lost",
            Self::MessageTwice => "message_twice",
            Self::MessageLate => "message_late",
            Self::HandshakeLost => "handshake_lost",
            Self::LinkBroken => "link_broken",
            Self::LinkClogged => "link_clogged",
            Self::OneWayPartition => "one_way_partition",
            Self::Restart => "restart",
            Self::Crash => "crash",
            Self::Pause => "pause",
            Self::ClockJump => "clock_jump",
            Self::ClockDrift => "clock_drift",
            Self::SlowStep => "slow_step",
            Self::PoolPressure => "pool_pressure",
            Self::Drained => "drained",
            Self::Preempted => "preempted",
            Self::PrefillShort => "prefill_short",
            Self::ReadFailed => "read_failed",
            Self::ReadStalled => "read_stalled",
            Self::ReadSlow => "read_slow",
            Self::ReadPartial => "read_partial",
            Self::ReadWrong => "read_wrong",
            Self::ReadCorrupt => "read_corrupt",
            Self::QuietLate => "quiet_late",
            Self::ReportLate => "report_late",
            Self::ReportTwice => "report_twice",
            Self::PlanLate => "plan_late",
            Self::ClientGone => "client_gone",
            Self::GoneBeforePrefill => "gone_before_prefill",
            Self::GoneInPrefill => "gone_in_prefill",
            Self::GoneBeforeDecode => "gone_before_decode",
            Self::GoneQueued => "gone_queued",
            Self::GoneLoading => "gone_loading",
            Self::GoneConfirming => "gone_confirming",
            Self::GoneDecoding => "gone_decoding",
            Self::RouterRetry => "router_retry",
            Self::RouterElsewhere => "router_elsewhere",
            Self::RouterLate => "router_late",
            Self::RouterLost => "router_lost",
            Self::RouterStale => "router_stale",
            Self::IdReused => "id_reused",
            Self::PromptChanged => "prompt_changed",
            Self::OfferForged => "offer_forged",
        }
    }

    /// The highest rate that is drawn for it, in thousandths. What strikes once in an engine's life strikes often, what
    /// is thrown for at each message or turn does not.
    const fn rate_max(self) -> u64 {
        match self {
            Self::Restart
            | Self::Crash
            | Self::Pause
            | Self::ClockJump
            | Self::ClockDrift
            | Self::PoolPressure
            | Self::Drained
            | Self::RouterStale => 700,
            Self::OneWayPartition => 400,
            Self::LinkBroken | Self::LinkClogged | Self::SlowStep => 60,
            Self::GoneInPrefill | Self::GoneDecoding => 100,
            _ => 350,
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The faults of one world: how likely each kind is wherever it can strike, in thousandths. Kinds that strike
/// engines as a whole are likelihoods per engine and world.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FaultPlan {
    rates: BTreeMap<FaultKind, u64>,
}

impl FaultPlan {
    /// No fault at all.
    pub fn none() -> Self {
        Self::default()
    }

    /// Draws a plan: some kinds, each at its own rate. One world in ten is free of faults.
    pub fn draw(dice: &mut Dice) -> Self {
        let mut rates = BTreeMap::new();
        if dice.chance(100) {
            return Self { rates };
        }
        // Few kinds in some worlds, many in others: single faults are not hidden behind others.
        let share = dice.between(40, 450);
        for kind in FaultKind::ALL {
            if dice.chance(share) {
                rates.insert(*kind, dice.between(20, kind.rate_max()));
            }
        }
        Self { rates }
    }

    /// The kinds that can strike.
    pub fn kinds(&self) -> impl Iterator<Item = FaultKind> + '_ {
        self.rates.keys().copied()
    }

    /// Whether nothing can strike.
    pub fn is_empty(&self) -> bool {
        self.rates.is_empty()
    }

    /// The same plan without one kind.
    pub fn without(&self, kind: FaultKind) -> Self {
        let mut rates = self.rates.clone();
        rates.remove(&kind);
        Self { rates }
    }

    /// Throws for one kind at a place where it can strike.
    pub fn strikes(&self, kind: FaultKind, dice: &mut Dice) -> bool {
        self.rates.get(&kind).is_some_and(|rate| dice.chance(*rate))
    }
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rates.is_empty() {
            return f.write_str("none");
        }
        let all: Vec<String> = self.rates.iter().map(|(kind, rate)| format!("{kind} {rate}/1000")).collect();
        f.write_str(&all.join(", "))
    }
}
