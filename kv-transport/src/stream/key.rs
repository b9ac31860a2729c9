//! Region keys as bytes. They come back from peers, so decoding trusts nothing (rule T-10).
//!
//! ```text
//! key: "kk" | version u8 = 1 | region number u64 | region nonce u64
//! ```
//!
//! Integers are little endian.

use crate::contract::RegionKey;
use crate::error::TransportError;

const KEY_TAG: [u8; 3] = [b'k', b'k', 1];
const KEY_BYTES: usize = 3 + 8 + 8;

/// A random number that names one life of a transport.
pub(crate) type Nonce = [u8; 16];

/// Names one registration of a region in one life of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) region: u64,
    pub(crate) nonce: u64,
}

impl Key {
    pub(crate) fn encode(self) -> Result<RegionKey, TransportError> {
        let mut bytes = Vec::with_capacity(KEY_BYTES);
        bytes.extend_from_slice(&KEY_TAG);
        bytes.extend_from_slice(&self.region.to_le_bytes());
        bytes.extend_from_slice(&self.nonce.to_le_bytes());
        RegionKey::from_bytes(bytes)
    }

    /// Takes a key apart for the transport of this name.
    pub(crate) fn decode(key: &RegionKey, transport: &'static str) -> Result<Self, TransportError> {
        let bad = TransportError::BadKey { transport };
        let Some(rest) = key.as_bytes().strip_prefix(&KEY_TAG) else { return Err(bad) };
        let Some((region, rest)) = rest.split_first_chunk::<8>() else { return Err(bad) };
        let Ok(nonce) = <[u8; 8]>::try_from(rest) else { return Err(bad) };
        Ok(Self { region: u64::from_le_bytes(*region), nonce: u64::from_le_bytes(nonce) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn t10_golden_bytes() {
        let key = Key { region: 2, nonce: 0x0102_0304_0506_0708 }.encode().unwrap();
        assert_eq!(key.as_bytes(), [b'k', b'k', 1, 2, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
    }

    #[test]
    fn t10_damaged_keys_are_refused() {
        let key = Key { region: 1, nonce: 2 }.encode().unwrap();
        for cut in 1..key.as_bytes().len() {
            let short = RegionKey::from_bytes(key.as_bytes()[..cut].to_vec()).unwrap();
            assert_eq!(Key::decode(&short, "x"), Err(TransportError::BadKey { transport: "x" }));
        }
    }

    proptest! {
        #[test]
        fn t10_no_bytes_panic_and_what_decodes_encodes_back(
            bytes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 1..64),
                proptest::collection::vec(any::<u8>(), 16).prop_map(|tail| [&KEY_TAG[..], &tail].concat()),
            ]
        ) {
            let key = RegionKey::from_bytes(bytes).unwrap();
            if let Ok(decoded) = Key::decode(&key, "x") {
                prop_assert_eq!(decoded.encode().unwrap(), key);
            }
        }
    }
}
