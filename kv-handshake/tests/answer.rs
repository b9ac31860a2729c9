//! The pure function that makes answers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;

use common::{LIFE, card, card_with, fingerprint, id, outer, query, query_bytes};
use kv_handshake::answer;
use kv_proto::handshake::{Answer, EngineCard, HandshakeError, Query, RefusalCode, SERVICE};
use kv_proto::{Fingerprint, Incarnation, PROTOCOL_VERSION, Rank, Topology};

fn read(bytes: &[u8], ours: &Fingerprint) -> Result<EngineCard, HandshakeError> {
    Answer::decode(bytes, ours, &id("p-0"), LIFE)
}

#[track_caller]
fn refusal(bytes: &[u8]) -> (RefusalCode, String) {
    match read(bytes, &fingerprint()) {
        Err(HandshakeError::Refused { code, message }) => (code, message),
        other => panic!("not a refusal: {other:?}"),
    }
}

fn ask(change: impl FnOnce(&mut Query)) -> Vec<u8> {
    let mut query = query();
    change(&mut query);
    answer(&card(), true, &query.encode(&fingerprint()).unwrap())
}

#[test]
fn a_query_that_fits_gets_the_card() {
    assert_eq!(read(&answer(&card(), true, &query_bytes()), &fingerprint()), Ok(card()));
}

// R111
#[test]
fn an_engine_that_is_not_available_says_so_with_its_name() {
    let (code, message) = refusal(&answer(&card(), false, &query_bytes()));
    assert_eq!(code, RefusalCode::Unavailable);
    assert_eq!(message, "engine p-0 in life 0000000000001111 is not ready, or is draining");
    assert_eq!(refusal(&answer(&card(), false, b"garbage")).0, RefusalCode::Malformed);
}

// H-5
#[test]
fn another_engine_is_refused_with_both_names_also_when_its_model_differs() {
    let expected = "engine p-9 is wanted, but this is engine p-0 in life 0000000000001111";
    assert_eq!(refusal(&ask(|q| q.wanted = id("p-9"))), (RefusalCode::WrongEngine, expected.to_owned()));
    // The asker must hear that it is at the wrong door, not that the stranger there has another model.
    let mut lost = query();
    lost.wanted = id("p-9");
    let theirs = fingerprint().with("model", "model-b");
    let bytes = answer(&card(), true, &lost.encode(&theirs).unwrap());
    let Err(HandshakeError::Refused { code, message }) = read(&bytes, &theirs) else {
        panic!("not a refusal")
    };
    assert_eq!((code, message.as_str()), (RefusalCode::WrongEngine, expected));
}

// H-4, R046
#[test]
fn another_fingerprint_is_refused_with_every_field_and_both_values() {
    let theirs = fingerprint().with("model", "model-b").with("draft", "small\n");
    let bytes = answer(&card(), true, &query().encode(&theirs).unwrap());
    // What a peer shows that does not compare fingerprints itself.
    assert_eq!(
        refusal(&bytes),
        (
            RefusalCode::Incompatible,
            "draft: producer (absent), consumer small\\n; model: producer model-a, consumer model-b"
                .to_owned()
        )
    );
    // What ours shows: its own comparison, from its own side.
    assert_eq!(
        read(&bytes, &theirs).unwrap_err().to_string(),
        "incompatible engines: draft: ours small\n, theirs (absent); model: ours model-b, theirs model-a"
    );
}

// H-4, R046
#[test]
fn one_long_value_does_not_hide_the_other_fields() {
    let theirs = fingerprint().with("a", "x".repeat(4096)).with("b", "1");
    let (_, message) = refusal(&answer(&card(), true, &query().encode(&theirs).unwrap()));
    assert!(message.ends_with("x...; b: producer (absent), consumer 1"), "{message}");
    let mut many = fingerprint();
    for i in 0..50 {
        many = many.with(&format!("field-{i}"), "y".repeat(4096));
    }
    let (_, message) = refusal(&answer(&card(), true, &query().encode(&many).unwrap()));
    assert_eq!(message.chars().count(), 1000);
    assert!(message.ends_with("..."), "{message}");
}

// R006
#[test]
fn topologies_that_cannot_be_are_refused_with_both_counts() {
    assert_eq!(read(&ask(|q| q.topology = Topology::of(4)), &fingerprint()), Ok(card()), "unequal ones can");
    let expected = "topology: 4 ranks cannot be shared out over 3 pipeline stages";
    let bytes = ask(|q| q.topology = Topology { stages: 3, ..Topology::of(4) });
    assert_eq!(refusal(&bytes), (RefusalCode::Incompatible, expected.to_owned()));
    let bytes = ask(|q| q.rank = Rank(2));
    assert_eq!(
        refusal(&bytes),
        (RefusalCode::Malformed, "rank-2 asks, but its engine has 2 ranks".to_owned())
    );
    let bytes = ask(|q| q.topology = Topology::of(0));
    assert_eq!(refusal(&bytes).0, RefusalCode::Malformed);
}

// H-4
#[test]
fn another_version_is_refused_as_such_whatever_its_body_is() {
    for body in [&b""[..], b"\xc1", b"\x93\x01\x02\x03", &[0xff; 1000]] {
        for version in [0, PROTOCOL_VERSION + 1, u32::MAX] {
            assert_eq!(
                refusal(&answer(&card(), true, &outer(SERVICE, version, body))),
                (
                    RefusalCode::Version,
                    format!("protocol version: producer {PROTOCOL_VERSION}, consumer {version}")
                )
            );
        }
    }
}

// R039
#[test]
fn what_cannot_be_read_is_refused_as_malformed() {
    let good = query_bytes();
    let without_body = outer(SERVICE, PROTOCOL_VERSION, b"\xc1");
    let another_service = outer("dns\u{7}", PROTOCOL_VERSION, b"");
    let unbounded = query().encode(&fingerprint().with("x", "y".repeat(5000))).unwrap();
    let mut queries: Vec<Vec<u8>> = (0..good.len()).map(|n| good[..n].to_vec()).collect();
    queries.extend([without_body, another_service.clone(), unbounded, vec![0; 70_000], vec![0x91; 100_000]]);
    queries.push([&good[..], &good[..]].concat());
    for query in queries {
        assert_eq!(refusal(&answer(&card(), true, &query)).0, RefusalCode::Malformed);
    }
    let (_, message) = refusal(&answer(&card(), true, &another_service));
    assert_eq!(message, "this is service \"dns\\u{7}\", not \"kv-connector\"");
}

// H-5, R111
#[test]
fn a_card_without_workers_or_too_large_to_send_is_an_answer_too() {
    let mut empty = card();
    empty.workers.clear();
    assert_eq!(refusal(&answer(&empty, true, &query_bytes())).0, RefusalCode::Unavailable);
    let huge = card_with(2, &fingerprint(), &vec![0; 9 << 20]);
    let (code, message) = refusal(&answer(&huge, true, &query_bytes()));
    assert_eq!(code, RefusalCode::Unavailable);
    assert!(message.contains("longer than the 16777216 allowed"), "{message}");
}

// H-1, H-5
#[test]
fn another_life_of_the_engine_is_noticed_by_the_asker() {
    let bytes = answer(&card(), true, &query_bytes());
    let error = Answer::decode(&bytes, &fingerprint(), &id("p-0"), Incarnation::from_random(5)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "wanted engine p-0 in life 0000000000000005, but p-0 in life 0000000000001111 answers"
    );
}
