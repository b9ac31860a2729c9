//! The compiler: both sides' layouts and topologies to who reads what from whom.

use std::collections::BTreeMap;

use kv_proto::handshake::check_heads;
use kv_proto::{BlockLayout, GroupKind, Rank, RegionLayout, Topology};

use super::alias::{self, Overlap};
use super::copies::{Place, RegionCopy};
use super::cover;
use super::error::ShapeError;
use super::pairs::{Index, Pair, has, pairs};

/// A worker of the producer.
#[derive(Debug, Clone, Copy)]
pub struct RemoteRank<'a> {
    /// Its rank.
    pub rank: Rank,
    /// Where its blocks lie. It was checked against the sizes of its memories.
    pub layout: &'a BlockLayout,
}

/// Most workers of one producer that a rank has to do with: each costs a connection, and a pull for each load.
pub const SOURCES_MAX: usize = 256;

/// Whom one rank reads from, and what.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShapePlan {
    /// One for each producer rank that this rank has to do with, in ascending order; the same ranks and order as
    /// [`Topology::sources_of`] says. Ones without copies have nothing that this rank needs, and are only told so.
    pub sources: Vec<SourcePlan>,
}

/// How one side's blocks stand in a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Tokens of one block on one rank.
    pub block_tokens: u32,
    /// Tokens of a kernel block.
    pub kernel_tokens: u32,
    /// Ranks over which tokens are dealt out, block by block.
    pub context: u32,
    /// This rank's place among them.
    pub context_rank: u32,
    /// Blocks in the pool.
    pub blocks: u32,
}

impl Grid {
    fn of(layout: &BlockLayout, topology: Topology, rank: Rank) -> Self {
        Self {
            block_tokens: layout.block_tokens,
            kernel_tokens: layout.tokens_of_kernel(),
            context: topology.context,
            context_rank: topology.context_rank(rank),
            blocks: layout.blocks,
        }
    }

    /// Tokens of one block over all ranks that they are dealt out to.
    pub(super) const fn tokens(&self) -> u64 {
        self.block_tokens as u64 * self.context as u64
    }
}

/// What one rank reads from one producer rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SourcePlan {
    /// The producer's rank.
    pub rank: Rank,
    /// What is copied for every token. In the order of their memories, then of our addresses.
    pub copies: Vec<RegionCopy>,
    pub(super) local: Grid,
    pub(super) remote: Grid,
    pub(super) kinds: Vec<GroupKind>,
    /// Groups of ours that share bytes.
    pub(super) overlaps: Vec<Overlap>,
    /// Blocks of both sides hold the same tokens, so that they are copied whole.
    pub(super) paired: bool,
    /// A block of theirs is byte for byte one of ours.
    pub(super) is_identical: bool,
}

impl SourcePlan {
    /// Whether a block of theirs is byte for byte one of ours, region by region in the same order: then, and only then,
    /// digests of blocks can be compared.
    pub fn is_identical(&self) -> bool {
        self.is_identical
    }

    /// What a group of ours is.
    pub fn group_kind(&self, group: u32) -> Option<GroupKind> {
        self.kinds.get(group as usize).copied()
    }

    /// Tokens of one block of ours and of one of theirs, over all ranks that they are dealt out to.
    pub fn block_tokens(&self) -> (u64, u64) {
        (self.local.tokens(), self.remote.tokens())
    }
}

/// Compiles a consumer rank's part of a pair of shapes. `remotes` are all workers of the producer; those without use are
/// not looked at. Both topologies are what the handshake said, not what a router claims.
///
/// The layouts must have passed [`BlockLayout::check`].
pub fn compile(
    local: &BlockLayout,
    rank: Rank,
    topology: Topology,
    remotes: &[RemoteRank<'_>],
    remote_topology: Topology,
) -> Result<ShapePlan, ShapeError> {
    check_heads(topology, rank, local).map_err(|source| ShapeError::Heads { side: "ours", source })?;
    let ranks = remote_topology.sources_of(rank, topology)?;
    if ranks.len() > SOURCES_MAX {
        return Err(ShapeError::Sources { sources: ranks.len(), limit: SOURCES_MAX });
    }
    let mut sources = Vec::with_capacity(ranks.len());
    for source in ranks {
        let remote =
            remotes.iter().find(|r| r.rank == source).ok_or(ShapeError::NoSuchRank { rank: source })?;
        check_heads(remote_topology, source, remote.layout)
            .map_err(|error| ShapeError::Heads { side: "theirs", source: error })?;
        check_dealt(local, topology, remote.layout, remote_topology)?;
        sources.push((source, remote.layout, Vec::new()));
    }
    let ours = Index::of(local);
    let theirs: Vec<Index<'_>> = sources.iter().map(|(_, layout, _)| Index::of(layout)).collect();
    for (index, region) in local.regions.iter().enumerate() {
        let is_first = |other: &RegionLayout| is_same_place(other, region);
        // Layers that share their cache are filled once.
        if let Some(first) = local.regions[..index].iter().find(|other| is_first(other)) {
            check_shared(&ours, first, region, &theirs)?;
            continue;
        }
        copy_region(&ours, (index, region), (topology, rank), remote_topology, &theirs, &mut sources)?;
    }
    cover::check(local, (topology, rank), remote_topology, &sources)?;
    let kinds: Vec<GroupKind> = (0..local.group_count()).map(|group| local.group_kind(group)).collect();
    let overlaps = alias::overlaps(local);
    let alone = sources.len() == 1;
    let plan = |(source, remote, mut copies): (Rank, &BlockLayout, Vec<RegionCopy>)| {
        let ours = Grid::of(local, topology, rank);
        let theirs = Grid::of(remote, remote_topology, source);
        let whole = |grid: Grid| grid.context == 1 && grid.block_tokens == grid.kernel_tokens;
        let paired = ours.block_tokens == theirs.block_tokens && whole(ours) && whole(theirs);
        copies.sort_by_key(|c: &RegionCopy| (c.remote.memory, c.local.memory, c.local.at));
        let copies = if paired { join(copies, local, &kinds) } else { copies };
        let is_identical = alone && paired && is_identical(local, remote);
        let (kinds, overlaps) = (kinds.clone(), overlaps.clone());
        SourcePlan {
            rank: source,
            copies,
            local: ours,
            remote: theirs,
            kinds,
            overlaps,
            paired,
            is_identical,
        }
    };
    Ok(ShapePlan { sources: sources.into_iter().map(plan).collect() })
}

/// Whether two regions are the same bytes of the same blocks.
pub(super) fn is_same_place(a: &RegionLayout, b: &RegionLayout) -> bool {
    (a.group, a.memory, a.base, a.block_stride, a.block_bytes)
        == (b.group, b.memory, b.base, b.block_stride, b.block_bytes)
}

/// Tokens that are dealt out on both sides must be dealt out alike.
fn check_dealt(
    local: &BlockLayout,
    topology: Topology,
    remote: &BlockLayout,
    remote_topology: Topology,
) -> Result<(), ShapeError> {
    if topology.context > 1 && remote_topology.context > 1 && local.block_tokens != remote.block_tokens {
        return Err(ShapeError::Dealt { ours: local.block_tokens, theirs: remote.block_tokens });
    }
    if topology.context > 1 || remote_topology.context > 1 {
        let not_full = |r: &&RegionLayout| local.group_kind(r.group) != GroupKind::Full;
        if let Some(region) = local.regions.iter().find(not_full) {
            let kind = local.group_kind(region.group);
            return Err(ShapeError::DealtGroup { layer: region.layer.clone(), kind });
        }
    }
    Ok(())
}

/// Two layers that share a cache of ours get what the first of them has there. If the second one has its own there, that
/// would be lost.
fn check_shared(
    ours: &Index<'_>,
    first: &RegionLayout,
    second: &RegionLayout,
    theirs: &[Index<'_>],
) -> Result<(), ShapeError> {
    for remote in theirs {
        let (of_first, of_second) = (pairs(ours, first, remote)?, pairs(ours, second, remote)?);
        let theirs = has(remote.layout, &second.layer);
        if of_second.is_empty() && theirs != "nothing" {
            return Err(ShapeError::Layer { layer: second.layer.clone(), kind: second.kind, theirs });
        }
        for pair in &of_second {
            compare(ours.layout, second, remote.layout, &remote.layout.regions[pair.remote_region])?;
        }
        let is_same = |(a, b): (&Pair, &Pair)| {
            let region = |pair: &Pair| &remote.layout.regions[pair.remote_region];
            a.remote_element == b.remote_element && is_same_place(region(a), region(b))
        };
        let alike = of_first.len() == of_second.len() && of_first.iter().zip(&of_second).all(is_same);
        if !of_second.is_empty() && !alike {
            return Err(ShapeError::Shared { layer: second.layer.clone(), other: first.layer.clone() });
        }
    }
    Ok(())
}

type Source<'a> = (Rank, &'a BlockLayout, Vec<RegionCopy>);

/// Finds for each head of a region of ours the rank that it is read from: the first one that holds it.
fn copy_region(
    ours: &Index<'_>,
    (index, region): (usize, &RegionLayout),
    (topology, rank): (Topology, Rank),
    remote_topology: Topology,
    theirs: &[Index<'_>],
    sources: &mut [Source<'_>],
) -> Result<(), ShapeError> {
    let (first, count) = topology.heads_of(rank, region.all_heads()).unwrap_or((0, region.heads));
    let mut open: Vec<(u32, u32)> = vec![(first, first + count)];
    let local = ours.layout;
    let mut found: Option<u32> = None;
    for ((source, remote, copies), index_of_theirs) in sources.iter_mut().zip(theirs) {
        let parts = pairs(ours, region, index_of_theirs)?;
        if parts.is_empty() {
            continue;
        }
        let stage = remote_topology.stage(*source);
        if let Some(first) = found.filter(|first| *first != stage && remote_topology.context > 1) {
            return Err(ShapeError::TwoStages { layer: region.layer.clone(), first, second: stage });
        }
        found = Some(stage);
        for part in &parts {
            compare(local, region, remote, &remote.regions[part.remote_region])?;
        }
        let (their_first, their_count) =
            remote_topology.heads_of(*source, region.all_heads()).unwrap_or((0, region.heads));
        let theirs = (their_first, their_first + their_count);
        let taken: Vec<(u32, u32)> = open.iter().filter_map(|part| common(*part, theirs)).collect();
        for (from, to) in &taken {
            for part in &parts {
                let their_region = &remote.regions[part.remote_region];
                copies.push(RegionCopy {
                    group: region.group,
                    local_region: index as u32,
                    remote_region: part.remote_region as u32,
                    local: Place::of(local, region, from - first, part.local_element),
                    remote: Place::of(remote, their_region, from - their_first, part.remote_element),
                    heads: to - from,
                    row: u64::from(part.elements) * region.dtype.bytes(),
                    is_whole: false,
                });
            }
        }
        // Where tokens are dealt out every rank has some of each head.
        if remote_topology.context == 1 {
            open = open.into_iter().flat_map(|part| without(part, theirs)).collect();
        }
    }
    if found.is_none() {
        let known =
            theirs.iter().map(|remote| has(remote.layout, &region.layer)).find(|has| has != "nothing");
        let theirs = known.unwrap_or_else(|| "nothing".to_owned());
        return Err(ShapeError::Layer { layer: region.layer.clone(), kind: region.kind, theirs });
    }
    Ok(())
}

/// What must be equal, whatever the shapes are.
fn compare(
    local: &BlockLayout,
    ours: &RegionLayout,
    remote: &BlockLayout,
    theirs: &RegionLayout,
) -> Result<(), ShapeError> {
    let layer = || ours.layer.clone();
    if ours.dtype != theirs.dtype {
        return Err(ShapeError::Dtype { layer: layer(), ours: ours.dtype, theirs: theirs.dtype });
    }
    for (field, ours, theirs) in [
        ("heads over all ranks", ours.all_heads(), theirs.all_heads()),
        ("block group", ours.group, theirs.group),
    ] {
        if ours != theirs {
            return Err(ShapeError::Number { layer: layer(), field, ours, theirs });
        }
    }
    let (ours, theirs) = (local.group_kind(ours.group), remote.group_kind(theirs.group));
    if ours != theirs {
        return Err(ShapeError::Group { layer: layer(), ours, theirs });
    }
    Ok(())
}

fn common(a: (u32, u32), b: (u32, u32)) -> Option<(u32, u32)> {
    let (from, to) = (a.0.max(b.0), a.1.min(b.1));
    (from < to).then_some((from, to))
}

fn without(a: (u32, u32), b: (u32, u32)) -> impl Iterator<Item = (u32, u32)> {
    let (before, behind) = ((a.0, a.1.min(b.0)), (a.0.max(b.1), a.1));
    [before, behind].into_iter().filter(|(from, to)| from < to)
}

/// Joins copies whose whole blocks lie side by side on both sides.
fn join(copies: Vec<RegionCopy>, local: &BlockLayout, kinds: &[GroupKind]) -> Vec<RegionCopy> {
    let mut joined: Vec<RegionCopy> = Vec::with_capacity(copies.len());
    for copy in copies {
        let kind = kinds.get(copy.group as usize).copied().unwrap_or_default();
        let tokens = if kind == GroupKind::State { 1 } else { local.block_tokens };
        let pieces = copy.pieces(tokens);
        let copy = if pieces.inner.count == 1 && pieces.outer.count == 1 {
            RegionCopy { row: pieces.len, is_whole: true, ..copy }
        } else {
            copy
        };
        match joined.last_mut() {
            Some(last) if touch(last, &copy) => last.row += copy.row,
            _ => joined.push(copy),
        }
    }
    joined
}

fn touch(a: &RegionCopy, b: &RegionCopy) -> bool {
    let beside = |a: &Place, b: &Place| a.memory == b.memory && a.block == b.block && a.kernel == b.kernel;
    a.is_whole
        && b.is_whole
        && a.group == b.group
        && beside(&a.local, &b.local)
        && beside(&a.remote, &b.remote)
        && a.local.at + a.row == b.local.at
        && a.remote.at + a.row == b.remote.at
}

/// Whether both sides have the same regions in the same order, byte for byte.
fn is_identical(local: &BlockLayout, remote: &BlockLayout) -> bool {
    let of = |layout: &BlockLayout| -> Vec<(String, kv_proto::RegionKind, u32, u32, u32)> {
        let regions = layout.regions.iter();
        regions.map(|r| (r.layer.clone(), r.kind, r.group, r.heads, r.head_size)).collect()
    };
    let is_flat = |layout: &BlockLayout| layout.regions.iter().all(|r| r.heads == 1);
    (local.order == remote.order || (is_flat(local) && is_flat(remote))) && of(local) == of(remote)
}

/// The regions by their layers, for the check of what is covered.
pub(super) fn by_region(copies: &[RegionCopy]) -> BTreeMap<u32, Vec<&RegionCopy>> {
    let mut by: BTreeMap<u32, Vec<&RegionCopy>> = BTreeMap::new();
    for copy in copies {
        by.entry(copy.local_region).or_default().push(copy);
    }
    by
}
