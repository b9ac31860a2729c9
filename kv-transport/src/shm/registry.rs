//! A page that says which regions are registered. Peers map it, so that a reader can see without asking whether the region
//! that it has just copied from was still registered (rule T-9).
//!
//! ```text
//! probe 16 random bytes | zero 48 | slots: nonce of the region u64, 0 if none
//! ```
#![allow(unsafe_code)] // Words of shared memory are looked at as atomics; each block states its reason.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use super::window::Window;
use crate::memory::{Memory, MemoryError, Pages};

/// Regions that can be listed at a time; others are read over the connection.
const SLOTS: u32 = 4096;
const PROBE_BYTES: usize = 16;
const SLOTS_AT: usize = 64;
/// Bytes of the page.
pub(super) const REGISTRY_BYTES: usize = SLOTS_AT + SLOTS as usize * 8;

/// Bytes by which a reader finds out that it reads the right process.
pub(super) type Probe = [u8; PROBE_BYTES];

/// The owner's side.
#[derive(Debug)]
pub(super) struct Registry {
    memory: Memory,
    /// First byte of the memory.
    page: AtomicPtr<u8>,
    free: Mutex<Vec<u32>>,
}

impl Registry {
    pub(super) fn new(probe: Probe) -> Result<Self, MemoryError> {
        let memory = Memory::allocate_shared(REGISTRY_BYTES, Pages::Normal)?;
        memory.write(0, &probe)?;
        let page = AtomicPtr::new(memory.base()?);
        Ok(Self { memory, page, free: Mutex::new((0..SLOTS).rev().collect()) })
    }

    pub(super) fn file(&self) -> Option<&OwnedFd> {
        self.memory.shared_file().map(|(file, _)| file)
    }

    /// Where the probe lies in this process.
    pub(super) fn probe_at(&self) -> u64 {
        self.memory.place().address
    }

    fn word(&self, slot: u32) -> &AtomicU64 {
        let at = SLOTS_AT + slot.min(SLOTS - 1) as usize * 8;
        // SAFETY: the word lies inside the memory, which lives as long as `self`, is aligned to a page plus a multiple of
        // eight, and is only ever used as an atomic; other processes cannot write it, since its file is sealed.
        unsafe { AtomicU64::from_ptr(self.page.load(Ordering::Relaxed).add(at).cast()) }
    }

    /// Lists a region; `None` if the page is full.
    pub(super) fn list(&self, nonce: u64) -> Option<u32> {
        let slot = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        self.word(slot).store(nonce, Ordering::Release);
        Some(slot)
    }

    /// Takes a region off. Whoever copies from it and looks afterwards sees that; so its memory may go from here on.
    pub(super) fn strike(&self, slot: u32) {
        self.word(slot).store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
    }

    /// Takes all off, at the end.
    pub(super) fn strike_all(&self) {
        for slot in 0..SLOTS {
            self.word(slot).store(0, Ordering::SeqCst);
        }
    }
}

/// A reader's side.
#[derive(Debug)]
pub(super) struct Listing(Window);

impl Listing {
    /// `None` if the window is no registry.
    pub(super) fn new(window: Window) -> Option<Self> {
        (window.len() >= REGISTRY_BYTES).then_some(Self(window))
    }

    pub(super) fn probe(&self) -> Probe {
        let mut probe = [0; PROBE_BYTES];
        self.0.copy_out(0, &mut probe);
        probe
    }

    /// Whether this very region is registered now. Bytes copied before were then those of the region.
    pub(super) fn has(&self, slot: u32, nonce: u64) -> bool {
        if slot >= SLOTS {
            return false;
        }
        // The copy must not be delayed behind the look.
        fence(Ordering::SeqCst);
        // SAFETY: `new` checked that the window has all slots, it is aligned to a page, and it is mapped while `self` lives;
        // a load of a word needs no right to write.
        let word = unsafe { &*self.0.base().add(SLOTS_AT + slot as usize * 8).cast::<AtomicU64>() };
        word.load(Ordering::SeqCst) == nonce
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t9_a_reader_sees_what_is_registered_and_what_no_longer_is() {
        let registry = Registry::new([7; 16]).unwrap();
        let file = registry.file().unwrap().try_clone().unwrap();
        let listing = Listing::new(Window::open(file, REGISTRY_BYTES).unwrap()).unwrap();
        assert_eq!(listing.probe(), [7; 16]);
        let slot = registry.list(99).unwrap();
        assert!(listing.has(slot, 99) && !listing.has(slot, 98) && !listing.has(u32::MAX, 99));
        registry.strike(slot);
        assert!(!listing.has(slot, 99));
        for _ in 0..SLOTS {
            assert!(registry.list(1).is_some());
        }
        assert_eq!(registry.list(1), None);
        registry.strike_all();
        assert!(!(0..SLOTS).any(|slot| listing.has(slot, 1)));
    }
}
