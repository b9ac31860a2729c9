//! Simulated worlds: fixed seeds, new ones, and canaries that must die.
#![allow(clippy::unwrap_used, clippy::panic)] // A failed check is a failed test.

use std::collections::BTreeSet;

use kv_testkit::sim::{Canary, FaultKind, FaultPlan, Invariant, Settings, run};

/// Worlds in which a canary must be noticed.
const PATIENCE: u64 = 1_000;

fn assert_good(seed: u64) -> (u64, BTreeSet<FaultKind>) {
    let outcome = run(seed, &Settings::default());
    assert!(
        outcome.violations.is_empty() && outcome.healed,
        "seed {seed}: {:?}; see it with: kvx sim --seeds {seed} --trace",
        outcome.violations
    );
    (outcome.loaded, outcome.struck.keys().copied().collect())
}

// H-3, H-11, H-13, H-18
#[test]
fn p1_to_p8_hold_in_every_world_and_every_fault_strikes() {
    let (mut loaded, mut struck) = (0, BTreeSet::new());
    for seed in 0..3_000 {
        let (good, faults) = assert_good(seed);
        loaded += good;
        struck.extend(faults);
    }
    assert!(loaded > 3_000, "only {loaded} loads ended well: the worlds show too little");
    let silent: Vec<&str> = FaultKind::ALL.iter().filter(|k| !struck.contains(k)).map(|k| k.name()).collect();
    assert!(silent.is_empty(), "never struck: {silent:?}");
}

#[test]
fn worlds_that_nobody_has_seen_are_good_too() {
    let start = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() * 1_000;
    for seed in start..start + 1_000 {
        assert_good(seed);
    }
}

#[test]
fn the_same_seed_is_the_same_world() {
    for seed in [3, 14, 29] {
        let told = || run(seed, &Settings { trace: true, ..Settings::default() }).story;
        let story = told();
        assert!(story.len() > 10);
        assert_eq!(story, told());
    }
}

// H-12
#[test]
fn without_faults_nothing_fails() {
    let mut loaded = 0;
    for seed in 0..500 {
        let calm = Settings { faults: Some(FaultPlan::none()), ..Settings::default() };
        let outcome = run(seed, &calm);
        assert!(outcome.violations.is_empty(), "seed {seed}: {:?}", outcome.violations);
        assert_eq!(outcome.failed, 0, "seed {seed}");
        loaded += outcome.loaded;
    }
    assert!(loaded > 500);
}

#[test]
fn every_canary_is_noticed() {
    let mut by = BTreeSet::new();
    for canary in Canary::ALL {
        let settings = Settings { canary: Some(*canary), ..Settings::default() };
        let killer = (0..PATIENCE).find_map(|seed| run(seed, &settings).violations.into_iter().next());
        let Some(violation) = killer else { panic!("{} lives", canary.name()) };
        by.insert(violation.invariant);
    }
    assert!(Canary::ALL.len() >= 30);
    for needed in Invariant::ALL {
        assert!(by.contains(needed), "{} notices nothing", needed.name());
    }
}
