//! Errors of the hooks. Each means that the call changed nothing, except that an offer which came with a refused
//! request is given back to its producer.

use kv_proto::{GroupKind, RequestId};
use thiserror::Error;

/// Why a hook refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SchedError {
    // You called it wrong.
    /// The id belongs to a request that has not ended.
    #[error("request {request} is already here")]
    DuplicateRequest {
        /// The id.
        request: RequestId,
    },
    /// Tokens were asked for that nobody offers.
    #[error("request {request}: {asked} remote tokens asked for, but nothing remote is left to load")]
    NothingRemote {
        /// The request.
        request: RequestId,
        /// Tokens asked for.
        asked: u32,
    },
    /// Another number of tokens than was offered.
    #[error("request {request}: {asked} remote tokens asked for, {offered} offered")]
    TokensDiffer {
        /// The request.
        request: RequestId,
        /// Tokens asked for.
        asked: u32,
        /// Tokens offered.
        offered: u32,
    },
    /// A producer that is not among those of the request.
    #[error("request {request}: producer {asked} of {held} asked for, counted from 0")]
    NoSuchSource {
        /// The request.
        request: RequestId,
        /// The place asked for.
        asked: usize,
        /// Producers whose offers the request holds and does not read.
        held: usize,
    },
    /// What is here already does not end at a block's end.
    #[error(
        "request {request}: {local_tokens} local tokens are not a multiple of the block's {block_tokens}"
    )]
    NotAligned {
        /// The request.
        request: RequestId,
        /// Tokens here.
        local_tokens: u32,
        /// Tokens in a block.
        block_tokens: u32,
    },
    /// Fewer blocks than the tokens need.
    #[error("request {request}: {needed} blocks are needed, {got} were allocated")]
    TooFewBlocks {
        /// The request.
        request: RequestId,
        /// Blocks needed.
        needed: u32,
        /// Blocks given.
        got: u32,
    },
    /// A block that the pool does not have.
    #[error("request {request}: block {highest} is beyond the pool of {blocks}")]
    BlockBeyondPool {
        /// The request.
        request: RequestId,
        /// The highest id given.
        highest: u64,
        /// Blocks in the pool.
        blocks: u32,
    },
    /// Nothing new is taken.
    #[error("request {request}: this engine is draining and takes no new hand-over")]
    Draining {
        /// The request.
        request: RequestId,
    },
    // The peer, or the router, is different.
    /// Another number of block groups.
    #[error("block groups: ours {ours}, theirs {theirs}")]
    Groups {
        /// Ours.
        ours: usize,
        /// Theirs.
        theirs: usize,
    },
    /// Blocks of the offer that hold nothing.
    #[error("the offer's blocks have 0 tokens")]
    OfferBlockTokens,
    /// The offer's blocks are not those that its tokens need.
    #[error(
        "the offer covers {tokens} tokens, which end in block {needed}, but group {group} ends in block {got}"
    )]
    OfferBlocks {
        /// Tokens offered.
        tokens: u32,
        /// The block that they end in, counted from 1.
        needed: u32,
        /// The group.
        group: usize,
        /// The block that the group's list ends in.
        got: u32,
    },
    /// Of a group the offer leaves out tokens that are looked at.
    #[error(
        "the offer's group {group} ({kind}) begins at token {begins}; tokens from {needed} on are needed"
    )]
    OfferBegins {
        /// The group.
        group: usize,
        /// What it is.
        kind: GroupKind,
        /// Its first token.
        begins: u32,
        /// The first token that is needed.
        needed: u32,
    },
    /// The offer covers more tokens than the prompt has.
    #[error("the offer covers {offered} tokens, the prompt has {prompt}")]
    PromptTooShort {
        /// Tokens offered.
        offered: u32,
        /// Tokens of the prompt.
        prompt: u32,
    },
    /// The offer is for another prompt.
    #[error(
        "the offer is for another prompt: digest of the first {tokens} tokens is {ours} here, {theirs} there"
    )]
    PromptDiffers {
        /// Tokens compared.
        tokens: u32,
        /// Digest of our prompt.
        ours: String,
        /// Digest in the offer.
        theirs: String,
    },
    /// A prompt longer than can be counted.
    #[error("the prompt has {tokens} tokens, more than can be handed over")]
    PromptTooLong {
        /// Its length.
        tokens: usize,
    },
}
