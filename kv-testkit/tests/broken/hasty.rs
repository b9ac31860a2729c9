//! A device that says of each copy into it that it has ended, at once. A transport over it does what one does that does not wait
//! for its copies: it tells of completions before the bytes are there.
#![allow(unsafe_code)] // It copies by raw addresses, as devices do; each block states its reason.

use std::sync::{Arc, Mutex, PoisonError};

use kv_testkit::conformance::HarnessError;
use kv_testkit::conformance::device::host_device;
use kv_testkit::device::HostDevice;
use kv_transport::device::{CopyRange, Copying, Direction};
use kv_transport::{Device, DeviceError, DeviceId, Memory};

/// See the module.
#[derive(Debug)]
struct Hasty {
    inner: &'static HostDevice,
    under_way: Mutex<Vec<UnderWay>>,
}

/// A copy out of bytes that nobody else has.
struct UnderWay {
    copying: Box<dyn Copying>,
    _bytes: Memory,
}

impl std::fmt::Debug for UnderWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UnderWay").finish_non_exhaustive()
    }
}

struct Ended;

impl Copying for Ended {
    fn poll(&mut self) -> Result<bool, DeviceError> {
        Ok(true)
    }
}

/// Zeroed memory on it.
pub(crate) fn memory(bytes: usize) -> Result<Memory, HarnessError> {
    let inner = host_device()?;
    let keep = inner.allocate(bytes)?;
    let device = Arc::new(Hasty { inner, under_way: Mutex::default() });
    let address = keep.place().address;
    // SAFETY: `keep` has the bytes.
    Ok(unsafe { Memory::device(device, address, bytes, Arc::new(keep)) }?)
}

impl Device for Hasty {
    fn id(&self) -> DeviceId {
        self.inner.id()
    }

    fn name(&self) -> String {
        "a hasty device".into()
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError> {
        self.inner.allocate_pinned(bytes)
    }

    unsafe fn copy(
        &self,
        direction: Direction,
        ranges: &[CopyRange],
    ) -> Result<Box<dyn Copying>, DeviceError> {
        if direction == Direction::ToHost {
            // SAFETY: what the caller promises.
            return unsafe { self.inner.copy(direction, ranges) };
        }
        let bad = DeviceError::BadPlace { device: self.id(), address: 0, bytes: 0 };
        let all = Memory::allocate(ranges.iter().map(|range| range.len).sum()).map_err(|_| bad.clone())?;
        let mut at = all.base().map_err(|_| bad)?;
        let mut own = vec![];
        for range in ranges {
            // SAFETY: the caller keeps the source valid until this returns; there is room for all ranges.
            unsafe { std::ptr::copy_nonoverlapping(range.host, at, range.len) };
            own.push(CopyRange { host: at, ..*range });
            // SAFETY: as above.
            at = unsafe { at.add(range.len) };
        }
        // SAFETY: the bytes are kept until the copy has ended; the device checks the destination itself.
        let copying = unsafe { self.inner.copy(direction, &own) }?;
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.push(UnderWay { copying, _bytes: all });
        Ok(Box::new(Ended))
    }
}

impl Drop for Hasty {
    fn drop(&mut self) {
        // One that goes on keeps its bytes.
        let under_way = self.under_way.get_mut().unwrap_or_else(PoisonError::into_inner);
        under_way.drain(..).for_each(|mut copy| {
            if copy.copying.poll() == Ok(false) {
                std::mem::forget(copy);
            }
        });
    }
}
