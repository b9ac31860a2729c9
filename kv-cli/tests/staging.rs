//! `kvx demo` with KV caches on devices: hand-overs go through pools of host memory, and nothing stays in them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use common::{my_turn, run};
use serde_json::Value;

const BOTH: [&str; 4] = ["--prefill-memory", "device", "--decode-memory", "device"];

/// Runs the demonstration to a good end, with every answer equal and nothing held anywhere.
fn good(requests: u64, arguments: &[&[&str]]) -> Value {
    let _turn = my_turn();
    let asked = requests.to_string();
    let all = [&["demo", "--json", "--max-tokens", "6", "--requests", &asked][..], &arguments.concat()];
    let (code, out, err) = run(&all.concat());
    let json: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}\n{err}"));
    assert_eq!(json["equal"], json["requests"], "{json}\n{err}");
    for pointer in ["/wrong", "/errors", "/hung", "/blocks_held/producer", "/blocks_held/consumer"] {
        assert_eq!(count(&json, pointer), 0, "{pointer}: {json}");
    }
    for pool in ["/staging/producer", "/staging/consumer"].map(|side| json.pointer(side).unwrap()) {
        assert!(pool.is_null() || (pool["held"] == 0 && pool["records"] == 0), "{json}");
    }
    assert_eq!(code, 0, "{json}\n{err}");
    json
}

fn count(json: &Value, pointer: &str) -> u64 {
    json.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}: {json}"))
}

/// Every prompt went from P's device to its host pool, over, and from D's host pool to its device.
fn assert_all_staged(json: &Value, requests: u64) {
    assert_eq!(count(json, "/external_tokens"), count(json, "/prompt_tokens"), "{json}");
    assert_eq!(count(json, "/staging/producer/saved"), requests, "{json}");
    assert_eq!(count(json, "/staging/consumer/restored"), requests, "{json}");
    let bytes = ["/staging/producer/bytes", "/staging/consumer/bytes"].map(|side| count(json, side));
    assert!(bytes[0] > 0 && bytes[0] == bytes[1], "{json}");
}

#[test]
fn caches_on_devices_hand_over_through_host_memory() {
    assert_all_staged(&good(12, &[&BOTH]), 12);
}

#[test]
fn either_side_alone_may_have_its_cache_on_a_device() {
    let json = good(6, &[&BOTH[..2], &["--prefill-ranks", "2", "--prefill-layout", "nhd-rows"]]);
    assert_eq!((count(&json, "/staging/producer/saved"), &json["staging"]["consumer"]), (6, &Value::Null));
    let json = good(6, &[&BOTH[2..], &["--decode-ranks", "2", "--decode-block", "32"]]);
    assert_eq!((count(&json, "/staging/consumer/restored"), &json["staging"]["producer"]), (6, &Value::Null));
    assert_eq!(count(&json, "/external_tokens"), count(&json, "/prompt_tokens"), "{json}");
}

#[test]
fn a_pool_of_about_two_requests_makes_them_wait_and_nothing_else() {
    // The longest of the prompts has 8 blocks.
    for more in [&[][..], &["--async-schedule"]] {
        let json = good(12, &[&BOTH, &["--staging-blocks", "16", "--concurrency", "6"], more]);
        assert_all_staged(&json, 12);
    }
}

#[test]
fn a_window_and_what_sees_everything_pass_through_one_pool() {
    let json = good(6, &[&BOTH, &["--model-kind", "hybrid", "--staging-blocks", "24"]]);
    assert_all_staged(&json, 6);
}

#[test]
fn what_is_too_large_for_the_pool_is_computed_by_the_consumer() {
    // Prompts of 1 to 8 blocks; those of 5 and more never fit.
    let json = good(12, &[&BOTH, &["--staging-blocks", "4"]]);
    assert!(count(&json, "/staging/producer/no_room") > 0, "{json}");
    assert!(count(&json, "/external_tokens") < count(&json, "/prompt_tokens"), "{json}");
}

#[test]
fn a_producer_that_is_killed_leaves_nothing_in_the_consumers_pool() {
    let json = good(12, &[&BOTH, &["--staging-blocks", "16", "--fault", "kill-prefill"]]);
    assert!(count(&json, "/recovered/requests") > 0, "{json}");
}

#[test]
fn a_load_whose_lease_lapsed_never_reaches_the_device() {
    let json = good(10, &[&BOTH, &["--fault", "lapse"]]);
    let (restored, lapsed) = (count(&json, "/staging/consumer/restored"), count(&json, "/reasons/lapsed"));
    assert!(lapsed > 0 && restored > 0 && restored + lapsed >= 10, "{json}");
}

#[test]
fn clients_that_go_away_at_all_times_leave_nothing_in_the_pools() {
    for more in [&[][..], &["--async-schedule"]] {
        let json = good(18, &[&BOTH, &["--staging-blocks", "16", "--abort", "mixed"], more]);
        assert_eq!(count(&json, "/aborted"), 6, "{json}");
    }
}

#[test]
fn bytes_that_were_not_moved_between_the_pools_make_every_answer_wrong() {
    let _turn = my_turn();
    let all = [&["demo", "--json", "--requests", "6", "--unmoved"][..], &BOTH];
    let (code, out, _) = run(&all.concat());
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, count(&json, "/wrong"), count(&json, "/equal")), (1, 6, 0), "{json}");
}
