//! One machine against everything that can be said to it, in any order: nothing panics, no promise breaks, and
//! when all is quiet nothing is left.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::*;
use kv_proto::message::WorkerMessage;
use kv_proto::{
    CodecError, ConsumerOrder, LeaseId, LeaseTerms, LoadFailure, LoadId, Plan, ProducerOrder, PullEnd,
    ReleaseReason,
};
use kv_worker::Failure;
use kv_worker::machine::io::{Decision, Fact, LinkId, PullId, SourceKey};
use kv_worker::machine::worker::WorkerMachine;
use proptest::prelude::*;

/// The machine's own life; two consumers and two producers speak with it.
const US: u64 = 100;

#[derive(Debug, Clone)]
enum Step {
    Fact(Fact),
    Accept,
    Wait(u64),
}

fn producer_order() -> impl Strategy<Value = ProducerOrder> {
    (0..5u64, 0..5u8, 1..3_000u64).prop_map(|(lease, kind, ttl_ms)| {
        let lease = LeaseId(lease);
        let terms = LeaseTerms { ttl_ms, renewal_ms: 700, max_ms: 3_000, grace_ms: 200 };
        match kind {
            0 => ProducerOrder::Announce { lease },
            1 => ProducerOrder::Forget { lease },
            2 => ProducerOrder::Revoke { lease },
            _ => ProducerOrder::Grant { lease, terms, offer: OFFER },
        }
    })
}

fn consumer_order() -> impl Strategy<Value = ConsumerOrder> {
    (1..3u64, 0..3u64, 0..12u64, 0..9u8).prop_map(|(n, lease, id, kind)| match (kind, load(n, lease, id)) {
        (0, _) => track(n, lease),
        (1, _) => release(n, lease, ReleaseReason::NotNeeded),
        (2, _) => cancel(id),
        (3, ConsumerOrder::Load { load, lease, peer, .. }) => {
            ConsumerOrder::Load { load, lease, offer: OFFER, peer, groups: groups(&[BLOCKS], &[0]) }
        }
        (4, ConsumerOrder::Load { load, lease, peer, .. }) => {
            ConsumerOrder::Load { load, lease, offer: OFFER, peer, groups: vec![] }
        }
        (_, order) => order,
    })
}

fn message() -> impl Strategy<Value = Result<WorkerMessage, CodecError>> {
    (0..13u8, 0..5u64, 0..12u64, 0..3u64).prop_map(|(kind, lease, attempt, n)| {
        Ok(match kind {
            0 => hello(n, US),
            1 => hello(n, n),
            2 | 3 => welcome(n),
            4 if n == 0 => renew(&[lease, attempt]),
            4 => renew_next(n, &[lease], &[attempt]),
            5 if n == 0 => WorkerMessage::Relist {},
            5 => not_held(&[lease]),
            6 => read_done(lease, attempt),
            7 => confirmed(lease % 3, attempt),
            8 => lapsed(lease % 3, attempt),
            9 => released(lease, attempt),
            10 => compare(lease, attempt, n as u32, &[1, 2], &[n, n]),
            11 => compared(lease % 3, attempt, 0, n as u32, lease < 4),
            _ => return Err(CodecError::TooLong { what: "worker message", bytes: 2, limit: 1 }),
        })
    })
}

fn link() -> impl Strategy<Value = LinkId> {
    prop_oneof![(0..5u64).prop_map(dialled), (0..4u64).prop_map(accepted)]
}

fn fact() -> impl Strategy<Value = Fact> {
    let plan = (prop::collection::vec(producer_order(), 0..3), prop::collection::vec(consumer_order(), 0..3));
    let failure = |reason| Failure::new(reason, "made up");
    prop_oneof![
        6 => plan.prop_map(|(producer, consumer)| Fact::PlanTaken(Plan { producer, consumer, ..Plan::default() })),
        3 => (1..3u64, any::<bool>()).prop_map(move |(n, ok)| Fact::HandshakeEnded {
            key: SourceKey::first(peer(n)),
            result: if ok { Ok(card(n)) } else { Err(failure(LoadFailure::HandshakeRefused)) },
        }),
        3 => (0..5u64).prop_map(|n| Fact::LinkConnected { link: dialled(n) }),
        1 => link().prop_map(|link| Fact::LinkLost { link, detail: String::new() }),
        12 => (link(), message()).prop_map(|(link, message)| Fact::MessageArrived { link, message }),
        3 => (0..12u64, 0..5u64, any::<bool>()).prop_map(move |(load, link, ok)| Fact::ReadEnded {
            pull: PullId::first(LoadId(load)),
            link: dialled(link),
            result: if ok { Ok(()) } else { Err(failure(LoadFailure::ReadFailed)) },
        }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => fact().prop_map(Step::Fact),
        1 => Just(Step::Accept),
        3 => (0..400u64).prop_map(Step::Wait),
        1 => (0..6_000u64).prop_map(Step::Wait),
    ]
}

/// A consumer that behaves, mixed in so that the interesting states are reached often.
fn course() -> impl Strategy<Value = Vec<Step>> {
    (1..3u64, 0..3u64, 0..5u64, any::<bool>()).prop_map(|(n, lease, link, confirm)| {
        let plan =
            |consumer| Step::Fact(Fact::PlanTaken(Plan { producer: vec![], consumer, ..Plan::default() }));
        let hear = |message| Step::Fact(Fact::MessageArrived { link: dialled(link), message: Ok(message) });
        let mut steps = vec![
            plan(vec![load(n, lease, link + 2)]),
            Step::Fact(Fact::HandshakeEnded { key: SourceKey::first(peer(n)), result: Ok(card(n)) }),
            Step::Fact(Fact::LinkConnected { link: dialled(link) }),
            hear(welcome(n)),
            Step::Fact(Fact::ReadEnded {
                pull: PullId::first(LoadId(link + 2)),
                link: dialled(link),
                result: Ok(()),
            }),
        ];
        if confirm {
            steps.push(hear(confirmed(lease, link + 2)));
        }
        steps
    })
}

/// A consumer that is greeted, and a lease for it.
fn visit() -> impl Strategy<Value = Vec<Step>> {
    (0..3u64, 0..4u64, 0..5u64, 0..12u64).prop_map(|(n, link, lease, attempt)| {
        let hear = |message| Step::Fact(Fact::MessageArrived { link: accepted(link), message: Ok(message) });
        let producer = vec![announce(lease), grant(lease)];
        vec![
            Step::Accept,
            hear(hello(n, US)),
            Step::Fact(Fact::PlanTaken(Plan { producer, consumer: vec![], ..Plan::default() })),
            hear(read_done(lease, attempt)),
        ]
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let part = prop_oneof![6 => step().prop_map(|s| vec![s]), 1 => course(), 1 => visit()];
    prop::collection::vec(part, 0..60).prop_map(|parts| parts.concat())
}

/// The machine, and everything that was ever said to it and by it, as far as promises speak of it.
struct Judge {
    m: WorkerMachine,
    now: u64,
    accepted: u64,
    /// Lease of each load, and those whose read is with the transport.
    loads: BTreeMap<LoadId, LeaseId>,
    reading: BTreeMap<LoadId, LinkId>,
    read: BTreeSet<LoadId>,
    ended: BTreeSet<LoadId>,
    heard_confirmed: BTreeSet<(LeaseId, u64)>,
    /// Who is at the other end.
    readers: BTreeMap<LinkId, u64>,
    told_confirmed: BTreeSet<(u64, LeaseId, u64)>,
    asked_in_time: BTreeSet<(LeaseId, u64)>,
    over: BTreeSet<LeaseId>,
    granted: BTreeSet<LeaseId>,
}

impl Judge {
    fn new() -> Self {
        Self {
            m: machine("us", US),
            now: 0,
            accepted: 0,
            loads: BTreeMap::new(),
            reading: BTreeMap::new(),
            read: BTreeSet::new(),
            ended: BTreeSet::new(),
            heard_confirmed: BTreeSet::new(),
            readers: BTreeMap::new(),
            told_confirmed: BTreeSet::new(),
            asked_in_time: BTreeSet::new(),
            over: BTreeSet::new(),
            granted: BTreeSet::new(),
        }
    }

    fn apply(&mut self, step: Step) {
        let mut out = Vec::new();
        match step {
            Step::Wait(span) => {
                self.now += span;
                self.m.time_passed(at(self.now), &mut out);
                assert!(
                    self.m.next_deadline().is_none_or(|next| next > at(self.now)),
                    "a deadline was left behind"
                );
            }
            Step::Accept => {
                let link = accepted(self.accepted);
                self.accepted += 1;
                self.m.take(at(self.now), Fact::LinkAccepted { link }, &mut out);
            }
            Step::Fact(fact) => {
                self.note(&fact);
                self.m.take(at(self.now), fact, &mut out);
            }
        }
        for decision in out {
            self.judge(decision);
        }
        let report = self.m.take_report();
        for (lease, _) in report.leases {
            assert!(self.over.insert(lease), "P2: a lease ends once");
            assert!(self.granted.contains(&lease), "only what was granted ends");
        }
        for (load, end) in report.loads {
            assert!(self.loads.contains_key(&load), "it was ordered");
            assert!(self.ended.insert(load), "P2: a load ends once");
            assert!(!self.reading.contains_key(&load), "P3: the transport may still write");
            if let PullEnd::Loaded(_) = end {
                assert!(
                    self.heard_confirmed.contains(&(self.loads[&load], load.0)),
                    "P1: nobody confirmed it"
                );
            }
        }
    }

    fn note(&mut self, fact: &Fact) {
        match fact {
            Fact::PlanTaken(plan) => {
                for order in &plan.producer {
                    if let ProducerOrder::Grant { lease, .. } = order {
                        self.granted.insert(*lease);
                    }
                }
                for order in &plan.consumer {
                    if let ConsumerOrder::Load { load, lease, .. } = order {
                        let new = self.loads.last_key_value().is_none_or(|(last, _)| load > last);
                        if new {
                            self.loads.insert(*load, lease.lease);
                        }
                    }
                }
            }
            // An end over another connection is not this read's.
            Fact::ReadEnded { pull, link, .. } => {
                self.reading.retain(|load, over| *load != pull.load || over != link)
            }
            Fact::MessageArrived { link, message: Ok(message) } => match (link, message) {
                (LinkId::Dialled(_), WorkerMessage::Confirmed { lease, attempt }) => {
                    self.heard_confirmed.insert((*lease, attempt.0));
                }
                (LinkId::Accepted(_), WorkerMessage::Hello { incarnation, .. }) => {
                    self.readers.entry(*link).or_insert(incarnation.get());
                }
                // An ending that came in time may be answered later, over another connection.
                (LinkId::Accepted(_), WorkerMessage::ReadDone { lease, attempt, .. })
                    if !self.over.contains(lease) =>
                {
                    self.asked_in_time.insert((*lease, attempt.0));
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn judge(&mut self, decision: Decision) {
        match decision {
            Decision::Read { pull: PullId { load, .. }, link, .. } => {
                assert!(self.loads.contains_key(&load) && !self.ended.contains(&load));
                assert!(self.read.insert(load) && self.reading.insert(load, link).is_none(), "P3: read once");
            }
            Decision::CancelRead { pull } => assert!(self.reading.contains_key(&pull.load)),
            Decision::Send { link, message: WorkerMessage::Confirmed { lease, attempt } } => {
                assert!(self.granted.contains(&lease), "P1: never granted");
                let answer = (self.readers[&link], lease, attempt.0);
                let again =
                    self.told_confirmed.contains(&answer) || self.asked_in_time.contains(&(lease, attempt.0));
                assert!(again || !self.over.contains(&lease), "P1: confirmed after its end was reported");
                self.told_confirmed.insert(answer);
            }
            _ => {}
        }
    }

    /// The engine takes everything back, the transport ends its reads, and time passes.
    fn quiet(&mut self) {
        let producer = (0..5).map(|lease| ProducerOrder::Forget { lease: LeaseId(lease) }).collect();
        let mut consumer = Vec::new();
        for n in 1..3 {
            // Each request that was tracked gives up; there were never more than there are steps.
            for lease in (0..3).flat_map(|lease| [lease; 100]) {
                consumer.push(release(n, lease, ReleaseReason::Other));
            }
        }
        consumer.extend((0..12).map(cancel));
        self.apply(Step::Fact(Fact::PlanTaken(Plan { producer, consumer, ..Plan::default() })));
        for _ in 0..1_000 {
            for (load, link) in self.reading.clone() {
                let result = Err(Failure::new(LoadFailure::Cancelled, ""));
                self.apply(Step::Fact(Fact::ReadEnded { pull: PullId::first(load), link, result }));
            }
            let Some(next) = self.m.next_deadline() else { break };
            let span = u64::try_from(next.since(at(self.now)).as_millis()).unwrap();
            self.apply(Step::Wait(span));
        }
        let stats = self.m.stats();
        assert_eq!((stats.pulls, stats.leases, stats.producers, self.m.next_deadline()), (0, 0, 0, None));
        assert_eq!(
            self.loads.keys().copied().collect::<BTreeSet<_>>(),
            self.ended,
            "P4: every load has ended"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_500, failure_persistence: None, ..ProptestConfig::default() })]

    // H-18, H-19, R026, R044
    #[test]
    fn p1_to_p6_hold_whatever_is_said(steps in steps()) {
        let mut judge = Judge::new();
        for step in steps {
            judge.apply(step);
        }
        judge.quiet();
    }
}
