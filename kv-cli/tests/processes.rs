//! How the processes of an engine begin and end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use std::time::{Duration, Instant};

use common::proc::{children, is_alive, kill};
use common::{LIMIT, Server, block_on, my_turn, prompt, run, wait};
use serde_json::{Value, json};

fn assert_all_end(pids: &[u32]) {
    let until = Instant::now() + LIMIT;
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < until, "of {pids:?} some live on");
        // The end of another's child can only be looked for.
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_address_in_use_is_named_and_costs_exit_code_2() {
    let _turn = my_turn();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for arguments in [
        vec!["serve", "--alone", "--http", &address],
        vec!["route", "--http", &address, "--prefill", "http://x", "--decode", "http://y"],
    ] {
        let (code, out, err) = run(&arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains(&address) && err.contains("--http") && err.contains("in use"), "{err}");
    }
    // The handshake's port too, and the workers that were started already end with the engine.
    let port = taken.local_addr().unwrap().port();
    let (code, out, err) =
        run(&["serve", "--connector", &json!({ "handshake_port": port }).to_string(), "--ranks", "2"]);
    assert_eq!((code, out.as_str()), (2, ""), "{err}");
    assert!(err.contains(&port.to_string()), "{err}");
}

#[test]
fn options_that_make_no_engine_are_refused_by_name() {
    let _turn = my_turn();
    for (arguments, words) in [
        (["--ranks", "0"], ["ranks is 0", "at least 1"]),
        (["--block-tokens", "0"], ["block_tokens is 0", "at least 1"]),
        (["--kv-blocks", "0"], ["blocks is 0", "at least 1"]),
        (["--step-tokens", "0"], ["step_tokens is 0", "at least 1"]),
        (["--policy", "pray"], ["pray", "recompute, fail and retry are known"]),
        (["--connector", "{\"lease\": 1}"], ["lease", "lease_ttl_ms"]),
        (["--http", "nowhere"], ["nowhere", "--http"]),
        (["--model", "no/such/model"], ["no/such/model", "worker 0 did not start"]),
    ] {
        let (code, out, err) = run(&[&["serve"], &arguments[..]].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        for word in words {
            assert!(err.contains(word), "{word:?} is missing for {arguments:?}: {err}");
        }
    }
}

#[test]
fn an_engine_ends_with_its_parent_and_takes_its_workers_along() {
    let _turn = my_turn();
    let mut engine = Server::connected("e", &["--ranks", "2"]);
    let workers = children(engine.child.id());
    assert_eq!(workers.len(), 2);
    let status = engine.end().expect("it ends by itself");
    assert_eq!(status.code(), Some(0), "{}", engine.said());
    assert_all_end(&workers);
}

#[test]
fn workers_end_when_their_engine_is_killed() {
    let _turn = my_turn();
    let mut engine = Server::connected("e", &["--ranks", "2"]);
    let workers = children(engine.child.id());
    assert_eq!(workers.len(), 2);
    engine.child.kill().unwrap();
    engine.child.wait().unwrap();
    assert_all_end(&workers);
}

#[test]
fn an_engine_whose_worker_is_killed_ends_with_a_reason() {
    let _turn = my_turn();
    for victim in 0..2 {
        let mut engine = Server::connected("e", &["--ranks", "2"]);
        let workers = children(engine.child.id());
        assert_eq!(workers.len(), 2);
        let answer = block_on(async {
            // One request is under way, and gets an end as well.
            let prompt = prompt(0, 100);
            let ask = engine.ask("r", &prompt, 8000, &Value::Null);
            let kill = async {
                while engine.stats().await["steps"].as_u64().unwrap() < 5 {}
                kill(workers[victim]);
            };
            tokio::join!(ask, kill).0
        });
        assert_eq!(answer.0, 503, "{}", answer.1);
        let status = wait(&mut engine.child, Duration::from_secs(20)).expect("it ends by itself");
        assert_eq!(status.code(), Some(2));
        let until = Instant::now() + LIMIT;
        while !engine.said().contains("kvx: engine: worker ") {
            assert!(Instant::now() < until, "{}", engine.said());
            std::thread::yield_now();
        }
        assert_all_end(&workers);
    }
}
