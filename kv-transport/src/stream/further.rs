//! Connections that are added to a peer. They are served by threads of their own, which there are only once there is such a
//! connection.
//!
//! An added connection is on probation until bytes have come over it: it carries no reads of ours, and its end concerns
//! nobody. From then on it stands and falls with the others.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::commands::{Joined, after};
use super::connection::Connection;
use super::establish;
use super::frame::Preface;
use super::key::Nonce;
use super::limits::LINKS_LIMIT;
use super::shared::Shared;
use super::target::Target;
use crate::contract::PeerId;

/// How long the threads may take to end. What they serve waits for nothing.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long a connection may take to be added. Until then, and without it, the others do all the work.
const ADD_LIMIT: Duration = Duration::from_secs(10);

/// The life of an added connection.
pub(super) type Life = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The threads. Lives are given to them by turns.
pub(super) struct Threads {
    name: String,
    most: usize,
    started: RefCell<Vec<UnboundedSender<Life>>>,
    turns: RefCell<usize>,
    /// Each thread holds a sender until it ends.
    alive: mpsc::Sender<()>,
    ended: mpsc::Receiver<()>,
}

impl Threads {
    pub(super) fn new(shared: &Shared) -> Self {
        let most = shared.config.connections_per_peer.clamp(2, LINKS_LIMIT) as usize - 1;
        let (alive, ended) = mpsc::channel();
        let name = format!("kv-{}-add", shared.config.name);
        Self { name, most, started: RefCell::default(), turns: RefCell::default(), alive, ended }
    }

    /// Has a thread live this life. Without any thread it is dropped, and the peer's other connections go on.
    pub(super) fn live(&self, life: Life) {
        let mut started = self.started.borrow_mut();
        if started.len() < self.most {
            match self.start() {
                Ok(thread) => started.push(thread),
                Err(error) => {
                    tracing::warn!(%error, threads = started.len(), "no thread for further connections")
                }
            }
        }
        let mut turn = self.turns.borrow_mut();
        *turn += 1;
        if let Some(thread) = started.get(*turn % started.len().max(1)) {
            // A thread ends after this value only.
            thread.send(life).ok();
        }
    }

    fn start(&self) -> std::io::Result<UnboundedSender<Life>> {
        let (lives, mut receiver): (_, UnboundedReceiver<Life>) = unbounded_channel();
        // What can fail is done here, where it can be told.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let alive = self.alive.clone();
        std::thread::Builder::new().name(self.name.clone()).spawn(move || {
            let _alive = alive;
            runtime.block_on(async {
                while let Some(life) = receiver.recv().await {
                    tokio::spawn(life);
                }
            });
            // What is left of their lives ends with the runtime.
            runtime.shutdown_background();
        })?;
        Ok(lives)
    }

    /// Ends them.
    pub(super) fn end(self) {
        let Self { started, alive, ended, .. } = self;
        drop((started, alive));
        // Nothing is ever sent: the wait is over when the last sender is gone.
        ended.recv_timeout(FAREWELL).ok();
    }
}

/// Adds a connection to a peer that we are connected to. What fails here changes nothing.
pub(super) async fn add(
    shared: Arc<Shared>,
    peer: PeerId,
    target: Target,
    ticket: Nonce,
    mut closed: watch::Receiver<()>,
) {
    let limits = shared.config.serve_limits();
    let own = Preface { limits, further: 1, nonce: ticket, expected: target.nonce };
    let deadline = after(Instant::now(), ADD_LIMIT);
    let connected = tokio::select! {
        connected = timeout_at(deadline, establish::connect(&target, own, deadline)) => connected,
        // The transport ends.
        _ = closed.changed() => return,
    };
    match connected {
        Ok(Ok((stream, theirs))) => {
            if let Some(link) = shared.join(peer) {
                Connection::new(shared, link).run_further(stream, theirs.limits).await;
            }
        }
        Ok(Err(reason)) => tracing::info!(%peer, %reason, "no further connection to this peer"),
        Err(_) => tracing::info!(%peer, "no further connection to this peer within its limit"),
    }
}

/// Serves a connection that a peer has added.
pub(super) async fn serve(shared: Arc<Shared>, joined: Joined) {
    let Joined { link, stream, answer, granted } = joined;
    let connection = Connection::new(shared, link);
    match stream.moved() {
        Ok(stream) => connection.run_accepted(stream, answer, granted).await,
        Err(error) => tracing::warn!(%error, "cannot serve a further connection"),
    }
}
