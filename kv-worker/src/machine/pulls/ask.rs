//! Did the lease hold? What the producer is asked, and what it says.

use kv_proto::message::WorkerMessage;
use kv_proto::{Attempt, LeaseId, LoadFailure, LoadId, Moment, PullEnd};

use super::{Pulls, State, micros, not_held};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, PullId, SourceKey};
use crate::machine::peers::{End, Standing};

impl Pulls {
    /// Asks whether the lease held for what is here. The answer is no condition for going on.
    pub(super) fn check(&self, id: PullId, out: &mut Vec<Decision>) {
        let Some(pull) = self.pulls.get(&id) else { return };
        if let Standing::Ready(link, _) = self.peers.standing(&pull.key) {
            let (lease, offer) = pull.name;
            let message = WorkerMessage::Check { lease, attempt: Attempt(id.load.0), offer, blocks: pull.read };
            out.push(Decision::Send { link, message });
        }
    }

    #[allow(clippy::too_many_arguments)] // The answer's own parts, with time, configuration and output.
    pub(super) fn checked(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        lease: LeaseId,
        attempt: Attempt,
        (blocks, held): (u32, bool),
        out: &mut Vec<Decision>,
    ) {
        let id = PullId { load: LoadId(attempt.0), source: key.source };
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if pull.name.0 != lease || pull.key != *key {
            return;
        }
        if held {
            // What a producer says of blocks that are not here says nothing.
            pull.verified = pull.verified.max(blocks.min(pull.read));
        } else if !matches!(pull.state, State::Confirming { .. }) {
            // While it is being confirmed, that answer is the one that counts.
            self.spoil(now, config, id, not_held(), out);
        }
    }

    /// Asks whether the lease held; if the peer is not ready, it is asked when it is.
    pub(super) fn ask(&self, id: PullId, out: &mut Vec<Decision>) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let State::Confirming { more, .. } = pull.state else { return };
        if let Standing::Ready(link, _) = self.peers.standing(&pull.key) {
            let (lease, offer) = pull.name;
            let message = WorkerMessage::ReadDone { lease, attempt: Attempt(id.load.0), offer, more };
            out.push(Decision::Send { link, message });
        }
    }

    #[allow(clippy::too_many_arguments)] // The answer's own parts, with time, configuration and output.
    pub(super) fn answered(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        key: &SourceKey,
        lease: LeaseId,
        attempt: Attempt,
        confirmed: bool,
        out: &mut Vec<Decision>,
    ) {
        let id = PullId { load: LoadId(attempt.0), source: key.source };
        let Some(pull) = self.pulls.get(&id) else { return };
        let State::Confirming { read_at, more, .. } = pull.state else { return };
        if pull.name.0 != lease || pull.key != *key {
            return;
        }
        if confirmed {
            let mut stats = pull.stats;
            stats.confirm_us = micros(now.since(read_at));
            self.end(now, config, id, End::Confirmed { more }, out);
            self.part_ended(now, config, id, PullEnd::Loaded(stats), out);
        } else {
            let detail = format!("{lease} of engine {} did not hold until the read had ended", key.peer.engine);
            self.fail(now, config, id, Failure::new(LoadFailure::Lapsed, detail), out);
        }
    }
}
