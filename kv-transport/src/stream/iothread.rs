//! The thread: it accepts, starts connections, and at the end sees that nothing is left.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::commands::{Control, Joined};
use super::connection::Connection;
use super::core::Aside;
use super::establish::{NOT_OURS, check_nonce, read_preface};
use super::frame::Preface;
use super::further::{self, Threads};
use super::key::Nonce;
use super::limits::Limits;
use super::shared::Shared;
use super::socket::{Listener, Socket};
use crate::error::LossReason;

/// Connections whose preface is awaited at a time. Each lasts for the handshake limit at most.
const STRANGERS_MAX: usize = 256;
/// Pause after the system had no descriptor or memory left for a connection that waits.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long connections may take to end by themselves. They do not wait for anything, so this is ample.
const FAREWELL: Duration = Duration::from_millis(500);
/// Log lines that a stranger can provoke come at most this often.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// What the thread works with.
pub(crate) struct IoThread {
    pub(crate) shared: Arc<Shared>,
    pub(crate) nonce: Nonce,
    pub(crate) listener: Listener,
    pub(crate) aside: Option<Aside>,
    pub(crate) control: UnboundedReceiver<Control>,
    /// Leads to the receiver.
    pub(crate) mail: UnboundedSender<Control>,
}

/// Ends what is left, even if the thread comes to grief.
struct Finish(Arc<Shared>);

impl Drop for Finish {
    fn drop(&mut self) {
        self.0.finish();
    }
}

impl IoThread {
    /// Runs until [`Control::Shutdown`].
    pub(crate) fn run(self, runtime: Runtime) {
        let finish = Finish(Arc::clone(&self.shared));
        let threads = Threads::new(&self.shared);
        runtime.block_on(self.main(&threads));
        // Connections that were added end when their peers do, which is now, or with their threads.
        threads.end();
        // The resolver of the system cannot be interrupted; its thread ends by itself.
        runtime.shutdown_background();
        drop(finish);
    }

    async fn main(mut self, threads: &Threads) {
        let mut tasks = JoinSet::new();
        let strangers = Arc::new(Semaphore::new(STRANGERS_MAX));
        // Dropped at the end, which is how strangers learn of it.
        let (open, closed) = watch::channel(());
        let aside = self.aside.take().map(tokio::spawn);
        let mut log = Log::default();
        let mut accept_from = Instant::now();
        loop {
            tokio::select! {
                control = self.control.recv() => match control {
                    Some(Control::Connect { link, target, deadline }) => {
                        let connection = Connection::new(Arc::clone(&self.shared), link);
                        let own = Preface { further: 0, expected: target.nonce, ..self.preface() };
                        tasks.spawn(connection.run_connecting(target, own, deadline, self.mail.clone()));
                    }
                    Some(Control::Further { peer, target, ticket, count }) => {
                        for _ in 0..count {
                            let (shared, target) = (Arc::clone(&self.shared), target.clone());
                            threads.live(Box::pin(further::add(shared, peer, target, ticket, closed.clone())));
                        }
                    }
                    Some(Control::Joined(joined)) => {
                        threads.live(Box::pin(further::serve(Arc::clone(&self.shared), *joined)));
                    }
                    Some(Control::Shutdown) | None => break,
                },
                Some(_) = tasks.join_next() => {}
                (permit, accepted) = accept(&self.listener, &strangers, accept_from) => match accepted {
                    Ok(stream) => {
                        let (shared, own, mail) = (Arc::clone(&self.shared), self.preface(), self.mail.clone());
                        let mut closed = closed.clone();
                        tasks.spawn(async move {
                            let limit = shared.config.handshake_limit;
                            let welcomed = tokio::select! {
                                welcomed = timeout(limit, welcome(&shared, stream, own)) => welcomed,
                                _ = closed.changed() => return,
                            };
                            match welcomed {
                                Ok(Ok(joined)) if joined.link.first => {
                                    drop(permit);
                                    let Joined { link, stream, answer, granted } = joined;
                                    let connection = Connection::new(shared, link);
                                    connection.run_accepted(stream, answer, granted).await;
                                }
                                Ok(Ok(joined)) => drop(mail.send(Control::Joined(Box::new(joined)))),
                                Ok(Err(reason)) => tracing::debug!(%reason, "a connection was refused"),
                                Err(_) => tracing::debug!("a connection did not say who it is"),
                            }
                        });
                    }
                    Err(error) => {
                        log.warn(&error);
                        drop(permit);
                        if !matches!(error.kind(), io::ErrorKind::ConnectionAborted) {
                            accept_from = Instant::now() + ACCEPT_PAUSE;
                        }
                    }
                },
            }
        }
        drop((self.listener, open));
        self.shared.close_peers();
        if let Some(aside) = aside {
            aside.abort();
        }
        let mut farewell = pin!(async { while tasks.join_next().await.is_some() {} });
        // Whatever should hang all the same ends with the set; but no read may end before the copies into its destination.
        while timeout(FAREWELL, &mut farewell).await.is_err() && self.shared.staging.is_writing() {}
    }

    fn preface(&self) -> Preface {
        let Limits { further_granted: further, .. } = self.shared.config;
        let limits = self.shared.config.serve_limits();
        Preface { limits, further, nonce: self.nonce, expected: [0; 16] }
    }
}

/// Waits for a connection, once the time has come and there is room for one more stranger.
async fn accept(
    listener: &Listener,
    strangers: &Arc<Semaphore>,
    from: Instant,
) -> (Option<OwnedSemaphorePermit>, io::Result<Socket>) {
    sleep_until(from).await;
    // The semaphore is never closed, so there always is a permit in the end.
    let permit = Arc::clone(strangers).acquire_owned().await.ok();
    (permit, listener.accept().await)
}

/// Finds out who connected. Only one who knows our protocol and our address becomes a peer, or adds to one.
async fn welcome(shared: &Shared, mut stream: Socket, own: Preface) -> Result<Joined, LossReason> {
    let fail = |error: io::Error| LossReason::Broken { kind: error.kind(), code: error.raw_os_error() };
    stream.check_user().map_err(fail)?;
    stream.set_nodelay().map_err(fail)?;
    let checked = match read_preface(&mut stream).await {
        Ok(theirs) => check_nonce(theirs.expected, own.nonce).map(|()| theirs),
        Err(reason) => Err(reason),
    };
    match checked {
        Ok(theirs) if theirs.further > 0 => {
            let link = shared.holder(theirs.nonce).and_then(|peer| shared.join(peer));
            let link = link.ok_or(LossReason::Stranger("it adds to no peer that could have more"))?;
            let answer = Preface { further: 0, ..own };
            Ok(Joined { link, stream, answer, granted: theirs.limits })
        }
        Ok(theirs) => {
            let mut ticket = [0; 16];
            // Without random numbers there are no further connections.
            let given = own.further > 0 && getrandom::fill(&mut ticket).is_ok();
            let link = shared.accepted(given.then_some(ticket)).map_err(|_| LossReason::Closed)?;
            let answer =
                if given { Preface { expected: ticket, ..own } } else { Preface { further: 0, ..own } };
            Ok(Joined { link, stream, answer, granted: theirs.limits })
        }
        Err(reason) => {
            // One of our kind, but of another version or looking for another life of us, learns from our preface
            // what is wrong. It fits into the empty buffer of the socket. A real stranger learns nothing.
            if matches!(reason, LossReason::Stranger(what) if what != NOT_OURS) {
                stream.try_write(&own.encode()).ok();
            }
            Err(reason)
        }
    }
}

/// Says at most now and then that connections cannot be accepted.
#[derive(Default)]
struct Log {
    last: Option<Instant>,
    kept_back: u64,
}

impl Log {
    fn warn(&mut self, error: &io::Error) {
        let now = Instant::now();
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < LOG_PAUSE) {
            self.kept_back += 1;
            return;
        }
        tracing::warn!(%error, kept_back = self.kept_back, "cannot accept a connection");
        (self.last, self.kept_back) = (Some(now), 0);
    }
}
