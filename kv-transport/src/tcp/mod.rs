//! TCP sockets: works everywhere, needs nothing.
//!
//! The bytes of a read go from the source's memory to the socket and from the socket to the destination; nothing copies
//! them in between. The limits are those of [`TcpConfig`].

mod address;
mod config;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::TcpListener;

use self::address::Endpoint;
pub use self::config::TcpConfig;
use crate::contract::{
    Address, Capabilities, Event, MESSAGE_MAX_BYTES, OpId, PeerId, ReadRequest, RegionId, RegionKey,
    Transport,
};
use crate::error::TransportError;
use crate::memory::Memory;
use crate::stream::core::{Core, no_randomness, system};
use crate::stream::socket::Listener;

/// The word by which a configuration names this transport.
const NAME: &str = "tcp";
/// Connections that the system keeps until they are accepted. It may know better and keep fewer.
const BACKLOG: i32 = 1024;

/// A [`Transport`] over TCP. See the [module](self).
pub struct TcpTransport {
    core: Core,
    address: Address,
    local: SocketAddr,
}

impl TcpTransport {
    /// Listens, and starts the thread. From now on peers can connect.
    pub fn bind(config: TcpConfig) -> Result<Self, TransportError> {
        config.check()?;
        let bind = config.bind;
        let on_address = |operation| move |error| system(operation, bind, &error);
        let listener = listen(bind).map_err(on_address("listen on"))?;
        let local = listener.local_addr().map_err(on_address("listen on"))?;
        let host = config.advertise.clone().unwrap_or_else(|| local.ip().to_string());
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).map_err(|error| no_randomness(&error))?;
        let address = Endpoint { host, port: local.port(), nonce }.encode()?;
        let listen = || {
            let listener = TcpListener::from_std(listener).map_err(on_address("listen on"))?;
            Ok((Listener::Tcp(listener), None))
        };
        let core = Core::start(config.limits(), nonce, |_| Ok(None), listen)?;
        Ok(Self { core, address, local })
    }

    /// Where the socket listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

#[async_trait]
impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            message_max_bytes: MESSAGE_MAX_BYTES,
            across_hosts: true,
            device_memory: true,
            ..Capabilities::basic()
        }
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let nonce = getrandom::u64().map_err(|error| no_randomness(&error))?;
        self.core.shared.register(memory, nonce)
    }

    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        self.core.shared.key(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        self.core.shared.deregister(region)
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        self.core.connect(Endpoint::decode(address)?.target(), limit)
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

    fn lane(&self, peer: PeerId) -> Option<String> {
        let links = self.core.shared.links(peer);
        (links > 1).then(|| format!("{links} connections"))
    }

    async fn shutdown(&self, limit: Duration) {
        self.core.shutdown(limit).await;
    }
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpTransport").field("local", &self.local).finish_non_exhaustive()
    }
}

fn listen(bind: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = socket2::Socket::new(
        socket2::Domain::for_address(bind),
        socket2::Type::STREAM,
        Some(socket2::Protocol::TCP),
    )?;
    // A restarted process gets its port back although old connections linger.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&bind.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
