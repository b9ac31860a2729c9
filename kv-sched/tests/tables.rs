//! Every state of the scheduler half's machines against every input: `docs/states`, compared.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.

mod common;

#[path = "tables/bench.rs"]
mod bench;
#[path = "tables/chart.rs"]
mod chart;
#[path = "tables/consumer.rs"]
mod consumer;
#[path = "tables/producer.rs"]
mod producer;
#[path = "tables/staging.rs"]
mod staging;
#[path = "tables/words.rs"]
mod words;

#[test]
fn the_producers_table_is_what_it_does() {
    producer::chart().check();
}

#[test]
fn the_table_of_a_consumers_request_is_what_it_does() {
    consumer::request().check();
}

#[test]
fn the_table_of_a_load_is_what_it_does() {
    consumer::load().check();
}

#[test]
fn the_table_of_host_staging_is_what_it_does() {
    staging::chart().check();
}
