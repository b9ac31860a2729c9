//! **P3: nothing writes into a block that has another owner.** A consumer's block is tagged with the load that may
//! write it, from the load's order until the engine has heard that it ended. Judged at each cell that the transport
//! writes.

pub(super) const NAME: &str = "quiet";
