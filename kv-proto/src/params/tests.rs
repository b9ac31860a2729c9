//! What is read, what is refused, and with which words.

use serde_json::json;

use super::*;
use crate::ids::BlockId;

fn sample() -> RemotePrefill {
    RemotePrefill {
        engine: EngineId::new("p-0").unwrap(),
        request: RequestId::new("cmpl, 1 ü").unwrap(),
        host: "127.0.0.1".to_owned(),
        port: 5600,
        ranks: 1,
        tokens: 40,
        block_tokens: 16,
        blocks: vec![[4, 5, 9].into_iter().map(BlockId).collect()],
        firsts: vec![0],
        incarnation: Incarnation::from_random(7),
        lease: Some(LeaseId(3)),
        token_digest: token_digest(&[1, 2, 3]),
        marks: PrefixMarks::default(),
        alternatives: Vec::new(),
        other: Map::new(),
    }
}

/// What is changed in a sound value, and what the refusal says then.
type Case = (fn(&mut Value), &'static str);

fn refuse(change: impl FnOnce(&mut Value)) -> String {
    let mut value = TransferParams::RemotePrefill(Box::new(sample())).to_json();
    change(&mut value);
    TransferParams::parse(&value).unwrap_err().to_string()
}

#[test]
fn what_is_written_is_read_again_and_unknown_keys_survive() {
    let mut remote = sample();
    remote.other.insert("transfer_mode".to_owned(), json!("pull"));
    let params = TransferParams::RemotePrefill(Box::new(remote));
    assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
    let ask = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_host": null, "x": [1]});
    let Ok(Some(parsed)) = TransferParams::parse(&ask) else { panic!("refused") };
    assert_eq!(parsed.to_json(), ask);
}

#[test]
fn requests_without_a_hand_over_are_plain() {
    for value in [json!(null), json!({}), json!({"do_remote_prefill": false, "x": 1})] {
        assert_eq!(TransferParams::parse(&value), Ok(None));
    }
}

#[test]
fn a_flat_block_list_is_one_group() {
    let mut value = TransferParams::RemotePrefill(Box::new(sample())).to_json();
    value["remote_block_ids"] = json!([4, 5, 9]);
    let Ok(Some(TransferParams::RemotePrefill(remote))) = TransferParams::parse(&value) else {
        panic!("refused")
    };
    assert_eq!(remote.blocks, sample().blocks);
}

#[test]
fn every_missing_key_is_named() {
    for key in [
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "remote_block_ids",
        "kv_connector",
    ] {
        let text = refuse(|v| drop(v.as_object_mut().unwrap().remove(key)));
        assert_eq!(text, format!("{key} is missing"));
    }
    for key in ["version", "tokens", "block_tokens", "blocks", "token_digest", "incarnation"] {
        let text = refuse(|v| drop(v[EXTRA_KEY].as_object_mut().unwrap().remove(key)));
        assert_eq!(text, format!("kv_connector.{key} is missing"));
    }
}

#[test]
fn wrong_types_and_ranges_name_the_field_and_the_value() {
    let cases: [Case; 9] = [
        (|v| v["remote_port"] = json!("5600"), "remote_port must be a whole number, got \"5600\""),
        (|v| v["remote_port"] = json!(-1), "remote_port is -1; 1 to 65535 are allowed"),
        (|v| v["remote_port"] = json!(70000), "remote_port is 70000; 1 to 65535 are allowed"),
        (|v| v["remote_port"] = json!(1.5), "remote_port must be a whole number, got 1.5"),
        (|v| v["do_remote_prefill"] = json!("yes"), "do_remote_prefill must be a boolean, got \"yes\""),
        (
            |v| v["remote_block_ids"] = json!([[1, -2, 3]]),
            "remote_block_ids is -2; 0 to 4294967294 are allowed",
        ),
        (
            |v| v["remote_block_ids"] = json!({"a": 1}),
            "remote_block_ids must be a list of block ids, or one such list per group, got {\"a\":1}",
        ),
        (
            |v| v["remote_request_id"] = json!("x".repeat(10_240)),
            "remote_request_id: request_id is 10240 bytes long, at most 1024 are allowed",
        ),
        (
            |v| v[EXTRA_KEY]["incarnation"] = json!("xyz"),
            "kv_connector.incarnation must be 16 lower-case hexadecimal digits, got \"xyz\"",
        ),
    ];
    for (change, text) in cases {
        assert_eq!(refuse(change), text);
    }
    assert_eq!(
        TransferParams::parse(&json!([1])).unwrap_err().to_string(),
        "kv_transfer_params must be an object, got a list"
    );
}

#[test]
fn contradictions_name_both_fields_and_both_values() {
    let cases: [Case; 5] = [
        (
            |v| v["remote_block_ids"] = json!([[4, 5]]),
            "remote_block_ids says 2 blocks, but kv_connector.blocks says 3",
        ),
        (
            |v| v["remote_block_ids"] = json!([]),
            "remote_block_ids says no group, but kv_connector.blocks says 3",
        ),
        (
            |v| v[EXTRA_KEY]["tokens"] = json!(49),
            "remote_num_tokens says 40, but kv_connector.tokens says 49",
        ),
        (
            |v| {
                v[EXTRA_KEY]["tokens"] = json!(49);
                v["remote_num_tokens"] = json!(49);
            },
            "kv_connector.tokens says 49 (in 4 blocks of 16), but kv_connector.blocks says 3",
        ),
        (
            |v| drop(v[EXTRA_KEY].as_object_mut().unwrap().remove("lease")),
            "kv_connector.lease says none, but kv_connector.blocks says 3",
        ),
    ];
    for (change, text) in cases {
        assert_eq!(refuse(change), text);
    }
}

#[test]
fn an_offer_that_was_changed_on_the_way_has_another_digest() {
    let ours = sample().digest();
    assert_eq!(sample().digest(), ours);
    let changed = [
        RemotePrefill { blocks: vec![[4, 5, 8].into_iter().map(BlockId).collect()], ..sample() },
        RemotePrefill { blocks: vec![[5, 4, 9].into_iter().map(BlockId).collect()], ..sample() },
        RemotePrefill { token_digest: token_digest(&[1, 2, 4]), ..sample() },
        RemotePrefill { lease: Some(LeaseId(4)), ..sample() },
        RemotePrefill { incarnation: Incarnation::from_random(8), ..sample() },
        RemotePrefill { tokens: 41, ..sample() },
    ];
    for other in changed {
        assert_ne!(other.digest(), ours, "{other:?}");
    }
    let elsewhere = RemotePrefill { host: "elsewhere".to_owned(), port: 1, ..sample() };
    assert_eq!(elsewhere.digest(), ours, "where P is found is not what it offers");
}

#[test]
fn nothing_pinned_is_a_normal_case() {
    let remote = RemotePrefill { tokens: 0, blocks: vec![BlockList::default()], lease: None, ..sample() };
    let params = TransferParams::RemotePrefill(Box::new(remote));
    assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
}

#[test]
fn the_digest_sees_every_token() {
    assert_ne!(token_digest(&[1, 2]), token_digest(&[2, 1]));
    assert_ne!(token_digest(&[1]), token_digest(&[1, 0]));
    assert_eq!(token_digest(&[]).len(), 32);
}

// H-32
#[test]
fn an_offer_that_comes_with_the_wish_to_hand_over_is_a_relay() {
    let mut value = with_alternatives(2);
    value["do_remote_decode"] = json!(true);
    value["their_own"] = json!("x");
    let Ok(Some(params @ TransferParams::Relay(_))) = TransferParams::parse(&value) else {
        panic!("refused")
    };
    assert_eq!(params.to_json(), value, "as it was, with both flags");
    let TransferParams::Relay(remote) = params else { unreachable!() };
    let leases: Vec<_> =
        remote.alternatives.iter().chain([&*remote]).filter_map(|offer| offer.lease).map(|l| l.0).collect();
    assert_eq!(leases, [100, 101, 3]);
    // One that cannot be read whole gives back what can be.
    value["alternatives"][0]["remote_port"] = json!(0);
    assert!(TransferParams::parse(&value).is_err());
    let found = RemotePrefill::readable(&value);
    assert_eq!(found.iter().filter_map(|offer| offer.lease).map(|l| l.0).collect::<Vec<_>>(), [3, 101]);
    // The wish alone brings no offer, whatever else is there.
    let ask =
        json!({"do_remote_decode": true, "do_remote_prefill": false, "kv_connector": value["kv_connector"]});
    assert!(matches!(TransferParams::parse(&ask), Ok(Some(TransferParams::RemoteDecode { .. }))));
}

fn with_alternatives(count: u64) -> Value {
    let other = |n| RemotePrefill { lease: Some(LeaseId(100 + n)), ..sample() };
    let remote = RemotePrefill { alternatives: (0..count).map(other).collect(), ..sample() };
    TransferParams::RemotePrefill(Box::new(remote)).to_json()
}

#[test]
fn other_offers_are_read_as_they_were_answered_and_written_again() {
    let value = with_alternatives(ALTERNATIVES_MAX as u64);
    let Ok(Some(params @ TransferParams::RemotePrefill(_))) = TransferParams::parse(&value) else {
        panic!("refused")
    };
    assert_eq!(params.to_json(), value);
    // What a router does: it puts one answer into the other.
    let mut merged = TransferParams::RemotePrefill(Box::new(sample())).to_json();
    let mut second = merged.clone();
    second["kv_connector"]["lease"] = json!(100);
    second["their_own"] = json!([1]);
    merged["alternatives"] = json!([second]);
    let Ok(Some(TransferParams::RemotePrefill(remote))) = TransferParams::parse(&merged) else {
        panic!("refused")
    };
    let leases: Vec<_> = remote.alternatives.iter().map(|offer| offer.lease).collect();
    assert_eq!(leases, [Some(LeaseId(100))]);
    assert_eq!(remote.alternatives[0].other["their_own"], json!([1]), "unknown keys survive here too");
    assert!(remote.other.is_empty());
}

#[test]
fn no_other_offers_are_no_key() {
    let without = TransferParams::RemotePrefill(Box::new(sample()));
    assert!(without.to_json().get(ALTERNATIVES_KEY).is_none());
    for none in [json!(null), json!([])] {
        let mut value = without.to_json();
        value[ALTERNATIVES_KEY] = none;
        assert_eq!(TransferParams::parse(&value), Ok(Some(without.clone())));
    }
}

// H-3
#[test]
fn what_is_wrong_with_another_offer_is_named_with_its_place() {
    let cases: [Case; 9] = [
        (|v| v["alternatives"] = json!({}), "alternatives must be a list of offers, got {}"),
        (
            |v| v["alternatives"] = json!([1, 1, 1, 1, 1, 1, 1, 1, 1]),
            "alternatives has 9 items, at most 8 are allowed",
        ),
        (|v| v["alternatives"][1] = json!(null), "alternatives[1] must be an object, got null"),
        (
            |v| v["alternatives"][1]["remote_port"] = json!(70000),
            "alternatives[1].remote_port is 70000; 1 to 65535 are allowed",
        ),
        (
            |v| drop(v["alternatives"][0]["kv_connector"].as_object_mut().unwrap().remove("tokens")),
            "alternatives[0].kv_connector.tokens is missing",
        ),
        (
            |v| v["alternatives"][0]["do_remote_prefill"] = json!(false),
            "alternatives[0].do_remote_prefill must be true, got false",
        ),
        (
            |v| v["alternatives"][1]["do_remote_decode"] = json!(true),
            "alternatives[1].do_remote_decode must be false, got true",
        ),
        (
            |v| v["alternatives"][1]["alternatives"] = json!([{}]),
            "alternatives[1].alternatives must be empty in an offer that is one itself, got [{}]",
        ),
        (|v| v["remote_port"] = json!(0), "remote_port is 0; 1 to 65535 are allowed"),
    ];
    for (change, text) in cases {
        let mut value = with_alternatives(2);
        change(&mut value);
        assert_eq!(TransferParams::parse(&value).unwrap_err().to_string(), text);
    }
}

// H-22
#[test]
fn of_refused_parameters_every_offer_that_can_be_read_is_found() {
    let leases = |value: &Value| -> Vec<u64> {
        RemotePrefill::readable(value).iter().filter_map(|offer| offer.lease).map(|lease| lease.0).collect()
    };
    let mut value = with_alternatives(3);
    assert_eq!(leases(&value), [3, 100, 101, 102]);
    value["alternatives"][1]["remote_port"] = json!(0);
    assert_eq!(leases(&value), [3, 100, 102]);
    value["remote_host"] = json!(null);
    assert_eq!(leases(&value), [100, 102]);
    value["alternatives"] = json!(7);
    assert_eq!((leases(&value), leases(&json!([]))), (vec![], vec![]));
}

#[test]
fn groups_that_do_not_begin_at_the_start_and_marks_are_written_and_read_again() {
    let mut remote = sample();
    remote.blocks.push([7].into_iter().map(BlockId).collect());
    remote.firsts = vec![0, 2];
    remote.marks = PrefixMarks::of(&(0..40).collect::<Vec<_>>(), 16);
    let params = TransferParams::RemotePrefill(Box::new(remote));
    assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params.clone())));
    let refuse = |change: fn(&mut Value)| {
        let mut value = params.to_json();
        change(&mut value["kv_connector"]);
        TransferParams::parse(&value).unwrap_err().to_string()
    };
    assert_eq!(
        refuse(|v| v["firsts"] = json!([0, 1])),
        "remote_block_ids says 1 blocks from position 1, but kv_connector.blocks says 3"
    );
    assert_eq!(
        refuse(|v| v["firsts"] = json!([0])),
        "kv_connector.firsts says 1 groups, but remote_block_ids says 2 groups"
    );
    assert!(refuse(|v| v["firsts"] = json!([0, -1])).starts_with("kv_connector.firsts is -1"));
    assert_eq!(
        refuse(|v| v["marks"]["every"] = json!(32)),
        "kv_connector.marks says 64 tokens, but kv_connector.tokens says 40"
    );
    assert_eq!(
        refuse(|v| v["marks"]["every"] = json!(0)),
        "kv_connector.marks.every is 0; 1 to 67108864 are allowed"
    );
    assert_eq!(
        refuse(|v| v["marks"]["digests"][0] = json!("00")),
        "kv_connector.marks.digests must be 32 hexadecimal digits each, got \"00\""
    );
    assert!(refuse(|v| v["marks"] = json!(3)).starts_with("kv_connector.marks must be an object"));
}

// H-18
#[test]
fn marks_that_were_changed_on_the_way_make_another_offer() {
    let marked = |tokens: &[u32]| RemotePrefill { marks: PrefixMarks::of(tokens, 16), ..sample() };
    let (own, other): (Vec<u32>, Vec<u32>) = ((0..40).collect(), (1..41).collect());
    assert_eq!(marked(&own).digest(), marked(&own).digest());
    assert_ne!(marked(&own).digest(), marked(&other).digest(), "else another prompt would be confirmed");
    assert_ne!(marked(&own).digest(), sample().digest());
}
