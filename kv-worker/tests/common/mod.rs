//! A worker's machine without a driver: facts by hand, decisions as short lines, a clock that the test turns.

#![allow(dead_code)] // Each test file is a crate of its own and uses a part of this.

pub(crate) mod pair;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_proto::handshake::{EngineCard, TransportCard, WorkerCard};
use kv_proto::message::{BlockDigest, GroupList, OfferName, WorkerMessage};
use kv_proto::{
    Attempt, BlockId, BlockLayout, BlockList, BlockOrder, ConsumerOrder, Dtype, EngineId, Fingerprint,
    GroupBlocks, Incarnation, LeaseId, LeaseRef, LeaseTerms, LoadFailure, LoadId, Moment, OfferDigest,
    PROTOCOL_VERSION, PeerLocator, Plan, ProducerOrder, PullEnd, Rank, RegionKind, RegionLayout,
    ReleaseReason, Report, Topology,
};
use kv_transport::RegionId;
use kv_worker::machine::io::{Decision, DigestOf, Fact, LinkId, PullId, SourceKey};
use kv_worker::machine::pulls::LocalMemory;
use kv_worker::machine::worker::WorkerMachine;
use kv_worker::{Failure, WorkerConfig, WorkerLimits};

pub(crate) const BLOCKS: u32 = 16;
pub(crate) const TRANSPORT: &str = "paper";

pub(crate) const HANDSHAKE_MS: u64 = 500;
pub(crate) const CONNECT_MS: u64 = 300;
pub(crate) const RETRY_MIN_MS: u64 = 100;
pub(crate) const RETRY_MAX_MS: u64 = 350;
pub(crate) const PEER_WAIT_MS: u64 = 1_000;
pub(crate) const READ_MS: u64 = 1_000;
pub(crate) const STALL_MS: u64 = 300;
pub(crate) const CONFIRM_MS: u64 = 250;
pub(crate) const REPEAT_MS: u64 = 100;
pub(crate) const RENEW_MS: u64 = 200;
pub(crate) const REMEMBER_MS: u64 = 5_000;
pub(crate) const IDLE_MS: u64 = 10_000;
pub(crate) const SELF_CHECK_MS: u64 = 2_000;

pub(crate) const OFFER: OfferDigest = OfferDigest::from_bytes([7; 16]);

pub(crate) const TERMS: LeaseTerms =
    LeaseTerms { ttl_ms: 1_000, renewal_ms: 800, max_ms: 4_000, grace_ms: 300 };

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) fn at(since_start: u64) -> Moment {
    Moment::START + ms(since_start)
}

pub(crate) fn limits() -> WorkerLimits {
    WorkerLimits {
        handshake: ms(HANDSHAKE_MS),
        connect: ms(CONNECT_MS),
        retry_min: ms(RETRY_MIN_MS),
        retry_max: ms(RETRY_MAX_MS),
        peer_wait: ms(PEER_WAIT_MS),
        read: ms(READ_MS),
        stall: ms(STALL_MS),
        confirm: ms(CONFIRM_MS),
        confirm_repeat: ms(REPEAT_MS),
        renew_every: ms(RENEW_MS),
        prolong_bytes: 1 << 20,
        portion_bytes: 1 << 20,
        retries: 0,
        remember_ended: ms(REMEMBER_MS),
        peer_idle: ms(IDLE_MS),
        self_check_every: ms(SELF_CHECK_MS),
    }
}

pub(crate) fn layout() -> BlockLayout {
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
        blocks: BLOCKS,
        kernel_tokens: 0,
        order: BlockOrder::HeadsTokens,
        groups: vec![],
        regions: vec![region],
    }
}

pub(crate) fn life(n: u64) -> Incarnation {
    Incarnation::from_random(n)
}

pub(crate) fn engine(name: &str) -> EngineId {
    EngineId::new(name).unwrap()
}

pub(crate) fn machine(name: &str, incarnation: u64) -> WorkerMachine {
    machine_with(name, incarnation, limits(), false)
}

pub(crate) fn machine_with(
    name: &str,
    incarnation: u64,
    limits: WorkerLimits,
    checksums: bool,
) -> WorkerMachine {
    let config = WorkerConfig {
        engine: engine(name),
        incarnation: life(incarnation),
        rank: Rank(0),
        topology: Topology::of(1),
        checksums,
        limits,
    };
    config.check().unwrap();
    WorkerMachine::new(config, LocalMemory { layout: layout(), regions: vec![RegionId(0)] }, TRANSPORT)
}

/// A producer, by a number that is its life, its name and its port.
pub(crate) fn peer(n: u64) -> Arc<PeerLocator> {
    Arc::new(PeerLocator { engine: engine("p"), incarnation: life(n), host: "p".to_owned(), port: n as u16 })
}

pub(crate) fn card(n: u64) -> Box<EngineCard> {
    let topology = Topology::of(1);
    let worker = WorkerCard {
        rank: Rank(0),
        memory_sizes: vec![u64::from(BLOCKS) * 64],
        layout: layout(),
        fingerprint: Fingerprint::of("m", &layout()),
        transports: vec![TransportCard {
            name: TRANSPORT.to_owned(),
            address: vec![n as u8 + 1],
            keys: vec![vec![n as u8 + 1].into()],
        }],
    };
    Box::new(EngineCard {
        engine: engine("p"),
        incarnation: life(n),
        topology,
        workers: vec![worker],
        renew_every_ms: 0,
    })
}

pub(crate) fn list(ids: &[u32]) -> BlockList {
    ids.iter().copied().map(BlockId).collect()
}

pub(crate) fn groups(remote: &[u32], local: &[u32]) -> Vec<GroupBlocks> {
    let tokens = local.len() as u32 * layout().block_tokens;
    let (remote, local) = (list(remote), list(local));
    vec![GroupBlocks { group: 0, first: 0, remote_first: 0, tokens, remote, local }]
}

pub(crate) fn lease_of(n: u64, lease: u64) -> LeaseRef {
    LeaseRef { incarnation: life(n), lease: LeaseId(lease) }
}

pub(crate) fn track(n: u64, lease: u64) -> ConsumerOrder {
    ConsumerOrder::Track { lease: lease_of(n, lease), offer: OFFER, peer: (*peer(n)).clone() }
}

pub(crate) fn load(n: u64, lease: u64, load: u64) -> ConsumerOrder {
    let groups = groups(&[1, 2], &[8, 9]);
    ConsumerOrder::Load {
        load: LoadId(load),
        lease: lease_of(n, lease),
        offer: OFFER,
        peer: (*peer(n)).clone(),
        groups,
    }
}

pub(crate) fn release(n: u64, lease: u64, reason: ReleaseReason) -> ConsumerOrder {
    ConsumerOrder::Release { lease: lease_of(n, lease), offer: OFFER, peer: (*peer(n)).clone(), reason }
}

pub(crate) fn cancel(load: u64) -> ConsumerOrder {
    ConsumerOrder::Cancel { load: LoadId(load) }
}

pub(crate) fn announce(lease: u64) -> ProducerOrder {
    ProducerOrder::Announce { lease: LeaseId(lease) }
}

pub(crate) fn grant(lease: u64) -> ProducerOrder {
    ProducerOrder::Grant { lease: LeaseId(lease), terms: TERMS, offer: OFFER }
}

pub(crate) fn dialled(n: u64) -> LinkId {
    LinkId::Dialled(n)
}

pub(crate) fn accepted(n: u64) -> LinkId {
    LinkId::Accepted(n)
}

/// The greeting of a consumer in life `n` to a producer in life `to`.
pub(crate) fn hello(n: u64, to: u64) -> WorkerMessage {
    WorkerMessage::Hello {
        version: PROTOCOL_VERSION,
        engine: engine("d"),
        incarnation: life(n),
        rank: Rank(0),
        topology: Topology::of(1),
        to: life(to),
        to_rank: Rank(0),
    }
}

pub(crate) fn welcome(n: u64) -> WorkerMessage {
    WorkerMessage::Welcome { incarnation: life(n), rank: Rank(0) }
}

pub(crate) fn read_done(lease: u64, attempt: u64) -> WorkerMessage {
    WorkerMessage::ReadDone { lease: LeaseId(lease), attempt: Attempt(attempt), offer: OFFER, more: false }
}

pub(crate) fn confirmed(lease: u64, attempt: u64) -> WorkerMessage {
    WorkerMessage::Confirmed { lease: LeaseId(lease), attempt: Attempt(attempt) }
}

pub(crate) fn lapsed(lease: u64, attempt: u64) -> WorkerMessage {
    WorkerMessage::Lapsed { lease: LeaseId(lease), attempt: Attempt(attempt) }
}

/// Asks about these blocks of group 0, with these digests, which are of the positions after `from`.
pub(crate) fn compare(lease: u64, attempt: u64, from: u32, blocks: &[u32], digests: &[u64]) -> WorkerMessage {
    WorkerMessage::Compare {
        lease: LeaseId(lease),
        attempt: Attempt(attempt),
        offer: OFFER,
        from,
        groups: vec![GroupList { group: 0, blocks: list(blocks) }],
        digests: digests.iter().copied().map(BlockDigest).collect(),
    }
}

pub(crate) fn compared(lease: u64, attempt: u64, from: u32, equal: u32, held: bool) -> WorkerMessage {
    WorkerMessage::Compared { lease: LeaseId(lease), attempt: Attempt(attempt), from, equal, held }
}

pub(crate) fn released(lease: u64, attempt: u64) -> WorkerMessage {
    let reason = ReleaseReason::Aborted;
    WorkerMessage::Release { lease: LeaseId(lease), attempt: Attempt(attempt), offer: OFFER, reason }
}

pub(crate) fn names(ids: &[u64]) -> Vec<OfferName> {
    ids.iter().map(|lease| (LeaseId(*lease), OFFER)).collect()
}

/// The first renewal of a connection that names these.
pub(crate) fn renew(ids: &[u64]) -> WorkerMessage {
    WorkerMessage::Renew { seq: 0, all: true, wanted: names(ids), dropped: vec![] }
}

pub(crate) fn renew_next(seq: u64, wanted: &[u64], dropped: &[u64]) -> WorkerMessage {
    WorkerMessage::Renew { seq, all: false, wanted: names(wanted), dropped: names(dropped) }
}

pub(crate) fn not_held(ids: &[u64]) -> WorkerMessage {
    WorkerMessage::NotHeld { leases: names(ids) }
}

fn ids(names: &[OfferName]) -> String {
    if names.len() > 8 {
        return format!("{} leases", names.len());
    }
    format!("{:?}", names.iter().map(|(lease, _)| lease.0).collect::<Vec<_>>())
}

/// `renew`, then what it names: `all` if the list begins anew, `+` what is new, `-` what is over.
fn renew_line(all: bool, wanted: &[OfferName], dropped: &[OfferName]) -> String {
    let mut line = "renew".to_owned();
    if all {
        line.push_str(" all");
    }
    if !wanted.is_empty() {
        line.push_str(&format!(" +{}", ids(wanted)));
    }
    if !dropped.is_empty() {
        line.push_str(&format!(" -{}", ids(dropped)));
    }
    line
}

fn message_line(message: &WorkerMessage) -> String {
    match message {
        WorkerMessage::Hello { to, .. } => format!("hello to {}", to.get()),
        WorkerMessage::Welcome { incarnation, .. } => format!("welcome to {}", incarnation.get()),
        WorkerMessage::Unwelcome { reason, .. } => format!("unwelcome: {reason:?}"),
        WorkerMessage::Renew { all, wanted, dropped, .. } => renew_line(*all, wanted, dropped),
        WorkerMessage::NotHeld { leases } => format!("not held {}", ids(leases)),
        WorkerMessage::ReadDone { lease, attempt, more: false, .. } => {
            format!("read done {}/{}", lease.0, attempt.0)
        }
        WorkerMessage::ReadDone { lease, attempt, .. } => format!("read more {}/{}", lease.0, attempt.0),
        WorkerMessage::Check { lease, attempt, blocks, .. } => {
            format!("check {}/{} of {blocks}", lease.0, attempt.0)
        }
        WorkerMessage::Checked { lease, attempt, blocks, held } => {
            let word = if *held { "held" } else { "not held" };
            format!("{word} {}/{} of {blocks}", lease.0, attempt.0)
        }
        WorkerMessage::Compare { lease, attempt, from, groups, digests, .. } => {
            let blocks: Vec<u32> = groups.iter().flat_map(|group| group.blocks.iter()).map(|b| b.0).collect();
            let digests: Vec<u64> = digests.iter().map(|digest| digest.0).collect();
            if digests.len() > 8 {
                return format!("compare {}/{} {} from {from}", lease.0, attempt.0, digests.len());
            }
            format!("compare {}/{} {blocks:?} from {from}: {digests:?}", lease.0, attempt.0)
        }
        WorkerMessage::Compared { lease, attempt, from, equal, held } => {
            let word = if *held { "held" } else { "not held" };
            format!("{word} {}/{}, {equal} equal from {from}", lease.0, attempt.0)
        }
        WorkerMessage::Confirmed { lease, attempt } => format!("confirmed {}/{}", lease.0, attempt.0),
        WorkerMessage::Lapsed { lease, attempt } => format!("lapsed {}/{}", lease.0, attempt.0),
        WorkerMessage::Release { lease, attempt, reason, .. } => {
            format!("release {}/{} {}", lease.0, attempt.0, reason.name())
        }
        WorkerMessage::Relist {} => "relist".to_owned(),
        other => format!("{other:?}"),
    }
}

fn link_line(link: LinkId) -> String {
    match link {
        LinkId::Dialled(n) => format!("d{n}"),
        LinkId::Accepted(n) => format!("a{n}"),
    }
}

/// A load by its number; the part of a further source with its place.
fn pull_line(pull: PullId) -> String {
    if pull.source == 0 { pull.load.0.to_string() } else { format!("{}/{}", pull.load.0, pull.source) }
}

/// A decision in a line, such as `d0: read done 5/1`.
pub(crate) fn line(decision: &Decision) -> String {
    match decision {
        Decision::ShakeHands { key } => {
            let of = if key.source == 0 { String::new() } else { format!(" for source {}", key.source) };
            format!("shake hands with {}{of}", key.peer.incarnation.get())
        }
        Decision::Connect { link, .. } => format!("connect {}", link_line(*link)),
        Decision::Disconnect { link } => format!("disconnect {}", link_line(*link)),
        Decision::Send { link, message } => format!("{}: {}", link_line(*link), message_line(message)),
        Decision::Read { pull, link, parts } => {
            let bytes: u64 = parts.iter().flat_map(|p| &p.ranges).map(|r| r.len).sum();
            format!("{}: read {bytes} bytes for {}", link_line(*link), pull_line(*pull))
        }
        Decision::CancelRead { pull } => format!("cancel {}", pull_line(*pull)),
        Decision::CheckSelf => "check self".to_owned(),
        Decision::Digest { of, groups } => {
            let blocks: Vec<u32> = groups.iter().flat_map(|group| group.blocks.iter()).map(|b| b.0).collect();
            let blocks =
                if blocks.len() > 8 { format!("{} blocks", blocks.len()) } else { format!("{blocks:?}") };
            match of {
                DigestOf::Pull { pull, from } => {
                    format!("digest {blocks} for {} from {from}", pull_line(*pull))
                }
                DigestOf::Question(number) => format!("digest {blocks} for question {number}"),
            }
        }
    }
}

/// One machine, and what it has reported.
#[derive(Clone)]
pub(crate) struct Rig {
    pub(crate) m: WorkerMachine,
    /// The connection of each pull's last read.
    over: BTreeMap<PullId, LinkId>,
}

impl Rig {
    pub(crate) fn of(m: WorkerMachine) -> Self {
        Self { m, over: BTreeMap::new() }
    }

    /// In life 100 of engine `us`.
    pub(crate) fn new() -> Self {
        Self::of(machine("us", 100))
    }

    /// The same, with other limits.
    pub(crate) fn with(limits: WorkerLimits) -> Self {
        Self::of(machine_with("us", 100, limits, false))
    }

    /// The same, with other limits and with checksums.
    pub(crate) fn with_checksums(limits: WorkerLimits) -> Self {
        Self::of(machine_with("us", 100, limits, true))
    }

    pub(crate) fn take(&mut self, now: u64, fact: Fact) -> Vec<String> {
        let mut out = Vec::new();
        self.m.take(at(now), fact, &mut out);
        self.lines(&out)
    }

    pub(crate) fn lines(&mut self, out: &[Decision]) -> Vec<String> {
        for decision in out {
            if let Decision::Read { pull, link, .. } = decision {
                self.over.insert(*pull, *link);
            }
        }
        out.iter().map(line).collect()
    }

    pub(crate) fn pass(&mut self, now: u64) -> Vec<String> {
        let mut out = Vec::new();
        self.m.time_passed(at(now), &mut out);
        self.lines(&out)
    }

    pub(crate) fn order(&mut self, now: u64, consumer: &[ConsumerOrder]) -> Vec<String> {
        self.take(
            now,
            Fact::PlanTaken(Plan { producer: vec![], consumer: consumer.to_vec(), ..Plan::default() }),
        )
    }

    pub(crate) fn own(&mut self, now: u64, producer: &[ProducerOrder]) -> Vec<String> {
        self.take(
            now,
            Fact::PlanTaken(Plan { producer: producer.to_vec(), consumer: vec![], ..Plan::default() }),
        )
    }

    pub(crate) fn shaken(&mut self, now: u64, n: u64) -> Vec<String> {
        self.take(now, Fact::HandshakeEnded { key: SourceKey::first(peer(n)), result: Ok(card(n)) })
    }

    pub(crate) fn not_shaken(&mut self, now: u64, n: u64) -> Vec<String> {
        let failure = Failure::new(LoadFailure::HandshakeUnreachable, "nobody there");
        self.take(now, Fact::HandshakeEnded { key: SourceKey::first(peer(n)), result: Err(failure) })
    }

    pub(crate) fn connected(&mut self, now: u64, link: u64) -> Vec<String> {
        self.take(now, Fact::LinkConnected { link: dialled(link) })
    }

    pub(crate) fn lost(&mut self, now: u64, link: LinkId) -> Vec<String> {
        self.take(now, Fact::LinkLost { link, detail: "reset".to_owned() })
    }

    pub(crate) fn hear(&mut self, now: u64, link: LinkId, message: WorkerMessage) -> Vec<String> {
        self.take(now, Fact::MessageArrived { link, message: Ok(message) })
    }

    pub(crate) fn read_ended(&mut self, now: u64, load: u64) -> Vec<String> {
        self.end_read(now, PullId::first(LoadId(load)), Ok(()))
    }

    pub(crate) fn read_failed(&mut self, now: u64, load: u64, reason: LoadFailure) -> Vec<String> {
        let result = Err(Failure::new(reason, "transport"));
        self.end_read(now, PullId::first(LoadId(load)), result)
    }

    /// A read ends, over the connection that it was last ordered over.
    pub(crate) fn end_read(&mut self, now: u64, pull: PullId, result: Result<(), Failure>) -> Vec<String> {
        let link = self.over.get(&pull).copied().unwrap_or(dialled(0));
        self.take(now, Fact::ReadEnded { pull, link, result })
    }

    pub(crate) fn digested(&mut self, now: u64, of: DigestOf, digests: &[u64]) -> Vec<String> {
        let digests = Ok(digests.iter().copied().map(BlockDigest).collect());
        self.take(now, Fact::Digested { of, digests })
    }

    /// From the first wish to the welcome of producer `n`; what the welcome caused.
    pub(crate) fn ready(&mut self, now: u64, n: u64, link: u64) -> Vec<String> {
        assert_eq!(self.shaken(now, n), [format!("connect d{link}")]);
        assert_eq!(self.connected(now, link), [format!("d{link}: hello to {n}")]);
        self.hear(now, dialled(link), welcome(n))
    }

    /// A consumer in life `n` connects and is greeted.
    pub(crate) fn greet(&mut self, now: u64, link: u64, n: u64) {
        assert!(self.take(now, Fact::LinkAccepted { link: accepted(link) }).is_empty());
        assert_eq!(self.hear(now, accepted(link), hello(n, 100)), [format!("a{link}: welcome to 100")]);
    }

    /// Ends of loads since the last call: `ok`, or the reason.
    pub(crate) fn loads(&mut self) -> Vec<(u64, String)> {
        let Report { loads, .. } = self.m.take_report();
        loads
            .into_iter()
            .map(|(load, end)| match end {
                PullEnd::Loaded(_) => (load.0, "ok".to_owned()),
                PullEnd::Failed { reason, verified: 0, .. } => (load.0, reason.name().to_owned()),
                PullEnd::Failed { reason, verified, .. } => {
                    (load.0, format!("{} after {verified}", reason.name()))
                }
            })
            .collect()
    }

    /// Lets all time pass, step by step, until nothing is waited for.
    pub(crate) fn rest(&mut self) {
        for _ in 0..10_000 {
            let Some(next) = self.m.next_deadline() else { return };
            self.m.time_passed(next, &mut Vec::new());
        }
        panic!("something is waited for without end: {:?}", self.m);
    }
}

/// What a test expects of [`Rig::loads`].
pub(crate) fn ends(ends: &[(u64, &str)]) -> Vec<(u64, String)> {
    ends.iter().map(|(load, end)| (*load, (*end).to_owned())).collect()
}

/// No lines.
pub(crate) const NOTHING: [&str; 0] = [];
