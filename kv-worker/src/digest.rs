//! Digests of blocks: what both sides compute over their own memory, to be compared.

use std::hash::Hasher;

use kv_proto::BlockLayout;
use kv_proto::message::{BlockDigest, GroupList};
use kv_transport::{Memory, MemoryError};
use twox_hash::XxHash3_64;

/// Bytes copied at once: they are hashed while they are still in the processor's first cache.
const PIECE_BYTES: usize = 16 << 10;
/// The same for memory on a device, where each copy is waited for.
const DEVICE_PIECE_BYTES: usize = 1 << 20;

/// Positions that these lists name together: as many as the longest has.
pub fn positions(groups: &[GroupList]) -> u32 {
    groups.iter().map(|group| group.blocks.len()).max().unwrap_or(0)
}

/// Computes digests over one worker's memories.
///
/// The digest of a position covers, region by region in the layout's order, the bytes of the block that the region's
/// group names for the position. Both sides share that order, so equal bytes give equal digests wherever the blocks
/// lie. XXH3 finds accidents; whoever can choose the bytes can also choose them to have the same digest.
#[derive(Debug)]
pub struct Digester {
    layout: BlockLayout,
    memories: Vec<Memory>,
}

impl Digester {
    /// Over memories that the layout speaks of, by index.
    pub fn new(layout: BlockLayout, memories: Vec<Memory>) -> Self {
        Self { layout, memories }
    }

    /// One digest for each position. Blocks beyond the memories are an error.
    ///
    /// The bytes are copied piece by piece before they are hashed: an engine or a transport may write them at the
    /// same time, when nobody waits for the digests any more, and then a digest is of no particular bytes.
    pub fn digest(&self, groups: &[GroupList]) -> Result<Vec<BlockDigest>, MemoryError> {
        let mut lists: Vec<_> = groups.iter().map(|group| group.blocks.iter()).collect();
        let regions: Vec<_> = self
            .layout
            .regions
            .iter()
            .filter_map(|region| Some((region, groups.iter().position(|g| g.group == region.group)?)))
            .collect();
        let count = positions(groups);
        let mut digests = Vec::with_capacity(count as usize);
        let mut blocks = vec![None; lists.len()];
        let on_device = self.memories.iter().any(|memory| memory.on_device().is_some());
        let mut piece = vec![0; if on_device { DEVICE_PIECE_BYTES } else { PIECE_BYTES }];
        for _ in 0..count {
            for (block, list) in blocks.iter_mut().zip(&mut lists) {
                *block = list.next();
            }
            let mut hasher = XxHash3_64::default();
            for (region, list) in &regions {
                let Some(Some(block)) = blocks.get(*list) else { continue };
                let memory = self.memories.get(region.memory as usize);
                let mut at =
                    region.base.saturating_add(u64::from(block.0).saturating_mul(region.block_stride));
                let mut left = region.block_bytes;
                let nowhere = MemoryError::OutOfRange { offset: at, len: left, size: 0 };
                let memory = memory.ok_or(nowhere)?;
                while left > 0 {
                    let len = left.min(piece.len() as u64);
                    let piece = &mut piece[..len as usize];
                    memory.read(at, piece)?;
                    hasher.write(piece);
                    at += len;
                    left -= len;
                }
            }
            digests.push(BlockDigest(hasher.finish()));
        }
        Ok(digests)
    }
}

#[cfg(test)]
mod tests {
    use kv_proto::{BlockId, BlockOrder, Dtype, RegionKind, RegionLayout};

    use super::*;

    /// Two layers of a group and one of another; blocks of 40 KiB, which are no whole number of pieces.
    fn layout(blocks: u32, gap: u64) -> BlockLayout {
        let bytes = 40 << 10;
        let region = |layer: u32, group: u32| RegionLayout {
            layer: format!("l{layer}"),
            kind: RegionKind::KeyValue,
            group,
            memory: layer % 2,
            base: gap + u64::from(layer) * u64::from(blocks) * (bytes + gap),
            block_stride: bytes + gap,
            block_bytes: bytes,
            dtype: Dtype::U8,
            heads: 10,
            heads_total: 0,
            head_size: 1024,
        };
        let regions = vec![region(0, 0), region(1, 1), region(2, 0)];
        BlockLayout { block_tokens: 4, blocks, kernel_tokens: 0, order: BlockOrder::HeadsTokens, groups: vec![], regions }
    }

    fn group(group: u32, ids: &[u32]) -> GroupList {
        GroupList { group, blocks: ids.iter().copied().map(BlockId).collect() }
    }

    fn side(blocks: u32, gap: u64) -> Digester {
        let layout = layout(blocks, gap);
        let last = &layout.regions[2];
        let bytes = last.base + u64::from(blocks) * last.block_stride;
        let memories = (0..2).map(|_| Memory::allocate(bytes as usize).unwrap()).collect();
        Digester::new(layout, memories)
    }

    /// Writes a block's bytes in one region.
    fn fill(side: &Digester, region: usize, block: u32, seed: u8) {
        let r = &side.layout.regions[region];
        let bytes: Vec<u8> = (0..r.block_bytes).map(|i| (i % 251) as u8 ^ seed).collect();
        side.memories[r.memory as usize].write(r.base + u64::from(block) * r.block_stride, &bytes).unwrap();
    }

    // H-28
    #[test]
    fn equal_bytes_have_equal_digests_wherever_they_lie_and_every_byte_counts() {
        let (p, d) = (side(4, 0), side(6, 64));
        for (region, seed) in [(0, 1), (1, 2), (2, 3)] {
            for (position, (theirs, ours)) in [(3, 5), (0, 1)].into_iter().enumerate() {
                fill(&p, region, theirs, seed + 10 * position as u8);
                fill(&d, region, ours, seed + 10 * position as u8);
            }
        }
        let theirs = p.digest(&[group(0, &[3, 0]), group(1, &[3, 0])]).unwrap();
        let ours = || d.digest(&[group(0, &[5, 1]), group(1, &[5, 1])]).unwrap();
        assert_eq!(theirs, ours());
        assert_ne!(theirs[0], theirs[1]);
        for (region, at) in [(0, 0), (1, 20_000), (2, (40 << 10) - 1)] {
            let r = &d.layout.regions[region];
            let (memory, at) = (&d.memories[r.memory as usize], r.base + r.block_stride + at);
            let mut byte = [0];
            memory.read(at, &mut byte).unwrap();
            memory.write(at, &[byte[0] ^ 1]).unwrap();
            assert_eq!(ours()[0], theirs[0]);
            assert_ne!(ours()[1], theirs[1], "a byte of region {region}");
            memory.write(at, &byte).unwrap();
        }
        assert_eq!(theirs, ours());
    }

    #[test]
    fn a_shorter_group_counts_as_far_as_it_goes() {
        let p = side(4, 0);
        fill(&p, 1, 2, 9);
        let both = p.digest(&[group(0, &[0, 1]), group(1, &[2])]).unwrap();
        let one = p.digest(&[group(0, &[0, 1])]).unwrap();
        assert_eq!((both.len(), one.len()), (2, 2));
        assert_ne!(both[0], one[0]);
        assert_eq!(both[1], one[1]);
        assert_eq!(p.digest(&[]).unwrap(), []);
    }

    #[test]
    fn the_digest_is_xxh3_of_the_bytes() {
        let p = side(1, 0);
        let zeros = vec![0; 80 << 10];
        let expected = BlockDigest(XxHash3_64::oneshot(&zeros));
        assert_eq!(p.digest(&[group(0, &[0])]).unwrap(), [expected]);
    }

    #[test]
    fn a_block_beyond_the_memory_is_an_error() {
        assert!(matches!(side(2, 0).digest(&[group(0, &[7])]), Err(MemoryError::OutOfRange { .. })));
        assert!(side(2, 0).digest(&[group(0, &[u32::MAX])]).is_err());
    }
}
