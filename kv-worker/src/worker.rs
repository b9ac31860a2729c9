//! The worker half as an engine calls it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kv_proto::handshake::{CardError, TransportCard, WorkerCard, check_heads};
use kv_proto::layout::LayoutError;
use kv_proto::{
    BlockLayout, CodecError, CopyFailure, CopyId, CopyNews, CopyOrder, Fingerprint, Plan, Report,
};
use kv_transport::{Memory, Transport, TransportError};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::config::{WorkerConfig, WorkerConfigError};
use crate::digest::Digester;
use crate::driver::{Command, Dial, Driver, Shared};
use crate::machine::pulls::LocalMemory;
use crate::machine::worker::{WorkerMachine, WorkerStats};
use crate::self_check::SelfCheck;
use crate::staging::{DeviceCache, HostPool, Slot, Stager, StagerError, StagerStats};

/// How long dropping a [`Worker`] waits for its thread.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// Why a worker could not be started, or a call was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WorkerError {
    // You called it wrong.
    /// The configuration cannot be.
    #[error(transparent)]
    Config(#[from] WorkerConfigError),
    /// The layout cannot be.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The layout's heads are not those that the topology gives this rank.
    #[error(transparent)]
    Heads(#[from] CardError),
    /// A plan that is none; nothing of it was done.
    #[error(transparent)]
    Plan(#[from] CodecError),
    // The fabric failed.
    /// The transport refused to register memory.
    #[error("memory {index} cannot be registered: {source}")]
    Register {
        /// Index of the memory.
        index: usize,
        /// The transport's words.
        source: TransportError,
    },
    /// The driver's thread could not be started.
    #[error("the worker's thread cannot be started: {kind}")]
    Thread {
        /// The kind of failure.
        kind: std::io::ErrorKind,
    },
    /// The transport could not say by which other names it can be reached.
    #[error("the transport does not say how it can be reached: {source}")]
    Faces {
        /// The transport's words.
        source: TransportError,
    },
    // The engine's cache does not fit its host pool.
    /// Copies between the cache on the device and the registered memory cannot be made.
    #[error(transparent)]
    Stager(#[from] StagerError),
    /// The driver's thread has ended: shut down, or its transport closed.
    #[error("the worker has ended")]
    Ended,
}

/// What a worker is made of.
pub struct WorkerParts {
    /// Who it is, and its limits.
    pub config: WorkerConfig,
    /// Where its blocks lie.
    pub layout: BlockLayout,
    /// What must be equal on both sides.
    pub fingerprint: Fingerprint,
    /// The memories that the layout speaks of, by index.
    pub memories: Vec<Memory>,
    /// What moves the bytes. It belongs to this worker from now on.
    pub transport: Arc<dyn Transport>,
    /// Who shakes hands.
    pub dialler: Arc<dyn Dial>,
    /// Called on a thread of the worker's when a report begins to wait, so that an idle engine can make a step. Must
    /// not block.
    pub on_report: Box<dyn Fn() + Send + Sync>,
}

/// The worker half of one rank.
///
/// Its calls never block and never wait for the network: a thread of its own does the work, with its own timers,
/// also when the engine makes no step. Dropping it shuts it down, within two seconds.
pub struct Worker {
    card: WorkerCard,
    memories: Vec<Memory>,
    staging: Slot,
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    done: std::sync::mpsc::Receiver<()>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("rank", &self.card.rank).finish_non_exhaustive()
    }
}

impl Worker {
    /// Checks everything, registers the memories and starts the thread.
    pub fn start(parts: WorkerParts) -> Result<Self, WorkerError> {
        let WorkerParts { config, layout, fingerprint, memories, transport, dialler, on_report } = parts;
        config.check()?;
        let memory_sizes: Vec<u64> = memories.iter().map(|m| m.len() as u64).collect();
        layout.check(&memory_sizes)?;
        check_heads(config.topology, config.rank, &layout)?;
        let mut regions = Vec::with_capacity(memories.len());
        let mut keys = Vec::with_capacity(memories.len());
        let digester = Arc::new(Digester::new(layout.clone(), memories.clone()));
        let kept = memories.clone();
        for (index, memory) in memories.into_iter().enumerate() {
            let register = |source| WorkerError::Register { index, source };
            let region = transport.register(memory).map_err(register)?;
            keys.push(transport.key(region).map_err(register)?.as_bytes().to_vec().into());
            regions.push(region);
        }
        let mut transports = vec![TransportCard {
            name: transport.name().to_owned(),
            address: transport.address().as_bytes().to_vec(),
            keys,
        }];
        let faces = transport.faces(&regions).map_err(|source| WorkerError::Faces { source })?;
        transports.extend(faces.into_iter().map(|face| TransportCard {
            name: face.name.to_owned(),
            address: face.address.as_bytes().to_vec(),
            keys: face.keys.iter().map(|key| key.as_bytes().to_vec().into()).collect(),
        }));
        let card = WorkerCard {
            rank: config.rank,
            memory_sizes,
            layout: layout.clone(),
            fingerprint: fingerprint.clone(),
            transports,
        };
        let lens = card.memory_sizes.iter().copied();
        let self_check = SelfCheck::new(transport.clone(), regions.iter().copied().zip(lens).collect());
        let shared = Arc::new(Shared::new(Report::new(config.rank), on_report));
        let machine = WorkerMachine::new(config, LocalMemory { layout, regions }, transport.name());
        let driver =
            Driver { machine, transport, dialler, fingerprint, digester, self_check, shared: shared.clone() };
        let (commands, queue) = mpsc::unbounded_channel();
        let (end, done) = std::sync::mpsc::channel();
        let runtime = Driver::runtime().map_err(|e| WorkerError::Thread { kind: e.kind() })?;
        let thread = std::thread::Builder::new()
            .name("kv-worker".to_owned())
            .spawn(move || {
                driver.run(&runtime, queue);
                // A handshake's thread may still be inside a look-up; it ends by itself.
                runtime.shutdown_background();
                // Nobody listens any more if the handle gave up waiting.
                let _ = end.send(());
            })
            .map_err(|e| WorkerError::Thread { kind: e.kind() })?;
        let staging = Slot::default();
        Ok(Self { card, memories: kept, staging, commands, shared, thread: Some(thread), done })
    }

    /// Says that the registered memory is a host pool for the engine's cache on a device, and starts the thread that makes
    /// the copies which plans order. To be called once, before the first plan.
    pub fn stage(&self, cache: DeviceCache) -> Result<(), WorkerError> {
        let (rank, shared) = (self.card.rank, Arc::clone(&self.shared));
        let host = HostPool { layout: self.card.layout.clone(), memories: self.memories.clone() };
        let tell = move |copies| shared.add(Report { copies, ..Report::new(rank) });
        self.staging.put(Stager::start(cache, host, Box::new(tell))?);
        Ok(())
    }

    /// Counters of copies between the cache and the host pool; zero without them.
    pub fn staging_stats(&self) -> StagerStats {
        self.staging.stats()
    }

    /// What this worker publishes about itself, for the engine to carry to its scheduler half.
    pub fn card(&self) -> &WorkerCard {
        &self.card
    }

    /// Whether its thread runs. One that does not although nobody shut it down has met a fault of this library: what was
    /// in its hands will not be reported, and its transport goes down with it.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Takes a plan, as the scheduler half encoded it. Never blocks.
    pub fn begin_step(&self, plan: &[u8]) -> Result<(), WorkerError> {
        let mut plan = Plan::decode(plan)?;
        self.copy(std::mem::take(&mut plan.copies));
        self.commands.send(Command::Plan(plan)).map_err(|_| WorkerError::Ended)
    }

    /// Has copies made, or says that they cannot be.
    fn copy(&self, orders: Vec<CopyOrder>) {
        let ids: Vec<CopyId> = orders.iter().map(|order| order.copy).collect();
        if ids.is_empty() || self.staging.order(orders) {
            return;
        }
        let detail = "the worker was not told of a cache on a device".to_owned();
        let failed = CopyNews::Failed { reason: CopyFailure::NoDevice, detail };
        let copies = ids.into_iter().map(|copy| (copy, failed.clone())).collect();
        self.shared.add(Report { copies, ..Report::new(self.card.rank) });
    }

    /// What ended since the last call, for the scheduler half; `None` if nothing did. Never blocks.
    pub fn take_report(&self) -> Option<Report> {
        self.shared.take_report()
    }

    /// Puts a report back that could not be carried, in front of what has come since.
    pub fn put_back(&self, report: Report) {
        self.shared.put_back(report);
    }

    /// Counters, as of a moment ago.
    pub fn stats(&self) -> WorkerStats {
        self.shared.stats()
    }

    /// Ends reads, connections and the thread. Returns when that is done, or after `limit`. What ended is in a
    /// last [`Worker::take_report`].
    pub fn shut_down(&mut self, limit: Duration) {
        let Some(thread) = self.thread.take() else { return };
        // If the queue is closed the thread has ended by itself.
        let _ = self.commands.send(Command::Shutdown { limit });
        if self.done.recv_timeout(limit).is_ok() {
            // It has nothing left to do; a panic of it was told when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shut_down(DROP_LIMIT);
    }
}
