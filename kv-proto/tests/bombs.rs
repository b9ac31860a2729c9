//! Bytes that claim to be much longer than they are cost no memory. One test alone in its process, since it counts
//! what the process allocates.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(unsafe_code)] // An allocator cannot be written without; it only counts and passes on.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest single request since it was last set to zero.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Serde itself asks for at most 1 MiB on a claim it cannot check.
const ALLOWED: usize = 2 << 20;

// R104
#[test]
fn a_claim_of_four_gigabytes_is_an_error_and_no_allocation() {
    // Byte string, text, list, map, extension: each with the largest length there is.
    let claims: [&[u8]; 6] = [
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
        &[0xdb, 0xff, 0xff, 0xff, 0xff],
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0xc9, 0xff, 0xff, 0xff, 0xff, 0x01],
        &[0xdd, 0x7f, 0xff, 0xff, 0xff],
    ];
    // At every place of every valid encoding, with and without what follows it there, and alone.
    for claim in claims {
        assert_eq!(common::decode_all(claim), 0);
        for bytes in common::encodings() {
            for at in 0..bytes.len() {
                let inserted = [&bytes[..at], claim, &bytes[at..]].concat();
                let replaced =
                    [&bytes[..at], claim, bytes.get(at + claim.len()..).unwrap_or_default()].concat();
                for bomb in [&inserted[..], &inserted[..at + claim.len()], &replaced] {
                    LARGEST.store(0, Ordering::Relaxed);
                    common::decode_all(bomb);
                    let largest = LARGEST.load(Ordering::Relaxed);
                    assert!(largest < ALLOWED, "{largest} bytes asked for because of {claim:02x?} at {at}");
                }
            }
        }
    }
    // The measure works.
    LARGEST.store(0, Ordering::Relaxed);
    drop(Vec::<u8>::with_capacity(ALLOWED));
    assert_eq!(LARGEST.load(Ordering::Relaxed), ALLOWED);
}
