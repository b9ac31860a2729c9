//! What pulls hear of their sources.

use std::collections::BTreeSet;

use kv_proto::Moment;
use kv_proto::message::OfferName;

use super::{LocalMemory, Pull, Pulls, State, not_held};
use crate::config::WorkerConfig;
use crate::machine::io::{Decision, PullId, SourceKey};
use crate::machine::peers::Change;

impl Pulls {
    /// Takes what became of peers.
    pub fn changed(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        local: &LocalMemory,
        change: Change,
        out: &mut Vec<Decision>,
    ) {
        match change {
            Change::Planned(peer, count) => self.planned(now, config, local, &peer, count, out),
            Change::Ready(key) => {
                for id in self.of_source(&key) {
                    match self.pulls.get_mut(&id).map(|pull| &mut pull.state) {
                        Some(State::Waiting { outage_counted, .. }) => {
                            // Whatever outage that was, it is over.
                            *outage_counted = false;
                            // Of an earlier try, whose connection took question or answer with it.
                            self.ask_to_compare(id, 0..u32::MAX, out);
                            self.begin(now, config, local, id, out);
                        }
                        Some(State::Comparing { .. }) => self.ask_to_compare(id, 0..u32::MAX, out),
                        Some(State::Confirming { .. }) => self.ask(id, out),
                        Some(State::Reading { .. }) | None => {}
                    }
                }
            }
            Change::Failed(key, failure) => {
                for id in self.of_source(&key) {
                    if self.is_waiting(id) {
                        self.fail_or_wait(now, config, id, failure.clone(), out);
                    }
                }
            }
            Change::NotHeld(key, leases) => {
                let leases: BTreeSet<OfferName> = leases.into_iter().collect();
                for id in self.of_source(&key) {
                    match self.pulls.get(&id) {
                        // The lease is over because we ended it; the answer is on its way.
                        Some(Pull { state: State::Confirming { .. }, .. }) => {}
                        Some(Pull { name, .. }) if leases.contains(name) => {
                            self.spoil(now, config, id, not_held(), out);
                        }
                        _ => {}
                    }
                }
            }
            Change::Checked(key, lease, attempt, blocks, held) => {
                self.checked(now, config, &key, lease, attempt, (blocks, held), out);
            }
            Change::Compared(key, lease, attempt, answer) => {
                self.compared(now, config, &key, lease, attempt, answer, out);
            }
            Change::Answered(key, lease, attempt, confirmed) => {
                self.answered(now, config, &key, lease, attempt, confirmed, out);
            }
        }
    }

    fn of_source(&self, key: &SourceKey) -> Vec<PullId> {
        self.pulls.iter().filter(|(_, pull)| pull.key == *key).map(|(id, _)| *id).collect()
    }
}
