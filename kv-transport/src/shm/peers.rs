//! Peers whose memory this process can see, and the reads that are done by copying.
//!
//! A read's bytes are written by whoever holds the lock of its [`Job`], for one turn at a time; ending a job takes the same
//! lock. So a job that has been ended writes nothing any more (rule T-3), and ending it waits for one turn at most.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use tokio::time::{Instant, timeout_at};

use super::ShmConfig;
use super::grants::{Answer, Question, ask};
use super::registry::Listing;
use super::window::{RANGES_MAX, Window, copy_process, read_process};
use crate::contract::{OpId, PeerId, RangeSet, ReadLimits, ReadOutcome};
use crate::error::{LossReason, ReadError};
use crate::stream::commands::{AcceptedRead, after};
use crate::stream::key::{Key, Nonce};
use crate::stream::local::{LocalPath, Taken, Waiting};
use crate::stream::plan::{Cursor, Cut, Plan};
use crate::stream::shared::Shared;
use crate::stream::target::{Place, Target};

/// Bytes copied before it is another read's turn.
const TURN_BYTES: u32 = 2 << 20;
/// A read of no more bytes and ranges is done by the caller's thread: handing it over would take longer.
const AT_ONCE_BYTES: u64 = 64 << 10;
const AT_ONCE_RANGES: usize = 64;
/// A peer's answer about a region is not waited for longer than this; the connection then carries the read.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// How a region's bytes come here.
#[derive(Debug)]
enum Reach {
    Window(Window),
    Process { place: u64 },
}

/// A region of a peer.
#[derive(Debug)]
struct Region {
    reach: Reach,
    len: u64,
    slot: u32,
}

/// What a key leads to.
#[derive(Debug, Clone)]
enum Known {
    Region(Arc<Region>),
    /// The connection has to carry it.
    Carried,
}

/// A peer to which we connected.
#[derive(Debug)]
struct Peer {
    grants: Vec<u8>,
    nonce: Nonce,
    pid: i32,
    /// Whether the system lets us read its memory by its process id.
    readable: bool,
    /// Becomes readable when the process ends.
    life: Option<OwnedFd>,
    listing: Listing,
    regions: Mutex<HashMap<Key, Known>>,
}

impl Peer {
    fn regions(&self) -> MutexGuard<'_, HashMap<Key, Known>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the process still lives, as far as that can be seen. Its number could be another's otherwise.
    fn lives(&self) -> bool {
        let Some(life) = &self.life else { return true };
        let mut fds = [PollFd::new(life, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }
}

struct Progress {
    plan: Plan,
    cursor: Cursor,
    arrived: Vec<(u64, u64)>,
    last_byte: Instant,
    ended: bool,
}

/// A read that is done by copying.
struct Job {
    op: OpId,
    serial: u64,
    of: PeerId,
    peer: Arc<Peer>,
    deadline: Instant,
    stall: Duration,
    progress: Mutex<Progress>,
}

impl Job {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
struct State {
    peers: HashMap<PeerId, Arc<Peer>>,
    jobs: HashMap<(OpId, u64), Arc<Job>>,
    /// Jobs with something left to copy. They take turns.
    queue: VecDeque<Arc<Job>>,
    /// Reads that wait for a peer's answer, with their number of ranges. One that is cancelled is no longer here.
    waiting: HashMap<(OpId, u64), usize>,
    closed: bool,
}

/// See the module.
pub(super) struct Peers {
    config: ShmConfig,
    shared: Weak<Shared>,
    state: Mutex<State>,
    work: Condvar,
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").finish_non_exhaustive()
    }
}

impl Peers {
    pub(super) fn new(config: ShmConfig, shared: Weak<Shared>) -> Self {
        Self { config, shared, state: Mutex::default(), work: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In words for people: how bytes of a peer come here.
    pub(super) fn lane(&self, peer: PeerId) -> Option<&'static str> {
        let peer = Arc::clone(self.lock().peers.get(&peer)?);
        let regions = peer.regions();
        let of = |region: &Known| match region {
            Known::Region(region) => match region.reach {
                Reach::Window(_) => "mapped",
                Reach::Process { .. } => "process_vm_readv",
            },
            Known::Carried => "socket",
        };
        let mut lanes = regions.values().map(of);
        let first = lanes.next().unwrap_or("not used yet");
        Some(if lanes.all(|lane| lane == first) { first } else { "mixed" })
    }

    /// Ends the copying thread.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// Copies until [`Peers::close`].
    pub(super) fn run(&self) {
        loop {
            let job = {
                let state = self.lock();
                let idle = |state: &mut State| state.queue.is_empty() && !state.closed;
                let mut state = self.work.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
                match state.queue.pop_front() {
                    // What is left at the end ends with its peers.
                    Some(job) if !state.closed => job,
                    _ => return,
                }
            };
            if self.turn(&job) {
                self.lock().queue.push_back(job);
            }
        }
    }

    /// Copies one piece. Whether there is more to copy.
    fn turn(&self, job: &Job) -> bool {
        let mut progress = job.lock();
        if progress.ended {
            return false;
        }
        let now = Instant::now();
        let step = if now >= job.deadline {
            Err(ReadError::TimedOut)
        } else if now >= after(progress.last_byte, job.stall) {
            Err(ReadError::Stalled)
        } else {
            let progress = &mut *progress;
            match progress.plan.cut(&mut progress.cursor, TURN_BYTES, RANGES_MAX) {
                None => Ok(None),
                Some(cut) => copy(&job.peer, &cut).map(|()| Some(cut.interval)),
            }
        };
        let result = match step {
            Ok(interval) => {
                progress.arrived.extend(interval);
                progress.last_byte = now;
                if !progress.plan.is_cut(&progress.cursor) {
                    return true;
                }
                Ok(())
            }
            Err(error) => Err(error),
        };
        self.end(job, progress, result);
        false
    }

    fn end(&self, job: &Job, mut progress: MutexGuard<'_, Progress>, result: Result<(), ReadError>) {
        progress.ended = true;
        let intervals = std::mem::take(&mut progress.arrived);
        let arrived = match result {
            Ok(()) => RangeSet::all(progress.plan.range_count()),
            Err(_) => progress.plan.arrived(intervals),
        };
        drop(progress);
        self.lock().jobs.remove(&(job.op, job.serial));
        if let Some(shared) = self.shared.upgrade() {
            shared.complete(job.op, job.serial, ReadOutcome { result, arrived });
        }
    }

    /// Finds out how to reach what a key names.
    async fn find(&self, peer: &Peer, key: Key) -> Known {
        let answer = match ask(&peer.grants, peer.nonce, Question::Region(key)).await {
            Ok((answer, _)) => answer,
            Err(reason) => {
                tracing::debug!(%reason, "a peer does not say where a region is");
                return Known::Carried;
            }
        };
        let (reach, len, slot) = match answer {
            Answer::File { file, slot, len, mapped, .. } if self.config.map => {
                let mapped = usize::try_from(mapped).map_err(|_| io::ErrorKind::OutOfMemory.into());
                match mapped.and_then(|mapped| Window::open(file, mapped)) {
                    Ok(window) => (Reach::Window(window), len, slot),
                    Err(error) => {
                        tracing::warn!(%error, len, "a peer's memory cannot be mapped; the socket carries it");
                        return Known::Carried;
                    }
                }
            }
            Answer::File { slot, len, place, .. } | Answer::Place { slot, len, place } if peer.readable => {
                (Reach::Process { place }, len, slot)
            }
            Answer::File { .. } | Answer::Place { .. } | Answer::None => return Known::Carried,
        };
        Known::Region(Arc::new(Region { reach, len, slot }))
    }
}

/// Copies one piece, and makes sure that it counts.
fn copy(peer: &Peer, cut: &Cut) -> Result<(), ReadError> {
    let region = match peer.regions().get(&cut.key) {
        Some(Known::Region(region)) => Arc::clone(region),
        Some(Known::Carried) | None => return Err(ReadError::UnknownKey),
    };
    let inside =
        |(offset, len): &(u64, u32)| offset.checked_add(u64::from(*len)).is_some_and(|end| end <= region.len);
    if !cut.remote.iter().all(inside) {
        return Err(ReadError::RemoteRange);
    }
    if !peer.listing.has(region.slot, cut.key.nonce) {
        peer.regions().remove(&cut.key);
        return Err(ReadError::UnknownKey);
    }
    let copied = match &region.reach {
        Reach::Window(window) => window.copy(cut),
        Reach::Process { place } => copy_process(peer.pid, *place, cut),
    };
    // After the copy: what is registered now was so all the while, and who lives now is the one that was read.
    if !peer.listing.has(region.slot, cut.key.nonce) {
        peer.regions().remove(&cut.key);
        return Err(ReadError::UnknownKey);
    }
    // A process that is just ending has no memory any more, although it is still there.
    let ending = matches!(&copied, Err(error) if error.raw_os_error() == Some(libc::ESRCH));
    if ending || !peer.lives() {
        return Err(ReadError::PeerLost(LossReason::ClosedByPeer));
    }
    copied.map_err(|error| ReadError::Fabric { code: error.raw_os_error().map_or(-1, i64::from) })
}

impl LocalPath for Peers {
    fn attach<'a>(&'a self, peer: PeerId, target: &'a Target) -> Waiting<'a, Result<(), LossReason>> {
        Box::pin(async move {
            let Place::Unix { name } = &target.place else { return Ok(()) };
            let grants = super::address::grants_of(name);
            let (answer, pid) = ask(&grants, target.nonce, Question::Registry).await?;
            let broken = LossReason::Protocol("it does not say what is registered");
            let Answer::File { file, mapped, place, .. } = answer else { return Err(broken) };
            let window = usize::try_from(mapped).ok().and_then(|mapped| Window::open(file, mapped).ok());
            let Some(listing) = window.and_then(Listing::new) else { return Err(broken) };
            let life = rustix::process::Pid::from_raw(pid)
                .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
            let mut probe = [0; 16];
            let readable = self.config.read_process && life.is_some() && {
                let read = read_process(pid, place, &mut probe);
                if let Err(error) = &read {
                    tracing::info!(%error, pid, "the system does not let us read the memory of this process");
                }
                read.is_ok() && probe == listing.probe()
            };
            tracing::debug!(%peer, pid, readable, "a peer's memory is in reach");
            let regions = Mutex::default();
            let found = Peer { grants, nonce: target.nonce, pid, readable, life, listing, regions };
            self.lock().peers.insert(peer, Arc::new(found));
            Ok(())
        })
    }

    fn take(&self, of: PeerId, read: AcceptedRead) -> Taken {
        let mut state = self.lock();
        let Some(peer) = state.peers.get(&of).cloned() else { return Taken::No(read) };
        if read.plan.to_device() {
            return Taken::No(read);
        }
        let (mut unknown, mut carried) = (false, false);
        {
            let regions = peer.regions();
            for key in read.plan.keys() {
                match regions.get(&key) {
                    None => unknown = true,
                    Some(Known::Carried) => carried = true,
                    Some(Known::Region(_)) => {}
                }
            }
        }
        if carried {
            return Taken::No(read);
        }
        if unknown {
            state.waiting.insert((read.op, read.serial), read.plan.range_count());
            return Taken::Unresolved(read);
        }
        let AcceptedRead { op, serial, plan, submitted, limits } = read;
        let small = plan.total() <= AT_ONCE_BYTES && plan.range_count() <= AT_ONCE_RANGES;
        let ReadLimits { total, stall } = limits;
        let progress =
            Progress { plan, cursor: Cursor::default(), arrived: vec![], last_byte: submitted, ended: false };
        let job = Arc::new(Job {
            op,
            serial,
            of,
            peer,
            deadline: after(submitted, total),
            stall,
            progress: Mutex::new(progress),
        });
        state.jobs.insert((op, serial), Arc::clone(&job));
        if small {
            drop(state);
            while self.turn(&job) {}
        } else {
            state.queue.push_back(job);
            drop(state);
            self.work.notify_one();
        }
        Taken::Yes
    }

    fn resolve(&self, of: PeerId, read: AcceptedRead) -> Waiting<'_, Option<AcceptedRead>> {
        Box::pin(async move {
            let name = (read.op, read.serial);
            let peer = self.lock().peers.get(&of).cloned();
            if let Some(peer) = peer {
                let limit = ANSWER_LIMIT.min(read.limits.total).min(read.limits.stall);
                let until = after(Instant::now(), limit);
                for key in read.plan.keys() {
                    if peer.regions().contains_key(&key) {
                        continue;
                    }
                    // One that does not answer in time may do so the next time.
                    let Ok(known) = timeout_at(until, self.find(&peer, key)).await else { break };
                    if let Known::Carried = known {
                        tracing::info!(peer = %of, "a region of this peer is read over the socket");
                    }
                    peer.regions().insert(key, known);
                }
            }
            // Cancelled, and so completed, while the peer was asked.
            self.lock().waiting.remove(&name)?;
            match self.take(of, read) {
                Taken::Yes => None,
                Taken::No(read) => Some(read),
                Taken::Unresolved(read) => {
                    self.lock().waiting.remove(&name);
                    Some(read)
                }
            }
        })
    }

    fn cancel(&self, op: OpId, serial: u64) {
        let (waiting, job) = {
            let mut state = self.lock();
            (state.waiting.remove(&(op, serial)), state.jobs.get(&(op, serial)).cloned())
        };
        if let (Some(ranges), Some(shared)) = (waiting, self.shared.upgrade()) {
            let outcome = ReadOutcome { result: Err(ReadError::Cancelled), arrived: RangeSet::none(ranges) };
            shared.complete(op, serial, outcome);
        }
        if let Some(job) = job {
            let progress = job.lock();
            if !progress.ended {
                self.end(&job, progress, Err(ReadError::Cancelled));
            }
        }
    }

    fn detach(&self, peer: PeerId) -> HashMap<OpId, RangeSet> {
        let jobs: Vec<Arc<Job>> = {
            let mut state = self.lock();
            state.peers.remove(&peer);
            state.queue.retain(|job| job.of != peer);
            let jobs: Vec<_> = state.jobs.values().filter(|job| job.of == peer).cloned().collect();
            state.jobs.retain(|_, job| job.of != peer);
            jobs
        };
        let mut arrived = HashMap::new();
        for job in jobs {
            let mut progress = job.lock();
            if !progress.ended {
                progress.ended = true;
                let intervals = std::mem::take(&mut progress.arrived);
                arrived.insert(job.op, progress.plan.arrived(intervals));
            }
        }
        arrived
    }
}
