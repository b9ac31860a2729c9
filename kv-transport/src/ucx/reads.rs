//! Reads: asked for in pieces, ended only when UCX has said the last word about every piece (rule T-3).

use std::rc::Rc;
use std::time::Instant;

use super::address::Key;
use super::conn::{Conn, Fetch, Op, Post, Stage};
use super::engine::Engine;
use super::frame::{Body, Wanted};
use super::shared::after;
use super::status;
use super::worker::{EpId, Rkey};
use crate::contract::PeerId;
use crate::error::{LossReason, ReadError};

/// Reads of one peer that have been opened at a time. More wait.
const OPENED_MAX: usize = 256;
/// Bytes that are copied in one turn when UCX copies within the call. Then others get their turn.
const TURN_BYTES: u64 = 8 << 20;

impl Engine {
    /// Asks the owner for the regions of reads that wait.
    pub(super) fn open_reads(&mut self, peer: PeerId) {
        while let Some(conn) = self.conns.get_mut(&peer)
            && conn.is_open()
            && conn.opened < OPENED_MAX
            && let Some(serial) = conn.waiting.pop_front()
        {
            let Some(op) = self.ops.get_mut(&serial) else { continue };
            if matches!(op.stage, Stage::Waiting) {
                op.stage = Stage::Opening;
                conn.opened += 1;
                let regions = op.plan.remote_regions();
                self.say(peer, Body::Open { ticket: serial, regions });
            }
        }
    }

    /// The owner has the regions, or not.
    pub(super) fn op_opened(&mut self, peer: PeerId, serial: u64, known: bool, now: Instant) {
        let conn = self.conns.get(&peer).map(|conn| (conn.ep, conn.by_message));
        let Some((ep, by_message)) = conn else { return };
        let Some(op) = self.ops.get_mut(&serial) else {
            // It ended while the owner was asked, who keeps the memory until it hears so.
            if known {
                self.say(peer, Body::Done { ticket: serial });
            }
            return;
        };
        if op.peer != peer || !matches!(op.stage, Stage::Opening) {
            return;
        }
        if !known {
            return self.finish_op(serial, Err(ReadError::UnknownKey));
        }
        let mut rkeys: Vec<Rc<Rkey>> = Vec::with_capacity(op.plan.parts.len());
        let by_gets = op.plan.parts.iter().enumerate().filter(|_| !by_message);
        for (index, part) in by_gets {
            let same = index
                .checked_sub(1)
                .filter(|before| op.plan.parts[*before].key == part.key)
                .and_then(|before| rkeys.get(before).cloned());
            match same.map_or_else(|| self.worker.unpack(ep, &part.key.rkey), Ok) {
                Ok(rkey) => rkeys.push(rkey),
                Err(status) => {
                    let error = ReadError::Fabric { code: i64::from(status) };
                    return self.end_op(serial, error, now);
                }
            }
        }
        op.rkeys = rkeys;
        op.stage = Stage::Reading;
        if let Some(conn) = self.conns.get_mut(&peer) {
            conn.ring.push_back(serial);
        }
    }

    /// The owner still has the regions, or not.
    pub(super) fn op_held(&mut self, peer: PeerId, serial: u64, held: bool) {
        let Some(op) = self.ops.get(&serial) else { return };
        if op.peer == peer && matches!(op.stage, Stage::Confirming) {
            let result = if held { Ok(()) } else { Err(ReadError::UnknownKey) };
            // The owner has forgotten the ticket already.
            self.forget_op(serial, result);
        }
    }

    /// Posts pieces as far as the windows allow. Says whether it did anything.
    pub(super) fn post_gets(&mut self, now: Instant) -> bool {
        let mut any = false;
        let ready = |conn: &Conn| conn.is_open() && !conn.ring.is_empty();
        let peers: Vec<_> =
            self.conns.iter().filter(|(_, conn)| ready(conn)).map(|(peer, _)| *peer).collect();
        for peer in peers {
            let mut turn = 0;
            while turn < TURN_BYTES
                && let Some((serial, bytes)) = self.post_get(peer, now)
            {
                any = true;
                turn += bytes;
                self.advance(serial, now);
            }
        }
        any
    }

    fn post_get(&mut self, peer: PeerId, now: Instant) -> Option<(u64, u64)> {
        let config = &self.shared.config;
        let conn = self.conns.get_mut(&peer).filter(|conn| conn.is_open())?;
        let room = conn.gets + conn.fetches < config.gets_in_flight_per_peer
            && conn.get_bytes + conn.fetch_bytes + config.get_max_bytes <= config.bytes_in_flight_per_peer;
        if !room {
            return None;
        }
        let serial = loop {
            let serial = conn.ring.pop_front()?;
            if self.ops.get(&serial).is_some_and(|op| matches!(op.stage, Stage::Reading)) {
                break serial;
            }
        };
        let op = self.ops.get_mut(&serial)?;
        let piece = op.plan.cut(&mut op.cursor, config.get_max_bytes)?;
        if !op.plan.is_cut(&op.cursor) {
            conn.ring.push_back(serial);
        }
        let part = op.plan.parts.get(piece.part)?;
        if conn.by_message {
            self.fetch_numbers += 1;
            let (fetch, len, offset) = (self.fetch_numbers, piece.len, piece.remote);
            op.fetches += 1;
            conn.fetches += 1;
            conn.fetch_bytes += len;
            self.fetches.insert(fetch, Fetch { serial, peer, len, left: len });
            self.worker.expect(fetch, conn.own_token, &part.local, piece.local, len);
            let Key { region, nonce, .. } = part.key;
            self.say(peer, Body::Fetch(Wanted { fetch, ticket: serial, region, nonce, offset, len }));
            return Some((serial, len));
        }
        let rkey = op.rkeys.get(piece.part)?;
        let remote = part.key.base + piece.remote;
        match self.worker.get(rkey, remote, &part.local, piece.local, piece.len) {
            Ok(None) => {
                op.last_byte = now;
                conn.last_get = now;
            }
            Ok(Some(post)) => {
                let (ep, bytes) = (conn.ep, piece.len);
                op.outstanding += 1;
                conn.gets += 1;
                conn.get_bytes += bytes;
                if let Some(link) = self.links.get_mut(&ep) {
                    link.gets += 1;
                }
                self.posts.insert(post, Post::Get { serial, peer, ep, bytes });
            }
            Err(code) => self.get_failed(serial, conn_ep(&self.conns, peer)?, code, now),
        }
        Some((serial, piece.len))
    }

    /// UCX has said the last word about a piece.
    pub(super) fn got(&mut self, serial: u64, peer: PeerId, ep: EpId, bytes: u64, code: i8, now: Instant) {
        if let Some(link) = self.links.get_mut(&ep) {
            link.gets -= 1;
        }
        if let Some(conn) = self.conns.get_mut(&peer) {
            conn.gets -= 1;
            conn.get_bytes -= bytes;
            if code == status::OK {
                conn.last_get = now;
            }
        }
        if let Some(op) = self.ops.get_mut(&serial) {
            op.outstanding -= 1;
            if code == status::OK {
                op.last_byte = now;
            }
        }
        if code != status::OK {
            self.get_failed(serial, ep, code, now);
        }
        self.advance(serial, now);
        self.try_lose(peer, now);
    }

    /// Bytes came that an owner was asked for, and are in place unless their read has ended.
    pub(super) fn landed(&mut self, token: u64, number: u64, bytes: u64, fits: bool, now: Instant) {
        let Some(peer) = self.tokens.get(&token).copied() else { return };
        let Some(conn) = self.conns.get_mut(&peer) else { return };
        conn.heard = now;
        conn.pinged = false;
        let Some(fetch) = self.fetches.get_mut(&number).filter(|fetch| fetch.peer == peer) else { return };
        if !fits || bytes == 0 || bytes > fetch.left {
            let reason = LossReason::Protocol("other bytes than were asked for");
            return self.leave(peer, reason, false, now);
        }
        fetch.left -= bytes;
        conn.last_get = now;
        let Fetch { serial, len, left, .. } = *fetch;
        if left == 0 {
            self.fetches.remove(&number);
            self.worker.forget(number);
            conn.fetches -= 1;
            conn.fetch_bytes -= len;
        }
        if let Some(op) = self.ops.get_mut(&serial) {
            op.last_byte = now;
            op.fetches -= usize::from(left == 0);
            self.advance(serial, now);
        }
    }

    fn get_failed(&mut self, serial: u64, ep: EpId, code: i8, now: Instant) {
        if status::is_of_endpoint(code) {
            // The read ends with its peer.
            self.fail_link(ep, code, now);
        } else {
            self.end_op(serial, ReadError::Fabric { code: i64::from(code) }, now);
        }
    }

    /// Ends a read that has not ended: at once, or when what it has asked for has ended.
    pub(super) fn end_op(&mut self, serial: u64, error: ReadError, now: Instant) {
        let by = after(now, self.shared.config.quiet_limit);
        let Some(op) = self.ops.get_mut(&serial) else { return };
        if matches!(op.stage, Stage::Ending { .. }) {
            return;
        }
        if op.outstanding == 0 {
            return self.finish_op(serial, Err(error));
        }
        op.stage = Stage::Ending { error, by };
        self.alarm = self.alarm.min(by);
    }

    fn advance(&mut self, serial: u64, now: Instant) {
        let Some(op) = self.ops.get_mut(&serial) else { return };
        if op.outstanding > 0 {
            return;
        }
        match &op.stage {
            Stage::Ending { error, .. } => {
                let error = error.clone();
                self.finish_op(serial, Err(error));
            }
            Stage::Reading if op.fetches == 0 && op.plan.is_cut(&op.cursor) => {
                op.stage = Stage::Confirming;
                op.last_byte = now;
                let peer = op.peer;
                self.say(peer, Body::Done { ticket: serial });
            }
            _ => {}
        }
    }

    /// Completes a read that has nothing under way, and tells the owner if it knows of it.
    fn finish_op(&mut self, serial: u64, result: Result<(), ReadError>) {
        let Some(op) = self.ops.get(&serial) else { return };
        let peer = op.peer;
        // One that is being opened is closed when the answer comes: the word must not pass the question on the way.
        if matches!(op.stage, Stage::Reading | Stage::Ending { .. })
            && self.conns.get(&peer).is_some_and(Conn::is_open)
        {
            self.say(peer, Body::Done { ticket: serial });
        }
        self.forget_op(serial, result);
    }

    fn forget_op(&mut self, serial: u64, result: Result<(), ReadError>) {
        let Some(op) = self.ops.remove(&serial) else { return };
        if op.fetches > 0 {
            // What still comes for it is counted, and thrown away.
            let of_op = self.fetches.iter().filter(|(_, fetch)| fetch.serial == serial);
            of_op.for_each(|(number, _)| self.worker.forget(*number));
        }
        if let Some(conn) = self.conns.get_mut(&op.peer)
            && !matches!(op.stage, Stage::Waiting)
        {
            conn.opened -= 1;
        }
        let (id, peer) = (op.id, op.peer);
        // The caller may take the memory back: nothing of ours may name it by then.
        drop(op);
        self.shared.complete(id, serial, result);
        self.open_reads(peer);
    }

    /// Ends the reads whose time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        let due: Vec<_> =
            self.ops.iter().filter(|(_, op)| op.alarm() <= now).map(|(serial, _)| *serial).collect();
        for serial in due {
            let Some(op) = self.ops.get(&serial) else { continue };
            let peer = op.peer;
            match op {
                Op { stage: Stage::Ending { .. }, .. } => {
                    if let Some(ep) = conn_ep(&self.conns, peer).filter(|ep| self.is_usable(*ep)) {
                        tracing::warn!(%peer, "reads do not end; the endpoint is closed by force");
                        self.force(ep, now);
                    }
                }
                Op { deadline, .. } if *deadline <= now => self.end_op(serial, ReadError::TimedOut, now),
                _ => self.end_op(serial, ReadError::Stalled, now),
            }
        }
    }
}

fn conn_ep(conns: &std::collections::BTreeMap<PeerId, Conn>, peer: PeerId) -> Option<EpId> {
    conns.get(&peer).map(|conn| conn.ep)
}
