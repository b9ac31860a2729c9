//! A transport that brings a wrong byte, as bad memory or a bad card would: it says that all is well.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use kv_connector::transport::{
    Address, Capabilities, Event, Memory, OpId, PeerId, ReadRequest, RegionId, RegionKey, Transport,
    TransportError,
};

/// What is to be spoilt next.
#[derive(Debug, Clone, Default)]
pub struct Spoil(Arc<Mutex<Option<u64>>>);

impl Spoil {
    /// The next read that ends, on whatever rank, leaves a wrong byte at this offset of its memory.
    pub fn at(&self, offset: usize) {
        *self.0.lock().unwrap() = Some(offset as u64);
    }
}

#[derive(Debug)]
pub struct Spoiler {
    pub inner: Arc<dyn Transport>,
    pub memory: Memory,
    pub spoil: Spoil,
}

#[async_trait]
impl Transport for Spoiler {
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
        self.inner.read(request)
    }

    fn cancel(&self, op: OpId) {
        self.inner.cancel(op);
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.inner.send(peer, message)
    }

    async fn next_event(&self) -> Option<Event> {
        let event = self.inner.next_event().await;
        if matches!(event, Some(Event::ReadCompleted { .. }))
            && let Some(at) = self.spoil.0.lock().unwrap().take()
        {
            let mut byte = [0];
            self.memory.read(at, &mut byte).unwrap();
            self.memory.write(at, &[byte[0] ^ 0x10]).unwrap();
        }
        event
    }

    async fn shutdown(&self, limit: Duration) {
        self.inner.shutdown(limit).await;
    }
}
