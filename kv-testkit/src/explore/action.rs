//! What can happen next, and how a story tells it.

use kv_proto::message::WorkerMessage;
use kv_proto::{ConsumerOrder, ProducerOrder};

use super::machines::Machines;
use super::setup::side_name;
use super::world::{D, Flying, P, World};

/// Something that can happen next. Numbers are those of the world in which it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// P has computed a request's prompt.
    Computed(u8),
    /// The router brings a request to D.
    RouterTellsD(u8),
    /// D allocates blocks for a request.
    Allocated(u8),
    /// A plan reaches a rank.
    PlanArrives(u8, u8),
    /// D's scheduler half hears a report.
    ReportArrives,
    /// A message arrives.
    MessageArrives(u8),
    /// A read has brought every byte.
    ReadWhole(u8),
    /// A cancelled read ends.
    ReadCancelled(u8),
    /// Time passes until the next deadline of anybody.
    TimeJumps,
    /// A message is lost.
    MessageLost(u8),
    /// A message arrives, and will again.
    MessageTwice(u8),
    /// A read says that every byte is here, and they are not the source's.
    ReadSpoiled(u8),
    /// A connection breaks.
    LinkBreaks(u8),
    /// The client leaves a request that P computes.
    LeavesP(u8),
    /// The router drops a request between P and D.
    RouterDrops(u8),
    /// The client leaves a request that D has.
    LeavesD(u8),
    /// P dies, and is back at the same address.
    PDies,
    /// D dies, and is back at the same address.
    DDies,
}

impl Action {
    /// Whether it happens by itself: neither a fault nor time.
    pub(super) const fn is_ordinary(self) -> bool {
        matches!(
            self,
            Self::Computed(_)
                | Self::RouterTellsD(_)
                | Self::Allocated(_)
                | Self::PlanArrives(..)
                | Self::ReportArrives
                | Self::MessageArrives(_)
                | Self::ReadWhole(_)
                | Self::ReadCancelled(_)
        )
    }

    /// Whether something may have to wait for time to pass after it.
    pub(super) const fn disturbs(self) -> bool {
        matches!(
            self,
            Self::TimeJumps
                | Self::MessageLost(_)
                | Self::LinkBreaks(_)
                | Self::RouterDrops(_)
                | Self::PDies
                | Self::DDies
        )
    }

    /// The action in words, in the world in which it happens.
    pub(super) fn told(self, world: &World, machines: &Machines) -> String {
        let message = |n: u8| flying(world.flying[usize::from(n)], machines);
        let read = |n: u8| {
            let read = &world.reads[usize::from(n)];
            format!("the read of load {} on D's rank {}", read.load, read.rank)
        };
        match self {
            Self::Computed(r) => format!("P has computed request {r}; its offer goes to the router"),
            Self::RouterTellsD(r) => format!("request {r} reaches D"),
            Self::Allocated(r) => format!("D allocates blocks for request {r}"),
            Self::PlanArrives(side, rank) => {
                let sent = world.plan_for(side, rank).map(|at| world.plans[at].plan);
                let what = sent.map_or(String::new(), |number| plan(number, machines));
                format!("{}'s rank {rank} takes a plan: {what}", side_name(usize::from(side)))
            }
            Self::ReportArrives => {
                let what = world.reports.first().map_or(String::new(), |r| report(*r, machines));
                format!("D's scheduler half hears {what}")
            }
            Self::MessageArrives(n) => format!("{} arrives", message(n)),
            Self::ReadWhole(n) => format!("{} has brought every byte", read(n)),
            Self::ReadCancelled(n) => format!("{} ends, cancelled", read(n)),
            Self::ReadSpoiled(n) => format!("{} has brought wrong bytes, and does not say so", read(n)),
            Self::TimeJumps => {
                let then = world.next_deadline(machines).unwrap_or(world.now);
                format!("time passes until the next deadline, {then} ms from the start")
            }
            Self::MessageLost(n) => format!("{} is lost", message(n)),
            Self::MessageTwice(n) => format!("{} arrives, and will again", message(n)),
            Self::LinkBreaks(n) => {
                format!("the connection of the two ranks {} breaks", world.links[usize::from(n)].rank)
            }
            Self::LeavesP(r) => format!("the client of request {r} leaves P"),
            Self::RouterDrops(r) => format!("the router drops request {r} between P and D"),
            Self::LeavesD(r) => format!("the client of request {r} leaves D"),
            Self::PDies => "P dies, and is back at the same address".to_owned(),
            Self::DDies => "D dies, and is back at the same address; its requests come again".to_owned(),
        }
    }
}

fn flying(flying: Flying, machines: &Machines) -> String {
    let (to, from) = if flying.to == P as u8 { (P, D) } else { (D, P) };
    let way = format!("from {} to {}, rank {}", side_name(from), side_name(to), flying.rank);
    let what = match machines.message(flying.message) {
        WorkerMessage::Hello { to, .. } => format!("Hello to life {to}"),
        WorkerMessage::Welcome { incarnation, .. } => format!("Welcome of life {incarnation}"),
        WorkerMessage::Unwelcome { reason, .. } => format!("Unwelcome ({reason:?})"),
        WorkerMessage::Renew { seq, wanted, dropped, .. } => {
            format!("Renew {seq} ({} wanted, {} dropped)", wanted.len(), dropped.len())
        }
        WorkerMessage::NotHeld { leases } => {
            let leases: Vec<String> = leases.iter().map(|(lease, _)| lease.to_string()).collect();
            format!("NotHeld of {}", leases.join(", "))
        }
        WorkerMessage::ReadDone { lease, attempt, .. } => format!("ReadDone of {lease}, {attempt}"),
        WorkerMessage::Confirmed { lease, attempt } => format!("Confirmed of {lease}, {attempt}"),
        WorkerMessage::Lapsed { lease, attempt } => format!("Lapsed of {lease}, {attempt}"),
        WorkerMessage::Release { lease, attempt, .. } => format!("Release of {lease}, {attempt}"),
        other => format!("{other:?}"),
    };
    format!("{what} {way},")
}

fn plan(number: u32, machines: &Machines) -> String {
    let plan = machines.plan(number);
    let own = plan.producer.iter().map(|order| match order {
        ProducerOrder::Announce { lease } => format!("announce {lease}"),
        ProducerOrder::Grant { lease, .. } => format!("grant {lease}"),
        ProducerOrder::Forget { lease } => format!("forget {lease}"),
        other => format!("{other:?}"),
    });
    let others = plan.consumer.iter().map(|order| match order {
        ConsumerOrder::Track { lease, .. } => format!("track {lease}"),
        ConsumerOrder::Load { load, lease, .. } => format!("{load} under {lease}"),
        ConsumerOrder::Release { lease, .. } => format!("release {lease}"),
        ConsumerOrder::Cancel { load } => format!("cancel {load}"),
        other => format!("{other:?}"),
    });
    own.chain(others).collect::<Vec<_>>().join(", ")
}

fn report(number: u32, machines: &Machines) -> String {
    let report = machines.report(number);
    let loads = report.loads.iter().map(|(load, end)| match end {
        kv_proto::PullEnd::Loaded(_) => format!("{load} ended well"),
        kv_proto::PullEnd::Failed { reason, .. } => format!("{load} failed: {}", reason.name()),
    });
    format!("from {}: {}", report.rank, loads.collect::<Vec<_>>().join(", "))
}
