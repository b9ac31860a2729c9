//! Simulated worlds: fixed seeds, new ones, and canaries that must die.
#![allow(clippy::unwrap_used, clippy::panic)] // A failed check is a failed test.

use std::collections::BTreeSet;

use kv_testkit::sim::{Canary, FaultKind, FaultPlan, Invariant, Outcome, Settings, run};

/// Worlds in which a canary must be noticed.
const PATIENCE: u64 = 1_000;

fn assert_good(seed: u64) -> Outcome {
    let outcome = run(seed, &Settings::default());
    assert!(
        outcome.violations.is_empty() && outcome.healed,
        "seed {seed}: {:?}; see it with: kvx sim --seeds {seed} --trace",
        outcome.violations
    );
    outcome
}

// H-3, H-11, H-13, H-18, H-28
#[test]
fn p1_to_p8_hold_in_every_world_and_every_fault_strikes() {
    let (mut loaded, mut struck) = (0, BTreeSet::new());
    let (mut read_back, mut cache_hits, mut retried, mut recovered, mut refused) = (0, 0, 0, 0, 0);
    for seed in 0..3_000 {
        let outcome = assert_good(seed);
        loaded += outcome.loaded;
        cache_hits += outcome.cache_hits;
        read_back += outcome.read_back;
        retried += outcome.retried;
        recovered += outcome.recovered;
        refused += outcome.refused;
        struck.extend(outcome.struck.keys().copied());
    }
    assert!(loaded > 3_000, "only {loaded} loads ended well: the worlds show too little");
    assert!(cache_hits > 1_000, "only {cache_hits} blocks were found in caches");
    assert!(read_back > 500, "producers read back only {read_back} answers");
    assert!(retried > 100 && recovered > 0, "of {retried} further attempts {recovered} ended well");
    assert!(refused > 100, "breakers kept only {refused} loads back");
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

// H-28
#[test]
fn reads_are_corrupted_in_silence_only_where_digests_are_compared() {
    let (mut corrupted, mut loaded) = (0, 0);
    for seed in 0..600 {
        let drawn = run(seed, &Settings { requests: Some(0), ..Settings::default() }).faults;
        let corrupts = drawn.kinds().any(|kind| kind == FaultKind::ReadCorrupt);
        let alone = FaultKind::ALL.iter().filter(|kind| **kind != FaultKind::ReadCorrupt);
        let faults = alone.fold(drawn, |plan, kind| plan.without(*kind));
        let outcome = run(seed, &Settings { faults: Some(faults), ..Settings::default() });
        assert!(outcome.violations.is_empty(), "seed {seed}: {:?}", outcome.violations);
        assert_eq!(outcome.failed > 0, outcome.struck.contains_key(&FaultKind::ReadCorrupt), "seed {seed}");
        assert!(corrupts || outcome.failed == 0, "seed {seed}");
        corrupted += outcome.struck.values().sum::<u64>();
        loaded += outcome.loaded;
    }
    assert!(corrupted > 30 && loaded > corrupted, "{corrupted} reads of {loaded} loads were corrupted");
}

#[test]
fn every_canary_is_noticed() {
    let mut by = BTreeSet::new();
    for canary in Canary::ALL {
        let settings = Settings { canary: Some(*canary), ..Settings::default() };
        let seen = |seed| run(seed, &settings).violations.into_iter().map(|violation| violation.invariant);
        let Some(killer) = (0..PATIENCE).find(|seed| seen(*seed).next().is_some()) else {
            panic!("{} lives", canary.name())
        };
        by.extend((0..20).chain([killer]).flat_map(seen));
    }
    assert!(Canary::ALL.len() >= 30);
    for needed in Invariant::ALL {
        assert!(by.contains(needed), "{} notices nothing", needed.name());
    }
}
