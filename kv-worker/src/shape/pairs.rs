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

/// A layout's regions by their layers: looked up once for each region of ours and each rank of theirs.
pub(super) struct Index<'a> {
    pub(super) layout: &'a BlockLayout,
    sorted: Vec<(&'a str, RegionKind, usize)>,
}

impl<'a> Index<'a> {
    pub(super) fn of(layout: &'a BlockLayout) -> Self {
        let regions = layout.regions.iter().enumerate();
        let mut sorted: Vec<_> = regions.map(|(index, r)| (r.layer.as_str(), r.kind, index)).collect();
        sorted.sort_unstable();
        Self { layout, sorted }
    }

    fn find(&self, layer: &str, kind: RegionKind) -> Option<(usize, &'a RegionLayout)> {
        let at = self.sorted.binary_search_by_key(&(layer, kind), |(layer, kind, _)| (layer, *kind)).ok()?;
        let index = self.sorted.get(at)?.2;
        Some((index, self.layout.regions.get(index)?))
    }
}

/// The parts that a region of ours is made of; none if they have nothing of the layer.
pub(super) fn pairs(
    local: &Index<'_>,
    region: &RegionLayout,
    remote: &Index<'_>,
) -> Result<Vec<Pair>, ShapeError> {
    let layer = &region.layer;
    let theirs = |kind| remote.find(layer, kind);
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
            let (Some(both), Some((_, other))) = (theirs(RegionKind::KeyValue), local.find(layer, other))
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
