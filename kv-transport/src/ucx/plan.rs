//! A read as it was asked for: its names resolved, checked, and neighbours merged.

use std::sync::Arc;

use super::address::{Key, Life};
use super::fabric::Mapped;
use crate::contract::{OpId, ReadPart, ReadRange, RegionId};
use crate::error::{ReadError, TransportError};

/// Bytes contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    part: usize,
    remote: u64,
    local: u64,
    len: u64,
}

/// A part of a read.
#[derive(Debug)]
pub(super) struct Part {
    /// The peer's region.
    pub(super) key: Key,
    /// Where its bytes go.
    pub(super) local: Arc<Mapped>,
}

/// A validated read.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) parts: Vec<Part>,
    runs: Vec<Run>,
    ranges: usize,
}

/// How much of a plan has been cut.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    run: usize,
    within: u64,
}

/// What is asked for at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) part: usize,
    pub(super) remote: u64,
    pub(super) local: u64,
    pub(super) len: u64,
}

impl Plan {
    /// Resolves and checks a read. `locals` are the parts' regions.
    pub(super) fn new(
        op: OpId,
        parts: Vec<ReadPart>,
        locals: Vec<Arc<Mapped>>,
    ) -> Result<Self, TransportError> {
        let regions: Vec<RegionId> = parts.iter().map(|part| part.region).collect();
        let mut plan = Self { parts: Vec::with_capacity(parts.len()), runs: vec![], ranges: 0 };
        for (part, local) in parts.into_iter().zip(locals) {
            let key = Key::decode(&part.key)?;
            for range in &part.ranges {
                if range.len == 0 || !local.memory.contains(range.local_offset, range.len) {
                    return Err(TransportError::LocalRange {
                        op,
                        index: plan.ranges,
                        offset: range.local_offset,
                        len: range.len,
                        region_len: local.memory.len() as u64,
                    });
                }
                merge(&mut plan.runs, plan.parts.len(), *range);
                plan.ranges += 1;
            }
            plan.parts.push(Part { key, local });
        }
        if plan.ranges == 0 {
            return Err(TransportError::NoRanges { op });
        }
        plan.check_overlap(op, &regions)?;
        Ok(plan)
    }

    /// Compares places in memory rather than in regions, because two regions may name the same memory.
    fn check_overlap(&self, op: OpId, regions: &[RegionId]) -> Result<(), TransportError> {
        let start = |run: &Run| self.parts[run.part].local.memory.place().address + run.local;
        let mut places: Vec<(u64, Run)> = self.runs.iter().map(|run| (start(run), *run)).collect();
        if !places.is_sorted_by_key(|place| place.0) {
            places.sort_unstable_by_key(|place| place.0);
        }
        for pair in places.windows(2) {
            let ((first, before), (second, run)) = (pair[0], pair[1]);
            if first + before.len > second {
                return Err(TransportError::Overlap { op, region: regions[run.part], offset: run.local });
            }
        }
        Ok(())
    }

    /// Number of the caller's ranges.
    pub(super) fn range_count(&self) -> usize {
        self.ranges
    }

    /// The peer's regions, each once.
    pub(super) fn remote_regions(&self) -> Vec<(u64, u64)> {
        let mut regions: Vec<_> = self.parts.iter().map(|part| (part.key.region, part.key.nonce)).collect();
        regions.sort_unstable();
        regions.dedup();
        regions
    }

    /// Whether a peer of that life could have what is asked for.
    pub(super) fn check_remote(&self, life: &Life) -> Result<(), ReadError> {
        if self.parts.iter().any(|part| part.key.life != *life) {
            return Err(ReadError::UnknownKey);
        }
        match self.runs.iter().all(|run| self.parts[run.part].key.contains(run.remote, run.len)) {
            true => Ok(()),
            false => Err(ReadError::RemoteRange),
        }
    }

    /// Whether everything has been cut.
    pub(super) fn is_cut(&self, cursor: &Cursor) -> bool {
        cursor.run == self.runs.len()
    }

    /// Cuts the next piece, of at most so many bytes; `None` when everything has been cut.
    pub(super) fn cut(&self, cursor: &mut Cursor, max_bytes: u64) -> Option<Piece> {
        let run = self.runs.get(cursor.run)?;
        let len = (run.len - cursor.within).min(max_bytes);
        // The sums do not overflow: the range was found to lie in the region.
        let piece = Piece {
            part: run.part,
            remote: run.remote.saturating_add(cursor.within),
            local: run.local + cursor.within,
            len,
        };
        cursor.within += len;
        if cursor.within == run.len {
            *cursor = Cursor { run: cursor.run + 1, within: 0 };
        }
        Some(piece)
    }
}

fn merge(runs: &mut Vec<Run>, part: usize, range: ReadRange) {
    if let Some(last) = runs.last_mut()
        && last.part == part
        && last.remote.checked_add(last.len) == Some(range.remote_offset)
        && last.local + last.len == range.local_offset
    {
        last.len += range.len;
        return;
    }
    let ReadRange { remote_offset: remote, local_offset: local, len } = range;
    runs.push(Run { part, remote, local, len });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(remote_offset: u64, local_offset: u64, len: u64) -> ReadRange {
        ReadRange { remote_offset, local_offset, len }
    }

    #[test]
    fn only_neighbours_on_both_sides_of_one_part_are_merged() {
        let mut runs = vec![];
        for next in [range(0, 0, 4), range(4, 4, 4), range(8, 100, 4), range(90, 104, 4)] {
            merge(&mut runs, 0, next);
        }
        merge(&mut runs, 1, range(94, 108, 4));
        assert_eq!(runs.len(), 4);
        assert_eq!(runs[0], Run { part: 0, remote: 0, local: 0, len: 8 });
        merge(&mut runs, 1, range(u64::MAX, 112, 4));
        merge(&mut runs, 1, range(3, 116, 4));
        assert_eq!(runs.len(), 6, "a sum beyond all numbers continues nothing");
    }

    #[test]
    fn cutting_visits_every_byte_once_and_in_order() {
        let mut plan = Plan { parts: vec![], runs: vec![], ranges: 3 };
        for next in [range(10, 0, 5), range(30, 5, 7), range(50, 40, 1)] {
            merge(&mut plan.runs, 0, next);
        }
        let mut cursor = Cursor::default();
        let pieces: Vec<_> = std::iter::from_fn(|| plan.cut(&mut cursor, 4))
            .map(|piece| (piece.remote, piece.local, piece.len))
            .collect();
        assert_eq!(pieces, [(10, 0, 4), (14, 4, 1), (30, 5, 4), (34, 9, 3), (50, 40, 1)]);
        assert!(plan.is_cut(&cursor));
    }
}
