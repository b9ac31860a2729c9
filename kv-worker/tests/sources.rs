//! A producer with more workers than the consumer: one load, several pulls, one end.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::handshake::{EngineCard, WorkerCard};
use kv_proto::message::HelloRefusal;
use kv_proto::message::WorkerMessage;
use kv_proto::{
    BlockLayout, ConsumerOrder, GroupBlocks, LeaseEnd, LoadFailure, LoadId, PullEnd, Rank, ReleaseReason,
    Topology,
};
use kv_transport::RegionId;
use kv_worker::WorkerConfig;
use kv_worker::machine::io::{Decision, Fact, Failure, PullId, SourceKey};
use kv_worker::machine::pulls::LocalMemory;
use kv_worker::machine::worker::WorkerMachine;

/// As the common layout, with so many of two heads.
fn with_heads(heads: u32) -> BlockLayout {
    let mut layout = layout();
    let region = &mut layout.regions[0];
    (region.heads, region.heads_total) = (heads, 2);
    (region.block_bytes, region.block_stride) = (64 * u64::from(heads), 64 * u64::from(heads));
    layout
}

/// A producer of two ranks with a head each.
fn split_card() -> Box<EngineCard> {
    let one = card(1);
    let worker = |rank: u32| WorkerCard { rank: Rank(rank), layout: with_heads(1), ..one.workers[0].clone() };
    Box::new(EngineCard { topology: Topology::of(2), workers: vec![worker(0), worker(1)], ..*one.clone() })
}

/// One rank that holds both heads.
fn rig() -> Rig {
    rig_of(Rank(0), Topology::of(1), with_heads(2))
}

fn rig_of(rank: Rank, topology: Topology, layout: BlockLayout) -> Rig {
    let limits = limits();
    let config = WorkerConfig {
        engine: engine("us"),
        incarnation: life(100),
        rank,
        topology,
        checksums: false,
        limits,
    };
    Rig::of(WorkerMachine::new(config, LocalMemory { layout, regions: vec![RegionId(0)] }, TRANSPORT))
}

fn shaken(rig: &mut Rig, now: u64, source: u32, card: Box<EngineCard>) -> Vec<String> {
    rig.take(now, Fact::HandshakeEnded { key: SourceKey { peer: peer(1), source }, result: Ok(card) })
}

fn welcome_of(rank: u32) -> WorkerMessage {
    WorkerMessage::Welcome { incarnation: life(1), rank: Rank(rank) }
}

fn read_ended(rig: &mut Rig, now: u64, load: u64, source: u32) -> Vec<String> {
    let pull = PullId { load: LoadId(load), source };
    rig.end_read(now, pull, Ok(()))
}

fn read_failed(rig: &mut Rig, now: u64, load: u64, source: u32, reason: LoadFailure) -> Vec<String> {
    let pull = PullId { load: LoadId(load), source };
    rig.end_read(now, pull, Err(Failure::new(reason, "transport")))
}

/// Both workers greeted, with one load ordered before anything was known of them.
fn reading() -> Rig {
    let mut rig = rig();
    assert_eq!(rig.order(0, &[track(1, 5), load(1, 5, 1)]), ["shake hands with 1"]);
    assert_eq!(shaken(&mut rig, 1, 0, split_card()), ["connect d0", "connect d1"]);
    rig.connected(2, 0);
    rig.connected(2, 1);
    assert_eq!(rig.hear(3, dialled(0), welcome_of(0)), ["d0: renew all +[5]", "d0: read 128 bytes for 1"]);
    assert_eq!(rig.hear(3, dialled(1), welcome_of(1)), ["d1: renew all +[5]", "d1: read 128 bytes for 1/1"]);
    rig
}

// H-18, H-31, R057
#[test]
fn one_handshake_leads_to_every_worker_and_the_load_is_good_when_all_have_confirmed() {
    let mut rig = reading();
    assert_eq!(read_ended(&mut rig, 4, 1, 1), ["d1: read done 5/1"]);
    rig.hear(5, dialled(1), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[]), "P1: one of two heads is here");
    assert_eq!(read_ended(&mut rig, 6, 1, 0), ["d0: read done 5/1"]);
    rig.hear(7, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
    assert_eq!(rig.m.stats().pulls, 0);
    assert_eq!(rig.m.stats().producers, 1);
}

#[test]
fn each_head_goes_where_it_belongs() {
    let mut rig = rig();
    rig.order(0, &[load(1, 5, 1)]);
    shaken(&mut rig, 1, 0, split_card());
    rig.connected(2, 0);
    rig.connected(2, 1);
    let mut read = |link: u64, rank: u32| -> Vec<(u64, u64, u64)> {
        let mut out = Vec::new();
        rig.m.take(
            at(3),
            Fact::MessageArrived { link: dialled(link), message: Ok(welcome_of(rank)) },
            &mut out,
        );
        let parts = out.into_iter().find_map(|decision| match decision {
            Decision::Read { parts, .. } => Some(parts),
            _ => None,
        });
        let ranges = parts.unwrap().remove(0).ranges;
        ranges.iter().map(|r| (r.remote_offset, r.local_offset, r.len)).collect()
    };
    // Blocks 1 and 2 there are 8 and 9 here, where a block has both heads.
    assert_eq!(read(0, 0), [(64, 1024, 64), (128, 1152, 64)]);
    assert_eq!(read(1, 1), [(64, 1088, 64), (128, 1216, 64)]);
}

// H-19, H-31
#[test]
fn p3_a_load_that_fails_at_one_worker_ends_when_the_other_reads_are_quiet() {
    let mut rig = reading();
    assert_eq!(
        read_failed(&mut rig, 4, 1, 0, LoadFailure::ReadFailed),
        ["d0: release 5/1 load_failed", "cancel 1/1"]
    );
    assert_eq!(rig.loads(), ends(&[]), "the other destination may still be written");
    assert_eq!(
        read_failed(&mut rig, 5, 1, 1, LoadFailure::Cancelled),
        ["d1: release 5/1 aborted"],
        "the other worker has done nothing wrong, and need not wait for the lease's time"
    );
    assert_eq!(rig.loads(), ends(&[(1, "read_failed")]));
}

#[test]
fn p1_a_lease_that_lapsed_at_one_worker_fails_the_load_that_the_other_has_confirmed() {
    let mut rig = reading();
    read_ended(&mut rig, 4, 1, 0);
    read_ended(&mut rig, 4, 1, 1);
    rig.hear(5, dialled(0), confirmed(5, 1));
    rig.hear(
        6,
        dialled(1),
        WorkerMessage::Lapsed { lease: kv_proto::LeaseId(5), attempt: kv_proto::Attempt(1) },
    );
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
}

#[test]
fn an_answer_counts_for_the_worker_that_gave_it() {
    let mut rig = reading();
    read_ended(&mut rig, 4, 1, 0);
    rig.hear(5, dialled(0), confirmed(5, 1));
    // The same answer from the same worker is not the other one's.
    rig.hear(6, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[]));
    assert_eq!(rig.m.stats().pulls, 1);
}

#[test]
fn p4_a_worker_that_cannot_be_reached_fails_the_load_and_frees_the_others() {
    let mut rig = rig();
    rig.order(0, &[load(1, 5, 1)]);
    shaken(&mut rig, 1, 0, split_card());
    rig.connected(2, 0);
    rig.hear(3, dialled(0), welcome_of(0));
    assert_eq!(rig.lost(4, dialled(1)), ["cancel 1"]);
    assert_eq!(rig.loads(), ends(&[]));
    read_failed(&mut rig, 5, 1, 0, LoadFailure::Cancelled);
    assert_eq!(rig.loads(), ends(&[(1, "connect_failed")]));
}

#[test]
fn p3_a_load_that_fails_at_its_first_worker_at_once_reads_nothing_from_the_others() {
    let mut rig = reading();
    for source in 0..2 {
        read_ended(&mut rig, 4, 1, source);
        rig.hear(5, dialled(source.into()), confirmed(5, 1));
    }
    rig.loads();
    // Worker 0 breaks the protocol, and is not tried again at once.
    rig.hear(6, dialled(0), WorkerMessage::Renew { seq: 0, all: true, wanted: vec![], dropped: vec![] });
    assert_eq!(rig.order(7, &[load(1, 6, 2)]), ["d1: release 6/2 aborted"], "no read");
    assert_eq!(rig.loads(), ends(&[(2, "peer_lost")]));
    assert_eq!(rig.m.stats().pulls, 0);
}

#[test]
fn a_load_that_is_cancelled_is_cancelled_at_every_worker() {
    let mut rig = reading();
    let said = rig.order(4, &[cancel(1)]);
    assert_eq!(said, ["cancel 1", "cancel 1/1"]);
    read_failed(&mut rig, 5, 1, 0, LoadFailure::Cancelled);
    assert_eq!(rig.loads(), ends(&[]));
    read_failed(&mut rig, 6, 1, 1, LoadFailure::Cancelled);
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
}

#[test]
fn a_later_load_reads_from_every_worker_at_once_and_offers_are_given_back_at_each() {
    let mut rig = reading();
    for source in 0..2 {
        read_ended(&mut rig, 4, 1, source);
        rig.hear(5, dialled(source.into()), confirmed(5, 1));
    }
    rig.loads();
    assert_eq!(
        rig.order(6, &[load(1, 6, 2)]),
        ["d0: read 128 bytes for 2", "d1: read 128 bytes for 2/1"],
        "no handshake is needed any more"
    );
    rig.order(7, &[track(1, 7)]);
    let said = rig.order(8, &[release(1, 7, ReleaseReason::Aborted)]);
    assert_eq!(said, ["d0: release 7/0 aborted", "d1: release 7/0 aborted"]);
}

#[test]
fn what_is_given_up_before_the_handshake_is_told_to_every_worker() {
    let mut rig = rig();
    rig.order(0, &[track(1, 5), release(1, 5, ReleaseReason::Aborted)]);
    shaken(&mut rig, 1, 0, split_card());
    rig.connected(2, 0);
    rig.connected(2, 1);
    assert_eq!(rig.hear(3, dialled(0), welcome_of(0)), ["d0: release 5/0 aborted"]);
    assert_eq!(rig.hear(3, dialled(1), welcome_of(1)), ["d1: release 5/0 aborted"]);
}

#[test]
fn a_worker_that_is_lost_is_dialled_by_itself_and_the_other_goes_on() {
    let mut rig = reading();
    read_ended(&mut rig, 4, 1, 0);
    rig.hear(5, dialled(0), confirmed(5, 1));
    read_ended(&mut rig, 6, 1, 1);
    // The question was lost with its connection; it is asked again over the next.
    assert_eq!(rig.lost(1_000, dialled(1)), ["shake hands with 1 for source 1"]);
    assert_eq!(shaken(&mut rig, 1_001, 1, split_card()), ["connect d2"]);
    rig.connected(1_002, 2);
    assert_eq!(rig.hear(1_003, dialled(2), welcome_of(1)), ["d2: renew all +[5]", "d2: read done 5/1"]);
    rig.hear(1_004, dialled(2), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

#[test]
fn p7_a_producer_that_tells_another_shape_in_the_same_life_is_not_believed() {
    let mut rig = reading();
    rig.lost(1_000, dialled(1));
    // Another cut of the same life: loads under way were planned for two workers.
    let mut whole = card(1);
    whole.workers[0].layout = with_heads(2);
    assert_eq!(shaken(&mut rig, 1_001, 1, whole), Vec::<String>::new());
    let said = read_failed(&mut rig, 1_002, 1, 1, LoadFailure::PeerLost);
    assert_eq!(said, ["cancel 1"]);
    read_failed(&mut rig, 1_003, 1, 0, LoadFailure::Cancelled);
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
}

// H-12
/// P's side: a lease ends when every reader that the topologies give it has ended, each counted once.
#[test]
fn p2_a_worker_waits_for_every_reader_that_the_topologies_give_it() {
    let mut rig = rig_of(Rank(0), Topology::of(2), with_heads(1));
    rig.own(0, &[announce(5), grant(5)]);
    let greet = |rig: &mut Rig, link: u64, rank: u32, ranks: u32| {
        rig.take(1, Fact::LinkAccepted { link: accepted(link) });
        let mut message = hello(7, 100);
        if let WorkerMessage::Hello { rank: of, topology, .. } = &mut message {
            (*of, *topology) = (Rank(rank), Topology::of(ranks));
        }
        rig.hear(1, accepted(link), message)
    };
    // Of four ranks the first two read from rank 0.
    greet(&mut rig, 0, 0, 4);
    greet(&mut rig, 1, 1, 4);
    let refused = greet(&mut rig, 2, 2, 4);
    assert!(refused[0].contains(&format!("{:?}", HelloRefusal::Topology)), "{refused:?}");
    for _ in 0..2 {
        assert_eq!(rig.hear(2, accepted(0), read_done(5, 1)), ["a0: confirmed 5/1"]);
        assert_eq!(rig.m.take_report().leases, [], "the same reader twice is one reader");
    }
    assert_eq!(rig.hear(3, accepted(1), read_done(5, 1)), ["a1: confirmed 5/1"]);
    assert_eq!(rig.m.take_report().leases, [(kv_proto::LeaseId(5), LeaseEnd::Confirmed)]);
}

// H-31, R056
#[test]
fn a_rank_that_has_nothing_to_read_says_so_at_once() {
    // One head, which both ranks of P hold: this rank reads from the first, and the second must not wait.
    let mut layout = layout();
    layout.regions[0].heads_total = 1;
    let mut card = split_card();
    card.workers.iter_mut().for_each(|w| w.layout = layout.clone());
    let mut rig = rig_of(Rank(0), Topology::of(1), layout);
    rig.order(0, &[load(1, 5, 1)]);
    assert_eq!(shaken(&mut rig, 1, 0, card), ["connect d0", "connect d1"]);
    rig.connected(2, 0);
    rig.connected(2, 1);
    assert_eq!(rig.hear(3, dialled(1), welcome_of(1)), ["d1: renew all +[5]", "d1: read done 5/1"]);
    assert_eq!(rig.hear(3, dialled(0), welcome_of(0)), ["d0: renew all +[5]", "d0: read 128 bytes for 1"]);
    rig.hear(4, dialled(1), confirmed(5, 1));
    read_ended(&mut rig, 5, 1, 0);
    rig.hear(6, dialled(0), confirmed(5, 1));
    let report = rig.m.take_report();
    let [(LoadId(1), PullEnd::Loaded(stats))] = &report.loads[..] else { panic!("{report:?}") };
    assert_eq!(stats.bytes, 128);
}

#[test]
fn a_connection_lost_to_one_worker_is_not_lost_to_the_other() {
    let mut rig = reading();
    assert_eq!(read_failed(&mut rig, 4, 1, 1, LoadFailure::PeerLost), ["cancel 1"]);
    assert_eq!(
        read_failed(&mut rig, 5, 1, 0, LoadFailure::Cancelled),
        ["d0: release 5/1 aborted"],
        "told over the connection that stands, not kept for another"
    );
    assert_eq!(rig.loads(), ends(&[(1, "peer_lost")]));
}

#[test]
fn p7_a_producer_that_tells_other_places_in_the_same_life_is_not_believed() {
    let mut rig = reading();
    rig.lost(1_000, dialled(1));
    let mut moved = split_card();
    moved.workers[0].layout.regions[0].base = 64;
    assert_eq!(shaken(&mut rig, 1_001, 1, moved), Vec::<String>::new(), "as many workers, and another plan");
    assert_eq!(rig.m.stats().peers.handshakes_failed, 1);
}

#[test]
fn workers_that_are_dialled_at_the_same_time_take_one_answer() {
    let mut rig = reading();
    assert_eq!(rig.lost(1_000, dialled(0)), ["shake hands with 1"]);
    assert_eq!(rig.lost(1_000, dialled(1)), ["shake hands with 1 for source 1"]);
    assert_eq!(shaken(&mut rig, 1_001, 1, split_card()), ["connect d2", "connect d3"]);
    assert_eq!(shaken(&mut rig, 1_002, 0, split_card()), Vec::<String>::new(), "it has been answered");
}

#[test]
fn p4_a_load_of_many_portions_ends_at_once_where_there_is_nothing_to_read() {
    let mut layout = layout();
    layout.regions[0].heads_total = 1;
    layout.blocks = 100_000;
    let mut card = split_card();
    card.workers.iter_mut().for_each(|w| w.layout = layout.clone());
    let mut rig = rig_of(Rank(0), Topology::of(1), layout);
    let count = 50_000;
    let list = || (0..count).map(kv_proto::BlockId).collect();
    let groups = vec![GroupBlocks {
        group: 0,
        first: 0,
        remote_first: 0,
        tokens: count * 4,
        remote: list(),
        local: list(),
    }];
    let (lease, peer) = (lease_of(1, 5), (*peer(1)).clone());
    rig.order(0, &[ConsumerOrder::Load { load: LoadId(1), lease, offer: OFFER, peer, groups }]);
    shaken(&mut rig, 1, 0, card);
    rig.connected(2, 0);
    rig.connected(2, 1);
    assert_eq!(rig.hear(3, dialled(1), welcome_of(1)), ["d1: renew all +[5]", "d1: read done 5/1"]);
}

#[test]
fn a_consumer_with_more_readers_than_a_lease_keeps_is_unwelcome() {
    let mut rig = rig_of(Rank(0), Topology::of(1), with_heads(2));
    rig.take(0, Fact::LinkAccepted { link: accepted(0) });
    let mut message = hello(7, 100);
    if let WorkerMessage::Hello { topology, .. } = &mut message {
        *topology = Topology::of(300);
    }
    let said = rig.hear(1, accepted(0), message);
    assert!(said[0].contains("Topology"), "{said:?}");
}
