//! **P4: nothing waits for ever.** When the faults have stopped and the longest chain of limits has passed, no request is
//! left in any engine.

use super::super::world::World;
use super::Invariant;

pub(super) const NAME: &str = "no-hang";

pub(super) fn judge(world: &mut World) {
    for index in 0..world.engines.len() {
        let left: Vec<String> = world.engines[index].requests.keys().map(ToString::to_string).collect();
        if !left.is_empty() {
            world.violate(Invariant::NoHang, format!("requests {left:?} of engine {index} never ended"));
        }
    }
}
