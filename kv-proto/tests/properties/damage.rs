//! What may happen to bytes on their way.

use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Debug, Clone)]
pub(crate) enum Damage {
    Flip(prop::sample::Index, u8),
    Set(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Extend(Vec<u8>),
    Remove(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
}

impl Damage {
    pub(crate) fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        match self {
            Self::Flip(at, mask) => {
                let at = at.index(bytes.len());
                bytes[at] ^= mask;
            }
            Self::Set(at, byte) => {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            Self::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Self::Extend(more) => bytes.extend(more),
            Self::Remove(at) => drop(bytes.remove(at.index(bytes.len()))),
            Self::Insert(at, more) => {
                let at = at.index(bytes.len());
                bytes.splice(at..at, more.iter().copied());
            }
        }
    }
}

pub(crate) fn damage() -> impl Strategy<Value = Damage> {
    let at = || any::<prop::sample::Index>();
    prop_oneof![
        (at(), 1..=u8::MAX).prop_map(|(at, mask)| Damage::Flip(at, mask)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        at().prop_map(Damage::Cut),
        vec(any::<u8>(), 1..10).prop_map(Damage::Extend),
        at().prop_map(Damage::Remove),
        (at(), vec(any::<u8>(), 1..6)).prop_map(|(at, more)| Damage::Insert(at, more)),
    ]
}
