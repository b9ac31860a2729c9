//! **P6: after the faults everything heals.** In the end no machine remembers anything: no hold, no lease, no pull, and no
//! deadline but that of an idle connection.

use super::super::world::World;
use super::Invariant;

pub(super) const NAME: &str = "healed";

pub(super) fn judge(world: &mut World) {
    for index in 0..world.engines.len() {
        let engine = &world.engines[index];
        let holds = engine.scheduler.as_ref().map_or(0, |scheduler| scheduler.holds());
        let mut left = Vec::new();
        if holds > 0 {
            left.push(format!("the scheduler half has {holds} holds"));
        }
        for (rank, worker) in engine.workers.iter().enumerate() {
            let stats = worker.machine.stats();
            if stats.leases > 0 || stats.pulls > 0 || stats.producers > 0 {
                left.push(format!(
                    "worker {rank} has {} leases, {} pulls, {} producers",
                    stats.leases, stats.pulls, stats.producers
                ));
            }
        }
        if !left.is_empty() {
            world.violate(Invariant::Healed, format!("engine {index} in the end: {}", left.join("; ")));
        }
    }
}
