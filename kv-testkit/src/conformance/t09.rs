//! T-9: a key of a region or a peer that is gone fails cleanly, never with wrong bytes.

use kv_transport::{PeerId, ReadError, RegionKey};

use super::bench::{Bench, Node, OLD, contents, fill, is_filled, pattern, range};
use super::case::{End, Outcome, broken, cases, check};

cases!(T9:
    t9_key_of_a_deregistered_region,
    t9_key_of_a_former_registration_of_the_same_memory,
    t9_key_of_another_endpoints_region,
    t9_key_of_a_former_life,
    t9_address_of_a_former_life,
    t9_a_void_key_among_good_ones,
    t9_a_region_that_goes_during_reads_brings_no_wrong_bytes,
);

/// A read with a key that is void: it fails cleanly, and nothing is written.
fn check_void(bench: &Bench, client: &Node, peer: PeerId, key: &RegionKey, what: &str) -> Outcome {
    let place = bench.place(client, 4096)?;
    let op = client.op();
    // A transport that sees it at once may refuse the call.
    if client.transport.read(client.request(op, peer, key, place.region, vec![range(0, 0, 4096)])).is_ok() {
        let outcome = client.completion(op)?;
        check!(T9, outcome.result.is_err(), "a read with {what} succeeded");
        let named = outcome.result == Err(ReadError::UnknownKey);
        check!(T9, named, "a read with {what} ended with {:?}", outcome.result);
        check!(T9, outcome.arrived.count() == 0, "with {what}, {:?} arrived", outcome.arrived);
    }
    check!(T9, is_filled(&place.memory, OLD), "a read with {what} wrote");
    Ok(())
}

fn t9_key_of_a_deregistered_region(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    for seed in 0..20 {
        let source = bench.offer(&pair.server, pattern(4096, seed))?;
        let works = pair.client.works(bench, pair.peer, &source)?;
        check!(T9, works, "the key of a region that is there does not work");
        let gone = pair.server.transport.deregister(source.region);
        check!(T4, gone.is_ok(), "a region that nobody uses is not free: {gone:?}");
        check_void(bench, &pair.client, pair.peer, &source.key, "the key of a deregistered region")?;
    }
    Ok(())
}

fn t9_key_of_a_former_registration_of_the_same_memory(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(4096, 1))?;
    let gone = pair.server.transport.deregister(source.region);
    check!(T4, gone.is_ok(), "a region that nobody uses is not free: {gone:?}");
    let region = pair.server.register(source.memory.clone())?;
    let key =
        pair.server.transport.key(region).map_err(|error| broken!(T9, "a region has no key: {error}"))?;
    check!(T9, key != source.key, "the key of a region is that of a former one");
    check_void(bench, &pair.client, pair.peer, &source.key, "the key of a former registration")?;
    let place = bench.place(&pair.client, 4096)?;
    let outcome = pair.client.fetch(pair.peer, &key, place.region, vec![range(0, 0, 4096)])?;
    check!(T9, outcome.result == Ok(()), "with the new key: {:?}", outcome.result);
    Ok(())
}

fn t9_key_of_another_endpoints_region(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let other = bench.node()?;
    for seed in 0..4 {
        // Made in the same order, so that numbers alone do not tell them apart.
        bench.offer(&pair.server, pattern(4096, seed))?;
        let foreign = bench.offer(&other, pattern(4096, seed + 50))?;
        check_void(bench, &pair.client, pair.peer, &foreign.key, "the key of another endpoint's region")?;
    }
    Ok(())
}

fn t9_key_of_a_former_life(bench: &Bench) -> Outcome {
    let former = bench.node()?;
    let keys: Vec<RegionKey> =
        (0..4).map(|seed| Ok(bench.offer(&former, pattern(4096, seed))?.key)).collect::<Result<_, End>>()?;
    former.drain()?;
    drop(former);
    let pair = bench.pair()?;
    for (key, seed) in keys.iter().zip(10..) {
        let source = bench.offer(&pair.server, pattern(4096, seed))?;
        check!(T9, source.key != *key, "a key of a former life was given out again");
        check_void(bench, &pair.client, pair.peer, key, "the key of a former life")?;
    }
    Ok(())
}

fn t9_address_of_a_former_life(bench: &Bench) -> Outcome {
    let former = bench.node()?;
    let address = former.transport.address();
    former.drain()?;
    drop(former);
    let (reborn, client) = (bench.node()?, bench.node()?);
    check!(T9, reborn.transport.address() != address, "an address of a former life was given out again");
    if let Ok(peer) = client.transport.connect(&address, client.patience) {
        client.loss(peer)?;
    }
    client.link(&reborn)?;
    Ok(())
}

fn t9_a_void_key_among_good_ones(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let (good, void) =
        (bench.offer(&pair.server, pattern(4096, 1))?, bench.offer(&pair.server, pattern(4096, 2))?);
    let gone = pair.server.transport.deregister(void.region);
    check!(T4, gone.is_ok(), "a region that nobody uses is not free: {gone:?}");
    let place = bench.place(&pair.client, 8192)?;
    let mut request =
        pair.client.request(pair.client.op(), pair.peer, &good.key, place.region, vec![range(0, 0, 4096)]);
    request.parts.push(kv_transport::ReadPart {
        key: void.key.clone(),
        region: place.region,
        ranges: vec![range(0, 4096, 4096)],
    });
    let op = request.op;
    if pair.client.transport.read(request).is_ok() {
        let outcome = pair.client.completion(op)?;
        check!(T9, outcome.result == Err(ReadError::UnknownKey), "a void part: {:?}", outcome.result);
        check!(T9, !outcome.arrived.contains(1), "a range with a void key arrived");
        let found = contents(&place.memory);
        let honest = !outcome.arrived.contains(0) || found[..4096] == good.bytes;
        check!(T2, honest, "a range is said to have arrived, and has not");
        check!(T9, found[4096..].iter().all(|byte| *byte == OLD), "a range with a void key was written");
    }
    check!(T9, pair.client.works(bench, pair.peer, &good)?, "after a void key, good ones fail");
    Ok(())
}

fn t9_a_region_that_goes_during_reads_brings_no_wrong_bytes(bench: &Bench) -> Outcome {
    let len = 4 << 20;
    for turn in 0..bench.repeats {
        let pair = bench.pair()?;
        if pair.client.transport.capabilities().one_sided {
            // What runs without the owner cannot be held off by him; the leases above are there for that.
            return Err(End::Cannot(
                "reads are one-sided: one that runs is not ended by its region's end".into(),
            ));
        }
        let source = bench.offer(&pair.server, pattern(len, u64::from(turn)))?;
        let place = bench.place(&pair.client, len)?;
        let op = pair.client.read(pair.peer, &source.key, place.region, vec![range(0, 0, len as u64)])?;
        let start = std::time::Instant::now();
        while start.elapsed().as_micros() < u128::from(turn * 37 % 1500) {
            std::hint::spin_loop();
        }
        let gone = pair.server.transport.deregister(source.region);
        check!(T9, gone.is_ok(), "peers' reads keep a region from being given up: {gone:?}");
        // The owner's next use of it.
        fill(&source.memory, 0x77)?;
        let outcome = pair.client.completion(op)?;
        let found = contents(&place.memory);
        if outcome.result.is_ok() {
            check!(T9, found == source.bytes, "a read of a region that went succeeded with wrong bytes");
        }
    }
    Ok(())
}
