//! Transports, memory and reads.

use std::time::Duration;

use kv_transport::shm::{ShmConfig, ShmTransport};
use kv_transport::{
    Event, LossReason, Memory, OpId, Pages, PeerId, ReadLimits, ReadOutcome, ReadPart, ReadRange,
    ReadRequest, RegionId, RegionKey, Transport,
};

/// No step of a test takes this long unless something is broken.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);
pub(crate) const PATIENT: ReadLimits = ReadLimits { total: LIMIT, stall: LIMIT };

pub(crate) fn bind() -> ShmTransport {
    ShmTransport::bind(ShmConfig::default()).unwrap()
}

pub(crate) async fn event(transport: &ShmTransport) -> Event {
    tokio::time::timeout(LIMIT, transport.next_event()).await.expect("no event").expect("closed")
}

pub(crate) async fn completion(transport: &ShmTransport, op: u64) -> ReadOutcome {
    match event(transport).await {
        Event::ReadCompleted { op: completed, outcome } if completed == OpId(op) => outcome,
        other => panic!("{other:?} instead of the completion of op-{op}"),
    }
}

pub(crate) async fn loss(transport: &ShmTransport, peer: PeerId) -> LossReason {
    match event(transport).await {
        Event::PeerLost { peer: lost, reason } if lost == peer => reason,
        other => panic!("{other:?} instead of the loss of {peer}"),
    }
}

pub(crate) async fn link(from: &ShmTransport, to: &ShmTransport) -> PeerId {
    let peer = from.connect(&to.address(), LIMIT).unwrap();
    assert_eq!(event(from).await, Event::Connected { peer });
    assert!(matches!(event(to).await, Event::Accepted { .. }));
    peer
}

/// Memory of one kind or the other with bytes that differ everywhere.
pub(crate) fn filled(bytes: usize, shared: bool, seed: u8) -> Memory {
    let memory = if shared { Memory::allocate_shared(bytes, Pages::Normal) } else { Memory::allocate(bytes) };
    let memory = memory.unwrap();
    let pattern: Vec<u8> = (0..bytes).map(|i| (i / 251 + i * 7) as u8 ^ seed).collect();
    memory.write(0, &pattern).unwrap();
    memory
}

pub(crate) fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

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

pub(crate) fn range(remote_offset: u64, local_offset: u64, len: u64) -> ReadRange {
    ReadRange { remote_offset, local_offset, len }
}
