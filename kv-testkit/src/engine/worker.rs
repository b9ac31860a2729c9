//! A worker process: one rank's share of the model, its part of the KV cache, and the connector's worker half.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use kv_connector::worker::open_transport;
use kv_connector::{ConnectorError, DeviceCache, Rank, StagingLimits, WorkerConnector, WorkerSetup};
use kv_transport::MemoryError;
use serde_bytes::ByteBuf;
use thiserror::Error;

use super::gather::SocketReduce;
use super::model::{Chunk, ModelConfig, ModelError, Shard, Weights};
use super::store::{CachePlace, CacheSpec, MemoryStore, group_kinds};
use super::wire::{FromWorker, ModelSource, StepOrder, ToWorker, WorkerCounters, WorkerStart, receive, send};
use crate::device::HostDevice;
use crate::faults::{FaultPlan, FaultyTransport, PlanError};
use crate::unmoved::Unmoved;

fn load_weights(source: &ModelSource) -> Result<Weights, ModelError> {
    match source {
        ModelSource::Seed { seed, kind, kv_heads } => {
            Weights::seeded(&ModelConfig::tiny_of(*kind, *kv_heads as usize), *seed)
        }
        ModelSource::Folder(folder) => Weights::from_folder(Path::new(folder)),
    }
}

/// Why a worker cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkerProcessError {
    /// The model cannot be loaded or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device's thread cannot be started.
    #[error("the device cannot be started: {0}")]
    Device(io::Error),
    /// The connector cannot be started, or refused a plan.
    #[error(transparent)]
    Connector(#[from] ConnectorError),
    /// The scheduler process or another rank is gone.
    #[error("connection inside the engine: {0}")]
    Io(#[from] io::Error),
    /// The plan of faults cannot be.
    #[error(transparent)]
    Faults(#[from] PlanError),
    /// The scheduler process sent something else than was expected.
    #[error("the scheduler process sent {got} where {expected} was expected")]
    Unexpected {
        /// What came.
        got: &'static str,
        /// What should have come.
        expected: &'static str,
    },
    /// A step asks for the token sampled last of a request that has none.
    #[error("step {step}: request {request} has no token sampled")]
    NoToken {
        /// The step.
        step: u64,
        /// The request.
        request: u64,
    },
}

/// Runs a worker until its scheduler process says stop or is gone.
pub fn run(socket: &Path) -> Result<(), WorkerProcessError> {
    let mut stream = UnixStream::connect(socket)?;
    let start = match receive(&mut stream)? {
        ToWorker::Start(start) => *start,
        ToWorker::Step(_) => return Err(WorkerProcessError::Unexpected { got: "a step", expected: "start" }),
        ToWorker::Stop => return Ok(()),
    };
    // One thread writes, so that the connector's thread can ask for a step without waiting for the socket.
    let (outbox, queue) = channel::<FromWorker>();
    let mut writing = stream.try_clone()?;
    std::thread::Builder::new().name("to-scheduler".to_owned()).spawn(move || {
        while let Ok(message) = queue.recv() {
            if send(&mut writing, &message).is_err() {
                // The reading side notices the same and ends the process.
                return;
            }
        }
    })?;
    match serve(&mut stream, &start, &outbox) {
        Ok(()) => Ok(()),
        Err(error) => {
            // If the scheduler process is gone nobody needs to be told.
            let _ = outbox.send(FromWorker::Failed { message: error.to_string() });
            Err(error)
        }
    }
}

struct Rig {
    shard: Shard,
    store: MemoryStore,
    reduce: SocketReduce,
    connector: Option<WorkerConnector>,
    block_tokens: usize,
    sampled: BTreeMap<u64, u32>,
}

fn serve(
    stream: &mut UnixStream,
    start: &WorkerStart,
    outbox: &Sender<FromWorker>,
) -> Result<(), WorkerProcessError> {
    let weights = load_weights(&start.model)?;
    let config = weights.config().clone();
    let shard = Shard::new(&config, &weights, start.rank as usize, start.ranks as usize)?;
    // What can be mapped by a peer on this host costs nothing where no peer maps it.
    let shared = start.connector.as_ref().is_some_and(|(settings, _)| settings.transport != "tcp");
    let device = match start.staging_blocks {
        Some(_) => Some(HostDevice::new().map_err(WorkerProcessError::Device)?),
        None => None,
    };
    let spec = CacheSpec {
        model: &config,
        heads: shard.cache_heads(),
        layout: start.layout,
        block_tokens: start.block_tokens,
        blocks: start.blocks,
        place: device.as_ref().map_or(CachePlace::Host { shared }, CachePlace::Device),
    };
    let store = MemoryStore::build(spec)?;
    // What peers see of a cache on a device: blocks of the host's that pass it on.
    let pool = match (start.staging_blocks, &device) {
        (Some(blocks), Some(device)) => {
            Some(MemoryStore::build(CacheSpec { blocks, place: CachePlace::Pinned(device), ..spec })?)
        }
        _ => None,
    };
    let seen = pool.as_ref().unwrap_or(&store);
    let connector = match &start.connector {
        None => None,
        Some((settings, identity)) => {
            let nudges = outbox.clone();
            let setup = WorkerSetup {
                rank: Rank(start.rank),
                model: weights.fingerprint().iter().map(|b| format!("{b:02x}")).collect(),
                layout: seen.layout().clone(),
                memories: vec![seen.memory()],
                // A closed queue means that this worker is ending anyway.
                on_report: Box::new(move || drop(nudges.send(FromWorker::Nudge))),
            };
            let mut transport = open_transport(settings)?;
            if start.unmoved {
                transport = Arc::new(Unmoved::new(transport));
            }
            if let Some(plan) = &start.faults {
                let plan = FaultPlan::parse(plan)?;
                transport = Arc::new(FaultyTransport::new(transport, &plan).map_err(ConnectorError::from)?);
            }
            let connector = WorkerConnector::start_over(settings, identity, setup, transport)?;
            if device.is_some() {
                let (layout, memories) = (store.layout().clone(), vec![store.memory()]);
                connector.stage(DeviceCache { layout, memories, limits: StagingLimits::default() })?;
            }
            Some(connector)
        }
    };
    drop(weights);
    let reduce = SocketReduce::join(Path::new(&start.gather_socket), start.rank, start.ranks)?;
    let card = connector.as_ref().map(WorkerConnector::card).transpose()?.map(ByteBuf::from);
    // A queue that is closed means that the scheduler process is gone, which the next read tells.
    let _ = outbox.send(FromWorker::Ready {
        rank: start.rank,
        card,
        vocab_size: config.vocab_size as u32,
        max_positions: config.max_position_embeddings as u32,
        groups: group_kinds(&config),
    });
    let block_tokens = start.block_tokens as usize;
    let mut rig = Rig { shard, store, reduce, connector, block_tokens, sampled: BTreeMap::new() };
    loop {
        match receive(stream) {
            Ok(ToWorker::Step(order)) => {
                let done = rig.step(order)?;
                let _ = outbox.send(done);
            }
            Ok(ToWorker::Stop) => break,
            Ok(ToWorker::Start(_)) => {
                return Err(WorkerProcessError::Unexpected { got: "start", expected: "a step" });
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(connector) = &mut rig.connector {
        connector.shut_down(Duration::from_secs(2));
    }
    Ok(())
}

impl Rig {
    fn step(&mut self, order: StepOrder) -> Result<FromWorker, WorkerProcessError> {
        if let (Some(connector), Some(plan)) = (&self.connector, &order.plan) {
            connector.begin_step(plan)?;
        }
        for request in &order.ended {
            self.sampled.remove(request);
        }
        let step = order.step;
        let mut last = Vec::with_capacity(order.work.len());
        for work in &order.work {
            last.push(if work.tokens.is_empty() {
                let request = work.request;
                Some(*self.sampled.get(&request).ok_or(WorkerProcessError::NoToken { step, request })?)
            } else {
                None
            });
        }
        let chunks: Vec<Chunk<'_>> = order
            .work
            .iter()
            .zip(&last)
            .map(|(work, last)| Chunk {
                tokens: last.as_ref().map_or(work.tokens.as_slice(), std::slice::from_ref),
                start: work.start as usize,
                blocks: work.blocks.first().map_or(&[], Vec::as_slice),
                window_blocks: work.blocks.get(1).map_or(&[], Vec::as_slice),
                wants_token: work.wants_token,
            })
            .collect();
        let tokens = self.shard.forward(&chunks, self.block_tokens, &mut self.store, &mut self.reduce)?;
        for (work, token) in order.work.iter().zip(&tokens) {
            if let Some(token) = token {
                self.sampled.insert(work.request, *token);
            }
        }
        let report = self.connector.as_ref().map(WorkerConnector::report).transpose()?.flatten();
        Ok(FromWorker::Done { step, tokens, report: report.map(ByteBuf::from), counters: self.counters() })
    }

    fn counters(&self) -> WorkerCounters {
        let Some(connector) = &self.connector else { return WorkerCounters::default() };
        let stats = connector.stats();
        WorkerCounters {
            lapsed: stats.ledger.lapsed,
            early_ends: stats.ledger.early,
            handshakes: stats.peers.handshakes,
            renewals: stats.peers.renewals,
            expelled: stats.readers.expelled,
            pulls: stats.pulls,
            retried: stats.retried,
            loads_failed: stats.readers.loads_failed,
            self_checks: stats.readers.self_checks,
            self_checks_failed: stats.readers.self_checks_failed,
        }
    }
}
