//! The check that every plan passes before it is used: each byte that a load must fill is covered once.

use kv_proto::topology::gcd;
use kv_proto::{BlockLayout, Rank, RegionLayout, Topology};

use super::compile::{by_region, is_same_place};
use super::copies::RegionCopy;
use super::error::ShapeError;

/// Checks the copies of one rank, from all its sources. A token's bytes in a region are its heads times the elements of
/// one head; the copies are rectangles in it, which must neither overlap nor leave anything out. Where the producer deals
/// tokens out this must hold for each share of tokens that this rank has something of.
pub(super) fn check(
    local: &BlockLayout,
    (topology, rank): (Topology, Rank),
    remote_topology: Topology,
    sources: &[(Rank, &BlockLayout, Vec<RegionCopy>)],
) -> Result<(), ShapeError> {
    let shares = remote_topology.context.max(1);
    let common = gcd(shares, topology.context.max(1));
    for share in 0..shares {
        if share % common != topology.context_rank(rank) % common {
            continue;
        }
        let holds = |source: Rank| shares == 1 || remote_topology.context_rank(source) == share;
        let copies: Vec<RegionCopy> = sources
            .iter()
            .filter(|(s, ..)| holds(*s))
            .flat_map(|(_, _, copies)| copies.iter().copied())
            .collect();
        let by_region = by_region(&copies);
        for (index, region) in local.regions.iter().enumerate() {
            let is_shared = local.regions[..index].iter().any(|other| is_same_place(other, region));
            if is_shared {
                continue;
            }
            let none = Vec::new();
            check_region(local, region, by_region.get(&(index as u32)).unwrap_or(&none))?;
        }
    }
    Ok(())
}

/// Rectangles in bytes: heads in steps of one head's bytes of one token.
fn check_region(
    local: &BlockLayout,
    region: &RegionLayout,
    copies: &[&RegionCopy],
) -> Result<(), ShapeError> {
    let row = u64::from(region.head_size) * region.dtype.bytes();
    let place = super::copies::Place::of(local, region, 0, 0);
    let token = row * u64::from(region.heads);
    let mut rectangles: Vec<(u64, u64, u64, u64)> = Vec::with_capacity(copies.len());
    for copy in copies {
        let offset = copy.local.at - place.at;
        let (head, element) = (offset / place.head, offset % place.head);
        rectangles.push((head, head + u64::from(copy.heads), element, element + copy.row));
    }
    let covered: u64 = rectangles.iter().map(|(h0, h1, e0, e1)| (h1 - h0) * (e1 - e0)).sum();
    let inside = rectangles.iter().all(|(_, h1, _, e1)| *h1 <= u64::from(region.heads) && *e1 <= row);
    let overlap = rectangles
        .iter()
        .enumerate()
        .any(|(i, a)| rectangles[..i].iter().any(|b| a.0 < b.1 && b.0 < a.1 && a.2 < b.3 && b.2 < a.3));
    if covered != token || !inside || overlap {
        return Err(ShapeError::Cover { layer: region.layer.clone(), covered, bytes: token });
    }
    Ok(())
}
