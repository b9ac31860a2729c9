//! Faults of reads.

use std::time::{Duration, Instant};

use kv_testkit::faults::{FailWith, Fault, FaultPlan, On, Rule, Which};
use kv_transport::{
    Event, LossReason, OpId, PeerId, ReadError, ReadLimits, ReadRange, RegionId, Transport, TransportError,
};

use crate::rig::{BYTES, LIMIT, OLD, Rig, always, at, event};

const FAIL: Fault = Fault::Fail { error: FailWith::Fabric };
const SHORT: ReadLimits = ReadLimits { total: LIMIT, stall: Duration::from_millis(30) };

#[tokio::test]
async fn without_rules_everything_passes_through() {
    let rig = Rig::under(&FaultPlan::default()).await;
    let outcome = rig.read(1).await;
    assert!(outcome.result.is_ok() && outcome.arrived.is_all());
    assert_eq!(rig.contents(), rig.bytes);
    rig.reader.send(rig.peer, b"hello".to_vec()).unwrap();
    assert!(matches!(event(rig.source.as_ref()).await, Event::Message { bytes, .. } if bytes == b"hello"));
    rig.reader.disconnect(rig.peer).unwrap();
    assert_eq!(rig.event().await, Event::PeerLost { peer: rig.peer, reason: LossReason::Disconnected });
    assert!(rig.reader.recording().faults.is_empty());
}

#[tokio::test]
async fn failed_reads_bring_nothing_and_the_pattern_is_exact() {
    let which = Which::Pattern("XOOXO".parse().unwrap());
    let plan = FaultPlan::seeded(1).rule(Rule::new(On::Read, FAIL).which(which)).unwrap();
    let rig = Rig::under(&plan).await;
    for position in 1..=11 {
        rig.into.write(0, &[OLD; BYTES]).unwrap();
        let outcome = rig.read(position).await;
        if [1, 4, 6, 9, 11].contains(&position) {
            assert_eq!(outcome.result, Err(ReadError::Fabric { code: -5 }), "{position}");
            assert_eq!((outcome.arrived.count(), rig.contents()), (0, vec![OLD; BYTES]), "{position}");
        } else {
            assert_eq!((outcome.result, rig.contents()), (Ok(()), rig.bytes.clone()), "{position}");
        }
    }
    assert_eq!(rig.struck(On::Read), [1, 4, 6, 9, 11]);
    assert_eq!(rig.reader.recording().counts()[&("read", "fail")], 5);
}

#[tokio::test]
async fn a_truncated_read_names_the_ranges_that_arrived() {
    for (percent, whole, bytes) in [(50, 2, 2048), (60, 2, 2457), (0, 0, 0), (99, 3, 4055)] {
        let error = FailWith::Stalled;
        let rig = Rig::under(&always(On::Read, Fault::Truncate { arrive_percent: percent, error })).await;
        let outcome = rig.read(1).await;
        assert_eq!(outcome.result, Err(ReadError::Stalled));
        let arrived: Vec<usize> = (0..4).filter(|index| outcome.arrived.contains(*index)).collect();
        assert_eq!(arrived, (0..whole).collect::<Vec<_>>());
        assert_eq!(outcome.arrived.size(), 4);
        assert_eq!(rig.contents()[..bytes], rig.bytes[..bytes]);
        assert!(rig.contents()[bytes..].iter().all(|byte| *byte == OLD));
    }
}

#[tokio::test]
async fn a_corrupted_read_reports_success_and_a_replay_changes_the_same_bytes() {
    let run = async |plan: &FaultPlan| {
        let rig = Rig::under(plan).await;
        let mut seen = Vec::new();
        for op in 0..8 {
            assert_eq!(rig.read(op).await.result, Ok(()));
            seen.push(rig.contents());
        }
        (seen, rig.bytes.clone(), rig.reader.recording())
    };
    let rule = Rule::new(On::Read, Fault::Corrupt { bytes: 3 }).which(Which::Probability(0.5));
    let (seen, bytes, recording) = run(&FaultPlan::seeded(11).rule(rule).unwrap()).await;
    let struck: Vec<u64> = recording.faults.iter().map(|i| i.position).collect();
    assert!(!struck.is_empty() && struck.len() < 8, "{struck:?}");
    for (position, contents) in (1..).zip(&seen) {
        let changed = contents.iter().zip(&bytes).filter(|(is, was)| is != was).count();
        assert_eq!(changed, if struck.contains(&position) { 3 } else { 0 }, "read {position}");
    }
    let replay = FaultPlan::parse(&recording.to_json()).unwrap();
    assert_eq!(replay, FaultPlan::from_recording(&recording));
    assert_eq!(run(&replay).await, (seen, bytes, recording));
}

#[tokio::test]
async fn a_stalled_read_ends_by_its_limit_or_by_a_cancel() {
    let rig = Rig::under(&always(On::Read, Fault::Stall)).await;
    for (limits, error) in [
        (SHORT, ReadError::Stalled),
        (ReadLimits { total: Duration::from_millis(30), stall: LIMIT }, ReadError::TimedOut),
    ] {
        let mut request = rig.request(1);
        request.limits = limits;
        let begun = Instant::now();
        rig.reader.read(request).unwrap();
        assert_eq!(rig.completion(1).await.result, Err(error));
        assert!(begun.elapsed() >= Duration::from_millis(30));
    }
    rig.reader.read(rig.request(2)).unwrap();
    // A region that a kept read will write into stays (T-4), and its name is taken.
    let in_use = TransportError::RegionInUse { region: rig.region, reads: 1 };
    assert_eq!(rig.reader.deregister(rig.region), Err(in_use));
    assert_eq!(rig.reader.read(rig.request(2)), Err(TransportError::DuplicateOp { op: OpId(2) }));
    rig.reader.cancel(OpId(2));
    rig.reader.cancel(OpId(2));
    assert_eq!(rig.completion(2).await.result, Err(ReadError::Cancelled));
    rig.reader.read(rig.request(3)).unwrap();
    rig.reader.disconnect(rig.peer).unwrap();
    let lost = ReadError::PeerLost(LossReason::Disconnected);
    assert_eq!(rig.completion(3).await.result, Err(lost), "T-6: before the loss");
    assert!(matches!(rig.event().await, Event::PeerLost { .. }));
    assert_eq!(rig.contents(), vec![OLD; BYTES]);
    rig.reader.deregister(rig.region).unwrap();
}

#[tokio::test]
async fn a_delayed_read_begins_later_but_within_its_limits() {
    let rig = Rig::under(&always(On::Read, Fault::Delay { delay_ms: 300 })).await;
    let begun = Instant::now();
    rig.reader.read(rig.request(1)).unwrap();
    assert_eq!(rig.contents(), vec![OLD; BYTES], "nothing before the delay is over");
    assert_eq!(rig.completion(1).await.result, Ok(()));
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(rig.contents(), rig.bytes);
    let mut hurried = rig.request(2);
    hurried.limits = SHORT;
    rig.reader.read(hurried).unwrap();
    assert_eq!(rig.completion(2).await.result, Err(ReadError::Stalled));
}

#[tokio::test]
async fn a_disconnect_loses_the_peer_in_the_middle_of_a_read() {
    let rig = Rig::under(&at(On::Read, Fault::Disconnect { arrive_percent: 50 }, &[1])).await;
    let outcome = rig.read(1).await;
    let LossReason::Broken { kind, code } = (match &outcome.result {
        Err(ReadError::PeerLost(reason)) => reason.clone(),
        other => panic!("{other:?}"),
    }) else {
        panic!("{outcome:?}")
    };
    assert_eq!(outcome.arrived.count(), 2);
    assert_eq!(rig.contents()[..2048], rig.bytes[..2048]);
    assert_eq!(rig.contents()[2048..], [OLD; 2048]);
    let reason = LossReason::Broken { kind, code };
    assert_eq!(rig.event().await, Event::PeerLost { peer: rig.peer, reason });
    assert!(matches!(event(rig.source.as_ref()).await, Event::PeerLost { .. }), "the other side sees it too");
    let refused = rig.reader.read(rig.request(2)).unwrap_err();
    assert_eq!(refused, TransportError::UnknownPeer { peer: rig.peer });
}

/// Whether the destination of a read that has ended is written within a limit.
async fn written_after_the_end(fault: Fault, limit: Duration) -> bool {
    let rig = Rig::under(&always(On::Read, fault)).await;
    assert!(rig.read(1).await.result.is_err());
    let before = rig.contents();
    let until = Instant::now() + limit;
    while Instant::now() < until {
        if rig.contents() != before {
            return true;
        }
        tokio::task::yield_now().await;
    }
    false
}

// T-3
#[tokio::test]
async fn a_late_write_is_seen_and_no_other_fault_writes_late() {
    assert!(written_after_the_end(Fault::LateWrite { delay_ms: 20 }, LIMIT).await);
    for fault in [FAIL, Fault::Truncate { arrive_percent: 50, error: FailWith::Fabric }] {
        assert!(!written_after_the_end(fault, Duration::from_millis(60)).await, "{fault:?}");
    }
}

// T-1
#[tokio::test]
async fn a_refused_read_changes_nothing_and_does_not_count() {
    for fault in [Fault::Stall, FAIL] {
        let rig = Rig::under(&at(On::Read, fault, &[1])).await;
        let range = |local_offset, len| ReadRange { remote_offset: 0, local_offset, len };
        let (op, region) = (OpId(1), rig.region);
        let region_len = BYTES as u64;
        let mut stranger = rig.request(1);
        stranger.peer = PeerId(99);
        let mut nowhere = rig.request(1);
        nowhere.parts[0].region = RegionId(99);
        let mut hurried = rig.request(1);
        hurried.limits.stall = Duration::ZERO;
        for (request, error) in [
            (rig.ranges(1, vec![]), TransportError::NoRanges { op }),
            (
                rig.ranges(1, vec![range(0, 10), range(9, 10)]),
                TransportError::Overlap { op, region, offset: 9 },
            ),
            (
                rig.ranges(1, vec![range(0, 10), range(4090, 10)]),
                TransportError::LocalRange { op, index: 1, offset: 4090, len: 10, region_len },
            ),
            (
                rig.ranges(1, vec![range(0, 0)]),
                TransportError::LocalRange { op, index: 0, offset: 0, len: 0, region_len },
            ),
            (stranger, TransportError::UnknownPeer { peer: PeerId(99) }),
            (nowhere, TransportError::UnknownRegion { region: RegionId(99) }),
            (hurried, TransportError::ZeroLimit { op, limit: "stall" }),
        ] {
            assert_eq!(rig.reader.read(request.clone()), Err(error));
            // The transport behind says the same.
            let plain = Rig::under(&FaultPlan::default()).await;
            assert!(plain.reader.read(request).is_err());
        }
        assert!(rig.reader.recording().faults.is_empty());
        rig.reader.read(rig.request(1)).unwrap();
        rig.reader.cancel(op);
        assert!(rig.completion(1).await.result.is_err());
        assert_eq!(rig.struck(On::Read), [1]);
    }
}

#[tokio::test]
async fn a_shutdown_completes_what_is_kept_and_a_drop_ends_the_thread() {
    let rig = Rig::under(&always(On::Read, Fault::Stall)).await;
    for op in 1..=3 {
        rig.reader.read(rig.request(op)).unwrap();
    }
    rig.reader.shutdown(LIMIT).await;
    for op in 1..=3 {
        assert_eq!(rig.completion(op).await.result, Err(ReadError::Closed));
    }
    assert!(matches!(rig.event().await, Event::PeerLost { .. }));
    assert_eq!(rig.reader.next_event().await, None);
    assert_eq!(rig.reader.read(rig.request(9)), Err(TransportError::Closed { transport: "tcp" }));
    let kept = Rig::under(&always(On::Read, Fault::Delay { delay_ms: 10_000 })).await;
    kept.reader.read(kept.request(1)).unwrap();
    let begun = Instant::now();
    drop(kept);
    assert!(begun.elapsed() < Duration::from_secs(5), "T-11");
}

#[tokio::test]
async fn the_limit_of_a_read_that_has_ended_does_not_end_the_next_of_its_name() {
    let rig = Rig::under(&always(On::Read, Fault::Stall)).await;
    let mut request = rig.request(1);
    request.limits = SHORT;
    rig.reader.read(request).unwrap();
    rig.reader.cancel(OpId(1));
    assert_eq!(rig.completion(1).await.result, Err(ReadError::Cancelled));
    rig.reader.read(rig.request(1)).unwrap();
    // Longer than the first one's limit, which must mean nothing.
    let early = tokio::time::timeout(SHORT.stall * 3, rig.reader.next_event()).await;
    assert!(early.is_err(), "{early:?}");
    rig.reader.cancel(OpId(1));
    assert_eq!(rig.completion(1).await.result, Err(ReadError::Cancelled));
}
