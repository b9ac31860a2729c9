//! UCX: RDMA, shared memory and TCP behind one library, which is loaded at run time.
//!
//! One thread per instance owns UCX's worker and sleeps on its descriptor. Reads are UCX's one-sided gets, messages
//! its active messages. On top of them stands a small protocol (`frame.rs`) that UCX does not have: connections with
//! a beginning and an end, between lives that know each other; flow control of messages; and the two questions that
//! frame a read (rule T-9).
//!
//! Over TCP and shared memory UCX would emulate gets, and a reader that ends in the middle can then end the owner's process
//! (seen with 1.13.1, 1.14.1, 1.16.0 and 1.18.1). There the owner is asked to send the bytes by active messages instead.
//!
//! # When a read has ended (rule T-3)
//!
//! By messages, at any time: it is this thread that writes what comes. UCX cannot cancel a get. A read that was cancelled or has run out of time asks for nothing more and completes when
//! every get that it has posted has ended by UCX's own word. If that takes longer than
//! [`quiet_limit`](UcxConfig::quiet_limit), the endpoint is closed by force: UCX then ends everything that was posted
//! on it, and the peer is lost. If even that brings no end within [`force_limit`](UcxConfig::force_limit), the worker
//! is destroyed, with all its queues, and the transport closes; only then the completions are told. In no case does
//! a read complete while UCX could still write.
#![cfg(target_os = "linux")]

mod address;
mod begin;
mod config;
mod conn;
mod engine;
mod fabric;
mod frame;
mod home;
mod lanes;
mod plan;
mod reads;
mod serve;
mod shared;
mod status;
#[cfg(test)]
mod strangers;
mod worker;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use rustix::event::{EventfdFlags, eventfd};

use self::address::{Endpoint, WORKER_ADDRESS_MAX};
pub use self::config::UcxConfig;
use self::fabric::Fabric;
use self::shared::Shared;
use self::worker::Worker;
use crate::contract::{
    Address, Capabilities, Event, MESSAGE_MAX_BYTES, OpId, PeerId, ReadRequest, RegionId, RegionKey,
    Transport,
};
use crate::error::TransportError;
use crate::memory::Memory;

/// The word by which a configuration names this transport.
const NAME: &str = "ucx";
/// How long a drop waits for the thread: longer than it waits for its endpoints.
const DROP_LIMIT: Duration = Duration::from_secs(4);

/// A [`Transport`] over UCX. See the [module](self).
pub struct UcxTransport {
    shared: Arc<Shared>,
    address: Address,
    version: (u32, u32, u32),
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl UcxTransport {
    /// Loads UCX, and starts the thread. From now on peers can connect. A machine without UCX, or with one that
    /// cannot be used, gets [`TransportError::Library`].
    pub fn open(config: UcxConfig) -> Result<Self, TransportError> {
        config.check()?;
        let fabric = Fabric::open(&config)?;
        let version = fabric.api.version;
        let mut life = [0; 16];
        getrandom::fill(&mut life).map_err(|error| no_randomness(&error))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| system("make", "an event descriptor", &error.into()))?;
        let shared = Arc::new(Shared::new(config, life, Arc::clone(&fabric), wake));
        let (thread, own) = engine::start(move || Worker::new(fabric), Arc::clone(&shared))?;
        Ok(Self { shared, address: Address::from_bytes(own)?, version, thread: Mutex::new(Some(thread)) })
    }

    /// Version of the UCX that was found: major, minor and release number.
    pub fn ucx_version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// The lanes that UCX has chosen for a peer, as `transport/device`, as they were when it connected. With
    /// `tcp/...`, `posix/...` and `sysv/...` alone a read is not one-sided: the owner sends the bytes.
    pub fn lanes(&self, peer: PeerId) -> Result<Vec<String>, TransportError> {
        self.shared.lanes(peer)
    }
}

#[async_trait]
impl Transport for UcxTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        // Not `one_sided`: whether a read needs the owner's processor depends on the lanes, and its two questions do.
        Capabilities { message_max_bytes: MESSAGE_MAX_BYTES, across_hosts: true, ..Capabilities::basic() }
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let nonce = getrandom::u64().map_err(|error| no_randomness(&error))?;
        self.shared.register(memory, nonce)
    }

    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        self.shared.key(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        self.shared.deregister(region)
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        self.shared.connect(Endpoint::decode(address)?, limit)
    }

    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        self.shared.disconnect(peer)
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        self.shared.read(request)
    }

    fn cancel(&self, op: OpId) {
        self.shared.cancel(op);
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        if message.len() > MESSAGE_MAX_BYTES {
            return Err(TransportError::MessageTooLong { bytes: message.len(), limit: MESSAGE_MAX_BYTES });
        }
        self.shared.send(peer, message)
    }

    async fn next_event(&self) -> Option<Event> {
        self.shared.next_event().await
    }

    async fn shutdown(&self, limit: Duration) {
        self.shared.close();
        // The caller may use any executor: a thread of its own keeps the limit.
        let (done, waiter) = tokio::sync::oneshot::channel::<()>();
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("kv-ucx-close".into()).spawn(move || {
            shared.wait_finished(limit);
            drop(done);
        });
        match thread {
            // The sender is dropped, never used: either way the wait is over.
            Ok(_) => drop(waiter.await),
            Err(_) => drop(self.shared.wait_finished(limit.min(DROP_LIMIT))),
        }
    }
}

impl Drop for UcxTransport {
    fn drop(&mut self) {
        self.shared.close();
        let finished = self.shared.wait_finished(DROP_LIMIT);
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|_| finished) {
            // A panic of the thread has been told by the events; it must not become the dropper's.
            thread.join().ok();
        }
    }
}

impl fmt::Debug for UcxTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UcxTransport").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Our address, unless UCX's is too long to be one.
fn own_address(endpoint: &Endpoint) -> Result<Address, TransportError> {
    if endpoint.worker.len() > WORKER_ADDRESS_MAX {
        let what = "UCX uses more devices than fit into an address; name fewer in `settings` as NET_DEVICES";
        return Err(TransportError::BadConfig { transport: NAME, what });
    }
    endpoint.encode()
}

fn system(operation: &'static str, subject: impl fmt::Display, error: &io::Error) -> TransportError {
    TransportError::System {
        operation,
        subject: subject.to_string(),
        kind: error.kind(),
        code: error.raw_os_error(),
    }
}

fn no_randomness(error: &getrandom::Error) -> TransportError {
    let code = error.raw_os_error();
    let kind = code.map_or(io::ErrorKind::Other, |code| io::Error::from_raw_os_error(code).kind());
    TransportError::System { operation: "draw", subject: "random numbers".into(), kind, code }
}
