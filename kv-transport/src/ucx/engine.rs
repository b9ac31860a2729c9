//! The thread: it owns UCX's worker, sleeps until there is something to do, and does it.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::address::Endpoint;
use super::conn::{Again, Conn, Fetch, Link, LinkPhase, Op, Phase, Post};
use super::frame::{Body, Frame, Window};
use super::home::Sign;
use super::shared::{AcceptedRead, Command, Shared, after};
use super::status;
use super::worker::{EpId, PostId, Told, Worker};
use crate::contract::PeerId;
use crate::error::{LossReason, ReadError, TransportError};

/// Calls into UCX before something else gets its turn.
const PROGRESS_MAX: usize = 64;
/// How long last words may take to leave.
const FAREWELL: Duration = Duration::from_millis(300);
/// How long endpoints may take to close at the end. They are closed by force, so this is ample.
const SHUTDOWN: Duration = Duration::from_secs(1);
/// Without anything to wait for, the thread looks around this often.
const IDLE: Duration = Duration::from_secs(60);

/// See the module.
pub(super) struct Engine {
    pub(super) shared: Arc<Shared>,
    pub(super) worker: Worker,
    /// Our address, as peers are told.
    pub(super) own: Vec<u8>,
    pub(super) conns: BTreeMap<PeerId, Conn>,
    pub(super) tokens: HashMap<u64, PeerId>,
    pub(super) links: HashMap<EpId, Link>,
    pub(super) posts: HashMap<PostId, Post>,
    pub(super) ops: BTreeMap<u64, Op>,
    pub(super) fetches: HashMap<u64, Fetch>,
    pub(super) fetch_numbers: u64,
    /// Nothing has to be done about time before this.
    pub(super) alarm: Instant,
    closing: Option<Instant>,
    /// The worker had to be destroyed.
    burnt: bool,
}

/// Ends what is left, even if the thread comes to grief.
struct Finish(Arc<Shared>);

impl Drop for Finish {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// How long the end waits for reads to end by themselves; then the worker is destroyed.
const QUIET_AT_END: Duration = Duration::from_secs(1);
/// Frames that may wait to leave by one endpoint.
pub(super) const SENDS_MAX: usize = 16_384;
/// Reads of connections that are over which an endpoint may still keep memory for.
const PINS_MAX: usize = 4096;

impl Engine {
    pub(super) fn new(shared: Arc<Shared>, worker: Worker, own: Vec<u8>) -> Self {
        Self {
            shared,
            worker,
            own,
            conns: BTreeMap::new(),
            tokens: HashMap::new(),
            links: HashMap::new(),
            posts: HashMap::new(),
            ops: BTreeMap::new(),
            fetches: HashMap::new(),
            fetch_numbers: 0,
            alarm: Instant::now(),
            closing: None,
            burnt: false,
        }
    }

    /// Runs until [`Command::Shutdown`], or until the worker had to be destroyed.
    pub(super) fn run(self, sign: Sign) {
        // What is declared first is dropped last, after a panic too: when completions are told, UCX is gone and writes nothing.
        let _finish = Finish(Arc::clone(&self.shared));
        let mut engine = self;
        engine.serve();
        // Whoever connects from now on need not try.
        drop(sign);
        // Keys first, then the worker, then whoever waits for completions.
        engine.ops.clear();
        engine.worker.destroy();
        engine.conns.clear();
        engine.links.clear();
        drop(engine);
    }

    fn serve(&mut self) {
        let mut last_turn = Instant::now();
        let mut idle_since = None;
        loop {
            let now = Instant::now();
            self.forgive(now.saturating_duration_since(last_turn));
            last_turn = now;
            let mut busy = false;
            for command in self.shared.commands() {
                busy = true;
                self.command(command, now);
            }
            for _ in 0..PROGRESS_MAX {
                if !self.worker.progress() {
                    break;
                }
                busy = true;
            }
            for told in self.worker.drain() {
                busy = true;
                self.told(told, now);
            }
            busy |= self.post_messages() | self.post_gets(now);
            if now >= self.alarm {
                self.timers(now);
            }
            busy |= self.tend_links(now);
            if self.burnt || self.is_over(now) {
                break;
            }
            if busy || self.worker.has_told() {
                idle_since = None;
                continue;
            }
            let idle = now.saturating_duration_since(*idle_since.get_or_insert(now));
            if !self.posts.is_empty() && idle < self.shared.config.spin {
                continue;
            }
            if self.worker.arm() {
                self.sleep(now);
            }
        }
    }

    /// If this process stood still, that is not the peers' silence.
    fn forgive(&mut self, gap: Duration) {
        if gap > self.shared.config.keep_alive * 2 {
            for conn in self.conns.values_mut() {
                conn.heard += gap;
                conn.last_get += gap;
            }
        }
    }

    fn sleep(&self, now: Instant) {
        let Ok(news) = self.worker.wake_fd() else { return };
        let wait = self.alarm.saturating_duration_since(now).min(IDLE);
        let limit =
            Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()).max(1) };
        let mut fds = [
            PollFd::new(&news, PollFlags::IN),
            PollFd::from_borrowed_fd(self.shared.wake_fd().as_fd(), PollFlags::IN),
        ];
        // Interrupted or not: the next turn looks at everything.
        poll(&mut fds, Some(&limit)).ok();
    }

    fn is_over(&self, now: Instant) -> bool {
        self.closing.is_some_and(|by| (self.conns.is_empty() && self.links.is_empty()) || by <= now)
    }

    fn command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Connect { peer, endpoint, deadline } => {
                self.connect(peer, Again::new(endpoint), deadline, now);
            }
            Command::Disconnect { peer } => self.leave(peer, LossReason::Disconnected, true, now),
            Command::Read(read) => self.add_read(read, now),
            Command::Cancel { serial } => self.end_op(serial, ReadError::Cancelled, now),
            Command::Send { peer, bytes } => {
                if let Some(conn) = self.conns.get_mut(&peer) {
                    conn.queue.push_back(bytes);
                }
            }
            Command::Taken { peer, taken } => self.taken(peer, taken),
            Command::Shutdown => {
                self.closing = Some(after(now, SHUTDOWN + self.shared.config.quiet_limit.min(QUIET_AT_END)));
                self.alarm = now;
                for peer in self.conns.keys().copied().collect::<Vec<_>>() {
                    self.leave(peer, LossReason::Closed, true, now);
                }
            }
        }
    }

    fn taken(&mut self, peer: PeerId, taken: Window) {
        let Some(conn) = self.conns.get_mut(&peer) else { return };
        conn.untaken.messages = conn.untaken.messages.saturating_sub(taken.messages);
        conn.untaken.bytes = conn.untaken.bytes.saturating_sub(taken.bytes);
        self.say(peer, Body::Credit(taken));
    }

    fn add_read(&mut self, read: AcceptedRead, now: Instant) {
        let AcceptedRead { op, serial, peer, plan, submitted, limits } = read;
        let Some(conn) =
            self.conns.get_mut(&peer).filter(|conn| !matches!(conn.phase, Phase::Leaving { .. }))
        else {
            // Its peer is gone or about to be, and the read ends with it.
            return;
        };
        if let Err(error) = plan.check_remote(&conn.life) {
            self.shared.complete(op, serial, Err(error));
            return;
        }
        conn.waiting.push_back(serial);
        let op = Op {
            id: op,
            peer,
            plan,
            cursor: super::plan::Cursor::default(),
            rkeys: vec![],
            outstanding: 0,
            fetches: 0,
            stage: super::conn::Stage::Waiting,
            deadline: after(submitted, limits.total),
            stall: limits.stall,
            last_byte: submitted,
        };
        self.alarm = self.alarm.min(op.alarm()).min(after(now, IDLE));
        self.ops.insert(serial, op);
        self.open_reads(peer);
    }

    fn told(&mut self, told: Told, now: Instant) {
        match told {
            Told::Frame { reply_to, bytes } => match Frame::decode(bytes) {
                Some(frame) => self.frame(reply_to, frame, now),
                None => tracing::debug!("a message of no kind that is known here was ignored"),
            },
            Told::Landed { token, fetch, bytes, fits } => self.landed(token, fetch, bytes, fits, now),
            Told::Failed { ep, status } => {
                tracing::debug!(ep, status, "an endpoint failed");
                self.fail_link(ep, status, now);
            }
            Told::Ended { post, status } => match self.posts.remove(&post) {
                Some(Post::Get { serial, peer, ep, bytes }) => {
                    self.got(serial, peer, ep, bytes, status, now);
                }
                Some(Post::Send { ep, message }) => {
                    if let Some(link) = self.links.get_mut(&ep) {
                        link.sends -= 1;
                    }
                    if let Some((peer, bytes)) = message {
                        self.shared.sent(peer, bytes);
                    }
                    if status != status::OK {
                        self.fail_link(ep, status, now);
                    }
                }
                Some(Post::Close { ep }) => {
                    if let Some(link) = self.links.get_mut(&ep) {
                        link.closed = true;
                    }
                }
                None => {}
            },
        }
    }

    // Connections.

    /// Ends a connection. Politely the peer is told, and what is on its way may still come.
    pub(super) fn leave(&mut self, peer: PeerId, reason: LossReason, politely: bool, now: Instant) {
        let Some(conn) = self.conns.get(&peer) else {
            // Already lost at the thread's side; only the first word counts.
            return self.shared.lose(peer, reason);
        };
        if matches!(conn.phase, Phase::Leaving { .. }) {
            return;
        }
        let (ep, peer_token) = (conn.ep, conn.peer_token);
        if politely && peer_token != 0 {
            self.say(peer, Body::Bye);
        }
        let by = after(now, self.shared.config.quiet_limit);
        self.alarm = self.alarm.min(by);
        let Some(conn) = self.conns.get_mut(&peer) else { return };
        conn.phase = Phase::Leaving { reason, by };
        conn.queue.clear();
        conn.early.clear();
        self.tokens.remove(&conn.own_token);
        let gets = conn.gets;
        // Those that wait for nothing end with the peer; the others when UCX has said their last word.
        self.ops.retain(|_, op| op.peer != peer || op.outstanding > 0);
        self.fetches.retain(|number, fetch| {
            let stays = fetch.peer != peer;
            if !stays {
                self.worker.forget(*number);
            }
            stays
        });
        if !politely && gets > 0 {
            self.force(ep, now);
        }
        self.try_lose(peer, now);
    }

    /// Tells the loss of a peer, once nothing read from it is still on its way.
    pub(super) fn try_lose(&mut self, peer: PeerId, now: Instant) {
        let ready = |conn: &Conn| conn.gets == 0 && matches!(conn.phase, Phase::Leaving { .. });
        if !self.conns.get(&peer).is_some_and(ready) {
            return;
        }
        let Some(conn) = self.conns.remove(&peer) else { return };
        self.ops.retain(|_, op| op.peer != peer);
        if let Some(link) = self.links.get_mut(&conn.ep) {
            link.peers.retain(|other| *other != peer);
            // The peer may be slow to notice; until the endpoint is closed it may be served.
            link.pins.extend(conn.pins.into_values());
            // One who comes and goes over an endpoint that others keep open must not pin more and more.
            if link.pins.len() > PINS_MAX {
                self.force(conn.ep, now);
            }
        }
        self.drain_link(conn.ep, now);
        if let Phase::Leaving { reason, .. } = conn.phase {
            self.shared.lose(peer, reason);
        }
    }

    // Endpoints.

    /// UCX says that an endpoint does not work any more.
    pub(super) fn fail_link(&mut self, ep: EpId, status: i8, now: Instant) {
        if !self.is_usable(ep) {
            return;
        }
        let peers = self.links.get(&ep).map(|link| link.peers.clone()).unwrap_or_default();
        for peer in peers {
            if self.connect_again(peer, now) {
                continue;
            }
            let connecting =
                self.conns.get(&peer).is_some_and(|conn| matches!(conn.phase, Phase::Connecting { .. }));
            let reason = if connecting { status::unreachable(status) } else { status::lost(status) };
            self.leave(peer, reason, false, now);
        }
        self.force(ep, now);
    }

    /// Whether an endpoint is neither closed nor being closed.
    pub(super) fn is_usable(&self, ep: EpId) -> bool {
        let usable = |link: &Link| {
            matches!(link.phase, LinkPhase::Open | LinkPhase::Draining { .. } | LinkPhase::Spare { .. })
        };
        self.links.get(&ep).is_some_and(usable)
    }

    /// Lets an endpoint that nobody needs go, once its last words have left.
    pub(super) fn drain_link(&mut self, ep: EpId, now: Instant) {
        let by = after(now, FAREWELL);
        if let Some(link) = self.links.get_mut(&ep)
            && link.peers.is_empty()
            && link.phase == LinkPhase::Open
        {
            link.phase = LinkPhase::Draining { by };
            self.alarm = self.alarm.min(by);
        }
    }

    /// Closes an endpoint without regard for what is on its way: UCX then ends everything posted on it.
    pub(super) fn force(&mut self, ep: EpId, now: Instant) {
        if !self.is_usable(ep) {
            return;
        }
        let Some(link) = self.links.get_mut(&ep) else { return };
        let by = after(now, self.shared.config.force_limit);
        link.phase = LinkPhase::Closing { by };
        self.alarm = self.alarm.min(by);
        let peers = link.peers.clone();
        match self.worker.close(ep, true) {
            Some(post) => drop(self.posts.insert(post, Post::Close { ep })),
            None => {
                if let Some(link) = self.links.get_mut(&ep) {
                    link.closed = true;
                }
            }
        }
        for peer in peers {
            self.leave(peer, LossReason::Silent, false, now);
        }
    }

    /// Closes endpoints that nobody needs, and lets go of those that are closed.
    fn tend_links(&mut self, now: Instant) -> bool {
        let mut due = vec![];
        let before = self.links.len();
        for (ep, link) in &self.links {
            match link.phase {
                LinkPhase::Draining { by } if link.sends == 0 || by <= now => due.push(*ep),
                LinkPhase::Spare { by } if by <= now || self.closing.is_some() => due.push(*ep),
                LinkPhase::Open if link.peers.is_empty() => due.push(*ep),
                LinkPhase::Closing { by } if link.gets > 0 && by <= now => {
                    tracing::error!(
                        "UCX did not end the reads of a closed endpoint; its worker is destroyed"
                    );
                    self.burnt = true;
                }
                _ => {}
            }
        }
        let any = !due.is_empty();
        for ep in due {
            self.force(ep, now);
        }
        self.links.retain(|_, link| !link.closed || link.gets > 0);
        any || self.links.len() != before
    }

    // What is sent.

    /// Sends a frame of ours on a connection.
    pub(super) fn say(&mut self, peer: PeerId, body: Body) {
        if let Some(conn) = self.conns.get(&peer) {
            let (ep, frame) = (conn.ep, Frame { token: conn.peer_token, body });
            self.post_frame(ep, frame.encode(), false, None);
        }
    }

    /// Posts a frame. What fails at once fails as what is pending does: by UCX's word about the endpoint.
    pub(super) fn post_frame(
        &mut self,
        ep: EpId,
        bytes: Vec<u8>,
        reply: bool,
        message: Option<(PeerId, usize)>,
    ) {
        // Whoever asks and never takes the answers must not pile them up here.
        if self.links.get(&ep).is_some_and(|link| link.sends >= SENDS_MAX) {
            if let Some((peer, bytes)) = message {
                self.shared.sent(peer, bytes);
            }
            return self.fail_link(ep, status::OVERRUN, Instant::now());
        }
        let sent = self.worker.send(ep, bytes, reply);
        self.posted(ep, sent, message);
    }

    pub(super) fn posted(
        &mut self,
        ep: EpId,
        sent: Result<Option<PostId>, i8>,
        message: Option<(PeerId, usize)>,
    ) {
        match sent {
            Ok(Some(post)) => {
                self.posts.insert(post, Post::Send { ep, message });
                if let Some(link) = self.links.get_mut(&ep) {
                    link.sends += 1;
                }
            }
            Ok(None) => {
                if let Some((peer, bytes)) = message {
                    self.shared.sent(peer, bytes);
                }
            }
            Err(status) => {
                if let Some((peer, bytes)) = message {
                    self.shared.sent(peer, bytes);
                }
                self.fail_link(ep, status, Instant::now());
            }
        }
    }

    fn post_messages(&mut self) -> bool {
        let mut any = false;
        let ready = |conn: &Conn| conn.is_open() && !conn.queue.is_empty();
        let peers: Vec<_> =
            self.conns.iter().filter(|(_, conn)| ready(conn)).map(|(peer, _)| *peer).collect();
        for peer in peers {
            while let Some(conn) = self.conns.get_mut(&peer)
                && conn.is_open()
                && let Some(bytes) = conn.queue.front().map(|message| message.len())
                && conn.may_send(bytes as u64)
                && let Some(message) = conn.queue.pop_front()
            {
                conn.used.messages += 1;
                conn.used.bytes += bytes as u64;
                let (ep, frame) = (conn.ep, Frame { token: conn.peer_token, body: Body::Message(message) });
                self.post_frame(ep, frame.encode(), false, Some((peer, bytes)));
                any = true;
            }
        }
        any
    }

    // Time.

    fn timers(&mut self, now: Instant) {
        let mut next = after(now, IDLE);
        let (keep_alive, silence) = (self.shared.config.keep_alive, self.shared.config.silence_limit);
        for peer in self.conns.keys().copied().collect::<Vec<_>>() {
            let Some(conn) = self.conns.get_mut(&peer) else { continue };
            let ep = conn.ep;
            match conn.phase {
                Phase::Connecting { deadline, .. } if deadline <= now => {
                    self.leave(peer, LossReason::ConnectTimedOut, false, now);
                }
                Phase::Connecting { deadline, .. } => next = next.min(deadline),
                Phase::Leaving { by, .. } if by <= now => self.force(ep, now),
                Phase::Leaving { by, .. } => next = next.min(by),
                Phase::Open if conn.is_silent(now, silence) => {
                    self.leave(peer, LossReason::Silent, false, now);
                }
                Phase::Open => {
                    let quiet = now.saturating_duration_since(conn.heard);
                    if quiet >= keep_alive && !conn.pinged {
                        conn.pinged = true;
                        self.say(peer, Body::Ping);
                    }
                    next = next.min(after(now, keep_alive.saturating_sub(quiet).max(keep_alive / 4)));
                }
            }
        }
        self.expire(now);
        for op in self.ops.values() {
            next = next.min(op.alarm());
        }
        for link in self.links.values() {
            match link.phase {
                LinkPhase::Draining { by } | LinkPhase::Spare { by } => next = next.min(by),
                LinkPhase::Closing { by } if link.gets > 0 => next = next.min(by),
                _ => {}
            }
        }
        if let Some(by) = self.closing {
            next = next.min(by);
        }
        // Whatever is overdue and could not be done yet is looked at again in a moment, not at once.
        self.alarm = next.max(now + Duration::from_millis(1));
    }
}

/// Starts a worker and the thread that owns it; returns when it is ready, with its address.
pub(super) fn start(
    worker: impl FnOnce() -> Result<Worker, TransportError> + Send + 'static,
    shared: Arc<Shared>,
) -> Result<(std::thread::JoinHandle<()>, Vec<u8>), TransportError> {
    let (ready, is_ready) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new()
        .name("kv-ucx".into())
        .spawn(move || {
            let made = worker().and_then(|worker| {
                let sign = Sign::put_up(&shared.life);
                let worker_address = worker.address.clone();
                let endpoint = Endpoint { life: shared.life, home: sign.home, worker: worker_address };
                super::own_address(&endpoint).map(|own| (worker, sign, own.as_bytes().to_vec()))
            });
            match made {
                Ok((worker, sign, own)) => {
                    let engine = Engine::new(shared, worker, own.clone());
                    ready.send(Ok(own)).ok();
                    engine.run(sign);
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        })
        .map_err(|error| super::system("start", "thread kv-ucx", &error))?;
    match is_ready.recv() {
        Ok(Ok(own)) => Ok((thread, own)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(TransportError::Closed { transport: super::NAME }),
    }
}
