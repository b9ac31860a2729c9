//! Whole hand-overs between two engines, with a clock that the test turns and a wire that it cuts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::pair::{Pair, name};
use common::*;
use kv_proto::message::WorkerMessage;
use kv_proto::{LoadFailure, ReleaseReason};
use kv_sched::{LoadResult, SchedEvent};

/// Prompt 0 is offered, and P's workers know.
fn offered() -> Pair {
    let mut pair = Pair::new();
    pair.p_starts(0);
    pair.p_finishes(0);
    pair.settle();
    pair
}

/// Request 0 of D reads it.
fn reading() -> Pair {
    let mut pair = offered();
    pair.d_starts(0, 0);
    pair.d_allocates(0);
    pair.settle();
    assert_eq!(pair.reads.len(), 1);
    pair
}

/// How the loads of D ended, in order.
fn outcomes(pair: &Pair) -> Vec<Result<u32, LoadFailure>> {
    let ended = pair.d.events.iter().filter_map(|event| match event {
        SchedEvent::LoadEnded { result: LoadResult::Loaded { tokens, .. }, .. } => Some(Ok(*tokens)),
        SchedEvent::LoadEnded { result: LoadResult::Failed { reason, .. }, .. } => Some(Err(*reason)),
        _ => None,
    });
    ended.collect()
}

/// Leases that P counts as confirmed, released and expired.
fn leases(pair: &Pair) -> [u64; 3] {
    let stats = pair.p.s.producer_stats();
    [stats.confirmed, stats.released, stats.expired]
}

fn is(flight: &common::pair::Flight, wanted: fn(&WorkerMessage) -> bool) -> bool {
    wanted(&WorkerMessage::decode(&flight.bytes).unwrap())
}

/// Loses the messages that are on their way now and that are such.
fn lose(pair: &mut Pair, wanted: fn(&WorkerMessage) -> bool) -> usize {
    let before = pair.wire.len();
    pair.wire.retain(|flight| !is(flight, wanted));
    before - pair.wire.len()
}

// H-12, H-17, R007, R029
#[test]
fn a_hand_over_brings_the_bytes_and_frees_the_producers_blocks() {
    let mut pair = reading();
    assert_eq!(pair.p.free.len() as u32, BLOCKS - common::pair::COUNT, "held while they are read");
    pair.end_read(1, Ok(()));
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [1, 0, 0]));
    assert_eq!(pair.p.free.len() as u32, BLOCKS);
    pair.heal(1, 1);
}

// H-15
#[test]
fn p5_a_read_that_is_over_before_the_grant_is_matched_with_it() {
    let mut pair = Pair::new();
    pair.p_starts(0);
    pair.carry_plan(true);
    pair.p_finishes(0);
    // The grant is still on its way to P's worker when D has read already.
    let grant = pair.p.plans.pop_front().unwrap();
    pair.d_starts(0, 0);
    pair.d_allocates(0);
    pair.settle();
    pair.end_read(1, Ok(()));
    pair.settle();
    assert_eq!(outcomes(&pair), []);
    pair.p.plans.push_back(grant);
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [1, 0, 0]));
    pair.heal(1, 1);
}

// H-18, R029
#[test]
fn p1_a_read_under_a_lease_that_ran_out_is_not_used() {
    let mut pair = reading();
    // Renewals are lost, P frees the blocks and their next owner writes; then the read ends well.
    for _ in 0..6 {
        pair.pass(RENEW_MS);
        lose(&mut pair, |m| matches!(m, WorkerMessage::Renew { .. }));
        pair.settle();
    }
    assert_eq!((leases(&pair), pair.p.free.len() as u32), ([0, 0, 1], BLOCKS));
    pair.end_read(1, Ok(()));
    pair.settle();
    assert_eq!(outcomes(&pair), [Err(LoadFailure::Lapsed)]);
    pair.heal(1, 1);
}

// H-13
#[test]
fn r011_a_long_read_keeps_its_lease_by_renewal() {
    let mut pair = reading();
    for _ in 0..6 {
        pair.pass(RENEW_MS);
        pair.settle();
    }
    pair.end_read(1, Ok(()));
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [1, 0, 0]));
}

// H-14
#[test]
fn p2_a_lost_confirmation_is_asked_for_again_and_is_the_same() {
    let mut pair = reading();
    pair.end_read(1, Ok(()));
    pair.deliver(0);
    assert_eq!(lose(&mut pair, |m| matches!(m, WorkerMessage::Confirmed { .. })), 1);
    pair.settle();
    assert_eq!(
        (outcomes(&pair), leases(&pair)),
        (vec![], [1, 0, 0]),
        "P's blocks are free, D does not know yet"
    );
    pair.pass(REPEAT_MS);
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [1, 0, 0]));
    assert_eq!(pair.p.w.stats().ledger.strays, 1);
    pair.heal(1, 1);
}

// H-25
#[test]
fn p1_a_connection_lost_with_the_confirmation_is_made_again() {
    let mut pair = reading();
    pair.pass(RETRY_MIN_MS);
    pair.settle();
    pair.end_read(1, Ok(()));
    pair.deliver(0);
    pair.cut(0);
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [1, 0, 0]));
    pair.heal(1, 1);
}

// H-1, R034
#[test]
fn p7_a_producer_that_was_born_again_is_not_taken_for_the_old_one() {
    let mut pair = reading();
    pair.pass(RETRY_MIN_MS);
    pair.settle();
    pair.end_read(1, Ok(()));
    pair.wire.clear();
    pair.restart_p();
    // The new life grants the same lease number for another prompt.
    pair.p_starts(1);
    pair.p_finishes(1);
    pair.settle();
    pair.pass(CONFIRM_MS);
    pair.settle();
    assert_eq!(outcomes(&pair), [Err(LoadFailure::ConfirmTimedOut)]);
    assert_eq!(leases(&pair), [0, 0, 0], "the new life's lease is untouched");
    pair.d_starts(1, 1);
    pair.d_allocates(1);
    pair.settle();
    pair.end_read(2, Ok(()));
    pair.settle();
    assert_eq!((outcomes(&pair).last(), leases(&pair)), (Some(&Ok(8)), [1, 0, 0]));
    pair.heal(2, 2);
}

// H-19
#[test]
fn r019_a_request_aborted_while_it_reads_keeps_its_blocks_until_the_transport_is_quiet() {
    let mut pair = reading();
    pair.d_ends(0);
    pair.settle();
    assert_eq!(pair.cancelled, [1].into());
    assert_eq!(pair.d.free.len() as u32, BLOCKS - common::pair::COUNT, "the transport may still write");
    pair.end_read(1, Err(LoadFailure::Cancelled));
    pair.settle();
    assert_eq!((pair.d.free.len() as u32, leases(&pair)), (BLOCKS, [0, 1, 0]));
    assert_eq!(outcomes(&pair), []);
    pair.heal(1, 1);
}

#[test]
fn an_abort_that_crosses_the_confirmation_frees_both_sides_once() {
    let mut pair = reading();
    pair.end_read(1, Ok(()));
    pair.d_ends(0);
    pair.settle();
    assert_eq!((pair.d.free.len() as u32, pair.p.free.len() as u32), (BLOCKS, BLOCKS));
    assert_eq!(leases(&pair), [1, 0, 0]);
    pair.heal(1, 1);
}

// H-22
#[test]
fn r001_a_request_that_never_loads_gives_the_producers_blocks_back_at_once() {
    let mut pair = offered();
    pair.d_starts(0, 0);
    pair.d_ends(0);
    pair.settle();
    assert_eq!((leases(&pair), pair.p.free.len() as u32), ([0, 1, 0], BLOCKS));
    assert_eq!(pair.d.s.consumer_stats().released, [(ReleaseReason::Aborted, 1)].into());
    pair.heal(1, 1);
}

// H-12, R008
#[test]
fn r003_an_offer_that_nobody_takes_costs_one_lease_time() {
    let mut pair = offered();
    pair.pass(1_000);
    pair.settle();
    assert_eq!((leases(&pair), pair.p.free.len() as u32), ([0, 0, 1], BLOCKS));
    pair.heal(1, 0);
}

// H-13
#[test]
fn r011_a_request_that_waits_for_room_keeps_its_lease() {
    let mut pair = offered();
    pair.d_starts(0, 0);
    pair.settle();
    for _ in 0..12 {
        pair.pass(RENEW_MS);
        pair.settle();
    }
    pair.d_allocates(0);
    pair.settle();
    pair.end_read(1, Ok(()));
    pair.settle();
    assert_eq!(outcomes(&pair), [Ok(8)]);
}

/// Requests 0 and 1 read under the same lease.
fn twins() -> Pair {
    let mut pair = reading();
    pair.d_starts(1, 0);
    pair.d_allocates(1);
    pair.settle();
    assert_eq!(pair.reads.len(), 2);
    pair
}

// H-12, H-18, R082
#[test]
fn p1_of_two_requests_with_one_offer_the_last_to_read_ends_the_lease() {
    let mut pair = twins();
    pair.end_read(2, Ok(()));
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [0, 0, 0]), "the other still reads");
    pair.end_read(1, Ok(()));
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8), Ok(8)], [1, 0, 0]));
    pair.heal(1, 2);
}

// H-22, R084
#[test]
fn p2_of_two_requests_with_one_lease_an_aborted_one_does_not_spoil_the_other() {
    let mut pair = twins();
    pair.d_ends(0);
    pair.settle();
    pair.end_read(1, Err(LoadFailure::Cancelled));
    pair.settle();
    assert_eq!(leases(&pair), [0, 0, 0], "the other still reads under it");
    pair.end_read(2, Ok(()));
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [1, 0, 0]));
    pair.heal(1, 2);
}

#[test]
fn p6_a_twin_that_comes_between_a_loads_end_and_its_report_leaves_nothing_behind() {
    let mut pair = reading();
    pair.end_read(1, Err(LoadFailure::PeerLost));
    // D's worker has ended the load; its scheduler has not heard of it when the router tries again.
    let report = pair.d.reports.pop_front().unwrap();
    pair.cut(0);
    pair.d_starts(1, 0);
    pair.carry_plan(false);
    pair.d_ends(1);
    pair.d.reports.push_back(report);
    // P is gone for good: nobody will ever say that the lease is not held.
    pair.restart_p();
    pair.d_ends(0);
    pair.heal(1, 2);
}

#[test]
fn a_duplicate_id_does_not_spoil_the_first() {
    let mut pair = reading();
    pair.d_starts(0, 0);
    pair.end_read(1, Ok(()));
    pair.settle();
    assert_eq!((outcomes(&pair), leases(&pair)), (vec![Ok(8)], [1, 0, 0]));
    assert_eq!(pair.d.owned.keys().collect::<Vec<_>>(), [&name(0)]);
}
