//! A small read beside a large one at the same peer does not wait for it, on either side of the connection.

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{Event, Memory, Transport};

use crate::support::*;

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn a_small_read_is_asked_for_although_a_large_one_fills_the_window() {
    let config = TcpConfig { bytes_in_flight_per_peer: MIB, ..TcpConfig::default() };
    let client = TcpTransport::bind(config).unwrap();
    let (mut raw, peer) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(64 << 20).unwrap()).unwrap();
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 32 * MIB)])).unwrap();
    // What any read may ask for at once; then the window is more than full.
    let first: Vec<_> = (0..4).map(|_| raw.frame()).collect();
    assert!(first.iter().all(|frame| frame.kind == READ && frame.body[..8] == first[0].body[..8]));
    client.read(request(2, peer, &any_key(), region, vec![range(0, 40 * MIB, 100)])).unwrap();
    let small = raw.frame();
    assert_eq!(small.kind, READ);
    assert_ne!(small.body[..8], first[0].body[..8]);
    // The large one keeps to the window: it asks again only once there is room.
    raw.send_frame(DATA, 0, small.id, &[1; 100]);
    raw.send_frame(END, 0, small.id, &[]);
    assert_eq!(completion(&client, 2).await.result, Ok(()));
    raw.sync();
    for asked in &first {
        raw.send_frame(DATA, 0, asked.id, &vec![1; 512 << 10]);
        raw.send_frame(END, 0, asked.id, &[]);
    }
    assert_eq!(raw.frame().body[..8], first[0].body[..8]);
}

#[tokio::test]
async fn a_small_read_is_served_before_what_a_large_one_asked_for_earlier() {
    let config = TcpConfig { chunk_max_bytes: 4 << 20, ..TcpConfig::default() };
    let server = TcpTransport::bind(config).unwrap();
    let (_, key) = offer(&server, &pattern(4 << 20, 1));
    let mut raw = Raw::connect(&server);
    assert!(matches!(event(&server).await, Event::Accepted { .. }));
    let large = (1..=16).map(|chunk| frame(READ, 0, chunk, &read_body(1, &key, &[(0, 4 << 20)])));
    let small = frame(READ, 0, 99, &read_body(2, &key, &[(0, 100)]));
    raw.send(&large.chain([small]).flatten().collect::<Vec<u8>>());
    let mut before = 0;
    loop {
        let data = raw.frame();
        assert_eq!(data.kind, DATA);
        assert_eq!(raw.frame().kind, END);
        if data.id == 99 {
            break;
        }
        before += 1;
    }
    // The one that was being sent when it came, and the one whose turn it was.
    assert!(before <= 2, "{before} chunks came first");
}

#[tokio::test]
async fn all_peers_together_are_asked_for_no_more_than_the_limit_and_none_for_nothing() {
    let config = TcpConfig { bytes_in_flight_max: 4 * MIB, ..TcpConfig::default() };
    let client = TcpTransport::bind(config).unwrap();
    let (mut one, first) = Raw::serve(&client).await;
    let (mut two, second) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(64 << 20).unwrap()).unwrap();
    client.read(request(1, first, &any_key(), region, vec![range(0, 0, 32 * MIB)])).unwrap();
    let asked: Vec<_> = (0..8).map(|_| one.frame()).collect();
    assert!(asked.iter().all(|frame| frame.kind == READ));
    one.sync();
    // The other gets the beginning of its read, though the limit is reached.
    client.read(request(2, second, &any_key(), region, vec![range(0, 32 * MIB, 32 * MIB)])).unwrap();
    let asked_two: Vec<_> = (0..4).map(|_| two.frame()).collect();
    assert!(asked_two.iter().all(|frame| frame.kind == READ));
    two.sync();
    // When the first peer is gone there is room, which the second takes as it answers.
    drop(one);
    assert!(completion(&client, 1).await.result.is_err());
    loss(&client, first).await;
    two.send_frame(DATA, 0, asked_two[0].id, &vec![1; 512 << 10]);
    two.send_frame(END, 0, asked_two[0].id, &[]);
    for _ in 0..5 {
        assert_eq!(two.frame().kind, READ);
    }
}
