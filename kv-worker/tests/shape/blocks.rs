//! Blocks that cannot be.
