//! T-6: losing a peer ends every operation on it, and is announced once, after those completions.

use std::time::{Duration, Instant};

use kv_transport::{Event, LossReason, OpId, PeerId, ReadError, TransportError};

use super::bench::{Bench, Node, Pair, Place, pattern, range};
use super::case::{End, Outcome, broken, cases, check};

cases!(T6:
    t6_a_peer_that_shuts_down_ends_its_reads_then_is_lost,
    t6_a_killed_peer_ends_its_reads_then_is_lost,
    t6_a_cut_link_ends_its_reads_then_is_told_on_both_sides,
    t6_a_peer_let_go_of_ends_its_reads_then_is_lost_on_both_sides,
    t6_a_lost_peer_is_refused,
    t6_one_loss_touches_no_other_peer,
    t6_a_peer_that_is_not_there_is_lost_once,
    t6_a_peer_connected_again_has_a_new_id,
    t6_a_shutdown_of_ours_loses_every_peer,
);

/// Checks that the events of a node tell of reads, then of the loss of their peer, once, then of it no more.
fn check_order(events: &[Event], peer: PeerId, ops: &[OpId]) -> Outcome {
    let losses: Vec<usize> = events
        .iter()
        .enumerate()
        .filter(|(_, event)| matches!(event, Event::PeerLost { peer: lost, .. } if *lost == peer))
        .map(|(at, _)| at)
        .collect();
    check!(T6, losses.len() == 1, "the loss of {peer} was told {} times", losses.len());
    for (at, event) in events.iter().enumerate().skip(losses[0] + 1) {
        let late = match event {
            Event::ReadCompleted { op, .. } => ops.contains(op),
            Event::Message { peer: of, .. } | Event::Connected { peer: of } => *of == peer,
            _ => false,
        };
        check!(T6, !late, "event {at} came after the loss of its peer: {event:?}");
    }
    for op in ops {
        let ended =
            events.iter().any(|event| matches!(event, Event::ReadCompleted { op: of, .. } if of == op));
        check!(T6, ended, "{op} did not complete before the loss of {peer}");
    }
    Ok(())
}

/// All events up to the loss of a peer, and whatever else comes before the transport has ended.
fn to_the_end(node: &Node, peer: PeerId) -> Result<(Vec<Event>, LossReason), End> {
    let mut events = vec![];
    let reason = node.wait(node.patience, |event| {
        events.push(event.clone());
        match event {
            Event::PeerLost { peer: lost, reason } if *lost == peer => Some(reason.clone()),
            _ => None,
        }
    });
    let reason =
        reason.ok_or_else(|| broken!(T6, "the loss of {peer} is not told within {:?}", node.patience))?;
    // The backlog holds again what the first look passed over.
    let passed = events.len() - 1;
    events.extend(node.drain()?.into_iter().skip(passed));
    Ok((events, reason))
}

fn busy(bench: &Bench, pair: &Pair, count: usize) -> Result<Vec<(OpId, Place)>, End> {
    let source = bench.offer(&pair.server, pattern(2 << 20, 1))?;
    (0..count)
        .map(|_| {
            let place = bench.place(&pair.client, 2 << 20)?;
            let op = pair.client.read(pair.peer, &source.key, place.region, vec![range(0, 0, 2 << 20)])?;
            Ok((op, place))
        })
        .collect()
}

fn ids(reads: &[(OpId, Place)]) -> Vec<OpId> {
    reads.iter().map(|(op, _)| *op).collect()
}

fn t6_a_peer_that_shuts_down_ends_its_reads_then_is_lost(bench: &Bench) -> Outcome {
    for _ in 0..bench.repeats.div_ceil(10) {
        let pair = bench.pair()?;
        let reads = busy(bench, &pair, 12)?;
        pair.server.shutdown()?;
        let (events, reason) = to_the_end(&pair.client, pair.peer)?;
        check!(T6, reason != LossReason::Disconnected, "a peer that left is said to be let go of by us");
        check_order(&events, pair.peer, &ids(&reads))?;
    }
    Ok(())
}

fn t6_a_killed_peer_ends_its_reads_then_is_lost(bench: &Bench) -> Outcome {
    for _ in 0..bench.repeats.div_ceil(20) {
        let mut away = bench.away()?;
        let mut ops = vec![];
        for _ in 0..4 {
            ops.push(away.read_all(bench)?.1);
        }
        away.remote.kill()?;
        let (events, _) = to_the_end(&away.node, away.peer)?;
        check_order(&events, away.peer, &ops)?;
    }
    Ok(())
}

fn t6_a_cut_link_ends_its_reads_then_is_told_on_both_sides(bench: &Bench) -> Outcome {
    let (server, client) = (bench.node()?, bench.node()?);
    let mut link = bench.harness.link(&server.transport.address())?;
    let peer = client.connect(&link.address())?;
    let back = server.accepted()?;
    let source = bench.offer(&server, pattern(16 << 20, 1))?;
    let place = bench.place(&client, 16 << 20)?;
    let op = client.read(peer, &source.key, place.region, vec![range(0, 0, 16 << 20)])?;
    link.cut()?;
    let (events, _) = to_the_end(&client, peer)?;
    check_order(&events, peer, &[op])?;
    let (events, _) = to_the_end(&server, back)?;
    check_order(&events, back, &[])
}

fn t6_a_peer_let_go_of_ends_its_reads_then_is_lost_on_both_sides(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let reads = busy(bench, &pair, 12)?;
    let left = pair.client.transport.disconnect(pair.peer);
    check!(T6, left.is_ok(), "a peer cannot be let go of: {left:?}");
    let (events, reason) = to_the_end(&pair.client, pair.peer)?;
    check!(T6, reason == LossReason::Disconnected, "let go of, and lost because: {reason}");
    check_order(&events, pair.peer, &ids(&reads))?;
    for event in &events {
        if let Event::ReadCompleted { outcome, .. } = event {
            let fair = matches!(outcome.result, Ok(()) | Err(ReadError::PeerLost(_)));
            check!(T6, fair, "a read of a peer let go of ended with {:?}", outcome.result);
        }
    }
    let (events, _) = to_the_end(&pair.server, pair.back)?;
    check_order(&events, pair.back, &[])
}

fn t6_a_lost_peer_is_refused(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    let source = bench.offer(&server, pattern(4096, 1))?;
    let place = bench.place(&client, 4096)?;
    server.shutdown()?;
    client.loss(peer)?;
    let unknown = TransportError::UnknownPeer { peer };
    let sent = client.transport.send(peer, vec![1]);
    check!(T6, sent.as_ref() == Err(&unknown), "a message to a lost peer: {sent:?}");
    let op = client.op();
    let read =
        client.transport.read(client.request(op, peer, &source.key, place.region, vec![range(0, 0, 9)]));
    check!(T6, read.as_ref() == Err(&unknown), "a read from a lost peer: {read:?}");
    let left = client.transport.disconnect(peer);
    check!(T6, left.as_ref() == Err(&unknown), "letting go of a lost peer: {left:?}");
    Ok(())
}

fn t6_one_loss_touches_no_other_peer(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let staying = bench.node()?;
    let (peer, back) = pair.client.link(&staying)?;
    let source = bench.offer(&staying, pattern(8 << 20, 2))?;
    let place = bench.place(&pair.client, 8 << 20)?;
    let reads = busy(bench, &pair, 4)?;
    let op = pair.client.read(peer, &source.key, place.region, vec![range(0, 0, 8 << 20)])?;
    pair.server.shutdown()?;
    pair.client.loss(pair.peer)?;
    let outcome = pair.client.completion(op)?;
    check!(T6, outcome.result == Ok(()), "another peer's loss ended a read with {:?}", outcome.result);
    for (op, _) in reads {
        pair.client.completion(op)?;
    }
    let sent = staying.transport.send(back, b"still here".to_vec());
    check!(
        T6,
        sent.is_ok() && pair.client.message().is_some(),
        "another peer's loss cut a connection: {sent:?}"
    );
    Ok(())
}

fn t6_a_peer_that_is_not_there_is_lost_once(bench: &Bench) -> Outcome {
    let (gone, client) = (bench.node()?, bench.node()?);
    let address = gone.transport.address();
    gone.drain()?;
    drop(gone);
    // An address can be seen to be void at once, or only when it is tried.
    let Ok(peer) = client.transport.connect(&address, Duration::from_secs(3)) else { return Ok(()) };
    let (events, _) = to_the_end(&client, peer)?;
    let connected = events.contains(&Event::Connected { peer });
    check!(T6, !connected, "a peer that is not there was connected");
    check_order(&events, peer, &[])
}

fn t6_a_peer_connected_again_has_a_new_id(bench: &Bench) -> Outcome {
    let (server, client) = (bench.node()?, bench.node()?);
    let mut ids = vec![];
    for _ in 0..5 {
        let (peer, back) = client.link(&server)?;
        check!(
            T6,
            !ids.contains(&(peer, back)) && !ids.iter().any(|(old, _)| *old == peer),
            "{peer} came again"
        );
        ids.push((peer, back));
        client.transport.disconnect(peer).map_err(|e| broken!(T6, "a peer cannot be let go of: {e}"))?;
        client.loss(peer)?;
        server.loss(back)?;
    }
    Ok(())
}

fn t6_a_shutdown_of_ours_loses_every_peer(bench: &Bench) -> Outcome {
    let center = bench.node()?;
    let (mut peers, mut ops, mut others) = (vec![], vec![], vec![]);
    for seed in 0..3 {
        let other = bench.node()?;
        let (peer, _) = center.link(&other)?;
        let source = bench.offer(&other, pattern(2 << 20, seed))?;
        let place = bench.place(&center, 2 << 20)?;
        ops.push(vec![center.read(peer, &source.key, place.region, vec![range(0, 0, 2 << 20)])?]);
        peers.push(peer);
        others.push(other);
    }
    let start = Instant::now();
    let events = center.drain()?;
    check!(T8, start.elapsed() < center.patience * 2, "shutdown took {:?}", start.elapsed());
    peers.iter().zip(&ops).try_for_each(|(peer, ops)| check_order(&events, *peer, ops))
}
