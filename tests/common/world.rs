//! Several engines, and what tests have them do.

use std::ops::{Index, IndexMut};
use std::time::Instant;

use super::*;

/// Engines that share a host, and whoever carries their plans and reports.
pub struct World {
    engines: Vec<Option<Engine>>,
    pub signal: Arc<Signal>,
    seeds: u64,
}

impl Index<usize> for World {
    type Output = Engine;
    fn index(&self, engine: usize) -> &Engine {
        self.engines[engine].as_ref().unwrap()
    }
}

impl IndexMut<usize> for World {
    fn index_mut(&mut self, engine: usize) -> &mut Engine {
        self.engines[engine].as_mut().unwrap()
    }
}

impl World {
    pub fn of(shapes: impl IntoIterator<Item = Shape>) -> Self {
        let mut world = Self { engines: Vec::new(), signal: Arc::default(), seeds: 0 };
        for shape in shapes {
            world.add(shape);
        }
        world
    }

    /// Bytes that nobody has written yet.
    pub fn seed(&mut self) -> u64 {
        self.seeds += 1;
        self.seeds
    }

    pub fn add(&mut self, shape: Shape) -> usize {
        let seed = self.seed();
        self.engines.push(Some(Engine::start(shape, seed, &self.signal).unwrap()));
        self.engines.len() - 1
    }

    /// The engine's process dies: its threads, sockets and connections are gone. What had to do with its valves
    /// remains with the caller.
    pub fn kill(&mut self, engine: usize) -> Vec<Valve> {
        std::mem::take(&mut self.engines[engine].take().unwrap().valves)
    }

    /// Another life of an engine that was killed.
    pub fn revive(&mut self, engine: usize, shape: Shape) {
        let seed = self.seed();
        self.engines[engine] = Some(Engine::start(shape, seed, &self.signal).unwrap());
    }

    pub fn step(&mut self) {
        self.engines.iter_mut().flatten().for_each(Engine::step);
    }

    /// Makes steps until something is so.
    pub fn until(&mut self, what: &str, limit: Duration, mut fact: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + limit;
        loop {
            self.step();
            if fact(self) {
                return;
            }
            if Instant::now() >= end {
                let counters: Vec<_> = self
                    .engines
                    .iter()
                    .flatten()
                    .map(|e| {
                        let workers: Vec<_> = e.workers.iter().map(WorkerConnector::stats).collect();
                        (e.identity.engine.clone(), e.sched.stats(), workers)
                    })
                    .collect();
                panic!("not within {limit:?}: {what}\n{counters:#?}");
            }
            // Reports wake it. Counters are looked at again after a moment, since nothing tells of them.
            self.signal.wait(Duration::from_millis(5));
        }
    }

    /// A producer computes a prompt: its blocks get new bytes and are offered.
    pub fn prefill(&mut self, p: usize, name: &str, tokens: u32, blocks: &[u32]) -> Offer {
        self.begin_prefill(p, name, tokens);
        self.step();
        self.end_prefill(p, name, tokens, blocks)
    }

    pub fn begin_prefill(&mut self, p: usize, name: &str, tokens: u32) {
        let params = json!({ "do_remote_decode": true, "do_remote_prefill": false });
        let role = self[p].sched.request_arrived(&request(name), &prompt(name, tokens), Some(&params));
        assert_eq!(role.unwrap(), Role::Producer);
    }

    pub fn end_prefill(&mut self, p: usize, name: &str, tokens: u32, blocks: &[u32]) -> Offer {
        let seed = self.seed();
        let engine = &mut self[p];
        engine.stamp(seed, blocks);
        let end = RequestEnd::Complete {
            computed_tokens: tokens,
            blocks: vec![list(blocks); engine.shape.groups as usize],
        };
        let finished = engine.sched.request_finished(&request(name), &end);
        let Verdict::Hold(hold) = finished.verdict else { panic!("{name} is not held") };
        self.step();
        Offer {
            prompt: prompt(name, tokens),
            blocks: blocks.to_vec(),
            params: finished.params.unwrap(),
            hold,
        }
    }

    /// An offer arrives at a consumer, and is queued.
    pub fn arrive(&mut self, d: usize, name: &str, offer: &Offer) -> Result<Role, ConnectorError> {
        let role = self[d].sched.request_arrived(&request(name), &offer.prompt, Some(&offer.params));
        self.step();
        role
    }

    /// The consumer allocates blocks, and the load begins.
    pub fn allocate(
        &mut self,
        d: usize,
        name: &str,
        local_tokens: u32,
        blocks: &[u32],
    ) -> Result<(), ConnectorError> {
        let engine = &mut self[d];
        let remote = engine.sched.remote_tokens(&request(name), local_tokens);
        let lists = vec![list(blocks); engine.shape.groups as usize];
        let result = engine.sched.blocks_allocated(&request(name), local_tokens, remote, &lists);
        self.step();
        result
    }

    pub fn begin_load(&mut self, d: usize, name: &str, offer: &Offer, blocks: &[u32]) {
        assert_eq!(self.arrive(d, name, offer).unwrap(), Role::Consumer);
        self.allocate(d, name, 0, blocks).unwrap();
    }

    pub fn load_end(&mut self, d: usize, name: &str) -> LoadResult {
        self.until(&format!("the load of {name} ends"), SOON, |w| w[d].load_result(name).is_some());
        self[d].load_result(name).unwrap().clone()
    }

    pub fn expect_loaded(&mut self, d: usize, name: &str) -> (u32, u32) {
        match self.load_end(d, name) {
            LoadResult::Loaded { tokens, remote_tokens, .. } => (tokens, remote_tokens),
            failed @ LoadResult::Failed { .. } => panic!("{name}: {failed:?}"),
        }
    }

    /// The load fails, its blocks are quiet and named, and no other byte has changed.
    pub fn expect_failed(&mut self, d: usize, name: &str) -> (LoadFailure, String) {
        match self.load_end(d, name) {
            LoadResult::Failed { reason, detail, invalid, hold, valid_tokens: 0, .. } => {
                assert_eq!(hold, None, "{name}: {detail}");
                let blocks: Vec<u32> = invalid.iter().flat_map(BlockList::iter).map(|b| b.0).collect();
                assert!(!blocks.is_empty());
                self[d].assert_memory_except(&blocks);
                (reason, detail)
            }
            other => panic!("{name}: {other:?}"),
        }
    }

    /// Puts what one engine holds in blocks into the picture of what another should hold.
    pub fn expect_moved(&mut self, p: usize, from: &[u32], d: usize, to: &[u32]) {
        assert_eq!(from.len(), to.len());
        for (from, to) in from.iter().zip(to) {
            for ((_, source), (_, target)) in self[p].places(*from).into_iter().zip(self[d].places(*to)) {
                for rank in 0..self[p].images.len() {
                    let bytes = self[p].images[rank][source.clone()].to_vec();
                    self[d].images[rank][target.clone()].copy_from_slice(&bytes);
                }
            }
        }
    }

    /// A request ends that loads nothing any more.
    pub fn finish(&mut self, d: usize, name: &str) {
        assert_eq!(self.abort(d, name), Verdict::Free);
    }

    pub fn abort(&mut self, d: usize, name: &str) -> Verdict {
        let verdict = self[d].sched.request_finished(&request(name), &RequestEnd::Aborted).verdict;
        self.step();
        verdict
    }

    pub fn released(&mut self, engine: usize, hold: HoldId) {
        self.until(&format!("{hold:?} is released"), SOON, |w| w[engine].is_released(hold));
    }

    /// No lease, no load and no pull is left anywhere.
    pub fn nothing_held(&mut self) {
        self.until("nothing is held", SOON, |w| {
            w.engines.iter().flatten().all(|engine| {
                engine.sched.stats().holds == 0 && engine.workers.iter().all(|w| w.stats().pulls == 0)
            })
        });
    }

    /// A whole hand-over of a prompt over three blocks, whose every byte is looked at; nothing is held afterwards.
    pub fn hand_over(&mut self, p: usize, d: usize, name: &str) {
        self.hand_over_beside(p, d, name, &[2, 9, 1]);
        self.nothing_held();
    }

    /// As [`World::hand_over`], while others go on.
    pub fn hand_over_beside(&mut self, p: usize, d: usize, name: &str, to: &[u32; 3]) {
        let from = [17, 13, 14];
        let confirmed = self[p].sched.stats().producer.confirmed;
        let offer = self.prefill(p, name, 11, &from);
        self.begin_load(d, name, &offer, to);
        assert_eq!(self.expect_loaded(d, name), (11, 11));
        self.expect_moved(p, &from, d, to);
        self[d].assert_memory();
        self.finish(d, name);
        self.released(p, offer.hold);
        assert_eq!(self[p].sched.stats().producer.confirmed, confirmed + 1);
    }
}

/// The load fails for this reason and with these words, and nothing is left of it at the consumer.
pub fn refuse_load(world: &mut World, name: &str, reason: LoadFailure, words: &[&str]) {
    let (got, detail) = world.expect_failed(D, name);
    assert_eq!(got, reason, "{detail}");
    for word in words {
        assert!(detail.contains(word), "{word:?} is not in: {detail}");
    }
    world.finish(D, name);
    world.until("nothing is held", SOON, |w| w[D].sched.stats().holds == 0);
}
