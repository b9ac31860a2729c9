//! Memory of other processes: mapped, or read by the system's call for it.
#![allow(unsafe_code)] // Mappings and raw copies are the subject of this module; each block states its reason.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::registry::Probe;
use crate::memory::Memory;
use crate::stream::plan::Cut;

/// Most ranges of one call of `process_vm_readv`, on each side; the system takes 1024.
pub(super) const RANGES_MAX: usize = 512;

/// A peer's shared memory, mapped for reading.
///
/// It is safe to touch whatever the peer does or suffers: the file can neither become shorter nor get holes, which is checked,
/// and its pages are the system's and not the peer's.
#[derive(Debug)]
pub(super) struct Window {
    base: *mut u8,
    len: usize,
    // The mapping needs no open file, so none is kept.
}

// SAFETY: the pointer is to a mapping that this value owns, of memory that no thread of this process writes.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Maps `len` bytes of a file that a peer has sent. Refuses one that the peer could cut while it is read, which would
    /// kill the reader.
    pub(super) fn open(file: OwnedFd, len: usize) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let stat = rustix::fs::fstat(&file)?;
        let whole = u64::try_from(stat.st_size).is_ok_and(|size| size >= len as u64);
        if len == 0 || !whole || !seals.contains(SealFlags::SHRINK | SealFlags::FUTURE_WRITE) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is short, or not sealed"));
        }
        // SAFETY: a new mapping at a place of the system's choice replaces nothing; nothing of Rust's refers to it.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, 0)?
        };
        Ok(Self { base: base.cast(), len })
    }

    pub(super) fn base(&self) -> *const u8 {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Copies bytes from an offset; what lies beyond the end is left as it is.
    pub(super) fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let len = into.len().min(self.len.saturating_sub(offset));
        // SAFETY: the range lies inside the mapping, and a slice of the caller's cannot overlap it. The owner may write it at
        // the same time; whoever copies finds out afterwards whether the copy counts.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset), into.as_mut_ptr(), len) }
    }

    /// Copies the ranges of a cut into its memory. The caller has checked the remote ranges against [`Window::len`].
    pub(super) fn copy(&self, cut: &Cut) -> io::Result<()> {
        let mut local = cut.local.rest();
        let (mut at, mut room) = (0u64, 0u64);
        for (offset, len) in &cut.remote {
            let (mut from, mut left) = (*offset, u64::from(*len));
            while left > 0 {
                if room == 0 {
                    let (next, size) = local.next().ok_or(io::ErrorKind::InvalidInput)?;
                    (at, room) = (next, u64::from(size));
                }
                let here = left.min(room);
                let base = host(&cut.memory)?;
                let inside = from.checked_add(here).is_some_and(|end| end <= self.len as u64);
                if !inside || !cut.memory.contains(at, here) {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                // SAFETY: both ranges were just checked to lie inside their memories, which live through this call. The
                // destination belongs to this transport until the read's completion. It is another range of addresses than
                // the mapping, even where both show the same pages of this very process.
                unsafe {
                    let to = base.add(at as usize);
                    std::ptr::copy_nonoverlapping(self.base.add(from as usize), to, here as usize);
                }
                (from, left, at, room) = (from + here, left - here, at + here, room - here);
            }
        }
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this base and length, and nothing refers to it any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.cast(), self.len) } {
            tracing::error!(%error, bytes = self.len, "a peer's memory was not unmapped");
        }
    }
}

/// Reads bytes of another process into a buffer.
pub(super) fn read_process(pid: i32, at: u64, into: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: at as usize as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: the local vector describes the caller's buffer; the remote one is looked at by the system alone.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    all(read, into.len() as u64)
}

/// Reads the ranges of a cut out of a process whose region begins at `base`. In the same call a probe is read from its place:
/// only a process that still is what it was has it there.
pub(super) fn copy_process(pid: i32, base: u64, cut: &Cut, probe_at: u64, probe: &Probe) -> io::Result<()> {
    let mut found = Probe::default();
    let mut local = Vec::with_capacity(cut.local.pieces() + 1);
    let mut bytes = found.len() as u64;
    for (at, len) in cut.local.rest() {
        local.push(piece(&cut.memory, at, len)?);
        bytes += u64::from(len);
    }
    local.push(libc::iovec { iov_base: found.as_mut_ptr().cast(), iov_len: found.len() });
    let mut remote = Vec::with_capacity(cut.remote.len() + 1);
    for (offset, len) in &cut.remote {
        let at = base.checked_add(*offset).and_then(|at| usize::try_from(at).ok());
        let at = at.ok_or(io::ErrorKind::InvalidInput)?;
        remote.push(libc::iovec { iov_base: at as *mut libc::c_void, iov_len: *len as usize });
    }
    remote.push(libc::iovec { iov_base: probe_at as usize as *mut libc::c_void, iov_len: found.len() });
    // SAFETY: the local vectors lie inside the cut's memory, as `piece` checked, which lives through this call and belongs to
    // this transport until the read's completion, and in `found`; the remote ones are looked at by the system alone.
    let read = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    all(read, bytes)?;
    if found == *probe { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
}

/// Destinations on devices are carried by the connection, so none comes here.
fn host(memory: &Memory) -> io::Result<*mut u8> {
    memory.base().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

fn piece(memory: &Memory, at: u64, len: u32) -> io::Result<libc::iovec> {
    if !memory.contains(at, u64::from(len)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let base = host(memory)?.wrapping_add(at as usize);
    Ok(libc::iovec { iov_base: base.cast(), iov_len: len as usize })
}

/// A short read means that a page in the middle was not there.
fn all(read: isize, wanted: u64) -> io::Result<()> {
    match u64::try_from(read) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(read) if read == wanted => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    #[test]
    fn a_file_that_could_be_cut_under_the_reader_is_refused() {
        let open = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 4096).unwrap();
        assert!(Window::open(open.try_clone().unwrap(), 4096).is_err(), "it is not sealed");
        rustix::fs::fcntl_add_seals(&open, SealFlags::SHRINK).unwrap();
        assert!(Window::open(open.try_clone().unwrap(), 4096).is_err(), "it could get holes");
        rustix::fs::fcntl_add_seals(&open, SealFlags::FUTURE_WRITE).unwrap();
        assert!(Window::open(open.try_clone().unwrap(), 8192).is_err(), "it is shorter");
        assert!(Window::open(open.try_clone().unwrap(), 0).is_err());
        assert!(Window::open(open, 4096).is_ok());
    }

    #[test]
    fn a_process_is_read_as_far_as_its_pages_go() {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let bytes = *b"sixteen KV bytes";
        let mut copy = [0; 16];
        read_process(pid, bytes.as_ptr() as u64, &mut copy).unwrap();
        assert_eq!(copy, bytes);
        assert_eq!(read_process(pid, 8, &mut copy).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }
}
