//! A second connection to a peer that is connected already is one of its own: none ends another.

use std::time::{Duration, Instant};

use kv_transport::ucx::{UcxConfig, UcxTransport};
use kv_transport::{Event, LossReason, PeerId, RegionKey, Transport};

use crate::support::*;

/// Reads by this connection, past what other connections have to tell meanwhile.
async fn reads(reader: &UcxTransport, peer: PeerId, key: &RegionKey, op: u64) {
    let region = reader.register(memory(&[0; 4096])).unwrap();
    reader.read(request(op, peer, key, region, vec![range(0, 0, 4096)])).unwrap();
    assert_eq!(completion(reader, op).await.result, Ok(()));
    reader.deregister(region).unwrap();
}

/// One that is given up at once, while the first is in use.
async fn t6_a_second_connect_that_is_given_up_ends_no_other(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (_, key) = offer(&source, &pattern(1 << 20, 1));
    let (peer, there) = link(&reader, &source).await;
    for round in 0..40u64 {
        // Cut off at another moment each time, some after both sides know each other.
        let limit = Duration::from_micros(150 * (round % 20));
        let second = reader.connect(&source.address(), limit).unwrap();
        match event(&reader).await {
            Event::PeerLost { peer, reason: LossReason::ConnectTimedOut } if peer == second => {}
            Event::Connected { peer } if peer == second => {
                reads(&reader, second, &key, 1000 + round).await;
                reader.disconnect(second).unwrap();
                assert_eq!(loss(&reader, second).await, LossReason::Disconnected);
            }
            other => panic!("{other:?} in round {round}"),
        }
        reads(&reader, peer, &key, round).await;
    }
    // The other side sees the same: what it was told of has ended, but for the first.
    source.send(there, vec![1]).unwrap();
    assert_eq!(event(&reader).await, Event::Message { peer, bytes: vec![1] });
}

/// Several at once, some of which are given up before the other side has heard of them.
async fn t6_of_several_connects_at_once_only_those_end_that_are_given_up(lanes: &str) {
    for round in 0..12u64 {
        let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
        let (_, key) = offer(&source, &pattern(1 << 20, 1));
        let mut stand = vec![];
        let mut given_up = 0;
        for index in 0..4 {
            // Every pattern of four in which one at least stands.
            let stands = (round + 1) >> index & 1 == 1;
            let limit = if stands { LIMIT } else { Duration::from_micros(100 * (round % 3)) };
            let peer = reader.connect(&source.address(), limit).unwrap();
            if stands { stand.push(peer) } else { given_up += 1 }
        }
        let mut connected = vec![];
        while connected.len() < stand.len() || given_up > 0 {
            match event(&reader).await {
                Event::Connected { peer } if stand.contains(&peer) => connected.push(peer),
                // One that was faster than its limit.
                Event::Connected { .. } => given_up -= 1,
                Event::PeerLost { peer, reason: LossReason::ConnectTimedOut } if !stand.contains(&peer) => {
                    given_up -= 1;
                }
                other => panic!("{other:?} in round {round} of {stand:?}"),
            }
        }
        for (index, peer) in stand.iter().enumerate() {
            reads(&reader, *peer, &key, index as u64).await;
        }
    }
}

/// The two may share an endpoint of UCX's, which the one that is given up must leave to the other.
async fn t6_a_connect_that_is_given_up_does_not_end_that_of_the_other_side(lanes: &str) {
    for round in 0..20u64 {
        let (Some(a), Some(b)) = (transport(lanes), transport(lanes)) else { return };
        let (_, key) = offer(&a, &pattern(1 << 20, 1));
        let given_up = a.connect(&b.address(), Duration::from_micros(50 * (round % 10))).unwrap();
        let stands = b.connect(&a.address(), LIMIT).unwrap();
        loop {
            match event(&b).await {
                Event::Connected { peer } if peer == stands => break,
                // The other side may have been heard of before it gave up.
                Event::Accepted { .. } | Event::PeerLost { reason: LossReason::ClosedByPeer, .. } => {}
                other => panic!("{other:?} in round {round}"),
            }
        }
        loop {
            match event(&a).await {
                Event::PeerLost { peer, reason: LossReason::ConnectTimedOut } if peer == given_up => break,
                Event::Connected { peer } if peer == given_up => break,
                Event::Accepted { .. } => {}
                other => panic!("{other:?} in round {round}"),
            }
        }
        let region = b.register(memory(&[0; 4096])).unwrap();
        b.read(request(1, stands, &key, region, vec![range(0, 0, 4096)])).unwrap();
        loop {
            match event(&b).await {
                Event::ReadCompleted { outcome, .. } => {
                    assert_eq!(outcome.result, Ok(()), "round {round}");
                    break;
                }
                Event::Accepted { .. } => {}
                Event::PeerLost { peer, .. } if peer != stands => {}
                other => panic!("{other:?} in round {round}"),
            }
        }
    }
}

/// Connections come and go in every order, and both sides begin some.
async fn t6_connections_end_in_any_order(lanes: &str) {
    let (Some(a), Some(b)) = (transport(lanes), transport(lanes)) else { return };
    let (_, key) = offer(&b, &pattern(1 << 20, 1));
    let mut standing = vec![];
    for round in 0..24u64 {
        let (at_a, at_b) = if round % 3 == 2 {
            let (at_b, at_a) = link(&b, &a).await;
            (at_a, at_b)
        } else {
            link(&a, &b).await
        };
        standing.push((at_a, at_b));
        if standing.len() > 3 {
            let (at_a, at_b) = standing.remove((round * 7 % 4) as usize);
            let (first, second) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
            let (own, other) = if round % 2 == 0 { (at_a, at_b) } else { (at_b, at_a) };
            first.disconnect(own).unwrap();
            assert_eq!(loss(first, own).await, LossReason::Disconnected);
            assert_eq!(loss(second, other).await, LossReason::ClosedByPeer);
        }
        for (index, (at_a, _)) in standing.iter().enumerate() {
            reads(&a, *at_a, &key, round * 10 + index as u64).await;
        }
    }
}

/// One reader has no patience with a read; the connection beside it goes on.
async fn t6_a_read_that_is_given_up_ends_no_other_connection(lanes: &str) {
    let Some(source) = transport(lanes) else { return };
    let quiet_limit = Duration::ZERO;
    let Some(reader) = open(UcxConfig { quiet_limit, ..config(lanes) }) else { return };
    let size = 64 << 20;
    let (_, key) = offer(&source, &pattern(size, 1));
    let (first, _) = link(&reader, &source).await;
    let (second, _) = link(&reader, &source).await;
    let region = reader.register(memory(&vec![0; size])).unwrap();
    for round in 0..10u64 {
        let op = 100 + round;
        reader.read(request(op, second, &key, region, vec![range(0, 0, size as u64)])).unwrap();
        let until = Instant::now() + Duration::from_millis(round);
        while Instant::now() < until {
            tokio::task::yield_now().await;
        }
        reader.cancel(kv_transport::OpId(op));
        completion(&reader, op).await;
        reads(&reader, first, &key, round).await;
        reads(&reader, second, &key, 50 + round).await;
    }
}

on_both_lanes!(
    t6_a_second_connect_that_is_given_up_ends_no_other,
    t6_of_several_connects_at_once_only_those_end_that_are_given_up,
    t6_a_connect_that_is_given_up_does_not_end_that_of_the_other_side,
    t6_connections_end_in_any_order,
    t6_a_read_that_is_given_up_ends_no_other_connection,
);
