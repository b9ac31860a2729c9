//! Standing between a transport and its caller: what is not of interest passes through.
//!
//! Whoever wraps a transport says in [`Interpose`] which calls and events are its business; [`Passthrough`] makes a
//! [`Transport`] of it and forwards everything else, so that the forwarding is written once.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kv_transport::{
    Address, Capabilities, Event, Face, Memory, OpId, PeerId, ReadRequest, RegionId, RegionKey, Transport,
    TransportError,
};
use tokio::sync::Notify;

#[derive(Debug)]
struct Ends {
    inner: Arc<dyn Transport>,
    own: Mutex<VecDeque<Event>>,
    news: Notify,
}

/// The two ends of what stands in between: the transport behind it, and the queue of events before it. Clones are
/// the same.
#[derive(Debug, Clone)]
pub struct Through(Arc<Ends>);

impl Through {
    /// Over a transport.
    pub fn new(inner: Arc<dyn Transport>) -> Self {
        Self(Arc::new(Ends { inner, own: Mutex::new(VecDeque::new()), news: Notify::new() }))
    }

    /// The transport behind.
    pub fn inner(&self) -> &dyn Transport {
        self.0.inner.as_ref()
    }

    /// Tells the caller an event, before any that the transport behind has not told yet.
    pub fn tell(&self, event: Event) {
        self.0.own.lock().unwrap_or_else(PoisonError::into_inner).push_back(event);
        self.0.news.notify_one();
    }

    fn take(&self) -> Option<Event> {
        self.0.own.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

/// What stands between a transport and its caller. Every method forwards unless it is written anew; each has the
/// promises of the method of [`Transport`] with its name.
pub trait Interpose: Send + Sync + Debug {
    /// The two ends.
    fn through(&self) -> &Through;

    /// As [`Transport::capabilities`].
    fn capabilities(&self) -> Capabilities {
        self.through().inner().capabilities()
    }

    /// As [`Transport::register`].
    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        self.through().inner().register(memory)
    }

    /// As [`Transport::deregister`].
    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        self.through().inner().deregister(region)
    }

    /// As [`Transport::connect`].
    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        self.through().inner().connect(address, limit)
    }

    /// As [`Transport::disconnect`].
    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        self.through().inner().disconnect(peer)
    }

    /// As [`Transport::read`].
    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        self.through().inner().read(request)
    }

    /// As [`Transport::cancel`].
    fn cancel(&self, op: OpId) {
        self.through().inner().cancel(op);
    }

    /// As [`Transport::send`].
    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.through().inner().send(peer, message)
    }

    /// An event of the transport behind. What is returned goes to the caller, after everything that was told with
    /// [`Through::tell`] meanwhile.
    fn event(&self, event: Event) -> Option<Event> {
        Some(event)
    }

    /// The transport behind is about to end or has ended: what was kept back must complete now (rule T-1). May be
    /// called more than once.
    fn closing(&self) {}
}

/// A [`Transport`] made of what stands before another one. It dereferences to it.
#[derive(Debug)]
pub struct Passthrough<I>(I);

impl<I: Interpose> Passthrough<I> {
    /// Makes a transport of it.
    pub fn over(between: I) -> Self {
        Self(between)
    }
}

impl<I> Deref for Passthrough<I> {
    type Target = I;

    fn deref(&self) -> &I {
        &self.0
    }
}

#[async_trait]
impl<I: Interpose> Transport for Passthrough<I> {
    fn name(&self) -> &'static str {
        self.0.through().inner().name()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn address(&self) -> Address {
        self.0.through().inner().address()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        self.0.register(memory)
    }

    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        self.0.through().inner().key(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        self.0.deregister(region)
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        self.0.connect(address, limit)
    }

    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        self.0.disconnect(peer)
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        self.0.read(request)
    }

    fn cancel(&self, op: OpId) {
        self.0.cancel(op);
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.0.send(peer, message)
    }

    async fn next_event(&self) -> Option<Event> {
        let through = self.0.through();
        loop {
            if let Some(event) = through.take() {
                return Some(event);
            }
            // No event is lost if this future is dropped: what was taken is queued before anything is awaited.
            tokio::select! {
                event = through.inner().next_event() => match event {
                    Some(event) => {
                        if let Some(event) = self.0.event(event) {
                            through.tell(event);
                        }
                    }
                    None => {
                        self.0.closing();
                        return through.take();
                    }
                },
                () = through.0.news.notified() => {}
            }
        }
    }

    fn lane(&self, peer: PeerId) -> Option<String> {
        self.0.through().inner().lane(peer)
    }

    fn faces(&self, regions: &[RegionId]) -> Result<Vec<Face>, TransportError> {
        self.0.through().inner().faces(regions)
    }

    fn adopt(&self, name: &str, address: &Address, keys: &[RegionKey]) -> Option<(Address, Vec<RegionKey>)> {
        self.0.through().inner().adopt(name, address, keys)
    }

    async fn shutdown(&self, limit: Duration) {
        self.0.closing();
        self.0.through().inner().shutdown(limit).await;
    }
}
