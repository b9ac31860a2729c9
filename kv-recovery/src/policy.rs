//! The policies by name, and the decision about a single request without any state.

use kv_proto::{BlockList, LoadFailure};
use thiserror::Error;

/// What a deployer wants to happen after a failed load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Policy {
    /// The consumer computes what is missing.
    Recompute,
    /// The request ends with an error.
    Fail,
    /// The load is tried again, then the consumer computes what is missing.
    Retry,
}

/// A name that is none of the policies.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("policy is {name:?}; recompute, fail and retry are known")]
pub struct UnknownPolicy {
    /// What was given.
    pub name: String,
}

impl Policy {
    /// The policy's word in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::Fail => "fail",
            Self::Retry => "retry",
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        [Self::Recompute, Self::Fail, Self::Retry]
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}

/// A load that failed, as the scheduler half tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedLoad {
    /// Why.
    pub reason: LoadFailure,
    /// Blocks that may hold wrong bytes, by group.
    pub invalid: Vec<BlockList>,
    /// Tokens from the start of the prompt that the failure does not touch.
    pub valid_tokens: u32,
}

/// What is to become of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision {
    /// It goes on from here: everything after these tokens is computed.
    ResumeFrom {
        /// Tokens from the start of the prompt that are kept.
        tokens: u32,
    },
    /// It ends with an error.
    End,
}

/// Decides what becomes of one request whose load failed, when no further attempt is to be made.
pub fn decide(policy: Policy, failed: &FailedLoad) -> Decision {
    match policy {
        // Without an attempt left, a retry ends as a recomputation.
        Policy::Recompute | Policy::Retry => Decision::ResumeFrom { tokens: failed.valid_tokens },
        Policy::Fail => Decision::End,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> FailedLoad {
        FailedLoad { reason: LoadFailure::Lapsed, invalid: vec![BlockList::default()], valid_tokens: 32 }
    }

    #[test]
    fn each_policy_is_known_by_its_name_and_others_are_named() {
        for policy in [Policy::Recompute, Policy::Fail, Policy::Retry] {
            assert_eq!(policy.name().parse(), Ok(policy));
        }
        let unknown = "give-up".parse::<Policy>().unwrap_err();
        assert_eq!(unknown.to_string(), "policy is \"give-up\"; recompute, fail and retry are known");
    }

    #[test]
    fn recomputation_keeps_what_the_failure_did_not_touch() {
        assert_eq!(decide(Policy::Recompute, &failed()), Decision::ResumeFrom { tokens: 32 });
        assert_eq!(decide(Policy::Retry, &failed()), Decision::ResumeFrom { tokens: 32 });
        assert_eq!(decide(Policy::Fail, &failed()), Decision::End);
    }
}
