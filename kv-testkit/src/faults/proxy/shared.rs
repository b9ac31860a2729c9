//! What the connections of a proxy have in common: the choice of their faults, and the counts.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::plan::{Direction, Place, ProxyFault, ProxyInjected, ProxyPlan, ProxyReport, ProxyRule};
use crate::faults::RULES_MAX;
use crate::faults::choose::Chooser;
use crate::sim::Dice;

/// A rule that has chosen a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chosen {
    pub(super) fault: ProxyFault,
    pub(super) direction: Direction,
    pub(super) place: Place,
    pub(super) draw: u64,
}

#[derive(Debug)]
struct Line {
    rule: ProxyRule,
    chooser: Chooser,
    dice: Dice,
}

#[derive(Debug)]
struct State {
    lines: Vec<Line>,
    report: ProxyReport,
}

#[derive(Debug)]
pub(super) struct Shared(Mutex<State>);

impl Shared {
    pub(super) fn new(plan: &ProxyPlan) -> Self {
        let mut seeds = Dice::new(plan.seed);
        let lines = plan.rules.iter().map(|rule| {
            let chooser = Chooser::new(rule.which.clone(), rule.limit, seeds.split());
            Line { rule: rule.clone(), chooser, dice: seeds.split() }
        });
        Self(Mutex::new(State { lines: lines.collect(), report: ProxyReport::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next connection: its number, and the rules that choose it. A fault of the connection stands alone.
    pub(super) fn next(&self) -> (u64, Vec<Chosen>) {
        let mut state = self.state();
        state.report.connections += 1;
        let mut all = Vec::new();
        for Line { rule, chooser, dice } in &mut state.lines {
            // Thrown for every connection, so that the choice of one does not shift the next.
            let thrown = dice.number();
            if chooser.next() {
                chooser.strike();
                let draw = rule.draw.unwrap_or(thrown);
                let ProxyRule { fault, direction, place, .. } = *rule;
                all.push(Chosen { fault, direction, place, draw });
            }
        }
        if let Some(whole) = all.iter().find(|chosen| chosen.fault.is_of_connection()).copied() {
            all = vec![whole];
        }
        (state.report.connections, all)
    }

    pub(super) fn struck(
        &self,
        connection: u64,
        direction: Direction,
        at_byte: u64,
        fault: ProxyFault,
        draw: u64,
    ) {
        let report = &mut self.state().report;
        *report.faults.entry(fault.name()).or_default() += 1;
        if report.recorded.len() < RULES_MAX {
            report.recorded.push(ProxyInjected { connection, direction, at_byte, fault, draw });
        }
    }

    pub(super) fn forwarded(&self, direction: Direction, bytes: usize) {
        let report = &mut self.state().report;
        match direction {
            Direction::Up => report.bytes_up += bytes as u64,
            _ => report.bytes_down += bytes as u64,
        }
    }

    pub(super) fn upstream_failed(&self) {
        self.state().report.upstream_failed += 1;
    }

    pub(super) fn report(&self) -> ProxyReport {
        self.state().report.clone()
    }
}
