//! How the engines of a world lay out their caches, and what each cell of them must hold.
//!
//! Memory is simulated by rows: one head of one token of one layer is one cell. Producers and consumers may be cut into
//! ranks in different ways, have blocks of different sizes and orders, and have a layer whose attention looks at a window
//! only; what a consumer's cell must hold depends on the prompt, the token, the layer and the head alone.

use kv_proto::{BlockLayout, BlockOrder, Dtype, GroupKind, Rank, RegionKind, RegionLayout, Topology};

use super::dice::Dice;

/// Layers of the world's model.
pub(super) const LAYERS: usize = 2;
/// The layer that has a window, where one has.
pub(super) const WINDOW_LAYER: usize = 1;
/// Tokens of a consumer's block; a producer's may have others.
pub(super) const BLOCK_TOKENS: u32 = 4;
/// Tokens of the longest prompt.
pub(super) const PROMPT_MAX_TOKENS: u32 = 22;
/// Elements of one head of one token.
const HEAD_SIZE: u32 = 4;
/// Bytes of a cell: one head of one token.
pub(super) const CELL_BYTES: u64 = HEAD_SIZE as u64 * Dtype::F32.bytes();

/// How one side's engines are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Ranks of an engine.
    pub(super) ranks: u32,
    /// Heads of the model.
    pub(super) heads: u32,
    /// Tokens in a block.
    pub(super) block_tokens: u32,
    /// Order inside a block.
    pub(super) order: BlockOrder,
    /// Tokens that the second layer looks at; `None`: all.
    pub(super) window: Option<u32>,
}

impl Shape {
    /// The shapes of a world's producers and of its consumers. `alike`: the two are equal.
    pub(super) fn draw(draw: &mut Dice, alike: bool) -> [Self; 2] {
        const HEADS: [u32; 5] = [1, 2, 3, 4, 6];
        let heads = HEADS[draw.below(HEADS.len() as u64) as usize];
        let window = (!alike && draw.chance(300)).then(|| draw.between(3, 12) as u32);
        let cut = |draw: &mut Dice| {
            let fits = |ranks: &u32| Topology::of(*ranks).heads_of(Rank(0), heads).is_some();
            let ranks: Vec<u32> = (1..=4).filter(fits).collect();
            let chosen = draw.below(ranks.len() as u64).min(draw.below(ranks.len() as u64));
            ranks[chosen as usize]
        };
        let order = |draw: &mut Dice| {
            if draw.chance(700) { BlockOrder::HeadsTokens } else { BlockOrder::TokensHeads }
        };
        let (ranks, order_of_d) = (cut(draw), order(draw));
        let d = Self { ranks, heads, block_tokens: BLOCK_TOKENS, order: order_of_d, window };
        if alike {
            return [d, d];
        }
        let block_tokens = [2, BLOCK_TOKENS, BLOCK_TOKENS, 8][draw.below(4) as usize];
        [Self { ranks: cut(draw), block_tokens, order: order(draw), ..d }, d]
    }

    pub(super) fn topology(&self) -> Topology {
        Topology::of(self.ranks)
    }

    /// Heads that each rank holds.
    fn local_heads(&self) -> u32 {
        self.heads_of(0).1
    }

    /// The first head that a rank holds, and how many.
    pub(super) fn heads_of(&self, rank: usize) -> (u32, u32) {
        self.topology().heads_of(Rank(rank as u32), self.heads).unwrap_or((0, 0))
    }

    /// Cells of one block in one layer.
    fn block_cells(&self) -> usize {
        (self.local_heads() * self.block_tokens) as usize
    }

    /// Cells of a rank's memory.
    pub(super) fn cells(&self, blocks: u32) -> usize {
        LAYERS * blocks as usize * self.block_cells()
    }

    /// The cell of a token and a head, both counted in their block and rank.
    pub(super) fn cell(&self, blocks: u32, layer: usize, block: u32, head: u32, slot: u32) -> usize {
        let (head_step, token_step) =
            self.order.steps(self.local_heads().into(), self.block_tokens.into(), 1);
        let inside = u64::from(head) * head_step + u64::from(slot) * token_step;
        (layer * blocks as usize + block as usize) * self.block_cells() + inside as usize
    }

    /// The block that a cell is in.
    pub(super) fn block_of(&self, blocks: u32, cell: usize) -> usize {
        cell / self.block_cells() % blocks as usize
    }

    /// The first token of a prompt whose cells in a layer matter to who goes on with it.
    pub(super) fn first_token(&self, layer: usize, tokens: u32) -> u32 {
        match self.window {
            Some(window) if layer == WINDOW_LAYER => tokens.saturating_sub(window),
            _ => 0,
        }
    }

    /// What the block groups are.
    pub(super) fn groups(&self) -> Vec<GroupKind> {
        let window = self.window.map(|tokens| GroupKind::Window { tokens });
        std::iter::once(GroupKind::Full).chain(window).collect()
    }

    pub(super) fn layout(&self, blocks: u32) -> BlockLayout {
        let block_bytes = self.block_cells() as u64 * CELL_BYTES;
        let region = |layer: usize| RegionLayout {
            layer: format!("layers.{layer}"),
            kind: RegionKind::KeyValue,
            group: u32::from(self.window.is_some() && layer == WINDOW_LAYER),
            memory: 0,
            base: layer as u64 * u64::from(blocks) * block_bytes,
            block_stride: block_bytes,
            block_bytes,
            dtype: Dtype::F32,
            heads: self.local_heads(),
            heads_total: self.heads,
            head_size: HEAD_SIZE,
        };
        BlockLayout {
            block_tokens: self.block_tokens,
            blocks,
            kernel_tokens: 0,
            order: self.order,
            groups: self.groups(),
            regions: (0..LAYERS).map(region).collect(),
        }
    }
}

/// What a cell must hold: one head of one token of a prompt in one layer.
pub(super) fn stamp(prompt: usize, token: u32, layer: usize, head: u32) -> u64 {
    1 + (((prompt as u64 * 1000 + u64::from(token)) * 10 + layer as u64) * 16 + u64::from(head))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_where_the_layout_says() {
        let mut dice = Dice::new(1);
        for _ in 0..200 {
            for shape in Shape::draw(&mut dice, false) {
                let layout = shape.layout(5);
                layout.check(&[shape.cells(5) as u64 * CELL_BYTES]).unwrap();
                let mut seen = vec![false; shape.cells(5)];
                for (layer, region) in layout.regions.iter().enumerate() {
                    for block in 0..5 {
                        for (head, slot) in (0..region.heads)
                            .flat_map(|head| (0..shape.block_tokens).map(move |slot| (head, slot)))
                        {
                            let cell = shape.cell(5, layer, block, head, slot);
                            assert!(!std::mem::replace(&mut seen[cell], true));
                            assert_eq!(shape.block_of(5, cell), block as usize);
                            let at = cell as u64 * CELL_BYTES - region.base;
                            assert_eq!(at / region.block_stride, u64::from(block));
                        }
                    }
                }
                assert!(seen.into_iter().all(|cell| cell));
            }
        }
    }
}
