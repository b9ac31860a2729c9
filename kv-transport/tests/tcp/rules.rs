//! The rules of the contract among well-behaved transports.

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Event, LossReason, MESSAGE_MAX_BYTES, Memory, OpId, ReadError, ReadPart, ReadRequest, Transport,
    TransportError,
};

use crate::support::*;

/// Ranges in a scrambled order, with gaps, some of them neighbours on both sides; and the destination they make.
fn scattered(
    source: &[u8],
    target: &[u8],
    count: usize,
    seed: u64,
) -> (Vec<kv_transport::ReadRange>, Vec<u8>) {
    let mut ranges = vec![];
    let (mut local, mut remote) = (0u64, 0u64);
    for step in pattern(count * 3, seed).chunks(3) {
        let len = u64::from(step[0]) * 5 + 1;
        if step[1] % 3 > 0 {
            local += u64::from(step[1] % 7);
            remote = (remote + u64::from(step[2]) * 997) % (source.len() as u64 - 2000);
        }
        if local + len > target.len() as u64 || remote + len > source.len() as u64 {
            break;
        }
        ranges.push(range(remote, local, len));
        (local, remote) = (local + len, remote + len);
    }
    let middle = ranges.len() / 3;
    ranges.rotate_left(middle);
    let mut expected = target.to_vec();
    for range in &ranges {
        let (from, to, len) = (range.remote_offset as usize, range.local_offset as usize, range.len as usize);
        expected[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    (ranges, expected)
}

#[tokio::test]
async fn t2_scattered_read_moves_exactly_the_bytes() {
    let tiny = TcpConfig {
        chunk_max_bytes: 97,
        chunk_max_ranges: 2,
        chunk_queue_max: 3,
        bytes_in_flight_per_peer: 2000,
        ..TcpConfig::default()
    };
    for (seed, config) in [(1, TcpConfig::default()), (2, tiny)] {
        let server = TcpTransport::bind(config.clone()).unwrap();
        let client = TcpTransport::bind(config).unwrap();
        let (peer, _) = link(&client, &server).await;
        let (source, target) = (pattern(300_000, seed), pattern(200_000, seed + 10));
        let (_, key) = offer(&server, &source);
        let destination = memory(&target);
        let region = client.register(destination.clone()).unwrap();
        let (ranges, expected) = scattered(&source, &target, 500, seed);
        assert!(ranges.len() > 200);

        client.read(request(1, peer, &key, region, ranges.clone())).unwrap();
        let outcome = completion(&client, 1).await;
        assert_eq!(outcome.result, Ok(()));
        assert!(outcome.arrived.is_all() && outcome.arrived.size() == ranges.len());
        assert!(contents(&destination) == expected, "the bytes differ");
    }
}

#[tokio::test]
async fn t2_a_hundred_thousand_ranges_in_one_read() {
    let (server, client) = (transport(), transport());
    let (peer, _) = link(&client, &server).await;
    let source = pattern(100_000 * 16, 3);
    let (_, key) = offer(&server, &source);
    let destination = Memory::allocate(100_000 * 24).unwrap();
    let region = client.register(destination.clone()).unwrap();
    let ranges: Vec<_> =
        (0..100_000u64).map(|index| range(index * 7919 % 100_000 * 16, index * 24, 16)).collect();
    client.read(request(1, peer, &key, region, ranges.clone())).unwrap();
    let outcome = completion(&client, 1).await;
    assert_eq!(outcome.result, Ok(()));
    assert_eq!(outcome.arrived.count(), 100_000);
    let mut expected = vec![0; destination.len()];
    for range in ranges {
        let (from, to) = (range.remote_offset as usize, range.local_offset as usize);
        expected[to..to + 16].copy_from_slice(&source[from..from + 16]);
    }
    assert!(contents(&destination) == expected, "the bytes differ");
}

#[tokio::test]
async fn t2_a_read_of_several_parts_between_several_regions() {
    let (server, client) = (transport(), transport());
    let (peer, _) = link(&client, &server).await;
    let (first, second) = (pattern(5000, 1), pattern(5000, 2));
    let keys = [offer(&server, &first).1, offer(&server, &second).1];
    let memories = [Memory::allocate(5000).unwrap(), Memory::allocate(5000).unwrap()];
    let regions = memories.clone().map(|memory| client.register(memory).unwrap());
    let part = |key: usize, region: usize, ranges| ReadPart {
        key: keys[key].clone(),
        region: regions[region],
        ranges,
    };
    let parts = vec![
        part(0, 1, vec![range(0, 1000, 1000), range(1000, 2000, 1000)]),
        part(1, 0, vec![range(4000, 0, 1000)]),
        part(1, 1, vec![]),
        part(1, 1, vec![range(0, 0, 1000)]),
    ];
    client.read(ReadRequest { op: OpId(5), peer, parts, limits: PATIENT }).unwrap();
    let outcome = completion(&client, 5).await;
    assert_eq!((outcome.result, outcome.arrived.size()), (Ok(()), 4));
    assert_eq!(contents(&memories[0])[..1000], second[4000..]);
    assert_eq!(contents(&memories[1])[..3000], [&second[..1000], &first[..2000]].concat());
}

#[tokio::test]
async fn t2_several_peers_read_from_each_other_at_once() {
    let nodes: Vec<_> = (0..4).map(|_| transport()).collect();
    let len = 3 << 20;
    let sources: Vec<_> = (0..4).map(|index| pattern(len, index)).collect();
    let keys: Vec<_> = nodes.iter().zip(&sources).map(|(node, bytes)| offer(node, bytes).1).collect();
    let mut peers = vec![vec![None; 4]; 4];
    for from in 0..4 {
        for to in 0..from {
            let (there, here) = link(&nodes[from], &nodes[to]).await;
            peers[from][to] = Some(there);
            peers[to][from] = Some(here);
        }
    }
    let mut targets = vec![];
    for (from, node) in nodes.iter().enumerate() {
        for to in (0..4).filter(|to| *to != from) {
            let target = Memory::allocate(len).unwrap();
            let region = node.register(target.clone()).unwrap();
            let ranges = (0..48).map(|i| range(i * 17 % 48 * 65536, i * 17 % 48 * 65536, 65536)).collect();
            node.read(request(to as u64, peers[from][to].unwrap(), &keys[to], region, ranges)).unwrap();
            targets.push((to, target));
        }
    }
    for node in &nodes {
        for _ in 0..3 {
            match event(node).await {
                Event::ReadCompleted { outcome, .. } => assert_eq!(outcome.result, Ok(())),
                other => panic!("{other:?}"),
            }
        }
    }
    for (from, target) in targets {
        assert!(contents(&target) == sources[from], "the bytes differ");
    }
}

#[tokio::test]
async fn t5_messages_arrive_whole_and_once() {
    let (a, b) = (transport(), transport());
    let (b_at_a, a_at_b) = link(&a, &b).await;
    let lengths = [0, 1, 4096, 4097, 70_000, 0, MESSAGE_MAX_BYTES];
    let mut sent: Vec<_> = lengths.iter().zip(1..).map(|(len, seed)| pattern(*len, seed)).collect();
    sent.extend((0u32..500).map(|number| number.to_le_bytes().to_vec()));
    for message in &sent {
        a.send(b_at_a, message.clone()).unwrap();
    }
    b.send(a_at_b, b"back".to_vec()).unwrap();
    let mut received = vec![];
    for _ in 0..sent.len() {
        match event(&b).await {
            Event::Message { peer, bytes } if peer == a_at_b => received.push(bytes),
            other => panic!("{other:?}"),
        }
    }
    sent.sort();
    received.sort();
    assert!(sent == received, "the messages differ");
    assert_eq!(event(&a).await, Event::Message { peer: b_at_a, bytes: b"back".to_vec() });
    // A second copy would come before the answer to what follows it.
    a.send(b_at_a, b"last".to_vec()).unwrap();
    assert_eq!(event(&b).await, Event::Message { peer: a_at_b, bytes: b"last".to_vec() });
}

#[tokio::test]
async fn t5_taking_messages_makes_room_at_once() {
    // No ping wakes anybody in the meantime.
    let minute = std::time::Duration::from_secs(60);
    let config =
        TcpConfig { incoming_max: 1, keep_alive: minute, silence_limit: 2 * minute, ..TcpConfig::default() };
    let (a, b) = (transport(), TcpTransport::bind(config).unwrap());
    let (b_at_a, a_at_b) = link(&a, &b).await;
    for number in 0..20 {
        a.send(b_at_a, vec![number]).unwrap();
    }
    let start = std::time::Instant::now();
    for number in 0..20 {
        assert_eq!(event(&b).await, Event::Message { peer: a_at_b, bytes: vec![number] });
    }
    assert!(start.elapsed() < std::time::Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test]
async fn t5_a_message_passes_a_large_read() {
    let (server, client) = (transport(), transport());
    let (peer, client_at_server) = link(&client, &server).await;
    let len = 256 << 20;
    let source = server.register(Memory::allocate(len).unwrap()).unwrap();
    let key = server.key(source).unwrap();
    let region = client.register(Memory::allocate(len).unwrap()).unwrap();
    client.read(request(1, peer, &key, region, vec![range(0, 0, len as u64)])).unwrap();
    server.send(client_at_server, b"urgent".to_vec()).unwrap();
    assert_eq!(event(&client).await, Event::Message { peer, bytes: b"urgent".to_vec() });
    assert_eq!(completion(&client, 1).await.result, Ok(()));
}

#[tokio::test]
async fn t6_losing_a_peer_ends_its_reads_first_and_is_told_once() {
    let (server, client) = (transport(), transport());
    let (peer, _) = link(&client, &server).await;
    let source = server.register(Memory::allocate(64 << 20).unwrap()).unwrap();
    let key = server.key(source).unwrap();
    let region = client.register(Memory::allocate(64 << 20).unwrap()).unwrap();
    for op in 1..=16 {
        let part = (4 << 20) * (op - 1);
        client.read(request(op, peer, &key, region, vec![range(part, part, 4 << 20)])).unwrap();
    }
    drop(server);
    let mut ended = vec![];
    let reason = loop {
        match event(&client).await {
            Event::ReadCompleted { op, outcome } => {
                assert!(matches!(
                    outcome.result,
                    Ok(()) | Err(ReadError::PeerLost(LossReason::ClosedByPeer))
                ));
                ended.push(op.0);
            }
            Event::PeerLost { peer: lost, reason } if lost == peer => break reason,
            other => panic!("{other:?}"),
        }
    };
    ended.sort_unstable();
    assert_eq!((reason, ended), (LossReason::ClosedByPeer, (1..=16).collect()));
    assert_eq!(client.send(peer, vec![]), Err(TransportError::UnknownPeer { peer }));
    assert_eq!(client.disconnect(peer), Err(TransportError::UnknownPeer { peer }));
    // The region is free again, and nothing else was told.
    client.deregister(region).unwrap();
    client.shutdown(LIMIT).await;
    assert_eq!(client.next_event().await, None);
}

#[tokio::test]
async fn t6_disconnecting_ends_reads_and_is_told_on_both_sides() {
    let client = transport();
    let (mut raw, peer) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 100)])).unwrap();
    client.send(peer, b"farewell".to_vec()).unwrap();
    client.disconnect(peer).unwrap();
    let outcome = completion(&client, 1).await;
    assert_eq!(outcome.result, Err(ReadError::PeerLost(LossReason::Disconnected)));
    assert_eq!(loss(&client, peer).await, LossReason::Disconnected);
    assert_eq!(client.disconnect(peer), Err(TransportError::UnknownPeer { peer }));
    // What was sent before still came.
    while raw.frame().kind != MESSAGE {}
    raw.closed();
}

#[tokio::test]
async fn t7_a_cancelled_read_still_completes_and_the_connection_goes_on() {
    let client = transport();
    let (mut raw, peer) = Raw::serve(&client).await;
    let destination = Memory::allocate(4096).unwrap();
    let region = client.register(destination.clone()).unwrap();
    client.cancel(OpId(1));
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 100)])).unwrap();
    let asked = raw.frame();
    assert_eq!(asked.kind, READ);
    client.cancel(OpId(1));
    client.cancel(OpId(1));
    assert_eq!(completion(&client, 1).await.result, Err(ReadError::Cancelled));
    let cancel = raw.frame();
    assert_eq!((cancel.kind, cancel.id.to_le_bytes().as_slice()), (CANCEL, &asked.body[..8]));
    // The same id may be used again at once, and the late end of the first does not touch it.
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 3)])).unwrap();
    raw.send_frame(END, 3, asked.id, &[]);
    let again = raw.frame();
    raw.send_frame(DATA, 0, again.id, b"new");
    raw.send_frame(END, 0, again.id, &[]);
    assert_eq!(completion(&client, 1).await.result, Ok(()));
    assert_eq!(contents(&destination)[..4], *b"new\0");
}

#[tokio::test]
async fn t9_address_of_a_former_life() {
    let server = transport();
    let (address, port) = (server.address(), server.local_addr());
    drop(server);
    let reborn = TcpTransport::bind(TcpConfig { bind: port, ..TcpConfig::default() }).unwrap();
    let client = transport();
    let peer = client.connect(&address, LIMIT).unwrap();
    let reason = loss(&client, peer).await;
    assert!(matches!(reason, LossReason::Stranger(text) if text.contains("another life")), "{reason}");
    // The new life is reached by its own address, and has heard nothing of the visitor before.
    link(&client, &reborn).await;
}

#[tokio::test]
async fn t11_shutdown_ends_everything() {
    let client = transport();
    let (_raw, peer) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 100)])).unwrap();
    client.shutdown(LIMIT).await;
    assert_eq!(completion(&client, 1).await.result, Err(ReadError::Closed));
    assert_eq!(loss(&client, peer).await, LossReason::Closed);
    assert_eq!(client.next_event().await, None);
    assert_eq!(client.next_event().await, None);
    let closed = TransportError::Closed { transport: "tcp" };
    assert_eq!(client.send(peer, vec![]), Err(closed.clone()));
    assert_eq!(client.register(Memory::allocate(1).unwrap()), Err(closed.clone()));
    assert_eq!(client.connect(&client.address(), LIMIT), Err(closed.clone()));
    assert_eq!(client.read(request(2, peer, &any_key(), region, vec![range(0, 0, 1)])), Err(closed));
    client.shutdown(LIMIT).await;
}

#[tokio::test]
async fn t12_what_is_claimed_works_and_the_rest_is_refused() {
    let a = transport();
    let capabilities = a.capabilities();
    assert!(capabilities.host_memory && capabilities.across_hosts);
    assert!(capabilities.device_memory && !capabilities.one_sided);
    // A transport may be a peer of itself.
    let peer = a.connect(&a.address(), LIMIT).unwrap();
    let events = [event(&a).await, event(&a).await];
    assert!(events.contains(&Event::Connected { peer }), "{events:?}");
    a.send(peer, vec![1; capabilities.message_max_bytes]).unwrap();
    let too_long = TransportError::MessageTooLong { bytes: MESSAGE_MAX_BYTES + 1, limit: MESSAGE_MAX_BYTES };
    assert_eq!(a.send(peer, vec![1; MESSAGE_MAX_BYTES + 1]), Err(too_long));
    assert!(matches!(event(&a).await, Event::Message { bytes, .. } if bytes.len() == MESSAGE_MAX_BYTES));
}
