//! Whether a life on this host is over, found out without UCX.
//!
//! UCX's shared-memory address names a descriptor of the owner's process. When the owner is gone, the same number is
//! soon something else's: another worker, which takes the greeting for one of its own peers, or a file. So an address
//! of a life that is over must not reach UCX. Each life binds a datagram socket named after it in the abstract
//! namespace, which the system takes back when the life ends, however it ends.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::address::Life;

/// Where a life is: the boot of its host, and the network namespace, which is where the names of sockets live. Zeros
/// where nobody can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Home {
    pub(super) boot: [u8; 16],
    pub(super) namespace: u64,
}

/// Says, as long as it is kept, that a life is not over.
#[derive(Debug)]
pub(super) struct Sign {
    _socket: Option<UnixDatagram>,
    pub(super) home: Home,
}

fn name(life: &Life) -> Option<SocketAddr> {
    let hex: String = life.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("kv-ucx-{hex}")).ok()
}

fn here() -> Option<Home> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let hex: Vec<u8> = boot.bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut home = Home { boot: [0; 16], namespace: fs::metadata("/proc/self/ns/net").ok()?.ino() };
    for (byte, digits) in home.boot.iter_mut().zip(hex.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(home)
}

impl Sign {
    /// Puts up the sign of a life. Where that is not possible nobody asks for it.
    pub(super) fn put_up(life: &Life) -> Self {
        let sign = here().zip(name(life).and_then(|name| UnixDatagram::bind_addr(&name).ok()));
        match sign {
            Some((home, socket)) => Self { _socket: Some(socket), home },
            None => Self { _socket: None, home: Home::default() },
        }
    }
}

impl Home {
    /// Whether a life that is at home there is known to be over. `false` for one elsewhere.
    pub(super) fn is_over(&self, life: &Life) -> bool {
        if *self == Self::default() || here() != Some(*self) {
            return false;
        }
        let Some((name, socket)) = name(life).zip(UnixDatagram::unbound().ok()) else { return false };
        // Nothing is sent: the system refuses if nobody has the name.
        socket.connect_addr(&name).is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t9_a_life_is_over_when_its_sign_is_gone_and_only_then() {
        let life = [0x5a; 16];
        let sign = Sign::put_up(&life);
        let home = sign.home;
        assert_ne!(home, Home::default());
        assert!(!home.is_over(&life));
        assert!(home.is_over(&[0x5b; 16]), "nobody has this name");
        drop(sign);
        assert!(home.is_over(&life));
        // Of another host, or of one who could not tell, nothing is known.
        for other in [Home::default(), Home { boot: [1; 16], ..home }, Home { namespace: 1, ..home }] {
            assert!(!other.is_over(&life));
        }
    }
}
