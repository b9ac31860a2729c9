//! One engine's scheduler half, and what its hooks are called with.

#![allow(dead_code)] // Each test file is a crate of its own and uses a part of this.

use std::time::Duration;

use kv_proto::params::PrefixMarks;
use kv_proto::{
    BlockId, BlockList, ConsumerOrder, EngineId, GroupBlocks, GroupKind, Incarnation, LeaseEnd, LeaseId,
    LeaseRef, LoadFailure, LoadId, LoadStats, Moment, OfferDigest, PeerLocator, Plan, ProducerOrder, PullEnd,
    Rank, ReleaseReason, RemotePrefill, Report, RequestId, Topology, TransferParams, token_digest,
};
use kv_sched::{HoldId, RequestEnd, Role, SchedConfig, SchedEvent, Scheduler};

pub(crate) const BLOCK_TOKENS: u32 = 4;
pub(crate) const POOL: u32 = 64;
pub(crate) const TTL_MS: u64 = 1_000;
pub(crate) const LEASE_MAX_MS: u64 = 5_000;
pub(crate) const QUEUE_MS: u64 = 2_000;
pub(crate) const LOAD_MS: u64 = 3_000;
pub(crate) const GRACE_MS: u64 = 500;

pub(crate) fn at(ms: u64) -> Moment {
    Moment::START + Duration::from_millis(ms)
}

pub(crate) fn ours() -> Incarnation {
    Incarnation::from_random(0xd)
}

pub(crate) fn theirs() -> Incarnation {
    Incarnation::from_random(0xb)
}

pub(crate) fn config(ranks: u32) -> SchedConfig {
    let ms = Duration::from_millis;
    SchedConfig {
        engine: EngineId::new("us").unwrap(),
        incarnation: ours(),
        topology: Topology::of(ranks),
        host: "10.0.0.1".to_owned(),
        port: 5600,
        block_tokens: BLOCK_TOKENS,
        blocks: POOL,
        groups: vec![GroupKind::Full],
        lease_ttl: ms(TTL_MS),
        lease_renewal: ms(800),
        lease_max: ms(LEASE_MAX_MS),
        lease_grace: ms(300),
        min_remote_tokens: 4,
        queue_limit: ms(QUEUE_MS),
        load_limit: ms(LOAD_MS),
        report_grace: ms(GRACE_MS),
    }
}

pub(crate) fn scheduler(ranks: u32) -> Scheduler {
    Scheduler::new(config(ranks)).unwrap()
}

pub(crate) fn req(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

pub(crate) fn list(ids: &[u32]) -> BlockList {
    ids.iter().copied().map(BlockId).collect()
}

/// Consecutive blocks.
pub(crate) fn run(first: u32, count: u32) -> BlockList {
    (first..first + count).map(BlockId).collect()
}

pub(crate) fn prompt(tokens: u32) -> Vec<u32> {
    (100..100 + tokens).collect()
}

pub(crate) fn ask() -> TransferParams {
    TransferParams::RemoteDecode { other: serde_json::Map::new() }
}

pub(crate) fn complete(computed_tokens: u32, blocks: &[BlockList]) -> RequestEnd {
    RequestEnd::Complete { computed_tokens, blocks: blocks.to_vec(), sampled: vec![] }
}

/// What a producer offers: the first `tokens` of a prompt in the blocks from 20 on.
pub(crate) fn offer(lease: u64, tokens: u32) -> RemotePrefill {
    let count = tokens.div_ceil(BLOCK_TOKENS);
    RemotePrefill {
        engine: EngineId::new("them").unwrap(),
        request: req("their-name"),
        host: "10.0.0.2".to_owned(),
        port: 5601,
        ranks: 1,
        tokens,
        block_tokens: BLOCK_TOKENS,
        blocks: vec![run(20, count)],
        firsts: vec![0],
        incarnation: theirs(),
        lease: (tokens > 0).then_some(LeaseId(lease)),
        token_digest: token_digest(&prompt(tokens)),
        marks: PrefixMarks::default(),
        alternatives: vec![],
        other: serde_json::Map::new(),
    }
}

/// The life and the place of another producer.
pub(crate) fn other_peer() -> PeerLocator {
    PeerLocator {
        engine: EngineId::new("another").unwrap(),
        incarnation: Incarnation::from_random(0xc),
        host: "10.0.0.3".to_owned(),
        port: 5602,
    }
}

/// The same of that producer, in its blocks from 30 on.
pub(crate) fn other_offer(lease: u64, tokens: u32) -> RemotePrefill {
    let PeerLocator { engine, incarnation, host, port } = other_peer();
    let blocks = vec![run(30, tokens.div_ceil(BLOCK_TOKENS))];
    RemotePrefill { engine, incarnation, host, port, blocks, ..offer(lease, tokens) }
}

/// 8 tokens under `lease-5`, and from another producer under its `lease-6`.
pub(crate) fn two_offers() -> RemotePrefill {
    RemotePrefill { alternatives: vec![other_offer(6, 8)], ..offer(5, 8) }
}

pub(crate) fn params(offer: RemotePrefill) -> TransferParams {
    TransferParams::RemotePrefill(Box::new(offer))
}

pub(crate) fn peer() -> PeerLocator {
    PeerLocator {
        engine: EngineId::new("them").unwrap(),
        incarnation: theirs(),
        host: "10.0.0.2".to_owned(),
        port: 5601,
    }
}

pub(crate) fn their_lease(lease: u64) -> LeaseRef {
    LeaseRef { incarnation: theirs(), lease: LeaseId(lease) }
}

pub(crate) fn track(lease: u64) -> ConsumerOrder {
    ConsumerOrder::Track { lease: their_lease(lease), offer: BLANK, peer: peer() }
}

pub(crate) fn release(lease: u64, reason: ReleaseReason) -> ConsumerOrder {
    ConsumerOrder::Release { lease: their_lease(lease), offer: BLANK, peer: peer(), reason }
}

pub(crate) fn cancel(load: u64) -> ConsumerOrder {
    ConsumerOrder::Cancel { load: LoadId(load) }
}

/// Of whole blocks.
pub(crate) fn load(load: u64, lease: u64, first: u32, remote: BlockList, local: BlockList) -> ConsumerOrder {
    let tokens = (first + local.len()) * BLOCK_TOKENS;
    load_to(tokens, load, lease, first, remote, local)
}

/// Of so many tokens, counted from the start of the sequence.
pub(crate) fn load_to(
    tokens: u32,
    load: u64,
    lease: u64,
    first: u32,
    remote: BlockList,
    local: BlockList,
) -> ConsumerOrder {
    let groups = vec![GroupBlocks { group: 0, first, remote_first: first, tokens, remote, local }];
    ConsumerOrder::Load { load: LoadId(load), lease: their_lease(lease), offer: BLANK, peer: peer(), groups }
}

pub(crate) fn consumer(orders: &[ConsumerOrder]) -> Plan {
    Plan { producer: vec![], consumer: orders.to_vec(), ..Plan::default() }
}

pub(crate) fn producer(orders: &[ProducerOrder]) -> Plan {
    Plan { producer: orders.to_vec(), consumer: vec![], ..Plan::default() }
}

pub(crate) fn lease_report(rank: u32, lease: u64, end: LeaseEnd) -> Report {
    Report { leases: vec![(LeaseId(lease), end)], ..Report::new(Rank(rank)) }
}

pub(crate) fn load_report(rank: u32, load: u64, end: PullEnd) -> Report {
    Report { loads: vec![(LoadId(load), end)], ..Report::new(Rank(rank)) }
}

pub(crate) fn loaded(bytes: u64) -> PullEnd {
    PullEnd::Loaded(LoadStats { bytes, ranges: 1, read_us: bytes * 2, confirm_us: bytes * 3 })
}

pub(crate) fn failed(reason: LoadFailure) -> PullEnd {
    failed_after(reason, 0)
}

/// Failed when so many blocks had been verified.
pub(crate) fn failed_after(reason: LoadFailure, verified: u32) -> PullEnd {
    PullEnd::Failed { reason, detail: reason.name().to_owned(), verified }
}

pub(crate) fn lease_hold(lease: u64) -> HoldId {
    HoldId::Lease(LeaseId(lease))
}

pub(crate) fn load_hold(load: u64) -> HoldId {
    HoldId::Load(LoadId(load))
}

pub(crate) fn blocks_released(hold: HoldId, request: &str, blocks: BlockList) -> SchedEvent {
    SchedEvent::BlocksReleased { hold, request: req(request), blocks: vec![blocks] }
}

/// A request with an offer of `tokens` under `lease`, queued; its first plan is taken.
pub(crate) fn queue(s: &mut Scheduler, now: u64, name: &str, lease: u64, tokens: u32) {
    let role = s.request_arrived(at(now), &req(name), &prompt(tokens), Some(&params(offer(lease, tokens))));
    assert_eq!(role, Ok(Role::Consumer));
    assert_eq!(s.planned(at(now)), consumer(&[track(lease)]));
}

/// The same, loading all of it into the blocks from 40 on.
pub(crate) fn start_load(s: &mut Scheduler, now: u64, name: &str, lease: u64, tokens: u32) {
    queue(s, now, name, lease, tokens);
    let blocks = [run(40, tokens.div_ceil(BLOCK_TOKENS))];
    s.blocks_allocated(at(now), &req(name), 0, tokens, &blocks).unwrap();
    assert_eq!(s.planned(at(now)).consumer.len(), 1);
}

/// A request that computed `tokens` for somebody else into the blocks from 8 on, its lease granted.
pub(crate) fn hand_over(s: &mut Scheduler, now: u64, name: &str, tokens: u32) -> RemotePrefill {
    s.request_arrived(at(now), &req(name), &prompt(tokens), Some(&ask())).unwrap();
    let blocks = [run(8, tokens.div_ceil(BLOCK_TOKENS))];
    let finish = s.request_finished(at(now), &req(name), &complete(tokens, &blocks));
    s.planned(at(now));
    finish.params.unwrap()
}

/// Nothing of any request is left.
pub(crate) fn assert_forgotten(s: &Scheduler) {
    assert_eq!((s.holds(), s.next_deadline(), s.has_plan()), (0, None, false));
}

/// Stands for every offer in plans that are compared; what an offer's digest is has a test of its own.
pub(crate) const BLANK: OfferDigest = OfferDigest::from_bytes([0; 16]);

pub(crate) trait Planned {
    /// The next plan, with each offer's digest blanked.
    fn planned(&mut self, now: Moment) -> Plan;
}

impl Planned for Scheduler {
    fn planned(&mut self, now: Moment) -> Plan {
        let mut plan = self.plan_step(now);
        for order in &mut plan.producer {
            if let ProducerOrder::Grant { offer, .. } = order {
                *offer = BLANK;
            }
        }
        for order in &mut plan.consumer {
            if let ConsumerOrder::Load { offer, .. }
            | ConsumerOrder::Track { offer, .. }
            | ConsumerOrder::Release { offer, .. } = order
            {
                *offer = BLANK;
            }
        }
        plan
    }
}
