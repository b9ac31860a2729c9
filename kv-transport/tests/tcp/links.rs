//! Several connections to one peer: large reads are spread over them, and they stand and fall together.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{Event, LossReason, Memory, OpId, PeerId, ReadError, ReadLimits, RegionId, Transport};

use crate::support::*;

const MIB: usize = 1 << 20;
const TICKET: [u8; 16] = [77; 16];

fn transport_of(connections_per_peer: u32) -> TcpTransport {
    TcpTransport::bind(TcpConfig { connections_per_peer, ..TcpConfig::default() }).unwrap()
}

/// A client that is connected to a raw peer over two connections, and a destination of 4 MiB.
async fn doubled() -> (TcpTransport, Raw, Raw, PeerId, RegionId, Memory) {
    let client = transport_of(2);
    let (listener, address) = Raw::listen();
    let peer = client.connect(&address, LIMIT).unwrap();
    let mut first = Raw::new(listener.accept().unwrap().0);
    let theirs = first.take(64);
    assert_eq!((theirs[24], &theirs[48..]), (0, &RAW_NONCE[..]));
    first.send(&preface_of(1, &RAW_NONCE, &TICKET));
    assert_eq!(event(&client).await, Event::Connected { peer });
    let second = added(&listener);
    let memory = Memory::allocate(4 * MIB).unwrap();
    let region = client.register(memory.clone()).unwrap();
    (client, first, second, peer, region, memory)
}

/// The connection that a client adds. It is in use once its own answer to a ping has come.
fn added(listener: &TcpListener) -> Raw {
    let mut raw = Raw::new(listener.accept().unwrap().0);
    let theirs = raw.take(64);
    assert_eq!((theirs[24], &theirs[32..48], &theirs[48..]), (1, &TICKET[..], &RAW_NONCE[..]));
    raw.send(&preface(&RAW_NONCE, &[0; 16]));
    raw.sync();
    raw
}

/// A request of a read of 4 MiB: the frame, and what it asks for.
fn span(frame: Frame) -> (Frame, u64, u32) {
    assert_eq!(frame.kind, READ);
    let from = u64::from_le_bytes(frame.body[24..32].try_into().unwrap());
    let len = u32::from_le_bytes(frame.body[32..36].try_into().unwrap());
    (frame, from, len)
}

fn answer(raw: &mut Raw, (frame, from, len): &(Frame, u64, u32), source: &[u8]) {
    let from = *from as usize;
    raw.send_frame(DATA, 0, frame.id, &source[from..from + *len as usize]);
    raw.send_frame(END, 0, frame.id, &[]);
}

/// Starts a read of 4 MiB, of which each connection is asked for at least one piece.
fn start(
    client: &TcpTransport,
    peer: PeerId,
    region: RegionId,
    (one, two): (&mut Raw, &mut Raw),
    limits: ReadLimits,
) -> [Vec<(Frame, u64, u32)>; 2] {
    let mut read = request(1, peer, &any_key(), region, vec![range(0, 0, 4 * MIB as u64)]);
    read.limits = limits;
    client.read(read).unwrap();
    [vec![span(one.frame())], vec![span(two.frame())]]
}

#[tokio::test]
async fn t2_each_connection_is_asked_for_a_part_of_a_large_read() {
    let (client, mut one, mut two, peer, region, memory) = doubled().await;
    let source = pattern(4 * MIB, 3);
    let [mut first, mut second] = start(&client, peer, region, (&mut one, &mut two), PATIENT);
    for raw in [&mut one, &mut two] {
        raw.0.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    }
    let mut head = [0; 1];
    let mut more = |raw: &mut Raw, all: &mut Vec<_>| {
        while raw.0.peek(&mut head).is_ok() {
            match raw.any_frame() {
                ping if ping.kind == PING => raw.send_frame(PONG, 0, ping.id, &[]),
                read => all.push(span(read)),
            }
        }
    };
    let asked = |all: &[(Frame, u64, u32)]| all.iter().map(|(_, _, len)| *len as usize).sum::<usize>();
    // Neither is asked for everything, though it would fit into the window.
    more(&mut one, &mut first);
    more(&mut two, &mut second);
    assert!(asked(&first) < 3 * MIB && asked(&second) < 3 * MIB, "{} {}", asked(&first), asked(&second));
    // Whoever answers is asked for the rest.
    let mut answered = 0;
    while answered < first.len() {
        answer(&mut one, &first[answered], &source);
        answered += 1;
        more(&mut one, &mut first);
    }
    more(&mut two, &mut second);
    assert_eq!(asked(&first) + asked(&second), 4 * MIB);
    assert!(asked(&second) < 2 * MIB, "the one that did not answer got {}", asked(&second));
    let mut spans: Vec<_> = first.iter().chain(&second).map(|(_, from, len)| (*from, *len)).collect();
    spans.sort_unstable();
    let mut at = 0;
    for (from, len) in spans {
        assert_eq!(from, at, "asked for twice, or not at all");
        at += u64::from(len);
    }
    for request in &second {
        answer(&mut two, request, &source);
    }
    let outcome = completion(&client, 1).await;
    assert_eq!((outcome.result, outcome.arrived.is_all()), (Ok(()), true));
    assert!(contents(&memory) == source);
    // A small one goes over the first connection.
    client.read(request(2, peer, &any_key(), region, vec![range(0, 0, 4)])).unwrap();
    assert_eq!(one.frame().kind, READ);
}

#[tokio::test]
async fn t3_t6_when_one_connection_ends_all_do_and_nothing_is_written_any_more() {
    for last in [false, true] {
        let (client, mut one, mut two, peer, region, memory) = doubled().await;
        let [first, second] = start(&client, peer, region, (&mut one, &mut two), PATIENT);
        answer(&mut one, &first[0], &vec![1; 4 * MIB]);
        one.sync();
        let (gone, mut left, open) = if last { (two, one, first) } else { (one, two, second) };
        drop(gone);
        let outcome = completion(&client, 1).await;
        assert_eq!(outcome.result, Err(ReadError::PeerLost(LossReason::ClosedByPeer)));
        memory.write(0, &vec![7; 4 * MIB]).unwrap();
        assert_eq!(loss(&client, peer).await, LossReason::ClosedByPeer);
        // The connection may be closed already.
        use std::io::Write;
        let len = open[0].2 as usize;
        left.0.write_all(&frame(DATA, 0, open[0].0.id, &vec![9; len])).ok();
        left.closed();
        assert!(contents(&memory) == vec![7; 4 * MIB], "written after the completion");
        client.deregister(region).unwrap();
    }
}

#[tokio::test]
async fn t1_t3_a_share_that_fails_ends_the_others_before_the_read_completes() {
    let (client, mut one, mut two, peer, region, memory) = doubled().await;
    let [first, second] = start(&client, peer, region, (&mut one, &mut two), PATIENT);
    two.send_frame(END, 1, second[0].0.id, &[]);
    assert_eq!(completion(&client, 1).await.result, Err(ReadError::UnknownKey));
    memory.write(0, &vec![7; 4 * MIB]).unwrap();
    // What was asked for over the other is drained.
    answer(&mut one, &first[0], &vec![1; 4 * MIB]);
    loop {
        if one.frame().kind == CANCEL {
            break;
        }
    }
    one.sync();
    assert!(contents(&memory) == vec![7; 4 * MIB], "written after the completion");
    // Both go on.
    client.deregister(region).unwrap();
    let region = client.register(memory).unwrap();
    client.read(request(2, peer, &any_key(), region, vec![range(0, 0, 4)])).unwrap();
    let asked = one.frame();
    one.send_frame(DATA, 0, asked.id, b"next");
    one.send_frame(END, 0, asked.id, &[]);
    assert_eq!(completion(&client, 2).await.result, Ok(()));
}

#[tokio::test]
async fn t7_a_cancel_reaches_every_connection() {
    let (client, mut one, mut two, peer, region, memory) = doubled().await;
    start(&client, peer, region, (&mut one, &mut two), PATIENT);
    client.cancel(OpId(1));
    let outcome = completion(&client, 1).await;
    assert_eq!((outcome.result, outcome.arrived.count()), (Err(ReadError::Cancelled), 0));
    memory.write(0, &vec![7; 4 * MIB]).unwrap();
    for raw in [&mut one, &mut two] {
        while raw.frame().kind != CANCEL {}
    }
    client.deregister(region).unwrap();
}

#[tokio::test]
async fn t8_a_read_does_not_stall_while_one_of_its_connections_brings_bytes() {
    let stall = Duration::from_millis(600);
    let (client, mut one, mut two, peer, region, _) = doubled().await;
    let limits = ReadLimits { total: LIMIT, stall };
    let [first, _] = start(&client, peer, region, (&mut one, &mut two), limits);
    let len = first[0].2 as usize;
    let data = frame(DATA, 0, first[0].0.id, &vec![1; len]);
    let started = Instant::now();
    // Bytes come over one connection, slowly; over the other none.
    for piece in data[..len / 2].chunks(len / 2 / 8) {
        one.send(piece);
        let pause = tokio::time::timeout(stall / 4, client.next_event()).await;
        assert!(pause.is_err(), "{pause:?} after {:?}", started.elapsed());
    }
    assert!(started.elapsed() > stall * 3 / 2);
    assert_eq!(completion(&client, 1).await.result, Err(ReadError::Stalled));
}

#[tokio::test]
async fn t10_only_who_has_a_ticket_adds_a_connection_and_no_more_than_are_granted() {
    let server = transport();
    let (port, nonce) = parse_address(&server.address());
    let join = |ticket: &[u8]| {
        let mut raw = Raw::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap());
        raw.send(&preface_of(1, ticket, &nonce));
        raw
    };
    join(&[5; 16]).closed();
    join(&[0; 16]).closed();
    let mut first = Raw::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap());
    first.send(&preface(&RAW_NONCE, &nonce));
    let answer = first.take(64);
    let ticket = answer[48..].to_vec();
    let Event::Accepted { peer } = event(&server).await else { panic!() };
    let mut further: Vec<_> = (0..answer[24])
        .map(|_| {
            let mut raw = join(&ticket);
            let answer = raw.take(64);
            assert_eq!((answer[24], &answer[32..48]), (0, &nonce[..]));
            raw
        })
        .collect();
    assert_eq!(further.len(), 7);
    join(&ticket).closed();
    // It serves like the first.
    let (_, key) = offer(&server, b"over the last one");
    let last = further.last_mut().unwrap();
    last.send_frame(READ, 0, 1, &read_body(1, &key, &[(5, 8)]));
    let data = last.frame();
    assert_eq!((data.kind, &data.body[..]), (DATA, &b"the last"[..]));
    // A message there breaks the protocol, which is the end of the whole peer.
    last.send_frame(MESSAGE, 0, 0, b"not here");
    assert!(matches!(loss(&server, peer).await, LossReason::Protocol(_)));
    first.closed();
    // A ticket ends with its peer.
    join(&ticket).closed();
}

#[tokio::test]
async fn an_added_connection_that_ends_before_it_was_of_use_concerns_nobody() {
    let client = transport_of(3);
    let (listener, address) = Raw::listen();
    let peer = client.connect(&address, LIMIT).unwrap();
    let mut first = Raw::new(listener.accept().unwrap().0);
    first.take(64);
    first.send(&preface_of(2, &RAW_NONCE, &TICKET));
    assert_eq!(event(&client).await, Event::Connected { peer });
    // One is closed at once, the other after its preface.
    drop(listener.accept().unwrap());
    let mut other = Raw::new(listener.accept().unwrap().0);
    other.take(64);
    other.send(&preface(&RAW_NONCE, &[0; 16]));
    assert_eq!(other.any_frame().kind, PING);
    drop(other);
    first.sync();
    let region = client.register(Memory::allocate(4 * MIB).unwrap()).unwrap();
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 2 * MIB as u64)])).unwrap();
    for at in 0..4 {
        let asked = span(first.frame());
        assert_eq!(asked.1, at * (MIB / 2) as u64);
        answer(&mut first, &asked, &vec![1; 2 * MIB]);
    }
    assert_eq!(completion(&client, 1).await.result, Ok(()));
}

#[tokio::test]
async fn t5_a_message_sent_before_the_end_arrives_though_other_connections_end_too() {
    for _ in 0..50 {
        let (server, client) = (transport_of(1), transport_of(4));
        let (peer, back) = link(&client, &server).await;
        let started = Instant::now();
        while client.lane(peer).as_deref() != Some("4 connections") {
            assert!(started.elapsed() < LIMIT);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        client.send(peer, b"last words".to_vec()).unwrap();
        client.disconnect(peer).unwrap();
        assert_eq!(event(&server).await, Event::Message { peer: back, bytes: b"last words".to_vec() });
        loss(&server, back).await;
    }
}

#[tokio::test]
async fn t2_t11_scattered_reads_over_four_connections_and_a_clean_end() {
    let (server, client) = (transport_of(1), transport_of(4));
    let bytes = pattern(32 * MIB, 8);
    let (_, key) = offer(&server, &bytes);
    let (peer, _) = link(&client, &server).await;
    let memory = Memory::allocate(32 * MIB).unwrap();
    let region = client.register(memory.clone()).unwrap();
    let started = Instant::now();
    while client.lane(peer).as_deref() != Some("4 connections") {
        assert!(started.elapsed() < LIMIT, "{:?}", client.lane(peer));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for round in 0..8u64 {
        memory.write(0, &vec![0; 32 * MIB]).unwrap();
        // Every block of 64 KiB, in another order in each round.
        let ranges = (0..512u64).map(|i| ((i * 37 + round) % 512) << 16).map(|at| range(at, at, 1 << 16));
        client.read(request(round, peer, &key, region, ranges.collect())).unwrap();
        assert_eq!(completion(&client, round).await.result, Ok(()));
        assert!(contents(&memory) == bytes, "round {round}");
    }
    client.read(request(99, peer, &key, region, vec![range(0, 0, 32 * MIB as u64)])).unwrap();
    client.disconnect(peer).unwrap();
    let outcome = completion(&client, 99).await;
    assert!(matches!(outcome.result, Ok(()) | Err(ReadError::PeerLost(LossReason::Disconnected))));
    assert_eq!(loss(&client, peer).await, LossReason::Disconnected);
    let started = Instant::now();
    client.shutdown(LIMIT).await;
    server.shutdown(LIMIT).await;
    drop((client, server));
    assert!(started.elapsed() < Duration::from_secs(2));
}
