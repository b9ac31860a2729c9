//! Time as the state machines see it.
//!
//! A [`Moment`] is a reading of one process's monotonic clock, taken by a driver and handed to a machine as an
//! argument. It cannot be serialised: durations travel between processes, moments do not.

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// Nanoseconds on one process's monotonic clock, from a start that only that process knows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// The clock's start.
    pub const START: Self = Self(0);
    /// A moment that no clock reaches.
    pub const NEVER: Self = Self(u64::MAX);

    /// A moment so long after the clock's start.
    pub fn from_start(since: Duration) -> Self {
        Self(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Time passed since the clock's start.
    pub const fn since_start(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// Time from `earlier` to this moment, zero if `earlier` is not earlier.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;
    /// Saturates at [`Moment::NEVER`].
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Duration> for Moment {
    type Output = Self;
    /// Saturates at [`Moment::START`].
    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NEVER {
            return f.write_str("never");
        }
        write!(f, "{}.{:06}s", self.0 / 1_000_000_000, self.0 % 1_000_000_000 / 1_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Moment::NEVER + Duration::MAX, Moment::NEVER);
        assert_eq!(Moment::START - Duration::from_secs(1), Moment::START);
        assert_eq!(Moment::START.since(Moment::from_start(Duration::from_secs(3))), Duration::ZERO);
        let one = Moment::START + Duration::from_millis(1500);
        assert_eq!(one.to_string(), "1.500000s");
        assert_eq!(Moment::NEVER.to_string(), "never");
    }
}
