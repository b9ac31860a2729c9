#![doc = include_str!("../README.md")]

pub mod config;
pub mod error;
pub mod identity;
#[cfg(feature = "scheduler")]
pub mod scheduler;
#[cfg(feature = "scheduler")]
pub mod staging;
#[cfg(feature = "worker")]
pub mod worker;

pub use config::{Config, ConfigError};
pub use error::ConnectorError;
pub use identity::EngineIdentity;
#[cfg(feature = "scheduler")]
pub use kv_handshake::{ListenError, ListenerStats};
pub use kv_proto as proto;
pub use kv_proto::{BlockId, BlockLayout, BlockList, Rank, RequestId};
#[cfg(feature = "scheduler")]
pub use kv_recovery as recovery;
#[cfg(feature = "scheduler")]
pub use kv_sched::{
    ConsumerStats, DeviceVerdict, HoldId, LoadResult, ProducerStats, Remaining, RequestEnd, Role,
    SchedConfigError, SchedError, SchedEvent, StagedBlocks, StagingError, StagingEvent, StagingFailure,
    StagingStats, Verdict,
};
#[cfg(feature = "worker")]
pub use kv_transport as transport;
#[cfg(feature = "worker")]
pub use kv_worker::shape;
#[cfg(feature = "worker")]
pub use kv_worker::staging::{DeviceCache, StagingLimits};
#[cfg(feature = "worker")]
pub use kv_worker::{WorkerError, WorkerStats};
#[cfg(feature = "scheduler")]
pub use scheduler::{Finished, SchedulerConnector, SchedulerStats};
#[cfg(feature = "scheduler")]
pub use staging::{StagingFigures, StagingSetup};
#[cfg(feature = "worker")]
pub use worker::{WorkerConnector, WorkerSetup};
