//! A pool of blocks whose bytes tell where they came from.

use std::io;

use kv_connector::transport::Memory;
#[cfg(target_os = "linux")]
use kv_connector::transport::Pages;

use super::pages;

/// Bytes that are written or compared at a time.
const STEP: usize = 256 << 10;
/// What a consumer's pool holds before a transfer that is checked.
const POISON: u8 = 0xff;

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    pub(super) memory: Memory,
}

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// Blocks that do not hold the producer's bytes.
    pub(super) bad: u64,
    /// Blocks that were not asked for and changed all the same.
    pub(super) spilled: u64,
}

impl Pool {
    pub(super) fn map(bytes: u64, huge: bool) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory: pages::map(bytes, huge)? })
    }

    /// Memory that other processes can map.
    #[cfg(target_os = "linux")]
    pub(super) fn map_shared(bytes: u64, huge: bool) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let pages = if huge { Pages::Huge } else { Pages::Normal };
        Ok(Self { memory: Memory::allocate_shared(bytes, pages).map_err(io::Error::other)? })
    }

    /// There is no such memory here.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn map_shared(_bytes: u64, _huge: bool) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Writes every byte: each word of eight bytes holds its own number. Memory is touched by that.
    pub(super) fn fill(&self) -> io::Result<()> {
        let mut step = vec![0; STEP];
        self.each(|at, len| {
            words(at, &mut step[..len]);
            self.memory.write(at, &step[..len]).map_err(io::Error::other)
        })
    }

    /// Writes every byte with what no producer holds.
    pub(super) fn poison(&self) -> io::Result<()> {
        let step = vec![POISON; STEP];
        self.each(|at, len| self.memory.write(at, &step[..len]).map_err(io::Error::other))
    }

    fn each(&self, mut act: impl FnMut(u64, usize) -> io::Result<()>) -> io::Result<()> {
        let mut at = 0;
        while at < self.bytes() {
            let len = (self.bytes() - at).min(STEP as u64);
            act(at, len as usize)?;
            at += len;
        }
        Ok(())
    }

    /// Compares every byte of a pool that was poisoned and then read into, once.
    pub(super) fn check(&self, block_bytes: u64, remote: &[u32], local: &[u32]) -> io::Result<Found> {
        let blocks = self.bytes() / block_bytes;
        let mut source = vec![None; blocks as usize];
        for (remote, local) in remote.iter().zip(local) {
            if let Some(place) = source.get_mut(*local as usize) {
                *place = Some(*remote);
            }
        }
        let mut found = Found { bad: 0, spilled: 0 };
        let (mut got, mut wanted) = (vec![0; block_bytes as usize], vec![0; block_bytes as usize]);
        for (block, remote) in source.iter().enumerate() {
            self.memory.read(block as u64 * block_bytes, &mut got).map_err(io::Error::other)?;
            match remote {
                Some(remote) => {
                    words(u64::from(*remote) * block_bytes, &mut wanted);
                    found.bad += u64::from(got != wanted);
                }
                None => found.spilled += u64::from(got.iter().any(|byte| *byte != POISON)),
            }
        }
        let mut tail = vec![0; (self.bytes() % block_bytes) as usize];
        self.memory.read(blocks * block_bytes, &mut tail).map_err(io::Error::other)?;
        found.spilled += u64::from(tail.iter().any(|byte| *byte != POISON));
        Ok(found)
    }
}

/// What a producer holds from byte `at`, a multiple of eight.
fn words(at: u64, into: &mut [u8]) {
    for (index, word) in into.chunks_mut(8).enumerate() {
        let bytes = (at / 8 + index as u64).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_finds_a_wrong_byte_a_swap_and_a_spill() {
        let (from, into) = (Pool::map(1 << 20, false).unwrap(), Pool::map(1 << 20, false).unwrap());
        let from_blocks = [5, 9, 77];
        let into_blocks = [3, 200, 0];
        from.fill().unwrap();
        let fresh = || {
            into.poison().unwrap();
            pages::copy(&from.memory, &from_blocks, &into.memory, &into_blocks, 4096).unwrap();
        };
        let check = || into.check(4096, &from_blocks, &into_blocks).unwrap();
        fresh();
        assert_eq!(check(), Found { bad: 0, spilled: 0 });
        into.memory.write(3 * 4096 + 4095, &[0xee]).unwrap();
        assert_eq!(check(), Found { bad: 1, spilled: 0 });
        fresh();
        into.memory.write(4 * 4096, &[0]).unwrap();
        assert_eq!(check(), Found { bad: 0, spilled: 1 });
        fresh();
        pages::copy(&from.memory, &[9, 5], &into.memory, &[3, 200], 4096).unwrap();
        assert_eq!(check(), Found { bad: 2, spilled: 0 });
        fresh();
        let odd = into.check(3000, &[], &[]).unwrap();
        assert!(odd.spilled >= 3 && odd.bad == 0);
    }

    #[test]
    fn the_rest_behind_the_last_whole_block_is_looked_at_too() {
        let pool = Pool::map(1 << 16, false).unwrap();
        pool.poison().unwrap();
        assert_eq!(pool.check(40_000, &[], &[]).unwrap().spilled, 0);
        pool.memory.write((1 << 16) - 1, &[0]).unwrap();
        assert_eq!(pool.check(40_000, &[], &[]).unwrap().spilled, 1);
    }
}
