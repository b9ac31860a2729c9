//! Every state of the worker half's machines against every input: `docs/states`, compared.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.

mod common;

#[path = "tables/bench.rs"]
mod bench;
// One way to write tables serves both halves.
#[path = "../../kv-sched/tests/tables/chart.rs"]
mod chart;
#[path = "tables/ledger.rs"]
mod ledger;
#[path = "tables/peers.rs"]
mod peers;
#[path = "tables/pulls.rs"]
mod pulls;
#[path = "tables/readers.rs"]
mod readers;
#[path = "../../kv-sched/tests/tables/words.rs"]
mod words;

#[test]
fn the_ledgers_table_is_what_it_does() {
    ledger::chart().check();
}

#[test]
fn the_table_of_a_peer_is_what_it_does() {
    peers::chart().check();
}

#[test]
fn the_table_of_a_pull_is_what_it_does() {
    pulls::chart().check();
}

#[test]
fn the_table_of_a_reader_is_what_it_does() {
    readers::chart().check();
}
