//! Prompts that two of the small engine's schedulers have computed, for a third: from whom it loads, what it does when
//! one of them is gone, and what its policy has to do with it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use std::time::Instant;

use common::gate::Mode;
use common::pair::engine;
use common::{LIMIT, Rig, ask_with, prompt, reference, settings, tiny};
use kv_connector::proto::ReleaseReason;
use kv_connector::recovery::Policy;
use kv_connector::{Config, ProducerStats};
use kv_testkit::engine::core::{CoreSettings, Recovered};
use kv_testkit::engine::request::Happening;
use kv_transport::ReadError;
use serde_json::{Value, json};

/// Two producers, of which the first may be gone, and a consumer.
struct Three {
    first: Option<Rig>,
    second: Rig,
    d: Rig,
}

impl Three {
    fn new(policy: Policy, mode: Mode) -> Self {
        let config = Config::default();
        let (first, _) = engine("p-1", settings(), &config, Mode::Open);
        let (second, _) = engine("p-2", settings(), &config, Mode::Open);
        let (d, _) = engine("d", CoreSettings { policy, ..settings() }, &config, mode);
        Self { first: Some(first), second, d }
    }

    fn rigs(&mut self) -> impl Iterator<Item = &mut Rig> {
        [&mut self.second, &mut self.d].into_iter().chain(&mut self.first)
    }

    fn until(&mut self, what: &str, fact: impl Fn(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !fact(self) {
            assert!(Instant::now() < end, "not within {LIMIT:?}: {what}");
            if !self.rigs().fold(false, |busy, rig| rig.turn() | busy) {
                self.rigs().for_each(Rig::listen);
            }
        }
    }

    /// Both producers compute a prompt; what a router makes of their answers.
    fn prefill(&mut self, name: &str, prompt: &[u32]) -> Value {
        let ask =
            || ask_with(name, prompt, 1, json!({ "do_remote_decode": true, "do_remote_prefill": false }));
        let first = self.first.as_mut().unwrap().arrive(ask());
        let second = self.second.arrive(ask());
        self.until("two prefills", |three| {
            three.first.as_ref().unwrap().finished(first).is_some() && three.second.finished(second).is_some()
        });
        let mut params = self.first.as_ref().unwrap().finished(first).unwrap().1.unwrap();
        params["alternatives"] = json!([self.second.finished(second).unwrap().1.unwrap()]);
        params
    }

    /// The consumer is asked, until the request has ended; its number.
    fn answer(&mut self, name: &str, prompt: &[u32], params: Value) -> u64 {
        let number = self.d.arrive(ask_with(name, prompt, 6, params));
        self.until("the end", |three| three.d.finished(number).is_some() || three.d.failed(number).is_some());
        number
    }

    /// Waits until nobody who is there holds anything; the second producer's counters.
    fn settle(&mut self) -> ProducerStats {
        self.until("all blocks free", |three| {
            [&three.second, &three.d].into_iter().chain(&three.first).all(|rig| {
                rig.core.request_count() == 0 && rig.held() == 0 && rig.scheduler().stats().holds == 0
            })
        });
        self.second.scheduler().stats().producer
    }

    fn recovered(&self) -> Recovered {
        self.d.core.stats().recovered
    }
}

// H-29
#[test]
fn p8_when_a_producer_is_gone_the_prompt_comes_from_another_under_retry() {
    let mut three = Three::new(Policy::Retry, Mode::Open);
    let prompts = [prompt(0, 50), prompt(1, 40)];
    let params = prompts.each_ref().map(|prompt| three.prefill(&format!("r{}", prompt.len()), prompt));
    three.first = None;
    let [one, two] = params;

    let number = three.answer("one", &prompts[0], one);
    assert_eq!(three.d.tokens(number), reference(&tiny(), &prompts[0], 6));
    assert!(three.d.saw(number, |h| matches!(h, Happening::LoadFailed { .. })));
    assert_eq!(three.d.finished(number).unwrap().0.external_tokens, 50);
    assert_eq!(three.recovered(), Recovered { retried_elsewhere: 1, ..Recovered::default() });

    // The breaker of the one that is gone is open now: the next request does not even try.
    let number = three.answer("two", &prompts[1], two);
    assert_eq!(three.d.tokens(number), reference(&tiny(), &prompts[1], 6));
    assert!(!three.d.saw(number, |h| matches!(h, Happening::LoadFailed { .. })));
    assert_eq!(three.d.finished(number).unwrap().0.external_tokens, 40);
    assert_eq!((three.recovered().retried_elsewhere, three.d.core.breakers().refused), (1, 1));

    assert_eq!(three.settle().confirmed, 2);
    let d = three.d.scheduler().stats().consumer;
    assert_eq!((d.loads, d.loaded), (3, 2));
}

// H-22, H-29
#[test]
fn a_producer_that_was_not_needed_has_its_blocks_back_at_once() {
    for policy in [Policy::Recompute, Policy::Fail, Policy::Retry] {
        let mut three = Three::new(policy, Mode::Open);
        let prompt = prompt(0, 50);
        let params = three.prefill("r", &prompt);
        let number = three.answer("r", &prompt, params);
        assert_eq!(three.d.tokens(number), reference(&tiny(), &prompt, 6));
        let second = three.settle();
        assert_eq!((second.released, second.confirmed, second.expired), (1, 0, 0), "{policy:?}");
        assert_eq!(three.first.as_ref().unwrap().scheduler().stats().producer.confirmed, 1);
    }
}

// H-22, H-29
#[test]
fn policies_without_a_retry_give_the_others_back_when_a_load_has_failed() {
    for policy in [Policy::Recompute, Policy::Fail] {
        let mut three = Three::new(policy, Mode::Failing(ReadError::Stalled));
        let prompt = prompt(0, 50);
        let params = three.prefill("r", &prompt);
        let number = three.answer("r", &prompt, params);
        let reason = if policy == Policy::Recompute {
            assert_eq!(three.d.tokens(number), reference(&tiny(), &prompt, 6));
            // At once: an answer may take long.
            ReleaseReason::NotNeeded
        } else {
            assert!(three.d.failed(number).is_some());
            ReleaseReason::Aborted
        };
        assert_eq!(three.d.scheduler().stats().consumer.released, [(reason, 1)].into(), "{policy:?}");
        let second = three.settle();
        assert_eq!((second.released, second.confirmed, second.expired), (1, 0, 0), "{policy:?}");
        assert_eq!((three.recovered().retried_elsewhere, three.d.scheduler().stats().consumer.loads), (0, 1));
    }
}

// H-21, H-29
#[test]
fn when_every_producer_has_failed_the_prompt_is_computed_here() {
    let mut three = Three::new(Policy::Retry, Mode::Failing(ReadError::Stalled));
    let prompt = prompt(0, 50);
    let params = three.prefill("r", &prompt);
    let number = three.answer("r", &prompt, params);
    assert_eq!(three.d.tokens(number), reference(&tiny(), &prompt, 6));
    assert_eq!(three.d.finished(number).unwrap().0.external_tokens, 0);
    let recovered =
        Recovered { retried_elsewhere: 1, requests: 1, tokens_recomputed: 50, ..Recovered::default() };
    assert_eq!(three.recovered(), recovered);
    assert_eq!(three.settle().released, 1);
    assert_eq!(three.d.scheduler().stats().consumer.loads, 2);
}
