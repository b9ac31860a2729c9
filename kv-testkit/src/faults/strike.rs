//! Choosing: which fault an operation suffers, and the memory of it.

use super::choose::Chooser;
use super::plan::{Fault, FaultPlan, Injected, On, Recording, is_message};
use crate::sim::Dice;

#[derive(Debug)]
struct Line {
    on: On,
    message: Option<String>,
    chooser: Chooser,
    fault: Fault,
    draw: Option<u64>,
}

/// A plan at work.
#[derive(Debug)]
pub(super) struct Striker {
    lines: Vec<Line>,
    dice: Dice,
    seen: [u64; 3],
    recording: Recording,
}

impl Striker {
    pub(super) fn new(plan: &FaultPlan) -> Self {
        let mut seeds = Dice::new(plan.seed());
        let dice = seeds.split();
        let lines = plan.rules().iter().map(|rule| {
            let (on, message, which, limit, fault, draw) = rule.parts();
            let chooser = Chooser::new(which.clone(), limit, seeds.split());
            Line { on, message: message.map(str::to_owned), chooser, fault, draw }
        });
        Self { lines: lines.collect(), dice, seen: [0; 3], recording: Recording::default() }
    }

    /// The next operation of a kind; a message with its bytes. What it suffers, and the draw for that.
    pub(super) fn next(&mut self, on: On, message: &[u8]) -> Option<(Fault, u64)> {
        let seen = &mut self.seen[on as usize];
        *seen += 1;
        let mut struck = None;
        for line in self.lines.iter_mut().filter(|line| line.on == on) {
            let about = line.message.as_deref().is_none_or(|name| is_message(message, name));
            // Later rules count the operation too, so that taking a rule out does not shift the others.
            if about && line.chooser.next() && struck.is_none() {
                line.chooser.strike();
                struck = Some((line.fault, line.draw));
            }
        }
        // Thrown in any case: what is struck must not shift later throws.
        let thrown = self.dice.number();
        let (fault, draw) = struck?;
        let draw = draw.unwrap_or(thrown);
        self.recording.faults.push(Injected { on, position: *seen, fault, draw });
        Some((fault, draw))
    }

    pub(super) fn recording(&self) -> &Recording {
        &self.recording
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Rule;
    use super::super::{FailWith, Which};
    use super::*;

    const FAIL: Fault = Fault::Fail { error: FailWith::Fabric };

    fn struck(plan: &FaultPlan, count: u64) -> Vec<u64> {
        let mut striker = Striker::new(plan);
        (1..=count).filter(|_| striker.next(On::Read, &[]).is_some()).count();
        striker.recording().faults.iter().map(|injected| injected.position).collect()
    }

    #[test]
    fn patterns_and_positions_strike_exactly() {
        let plan = |which| FaultPlan::seeded(1).rule(Rule::new(On::Read, FAIL).which(which)).unwrap();
        assert_eq!(struck(&plan(Which::Pattern("XOOXO".parse().unwrap())), 10), [1, 4, 6, 9]);
        assert_eq!(struck(&plan(Which::At(vec![3, 5])), 10), [3, 5]);
        assert_eq!(struck(&plan(Which::All), 3), [1, 2, 3]);
    }

    #[test]
    fn one_rule_does_not_shift_another() {
        let chance = || Rule::new(On::Read, Fault::Stall).which(Which::Probability(0.3));
        let first = Rule::new(On::Read, FAIL).which(Which::At(vec![2, 4, 6, 8]));
        let of = |plan: &FaultPlan| -> Vec<u64> {
            let mut striker = Striker::new(plan);
            for _ in 0..100 {
                striker.next(On::Read, &[]);
            }
            let stalls = striker.recording().faults.iter().filter(|i| i.fault == Fault::Stall);
            stalls.map(|i| i.position).filter(|p| *p > 8).collect()
        };
        // The dice of a rule depend on its place alone.
        let never = Rule::new(On::Read, FAIL).which(Which::At(vec![1000]));
        let one = FaultPlan::seeded(5).rule(first).unwrap().rule(chance()).unwrap();
        let other = FaultPlan::seeded(5).rule(never).unwrap().rule(chance()).unwrap();
        assert!(!of(&one).is_empty());
        assert_eq!(of(&one), of(&other));
    }

    #[test]
    fn a_recording_strikes_again_exactly() {
        let plan = FaultPlan::seeded(9)
            .rule(Rule::new(On::Read, Fault::Corrupt { bytes: 3 }).which(Which::Probability(0.2)))
            .unwrap()
            .rule(Rule::new(On::Send, Fault::Drop).message("read_done"))
            .unwrap();
        let run = |plan: &FaultPlan| {
            let mut striker = Striker::new(plan);
            for number in 0..200 {
                striker.next(On::Read, &[]);
                let name: &[u8] =
                    if number % 3 == 0 { b"\x81\xa9read_done\x80" } else { b"\x81\xa5renew\x80" };
                striker.next(On::Send, name);
            }
            striker.recording().clone()
        };
        let first = run(&plan);
        assert!(first.counts()[&("read", "corrupt")] > 20 && first.counts()[&("send", "drop")] == 67);
        assert_eq!(run(&FaultPlan::from_recording(&first)), first);
        assert_eq!(run(&FaultPlan::parse(&first.to_json()).unwrap()), first);
    }
}
