//! What the suite has to know of a transport in order to try it.

use std::error::Error;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_transport::{Address, Memory, PeerId, RegionKey, Transport};

/// A step that should have worked did not; what it says goes into the report.
pub type HarnessError = Box<dyn Error + Send + Sync>;

/// Why the harness did not give what a case asked for.
#[derive(Debug)]
pub enum Unavailable {
    /// It cannot, ever: the case is skipped, visibly, with this reason.
    Cannot(&'static str),
    /// It can, and it went wrong: the case fails.
    Failed(HarnessError),
}

impl<E: Into<HarnessError>> From<E> for Unavailable {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Bytes of the region that a [`Remote`] offers.
pub const REMOTE_BYTES: usize = 16 << 20;

/// The contents of the region that a [`Remote`] offers.
pub fn remote_contents() -> Vec<u8> {
    super::bench::pattern(REMOTE_BYTES, 0x5eed)
}

/// A peer that can be harmed without harming this process, such as one in a process of its own. It serves one
/// region with [`remote_contents`], and sends every message back to its sender. It ends when it is dropped.
pub trait Remote: Send + Debug {
    /// Where it is.
    fn address(&self) -> Address;

    /// The key of its region.
    fn key(&self) -> RegionKey;

    /// Makes it do nothing at all until [`Remote::resume`], as `SIGSTOP` does.
    fn stop(&mut self) -> Result<(), Unavailable>;

    /// Lets it go on.
    fn resume(&mut self) -> Result<(), Unavailable>;

    /// Ends it with no chance to say farewell, as `SIGKILL` does, and returns when it is gone.
    fn kill(&mut self) -> Result<(), Unavailable>;
}

/// A way to a peer. It ends when it is dropped.
pub trait Link: Send + Debug {
    /// The address that leads over it.
    fn address(&self) -> Address;

    /// Cuts it: from now on both sides are apart.
    fn cut(&mut self) -> Result<(), Unavailable>;
}

/// What the suite needs in order to try a transport. Two methods are required; what the others cannot give, they
/// say, and the cases that need it are skipped with that reason.
pub trait Harness: Send + Sync {
    /// The transport's name, as it stands in the report.
    fn name(&self) -> &'static str;

    /// A new endpoint, alone and ready. All endpoints of a harness can reach each other.
    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError>;

    /// Why the transport cannot be had on this machine at all: a library or a device is missing. All cases are
    /// skipped then, with this reason.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Memory such as the transport wants it, zeroed.
    fn memory(&self, bytes: usize) -> Result<Memory, HarnessError> {
        Ok(Memory::allocate(bytes)?)
    }

    /// Memory on a device such as the transport wants it, zeroed; unless it says otherwise, on one made of host memory.
    fn device_memory(&self, bytes: usize) -> Result<Memory, Unavailable> {
        Ok(super::device::host_device()?.allocate(bytes)?)
    }

    /// A peer that can be stopped and killed; [`ChildPeer::start`](super::ChildPeer::start) is one for transports
    /// that reach other processes.
    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        Err(Unavailable::Cannot("the harness has no peer that can be stopped and killed"))
    }

    /// A way to the endpoint of this address that can be cut.
    fn link(&self, _to: &Address) -> Result<Box<dyn Link>, Unavailable> {
        Err(Unavailable::Cannot("the harness has no link that can be cut"))
    }

    /// A well-formed address at which nobody ever answers or refuses.
    fn black_hole(&self) -> Result<Box<dyn Link>, Unavailable> {
        Err(Unavailable::Cannot("the harness knows no address where nobody answers"))
    }

    /// Bytes of an address that may be damaged without sending anybody to a strange host. All of it, if an address
    /// names none.
    fn harmless_bytes(&self, address: &Address) -> Range<usize> {
        0..address.as_bytes().len()
    }

    /// Whether a connection has become what the harness is about, for one that takes more than `Connected`. Each pair that
    /// cases work with is waited for, and one that never gets there fails its case.
    fn is_settled(&self, _transport: &dyn Transport, _peer: PeerId) -> bool {
        true
    }

    /// After how long a peer that does nothing is given up as lost, if it is.
    fn silence_limit(&self) -> Option<Duration> {
        None
    }

    /// How long any step that ought to work may take on a busy machine.
    fn patience(&self) -> Duration {
        Duration::from_secs(10)
    }
}
