//! The table of a consumer's connection to a producer.

use kv_proto::ReleaseReason;
use kv_proto::message::{HelloRefusal, WorkerMessage};
use kv_worker::machine::io::{Fact, SourceKey};

use super::bench::Bench;
use super::chart::{Chart, Input};
use super::common::{
    CONNECT_MS, HANDSHAKE_MS, IDLE_MS, RENEW_MS, RETRY_MIN_MS, card, confirmed, dialled, hello, life, load,
    not_held, peer, release, track, welcome,
};
use super::words::{entries, field, variant};

const ABOUT: &str = "\
A producer as a worker of a consumer sees it, from an address in a request to a greeted connection `d0`. The producer is
in life 1 and wanted for `lease-5`; *unwanted* says that no lease is renewed there, no pull needs it and no release
waits for it.

`d0: x` stands for sending x over the connection. The time between renewals is longer here than the wait before a first
retry.";

const DRAWING: &str = "
unknown --wanted--> Dialling --card fits--> Connecting --connected--> Greeting --Welcome--> Ready --idle--> unknown
                       ^ |                      |                        |                    |
                       | +----------------------+----failed--------------+---lost at once-----+
                       |                        v                                             |
                       +--wanted, at retry-- Failed --unwanted, at retry--> unknown           |
                       +--------------------------------------------lost after a while--------+";

fn describe(all: &str) -> String {
    let Some((_, producer)) = entries(field(all, &["pulls", "peers", "producers"])).into_iter().next() else {
        return "unknown".to_owned();
    };
    // It has one worker, so that there is one source.
    let peer = entries(field(producer, &["sources"])).into_iter().next().map_or("", |(peer, _)| peer);
    let wanted = ["claims", "releases"].iter().any(|name| !entries(field(peer, &[name])).is_empty());
    let wanted = wanted || field(peer, &["users"]) != "0";
    format!("{}{}", variant(field(peer, &["state"])), if wanted { "" } else { ", unwanted" })
}

fn tracked(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.order(now, &[track(1, 5)]))
}

fn released(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.order(now, &[release(1, 5, ReleaseReason::NotNeeded)]))
}

fn shaken(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.shaken(now, 1))
}

fn not_shaken(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.not_shaken(now, 1))
}

fn unfit_card(b: &mut Bench) -> Vec<String> {
    let mut card = card(1);
    card.workers[0].transports[0].name = "other".to_owned();
    b.step(|rig, now| {
        rig.take(now, Fact::HandshakeEnded { key: SourceKey::first(peer(1)), result: Ok(card) })
    })
}

fn connected(b: &mut Bench) -> Vec<String> {
    b.step(|rig, now| rig.connected(now, 0))
}

fn welcomed(b: &mut Bench) -> Vec<String> {
    b.hear(dialled(0), welcome(1))
}

fn unwelcome(b: &mut Bench, reason: HelloRefusal) -> Vec<String> {
    b.hear(dialled(0), WorkerMessage::Unwelcome { reason, incarnation: life(9) })
}

const INPUTS: &[Input<Bench>] = &[
    ("track lease-5", tracked),
    ("track lease-6", |b| b.step(|rig, now| rig.order(now, &[track(1, 6)]))),
    ("load-1 under lease-5", |b| b.step(|rig, now| rig.order(now, &[load(1, 5, 1)]))),
    ("release lease-5", released),
    ("handshake ended: card fits", shaken),
    ("handshake ended: other transport", unfit_card),
    ("handshake failed", not_shaken),
    ("d0 connected", connected),
    ("Welcome", welcomed),
    ("Welcome of another life", |b| b.hear(dialled(0), welcome(2))),
    ("Unwelcome: other life", |b| unwelcome(b, HelloRefusal::Incarnation)),
    ("Unwelcome: other version", |b| unwelcome(b, HelloRefusal::Version)),
    ("malformed message", |b| b.hear_noise(dialled(0))),
    ("Hello, the wrong way", |b| b.hear(dialled(0), hello(1, 100))),
    ("NotHeld lease-5", |b| b.hear(dialled(0), not_held(&[5]))),
    ("Confirmed, not asked for", |b| b.hear(dialled(0), confirmed(5, 1))),
    ("d0 lost at once", |b| b.lose(dialled(0))),
    ("d0 lost after a while", |b| b.wait(RETRY_MIN_MS).lose(dialled(0))),
    ("time between renewals passes", |b| b.pass(RENEW_MS)),
    ("its own limit passes", Bench::deadline),
];

pub(crate) fn chart() -> Chart<'static, Bench> {
    let new = || Bench::new(describe);
    let ready: &[fn(&mut Bench) -> Vec<String>] = &[tracked, shaken, connected, welcomed];
    Chart {
        file: "peers",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT,
        drawing: DRAWING,
        states: vec![
            ("nothing", new()),
            (
                "track; limit: handshake and connection",
                new().after(&ready[..1]).due_in(HANDSHAKE_MS + CONNECT_MS),
            ),
            ("track, card fits; limit: connection", new().after(&ready[..2]).due_in(CONNECT_MS)),
            (
                "track, card fits, connected; limit: that of the connection, still running",
                new().after(&ready[..2]).due_in(CONNECT_MS).after(&ready[2..3]),
            ),
            (
                "track, card fits, connected, Welcome; limit: time without business",
                new().after(ready).due_in(IDLE_MS),
            ),
            (
                "track, card fits, connected, Welcome, release; limit: time without business",
                new().after(ready).after(&[released]).due_in(IDLE_MS),
            ),
            (
                "track, handshake failed; limit: retry",
                new().after(&[tracked, not_shaken]).due_in(RETRY_MIN_MS),
            ),
            (
                "track, handshake failed, release; limit: retry",
                new().after(&[tracked, not_shaken]).due_in(RETRY_MIN_MS).after(&[released]),
            ),
        ],
        inputs: INPUTS,
    }
}
