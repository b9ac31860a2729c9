//! The consumer's tables: of a request, and of its load.

use kv_proto::{LoadFailure, PullEnd, TransferParams};
use kv_sched::RequestEnd;

use super::bench::{Bench, R, TOKENS};
use super::chart::{Chart, Input};
use super::common::{
    GRACE_MS, LOAD_MS, POOL, QUEUE_MS, complete, failed, loaded, offer, params, run, two_offers,
};
use super::words::{entries, field, variant};

const ABOUT_REQUEST: &str = "\
The consumer's side of one request in `kv-sched`: whether its prompt is still to be had from the producer. The request
is `r` with a prompt of 8 tokens, all offered under the producer's `lease-5`, on an engine of two ranks; a *twin* is
another request with the same offer, as a router makes that tries again. A second offer, where there is one, is another
producer's, of the same tokens under its `lease-6`.";

const DRAWING_REQUEST: &str = "
unknown --arrived with an offer--> Queued --blocks allocated--> Loading --every rank reported--> Settled
                                     |  ^                          |  |
                                     |  +----failed, others left---+  +--finished--> unknown, load Abandoned
                                     +--nothing to load, declined, waited too long--> Settled
Any of them --finished--> unknown";

const ABOUT_LOAD: &str = "\
One load in `kv-sched`, from its order until every rank has reported its end: until then its blocks are in the workers'
hands. It is `load-1` of request `r` on an engine of two ranks, 8 tokens into 2 blocks, under the producer's `lease-5`.";

const DRAWING_LOAD: &str = "
none --blocks allocated--> Running --every rank reported--> over
                             |  |
                             |  +--load limit--> Cancelling --grace--> Overdue --every rank reported--> over
                             |                       |                    ^
                             |                  request gone              | load limit and grace
                             |                       v                    |
                             +--request gone--> Abandoned ----------------+";

fn describe_load_of(all: &str) -> Option<String> {
    let consumer = field(all, &["consumer"]);
    let (_, load) = entries(field(consumer, &["loads"])).into_iter().find(|(id, _)| *id == "LoadId(1)")?;
    let stage = variant(field(load, &["stage"]));
    let ended = entries(field(load, &["ended"])).len();
    Some(if ended == 0 { stage.to_owned() } else { format!("{stage}, {ended} of 2 ended") })
}

/// Its state, with the offers that it holds beside the one that any request has.
fn describe_offers(request: &str) -> String {
    let state = variant(request);
    match state {
        "Queued" if entries(field(request, &["sources"])).len() > 1 => "Queued, 2 offers".to_owned(),
        "Loading" if !entries(field(request, &["others"])).is_empty() => "Loading, 1 other".to_owned(),
        _ => state.to_owned(),
    }
}

fn describe_request(all: &str) -> String {
    let mut own = "unknown".to_owned();
    let mut twins = String::new();
    for (name, request) in entries(field(all, &["consumer", "requests"])) {
        match name {
            "RequestId(\"r\")" => own = describe_offers(request),
            _ => twins = format!("; twin {}", variant(request)),
        }
    }
    let load =
        describe_load_of(all).filter(|load| !(load.starts_with("Running") && own.starts_with("Loading")));
    let load = load.filter(|_| twins.is_empty()).map(|load| format!("; load {load}"));
    own + &load.unwrap_or_default() + &twins
}

fn describe_load(all: &str) -> String {
    let consumer = field(all, &["consumer"]);
    let Some(load) = describe_load_of(all) else {
        return if field(consumer, &["next_load"]) == "1" { "none" } else { "over" }.to_owned();
    };
    let gone = load.starts_with("Overdue") && !field(consumer, &["requests"]).contains("\"r\"");
    load + if gone { ", request gone" } else { "" }
}

fn arrive(b: &mut Bench, name: &str) -> Vec<String> {
    b.arrive(name, TOKENS, &params(offer(5, TOKENS)))
}

fn arrived(b: &mut Bench) -> Vec<String> {
    arrive(b, R)
}

fn arrived_with_two(b: &mut Bench) -> Vec<String> {
    b.arrive(R, TOKENS, &params(two_offers()))
}

fn twin_arrived(b: &mut Bench) -> Vec<String> {
    arrive(b, "twin")
}

fn allocated(b: &mut Bench) -> Vec<String> {
    b.allocate(R, 0, TOKENS, run(40, 2))
}

fn twin_allocated(b: &mut Bench) -> Vec<String> {
    b.allocate("twin", 0, TOKENS, run(40, 2))
}

fn finished(b: &mut Bench) -> Vec<String> {
    b.finish(R, &complete(TOKENS, &[run(40, 2)]))
}

fn aborted(b: &mut Bench) -> Vec<String> {
    b.finish(R, &RequestEnd::Aborted)
}

fn other_prompt() -> TransferParams {
    let mut other = offer(5, TOKENS);
    other.token_digest = offer(5, TOKENS - 1).token_digest;
    params(other)
}

fn ended(b: &mut Bench, rank: u32, end: PullEnd) -> Vec<String> {
    b.load(rank, 1, end)
}

fn loaded_0(b: &mut Bench) -> Vec<String> {
    ended(b, 0, loaded(64))
}

fn loaded_1(b: &mut Bench) -> Vec<String> {
    ended(b, 1, loaded(64))
}

fn lapsed_0(b: &mut Bench) -> Vec<String> {
    ended(b, 0, failed(LoadFailure::Lapsed))
}

fn both_loaded(b: &mut Bench) -> Vec<String> {
    [loaded_0(b), loaded_1(b)].concat()
}

fn load_late(b: &mut Bench) -> Vec<String> {
    b.pass(LOAD_MS)
}

fn grace(b: &mut Bench) -> Vec<String> {
    b.pass(GRACE_MS)
}

fn load_and_grace(b: &mut Bench) -> Vec<String> {
    b.pass(LOAD_MS + GRACE_MS)
}

const REQUEST_INPUTS: &[Input<Bench>] = &[
    ("arrived", arrived),
    ("arrived, with an offer of nothing", |b| b.arrive(R, TOKENS, &params(offer(5, 0)))),
    ("arrived, with the offer of another prompt", |b| b.arrive(R, TOKENS, &other_prompt())),
    ("arrived, with two offers", arrived_with_two),
    ("arrived, the second offer of another prompt", |b| {
        let mut offers = two_offers();
        offers.alternatives[0].token_digest = offer(5, TOKENS - 1).token_digest;
        b.arrive(R, TOKENS, &params(offers))
    }),
    ("a twin arrived", twin_arrived),
    ("asked for remote tokens", Bench::ask),
    ("the second producer is to be used", |b| b.use_source(1)),
    ("the second producer is to be used, allocated", |b| [b.use_source(1), allocated(b)].concat()),
    ("declined", Bench::decline),
    ("allocated, 8 remote tokens", allocated),
    ("allocated, 4 remote tokens, 4 here", |b| b.allocate(R, 4, 4, run(40, 2))),
    ("allocated, 0 remote tokens, 8 here", |b| b.allocate(R, TOKENS, 0, run(40, 2))),
    ("allocated, 4 remote tokens where 8 were offered", |b| b.allocate(R, 0, 4, run(40, 2))),
    ("allocated, 2 here: not whole blocks", |b| b.allocate(R, 2, 6, run(40, 2))),
    ("allocated, a block too few", |b| b.allocate(R, 0, TOKENS, run(40, 1))),
    ("allocated, a block beyond the pool", |b| b.allocate(R, 0, TOKENS, run(POOL - 1, 2))),
    ("finished", finished),
    ("aborted", aborted),
    ("load-1, rank 0: loaded", loaded_0),
    ("load-1, both ranks: loaded", both_loaded),
    ("load-1, rank 0: lapsed; rank 1: loaded", |b| [lapsed_0(b), loaded_1(b)].concat()),
    ("preempted", Bench::preempt),
    ("drained, at once", Bench::drain),
    ("queue limit passes", |b| b.pass(QUEUE_MS)),
    ("load limit passes", load_late),
    ("load limit passes, then grace", |b| [load_late(b), grace(b)].concat()),
];

const LOAD_INPUTS: &[Input<Bench>] = &[
    ("request arrived", arrived),
    ("allocated, 8 remote tokens", allocated),
    ("allocated, 0 remote tokens", |b| b.allocate(R, 0, 0, run(40, 2))),
    ("request finished", finished),
    ("request aborted", aborted),
    ("request preempted", Bench::preempt),
    ("drained, at once", Bench::drain),
    ("drained, then grace passes", |b| [b.drain(), grace(b)].concat()),
    ("a twin arrived and was aborted", |b| {
        [twin_arrived(b), b.finish("twin", &RequestEnd::Aborted)].concat()
    }),
    ("rank 0: loaded", loaded_0),
    ("rank 0: loaded, twice", |b| [loaded_0(b), loaded_0(b)].concat()),
    ("rank 0: lapsed", lapsed_0),
    ("rank 0: loaded, then lapsed", |b| [loaded_0(b), lapsed_0(b)].concat()),
    ("rank 1: loaded", loaded_1),
    ("rank 1: cancelled", |b| ended(b, 1, failed(LoadFailure::Cancelled))),
    ("both ranks: loaded", both_loaded),
    ("rank 2, which is not: loaded", |b| ended(b, 2, loaded(64))),
    ("rank 0: loaded, another load", |b| b.load(0, 9, loaded(64))),
    ("grace passes", grace),
    ("load limit passes", load_late),
    ("load limit and grace pass", load_and_grace),
];

pub(crate) fn request() -> Chart<'static, Bench> {
    let new = || Bench::new(describe_request);
    Chart {
        file: "consumer-request",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT_REQUEST,
        drawing: DRAWING_REQUEST,
        states: vec![
            ("nothing", new()),
            ("arrived", new().after(&[arrived])),
            ("arrived, allocated", new().after(&[arrived, allocated])),
            ("arrived, allocated, loaded by both ranks", new().after(&[arrived, allocated, both_loaded])),
            ("arrived, allocated, aborted", new().after(&[arrived, allocated, aborted])),
            ("arrived with two offers", new().after(&[arrived_with_two])),
            ("arrived with two offers, allocated", new().after(&[arrived_with_two, allocated])),
            ("arrived; a twin arrived", new().after(&[arrived, twin_arrived])),
            (
                "arrived; a twin arrived and was allocated",
                new().after(&[arrived, twin_arrived, twin_allocated]),
            ),
        ],
        inputs: REQUEST_INPUTS,
    }
}

pub(crate) fn load() -> Chart<'static, Bench> {
    let new = || Bench::new(describe_load);
    let late = "the load limit passed";
    Chart {
        file: "consumer-load",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT_LOAD,
        drawing: DRAWING_LOAD,
        states: vec![
            ("nothing", new()),
            ("allocated", new().after(&[arrived, allocated])),
            ("rank 0 reported that it has loaded", new().after(&[arrived, allocated, loaded_0])),
            (late, new().after(&[arrived, allocated, load_late])),
            ("the request was aborted", new().after(&[arrived, allocated, aborted])),
            ("the load limit passed, then the grace", new().after(&[arrived, allocated, load_late, grace])),
            (
                "the request was aborted, then load limit and grace passed",
                new().after(&[arrived, allocated, aborted, load_and_grace]),
            ),
            ("both ranks reported that they have loaded", new().after(&[arrived, allocated, both_loaded])),
        ],
        inputs: LOAD_INPUTS,
    }
}
