//! A set of block ids with one bit each, since a lookup is made for every block of every table.

/// Grows to the highest id that was put in, no further; the caller keeps ids below its pool's size.
#[derive(Debug, Clone, Default)]
pub(super) struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// Whether the id is in.
    #[inline]
    pub(super) fn contains(&self, id: u32) -> bool {
        self.words.get((id >> 6) as usize).is_some_and(|word| (word >> (id & 63)) & 1 == 1)
    }

    /// Puts an id in; says whether it is new.
    #[inline]
    pub(super) fn insert(&mut self, id: u32) -> bool {
        let at = (id >> 6) as usize;
        if at >= self.words.len() {
            self.words.resize(at + 1, 0);
        }
        let bit = 1u64 << (id & 63);
        match self.words.get_mut(at) {
            Some(word) => {
                let new = *word & bit == 0;
                *word |= bit;
                new
            }
            None => false,
        }
    }

    /// What is in one of two.
    pub(super) fn union(&self, other: &Self) -> Self {
        let (long, short) = if self.words.len() < other.words.len() { (other, self) } else { (self, other) };
        let mut all = long.clone();
        for (word, more) in all.words.iter_mut().zip(&short.words) {
            *word |= more;
        }
        all
    }

    /// How many are in.
    pub(super) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// All ids, in order.
    pub(super) fn each(&self, mut take: impl FnMut(u32)) {
        for (at, word) in self.words.iter().enumerate() {
            let mut left = *word;
            while left != 0 {
                take((at as u32) << 6 | left.trailing_zeros());
                left &= left - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_comes_out_in_order_and_once() {
        let mut bits = Bits::default();
        assert!(!bits.contains(0) && !bits.contains(u32::MAX));
        for (id, new) in [(700, true), (3, true), (64, true), (63, true), (3, false)] {
            assert_eq!(bits.insert(id), new);
        }
        let all = |bits: &Bits| {
            let mut ids = Vec::new();
            bits.each(|id| ids.push(id));
            ids
        };
        assert_eq!(all(&bits), [3, 63, 64, 700]);
        assert_eq!(bits.count(), 4);
        assert!(bits.contains(64) && !bits.contains(65));
        let mut other = Bits::default();
        other.insert(5);
        assert_eq!(all(&bits.union(&other)), [3, 5, 63, 64, 700]);
        assert_eq!(other.union(&bits).count(), 5);
    }
}
