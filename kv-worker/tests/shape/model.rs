//! What must be where, byte by byte, told from the layouts, topologies and block tables alone. Each byte of a pool is a
//! number of its own, so that no two of them can be taken for each other.

use std::collections::BTreeMap;

use kv_proto::{BlockOrder, GroupBlocks, GroupKind, Rank, RegionKind};
use kv_transport::{ReadPart, RegionId, RegionKey};
use kv_worker::portions::Portions;
use kv_worker::shape::{RemoteRank, ShapePlan, Side, SourcePlan, check_blocks, compile};

use crate::world::{Engine, Layer, Pair, Part};

/// A pool's memories, one number for each byte.
pub(crate) type Bytes = Vec<Vec<u32>>;

const UNNAMED: u32 = 0x4000_0000;
const CANARY: u32 = 0x8000_0000;

/// One byte of what a layer keeps.
#[derive(Debug, Clone, Copy)]
struct Cell {
    layer: usize,
    part: usize,
    head: u32,
    /// 0 for a state.
    token: u32,
    byte: u32,
}

impl Cell {
    /// Its number: the same for the same byte on both sides.
    fn number(self, name: u32) -> u32 {
        name << 24 | (self.part as u32) << 22 | self.head << 17 | self.token << 6 | self.byte
    }
}

fn bytes_of(layer: &Layer, part: &Part) -> u32 {
    part.size * layer.dtype.bytes() as u32
}

/// Calls `each` with every byte that a rank keeps in the blocks of one side's lists, and where it lies.
fn walk(engine: &Engine, rank: u32, lists: &[(u32, Vec<u32>)], mut each: impl FnMut(Cell, usize, usize)) {
    let tensor = engine.topology.ranks / engine.topology.stages;
    let (stage, seat) = (rank / tensor, rank % tensor);
    let layout = &engine.ranks[rank as usize].layout;
    for (index, layer) in engine.layers.iter().enumerate().filter(|(_, layer)| layer.stage == stage) {
        let (first, list) = &lists[layer.group as usize];
        let is_state = engine.kinds[layer.group as usize] == GroupKind::State;
        for (number, part) in layer.parts.iter().enumerate() {
            // The region that holds the part, and where a head's row of it begins in there.
            let alone = layout.regions.iter().find(|r| r.layer == layer.name && r.kind == part.kind);
            let both =
                || layout.regions.iter().find(|r| r.layer == layer.name && r.kind == RegionKind::KeyValue);
            let region = alone.or_else(both).expect("a rank of the layer's stage keeps it");
            let begin = match part.kind {
                RegionKind::Value if alone.is_none() => bytes_of(layer, &layer.parts[0]),
                _ => 0,
            };
            let row = region.head_size * layer.dtype.bytes() as u32;
            // Which heads are here: of each head, whether it is, and as which one.
            let here: Vec<u32> = (0..part.heads)
                .filter(|head| match part.heads >= tensor {
                    true => head / (part.heads / tensor) == seat,
                    false => *head == seat / (tensor / part.heads),
                })
                .collect();
            for (entry, block) in list.iter().enumerate() {
                let entry_tokens = if is_state { 1 } else { engine.block_tokens * engine.topology.context };
                for slot in 0..entry_tokens {
                    let (kernels, kernel_tokens, slot_here) = if is_state {
                        (1, 1, 0)
                    } else {
                        // The ranks take turns, a block each.
                        if engine.topology.context > 1 && slot / engine.block_tokens != seat {
                            continue;
                        }
                        let kernels = engine.block_tokens / engine.kernel_tokens;
                        (kernels, engine.kernel_tokens, slot % engine.block_tokens)
                    };
                    let token = if is_state { 0 } else { (first + entry as u32) * entry_tokens + slot };
                    let kernel = u64::from(slot_here / kernel_tokens);
                    let block_at = region.base
                        + u64::from(*block) * region.block_stride
                        + kernel * (region.block_stride / u64::from(kernels));
                    let in_kernel = slot_here % kernel_tokens;
                    for (local, head) in here.iter().enumerate() {
                        let local = local as u32;
                        let row_number = match engine.order {
                            BlockOrder::HeadsTokens => local * kernel_tokens + in_kernel,
                            _ => in_kernel * here.len() as u32 + local,
                        };
                        let at = block_at + u64::from(row_number * row + begin);
                        for byte in 0..bytes_of(layer, part) {
                            let cell = Cell { layer: index, part: number, head: *head, token, byte };
                            each(cell, region.memory as usize, at as usize + byte as usize);
                        }
                    }
                }
            }
        }
    }
}

fn blank(sizes: &[u64], mark: u32) -> Bytes {
    let mut number = mark;
    let mut next = || {
        number += 1;
        number
    };
    sizes.iter().map(|size| (0..*size).map(|_| next()).collect()).collect()
}

/// The layer whose cache a layer looks at in the end.
fn root(engine: &Engine, mut index: usize) -> usize {
    while engine.layers[index].looks_at != index {
        index = engine.layers[index].looks_at;
    }
    index
}

fn by_name<'a>(engine: &'a Engine, name: &str) -> Option<(usize, &'a Layer)> {
    engine.layers.iter().enumerate().find(|(_, layer)| layer.name == name)
}

/// Why a pair cannot be brought together: of each reason what a message about it must say. Empty: it can.
pub(crate) fn reasons(pair: &Pair) -> Vec<(&'static str, Vec<String>)> {
    let mut all: Vec<(&'static str, Vec<String>)> = Vec::new();
    let (p, d) = (&pair.p, &pair.d);
    for engine in [p, d] {
        let tensor = engine.topology.ranks / engine.topology.stages;
        for part in engine.layers.iter().flat_map(|l| &l.parts) {
            if !part.heads.is_multiple_of(tensor) && !tensor.is_multiple_of(part.heads) {
                all.push((
                    "uneven heads",
                    vec![format!("has {} heads", part.heads), format!("even over {tensor} ")],
                ));
            }
            if engine.topology.context > 1 && part.heads != 1 {
                all.push(("dealt heads", vec![format!("{} heads", part.heads)]));
            }
        }
    }
    let (p_dealt, d_dealt) = (p.topology.context > 1, d.topology.context > 1);
    if p_dealt && d_dealt && p.block_tokens != d.block_tokens {
        all.push(("dealt sizes", vec![d.block_tokens.to_string(), p.block_tokens.to_string()]));
    }
    for (index, ours) in d.layers.iter().enumerate() {
        let kind = d.kinds[ours.group as usize];
        if (p_dealt || d_dealt) && kind != GroupKind::Full {
            all.push(("dealt group", vec![kind.to_string()]));
        }
        let Some((their_index, theirs)) = by_name(p, &ours.name) else {
            all.push(("no layer", vec![ours.name.clone(), "nothing".to_owned()]));
            continue;
        };
        let kinds = |layer: &Layer| -> Vec<RegionKind> { layer.parts.iter().map(|part| part.kind).collect() };
        if kinds(ours) != kinds(theirs) {
            all.push(("half a layer", vec![ours.name.clone(), theirs.parts[0].kind.to_string()]));
            continue;
        }
        let differ = |what, ours: String, theirs: String| {
            (ours != theirs).then(|| (what, vec![format!(" {ours}"), format!(" {theirs}")]))
        };
        let sum = |layer: &Layer| layer.parts.iter().map(|part| part.size).sum::<u32>().to_string();
        all.extend(differ("head sizes", sum(ours), sum(theirs)));
        for (our_part, their_part) in ours.parts.iter().zip(&theirs.parts) {
            all.extend(differ("head size", our_part.size.to_string(), their_part.size.to_string()));
            all.extend(differ("heads", our_part.heads.to_string(), their_part.heads.to_string()));
        }
        all.extend(differ("dtype", ours.dtype.to_string(), theirs.dtype.to_string()));
        all.extend(differ("group", ours.group.to_string(), theirs.group.to_string()));
        let their_kind = p.kinds[theirs.group as usize];
        all.extend(differ("kind of group", kind.to_string(), their_kind.to_string()));
        for other in (0..index).filter(|other| root(d, *other) == root(d, index)) {
            if let Some((other_there, other)) = by_name(p, &d.layers[other].name)
                && root(p, other_there) != root(p, their_index)
            {
                all.push(("one cache for two", vec![ours.name.clone(), other.name.clone()]));
            }
        }
    }
    all
}

/// What a byte of the consumer may hold after a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// What it held before.
    Untouched,
    /// This.
    Must(u32),
    /// This, or what it held before: a token of a named block that nobody looks at.
    May(u32),
    /// Anything: a place behind the last token.
    Free,
}

type Lists = Vec<(u32, Vec<u32>)>;

fn lists(pair: &Pair, of: impl Fn(&GroupBlocks) -> (u32, Vec<u32>)) -> Lists {
    pair.groups.iter().map(of).collect()
}

/// What the producer's ranks hold.
fn producer(pair: &Pair) -> Vec<Bytes> {
    let remote = lists(pair, |g| (g.remote_first, g.remote.iter().map(|b| b.0).collect()));
    let fill = |(rank, cache): (usize, &crate::caches::RankCache)| {
        let mut bytes = blank(&cache.sizes, UNNAMED);
        walk(&pair.p, rank as u32, &remote, |cell, memory, at| {
            bytes[memory][at] = cell.number(root(&pair.p, cell.layer) as u32);
        });
        bytes
    };
    pair.p.ranks.iter().enumerate().map(fill).collect()
}

/// What each byte of a consumer's rank may hold after the load.
fn fates(pair: &Pair, rank: u32) -> Vec<Vec<Fate>> {
    let (p, d) = (&pair.p, &pair.d);
    let local = lists(pair, |g| (g.first, g.local.iter().map(|b| b.0).collect()));
    let sizes = &d.ranks[rank as usize].sizes;
    let mut fates: Vec<Vec<Fate>> = sizes.iter().map(|s| vec![Fate::Untouched; *s as usize]).collect();
    walk(d, rank, &local, |cell, memory, at| {
        let layer = &d.layers[cell.layer];
        let there = by_name(p, &layer.name).expect("the pair fits").0;
        let number = cell.number(root(p, there) as u32);
        let looked_at = match d.kinds[layer.group as usize] {
            GroupKind::Window { tokens } => pair.tokens.saturating_sub(tokens),
            _ => 0,
        };
        fates[memory][at] = if cell.token >= pair.tokens {
            Fate::Free
        } else if cell.token < looked_at {
            Fate::May(number)
        } else {
            Fate::Must(number)
        };
    });
    fates
}

/// Memories with handles, as a transport would give them.
struct Handles {
    regions: Vec<RegionId>,
    keys: Vec<RegionKey>,
}

impl Handles {
    fn of(ours: usize, theirs: usize) -> Self {
        let key = |index: usize| RegionKey::from_bytes(vec![index as u8]).unwrap();
        Self { regions: (0..ours as u64).map(RegionId).collect(), keys: (0..theirs).map(key).collect() }
    }

    fn side(&self) -> Side<'_> {
        Side { regions: &self.regions, keys: &self.keys }
    }
}

/// Copies what a plan says. Every range must be inside both memories, read named bytes only, and write no byte twice.
fn apply(parts: &[ReadPart], theirs: &Bytes, ours: &mut Bytes) -> Result<(), String> {
    for part in parts {
        let (from, to) = (part.key.as_bytes()[0] as usize, part.region.0 as usize);
        for range in &part.ranges {
            let span = |at: u64| at as usize..(at + range.len) as usize;
            let source = theirs[from].get(span(range.remote_offset)).ok_or("a range beyond their memory")?;
            let target = ours[to].get_mut(span(range.local_offset)).ok_or("a range beyond our memory")?;
            if source.is_empty() {
                return Err("an empty range".to_owned());
            }
            for (theirs, ours) in source.iter().zip(target) {
                if *theirs >= UNNAMED {
                    return Err(format!("a byte of no named block is read: {range:?} of memory {from}"));
                }
                if *ours < UNNAMED {
                    return Err(format!("a byte is written twice: {range:?} of memory {to}"));
                }
                *ours = *theirs;
            }
        }
    }
    Ok(())
}

/// How many ranges the copies of one source make when all neighbours are joined, whatever the ranges were.
fn runs(parts: &[ReadPart]) -> usize {
    let mut from: BTreeMap<(u64, u8, u64), u64> = BTreeMap::new();
    for part in parts {
        for range in &part.ranges {
            for byte in 0..range.len {
                let key = (part.region.0, part.key.as_bytes()[0], range.local_offset + byte);
                from.insert(key, range.remote_offset + byte);
            }
        }
    }
    let begins = |((ours, theirs, at), remote): (&(u64, u8, u64), &u64)| {
        let before = at.checked_sub(1).and_then(|at| from.get(&(*ours, *theirs, at)));
        before.is_none_or(|before| before + 1 != *remote)
    };
    from.iter().filter(|(key, remote)| begins((key, remote))).count()
}

fn compare(fates: &[Vec<Fate>], before: &Bytes, after: &Bytes) -> Result<(), String> {
    for (memory, fates) in fates.iter().enumerate() {
        for (at, fate) in fates.iter().enumerate() {
            let (was, is) = (before[memory][at], after[memory][at]);
            let fine = match fate {
                Fate::Untouched => is == was,
                Fate::Must(number) => is == *number,
                Fate::May(number) => is == was || is == *number,
                Fate::Free => true,
            };
            if !fine {
                return Err(format!(
                    "byte {at} of memory {memory}: {is:#x}, was {was:#x}, should be {fate:x?}"
                ));
            }
        }
    }
    Ok(())
}

/// How a pair was judged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Refused, rightly, for this among others.
    Refused(Vec<&'static str>),
    /// All ranks read what they need: so many bytes in so many ranges. Of so many ranks blocks are alike.
    Read { bytes: u64, ranges: u64, identical: u64 },
}

fn refusal_is_told(message: &str, reasons: &[(&'static str, Vec<String>)]) -> Result<(), String> {
    if reasons.is_empty() {
        return Err(format!("refused, but can be brought together: {message}"));
    }
    if !reasons.iter().any(|(_, values)| values.iter().all(|value| message.contains(value))) {
        return Err(format!("{message:?} tells none of {reasons:?}"));
    }
    Ok(())
}

/// Compiles and applies a pair for every rank of the consumer, and compares with what must be.
pub(crate) fn judge(pair: &Pair, portion: Option<u64>) -> Result<Verdict, String> {
    let reasons = reasons(pair);
    let remotes: Vec<RemoteRank<'_>> =
        (0..).zip(pair.p.layouts()).map(|(rank, layout)| RemoteRank { rank: Rank(rank), layout }).collect();
    let mut plans: Vec<ShapePlan> = Vec::new();
    let mut refused = false;
    for (rank, layout) in (0..).zip(pair.d.layouts()) {
        match compile(layout, Rank(rank), pair.d.topology, &remotes, pair.p.topology) {
            Ok(plan) => plans.push(plan),
            Err(error) => {
                refusal_is_told(&error.to_string(), &reasons)?;
                refused = true;
            }
        }
    }
    if refused {
        return Ok(Verdict::Refused(reasons.into_iter().map(|(what, _)| what).collect()));
    }
    if !reasons.is_empty() {
        return Err(format!("accepted in spite of {reasons:?}"));
    }
    let theirs = producer(pair);
    let (mut bytes, mut ranges, mut identical) = (0, 0, 0);
    for (rank, plan) in plans.iter().enumerate() {
        let cache = &pair.d.ranks[rank];
        let before = blank(&cache.sizes, CANARY);
        let fates = fates(pair, rank as u32);
        let mut after = before.clone();
        for source in &plan.sources {
            let parts = read(pair, source, cache.sizes.len(), &pair.groups)?;
            apply(&parts, &theirs[source.rank.0 as usize], &mut after)
                .map_err(|e| format!("rank {rank} from {}: {e}", source.rank))?;
            let count: usize = parts.iter().map(|part| part.ranges.len()).sum();
            let fewest = runs(&parts);
            if count != fewest {
                return Err(format!("rank {rank} from {}: {count} ranges, {fewest} would do", source.rank));
            }
            ranges += count as u64;
            bytes += parts.iter().flat_map(|part| &part.ranges).map(|range| range.len).sum::<u64>();
        }
        compare(&fates, &before, &after).map_err(|e| format!("rank {rank}: {e}"))?;
        if let [source] = &plan.sources[..]
            && source.is_identical()
        {
            identical += 1;
            alike(pair, rank, &after, source.rank, &theirs[source.rank.0 as usize])?;
        }
        if let Some(size) = portion {
            in_portions(pair, plan, rank, size, &theirs, &after)?;
        }
    }
    Ok(Verdict::Read { bytes, ranges, identical })
}

fn read(
    pair: &Pair,
    source: &SourcePlan,
    ours: usize,
    groups: &[GroupBlocks],
) -> Result<Vec<ReadPart>, String> {
    let handles = Handles::of(ours, pair.p.ranks[source.rank.0 as usize].sizes.len());
    check_blocks(source, groups).map_err(|e| format!("sound blocks are refused: {e}: {groups:?}"))?;
    source.read_parts(handles.side(), groups).map_err(|e| e.to_string())
}

/// Where a plan says that blocks are alike, their digests are compared: region by region the same bytes.
fn alike(pair: &Pair, rank: usize, after: &Bytes, source: Rank, theirs: &Bytes) -> Result<(), String> {
    let (d, p) = (&pair.d.ranks[rank].layout, &pair.p.ranks[source.0 as usize].layout);
    for group in &pair.groups {
        let last = |blocks: &kv_proto::BlockList| blocks.iter().last();
        let position = |first: u32, index: usize| first as usize + index;
        let pairs: Vec<_> = if pair.d.kinds[group.group as usize] == GroupKind::State {
            last(&group.local).into_iter().zip(last(&group.remote)).collect()
        } else {
            let at = |wanted: usize| {
                let mut remote = group.remote.iter().enumerate();
                remote
                    .find(|(index, _)| position(group.remote_first, *index) == wanted)
                    .map(|(_, block)| block)
            };
            let local = group.local.iter().enumerate();
            local.filter_map(|(index, block)| Some((block, at(position(group.first, index))?))).collect()
        };
        for (ours, theirs_block) in pairs {
            let of_group = |r: &&kv_proto::RegionLayout| r.group == group.group;
            for (a, b) in d.regions.iter().filter(of_group).zip(p.regions.iter().filter(of_group)) {
                let span = |r: &kv_proto::RegionLayout, block: u32| {
                    let at = (r.base + u64::from(block) * r.block_stride) as usize;
                    at..at + r.block_bytes as usize
                };
                let here = &after[a.memory as usize][span(a, ours.0)];
                if here != &theirs[b.memory as usize][span(b, theirs_block.0)] {
                    return Err(format!("rank {rank}: block {} of layer {} is not alike", ours.0, a.layer));
                }
            }
        }
    }
    Ok(())
}

/// The same load cut into portions must end in the same bytes.
fn in_portions(
    pair: &Pair,
    plan: &ShapePlan,
    rank: usize,
    size: u64,
    theirs: &[Bytes],
    whole: &Bytes,
) -> Result<(), String> {
    let cache = &pair.d.ranks[rank];
    let mut after = blank(&cache.sizes, CANARY);
    let Some(first) = plan.sources.first() else { return Err("no sources".to_owned()) };
    let mut portions = Portions::of(pair.groups.clone(), first, &cache.layout, size);
    while !portions.is_over() {
        let groups = portions.take();
        for source in &plan.sources {
            let parts = read(pair, source, cache.sizes.len(), &groups)?;
            apply(&parts, &theirs[source.rank.0 as usize], &mut after)
                .map_err(|e| format!("rank {rank} from {} in portions of {size}: {e}", source.rank))?;
        }
    }
    if after != *whole {
        return Err(format!("rank {rank}: portions of {size} bytes end in other bytes than the whole"));
    }
    Ok(())
}
