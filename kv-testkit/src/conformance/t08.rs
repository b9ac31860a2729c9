//! T-8: nothing blocks the caller, and every wait has a limit.

use std::time::{Duration, Instant};

use kv_transport::{Event, LossReason, ReadError, ReadLimits};

use super::bench::{Bench, Pair, Polled, pattern, range};
use super::case::{End, Outcome, broken, cases, check};

cases!(T8:
    t8_a_read_of_a_stopped_peer_times_out,
    t8_a_read_of_a_stopped_peer_stalls,
    t8_a_stopped_peer_is_given_up,
    t8_connecting_into_the_void_has_a_limit,
    t8_no_call_waits_for_a_stopped_peer,
    t8_messages_to_a_stopped_peer_are_bounded,
    t8_limits_beyond_the_calendar_are_taken,
    t8_waiting_for_events_can_be_given_up_at_any_time,
    t8_a_transport_works_while_nobody_takes_its_events,
);

/// How long a limit may be exceeded on a busy machine.
const SLACK: Duration = Duration::from_secs(2);
/// No call that does not wait takes this long, even on a busy machine.
const PROMPT: Duration = Duration::from_secs(1);

fn held_read_ends(bench: &Bench, limits: ReadLimits, limit: Duration, error: &ReadError) -> Outcome {
    let mut away = bench.away_two_sided()?;
    away.remote.stop()?;
    let start = Instant::now();
    let (_place, op) = away.read(bench, limits)?;
    let outcome = away.node.completed_within(op, limit + SLACK);
    let outcome = outcome.ok_or_else(|| broken!(T8, "no end within its limit of {limit:?} and {SLACK:?}"))?;
    check!(T8, outcome.result.as_ref() == Err(error), "a held read ended with {:?}", outcome.result);
    check!(T8, start.elapsed() >= limit, "the limit of {limit:?} was over after {:?}", start.elapsed());
    // The limit was that read's: the connection goes on.
    away.remote.resume()?;
    let (_place, op) = away.read(bench, away.node.patient())?;
    let outcome = away.node.completion(op)?;
    check!(T8, outcome.result == Ok(()), "after a read's limit, the next ended with {:?}", outcome.result);
    Ok(())
}

fn t8_a_read_of_a_stopped_peer_times_out(bench: &Bench) -> Outcome {
    let total = Duration::from_millis(300);
    held_read_ends(bench, ReadLimits { total, stall: total * 100 }, total, &ReadError::TimedOut)
}

fn t8_a_read_of_a_stopped_peer_stalls(bench: &Bench) -> Outcome {
    let stall = Duration::from_millis(300);
    held_read_ends(bench, ReadLimits { total: stall * 100, stall }, stall, &ReadError::Stalled)
}

fn t8_a_stopped_peer_is_given_up(bench: &Bench) -> Outcome {
    let no_limit = || End::Cannot("the harness names no limit of silence".into());
    let limit = bench.harness.silence_limit().ok_or_else(no_limit)?;
    let mut away = bench.away()?;
    away.remote.stop()?;
    let lost = away.node.wait(limit + SLACK, |event| match event {
        Event::PeerLost { peer, reason } if *peer == away.peer => Some(reason.clone()),
        _ => None,
    });
    let reason =
        lost.ok_or_else(|| broken!(T8, "a stopped peer is not given up within {limit:?} and {SLACK:?}"))?;
    let fair = !matches!(reason, LossReason::Disconnected | LossReason::Closed);
    check!(T8, fair, "a stopped peer is lost because: {reason}");
    Ok(())
}

fn t8_connecting_into_the_void_has_a_limit(bench: &Bench) -> Outcome {
    let void = bench.harness.black_hole()?;
    let node = bench.node()?;
    for limit in [Duration::ZERO, Duration::from_millis(300)] {
        let start = Instant::now();
        let peer = node.transport.connect(&void.address(), limit);
        let peer = peer.map_err(|error| broken!(T8, "a good address is refused: {error}"))?;
        check!(T8, start.elapsed() < PROMPT, "connect took {:?} to return", start.elapsed());
        let told = node.wait(limit + SLACK, |event| match event {
            Event::PeerLost { peer: lost, .. } if *lost == peer => Some(false),
            Event::Connected { peer: connected } if *connected == peer => Some(true),
            _ => None,
        });
        check!(T8, told == Some(false), "into the void within {limit:?}: connected is {told:?}");
    }
    Ok(())
}

fn t8_no_call_waits_for_a_stopped_peer(bench: &Bench) -> Outcome {
    let mut away = bench.away()?;
    away.remote.stop()?;
    let memory = bench.memory(1 << 20)?;
    let timed = |name: &str, start: Instant| -> Outcome {
        check!(T8, start.elapsed() < PROMPT, "{name} took {:?} while a peer was stopped", start.elapsed());
        Ok(())
    };
    let transport = &away.node.transport;
    for _ in 0..5 {
        let start = Instant::now();
        let region = away.node.register(memory.clone())?;
        timed("register", start)?;
        let op = away.node.op();
        let request = away.node.request(op, away.peer, &away.key, region, vec![range(0, 0, 1 << 20)]);
        let start = Instant::now();
        away.node.submit(request)?;
        timed("read", start)?;
        let start = Instant::now();
        for _ in 0..50 {
            // Whether it is taken is another case's matter.
            transport.send(away.peer, vec![0; 1000]).ok();
        }
        timed("50 sends", start)?;
        let start = Instant::now();
        transport.deregister(region).ok();
        timed("deregister", start)?;
        let start = Instant::now();
        transport.cancel(op);
        timed("cancel", start)?;
    }
    let start = Instant::now();
    transport.disconnect(away.peer).ok();
    timed("disconnect", start)?;
    let lost = away.node.wait(SLACK * 2, |event| matches!(event, Event::PeerLost { .. }).then_some(()));
    check!(T8, lost.is_some(), "letting go of a stopped peer does not end");
    Ok(())
}

fn t8_messages_to_a_stopped_peer_are_bounded(bench: &Bench) -> Outcome {
    let mut away = bench.away()?;
    away.remote.stop()?;
    let (most, mut taken) = (512, 0);
    while taken < most && away.node.transport.send(away.peer, vec![0; 1 << 20]).is_ok() {
        taken += 1;
    }
    check!(T8, taken < most, "{taken} MiB of messages are kept for a peer that takes none");
    Ok(())
}

fn t8_limits_beyond_the_calendar_are_taken(bench: &Bench) -> Outcome {
    let (server, client) = (bench.node()?, bench.node()?);
    let forever = Duration::MAX;
    let peer = client.transport.connect(&server.transport.address(), forever);
    let peer = peer.map_err(|error| broken!(T8, "a connect for ever is refused: {error}"))?;
    let connected = client.wait(client.patience, |event| (*event == Event::Connected { peer }).then_some(()));
    check!(T8, connected.is_some(), "a connect for ever does not connect");
    let source = bench.offer(&server, pattern(4096, 1))?;
    let place = bench.place(&client, 4096)?;
    let limits = ReadLimits { total: forever, stall: forever };
    let op = client.read_within(peer, &source.key, place.region, vec![range(0, 0, 4096)], limits)?;
    let outcome = client.completion(op)?;
    check!(T8, outcome.result == Ok(()), "a read for ever ended with {:?}", outcome.result);
    Ok(())
}

fn t8_waiting_for_events_can_be_given_up_at_any_time(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    let count = 500u32;
    let (mut seen, mut sent, start) = (vec![], 0, Instant::now());
    while seen.len() < count as usize {
        check!(T8, start.elapsed() < server.patience, "{} of {count} messages came through", seen.len());
        while sent < count.min(seen.len() as u32 + 50) {
            let message = sent.to_le_bytes().to_vec();
            client
                .transport
                .send(peer, message)
                .map_err(|e| broken!(T5, "a good message is refused: {e}"))?;
            sent += 1;
        }
        // Given up before anything can have come, nearly always.
        if let Polled::Event(Event::Message { bytes, .. }) = server.poll(Duration::from_micros(20)) {
            seen.push(bytes);
        }
    }
    seen.sort();
    seen.dedup();
    check!(T5, seen.len() == count as usize, "of {count} messages {} are different", seen.len());
    Ok(())
}

fn t8_a_transport_works_while_nobody_takes_its_events(bench: &Bench) -> Outcome {
    let (server, client) = (bench.node()?, bench.node()?);
    let source = bench.offer(&server, pattern(4 << 20, 1))?;
    let peer = client.connect(&server.transport.address())?;
    let place = bench.place(&client, 4 << 20)?;
    for _ in 0..3 {
        let outcome = client.fetch(peer, &source.key, place.region, vec![range(0, 0, 4 << 20)])?;
        check!(T8, outcome.result == Ok(()), "a peer whose events nobody takes: {:?}", outcome.result);
    }
    Ok(())
}
