#![doc = include_str!("../README.md")]

pub mod blocks;
pub mod codec;
pub mod fingerprint;
pub mod handshake;
pub mod ids;
pub mod layout;
pub mod message;
pub mod params;
pub mod staging;
pub mod step;
pub mod time;
pub mod timers;
pub mod topology;

pub use blocks::BlockList;
pub use codec::CodecError;
pub use fingerprint::Fingerprint;
pub use ids::{
    Attempt, BlockId, CopyId, EngineId, IdError, Incarnation, LeaseId, LeaseRef, LoadId, Rank, RequestId,
};
pub use layout::{BlockLayout, BlockOrder, Dtype, GroupKind, RegionKind, RegionLayout};
pub use params::{OfferDigest, ParamsError, RemotePrefill, TransferParams, token_digest};
pub use staging::{CopyError, CopyFailure, CopyGroup, CopyNews, CopyOrder, CopyStats, CopyWay};
pub use step::{
    ConsumerOrder, GroupBlocks, LeaseEnd, LeaseTerms, LoadFailure, LoadStats, PeerLocator, Plan,
    ProducerOrder, PullEnd, ReleaseReason, Report,
};
pub use time::Moment;
pub use timers::Timers;
pub use topology::Topology;

/// Version of the handshake, of plan and report, and of the worker messages.
///
/// | version | what changed |
/// | --- | --- |
/// | 1 | the first |
/// | 2 | shapes may differ: heads over all ranks, kernel blocks, kinds of groups, stages, tokens dealt out |
///
/// A field added with a default that means the old behaviour needs no new version; anything else does.
pub const PROTOCOL_VERSION: u32 = 2;
