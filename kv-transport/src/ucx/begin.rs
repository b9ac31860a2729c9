//! How connections begin.

use std::time::Instant;

use super::conn::{Again, Conn, Link, Phase};
use super::engine::Engine;
use super::frame::{Body, Frame, Window};
use super::lanes;
use super::shared::after;
use super::status;
use crate::contract::PeerId;
use crate::error::LossReason;

impl Engine {
    pub(super) fn connect(&mut self, peer: PeerId, again: Again, deadline: Instant, now: Instant) {
        let endpoint = &again.endpoint;
        if endpoint.home.is_over(&endpoint.life) {
            let reason = LossReason::Unreachable { kind: std::io::ErrorKind::ConnectionRefused, code: None };
            return self.shared.lose(peer, reason);
        }
        self.alarm = self.alarm.min(deadline);
        let (ep, token) = match (self.worker.create_ep(&endpoint.worker), getrandom::u64()) {
            (Ok(ep), Ok(token)) => (ep, token),
            (Ok(ep), Err(_)) => {
                self.links.insert(ep, Link::new(None));
                return self.shared.lose(peer, LossReason::Closed);
            }
            (Err(status), _) => return self.shared.lose(peer, status::unreachable(status)),
        };
        let (expected, window, address) = (endpoint.life, self.window(), self.own.clone());
        let conn = Conn::new(ep, endpoint.life, token, Phase::Connecting { deadline, again }, now);
        self.conns.insert(peer, conn);
        self.tokens.insert(token, peer);
        self.links.insert(ep, Link::new(Some(peer)));
        let hello = Frame { token: 0, body: Body::Hello { expected, token, window, address } };
        self.post_frame(ep, hello.encode(), true, None);
    }

    pub(super) fn window(&self) -> Window {
        Window { messages: self.shared.config.incoming_max, bytes: self.shared.config.incoming_bytes }
    }

    /// Both sides know each other.
    pub(super) fn opened(&mut self, peer: PeerId, now: Instant) {
        let Some(conn) = self.conns.get_mut(&peer) else { return };
        conn.phase = Phase::Open;
        conn.heard = now;
        let found = self.worker.info(conn.ep).map(|info| lanes::parse(&info)).unwrap_or_default();
        conn.by_message = lanes::are_emulated(&found);
        tracing::info!(%peer, lanes = ?found, "connected over UCX");
        self.shared.set_lanes(peer, found);
        self.alarm = self.alarm.min(after(now, self.shared.config.keep_alive));
    }

    /// UCX pairs endpoints of two workers by the order in which they were made, so one that is given up can take the one of
    /// a connection with it that has only begun. That gets another. Says whether it does.
    pub(super) fn connect_again(&mut self, peer: PeerId, now: Instant) -> bool {
        let Some(conn) = self.conns.get_mut(&peer) else { return false };
        match &conn.phase {
            Phase::Connecting { deadline, again } if again.tries > 1 && *deadline > now => {}
            _ => return false,
        }
        let Some(conn) = self.conns.remove(&peer) else { return false };
        self.tokens.remove(&conn.own_token);
        if let Some(link) = self.links.get_mut(&conn.ep) {
            link.peers.retain(|other| *other != peer);
        }
        let Phase::Connecting { deadline, again } = conn.phase else { return false };
        self.connect(peer, Again { tries: again.tries - 1, ..again }, deadline, now);
        // Reads that were asked for meanwhile wait for the new one.
        match self.conns.get_mut(&peer) {
            Some(fresh) => (fresh.queue, fresh.waiting) = (conn.queue, conn.waiting),
            None => self.ops.retain(|_, op| op.peer != peer),
        }
        true
    }
}
