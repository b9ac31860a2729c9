//! **P6: no table has grown.** In the end the tables of every worker are empty: no lease is remembered, no pull, no
//! producer, no deadline; the recovery machine of a consumer remembers no request and no producer; and between the workers no connection is open and no read goes on.

use super::super::world::World;
use super::Invariant;

pub(super) const NAME: &str = "bounded";

pub(super) fn judge(world: &mut World) {
    for index in 0..world.engines.len() {
        let mut left = Vec::new();
        for (rank, worker) in world.engines[index].workers.iter().enumerate() {
            let stats = worker.machine.stats();
            if stats.leases > 0 || stats.pulls > 0 || stats.producers > 0 {
                left.push(format!(
                    "worker {rank} has {} leases, {} pulls, {} producers",
                    stats.leases, stats.pulls, stats.producers
                ));
            } else if let Some(deadline) = worker.machine.next_deadline() {
                left.push(format!("worker {rank} waits for {deadline}"));
            }
        }
        if let Some(machine) = world.engines[index].recovery.as_ref().map(|recovery| &recovery.machine) {
            let (requests, peers) = (machine.request_count(), machine.peer_count());
            if requests > 0 || peers > 0 || machine.next_deadline().is_some() {
                left.push(format!("the recovery machine has {requests} requests, {peers} producers"));
            }
        }
        if !left.is_empty() {
            world.violate(Invariant::Bounded, format!("engine {index} in the end: {}", left.join("; ")));
        }
    }
    let (links, reads) = (world.links.len(), world.reads.len());
    if links > 0 || reads > 0 {
        world.violate(
            Invariant::Bounded,
            format!("{links} connections and {reads} reads are left in the end"),
        );
    }
}
