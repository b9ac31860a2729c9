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
unknown --announce--> Announced --grant--> Held --every reader ended, time over, --> Ended --remembered--> gone
                          |                       readers dead, or revoked           ^
                          +--forget--------------------------------------------------+";

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
        let wanted = variant(lease) != "Ended" && !entries(field(lease, &["wanted"])).is_empty();
        let lost = format!("{:?}", self.ledger).contains("lost: true");
        let wanted = match (wanted, lost) {
            (false, _) => "",
            (true, false) => ", wanted",
            (true, true) => ", wanted by one that is lost",
        };
        match entries(field(lease, &[inside])).len() {
            0 => format!("{}{wanted}", variant(lease)),
            count => format!("{}{wanted}, {count} {word}", variant(lease)),
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
        for (reader, _) in self.ledger.take_notices() {
            out.push(format!("tells {}: not held", name(reader)));
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
            told.filter(|_| ending != Ending::Released)
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

    fn reader(who: Who) -> Reader {
        Reader { incarnation: life(who.1), rank: Rank(who.2) }
    }

    /// A names the lease after `ms`.
    fn want(&mut self, ms: u64, offer: OfferDigest) -> Vec<String> {
        self.now += ms;
        self.step(|ledger, now| {
            let not_held = !ledger.want(now, Self::reader(A), &[(L, offer)]).is_empty();
            not_held.then(|| "not held".to_owned())
        })
    }

    fn of_a(&mut self, what: fn(&mut Ledger, kv_proto::Moment, Reader)) -> Vec<String> {
        self.step(|ledger, now| {
            what(ledger, now, Self::reader(A));
            None
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
    ("A: ReadDone, with more to come", |b| b.end(A, 1, Ending::ReadMore, OFFER)),
    ("A: ReadDone, another offer", |b| b.read(A, 1, OfferDigest::from_bytes([8; 16]))),
    ("A: Release", a_released),
    ("A: Release, then ReadDone", |b| [a_released(b), a_read(b)].concat()),
    ("B: ReadDone", b_read),
    ("B: Release", |b| b.end(B, 1, Ending::Released, OFFER)),
    ("A and B: ReadDone", |b| [a_read(b), b_read(b)].concat()),
    ("C: ReadDone", |b| b.read(C, 1, OFFER)),
    ("C: Release", |b| b.end(C, 1, Ending::Released, OFFER)),
    ("A: wants it", |b| b.want(0, OFFER)),
    ("A: wants it as another offer", |b| b.want(0, OfferDigest::from_bytes([8; 16]))),
    ("A: wants it no more", |b| b.of_a(|ledger, now, a| ledger.drop_wishes(now, a, &[(L, OFFER)]))),
    ("A: lives", |b| b.of_a(Ledger::heard)),
    ("A: begins its list anew", |b| b.of_a(Ledger::relisted)),
    ("A: has lost its last connection", |b| b.of_a(Ledger::reader_lost)),
    ("... for longer than the grace", |b| [b.of_a(Ledger::reader_lost), b.pass(TERMS.grace_ms)].concat()),
    ("revoke", |b| b.of_a(|ledger, now, _| ledger.revoke(now, L))),
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
            ("announce, wanted by A", new().after(&[announce, |b| b.want(0, OFFER)])),
            ("announce, grant, wanted by A", new().after(&[announce, grant, |b| b.want(0, OFFER)])),
            (
                "announce, grant, wanted by A, which lost its last connection",
                new().after(&[announce, grant, |b| b.want(0, OFFER), |b| b.of_a(Ledger::reader_lost)]),
            ),
            ("announce, grant, ReadDone of A", new().after(&[announce, grant, a_read])),
            ("announce, grant, time to live", new().after(&[announce, grant, ttl])),
            ("announce, grant, ReadDone of A and B", new().after(&[announce, grant, a_read, b_read])),
            ("announce, forget, time to remember", new().after(&[announce, forget, remembered])),
        ],
        inputs: INPUTS,
    }
}
