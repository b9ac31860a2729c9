//! **P6: after the faults everything heals.** In the end no scheduler half holds anything or waits for
//! a deadline.

use super::super::world::World;
use super::Invariant;

pub(super) const NAME: &str = "healed";

pub(super) fn judge(world: &mut World) {
    for index in 0..world.engines.len() {
        let engine = &world.engines[index];
        let mut left = Vec::new();
        if let Some(scheduler) = &engine.scheduler {
            if scheduler.holds() > 0 {
                left.push(format!("the scheduler half has {} holds", scheduler.holds()));
            }
            if let Some(deadline) = scheduler.next_deadline() {
                left.push(format!("the scheduler half waits for {deadline}"));
            }
        }
        if !left.is_empty() {
            world.violate(Invariant::Healed, format!("engine {index} in the end: {}", left.join("; ")));
        }
    }
}
