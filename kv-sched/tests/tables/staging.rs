//! The table of host staging.

use kv_proto::{BlockList, CopyFailure, CopyId, CopyNews, CopyStats, LeaseId, LoadId, Rank};
use kv_sched::{DeviceVerdict, HoldId, StagedBlocks, Staging, StagingConfig, StagingEvent};

use super::chart::{Chart, Input, Machine};
use super::common::{GRACE_MS, at, run};
use super::words::{entries, field, variant};

const ABOUT: &str = "\
Host staging of one request in `kv-sched`, on an engine of two ranks with a host pool of 4 blocks. The request has 3 blocks
on the device, 10 to 12, which hold the places 2 to 4 of its sequence. *free* is what is left of the host pool; where
the request waits, another has all of it, whose load is under way.";

const DRAWING: &str = "
Waiting --room--> Saving --every rank done--> Saved --lease granted--> Held --lease over--> over
   |                 +--failed, late, given up--> Leaving --every rank over--> over
   |                                                 +--ranks silent--> Silent --every rank over--> over
   +--room--> Loading --load confirmed--> Restoring --every rank done--> over
                 +--given up--> Held         +--failed, late, given up--> Leaving";

const ROOM_MS: u64 = 1_000;
const COPY_MS: u64 = 5_000;
const STEP_MS: u64 = 10;
const LEASE: HoldId = HoldId::Lease(LeaseId(7));
const LOAD: HoldId = HoldId::Load(LoadId(9));

pub(crate) struct Bench {
    s: Staging,
    now: u64,
    /// The request's.
    copy: CopyId,
}

impl Machine for Bench {
    fn again(&self) -> Self {
        Self { s: self.s.clone(), now: self.now, copy: self.copy }
    }

    fn state(&self) -> String {
        let all = self.all();
        let records = entries(field(&all, &["records"]));
        let ours = format!("{:?}", self.copy);
        let state = match records.iter().find(|(copy, _)| *copy == ours) {
            Some((_, record)) => describe(record),
            None => "over".to_owned(),
        };
        format!("{state}, {} free", 4 - self.s.host_blocks_held())
    }

    fn all(&self) -> String {
        format!("{:?}", self.s)
    }

    fn counters(&self) -> Vec<String> {
        vec![format!("{:?}", self.s.stats())]
    }
}

fn describe(record: &str) -> String {
    let name = variant(record);
    let ranks = |text: &str| match entries(field(text, &["ranks"])).len() {
        2 => String::new(),
        left => format!(", {} of 2 over", 2 - left),
    };
    match name {
        "Waiting" => format!("Waiting ({})", field(record, &["way"])),
        "Saving" | "Restoring" | "Leaving" => {
            // A tuple of one structure: what stands between its brackets is that.
            let copying = record.strip_prefix(name).unwrap().trim_start_matches('(').trim_end_matches(')');
            format!("{name}{}", ranks(copying))
        }
        "Silent" => format!("Silent{}", ranks(record)),
        "Held" => format!("Held by a {}", variant(field(record, &["hold"])).to_lowercase()),
        other => other.to_owned(),
    }
}

fn event(event: &StagingEvent) -> String {
    let ids = |host: &[StagedBlocks]| {
        let all = host.iter().flat_map(|staged| staged.blocks.iter());
        all.map(|block| block.0.to_string()).collect::<Vec<_>>().join(" ")
    };
    match event {
        StagingEvent::RoomGiven { host, .. } => format!("room given: {}", ids(host)),
        StagingEvent::Saved { host, .. } => format!("saved: {}", ids(host)),
        StagingEvent::Restored { .. } => "restored".to_owned(),
        StagingEvent::Failed { failure, busy, .. } => {
            format!(
                "failed ({}){}",
                variant(&format!("{failure:?}")),
                if *busy { ", device held" } else { "" }
            )
        }
        StagingEvent::Over { .. } => "device blocks free".to_owned(),
        StagingEvent::RanksSilent { missing, .. } => format!("silent: {missing:?}"),
    }
}

fn blocks(first: u32, count: u32) -> Vec<StagedBlocks> {
    vec![StagedBlocks { first: 2, blocks: run(first, count) }]
}

impl Bench {
    fn new() -> Self {
        let limit = std::time::Duration::from_millis;
        let config = StagingConfig {
            ranks: 2,
            groups: 1,
            device_blocks: 100,
            host_blocks: 4,
            room_limit: limit(ROOM_MS),
            copy_limit: limit(COPY_MS),
            report_grace: limit(GRACE_MS),
        };
        Self { s: Staging::new(config).unwrap(), now: 0, copy: CopyId(1) }
    }

    fn after(mut self, inputs: &[fn(&mut Self) -> Vec<String>]) -> Self {
        for input in inputs {
            input(&mut self);
        }
        self
    }

    /// Calls the machine, and adds orders and events to its answer.
    fn step(&mut self, call: impl FnOnce(&mut Staging, kv_proto::Moment) -> Option<String>) -> Vec<String> {
        self.now += STEP_MS;
        let mut out: Vec<String> = call(&mut self.s, at(self.now)).into_iter().collect();
        for order in self.s.take_orders() {
            let list = |list: &BlockList| list.iter().map(|b| b.0.to_string()).collect::<Vec<_>>().join(" ");
            let parts: Vec<String> =
                order.groups.iter().map(|g| format!("{}/{}", list(&g.device), list(&g.host))).collect();
            out.push(format!("`{}` {}", order.way.name(), parts.join(", ")));
        }
        out.extend(self.s.take_events().iter().map(event));
        out
    }

    fn pass(&mut self, ms: u64) -> Vec<String> {
        self.now += ms;
        self.step(|s, now| {
            s.time_passed(now);
            None
        })
    }

    fn news(&mut self, rank: u32, news: CopyNews) -> Vec<String> {
        let copy = self.copy;
        self.step(|s, now| {
            s.news(now, Rank(rank), copy, news);
            None
        })
    }

    fn let_go(&mut self, hold: Option<HoldId>) -> Vec<String> {
        let copy = self.copy;
        self.step(|s, now| {
            Some(match s.let_go(now, copy, hold) {
                Ok(DeviceVerdict::Free) => "device free".to_owned(),
                Ok(DeviceVerdict::Hold) => "device held".to_owned(),
                Err(error) => format!("refused: {error}"),
            })
        })
    }

    fn restore(&mut self, end: u32) -> Vec<String> {
        let copy = self.copy;
        self.step(|s, now| match s.restore(now, copy, end) {
            Ok(true) => None,
            Ok(false) => Some("nothing to copy".to_owned()),
            Err(error) => Some(format!("refused: {error}")),
        })
    }
}

fn done_0(b: &mut Bench) -> Vec<String> {
    b.news(0, CopyNews::Done(CopyStats::default()))
}

fn done_1(b: &mut Bench) -> Vec<String> {
    b.news(1, CopyNews::Done(CopyStats::default()))
}

fn failed(b: &mut Bench) -> Vec<String> {
    b.news(0, CopyNews::Failed { reason: CopyFailure::Device, detail: "broken".into() })
}

fn refused<T, E: std::fmt::Display>(result: Result<T, E>) -> Option<String> {
    result.err().map(|error| format!("refused: {error}"))
}

fn save(b: &mut Bench) -> Vec<String> {
    b.step(|s, now| refused(s.save(now, blocks(10, 3))))
}

fn room(b: &mut Bench) -> Vec<String> {
    b.step(|s, now| refused(s.room(now, blocks(10, 3))))
}

/// Another has all of the room, and its load is under way.
fn full(b: &mut Bench) -> Vec<String> {
    b.copy = CopyId(2);
    b.step(|s, now| refused(s.room(now, blocks(50, 4))))
}

fn other_lets_go(b: &mut Bench) -> Vec<String> {
    let other = CopyId(b.copy.0 - 1);
    b.step(|s, now| refused(s.let_go(now, other, None)))
}

fn loaded(b: &mut Bench) -> Vec<String> {
    b.restore(u32::MAX)
}

fn late(b: &mut Bench) -> Vec<String> {
    b.pass(COPY_MS)
}

fn grace(b: &mut Bench) -> Vec<String> {
    b.pass(COPY_MS + GRACE_MS)
}

fn give_up(b: &mut Bench) -> Vec<String> {
    b.let_go(None)
}

fn held(b: &mut Bench) -> Vec<String> {
    b.let_go(Some(LEASE))
}

const INPUTS: &[Input<Bench>] = &[
    ("rank 0: done", done_0),
    ("rank 0: done, twice", |b| [done_0(b), done_0(b)].concat()),
    ("rank 1: done", done_1),
    ("rank 0: failed", failed),
    ("rank 0: late", |b| b.news(0, CopyNews::Late)),
    ("rank 0: late, then done", |b| [b.news(0, CopyNews::Late), done_0(b)].concat()),
    ("rank 2, which is not: done", |b| b.news(2, CopyNews::Done(CopyStats::default()))),
    ("rank 0: done, a copy that is not", |b| {
        b.step(|s, now| {
            s.news(now, Rank(0), CopyId(99), CopyNews::Late);
            None
        })
    }),
    ("let go", give_up),
    ("let go, held by the lease", held),
    ("let go, held by the load", |b| b.let_go(Some(LOAD))),
    ("the lease is over", |b| {
        b.step(|s, now| {
            s.released(now, LEASE);
            None
        })
    }),
    ("loaded whole", loaded),
    ("loaded, 1 block good", |b| b.restore(3)),
    ("loaded, no block good", |b| b.restore(2)),
    ("the other lets go", other_lets_go),
    ("another asks for 2 blocks", |b| b.step(|s, now| refused(s.room(now, blocks(50, 2))))),
    ("the limit of waiting passes", |b| b.pass(ROOM_MS)),
    ("the limit of a copy passes", late),
    ("that and the grace pass", grace),
];

pub(crate) fn chart() -> Chart<'static, Bench> {
    let new = Bench::new;
    Chart {
        file: "staging",
        package: env!("CARGO_PKG_NAME"),
        about: ABOUT,
        drawing: DRAWING,
        states: vec![
            ("to be saved, another has the room", new().after(&[full, save])),
            ("to be loaded, another has the room", new().after(&[full, room])),
            ("to be saved", new().after(&[save])),
            ("to be saved, rank 0 done", new().after(&[save, done_0])),
            ("saved", new().after(&[save, done_0, done_1])),
            ("saved and handed over", new().after(&[save, done_0, done_1, held])),
            ("to be loaded", new().after(&[room])),
            ("loaded", new().after(&[room, loaded])),
            ("loaded, rank 1 done", new().after(&[room, loaded, done_1])),
            ("given up while it is saved", new().after(&[save, give_up])),
            ("rank 0 failed", new().after(&[save, failed])),
            ("late, and the grace over", new().after(&[save, late, grace])),
            ("over", new().after(&[save, done_0, done_1, give_up])),
        ],
        inputs: INPUTS,
    }
}
