//! What a set of invalid blocks does to requests: pure functions over block tables.
//!
//! # The rule
//!
//! A request stands on the blocks that hold its computed tokens. If one of those is *bad*, the request is cut back
//! to the longest prefix that stands on none. A block is bad if it
//!
//! - was reported invalid (or its request was reported lost as a whole), or
//! - may be in the prefix cache and may have been computed from a bad block: it stands at or behind the first bad
//!   block of some request, in any group.
//!
//! The second kind spreads: a request that took such a block from the cache is cut there too. Since the rule only
//! ever adds bad blocks, its result is one and the same in whatever order requests are given.
//!
//! *Shared blocks.* Every request that holds a bad block is cut there. None of them relies on another to compute it
//! again first: the other may be preempted, aborted or computed in chunks, and then a request would count wrong bytes
//! as computed. Whoever is scheduled first writes the block; the next writes the same values into the same places
//! before it reads them. That costs arithmetic for blocks that were shared, and never a wrong token.
//!
//! *The cache.* Every bad block that may be in the prefix cache is to be evicted, under every policy: a block that
//! waits to be computed again must not be handed to somebody who would take it as computed.
//!
//! # Groups that forget
//!
//! [`Need`] says which blocks a group needs to go on from a position. A null block never makes a request affected,
//! but a request that has to go back cannot go on from a position that needs one.

mod bits;
mod judge;

use std::num::NonZeroU32;

use kv_proto::blocks::BLOCKS_MAX;
use kv_proto::{BlockId, BlockList};

use crate::Policy;

pub use judge::judge;

/// A block, with its group if that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRef {
    /// Its group; `None`: the id means this block in whichever group has it.
    pub group: Option<u32>,
    /// Its id.
    pub block: BlockId,
}

impl BlockRef {
    /// A block whose group nobody named.
    pub const fn any(block: u32) -> Self {
        Self { group: None, block: BlockId(block) }
    }

    /// A block of this group.
    pub const fn of(group: u32, block: u32) -> Self {
        Self { group: Some(group), block: BlockId(block) }
    }

    /// The blocks of lists by group, as [`FailedLoad::invalid`](crate::FailedLoad::invalid) has them: list `i` is of
    /// group `i`. What a list names beyond [`BLOCKS_MAX`] blocks was made up, and is left out.
    pub fn of_lists(lists: &[BlockList]) -> Vec<Self> {
        let of = |(group, list): (u32, &BlockList)| -> Vec<Self> {
            list.iter().take(BLOCKS_MAX as usize).map(|block| Self { group: Some(group), block }).collect()
        };
        (0..).zip(lists).flat_map(of).collect()
    }
}

/// Which blocks a group needs so that a request can go on from a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Need {
    /// All from the start of the sequence: full attention.
    #[default]
    All,
    /// Those that hold the last `tokens` before the position: a sliding window. A window that counts the token
    /// being computed is one longer than this.
    Window {
        /// Tokens before the position.
        tokens: u32,
    },
    /// Where the request stands, only blocks at or behind this position in its table, counted in blocks: a window of
    /// unknown width, or a state that exists for one position. From an earlier position it can go on only if all
    /// blocks before that are there and sound, since nothing says which of them it needs.
    From {
        /// Position of the first block that matters.
        block: u32,
    },
}

/// A request's block table in one group, in sequence order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupTable<'a> {
    /// The group.
    pub group: u32,
    /// Tokens in one block of it.
    pub block_tokens: NonZeroU32,
    /// The blocks; item `i` holds the tokens from `i * block_tokens`.
    pub blocks: &'a [BlockId],
    /// Which of them are needed.
    pub need: Need,
}

/// Whether a request's blocks may already be known to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadState {
    /// Loaded while it runs (synchronous): all its blocks may be in the prefix cache.
    Running,
    /// It waits for its load (asynchronous): only blocks that it took from the prefix cache are in there.
    Parked {
        /// Tokens at the start that it took from the cache; full blocks of them are cached.
        cached_tokens: u32,
    },
}

/// A request that holds blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder<'a, K> {
    /// The engine's name for it. Never compared with anything but other names in the same call.
    pub key: K,
    /// Its tables, one for each group.
    pub tables: Vec<GroupTable<'a>>,
    /// Tokens that count as computed, those scheduled in this step included.
    pub computed: u32,
    /// Tokens scheduled in this step. Blocks that hold only these are written by the step itself, after the load,
    /// and are not judged.
    pub scheduled: u32,
    /// Whether its blocks may be in the cache.
    pub state: LoadState,
    /// Whether the load was reported failed as a whole: then every block behind the cached tokens of a parked
    /// request is invalid, and every block of a running one. Together with named blocks the more cautious report
    /// counts, since another rank may have had nothing better to say.
    pub lost: bool,
}

/// Everything that one call judges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Situation<'a, K> {
    /// Requests that may hold invalid blocks; others do no harm.
    pub requests: &'a [Holder<'a, K>],
    /// Blocks that may hold wrong bytes. Repetitions and unknown ids do no harm.
    pub invalid: &'a [BlockRef],
    /// Blocks in the pool; ids are below it.
    pub pool: u32,
    /// The id that stands in tables where no block is.
    pub null: Option<BlockId>,
    /// What the deployer wants.
    pub policy: Policy,
}

/// What becomes of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut<K> {
    /// Its key.
    pub key: K,
    /// Whether it stood on a bad block. Its results of this step are void.
    pub affected: bool,
    /// Tokens that stay computed: all of them if it is not affected; else a multiple of every group's block size,
    /// the longest that stands on no bad block.
    pub keep_tokens: u32,
    /// Tokens that counted as computed before this step and do not any more.
    pub lost_tokens: u32,
}

/// What was odd about a situation. Nothing of it changes what the rule says about the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remarks<K> {
    /// Reported blocks that no table holds, or that no pool has. Those inside the pool are evicted all the same:
    /// their request may have ended while they stayed in the cache.
    pub unknown: Vec<BlockRef>,
    /// Reported blocks that are only where nothing was loaded: in what this step computes, or where the group does
    /// not look any more.
    pub unjudged: Vec<BlockRef>,
    /// Repetitions among the reported blocks.
    pub repeated: u64,
    /// Reports of the null block: it holds nothing that could be wrong.
    pub null: u64,
    /// Invalid blocks that more than one table holds.
    pub shared: u64,
    /// Requests with a table shorter than their computed tokens; what is missing is taken as null.
    pub short: Vec<K>,
    /// Requests with ids in their tables that the pool does not have; they are taken as null.
    pub beyond_pool: Vec<K>,
    /// Requests that say they scheduled more than they computed; nothing counts as computed before the step.
    pub contradicting: Vec<K>,
    /// Requests that are named more than once; each mention is judged for itself.
    pub twice: Vec<K>,
}

/// The answer to a [`Situation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged<K> {
    /// For each request, in the order given.
    pub cuts: Vec<Cut<K>>,
    /// Blocks to take out of the prefix cache, in order, each once.
    pub evict: Vec<BlockRef>,
    /// Requests to end with an error: the affected ones, if the policy is `fail`.
    pub end: Vec<K>,
    /// What was odd.
    pub remarks: Remarks<K>,
}

/// How a parked request goes on when its load is quiet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// It has a prefix. Enter the blocks of `cache_tokens` into the prefix cache; blocks from `zero_from` on hold
    /// nothing that may be read before it is written; go on with `computed` tokens.
    With {
        /// Tokens whose blocks are good.
        cache_tokens: u32,
        /// Token from which blocks are to be treated as new; `None` if nothing failed.
        zero_from: Option<u32>,
        /// Tokens that count as computed.
        computed: u32,
    },
    /// Nothing is left of it: free its blocks and start anew, prefix lookup included.
    Anew,
}

/// How a parked request goes on: `failed` says whether its load did, `computed` is its cut (or all it has), `total`
/// the tokens of its prompt. A request with all of its prompt computes the last token once more, since something
/// has to yield the next one.
pub fn resume(failed: bool, computed: u32, total: u32) -> Resume {
    if failed && computed == 0 {
        return Resume::Anew;
    }
    Resume::With {
        cache_tokens: computed,
        zero_from: failed.then_some(computed),
        computed: computed.min(total.saturating_sub(1)),
    }
}
