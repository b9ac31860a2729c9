//! Limits of the retry machine.

use std::time::Duration;

use thiserror::Error;

use crate::Policy;

/// What follows when no further attempt is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// The consumer computes what is missing.
    Recompute,
    /// The request ends with an error.
    Fail,
}

/// Policy and limits. All of it is plain data; [`RecoveryConfig::default`] retries with care.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveryConfig {
    /// What a failed load leads to.
    pub policy: Policy,
    /// What a policy of `retry` ends with.
    pub fallback: Fallback,
    /// Further attempts that one request gets, over all producers.
    pub retries_per_request: u32,
    /// Wait before the first further attempt at the same producer; each doubles it.
    pub backoff_first: Duration,
    /// Longest wait before an attempt.
    pub backoff_max: Duration,
    /// How long an attempt's end may take to be told. Longer than every limit on a load, since after it the
    /// request's earlier attempts are forgotten.
    pub attempt_limit: Duration,
    /// Further attempts of all requests together that may come at once.
    pub budget: u32,
    /// Time after which one more of them may be made.
    pub budget_refill: Duration,
    /// Further attempts at one peer that may come at once.
    pub peer_budget: u32,
    /// Time after which one more of them may be made.
    pub peer_budget_refill: Duration,
    /// Failures in a row, by the peer's fault, that open its breaker.
    pub open_after: u32,
    /// Whether one failure is enough if the peer is gone or cannot be reached.
    pub open_when_gone: bool,
    /// How long a breaker stays open at first; each probe that fails doubles it.
    pub open_first: Duration,
    /// Longest time that a breaker stays open.
    pub open_max: Duration,
    /// How long a probe's end may take to be told; then another may be made.
    pub probe_limit: Duration,
    /// A peer of which nothing was heard for so long is forgotten, its budget and breaker with it.
    pub forget_after: Duration,
    /// Peers that are remembered.
    pub peers_max: u32,
}

impl Default for RecoveryConfig {
    fn default() -> Self {
        Self {
            policy: Policy::Retry,
            fallback: Fallback::Recompute,
            retries_per_request: 2,
            backoff_first: Duration::from_millis(50),
            backoff_max: Duration::from_secs(2),
            attempt_limit: Duration::from_secs(300),
            budget: 32,
            budget_refill: Duration::from_millis(100),
            peer_budget: 8,
            peer_budget_refill: Duration::from_millis(500),
            open_after: 3,
            open_when_gone: true,
            open_first: Duration::from_secs(1),
            open_max: Duration::from_secs(60),
            probe_limit: Duration::from_secs(60),
            forget_after: Duration::from_secs(600),
            peers_max: 1024,
        }
    }
}

/// Why a configuration cannot be. The deployer has to act.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A time is too short to be meant.
    #[error("{field} is {value:?}, at least {least:?} is needed")]
    TooShort {
        /// The field.
        field: &'static str,
        /// Its value.
        value: Duration,
        /// The least that makes sense.
        least: Duration,
    },
    /// A number that must not be zero is.
    #[error("{field} is {value}, at least {least} is needed")]
    TooSmall {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// The least that makes sense.
        least: u32,
    },
    /// Two times in the wrong order.
    #[error("{field} of {value:?} is longer than {other} of {other_value:?}")]
    Order {
        /// The one that must not be longer.
        field: &'static str,
        /// Its value.
        value: Duration,
        /// The one that must not be shorter.
        other: &'static str,
        /// Its value.
        other_value: Duration,
    },
}

impl RecoveryConfig {
    /// Checks ranges and orders. No retries per request, or no budget, is a valid wish: then there are none.
    pub fn check(&self) -> Result<(), ConfigError> {
        for (field, value) in [("open_after", self.open_after), ("peers_max", self.peers_max)] {
            if value == 0 {
                return Err(ConfigError::TooSmall { field, value, least: 1 });
            }
        }
        let least = Duration::from_millis(1);
        let first = ("backoff_first", self.backoff_first);
        let limit = ("attempt_limit", self.attempt_limit);
        let open_first = ("open_first", self.open_first);
        let probe = ("probe_limit", self.probe_limit);
        let refills =
            [("budget_refill", self.budget_refill), ("peer_budget_refill", self.peer_budget_refill)];
        for (field, value) in [first, limit, open_first, probe].into_iter().chain(refills) {
            if value < least {
                return Err(ConfigError::TooShort { field, value, least });
            }
        }
        // A peer that is forgotten comes back with a full budget and a closed breaker; that must bring nothing that
        // it would not have had by then.
        let filled = self.peer_budget_refill.saturating_mul(self.peer_budget);
        let forget = ("forget_after", self.forget_after);
        let orders = [
            (first, ("backoff_max", self.backoff_max)),
            (open_first, ("open_max", self.open_max)),
            (("open_max", self.open_max), forget),
            (probe, forget),
            (("peer_budget times peer_budget_refill", filled), forget),
        ];
        for ((field, value), (other, other_value)) in orders {
            if value > other_value {
                return Err(ConfigError::Order { field, value, other, other_value });
            }
        }
        Ok(())
    }
}
