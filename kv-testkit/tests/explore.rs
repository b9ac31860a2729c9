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

/// Nothing but the two engines and time: small enough for every test run.
const QUIET: Bounds =
    Bounds { losses: 0, repeats: 0, aborts: 0, crashes: 0, jumps: 1, states: 6_000, ..Bounds::small() };

#[test]
fn no_order_of_events_breaks_a_promise() {
    let found = explore(QUIET, None);
    told("one request, one rank", &found);
    if let Some((story, what)) = &found.violation {
        panic!("{what}\n  {}", story.join("\n  "));
    }
    assert!(found.loaded > 0, "a model in which no load ends well shows nothing");
}

#[test]
fn a_missing_guard_is_found_by_a_shortest_story() {
    let cases = [
        (Mutant::NoConfirmation, QUIET),
        (Mutant::FreedAtFinish, QUIET),
        (Mutant::FreedOnAbort, Bounds { aborts: 1, jumps: 0, ..QUIET }),
    ];
    for (mutant, bounds) in cases {
        let found = explore(bounds, Some(mutant));
        let Some((story, what)) = found.violation else { panic!("{mutant:?} lives") };
        println!("{mutant:?}: {what}, after {} steps:\n  {}", story.len(), story.join("\n  "));
        assert!(story.len() < 25);
    }
}
