//! Whether what arrived is what the producer has: our digests of it, and the producer's word on them.
//!
//! Each portion that is here is digested, and the producer is asked to compare, while the next one is read. When the
//! last one was found equal the lease is confirmed as ever; what was equal under a lease that held is verified.

use std::collections::BTreeMap;

use kv_proto::message::{BlockDigest, COMPARED_MAX, GroupList, WorkerMessage};
use kv_proto::{Attempt, GroupBlocks, LeaseId, LoadFailure, LoadId, Moment};

use super::{Pull, Pulls, State, not_held};
use crate::config::WorkerConfig;
use crate::digest::positions;
use crate::machine::io::{Decision, Failure, PullId, SourceKey};
use crate::machine::peers::Standing;

/// What the lists and digests of one message may take of its bytes; the rest is for all else that it says.
const LISTS_MAX_BYTES: u32 = 1_000_000;
/// Most bytes of a digest in a message, and of a block in a list.
const DIGEST_BYTES: u32 = 9;
const BLOCK_BYTES: u32 = 12;

/// What is asked with one message.
#[derive(Debug, Clone, Hash)]
struct Part {
    groups: Vec<GroupList>,
    digests: Vec<BlockDigest>,
}

/// What has been compared of a id, and what has not. All by the first position.
#[derive(Debug, Clone, Hash, Default)]
pub(super) struct Comparison {
    /// What is being read.
    portion: Vec<GroupBlocks>,
    /// What is being digested here: the producer's blocks.
    digesting: BTreeMap<u32, Vec<GroupList>>,
    /// What the producer has not answered.
    asked: BTreeMap<u32, Part>,
    /// Groups differ in length, so that a position does not stand for the same tokens in each: the first equal
    /// positions of such a load are of no use.
    unequal: bool,
}

impl Comparison {
    /// A portion is about to be read.
    pub(super) fn ordered(&mut self, mut groups: Vec<GroupBlocks>) {
        groups.sort_by_key(|group| group.group);
        self.unequal = groups.windows(2).any(|pair| pair[0].local.len() != pair[1].local.len());
        self.portion = groups;
    }

    /// The portion is here. Returns what is to be digested, if there is anything.
    pub(super) fn arrived(&mut self, from: u32) -> Option<Vec<GroupList>> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for GroupBlocks { group, remote, local, .. } in std::mem::take(&mut self.portion) {
            ours.push(GroupList { group, blocks: local });
            theirs.push(GroupList { group, blocks: remote });
        }
        if positions(&ours) == 0 {
            return None;
        }
        self.digesting.insert(from, theirs);
        Some(ours)
    }

    /// Whether nothing is left to be compared of what is here.
    pub(super) fn is_over(&self) -> bool {
        self.digesting.is_empty() && self.asked.is_empty()
    }

    /// Cuts what was digested so that each part fits a message.
    fn cut(&mut self, from: u32, groups: &[GroupList], digests: &[BlockDigest]) {
        let cost = DIGEST_BYTES + BLOCK_BYTES * u32::try_from(groups.len()).unwrap_or(u32::MAX / 16);
        let step = (LISTS_MAX_BYTES / cost).clamp(1, COMPARED_MAX) as usize;
        let mut lists: Vec<_> = groups.iter().map(|group| (group.group, group.blocks.iter())).collect();
        for (part, digests) in (0u32..).zip(digests.chunks(step)) {
            let groups = lists
                .iter_mut()
                .map(|(group, blocks)| GroupList {
                    group: *group,
                    blocks: blocks.by_ref().take(step).collect(),
                })
                .collect();
            let from = from.saturating_add(part.saturating_mul(step as u32));
            self.asked.insert(from, Part { groups, digests: digests.to_vec() });
        }
    }

    /// The first positions of the `read` ones that are known to be equal.
    fn verified(&self, read: u32) -> u32 {
        let open = [self.digesting.keys().next(), self.asked.keys().next()].into_iter().flatten().min();
        if self.unequal { 0 } else { open.copied().unwrap_or(read) }
    }
}

impl Pulls {
    /// Digests of a portion that is here were computed, or could not be.
    pub fn digested(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        id: PullId,
        from: u32,
        digests: Result<Vec<BlockDigest>, Failure>,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let Some(comparison) = &mut pull.comparison else { return };
        let Some(theirs) = comparison.digesting.remove(&from) else { return };
        match digests {
            Ok(digests) => {
                let whole = digests.len() as u64;
                comparison.cut(from, &theirs, &digests);
                let to = from.saturating_add(u32::try_from(whole).unwrap_or(u32::MAX));
                self.ask_to_compare(id, from..to, out);
            }
            Err(failure) => self.spoil(now, config, id, failure, out),
        }
    }

    /// Asks the producer to compare what it has not answered; if it is not ready, it is asked when it is.
    pub(super) fn ask_to_compare(&self, id: PullId, what: std::ops::Range<u32>, out: &mut Vec<Decision>) {
        let Some(Pull { name: (lease, offer), key, comparison: Some(comparison), .. }) =
            self.pulls.get(&id)
        else {
            return;
        };
        let Standing::Ready(link, _) = self.peers.standing(key) else { return };
        for (from, Part { groups, digests }) in comparison.asked.range(what) {
            let message = WorkerMessage::Compare {
                lease: *lease,
                attempt: Attempt(id.load.0),
                offer: *offer,
                from: *from,
                groups: groups.clone(),
                digests: digests.clone(),
            };
            out.push(Decision::Send { link, message });
        }
    }

    /// The producer has compared.
    #[allow(clippy::too_many_arguments)] // The answer's own parts, with time, configuration and output.
    pub(super) fn compared(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        lease: LeaseId,
        attempt: Attempt,
        (from, equal, held): (u32, u32, bool),
        out: &mut Vec<Decision>,
    ) {
        let id = PullId { load: LoadId(attempt.0), source: key.source };
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if pull.name.0 != lease || pull.key != *key {
            return;
        }
        let Some(comparison) = &mut pull.comparison else { return };
        // What was answered already is not asked any more, and what was never asked has no answer.
        let Some(asked) = comparison.asked.get(&from) else { return };
        if !held {
            return self.spoil(now, config, id, not_held(), out);
        }
        let count = asked.digests.len() as u32;
        if equal < count {
            if comparison.verified(pull.read) == from && !comparison.unequal {
                pull.verified = pull.verified.max(from + equal);
            }
            let engine = &pull.key.peer.engine;
            let detail = format!("block {} of the load is not what engine {engine} has", from + equal);
            return self.spoil(now, config, id, Failure::new(LoadFailure::Corrupt, detail), out);
        }
        comparison.asked.remove(&from);
        pull.verified = pull.verified.max(comparison.verified(pull.read));
        if let State::Comparing { read_at, until, repeat_at } = pull.state
            && comparison.is_over()
        {
            self.timers.clear(until, id);
            self.timers.clear(repeat_at, id);
            self.confirm(now, config, id, read_at, out);
        }
    }
}
