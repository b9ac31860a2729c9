//! A router that has two prefill engines compute every prompt, and one of them is killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use common::proc::{children, is_alive};
use common::{LIMIT, Server, block_on, my_turn, prompt, reference, tokens};
use serde_json::{Value, json};

async fn gate(router: &Server, body: Option<Value>) -> Value {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{}/demo/gate", router.url);
    let ask = match body {
        Some(body) => client.post(url).body(body.to_string()),
        None => client.get(url),
    };
    let answer = ask.timeout(LIMIT).send().await.unwrap();
    answer.json().await.unwrap_or_default()
}

// H-29
#[test]
fn p8_a_prefill_engine_that_is_killed_costs_nothing_when_another_has_computed_the_same() {
    let _turn = my_turn();
    let mut first = Server::connected("p-1", &[]);
    let second = Server::connected("p-2", &[]);
    let d = Server::connected("d", &["--policy", "retry"]);
    let router =
        Server::route(&["--prefill", &first.url, "--second-prefill", &second.url, "--decode", &d.url]);
    block_on(async {
        let all_well = prompt(0, 60);
        let (status, answer) = router.ask("r0", &all_well, 6, &Value::Null).await;
        assert_eq!((status, tokens(&answer)), (200, reference(&all_well, 6)), "{answer}");
        let leases = second.settled().await["connector"]["leases"].clone();
        assert_eq!((&leases["released"], &leases["confirmed"]), (&json!(1), &json!(0)));

        gate(&router, Some(json!({ "shut": true }))).await;
        let struck = prompt(1, 100);
        let ask = router.ask("r1", &struck, 6, &Value::Null);
        let strike = async {
            while gate(&router, None).await["waiting"] != 1 {}
            let workers = children(first.child.id());
            first.child.kill().unwrap();
            first.child.wait().unwrap();
            // They notice, and end by themselves; until then they could be read from.
            while workers.iter().any(|pid| is_alive(*pid)) {}
            gate(&router, Some(json!({ "shut": false }))).await;
        };
        let ((status, answer), ()) = tokio::join!(ask, strike);
        assert_eq!((status, tokens(&answer)), (200, reference(&struck, 6)), "{answer}");
        let stats = d.settled().await;
        let leases = second.settled().await["connector"]["leases"].clone();
        assert_eq!(
            (&leases["released"], &leases["confirmed"]),
            (&json!(1), &json!(1)),
            "{stats}\n{}",
            d.said()
        );
        assert_eq!(stats["recovered"]["retried_elsewhere"], 1, "{stats}");
        assert_eq!(stats["recovered"]["tokens_recomputed"], 0, "{stats}");

        // With the first gone for good, the second alone is enough.
        let after = prompt(2, 40);
        let (status, answer) = router.ask("r2", &after, 6, &Value::Null).await;
        assert_eq!((status, tokens(&answer)), (200, reference(&after, 6)), "{answer}");
        assert_eq!(second.settled().await["connector"]["leases"]["confirmed"], 2);
    });
}

/// Stops a process, or lets it go on.
fn signal(pid: u32, name: &str) {
    let sent = std::process::Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(sent.success());
}

// H-29
#[test]
fn p4_a_prefill_engine_that_stands_still_keeps_nobody_waiting() {
    let _turn = my_turn();
    let first = Server::connected("p-1", &[]);
    let second = Server::connected("p-2", &[]);
    let d = Server::connected("d", &["--policy", "retry"]);
    let router =
        Server::route(&["--prefill", &first.url, "--second-prefill", &second.url, "--decode", &d.url]);
    block_on(async {
        signal(first.child.id(), "STOP");
        let struck = prompt(1, 100);
        let (status, answer) = router.ask("r1", &struck, 6, &Value::Null).await;
        signal(first.child.id(), "CONT");
        assert_eq!((status, tokens(&answer)), (200, reference(&struck, 6)), "{answer}");
        assert_eq!(second.settled().await["connector"]["leases"]["confirmed"], 1);
        assert_eq!(d.settled().await["connector"]["loads"]["loaded"], 1);
    });
}
