//! A worker's machine with a clock that the tables turn, and what it reports as short lines.

use kv_proto::message::WorkerMessage;
use kv_proto::{CodecError, LoadFailure, PullEnd};
use kv_worker::machine::io::{Fact, LinkId};

use super::chart::Machine;
use super::common::{Rig, at, dialled, line, welcome};

/// Time between two inputs.
pub(crate) const STEP_MS: u64 = 10;

pub(crate) struct Bench {
    rig: Rig,
    now: u64,
    /// When the time of the state is over, if it has a limit.
    deadline: Option<u64>,
    describe: fn(&str) -> String,
}

impl Machine for Bench {
    fn again(&self) -> Self {
        Self { rig: self.rig.clone(), ..*self }
    }

    fn state(&self) -> String {
        (self.describe)(&self.all())
    }

    fn all(&self) -> String {
        format!("{:?}", self.rig.m)
    }

    fn counters(&self) -> Vec<String> {
        let stats = self.rig.m.stats();
        vec![format!("{:?}", stats.ledger), format!("{:?}", stats.readers), format!("{:?}", stats.peers)]
    }
}

impl Bench {
    /// A worker that has done nothing; `describe` finds the state in what `{:?}` writes of it.
    pub(crate) fn new(describe: fn(&str) -> String) -> Self {
        Self { rig: Rig::new(), now: 0, deadline: None, describe }
    }

    /// The same, with checksums.
    pub(crate) fn with_checksums(describe: fn(&str) -> String) -> Self {
        Self { rig: Rig::with_checksums(super::common::limits()), ..Self::new(describe) }
    }

    /// The machine after some inputs, whatever came out of them.
    pub(crate) fn after(mut self, inputs: &[fn(&mut Self) -> Vec<String>]) -> Self {
        for input in inputs {
            input(&mut self);
        }
        self
    }

    /// The last input began something that has so long.
    pub(crate) fn due_in(self, ms: u64) -> Self {
        Self { deadline: Some(self.now + ms), ..self }
    }

    /// Does something to the machine, and adds the report to what comes out.
    pub(crate) fn step(&mut self, what: impl FnOnce(&mut Rig, u64) -> Vec<String>) -> Vec<String> {
        self.now += STEP_MS;
        let mut out = what(&mut self.rig, self.now);
        let report = self.rig.m.take_report();
        out.extend(report.leases.iter().map(|(lease, end)| format!("reports {lease} {}", end.name())));
        out.extend(report.loads.iter().map(|(load, end)| match end {
            PullEnd::Loaded(_) => format!("reports {load} loaded"),
            PullEnd::Failed { reason, .. } => format!("reports {load} failed: {}", reason.name()),
        }));
        out
    }

    pub(crate) fn hear(&mut self, link: LinkId, message: WorkerMessage) -> Vec<String> {
        self.step(|rig, now| rig.hear(now, link, message))
    }

    pub(crate) fn hear_noise(&mut self, link: LinkId) -> Vec<String> {
        let message = Err(CodecError::TooLong { what: "worker message", bytes: 2, limit: 1 });
        self.step(|rig, now| rig.take(now, Fact::MessageArrived { link, message }))
    }

    pub(crate) fn lose(&mut self, link: LinkId) -> Vec<String> {
        self.step(|rig, now| rig.lost(now, link))
    }

    pub(crate) fn pass(&mut self, ms: u64) -> Vec<String> {
        self.now += ms - STEP_MS;
        self.step(|rig, now| rig.pass(now))
    }

    /// Lets no time pass for the machine, but its next input comes later.
    pub(crate) fn wait(&mut self, ms: u64) -> &mut Self {
        self.now += ms;
        self
    }

    /// The limit of the state comes, and not a moment too early.
    pub(crate) fn deadline(&mut self) -> Vec<String> {
        let Some(deadline) = self.deadline else { return self.pass(1_000) };
        let before = self.state();
        let early = self.rig.pass(deadline - 1);
        assert_eq!(self.state(), before, "a millisecond before its limit");
        [early, self.pass(deadline - self.now)].concat()
    }

    /// Producer 1's card came, its worker was connected over `link` and welcomes us.
    pub(crate) fn becomes_ready(&mut self, link: u64) -> Vec<String> {
        let shaken = self.step(|rig, now| rig.shaken(now, 1));
        let connected = self.step(|rig, now| rig.connected(now, link));
        let welcomed = self.hear(dialled(link), welcome(1));
        [shaken, connected, welcomed].concat()
    }

    pub(crate) fn read_failed(&mut self) -> Vec<String> {
        self.step(|rig, now| rig.read_failed(now, 1, LoadFailure::ReadFailed))
    }

    pub(crate) fn close(&mut self) -> Vec<String> {
        self.step(|rig, now| {
            let mut out = Vec::new();
            rig.m.close(at(now), &mut out);
            out.iter().map(line).collect()
        })
    }
}
