//! The transport of a simulated world: reads that copy cell by cell while time passes.

use kv_proto::LoadFailure;
use kv_transport::{ReadPart, ReadRange};
use kv_worker::Failure;
use kv_worker::machine::io::{Fact, LinkId, PullId};

use super::canary::Canary;
use super::faults::FaultKind;
use super::invariants::Invariant;
use super::shape::{BLOCK_TOKENS, CELL_BYTES};
use super::worker::READ_TOTAL;
use super::world::{Event, MS, Time, WorkerAt, World};

/// What a cell's value is mixed with if other bytes than the source's arrive.
const WRONG: u64 = 0xbad << 48;

/// Most cells that are copied at once: a block's of one head.
const PIECE_CELLS: usize = BLOCK_TOKENS as usize;

/// Some cells that lie one after the other on both sides.
#[derive(Debug, Clone, Copy)]
struct Piece {
    source: usize,
    destination: usize,
    cells: usize,
}

/// A read in progress.
#[derive(Debug, Clone)]
pub(super) struct Read {
    to: WorkerAt,
    from: WorkerAt,
    pull: PullId,
    link: u64,
    /// What the reader calls it.
    over: LinkId,
    /// What is still to be copied, the next piece last.
    todo: Vec<Piece>,
    pace: Time,
    /// How it will end, if not well.
    doom: Option<Failure>,
    /// What it brings is not what the source holds.
    wrong: bool,
    /// A destination cell that gets another value than the source's, which nobody says.
    spoils: Option<usize>,
    /// If it ends early, writes go on for a while.
    quiet_late: bool,
    /// The transport was asked to end it.
    cancelled: bool,
    /// Its end was told; only a broken transport goes on.
    told: bool,
}

impl World {
    pub(super) fn begin_read(&mut self, at: WorkerAt, pull: PullId, link: LinkId, parts: &[ReadPart]) {
        let Some(id) = self.link_of(at, link) else {
            let lost = Failure::new(LoadFailure::PeerLost, "the connection is gone");
            return self.give(at, Fact::ReadEnded { pull, link, result: Err(lost) });
        };
        let Some(mut from) = self.links.get(&id).map(|link| link.producer) else { return };
        let mut todo: Vec<Piece> = parts.iter().flat_map(|part| &part.ranges).flat_map(pieces).collect();
        if self.has(Canary::OffByOneHead) {
            self.next_head(from, &mut todo);
        }
        if self.has(Canary::StagesPairedByPlace) {
            self.pair_by_place(at, from, &mut todo);
        }
        if self.has(Canary::DealtToNextRank) {
            let topology = self.engines[from.engine].shape.topology();
            let place = from.rank % topology.context as usize;
            from.rank = from.rank - place + (place + 1) % topology.context as usize;
        }
        // The order of arrival is nobody's business.
        for i in (1..todo.len()).rev() {
            todo.swap(i, self.dice.below(i as u64 + 1) as usize);
        }
        let mut pace = self.dice.between(100, 2 * MS);
        let mut doom = None;
        if self.strikes(FaultKind::ReadSlow) {
            pace = self.dice.between(20, 900) * MS / (todo.len() as u64).max(1);
            self.tell(|| format!("the read of {} will be slow", pull.load));
        }
        let cells = todo.len() as u64;
        let (mut wrong, mut spoils) = (false, None);
        let mut ends_after = self.dice.between(1, 300) * MS;
        if self.strikes(FaultKind::ReadWrong) {
            doom = Some(Failure::new(LoadFailure::ReadFailed, "what arrived is not what was sent"));
            wrong = true;
            // It is noticed when all has arrived.
            ends_after = pace * (cells + 1);
        } else if self.strikes(FaultKind::ReadPartial) {
            doom = Some(Failure::new(LoadFailure::ReadFailed, "only a part arrived"));
            let missing = self.dice.between(1, cells.max(1));
            todo.truncate(cells.saturating_sub(missing) as usize);
            ends_after = pace * (todo.len() as u64 + 1);
        } else if self.strikes(FaultKind::ReadStalled) {
            doom = Some(Failure::new(LoadFailure::ReadTimedOut, "no byte arrived"));
            pace = READ_TOTAL / (todo.len() as u64 + 1) / 3;
            let kept = self.dice.below(todo.len() as u64) as usize;
            if self.has(Canary::LateWrite) {
                todo.rotate_left(kept);
            } else {
                todo.truncate(kept);
            }
        } else if self.strikes(FaultKind::ReadFailed) {
            doom = Some(Failure::new(LoadFailure::ReadFailed, "the fabric failed"));
            let kept = self.dice.below(cells) as usize;
            if !self.has(Canary::LateWrite) {
                todo.truncate(kept);
            }
        } else if self.strikes(FaultKind::ReadCorrupt) {
            spoils = todo.get(self.dice.below(cells) as usize).map(|piece| piece.destination);
            self.tell(|| format!("the read of {} will bring a wrong cell, and not say so", pull.load));
        }
        let read = self.fresh();
        self.tell(|| match &doom {
            Some(doom) => format!("worker {at} reads {from} for {}, but {doom}", pull.load),
            None => format!("worker {at} reads {cells} pieces of {from} for {}", pull.load),
        });
        let ends_badly = doom.is_some();
        let quiet_late = self.strikes(FaultKind::QuietLate);
        let of = Read {
            to: at,
            from,
            pull,
            link: id,
            over: link,
            todo,
            pace,
            doom,
            wrong,
            spoils,
            quiet_late,
            cancelled: false,
            told: false,
        };
        self.reads.insert(read, of);
        self.after(pace, Event::ReadPiece { read });
        self.client_of_load_goes(at.engine, pull.load, FaultKind::GoneLoading, "while it is read");
        if quiet_late {
            let wait = self.dice.below(pace * cells);
            match self.waits_for(at.engine, pull.load).filter(|_| self.dice.chance(500)) {
                Some(id) => self.client_goes(at.engine, &id, wait, "while it is read"),
                None => self.after(wait, Event::LinkGone { link: id }),
            }
        }
        if self.strikes(FaultKind::LinkBroken) {
            let wait = self.dice.below(pace * cells + 1);
            self.after(wait, Event::LinkGone { link: id });
        }
        if ends_badly {
            self.after(ends_after, Event::ReadEnd { read });
        } else {
            // The transport's own limit.
            self.after(READ_TOTAL, Event::ReadEnd { read });
        }
    }

    /// The canary: each head is read where the next one is.
    fn next_head(&self, from: WorkerAt, todo: &mut [Piece]) {
        let engine = &self.engines[from.engine];
        let (shape, blocks) = (engine.shape, engine.pool.size);
        let (layer, slot) = (shape.layers_of(from.rank).start, shape.slots_of(from.rank).start);
        let cell = |head| shape.cell(blocks, from.rank, layer, 0, head, slot);
        let (Some(start), Some(next)) = (cell(0), cell(1)) else { return };
        let all = shape.cells(from.rank, blocks);
        for piece in todo {
            piece.source = (piece.source + next - start).min(all - piece.cells);
        }
    }

    /// The canary: the layers of a stage are taken for those at the same places of the reader's own stage.
    fn pair_by_place(&self, at: WorkerAt, from: WorkerAt, todo: &mut [Piece]) {
        let layer_cells = |of: WorkerAt| {
            let engine = &self.engines[of.engine];
            engine.shape.layer_cells(engine.pool.size)
        };
        let (ours, theirs) = (layer_cells(at), layer_cells(from));
        let layers = self.engines[at.engine].shape.layers_of(at.rank).len();
        for piece in todo {
            let place = piece.source / theirs;
            if place < layers {
                piece.destination = place * ours + piece.destination % ours;
            }
        }
    }

    pub(super) fn read_piece(&mut self, id: u64) {
        let clogged = self.reads.get(&id).and_then(|read| self.links.get(&read.link)?.clogged(self.now));
        let Some(mut read) = self.reads.remove(&id) else { return };
        if let Some(until) = clogged {
            // What was stopped comes all at once.
            read.pace = 1;
            self.reads.insert(id, read);
            return self.at(until, Event::ReadPiece { read: id });
        }
        let Some(piece) = read.todo.pop() else {
            self.reads.insert(id, read);
            return;
        };
        for cell in 0..piece.cells {
            let (source, destination) = (piece.source + cell, piece.destination + cell);
            let Some(value) = self.source_cell(read.from, source) else {
                // The owner is gone, and this transport notices.
                if read.doom.is_none() {
                    read.doom = Some(Failure::new(LoadFailure::PeerLost, "the peer is gone"));
                }
                read.todo.clear();
                break;
            };
            let wrong = read.wrong || read.spoils == Some(destination);
            self.write_cell(&read, destination, if wrong { WRONG ^ value } else { value });
        }
        let done = read.todo.is_empty();
        if done && read.told {
            return;
        }
        let pace = read.pace;
        let doomed = read.doom.is_some();
        self.reads.insert(id, read);
        if !done {
            self.after(pace, Event::ReadPiece { read: id });
        } else if !doomed {
            self.read_end(id);
        }
    }

    fn source_cell(&mut self, from: WorkerAt, cell: usize) -> Option<u64> {
        if let Some(worker) = self.worker(from) {
            return worker.memory.get(cell).copied();
        }
        // Memory that is mapped outlives its owner, and a read of it succeeds.
        let mapped = self.reads_outlive_owner;
        self.graveyard.get(&from).filter(|_| mapped).and_then(|memory| memory.get(cell).copied())
    }

    fn write_cell(&mut self, read: &Read, cell: usize, value: u64) {
        let engine = &mut self.engines[read.to.engine];
        if !engine.alive || engine.life != read.to.life {
            return;
        }
        let block = engine.shape.block_of(engine.pool.size, cell);
        let tag = engine.pool.tags[block];
        if let Some(worker) = engine.workers.get_mut(read.to.rank) {
            worker.memory[cell] = value;
        }
        if tag != Some(read.pull.load) {
            let what = format!(
                "the read of {} writes block {} of D {}, which belongs to {tag:?} now",
                read.pull.load, block, read.to.engine
            );
            self.violate(Invariant::Quiet, what);
        }
    }

    pub(super) fn read_end(&mut self, id: u64) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        if read.told {
            return;
        }
        read.told = true;
        let (to, pull, over, whole) = (read.to, read.pull, read.over, read.todo.is_empty());
        let partial_is_whole = self.canary == Some(Canary::PartialTakenAsWhole);
        let wrong_is_right = self.canary == Some(Canary::WrongBytesTaken);
        let result = match read.doom.clone() {
            Some(_) if read.wrong && wrong_is_right => Ok(()),
            Some(_) if partial_is_whole && !read.wrong => Ok(()),
            Some(failure) => Err(failure),
            None if whole => Ok(()),
            None => Err(Failure::new(LoadFailure::ReadTimedOut, "not finished within the limit")),
        };
        // A transport that keeps its word writes nothing from here on.
        if self.canary != Some(Canary::LateWrite) || whole {
            self.reads.remove(&id);
        }
        if let Some(until) = self.stands_still(to) {
            self.reads.insert(
                id,
                Read {
                    to,
                    from: to,
                    pull,
                    link: 0,
                    over,
                    todo: Vec::new(),
                    pace: MS,
                    doom: result.err(),
                    wrong: false,
                    spoils: None,
                    quiet_late: false,
                    cancelled: false,
                    told: false,
                },
            );
            return self.at(until, Event::ReadEnd { read: id });
        }
        self.give(to, Fact::ReadEnded { pull, link: over, result });
    }

    pub(super) fn fail_reads_over(&mut self, link: u64) {
        let over = self.reads_where(|read| read.link == link);
        for id in over {
            if let Some(read) = self.reads.get_mut(&id) {
                read.doom.get_or_insert(Failure::new(LoadFailure::PeerLost, "connection lost"));
            }
            self.read_end(id);
        }
    }

    pub(super) fn cancel_read(&mut self, at: WorkerAt, pull: PullId) {
        for id in self.reads_where(|read| read.to == at && read.pull == pull && !read.cancelled) {
            // A cancel is a request: the completion takes a while, and the transport may write until then.
            let mut wait = self.dice.between(1, 60) * MS;
            let goes_on = self.reads.get(&id).is_some_and(|read| read.quiet_late);
            if goes_on {
                wait = self.dice.between(100, 1_500) * MS;
                self.tell(|| {
                    format!("the cancelled read of {} is quiet only after {} ms", pull.load, wait / MS)
                });
            }
            if let Some(read) = self.reads.get_mut(&id) {
                read.cancelled = true;
                read.doom.get_or_insert(Failure::new(LoadFailure::Cancelled, "cancelled"));
                if goes_on {
                    read.write_until(wait);
                }
            }
            self.after(wait, Event::ReadEnd { read: id });
        }
    }

    /// A connection is lost while the transport still has writes of its reads in flight. Returns how long these go
    /// on, if it is so.
    pub(super) fn writes_in_flight(&mut self, link: u64) -> Option<Time> {
        let reads = self.reads_where(|read| read.link == link);
        self.reads.values().find(|read| read.link == link && !read.told && read.quiet_late)?;
        let wait = self.dice.between(20, 600) * MS;
        self.tell(|| format!("the reads of the lost connection are quiet only after {} ms", wait / MS));
        for id in reads {
            let Some(read) = self.reads.get_mut(&id) else { continue };
            let lost = Failure::new(LoadFailure::PeerLost, "connection lost");
            read.doom.get_or_insert(lost.clone());
            read.write_until(wait);
            let (to, pull, over) = (read.to, read.pull, read.over);
            if self.has(Canary::PeerLossTakenAsQuiet) {
                self.give(to, Fact::ReadEnded { pull, link: over, result: Err(lost) });
            }
        }
        Some(wait)
    }

    /// Reads whose end was not told.
    fn reads_where(&self, which: impl Fn(&Read) -> bool) -> Vec<u64> {
        self.reads.iter().filter(|(_, read)| !read.told && which(read)).map(|(id, _)| *id).collect()
    }
}

impl Read {
    /// What is still to be copied is spread over a time.
    fn write_until(&mut self, wait: Time) {
        self.pace = (wait / (self.todo.len() as u64 + 1)).max(1);
    }
}

/// A range in pieces of a few cells.
fn pieces(range: &ReadRange) -> impl Iterator<Item = Piece> + use<> {
    let (source, destination) = (range.remote_offset / CELL_BYTES, range.local_offset / CELL_BYTES);
    let (source, destination) = (source as usize, destination as usize);
    let all = (range.len / CELL_BYTES) as usize;
    (0..all).step_by(PIECE_CELLS).map(move |at| Piece {
        source: source + at,
        destination: destination + at,
        cells: PIECE_CELLS.min(all - at),
    })
}
