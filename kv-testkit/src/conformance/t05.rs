//! T-5: a message arrives whole and at most once; order between messages is not promised.

use std::collections::BTreeMap;

use kv_transport::{Event, MESSAGE_MAX_BYTES, PeerId, TransportError};

use super::bench::{Bench, Node, Pair, pattern, range};
use super::case::{End, Outcome, broken, cases, check};

cases!(T5:
    t5_messages_of_every_length_arrive_whole,
    t5_many_messages_both_ways_arrive_once,
    t5_a_message_too_long_is_refused_and_harms_nothing,
    t5_messages_pass_beside_reads,
    t5_messages_before_a_disconnect_arrive_at_most_once,
    t5_messages_of_several_peers_are_told_apart,
    t5_messages_to_another_process_come_back,
);

fn send(node: &Node, peer: PeerId, message: Vec<u8>) -> Outcome {
    node.transport.send(peer, message).map_err(|error| broken!(T5, "a good message is refused: {error}"))
}

/// Everything that arrived from a peer, each with how often.
fn arrivals(node: &Node, from: PeerId, count: usize) -> Result<BTreeMap<Vec<u8>, u32>, End> {
    let mut found = BTreeMap::new();
    for _ in 0..count {
        let message = node.wait(node.patience, |event| match event {
            Event::Message { peer, bytes } if *peer == from => Some(bytes.clone()),
            _ => None,
        });
        let so_far: u32 = found.values().sum();
        *found
            .entry(message.ok_or_else(|| broken!(T5, "{so_far} of {count} messages arrived"))?)
            .or_default() += 1;
    }
    Ok(found)
}

/// A second copy comes before the end at the latest.
fn check_no_more(node: &Node) -> Outcome {
    let more = node.drain()?.into_iter().filter(|event| matches!(event, Event::Message { .. })).count();
    check!(T5, more == 0, "{more} messages arrived beyond those that were sent");
    Ok(())
}

fn counted(messages: &[Vec<u8>]) -> BTreeMap<Vec<u8>, u32> {
    messages.iter().fold(BTreeMap::new(), |mut counts, message| {
        *counts.entry(message.clone()).or_default() += 1;
        counts
    })
}

fn t5_messages_of_every_length_arrive_whole(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, back } = bench.pair()?;
    let lengths = [
        0,
        1,
        2,
        63,
        64,
        4095,
        4096,
        4097,
        65_535,
        65_536,
        100_001,
        0,
        MESSAGE_MAX_BYTES - 1,
        MESSAGE_MAX_BYTES,
    ];
    let sent: Vec<_> = lengths.iter().zip(1..).map(|(len, seed)| pattern(*len, seed)).collect();
    for message in &sent {
        send(&client, peer, message.clone())?;
        send(&server, back, message.clone())?;
    }
    for (node, from) in [(&server, back), (&client, peer)] {
        let found = arrivals(node, from, sent.len())?;
        check!(T5, found == counted(&sent), "{} messages are not what was sent", node.transport.name());
    }
    check_no_more(&server)?;
    check_no_more(&client)
}

fn t5_many_messages_both_ways_arrive_once(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, back } = bench.pair()?;
    let message = |number: u32| {
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.extend_from_slice(&pattern(number as usize % 200, u64::from(number)));
        bytes
    };
    let (count, batch) = (3000, 100);
    let all: Vec<_> = (0..count).map(message).collect();
    let (mut there, mut here) = (BTreeMap::new(), BTreeMap::new());
    // In batches that are taken, so that no queue needs to be long.
    for batch in all.chunks(batch) {
        for message in batch {
            send(&client, peer, message.clone())?;
            send(&server, back, message.clone())?;
        }
        there.extend(arrivals(&server, back, batch.len())?);
        here.extend(arrivals(&client, peer, batch.len())?);
    }
    for found in [there, here] {
        check!(T5, found == counted(&all), "the messages are not those that were sent, each once");
    }
    check_no_more(&server)?;
    check_no_more(&client)
}

fn t5_a_message_too_long_is_refused_and_harms_nothing(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, back } = bench.pair()?;
    let limit = client.transport.capabilities().message_max_bytes;
    for bytes in [limit + 1, limit + 4096] {
        match client.transport.send(peer, vec![7; bytes]) {
            Err(TransportError::MessageTooLong { bytes: named, .. }) if named == bytes => {}
            other => return Err(broken!(T5, "a message of {bytes} bytes, of at most {limit}: {other:?}")),
        }
    }
    send(&client, peer, b"short".to_vec())?;
    let found = arrivals(&server, back, 1)?;
    check!(T5, found.contains_key(b"short".as_slice()), "after a refusal something else arrives");
    check_no_more(&server)
}

fn t5_messages_pass_beside_reads(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, back } = bench.pair()?;
    let source = bench.offer(&server, pattern(16 << 20, 1))?;
    let place = bench.place(&client, 16 << 20)?;
    let op = client.read(peer, &source.key, place.region, vec![range(0, 0, 16 << 20)])?;
    let sent: Vec<_> = (0..50).map(|seed| pattern(5000, seed)).collect();
    for message in &sent {
        send(&client, peer, message.clone())?;
        send(&server, back, message.clone())?;
    }
    check!(
        T5,
        arrivals(&server, back, 50)? == counted(&sent),
        "messages beside a read are not what was sent"
    );
    check!(
        T5,
        arrivals(&client, peer, 50)? == counted(&sent),
        "messages beside a read are not what was sent"
    );
    client.completion(op)?;
    Ok(())
}

fn t5_messages_before_a_disconnect_arrive_at_most_once(bench: &Bench) -> Outcome {
    for turn in 0..bench.repeats.div_ceil(4) {
        let Pair { server, client, peer, .. } = bench.pair()?;
        let sent: Vec<_> = (0..40).map(|seed| pattern(3000 + turn as usize, seed)).collect();
        for message in &sent {
            send(&client, peer, message.clone())?;
        }
        client.transport.disconnect(peer).map_err(|e| broken!(T6, "a peer cannot be let go of: {e}"))?;
        client.loss(peer)?;
        let counts = counted(&sent);
        let messages = server.drain()?.into_iter().filter_map(|event| match event {
            Event::Message { bytes, .. } => Some(bytes),
            _ => None,
        });
        for (message, count) in counted(&messages.collect::<Vec<_>>()) {
            check!(T5, counts.contains_key(&message), "a message of {} bytes was never sent", message.len());
            check!(T5, count == 1, "a message arrived {count} times");
        }
    }
    Ok(())
}

fn t5_messages_of_several_peers_are_told_apart(bench: &Bench) -> Outcome {
    let center = bench.node()?;
    let mut others = vec![];
    for number in 0..5u8 {
        let other = bench.node()?;
        let (there, here) = other.link(&center)?;
        send(&other, there, vec![number; 100])?;
        send(&center, here, vec![number + 100; 100])?;
        others.push((other, there, here));
    }
    for ((other, there, here), number) in others.iter().zip(0..) {
        let found = arrivals(&center, *here, 1)?;
        check!(T5, found.contains_key(&vec![number; 100]), "a message of another peer than it seems");
        let found = arrivals(other, *there, 1)?;
        check!(T5, found.contains_key(&vec![number + 100; 100]), "a message for another peer");
    }
    Ok(())
}

fn t5_messages_to_another_process_come_back(bench: &Bench) -> Outcome {
    let away = bench.away()?;
    let sent: Vec<_> = (0..100).map(|seed| pattern(seed as usize * 97, seed)).collect();
    for message in &sent {
        send(&away.node, away.peer, message.clone())?;
    }
    let found = arrivals(&away.node, away.peer, sent.len())?;
    check!(T5, found == counted(&sent), "what came back is not what was sent");
    check_no_more(&away.node)
}
