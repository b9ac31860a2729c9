//! Transports over chosen lanes, and steps that tests share.

use std::io::Write;
use std::time::Duration;

use kv_transport::ucx::{UcxConfig, UcxTransport};
use kv_transport::{
    Event, LossReason, Memory, OpId, PeerId, ReadLimits, ReadOutcome, ReadPart, ReadRange, ReadRequest,
    RegionId, RegionKey, Transport, TransportError,
};

/// No step of a test takes this long unless something is broken.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) const TCP: &str = "tcp,self";
pub(crate) const SHARED: &str = "posix,cma,self";

pub(crate) fn config(lanes: &str) -> UcxConfig {
    UcxConfig { settings: vec![("TLS".into(), lanes.into())], ..UcxConfig::default() }
}

/// A transport, or `None` where the machine has no UCX.
pub(crate) fn open(config: UcxConfig) -> Option<UcxTransport> {
    match UcxTransport::open(config) {
        Ok(transport) => Some(transport),
        Err(TransportError::Library { problem, .. }) => {
            // Past the harness, which would keep it back.
            let line = format!("SKIPPED, no UCX here: {problem}\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn transport(lanes: &str) -> Option<UcxTransport> {
    open(config(lanes))
}

/// Runs a test over TCP lanes and over shared-memory lanes.
macro_rules! on_both_lanes {
    ($($name:ident),* $(,)?) => {
        mod over_tcp { $(
            #[tokio::test]
            async fn $name() { super::$name($crate::support::TCP).await; }
        )* }
        mod over_shared_memory { $(
            #[tokio::test]
            async fn $name() { super::$name($crate::support::SHARED).await; }
        )* }
    };
}
pub(crate) use on_both_lanes;

pub(crate) async fn event(transport: &UcxTransport) -> Event {
    tokio::time::timeout(LIMIT, transport.next_event()).await.expect("no event").expect("closed")
}

/// The next event, which has to be the completion of this read.
pub(crate) async fn completion(transport: &UcxTransport, op: u64) -> ReadOutcome {
    match event(transport).await {
        Event::ReadCompleted { op: completed, outcome } if completed == OpId(op) => outcome,
        other => panic!("{other:?} instead of the completion of op-{op}"),
    }
}

/// The next event, which has to be the loss of this peer.
pub(crate) async fn loss(transport: &UcxTransport, peer: PeerId) -> LossReason {
    match event(transport).await {
        Event::PeerLost { peer: lost, reason } if lost == peer => reason,
        other => panic!("{other:?} instead of the loss of {peer}"),
    }
}

/// Connects `from` to `to`: the ids of `to` at `from` and of `from` at `to`.
pub(crate) async fn link(from: &UcxTransport, to: &UcxTransport) -> (PeerId, PeerId) {
    let there = from.connect(&to.address(), LIMIT).unwrap();
    assert_eq!(event(from).await, Event::Connected { peer: there });
    match event(to).await {
        Event::Accepted { peer } => (there, peer),
        other => panic!("{other:?}"),
    }
}

/// Bytes that differ everywhere and from seed to seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

pub(crate) fn memory(bytes: &[u8]) -> Memory {
    let memory = Memory::allocate(bytes.len()).unwrap();
    memory.write(0, bytes).unwrap();
    memory
}

pub(crate) fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// Registers bytes and returns what a peer needs.
pub(crate) fn offer(transport: &UcxTransport, bytes: &[u8]) -> (RegionId, RegionKey) {
    let region = transport.register(memory(bytes)).unwrap();
    (region, transport.key(region).unwrap())
}

pub(crate) fn range(remote_offset: u64, local_offset: u64, len: u64) -> ReadRange {
    ReadRange { remote_offset, local_offset, len }
}

pub(crate) const PATIENT: ReadLimits = ReadLimits { total: LIMIT, stall: LIMIT };

pub(crate) fn request(
    op: u64,
    peer: PeerId,
    key: &RegionKey,
    region: RegionId,
    ranges: Vec<ReadRange>,
) -> ReadRequest {
    let parts = vec![ReadPart { key: key.clone(), region, ranges }];
    ReadRequest { op: OpId(op), peer, parts, limits: PATIENT }
}
