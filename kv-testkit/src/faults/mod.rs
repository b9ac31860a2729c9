//! Faults on purpose, chosen by a plan, told afterwards, and repeatable.
//!
//! * [`FaultyTransport`] puts them into any transport, operation by operation: [`FaultPlan`], [`Recording`].
//! * [`proxy`] puts them into streams of bytes between processes, for engines in any language.
//!
//! Plans are TOML or JSON files of the same family; what their fields mean stands in the crate's README. A plan
//! has a seed; the same plan does the same to the same operations.

mod choose;
mod plan;
pub mod proxy;
mod request;
mod strike;
mod timers;
mod transport;

pub use choose::{Pattern, PlanError, RULES_MAX, Which};
pub use plan::{FailWith, Fault, FaultPlan, Injected, On, Recording, Rule};
pub use transport::{Faults, FaultyTransport};
