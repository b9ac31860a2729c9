//! Who an engine is, and its configuration.

use kv_connector::proto::Incarnation;
use kv_connector::{Config, EngineIdentity};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;

use crate::errors::{ConfigError, bad, raised};

/// The configuration from a dict of its fields; what is not there has its default.
pub(crate) fn config_of(config: Option<&Bound<'_, PyAny>>) -> PyResult<Config> {
    let config = match config {
        None => Config::default(),
        Some(given) => {
            let given: Value = pythonize::depythonize(given).map_err(|e| bad("configuration", &e))?;
            // As text, so that an error names the field as it does everywhere else.
            Config::from_json(&given.to_string()).map_err(|error| raised(&error.into()))?
        }
    };
    config.check().map_err(|error| raised(&error.into()))?;
    Ok(config)
}

/// Every field of the configuration with its default.
#[pyfunction]
pub(crate) fn config_defaults(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    pythonize::pythonize(py, &Config::default()).map_err(|e| bad("configuration", &e))
}

/// Raises `ConfigError` if the configuration cannot be: an unknown field, a wrong type, a value out of range.
#[pyfunction]
pub(crate) fn check_config(config: &Bound<'_, PyAny>) -> PyResult<()> {
    config_of(Some(config)).map(|_| ())
}

/// An engine's id, the number of this life, and how many ranks it has: drawn once by the process that starts the
/// engine, and given to its scheduler half and to every worker.
#[pyclass(frozen, eq, module = "kv_connector")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity(pub(crate) EngineIdentity);

#[pymethods]
impl Identity {
    /// Draws a new life, and an id if the configuration names none.
    #[staticmethod]
    #[pyo3(signature = (config=None, ranks=1))]
    fn draw(config: Option<&Bound<'_, PyAny>>, ranks: u32) -> PyResult<Self> {
        let config = config_of(config)?;
        EngineIdentity::draw(&config, ranks).map(Self).map_err(|error| raised(&error))
    }

    /// From `to_bytes`, perhaps of another process.
    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> PyResult<Self> {
        serde_json::from_slice(bytes).map(Self).map_err(|e| ConfigError::new_err(format!("identity: {e}")))
    }

    /// As bytes, to be carried to another process of the same engine.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = serde_json::to_vec(&self.0).map_err(|e| bad("identity", &e))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The engine's id.
    #[getter]
    fn engine_id(&self) -> &str {
        self.0.engine.as_str()
    }

    /// This life, in hexadecimal.
    #[getter]
    fn incarnation(&self) -> String {
        let life: Incarnation = self.0.incarnation;
        life.to_hex()
    }

    /// Ranks of the engine.
    #[getter]
    fn ranks(&self) -> u32 {
        self.0.topology.ranks
    }

    fn __repr__(&self) -> String {
        format!(
            "Identity(engine_id={:?}, incarnation={}, ranks={})",
            self.0.engine.as_str(),
            self.0.incarnation.to_hex(),
            self.0.topology.ranks
        )
    }
}
