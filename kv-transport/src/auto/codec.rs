//! Addresses and keys of several transports in one. They come back from peers, so decoding trusts nothing (rule T-10).
//!
//! ```text
//! tag "kA" for addresses, "kK" for keys | version u8 = 1 | how many u8 | for each: length of name u8 | name | length u16 | bytes
//! ```
//!
//! Integers are little endian. A name stands once.

use std::collections::BTreeMap;

const VERSION: u8 = 1;
/// Longest name of a transport.
const NAME_MAX_BYTES: usize = 32;

/// What a list is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    Address,
    Key,
}

impl Tag {
    fn bytes(self) -> [u8; 3] {
        let letter = match self {
            Self::Address => b'A',
            Self::Key => b'K',
        };
        [b'k', letter, VERSION]
    }
}

/// Opaque bytes by the name of their transport.
pub(super) type List = BTreeMap<String, Vec<u8>>;

/// As bytes; `None` if something is too long.
pub(super) fn encode(tag: Tag, list: &List) -> Option<Vec<u8>> {
    let mut bytes = tag.bytes().to_vec();
    bytes.push(u8::try_from(list.len()).ok()?);
    for (name, value) in list {
        if name.is_empty() || name.len() > NAME_MAX_BYTES {
            return None;
        }
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(&u16::try_from(value.len()).ok()?.to_le_bytes());
        bytes.extend_from_slice(value);
    }
    Some(bytes)
}

/// From bytes; `None` if they are no such list.
pub(super) fn decode(tag: Tag, bytes: &[u8]) -> Option<List> {
    let (count, mut rest) = bytes.strip_prefix(&tag.bytes())?.split_first()?;
    let mut list = List::new();
    while let Some((len, after)) = rest.split_first() {
        let len = usize::from(*len);
        if len == 0 || len > NAME_MAX_BYTES {
            return None;
        }
        let (name, after) = after.split_at_checked(len)?;
        let name = std::str::from_utf8(name).ok()?.to_owned();
        let (len, after) = after.split_first_chunk::<2>()?;
        let (value, after) = after.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
        if value.is_empty() || list.insert(name, value.to_vec()).is_some() {
            return None;
        }
        rest = after;
    }
    // One that was cut off between two transports must not pass for a shorter list.
    (!list.is_empty() && list.len() == usize::from(*count)).then_some(list)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list() -> List {
        [("tcp".to_owned(), vec![1, 2, 3]), ("shm".to_owned(), vec![9; 300])].into()
    }

    #[test]
    fn t10_lists_come_back_and_damaged_ones_do_not() {
        let bytes = encode(Tag::Address, &list()).unwrap();
        assert_eq!(decode(Tag::Address, &bytes), Some(list()));
        assert_eq!(decode(Tag::Key, &bytes), None);
        for cut in 0..bytes.len() {
            assert_eq!(decode(Tag::Address, &bytes[..cut]), None, "{cut}");
        }
        let mut twice = [&bytes[..], &bytes[4..]].concat();
        twice[3] *= 2;
        assert_eq!(decode(Tag::Address, &twice), None);
        assert_eq!(encode(Tag::Key, &[(String::new(), vec![1])].into()), None);
        assert_eq!(encode(Tag::Key, &[("x".into(), vec![1; 70_000])].into()), None);
    }

    proptest! {
        #[test]
        fn t10_no_bytes_panic(tail in proptest::collection::vec(any::<u8>(), 0..80)) {
            let bytes = [&Tag::Key.bytes()[..], &tail].concat();
            if let Some(list) = decode(Tag::Key, &bytes) {
                prop_assert!(encode(Tag::Key, &list).is_some());
            }
        }
    }
}
