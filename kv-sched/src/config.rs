//! Terms and limits of the scheduler half.

use std::time::Duration;

use kv_proto::{EngineId, GroupKind, Incarnation, LeaseTerms, Topology};
use thiserror::Error;

/// Everything the scheduler half needs to know. All of it is plain data.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SchedConfig {
    /// This engine's id.
    pub engine: EngineId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// How it is cut into ranks.
    pub topology: Topology,
    /// Host at which consumers reach this engine's handshake listener.
    pub host: String,
    /// Port of that listener.
    pub port: u16,
    /// Tokens in a block of the block table. Where tokens are dealt out over ranks, these are a block's tokens of all of
    /// them together.
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u32,
    /// What each block group is.
    pub groups: Vec<GroupKind>,
    /// Life of a lease without renewal. Short, since a consumer that lives renews.
    pub lease_ttl: Duration,
    /// What a renewal extends a lease to, counted from its arrival.
    pub lease_renewal: Duration,
    /// Longest life of a lease, however often it is renewed.
    pub lease_max: Duration,
    /// What is left of a lease's life when its consumer's last connection is lost, if that is less than what the
    /// last renewal left. Zero: nothing.
    pub lease_grace: Duration,
    /// A load is not worth a round trip below so many tokens; they are computed instead.
    pub min_remote_tokens: u32,
    /// How long a request may wait for room before its lease is given back and its prompt computed here.
    pub queue_limit: Duration,
    /// How long a load may take until it is cancelled. The worker's own limits end it well before.
    pub load_limit: Duration,
    /// How long workers may take to report what they must report, beyond all limits of their own.
    pub report_grace: Duration,
}

/// Why a configuration cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SchedConfigError {
    /// Something that must not be zero is.
    #[error("{field} is 0")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A topology that cannot be.
    #[error(transparent)]
    Topology(#[from] kv_proto::topology::TopologyError),
    /// Two durations in the wrong order.
    #[error("{field} of {value:?} is longer than {other} of {other_value:?}")]
    Order {
        /// The one that must be shorter.
        field: &'static str,
        /// Its value.
        value: Duration,
        /// The one that must be longer.
        other: &'static str,
        /// Its value.
        other_value: Duration,
    },
}

impl SchedConfig {
    /// Checks ranges and orders.
    pub fn check(&self) -> Result<(), SchedConfigError> {
        self.topology.check()?;
        let numbers = [
            ("port", u32::from(self.port)),
            ("block_tokens", self.block_tokens),
            ("blocks", self.blocks),
            ("groups", u32::try_from(self.groups.len()).unwrap_or(u32::MAX)),
        ];
        for (field, value) in numbers {
            if value == 0 {
                return Err(SchedConfigError::Zero { field });
            }
        }
        let durations = [
            ("lease_ttl", self.lease_ttl),
            ("lease_renewal", self.lease_renewal),
            ("queue_limit", self.queue_limit),
            ("load_limit", self.load_limit),
            ("report_grace", self.report_grace),
        ];
        for (field, value) in durations {
            if value < Duration::from_millis(1) {
                return Err(SchedConfigError::Zero { field });
            }
        }
        let ttl = ("lease_ttl", self.lease_ttl);
        let renewal = ("lease_renewal", self.lease_renewal);
        let max = ("lease_max", self.lease_max);
        for ((field, value), (other, other_value)) in [(ttl, max), (renewal, max)] {
            if value > other_value {
                return Err(SchedConfigError::Order { field, value, other, other_value });
            }
        }
        Ok(())
    }

    /// The lease terms as they travel in a plan.
    pub fn terms(&self) -> LeaseTerms {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        LeaseTerms {
            ttl_ms: ms(self.lease_ttl),
            renewal_ms: ms(self.lease_renewal),
            max_ms: ms(self.lease_max),
            grace_ms: ms(self.lease_grace),
        }
    }
}
