#![doc = include_str!("../README.md")]

pub mod blocks;
mod policy;
pub mod retry;

pub use blocks::{
    BlockRef, Cut, GroupTable, Holder, Judged, LoadState, Need, Remarks, Resume, Situation, judge, resume,
};
pub use policy::{Decision, FailedLoad, Policy, UnknownPolicy, decide};
pub use retry::{
    Admission, Advice, BreakerState, ConfigError, Directive, Evidence, Fallback, LoadFacts, Recovery,
    RecoveryConfig, RecoveryStats, Refusal, Source, advice,
};
