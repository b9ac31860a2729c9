//! A plan applied to the blocks of a load: the ranges that are read.

use kv_proto::{GroupBlocks, GroupKind};
use kv_transport::{ReadPart, ReadRange, RegionId, RegionKey};

use super::alias;
use super::chunks::{Chunk, Spot};
use super::compile::{Grid, SourcePlan};
use super::copies::{Pieces, Place, RegionCopy};
use super::error::BlocksError;

/// Most ranges between two memories in one read: some 100 MiB of them.
const RANGES_MAX: usize = 1 << 22;

/// What the transport calls both sides' memories, by their index.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a> {
    /// Ours.
    pub regions: &'a [RegionId],
    /// Theirs.
    pub keys: &'a [RegionKey],
}

impl SourcePlan {
    /// The reads that bring a load's blocks from this source, with neighbours on both sides merged. Each range of ours is
    /// written once, and all of them are inside blocks that the lists name.
    pub fn read_parts(&self, side: Side<'_>, groups: &[GroupBlocks]) -> Result<Vec<ReadPart>, BlocksError> {
        check_blocks(self, groups)?;
        let mut parts: Vec<(u32, u32, Ranges)> = Vec::new();
        let mut chunks: Vec<(u32, Vec<Chunk>)> = Vec::with_capacity(groups.len());
        for group in groups {
            chunks.push((group.group, self.chunks(group)));
        }
        for copy in &self.copies {
            let (theirs, ours) = (copy.remote.memory, copy.local.memory);
            if parts.last().is_none_or(|(t, o, _)| (*t, *o) != (theirs, ours)) {
                parts.push((theirs, ours, Ranges::default()));
            }
            let Some((.., ranges)) = parts.last_mut() else { continue };
            for (_, chunks) in chunks.iter().filter(|(group, _)| *group == copy.group) {
                ranges.copy(copy, chunks);
            }
            if ranges.is_too_many() {
                return Err(BlocksError::Ranges { limit: RANGES_MAX });
            }
        }
        let mut read = Vec::with_capacity(parts.len());
        for (theirs, ours, ranges) in parts {
            let unknown = |side, memory| BlocksError::UnknownMemory { side, memory };
            let key = side.keys.get(theirs as usize).ok_or(unknown("remote", theirs))?;
            let region = side.regions.get(ours as usize).ok_or(unknown("local", ours))?;
            let ranges = ranges.merged();
            if !ranges.is_empty() {
                read.push(ReadPart { key: key.clone(), region: *region, ranges });
            }
        }
        Ok(read)
    }

    /// The ranges before neighbours are merged, as many as there are pieces: for whoever wants to see what merging saves.
    pub fn piece_count(&self, groups: &[GroupBlocks]) -> Result<u64, BlocksError> {
        check_blocks(self, groups)?;
        let mut count = 0u64;
        for group in groups {
            let chunks = self.chunks(group);
            for copy in self.copies.iter().filter(|copy| copy.group == group.group) {
                for chunk in &chunks {
                    let Pieces { inner, outer, .. } = copy.pieces(chunk.tokens);
                    count = count.saturating_add(inner.count * outer.count);
                }
            }
        }
        Ok(count)
    }
}

/// Ranges in the making; each one is joined to the last where both sides touch.
#[derive(Default)]
struct Ranges {
    ranges: Vec<ReadRange>,
    /// Whether ours ascend, so that nothing else can touch.
    unsorted: bool,
}

impl Ranges {
    fn copy(&mut self, copy: &RegionCopy, chunks: &[Chunk]) {
        let Some(first) = chunks.first() else { return };
        let mut tokens = first.tokens;
        let mut pieces = copy.pieces(tokens);
        self.ranges.reserve(chunks.len());
        for chunk in chunks {
            if chunk.tokens != tokens {
                tokens = chunk.tokens;
                pieces = copy.pieces(tokens);
            }
            let (local, remote) = (offset(&copy.local, chunk.local), offset(&copy.remote, chunk.remote));
            for outer in 0..pieces.outer.count {
                let (local, remote) =
                    (local + outer * pieces.outer.local, remote + outer * pieces.outer.remote);
                for inner in 0..pieces.inner.count {
                    self.push(ReadRange {
                        local_offset: local + inner * pieces.inner.local,
                        remote_offset: remote + inner * pieces.inner.remote,
                        len: pieces.len,
                    });
                }
            }
        }
    }

    fn is_too_many(&self) -> bool {
        self.ranges.len() > RANGES_MAX
    }

    #[inline]
    fn push(&mut self, range: ReadRange) {
        if let Some(last) = self.ranges.last_mut() {
            let touches = last.local_offset + last.len == range.local_offset;
            if touches && last.remote_offset + last.len == range.remote_offset {
                last.len += range.len;
                return;
            }
            self.unsorted |= last.local_offset > range.local_offset;
        }
        self.ranges.push(range);
    }

    fn merged(self) -> Vec<ReadRange> {
        if !self.unsorted {
            return self.ranges;
        }
        let mut ranges = self.ranges;
        ranges.sort_unstable_by_key(|range| range.local_offset);
        let mut merged = Self { ranges: Vec::with_capacity(ranges.len()), unsorted: false };
        ranges.into_iter().for_each(|range| merged.push(range));
        merged.ranges
    }
}

#[inline]
const fn offset(place: &Place, spot: Spot) -> u64 {
    place.at
        + spot.block as u64 * place.block
        + spot.kernel as u64 * place.kernel
        + spot.slot as u64 * place.token
}

/// Whether both pools have these blocks, the lists hold what is handed over, nothing less, nothing more, and no byte of
/// ours would be filled twice.
pub fn check_blocks(plan: &SourcePlan, groups: &[GroupBlocks]) -> Result<(), BlocksError> {
    groups.iter().try_for_each(|group| check_group(plan, group))?;
    alias::check(&plan.overlaps, groups)
}

fn check_group(plan: &SourcePlan, blocks: &GroupBlocks) -> Result<(), BlocksError> {
    let GroupBlocks { group, first, remote_first, tokens, remote, local } = blocks;
    let (group, tokens) = (*group, *tokens);
    let Some(kind) = plan.group_kind(group) else { return Err(BlocksError::UnknownGroup { group }) };
    for (side, list, pool) in [("local", local, plan.local.blocks), ("remote", remote, plan.remote.blocks)] {
        if !list.fits(pool) {
            let highest = list.highest().map_or(u64::MAX, |b| u64::from(b.0));
            return Err(BlocksError::BeyondPool { side, group, highest, blocks: pool });
        }
    }
    if let Some(kv_proto::BlockId(block)) = local.repeated() {
        return Err(BlocksError::Twice { group, block });
    }
    if kind == GroupKind::State {
        return match (local.len(), remote.len()) {
            (1, 1) => Ok(()),
            (1, got) => Err(BlocksError::State { group, side: "remote", tokens, got }),
            (got, _) => Err(BlocksError::State { group, side: "local", tokens, got }),
        };
    }
    for (side, list, first, grid) in
        [("local", local, first, &plan.local), ("remote", remote, remote_first, &plan.remote)]
    {
        let needed = u64::from(tokens).div_ceil(grid.tokens());
        let got = u64::from(*first) + u64::from(list.len());
        if got != needed {
            return Err(BlocksError::Length { group, side, tokens, needed, got });
        }
    }
    let needed = needed_from(kind, *first, tokens, &plan.local);
    let begins = u64::from(*remote_first) * plan.remote.tokens();
    if begins > needed && needed < u64::from(tokens) {
        return Err(BlocksError::Begins { group, begins, needed });
    }
    Ok(())
}

/// The first token that the load must bring.
fn needed_from(kind: GroupKind, first: u32, tokens: u32, local: &Grid) -> u64 {
    (u64::from(first) * local.tokens()).max(u64::from(kind.first_token(tokens)))
}
