//! The table of a pull.

use kv_proto::{LoadFailure, LoadId};
use kv_worker::machine::io::{DigestOf, Fact, PullId};

use super::bench::{Bench, STEP_MS};
use super::chart::{Chart, Input, Machine};
use super::common::{
    CONFIRM_MS, PEER_WAIT_MS, READ_MS, REPEAT_MS, RETRY_MIN_MS, STALL_MS, cancel, compared, confirmed,
    dialled, lapsed, load, not_held, welcome,
};
use super::words::{entries, field, variant};

const ABOUT: &str = "\
One worker's part of a load, from the order to the one end that is reported. It is `load-1` under `lease-5` of producer
1, read over the connection `d0`; a *twin* is `load-2` under the same lease. *Comparing* is a state of loads with checksums.

`d0: x` stands for sending x over the connection. Answers name the lease and the attempt, so that `5/1` is this load's.";

const DRAWING: &str = "
unknown --ordered--> Waiting --peer ready--> Reading --read ended--> Confirming --Confirmed--> over: loaded
                        |                       |                        |
                        |                       |                        +--Lapsed, no answer--> over: failed
                        |                       |--with checksums--> Comparing --equal--> Confirming
                        |                       |                      +--not equal, lapsed, no answer--> over: failed
                        |                       +--cancelled, lapsed, late--> Reading, doomed
                        |                       |                                |
                        +--failed, cancelled,   +--read failed--> over: failed   +--read ended--> over: failed
                           late --> over: failed";

fn describe(all: &str) -> String {
    let (mut own, mut twin) = (None, String::new());
    for (load, pull) in entries(field(all, &["pulls", "pulls"])) {
        let state = field(pull, &["state"]);
        let doomed = variant(state) == "Reading" && field(state, &["doomed"]) != "None";
        let name = format!("{}{}", variant(state), if doomed { ", doomed" } else { "" });
        match field(load, &["load"]) {
            "LoadId(1)" => own = Some(name),
            _ => twin = format!("; twin {name}"),
        }
    }
    let none = if field(all, &["pulls", "next"]) == "0" { "unknown" } else { "over" };
    own.unwrap_or(none.to_owned()) + &twin
}

fn ordered(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.order(now, &[load(1, 5, 1)]))
}

fn twin_ordered(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.order(now, &[load(1, 5, 2)]))
}

fn ready(b: &mut Bench) -> Vec<String> {
    b.becomes_ready(0)
}

/// The last that the peer lacked; or, where it was ready, its way to be so again.
fn ready_anew(b: &mut Bench) -> Vec<String> {
    if b.state() == "Waiting" {
        return b.hear(dialled(0), welcome(1));
    }
    let lost = lost(b);
    let mut out = b.becomes_ready(1);
    // What comes of a connection alone is in the peers' table.
    out.retain(|line| !line.starts_with("connect") && !line.contains("hello"));
    [lost, out].concat()
}

fn lost(b: &mut Bench) -> Vec<String> {
    b.wait(RETRY_MIN_MS).lose(dialled(0))
}

fn read(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.read_ended(now, 1))
}

fn read_over_another(b: &mut Bench) -> Vec<String> {
    let pull = PullId::first(LoadId(1));
    b.step(|rig, now| rig.take(now, Fact::ReadEnded { pull, link: dialled(9), result: Ok(()) }))
}

fn digested(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| {
        rig.digested(now, DigestOf::Pull { pull: PullId::first(LoadId(1)), from: 0 }, &[70, 71])
    })
}

fn cancelled(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.order(now, &[cancel(1)]))
}

fn is_confirmed(b: &mut Bench) -> Vec<String> {
    b.hear(dialled(0), confirmed(5, 1))
}

const INPUTS: &[Input<Bench>] = &[
    ("order", ordered),
    ("cancel", cancelled),
    ("peer ready, or ready again", ready_anew),
    ("peer failed", |b| b.hear_noise(dialled(0))),
    ("d0 lost", lost),
    ("read ended", read),
    ("read failed", Bench::read_failed),
    ("read ended with d0", |b| b.step(|rig, now| rig.read_failed(now, 1, LoadFailure::PeerLost))),
    ("read over d9 ended", read_over_another),
    ("digests computed", digested),
    ("Compared 5/1: equal", |b| b.hear(dialled(0), compared(5, 1, 0, 2, true))),
    ("Compared 5/1: not equal", |b| b.hear(dialled(0), compared(5, 1, 0, 1, true))),
    ("Compared 5/1: not held", |b| b.hear(dialled(0), compared(5, 1, 0, 2, false))),
    ("Compared 5/2: another attempt", |b| b.hear(dialled(0), compared(5, 2, 0, 0, false))),
    ("Confirmed 5/1", is_confirmed),
    ("Lapsed 5/1", |b| b.hear(dialled(0), lapsed(5, 1))),
    ("Confirmed 5/2: another attempt", |b| b.hear(dialled(0), confirmed(5, 2))),
    ("Lapsed 5/2: another attempt", |b| b.hear(dialled(0), lapsed(5, 2))),
    ("Confirmed 6/1: another lease", |b| b.hear(dialled(0), confirmed(6, 1))),
    ("NotHeld lease-5", |b| b.hear(dialled(0), not_held(&[5]))),
    ("NotHeld lease-6", |b| b.hear(dialled(0), not_held(&[6]))),
    ("worker closes", Bench::close),
    ("time to ask again passes", |b| b.pass(REPEAT_MS)),
    ("its own limit passes", Bench::deadline),
];

pub(crate) fn chart() -> Chart<'static, Bench> {
    let new = || Bench::new(describe);
    let reading = || new().after(&[ordered, ready]).due_in(READ_MS + STALL_MS);
    // The peer is late, so that the pull's own limit comes before the connection's.
    let late: &[fn(&mut Bench) -> Vec<String>] = &[
        |b| b.wait(PEER_WAIT_MS * 3 / 4).step(|rig, now| rig.shaken(now, 1)),
        |b| b.step(|rig, now| rig.connected(now, 0)),
    ];
    Chart {
        file: "pulls",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT,
        drawing: DRAWING,
        states: vec![
            ("nothing", new()),
            (
                "order, peer late and not yet greeted; limit: wait for the peer",
                new().after(&[ordered]).due_in(PEER_WAIT_MS).after(late),
            ),
            ("order, peer ready; limit: read and stall", reading()),
            ("order, peer ready, cancel; limit: read and stall", reading().after(&[cancelled])),
            (
                "order, peer ready, order of a twin; limit: read and stall",
                new().after(&[ordered, ready, twin_ordered]).due_in(READ_MS + STALL_MS - STEP_MS),
            ),
            (
                "order, peer ready, read ended; limit: confirmation",
                reading().after(&[read]).due_in(CONFIRM_MS),
            ),
            (
                "order with checksums, peer ready, read ended, digests computed; limit: comparison",
                Bench::with_checksums(describe)
                    .after(&[ordered, ready, read])
                    .due_in(CONFIRM_MS)
                    .after(&[digested]),
            ),
            ("order, peer ready, read ended, Confirmed", new().after(&[ordered, ready, read, is_confirmed])),
        ],
        inputs: INPUTS,
    }
}
