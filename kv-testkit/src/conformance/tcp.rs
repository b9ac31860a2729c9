//! The harness of the tcp transport: links through a forwarder that can be cut, and a port where nobody answers.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{Address, PeerId, Transport};

use super::{ChildPeer, Harness, HarnessError, Link, Remote, Unavailable};

/// Tries [`TcpTransport`].
#[derive(Debug, Clone, Copy)]
pub struct TcpHarness {
    connections_per_peer: u32,
}

/// Where the port stands in an address of the tcp transport; its own tests pin that format.
const PORT: Range<usize> = 3..5;
/// Tag, version, port and nonce; the host comes behind.
const HOSTLESS: Range<usize> = 0..21;

impl TcpHarness {
    /// With one connection to each peer.
    pub const ONE: Self = Self { connections_per_peer: 1 };
    /// With three connections to each peer.
    pub const THREE: Self = Self { connections_per_peer: 3 };

    /// How endpoints are configured: as they come, but quick to notice silence.
    pub fn config(&self) -> TcpConfig {
        TcpConfig {
            connections_per_peer: self.connections_per_peer,
            keep_alive: Duration::from_millis(500),
            silence_limit: Duration::from_secs(3),
            ..TcpConfig::default()
        }
    }
}

impl Harness for TcpHarness {
    fn name(&self) -> &'static str {
        if self.connections_per_peer == 1 { "tcp" } else { "tcp, several connections" }
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        Ok(Arc::new(TcpTransport::bind(self.config())?))
    }

    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        ChildPeer::start()
    }

    fn link(&self, to: &Address) -> Result<Box<dyn Link>, Unavailable> {
        Ok(Box::new(Forwarder::start(to)?))
    }

    fn black_hole(&self) -> Result<Box<dyn Link>, Unavailable> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let template = self.endpoint()?.address();
        let address = at_port(&template, listener.local_addr()?.port())?;
        Ok(Box::new(Deaf { address, _listener: listener }))
    }

    fn harmless_bytes(&self, _address: &Address) -> Range<usize> {
        HOSTLESS
    }

    fn is_settled(&self, transport: &dyn Transport, peer: PeerId) -> bool {
        let several = format!("{} connections", self.connections_per_peer);
        self.connections_per_peer == 1 || transport.lane(peer).is_some_and(|lane| lane == several)
    }

    fn silence_limit(&self) -> Option<Duration> {
        Some(self.config().silence_limit)
    }
}

fn at_port(address: &Address, port: u16) -> Result<Address, HarnessError> {
    let mut bytes = address.as_bytes().to_vec();
    bytes.get_mut(PORT).ok_or("an address without a port")?.copy_from_slice(&port.to_le_bytes());
    Ok(Address::from_bytes(bytes)?)
}

/// The system takes connections here, and nobody ever says a word.
#[derive(Debug)]
struct Deaf {
    address: Address,
    _listener: TcpListener,
}

impl Link for Deaf {
    fn address(&self) -> Address {
        self.address.clone()
    }

    fn cut(&mut self) -> Result<(), Unavailable> {
        Err(Unavailable::Cannot("nothing is connected here"))
    }
}

/// Hands connections on.
#[derive(Debug)]
struct Forwarder {
    address: Address,
    here: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    over: bool,
    streams: Vec<TcpStream>,
}

impl Forwarder {
    fn start(to: &Address) -> Result<Self, HarnessError> {
        let port = to.as_bytes().get(PORT).ok_or("an address without a port")?;
        let target = SocketAddr::from((Ipv4Addr::LOCALHOST, u16::from_le_bytes([port[0], port[1]])));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let here = listener.local_addr()?;
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        // Ends with an error when one of the streams is cut, which is all that it is for.
        std::thread::spawn(move || forward(&listener, target, &shared).ok());
        Ok(Self { address: at_port(to, here.port())?, here, state })
    }

    fn end(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over = true;
        for stream in state.streams.drain(..) {
            // One that is closed already is cut as well.
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Link for Forwarder {
    fn address(&self) -> Address {
        self.address.clone()
    }

    fn cut(&mut self) -> Result<(), Unavailable> {
        self.end();
        Ok(())
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.end();
        // Wakes the thread if it still waits for somebody.
        TcpStream::connect(self.here).ok();
    }
}

fn forward(listener: &TcpListener, target: SocketAddr, state: &Mutex<State>) -> io::Result<()> {
    std::thread::scope(|scope| {
        loop {
            let (near, _) = listener.accept()?;
            let far = TcpStream::connect(target)?;
            near.set_nodelay(true)?;
            far.set_nodelay(true)?;
            {
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                if state.over {
                    return Ok(());
                }
                state.streams.extend([near.try_clone()?, far.try_clone()?]);
            }
            let (near, far) = (Arc::new(near), Arc::new(far));
            let (back, forth) = (Arc::clone(&near), Arc::clone(&far));
            scope.spawn(move || pump(&near, &far));
            scope.spawn(move || pump(&forth, &back));
        }
    })
}

fn pump(mut from: &TcpStream, mut to: &TcpStream) {
    // However it ends, the other side learns of it.
    io::copy(&mut from, &mut to).ok();
    to.shutdown(Shutdown::Write).ok();
}
