//! One small table for all timers of a machine.

use std::collections::BTreeSet;

use crate::time::Moment;

/// Deadlines in order. An entry is a reminder to look at a record, not a fact: the record itself says whether
/// its deadline has passed, so an entry that outlived its record does nothing.
#[derive(Debug, Clone, Hash)]
pub struct Timers<K> {
    entries: BTreeSet<(Moment, K)>,
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Self { entries: BTreeSet::new() }
    }
}

impl<K: Ord + Clone> Timers<K> {
    /// Adds a reminder.
    pub fn set(&mut self, at: Moment, key: K) {
        self.entries.insert((at, key));
    }

    /// Takes one away, if it is there.
    pub fn clear(&mut self, at: Moment, key: K) {
        self.entries.remove(&(at, key));
    }

    /// The earliest time of any.
    pub fn next(&self) -> Option<Moment> {
        self.entries.first().map(|(at, _)| *at)
    }

    /// Takes the earliest reminder if its time has come.
    pub fn due(&mut self, now: Moment) -> Option<K> {
        let (at, _) = self.entries.first()?;
        if *at > now {
            return None;
        }
        self.entries.pop_first().map(|(_, key)| key)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reminders_come_in_order_and_not_before_their_time() {
        let at = |s| Moment::START + Duration::from_secs(s);
        let mut timers = Timers::default();
        timers.set(at(3), "c");
        timers.set(at(1), "a");
        timers.set(at(2), "b");
        timers.clear(at(2), "b");
        timers.clear(at(9), "never set");
        assert_eq!(timers.next(), Some(at(1)));
        assert_eq!(timers.due(at(0)), None);
        assert_eq!((timers.due(at(3)), timers.due(at(3)), timers.due(at(3))), (Some("a"), Some("c"), None));
    }
}
