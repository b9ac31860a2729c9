//! Lists of blocks, kept as runs, since an allocator mostly hands out neighbours.

use serde::{Deserialize, Serialize};

use crate::ids::BlockId;

/// Most blocks one list may name. A million blocks of 16 tokens are a prompt of 16 million tokens.
pub const BLOCKS_MAX: u32 = 1 << 20;

/// A list of blocks in order. Position `i` of a request's sequence, counted in blocks, is item `i`.
///
/// It is stored, and travels, as runs of consecutive ids. The list is as the scheduler gave it: any order,
/// repetitions included.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockList {
    runs: Vec<(u32, u32)>,
}

impl BlockList {
    /// Packs a list. Ids are not checked against any pool.
    pub fn from_ids(ids: impl IntoIterator<Item = BlockId>) -> Self {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for BlockId(id) in ids {
            match runs.last_mut() {
                Some((first, count)) if first.checked_add(*count) == Some(id) => *count += 1,
                _ => runs.push((id, 1)),
            }
        }
        Self { runs }
    }

    /// Number of blocks, saturating at the largest number for a list made up by a liar.
    pub fn len(&self) -> u32 {
        self.runs.iter().fold(0u32, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// Whether it names no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The highest id; `None` if the list is empty or an id does not fit its type.
    pub fn highest(&self) -> Option<BlockId> {
        self.runs
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(first, count)| first.checked_add(count - 1))
            .max_by_key(|end| end.map_or(u64::MAX, u64::from))
            .flatten()
            .map(BlockId)
    }

    /// Whether it can be used with a pool of so many blocks: bounded, and every id inside the pool.
    pub fn fits(&self, pool: u32) -> bool {
        self.len() <= BLOCKS_MAX && (self.is_empty() || self.highest().is_some_and(|BlockId(id)| id < pool))
    }

    /// A block that is named more than once, if any is.
    pub fn repeated(&self) -> Option<BlockId> {
        let mut runs: Vec<(u32, u32)> = self.runs.iter().copied().filter(|(_, count)| *count > 0).collect();
        runs.sort_unstable();
        let touch = |pair: &&[(u32, u32)]| u64::from(pair[0].0) + u64::from(pair[0].1) > u64::from(pair[1].0);
        runs.windows(2).find(touch).map(|pair| BlockId(pair[1].0))
    }

    /// The blocks, one by one. Use only on a list that [`fits`](Self::fits).
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.runs.iter().flat_map(|(first, count)| (0..*count).map(move |i| BlockId(first.saturating_add(i))))
    }

    /// Items from `from` (counted in blocks) to the end.
    pub fn skip(&self, from: u32) -> Self {
        Self::from_ids(self.iter().skip(from as usize))
    }
}

impl FromIterator<BlockId> for BlockList {
    fn from_iter<T: IntoIterator<Item = BlockId>>(ids: T) -> Self {
        Self::from_ids(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ids: &[u32]) -> BlockList {
        ids.iter().copied().map(BlockId).collect()
    }

    #[test]
    fn runs_unpack_to_what_was_packed() {
        for ids in [vec![], vec![5], vec![1, 2, 3, 9, 8, 7, 8, 9], vec![u32::MAX, 0, 1]] {
            let packed = list(&ids);
            assert_eq!(packed.iter().map(|b| b.0).collect::<Vec<_>>(), ids);
            assert_eq!(packed.len() as usize, ids.len());
            assert_eq!(packed.highest().map(|b| b.0), ids.iter().copied().max());
        }
        assert_eq!(list(&[1, 2, 3, 9]).runs, [(1, 3), (9, 1)]);
        assert_eq!(list(&[1, 2, 3, 9]).skip(2), list(&[3, 9]));
    }

    #[test]
    fn a_block_that_is_named_twice_is_found() {
        for ids in [vec![], vec![5], vec![3, 4, 5, 1, 2, 9]] {
            assert_eq!(list(&ids).repeated(), None, "{ids:?}");
        }
        for (ids, twice) in [(vec![5, 5], 5), (vec![7, 8, 9, 1, 8], 8), (vec![1, 2, 3, 3, 4], 3)] {
            assert_eq!(list(&ids).repeated(), Some(BlockId(twice)), "{ids:?}");
        }
    }

    #[test]
    fn a_made_up_list_never_fits() {
        for runs in [vec![(0, u32::MAX), (0, u32::MAX)], vec![(u32::MAX, 2)], vec![(4, 1)]] {
            assert!(!BlockList { runs: runs.clone() }.fits(4), "{runs:?}");
        }
        assert!(list(&[3, 0]).fits(4));
        assert!(BlockList { runs: vec![(9, 0)] }.fits(4), "a run of nothing names no block");
    }
}
