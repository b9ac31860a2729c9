//! A configuration that cannot be is refused by name.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use std::time::Duration;

use kv_proto::LeaseTerms;
use kv_sched::{SchedConfig, Scheduler};

fn refuse(change: fn(&mut SchedConfig)) -> String {
    let mut config = common::config(1);
    change(&mut config);
    Scheduler::new(config).unwrap_err().to_string()
}

#[test]
fn zeros_are_refused_by_name() {
    assert_eq!(refuse(|c| c.topology.ranks = 0), "an engine has 0 ranks, 1 to 4096 are allowed");
    assert_eq!(refuse(|c| c.port = 0), "port is 0");
    assert_eq!(refuse(|c| c.block_tokens = 0), "block_tokens is 0");
    assert_eq!(refuse(|c| c.blocks = 0), "blocks is 0");
    assert_eq!(refuse(|c| c.groups.clear()), "groups is 0");
    assert_eq!(refuse(|c| c.lease_ttl = Duration::from_micros(999)), "lease_ttl is 0");
    assert_eq!(refuse(|c| c.report_grace = Duration::ZERO), "report_grace is 0");
}

#[test]
fn a_lease_that_outlives_its_maximum_is_refused_with_both_values() {
    assert_eq!(
        refuse(|c| c.lease_ttl = Duration::from_secs(6)),
        "lease_ttl of 6s is longer than lease_max of 5s"
    );
}

// H-12
#[test]
fn terms_travel_in_milliseconds() {
    assert_eq!(
        common::config(1).terms(),
        LeaseTerms { ttl_ms: 1_000, renewal_ms: 800, max_ms: 5_000, grace_ms: 300 }
    );
}
