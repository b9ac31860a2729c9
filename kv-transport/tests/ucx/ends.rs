//! How reads, peers and transports end.

use std::time::{Duration, Instant};

use kv_transport::ucx::UcxTransport;
use kv_transport::{
    Event, LossReason, Memory, OpId, PeerId, ReadError, ReadLimits, ReadRange, RegionId, RegionKey,
    Transport, TransportError,
};

use crate::processes::{Other, serving};
use crate::support::*;

const SIZE: u64 = 64 << 20;

/// A destination that shows every later write, and its region.
fn destination(reader: &UcxTransport) -> (Memory, RegionId) {
    let memory = memory(&vec![0xee; SIZE as usize]);
    (memory.clone(), reader.register(memory).unwrap())
}

fn whole() -> Vec<ReadRange> {
    vec![range(0, 0, SIZE)]
}

/// After its completion nothing may write to it: fills it with other bytes and sees that they stay, while the
/// peer is made to go on and a later read shows that what was late has come.
fn poison(memory: &Memory) {
    memory.write(0, &vec![0x11; SIZE as usize]).unwrap();
}

fn is_poisoned(memory: &Memory) -> bool {
    contents(memory).iter().all(|byte| *byte == 0x11)
}

async fn t7_a_cancelled_read_completes_and_nothing_is_written_later(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let from = pattern(SIZE as usize, 1);
    let (_, key) = offer(&source, &from);
    let (memory, region) = destination(&reader);
    let mut cancelled = 0;
    for op in 0..8u64 {
        reader.read(request(op, peer, &key, region, whole())).unwrap();
        let until = Instant::now() + Duration::from_millis(op);
        while Instant::now() < until {
            tokio::task::yield_now().await;
        }
        let start = Instant::now();
        reader.cancel(OpId(op));
        reader.cancel(OpId(op + 1000));
        match completion(&reader, op).await.result {
            Err(ReadError::Cancelled) => cancelled += 1,
            other => assert_eq!(other, Ok(())),
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        poison(&memory);
        // Bytes that were on their way before this one would have come before its own.
        let (_, small) = destination_of(&reader, 4096);
        reader.read(request(500 + op, peer, &key, small, vec![range(0, 0, 4096)])).unwrap();
        assert_eq!(completion(&reader, 500 + op).await.result, Ok(()));
        assert!(is_poisoned(&memory));
    }
    assert!(cancelled > 0);
}

fn destination_of(reader: &UcxTransport, len: usize) -> (Memory, RegionId) {
    let memory = memory(&vec![0; len]);
    (memory.clone(), reader.register(memory).unwrap())
}

/// A peer in another process that stands still with a read under way.
async fn stopped(lanes: &str) -> Option<(Other, UcxTransport, PeerId, RegionKey)> {
    let reader = transport(lanes)?;
    let (other, peer, key) = serving(&reader, lanes).await;
    other.signal("-STOP");
    Some((other, reader, peer, key))
}

async fn ends_by_its_limit(lanes: &str, limits: ReadLimits, error: ReadError, cancel: bool) {
    let Some((other, reader, peer, key)) = stopped(lanes).await else { return };
    let (memory, region) = destination(&reader);
    let mut read = request(1, peer, &key, region, whole());
    read.limits = limits;
    let start = Instant::now();
    reader.read(read).unwrap();
    if cancel {
        reader.cancel(OpId(1));
    }
    let outcome = completion(&reader, 1).await;
    assert_eq!(outcome.result, Err(error));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    poison(&memory);
    reader.deregister(region).unwrap();
    // It goes on, and what it sends now must not find its way.
    other.signal("-CONT");
    settle(&reader, peer, &key).await;
    assert!(is_poisoned(&memory));
}

/// Waits until the peer has either answered again or is known to be lost.
async fn settle(reader: &UcxTransport, peer: PeerId, key: &RegionKey) {
    let small = match reader.register(memory(&[0; 64])) {
        Ok(small) => small,
        // UCX did not end what it had under way, so its worker had to go, and the transport with it.
        Err(TransportError::Closed { .. }) => {
            assert_eq!(loss(reader, peer).await, LossReason::Closed);
            return;
        }
        Err(other) => panic!("{other}"),
    };
    match reader.read(request(900, peer, key, small, vec![range(0, 0, 64)])) {
        Ok(()) => loop {
            match event(reader).await {
                Event::ReadCompleted { op: OpId(900), .. } => return,
                Event::PeerLost { .. } => {}
                other => panic!("{other:?}"),
            }
        },
        Err(TransportError::UnknownPeer { .. }) => {
            let reason = loss(reader, peer).await;
            assert_eq!(reason, LossReason::Silent);
        }
        Err(other) => panic!("{other}"),
    }
}

const SHORT: Duration = Duration::from_millis(400);

async fn t8_a_read_from_a_stopped_process_times_out(lanes: &str) {
    let limits = ReadLimits { total: SHORT, stall: LIMIT };
    ends_by_its_limit(lanes, limits, ReadError::TimedOut, false).await;
}

async fn t8_a_read_from_a_stopped_process_stalls(lanes: &str) {
    let limits = ReadLimits { total: LIMIT, stall: SHORT };
    ends_by_its_limit(lanes, limits, ReadError::Stalled, false).await;
}

async fn t7_a_read_from_a_stopped_process_can_be_cancelled(lanes: &str) {
    ends_by_its_limit(lanes, PATIENT, ReadError::Cancelled, true).await;
}

/// The process is stopped in the middle of a read, so that UCX has pieces under way that do not end.
async fn t3_a_read_that_a_stop_interrupts_ends_quietly(lanes: &str) {
    let Some(reader) = transport(lanes) else { return };
    let (other, peer, key) = serving(&reader, lanes).await;
    let (memory, region) = destination(&reader);
    // More than can be read before the stop.
    for op in 1..=40u64 {
        let mut read = request(op, peer, &key, region, whole());
        read.limits = ReadLimits { total: SHORT, stall: LIMIT };
        reader.read(read).unwrap();
    }
    // Some of it has arrived, in the middle of everything.
    let start = Instant::now();
    let mut first = [0xee; 64];
    while first == [0xee; 64] {
        memory.read(0, &mut first).unwrap();
        assert!(start.elapsed() < LIMIT);
        tokio::task::yield_now().await;
    }
    other.signal("-STOP");
    let mut interrupted = 0;
    for _ in 0..40 {
        match event(&reader).await {
            Event::ReadCompleted { outcome, .. } => interrupted += usize::from(outcome.result.is_err()),
            other => panic!("{other:?}"),
        }
    }
    assert!(interrupted > 0 && start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    poison(&memory);
    other.signal("-CONT");
    settle(&reader, peer, &key).await;
    assert!(is_poisoned(&memory));
}

async fn t8_a_stopped_peer_is_lost_as_silent(lanes: &str) {
    let config = kv_transport::ucx::UcxConfig {
        keep_alive: Duration::from_millis(100),
        silence_limit: Duration::from_millis(600),
        ..config(lanes)
    };
    let Some(reader) = open(config) else { return };
    let (other, peer, key) = serving(&reader, lanes).await;
    other.signal("-STOP");
    let (_, region) = destination(&reader);
    reader.read(request(1, peer, &key, region, whole())).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Err(ReadError::PeerLost(LossReason::Silent)));
    assert_eq!(loss(&reader, peer).await, LossReason::Silent);
    assert_eq!(reader.send(peer, vec![]), Err(TransportError::UnknownPeer { peer }));
}

async fn t6_a_killed_process_ends_its_reads_first_and_is_lost_once(lanes: &str) {
    let Some(reader) = transport(lanes) else { return };
    let (mut other, peer, key) = serving(&reader, lanes).await;
    let regions: Vec<_> = (0..3).map(|_| destination(&reader).1).collect();
    for (op, region) in regions.iter().enumerate() {
        reader.read(request(op as u64, peer, &key, *region, whole())).unwrap();
    }
    other.kill();
    let (start, mut left) = (Instant::now(), 3);
    let reason = loop {
        match event(&reader).await {
            Event::ReadCompleted { outcome, .. } => {
                left -= 1;
                let fits = matches!(outcome.result, Ok(()) | Err(ReadError::PeerLost(_)));
                assert!(fits, "{outcome:?}");
            }
            Event::PeerLost { peer: lost, reason } => {
                assert_eq!((lost, left), (peer, 0));
                break reason;
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let fits = matches!(reason, LossReason::ClosedByPeer | LossReason::Broken { .. } | LossReason::Silent);
    assert!(fits, "{reason:?}");
    assert_eq!(reader.disconnect(peer), Err(TransportError::UnknownPeer { peer }));
    // Told once: the next event is another one.
    reader.shutdown(LIMIT).await;
    assert_eq!(reader.next_event().await, None);
}

async fn t6_disconnecting_ends_reads_and_is_told_on_both_sides(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, there) = link(&reader, &source).await;
    let (_, key) = offer(&source, &pattern(SIZE as usize, 1));
    let (memory, region) = destination(&reader);
    reader.read(request(1, peer, &key, region, whole())).unwrap();
    reader.disconnect(peer).unwrap();
    let result = completion(&reader, 1).await.result;
    poison(&memory);
    assert!(matches!(result, Ok(()) | Err(ReadError::PeerLost(LossReason::Disconnected))), "{result:?}");
    assert_eq!(loss(&reader, peer).await, LossReason::Disconnected);
    assert_eq!(loss(&source, there).await, LossReason::ClosedByPeer);
    // And they can find each other again.
    let (peer, _) = link(&reader, &source).await;
    reader.read(request(2, peer, &key, destination(&reader).1, whole())).unwrap();
    assert_eq!(completion(&reader, 2).await.result, Ok(()));
    assert!(is_poisoned(&memory));
}

async fn t11_shutdown_ends_everything(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, there) = link(&reader, &source).await;
    let (_, key) = offer(&source, &pattern(SIZE as usize, 1));
    let (_, region) = destination(&reader);
    reader.read(request(1, peer, &key, region, whole())).unwrap();
    let start = Instant::now();
    reader.shutdown(LIMIT).await;
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    let result = completion(&reader, 1).await.result;
    assert!(matches!(result, Ok(()) | Err(ReadError::Closed)), "{result:?}");
    assert_eq!(loss(&reader, peer).await, LossReason::Closed);
    assert_eq!(reader.next_event().await, None);
    assert_eq!(reader.send(peer, vec![]), Err(TransportError::Closed { transport: "ucx" }));
    assert_eq!(loss(&source, there).await, LossReason::ClosedByPeer);
}

async fn t8_quiet_peers_keep_each_other(lanes: &str) {
    let short = || {
        open(kv_transport::ucx::UcxConfig {
            keep_alive: Duration::from_millis(50),
            silence_limit: Duration::from_millis(400),
            ..config(lanes)
        })
    };
    let (Some(a), Some(b)) = (short(), short()) else { return };
    let (peer, _) = link(&a, &b).await;
    // Nothing may happen for several limits.
    let quiet = tokio::time::timeout(Duration::from_millis(1600), a.next_event()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    a.send(peer, vec![1]).unwrap();
    assert!(matches!(event(&b).await, Event::Message { .. }));
}

#[test]
fn t11_drop_ends_threads_and_descriptors() {
    let words = Other::start("threads").words();
    assert!(matches!(words[0].as_str(), "done" | "skipped"), "{words:?}");
}

on_both_lanes!(
    t7_a_cancelled_read_completes_and_nothing_is_written_later,
    t8_a_read_from_a_stopped_process_times_out,
    t8_a_read_from_a_stopped_process_stalls,
    t7_a_read_from_a_stopped_process_can_be_cancelled,
    t3_a_read_that_a_stop_interrupts_ends_quietly,
    t8_a_stopped_peer_is_lost_as_silent,
    t6_a_killed_process_ends_its_reads_first_and_is_lost_once,
    t6_disconnecting_ends_reads_and_is_told_on_both_sides,
    t11_shutdown_ends_everything,
    t8_quiet_peers_keep_each_other,
);
