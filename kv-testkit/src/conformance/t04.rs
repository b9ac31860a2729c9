//! T-4: a region stays registered, and its memory alive, while an operation uses it.

use std::time::Duration;

use kv_transport::{ReadLimits, TransportError};

use super::bench::{Bench, fill, pattern, range};
use super::case::{Outcome, broken, cases, check};

cases!(T4:
    t4_the_destination_of_a_read_in_flight_is_not_deregistered,
    t4_the_destination_of_a_held_read_is_not_deregistered,
    t4_regions_are_free_after_any_completion,
    t4_a_region_of_no_read_is_free_beside_others,
    t4_memory_that_its_owner_let_go_of_is_still_read,
    t4_memory_that_its_owner_let_go_of_is_still_written,
    t4_a_source_that_goes_during_reads_stays_in_memory,
);

fn t4_the_destination_of_a_read_in_flight_is_not_deregistered(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(32 << 20, 1))?;
    for _ in 0..bench.repeats.div_ceil(8) {
        let place = bench.place(&pair.client, 32 << 20)?;
        let op = pair.client.read(pair.peer, &source.key, place.region, vec![range(0, 0, 32 << 20)])?;
        match pair.client.transport.deregister(place.region) {
            Err(TransportError::RegionInUse { region, reads: 1 }) if region == place.region => {
                pair.client.completion(op)?;
                let free = pair.client.transport.deregister(place.region);
                check!(T4, free.is_ok(), "after the completion the region is not free: {free:?}");
            }
            Err(error) => return Err(broken!(T4, "a region in use is refused as: {error}")),
            // Fair only if the read was over before: then its completion is there already.
            Ok(()) => {
                let over = pair.client.completed_within(op, Duration::from_millis(2));
                check!(T4, over.is_some(), "a region was given up while a read wrote into it");
            }
        }
        let gone = pair.client.transport.deregister(place.region);
        let unknown = Err(TransportError::UnknownRegion { region: place.region });
        check!(T4, gone == unknown, "a region that is gone is deregistered: {gone:?}");
    }
    Ok(())
}

fn t4_the_destination_of_a_held_read_is_not_deregistered(bench: &Bench) -> Outcome {
    let mut away = bench.away_two_sided()?;
    away.remote.stop()?;
    let (place, op) = away.read(bench, away.node.patient())?;
    let other =
        away.node.read(away.peer, &away.key, bench.place(&away.node, 64)?.region, vec![range(0, 0, 64)])?;
    for _ in 0..3 {
        let refused = away.node.transport.deregister(place.region);
        let in_use = Err(TransportError::RegionInUse { region: place.region, reads: 1 });
        check!(T4, refused == in_use, "a region in use: {refused:?}");
    }
    away.node.transport.cancel(op);
    away.node.cancelled(op)?;
    let free = away.node.transport.deregister(place.region);
    check!(T4, free.is_ok(), "after the completion the region is not free: {free:?}");
    away.remote.resume()?;
    away.node.completion(other)?;
    Ok(())
}

fn t4_regions_are_free_after_any_completion(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(1 << 20, 1))?;
    let short = ReadLimits { total: Duration::from_micros(50), ..pair.client.patient() };
    let patient = pair.client.patient();
    for (from, limits, cancel) in
        [(0, patient, false), (1 << 20, patient, false), (0, short, false), (0, patient, true)]
    {
        for _ in 0..bench.repeats.div_ceil(4) {
            let place = bench.place(&pair.client, 1 << 20)?;
            let ranges = vec![range(from, 0, 1 << 20)];
            let op = pair.client.read_within(pair.peer, &source.key, place.region, ranges, limits)?;
            if cancel {
                pair.client.transport.cancel(op);
                pair.client.cancelled(op)?;
            } else {
                pair.client.completion(op)?;
            }
            let free = pair.client.transport.deregister(place.region);
            check!(T4, free.is_ok(), "after the completion the region is not free: {free:?}");
        }
    }
    Ok(())
}

fn t4_a_region_of_no_read_is_free_beside_others(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(16 << 20, 1))?;
    let (busy, idle) = (bench.place(&pair.client, 16 << 20)?, bench.place(&pair.client, 4096)?);
    let op = pair.client.read(pair.peer, &source.key, busy.region, vec![range(0, 0, 16 << 20)])?;
    let free = pair.client.transport.deregister(idle.region);
    check!(T4, free.is_ok(), "a region that no read uses is not free: {free:?}");
    pair.client.completion(op)?;
    Ok(())
}

fn t4_memory_that_its_owner_let_go_of_is_still_read(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let mut source = bench.offer(&pair.server, pattern(1 << 20, 1))?;
    // Whoever gets the memory next overwrites it; it must not be this one.
    source.memory = bench.memory(1 << 20)?;
    for byte in 0..8 {
        fill(&bench.memory(1 << 20)?, byte)?;
    }
    let place = bench.place(&pair.client, 1 << 20)?;
    let outcome = pair.client.fetch(pair.peer, &source.key, place.region, vec![range(0, 0, 1 << 20)])?;
    check!(T4, outcome.result == Ok(()), "memory that only the transport holds: {:?}", outcome.result);
    let read = super::bench::contents(&place.memory);
    check!(T4, read == source.bytes, "memory that only the transport holds was given to others");
    Ok(())
}

fn t4_memory_that_its_owner_let_go_of_is_still_written(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(8 << 20, 1))?;
    for _ in 0..bench.repeats.div_ceil(8) {
        let region = bench.place(&pair.client, 8 << 20)?.region;
        let op = pair.client.read(pair.peer, &source.key, region, vec![range(0, 0, 8 << 20)])?;
        // What is allocated now must not be what is written to.
        let others = bench.memory(8 << 20)?;
        fill(&others, 9)?;
        pair.client.completion(op)?;
        check!(T4, super::bench::is_filled(&others, 9), "a read wrote into memory that others have now");
        let free = pair.client.transport.deregister(region);
        check!(T4, free.is_ok(), "after the completion the region is not free: {free:?}");
    }
    Ok(())
}

fn t4_a_source_that_goes_during_reads_stays_in_memory(bench: &Bench) -> Outcome {
    for _ in 0..bench.repeats.div_ceil(8) {
        let pair = bench.pair()?;
        let source = bench.offer(&pair.server, pattern(8 << 20, 1))?;
        let place = bench.place(&pair.client, 8 << 20)?;
        let op = pair.client.read(pair.peer, &source.key, place.region, vec![range(0, 0, 8 << 20)])?;
        let gone = pair.server.transport.deregister(source.region);
        check!(T4, gone.is_ok(), "peers' reads keep a region from being given up: {gone:?}");
        drop(source.memory);
        // Freed memory that is still sent from ends the process here or brings others' bytes.
        let outcome = pair.client.completion(op)?;
        let read = super::bench::contents(&place.memory);
        let right = outcome.result.is_err() || read == source.bytes;
        check!(T9, right, "a read of a region that went succeeded with bytes of others");
    }
    Ok(())
}
