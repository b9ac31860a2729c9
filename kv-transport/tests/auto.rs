//! The `auto` transport: which member it takes, what it says of it, and what peers with only one of its members see.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // A failed step is a failed test.
#![cfg(target_os = "linux")]

use std::sync::Arc;
use std::time::Duration;

use kv_transport::auto::AutoTransport;
use kv_transport::shm::{ShmConfig, ShmTransport};
use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Address, Event, LossReason, Memory, OpId, PeerId, ReadLimits, ReadPart, ReadRange, ReadRequest, RegionId,
    RegionKey, Transport, TransportError,
};

const LIMIT: Duration = Duration::from_secs(10);

fn tcp() -> Arc<dyn Transport> {
    Arc::new(TcpTransport::bind(TcpConfig::default()).unwrap())
}

fn shm() -> Arc<dyn Transport> {
    Arc::new(ShmTransport::bind(ShmConfig::default()).unwrap())
}

fn auto() -> AutoTransport {
    AutoTransport::over(vec![shm(), tcp()]).unwrap()
}

async fn event(transport: &dyn Transport) -> Event {
    tokio::time::timeout(LIMIT, transport.next_event()).await.expect("no event").expect("closed")
}

fn offer(transport: &dyn Transport) -> (RegionId, RegionKey) {
    let memory = Memory::allocate(1000).unwrap();
    memory.write(10, b"KV bytes").unwrap();
    let region = transport.register(memory).unwrap();
    (region, transport.key(region).unwrap())
}

fn request(op: u64, peer: PeerId, key: &RegionKey, region: RegionId) -> ReadRequest {
    let range = ReadRange { remote_offset: 10, local_offset: 3, len: 8 };
    let parts = vec![ReadPart { key: key.clone(), region, ranges: vec![range] }];
    ReadRequest { op: OpId(op), peer, parts, limits: ReadLimits { total: LIMIT, stall: LIMIT } }
}

/// Reads from a peer that was connected, and says over what.
async fn read(transport: &dyn Transport, peer: PeerId, key: &RegionKey) -> Option<String> {
    let memory = Memory::allocate(100).unwrap();
    let region = transport.register(memory.clone()).unwrap();
    transport.read(request(1, peer, key, region)).unwrap();
    match event(transport).await {
        Event::ReadCompleted { op: OpId(1), outcome } => assert_eq!(outcome.result, Ok(())),
        other => panic!("{other:?}"),
    }
    let mut bytes = [0; 8];
    memory.read(3, &mut bytes).unwrap();
    assert_eq!(&bytes, b"KV bytes");
    transport.deregister(region).unwrap();
    transport.lane(peer)
}

async fn connect(from: &dyn Transport, address: &Address) -> PeerId {
    let peer = from.connect(address, LIMIT).unwrap();
    assert_eq!(event(from).await, Event::Connected { peer });
    peer
}

#[tokio::test]
async fn the_best_that_both_have_is_used() {
    let (p, d) = (auto(), auto());
    let peer = connect(&d, &p.address()).await;
    let (_, key) = offer(&p);
    let Event::Accepted { peer: there } = event(&p).await else { panic!() };
    assert_eq!(read(&d, peer, &key).await.as_deref(), Some("shm (process_vm_readv)"));
    p.send(there, b"hello".to_vec()).unwrap();
    assert_eq!(event(&d).await, Event::Message { peer, bytes: b"hello".to_vec() });
    d.disconnect(peer).unwrap();
    assert_eq!(event(&d).await, Event::PeerLost { peer, reason: LossReason::Disconnected });
    assert!(matches!(event(&p).await, Event::PeerLost { peer, .. } if peer == there));
    assert_eq!(d.disconnect(peer), Err(TransportError::UnknownPeer { peer }));
}

#[tokio::test]
async fn when_the_best_fails_the_next_is_tried_and_the_reason_is_kept() {
    let members = [shm(), tcp()];
    let p = AutoTransport::over(members.to_vec()).unwrap();
    // The member ends behind its back: its socket refuses, and the other one goes on.
    members[0].shutdown(LIMIT).await;
    let (region, key) = offer(&p);
    assert_eq!(p.faces(&[region]).unwrap().len(), 1);
    let d = auto();
    let peer = connect(&d, &p.address()).await;
    let lane = read(&d, peer, &key).await.unwrap();
    assert!(lane.starts_with("tcp"), "{lane}");
    assert!(lane.contains("; shm: could not be reached: connection refused"), "{lane}");
}

#[tokio::test]
async fn when_all_fail_the_peer_is_lost_once_within_the_limit() {
    let p = auto();
    let address = p.address();
    drop(p);
    let d = auto();
    let peer = d.connect(&address, LIMIT).unwrap();
    match event(&d).await {
        Event::PeerLost { peer: lost, reason: LossReason::Unreachable { .. } } => assert_eq!(lost, peer),
        other => panic!("{other:?}"),
    }
    // Given up while it is tried: lost once as well.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port().to_le_bytes();
    let bytes = [&b"ka\x01"[..], &port, &[7; 16], &[9], b"127.0.0.1"].concat();
    let (address, _) = d.adopt("tcp", &Address::from_bytes(bytes).unwrap(), &[]).unwrap();
    let peer = d.connect(&address, LIMIT).unwrap();
    d.disconnect(peer).unwrap();
    assert_eq!(event(&d).await, Event::PeerLost { peer, reason: LossReason::Disconnected });
    let late = d.connect(&address, Duration::from_millis(50)).unwrap();
    assert_eq!(event(&d).await, Event::PeerLost { peer: late, reason: LossReason::ConnectTimedOut });
}

#[tokio::test]
async fn one_that_has_a_part_of_it_is_reached_and_reaches_it() {
    // P has one transport, D several.
    let (p, d) = (tcp(), auto());
    let (_, key) = offer(p.as_ref());
    let (address, keys) = d.adopt("tcp", &p.address(), &[key]).unwrap();
    let peer = connect(&d, &address).await;
    assert_eq!(read(&d, peer, &keys[0]).await.as_deref(), Some("tcp"));
    assert!(d.adopt("rdma", &p.address(), &[]).is_none());
    // P has several, D one.
    let (p, d) = (auto(), shm());
    let (region, _) = offer(&p);
    let faces = p.faces(&[region]).unwrap();
    assert_eq!(faces.iter().map(|face| face.name).collect::<Vec<_>>(), ["shm", "tcp"]);
    let peer = connect(d.as_ref(), &faces[0].address).await;
    assert_eq!(read(d.as_ref(), peer, &faces[0].keys[0]).await.as_deref(), Some("process_vm_readv"));
}

#[tokio::test]
async fn what_cannot_be_is_refused_by_name() {
    assert!(matches!(AutoTransport::over(vec![]), Err(TransportError::BadConfig { .. })));
    assert!(matches!(AutoTransport::over(vec![tcp(), tcp()]), Err(TransportError::BadConfig { .. })));
    let (p, d) = (auto(), auto());
    let bad = |bytes: &[u8]| d.connect(&Address::from_bytes(bytes.to_vec()).unwrap(), LIMIT).unwrap_err();
    assert!(matches!(bad(b"garbage"), TransportError::BadAddress { transport: "auto", .. }));
    assert!(matches!(bad(tcp().address().as_bytes()), TransportError::BadAddress { .. }));
    let peer = connect(&d, &p.address()).await;
    let (_, key) = offer(&p);
    let region = d.register(Memory::allocate(100).unwrap()).unwrap();
    let other_key = RegionKey::from_bytes(vec![1, 2, 3]).unwrap();
    assert_eq!(
        d.read(request(1, peer, &other_key, region)),
        Err(TransportError::BadKey { transport: "auto" })
    );
    let unknown = RegionId(999);
    assert_eq!(
        d.read(request(1, peer, &key, unknown)),
        Err(TransportError::UnknownRegion { region: unknown })
    );
    assert_eq!(
        d.read(request(1, PeerId(99), &key, region)),
        Err(TransportError::UnknownPeer { peer: PeerId(99) })
    );
    // What was refused has left nothing behind.
    d.read(request(1, peer, &key, region)).unwrap();
    assert_eq!(d.read(request(1, peer, &key, region)), Err(TransportError::DuplicateOp { op: OpId(1) }));
    assert_eq!(d.deregister(region), Err(TransportError::RegionInUse { region, reads: 1 }));
    assert!(matches!(event(&d).await, Event::ReadCompleted { .. }));
    d.deregister(region).unwrap();
    assert_eq!(d.deregister(region), Err(TransportError::UnknownRegion { region }));
}

#[tokio::test]
async fn shutting_down_ends_every_peer_once_and_then_nothing_comes() {
    let (p, d) = (auto(), auto());
    let peer = connect(&d, &p.address()).await;
    assert!(matches!(event(&p).await, Event::Accepted { .. }));
    d.shutdown(LIMIT).await;
    assert_eq!(event(&d).await, Event::PeerLost { peer, reason: LossReason::Closed });
    assert_eq!(d.next_event().await, None);
    assert_eq!(d.connect(&p.address(), LIMIT), Err(TransportError::Closed { transport: "auto" }));
    assert!(matches!(event(&p).await, Event::PeerLost { .. }));
}
