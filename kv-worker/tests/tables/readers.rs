//! The table of a connection from a consumer.

use kv_proto::message::{LEASES_PER_MESSAGE_MAX, WorkerMessage};
use kv_proto::{Attempt, LeaseId, OfferDigest, PROTOCOL_VERSION, Rank, Topology};
use kv_worker::machine::io::Fact;

use super::bench::Bench;
use super::chart::{Chart, Input};
use super::common::{
    BLOCKS, CONNECT_MS, accepted, announce, compare, engine, grant, hello, life, read_done, released, renew,
    renew_next, welcome,
};
use super::words::{entries, field, variant};

const ABOUT: &str = "\
A connection `a0` from a consumer's worker, as the producer's worker sees it. `lease-5` is held and `lease-9` was never
heard of; what endings do to a lease is in the ledger's table.

`a0: x` stands for sending x over the connection.";

const DRAWING: &str = "
accepted --> Ungreeted --Hello fits--> Greeted --lost, protocol broken--> gone
               |    ^ |
               |    +-+ Hello does not fit: told so, may try again within the limit
               +--anything else, lost, too late--> gone";

fn describe(all: &str) -> String {
    let links = entries(field(all, &["readers", "links"]));
    links.first().map_or("gone".to_owned(), |(_, link)| variant(link).to_owned())
}

fn held(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.own(now, &[announce(5), grant(5)]))
}

fn connected(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.take(now, Fact::LinkAccepted { link: accepted(0) }))
}

fn says(b: &mut Bench, message: WorkerMessage) -> Vec<String> {
    b.hear(accepted(0), message)
}

fn greeted(b: &mut Bench) -> Vec<String> {
    says(b, hello(1, 100))
}

/// A greeting in a version, of a rank in so many, to a rank of a life. The one that fits is of 0 in 1 to 0 of 100.
fn unfit(b: &mut Bench, version: u32, (rank, ranks): (u32, u32), (to_rank, to): (u32, u64)) -> Vec<String> {
    let engine = engine("d");
    let (incarnation, rank, topology) = (life(1), Rank(rank), Topology::of(ranks));
    let (to, to_rank) = (life(to), Rank(to_rank));
    says(b, WorkerMessage::Hello { version, engine, incarnation, rank, topology, to, to_rank })
}

fn lost(b: &mut Bench) -> Vec<String> {
    b.lose(accepted(0))
}

const INPUTS: &[Input<Bench>] = &[
    ("Hello that fits", greeted),
    ("Hello: other version", |b| unfit(b, PROTOCOL_VERSION + 1, (0, 1), (0, 100))),
    ("Hello: to another life", |b| unfit(b, PROTOCOL_VERSION, (0, 1), (0, 99))),
    ("Hello: to another rank", |b| unfit(b, PROTOCOL_VERSION, (0, 1), (1, 100))),
    ("Hello: topology does not fit", |b| unfit(b, PROTOCOL_VERSION, (7, 2), (0, 100))),
    ("Renew all, lease-5", |b| says(b, renew(&[5]))),
    ("Renew all, lease-9", |b| says(b, renew(&[9]))),
    ("Renew, its predecessor missing", |b| says(b, renew_next(1, &[5], &[]))),
    ("Renew, more than a message may name", |b| {
        says(b, renew(&(0..=LEASES_PER_MESSAGE_MAX as u64).collect::<Vec<_>>()))
    }),
    ("ReadDone 5/1", |b| says(b, read_done(5, 1))),
    ("ReadDone 5/1, another offer", |b| {
        let offer = OfferDigest::from_bytes([8; 16]);
        says(b, WorkerMessage::ReadDone { lease: LeaseId(5), attempt: Attempt(1), offer, more: false })
    }),
    ("ReadDone 9/1", |b| says(b, read_done(9, 1))),
    ("Release 5/1", |b| says(b, released(5, 1))),
    ("Compare 5/1", |b| says(b, compare(5, 1, 0, &[3, 4], &[70, 71]))),
    ("Compare 5/1, of blocks beyond the pool", |b| says(b, compare(5, 1, 0, &[BLOCKS], &[70]))),
    ("Compare 9/1", |b| says(b, compare(9, 1, 0, &[3, 4], &[70, 71]))),
    ("Welcome, the wrong way", |b| says(b, welcome(100))),
    ("malformed message", |b| b.hear_noise(accepted(0))),
    ("a0 lost", lost),
    ("limit of the greeting passes", Bench::deadline),
];

pub(crate) fn chart() -> Chart<'static, Bench> {
    let new = || Bench::new(describe).after(&[held, connected]).due_in(CONNECT_MS);
    Chart {
        file: "readers",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT,
        drawing: DRAWING,
        states: vec![
            ("accepted", new()),
            ("accepted, Hello", new().after(&[greeted])),
            ("accepted, Hello, lost", new().after(&[greeted, lost])),
        ],
        inputs: INPUTS,
    }
}
