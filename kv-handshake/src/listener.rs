//! The producer's side: one ROUTER socket on a thread of its own.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_proto::CodecError;
use kv_proto::handshake::{CardError, EngineCard, RefusalCode};
use thiserror::Error;

use crate::answer::{self, Refusal};
use crate::{endpoint, frames};

/// The wake-up between the owner of a listener and its thread. Each listener has a context of its own, so the
/// name need not be unique.
const WAKE: &str = "inproc://wake";

/// Queries answered between two looks at the wake-up socket.
const BATCH: usize = 64;

/// At most one log line about refusals in this time.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// Where a listener listens, and what it allows its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerConfig {
    /// Host name or address to listen at, IPv6 with or without brackets; it must belong to this machine. A
    /// wildcard (`0.0.0.0`, `::`) opens the port to every network that the machine is in. Default: `127.0.0.1`.
    pub bind_host: String,
    /// Port; 0 lets the system choose one, which [`Listener::port`] tells. Default: 0.
    pub port: u16,
    /// Longest frame taken from a peer, in bytes. libzmq refuses a longer one when it reads its header, and
    /// drops the connection. The largest query that can be accepted has a fingerprint of 512 KiB. Default: 1 MiB.
    pub query_max_bytes: usize,
    /// Most queries and most answers that wait per peer. A peer asks one at a time; of one that asks more and
    /// does not read, the answers are dropped; an answer can be 16 MiB long. Default: 4.
    pub waiting_max: u16,
    /// How long a new connection may take to greet as ZeroMQ before it is dropped. Default: 10 s.
    pub greeting_limit: Duration,
}

impl Default for ListenerConfig {
    fn default() -> Self {
        Self {
            bind_host: "127.0.0.1".to_owned(),
            port: 0,
            query_max_bytes: 1 << 20,
            waiting_max: 4,
            greeting_limit: Duration::from_secs(10),
        }
    }
}

/// Why a listener could not start. Each is for the operator, and fatal for the engine: a producer that nobody
/// can reach only looks alive.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The engine's own description does not hold together.
    #[error("the engine's description is unsound: {0}")]
    Card(#[from] CardError),
    /// The engine's own description cannot be sent.
    #[error("the engine's description cannot be sent: {0}")]
    CardCodec(#[from] CodecError),
    /// The host does not resolve.
    #[error("bind_host {host:?} (port {port}) does not resolve: {source}")]
    Resolve {
        /// The host.
        host: String,
        /// The port that was to be bound.
        port: u16,
        /// The resolver's words.
        source: io::Error,
    },
    /// The host's addresses are those of other machines.
    #[error("{endpoint} cannot be bound: bind_host is no address of this machine ({source})")]
    NotLocal {
        /// The host and what it resolved to.
        endpoint: String,
        /// The system's words.
        source: io::Error,
    },
    /// Another socket has the port.
    #[error(
        "{endpoint} cannot be bound: port {port} is in use; change `port` in the listener's configuration, or \
         set it to 0 and let the system choose"
    )]
    PortInUse {
        /// What was to be bound.
        endpoint: String,
        /// The port.
        port: u16,
    },
    /// Any other refusal of the system or of libzmq.
    #[error("{endpoint}: {operation} failed: {source}")]
    Socket {
        /// What was to be bound.
        endpoint: String,
        /// What was tried.
        operation: &'static str,
        /// The system's words.
        source: io::Error,
    },
}

/// What a listener has done since it started.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Queries accepted.
    pub accepted: u64,
    /// Queries refused, by reason; reasons that never occurred are absent.
    pub refused: BTreeMap<RefusalCode, u64>,
    /// Answers not delivered: the peer had left, or had not read earlier ones.
    pub dropped_replies: u64,
}

/// The codes of refusals that a listener gives, each with a counter.
const CODES: [RefusalCode; 5] = [
    RefusalCode::Malformed,
    RefusalCode::Version,
    RefusalCode::WrongEngine,
    RefusalCode::Incompatible,
    RefusalCode::Unavailable,
];

#[derive(Default)]
struct Shared {
    available: AtomicBool,
    accepted: AtomicU64,
    refused: [AtomicU64; CODES.len()],
    dropped: AtomicU64,
}

/// Answers handshakes for an engine, from the engine's scheduler process, on a thread of its own.
///
/// It is available from the start. Dropping it closes the port and ends the thread, whatever its peers do.
pub struct Listener {
    local: SocketAddr,
    shared: Arc<Shared>,
    wake: Mutex<zmq::Socket>,
    thread: Option<JoinHandle<()>>,
    // The last field: sockets keep their context alive, but its end waits for them, so it must not come first.
    _context: zmq::Context,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("local", &self.local).field("stats", &self.stats()).finish()
    }
}

/// The first address of the host that is this machine's, found by binding a port of the system's choice: libzmq
/// has no words for some of the system's refusals, and the wanted port is left to the one bind that counts.
fn local_address(host: &str, port: u16) -> Result<SocketAddr, ListenError> {
    let resolve = |source| ListenError::Resolve { host: host.to_owned(), port, source };
    let bare = endpoint::unbracket(host);
    if bare.is_empty() {
        return Err(resolve(io::Error::new(io::ErrorKind::InvalidInput, "it is empty")));
    }
    let addresses: Vec<SocketAddr> = (bare, port).to_socket_addrs().map_err(resolve)?.collect();
    let mut refusal = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for address in &addresses {
        let mut any_port = *address;
        any_port.set_port(0);
        match TcpListener::bind(any_port) {
            Ok(_) => return Ok(*address),
            Err(e) => refusal = e,
        }
    }
    if addresses.is_empty() {
        return Err(resolve(refusal));
    }
    Err(ListenError::NotLocal { endpoint: endpoint::resolved(host, port, &addresses), source: refusal })
}

fn configure(router: &zmq::Socket, config: &ListenerConfig, v6: bool) -> zmq::Result<()> {
    router.set_ipv6(v6)?;
    router.set_linger(0)?;
    // Without this an answer to a peer that left vanishes uncounted.
    router.set_router_mandatory(true)?;
    // libzmq takes 0 as "no limit".
    let waiting = i32::from(config.waiting_max.max(1));
    router.set_sndhwm(waiting)?;
    router.set_rcvhwm(waiting)?;
    router.set_maxmsgsize(i64::try_from(config.query_max_bytes).unwrap_or(i64::MAX))?;
    let greeting = config.greeting_limit.as_millis().max(1);
    router.set_handshake_ivl(i32::try_from(greeting).unwrap_or(i32::MAX))?;
    // A host that went away without a word would otherwise keep its connection here for ever.
    router.set_tcp_keepalive(1)?;
    router.set_tcp_keepalive_idle(60)?;
    router.set_tcp_keepalive_intvl(15)?;
    router.set_tcp_keepalive_cnt(4)
}

impl Listener {
    /// Checks the card, binds the port and starts the thread. Resolving the host may block.
    pub fn bind(config: ListenerConfig, card: EngineCard) -> Result<Self, ListenError> {
        card.check()?;
        // Fails here rather than at each query, and need not be made again for each.
        let accepted = answer::accepted(&card)?;

        let mut local = local_address(&config.bind_host, config.port)?;
        if local.ip().is_unspecified() {
            tracing::warn!(
                bind_host = config.bind_host,
                "the handshake listens on all interfaces; it has no authentication"
            );
        }
        let endpoint = endpoint::resolved(&config.bind_host, config.port, &[local]);
        let failed = |operation| {
            let endpoint = endpoint.clone();
            move |e: zmq::Error| ListenError::Socket { endpoint, operation, source: e.into() }
        };

        let context = zmq::Context::new();
        let router = context.socket(zmq::ROUTER).map_err(failed("making a socket"))?;
        configure(&router, &config, local.is_ipv6()).map_err(failed("setting the socket's options"))?;
        router.bind(&format!("tcp://{local}")).map_err(|e| match e {
            zmq::Error::EADDRINUSE => {
                ListenError::PortInUse { endpoint: endpoint.clone(), port: config.port }
            }
            e => failed("binding")(e),
        })?;
        let bound = router.get_last_endpoint().map_err(failed("reading the bound port"))?;
        let port = bound.ok().and_then(|e| e.rsplit_once(':').and_then(|(_, port)| port.parse().ok()));
        let port = port.ok_or_else(|| failed("reading the bound port")(zmq::Error::EINVAL))?;
        local.set_port(port);

        let pair = |connect: bool| {
            let socket = context.socket(zmq::PAIR)?;
            socket.set_linger(0)?;
            if connect {
                socket.connect(WAKE)?
            } else {
                socket.bind(WAKE)?
            }
            Ok(socket)
        };
        let woken = pair(false).map_err(failed("making the wake-up"))?;
        let wake = pair(true).map_err(failed("making the wake-up"))?;

        let shared = Arc::new(Shared { available: AtomicBool::new(true), ..Shared::default() });
        let server =
            Server { router, woken, card, accepted, shared: Arc::clone(&shared), log: Throttle::default() };
        let thread = std::thread::Builder::new()
            .name("kv-handshake".to_owned())
            .spawn(move || server.run())
            .map_err(|source| ListenError::Socket { endpoint, operation: "starting the thread", source })?;
        Ok(Self { local, shared, wake: Mutex::new(wake), thread: Some(thread), _context: context })
    }

    /// The port that is bound.
    pub fn port(&self) -> u16 {
        self.local.port()
    }

    /// The address that is bound; it may be a wildcard or a loopback, which no other host can dial.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// While it is false, queries that can be read are refused as [`RefusalCode::Unavailable`]: for an engine
    /// that drains.
    pub fn set_available(&self, available: bool) {
        self.shared.available.store(available, Ordering::Relaxed);
    }

    /// What it has done so far.
    pub fn stats(&self) -> ListenerStats {
        let count = |c: &AtomicU64| c.load(Ordering::Relaxed);
        ListenerStats {
            accepted: count(&self.shared.accepted),
            refused: CODES
                .iter()
                .zip(&self.shared.refused)
                .map(|(code, counter)| (*code, count(counter)))
                .filter(|(_, n)| *n > 0)
                .collect(),
            dropped_replies: count(&self.shared.dropped),
        }
    }

    /// Whether its thread still answers. It ends before the listener is dropped only after a failure of libzmq
    /// itself, which is logged.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let wake = self.wake.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The only message ever sent there: it cannot meet a full queue. It fails if the thread has ended.
        let _ = wake.send(zmq::Message::new(), zmq::DONTWAIT);
        if self.thread.take().is_some_and(|t| t.join().is_err()) {
            tracing::error!(address = %self.local, "the handshake listener's thread had panicked");
        }
    }
}

/// Lets one line through in a while and counts the rest, so that no peer can fill a disk.
#[derive(Default)]
struct Throttle {
    last: Option<Instant>,
    kept_back: u64,
}

impl Throttle {
    /// The number of lines kept back since the last one, if one may be written now.
    fn admit(&mut self) -> Option<u64> {
        if self.last.is_some_and(|last| last.elapsed() < LOG_EVERY) {
            self.kept_back += 1;
            return None;
        }
        self.last = Some(Instant::now());
        Some(std::mem::take(&mut self.kept_back))
    }
}

/// What the thread owns.
struct Server {
    router: zmq::Socket,
    woken: zmq::Socket,
    card: EngineCard,
    accepted: Vec<u8>,
    shared: Arc<Shared>,
    log: Throttle,
}

impl Server {
    fn run(mut self) {
        if let Err(e) = self.serve() {
            tracing::error!(error = %e, "the handshake listener has ended");
        }
    }

    /// Waits without a time limit and never blocks elsewhere, so that nothing but the wake-up is needed to end it
    /// and an idle one costs nothing.
    fn serve(&mut self) -> zmq::Result<()> {
        loop {
            let mut items = [self.router.as_poll_item(zmq::POLLIN), self.woken.as_poll_item(zmq::POLLIN)];
            match zmq::poll(&mut items, -1) {
                Err(zmq::Error::EINTR) => continue,
                other => drop(other?),
            }
            if items[1].is_readable() {
                return Ok(());
            }
            for _ in 0..BATCH {
                // Routing id, delimiter, query.
                let Some(message) = frames::receive(&self.router, 3)? else { break };
                self.answer(&message)?;
            }
        }
    }

    fn answer(&mut self, message: &frames::Frames) -> zmq::Result<()> {
        let Some(peer) = message.kept.first() else { return Ok(()) };
        let available = self.shared.available.load(Ordering::Relaxed);
        let verdict = frames::payload(message, 1)
            .map_err(Refusal::parts)
            .and_then(|query| answer::judge(&self.card, available, query));
        let answer = match verdict {
            Ok(()) => {
                self.shared.accepted.fetch_add(1, Ordering::Relaxed);
                zmq::Message::from(&self.accepted[..])
            }
            Err(refusal) => {
                let counter = CODES.iter().position(|code| *code == refusal.code).unwrap_or(0);
                self.shared.refused[counter].fetch_add(1, Ordering::Relaxed);
                if let Some(kept_back) = self.log.admit() {
                    tracing::warn!(
                        code = ?refusal.code,
                        reason = refusal.message,
                        kept_back,
                        "a handshake query was refused"
                    );
                }
                zmq::Message::from(refusal.encode(&self.card))
            }
        };
        // Never waits: the first frame is refused if the peer left or does not read, the others then cannot be.
        let first = || self.router.send(&peer[..], zmq::DONTWAIT | zmq::SNDMORE);
        let mut sent = first();
        if sent == Err(zmq::Error::EAGAIN) {
            // libzmq seldom looks at what its IO thread tells it, so that the peer may have read all the same.
            // Asking for events makes it look.
            self.router.get_events()?;
            sent = first();
        }
        if sent.is_ok() && frames::delimited(message, 1) {
            sent = self.router.send(zmq::Message::new(), zmq::DONTWAIT | zmq::SNDMORE);
        }
        match sent.and_then(|()| self.router.send(answer, zmq::DONTWAIT)) {
            Ok(()) => Ok(()),
            Err(zmq::Error::ETERM) => Err(zmq::Error::ETERM),
            Err(e) => {
                self.shared.dropped.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(error = %e, "an answer was dropped");
                Ok(())
            }
        }
    }
}
