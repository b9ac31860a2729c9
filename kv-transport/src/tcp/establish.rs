//! How a connection comes to be: names, addresses, prefaces. Every step has a limit.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};

use super::address::{Endpoint, Nonce};
use super::frame::{PREFACE_BYTES, Preface, PrefaceError, ServeLimits};
use super::writer::broken;
use crate::error::LossReason;

/// Most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 16;

/// Said of one who does not even begin like us.
pub(super) const NOT_OURS: &str = "it is not a kv-transport of kind tcp";

/// Connects and introduces us. Ends before the deadline, one way or another.
pub(super) async fn connect(
    endpoint: Endpoint,
    own: Preface,
    deadline: Instant,
) -> Result<(TcpStream, ServeLimits), LossReason> {
    let late = |_| LossReason::ConnectTimedOut;
    let addresses = timeout_at(deadline, resolve(&endpoint)).await.map_err(late)??;
    let mut stream = reach(&addresses, deadline).await?;
    let preface = timeout_at(deadline, introduce(&mut stream, &own)).await.map_err(late)??;
    check_nonce(preface.nonce, endpoint.nonce)?;
    Ok((stream, preface.limits))
}

async fn resolve(endpoint: &Endpoint) -> Result<Vec<SocketAddr>, LossReason> {
    if let Ok(ip) = endpoint.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, endpoint.port)]);
    }
    let found =
        lookup_host((endpoint.host.as_str(), endpoint.port)).await.map_err(|error| unreachable(&error))?;
    let addresses: Vec<_> = found.take(ADDRESSES_MAX).collect();
    if addresses.is_empty() {
        return Err(LossReason::Unreachable { kind: io::ErrorKind::NotFound, code: None });
    }
    Ok(addresses)
}

/// Tries one address after another. Each gets its share of the time that is left, so that one that swallows
/// everything does not keep the others from being tried.
async fn reach(addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream, LossReason> {
    let mut reason = LossReason::ConnectTimedOut;
    for (index, address) in addresses.iter().enumerate() {
        let now = Instant::now();
        let share = deadline.saturating_duration_since(now) / (addresses.len() - index) as u32;
        match timeout_at(now + share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true).map_err(|error| broken(&error))?;
                return Ok(stream);
            }
            Ok(Err(error)) => reason = unreachable(&error),
            Err(_) => reason = LossReason::ConnectTimedOut,
        }
    }
    Err(reason)
}

async fn introduce(stream: &mut TcpStream, own: &Preface) -> Result<Preface, LossReason> {
    stream.write_all(&own.encode()).await.map_err(|error| broken(&error))?;
    read_preface(stream).await
}

/// Reads a preface and not a byte more. A stranger is recognised by the first byte that does not fit.
pub(super) async fn read_preface(stream: &mut TcpStream) -> Result<Preface, LossReason> {
    let mut bytes = [0; PREFACE_BYTES];
    let mut filled = 0;
    while filled < PREFACE_BYTES {
        match stream.read(&mut bytes[filled..]).await {
            Ok(0) => return Err(LossReason::ClosedByPeer),
            Ok(more) => filled += more,
            Err(error) => return Err(broken(&error)),
        }
        Preface::check_start(&bytes[..filled]).map_err(stranger)?;
    }
    Preface::decode(&bytes).map_err(stranger)
}

/// Whether the one who answered is the one whose address this is.
pub(super) fn check_nonce(found: Nonce, expected: Nonce) -> Result<(), LossReason> {
    if found == expected {
        Ok(())
    } else {
        Err(LossReason::Stranger("the address is that of another life of this transport"))
    }
}

fn stranger(error: PrefaceError) -> LossReason {
    LossReason::Stranger(match error {
        PrefaceError::Magic => NOT_OURS,
        PrefaceError::Version => "it speaks another version of the protocol",
        PrefaceError::Limits => "it grants no reads at all",
    })
}

fn unreachable(error: &io::Error) -> LossReason {
    LossReason::Unreachable { kind: error.kind(), code: error.raw_os_error() }
}
