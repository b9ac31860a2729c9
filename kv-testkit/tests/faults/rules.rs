//! The contract under many faults at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_testkit::faults::{FailWith, Fault, FaultPlan, On, Rule, Which};
use kv_testkit::sim::Dice;
use kv_transport::{Event, Memory, OpId, ReadLimits, ReadOutcome, Transport};

use crate::rig::{BYTES, OLD, Rig};

/// Every fault of reads that keeps T-2 and T-3, and one that does not, if asked for.
fn plan(seed: u64, late: bool) -> FaultPlan {
    let error = FailWith::TimedOut;
    let mut faults = vec![
        Fault::Fail { error },
        Fault::Delay { delay_ms: 3 },
        Fault::Truncate { arrive_percent: 70, error },
        Fault::Stall,
    ];
    if late {
        faults.push(Fault::LateWrite { delay_ms: 1 });
    }
    faults.into_iter().fold(FaultPlan::seeded(seed), |plan, fault| {
        plan.rule(Rule::new(On::Read, fault).which(Which::Probability(0.15))).unwrap()
    })
}

/// Reads into places of their own, some of them cancelled; how each ended, and what its place held then and at last.
async fn storm(plan: &FaultPlan, seed: u64) -> (Rig, BTreeMap<u64, (ReadOutcome, Vec<u8>, Vec<u8>)>) {
    let rig = Rig::under(plan).await;
    let mut dice = Dice::new(seed);
    let mut places = Vec::new();
    for op in 0..120 {
        let memory = Memory::allocate(BYTES).unwrap();
        memory.write(0, &[OLD; BYTES]).unwrap();
        let mut request = rig.request(op);
        request.parts[0].region = rig.reader.register(memory.clone()).unwrap();
        let stall = Duration::from_millis(dice.between(1, 60));
        request.limits = ReadLimits { total: Duration::from_secs(10), stall };
        rig.reader.read(request).unwrap();
        places.push(memory);
        if dice.chance(200) {
            rig.reader.cancel(OpId(dice.below(op + 1)));
        }
    }
    let look = |op: u64| {
        let mut bytes = vec![0; BYTES];
        places[op as usize].read(0, &mut bytes).unwrap();
        bytes
    };
    let mut ended = BTreeMap::new();
    while ended.len() < 120 {
        match rig.event().await {
            Event::ReadCompleted { op: OpId(op), outcome } => {
                let before = ended.insert(op, (outcome, look(op)));
                assert!(before.is_none(), "T-1: op-{op} completed twice");
            }
            other => panic!("{other:?}"),
        }
    }
    // Nothing more comes: what is asked last is told last.
    rig.reader.shutdown(Duration::from_secs(10)).await;
    while let Some(event) = rig.reader.next_event().await {
        assert!(matches!(event, Event::PeerLost { .. }), "T-1: {event:?}");
    }
    let ended = ended.into_iter().map(|(op, (outcome, then))| (op, (outcome, then, look(op)))).collect();
    (rig, ended)
}

// T-1, T-2, T-3
#[tokio::test]
async fn every_read_completes_once_and_its_place_is_quiet_from_then_on() {
    let mut seen = BTreeSet::new();
    for seed in 0..5 {
        let (rig, ended) = storm(&plan(seed, false), seed).await;
        for (op, (outcome, then, last)) in &ended {
            assert_eq!(then, last, "T-3: op-{op}, {outcome:?}");
            if outcome.result.is_ok() {
                assert_eq!(*then, rig.bytes, "T-2: op-{op}");
            }
            for range in (0..4).filter(|range| outcome.arrived.contains(*range)) {
                let part = range * BYTES / 4..(range + 1) * BYTES / 4;
                assert_eq!(then[part.clone()], rig.bytes[part], "T-2: range {range} of op-{op}");
            }
        }
        seen.extend(rig.reader.recording().counts().into_keys());
    }
    assert_eq!(seen.len(), 4, "{seen:?}");
}

#[tokio::test]
async fn the_check_sees_late_writes() {
    let mut late = 0;
    for seed in 0..3 {
        let (_, ended) = storm(&plan(seed, true), seed).await;
        late += ended.values().filter(|(_, then, last)| then != last).count();
    }
    assert!(late > 0, "no late write was seen");
}

#[tokio::test]
async fn the_same_plan_and_its_recording_strike_the_same_operations() {
    let (first, _) = storm(&plan(4, false), 1).await;
    let recording = first.reader.recording();
    assert!(recording.faults.len() > 20);
    // Limits and cancels are other ones; what is struck is not.
    for plan in [plan(4, false), FaultPlan::from_recording(&recording)] {
        let (again, _) = storm(&plan, 2).await;
        assert_eq!(again.reader.recording(), recording);
    }
}
