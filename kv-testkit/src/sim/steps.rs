//! An engine's loop in a simulated world: turns, plans out, reports in, and what follows from them.

use std::rc::Rc;
use std::time::Duration;

use kv_proto::{BlockId, ConsumerOrder, Plan, PullEnd, Rank, Report, RequestId};
use kv_sched::{HoldId, LoadResult, SchedEvent};

use super::canary::Canary;
use super::faults::FaultKind;
use super::world::{Event, MS, Time, WorkerAt, World};

impl World {
    /// Wakes an engine's loop, if it is not awake.
    pub(super) fn wake(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        if engine.alive && !engine.ticking {
            engine.ticking = true;
            let life = engine.life;
            let wait = self.dice.between(1, 8) * MS;
            self.after(wait, Event::Tick { engine: index, life });
        }
    }

    /// One turn of an engine's loop.
    pub(super) fn tick(&mut self, index: usize, life: u32) {
        let engine = &mut self.engines[index];
        if !engine.alive || engine.life != life {
            return;
        }
        if let Some(until) = engine.waits(self.now) {
            return self.at(until, Event::Tick { engine: index, life });
        }
        engine.ticking = false;
        self.take_events(index);
        self.recover(index);
        self.take_foreign(index);
        let names: Vec<RequestId> = self.engines[index].requests.keys().cloned().collect();
        for id in names {
            self.advance(index, &id);
        }
        self.send_plan(index);
        if self.strikes(FaultKind::SlowStep) {
            let wait = self.dice.between(30, 900) * MS;
            self.tell(|| format!("a step of engine {index} takes {} ms", wait / MS));
            self.engines[index].busy_until = self.now + wait;
        }
        let engine = &self.engines[index];
        let deadline = engine.next_deadline();
        if !engine.requests.is_empty() {
            self.wake(index);
        } else if let Some(deadline) = deadline {
            // Asleep until a deadline of one of its machines; another event wakes it earlier.
            let when = self.engines[index].clock.when(deadline);
            self.at(when.max(self.now + MS), Event::Tick { engine: index, life });
        }
    }

    fn send_plan(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        let mut plan = scheduler.plan_step(engine.clock.read(self.now));
        if plan.is_empty() {
            return;
        }
        for order in &mut plan.consumer {
            if let ConsumerOrder::Load { load, groups, .. } = order {
                let head: Vec<BlockId> = groups.first().map_or_else(Vec::new, |g| g.remote.iter().collect());
                for group in groups {
                    if self.canary == Some(Canary::WindowNotClipped) && group.group > 0 {
                        group.remote = head.iter().copied().take(group.remote.len() as usize).collect();
                    }
                    for BlockId(block) in group.local.iter() {
                        engine.pool.tags[block as usize] = Some(*load);
                    }
                    if self.canary == Some(Canary::PairedFromTail) && group.first > 0 {
                        // Shorter lists are matched at their ends only if both end together; here one does not.
                        let shifted: Vec<BlockId> =
                            group.remote.iter().map(|b| BlockId(b.0.saturating_sub(1))).collect();
                        group.remote = shifted.into_iter().collect();
                    }
                }
            }
        }
        let (life, ranks) = (engine.life, engine.ranks);
        let Ok(bytes) = plan.encode() else { return };
        let bytes = Rc::new(bytes);
        let mut last = self.now;
        for rank in 0..ranks {
            let mut wait = self.engines[index].lag + self.dice.between(0, 4) * MS;
            if self.strikes(FaultKind::PlanLate) {
                wait += self.dice.between(5, 150) * MS;
                self.tell(|| format!("a plan of engine {index} is late at rank {rank}"));
            }
            let at = WorkerAt { engine: index, life, rank };
            // Plans reach a worker in their order (H-8), whatever holds one of them up.
            let worker = &mut self.engines[index].workers[rank];
            let when = (self.now + wait).max(worker.plans_until);
            worker.plans_until = when;
            worker.plans.push_back(bytes.clone());
            last = last.max(when);
            self.at(when, Event::PlanAtWorker { at });
            if self.has(Canary::FailureBeforeQuiet) {
                self.report_cancelled_at_once(at, &plan);
            }
        }
        for request in self.engines[index].requests.values_mut() {
            request.announced_at.get_or_insert(last);
        }
    }

    /// The canary: a worker that reports a cancelled load as ended without waiting for the transport.
    fn report_cancelled_at_once(&mut self, at: WorkerAt, plan: &Plan) {
        let mut report = Report::new(Rank(at.rank as u32));
        for order in &plan.consumer {
            if let ConsumerOrder::Cancel { load } = order {
                let reason = kv_proto::LoadFailure::Cancelled;
                report.loads.push((*load, PullEnd::Failed { reason, detail: String::new(), verified: 0 }));
            }
        }
        if let (false, Ok(report)) = (report.is_empty(), report.encode()) {
            let again = false;
            self.after(MS, Event::ReportAtScheduler { engine: at.engine, life: at.life, report, again });
        }
    }

    /// A report arrives; `again` if it is one that has arrived before.
    pub(super) fn report_at_scheduler(&mut self, index: usize, life: u32, report: &[u8], again: bool) {
        let engine = &mut self.engines[index];
        if !engine.alive || engine.life != life {
            return;
        }
        if let Some(until) = engine.waits(self.now) {
            let report = report.to_vec();
            return self.at(until, Event::ReportAtScheduler { engine: index, life, report, again });
        }
        let Ok(mut report) = Report::decode(report) else { return };
        if again && self.has(Canary::DuplicateReleaseFreesTwice) {
            for (lease, _) in &report.leases {
                self.release_again(index, HoldId::Lease(*lease));
            }
        }
        let engine = &mut self.engines[index];
        if again && self.canary == Some(Canary::ReportsCounted) {
            report.rank = Rank((report.rank.0 + 1) % engine.ranks as u32);
        }
        let Some(scheduler) = &mut engine.scheduler else { return };
        let now = engine.clock.read(self.now);
        let ranks = engine.ranks as u32;
        if self.canary == Some(Canary::KeptTooLong) {
            for (_, end) in &mut report.loads {
                if let PullEnd::Failed { verified, .. } = end {
                    *verified = verified.saturating_add(1);
                }
            }
        }
        let one_is_all = match self.canary {
            Some(Canary::FreedByFirstRank) => !report.leases.is_empty(),
            Some(Canary::OneRankEnough) => report.loads.iter().any(|(_, e)| matches!(e, PullEnd::Loaded(_))),
            _ => false,
        };
        if one_is_all {
            for rank in 0..ranks {
                scheduler.take_report(now, Report { rank: Rank(rank), ..report.clone() });
            }
        } else {
            scheduler.take_report(now, report);
        }
        self.take_events(index);
        self.wake(index);
    }

    fn take_events(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        let Some(scheduler) = &mut engine.scheduler else { return };
        scheduler.time_passed(engine.clock.read(self.now));
        for event in scheduler.take_events() {
            match event {
                SchedEvent::LoadEnded { result: LoadResult::Failed { .. }, .. }
                    if self.canary == Some(Canary::FailureUntold) => {}
                SchedEvent::LoadEnded { request, result } => self.load_ended(index, &request, result),
                SchedEvent::BlocksReleased { hold, request, .. } => self.release_hold(index, hold, &request),
                SchedEvent::Drained { left } => {
                    self.tell(|| format!("engine {index} has drained, left {left:?}"));
                }
                SchedEvent::WorkersSilent { hold, missing } => {
                    self.tell(|| format!("{hold:?} on engine {index}: no word from {missing:?}"));
                }
            }
        }
    }

    /// An engine drains. By the second limit it must have said that it has.
    pub(super) fn drain(&mut self, index: usize, limit: Time, back_after: Time) {
        let now = self.now;
        let engine = &mut self.engines[index];
        let life = engine.life;
        let Some(scheduler) = &mut engine.scheduler else { return };
        engine.draining = true;
        scheduler.drain(engine.clock.read(now), Duration::from_micros(limit));
        self.tell(|| format!("engine {index} drains for {} ms", limit / MS));
        self.after(limit + back_after, Event::Resume { engine: index, life });
        self.take_events(index);
        self.wake(index);
    }

    pub(super) fn resume(&mut self, index: usize, life: u32) {
        let engine = &mut self.engines[index];
        if engine.life != life {
            return;
        }
        let Some(scheduler) = &mut engine.scheduler else { return };
        scheduler.resume();
        engine.draining = false;
        self.tell(|| format!("engine {index} takes new hand-overs again"));
    }
}
