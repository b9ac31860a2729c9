//! Clocks of simulated processes: no two show the same time, and some run fast or slow.

use std::time::Duration;

use kv_proto::Moment;

use super::dice::Dice;
use super::world::Time;

/// A process's clock: it began at some other time than the world's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    offset: Time,
    /// Parts in a thousand by which it runs fast.
    fast: i64,
}

impl Clock {
    pub(super) fn draw(dice: &mut Dice) -> Self {
        Self { offset: dice.below(1_000_000_000), fast: 0 }
    }

    /// From now on it runs fast or slow. To be called before anybody has read it: what it shows changes.
    pub(super) fn drift(&mut self, dice: &mut Dice) {
        let parts = dice.between(3, 50) as i64;
        self.fast = if dice.chance(500) { parts } else { -parts };
    }

    pub(super) fn jump(&mut self, by: Time) {
        self.offset += by;
    }

    pub(super) fn read(self, now: Time) -> Moment {
        let ran = (now as i128 * (1000 + i128::from(self.fast)) / 1000) as u64;
        Moment::from_start(Duration::from_micros(self.offset + ran))
    }

    /// The world's time at which the clock shows a moment, rounded up.
    pub(super) fn when(self, moment: Moment) -> Time {
        let shown = moment.since_start().as_nanos().div_ceil(1_000) as i128;
        let ran = (shown - i128::from(self.offset)).max(0);
        (ran * 1000 / (1000 + i128::from(self.fast))) as u64 + 1
    }
}
