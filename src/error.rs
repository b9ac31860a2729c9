//! Errors of the facade.

use thiserror::Error;

use crate::config::ConfigError;

/// Why a connector could not be started, or a call was refused. A refused call changed nothing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectorError {
    // You called it wrong.
    /// The configuration cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A worker's card, a plan or a report that is none.
    #[error(transparent)]
    Codec(#[from] kv_proto::CodecError),
    /// The transfer parameters of a request cannot be.
    #[error(transparent)]
    Params(#[from] kv_proto::ParamsError),
    /// A hook of the scheduler half refused.
    #[cfg(feature = "scheduler")]
    #[error(transparent)]
    Sched(#[from] kv_sched::SchedError),
    /// The terms of the scheduler half cannot be.
    #[cfg(feature = "scheduler")]
    #[error(transparent)]
    SchedConfig(#[from] kv_sched::SchedConfigError),
    /// A hook of host staging refused.
    #[cfg(feature = "scheduler")]
    #[error(transparent)]
    Staging(#[from] kv_sched::StagingError),
    /// The sizes and limits of host staging cannot be.
    #[cfg(feature = "scheduler")]
    #[error(transparent)]
    StagingConfig(#[from] kv_sched::StagingConfigError),
    /// A hook of host staging was called on an engine without it.
    #[error("the engine was not told to stage its blocks in host memory")]
    NotStaged,
    /// The workers' cards do not make an engine.
    #[error(transparent)]
    Cards(#[from] kv_proto::handshake::CardError),
    /// A report from a rank that the engine does not have.
    #[error("a report from {rank}, but the engine has {ranks} ranks")]
    ReportRank {
        /// The rank that the report names.
        rank: kv_proto::Rank,
        /// Ranks that there are.
        ranks: u32,
    },
    /// The worker half refused.
    #[cfg(feature = "worker")]
    #[error(transparent)]
    Worker(#[from] kv_worker::WorkerError),
    // The fabric failed.
    /// The handshake listener could not be started; `handshake_host` and `handshake_port` say where it listens.
    #[cfg(feature = "scheduler")]
    #[error("handshake_host and handshake_port: {0}")]
    Listen(#[from] kv_handshake::ListenError),
    /// The transport could not be started; `transport_host` and `transport_advertise_host` say where it listens.
    #[cfg(feature = "worker")]
    #[error("transport_host and transport_advertise_host: {0}")]
    Transport(#[from] kv_transport::TransportError),
    /// The system's random source failed.
    #[error("the system's random source failed: {reason}")]
    Random {
        /// The system's words.
        reason: String,
    },
}
