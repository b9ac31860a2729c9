#![doc = include_str!("../README.md")]

mod check;
pub mod contract;
pub mod error;
pub mod memory;
#[doc = include_str!("rules.md")]
pub mod rules {}
pub mod tcp;

pub use contract::{
    Address, Capabilities, Event, MESSAGE_MAX_BYTES, OPAQUE_MAX_BYTES, OpId, PeerId, RangeSet, ReadLimits,
    ReadOutcome, ReadPart, ReadRange, ReadRequest, RegionId, RegionKey, Transport,
};
pub use error::{LossReason, ReadError, TransportError};
pub use memory::{Memory, MemoryError};
