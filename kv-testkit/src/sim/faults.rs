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
    /// A read fails, with some of its bytes in place.
    ReadFailed,
    /// A read makes no progress until its limit.
    ReadStalled,
    /// A read is slower than the lease lives.
    ReadSlow,
    /// A report from a worker reaches the scheduler half late.
    ReportLate,
    /// A plan reaches one worker late.
    PlanLate,
    /// A client goes away.
    ClientGone,
    /// The router brings the same parameters a second time, to the same or another consumer.
    RouterRetry,
    /// The router keeps the parameters back until the lease is over.
    RouterLate,
    /// The router loses the parameters.
    RouterLost,
    /// The prompt is changed on its way to the consumer.
    PromptChanged,
    /// A client names other blocks than it was told.
    OfferForged,
    /// A request is preempted while it computes.
    Preempted,
}

impl FaultKind {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::MessageLost,
        Self::MessageTwice,
        Self::MessageLate,
        Self::HandshakeLost,
        Self::LinkBroken,
        Self::OneWayPartition,
        Self::Restart,
        Self::Crash,
        Self::Pause,
        Self::ClockJump,
        Self::ReadFailed,
        Self::ReadStalled,
        Self::ReadSlow,
        Self::ReportLate,
        Self::PlanLate,
        Self::ClientGone,
        Self::RouterRetry,
        Self::RouterLate,
        Self::RouterLost,
        Self::PromptChanged,
        Self::OfferForged,
        Self::Preempted,
    ];

    /// A word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MessageLost => "message_lost",
            Self::MessageTwice => "message_twice",
            Self::MessageLate => "message_late",
            Self::HandshakeLost => "handshake_lost",
            Self::LinkBroken => "link_broken",
            Self::OneWayPartition => "one_way_partition",
            Self::Restart => "restart",
            Self::Crash => "crash",
            Self::Pause => "pause",
            Self::ClockJump => "clock_jump",
            Self::ReadFailed => "read_failed",
            Self::ReadStalled => "read_stalled",
            Self::ReadSlow => "read_slow",
            Self::ReportLate => "report_late",
            Self::PlanLate => "plan_late",
            Self::ClientGone => "client_gone",
            Self::RouterRetry => "router_retry",
            Self::RouterLate => "router_late",
            Self::RouterLost => "router_lost",
            Self::PromptChanged => "prompt_changed",
            Self::OfferForged => "offer_forged",
            Self::Preempted => "preempted",
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
        let share = dice.between(80, 600);
        for kind in FaultKind::ALL {
            if dice.chance(share) {
                let high = match kind {
                    FaultKind::Restart | FaultKind::Crash | FaultKind::Pause | FaultKind::ClockJump => 700,
                    FaultKind::OneWayPartition => 400,
                    FaultKind::LinkBroken => 60,
                    _ => 350,
                };
                rates.insert(*kind, dice.between(20, high));
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
