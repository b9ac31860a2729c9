//! The native part of the Python package `kv_connector`: the two halves of the connector with plain data and bytes in
//! and out.
//!
//! Every call releases the interpreter's lock, waits for nothing, and turns a panic into an exception of its own, so
//! that a fault costs the call and not the engine.

mod errors;
mod events;
mod identity;
mod memory;
mod scheduler;
mod worker;

use pyo3::prelude::*;

/// Functions and classes, without Python's conveniences; those are in the package around it.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::add(module)?;
    module.add_class::<identity::Identity>()?;
    module.add_class::<scheduler::SchedulerCore>()?;
    module.add_class::<scheduler::Finished>()?;
    module.add_class::<worker::WorkerCore>()?;
    module.add_class::<worker::StepReport>()?;
    module.add_class::<worker::LoadEnd>()?;
    module.add_class::<events::LoadEnded>()?;
    module.add_class::<events::BlocksReleased>()?;
    module.add_class::<events::WorkersSilent>()?;
    module.add_class::<events::Drained>()?;
    module.add_function(wrap_pyfunction!(identity::config_defaults, module)?)?;
    module.add_function(wrap_pyfunction!(identity::check_config, module)?)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
