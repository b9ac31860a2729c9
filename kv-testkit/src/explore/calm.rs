//! What becomes of a world when the faults stop: everything heals, or a promise is broken.

use super::action::Action;
use super::machines::Machines;
use super::pool::{Seen, name_of};
use super::turn::Turn;
use super::world::{Left, Rules, World};

/// Longest way to rest. Healing takes a few dozen steps; who needs more goes round in circles.
const STEPS_MAX: usize = 1_000;

/// A promise broken on the way to rest: the rest of the story, and what it ends in.
pub(super) type Unhealed = (Vec<String>, String);

/// Worlds that are known to heal.
#[derive(Debug, Default)]
pub(super) struct Healing {
    known: Seen,
}

impl Healing {
    /// Lets a world in which only time is left come to rest: everything that can happen by itself happens, then time
    /// passes, until there is no deadline any more. Then no request waits, no block is held, no table remembers.
    ///
    /// A world on the way that is known to heal ends the way: from there on everything is determined.
    pub(super) fn check(
        &mut self,
        machines: &mut Machines,
        rules: Rules,
        mut world: World,
    ) -> Result<(), Unhealed> {
        world.left = Left::default();
        world.disturbed = true;
        let mut way = Vec::new();
        let mut story = Vec::new();
        let mut actions = Vec::new();
        loop {
            let name = name_of(&world);
            if self.known.contains(&name) {
                break;
            }
            way.push(name);
            world.actions(machines, &mut actions);
            let next = actions.first().copied();
            let next = next.or_else(|| world.next_deadline(machines).map(|_| Action::TimeJumps));
            let Some(action) = next else {
                let open = world.unfinished(machines);
                if let Some(what) = open.or_else(|| world.remembered(machines)) {
                    return Err((story, format!("nothing will ever happen again, and {what}")));
                }
                break;
            };
            story.push(action.told(&world, machines));
            let mut turn = Turn::new(machines, &mut world, rules);
            turn.act(action);
            if let Some(what) = turn.violation {
                return Err((story, what));
            }
            if story.len() > STEPS_MAX {
                let what = world.unfinished(machines).unwrap_or_else(|| "nothing is held".to_owned());
                return Err((story, format!("no rest after {STEPS_MAX} steps without faults; {what}")));
            }
        }
        self.known.extend(way);
        Ok(())
    }
}
