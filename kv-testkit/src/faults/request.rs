//! Reads that never reach the transport behind, or not whole: checked here as a transport must, and cut.

use std::collections::{BTreeMap, BTreeSet};

use kv_transport::{
    Memory, MemoryError, OpId, Place, RangeSet, ReadPart, ReadRange, ReadRequest, RegionId, TransportError,
};

use crate::sim::Dice;

/// Where a read writes, range by range.
pub(super) type Places = Vec<(Memory, u64, u64)>;

/// Refuses what every transport refuses, except for keys, which only the transport behind can read.
pub(super) fn check(
    request: &ReadRequest,
    regions: &BTreeMap<RegionId, Memory>,
) -> Result<Places, TransportError> {
    let op = request.op;
    if request.limits.total.is_zero() {
        return Err(TransportError::ZeroLimit { op, limit: "total" });
    }
    if request.limits.stall.is_zero() {
        return Err(TransportError::ZeroLimit { op, limit: "stall" });
    }
    let mut places = Vec::with_capacity(request.range_count());
    // By place in memory, because two regions may name the same memory.
    let mut taken = Vec::with_capacity(request.range_count());
    for part in &request.parts {
        let unknown = TransportError::UnknownRegion { region: part.region };
        let memory = regions.get(&part.region).ok_or(unknown)?;
        for range in &part.ranges {
            if range.len == 0 || !memory.contains(range.local_offset, range.len) {
                return Err(TransportError::LocalRange {
                    op,
                    index: places.len(),
                    offset: range.local_offset,
                    len: range.len,
                    region_len: memory.len() as u64,
                });
            }
            let Place { device, address } = memory.place();
            let start = address + range.local_offset;
            taken.push((device, start, start + range.len, part.region, range.local_offset));
            places.push((memory.clone(), range.local_offset, range.len));
        }
    }
    if places.is_empty() {
        return Err(TransportError::NoRanges { op });
    }
    taken.sort_unstable();
    for pair in taken.windows(2) {
        if let [(before, _, end, ..), (device, start, _, region, offset)] = pair
            && before == device
            && start < end
        {
            return Err(TransportError::Overlap { op, region: *region, offset: *offset });
        }
    }
    Ok(places)
}

/// The regions that a read writes into.
pub(super) fn regions(request: &ReadRequest) -> BTreeSet<RegionId> {
    request.parts.iter().map(|part| part.region).collect()
}

/// The first bytes of a read, `percent` of a hundred and never all: what is left to ask for, if anything, and how
/// many ranges are whole in it.
pub(super) fn cut(request: &ReadRequest, percent: u8) -> (Option<ReadRequest>, usize) {
    let total: u128 = request.parts.iter().flat_map(|p| &p.ranges).map(|r| u128::from(r.len)).sum();
    let mut left = (total * u128::from(percent) / 100).min(total.saturating_sub(1));
    let mut whole = 0;
    let mut parts = Vec::new();
    for part in &request.parts {
        let mut ranges = Vec::new();
        for range in &part.ranges {
            if left == 0 {
                break;
            }
            let len = u64::try_from(left).map_or(range.len, |left| left.min(range.len));
            whole += usize::from(len == range.len);
            left -= u128::from(len);
            ranges.push(ReadRange { len, ..*range });
        }
        if !ranges.is_empty() {
            parts.push(ReadPart { ranges, ..part.clone() });
        }
    }
    ((!parts.is_empty()).then(|| ReadRequest { parts, ..request.clone() }), whole)
}

/// What a read of a cut request says about the whole one.
pub(super) fn widen(arrived: &RangeSet, whole: usize, size: usize) -> RangeSet {
    let mut set = RangeSet::none(size);
    for index in (0..whole).filter(|index| arrived.contains(*index)) {
        set.insert(index);
    }
    set
}

/// Changes some bytes of places, each to another value.
pub(super) fn corrupt(places: &Places, bytes: u32, draw: u64) -> Result<(), MemoryError> {
    let mut dice = Dice::new(draw);
    let total = places.iter().map(|(_, _, len)| len).sum();
    // Distinct places: a byte changed twice could be right again.
    let mut masks = BTreeMap::new();
    for _ in 0..u64::from(bytes).min(total) {
        let mut at = dice.below(total);
        while masks.contains_key(&at) {
            at = (at + 1) % total;
        }
        masks.insert(at, dice.between(1, 255) as u8);
    }
    let mut start = 0;
    for (memory, offset, len) in places {
        for (at, mask) in masks.range(start..start + len) {
            let mut byte = [0];
            memory.read(offset + (at - start), &mut byte)?;
            memory.write(offset + (at - start), &[byte[0] ^ mask])?;
        }
        start += len;
    }
    Ok(())
}

/// Changes some bytes of a message, each to another value.
pub(super) fn corrupt_message(message: &mut [u8], bytes: u32, draw: u64) {
    let mut dice = Dice::new(draw);
    let length = message.len() as u64;
    let mut changed = BTreeSet::new();
    for _ in 0..u64::from(bytes).min(length) {
        let mut at = dice.below(length);
        while !changed.insert(at) {
            at = (at + 1) % length;
        }
        message[at as usize] ^= dice.between(1, 255) as u8;
    }
}

/// Writes noise over places.
pub(super) fn overwrite(places: &Places, draw: u64) -> Result<(), MemoryError> {
    let mut dice = Dice::new(draw);
    for (memory, offset, len) in places {
        let noise: Vec<u8> = (0..*len).map(|_| dice.number() as u8).collect();
        memory.write(*offset, &noise)?;
    }
    Ok(())
}

/// What a read that was accepted here ends with when the transport behind refuses it after all.
pub(super) fn refused_later(error: &TransportError, op: OpId) -> kv_transport::ReadError {
    use kv_transport::{LossReason, ReadError};
    tracing::debug!("{op}: refused by the transport behind: {error}");
    match error {
        TransportError::Closed { .. } => ReadError::Closed,
        TransportError::UnknownPeer { .. } => ReadError::PeerLost(LossReason::Disconnected),
        TransportError::BadKey { .. } => ReadError::UnknownKey,
        _ => ReadError::Fabric { code: -1 },
    }
}
