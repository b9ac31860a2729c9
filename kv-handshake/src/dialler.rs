//! The consumer's side: one DEALER socket per dial, all in one context.

use std::fmt;
use std::io::{self, Read as _};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use kv_proto::codec::HANDSHAKE_MAX_BYTES;
use kv_proto::handshake::{Answer, EngineCard, HandshakeError, Query, RefusalCode};
use kv_proto::{CodecError, Fingerprint, Incarnation, LoadFailure};
use thiserror::Error;

use crate::{endpoint, frames};

/// Most name look-ups in flight per dialler. A look-up that hangs in the system's resolver cannot be stopped, only
/// left behind; so many may be left behind before further ones have to wait.
pub const RESOLVERS_MAX: usize = 32;

/// Most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// Longest limit of a dial; a longer one counts as this.
const LIMIT_MAX: Duration = Duration::from_secs(3600);

/// Each side of a ZeroMQ connection sends so many bytes first, unasked; only the outer two are fixed.
const SIGNATURE_BYTES: usize = 10;

/// One question to one producer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dial {
    /// Host of its listener: a name or an address, IPv6 with or without brackets.
    pub host: String,
    /// Port of its listener.
    pub port: u16,
    /// What is asked; it names the engine wanted.
    pub query: Query,
    /// The own fingerprint.
    pub fingerprint: Fingerprint,
    /// The life of the engine wanted.
    pub wanted_life: Incarnation,
    /// Limit over everything: look-up, connection and answer. At most one hour.
    pub limit: Duration,
}

/// How far a dial without an answer came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Contact {
    /// No connection could be made.
    None,
    /// A connection was made, but nothing greeted as ZeroMQ.
    Connected,
    /// ZeroMQ greeted, but the query got no answer.
    Greeted,
}

impl fmt::Display for Contact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no connection could be made",
            Self::Connected => "something takes connections there, but it does not greet as ZeroMQ",
            Self::Greeted => "ZeroMQ greets there, but the query was not answered",
        })
    }
}

/// Why a dial brought no card. Each names the address that was dialled.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DialError {
    /// The address can be no peer's.
    #[error("{endpoint} cannot be dialled: a wildcard host, an empty one or port 0 names no peer")]
    NotAnAddress {
        /// What was to be dialled.
        endpoint: String,
    },
    /// The host does not resolve.
    #[error("{endpoint} cannot be dialled: host {host:?} does not resolve: {source}")]
    Resolve {
        /// What was to be dialled.
        endpoint: String,
        /// The host.
        host: String,
        /// The resolver's words.
        source: io::Error,
    },
    /// The resolver did not answer in time.
    #[error("{endpoint} cannot be dialled: host {host:?} did not resolve within {limit:?}")]
    ResolveTimedOut {
        /// What was to be dialled.
        endpoint: String,
        /// The host.
        host: String,
        /// The dial's limit.
        limit: Duration,
    },
    /// Too many look-ups hang; this one could not begin.
    #[error("{endpoint} cannot be dialled: {busy} look-ups of other hosts did not end within {limit:?}")]
    ResolversBusy {
        /// What was to be dialled.
        endpoint: String,
        /// Look-ups in flight.
        busy: usize,
        /// The dial's limit.
        limit: Duration,
    },
    /// Nothing listens, or what listens did not answer.
    #[error("no answer from {endpoint} (limit {limit:?}): {contact}")]
    NoAnswer {
        /// What was dialled, with the addresses tried.
        endpoint: String,
        /// The dial's limit.
        limit: Duration,
        /// How far it came.
        contact: Contact,
    },
    /// An answer came, and it is no.
    #[error("handshake with {endpoint}: {source}")]
    Handshake {
        /// What was dialled, with the address that answered.
        endpoint: String,
        /// What the answer was.
        source: HandshakeError,
    },
    /// The own query cannot be sent; a defect of the caller's.
    #[error("the query to {endpoint} cannot be sent: {source}")]
    Query {
        /// What was to be dialled.
        endpoint: String,
        /// Why not.
        source: CodecError,
    },
    /// This process has no socket or thread to spare.
    #[error("{endpoint} cannot be dialled: {operation} failed: {source}")]
    Socket {
        /// What was to be dialled.
        endpoint: String,
        /// What was tried.
        operation: &'static str,
        /// The system's words.
        source: io::Error,
    },
}

impl DialError {
    /// The reason under which a load that waited for this dial fails.
    pub fn failure(&self) -> LoadFailure {
        match self {
            Self::Handshake { source, .. } => match source {
                HandshakeError::Version { .. } | HandshakeError::Incompatible { .. } => {
                    LoadFailure::Incompatible
                }
                HandshakeError::WrongEngine { .. } => LoadFailure::WrongPeer,
                HandshakeError::Refused { code, .. } => match code {
                    RefusalCode::Version | RefusalCode::Incompatible => LoadFailure::Incompatible,
                    RefusalCode::WrongEngine => LoadFailure::WrongPeer,
                    _ => LoadFailure::HandshakeRefused,
                },
                _ => LoadFailure::HandshakeMalformed,
            },
            _ => LoadFailure::HandshakeUnreachable,
        }
    }
}

type Lookup = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

struct Inner {
    context: zmq::Context,
    slots: Arc<Slots>,
    lookup: Arc<Lookup>,
}

/// Asks producers who they are.
///
/// Clones share one ZeroMQ context with one IO thread. Each dial has a socket of its own, so that many can go on
/// at once and a dead peer delays nobody but its own caller; about 1000 at a time are possible.
#[derive(Clone)]
pub struct Dialler {
    inner: Arc<Inner>,
}

impl fmt::Debug for Dialler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialler").finish_non_exhaustive()
    }
}

impl Default for Dialler {
    fn default() -> Self {
        Self::new()
    }
}

impl Dialler {
    /// Makes one. Nothing runs until the first dial.
    pub fn new() -> Self {
        Self::with_lookup(Arc::new(|host, port| Ok((host, port).to_socket_addrs()?.collect())))
    }

    fn with_lookup(lookup: Arc<Lookup>) -> Self {
        let slots = Arc::new(Slots::default());
        let inner = Inner { context: zmq::Context::new(), slots, lookup };
        Self { inner: Arc::new(inner) }
    }

    /// Asks, and waits for the answer: **blocks** up to the limit, so call it where blocking is allowed.
    ///
    /// The addresses of the host are tried in order. One that refuses costs nearly no time, one that is silent its
    /// share of what is left; an answer that is no good is returned only after the others were
    /// tried.
    pub fn dial(&self, dial: &Dial) -> Result<EngineCard, DialError> {
        let limit = dial.limit.min(LIMIT_MAX);
        let deadline = Instant::now() + limit;
        let plain = endpoint::written(&dial.host, dial.port);
        let query = dial
            .query
            .encode(&dial.fingerprint)
            .map_err(|source| DialError::Query { endpoint: plain.clone(), source })?;

        let addresses = self.resolve(dial, deadline, limit)?;
        let mut contact = Contact::None;
        let mut refusal = None;
        for (i, address) in addresses.iter().enumerate() {
            let left = deadline.saturating_duration_since(Instant::now());
            // Never zero addresses are left here, and never more than a few.
            let share = left / u32::try_from(addresses.len() - i).unwrap_or(1);
            let tried = endpoint::resolved(&dial.host, dial.port, &[*address]);
            let outcome = self.ask(*address, &query, Instant::now() + share).map_err(|(operation, e)| {
                DialError::Socket { endpoint: tried.clone(), operation, source: e.into() }
            })?;
            let answer = match outcome {
                Outcome::Silence(reached) => {
                    contact = contact.max(reached);
                    continue;
                }
                Outcome::Parts(parts) => Err(HandshakeError::Codec(CodecError::Malformed {
                    what: "handshake",
                    reason: format!("an answer is 1 frame, this one has {parts}"),
                })),
                Outcome::Answer(bytes) => {
                    Answer::decode(&bytes, &dial.fingerprint, &dial.query.wanted, dial.wanted_life)
                }
            };
            match answer {
                Ok(card) => return Ok(card),
                Err(source) => {
                    refusal.get_or_insert(DialError::Handshake { endpoint: tried, source });
                }
            }
        }
        Err(refusal.unwrap_or_else(|| DialError::NoAnswer {
            endpoint: endpoint::resolved(&dial.host, dial.port, &addresses),
            limit,
            contact,
        }))
    }

    fn resolve(&self, dial: &Dial, deadline: Instant, limit: Duration) -> Result<Vec<SocketAddr>, DialError> {
        let host = endpoint::unbracket(&dial.host).to_owned();
        let port = dial.port;
        let endpoint = || endpoint::written(&dial.host, port);
        if host.is_empty() || port == 0 {
            return Err(DialError::NotAnAddress { endpoint: endpoint() });
        }
        let mut addresses = match host.parse::<IpAddr>() {
            Ok(ip) => vec![SocketAddr::new(ip, port)],
            Err(_) => self.look_up(&host, port, endpoint, deadline, limit)?,
        };
        let mut seen = std::collections::BTreeSet::new();
        addresses.retain(|address| seen.insert(*address));
        addresses.truncate(ADDRESSES_MAX);
        if addresses.is_empty() {
            let source = io::Error::new(io::ErrorKind::NotFound, "it has no address");
            return Err(DialError::Resolve { endpoint: endpoint(), host, source });
        }
        // The system would connect such a one to this very host: to whoever has that port here.
        addresses.retain(|address| !address.ip().is_unspecified());
        if addresses.is_empty() {
            return Err(DialError::NotAnAddress { endpoint: endpoint() });
        }
        Ok(addresses)
    }

    /// Looks a name up on a thread that is left behind if it takes too long.
    fn look_up(
        &self,
        host: &str,
        port: u16,
        endpoint: impl Fn() -> String,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Vec<SocketAddr>, DialError> {
        let slot = Slots::take(&self.inner.slots, deadline).map_err(|busy| DialError::ResolversBusy {
            endpoint: endpoint(),
            busy,
            limit,
        })?;
        let (tell, told) = mpsc::sync_channel(1);
        let lookup = Arc::clone(&self.inner.lookup);
        let name = host.to_owned();
        std::thread::Builder::new()
            .name("kv-resolve".to_owned())
            .spawn(move || {
                let found = lookup(&name, port);
                drop(slot);
                // Nobody listens any more if the limit has passed.
                let _ = tell.send(found);
            })
            .map_err(|source| DialError::Socket {
                endpoint: endpoint(),
                operation: "starting a look-up",
                source,
            })?;
        let resolve = |source| DialError::Resolve { endpoint: endpoint(), host: host.to_owned(), source };
        match told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(found) => found.map_err(resolve),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(DialError::ResolveTimedOut { endpoint: endpoint(), host: host.to_owned(), limit })
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(resolve(io::Error::other("the look-up panicked")))
            }
        }
    }

    /// Asks at one address until `until`.
    fn ask(
        &self,
        address: SocketAddr,
        query: &[u8],
        until: Instant,
    ) -> Result<Outcome, (&'static str, zmq::Error)> {
        let contact = greet(address, until);
        if contact != Contact::Greeted {
            return Ok(Outcome::Silence(contact));
        }
        let failed = |operation| move |e| (operation, e);
        let dealer = self.inner.context.socket(zmq::DEALER).map_err(failed("making a socket"))?;
        let setup = || {
            dealer.set_linger(0)?;
            dealer.set_ipv6(address.is_ipv6())?;
            dealer.set_maxmsgsize(HANDSHAKE_MAX_BYTES as i64)
        };
        setup().map_err(failed("setting the socket's options"))?;
        dealer.connect(&format!("tcp://{address}")).map_err(failed("connecting"))?;
        dealer.send(query, zmq::DONTWAIT).map_err(failed("sending the query"))?;
        loop {
            if let Some(message) = frames::receive(&dealer, 2).map_err(failed("receiving"))? {
                return Ok(match frames::payload(&message, 0) {
                    Ok(bytes) => Outcome::Answer(bytes.to_vec()),
                    Err(parts) => Outcome::Parts(parts),
                });
            }
            let Some(left) = left(until) else { return Ok(Outcome::Silence(contact)) };
            // Rounded up, or the last part of a millisecond would be spent in a busy loop.
            let wait = i64::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i64::MAX);
            match dealer.poll(zmq::POLLIN, wait) {
                Ok(_) | Err(zmq::Error::EINTR) => {}
                Err(e) => return Err(("waiting", e)),
            }
        }
    }
}

/// The time until then, unless it has passed.
fn left(until: Instant) -> Option<Duration> {
    Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
}

/// Makes a plain connection and looks whether ZeroMQ greets.
///
/// libzmq hides why a connection does not come about; left to itself it would try until the limit where nothing
/// listens. Its monitor sockets would tell, but an event that finds the monitor's reader gone blocks the IO
/// thread that all dials share.
fn greet(address: SocketAddr, until: Instant) -> Contact {
    let Some(time) = left(until) else { return Contact::None };
    let Ok(mut stream) = TcpStream::connect_timeout(&address, time) else { return Contact::None };
    let mut signature = [0; SIGNATURE_BYTES];
    let mut have = 0;
    while have < SIGNATURE_BYTES {
        let Some(time) = left(until) else { return Contact::Connected };
        match stream.set_read_timeout(Some(time)).and_then(|()| stream.read(&mut signature[have..])) {
            Ok(n) if n > 0 => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            _ => return Contact::Connected,
        }
    }
    let greeted = signature[0] == 0xff && signature[SIGNATURE_BYTES - 1] == 0x7f;
    if greeted { Contact::Greeted } else { Contact::Connected }
}

/// What asking at one address brought.
enum Outcome {
    Answer(Vec<u8>),
    /// A message of so many frames.
    Parts(usize),
    Silence(Contact),
}

/// Look-ups in flight.
#[derive(Default)]
struct Slots {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// The right to one look-up.
struct Slot(Arc<Slots>);

impl Slots {
    /// Waits for a free slot until the deadline; then tells how many are taken.
    fn take(slots: &Arc<Self>, deadline: Instant) -> Result<Slot, usize> {
        let taken = slots.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        let (mut taken, _) = slots
            .freed
            .wait_timeout_while(taken, left, |taken| *taken >= RESOLVERS_MAX)
            .unwrap_or_else(PoisonError::into_inner);
        if *taken >= RESOLVERS_MAX {
            return Err(*taken);
        }
        *taken += 1;
        Ok(Slot(Arc::clone(slots)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_proto::{EngineId, Rank, Topology};

    const PLENTY: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(200);

    fn dial(host: &str, limit: Duration) -> Dial {
        let id = |text: &str| EngineId::new(text).unwrap();
        let topology = Topology::of(1);
        let layout = kv_proto::BlockLayout {
            block_tokens: 16,
            blocks: 1,
            kernel_tokens: 0,
            order: kv_proto::BlockOrder::HeadsTokens,
            groups: Vec::new(),
            regions: Vec::new(),
        };
        Dial {
            host: host.to_owned(),
            port: 7,
            query: Query {
                engine: id("d"),
                incarnation: Incarnation::from_random(1),
                rank: Rank(0),
                topology,
                wanted: id("p"),
            },
            fingerprint: Fingerprint::of("m", &layout),
            wanted_life: Incarnation::from_random(2),
            limit,
        }
    }

    /// A resolver that hangs on every name but `quick`, until the sender is dropped.
    fn hanging() -> (mpsc::Sender<()>, Dialler) {
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let dialler = Dialler::with_lookup(Arc::new(move |host, _| {
            if host != "quick" {
                let _ = released.lock().unwrap().recv();
            }
            Ok(Vec::new())
        }));
        (release, dialler)
    }

    #[test]
    fn a_resolver_that_hangs_is_left_behind_at_the_limit() {
        let (_release, dialler) = hanging();
        let start = Instant::now();
        let error = dialler.dial(&dial("slow", SHORT)).unwrap_err();
        assert!(start.elapsed() < PLENTY, "the limit does not cover the look-up");
        assert_eq!(
            error.to_string(),
            "tcp://slow:7 cannot be dialled: host \"slow\" did not resolve within 200ms"
        );
        assert!(matches!(dialler.dial(&dial("quick", PLENTY)), Err(DialError::Resolve { .. })));
    }

    #[test]
    fn look_ups_that_hang_are_bounded_and_free_their_places_when_they_end() {
        let (release, dialler) = hanging();
        for _ in 0..RESOLVERS_MAX {
            let error = dialler.dial(&dial("slow", Duration::from_millis(1))).unwrap_err();
            assert!(matches!(error, DialError::ResolveTimedOut { .. }), "{error:?}");
        }
        let error = dialler.dial(&dial("quick", SHORT)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tcp://quick:7 cannot be dialled: 32 look-ups of other hosts did not end within 200ms"
        );
        // Address literals need no look-up.
        let literal = dialler.dial(&dial("127.0.0.1", SHORT)).unwrap_err();
        assert!(matches!(literal, DialError::NoAnswer { .. }), "{literal:?}");
        drop(release);
        let error = dialler.dial(&dial("quick", PLENTY)).unwrap_err();
        assert!(matches!(error, DialError::Resolve { .. }), "a place was not given back: {error:?}");
    }

    #[test]
    fn every_address_is_tried_and_named() {
        // Port 7 of two loopback addresses, where nothing listens; the second is told twice.
        let addresses: Vec<SocketAddr> = ["127.0.0.2:7", "127.0.0.3:7", "127.0.0.3:7", "0.0.0.0:7"]
            .iter()
            .map(|a| a.parse().unwrap())
            .collect();
        let dialler = Dialler::with_lookup(Arc::new(move |_, _| Ok(addresses.clone())));
        let error = dialler.dial(&dial("p", PLENTY)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no answer from tcp://p:7 (tcp://127.0.0.2:7, tcp://127.0.0.3:7) (limit 30s): no connection could be made"
        );
    }
}
