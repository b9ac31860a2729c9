//! `kvx demo` as people run it: real processes, its verdict, its figures and its exit code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use std::io::Write;

use common::{my_turn, run};
use kv_testkit::engine::model::{ModelConfig, Weights};
use serde_json::{Value, json};

/// Tokens of the first twelve prompts that come with the program.
const TWELVE: u64 = 5 + 15 + 16 + 17 + 31 + 32 + 33 + 47 + 64 + 80 + 100 + 127;

/// Runs the demonstration, and checks that it prints what it promises to print.
fn demo(arguments: &[&str]) -> (i32, Value) {
    let _turn = my_turn();
    let (code, out, err) = run(&[&["demo", "--json"], arguments].concat());
    assert_eq!(out.lines().count(), 1, "one line on standard output: {out}");
    let json: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}\n{err}"));
    let number = |pointer: &str| json.pointer(pointer).unwrap_or_else(|| panic!("{pointer}: {json}"));
    for pointer in [
        "/shapes/producer/ranks",
        "/shapes/consumer/block_tokens",
        "/requests",
        "/aborted",
        "/not_prefilled",
        "/equal",
        "/wrong",
        "/errors",
        "/hung",
        "/prompt_tokens",
        "/external_tokens",
        "/blocks_held/producer",
        "/blocks_held/consumer",
        "/leases/granted",
        "/leases/confirmed",
        "/leases/released",
        "/leases/expired",
        "/leases/lapsed",
    ] {
        assert!(number(pointer).is_u64(), "{pointer}: {json}");
    }
    for pointer in ["/pull_gbps", "/ttft_ms/p50", "/ttft_ms/p99"] {
        assert!(number(pointer).is_number(), "{pointer}: {json}");
    }
    assert!(err.contains("blocks") && err.contains("request"), "the table is on standard error: {err}");
    (code, json)
}

fn count(json: &Value, pointer: &str) -> u64 {
    json.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}: {json}"))
}

/// Every request that was not aborted was answered right, and nobody holds anything.
fn assert_good((code, json): &(i32, Value), requests: u64, aborted: u64) {
    let found: Vec<u64> = ["/requests", "/aborted", "/equal"].iter().map(|p| count(json, p)).collect();
    assert_eq!(found, [requests, aborted, requests], "{json}");
    for pointer in
        ["/wrong", "/errors", "/hung", "/not_prefilled", "/blocks_held/producer", "/blocks_held/consumer"]
    {
        assert_eq!(count(json, pointer), 0, "{pointer}: {json}");
    }
    let ends: u64 =
        ["/leases/confirmed", "/leases/released", "/leases/expired"].iter().map(|p| count(json, p)).sum();
    assert_eq!(count(json, "/leases/granted"), ends, "every lease ended once: {json}");
    assert_eq!(*code, 0);
}

/// Everything came from P, and every lease was confirmed.
fn assert_all_moved(json: &Value, requests: u64, tokens: u64) {
    assert_eq!(count(json, "/prompt_tokens"), tokens, "{json}");
    assert_eq!(count(json, "/external_tokens"), tokens, "{json}");
    assert_eq!(count(json, "/leases/confirmed"), requests, "{json}");
    assert_eq!((count(json, "/leases/expired"), count(json, "/leases/lapsed")), (0, 0), "{json}");
    assert!(json["pull_gbps"].as_f64().unwrap() > 0.0, "{json}");
    let (p50, p99) = (json["ttft_ms"]["p50"].as_f64().unwrap(), json["ttft_ms"]["p99"].as_f64().unwrap());
    assert!(0.0 < p50 && p50 <= p99, "{json}");
}

/// A file of prompts, one per line, with blank lines between.
fn prompts(lines: &[String]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "{}\n\n  ", lines.join("\n\n")).unwrap();
    file
}

fn lines(lengths: &[usize]) -> Vec<String> {
    let text = |(n, len): (usize, &usize)| -> String {
        let words = format!("{n} bells rang, and {} more were counted by ear; ", n * n + 7);
        words.chars().cycle().take(*len).collect()
    };
    lengths.iter().enumerate().map(text).collect()
}

#[test]
fn without_faults_every_answer_is_equal_and_every_token_moved() {
    let seen = demo(&["--requests", "12", "--max-tokens", "8"]);
    assert_good(&seen, 12, 0);
    assert_all_moved(&seen.1, 12, TWELVE);
    assert_eq!(seen.1["loads_failed"], json!({}));
}

#[test]
fn two_ranks_hand_over_to_two_ranks() {
    let seen =
        demo(&["--requests", "12", "--max-tokens", "4", "--prefill-ranks", "2", "--decode-ranks", "2"]);
    assert_good(&seen, 12, 0);
    assert_all_moved(&seen.1, 12, TWELVE);
}

/// Two engines of other shapes hand over twelve prompts, whole.
fn assert_shapes_hand_over(shapes: &[&str]) {
    let seen = demo(&[&["--requests", "12", "--max-tokens", "8"], shapes].concat());
    assert_good(&seen, 12, 0);
    assert_all_moved(&seen.1, 12, TWELVE);
}

#[test]
fn ranks_blocks_and_layouts_may_all_differ_at_once() {
    assert_shapes_hand_over(&[
        "--prefill-ranks",
        "2",
        "--decode-ranks",
        "4",
        "--prefill-block",
        "32",
        "--prefill-layout",
        "nhd-apart",
        "--decode-layout",
        "hnd-rows",
    ]);
}

#[test]
fn three_ranks_hand_over_to_one() {
    assert_shapes_hand_over(&["--prefill-ranks", "3"]);
}

#[test]
fn a_latent_that_every_rank_holds_is_handed_over() {
    assert_shapes_hand_over(&["--model-kind", "mla", "--prefill-ranks", "4", "--decode-ranks", "2"]);
}

#[test]
fn a_window_and_what_sees_everything_are_handed_over_side_by_side() {
    assert_shapes_hand_over(&["--model-kind", "hybrid", "--prefill-ranks", "2", "--decode-block", "32"]);
}

#[test]
fn engines_that_schedule_ahead_answer_equally() {
    let seen = demo(&["--requests", "12", "--max-tokens", "8", "--async-schedule"]);
    assert_good(&seen, 12, 0);
    assert_all_moved(&seen.1, 12, TWELVE);
}

#[test]
fn a_small_pool_makes_requests_wait_and_nothing_else() {
    let file = prompts(&lines(&[90, 60, 75, 40, 88, 93, 20, 71, 64, 33]));
    let path = file.path().to_str().unwrap();
    for more in [&[][..], &["--async-schedule"]] {
        let given = ["--prompts", path, "--requests", "10", "--max-tokens", "40", "--kv-blocks", "9"];
        let seen = demo(&[&given, more].concat());
        assert_good(&seen, 10, 0);
    }
}

#[test]
fn clients_that_go_away_before_they_are_scheduled_leave_nothing() {
    let seen = demo(&["--requests", "9", "--max-tokens", "6", "--abort", "before-schedule"]);
    assert_good(&seen, 6, 3);
    let leases = &seen.1["leases"];
    assert_eq!((&leases["confirmed"], &leases["released"]), (&json!(6), &json!(3)), "{leases}");
}

#[test]
fn clients_that_go_away_while_loading_leave_nothing() {
    let seen = demo(&["--requests", "9", "--max-tokens", "6", "--abort", "while-loading"]);
    assert_good(&seen, 6, 3);
    // The load may have ended before the word of the abort came, so a lease may also have been confirmed.
    assert_eq!(seen.1["leases"]["expired"], 0, "{}", seen.1);
    assert!(count(&seen.1, "/leases/confirmed") >= 6, "{}", seen.1);
}

#[test]
fn clients_that_go_away_after_the_prefill_cost_a_lease_and_no_more() {
    let seen = demo(&["--requests", "6", "--max-tokens", "6", "--abort", "after-finish"]);
    assert_good(&seen, 4, 2);
    let leases = &seen.1["leases"];
    assert_eq!((&leases["confirmed"], &leases["expired"]), (&json!(4), &json!(2)), "{leases}");
}

#[test]
fn clients_that_go_away_at_all_times_leave_nothing() {
    let seen = demo(&["--requests", "18", "--max-tokens", "6", "--abort", "mixed", "--async-schedule"]);
    assert_good(&seen, 12, 6);
    assert!(count(&seen.1, "/leases/expired") >= 2, "{}", seen.1);
}

#[test]
fn bytes_that_were_not_moved_make_every_answer_wrong() {
    let (code, json) = demo(&["--requests", "12", "--max-tokens", "8", "--unmoved"]);
    assert_eq!((count(&json, "/requests"), count(&json, "/wrong"), count(&json, "/equal")), (12, 12, 0));
    assert_eq!(code, 1);
}

#[test]
fn a_model_from_a_folder_is_handed_over_too() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig { num_hidden_layers: 2, ..ModelConfig::tiny() };
    Weights::seeded(&config, 11).unwrap().to_folder(folder.path()).unwrap();
    let file = prompts(&lines(&[40, 16, 77]));
    let seen = demo(&[
        "--model",
        folder.path().to_str().unwrap(),
        "--prompts",
        file.path().to_str().unwrap(),
        "--requests",
        "3",
        "--max-tokens",
        "8",
    ]);
    assert_good(&seen, 3, 0);
    assert_all_moved(&seen.1, 3, 40 + 16 + 77);
}

#[test]
fn a_bad_command_line_is_refused_at_once_with_the_option_and_its_values() {
    let _turn = my_turn();
    let empty = prompts(&[]);
    let empty = empty.path().to_str().unwrap();
    let nowhere = "no/such/file";
    let cases: Vec<(Vec<&str>, Vec<&str>)> = vec![
        (
            vec!["--requests", "12", "--max-tokens", "30", "--kv-blocks", "9"],
            vec!["--kv-blocks: ", "needs 10 blocks", "the pool has 9"],
        ),
        (vec!["--prompts", nowhere], vec!["read --prompts no/such/file: ", "No such file"]),
        (vec!["--prompts", empty], vec!["--prompts ", empty, "has no prompt"]),
        (vec!["--transport", "pigeon"], vec!["--transport: ", "\"pigeon\"", "[\"tcp\", \"shm\""]),
        (
            vec!["--fault", "corrupt", "--prefill-ranks", "1", "--decode-ranks", "2"],
            vec!["--fault: ", "checksums", "alike"],
        ),
        (vec!["--decode-layout", "dnh"], vec!["'dnh'", "--decode-layout", "hnd or nhd"]),
        (vec!["--model-kind", "hybrid", "--kv-blocks", "9"], vec!["--kv-blocks: ", "the pool has 9"]),
        (vec!["--requests", "0"], vec!["--requests", "at least 1"]),
        (vec!["--max-tokens", "0"], vec!["'0'", "--max-tokens", "1.."]),
        (vec!["--max-tokens", "4294967295"], vec!["--kv-blocks: ", "needs ", "the pool has 2048"]),
        (vec!["--prefill-ranks", "0", "--decode-ranks", "0"], vec!["'0'", "--prefill-ranks"]),
        (vec!["--abort", "sometimes"], vec!["'sometimes'", "--abort", "before-schedule", "mixed"]),
        (vec!["--kv-blocks", "many"], vec!["'many'", "--kv-blocks"]),
    ];
    for (arguments, words) in cases {
        let (code, out, err) = run(&[&["demo", "--json"], arguments.as_slice()].concat());
        assert_eq!(code, 2, "{arguments:?}: {err}");
        assert_eq!(out, "", "{arguments:?}");
        for word in words {
            assert!(err.contains(word), "{word:?} is missing for {arguments:?}: {err}");
        }
    }
}

#[test]
fn a_model_that_cannot_be_read_is_named() {
    let _turn = my_turn();
    let (code, out, err) = run(&["demo", "--json", "--model", "no/such/model"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("no/such/model"), "{err}");
}

#[test]
fn ranks_that_do_not_divide_the_heads_are_refused_with_both_figures() {
    let _turn = my_turn();
    let given = ["--prefill-ranks", "3", "--decode-ranks", "3", "--kv-heads", "4"];
    let (code, _, err) = run(&[&["demo", "--json", "--requests", "1"][..], &given].concat());
    assert_eq!(code, 2, "{err}");
    assert!(err.contains('3') && err.contains('4') && err.contains("worker"), "{err}");
}
