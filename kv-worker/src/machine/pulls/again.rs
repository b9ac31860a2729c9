//! Failures that may pass: the pull waits, and reads what is not here yet.

use kv_proto::{LoadFailure, LoadId, Moment};

use super::{Pulls, State};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure};

impl Pulls {
    /// Ends a pull that waits for its peer, or lets it wait on, if the failure may pass.
    pub(super) fn fail_or_wait(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        load: LoadId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&load) else { return };
        let State::Waiting { outage_counted, .. } = &mut pull.state else { return };
        // The peer is tried again by itself, since this pull wants it; its limit goes on.
        if may_pass(failure.reason) && std::mem::take(outage_counted) {
            return;
        }
        if may_pass(failure.reason) && pull.retries < config.limits.retries {
            pull.retries += 1;
            self.stats.retried += 1;
            return;
        }
        self.fail(now, config, load, failure, out);
    }

    /// Ends a pull whose read has failed, or begins it again, after a while, with what is not here yet.
    pub(super) fn fail_or_read_again(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        load: LoadId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&load) else { return };
        let State::Reading { left, until: was, .. } = &pull.state else { return };
        if pull.retries >= config.limits.retries || !may_pass(failure.reason) {
            return self.fail(now, config, load, failure, out);
        }
        let (was, groups) = (*was, left.clone().into_groups());
        let wait = config.limits.retry_min.saturating_mul(1 << pull.retries.min(20));
        pull.retries += 1;
        self.stats.retried += 1;
        let not_before = now + wait.min(config.limits.retry_max);
        let until = not_before + config.limits.peer_wait;
        pull.state = State::Waiting { groups, until, not_before, outage_counted: true };
        self.timers.clear(was, load);
        self.set(load, until);
        self.set(load, not_before);
    }
}

/// Whether trying again can help: what broke may be whole again, or another connection may do.
fn may_pass(reason: LoadFailure) -> bool {
    match reason {
        LoadFailure::HandshakeUnreachable
        | LoadFailure::ConnectFailed
        | LoadFailure::PeerLost
        | LoadFailure::ReadRefused
        | LoadFailure::ReadTimedOut
        | LoadFailure::ReadFailed => true,
        // Another life, another engine, other blocks, no lease, or nobody who wants it.
        _ => false,
    }
}
