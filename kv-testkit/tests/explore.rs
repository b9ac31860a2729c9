//! The explorer: every order of events within bounds, and mutants that it must notice.
#![allow(clippy::unwrap_used, clippy::panic)] // A failed check is a failed test.
#![allow(clippy::print_stdout)] // The number of states is part of what is shown.

use std::time::Instant;

use kv_testkit::explore::{Bounds, Found, Mutant, explore};

fn explored(bounds: &Bounds) -> Found {
    let started = Instant::now();
    let found = explore(bounds, None);
    println!(
        "{}, {} faults, {} jumps: {} states, {} steps, longest story {}, {}; {} steps with a good load, {} with a \
         failed one; {} states came to rest; {} machines; {:.1} s",
        bounds.name,
        bounds.faults,
        bounds.jumps,
        found.states,
        found.steps,
        found.longest,
        if found.complete { "complete" } else { "bounded" },
        found.loaded,
        found.failed,
        found.calm,
        found.machines,
        started.elapsed().as_secs_f64(),
    );
    if let Some((story, what)) = &found.violation {
        panic!("{}: {what}\n  {}", bounds.name, story.join("\n  "));
    }
    assert!(found.states > 0);
    assert!(found.loaded > 0, "a model in which no load ends well shows nothing");
    assert!(found.failed > 0, "a model in which no load fails shows little");
    found
}

// P1 to P7: the small bound, to its end.
#[test]
fn no_order_of_events_breaks_a_promise() {
    for bounds in Bounds::small() {
        assert!(explored(bounds).complete, "{} was not explored to its end", bounds.name);
    }
}

/// The full bounds, in minutes on two cores:
///
/// ```text
/// cargo test --release -p kv-testkit --test explore -- --ignored --nocapture
/// ```
///
/// `kvx explore --bounds full` explores the same.
#[test]
#[ignore = "takes minutes; see its comment"]
fn no_order_of_more_events_breaks_a_promise() {
    let Some((longest, others)) = Bounds::full().split_first() else { panic!("there are no bounds") };
    std::thread::scope(|scope| {
        scope.spawn(|| explored(longest));
        for bounds in others {
            explored(bounds);
        }
    });
}

#[test]
fn a_missing_guard_is_found_by_a_shortest_story() {
    for mutant in Mutant::ALL {
        let bounds = mutant.bounds();
        let sound = explore(&bounds, None);
        assert_eq!(
            sound.violation,
            None,
            "{}: within these bounds the machines keep their promises",
            mutant.name()
        );
        let found = explore(&bounds, Some(*mutant));
        let Some((story, what)) = found.violation else { panic!("{} lives, {found:?}", mutant.name()) };
        println!("{}: {what}, after {} steps:\n  {}", mutant.name(), story.len(), story.join("\n  "));
        assert!(story.len() < 40);
    }
}

#[test]
fn names_of_mutants_are_read_back() {
    for mutant in Mutant::ALL {
        assert_eq!(Mutant::from_name(mutant.name()), Some(*mutant));
    }
    assert_eq!(Mutant::from_name("none"), None);
}
