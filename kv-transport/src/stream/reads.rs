//! The reading side of a connection: operations, the requests they are cut into, and what comes back.
//!
//! Only the task that owns this value writes for the requests that are here. So an operation can
//! end at once: its requests are *detached*, which drops their destination, and what still arrives for them is
//! drained into a scratch buffer (rule T-3). Bytes for a device are asked for once there is a slot of pinned memory for them, so
//! that what arrives never has to wait. They are received there, and copied to the device when their chunk has ended well;
//! an operation ends after its last copy, whatever ends it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use super::commands::{AcceptedRead, Command, after};
use super::frame::{EndCode, Header, ServeLimits, encode_read};
use super::limits::{CHUNK_QUEUE_LIMIT, Limits};
use super::plan::{Cut, Intervals};
use super::pool::{Customer, Handed, Slot};
use super::shared::Shared;
use super::shortcut::{Posted, Shortcut, is_posted};
use super::socket::Socket;
use super::spans::Spans;
use super::staging::For;
use super::work::{Share, Work};
use crate::contract::OpId;
use crate::device::{Device, DeviceError, DeviceId, Direction};
use crate::error::ReadError;
use crate::memory::Memory;

/// So much of each operation is asked for at once, before what is left of others and beyond the window: a small read
/// must not wait until a large one makes room. The number of requests stays within the grant all the same.
const EARLY_BYTES: u64 = 2 << 20;

struct Op {
    id: OpId,
    serial: u64,
    work: Arc<Work>,
    shares: usize,
    outstanding: usize,
    bytes_out: u64,
    /// For its next chunk, if that goes to a device.
    slot: Option<Slot>,
    /// Copies under way into its destination.
    copying: usize,
    arrived: Intervals,
    deadline: Instant,
    stall: std::time::Duration,
    last_byte: Instant,
}

impl Op {
    fn share(self) -> Share {
        Share { op: self.id, serial: self.serial, arrived: self.arrived }
    }

    /// Whether to leave the rest to other connections for now.
    fn is_sated(&self) -> bool {
        self.shares > 1 && self.bytes_out >= self.work.part(self.shares)
    }

    fn alarm(&self) -> Instant {
        self.deadline.min(after(self.last_byte, self.stall))
    }
}

/// Where the bytes of a chunk go.
pub(crate) struct Destination {
    op: u64,
    pub(crate) memory: Memory,
    pub(crate) spans: Spans,
    /// Set if `memory` is that of a slot.
    staged: Option<Staged>,
}

/// Where bytes in a slot have to go.
struct Staged {
    slot: Slot,
    memory: Memory,
    ranges: Vec<(u64, u32)>,
}

struct Chunk {
    /// Gone once the operation has ended.
    destination: Option<Destination>,
    bytes: u32,
    interval: (u64, u64),
    data_seen: bool,
}

/// Operations in the order in which they get slots, and whether they are early ones.
type Parked = VecDeque<(u64, bool)>;

/// See the module.
pub(crate) struct Reads {
    shared: Arc<Shared>,
    customer: Customer,
    shortcut: Arc<Shortcut>,
    /// How many connections share the window.
    links: Arc<AtomicU64>,
    ops: HashMap<u64, Op>,
    /// Operations that have come to their end, but for copies under way.
    ending: HashMap<u64, (Op, Result<(), ReadError>)>,
    /// Copies under way for all of them.
    copying: usize,
    by_id: HashMap<OpId, u64>,
    /// Operations that other connections work on too.
    spread: Vec<u64>,
    /// Operations of which little was asked for yet.
    early: VecDeque<u64>,
    /// Other operations with something left to ask for. They take turns.
    ring: VecDeque<u64>,
    /// Operations that wait for a slot for a device.
    parked: HashMap<DeviceId, (Arc<dyn Device>, Parked)>,
    chunks: HashMap<u64, Chunk>,
    /// Chunks of the task's own, which is all but those that were posted.
    asked: u32,
    numbers: u64,
    bytes_out: u64,
    limits: Option<ServeLimits>,
    /// No operation runs out before this.
    alarm: Option<Instant>,
}

impl Reads {
    pub(crate) fn new(
        shared: Arc<Shared>,
        mail: UnboundedSender<Command>,
        shortcut: Arc<Shortcut>,
        links: Arc<AtomicU64>,
    ) -> Self {
        Self {
            shared,
            customer: Customer::new(mail),
            shortcut,
            links,
            ops: HashMap::new(),
            ending: HashMap::new(),
            copying: 0,
            by_id: HashMap::new(),
            spread: vec![],
            early: VecDeque::new(),
            ring: VecDeque::new(),
            parked: HashMap::new(),
            chunks: HashMap::new(),
            asked: 0,
            numbers: 0,
            bytes_out: 0,
            limits: None,
            alarm: None,
        }
    }

    /// The connection stands: from now on reads are sent, within what both sides allow.
    pub(crate) fn open(&mut self, socket: &Arc<Socket>, granted: ServeLimits, first: bool) {
        let Limits { chunk_max_bytes, chunk_max_ranges, .. } = self.shared.config;
        let limits = ServeLimits {
            chunk_queue: granted.chunk_queue.min(CHUNK_QUEUE_LIMIT),
            chunk_bytes: granted.chunk_bytes.min(chunk_max_bytes),
            chunk_ranges: granted.chunk_ranges.min(chunk_max_ranges),
        };
        // Small reads go over the first connection.
        let kept = if first { self.shortcut.open(socket, limits) } else { 0 };
        self.limits = Some(ServeLimits { chunk_queue: limits.chunk_queue - kept, ..limits });
    }

    pub(crate) fn add(&mut self, read: AcceptedRead) {
        self.numbers += 1;
        self.insert(self.numbers, read);
        self.early.push_back(self.numbers);
    }

    /// Takes over what callers have asked the peer for themselves.
    pub(crate) fn collect(&mut self) {
        for Posted { number, read, cut } in self.shortcut.collect() {
            self.insert(number, read);
            self.expect(number, number, cut, None);
        }
    }

    /// Whether nothing was posted that would be slept over.
    pub(crate) fn may_sleep(&self, until: Instant) -> bool {
        self.shortcut.may_sleep(until)
    }

    fn insert(&mut self, number: u64, read: AcceptedRead) {
        let AcceptedRead { op: id, serial, work, shares, limits } = read;
        let submitted = work.submitted;
        let op = Op {
            id,
            serial,
            work,
            shares,
            outstanding: 0,
            bytes_out: 0,
            slot: None,
            copying: 0,
            arrived: vec![],
            deadline: after(submitted, limits.total),
            stall: limits.stall,
            last_byte: submitted,
        };
        self.alarm = Some(self.alarm.map_or(op.alarm(), |alarm| alarm.min(op.alarm())));
        self.by_id.insert(id, number);
        if shares > 1 {
            self.spread.push(number);
        }
        self.ops.insert(number, op);
    }

    /// A chunk was asked for.
    fn expect(&mut self, number: u64, op: u64, cut: Cut, slot: Option<Slot>) {
        let Cut { mut memory, local: mut spans, interval, .. } = cut;
        let bytes = spans.left() as u32;
        let mut staged = None;
        if let Some(slot) = slot
            && let Some(pinned) = slot.memory().cloned()
        {
            let ranges = spans.rest().collect();
            spans = Spans::default();
            spans.push(0, bytes);
            staged = Some(Staged { slot, memory: std::mem::replace(&mut memory, pinned), ranges });
        }
        self.bytes_out += u64::from(bytes);
        self.shared.in_flight.fetch_add(u64::from(bytes), Ordering::Relaxed);
        if let Some(op) = self.ops.get_mut(&op) {
            op.outstanding += 1;
            op.bytes_out += u64::from(bytes);
        }
        let destination = Some(Destination { op, memory, spans, staged });
        self.chunks.insert(number, Chunk { destination, bytes, interval, data_seen: false });
    }

    pub(crate) fn cancel(&mut self, id: OpId, serial: u64, out: &mut Vec<u8>) {
        if let Some(number) = self.by_id.get(&id)
            && self.ops.get(number).is_some_and(|op| op.serial == serial)
        {
            self.finish(*number, Err(ReadError::Cancelled), out);
        }
    }

    /// When [`Reads::expire`] has to be called next, at the latest.
    pub(crate) fn alarm(&self) -> Option<Instant> {
        self.alarm
    }

    /// Ends the operations whose time is over.
    pub(crate) fn expire(&mut self, now: Instant, out: &mut Vec<u8>) {
        if self.alarm.is_none_or(|alarm| now < alarm) {
            return;
        }
        self.finish_shares(out);
        for op in self.ops.values_mut() {
            // Another connection may have had bytes for it.
            op.last_byte = op.last_byte.max(op.work.last_byte());
        }
        let mut due: Vec<_> = self
            .ops
            .iter()
            .filter(|(_, op)| op.alarm() <= now)
            .map(|(number, op)| {
                (*number, if op.deadline <= now { ReadError::TimedOut } else { ReadError::Stalled })
            })
            .collect();
        due.sort_unstable_by_key(|(number, _)| *number);
        for (number, error) in due {
            self.finish(number, Err(error), out);
        }
        self.alarm = self.ops.values().map(Op::alarm).min();
    }

    /// Appends requests as far as the window allows.
    pub(crate) fn request(&mut self, out: &mut Vec<u8>) {
        let Some(limits) = self.limits else { return };
        self.finish_shares(out);
        if self.asked < limits.chunk_queue {
            self.unpark(out);
        }
        let Limits { bytes_in_flight_per_peer, bytes_in_flight_max: most, .. } = self.shared.config;
        let window = bytes_in_flight_per_peer / self.links.load(Ordering::Relaxed).max(1);
        let mut sated = vec![];
        while self.asked < limits.chunk_queue {
            let next = u64::from(limits.chunk_bytes);
            let all = self.shared.in_flight.load(Ordering::Relaxed);
            let room = self.chunks.is_empty()
                || (self.bytes_out + next <= window && all.saturating_add(next) <= most);
            let early = self.early.pop_front().map(|number| (number, true));
            let next = early.or_else(|| self.ring.pop_front_if(|_| room).map(|number| (number, false)));
            let Some((number, early)) = next else { break };
            if !self.has_slot(number, early, out) {
                continue;
            }
            let Some(op) = self.ops.get_mut(&number) else { continue };
            if op.is_sated() {
                sated.push((number, early));
                continue;
            }
            let slot = op.slot.take();
            let Some(cut) = op.work.cut(limits.chunk_bytes, limits.chunk_ranges as usize) else {
                // Other connections took the rest.
                self.finish_if_done(number, out);
                continue;
            };
            self.numbers += 1;
            encode_read(out, self.numbers, number, cut.key, &cut.remote);
            if !op.work.is_cut() {
                let early = op.work.taken() < EARLY_BYTES;
                let ring = if early { &mut self.early } else { &mut self.ring };
                ring.push_back(number);
            }
            self.asked += 1;
            self.expect(self.numbers, number, cut, slot);
        }
        for (number, early) in sated {
            let ring = if early { &mut self.early } else { &mut self.ring };
            ring.push_back(number);
        }
    }

    /// Whether there is a slot for the next chunk of an operation, or none is needed. If not, the operation is parked, and
    /// [`Command::Slot`] follows.
    fn has_slot(&mut self, number: u64, early: bool, out: &mut Vec<u8>) -> bool {
        let Some(op) = self.ops.get_mut(&number).filter(|op| op.slot.is_none()) else { return true };
        let Some(device) = op.work.next_device() else { return true };
        let id = device.id();
        // Those that wait already come first.
        let got = match self.parked.get(&id) {
            Some(_) => Ok(None),
            None => self.shared.staging.slot(&**device, Direction::ToDevice, &self.customer),
        };
        match got {
            Ok(Some(slot)) => op.slot = Some(slot),
            Ok(None) => {
                let device = Arc::clone(device);
                let (_, waiting) = self.parked.entry(id).or_insert_with(|| (device, VecDeque::new()));
                waiting.push_back((number, early));
            }
            Err(error) => self.finish(number, Err(error.into()), out),
        }
        self.ops.get(&number).is_some_and(|op| op.slot.is_some())
    }

    /// Asks for slots for those that wait.
    fn unpark(&mut self, out: &mut Vec<u8>) {
        if self.parked.is_empty() {
            return;
        }
        let devices: Vec<_> = self.parked.values().map(|(device, _)| Arc::clone(device)).collect();
        for device in devices {
            let id = device.id();
            while let Some((_, waiting)) = self.parked.get_mut(&id) {
                while waiting.pop_front_if(|(number, _)| !self.ops.contains_key(number)).is_some() {}
                if waiting.is_empty() {
                    self.parked.remove(&id);
                    break;
                }
                let direction = Direction::ToDevice;
                let result = match self.shared.staging.slot(&*device, direction, &self.customer) {
                    Ok(None) => break,
                    Ok(Some(slot)) => Ok(slot),
                    Err(error) => Err(error),
                };
                self.handed(Handed { direction, device: id, result }, out);
            }
        }
    }

    /// A slot that was waited for.
    pub(crate) fn handed(&mut self, handed: Handed, out: &mut Vec<u8>) {
        let Some((device, mut waiting)) = self.parked.remove(&handed.device) else { return };
        match handed.result {
            Ok(slot) => {
                // If nobody wants it any more, it goes back.
                while let Some((number, early)) = waiting.pop_front() {
                    if let Some(op) = self.ops.get_mut(&number) {
                        op.slot = Some(slot);
                        let queue = if early { &mut self.early } else { &mut self.ring };
                        queue.push_front(number);
                        break;
                    }
                }
                if !waiting.is_empty() {
                    self.parked.insert(handed.device, (device, waiting));
                }
            }
            Err(error) => {
                for (number, _) in waiting {
                    self.finish(number, Err(error.clone().into()), out);
                }
            }
        }
    }

    /// Whether bytes may come that have a place of their own.
    pub(crate) fn expects_data(&self) -> bool {
        !self.chunks.is_empty() || self.shortcut.is_used()
    }

    /// The answer to a posted request can be faster than the look at what was posted.
    fn collect_if_unknown(&mut self, chunk: u64) {
        if is_posted(chunk) && !self.chunks.contains_key(&chunk) {
            self.collect();
        }
    }

    /// The header of a chunk's data came: may it?
    pub(crate) fn begin_data(&mut self, chunk: u64, len: u32) -> Result<(), &'static str> {
        self.collect_if_unknown(chunk);
        let chunk = self.chunks.get_mut(&chunk).ok_or("data that nobody asked for")?;
        if chunk.data_seen {
            return Err("the same data twice");
        }
        if chunk.bytes != len {
            return Err("data of another length than asked for");
        }
        chunk.data_seen = true;
        Ok(())
    }

    /// Where the chunk's bytes go; `None` means to the scratch buffer.
    pub(crate) fn destination(&mut self, chunk: u64) -> Option<&mut Destination> {
        self.chunks.get_mut(&chunk)?.destination.as_mut()
    }

    /// Bytes of a chunk arrived in their place.
    pub(crate) fn received(&mut self, chunk: u64, bytes: u64, now: Instant) {
        if let Some(destination) = self.chunks.get_mut(&chunk).and_then(|chunk| chunk.destination.as_mut()) {
            destination.spans.advance(bytes);
            if let Some(op) = self.ops.get_mut(&destination.op) {
                op.last_byte = now;
                op.work.note(now);
            }
        }
    }

    /// A chunk ended.
    pub(crate) fn end(&mut self, number: u64, code: EndCode, out: &mut Vec<u8>) -> Result<(), &'static str> {
        self.collect_if_unknown(number);
        let chunk = self.chunks.remove(&number).ok_or("the end of a chunk that nobody asked for")?;
        if is_posted(number) {
            self.shortcut.ended();
        } else {
            self.asked -= 1;
        }
        self.bytes_out -= u64::from(chunk.bytes);
        self.shared.in_flight.fetch_sub(u64::from(chunk.bytes), Ordering::Relaxed);
        if code == EndCode::Done && !chunk.data_seen {
            return Err("the end of a chunk before its data");
        }
        let Some(Destination { op: number, staged, .. }) = chunk.destination else { return Ok(()) };
        let Some(op) = self.ops.get_mut(&number) else { return Ok(()) };
        op.outstanding -= 1;
        op.bytes_out -= u64::from(chunk.bytes);
        match code {
            EndCode::Done => match staged {
                None => {
                    op.arrived.push(chunk.interval);
                    self.finish_if_done(number, out);
                }
                Some(Staged { slot, memory, ranges }) => {
                    let what = For::Read { op: number, interval: chunk.interval };
                    match self.shared.staging.copy(what, slot, memory, ranges, self.customer.mail()) {
                        Ok(()) => (op.copying, self.copying) = (op.copying + 1, self.copying + 1),
                        Err(error) => self.finish(number, Err(error.into()), out),
                    }
                }
            },
            EndCode::Device => self.finish(number, Err(ReadError::RemoteDevice), out),
            EndCode::UnknownKey => self.finish(number, Err(ReadError::UnknownKey), out),
            EndCode::Range => self.finish(number, Err(ReadError::RemoteRange), out),
            EndCode::Cancelled => return Err("a chunk cancelled that nobody cancelled"),
        }
        Ok(())
    }

    /// A copy that was started for this connection has ended.
    pub(crate) fn copied(
        &mut self,
        number: u64,
        interval: (u64, u64),
        result: Result<(), DeviceError>,
        out: &mut Vec<u8>,
    ) {
        self.copying -= 1;
        let ending = self.ending.get_mut(&number).map(|(op, _)| op);
        let Some(op) = ending.or_else(|| self.ops.get_mut(&number)) else { return };
        op.copying -= 1;
        match result {
            Ok(()) => op.arrived.push(interval),
            // An operation that is ending anyhow keeps its first reason.
            Err(error) => self.finish(number, Err(error.into()), out),
        }
        match self.ending.remove(&number) {
            Some((op, result)) if op.copying == 0 => self.complete(op, result),
            Some(more) => drop(self.ending.insert(number, more)),
            None => self.finish_if_done(number, out),
        }
    }

    /// Copies under way into destinations.
    pub(crate) fn copying(&self) -> usize {
        self.copying
    }

    /// Ends shares of reads of which other connections took the rest.
    fn finish_shares(&mut self, out: &mut Vec<u8>) {
        if self.spread.is_empty() {
            return;
        }
        for number in std::mem::take(&mut self.spread) {
            self.finish_if_done(number, out);
            if self.ops.contains_key(&number) {
                self.spread.push(number);
            }
        }
    }

    fn finish_if_done(&mut self, number: u64, out: &mut Vec<u8>) {
        let done = |op: &Op| op.outstanding == 0 && op.copying == 0 && op.work.is_cut();
        if self.ops.get(&number).is_some_and(done) {
            self.finish(number, Ok(()), out);
        }
    }

    fn finish(&mut self, number: u64, result: Result<(), ReadError>, out: &mut Vec<u8>) {
        let Some(mut op) = self.ops.remove(&number) else { return };
        op.slot = None;
        self.by_id.remove(&op.id);
        if op.outstanding > 0 {
            self.detach(number);
            out.extend_from_slice(&Header::Cancel { op: number }.encode());
        }
        if op.copying > 0 {
            self.ending.insert(number, (op, result));
        } else {
            self.complete(op, result);
        }
    }

    fn complete(&self, op: Op, result: Result<(), ReadError>) {
        self.shared.complete_share(op.id, op.serial, result, op.arrived);
    }

    fn detach(&mut self, number: u64) {
        for chunk in self.chunks.values_mut() {
            if chunk.destination.as_ref().is_some_and(|destination| destination.op == number) {
                chunk.destination = None;
            }
        }
    }

    /// The connection is gone: its share of each operation without copies under way, which ends now. The others end with
    /// `error` after their last copy.
    pub(crate) fn leave(&mut self, error: &ReadError) -> Vec<Share> {
        let posted = self.close();
        let (copying, ops): (HashMap<_, _>, HashMap<_, _>) =
            self.ops.drain().partition(|(_, op)| op.copying > 0);
        self.ending.extend(copying.into_iter().map(|(number, mut op)| {
            op.slot = None;
            (number, (op, Err(error.clone())))
        }));
        ops.into_values().map(Op::share).chain(posted).collect()
    }

    /// Returns its share of what callers have asked for, and nobody has looked at.
    fn close(&mut self) -> impl Iterator<Item = Share> + use<> {
        let posted = self.shortcut.close();
        self.chunks.clear();
        let left = std::mem::take(&mut self.bytes_out);
        self.shared.in_flight.fetch_sub(left, Ordering::Relaxed);
        self.early.clear();
        self.ring.clear();
        self.parked.clear();
        self.by_id.clear();
        posted.into_iter().map(|posted| Share::none(&posted.read))
    }

    /// The connection is gone: its share of each operation, which ends now.
    pub(crate) fn abandon(&mut self) -> Vec<Share> {
        let posted = self.close();
        let ending = self.ending.drain().map(|(_, (op, _))| op);
        let ops = self.ops.drain().map(|(_, op)| op);
        ops.chain(ending).map(Op::share).chain(posted).collect()
    }
}
