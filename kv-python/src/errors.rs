//! Exceptions, and what keeps a panic from crossing into Python.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kv_connector::ConnectorError;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    kv_connector,
    KvConnectorError,
    PyException,
    "A connector could not be started, or a call was refused. A refused call changed nothing."
);
create_exception!(
    kv_connector,
    ConfigError,
    KvConnectorError,
    "The configuration, the layout or the cards cannot be; the text names the field and the value."
);
create_exception!(
    kv_connector,
    RequestError,
    KvConnectorError,
    "A hook refused a request: its parameters, tokens or blocks cannot be. Only this request pays."
);
create_exception!(
    kv_connector,
    InternalError,
    KvConnectorError,
    "A fault of this library. The call did nothing that can be relied on; the engine lives on."
);

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("KvConnectorError", py.get_type::<KvConnectorError>())?;
    module.add("ConfigError", py.get_type::<ConfigError>())?;
    module.add("RequestError", py.get_type::<RequestError>())?;
    module.add("InternalError", py.get_type::<InternalError>())
}

/// As an exception.
pub(crate) fn raised(error: &ConnectorError) -> PyErr {
    let text = error.to_string();
    match error {
        ConnectorError::Config(_)
        | ConnectorError::SchedConfig(_)
        | ConnectorError::Cards(_)
        | ConnectorError::Listen(_)
        | ConnectorError::Transport(_) => ConfigError::new_err(text),
        ConnectorError::Params(_) | ConnectorError::Sched(_) => RequestError::new_err(text),
        _ => KvConnectorError::new_err(text),
    }
}

/// A bad argument, named.
pub(crate) fn bad(what: &str, error: &dyn std::fmt::Display) -> PyErr {
    ConfigError::new_err(format!("{what}: {error}"))
}

/// Runs without the interpreter's lock.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, ConnectorError> + Send,
) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(call))) {
        Ok(result) => result.map_err(|error| raised(&error)),
        Err(payload) => {
            let words = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
            let words = words.or_else(|| payload.downcast_ref::<String>().cloned());
            Err(InternalError::new_err(words.unwrap_or_else(|| "a panic without words".to_owned())))
        }
    }
}
