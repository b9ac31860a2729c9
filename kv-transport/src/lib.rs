#![doc = include_str!("../README.md")]

pub mod contract;
pub mod error;
pub mod memory;
pub mod tcp;
pub mod ucx;

pub use contract::{
    Address, Capabilities, Event, MESSAGE_MAX_BYTES, OPAQUE_MAX_BYTES, OpId, PeerId, RangeSet, ReadLimits,
    ReadOutcome, ReadPart, ReadRange, ReadRequest, RegionId, RegionKey, Transport,
};
pub use error::{LossReason, ReadError, TransportError};
pub use memory::{Memory, MemoryError};
