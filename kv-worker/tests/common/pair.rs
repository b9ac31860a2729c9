//! Two whole engines without a thread, a socket or a clock: schedulers and workers on both sides, queues between
//! them that the test empties, and a transport that completes a read when it is told to.
//!
//! It also keeps the books that the machines are judged by: whose bytes a block holds, and whose block it is.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kv_proto::message::{BlockDigest, GroupList, WorkerMessage};
use kv_proto::{
    BlockId, BlockList, LoadFailure, LoadId, Plan, RemotePrefill, Report, RequestId, Topology, TransferParams,
};
use kv_sched::{HoldId, LoadResult, RequestEnd, SchedConfig, SchedEvent, Scheduler, Verdict};
use kv_transport::ReadPart;
use kv_worker::Failure;
use kv_worker::machine::io::{Decision, DigestOf, Fact, LinkId, PullId, SourceKey};
use kv_worker::machine::worker::WorkerMachine;

use super::{BLOCKS, accepted, at, card, engine, life, limits, machine_with, ms};

/// Blocks of one request; its prompt fills them.
pub(crate) const COUNT: u32 = 2;
const TOKENS: u32 = COUNT * 4;
/// What a block holds that nobody owns.
const GARBAGE: u32 = u32::MAX;

fn sched(name: &str, n: u64) -> Scheduler {
    Scheduler::new(SchedConfig {
        engine: engine(name),
        incarnation: life(n),
        topology: Topology::of(1),
        host: "p".to_owned(),
        port: n as u16,
        block_tokens: 4,
        blocks: BLOCKS,
        groups: vec![kv_proto::GroupKind::Full],
        lease_ttl: ms(1_000),
        lease_renewal: ms(800),
        lease_max: ms(4_000),
        lease_grace: ms(300),
        min_remote_tokens: 1,
        queue_limit: ms(3_000),
        load_limit: ms(5_000),
        report_grace: ms(500),
    })
    .unwrap()
}

/// One engine.
pub(crate) struct End {
    pub(crate) s: Scheduler,
    pub(crate) w: WorkerMachine,
    pub(crate) plans: VecDeque<Vec<u8>>,
    pub(crate) reports: VecDeque<Vec<u8>>,
    pub(crate) events: Vec<SchedEvent>,
    /// Which request's bytes each block holds.
    pub(crate) bytes: Vec<u32>,
    pub(crate) free: BTreeSet<u32>,
    /// Blocks of live requests.
    pub(crate) owned: BTreeMap<RequestId, Vec<u32>>,
    /// Blocks that a peer may touch.
    pub(crate) held: BTreeMap<HoldId, Vec<u32>>,
}

impl End {
    fn new(name: &str, n: u64, checksums: bool) -> Self {
        Self {
            s: sched(name, n),
            w: machine_with(name, n, limits(), checksums),
            plans: VecDeque::new(),
            reports: VecDeque::new(),
            events: Vec::new(),
            bytes: vec![GARBAGE; BLOCKS as usize],
            free: (0..BLOCKS).collect(),
            owned: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    fn allocate(&mut self, request: &RequestId) -> Option<BlockList> {
        if self.free.len() < COUNT as usize || self.owned.contains_key(request) {
            return None;
        }
        let blocks: Vec<u32> = (0..COUNT).filter_map(|_| self.free.pop_first()).collect();
        self.owned.insert(request.clone(), blocks.clone());
        Some(blocks.into_iter().map(BlockId).collect())
    }

    /// The next owner writes at once, as an unlucky one would.
    fn give_up(&mut self, blocks: Vec<u32>) {
        for block in blocks {
            self.bytes[block as usize] = GARBAGE;
            assert!(self.free.insert(block), "freed twice");
        }
    }

    fn end(&mut self, now: u64, request: &RequestId, end: &RequestEnd) -> Option<RemotePrefill> {
        let finish = self.s.request_finished(at(now), request, end);
        let blocks = self.owned.remove(request).unwrap_or_default();
        match finish.verdict {
            Verdict::Free => self.give_up(blocks),
            Verdict::Hold(hold) => assert_eq!(self.held.insert(hold, blocks), None),
        }
        finish.params
    }
}

/// A message on its way, over the connection that D calls by this number.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) to_p: bool,
    pub(crate) link: u64,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) struct Pair {
    pub(crate) now: u64,
    pub(crate) p: End,
    pub(crate) d: End,
    pub(crate) p_life: u64,
    /// Open connections: D's number and P's.
    pub(crate) links: BTreeMap<u64, u64>,
    next_accepted: u64,
    pub(crate) dials: VecDeque<SourceKey>,
    pub(crate) wire: VecDeque<Flight>,
    pub(crate) reads: BTreeMap<u64, (u64, Vec<ReadPart>)>,
    pub(crate) cancelled: BTreeSet<u64>,
    /// Digests that are being computed: P's or D's.
    pub(crate) digests: VecDeque<(bool, DigestOf, Vec<GroupList>)>,
    pub(crate) checksums: bool,
    /// What P offers of each prompt, by its number.
    pub(crate) offers: Vec<(u32, RemotePrefill)>,
    /// The prompt of each request of D.
    wants: BTreeMap<RequestId, u32>,
    /// Loads that ended well.
    pub(crate) loaded: u32,
}

pub(crate) fn name(n: u32) -> RequestId {
    RequestId::new(format!("r{n}")).unwrap()
}

fn prompt(n: u32) -> Vec<u32> {
    (n * 100..n * 100 + TOKENS).collect()
}

impl Pair {
    /// P in life 1, D in life 100.
    pub(crate) fn new() -> Self {
        Self::with_checksums(false)
    }

    pub(crate) fn with_checksums(checksums: bool) -> Self {
        Self {
            now: 0,
            p: End::new("p", 1, checksums),
            d: End::new("d", 100, checksums),
            digests: VecDeque::new(),
            checksums,
            p_life: 1,
            links: BTreeMap::new(),
            next_accepted: 0,
            dials: VecDeque::new(),
            wire: VecDeque::new(),
            reads: BTreeMap::new(),
            cancelled: BTreeSet::new(),
            offers: Vec::new(),
            wants: BTreeMap::new(),
            loaded: 0,
        }
    }

    fn end(&mut self, p: bool) -> &mut End {
        if p { &mut self.p } else { &mut self.d }
    }

    /// P accepts prompt `n`, and its workers are to hear of it.
    pub(crate) fn p_starts(&mut self, n: u32) {
        let ask = TransferParams::RemoteDecode { other: Default::default() };
        if self.p.owned.contains_key(&name(n)) || self.p.allocate(&name(n)).is_none() {
            return;
        }
        self.p.s.request_arrived(at(self.now), &name(n), &prompt(n), Some(&ask)).unwrap();
        self.plan(true);
    }

    /// P has computed prompt `n`; the router gets the parameters.
    pub(crate) fn p_finishes(&mut self, n: u32) {
        let Some(blocks) = self.p.owned.get(&name(n)).cloned() else { return };
        for block in &blocks {
            self.p.bytes[*block as usize] = n;
        }
        let blocks = vec![blocks.into_iter().map(BlockId).collect()];
        let end = RequestEnd::Complete { computed_tokens: TOKENS, blocks, sampled: vec![] };
        if let Some(params) = self.p.end(self.now, &name(n), &end) {
            let carried = TransferParams::RemotePrefill(Box::new(params)).to_json();
            let Ok(Some(TransferParams::RemotePrefill(params))) = TransferParams::parse(&carried) else {
                panic!("{carried}")
            };
            self.offers.push((n, *params));
        }
        self.plan(true);
    }

    /// D gets request `r` with P's offer `index`.
    pub(crate) fn d_starts(&mut self, r: u32, index: usize) {
        let Some((n, offer)) = self.offers.get(index).cloned() else { return };
        let params = TransferParams::RemotePrefill(Box::new(offer));
        if self.d.s.request_arrived(at(self.now), &name(r), &prompt(n), Some(&params)).is_ok() {
            self.wants.insert(name(r), n);
        }
        self.plan(false);
    }

    /// D has room for request `r`.
    pub(crate) fn d_allocates(&mut self, r: u32) {
        let request = name(r);
        let remote = self.d.s.remote_tokens(&request, 0);
        if !self.wants.contains_key(&request) {
            return;
        }
        let Some(blocks) = self.d.allocate(&request) else { return };
        self.d.s.blocks_allocated(at(self.now), &request, 0, remote, &[blocks]).unwrap();
        self.plan(false);
    }

    /// Request `r` ends on D, however far it is.
    pub(crate) fn d_ends(&mut self, r: u32) {
        self.d.end(self.now, &name(r), &RequestEnd::Aborted);
        self.wants.remove(&name(r));
        self.plan(false);
    }

    fn plan(&mut self, p: bool) {
        let now = at(self.now);
        let end = self.end(p);
        let plan = end.s.plan_step(now);
        if !plan.is_empty() {
            end.plans.push_back(plan.encode().unwrap());
        }
        self.events(p);
    }

    /// The oldest plan reaches its worker.
    pub(crate) fn carry_plan(&mut self, p: bool) {
        if let Some(plan) = self.end(p).plans.pop_front() {
            self.fact(p, Fact::PlanTaken(Plan::decode(&plan).unwrap()));
        }
    }

    /// The oldest report reaches its scheduler.
    pub(crate) fn carry_report(&mut self, p: bool) {
        let now = at(self.now);
        let end = self.end(p);
        if let Some(report) = end.reports.pop_front() {
            end.s.take_report(now, Report::decode(&report).unwrap());
        }
        self.plan(p);
    }

    fn fact(&mut self, p: bool, fact: Fact) {
        let now = at(self.now);
        let mut out = Vec::new();
        self.end(p).w.take(now, fact, &mut out);
        self.carry_out(p, out);
    }

    fn carry_out(&mut self, p: bool, out: Vec<Decision>) {
        for decision in out {
            match decision {
                Decision::ShakeHands { key } => self.dials.push_back(key),
                Decision::Connect { link: LinkId::Dialled(link), address } => {
                    if u64::from(address.as_bytes()[0]) == self.p_life + 1 {
                        let theirs = self.next_accepted;
                        self.next_accepted += 1;
                        self.links.insert(link, theirs);
                        self.fact(true, Fact::LinkAccepted { link: accepted(theirs) });
                        self.fact(false, Fact::LinkConnected { link: LinkId::Dialled(link) });
                    } else {
                        let detail = "refused".to_owned();
                        self.fact(false, Fact::LinkLost { link: LinkId::Dialled(link), detail });
                    }
                }
                Decision::Disconnect { link } => {
                    if let Some(link) = self.dialled(link) {
                        self.cut(link);
                    }
                }
                Decision::Send { link, message } => {
                    if let Some(link) = self.dialled(link) {
                        self.wire.push_back(Flight { to_p: !p, link, bytes: message.encode().unwrap() });
                    }
                }
                Decision::Read { pull, link, parts } => match self.dialled(link) {
                    Some(link) => {
                        assert!(self.reads.insert(pull.load.0, (link, parts)).is_none(), "read twice")
                    }
                    None => {
                        let result = Err(Failure::new(LoadFailure::PeerLost, "gone"));
                        self.fact(false, Fact::ReadEnded { pull, link, result });
                    }
                },
                Decision::CancelRead { pull } => drop(self.cancelled.insert(pull.load.0)),
                Decision::CheckSelf => {}
                Decision::Digest { of, groups } => self.digests.push_back((p, of, groups)),
                Decision::Connect { link, .. } => panic!("{link:?} is not ours to make"),
            }
        }
        let end = self.end(p);
        let report = end.w.take_report();
        if !report.is_empty() {
            end.reports.push_back(report.encode().unwrap());
        }
    }

    /// D's number of an open connection.
    fn dialled(&self, link: LinkId) -> Option<u64> {
        match link {
            LinkId::Dialled(n) => self.links.contains_key(&n).then_some(n),
            LinkId::Accepted(n) => self.links.iter().find(|(_, theirs)| **theirs == n).map(|(ours, _)| *ours),
        }
    }

    /// A connection is lost, and with it what was on its way. The ends of its reads are told first.
    pub(crate) fn cut(&mut self, link: u64) {
        let Some(theirs) = self.links.remove(&link) else { return };
        self.wire.retain(|flight| flight.link != link);
        let reads: Vec<u64> =
            self.reads.iter().filter(|(_, (l, _))| *l == link).map(|(load, _)| *load).collect();
        for load in reads {
            self.end_read(load, Err(LoadFailure::PeerLost));
        }
        let detail = "cut".to_owned();
        self.fact(false, Fact::LinkLost { link: LinkId::Dialled(link), detail: detail.clone() });
        self.fact(true, Fact::LinkLost { link: accepted(theirs), detail });
    }

    /// The transport is done with a read. A failed one has moved a part of the bytes.
    pub(crate) fn end_read(&mut self, load: u64, result: Result<(), LoadFailure>) {
        let Some((link, parts)) = self.reads.remove(&load) else { return };
        for range in parts.iter().flat_map(|part| &part.ranges) {
            let blocks = if result.is_ok() { range.len / 64 } else { 1 };
            for i in 0..blocks as usize {
                let (from, to) =
                    ((range.remote_offset / 64) as usize + i, (range.local_offset / 64) as usize + i);
                assert!(!self.d.free.contains(&(to as u32)), "P3: a block that was given back is written");
                self.d.bytes[to] = self.p.bytes[from];
            }
        }
        let result = result.map_err(|reason| Failure::new(reason, "paper"));
        self.fact(
            false,
            Fact::ReadEnded { pull: PullId::first(LoadId(load)), link: LinkId::Dialled(link), result },
        );
    }

    /// As a read that ended well, with a wrong byte that the transport does not know of.
    pub(crate) fn end_read_spoilt(&mut self, load: u64) {
        let Some((_, parts)) = self.reads.get_mut(&load) else { return };
        let Some(range) = parts.first_mut().and_then(|part| part.ranges.last_mut()) else { return };
        let last = (range.local_offset + range.len) / 64 - 1;
        let from = (range.remote_offset + range.len) as usize / 64 - 1;
        let right = std::mem::replace(&mut self.p.bytes[from], GARBAGE - 1 - last as u32);
        self.end_read(load, Ok(()));
        self.p.bytes[from] = right;
    }

    /// Digests are computed, of what the blocks hold now.
    pub(crate) fn end_digest(&mut self) {
        let Some((p, of, groups)) = self.digests.pop_front() else { return };
        let bytes = &self.end(p).bytes;
        let digest = |block: BlockId| BlockDigest(u64::from(bytes[block.0 as usize]));
        let digests = Ok(groups.iter().flat_map(|group| group.blocks.iter()).map(digest).collect());
        self.fact(p, Fact::Digested { of, digests });
    }

    /// A handshake ends: with P's card, if P is who is wanted and can be reached.
    pub(crate) fn end_dial(&mut self, reachable: bool) {
        let Some(key) = self.dials.pop_front() else { return };
        let result = if !reachable {
            Err(Failure::new(LoadFailure::HandshakeUnreachable, "nobody there"))
        } else if key.peer.incarnation == life(self.p_life) {
            Ok(card(self.p_life))
        } else {
            Err(Failure::new(LoadFailure::WrongPeer, "another life"))
        };
        self.fact(false, Fact::HandshakeEnded { key, result });
    }

    /// A message arrives; `index` counts those on their way, and order is not promised.
    pub(crate) fn deliver(&mut self, index: usize) {
        let Some(Flight { to_p, link, bytes }) = self.wire.remove(index) else { return };
        let Some(theirs) = self.links.get(&link).copied() else { return };
        let link = if to_p { accepted(theirs) } else { LinkId::Dialled(link) };
        self.fact(to_p, Fact::MessageArrived { link, message: WorkerMessage::decode(&bytes) });
    }

    /// Time passes for all four.
    pub(crate) fn pass(&mut self, span: u64) {
        self.now += span;
        for p in [true, false] {
            let now = at(self.now);
            let mut out = Vec::new();
            self.end(p).w.time_passed(now, &mut out);
            self.carry_out(p, out);
            self.plan(p);
        }
    }

    fn events(&mut self, p: bool) {
        for event in self.end(p).s.take_events() {
            match &event {
                SchedEvent::BlocksReleased { hold, .. } => {
                    let end = self.end(p);
                    let blocks = end.held.remove(hold).expect("held, and released once");
                    end.give_up(blocks);
                }
                SchedEvent::LoadEnded { request, result } => self.judge(request, result),
                SchedEvent::WorkersSilent { .. } | SchedEvent::Drained { .. } => {}
            }
            self.end(p).events.push(event);
        }
    }

    /// A load that counts as good must have brought the right bytes.
    fn judge(&mut self, request: &RequestId, result: &LoadResult) {
        match result {
            LoadResult::Loaded { .. } => {
                self.loaded += 1;
                for block in &self.d.owned[request] {
                    assert_eq!(
                        self.d.bytes[*block as usize], self.wants[request],
                        "P1: wrong bytes count as good"
                    );
                }
            }
            LoadResult::Failed { hold: Some(hold), .. } => {
                let blocks = self.d.owned.remove(request).unwrap();
                assert_eq!(self.d.held.insert(*hold, blocks), None);
            }
            LoadResult::Failed { .. } => {}
        }
    }

    /// P dies and comes back, with nothing of what it knew.
    pub(crate) fn restart_p(&mut self) {
        for link in self.links.keys().copied().collect::<Vec<_>>() {
            self.cut(link);
        }
        self.p_life += 1;
        self.p = End::new("p", self.p_life, self.checksums);
        self.digests.retain(|(p, ..)| !p);
    }

    /// Everything that is on its way arrives, in order, and handshakes end; reads stay as they are.
    pub(crate) fn settle(&mut self) {
        for _ in 0..10_000 {
            self.carry_plan(true);
            self.carry_plan(false);
            self.end_dial(true);
            self.deliver(0);
            self.end_digest();
            self.carry_report(true);
            self.carry_report(false);
            let quiet = [&self.p, &self.d].iter().all(|e| e.plans.is_empty() && e.reports.is_empty());
            if quiet && self.dials.is_empty() && self.wire.is_empty() && self.digests.is_empty() {
                return;
            }
        }
        panic!("it never settles");
    }

    /// The faults stop, the requests end, and time passes: nothing may be left.
    pub(crate) fn heal(&mut self, prompts: u32, requests: u32) {
        for n in 0..prompts {
            self.p.end(self.now, &name(n), &RequestEnd::Aborted);
            self.plan(true);
        }
        for r in 0..requests {
            self.d_ends(r);
        }
        for _ in 0..10_000 {
            self.settle();
            for load in self.reads.keys().copied().collect::<Vec<_>>() {
                self.end_read(load, Err(LoadFailure::Cancelled));
            }
            self.settle();
            let deadlines = [
                self.p.s.next_deadline(),
                self.p.w.next_deadline(),
                self.d.s.next_deadline(),
                self.d.w.next_deadline(),
            ];
            let Some(next) = deadlines.into_iter().flatten().min() else { break };
            let span = u64::try_from(next.since(at(self.now)).as_millis()).unwrap();
            self.pass(span.max(1));
        }
        for end in [&self.p, &self.d] {
            let stats = end.w.stats();
            assert_eq!((stats.pulls, stats.leases, stats.producers), (0, 0, 0), "{:?}", end.w);
            assert_eq!((end.s.holds(), end.s.next_deadline(), end.w.next_deadline()), (0, None, None));
            assert_eq!((end.free.len(), end.held.len()), (BLOCKS as usize, 0), "every block is free again");
        }
    }
}
