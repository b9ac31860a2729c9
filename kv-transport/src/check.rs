//! What every transport has to refuse a read for, whatever it moves bytes with.

use crate::contract::{ReadRequest, RegionId};
use crate::error::TransportError;
use crate::memory::{Memory, Place};

impl ReadRequest {
    /// Checks what concerns our own side: limits, regions, local ranges, and that no two of them write the same bytes.
    /// For whoever implements a [`Transport`](crate::Transport), who still has to look at the id, the peer and the keys.
    pub fn check(&self, memory: impl Fn(RegionId) -> Option<Memory>) -> Result<(), TransportError> {
        let op = self.op;
        for (limit, time) in [("total", self.limits.total), ("stall", self.limits.stall)] {
            if time.is_zero() {
                return Err(TransportError::ZeroLimit { op, limit });
            }
        }
        // Places in memory rather than in regions, because two regions may name the same memory.
        let mut places = Vec::with_capacity(self.range_count());
        for part in &self.parts {
            let region = part.region;
            let memory = memory(region).ok_or(TransportError::UnknownRegion { region })?;
            for range in &part.ranges {
                let (index, offset, len) = (places.len(), range.local_offset, range.len);
                if len == 0 || !memory.contains(offset, len) {
                    let region_len = memory.len() as u64;
                    return Err(TransportError::LocalRange { op, index, offset, len, region_len });
                }
                // The range lies inside, so the sums fit.
                let Place { device, address } = memory.place();
                let start = address + offset;
                places.push((device, start, start + len, region, offset));
            }
        }
        if places.is_empty() {
            return Err(TransportError::NoRanges { op });
        }
        places.sort_unstable();
        match places.windows(2).find(|pair| pair[1].0 == pair[0].0 && pair[1].1 < pair[0].2) {
            Some(pair) => Err(TransportError::Overlap { op, region: pair[1].3, offset: pair[1].4 }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::contract::{OpId, PeerId, ReadLimits, ReadPart, ReadRange, RegionKey};

    fn request(parts: &[(u64, &[(u64, u64)])]) -> ReadRequest {
        let key = RegionKey::from_bytes(vec![1]).unwrap();
        let range = |(local_offset, len): &(u64, u64)| ReadRange {
            remote_offset: 0,
            local_offset: *local_offset,
            len: *len,
        };
        let part = |(region, ranges): &(u64, &[(u64, u64)])| ReadPart {
            key: key.clone(),
            region: RegionId(*region),
            ranges: ranges.iter().map(range).collect(),
        };
        let limits = ReadLimits { total: Duration::MAX, stall: Duration::MAX };
        ReadRequest { op: OpId(1), peer: PeerId(1), parts: parts.iter().map(part).collect(), limits }
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        let memory = Memory::allocate(100).unwrap();
        // Regions 1 and 2 are of the same memory.
        let check = |request: &ReadRequest| request.check(|id| (id.0 < 3).then(|| memory.clone()));
        assert_eq!(check(&request(&[(1, &[(0, 50), (50, 50)])])), Ok(()));
        let op = OpId(1);
        assert_eq!(check(&request(&[(1, &[])])), Err(TransportError::NoRanges { op }));
        let region = RegionId(3);
        assert_eq!(check(&request(&[(3, &[(0, 1)])])), Err(TransportError::UnknownRegion { region }));
        for (offset, len) in [(0, 0), (100, 1), (99, 2), (u64::MAX, 2), (1, u64::MAX)] {
            let error = TransportError::LocalRange { op, index: 1, offset, len, region_len: 100 };
            assert_eq!(check(&request(&[(1, &[(0, 1)]), (2, &[(offset, len)])])), Err(error));
        }
        let error = TransportError::Overlap { op, region: RegionId(2), offset: 9 };
        assert_eq!(check(&request(&[(1, &[(0, 10)]), (2, &[(9, 5)])])), Err(error));
        let mut hasty = request(&[(1, &[(0, 1)])]);
        hasty.limits.stall = Duration::ZERO;
        assert_eq!(check(&hasty), Err(TransportError::ZeroLimit { op, limit: "stall" }));
    }
}
