//! Faults on purpose, chosen by a plan and told afterwards.
