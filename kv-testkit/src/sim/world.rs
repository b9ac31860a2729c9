//! A simulated world: engines with their halves, a router, clients, a network, and time that jumps from event to
//! event.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::rc::Rc;

use kv_proto::RequestId;
use kv_proto::handshake::EngineCard;
use kv_worker::Failure;
use kv_worker::machine::io::SourceKey;
use serde_json::Value;

use super::canary::Canary;
use super::dice::Dice;
use super::digests::Digesting;
use super::engine::{Engine, Role};
use super::faults::{FaultKind, FaultPlan};
use super::invariants::{self, Invariant, Violation};
use super::links::Link;
use super::reads::Read;
use super::shape::{BLOCK_TOKENS, PROMPT_MAX_TOKENS, Shape};

/// Microseconds of the world's own time.
pub(super) type Time = u64;

/// One millisecond of the world's own time.
pub(super) const MS: Time = 1_000;
/// When faults stop and everything must heal.
pub(super) const HEAL_AT: Time = 6_000 * MS;
/// When everything must have ended: the longest chain of limits after the healing, with room.
const END_AT: Time = HEAL_AT + 30_000 * MS;
/// Most events of one world. More means that something goes round in circles.
const EVENTS_MAX: u64 = 400_000;

/// One worker process of one life of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WorkerAt {
    pub(super) engine: usize,
    pub(super) life: u32,
    pub(super) rank: usize,
}

impl fmt::Display for WorkerAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}.{}", self.engine, self.life, self.rank)
    }
}

/// Something that will happen.
#[derive(Debug, Clone)]
pub(super) enum Event {
    RequestAtP { engine: usize, request: usize, name: usize, kept: Option<Rc<Value>> },
    RequestAtD { engine: usize, request: usize, params: Rc<Value>, copy: u32 },
    ParamsAtRouter { producer: usize, request: usize, params: Rc<Value> },
    Tick { engine: usize, life: u32 },
    PlanAtWorker { at: WorkerAt },
    ReportAtScheduler { engine: usize, life: u32, report: Vec<u8>, again: bool },
    HandshakeAtP { from: WorkerAt, key: SourceKey, query: Vec<u8> },
    HandshakeAtD { to: WorkerAt, key: SourceKey, result: Result<Box<EngineCard>, Failure> },
    LinkAtP { link: u64 },
    LinkAtD { link: u64 },
    LinkGone { link: u64 },
    Message { link: u64, to_producer: bool, bytes: Vec<u8> },
    ReadPiece { read: u64 },
    ReadEnd { read: u64 },
    Digested(Box<Digesting>),
    Timer { at: WorkerAt },
    ClientGone { engine: usize, life: u32, id: RequestId },
    Die { engine: usize, back_after: Option<Time> },
    Return { engine: usize },
    Pause { engine: usize, process: usize, until: Time },
    ClockJump { engine: usize, process: usize, by: Time },
    Partition { from: usize, to: usize, until: Time },
    PoolPressed { engine: usize, until: Time },
    PoolEased { engine: usize, life: u32 },
    Drain { engine: usize, limit: Time, back_after: Time },
    Resume { engine: usize, life: u32 },
    Heal,
}

struct Scheduled {
    at: Time,
    number: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// How a world is run.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The guard that does not work, if any.
    pub canary: Option<Canary>,
    /// Tell the story.
    pub trace: bool,
    /// These faults instead of the seed's own.
    pub faults: Option<FaultPlan>,
    /// At most so many of the seed's requests.
    pub requests: Option<usize>,
}

/// What became of a world.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What could go wrong.
    pub faults: FaultPlan,
    /// What did go wrong, and how often.
    pub struck: BTreeMap<FaultKind, u64>,
    /// Promises that were broken; the first is the cause.
    pub violations: Vec<Violation>,
    /// Whether everything had ended and every block was free in the end.
    pub healed: bool,
    /// Requests in the world.
    pub requests: usize,
    /// Loads that ended well.
    pub loaded: u64,
    /// Loads that failed.
    pub failed: u64,
    /// Of these, how many kept blocks that had been read and confirmed before the failure.
    pub kept: u64,
    /// Loads that were begun again after a failure.
    pub retried: u64,
    /// Of these, how many ended well.
    pub recovered: u64,
    /// Loads that did not begin because their producer's breaker was open.
    pub refused: u64,
    /// Blocks that consumers took from their own prefix caches.
    pub cache_hits: u64,
    /// Loads of producers that ended well: of answers that consumers kept.
    pub read_back: u64,
    /// Events that happened.
    pub events: u64,
    /// The story, if it was asked for: times in milliseconds.
    pub story: Vec<(f64, String)>,
}

/// What a request of the world is about.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<u32>,
    /// The prompt that each token's content is first of: another one, as far as this one begins like it.
    pub(super) origin: Vec<usize>,
    pub(super) producer: usize,
    pub(super) consumer: usize,
    /// It has reached its producer.
    pub(super) sent: bool,
    /// What follows from it, where it is a turn of a conversation.
    pub(super) next: Option<Next>,
}

/// The next turn of a conversation, as two further prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Next {
    /// This turn's with what its consumer samples: never asked for, but kept.
    pub(super) kept: usize,
    /// What is asked next: the history, as the router has it, and new words.
    pub(super) turn: usize,
}

impl Prompt {
    /// It begins like an earlier prompt, as prompts with the same instructions do, and mostly goes to the same consumer.
    fn begin_like(&mut self, earlier: &[Self], draw: &mut Dice) {
        let Some(other) = earlier.get(draw.below(earlier.len() as u64) as usize) else { return };
        let most = self.tokens.len().min(other.tokens.len()) / BLOCK_TOKENS as usize;
        if most == 0 {
            return;
        }
        let blocks = draw.between(1, most as u64) as usize;
        let tokens = blocks * BLOCK_TOKENS as usize;
        self.tokens[..tokens].copy_from_slice(&other.tokens[..tokens]);
        self.origin[..tokens].copy_from_slice(&other.origin[..tokens]);
        if draw.chance(700) {
            self.consumer = other.consumer;
        }
    }
}

/// A further prompt of a conversation: these tokens, which are as in another prompt before the first `same`.
fn follow_up(prompts: &mut Vec<Prompt>, like: usize, tokens: Vec<u32>, same: usize) -> usize {
    let number = prompts.len();
    let mut origin = vec![number; tokens.len()];
    origin[..same].copy_from_slice(&prompts[like].origin[..same]);
    let next = Prompt { tokens, origin, next: None, sent: false, ..prompts[like].clone() };
    prompts.push(next);
    number
}

/// Some prompts are the first turns of conversations. Of a few of these the history is changed on its way.
fn converse(prompts: &mut Vec<Prompt>, producers: u64, draw: &mut Dice) {
    for first in 0..prompts.len() {
        let sampled = draw.between(1, 5) as u32;
        let said = draw.between(1, 4) as u32;
        let (edit, at, producer) = (draw.below(8), draw.below(64) as usize, draw.below(producers) as usize);
        let all = prompts[first].tokens.len() as u32 + sampled + said + 1;
        if !draw.chance(600) || all > PROMPT_MAX_TOKENS {
            continue;
        }
        let number = prompts.len() as u32;
        let mut history = prompts[first].tokens.clone();
        let asked = history.len();
        history.extend((0..sampled).map(|i| 50_000 + number * 100 + i));
        let kept = follow_up(prompts, first, history.clone(), asked);
        let at = at % history.len();
        match edit {
            0 => history[at] += 9_000,
            1 => history.insert(at, 90_000),
            2 => drop(history.drain(at..=at)),
            _ => {}
        }
        let same = prompts[kept].tokens.iter().zip(&history).take_while(|(kept, now)| kept == now).count();
        history.extend((0..said).map(|i| 60_000 + number * 100 + i));
        let turn = follow_up(prompts, kept, history, same);
        prompts[turn].producer = producer;
        prompts[first].next = Some(Next { kept, turn });
    }
}

/// The world.
pub(super) struct World {
    pub(super) now: Time,
    pub(super) dice: Dice,
    fault_dice: BTreeMap<FaultKind, Dice>,
    pub(super) faults: FaultPlan,
    struck: BTreeMap<FaultKind, u64>,
    pub(super) canary: Option<Canary>,
    pub(super) engines: Vec<Engine>,
    pub(super) prompts: Vec<Prompt>,
    pub(super) links: BTreeMap<u64, Link>,
    pub(super) reads: BTreeMap<u64, Read>,
    pub(super) partitions: BTreeMap<(usize, usize), Time>,
    /// Parameters that the router has seen: of which producer, for which prompt.
    pub(super) routed: Vec<(usize, usize, Rc<Value>)>,
    /// Memories of former lives, for reads that a dead process cannot stop.
    pub(super) graveyard: BTreeMap<WorkerAt, Vec<u64>>,
    /// Whether the transport of this world reads from dead processes' memory, as shared memory does.
    pub(super) reads_outlive_owner: bool,
    /// Whether loads count only if P found the digests of their blocks equal to its own.
    pub(super) checksums: bool,
    pub(super) next_id: u64,
    queue: BinaryHeap<Reverse<Scheduled>>,
    next_event: u64,
    events: u64,
    pub(super) violations: Vec<Violation>,
    pub(super) loaded: u64,
    pub(super) failed: u64,
    pub(super) kept: u64,
    pub(super) retried: u64,
    pub(super) recovered: u64,
    pub(super) refused: u64,
    pub(super) cache_hits: u64,
    pub(super) read_back: u64,
    trace: bool,
    story: Vec<(f64, String)>,
    seed: u64,
}

/// Runs one world from its seed to its end.
pub fn run(seed: u64, settings: &Settings) -> Outcome {
    let mut world = World::new(seed, settings);
    world.play();
    world.outcome()
}

impl World {
    fn new(seed: u64, settings: &Settings) -> Self {
        let mut dice = Dice::new(seed);
        let mut draw = dice.split();
        let mut fault_source = dice.split();
        let fault_dice = FaultKind::ALL.iter().map(|kind| (*kind, fault_source.split())).collect();
        let drawn = FaultPlan::draw(&mut fault_source);
        let faults = settings.faults.clone().unwrap_or(drawn);
        let checksums = draw.chance(400);
        // Digests can be compared only of blocks that are the same byte for byte.
        let alike = checksums || draw.chance(300);
        let [of_p, of_d] = Shape::draw(&mut draw, alike);
        let (producers, consumers) = (draw.between(1, 2) as usize, draw.between(1, 3) as usize);
        let mut engines = Vec::new();
        for index in 0..producers + consumers {
            let (role, shape) =
                if index < producers { (Role::Producer, of_p) } else { (Role::Consumer, of_d) };
            engines.push(Engine::new(role, shape, &mut draw));
        }
        let requests = draw.between(2, 12) as usize;
        let mut prompts: Vec<Prompt> = Vec::new();
        for number in 0..requests {
            let mut prompt = Prompt {
                // Where there is a state the last token is never the producer's.
                tokens: (0..draw
                    .between(1, PROMPT_MAX_TOKENS.into())
                    .max(2 - u64::from(of_d.asked_of_producer(1))))
                    .map(|i| (number as u32 + 1) * 100 + i as u32)
                    .collect(),
                origin: Vec::new(),
                producer: draw.below(producers as u64) as usize,
                consumer: producers + draw.below(consumers as u64) as usize,
                sent: false,
                next: None,
            };
            prompt.origin = vec![number; prompt.tokens.len()];
            if draw.chance(500) {
                prompt.begin_like(&prompts, &mut draw);
            }
            prompts.push(prompt);
        }
        // Of a window or a state what was kept is the end alone, which a changed history has no use for.
        if of_d.odd.is_none() && draw.chance(500) {
            converse(&mut prompts, producers as u64, &mut draw);
        }
        let reads_outlive_owner = draw.chance(400);
        // Without checksums a transport that corrupts is outside of the promise.
        let faults = if checksums { faults } else { faults.without(FaultKind::ReadCorrupt) };
        let mut world = Self {
            now: 0,
            dice,
            fault_dice,
            faults,
            struck: BTreeMap::new(),
            canary: settings.canary,
            engines,
            prompts,
            links: BTreeMap::new(),
            reads: BTreeMap::new(),
            partitions: BTreeMap::new(),
            routed: Vec::new(),
            graveyard: BTreeMap::new(),
            reads_outlive_owner,
            checksums,
            next_id: 1,
            queue: BinaryHeap::new(),
            next_event: 0,
            events: 0,
            violations: Vec::new(),
            loaded: 0,
            failed: 0,
            kept: 0,
            retried: 0,
            recovered: 0,
            refused: 0,
            cache_hits: 0,
            read_back: 0,
            trace: settings.trace,
            story: Vec::new(),
            seed,
        };
        for engine in 0..world.engines.len() {
            world.start_engine(engine);
        }
        let kept = settings.requests.unwrap_or(requests).min(requests);
        for request in 0..requests {
            let at = draw.between(1, 2_500) * MS;
            if request < kept {
                let engine = world.prompts[request].producer;
                world.at(at, Event::RequestAtP { engine, request, name: request, kept: None });
            }
        }
        world.draw_disasters(&mut draw);
        world.at(HEAL_AT, Event::Heal);
        world
    }

    /// Faults that strike an engine as a whole.
    fn draw_disasters(&mut self, draw: &mut Dice) {
        for engine in 0..self.engines.len() {
            let when = draw.between(50, 3_500) * MS;
            let after = if draw.chance(400) { draw.between(5, 60) } else { draw.between(60, 800) } * MS;
            let process = draw.below(self.engines[engine].ranks as u64 + 1) as usize;
            if self.strikes(FaultKind::Restart) {
                self.at(when, Event::Die { engine, back_after: Some(after) });
            }
            if self.strikes(FaultKind::Crash) {
                self.at(when + 300 * MS, Event::Die { engine, back_after: None });
            }
            if self.strikes(FaultKind::Pause) {
                let until = when + 700 * MS + after;
                self.at(when, Event::Pause { engine, process, until });
            }
            if self.strikes(FaultKind::ClockJump) {
                self.at(when, Event::ClockJump { engine, process, by: 400 * MS + after });
            }
            if self.strikes(FaultKind::PoolPressure) {
                let until = when + 100 * MS + 4 * after;
                self.at(when, Event::PoolPressed { engine, until });
            }
            if self.strikes(FaultKind::Drained) {
                let (limit, back_after) = (draw.below(600) * MS, after + 300 * MS);
                self.at(when, Event::Drain { engine, limit, back_after });
            }
            let other = draw.below(self.engines.len() as u64) as usize;
            if other != engine && self.strikes(FaultKind::OneWayPartition) {
                let until = when + after + 200 * MS;
                self.at(when, Event::Partition { from: engine, to: other, until });
            }
        }
    }

    /// Throws for a fault; counts it if it strikes. After the healing nothing strikes.
    pub(super) fn strikes(&mut self, kind: FaultKind) -> bool {
        let Some(dice) = self.fault_dice.get_mut(&kind) else { return false };
        let struck = self.faults.strikes(kind, dice) && self.now < HEAL_AT;
        if struck {
            *self.struck.entry(kind).or_default() += 1;
        }
        struck
    }

    pub(super) fn has(&self, canary: Canary) -> bool {
        self.canary == Some(canary)
    }

    pub(super) fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn at(&mut self, at: Time, event: Event) {
        let number = self.next_event;
        self.next_event += 1;
        self.queue.push(Reverse(Scheduled { at: at.max(self.now), number, event }));
    }

    pub(super) fn after(&mut self, wait: Time, event: Event) {
        self.at(self.now + wait, event);
    }

    pub(super) fn tell(&mut self, what: impl FnOnce() -> String) {
        if self.trace {
            self.story.push((self.now as f64 / MS as f64, what()));
        }
    }

    pub(super) fn violate(&mut self, invariant: Invariant, what: String) {
        self.tell(|| format!("VIOLATION of {}: {what}", invariant.name()));
        self.violations.push(Violation { invariant, at_ms: self.now as f64 / MS as f64, what });
    }

    fn play(&mut self) {
        while let Some(Reverse(next)) = self.queue.pop() {
            if next.at > END_AT || self.events >= EVENTS_MAX || !self.violations.is_empty() {
                break;
            }
            self.now = next.at;
            self.events += 1;
            self.happen(next.event);
        }
        if self.violations.is_empty() {
            if self.events >= EVENTS_MAX {
                self.violate(Invariant::NoHang, format!("{EVENTS_MAX} events and no end"));
            }
            self.now = self.now.max(HEAL_AT);
            invariants::at_end(self);
        }
    }

    /// From now on nothing fails any more, and who is away comes back.
    fn heal(&mut self) {
        self.tell(|| "faults stop".to_owned());
        self.partitions.clear();
        for engine in 0..self.engines.len() {
            if !self.engines[engine].alive {
                self.after(MS, Event::Return { engine });
            }
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::RequestAtP { engine, request, name, kept } => {
                self.request_at_p(engine, request, name, kept.as_ref());
            }
            Event::RequestAtD { engine, request, params, copy } => {
                self.request_at_d(engine, request, &params, copy)
            }
            Event::ParamsAtRouter { producer, request, params } => {
                self.params_at_router(producer, request, &params)
            }
            Event::Tick { engine, life } => self.tick(engine, life),
            Event::PlanAtWorker { at } => self.plan_at_worker(at),
            Event::ReportAtScheduler { engine, life, report, again } => {
                self.report_at_scheduler(engine, life, &report, again)
            }
            Event::HandshakeAtP { from, key, query } => self.handshake_at_p(from, key, query),
            Event::HandshakeAtD { to, key, result } => self.handshake_at_d(to, key, result),
            Event::LinkAtP { link } => self.link_at_p(link),
            Event::LinkAtD { link } => self.link_at_d(link),
            Event::LinkGone { link } => self.link_gone(link),
            Event::Message { link, to_producer, bytes } => self.message(link, to_producer, bytes),
            Event::ReadPiece { read } => self.read_piece(read),
            Event::ReadEnd { read } => self.read_end(read),
            Event::Digested(ended) => self.digested(ended),
            Event::Timer { at } => self.timer(at),
            Event::ClientGone { engine, life, id } => self.client_gone(engine, life, &id),
            Event::Die { engine, back_after } => self.die(engine, back_after),
            Event::Return { engine } => self.come_back(engine),
            Event::Pause { engine, process, until } => self.pause(engine, process, until),
            Event::ClockJump { engine, process, by } => self.clock_jump(engine, process, by),
            Event::PoolPressed { engine, until } => self.press_pool(engine, until),
            Event::PoolEased { engine, life } => self.ease_pool(engine, life),
            Event::Drain { engine, limit, back_after } => self.drain(engine, limit, back_after),
            Event::Resume { engine, life } => self.resume(engine, life),
            Event::Heal => self.heal(),
            Event::Partition { from, to, until } => {
                if self.now < HEAL_AT {
                    self.tell(|| format!("nothing passes from engine {from} to {to} for a while"));
                    self.partitions.insert((from, to), until);
                }
            }
        }
    }

    /// Whether something sent now from one engine to another arrives.
    pub(super) fn passes(&self, from: usize, to: usize) -> bool {
        self.partitions.get(&(from, to)).is_none_or(|until| *until <= self.now)
    }

    fn outcome(self) -> Outcome {
        Outcome {
            seed: self.seed,
            healed: self.violations.is_empty(),
            faults: self.faults,
            struck: self.struck,
            violations: self.violations,
            requests: self.prompts.len(),
            loaded: self.loaded,
            failed: self.failed,
            kept: self.kept,
            retried: self.retried,
            recovered: self.recovered,
            refused: self.refused,
            cache_hits: self.cache_hits,
            read_back: self.read_back,
            events: self.events,
            story: self.story,
        }
    }
}
