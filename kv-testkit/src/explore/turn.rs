//! What follows when something happens: the machines are told, and what they decide is done.

use std::collections::VecDeque;

use kv_proto::message::WorkerMessage;

use super::action::Action;
use super::machines::{Call, Deed, Input, Machines, Name, ReadEnd, Word};
use super::setup::{BLOCKS, Names, RANKS, REQUESTS};
use super::world::{D, Flying, Left, Link, P, Read, Request, Rules, Sent, Stage, World};
use super::{Inside, Mutant};

/// One action on its way through the world.
pub(super) struct Turn<'a> {
    machines: &'a mut Machines,
    world: &'a mut World,
    rules: Rules,
    /// What workers are still to be told within this action.
    todo: VecDeque<(usize, u8, Input)>,
    /// A promise that was broken.
    pub(super) violation: Option<String>,
    /// Loads that ended well.
    pub(super) loaded: u8,
    /// Loads that ended badly.
    pub(super) failed: u8,
}

/// The beginning of a story: the requests are at P; the engines have greeted each other if `greeted` is set.
pub(super) fn first_world(
    machines: &mut Machines,
    rules: Rules,
    requests: usize,
    greeted: bool,
) -> Option<World> {
    let request = |number: usize| Request {
        stage: if number < requests { Stage::AtP } else { Stage::Over },
        offer: None,
        lease: 0,
        held: None,
        copied: [false; RANKS],
        owner: None,
    };
    let mut world = World {
        now: 0,
        left: Left::default(),
        disturbed: false,
        lives: [1, 1],
        accepted: [0; RANKS],
        schedulers: [machines.new_scheduler(P, 1)?, machines.new_scheduler(D, 1)?],
        workers: [[0; RANKS]; 2],
        plans: Vec::new(),
        reports: Vec::new(),
        requests: [request(0), request(1)],
        content: [false; BLOCKS],
        links: Vec::new(),
        flying: Vec::new(),
        reads: Vec::new(),
    };
    for side in [P, D] {
        for rank in 0..rules.ranks {
            world.workers[side][rank] = machines.new_worker(side, 1, rank);
        }
    }
    let mut turn = Turn::new(machines, &mut world, rules);
    turn.requests_reach_p();
    if greeted {
        let plan = turn.machines.knock();
        for rank in 0..rules.ranks as u8 {
            turn.tell(D, rank, Input::Plan(plan));
        }
        while !turn.world.flying.is_empty() {
            turn.message_arrives(0, true);
        }
    }
    Some(world)
}

impl<'a> Turn<'a> {
    pub(super) fn new(machines: &'a mut Machines, world: &'a mut World, rules: Rules) -> Self {
        Self { machines, world, rules, todo: VecDeque::new(), violation: None, loaded: 0, failed: 0 }
    }

    fn mutated(&self, mutant: Mutant) -> bool {
        self.rules.mutant == Some(mutant)
    }

    fn now(&self, side: usize) -> u32 {
        if side == D && !self.machines.names.clock_at_d { 0 } else { self.world.now }
    }

    fn broken(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// Lets an action happen.
    pub(super) fn act(&mut self, action: Action) {
        let left = &mut self.world.left;
        self.world.disturbed |= action.disturbs();
        if !action.is_ordinary() && action != Action::TimeJumps {
            left.faults = left.faults.saturating_sub(1);
        }
        match action {
            Action::Computed(r) => self.computed(r),
            Action::RouterTellsD(r) => self.d_hears(r),
            Action::Allocated(r) => self.allocated(r),
            Action::PlanArrives(side, rank) => {
                if let Some(at) = self.world.plan_for(side, rank) {
                    let Sent { plan, .. } = self.world.plans.remove(at);
                    self.tell(usize::from(side), rank, Input::Plan(plan));
                }
            }
            Action::ReportArrives => {
                if !self.world.reports.is_empty() {
                    let report = self.world.reports.remove(0);
                    self.call(D, Call::Report(report));
                }
            }
            Action::MessageArrives(n) => self.message_arrives(n, true),
            Action::MessageLost(n) => {
                left.losses -= 1;
                self.world.flying.remove(usize::from(n));
            }
            Action::MessageTwice(n) => {
                left.repeats -= 1;
                self.message_arrives(n, false);
            }
            Action::ReadWhole(n) => self.read_ends(n, ReadEnd::Whole, true),
            Action::ReadCancelled(n) => self.read_ends(n, ReadEnd::Cancelled, false),
            Action::ReadSpoiled(n) => {
                left.spoils -= 1;
                self.read_ends(n, ReadEnd::Whole, false);
            }
            Action::TimeJumps => {
                left.jumps = left.jumps.saturating_sub(1);
                self.time_jumps();
            }
            Action::LinkBreaks(n) => {
                left.breaks -= 1;
                self.link_gone(usize::from(n), true, true);
                self.settle();
            }
            Action::LeavesP(r) => {
                left.aborts -= 1;
                self.world.requests[usize::from(r)].stage = Stage::Over;
                self.call(P, Call::Over { request: r });
            }
            Action::RouterDrops(r) => {
                left.aborts -= 1;
                self.world.requests[usize::from(r)].stage = Stage::Over;
            }
            Action::LeavesD(r) => {
                left.aborts -= 1;
                self.world.requests[usize::from(r)].stage = Stage::Over;
                let hold = self.call(D, Call::Over { request: r });
                if !hold || self.mutated(Mutant::FreedOnAbort) {
                    self.world.requests[usize::from(r)].owner = None;
                }
            }
            Action::PDies => {
                left.producer_deaths -= 1;
                self.p_dies();
            }
            Action::DDies => {
                left.consumer_deaths -= 1;
                self.d_dies();
            }
        }
        self.settle();
    }

    /// Tells a scheduler half something, and carries what it says. Returns whether blocks must be held.
    fn call(&mut self, side: usize, call: Call) -> bool {
        let end = self.machines.call(self.world.schedulers[side], self.now(side), call);
        self.world.schedulers[side] = end.next;
        for (block, load) in &end.loads {
            self.world.requests[usize::from(*block)].owner = Some(*load);
        }
        if let Some(plan) = end.plan {
            let at_once = match self.rules.inside {
                Inside::Brisk => true,
                // P's announcement comes with the work.
                Inside::Usual => side == D || matches!(call, Call::Arrives { .. }),
                Inside::Late => side == P && matches!(call, Call::Arrives { .. }),
            };
            for rank in 0..self.rules.ranks as u8 {
                if at_once {
                    self.todo.push_back((side, rank, Input::Plan(plan)));
                } else {
                    let sent = Sent { side: side as u8, rank, plan };
                    let order = |sent: &Sent| (sent.side, sent.rank);
                    let at = self.world.plans.partition_point(|other| order(other) <= order(&sent));
                    self.world.plans.insert(at, sent);
                }
            }
        }
        match call {
            Call::Computed { request, .. } => {
                let request = &mut self.world.requests[usize::from(request)];
                request.offer = end.offer;
                request.lease = end.lease.map_or(0, |lease| lease.0 as u8);
            }
            Call::Arrives { request, offer: Some(_) } => {
                let stage = if end.refused { Stage::Over } else { Stage::Waiting };
                self.world.requests[usize::from(request)].stage = stage;
            }
            Call::Allocated { request } => {
                if end.refused {
                    self.broken(format!("D refuses its own blocks for request {request}"));
                }
                self.world.requests[usize::from(request)].stage =
                    if end.loading { Stage::Loading } else { Stage::Over };
            }
            _ => {}
        }
        for word in &end.words {
            self.hear(side, *word);
        }
        self.settle();
        end.hold
    }

    fn hear(&mut self, side: usize, word: Word) {
        match word {
            Word::Released(request) if side == P => self.p_frees(request),
            Word::Released(request) => self.world.requests[usize::from(request)].owner = None,
            Word::Loaded(request) => {
                self.loaded += 1;
                let copied = self.world.requests[usize::from(request)].copied;
                for rank in (0..self.rules.ranks).filter(|rank| !copied[*rank]) {
                    self.broken(format!(
                        "the load of request {request} is good, but rank {rank} holds something else"
                    ));
                }
                self.load_ended(request, false);
            }
            Word::Failed(request, hold) => {
                self.failed += 1;
                self.load_ended(request, hold);
            }
        }
    }

    fn load_ended(&mut self, number: u8, hold: bool) {
        let request = &mut self.world.requests[usize::from(number)];
        if request.stage != Stage::Loading {
            return self.broken(format!("a load of request {number} ends that nobody waits for"));
        }
        request.stage = Stage::Over;
        if !hold {
            request.owner = None;
        }
        // Decoding is no business of the machines: the request is over at once.
        self.call(D, Call::Over { request: number });
    }

    fn p_frees(&mut self, request: u8) {
        match self.world.requests[usize::from(request)].held.take() {
            Some(block) => self.world.content[usize::from(block)] = false,
            None => self.broken(format!("P's block of request {request} is freed twice")),
        }
    }

    fn requests_reach_p(&mut self) {
        for request in 0..REQUESTS as u8 {
            if self.world.requests[usize::from(request)].stage == Stage::AtP {
                self.call(P, Call::Arrives { request, offer: None });
            }
        }
    }

    fn computed(&mut self, request: u8) {
        let free = (0..BLOCKS as u8).find(|b| self.world.requests.iter().all(|r| r.held != Some(*b)));
        let Some(block) = free else { return };
        let r = usize::from(request);
        self.world.requests[r].stage = Stage::AtRouter;
        self.world.requests[r].held = Some(block);
        self.world.content[usize::from(block)] = true;
        let hold = self.call(P, Call::Computed { request, block });
        if !hold {
            self.p_frees(request);
        }
        if self.mutated(Mutant::FreedAtFinish) {
            self.world.content[usize::from(block)] = false;
        }
    }

    fn d_hears(&mut self, request: u8) {
        let offer = self.world.requests[usize::from(request)].offer;
        self.call(D, Call::Arrives { request, offer });
    }

    fn allocated(&mut self, request: u8) {
        self.world.requests[usize::from(request)].copied = [false; RANKS];
        self.call(D, Call::Allocated { request });
        if self.world.requests[usize::from(request)].stage == Stage::Over {
            self.call(D, Call::Over { request });
        }
    }

    /// A worker is to be told something, after what it is to be told already.
    fn tell(&mut self, side: usize, rank: u8, input: Input) {
        self.todo.push_back((side, rank, input));
        self.settle();
    }

    /// Tells workers what they are to be told, until nothing follows at once.
    fn settle(&mut self) {
        while let Some((side, rank, input)) = self.todo.pop_front() {
            let worker = self.world.workers[side][usize::from(rank)];
            let end = self.machines.tell(worker, self.now(side), input);
            self.world.workers[side][usize::from(rank)] = end.next;
            for deed in &end.deeds {
                self.do_it(side, rank, *deed);
            }
            match end.report {
                // All that P's scheduler half does with a report is to free blocks, and the sooner it does, the more
                // can go wrong: later reports show nothing that this does not.
                Some(report) if side == P && self.mutated(Mutant::FreedByFirstRank) => {
                    self.call(P, Call::ReportOfAll(report));
                }
                Some(report) if side == P => {
                    self.call(P, Call::Report(report));
                }
                Some(report) if self.rules.inside == Inside::Brisk => {
                    self.call(D, Call::Report(report));
                }
                Some(report) => self.world.reports.push(report),
                None => {}
            }
        }
    }

    fn do_it(&mut self, side: usize, rank: u8, deed: Deed) {
        match deed {
            // A handshake takes no time, and P is always there: which life of it is the question.
            Deed::ShakeHands(life) => {
                let here = self.machines.names.incarnation(P, self.world.lives[P]).get();
                self.todo.push_back((D, rank, Input::Handshake { life, answered: life == here }));
            }
            Deed::Connect(dialled) => {
                let accepted = self.world.accepted[usize::from(rank)];
                self.world.accepted[usize::from(rank)] += 1;
                insert(&mut self.world.links, Link { rank, dialled, accepted });
                self.todo.push_back((P, rank, Input::Accepted(accepted)));
                self.todo.push_back((D, rank, Input::Connected(dialled)));
            }
            Deed::Disconnect(link) => {
                if let Some(at) = self.link(side, rank, link) {
                    self.link_gone(at, side == D, side == P);
                }
            }
            Deed::Send { link, message } => self.send(side, rank, link, message),
            Deed::Read { load, link, from, to } => {
                if let (Some(_), Name::Dialled(dialled)) = (self.link(side, rank, link), link) {
                    let read = Read { rank, load, link: dialled, from, to, cancelled: false };
                    insert(&mut self.world.reads, read);
                } else {
                    self.todo.push_back((D, rank, Input::Read { load, link, end: ReadEnd::PeerLost }));
                }
            }
            Deed::Cancel(load) => {
                let reads = self.world.reads.iter_mut();
                for read in reads.filter(|read| read.load == load && read.rank == rank) {
                    read.cancelled = true;
                }
                self.world.reads.sort_unstable();
            }
            // What is not right is all the same: the worst is that two wrong blocks are equal.
            Deed::Digest { of, block } => {
                let right = if side == P {
                    self.world.content[usize::from(block)]
                } else {
                    self.world.requests[usize::from(block)].copied[usize::from(rank)]
                };
                self.todo.push_back((side, rank, Input::Digested { of, right }));
            }
            // What it finds changes a counter and nothing else.
            Deed::CheckSelf => self.todo.push_back((side, rank, Input::SelfChecked)),
        }
    }

    fn link(&self, side: usize, rank: u8, link: Name) -> Option<usize> {
        self.world.links.iter().position(|l| {
            let name = if side == P { Name::Accepted(l.accepted) } else { Name::Dialled(l.dialled) };
            l.rank == rank && name == link
        })
    }

    fn send(&mut self, side: usize, rank: u8, link: Name, message: u32) {
        let Some(at) = self.link(side, rank, link) else { return };
        let Link { dialled, accepted, .. } = self.world.links[at];
        let flying = if side == D {
            Flying { to: P as u8, rank, link: accepted, message }
        } else {
            Flying { to: D as u8, rank, link: dialled, message }
        };
        insert(&mut self.world.flying, flying);
        if self.mutated(Mutant::NoConfirmation)
            && let WorkerMessage::ReadDone { lease, attempt, .. } = self.machines.message(message)
        {
            let confirmed = WorkerMessage::Confirmed { lease: *lease, attempt: *attempt };
            let message = self.machines.message_number(confirmed);
            insert(&mut self.world.flying, Flying { to: D as u8, rank, link: dialled, message });
        }
    }

    fn message_arrives(&mut self, number: u8, once: bool) {
        let Flying { to, rank, link, mut message } = self.world.flying[usize::from(number)];
        if once {
            self.world.flying.remove(usize::from(number));
        }
        if to == D as u8 {
            if self.mutated(Mutant::LapsedIsGood)
                && let WorkerMessage::Lapsed { lease, attempt } = self.machines.message(message)
            {
                let confirmed = WorkerMessage::Confirmed { lease: *lease, attempt: *attempt };
                message = self.machines.message_number(confirmed);
            }
            if self.mutated(Mutant::UnequalIsGood)
                && let WorkerMessage::Compared { lease, attempt, from, held, .. } =
                    self.machines.message(message)
            {
                let equal = WorkerMessage::Compared {
                    lease: *lease,
                    attempt: *attempt,
                    from: *from,
                    equal: 1,
                    held: *held,
                };
                message = self.machines.message_number(equal);
            }
            return self.tell(D, rank, Input::Message { link: Name::Dialled(link), message });
        }
        let ends = match self.machines.message(message) {
            WorkerMessage::ReadDone { lease, .. } | WorkerMessage::Release { lease, .. } => {
                Some(lease.0 as u8)
            }
            _ => None,
        };
        let granted = self.world.plan_for(P as u8, rank).is_none();
        if self.mutated(Mutant::EarlyEndDropped) && ends.is_some() && !granted {
            return;
        }
        // A lease that had ended before this message came is what a repetition meets.
        let over = |world: &World, lease| {
            granted && lease > 0 && world.requests.iter().any(|r| r.lease == lease && r.held.is_none())
        };
        let again = ends.is_some_and(|lease| over(self.world, lease));
        self.tell(P, rank, Input::Message { link: Name::Accepted(link), message });
        if self.mutated(Mutant::RepeatFreesAgain) && again {
            let request = self.world.requests.iter().position(|r| Some(r.lease) == ends);
            if let Some(request) = request {
                self.p_frees(request as u8);
            }
        }
    }

    /// A connection is gone: its messages with it, its reads end, and whoever did not end it is told.
    fn link_gone(&mut self, at: usize, tell_p: bool, tell_d: bool) {
        let Link { rank, dialled, accepted } = self.world.links.remove(at);
        self.world.flying.retain(|f| {
            let link = if f.to == P as u8 { accepted } else { dialled };
            f.rank != rank || f.link != link
        });
        let mut ended = Vec::new();
        self.world.reads.retain(|read| {
            let on_it = read.rank == rank && read.link == dialled;
            if on_it {
                ended.push(*read);
            }
            !on_it
        });
        for read in ended {
            self.writes(read);
            self.todo.push_back((
                D,
                rank,
                Input::Read { load: read.load, link: Name::Dialled(read.link), end: ReadEnd::PeerLost },
            ));
        }
        if tell_d {
            self.todo.push_back((D, rank, Input::Lost(Name::Dialled(dialled))));
        }
        if tell_p {
            self.todo.push_back((P, rank, Input::Lost(Name::Accepted(accepted))));
        }
    }

    /// A read may write until it ends, so that this is when the block must still be its own.
    fn writes(&mut self, read: Read) {
        if self.world.requests[usize::from(read.to)].owner != Some(read.load) {
            self.broken(format!("load {} writes a block of D that is not its own", read.load));
        }
    }

    /// A read ends; `right` if what the source held arrived.
    fn read_ends(&mut self, number: u8, end: ReadEnd, right: bool) {
        let read = self.world.reads.remove(usize::from(number));
        self.writes(read);
        let content = right && self.world.content[usize::from(read.from)];
        self.world.requests[usize::from(read.to)].copied[usize::from(read.rank)] = content;
        self.tell(D, read.rank, Input::Read { load: read.load, link: Name::Dialled(read.link), end });
    }

    fn time_jumps(&mut self) {
        if let Some(next) = self.world.next_deadline(self.machines) {
            self.world.now = self.world.now.max(next);
        }
        for side in [P, D] {
            for rank in 0..self.rules.ranks as u8 {
                self.tell(side, rank, Input::Time);
            }
            self.call(side, Call::Time);
        }
    }

    /// The next life of an engine: new machines that know nothing.
    fn reborn(&mut self, side: usize) {
        self.world.lives[side] += 1;
        let life = self.world.lives[side];
        match self.machines.new_scheduler(side, life) {
            Some(scheduler) => self.world.schedulers[side] = scheduler,
            None => self.broken("an engine cannot be born again".to_owned()),
        }
        for rank in 0..self.rules.ranks {
            self.world.workers[side][rank] = self.machines.new_worker(side, life, rank);
        }
        self.world.plans.retain(|sent| usize::from(sent.side) != side);
    }

    fn p_dies(&mut self) {
        self.reborn(P);
        self.world.accepted = [0; RANKS];
        // Its memory is another's now. What it had computed is gone; what it was computing is asked of it again.
        self.world.content = [false; BLOCKS];
        for request in &mut self.world.requests {
            request.held = None;
            request.lease = 0;
        }
        while !self.world.links.is_empty() {
            self.link_gone(0, false, true);
        }
        self.settle();
        self.requests_reach_p();
    }

    fn d_dies(&mut self) {
        self.reborn(D);
        self.world.reads.clear();
        self.world.reports.clear();
        for request in &mut self.world.requests {
            request.owner = None;
            request.copied = [false; RANKS];
            // The router knows the offer, and tries again.
            if matches!(request.stage, Stage::Waiting | Stage::Loading) {
                request.stage = Stage::AtRouter;
            }
        }
        while !self.world.links.is_empty() {
            self.link_gone(0, true, false);
        }
        self.settle();
    }
}

/// Keeps a list of things that may overtake each other sorted.
fn insert<T: Ord>(list: &mut Vec<T>, item: T) {
    let at = list.partition_point(|other| *other <= item);
    list.insert(at, item);
}

/// The story's machines.
pub(super) fn machines(ranks: usize, checksums: bool, mutant: Option<Mutant>) -> Option<Machines> {
    Some(Machines::new(Names::new(ranks, checksums, mutant)?))
}
