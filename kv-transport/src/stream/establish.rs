//! How a connection comes to be: names, addresses, prefaces. Every step has a limit.

use std::io;
use std::net::{IpAddr, SocketAddr};

#[cfg(target_os = "linux")]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};

use super::frame::{PREFACE_BYTES, Preface, PrefaceError};
use super::key::Nonce;
use super::socket::Socket;
use super::target::{Place, Target};
use super::writer::broken;
use crate::error::LossReason;

/// Most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 16;

/// Said of one who does not even begin like us.
pub(crate) const NOT_OURS: &str = "it is not a kv-transport of this kind";

/// Connects and introduces us. Ends before the deadline, one way or another.
pub(crate) async fn connect(
    target: &Target,
    own: Preface,
    deadline: Instant,
) -> Result<(Socket, Preface), LossReason> {
    let late = |_| LossReason::ConnectTimedOut;
    let mut stream = match &target.place {
        Place::Tcp { host, port } => {
            let addresses = timeout_at(deadline, resolve(host, *port)).await.map_err(late)??;
            reach(&addresses, deadline).await?
        }
        Place::At(address) => reach(&[*address], deadline).await?,
        #[cfg(target_os = "linux")]
        Place::Unix { name } => Socket::Unix(unix(name)?),
    };
    let preface = timeout_at(deadline, introduce(&mut stream, &own)).await.map_err(late)??;
    check_nonce(preface.nonce, target.nonce)?;
    Ok((stream, preface))
}

async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, LossReason> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let found = lookup_host((host, port)).await.map_err(|error| unreachable(&error))?;
    let addresses: Vec<_> = found.take(ADDRESSES_MAX).collect();
    if addresses.is_empty() {
        return Err(LossReason::Unreachable { kind: io::ErrorKind::NotFound, code: None });
    }
    Ok(addresses)
}

/// Tries one address after another. Each gets its share of the time that is left, so that one that swallows
/// everything does not keep the others from being tried.
async fn reach(addresses: &[SocketAddr], deadline: Instant) -> Result<Socket, LossReason> {
    let mut reason = LossReason::ConnectTimedOut;
    for (index, address) in addresses.iter().enumerate() {
        let now = Instant::now();
        let share = deadline.saturating_duration_since(now) / (addresses.len() - index) as u32;
        match timeout_at(now + share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true).map_err(|error| broken(&error))?;
                return Ok(Socket::Tcp(stream));
            }
            Ok(Err(error)) => reason = unreachable(&error),
            Err(_) => reason = LossReason::ConnectTimedOut,
        }
    }
    Err(reason)
}

/// Connects to an abstract name. It never waits: a full queue of the peer's is an answer too.
#[cfg(target_os = "linux")]
pub(crate) fn unix(name: &[u8]) -> Result<UnixStream, LossReason> {
    use std::os::unix::ffi::OsStrExt;

    let failed = |error: io::Error| unreachable(&error);
    let name = [&[0], name].concat();
    let address = socket2::SockAddr::unix(std::ffi::OsStr::from_bytes(&name)).map_err(failed)?;
    let kind = socket2::Type::STREAM.nonblocking();
    let socket = socket2::Socket::new(socket2::Domain::UNIX, kind, None).map_err(failed)?;
    socket.connect(&address).map_err(failed)?;
    UnixStream::from_std(socket.into()).map_err(failed)
}

async fn introduce(stream: &mut Socket, own: &Preface) -> Result<Preface, LossReason> {
    stream.write_all(&own.encode()).await.map_err(|error| broken(&error))?;
    read_preface(stream).await
}

/// Reads a preface and not a byte more. A stranger is recognised by the first byte that does not fit.
pub(crate) async fn read_preface(stream: &mut Socket) -> Result<Preface, LossReason> {
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
pub(crate) fn check_nonce(found: Nonce, expected: Nonce) -> Result<(), LossReason> {
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
