//! Any value that can be written.

use kv_proto::message::{BlockDigest, GroupList, WorkerMessage};
use kv_proto::params::{EXTRA_KEY, PrefixMarks};
use kv_proto::{
    Attempt, BlockId, BlockList, ConsumerOrder, EngineId, GroupBlocks, Incarnation, LeaseId, LeaseRef,
    LeaseTerms, LoadId, LoadStats, PeerLocator, Plan, ProducerOrder, PullEnd, Rank, RemotePrefill, Report,
    RequestId, Topology,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value};

use crate::common::{FAILURES, HELLO_REFUSALS, LEASE_ENDS, RELEASES};

/// Ids as an allocator gives them, mostly neighbours, and as a liar does.
pub(crate) fn block_list(max: u32) -> impl Strategy<Value = BlockList> {
    vec((0..max, 1..20u32), 0..12).prop_map(move |runs| {
        runs.into_iter()
            .flat_map(|(first, count)| first..first.saturating_add(count).min(max))
            .map(BlockId)
            .collect()
    })
}

pub(crate) fn label(max: usize) -> impl Strategy<Value = String> {
    vec(any::<char>().prop_filter("a control character", |c| !c.is_control()), 1..max)
        .prop_map(|chars| chars.into_iter().collect())
}

pub(crate) fn engine_id() -> impl Strategy<Value = EngineId> {
    label(60).prop_map(|text| EngineId::new(text).unwrap())
}

pub(crate) fn life() -> impl Strategy<Value = Incarnation> {
    any::<u64>().prop_map(Incarnation::from_random)
}

pub(crate) fn lease_id() -> impl Strategy<Value = LeaseId> {
    any::<u64>().prop_map(LeaseId)
}

pub(crate) fn lease() -> impl Strategy<Value = LeaseRef> {
    (life(), lease_id()).prop_map(|(incarnation, lease)| LeaseRef { incarnation, lease })
}

pub(crate) fn peer() -> impl Strategy<Value = PeerLocator> {
    (engine_id(), life(), label(40), any::<u16>()).prop_map(|(engine, incarnation, host, port)| PeerLocator {
        engine,
        incarnation,
        host,
        port,
    })
}

pub(crate) fn load() -> impl Strategy<Value = LoadId> {
    any::<u64>().prop_map(LoadId)
}

pub(crate) fn group() -> impl Strategy<Value = GroupBlocks> {
    (any::<u32>(), any::<[u32; 3]>(), block_list(u32::MAX), block_list(1000)).prop_map(
        |(group, [first, remote_first, tokens], remote, local)| GroupBlocks {
            group,
            first,
            remote_first,
            tokens,
            remote,
            local,
        },
    )
}

pub(crate) fn plan() -> impl Strategy<Value = Plan> {
    let producer = prop_oneof![
        lease_id().prop_map(|lease| ProducerOrder::Announce { lease }),
        (lease_id(), any::<[u64; 4]>()).prop_map(|(lease, [ttl_ms, renewal_ms, max_ms, grace_ms])| {
            ProducerOrder::Grant {
                lease,
                terms: LeaseTerms { ttl_ms, renewal_ms, max_ms, grace_ms },
                offer: crate::common::offer(),
            }
        }),
        lease_id().prop_map(|lease| ProducerOrder::Forget { lease }),
        lease_id().prop_map(|lease| ProducerOrder::Revoke { lease }),
    ];
    let consumer = prop_oneof![
        (lease(), peer()).prop_map(|(lease, peer)| ConsumerOrder::Track {
            lease,
            offer: crate::common::offer(),
            peer
        }),
        (load(), lease(), peer(), vec(group(), 0..3)).prop_map(|(load, lease, peer, groups)| {
            ConsumerOrder::Load { load, lease, offer: crate::common::offer(), peer, groups }
        }),
        (lease(), peer(), select(&RELEASES[..])).prop_map(|(lease, peer, reason)| {
            ConsumerOrder::Release { lease, offer: crate::common::offer(), peer, reason }
        }),
        load().prop_map(|load| ConsumerOrder::Cancel { load }),
    ];
    (vec(producer, 0..5), vec(consumer, 0..5)).prop_map(|(producer, consumer)| Plan { producer, consumer })
}

pub(crate) fn report() -> impl Strategy<Value = Report> {
    let end = select(&LEASE_ENDS[..]);
    let pull = prop_oneof![
        any::<[u64; 4]>().prop_map(|[bytes, ranges, read_us, confirm_us]| {
            PullEnd::Loaded(LoadStats { bytes, ranges, read_us, confirm_us })
        }),
        (select(&FAILURES[..]), any::<String>(), any::<u32>())
            .prop_map(|(reason, detail, verified)| PullEnd::Failed { reason, detail, verified }),
    ];
    (any::<u32>(), vec((lease_id(), end), 0..5), vec((load(), pull), 0..5))
        .prop_map(|(rank, leases, loads)| Report { rank: Rank(rank), leases, loads })
}

pub(crate) fn message() -> impl Strategy<Value = WorkerMessage> {
    let attempt = || any::<u64>().prop_map(Attempt);
    let names = || vec(lease_id().prop_map(|lease| (lease, crate::common::offer())), 0..50);
    let hello = (any::<[u32; 4]>(), engine_id(), life(), life());
    prop_oneof![
        hello.prop_map(|([version, rank, ranks, to_rank], engine, incarnation, to)| WorkerMessage::Hello {
            version,
            engine,
            incarnation,
            rank: Rank(rank),
            topology: Topology::of(ranks),
            to,
            to_rank: Rank(to_rank),
        }),
        (life(), any::<u32>())
            .prop_map(|(incarnation, rank)| WorkerMessage::Welcome { incarnation, rank: Rank(rank) }),
        (select(&HELLO_REFUSALS[..]), life())
            .prop_map(|(reason, incarnation)| WorkerMessage::Unwelcome { reason, incarnation }),
        (any::<u64>(), any::<bool>(), names(), names())
            .prop_map(|(seq, all, wanted, dropped)| WorkerMessage::Renew { seq, all, wanted, dropped }),
        Just(WorkerMessage::Relist {}),
        names().prop_map(|leases| WorkerMessage::NotHeld { leases }),
        (lease_id(), attempt(), any::<bool>()).prop_map(|(lease, attempt, more)| WorkerMessage::ReadDone {
            lease,
            attempt,
            offer: crate::common::offer(),
            more
        }),
        (lease_id(), attempt(), any::<u32>()).prop_map(|(lease, attempt, blocks)| WorkerMessage::Check {
            lease,
            attempt,
            offer: crate::common::offer(),
            blocks
        }),
        (lease_id(), attempt(), any::<u32>(), any::<bool>()).prop_map(|(lease, attempt, blocks, held)| {
            WorkerMessage::Checked { lease, attempt, blocks, held }
        }),
        (
            lease_id(),
            attempt(),
            any::<u32>(),
            vec((any::<u32>(), block_list(u32::MAX)), 0..4),
            vec(any::<u64>(), 0..20)
        )
            .prop_map(|(lease, attempt, from, groups, digests)| WorkerMessage::Compare {
                lease,
                attempt,
                offer: crate::common::offer(),
                from,
                groups: groups.into_iter().map(|(group, blocks)| GroupList { group, blocks }).collect(),
                digests: digests.into_iter().map(BlockDigest).collect(),
            }),
        (lease_id(), attempt(), any::<u32>(), any::<u32>(), any::<bool>()).prop_map(
            |(lease, attempt, from, equal, held)| WorkerMessage::Compared {
                lease,
                attempt,
                from,
                equal,
                held
            }
        ),
        (lease_id(), attempt()).prop_map(|(lease, attempt)| WorkerMessage::Confirmed { lease, attempt }),
        (lease_id(), attempt()).prop_map(|(lease, attempt)| WorkerMessage::Lapsed { lease, attempt }),
        (lease_id(), attempt(), select(&RELEASES[..])).prop_map(|(lease, attempt, reason)| {
            WorkerMessage::Release { lease, attempt, offer: crate::common::offer(), reason }
        }),
    ]
}

pub(crate) fn one_offer() -> impl Strategy<Value = RemotePrefill> {
    let ids = |count: usize| vec(0..u32::MAX, count).prop_map(|ids| ids.into_iter().map(BlockId).collect());
    let blocks = (0u32..200, 1u32..=64).prop_flat_map(move |(tokens, block_tokens)| {
        let count = tokens.div_ceil(block_tokens) as usize;
        // Without blocks there may be no group; with blocks there is at least one.
        let groups = if count == 0 { 0..3 } else { 1..4 };
        // A list may begin late, but no group is empty.
        let late = move |list: BlockList, skipped: usize| {
            let first = if count == 0 { 0 } else { (skipped % count) as u32 };
            (list.skip(first), first)
        };
        let list = (ids(count), any::<usize>()).prop_map(move |(list, skipped)| late(list, skipped));
        (Just(tokens), Just(block_tokens), vec(list, groups), any::<bool>())
    });
    let names = (engine_id(), label(200), label(60), 1..=u16::MAX, 1u32..=65_535);
    let rest = (life(), any::<u64>(), label(30), vec((label(10), json_value()), 0..3));
    (blocks, names, rest).prop_map(
        |(
            (tokens, block_tokens, lists, marked),
            (engine, request, host, port, ranks),
            (life, lease, digest, other),
        )| {
            let names = ["tp_size", "alternatives", EXTRA_KEY];
            let ours =
                |key: &str| ["remote_", "do_"].iter().any(|p| key.starts_with(p)) || names.contains(&key);
            let (blocks, firsts) = lists.into_iter().unzip();
            let prompt: Vec<u32> = (0..tokens).collect();
            let marks = if marked { PrefixMarks::of(&prompt, block_tokens) } else { PrefixMarks::default() };
            RemotePrefill {
                engine,
                request: RequestId::new(request).unwrap(),
                host,
                port,
                ranks,
                tokens,
                block_tokens,
                blocks,
                firsts,
                incarnation: life,
                lease: (tokens > 0).then_some(LeaseId(lease)),
                token_digest: digest,
                marks,
                alternatives: vec![],
                other: other.into_iter().filter(|(key, _)| !ours(key)).collect(),
            }
        },
    )
}

pub(crate) fn remote_prefill() -> impl Strategy<Value = RemotePrefill> {
    (one_offer(), vec(one_offer(), 0..3))
        .prop_map(|(first, alternatives)| RemotePrefill { alternatives, ..first })
}

pub(crate) fn without_others_keys(mut offer: RemotePrefill) -> RemotePrefill {
    offer.other.clear();
    offer.alternatives.iter_mut().for_each(|other| other.other.clear());
    offer
}

pub(crate) fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(Value::from),
            vec((any::<String>(), inner), 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect::<Map<_, _>>())),
        ]
    })
}
