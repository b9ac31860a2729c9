//! Whole hand-overs between engines, over real sockets, judged by the bytes that arrive.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed check is a failed test.

mod common;

use std::time::{Duration, Instant};

use common::{D, P, SOON, Shape, World, config, list, request};
use kv_connector::proto::{LoadFailure, ReleaseReason};
use kv_connector::{BlockList, Config, HoldId, LoadResult, RequestEnd, Role, SchedEvent, Verdict};

fn pair() -> World {
    World::of([Shape::named("p"), Shape { blocks: 24, gap: 48, ..Shape::named("d") }])
}

fn two_ranks(name: &str) -> Shape {
    Shape { ranks: 2, groups: 2, layers: 3, ..Shape::named(name) }
}

/// A lease that lives briefly, whatever its readers wish.
fn short_lease(name: &str, ttl_ms: u64) -> Config {
    Config { lease_ttl_ms: ttl_ms, lease_renewal_ms: ttl_ms, lease_max_ms: ttl_ms, ..config(name) }
}

fn released_blocks(world: &World, engine: usize, hold: HoldId) -> Vec<BlockList> {
    let found = world[engine].log.iter().find_map(|event| match event {
        SchedEvent::BlocksReleased { hold: h, blocks, .. } if *h == hold => Some(blocks.clone()),
        _ => None,
    });
    found.unwrap()
}

// H-11, R110
#[test]
fn exactly_the_bytes_of_the_prompt_arrive_in_exactly_the_right_blocks() {
    let mut world = pair();
    let offer = world.prefill(P, "r", 12, &[5, 6, 20]);
    world.begin_load(D, "r", &offer, &[0, 23, 7]);
    let LoadResult::Loaded { tokens: 12, remote_tokens: 12, stats } = world.load_end(D, "r") else {
        panic!("{:?}", world[D].log)
    };
    assert_eq!(stats.bytes, 3 * world[P].layout.bytes_per_block());
    world.expect_moved(P, &[5, 6, 20], D, &[0, 23, 7]);
    world[D].assert_memory();
    world[P].assert_memory();
    world.released(P, offer.hold);
    assert_eq!(released_blocks(&world, P, offer.hold), [list(&[5, 6, 20])]);
    world.finish(D, "r");
    world.nothing_held();
    // And again, over connections that stand.
    world.hand_over(P, D, "again");
    assert_eq!(world[P].sched.stats().producer.confirmed, 2);
    assert_eq!(world[P].sched.stats().handshakes.accepted, 1);
}

// H-17, R006, R041
#[test]
fn each_rank_reads_from_its_like_and_blocks_are_free_when_both_have_read() {
    let mut world = World::of([two_ranks("p"), Shape { blocks: 17, gap: 0, ..two_ranks("d") }]);
    for i in 0..3 {
        world.hand_over(P, D, &format!("r-{i}"));
    }
    for rank in 0..2 {
        assert_eq!(world[P].workers[rank].stats().ledger.confirmed, 3);
    }
}

// H-11
#[test]
fn of_a_prompt_whose_beginning_is_here_only_the_rest_is_pulled_to_its_position() {
    for k in 1..4 {
        let mut world = pair();
        let from = [11, 2, 30, 8];
        let to = [3, 15, 14, 22];
        let offer = world.prefill(P, "r", 14, &from);
        world.arrive(D, "r", &offer).unwrap();
        world.allocate(D, "r", 4 * k, &to).unwrap();
        assert_eq!(world.expect_loaded(D, "r"), (14, 14 - 4 * k));
        world.expect_moved(P, &from[k as usize..], D, &to[k as usize..]);
        world[D].assert_memory();
        world.released(P, offer.hold);
    }
}

// H-7, R004
#[test]
fn a_prompt_shorter_than_a_block_is_one_block() {
    let mut world = pair();
    let offer = world.prefill(P, "r", 1, &[31]);
    world.begin_load(D, "r", &offer, &[23]);
    assert_eq!(world.expect_loaded(D, "r"), (1, 1));
    world.expect_moved(P, &[31], D, &[23]);
    world[D].assert_memory();
    world.released(P, offer.hold);
}

// H-11
#[test]
fn scattered_blocks_in_any_order_find_their_partners() {
    let mut world = pair();
    // Backwards, forwards, neighbours on one side only, and more blocks than the prompt needs.
    for (name, from, to) in [
        ("backwards", [9, 8, 7, 6, 5], [0, 1, 2, 3, 4]),
        ("both backwards", [9, 8, 7, 6, 5], [23, 22, 21, 20, 19]),
        ("scattered", [0, 31, 1, 30, 2], [12, 5, 13, 0, 14]),
    ] {
        let offer = world.prefill(P, name, 17, &from);
        world.begin_load(D, name, &offer, &[&to[..], &[16, 17]].concat());
        world.expect_loaded(D, name);
        world.expect_moved(P, &from, D, &to);
        world[D].assert_memory();
        world.released(P, offer.hold);
    }
}

#[test]
fn a_thousand_blocks_arrive() {
    let big = |name| Shape { blocks: 1024, ..Shape::named(name) };
    let mut world = World::of([big("p"), big("d")]);
    // Every block once, in an order without neighbours.
    let from: Vec<u32> = (0..1000).map(|i| i * 379 % 1024).collect();
    let to: Vec<u32> = (0..1000).map(|i| i * 613 % 1024).collect();
    let offer = world.prefill(P, "r", 4000, &from);
    world.begin_load(D, "r", &offer, &to);
    assert_eq!(world.expect_loaded(D, "r"), (4000, 4000));
    world.expect_moved(P, &from, D, &to);
    world[D].assert_memory();
    world.released(P, offer.hold);
}

// H-2, R078, R080
#[test]
fn three_consumers_read_from_one_producer_at_once() {
    let mut world = World::of(["p", "d-1", "d-2", "d-3"].map(Shape::named));
    let offers: Vec<_> =
        (0..3).map(|i| world.prefill(P, &format!("r-{i}"), 10, &[10 * i, 10 * i + 2, 10 * i + 1])).collect();
    for (i, offer) in offers.iter().enumerate() {
        world.begin_load(D + i, "r", offer, &[4, 3, 2]);
    }
    for (i, offer) in offers.iter().enumerate() {
        world.expect_loaded(D + i, "r");
        world.expect_moved(P, &offer.blocks, D + i, &[4, 3, 2]);
        world[D + i].assert_memory();
        world.released(P, offer.hold);
    }
    assert_eq!(world[P].sched.stats().producer.confirmed, 3);
}

// H-2, R080
#[test]
fn one_consumer_reads_from_three_producers_at_once() {
    let mut world = World::of(["d", "p-1", "p-2", "p-3"].map(Shape::named));
    let d = 0;
    let offers: Vec<_> = (1..4).map(|p| world.prefill(p, "r", 7, &[1, 0])).collect();
    for (i, offer) in offers.iter().enumerate() {
        let to = 2 * i as u32;
        world.begin_load(d, &format!("r-{i}"), offer, &[to, to + 1]);
    }
    for (i, offer) in offers.iter().enumerate() {
        world.expect_loaded(d, &format!("r-{i}"));
        let to = 2 * i as u32;
        world.expect_moved(i + 1, &offer.blocks, d, &[to, to + 1]);
        world.released(i + 1, offer.hold);
    }
    world[d].assert_memory();
}

// H-22
#[test]
fn a_prompt_that_is_here_already_gives_its_lease_back() {
    let mut world = pair();
    let offer = world.prefill(P, "r", 8, &[4, 5]);
    assert_eq!(world.arrive(D, "r", &offer).unwrap(), Role::Consumer);
    assert_eq!(world[D].sched.remote_tokens(&request("r"), 8), 0);
    world.allocate(D, "r", 8, &[4, 5]).unwrap();
    world.released(P, offer.hold);
    world[D].assert_memory();
    assert_eq!(world[P].sched.stats().producer.released, 1);
    assert_eq!(world[D].sched.stats().consumer.released[&ReleaseReason::NotNeeded], 1);
    world.finish(D, "r");
    world.nothing_held();
}

// H-22, R010
#[test]
fn a_request_aborted_while_it_is_queued_gives_its_lease_back() {
    let mut world = pair();
    let offer = world.prefill(P, "r", 8, &[4, 5]);
    world.arrive(D, "r", &offer).unwrap();
    world.finish(D, "r");
    world.released(P, offer.hold);
    world[D].assert_memory();
    assert_eq!(world[P].sched.stats().producer.released, 1);
    world.nothing_held();
    world.hand_over(P, D, "next");
}

// H-19, H-22, R009
#[test]
fn a_request_aborted_while_it_loads_keeps_its_blocks_until_they_are_quiet() {
    let mut world = World::of([Shape::slow("p"), Shape { valve: false, ..Shape::slow("d") }]);
    world[P].valves[0].allow(100_000);
    let offer = world.prefill(P, "r", 40, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let to = [20, 21, 22, 23, 24, 10, 11, 12, 13, 14];
    world.begin_load(D, "r", &offer, &to);
    world.until("the read is under way", SOON, |w| w[P].valves[0].is_stuck());

    let verdict = world[D].sched.request_finished(&request("r"), &RequestEnd::Aborted).verdict;
    let Verdict::Hold(hold @ HoldId::Load(_)) = verdict else { panic!("{verdict:?}") };
    assert!(!world[D].is_released(hold), "blocks came back before the workers had said that they are quiet");
    assert_eq!(world[D].sched.stats().holds, 1);
    world.until("the blocks come back", SOON, |w| w[D].is_released(hold));
    assert_eq!(released_blocks(&world, D, hold), [list(&to)]);
    assert!(world[D].load_result("r").is_none(), "nobody waits for this load any more");

    // The blocks have a new owner. What is still on its way from the producer must not reach them.
    world[D].assert_memory_except(&to);
    let seed = world.seed();
    world[D].stamp(seed, &to);
    world[P].valves[0].allow_all();
    world.released(P, offer.hold);
    assert_eq!(world[P].sched.stats().producer.released, 1);
    world.hand_over(P, D, "next");
    world[D].assert_memory();
}

// H-19, R009
#[test]
fn an_abort_at_any_moment_frees_both_sides() {
    let mut world = pair();
    for i in 0..20 {
        let name = format!("r-{i}");
        let offer = world.prefill(P, &name, 16, &[4, 5, 6, 7]);
        world.begin_load(D, &name, &offer, &[0, 2, 4, 6]);
        for _ in 0..i {
            std::thread::yield_now();
        }
        world.step();
        let verdict = world.abort(D, &name);
        match (verdict, world[D].load_result(&name).is_some()) {
            (Verdict::Hold(hold), false) => world.until("quiet", SOON, |w| w[D].is_released(hold)),
            (Verdict::Free, true) => {}
            other => panic!("{other:?}"),
        }
        world.released(P, offer.hold);
        world[D].assert_memory_except(&[0, 2, 4, 6]);
    }
    world.nothing_held();
    world.hand_over(P, D, "next");
}

// H-12, H-17, R003, R008
#[test]
fn a_lease_that_nobody_asks_for_expires_and_its_blocks_come_back() {
    let mut world = World::of([Shape { config: short_lease("p", 300), ..two_ranks("p") }]);
    let offer = world.prefill(P, "r", 8, &[4, 5]);
    let begun = Instant::now();
    world.released(P, offer.hold);
    assert!(begun.elapsed() >= Duration::from_millis(250), "expired after {:?}", begun.elapsed());
    assert_eq!(released_blocks(&world, P, offer.hold), vec![list(&[4, 5]); 2]);
    assert_eq!(world[P].sched.stats().producer.expired, 1);
    world.nothing_held();
}

// H-13, R002
#[test]
fn renewal_keeps_the_lease_of_a_queued_request_alive_for_many_times_its_life() {
    let ttl = Duration::from_millis(500);
    let brief = Config { lease_ttl_ms: 500, lease_renewal_ms: 500, ..config("p") };
    let eager = Config { renew_every_ms: 100, ..config("d") };
    let mut world =
        World::of([Shape { config: brief, ..two_ranks("p") }, Shape { config: eager, ..two_ranks("d") }]);
    let begun = Instant::now();
    let offer = world.prefill(P, "r", 12, &[9, 3, 6]);
    world.arrive(D, "r", &offer).unwrap();
    world.until("the lease has lived four lives", SOON, |w| {
        assert!(!w[P].is_released(offer.hold), "released after {:?}", begun.elapsed());
        begun.elapsed() > ttl * 4 && w[P].workers.iter().all(|w| w.stats().ledger.renewed > 4)
    });
    world.allocate(D, "r", 0, &[1, 2, 3]).unwrap();
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[9, 3, 6], D, &[1, 2, 3]);
    world[D].assert_memory();
    world.released(P, offer.hold);
    assert_eq!(world[P].sched.stats().producer.confirmed, 1);
}

// H-14, H-18, R082
#[test]
fn what_is_offered_twice_is_confirmed_once() {
    let mut world = pair();
    let offer = world.prefill(P, "r", 12, &[5, 6, 20]);
    world.begin_load(D, "first", &offer, &[0, 1, 2]);
    world.expect_loaded(D, "first");
    world.expect_moved(P, &[5, 6, 20], D, &[0, 1, 2]);
    world.released(P, offer.hold);
    // The blocks have a new owner on the producer.
    let seed = world.seed();
    world[P].stamp(seed, &[5, 6, 20]);
    for (name, blocks) in [("second", [10, 11, 12]), ("third", [13, 14, 15])] {
        world.begin_load(D, name, &offer, &blocks);
        let (reason, detail) = world.expect_failed(D, name);
        assert_eq!(reason, LoadFailure::Lapsed, "{detail}");
        world.finish(D, name);
    }
    world.finish(D, "first");
    world.nothing_held();
    world.hand_over(P, D, "next");
}

// H-18
#[test]
fn blocks_that_were_freed_before_they_were_read_are_never_confirmed() {
    let mut world = World::of([
        Shape { config: short_lease("p", 200), ..two_ranks("p") },
        Shape { config: short_lease("d", 200), ..two_ranks("d") },
    ]);
    let offer = world.prefill(P, "r", 12, &[5, 6, 20]);
    world.released(P, offer.hold);
    let seed = world.seed();
    world[P].stamp(seed, &[5, 6, 20]);
    world.begin_load(D, "r", &offer, &[0, 1, 2]);
    let (reason, detail) = world.expect_failed(D, "r");
    assert_eq!(reason, LoadFailure::Lapsed, "{detail}");
    world.finish(D, "r");
    world.nothing_held();
}

// H-18, R029
#[test]
fn blocks_that_were_freed_while_they_were_read_are_never_confirmed() {
    let mut world = World::of([
        Shape { config: short_lease("p", 1_500), ..Shape::slow("p") },
        Shape { valve: false, ..Shape::slow("d") },
    ]);
    world[P].valves[0].allow(100_000);
    let from = [5, 6, 20, 21, 22, 23];
    let begun = Instant::now();
    let offer = world.prefill(P, "r", 24, &from);
    // The consumer comes late. It renews when it greets, and next when the lease is over: it learns of that from the
    // answer to its question.
    world.until("the lease is old", SOON, |_| begun.elapsed() > Duration::from_millis(1_200));
    world.begin_load(D, "r", &offer, &[0, 1, 2, 3, 4, 5]);
    world.until("the read is under way", SOON, |w| w[P].valves[0].is_stuck());
    world.released(P, offer.hold);
    assert_eq!(world[P].sched.stats().producer.expired, 1);
    let seed = world.seed();
    world[P].stamp(seed, &from);
    world[P].valves[0].allow_all();
    let (reason, detail) = world.expect_failed(D, "r");
    assert_eq!(reason, LoadFailure::Lapsed, "{detail}");
    world.finish(D, "r");
    world.nothing_held();
    world.hand_over(P, D, "next");
}

// H-15, R092
#[test]
fn a_consumer_faster_than_its_producers_bookkeeping_is_confirmed_when_that_has_caught_up() {
    let mut world = World::of([two_ranks("p"), two_ranks("d")]);
    world.begin_prefill(P, "r", 12);
    world.step();
    // The request has finished and its parameters travel, but the producer's workers have not heard of it.
    world[P].hold_back = true;
    let offer = world.end_prefill(P, "r", 12, &[5, 6, 20]);
    world.begin_load(D, "r", &offer, &[0, 1, 2]);
    world.until("both ranks have read and asked", SOON, |w| {
        w[P].workers.iter().all(|worker| worker.stats().ledger.early > 0)
    });
    assert!(world[D].load_result("r").is_none());
    assert!(!world[P].is_released(offer.hold));
    world[P].hold_back = false;
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[5, 6, 20], D, &[0, 1, 2]);
    world[D].assert_memory();
    world.released(P, offer.hold);
    assert_eq!(world[P].sched.stats().producer.confirmed, 1);
    world.finish(D, "r");
    world.nothing_held();
}

// H-8
#[test]
fn a_plan_that_waits_for_a_busy_worker_comes_before_the_messages_that_came_after_it() {
    // The toy computes a prompt in no time at all: it is announced, granted and read within the same moment, often
    // before the producer's worker was given a processor.
    let mut world = pair();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from).min(8) {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let lapsed = (0..100).find(|i| {
            let name = format!("r-{i}");
            let offer = world.prefill(P, &name, 11, &[7, 3, 4]);
            world.begin_load(D, &name, &offer, &[2, 9, 1]);
            let failed = matches!(world.load_end(D, &name), LoadResult::Failed { .. });
            world.finish(D, &name);
            failed
        });
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(lapsed, None, "{:?}", world[D].log.last());
    });
    // A Release can be as early as a ReadDone.
    world.nothing_held();
    assert_eq!(world[P].sched.stats().producer.confirmed, 100);
}

// H-15, R022
#[test]
fn a_request_that_hands_nothing_over_answers_an_early_reader_at_once() {
    let mut world = pair();
    world.begin_prefill(P, "r", 12);
    world.step();
    world[P].hold_back = true;
    let offer = world.end_prefill(P, "r", 12, &[5, 6, 20]);
    // Another request of the same producer is aborted; a router that mixes the two up brings its lease.
    world[P].hold_back = false;
    world.step();
    world.begin_prefill(P, "aborted", 12);
    world.step();
    let forged = offer.forged(|params| params["kv_connector"]["lease"] = 2.into());
    world.begin_load(D, "r", &forged, &[0, 1, 2]);
    world.until("the consumer has asked", SOON, |w| w[P].workers[0].stats().ledger.early > 0);
    let aborted = world[P].sched.request_finished(&request("aborted"), &RequestEnd::Aborted);
    assert_eq!((aborted.verdict, aborted.params), (Verdict::Free, None));
    let (reason, detail) = world.expect_failed(D, "r");
    assert_eq!(reason, LoadFailure::Lapsed, "{detail}");
    world.finish(D, "r");
    // The lease of the right request is still good.
    world.begin_load(D, "r", &offer, &[0, 1, 2]);
    world.until("loaded", SOON, |w| {
        w[D].log
            .iter()
            .any(|e| matches!(e, SchedEvent::LoadEnded { result: LoadResult::Loaded { tokens: 12, .. }, .. }))
    });
    world.released(P, offer.hold);
}
