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
}

enum Backing {
    Allocated(Layout),
    Foreign { _keep: Arc<dyn Any + Send + Sync> },
}

struct Inner {
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
        if let Backing::Allocated(layout) = self.backing {
            // SAFETY: `base` came from `alloc_zeroed` with this very layout, and this is the last owner.
            unsafe { dealloc(self.base, layout) }
        }
    }
}

/// A shared handle to a range of host memory. Clones name the same bytes; the last one frees them.
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

    /// Wraps memory that somebody else allocated, such as an engine's KV cache.
    ///
    /// # Safety
    ///
    /// `base` must be valid for reads and writes of `len` bytes as long as `keep` is alive, and no Rust reference
    /// may exist to those bytes while a transport uses them.
    pub unsafe fn foreign(base: *mut u8, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Arc::new(Inner { base, len, backing: Backing::Foreign { _keep: keep } }))
    }

    /// First byte. What is done with it is the caller's responsibility.
    pub fn base(&self) -> *mut u8 {
        self.0.base
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

    fn at(&self, offset: u64, len: usize) -> Result<*mut u8, MemoryError> {
        if !self.contains(offset, len as u64) {
            return Err(MemoryError::OutOfRange { offset, len: len as u64, size: self.0.len as u64 });
        }
        // SAFETY: the offset was just checked to lie inside the allocation, so it also fits `usize`.
        Ok(unsafe { self.0.base.add(offset as usize) })
    }

    /// Copies bytes out. If somebody writes them at the same time, the copy is of no particular bytes.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.at(offset, into.len())?;
        // SAFETY: `at` checked the bounds, and a slice of the caller's cannot overlap memory that is only
        // reachable through this handle or, if foreign, to which no reference may exist.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes in.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        let into = self.at(offset, from.len())?;
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.0.len)
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
