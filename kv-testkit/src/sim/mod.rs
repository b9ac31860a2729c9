//! A deterministic simulator: the real machines of both halves in worlds full of faults.
//!
//! A world has a few producers and consumers with one to four ranks each, a router, clients, and a transport that copies
//! piece by piece while time passes. The two sides may have unequal ranks, blocks and orders, and layers with a window. Everything follows from a seed: a seed that is printed is enough to see a world
//! again. Faults are data ([`FaultPlan`]); after some time they stop, and everything must heal. What a load that was
//! reported good really contains is judged by stamps in memory, not by the machines.
//!
//! ```
//! use kv_testkit::sim::{Settings, run};
//!
//! let outcome = run(7, &Settings::default());
//! assert!(outcome.violations.is_empty(), "{:?}", outcome.violations);
//! ```

mod cache;
mod canary;
mod clock;
mod dice;
mod digests;
mod ends;
mod engine;
mod faults;
mod invariants;
mod links;
mod pool;
mod reads;
mod recovery;
mod requests;
mod shape;
mod steps;
mod worker;
mod world;

pub use canary::Canary;
pub use dice::Dice;
pub use faults::{FaultKind, FaultPlan};
pub use invariants::{Invariant, Violation};
pub use world::{Outcome, Settings, run};
