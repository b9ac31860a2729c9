//! The listener over real sockets, with honest, broken and hostile peers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;

use std::io::Write;
use std::net::Shutdown;
use std::sync::mpsc;
use std::time::Duration;

use common::{
    LIFE, PLENTY, RawPeer, card, card_with, client, dial, fingerprint, frame, greeting, id, listen,
    query_bytes, ready, until,
};
use kv_handshake::{Dialler, ListenError, Listener, ListenerConfig};
use kv_proto::handshake::{Answer, EngineCard, HandshakeError, RefusalCode};

fn read(bytes: &[u8]) -> Result<EngineCard, HandshakeError> {
    Answer::decode(bytes, &fingerprint(), &id("p-0"), LIFE)
}

#[track_caller]
fn is_malformed(bytes: &[u8]) {
    match read(bytes) {
        Err(HandshakeError::Refused { code: RefusalCode::Malformed, .. }) => {}
        other => panic!("not refused as malformed: {other:?}"),
    }
}

fn config(host: &str, port: u16) -> ListenerConfig {
    ListenerConfig { bind_host: host.to_owned(), port, ..ListenerConfig::default() }
}

/// Drops it on another thread, so that a drop that hangs is a failed test.
#[track_caller]
fn drops_in_time(listener: Listener) {
    let (done, dropped) = mpsc::channel();
    std::thread::spawn(move || {
        drop(listener);
        done.send(()).unwrap();
    });
    dropped.recv_timeout(Duration::from_secs(10)).expect("dropping the listener hangs");
}

#[test]
fn it_can_be_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Listener>();
    shared::<Dialler>();
}

#[test]
fn req_and_dealer_both_get_answers_in_their_own_form() {
    let listener = listen();
    let context = zmq::Context::new();
    let req = client(&context, zmq::REQ, listener.port());
    req.send(query_bytes(), 0).unwrap();
    assert_eq!(read(&req.recv_bytes(0).unwrap()), Ok(card()));
    req.send("", 0).unwrap();
    is_malformed(&req.recv_bytes(0).unwrap());
    let dealer = client(&context, zmq::DEALER, listener.port());
    dealer.send(query_bytes(), 0).unwrap();
    let parts = dealer.recv_multipart(0).unwrap();
    assert_eq!(parts.len(), 1);
    assert_eq!(read(&parts[0]), Ok(card()));
    // A DEALER that plays REQ gets its delimiter back.
    dealer.send_multipart([b"".to_vec(), query_bytes()], 0).unwrap();
    let parts = dealer.recv_multipart(0).unwrap();
    assert_eq!((parts.len(), parts[0].len()), (2, 0));
    assert_eq!(read(&parts[1]), Ok(card()));
    assert_eq!(listener.stats().accepted, 3);
}

// H-5, R089
#[test]
fn each_query_gets_exactly_one_answer_whatever_it_is() {
    let listener = listen();
    let context = zmq::Context::new();
    let dealer = client(&context, zmq::DEALER, listener.port());
    let good = query_bytes();
    let mut queries: Vec<Vec<Vec<u8>>> = vec![
        vec![b"".to_vec()],
        vec![b"".to_vec(), b"".to_vec()],
        vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()],
        vec![good.clone(), good.clone()],
        vec![b"".to_vec(), good.clone(), good.clone()],
        vec![good.clone(); 1000],
        vec![vec![0xff; 1 << 20]],
        vec![vec![0x91; 1 << 16]],
    ];
    queries.extend((1..good.len()).map(|n| vec![good[..n].to_vec()]));
    let bad = queries.len() as u64;
    for (i, query) in queries.into_iter().enumerate() {
        dealer.send_multipart(query, 0).unwrap();
        let parts = dealer.recv_multipart(0).unwrap();
        assert!(parts.len() <= 2, "answer {i} has {} frames", parts.len());
        is_malformed(parts.last().unwrap());
    }
    // The next answer is that of the next query, so none had two.
    dealer.send(&good, 0).unwrap();
    assert_eq!(read(&dealer.recv_bytes(0).unwrap()), Ok(card()));
    let stats = listener.stats();
    assert_eq!(stats.accepted, 1);
    assert_eq!(stats.refused.into_iter().collect::<Vec<_>>(), [(RefusalCode::Malformed, bad)]);
    assert_eq!(stats.dropped_replies, 0);
}

// H-5
#[test]
fn tcp_peers_that_speak_something_else_stop_nobody() {
    let listener = listen();
    let greeted = [greeting(), ready()].concat();
    let mut kinds: Vec<Vec<u8>> = vec![
        vec![],
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"SSH-2.0-x\r\n".to_vec(),
        vec![0; 4096],
        vec![0xff; 4096],
        (0..=255).cycle().take(10_000).collect(),
        greeting(),
        // A greeting of a version to come, one of another mechanism, and a command that is none.
        [&greeting()[..10], &[9; 54]].concat(),
        [&greeting()[..12], b"CURVE", &[0; 47]].concat(),
        [greeting(), vec![4, 5, 200, 1, 2, 3, 4]].concat(),
        [&greeted[..], &[0xff; 64]].concat(),
        [&greeted[..], &frame(b"half")[..11]].concat(),
    ];
    kinds.extend((1..greeted.len()).map(|n| greeted[..n].to_vec()));
    let dialler = Dialler::new();
    let mut open = Vec::new();
    for kind in &kinds {
        let mut peer = RawPeer::connect(listener.port());
        // The listener may hang up in the middle.
        let _ = peer.0.write_all(kind);
        open.push(peer);
    }
    assert_eq!(dialler.dial(&dial(listener.port())).unwrap(), card());
    for peer in &open {
        let _ = peer.0.shutdown(Shutdown::Both);
    }
    assert_eq!(dialler.dial(&dial(listener.port())).unwrap(), card());
    drops_in_time(listener);
}

// H-5
#[test]
fn peers_that_ask_and_vanish_cost_nothing() {
    let listener = listen();
    for _ in 0..200 {
        let mut peer = RawPeer::connect(listener.port());
        peer.0.write_all(&[greeting(), ready(), frame(&query_bytes())].concat()).unwrap();
    }
    assert_eq!(Dialler::new().dial(&dial(listener.port())).unwrap(), card());
    assert!(listener.is_running());
}

#[test]
fn a_frame_that_claims_too_much_ends_its_connection_before_it_is_sent() {
    let listener = listen();
    let mut peer = RawPeer::greet(listener.port());
    // Flag: eight-byte length; the length; nothing more.
    let claim = (ListenerConfig::default().query_max_bytes as u64 + 1).to_be_bytes();
    peer.0.write_all(&[&[2], &claim[..]].concat()).unwrap();
    assert!(peer.is_closed_within(Duration::from_secs(10)), "the listener waits for more than it allows");
    let mut peer = RawPeer::greet(listener.port());
    peer.0.write_all(&[&[2], &(1u64 << 60).to_be_bytes()[..]].concat()).unwrap();
    assert!(peer.is_closed_within(Duration::from_secs(10)), "the listener waits for an exabyte");
    assert_eq!(Dialler::new().dial(&dial(listener.port())).unwrap(), card());
}

#[test]
fn a_peer_that_never_greets_is_let_go() {
    let config = ListenerConfig { greeting_limit: Duration::from_millis(50), ..ListenerConfig::default() };
    let listener = Listener::bind(config, card()).unwrap();
    let mut peer = RawPeer::connect(listener.port());
    assert!(peer.is_closed_within(Duration::from_secs(10)), "a silent connection is kept");
}

// R035
#[test]
fn answers_to_a_peer_that_does_not_read_are_dropped_and_others_are_served() {
    let card = card_with(2, &fingerprint(), &vec![7; 256 << 10]);
    let listener = Listener::bind(ListenerConfig::default(), card.clone()).unwrap();
    let mut deaf = RawPeer::greet(listener.port());
    let queries = frame(&query_bytes()).repeat(300);
    deaf.0.write_all(&queries).unwrap();
    until("all queries answered", || listener.stats().accepted == 300);
    assert!(
        listener.stats().dropped_replies > 0,
        "150 MiB of answers are kept for a peer that does not read"
    );
    assert_eq!(Dialler::new().dial(&dial(listener.port())).unwrap(), card);
    drops_in_time(listener);
}

// H-5
#[test]
fn a_peer_that_asks_one_at_a_time_gets_every_answer_however_fast_it_asks() {
    let config = ListenerConfig { waiting_max: 1, ..ListenerConfig::default() };
    let listener = Listener::bind(config, card()).unwrap();
    let context = zmq::Context::new();
    // Made once: the faster it asks, the less libzmq looks at what it has told itself meanwhile.
    let query = query_bytes();
    for _ in 0..30 {
        let dealer = client(&context, zmq::DEALER, listener.port());
        for _ in 0..300 {
            dealer.send(&query, 0).unwrap();
            let answer = dealer.recv_bytes(0);
            assert!(
                answer.is_ok(),
                "an answer was dropped though all before it were read: {:?}",
                listener.stats()
            );
        }
    }
    assert_eq!(listener.stats().dropped_replies, 0);
}

// R107
#[test]
fn a_draining_engine_refuses_and_can_come_back() {
    let listener = listen();
    let dialler = Dialler::new();
    listener.set_available(false);
    let error = dialler.dial(&dial(listener.port())).unwrap_err();
    let text = format!(
        "handshake with tcp://127.0.0.1:{}: refused (Unavailable): engine p-0 in life 0000000000001111 is not ready, \
         or is draining",
        listener.port()
    );
    assert_eq!(error.to_string(), text);
    assert_eq!(error.failure(), kv_proto::LoadFailure::HandshakeRefused);
    listener.set_available(true);
    assert_eq!(dialler.dial(&dial(listener.port())).unwrap(), card());
    assert_eq!(listener.stats().refused.into_iter().collect::<Vec<_>>(), [(RefusalCode::Unavailable, 1)]);
}

#[test]
fn a_drop_ends_the_thread_and_frees_the_port_whatever_peers_do() {
    let listener = listen();
    let port = listener.port();
    let context = zmq::Context::new();
    let _silent = RawPeer::connect(port);
    let _greeted = RawPeer::greet(port);
    let mut half = RawPeer::greet(port);
    half.0.write_all(&frame(&query_bytes())[..40]).unwrap();
    let asker = client(&context, zmq::DEALER, port);
    for _ in 0..1000 {
        asker.send(query_bytes(), 0).unwrap();
    }
    let first = asker.recv_bytes(0).unwrap();
    assert_eq!(read(&first), Ok(card()));
    drops_in_time(listener);
    // A peer that goes on asking must not be answered by the next one on that port: it has a socket of its own.
    let reborn = Listener::bind(config("127.0.0.1", port), card()).unwrap();
    assert_eq!(Dialler::new().dial(&dial(port)).unwrap(), card());
    drops_in_time(reborn);
}

#[test]
fn a_port_in_use_is_named_with_the_field_to_change() {
    let listener = listen();
    let port = listener.port();
    let error = Listener::bind(config("127.0.0.1", port), card()).unwrap_err();
    assert!(matches!(error, ListenError::PortInUse { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        format!(
            "tcp://127.0.0.1:{port} cannot be bound: port {port} is in use; change `port` in the listener's \
             configuration, or set it to 0 and let the system choose"
        )
    );
    // By something else than ZeroMQ, too.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let error = Listener::bind(config("127.0.0.1", port), card()).unwrap_err();
    assert!(matches!(error, ListenError::PortInUse { .. }), "{error:?}");
}

#[test]
fn hosts_that_are_wrong_or_elsewhere_are_named() {
    let bind = |host: &str| Listener::bind(config(host, 0), card()).unwrap_err();
    let error = bind("no-such-host.invalid");
    assert!(matches!(error, ListenError::Resolve { .. }), "{error:?}");
    assert!(
        error.to_string().starts_with("bind_host \"no-such-host.invalid\" (port 0) does not resolve"),
        "{error}"
    );
    for host in ["", "*", "[]"] {
        assert!(matches!(bind(host), ListenError::Resolve { .. }), "{host:?}");
    }
    // Addresses set aside for documentation are nobody's.
    for (host, shown) in [("192.0.2.1", "tcp://192.0.2.1:0"), ("[2001:db8::1]", "tcp://[2001:db8::1]:0")] {
        let error = bind(host);
        assert!(matches!(error, ListenError::NotLocal { .. }), "{error:?}");
        assert!(
            error.to_string().starts_with(&format!("{shown} cannot be bound: bind_host is no address")),
            "{error}"
        );
    }
}

// R030
#[test]
fn unsound_and_unsendable_cards_are_refused_at_the_start() {
    let mut short = card();
    short.workers.pop();
    let error = Listener::bind(ListenerConfig::default(), short).unwrap_err();
    assert!(matches!(error, ListenError::Card(_)), "{error:?}");
    let huge = card_with(2, &fingerprint(), &vec![0; 9 << 20]);
    let error = Listener::bind(ListenerConfig::default(), huge).unwrap_err();
    assert!(error.to_string().contains("longer than the 16777216 allowed"), "{error}");
}

// R040
#[test]
fn wildcards_and_names_can_be_bound() {
    for host in ["0.0.0.0", "localhost"] {
        let listener = Listener::bind(config(host, 0), card()).unwrap();
        assert_ne!(listener.port(), 0);
        let mut dial = dial(listener.port());
        dial.host = "localhost".to_owned();
        dial.limit = PLENTY;
        assert_eq!(Dialler::new().dial(&dial).unwrap(), card(), "{host}");
    }
}
