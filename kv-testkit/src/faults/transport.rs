//! The transport under a plan.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kv_transport::{
    Address, Event, LossReason, Memory, OpId, PeerId, RangeSet, ReadError, ReadOutcome, ReadRequest,
    RegionId, Transport, TransportError,
};

use super::plan::{Fault, FaultPlan, On, Recording};
use super::request::{self, Places};
use super::strike::Striker;
use super::timers::{Agenda, Timers};
use crate::passthrough::{Interpose, Passthrough, Through};

/// What a broken connection is reported as.
const BROKEN: LossReason = LossReason::Broken { kind: std::io::ErrorKind::ConnectionReset, code: None };

/// Where a read is that was accepted.
#[derive(Debug)]
enum Phase {
    /// With the transport behind, untouched.
    Untouched,
    /// With the transport behind; if it succeeds, bytes are changed before it is told.
    Corrupting { places: Places, bytes: u32, draw: u64 },
    /// Part of it is with the transport behind, then it fails.
    Cut { whole: usize, error: ReadError },
    /// Part of it is with the transport behind, then the peer is lost.
    Breaking { whole: usize },
    /// Kept here until the peer's loss is told; these ranges arrived.
    Broken { arrived: RangeSet },
    /// Kept here; goes to the transport behind later.
    Delayed { request: ReadRequest },
    /// Kept here until it ends without having begun.
    Stalled,
}

#[derive(Debug)]
struct Read {
    peer: PeerId,
    serial: u64,
    size: usize,
    regions: BTreeSet<RegionId>,
    phase: Phase,
}

impl Read {
    /// Whether the transport behind has it, and will complete it.
    fn is_behind(&self) -> bool {
        !matches!(self.phase, Phase::Broken { .. } | Phase::Delayed { .. } | Phase::Stalled)
    }
}

#[derive(Debug, Default)]
struct Peer {
    /// News of it that is kept back, if it is.
    quiet: Option<Vec<Event>>,
    /// The connection breaks as soon as it stands.
    break_when_connected: bool,
    /// The caller let go of it.
    left: bool,
    /// Why it is said to be lost, if it was let go of here.
    lost_as: Option<LossReason>,
}

#[derive(Debug)]
enum Job {
    Submit { op: OpId, serial: u64 },
    Expire { op: OpId, serial: u64, error: ReadError },
    Overwrite { places: Places, draw: u64 },
    Send { peer: PeerId, message: Vec<u8> },
    Release { peer: PeerId },
    GiveUp { peer: PeerId, reason: LossReason },
}

#[derive(Debug)]
struct State {
    striker: Striker,
    regions: BTreeMap<RegionId, Memory>,
    peers: BTreeMap<PeerId, Peer>,
    reads: BTreeMap<OpId, Read>,
    serial: u64,
    closed: bool,
}

#[derive(Debug)]
struct Core {
    through: Through,
    agenda: Agenda<Job>,
    state: Mutex<State>,
}

/// What [`FaultyTransport`] puts before a transport.
#[derive(Debug)]
pub struct Faults {
    // Dropped first, so that no job runs after the transport is gone.
    _timers: Timers<Job>,
    core: Arc<Core>,
}

/// A transport whose operations suffer what a plan says. It keeps the contract as well as the one behind it, except
/// where a fault breaks a rule by its nature, which [`Fault`] says.
///
/// Faults are chosen when an operation is submitted. A read whose fault keeps it from the transport behind is
/// checked here as a transport must, except for its keys, which only that transport can read.
pub type FaultyTransport = Passthrough<Faults>;

impl FaultyTransport {
    /// Over a transport, under a plan. Starts a thread for what happens later.
    pub fn new(inner: Arc<dyn Transport>, plan: &FaultPlan) -> Result<Self, TransportError> {
        let state = State {
            striker: Striker::new(plan),
            regions: BTreeMap::new(),
            peers: BTreeMap::new(),
            reads: BTreeMap::new(),
            serial: 0,
            closed: false,
        };
        let agenda = Agenda::new();
        let through = Through::new(inner);
        let core = Arc::new(Core { through, agenda: agenda.clone(), state: Mutex::new(state) });
        let worker = Arc::clone(&core);
        let timers = Timers::start(agenda, move |job| worker.work(job)).map_err(|error| {
            let (kind, code) = (error.kind(), error.raw_os_error());
            TransportError::System { operation: "start", subject: "thread kv-faults".into(), kind, code }
        })?;
        Ok(Self::over(Faults { _timers: timers, core }))
    }
}

impl Faults {
    /// What was injected so far.
    pub fn recording(&self) -> Recording {
        self.core.state().striker.recording().clone()
    }
}

fn after(delay: Duration) -> Instant {
    let now = Instant::now();
    // A delay beyond the clock's range is one that nobody lives to see.
    now.checked_add(delay).unwrap_or_else(|| now + Duration::from_secs(86_400 * 365))
}

impl Core {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complete(&self, op: OpId, result: Result<(), ReadError>, arrived: RangeSet) {
        self.through.tell(Event::ReadCompleted { op, outcome: ReadOutcome { result, arrived } });
    }

    /// Ends a read that is kept here.
    fn end(&self, state: &mut State, op: OpId, error: ReadError) {
        if let Some(read) = state.reads.remove(&op) {
            let arrived = match read.phase {
                Phase::Broken { arrived } => arrived,
                _ => RangeSet::none(read.size),
            };
            self.complete(op, Err(error), arrived);
        }
    }

    /// Ends all reads that are kept here, of one peer or of all.
    fn end_kept(&self, state: &mut State, of: Option<PeerId>, error: &ReadError) {
        let kept = state.reads.iter().filter(|(_, read)| !read.is_behind());
        let ops: Vec<OpId> =
            kept.filter(|(_, read)| of.is_none_or(|peer| read.peer == peer)).map(|(op, _)| *op).collect();
        for op in ops {
            self.end(state, op, error.clone());
        }
    }

    /// Lets go of a peer so that its loss looks like one of another kind.
    fn lose(&self, state: &mut State, peer: PeerId, reason: LossReason) {
        let Some(known) = state.peers.get_mut(&peer) else { return };
        if !known.left && known.lost_as.is_none() && self.through.inner().disconnect(peer).is_ok() {
            known.lost_as = Some(reason);
        }
    }

    /// Gives a read, or what is left of it, to the transport behind.
    fn submit(&self, state: &mut State, request: ReadRequest, read: Read) -> Result<(), TransportError> {
        let op = request.op;
        // Known before it is submitted: its completion may be taken by another thread at once.
        state.reads.insert(op, read);
        self.through.inner().read(request).inspect_err(|_| drop(state.reads.remove(&op)))
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        let mut guard = self.state();
        let state = &mut *guard;
        let (op, peer, limits, size) = (request.op, request.peer, request.limits, request.range_count());
        if state.closed {
            return Err(TransportError::Closed { transport: self.through.inner().name() });
        }
        if state.reads.contains_key(&op) {
            return Err(TransportError::DuplicateOp { op });
        }
        if state.peers.get(&peer).is_none_or(|known| known.left || known.lost_as.is_some()) {
            return Err(TransportError::UnknownPeer { peer });
        }
        let places = request::check(&request, &state.regions)?;
        state.serial += 1;
        let serial = state.serial;
        let regions = request::regions(&request);
        let read = |phase| Read { peer, serial, size, regions, phase };
        let Some((fault, draw)) = state.striker.next(On::Read, &[]) else {
            return self.submit(state, request, read(Phase::Untouched));
        };
        // Whichever limit ends first, and what it is called.
        let (limit, error) = if limits.stall <= limits.total {
            (limits.stall, ReadError::Stalled)
        } else {
            (limits.total, ReadError::TimedOut)
        };
        match fault {
            Fault::Fail { error } => self.complete(op, Err(error.error()), RangeSet::none(size)),
            Fault::LateWrite { delay_ms } => {
                self.complete(op, Err(ReadError::Fabric { code: -5 }), RangeSet::none(size));
                self.agenda.at(after(Duration::from_millis(delay_ms)), Job::Overwrite { places, draw });
            }
            Fault::Corrupt { bytes } => {
                return self.submit(state, request, read(Phase::Corrupting { places, bytes, draw }));
            }
            Fault::Truncate { arrive_percent, error } => match request::cut(&request, arrive_percent) {
                (Some(part), whole) => {
                    return self.submit(state, part, read(Phase::Cut { whole, error: error.error() }));
                }
                (None, _) => self.complete(op, Err(error.error()), RangeSet::none(size)),
            },
            Fault::Disconnect { arrive_percent } => {
                // Should the loss not be told, the limit ends it.
                self.agenda.at(after(limit), Job::Expire { op, serial, error });
                match request::cut(&request, arrive_percent) {
                    (Some(part), whole) => {
                        return self.submit(state, part, read(Phase::Breaking { whole }));
                    }
                    (None, _) => {
                        state.reads.insert(op, read(Phase::Broken { arrived: RangeSet::none(size) }));
                        self.lose(state, peer, BROKEN);
                    }
                }
            }
            Fault::Delay { delay_ms } if Duration::from_millis(delay_ms) < limit => {
                let delay = Duration::from_millis(delay_ms);
                let mut request = request;
                request.limits.total -= delay;
                request.limits.stall -= delay;
                state.reads.insert(op, read(Phase::Delayed { request }));
                self.agenda.at(after(delay), Job::Submit { op, serial });
            }
            // A delay longer than the limits allow, and whatever else has no end of its own.
            _ => {
                state.reads.insert(op, read(Phase::Stalled));
                self.agenda.at(after(limit), Job::Expire { op, serial, error });
            }
        }
        Ok(())
    }

    fn send(&self, peer: PeerId, mut message: Vec<u8>) -> Result<(), TransportError> {
        let mut state = self.state();
        let inner = self.through.inner();
        // What cannot be sent anyway suffers nothing and does not count.
        let known = state.peers.get(&peer).is_some_and(|known| !known.left && known.lost_as.is_none());
        if state.closed || !known || message.len() > inner.capabilities().message_max_bytes {
            return inner.send(peer, message);
        }
        let Some((fault, draw)) = state.striker.next(On::Send, &message) else {
            return inner.send(peer, message);
        };
        match fault {
            Fault::Fail { .. } => Err(TransportError::SendQueueFull { peer, queued: 0 }),
            Fault::Delay { delay_ms } => {
                self.agenda.at(after(Duration::from_millis(delay_ms)), Job::Send { peer, message });
                Ok(())
            }
            Fault::Corrupt { bytes } => {
                request::corrupt_message(&mut message, bytes, draw);
                inner.send(peer, message)
            }
            Fault::Disconnect { .. } => {
                inner.send(peer, message)?;
                self.lose(&mut state, peer, BROKEN);
                Ok(())
            }
            // The rest does not fit messages, except that they are dropped.
            _ => Ok(()),
        }
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        let mut state = self.state();
        let id = self.through.inner().connect(address, limit)?;
        let mut peer = Peer::default();
        let fault = state.striker.next(On::Connect, &[]).map(|(fault, _)| fault);
        let timed_out = Job::GiveUp { peer: id, reason: LossReason::ConnectTimedOut };
        match fault {
            None => {}
            Some(Fault::Disconnect { .. }) => peer.break_when_connected = true,
            Some(Fault::Fail { .. }) => peer.quiet = Some(Vec::new()),
            Some(Fault::Delay { delay_ms }) if Duration::from_millis(delay_ms) < limit => {
                peer.quiet = Some(Vec::new());
                self.agenda.at(after(Duration::from_millis(delay_ms)), Job::Release { peer: id });
            }
            Some(_) => {
                peer.quiet = Some(Vec::new());
                self.agenda.at(after(limit), timed_out);
            }
        }
        state.peers.insert(id, peer);
        if let Some(Fault::Fail { .. }) = fault {
            let kind = std::io::ErrorKind::ConnectionRefused;
            self.lose(&mut state, id, LossReason::Unreachable { kind, code: None });
        }
        Ok(id)
    }

    /// A read ended at the transport behind.
    fn ended(&self, state: &mut State, op: OpId, mut outcome: ReadOutcome) -> Option<Event> {
        let Some(read) = state.reads.remove(&op) else {
            return Some(Event::ReadCompleted { op, outcome });
        };
        let lost_as = state.peers.get(&read.peer).and_then(|peer| peer.lost_as.clone());
        if let (Err(ReadError::PeerLost(reason)), Some(lost_as)) = (&mut outcome.result, lost_as)
            && *reason == LossReason::Disconnected
        {
            *reason = lost_as;
        }
        match &read.phase {
            Phase::Corrupting { places, bytes, draw } if outcome.result.is_ok() => {
                if let Err(error) = request::corrupt(places, *bytes, *draw) {
                    tracing::warn!("{op}: nothing was corrupted: {error}");
                }
            }
            Phase::Cut { whole, error } => {
                outcome.arrived = request::widen(&outcome.arrived, *whole, read.size);
                outcome.result = outcome.result.and(Err(error.clone()));
            }
            Phase::Breaking { whole } => {
                outcome.arrived = request::widen(&outcome.arrived, *whole, read.size);
                if outcome.result.is_ok() {
                    let peer = read.peer;
                    let broken = Phase::Broken { arrived: outcome.arrived };
                    state.reads.insert(op, Read { phase: broken, ..read });
                    self.lose(state, peer, BROKEN);
                    return None;
                }
            }
            _ => {}
        }
        Some(Event::ReadCompleted { op, outcome })
    }

    fn event(&self, event: Event) -> Option<Event> {
        let mut guard = self.state();
        let state = &mut *guard;
        match event {
            Event::Accepted { peer } => {
                state.peers.insert(peer, Peer::default());
                Some(event)
            }
            Event::Connected { peer } | Event::Message { peer, .. } => {
                let connected = matches!(event, Event::Connected { .. });
                match state.peers.get_mut(&peer) {
                    Some(Peer { quiet: Some(kept), .. }) => kept.push(event),
                    Some(known) if connected && known.break_when_connected => {
                        self.through.tell(event);
                        self.lose(state, peer, BROKEN);
                    }
                    _ => return Some(event),
                }
                None
            }
            Event::ReadCompleted { op, outcome } => self.ended(state, op, outcome),
            Event::PeerLost { peer, mut reason } => {
                let known = state.peers.remove(&peer).unwrap_or_default();
                if let (LossReason::Disconnected, Some(lost_as)) = (&reason, known.lost_as) {
                    reason = lost_as;
                }
                self.end_kept(state, Some(peer), &ReadError::PeerLost(reason.clone()));
                Some(Event::PeerLost { peer, reason })
            }
        }
    }

    fn work(&self, job: Job) {
        if let Job::Overwrite { places, draw } = job {
            // Of much memory, perhaps; nobody is to wait for it.
            if let Err(error) = request::overwrite(&places, draw) {
                tracing::warn!("nothing was written late: {error}");
            }
            return;
        }
        let mut guard = self.state();
        let state = &mut *guard;
        let is = |state: &State, op, serial| state.reads.get(&op).is_some_and(|r| r.serial == serial);
        match job {
            Job::Submit { op, serial } if is(state, op, serial) => {
                let Some(Read { phase: Phase::Delayed { request }, peer, size, regions, .. }) =
                    state.reads.remove(&op)
                else {
                    return;
                };
                let read = Read { peer, serial, size, regions, phase: Phase::Untouched };
                if let Err(error) = self.submit(state, request, read) {
                    self.complete(op, Err(request::refused_later(&error, op)), RangeSet::none(size));
                }
            }
            Job::Expire { op, serial, error } if is(state, op, serial) => {
                if state.reads.get(&op).is_some_and(|read| !read.is_behind()) {
                    self.end(state, op, error);
                }
            }
            Job::Send { peer, message } => {
                if let Err(error) = self.through.inner().send(peer, message) {
                    tracing::debug!("a delayed message is lost: {error}");
                }
            }
            Job::Release { peer } => {
                let kept = state.peers.get_mut(&peer).and_then(|known| known.quiet.take());
                kept.into_iter().flatten().for_each(|event| self.through.tell(event));
            }
            Job::GiveUp { peer, reason } => self.lose(state, peer, reason),
            // Of a read that has ended meanwhile.
            Job::Submit { .. } | Job::Expire { .. } | Job::Overwrite { .. } => {}
        }
    }
}

impl Interpose for Faults {
    fn through(&self) -> &Through {
        &self.core.through
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let mut state = self.core.state();
        let region = self.core.through.inner().register(memory.clone())?;
        state.regions.insert(region, memory);
        Ok(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        let mut state = self.core.state();
        // The transport behind does not know of reads that are kept here, or of bytes still to be changed (T-4).
        let touched = state.reads.values().filter(|read| !matches!(read.phase, Phase::Untouched));
        let reads = touched.filter(|read| read.regions.contains(&region)).count();
        if reads > 0 {
            return Err(TransportError::RegionInUse { region, reads });
        }
        self.core.through.inner().deregister(region)?;
        state.regions.remove(&region);
        Ok(())
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        self.core.connect(address, limit)
    }

    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        let mut state = self.core.state();
        // Broken already: its loss is on the way and answers this wish too.
        let known = state.peers.get_mut(&peer);
        if known.as_ref().is_some_and(|known| known.lost_as.is_some() && !known.left) {
            return Ok(());
        }
        self.core.through.inner().disconnect(peer)?;
        if let Some(known) = known {
            known.left = true;
        }
        Ok(())
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        self.core.read(request)
    }

    fn cancel(&self, op: OpId) {
        let mut state = self.core.state();
        match state.reads.get(&op).map(Read::is_behind) {
            Some(false) => self.core.end(&mut state, op, ReadError::Cancelled),
            _ => self.core.through.inner().cancel(op),
        }
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.core.send(peer, message)
    }

    fn event(&self, event: Event) -> Option<Event> {
        self.core.event(event)
    }

    fn closing(&self) {
        let mut state = self.core.state();
        state.closed = true;
        self.core.end_kept(&mut state, None, &ReadError::Closed);
    }
}
