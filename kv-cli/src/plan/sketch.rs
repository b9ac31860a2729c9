//! What the compiler makes of two engines, in figures: who reads what from whom.

use std::collections::{BTreeMap, BTreeSet};

use kv_connector::proto::{BlockId, BlockLayout, BlockList, GroupBlocks, GroupKind, Rank, RegionLayout};
use kv_connector::shape::{RemoteRank, ShapePlan, Side, SourcePlan, compile};
use kv_connector::transport::{ReadPart, ReadRange, RegionId, RegionKey};
use serde::Serialize;

use super::file::Engine;
use crate::error::Failure;

/// The whole plan.
#[derive(Serialize)]
pub(super) struct Sketch {
    pub(super) fits: bool,
    /// Of the sample prompt.
    pub(super) tokens: u32,
    pub(super) consumer: Vec<Reader>,
    pub(super) producer: Vec<Served>,
}

/// A rank of the consumer.
#[derive(Serialize)]
pub(super) struct Reader {
    pub(super) rank: u32,
    pub(super) sources: Vec<Source>,
    /// Ranks of the producer that are only told.
    pub(super) silent: Vec<u32>,
    /// Of groups whose blocks hold tokens.
    pub(super) bytes_per_token: u64,
    /// Over all groups.
    pub(super) bytes_per_block: u64,
    pub(super) state_bytes: u64,
    /// Every byte that must be filled is, by one source alone.
    pub(super) covered: bool,
    /// Blocks are byte for byte alike, so that checksums can be compared.
    pub(super) identical: bool,
    #[serde(flatten)]
    pub(super) sample: Sample,
}

/// A rank of the producer that a rank reads from.
#[derive(Serialize)]
pub(super) struct Source {
    pub(super) rank: u32,
    pub(super) reads: Vec<Share>,
    #[serde(flatten)]
    pub(super) sample: Sample,
}

/// What of one group.
#[derive(Serialize)]
pub(super) struct Share {
    pub(super) group: u32,
    pub(super) kind: String,
    /// By number, of the model.
    pub(super) layers: Vec<u32>,
    /// By number, over all ranks.
    pub(super) heads: Vec<u32>,
}

/// What the sample prompt takes.
#[derive(Serialize, Clone, Copy, Default)]
pub(super) struct Sample {
    pub(super) bytes: u64,
    /// Before neighbours are joined.
    pub(super) pieces: u64,
    /// Where blocks lie one after the other on both sides.
    pub(super) ranges: u64,
    /// Where no two blocks are neighbours on both sides.
    pub(super) ranges_scattered: u64,
}

/// A rank of the producer.
#[derive(Serialize)]
pub(super) struct Served {
    pub(super) rank: u32,
    pub(super) readers: Vec<u32>,
}

/// Why a pair does not fit, and which rank of the consumer says so.
pub(super) struct Refused {
    pub(super) rank: u32,
    pub(super) why: String,
}

/// Compiles every rank of the consumer.
pub(super) fn sketch(p: &Engine, d: &Engine, tokens: u32) -> Result<Result<Sketch, Refused>, Failure> {
    let remotes: Vec<RemoteRank<'_>> =
        (0..).zip(&p.layouts).map(|(rank, layout)| RemoteRank { rank: Rank(rank), layout }).collect();
    let mut consumer = Vec::new();
    for (rank, layout) in (0..).zip(&d.layouts) {
        match compile(layout, Rank(rank), d.topology, &remotes, p.topology) {
            Ok(plan) => consumer.push(reader(p, d, rank, &plan, tokens)?),
            Err(error) => return Ok(Err(Refused { rank, why: error.to_string() })),
        }
    }
    let mut producer = Vec::new();
    for rank in 0..p.topology.ranks {
        let readers = p.topology.readers_of(Rank(rank), d.topology);
        let readers = readers.map_err(|e| Failure::new("readers", e))?;
        producer.push(Served { rank, readers: readers.into_iter().map(|r| r.0).collect() });
    }
    Ok(Ok(Sketch { fits: true, tokens, consumer, producer }))
}

/// The load of a whole prompt, with blocks from 0 on; theirs backwards, if they are to be scattered.
fn load(p: &Engine, d: &Engine, layout: &BlockLayout, tokens: u32, scattered: bool) -> Vec<GroupBlocks> {
    let list = |count: u32, backwards: bool| -> BlockList {
        (0..count).map(|i| BlockId(if backwards { count - 1 - i } else { i })).collect()
    };
    let (theirs, ours) = (p.entry_tokens(), d.entry_tokens());
    let kinds = layout.group_kinds().enumerate();
    let of = |(group, kind): (usize, GroupKind)| {
        let (remote_first, remote, local) = match kind {
            GroupKind::State => (0, 1, 1),
            // Of a window the producer hands over no more than is looked at.
            _ => {
                let first = kind.first_token(tokens) / theirs;
                (first, tokens.div_ceil(theirs) - first, tokens.div_ceil(ours))
            }
        };
        GroupBlocks {
            group: group as u32,
            first: 0,
            remote_first,
            tokens,
            remote: list(remote, scattered),
            local: list(local, false),
        }
    };
    kinds.map(of).collect()
}

fn read(source: &SourcePlan, groups: &[GroupBlocks]) -> Result<Vec<ReadPart>, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::new("a sample load", e);
    let key = RegionKey::from_bytes(vec![0]).map_err(|e| failed(&e))?;
    let side = Side { regions: &[RegionId(0)], keys: &[key] };
    source.read_parts(side, groups).map_err(|e| failed(&e))
}

fn sample(
    p: &Engine,
    d: &Engine,
    layout: &BlockLayout,
    source: &SourcePlan,
    tokens: u32,
) -> Result<Sample, Failure> {
    let ranges = |parts: &[ReadPart]| parts.iter().map(|part| part.ranges.len() as u64).sum();
    let (neighbours, scattered) = (load(p, d, layout, tokens, false), load(p, d, layout, tokens, true));
    let parts = read(source, &neighbours)?;
    Ok(Sample {
        bytes: parts.iter().flat_map(|part| &part.ranges).map(|range| range.len).sum(),
        pieces: source.piece_count(&neighbours).map_err(|e| Failure::new("a sample load", e))?,
        ranges: ranges(&parts),
        ranges_scattered: ranges(&read(source, &scattered)?),
    })
}

fn reader(p: &Engine, d: &Engine, rank: u32, plan: &ShapePlan, tokens: u32) -> Result<Reader, Failure> {
    let layout = &d.layouts[rank as usize];
    let is_state = |r: &&RegionLayout| layout.group_kind(r.group) == GroupKind::State;
    let bytes = |state: bool| -> u64 {
        layout.regions.iter().filter(|r| is_state(r) == state).map(|r| r.block_bytes).sum()
    };
    // As many tokens as it takes until each rank that tokens are dealt out to has had a turn.
    let probe = p.entry_tokens().max(d.entry_tokens()).saturating_mul(2);
    let groups = load(p, d, layout, probe, false);
    let mut found = Found::of(d, rank, &groups);
    let (mut sources, mut silent, mut sum) = (vec![], vec![], Sample::default());
    for source in &plan.sources {
        let ranges: Vec<ReadRange> =
            read(source, &groups)?.into_iter().flat_map(|part| part.ranges).collect();
        let reads = found.shares(&ranges);
        if reads.is_empty() {
            silent.push(source.rank.0);
            continue;
        }
        let sample = sample(p, d, layout, source, tokens)?;
        sum.bytes += sample.bytes;
        sum.pieces += sample.pieces;
        sum.ranges += sample.ranges;
        sum.ranges_scattered += sample.ranges_scattered;
        sources.push(Source { rank: source.rank.0, reads, sample });
    }
    Ok(Reader {
        rank,
        identical: plan.sources.iter().all(SourcePlan::is_identical),
        sources,
        silent,
        bytes_per_token: bytes(false) / u64::from(layout.block_tokens),
        bytes_per_block: bytes(false),
        state_bytes: bytes(true),
        covered: found.is_covered(),
        sample: sum,
    })
}

/// Where each head of each region lies in the blocks of a load, and how much of it was read.
struct Found<'a> {
    layout: &'a BlockLayout,
    /// By their begin: end, region, head over all ranks, and how often all of it was read.
    rows: BTreeMap<u64, Row>,
}

struct Row {
    end: u64,
    region: usize,
    head: u32,
    needed: bool,
    read: u64,
}

impl<'a> Found<'a> {
    fn of(d: &'a Engine, rank: u32, groups: &[GroupBlocks]) -> Self {
        let layout = &d.layouts[rank as usize];
        let mut rows = BTreeMap::new();
        for (index, region) in layout.regions.iter().enumerate() {
            let Some(group) = groups.iter().find(|g| g.group == region.group) else { continue };
            let kind = layout.group_kind(region.group);
            let is_state = kind == GroupKind::State;
            let (kernels, slots) =
                if is_state { (1, 1) } else { (layout.kernel_blocks(), layout.tokens_of_kernel()) };
            let row = u64::from(region.head_size) * region.dtype.bytes();
            let (head_step, token_step) = layout.order.steps(u64::from(region.heads), u64::from(slots), row);
            let first_head =
                d.topology.heads_of(Rank(rank), region.all_heads()).map_or(0, |(first, _)| first);
            let share = u64::from(d.topology.context_rank(Rank(rank)));
            for (entry, BlockId(block)) in (0u64..).zip(group.local.iter()) {
                for kernel in 0..u64::from(kernels) {
                    for slot in 0..u64::from(slots) {
                        let in_block = kernel * u64::from(slots) + slot;
                        let block_tokens = u64::from(layout.block_tokens);
                        let token = (entry * u64::from(d.topology.context) + share) * block_tokens + in_block;
                        let looked_at = u64::from(kind.first_token(group.tokens))..u64::from(group.tokens);
                        for head in 0..region.heads {
                            let at = region.base
                                + u64::from(block) * region.block_stride
                                + kernel * (region.block_stride / u64::from(kernels))
                                + slot * token_step
                                + u64::from(head) * head_step;
                            let needed = is_state || looked_at.contains(&token);
                            let head = first_head + head;
                            rows.insert(at, Row { end: at + row, region: index, head, needed, read: 0 });
                        }
                    }
                }
            }
        }
        Self { layout, rows }
    }

    /// Counts the bytes of one source, and tells what they are of.
    fn shares(&mut self, ranges: &[ReadRange]) -> Vec<Share> {
        let mut of: BTreeMap<u32, (BTreeSet<u32>, BTreeSet<u32>)> = BTreeMap::new();
        for range in ranges {
            let (from, to) = (range.local_offset, range.local_offset + range.len);
            let first = self.rows.range(..=from).next_back().map_or(from, |(at, _)| *at);
            for (at, row) in self.rows.range_mut(first..to) {
                let common = row.end.min(to).saturating_sub((*at).max(from));
                if common == 0 {
                    continue;
                }
                row.read += common;
                let region = &self.layout.regions[row.region];
                let (layers, heads) = of.entry(region.group).or_default();
                layers.extend(region.layer.rsplit('.').next().and_then(|n| n.parse::<u32>().ok()));
                heads.insert(row.head);
            }
        }
        let share = |(group, (layers, heads)): (u32, (BTreeSet<u32>, BTreeSet<u32>))| Share {
            group,
            kind: self.layout.group_kind(group).to_string(),
            layers: layers.into_iter().collect(),
            heads: heads.into_iter().collect(),
        };
        of.into_iter().map(share).collect()
    }

    fn is_covered(&self) -> bool {
        self.rows.iter().all(|(at, row)| row.read == row.end - at || (!row.needed && row.read == 0))
    }
}
