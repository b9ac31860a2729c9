//! Memory of a device, such as a GPU, which the processor cannot touch.
//!
//! A [`Device`] copies between its memory and the host's, asynchronously. [`Memory::device`](crate::Memory::device) names
//! bytes on one; transports that know only sockets serve and fill them through pinned host memory.
#![allow(unsafe_code)] // Copies by raw addresses are the subject of this trait; each block states its reason.

use std::fmt;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::memory::Memory;

/// Which device: its kind, and its number among those of its kind. Two handles to one device have one id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// Its kind, such as `cuda`.
    pub kind: &'static str,
    /// Its number.
    pub number: u64,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.number)
    }
}

/// A device did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A call of the device's driver failed.
    #[error("device {device}: {operation} failed: {meaning} (code {code})")]
    Failed {
        /// Which device.
        device: DeviceId,
        /// What was tried.
        operation: &'static str,
        /// The native code.
        code: i64,
        /// What the driver says that it means.
        meaning: String,
    },
    /// The device can no longer be used.
    #[error("device {device} is lost: {meaning}")]
    Lost {
        /// Which device.
        device: DeviceId,
        /// How that is known.
        meaning: String,
    },
    /// A copy did not end in its time.
    #[error("device {device}: a copy of {bytes} bytes did not end within {limit:?}")]
    TimedOut {
        /// Which device.
        device: DeviceId,
        /// Length of the copy.
        bytes: usize,
        /// Its time.
        limit: Duration,
    },
    /// A place outside of what the device can address, or an impossible length.
    #[error("device {device}: {bytes} bytes at {address:#x} are no memory of it")]
    BadPlace {
        /// Which device.
        device: DeviceId,
        /// First byte.
        address: u64,
        /// Number of bytes.
        bytes: usize,
    },
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Out of the device.
    ToHost,
    /// Into the device.
    ToDevice,
}

/// Bytes of a copy: consecutive on the device and in the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRange {
    /// First byte on the device.
    pub device: u64,
    /// First byte in host memory.
    pub host: *mut u8,
    /// Number of bytes.
    pub len: usize,
}

/// A device with memory of its own.
///
/// It owns nothing that it copies: who submits a copy keeps both sides alive until the copy has ended. Nothing here is called by
/// a thread that moves bytes of sockets, so a call may take as long as the driver needs; but [`Device::copy`] should not wait for
/// the copy itself.
pub trait Device: Send + Sync + fmt::Debug {
    /// Which device it is; the same for every handle to it.
    fn id(&self) -> DeviceId;

    /// What people call it, such as the model.
    fn name(&self) -> String;

    /// Host memory that the device can copy from and to without a stop, zeroed or not.
    fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError>;

    /// Starts to copy all ranges, after the copies that were started before. `Err` means that none of them is under way
    /// and none will be.
    ///
    /// # Safety
    ///
    /// Until the returned copy has ended ([`Copying::poll`] says `true` or an error), all ranges must stay valid on both sides, no
    /// Rust reference may exist to the host's bytes, and ranges that are written must not overlap. The host's side may be
    /// any memory of this process, but only pinned memory is copied without blocking.
    unsafe fn copy(
        &self,
        direction: Direction,
        ranges: &[CopyRange],
    ) -> Result<Box<dyn Copying>, DeviceError>;
}

/// A copy under way. Dropping it does not end it.
pub trait Copying: Send {
    /// Whether it has ended: `true` with all bytes in place; an error if it failed, and then it touches nothing any more
    /// either. Once it has ended, the answer stays the same.
    fn poll(&mut self) -> Result<bool, DeviceError>;

    /// Waits until it has ended, for so long at most; `false` means that it goes on.
    fn wait(&mut self, limit: Duration) -> Result<bool, DeviceError> {
        /// Short copies end while it spins, and long ones are not delayed much.
        const SPINS: u32 = 64;
        const PAUSE: Duration = Duration::from_micros(20);
        let start = Instant::now();
        let mut polls = 0;
        loop {
            if self.poll()? {
                return Ok(true);
            }
            if start.elapsed() >= limit {
                return Ok(false);
            }
            polls += 1;
            if polls < SPINS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Most bytes of a copy that a caller waits for.
const PIECE_BYTES: usize = 1 << 20;
/// How long a caller waits for such a copy. Devices need microseconds, so this one is stuck.
const PIECE_LIMIT: Duration = Duration::from_secs(10);

/// Copies between a buffer and a place on a device, by way of memory that nobody else has, and waits for it.
pub(crate) struct Bounce<'a> {
    device: &'a dyn Device,
    /// Whatever must live while a copy is under way.
    keep: &'a Memory,
    buffer: Memory,
}

impl<'a> Bounce<'a> {
    pub(crate) fn new(device: &'a dyn Device, keep: &'a Memory, bytes: usize) -> Result<Self, BounceError> {
        let buffer = Memory::allocate(bytes.clamp(1, PIECE_BYTES)).map_err(|_| BounceError::NoMemory)?;
        Ok(Self { device, keep, buffer })
    }

    pub(crate) fn read(&self, from: u64, into: &mut [u8]) -> Result<(), BounceError> {
        for (piece, at) in into.chunks_mut(PIECE_BYTES).zip((from..).step_by(PIECE_BYTES)) {
            self.copy(Direction::ToHost, at, piece.len())?;
            self.buffer.read(0, piece).map_err(|_| BounceError::NoMemory)?;
        }
        Ok(())
    }

    pub(crate) fn write(&self, into: u64, from: &[u8]) -> Result<(), BounceError> {
        for (piece, at) in from.chunks(PIECE_BYTES).zip((into..).step_by(PIECE_BYTES)) {
            self.buffer.write(0, piece).map_err(|_| BounceError::NoMemory)?;
            self.copy(Direction::ToDevice, at, piece.len())?;
        }
        Ok(())
    }

    fn copy(&self, direction: Direction, device: u64, len: usize) -> Result<(), BounceError> {
        let host = self.buffer.base().map_err(|_| BounceError::NoMemory)?;
        // If the device's code panics nobody knows whether it still copies.
        let _kept = KeptByPanic(Some((self.keep.clone(), self.buffer.clone())));
        // SAFETY: the caller of `read` and `write` has checked that the place lies in `keep`; the buffer is this value's
        // own and nobody refers to it. Should the copy not end, both are never freed.
        let ended = unsafe { self.device.copy(direction, &[CopyRange { device, host, len }]) }
            .and_then(|mut copying| copying.wait(PIECE_LIMIT));
        match ended {
            Ok(true) => Ok(()),
            Ok(false) => {
                std::mem::forget((self.keep.clone(), self.buffer.clone()));
                let limit = PIECE_LIMIT;
                Err(DeviceError::TimedOut { device: self.device.id(), bytes: len, limit }.into())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Both sides of a copy, which a panic does not free.
struct KeptByPanic(Option<(Memory, Memory)>);

impl Drop for KeptByPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}

/// Why a copy that a caller waited for failed.
#[derive(Debug)]
pub(crate) enum BounceError {
    NoMemory,
    Device(DeviceError),
}

impl From<DeviceError> for BounceError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use super::*;

    /// Starts copies, and panics when asked about them.
    #[derive(Debug)]
    struct Panics;

    impl Device for Panics {
        fn id(&self) -> DeviceId {
            DeviceId { kind: "panics", number: 0 }
        }

        fn name(&self) -> String {
            "panics".into()
        }

        fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError> {
            Ok(Memory::allocate(bytes).unwrap())
        }

        unsafe fn copy(&self, _: Direction, _: &[CopyRange]) -> Result<Box<dyn Copying>, DeviceError> {
            Ok(Box::new(Self))
        }
    }

    impl Copying for Panics {
        fn poll(&mut self) -> Result<bool, DeviceError> {
            panic!("on purpose")
        }
    }

    #[test]
    fn memory_of_a_copy_whose_device_panics_is_never_freed() {
        let life = Arc::new(());
        // SAFETY: this device never copies anything.
        let memory = unsafe { Memory::device(Arc::new(Panics), 1 << 40, 8, Arc::clone(&life) as _) }.unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| memory.read(0, &mut [0; 8]))).is_err());
        drop(memory);
        assert_eq!(Arc::strong_count(&life), 2);
    }
}
