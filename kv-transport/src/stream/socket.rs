//! The kinds of byte streams that carry a connection.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream};
#[cfg(target_os = "linux")]
use tokio::net::{UnixListener, UnixStream};

/// A connected socket.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    #[cfg(target_os = "linux")]
    Unix(UnixStream),
}

macro_rules! each {
    ($self:expr, $stream:ident => $do:expr) => {
        match $self {
            Self::Tcp($stream) => $do,
            #[cfg(target_os = "linux")]
            Self::Unix($stream) => $do,
        }
    };
}

impl Socket {
    /// Small frames go out at once.
    pub(crate) fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nodelay(true),
            #[cfg(target_os = "linux")]
            Self::Unix(_) => Ok(()),
        }
    }

    /// The other end, for a socket that has an address.
    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok(),
            #[cfg(target_os = "linux")]
            Self::Unix(_) => None,
        }
    }

    /// The same socket, served by the runtime in which this is called.
    pub(crate) fn moved(self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(TcpStream::from_std(stream.into_std()?)?),
            #[cfg(target_os = "linux")]
            Self::Unix(stream) => Self::Unix(UnixStream::from_std(stream.into_std()?)?),
        })
    }

    pub(crate) async fn ready(&self, interest: Interest) -> io::Result<()> {
        each!(self, stream => stream.ready(interest).await.map(|_| ()))
    }

    /// Whether the one at the other end may be served at all: over Unix sockets, whoever is of this process's user, by the
    /// kernel's word.
    pub(crate) fn check_user(&self) -> io::Result<()> {
        match self {
            Self::Tcp(_) => Ok(()),
            #[cfg(target_os = "linux")]
            Self::Unix(stream) => same_user(stream),
        }
    }

    /// Does a call that may say `WouldBlock`, and then waits for the system's word in [`Socket::ready`].
    pub(crate) fn try_io<R>(
        &self,
        interest: Interest,
        call: impl FnOnce() -> io::Result<R>,
    ) -> io::Result<R> {
        each!(self, stream => stream.try_io(interest, call))
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        each!(self, stream => stream.try_write(bytes))
    }

    pub(crate) async fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        each!(self, stream => stream.read(bytes).await)
    }

    pub(crate) async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        each!(self, stream => stream.write_all(bytes).await)
    }
}

/// Refuses a process of another user.
#[cfg(target_os = "linux")]
pub(crate) fn same_user(stream: &UnixStream) -> io::Result<()> {
    let (theirs, ours) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if theirs == ours {
        return Ok(());
    }
    tracing::debug!(theirs, ours, "a process of another user is refused");
    Err(io::ErrorKind::PermissionDenied.into())
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        each!(self, stream => stream.as_fd())
    }
}

/// A socket that waits for connections.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    #[cfg(target_os = "linux")]
    Unix(UnixListener),
}

impl Listener {
    pub(crate) async fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, _)| Socket::Tcp(stream)),
            #[cfg(target_os = "linux")]
            Self::Unix(listener) => listener.accept().await.map(|(stream, _)| Socket::Unix(stream)),
        }
    }
}
