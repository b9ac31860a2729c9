//! Garbage on the port, garbage instead of a peer, and peers that break the protocol (rule T-10).

use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{Event, LossReason, Memory, Transport};

use crate::support::*;

#[tokio::test]
async fn t10_garbage_on_the_port_costs_only_itself() {
    let (server, client) = (transport(), transport());
    let (peer, _) = link(&client, &server).await;
    let source = pattern(1 << 20, 1);
    let (_, key) = offer(&server, &source);
    let destination = Memory::allocate(1 << 20).unwrap();
    let region = client.register(destination.clone()).unwrap();
    let (port, nonce) = parse_address(&server.address());

    let ours = preface(&RAW_NONCE, &nonce);
    let mut other_version = ours.clone();
    other_version[8] = 9;
    let mut former_life = ours.clone();
    former_life[63] ^= 1;
    let mut granting_nothing = ours.clone();
    granting_nothing[12..16].fill(0);
    let strangers: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        pattern(100_000, 7),
        vec![0],
        other_version,
        former_life,
        granting_nothing,
    ];
    let mut held = vec![];
    for (number, bytes) in (1..).zip(&strangers) {
        let mut raw = Raw::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap());
        // It may be thrown out before it has said everything.
        raw.0.write_all(bytes).ok();
        raw.closed();
        // One that says too little is waited for, without anybody being held up.
        let mut short = Raw::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap());
        short.send(&ours[..number as usize * 9 % 64]);
        held.push(short);

        client.read(request(number, peer, &key, region, vec![range(0, 0, 1 << 20)])).unwrap();
        assert_eq!(completion(&client, number).await.result, Ok(()));
    }
    assert!(contents(&destination) == source, "the bytes differ");
    // None of them was a peer.
    server.shutdown(LIMIT).await;
    assert!(matches!(event(&server).await, Event::PeerLost { .. }));
    assert_eq!(server.next_event().await, None);
}

#[tokio::test]
async fn t8_who_does_not_say_who_it_is_is_not_waited_for() {
    let config = TcpConfig { handshake_limit: std::time::Duration::from_millis(100), ..TcpConfig::default() };
    let server = TcpTransport::bind(config).unwrap();
    let (port, _) = parse_address(&server.address());
    let mut raw = Raw::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap());
    raw.send(b"kvTCP");
    raw.closed();
}

/// Who has not said who it is holds one of a number of places, however many come.
#[tokio::test]
async fn t8_strangers_have_so_many_places_and_no_more() {
    const PLACES: usize = 256;
    let config = TcpConfig { handshake_limit: LIMIT, ..TcpConfig::default() };
    let (server, client) = (TcpTransport::bind(config).unwrap(), transport());
    let (port, _) = parse_address(&server.address());
    let mut strangers: Vec<_> =
        (0..PLACES).map(|_| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()).collect();
    // All places are taken: the next one is not even looked at.
    let short = std::time::Duration::from_millis(500);
    let peer = client.connect(&server.address(), short).unwrap();
    assert_eq!(loss(&client, peer).await, LossReason::ConnectTimedOut);
    // Two go: the one before may still be in the queue.
    strangers.truncate(PLACES - 2);
    link(&client, &server).await;
}

#[tokio::test]
async fn t10_a_peer_that_breaks_the_protocol_is_lost_by_name() {
    let server = TcpTransport::bind(TcpConfig { chunk_queue_max: 4, ..TcpConfig::default() }).unwrap();
    let client = transport();
    let (peer, _) = link(&client, &server).await;
    let (_, key) = offer(&server, &pattern(4096, 1));
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();

    let header = |kind: u8, len: u32| {
        let mut bytes = frame(kind, 0, 0, &[]);
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        bytes
    };
    let mut reserved = frame(PING, 0, 0, &[]);
    reserved[2] = 1;
    let many = vec![(0, 1); 1025];
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (frame(0, 0, 0, &[]), "unknown kind"),
        (frame(99, 0, 0, &[]), "unknown kind"),
        (reserved, "reserved"),
        (header(MESSAGE, u32::MAX), "message longer"),
        (header(READ, u32::MAX), "strange length"),
        (header(READ, u32::MAX - 3), "more ranges than granted"),
        (header(READ, 3), "without ranges"),
        (frame(READ, 0, 1, &read_body(1, &key, &many)), "more ranges than granted"),
        (frame(READ, 0, 1, &read_body(1, &key, &[(0, u32::MAX), (0, u32::MAX)])), "more bytes than granted"),
        (frame(READ, 0, 1, &read_body(1, &key, &[(0, 0)])), "empty range"),
        (frame(DATA, 0, 1, b"x"), "nobody asked for"),
        (frame(END, 0, 1, &[]), "nobody asked for"),
        (frame(END, 77, 1, &[]), "unknown outcome"),
        (frame(READ, 0, 1, &read_body(1, &key, &[(0, 1)])).repeat(6), "at a time"),
    ];
    for (op, (bytes, what)) in (1..).zip(cases) {
        let mut raw = Raw::connect(&server);
        let Event::Accepted { peer: stranger } = event(&server).await else { panic!() };
        raw.send(&bytes);
        match loss(&server, stranger).await {
            LossReason::Protocol(reason) => assert!(reason.contains(what), "{reason} instead of {what}"),
            other => panic!("{other} instead of {what}"),
        }
        raw.closed();
        client.read(request(op, peer, &key, region, vec![range(0, 0, 4096)])).unwrap();
        assert_eq!(completion(&client, op).await.result, Ok(()));
    }
}

#[tokio::test]
async fn t10_a_server_that_breaks_the_protocol_is_lost_after_its_reads() {
    type Answer = fn(&mut Raw, u64);
    let cases: [(Answer, &str); 6] = [
        (|raw, chunk| raw.send_frame(DATA, 0, chunk, &[1; 99]), "another length"),
        (|raw, chunk| raw.send_frame(END, 0, chunk, &[]), "before its data"),
        (|raw, chunk| raw.send_frame(END, 3, chunk, &[]), "nobody cancelled"),
        (|raw, chunk| raw.send_frame(DATA, 0, chunk + 1, &[1; 100]), "nobody asked for"),
        (
            |raw, chunk| {
                raw.send_frame(DATA, 0, chunk, &[1; 100]);
                raw.send_frame(PING, 0, 0, &[]);
            },
            "without its end",
        ),
        (
            |raw, chunk| {
                raw.send_frame(DATA, 0, chunk, &[1; 100]);
                raw.send_frame(END, 0, chunk + 1, &[]);
            },
            "without its end",
        ),
    ];
    for (answer, what) in cases {
        let client = transport();
        let (mut raw, peer) = Raw::serve(&client).await;
        let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
        client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 100)])).unwrap();
        let asked = raw.frame();
        answer(&mut raw, asked.id);
        let outcome = completion(&client, 1).await;
        let reason = loss(&client, peer).await;
        assert!(
            matches!(reason, LossReason::Protocol(reason) if reason.contains(what)),
            "{reason}, not {what}"
        );
        assert_eq!(outcome.result, Err(kv_transport::ReadError::PeerLost(reason)));
        assert_eq!(outcome.arrived.count(), 0);
    }
}

#[tokio::test]
async fn t10_a_server_of_another_kind_is_a_stranger() {
    let client = transport();
    let mut version = preface(&RAW_NONCE, &[0; 16]);
    version[8] = 2;
    let cases: [(&[u8], &str); 4] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a kv-transport"),
        (b"\0", "not a kv-transport"),
        (&version, "another version"),
        (&preface(&[1; 16], &[0; 16]), "another life"),
    ];
    for (answer, what) in cases {
        let (listener, address) = Raw::listen();
        let peer = client.connect(&address, LIMIT).unwrap();
        let mut raw = Raw::new(listener.accept().unwrap().0);
        raw.send(answer);
        let reason = loss(&client, peer).await;
        assert!(
            matches!(reason, LossReason::Stranger(reason) if reason.contains(what)),
            "{reason}, not {what}"
        );
    }
    // One that closes without a word.
    let (listener, address) = Raw::listen();
    let peer = client.connect(&address, LIMIT).unwrap();
    drop(listener.accept().unwrap());
    assert_eq!(loss(&client, peer).await, LossReason::ClosedByPeer);
}
