//! What peers say, and what is answered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::Endpoint;
use super::conn::{Conn, Link, LinkPhase, Phase};
use super::engine::{Engine, SENDS_MAX};
use super::frame::{Body, Frame, Refusal, Wanted};
use super::shared::after;
use super::status;
use super::worker::ReplyTo;
use crate::contract::{Address, MESSAGE_MAX_BYTES, PeerId};
use crate::error::LossReason;

/// Reads that one peer may have under way here. It asks for fewer.
const TICKETS_MAX: usize = 4096;
/// Frames that may come before the Welcome.
const EARLY_MAX: usize = 4096;
/// Bytes that such frames may have, beside the messages that were granted.
const EARLY_BYTES: u64 = 4 << 20;
/// Connections over one endpoint: two that connect to each other at once share one, and each may do so again.
const PEERS_PER_LINK_MAX: usize = 8;
/// Bytes that are sent at once to one who asked for them: what fits into one buffer of UCX's, with what goes around.
const ANSWER_BYTES: usize = 256 << 10;
/// How long an endpoint that was made in search of another is kept for a hello that may still come by it.
const SPARE: Duration = Duration::from_secs(1);
/// Regions of one read.
const REGIONS_OF_READ_MAX: usize = 1024;

impl Engine {
    pub(super) fn frame(&mut self, reply_to: Option<ReplyTo>, frame: Frame, now: Instant) {
        if let Body::Hello { .. } = frame.body {
            return self.hello(reply_to, frame.body, now);
        }
        // A token that nobody has is one of a connection that is over.
        let Some(peer) = self.tokens.get(&frame.token).copied() else { return };
        let Some(conn) = self.conns.get_mut(&peer) else { return };
        conn.heard = now;
        conn.pinged = false;
        if !matches!(conn.phase, Phase::Connecting { .. }) {
            return self.spoken(peer, frame.body, now);
        }
        match frame.body {
            // However fast it was: the limit is over.
            Body::Welcome { .. } if matches!(conn.phase, Phase::Connecting { deadline, .. } if deadline <= now) =>
            {
                self.leave(peer, LossReason::ConnectTimedOut, false, now);
            }
            Body::Welcome { token, window } if token != 0 => {
                conn.peer_token = token;
                conn.window = window;
                let early = std::mem::take(&mut conn.early);
                self.opened(peer, now);
                self.shared.connected(peer);
                for frame in early {
                    self.spoken(peer, frame.body, now);
                }
                self.open_reads(peer);
            }
            Body::Refuse(why) => {
                let reason = match why {
                    Refusal::OtherLife => LossReason::Stranger("another life of the peer is there"),
                    Refusal::Full => LossReason::ClosedByPeer,
                };
                self.leave(peer, reason, false, now);
            }
            body if conn.early.len() < EARLY_MAX
                && conn.early_bytes + body.size() <= self.shared.config.incoming_bytes + EARLY_BYTES =>
            {
                conn.early_bytes += body.size();
                conn.early.push(Frame { token: frame.token, body });
            }
            _ => self.leave(peer, LossReason::Protocol("no welcome"), false, now),
        }
    }

    fn hello(&mut self, reply_to: Option<ReplyTo>, body: Body, now: Instant) {
        let Body::Hello { expected, token, window, address } = body else { return };
        let endpoint = Address::from_bytes(address).and_then(|address| Endpoint::decode(&address));
        let (Ok(endpoint), Some(reply_to)) = (endpoint, reply_to) else {
            tracing::debug!("a hello without a good address was ignored");
            return;
        };
        let mut made = vec![];
        let paired = self.worker.pair(&endpoint.worker, reply_to, &mut made);
        let by = after(now, SPARE);
        for ep in made {
            // One that belongs to a hello on its way is taken when that comes.
            self.links.insert(ep, Link { phase: LinkPhase::Spare { by }, ..Link::new(None) });
        }
        self.alarm = self.alarm.min(by);
        let ep = match paired {
            Ok(ep) => ep,
            Err(status) => {
                tracing::warn!(status, "one who connected cannot be answered");
                return;
            }
        };
        if let Some(link) = self.links.get_mut(&ep)
            && matches!(link.phase, LinkPhase::Spare { .. })
        {
            link.phase = LinkPhase::Open;
        }
        let crowded = self.links.get(&ep).is_some_and(|link| link.peers.len() >= PEERS_PER_LINK_MAX);
        let refusal = match expected == self.shared.life {
            false => Some(Refusal::OtherLife),
            true if crowded => Some(Refusal::Full),
            true => None,
        };
        let own_token = match (refusal, getrandom::u64()) {
            (None, Ok(token)) => Ok(token),
            (None, Err(_)) => Err(Refusal::Full),
            (Some(why), _) => Err(why),
        };
        let accepted =
            own_token.and_then(|own| Ok((own, self.shared.accepted().map_err(|_| Refusal::Full)?)));
        let (own_token, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(why) => {
                self.post_frame(ep, Frame { token, body: Body::Refuse(why) }.encode(), false, None);
                return self.drain_link(ep, now);
            }
        };
        let mut conn = Conn::new(ep, endpoint.life, own_token, Phase::Open, now);
        (conn.peer_token, conn.window) = (token, window);
        self.conns.insert(peer, conn);
        self.tokens.insert(own_token, peer);
        if let Some(link) = self.links.get_mut(&ep) {
            link.phase = LinkPhase::Open;
            link.peers.push(peer);
        }
        let window = self.window();
        self.say(peer, Body::Welcome { token: own_token, window });
        self.opened(peer, now);
    }

    /// Something said on a connection that stands.
    fn spoken(&mut self, peer: PeerId, body: Body, now: Instant) {
        match body {
            Body::Message(bytes) => self.message(peer, bytes, now),
            Body::Credit(taken) => {
                if let Some(conn) = self.conns.get_mut(&peer) {
                    conn.used.messages = conn.used.messages.saturating_sub(taken.messages);
                    conn.used.bytes = conn.used.bytes.saturating_sub(taken.bytes);
                }
            }
            Body::Ping => self.say(peer, Body::Pong),
            Body::Pong => {}
            Body::Bye => self.leave(peer, LossReason::ClosedByPeer, false, now),
            Body::Open { ticket, regions } => self.open(peer, ticket, &regions, now),
            Body::Done { ticket } => {
                let pins = self.conns.get_mut(&peer).and_then(|conn| conn.pins.remove(&ticket));
                let held = pins.is_some_and(|pins| {
                    pins.iter().all(|(region, nonce, _)| self.shared.source(*region, *nonce).is_some())
                });
                self.say(peer, Body::Held { ticket, held });
            }
            Body::Fetch(wanted) => self.send_wanted(peer, wanted, now),
            Body::Opened { ticket, known } => self.op_opened(peer, ticket, known, now),
            Body::Held { ticket, held } => self.op_held(peer, ticket, held),
            Body::Hello { .. } | Body::Welcome { .. } | Body::Refuse(_) | Body::Bytes { .. } => {
                let reason = LossReason::Protocol("what has no place in a connection");
                self.leave(peer, reason, false, now);
            }
        }
    }

    fn message(&mut self, peer: PeerId, bytes: Vec<u8>, now: Instant) {
        let granted = self.window();
        let Some(conn) = self.conns.get_mut(&peer) else { return };
        let len = bytes.len() as u64;
        let fits = conn.untaken.messages == 0 || conn.untaken.bytes + len <= granted.bytes;
        if conn.untaken.messages >= granted.messages || !fits || bytes.len() > MESSAGE_MAX_BYTES {
            let reason = LossReason::Protocol("more messages than were asked for");
            return self.leave(peer, reason, false, now);
        }
        conn.untaken.messages += 1;
        conn.untaken.bytes += len;
        self.shared.deliver(peer, bytes);
    }

    /// A peer wants bytes of a region that it has opened. Each post keeps the memory until UCX is done with it.
    fn send_wanted(&mut self, peer: PeerId, wanted: Wanted, now: Instant) {
        let Wanted { fetch, ticket, region, nonce, offset, len } = wanted;
        let Some(conn) = self.conns.get(&peer) else { return };
        let (ep, token) = (conn.ep, conn.peer_token);
        let source = conn
            .pins
            .get(&ticket)
            .and_then(|pins| pins.iter().find(|(own, own_nonce, _)| (*own, *own_nonce) == (region, nonce)));
        let Some((_, _, source)) = source.filter(|(.., source)| source.memory.contains(offset, len)) else {
            return self.leave(peer, LossReason::Protocol("bytes that were not opened"), false, now);
        };
        let source = Arc::clone(source);
        for at in (0..len).step_by(ANSWER_BYTES) {
            // Whoever asks and never takes the answers must not pile them up here.
            if self.links.get(&ep).is_none_or(|link| link.sends >= SENDS_MAX) {
                return self.fail_link(ep, status::OVERRUN, now);
            }
            let frame = Frame { token, body: Body::Bytes { fetch, at } }.encode();
            let len = (len - at).min(ANSWER_BYTES as u64);
            let sent = self.worker.send_bytes(ep, frame, &source, offset + at, len);
            self.posted(ep, sent, None);
        }
    }

    /// A peer is about to read: from now on the memory stays, whatever happens to its registration.
    fn open(&mut self, peer: PeerId, ticket: u64, regions: &[(u64, u64)], now: Instant) {
        // The same region may serve many parts of a read; it is kept once.
        let mut regions = regions.to_vec();
        regions.sort_unstable();
        regions.dedup();
        if regions.len() > REGIONS_OF_READ_MAX {
            return self.leave(peer, LossReason::Protocol("a read of too many regions"), false, now);
        }
        let pins: Option<Vec<_>> = regions
            .iter()
            .map(|(region, nonce)| Some((*region, *nonce, self.shared.source(*region, *nonce)?)))
            .collect();
        let Some(conn) = self.conns.get_mut(&peer) else { return };
        if conn.pins.len() >= TICKETS_MAX || conn.pins.contains_key(&ticket) {
            return self.leave(peer, LossReason::Protocol("too many reads at once"), false, now);
        }
        let known = pins.is_some();
        if let Some(pins) = pins {
            conn.pins.insert(ticket, pins);
        }
        self.say(peer, Body::Opened { ticket, known });
    }
}
