//! The producer's policy: which finished requests keep their blocks, under which lease, and when the blocks are
//! free again.
//!
//! ```text
//!  arrived ──► Computing ──finished──► Held ──every rank reported an end──► (released)
//!                  └──aborted, incomplete or empty──► (forgotten)
//! ```

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use kv_proto::params::PrefixMarks;
use kv_proto::{
    BlockList, GroupKind, LeaseEnd, LeaseId, Moment, ProducerOrder, Rank, RemotePrefill, RequestId, Timers,
    token_digest,
};
use serde_json::{Map, Value};

use crate::config::SchedConfig;
use crate::event::{Finish, HoldId, RequestEnd, SchedEvent, Verdict};
use crate::machine::staging::StagedBlocks;

/// What is remembered of a prompt, and what an offer says of the tokens that it covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Prompt {
    /// Its tokens.
    ids: Arc<[u32]>,
    /// How many they are.
    tokens: u32,
    /// Their digest; of none it is empty.
    digest: String,
    /// Digests of its shorter prefixes.
    marks: PrefixMarks,
}

impl Prompt {
    /// What is to be remembered of these tokens, which are as many as `tokens` says.
    pub fn of(ids: &[u32], tokens: u32, block_tokens: u32) -> Self {
        let marks = PrefixMarks::of(ids, block_tokens);
        Self { ids: ids.into(), tokens, digest: token_digest(ids), marks }
    }

    /// The same with what was sampled behind it, up to the last token that is computed.
    fn and(self, sampled: &[u32], computed_tokens: u32, block_tokens: u32) -> Self {
        let more = computed_tokens.saturating_sub(self.tokens) as usize;
        let more = sampled.get(..more).unwrap_or(sampled);
        match u32::try_from(more.len()).ok().and_then(|more| self.tokens.checked_add(more)) {
            Some(tokens) if tokens > self.tokens => {
                Self::of(&[&self.ids[..], more].concat(), tokens, block_tokens)
            }
            _ => self,
        }
    }
}

/// What is handed over: the blocks that are kept, by group, and where each list begins.
#[derive(Debug, Clone, Default)]
struct Handed {
    blocks: Vec<BlockList>,
    firsts: Vec<u32>,
}

/// A request that computes for somebody else.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Computing {
    lease: LeaseId,
    prompt: Prompt,
    /// Keys that came with the request and are not ours; they go back with the answer.
    other: Map<String, Value>,
}

/// A hand-over whose blocks are kept.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    request: RequestId,
    blocks: Vec<BlockList>,
    ended: BTreeMap<Rank, LeaseEnd>,
    overdue_at: Moment,
    /// Whether it was taken back; its end is on the way.
    taken_back: bool,
}

/// Counters of the producer side. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct ProducerStats {
    /// Leases granted.
    pub granted: u64,
    /// Leases that ended with every reader confirmed.
    pub confirmed: u64,
    /// Leases that ended because their readers gave them back.
    pub released: u64,
    /// Leases that ended by time on at least one rank.
    pub expired: u64,
    /// Leases whose consumers died, as far as at least one rank knows.
    pub consumer_lost: u64,
    /// Leases that were taken back.
    pub revoked: u64,
    /// Requests that were to be handed over and were not: aborted, incomplete or empty.
    pub forgotten: u64,
    /// Reports of ends that were known or of leases that were not: harmless.
    pub stray_ends: u64,
}

impl Hash for ProducerStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The machine. One per engine.
#[derive(Debug, Clone, Hash)]
pub struct Producer {
    next_lease: u64,
    computing: BTreeMap<RequestId, Computing>,
    held: BTreeMap<LeaseId, Held>,
    timers: Timers<LeaseId>,
    stats: ProducerStats,
}

impl Default for Producer {
    fn default() -> Self {
        Self::new()
    }
}

impl Producer {
    /// A machine without requests.
    pub fn new() -> Self {
        Self {
            next_lease: 1,
            computing: BTreeMap::new(),
            held: BTreeMap::new(),
            timers: Timers::default(),
            stats: ProducerStats::default(),
        }
    }

    /// Whether the request is computing for somebody else.
    pub fn knows(&self, request: &RequestId) -> bool {
        self.computing.contains_key(request)
    }

    /// Counters.
    pub fn stats(&self) -> ProducerStats {
        self.stats
    }

    /// Leases whose blocks are kept.
    pub fn held_count(&self) -> usize {
        self.held.len()
    }

    /// Requests that compute for somebody else.
    pub fn computing_count(&self) -> usize {
        self.computing.len()
    }

    /// Takes every lease back. Blocks are free when the workers have reported, as at any other end.
    pub fn end_all(&self, orders: &mut Vec<ProducerOrder>) {
        orders.extend(self.held.keys().map(|lease| ProducerOrder::Revoke { lease: *lease }));
    }

    /// Takes one lease back. False if it is not held, or was taken back before.
    pub fn take_back(&mut self, lease: LeaseId, orders: &mut Vec<ProducerOrder>) -> bool {
        let Some(held) = self.held.get_mut(&lease).filter(|held| !held.taken_back) else { return false };
        held.taken_back = true;
        orders.push(ProducerOrder::Revoke { lease });
        true
    }

    /// When [`Producer::time_passed`] wants to be called.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.timers.next()
    }

    /// A request arrived that is to be handed over. The caller made sure that its id is not in use.
    pub fn arrived(
        &mut self,
        request: RequestId,
        prompt: Prompt,
        other: Map<String, Value>,
        orders: &mut Vec<ProducerOrder>,
    ) {
        let lease = LeaseId(self.next_lease);
        self.next_lease += 1;
        self.computing.insert(request, Computing { lease, prompt, other });
        orders.push(ProducerOrder::Announce { lease });
    }

    /// A request ended. `None` if it is not one of this machine's. With `hands_over` false nothing is handed over,
    /// however complete it is.
    pub fn finished(
        &mut self,
        now: Moment,
        config: &SchedConfig,
        request: &RequestId,
        end: &RequestEnd,
        hands_over: bool,
        orders: &mut Vec<ProducerOrder>,
    ) -> Option<Finish> {
        let Computing { lease, mut prompt, other } = self.computing.remove(request)?;
        let handed = match end {
            RequestEnd::Aborted => None,
            RequestEnd::Complete { .. } if !hands_over => None,
            RequestEnd::Complete { computed_tokens, blocks, sampled } => {
                prompt = prompt.and(sampled, *computed_tokens, config.block_tokens);
                hand_over(config, prompt.tokens, *computed_tokens, blocks)
            }
        };
        let Some(handed) = handed else {
            self.stats.forgotten += 1;
            orders.push(ProducerOrder::Forget { lease });
            let nothing = match end {
                RequestEnd::Aborted => None,
                RequestEnd::Complete { .. } => {
                    Some(self.params(config, request, Handed::default(), None, Prompt::default(), other))
                }
            };
            return Some(Finish { verdict: Verdict::Free, params: nothing });
        };
        self.stats.granted += 1;
        let overdue_at = now + config.lease_max + config.report_grace;
        self.timers.set(overdue_at, lease);
        let blocks = handed.blocks.clone();
        let params = self.params(config, request, handed, Some(lease), prompt, other);
        orders.push(ProducerOrder::Grant { lease, terms: config.terms(), offer: params.digest() });
        let held =
            Held { request: request.clone(), blocks, ended: BTreeMap::new(), overdue_at, taken_back: false };
        self.held.insert(lease, held);
        Some(Finish { verdict: Verdict::Hold(HoldId::Lease(lease)), params: Some(params) })
    }

    /// What a request would hand over if it ended so now, by group. Empty if that is nothing, or if the request is not one of
    /// this machine's.
    pub fn to_hand_over(
        &self,
        config: &SchedConfig,
        request: &RequestId,
        end: &RequestEnd,
    ) -> Vec<StagedBlocks> {
        let (Some(computing), RequestEnd::Complete { computed_tokens, blocks, sampled }) =
            (self.computing.get(request), end)
        else {
            return Vec::new();
        };
        let tokens = computing.prompt.clone().and(sampled, *computed_tokens, config.block_tokens).tokens;
        let handed = hand_over(config, tokens, *computed_tokens, blocks).unwrap_or_default();
        let both = handed.blocks.into_iter().zip(handed.firsts);
        both.map(|(blocks, first)| StagedBlocks { first, blocks }).collect()
    }

    fn params(
        &self,
        config: &SchedConfig,
        request: &RequestId,
        handed: Handed,
        lease: Option<LeaseId>,
        prompt: Prompt,
        other: Map<String, Value>,
    ) -> RemotePrefill {
        let groups = config.groups.len();
        let Handed { blocks, firsts } = if handed.blocks.is_empty() {
            Handed { blocks: vec![BlockList::default(); groups], firsts: vec![0; groups] }
        } else {
            handed
        };
        RemotePrefill {
            engine: config.engine.clone(),
            request: request.clone(),
            host: config.host.clone(),
            port: config.port,
            ranks: config.topology.ranks,
            tokens: prompt.tokens,
            block_tokens: config.block_tokens,
            blocks,
            firsts,
            incarnation: config.incarnation,
            lease,
            token_digest: prompt.digest,
            marks: prompt.marks,
            alternatives: Vec::new(),
            other,
        }
    }

    /// A worker reported that a lease ended on its rank.
    pub fn lease_ended(
        &mut self,
        config: &SchedConfig,
        rank: Rank,
        lease: LeaseId,
        end: LeaseEnd,
        events: &mut Vec<SchedEvent>,
    ) {
        let Some(held) = self.held.get_mut(&lease) else {
            self.stats.stray_ends += 1;
            return;
        };
        if rank.0 >= config.topology.ranks || held.ended.contains_key(&rank) {
            self.stats.stray_ends += 1;
            return;
        }
        held.ended.insert(rank, end);
        if held.ended.len() < config.topology.ranks as usize {
            return;
        }
        let Some(held) = self.held.remove(&lease) else { return };
        self.timers.clear(held.overdue_at, lease);
        // The worst end of any rank is the lease's.
        let end = held.ended.into_values().max().unwrap_or(LeaseEnd::Expired);
        match end {
            LeaseEnd::Confirmed => self.stats.confirmed += 1,
            LeaseEnd::Released => self.stats.released += 1,
            LeaseEnd::ConsumerLost => self.stats.consumer_lost += 1,
            LeaseEnd::Revoked => self.stats.revoked += 1,
            _ => self.stats.expired += 1,
        }
        events.push(SchedEvent::BlocksReleased {
            hold: HoldId::Lease(lease),
            request: held.request,
            blocks: held.blocks,
        });
    }

    /// Looks at leases whose end should have been reported long ago.
    pub fn time_passed(&mut self, now: Moment, config: &SchedConfig, events: &mut Vec<SchedEvent>) {
        while let Some(lease) = self.timers.due(now) {
            let Some(held) = self.held.get(&lease) else { continue };
            let missing =
                (0..config.topology.ranks).map(Rank).filter(|r| !held.ended.contains_key(r)).collect();
            events.push(SchedEvent::WorkersSilent { hold: HoldId::Lease(lease), missing });
        }
    }
}

/// What is handed over of a finished request: the blocks that hold its prompt, or its prompt and what was sampled, if
/// the prompt was computed whole and there is any. The lists are those given at the end, never ones remembered from earlier. Of a window these are the
/// blocks that are still looked at, of a state the last one, if the state did not go on beyond the prompt.
fn hand_over(
    config: &SchedConfig,
    tokens: u32,
    computed_tokens: u32,
    blocks: &[BlockList],
) -> Option<Handed> {
    let count = tokens.div_ceil(config.block_tokens);
    if computed_tokens < tokens || count == 0 || blocks.len() != config.groups.len() {
        return None;
    }
    let mut handed = Handed::default();
    for (kind, list) in config.groups.iter().zip(blocks) {
        let (first, part): (u32, BlockList) = match kind {
            GroupKind::State if computed_tokens > tokens => return None,
            GroupKind::State => (count - 1, list.skip(list.len().saturating_sub(1))),
            _ => {
                let first = kind.first_token(tokens) / config.block_tokens;
                if kind.first_token(computed_tokens) / config.block_tokens > first {
                    // The window has moved on, and its first blocks may be somebody else's already.
                    return None;
                }
                (first, list.iter().skip(first as usize).take((count - first) as usize).collect())
            }
        };
        if first + part.len() != count || !part.fits(config.blocks) {
            return None;
        }
        handed.blocks.push(part);
        handed.firsts.push(first);
    }
    Some(handed)
}
