//! Transports that break less than a rule, or keep one for no good reason: one case at a time has to notice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_testkit::passthrough::{Interpose, Passthrough, Through};
use kv_transport::{
    Event, Memory, OpId, RangeSet, ReadError, ReadOutcome, ReadRequest, RegionId, Transport, TransportError,
};

/// Where the ids of [`Duplicates`] begin; no case counts so far.
const OTHERS: u64 = 1 << 48;

/// Takes an id that is in flight a second time: the transport behind knows the second read by another id.
#[derive(Debug)]
pub(crate) struct Duplicates {
    through: Through,
    /// By their ids behind, the ids by which the caller knows them.
    renamed: Mutex<HashMap<OpId, OpId>>,
}

impl Duplicates {
    pub(crate) fn before(inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Passthrough::over(Self { through: Through::new(inner), renamed: Mutex::default() }))
    }

    fn renamed(&self) -> MutexGuard<'_, HashMap<OpId, OpId>> {
        self.renamed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Interpose for Duplicates {
    fn through(&self) -> &Through {
        &self.through
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        match self.through.inner().read(request.clone()) {
            Err(TransportError::DuplicateOp { op }) => {
                let mut renamed = self.renamed();
                let behind = OpId(OTHERS + renamed.len() as u64);
                renamed.insert(behind, op);
                self.through.inner().read(ReadRequest { op: behind, ..request })
            }
            result => result,
        }
    }

    fn event(&self, event: Event) -> Option<Event> {
        Some(match event {
            Event::ReadCompleted { op, outcome } => {
                let op = self.renamed().get(&op).copied().unwrap_or(op);
                Event::ReadCompleted { op, outcome }
            }
            event => event,
        })
    }
}

/// Every read of it fails, and brings nothing that counts.
#[derive(Debug)]
pub(crate) struct Failing(Through);

impl Failing {
    pub(crate) fn before(inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Passthrough::over(Self(Through::new(inner))))
    }
}

impl Interpose for Failing {
    fn through(&self) -> &Through {
        &self.0
    }

    fn event(&self, event: Event) -> Option<Event> {
        Some(match event {
            Event::ReadCompleted { op, outcome } => {
                let arrived = RangeSet::none(outcome.arrived.size());
                Event::ReadCompleted { op, outcome: ReadOutcome { result: Err(ReadError::Stalled), arrived } }
            }
            event => event,
        })
    }
}

/// Claims host memory, and takes only that of devices.
#[derive(Debug)]
pub(crate) struct NoHost(Through);

impl NoHost {
    pub(crate) fn before(inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Passthrough::over(Self(Through::new(inner))))
    }
}

impl Interpose for NoHost {
    fn through(&self) -> &Through {
        &self.0
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        match memory.on_device() {
            Some(_) => self.0.inner().register(memory),
            None => Err(TransportError::Unsupported { transport: "no host", what: "host memory" }),
        }
    }
}
