//! The worker half as one machine: both sides, one report.

use kv_proto::{Moment, Report};

use crate::config::WorkerConfig;
use crate::machine::io::{Decision, DigestOf, Fact, LinkId};
use crate::machine::ledger::{Ledger, LedgerStats};
use crate::machine::peers::{PeerStats, Peers};
use crate::machine::pulls::{LocalMemory, Pulls};
use crate::machine::readers::{ReaderStats, Readers};

/// Counters of all parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct WorkerStats {
    /// The lease ledger.
    pub ledger: LedgerStats,
    /// Connections from consumers.
    pub readers: ReaderStats,
    /// Connections to producers.
    pub peers: PeerStats,
    /// Leases in the ledger, in whatever state.
    pub leases: u64,
    /// Pulls that have not ended.
    pub pulls: u64,
    /// Times that a pull was tried again.
    pub retried: u64,
    /// Producers known.
    pub producers: u64,
}

/// The machine. Facts go in by [`WorkerMachine::take`], decisions come out of it, and what the engine is to hear
/// collects in a report.
#[derive(Debug, Clone, Hash)]
pub struct WorkerMachine {
    config: WorkerConfig,
    local: LocalMemory,
    readers: Readers,
    pulls: Pulls,
}

impl WorkerMachine {
    /// A machine without leases, peers or pulls. `transport` is the name of the transport in use.
    pub fn new(config: WorkerConfig, local: LocalMemory, transport: &'static str) -> Self {
        let readers = Readers::new(Ledger::new(config.limits.remember_ended));
        let pulls = Pulls::new(Peers::new(transport));
        Self { config, local, readers, pulls }
    }

    /// The configuration in force.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// Takes one fact and adds what follows from it to `out`, in the order in which it is to be done.
    pub fn take(&mut self, now: Moment, fact: Fact, out: &mut Vec<Decision>) {
        let Self { config, local, readers, pulls } = self;
        match fact {
            Fact::PlanTaken(plan) => {
                readers.plan_taken(now, &plan, out);
                pulls.plan_taken(now, config, local, plan, out);
            }
            Fact::HandshakeEnded { key, result } => {
                let peers = pulls.peers_mut();
                let change = peers.handshake_ended(now, config, &local.layout, &key, result, out);
                self.changed(now, change, out);
            }
            Fact::LinkConnected { link } => pulls.peers_mut().connected(config, link, out),
            Fact::LinkAccepted { link } => readers.accepted(now, config, link),
            Fact::LinkLost { link: link @ LinkId::Accepted(_), .. } => readers.lost(now, link),
            Fact::LinkLost { link, detail } => {
                let change = pulls.peers_mut().lost(now, config, link, &detail, out);
                self.changed(now, change, out);
            }
            Fact::MessageArrived { link: link @ LinkId::Accepted(_), message } => {
                readers.message(now, config, &local.layout, link, message, out);
            }
            Fact::MessageArrived { link, message } => {
                let change = pulls.peers_mut().message(now, config, link, message.ok(), out);
                self.changed(now, change, out);
            }
            Fact::ReadEnded { pull, link, result } => {
                pulls.read_ended(now, config, local, pull, link, result, out);
            }
            Fact::Digested { of: DigestOf::Pull { pull, from }, digests } => {
                pulls.digested(now, config, pull, from, digests, out);
            }
            Fact::Digested { of: DigestOf::Question(number), digests } => {
                readers.digested(number, digests, out);
            }
            Fact::SelfChecked { found } => readers.self_checked(now, config, found),
        }
    }

    fn changed(
        &mut self,
        now: Moment,
        change: Option<crate::machine::peers::Change>,
        out: &mut Vec<Decision>,
    ) {
        if let Some(change) = change {
            self.pulls.changed(now, &self.config, &self.local, change, out);
        }
    }

    /// The worker ends: every pull ends with [`kv_proto::LoadFailure::Closed`], at once or when its read has ended.
    pub fn close(&mut self, now: Moment, out: &mut Vec<Decision>) {
        self.pulls.close(now, &self.config, out);
    }

    /// Lets deadlines pass that have come. To be called after every fact that has arrived was taken.
    pub fn time_passed(&mut self, now: Moment, out: &mut Vec<Decision>) {
        self.readers.time_passed(now, out);
        self.pulls.time_passed(now, &self.config, &self.local, out);
    }

    /// When [`WorkerMachine::time_passed`] has something to do.
    pub fn next_deadline(&self) -> Option<Moment> {
        [self.readers.next_deadline(), self.pulls.next_deadline()].into_iter().flatten().min()
    }

    /// What ended since the last call.
    pub fn take_report(&mut self) -> Report {
        let (leases, loads) = (self.readers.take_ended(), self.pulls.take_ended());
        Report { leases, loads, ..Report::new(self.config.rank) }
    }

    /// Counters.
    pub fn stats(&self) -> WorkerStats {
        WorkerStats {
            ledger: self.readers.ledger().stats(),
            readers: self.readers.stats(),
            peers: self.pulls.peers().stats(),
            leases: self.readers.ledger().len() as u64,
            pulls: self.pulls.len() as u64,
            retried: self.pulls.stats().retried,
            producers: self.pulls.peers().len() as u64,
        }
    }
}
