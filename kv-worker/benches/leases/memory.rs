//! What a live lease weighs, and what renewing it sends.

#![allow(unsafe_code)] // A global allocator that counts; see below.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kv_worker::machine::io::Decision;

use super::{consumer, producer};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; the count beside it touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise that `memory` came from here with this layout is passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn grown<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.load(Relaxed);
    let made = make();
    (made, LIVE.load(Relaxed).saturating_sub(before))
}

/// Prints bytes per live lease on both sides, and what one renewal of all of them sends.
pub(super) fn report() {
    const LEASES: u64 = 100_000;
    let per = |bytes: usize| bytes as f64 / LEASES as f64;
    let (p, bytes) = grown(|| producer(LEASES, 1));
    println!("{LEASES} live leases, wanted by one consumer: {:.0} bytes each at P's worker", per(bytes));
    drop(p);
    let (p, bytes) = grown(|| producer(LEASES, 64));
    println!("{LEASES} live leases, wanted by 64 consumers: {:.0} bytes each at P's worker", per(bytes));
    drop(p);
    let (d, bytes) = grown(|| consumer(LEASES));
    println!("{LEASES} offers of one producer:              {:.0} bytes each at D's worker", per(bytes));
    renewals(d);
}

/// The first renewal names everything, each later one only says that D lives.
fn renewals(mut d: kv_worker::machine::worker::WorkerMachine) {
    super::connect(&mut d, |round, sent: &[Decision]| {
        let bytes: usize = sent
            .iter()
            .map(|decision| match decision {
                Decision::Send { message, .. } => message.encode().unwrap().len(),
                _ => 0,
            })
            .sum();
        println!("renewal {round} of all of them: {} messages, {bytes} bytes", sent.len());
    });
}
