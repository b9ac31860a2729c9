//! The driver: one thread that feeds the machine with facts and carries out its decisions.
//!
//! It owns the clock, the transport's events and the handshakes in progress. The engine's calls only put a plan
//! into its queue and take a report out; they never wait for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kv_proto::handshake::{EngineCard, Query, TransportCard};
use kv_proto::message::{BlockDigest, GroupList, WorkerMessage};
use kv_proto::{Fingerprint, LoadFailure, Moment, PeerLocator, Plan, Report};
use kv_transport::{
    Address, Event, OpId, PeerId, ReadError, ReadLimits, ReadPart, ReadRequest, RegionKey, Transport,
    TransportError,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::{debug, warn};

use crate::digest::Digester;
use crate::machine::io::{Decision, DigestOf, Fact, Failure, LinkId, PullId, SelfCheck as Found, SourceKey};
use crate::machine::peers::Peers;
use crate::machine::worker::{WorkerMachine, WorkerStats};
use crate::self_check::{self, SelfCheck};

/// Most handshakes in progress at once; each has a thread of its own, since looking up a host can block.
const HANDSHAKES_MAX: usize = 256;

/// Most digests computed at once. They are bound by memory: more threads would take it from the engine for nothing.
const DIGESTS_MAX: usize = 4;

/// Most events taken before deadlines are looked at.
const EVENTS_PER_TURN: usize = 1024;

/// Shakes hands with a producer's scheduler process.
///
/// The driver calls it on a thread of its own per handshake, so it may block, but must return within `limit`.
pub trait Dial: Send + Sync {
    /// Asks `query` of the engine at `peer`, and returns what it says of itself, checked against `ours` and
    /// against the engine and life wanted.
    fn dial(
        &self,
        peer: &PeerLocator,
        query: Query,
        ours: &Fingerprint,
        limit: Duration,
    ) -> Result<EngineCard, Failure>;
}

/// What the engine's calls and the driver share.
pub(crate) struct Shared {
    report: Mutex<Report>,
    stats: Mutex<WorkerStats>,
    ready: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    pub(crate) fn new(report: Report, ready: Box<dyn Fn() + Send + Sync>) -> Self {
        Self { report: Mutex::new(report), stats: Mutex::new(WorkerStats::default()), ready }
    }

    /// What has ended since the last call, if anything has.
    pub(crate) fn take_report(&self) -> Option<Report> {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        if report.is_empty() {
            return None;
        }
        let rank = report.rank;
        Some(std::mem::replace(&mut *report, Report::new(rank)))
    }

    pub(crate) fn put_back(&self, mut old: Report) {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        old.leases.append(&mut report.leases);
        old.loads.append(&mut report.loads);
        old.copies.append(&mut report.copies);
        *report = old;
    }

    pub(crate) fn stats(&self) -> WorkerStats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, new: Report, stats: WorkerStats) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
        self.add(new);
    }

    /// Adds to the report that waits.
    pub(crate) fn add(&self, new: Report) {
        if new.is_empty() {
            return;
        }
        let first = {
            let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
            let first = report.is_empty();
            report.leases.extend(new.leases);
            report.loads.extend(new.loads);
            report.copies.extend(new.copies);
            first
        };
        if first {
            (self.ready)();
        }
    }
}

/// What the engine's calls put into the driver's queue.
pub(crate) enum Command {
    Plan(Plan),
    Shutdown { limit: Duration },
}

pub(crate) struct Driver {
    pub(crate) machine: WorkerMachine,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) dialler: Arc<dyn Dial>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) digester: Arc<Digester>,
    pub(crate) self_check: SelfCheck,
    pub(crate) shared: Arc<Shared>,
}

type DigestEnd = (DigestOf, Result<Vec<BlockDigest>, Failure>);
type DialEnd = (SourceKey, Result<EngineCard, Failure>);

struct Running {
    driver: Driver,
    started: Instant,
    facts: VecDeque<Fact>,
    decisions: Vec<Decision>,
    dials: JoinSet<DialEnd>,
    digests: JoinSet<DigestEnd>,
    /// Digests that wait for their turn.
    to_digest: VecDeque<(DigestOf, Vec<GroupList>)>,
    /// Reads under way and their connections, by the number that the transport knows them by.
    reads: BTreeMap<OpId, (PullId, LinkId)>,
    next_read: u64,
    links: BTreeMap<LinkId, PeerId>,
    names: BTreeMap<PeerId, LinkId>,
    next_accepted: u64,
}

impl Driver {
    /// Runs until told to shut down, or until every handle is gone.
    pub(crate) fn run(self, runtime: &tokio::runtime::Runtime, commands: mpsc::UnboundedReceiver<Command>) {
        let running = Running {
            driver: self,
            started: Instant::now(),
            facts: VecDeque::new(),
            decisions: Vec::new(),
            dials: JoinSet::new(),
            digests: JoinSet::new(),
            to_digest: VecDeque::new(),
            reads: BTreeMap::new(),
            next_read: 0,
            links: BTreeMap::new(),
            names: BTreeMap::new(),
            next_accepted: 0,
        };
        runtime.block_on(running.run(commands));
    }

    /// The runtime that a driver runs on.
    pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(HANDSHAKES_MAX + DIGESTS_MAX)
            .thread_name("kv-worker-aside")
            .build()
    }
}

impl Running {
    fn now(&self) -> Moment {
        Moment::from_start(self.started.elapsed())
    }

    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        let transport = self.driver.transport.clone();
        loop {
            let wake = self.driver.machine.next_deadline().map_or_else(
                || self.started + Duration::from_secs(365 * 86_400),
                |at| self.started + at.since_start(),
            );
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Plan(plan)) => self.take(Fact::PlanTaken(plan)),
                    Some(Command::Shutdown { limit }) => return self.shut_down(limit).await,
                    None => return self.shut_down(Duration::from_secs(1)).await,
                },
                event = transport.next_event() => match event {
                    Some(event) => {
                        let over = self.plans_first(&mut commands);
                        self.event(event);
                        if let Some(limit) = over {
                            return self.shut_down(limit).await;
                        }
                    }
                    None => {
                        warn!(transport = transport.name(), "transport closed under the worker");
                        return self.shut_down(Duration::ZERO).await;
                    }
                },
                Some(ended) = self.dials.join_next() => match ended {
                    Ok((key, result)) => {
                        self.take(Fact::HandshakeEnded { key, result: result.map(Box::new) });
                    }
                    // The machine's own limit on the handshake ends it.
                    Err(error) => warn!(%error, "a handshake's thread failed"),
                },
                Some(ended) = self.digests.join_next() => self.digested(ended),
                () = tokio::time::sleep_until(wake.into()) => {
                    // First everything that has arrived, then the deadlines.
                    for _ in 0..EVENTS_PER_TURN {
                        match tokio::time::timeout(Duration::ZERO, transport.next_event()).await {
                            Ok(Some(event)) => {
                                let over = self.plans_first(&mut commands);
                                self.event(event);
                                if let Some(limit) = over {
                                    return self.shut_down(limit).await;
                                }
                            }
                            Ok(None) | Err(_) => break,
                        }
                    }
                    while let Some(ended) = self.digests.try_join_next() {
                        self.digested(ended);
                    }
                    // The machine must have taken them, or a deadline would beat an answer that is here.
                    self.settle();
                    let now = self.now();
                    self.driver.machine.time_passed(now, &mut self.decisions);
                }
            }
            self.settle();
        }
    }

    /// Takes the plans that wait, before an event is taken: a consumer may end a lease whose announcement has been
    /// in the queue since long before, and an ending of a lease that nobody knows is lost. Returns the limit of a
    /// shutdown, if one was asked for.
    fn plans_first(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>) -> Option<Duration> {
        loop {
            match commands.try_recv() {
                Ok(Command::Plan(plan)) => self.take(Fact::PlanTaken(plan)),
                Ok(Command::Shutdown { limit }) => return Some(limit),
                // Empty, or without a sender: the loop finds that out by itself.
                Err(_) => return None,
            }
        }
    }

    fn take(&mut self, fact: Fact) {
        self.facts.push_back(fact);
    }

    /// Hands facts to the machine and carries out what it decides, until there is nothing left of either.
    fn settle(&mut self) {
        loop {
            for decision in std::mem::take(&mut self.decisions) {
                self.carry_out(decision);
            }
            let Some(fact) = self.facts.pop_front() else { break };
            let now = self.now();
            self.driver.machine.take(now, fact, &mut self.decisions);
        }
        let report = self.driver.machine.take_report();
        self.driver.shared.publish(report, self.driver.machine.stats());
    }

    fn event(&mut self, event: Event) {
        let event = match self.driver.self_check.event(event) {
            Ok(end) => return self.self_checked(end),
            Err(event) => event,
        };
        match event {
            Event::Connected { peer } => {
                if let Some(link) = self.names.get(&peer).copied() {
                    self.take(Fact::LinkConnected { link });
                }
            }
            Event::Accepted { peer } => {
                let link = LinkId::Accepted(self.next_accepted);
                self.next_accepted += 1;
                self.links.insert(link, peer);
                self.names.insert(peer, link);
                self.take(Fact::LinkAccepted { link });
            }
            Event::Message { peer, bytes } => {
                if let Some(link) = self.names.get(&peer).copied() {
                    self.take(Fact::MessageArrived { link, message: WorkerMessage::decode(&bytes) });
                }
            }
            Event::ReadCompleted { op, outcome } => {
                let result = outcome.result.map_err(|e| read_failure(&e));
                if let Some((pull, link)) = self.reads.remove(&op) {
                    self.take(Fact::ReadEnded { pull, link, result });
                }
            }
            Event::PeerLost { peer, reason } => {
                if let Some(link) = self.names.remove(&peer) {
                    self.links.remove(&link);
                    debug!(?link, %reason, "connection lost");
                    self.take(Fact::LinkLost { link, detail: reason.to_string() });
                }
            }
        }
    }

    fn carry_out(&mut self, decision: Decision) {
        match decision {
            Decision::ShakeHands { key } => self.shake_hands(key),
            Decision::Connect { link, address } => {
                let limit = self.driver.machine.config().limits.connect;
                match self.driver.transport.connect(&address, limit) {
                    Ok(peer) => {
                        self.links.insert(link, peer);
                        self.names.insert(peer, link);
                    }
                    Err(error) => self.take(Fact::LinkLost { link, detail: error.to_string() }),
                }
            }
            Decision::Disconnect { link } => {
                // Its loss is not news to the machine, so the name goes at once.
                if let Some(peer) = self.links.remove(&link) {
                    self.names.remove(&peer);
                    if let Err(error) = self.driver.transport.disconnect(peer) {
                        debug!(?link, %error, "connection was gone already");
                    }
                }
            }
            Decision::Send { link, message } => self.send(link, &message),
            Decision::Read { pull, link, parts } => self.read(pull, link, parts),
            Decision::CancelRead { pull } => {
                let ops = self.reads.iter().filter(|(_, (of, _))| *of == pull);
                ops.for_each(|(op, _)| self.driver.transport.cancel(*op));
            }
            Decision::Digest { of, groups } => {
                self.to_digest.push_back((of, groups));
                self.start_digests();
            }
            Decision::CheckSelf => {
                let end = self.driver.self_check.begin(&self.driver.machine.config().limits);
                self.self_checked(end);
            }
        }
    }

    fn read(&mut self, pull: PullId, link: LinkId, parts: Vec<ReadPart>) {
        let limits = self.driver.machine.config().limits;
        let limits = ReadLimits { total: limits.read, stall: limits.stall };
        let op = OpId(self.next_read);
        self.next_read += 1;
        let refused = match self.links.get(&link) {
            None => Some(Failure::new(LoadFailure::PeerLost, "the connection is gone")),
            Some(peer) => {
                let request = ReadRequest { op, peer: *peer, parts, limits };
                self.driver.transport.read(request).err().map(|error| {
                    // A connection may be gone before its loss is told.
                    let reason = match error {
                        TransportError::UnknownPeer { .. } => LoadFailure::PeerLost,
                        _ => LoadFailure::ReadRefused,
                    };
                    Failure::new(reason, error.to_string())
                })
            }
        };
        match refused {
            Some(failure) => self.take(Fact::ReadEnded { pull, link, result: Err(failure) }),
            None => drop(self.reads.insert(op, (pull, link))),
        }
    }

    fn self_checked(&mut self, end: self_check::End) {
        let Some((found, why)) = end else { return };
        let transport = self.driver.transport.name();
        match found {
            Found::Readable => debug!("a consumer's load from here failed; own memory can be read"),
            Found::Unknown => debug!(transport, why, "a self check could not be made"),
            Found::Unreadable => warn!(transport, why, "own memory cannot be read: consumers' loads fail"),
        }
        self.take(Fact::SelfChecked { found });
    }

    /// Gives work to threads of its own, so that hashing delays no message and no deadline.
    fn start_digests(&mut self) {
        while self.digests.len() < DIGESTS_MAX
            && let Some((of, groups)) = self.to_digest.pop_front()
        {
            let digester = self.driver.digester.clone();
            self.digests.spawn_blocking(move || {
                let failed = |detail: String| Failure::new(LoadFailure::BadBlocks, detail);
                let work = std::panic::AssertUnwindSafe(|| digester.digest(&groups));
                // The machine counts on an answer, whatever happens.
                let digests = match std::panic::catch_unwind(work) {
                    Ok(digests) => digests.map_err(|error| failed(error.to_string())),
                    Err(_) => Err(failed("a digest's thread panicked".to_owned())),
                };
                (of, digests)
            });
        }
    }

    fn digested(&mut self, ended: Result<DigestEnd, tokio::task::JoinError>) {
        match ended {
            Ok((of, digests)) => self.take(Fact::Digested { of, digests }),
            Err(error) => warn!(%error, "a digest's thread failed"),
        }
        self.start_digests();
    }

    fn send(&mut self, link: LinkId, message: &WorkerMessage) {
        let Some(peer) = self.links.get(&link).copied() else { return };
        let sent = match message.encode() {
            Ok(bytes) => self.driver.transport.send(peer, bytes).map_err(|e| e.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = sent {
            // A message may always be lost with its connection; who waits for its answer has a deadline.
            warn!(?link, error, "message not sent");
        }
    }

    fn shake_hands(&mut self, key: SourceKey) {
        let dialler = self.driver.dialler.clone();
        let fingerprint = self.driver.fingerprint.clone();
        let config = self.driver.machine.config();
        let query = Peers::query(config, &key.peer);
        let limit = config.limits.handshake;
        let transport = self.driver.transport.clone();
        self.dials.spawn_blocking(move || {
            let mut result = dialler.dial(&key.peer, query, &fingerprint, limit);
            if let Ok(card) = &mut result {
                adopt(transport.as_ref(), card);
            }
            (key, result)
        });
    }

    /// Ends the transport, hears the last of it, and reports what ended.
    async fn shut_down(mut self, limit: Duration) {
        let now = self.now();
        self.driver.machine.close(now, &mut self.decisions);
        self.settle();
        let transport = self.driver.transport.clone();
        let until = tokio::time::Instant::now() + limit;
        let drained = async {
            while let Some(event) = transport.next_event().await {
                self.event(event);
                self.settle();
            }
        };
        let (_, _) = tokio::join!(transport.shutdown(limit), tokio::time::timeout_at(until, drained));
        self.dials.abort_all();
        self.digests.abort_all();
    }
}

fn read_failure(error: &ReadError) -> Failure {
    let reason = match error {
        ReadError::Cancelled => LoadFailure::Cancelled,
        ReadError::TimedOut | ReadError::Stalled => LoadFailure::ReadTimedOut,
        ReadError::PeerLost(_) => LoadFailure::PeerLost,
        ReadError::Closed => LoadFailure::Closed,
        _ => LoadFailure::ReadFailed,
    };
    Failure::new(reason, error.to_string())
}

/// Where a peer has only a part of what our transport is made of, writes it down as what our transport takes.
fn adopt(transport: &dyn Transport, card: &mut EngineCard) {
    for worker in &mut card.workers {
        if worker.transports.iter().any(|theirs| theirs.name == transport.name()) {
            continue;
        }
        let adopted = worker.transports.iter().find_map(|theirs| {
            let address = Address::from_bytes(theirs.address.clone()).ok()?;
            let keys = theirs.keys.iter().map(|key| RegionKey::from_bytes(key.to_vec()).ok());
            transport.adopt(&theirs.name, &address, &keys.collect::<Option<Vec<_>>>()?)
        });
        if let Some((address, keys)) = adopted {
            worker.transports.push(TransportCard {
                name: transport.name().to_owned(),
                address: address.as_bytes().to_vec(),
                keys: keys.iter().map(|key| key.as_bytes().to_vec().into()).collect(),
            });
        }
    }
}
