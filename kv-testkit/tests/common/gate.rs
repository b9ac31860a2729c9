//! A transport whose reads a test holds back or lets fail.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kv_transport::{
    Address, Capabilities, Event, Memory, OpId, PeerId, RangeSet, ReadError, ReadOutcome, ReadRequest,
    RegionId, RegionKey, Transport, TransportError,
};
use tokio::sync::Notify;

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
    events: VecDeque<Event>,
}

/// Passes everything through to another transport, reads as the [`Mode`] says.
#[derive(Debug)]
pub(crate) struct Gate {
    inner: Arc<dyn Transport>,
    state: Mutex<State>,
    news: Notify,
}

impl Gate {
    pub(crate) fn new(inner: Arc<dyn Transport>, mode: Mode) -> Arc<Self> {
        let state = State { mode, held: Vec::new(), cancelled: Vec::new(), events: VecDeque::new() };
        Arc::new(Self { inner, state: Mutex::new(state), news: Notify::new() })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
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
            if self.inner.read(request).is_err() {
                self.end(op, size, ReadError::Closed);
            }
        }
    }

    fn end(&self, op: OpId, size: usize, error: ReadError) {
        let outcome = ReadOutcome { result: Err(error), arrived: RangeSet::none(size) };
        self.state().events.push_back(Event::ReadCompleted { op, outcome });
        self.news.notify_one();
    }
}

#[async_trait]
impl Transport for Gate {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn address(&self) -> Address {
        self.inner.address()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        self.inner.register(memory)
    }

    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        self.inner.key(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        self.inner.deregister(region)
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        self.inner.connect(address, limit)
    }

    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        self.inner.disconnect(peer)
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        let mode = self.state().mode.clone();
        match mode {
            Mode::Open => self.inner.read(request),
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
            self.inner.cancel(op);
        }
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.inner.send(peer, message)
    }

    async fn next_event(&self) -> Option<Event> {
        loop {
            let own = self.state().events.pop_front();
            if own.is_some() {
                return own;
            }
            tokio::select! {
                event = self.inner.next_event() => return event,
                () = self.news.notified() => {}
            }
        }
    }

    async fn shutdown(&self, limit: Duration) {
        self.state().held.clear();
        self.inner.shutdown(limit).await;
    }
}
