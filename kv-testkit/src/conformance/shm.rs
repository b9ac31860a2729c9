//! The harnesses of the transports that this host's processes share memory by.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_transport::auto::AutoTransport;
use kv_transport::shm::{ShmConfig, ShmTransport};
use kv_transport::{Address, Memory, Pages, Transport};

use super::tcp::TcpHarness;
use super::{ChildPeer, Harness, HarnessError, Remote, Unavailable};

/// Tries [`ShmTransport`] on one of its lanes.
#[derive(Debug, Clone, Copy)]
pub struct ShmHarness {
    /// Whether memory is shared, and then mapped by readers.
    pub map: bool,
    /// Whether other memory is read out of the process; else the socket carries it.
    pub read_process: bool,
}

impl ShmHarness {
    fn config(self) -> ShmConfig {
        ShmConfig {
            map: self.map,
            read_process: self.read_process,
            keep_alive: Duration::from_millis(500),
            silence_limit: Duration::from_secs(3),
            ..ShmConfig::default()
        }
    }
}

impl Harness for ShmHarness {
    fn name(&self) -> &'static str {
        match (self.map, self.read_process) {
            (true, _) => "shm, mapped",
            (false, true) => "shm, process_vm_readv",
            (false, false) => "shm, socket",
        }
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        Ok(Arc::new(ShmTransport::bind(self.config())?))
    }

    fn memory(&self, bytes: usize) -> Result<Memory, HarnessError> {
        let memory =
            if self.map { Memory::allocate_shared(bytes, Pages::Normal) } else { Memory::allocate(bytes) };
        Ok(memory?)
    }

    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        ChildPeer::start()
    }

    fn silence_limit(&self) -> Option<Duration> {
        Some(self.config().silence_limit)
    }
}

/// Tries [`AutoTransport`] over `shm` and `tcp`.
#[derive(Debug, Clone, Copy)]
pub struct AutoHarness;

impl AutoHarness {
    const SHM: ShmHarness = ShmHarness { map: true, read_process: true };
}

impl Harness for AutoHarness {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        let members = vec![Self::SHM.endpoint()?, TcpHarness::ONE.endpoint()?];
        Ok(Arc::new(AutoTransport::over(members)?))
    }

    fn memory(&self, bytes: usize) -> Result<Memory, HarnessError> {
        Self::SHM.memory(bytes)
    }

    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        ChildPeer::start()
    }

    fn harmless_bytes(&self, address: &Address) -> Range<usize> {
        // The host of the tcp part stands last, behind its length.
        0..address.as_bytes().len() - "127.0.0.1".len() - 1
    }

    fn silence_limit(&self) -> Option<Duration> {
        Self::SHM.silence_limit()
    }
}
