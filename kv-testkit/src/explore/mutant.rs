//! Guards that can be taken out where the machines meet the world, to see that the explorer notices.

use super::Bounds;

/// A guard that can be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// A load is good without asking.
    NoConfirmation,
    /// A load whose lease did not hold counts as good.
    LapsedIsGood,
    /// P's blocks are free when the request has finished.
    FreedAtFinish,
    /// P's blocks are free when the first rank's lease has ended.
    FreedByFirstRank,
    /// D's blocks are free when the client has gone.
    FreedOnAbort,
    /// An ending that reaches P's worker before the grant is lost.
    EarlyEndDropped,
    /// A repeated ending frees P's blocks again.
    RepeatFreesAgain,
    /// Every life of P has the same incarnation, so that a reborn P is taken for the former one.
    IncarnationIgnored,
    /// Nobody at D looks at the clock.
    NoDeadlines,
    /// Blocks that P found unequal count as equal.
    UnequalIsGood,
}

impl Mutant {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::NoConfirmation,
        Self::LapsedIsGood,
        Self::FreedAtFinish,
        Self::FreedByFirstRank,
        Self::FreedOnAbort,
        Self::EarlyEndDropped,
        Self::RepeatFreesAgain,
        Self::IncarnationIgnored,
        Self::NoDeadlines,
        Self::UnequalIsGood,
    ];

    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoConfirmation => "no-confirmation",
            Self::LapsedIsGood => "lapsed-is-good",
            Self::FreedAtFinish => "freed-at-finish",
            Self::FreedByFirstRank => "freed-by-first-rank",
            Self::FreedOnAbort => "freed-on-abort",
            Self::EarlyEndDropped => "early-end-dropped",
            Self::RepeatFreesAgain => "repeat-frees-again",
            Self::IncarnationIgnored => "incarnation-ignored",
            Self::NoDeadlines => "no-deadlines",
            Self::UnequalIsGood => "unequal-is-good",
        }
    }

    /// The one of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|mutant| mutant.name() == name)
    }

    /// Bounds within which it must be noticed: what its story needs, and nothing else.
    pub const fn bounds(self) -> Bounds {
        let still = Bounds { name: self.name(), ..Bounds::STILL };
        match self {
            Self::NoConfirmation | Self::LapsedIsGood => Bounds { jumps: 3, ..still },
            Self::FreedAtFinish | Self::EarlyEndDropped => still,
            Self::FreedByFirstRank => Bounds { ranks: 2, ..still },
            Self::FreedOnAbort => Bounds { aborts: 1, faults: 1, ..still },
            Self::RepeatFreesAgain => Bounds { repeats: 1, faults: 1, ..still },
            Self::IncarnationIgnored => {
                Bounds { requests: 2, producer_deaths: 1, jumps: 1, faults: 1, ..still }
            }
            Self::NoDeadlines => Bounds { losses: 1, faults: 1, ..still },
            Self::UnequalIsGood => Bounds { faults: 1, ..still }.checked(),
        }
    }
}
