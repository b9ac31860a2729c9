//! An explorer: the real machines of one producer and one consumer, and *every* order in which a few things can happen.
//!
//! Breadth first, so that the first way to a violation is a shortest one. A state is everything: both scheduler halves,
//! all workers, what is under way between them, what blocks hold. Two states are one if they have the same name of 128
//! bits (see `pool.rs`): at a thousand million states the probability that any two were mistaken for one is 10⁻²⁰.
//!
//! What may happen at each point: a plan, a report or a message arrives (messages in any order); a message is lost or
//! arrives twice; a read ends, with checksums perhaps with wrong bytes; a connection breaks; time jumps to the next deadline of anybody; P finishes a request, its router tells
//! D, D allocates, a client goes away or the router drops what it carries; P or D dies and comes back at the same
//! address as another life. How often each may happen is a [`Bounds`], which also says how many faults one story has
//! in all.
//!
//! What is checked: a good load holds what was offered, on every rank; nothing writes a block of D that is not the
//! load's own; no block is freed twice; no load ends that nobody waits for. And wherever nothing happens by itself any
//! more: if nothing was lost and no time has passed, nothing is held and nobody waits; and in any case, once the faults
//! stop, time alone brings everything to rest, with every block free and every table empty.
//!
//! What is not explored, and why that loses nothing or what it loses:
//!
//! - A read's bytes are copied when it ends. P's blocks only ever turn from right to wrong, and D's only from a load's
//!   own to another's, so that the last moment is the worst.
//! - P's scheduler half hears reports at once. It only frees blocks then, and the sooner the worse.
//! - Between a scheduler half and its workers some things arrive at once, see [`Inside`]: **a bound**. If D's plans do,
//!   no rank begins to load long after another one; all else that a late plan can bring about comes about by late
//!   messages and reports as well. If P's plans do, no ending comes before its grant; if D's reports do, no client
//!   leaves between a load's end and the word of it.
//! - The two requests are alike: P finishes the first of them first.
//! - Handshakes take no time, and a connection that is asked for stands at once; greetings are messages like all
//!   others: **a bound**. A broken connection is noticed on both sides at once: **a bound**; half-open ones are the
//!   simulator's business.
//! - Time stands still but for jumps to the next deadline, which everybody notices together: **a bound**.
//!
//! The story begins when the two engines have greeted each other, unless [`Bounds::greeted`] is not set.

mod action;
mod calm;
mod machines;
mod mutant;
mod pool;
mod setup;
mod turn;
mod world;

pub use mutant::Mutant;

use action::Action;
use calm::Healing;
use machines::Machines;
use pool::{Seen, name_of};
use turn::{Turn, first_world};
use world::{Left, Rules, World};

/// What takes time between a scheduler half and its workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inside {
    /// Nothing: plans and reports arrive at once.
    Brisk,
    /// P's plans, to each rank by itself, and D's reports.
    Usual,
    /// D's plans as well, to each rank by itself.
    Late,
}

impl Inside {
    /// A word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Brisk => "brisk",
            Self::Usual => "usual",
            Self::Late => "late",
        }
    }
}

/// How much may happen in one story.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// What it is called.
    pub name: &'static str,
    /// Requests, 1 to 2.
    pub requests: usize,
    /// Ranks of both engines, 1 to 2.
    pub ranks: usize,
    /// Faults of all kinds together.
    pub faults: u8,
    /// Messages that may be lost.
    pub losses: u8,
    /// Messages that may arrive twice.
    pub repeats: u8,
    /// Connections that may break.
    pub breaks: u8,
    /// Clients that may go away, or requests that the router may drop.
    pub aborts: u8,
    /// Deaths of P.
    pub producer_deaths: u8,
    /// Deaths of D.
    pub consumer_deaths: u8,
    /// Reads that may bring other bytes than the source's and say that all is well. Without checksums nobody can notice.
    pub spoils: u8,
    /// Jumps of time. They are no faults.
    pub jumps: u8,
    /// What takes time inside an engine.
    pub inside: Inside,
    /// Whether D wants checksums. Digests take no time: **a bound**; they are the simulator's business.
    pub checksums: bool,
    /// Whether the engines have greeted each other before the story begins.
    pub greeted: bool,
    /// Most states; what lies beyond is not seen.
    pub states: usize,
}

impl Bounds {
    /// One request, one rank, and nothing that disturbs.
    pub(crate) const STILL: Self = Self {
        name: "still",
        requests: 1,
        ranks: 1,
        faults: 0,
        losses: 0,
        repeats: 0,
        breaks: 0,
        aborts: 0,
        producer_deaths: 0,
        consumer_deaths: 0,
        spoils: 0,
        jumps: 0,
        inside: Inside::Usual,
        checksums: false,
        greeted: true,
        states: 100_000_000,
    };

    /// As many faults, each of any kind.
    const fn any(self, faults: u8) -> Self {
        Self {
            faults,
            losses: faults,
            repeats: faults,
            breaks: faults,
            aborts: faults,
            producer_deaths: faults,
            consumer_deaths: faults,
            spoils: if self.checksums { faults } else { 0 },
            ..self
        }
    }

    /// Bounds of one's own: as many faults in one story, each of any kind, and as many jumps of time.
    pub const fn of(requests: usize, ranks: usize, faults: u8, jumps: u8) -> Self {
        Self { name: "bounds of your own", requests, ranks, jumps, ..Self::STILL.any(faults) }
    }

    /// The same with checksums, and reads that bring wrong bytes without a word among the faults.
    pub const fn checked(self) -> Self {
        Self { checksums: true, spoils: self.faults, ..self }
    }

    /// Bounds that are explored to their ends in seconds.
    pub const fn small() -> &'static [Self] {
        const ALL: &[Bounds] = &[
            Bounds { name: "one request, one rank", jumps: 2, inside: Inside::Late, ..Bounds::STILL.any(2) },
            Bounds { name: "one request, two ranks", ranks: 2, jumps: 1, ..Bounds::STILL.any(1) },
            Bounds {
                name: "two requests, one rank",
                requests: 2,
                jumps: 1,
                inside: Inside::Brisk,
                ..Bounds::STILL.any(1)
            },
            Bounds { name: "one request, one rank, checksums", jumps: 1, ..Bounds::STILL.any(2).checked() },
        ];
        ALL
    }

    /// Bounds that are explored in minutes, on two threads. Each is explored to its end or to its number of states,
    /// and [`Found::complete`] says which; states are seen in the order of the length of their stories.
    ///
    /// The first is the longest, so that on two threads the others are explored beside it.
    pub const fn full() -> &'static [Self] {
        const TWO: Bounds = Bounds { requests: 2, ranks: 2, ..Bounds::STILL };
        const ALL: &[Bounds] = &[
            Bounds {
                name: "two requests, two ranks, a fault and time",
                jumps: 1,
                inside: Inside::Brisk,
                states: 12_000_000,
                ..TWO.any(1)
            },
            Bounds { name: "one request, two ranks", ranks: 2, jumps: 1, ..Bounds::STILL.any(2) },
            Bounds { name: "one request, one rank", jumps: 2, inside: Inside::Late, ..Bounds::STILL.any(3) },
            Bounds { name: "two requests, two ranks, time", jumps: 1, ..TWO },
            Bounds { name: "two requests, two ranks, a fault", inside: Inside::Brisk, ..TWO.any(1) },
            Bounds {
                name: "two requests, two ranks, both die",
                inside: Inside::Brisk,
                producer_deaths: 1,
                consumer_deaths: 1,
                states: 6_000_000,
                ..TWO.most(2)
            },
        ];
        ALL
    }

    /// As many faults of all kinds together.
    const fn most(self, faults: u8) -> Self {
        Self { faults, ..self }
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Different states seen.
    pub states: usize,
    /// Steps taken between them.
    pub steps: usize,
    /// Length of the longest story that leads to a new state.
    pub longest: usize,
    /// Whether every state within the bounds was seen. If not, [`Bounds::states`] is what stopped it.
    pub complete: bool,
    /// Steps in which a load ended well; a model in which none does shows nothing.
    pub loaded: usize,
    /// Steps in which a load ended badly.
    pub failed: usize,
    /// States in which nothing happened by itself any more, each of which was seen to heal.
    pub calm: usize,
    /// Different machines that the states are made of.
    pub machines: usize,
    /// A shortest story that ends in a violation, and the violation.
    pub violation: Option<(Vec<String>, String)>,
}

/// Explores everything within the bounds, with a guard taken out if a mutant is named.
pub fn explore(bounds: &Bounds, mutant: Option<Mutant>) -> Found {
    explore_with(bounds, mutant, &mut |_, _| {})
}

/// As [`explore`]; says now and then how many states were seen, and how long their stories are.
pub fn explore_with(bounds: &Bounds, mutant: Option<Mutant>, tell: &mut dyn FnMut(usize, usize)) -> Found {
    let rules = Rules { ranks: bounds.ranks.clamp(1, setup::RANKS), inside: bounds.inside, mutant };
    let found = Found {
        states: 1,
        steps: 0,
        longest: 0,
        complete: true,
        loaded: 0,
        failed: 0,
        calm: 0,
        machines: 0,
        violation: None,
    };
    let nobody = |found: Found| Found {
        violation: Some((Vec::new(), "the engines of the story cannot be made".to_owned())),
        ..found
    };
    let Some(mut machines) = turn::machines(rules.ranks, bounds.checksums, mutant) else {
        return nobody(found);
    };
    let Some(mut first) = first_world(&mut machines, rules, bounds.requests, bounds.greeted) else {
        return nobody(found);
    };
    first.left = Left::of(bounds);
    Search { rules, machines, healing: Healing::default(), ways: vec![(0, Action::TimeJumps)], found }.run(
        first,
        bounds.states,
        tell,
    )
}

struct Search {
    rules: Rules,
    machines: Machines,
    healing: Healing,
    /// How each state was first reached: from which, by what. Stories are told by going the way again, so that no
    /// state need be kept once its successors are known.
    ways: Vec<(u32, Action)>,
    found: Found,
}

impl Search {
    fn run(mut self, first: World, most: usize, tell: &mut dyn FnMut(usize, usize)) -> Found {
        let mut seen = Seen::default();
        seen.insert(name_of(&first));
        let mut level = vec![(0_u32, first.clone())];
        let mut actions = Vec::new();
        let mut depth = 0;
        while !level.is_empty() {
            let mut next_level = Vec::new();
            for (number, world) in level {
                world.actions(&self.machines, &mut actions);
                if !actions.first().is_some_and(|action| action.is_ordinary())
                    && let Err((rest, what)) = self.calm(&world)
                {
                    let mut story = self.story(&first, number, None);
                    story.extend(rest);
                    self.found.violation = Some((story, what));
                    return self.end();
                }
                for action in &actions {
                    let mut next = world.clone();
                    let mut turn = Turn::new(&mut self.machines, &mut next, self.rules);
                    turn.act(*action);
                    let (loaded, failed, violation) = (turn.loaded, turn.failed, turn.violation);
                    self.found.steps += 1;
                    self.found.loaded += usize::from(loaded > 0);
                    self.found.failed += usize::from(failed > 0);
                    if let Some(what) = violation {
                        let story = self.story(&first, number, Some(*action));
                        self.found.violation = Some((story, what));
                        return self.end();
                    }
                    let name = name_of(&next);
                    if seen.contains(&name) {
                        continue;
                    }
                    if self.found.states >= most {
                        self.found.complete = false;
                        return self.end();
                    }
                    seen.insert(name);
                    next_level.push((self.ways.len() as u32, next));
                    self.ways.push((number, *action));
                    self.found.states += 1;
                    self.found.longest = depth + 1;
                    if self.found.states.is_multiple_of(1 << 16) {
                        tell(self.found.states, depth + 1);
                    }
                }
            }
            level = next_level;
            depth += 1;
        }
        self.end()
    }

    fn end(mut self) -> Found {
        self.found.machines = self.machines.len();
        self.found
    }

    /// Nothing happens by itself any more: what is held now must come to rest by time alone, and if nothing was lost
    /// and no time has passed it must have done so already, since an early or repeated message costs nobody anything.
    fn calm(&mut self, world: &World) -> Result<(), calm::Unhealed> {
        self.found.calm += 1;
        if !world.disturbed
            && let Some(what) = world.unfinished(&self.machines)
        {
            return Err((Vec::new(), format!("nothing was lost, and yet {what}")));
        }
        self.healing.check(&mut self.machines, self.rules, world.clone())
    }

    /// How a state was reached, and what happens then.
    fn story(&mut self, first: &World, number: u32, then: Option<Action>) -> Vec<String> {
        let mut way: Vec<Action> = then.into_iter().collect();
        let mut at = number;
        while at != 0 {
            let (from, action) = self.ways[at as usize];
            way.push(action);
            at = from;
        }
        let mut world = first.clone();
        let mut story = Vec::new();
        for action in way.into_iter().rev() {
            story.push(action.told(&world, &self.machines));
            Turn::new(&mut self.machines, &mut world, self.rules).act(action);
        }
        story
    }
}
