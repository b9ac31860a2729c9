//! The worker half for Python.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use kv_connector::proto::{PullEnd, Report};
use kv_connector::{BlockLayout, Rank, WorkerConnector, WorkerSetup};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{bad, detached};
use crate::identity::{Identity, config_of};
use crate::memory::memory_of;

/// How a load ended on one rank. Nothing writes its blocks any more.
#[pyclass(frozen, get_all, module = "kv_connector")]
#[derive(Debug)]
pub(crate) struct LoadEnd {
    /// The load's number, as `SchedulerCore.blocks_allocated` returned it.
    pub load: u64,
    /// Whether every byte is here and the producer confirmed its lease.
    pub loaded: bool,
    /// Blocks of each group, from the load's first one, that are good although the load failed.
    pub verified: u32,
    /// Bytes that arrived, of a good load.
    pub bytes: u64,
    /// From the order to the last byte, in microseconds, of a good load.
    pub read_us: u64,
    /// From the last byte to the confirmation, in microseconds, of a good load.
    pub confirm_us: u64,
    /// Why it failed, a word; empty if it did not.
    pub reason: String,
    /// Why it failed, for a person.
    pub detail: String,
}

/// What ended on one worker since its last report.
#[pyclass(frozen, get_all, module = "kv_connector")]
#[derive(Debug)]
pub(crate) struct StepReport {
    /// For `SchedulerCore.take_report`, to be carried once.
    pub data: Py<PyBytes>,
    /// Loads that ended.
    pub loads: Vec<Py<LoadEnd>>,
    /// Numbers of own leases that ended, and how.
    pub leases: Vec<(u64, String)>,
}

#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    wake: Condvar,
}

/// One rank's leases, peers and loads, on a thread of its own. No call waits for the network.
#[pyclass(frozen, module = "kv_connector")]
pub(crate) struct WorkerCore {
    inner: Mutex<WorkerConnector>,
    bell: Arc<Bell>,
}

impl WorkerCore {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut WorkerConnector) -> Result<T, kv_connector::ConnectorError> + Send,
    ) -> PyResult<T> {
        // After a panic the call that caused it has been answered with an exception; the others go on.
        detached(py, || call(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl WorkerCore {
    /// Starts the worker half of one rank. `layout` says where blocks lie in `memories`; each of these is an object with
    /// a writable, contiguous buffer, or a tuple of address, bytes and an owner that keeps them alive and in place.
    /// `model` names the model and its weights beyond doubt.
    #[new]
    fn new(
        py: Python<'_>,
        config: Option<&Bound<'_, PyAny>>,
        identity: &Identity,
        rank: u32,
        model: String,
        layout: &Bound<'_, PyAny>,
        memories: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let config = config_of(config)?;
        let layout: BlockLayout = pythonize::depythonize(layout).map_err(|e| bad("layout", &e))?;
        let memories = memories.iter().enumerate().map(|(n, m)| memory_of(n, m)).collect::<PyResult<_>>()?;
        let bell = Arc::new(Bell::default());
        let ringer = bell.clone();
        let on_report = Box::new(move || {
            *ringer.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
            ringer.wake.notify_all();
        });
        let setup = WorkerSetup { rank: Rank(rank), model, layout, memories, on_report };
        let inner = detached(py, || WorkerConnector::start(&config, &identity.0, setup))?;
        Ok(Self { inner: Mutex::new(inner), bell })
    }

    /// What this worker publishes about itself, for `SchedulerCore`.
    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let card = self.call(py, |inner| inner.card())?;
        Ok(PyBytes::new(py, &card))
    }

    /// Whether its thread runs. If it does not and nobody shut it down, what was in its hands will not be reported.
    fn is_running(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |inner| Ok(inner.is_running()))
    }

    /// Takes the plan of a step.
    fn begin_step(&self, py: Python<'_>, plan: &[u8]) -> PyResult<()> {
        self.call(py, |inner| inner.begin_step(plan))
    }

    /// What ended since the last call; `None` if nothing did.
    fn report(&self, py: Python<'_>) -> PyResult<Option<StepReport>> {
        let found = self.call(py, |inner| {
            *self.bell.rung.lock().unwrap_or_else(PoisonError::into_inner) = false;
            let Some(data) = inner.report()? else { return Ok(None) };
            let report = Report::decode(&data)?;
            Ok(Some((data, report)))
        })?;
        let Some((data, report)) = found else { return Ok(None) };
        let loads = report.loads.into_iter().map(|(load, end)| Py::new(py, load_end(load.0, end)));
        Ok(Some(StepReport {
            data: PyBytes::new(py, &data).unbind(),
            loads: loads.collect::<PyResult<_>>()?,
            leases: report.leases.into_iter().map(|(id, end)| (id.0, end.name().to_owned())).collect(),
        }))
    }

    /// Waits until there is something to report, or `limit_s` seconds. For engines that have nothing else to do.
    fn wait_report(&self, py: Python<'_>, limit_s: f64) -> PyResult<bool> {
        let limit = Duration::try_from_secs_f64(limit_s).map_err(|e| bad("limit_s", &e))?;
        Ok(py.detach(|| {
            let rung = self.bell.rung.lock().unwrap_or_else(PoisonError::into_inner);
            let (rung, _) = self
                .bell
                .wake
                .wait_timeout_while(rung, limit, |rung| !*rung)
                .unwrap_or_else(PoisonError::into_inner);
            *rung
        }))
    }

    /// Counters, as a dict of dicts, as of a moment ago.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.call(py, |inner| Ok(inner.stats()))?;
        pythonize::pythonize(py, &stats).map_err(|e| bad("stats", &e))
    }

    /// Ends reads, connections and threads within `limit_s` seconds.
    fn shut_down(&self, py: Python<'_>, limit_s: f64) -> PyResult<()> {
        let limit = Duration::try_from_secs_f64(limit_s).map_err(|e| bad("limit_s", &e))?;
        self.call(py, |inner| {
            inner.shut_down(limit);
            Ok(())
        })
    }
}

fn load_end(load: u64, end: PullEnd) -> LoadEnd {
    match end {
        PullEnd::Loaded(stats) => LoadEnd {
            load,
            loaded: true,
            verified: 0,
            bytes: stats.bytes,
            read_us: stats.read_us,
            confirm_us: stats.confirm_us,
            reason: String::new(),
            detail: String::new(),
        },
        PullEnd::Failed { reason, detail, verified } => LoadEnd {
            load,
            loaded: false,
            verified,
            bytes: 0,
            read_us: 0,
            confirm_us: 0,
            reason: reason.name().to_owned(),
            detail,
        },
    }
}
