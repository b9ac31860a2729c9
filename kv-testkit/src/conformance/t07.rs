//! T-7: a cancel is a request; the completion still comes.

use std::time::{Duration, Instant};

use kv_transport::{OpId, ReadError, ReadOutcome};

use super::bench::{Bench, Pair, pattern, range};
use super::case::{Outcome, cases, check};

cases!(T7:
    t7_a_cancelled_read_completes,
    t7_a_cancelled_read_of_a_stopped_peer_completes_soon,
    t7_a_cancel_of_nothing_does_nothing,
    t7_a_cancel_that_comes_too_late_does_nothing,
    t7_a_cancel_touches_no_other_read,
    t7_after_cancels_the_connection_goes_on,
);

/// A cancelled read ends as cancelled, or as if nobody had cancelled it.
fn check_cancelled(outcome: &ReadOutcome) -> Outcome {
    match &outcome.result {
        Ok(()) => check!(T7, outcome.arrived.is_all(), "a success of which {:?} arrived", outcome.arrived),
        Err(ReadError::Cancelled) => {}
        Err(error) => check!(T7, false, "a cancelled read ended with: {error}"),
    }
    Ok(())
}

fn t7_a_cancelled_read_completes(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    let source = bench.offer(&server, pattern(4 << 20, 1))?;
    let place = bench.place(&client, 4 << 20)?;
    for turn in 0..bench.repeats {
        let op = client.read(peer, &source.key, place.region, vec![range(0, 0, 4 << 20)])?;
        // Once, or again and again.
        for _ in 0..=turn % 3 {
            client.transport.cancel(op);
        }
        check_cancelled(&client.cancelled(op)?)?;
    }
    Ok(())
}

fn t7_a_cancelled_read_of_a_stopped_peer_completes_soon(bench: &Bench) -> Outcome {
    let mut away = bench.away_two_sided()?;
    away.remote.stop()?;
    let (_place, op) = away.read(bench, away.node.patient())?;
    let start = Instant::now();
    away.node.transport.cancel(op);
    let outcome = away.node.cancelled(op)?;
    let held = matches!(outcome.result, Err(ReadError::Cancelled));
    check!(T7, held, "a cancelled read of a stopped peer ended with {:?}", outcome.result);
    check!(T7, start.elapsed() < Duration::from_secs(2), "a cancel took {:?}", start.elapsed());
    away.remote.resume()?;
    let (_place, op) = away.read(bench, away.node.patient())?;
    let outcome = away.node.completion(op)?;
    check!(T7, outcome.result == Ok(()), "after a cancel, a read ended with {:?}", outcome.result);
    Ok(())
}

fn t7_a_cancel_of_nothing_does_nothing(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    for op in [0, 1, 2, u64::MAX] {
        client.transport.cancel(OpId(op));
    }
    // An id that was cancelled before it was used is not tainted.
    let source = bench.offer(&server, pattern(4096, 1))?;
    let place = bench.place(&client, 4096)?;
    for _ in 0..2 {
        let outcome = client.fetch(peer, &source.key, place.region, vec![range(0, 0, 4096)])?;
        check!(T7, outcome.result == Ok(()), "a cancel of nothing ended a read with {:?}", outcome.result);
    }
    Ok(())
}

fn t7_a_cancel_that_comes_too_late_does_nothing(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    let source = bench.offer(&server, pattern(1 << 20, 1))?;
    let place = bench.place(&client, 1 << 20)?;
    for _ in 0..bench.repeats {
        let old = client.read(peer, &source.key, place.region, vec![range(0, 0, 4096)])?;
        client.completion(old)?;
        client.transport.cancel(old);
        let outcome = client.fetch(peer, &source.key, place.region, vec![range(0, 0, 1 << 20)])?;
        check!(T7, outcome.result == Ok(()), "a late cancel ended the next read with {:?}", outcome.result);
        client.transport.cancel(old);
    }
    Ok(())
}

fn t7_a_cancel_touches_no_other_read(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    let source = bench.offer(&server, pattern(2 << 20, 1))?;
    for _ in 0..bench.repeats.div_ceil(8) {
        let mut ops = vec![];
        for _ in 0..8 {
            let place = bench.place(&client, 2 << 20)?;
            ops.push(client.read(peer, &source.key, place.region, vec![range(0, 0, 2 << 20)])?);
        }
        for op in ops.iter().step_by(2) {
            client.transport.cancel(*op);
        }
        for (index, op) in ops.iter().enumerate() {
            let outcome = client.cancelled(*op)?;
            match index % 2 {
                0 => check_cancelled(&outcome)?,
                _ => check!(
                    T7,
                    outcome.result == Ok(()),
                    "another's cancel ended a read with {:?}",
                    outcome.result
                ),
            }
        }
    }
    Ok(())
}

fn t7_after_cancels_the_connection_goes_on(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(4 << 20, 1))?;
    let mut ops = vec![];
    for _ in 0..20 {
        let place = bench.place(&pair.client, 1 << 20)?;
        ops.push(pair.client.read(pair.peer, &source.key, place.region, vec![range(0, 0, 1 << 20)])?);
    }
    ops.iter().for_each(|op| pair.client.transport.cancel(*op));
    for op in ops {
        check_cancelled(&pair.client.cancelled(op)?)?;
    }
    let works = pair.client.works(bench, pair.peer, &source)?;
    check!(T7, works, "after cancels, reads fail");
    let sent = pair.client.transport.send(pair.peer, vec![1, 2, 3]);
    check!(
        T7,
        sent.is_ok() && pair.server.message().is_some(),
        "after cancels, messages do not arrive: {sent:?}"
    );
    Ok(())
}
