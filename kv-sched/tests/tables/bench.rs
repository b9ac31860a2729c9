//! A scheduler half with a clock that the tables turn, and its answers as short lines.

use kv_proto::{BlockList, ConsumerOrder, LeaseEnd, ProducerOrder, PullEnd};
use kv_sched::{Finish, HoldId, LoadResult, RequestEnd, SchedEvent, Scheduler, Verdict};

use super::chart::Machine;
use super::common::{at, lease_report, load_report, prompt, req, scheduler};
use super::words::variant;

/// The request that the tables are about.
pub(crate) const R: &str = "r";
/// Its prompt.
pub(crate) const TOKENS: u32 = 8;
/// Time between two inputs.
const STEP_MS: u64 = 10;

pub(crate) struct Bench {
    s: Scheduler,
    now: u64,
    describe: fn(&str) -> String,
}

impl Machine for Bench {
    fn again(&self) -> Self {
        Self { s: self.s.clone(), now: self.now, describe: self.describe }
    }

    fn state(&self) -> String {
        (self.describe)(&self.all())
    }

    fn all(&self) -> String {
        format!("{:?}", self.s)
    }

    fn counters(&self) -> Vec<String> {
        vec![format!("{:?}", self.s.producer_stats()), format!("{:?}", self.s.consumer_stats())]
    }
}

impl Bench {
    /// An engine of two ranks that has done nothing; `describe` finds the state in what `{:?}` writes of it.
    pub(crate) fn new(describe: fn(&str) -> String) -> Self {
        Self { s: scheduler(2), now: 0, describe }
    }

    /// The machine after some inputs, whatever came out of them.
    pub(crate) fn after(mut self, inputs: &[fn(&mut Self) -> Vec<String>]) -> Self {
        for input in inputs {
            input(&mut self);
        }
        self
    }

    /// Calls a hook, and adds the plan and the events to its answer.
    fn step(&mut self, hook: impl FnOnce(&mut Scheduler, kv_proto::Moment) -> Option<String>) -> Vec<String> {
        self.now += STEP_MS;
        let mut out: Vec<String> = hook(&mut self.s, at(self.now)).into_iter().collect();
        let plan = self.s.plan_step(at(self.now));
        out.extend(plan.producer.iter().map(producer_order));
        out.extend(plan.consumer.iter().map(consumer_order));
        out.extend(self.s.take_events().iter().map(event));
        out
    }

    pub(crate) fn arrive(
        &mut self,
        name: &str,
        tokens: u32,
        params: &kv_proto::TransferParams,
    ) -> Vec<String> {
        self.step(|s, now| {
            Some(match s.request_arrived(now, &req(name), &prompt(tokens), Some(params)) {
                Ok(role) => format!("role {role:?}"),
                Err(error) => refused(&error),
            })
        })
    }

    pub(crate) fn finish(&mut self, name: &str, end: &RequestEnd) -> Vec<String> {
        self.step(|s, now| Some(finish(&s.request_finished(now, &req(name), end))))
    }

    pub(crate) fn ask(&mut self) -> Vec<String> {
        self.step(|s, _| Some(format!("answer {}", s.remote_tokens(&req(R), 0))))
    }

    pub(crate) fn use_source(&mut self, n: usize) -> Vec<String> {
        self.step(|s, _| s.use_source(&req(R), n).err().map(|error| refused(&error)))
    }

    pub(crate) fn decline(&mut self) -> Vec<String> {
        self.step(|s, _| {
            s.request_declined(&req(R));
            None
        })
    }

    pub(crate) fn allocate(&mut self, name: &str, local: u32, remote: u32, blocks: BlockList) -> Vec<String> {
        self.step(|s, now| {
            s.blocks_allocated(now, &req(name), local, remote, &[blocks]).err().map(|error| refused(&error))
        })
    }

    pub(crate) fn lease(&mut self, rank: u32, lease: u64, end: LeaseEnd) -> Vec<String> {
        self.step(|s, now| {
            s.take_report(now, lease_report(rank, lease, end));
            None
        })
    }

    pub(crate) fn load(&mut self, rank: u32, load: u64, end: PullEnd) -> Vec<String> {
        self.step(|s, now| {
            s.take_report(now, load_report(rank, load, end));
            None
        })
    }

    /// The request loses its blocks.
    pub(crate) fn preempt(&mut self) -> Vec<String> {
        self.step(|s, now| {
            Some(match s.request_preempted(now, &req(R)) {
                Verdict::Free => "verdict Free".to_owned(),
                Verdict::Hold(held) => format!("verdict Hold {}", hold(held)),
            })
        })
    }

    /// Takes nothing more, and ends what is there at once.
    pub(crate) fn drain(&mut self) -> Vec<String> {
        self.step(|s, now| {
            s.drain(now, std::time::Duration::ZERO);
            None
        })
    }

    pub(crate) fn pass(&mut self, ms: u64) -> Vec<String> {
        self.now += ms;
        self.step(|s, now| {
            s.time_passed(now);
            None
        })
    }
}

fn refused(error: &kv_sched::SchedError) -> String {
    format!("refused: {}", variant(&format!("{error:?}")))
}

fn hold(hold: HoldId) -> String {
    match hold {
        HoldId::Lease(lease) => lease.to_string(),
        HoldId::Load(load) => load.to_string(),
    }
}

fn finish(finish: &Finish) -> String {
    let verdict = match finish.verdict {
        Verdict::Free => "verdict Free".to_owned(),
        Verdict::Hold(held) => format!("verdict Hold {}", hold(held)),
    };
    match &finish.params {
        None => verdict,
        Some(offer) => format!("{verdict}; offer of {} tokens", offer.tokens),
    }
}

fn producer_order(order: &ProducerOrder) -> String {
    match order {
        ProducerOrder::Announce { lease } => format!("Announce {lease}"),
        ProducerOrder::Grant { lease, .. } => format!("Grant {lease}"),
        ProducerOrder::Forget { lease } => format!("Forget {lease}"),
        ProducerOrder::Revoke { lease } => format!("Revoke {lease}"),
        other => format!("{other:?}"),
    }
}

fn consumer_order(order: &ConsumerOrder) -> String {
    match order {
        ConsumerOrder::Track { lease, .. } => format!("Track {}", lease.lease),
        ConsumerOrder::Load { load, lease, groups, .. } => {
            let blocks: u32 = groups.iter().map(|group| group.local.len()).sum();
            format!("Load {load} under {}, blocks: {blocks}", lease.lease)
        }
        ConsumerOrder::Release { lease, reason, .. } => format!("Release {}: {}", lease.lease, reason.name()),
        ConsumerOrder::Cancel { load } => format!("Cancel {load}"),
        other => format!("{other:?}"),
    }
}

fn event(event: &SchedEvent) -> String {
    match event {
        SchedEvent::LoadEnded { result: LoadResult::Loaded { tokens, remote_tokens, .. }, .. } => {
            format!("LoadEnded: {tokens} tokens are here, {remote_tokens} of them read")
        }
        SchedEvent::LoadEnded {
            result: LoadResult::Failed { reason, invalid, valid_tokens, hold: held, others, .. },
            ..
        } => {
            let blocks: u32 = invalid.iter().map(BlockList::len).sum();
            let held = held.map_or("quiet".to_owned(), |held| format!("held by {}", hold(held)));
            let reason = reason.name();
            let others =
                if others.is_empty() { String::new() } else { format!(", {} to be tried", others.len()) };
            format!(
                "LoadEnded: {reason}, {valid_tokens} tokens valid, {blocks} blocks invalid and {held}{others}"
            )
        }
        SchedEvent::BlocksReleased { hold: held, .. } => format!("BlocksReleased {}", hold(*held)),
        SchedEvent::Drained { left } => {
            let held = left.leases + left.loads;
            format!("Drained: {} compute or wait, {held} hold blocks", left.computing + left.queued)
        }
        SchedEvent::WorkersSilent { hold: held, missing } => {
            let missing: Vec<String> = missing.iter().map(|rank| rank.to_string()).collect();
            format!("WorkersSilent {}: {}", hold(*held), missing.join(", "))
        }
    }
}
