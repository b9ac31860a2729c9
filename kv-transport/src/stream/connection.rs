//! The task of one peer: it connects if need be, then moves bytes both ways until the end.

use std::sync::Arc;
use std::time::Duration;

use super::socket::Socket;
use tokio::io::Interest;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::commands::{AcceptedRead, Command, Control, after};
use super::establish;
use super::frame::{Preface, ServeLimits};
use super::reader::{Others, Reader};
use super::reads::Reads;
use super::serve::Serve;
use super::shared::{Link, Shared};
use super::staging::{Copied, For};
use super::target::{Place, Target};
use super::work::Share;
use super::writer::{Turn, Writer};
use crate::contract::PeerId;
use crate::device::Direction;
use crate::error::LossReason;

/// Bytes that a connection may move each way before it is others' turn.
const TURN_BYTES: usize = 1 << 20;
/// Commands that a connection takes before it moves bytes again.
const TURN_COMMANDS: usize = 256;
/// After so long without taking a byte a peer has stopped, and what was copied ahead for it makes room.
const PATIENCE: Duration = Duration::from_millis(100);
/// So many turns at most of what a peer sent before its end.
const LAST_TURNS: usize = 16;
/// When nothing else is to be waited for.
const LONG: Duration = Duration::from_secs(3600);

/// A peer, whether connected or not yet.
pub(crate) struct Connection {
    shared: Arc<Shared>,
    peer: PeerId,
    first: bool,
    /// Its end is that of the peer. An added connection is not tied before bytes have come over it.
    tied: bool,
    commands: UnboundedReceiver<Command>,
    reads: Reads,
    serve: Serve,
    writer: Writer,
    reason: Option<LossReason>,
    mail: UnboundedSender<Command>,
}

/// The end of a task that does not say why.
const UNKNOWN: LossReason = LossReason::Broken { kind: std::io::ErrorKind::Other, code: None };

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>, link: Link) -> Self {
        let Link { peer, first, mail, commands, shortcut, count } = link;
        Self {
            peer,
            first,
            tied: first,
            commands,
            reads: Reads::new(Arc::clone(&shared), mail.clone(), Arc::clone(&shortcut), count),
            serve: Serve::new(shared.config.serve_limits(), mail.clone()),
            writer: Writer::new(Arc::clone(&shared), peer, shortcut),
            shared,
            reason: None,
            mail,
        }
    }

    /// Lives the life of a peer that connected to us, and whose preface we have read.
    pub(crate) async fn run_accepted(mut self, stream: Socket, answer: Preface, granted: ServeLimits) {
        self.writer.control.extend_from_slice(&answer.encode());
        self.reason = self.serve_stream(stream, granted).await.err();
        self.settle().await;
    }

    /// Lives the life of a peer that we connect to. Further connections are asked for if they are wanted and allowed.
    pub(crate) async fn run_connecting(
        mut self,
        target: Target,
        own: Preface,
        deadline: Instant,
        control: UnboundedSender<Control>,
    ) {
        self.reason = self.connect_and_serve(target, own, deadline, control).await.err();
        self.settle().await;
    }

    /// Lives the life of a connection that was added to a peer.
    pub(crate) async fn run_further(mut self, stream: Socket, granted: ServeLimits) {
        // The answer ends the probation here, and this one at the other side.
        self.writer.ping();
        self.reason = self.serve_stream(stream, granted).await.err();
        self.settle().await;
    }

    /// Reads end with their peer, but not before the copies into their destinations (rule T-3). Those that no copy is made for
    /// end at once, and nothing new is accepted.
    async fn settle(&mut self) {
        if self.reads.copying() == 0 {
            return;
        }
        let reason = self.reason.clone().unwrap_or(UNKNOWN);
        let error = self.shared.leaving(self.peer, reason);
        // Others want what waits to be sent to nobody.
        self.serve = Serve::new(self.shared.config.serve_limits(), self.mail.clone());
        self.writer.abandon();
        let mut shares = self.reads.leave(&error);
        if let Some(local) = &self.shared.local {
            shares.extend(local.detach(self.peer));
        }
        self.shared.end_shares(shares, &error);
        while self.reads.copying() > 0 {
            match self.commands.recv().await {
                Some(Command::Copied(copied)) => self.copied(copied),
                Some(Command::Read(read) | Command::Carry(read)) => {
                    self.shared.end_shares(vec![Share::none(&read)], &error);
                }
                // Whatever it is, it is too late for it.
                Some(_) => {}
                None => return,
            }
        }
    }

    fn copied(&mut self, Copied { what, slot, result }: Copied) {
        match what {
            For::Serve { number } => self.serve.copied(&self.shared, number, slot, result),
            For::Read { op, interval } => {
                // Others wait for it, not for what follows.
                drop(slot);
                self.reads.copied(op, interval, result, &mut self.writer.control);
            }
        }
    }

    async fn connect_and_serve(
        &mut self,
        target: Target,
        own: Preface,
        deadline: Instant,
        control: UnboundedSender<Control>,
    ) -> Result<Never, LossReason> {
        let connecting = connect(Arc::clone(&self.shared), self.peer, target.clone(), own, deadline);
        tokio::pin!(connecting);
        let mut sleep = Box::pin(sleep_until(after(Instant::now(), LONG)));
        let (stream, theirs) = loop {
            // Reads are accepted before the connection stands; their limits run all the same.
            let alarm = self.reads.alarm().unwrap_or_else(|| after(Instant::now(), LONG));
            set(&mut sleep, alarm);
            tokio::select! {
                biased;
                result = &mut connecting => break result?,
                command = self.commands.recv() => self.command(command)?,
                () = &mut sleep => {}
            }
            self.reads.expire(Instant::now(), &mut self.writer.control);
        };
        self.shared.connected(self.peer);
        let count = (self.shared.config.connections_per_peer - 1).min(theirs.further);
        // The same host again, whatever its name may mean by now.
        if count > 0
            && let Some(address) = stream.peer_addr()
        {
            let target = Target { place: Place::At(address), nonce: target.nonce };
            let (peer, ticket) = (self.peer, theirs.expected);
            // A thread that is at its end wants none.
            control.send(Control::Further { peer, target, ticket, count }).ok();
        }
        self.serve_stream(stream, theirs.limits).await
    }

    /// Obeys; an error is the end.
    fn command(&mut self, command: Option<Command>) -> Result<(), LossReason> {
        match command {
            Some(Command::Read(read)) => match &self.shared.local {
                None => self.reads.add(read),
                Some(_) => self.resolve(read),
            },
            Some(Command::Carry(read)) => {
                let (op, serial) = (read.op, read.serial);
                self.reads.add(read);
                // A cancel can have been here before what it is about.
                if self.shared.is_cancelled(op, serial) {
                    self.reads.cancel(op, serial, &mut self.writer.control);
                }
            }
            Some(Command::Cancel { op, serial }) => {
                self.reads.collect();
                self.reads.cancel(op, serial, &mut self.writer.control);
                if let Some(local) = &self.shared.local {
                    local.cancel(op, serial);
                }
            }
            Some(Command::Send(message)) => self.writer.message(message),
            // The next turn looks again.
            Some(Command::Resume) => {}
            Some(Command::Slot(handed)) => match handed.direction {
                Direction::ToHost => self.serve.handed(&self.shared, handed),
                Direction::ToDevice => self.reads.handed(handed, &mut self.writer.control),
            },
            Some(Command::Copied(copied)) => self.copied(copied),
            Some(Command::Close(reason)) => return Err(reason),
            None => return Err(LossReason::Closed),
        }
        Ok(())
    }

    /// Has a local path ask the peer what it must know, beside everything else.
    fn resolve(&self, read: AcceptedRead) {
        let (shared, peer) = (Arc::clone(&self.shared), self.peer);
        tokio::spawn(async move {
            let Some(local) = &shared.local else { return };
            let (op, serial) = (read.op, read.serial);
            if let Some(read) = local.resolve(peer, read).await {
                shared.hand(peer, Command::Carry(read));
            } else if shared.is_cancelled(op, serial) {
                local.cancel(op, serial);
            }
        });
    }

    async fn serve_stream(&mut self, stream: Socket, granted: ServeLimits) -> Result<Never, LossReason> {
        let stream = Arc::new(stream);
        self.reads.open(&stream, granted, self.first);
        let mut reader = Reader::new(Arc::clone(&self.shared), self.peer, self.first);
        let mut sleep = Box::pin(sleep_until(after(Instant::now(), LONG)));
        let mut life = Life::new();
        loop {
            let mut commands = 0;
            while commands < TURN_COMMANDS
                && let Ok(command) = self.commands.try_recv()
            {
                commands += 1;
                if let Err(reason) = self.command(Some(command)) {
                    self.last_turns(&stream, &mut reader);
                    return Err(reason);
                }
            }

            let now = Instant::now();
            self.reads.collect();
            let Self { reads, serve, writer, .. } = self;
            let mut others = Others { reads, serve, writer };
            let (received, any) = reader.turn(&stream, &mut others, now, TURN_BYTES)?;
            // Whoever does not listen must not complain of silence.
            if any || received == Turn::Idle {
                life.last_byte = now;
            }
            if any && !self.tied {
                self.tied = self.shared.tie(self.peer, self.mail.clone());
                if !self.tied {
                    return Err(LossReason::Closed);
                }
            }
            self.reads.expire(now, &mut self.writer.control);
            self.reads.request(&mut self.writer.control);
            if life.ping_due(now, received == Turn::Idle, self.shared.config.keep_alive) {
                self.writer.ping();
            }
            let sent = self.writer.turn(&stream, &mut self.serve, now, TURN_BYTES)?;
            self.check_life(&life, now)?;
            if self.writer.blocked_since().is_some_and(|since| now >= after(since, PATIENCE)) {
                self.serve.yield_slots();
            }

            if received == Turn::More || sent == Turn::More || commands == TURN_COMMANDS {
                tokio::task::yield_now().await;
                continue;
            }
            set(&mut sleep, self.wake(&life));
            if !self.reads.may_sleep(sleep.deadline()) {
                tokio::task::yield_now().await;
                continue;
            }
            let interest = match (received == Turn::Blocked, sent == Turn::Blocked) {
                (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
                (true, false) => Some(Interest::READABLE),
                (false, true) => Some(Interest::WRITABLE),
                (false, false) => None,
            };
            let ready = async {
                match interest {
                    Some(interest) => stream.ready(interest).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                command = self.commands.recv() => {
                    if let Err(reason) = self.command(command) {
                        self.last_turns(&stream, &mut reader);
                        return Err(reason);
                    }
                }
                // An error shows itself again when the socket is used.
                _ = ready => {}
                () = &mut sleep => {}
            }
        }
    }

    /// What was sent before the end should still get there, if the socket takes it at once; and what has come before it
    /// is still taken: another connection may have been faster to tell of the end.
    fn last_turns(&mut self, stream: &Socket, reader: &mut Reader) {
        let now = Instant::now();
        let Self { reads, serve, writer, .. } = self;
        let mut others = Others { reads, serve, writer };
        for _ in 0..LAST_TURNS {
            if !matches!(reader.turn(stream, &mut others, now, TURN_BYTES), Ok((Turn::More, _))) {
                break;
            }
        }
        self.writer.turn(stream, &mut self.serve, now, TURN_BYTES).ok();
    }

    fn check_life(&self, life: &Life, now: Instant) -> Result<(), LossReason> {
        let config = &self.shared.config;
        if now >= after(life.last_byte, config.silence_limit) {
            return Err(LossReason::Silent);
        }
        match self.writer.blocked_since() {
            Some(since) if now >= after(since, config.serve_limit) => Err(LossReason::SlowReader),
            _ => Ok(()),
        }
    }

    /// When to look again, whatever happens.
    fn wake(&self, life: &Life) -> Instant {
        let config = &self.shared.config;
        let ping = after(life.last_byte.max(life.last_ping), config.keep_alive);
        let silent = after(life.last_byte, config.silence_limit);
        let slow = self.writer.blocked_since().map(|since| after(since, config.serve_limit));
        // Slots are given up then.
        let tired = self.writer.blocked_since().filter(|_| self.serve.has_ready());
        let tired = tired.map(|since| after(since, PATIENCE));
        [self.reads.alarm(), slow, tired].into_iter().flatten().fold(ping.min(silent), Instant::min)
    }
}

impl Drop for Connection {
    /// However the task ends, its peer is lost then, unless it was on probation.
    fn drop(&mut self) {
        let reason = self.reason.take().unwrap_or(UNKNOWN);
        tracing::debug!(peer = self.peer.0, first = self.first, %reason, "a connection has ended");
        if !self.tied {
            return self.shared.withdraw(self.peer);
        }
        self.shared.leaving(self.peer, reason.clone());
        let mut shares = self.reads.abandon();
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Read(read) | Command::Carry(read) = command {
                shares.push(Share::none(&read));
            }
        }
        if let Some(local) = &self.shared.local {
            shares.extend(local.detach(self.peer));
        }
        self.shared.leave(self.peer, reason, shares);
    }
}

/// Connects, and finds out what of the peer's memory can be reached without it.
async fn connect(
    shared: Arc<Shared>,
    peer: PeerId,
    target: Target,
    own: Preface,
    deadline: Instant,
) -> Result<(Socket, Preface), LossReason> {
    let connected = establish::connect(&target, own, deadline).await?;
    if let Some(local) = &shared.local {
        let attached = timeout_at(deadline, local.attach(peer, &target)).await;
        attached.map_err(|_| LossReason::ConnectTimedOut)??;
    }
    Ok(connected)
}

/// What never is.
enum Never {}

/// Signs of life.
struct Life {
    last_byte: Instant,
    last_ping: Instant,
}

impl Life {
    fn new() -> Self {
        let now = Instant::now();
        Self { last_byte: now, last_ping: now }
    }

    /// Whether to ping now. While nothing is received because too many messages wait, pings tell the peer that
    /// we are alive, although we do not hear its own.
    fn ping_due(&mut self, now: Instant, deaf: bool, keep_alive: Duration) -> bool {
        let quiet_since = if deaf { self.last_ping } else { self.last_byte.max(self.last_ping) };
        let due = now >= after(quiet_since, keep_alive);
        if due {
            self.last_ping = now;
        }
        due
    }
}

/// Resets a timer if it would be late or has rung. One that is early costs a look in vain now and then; resetting it in every
/// round would cost more.
fn set(sleep: &mut std::pin::Pin<Box<Sleep>>, at: Instant) {
    if at < sleep.deadline() || sleep.is_elapsed() {
        sleep.as_mut().reset(at);
    }
}
