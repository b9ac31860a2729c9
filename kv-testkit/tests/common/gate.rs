//! A transport whose reads a test holds back or lets fail.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_testkit::passthrough::{Interpose, Passthrough, Through};
use kv_transport::{Event, OpId, RangeSet, ReadError, ReadOutcome, ReadRequest, Transport, TransportError};

/// What becomes of reads.
#[derive(Debug, Clone)]
pub(crate) enum Mode {
    /// They are done.
    Open,
    /// They are accepted and kept back until the gate opens. A cancel does not stop them: it is only a request.
    Closed,
    /// They fail, with nothing arrived.
    Failing(ReadError),
}

#[derive(Debug)]
struct State {
    mode: Mode,
    held: Vec<ReadRequest>,
    cancelled: Vec<OpId>,
}

/// What stands before the transport: reads go as the [`Mode`] says.
#[derive(Debug)]
pub(crate) struct Bar {
    through: Through,
    state: Mutex<State>,
}

/// Passes everything through to another transport, reads as the [`Mode`] says.
pub(crate) type Gate = Passthrough<Bar>;

impl Bar {
    /// A gate before a transport.
    pub(crate) fn before(inner: Arc<dyn Transport>, mode: Mode) -> Arc<Gate> {
        let state = Mutex::new(State { mode, held: Vec::new(), cancelled: Vec::new() });
        Arc::new(Passthrough::over(Self { through: Through::new(inner), state }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads that are kept back now.
    pub(crate) fn held(&self) -> usize {
        self.state().held.len()
    }

    /// Cancels asked for so far.
    pub(crate) fn cancels(&self) -> usize {
        self.state().cancelled.len()
    }

    /// Does what was kept back, and all reads from now on.
    pub(crate) fn open(&self) {
        let held = {
            let mut state = self.state();
            state.mode = Mode::Open;
            std::mem::take(&mut state.held)
        };
        for request in held {
            let (op, size) = (request.op, request.range_count());
            if self.through.inner().read(request).is_err() {
                self.end(op, size, ReadError::Closed);
            }
        }
    }

    fn end(&self, op: OpId, size: usize, error: ReadError) {
        let outcome = ReadOutcome { result: Err(error), arrived: RangeSet::none(size) };
        self.through.tell(Event::ReadCompleted { op, outcome });
    }
}

impl Interpose for Bar {
    fn through(&self) -> &Through {
        &self.through
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        let mode = self.state().mode.clone();
        match mode {
            Mode::Open => self.through.inner().read(request),
            Mode::Closed => {
                self.state().held.push(request);
                Ok(())
            }
            Mode::Failing(error) => {
                self.end(request.op, request.range_count(), error);
                Ok(())
            }
        }
    }

    fn cancel(&self, op: OpId) {
        let mut state = self.state();
        state.cancelled.push(op);
        if !state.held.iter().any(|request| request.op == op) {
            drop(state);
            self.through.inner().cancel(op);
        }
    }

    fn closing(&self) {
        let held = std::mem::take(&mut self.state().held);
        for request in held {
            self.end(request.op, request.range_count(), ReadError::Closed);
        }
    }
}
