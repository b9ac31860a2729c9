//! Where a transport listens and what it tells its peers.

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{LossReason, Transport, TransportError};

use crate::support::*;

fn on(bind: &str) -> TcpConfig {
    TcpConfig { bind: bind.parse().unwrap(), ..TcpConfig::default() }
}

#[tokio::test]
async fn ipv6_works() {
    let (server, client) = (TcpTransport::bind(on("[::1]:0")).unwrap(), transport());
    assert!(server.local_addr().is_ipv6());
    link(&client, &server).await;
}

#[tokio::test]
async fn a_wildcard_needs_an_advertised_host_and_works_with_one() {
    let refused = TcpTransport::bind(on("0.0.0.0:0")).unwrap_err();
    assert!(matches!(refused, TransportError::BadConfig { transport: "tcp", .. }), "{refused}");
    for bind in ["0.0.0.0:0", "[::]:0"] {
        let config = TcpConfig { advertise: Some("localhost".into()), ..on(bind) };
        let server = TcpTransport::bind(config).unwrap();
        // The name may have several addresses of which some are not listened on.
        link(&transport(), &server).await;
    }
}

#[test]
fn a_port_in_use_and_a_foreign_address_are_named() {
    let first = transport();
    let address = first.local_addr();
    match TcpTransport::bind(TcpConfig { bind: address, ..TcpConfig::default() }) {
        Err(TransportError::System { subject, kind, code, .. }) => {
            assert_eq!((subject, kind), (address.to_string(), std::io::ErrorKind::AddrInUse));
            assert!(code.is_some());
        }
        other => panic!("{other:?}"),
    }
    match TcpTransport::bind(on("192.0.2.1:0")) {
        Err(TransportError::System { subject, kind, .. }) => {
            assert_eq!((subject.as_str(), kind), ("192.0.2.1:0", std::io::ErrorKind::AddrNotAvailable));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_host_that_does_not_resolve_is_unreachable() {
    let client = transport();
    let peer = client.connect(&make_address("no-such-host.invalid", 9, &RAW_NONCE), LIMIT).unwrap();
    let reason = loss(&client, peer).await;
    // Without a name server at all, the resolver may take longer than anybody waits.
    assert!(matches!(reason, LossReason::Unreachable { .. } | LossReason::ConnectTimedOut), "{reason}");
}

#[tokio::test]
async fn t6_a_closed_port_is_unreachable_and_reads_on_it_end_first() {
    let client = transport();
    let (listener, address) = Raw::listen();
    drop(listener);
    let region = client.register(kv_transport::Memory::allocate(4096).unwrap()).unwrap();
    let peer = client.connect(&address, LIMIT).unwrap();
    match client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 10)])) {
        Ok(()) => {
            let result = completion(&client, 1).await.result;
            assert!(matches!(result, Err(kv_transport::ReadError::PeerLost(_))), "{result:?}");
        }
        // The refusal was faster.
        Err(error) => assert_eq!(error, TransportError::UnknownPeer { peer }),
    }
    let reason = loss(&client, peer).await;
    assert!(
        matches!(reason, LossReason::Unreachable { kind: std::io::ErrorKind::ConnectionRefused, .. }),
        "{reason}"
    );
}
