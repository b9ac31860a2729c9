//! How hosts are written: operators give them with or without brackets, endpoints need brackets around IPv6.

use std::net::SocketAddr;

/// An IPv6 literal without its brackets; any other host as it is.
pub(crate) fn unbracket(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

/// A host and port as libzmq and people write them.
pub(crate) fn written(host: &str, port: u16) -> String {
    let host = unbracket(host);
    // A colon in a host can only be part of an IPv6 literal.
    if host.contains(':') { format!("tcp://[{host}]:{port}") } else { format!("tcp://{host}:{port}") }
}

/// The same with what the host stands for, where that is not the host itself.
pub(crate) fn resolved(host: &str, port: u16, addresses: &[SocketAddr]) -> String {
    let plain = written(host, port);
    let others: Vec<String> =
        addresses.iter().map(|a| format!("tcp://{a}")).filter(|a| *a != plain).collect();
    if others.is_empty() { plain } else { format!("{plain} ({})", others.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_literals_get_one_pair_of_brackets_and_names_show_their_addresses() {
        for host in ["::1", "[::1]"] {
            assert_eq!(written(host, 7), "tcp://[::1]:7");
            assert_eq!(resolved(host, 7, &["[::1]:7".parse().unwrap()]), "tcp://[::1]:7");
        }
        let both = ["[::1]:7".parse().unwrap(), "127.0.0.1:7".parse().unwrap()];
        assert_eq!(resolved("p", 7, &both), "tcp://p:7 (tcp://[::1]:7, tcp://127.0.0.1:7)");
        assert_eq!(resolved("127.0.0.1", 7, &both[1..]), "tcp://127.0.0.1:7");
    }
}
