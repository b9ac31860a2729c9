//! A transport that claims every read without doing it: the control of an end-to-end test. If answers are still
//! right with it, the test does not see whether anything was moved.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kv_transport::{
    Address, Capabilities, Event, Memory, OpId, PeerId, RangeSet, ReadOutcome, ReadRequest, RegionId,
    RegionKey, Transport, TransportError,
};
use tokio::sync::Notify;

/// Passes everything through to another transport, except reads: those it reports as done at once.
#[derive(Debug)]
pub struct Unmoved {
    inner: Arc<dyn Transport>,
    claimed: Mutex<VecDeque<Event>>,
    news: Notify,
}

impl Unmoved {
    /// Wraps a transport.
    pub fn new(inner: Arc<dyn Transport>) -> Self {
        Self { inner, claimed: Mutex::new(VecDeque::new()), news: Notify::new() }
    }

    fn next_claimed(&self) -> Option<Event> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

#[async_trait]
impl Transport for Unmoved {
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
        let outcome = ReadOutcome { result: Ok(()), arrived: RangeSet::all(request.range_count()) };
        let event = Event::ReadCompleted { op: request.op, outcome };
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).push_back(event);
        self.news.notify_one();
        Ok(())
    }

    fn cancel(&self, op: OpId) {
        self.inner.cancel(op);
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.inner.send(peer, message)
    }

    async fn next_event(&self) -> Option<Event> {
        loop {
            if let Some(event) = self.next_claimed() {
                return Some(event);
            }
            tokio::select! {
                event = self.inner.next_event() => return event,
                () = self.news.notified() => {}
            }
        }
    }

    async fn shutdown(&self, limit: Duration) {
        self.inner.shutdown(limit).await;
    }
}
