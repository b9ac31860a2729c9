//! `kvx bench` end to end, with sizes so small that only its correctness is looked at: no time is judged here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use std::process::{Command, Stdio};

use common::run as kvx;
use serde_json::Value;

/// Small enough for any machine.
const TINY: [&str; 8] =
    ["--pool-bytes", "8m", "--total-bytes", "1m", "--block-bytes", "4k,64k", "--rounds", "1"];

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

fn positive(value: &Value) {
    assert!(value.as_f64().unwrap() > 0.0, "{value}");
}

#[test]
fn the_lane_is_that_of_the_end() {
    let args = [
        "bench",
        "--block-bytes",
        "64k",
        "--total-bytes",
        "4m",
        "--pool-bytes",
        "16m",
        "--rounds",
        "1",
        "--json",
    ];
    let (code, out, err) = kvx(&[&args[..], &["--connections", "2"]].concat());
    assert_eq!(code, 0, "{err}");
    let whole: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(whole["rows"][0]["lane"], "2 connections");
}

#[test]
fn the_json_has_exactly_the_promised_fields() {
    let peers = ["--peers", "3", "--peer-seconds", "1", "--inflight", "2", "--connections", "1", "--json"];
    let (code, out, err) = kvx(&[&["bench"], &TINY[..], &peers].concat());
    assert_eq!(code, 0, "{err}");
    let all: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    let rows = all["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, block_bytes) in rows.iter().zip([4096, 65536]) {
        assert_eq!(
            keys(row),
            [
                "block_bytes",
                "cpu_s_per_gb",
                "gbps",
                "idle_cores",
                "lane",
                "latency_us",
                "memcpy_gbps",
                "plain_tcp_gbps",
                "ratio_memcpy",
                "ratio_plain_tcp",
                "total_bytes",
                "transport",
            ]
        );
        assert_eq!((row["transport"].as_str(), row["lane"].as_str()), (Some("tcp"), Some("tcp")));
        assert_eq!(
            (row["block_bytes"].as_u64(), row["total_bytes"].as_u64()),
            (Some(block_bytes), Some(1 << 20))
        );
        assert_eq!(keys(&row["gbps"]), ["max", "median", "min"]);
        assert_eq!(keys(&row["cpu_s_per_gb"]), ["consumer", "producer"]);
        assert_eq!(keys(&row["latency_us"]), ["1x4k", "64x32k"]);
        for small in ["1x4k", "64x32k"] {
            assert_eq!(keys(&row["latency_us"][small]), ["p50", "p99"]);
            positive(&row["latency_us"][small]["p50"]);
        }
        for name in ["memcpy_gbps", "plain_tcp_gbps", "ratio_memcpy", "ratio_plain_tcp"] {
            positive(&row[name]);
        }
        positive(&row["gbps"]["median"]);
        assert!(row["idle_cores"].as_f64().unwrap() >= 0.0);
    }
    assert_eq!(all["beside"].as_array().unwrap().len(), 2);
    let many = all["peers"].as_array().unwrap();
    assert_eq!(many.len(), 2);
    for row in many {
        assert_eq!(row["peers"], 3);
        positive(&row["slowest_gbps"]);
        assert!(row["slowest_gbps"].as_f64() <= row["mean_gbps"].as_f64());
        assert!(row["mean_gbps"].as_f64() <= row["fastest_gbps"].as_f64());
        assert!(row["producer_peak_bytes"].as_u64() > row["producer_pool_bytes"].as_u64());
        assert_eq!(
            keys(row),
            [
                "block_bytes",
                "fastest_gbps",
                "mean_gbps",
                "peers",
                "producer_idle_cores",
                "producer_peak_bytes",
                "producer_peak_of_row",
                "producer_pool_bytes",
                "ratio_slowest_mean",
                "slowest_gbps",
                "sum_gbps",
                "transfer_bytes",
                "transport",
            ]
        );
    }
}

#[test]
fn what_ucx_logs_to_standard_output_is_no_answer() {
    let output = Command::new(env!("CARGO_BIN_EXE_kvx"))
        .args([&["bench", "--transport", "ucx", "--json"], &TINY[..]].concat())
        .env("UCX_LOG_LEVEL", "debug")
        .env("UCX_TLS", "tcp,self")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    if output.status.code() == Some(2) && err.contains("libucp") {
        // Without the library there is nobody who logs; the bench says that this is why.
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(err.contains("UCX  DEBUG"), "it logged nothing that could be taken for an answer: {err}");
    let all: Value = serde_json::from_str(out.trim_end()).unwrap();
    assert_eq!(all["rows"].as_array().unwrap().len(), 2);
}

#[test]
fn tables_are_plain_text_when_nobody_looks() {
    let (code, out, err) = kvx(&[&["bench"], &TINY[..]].concat());
    assert_eq!(code, 0, "{err}");
    for word in ["memcpy", "plain TCP", "tcp", "64 KiB", "1 x 4 KiB p50", "idle cores", "beside"] {
        assert!(out.contains(word), "{word}: {out}");
    }
    assert!(!out.contains('\u{1b}'), "colours are for terminals: {out}");
    assert_eq!(err, "");
}

#[test]
fn rows_of_the_harness_are_verified_and_named_as_asked() {
    let (code, out, err) = kvx(&[
        "bench",
        "--peers-row",
        "--transport",
        "tcp",
        "--pool-bytes",
        "16m",
        "--config",
        "ours",
        "--shapes",
        "small-1x4k,small-64x32k",
        "--seed",
        "7",
        "--verify",
        "1",
    ]);
    assert_eq!(code, 0, "{err}");
    let rows: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    for (row, (shape, bytes)) in rows.iter().zip([("small-1x4k", 4096), ("small-64x32k", 2 << 20)]) {
        assert_eq!((row["config"].as_str(), row["shape"].as_str()), (Some("ours"), Some(shape)));
        assert_eq!((row["bytes"].as_u64(), row["verified"].as_bool()), (Some(bytes), Some(true)), "{row}");
        for name in ["med_s", "p99_s", "min_s", "max_s", "gbps", "cpu_init_s_per_gb", "cpu_tgt_s_per_gb"] {
            positive(&row[name]);
        }
    }
}

#[test]
fn a_hundred_thousand_blocks_in_one_read_arrive() {
    let (code, out, err) = kvx(&[
        "bench",
        "--pool-bytes",
        "64m",
        "--block-bytes",
        "512",
        "--blocks",
        "100000",
        "--rounds",
        "1",
        "--json",
    ]);
    assert_eq!(code, 0, "{err}");
    let all: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(all["rows"][0]["total_bytes"], 51_200_000);
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_reason() {
    let cases: [(&[&str], &str); 13] = [
        (&["--transport", "pigeon"], "pigeon"),
        (&["--transport", "tcp,"], "transport"),
        (&["--block-bytes", "0"], "zero bytes"),
        (&["--block-bytes", "12"], "multiple of 8"),
        (&["--block-bytes", "64k", "--total-bytes", "1g"], "pool"),
        (&["--block-bytes", "64k", "--total-bytes", "4k"], "so few bytes"),
        (&["--blocks", "18446744073709551615"], "pool"),
        (&["--blocks", "1", "--total-bytes", "1m"], "cannot be used with"),
        // Half of it would not hold 64 blocks of 32 KiB.
        (&["--pool-bytes", "3m", "--total-bytes", "1m", "--rounds", "1"], "--pool-bytes 3145728"),
        (&["--rounds", "0"], "--rounds 0"),
        (&["--peers", "100000"], "--peers 100000"),
        (&["--peers-row", "--config", "x", "--shapes", "round"], "bulk-64k"),
        (&["--peers-row"], "--config"),
    ];
    for (arguments, why) in cases {
        let (code, out, err) = kvx(&[&["bench"], arguments].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains(why) && !err.contains("panicked"), "{arguments:?}: {err}");
    }
}

#[test]
fn a_side_that_hears_nonsense_says_so() {
    use std::io::Write;
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvx"))
        .arg("bench-side")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"\"Used\"\n{\"Nonsense\":1}\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stdout).unwrap().contains("cpu_s"));
    assert!(String::from_utf8(output.stderr).unwrap().contains("understand a question"));
}
