//! T-1: an accepted operation completes exactly once; a refused one changes nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_transport::{Event, OpId, PeerId, ReadPart, ReadRequest, RegionId, TransportError};

use super::bench::{Bench, Node, Place, Source, fill, is_filled, pattern, range};
use super::case::{End, Outcome, broken, cases, check};

cases!(T1:
    t1_every_read_completes_exactly_once,
    t1_reads_in_flight_at_shutdown_complete_exactly_once,
    t1_reads_from_many_threads_complete_exactly_once,
    t1_an_id_in_flight_is_refused,
    t1_an_id_of_a_held_read_is_refused,
    t1_an_id_is_free_after_its_completion,
    t1_a_refused_read_changes_nothing,
    t1_refused_calls_tell_nothing,
);

/// How often each read completed, of all events that a node has.
fn completions(node: &Node) -> Result<BTreeMap<OpId, u32>, End> {
    let mut counts = BTreeMap::new();
    for event in node.drain()? {
        if let Event::ReadCompleted { op, .. } = event {
            *counts.entry(op).or_default() += 1;
        }
    }
    Ok(counts)
}

fn check_once(counts: &BTreeMap<OpId, u32>, ops: &[OpId]) -> Outcome {
    for op in ops {
        let count = counts.get(op).copied().unwrap_or(0);
        check!(T1, count == 1, "{op} completed {count} times");
    }
    check!(T1, counts.len() == ops.len(), "{} ids completed, {} were used", counts.len(), ops.len());
    Ok(())
}

fn t1_every_read_completes_exactly_once(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let (source, void) =
        (bench.offer(&pair.server, pattern(1 << 20, 1))?, bench.offer(&pair.server, pattern(4096, 2))?);
    pair.server
        .transport
        .deregister(void.region)
        .map_err(|e| broken!(T4, "an unused region is kept: {e}"))?;
    let place = bench.place(&pair.client, 1 << 20)?;
    let mut ops = vec![];
    for turn in 0..240u64 {
        // Good ones, void keys and ranges beyond the region, many in flight at once.
        let (key, from) = match turn % 6 {
            4 => (&void.key, 0),
            5 => (&source.key, 1 << 20),
            _ => (&source.key, turn * 4096),
        };
        ops.push(pair.client.read(pair.peer, key, place.region, vec![range(from, turn * 4096, 4096)])?);
    }
    let mut seen = vec![];
    for _ in &ops {
        let op = pair.client.wait(pair.client.patience, |event| match event {
            Event::ReadCompleted { op, .. } => Some(*op),
            _ => None,
        });
        seen.push(op.ok_or_else(|| broken!(T1, "{} of {} reads completed", seen.len(), ops.len()))?);
    }
    let mut counts = completions(&pair.client)?;
    for op in seen {
        *counts.entry(op).or_default() += 1;
    }
    check_once(&counts, &ops)
}

fn t1_reads_in_flight_at_shutdown_complete_exactly_once(bench: &Bench) -> Outcome {
    for _ in 0..bench.repeats.div_ceil(10) {
        let pair = bench.pair()?;
        let source = bench.offer(&pair.server, pattern(1 << 20, 1))?;
        let mut ops = vec![];
        for _ in 0..16 {
            let place = bench.place(&pair.client, 1 << 20)?;
            ops.push(pair.client.read(pair.peer, &source.key, place.region, vec![range(0, 0, 1 << 20)])?);
        }
        check_once(&completions(&pair.client)?, &ops)?;
    }
    Ok(())
}

fn t1_reads_from_many_threads_complete_exactly_once(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(1 << 18, 3))?;
    let place = bench.place(&pair.client, 1 << 18)?;
    let requests: Vec<ReadRequest> = (0..64u64)
        .map(|turn| {
            let ranges = vec![range(turn * 4096, turn * 4096, 4096)];
            pair.client.request(pair.client.op(), pair.peer, &source.key, place.region, ranges)
        })
        .collect();
    let ops: Vec<OpId> = requests.iter().map(|request| request.op).collect();
    let transport = &pair.client.transport;
    let refused: Vec<TransportError> = std::thread::scope(|scope| {
        let threads: Vec<_> = requests
            .chunks(8)
            .map(|chunk| {
                scope.spawn(|| {
                    chunk.iter().filter_map(|request| transport.read(request.clone()).err()).collect()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_else(|_| vec![])).collect()
    });
    check!(T1, refused.is_empty(), "good reads are refused: {refused:?}");
    for op in &ops {
        // Taken here and counted below: a second one would be seen there.
        let outcome = pair.client.completion(*op)?;
        check!(T1, outcome.result == Ok(()), "of many threads, one's read ended with {:?}", outcome.result);
    }
    check!(
        T2,
        super::bench::contents(&place.memory) == source.bytes,
        "many threads' reads brought wrong bytes"
    );
    let extra = completions(&pair.client)?;
    check!(T1, extra.is_empty(), "completions beyond the reads: {extra:?}");
    Ok(())
}

/// Submits a read whose id an earlier one has. Whether it was refused; if not, the earlier one was over before, and now
/// there are two completions.
fn submit_again(node: &Node, again: ReadRequest) -> Result<bool, End> {
    let op = again.op;
    match node.transport.read(again) {
        Err(TransportError::DuplicateOp { op: named }) if named == op => Ok(true),
        Err(error) => Err(broken!(T1, "an id in flight is refused as: {error}")),
        Ok(()) => {
            // A read is in flight until its completion can be taken, so that is not waited for.
            let over = node.completed_within(op, Duration::ZERO);
            check!(T1, over.is_some(), "an id in flight was taken a second time");
            Ok(false)
        }
    }
}

fn t1_an_id_in_flight_is_refused(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(8 << 20, 1))?;
    let (first, second) = (bench.place(&pair.client, 8 << 20)?, bench.place(&pair.client, 4096)?);
    let mut refusals = 0;
    for turn in 1..=bench.repeats.min(40) {
        fill(&second.memory, turn as u8)?;
        let op = pair.client.read(pair.peer, &source.key, first.region, vec![range(0, 0, 8 << 20)])?;
        let again = pair.client.request(op, pair.peer, &source.key, second.region, vec![range(0, 0, 4096)]);
        let refused = submit_again(&pair.client, again)?;
        pair.client.completion(op)?;
        if refused {
            refusals += 1;
            check!(T1, is_filled(&second.memory, turn as u8), "a refused read wrote");
        }
    }
    let extra = completions(&pair.client)?;
    check!(T1, extra.is_empty(), "completions that nobody waits for: {extra:?}, after {refusals} refusals");
    if refusals == 0 {
        return Err(End::Cannot("every read was over before its id could be used again".into()));
    }
    Ok(())
}

fn t1_an_id_of_a_held_read_is_refused(bench: &Bench) -> Outcome {
    let mut away = bench.away_two_sided()?;
    let second = bench.place(&away.node, 4096)?;
    away.remote.stop()?;
    let (_place, op) = away.read(bench, away.node.patient())?;
    for _ in 0..3 {
        let again = away.node.request(op, away.peer, &away.key, second.region, vec![range(0, 0, 4096)]);
        if !submit_again(&away.node, again)? {
            // It claims nothing, and did not need the peer this time.
            return Err(End::Cannot("a read of a stopped peer was not held".into()));
        }
    }
    away.remote.resume()?;
    let outcome = away.node.completion(op)?;
    check!(T1, outcome.result == Ok(()), "beside refused reads, the first ended with {:?}", outcome.result);
    let extra = completions(&away.node)?;
    check!(T1, extra.is_empty(), "refused reads completed: {extra:?}");
    check!(T1, is_filled(&second.memory, super::bench::OLD), "a refused read wrote");
    Ok(())
}

fn t1_an_id_is_free_after_its_completion(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(4096, 1))?;
    let place = bench.place(&pair.client, 4096)?;
    let op = OpId(u64::MAX);
    for _ in 0..50 {
        pair.client.submit(pair.client.request(
            op,
            pair.peer,
            &source.key,
            place.region,
            vec![range(0, 0, 64)],
        ))?;
        pair.client.completion(op)?;
    }
    let extra = completions(&pair.client)?;
    check!(T1, extra.is_empty(), "completions beyond the reads: {extra:?}");
    Ok(())
}

/// A good read, and what makes it a bad one.
type Spoil = (&'static str, fn(&mut ReadRequest), fn(&TransportError) -> bool);

const SPOILS: &[Spoil] = &[
    ("an unknown peer", |r| r.peer = PeerId(u64::MAX), |e| matches!(e, TransportError::UnknownPeer { .. })),
    (
        "an unknown region",
        |r| r.parts[0].region = RegionId(u64::MAX),
        |e| matches!(e, TransportError::UnknownRegion { .. }),
    ),
    ("no parts", |r| r.parts.clear(), |e| matches!(e, TransportError::NoRanges { .. })),
    ("no ranges", |r| r.parts[0].ranges.clear(), |e| matches!(e, TransportError::NoRanges { .. })),
    ("no time", |r| r.limits.total = Duration::ZERO, |e| matches!(e, TransportError::ZeroLimit { .. })),
    ("no patience", |r| r.limits.stall = Duration::ZERO, |e| matches!(e, TransportError::ZeroLimit { .. })),
    (
        "an empty range",
        |r| r.parts[0].ranges.push(range(0, 100, 0)),
        |e| matches!(e, TransportError::LocalRange { index: 1, .. }),
    ),
    (
        "a range across the end",
        |r| r.parts[0].ranges.push(range(0, 4090, 7)),
        |e| matches!(e, TransportError::LocalRange { index: 1, .. }),
    ),
    (
        "the same bytes twice",
        |r| {
            let part: ReadPart = r.parts[0].clone();
            r.parts.push(part);
        },
        |e| matches!(e, TransportError::Overlap { .. }),
    ),
];

fn t1_a_refused_read_changes_nothing(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source: Source = bench.offer(&pair.server, pattern(4096, 1))?;
    let place: Place = bench.place(&pair.client, 4096)?;
    let op = pair.client.op();
    let good = || pair.client.request(op, pair.peer, &source.key, place.region, vec![range(0, 0, 64)]);
    for (name, spoil, named) in SPOILS {
        let mut request = good();
        spoil(&mut request);
        match pair.client.transport.read(request) {
            Ok(()) => return Err(broken!(T1, "a read with {name} is taken")),
            Err(error) => check!(T1, named(&error), "a read with {name} is refused as: {error}"),
        }
        check!(T1, is_filled(&place.memory, super::bench::OLD), "a read with {name} wrote");
    }
    // None left a trace: the id is free, the read works, and nobody uses the region afterwards.
    pair.client.submit(good())?;
    let outcome = pair.client.completion(op)?;
    check!(T1, outcome.result == Ok(()), "after refusals, a good read ends with {:?}", outcome.result);
    let free = pair.client.transport.deregister(place.region);
    check!(T1, free.is_ok(), "refused reads keep a region in use: {free:?}");
    let extra = completions(&pair.client)?;
    check!(T1, extra.is_empty(), "refused reads completed: {extra:?}");
    Ok(())
}

fn t1_refused_calls_tell_nothing(bench: &Bench) -> Outcome {
    let node = bench.node()?;
    let (peer, region) = (PeerId(u64::MAX), RegionId(u64::MAX));
    let transport = &node.transport;
    let sent = transport.send(peer, vec![1]);
    check!(T1, sent == Err(TransportError::UnknownPeer { peer }), "send to nobody: {sent:?}");
    let left = transport.disconnect(peer);
    check!(T1, left == Err(TransportError::UnknownPeer { peer }), "disconnect nobody: {left:?}");
    let gone = transport.deregister(region);
    check!(T1, gone == Err(TransportError::UnknownRegion { region }), "deregister nothing: {gone:?}");
    let key = transport.key(region);
    check!(T1, key == Err(TransportError::UnknownRegion { region }), "key of nothing: {key:?}");
    let told = node.drain()?;
    check!(T1, told.is_empty(), "refused calls told {told:?}");
    Ok(())
}
