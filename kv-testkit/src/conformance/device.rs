//! Harnesses of transports whose regions lie on a device.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kv_transport::memory::Place;
use kv_transport::{Address, Device, Memory, Transport};

use super::{Harness, HarnessError, Link, Remote, Unavailable};
use crate::device::HostDevice;

/// How long each copy takes there: long enough that one which nobody waits for is seen.
const DELAY: Duration = Duration::from_micros(200);

/// The one device of this process that is made of host memory.
pub fn host_device() -> Result<&'static HostDevice, HarnessError> {
    static DEVICE: OnceLock<Result<HostDevice, String>> = OnceLock::new();
    let made = DEVICE.get_or_init(|| {
        let device = HostDevice::new().map_err(|error| error.to_string())?;
        device.delay(DELAY);
        Ok(device)
    });
    made.as_ref().map_err(|error| error.clone().into())
}

/// Looks at memory on a device past the queue in which a transport's copies are, so that one which is still on its way is seen to
/// be missing. `false` if there is no such way.
pub(super) fn peek(memory: &Memory, into: &mut [u8]) -> bool {
    let Place { device: Some(device), address } = memory.place() else { return false };
    match host_device() {
        Ok(host) if host.id() == device => host.peek(address, into),
        _ => elsewhere(memory).is_some_and(|memory| memory.read(0, into).is_ok()),
    }
}

/// Overwrites memory on a device like that.
pub(super) fn poke(memory: &Memory, from: &[u8]) -> bool {
    let Place { device: Some(device), address } = memory.place() else { return false };
    match host_device() {
        Ok(host) if host.id() == device => host.poke(address, from),
        _ => elsewhere(memory).is_some_and(|memory| memory.write(0, from).is_ok()),
    }
}

#[cfg(target_os = "linux")]
use super::cuda::elsewhere;

#[cfg(not(target_os = "linux"))]
fn elsewhere(_: &Memory) -> Option<Memory> {
    None
}

/// Tries a transport as another harness does, with all memory on a device.
pub struct OnDevice<H> {
    /// Makes everything else.
    pub inner: H,
    /// The name in the report.
    pub name: &'static str,
    /// Makes zeroed memory on a device.
    pub memory: fn(usize) -> Result<Memory, HarnessError>,
    /// Why there is no such device, if there is none.
    pub missing: fn() -> Option<String>,
}

impl<H> OnDevice<H> {
    /// On the device of this process that is made of host memory.
    pub const fn of_host_memory(inner: H, name: &'static str) -> Self {
        Self { inner, name, memory: |bytes| Ok(host_device()?.allocate(bytes)?), missing: || None }
    }
}

impl<H: Harness> Harness for OnDevice<H> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        self.inner.endpoint()
    }

    fn missing(&self) -> Option<String> {
        (self.missing)().or_else(|| self.inner.missing())
    }

    fn memory(&self, bytes: usize) -> Result<Memory, HarnessError> {
        (self.memory)(bytes)
    }

    fn device_memory(&self, bytes: usize) -> Result<Memory, Unavailable> {
        Ok((self.memory)(bytes)?)
    }

    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        self.inner.remote()
    }

    fn link(&self, to: &Address) -> Result<Box<dyn Link>, Unavailable> {
        self.inner.link(to)
    }

    fn black_hole(&self) -> Result<Box<dyn Link>, Unavailable> {
        self.inner.black_hole()
    }

    fn harmless_bytes(&self, address: &Address) -> Range<usize> {
        self.inner.harmless_bytes(address)
    }

    fn silence_limit(&self) -> Option<Duration> {
        self.inner.silence_limit()
    }

    fn patience(&self) -> Duration {
        self.inner.patience()
    }
}
