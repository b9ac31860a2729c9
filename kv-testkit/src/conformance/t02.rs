//! T-2: a successful read put exactly the source's bytes into exactly the destination ranges.

use kv_transport::{RangeSet, ReadOutcome, ReadPart, ReadRange, ReadRequest};

use super::bench::{Bench, OLD, Pair, Place, Source, contents, pattern, range};
use super::case::{End, Outcome, broken, cases, check};
use super::harness::remote_contents;
use crate::sim::Dice;

cases!(T2:
    t2_single_bytes_at_odd_places,
    t2_scattered_ranges_over_parts_and_regions,
    t2_ten_thousand_ranges,
    t2_a_whole_large_region,
    t2_a_range_of_every_small_length,
    t2_what_is_said_to_have_arrived_has,
    t2_many_reads_at_once,
    t2_both_ways_at_once,
    t2_several_peers_at_once,
    t2_bytes_written_before_the_read_are_read,
    t2_a_peer_in_another_process,
);

fn check_success(outcome: &ReadOutcome, ranges: usize) -> Outcome {
    check!(T2, outcome.result == Ok(()), "a good read ended with {:?}", outcome.result);
    let arrived = &outcome.arrived;
    check!(T2, *arrived == RangeSet::all(ranges), "a success says {arrived:?} of {ranges}");
    Ok(())
}

/// What a place should hold: old bytes, and in the ranges those of the source.
fn expected(len: usize, source: &[u8], ranges: &[ReadRange]) -> Vec<u8> {
    let mut bytes = vec![OLD; len];
    for ReadRange { remote_offset, local_offset, len } in ranges {
        let (from, to, len) = (*remote_offset as usize, *local_offset as usize, *len as usize);
        bytes[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    bytes
}

fn check_bytes(place: &Place, expected: &[u8]) -> Outcome {
    let found = contents(&place.memory);
    let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
    check!(T2, first.is_none(), "byte {first:?} of {} is not what it should be", found.len());
    Ok(())
}

fn fetch_and_check(
    bench: &Bench,
    pair: &Pair,
    source: &Source,
    len: usize,
    ranges: Vec<ReadRange>,
) -> Outcome {
    let place = bench.place(&pair.client, len)?;
    let expected = expected(len, &source.bytes, &ranges);
    let count = ranges.len();
    let outcome = pair.client.fetch(pair.peer, &source.key, place.region, ranges)?;
    check_success(&outcome, count)?;
    check_bytes(&place, &expected)
}

fn t2_single_bytes_at_odd_places(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(10_007, 1))?;
    let last = 10_006;
    for (from, to) in [(0, 0), (1, 7), (last, 0), (0, last), (4095, 4096), (4096, 4095), (last, last)] {
        fetch_and_check(bench, &pair, &source, 10_007, vec![range(from, to, 1)])?;
    }
    let ranges = (0..500).map(|i| range(i * 19 % 10_007, 2 * i + 1, 1)).collect();
    fetch_and_check(bench, &pair, &source, 1001, ranges)
}

/// Ranges with gaps between them, some of them neighbours on both sides, in a scrambled order.
fn scattered(source: u64, place: u64, count: usize, seed: u64) -> Vec<ReadRange> {
    let mut dice = Dice::new(seed);
    let (mut local, mut remote, mut ranges) = (0, 0, vec![]);
    while ranges.len() < count {
        let len = dice.between(1, 1300);
        if dice.below(3) > 0 {
            local += dice.between(1, 7);
            remote = dice.below(source - 1300);
        }
        if local + len > place || remote + len > source {
            break;
        }
        ranges.push(range(remote, local, len));
        (local, remote) = (local + len, remote + len);
    }
    for at in (1..ranges.len()).rev() {
        ranges.swap(at, dice.below(at as u64 + 1) as usize);
    }
    ranges
}

fn t2_scattered_ranges_over_parts_and_regions(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let sources =
        [bench.offer(&pair.server, pattern(300_001, 1))?, bench.offer(&pair.server, pattern(70_003, 2))?];
    let places = [bench.place(&pair.client, 200_009)?, bench.place(&pair.client, 150_001)?];
    // Two parts into each place, so that one place has bytes of both sources: an upper and a lower half.
    let (mut parts, mut wanted) = (vec![], vec![]);
    for (index, place) in places.iter().enumerate() {
        let half = place.memory.len() as u64 / 2;
        let mut bytes = vec![OLD; place.memory.len()];
        for (upper, source) in [(0, &sources[index]), (half, &sources[1 - index])] {
            let mut ranges = scattered(source.bytes.len() as u64, half, 120, index as u64 * 2 + upper);
            ranges.iter_mut().for_each(|range| range.local_offset += upper);
            let made = expected(bytes.len(), &source.bytes, &ranges);
            for range in &ranges {
                let at = range.local_offset as usize..(range.local_offset + range.len) as usize;
                bytes[at.clone()].copy_from_slice(&made[at]);
            }
            parts.push(ReadPart { key: source.key.clone(), region: place.region, ranges });
        }
        wanted.push(bytes);
    }
    let count = parts.iter().map(|part| part.ranges.len()).sum();
    check!(T2, count > 300, "the case made only {count} ranges");
    let op = pair.client.op();
    pair.client.submit(ReadRequest { op, peer: pair.peer, parts, limits: pair.client.patient() })?;
    check_success(&pair.client.completion(op)?, count)?;
    places.iter().zip(&wanted).try_for_each(|(place, wanted)| check_bytes(place, wanted))
}

fn t2_ten_thousand_ranges(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(1 << 20, 4))?;
    // Every second word, back to front: nothing can be merged.
    let ranges = (0..10_000).map(|i| range((9_999 - i) * 80, i * 100 + 3, 64)).collect();
    fetch_and_check(bench, &pair, &source, 1_000_100, ranges)
}

fn t2_a_whole_large_region(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let len = (24 << 20) + 4097;
    let source = bench.offer(&pair.server, pattern(len, 5))?;
    fetch_and_check(bench, &pair, &source, len, vec![range(0, 0, len as u64)])
}

fn t2_a_range_of_every_small_length(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(100_000, 6))?;
    let ranges = (1..=300).scan(1, |at, len| {
        let here = *at;
        *at += len + 1;
        Some(range(here % 1000 + 13, here, len))
    });
    fetch_and_check(bench, &pair, &source, 50_000, ranges.collect())
}

fn t2_what_is_said_to_have_arrived_has(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(1 << 20, 7))?;
    let place = bench.place(&pair.client, 2 << 20)?;
    // The second half of the ranges lies beyond the peer's region, so the read fails after a good beginning.
    let ranges: Vec<_> = (0..32).map(|i| range(i << 16, i << 16, 1 << 16)).collect();
    let outcome = pair.client.fetch(pair.peer, &source.key, place.region, ranges)?;
    check!(T2, outcome.result.is_err(), "a read beyond the peer's region succeeded");
    check!(T2, outcome.arrived.size() == 32, "arrived is of {} ranges, not 32", outcome.arrived.size());
    let found = contents(&place.memory);
    for index in (0..32).filter(|index| outcome.arrived.contains(*index)) {
        let at = index << 16..(index + 1) << 16;
        check!(T2, index < 16, "range {index} cannot have arrived");
        check!(
            T2,
            found[at.clone()] == source.bytes[at],
            "range {index} is said to have arrived, and has not"
        );
    }
    let beyond = found[1 << 20..].iter().all(|byte| *byte == OLD);
    check!(T2, beyond, "bytes came from beyond the peer's region");
    Ok(())
}

fn t2_many_reads_at_once(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(4 << 20, 8))?;
    let mut reads = vec![];
    for turn in 0..64u64 {
        let place = bench.place(&pair.client, 64 << 10)?;
        let ranges: Vec<_> = (0..16).map(|i| range((turn * 16 + 15 - i) << 12, i << 12, 4096)).collect();
        let wanted = expected(64 << 10, &source.bytes, &ranges);
        reads.push((pair.client.read(pair.peer, &source.key, place.region, ranges)?, place, wanted));
    }
    // Last first: completions need not come in order, and are not taken in order.
    reads.reverse();
    for (op, place, wanted) in reads {
        check_success(&pair.client.completion(op)?, 16)?;
        check_bytes(&place, &wanted)?;
    }
    Ok(())
}

fn t2_both_ways_at_once(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, back } = bench.pair()?;
    let len = 4 << 20;
    let (here, there) = (bench.offer(&client, pattern(len, 1))?, bench.offer(&server, pattern(len, 2))?);
    let (place, other) = (bench.place(&client, len)?, bench.place(&server, len)?);
    let whole = vec![range(0, 0, len as u64)];
    let one = client.read(peer, &there.key, place.region, whole.clone())?;
    let two = server.read(back, &here.key, other.region, whole)?;
    check_success(&client.completion(one)?, 1)?;
    check_success(&server.completion(two)?, 1)?;
    check_bytes(&place, &there.bytes)?;
    check_bytes(&other, &here.bytes)
}

fn t2_several_peers_at_once(bench: &Bench) -> Outcome {
    let client = bench.node()?;
    let mut reads = vec![];
    for seed in 0..4 {
        let server = bench.node()?;
        let (peer, _) = client.link(&server)?;
        let source = bench.offer(&server, pattern(1 << 20, seed))?;
        let place = bench.place(&client, 1 << 20)?;
        let op = client.read(peer, &source.key, place.region, vec![range(0, 0, 1 << 20)])?;
        reads.push((op, server, source, place));
    }
    for (op, _server, source, place) in &reads {
        check_success(&client.completion(*op)?, 1)?;
        check_bytes(place, &source.bytes)?;
    }
    Ok(())
}

fn t2_bytes_written_before_the_read_are_read(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(8192, 0))?;
    let place = bench.place(&pair.client, 8192)?;
    for seed in 1..=50 {
        let bytes = pattern(8192, seed);
        source.memory.write(0, &bytes).map_err(|error| broken!(T1, "memory cannot be written: {error}"))?;
        let outcome = pair.client.fetch(pair.peer, &source.key, place.region, vec![range(0, 0, 8192)])?;
        check_success(&outcome, 1)?;
        check_bytes(&place, &bytes)?;
    }
    Ok(())
}

fn t2_a_peer_in_another_process(bench: &Bench) -> Outcome {
    let away = bench.away()?;
    let (place, op) = away.read_all(bench)?;
    check_success(&away.node.completion(op)?, 16)?;
    check_bytes(&place, &remote_contents())?;
    let place = bench.place(&away.node, 200_000)?;
    let ranges = scattered(super::REMOTE_BYTES as u64, 200_000, 200, 9);
    let wanted = expected(200_000, &remote_contents(), &ranges);
    let count = ranges.len();
    let outcome: Result<ReadOutcome, End> = away.node.fetch(away.peer, &away.key, place.region, ranges);
    check_success(&outcome?, count)?;
    check_bytes(&place, &wanted)
}
