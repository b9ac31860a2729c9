//! Addresses as bytes. They come back from peers, so decoding trusts nothing (rule T-10).
//!
//! ```text
//! address: "ka" | version u8 = 1 | port u16 | instance nonce 16 bytes | length of host u8 | host, UTF-8
//! ```
//!
//! Integers are little endian.

use std::net::IpAddr;

use super::NAME;
use crate::contract::Address;
use crate::error::TransportError;
use crate::stream::key::Nonce;
use crate::stream::target::{Place, Target};

const ADDRESS_TAG: [u8; 3] = [b'k', b'a', 1];
const ADDRESS_FIXED_BYTES: usize = 3 + 2 + 16 + 1;

/// Longest name that the domain name system knows.
const HOST_MAX_BYTES: usize = 253;

/// Where a transport can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) nonce: Nonce,
}

/// Whether the text can name a host: an IP address, or letters, digits, dots, hyphens and underscores.
pub(super) fn host_is_sound(host: &str) -> bool {
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    host.parse::<IpAddr>().is_ok() || ((1..=HOST_MAX_BYTES).contains(&host.len()) && host.bytes().all(name))
}

impl Endpoint {
    pub(super) fn target(self) -> Target {
        Target { place: Place::Tcp { host: self.host, port: self.port }, nonce: self.nonce }
    }

    pub(super) fn encode(&self) -> Result<Address, TransportError> {
        let bad = |reason| TransportError::BadAddress { transport: NAME, reason };
        let length = u8::try_from(self.host.len()).map_err(|_| bad("the host is too long"))?;
        let mut bytes = Vec::with_capacity(ADDRESS_FIXED_BYTES + self.host.len());
        bytes.extend_from_slice(&ADDRESS_TAG);
        bytes.extend_from_slice(&self.port.to_le_bytes());
        bytes.extend_from_slice(&self.nonce);
        bytes.push(length);
        bytes.extend_from_slice(self.host.as_bytes());
        Address::from_bytes(bytes)
    }

    pub(super) fn decode(address: &Address) -> Result<Self, TransportError> {
        let bad = |reason| TransportError::BadAddress { transport: NAME, reason };
        let rest = address.as_bytes().strip_prefix(&ADDRESS_TAG).ok_or(bad("it begins differently"))?;
        let (port, rest) = rest.split_first_chunk::<2>().ok_or(bad("it is cut off"))?;
        let (nonce, rest) = rest.split_first_chunk::<16>().ok_or(bad("it is cut off"))?;
        let (length, host) = rest.split_first().ok_or(bad("it is cut off"))?;
        if usize::from(*length) != host.len() {
            return Err(bad("the host has another length than announced"));
        }
        let host = std::str::from_utf8(host).map_err(|_| bad("the host is not text"))?;
        if !host_is_sound(host) {
            return Err(bad("the host is neither a name nor an IP address"));
        }
        let port = u16::from_le_bytes(*port);
        if port == 0 {
            return Err(bad("the port is zero"));
        }
        Ok(Self { host: host.to_owned(), port, nonce: *nonce })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn t10_golden_bytes() {
        let endpoint = Endpoint { host: "::1".into(), port: 0x1234, nonce: [7; 16] };
        let mut golden = vec![b'k', b'a', 1, 0x34, 0x12];
        golden.extend_from_slice(&[7; 16]);
        golden.extend_from_slice(&[3, b':', b':', b'1']);
        assert_eq!(endpoint.encode().unwrap().as_bytes(), golden);
    }

    #[test]
    fn t10_damaged_addresses_are_refused() {
        let good = Endpoint { host: "host.example".into(), port: 9, nonce: [1; 16] }.encode().unwrap();
        for cut in 1..good.as_bytes().len() {
            let short = Address::from_bytes(good.as_bytes()[..cut].to_vec()).unwrap();
            assert!(matches!(Endpoint::decode(&short), Err(TransportError::BadAddress { .. })), "{cut}");
        }
        let mut longer = good.as_bytes().to_vec();
        longer.push(b'x');
        assert!(Endpoint::decode(&Address::from_bytes(longer).unwrap()).is_err());
        let mut strange = good.as_bytes().to_vec();
        strange[22] = b'/';
        assert!(Endpoint::decode(&Address::from_bytes(strange).unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn t10_no_bytes_panic_and_what_decodes_encodes_back(
            bytes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 1..64),
                proptest::collection::vec(any::<u8>(), 1..48)
                    .prop_map(|tail| [&ADDRESS_TAG[..], &tail].concat()),
            ]
        ) {
            let address = Address::from_bytes(bytes).unwrap();
            if let Ok(endpoint) = Endpoint::decode(&address) {
                prop_assert_eq!(endpoint.encode().unwrap(), address);
            }
        }
    }
}
