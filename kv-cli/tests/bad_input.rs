//! What clients, routers and strangers can send to real engines: it costs that request or that connection an error
//! with a reason, and nobody else anything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use std::io::Write;
use std::net::TcpStream;

use common::proc::{children, listening};
use common::{Server, block_on, my_turn, prompt, reference, refusal, tokens};
use serde_json::{Value, json};

/// P and D with short limits.
fn pair() -> (Server, Server) {
    (Server::connected("p", &[]), Server::connected("d", &[]))
}

/// After whatever happened: a hand-over works, and nothing is held.
async fn assert_well(p: &Server, d: &Server) {
    // Another prompt each time, so that nothing of it is cached.
    let prompt = prompt(77 + p.stats().await["requests"].as_u64().unwrap() as u32, 45);
    let params = p.prefill("well", &prompt).await;
    let (status, answer) = d.ask("well", &prompt, 6, &params).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(tokens(&answer), reference(&prompt, 6));
    assert_eq!(answer["usage"]["prompt_tokens_details"]["external_tokens"], 45, "{answer}");
    for engine in [p, d] {
        let stats = engine.settled().await;
        assert_eq!(stats["connector"]["holds"], 0, "{stats}");
        assert_eq!(stats["workers"]["pulls"], 0, "{stats}");
    }
}

/// What is changed in sound parameters, and the words that the refusal must have.
type Case = (fn(&mut Value), &'static [&'static str]);

#[test]
fn transfer_params_that_cannot_be_are_refused_by_field_and_values() {
    let _turn = my_turn();
    let (p, d) = pair();
    let cases: &[Case] = &[
        (|v| *v = json!([1]), &["kv_transfer_params must be an object, got a list"]),
        (|v| *v = json!("x"), &["kv_transfer_params must be an object, got a string"]),
        (|v| *v = json!(true), &["kv_transfer_params must be an object, got a boolean"]),
        (|v| v["do_remote_prefill"] = json!("yes"), &["do_remote_prefill must be a boolean, got \"yes\""]),
        (|v| v["remote_engine_id"] = json!(null), &["remote_engine_id is missing"]),
        (|v| v["remote_engine_id"] = json!(7), &["remote_engine_id must be a string, got 7"]),
        (|v| v["remote_engine_id"] = json!("x".repeat(300)), &["engine_id is 300 bytes long, at most"]),
        (|v| v["remote_request_id"] = json!("x".repeat(10_240)), &["request_id is 10240 bytes", "1024"]),
        (|v| v["remote_host"] = json!(""), &["remote_host is missing"]),
        (|v| v["remote_host"] = json!("h".repeat(256)), &["remote_host has 256 items, at most 255"]),
        (|v| v["remote_port"] = json!("5600"), &["remote_port must be a whole number, got \"5600\""]),
        (|v| v["remote_port"] = json!(0), &["remote_port is 0; 1 to 65535 are allowed"]),
        (|v| v["remote_port"] = json!(70000), &["remote_port is 70000; 1 to 65535 are allowed"]),
        (|v| v["remote_port"] = json!(1.5), &["remote_port must be a whole number, got 1.5"]),
        (|v| v["tp_size"] = json!(0), &["tp_size is 0; 1 to 65535 are allowed"]),
        (|v| v["remote_block_ids"] = json!({"a": 1}), &["remote_block_ids must be a list", "{\"a\":1}"]),
        (|v| v["remote_block_ids"] = json!([["x"]]), &["remote_block_ids must be", "got \"x\""]),
        (|v| v["remote_block_ids"] = json!([[0, -2, 1]]), &["remote_block_ids is -2; 0 to 4294967294"]),
        (
            |v| v["remote_block_ids"] = json!([[4]]),
            &["remote_block_ids says 1 blocks, but kv_connector.blocks says 3"],
        ),
        (|v| v["kv_connector"] = json!(null), &["kv_connector is missing"]),
        (|v| v["kv_connector"] = json!("x"), &["kv_connector must be an object, got \"x\""]),
        (|v| v["kv_connector"]["version"] = json!(2), &["kv_connector.version is 2; 1 to 1 are allowed"]),
        (|v| v["kv_connector"]["tokens"] = json!(49), &["says 40, but kv_connector.tokens says 49"]),
        (
            |v| v["kv_connector"]["block_tokens"] = json!(8),
            &["kv_connector.tokens says 40 (in 5 blocks of 8), but kv_connector.blocks says 3"],
        ),
        (|v| v["kv_connector"]["blocks"] = json!(-1), &["kv_connector.blocks is -1; 0 to "]),
        (
            |v| v["kv_connector"]["incarnation"] = json!("xyz"),
            &["kv_connector.incarnation must be 16 lower-case hexadecimal digits, got \"xyz\""],
        ),
        (
            |v| v["kv_connector"]["lease"] = json!(null),
            &["kv_connector.lease says none, but kv_connector.blocks says 3"],
        ),
        (|v| v["kv_connector"]["lease"] = json!("7"), &["kv_connector.lease must be a whole number"]),
        (
            |v| v["kv_connector"]["token_digest"] = json!("0".repeat(200)),
            &["kv_connector.token_digest has 200 items, at most 128"],
        ),
    ];
    block_on(async {
        let prompt = prompt(0, 40);
        let good = p.prefill("r", &prompt).await;
        for (change, words) in cases {
            let mut params = good.clone();
            change(&mut params);
            let text = refusal(d.ask("r", &prompt, 4, &params).await);
            assert!(text.starts_with("kv_transfer_params: "), "{text}");
            for word in *words {
                assert!(text.contains(word), "{word:?} is missing: {text}");
            }
        }
        let stats = d.stats().await;
        assert_eq!((&stats["requests"], &stats["blocks_held"]), (&json!(0), &json!(0)), "{stats}");
        // The lease is untouched by all of this, unless it has run out meanwhile; the answer is right either way.
        let (status, answer) = d.ask("r", &prompt, 4, &good).await;
        assert_eq!((status, tokens(&answer)), (200, reference(&prompt, 4)), "{answer}");
        assert_well(&p, &d).await;
    });
}

#[test]
fn an_offer_that_does_not_fit_the_request_is_refused_with_both_values_and_given_back() {
    let _turn = my_turn();
    let (p, d) = pair();
    let other_groups = Server::connected("d-hybrid", &["--model-kind", "hybrid"]);
    block_on(async {
        let long = prompt(0, 40);
        let mut changed = long.clone();
        changed[3] += 1;
        let digest = "digest of the first 40 tokens is ";
        let cases: [(&Server, &[u32], u32, &[&str]); 4] = [
            (&other_groups, &long, 4, &["block groups: ours 2, theirs 1"]),
            (&d, &changed[..30], 4, &["the offer covers 40 tokens, the prompt has 30"]),
            (&d, &changed, 4, &["another prompt", digest, " here, ", " there"]),
            (&d, &long, 9000, &["make 9040 tokens, at most 8192 are allowed"]),
        ];
        for (number, (engine, prompt, count, words)) in cases.into_iter().enumerate() {
            let params = p.prefill("r", &long).await;
            let text = refusal(engine.ask("r", prompt, count, &params).await);
            for word in words {
                assert!(text.contains(word), "{word:?} is missing: {text}");
            }
            let leases = p.settled().await["connector"]["leases"].clone();
            // An engine of another model is refused by P, so that it cannot say anything; there the lease runs out.
            assert_eq!((&leases["released"], &leases["expired"]), (&json!(number), &json!(1)), "{leases}");
        }
        // A prompt that was only made shorter has its beginning in the offer.
        let params = p.prefill("r", &long).await;
        let (status, answer) = d.ask("r", &long[..30], 4, &params).await;
        assert_eq!((status, tokens(&answer)), (200, reference(&long[..30], 4)));
        assert_well(&p, &d).await;
    });
}

#[test]
fn any_text_is_a_request_id_as_long_as_it_is_short_enough() {
    let _turn = my_turn();
    let (p, d) = pair();
    block_on(async {
        let prompt = prompt(1, 20);
        let ids: [&[u8]; 6] = [
            b"a,b;c",
            b"with some spaces",
            b"%C3%BC%00",
            "gr\u{fc}\u{df}e".as_bytes(),
            b"\xff\xfe",
            &[b'x'; 1024],
        ];
        for id in ids {
            let ask = |count, params: &Value| {
                json!({ "prompt": prompt, "max_tokens": count, "kv_transfer_params": params }).to_string()
            };
            let (status, answer) = p.post(id, ask(1, &json!({ "do_remote_decode": true }))).await;
            assert_eq!(status, 200, "{answer}");
            let (status, answer) = d.post(id, ask(5, &answer["kv_transfer_params"])).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(answer["id"], String::from_utf8_lossy(id).into_owned());
            assert_eq!(tokens(&answer), reference(&prompt, 5));
        }
        let body = json!({ "prompt": [1, 2] }).to_string();
        let text = refusal(d.post(&[b'x'; 10_240], body.clone()).await);
        assert!(text.contains("10240 bytes") && text.contains("1024"), "{text}");
        refusal(d.post(b"", body).await);
        assert_well(&p, &d).await;
    });
}

#[test]
fn bodies_that_cannot_be_are_refused_by_field() {
    let _turn = my_turn();
    let (p, d) = pair();
    let cases = [
        ("", "EOF"),
        ("{\"prompt\": [1, 2}", "line 1 column 17"),
        ("{\"prompt\": \"a\"} {}", "trailing characters"),
        ("[1, 2]", "prompt"),
        ("\"text\"", "invalid type: string"),
        ("7", "invalid type: integer `7`"),
        ("null", "invalid type: null"),
        ("{}", "missing field `prompt`"),
        ("{\"prompt\": {}}", "prompt: a prompt must be a text or a list of token ids"),
        ("{\"prompt\": [1, -2]}", "prompt: a prompt must be a text or a list of token ids"),
        ("{\"prompt\": []}", "prompt is empty"),
        ("{\"prompt\": \"\"}", "prompt is empty"),
        ("{\"prompt\": [1, 257]}", "token 257 is beyond the vocabulary of 257"),
        ("{\"prompt\": \"a\", \"n\": 2}", "n is 2; only 1 is supported"),
        ("{\"prompt\": \"a\", \"n\": 0}", "n is 0; only 1 is supported"),
        ("{\"prompt\": \"a\", \"max_tokens\": 0}", "max_tokens is 0"),
        ("{\"prompt\": \"a\", \"max_tokens\": -1}", "max_tokens: invalid value: integer `-1`"),
        ("{\"prompt\": \"a\", \"max_tokens\": \"9\"}", "max_tokens: invalid type: string \"9\""),
        ("{\"prompt\": \"a\", \"max_tokens\": 8192}", "make 8193 tokens, at most 8192 are allowed"),
        ("{\"prompt\": \"a\", \"max_tokens\": 4294967295}", "make 4294967296 tokens, at most 8192"),
        (
            "{\"prompt\": \"a\", \"max_tokens\": 4294967296}",
            "max_tokens: invalid value: integer `4294967296`",
        ),
        ("{\"prompt\": \"a\", \"stream\": 1}", "stream: invalid type: integer `1`"),
    ];
    block_on(async {
        for (body, words) in cases {
            let text = refusal(d.post(b"r", body.to_owned()).await);
            assert!(text.contains(words), "{words:?} is missing for {body}: {text}");
        }
        let nested = format!("{{\"prompt\": \"a\", \"kv_transfer_params\": {}", "[".repeat(100_000));
        let text = refusal(d.post(b"r", nested).await);
        assert!(text.contains("recursion limit"), "{text}");
        assert_well(&p, &d).await;
    });
}

/// Opens a stream of tokens and waits for its first.
async fn stream(engine: &Server, id: &str, prompt: &[u32], count: u32) -> reqwest::Response {
    let body = json!({ "prompt": prompt, "max_tokens": count, "stream": true, "ignore_eos": true });
    let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
    let url = format!("{}/v1/completions", engine.url);
    let mut answer = client.post(url).header("x-request-id", id).json(&body).send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 200);
    while !String::from_utf8_lossy(&answer.chunk().await.unwrap().unwrap()).contains("token_ids") {}
    answer
}

#[test]
fn one_name_is_one_request_at_a_time() {
    let _turn = my_turn();
    let (p, d) = pair();
    block_on(async {
        let long = prompt(2, 10);
        let short = prompt(3, 12);
        for round in 0..5 {
            let first = stream(&d, "same", &long, 8000).await;
            let text = refusal(d.ask("same", &short, 3, &Value::Null).await);
            assert_eq!(text, "request same is already here");
            drop(first);
            // The client comes back under the same name. Once it is accepted, the word that the first client went
            // away must not end it.
            let answer = loop {
                let (status, answer) = d.ask("same", &short, 3, &Value::Null).await;
                if status == 200 {
                    break answer;
                }
                assert_eq!(answer["error"]["message"], "request same is already here", "round {round}");
            };
            assert_eq!(tokens(&answer), reference(&short, 3));
        }
        assert_eq!(d.settled().await["aborted"], 5);
        assert_well(&p, &d).await;
    });
}

#[test]
fn an_abort_from_elsewhere_ends_the_answer_with_a_reason() {
    let _turn = my_turn();
    let (p, d) = pair();
    block_on(async {
        let mut answer = stream(&d, "mine", &prompt(2, 10), 8000).await;
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let abort = |id: &str| {
            let body = json!({ "request_id": id });
            client.post(format!("{}/abort", d.url)).json(&body).send()
        };
        assert_eq!(abort("another").await.unwrap().status().as_u16(), 200);
        assert_eq!(abort("mine").await.unwrap().status().as_u16(), 200);
        let mut rest = String::new();
        let all = async {
            while let Some(part) = answer.chunk().await.unwrap() {
                rest.push_str(&String::from_utf8_lossy(&part));
            }
        };
        tokio::time::timeout(common::LIMIT, all).await.expect("the stream ends");
        assert!(rest.contains("the request was aborted"), "{rest}");
        let stats = d.settled().await;
        assert_eq!((&stats["aborted"], &stats["stray_aborts"]), (&json!(1), &json!(1)));
        assert_eq!(abort(&"x".repeat(2000)).await.unwrap().status().as_u16(), 400);
        assert_well(&p, &d).await;
    });
}

#[test]
fn params_that_lead_nowhere_cost_a_recomputation_and_nothing_else() {
    let _turn = my_turn();
    let (p, d) = pair();
    let other_model = Server::connected("other", &["--seed", "8"]);
    let alone = Server::connected("stranger", &[]);
    block_on(async {
        // A port that was somebody's a moment ago.
        let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let stranger = alone.handshake_port;
        let http: u16 = d.url.rsplit(':').next().unwrap().parse().unwrap();
        for (number, (name, port)) in [
            ("a dead port", dead),
            ("an HTTP port", http),
            ("another engine", stranger),
            ("the right port, a wrong engine id", 0),
            ("the right port, another life", 0),
            ("a host that does not resolve", 0),
            ("blocks that P does not have", 0),
            ("a lease that P never granted", 0),
        ]
        .into_iter()
        .enumerate()
        {
            let prompt = prompt(number as u32, 40);
            let mut params = p.prefill("r", &prompt).await;
            match name {
                "the right port, a wrong engine id" => params["remote_engine_id"] = json!("q"),
                "the right port, another life" => {
                    params["kv_connector"]["incarnation"] = json!("0123456789abcdef");
                }
                "a host that does not resolve" => params["remote_host"] = json!("no-such-host.invalid"),
                "blocks that P does not have" => params["remote_block_ids"] = json!([[9000, 9001, 9002]]),
                "a lease that P never granted" => params["kv_connector"]["lease"] = json!(987_654),
                _ => params["remote_port"] = json!(port),
            }
            let (status, answer) = d.ask("r", &prompt, 5, &params).await;
            assert_eq!(status, 200, "{name}: {answer}");
            assert_eq!(tokens(&answer), reference(&prompt, 5), "{name}");
            assert_eq!(answer["usage"]["prompt_tokens_details"]["external_tokens"], 0, "{name}: {answer}");
        }
        // Another model's KV would be the wrong bytes of the right shape.
        let prompt = prompt(50, 40);
        let params = other_model.prefill("r", &prompt).await;
        let (status, answer) = d.ask("r", &prompt, 5, &params).await;
        assert_eq!((status, tokens(&answer)), (200, reference(&prompt, 5)), "{answer}");
        let failed = &d.stats().await["connector"]["loads"]["failed"];
        let total: u64 = failed.as_object().unwrap().values().filter_map(Value::as_u64).sum();
        assert_eq!(total, 9, "{failed}");
        other_model.settled().await;
        assert_well(&p, &d).await;
    });
}

#[test]
fn garbage_on_an_engines_ports_disturbs_nobody() {
    let _turn = my_turn();
    let (p, d) = pair();
    let workers = children(p.child.id());
    assert_eq!(workers.len(), 1);
    let ports = listening(workers[0]);
    assert_eq!(ports.len(), 1, "the worker listens for peers");
    // What strangers say first: nothing, another protocol, a long frame's beginning, noise, a port scanner's bytes.
    let noise: Vec<u8> = prompt(5, 5000).into_iter().map(|b| b as u8).collect();
    let sayings: [&[u8]; 6] = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        &[0xff; 64],
        &noise,
        &[0; 4096],
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03",
    ];
    block_on(async {
        let mut open = Vec::new();
        for (number, saying) in sayings.iter().enumerate() {
            for port in [p.handshake_port, ports[0]] {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                // The engine may hang up while we still speak.
                let _ = stream.write_all(saying);
                // Some go away at once, some stay and say nothing more.
                if number % 2 == 0 {
                    open.push(stream);
                }
            }
            let prompt = prompt(number as u32, 30 + number);
            let params = p.prefill("r", &prompt).await;
            let (status, answer) = d.ask("r", &prompt, 5, &params).await;
            assert_eq!((status, tokens(&answer)), (200, reference(&prompt, 5)), "{answer}");
            let external = &answer["usage"]["prompt_tokens_details"]["external_tokens"];
            assert_eq!(*external, prompt.len(), "{answer}");
        }
        assert_well(&p, &d).await;
        drop(open);
        assert_well(&p, &d).await;
    });
}
