//! What UCX's status numbers mean to callers.

use std::io::ErrorKind;

use kv_ucx_sys::abi::{self, Status};

use crate::error::LossReason;

/// Good.
pub(super) const OK: Status = abi::UCS_OK;

/// Ours: more waits to leave by an endpoint than is kept.
pub(super) const OVERRUN: Status = abi::UCS_ERR_ENDPOINT_TIMEOUT;

/// Whether a failure is one of the endpoint, and not of the one operation.
pub(super) fn is_of_endpoint(status: Status) -> bool {
    matches!(
        status,
        abi::UCS_ERR_UNREACHABLE
            | abi::UCS_ERR_CANCELED
            | abi::UCS_ERR_TIMED_OUT
            | abi::UCS_ERR_REJECTED
            | abi::UCS_ERR_NOT_CONNECTED
            | abi::UCS_ERR_CONNECTION_RESET
    ) || status <= -40
}

fn kind(status: Status) -> ErrorKind {
    match status {
        abi::UCS_ERR_UNREACHABLE => ErrorKind::HostUnreachable,
        abi::UCS_ERR_INVALID_ADDR => ErrorKind::InvalidInput,
        abi::UCS_ERR_NO_MEMORY => ErrorKind::OutOfMemory,
        abi::UCS_ERR_REJECTED => ErrorKind::ConnectionRefused,
        abi::UCS_ERR_CONNECTION_RESET => ErrorKind::ConnectionReset,
        abi::UCS_ERR_NOT_CONNECTED => ErrorKind::NotConnected,
        abi::UCS_ERR_TIMED_OUT | abi::UCS_ERR_ENDPOINT_TIMEOUT => ErrorKind::TimedOut,
        _ => ErrorKind::Other,
    }
}

/// Why a peer could not be reached. UCX keeps the system's own number to itself.
pub(super) fn unreachable(status: Status) -> LossReason {
    LossReason::Unreachable { kind: kind(status), code: None }
}

/// Why a peer that was connected is gone. A process that ended and one that closed look the same to UCX, and its
/// versions name them differently.
pub(super) fn lost(status: Status) -> LossReason {
    match status {
        abi::UCS_ERR_CONNECTION_RESET | abi::UCS_ERR_NOT_CONNECTED | abi::UCS_ERR_ENDPOINT_TIMEOUT => {
            LossReason::ClosedByPeer
        }
        other => LossReason::Broken { kind: kind(other), code: None },
    }
}
