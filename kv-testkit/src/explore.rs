//! An explorer: the real machines of one producer and one consumer, and *every* order in which a few things can happen.
//!
//! Breadth first, so that the first way to a violation is a shortest one. A state is everything: both scheduler halves,
//! all workers, what is under way between them, what blocks hold. Two states that print alike are one.
//!
//! What may happen at each point: a plan, a report or a message arrives (messages in any order), is lost, arrives twice;
//! a read copies, or ends; time jumps to the next deadline of anybody; P finishes a request, its router tells D, D
//! allocates, a client goes away; P dies and comes back at the same address. How often each may happen is a [`Bounds`].
//!
//! The story begins when the two engines have shaken hands and greeted: what comes before is the simulator's business.

mod state;

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};

pub use state::Mutant;
use state::State;

/// How much may happen in one story.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Requests, 1 to 2.
    pub requests: usize,
    /// Ranks of both engines, 1 to 2.
    pub ranks: usize,
    /// Messages that may be lost.
    pub losses: u8,
    /// Messages that may arrive twice.
    pub repeats: u8,
    /// Jumps of time.
    pub jumps: u8,
    /// Clients that may go away.
    pub aborts: u8,
    /// Deaths of P.
    pub crashes: u8,
    /// Longest story, in steps.
    pub depth: u16,
    /// Most states.
    pub states: usize,
}

impl Bounds {
    /// A bound that is explored to its end in seconds.
    pub const fn small() -> Self {
        Self {
            requests: 1,
            ranks: 1,
            losses: 1,
            repeats: 1,
            jumps: 2,
            aborts: 1,
            crashes: 1,
            depth: 60,
            states: 2_000_000,
        }
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Different states seen.
    pub states: usize,
    /// Steps taken between them.
    pub steps: usize,
    /// Length of the longest story that leads to a new state.
    pub longest: u16,
    /// Whether every state within the bounds was seen.
    pub complete: bool,
    /// States in which a load had ended well; a model in which none does shows nothing.
    pub loaded: usize,
    /// States in which a load had ended badly.
    pub failed: usize,
    /// A shortest story that ends in a violation, and the violation.
    pub violation: Option<(Vec<String>, String)>,
}

/// Explores everything within the bounds, with a guard taken out if a mutant is named.
pub fn explore(bounds: Bounds, mutant: Option<Mutant>) -> Found {
    // Only looked up, never walked through: the order of the map is nobody's business.
    let mut seen: HashMap<u64, usize> = HashMap::new();
    let mut parents: Vec<(usize, String)> = vec![(0, String::new())];
    let mut queue: VecDeque<(usize, u16, State)> = VecDeque::new();
    let first = State::new(bounds, mutant);
    seen.insert(key(&first), 0);
    queue.push_back((0, 0, first));
    let mut found =
        Found { states: 1, steps: 0, longest: 0, complete: true, loaded: 0, failed: 0, violation: None };
    while let Some((number, depth, state)) = queue.pop_front() {
        if depth >= bounds.depth {
            found.complete = false;
            continue;
        }
        for action in state.actions() {
            let mut next = state.clone();
            next.act(&action);
            found.steps += 1;
            if let Some(what) = next.violation() {
                let mut story = vec![action.to_string()];
                let mut at = number;
                while at != 0 {
                    story.push(parents[at].1.clone());
                    at = parents[at].0;
                }
                story.reverse();
                found.violation = Some((story, what.to_owned()));
                return found;
            }
            let key = key(&next);
            if seen.contains_key(&key) {
                continue;
            }
            if found.states >= bounds.states {
                found.complete = false;
                continue;
            }
            let id = parents.len();
            seen.insert(key, id);
            parents.push((number, action.to_string()));
            found.states += 1;
            found.longest = found.longest.max(depth + 1);
            found.loaded += usize::from(next.loaded > 0);
            found.failed += usize::from(next.failed > 0);
            queue.push_back((id, depth + 1, next));
        }
    }
    found
}

/// States that print alike are one.
fn key(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.print().hash(&mut hasher);
    hasher.finish()
}
