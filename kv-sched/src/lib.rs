#![doc = include_str!("../README.md")]

pub mod config;
pub mod error;
pub mod event;
pub mod machine;
pub mod scheduler;

pub use config::{SchedConfig, SchedConfigError};
pub use error::SchedError;
pub use event::{Finish, HoldId, LoadResult, Remaining, RequestEnd, Role, SchedEvent, Verdict};
pub use machine::consumer::ConsumerStats;
pub use machine::producer::ProducerStats;
pub use machine::staging::{
    DeviceVerdict, StagedBlocks, Staging, StagingConfig, StagingConfigError, StagingError, StagingEvent,
    StagingFailure, StagingStats,
};
pub use scheduler::Scheduler;
