//! What a demo's outcome says, as text and as JSON, and when it is good.

use super::*;

fn row(ending: Ending, reference: &[u32]) -> Row {
    let wish = Wish {
        id: "r".into(),
        prompt: "abc".into(),
        since: vec![],
        more: vec![],
        params: Value::Null,
        max_tokens: 2,
        abort: AbortMode::None,
        handshake_port: None,
    };
    Row { wish, reference: Some(reference.to_vec()), seen: Seen { ending, first_token: None } }
}

fn answered(tokens: &[u32]) -> Ending {
    answered_with(tokens, 3)
}

fn answered_with(tokens: &[u32], external: u32) -> Ending {
    let usage = json!({ "prompt_tokens": 3, "prompt_tokens_details": { "external_tokens": external } });
    Ending::Answered { tokens: tokens.to_vec(), usage, params: Value::Null }
}

fn figures(held: u64) -> Figures {
    let value = json!({ "blocks_held": held, "connector": { "leases": { "granted": 1 } } });
    Figures { producer: Some(value.clone()), consumer: value, former: Vec::new(), ended: Vec::new() }
}

fn outcome(rows: Vec<Row>, figures: Figures) -> Outcome {
    Outcome::new(rows, figures, FaultMode::None, Policy::Recompute, Shapes::usual())
}

#[test]
fn shapes_are_told_where_they_are_not_the_usual_ones() {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        demo: super::super::DemoArgs,
    }
    let of = |arguments: &str| {
        let line = ["kvx"].into_iter().chain(arguments.split_whitespace());
        <Line as clap::Parser>::parse_from(line).demo.shapes()
    };
    let first_line = |shapes| {
        let text = Outcome::new(vec![], figures(0), FaultMode::None, Policy::Recompute, shapes).text(false);
        text.lines().next().map(str::to_owned).unwrap()
    };
    for usual in ["", "--kv-heads 4", "--requests 2", "--model DIR"] {
        assert!(!first_line(of(usual)).contains("shapes"), "{usual}");
    }
    let uneven = of("--prefill-ranks 2 --prefill-layout nhd-apart --decode-block 32 --model-kind hybrid");
    assert_eq!(
        first_line(uneven),
        "shapes    P: 2 ranks, nhd-apart, blocks of 16 tokens; D: 1 rank, hnd, blocks of 32 tokens; hybrid model of 4 \
         KV heads"
    );
    assert_eq!(
        uneven.json(),
        json!({
            "producer": { "ranks": 2, "layout": "nhd-apart", "block_tokens": 16 },
            "consumer": { "ranks": 1, "layout": "hnd", "block_tokens": 32 },
            "model_kind": "hybrid",
            "kv_heads": 4,
        })
    );
    assert!(first_line(of("--kv-heads 8")).ends_with("gqa model of 8 KV heads"));
    let own = of("--model DIR --decode-ranks 2");
    assert!(first_line(own).ends_with("blocks of 16 tokens"));
    assert_eq!((&own.json()["model_kind"], &own.json()["kv_heads"]), (&Value::Null, &Value::Null));
}

#[test]
fn under_a_fault_clean_errors_are_good_by_policy_and_a_fault_that_missed_is_not() {
    let failed = |reason: &str| {
        let consumer = json!({ "blocks_held": 0, "connector": { "loads": { "failed": { reason: 2 } } } });
        Figures { producer: None, consumer: consumer.clone(), former: vec![consumer], ended: Vec::new() }
    };
    let rows = || {
        let error = Ending::Error("the KV cache of the prompt could not be loaded: gone".into());
        vec![row(answered(&[1]), &[1]), row(error, &[1]), row(Ending::NotPrefilled("x".into()), &[1])]
    };
    let judge =
        |rows, figures, policy| Outcome::new(rows, figures, FaultMode::KillPrefill, policy, Shapes::usual());
    let good = judge(rows(), failed("peer_lost"), Policy::Fail);
    assert!(good.is_good());
    assert_eq!(good.json()["reasons"], json!({ "peer_lost": 4 }), "over all lives of D");
    assert_eq!(good.json()["blocks_held"], json!({ "producer": 0, "consumer": 0 }));
    assert!(!judge(rows(), failed("peer_lost"), Policy::Recompute).is_good(), "it was to be computed");
    let other = vec![row(answered(&[1]), &[1]), row(Ending::Error("x".into()), &[1])];
    assert!(!judge(other, failed("peer_lost"), Policy::Fail).is_good(), "some other error");
    let missed = Figures { producer: None, ..figures(0) };
    assert!(!judge(vec![row(answered(&[1]), &[1])], missed, Policy::Recompute).is_good());
}

#[test]
fn only_equal_answers_and_free_blocks_are_good() {
    let good = |rows: Vec<Row>, held| outcome(rows, figures(held)).is_good();
    assert!(good(vec![row(answered(&[1, 2]), &[1, 2])], 0));
    assert!(!good(vec![row(answered_with(&[1, 2], 0), &[1, 2])], 0), "nothing was handed over");
    assert!(!good(vec![row(answered(&[1, 3]), &[1, 2])], 0), "wrong");
    assert!(!good(vec![row(answered(&[1, 2]), &[1, 2])], 1), "held");
    assert!(!good(vec![row(answered(&[1, 2]), &[1, 2]), row(Ending::Hung, &[1, 2])], 0), "hung");
    assert!(!good(vec![row(Ending::NotPrefilled("x".into()), &[1])], 0), "not prefilled");
    assert!(!good(vec![row(Ending::Aborted, &[1])], 0), "nothing but aborts shows nothing");
    assert!(good(vec![row(answered(&[1]), &[1]), row(Ending::Aborted, &[1])], 0));
    let silent = Figures { producer: Some(Value::Null), consumer: Value::Null, ..figures(0) };
    assert!(!outcome(vec![row(answered(&[1]), &[1])], silent).is_good(), "an engine that is gone");
}

#[test]
fn every_request_is_counted_once() {
    let rows = vec![
        row(answered(&[1]), &[1]),
        row(answered(&[2]), &[1]),
        row(Ending::Aborted, &[1]),
        row(Ending::NotPrefilled("x".into()), &[1]),
        row(Ending::Error("x".into()), &[1]),
        row(Ending::Hung, &[1]),
    ];
    let json = outcome(rows, figures(0)).json();
    assert_eq!(json["requests"], 4);
    for key in ["equal", "wrong", "aborted", "not_prefilled", "errors", "hung"] {
        assert_eq!(json[key], 1, "{key}");
    }
    assert_eq!((&json["prompt_tokens"], &json["external_tokens"]), (&json!(6), &json!(6)));
}
