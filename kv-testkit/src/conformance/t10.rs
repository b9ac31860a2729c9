//! T-10: addresses and keys are opaque and bounded, and those of others are distrusted.

use std::time::Duration;

use kv_transport::{Address, Event, OPAQUE_MAX_BYTES, PeerId, ReadError, RegionKey, TransportError};

use super::bench::{Bench, Node, OLD, Pair, Source, contents, is_filled, pattern, range};
use super::case::{End, Outcome, broken, cases, check};
use crate::sim::Dice;

cases!(T10:
    t10_own_addresses_and_keys_are_bounded,
    t10_garbage_addresses_are_refused,
    t10_truncated_and_padded_addresses_are_refused,
    t10_damaged_addresses_harm_nobody,
    t10_garbage_keys_are_refused,
    t10_truncated_and_padded_keys_are_refused,
    t10_damaged_keys_bring_no_wrong_bytes,
    t10_ranges_beyond_the_peers_region_are_refused,
    t10_ranges_beyond_our_region_are_refused,
    t10_overlapping_destinations_are_refused,
);

/// Bytes that nobody gave out, of all lengths.
fn garbage() -> Vec<Vec<u8>> {
    let mut dice = Dice::new(10);
    let mut all = vec![vec![0], vec![0xff], vec![0; OPAQUE_MAX_BYTES], vec![0xff; OPAQUE_MAX_BYTES]];
    all.extend((0..60).map(|seed| pattern(dice.between(1, 200) as usize, seed)));
    all
}

fn address(bytes: Vec<u8>) -> Result<Address, End> {
    Address::from_bytes(bytes).map_err(|error| broken!(T10, "{error}"))
}

fn key(bytes: Vec<u8>) -> Result<RegionKey, End> {
    RegionKey::from_bytes(bytes).map_err(|error| broken!(T10, "{error}"))
}

fn t10_own_addresses_and_keys_are_bounded(bench: &Bench) -> Outcome {
    let (one, two) = (bench.node()?, bench.node()?);
    let lengths = [one.transport.address(), two.transport.address()].map(|address| address.as_bytes().len());
    check!(
        T10,
        lengths.iter().all(|len| (1..=OPAQUE_MAX_BYTES).contains(len)),
        "addresses of {lengths:?} bytes"
    );
    check!(T10, one.transport.address() != two.transport.address(), "two endpoints have the same address");
    check!(T10, one.transport.address() == one.transport.address(), "an address changes");
    let keys = [bench.offer(&one, vec![1])?.key, bench.offer(&one, vec![1; 100_000])?.key];
    check!(T10, keys.iter().all(|key| (1..=OPAQUE_MAX_BYTES).contains(&key.as_bytes().len())), "long keys");
    check!(T10, keys[0] != keys[1], "two regions have the same key");
    for len in [0, OPAQUE_MAX_BYTES + 1] {
        let refused =
            Address::from_bytes(vec![1; len]).is_err() && RegionKey::from_bytes(vec![1; len]).is_err();
        check!(T10, refused, "{len} bytes are taken as an address or a key");
    }
    Ok(())
}

/// Tries to connect, which must be refused by name or come to nothing in its time.
fn check_unconnectable(node: &Node, bytes: Vec<u8>, what: &str) -> Outcome {
    let limit = Duration::from_secs(2);
    match node.transport.connect(&address(bytes)?, limit) {
        Err(TransportError::BadAddress { .. }) => Ok(()),
        Err(error) => Err(broken!(T10, "{what} is refused as: {error}")),
        Ok(peer) => match outcome_of_connect(node, peer, limit + Duration::from_secs(3)) {
            Some(false) => Ok(()),
            Some(true) => Err(broken!(T10, "{what} connected")),
            None => Err(broken!(T10, "{what} is taken, and nothing is told of it")),
        },
    }
}

fn outcome_of_connect(node: &Node, peer: PeerId, limit: Duration) -> Option<bool> {
    node.wait(limit, |event| match event {
        Event::Connected { peer: of } if *of == peer => Some(true),
        Event::PeerLost { peer: of, .. } if *of == peer => Some(false),
        _ => None,
    })
}

fn t10_garbage_addresses_are_refused(bench: &Bench) -> Outcome {
    let node = bench.node()?;
    garbage().into_iter().try_for_each(|bytes| check_unconnectable(&node, bytes, "garbage"))?;
    node.link(&bench.node()?)?;
    Ok(())
}

fn t10_truncated_and_padded_addresses_are_refused(bench: &Bench) -> Outcome {
    let (node, other) = (bench.node()?, bench.node()?);
    let good = other.transport.address().as_bytes().to_vec();
    for cut in 1..good.len() {
        check_unconnectable(&node, good[..cut].to_vec(), "a truncated address")?;
    }
    let padded = [good, vec![0; 9]].concat();
    if padded.len() <= OPAQUE_MAX_BYTES {
        check_unconnectable(&node, padded, "a padded address")?;
    }
    node.link(&other)?;
    Ok(())
}

fn t10_damaged_addresses_harm_nobody(bench: &Bench) -> Outcome {
    let (node, other) = (bench.node()?, bench.node()?);
    let good = other.transport.address();
    let mut open = vec![];
    for at in bench.harness.harmless_bytes(&good) {
        let mut bytes = good.as_bytes().to_vec();
        bytes[at] ^= 1 << (at % 8);
        if let Ok(peer) = node.transport.connect(&address(bytes)?, Duration::from_secs(2)) {
            open.push(peer);
        }
    }
    for peer in open {
        // To a damaged address, somebody else may answer; that is T-9's matter.
        let told = outcome_of_connect(&node, peer, Duration::from_secs(5));
        check!(T10, told.is_some(), "nothing is told of a connect to a damaged address");
    }
    node.link(&other)?;
    Ok(())
}

/// Reads with a key that is not what the peer gave out: no panic, a named error, the old bytes.
fn check_unreadable(bench: &Bench, pair: &Pair, source: &Source, bytes: Vec<u8>, what: &str) -> Outcome {
    let (place, op) = (bench.place(&pair.client, 256)?, pair.client.op());
    let request = pair.client.request(op, pair.peer, &key(bytes)?, place.region, vec![range(0, 0, 256)]);
    match pair.client.transport.read(request) {
        Err(TransportError::BadKey { .. }) => {}
        Err(error) => return Err(broken!(T10, "{what} is refused as: {error}")),
        Ok(()) => {
            let outcome = pair.client.completion(op)?;
            match outcome.result {
                // Bits without a meaning may be damaged.
                Ok(()) => {
                    check!(T9, contents(&place.memory) == source.bytes[..256], "{what} brings wrong bytes");
                    return Ok(());
                }
                Err(ReadError::UnknownKey | ReadError::RemoteRange | ReadError::Fabric { .. }) => {}
                Err(error) => return Err(broken!(T10, "{what} ends a read with: {error}")),
            }
        }
    }
    check!(T10, is_filled(&place.memory, OLD), "{what} writes");
    Ok(())
}

fn unreadable(bench: &Bench, what: &str, damage: impl Fn(&[u8]) -> Vec<Vec<u8>>) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(4096, 1))?;
    for bytes in damage(source.key.as_bytes()) {
        if bytes.len() <= OPAQUE_MAX_BYTES {
            check_unreadable(bench, &pair, &source, bytes, what)?;
        }
    }
    check!(T10, pair.client.works(bench, pair.peer, &source)?, "after {what}, good keys fail");
    Ok(())
}

fn t10_garbage_keys_are_refused(bench: &Bench) -> Outcome {
    unreadable(bench, "garbage", |_| garbage())
}

fn t10_truncated_and_padded_keys_are_refused(bench: &Bench) -> Outcome {
    unreadable(bench, "a cut or padded key", |good| {
        let padded = [good, &[0; 7]].concat();
        (1..good.len()).map(|cut| good[..cut].to_vec()).chain([padded]).collect()
    })
}

fn t10_damaged_keys_bring_no_wrong_bytes(bench: &Bench) -> Outcome {
    unreadable(bench, "a damaged key", |good| {
        (0..good.len() * 8)
            .map(|bit| {
                let mut bytes = good.to_vec();
                bytes[bit / 8] ^= 1 << (bit % 8);
                bytes
            })
            .collect()
    })
}

fn t10_ranges_beyond_the_peers_region_are_refused(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(4096, 1))?;
    let place = bench.place(&pair.client, 1 << 20)?;
    let beyond =
        [(4096, 1), (4095, 2), (0, 4097), (0, 1 << 20), (1 << 40, 8), (u64::MAX, 1), (u64::MAX - 5, 50)];
    for (offset, len) in beyond {
        let op = pair.client.op();
        let request =
            pair.client.request(op, pair.peer, &source.key, place.region, vec![range(offset, 0, len)]);
        // A transport that knows the region's length may refuse the call.
        if pair.client.transport.read(request).is_ok() {
            let outcome = pair.client.completion(op)?;
            let named = outcome.result == Err(ReadError::RemoteRange);
            check!(T10, named, "remote bytes {offset}+{len} of 4096: {:?}", outcome.result);
            check!(T10, outcome.arrived.count() == 0, "of remote bytes {offset}+{len}, some arrived");
        }
        check!(T10, is_filled(&place.memory, OLD), "remote bytes {offset}+{len} of 4096 were written");
    }
    check!(T10, pair.client.works(bench, pair.peer, &source)?, "after a bad range, good ones fail");
    Ok(())
}

fn t10_ranges_beyond_our_region_are_refused(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(8192, 1))?;
    let place = bench.place(&pair.client, 4096)?;
    for (offset, len) in
        [(4096, 1), (4095, 2), (0, 4097), (u64::MAX, 1), (u64::MAX - 5, 50), (1, u64::MAX), (9, 0)]
    {
        let ranges = vec![range(0, 0, 4), range(0, offset, len)];
        let op = pair.client.op();
        let refused =
            pair.client.transport.read(pair.client.request(op, pair.peer, &source.key, place.region, ranges));
        let named = matches!(refused, Err(TransportError::LocalRange { index: 1, .. }));
        check!(T10, named, "local bytes {offset}+{len} of 4096: {refused:?}");
    }
    check!(T10, is_filled(&place.memory, OLD), "a refused read wrote");
    Ok(())
}

fn t10_overlapping_destinations_are_refused(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(4096, 1))?;
    let place = bench.place(&pair.client, 4096)?;
    let overlapping = [
        [range(0, 0, 10), range(100, 9, 10)],
        [range(0, 50, 10), range(100, 0, 51)],
        [range(0, 7, 1), range(9, 7, 1)],
    ];
    for ranges in overlapping {
        let request =
            pair.client.request(pair.client.op(), pair.peer, &source.key, place.region, ranges.to_vec());
        let refused = pair.client.transport.read(request);
        let named = matches!(refused, Err(TransportError::Overlap { .. }));
        check!(T10, named, "overlapping destinations: {refused:?}");
    }
    // Neighbours are no overlap.
    let touching = vec![range(0, 10, 10), range(500, 20, 10), range(40, 0, 10)];
    let outcome = pair.client.fetch(pair.peer, &source.key, place.region, touching)?;
    check!(T10, outcome.result == Ok(()), "neighbouring destinations: {:?}", outcome.result);
    Ok(())
}
