//! What a hundred thousand live leases cost: per step, per lease granted and confirmed, per renewal, in memory.
//!
//! ```text
//! cargo bench -p kv-worker --bench leases
//! ```
//!
//! The figures of one machine, and what they mean, are in `docs/performance.md`.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A benchmark that cannot be set up has no result.
#![allow(clippy::print_stdout)] // It prints what it measures.

#[path = "leases/memory.rs"]
mod memory;

use divan::Bencher;
use kv_proto::handshake::{EngineCard, TransportCard, WorkerCard};
use kv_proto::message::{OfferName, WorkerMessage};
use kv_proto::{
    Attempt, BlockLayout, BlockOrder, ConsumerOrder, Dtype, EngineId, Fingerprint, Incarnation, LeaseId,
    LeaseRef, LeaseTerms, Moment, OfferDigest, PROTOCOL_VERSION, PeerLocator, Plan, ProducerOrder, Rank,
    RegionKind, RegionLayout, Topology,
};
use kv_transport::RegionId;
use kv_worker::machine::io::{Decision, Fact, LinkId, SourceKey};
use kv_worker::machine::pulls::LocalMemory;
use kv_worker::machine::worker::WorkerMachine;
use kv_worker::{WorkerConfig, WorkerLimits};

/// Live leases.
const LEASES: [u64; 3] = [1_000, 10_000, 100_000];

const TERMS: LeaseTerms =
    LeaseTerms { ttl_ms: 10_000, renewal_ms: 10_000, max_ms: 86_400_000, grace_ms: 3_000 };

/// Nothing of a benchmark takes so long in the machine's time that a lease ends.
const NOW: Moment = Moment::START;

fn life(n: u64) -> Incarnation {
    Incarnation::from_random(n)
}

fn offer(lease: u64) -> OfferDigest {
    // Spread over all bits, as digests are.
    let bits = u128::from(lease + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    OfferDigest::from_bytes(bits.to_be_bytes())
}

fn name(lease: u64) -> OfferName {
    (LeaseId(lease), offer(lease))
}

fn machine(engine: &str, incarnation: u64) -> WorkerMachine {
    let config = WorkerConfig {
        engine: EngineId::new(engine).unwrap(),
        incarnation: life(incarnation),
        rank: Rank(0),
        topology: Topology::of(1),
        checksums: false,
        limits: WorkerLimits::default(),
    };
    config.check().unwrap();
    WorkerMachine::new(config, LocalMemory { layout: layout(), regions: vec![RegionId(0)] }, "none")
}

fn layout() -> BlockLayout {
    let region = RegionLayout {
        layer: "layers.0".to_owned(),
        kind: RegionKind::KeyValue,
        group: 0,
        memory: 0,
        base: 0,
        block_stride: 64,
        block_bytes: 64,
        dtype: Dtype::F32,
        heads: 1,
        heads_total: 0,
        head_size: 4,
    };
    BlockLayout {
        block_tokens: 4,
        blocks: 16,
        kernel_tokens: 0,
        order: BlockOrder::HeadsTokens,
        groups: vec![],
        regions: vec![region],
    }
}

fn peer() -> PeerLocator {
    let engine = EngineId::new("p").unwrap();
    PeerLocator { engine, incarnation: life(1), host: "127.0.0.1".to_owned(), port: 1 }
}

fn take(m: &mut WorkerMachine, now: Moment, fact: Fact) -> Vec<Decision> {
    let mut out = Vec::new();
    m.take(now, fact, &mut out);
    out
}

fn heard(m: &mut WorkerMachine, now: Moment, consumer: u64, message: WorkerMessage) -> Vec<Decision> {
    let link = LinkId::Accepted(consumer);
    take(m, now, Fact::MessageArrived { link, message: Ok(message) })
}

/// The orders that make one lease live.
fn lend(lease: u64) -> [ProducerOrder; 2] {
    let offer = offer(lease);
    let lease = LeaseId(lease);
    [ProducerOrder::Announce { lease }, ProducerOrder::Grant { lease, terms: TERMS, offer }]
}

fn plan(producer: impl IntoIterator<Item = ProducerOrder>) -> Fact {
    Fact::PlanTaken(Plan {
        producer: producer.into_iter().collect(),
        consumer: Vec::new(),
        ..Plan::default()
    })
}

/// P's worker with so many leases alive, each wanted by one of so many consumers.
fn producer(leases: u64, consumers: u64) -> WorkerMachine {
    let mut m = machine("p", 1);
    for consumer in 0..consumers {
        take(&mut m, NOW, Fact::LinkAccepted { link: LinkId::Accepted(consumer) });
        let hello = WorkerMessage::Hello {
            version: PROTOCOL_VERSION,
            engine: EngineId::new("d").unwrap(),
            incarnation: life(100 + consumer),
            rank: Rank(0),
            topology: Topology::of(1),
            to: life(1),
            to_rank: Rank(0),
        };
        heard(&mut m, NOW, consumer, hello);
    }
    take(&mut m, NOW, plan((0..leases).flat_map(lend)));
    for consumer in 0..consumers {
        let all: Vec<OfferName> =
            (0..leases).filter(|lease| lease % consumers == consumer).map(name).collect();
        for (seq, wanted) in (0..).zip(all.chunks(8_192)) {
            let wanted = wanted.to_vec();
            let renew = WorkerMessage::Renew { seq, all: seq == 0, wanted, dropped: Vec::new() };
            assert!(heard(&mut m, NOW, consumer, renew).is_empty(), "all are held");
        }
    }
    assert_eq!(m.stats().leases, leases);
    m
}

/// D's worker whose requests live by so many offers of one producer, at the time of the next renewal.
fn consumer(leases: u64) -> WorkerMachine {
    let mut m = machine("d", 100);
    let track = |lease| ConsumerOrder::Track {
        lease: LeaseRef { incarnation: life(1), lease: LeaseId(lease) },
        offer: offer(lease),
        peer: peer(),
    };
    let orders = Plan { producer: Vec::new(), consumer: (0..leases).map(track).collect(), ..Plan::default() };
    take(&mut m, NOW, Fact::PlanTaken(orders));
    m
}

/// D's worker is greeted by P, then renews twice; each round's decisions go to `sent`.
fn connect(m: &mut WorkerMachine, mut sent: impl FnMut(usize, &[Decision])) {
    let topology = Topology::of(1);
    let key = SourceKey::first(std::sync::Arc::new(peer()));
    let worker = WorkerCard {
        rank: Rank(0),
        memory_sizes: vec![1024],
        layout: layout(),
        fingerprint: Fingerprint::of("m", &layout()),
        transports: vec![TransportCard {
            name: "none".to_owned(),
            address: vec![1],
            keys: vec![vec![1].into()],
        }],
    };
    let card = EngineCard {
        engine: EngineId::new("p").unwrap(),
        incarnation: life(1),
        topology,
        workers: vec![worker],
        renew_every_ms: 0,
    };
    let link = LinkId::Dialled(0);
    take(m, NOW, Fact::HandshakeEnded { key, result: Ok(Box::new(card)) });
    take(m, NOW, Fact::LinkConnected { link });
    let welcome = WorkerMessage::Welcome { incarnation: life(1), rank: Rank(0) };
    sent(1, &take(m, NOW, Fact::MessageArrived { link, message: Ok(welcome) }));
    let mut out = Vec::new();
    m.time_passed(NOW + WorkerLimits::default().renew_every, &mut out);
    sent(2, &out);
}

/// What a worker's driver does when it wakes and nothing has happened.
fn idle_step(m: &mut WorkerMachine, now: Moment) {
    let mut out = Vec::new();
    m.take(now, Fact::PlanTaken(Plan::default()), &mut out);
    m.time_passed(now, &mut out);
    divan::black_box((m.next_deadline(), m.take_report(), m.stats(), out));
}

#[divan::bench(args = LEASES)]
fn step_with_nothing_to_do(bencher: Bencher<'_, '_>, leases: u64) {
    let mut m = producer(leases, 1);
    bencher.bench_local(move || idle_step(&mut m, NOW));
}

/// One lease more is announced and granted, among so many.
#[divan::bench(args = LEASES)]
fn grant(bencher: Bencher<'_, '_>, leases: u64) {
    let mut m = producer(leases, 1);
    let mut next = leases;
    bencher
        .with_inputs(move || {
            next += 1;
            plan(lend(next))
        })
        .bench_local_values(move |fact| divan::black_box(take(&mut m, NOW, fact)));
}

/// One is read and confirmed, and its end goes into the report, among so many.
#[divan::bench(args = LEASES)]
fn confirm(bencher: Bencher<'_, '_>, leases: u64) {
    let m = std::cell::RefCell::new(producer(leases, 1));
    let mut next = leases;
    bencher
        .with_inputs(|| {
            next += 1;
            take(&mut m.borrow_mut(), NOW, plan(lend(next)));
            m.borrow_mut().take_report();
            let (lease, offer) = name(next);
            WorkerMessage::ReadDone { lease, attempt: Attempt(next), offer, more: false }
        })
        .bench_local_values(|message| {
            let answer = heard(&mut m.borrow_mut(), NOW, 0, message);
            assert_eq!(answer.len(), 1);
            divan::black_box(answer)
        });
}

/// A consumer's sign of life, at P, among so many leases that it keeps.
#[divan::bench(args = LEASES)]
fn renewal_at_p(bencher: Bencher<'_, '_>, leases: u64) {
    let mut m = producer(leases, 1);
    let mut seq = leases.div_ceil(8_192);
    bencher
        .with_inputs(move || {
            seq += 1;
            WorkerMessage::Renew { seq: seq - 1, all: false, wanted: Vec::new(), dropped: Vec::new() }
        })
        .bench_local_values(move |message| divan::black_box(heard(&mut m, NOW, 0, message)));
}

fn main() {
    memory::report();
    divan::main();
}
