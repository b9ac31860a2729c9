//! Offers of several producers for one request: which is read, which is tried when that fails, and that each is given
//! back once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use std::collections::BTreeMap;

use common::*;
use kv_proto::{
    ConsumerOrder, GroupBlocks, LeaseId, LeaseRef, LoadFailure, LoadId, PeerLocator, PullEnd, ReleaseReason,
    RemotePrefill, token_digest,
};
use kv_sched::{HoldId, LoadResult, RequestEnd, Role, SchedError, SchedEvent, Scheduler, Verdict};

/// Leases of the three offers that most tests bring: the first by one producer, the others by another.
const LEASES: [u64; 3] = [5, 6, 7];

fn three_offers() -> RemotePrefill {
    RemotePrefill { alternatives: vec![other_offer(6, 8), other_offer(7, 8)], ..offer(5, 8) }
}

fn other_lease(lease: u64) -> LeaseRef {
    LeaseRef { incarnation: other_peer().incarnation, lease: LeaseId(lease) }
}

fn other_track(lease: u64) -> ConsumerOrder {
    ConsumerOrder::Track { lease: other_lease(lease), offer: BLANK, peer: other_peer() }
}

fn other_release(lease: u64, reason: ReleaseReason) -> ConsumerOrder {
    ConsumerOrder::Release { lease: other_lease(lease), offer: BLANK, peer: other_peer(), reason }
}

/// A machine of one rank in which `r` waits with these offers.
fn arrived(offer: RemotePrefill) -> Scheduler {
    let mut s = scheduler(1);
    let role = s.request_arrived(at(0), &req("r"), &prompt(8), Some(&params(offer)));
    assert_eq!(role, Ok(Role::Consumer));
    s
}

fn allocate(s: &mut Scheduler, now: u64, local: u32) -> Result<(), SchedError> {
    let remote = s.remote_tokens(&req("r"), local);
    s.blocks_allocated(at(now), &req("r"), local, remote, &[run(40, 2)])
}

fn report(s: &mut Scheduler, now: u64, load: u64, end: PullEnd) {
    s.take_report(at(now), load_report(0, load, end));
}

/// Tokens that are valid, and the producers that are left.
fn failure(s: &mut Scheduler) -> (u32, Vec<PeerLocator>) {
    match &s.take_events()[..] {
        [
            SchedEvent::LoadEnded {
                result: LoadResult::Failed { valid_tokens, others, hold: None, .. }, ..
            },
        ] => (*valid_tokens, others.clone()),
        other => panic!("{other:?}"),
    }
}

/// Every order so far, by lease: how often it was tracked, and how it was used up.
#[derive(Default)]
struct Uses(BTreeMap<u64, (u32, Vec<String>)>);

impl Uses {
    fn take(&mut self, s: &mut Scheduler, now: u64) {
        for order in s.planned(at(now)).consumer {
            match order {
                ConsumerOrder::Track { lease, .. } => self.0.entry(lease.lease.0).or_default().0 += 1,
                ConsumerOrder::Load { lease, .. } => self.used(lease, "read"),
                ConsumerOrder::Release { lease, reason, .. } => self.used(lease, reason.name()),
                _ => {}
            }
        }
    }

    fn used(&mut self, lease: LeaseRef, how: &str) {
        self.0.entry(lease.lease.0).or_default().1.push(how.to_owned());
    }
}

type Ending = fn(&mut Scheduler);

fn load(s: &mut Scheduler) {
    allocate(s, 1, 0).unwrap();
}

fn fail(s: &mut Scheduler) {
    load(s);
    report(s, 2, 1, failed(LoadFailure::PeerLost));
    s.take_events();
}

fn finish(s: &mut Scheduler) {
    let _ = s.request_finished(at(10), &req("r"), &RequestEnd::Aborted);
}

// H-22, H-29
#[test]
fn p2_each_offer_is_read_or_given_back_exactly_once_however_the_request_goes() {
    let endings: &[(&str, Ending, [&str; 3])] = &[
        ("ends while it waits", |_| {}, ["aborted"; 3]),
        ("is declined", |s| s.request_declined(&req("r")), ["not_needed"; 3]),
        ("is here already", |s| allocate(s, 1, 8).unwrap(), ["not_needed"; 3]),
        ("waits too long", |s| s.time_passed(at(QUEUE_MS)), ["waited_too_long"; 3]),
        ("is drained", |s| s.drain(at(1), std::time::Duration::ZERO), ["draining"; 3]),
        ("ends while it loads", load, ["read", "aborted", "aborted"]),
        (
            "loads well",
            |s| {
                load(s);
                report(s, 2, 1, loaded(1));
            },
            ["read", "not_needed", "not_needed"],
        ),
        (
            "is declined while it loads",
            |s| {
                load(s);
                s.request_declined(&req("r"));
                report(s, 2, 1, failed(LoadFailure::PeerLost));
            },
            ["read", "not_needed", "not_needed"],
        ),
        (
            "is preempted while it loads",
            |s| {
                load(s);
                let _ = s.request_preempted(at(2), &req("r"));
                report(s, 3, 1, failed(LoadFailure::Cancelled));
            },
            ["read", "not_needed", "not_needed"],
        ),
        (
            "is drained while it loads",
            |s| {
                load(s);
                s.drain(at(2), std::time::Duration::ZERO);
                report(s, 3, 1, failed(LoadFailure::Cancelled));
            },
            ["read", "draining", "draining"],
        ),
        ("ends after a failure", fail, ["read", "aborted", "aborted"]),
        (
            "is declined after a failure",
            |s| {
                fail(s);
                s.request_declined(&req("r"));
            },
            ["read", "not_needed", "not_needed"],
        ),
        (
            "never asks again after a failure",
            |s| {
                fail(s);
                s.time_passed(at(2 + QUEUE_MS));
            },
            ["read", "waited_too_long", "waited_too_long"],
        ),
        (
            "is computed after a failure",
            |s| {
                fail(s);
                s.blocks_allocated(at(3), &req("r"), 8, 0, &[run(40, 2)]).unwrap();
            },
            ["read", "not_needed", "not_needed"],
        ),
        (
            "loads well from the second",
            |s| {
                fail(s);
                allocate(s, 3, 0).unwrap();
                report(s, 4, 2, loaded(1));
            },
            ["read", "read", "not_needed"],
        ),
        (
            "fails everywhere",
            |s| {
                fail(s);
                for n in [2, 3] {
                    allocate(s, 3, 0).unwrap();
                    report(s, 4, n, failed(LoadFailure::Lapsed));
                    s.take_events();
                }
            },
            ["read", "read", "read"],
        ),
    ];
    for (name, ending, used) in endings {
        let (mut s, mut uses) = (arrived(three_offers()), Uses::default());
        uses.take(&mut s, 0);
        ending(&mut s);
        uses.take(&mut s, 10);
        let early: Vec<_> = uses.0.values().map(|(_, used)| used.len()).collect();
        finish(&mut s);
        uses.take(&mut s, 11);
        report(&mut s, 12, 1, failed(LoadFailure::Cancelled));
        for (lease, used) in LEASES.into_iter().zip(used) {
            assert_eq!(uses.0[&lease], (1, vec![(*used).to_owned()]), "lease {lease} of one that {name}");
        }
        if !used.contains(&"aborted") {
            assert_eq!(early, [1; 3], "one that {name} gives back at once, not only with the request's end");
        }
        s.take_events();
        assert_forgotten(&s);
    }
}

// H-29
#[test]
fn p3_no_second_load_begins_before_the_engine_has_taken_the_end_of_the_first() {
    let mut s = arrived(two_offers());
    load(&mut s);
    report(&mut s, 2, 1, failed(LoadFailure::PeerLost));
    assert_eq!((s.remote_tokens(&req("r"), 0), s.sources(&req("r"))), (0, vec![]));
    let refused = s.blocks_allocated(at(3), &req("r"), 0, 8, &[run(40, 2)]);
    assert!(matches!(refused, Err(SchedError::NothingRemote { asked: 8, .. })), "{refused:?}");
    assert_eq!(s.take_events().len(), 1);
    assert_eq!(s.sources(&req("r")).len(), 1);
    allocate(&mut s, 3, 0).unwrap();
}

// H-11, H-27, H-29
#[test]
fn p8_the_next_producer_is_asked_for_the_rest_only() {
    let mut s = arrived(two_offers());
    assert_eq!(s.planned(at(0)), consumer(&[track(5), other_track(6)]));
    allocate(&mut s, 1, 0).unwrap();
    assert_eq!(s.planned(at(1)), consumer(&[common::load(1, 5, 0, run(20, 2), run(40, 2))]));
    report(&mut s, 2, 1, failed_after(LoadFailure::PeerLost, 1));
    assert_eq!(failure(&mut s), (4, vec![other_peer()]));
    assert_eq!((s.remaining().queued, s.next_deadline()), (1, Some(at(2 + QUEUE_MS))));
    assert_eq!(s.sources(&req("r")), [other_peer()]);

    assert_eq!(s.remote_tokens(&req("r"), 4), 4);
    allocate(&mut s, 3, 4).unwrap();
    let groups = vec![GroupBlocks {
        group: 0,
        first: 1,
        remote_first: 1,
        tokens: 8,
        remote: run(31, 1),
        local: run(41, 1),
    }];
    let (lease, peer) = (other_lease(6), other_peer());
    let order = ConsumerOrder::Load { load: LoadId(2), lease, offer: BLANK, peer, groups };
    assert_eq!(s.planned(at(3)), consumer(&[order]));
    report(&mut s, 4, 2, loaded(7));
    let [SchedEvent::LoadEnded { result: LoadResult::Loaded { tokens: 8, remote_tokens: 4, .. }, .. }] =
        s.take_events()[..]
    else {
        panic!("not loaded")
    };
    finish(&mut s);
    assert_forgotten(&s);
}

// H-21, H-29
#[test]
fn when_all_have_failed_nothing_remote_is_left() {
    let mut s = arrived(two_offers());
    load(&mut s);
    report(&mut s, 2, 1, failed(LoadFailure::PeerLost));
    assert_eq!(failure(&mut s), (0, vec![other_peer()]));
    allocate(&mut s, 3, 0).unwrap();
    report(&mut s, 4, 2, failed_after(LoadFailure::ReadFailed, 1));
    assert_eq!(failure(&mut s), (4, vec![]));
    assert_eq!((s.remote_tokens(&req("r"), 0), s.sources(&req("r"))), (0, vec![]));
    assert_eq!(s.next_deadline(), None);
    allocate(&mut s, 5, 4).unwrap();
    assert!(s.take_events().is_empty());
}

// H-3, H-22, H-29
#[test]
fn one_offer_that_does_not_fit_refuses_the_request_and_all_are_given_back() {
    let theirs = token_digest(&[1, 2, 3]);
    let bad = RemotePrefill { token_digest: theirs.clone(), ..other_offer(7, 8) };
    let mut s = scheduler(1);
    let offers = RemotePrefill { alternatives: vec![other_offer(6, 8), bad], ..offer(5, 8) };
    let error = s.request_arrived(at(0), &req("r"), &prompt(8), Some(&params(offers))).unwrap_err();
    assert_eq!(error, SchedError::PromptDiffers { tokens: 8, ours: token_digest(&prompt(8)), theirs });
    let refused = ReleaseReason::Refused;
    let tracked = [track(5), other_track(6), other_track(7)];
    let back = [release(5, refused), other_release(6, refused), other_release(7, refused)];
    assert_eq!(s.planned(at(0)), consumer(&[tracked, back].concat()));
    assert_forgotten(&s);
}

// H-22
#[test]
fn offers_of_parameters_that_could_not_be_read_as_a_whole_are_given_back() {
    let mut s = scheduler(1);
    s.offers_refused(&[offer(5, 8), other_offer(6, 8)]);
    let refused = ReleaseReason::Refused;
    let back = [track(5), release(5, refused), other_track(6), other_release(6, refused)];
    assert_eq!(s.planned(at(0)), consumer(&back));
    assert_forgotten(&s);
}

// H-2, H-29
#[test]
fn of_several_offers_under_one_lease_the_first_counts() {
    let offers = RemotePrefill {
        alternatives: vec![offer(5, 8), other_offer(6, 8), other_offer(6, 7)],
        ..offer(5, 8)
    };
    let mut s = arrived(offers);
    assert_eq!(s.planned(at(0)), consumer(&[track(5), other_track(6)]));
    finish(&mut s);
    let aborted = ReleaseReason::Aborted;
    assert_eq!(s.planned(at(10)), consumer(&[release(5, aborted), other_release(6, aborted)]));
    // The same number of another life is another lease.
    let mut s = arrived(RemotePrefill { alternatives: vec![other_offer(5, 8)], ..offer(5, 8) });
    assert_eq!(s.planned(at(0)), consumer(&[track(5), other_track(5)]));
}

// H-9, H-29
#[test]
fn an_offer_that_pins_nothing_is_passed_over() {
    let nothing = offer(9, 0);
    let mut s = arrived(RemotePrefill { alternatives: vec![nothing.clone(), other_offer(6, 8)], ..nothing });
    assert_eq!(s.planned(at(0)), consumer(&[other_track(6)]));
    assert_eq!((s.remote_tokens(&req("r"), 0), s.sources(&req("r"))), (8, vec![other_peer()]));
}

// H-29
#[test]
fn the_engine_may_choose_and_the_others_keep_their_order() {
    let mut s = arrived(RemotePrefill { alternatives: vec![other_offer(6, 8), offer(7, 6)], ..offer(5, 8) });
    s.planned(at(0));
    s.use_source(&req("r"), 2).unwrap();
    assert_eq!(s.sources(&req("r")), [peer(), peer(), other_peer()]);
    assert_eq!(s.remote_tokens(&req("r"), 0), 6, "answered for the one that was chosen");
    assert_eq!(s.next_deadline(), Some(at(QUEUE_MS)), "no wait is prolonged");
    allocate(&mut s, 1, 0).unwrap();
    assert_eq!(s.planned(at(1)), consumer(&[common::load_to(6, 1, 7, 0, run(20, 2), run(40, 2))]));
    report(&mut s, 2, 1, failed(LoadFailure::PeerLost));
    assert_eq!(failure(&mut s), (0, vec![peer(), other_peer()]));
    let before = format!("{s:?}");
    let refused = SchedError::NoSuchSource { request: req("r"), asked: 2, held: 2 };
    assert_eq!(s.use_source(&req("r"), 2), Err(refused));
    let refused = SchedError::NoSuchSource { request: req("x"), asked: 0, held: 0 };
    assert_eq!(s.use_source(&req("x"), 0), Err(refused));
    assert_eq!(format!("{s:?}"), before);
    s.use_source(&req("r"), 1).unwrap();
    assert_eq!(s.sources(&req("r")), [other_peer(), peer()]);
}

// H-19, H-20, H-29
#[test]
fn p3_when_workers_are_silent_the_next_producers_load_gets_other_blocks() {
    let mut s = arrived(two_offers());
    load(&mut s);
    s.time_passed(at(1 + LOAD_MS));
    s.time_passed(at(1 + LOAD_MS + GRACE_MS));
    let events = s.take_events();
    let [
        SchedEvent::WorkersSilent { .. },
        SchedEvent::LoadEnded { result: LoadResult::Failed { hold: Some(hold), others, .. }, .. },
    ] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((*hold, others.clone()), (load_hold(1), vec![other_peer()]));
    s.blocks_allocated(at(5_000), &req("r"), 0, 8, &[run(50, 2)]).unwrap();
    assert_eq!(s.holds(), 2);
    report(&mut s, 5_001, 2, loaded(1));
    assert!(matches!(s.take_events()[..], [SchedEvent::LoadEnded { result: LoadResult::Loaded { .. }, .. }]));
    report(&mut s, 5_002, 1, failed(LoadFailure::Cancelled));
    assert_eq!(s.take_events(), [blocks_released(load_hold(1), "r", run(40, 2))]);
    finish(&mut s);
    s.planned(at(5_003));
    assert_forgotten(&s);
}

#[test]
fn a_request_that_loses_its_blocks_between_two_loads_keeps_its_sources() {
    let mut s = arrived(two_offers());
    fail(&mut s);
    // The failure was not told yet; it is told by the preemption.
    assert_eq!(s.request_preempted(at(3), &req("r")), Verdict::Free);
    assert_eq!((s.take_events(), s.remote_tokens(&req("r"), 0)), (vec![], 8));
    allocate(&mut s, 4, 0).unwrap();
    assert_eq!(s.request_preempted(at(5), &req("r")), Verdict::Hold(HoldId::Load(LoadId(2))));
    assert_eq!(s.remote_tokens(&req("r"), 0), 0);
}
