//! An engine that is asked to go, over real sockets: it says when nobody reads from it any more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed check is a failed test.

mod common;

use std::time::Duration;

use common::{D, Engine, P, SOON, Shape, World};
use kv_connector::proto::LoadFailure;
use kv_connector::{Remaining, SchedEvent};

fn drained(engine: &Engine) -> Option<Remaining> {
    engine.log.iter().find_map(|event| match event {
        SchedEvent::Drained { left } => Some(*left),
        _ => None,
    })
}

// H-26, R107
#[test]
fn r107_a_producer_that_goes_waits_for_its_readers_and_then_refuses_handshakes() {
    let mut world = World::of([Shape::named("p"), Shape::named("d"), Shape::named("late")]);
    let offer = world.prefill(P, "r", 11, &[10, 11, 12]);
    let other = world.prefill(P, "other", 11, &[13, 14, 15]);
    world[P].sched.drain(SOON);
    assert_eq!(world[P].sched.remaining().leases, 2);
    // D has never spoken to P, and may still do so for what P has promised.
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[10, 11, 12], D, &[2, 9, 1]);
    assert_eq!(drained(&world[P]), None, "another lease is left");
    world.begin_load(D, "other", &other, &[3, 4, 5]);
    world.expect_loaded(D, "other");
    world.expect_moved(P, &[13, 14, 15], D, &[3, 4, 5]);
    world.until("P has drained", SOON, |w| drained(&w[P]).is_some());
    assert_eq!(drained(&world[P]), Some(Remaining::default()));
    world.begin_load(2, "stranger", &offer, &[2, 9, 1]);
    let (reason, detail) = world.expect_failed(2, "stranger");
    assert_eq!(reason, LoadFailure::HandshakeRefused, "{detail}");
    world[P].sched.resume();
    world.hand_over(P, D, "again");
}

// H-26
#[test]
fn what_a_reader_has_not_read_at_the_limit_is_taken_back_and_the_reader_is_told() {
    let mut world = World::of([Shape::named("p"), Shape::named("d")]);
    world.hand_over(P, D, "acquaintance");
    let offer = world.prefill(P, "r", 11, &[10, 11, 12]);
    world.arrive(D, "r", &offer).unwrap();
    world[P].sched.drain(Duration::ZERO);
    world.released(P, offer.hold);
    world.until("P has drained", SOON, |w| drained(&w[P]).is_some());
    assert_eq!(drained(&world[P]), Some(Remaining::default()));
    assert_eq!(world[P].sched.stats().producer.revoked, 1);
    world.allocate(D, "r", 0, &[2, 9, 1]).unwrap();
    assert_eq!(world.expect_failed(D, "r").0, LoadFailure::Lapsed);
    world.nothing_held();
}

// H-26
#[test]
fn an_engine_that_comes_back_at_once_can_be_shaken_hands_with() {
    let mut world = World::of([Shape::named("p"), Shape::named("d")]);
    world[P].sched.drain(Duration::ZERO);
    world[P].sched.resume();
    world.step();
    world.hand_over(P, D, "r");
}
