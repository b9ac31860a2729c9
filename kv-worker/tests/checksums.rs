//! Loads with checksums: what the consumer compares before it asks, and what the producer says of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;

use common::*;
use kv_proto::message::{COMPARED_MAX, GroupList, WorkerMessage};
use kv_proto::{LeaseId, LoadFailure, LoadId, OfferDigest};
use kv_worker::machine::io::{DigestOf, Fact, PullId, SourceKey};
use kv_worker::{Failure, WorkerLimits};

/// The consumer: load 1 of blocks 1 and 2 to 8 and 9 under lease 5, read whole; its digests are being computed.
fn read() -> Rig {
    let mut rig = Rig::with_checksums(limits());
    rig.order(0, &[load(1, 5, 1)]);
    assert_eq!(rig.ready(0, 1, 0), ["d0: renew all +[5]", "d0: read 128 bytes for 1"]);
    assert_eq!(rig.read_ended(10, 1), ["digest [8, 9] for 1 from 0"]);
    rig
}

fn portion(from: u32) -> DigestOf {
    DigestOf::Pull { pull: PullId::first(LoadId(1)), from }
}

/// The producer was asked to compare.
fn comparing() -> Rig {
    let mut rig = read();
    assert_eq!(rig.digested(12, portion(0), &[70, 71]), ["d0: compare 5/1 [1, 2] from 0: [70, 71]"]);
    rig
}

/// Load 1 is read block by block: the first is here and digested, the second is being read.
fn portioned() -> Rig {
    let mut rig = Rig::with_checksums(WorkerLimits { portion_bytes: 1, ..limits() });
    rig.order(0, &[load(1, 5, 1)]);
    assert_eq!(rig.ready(0, 1, 0), ["d0: renew all +[5]", "d0: read 64 bytes for 1"]);
    assert_eq!(rig.read_ended(10, 1), ["digest [8] for 1 from 0", "d0: read 64 bytes for 1"]);
    assert_eq!(rig.digested(12, portion(0), &[70]), ["d0: compare 5/1 [1] from 0: [70]"]);
    rig
}

// H-28
#[test]
fn p1_a_load_is_confirmed_after_its_blocks_were_found_equal_and_not_before() {
    let mut rig = comparing();
    assert_eq!(rig.hear(13, dialled(0), confirmed(5, 1)), NOTHING, "nobody asked");
    assert_eq!(rig.hear(14, dialled(0), compared(5, 1, 0, 2, true)), ["d0: read done 5/1"]);
    assert_eq!(rig.loads(), []);
    rig.hear(15, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
    rig.rest();
}

// H-28
#[test]
fn p8_a_portion_that_is_corrupt_fails_the_load_and_what_was_equal_before_it_is_kept() {
    for (equal, end) in [(0, "corrupt"), (1, "corrupt after 1")] {
        let mut rig = comparing();
        let told = rig.hear(14, dialled(0), compared(5, 1, 0, equal, true));
        assert_eq!(told, ["d0: release 5/1 load_failed"]);
        assert_eq!(rig.loads(), ends(&[(1, end)]));
        rig.rest();
        assert_eq!(rig.m.stats().pulls, 0);
    }
}

// H-19, H-28
#[test]
fn p3_a_portion_found_corrupt_while_the_next_is_read_ends_the_load_when_that_is_quiet() {
    let mut rig = portioned();
    assert_eq!(rig.hear(14, dialled(0), compared(5, 1, 0, 0, true)), ["cancel 1"]);
    assert_eq!(rig.loads(), [], "the transport may still write");
    assert_eq!(rig.read_ended(16, 1), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "corrupt")]));
}

// H-27, H-28
#[test]
fn p8_a_corrupt_last_portion_leaves_the_first_verified() {
    let mut rig = portioned();
    rig.hear(14, dialled(0), compared(5, 1, 0, 1, true));
    assert_eq!(rig.read_ended(20, 1), ["digest [9] for 1 from 1"]);
    assert_eq!(rig.digested(22, portion(1), &[71]), ["d0: compare 5/1 [2] from 1: [71]"]);
    assert_eq!(rig.hear(24, dialled(0), compared(5, 1, 1, 0, true)), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "corrupt after 1")]));
}

// H-28
#[test]
fn p5_answers_in_any_order_verify_no_more_than_is_equal_from_the_first_block_on() {
    let mut rig = portioned();
    rig.read_ended(20, 1);
    rig.digested(22, portion(1), &[71]);
    assert_eq!(rig.hear(23, dialled(0), compared(5, 1, 1, 1, true)), NOTHING);
    assert_eq!(rig.hear(24, dialled(0), compared(5, 1, 1, 0, true)), NOTHING, "answered already");
    assert_eq!(rig.hear(24, dialled(0), compared(5, 1, 0, 0, true)), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "corrupt")]), "the second block alone is of no use");

    let mut rig = portioned();
    rig.read_ended(20, 1);
    rig.digested(22, portion(1), &[71]);
    rig.hear(23, dialled(0), compared(5, 1, 1, 1, true));
    assert_eq!(rig.hear(24, dialled(0), compared(5, 1, 0, 1, true)), ["d0: read done 5/1"]);
    rig.hear(25, dialled(0), lapsed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "lapsed after 2")]), "all was equal under a lease that held");
}

// H-28
#[test]
fn p5_answers_to_what_was_not_asked_do_nothing() {
    let mut rig = comparing();
    for answer in [
        compared(5, 1, 1, 0, true),
        compared(5, 2, 0, 0, true),
        compared(6, 1, 0, 0, false),
        WorkerMessage::Checked { lease: LeaseId(5), attempt: kv_proto::Attempt(1), blocks: 2, held: true },
    ] {
        assert_eq!(rig.hear(13, dialled(0), answer), NOTHING);
    }
    assert_eq!(rig.loads(), []);
    assert_eq!(rig.hear(14, dialled(0), compared(5, 1, 0, 9, true)), ["d0: read done 5/1"], "more is all");
    assert_eq!(rig.hear(15, dialled(0), compared(5, 1, 0, 0, true)), NOTHING);
    // Digests that come again, or of what is not being digested.
    assert_eq!(rig.digested(16, portion(0), &[1]), NOTHING);
    assert_eq!(rig.digested(16, portion(7), &[1]), NOTHING);
    rig.hear(17, dialled(0), confirmed(5, 1));
    assert_eq!(rig.digested(18, portion(0), &[1]), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

// H-18, H-28
#[test]
fn p1_a_lease_that_had_not_held_when_the_blocks_were_compared_ends_the_load() {
    let mut rig = comparing();
    assert_eq!(rig.hear(14, dialled(0), compared(5, 1, 0, 2, false)), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
    let mut rig = portioned();
    assert_eq!(rig.hear(14, dialled(0), compared(5, 1, 0, 1, false)), ["cancel 1"]);
    assert_eq!(rig.read_failed(16, 1, LoadFailure::Cancelled), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
    let mut rig = comparing();
    assert_eq!(rig.hear(14, dialled(0), not_held(&[5])), NOTHING);
    assert_eq!(rig.loads(), ends(&[(1, "lapsed")]));
}

// H-20, H-28
#[test]
fn p4_an_unanswered_question_is_asked_again_and_given_up_at_the_limit() {
    let mut rig = comparing();
    assert_eq!(rig.pass(10 + REPEAT_MS), ["d0: compare 5/1 [1, 2] from 0: [70, 71]"]);
    rig.pass(10 + 2 * REPEAT_MS);
    assert_eq!(rig.pass(10 + CONFIRM_MS), ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "confirm_timed_out")]));
    // The same if our own digests are never computed.
    let mut rig = read();
    rig.pass(10 + REPEAT_MS);
    rig.pass(10 + CONFIRM_MS);
    assert_eq!(rig.loads(), ends(&[(1, "confirm_timed_out")]));
    assert_eq!(rig.digested(10 + CONFIRM_MS, portion(0), &[1, 2]), NOTHING);
    rig.rest();
}

// H-25, H-28
#[test]
fn a_link_lost_while_comparing_costs_nothing_but_time() {
    let mut rig = Rig::with_checksums(limits());
    rig.order(0, &[load(1, 5, 1)]);
    rig.ready(0, 1, 0);
    rig.read_ended(150, 1);
    rig.lost(160, dialled(0));
    assert_eq!(rig.digested(161, portion(0), &[70, 71]), NOTHING, "nobody can be asked");
    let told = rig.ready(162, 1, 1);
    assert_eq!(told, ["d1: renew all +[5]", "d1: compare 5/1 [1, 2] from 0: [70, 71]"]);
}

#[test]
fn a_load_ends_once_however_it_ends_while_it_is_compared() {
    let mut rig = comparing();
    assert_eq!(rig.order(13, &[cancel(1)]), ["d0: release 5/1 aborted"]);
    rig.hear(14, dialled(0), compared(5, 1, 0, 2, true));
    assert_eq!(rig.loads(), ends(&[(1, "cancelled")]));
    let mut rig = read();
    let failed = Err(Failure::new(LoadFailure::BadBlocks, "no such memory"));
    let told = rig.take(12, Fact::Digested { of: portion(0), digests: failed });
    assert_eq!(told, ["d0: release 5/1 load_failed"]);
    assert_eq!(rig.loads(), ends(&[(1, "bad_blocks")]));
    let mut rig = comparing();
    rig.m.close(at(13), &mut Vec::new());
    assert_eq!(rig.loads(), ends(&[(1, "closed")]));
}

// H-12, H-28
#[test]
fn a_load_that_is_compared_still_reads_as_far_as_its_lease_is_concerned() {
    let mut rig = comparing();
    assert_eq!(rig.order(13, &[load(1, 5, 2)]), ["d0: read 128 bytes for 2"]);
    assert_eq!(rig.hear(14, dialled(0), compared(5, 1, 0, 2, true)), ["d0: read more 5/1"]);
}

#[test]
fn a_load_of_nothing_has_nothing_to_compare() {
    let mut rig = comparing();
    let kv_proto::ConsumerOrder::Load { lease, peer, .. } = load(1, 6, 2) else { panic!() };
    let order = kv_proto::ConsumerOrder::Load {
        load: LoadId(2),
        lease,
        offer: OFFER,
        peer,
        groups: groups(&[], &[]),
    };
    assert_eq!(rig.order(13, &[order]), ["d0: read done 6/2"]);
}

// H-28
#[test]
fn without_checksums_nothing_is_digested_and_the_messages_are_those_without() {
    let mut rig = Rig::with(WorkerLimits { portion_bytes: 1, ..limits() });
    rig.order(0, &[load(1, 5, 1)]);
    rig.ready(0, 1, 0);
    assert_eq!(rig.read_ended(10, 1), ["d0: check 5/1 of 1", "d0: read 64 bytes for 1"]);
    assert_eq!(rig.read_ended(20, 1), ["d0: read done 5/1"]);
    assert_eq!(rig.hear(21, dialled(0), compared(5, 1, 0, 0, true)), NOTHING);
    rig.hear(22, dialled(0), confirmed(5, 1));
    assert_eq!(rig.loads(), ends(&[(1, "ok")]));
}

/// The producer: lease 1 is held, and a consumer in life 7 is greeted over a0.
fn lending() -> Rig {
    let mut rig = Rig::new();
    rig.greet(0, 0, 7);
    rig.own(0, &[announce(1), grant(1)]);
    rig
}

/// It was asked about blocks 3 and 4, and digests them.
fn asked() -> Rig {
    let mut rig = lending();
    let told = rig.hear(10, accepted(0), compare(1, 4, 6, &[3, 4], &[70, 71]));
    assert_eq!(told, ["digest [3, 4] for question 0"]);
    rig
}

const FIRST: DigestOf = DigestOf::Question(0);

// H-28
#[test]
fn a_producer_says_how_many_blocks_are_equal_before_the_first_that_is_not() {
    for (ours, equal) in [([70, 71], 2), ([70, 0], 1), ([0, 71], 0)] {
        let mut rig = asked();
        let told = rig.digested(12, FIRST, &ours);
        assert_eq!(told, [format!("a0: held 1/4, {equal} equal from 6")]);
        assert_eq!(rig.digested(13, FIRST, &ours), NOTHING);
        let stats = rig.m.stats().readers;
        assert_eq!((stats.compared, stats.unequal), (1, u64::from(equal < 2)));
        assert_eq!(rig.hear(14, accepted(0), read_done(1, 4)), ["a0: confirmed 1/4"], "it ended nothing");
    }
}

// H-18, H-28
#[test]
fn p1_a_lease_that_ends_while_its_blocks_are_digested_has_not_held() {
    let mut rig = asked();
    rig.pass(1_000);
    // The consumer's limit is over long since, and so is the wait for the digests.
    assert_eq!(rig.digested(1_001, FIRST, &[70, 71]), NOTHING);
    let mut rig = asked();
    rig.own(11, &[kv_proto::ProducerOrder::Revoke { lease: LeaseId(1) }]);
    assert_eq!(rig.digested(12, FIRST, &[70, 71]), ["a0: not held 1/4, 2 equal from 6"]);
    let told = rig.hear(13, accepted(0), compare(1, 4, 6, &[3, 4], &[70, 71]));
    assert_eq!(told, ["a0: not held 1/4, 0 equal from 6"], "no block is looked at for it");
}

// H-18, H-28
#[test]
fn p1_nothing_is_compared_under_a_lease_that_was_never_here_or_another_offer() {
    let mut rig = lending();
    let told = rig.hear(1, accepted(0), compare(9, 4, 0, &[3], &[70]));
    assert_eq!(told, ["a0: not held 9/4, 0 equal from 0"]);
    let mut forged = compare(1, 4, 0, &[3], &[70]);
    if let WorkerMessage::Compare { offer, .. } = &mut forged {
        *offer = OfferDigest::from_bytes([8; 16]);
    }
    assert_eq!(rig.hear(1, accepted(0), forged), ["a0: not held 1/4, 0 equal from 0"]);
    // A reader that has ended the lease for itself.
    rig.own(2, &[announce(2), grant(2)]);
    rig.hear(3, accepted(0), read_done(1, 4));
    assert_eq!(rig.hear(4, accepted(0), compare(1, 4, 0, &[3], &[70])), ["a0: not held 1/4, 0 equal from 0"]);
}

// H-15, H-28
#[test]
fn p5_a_question_that_comes_before_the_grant_is_answered_by_it() {
    for (order, answer) in [
        (grant(1), "a0: held 1/4, 1 equal from 0"),
        (kv_proto::ProducerOrder::Forget { lease: LeaseId(1) }, "a0: not held 1/4, 1 equal from 0"),
    ] {
        let mut rig = Rig::new();
        rig.greet(0, 0, 7);
        rig.own(0, &[announce(1)]);
        let told = rig.hear(1, accepted(0), compare(1, 4, 0, &[3], &[70]));
        assert_eq!(told, ["digest [3] for question 0"]);
        assert_eq!(rig.digested(2, FIRST, &[70]), NOTHING);
        assert_eq!(rig.hear(3, accepted(0), compare(1, 4, 0, &[3], &[70])), NOTHING, "it waits already");
        assert_eq!(rig.own(4, &[order]), [answer]);
        rig.rest();
    }
}

// H-20, H-28
#[test]
fn p4_a_question_waits_for_a_grant_no_longer_than_the_limit() {
    let mut rig = Rig::new();
    rig.greet(0, 0, 7);
    rig.own(0, &[announce(1)]);
    rig.hear(1, accepted(0), compare(1, 4, 0, &[3], &[70]));
    rig.digested(2, FIRST, &[70]);
    assert_eq!(rig.pass(1 + CONFIRM_MS), NOTHING);
    assert_eq!(rig.m.next_deadline(), None);
    assert_eq!(rig.own(300, &[grant(1)]), NOTHING);
}

// H-3, H-28
#[test]
fn a_question_about_blocks_beyond_the_pool_or_that_is_none_ends_the_connection() {
    let two = |first: u32, second: u32| WorkerMessage::Compare {
        lease: LeaseId(1),
        attempt: kv_proto::Attempt(4),
        offer: OFFER,
        from: 0,
        groups: [first, second].map(|group| GroupList { group, blocks: list(&[3]) }).to_vec(),
        digests: vec![kv_proto::message::BlockDigest(1)],
    };
    let many: Vec<u64> = (0..=u64::from(COMPARED_MAX)).collect();
    let blocks: Vec<u32> = many.iter().map(|n| *n as u32 % BLOCKS).collect();
    for bad in [
        compare(1, 4, 0, &[3, BLOCKS], &[70, 71]),
        compare(1, 4, 0, &[3], &[70, 71]),
        compare(1, 4, 0, &[3, 4], &[70]),
        compare(1, 4, 0, &[], &[]),
        compare(1, 4, 0, &blocks, &many),
        two(0, 1),
        two(0, 0),
        two(1, 0),
    ] {
        let mut rig = lending();
        assert_eq!(rig.hear(1, accepted(0), bad), ["disconnect a0"]);
        assert_eq!(rig.m.stats().readers.expelled, 1);
    }
    // Before a greeting nothing is compared.
    let mut rig = Rig::new();
    rig.take(0, Fact::LinkAccepted { link: accepted(0) });
    assert_eq!(rig.hear(0, accepted(0), compare(1, 4, 0, &[3], &[70])), ["disconnect a0"]);
}

// H-28
#[test]
fn p2_a_repeated_question_is_digested_once_while_it_is_open_and_again_when_it_was_answered() {
    let mut rig = asked();
    assert_eq!(rig.hear(11, accepted(0), compare(1, 4, 6, &[3, 4], &[70, 71])), NOTHING);
    assert_eq!(rig.hear(11, accepted(0), compare(1, 4, 8, &[5], &[72])), ["digest [5] for question 1"]);
    assert_eq!(rig.digested(12, DigestOf::Question(1), &[72]), ["a0: held 1/4, 1 equal from 8"]);
    assert_eq!(rig.digested(12, FIRST, &[70, 71]), ["a0: held 1/4, 2 equal from 6"]);
    let again = rig.hear(13, accepted(0), compare(1, 4, 6, &[3, 4], &[70, 71]));
    assert_eq!(again, ["digest [3, 4] for question 2"]);
}

// H-25, H-28
#[test]
fn p6_a_lost_connections_questions_are_not_answered_and_not_kept() {
    let mut rig = asked();
    rig.lost(11, accepted(0));
    rig.greet(11, 1, 7);
    let told = rig.hear(12, accepted(1), compare(1, 4, 6, &[3, 4], &[70, 71]));
    assert_eq!(told, ["digest [3, 4] for question 1"], "asked anew over the next connection");
    assert_eq!(rig.digested(13, FIRST, &[70, 71]), NOTHING);
    assert_eq!(rig.digested(14, DigestOf::Question(1), &[70, 71]), ["a1: held 1/4, 2 equal from 6"]);
    let failed = Err(Failure::new(LoadFailure::BadBlocks, "no such memory"));
    rig.hear(15, accepted(1), compare(1, 4, 6, &[3, 4], &[70, 71]));
    let told = rig.take(16, Fact::Digested { of: DigestOf::Question(2), digests: failed });
    assert_eq!(told, NOTHING, "there is nothing to say");
    rig.rest();
}

// H-28
#[test]
fn the_work_that_consumers_can_ask_for_is_bounded() {
    let mut rig = lending();
    let mut begun = 0;
    for from in 0..200 {
        begun += rig.hear(1, accepted(0), compare(1, 4, from, &[3], &[70])).len();
    }
    assert_eq!(begun, 64, "of one connection");
    for link in 1..20 {
        // Connections come and go; the work begun for those that are gone is still work.
        rig.lost(2, accepted(link - 1));
        rig.greet(2, link, 7);
        for from in 0..200 {
            begun += rig.hear(2, accepted(link), compare(1, 4, from, &[3], &[70])).len();
        }
    }
    assert_eq!(begun, 512, "of all");
    for number in 0..512 {
        rig.digested(3, DigestOf::Question(number), &[70]);
    }
    assert_eq!(rig.hear(4, accepted(19), compare(1, 4, 0, &[3], &[70])), ["digest [3] for question 512"]);
}

// H-28
#[test]
fn a_large_portion_is_compared_in_messages_that_can_be_sent() {
    use kv_proto::{BlockId, BlockLayout, BlockList, EngineId, GroupBlocks, Rank, Topology};
    use kv_worker::WorkerConfig;
    use kv_worker::machine::pulls::LocalMemory;
    use kv_worker::machine::worker::WorkerMachine;

    let count = 100_000;
    let big = BlockLayout { blocks: count, ..layout() };
    let config = WorkerConfig {
        engine: EngineId::new("us").unwrap(),
        incarnation: life(100),
        rank: Rank(0),
        topology: Topology::of(1),
        checksums: true,
        limits: WorkerLimits { portion_bytes: u64::MAX, ..limits() },
    };
    let local = LocalMemory { layout: big.clone(), regions: vec![kv_transport::RegionId(0)] };
    let mut rig = Rig::of(WorkerMachine::new(config, local, TRANSPORT));
    // The producer's blocks have no neighbours.
    let remote: BlockList = (0..count).map(|i| BlockId(i / 2 + (i % 2) * (count / 2))).collect();
    let local: BlockList = (0..count).map(BlockId).collect();
    let kv_proto::ConsumerOrder::Load { lease, peer: from, .. } = load(1, 5, 1) else { panic!() };
    let groups = vec![GroupBlocks { group: 0, first: 0, remote_first: 0, tokens: count * 4, remote, local }];
    let order = kv_proto::ConsumerOrder::Load { load: LoadId(1), lease, offer: OFFER, peer: from, groups };
    rig.order(0, &[order]);
    let mut theirs = card(1);
    theirs.workers[0].layout = big;
    rig.take(0, Fact::HandshakeEnded { key: SourceKey::first(peer(1)), result: Ok(theirs) });
    rig.connected(0, 0);
    rig.hear(0, dialled(0), welcome(1));
    assert_eq!(rig.read_ended(1, 1), ["digest 100000 blocks for 1 from 0"]);
    let digests: Vec<_> =
        (0..u64::from(count)).map(|n| kv_proto::message::BlockDigest(u64::MAX - n)).collect();
    let mut out = Vec::new();
    rig.m.take(at(2), Fact::Digested { of: portion(0), digests: Ok(digests.clone()) }, &mut out);
    let (mut seen, mut blocks) = (Vec::new(), 0);
    for decision in &out {
        let kv_worker::machine::io::Decision::Send { message, .. } = decision else { panic!("{decision:?}") };
        message.encode().unwrap();
        let WorkerMessage::Compare { from, groups, digests, .. } = message else { panic!("{message:?}") };
        assert_eq!(*from as usize, seen.len());
        assert_eq!(groups[0].blocks.len() as usize, digests.len());
        blocks += groups[0].blocks.len();
        seen.extend(digests.iter().copied());
    }
    assert_eq!((seen, blocks, out.len()), (digests, count, 4));
}

// H-27, H-28
#[test]
fn a_load_that_is_tried_again_asks_anew_what_was_not_answered() {
    let mut rig = Rig::with_checksums(WorkerLimits { portion_bytes: 1, retries: 1, ..limits() });
    rig.order(0, &[load(1, 5, 1)]);
    rig.ready(0, 1, 0);
    rig.read_ended(150, 1);
    assert_eq!(rig.digested(151, portion(0), &[70]), ["d0: compare 5/1 [1] from 0: [70]"]);
    // The connection is lost with the question, and the second block is not here.
    assert_eq!(rig.read_failed(160, 1, LoadFailure::PeerLost), NOTHING);
    rig.lost(160, dialled(0));
    let told = rig.ready(170, 1, 1);
    assert_eq!(told, ["d1: renew all +[5]", "d1: compare 5/1 [1] from 0: [70]"]);
    assert_eq!(rig.hear(175, dialled(1), compared(5, 1, 0, 1, true)), NOTHING);
    assert_eq!(rig.pass(160 + RETRY_MIN_MS), ["d1: read 64 bytes for 1"]);
    assert_eq!(rig.read_ended(270, 1), ["digest [9] for 1 from 1"]);
    rig.digested(271, portion(1), &[71]);
    assert_eq!(rig.hear(272, dialled(1), compared(5, 1, 1, 1, true)), ["d1: read done 5/1"]);
}
