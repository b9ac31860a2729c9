//! What must hold in every world. Each promise has a file that says how it is judged.

mod bounded;
mod calm;
mod conserved;
mod content;
mod ends_once;
mod healed;
pub(super) mod in_time;
mod no_hang;
mod quiet;
pub(super) mod sparing;

use super::world::World;

/// A promise that the simulator judges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Invariant {
    /// P1, P8: see `content.rs`.
    Content,
    /// P3: see `quiet.rs`.
    Quiet,
    /// P2: see `ends_once.rs`.
    EndsOnce,
    /// P3: see `conserved.rs`.
    Conserved,
    /// P4: see `no_hang.rs`.
    NoHang,
    /// P6: see `healed.rs`.
    Healed,
    /// P5: see `calm.rs`.
    Calm,
    /// P6: see `bounded.rs`.
    Bounded,
    /// P4, P1: see `in_time.rs`.
    InTime,
    /// P8: see `sparing.rs`.
    Sparing,
}

impl Invariant {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::Content,
        Self::Quiet,
        Self::EndsOnce,
        Self::Conserved,
        Self::NoHang,
        Self::Healed,
        Self::Calm,
        Self::Bounded,
        Self::InTime,
        Self::Sparing,
    ];

    /// A word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Content => content::NAME,
            Self::Quiet => quiet::NAME,
            Self::EndsOnce => ends_once::NAME,
            Self::Conserved => conserved::NAME,
            Self::NoHang => no_hang::NAME,
            Self::Healed => healed::NAME,
            Self::Calm => calm::NAME,
            Self::Bounded => bounded::NAME,
            Self::InTime => in_time::NAME,
            Self::Sparing => sparing::NAME,
        }
    }
}

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq)]
pub struct Violation {
    /// Which.
    pub invariant: Invariant,
    /// When, in milliseconds of the world's time.
    pub at_ms: f64,
    /// What happened.
    pub what: String,
}

/// Judges what can only be judged when everything should have ended.
pub(super) fn at_end(world: &mut World) {
    no_hang::judge(world);
    healed::judge(world);
    conserved::judge(world);
    bounded::judge(world);
}
