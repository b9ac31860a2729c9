//! Two of the small engine's schedulers, joined by the real connectors over TCP in one process: what is handed over
//! gives the same answers, and the blocks of a load stay its own until nobody can write them any more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;
#[path = "../examples/custom_transport/transport.rs"]
mod transport;

use std::sync::Arc;

use common::gate::Mode;
use common::pair::Pair;
use common::{ask, ask_with, id, prompt, reference, settings, tiny};
use kv_connector::recovery::Policy;
use kv_testkit::engine::core::CoreSettings;
use kv_testkit::engine::request::Happening;
use kv_transport::ReadError;

#[test]
fn a_handed_over_prompt_is_answered_as_if_computed_here() {
    let weights = tiny();
    for run_ahead in [false, true] {
        let mut pair = Pair::with(CoreSettings { run_ahead, ..settings() }, Mode::Open);
        for (n, len) in [1, 15, 16, 17, 32, 50, 100].into_iter().enumerate() {
            let prompt = prompt(n as u32, len);
            let params = pair.prefill(&format!("r{n}"), &prompt);
            assert_eq!(pair.p.held(), len.div_ceil(16), "P keeps the blocks of the prompt");
            let number = pair.d.arrive(ask_with(&format!("r{n}"), &prompt, 8, params));
            pair.until("an answer", |pair| pair.d.finished(number).is_some());
            assert_eq!(pair.d.tokens(number), reference(&weights, &prompt, 8), "{len} tokens");
            let (usage, _) = pair.d.finished(number).unwrap();
            assert_eq!(usage.external_tokens as usize, len);
            // Over all layers, keys and values, in full blocks.
            assert_eq!(usage.load_bytes, len.div_ceil(16) as u64 * 16 * 2048);
            pair.settle();
        }
        let (p, d) = (pair.p.scheduler().stats(), pair.d.scheduler().stats());
        assert_eq!((p.producer.granted, p.producer.confirmed, p.producer.expired), (7, 7, 0));
        assert_eq!((d.consumer.loads, d.consumer.loaded), (7, 7));
    }
}

#[test]
fn a_transport_of_ones_own_hands_over_as_well() {
    let mut pair = Pair::over(|| Arc::new(transport::Inproc::new().unwrap()));
    let prompt = prompt(3, 70);
    let params = pair.prefill("r", &prompt);
    let number = pair.d.arrive(ask_with("r", &prompt, 8, params));
    pair.until("an answer", |pair| pair.d.finished(number).is_some());
    assert_eq!(pair.d.tokens(number), reference(&tiny(), &prompt, 8));
    assert_eq!(pair.d.finished(number).unwrap().0.external_tokens, 70);
    pair.settle();
}

// H-11
#[test]
fn what_is_here_already_is_not_loaded_again() {
    let weights = tiny();
    let mut pair = Pair::new(Mode::Open);
    let (prompt, mut longer) = (prompt(0, 64), prompt(0, 64));
    longer.extend([9, 8, 7]);
    for (name, prompt, cached, loaded) in
        [("first", &prompt, 0, 64), ("same", &prompt, 48, 16), ("longer", &longer, 64, 3)]
    {
        let params = pair.prefill(name, prompt);
        let number = pair.d.arrive(ask_with(name, prompt, 6, params));
        pair.until("an answer", |pair| pair.d.finished(number).is_some());
        assert_eq!(pair.d.tokens(number), reference(&weights, prompt, 6));
        let (usage, _) = pair.d.finished(number).unwrap();
        assert_eq!((usage.cached_tokens, usage.external_tokens), (cached, loaded), "{name}");
        pair.settle();
    }
}

// H-19, R019, R074
#[test]
fn an_abort_while_loading_holds_the_blocks_until_the_read_has_ended() {
    let mut pair = Pair::with(CoreSettings { blocks: 8, ..settings() }, Mode::Closed);
    let long = prompt(0, 100);
    let params = pair.prefill("gone", &long);
    let number = pair.d.arrive(ask_with("gone", &long, 8, params));
    pair.until("a read", |pair| pair.gate.held() == 1);
    pair.d.core.abort(&id("gone"));
    assert_eq!((pair.d.held(), pair.d.core.request_count()), (7, 0), "the blocks outlive the request");
    pair.until("the cancel", |pair| pair.gate.cancels() == 1);

    // A request for which there is room runs; one that needs those blocks has to wait, whatever happens meanwhile.
    let small = pair.d.arrive(ask("small", &prompt(1, 10), 4));
    pair.until("the small one's answer", |pair| pair.d.finished(small).is_some());
    let big = pair.d.arrive(ask("big", &prompt(2, 60), 4));
    for n in 0..50 {
        let other = pair.p.arrive(ask(&format!("other{n}"), &prompt(n, 20), 2));
        pair.until("another answer of P", |pair| pair.p.finished(other).is_some());
    }
    assert_eq!(pair.d.held(), 7);
    assert!(pair.d.tokens(big).is_empty());
    assert_eq!(pair.p.held(), 7, "P's lease is held as long as D may read");

    pair.gate.open();
    pair.until("the big one's answer", |pair| pair.d.finished(big).is_some());
    assert_eq!(pair.d.tokens(big), reference(&tiny(), &prompt(2, 60), 4));
    pair.settle();
    assert!(pair.d.tokens(number).is_empty());
    let (p, d) = (pair.p.scheduler().stats(), pair.d.scheduler().stats());
    assert_eq!((p.producer.released, p.producer.confirmed, p.producer.expired), (1, 0, 0));
    assert_eq!(d.consumer.loaded, 0);
}

// H-23, R071
#[test]
fn blocks_that_are_being_loaded_are_found_by_nobody_until_they_are_confirmed() {
    let mut pair = Pair::new(Mode::Closed);
    let prompt = prompt(0, 50);
    let answer = reference(&tiny(), &prompt, 6);
    let params = pair.prefill("first", &prompt);
    let first = pair.d.arrive(ask_with("first", &prompt, 6, params));
    pair.until("a read", |pair| pair.gate.held() == 1);
    // The same prompt without a hand-over, while the load is under way.
    let second = pair.d.arrive(ask("second", &prompt, 6));
    pair.until("the second's answer", |pair| pair.d.finished(second).is_some());
    assert_eq!(pair.d.tokens(second), answer);
    assert_eq!(pair.d.finished(second).unwrap().0.cached_tokens, 0);
    assert!(pair.d.tokens(first).is_empty(), "it still waits");
    pair.gate.open();
    pair.until("the first's answer", |pair| pair.d.finished(first).is_some());
    assert_eq!(pair.d.tokens(first), answer);
    pair.settle();
    // Afterwards they are found.
    let third = pair.d.arrive(ask("third", &prompt, 6));
    pair.until("the third's answer", |pair| pair.d.finished(third).is_some());
    assert_eq!(pair.d.tokens(third), answer);
    assert_eq!(pair.d.finished(third).unwrap().0.cached_tokens, 48);
}

// R024
#[test]
fn a_load_does_not_begin_in_blocks_that_a_step_in_flight_may_write() {
    let mut pair = Pair::with(CoreSettings { blocks: 4, run_ahead: true, ..settings() }, Mode::Closed);
    let prompt = prompt(0, 40);
    let params = pair.prefill("loading", &prompt);
    pair.d.arrive(ask("before", &common::prompt(1, 40), 8));
    pair.d.order();
    pair.d.run();
    assert_eq!(pair.d.orders.len(), 1, "a step in flight, and room for another");
    pair.d.core.abort(&id("before"));
    let number = pair.d.arrive(ask_with("loading", &prompt, 8, params));
    pair.d.order();
    assert!(!pair.d.saw(number, |h| matches!(h, Happening::Loading { .. })), "it has no blocks yet");
    pair.until("a read", |pair| pair.gate.held() == 1);
    assert!(pair.d.saw(number, |h| matches!(h, Happening::Loading { tokens: 40 })));
    pair.gate.open();
    pair.until("an answer", |pair| pair.d.finished(number).is_some());
    assert_eq!(pair.d.tokens(number), reference(&tiny(), &prompt, 8));
    pair.settle();
}

// H-22, R017, R018
#[test]
fn a_failed_load_is_computed_here_under_recompute() {
    for error in [ReadError::Stalled, ReadError::UnknownKey, ReadError::Fabric { code: -5 }] {
        let mut pair = Pair::new(Mode::Failing(error));
        let prompt = prompt(0, 50);
        let params = pair.prefill("r", &prompt);
        let number = pair.d.arrive(ask_with("r", &prompt, 6, params));
        pair.until("an answer", |pair| pair.d.finished(number).is_some());
        assert_eq!(pair.d.tokens(number), reference(&tiny(), &prompt, 6));
        assert!(pair.d.saw(number, |h| matches!(h, Happening::LoadFailed { .. })));
        assert_eq!(pair.d.finished(number).unwrap().0.external_tokens, 0);
        pair.settle();
        assert_eq!(pair.p.scheduler().stats().producer.released, 1, "P need not wait for the lease's end");
    }
}

#[test]
fn a_failed_load_keeps_the_prefix_that_was_here_and_computes_the_rest() {
    let mut pair = Pair::new(Mode::Failing(ReadError::Stalled));
    let (short, mut long) = (prompt(0, 40), prompt(0, 40));
    long.extend(prompt(5, 30));
    let here = pair.d.arrive(ask("here", &short, 2));
    pair.until("an answer", |pair| pair.d.finished(here).is_some());
    let params = pair.prefill("r", &long);
    let number = pair.d.arrive(ask_with("r", &long, 6, params));
    pair.until("an answer", |pair| pair.d.finished(number).is_some());
    assert_eq!(pair.d.tokens(number), reference(&tiny(), &long, 6));
    assert_eq!(pair.d.finished(number).unwrap().0.cached_tokens, 32);
    assert!(pair.d.saw(number, |h| matches!(h, Happening::Loading { tokens: 38 })));
    pair.settle();
}

// H-23, R109
#[test]
fn a_failed_load_ends_the_request_under_fail() {
    let mut pair =
        Pair::with(CoreSettings { policy: Policy::Fail, ..settings() }, Mode::Failing(ReadError::Stalled));
    let prompt = prompt(0, 50);
    let params = pair.prefill("r", &prompt);
    let number = pair.d.arrive(ask_with("r", &prompt, 6, params));
    pair.until("the end", |pair| pair.d.failed(number).is_some());
    let message = pair.d.failed(number).unwrap();
    assert!(message.starts_with("the KV cache of the prompt could not be loaded: "), "{message}");
    assert!(pair.d.tokens(number).is_empty());
    pair.settle();
    // The next one, without a hand-over, must not find what the failed load left.
    let next = pair.d.arrive(ask("next", &prompt, 6));
    pair.until("an answer", |pair| pair.d.finished(next).is_some());
    assert_eq!(pair.d.tokens(next), reference(&tiny(), &prompt, 6));
    assert_eq!(pair.d.finished(next).unwrap().0.cached_tokens, 0);
}

// H-22
#[test]
fn a_queued_request_that_is_aborted_gives_its_offer_back() {
    let mut pair = Pair::with(CoreSettings { blocks: 4, ..settings() }, Mode::Open);
    let busy = pair.d.arrive(ask("busy", &prompt(1, 40), 20));
    pair.d.turn();
    let prompt = prompt(0, 50);
    let params = pair.prefill("queued", &prompt);
    let number = pair.d.arrive(ask_with("queued", &prompt, 6, params));
    pair.d.turn();
    assert!(!pair.d.saw(number, |h| matches!(h, Happening::Loading { .. })), "there is no room for it");
    pair.d.core.abort(&id("queued"));
    pair.until("the busy one's answer", |pair| pair.d.finished(busy).is_some());
    pair.settle();
    let p = pair.p.scheduler().stats().producer;
    assert_eq!((p.released, p.expired), (1, 0));
}

// H-22, R001
#[test]
fn a_refused_request_gives_its_offer_back() {
    let mut pair = Pair::with(CoreSettings { max_positions: 60, ..settings() }, Mode::Open);
    let prompt = prompt(0, 50);
    for (n, (max_tokens, spoil, reason)) in [
        // What the engine refuses, and what the connector refuses.
        (11, false, "prompt and max_tokens make 61 tokens, at most 60 are allowed"),
        (8, true, "kv_transfer_params: "),
    ]
    .into_iter()
    .enumerate()
    {
        let params = pair.prefill(&format!("r{n}"), &prompt);
        let mut asked = prompt.clone();
        asked[7] += u32::from(spoil);
        let refused = pair.d.core.arrive(ask_with("r", &asked, max_tokens, params)).unwrap_err();
        assert!(refused.starts_with(reason), "{refused}");
        pair.settle();
        let p = pair.p.scheduler().stats().producer;
        assert_eq!((p.released, p.expired), (n as u64 + 1, 0));
    }
}

// H-7, R022
#[test]
fn an_aborted_prefill_hands_nothing_over() {
    let mut pair = Pair::new(Mode::Open);
    let params = serde_json::json!({ "do_remote_decode": true });
    let number = pair.p.arrive(ask_with("r", &prompt(0, 50), 1, params));
    pair.p.order();
    assert_eq!(pair.p.orders.len(), 1);
    pair.p.core.abort(&id("r"));
    pair.settle();
    assert!(pair.p.finished(number).is_none());
    let p = pair.p.scheduler().stats().producer;
    assert_eq!((p.granted, p.forgotten), (0, 1));
}
