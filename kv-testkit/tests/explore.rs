//! The explorer: every order of events within bounds, and mutants that it must notice.
#![allow(clippy::unwrap_used, clippy::panic)] // A failed check is a failed test.
#![allow(clippy::print_stdout)] // The number of states is part of what is shown.

use kv_testkit::explore::{Bounds, Found, Mutant, explore};

fn told(name: &str, found: &Found) {
    println!(
        "{name}: {} states, {} steps, longest story {}, {}; {} with a good load, {} with a failed one",
        found.states,
        found.steps,
        found.longest,
        if found.complete { "complete" } else { "bounded" },
        found.loaded,
        found.failed
    );
}

fn assert_clean(name: &str, bounds: Bounds) {
    let found = explore(bounds, None);
    told(name, &found);
    if let Some((story, what)) = &found.violation {
        panic!("{name}: {what}\n  {}", story.join("\n  "));
    }
    assert!(found.loaded > 0 && found.failed > 0, "{name}: the model shows too little");
}

#[test]
fn one_request_one_rank() {
    assert_clean("one request, one rank", Bounds { states: 30_000, ..Bounds::small() });
}

#[test]
fn one_request_two_ranks() {
    let bounds =
        Bounds { ranks: 2, losses: 0, repeats: 0, aborts: 0, jumps: 1, states: 15_000, ..Bounds::small() };
    assert_clean("one request, two ranks", bounds);
}

#[test]
fn two_requests() {
    let bounds = Bounds {
        requests: 2,
        repeats: 0,
        jumps: 1,
        aborts: 1,
        crashes: 0,
        states: 15_000,
        ..Bounds::small()
    };
    assert_clean("two requests, one rank", bounds);
}

#[test]
fn a_missing_guard_is_found_by_a_shortest_story() {
    let cases = [
        (Mutant::NoConfirmation, Bounds::small()),
        (Mutant::FreedAtFinish, Bounds::small()),
        (Mutant::FreedOnAbort, Bounds::small()),
        (Mutant::FreedByFirstRank, Bounds { ranks: 2, losses: 0, repeats: 0, ..Bounds::small() }),
    ];
    for (mutant, bounds) in cases {
        let found = explore(bounds, Some(mutant));
        let Some((story, what)) = found.violation else { panic!("{mutant:?} lives") };
        println!("{mutant:?}: {what}, after {} steps:\n  {}", story.len(), story.join("\n  "));
        assert!(story.len() < 25);
    }
}
