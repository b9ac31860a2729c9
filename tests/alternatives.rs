//! A prompt that two producers have computed, over real sockets: whom the consumer reads from, what becomes of the
//! other's lease, and which bytes arrive.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed check is a failed test.

mod common;

use std::time::Instant;

use common::{Offer, SOON, Shape, World, request};
use kv_connector::proto::{LoadFailure, ReleaseReason};
use kv_connector::{Config, LoadResult, Role, SchedEvent};
use serde_json::json;

/// The engines, in the order in which they are added.
const FIRST: usize = 0;
const SECOND: usize = 1;
const D: usize = 2;

/// What a router makes of two answers.
fn merged(first: &Offer, second: &Offer) -> Offer {
    first.forged(|params| params["alternatives"] = json!([second.params]))
}

/// How many loads of `r` have ended.
fn ended(world: &World) -> usize {
    world[D].log.iter().filter(|event| matches!(event, SchedEvent::LoadEnded { .. })).count()
}

fn last_end(world: &World) -> &LoadResult {
    let mut ends = world[D].log.iter().filter_map(|event| match event {
        SchedEvent::LoadEnded { result, .. } => Some(result),
        _ => None,
    });
    ends.next_back().unwrap()
}

// H-22, H-29
#[test]
fn when_the_first_producer_is_good_the_seconds_lease_is_given_back() {
    let mut world = World::of(["p-1", "p-2", "d"].map(Shape::named));
    let first = world.prefill(FIRST, "r", 12, &[5, 6, 20]);
    let second = world.prefill(SECOND, "r", 12, &[1, 2, 3]);
    world.begin_load(D, "r", &merged(&first, &second), &[0, 23, 7]);
    assert_eq!(world.expect_loaded(D, "r"), (12, 12));
    world.expect_moved(FIRST, &[5, 6, 20], D, &[0, 23, 7]);
    world[D].assert_memory();
    world.released(FIRST, first.hold);
    world.released(SECOND, second.hold);
    assert_eq!(world[FIRST].sched.stats().producer.confirmed, 1);
    let stats = world[SECOND].sched.stats().producer;
    assert_eq!((stats.released, stats.confirmed, stats.expired), (1, 0, 0));
    assert_eq!(world[D].sched.stats().consumer.released, [(ReleaseReason::NotNeeded, 1)].into());
    world.finish(D, "r");
    world.nothing_held();
}

// H-29
#[test]
fn p8_when_the_first_producer_dies_the_bytes_come_from_the_second() {
    let mut world = World::of(["p-1", "p-2", "d"].map(Shape::named));
    let first = world.prefill(FIRST, "r", 12, &[5, 6, 20]);
    let second = world.prefill(SECOND, "r", 12, &[1, 2, 3]);
    assert_eq!(world.arrive(D, "r", &merged(&first, &second)).unwrap(), Role::Consumer);
    world.kill(FIRST);
    world.allocate(D, "r", 0, &[0, 23, 7]).unwrap();
    let LoadResult::Failed { others, hold: None, valid_tokens: 0, .. } = world.load_end(D, "r") else {
        panic!("{:?}", world[D].log)
    };
    assert_eq!(others, world[D].sched.sources(&request("r")));
    assert_eq!(others.len(), 1);
    assert_eq!(others[0].incarnation, world[SECOND].identity.incarnation);

    world.allocate(D, "r", 0, &[0, 23, 7]).unwrap();
    world.until("the second load ends", SOON, |w| ended(w) == 2);
    assert!(matches!(last_end(&world), LoadResult::Loaded { tokens: 12, remote_tokens: 12, .. }));
    world.expect_moved(SECOND, &[1, 2, 3], D, &[0, 23, 7]);
    world[D].assert_memory();
    world.released(SECOND, second.hold);
    assert_eq!(world[SECOND].sched.stats().producer.confirmed, 1);
    world.finish(D, "r");
    world.nothing_held();
}

// H-11, H-27, H-29
#[test]
fn p8_what_the_first_producer_has_brought_is_not_read_again() {
    // A block at a time, so that each is checked before the next has passed the valve.
    let slow = |name| {
        let shape = Shape { valve: name == "p-1", ..Shape::slow(name) };
        Shape { config: Config { portion_bytes: 1, ..shape.config.clone() }, ..shape }
    };
    let mut world = World::of(["p-1", "p-2", "d"].map(slow));
    let (from, to): (Vec<u32>, Vec<u32>) = ((0..20).collect(), (0..20).rev().collect());
    let first = world.prefill(FIRST, "r", 80, &from);
    let second = world.prefill(SECOND, "r", 80, &from);
    world[FIRST].valves[0].allow(0);
    world.begin_load(D, "r", &merged(&first, &second), &to);
    let begun = Instant::now();
    loop {
        world[FIRST].valves[0].allow(50_000);
        world.step();
        let checked = world[FIRST].workers[0].stats().readers.checks;
        if checked >= 6 {
            break;
        }
        assert!(begun.elapsed() < SOON, "{checked} portions were checked");
    }
    // The two computed bytes that differ, so that it shows whose they are.
    world.expect_moved(FIRST, &from, D, &to);
    drop(world.kill(FIRST));
    let LoadResult::Failed { reason, valid_tokens, hold: None, .. } = world.load_end(D, "r") else {
        panic!("{:?}", world[D].log)
    };
    assert_eq!(reason, LoadFailure::PeerLost);
    assert!((16..80).contains(&valid_tokens), "{valid_tokens}");

    world.allocate(D, "r", valid_tokens, &to).unwrap();
    world.until("the second load ends", SOON, |w| ended(w) == 2);
    let LoadResult::Loaded { tokens: 80, remote_tokens, stats } = last_end(&world).clone() else {
        panic!("{:?}", world[D].log)
    };
    assert_eq!(remote_tokens, 80 - valid_tokens);
    assert_eq!(stats.bytes, u64::from(remote_tokens / 4) * world[SECOND].layout.bytes_per_block());
    let kept = (valid_tokens / 4) as usize;
    world.expect_moved(SECOND, &from[kept..], D, &to[kept..]);
    world[D].assert_memory();
    world.released(SECOND, second.hold);
    assert_eq!(world[SECOND].sched.stats().producer.confirmed, 1);
    world.finish(D, "r");
    world.nothing_held();
}

// H-3, H-22
#[test]
fn an_offer_that_cannot_be_read_is_named_and_the_others_are_given_back() {
    let mut world = World::of(["p-1", "p-2", "d"].map(Shape::named));
    let first = world.prefill(FIRST, "r", 8, &[5, 6]);
    let second = world.prefill(SECOND, "r", 8, &[1, 2]);
    let bad = merged(&first, &second).forged(|params| {
        let mut third = second.params.clone();
        third["remote_port"] = json!(70_000);
        params["alternatives"].as_array_mut().unwrap().push(third);
    });
    let error = world.arrive(D, "r", &bad).unwrap_err().to_string();
    assert!(error.contains("alternatives[1].remote_port is 70000"), "{error}");
    world.released(FIRST, first.hold);
    world.released(SECOND, second.hold);
    for p in [FIRST, SECOND] {
        assert_eq!(world[p].sched.stats().producer.released, 1);
    }
    assert_eq!(world[D].sched.stats().consumer.released, [(ReleaseReason::Refused, 2)].into());
    world.nothing_held();
}
