//! An engine's scheduler process: it starts its workers, runs the core on a thread of its own, and hands requests
//! in and happenings out.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use kv_connector::recovery::Policy;
use kv_connector::{Config, ConnectorError, EngineIdentity, RequestId, SchedulerConnector, StagingSetup};
use serde_json::Value;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};

use super::cache_layout::CacheLayout;
use super::core::{Core, CoreSettings};
use super::links::{Ready, WorkerLink, await_ready, end_workers, listen, spawn_workers};
use super::request::{Ask, Happening};
use super::running::Running;
use super::wire::{FromWorker, ModelSource};

/// How to build an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Worker processes.
    pub ranks: u32,
    /// The weights.
    pub model: ModelSource,
    /// How the cache lies in memory.
    pub layout: CacheLayout,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u32,
    /// Blocks in a pool of host memory through which hand-overs go, the cache being on a device (one that is made of host
    /// memory that no transport sees); `None`: the cache is in host memory.
    pub staging_blocks: Option<u32>,
    /// Most tokens in one step.
    pub step_tokens: u32,
    /// Schedule one step ahead.
    pub run_ahead: bool,
    /// What follows a failed load.
    pub policy: Policy,
    /// The connector's configuration; `None` for an engine that stands alone.
    pub connector: Option<Config>,
    /// Claim every read without doing it.
    pub unmoved: bool,
    /// A plan of faults, as [`crate::faults::FaultPlan::parse`] reads it, that the workers' transports suffer.
    pub faults: Option<String>,
    /// Program and arguments that run [`super::worker::run`] with a socket's path, which is added at the end.
    pub worker_command: Vec<String>,
}

/// Why an engine could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's words.
        source: io::Error,
    },
    /// A worker did not start.
    #[error("worker {rank} did not start: {reason}")]
    Worker {
        /// Its rank.
        rank: u32,
        /// Why.
        reason: String,
    },
    /// The connector did not start.
    #[error(transparent)]
    Connector(#[from] ConnectorError),
    /// An engine that could never answer.
    #[error("{field} is 0; at least 1 is needed")]
    Zero {
        /// The option.
        field: &'static str,
    },
    /// No command to run workers with.
    #[error("worker_command is empty")]
    NoWorkerCommand,
}

pub(super) type Accepted = Result<u64, String>;

pub(super) enum Input {
    Ask {
        ask: Ask,
        happenings: mpsc::UnboundedSender<Happening>,
        accepted: oneshot::Sender<Accepted>,
    },
    Abort(RequestId),
    /// The ticket of a request was dropped.
    Left(RequestId),
    AskAndAbort {
        ask: Ask,
        accepted: oneshot::Sender<Accepted>,
    },
    Stats(oneshot::Sender<Value>),
    Worker {
        rank: u32,
        message: FromWorker,
    },
    WorkerGone {
        rank: u32,
        reason: String,
    },
    Stop,
}

/// Speaks to a running engine; cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    inputs: Sender<Input>,
}

/// A request that is under way. Dropping it before it has ended aborts it.
pub struct Ticket {
    inputs: Sender<Input>,
    id: RequestId,
    happenings: mpsc::UnboundedReceiver<Happening>,
    ended: bool,
}

/// The engine is gone, or does not want the request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// It refuses the request.
    #[error("{0}")]
    Refused(String),
    /// It has ended.
    #[error("the engine has ended")]
    Ended,
}

impl EngineHandle {
    /// Hands in a request and waits until it is accepted.
    pub async fn submit(&self, ask: Ask) -> Result<Ticket, SubmitError> {
        let (to_us, happenings) = mpsc::unbounded_channel();
        let (accepted, answer) = oneshot::channel();
        let id = ask.id.clone();
        self.inputs.send(Input::Ask { ask, happenings: to_us, accepted }).map_err(|_| SubmitError::Ended)?;
        // From here on the request may be in the engine: if we are dropped, so must it be.
        let mut ticket = Ticket { inputs: self.inputs.clone(), id, happenings, ended: false };
        match answer.await {
            Ok(Ok(_)) => Ok(ticket),
            Ok(Err(reason)) => {
                ticket.ended = true;
                Err(SubmitError::Refused(reason))
            }
            Err(_) => Err(SubmitError::Ended),
        }
    }

    /// Hands in a request whose client goes away before the scheduler has looked at it.
    pub async fn submit_gone(&self, ask: Ask) -> Result<(), SubmitError> {
        let (accepted, answer) = oneshot::channel();
        self.inputs.send(Input::AskAndAbort { ask, accepted }).map_err(|_| SubmitError::Ended)?;
        match answer.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(reason)) => Err(SubmitError::Refused(reason)),
            Err(_) => Err(SubmitError::Ended),
        }
    }

    /// Says that a request's client went away.
    pub fn abort(&self, id: RequestId) {
        // An engine that has ended has no requests.
        let _ = self.inputs.send(Input::Abort(id));
    }

    /// The engine's figures.
    pub async fn stats(&self) -> Option<Value> {
        let (to_us, answer) = oneshot::channel();
        self.inputs.send(Input::Stats(to_us)).ok()?;
        answer.await.ok()
    }
}

impl Ticket {
    /// The next thing that happens to the request; `None` if the engine has ended.
    pub async fn next(&mut self) -> Option<Happening> {
        let happening = self.happenings.recv().await;
        if matches!(happening, None | Some(Happening::Finished { .. } | Happening::Failed { .. })) {
            self.ended = true;
        }
        happening
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.ended {
            // Closed first: the engine tells by it whether the request that now has this id is ours.
            self.happenings.close();
            let _ = self.inputs.send(Input::Left(self.id.clone()));
        }
    }
}

/// A running engine. Dropping it ends its workers.
pub struct Engine {
    inputs: Sender<Input>,
    thread: Option<JoinHandle<()>>,
    handshake_port: Option<u16>,
    ended: Option<oneshot::Receiver<String>>,
}

impl Engine {
    /// Starts the workers, then the connector, then the scheduler's thread.
    pub fn start(options: EngineOptions) -> Result<Self, EngineError> {
        for (field, value) in [
            ("ranks", options.ranks),
            ("block_tokens", options.block_tokens),
            ("blocks", options.blocks),
            ("staging_blocks", options.staging_blocks.unwrap_or(1)),
            ("step_tokens", options.step_tokens),
        ] {
            if value == 0 {
                return Err(EngineError::Zero { field });
            }
        }
        let system = |what| move |source| EngineError::System { what, source };
        let folder = tempfile::Builder::new()
            .prefix("kv-engine-")
            .tempdir()
            .map_err(system("make a folder for sockets"))?;
        let identity = match &options.connector {
            Some(config) => Some(EngineIdentity::draw(config, options.ranks)?),
            None => None,
        };
        let (inputs, queue) = channel();
        let socket = folder.path().join("scheduler");
        let gather = folder.path().join("gather");
        let mut links = spawn_workers(&options, identity.as_ref(), &socket, &gather)?;
        let ready = match await_ready(&mut links) {
            Ok(ready) => ready,
            Err(error) => {
                end_workers(&mut links);
                return Err(error);
            }
        };
        let connector = match start_connector(&options, identity.as_ref(), &ready, &links, &inputs) {
            Ok(connector) => connector,
            Err(error) => {
                end_workers(&mut links);
                return Err(error);
            }
        };
        let handshake_port = connector.as_ref().map(SchedulerConnector::handshake_port);
        let settings = CoreSettings {
            block_tokens: options.block_tokens,
            blocks: options.blocks,
            step_tokens: options.step_tokens,
            run_ahead: options.run_ahead,
            policy: options.policy,
            vocab_size: ready.vocab_size,
            max_positions: ready.max_positions,
            groups: ready.groups.clone(),
        };
        let (end, ended) = oneshot::channel();
        let engine = Running::new(Core::new(settings, connector), links, folder);
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                // Nobody may be listening for the reason.
                let _ = end.send(engine.run(&queue));
            })
            .map_err(system("start a thread"))?;
        Ok(Self { inputs, thread: Some(thread), handshake_port, ended: Some(ended) })
    }

    /// Speaks to it.
    pub fn handle(&self) -> EngineHandle {
        EngineHandle { inputs: self.inputs.clone() }
    }

    /// Port of its handshake listener, if it has a connector.
    pub fn handshake_port(&self) -> Option<u16> {
        self.handshake_port
    }

    /// Why the engine ended by itself; to be asked for once, waits until it does.
    pub async fn ended(&mut self) -> String {
        match self.ended.take() {
            Some(ended) => ended.await.unwrap_or_else(|_| "the engine's thread failed".to_owned()),
            None => std::future::pending().await,
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.inputs.send(Input::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic of it was told when it happened.
            let _ = thread.join();
        }
    }
}

/// Starts the connector, then to listen to the workers.
fn start_connector(
    options: &EngineOptions,
    identity: Option<&EngineIdentity>,
    ready: &Ready,
    links: &[WorkerLink],
    inputs: &Sender<Input>,
) -> Result<Option<SchedulerConnector>, EngineError> {
    let connector = match (&options.connector, identity) {
        (Some(config), Some(identity)) => {
            let mut connector = SchedulerConnector::start(config, identity, &ready.cards)?;
            if options.staging_blocks.is_some() {
                connector.stage(StagingSetup::new(options.blocks))?;
            }
            Some(connector)
        }
        _ => None,
    };
    for (rank, link) in links.iter().enumerate() {
        listen(rank as u32, link, inputs.clone())
            .map_err(|source| EngineError::System { what: "start a thread", source })?;
    }
    Ok(connector)
}
