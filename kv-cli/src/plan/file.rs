//! Shape files: an engine in a deployer's words, and the layouts that follow from them.

use std::path::Path;

use kv_connector::proto::blocks::BLOCKS_MAX;
use kv_connector::proto::{
    BlockLayout, BlockOrder, Dtype, GroupKind, Rank, RegionKind, RegionLayout, Topology,
};
use serde::Deserialize;

use crate::error::Failure;

/// More than any model has, and few enough that layouts are made at once.
const LAYERS_MAX: u32 = 4096;
const RANKS_MAX: u32 = 256;
const BLOCK_TOKENS_MAX: u32 = 1024;

/// Enough for any sample; no memory is allocated.
const BLOCKS: u32 = BLOCKS_MAX;

/// One engine.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shape {
    layers: u32,
    /// Over all ranks; 1 for a latent.
    #[serde(default = "one")]
    heads: u32,
    head_size: u32,
    dtype: Dtype,
    #[serde(default)]
    mla: bool,
    #[serde(default = "one")]
    ranks: u32,
    #[serde(default = "one")]
    stages: u32,
    #[serde(default = "one")]
    context: u32,
    #[serde(default)]
    layers_per_stage: Vec<u32>,
    block_tokens: u32,
    #[serde(default)]
    kernel_tokens: u32,
    #[serde(default)]
    order: Order,
    #[serde(default)]
    keys_and_values: KeysAndValues,
    #[serde(default)]
    outermost: Outermost,
    #[serde(default)]
    groups: Vec<Group>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    #[default]
    Hnd,
    Nhd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KeysAndValues {
    #[default]
    Apart,
    Together,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outermost {
    #[default]
    Layer,
    Block,
}

/// Layers of one block table.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    kind: Kind,
    /// Layers by number, such as `0-5,7`, with a step `0-30/2`.
    layers: String,
    /// Tokens of a window.
    window: Option<u32>,
    /// Of a state: parts that can be shared out over ranks, and elements of one.
    parts: Option<u32>,
    part_size: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Full,
    Window,
    State,
}

const fn one() -> u32 {
    1
}

/// An engine as the compiler takes it.
pub(super) struct Engine {
    pub(super) topology: Topology,
    pub(super) layouts: Vec<BlockLayout>,
}

impl Engine {
    /// Tokens of one entry of a block list.
    pub(super) fn entry_tokens(&self) -> u32 {
        self.layouts[0].block_tokens.saturating_mul(self.topology.context)
    }
}

impl Shape {
    /// Reads a file: TOML or JSON, by its extension.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let named = path.display().to_string();
        let failed = |why: String| Failure::new(named.clone(), why);
        let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
        match path.extension().and_then(|e| e.to_str()) {
            Some("toml") => toml::from_str(&text).map_err(|e| failed(e.to_string().trim_end().to_owned())),
            Some("json") => serde_json::from_str(&text).map_err(|e| failed(e.to_string())),
            _ => Err(failed("a shape file ends in .toml or .json".to_owned())),
        }
    }

    /// The layouts of all ranks.
    pub(super) fn engine(&self, name: &str) -> Result<Engine, Failure> {
        let failed = |why: String| Failure::new(name, why);
        let topology = Topology { ranks: self.ranks, stages: self.stages, context: self.context };
        topology.check().map_err(|e| failed(e.to_string()))?;
        for (field, value, limit) in [
            ("layers", self.layers, LAYERS_MAX),
            ("ranks", self.ranks, RANKS_MAX),
            ("heads", self.heads, 1 << 16),
            ("block_tokens", self.block_tokens, BLOCK_TOKENS_MAX),
        ] {
            if value == 0 || value > limit {
                return Err(failed(format!("{field} is {value}; 1 to {limit} are allowed")));
            }
        }
        if self.mla && self.heads != 1 {
            return Err(failed(format!("heads is {}; a model with mla has 1", self.heads)));
        }
        let stages = self.stage_of_layers().map_err(failed)?;
        let groups = self.group_of_layers().map_err(failed)?;
        for group in 0..(self.groups.len() as u32).max(1) {
            for (kind, total, _) in self.parts(group) {
                let (what, tensor) =
                    (if kind == RegionKind::Ssm { "parts" } else { "heads" }, topology.tensor());
                if topology.heads_of(Rank(0), total).is_none() {
                    return Err(failed(format!(
                        "{total} {what} cannot be shared out over {tensor} ranks of a stage; one of the two must divide the other"
                    )));
                }
            }
        }
        let mut layouts = Vec::with_capacity(self.ranks as usize);
        for rank in 0..self.ranks {
            let stage = topology.stage(Rank(rank));
            let own: Vec<u32> = (0..self.layers).filter(|l| stages[*l as usize] == stage).collect();
            let layout = self.layout(topology, rank, &own, &groups);
            layout.check(&[u64::MAX]).map_err(|e| failed(e.to_string()))?;
            layouts.push(layout);
        }
        Ok(Engine { topology, layouts })
    }

    /// The stage of each layer: as told, or as evenly as it comes out, the first ones having one more.
    fn stage_of_layers(&self) -> Result<Vec<u32>, String> {
        let (layers, stages) = (self.layers, self.stages);
        let even = || (0..stages).map(|s| layers / stages + u32::from(s < layers % stages)).collect();
        let counts: Vec<u32> =
            if self.layers_per_stage.is_empty() { even() } else { self.layers_per_stage.clone() };
        let sum: u64 = counts.iter().map(|c| u64::from(*c)).sum();
        if counts.len() != stages as usize || sum != u64::from(layers) {
            return Err(format!(
                "layers_per_stage has {} stages and {sum} layers; there are {stages} stages and {layers} layers",
                counts.len()
            ));
        }
        Ok((0..stages).zip(counts).flat_map(|(s, count)| std::iter::repeat_n(s, count as usize)).collect())
    }

    /// The group of each layer.
    fn group_of_layers(&self) -> Result<Vec<u32>, String> {
        if self.groups.is_empty() {
            return Ok(vec![0; self.layers as usize]);
        }
        let mut of = vec![None; self.layers as usize];
        for (number, group) in (0..).zip(&self.groups) {
            group.check(number)?;
            for layer in numbers(&group.layers)? {
                match of.get_mut(layer as usize) {
                    None => {
                        return Err(format!("group {number} has layer {layer}; there are {}", self.layers));
                    }
                    Some(Some(other)) => {
                        return Err(format!("layer {layer} is in groups {other} and {number}"));
                    }
                    Some(free) => *free = Some(number),
                }
            }
        }
        let all = of.into_iter().enumerate();
        all.map(|(layer, group)| group.ok_or(format!("layer {layer} is in no group"))).collect()
    }

    fn kind(&self, group: u32) -> GroupKind {
        match self.groups.get(group as usize) {
            Some(Group { kind: Kind::Window, window, .. }) => {
                GroupKind::Window { tokens: window.unwrap_or(0) }
            }
            Some(Group { kind: Kind::State, .. }) => GroupKind::State,
            _ => GroupKind::Full,
        }
    }

    /// What a layer of a group keeps: kind, heads over all ranks, elements of a head.
    fn parts(&self, group: u32) -> Vec<(RegionKind, u32, u32)> {
        if let Some(Group { kind: Kind::State, parts, part_size, .. }) = self.groups.get(group as usize) {
            return vec![(RegionKind::Ssm, parts.unwrap_or(0), part_size.unwrap_or(0))];
        }
        let (heads, size) = (self.heads, self.head_size);
        if self.mla {
            vec![(RegionKind::KeyValue, heads, size)]
        } else if self.keys_and_values == KeysAndValues::Together {
            vec![(RegionKind::KeyValue, heads, size.saturating_mul(2))]
        } else {
            vec![(RegionKind::Key, heads, size), (RegionKind::Value, heads, size)]
        }
    }

    fn layout(&self, topology: Topology, rank: u32, own: &[u32], groups: &[u32]) -> BlockLayout {
        let mut regions = Vec::new();
        for layer in own {
            let group = groups[*layer as usize];
            let tokens = if self.kind(group) == GroupKind::State { 1 } else { self.block_tokens };
            for (kind, total, head_size) in self.parts(group) {
                let heads = topology.heads_of(Rank(rank), total).map_or(0, |(_, share)| share);
                let block_bytes = [tokens, head_size]
                    .iter()
                    .fold(u64::from(heads), |product, factor| product.saturating_mul(u64::from(*factor)));
                let block_bytes = block_bytes.saturating_mul(self.dtype.bytes());
                regions.push(RegionLayout {
                    layer: format!("layers.{layer}"),
                    kind,
                    group,
                    memory: 0,
                    base: 0,
                    block_stride: block_bytes,
                    block_bytes,
                    dtype: self.dtype,
                    heads,
                    heads_total: total,
                    head_size,
                });
            }
        }
        let order = match self.order {
            Order::Hnd => BlockOrder::HeadsTokens,
            Order::Nhd => BlockOrder::TokensHeads,
        };
        let kinds: Vec<GroupKind> = (0..self.groups.len() as u32).map(|group| self.kind(group)).collect();
        let mut layout = BlockLayout {
            block_tokens: self.block_tokens,
            kernel_tokens: self.kernel_tokens,
            blocks: BLOCKS,
            order,
            groups: kinds,
            regions,
        };
        self.place(&mut layout);
        layout
    }

    /// Gives the regions their places: one after the other, or side by side in each kernel block of a group.
    fn place(&self, layout: &mut BlockLayout) {
        let (blocks, kernels) = (u64::from(layout.blocks), u64::from(layout.kernel_blocks().max(1)));
        let mut end = 0u64;
        for group in 0..layout.group_count() {
            let kernels = if layout.group_kind(group) == GroupKind::State { 1 } else { kernels };
            let of_group = |r: &&mut RegionLayout| r.group == group;
            let of = layout.regions.iter().filter(|r| r.group == group).map(|r| r.block_bytes);
            let row = of.fold(0, u64::saturating_add);
            let begin = end;
            let mut beside = 0;
            for region in layout.regions.iter_mut().filter(of_group) {
                if self.outermost == Outermost::Block {
                    region.base = begin.saturating_add(beside);
                    region.block_stride = row;
                    beside = beside.saturating_add(region.block_bytes / kernels);
                } else {
                    region.base = end;
                    end = end.saturating_add(region.block_stride.saturating_mul(blocks));
                }
            }
            if self.outermost == Outermost::Block {
                end = end.saturating_add(row.saturating_mul(blocks));
            }
        }
    }
}

impl Group {
    fn check(&self, number: u32) -> Result<(), String> {
        for (field, is_there, kind) in [
            ("window", self.window.is_some(), Kind::Window),
            ("parts", self.parts.is_some(), Kind::State),
            ("part_size", self.part_size.is_some(), Kind::State),
        ] {
            match (is_there, self.kind == kind) {
                (true, false) => {
                    return Err(format!("group {number}: {field} is only for kind {kind:?}").to_lowercase());
                }
                (false, true) => return Err(format!("group {number}: {field} is missing")),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Numbers such as `0-5,7` or `0-30/2`.
fn numbers(text: &str) -> Result<Vec<u32>, String> {
    let bad = || format!("layers {text:?} are no numbers such as \"0-5,7\" or \"0-30/2\"");
    let number = |text: &str| text.trim().parse::<u32>().ok().filter(|n| *n < LAYERS_MAX).ok_or_else(bad);
    let mut all = Vec::new();
    for part in text.split(',') {
        let (range, step) = part.split_once('/').unwrap_or((part, "1"));
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let (from, to, step) = (number(from)?, number(to)?, number(step)?);
        if step == 0 || from > to {
            return Err(bad());
        }
        all.extend((from..=to).step_by(step as usize));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ranges_with_steps() {
        assert_eq!(numbers("0-3, 7"), Ok(vec![0, 1, 2, 3, 7]));
        assert_eq!(numbers("0-6/3,1"), Ok(vec![0, 3, 6, 1]));
        for bad in ["", "3-1", "a", "0-9/0", "-1", "0-99999"] {
            assert!(numbers(bad).is_err_and(|e| e.contains(bad)), "{bad}");
        }
    }
}
