//! Memory that transports read from and write to.
//!
//! KV memory is written by an engine's kernels, by transports and by nobody else at the same time: the leases and
//! loads of this workspace decide who may touch which block. The type here only keeps the allocation alive and
//! its bounds checked.
#![allow(unsafe_code)] // Raw KV memory is the subject of this module; each block states its reason.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::device::{Bounce, BounceError, Device, DeviceError, DeviceId};

/// Alignment of allocated memory: a page.
const PAGE_BYTES: usize = 4096;

/// Why memory could not be had, or an access was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// An allocation of no bytes, or of more than the address space.
    #[error("cannot allocate {bytes} bytes of KV memory")]
    BadLength {
        /// The length asked for.
        bytes: usize,
    },
    /// The system has no such memory left.
    #[error("the system refused to allocate {bytes} bytes of KV memory")]
    OutOfMemory {
        /// The length asked for.
        bytes: usize,
    },
    /// The system refused a step on the way to shared memory.
    #[error("the system would not {operation} {bytes} bytes of shared KV memory (os error {code})")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The length asked for.
        bytes: usize,
        /// The system's own number.
        code: i32,
    },
    /// An access beyond the end.
    #[error("bytes {offset}+{len} are beyond the {size} bytes of this memory")]
    OutOfRange {
        /// Where the access starts.
        offset: u64,
        /// Its length.
        len: u64,
        /// Size of the memory.
        size: u64,
    },
    /// The processor cannot touch these bytes: they lie on a device.
    #[error("these bytes lie on device {device}, where the processor cannot touch them")]
    OnDevice {
        /// Which device.
        device: DeviceId,
    },
    /// The device that has the bytes did not copy them.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Where memory lies, to be compared and never to be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The device; `None` for the host.
    pub device: Option<DeviceId>,
    /// First byte.
    pub address: u64,
}

/// Size of the pages behind shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pages {
    /// What the system uses otherwise.
    #[default]
    Normal,
    /// Huge pages, which the operator must have set aside (`vm.nr_hugepages`).
    Huge,
}

enum Backing {
    Allocated(Layout),
    #[cfg(target_os = "linux")]
    Shared {
        file: std::os::fd::OwnedFd,
        mapped: usize,
    },
    Foreign {
        _keep: Arc<dyn Any + Send + Sync>,
    },
    Device {
        device: Arc<dyn Device>,
        address: u64,
        _keep: Arc<dyn Any + Send + Sync>,
    },
}

struct Inner {
    /// Null if the bytes lie on a device.
    base: *mut u8,
    len: usize,
    backing: Backing,
}

// SAFETY: the pointer is to memory that no thread owns; accesses go through copies whose exclusion is the
// business of leases and loads, as the module says.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        match self.backing {
            // SAFETY: `base` came from `alloc_zeroed` with this very layout, and this is the last owner.
            Backing::Allocated(layout) => unsafe { dealloc(self.base, layout) },
            #[cfg(target_os = "linux")]
            Backing::Shared { mapped, .. } => {
                // SAFETY: the mapping was made with this base and length, and this is the last owner.
                if let Err(error) = unsafe { rustix::mm::munmap(self.base.cast(), mapped) } {
                    tracing::error!(%error, mapped, "shared KV memory was not unmapped");
                }
            }
            Backing::Foreign { .. } | Backing::Device { .. } => {}
        }
    }
}

/// A shared handle to a range of memory, the host's or a device's. Clones name the same bytes; the last one frees them.
#[derive(Clone)]
pub struct Memory(Arc<Inner>);

impl Memory {
    /// Allocates zeroed memory, aligned to a page.
    pub fn allocate(bytes: usize) -> Result<Self, MemoryError> {
        let layout =
            Layout::from_size_align(bytes, PAGE_BYTES).map_err(|_| MemoryError::BadLength { bytes })?;
        if bytes == 0 {
            return Err(MemoryError::BadLength { bytes });
        }
        // SAFETY: the layout has a size above zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            return Err(MemoryError::OutOfMemory { bytes });
        }
        Ok(Self(Arc::new(Inner { base, len: bytes, backing: Backing::Allocated(layout) })))
    }

    /// Allocates zeroed memory that processes of this host can map, if a transport hands it to them: the `shm` transport
    /// then copies straight out of it. Needs Linux 5.1.
    ///
    /// Nobody can make it shorter, or write it but through this value: so whoever maps it is safe from a missing page, and the
    /// owner from its readers.
    #[cfg(target_os = "linux")]
    pub fn allocate_shared(bytes: usize, pages: Pages) -> Result<Self, MemoryError> {
        use rustix::fs::{MemfdFlags, SealFlags};
        use rustix::mm::{MapFlags, ProtFlags};

        /// Size of a huge page that is asked for.
        const HUGE_BYTES: usize = 2 << 20;
        let unit = if pages == Pages::Huge { HUGE_BYTES } else { PAGE_BYTES };
        let mapped = bytes.checked_next_multiple_of(unit).filter(|mapped| isize::try_from(*mapped).is_ok());
        let mapped = mapped.filter(|_| bytes > 0).ok_or(MemoryError::BadLength { bytes })?;
        let refused = |operation| {
            move |error: rustix::io::Errno| MemoryError::System {
                operation,
                bytes,
                code: error.raw_os_error(),
            }
        };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if pages == Pages::Huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        // Some systems demand the word that nothing will be executed; older ones do not know it.
        let file = rustix::fs::memfd_create("kv-memory", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| rustix::fs::memfd_create("kv-memory", flags))
            .map_err(refused("make a file for"))?;
        rustix::fs::ftruncate(&file, mapped as u64).map_err(refused("size a file for"))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the system's choice replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                access,
                MapFlags::SHARED | MapFlags::POPULATE,
                &file,
                0,
            )
        };
        let map = match pages {
            Pages::Normal => "map",
            Pages::Huge => "find huge pages (`vm.nr_hugepages` sets them aside) for",
        };
        let base = base.map_err(refused(map))?.cast();
        let inner = Inner { base, len: bytes, backing: Backing::Shared { file, mapped } };
        if let Backing::Shared { file, .. } = &inner.backing {
            // From here on only this mapping writes; whoever gets the file can neither write, nor punch holes, nor cut it.
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(file, seals).map_err(refused("seal"))?;
        }
        Ok(Self(Arc::new(inner)))
    }

    /// The file behind shared memory, whose first byte is this memory's, and its length in whole pages.
    #[cfg(target_os = "linux")]
    pub(crate) fn shared_file(&self) -> Option<(&std::os::fd::OwnedFd, usize)> {
        match &self.0.backing {
            Backing::Shared { file, mapped } => Some((file, *mapped)),
            _ => None,
        }
    }

    /// Wraps memory that somebody else allocated, such as an engine's KV cache.
    ///
    /// # Safety
    ///
    /// `base` must be valid for reads and writes of `len` bytes as long as `keep` is alive, and no Rust reference
    /// may exist to those bytes while a transport uses them.
    pub unsafe fn foreign(base: *mut u8, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Arc::new(Inner { base, len, backing: Backing::Foreign { _keep: keep } }))
    }

    /// Names memory of a device, such as an engine's KV cache on a GPU. Only transports that claim `device_memory` take it.
    ///
    /// # Safety
    ///
    /// `address` must be valid on the device for copies of `len` bytes in both directions as long as `keep` is alive.
    pub unsafe fn device(
        device: Arc<dyn Device>,
        address: u64,
        len: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, MemoryError> {
        if len == 0 || address.checked_add(len as u64).is_none() {
            return Err(MemoryError::BadLength { bytes: len });
        }
        let backing = Backing::Device { device, address, _keep: keep };
        Ok(Self(Arc::new(Inner { base: std::ptr::null_mut(), len, backing })))
    }

    /// First byte, if the processor can touch it. What is done with it is the caller's responsibility.
    pub fn base(&self) -> Result<*mut u8, MemoryError> {
        match self.on_device() {
            None => Ok(self.0.base),
            Some(device) => Err(MemoryError::OnDevice { device: device.id() }),
        }
    }

    /// Where it lies: what tells whether two handles name the same bytes.
    pub fn place(&self) -> Place {
        match &self.0.backing {
            Backing::Device { device, address, .. } => Place { device: Some(device.id()), address: *address },
            _ => Place { device: None, address: self.0.base as u64 },
        }
    }

    /// The device that has the bytes; `None` if the host has them.
    pub fn on_device(&self) -> Option<&Arc<dyn Device>> {
        match &self.0.backing {
            Backing::Device { device, .. } => Some(device),
            _ => None,
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Whether `len` bytes from `offset` lie inside.
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.0.len as u64)
    }

    fn check(&self, offset: u64, len: usize) -> Result<(), MemoryError> {
        if self.contains(offset, len as u64) {
            return Ok(());
        }
        Err(MemoryError::OutOfRange { offset, len: len as u64, size: self.0.len as u64 })
    }

    fn at(&self, offset: u64, len: usize) -> Result<*mut u8, MemoryError> {
        self.check(offset, len)?;
        // SAFETY: the offset was just checked to lie inside the allocation, so it also fits `usize`.
        Ok(unsafe { self.base()?.add(offset as usize) })
    }

    /// Copies bytes out. If somebody writes them at the same time, the copy is of no particular bytes. Bytes on a device are
    /// waited for, some seconds at most.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        if let Backing::Device { device, address, .. } = &self.0.backing {
            self.check(offset, into.len())?;
            return self.bounce(&**device, into.len(), |bounce| bounce.read(address + offset, into));
        }
        let from = self.at(offset, into.len())?;
        // SAFETY: `at` checked the bounds, and a slice of the caller's cannot overlap memory that is only
        // reachable through this handle or, if foreign, to which no reference may exist.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes in; as [`Memory::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        if let Backing::Device { device, address, .. } = &self.0.backing {
            self.check(offset, from.len())?;
            return self.bounce(&**device, from.len(), |bounce| bounce.write(address + offset, from));
        }
        let into = self.at(offset, from.len())?;
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }

    fn bounce(
        &self,
        device: &dyn Device,
        bytes: usize,
        copy: impl FnOnce(Bounce<'_>) -> Result<(), BounceError>,
    ) -> Result<(), MemoryError> {
        match Bounce::new(device, self, bytes).and_then(copy) {
            Ok(()) => Ok(()),
            Err(BounceError::NoMemory) => Err(MemoryError::OutOfMemory { bytes }),
            Err(BounceError::Device(error)) => Err(error.into()),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.on_device() {
            None => write!(f, "Memory({} bytes)", self.0.len),
            Some(device) => write!(f, "Memory({} bytes on {})", self.0.len, device.id()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_bounded() {
        let memory = Memory::allocate(100).unwrap();
        memory.write(98, &[7, 8]).unwrap();
        let mut two = [0; 2];
        memory.read(98, &mut two).unwrap();
        assert_eq!(two, [7, 8]);
        for offset in [99, 100, u64::MAX] {
            let refused = memory.write(offset, &[1, 2]).unwrap_err();
            assert_eq!(refused, MemoryError::OutOfRange { offset, len: 2, size: 100 });
        }
    }

    #[test]
    fn impossible_lengths_are_errors() {
        assert_eq!(Memory::allocate(0).unwrap_err(), MemoryError::BadLength { bytes: 0 });
        assert_eq!(Memory::allocate(usize::MAX).unwrap_err(), MemoryError::BadLength { bytes: usize::MAX });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn shared_memory_is_zeroed_and_cannot_be_cut() {
        let memory = Memory::allocate_shared(10_000, Pages::Normal).unwrap();
        let mut bytes = [1; 3];
        memory.read(9_997, &mut bytes).unwrap();
        assert_eq!((bytes, memory.len()), ([0; 3], 10_000));
        assert!(memory.write(9_999, &[1, 2]).is_err());
        let (file, _) = memory.shared_file().unwrap();
        assert!(rustix::fs::ftruncate(file, 0).is_err(), "somebody could cut it under a reader");
        assert!(rustix::io::write(file, b"x").is_err(), "whoever gets the file could write it");
        memory.write(0, b"x").unwrap();
        for bytes in [0, usize::MAX] {
            let refused = Memory::allocate_shared(bytes, Pages::Normal).unwrap_err();
            assert_eq!(refused, MemoryError::BadLength { bytes });
        }
    }

    #[test]
    fn foreign_memory_is_kept_alive_by_its_keeper() {
        let mut owner = vec![1u8, 2, 3].into_boxed_slice();
        let base = owner.as_mut_ptr();
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(owner);
        // SAFETY: the box lives in `keep`, and nobody holds a reference into it.
        let memory = unsafe { Memory::foreign(base, 3, keep.clone()) };
        drop(keep);
        let mut three = [0; 3];
        memory.read(0, &mut three).unwrap();
        assert_eq!(three, [1, 2, 3]);
    }
}
