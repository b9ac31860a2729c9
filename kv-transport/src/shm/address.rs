//! Addresses as bytes. They come back from peers, so decoding trusts nothing (rule T-10).
//!
//! ```text
//! address: "ks" | version u8 = 1 | host id 16 bytes | instance nonce 16 bytes | socket name 16 bytes
//! ```
//!
//! The host id is that of the machine's boot, so that an address of another machine is known at once. The sockets' names are
//! random and lie in the abstract namespace, which leaves nothing behind; knowing a name gives no right.

use std::io;

use super::NAME;
use crate::contract::Address;
use crate::error::TransportError;
use crate::stream::core::{no_randomness, system};
use crate::stream::key::Nonce;
use crate::stream::target::{Place, Target};

const TAG: [u8; 3] = [b'k', b's', 1];
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where an instance can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whereabouts {
    pub(super) host: [u8; 16],
    pub(super) nonce: Nonce,
    name: [u8; 16],
}

impl Whereabouts {
    /// Draws names for a new instance on this host.
    pub(super) fn draw() -> Result<Self, TransportError> {
        let mut random = [[0; 16]; 2];
        for part in &mut random {
            getrandom::fill(part).map_err(|error| no_randomness(&error))?;
        }
        Ok(Self { host: this_host()?, nonce: random[0], name: random[1] })
    }

    fn socket(&self, of: &str) -> Vec<u8> {
        let hex: String = self.name.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("kv-shm-{hex}-{of}").into_bytes()
    }

    /// The socket that connections are made to.
    pub(super) fn connections(&self) -> Vec<u8> {
        self.socket("c")
    }

    /// The socket that hands out descriptors.
    pub(super) fn grants(&self) -> Vec<u8> {
        self.socket("g")
    }

    pub(super) fn target(&self) -> Target {
        Target { place: Place::Unix { name: self.connections() }, nonce: self.nonce }
    }

    pub(super) fn encode(&self) -> Result<Address, TransportError> {
        Address::from_bytes([&TAG[..], &self.host, &self.nonce, &self.name].concat())
    }

    pub(super) fn decode(address: &Address) -> Result<Self, TransportError> {
        let bad = |reason| TransportError::BadAddress { transport: NAME, reason };
        let rest = address.as_bytes().strip_prefix(&TAG).ok_or(bad("it begins differently"))?;
        let (host, rest) = rest.split_first_chunk::<16>().ok_or(bad("it is cut off"))?;
        let (nonce, rest) = rest.split_first_chunk::<16>().ok_or(bad("it is cut off"))?;
        let name = <[u8; 16]>::try_from(rest).map_err(|_| bad("it has another length"))?;
        Ok(Self { host: *host, nonce: *nonce, name })
    }
}

/// The socket for descriptors of the instance whose connections go to this one.
pub(super) fn grants_of(connections: &[u8]) -> Vec<u8> {
    let mut name = connections.to_vec();
    if let Some(last) = name.last_mut() {
        *last = b'g';
    }
    name
}

/// What tells this boot of this machine from all others.
pub(super) fn this_host() -> Result<[u8; 16], TransportError> {
    let failed = |error: &io::Error| system("read", BOOT_ID, error);
    let text = std::fs::read_to_string(BOOT_ID).map_err(|error| failed(&error))?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let number = std::str::from_utf8(&digits).ok().and_then(|hex| u128::from_str_radix(hex, 16).ok());
    number.map(u128::to_be_bytes).ok_or_else(|| failed(&io::ErrorKind::InvalidData.into()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn t10_damaged_addresses_are_refused() {
        let good = Whereabouts::draw().unwrap();
        let bytes = good.encode().unwrap().as_bytes().to_vec();
        assert_eq!(Whereabouts::decode(&Address::from_bytes(bytes.clone()).unwrap()), Ok(good));
        for cut in 1..bytes.len() {
            assert!(
                Whereabouts::decode(&Address::from_bytes(bytes[..cut].to_vec()).unwrap()).is_err(),
                "{cut}"
            );
        }
        assert!(Whereabouts::decode(&Address::from_bytes([&bytes[..], b"x"].concat()).unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn t10_no_bytes_panic(tail in proptest::collection::vec(any::<u8>(), 0..80)) {
            let address = Address::from_bytes([&TAG[..], &tail].concat()).unwrap();
            if let Ok(decoded) = Whereabouts::decode(&address) {
                prop_assert_eq!(decoded.encode().unwrap(), address);
            }
        }
    }
}
