//! Which tokens of a load lie one after the other on both sides: blocks of two sizes, cut where either of them ends.

use kv_proto::{BlockId, GroupBlocks, GroupKind};

use super::compile::SourcePlan;

/// Tokens that lie one after the other in one kernel block on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) local: Spot,
    pub(super) remote: Spot,
    pub(super) tokens: u32,
}

/// Where a chunk begins on one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) block: u32,
    /// Kernel block in the block.
    pub(super) kernel: u32,
    /// Token in the kernel block.
    pub(super) slot: u32,
}

impl Spot {
    const fn block(BlockId(block): BlockId) -> Self {
        Self { block, kernel: 0, slot: 0 }
    }
}

impl SourcePlan {
    /// The chunks of one group, in the order of our blocks where both sides' blocks pair. The lists were checked.
    pub(super) fn chunks(&self, group: &GroupBlocks) -> Vec<Chunk> {
        let kind = self.group_kind(group.group).unwrap_or_default();
        let mut chunks = if kind == GroupKind::State {
            let last = group.local.iter().last().zip(group.remote.iter().last());
            let one =
                |(local, remote)| Chunk { local: Spot::block(local), remote: Spot::block(remote), tokens: 1 };
            last.map(one).into_iter().collect()
        } else if self.paired {
            self.whole_blocks(group)
        } else {
            self.cut(group)
        };
        let by_block = |c: &Chunk| (c.local.block, c.local.kernel, c.local.slot);
        if !chunks.is_sorted_by_key(by_block) {
            chunks.sort_unstable_by_key(by_block);
        }
        chunks
    }

    fn whole_blocks(&self, group: &GroupBlocks) -> Vec<Chunk> {
        let ours = group.remote_first.saturating_sub(group.first);
        let theirs = group.first.saturating_sub(group.remote_first);
        let tokens = self.local.block_tokens;
        let remote = group.remote.iter().skip(theirs as usize).map(Spot::block);
        let local = group.local.iter().skip(ours as usize).map(Spot::block);
        local.zip(remote).map(|(local, remote)| Chunk { local, remote, tokens }).collect()
    }

    fn cut(&self, group: &GroupBlocks) -> Vec<Chunk> {
        let (local, remote) = (&self.local, &self.remote);
        let (ours, theirs): (Vec<BlockId>, Vec<BlockId>) =
            (group.local.iter().collect(), group.remote.iter().collect());
        let (our_tokens, their_tokens) = (local.tokens(), remote.tokens());
        let our_begin = u64::from(group.first) * our_tokens;
        let their_begin = u64::from(group.remote_first) * their_tokens;
        let our_end = our_begin + ours.len() as u64 * our_tokens;
        let their_end = their_begin + theirs.len() as u64 * their_tokens;
        let end = our_end.min(their_end);
        let mut at = our_begin.max(their_begin);
        let mut chunks = Vec::with_capacity(ours.len());
        while at < end {
            let here = locate(local, at, our_begin, &ours);
            let there = locate(remote, at, their_begin, &theirs);
            let until = (at + here.rest.min(there.rest)).min(end);
            if let (Some(local), Some(remote)) = (here.spot, there.spot) {
                // A chunk is no longer than a kernel block, whose tokens fit.
                let tokens = u32::try_from(until - at).unwrap_or(u32::MAX);
                chunks.push(Chunk { local, remote, tokens });
            }
            at = until;
        }
        chunks
    }
}

struct Located {
    /// `None`: the token belongs to another rank.
    spot: Option<Spot>,
    /// Tokens from here to where something ends.
    rest: u64,
}

fn locate(grid: &super::compile::Grid, token: u64, begin: u64, list: &[BlockId]) -> Located {
    let (size, kernel) = (u64::from(grid.block_tokens), u64::from(grid.kernel_tokens));
    let within = token % grid.tokens();
    let slot = within % size;
    if within / size != u64::from(grid.context_rank) {
        return Located { spot: None, rest: size - slot };
    }
    let index = (token - begin) / grid.tokens();
    let block = usize::try_from(index).ok().and_then(|index| list.get(index));
    // Both are below a block's tokens, which are a 32-bit number.
    let spot = block.map(|BlockId(block)| Spot {
        block: *block,
        kernel: (slot / kernel) as u32,
        slot: (slot % kernel) as u32,
    });
    Located { spot, rest: kernel - slot % kernel }
}
