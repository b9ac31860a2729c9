//! Who an engine is, in this life of it.

use kv_proto::{EngineId, IdError, Incarnation, Topology};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::ConnectorError;

/// An engine's id, the number of this life, and how it is cut: drawn once by the process that starts the engine,
/// and given to its scheduler half and to every worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineIdentity {
    /// The engine's id.
    pub engine: EngineId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// How it is cut into ranks.
    pub topology: Topology,
}

impl EngineIdentity {
    /// Draws a new life from the system's random source, and an id if the configuration names none.
    pub fn draw(config: &Config, ranks: u32) -> Result<Self, ConnectorError> {
        Self::draw_cut(config, Topology::of(ranks))
    }

    /// As [`EngineIdentity::draw`], for an engine that is cut into pipeline stages, or deals tokens out over its ranks.
    pub fn draw_cut(config: &Config, topology: Topology) -> Result<Self, ConnectorError> {
        let number = || getrandom::u64().map_err(|e| ConnectorError::Random { reason: e.to_string() });
        let engine = if config.engine_id.is_empty() {
            EngineId::new(format!("{:016x}{:016x}", number()?, number()?))
        } else {
            EngineId::new(config.engine_id.as_str())
        };
        let engine = engine.map_err(|e: IdError| ConnectorError::Config(e.into()))?;
        Ok(Self { engine, incarnation: Incarnation::from_random(number()?), topology })
    }
}
