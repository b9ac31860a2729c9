//! An engine in one process: the core orders steps, the rig runs them when a test says so.
#![allow(dead_code)] // Each test file uses a part of it.

pub(crate) mod gate;
pub(crate) mod pair;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use kv_connector::recovery::Policy;
use kv_connector::{BlockId, RequestId, SchedulerConnector, WorkerConnector};
use kv_proto::GroupKind;
use kv_testkit::engine::core::{Core, CoreSettings};
use kv_testkit::engine::model::{Chunk, ModelConfig, Shard, SoloReduce, Tokenizer, VecStore, Weights};
use kv_testkit::engine::request::{Ask, Happening, Usage};
use kv_testkit::engine::store::MemoryStore;
use kv_testkit::engine::wire::StepOrder;
use serde_json::Value;

/// Tokens in a block.
pub(crate) const BLOCK: u32 = 16;
/// Blocks in a pool that nothing is short of.
pub(crate) const PLENTY: u32 = 128;

/// Settings of an engine with room for everything.
pub(crate) fn settings() -> CoreSettings {
    CoreSettings {
        block_tokens: BLOCK,
        blocks: PLENTY,
        step_tokens: 512,
        run_ahead: false,
        policy: Policy::Recompute,
        vocab_size: Tokenizer::VOCAB_SIZE as u32,
        max_positions: ModelConfig::tiny().max_position_embeddings as u32,
        groups: vec![GroupKind::Full],
    }
}

/// The tiny model.
pub(crate) fn tiny() -> Weights {
    Weights::seeded(&ModelConfig::tiny(), 7).unwrap()
}

pub(crate) fn id(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

/// A prompt of `len` tokens; `salt` makes others of it.
pub(crate) fn prompt(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i * 7 + i * (13 + 2 * salt) + salt * 101) % 251).collect()
}

pub(crate) fn ask(name: &str, prompt: &[u32], max_tokens: u32) -> Ask {
    Ask { id: id(name), prompt: prompt.to_vec(), max_tokens, ignore_eos: true, params: None }
}

pub(crate) fn ask_with(name: &str, prompt: &[u32], max_tokens: u32, params: Value) -> Ask {
    Ask { params: Some(params), ..ask(name, prompt, max_tokens) }
}

/// What the model answers when it is run by itself: the prompt in one piece, then token by token.
pub(crate) fn reference(weights: &Weights, prompt: &[u32], max_tokens: u32) -> Vec<u32> {
    let config = weights.config();
    let mut shard = Shard::new(config, weights, 0, 1).unwrap();
    let blocks: Vec<u32> = (0..(prompt.len() as u32 + max_tokens).div_ceil(BLOCK)).collect();
    let (layers, heads) = (config.num_hidden_layers, shard.cache_heads());
    let mut store = VecStore::with_sizes(layers, blocks.len(), BLOCK as usize, heads, config.cache_sizes());
    let mut all = prompt.to_vec();
    let mut start = 0;
    while all.len() < prompt.len() + max_tokens as usize {
        let chunk = Chunk {
            tokens: &all[start..],
            start,
            blocks: &blocks,
            window_blocks: &blocks,
            wants_token: true,
        };
        let next = shard.forward(&[chunk], BLOCK as usize, &mut store, &mut SoloReduce).unwrap();
        start = all.len();
        all.push(next[0].unwrap());
    }
    all.split_off(prompt.len())
}

/// An engine of one rank whose steps the test runs.
pub(crate) struct Rig {
    pub(crate) core: Core,
    pub(crate) worker: Option<WorkerConnector>,
    pub(crate) log: BTreeMap<u64, Vec<Happening>>,
    pub(crate) orders: VecDeque<StepOrder>,
    shard: Shard,
    store: MemoryStore,
    block_tokens: usize,
    sampled: BTreeMap<u64, u32>,
    news: Receiver<()>,
}

impl Rig {
    /// An engine without a connector.
    pub(crate) fn alone(settings: CoreSettings) -> Self {
        Self::of(settings, &tiny())
    }

    /// As before, with other weights.
    pub(crate) fn of(settings: CoreSettings, weights: &Weights) -> Self {
        let shard = Shard::new(weights.config(), weights, 0, 1).unwrap();
        let store =
            MemoryStore::new(weights.config(), shard.cache_heads(), settings.block_tokens, settings.blocks)
                .unwrap();
        let (_, news) = channel();
        Self::assemble(Core::new(settings.clone(), None), settings, shard, store, None, news)
    }

    pub(crate) fn assemble(
        core: Core,
        settings: CoreSettings,
        shard: Shard,
        store: MemoryStore,
        worker: Option<WorkerConnector>,
        news: Receiver<()>,
    ) -> Self {
        let block_tokens = settings.block_tokens as usize;
        // A block that is used without having been computed or loaded must show.
        let memory = store.memory();
        memory.write(0, &vec![0x41; memory.len()]).unwrap();
        Self {
            core,
            worker,
            log: BTreeMap::new(),
            orders: VecDeque::new(),
            shard,
            store,
            block_tokens,
            sampled: BTreeMap::new(),
            news,
        }
    }

    pub(crate) fn arrive(&mut self, ask: Ask) -> u64 {
        self.core.arrive(ask).unwrap()
    }

    /// Lets the core order what it will; true if it ordered anything.
    pub(crate) fn order(&mut self) -> bool {
        let mut any = false;
        while let Some(order) = self.core.next_step() {
            self.check(&order);
            self.orders.push_back(order);
            any = true;
        }
        self.gather();
        any
    }

    /// What must be true of every order, whatever the test is about.
    fn check(&self, order: &StepOrder) {
        let in_flight: Vec<(u64, BTreeSet<u32>)> =
            self.orders.iter().flat_map(|o| &o.work).map(|w| (w.request, self.written(w))).collect();
        for work in &order.work {
            for block in self.written(work) {
                assert!(
                    !self.core.pool().is_findable(BlockId(block)),
                    "block {block} is written, but shared"
                );
            }
            for (other, written) in &in_flight {
                if *other != work.request {
                    let both = work.blocks.iter().flatten().find(|b| written.contains(b));
                    assert_eq!(both, None, "given to {}, still written for {other}", work.request);
                }
            }
        }
        for (number, one) in order.work.iter().enumerate() {
            for other in &order.work[number + 1..] {
                let both = self.written(one).intersection(&self.written(other)).next().copied();
                assert_eq!(both, None, "written for {} and for {}", one.request, other.request);
            }
        }
    }

    /// Blocks that a piece of work writes.
    fn written(&self, work: &kv_testkit::engine::wire::Work) -> BTreeSet<u32> {
        let start = work.start as usize;
        let end = start + work.tokens.len().max(1);
        let tables = work.blocks.iter();
        tables.flat_map(|table| (start..end).map(|position| table[position / self.block_tokens])).collect()
    }

    /// Runs the oldest step in flight; false if there is none.
    pub(crate) fn run(&mut self) -> bool {
        let Some(order) = self.orders.pop_front() else { return false };
        if let (Some(worker), Some(plan)) = (&self.worker, &order.plan) {
            worker.begin_step(plan).unwrap();
        }
        let sampled: Vec<Vec<u32>> = order
            .work
            .iter()
            .map(|w| if w.tokens.is_empty() { vec![self.sampled[&w.request]] } else { w.tokens.clone() })
            .collect();
        let chunks: Vec<Chunk<'_>> = order
            .work
            .iter()
            .zip(&sampled)
            .map(|(work, tokens)| Chunk {
                tokens,
                start: work.start as usize,
                blocks: &work.blocks[0],
                window_blocks: work.blocks.get(1).map_or(&[], Vec::as_slice),
                wants_token: work.wants_token,
            })
            .collect();
        let tokens =
            self.shard.forward(&chunks, self.block_tokens, &mut self.store, &mut SoloReduce).unwrap();
        for (work, token) in order.work.iter().zip(&tokens) {
            self.sampled.extend(token.map(|token| (work.request, token)));
        }
        if let Some(report) = self.worker.as_ref().and_then(|w| w.report().unwrap()) {
            self.core.take_report(&report);
        }
        self.core.step_done(order.step, &tokens);
        self.gather();
        true
    }

    pub(crate) fn gather(&mut self) {
        for (number, happening) in self.core.take_happenings() {
            self.log.entry(number).or_default().push(happening);
        }
    }

    /// Waits a moment for news of the connector.
    pub(crate) fn listen(&mut self) {
        if self.news.recv_timeout(Duration::from_millis(1)).is_ok() {
            self.core.nudge();
        }
    }

    /// One turn of everything that can be done without waiting; true if anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        if self.news.try_iter().count() > 0 {
            self.core.nudge();
        }
        let ordered = self.order();
        self.run() || ordered
    }

    /// Runs an engine that needs nobody else until it has nothing to do.
    pub(crate) fn drain(&mut self) {
        while self.turn() {}
        assert_eq!(self.core.request_count(), 0, "requests are left that nothing is done for");
        assert_eq!(self.core.pool().held(), 0, "blocks are held for nobody");
    }

    /// Asks, runs to the end, and gives the answer.
    pub(crate) fn answer(&mut self, ask: Ask) -> Vec<u32> {
        let number = self.arrive(ask);
        self.drain();
        self.tokens(number)
    }

    /// Tokens sampled for a request so far.
    pub(crate) fn tokens(&self, number: u64) -> Vec<u32> {
        let happenings = self.log.get(&number).into_iter().flatten();
        happenings.filter_map(|h| if let Happening::Token(t) = h { Some(*t) } else { None }).collect()
    }

    pub(crate) fn saw(&self, number: u64, what: impl Fn(&Happening) -> bool) -> bool {
        self.log.get(&number).is_some_and(|list| list.iter().any(what))
    }

    /// Figures and parameters of a request that has finished.
    pub(crate) fn finished(&self, number: u64) -> Option<(Usage, Option<Value>)> {
        self.log.get(&number)?.iter().find_map(|h| match h {
            Happening::Finished { usage, params } => Some((*usage, params.clone())),
            _ => None,
        })
    }

    pub(crate) fn failed(&self, number: u64) -> Option<String> {
        self.log.get(&number)?.iter().find_map(|h| match h {
            Happening::Failed { message, .. } => Some(message.clone()),
            _ => None,
        })
    }

    pub(crate) fn held(&self) -> usize {
        self.core.pool().held()
    }

    pub(crate) fn scheduler(&self) -> &SchedulerConnector {
        self.core.connector().unwrap()
    }
}

/// How long the tests wait for a fact.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A sender of news and the place where they are heard.
pub(crate) fn news() -> (Sender<()>, Receiver<()>) {
    channel()
}
