#![doc = include_str!("../README.md")]

pub mod auto;
mod check;
pub mod contract;
#[cfg(target_os = "linux")]
pub mod cuda;
pub mod device;
pub mod error;
pub mod memory;
#[doc = include_str!("rules.md")]
pub mod rules {}
#[cfg(target_os = "linux")]
pub mod shm;
mod stream;
pub mod tcp;
pub mod ucx;

pub use contract::{
    Address, Capabilities, Event, Face, MESSAGE_MAX_BYTES, OPAQUE_MAX_BYTES, OpId, PeerId, RangeSet,
    ReadLimits, ReadOutcome, ReadPart, ReadRange, ReadRequest, RegionId, RegionKey, Transport,
};
pub use device::{Device, DeviceError, DeviceId};
pub use error::{LossReason, ReadError, TransportError};
pub use memory::{Memory, MemoryError, Pages, Place};
