//! Any order of calls, reports and times: nothing panics, and what must balance balances.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::*;
use kv_proto::{ConsumerOrder, LeaseId, LeaseRef, LoadStats, PullEnd};
use kv_proto::{LeaseEnd, LoadFailure, LoadId, ProducerOrder, RemotePrefill, RequestId};
use kv_sched::{HoldId, LoadResult, RequestEnd, SchedError, SchedEvent, Scheduler, Verdict};
use proptest::prelude::*;

const RANKS: u32 = 2;

#[derive(Debug, Clone)]
enum Call {
    Arrive { name: u8, tokens: u32 },
    Offer { name: u8, lease: u64, tokens: u32, wrong: u8, others: Vec<(u64, u32)> },
    UseSource { name: u8, n: usize },
    Decline { name: u8 },
    Allocate { name: u8, local: u32, as_offered: bool, blocks: u32 },
    Finish { name: u8, aborted: bool },
    Lease { rank: u32, lease: u64, end: u8 },
    Load { rank: u32, load: u64, end: u8 },
    Preempt { name: u8 },
    Drain { ms: u64 },
    Resume,
    Wait { ms: u64 },
    Plan,
}

fn call() -> impl Strategy<Value = Call> {
    let name = 0..3u8;
    let ranks = 0..RANKS + 1;
    prop_oneof![
        2 => (name.clone(), 0..10u32).prop_map(|(name, tokens)| Call::Arrive { name, tokens }),
        4 => (name.clone(), 1..3u64, 0..10u32, 0..8u8, prop::collection::vec((1..4u64, 0..10u32), 0..3))
            .prop_map(|(name, lease, tokens, wrong, others)| Call::Offer { name, lease, tokens, wrong, others }),
        1 => (name.clone(), 0..3usize).prop_map(|(name, n)| Call::UseSource { name, n }),
        1 => name.clone().prop_map(|name| Call::Decline { name }),
        5 => (name.clone(), 0..3u32, prop::bool::weighted(0.9), 1..4u32)
            .prop_map(|(name, local, as_offered, blocks)| Call::Allocate { name, local, as_offered, blocks }),
        3 => (name.clone(), any::<bool>()).prop_map(|(name, aborted)| Call::Finish { name, aborted }),
        1 => name.prop_map(|name| Call::Preempt { name }),
        1 => (0..2_000u64).prop_map(|ms| Call::Drain { ms }),
        1 => Just(Call::Resume),
        3 => (ranks.clone(), 0..5u64, 0..3u8).prop_map(|(rank, lease, end)| Call::Lease { rank, lease, end }),
        5 => (ranks, 0..5u64, 0..3u8).prop_map(|(rank, load, end)| Call::Load { rank, load, end }),
        2 => (0..4_000u64).prop_map(|ms| Call::Wait { ms }),
        2 => Just(Call::Plan),
    ]
}

fn name(n: u8) -> RequestId {
    req(["a", "b", "c"][usize::from(n)])
}

/// What an engine and its workers see of a scheduler half.
struct World {
    s: Scheduler,
    now: u64,
    /// Holds that were promised an end.
    held: BTreeSet<HoldId>,
    /// Loads ordered, and whether somebody waits for their end.
    loading: BTreeMap<RequestId, LoadId>,
    /// Ranks that have reported, per lease and load.
    reported: BTreeMap<HoldId, BTreeSet<u32>>,
    granted: BTreeSet<LeaseId>,
    ordered: BTreeSet<LoadId>,
    /// Requests that live by a lease, as the workers count them.
    living: BTreeMap<LeaseRef, u32>,
}

impl World {
    fn new() -> Self {
        Self {
            s: scheduler(RANKS),
            now: 0,
            held: BTreeSet::new(),
            loading: BTreeMap::new(),
            reported: BTreeMap::new(),
            granted: BTreeSet::new(),
            ordered: BTreeSet::new(),
            living: BTreeMap::new(),
        }
    }

    /// Each offer that is tracked is read or given back, once.
    fn carry(&mut self, orders: &[ConsumerOrder]) {
        for order in orders {
            match order {
                ConsumerOrder::Track { lease, .. } => *self.living.entry(*lease).or_default() += 1,
                ConsumerOrder::Load { lease, .. } | ConsumerOrder::Release { lease, .. } => {
                    let count = self.living.get_mut(lease).filter(|count| **count > 0);
                    *count.expect("read or given back once") -= 1;
                }
                _ => {}
            }
        }
    }

    fn take_plan(&mut self) {
        let plan = self.s.plan_step(at(self.now));
        for order in plan.producer {
            if let ProducerOrder::Grant { lease, .. } = order {
                assert!(self.granted.insert(lease), "granted once");
            }
        }
        self.carry(&plan.consumer);
        for order in plan.consumer {
            if let ConsumerOrder::Load { load, .. } = order {
                assert!(self.ordered.insert(load), "ordered once");
            }
        }
    }

    fn complete(&self, hold: HoldId) -> bool {
        self.reported.get(&hold).is_some_and(|ranks| ranks.len() == RANKS as usize)
    }

    fn take_events(&mut self) {
        for event in self.s.take_events() {
            match event {
                SchedEvent::LoadEnded { request, result } => {
                    let load = self.loading.remove(&request).expect("somebody waits for it");
                    match result {
                        LoadResult::Failed { hold: Some(hold), others, .. } => {
                            let left = self.s.sources(&request);
                            // A drain's limit may have come at the same time, and ended them.
                            assert!(left.is_empty() || others == left);
                            assert_eq!(hold, HoldId::Load(load));
                            assert!(!self.complete(hold));
                            self.held.insert(hold);
                        }
                        LoadResult::Loaded { .. } | LoadResult::Failed { hold: None, .. } => {
                            assert!(self.complete(HoldId::Load(load)), "every rank is quiet");
                        }
                    }
                }
                SchedEvent::BlocksReleased { hold, .. } => {
                    assert!(self.held.remove(&hold), "held, and released once");
                    assert!(self.complete(hold), "on every rank");
                }
                SchedEvent::Drained { left } => {
                    assert_eq!(left.leases + left.loads, self.s.holds());
                    assert!(self.s.remaining().computing >= left.computing);
                }
                SchedEvent::WorkersSilent { hold, missing } => {
                    assert!(!missing.is_empty() && !self.complete(hold));
                }
            }
        }
    }

    fn report(&mut self, rank: u32, hold: HoldId, end: u8) {
        if rank < RANKS {
            self.reported.entry(hold).or_default().insert(rank);
        }
        let report = match hold {
            HoldId::Lease(LeaseId(lease)) => {
                let ends = [LeaseEnd::Confirmed, LeaseEnd::Revoked, LeaseEnd::Expired];
                lease_report(rank, lease, ends[usize::from(end)])
            }
            HoldId::Load(LoadId(load)) => {
                let most = LoadStats { bytes: u64::MAX, ..LoadStats::default() };
                let ends = [loaded(1), PullEnd::Loaded(most), failed(LoadFailure::PeerLost)];
                load_report(rank, load, ends[usize::from(end)].clone())
            }
        };
        self.s.take_report(at(self.now), report);
        self.take_events();
    }

    fn apply(&mut self, call: Call) {
        let now = at(self.now);
        match call {
            Call::Arrive { name: n, tokens } => {
                let before = format!("{:?}", self.s);
                if self.s.request_arrived(now, &name(n), &prompt(tokens), Some(&ask())).is_err() {
                    assert_eq!(format!("{:?}", self.s), before);
                }
            }
            Call::Offer { name: n, lease, tokens, wrong, others } => {
                let mut offer = offer(lease, tokens);
                offer.alternatives =
                    others.iter().map(|(lease, tokens)| other_offer(*lease, *tokens)).collect();
                match wrong {
                    0 => offer.block_tokens = 8,
                    1 => offer.token_digest = "other".to_owned(),
                    2 => offer.blocks = vec![],
                    3 => offer.blocks = vec![run(1, 1)],
                    _ => {}
                }
                let held = self.s.holds();
                let _ = self.s.request_arrived(now, &name(n), &prompt(8), Some(&params(offer)));
                assert_eq!(self.s.holds(), held);
            }
            Call::Allocate { name: n, local, as_offered, blocks } => {
                let local = local * BLOCK_TOKENS;
                let offered = self.s.remote_tokens(&name(n), local);
                let asked = if as_offered { offered } else { offered + 1 };
                let before = format!("{:?}", self.s);
                match self.s.blocks_allocated(now, &name(n), local, asked, &[run(30, blocks)]) {
                    Ok(()) if asked > 0 => {
                        let orders = self.s.plan_step(now).consumer;
                        self.carry(&orders);
                        let load = orders.iter().find_map(|order| match order {
                            ConsumerOrder::Load { load, groups, .. } => {
                                assert_eq!(groups[0].remote.len(), groups[0].local.len());
                                Some(*load)
                            }
                            _ => None,
                        });
                        let load = load.expect("a load is ordered");
                        assert!(self.ordered.insert(load));
                        // Ends that a worker made up before the load existed were strays.
                        self.reported.remove(&HoldId::Load(load));
                        assert_eq!(self.loading.insert(name(n), load), None);
                    }
                    Ok(()) => {}
                    Err(_) => assert_eq!(format!("{:?}", self.s), before, "a refused call changes nothing"),
                }
            }
            Call::UseSource { name: n, n: source } => {
                let (before, sources) = (format!("{:?}", self.s), self.s.sources(&name(n)));
                match self.s.use_source(&name(n), source) {
                    Ok(()) => assert_eq!(self.s.sources(&name(n))[0], sources[source]),
                    Err(_) => {
                        assert!(source >= sources.len());
                        assert_eq!(format!("{:?}", self.s), before);
                    }
                }
            }
            Call::Decline { name: n } => {
                self.s.request_declined(&name(n));
                assert_eq!(self.s.remote_tokens(&name(n), 0), 0);
            }
            Call::Finish { name: n, aborted } => {
                let end = if aborted { RequestEnd::Aborted } else { complete(8, &[run(8, 2)]) };
                let finish = self.s.request_finished(now, &name(n), &end);
                if let Verdict::Hold(hold) = finish.verdict {
                    assert!(self.held.insert(hold), "a hold of its own");
                    match hold {
                        HoldId::Load(load) => assert_eq!(self.loading.remove(&name(n)), Some(load)),
                        HoldId::Lease(_) => drop(self.reported.remove(&hold)),
                    }
                }
                let leased = finish.params.and_then(|p: RemotePrefill| p.lease);
                assert_eq!(leased.is_some(), matches!(finish.verdict, Verdict::Hold(HoldId::Lease(_))));
            }
            Call::Preempt { name: n } => match self.s.request_preempted(now, &name(n)) {
                Verdict::Hold(hold) => {
                    assert!(self.held.insert(hold), "a hold of its own");
                    assert_eq!(self.loading.remove(&name(n)).map(HoldId::Load), Some(hold));
                    assert_eq!(self.s.remote_tokens(&name(n), 0), 0, "its source is void");
                }
                Verdict::Free => assert!(!self.loading.contains_key(&name(n))),
            },
            Call::Drain { ms } => {
                self.s.drain(now, std::time::Duration::from_millis(ms));
                let refused = self.s.request_arrived(now, &req("new"), &prompt(8), Some(&ask()));
                assert!(matches!(refused, Err(SchedError::Draining { .. })), "{refused:?}");
            }
            Call::Resume => self.s.resume(),
            Call::Lease { rank, lease, end } => self.report(rank, HoldId::Lease(LeaseId(lease)), end),
            Call::Load { rank, load, end } => self.report(rank, HoldId::Load(LoadId(load)), end),
            Call::Wait { ms } => {
                self.now += ms;
                self.s.time_passed(at(self.now));
                assert!(self.s.next_deadline().is_none_or(|next| next > at(self.now)));
            }
            Call::Plan => self.take_plan(),
        }
        self.take_events();
        assert_eq!(self.s.holds(), self.held.len() + self.loading.len());
    }

    /// Faults stop: requests end, workers report.
    fn heal(&mut self) {
        self.apply(Call::Resume);
        for n in 0..3 {
            self.apply(Call::Finish { name: n, aborted: true });
        }
        self.take_plan();
        for hold in self.held.clone() {
            for rank in 0..RANKS {
                self.report(rank, hold, 2);
            }
        }
        self.take_plan();
        assert_eq!(self.held, BTreeSet::new());
        assert!(self.living.values().all(|count| *count == 0), "{:?}", self.living);
        assert_forgotten(&self.s);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    // H-8, H-9, H-17, H-19, R028
    #[test]
    fn p2_p3_p6_holds_balance_and_everything_heals(calls in prop::collection::vec(call(), 0..80)) {
        let mut world = World::new();
        for call in calls {
            world.apply(call);
        }
        world.heal();
    }
}
