//! Processes that die, and peers that never answer: every load ends with a reason, every block comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed check is a failed test.

mod common;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use common::{D, Engine, Offer, P, SOON, Shape, World, config, request};
use kv_connector::proto::{LeaseId, LoadFailure};
use kv_connector::{Config, ConnectorError, HoldId, LoadResult, RequestEnd, SchedEvent, Verdict};
use serde_json::json;

const TO: [u32; 6] = [20, 21, 22, 3, 2, 1];

/// A port that the system gives to nobody who does not ask for it by number.
fn start_at_a_port_of_its_own(world: &mut World, engine: usize, shape: Shape) -> Shape {
    let first = 20_000 + (std::process::id() % 5_000) as u16;
    for handshake_port in first..first + 500 {
        let shape = Shape { config: Config { handshake_port, ..shape.config.clone() }, ..shape.clone() };
        let seed = world.seed();
        match Engine::start(shape.clone(), seed, &world.signal) {
            Ok(started) => {
                world[engine] = started;
                return shape;
            }
            Err(ConnectorError::Listen(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("no port is free");
}

fn slow_pair() -> World {
    World::of([Shape::slow("p"), Shape { valve: false, ..Shape::slow("d") }])
}

/// A read that has begun and cannot end.
fn caught_in_the_middle(world: &mut World) -> Offer {
    for valve in &world[P].valves {
        valve.allow(100_000);
    }
    let offer = world.prefill(P, "r", 24, &[0, 1, 2, 3, 4, 5]);
    world.begin_load(D, "r", &offer, &TO);
    world.until("the read is under way", SOON, |w| w[P].valves.iter().all(|valve| valve.is_stuck()));
    offer
}

// H-1, H-5, R034
#[test]
fn a_producer_that_dies_while_it_is_read_fails_the_load_and_its_next_life_serves() {
    // A peer that failed is asked again at once, so that the answer to old parameters is not the old failure.
    let impatient = Config { retry_min_ms: 1, retry_max_ms: 1, ..config("d") };
    let consumer = Shape { config: impatient, valve: false, ..Shape::slow("d") };
    let mut world = World::of([Shape::slow("p"), consumer]);
    let shape = start_at_a_port_of_its_own(&mut world, P, Shape::slow("p"));
    let life = world[P].identity.incarnation;
    let old = caught_in_the_middle(&mut world);
    let begun = Instant::now();
    let valves = world.kill(P);
    valves[0].cut();
    let (reason, detail) = world.expect_failed(D, "r");
    assert_eq!(reason, LoadFailure::PeerLost, "{detail}");
    // Nothing had to run out of time.
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    world.finish(D, "r");
    world.nothing_held();
    drop(valves);

    world.revive(P, shape);
    let reborn = world[P].identity.incarnation;
    assert_ne!(reborn, life);
    // A lease of the same number, on the same blocks, with other bytes.
    let new = world.prefill(P, "new", 24, &[0, 1, 2, 3, 4, 5]);
    assert_eq!((old.hold, new.hold), (HoldId::Lease(LeaseId(1)), HoldId::Lease(LeaseId(1))));
    world.begin_load(D, "old", &old, &TO);
    let (reason, detail) = world.expect_failed(D, "old");
    assert_eq!(reason, LoadFailure::WrongPeer, "{detail}");
    let words = format!("wanted engine p in life {life}, but p in life {reborn} answers");
    assert!(detail.contains(&words), "{detail}");
    world.finish(D, "old");

    world.begin_load(D, "new", &new, &TO);
    world.expect_loaded(D, "new");
    world.expect_moved(P, &new.blocks, D, &TO);
    world[D].assert_memory();
    world.finish(D, "new");
    world.released(P, new.hold);
    world.hand_over(P, D, "next");
}

// H-19, H-20, R012, R036, R086
#[test]
fn a_producer_that_falls_silent_while_it_is_read_fails_the_load_within_its_limits() {
    let mut world = slow_pair();
    caught_in_the_middle(&mut world);
    let begun = Instant::now();
    // Its connections stand, but nothing comes any more.
    let valves = world.kill(P);
    let (reason, detail) = world.expect_failed(D, "r");
    assert!(matches!(reason, LoadFailure::ReadTimedOut | LoadFailure::PeerLost), "{reason:?}: {detail}");
    // Two seconds without a byte; the rest is for a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    world.finish(D, "r");
    world.nothing_held();
    // What was on its way arrives after all, at blocks that have a new owner.
    let seed = world.seed();
    world[D].stamp(seed, &TO);
    valves[0].allow_all();
    world.revive(P, Shape::slow("p"));
    world.hand_over(P, D, "next");
    world[D].assert_memory();
}

// H-19
#[test]
fn a_producer_whose_memory_cannot_be_read_finds_that_out_by_itself() {
    let mut world = slow_pair();
    // The consumer's read stalls on the way, and so does the producer's read of itself.
    let offer = caught_in_the_middle(&mut world);
    let (reason, detail) = world.expect_failed(D, "r");
    assert_eq!(reason, LoadFailure::ReadTimedOut, "{detail}");
    world.finish(D, "r");
    world.until("the self check has failed", 2 * SOON, |w| {
        let readers = w[P].workers[0].stats().readers;
        (readers.loads_failed, readers.self_checks, readers.self_checks_failed) == (1, 1, 1)
    });
    assert_eq!(world[P].workers[0].stats().readers.expelled, 0, "it did not let itself go");
    world.released(P, offer.hold);
    world[P].valves[0].allow_all();
    world.hand_over(P, D, "next");
}

// H-18, H-20
#[test]
fn a_producer_that_dies_before_it_has_confirmed_fails_the_load_although_every_byte_is_here() {
    let mut world =
        World::of([Shape { ranks: 2, ..Shape::named("p") }, Shape { ranks: 2, ..Shape::named("d") }]);
    world.begin_prefill(P, "r", 12);
    world.step();
    world[P].hold_back = true;
    let offer = world.end_prefill(P, "r", 12, &[5, 6, 20]);
    world.begin_load(D, "r", &offer, &[0, 1, 2]);
    world.until("both ranks have read and asked", SOON, |w| {
        w[P].workers.iter().all(|worker| worker.stats().ledger.early > 0)
    });
    let begun = Instant::now();
    drop(world.kill(P));
    let (reason, detail) = world.expect_failed(D, "r");
    assert_eq!(reason, LoadFailure::ConfirmTimedOut, "{detail}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    world.finish(D, "r");
    world.nothing_held();
    world.revive(P, Shape { ranks: 2, ..Shape::named("p") });
    world.hand_over(P, D, "next");
}

// H-17
#[test]
fn a_rank_that_dies_fails_the_load_and_its_leases_are_reported() {
    let brief = Config { lease_ttl_ms: 500, lease_renewal_ms: 500, lease_max_ms: 1_000, ..config("p") };
    let brief = Config { report_grace_ms: 300, ..brief };
    let shape = Shape { ranks: 2, config: brief, ..Shape::named("p") };
    let mut world = World::of([shape, Shape { ranks: 2, ..Shape::named("d") }]);
    let offer = world.prefill(P, "r", 12, &[5, 6, 20]);
    world[P].workers[1].shut_down(Duration::from_secs(1));
    world.begin_load(D, "r", &offer, &[0, 1, 2]);
    let (reason, detail) = world.expect_failed(D, "r");
    assert_eq!(reason, LoadFailure::ConnectFailed, "{detail}");
    world.finish(D, "r");
    // Nobody can say that the dead rank's blocks are not read, so that they stay, and somebody is told.
    world.until("the engine is told", SOON, |w| {
        w[P].log.iter().any(|event| {
            matches!(event, SchedEvent::WorkersSilent { hold, missing }
                if *hold == offer.hold && missing.iter().map(|r| r.0).eq([1]))
        })
    });
    assert!(!world[P].is_released(offer.hold));
    assert_eq!(world[D].sched.stats().holds, 0);
}

// H-20, R035, R036, R043, R078
#[test]
fn a_producer_that_never_answers_delays_nobody_else() {
    let hole = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut world = World::of([Shape::named("p"), Shape::named("d")]);
    let port = hole.local_addr().unwrap().port();
    let first = world.prefill(P, "dark-0", 11, &[7, 3, 4]);
    for i in 0..8 {
        // Another life each time, so that they do not share one handshake.
        let life = format!("{i:016x}");
        let dark = first.forged(|p| {
            p["remote_port"] = json!(port);
            p["kv_connector"]["incarnation"] = json!(life);
        });
        world.begin_load(D, &format!("dark-{i}"), &dark, &[2, 9, 1]);
    }
    for i in 0..10 {
        world.hand_over_beside(P, D, &format!("good-{i}"), &[20, 12, 11]);
    }
    assert!(
        (0..8).all(|i| world[D].load_result(&format!("dark-{i}")).is_none()),
        "the good loads waited for the bad ones"
    );
    for i in 0..8 {
        let name = format!("dark-{i}");
        let LoadResult::Failed { reason, detail, hold: None, .. } = world.load_end(D, &name) else {
            panic!()
        };
        assert_eq!(reason, LoadFailure::HandshakeUnreachable, "{detail}");
        assert!(detail.contains("limit 2s") && detail.contains(&port.to_string()), "{detail}");
        world.finish(D, &name);
    }
    world.begin_load(D, "first", &first, &[2, 9, 1]);
    world.expect_loaded(D, "first");
    world.finish(D, "first");
    world.nothing_held();
}

// H-12, H-25, R011, R031
#[test]
fn a_consumer_that_dies_costs_its_producer_a_grace_and_no_more() {
    // Whatever a lease's own time is, its blocks are back when the consumer has been gone for the grace.
    let brief =
        Config { lease_ttl_ms: 600_000, lease_renewal_ms: 600_000, lease_grace_ms: 300, ..config("p") };
    let mut world =
        World::of([Shape { config: brief, ..Shape::slow("p") }, Shape { valve: false, ..Shape::slow("d") }]);
    // One lease is queued, one is being read.
    let queued = world.prefill(P, "queued", 11, &[10, 11, 12]);
    world.arrive(D, "queued", &queued).unwrap();
    let read = caught_in_the_middle(&mut world);
    assert!(!world[P].is_released(queued.hold) && !world[P].is_released(read.hold));
    drop(world.kill(D));
    world.released(P, queued.hold);
    world.released(P, read.hold);
    assert_eq!(world[P].sched.stats().producer.consumer_lost, 2);
    world.nothing_held();
    world[P].valves[0].allow_all();
    world.revive(D, Shape { valve: false, ..Shape::slow("d") });
    world.hand_over(P, D, "next");
}

// R107, R108
#[test]
fn a_worker_shuts_down_within_its_limit_with_reads_in_flight() {
    for who in [D, P] {
        let mut world = slow_pair();
        caught_in_the_middle(&mut world);
        let limit = Duration::from_secs(2);
        let begun = Instant::now();
        world[who].workers[0].shut_down(limit);
        // The limit is for what has to be waited for, and nothing has to be.
        assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
        let error = world[who].workers[0].begin_step(&kv_connector::proto::Plan::default().encode().unwrap());
        assert_eq!(error.unwrap_err().to_string(), "the worker has ended");
        world[P].valves[0].allow_all();
        let (reason, detail) = world.expect_failed(D, "r");
        match who {
            D => assert_eq!(reason, LoadFailure::Closed, "{detail}"),
            // It depends on how much of the read was on its way already.
            _ => assert!(
                matches!(reason, LoadFailure::PeerLost | LoadFailure::ConfirmTimedOut),
                "{reason:?}: {detail}"
            ),
        }
        world.finish(D, "r");
        world.until("nothing is held here", SOON, |w| w[D].sched.stats().holds == 0);
    }
}

// R108
#[test]
fn dropping_engines_in_the_middle_of_everything_ends_soon() {
    let mut world = slow_pair();
    caught_in_the_middle(&mut world);
    let begun = Instant::now();
    let valves = world.kill(D);
    drop(world.kill(P));
    drop(valves);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

// H-20, R012
#[test]
fn workers_that_say_nothing_do_not_keep_a_request_waiting() {
    let strict = Config {
        peer_wait_ms: 200,
        read_limit_ms: 200,
        stall_limit_ms: 200,
        confirm_limit_ms: 200,
        load_limit_ms: 800,
        report_grace_ms: 300,
        ..config("d")
    };
    let mut world = World::of([Shape::named("p"), Shape { config: strict, ..Shape::named("d") }]);
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    world.arrive(D, "r", &offer).unwrap();
    // The engine's plans no longer reach its workers.
    world[D].hold_back = true;
    world.allocate(D, "r", 0, &[2, 9, 1]).unwrap();
    let LoadResult::Failed { reason, detail, hold: Some(hold), .. } = world.load_end(D, "r") else {
        panic!("{:?}", world[D].log)
    };
    assert_eq!(reason, LoadFailure::ReportMissing, "{detail}");
    assert!(detail.contains("no report from [Rank(0)]"), "{detail}");
    let end = RequestEnd::Aborted;
    assert_eq!(world[D].sched.request_finished(&request("r"), &end).verdict, Verdict::Free);
    assert!(!world[D].is_released(hold), "nobody knows that these blocks are quiet");
    // They find back to each other.
    world[D].hold_back = false;
    world.released(D, hold);
    world[D].assert_memory_except(&[2, 9, 1]);
    world.released(P, offer.hold);
    world.nothing_held();
}

// H-27, P8
#[test]
fn of_a_load_that_breaks_near_its_end_only_the_end_is_lost() {
    // A block at a time, so that each is checked before the next has passed the valve.
    let slow = |name| {
        let shape = Shape::slow(name);
        Shape { config: Config { portion_bytes: 1, ..shape.config.clone() }, ..shape }
    };
    let mut world = World::of([slow("p"), Shape { valve: false, ..slow("d") }]);
    let from: Vec<u32> = (0..20).collect();
    let to: Vec<u32> = (0..20).rev().collect();
    let offer = world.prefill(P, "r", 80, &from);
    for valve in &world[P].valves {
        valve.allow(0);
    }
    world.begin_load(D, "r", &offer, &to);
    // Everything passes, piece by piece, until nine tenths are here and confirmed.
    let begun = Instant::now();
    loop {
        for valve in &world[P].valves {
            valve.allow(50_000);
        }
        world.step();
        let done = world[D].load_result("r").is_some();
        let kept = world[P].workers.iter().map(|w| w.stats().readers.checks).min().unwrap_or(0);
        if kept >= 18 || done {
            break;
        }
        assert!(begun.elapsed() < SOON, "{kept} portions were checked");
    }
    for valve in &world[P].valves {
        valve.cut();
    }
    match world.load_end(D, "r") {
        LoadResult::Failed { valid_tokens, invalid, hold: None, .. } => {
            assert!((68..80).contains(&valid_tokens), "{valid_tokens} of 80 tokens are kept");
            assert_eq!(invalid[0].len(), 20 - valid_tokens / 4);
            assert_eq!(u64::from(valid_tokens), world[D].sched.stats().consumer.kept_tokens);
        }
        other => panic!("{other:?}"),
    }
}
