//! Every state of the retry machine's records against every input: `docs/states`, compared.
#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

// One way to write tables serves all machines.
#[path = "../../kv-sched/tests/tables/chart.rs"]
mod chart;
#[path = "tables/recovery.rs"]
mod recovery;
#[path = "../../kv-sched/tests/tables/words.rs"]
mod words;

#[test]
fn the_table_of_a_peers_breaker_is_what_it_does() {
    recovery::peers().check();
}

#[test]
fn the_table_of_a_request_is_what_it_does() {
    recovery::requests().check();
}
