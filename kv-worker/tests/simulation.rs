//! Two engines under faults in any order, judged by the bytes that arrive; then the faults stop, and all must heal.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::pair::Pair;
use kv_proto::LoadFailure;
use proptest::prelude::*;

const PROMPTS: u32 = 4;
const REQUESTS: u32 = 5;

#[derive(Debug, Clone, Copy)]
enum Step {
    PStarts(u32),
    PFinishes(u32),
    DStarts(u32, usize),
    DAllocates(u32),
    DEnds(u32),
    CarryPlan(bool),
    CarryReport(bool),
    EndDial(bool),
    Deliver(usize),
    Lose(usize),
    EndRead(usize, bool),
    /// Only with checksums: without them nobody would notice.
    Spoil(usize),
    EndDigest,
    Cut(usize),
    Pass(u64),
    Settle,
    RestartP,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..PROMPTS).prop_map(Step::PStarts),
        8 => (0..PROMPTS).prop_map(Step::PFinishes),
        8 => (0..REQUESTS, 0..6usize).prop_map(|(r, offer)| Step::DStarts(r, offer)),
        10 => (0..REQUESTS).prop_map(Step::DAllocates),
        5 => (0..REQUESTS).prop_map(Step::DEnds),
        10 => any::<bool>().prop_map(Step::CarryPlan),
        8 => any::<bool>().prop_map(Step::CarryReport),
        6 => prop::bool::weighted(0.8).prop_map(Step::EndDial),
        16 => (0..3usize).prop_map(Step::Deliver),
        2 => (0..3usize).prop_map(Step::Lose),
        10 => (0..3usize, prop::bool::weighted(0.8)).prop_map(|(read, ok)| Step::EndRead(read, ok)),
        1 => (0..3usize).prop_map(Step::Spoil),
        6 => Just(Step::EndDigest),
        2 => (0..2usize).prop_map(Step::Cut),
        4 => (0..300u64).prop_map(Step::Pass),
        1 => (0..3_000u64).prop_map(Step::Pass),
        10 => Just(Step::Settle),
        1 => Just(Step::RestartP),
    ]
}

fn apply(pair: &mut Pair, step: Step) {
    match step {
        Step::PStarts(n) => pair.p_starts(n),
        Step::PFinishes(n) => pair.p_finishes(n),
        Step::DStarts(r, offer) => {
            // The newest offers are the likely ones; an old one may come again.
            let index = pair.offers.len().saturating_sub(offer + 1);
            pair.d_starts(r, index);
        }
        Step::DAllocates(r) => pair.d_allocates(r),
        Step::DEnds(r) => pair.d_ends(r),
        Step::CarryPlan(p) => pair.carry_plan(p),
        Step::CarryReport(p) => pair.carry_report(p),
        Step::EndDial(reachable) => pair.end_dial(reachable),
        Step::Deliver(index) => pair.deliver(index),
        Step::Lose(index) => drop(pair.wire.remove(index)),
        Step::EndRead(index, ok) => {
            if let Some(load) = pair.reads.keys().nth(index).copied() {
                pair.end_read(load, if ok { Ok(()) } else { Err(LoadFailure::ReadFailed) });
            }
        }
        Step::Spoil(index) => {
            if let Some(load) = pair.reads.keys().nth(index).copied().filter(|_| pair.checksums) {
                pair.end_read_spoilt(load);
            }
        }
        Step::EndDigest => pair.end_digest(),
        Step::Cut(index) => {
            if let Some(link) = pair.links.keys().nth(index).copied() {
                pair.cut(link);
            }
        }
        Step::Pass(span) => pair.pass(span),
        Step::Settle => pair.settle(),
        Step::RestartP => pair.restart_p(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    // H-18, H-19
    #[test]
    fn p1_p3_p6_no_wrong_byte_counts_and_everything_heals(steps in prop::collection::vec(step(), 0..150)) {
        let mut pair = Pair::new();
        for step in steps {
            apply(&mut pair, step);
        }
        pair.heal(PROMPTS, REQUESTS);
    }

    // H-18, H-28
    #[test]
    fn p1_p6_with_checksums_no_spoilt_byte_counts_either(steps in prop::collection::vec(step(), 0..150)) {
        let mut pair = Pair::with_checksums(true);
        for step in steps {
            apply(&mut pair, step);
        }
        pair.heal(PROMPTS, REQUESTS);
    }
}
