//! The tables of a peer's breaker and of a request that is tried again.

use std::time::Duration;

use kv_proto::{LoadFailure, Moment};
use kv_recovery::{Admission, Directive, LoadFacts, Policy, Recovery, RecoveryConfig};

use super::chart::{Chart, Input, Machine};
use super::words::{entries, field, variant};

/// The machine with a clock that the tables turn. The peer in question is `p`, the request is 1.
#[derive(Clone)]
pub(crate) struct Bench {
    m: Recovery<u32, &'static str>,
    now: Moment,
    describe: fn(&str) -> String,
}

impl Machine for Bench {
    fn again(&self) -> Self {
        self.clone()
    }

    fn state(&self) -> String {
        (self.describe)(&self.all())
    }

    fn all(&self) -> String {
        format!("{:?}", self.m)
    }

    fn counters(&self) -> Vec<String> {
        vec![format!("{:?}", self.m.stats())]
    }
}

fn line(directive: Directive<u32>) -> String {
    match directive {
        Directive::Retry { key, source, .. } => format!("retry {key}: {source:?}"),
        Directive::Recompute { key, .. } => format!("recompute {key}"),
        Directive::Fail { key, .. } => format!("fail {key}"),
    }
}

impl Bench {
    fn new(policy: Policy, describe: fn(&str) -> String) -> Self {
        // A wait between attempts that outlasts an open breaker would hide what that refuses.
        let config = RecoveryConfig { policy, open_after: 2, ..RecoveryConfig::default() };
        Self { m: Recovery::new(config).unwrap(), now: Moment::START, describe }
    }

    fn after(mut self, inputs: &[fn(&mut Self) -> Vec<String>]) -> Self {
        for input in inputs {
            input(&mut self);
        }
        self
    }

    fn step(&mut self) -> Moment {
        self.now = self.now + Duration::from_millis(1);
        self.now
    }

    fn fails(&mut self, facts: LoadFacts<u32, &'static str>) -> Vec<String> {
        let (now, mut out) = (self.step(), Vec::new());
        self.m.load_failed(now, facts, &mut out);
        out.into_iter().map(line).collect()
    }

    /// Looks at the machine at its next deadline, if it has one.
    fn deadline(&mut self) -> Vec<String> {
        let mut out = Vec::new();
        self.now = self.m.next_deadline().unwrap_or(self.now);
        self.m.time_passed(self.now, &mut out);
        out.into_iter().map(line).collect()
    }
}

fn facts(key: u32, reason: LoadFailure) -> LoadFacts<u32, &'static str> {
    LoadFacts {
        key,
        peer: "p",
        reason,
        tokens_valid: 0,
        tokens_wanted: 9,
        lease_alive: true,
        alternatives: Vec::new(),
    }
}

fn lost(b: &mut Bench) -> Vec<String> {
    b.fails(facts(9, LoadFailure::PeerLost))
}

fn fault(b: &mut Bench) -> Vec<String> {
    b.fails(facts(9, LoadFailure::ReadFailed))
}

fn admit(b: &mut Bench) -> Vec<String> {
    let now = b.step();
    vec![match b.m.admit(now, &"p") {
        Admission::Go => "go".to_owned(),
        Admission::Probe => "probe".to_owned(),
        Admission::Refuse { .. } => "refuse".to_owned(),
    }]
}

const PEER_INPUTS: &[Input<Bench>] = &[
    ("a load asks", admit),
    ("a load went well", |b| {
        let now = b.step();
        b.m.load_succeeded(now, &9, &"p");
        Vec::new()
    }),
    ("a load failed: peer lost", lost),
    ("a load failed: read failed", fault),
    ("a load failed: lapsed", |b| b.fails(facts(9, LoadFailure::Lapsed))),
    ("a load failed: bad blocks", |b| b.fails(facts(9, LoadFailure::BadBlocks))),
    ("its own limit passes", Bench::deadline),
];

fn peer_state(all: &str) -> String {
    let Some((_, peer)) = entries(field(all, &["peers", "entries"])).into_iter().next() else {
        return "unknown".to_owned();
    };
    let breaker = field(peer, &["breaker"]);
    match variant(breaker) {
        "Closed" if field(breaker, &["failures"]) != "0" => "Closed, one failure".to_owned(),
        name => name.to_owned(),
    }
}

/// The table of a peer.
pub(crate) fn peers() -> Chart<'static, Bench> {
    let new = || Bench::new(Policy::Recompute, peer_state);
    let well = PEER_INPUTS[1].1;
    Chart {
        file: "recovery-peer",
        package: env!("CARGO_PKG_NAME"),
        about: "\
A producer's breaker in the retry machine. Two failures in a row open it, or one if the producer is gone; what becomes
of the failed request itself is always `recompute` here, so that only the breaker's part is seen.",
        drawing: "
unknown --fault--> Closed --faults, or gone--> Open --its time is over--> HalfOpen --a load asks--> Probing
   ^                 | ^                        ^                          | | ^                     | |
   +------idle-------+ +-------an answer--------|--------------------------+-|-|------an answer------+ |
                                                +------a failure-------------+-|----a failure----------+
                                                                               +----no news-------------",
        states: vec![
            ("nothing", new()),
            ("a failure, a load that went well", new().after(&[fault, well])),
            ("a failure", new().after(&[fault])),
            ("peer lost", new().after(&[lost])),
            ("peer lost; its time is over", new().after(&[lost, Bench::deadline])),
            ("peer lost; its time is over; a load asks", new().after(&[lost, Bench::deadline, admit])),
        ],
        inputs: PEER_INPUTS,
    }
}

fn failed(b: &mut Bench) -> Vec<String> {
    b.fails(facts(1, LoadFailure::ReadFailed))
}

const REQUEST_INPUTS: &[Input<Bench>] = &[
    ("read failed", failed),
    ("read failed, the lease is over", |b| {
        b.fails(LoadFacts { lease_alive: false, ..facts(1, LoadFailure::ReadFailed) })
    }),
    ("peer lost", |b| b.fails(facts(1, LoadFailure::PeerLost))),
    ("peer lost, another holds the same", |b| {
        b.fails(LoadFacts { alternatives: vec!["q"], ..facts(1, LoadFailure::PeerLost) })
    }),
    ("lapsed", |b| b.fails(facts(1, LoadFailure::Lapsed))),
    ("lapsed, another holds the same", |b| {
        b.fails(LoadFacts { alternatives: vec!["q"], ..facts(1, LoadFailure::Lapsed) })
    }),
    ("cancelled", |b| b.fails(facts(1, LoadFailure::Cancelled))),
    ("the load went well", |b| {
        let now = b.step();
        b.m.load_succeeded(now, &1, &"p");
        Vec::new()
    }),
    ("the request goes away", |b| {
        let now = b.step();
        b.m.request_gone(now, &1);
        Vec::new()
    }),
    ("another request loses the peer; its own limit passes", |b| {
        lost(b);
        let Some(at) = b.m.waits_until(&1) else { return Vec::new() };
        let mut out = Vec::new();
        b.m.time_passed(at, &mut out);
        out.into_iter().map(line).collect()
    }),
    ("its own limit passes", |b| {
        // The peer's time may be over before the request's.
        let mut out = Vec::new();
        while out.is_empty() && b.m.request_count() > 0 {
            out = b.deadline();
        }
        out
    }),
];

fn request_state(all: &str) -> String {
    let Some((_, record)) = entries(field(all, &["requests"])).into_iter().next() else {
        return "unknown".to_owned();
    };
    match (variant(record), field(record, &["attempts"])) {
        ("Trying", n) => format!("Trying, retry {n}"),
        (name, "0") => name.to_owned(),
        (name, n) => format!("{name}, after retry {n}"),
    }
}

/// The table of a request.
pub(crate) fn requests() -> Chart<'static, Bench> {
    let new = || Bench::new(Policy::Retry, request_state);
    let first: &[fn(&mut Bench) -> Vec<String>] = &[failed, Bench::deadline, failed, Bench::deadline];
    Chart {
        file: "recovery-request",
        package: env!("CARGO_PKG_NAME"),
        about: "\
A request in the retry machine, under the policy `retry` that ends as `recompute`, with two retries at most. *unknown*
is also every request whose loads go well. Each input is a failed load of `p` unless it says something else; two
failures in a row open the breaker of `p`, as does its loss.",
        drawing: "
unknown --failed, p may help--> Waiting --its time has come--> Trying --well, gone, silent--> unknown
   ^ |                            |   ^                         ^ | |
   | +----failed, q may help------|---|-------------------------+ | +--failed, q may help--> Trying
   +-------recompute, gone--------+   +------failed, p may help---+",
        states: vec![
            ("nothing", new()),
            ("read failed", new().after(&first[..1])),
            ("read failed; its time has come", new().after(&first[..2])),
            ("lapsed, another holds the same", new().after(&[REQUEST_INPUTS[5].1, REQUEST_INPUTS[5].1])),
        ],
        inputs: REQUEST_INPUTS,
    }
}
