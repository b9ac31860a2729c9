//! The producer's table.

use kv_proto::LeaseEnd;
use kv_sched::RequestEnd;

use super::bench::{Bench, R, TOKENS};
use super::chart::{Chart, Input};
use super::common::{GRACE_MS, LEASE_MAX_MS, ask, complete, run};
use super::words::{entries, field};

const ABOUT: &str = "\
The producer's side of one request in `kv-sched`, from its arrival to the release of its blocks, on an engine of two
ranks. The request is `r` with a prompt of 8 tokens in 2 blocks; its lease is `lease-1`.";

const DRAWING: &str = "
unknown --arrived--> Computing --finished, prompt computed whole--> Held --every rank reported an end--> over
                         |                                           |
                         +--aborted, incomplete, empty--> over       +--workers silent--> Held, overdue";

fn describe(all: &str) -> String {
    let producer = field(all, &["producer"]);
    let mut parts = Vec::new();
    for (lease, held) in entries(field(producer, &["held"])) {
        let ended = entries(field(held, &["ended"])).len();
        let late = !field(producer, &["timers"]).contains(lease);
        let late = if late { ", overdue" } else { "" };
        let ended = if ended > 0 { format!(", {ended} of 2 ended") } else { String::new() };
        parts.push(format!("Held{late}{ended}"));
    }
    for (_, computing) in entries(field(producer, &["computing"])) {
        let next = if parts.is_empty() { "" } else { "next " };
        let same = field(computing, &["lease"]) == "LeaseId(1)";
        parts.push(format!("{next}Computing{}", if same || !next.is_empty() { "" } else { " anew" }));
    }
    match (parts.is_empty(), field(producer, &["next_lease"])) {
        (true, "1") => "unknown".to_owned(),
        (true, _) => "over".to_owned(),
        (false, _) => parts.join(" + "),
    }
}

fn arrived(b: &mut Bench) -> Vec<String> {
    b.arrive(R, TOKENS, &ask())
}

fn finished(b: &mut Bench) -> Vec<String> {
    b.finish(R, &complete(TOKENS + 1, &[run(8, 3)]))
}

fn confirmed_0(b: &mut Bench) -> Vec<String> {
    b.lease(0, 1, LeaseEnd::Confirmed)
}

fn confirmed_1(b: &mut Bench) -> Vec<String> {
    b.lease(1, 1, LeaseEnd::Confirmed)
}

fn overdue(b: &mut Bench) -> Vec<String> {
    b.pass(LEASE_MAX_MS + GRACE_MS)
}

const INPUTS: &[Input<Bench>] = &[
    ("arrived", arrived),
    ("finished, 9 tokens computed", finished),
    ("finished, 7 of 8 tokens computed", |b| b.finish(R, &complete(TOKENS - 1, &[run(8, 2)]))),
    ("finished, no token computed", |b| b.finish(R, &complete(0, &[run(8, 0)]))),
    ("finished, a block too few", |b| b.finish(R, &complete(TOKENS, &[run(8, 1)]))),
    ("aborted", |b| b.finish(R, &RequestEnd::Aborted)),
    ("preempted", Bench::preempt),
    ("drained, at once", Bench::drain),
    ("drained, then finished", |b| [b.drain(), finished(b)].concat()),
    ("rank 0: confirmed", confirmed_0),
    ("rank 0: released", |b| b.lease(0, 1, LeaseEnd::Released)),
    ("rank 0: expired", |b| b.lease(0, 1, LeaseEnd::Expired)),
    ("rank 0: its consumer lost", |b| b.lease(0, 1, LeaseEnd::ConsumerLost)),
    ("rank 0: revoked", |b| b.lease(0, 1, LeaseEnd::Revoked)),
    ("rank 0: confirmed, twice", |b| [confirmed_0(b), confirmed_0(b)].concat()),
    ("rank 1: confirmed", confirmed_1),
    ("rank 1: released", |b| b.lease(1, 1, LeaseEnd::Released)),
    ("rank 1: expired", |b| b.lease(1, 1, LeaseEnd::Expired)),
    ("rank 2, which is not: confirmed", |b| b.lease(2, 1, LeaseEnd::Confirmed)),
    ("rank 0: confirmed, another lease", |b| b.lease(0, 9, LeaseEnd::Confirmed)),
    ("longest life and grace pass", overdue),
];

pub(crate) fn chart() -> Chart<'static, Bench> {
    let new = || Bench::new(describe);
    Chart {
        file: "producer",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT,
        drawing: DRAWING,
        states: vec![
            ("nothing", new()),
            ("arrived", new().after(&[arrived])),
            ("arrived, finished", new().after(&[arrived, finished])),
            ("arrived, finished, an end from rank 0", new().after(&[arrived, finished, confirmed_0])),
            ("arrived, finished, then nothing for too long", new().after(&[arrived, finished, overdue])),
            (
                "arrived, finished, ends from both ranks",
                new().after(&[arrived, finished, confirmed_0, confirmed_1]),
            ),
        ],
        inputs: INPUTS,
    }
}
