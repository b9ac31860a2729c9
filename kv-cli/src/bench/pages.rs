//! Memory of the bench: anonymous private pages, and the raw accesses that the floors need.
#![allow(unsafe_code)] // Raw KV memory is the subject of this module; each block states its reason.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use kv_connector::transport::Memory;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Most pieces of a vectored call of the plain TCP program.
const PIECES: usize = 64;

/// What was mapped, until the last handle is gone.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages belong to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing is accessed through this type.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly this range was mapped, and whoever held the memory is gone.
        unsafe { munmap(self.base.as_ptr().cast(), self.len) }.ok();
    }
}

/// Maps anonymous private memory of small or huge pages. It is not touched yet.
pub(super) fn map(bytes: usize, huge: bool) -> io::Result<Memory> {
    // SAFETY: a new mapping at a place of the system's choice disturbs nobody.
    let base =
        unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }?;
    let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let mapping = Mapping { base, len: bytes };
    let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
    // SAFETY: the advice changes how the new mapping is backed, not what it holds.
    let advised = unsafe { madvise(base.as_ptr().cast(), bytes, advice) };
    if huge {
        // Without them the figures would be of something else. A system that cannot refuse them has small ones.
        advised?;
    }
    // SAFETY: the mapping lives as long as `mapping`, and no reference to its bytes exists.
    Ok(unsafe { Memory::foreign(base.as_ptr(), bytes, Arc::new(mapping)) })
}

fn place(memory: &Memory, block: u32, block_bytes: usize) -> io::Result<*mut u8> {
    let offset = u64::from(block) * block_bytes as u64;
    if !memory.contains(offset, block_bytes as u64) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let base = memory.base().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    Ok(base.wrapping_add(offset as usize))
}

/// Copies blocks `remote` of `from` to blocks `local` of `into`, one by one: the machine's memcpy.
pub(super) fn copy(
    from: &Memory,
    remote: &[u32],
    into: &Memory,
    local: &[u32],
    block_bytes: usize,
) -> io::Result<()> {
    for (remote, local) in remote.iter().zip(local) {
        let (source, target) = (place(from, *remote, block_bytes)?, place(into, *local, block_bytes)?);
        // SAFETY: `place` found both blocks inside their memories, which are two mappings and so do not overlap;
        // no reference to these bytes exists.
        unsafe { std::ptr::copy_nonoverlapping(source, target, block_bytes) };
    }
    Ok(())
}

/// Moves on in a list of blocks: after `bytes` more, which block and how far into it.
fn step(at: &mut usize, within: &mut usize, bytes: usize, block_bytes: usize) {
    *within += bytes;
    *at += *within / block_bytes;
    *within %= block_bytes;
}

/// Sends blocks with vectored calls.
pub(super) fn send_blocks(
    stream: &mut TcpStream,
    memory: &Memory,
    blocks: &[u32],
    block_bytes: usize,
) -> io::Result<()> {
    let (mut at, mut within) = (0, 0);
    while at < blocks.len() {
        let mut pieces = Vec::with_capacity(PIECES);
        for (index, block) in blocks[at..].iter().take(PIECES).enumerate() {
            let skip = if index == 0 { within } else { 0 };
            let base = place(memory, *block, block_bytes)?.wrapping_add(skip);
            // SAFETY: `place` found the block inside the memory, and `skip` is less than a block. Nobody writes the
            // producer's pool once it is filled. The slice ends with this round.
            pieces.push(IoSlice::new(unsafe { std::slice::from_raw_parts(base, block_bytes - skip) }));
        }
        match stream.write_vectored(&pieces) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => step(&mut at, &mut within, bytes, block_bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives blocks with vectored calls, straight into their places. The blocks differ from each other.
pub(super) fn receive_blocks(
    stream: &mut TcpStream,
    memory: &Memory,
    blocks: &[u32],
    block_bytes: usize,
) -> io::Result<()> {
    let (mut at, mut within) = (0, 0);
    while at < blocks.len() {
        let mut pieces = Vec::with_capacity(PIECES);
        for (index, block) in blocks[at..].iter().take(PIECES).enumerate() {
            let skip = if index == 0 { within } else { 0 };
            let base = place(memory, *block, block_bytes)?.wrapping_add(skip);
            // SAFETY: as in `send_blocks`; the ids were drawn without repetition, so no two slices overlap, and the
            // consumer does one transfer at a time. The slice ends with this round.
            let piece = unsafe { std::slice::from_raw_parts_mut(base, block_bytes - skip) };
            pieces.push(IoSliceMut::new(piece));
        }
        match stream.read_vectored(&mut pieces) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => step(&mut at, &mut within, bytes, block_bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_copied_to_their_places_and_no_further() {
        let (from, into) = (map(64 << 10, false).unwrap(), map(64 << 10, false).unwrap());
        from.write(3 * 4096, &[7; 4096]).unwrap();
        copy(&from, &[3], &into, &[5], 4096).unwrap();
        let mut got = [0; 4098];
        into.read(5 * 4096 - 1, &mut got).unwrap();
        assert_eq!((got[0], got[1], got[4096], got[4097]), (0, 7, 7, 0));
        assert!(copy(&from, &[16], &into, &[0], 4096).is_err());
        assert!(copy(&from, &[0], &into, &[16], 4096).is_err());
    }

    #[test]
    fn progress_in_a_list_of_blocks() {
        let (mut at, mut within) = (0, 0);
        step(&mut at, &mut within, 4095, 4096);
        assert_eq!((at, within), (0, 4095));
        step(&mut at, &mut within, 4098, 4096);
        assert_eq!((at, within), (2, 1));
    }
}
