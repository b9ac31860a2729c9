//! Transfer parameters: the JSON that a router carries from a client to P, and from P to D.
//!
//! The keys are those which vLLM, llm-d and the example proxies pass already (`do_remote_prefill`,
//! `remote_block_ids`, `remote_host`, …), so that routers need not change. What is ours travels in the one extra
//! key [`EXTRA_KEY`]. Keys that we do not know are kept and given back. A router that had several producers compute
//! the same prompt takes the answer of one and puts those of the others, as they are, into a list under
//! [`ALTERNATIVES_KEY`].
//!
//! A client can see and forge all of it. Parameters *locate* a hand-over; they prove nothing. Whether the lease
//! is real and held is decided between the workers.

mod error;
pub mod marks;
mod read;
#[cfg(test)]
mod tests;
mod write;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::blocks::BlockList;
use crate::ids::{EngineId, Incarnation, LeaseId, LeaseRef, RequestId, hex};

pub use error::ParamsError;
pub use marks::PrefixMarks;

/// The key under which our own fields travel.
pub const EXTRA_KEY: &str = "kv_connector";
/// Version of the fields under [`EXTRA_KEY`].
pub const EXTRA_VERSION: u64 = 1;
/// Longest host name or address literal, in bytes (a DNS name has at most 253).
pub const HOST_MAX_BYTES: usize = 255;
/// Most block groups.
pub const GROUPS_MAX: usize = 64;
/// The key under which a router that had several producers compute a prompt brings the other offers.
pub const ALTERNATIVES_KEY: &str = "alternatives";
/// Most offers under [`ALTERNATIVES_KEY`].
pub const ALTERNATIVES_MAX: usize = 8;
/// Most tokens one hand-over may claim.
pub const TOKENS_MAX: u64 = 1 << 26;

/// Where a hand-over can be read, as P told it and D received it.
#[derive(Debug, Clone, PartialEq, Hash)]
pub struct RemotePrefill {
    /// P's engine id.
    pub engine: EngineId,
    /// P's name for the request: a label.
    pub request: RequestId,
    /// Host of P's handshake listener: a name or an address literal.
    pub host: String,
    /// Port of P's handshake listener.
    pub port: u16,
    /// P's rank count, as the router claims it. A hint: the handshake decides.
    pub ranks: u32,
    /// Tokens whose KV the blocks hold, from the start of the prompt.
    pub tokens: u32,
    /// Tokens in one of P's blocks.
    pub block_tokens: u32,
    /// P's blocks by group; item `i` of a group holds the tokens from `(firsts + i) * block_tokens`.
    pub blocks: Vec<BlockList>,
    /// Position of each group's first block in the sequence, in blocks: of a sliding window only the tail is handed over,
    /// and the one block of a state stands at the last position. Empty: all lists begin at 0.
    pub firsts: Vec<u32>,
    /// The life of P that granted the lease.
    pub incarnation: Incarnation,
    /// The lease that keeps the blocks; `None` if P pinned nothing.
    pub lease: Option<LeaseId>,
    /// Digest of the tokens, see [`token_digest`].
    pub token_digest: String,
    /// Digests of shorter prefixes, for a prompt that has only a part in common with the offer.
    pub marks: PrefixMarks,
    /// Offers of other producers for the same prompt, in the order in which they are to be tried. These have none of
    /// their own.
    pub alternatives: Vec<RemotePrefill>,
    /// Keys that are not ours, unchanged.
    pub other: Map<String, Value>,
}

/// Parameters of one request.
#[derive(Debug, Clone, PartialEq, Hash)]
pub enum TransferParams {
    /// Router to P: compute the prompt, keep its blocks, say where they are.
    RemoteDecode {
        /// Keys that are not ours, unchanged.
        other: Map<String, Value>,
    },
    /// P to router to D: the prompt was computed elsewhere.
    RemotePrefill(Box<RemotePrefill>),
    /// Both at once, a relay: the prompt, or its beginning, was computed elsewhere, and what the request holds at its end
    /// is handed over in its turn. So D is asked to keep an answer for the conversation's next turn, and P to read it
    /// back and go on from there. The offer may be an earlier turn's, so it need not fit the prompt.
    Relay(Box<RemotePrefill>),
}

/// Names one offer beyond doubt: what P handed out, as P knows it and as D received it.
///
/// P's workers get it with the grant, D's workers send it with `ReadDone`. Parameters that were changed on the way,
/// to other blocks or to another prompt, give another digest, and their load is not confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OfferDigest([u64; 2]);

impl OfferDigest {
    /// Wraps bytes, for tests and codecs.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        let number = u128::from_be_bytes(bytes);
        Self([(number >> 64) as u64, number as u64])
    }
}

/// Digest of the first tokens of a prompt: SHA-256 over the ids as little-endian 32-bit numbers, its first 16
/// bytes in hexadecimal. Both sides compute it over the same number of tokens, so that a router that changed the
/// prompt on the way is noticed.
pub fn token_digest(tokens: &[u32]) -> String {
    let mut digest = Sha256::new();
    for token in tokens {
        digest.update(token.to_le_bytes());
    }
    hex(&digest.finalize()[..16])
}

impl RemotePrefill {
    /// The lease with the life that granted it; `None` if P pinned nothing.
    pub fn lease_ref(&self) -> Option<LeaseRef> {
        self.lease.map(|lease| LeaseRef { incarnation: self.incarnation, lease })
    }

    /// The digest of this offer: SHA-256 over everything that says what the blocks hold and which they are, its
    /// first 16 bytes. Addresses and labels are left out, since they
    /// only locate; so are other offers.
    pub fn digest(&self) -> OfferDigest {
        let mut digest = Sha256::new();
        digest.update(self.incarnation.get().to_le_bytes());
        digest.update(self.lease.map_or(0, |lease| lease.0).to_le_bytes());
        digest.update(self.tokens.to_le_bytes());
        digest.update(self.block_tokens.to_le_bytes());
        digest.update(self.token_digest.as_bytes());
        for (index, group) in self.blocks.iter().enumerate() {
            digest.update(self.first(index).to_le_bytes());
            digest.update(group.len().to_le_bytes());
            for block in group.iter() {
                digest.update(block.0.to_le_bytes());
            }
        }
        // They say for which other prompts the offer is good as well.
        digest.update(self.marks.every.to_le_bytes());
        for mark in &self.marks.digests {
            digest.update(mark.to_le_bytes());
        }
        let mut short = [0; 16];
        short.copy_from_slice(&digest.finalize()[..16]);
        OfferDigest::from_bytes(short)
    }

    /// Blocks that the tokens take up: where each group's list ends, counted from the start of the sequence.
    pub const fn block_count(&self) -> u32 {
        if self.block_tokens == 0 { 0 } else { self.tokens.div_ceil(self.block_tokens) }
    }

    /// Position of a group's first block in the sequence, in blocks.
    pub fn first(&self, group: usize) -> u32 {
        self.firsts.get(group).copied().unwrap_or(0)
    }
}
