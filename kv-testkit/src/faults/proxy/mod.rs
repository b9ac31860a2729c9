//! A proxy for streams of bytes over TCP that does to them what a plan says.
//!
//! It knows nothing of what the bytes mean, so it stands before anything that speaks TCP: an engine's HTTP server, or
//! the handshake's port of a producer, whose address the router's parameters carry (`remote_host`, `remote_port`).
//! A worker's own port cannot be led through it like that, because workers tell each other their addresses in the
//! handshake; what a worker tells is set by `transport_advertise_host` of its connector.

mod plan;
mod pump;
mod shared;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};

pub use self::plan::{Direction, Place, ProxyFault, ProxyInjected, ProxyPlan, ProxyReport, ProxyRule};
use self::pump::{Active, Pump, Verdict, swallow};
use self::shared::{Chosen, Shared};
use crate::sim::Dice;

/// How long the upstream may take to accept.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long a cut waits until both sides have read what they were sent, before the connections go.
const LINGER_LIMIT: Duration = Duration::from_millis(500);
/// How long nothing is accepted after the system had no room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// A proxy could not start.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// The address to listen at cannot be had.
    #[error("listen at {address}: {kind} (os error {code:?})")]
    Listen {
        /// The address.
        address: String,
        /// The kind of failure.
        kind: io::ErrorKind,
        /// The system's own number, if it gave one.
        code: Option<i32>,
    },
    /// The upstream's address names nothing.
    #[error("find {address}: {kind} (os error {code:?})")]
    Upstream {
        /// The address.
        address: String,
        /// The kind of failure.
        kind: io::ErrorKind,
        /// The system's own number, if it gave one.
        code: Option<i32>,
    },
}

/// A proxy that runs. Dropped, it stops at once.
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

impl FaultProxy {
    /// Listens at `listen` and forwards to `to`, both `HOST:PORT`. Port 0 lets the system choose. The upstream need
    /// not be there yet. Must be called in a tokio runtime.
    pub async fn start(listen: &str, to: &str, plan: &ProxyPlan) -> Result<Self, ProxyError> {
        let (address, kind_of) = (to.to_owned(), |error: &io::Error| (error.kind(), error.raw_os_error()));
        let found = tokio::net::lookup_host(to).await.map_err(|error| {
            let (kind, code) = kind_of(&error);
            ProxyError::Upstream { address: address.clone(), kind, code }
        })?;
        if found.count() == 0 {
            return Err(ProxyError::Upstream { address, kind: io::ErrorKind::NotFound, code: None });
        }
        let at_listen = |error: io::Error| {
            let (kind, code) = kind_of(&error);
            ProxyError::Listen { address: listen.to_owned(), kind, code }
        };
        let listener = TcpListener::bind(listen).await.map_err(at_listen)?;
        let bound = listener.local_addr().map_err(at_listen)?;
        let shared = Arc::new(Shared::new(plan));
        let accepting = tokio::spawn(accept(listener, to.to_owned(), Arc::clone(&shared)));
        Ok(Self { address: bound, shared, accepting })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What happened so far.
    pub fn report(&self) -> ProxyReport {
        self.shared.report()
    }

    /// Ends all connections and says what happened.
    pub async fn stop(mut self) -> ProxyReport {
        self.accepting.abort();
        // Ended by the abort, which is no failure.
        (&mut self.accepting).await.ok();
        self.shared.report()
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, to: String, shared: Arc<Shared>) {
    // Dropped with this task, and then ends all connections.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    let (number, chosen) = shared.next();
                    connections.spawn(serve(client, to.clone(), Arc::clone(&shared), number, chosen));
                }
                Err(error) => {
                    tracing::warn!("accept: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::warn!("a connection's task failed: {error}");
                }
            }
        }
    }
}

/// Closes a connection so that the other side sees a reset.
fn reset(stream: TcpStream) {
    if let Err(error) = stream.set_zero_linger() {
        tracing::debug!("closed, not reset: {error}");
    }
}

async fn serve(mut client: TcpStream, to: String, shared: Arc<Shared>, number: u64, chosen: Vec<Chosen>) {
    if let [only] = chosen.as_slice()
        && only.fault.is_of_connection()
    {
        shared.struck(number, Direction::Both, 0, only.fault, only.draw);
        match only.fault {
            ProxyFault::Refuse => reset(client),
            ProxyFault::Garbage { bytes } => {
                let mut dice = Dice::new(only.draw);
                let noise: Vec<u8> = (0..bytes).map(|_| dice.number() as u8).collect();
                if client.write_all(&noise).await.is_ok() && client.shutdown().await.is_ok() {
                    swallow(&mut client).await;
                }
            }
            _ => swallow(&mut client).await,
        }
        return;
    }
    let upstream = tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(&to)).await;
    let mut upstream = match upstream {
        Ok(Ok(upstream)) => upstream,
        failed => {
            tracing::warn!("connection {number}: {to} cannot be reached: {failed:?}");
            shared.upstream_failed();
            return reset(client);
        }
    };
    for stream in [&client, &upstream] {
        // Small messages are not to wait for more; where that cannot be had, they do.
        stream.set_nodelay(true).ok();
    }
    match forward(&mut client, &mut upstream, &shared, number, &chosen).await {
        Verdict::Ended => {}
        Verdict::Reset => {
            reset(client);
            reset(upstream);
        }
        Verdict::Cut => {
            let end = async |stream: &mut TcpStream| {
                if stream.shutdown().await.is_ok() {
                    swallow(stream).await;
                }
            };
            // Whoever does not hear the end is left; the close that follows says it more rudely.
            let both = async { tokio::join!(end(&mut client), end(&mut upstream)) };
            tokio::time::timeout(LINGER_LIMIT, both).await.ok();
        }
    }
}

/// Forwards both ways until the connection is to end.
async fn forward(
    client: &mut TcpStream,
    upstream: &mut TcpStream,
    shared: &Shared,
    connection: u64,
    chosen: &[Chosen],
) -> Verdict {
    let active = |direction| {
        let here = chosen.iter().filter(|chosen| chosen.direction.includes(direction));
        here.map(|c| Active::new(c.fault, c.place, c.draw, direction)).collect()
    };
    let (up_stuck, down_stuck) = (Notify::new(), Notify::new());
    let pump = |direction, stuck| Pump { shared, connection, direction, active: active(direction), stuck };
    let (from_client, to_client) = client.split();
    let (from_upstream, to_upstream) = upstream.split();
    let up = pump(Direction::Up, &up_stuck).run(from_client, to_upstream);
    let down = pump(Direction::Down, &down_stuck).run(from_upstream, to_client);
    tokio::pin!(up, down);
    // When one direction has ended, the other goes on, unless a fault holds it for ever: nobody would end it.
    tokio::select! {
        verdict = &mut up => match verdict {
            Verdict::Ended => tokio::select! {
                verdict = &mut down => verdict,
                () = down_stuck.notified() => Verdict::Cut,
            },
            other => other,
        },
        verdict = &mut down => match verdict {
            Verdict::Ended => tokio::select! {
                verdict = &mut up => verdict,
                () = up_stuck.notified() => Verdict::Cut,
            },
            other => other,
        },
    }
}
