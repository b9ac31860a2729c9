//! `kvx demo --fault`, in short: what follows when P dies, a read brings wrong bytes, or nobody answers a handshake.
//! All faults, and many rounds of them, are commands of their own; see `docs/recovery.md`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use common::{my_turn, run};
use serde_json::Value;

fn demo(fault: &str, policy: &str) -> (i32, Value) {
    demo_of(fault, policy, ["9", "3"], &[])
}

fn demo_of(fault: &str, policy: &str, [requests, concurrency]: [&str; 2], more: &[&str]) -> (i32, Value) {
    let _turn = my_turn();
    let counts = ["demo", "--json", "--requests", requests, "--concurrency", concurrency];
    let (code, out, err) = run(&[&counts, &["--fault", fault, "--policy", policy][..], more].concat());
    (code, serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}\n{err}")))
}

fn count(json: &Value, pointer: &str) -> u64 {
    json.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}: {json}"))
}

/// Right answers for all that P had answered, nothing wrong, nothing that hangs, no block held.
fn assert_recovered((code, json): &(i32, Value)) {
    assert_eq!(*code, 0, "{json}");
    assert_eq!(count(json, "/equal"), count(json, "/requests"), "{json}");
    for pointer in ["/wrong", "/errors", "/hung", "/blocks_held/producer", "/blocks_held/consumer"] {
        assert_eq!(count(json, pointer), 0, "{pointer}: {json}");
    }
}

// P8
#[test]
fn a_killed_producer_costs_computation_and_no_wrong_token() {
    let told = demo("kill-prefill", "recompute");
    assert_recovered(&told);
    let (_, json) = told;
    assert!(count(&json, "/not_prefilled") > 0, "those that came after its death: {json}");
    assert!(count(&json, "/recovered/requests") + count(&json, "/recovered/loads_not_begun") > 0, "{json}");
}

// P8
#[test]
fn under_the_policy_fail_the_struck_end_with_an_error_and_the_others_are_answered() {
    let (code, json) = demo("kill-prefill", "fail");
    assert_eq!((code, count(&json, "/wrong"), count(&json, "/hung")), (0, 0, 0), "{json}");
    assert_eq!(count(&json, "/errors"), count(&json, "/recovered/ended"), "{json}");
    assert_eq!(count(&json, "/errors") + count(&json, "/equal"), count(&json, "/requests"), "{json}");
    assert!(count(&json, "/errors") > 0, "{json}");
}

// P8
#[test]
fn between_engines_of_unequal_shapes_a_killed_producer_costs_computation_too() {
    let shapes =
        ["--model-kind", "hybrid", "--decode-ranks", "2", "--prefill-block", "32", "--prefill-layout", "nhd"];
    let told = demo_of("kill-prefill", "recompute", ["9", "3"], &shapes);
    assert_recovered(&told);
    let (_, json) = told;
    assert!(count(&json, "/recovered/requests") + count(&json, "/recovered/loads_not_begun") > 0, "{json}");
}

// H-32, P8
#[test]
fn p8_conversations_survive_a_killed_prefill_or_decode_engine() {
    for (fault, turns) in [("kill-decode", 27), ("kill-prefill", 1)] {
        let told = demo_of(fault, "recompute", ["9", "3"], &["--turns", "3", "--max-tokens", "12"]);
        assert_recovered(&told);
        // Without P there is no next turn.
        assert!(count(&told.1, "/requests") >= turns, "{fault}: {}", told.1);
    }
}

// P7, R034
#[test]
fn a_reborn_producer_is_not_taken_for_the_one_that_made_the_offers() {
    let told = demo("restart-prefill", "recompute");
    assert_recovered(&told);
    assert_eq!(count(&told.1, "/not_prefilled"), 0, "{}", told.1);
}

// H-28
#[test]
fn wrong_bytes_are_seen_by_their_checksums() {
    let told = demo("corrupt", "recompute");
    assert_recovered(&told);
    assert!(count(&told.1, "/reasons/corrupt") > 0, "{}", told.1);
}

// P8
#[test]
fn a_killed_consumers_requests_are_sent_again() {
    assert_recovered(&demo("kill-decode", "recompute"));
}

// H-6, H-20
#[test]
fn a_handshake_that_hangs_costs_its_limit_once() {
    let told = demo("handshake-hang", "recompute");
    assert_recovered(&told);
    assert!(count(&told.1, "/reasons/handshake_unreachable") > 0, "{}", told.1);
}

// A load that a breaker holds back has no blocks of the window's beginning, which the computation needs.
#[test]
fn prompts_longer_than_a_window_are_computed_where_their_loads_are_not_begun() {
    let told = demo_of("drop-connection", "recompute", ["13", "1"], &["--model-kind", "hybrid"]);
    assert_recovered(&told);
    assert!(count(&told.1, "/recovered/loads_not_begun") > 0, "{}", told.1);
}

#[test]
fn a_fault_and_an_abort_at_once_are_refused_by_name() {
    let (code, out, err) = run(&["demo", "--fault", "stall", "--abort", "mixed"]);
    assert_eq!(code, 2, "{out}{err}");
    assert!(err.contains("--fault and --abort"), "{err}");
}
