//! What is to be done later. Its thread ends with it.
//!
//! A thread, and not the caller's executor: a late write, a limit or a delayed message must not depend on whether
//! somebody takes events at that moment.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

struct Queue<J> {
    jobs: BTreeMap<(Instant, u64), J>,
    serial: u64,
    closed: bool,
}

/// Jobs with their times. Clones are the same.
pub(super) struct Agenda<J>(Arc<(Mutex<Queue<J>>, Condvar)>);

impl<J> Clone for Agenda<J> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<J> std::fmt::Debug for Agenda<J> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agenda").finish_non_exhaustive()
    }
}

impl<J> Agenda<J> {
    pub(super) fn new() -> Self {
        let queue = Queue { jobs: BTreeMap::new(), serial: 0, closed: false };
        Self(Arc::new((Mutex::new(queue), Condvar::new())))
    }

    /// Has something done at a time; forgotten if the thread has ended before.
    pub(super) fn at(&self, when: Instant, job: J) {
        let mut queue = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        queue.serial += 1;
        let key = (when, queue.serial);
        queue.jobs.insert(key, job);
        self.0.1.notify_all();
    }

    fn close(&self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.0.1.notify_all();
    }

    /// The next job when its time has come; `None` after the close.
    fn next(&self) -> Option<J> {
        let mut queue = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if queue.closed {
                return None;
            }
            let now = Instant::now();
            match queue.jobs.first_key_value().map(|((when, _), _)| *when) {
                Some(when) if when <= now => return queue.jobs.pop_first().map(|(_, job)| job),
                Some(when) => {
                    let waited = self.0.1.wait_timeout(queue, when - now);
                    queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => queue = self.0.1.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// The thread that does the jobs of an agenda.
#[derive(Debug)]
pub(super) struct Timers<J> {
    agenda: Agenda<J>,
    thread: Option<JoinHandle<()>>,
}

impl<J: Send + 'static> Timers<J> {
    pub(super) fn start(agenda: Agenda<J>, work: impl Fn(J) + Send + 'static) -> io::Result<Self> {
        let jobs = agenda.clone();
        let thread = std::thread::Builder::new().name("kv-faults".into()).spawn(move || {
            while let Some(job) = jobs.next() {
                work(job);
            }
        })?;
        Ok(Self { agenda, thread: Some(thread) })
    }
}

impl<J> Drop for Timers<J> {
    fn drop(&mut self) {
        self.agenda.close();
        if let Some(thread) = self.thread.take() {
            // Jobs do not block, so this does not either; a panic of the thread must not become the dropper's.
            thread.join().ok();
        }
    }
}
