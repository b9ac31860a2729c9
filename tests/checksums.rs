//! Checksums, over real sockets: a wrong byte that the transport knows nothing of is found, and right ones pass.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed check is a failed test.

mod common;

use common::spoiler::Spoil;
use common::{D, P, Shape, World, config, list};
use kv_connector::proto::LoadFailure;
use kv_connector::{Config, LoadResult};

/// Engines of so many ranks; what the consumer reads can be spoilt.
fn engines(ranks: u32, checksums: bool) -> (World, Spoil) {
    let spoil = Spoil::default();
    let shape = |name| Shape { ranks, layers: 3, ..Shape::named(name) };
    let consumer = Shape {
        config: Config { checksums, load_limit_ms: 20_000, ..config("d") },
        blocks: 24,
        gap: 48,
        spoil: Some(spoil.clone()),
        ..shape("d")
    };
    (World::of([shape("p"), consumer]), spoil)
}

const FROM: [u32; 4] = [5, 6, 20, 11];
const TO: [u32; 4] = [0, 23, 7, 8];

/// Somewhere in the third block that is read to, in the last layer.
fn in_the_third_block(world: &World) -> usize {
    world[D].places(TO[2])[2].1.start + 5
}

/// A hand-over of which one byte is wrong.
fn spoilt(ranks: u32, checksums: bool) -> (World, LoadResult) {
    let (mut world, spoil) = engines(ranks, checksums);
    let at = in_the_third_block(&world);
    spoil.at(at);
    let offer = world.prefill(P, "r", 15, &FROM);
    world.begin_load(D, "r", &offer, &TO);
    let result = world.load_end(D, "r");
    world.expect_moved(P, &FROM, D, &TO);
    let wrong = world[D].wrong_bytes();
    assert_eq!(wrong.iter().map(|(_, at)| *at).collect::<Vec<_>>(), [at], "one byte, and no other");
    world.released(P, offer.hold);
    (world, result)
}

// H-28
#[test]
fn a_wrong_byte_that_the_transport_does_not_notice_passes_without_checksums() {
    let (world, result) = spoilt(1, false);
    assert!(matches!(result, LoadResult::Loaded { tokens: 15, .. }), "{result:?}");
    assert_eq!(world[P].workers[0].stats().readers.compared, 0);
}

// H-28
#[test]
fn p8_with_checksums_a_wrong_byte_fails_the_load_and_what_is_before_it_is_kept() {
    for ranks in [1, 2] {
        let (mut world, result) = spoilt(ranks, true);
        let LoadResult::Failed { reason, detail, invalid, hold: None, valid_tokens, .. } = result else {
            panic!("{result:?}")
        };
        assert_eq!(reason, LoadFailure::Corrupt, "{detail}");
        assert_eq!(detail, "block 2 of the load is not what engine p has");
        assert_eq!((valid_tokens, invalid), (8, vec![list(&TO[2..])]));
        let unequal: u64 = world[P].workers.iter().map(|worker| worker.stats().readers.unequal).sum();
        assert_eq!(unequal, 1);
        assert_eq!(world[P].sched.stats().producer.confirmed, 0);
        // The producers looked at themselves, and found that they can be read: it was the consumer's side.
        world.until("self checks end", common::SOON, |w| {
            // They are counted when they have ended.
            let checks = w[P].workers.iter().map(|worker| worker.stats().readers.self_checks);
            checks.sum::<u64>() > 0
        });
        let failed = world[P].workers.iter().map(|worker| worker.stats().readers.self_checks_failed);
        assert_eq!(failed.sum::<u64>(), 0);
        // The request computes the rest; the next one loads as if nothing had been.
        world.finish(D, "r");
        let seed = world.seed();
        world[D].stamp(seed, &TO);
        world.hand_over(P, D, "next");
    }
}

// H-28
#[test]
fn p1_with_checksums_right_bytes_are_good_on_every_rank() {
    // Read whole, and block by block.
    right(64 << 20);
    right(1);
}

fn right(portion_bytes: u64) {
    let shape = |name| Shape { ranks: 2, groups: 2, layers: 3, ..Shape::named(name) };
    let eager = Config { checksums: true, portion_bytes, load_limit_ms: 20_000, ..config("d") };
    let mut world = World::of([shape("p"), Shape { config: eager, gap: 48, ..shape("d") }]);
    for i in 0..10 {
        let offer = world.prefill(P, &format!("r-{i}"), 15, &FROM);
        world.begin_load(D, &format!("r-{i}"), &offer, &TO);
        assert_eq!(world.expect_loaded(D, &format!("r-{i}")), (15, 15));
        world.expect_moved(P, &FROM, D, &TO);
        world[D].assert_memory();
        world.finish(D, &format!("r-{i}"));
        world.released(P, offer.hold);
    }
    world.nothing_held();
    for worker in &world[P].workers {
        let stats = worker.stats().readers;
        assert!(stats.compared >= 10, "{stats:?}");
        assert_eq!((stats.unequal, stats.expelled), (0, 0));
    }
    assert_eq!(world[P].sched.stats().producer.confirmed, 10);
}

// H-15, H-28
#[test]
fn p5_a_consumer_faster_than_its_producers_bookkeeping_is_compared_when_that_has_caught_up() {
    let (mut world, _) = engines(1, true);
    world.begin_prefill(P, "r", 12);
    world.step();
    world[P].hold_back = true;
    let offer = world.end_prefill(P, "r", 12, &[5, 6, 20]);
    world.begin_load(D, "r", &offer, &[0, 1, 2]);
    world.until("the blocks are looked at", common::SOON, |w| w[P].workers[0].stats().readers.compared > 0);
    assert!(world[D].load_result("r").is_none());
    world[P].hold_back = false;
    world.expect_loaded(D, "r");
    world.released(P, offer.hold);
}
