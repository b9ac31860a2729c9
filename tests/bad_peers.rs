//! Peers that say nonsense, or do not fit: each costs its own load or connection, and the next hand-over works.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed check is a failed test.

mod common;

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{D, P, SOON, Shape, World, config, refuse_load};
use kv_connector::proto::handshake::{Answer, Query, RefusalCode};
use kv_connector::proto::{EngineId, Fingerprint, Incarnation, LoadFailure, Topology};
use kv_connector::transport::tcp::{TcpConfig, TcpTransport};
use kv_connector::transport::{Address, Transport};
use kv_connector::{Config, Rank};
use serde::Serialize;
use serde_json::json;

fn pair() -> World {
    World::of([Shape::named("p"), Shape { blocks: 24, gap: 48, ..Shape::named("d") }])
}

// H-4, R045
#[test]
fn engines_that_do_not_fit_are_refused_with_every_field_that_differs() {
    let mut world = pair();
    // Nobody can tell it that its offer is of no use, so that its lease ends by time.
    let brief = Config { lease_ttl_ms: 500, lease_renewal_ms: 500, ..config("other") };
    let other = world.add(Shape {
        model: "another toy",
        layers: 3,
        ranks: 2,
        heads: 4,
        config: brief,
        ..Shape::named("other")
    });
    let offer = world.prefill(other, "r", 11, &[7, 3, 4]);
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    refuse_load(&mut world, "r", LoadFailure::Incompatible, &["model: ours toy, theirs another toy"]);
    let refused = world[other].sched.stats().handshakes.refused;
    assert_eq!(refused.keys().collect::<Vec<_>>(), [&RefusalCode::Incompatible]);
    world.hand_over(P, D, "next");
}

// H-4, R045
#[test]
fn a_cache_that_cannot_be_brought_into_ours_is_refused_with_both_values() {
    let mut world = pair();
    let brief = |name| Config { lease_ttl_ms: 500, lease_renewal_ms: 500, ..config(name) };
    let wide = world.add(Shape { heads: 4, config: brief("wide"), ..Shape::named("wide") });
    let offer = world.prefill(wide, "r", 11, &[7, 3, 4]);
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    let words = ["layer layers.0: heads over all ranks ours 2, theirs 4"];
    refuse_load(&mut world, "r", LoadFailure::Incompatible, &words);
    let thin = world.add(Shape { layers: 1, config: brief("thin"), ..Shape::named("thin") });
    let offer = world.prefill(thin, "s", 11, &[7, 3, 4]);
    world.begin_load(D, "s", &offer, &[2, 9, 1]);
    let words = ["layer layers.1: ours has key_value, theirs has nothing"];
    refuse_load(&mut world, "s", LoadFailure::Incompatible, &words);
    world.hand_over(P, D, "next");
}

/// What a frame of any version begins with.
#[derive(Serialize)]
struct Outer {
    service: &'static str,
    version: u32,
    body: Vec<u8>,
}

/// Answers every query with the same bytes.
struct FakeListener {
    port: u16,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakeListener {
    fn start(answer: Vec<u8>) -> Self {
        let router = zmq::Context::new().socket(zmq::ROUTER).unwrap();
        router.set_linger(0).unwrap();
        router.bind("tcp://127.0.0.1:*").unwrap();
        let bound = router.get_last_endpoint().unwrap().unwrap();
        let port = bound.rsplit(':').next().unwrap().parse().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                if router.poll(zmq::POLLIN, 20).unwrap() > 0 {
                    let parts = router.recv_multipart(0).unwrap();
                    // The asker may have left.
                    let _ = router.send_multipart([&parts[0], &answer], 0);
                }
            }
        });
        Self { port, over, thread: Some(thread) }
    }
}

impl Drop for FakeListener {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = self.thread.take().unwrap().join();
    }
}

fn outer(service: &'static str, version: u32) -> Vec<u8> {
    rmp_serde::to_vec_named(&Outer { service, version, body: vec![0xc1; 40] }).unwrap()
}

// R044
#[test]
fn a_producer_that_answers_nonsense_costs_only_its_own_load() {
    let mut world = pair();
    let cases: [(Vec<u8>, LoadFailure, &str); 5] = [
        (outer("kv-connector", 99), LoadFailure::Incompatible, "protocol version: ours 2, theirs 99"),
        (
            outer("printer", 1),
            LoadFailure::HandshakeMalformed,
            "this is service \"printer\", not \"kv-connector\"",
        ),
        (outer("kv-connector", 2), LoadFailure::HandshakeMalformed, "handshake answer cannot be decoded"),
        (vec![0xc1; 100], LoadFailure::HandshakeMalformed, "handshake cannot be decoded"),
        (Vec::new(), LoadFailure::HandshakeMalformed, "handshake cannot be decoded"),
    ];
    for (i, (answer, reason, words)) in cases.into_iter().enumerate() {
        let fake = FakeListener::start(answer);
        let name = format!("r-{i}");
        let offer = world.prefill(P, &name, 11, &[7, 3, 4]);
        let forged = offer.forged(|p| p["remote_port"] = json!(fake.port));
        world.begin_load(D, &name, &forged, &[2, 9, 1]);
        let shown = format!("tcp://127.0.0.1:{}", fake.port);
        refuse_load(&mut world, &name, reason, &[words, &shown]);
        world.begin_load(D, &format!("{name} again"), &offer, &[2, 9, 1]);
        world.expect_loaded(D, &format!("{name} again"));
        world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
        world[D].assert_memory();
        world.released(P, offer.hold);
    }
    world.hand_over(P, D, "next");
}

fn ask(port: u16, frames: &[&[u8]]) -> Option<Vec<u8>> {
    let dealer = zmq::Context::new().socket(zmq::DEALER).unwrap();
    dealer.set_linger(0).unwrap();
    dealer.set_rcvtimeo(SOON.as_millis() as i32).unwrap();
    dealer.connect(&format!("tcp://127.0.0.1:{port}")).unwrap();
    dealer.send_multipart(frames, 0).unwrap();
    dealer.recv_bytes(0).ok()
}

/// Sends bytes as they are, and waits until the other side has let go of the connection or a while has passed.
fn throw(port: u16, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    // The other side may have seen enough before all of it was sent.
    let _ = stream.write_all(bytes);
    stream
}

// H-5, R104
#[test]
fn garbage_on_the_handshake_port_does_not_disturb_a_hand_over() {
    let mut world = World::of([Shape::slow("p"), Shape { valve: false, ..Shape::slow("d") }]);
    world[P].valves[0].allow(50_000);
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    world.until("the read is under way", SOON, |w| w[P].valves[0].is_stuck());

    let port = world[P].sched.handshake_port();
    let greeting = [&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0][..], b"NULL", &[0; 48]].concat();
    let ready = [&[4, 25, 5][..], b"READY\x0bSocket-Type\0\0\0\x06DEALER"].concat();
    let huge = [&[2][..], &(1u64 << 62).to_be_bytes(), &[0; 100]].concat();
    let open = [
        throw(port, b"GET / HTTP/1.1\r\n\r\n"),
        throw(port, &[0; 4096]),
        throw(port, &greeting[..7]),
        throw(port, &greeting),
        throw(port, &[&greeting[..], &[0xff; 1000]].concat()),
        throw(port, &[&greeting[..], &ready, &huge].concat()),
    ];

    let layout = world[D].layout.clone();
    let topology = Topology::of(1);
    let fingerprint = Fingerprint::of("toy", &layout);
    let query = Query {
        engine: EngineId::new("d").unwrap(),
        incarnation: Incarnation::from_random(5),
        rank: Rank(0),
        topology,
        wanted: EngineId::new("p").unwrap(),
    };
    let whole = query.encode(&fingerprint).unwrap();
    let far = Query { rank: Rank(3), ..query.clone() }.encode(&fingerprint).unwrap();
    let life = world[P].identity.incarnation;
    let refused = |frames: &[&[u8]]| {
        let bytes = ask(port, frames).expect("no answer");
        match Answer::decode(&bytes, &fingerprint, &query.wanted, life) {
            Err(error) => error.to_string(),
            Ok(card) => panic!("accepted: {card:?}"),
        }
    };
    assert!(
        ask(port, &[&whole]).is_some_and(|b| Answer::decode(&b, &fingerprint, &query.wanted, life).is_ok())
    );
    assert!(refused(&[b"garbage"]).contains("refused (Malformed): handshake cannot be decoded"));
    assert!(
        refused(&[&whole[..whole.len() / 2]]).contains("refused (Malformed): handshake cannot be decoded")
    );
    assert!(
        refused(&[&whole, b""]).contains("a query is 1 frame, this one has"),
        "{}",
        refused(&[&whole, b""])
    );
    assert!(refused(&[&far]).contains("rank-3 asks, but its engine has 1 ranks"), "{}", refused(&[&far]));
    let newer = outer("kv-connector", 99);
    assert!(refused(&[&newer]).contains("protocol version: producer 2, consumer 99"));
    // Too long to be read at all.
    let oversized = zmq::Context::new().socket(zmq::DEALER).unwrap();
    oversized.set_linger(0).unwrap();
    oversized.connect(&format!("tcp://127.0.0.1:{port}")).unwrap();
    oversized.send(vec![0; 8 << 20], 0).unwrap();

    world[P].valves[0].allow_all();
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world[D].assert_memory();
    world.released(P, offer.hold);
    let handshakes = world[P].sched.stats().handshakes;
    assert!(handshakes.refused[&RefusalCode::Malformed] >= 4, "{handshakes:?}");
    assert!(handshakes.refused[&RefusalCode::Version] >= 1, "{handshakes:?}");
    // A newcomer is served while the strangers are still connected.
    let newcomer = world.add(Shape { valve: false, ..Shape::slow("d-2") });
    world.hand_over(P, newcomer, "newcomer");
    drop(open);
    world.finish(D, "r");
    world.hand_over(P, D, "next");
}

// H-24, R104
#[test]
fn garbage_on_a_workers_port_does_not_disturb_a_hand_over() {
    let mut world = World::of([Shape::slow("p"), Shape { valve: false, ..Shape::slow("d") }]);
    world[P].valves[0].allow(50_000);
    let offer = world.prefill(P, "r", 11, &[7, 3, 4]);
    world.begin_load(D, "r", &offer, &[2, 9, 1]);
    world.until("the read is under way", SOON, |w| w[P].valves[0].is_stuck());

    let (port, nonce) = world[P].listening[0];
    let preface = {
        let mut preface = b"kvTCP\r\n\x1a\x01\0\0\0".to_vec();
        for granted in [4u32, 1 << 16, 16] {
            preface.extend_from_slice(&granted.to_le_bytes());
        }
        preface.extend_from_slice(&[0; 8]);
        preface.extend_from_slice(&[9; 16]);
        preface.extend_from_slice(&nonce);
        preface
    };
    assert_eq!(preface.len(), 64);
    let frame = |kind: u8, len: u32, body: &[u8]| {
        [&preface[..], &[kind, 0, 0, 0], &len.to_le_bytes(), &[0; 8], body].concat()
    };
    let mut version = preface.clone();
    version[8] = 2;
    let mut stranger = preface.clone();
    stranger[48..].fill(0xee);
    let open = [
        throw(port, b"GET / HTTP/1.1\r\n\r\n"),
        throw(port, &[0; 4096]),
        throw(port, &preface[..40]),
        throw(port, &version),
        throw(port, &stranger),
        // A message of 4 GiB, one that is never whole, an unknown kind, data that nobody asked for.
        throw(port, &frame(4, u32::MAX, &[0; 64])),
        throw(port, &frame(4, 100, &[0; 10])),
        throw(port, &frame(200, 0, &[])),
        throw(port, &frame(2, 64, &[7; 64])),
        // A read of a region that there is not, of 2^64 bytes.
        throw(port, &frame(1, 36, &[0xff; 36])),
        throw(port, &frame(1, 23, &[0xff; 23])),
        // A whole message that says nothing.
        throw(port, &frame(4, 5, b"hello")),
    ];
    // And one that speaks the transport's language, but not the workers'.
    let transport = TcpTransport::bind(TcpConfig::default()).unwrap();
    let address = [&b"ka\x01"[..], &port.to_le_bytes(), &nonce, &[9], b"127.0.0.1"].concat();
    let address = Address::from_bytes(address).unwrap();
    for message in [&b""[..], b"garbage", &[0xdf, 0xff, 0xff, 0xff, 0xff], &[0x91; 10_000]] {
        let peer = transport.connect(&address, SOON).unwrap();
        transport.send(peer, message.to_vec()).unwrap();
    }
    world.until("those who can be heard are shown out", SOON, |w| {
        w[P].workers[0].stats().readers.expelled >= 4
    });

    world[P].valves[0].allow_all();
    world.expect_loaded(D, "r");
    world.expect_moved(P, &[7, 3, 4], D, &[2, 9, 1]);
    world[D].assert_memory();
    world[P].assert_memory();
    world.released(P, offer.hold);
    let newcomer = world.add(Shape { valve: false, ..Shape::slow("d-2") });
    world.hand_over(P, newcomer, "newcomer");
    drop(open);
    world.finish(D, "r");
    world.hand_over(P, D, "next");
}
