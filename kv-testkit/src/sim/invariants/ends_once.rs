//! **P2: each hold and each load ends once.** Judged where the engine hears of it: a load that ends must be waited for,
//! a hold that is released must hold something.

pub(super) const NAME: &str = "ends-once";
