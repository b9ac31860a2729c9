//! Decoders against any bytes, round trips of any value, and readers older and newer than the writer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;
#[path = "properties/damage.rs"]
mod damage;
#[path = "properties/values.rs"]
mod values;

use common::{LIFE, decode_all, encodings, engine, fingerprint};
use damage::damage;
use kv_proto::handshake::{Answer, EngineCard, HandshakeError, Query, RefusalCode, WorkerCard};
use kv_proto::message::WorkerMessage;
use kv_proto::params::EXTRA_KEY;
use kv_proto::{
    BlockId, BlockList, CodecError, LeaseId, PROTOCOL_VERSION, Plan, ProducerOrder, PullEnd, Rank, Report,
    TransferParams,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use serde::Serialize;
use serde_json::{Value, json};
use values::{json_value, message, plan, remote_prefill, report, without_others_keys};

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    // R104
    #[test]
    fn no_bytes_panic_a_decoder(bytes in vec(any::<u8>(), 0..400)) {
        decode_all(&bytes);
    }

    #[test]
    fn no_damage_panics_a_decoder(which in select(encodings()), damages in vec(damage(), 1..6)) {
        let mut bytes = which;
        for damage in damages {
            damage.apply(&mut bytes);
        }
        decode_all(&bytes);
    }

    #[test]
    fn what_is_cut_or_continued_is_no_value(which in select(encodings()), at: prop::sample::Index, more: u8) {
        prop_assert_eq!(decode_all(&which), 1, "each encoding is of one kind");
        prop_assert_eq!(decode_all(&which[..at.index(which.len())]), 0);
        prop_assert_eq!(decode_all(&[&which[..], &[more]].concat()), 0);
    }

    #[test]
    fn block_lists_keep_every_id(ids in vec(prop_oneof![0..50u32, any::<u32>()], 0..100)) {
        let list: BlockList = ids.iter().copied().map(BlockId).collect();
        prop_assert_eq!(list.iter().map(|b| b.0).collect::<Vec<_>>(), ids.clone());
        prop_assert_eq!(list.len() as usize, ids.len());
        prop_assert_eq!(list.highest().map(|b| b.0), ids.iter().copied().max());
        let bytes = rmp_serde::to_vec_named(&list).unwrap();
        prop_assert_eq!(rmp_serde::from_slice::<BlockList>(&bytes).unwrap(), list.clone());
        let tail = ids.len() / 3;
        prop_assert_eq!(list.skip(tail as u32).iter().map(|b| b.0).collect::<Vec<_>>(), ids[tail..].to_vec());
    }

    #[test]
    fn plans_survive(plan in plan()) {
        prop_assert_eq!(Plan::decode(&plan.encode().unwrap()), Ok(plan));
    }

    #[test]
    fn reports_survive(report in report()) {
        prop_assert_eq!(Report::decode(&report.encode().unwrap()), Ok(report));
    }

    #[test]
    fn messages_survive(message in message()) {
        prop_assert_eq!(WorkerMessage::decode(&message.encode().unwrap()), Ok(message));
    }

    #[test]
    fn parameters_survive_also_as_text(remote in remote_prefill()) {
        let params = TransferParams::RemotePrefill(Box::new(remote.clone()));
        let value = params.to_json();
        prop_assert_eq!(TransferParams::parse(&value), Ok(Some(params)));
        // A router parses and prints; floating-point numbers of other keys may lose their last digit there.
        let text: Value = serde_json::from_str(&value.to_string()).unwrap();
        let Ok(Some(TransferParams::RemotePrefill(read))) = TransferParams::parse(&text) else {
            return Err(TestCaseError::fail("the text was refused"));
        };
        prop_assert_eq!(without_others_keys(*read), without_others_keys(remote));
    }

    #[test]
    fn no_json_panics_the_parser(value in json_value()) {
        let _ = TransferParams::parse(&value);
    }

    // H-3
    #[test]
    fn one_strange_field_costs_an_error_at_most(
        remote in remote_prefill(),
        which: prop::sample::Index,
        inner: bool,
        strange in option::of(json_value()),
    ) {
        let mut value = TransferParams::RemotePrefill(Box::new(remote)).to_json();
        let target = if inner { &mut value[EXTRA_KEY] } else { &mut value };
        let object = target.as_object_mut().unwrap();
        let key = object.keys().nth(which.index(object.len())).unwrap().clone();
        match strange {
            Some(strange) => drop(object.insert(key, strange)),
            None => drop(object.remove(&key)),
        }
        if let Ok(Some(params)) = TransferParams::parse(&value) {
            prop_assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
        }
    }
}

// --- older and newer peers ---

fn to_value(bytes: &[u8]) -> Value {
    rmp_serde::from_slice(bytes).unwrap()
}

/// Adds a field that this version does not know to the maps at these places.
fn with_unknown_fields(bytes: &[u8], places: &[&str]) -> Vec<u8> {
    let mut value = to_value(bytes);
    for place in places {
        let map =
            value.pointer_mut(place).and_then(Value::as_object_mut).unwrap_or_else(|| panic!("{place}"));
        map.insert("of_a_later_version".to_owned(), json!({"deep": [1, {"x": null}, "text"]}));
    }
    rmp_serde::to_vec_named(&value).unwrap()
}

#[test]
fn fields_of_a_later_version_are_ignored() {
    for (name, message) in common::messages() {
        let bytes = message.encode().unwrap();
        let variant = to_value(&bytes).as_object().unwrap().keys().next().unwrap().clone();
        let longer = with_unknown_fields(&bytes, &[&format!("/{variant}")]);
        assert_eq!(WorkerMessage::decode(&longer), Ok(message), "{name}");
    }
    let plan = common::plan();
    let places = [
        "",
        "/body",
        "/body/producer/0/announce",
        "/body/producer/1/grant",
        "/body/producer/1/grant/terms",
        "/body/consumer/0/track/lease",
        "/body/consumer/0/track/peer",
        "/body/consumer/1/load",
        "/body/consumer/1/load/groups/0",
        "/body/consumer/2/cancel",
        "/body/consumer/3/release",
    ];
    assert_eq!(Plan::decode(&with_unknown_fields(&plan.encode().unwrap(), &places)), Ok(plan));
    let report = common::report();
    let places = ["", "/body", "/body/loads/0/1/loaded", "/body/loads/1/1/failed"];
    assert_eq!(Report::decode(&with_unknown_fields(&report.encode().unwrap(), &places)), Ok(report));
}

/// A plan or a report as another build may write it.
fn step_frame(kind: &str, version: u32, body: Value) -> Vec<u8> {
    rmp_serde::to_vec_named(&json!({"kind": kind, "version": version, "body": body})).unwrap()
}

#[test]
fn plans_and_reports_say_what_they_are() {
    let report = common::report().encode().unwrap();
    let error = Plan::decode(&report).unwrap_err().to_string();
    assert!(error.contains("\"report\"") || error.contains("plan"), "{error}");
    assert!(Report::decode(&common::plan().encode().unwrap()).is_err());
    for (name, message) in common::messages() {
        let bytes = message.encode().unwrap();
        assert!(Plan::decode(&bytes).is_err() && Report::decode(&bytes).is_err(), "{name}");
    }
    let later = step_frame("plan", PROTOCOL_VERSION + 1, json!({}));
    let expected = CodecError::Version { what: "plan", ours: PROTOCOL_VERSION, theirs: PROTOCOL_VERSION + 1 };
    assert_eq!(Plan::decode(&later), Err(expected));
    let other = step_frame("report", PROTOCOL_VERSION, json!({}));
    assert_eq!(
        Plan::decode(&other).unwrap_err().to_string(),
        "plan cannot be decoded: it says that it is a \"report\""
    );
}

#[test]
fn fields_that_an_earlier_version_lacks_take_their_defaults() {
    let plan_of = |body: Value| step_frame("plan", PROTOCOL_VERSION, body);
    let report_of = |body: Value| step_frame("report", PROTOCOL_VERSION, body);
    assert_eq!(Plan::decode(&plan_of(json!({}))), Ok(Plan::default()));
    let plan = Plan { producer: vec![ProducerOrder::Forget { lease: LeaseId(1) }], consumer: Vec::new() };
    assert_eq!(Plan::decode(&plan_of(json!({"producer": [{"forget": {"lease": 1}}]}))), Ok(plan));
    assert_eq!(Report::decode(&report_of(json!({"rank": 3}))), Ok(Report::new(Rank(3))));
    // What has no default is missed by name.
    let error = Report::decode(&report_of(json!({"leases": []}))).unwrap_err();
    assert!(error.to_string().contains("missing field `rank`"), "{error}");
}

#[test]
fn reasons_of_a_later_version_are_understood_as_other() {
    let of = |value: Value| rmp_serde::to_vec_named(&value).unwrap();
    let release =
        json!({"release": {"lease": 1, "attempt": 0, "offer": [1, 2], "reason": "of_a_later_version"}});
    let Ok(WorkerMessage::Release { reason, .. }) = WorkerMessage::decode(&of(release)) else {
        panic!("refused")
    };
    assert_eq!(reason, kv_proto::ReleaseReason::Other);
    let unwelcome = json!({"unwelcome": {"reason": "of_a_later_version", "incarnation": 1}});
    let Ok(WorkerMessage::Unwelcome { reason, .. }) = WorkerMessage::decode(&of(unwelcome)) else {
        panic!("refused")
    };
    assert_eq!(reason, kv_proto::message::HelloRefusal::Other);
    let loads = json!([[1, {"failed": {"reason": "of_a_later_version", "detail": ""}}]]);
    let report =
        Report::decode(&step_frame("report", PROTOCOL_VERSION, json!({"rank": 0, "loads": loads}))).unwrap();
    assert!(matches!(report.loads[0].1, PullEnd::Failed { reason: kv_proto::LoadFailure::Other, .. }));
    // An order or a message of a later version cannot be obeyed, and is an error.
    assert!(WorkerMessage::decode(&of(json!({"of_a_later_version": {}}))).is_err());
    let strange = json!({"producer": [{"of_a_later_version": {}}]});
    assert!(Plan::decode(&step_frame("plan", PROTOCOL_VERSION, strange)).is_err());
}

/// The outer form of the handshake as another version may write it.
#[derive(Serialize)]
struct Outer<'a> {
    of_a_later_version: [u8; 2],
    service: &'a str,
    version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<kv_proto::Fingerprint>,
    #[serde(with = "serde_bytes")]
    body: &'a [u8],
}

fn outer(service: &str, version: u32, fingerprint: Option<kv_proto::Fingerprint>, body: &[u8]) -> Vec<u8> {
    rmp_serde::to_vec_named(&Outer { of_a_later_version: [1, 2], service, version, fingerprint, body })
        .unwrap()
}

fn read(bytes: &[u8]) -> Result<EngineCard, HandshakeError> {
    Answer::decode(bytes, &fingerprint(), &engine("p-0"), LIFE)
}

// H-4
#[test]
fn the_handshake_tells_what_differs_before_it_looks_at_the_body() {
    let query = common::query();
    let body = with_unknown_fields(&rmp_serde::to_vec_named(&query).unwrap(), &["", "/topology"]);
    let of = |version, fingerprint| outer("kv-connector", version, fingerprint, &body);
    assert_eq!(
        Query::decode(&of(PROTOCOL_VERSION, Some(fingerprint()))),
        Ok((query.clone(), Some(fingerprint())))
    );
    assert_eq!(Query::decode(&of(PROTOCOL_VERSION, None)), Ok((query, None)));
    let version = HandshakeError::Version { theirs: PROTOCOL_VERSION + 1 };
    for body in [&b""[..], b"\xc1", &[0x91; 1000]] {
        let later = outer("kv-connector", PROTOCOL_VERSION + 1, None, body);
        assert_eq!(Query::decode(&later), Err(version.clone()));
        assert_eq!(read(&later), Err(version.clone()));
        let other = outer("another", PROTOCOL_VERSION, None, body);
        assert_eq!(read(&other), Err(HandshakeError::Service { got: "another".to_owned() }));
        let differs = outer("kv-connector", PROTOCOL_VERSION, Some(fingerprint().with("model", "x")), body);
        assert!(matches!(read(&differs), Err(HandshakeError::Incompatible { .. })));
        let damaged = outer("kv-connector", PROTOCOL_VERSION, Some(fingerprint()), body);
        assert!(matches!(read(&damaged), Err(HandshakeError::Codec(CodecError::Malformed { .. }))));
    }
}

#[test]
fn a_code_of_a_later_version_is_understood_as_other() {
    let body =
        rmp_serde::to_vec_named(&json!({"refused": {"code": "of_a_later_version", "message": "m"}})).unwrap();
    let expected = HandshakeError::Refused { code: RefusalCode::Other, message: "m".to_owned() };
    assert_eq!(read(&outer("kv-connector", PROTOCOL_VERSION, None, &body)), Err(expected));
}

// --- depth ---

#[test]
fn deep_nesting_is_an_error_and_no_overflow() {
    // Lists, maps with one entry, and both below a field that nobody knows.
    let lists = vec![0x91; 1 << 20];
    let maps = [0x81, 0xa1, b'x'].repeat(300_000);
    let unknown = [&[0x82, 0xa7][..], b"unknown", &lists].concat();
    let deep_body = outer("kv-connector", PROTOCOL_VERSION, Some(fingerprint()), &lists);
    let mixed = [0x91, 0x81, 0xa1, b'x'].repeat(200_000);
    // Small, so that a few thousand levels would not go unnoticed.
    let thread = std::thread::Builder::new().stack_size(512 << 10);
    let decoded = thread.spawn(move || {
        for bytes in [&lists, &maps, &unknown, &deep_body, &mixed] {
            assert_eq!(decode_all(bytes), 0);
        }
        // A field that nobody knows may be nested a little, and no more.
        for (levels, taken) in [(10, 1), (100, 0)] {
            let mut value = json!([]);
            for _ in 0..levels {
                value = json!([value]);
            }
            let nested = step_frame("plan", PROTOCOL_VERSION, json!({"unknown": value}));
            assert_eq!(usize::from(Plan::decode(&nested).is_ok()), taken, "{levels} levels");
        }
    });
    decoded.unwrap().join().unwrap();
}

// R030
#[test]
fn what_is_longer_than_allowed_is_refused_unread() {
    let long = |what: &str, error: CodecError| {
        assert!(matches!(error, CodecError::TooLong { .. }), "{error}");
        assert!(error.to_string().starts_with(what), "{error}");
    };
    long("worker message", WorkerMessage::decode(&vec![0xc1; (1 << 20) + 1]).unwrap_err());
    long("worker card", WorkerCard::decode(&vec![0xc1; (16 << 20) + 1]).unwrap_err());
    long("plan", Plan::decode(&vec![0xc1; (64 << 20) + 1]).unwrap_err());
    let wanted = (0..1 << 18).map(|n| (LeaseId(u64::MAX - n), common::offer())).collect();
    let renew = WorkerMessage::Renew { seq: 0, all: true, wanted, dropped: Vec::new() };
    long("worker message", renew.encode().unwrap_err());
}
