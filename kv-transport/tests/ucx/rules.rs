//! What works, and that it works exactly.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use kv_transport::{Event, OpId, ReadError, ReadPart, ReadRange, ReadRequest, Transport, TransportError};

use crate::support::*;

/// Ranges of uneven lengths in no order: what to read, and what the destination must hold afterwards.
fn scattered(source: &[u8], destination: &[u8], pieces: usize) -> (Vec<ReadRange>, Vec<u8>) {
    let (step, mut expected) = (destination.len() / pieces, destination.to_vec());
    let ranges = (0..pieces)
        .map(|piece| {
            let len = 1 + (piece * 7919) % step;
            let local = piece * step;
            let remote = (piece * 104_729) % (source.len() - len);
            expected[local..local + len].copy_from_slice(&source[remote..remote + len]);
            range(remote as u64, local as u64, len as u64)
        })
        .collect();
    (ranges, expected)
}

async fn t2_scattered_ranges_move_exactly(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    assert!(!reader.lanes(peer).unwrap().is_empty());
    for (op, (size, pieces)) in
        [(1 << 16, 1), (3 << 20, 700), (24 << 20, 5), (1 << 20, 4096)].into_iter().enumerate()
    {
        let (from, into) = (pattern(size, 1), pattern(size, 2));
        let (_, key) = offer(&source, &from);
        let destination = memory(&into);
        let region = reader.register(destination.clone()).unwrap();
        let (ranges, expected) = scattered(&from, &into, pieces);
        let op = op as u64;
        reader.read(request(op, peer, &key, region, ranges)).unwrap();
        let outcome = completion(&reader, op).await;
        assert_eq!(outcome.result, Ok(()));
        assert!(outcome.arrived.is_all() && outcome.arrived.size() == pieces);
        assert!(contents(&destination) == expected, "bytes differ for {pieces} of {size}");
    }
}

async fn t2_a_hundred_thousand_ranges_in_one_read(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let count = 100_000;
    let from = pattern(count * 32, 5);
    let (_, key) = offer(&source, &from);
    let destination = memory(&vec![0; count * 32]);
    let region = reader.register(destination.clone()).unwrap();
    // Backwards, so that no two are neighbours on both sides.
    let ranges = (0..count as u64).map(|i| range(i * 32, (count as u64 - 1 - i) * 32, 32)).collect();
    reader.read(request(1, peer, &key, region, ranges)).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Ok(()));
    let expected: Vec<u8> = from.chunks(32).rev().flatten().copied().collect();
    assert!(contents(&destination) == expected);
}

async fn t2_several_parts_and_both_directions_at_once(lanes: &str) {
    let (Some(a), Some(b)) = (transport(lanes), transport(lanes)) else { return };
    let (b_at_a, a_at_b) = link(&a, &b).await;
    let size = 2 << 20;
    let mut destinations = vec![];
    for (own, other, peer) in [(&a, &b, b_at_a), (&b, &a, a_at_b)] {
        for op in 0..4u64 {
            let seeds = [10 + op, 20 + op];
            let mut parts = vec![];
            for seed in seeds {
                let (_, key) = offer(other, &pattern(size, seed));
                let destination = memory(&vec![0; size]);
                let region = own.register(destination.clone()).unwrap();
                parts.push(ReadPart { key, region, ranges: vec![range(0, 0, size as u64)] });
                destinations.push((destination, pattern(size, seed)));
            }
            own.read(ReadRequest { op: OpId(op), peer, parts, limits: PATIENT }).unwrap();
        }
    }
    for own in [&a, &b] {
        let mut seen = BTreeSet::new();
        for _ in 0..4 {
            match event(own).await {
                Event::ReadCompleted { op, outcome } => {
                    assert_eq!(outcome.result, Ok(()));
                    seen.insert(op);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(seen.len(), 4);
    }
    assert!(destinations.iter().all(|(destination, expected)| contents(destination) == *expected));
}

async fn t5_messages_arrive_whole_and_once(lanes: &str) {
    let (Some(a), Some(b)) = (transport(lanes), transport(lanes)) else { return };
    let (b_at_a, a_at_b) = link(&a, &b).await;
    let sizes = [0, 1, 100, 8191, 65_536, 1 << 20];
    for (from, to, peer, there) in [(&a, &b, b_at_a, a_at_b), (&b, &a, a_at_b, b_at_a)] {
        let mut expected: Vec<_> = (0..300).map(|i| pattern(sizes[i % 5], i as u64)).collect();
        expected.push(pattern(sizes[5], 7));
        for message in &expected {
            from.send(peer, message.clone()).unwrap();
        }
        let mut got = vec![];
        for _ in 0..expected.len() {
            match event(to).await {
                Event::Message { peer, bytes } if peer == there => got.push(bytes),
                other => panic!("{other:?}"),
            }
        }
        got.sort_unstable();
        expected.sort_unstable();
        assert!(got == expected);
        let refused = from.send(peer, vec![0; (1 << 20) + 1]);
        assert!(matches!(refused, Err(TransportError::MessageTooLong { .. })), "{refused:?}");
    }
}

async fn t8_messages_that_nobody_takes_stop_the_sender_and_none_is_lost(lanes: &str) {
    let small =
        || open(kv_transport::ucx::UcxConfig { incoming_max: 8, message_queue_max: 16, ..config(lanes) });
    let (Some(a), Some(b)) = (small(), small()) else { return };
    let (peer, _) = link(&a, &b).await;
    let (mut accepted, start) = (0u64, Instant::now());
    // The receiver's window and the sender's queue fill up, and then stay full.
    let mut refused_since = None;
    while refused_since.is_none_or(|since: Instant| since.elapsed().as_millis() < 200) {
        match a.send(peer, accepted.to_le_bytes().to_vec()) {
            Ok(()) => (accepted, refused_since) = (accepted + 1, None),
            Err(TransportError::SendQueueFull { .. }) => {
                refused_since.get_or_insert_with(Instant::now);
                tokio::task::yield_now().await;
            }
            Err(other) => panic!("{other}"),
        }
        assert!(start.elapsed() < LIMIT && accepted < 100);
    }
    assert_eq!(accepted, 8 + 16);
    let mut seen = BTreeSet::new();
    for _ in 0..accepted {
        match event(&b).await {
            Event::Message { bytes, .. } => assert!(seen.insert(bytes)),
            other => panic!("{other:?}"),
        }
    }
}

async fn t5_long_messages_pass_a_small_window(lanes: &str) {
    let small = || {
        open(kv_transport::ucx::UcxConfig {
            incoming_bytes: 1000,
            message_queue_bytes: 1000,
            ..config(lanes)
        })
    };
    let (Some(a), Some(b)) = (small(), small()) else { return };
    let (peer, _) = link(&a, &b).await;
    for len in [10, 1 << 20, 700, 900, 1 << 20, 0] {
        let message = pattern(len, 1);
        let start = Instant::now();
        while let Err(refused) = a.send(peer, message.clone()) {
            assert!(matches!(refused, TransportError::SendQueueFull { .. }), "{refused}");
            assert!(start.elapsed() < LIMIT);
            tokio::task::yield_now().await;
        }
        match event(&b).await {
            Event::Message { bytes, .. } => assert!(bytes == message),
            other => panic!("{other:?}"),
        }
    }
}

async fn t9_the_key_of_a_deregistered_region_fails(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let (gone, key) = offer(&source, &pattern(1 << 16, 1));
    let (_, good) = offer(&source, &pattern(1 << 16, 2));
    let region = reader.register(memory(&vec![0; 1 << 16])).unwrap();
    source.deregister(gone).unwrap();
    assert_eq!(source.deregister(gone), Err(TransportError::UnknownRegion { region: gone }));
    reader.read(request(1, peer, &key, region, vec![range(0, 0, 64)])).unwrap();
    let outcome = completion(&reader, 1).await;
    assert_eq!((outcome.result, outcome.arrived.count()), (Err(ReadError::UnknownKey), 0));
    // The connection goes on.
    reader.read(request(2, peer, &good, region, vec![range(0, 0, 64)])).unwrap();
    assert_eq!(completion(&reader, 2).await.result, Ok(()));
}

async fn t9_a_region_that_goes_during_reads_yields_no_success(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let size = 32 << 20;
    let destination = memory(&vec![0; size]);
    let region = reader.register(destination.clone()).unwrap();
    let from = pattern(size, 3);
    let (mut failed, mut done) = (0, 0);
    for round in 0..12u64 {
        let offered_memory = memory(&from);
        let offered = source.register(offered_memory.clone()).unwrap();
        let key = source.key(offered).unwrap();
        reader.read(request(round, peer, &key, region, vec![range(0, 0, size as u64)])).unwrap();
        // At another moment of the read each time.
        let until = Instant::now() + std::time::Duration::from_millis(round * 2);
        while Instant::now() < until {
            tokio::task::yield_now().await;
        }
        source.deregister(offered).unwrap();
        // The owner uses it for something else at once.
        offered_memory.write(0, &vec![0x33; size]).unwrap();
        match completion(&reader, round).await.result {
            Ok(()) => {
                done += 1;
                assert!(contents(&destination) == from);
            }
            Err(ReadError::UnknownKey) => failed += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(failed > 0, "{done} reads were all faster");
}

async fn remote_ranges_beyond_the_region_are_refused(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let (_, key) = offer(&source, &pattern(4096, 1));
    let destination = memory(&[9; 4096]);
    let region = reader.register(destination.clone()).unwrap();
    for (op, bad) in [range(4095, 8, 2), range(u64::MAX, 8, 1), range(1, 8, 4096 - 8)].into_iter().enumerate()
    {
        let result = reader.read(request(op as u64, peer, &key, region, vec![range(0, 0, 8), bad]));
        result.unwrap();
        let outcome = completion(&reader, op as u64).await;
        if bad.remote_offset == 1 {
            assert_eq!(outcome.result, Ok(()));
            continue;
        }
        assert_eq!(outcome.result, Err(ReadError::RemoteRange));
        assert_eq!(contents(&destination), [9; 4096]);
    }
}

async fn connections_of_every_shape(lanes: &str) {
    let (Some(a), Some(b)) = (transport(lanes), transport(lanes)) else { return };
    // Both connect to each other at once, twice, and to themselves.
    let mut mine = vec![];
    for _ in 0..2 {
        mine.push((&a, a.connect(&b.address(), LIMIT).unwrap()));
        mine.push((&b, b.connect(&a.address(), LIMIT).unwrap()));
    }
    mine.push((&a, a.connect(&a.address(), LIMIT).unwrap()));
    let (mut accepted, mut connected) = (vec![], vec![]);
    for own in [&a, &b] {
        for _ in 0..if std::ptr::eq(own, &raw const a) { 6 } else { 4 } {
            match event(own).await {
                Event::Accepted { peer } => accepted.push((own, peer)),
                Event::Connected { peer } => connected.push((own, peer)),
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((accepted.len(), connected.len()), (5, 5));
    let (_, key) = offer(&a, &pattern(100_000, 1));
    let destination = memory(&vec![0; 100_000]);
    let region = b.register(destination.clone()).unwrap();
    // Each connection works until it is let go of, and letting go of one harms no other.
    let ours = |own: &kv_transport::ucx::UcxTransport| std::ptr::eq(own, &raw const b);
    let at_b: Vec<_> =
        connected.iter().chain(&accepted).filter(|(own, _)| ours(own)).map(|(_, peer)| *peer).collect();
    for (op, peer) in at_b.iter().enumerate() {
        b.read(request(op as u64, *peer, &key, region, vec![range(0, 0, 100_000)])).unwrap();
        assert_eq!(completion(&b, op as u64).await.result, Ok(()));
        b.disconnect(*peer).unwrap();
        assert_eq!(loss(&b, *peer).await, kv_transport::LossReason::Disconnected);
        assert!(matches!(
            event(&a).await,
            Event::PeerLost { reason: kv_transport::LossReason::ClosedByPeer, .. }
        ));
    }
    assert!(contents(&destination) == pattern(100_000, 1));
}

on_both_lanes!(
    t2_scattered_ranges_move_exactly,
    t2_a_hundred_thousand_ranges_in_one_read,
    t2_several_parts_and_both_directions_at_once,
    t5_messages_arrive_whole_and_once,
    t8_messages_that_nobody_takes_stop_the_sender_and_none_is_lost,
    t5_long_messages_pass_a_small_window,
    t9_the_key_of_a_deregistered_region_fails,
    t9_a_region_that_goes_during_reads_yields_no_success,
    remote_ranges_beyond_the_region_are_refused,
    connections_of_every_shape,
);

#[tokio::test(flavor = "multi_thread")]
async fn t8_calls_from_many_threads() {
    let (Some(a), Some(b)) = (transport(TCP), transport(TCP)) else { return };
    let (peer, _) = link(&a, &b).await;
    let a = Arc::new(a);
    let (_, key) = offer(&b, &pattern(1 << 16, 1));
    let threads: Vec<_> = (0..4u64)
        .map(|thread| {
            let (a, key) = (Arc::clone(&a), key.clone());
            std::thread::spawn(move || {
                for step in 0..25 {
                    let region = a.register(memory(&vec![0; 1 << 16])).unwrap();
                    let op = thread * 100 + step;
                    a.read(request(op, peer, &key, region, vec![range(0, 0, 1 << 16)])).unwrap();
                    a.cancel(OpId(op + 1));
                    a.send(peer, vec![1; 10]).unwrap();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let mut seen = BTreeSet::new();
    for _ in 0..100 {
        match event(&a).await {
            Event::ReadCompleted { op, outcome } => {
                assert!(seen.insert(op));
                assert!(matches!(outcome.result, Ok(()) | Err(ReadError::Cancelled)), "{outcome:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}
