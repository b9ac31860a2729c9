//! One state of the explored world: numbers of machines, and what is under way between them.

use super::action::Action;
use super::machines::Machines;
use super::setup::{BLOCKS, RANKS, REQUESTS};
use super::{Bounds, Inside, Mutant};

/// Index of the producer.
pub(super) const P: usize = 0;
/// Index of the consumer.
pub(super) const D: usize = 1;

/// The number of a load of D. Stories are short, so that a byte holds it, and all other numbers of things that are
/// made one by one: worlds are kept by the million.
pub(super) type Load = u8;

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// P computes its prompt.
    AtP,
    /// P's offer is on its way.
    AtRouter,
    /// D has it, without blocks.
    Waiting,
    /// It waits for its load.
    Loading,
    /// Over, in whatever way, or never there.
    Over,
}

/// A request, with what both engines hold for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Request {
    pub(super) stage: Stage,
    /// What P offered.
    pub(super) offer: Option<u32>,
    /// Its lease.
    pub(super) lease: u8,
    /// P's block, while it is held.
    pub(super) held: Option<u8>,
    /// Which ranks of D hold what was offered.
    pub(super) copied: [bool; RANKS],
    /// The load that may write D's block.
    pub(super) owner: Option<Load>,
}

/// A connection between the two workers of a rank, under both its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Link {
    pub(super) rank: u8,
    pub(super) dialled: u8,
    pub(super) accepted: u8,
}

/// A message under way; `link` is its connection's name at the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Flying {
    pub(super) to: u8,
    pub(super) rank: u8,
    pub(super) link: u8,
    pub(super) message: u32,
}

/// A read that D's transport has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Read {
    pub(super) rank: u8,
    pub(super) load: Load,
    pub(super) link: u8,
    pub(super) from: u8,
    pub(super) to: u8,
    pub(super) cancelled: bool,
}

/// A plan on its way to a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Sent {
    pub(super) side: u8,
    pub(super) rank: u8,
    pub(super) plan: u32,
}

/// What may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct Left {
    pub(super) faults: u8,
    pub(super) losses: u8,
    pub(super) repeats: u8,
    pub(super) breaks: u8,
    pub(super) aborts: u8,
    pub(super) producer_deaths: u8,
    pub(super) consumer_deaths: u8,
    pub(super) spoils: u8,
    pub(super) jumps: u8,
}

/// The rules under which a world moves; the same for every state of an exploration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) ranks: usize,
    pub(super) inside: Inside,
    pub(super) mutant: Option<Mutant>,
}

/// A state. Lists of what may overtake each other are sorted, so that equal states are equal.
#[derive(Debug, Clone, Hash)]
pub(super) struct World {
    pub(super) now: u32,
    pub(super) left: Left,
    /// Whether something happened after which something may have to wait for time.
    pub(super) disturbed: bool,
    /// The number of each engine's life.
    pub(super) lives: [u8; 2],
    /// The next name of a connection at P's ranks.
    pub(super) accepted: [u8; RANKS],
    pub(super) schedulers: [u32; 2],
    pub(super) workers: [[u32; RANKS]; 2],
    /// Plans on their way, by side and rank, and to one rank in order.
    pub(super) plans: Vec<Sent>,
    /// D's reports on their way, in order.
    pub(super) reports: Vec<u32>,
    pub(super) requests: [Request; REQUESTS],
    /// Whether a block of P holds what was offered.
    pub(super) content: [bool; BLOCKS],
    pub(super) links: Vec<Link>,
    pub(super) flying: Vec<Flying>,
    pub(super) reads: Vec<Read>,
}

impl Left {
    pub(super) const fn of(bounds: &Bounds) -> Self {
        Self {
            faults: bounds.faults,
            losses: bounds.losses,
            repeats: bounds.repeats,
            breaks: bounds.breaks,
            aborts: bounds.aborts,
            producer_deaths: bounds.producer_deaths,
            consumer_deaths: bounds.consumer_deaths,
            spoils: bounds.spoils,
            jumps: bounds.jumps,
        }
    }
}

impl World {
    /// The earliest deadline of anybody.
    pub(super) fn next_deadline(&self, machines: &Machines) -> Option<u32> {
        let (ranks, sides) = (machines.names.ranks, if machines.names.clock_at_d { 2 } else { 1 });
        let schedulers = self.schedulers[..sides].iter().map(|s| machines.scheduler_deadline(*s));
        let workers = self.workers[..sides].iter().flat_map(|side| &side[..ranks]);
        schedulers.chain(workers.map(|w| machines.worker_deadline(*w))).flatten().min()
    }

    /// Everything that can happen next. Faults come last.
    pub(super) fn actions(&self, machines: &Machines, out: &mut Vec<Action>) {
        out.clear();
        for (number, request) in self.requests.iter().enumerate() {
            let r = number as u8;
            match request.stage {
                // The requests are alike, so that the order in which they are computed is no story of its own.
                Stage::AtP if r > 0 && self.requests[number - 1].stage == Stage::AtP => {}
                Stage::AtP => out.push(Action::Computed(r)),
                Stage::AtRouter => out.push(Action::RouterTellsD(r)),
                Stage::Waiting => out.push(Action::Allocated(r)),
                Stage::Loading | Stage::Over => {}
            }
        }
        for (n, Sent { side, rank, .. }) in self.plans.iter().enumerate() {
            if n == 0 || (self.plans[n - 1].side, self.plans[n - 1].rank) != (*side, *rank) {
                out.push(Action::PlanArrives(*side, *rank));
            }
        }
        if !self.reports.is_empty() {
            out.push(Action::ReportArrives);
        }
        for (n, read) in self.reads.iter().enumerate() {
            out.push(Action::ReadWhole(n as u8));
            if read.cancelled {
                out.push(Action::ReadCancelled(n as u8));
            }
        }
        // Two messages that are equal are one: what happens to either is the same.
        let different = || {
            let all = self.flying.iter().enumerate();
            all.filter(|(n, flying)| *n == 0 || self.flying[n - 1] != **flying).map(|(n, _)| n as u8)
        };
        out.extend(different().map(Action::MessageArrives));
        if self.left.jumps > 0 && self.next_deadline(machines).is_some() {
            out.push(Action::TimeJumps);
        }
        if self.left.faults == 0 {
            return;
        }
        if self.left.losses > 0 {
            out.extend(different().map(Action::MessageLost));
        }
        if self.left.repeats > 0 {
            out.extend(different().map(Action::MessageTwice));
        }
        if self.left.spoils > 0 {
            out.extend((0..self.reads.len()).map(|n| Action::ReadSpoiled(n as u8)));
        }
        if self.left.breaks > 0 {
            out.extend((0..self.links.len()).map(|n| Action::LinkBreaks(n as u8)));
        }
        if self.left.aborts > 0 {
            for (number, request) in self.requests.iter().enumerate() {
                let r = number as u8;
                match request.stage {
                    Stage::AtP => out.push(Action::LeavesP(r)),
                    Stage::AtRouter => out.push(Action::RouterDrops(r)),
                    Stage::Waiting | Stage::Loading => out.push(Action::LeavesD(r)),
                    Stage::Over => {}
                }
            }
        }
        if self.left.producer_deaths > 0 {
            out.push(Action::PDies);
        }
        if self.left.consumer_deaths > 0 {
            out.push(Action::DDies);
        }
    }

    /// The first plan on its way to a rank, by its place in the list.
    pub(super) fn plan_for(&self, side: u8, rank: u8) -> Option<usize> {
        self.plans.iter().position(|sent| (sent.side, sent.rank) == (side, rank))
    }

    /// What is held or waited for, if anything is.
    pub(super) fn unfinished(&self, machines: &Machines) -> Option<String> {
        for (number, request) in self.requests.iter().enumerate() {
            if request.stage != Stage::Over {
                return Some(format!("request {number} still waits"));
            }
            if request.held.is_some() {
                return Some(format!("P still holds the block of request {number}"));
            }
            if let Some(load) = request.owner {
                return Some(format!("load {load} still holds D's block of request {number}"));
            }
        }
        for (side, name) in [(P, "P"), (D, "D")] {
            let holds = machines.scheduler(self.schedulers[side]).holds();
            if holds > 0 {
                return Some(format!("{name}'s scheduler half still holds {holds} leases or loads"));
            }
        }
        None
    }

    /// A table of a worker that is not empty, if there is one.
    pub(super) fn remembered(&self, machines: &Machines) -> Option<String> {
        for (side, name) in [(P, "P"), (D, "D")] {
            for rank in 0..machines.names.ranks {
                let stats = machines.worker(self.workers[side][rank]).stats();
                if stats.leases + stats.pulls + stats.producers > 0 {
                    return Some(format!(
                        "{name}'s rank {rank} keeps {} leases, {} pulls, {} producers for ever",
                        stats.leases, stats.pulls, stats.producers
                    ));
                }
            }
        }
        None
    }
}
