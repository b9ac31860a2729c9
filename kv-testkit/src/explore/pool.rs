//! Values as numbers: equal ones share one, so that a world is a handful of numbers.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hash};

use foldhash::fast::FixedState;
use foldhash::quality::FixedState as Thorough;

/// A map that is only looked up, never walked through: its order is nobody's business.
pub(super) type Lookup<K, V> = HashMap<K, V, FixedState>;

/// A set that is only looked up.
pub(super) type Seen = HashSet<u128, FixedState>;

/// A name for a value: two hashes of 64 bits with different seeds.
///
/// Among `n` values the probability that any two share a name by chance is about `n² / 2^129`: at a thousand million
/// values about one in 10²⁰. So names stand for values, and no value is ever compared.
pub(super) fn name_of<T: Hash>(value: &T) -> u128 {
    let one = Thorough::with_seed(0x6b76_5f63_6f6e_6e31).hash_one(value);
    let two = Thorough::with_seed(0x9e37_79b9_7f4a_7c15).hash_one(value);
    u128::from(one) << 64 | u128::from(two)
}

/// Every value that was ever seen, once, by number.
#[derive(Debug)]
pub(super) struct Pool<T> {
    items: Vec<T>,
    numbers: Lookup<u128, u32>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self { items: Vec::new(), numbers: Lookup::default() }
    }
}

impl<T: Hash> Pool<T> {
    /// The value's number.
    pub(super) fn number(&mut self, item: T) -> u32 {
        let Self { items, numbers } = self;
        *numbers.entry(name_of(&item)).or_insert_with(|| {
            items.push(item);
            (items.len() - 1) as u32
        })
    }

    /// The value of a number that this pool gave.
    pub(super) fn get(&self, number: u32) -> &T {
        &self.items[number as usize]
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }
}
