//! From two engines' shapes to what one rank reads from whom.
//!
//! [`compile`] takes a consumer rank's layout, a producer's workers and both topologies, and gives a [`ShapePlan`]: for each
//! producer rank that this rank has to do with, which bytes of which of its regions go where. It is checked when it is
//! made: every byte that a load must fill is covered once, and nothing else is. What cannot be brought together is
//! refused with a [`ShapeError`] that says why, with both sides' values.
//!
//! [`SourcePlan::read_parts`] applies it to the blocks of a load. Blocks pair by the position of their tokens in the
//! sequence, never by their place in a list.
//!
//! ```text
//!  layouts + topologies ──compile──► ShapePlan ──one per producer rank──► SourcePlan ──read_parts(blocks)──► ranges
//! ```
//!
//! All of it is pure: the same input gives the same plan, on either side and in any order of the workers.

mod alias;
mod apply;
mod chunks;
mod compile;
mod copies;
mod cover;
mod error;
mod pairs;

pub use apply::{Side, check_blocks};
pub use compile::{Grid, RemoteRank, SOURCES_MAX, ShapePlan, SourcePlan, compile};
pub use copies::{Place, RegionCopy};
pub use error::{BlocksError, ShapeError};
