//! Faults of messages and connections.

use std::time::{Duration, Instant};

use kv_proto::message::WorkerMessage;
use kv_proto::{Attempt, LeaseId};
use kv_testkit::faults::{FailWith, Fault, FaultPlan, FaultyTransport, On, Rule, Which};
use kv_transport::{Event, LossReason, Transport, TransportError};

use crate::rig::{LIMIT, Rig, always, at, event, tcp};

const FAIL: Fault = Fault::Fail { error: FailWith::Fabric };

/// The next message that the source gets.
async fn heard(rig: &Rig) -> Vec<u8> {
    match event(rig.source.as_ref()).await {
        Event::Message { bytes, .. } => bytes,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn messages_are_dropped_refused_changed_and_delayed_as_planned() {
    let plan = [Fault::Drop, FAIL, Fault::Corrupt { bytes: 2 }, Fault::Delay { delay_ms: 300 }]
        .into_iter()
        .zip(2..)
        .fold(FaultPlan::seeded(3), |plan, (fault, position)| {
            plan.rule(Rule::new(On::Send, fault).which(Which::At(vec![position]))).unwrap()
        });
    let rig = Rig::under(&plan).await;
    let send = |number: u8| rig.reader.send(rig.peer, vec![number; 10]);
    assert_eq!(send(1), Ok(()));
    assert_eq!(send(2), Ok(()), "accepted, and never seen");
    assert_eq!(send(3), Err(TransportError::SendQueueFull { peer: rig.peer, queued: 0 }));
    let begun = Instant::now();
    for number in 4..=6 {
        assert_eq!(send(number), Ok(()));
    }
    assert_eq!(heard(&rig).await, [1; 10]);
    let changed = heard(&rig).await;
    assert_eq!(changed.iter().filter(|byte| **byte != 4).count(), 2, "{changed:?}");
    assert_eq!(heard(&rig).await, [6; 10]);
    assert_eq!(heard(&rig).await, [5; 10], "the delayed one comes last");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(rig.struck(On::Send), [2, 3, 4, 5]);
}

#[tokio::test]
async fn a_rule_is_about_one_kind_of_worker_message() {
    let rule = Rule::new(On::Send, Fault::Drop).message("confirmed");
    let rig = Rig::under(&FaultPlan::seeded(1).rule(rule).unwrap()).await;
    let (lease, attempt) = (LeaseId(5), Attempt(1));
    for message in [
        WorkerMessage::Relist {},
        WorkerMessage::Confirmed { lease, attempt },
        WorkerMessage::Lapsed { lease, attempt },
    ] {
        rig.reader.send(rig.peer, message.encode().unwrap()).unwrap();
    }
    assert_eq!(WorkerMessage::decode(&heard(&rig).await).unwrap(), WorkerMessage::Relist {});
    assert!(matches!(WorkerMessage::decode(&heard(&rig).await).unwrap(), WorkerMessage::Lapsed { .. }));
    assert_eq!(rig.struck(On::Send), [2]);
}

#[tokio::test]
async fn a_message_can_cost_the_peer() {
    let rig = Rig::under(&at(On::Send, Fault::Disconnect { arrive_percent: 50 }, &[1])).await;
    rig.reader.send(rig.peer, vec![1]).unwrap();
    match rig.event().await {
        Event::PeerLost { peer, reason: LossReason::Broken { .. } } => assert_eq!(peer, rig.peer),
        other => panic!("{other:?}"),
    }
    assert!(rig.reader.send(rig.peer, vec![1]).is_err());
}

#[tokio::test]
async fn connections_fail_stall_wait_and_break_as_planned() {
    let source = tcp();
    let limit = Duration::from_millis(40);
    for (fault, limit, reason) in [
        (FAIL, LIMIT, LossReason::Unreachable { kind: std::io::ErrorKind::ConnectionRefused, code: None }),
        (Fault::Stall, limit, LossReason::ConnectTimedOut),
        (Fault::Delay { delay_ms: 10_000 }, limit, LossReason::ConnectTimedOut),
    ] {
        let reader = FaultyTransport::new(tcp(), &always(On::Connect, fault)).unwrap();
        let peer = reader.connect(&source.address(), limit).unwrap();
        assert_eq!(event(&reader).await, Event::PeerLost { peer, reason });
    }
    let reader = FaultyTransport::new(tcp(), &always(On::Connect, Fault::Delay { delay_ms: 40 })).unwrap();
    let begun = Instant::now();
    let peer = reader.connect(&source.address(), LIMIT).unwrap();
    assert_eq!(event(&reader).await, Event::Connected { peer });
    assert!(begun.elapsed() >= limit);
    let breaks = always(On::Connect, Fault::Disconnect { arrive_percent: 50 });
    let reader = FaultyTransport::new(tcp(), &breaks).unwrap();
    let peer = reader.connect(&source.address(), LIMIT).unwrap();
    assert_eq!(event(&reader).await, Event::Connected { peer });
    assert!(matches!(event(&reader).await, Event::PeerLost { reason: LossReason::Broken { .. }, .. }));
}
