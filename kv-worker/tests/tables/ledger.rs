//! The ledger's table.

use kv_proto::{Attempt, LeaseId, OfferDigest, Rank};
use kv_worker::machine::ledger::{Answer, Ending, Ledger, Reader, ReaderEnding};

use super::chart::{Chart, Input, Machine};
use super::common::{OFFER, REMEMBER_MS, TERMS, at, life, ms};
use super::words::{entries, field, variant};

const ABOUT: &str = "\
One lease in the ledger of a producer's worker, which alone says whether a read counts. The consumer in question has two
ranks that read here, A and B, so that both must end the lease; C is the only reader of another consumer.";

const DRAWING: &str = "
unknown --announce--> Announced --grant--> Held --every reader ended, or time over--> Ended --remembered--> gone
                          |                                                             ^
                          +--forget-----------------------------------------------------+";

const L: LeaseId = LeaseId(7);
/// Time between two inputs.
const STEP_MS: u64 = 10;

#[derive(Clone)]
pub(crate) struct Bench {
    ledger: Ledger,
    now: u64,
}

impl Machine for Bench {
    fn again(&self) -> Self {
        self.clone()
    }

    fn state(&self) -> String {
        let all = self.all();
        let Some((_, lease)) = entries(field(&all, &["leases"])).into_iter().next() else {
            return if field(&all, &["next"]) == "0" { "unknown" } else { "gone" }.to_owned();
        };
        let (inside, word) = match variant(lease) {
            "Announced" => ("early", "early"),
            "Held" => ("ends", "ended"),
            _ => ("confirmed", "confirmed"),
        };
        match entries(field(lease, &[inside])).len() {
            0 => variant(lease).to_owned(),
            count => format!("{}, {count} {word}", variant(lease)),
        }
    }

    fn all(&self) -> String {
        format!("{:?}", self.ledger)
    }

    fn counters(&self) -> Vec<String> {
        vec![format!("{:?}", self.ledger.stats())]
    }
}

/// A reader: its name, its consumer's life, its rank, and how many readers its consumer has here.
type Who = (&'static str, u64, u32, u32);

const A: Who = ("A", 1, 0, 2);
const B: Who = ("B", 1, 1, 2);
const C: Who = ("C", 2, 0, 1);

fn name(reader: Reader) -> &'static str {
    let found =
        [A, B, C].into_iter().find(|who| (life(who.1), Rank(who.2)) == (reader.incarnation, reader.rank));
    found.unwrap().0
}

fn answer(answer: Answer) -> &'static str {
    match answer {
        Answer::Confirmed => "Confirmed",
        Answer::Lapsed => "Lapsed",
    }
}

impl Bench {
    fn new() -> Self {
        Self { ledger: Ledger::new(ms(REMEMBER_MS)), now: 0 }
    }

    fn after(mut self, inputs: &[fn(&mut Self) -> Vec<String>]) -> Self {
        for input in inputs {
            input(&mut self);
        }
        self
    }

    fn step(&mut self, what: impl FnOnce(&mut Ledger, kv_proto::Moment) -> Option<String>) -> Vec<String> {
        self.now += STEP_MS;
        let mut out: Vec<String> = what(&mut self.ledger, at(self.now)).into_iter().collect();
        for late in self.ledger.take_late_answers() {
            out.push(format!("late answer to {}: {}", name(late.reader), answer(late.answer)));
        }
        for (_, end) in self.ledger.take_ended() {
            out.push(format!("reports {}", end.name()));
        }
        out
    }

    fn read(&mut self, who: Who, attempt: u64, offer: OfferDigest) -> Vec<String> {
        self.end(who, attempt, Ending::ReadDone, offer)
    }

    fn end(&mut self, who: Who, attempt: u64, ending: Ending, offer: OfferDigest) -> Vec<String> {
        let (name, incarnation, rank, expected) = who;
        let reader = Reader { incarnation: life(incarnation), rank: Rank(rank) };
        let attempt = Attempt(attempt);
        self.step(|ledger, now| {
            let told = ledger.ending(now, L, ReaderEnding { reader, attempt, ending, expected, offer });
            // A release is not answered.
            told.filter(|_| ending == Ending::ReadDone)
                .map(|told| format!("answer to {name}: {}", answer(told)))
        })
    }

    fn pass(&mut self, ms: u64) -> Vec<String> {
        self.now += ms;
        self.step(|ledger, now| {
            ledger.time_passed(now);
            None
        })
    }

    /// Renewal after `ms`, when the lease has yet to live.
    fn renew(&mut self, ms: u64) -> Vec<String> {
        self.now += ms;
        self.step(|ledger, now| {
            let before = ledger.next_deadline();
            let not_held = !ledger.renew(now, &[L]).is_empty();
            let moved = ledger.next_deadline().filter(|after| Some(*after) != before);
            let left = moved.map(|until| format!("lives for {} ms from now", until.since(now).as_millis()));
            left.or(not_held.then(|| "not held".to_owned()))
        })
    }
}

fn announce(b: &mut Bench) -> Vec<String> {
    b.step(|ledger, _| {
        ledger.announce(L);
        None
    })
}

fn grant(b: &mut Bench) -> Vec<String> {
    b.step(|ledger, now| {
        ledger.grant(now, L, TERMS, OFFER);
        None
    })
}

fn forget(b: &mut Bench) -> Vec<String> {
    b.step(|ledger, now| {
        ledger.forget(now, L);
        None
    })
}

fn a_read(b: &mut Bench) -> Vec<String> {
    b.read(A, 1, OFFER)
}

fn a_read_again(b: &mut Bench) -> Vec<String> {
    b.read(A, 2, OFFER)
}

fn b_read(b: &mut Bench) -> Vec<String> {
    b.read(B, 1, OFFER)
}

fn a_released(b: &mut Bench) -> Vec<String> {
    b.end(A, 1, Ending::Released, OFFER)
}

fn ttl(b: &mut Bench) -> Vec<String> {
    b.pass(TERMS.ttl_ms)
}

fn remembered(b: &mut Bench) -> Vec<String> {
    b.pass(REMEMBER_MS)
}

const INPUTS: &[Input<Bench>] = &[
    ("announce", announce),
    ("grant", grant),
    ("forget", forget),
    ("A: ReadDone, attempt 1", a_read),
    ("A: ReadDone, attempt 1, twice", |b| [a_read(b), a_read(b)].concat()),
    ("A: ReadDone, attempt 2", a_read_again),
    ("A: ReadDone, attempts 1 and 2", |b| [a_read(b), a_read_again(b)].concat()),
    ("A: ReadDone, another offer", |b| b.read(A, 1, OfferDigest::from_bytes([8; 16]))),
    ("A: Release", a_released),
    ("A: Release, then ReadDone", |b| [a_released(b), a_read(b)].concat()),
    ("B: ReadDone", b_read),
    ("B: Release", |b| b.end(B, 1, Ending::Released, OFFER)),
    ("A and B: ReadDone", |b| [a_read(b), b_read(b)].concat()),
    ("C: ReadDone", |b| b.read(C, 1, OFFER)),
    ("C: Release", |b| b.end(C, 1, Ending::Released, OFFER)),
    ("renew at once", |b| b.renew(0)),
    ("renew after half its time", |b| b.renew(TERMS.ttl_ms / 2)),
    ("time to live passes", ttl),
    ("time to remember passes", remembered),
];

pub(crate) fn chart() -> Chart<'static, Bench> {
    let new = || Bench::new();
    Chart {
        file: "ledger",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT,
        drawing: DRAWING,
        states: vec![
            ("nothing", new()),
            ("announce", new().after(&[announce])),
            ("announce, ReadDone of A", new().after(&[announce, a_read])),
            (
                "announce, ReadDone of A in attempt 1, then Release of A in attempt 0",
                new().after(&[announce, a_read, |b| b.end(A, 0, Ending::Released, OFFER)]),
            ),
            ("announce, grant", new().after(&[announce, grant])),
            ("announce, grant, ReadDone of A", new().after(&[announce, grant, a_read])),
            ("announce, grant, time to live", new().after(&[announce, grant, ttl])),
            ("announce, grant, ReadDone of A and B", new().after(&[announce, grant, a_read, b_read])),
            ("announce, forget, time to remember", new().after(&[announce, forget, remembered])),
        ],
        inputs: INPUTS,
    }
}
