//! What every transport over byte streams consists of: the shared state and the thread that serves it.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::commands::Control;
use super::iothread::IoThread;
use super::key::Nonce;
use super::limits::Limits;
use super::local::LocalPath;
use super::shared::Shared;
use super::socket::Listener;
use super::target::Target;
use crate::contract::PeerId;
use crate::error::TransportError;

/// How long a drop waits for the thread. It does not wait for anything but its sockets, so this is ample.
const DROP_LIMIT: Duration = Duration::from_secs(2);
/// How long it waits then for copies that devices were asked for.
const STAGING_LIMIT: Duration = Duration::from_secs(1);
/// Threads that resolve names, at most.
const RESOLVERS_MAX: usize = 4;

/// Work that runs beside the connections until the transport ends.
pub(crate) type Aside = Pin<Box<dyn Future<Output = ()> + Send>>;

/// See the module. Dropping it ends the thread.
pub(crate) struct Core {
    pub(crate) shared: Arc<Shared>,
    control: UnboundedSender<Control>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Core {
    /// Starts the thread. `listen` runs inside of its runtime.
    pub(crate) fn start(
        limits: Limits,
        nonce: Nonce,
        local: impl FnOnce(&Weak<Shared>) -> Result<Option<Arc<dyn LocalPath>>, TransportError>,
        listen: impl FnOnce() -> Result<(Listener, Option<Aside>), TransportError>,
    ) -> Result<Self, TransportError> {
        let name = limits.name;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_name(format!("kv-{name}-resolve"))
            .max_blocking_threads(RESOLVERS_MAX)
            .build()
            .map_err(|error| system("start", "an IO runtime", &error))?;
        let (listener, aside) = {
            let _inside = runtime.enter();
            listen()?
        };
        let (control, receiver) = unbounded_channel();
        let mut failed = None;
        let shared = Arc::new_cyclic(|weak| {
            let local = local(weak).unwrap_or_else(|error| {
                failed = Some(error);
                None
            });
            Shared::new(limits, local)
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let io = IoThread {
            shared: Arc::clone(&shared),
            nonce,
            listener,
            aside,
            control: receiver,
            mail: control.clone(),
        };
        let thread_name = format!("kv-{name}");
        let thread = std::thread::Builder::new()
            .name(thread_name.clone())
            .spawn(move || io.run(runtime))
            .map_err(|error| system("start thread", thread_name, &error))?;
        Ok(Self { shared, control, thread: Mutex::new(Some(thread)) })
    }

    pub(crate) fn connect(&self, target: Target, limit: Duration) -> Result<PeerId, TransportError> {
        self.shared.connect(target, limit, &self.control)
    }

    fn start_shutdown(&self) {
        if self.shared.close() {
            // A thread that is gone has ended everything already.
            self.control.send(Control::Shutdown).ok();
        }
    }

    pub(crate) async fn shutdown(&self, limit: Duration) {
        self.start_shutdown();
        // The caller may use any executor, and ours is about to end: a thread of its own keeps the limit.
        let (done, waiter) = tokio::sync::oneshot::channel::<()>();
        let shared = Arc::clone(&self.shared);
        let name = format!("kv-{}-close", shared.config.name);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            shared.wait_finished(limit);
            drop(done);
        });
        match thread {
            // The sender is dropped, never used: either way the wait is over.
            Ok(_) => drop(waiter.await),
            Err(_) => drop(self.shared.wait_finished(limit.min(DROP_LIMIT))),
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.start_shutdown();
        let finished = self.shared.wait_finished(DROP_LIMIT);
        self.shared.staging.join(STAGING_LIMIT);
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|_| finished) {
            // A panic of the thread has been told by the events; it must not become the dropper's.
            thread.join().ok();
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

/// A failure of the system in the words of the contract.
pub(crate) fn system(
    operation: &'static str,
    subject: impl fmt::Display,
    error: &io::Error,
) -> TransportError {
    TransportError::System {
        operation,
        subject: subject.to_string(),
        kind: error.kind(),
        code: error.raw_os_error(),
    }
}

/// There are no random numbers.
pub(crate) fn no_randomness(error: &getrandom::Error) -> TransportError {
    let code = error.raw_os_error();
    let kind = code.map_or(io::ErrorKind::Other, |code| io::Error::from_raw_os_error(code).kind());
    TransportError::System { operation: "draw", subject: "random numbers".into(), kind, code }
}
