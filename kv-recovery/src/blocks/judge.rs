//! The rule itself: each table is looked through once for reported blocks, then, if a cached block became bad, once
//! more for those and again for each link of a chain that the first look could not follow; a bit test per block.

use std::collections::BTreeMap;

use kv_proto::BlockId;

use super::bits::Bits;
use super::{BlockRef, Cut, GroupTable, Holder, Judged, LoadState, Need, Remarks, Situation};
use crate::Policy;

/// What is known about the blocks of one group.
#[derive(Debug, Clone, Default)]
struct Group {
    /// Reported.
    invalid: Bits,
    /// Reported and found in a table.
    seen: Bits,
    /// Reported and found in more than one table.
    seen_again: Bits,
    /// Reported and found where a request may stand on it.
    judged: Bits,
    /// At or behind the first bad block of a request, and perhaps in the cache.
    tainted: Bits,
    /// Reported and perhaps in the cache, whether or not a request stands on it.
    cached: Bits,
}

/// Tokens in a block, as a number to divide by.
fn block_tokens(table: &GroupTable<'_>) -> u32 {
    table.block_tokens.get()
}

/// Tokens that counted as computed before this step.
fn base<K>(holder: &Holder<'_, K>) -> u32 {
    holder.computed.saturating_sub(holder.scheduled)
}

/// Positions of the table's blocks that hold tokens before `token`.
fn covering(table: &GroupTable<'_>, token: u32) -> usize {
    (token.div_ceil(block_tokens(table)) as usize).min(table.blocks.len())
}

/// First position that the group needs where the request stands.
fn needed_from(table: &GroupTable<'_>, token: u32) -> usize {
    match table.need {
        Need::All => 0,
        Need::Window { tokens } => (token.saturating_sub(tokens) / block_tokens(table)) as usize,
        Need::From { block } => block as usize,
    }
}

/// Positions whose blocks may be in the prefix cache.
fn cached<K>(holder: &Holder<'_, K>, table: &GroupTable<'_>) -> usize {
    match holder.state {
        LoadState::Running => table.blocks.len(),
        LoadState::Parked { cached_tokens } => {
            ((cached_tokens / block_tokens(table)) as usize).min(table.blocks.len())
        }
    }
}

/// First token that a load reported as lost has brought.
fn loaded_from<K>(holder: &Holder<'_, K>) -> u32 {
    match holder.state {
        LoadState::Running => 0,
        LoadState::Parked { cached_tokens } => cached_tokens,
    }
}

fn first_token(table: &GroupTable<'_>, position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX).saturating_mul(block_tokens(table))
}

/// Judges a situation. The answer for a request does not depend on where in the list it stands.
pub fn judge<K: Clone + Ord>(situation: &Situation<'_, K>) -> Judged<K> {
    let mut court = Court::new(situation);
    court.read_reports();
    // First bad token of each request, among the blocks it stands on.
    let mut first_bad: Vec<Option<u32>> = situation.requests.iter().map(|r| court.look(r)).collect();
    for (holder, bad) in situation.requests.iter().zip(&first_bad) {
        if let Some(from) = bad {
            court.spread(holder, *from);
        }
    }
    court.settle(&mut first_bad);
    let cuts: Vec<Cut<K>> =
        situation.requests.iter().zip(&first_bad).map(|(holder, bad)| court.cut(holder, *bad)).collect();
    let end = match situation.policy {
        Policy::Fail => cuts.iter().filter(|cut| cut.affected).map(|cut| cut.key.clone()).collect(),
        Policy::Recompute | Policy::Retry => Vec::new(),
    };
    let (evict, remarks) = court.conclude();
    Judged { cuts, evict, end, remarks }
}

struct Court<'a, K> {
    situation: &'a Situation<'a, K>,
    /// Sorted, so that a table finds its group by a search over a handful.
    numbers: Vec<u32>,
    groups: Vec<Group>,
    remarks: Remarks<K>,
    /// Reports in order, each once, without those that name nothing.
    reports: Vec<BlockRef>,
    /// Whether a cached block became bad since it was last looked for.
    spread: bool,
}

impl<'a, K: Clone + Ord> Court<'a, K> {
    fn new(situation: &'a Situation<'a, K>) -> Self {
        let mut numbers: Vec<u32> =
            situation.requests.iter().flat_map(|r| r.tables.iter().map(|t| t.group)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let groups = vec![Group::default(); numbers.len()];
        let mut remarks = Remarks {
            unknown: Vec::new(),
            unjudged: Vec::new(),
            repeated: 0,
            null: 0,
            shared: 0,
            short: Vec::new(),
            beyond_pool: Vec::new(),
            contradicting: Vec::new(),
            twice: Vec::new(),
        };
        let mut keys = BTreeMap::new();
        for holder in situation.requests {
            *keys.entry(&holder.key).or_insert(0u32) += 1;
            if holder.scheduled > holder.computed {
                remarks.contradicting.push(holder.key.clone());
            }
            let missing =
                |t: &GroupTable<'_>| (holder.computed.div_ceil(block_tokens(t)) as usize) > t.blocks.len();
            if holder.tables.iter().any(missing) {
                remarks.short.push(holder.key.clone());
            }
        }
        remarks.twice = keys.into_iter().filter(|(_, n)| *n > 1).map(|(key, _)| key.clone()).collect();
        Self { situation, numbers, groups, remarks, reports: Vec::new(), spread: false }
    }

    fn group(&mut self, table: &GroupTable<'_>) -> Option<&mut Group> {
        let at = self.numbers.binary_search(&table.group).ok()?;
        self.groups.get_mut(at)
    }

    /// Whether the id names a block at all.
    fn exists(&self, BlockId(id): BlockId) -> bool {
        id < self.situation.pool && self.situation.null != Some(BlockId(id))
    }

    fn read_reports(&mut self) {
        let mut reports = self.situation.invalid.to_vec();
        reports.sort_unstable();
        let all = reports.len();
        reports.dedup();
        self.remarks.repeated = (all - reports.len()) as u64;
        for report in reports {
            if self.situation.null == Some(report.block) {
                self.remarks.null += 1;
            } else if report.block.0 >= self.situation.pool {
                self.remarks.unknown.push(report);
            } else {
                for (number, group) in self.numbers.iter().zip(&mut self.groups) {
                    if report.group.is_none_or(|g| g == *number) {
                        group.invalid.insert(report.block.0);
                    }
                }
                self.reports.push(report);
            }
        }
    }

    /// Looks through a request's tables for reported blocks: notes where they are, returns the first bad token.
    fn look(&mut self, holder: &Holder<'_, K>) -> Option<u32> {
        let base = base(holder);
        let (pool, null) = (self.situation.pool, self.situation.null);
        let mut first: Option<u32> = None;
        let mut beyond = false;
        for table in &holder.tables {
            let (from, to) = (needed_from(table, base), covering(table, base));
            let cached = cached(holder, table);
            let lost_from =
                if holder.lost { (loaded_from(holder) / block_tokens(table)) as usize } else { usize::MAX };
            let Some(group) = self.group(table) else { continue };
            let mut bad: Option<usize> = None;
            for (position, BlockId(id)) in table.blocks.iter().enumerate() {
                if *id >= pool {
                    beyond = beyond || null != Some(BlockId(*id));
                    continue;
                }
                if !group.invalid.contains(*id) {
                    continue;
                }
                if !group.seen.insert(*id) {
                    group.seen_again.insert(*id);
                }
                if position < to {
                    // Also where the group does not look any more, it must not be found by somebody who does.
                    if position < cached {
                        group.cached.insert(*id);
                    }
                    if position >= from {
                        group.judged.insert(*id);
                        bad = bad.or(Some(position));
                    }
                }
            }
            // A lost load may have lost blocks that the table does not even show.
            if lost_from.max(from) < base.div_ceil(block_tokens(table)) as usize {
                let at = lost_from.max(from);
                bad = Some(bad.map_or(at, |other| other.min(at)));
            }
            if let Some(position) = bad {
                let token = first_token(table, position);
                first = Some(first.map_or(token, |other| other.min(token)));
            }
        }
        if beyond {
            self.remarks.beyond_pool.push(holder.key.clone());
        }
        first
    }

    /// Everything cached at or behind a bad block is bad: it may have been computed from it.
    fn spread(&mut self, holder: &Holder<'_, K>, from: u32) {
        for table in &holder.tables {
            let start = ((from / block_tokens(table)) as usize).min(table.blocks.len());
            let end = cached(holder, table).max(start);
            let pool = self.situation.pool;
            // No block has the highest id of all, since ids are below the pool's size.
            let BlockId(null) = self.situation.null.unwrap_or(BlockId(u32::MAX));
            let mut new = false;
            if let Some(group) = self.group(table) {
                for BlockId(id) in table.blocks.get(start..end).unwrap_or_default() {
                    if *id < pool && *id != null {
                        new |= group.tainted.insert(*id);
                    }
                }
            }
            self.spread |= new;
        }
    }

    /// Cuts requests that took from the cache what others made bad, until nothing changes. There is one least set
    /// of bad blocks with this property, so that the order in which it is found does not matter; the direction
    /// alternates so that a chain of requests is run through at once, whichever way it is listed.
    fn settle(&mut self, first_bad: &mut [Option<u32>]) {
        let requests = self.situation.requests;
        let mut forwards = true;
        while std::mem::take(&mut self.spread) {
            for step in 0..requests.len() {
                let at = if forwards { step } else { requests.len() - 1 - step };
                let (Some(holder), Some(known)) = (requests.get(at), first_bad.get_mut(at)) else { continue };
                let earlier = self.first_bad_before(holder, *known);
                if earlier.is_some() {
                    *known = earlier;
                    self.spread(holder, earlier.unwrap_or(0));
                }
            }
            forwards = !forwards;
        }
    }

    /// A bad token on which the request stands, before one that is known. Reported blocks are known.
    fn first_bad_before(&mut self, holder: &Holder<'_, K>, known: Option<u32>) -> Option<u32> {
        let base = base(holder);
        let mut found = None;
        for table in &holder.tables {
            // Blocks that begin before it. One of them may reach beyond it, and became bad for that: it is bad for
            // this request as for any other.
            let limit =
                found.or(known).map_or(usize::MAX, |token| token.div_ceil(block_tokens(table)) as usize);
            let (from, to) = (needed_from(table, base), covering(table, base).min(limit));
            let Some(group) = self.group(table) else { continue };
            let part = table.blocks.get(from..to.max(from)).unwrap_or_default();
            if let Some(at) = part.iter().position(|BlockId(id)| group.tainted.contains(*id)) {
                found = Some(first_token(table, from + at));
            }
        }
        found
    }

    fn cut(&self, holder: &Holder<'_, K>, bad: Option<u32>) -> Cut<K> {
        let base = base(holder);
        let key = holder.key.clone();
        let Some(bad) = bad else {
            return Cut { key, affected: false, keep_tokens: holder.computed, lost_tokens: 0 };
        };
        // Only whole blocks of every group are kept: the rest of a block is not computed into the middle of it.
        let step = holder.tables.iter().try_fold(1u32, |all, table| lcm(all, block_tokens(table)));
        let keep = step.map_or(0, |step| self.longest(holder, bad, base, step));
        Cut { key, affected: true, keep_tokens: keep, lost_tokens: base.saturating_sub(keep) }
    }

    /// The last multiple of `step` at or before `bad` from which every group can go on.
    fn longest(&self, holder: &Holder<'_, K>, bad: u32, base: u32, step: u32) -> u32 {
        let floor = |token: u32| token / step * step;
        let mut keep = floor(bad.min(base));
        // Groups that need everything before the position set a limit once: what they need only shrinks with it.
        for table in holder.tables.iter().filter(|t| !matches!(t.need, Need::Window { .. })) {
            let end = (keep / block_tokens(table)) as usize;
            let missing = |position: &usize| !table.blocks.get(*position).is_some_and(|b| self.exists(*b));
            let stop = match table.need {
                // It looked at all of its blocks where it stands: before the first bad one there is none.
                Need::All => (0..end).find(missing),
                Need::From { .. } | Need::Window { .. } => self.unsound(holder, table, 0..end),
            };
            if let Some(position) = stop {
                keep = floor(first_token(table, position));
            }
        }
        // A window has to leave the last unsound block in it behind; the one before may then hold another.
        loop {
            let mut next = keep;
            for table in holder.tables.iter().filter(|t| matches!(t.need, Need::Window { .. })) {
                let window = needed_from(table, next)..(next / block_tokens(table)) as usize;
                if let Some(position) = self.unsound(holder, table, window.rev()) {
                    next = floor(first_token(table, position));
                }
            }
            if next == keep {
                return keep;
            }
            keep = next;
        }
    }

    /// The first of these positions whose block a request cannot go on with: bad, null, or not there.
    fn unsound(
        &self,
        holder: &Holder<'_, K>,
        table: &GroupTable<'_>,
        mut positions: impl Iterator<Item = usize>,
    ) -> Option<usize> {
        let group = self.numbers.binary_search(&table.group).ok().and_then(|at| self.groups.get(at));
        let lost_from =
            if holder.lost { (loaded_from(holder) / block_tokens(table)) as usize } else { usize::MAX };
        positions.find(|position| {
            let sound = |block: &BlockId| {
                self.exists(*block)
                    && group.is_some_and(|g| !g.invalid.contains(block.0) && !g.tainted.contains(block.0))
            };
            *position >= lost_from || !table.blocks.get(*position).is_some_and(sound)
        })
    }

    fn conclude(mut self) -> (Vec<BlockRef>, Remarks<K>) {
        let mut evict = Vec::new();
        for report in std::mem::take(&mut self.reports) {
            let groups = self.numbers.iter().zip(&self.groups);
            let of = groups.filter(|(number, _)| report.group.is_none_or(|g| g == **number)).map(|(_, g)| g);
            let (mut seen, mut judged) = (false, false);
            for group in of {
                seen |= group.seen.contains(report.block.0);
                judged |= group.judged.contains(report.block.0);
            }
            if !seen {
                self.remarks.unknown.push(report);
                evict.push(report);
            } else if !judged {
                self.remarks.unjudged.push(report);
            }
        }
        self.remarks.unknown.sort_unstable();
        self.remarks.shared = self.groups.iter().map(|group| group.seen_again.count()).sum();
        let unheld = !evict.is_empty();
        for (number, group) in self.numbers.iter().zip(&self.groups) {
            let all = group.tainted.union(&group.cached);
            evict.reserve(all.count() as usize);
            all.each(|id| evict.push(BlockRef::of(*number, id)));
        }
        // Groups and their ids come in order; what nobody holds stands before them, where it may not belong.
        if unheld {
            evict.sort_unstable();
        }
        // Lists do not tell where in the input a request stood.
        for keys in [&mut self.remarks.short, &mut self.remarks.beyond_pool, &mut self.remarks.contradicting]
        {
            keys.sort_unstable();
        }
        (evict, self.remarks)
    }
}

fn lcm(a: u32, b: u32) -> Option<u32> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}
