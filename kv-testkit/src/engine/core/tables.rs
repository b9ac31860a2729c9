//! A request's blocks, by block group.

use kv_connector::BlockList;
use kv_proto::{BlockId, GroupKind};

use super::super::pool::PLACEHOLDER;

/// How the cache is cut into blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cut {
    /// Tokens in a block.
    pub(super) block_tokens: u32,
    /// What the block groups are.
    pub(super) groups: Vec<GroupKind>,
}

impl Cut {
    /// Blocks of a group that hold so many tokens.
    pub(super) fn blocks(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.block_tokens) as usize
    }

    /// Whether a cached prefix can be found again. Not where a window is: the blocks that it has left are gone, and so
    /// would be what follows the prefix.
    pub(super) fn caches_prefixes(&self) -> bool {
        self.groups == [GroupKind::Full]
    }

    /// Blocks of a group before the first one that is looked at when `tokens` tokens are there.
    fn left(&self, kind: GroupKind, tokens: u32) -> usize {
        (kind.first_token(tokens) / self.block_tokens) as usize
    }
}

/// For each block group the blocks in the order of the positions that they hold; `None` where the window has left them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in super::super) struct Tables {
    groups: Vec<Vec<Option<BlockId>>>,
}

impl Tables {
    /// Blocks of the first group alone.
    pub(super) fn of_first(blocks: Vec<BlockId>) -> Self {
        Self { groups: vec![blocks.into_iter().map(Some).collect()] }
    }

    /// The blocks of the first group.
    pub(super) fn first(&self) -> Vec<BlockId> {
        self.groups.first().into_iter().flatten().copied().flatten().collect()
    }

    /// Blocks that are wanting for `until` tokens, of which `there` are there or will be loaded.
    pub(super) fn missing(&self, cut: &Cut, there: u32, until: u32) -> usize {
        let needed = cut.blocks(until);
        let of = |(index, kind): (usize, &GroupKind)| {
            let have = self.groups.get(index).map_or(0, Vec::len);
            needed.saturating_sub(have.max(cut.left(*kind, there)))
        };
        cut.groups.iter().enumerate().map(of).sum()
    }

    /// Puts in the blocks that [`Tables::missing`] has counted.
    pub(super) fn fill(&mut self, cut: &Cut, there: u32, until: u32, blocks: Vec<BlockId>) {
        self.groups.resize(cut.groups.len(), Vec::new());
        let mut blocks = blocks.into_iter();
        for (group, kind) in self.groups.iter_mut().zip(&cut.groups) {
            for index in group.len()..cut.blocks(until) {
                group.push(if index < cut.left(*kind, there) { None } else { blocks.next() });
            }
        }
    }

    /// Takes out the blocks that no token after the first `tokens` looks at.
    pub(super) fn leave(&mut self, cut: &Cut, tokens: u32) -> Vec<BlockId> {
        let mut left = Vec::new();
        for (group, kind) in self.groups.iter_mut().zip(&cut.groups) {
            // Those before the last one that was left are gone.
            let old = group.iter_mut().take(cut.left(*kind, tokens)).rev();
            left.extend(old.map_while(Option::take));
        }
        left
    }

    /// Takes out all but the first `kept` blocks of each group, and of a window all of them: without those before it, none
    /// is of use.
    pub(super) fn keep(&mut self, cut: &Cut, kept: usize) -> Vec<BlockId> {
        let mut lost = Vec::new();
        for (group, kind) in self.groups.iter_mut().zip(&cut.groups) {
            let kept = if *kind == GroupKind::Full { kept.min(group.len()) } else { 0 };
            lost.extend(group.drain(kept..).flatten());
        }
        lost
    }

    /// Takes out all blocks.
    pub(super) fn take(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.groups).into_iter().flatten().flatten().collect()
    }

    /// As the connector takes them: from the start of the sequence, with something in the place of what is gone.
    pub(super) fn lists(&self) -> Vec<BlockList> {
        let list = |group: &Vec<Option<BlockId>>| group.iter().map(|b| b.unwrap_or(PLACEHOLDER)).collect();
        self.groups.iter().map(list).collect()
    }

    /// As the workers take them.
    pub(super) fn ids(&self) -> Vec<Vec<u32>> {
        let ids = |group: &Vec<Option<BlockId>>| group.iter().map(|b| b.unwrap_or(PLACEHOLDER).0).collect();
        self.groups.iter().map(ids).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut() -> Cut {
        Cut { block_tokens: 4, groups: vec![GroupKind::Full, GroupKind::Window { tokens: 6 }] }
    }

    fn blocks(from: u32, count: usize) -> Vec<BlockId> {
        (from..).map(BlockId).take(count).collect()
    }

    #[test]
    fn a_window_has_blocks_for_what_is_looked_at_and_placeholders_before() {
        let (cut, mut tables) = (cut(), Tables::default());
        // 18 tokens to be loaded: the window looks at 12 to 17, and so at the blocks from 8 on.
        assert_eq!(tables.missing(&cut, 18, 18), 5 + 2);
        tables.fill(&cut, 18, 18, blocks(1, 7));
        assert_eq!(tables.ids(), [vec![1, 2, 3, 4, 5], vec![0, 0, 0, 6, 7]]);
        assert_eq!(tables.missing(&cut, 18, 20), 0);
        assert_eq!(tables.missing(&cut, 20, 21), 2);
        tables.fill(&cut, 20, 21, blocks(8, 2));
        assert_eq!(tables.leave(&cut, 21), []);
        assert_eq!(tables.leave(&cut, 22), [BlockId(6)]);
        assert_eq!(tables.leave(&cut, 23), [], "once is enough");
        assert_eq!(tables.ids(), [vec![1, 2, 3, 4, 5, 8], vec![0, 0, 0, 0, 7, 9]]);
        assert_eq!(tables.lists()[1].len(), 6);
        assert_eq!(tables.take(), [1, 2, 3, 4, 5, 8, 7, 9].map(BlockId));
    }

    #[test]
    fn what_is_kept_of_a_load_that_failed_is_nothing_of_a_window() {
        let (cut, mut tables) = (cut(), Tables::default());
        tables.fill(&cut, 18, 18, blocks(1, 7));
        assert_eq!(tables.keep(&cut, 2), [3, 4, 5, 6, 7].map(BlockId));
        assert_eq!(tables.missing(&cut, 0, 18), 3 + 5, "all of the window is computed");
        assert!(!cut.caches_prefixes());
    }
}
