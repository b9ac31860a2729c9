//! Two TCP transports, one of them under a plan.

use std::sync::Arc;
use std::time::Duration;

use kv_testkit::faults::{Fault, FaultPlan, FaultyTransport, On, Rule, Which};
use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Event, Memory, OpId, PeerId, ReadLimits, ReadOutcome, ReadPart, ReadRange, ReadRequest, RegionId,
    RegionKey, Transport,
};

/// No step of a test takes this long unless something is broken.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
/// What the destination holds before a read.
pub(crate) const OLD: u8 = 0x55;
pub(crate) const BYTES: usize = 4096;
pub(crate) const PATIENT: ReadLimits = ReadLimits { total: LIMIT, stall: LIMIT };

pub(crate) fn tcp() -> Arc<dyn Transport> {
    Arc::new(TcpTransport::bind(TcpConfig::default()).unwrap())
}

pub(crate) async fn event(transport: &dyn Transport) -> Event {
    tokio::time::timeout(LIMIT, transport.next_event()).await.expect("no event").expect("closed")
}

pub(crate) fn always(on: On, fault: Fault) -> FaultPlan {
    FaultPlan::seeded(7).rule(Rule::new(on, fault)).unwrap()
}

pub(crate) fn at(on: On, fault: Fault, positions: &[u64]) -> FaultPlan {
    FaultPlan::seeded(7).rule(Rule::new(on, fault).which(Which::At(positions.to_vec()))).unwrap()
}

/// A reader under a plan, connected to a source.
pub(crate) struct Rig {
    pub(crate) reader: FaultyTransport,
    pub(crate) source: Arc<dyn Transport>,
    pub(crate) peer: PeerId,
    pub(crate) key: RegionKey,
    pub(crate) bytes: Vec<u8>,
    pub(crate) into: Memory,
    pub(crate) region: RegionId,
}

impl Rig {
    pub(crate) async fn under(plan: &FaultPlan) -> Self {
        let (source, reader) = (tcp(), FaultyTransport::new(tcp(), plan).unwrap());
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i * 31 + i / 256) as u8).collect();
        let from = Memory::allocate(BYTES).unwrap();
        from.write(0, &bytes).unwrap();
        let key = source.key(source.register(from).unwrap()).unwrap();
        let into = Memory::allocate(BYTES).unwrap();
        into.write(0, &[OLD; BYTES]).unwrap();
        let region = reader.register(into.clone()).unwrap();
        let peer = reader.connect(&source.address(), LIMIT).unwrap();
        assert_eq!(event(&reader).await, Event::Connected { peer });
        assert!(matches!(event(source.as_ref()).await, Event::Accepted { .. }));
        Self { reader, source, peer, key, bytes, into, region }
    }

    /// A read of everything in four ranges.
    pub(crate) fn request(&self, op: u64) -> ReadRequest {
        let quarter = BYTES as u64 / 4;
        let ranges =
            (0..4).map(|n| ReadRange { remote_offset: n * quarter, local_offset: n * quarter, len: quarter });
        self.ranges(op, ranges.collect())
    }

    pub(crate) fn ranges(&self, op: u64, ranges: Vec<ReadRange>) -> ReadRequest {
        let part = ReadPart { key: self.key.clone(), region: self.region, ranges };
        ReadRequest { op: OpId(op), peer: self.peer, parts: vec![part], limits: PATIENT }
    }

    pub(crate) async fn event(&self) -> Event {
        event(&self.reader).await
    }

    /// The next event, which has to be the completion of this read.
    pub(crate) async fn completion(&self, op: u64) -> ReadOutcome {
        match self.event().await {
            Event::ReadCompleted { op: completed, outcome } if completed == OpId(op) => outcome,
            other => panic!("{other:?} instead of the completion of op-{op}"),
        }
    }

    /// Reads everything.
    pub(crate) async fn read(&self, op: u64) -> ReadOutcome {
        self.reader.read(self.request(op)).unwrap();
        self.completion(op).await
    }

    pub(crate) fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        self.into.read(0, &mut bytes).unwrap();
        bytes
    }

    /// Positions of the operations struck.
    pub(crate) fn struck(&self, on: On) -> Vec<u64> {
        let recording = self.reader.recording();
        recording.faults.iter().filter(|i| i.on == on).map(|i| i.position).collect()
    }
}
