//! One of a request's offers.

use kv_proto::{
    BlockList, ConsumerOrder, GroupBlocks, GroupKind, LeaseRef, LoadId, OfferDigest, PeerLocator,
    ReleaseReason, RemotePrefill, RequestId,
};

use crate::config::SchedConfig;
use crate::error::SchedError;

/// An offer under which something is pinned.
#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) struct Source {
    remote: Box<RemotePrefill>,
    lease: LeaseRef,
    offer: OfferDigest,
    /// Tokens of it that are the request's own, from the start.
    usable: u32,
}

/// The offers that came with a request, in their order. Those that pin nothing are left out. Of several under one lease
/// the first counts: a lease can be read and given back once. `usable` says of each how many of its tokens are the
/// request's own; of offers that are only given back it need not be told.
pub(super) fn of(mut remote: RemotePrefill, usable: &[u32]) -> Vec<Source> {
    let others = std::mem::take(&mut remote.alternatives);
    let mut sources: Vec<Source> = Vec::new();
    for (index, remote) in std::iter::once(remote).chain(others).enumerate() {
        if let Some(lease) = remote.lease_ref()
            && !sources.iter().any(|source| source.lease == lease)
        {
            let usable = usable.get(index).copied().unwrap_or(0).min(remote.tokens);
            sources.push(Source { offer: remote.digest(), lease, remote: Box::new(remote), usable });
        }
    }
    // The router's order, but what is of use only in part comes last.
    sources.sort_by_key(|source| source.usable < source.remote.tokens);
    sources
}

impl Source {
    /// Tokens whose KV it offers to this request.
    pub(super) fn tokens(&self) -> u32 {
        self.usable
    }

    /// Who offers it.
    pub(super) fn peer(&self) -> PeerLocator {
        PeerLocator {
            engine: self.remote.engine.clone(),
            incarnation: self.remote.incarnation,
            host: self.remote.host.clone(),
            port: self.remote.port,
        }
    }

    /// Its lease is to be renewed.
    pub(super) fn track(&self) -> ConsumerOrder {
        ConsumerOrder::Track { lease: self.lease, offer: self.offer, peer: self.peer() }
    }

    /// It is given back.
    pub(super) fn release(&self, reason: ReleaseReason) -> ConsumerOrder {
        ConsumerOrder::Release { lease: self.lease, offer: self.offer, peer: self.peer(), reason }
    }

    /// It is to be read.
    pub(super) fn load(&self, load: LoadId, groups: Vec<GroupBlocks>) -> ConsumerOrder {
        ConsumerOrder::Load { load, lease: self.lease, offer: self.offer, peer: self.peer(), groups }
    }

    /// Which of its blocks go into which of the request's, behind what is here already.
    pub(super) fn groups(
        &self,
        config: &SchedConfig,
        request: &RequestId,
        local_tokens: u32,
        blocks: &[BlockList],
    ) -> Result<Vec<GroupBlocks>, SchedError> {
        let first = local_tokens / config.block_tokens;
        if !local_tokens.is_multiple_of(config.block_tokens) {
            return Err(SchedError::NotAligned {
                request: request.clone(),
                local_tokens,
                block_tokens: config.block_tokens,
            });
        }
        if blocks.len() != self.remote.blocks.len() {
            return Err(SchedError::Groups { ours: blocks.len(), theirs: self.remote.blocks.len() });
        }
        let pairs = self.remote.blocks.iter().zip(blocks).enumerate();
        pairs.map(|(group, (theirs, ours))| self.group(config, request, first, group, theirs, ours)).collect()
    }

    /// One group's part. Both lists are counted from the start of the sequence, so that tokens pair by themselves.
    fn group(
        &self,
        config: &SchedConfig,
        request: &RequestId,
        first: u32,
        group: usize,
        theirs: &BlockList,
        ours: &BlockList,
    ) -> Result<GroupBlocks, SchedError> {
        let kind = config.groups.get(group).copied().unwrap_or_default();
        let (tokens, remote_first) = (self.usable, self.remote.first(group));
        let (our_size, their_size) = (config.block_tokens, self.remote.block_tokens);
        let end = tokens.div_ceil(our_size);
        let needed = if kind == GroupKind::State { 1 } else { end };
        if ours.len() < needed {
            return Err(SchedError::TooFewBlocks { request: request.clone(), needed, got: ours.len() });
        }
        let (first, local, remote_first, remote) = if kind == GroupKind::State {
            // One block, wherever the sequence is.
            (end.saturating_sub(1), ours.skip(ours.len() - 1), remote_first, theirs.clone())
        } else {
            let first = first.max(kind.first_token(tokens) / our_size);
            let local = slice(ours, first, end);
            // Blocks of theirs that end before ours begin are of no use, nor are those behind the last usable token.
            let begins = u64::from(first) * u64::from(our_size) / u64::from(their_size);
            let begins = u32::try_from(begins).unwrap_or(u32::MAX).max(remote_first);
            let ends = tokens.div_ceil(their_size);
            (first, local, begins, slice(theirs, begins - remote_first, ends.saturating_sub(remote_first)))
        };
        if !local.fits(config.blocks) {
            return Err(SchedError::BlockBeyondPool {
                request: request.clone(),
                highest: local.highest().map_or(u64::MAX, |b| u64::from(b.0)),
                blocks: config.blocks,
            });
        }
        Ok(GroupBlocks { group: group as u32, first, remote_first, tokens, remote, local })
    }
}

/// The items from `from` to before `to`.
fn slice(list: &BlockList, from: u32, to: u32) -> BlockList {
    list.iter().skip(from as usize).take(to.saturating_sub(from) as usize).collect()
}
