//! The scheduler's thread of an engine: it takes what comes in, orders steps, and tells clients.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use kv_connector::SchedulerConnector;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::core::Core;
use super::links::{WorkerLink, end_workers};
use super::process::Input;
use super::request::Happening;
use super::wire::{FromWorker, ToWorker, WorkerCounters, send};

struct StepTokens {
    ranks: usize,
    tokens: Vec<Option<u32>>,
}

/// Clients are heard before the results of the same turn, each in its order: one that goes away and comes back under
/// the same id must not be heard the other way round.
fn clients_first(batch: &mut [Input]) {
    batch.sort_by_key(|input| {
        !matches!(input, Input::Ask { .. } | Input::AskAndAbort { .. } | Input::Abort(_) | Input::Left(_))
    });
}

/// A running engine: the core, its workers and its clients.
pub(super) struct Running {
    core: Core,
    links: Vec<WorkerLink>,
    counters: Vec<WorkerCounters>,
    done: BTreeMap<u64, StepTokens>,
    clients: BTreeMap<u64, mpsc::UnboundedSender<Happening>>,
    _folder: tempfile::TempDir,
}

impl Running {
    pub(super) fn new(core: Core, links: Vec<WorkerLink>, folder: tempfile::TempDir) -> Self {
        Self {
            core,
            counters: vec![WorkerCounters::default(); links.len()],
            links,
            done: BTreeMap::new(),
            clients: BTreeMap::new(),
            _folder: folder,
        }
    }

    /// Runs until told to stop or until a worker is lost; says why.
    pub(super) fn run(mut self, queue: &Receiver<Input>) -> String {
        let reason = loop {
            let first = match self.core.next_wake() {
                Some(wait) => match queue.recv_timeout(wait.max(Duration::from_millis(1))) {
                    Ok(input) => Some(input),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break "no handle is left".to_owned(),
                },
                None => match queue.recv() {
                    Ok(input) => Some(input),
                    Err(_) => break "no handle is left".to_owned(),
                },
            };
            let mut batch: Vec<Input> = first.into_iter().chain(queue.try_iter()).collect();
            clients_first(&mut batch);
            let mut end = None;
            for input in batch {
                end = end.or(self.take(input));
            }
            if let Some(end) = end {
                break end;
            }
            if let Err(error) = self.order_steps() {
                break format!("a worker cannot be reached: {error}");
            }
            self.tell_clients();
        };
        end_workers(&mut self.links);
        reason
    }

    fn take(&mut self, input: Input) -> Option<String> {
        match input {
            Input::Ask { ask, happenings, accepted } => {
                let answer = self.core.arrive(ask);
                if let Ok(number) = &answer {
                    self.clients.insert(*number, happenings);
                }
                // A client that is gone already sends its abort behind.
                let _ = accepted.send(answer);
            }
            Input::Abort(id) => self.core.abort(&id),
            Input::Left(id) => {
                // The request may have ended, and its id be that of another client's by now.
                let number = self.core.number_of(&id);
                let client = number.and_then(|number| self.clients.get(&number));
                if client.is_none_or(mpsc::UnboundedSender::is_closed) {
                    self.core.abort(&id);
                }
            }
            Input::AskAndAbort { ask, accepted } => {
                let id = ask.id.clone();
                let answer = self.core.arrive(ask);
                if answer.is_ok() {
                    self.core.abort(&id);
                }
                let _ = accepted.send(answer);
            }
            Input::Stats(to) => drop(to.send(self.stats())),
            Input::Worker { rank, message } => match message {
                FromWorker::Done { step, tokens, report, counters } => {
                    self.worker_done(rank, step, tokens, report.as_deref().map(Vec::as_slice), counters);
                }
                FromWorker::Nudge => self.core.nudge(),
                FromWorker::Failed { message } => return Some(format!("worker {rank}: {message}")),
                FromWorker::Ready { .. } => {}
            },
            Input::WorkerGone { rank, reason } => return Some(format!("worker {rank} is gone: {reason}")),
            Input::Stop => return Some("stopped".to_owned()),
        }
        None
    }

    fn worker_done(
        &mut self,
        rank: u32,
        step: u64,
        tokens: Vec<Option<u32>>,
        report: Option<&[u8]>,
        counters: WorkerCounters,
    ) {
        if let Some(slot) = self.counters.get_mut(rank as usize) {
            *slot = counters;
        }
        if let Some(report) = report {
            self.core.take_report(report);
        }
        let entry = self.done.entry(step).or_insert(StepTokens { ranks: 0, tokens });
        entry.ranks += 1;
        if entry.ranks == self.links.len()
            && let Some(done) = self.done.remove(&step)
        {
            self.core.step_done(step, &done.tokens);
        }
    }

    fn order_steps(&mut self) -> io::Result<()> {
        while let Some(order) = self.core.next_step() {
            let order = ToWorker::Step(order);
            for link in &mut self.links {
                send(&mut link.stream, &order)?;
            }
        }
        Ok(())
    }

    fn tell_clients(&mut self) {
        for (number, happening) in self.core.take_happenings() {
            let last = matches!(happening, Happening::Finished { .. } | Happening::Failed { .. });
            if let Some(client) = self.clients.get(&number) {
                // A client that is gone sends an abort.
                let _ = client.send(happening);
            }
            if last {
                self.clients.remove(&number);
            }
        }
        self.clients.retain(|_, client| !client.is_closed());
    }

    fn stats(&self) -> Value {
        let core = self.core.stats();
        let pool = self.core.pool();
        let sum = |of: fn(&WorkerCounters) -> u64| self.counters.iter().map(of).sum::<u64>();
        let connector = self.core.connector().map(|connector| {
            let stats = connector.stats();
            let named = |list: &mut dyn Iterator<Item = (&'static str, u64)>| -> Value {
                list.map(|(name, count)| (name.to_owned(), json!(count)))
                    .collect::<serde_json::Map<_, _>>()
                    .into()
            };
            json!({
                "holds": stats.holds,
                "leases": {
                    "granted": stats.producer.granted,
                    "confirmed": stats.producer.confirmed,
                    "released": stats.producer.released,
                    "expired": stats.producer.expired,
                    "consumer_lost": stats.producer.consumer_lost,
                    "revoked": stats.producer.revoked,
                    "forgotten": stats.producer.forgotten,
                },
                "loads": {
                    "ordered": stats.consumer.loads,
                    "loaded": stats.consumer.loaded,
                    "remote_tokens": stats.consumer.remote_tokens,
                    "bytes": stats.consumer.bytes,
                    "failed": named(&mut stats.consumer.failed.iter().map(|(r, n)| (r.name(), *n))),
                    "given_back": named(&mut stats.consumer.released.iter().map(|(r, n)| (r.name(), *n))),
                },
                "handshakes_answered": stats.handshakes.accepted,
            })
        });
        json!({
            "requests": core.requests,
            "unfinished": self.core.request_count(),
            "aborted": core.aborted,
            "stray_aborts": core.stray_aborts,
            "preempted": core.preempted,
            "steps": core.steps,
            "breakers": { "opened": self.core.breakers().opened, "loads_refused": self.core.breakers().refused },
            "recovered": {
                "requests": core.recovered.requests,
                "ended": core.recovered.ended,
                "retried_elsewhere": core.recovered.retried_elsewhere,
                "tokens_recomputed": core.recovered.tokens_recomputed,
                "tokens_kept": core.recovered.tokens_kept,
            },
            "blocks": pool.size(),
            "blocks_held": pool.held(),
            "staging": self.core.connector().and_then(SchedulerConnector::staging_figures),
            "connector": connector,
            "workers": {
                "lapsed": sum(|c| c.lapsed),
                "early_ends": sum(|c| c.early_ends),
                "handshakes": sum(|c| c.handshakes),
                "renewals": sum(|c| c.renewals),
                "expelled": sum(|c| c.expelled),
                "pulls": sum(|c| c.pulls),
                "retried": sum(|c| c.retried),
                "loads_failed": sum(|c| c.loads_failed),
                "self_checks": sum(|c| c.self_checks),
                "self_checks_failed": sum(|c| c.self_checks_failed),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use kv_connector::RequestId;
    use kv_connector::recovery::Policy;
    use tokio::sync::oneshot;

    use super::super::core::CoreSettings;
    use super::super::request::Ask;
    use super::*;

    fn id() -> RequestId {
        RequestId::new("same").unwrap()
    }

    /// An engine without workers: the tests play their part.
    fn running() -> Running {
        let settings = CoreSettings {
            block_tokens: 4,
            blocks: 8,
            step_tokens: 16,
            run_ahead: false,
            policy: Policy::Recompute,
            vocab_size: 10,
            max_positions: 20,
            groups: vec![kv_proto::GroupKind::Full],
        };
        Running::new(Core::new(settings, None), Vec::new(), tempfile::tempdir().unwrap())
    }

    fn ask() -> (Input, mpsc::UnboundedReceiver<Happening>) {
        let (happenings, client) = mpsc::unbounded_channel();
        let (accepted, _) = oneshot::channel();
        let ask = Ask { id: id(), prompt: vec![1, 2], max_tokens: 1, ignore_eos: true, params: None };
        (Input::Ask { ask, happenings, accepted }, client)
    }

    #[test]
    fn a_client_that_left_ends_its_own_request_and_not_the_next_of_that_name() {
        let mut engine = running();
        let (first, client) = ask();
        engine.take(first);
        let order = engine.core.next_step().unwrap();
        engine.core.step_done(order.step, &[Some(5)]);
        engine.tell_clients();
        assert_eq!(engine.core.request_count(), 0);
        // It leaves without having read its answer; before that is heard, another takes the name.
        drop(client);
        let (second, mut other) = ask();
        engine.take(second);
        engine.take(Input::Left(id()));
        assert_eq!((engine.core.request_count(), engine.core.stats().aborted), (1, 0));
        other.close();
        engine.take(Input::Left(id()));
        assert_eq!((engine.core.request_count(), engine.core.stats().aborted), (0, 1));
        engine.take(Input::Left(id()));
        assert_eq!(engine.core.stats().stray_aborts, 1);
    }

    #[test]
    fn a_client_that_comes_back_is_heard_after_it_left() {
        let mut engine = running();
        let (first, client) = ask();
        engine.take(first);
        drop(client);
        let (second, mut again) = ask();
        let mut batch =
            vec![Input::Worker { rank: 0, message: FromWorker::Nudge }, Input::Left(id()), second];
        clients_first(&mut batch);
        assert!(matches!(batch[2], Input::Worker { .. }));
        for input in batch {
            engine.take(input);
        }
        engine.tell_clients();
        assert_eq!(again.try_recv(), Ok(Happening::Queued));
        assert_eq!(engine.core.request_count(), 1);
    }
}
