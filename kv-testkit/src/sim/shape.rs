//! How the engines of a world lay out their caches, and what each cell of them must hold.
//!
//! Memory is simulated by rows: one head of one token of one layer is one cell. Producers and consumers may be cut into
//! ranks and pipeline stages in different ways, deal the tokens of a sequence out over ranks or not, have blocks of
//! different sizes and orders, and have a layer whose attention looks at a window only, or that holds a state; what a
//! consumer's cell must hold depends on the prompt, the token, the layer and the head alone.

use std::ops::Range;

use kv_proto::{BlockLayout, BlockOrder, Dtype, GroupKind, Rank, RegionKind, RegionLayout, Topology};

use super::dice::Dice;

/// Layers of the world's model.
pub(super) const LAYERS: usize = 3;
/// The layer that is another than the others, where one is.
const ODD_LAYER: usize = 1;
/// Tokens of a consumer's block; a producer's may have others.
pub(super) const BLOCK_TOKENS: u32 = 4;
/// Tokens of the longest prompt.
pub(super) const PROMPT_MAX_TOKENS: u32 = 22;
/// Elements of one head of one token.
const HEAD_SIZE: u32 = 4;
/// Bytes of a cell: one head of one token.
pub(super) const CELL_BYTES: u64 = HEAD_SIZE as u64 * Dtype::F32.bytes();

/// What the odd layer of a model has, if it is not like the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Odd {
    /// It looks at so many tokens only.
    Window(u32),
    /// It holds the state after a request's last token, in one block.
    State,
}

/// How one side's engines are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Ranks of an engine.
    pub(super) ranks: u32,
    /// Pipeline stages, each with some of the layers.
    pub(super) stages: u32,
    /// Ranks of a stage over which tokens are dealt out; 1: they are not.
    pub(super) context: u32,
    /// Heads of the model.
    pub(super) heads: u32,
    /// Tokens in a block, over all ranks that tokens are dealt out over.
    pub(super) block_tokens: u32,
    /// Order inside a block.
    pub(super) order: BlockOrder,
    /// What the odd layer has.
    pub(super) odd: Option<Odd>,
}

impl Shape {
    /// The shapes of a world's producers and of its consumers. `alike`: the two are equal, and each rank has to do with one
    /// other alone, so that digests of their blocks can be compared.
    pub(super) fn draw(draw: &mut Dice, alike: bool) -> [Self; 2] {
        const HEADS: [u32; 5] = [1, 2, 3, 4, 6];
        let heads = HEADS[draw.below(HEADS.len() as u64) as usize];
        let odd = match draw.below(100) {
            0..30 if !alike => Some(Odd::Window(draw.between(3, 12) as u32)),
            30..45 if !alike => Some(Odd::State),
            _ => None,
        };
        // Each stage needs a layer of each group; tokens are dealt out where there is one head and one group.
        let staged = !alike && odd.is_none() && draw.chance(400);
        let dealt = !alike && odd.is_none() && heads == 1 && draw.chance(600);
        let cut = |draw: &mut Dice| {
            let stages = if staged { draw.between(1, LAYERS as u64) as u32 } else { 1 };
            let fits = |ranks: &u32| Topology::of(*ranks).heads_of(Rank(0), heads).is_some();
            let ranks: Vec<u32> = (1..=4 / stages).filter(fits).collect();
            let chosen = draw.below(ranks.len() as u64).min(draw.below(ranks.len() as u64));
            let tensor = ranks[chosen as usize];
            // A consumer's block of 4 tokens is dealt out over 2 or 4.
            let context = if dealt && tensor != 3 && draw.chance(700) { tensor } else { 1 };
            (stages * tensor, stages, context)
        };
        let order = |draw: &mut Dice| {
            if draw.chance(700) { BlockOrder::HeadsTokens } else { BlockOrder::TokensHeads }
        };
        let ((ranks, stages, context), order_of_d) = (cut(draw), order(draw));
        let d = Self { ranks, stages, context, heads, block_tokens: BLOCK_TOKENS, order: order_of_d, odd };
        if alike {
            return [d, d];
        }
        let (ranks, stages, context) = cut(draw);
        let block_tokens = match (d.context, context) {
            (_, 1) => [2, BLOCK_TOKENS, BLOCK_TOKENS, 8][draw.below(4) as usize],
            (1, _) => context * draw.between(1, 2) as u32,
            // Dealt out on both sides in blocks of one size.
            (_, _) => context * d.rank_tokens(),
        };
        [Self { ranks, stages, context, block_tokens, order: order(draw), ..d }, d]
    }

    pub(super) fn topology(&self) -> Topology {
        Topology { ranks: self.ranks, stages: self.stages, context: self.context }
    }

    /// Tokens of a block that one rank holds.
    pub(super) fn rank_tokens(&self) -> u32 {
        self.block_tokens / self.context
    }

    /// Heads that each rank holds.
    fn local_heads(&self) -> u32 {
        self.heads_of(0).1
    }

    /// The first head that a rank holds, and how many.
    pub(super) fn heads_of(&self, rank: usize) -> (u32, u32) {
        self.topology().heads_of(Rank(rank as u32), self.heads).unwrap_or((0, 0))
    }

    /// The layers of a rank's stage.
    pub(super) fn layers_of(&self, rank: usize) -> Range<usize> {
        let (stage, stages) = (self.topology().stage(Rank(rank as u32)) as usize, self.stages as usize);
        stage * LAYERS / stages..(stage + 1) * LAYERS / stages
    }

    /// The tokens of a block, counted in it, that a rank holds.
    pub(super) fn slots_of(&self, rank: usize) -> Range<u32> {
        let first = self.topology().context_rank(Rank(rank as u32)) * self.rank_tokens();
        first..first + self.rank_tokens()
    }

    /// Whether a layer holds a state.
    pub(super) fn is_state(&self, layer: usize) -> bool {
        self.odd == Some(Odd::State) && layer == ODD_LAYER
    }

    /// Cells of one block in one layer. A state fills the first of them, one for each head.
    fn block_cells(&self) -> usize {
        (self.local_heads() * self.rank_tokens()) as usize
    }

    /// Cells of a layer in a rank's memory.
    pub(super) fn layer_cells(&self, blocks: u32) -> usize {
        blocks as usize * self.block_cells()
    }

    /// Cells of a rank's memory.
    pub(super) fn cells(&self, rank: usize, blocks: u32) -> usize {
        self.layers_of(rank).len() * self.layer_cells(blocks)
    }

    /// The cell of a token, counted in its block, and of a head, counted in its rank. `None` if the rank does not hold it;
    /// of a state there is one token, the first.
    pub(super) fn cell(
        &self,
        blocks: u32,
        rank: usize,
        layer: usize,
        block: u32,
        head: u32,
        slot: u32,
    ) -> Option<usize> {
        let layer_here = layer.checked_sub(self.layers_of(rank).start)?;
        let tokens = if self.is_state(layer) { 1 } else { self.rank_tokens() };
        let slot = slot.checked_sub(self.slots_of(rank).start).filter(|slot| *slot < tokens)?;
        if !self.layers_of(rank).contains(&layer) || head >= self.local_heads() {
            return None;
        }
        let (head_step, token_step) = self.order.steps(self.local_heads().into(), tokens.into(), 1);
        let inside = u64::from(head) * head_step + u64::from(slot) * token_step;
        Some((layer_here * blocks as usize + block as usize) * self.block_cells() + inside as usize)
    }

    /// The block that a cell is in.
    pub(super) fn block_of(&self, blocks: u32, cell: usize) -> usize {
        cell / self.block_cells() % blocks as usize
    }

    /// The first token of a prompt whose cells in a layer matter to who goes on with it.
    pub(super) fn first_token(&self, layer: usize, tokens: u32) -> u32 {
        match self.odd {
            Some(Odd::Window(window)) if layer == ODD_LAYER => tokens.saturating_sub(window),
            _ => 0,
        }
    }

    /// What the block groups are.
    pub(super) fn groups(&self) -> Vec<GroupKind> {
        let odd = self.odd.map(|odd| match odd {
            Odd::Window(tokens) => GroupKind::Window { tokens },
            Odd::State => GroupKind::State,
        });
        std::iter::once(GroupKind::Full).chain(odd).collect()
    }

    /// Tokens of a prompt of so many that a producer is asked to compute: where there is a state, all but the last, which
    /// the consumer computes from the state before it.
    pub(super) fn asked_of_producer(&self, tokens: u32) -> u32 {
        if self.odd == Some(Odd::State) { tokens.saturating_sub(1) } else { tokens }
    }

    pub(super) fn layout(&self, rank: usize, blocks: u32) -> BlockLayout {
        let stride = self.block_cells() as u64 * CELL_BYTES;
        let region = |(place, layer): (usize, usize)| RegionLayout {
            layer: format!("layers.{layer}"),
            kind: if self.is_state(layer) { RegionKind::Ssm } else { RegionKind::KeyValue },
            group: u32::from(self.odd.is_some() && layer == ODD_LAYER),
            memory: 0,
            base: place as u64 * u64::from(blocks) * stride,
            block_stride: stride,
            block_bytes: if self.is_state(layer) {
                u64::from(self.local_heads()) * CELL_BYTES
            } else {
                stride
            },
            dtype: Dtype::F32,
            heads: self.local_heads(),
            heads_total: self.heads,
            head_size: HEAD_SIZE,
        };
        BlockLayout {
            block_tokens: self.rank_tokens(),
            blocks,
            kernel_tokens: 0,
            order: self.order,
            groups: self.groups(),
            regions: self.layers_of(rank).enumerate().map(region).collect(),
        }
    }
}

/// What a cell must hold: one head of one token of a prompt in one layer.
pub(super) fn stamp(prompt: usize, token: u32, layer: usize, head: u32) -> u64 {
    1 + (((prompt as u64 * 1000 + u64::from(token)) * 10 + layer as u64) * 16 + u64::from(head))
}

/// What a cell of a state must hold: one head of it after so many tokens of a prompt.
pub(super) fn state(prompt: usize, tokens: u32, layer: usize, head: u32) -> u64 {
    stamp(prompt, 500 + tokens, layer, head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_where_the_layout_says() {
        let mut dice = Dice::new(1);
        let (mut staged, mut dealt, mut states) = (0, 0, 0);
        for _ in 0..400 {
            for shape in Shape::draw(&mut dice, false) {
                shape.topology().check().unwrap();
                staged += u32::from(shape.stages > 1);
                dealt += u32::from(shape.context > 1);
                states += u32::from(shape.odd == Some(Odd::State));
                let mut layers = Vec::new();
                for rank in 0..shape.ranks as usize {
                    let (layout, cells) = (shape.layout(rank, 5), shape.cells(rank, 5));
                    layout.check(&[cells as u64 * CELL_BYTES]).unwrap();
                    let mut seen = vec![0; cells];
                    for (region, layer) in layout.regions.iter().zip(shape.layers_of(rank)) {
                        layers.push((layer, shape.slots_of(rank)));
                        for (block, head, slot) in (0..5).flat_map(|block| {
                            (0..region.heads).flat_map(move |head| {
                                (0..shape.block_tokens).map(move |slot| (block, head, slot))
                            })
                        }) {
                            let Some(cell) = shape.cell(5, rank, layer, block, head, slot) else { continue };
                            seen[cell] += 1;
                            assert_eq!(shape.block_of(5, cell), block as usize);
                            let at = cell as u64 * CELL_BYTES - region.base;
                            assert_eq!(at / region.block_stride, u64::from(block));
                            assert!(at % region.block_stride < region.block_bytes);
                        }
                    }
                    assert!(seen.iter().all(|times| *times <= 1));
                    // Behind a state is room that nobody uses.
                    assert!(shape.odd == Some(Odd::State) || seen.iter().all(|times| *times == 1));
                }
                for layer in 0..LAYERS {
                    for slot in 0..shape.block_tokens {
                        assert!(layers.iter().any(|(has, slots)| *has == layer && slots.contains(&slot)));
                    }
                }
            }
        }
        assert!(staged > 50 && dealt > 10 && states > 50, "{staged} {dealt} {states}");
    }
}
