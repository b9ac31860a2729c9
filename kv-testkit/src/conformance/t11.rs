//! T-11: dropping a transport ends its threads and sockets in bounded time.
//!
//! These cases count what the process has, so nothing else runs meanwhile.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kv_transport::{Event, TransportError};

use super::bench::{Bench, Node, Pair, Polled, pattern, range};
use super::case::{End, Outcome, broken, cases, check};

cases!(T11:
    t11_drop_ends_threads_and_descriptors,
    t11_drop_during_reads_ends_threads_and_descriptors,
    t11_drop_after_shutdown_ends_threads_and_descriptors,
    t11_a_hundred_lives_leave_nothing,
    t11_drop_beside_a_stopped_peer_is_bounded,
    t11_shutdown_keeps_its_limit,
    t11_after_shutdown_calls_are_refused,
    t11_shutdown_ends_the_waiting,
);

/// How long a drop may take.
const BOUND: Duration = Duration::from_secs(3);

/// Threads and descriptors of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Census {
    threads: BTreeSet<String>,
    descriptors: BTreeSet<String>,
}

fn census() -> Result<Census, End> {
    let names = |place: &str| -> Result<BTreeSet<String>, End> {
        let entries =
            std::fs::read_dir(place).map_err(|_| End::Cannot(format!("{place} is not on this system")))?;
        Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
    };
    // Descriptors are named with what they are, because the one that lists them comes and goes.
    let descriptors = names("/proc/self/fd")?
        .into_iter()
        .filter_map(|name| {
            let what = std::fs::read_link(format!("/proc/self/fd/{name}")).ok()?;
            let what = what.to_string_lossy().into_owned();
            (!what.starts_with("/proc/")).then(|| format!("{name} ({what})"))
        })
        .collect();
    Ok(Census { threads: names("/proc/self/task")?, descriptors })
}

/// Runs something after which the process must have no more than before, within the bound.
fn leaves_nothing(bench: &Bench, life: impl Fn() -> Result<Instant, End>) -> Outcome {
    // A first life opens what all later ones share.
    drop(bench.pair()?);
    let mut before = census()?;
    settle(&mut before)?;
    let ended = life()?;
    loop {
        let now = census()?;
        let threads: Vec<_> = now.threads.difference(&before.threads).collect();
        let descriptors: Vec<_> = now.descriptors.difference(&before.descriptors).collect();
        if threads.is_empty() && descriptors.is_empty() {
            return Ok(());
        }
        check!(
            T11,
            ended.elapsed() < BOUND,
            "{BOUND:?} after the drop there are {} threads and these descriptors more: {descriptors:?}",
            threads.len()
        );
        std::thread::yield_now();
    }
}

/// Waits until what ended before the case is gone.
fn settle(census: &mut Census) -> Outcome {
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_millis(100) {
        let now = self::census()?;
        if now != *census {
            (*census, since) = (now, Instant::now());
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn drop_in_time(node: Node) -> Result<Instant, End> {
    let start = Instant::now();
    drop(node);
    check!(T11, start.elapsed() < BOUND, "a drop took {:?}", start.elapsed());
    Ok(Instant::now())
}

fn t11_drop_ends_threads_and_descriptors(bench: &Bench) -> Outcome {
    leaves_nothing(bench, || {
        let Pair { server, client, peer, .. } = bench.pair()?;
        client
            .transport
            .send(peer, vec![1])
            .map_err(|error| broken!(T5, "a good message is refused: {error}"))?;
        server.message();
        drop_in_time(client)?;
        drop_in_time(server)
    })
}

fn t11_drop_during_reads_ends_threads_and_descriptors(bench: &Bench) -> Outcome {
    leaves_nothing(bench, || {
        let Pair { server, client, peer, .. } = bench.pair()?;
        let source = bench.offer(&server, pattern(16 << 20, 1))?;
        for _ in 0..4 {
            let place = bench.place(&client, 16 << 20)?;
            client.read(peer, &source.key, place.region, vec![range(0, 0, 16 << 20)])?;
        }
        drop_in_time(client)?;
        drop_in_time(server)
    })
}

fn t11_drop_after_shutdown_ends_threads_and_descriptors(bench: &Bench) -> Outcome {
    leaves_nothing(bench, || {
        let Pair { server, client, .. } = bench.pair()?;
        client.drain()?;
        server.drain()?;
        drop_in_time(client)?;
        drop_in_time(server)
    })
}

fn t11_a_hundred_lives_leave_nothing(bench: &Bench) -> Outcome {
    leaves_nothing(bench, || {
        let mut ended = Instant::now();
        for _ in 0..50 {
            let Pair { server, client, .. } = bench.pair()?;
            drop_in_time(server)?;
            ended = drop_in_time(client)?;
        }
        Ok(ended)
    })
}

fn t11_drop_beside_a_stopped_peer_is_bounded(bench: &Bench) -> Outcome {
    let mut away = bench.away()?;
    away.remote.stop()?;
    for _ in 0..4 {
        away.read(bench, away.node.patient())?;
    }
    drop_in_time(away.node)?;
    Ok(())
}

fn t11_shutdown_keeps_its_limit(bench: &Bench) -> Outcome {
    let mut away = bench.away()?;
    away.remote.stop()?;
    let (_place, op) = away.read(bench, away.node.patient())?;
    for limit in [Duration::from_millis(200), Duration::ZERO] {
        let start = Instant::now();
        let ended = away.node.block_on(limit + BOUND, away.node.transport.shutdown(limit));
        check!(T11, ended.is_some(), "shutdown({limit:?}) took more than {:?}", start.elapsed());
    }
    away.node.completion(op)?;
    Ok(())
}

fn t11_after_shutdown_calls_are_refused(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    let source = bench.offer(&server, pattern(64, 1))?;
    let place = bench.place(&client, 64)?;
    let address = server.transport.address();
    client.drain()?;
    for _ in 0..3 {
        check!(T11, matches!(client.poll(client.patience), Polled::Closed), "after its end, events are told");
    }
    let closed = |result: Result<(), TransportError>| matches!(result, Err(TransportError::Closed { .. }));
    let transport = &client.transport;
    let request = client.request(client.op(), peer, &source.key, place.region, vec![range(0, 0, 1)]);
    check!(T11, closed(transport.read(request)), "a read is not refused as closed");
    check!(T11, closed(transport.send(peer, vec![])), "a message is not refused as closed");
    check!(
        T11,
        closed(transport.connect(&address, client.patience).map(drop)),
        "a connect is not refused as closed"
    );
    check!(
        T11,
        closed(transport.register(bench.memory(64)?).map(drop)),
        "a register is not refused as closed"
    );
    // Neither does harm.
    transport.cancel(client.op());
    client.shutdown()?;
    Ok(())
}

fn t11_shutdown_ends_the_waiting(bench: &Bench) -> Outcome {
    let node = bench.node()?;
    let transport = &node.transport;
    let wait = async {
        let (end, ()) = tokio::join!(transport.next_event(), transport.shutdown(node.patience));
        end
    };
    let told: Option<Option<Event>> = node.block_on(node.patience * 2, wait);
    check!(T11, told == Some(None), "who waits for events when all ends is told {told:?}");
    Ok(())
}
