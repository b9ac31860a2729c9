//! A producer and a consumer in one process, joined by the real connectors over TCP.

use std::sync::Arc;
use std::time::Instant;

use kv_connector::worker::open_transport;
use kv_connector::{Config, EngineIdentity, Rank, SchedulerConnector, WorkerConnector, WorkerSetup};
use kv_testkit::engine::core::{Core, CoreSettings};
use kv_testkit::engine::model::Shard;
use kv_testkit::engine::store::MemoryStore;
use kv_transport::Transport;
use serde_json::{Value, json};

use super::gate::{Bar, Gate, Mode};
use super::{LIMIT, Rig, ask_with, news, settings, tiny};

/// An engine with a connector, its transport behind a gate.
pub(crate) fn engine(name: &str, settings: CoreSettings, config: &Config, mode: Mode) -> (Rig, Arc<Gate>) {
    let gate = Bar::before(open_transport(config).unwrap(), mode);
    (engine_over(name, settings, config, gate.clone()), gate)
}

/// An engine with a connector over a transport.
pub(crate) fn engine_over(
    name: &str,
    settings: CoreSettings,
    config: &Config,
    transport: Arc<dyn Transport>,
) -> Rig {
    let weights = tiny();
    let shard = Shard::new(weights.config(), &weights, 0, 1).unwrap();
    let store =
        MemoryStore::new(weights.config(), shard.local_groups(), settings.block_tokens, settings.blocks)
            .unwrap();
    let config = Config { engine_id: name.to_owned(), ..config.clone() };
    let identity = EngineIdentity::draw(&config, 1).unwrap();
    let (told, heard) = news();
    let setup = WorkerSetup {
        rank: Rank(0),
        model: "tiny".to_owned(),
        layout: store.layout().clone(),
        memories: vec![store.memory()],
        // An engine that is gone needs no word.
        on_report: Box::new(move || {
            let _ = told.send(());
        }),
    };
    let worker = WorkerConnector::start_over(&config, &identity, setup, transport).unwrap();
    let scheduler = SchedulerConnector::start(&config, &identity, &[worker.card().unwrap()]).unwrap();
    let core = Core::new(settings.clone(), Some(scheduler));
    Rig::assemble(core, settings, shard, store, Some(worker), heard)
}

/// P and D.
pub(crate) struct Pair {
    pub(crate) p: Rig,
    pub(crate) d: Rig,
    pub(crate) gate: Arc<Gate>,
}

impl Pair {
    /// Both over transports of the caller's own, behind gates that stand open.
    pub(crate) fn over(transport: impl Fn() -> Arc<dyn Transport>) -> Self {
        let config = Config::default();
        let gates = [(); 2].map(|()| Bar::before(transport(), Mode::Open));
        let [p, d] =
            [("p", 0), ("d", 1)].map(|(name, at)| engine_over(name, settings(), &config, gates[at].clone()));
        let [_, gate] = gates;
        Self { p, d, gate }
    }

    /// Both with room for everything.
    pub(crate) fn new(mode: Mode) -> Self {
        Self::with(settings(), mode)
    }

    /// D with settings of its own.
    pub(crate) fn with(d: CoreSettings, mode: Mode) -> Self {
        let config = Config::default();
        let (p, _) = engine("p", settings(), &config, Mode::Open);
        let (d, gate) = engine("d", d, &config, mode);
        Self { p, d, gate }
    }

    /// Lets both run until something is true.
    pub(crate) fn until(&mut self, what: &str, fact: impl Fn(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !fact(self) {
            assert!(Instant::now() < end, "not within {LIMIT:?}: {what}");
            let busy = self.p.turn() | self.d.turn();
            if !busy {
                // Neither has anything to do before a connector's thread has news, or a little time has passed.
                self.d.listen();
                self.p.listen();
            }
        }
    }

    /// Has P compute a prompt, and gives what it tells the router.
    pub(crate) fn prefill(&mut self, name: &str, prompt: &[u32]) -> Value {
        let params = json!({ "do_remote_decode": true, "do_remote_prefill": false });
        let number = self.p.arrive(ask_with(name, prompt, 1, params));
        self.until("prefill", |pair| pair.p.finished(number).is_some());
        self.p.finished(number).unwrap().1.unwrap()
    }

    /// Waits until nobody holds or waits for anything.
    pub(crate) fn settle(&mut self) {
        self.until("all blocks free", |pair| {
            [&pair.p, &pair.d].iter().all(|rig| {
                rig.core.request_count() == 0 && rig.held() == 0 && rig.scheduler().stats().holds == 0
            })
        });
    }
}
