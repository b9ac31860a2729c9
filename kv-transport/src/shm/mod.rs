//! Shared memory: engines on one host copy straight out of each other's memory.
//!
//! Messages and liveness go over a Unix socket, as `tcp` does it over its own. Reads do not need the peer:
//!
//! * memory from [`Memory::allocate_shared`] is mapped by the reader and copied once;
//! * other memory is read by `process_vm_readv`, if the system allows it (one user, and ptrace rights);
//! * where neither is possible, or memory lies on a device, the socket carries the bytes, which [`ShmTransport::lane`] and the log say.
//!
//! Who may look into whose memory is decided by the kernel's word on the user at the other end of a Unix socket and by a secret
//! in the address, not by a name: descriptors are handed out one by one (`grants.rs`). A page that the owner keeps says which
//! regions are registered; a reader looks at it *after* it has copied, so that bytes of a region that is gone are never taken
//! for good ones (`registry.rs`). The copying is done by a thread of the reader's, in turns, so that no caller waits.

mod address;
mod grants;
mod peers;
mod registry;
mod window;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UnixListener;

use self::address::Whereabouts;
use self::grants::Grants;
use self::peers::Peers;
use self::registry::Registry;
use crate::contract::{
    Address, Capabilities, Event, MESSAGE_MAX_BYTES, OpId, PeerId, ReadRequest, RegionId, RegionKey,
    Transport,
};
use crate::error::TransportError;
use crate::memory::Memory;
use crate::stream::core::{Core, no_randomness, system};
use crate::stream::limits::Limits;
use crate::stream::local::LocalPath;
use crate::stream::socket::Listener;
use crate::tcp::TcpConfig;

/// The word by which a configuration names this transport.
const NAME: &str = "shm";
/// How long a drop waits for the thread that copies.
const DROP_LIMIT: Duration = Duration::from_secs(2);
/// Connections that the system keeps until they are accepted.
const BACKLOG: i32 = 1024;

/// Settings of a [`ShmTransport`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShmConfig {
    /// Whether peers' shared memory is mapped. Default true.
    pub map: bool,
    /// Whether peers' other memory is read by `process_vm_readv`. Default true.
    pub read_process: bool,
    /// After this long without a byte from a peer it is pinged. Default 1 s.
    pub keep_alive: Duration,
    /// After this long without a byte from a peer, pings and all, it is given up as silent. Default 5 s. The end of a
    /// process is known at once; this is for one that hangs. At least twice `keep_alive`.
    pub silence_limit: Duration,
    /// A peer to which nothing can be written for this long, although something waits, is given up as a slow reader.
    /// Default 10 s.
    pub serve_limit: Duration,
    /// Most peers at a time. One that was lost counts until its loss has been taken with `next_event`. Default 1024.
    pub peers_max: usize,
}

impl Default for ShmConfig {
    fn default() -> Self {
        let like = TcpConfig::default();
        Self {
            map: true,
            read_process: true,
            keep_alive: like.keep_alive,
            silence_limit: like.silence_limit,
            serve_limit: like.serve_limit,
            peers_max: like.peers_max,
        }
    }
}

impl ShmConfig {
    fn limits(&self) -> Result<Limits, TransportError> {
        let like = TcpConfig {
            keep_alive: self.keep_alive,
            silence_limit: self.silence_limit,
            serve_limit: self.serve_limit,
            peers_max: self.peers_max,
            ..TcpConfig::default()
        };
        match like.check() {
            Err(TransportError::BadConfig { what, .. }) => {
                Err(TransportError::BadConfig { transport: NAME, what })
            }
            Err(other) => Err(other),
            Ok(()) => Ok(Limits { name: NAME, connections_per_peer: 1, further_granted: 0, ..like.limits() }),
        }
    }
}

/// The thread that copies, and how its end is known.
struct Copier {
    thread: JoinHandle<()>,
    ended: std::sync::mpsc::Receiver<()>,
}

/// A [`Transport`] between processes of one host. See the [module](self).
pub struct ShmTransport {
    core: Core,
    address: Address,
    host: [u8; 16],
    grants: Arc<Grants>,
    peers: Arc<Peers>,
    copier: Mutex<Option<Copier>>,
}

impl ShmTransport {
    /// Listens, and starts the threads. From now on peers can connect.
    pub fn bind(config: ShmConfig) -> Result<Self, TransportError> {
        let limits = config.limits()?;
        let place = Whereabouts::draw()?;
        let mut probe = [0; 16];
        getrandom::fill(&mut probe).map_err(|error| no_randomness(&error))?;
        let registry = Registry::new(probe).map_err(|_| {
            system("allocate", "the registry of shared regions", &std::io::ErrorKind::OutOfMemory.into())
        })?;
        let grants = Arc::new(Grants::new(place.nonce, registry));
        let mut made = None;
        let listen = || {
            let connections = listen(&place.connections())?;
            let asked = listen(&place.grants())?;
            let aside = Arc::clone(&grants).serve(asked);
            Ok((Listener::Unix(connections), Some(Box::pin(aside) as _)))
        };
        let local = |shared: &std::sync::Weak<_>| {
            let peers = Arc::new(Peers::new(config, shared.clone()));
            made = Some(Arc::clone(&peers));
            Ok(Some(peers as Arc<dyn LocalPath>))
        };
        let core = Core::start(limits, place.nonce, local, listen)?;
        let peers = made.ok_or(TransportError::Closed { transport: NAME })?;
        let copying = Arc::clone(&peers);
        let (running, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("kv-shm-copy".into())
            .spawn(move || {
                copying.run();
                drop(running);
            })
            .map_err(|error| system("start", "thread kv-shm-copy", &error))?;
        let copier = Copier { thread, ended };
        let address = place.encode()?;
        Ok(Self { core, address, host: place.host, grants, peers, copier: Mutex::new(Some(copier)) })
    }

    fn end(&self) {
        self.grants.clear();
        self.peers.close();
        let copier = self.copier.lock().unwrap_or_else(PoisonError::into_inner).take();
        // It ends after the piece that it copies. Should the system keep it in a page of a peer's that never comes, it is left.
        if let Some(copier) = copier
            && copier.ended.recv_timeout(DROP_LIMIT) != Err(std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            // A panic of the thread must not become the dropper's; its jobs end with their peers.
            copier.thread.join().ok();
        }
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        self.end();
    }
}

#[async_trait]
impl Transport for ShmTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { message_max_bytes: MESSAGE_MAX_BYTES, device_memory: true, ..Capabilities::basic() }
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let nonce = loop {
            // Zero means that there is no region.
            match getrandom::u64().map_err(|error| no_randomness(&error))? {
                0 => {}
                nonce => break nonce,
            }
        };
        let region = self.core.shared.register(memory.clone(), nonce)?;
        self.grants.add(region, nonce, memory);
        Ok(region)
    }

    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        self.core.shared.key(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        // Between the two the region is still listed, and its memory still held.
        self.core.shared.deregister(region)?;
        self.grants.remove(region);
        Ok(())
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        let place = Whereabouts::decode(address)?;
        if place.host != self.host {
            return Err(TransportError::BadAddress { transport: NAME, reason: "it is on another host" });
        }
        self.core.connect(place.target(), limit)
    }

    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        self.core.shared.disconnect(peer)
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        self.core.shared.read(request)
    }

    fn cancel(&self, op: OpId) {
        self.core.shared.cancel(op);
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.core.shared.send(peer, message)
    }

    async fn next_event(&self) -> Option<Event> {
        self.core.shared.next_event().await
    }

    async fn shutdown(&self, limit: Duration) {
        self.core.shutdown(limit).await;
        self.grants.clear();
        self.peers.close();
    }

    fn lane(&self, peer: PeerId) -> Option<String> {
        self.peers.lane(peer).map(str::to_owned)
    }
}

impl fmt::Debug for ShmTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmTransport").finish_non_exhaustive()
    }
}

fn listen(name: &[u8]) -> Result<UnixListener, TransportError> {
    use std::os::unix::ffi::OsStrExt;

    let failed = |error: std::io::Error| system("listen on", String::from_utf8_lossy(name), &error);
    let abstract_name = [&[0], name].concat();
    let address = socket2::SockAddr::unix(std::ffi::OsStr::from_bytes(&abstract_name)).map_err(failed)?;
    let kind = socket2::Type::STREAM.nonblocking();
    let socket = socket2::Socket::new(socket2::Domain::UNIX, kind, None).map_err(failed)?;
    socket.bind(&address).map_err(failed)?;
    socket.listen(BACKLOG).map_err(failed)?;
    UnixListener::from_std(socket.into()).map_err(failed)
}
