//! **P5, and sense: without faults nothing fails.** In a world without faults every load ends well, however plans, reports
//! and messages are interleaved; and at no time does a half refuse what the other half made.

pub(super) const NAME: &str = "calm";
