//! An engine's worker processes as its scheduler process sees them.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use kv_connector::EngineIdentity;
use kv_proto::GroupKind;

use super::process::{EngineError, EngineOptions, Input};
use super::wire::{FromWorker, ToWorker, WorkerStart, receive, send};

/// How long workers may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long workers may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// A worker process, and the socket to it.
pub(super) struct WorkerLink {
    pub(super) stream: UnixStream,
    child: Child,
}

/// What the workers said when they were ready.
pub(super) struct Ready {
    pub(super) cards: Vec<Vec<u8>>,
    pub(super) vocab_size: u32,
    pub(super) max_positions: u32,
    pub(super) groups: Vec<GroupKind>,
}

/// Starts the worker processes of an engine and tells each what it is.
pub(super) fn spawn_workers(
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
            layout: options.layout,
            block_tokens: options.block_tokens,
            blocks: options.blocks,
            staging_blocks: options.staging_blocks,
            connector: options.connector.clone().zip(identity.cloned()),
            gather_socket: gather.to_string_lossy().into_owned(),
            unmoved: options.unmoved,
            faults: options.faults.clone(),
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

/// Waits until every worker is ready.
pub(super) fn await_ready(links: &mut [WorkerLink]) -> Result<Ready, EngineError> {
    let mut all =
        Ready { cards: Vec::new(), vocab_size: u32::MAX, max_positions: u32::MAX, groups: Vec::new() };
    for (rank, link) in links.iter_mut().enumerate() {
        let failed = |reason: String| EngineError::Worker { rank: rank as u32, reason };
        link.stream.set_read_timeout(Some(START_LIMIT)).map_err(|e| failed(e.to_string()))?;
        match receive(&mut link.stream).map_err(|e| failed(e.to_string()))? {
            FromWorker::Ready { card, vocab_size, max_positions, groups, .. } => {
                all.cards.extend(card.map(|c| c.into_vec()));
                all.vocab_size = all.vocab_size.min(vocab_size);
                all.max_positions = all.max_positions.min(max_positions);
                // The same on every rank, as the model is.
                all.groups = groups;
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

/// Starts a thread that hears a worker.
pub(super) fn listen(rank: u32, link: &WorkerLink, inputs: Sender<Input>) -> io::Result<()> {
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
pub(super) fn end_workers(links: &mut Vec<WorkerLink>) {
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
