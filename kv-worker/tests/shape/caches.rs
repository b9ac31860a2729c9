//! Where a random engine's ranks keep their blocks: any arrangement that a layout can describe.

use kv_proto::{BlockLayout, Dtype, GroupKind, RegionKind, RegionLayout};

use crate::world::{Engine, Layer, Rng};

#[derive(Debug, Clone)]
pub(crate) struct RankCache {
    pub(crate) layout: BlockLayout,
    pub(crate) sizes: Vec<u64>,
}

/// One region before it has a place.
struct Wanted {
    layer: usize,
    kind: RegionKind,
    heads: u32,
    total: u32,
    size: u32,
    kernel_bytes: u64,
}

/// Gives each rank of an engine its layout.
pub(crate) fn lay_out(rng: &mut Rng, engine: &mut Engine, shared: bool) {
    let ranks = (0..engine.topology.ranks).map(|rank| rank_of(rng, engine, rank, shared)).collect();
    engine.ranks = ranks;
}

fn regions_of(engine: &Engine, index: usize, layer: &Layer) -> Vec<Wanted> {
    let tensor = engine.topology.ranks / engine.topology.stages;
    let is_state = engine.kinds[layer.group as usize] == GroupKind::State;
    let tokens = if is_state { 1 } else { engine.kernel_tokens };
    let wanted = |kind, total: u32, size: u32| {
        let heads = if total >= tensor { total / tensor } else { 1 };
        let kernel_bytes = u64::from(heads * tokens * size) * layer.dtype.bytes();
        // An engine of one rank need not tell how many heads there are in all.
        let total = if tensor == 1 && index.is_multiple_of(2) { 0 } else { total };
        Wanted { layer: index, kind, heads, total, size, kernel_bytes }
    };
    match &layer.parts[..] {
        [keys, values] if engine.together && keys.kind == RegionKind::Key => {
            vec![wanted(RegionKind::KeyValue, keys.heads, keys.size + values.size)]
        }
        parts => parts.iter().map(|part| wanted(part.kind, part.heads, part.size)).collect(),
    }
}

fn rank_of(rng: &mut Rng, engine: &Engine, rank: u32, shared: bool) -> RankCache {
    let tensor = engine.topology.ranks / engine.topology.stages;
    let stage = rank / tensor;
    let mut ends = vec![0u64; 1 + rng.below(3) as usize];
    let mut regions: Vec<RegionLayout> = Vec::new();
    // Where all groups use the same memory, their blocks are equally far apart.
    let kernels = u64::from(engine.block_tokens / engine.kernel_tokens);
    let own = |group: usize| -> Vec<Wanted> {
        let layers = engine.layers.iter().enumerate();
        let of =
            layers.filter(|(index, l)| l.group as usize == group && l.stage == stage && l.looks_at == *index);
        of.flat_map(|(index, layer)| regions_of(engine, index, layer)).collect()
    };
    let kernels_of = |group: usize| if engine.kinds[group] == GroupKind::State { 1 } else { kernels };
    let widest = (0..engine.kinds.len())
        .map(|group| own(group).iter().map(|w| w.kernel_bytes).sum::<u64>() * kernels_of(group))
        .max()
        .unwrap_or(0)
        .next_multiple_of(kernels);
    let common = rng.below(ends.len() as u32);
    let common_base = ends[common as usize] + u64::from(rng.below(4));
    for group in 0..engine.kinds.len() {
        let mut wanted = own(group);
        if rng.chance(30) {
            rng.shuffle(&mut wanted);
        }
        let kernels = kernels_of(group);
        if shared || rng.chance(40) {
            // All layers' parts of a kernel block side by side.
            let memory = if shared { common } else { rng.below(ends.len() as u32) };
            let begin = if shared { common_base } else { ends[memory as usize] + u64::from(rng.below(4)) };
            let gap = if shared || rng.chance(60) { 0 } else { 1 + u64::from(rng.below(3)) };
            let row: u64 = wanted.iter().map(|w| w.kernel_bytes + gap).sum();
            let stride = if shared { widest } else { row * kernels };
            let mut base = begin;
            for one in wanted {
                let bytes = one.kernel_bytes;
                regions.push(region(engine, one, memory, base, stride, kernels));
                base += bytes + gap;
            }
            let end = &mut ends[memory as usize];
            *end = (*end).max(begin + stride * u64::from(engine.blocks));
        } else {
            for one in wanted {
                let memory = rng.below(ends.len() as u32);
                let gap = if rng.chance(70) { 0 } else { 1 + u64::from(rng.below(3)) };
                let base = ends[memory as usize] + u64::from(if rng.chance(70) { 0 } else { rng.below(4) });
                let stride = (one.kernel_bytes + gap) * kernels;
                regions.push(region(engine, one, memory, base, stride, kernels));
                ends[memory as usize] = base + stride * u64::from(engine.blocks);
            }
        }
    }
    // Layers that look at another's cache: the same bytes under another name.
    for layer in engine.layers.iter().enumerate().filter(|(i, l)| l.stage == stage && l.looks_at != *i) {
        let seen = &engine.layers[layer.1.looks_at].name;
        let again: Vec<RegionLayout> = regions.iter().filter(|r| r.layer == *seen).cloned().collect();
        regions.extend(again.into_iter().map(|r| RegionLayout { layer: layer.1.name.clone(), ..r }));
    }
    if rng.chance(30) {
        rng.shuffle(&mut regions);
    }
    // Kinds may be left out from the end where they are the usual one.
    let mut groups = engine.kinds.clone();
    while groups.last() == Some(&GroupKind::Full) {
        groups.pop();
    }
    let kernel_tokens = if kernels == 1 && rng.chance(50) { 0 } else { engine.kernel_tokens };
    let layout = BlockLayout {
        block_tokens: engine.block_tokens,
        kernel_tokens,
        blocks: engine.blocks,
        order: engine.order,
        groups,
        regions,
    };
    let sizes: Vec<u64> = ends.iter().map(|end| end + u64::from(rng.below(3))).collect();
    if let Err(error) = layout.check(&sizes) {
        panic!("a sound layout is refused: {error}\n{layout:#?}");
    }
    RankCache { layout, sizes }
}

fn region(
    engine: &Engine,
    one: Wanted,
    memory: u32,
    base: u64,
    block_stride: u64,
    kernels: u64,
) -> RegionLayout {
    let layer = &engine.layers[one.layer];
    let dtype: Dtype = layer.dtype;
    RegionLayout {
        layer: layer.name.clone(),
        kind: one.kind,
        group: layer.group,
        memory,
        base,
        block_stride,
        block_bytes: one.kernel_bytes * kernels,
        dtype,
        heads: one.heads,
        heads_total: one.total,
        head_size: one.size,
    }
}
