//! What a router or an engine's own configuration brings costs the request or the start that brought it, and nobody
//! else: the error says what is wrong, with both values where there are two, and the next hand-over works.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed check is a failed test.

mod common;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{D, Engine, P, Shape, Signal, World, config, list, prompt, refuse_load, request};
use kv_connector::proto::{LoadFailure, token_digest};
use kv_connector::{Config, ConnectorError, Rank, RequestId, Role};
use serde_json::{Value, json};

fn pair() -> World {
    World::of([Shape::named("p"), Shape { blocks: 24, gap: 48, ..Shape::named("d") }])
}

type Forgery = (&'static str, fn(&mut Value), &'static str);
// H-3, R081, R109
#[test]
fn parameters_that_cannot_be_are_refused_by_field_and_value() {
    let forgeries: &[Forgery] = &[
        ("a string", |p| *p = json!("x"), "kv_transfer_params must be an object, got a string"),
        ("a list", |p| *p = json!([p.clone()]), "kv_transfer_params must be an object, got a list"),
        // Missing.
        ("no engine", |p| drop(p["remote_engine_id"].take()), "remote_engine_id is missing"),
        ("no request", |p| drop(p["remote_request_id"].take()), "remote_request_id is missing"),
        ("no host", |p| drop(p["remote_host"].take()), "remote_host is missing"),
        ("no port", |p| drop(p["remote_port"].take()), "remote_port is missing"),
        ("no ranks", |p| drop(p["tp_size"].take()), "tp_size is missing"),
        ("no blocks", |p| drop(p["remote_block_ids"].take()), "remote_block_ids is missing"),
        ("nothing of ours", |p| drop(p["kv_connector"].take()), "kv_connector is missing"),
        ("no version", |p| drop(p["kv_connector"]["version"].take()), "kv_connector.version is missing"),
        ("no tokens", |p| drop(p["kv_connector"]["tokens"].take()), "kv_connector.tokens is missing"),
        (
            "no block size",
            |p| drop(p["kv_connector"]["block_tokens"].take()),
            "kv_connector.block_tokens is missing",
        ),
        ("no count", |p| drop(p["kv_connector"]["blocks"].take()), "kv_connector.blocks is missing"),
        (
            "no digest",
            |p| drop(p["kv_connector"]["token_digest"].take()),
            "kv_connector.token_digest is missing",
        ),
        ("no life", |p| drop(p["kv_connector"]["incarnation"].take()), "kv_connector.incarnation is missing"),
        ("an empty host", |p| p["remote_host"] = json!(""), "remote_host is missing"),
        // Of another type.
        (
            "a flag of text",
            |p| p["do_remote_prefill"] = json!("yes"),
            "do_remote_prefill must be a boolean, got \"yes\"",
        ),
        (
            "an engine of numbers",
            |p| p["remote_engine_id"] = json!(7),
            "remote_engine_id must be a string, got 7",
        ),
        (
            "a port of text",
            |p| p["remote_port"] = json!("5600"),
            "remote_port must be a whole number, got \"5600\"",
        ),
        (
            "half a port",
            |p| p["remote_port"] = json!(5600.5),
            "remote_port must be a whole number, got 5600.5",
        ),
        (
            "blocks by name",
            |p| p["remote_block_ids"] = json!([[1, "two", 3]]),
            "remote_block_ids must be a whole number, got \"two\"",
        ),
        (
            "blocks in an object",
            |p| p["remote_block_ids"] = json!({ "a": 1 }),
            "remote_block_ids must be a list of block ids, or one such list per group, got {\"a\":1}",
        ),
        ("ours in a list", |p| p["kv_connector"] = json!([1]), "kv_connector must be an object, got [1]"),
        (
            "a life that is none",
            |p| p["kv_connector"]["incarnation"] = json!("XYZ"),
            "kv_connector.incarnation must be 16 lower-case hexadecimal digits, got \"XYZ\"",
        ),
        // Negative.
        ("a negative port", |p| p["remote_port"] = json!(-1), "remote_port is -1; 1 to 65535 are allowed"),
        (
            "a negative block",
            |p| p["remote_block_ids"] = json!([[1, -2, 3]]),
            "remote_block_ids is -2; 0 to 4294967294 are allowed",
        ),
        (
            "negative tokens",
            |p| p["kv_connector"]["tokens"] = json!(-11),
            "kv_connector.tokens is -11; 0 to 67108864 are allowed",
        ),
        (
            "a negative lease",
            |p| p["kv_connector"]["lease"] = json!(-1),
            "kv_connector.lease is -1; 0 to 18446744073709551615 are allowed",
        ),
        // Huge.
        ("a huge port", |p| p["remote_port"] = json!(65_536), "remote_port is 65536; 1 to 65535 are allowed"),
        (
            "huge ranks",
            |p| p["tp_size"] = json!(1_000_000_000),
            "tp_size is 1000000000; 1 to 65535 are allowed",
        ),
        (
            "a huge block",
            |p| p["remote_block_ids"] = json!([[1, 4_294_967_295u32, 3]]),
            "remote_block_ids is 4294967295; 0 to 4294967294 are allowed",
        ),
        (
            "huge tokens",
            |p| p["kv_connector"]["tokens"] = json!(u64::MAX),
            "kv_connector.tokens is 18446744073709551615; 0 to 67108864 are allowed",
        ),
        (
            "huge blocks",
            |p| p["kv_connector"]["block_tokens"] = json!(65_537),
            "kv_connector.block_tokens is 65537; 1 to 65536 are allowed",
        ),
        (
            "a lease beyond counting",
            |p| p["kv_connector"]["lease"] = json!(1.0e30),
            "kv_connector.lease is 1e+30; 0 to 18446744073709551615 are allowed",
        ),
        (
            "a version to come",
            |p| p["kv_connector"]["version"] = json!(2),
            "kv_connector.version is 2; 1 to 1 are allowed",
        ),
        (
            "a long host",
            |p| p["remote_host"] = json!("h".repeat(256)),
            "remote_host has 256 items, at most 255 are allowed",
        ),
        (
            "a long digest",
            |p| p["kv_connector"]["token_digest"] = json!("0".repeat(129)),
            "kv_connector.token_digest has 129 items, at most 128 are allowed",
        ),
        (
            "a long request id",
            |p| p["remote_request_id"] = json!("r".repeat(10_240)),
            "remote_request_id: request_id is 10240 bytes long, at most 1024 are allowed",
        ),
        (
            "a long engine id",
            |p| p["remote_engine_id"] = json!("e".repeat(257)),
            "remote_engine_id: engine_id is 257 bytes long, at most 256 are allowed",
        ),
        (
            "a control character",
            |p| p["remote_request_id"] = json!("a\u{7}b"),
            "remote_request_id: request_id holds the control character U+0007 at byte 1",
        ),
        (
            "too many groups",
            |p| p["remote_block_ids"] = json!(vec![[1, 2, 3]; 65]),
            "remote_block_ids has 65 items, at most 64 are allowed",
        ),
        // Contradictory.
        (
            "two token counts",
            |p| p["remote_num_tokens"] = json!(12),
            "remote_num_tokens says 12, but kv_connector.tokens says 11",
        ),
        (
            "two block counts",
            |p| p["kv_connector"]["blocks"] = json!(4),
            "remote_block_ids says 3 blocks, but kv_connector.blocks says 4",
        ),
        (
            "groups of other lengths",
            |p| p["remote_block_ids"] = json!([[7, 3, 4], [1, 2]]),
            "remote_block_ids says 2 blocks, but kv_connector.blocks says 3",
        ),
        (
            "no group",
            |p| p["remote_block_ids"] = json!([]),
            "remote_block_ids says no group, but kv_connector.blocks says 3",
        ),
        (
            "more tokens than fit",
            |p| {
                p["remote_num_tokens"] = json!(13);
                p["kv_connector"]["tokens"] = json!(13);
            },
            "kv_connector.tokens says 13 (in 4 blocks of 4), but kv_connector.blocks says 3",
        ),
        (
            "no lease",
            |p| drop(p["kv_connector"]["lease"].take()),
            "kv_connector.lease says none, but kv_connector.blocks says 3",
        ),
        (
            "a lease on nothing",
            |p| {
                p["remote_num_tokens"] = json!(0);
                p["remote_block_ids"] = json!([[]]);
                p["kv_connector"]["tokens"] = json!(0);
                p["kv_connector"]["blocks"] = json!(0);
            },
            "kv_connector.lease says lease-1, but kv_connector.blocks says 0",
        ),
    ];
    let mut world = pair();
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    for (what, change, words) in forgeries {
        let forged = offer.forged(change);
        let error = world.arrive(D, "r", &forged).unwrap_err();
        assert!(matches!(error, ConnectorError::Params(_)), "{what}: {error:?}");
        assert_eq!(error.to_string(), *words, "{what}");
        // Nothing of it is known afterwards.
        assert_eq!(world[D].sched.remote_tokens(&request("r"), 0), 0);
        world.finish(D, "r");
    }
    assert_eq!(world[D].sched.stats().holds, 0);
    // What was really offered is still good.
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world[D].assert_memory();
    world.released(P, offer.hold);
    world.finish(D, "r");
    world.hand_over(P, D, "next");
}

#[test]
fn keys_that_nobody_knows_do_no_harm() {
    let mut world = pair();
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]).forged(|p| {
        p["x-router"] = json!({ "hops": [1, 2] });
        p["kv_connector"]["to_come"] = json!(true);
        // A hint: the handshake decides.
        p["tp_size"] = json!(7);
        // One flat list, as older routers carry it.
        p["remote_block_ids"] = json!([7, 3, 4]);
    });
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world[D].assert_memory();
}

// H-5, R038
#[test]
fn another_engine_at_a_right_address_is_the_wrong_peer() {
    let mut world = pair();
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    let wrong = offer.forged(|p| p["remote_engine_id"] = json!("somebody"));
    world.begin_load(D, "wrong engine", &wrong, &[2, 9, 1]);
    refuse_load(
        &mut world,
        "wrong engine",
        LoadFailure::WrongPeer,
        &["engine somebody is wanted, but this is engine p in life"],
    );
    let wrong = offer.forged(|p| p["kv_connector"]["incarnation"] = json!("00000000000000aa"));
    world.begin_load(D, "wrong life", &wrong, &[2, 9, 1]);
    let life = world[P].identity.incarnation;
    let words = format!("wanted engine p in life 00000000000000aa, but p in life {life} answers");
    refuse_load(&mut world, "wrong life", LoadFailure::WrongPeer, &[&words]);
    // The forgeries have not cost the honest request its lease.
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world[D].assert_memory();
    world.released(P, offer.hold);
    world.finish(D, "r");
    world.hand_over(P, D, "next");
}

// H-20
#[test]
fn a_right_engine_at_a_wrong_address_cannot_be_reached_within_the_limit() {
    // One that refuses, one that takes connections and is silent, one that speaks something else, and no host.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let quick = Config { handshake_limit_ms: 700, ..config("d") };
    let mut world = World::of([Shape::named("p"), Shape { config: quick, ..Shape::named("d") }]);
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    let kv_port = world[P].listening[0].0;
    let cases = [
        ("127.0.0.1", 1, "no connection could be made"),
        ("127.0.0.1", silent_port, "it does not greet as ZeroMQ"),
        ("127.0.0.1", kv_port, "it does not greet as ZeroMQ"),
        ("no-such-host.invalid", 5600, "host \"no-such-host.invalid\" d"),
        ("0.0.0.0", 5600, "a wildcard host, an empty one or port 0 names no peer"),
        ("not a host; rm -rf", 5600, "host \"not a host; rm -rf\" d"),
    ];
    for (host, port, words) in cases {
        let name = format!("{host}:{port}");
        let wrong = offer.forged(|p| {
            p["remote_host"] = json!(host);
            p["remote_port"] = json!(port);
        });
        let begun = Instant::now();
        world.begin_load(D, &name, &wrong, &[2, 9, 1]);
        let shown = format!("tcp://{host}:{port}");
        refuse_load(&mut world, &name, LoadFailure::HandshakeUnreachable, &[words, &shown]);
        // The handshake has 0.7 s; the rest is for a busy machine.
        assert!(begun.elapsed() < Duration::from_secs(4), "{name} took {:?}", begun.elapsed());
    }
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    world.expect_loaded(D, "r");
    world.released(P, offer.hold);
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world.hand_over(P, D, "next");
}

// H-3
#[test]
fn blocks_that_a_pool_does_not_have_fail_with_both_values() {
    let mut world = pair();
    for highest in [32, 9_999, u32::MAX - 1] {
        let name = format!("remote {highest}");
        let offer = world.prefill(P, &name, 11, &[7, 3, 4]);
        let forged = offer.forged(|p| p["remote_block_ids"] = json!([[7, highest, 4]]));
        world.begin_load(D, &name, &forged, &[2, 9, 1]);
        let words = format!("remote block {highest} of group 0 is beyond the pool of 32");
        refuse_load(&mut world, &name, LoadFailure::BadBlocks, &[&words]);
        world.released(P, offer.hold);
    }
    let offer = world.prefill(P, "local", 11, &[7, 3, 4]);
    world.arrive(D, "local", &offer).unwrap();
    let error = world.allocate(D, "local", 0, &[2, 24, 1]).unwrap_err();
    assert_eq!(error.to_string(), "request local: block 24 is beyond the pool of 24");
    let error = world.allocate(D, "local", 0, &[2, 9]).unwrap_err();
    assert_eq!(error.to_string(), "request local: 3 blocks are needed, 2 were allocated");
    let error = world.allocate(D, "local", 3, &[2, 9, 1]).unwrap_err();
    assert_eq!(error.to_string(), "request local: 3 local tokens are not a multiple of the block's 4");
    let wrong = world[D].sched.blocks_allocated(&request("local"), 0, 5, &[list(&[2, 9, 1])]).unwrap_err();
    assert_eq!(wrong.to_string(), "request local: 5 remote tokens asked for, 11 offered");
    // None of them changed anything.
    world.allocate(D, "local", 0, &[2, 9, 1]).unwrap();
    world.expect_loaded(D, "local");
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world[D].assert_memory();
    world.released(P, offer.hold);
    world.finish(D, "local");
    world.hand_over(P, D, "next");
}

// H-18
#[test]
fn blocks_of_somebody_else_are_never_confirmed() {
    let brief = Config { lease_ttl_ms: 3_000, lease_renewal_ms: 3_000, ..config("p") };
    let mut world = World::of([Shape { config: brief, ..Shape::named("p") }, Shape::named("d")]);
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    let other = world.prefill(P, "other", 11, &[8, 9, 10]);
    let forged = [
        offer.forged(|p| p["remote_block_ids"] = json!([[7, 3, 5]])),
        offer.forged(|p| p["remote_block_ids"] = json!([[3, 7, 4]])),
        offer.forged(|p| p["kv_connector"]["lease"] = other.params["kv_connector"]["lease"].clone()),
    ];
    for (i, forged) in forged.iter().enumerate() {
        let name = format!("forged-{i}");
        world.begin_load(D, &name, forged, &[2, 9, 1]);
        // In answer to the first renewal or to the question after the read, whichever comes first.
        refuse_load(&mut world, &name, LoadFailure::Lapsed, &["hold"]);
    }
    // The leases were held all the while, and are so still.
    let producer = world[P].sched.stats().producer;
    assert_eq!((producer.confirmed, producer.expired), (0, 0));
    world.hand_over(P, D, "next");
}

// H-3
#[test]
fn an_offer_of_more_blocks_than_the_layout_has_is_refused() {
    let mut world = pair();
    let mut offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    offer.prompt = prompt("long", 400);
    let forged = offer.forged(|p| {
        p["remote_num_tokens"] = json!(400);
        p["remote_block_ids"] = json!([(0..100).collect::<Vec<u32>>()]);
        p["kv_connector"]["tokens"] = json!(400);
        p["kv_connector"]["blocks"] = json!(100);
        p["kv_connector"]["token_digest"] = json!(token_digest(&prompt("long", 400)));
    });
    // The engine cannot have so many blocks, and says so; or it repeats itself, and the producer's pool decides.
    world.arrive(D, "few", &forged).unwrap();
    let error = world.allocate(D, "few", 0, &(0..24).collect::<Vec<_>>()).unwrap_err();
    assert_eq!(error.to_string(), "request few: 100 blocks are needed, 24 were allocated");
    let repeated: Vec<u32> = (0..100).map(|i| i % 24).collect();
    world.allocate(D, "few", 0, &repeated).unwrap();
    let words = ["remote block 99 of group 0 is beyond the pool of 32"];
    refuse_load(&mut world, "few", LoadFailure::BadBlocks, &words);
    world.released(P, offer.hold);
    world[D].assert_memory();
    world.hand_over(P, D, "next");
}

/// Refused when it arrives, and given back to its producer at once.
fn refuse_arrival(world: &mut World, tokens: u32, change: impl FnOnce(&mut common::Offer), words: &str) {
    let mut offer = world.prefill(P, "r", tokens, &[7, 3, 4]);
    change(&mut offer);
    let error = world.arrive(D, "r", &offer).unwrap_err();
    assert_eq!(error.to_string(), words);
    world.released(P, offer.hold);
    world.finish(D, "r");
    world[D].assert_memory();
    world.nothing_held();
}

// H-3, H-22
#[test]
fn an_offer_that_does_not_fit_the_request_is_refused_and_given_back() {
    let brief = Config { lease_ttl_ms: 2_000, lease_renewal_ms: 2_000, ..config("p") };
    let mut world = World::of([Shape { config: brief, ..Shape::named("p") }, Shape::named("d")]);
    refuse_arrival(
        &mut world,
        11,
        |offer| offer.params["remote_block_ids"] = json!([[7, 3, 4], [7, 3, 4]]),
        "block groups: ours 1, theirs 2",
    );
    let (ours, theirs) = (token_digest(&prompt("other", 11)), token_digest(&prompt("r", 11)));
    refuse_arrival(
        &mut world,
        11,
        |offer| offer.prompt = prompt("other", 11),
        &format!(
            "the offer is for another prompt: digest of the first 11 tokens is {ours} here, {theirs} there"
        ),
    );
    refuse_arrival(
        &mut world,
        11,
        |offer| offer.prompt.truncate(3),
        "the offer covers 11 tokens, the prompt has 3",
    );
    // What was changed on the way is not the offer that P made, so that only its time ends it.
    let stats = world[P].sched.stats().producer;
    assert_eq!((stats.released, stats.expired), (2, 1));
    world.hand_over(P, D, "next");
}

// H-22
#[test]
fn a_request_id_that_is_here_already_is_refused_and_the_first_goes_on() {
    let mut world = pair();
    let first = world.prefill(P, "r-1", 11, &[7, 3, 4]);
    let second = world.prefill(P, "r-2", 11, &[8, 9, 10]);
    world.arrive(D, "same", &first).unwrap();
    let error = world.arrive(D, "same", &second).unwrap_err();
    assert_eq!(error.to_string(), "request same is already here");
    // The second offer has nobody who will read it.
    world.released(P, second.hold);
    // Brought twice, the first is still needed.
    assert!(world.arrive(D, "same", &first).is_err());
    world.allocate(D, "same", 0, &[2, 9, 1]).unwrap();
    world.expect_loaded(D, "same");
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world[D].assert_memory();
    world.released(P, first.hold);
    assert_eq!(world[P].sched.stats().producer.confirmed, 1);
    // On the producer too.
    world.begin_prefill(P, "same", 11);
    let params = json!({ "do_remote_decode": true });
    let error = world[P].sched.request_arrived(&request("same"), &[1], Some(&params)).unwrap_err();
    assert_eq!(error.to_string(), "request same is already here");
    let offer = world.end_prefill(P, "same", 11, &[0, 1, 2]);
    world.finish(D, "same");
    world.begin_load(D, "again", &offer, &[5, 6, 7]);
    world.expect_loaded(D, "again");
    world.finish(D, "again");
    world.released(P, offer.hold);
    world.nothing_held();
}

#[test]
fn any_text_is_a_request_id_unless_it_is_too_long_empty_or_has_control_characters() {
    let mut world = pair();
    let long = "ü".repeat(512);
    for name in
        ["a, b, c", " leading and trailing ", "идентификатор-請求-🦀", "\"quoted\" {json: [1]}", &long]
    {
        world.hand_over(P, D, name);
    }
    let refuse = |text: String| RequestId::new(text).unwrap_err().to_string();
    assert_eq!(refuse("r".repeat(10_240)), "request_id is 10240 bytes long, at most 1024 are allowed");
    assert_eq!(refuse(String::new()), "request_id is empty");
    assert_eq!(refuse("a\nb".to_owned()), "request_id holds the control character U+000A at byte 1");
}

#[test]
fn plans_and_reports_that_are_none_are_refused_and_change_nothing() {
    let mut world = pair();
    for garbage in [&b""[..], b"garbage", &[0xdd, 0xff, 0xff, 0xff, 0xff], &[0x91; 10_000]] {
        let error = world[D].workers[0].begin_step(garbage).unwrap_err().to_string();
        assert!(error.starts_with("plan cannot be decoded: "), "{error}");
        let error = world[D].sched.take_report(garbage).unwrap_err().to_string();
        assert!(error.starts_with("report cannot be decoded: "), "{error}");
    }
    let far = kv_connector::proto::Report::new(Rank(7)).encode().unwrap();
    let error = world[D].sched.take_report(&far).unwrap_err().to_string();
    assert_eq!(error, "a report from rank-7, but the engine has 1 ranks");
    world.hand_over(P, D, "next");
}

fn start_error(config: Config) -> String {
    match Engine::start(Shape { config, ..Shape::named("x") }, 1, &Arc::<Signal>::default()) {
        Ok(_) => panic!("it started"),
        Err(error) => error.to_string(),
    }
}

// R039
#[test]
fn a_handshake_port_in_use_is_named() {
    let mut world = pair();
    let port = world[P].sched.handshake_port();
    let error = start_error(Config { handshake_port: port, ..config("x") });
    assert!(error.contains(&format!("port {port} is in use")), "{error}");
    assert!(error.contains(&format!("tcp://127.0.0.1:{port}")), "{error}");
    world.hand_over(P, D, "next");
}

// R038, R105
#[test]
fn hosts_that_are_none_are_named_at_start() {
    let nowhere = || "no-such-host.invalid".to_owned();
    let error = start_error(Config { transport_host: nowhere(), ..config("x") });
    assert!(error.contains("transport_host") && error.contains("no-such-host.invalid"), "{error}");
    let error = start_error(Config { handshake_host: nowhere(), ..config("x") });
    assert!(error.contains("no-such-host.invalid") && error.contains("does not resolve"), "{error}");
    // An address of some other machine.
    let error = start_error(Config { transport_host: "192.0.2.1".to_owned(), ..config("x") });
    assert!(error.contains("192.0.2.1"), "{error}");
    let error = start_error(Config { transport_host: "0.0.0.0".to_owned(), ..config("x") });
    assert!(error.contains("transport_host is the wildcard \"0.0.0.0\""), "{error}");
    let error = start_error(Config { transport: "pigeon".to_owned(), ..config("x") });
    assert_eq!(error, "transport is \"pigeon\"; this build has [\"tcp\", \"shm\", \"ucx\", \"auto\"]");
}

#[test]
fn a_configuration_with_keys_that_do_not_exist_is_refused() {
    let error = Config::from_json(r#"{"engine_id": "p", "lease_ttl": 5}"#).unwrap_err().to_string();
    assert!(error.contains("unknown field `lease_ttl`, expected one of `engine_id`, "), "{error}");
    let variables = [("KV_CONNECTOR_LEASE_TTL".to_owned(), "5".to_owned())];
    let error = Config::from_variables(variables).unwrap_err().to_string();
    assert!(error.contains("KV_CONNECTOR_LEASE_TTL names no field"), "{error}");
    assert!(error.contains("KV_CONNECTOR_LEASE_TTL_MS"), "{error}");
}

#[test]
fn a_request_without_parameters_of_ours_is_left_alone() {
    let mut world = pair();
    for params in [None, Some(json!(null)), Some(json!({})), Some(json!({ "do_remote_prefill": false }))] {
        let role = world[D].sched.request_arrived(&request("plain"), &[1, 2], params.as_ref()).unwrap();
        assert_eq!(role, Role::Plain);
        assert_eq!(world[D].sched.remote_tokens(&request("plain"), 0), 0);
        world[D].sched.blocks_allocated(&request("plain"), 0, 0, &[list(&[1])]).unwrap();
        world.finish(D, "plain");
    }
    assert!(!world[D].sched.has_plan());
}
