//! TCP sockets: works everywhere, needs nothing.
//!
//! One thread per instance does all the work, so a destination has one writer and an operation can end at once. One
//! connection per peer carries reads and messages of both sides. The bytes of a read go from the source's memory to
//! the socket and from the socket to the destination; nothing copies them in between. What is on the wire is
//! described in `frame.rs`, the limits are those of [`TcpConfig`].

mod address;
mod commands;
mod config;
mod connection;
mod establish;
mod frame;
mod iothread;
mod plan;
mod reader;
mod reads;
mod serve;
mod shared;
mod spans;
mod vectored;
mod writer;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use self::address::Endpoint;
use self::commands::Control;
pub use self::config::TcpConfig;
use self::iothread::IoThread;
use self::shared::Shared;
use crate::contract::{
    Address, Capabilities, Event, MESSAGE_MAX_BYTES, OpId, PeerId, ReadRequest, RegionId, RegionKey,
    Transport,
};
use crate::error::TransportError;
use crate::memory::Memory;

/// The word by which a configuration names this transport.
const NAME: &str = "tcp";
/// Connections that the system keeps until they are accepted. It may know better and keep fewer.
const BACKLOG: i32 = 1024;
/// How long a drop waits for the thread. It does not wait for anything but its sockets, so this is ample.
const DROP_LIMIT: Duration = Duration::from_secs(2);
/// Threads that resolve names, at most.
const RESOLVERS_MAX: usize = 4;

/// A [`Transport`] over TCP. See the [module](self).
pub struct TcpTransport {
    shared: Arc<Shared>,
    control: UnboundedSender<Control>,
    address: Address,
    local: SocketAddr,
    thread: Mutex<Option<JoinHandle<()>>>,
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

        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_name("kv-tcp-resolve")
            .max_blocking_threads(RESOLVERS_MAX)
            .build()
            .map_err(|error| system("start", "an IO runtime", &error))?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener).map_err(on_address("listen on"))?
        };
        let (control, receiver) = unbounded_channel();
        let shared = Arc::new(Shared::new(config));
        let io = IoThread { shared: Arc::clone(&shared), nonce, listener, control: receiver };
        let thread = std::thread::Builder::new()
            .name("kv-tcp".into())
            .spawn(move || io.run(runtime))
            .map_err(|error| system("start", "thread kv-tcp", &error))?;
        Ok(Self { shared, control, address, local, thread: Mutex::new(Some(thread)) })
    }

    /// Where the socket listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn start_shutdown(&self) {
        if self.shared.close() {
            // A thread that is gone has ended everything already.
            self.control.send(Control::Shutdown).ok();
        }
    }
}

#[async_trait]
impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
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
        self.shared.connect(Endpoint::decode(address)?, limit, &self.control)
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
        self.start_shutdown();
        // The caller may use any executor, and ours is about to end: a thread of its own keeps the limit.
        let (done, waiter) = tokio::sync::oneshot::channel::<()>();
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("kv-tcp-close".into()).spawn(move || {
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

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.start_shutdown();
        let finished = self.shared.wait_finished(DROP_LIMIT);
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|_| finished) {
            // A panic of the thread has been told by the events; it must not become the dropper's.
            thread.join().ok();
        }
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
