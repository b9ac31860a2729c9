//! An engine's scheduler process: it starts its workers, runs the core on a thread of its own, and hands requests
//! in and happenings out.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_connector::recovery::Policy;
use kv_connector::{Config, ConnectorError, EngineIdentity, RequestId, SchedulerConnector};
use serde_json::{Value, json};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};

use super::core::{Core, CoreSettings};
use super::request::{Ask, Happening};
use super::wire::{FromWorker, ModelSource, ToWorker, WorkerCounters, WorkerStart, receive, send};

/// How long workers may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long workers may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How to build an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Worker processes.
    pub ranks: u32,
    /// The weights.
    pub model: ModelSource,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u32,
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
    /// No command to run workers with.
    #[error("worker_command is empty")]
    NoWorkerCommand,
}

type Accepted = Result<u64, String>;

enum Input {
    Ask { ask: Ask, happenings: mpsc::UnboundedSender<Happening>, accepted: oneshot::Sender<Accepted> },
    Abort(RequestId),
    AskAndAbort { ask: Ask, accepted: oneshot::Sender<Accepted> },
    Stats(oneshot::Sender<Value>),
    Worker { rank: u32, message: FromWorker },
    WorkerGone { rank: u32, reason: String },
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
            let _ = self.inputs.send(Input::Abort(self.id.clone()));
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

struct WorkerLink {
    stream: UnixStream,
    child: Child,
}

impl Engine {
    /// Starts the workers, then the connector, then the scheduler's thread.
    pub fn start(options: EngineOptions) -> Result<Self, EngineError> {
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
        for (rank, link) in links.iter().enumerate() {
            listen(rank as u32, link, inputs.clone()).map_err(system("start a thread"))?;
        }
        let connector = match (&options.connector, &identity) {
            (Some(config), Some(identity)) => {
                Some(SchedulerConnector::start(config, identity, &ready.cards)?)
            }
            _ => None,
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
        };
        let (end, ended) = oneshot::channel();
        let engine = Running {
            core: Core::new(settings, connector),
            counters: vec![WorkerCounters::default(); links.len()],
            links,
            done: BTreeMap::new(),
            clients: BTreeMap::new(),
            _folder: folder,
        };
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

struct Ready {
    cards: Vec<Vec<u8>>,
    vocab_size: u32,
    max_positions: u32,
}

fn spawn_workers(
    options: &EngineOptions,
    identity: Option<&EngineIdentity>,
    socket: &PathBuf,
    gather: &std::path::Path,
) -> Result<Vec<WorkerLink>, EngineError> {
    let system = |what| move |source| EngineError::System { what, source };
    let listener = UnixListener::bind(socket).map_err(system("bind a socket for workers"))?;
    listener.set_nonblocking(true).map_err(system("bind a socket for workers"))?;
    let Some((program, arguments)) = options.worker_command.split_first() else {
        return Err(EngineError::NoWorkerCommand);
    };
    let mut links = Vec::new();
    for rank in 0..options.ranks {
        let mut child = Command::new(program)
            .args(arguments)
            .arg(socket)
            .stdin(Stdio::null())
            .spawn()
            .map_err(system("start a worker process"))?;
        let connected = accept_worker(&listener, &mut child);
        let mut stream = match connected {
            Ok(stream) => stream,
            Err(reason) => {
                // It is ours, and has not started to work.
                let _ = child.kill();
                let _ = child.wait();
                end_workers(&mut links);
                return Err(EngineError::Worker { rank, reason });
            }
        };
        let start = WorkerStart {
            rank,
            ranks: options.ranks,
            model: options.model.clone(),
            block_tokens: options.block_tokens,
            blocks: options.blocks,
            connector: options.connector.clone().zip(identity.cloned()),
            gather_socket: gather.to_string_lossy().into_owned(),
            unmoved: options.unmoved,
        };
        let sent = send(&mut stream, &ToWorker::Start(Box::new(start)));
        links.push(WorkerLink { stream, child });
        if let Err(source) = sent {
            end_workers(&mut links);
            return Err(EngineError::System { what: "speak to a worker", source });
        }
    }
    Ok(links)
}

fn accept_worker(listener: &UnixListener, child: &mut Child) -> Result<UnixStream, String> {
    let until = Instant::now() + START_LIMIT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                return stream.set_nonblocking(false).map(|()| stream).map_err(|e| e.to_string());
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error.to_string()),
            Err(_) => {}
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("it ended with {status}"));
        }
        if Instant::now() >= until {
            return Err(format!("it did not connect within {START_LIMIT:?}"));
        }
        // A child that ends gives no event on the socket, so both are looked at in turn.
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn await_ready(links: &mut [WorkerLink]) -> Result<Ready, EngineError> {
    let mut all = Ready { cards: Vec::new(), vocab_size: u32::MAX, max_positions: u32::MAX };
    for (rank, link) in links.iter_mut().enumerate() {
        let failed = |reason: String| EngineError::Worker { rank: rank as u32, reason };
        link.stream.set_read_timeout(Some(START_LIMIT)).map_err(|e| failed(e.to_string()))?;
        match receive(&mut link.stream).map_err(|e| failed(e.to_string()))? {
            FromWorker::Ready { card, vocab_size, max_positions, .. } => {
                all.cards.extend(card.map(|c| c.into_vec()));
                all.vocab_size = all.vocab_size.min(vocab_size);
                all.max_positions = all.max_positions.min(max_positions);
            }
            FromWorker::Failed { message } => return Err(failed(message)),
            FromWorker::Done { .. } | FromWorker::Nudge => {
                return Err(failed("it answered before it was asked".to_owned()));
            }
        }
        link.stream.set_read_timeout(None).map_err(|e| failed(e.to_string()))?;
    }
    Ok(all)
}

fn listen(rank: u32, link: &WorkerLink, inputs: Sender<Input>) -> io::Result<()> {
    let mut stream = link.stream.try_clone()?;
    std::thread::Builder::new().name(format!("from-worker-{rank}")).spawn(move || {
        loop {
            let input = match receive(&mut stream) {
                Ok(message) => Input::Worker { rank, message },
                Err(error) => {
                    let _ = inputs.send(Input::WorkerGone { rank, reason: error.to_string() });
                    return;
                }
            };
            if inputs.send(input).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Asks workers to end, and makes those end that do not.
fn end_workers(links: &mut Vec<WorkerLink>) {
    for link in links.iter_mut() {
        // One that is gone needs no word.
        let _ = send(&mut link.stream, &ToWorker::Stop);
        let _ = link.stream.shutdown(Shutdown::Write);
    }
    let until = Instant::now() + STOP_LIMIT;
    for mut link in links.drain(..) {
        while matches!(link.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        if matches!(link.child.try_wait(), Ok(None)) {
            let _ = link.child.kill();
            let _ = link.child.wait();
        }
    }
}

struct StepTokens {
    ranks: usize,
    tokens: Vec<Option<u32>>,
}

struct Running {
    core: Core,
    links: Vec<WorkerLink>,
    counters: Vec<WorkerCounters>,
    done: BTreeMap<u64, StepTokens>,
    clients: BTreeMap<u64, mpsc::UnboundedSender<Happening>>,
    _folder: tempfile::TempDir,
}

impl Running {
    /// Runs until told to stop or until a worker is lost; says why.
    fn run(mut self, queue: &Receiver<Input>) -> String {
        let reason = loop {
            let first = match self.core.next_wake() {
                Some(wait) => match queue.recv_timeout(wait.max(Duration::from_millis(1))) {
                    Ok(input) => Some(input),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break "no handle is left".to_owned(),
                },
                None => match queue.recv() {
                    Ok(input) => Some(input),
                    Err(_) => break "no handle is left".to_owned(),
                },
            };
            let mut batch: Vec<Input> = first.into_iter().chain(queue.try_iter()).collect();
            // Clients that went away are heard before the results of the same turn.
            batch.sort_by_key(|input| match input {
                Input::Ask { .. } | Input::AskAndAbort { .. } => 0,
                Input::Abort(_) => 1,
                _ => 2,
            });
            let mut end = None;
            for input in batch {
                end = end.or(self.take(input));
            }
            if let Some(end) = end {
                break end;
            }
            if let Err(error) = self.order_steps() {
                break format!("a worker cannot be reached: {error}");
            }
            self.tell_clients();
        };
        end_workers(&mut self.links);
        reason
    }

    fn take(&mut self, input: Input) -> Option<String> {
        match input {
            Input::Ask { ask, happenings, accepted } => {
                let answer = self.core.arrive(ask);
                if let Ok(number) = &answer {
                    self.clients.insert(*number, happenings);
                }
                // A client that is gone already sends its abort behind.
                let _ = accepted.send(answer);
            }
            Input::Abort(id) => self.core.abort(&id),
            Input::AskAndAbort { ask, accepted } => {
                let id = ask.id.clone();
                let answer = self.core.arrive(ask);
                if answer.is_ok() {
                    self.core.abort(&id);
                }
                let _ = accepted.send(answer);
            }
            Input::Stats(to) => drop(to.send(self.stats())),
            Input::Worker { rank, message } => match message {
                FromWorker::Done { step, tokens, report, counters } => {
                    self.worker_done(rank, step, tokens, report.as_deref().map(Vec::as_slice), counters);
                }
                FromWorker::Nudge => self.core.nudge(),
                FromWorker::Failed { message } => return Some(format!("worker {rank}: {message}")),
                FromWorker::Ready { .. } => {}
            },
            Input::WorkerGone { rank, reason } => return Some(format!("worker {rank} is gone: {reason}")),
            Input::Stop => return Some("stopped".to_owned()),
        }
        None
    }

    fn worker_done(
        &mut self,
        rank: u32,
        step: u64,
        tokens: Vec<Option<u32>>,
        report: Option<&[u8]>,
        counters: WorkerCounters,
    ) {
        if let Some(slot) = self.counters.get_mut(rank as usize) {
            *slot = counters;
        }
        if let Some(report) = report {
            self.core.take_report(report);
        }
        let entry = self.done.entry(step).or_insert(StepTokens { ranks: 0, tokens });
        entry.ranks += 1;
        if entry.ranks == self.links.len()
            && let Some(done) = self.done.remove(&step)
        {
            self.core.step_done(step, &done.tokens);
        }
    }

    fn order_steps(&mut self) -> io::Result<()> {
        while let Some(order) = self.core.next_step() {
            let order = ToWorker::Step(order);
            for link in &mut self.links {
                send(&mut link.stream, &order)?;
            }
        }
        Ok(())
    }

    fn tell_clients(&mut self) {
        for (number, happening) in self.core.take_happenings() {
            let last = matches!(happening, Happening::Finished { .. } | Happening::Failed { .. });
            if let Some(client) = self.clients.get(&number) {
                // A client that is gone sends an abort.
                let _ = client.send(happening);
            }
            if last {
                self.clients.remove(&number);
            }
        }
        self.clients.retain(|_, client| !client.is_closed());
    }

    fn stats(&self) -> Value {
        let core = self.core.stats();
        let pool = self.core.pool();
        let sum = |of: fn(&WorkerCounters) -> u64| self.counters.iter().map(of).sum::<u64>();
        let connector = self.core.connector().map(|connector| {
            let stats = connector.stats();
            let named = |list: &mut dyn Iterator<Item = (&'static str, u64)>| -> Value {
                list.map(|(name, count)| (name.to_owned(), json!(count)))
                    .collect::<serde_json::Map<_, _>>()
                    .into()
            };
            json!({
                "holds": stats.holds,
                "leases": {
                    "granted": stats.producer.granted,
                    "confirmed": stats.producer.confirmed,
                    "released": stats.producer.released,
                    "expired": stats.producer.expired,
                    "forgotten": stats.producer.forgotten,
                },
                "loads": {
                    "ordered": stats.consumer.loads,
                    "loaded": stats.consumer.loaded,
                    "remote_tokens": stats.consumer.remote_tokens,
                    "bytes": stats.consumer.bytes,
                    "failed": named(&mut stats.consumer.failed.iter().map(|(r, n)| (r.name(), *n))),
                    "given_back": named(&mut stats.consumer.released.iter().map(|(r, n)| (r.name(), *n))),
                },
                "handshakes_answered": stats.handshakes.accepted,
            })
        });
        json!({
            "requests": core.requests,
            "unfinished": self.core.request_count(),
            "aborted": core.aborted,
            "stray_aborts": core.stray_aborts,
            "preempted": core.preempted,
            "steps": core.steps,
            "blocks": pool.size(),
            "blocks_held": pool.held(),
            "connector": connector,
            "workers": {
                "lapsed": sum(|c| c.lapsed),
                "early_ends": sum(|c| c.early_ends),
                "handshakes": sum(|c| c.handshakes),
                "renewals": sum(|c| c.renewals),
                "expelled": sum(|c| c.expelled),
                "pulls": sum(|c| c.pulls),
            },
        })
    }
}
