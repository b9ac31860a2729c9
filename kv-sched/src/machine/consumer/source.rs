//! One of a request's offers.

use kv_proto::{
    BlockList, ConsumerOrder, GroupBlocks, LeaseRef, LoadId, OfferDigest, PeerLocator, ReleaseReason,
    RemotePrefill, RequestId,
};

use crate::config::SchedConfig;
use crate::error::SchedError;

/// An offer under which something is pinned.
#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) struct Source {
    remote: Box<RemotePrefill>,
    lease: LeaseRef,
    offer: OfferDigest,
}

/// The offers that came with a request, in their order. Those that pin nothing are left out. Of several under one lease
/// the first counts: a lease can be read and given back once.
pub(super) fn of(mut remote: RemotePrefill) -> Vec<Source> {
    let others = std::mem::take(&mut remote.alternatives);
    let mut sources: Vec<Source> = Vec::new();
    for remote in std::iter::once(remote).chain(others) {
        if let Some(lease) = remote.lease_ref()
            && !sources.iter().any(|source| source.lease == lease)
        {
            sources.push(Source { offer: remote.digest(), lease, remote: Box::new(remote) });
        }
    }
    sources
}

impl Source {
    /// Tokens whose KV it offers.
    pub(super) fn tokens(&self) -> u32 {
        self.remote.tokens
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
        let count = self.remote.block_count();
        if blocks.len() != self.remote.blocks.len() {
            return Err(SchedError::Groups { ours: blocks.len(), theirs: self.remote.blocks.len() });
        }
        for group in blocks {
            if group.len() < count {
                return Err(SchedError::TooFewBlocks {
                    request: request.clone(),
                    needed: count,
                    got: group.len(),
                });
            }
            if !group.fits(config.blocks) {
                return Err(SchedError::BlockBeyondPool {
                    request: request.clone(),
                    highest: group.highest().map_or(u64::MAX, |b| u64::from(b.0)),
                    blocks: config.blocks,
                });
            }
        }
        // Both lists are counted from the start of the sequence, so positions pair by themselves.
        let part = |list: &BlockList| -> BlockList {
            list.iter().skip(first as usize).take((count - first) as usize).collect()
        };
        let pairs = self.remote.blocks.iter().zip(blocks).enumerate();
        Ok(pairs
            .map(|(group, (theirs, ours))| GroupBlocks {
                group: group as u32,
                first,
                remote: part(theirs),
                local: part(ours),
            })
            .collect())
    }
}
