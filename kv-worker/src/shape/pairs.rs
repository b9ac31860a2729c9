//! Which of their regions a region of ours is filled from: keys and values may lie apart on one side and together on the
//! other.

use kv_proto::{BlockLayout, RegionKind, RegionLayout};

use super::error::ShapeError;

/// A part of a region of ours, by elements of each head, and where it is in one of theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) remote_region: usize,
    pub(super) local_element: u32,
    pub(super) remote_element: u32,
    pub(super) elements: u32,
}

fn find<'a>(layout: &'a BlockLayout, layer: &str, kind: RegionKind) -> Option<(usize, &'a RegionLayout)> {
    layout.regions.iter().enumerate().find(|(_, r)| r.layer == layer && r.kind == kind)
}

/// The parts that a region of ours is made of; none if they have nothing of the layer.
pub(super) fn pairs(
    local: &BlockLayout,
    region: &RegionLayout,
    remote: &BlockLayout,
) -> Result<Vec<Pair>, ShapeError> {
    let layer = &region.layer;
    let theirs = |kind| find(remote, layer, kind);
    let size = |ours: u32, theirs: u32| {
        if ours == theirs {
            return Ok(());
        }
        Err(ShapeError::Number { layer: layer.clone(), field: "elements of a head", ours, theirs })
    };
    let whole = |(index, _): (usize, &RegionLayout)| Pair {
        remote_region: index,
        local_element: 0,
        remote_element: 0,
        elements: region.head_size,
    };
    if let Some(same) = theirs(region.kind) {
        size(region.head_size, same.1.head_size)?;
        return Ok(vec![whole(same)]);
    }
    match region.kind {
        RegionKind::KeyValue => {
            let (Some(keys), Some(values)) = (theirs(RegionKind::Key), theirs(RegionKind::Value)) else {
                return Ok(Vec::new());
            };
            let split = keys.1.head_size;
            size(region.head_size, split.saturating_add(values.1.head_size))?;
            let of_values = Pair { local_element: split, elements: values.1.head_size, ..whole(values) };
            Ok(vec![Pair { elements: split, ..whole(keys) }, of_values])
        }
        RegionKind::Key | RegionKind::Value => {
            let other = if region.kind == RegionKind::Key { RegionKind::Value } else { RegionKind::Key };
            let (Some(both), Some((_, other))) = (theirs(RegionKind::KeyValue), find(local, layer, other))
            else {
                return Ok(Vec::new());
            };
            size(region.head_size.saturating_add(other.head_size), both.1.head_size)?;
            let behind = if region.kind == RegionKind::Value { other.head_size } else { 0 };
            Ok(vec![Pair { remote_element: behind, ..whole(both) }])
        }
        _ => Ok(Vec::new()),
    }
}

/// What they have of a layer, in words.
pub(super) fn has(remote: &BlockLayout, layer: &str) -> String {
    let kinds: Vec<String> =
        remote.regions.iter().filter(|r| r.layer == layer).map(|r| r.kind.to_string()).collect();
    if kinds.is_empty() { "nothing".to_owned() } else { kinds.join(" and ") }
}
