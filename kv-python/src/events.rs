//! What the engine is told by the scheduler half.

use kv_connector::{BlockList, HoldId, LoadResult, SchedEvent};
use pyo3::prelude::*;

pub(crate) fn hold_name(hold: HoldId) -> String {
    match hold {
        HoldId::Lease(lease) => format!("lease-{}", lease.0),
        HoldId::Load(load) => format!("load-{}", load.0),
    }
}

pub(crate) fn ids(lists: &[BlockList]) -> Vec<Vec<u32>> {
    lists.iter().map(|list| list.iter().map(|block| block.0).collect()).collect()
}

/// A load that a request waits for has ended.
#[pyclass(frozen, get_all, module = "kv_connector")]
#[derive(Debug)]
pub(crate) struct LoadEnded {
    /// The request.
    pub request: String,
    /// Whether every rank has its bytes and every rank of the producer confirmed its lease.
    pub loaded: bool,
    /// Tokens from the start of the prompt whose KV is here and good: all, or those before what failed.
    pub valid_tokens: u32,
    /// Of the tokens of a good load, how many came from the producer.
    pub remote_tokens: u32,
    /// Bytes of a good load, over all ranks.
    pub bytes: u64,
    /// Why it failed, a word; empty if it did not.
    pub reason: String,
    /// Why it failed, for a person.
    pub detail: String,
    /// Blocks that may hold wrong bytes, by group.
    pub invalid: Vec<Vec<u32>>,
    /// What still holds the invalid blocks; `None`: they are quiet and stay the request's.
    pub hold: Option<String>,
}

/// Blocks that were held are free.
#[pyclass(frozen, get_all, module = "kv_connector")]
#[derive(Debug)]
pub(crate) struct BlocksReleased {
    /// What held them.
    pub hold: String,
    /// The request that they were of.
    pub request: String,
    /// The blocks, by group.
    pub blocks: Vec<Vec<u32>>,
}

/// Workers have not reported an end that they must have reached: they are dead or stuck.
#[pyclass(frozen, get_all, module = "kv_connector")]
#[derive(Debug)]
pub(crate) struct WorkersSilent {
    /// What waits for them.
    pub hold: String,
    /// The ranks that are missing.
    pub missing: Vec<u32>,
}

/// A drain is over.
#[pyclass(frozen, get_all, module = "kv_connector")]
#[derive(Debug)]
pub(crate) struct Drained {
    /// Hand-overs that could not be ended in time.
    pub left: usize,
}

/// As an object of Python's.
pub(crate) fn event_of(py: Python<'_>, event: SchedEvent) -> PyResult<Py<PyAny>> {
    Ok(match event {
        SchedEvent::LoadEnded { request, result } => {
            let request = request.as_str().to_owned();
            Bound::new(py, ended(request, result))?.into_any().unbind()
        }
        SchedEvent::BlocksReleased { hold, request, blocks } => {
            let (hold, request, blocks) = (hold_name(hold), request.as_str().to_owned(), ids(&blocks));
            Bound::new(py, BlocksReleased { hold, request, blocks })?.into_any().unbind()
        }
        SchedEvent::WorkersSilent { hold, missing } => {
            let missing = missing.iter().map(|rank| rank.0).collect();
            Bound::new(py, WorkersSilent { hold: hold_name(hold), missing })?.into_any().unbind()
        }
        SchedEvent::Drained { left } => {
            let left = left.computing + left.leases + left.queued + left.loads;
            Bound::new(py, Drained { left })?.into_any().unbind()
        }
    })
}

fn ended(request: String, result: LoadResult) -> LoadEnded {
    match result {
        LoadResult::Loaded { tokens, remote_tokens, stats } => LoadEnded {
            request,
            loaded: true,
            valid_tokens: tokens,
            remote_tokens,
            bytes: stats.bytes,
            reason: String::new(),
            detail: String::new(),
            invalid: Vec::new(),
            hold: None,
        },
        LoadResult::Failed { reason, detail, invalid, valid_tokens, hold, .. } => LoadEnded {
            request,
            loaded: false,
            valid_tokens,
            remote_tokens: 0,
            bytes: 0,
            reason: reason.name().to_owned(),
            detail,
            invalid: ids(&invalid),
            hold: hold.map(hold_name),
        },
    }
}
