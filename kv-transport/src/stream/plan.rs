//! A read as it was asked for, and how it is cut into requests.
//!
//! All ranges of a read, in order, make up one logical stream of bytes. Neighbours that are contiguous on both sides
//! are merged into runs, and a request covers an interval of the stream; so which of the caller's ranges arrived
//! follows from the intervals that did, however they were merged or cut.

use std::sync::Arc;

use super::key::Key;
use super::spans::Spans;
use crate::contract::{OpId, RangeSet, ReadPart, ReadRange, RegionId};
use crate::device::Device;
use crate::error::TransportError;
use crate::memory::{Memory, Place};

/// A part of a read, with its names resolved.
#[derive(Debug)]
struct Part {
    key: Key,
    memory: Memory,
    ranges: Vec<ReadRange>,
}

/// Bytes contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    part: usize,
    remote: u64,
    local: u64,
    len: u64,
}

/// A validated read.
#[derive(Debug)]
pub(crate) struct Plan {
    parts: Vec<Part>,
    runs: Vec<Run>,
    total: u64,
}

/// How much of a plan has been cut.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Cursor {
    run: usize,
    within: u64,
    stream: u64,
}

impl Cursor {
    /// Bytes that have been cut so far.
    pub(crate) fn taken(&self) -> u64 {
        self.stream
    }
}

/// Parts of the logical stream: where each begins and ends.
pub(crate) type Intervals = Vec<(u64, u64)>;

/// What one request asks for.
#[derive(Debug)]
pub(crate) struct Cut {
    /// The peer's region.
    pub(crate) key: Key,
    /// The local region.
    pub(crate) memory: Memory,
    /// Ranges of the peer's region.
    pub(crate) remote: Vec<(u64, u32)>,
    /// Ranges of the local region, in the same order.
    pub(crate) local: Spans,
    /// The interval of the logical stream.
    pub(crate) interval: (u64, u64),
}

impl Plan {
    /// Resolves and checks a read. `memories` are those of the parts' regions.
    pub(crate) fn new(
        transport: &'static str,
        op: OpId,
        parts: Vec<ReadPart>,
        memories: Vec<Memory>,
    ) -> Result<Self, TransportError> {
        let regions: Vec<RegionId> = parts.iter().map(|part| part.region).collect();
        let mut plan = Self { parts: Vec::with_capacity(parts.len()), runs: vec![], total: 0 };
        let mut index = 0;
        for (part, memory) in parts.into_iter().zip(memories) {
            let key = Key::decode(&part.key, transport)?;
            for range in &part.ranges {
                if range.len == 0 || !memory.contains(range.local_offset, range.len) {
                    return Err(TransportError::LocalRange {
                        op,
                        index,
                        offset: range.local_offset,
                        len: range.len,
                        region_len: memory.len() as u64,
                    });
                }
                plan.push(plan.parts.len(), *range);
                index += 1;
            }
            plan.parts.push(Part { key, memory, ranges: part.ranges });
        }
        if index == 0 {
            return Err(TransportError::NoRanges { op });
        }
        plan.check_overlap(op, &regions)?;
        plan.total = plan.runs.iter().map(|run| run.len).sum();
        Ok(plan)
    }

    fn push(&mut self, part: usize, range: ReadRange) {
        if let Some(last) = self.runs.last_mut()
            && last.part == part
            && last.remote.checked_add(last.len) == Some(range.remote_offset)
            && last.local + last.len == range.local_offset
        {
            last.len += range.len;
            return;
        }
        let ReadRange { remote_offset: remote, local_offset: local, len } = range;
        self.runs.push(Run { part, remote, local, len });
    }

    /// Compares places in memory rather than in regions, because two regions may name the same memory.
    fn check_overlap(&self, op: OpId, regions: &[RegionId]) -> Result<(), TransportError> {
        let bases: Vec<Place> = self.parts.iter().map(|part| part.memory.place()).collect();
        let mut places: Vec<(Place, u64, Run)> = self
            .runs
            .iter()
            .map(|run| {
                let Place { device, address } = bases[run.part];
                let start = address + run.local;
                (Place { device, address: start }, start + run.len, *run)
            })
            .collect();
        if !places.is_sorted_by_key(|place| place.0) {
            places.sort_unstable_by_key(|place| place.0);
        }
        for pair in places.windows(2) {
            let ((before, end, _), (start, _, run)) = (pair[0], pair[1]);
            if before.device == start.device && start.address < end {
                return Err(TransportError::Overlap { op, region: regions[run.part], offset: run.local });
            }
        }
        Ok(())
    }

    /// Number of the caller's ranges.
    pub(crate) fn range_count(&self) -> usize {
        self.parts.iter().map(|part| part.ranges.len()).sum()
    }

    /// The device to which the next bytes to be cut go.
    pub(crate) fn next_device(&self, cursor: &Cursor) -> Option<&Arc<dyn Device>> {
        let run = self.runs.get(cursor.run)?;
        self.parts[run.part].memory.on_device()
    }

    /// Whether bytes of it go to a device.
    pub(crate) fn to_device(&self) -> bool {
        self.parts.iter().any(|part| part.memory.on_device().is_some())
    }

    /// The peer's regions that it names.
    #[cfg(target_os = "linux")]
    pub(crate) fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.parts.iter().map(|part| part.key)
    }

    /// Bytes in all.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Whether everything has been cut.
    pub(crate) fn is_cut(&self, cursor: &Cursor) -> bool {
        cursor.stream == self.total
    }

    /// Cuts the next request, of at most so many bytes and ranges; `None` when everything has been cut.
    pub(crate) fn cut(&self, cursor: &mut Cursor, max_bytes: u32, max_ranges: usize) -> Option<Cut> {
        let part = self.runs.get(cursor.run)?.part;
        let Part { key, memory, .. } = &self.parts[part];
        let (mut remote, mut local) = (vec![], Spans::default());
        let start = cursor.stream;
        let mut room = max_bytes;
        while let Some(run) = self.runs.get(cursor.run)
            && run.part == part
            && room > 0
            && remote.len() < max_ranges
        {
            let left = run.len - cursor.within;
            let len = u32::try_from(left).unwrap_or(u32::MAX).min(room);
            // An offset beyond all numbers is beyond the peer's region too; it will say so.
            remote.push((run.remote.saturating_add(cursor.within), len));
            local.push(run.local + cursor.within, len);
            room -= len;
            cursor.stream += u64::from(len);
            if u64::from(len) == left {
                (cursor.run, cursor.within) = (cursor.run + 1, 0);
            } else {
                cursor.within += u64::from(len);
            }
        }
        let interval = (start, cursor.stream);
        Some(Cut { key: *key, memory: memory.clone(), remote, local, interval })
    }

    /// The caller's ranges of which every byte lies in one of the intervals.
    pub(crate) fn arrived(&self, mut intervals: Intervals) -> RangeSet {
        intervals.sort_unstable();
        let mut set = RangeSet::none(self.range_count());
        let mut solid = intervals.into_iter().fold(Vec::<(u64, u64)>::new(), |mut solid, (from, to)| {
            match solid.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => solid.push((from, to)),
            }
            solid
        });
        solid.reverse();
        let mut at = 0;
        for (index, range) in self.parts.iter().flat_map(|part| &part.ranges).enumerate() {
            let end = at + range.len;
            while solid.last().is_some_and(|(_, to)| *to <= at) {
                solid.pop();
            }
            if solid.last().is_some_and(|(from, to)| *from <= at && end <= *to) {
                set.insert(index);
            }
            at = end;
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::contract::RegionKey;

    fn key(region: u64) -> RegionKey {
        Key { region, nonce: 0 }.encode().unwrap()
    }

    fn range(remote_offset: u64, local_offset: u64, len: u64) -> ReadRange {
        ReadRange { remote_offset, local_offset, len }
    }

    fn plan(ranges: Vec<ReadRange>) -> Result<Plan, TransportError> {
        let part = ReadPart { key: key(1), region: RegionId(7), ranges };
        Plan::new("x", OpId(1), vec![part], vec![Memory::allocate(4096).unwrap()])
    }

    #[test]
    fn neighbours_on_both_sides_are_merged() {
        let plan = plan(vec![range(0, 0, 4), range(4, 4, 4), range(8, 100, 4), range(90, 104, 4)]).unwrap();
        assert_eq!((plan.runs.len(), plan.total()), (3, 16));
        assert_eq!(plan.runs[0], Run { part: 0, remote: 0, local: 0, len: 8 });
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        assert_eq!(plan(vec![]).unwrap_err(), TransportError::NoRanges { op: OpId(1) });
        for bad in [range(0, 0, 0), range(0, 4096, 1), range(0, u64::MAX, 2), range(0, 1, u64::MAX)] {
            let refused = plan(vec![range(0, 0, 1), bad]).unwrap_err();
            assert!(matches!(refused, TransportError::LocalRange { index: 1, .. }), "{refused}");
        }
        let refused = plan(vec![range(0, 100, 50), range(500, 0, 101)]).unwrap_err();
        assert_eq!(refused, TransportError::Overlap { op: OpId(1), region: RegionId(7), offset: 100 });
    }

    #[test]
    fn two_regions_of_the_same_memory_overlap() {
        let memory = Memory::allocate(64).unwrap();
        let part = |region| ReadPart { key: key(1), region, ranges: vec![range(0, 8, 8)] };
        let parts = vec![part(RegionId(1)), part(RegionId(2))];
        let refused = Plan::new("x", OpId(1), parts, vec![memory.clone(), memory]).unwrap_err();
        assert!(matches!(refused, TransportError::Overlap { offset: 8, .. }), "{refused}");
    }

    #[test]
    fn a_remote_range_beyond_all_numbers_stays_beyond() {
        let plan = plan(vec![range(u64::MAX - 1, 0, 9)]).unwrap();
        let mut cursor = Cursor::default();
        let offsets: Vec<_> =
            std::iter::from_fn(|| plan.cut(&mut cursor, 4, 9)).map(|cut| cut.remote[0].0).collect();
        assert_eq!(offsets, [u64::MAX - 1, u64::MAX, u64::MAX]);
    }

    prop_compose! {
        /// Ranges whose local sides do not overlap, some of them neighbours on both sides.
        fn ranges()(steps in proptest::collection::vec((0u64..2, 1u64..40, any::<u16>()), 1..40)) -> Vec<ReadRange> {
            let (mut local, mut remote) = (0, 0);
            steps.into_iter().map(|(gap, len, jump)| {
                local += gap;
                remote = if jump % 3 == 0 { u64::from(jump) } else { remote + gap };
                let range = range(remote, local, len);
                (local, remote) = (local + len, remote + len);
                range
            }).collect()
        }
    }

    proptest! {
        #[test]
        fn cutting_visits_the_bytes_asked_for_in_order(
            first in ranges(), second in ranges(), max_bytes in 1u32..60, max_ranges in 1usize..5,
            lost in any::<u64>(),
        ) {
            let all = [first.clone(), second.clone()];
            let expected: Vec<(usize, u64, u64)> = all.iter().enumerate().flat_map(|(part, ranges)| {
                ranges.iter().flat_map(move |range| {
                    (0..range.len).map(move |i| (part, range.remote_offset + i, range.local_offset + i))
                })
            }).collect();
            let part = |region: u64, ranges| ReadPart { key: key(region), region: RegionId(region), ranges };
            let memory = || Memory::allocate(4096).unwrap();
            let plan =
                Plan::new("x", OpId(1), vec![part(0, first), part(1, second)], vec![memory(), memory()]).unwrap();

            let (mut cursor, mut seen, mut kept) = (Cursor::default(), vec![], vec![]);
            let mut missing = vec![];
            while let Some(cut) = plan.cut(&mut cursor, max_bytes, max_ranges) {
                prop_assert!(cut.remote.len() <= max_ranges);
                let bytes = |list: &[(u64, u32)]| -> Vec<u64> {
                    list.iter().flat_map(|(at, len)| *at..*at + u64::from(*len)).collect()
                };
                let (remote, local) = (bytes(&cut.remote), bytes(&cut.local.rest().collect::<Vec<_>>()));
                prop_assert!(!local.is_empty() && local.len() <= max_bytes as usize);
                prop_assert_eq!(cut.interval, (seen.len() as u64, (seen.len() + local.len()) as u64));
                if lost >> (kept.len() % 64) & 1 == 0 {
                    kept.push(cut.interval);
                } else {
                    missing.extend(cut.interval.0..cut.interval.1);
                    kept.push((0, 0));
                }
                let part = cut.key.region as usize;
                seen.extend(remote.into_iter().zip(local).map(|(remote, local)| (part, remote, local)));
            }
            prop_assert!(plan.is_cut(&cursor));
            prop_assert_eq!(seen, expected);

            kept.retain(|(from, to)| from < to);
            kept.reverse();
            let arrived = plan.arrived(kept);
            let mut at = 0;
            for (index, range) in all.iter().flatten().enumerate() {
                let whole = (at..at + range.len).all(|byte| !missing.contains(&byte));
                prop_assert_eq!(arrived.contains(index), whole);
                at += range.len;
            }
        }
    }
}
