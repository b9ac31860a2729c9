//! Failures that may pass: the pull waits, and reads what is not here yet.

use kv_proto::Moment;

use super::{Pulls, State};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, Failure, PullId};
use crate::machine::peers::Standing;

impl Pulls {
    /// Ends a pull that waits for its peer, or lets it wait on, if the failure may pass.
    pub(super) fn fail_or_wait(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        id: PullId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let State::Waiting { outage_counted, .. } = &mut pull.state else { return };
        // The peer is tried again by itself, since this pull wants it; its limit goes on.
        if failure.reason.may_pass() && std::mem::take(outage_counted) {
            return;
        }
        if failure.reason.may_pass() && pull.retries < config.limits.retries {
            pull.retries += 1;
            self.stats.retried += 1;
            return;
        }
        self.fail(now, config, id, failure, out);
    }

    /// Ends a pull whose read has failed, or begins it again, after a while, with what is not here yet.
    pub(super) fn fail_or_read_again(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        id: PullId,
        failure: Failure,
        out: &mut Vec<Decision>,
    ) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let State::Reading { link, left, until: was, .. } = &pull.state else { return };
        if pull.retries >= config.limits.retries || !failure.reason.may_pass() {
            return self.fail(now, config, id, failure, out);
        }
        // What becomes of a connection that has taken its place meanwhile is no news of this failure.
        let outage_counted =
            !matches!(self.peers.standing(&pull.key), Standing::Ready(now, _) if now != *link);
        let (was, groups) = (*was, left.clone().into_groups());
        let wait = config.limits.retry_min.saturating_mul(1 << pull.retries.min(20));
        pull.retries += 1;
        self.stats.retried += 1;
        let not_before = now + wait.min(config.limits.retry_max);
        let until = not_before + config.limits.peer_wait;
        pull.state = State::Waiting { groups, until, not_before, outage_counted };
        self.timers.clear(was, id);
        self.set(id, until);
        self.set(id, not_before);
    }
}
