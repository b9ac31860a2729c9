//! Calls that are refused, and change nothing.

use std::time::Duration;

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Memory, OpId, PeerId, ReadError, ReadLimits, ReadPart, ReadRequest, RegionId, RegionKey, Transport,
    TransportError,
};

use crate::support::*;

#[tokio::test]
async fn t1_a_refused_read_changes_nothing() {
    let (server, client) = (transport(), transport());
    let (peer, _) = link(&client, &server).await;
    let (_, key) = offer(&server, &pattern(4096, 1));
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
    let op = OpId(1);
    let good = || request(1, peer, &key, region, vec![range(0, 0, 10)]);
    let refused = |change: &dyn Fn(&mut ReadRequest)| {
        let mut request = good();
        change(&mut request);
        client.read(request).unwrap_err()
    };

    let unknown = PeerId(999);
    assert_eq!(refused(&|r| r.peer = unknown), TransportError::UnknownPeer { peer: unknown });
    let unknown = RegionId(999);
    assert_eq!(refused(&|r| r.parts[0].region = unknown), TransportError::UnknownRegion { region: unknown });
    assert_eq!(refused(&|r| r.parts.clear()), TransportError::NoRanges { op });
    assert_eq!(refused(&|r| r.parts[0].ranges.clear()), TransportError::NoRanges { op });
    let error = refused(&|r| r.limits.total = Duration::ZERO);
    assert_eq!(error, TransportError::ZeroLimit { op, limit: "total" });
    let error = refused(&|r| r.limits.stall = Duration::ZERO);
    assert_eq!(error, TransportError::ZeroLimit { op, limit: "stall" });
    for (offset, len) in [(5, 0), (4096, 1), (4090, 7), (u64::MAX, 1), (1, u64::MAX)] {
        let error = refused(&|r| r.parts[0].ranges.push(range(0, offset, len)));
        assert_eq!(error, TransportError::LocalRange { op, index: 1, offset, len, region_len: 4096 });
    }
    let error = refused(&|r| r.parts[0].ranges.push(range(50, 9, 10)));
    assert_eq!(error, TransportError::Overlap { op, region, offset: 9 });
    let error = refused(&|r| r.parts.push(r.parts[0].clone()));
    assert_eq!(error, TransportError::Overlap { op, region, offset: 0 });
    let bad = RegionKey::from_bytes(vec![1, 2, 3]).unwrap();
    assert_eq!(refused(&|r| r.parts[0].key = bad.clone()), TransportError::BadKey { transport: "tcp" });

    // None of them left a trace: the id is free, the read works, the region is in use by nobody afterwards.
    client.read(good()).unwrap();
    assert_eq!(completion(&client, 1).await.result, Ok(()));
    client.deregister(region).unwrap();
    client.shutdown(LIMIT).await;
    assert!(matches!(client.next_event().await, Some(kv_transport::Event::PeerLost { .. })));
    assert_eq!(client.next_event().await, None);
}

#[tokio::test]
async fn t1_t4_ids_and_regions_in_use_are_guarded_until_the_completion() {
    let client = transport();
    let (mut raw, peer) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
    let read = |op, at| client.read(request(op, peer, &any_key(), region, vec![range(0, at, 4)]));
    read(1, 0).unwrap();
    assert_eq!(read(1, 8), Err(TransportError::DuplicateOp { op: OpId(1) }));
    read(2, 8).unwrap();
    assert_eq!(client.deregister(region), Err(TransportError::RegionInUse { region, reads: 2 }));
    for _ in 0..2 {
        let asked = raw.frame();
        raw.send_frame(DATA, 0, asked.id, b"data");
        raw.send_frame(END, 0, asked.id, &[]);
    }
    assert_eq!(completion(&client, 1).await.result, Ok(()));
    assert_eq!(completion(&client, 2).await.result, Ok(()));
    client.deregister(region).unwrap();
    assert_eq!(client.deregister(region), Err(TransportError::UnknownRegion { region }));
    assert_eq!(client.key(region), Err(TransportError::UnknownRegion { region }));
    assert_eq!(read(1, 0), Err(TransportError::UnknownRegion { region }));
}

#[tokio::test]
async fn t4_a_key_that_does_not_fit_its_part_ends_only_that_read() {
    let (server, client) = (transport(), transport());
    let (peer, _) = link(&client, &server).await;
    let source = pattern(4096, 1);
    let (_, key) = offer(&server, &source);
    let region = client.register(Memory::allocate(8192).unwrap()).unwrap();
    let part = |key: &RegionKey, at| ReadPart { key: key.clone(), region, ranges: vec![range(0, at, 4096)] };
    let parts = vec![part(&key, 0), part(&any_key(), 4096)];
    client.read(ReadRequest { op: OpId(1), peer, parts, limits: PATIENT }).unwrap();
    let outcome = completion(&client, 1).await;
    assert_eq!(outcome.result, Err(ReadError::UnknownKey));
    assert!(outcome.arrived.contains(0) && !outcome.arrived.contains(1));
}

#[tokio::test]
async fn t10_addresses_of_others_are_distrusted() {
    let client = transport();
    let good = client.address().as_bytes().to_vec();
    for cut in 1..good.len() {
        let address = kv_transport::Address::from_bytes(good[..cut].to_vec()).unwrap();
        let refused = client.connect(&address, LIMIT);
        assert!(matches!(refused, Err(TransportError::BadAddress { .. })), "{refused:?}");
    }
    let refused = client.connect(&make_address("http://host/", 80, &RAW_NONCE), LIMIT);
    assert!(matches!(refused, Err(TransportError::BadAddress { .. })), "{refused:?}");
}

#[tokio::test]
async fn t8_peers_are_bounded_until_their_loss_is_taken() {
    let client = TcpTransport::bind(TcpConfig { peers_max: 2, ..TcpConfig::default() }).unwrap();
    let (listener, address) = Raw::listen();
    let first = client.connect(&address, LIMIT).unwrap();
    client.connect(&address, LIMIT).unwrap();
    assert_eq!(client.connect(&address, LIMIT), Err(TransportError::TooManyPeers { limit: 2 }));
    client.disconnect(first).unwrap();
    loss(&client, first).await;
    client.connect(&address, LIMIT).unwrap();
    drop(listener);

    let full = TcpTransport::bind(TcpConfig { peers_max: 1, ..TcpConfig::default() }).unwrap();
    let (one, two) = (transport(), transport());
    link(&one, &full).await;
    let refused = two.connect(&full.address(), LIMIT).unwrap();
    loss(&two, refused).await;
}

#[tokio::test]
async fn t8_zero_time_to_connect_is_over_at_once() {
    let client = transport();
    let (_listener, address) = Raw::listen();
    let peer = client.connect(&address, Duration::ZERO).unwrap();
    assert_eq!(loss(&client, peer).await, kv_transport::LossReason::ConnectTimedOut);
}

#[test]
fn no_executor_is_needed_to_be_refused() {
    let lone = transport();
    let limits = ReadLimits { total: LIMIT, stall: LIMIT };
    let request = ReadRequest { op: OpId(1), peer: PeerId(1), parts: vec![], limits };
    assert_eq!(lone.read(request), Err(TransportError::UnknownPeer { peer: PeerId(1) }));
}
