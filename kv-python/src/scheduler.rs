//! The scheduler half for Python.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_connector::proto::BlockId;
use kv_connector::{BlockList, ConnectorError, RequestEnd, RequestId, Role, SchedulerConnector, Verdict};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;

use crate::errors::{RequestError, bad, detached};
use crate::events::{event_of, hold_name};
use crate::identity::{Identity, config_of};

/// Answer to the end of a request.
#[pyclass(frozen, get_all, module = "kv_connector")]
#[derive(Debug)]
pub(crate) struct Finished {
    /// What holds the request's blocks; `None`: they are free at once. Blocks that are held must be kept as they are
    /// until the `BlocksReleased` of this name.
    pub hold: Option<String>,
    /// The number of the lease, if the hold is one.
    pub lease: Option<u64>,
    /// `kv_transfer_params` for whoever asked, on a producer.
    pub params: Option<Py<PyAny>>,
}

/// Who may read which blocks, and for how long. No call waits for anything; the handshake listener has a thread of its
/// own. One per engine, in its scheduler process.
#[pyclass(frozen, module = "kv_connector")]
pub(crate) struct SchedulerCore {
    inner: Mutex<SchedulerConnector>,
}

fn id(request: &str) -> PyResult<RequestId> {
    RequestId::new(request).map_err(|e| RequestError::new_err(e.to_string()))
}

fn lists(blocks: Vec<Vec<u32>>) -> Vec<BlockList> {
    blocks.into_iter().map(|group| group.into_iter().map(BlockId).collect()).collect()
}

impl SchedulerCore {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut SchedulerConnector) -> Result<T, ConnectorError> + Send,
    ) -> PyResult<T> {
        detached(py, || call(&mut self.locked()))
    }

    fn locked(&self) -> MutexGuard<'_, SchedulerConnector> {
        // After a panic the call that caused it has been answered with an exception; the others go on.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, py: Python<'_>, request: &str, end: &RequestEnd) -> PyResult<Finished> {
        let request = id(request)?;
        let finished = self.call(py, |inner| Ok(inner.request_finished(&request, end)))?;
        let (hold, lease) = match finished.verdict {
            Verdict::Free => (None, None),
            Verdict::Hold(hold @ kv_connector::HoldId::Lease(lease)) => {
                (Some(hold_name(hold)), Some(lease.0))
            }
            Verdict::Hold(hold) => (Some(hold_name(hold)), None),
        };
        let params = match finished.params {
            Some(params) => Some(pythonize::pythonize(py, &params).map_err(|e| bad("params", &e))?.unbind()),
            None => None,
        };
        Ok(Finished { hold, lease, params })
    }
}

#[pymethods]
impl SchedulerCore {
    /// Starts the scheduler half of an engine whose workers have started; `cards` are theirs, by rank. The handshake
    /// listener is bound when this returns.
    #[new]
    fn new(
        py: Python<'_>,
        config: Option<&Bound<'_, PyAny>>,
        identity: &Identity,
        cards: Vec<Vec<u8>>,
    ) -> PyResult<Self> {
        let config = config_of(config)?;
        let inner = detached(py, || SchedulerConnector::start(&config, &identity.0, &cards))?;
        Ok(Self { inner: Mutex::new(inner) })
    }

    /// Port at which the handshake listener listens.
    #[getter]
    fn handshake_port(&self, py: Python<'_>) -> PyResult<u16> {
        self.call(py, |inner| Ok(inner.handshake_port()))
    }

    /// A request arrived. `params` is its `kv_transfer_params`. Returns its role: `plain`, `producer` or `consumer`.
    #[pyo3(signature = (request, prompt, params=None))]
    fn request_arrived(
        &self,
        py: Python<'_>,
        request: &str,
        prompt: Vec<u32>,
        params: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<&'static str> {
        let request = id(request)?;
        let params: Option<Value> = params
            .map(pythonize::depythonize)
            .transpose()
            .map_err(|e| RequestError::new_err(format!("kv_transfer_params: {e}")))?;
        let role = self.call(py, |inner| inner.request_arrived(&request, &prompt, params.as_ref()))?;
        Ok(match role {
            Role::Plain => "plain",
            Role::Producer => "producer",
            Role::Consumer => "consumer",
            Role::Relay => "relay",
        })
    }

    /// Tokens that a load would bring beyond the `local_tokens` that are here. Changes nothing.
    fn remote_tokens(&self, py: Python<'_>, request: &str, local_tokens: u32) -> PyResult<u32> {
        let request = id(request)?;
        self.call(py, |inner| Ok(inner.remote_tokens(&request, local_tokens)))
    }

    /// The engine allocated the request's blocks, by group, from the start of the sequence; `remote_tokens` is what it
    /// was answered. Returns the number of the load that begins with the next plan, or `None`.
    fn blocks_allocated(
        &self,
        py: Python<'_>,
        request: &str,
        local_tokens: u32,
        remote_tokens: u32,
        blocks: Vec<Vec<u32>>,
    ) -> PyResult<Option<u64>> {
        let (request, blocks) = (id(request)?, lists(blocks));
        self.call(py, |inner| {
            inner.blocks_allocated(&request, local_tokens, remote_tokens, &blocks)?;
            Ok(inner.load_of(&request).map(|load| load.0))
        })
    }

    /// The request finished as asked for: its blocks, by group, hold the KV of `computed_tokens`.
    fn request_finished(
        &self,
        py: Python<'_>,
        request: &str,
        computed_tokens: u32,
        blocks: Vec<Vec<u32>>,
    ) -> PyResult<Finished> {
        self.end(
            py,
            request,
            &RequestEnd::Complete { computed_tokens, blocks: lists(blocks), sampled: vec![] },
        )
    }

    /// The request was aborted, rejected or failed, at whatever point.
    fn request_aborted(&self, py: Python<'_>, request: &str) -> PyResult<Finished> {
        self.end(py, request, &RequestEnd::Aborted)
    }

    /// The engine will compute the prompt although an offer came with it.
    fn request_declined(&self, py: Python<'_>, request: &str) -> PyResult<()> {
        let request = id(request)?;
        self.call(py, |inner| {
            inner.request_declined(&request);
            Ok(())
        })
    }

    /// A request lost its blocks and will be scheduled anew. Returns what holds the blocks, if anything does.
    fn request_preempted(&self, py: Python<'_>, request: &str) -> PyResult<Option<String>> {
        let request = id(request)?;
        let verdict = self.call(py, |inner| Ok(inner.request_preempted(&request)))?;
        Ok(match verdict {
            Verdict::Free => None,
            Verdict::Hold(hold) => Some(hold_name(hold)),
        })
    }

    /// The plan of this step, to be carried to every worker; `None` if there is nothing to carry.
    fn plan_step<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let plan = self.call(py, SchedulerConnector::plan_step)?;
        Ok(plan.map(|bytes| PyBytes::new(py, &bytes)))
    }

    /// Whether a plan waits, so that an idle engine should make a step.
    fn has_plan(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |inner| Ok(inner.has_plan()))
    }

    /// Takes a worker's report.
    fn take_report(&self, py: Python<'_>, report: &[u8]) -> PyResult<()> {
        self.call(py, |inner| inner.take_report(report))
    }

    /// What happened since the last call, in order. To be taken once per step, reports or not.
    fn events(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let events = self.call(py, |inner| Ok(inner.events()))?;
        events.into_iter().map(|event| event_of(py, event)).collect()
    }

    /// Seconds that an idle engine may sleep until `events` has something to say; `None`: until something comes in.
    fn next_wake_s(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        self.call(py, |inner| Ok(inner.next_wake().map(|wake| wake.as_secs_f64())))
    }

    /// Takes nothing new, lets what was accepted finish for `limit_s` seconds, then ends it; `Drained` follows.
    fn drain(&self, py: Python<'_>, limit_s: f64) -> PyResult<()> {
        let limit = Duration::try_from_secs_f64(limit_s).map_err(|e| bad("limit_s", &e))?;
        self.call(py, |inner| {
            inner.drain(limit);
            Ok(())
        })
    }

    /// Takes new hand-overs again.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |inner| {
            inner.resume();
            Ok(())
        })
    }

    /// Counters, as a dict of dicts.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.call(py, |inner| Ok(inner.stats()))?;
        pythonize::pythonize(py, &stats).map_err(|e| bad("stats", &e))
    }
}
