//! The one source of chance in a simulated world: the same seed gives the same world on every machine.

/// A small generator (SplitMix64, after Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Dice that always fall the same way for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        if end == 0 { 0 } else { self.number() % end }
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True in `permille` of a thousand throws.
    pub fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// Dice of their own, so that throws for one matter do not shift those for another.
    pub fn split(&mut self) -> Self {
        Self::new(self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_falls_the_same_way() {
        let throw = |seed| {
            (0..50)
                .map(|_| 0)
                .fold((Dice::new(seed), Vec::new()), |(mut d, mut v), _| {
                    v.push(d.between(3, 9));
                    (d, v)
                })
                .1
        };
        assert_eq!(throw(5), throw(5));
        assert_ne!(throw(5), throw(6));
        assert!(throw(5).iter().all(|n| (3..=9).contains(n)));
    }
}
