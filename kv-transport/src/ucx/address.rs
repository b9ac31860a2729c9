//! Addresses and region keys as bytes. Both come back from peers, so decoding trusts nothing (rule T-10).
//!
//! ```text
//! address: "kva" | version u8 = 2 | life 16 bytes | boot of the host 16 bytes | network namespace u64 |
//!          length u16 | UCX's worker address | checksum u64
//! key:     "kvk" | version u8 = 1 | life 16 bytes | region number u64 | region nonce u64 | first byte u64 |
//!          length of the region u64 | length u16 | UCX's remote key | checksum u64
//! ```
//!
//! Integers are little endian. UCX parses its own bytes without being told their length, so what is damaged or cut
//! off must not reach it: hence the checksum. It finds accidents. It keeps out nobody who means harm.

use super::NAME;
use super::home::Home;
use crate::contract::{Address, OPAQUE_MAX_BYTES, RegionKey};
use crate::error::TransportError;

const ADDRESS_TAG: [u8; 4] = *b"kva\x02";
const KEY_TAG: [u8; 4] = *b"kvk\x01";
const ADDRESS_FIXED_BYTES: usize = 4 + 16 + 16 + 8 + 2 + 8;

/// Longest worker address that fits.
pub(super) const WORKER_ADDRESS_MAX: usize = OPAQUE_MAX_BYTES - ADDRESS_FIXED_BYTES;

/// A random number that names one life of a transport.
pub(super) type Life = [u8; 16];

/// FNV-1a.
fn checksum(bytes: &[u8]) -> [u8; 8] {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes()
}

/// What stands before a good checksum.
fn sealed(bytes: &[u8]) -> Option<&[u8]> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    (checksum(body) == *sum).then_some(body)
}

fn u64_of(bytes: &[u8]) -> Option<(u64, &[u8])> {
    bytes.split_first_chunk::<8>().map(|(number, rest)| (u64::from_le_bytes(*number), rest))
}

/// Bytes after their length, which have to be all that is left.
fn counted(bytes: &[u8]) -> Option<&[u8]> {
    let (len, rest) = bytes.split_first_chunk::<2>()?;
    (usize::from(u16::from_le_bytes(*len)) == rest.len() && !rest.is_empty()).then_some(rest)
}

fn push_counted(bytes: &mut Vec<u8>, what: &[u8]) {
    // What is too long for its length is too long for an opaque value, which is refused in a moment.
    bytes.extend_from_slice(&u16::try_from(what.len()).unwrap_or(u16::MAX).to_le_bytes());
    bytes.extend_from_slice(what);
    let sum = checksum(bytes);
    bytes.extend_from_slice(&sum);
}

/// Where a transport can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) life: Life,
    pub(super) home: Home,
    pub(super) worker: Vec<u8>,
}

impl Endpoint {
    pub(super) fn encode(&self) -> Result<Address, TransportError> {
        let mut bytes = ADDRESS_TAG.to_vec();
        bytes.extend_from_slice(&self.life);
        bytes.extend_from_slice(&self.home.boot);
        bytes.extend_from_slice(&self.home.namespace.to_le_bytes());
        push_counted(&mut bytes, &self.worker);
        Address::from_bytes(bytes)
    }

    pub(super) fn decode(address: &Address) -> Result<Self, TransportError> {
        let bad = |reason| TransportError::BadAddress { transport: NAME, reason };
        if !address.as_bytes().starts_with(&ADDRESS_TAG) {
            return Err(bad("it begins differently"));
        }
        let body = sealed(address.as_bytes()).ok_or(bad("its checksum is wrong"))?;
        let rest = body.strip_prefix(&ADDRESS_TAG).ok_or(bad("it is cut off"))?;
        let (life, rest) = rest.split_first_chunk::<16>().ok_or(bad("it is cut off"))?;
        let (boot, rest) = rest.split_first_chunk::<16>().ok_or(bad("it is cut off"))?;
        let (namespace, rest) = u64_of(rest).ok_or(bad("it is cut off"))?;
        let worker = counted(rest).ok_or(bad("it has another length than announced"))?;
        Ok(Self { life: *life, home: Home { boot: *boot, namespace }, worker: worker.to_vec() })
    }
}

/// Names one registration of a region in one life of a transport, and says how to read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) life: Life,
    pub(super) region: u64,
    pub(super) nonce: u64,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) rkey: Vec<u8>,
}

impl Key {
    pub(super) fn encode(&self) -> Result<RegionKey, TransportError> {
        let mut bytes = KEY_TAG.to_vec();
        bytes.extend_from_slice(&self.life);
        for number in [self.region, self.nonce, self.base, self.len] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        push_counted(&mut bytes, &self.rkey);
        RegionKey::from_bytes(bytes)
    }

    pub(super) fn decode(key: &RegionKey) -> Result<Self, TransportError> {
        Self::parse(key.as_bytes()).ok_or(TransportError::BadKey { transport: NAME })
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let rest = sealed(bytes)?.strip_prefix(&KEY_TAG)?;
        let (life, rest) = rest.split_first_chunk::<16>()?;
        let (region, rest) = u64_of(rest)?;
        let (nonce, rest) = u64_of(rest)?;
        let (base, rest) = u64_of(rest)?;
        let (len, rest) = u64_of(rest)?;
        base.checked_add(len)?;
        Some(Self { life: *life, region, nonce, base, len, rkey: counted(rest)?.to_vec() })
    }

    /// Whether the range lies in the region.
    pub(super) fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint { life: [7; 16], home: Home { boot: [8; 16], namespace: 9 }, worker: vec![1, 2, 3] }
    }

    fn key() -> Key {
        Key { life: [7; 16], region: 2, nonce: 3, base: 0x1000, len: 64, rkey: vec![9; 11] }
    }

    #[test]
    fn t10_every_damage_and_every_cut_is_refused() {
        let (address, key) = (endpoint().encode().unwrap(), key().encode().unwrap());
        let refused = |bytes: Vec<u8>, what: &str| {
            let bad_address = Endpoint::decode(&Address::from_bytes(bytes.clone()).unwrap());
            assert!(matches!(bad_address, Err(TransportError::BadAddress { .. })), "{what}");
            let bad_key = Key::decode(&RegionKey::from_bytes(bytes).unwrap());
            assert!(matches!(bad_key, Err(TransportError::BadKey { .. })), "{what}");
        };
        for good in [address.as_bytes(), key.as_bytes()] {
            for cut in 1..good.len() {
                refused(good[..cut].to_vec(), &format!("cut at {cut}"));
            }
            for at in 0..good.len() * 8 {
                let mut bytes = good.to_vec();
                bytes[at / 8] ^= 1 << (at % 8);
                refused(bytes, &format!("bit {at}"));
            }
            refused([good, &[0]].concat(), "one byte too many");
        }
        assert_eq!(Endpoint::decode(&address), Ok(endpoint()));
    }

    #[test]
    fn t10_a_region_beyond_all_numbers_is_refused() {
        let wide = Key { base: u64::MAX, ..key() }.encode().unwrap();
        assert!(Key::decode(&wide).is_err());
        assert!(key().contains(0, 64) && !key().contains(1, 64) && !key().contains(u64::MAX, 2));
    }

    proptest! {
        #[test]
        fn t10_no_bytes_panic_and_what_decodes_encodes_back(
            tag in prop_oneof![Just(ADDRESS_TAG), Just(KEY_TAG)],
            tail in proptest::collection::vec(any::<u8>(), 1..90),
        ) {
            let mut bytes = [&tag[..], &tail].concat();
            let sum = checksum(&bytes);
            bytes.extend_from_slice(&sum);
            let address = Address::from_bytes(bytes.clone()).unwrap();
            if let Ok(endpoint) = Endpoint::decode(&address) {
                prop_assert_eq!(endpoint.encode().unwrap(), address);
            }
            let key = RegionKey::from_bytes(bytes).unwrap();
            if let Ok(decoded) = Key::decode(&key) {
                prop_assert_eq!(decoded.encode().unwrap(), key);
            }
        }
    }
}
