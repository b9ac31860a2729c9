//! One value of everything, for the tests.

use kv_proto::handshake::{
    Answer, EngineCard, HandshakeError, Query, RefusalCode, TransportCard, WorkerCard,
};
use kv_proto::message::{BlockDigest, GroupList, HelloRefusal, WorkerMessage};
use kv_proto::params::PrefixMarks;
use kv_proto::{
    Attempt, BlockId, BlockLayout, BlockOrder, ConsumerOrder, CopyFailure, CopyGroup, CopyId, CopyNews,
    CopyOrder, CopyStats, CopyWay, Dtype, EngineId, Fingerprint, GroupBlocks, Incarnation, LeaseEnd, LeaseId,
    LeaseRef, LeaseTerms, LoadFailure, LoadId, LoadStats, PROTOCOL_VERSION, PeerLocator, Plan, ProducerOrder,
    PullEnd, Rank, RegionKind, RegionLayout, ReleaseReason, RemotePrefill, Report, RequestId, Topology,
    TransferParams, token_digest,
};
use serde_json::{Map, json};

/// Larger than a JSON number can carry, so that a detour through one would be noticed.
pub(crate) const LIFE: Incarnation = Incarnation::from_random(0xfedc_ba98_7654_3210);

pub(crate) fn engine(text: &str) -> EngineId {
    EngineId::new(text).unwrap()
}

pub(crate) const RELEASES: [ReleaseReason; 7] = [
    ReleaseReason::NotNeeded,
    ReleaseReason::Aborted,
    ReleaseReason::Refused,
    ReleaseReason::LoadFailed,
    ReleaseReason::WaitedTooLong,
    ReleaseReason::Draining,
    ReleaseReason::Other,
];

pub(crate) const LEASE_ENDS: [LeaseEnd; 5] =
    [LeaseEnd::Confirmed, LeaseEnd::Released, LeaseEnd::Expired, LeaseEnd::ConsumerLost, LeaseEnd::Revoked];

pub(crate) const FAILURES: [LoadFailure; 18] = [
    LoadFailure::HandshakeUnreachable,
    LoadFailure::HandshakeRefused,
    LoadFailure::Incompatible,
    LoadFailure::HandshakeMalformed,
    LoadFailure::WrongPeer,
    LoadFailure::ConnectFailed,
    LoadFailure::PeerLost,
    LoadFailure::BadBlocks,
    LoadFailure::ReadRefused,
    LoadFailure::ReadTimedOut,
    LoadFailure::ReadFailed,
    LoadFailure::ConfirmTimedOut,
    LoadFailure::Lapsed,
    LoadFailure::Corrupt,
    LoadFailure::Cancelled,
    LoadFailure::Closed,
    LoadFailure::ReportMissing,
    LoadFailure::Other,
];

pub(crate) const HELLO_REFUSALS: [HelloRefusal; 5] = [
    HelloRefusal::Version,
    HelloRefusal::Incarnation,
    HelloRefusal::Rank,
    HelloRefusal::Topology,
    HelloRefusal::Other,
];

pub(crate) const REFUSALS: [RefusalCode; 6] = [
    RefusalCode::Malformed,
    RefusalCode::Version,
    RefusalCode::WrongEngine,
    RefusalCode::Incompatible,
    RefusalCode::Unavailable,
    RefusalCode::Other,
];

/// Every message, by the name of its golden file.
pub(crate) fn messages() -> Vec<(String, WorkerMessage)> {
    let lease = LeaseId(3);
    let attempt = Attempt(1);
    let names: Vec<_> = [0, 200, u64::MAX].map(|lease| (LeaseId(lease), offer())).to_vec();
    let mut all = vec![
        (
            "hello".to_owned(),
            WorkerMessage::Hello {
                version: PROTOCOL_VERSION,
                engine: engine("d-0"),
                incarnation: Incarnation::from_random(1),
                rank: Rank(1),
                topology: Topology::of(2),
                to: LIFE,
                to_rank: Rank(1),
            },
        ),
        ("welcome".to_owned(), WorkerMessage::Welcome { incarnation: LIFE, rank: Rank(1) }),
        (
            "renew".to_owned(),
            WorkerMessage::Renew { seq: 3, all: true, wanted: names.clone(), dropped: names[..1].to_vec() },
        ),
        ("relist".to_owned(), WorkerMessage::Relist {}),
        ("not_held".to_owned(), WorkerMessage::NotHeld { leases: names }),
        ("read_done".to_owned(), WorkerMessage::ReadDone { lease, attempt, offer: offer(), more: false }),
        ("read_more".to_owned(), WorkerMessage::ReadDone { lease, attempt, offer: offer(), more: true }),
        ("check".to_owned(), WorkerMessage::Check { lease, attempt, offer: offer(), blocks: 7 }),
        ("checked".to_owned(), WorkerMessage::Checked { lease, attempt, blocks: 7, held: true }),
        (
            "compare".to_owned(),
            WorkerMessage::Compare {
                lease,
                attempt,
                offer: offer(),
                from: 7,
                groups: vec![
                    GroupList { group: 0, blocks: [4, 5, 9].into_iter().map(BlockId).collect() },
                    GroupList { group: 2, blocks: [70_000].into_iter().map(BlockId).collect() },
                ],
                digests: [0, 1 << 40, u64::MAX].map(BlockDigest).to_vec(),
            },
        ),
        ("compared".to_owned(), WorkerMessage::Compared { lease, attempt, from: 7, equal: 2, held: true }),
        ("confirmed".to_owned(), WorkerMessage::Confirmed { lease, attempt }),
        ("lapsed".to_owned(), WorkerMessage::Lapsed { lease, attempt }),
    ];
    for reason in HELLO_REFUSALS {
        let name = format!("unwelcome_{reason:?}").to_lowercase();
        all.push((name, WorkerMessage::Unwelcome { reason, incarnation: LIFE }));
    }
    for reason in RELEASES {
        let message = WorkerMessage::Release { lease, attempt, offer: offer(), reason };
        all.push((format!("release_{}", reason.name()), message));
    }
    all
}

/// A plan with every order.
pub(crate) fn plan() -> Plan {
    let lease = LeaseRef { incarnation: LIFE, lease: LeaseId(3) };
    let peer =
        PeerLocator { engine: engine("p-0"), incarnation: LIFE, host: "10.0.0.7".to_owned(), port: 5600 };
    let groups = vec![GroupBlocks {
        group: 0,
        first: 2,
        remote_first: 1,
        tokens: 90,
        remote: [4, 5, 6, 9].into_iter().map(BlockId).collect(),
        local: [1, 70, 71, 72].into_iter().map(BlockId).collect(),
    }];
    let mut consumer = vec![
        ConsumerOrder::Track { lease, offer: offer(), peer: peer.clone() },
        ConsumerOrder::Load { load: LoadId(1), lease, offer: offer(), peer: peer.clone(), groups },
        ConsumerOrder::Cancel { load: LoadId(1) },
    ];
    consumer.extend(RELEASES.map(|reason| ConsumerOrder::Release {
        lease,
        offer: offer(),
        peer: peer.clone(),
        reason,
    }));
    let terms = LeaseTerms { ttl_ms: 30_000, renewal_ms: 15_000, max_ms: 600_000, grace_ms: 3_000 };
    Plan {
        producer: vec![
            ProducerOrder::Announce { lease: LeaseId(7) },
            ProducerOrder::Grant { lease: LeaseId(7), terms, offer: offer() },
            ProducerOrder::Forget { lease: LeaseId(8) },
            ProducerOrder::Revoke { lease: LeaseId(7) },
        ],
        consumer,
        copies: vec![
            copy(1, CopyWay::Save, &[(0, &[4, 5, 6, 9], &[0, 1, 2, 3])]),
            copy(2, CopyWay::Restore, &[(0, &[70, 71], &[8, 7]), (1, &[3], &[4])]),
        ],
    }
}

fn copy(id: u64, way: CopyWay, groups: &[(u32, &[u32], &[u32])]) -> CopyOrder {
    let list = |ids: &[u32]| ids.iter().copied().map(BlockId).collect();
    let part = |(group, device, host): &(u32, &[u32], &[u32])| CopyGroup {
        group: *group,
        device: list(device),
        host: list(host),
    };
    CopyOrder { copy: CopyId(id), number: 9 - id, way, groups: groups.iter().map(part).collect() }
}

/// Every reason for which a copy fails.
pub(crate) const COPY_FAILURES: [CopyFailure; 6] = [
    CopyFailure::BadBlocks,
    CopyFailure::NoDevice,
    CopyFailure::NotBegun,
    CopyFailure::Device,
    CopyFailure::Closed,
    CopyFailure::Other,
];

/// A report with every outcome.
pub(crate) fn report() -> Report {
    let ends = LEASE_ENDS;
    let stats = LoadStats { bytes: 1 << 33, ranges: 300, read_us: 70_000, confirm_us: 90 };
    let mut loads = vec![(LoadId(0), PullEnd::Loaded(stats))];
    for (i, reason) in (1..).zip(FAILURES) {
        loads.push((
            LoadId(i),
            PullEnd::Failed { reason, detail: format!("p-0: {}", reason.name()), verified: i as u32 },
        ));
    }
    let done = CopyNews::Done(CopyStats { bytes: 1 << 31, ranges: 64, copy_us: 900 });
    let failed = COPY_FAILURES.map(|reason| CopyNews::Failed { reason, detail: reason.name().to_owned() });
    let copies = (1..).map(CopyId).zip([done, CopyNews::Late].into_iter().chain(failed)).collect();
    Report { rank: Rank(1), leases: (0..).map(LeaseId).zip(ends).collect(), loads, copies }
}

fn region(kind: RegionKind, base: u64) -> RegionLayout {
    RegionLayout {
        layer: "layers.0".to_owned(),
        kind,
        group: 0,
        memory: 0,
        base,
        block_stride: 1024,
        block_bytes: 512,
        dtype: Dtype::Bf16,
        heads: 2,
        heads_total: 4,
        head_size: 8,
    }
}

pub(crate) fn worker_card(rank: u32) -> WorkerCard {
    let layout = BlockLayout {
        block_tokens: 16,
        blocks: 4,
        kernel_tokens: 0,
        order: BlockOrder::HeadsTokens,
        groups: vec![],
        regions: vec![region(RegionKind::Key, 0), region(RegionKind::Value, 512)],
    };
    WorkerCard {
        rank: Rank(rank),
        memory_sizes: vec![4096, 1 << 40],
        fingerprint: Fingerprint::of("model-ü", &layout).with("draft", "none"),
        layout,
        transports: vec![TransportCard {
            name: "tcp".to_owned(),
            address: vec![0, 0x7f, 0x80, 0xff],
            keys: vec![vec![].into(), vec![1, 2, 0xff].into()],
        }],
    }
}

pub(crate) fn fingerprint() -> Fingerprint {
    worker_card(0).fingerprint
}

pub(crate) fn engine_card() -> EngineCard {
    EngineCard {
        engine: engine("p-0"),
        incarnation: LIFE,
        topology: Topology::of(2),
        workers: vec![worker_card(0), worker_card(1)],
        renew_every_ms: 3_333,
    }
}

pub(crate) fn query() -> Query {
    Query {
        engine: engine("d-0"),
        incarnation: Incarnation::from_random(1),
        rank: Rank(1),
        topology: Topology::of(2),
        wanted: engine("p-0"),
    }
}

pub(crate) fn refused(code: RefusalCode) -> Answer {
    Answer::Refused { code, message: "model: producer a, consumer b".to_owned() }
}

pub(crate) fn remote_prefill() -> RemotePrefill {
    let mut other = Map::new();
    other.insert("transfer_mode".to_owned(), json!("pull"));
    RemotePrefill {
        engine: engine("p-0"),
        request: RequestId::new("cmpl, 1 ü").unwrap(),
        host: "fd00::7".to_owned(),
        port: 5600,
        ranks: 2,
        tokens: 40,
        block_tokens: 16,
        blocks: vec![[4, 5, 9].into_iter().map(BlockId).collect(), [70].into_iter().map(BlockId).collect()],
        firsts: vec![0, 2],
        incarnation: LIFE,
        lease: Some(LeaseId(3)),
        token_digest: token_digest(&[1, 2, 3]),
        marks: PrefixMarks::of(&(0..40).collect::<Vec<_>>(), 16),
        alternatives: vec![],
        other,
    }
}

pub(crate) fn remote_decode() -> TransferParams {
    let mut other = Map::new();
    other.insert("remote_host".to_owned(), json!(null));
    other.insert("transfer_mode".to_owned(), json!("pull"));
    TransferParams::RemoteDecode { other }
}

/// Valid encodings of everything, to be damaged.
pub(crate) fn encodings() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = messages().iter().map(|(_, m)| m.encode().unwrap()).collect();
    all.push(plan().encode().unwrap());
    all.push(report().encode().unwrap());
    all.push(worker_card(0).encode().unwrap());
    all.push(query().encode(&fingerprint()).unwrap());
    all.push(Answer::Accepted(engine_card()).encode(Some(&fingerprint())).unwrap());
    all.push(refused(RefusalCode::Incompatible).encode(Some(&fingerprint())).unwrap());
    all
}

/// Gives bytes to every decoder there is; tells how many took them for something. The lists of a plan and
/// a report may be absent, so that other maps can be read as one that says nothing; that does not count.
pub(crate) fn decode_all(bytes: &[u8]) -> usize {
    let taken = [
        WorkerMessage::decode(bytes).is_ok(),
        Plan::decode(bytes).is_ok_and(|plan| !plan.is_empty()),
        Report::decode(bytes).is_ok_and(|report| !report.is_empty()),
        WorkerCard::decode(bytes).is_ok(),
        Query::decode(bytes).is_ok(),
        // A refusal is an error to its reader, but it was read.
        !matches!(
            Answer::decode(bytes, &fingerprint(), &engine("p-0"), LIFE),
            Err(HandshakeError::Codec(_) | HandshakeError::Service { .. })
        ),
    ];
    taken.iter().filter(|taken| **taken).count()
}

pub(crate) fn offer() -> kv_proto::OfferDigest {
    kv_proto::OfferDigest::from_bytes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 255])
}
