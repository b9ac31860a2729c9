//! **P3: blocks are neither lost nor doubled.** A block is freed only while it is not free, and in the end every block of
//! every engine is free.

use super::super::world::World;
use super::Invariant;

pub(super) const NAME: &str = "conserved";

pub(super) fn judge(world: &mut World) {
    for index in 0..world.engines.len() {
        let pool = &world.engines[index].pool;
        let (free, size) = (pool.free_count(), pool.size as usize);
        if free != size {
            let what = format!("{} blocks of engine {index} are not free in the end", size - free);
            world.violate(Invariant::Conserved, what);
        }
    }
}
