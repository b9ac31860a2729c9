//! What one transfer moves, and which blocks.

use serde::{Deserialize, Serialize};

/// Blocks of one size, moved together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Shape {
    pub(super) block_bytes: u64,
    pub(super) blocks: u64,
}

/// The two small shapes whose latency is measured.
pub(super) const SMALL: [(&str, Shape); 2] = [
    ("1x4k", Shape { block_bytes: 4 << 10, blocks: 1 }),
    ("64x32k", Shape { block_bytes: 32 << 10, blocks: 64 }),
];

/// Blocks are compared in words of eight bytes, and less than this is no block of anybody's.
const BLOCK_MIN: u64 = 64;
const BLOCK_MAX: u64 = 1 << 30;

impl Shape {
    /// Refuses what does not fit into a pool, by name.
    pub(super) fn check(self, pool_bytes: u64) -> Result<Self, String> {
        let Self { block_bytes, blocks } = self;
        if !(BLOCK_MIN..=BLOCK_MAX).contains(&block_bytes) || !block_bytes.is_multiple_of(8) {
            return Err(format!(
                "a block of {block_bytes} bytes: it must be {BLOCK_MIN} to {BLOCK_MAX} bytes and a multiple of 8"
            ));
        }
        if blocks == 0 {
            return Err(format!("no block of {block_bytes} bytes fits into so few bytes"));
        }
        if blocks > pool_bytes / block_bytes {
            return Err(format!(
                "{blocks} blocks of {block_bytes} bytes are more than the pool of {pool_bytes} bytes holds"
            ));
        }
        Ok(self)
    }

    pub(super) fn bytes(self) -> u64 {
        self.block_bytes * self.blocks
    }
}

/// A number of bytes as people write it: `65536`, `64k`, `1m`, `1g`; powers of two.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let lower = lower.strip_suffix("ib").or(lower.strip_suffix('b')).unwrap_or(&lower);
    let (digits, shift) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 10),
        Some(b'm') => (&lower[..lower.len() - 1], 20),
        Some(b'g') => (&lower[..lower.len() - 1], 30),
        _ => (lower, 0),
    };
    let number: u64 =
        digits.trim().parse().map_err(|_| format!("{text:?} is not a number of bytes, such as 64k"))?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err("zero bytes".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err(format!("{text:?} is too large")),
    }
}

/// A number of bytes as people read it.
pub(super) fn show_bytes(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 && b.is_multiple_of(1 << 30) => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// Draws block ids. Not for secrets: the same seed draws the same ids.
#[derive(Debug)]
pub(super) struct Draws {
    state: u64,
    scratch: Vec<u32>,
}

impl Draws {
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1), scratch: vec![] }
    }

    /// A step of splitmix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// So many different ids below `total`, in random order; all of them if there are no more.
    pub(super) fn ids(&mut self, count: u64, total: u64) -> Vec<u32> {
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let count = u32::try_from(count).unwrap_or(u32::MAX).min(total);
        if self.scratch.len() != total as usize {
            self.scratch = (0..total).collect();
        }
        for index in 0..count {
            let other = index + (self.next() % u64::from(total - index)) as u32;
            self.scratch.swap(index as usize, other as usize);
        }
        self.scratch[..count as usize].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_as_people_write_them() {
        for (text, bytes) in
            [("4096", 4096), ("64k", 65536), ("64KiB", 65536), ("1M", 1 << 20), ("2gb", 2 << 30)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "0", "k", "-1", "1.5k", "64x", "99999999999g", "ib"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert_eq!([show_bytes(65536), show_bytes(1 << 30), show_bytes(100)], ["64 KiB", "1 GiB", "100 B"]);
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        let shape = |block_bytes, blocks| Shape { block_bytes, blocks }.check(1 << 20);
        assert!(shape(4096, 256).is_ok());
        for (block_bytes, blocks) in
            [(4096, 257), (4096, 0), (0, 1), (4097, 1), (8, 1), (u64::MAX, 1), (4096, u64::MAX)]
        {
            assert!(shape(block_bytes, blocks).is_err(), "{block_bytes} x {blocks}");
        }
    }

    #[test]
    fn ids_do_not_repeat_and_differ_from_draw_to_draw() {
        let mut draws = Draws::new(1);
        let (first, second) = (draws.ids(500, 1000), draws.ids(500, 1000));
        for ids in [&first, &second] {
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), 500);
            assert!(sorted.iter().all(|id| *id < 1000));
            assert!(!ids.is_sorted());
        }
        assert_ne!(first, second);
        assert_eq!(first, Draws::new(1).ids(500, 1000));
        assert_ne!(first, Draws::new(2).ids(500, 1000));
        assert_eq!(Draws::new(1).ids(9, 4).len(), 4);
    }
}
