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
use super::registry::{Listing, Probe, REGISTRY_BYTES};
use super::window::{RANGES_MAX, Window, copy_process, read_process};
use crate::contract::{OpId, PeerId, ReadLimits};
use crate::error::{LossReason, ReadError};
use crate::stream::commands::{AcceptedRead, after};
use crate::stream::key::{Key, Nonce};
use crate::stream::local::{LocalPath, Taken, Waiting};
use crate::stream::plan::Cut;
use crate::stream::shared::Shared;
use crate::stream::target::{Place, Target};
use crate::stream::work::{Share, Work};

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
    /// Where its probe lies, and what it is.
    probe_at: u64,
    probe: Probe,
    regions: Mutex<HashMap<Key, Known>>,
    /// One question at a time: whoever waits behind it finds the answer.
    asking: tokio::sync::Mutex<()>,
}

impl Peer {
    fn regions(&self) -> MutexGuard<'_, HashMap<Key, Known>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the process still lives, as far as that can be seen. Its number could be another's otherwise.
    fn lives(&self) -> bool {
        let Some(life) = &self.life else { return true };
        let mut fds = [PollFd::new(life, PollFlags::IN)];
        let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::io::retry_on_intr(|| poll(&mut fds, Some(&at_once))), Ok(0))
    }
}

struct Progress {
    work: Arc<Work>,
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
    regions: HashMap<Key, Arc<Region>>,
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
    /// Reads that wait for an answer of this peer, with their number of ranges. One that is cancelled is no longer here.
    waiting: HashMap<(OpId, u64), PeerId>,
    /// Peers that are gone. What was mapped of them is given back by the copying thread, since that can take long.
    gone: Vec<Arc<Peer>>,
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
                let idle =
                    |state: &mut State| state.queue.is_empty() && state.gone.is_empty() && !state.closed;
                let mut state = self.work.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
                let gone = std::mem::take(&mut state.gone);
                if !gone.is_empty() && !state.closed {
                    drop(state);
                    drop(gone);
                    continue;
                }
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
            match progress.work.cut(TURN_BYTES, RANGES_MAX) {
                None => Ok(None),
                Some(cut) => copy(job, &cut).map(|()| Some(cut.interval)),
            }
        };
        let result = match step {
            Ok(interval) => {
                progress.arrived.extend(interval);
                progress.last_byte = now;
                if !progress.work.is_cut() {
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
        drop(progress);
        self.lock().jobs.remove(&(job.op, job.serial));
        if let Some(shared) = self.shared.upgrade() {
            shared.complete_share(job.op, job.serial, result, intervals);
        }
    }

    /// Finds out how to reach what a key names. `None`: not now; the connection carries this read, and the next one asks again.
    async fn find(&self, peer: &Peer, key: Key) -> Option<Known> {
        let answer = match ask(&peer.grants, peer.nonce, Question::Region(key)).await {
            Ok((answer, _)) => answer,
            Err(reason) => {
                tracing::debug!(%reason, "a peer does not say where a region is");
                return None;
            }
        };
        let (window, slot, len, place) = match answer {
            Answer::None => return None,
            Answer::Place { slot, len, place } => (None, slot, len, place),
            Answer::File { file, slot, len, mapped, place } => {
                let window = self.config.map.then(|| open(file, len, mapped)).and_then(|opened| {
                    opened
                        .inspect_err(|error| tracing::warn!(%error, len, "a peer's memory cannot be mapped"))
                        .ok()
                });
                (window, slot, len, place)
            }
        };
        let reach = match window {
            Some(window) => Reach::Window(window),
            // Not all memory of a process can be read so, such as that of devices.
            None if peer.readable && len > 0 && can_read(peer.pid, place, len) => Reach::Process { place },
            None => return Some(Known::Carried),
        };
        Some(Known::Region(Arc::new(Region { reach, len, slot })))
    }
}

/// Maps a peer's file, of which it says that it is so long; no longer one than a region of that length needs.
fn open(file: OwnedFd, len: u64, mapped: u64) -> io::Result<Window> {
    const HUGE_BYTES: u64 = 2 << 20;
    let most = len.checked_next_multiple_of(HUGE_BYTES);
    match usize::try_from(mapped) {
        Ok(bytes) if most.is_some_and(|most| mapped <= most) => Window::open(file, bytes),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether the ends of a region can be read out of its process.
fn can_read(pid: i32, place: u64, len: u64) -> bool {
    let mut byte = [0];
    let last = place.checked_add(len - 1);
    [Some(place), last].into_iter().all(|at| at.is_some_and(|at| read_process(pid, at, &mut byte).is_ok()))
}

/// Copies one piece, and makes sure that it counts.
fn copy(job: &Job, cut: &Cut) -> Result<(), ReadError> {
    let peer = &job.peer;
    let region = job.regions.get(&cut.key).ok_or(ReadError::UnknownKey)?;
    let inside =
        |(offset, len): &(u64, u32)| offset.checked_add(u64::from(*len)).is_some_and(|end| end <= region.len);
    if !cut.remote.iter().all(inside) {
        return Err(ReadError::RemoteRange);
    }
    let registered = || {
        let listed = peer.listing.has(region.slot, cut.key.nonce);
        if !listed {
            peer.regions().remove(&cut.key);
        }
        listed.then_some(()).ok_or(ReadError::UnknownKey)
    };
    registered()?;
    let copied = match &region.reach {
        Reach::Window(window) => window.copy(cut),
        Reach::Process { place } => copy_process(peer.pid, *place, cut, peer.probe_at, &peer.probe),
    };
    // After the copy: what is registered now was so all the while, and who lives now is the one that was read.
    registered()?;
    // A process that is just ending, or runs another program by now, is not the one that was asked for.
    let ended = matches!(&copied, Err(error) if error.raw_os_error() == Some(libc::ESRCH));
    if ended || !peer.lives() {
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
            let Answer::File { file, place: probe_at, .. } = answer else { return Err(broken) };
            let window = Window::open(file, REGISTRY_BYTES).ok();
            let Some(listing) = window.and_then(Listing::new) else { return Err(broken) };
            let life = rustix::process::Pid::from_raw(pid)
                .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
            let probe = listing.probe();
            let mut found = Probe::default();
            let readable = self.config.read_process && life.is_some() && {
                let read = read_process(pid, probe_at, &mut found);
                if let Err(error) = &read {
                    tracing::info!(%error, pid, "the system does not let us read the memory of this process");
                }
                read.is_ok() && found == probe
            };
            tracing::debug!(%peer, pid, readable, "a peer's memory is in reach");
            let found = Peer {
                grants,
                nonce: target.nonce,
                pid,
                readable,
                life,
                listing,
                probe_at,
                probe,
                regions: Mutex::default(),
                asking: tokio::sync::Mutex::new(()),
            };
            self.lock().peers.insert(peer, Arc::new(found));
            Ok(())
        })
    }

    fn take(&self, of: PeerId, read: AcceptedRead) -> Taken {
        let mut state = self.lock();
        let Some(peer) = state.peers.get(&of).cloned() else { return Taken::No(read) };
        if read.work.plan.to_device() {
            return Taken::No(read);
        }
        let mut regions = HashMap::new();
        let (mut unknown, mut carried) = (false, false);
        {
            let known = peer.regions();
            for key in read.work.plan.keys() {
                match known.get(&key) {
                    None => unknown = true,
                    Some(Known::Carried) => carried = true,
                    Some(Known::Region(region)) => drop(regions.insert(key, Arc::clone(region))),
                }
            }
        }
        if carried {
            return Taken::No(read);
        }
        if unknown {
            state.waiting.insert((read.op, read.serial), of);
            return Taken::Unresolved(read);
        }
        let AcceptedRead { op, serial, work, limits, .. } = read;
        let (plan, submitted) = (&work.plan, work.submitted);
        let small = plan.total() <= AT_ONCE_BYTES && plan.range_count() <= AT_ONCE_RANGES;
        let ReadLimits { total, stall } = limits;
        let progress = Progress { work, arrived: vec![], last_byte: submitted, ended: false };
        let job = Arc::new(Job {
            op,
            serial,
            of,
            peer,
            regions,
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
                let asked = async {
                    let _turn = peer.asking.lock().await;
                    for key in read.work.plan.keys() {
                        if peer.regions().contains_key(&key) {
                            continue;
                        }
                        let Some(known) = self.find(&peer, key).await else { break };
                        if let Known::Carried = known {
                            tracing::info!(peer = %of, "a region of this peer is read over the socket");
                        }
                        peer.regions().entry(key).or_insert(known);
                    }
                };
                // A peer that does not answer in time may do so the next time.
                timeout_at(until, asked).await.ok();
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
        let (waited, job) = {
            let mut state = self.lock();
            (state.waiting.remove(&(op, serial)).is_some(), state.jobs.get(&(op, serial)).cloned())
        };
        if waited && let Some(shared) = self.shared.upgrade() {
            shared.complete_share(op, serial, Err(ReadError::Cancelled), vec![]);
        }
        if let Some(job) = job {
            let progress = job.lock();
            if !progress.ended {
                self.end(&job, progress, Err(ReadError::Cancelled));
            }
        }
    }

    fn detach(&self, peer: PeerId) -> Vec<Share> {
        let (jobs, mut shares) = {
            let mut state = self.lock();
            let gone = state.peers.remove(&peer);
            state.gone.extend(gone);
            let waiting = state.waiting.extract_if(|_, of| *of == peer);
            let shares: Vec<_> =
                waiting.map(|((op, serial), _)| Share { op, serial, arrived: vec![] }).collect();
            state.queue.retain(|job| job.of != peer);
            let jobs: Vec<_> = state.jobs.values().filter(|job| job.of == peer).cloned().collect();
            state.jobs.retain(|_, job| job.of != peer);
            (jobs, shares)
        };
        self.work.notify_one();
        for job in jobs {
            let mut progress = job.lock();
            if !progress.ended {
                progress.ended = true;
                let arrived = std::mem::take(&mut progress.arrived);
                shares.push(Share { op: job.op, serial: job.serial, arrived });
            }
        }
        shares
    }
}
