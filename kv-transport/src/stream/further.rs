//! Connections that are added to a peer. They are served by threads of their own, which there are only once there is such a
//! connection.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
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

/// The threads.
pub(super) struct Threads {
    name: String,
    count: usize,
    runtime: OnceCell<Option<Runtime>>,
}

impl Threads {
    pub(super) fn new(shared: &Shared) -> Self {
        let count = shared.config.connections_per_peer.clamp(2, LINKS_LIMIT) as usize - 1;
        Self { name: format!("kv-{}-add", shared.config.name), count, runtime: OnceCell::new() }
    }

    /// Where to serve an added connection. `None` if the system gives no thread.
    pub(super) fn handle(&self) -> Option<&Handle> {
        let start = || {
            let builder = Builder::new_multi_thread()
                .enable_all()
                .worker_threads(self.count)
                .thread_name(&self.name)
                .build();
            builder
                .inspect_err(
                    |error| tracing::warn!(%error, "no threads for further connections: one has to do"),
                )
                .ok()
        };
        self.runtime.get_or_init(start).as_ref().map(Runtime::handle)
    }

    /// Ends them. Must not be called inside of a runtime.
    pub(super) fn end(self) {
        if let Some(runtime) = self.runtime.into_inner().flatten() {
            runtime.shutdown_timeout(FAREWELL);
        }
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
