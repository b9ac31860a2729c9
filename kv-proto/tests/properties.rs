//! Decoders against any bytes, round trips of any value, and readers older and newer than the writer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;

use common::{
    COPY_FAILURES, FAILURES, HELLO_REFUSALS, LEASE_ENDS, LIFE, RELEASES, decode_all, encodings, engine,
    fingerprint,
};
use kv_proto::handshake::{Answer, EngineCard, HandshakeError, Query, RefusalCode, WorkerCard};
use kv_proto::message::{BlockDigest, GroupList, WorkerMessage};
use kv_proto::params::{EXTRA_KEY, PrefixMarks};
use kv_proto::{
    Attempt, BlockId, BlockList, CodecError, ConsumerOrder, CopyGroup, CopyId, CopyNews, CopyOrder,
    CopyStats, CopyWay, EngineId, GroupBlocks, Incarnation, LeaseId, LeaseRef, LeaseTerms, LoadId, LoadStats,
    PROTOCOL_VERSION, PeerLocator, Plan, ProducerOrder, PullEnd, Rank, RemotePrefill, Report, RequestId,
    Topology, TransferParams,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use serde::Serialize;
use serde_json::{Map, Value, json};

// --- values ---

/// Ids as an allocator gives them, mostly neighbours, and as a liar does.
fn block_list(max: u32) -> impl Strategy<Value = BlockList> {
    vec((0..max, 1..20u32), 0..12).prop_map(move |runs| {
        runs.into_iter()
            .flat_map(|(first, count)| first..first.saturating_add(count).min(max))
            .map(BlockId)
            .collect()
    })
}

fn label(max: usize) -> impl Strategy<Value = String> {
    vec(any::<char>().prop_filter("a control character", |c| !c.is_control()), 1..max)
        .prop_map(|chars| chars.into_iter().collect())
}

fn engine_id() -> impl Strategy<Value = EngineId> {
    label(60).prop_map(|text| EngineId::new(text).unwrap())
}

fn life() -> impl Strategy<Value = Incarnation> {
    any::<u64>().prop_map(Incarnation::from_random)
}

fn lease_id() -> impl Strategy<Value = LeaseId> {
    any::<u64>().prop_map(LeaseId)
}

fn lease() -> impl Strategy<Value = LeaseRef> {
    (life(), lease_id()).prop_map(|(incarnation, lease)| LeaseRef { incarnation, lease })
}

fn peer() -> impl Strategy<Value = PeerLocator> {
    (engine_id(), life(), label(40), any::<u16>()).prop_map(|(engine, incarnation, host, port)| PeerLocator {
        engine,
        incarnation,
        host,
        port,
    })
}

fn load() -> impl Strategy<Value = LoadId> {
    any::<u64>().prop_map(LoadId)
}

fn group() -> impl Strategy<Value = GroupBlocks> {
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

fn plan() -> impl Strategy<Value = Plan> {
    let producer = prop_oneof![
        lease_id().prop_map(|lease| ProducerOrder::Announce { lease }),
        (lease_id(), any::<[u64; 4]>()).prop_map(|(lease, [ttl_ms, renewal_ms, max_ms, grace_ms])| {
            ProducerOrder::Grant {
                lease,
                terms: LeaseTerms { ttl_ms, renewal_ms, max_ms, grace_ms },
                offer: common::offer(),
            }
        }),
        lease_id().prop_map(|lease| ProducerOrder::Forget { lease }),
        lease_id().prop_map(|lease| ProducerOrder::Revoke { lease }),
    ];
    let consumer = prop_oneof![
        (lease(), peer()).prop_map(|(lease, peer)| ConsumerOrder::Track {
            lease,
            offer: common::offer(),
            peer
        }),
        (load(), lease(), peer(), vec(group(), 0..3)).prop_map(|(load, lease, peer, groups)| {
            ConsumerOrder::Load { load, lease, offer: common::offer(), peer, groups }
        }),
        (lease(), peer(), select(&RELEASES[..])).prop_map(|(lease, peer, reason)| {
            ConsumerOrder::Release { lease, offer: common::offer(), peer, reason }
        }),
        load().prop_map(|load| ConsumerOrder::Cancel { load }),
    ];
    (vec(producer, 0..5), vec(consumer, 0..5), vec(copy(), 0..3))
        .prop_map(|(producer, consumer, copies)| Plan { producer, consumer, copies })
}

fn copy() -> impl Strategy<Value = CopyOrder> {
    let part = (any::<u32>(), block_list(u32::MAX), block_list(1000));
    let groups = vec(part.prop_map(|(group, device, host)| CopyGroup { group, device, host }), 0..3);
    (any::<[u64; 2]>(), select(&[CopyWay::Save, CopyWay::Restore][..]), groups)
        .prop_map(|([copy, number], way, groups)| CopyOrder { copy: CopyId(copy), number, way, groups })
}

fn copy_news() -> impl Strategy<Value = (CopyId, CopyNews)> {
    let news = prop_oneof![
        any::<[u64; 3]>().prop_map(|[bytes, ranges, copy_us]| CopyNews::Done(CopyStats {
            bytes,
            ranges,
            copy_us
        })),
        (select(&COPY_FAILURES[..]), any::<String>())
            .prop_map(|(reason, detail)| CopyNews::Failed { reason, detail }),
        Just(CopyNews::Late),
    ];
    (any::<u64>().prop_map(CopyId), news)
}

fn report() -> impl Strategy<Value = Report> {
    let end = select(&LEASE_ENDS[..]);
    let pull = prop_oneof![
        any::<[u64; 4]>().prop_map(|[bytes, ranges, read_us, confirm_us]| {
            PullEnd::Loaded(LoadStats { bytes, ranges, read_us, confirm_us })
        }),
        (select(&FAILURES[..]), any::<String>(), any::<u32>())
            .prop_map(|(reason, detail, verified)| PullEnd::Failed { reason, detail, verified }),
    ];
    (any::<u32>(), vec((lease_id(), end), 0..5), vec((load(), pull), 0..5), vec(copy_news(), 0..3))
        .prop_map(|(rank, leases, loads, copies)| Report { rank: Rank(rank), leases, loads, copies })
}

fn message() -> impl Strategy<Value = WorkerMessage> {
    let attempt = || any::<u64>().prop_map(Attempt);
    let names = || vec(lease_id().prop_map(|lease| (lease, common::offer())), 0..50);
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
            offer: common::offer(),
            more
        }),
        (lease_id(), attempt(), any::<u32>()).prop_map(|(lease, attempt, blocks)| WorkerMessage::Check {
            lease,
            attempt,
            offer: common::offer(),
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
                offer: common::offer(),
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
            WorkerMessage::Release { lease, attempt, offer: common::offer(), reason }
        }),
    ]
}

fn one_offer() -> impl Strategy<Value = RemotePrefill> {
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

fn remote_prefill() -> impl Strategy<Value = RemotePrefill> {
    (one_offer(), vec(one_offer(), 0..3))
        .prop_map(|(first, alternatives)| RemotePrefill { alternatives, ..first })
}

fn without_others_keys(mut offer: RemotePrefill) -> RemotePrefill {
    offer.other.clear();
    offer.alternatives.iter_mut().for_each(|other| other.other.clear());
    offer
}

fn json_value() -> impl Strategy<Value = Value> {
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

// --- damage ---

#[derive(Debug, Clone)]
enum Damage {
    Flip(prop::sample::Index, u8),
    Set(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Extend(Vec<u8>),
    Remove(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        match self {
            Self::Flip(at, mask) => {
                let at = at.index(bytes.len());
                bytes[at] ^= mask;
            }
            Self::Set(at, byte) => {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            Self::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Self::Extend(more) => bytes.extend(more),
            Self::Remove(at) => drop(bytes.remove(at.index(bytes.len()))),
            Self::Insert(at, more) => {
                let at = at.index(bytes.len());
                bytes.splice(at..at, more.iter().copied());
            }
        }
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = || any::<prop::sample::Index>();
    prop_oneof![
        (at(), 1..=u8::MAX).prop_map(|(at, mask)| Damage::Flip(at, mask)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        at().prop_map(Damage::Cut),
        vec(any::<u8>(), 1..10).prop_map(Damage::Extend),
        at().prop_map(Damage::Remove),
        (at(), vec(any::<u8>(), 1..6)).prop_map(|(at, more)| Damage::Insert(at, more)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    // R104
    #[test]
    fn no_bytes_panic_a_decoder(bytes in vec(any::<u8>(), 0..400)) {
        decode_all(&bytes);
    }

    #[test]
    fn no_damage_panics_a_decoder(which in select(encodings()), damages in vec(damage(), 1..6)) {
        let mut bytes = which;
        for damage in damages {
            damage.apply(&mut bytes);
        }
        decode_all(&bytes);
    }

    #[test]
    fn what_is_cut_or_continued_is_no_value(which in select(encodings()), at: prop::sample::Index, more: u8) {
        prop_assert_eq!(decode_all(&which), 1, "each encoding is of one kind");
        prop_assert_eq!(decode_all(&which[..at.index(which.len())]), 0);
        prop_assert_eq!(decode_all(&[&which[..], &[more]].concat()), 0);
    }

    #[test]
    fn block_lists_keep_every_id(ids in vec(prop_oneof![0..50u32, any::<u32>()], 0..100)) {
        let list: BlockList = ids.iter().copied().map(BlockId).collect();
        prop_assert_eq!(list.iter().map(|b| b.0).collect::<Vec<_>>(), ids.clone());
        prop_assert_eq!(list.len() as usize, ids.len());
        prop_assert_eq!(list.highest().map(|b| b.0), ids.iter().copied().max());
        let bytes = rmp_serde::to_vec_named(&list).unwrap();
        prop_assert_eq!(rmp_serde::from_slice::<BlockList>(&bytes).unwrap(), list.clone());
        let tail = ids.len() / 3;
        prop_assert_eq!(list.skip(tail as u32).iter().map(|b| b.0).collect::<Vec<_>>(), ids[tail..].to_vec());
    }

    #[test]
    fn plans_survive(plan in plan()) {
        prop_assert_eq!(Plan::decode(&plan.encode().unwrap()), Ok(plan));
    }

    #[test]
    fn reports_survive(report in report()) {
        prop_assert_eq!(Report::decode(&report.encode().unwrap()), Ok(report));
    }

    #[test]
    fn messages_survive(message in message()) {
        prop_assert_eq!(WorkerMessage::decode(&message.encode().unwrap()), Ok(message));
    }

    #[test]
    fn parameters_survive_also_as_text(remote in remote_prefill()) {
        let params = TransferParams::RemotePrefill(Box::new(remote.clone()));
        let value = params.to_json();
        prop_assert_eq!(TransferParams::parse(&value), Ok(Some(params)));
        // A router parses and prints; floating-point numbers of other keys may lose their last digit there.
        let text: Value = serde_json::from_str(&value.to_string()).unwrap();
        let Ok(Some(TransferParams::RemotePrefill(read))) = TransferParams::parse(&text) else {
            return Err(TestCaseError::fail("the text was refused"));
        };
        prop_assert_eq!(without_others_keys(*read), without_others_keys(remote));
    }

    #[test]
    fn no_json_panics_the_parser(value in json_value()) {
        let _ = TransferParams::parse(&value);
    }

    // H-3
    #[test]
    fn one_strange_field_costs_an_error_at_most(
        remote in remote_prefill(),
        which: prop::sample::Index,
        inner: bool,
        strange in option::of(json_value()),
    ) {
        let mut value = TransferParams::RemotePrefill(Box::new(remote)).to_json();
        let target = if inner { &mut value[EXTRA_KEY] } else { &mut value };
        let object = target.as_object_mut().unwrap();
        let key = object.keys().nth(which.index(object.len())).unwrap().clone();
        match strange {
            Some(strange) => drop(object.insert(key, strange)),
            None => drop(object.remove(&key)),
        }
        if let Ok(Some(params)) = TransferParams::parse(&value) {
            prop_assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
        }
    }
}

// --- older and newer peers ---

fn to_value(bytes: &[u8]) -> Value {
    rmp_serde::from_slice(bytes).unwrap()
}

/// Adds a field that this version does not know to the maps at these places.
fn with_unknown_fields(bytes: &[u8], places: &[&str]) -> Vec<u8> {
    let mut value = to_value(bytes);
    for place in places {
        let map =
            value.pointer_mut(place).and_then(Value::as_object_mut).unwrap_or_else(|| panic!("{place}"));
        map.insert("of_a_later_version".to_owned(), json!({"deep": [1, {"x": null}, "text"]}));
    }
    rmp_serde::to_vec_named(&value).unwrap()
}

#[test]
fn fields_of_a_later_version_are_ignored() {
    for (name, message) in common::messages() {
        let bytes = message.encode().unwrap();
        let variant = to_value(&bytes).as_object().unwrap().keys().next().unwrap().clone();
        let longer = with_unknown_fields(&bytes, &[&format!("/{variant}")]);
        assert_eq!(WorkerMessage::decode(&longer), Ok(message), "{name}");
    }
    let plan = common::plan();
    let places = [
        "",
        "/body",
        "/body/producer/0/announce",
        "/body/producer/1/grant",
        "/body/producer/1/grant/terms",
        "/body/consumer/0/track/lease",
        "/body/consumer/0/track/peer",
        "/body/consumer/1/load",
        "/body/consumer/1/load/groups/0",
        "/body/consumer/2/cancel",
        "/body/consumer/3/release",
    ];
    assert_eq!(Plan::decode(&with_unknown_fields(&plan.encode().unwrap(), &places)), Ok(plan));
    let report = common::report();
    let places = ["", "/body", "/body/loads/0/1/loaded", "/body/loads/1/1/failed"];
    assert_eq!(Report::decode(&with_unknown_fields(&report.encode().unwrap(), &places)), Ok(report));
}

/// A plan or a report as another build may write it.
fn step_frame(kind: &str, version: u32, body: Value) -> Vec<u8> {
    rmp_serde::to_vec_named(&json!({"kind": kind, "version": version, "body": body})).unwrap()
}

#[test]
fn plans_and_reports_say_what_they_are() {
    let report = common::report().encode().unwrap();
    let error = Plan::decode(&report).unwrap_err().to_string();
    assert!(error.contains("\"report\"") || error.contains("plan"), "{error}");
    assert!(Report::decode(&common::plan().encode().unwrap()).is_err());
    for (name, message) in common::messages() {
        let bytes = message.encode().unwrap();
        assert!(Plan::decode(&bytes).is_err() && Report::decode(&bytes).is_err(), "{name}");
    }
    let later = step_frame("plan", PROTOCOL_VERSION + 1, json!({}));
    let expected = CodecError::Version { what: "plan", ours: PROTOCOL_VERSION, theirs: PROTOCOL_VERSION + 1 };
    assert_eq!(Plan::decode(&later), Err(expected));
    let other = step_frame("report", PROTOCOL_VERSION, json!({}));
    assert_eq!(
        Plan::decode(&other).unwrap_err().to_string(),
        "plan cannot be decoded: it says that it is a \"report\""
    );
}

#[test]
fn fields_that_an_earlier_version_lacks_take_their_defaults() {
    let plan_of = |body: Value| step_frame("plan", PROTOCOL_VERSION, body);
    let report_of = |body: Value| step_frame("report", PROTOCOL_VERSION, body);
    assert_eq!(Plan::decode(&plan_of(json!({}))), Ok(Plan::default()));
    let plan = Plan { producer: vec![ProducerOrder::Forget { lease: LeaseId(1) }], ..Plan::default() };
    assert_eq!(Plan::decode(&plan_of(json!({"producer": [{"forget": {"lease": 1}}]}))), Ok(plan));
    assert_eq!(Report::decode(&report_of(json!({"rank": 3}))), Ok(Report::new(Rank(3))));
    // What has no default is missed by name.
    let error = Report::decode(&report_of(json!({"leases": []}))).unwrap_err();
    assert!(error.to_string().contains("missing field `rank`"), "{error}");
}

#[test]
fn reasons_of_a_later_version_are_understood_as_other() {
    let of = |value: Value| rmp_serde::to_vec_named(&value).unwrap();
    let release =
        json!({"release": {"lease": 1, "attempt": 0, "offer": [1, 2], "reason": "of_a_later_version"}});
    let Ok(WorkerMessage::Release { reason, .. }) = WorkerMessage::decode(&of(release)) else {
        panic!("refused")
    };
    assert_eq!(reason, kv_proto::ReleaseReason::Other);
    let unwelcome = json!({"unwelcome": {"reason": "of_a_later_version", "incarnation": 1}});
    let Ok(WorkerMessage::Unwelcome { reason, .. }) = WorkerMessage::decode(&of(unwelcome)) else {
        panic!("refused")
    };
    assert_eq!(reason, kv_proto::message::HelloRefusal::Other);
    let loads = json!([[1, {"failed": {"reason": "of_a_later_version", "detail": ""}}]]);
    let report =
        Report::decode(&step_frame("report", PROTOCOL_VERSION, json!({"rank": 0, "loads": loads}))).unwrap();
    assert!(matches!(report.loads[0].1, PullEnd::Failed { reason: kv_proto::LoadFailure::Other, .. }));
    // An order or a message of a later version cannot be obeyed, and is an error.
    assert!(WorkerMessage::decode(&of(json!({"of_a_later_version": {}}))).is_err());
    let strange = json!({"producer": [{"of_a_later_version": {}}]});
    assert!(Plan::decode(&step_frame("plan", PROTOCOL_VERSION, strange)).is_err());
}

/// The outer form of the handshake as another version may write it.
#[derive(Serialize)]
struct Outer<'a> {
    of_a_later_version: [u8; 2],
    service: &'a str,
    version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<kv_proto::Fingerprint>,
    #[serde(with = "serde_bytes")]
    body: &'a [u8],
}

fn outer(service: &str, version: u32, fingerprint: Option<kv_proto::Fingerprint>, body: &[u8]) -> Vec<u8> {
    rmp_serde::to_vec_named(&Outer { of_a_later_version: [1, 2], service, version, fingerprint, body })
        .unwrap()
}

fn read(bytes: &[u8]) -> Result<EngineCard, HandshakeError> {
    Answer::decode(bytes, &fingerprint(), &engine("p-0"), LIFE)
}

// H-4
#[test]
fn the_handshake_tells_what_differs_before_it_looks_at_the_body() {
    let query = common::query();
    let body = with_unknown_fields(&rmp_serde::to_vec_named(&query).unwrap(), &["", "/topology"]);
    let of = |version, fingerprint| outer("kv-connector", version, fingerprint, &body);
    assert_eq!(
        Query::decode(&of(PROTOCOL_VERSION, Some(fingerprint()))),
        Ok((query.clone(), Some(fingerprint())))
    );
    assert_eq!(Query::decode(&of(PROTOCOL_VERSION, None)), Ok((query, None)));
    let version = HandshakeError::Version { theirs: PROTOCOL_VERSION + 1 };
    for body in [&b""[..], b"\xc1", &[0x91; 1000]] {
        let later = outer("kv-connector", PROTOCOL_VERSION + 1, None, body);
        assert_eq!(Query::decode(&later), Err(version.clone()));
        assert_eq!(read(&later), Err(version.clone()));
        let other = outer("another", PROTOCOL_VERSION, None, body);
        assert_eq!(read(&other), Err(HandshakeError::Service { got: "another".to_owned() }));
        let differs = outer("kv-connector", PROTOCOL_VERSION, Some(fingerprint().with("model", "x")), body);
        assert!(matches!(read(&differs), Err(HandshakeError::Incompatible { .. })));
        let damaged = outer("kv-connector", PROTOCOL_VERSION, Some(fingerprint()), body);
        assert!(matches!(read(&damaged), Err(HandshakeError::Codec(CodecError::Malformed { .. }))));
    }
}

#[test]
fn a_code_of_a_later_version_is_understood_as_other() {
    let body =
        rmp_serde::to_vec_named(&json!({"refused": {"code": "of_a_later_version", "message": "m"}})).unwrap();
    let expected = HandshakeError::Refused { code: RefusalCode::Other, message: "m".to_owned() };
    assert_eq!(read(&outer("kv-connector", PROTOCOL_VERSION, None, &body)), Err(expected));
}

// --- depth ---

#[test]
fn deep_nesting_is_an_error_and_no_overflow() {
    // Lists, maps with one entry, and both below a field that nobody knows.
    let lists = vec![0x91; 1 << 20];
    let maps = [0x81, 0xa1, b'x'].repeat(300_000);
    let unknown = [&[0x82, 0xa7][..], b"unknown", &lists].concat();
    let deep_body = outer("kv-connector", PROTOCOL_VERSION, Some(fingerprint()), &lists);
    let mixed = [0x91, 0x81, 0xa1, b'x'].repeat(200_000);
    // Small, so that a few thousand levels would not go unnoticed.
    let thread = std::thread::Builder::new().stack_size(512 << 10);
    let decoded = thread.spawn(move || {
        for bytes in [&lists, &maps, &unknown, &deep_body, &mixed] {
            assert_eq!(decode_all(bytes), 0);
        }
        // A field that nobody knows may be nested a little, and no more.
        for (levels, taken) in [(10, 1), (100, 0)] {
            let mut value = json!([]);
            for _ in 0..levels {
                value = json!([value]);
            }
            let nested = step_frame("plan", PROTOCOL_VERSION, json!({"unknown": value}));
            assert_eq!(usize::from(Plan::decode(&nested).is_ok()), taken, "{levels} levels");
        }
    });
    decoded.unwrap().join().unwrap();
}

// R030
#[test]
fn what_is_longer_than_allowed_is_refused_unread() {
    let long = |what: &str, error: CodecError| {
        assert!(matches!(error, CodecError::TooLong { .. }), "{error}");
        assert!(error.to_string().starts_with(what), "{error}");
    };
    long("worker message", WorkerMessage::decode(&vec![0xc1; (1 << 20) + 1]).unwrap_err());
    long("worker card", WorkerCard::decode(&vec![0xc1; (16 << 20) + 1]).unwrap_err());
    long("plan", Plan::decode(&vec![0xc1; (64 << 20) + 1]).unwrap_err());
    let wanted = (0..1 << 18).map(|n| (LeaseId(u64::MAX - n), common::offer())).collect();
    let renew = WorkerMessage::Renew { seq: 0, all: true, wanted, dropped: Vec::new() };
    long("worker message", renew.encode().unwrap_err());
}
