//! The dialler over real sockets, with peers that are absent, silent, strange or wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{LIFE, PLENTY, SHORT, card, card_with, dial, fingerprint, id, listen, outer};
use kv_handshake::{Contact, DialError, Dialler, Listener, ListenerConfig};
use kv_proto::handshake::{Answer, HandshakeError, RefusalCode, SERVICE};
use kv_proto::{Incarnation, LoadFailure, PROTOCOL_VERSION, Topology};

/// A producer that answers one query with whatever it was told to, or not at all.
struct Fake {
    port: u16,
    // Its end tells the thread to go.
    stay: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    fn answering(frames: Option<Vec<Vec<u8>>>) -> Self {
        let context = zmq::Context::new();
        let router = context.socket(zmq::ROUTER).unwrap();
        router.set_linger(0).unwrap();
        router.set_rcvtimeo(PLENTY.as_millis() as i32).unwrap();
        router.bind("tcp://127.0.0.1:0").unwrap();
        let endpoint = router.get_last_endpoint().unwrap().unwrap();
        let port = endpoint.rsplit_once(':').unwrap().1.parse().unwrap();
        let (stay, go) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let query = router.recv_multipart(0).unwrap();
            if let Some(frames) = frames {
                router.send_multipart([vec![query[0].clone()], frames].concat(), 0).unwrap();
            }
            let _ = go.recv();
        });
        Self { port, stay: Some(stay), thread: Some(thread) }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        drop(self.stay.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A TCP service that says its piece to the first who connects, and hangs up or keeps the line.
fn tcp_service(says: &'static [u8], hangs_up: bool) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(says);
        if !hangs_up {
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    (port, thread)
}

#[track_caller]
fn handshake(error: DialError) -> HandshakeError {
    match error {
        DialError::Handshake { source, .. } => source,
        other => panic!("not an answer: {other:?}"),
    }
}

// R042
#[test]
fn a_peer_is_reached_under_every_spelling_of_its_address() {
    let dialler = Dialler::new();
    let four = listen();
    let config = ListenerConfig { bind_host: "[::1]".to_owned(), ..ListenerConfig::default() };
    let six = Listener::bind(config, card()).unwrap();
    assert!(six.local_addr().is_ipv6());
    for (host, port) in [
        ("127.0.0.1", four.port()),
        ("localhost", four.port()),
        ("::1", six.port()),
        ("[::1]", six.port()),
        ("[0:0:0:0:0:0:0:1]", six.port()),
    ] {
        let mut dial = dial(port);
        dial.host = host.to_owned();
        assert_eq!(dialler.dial(&dial).unwrap(), card(), "{host}");
    }
}

#[test]
fn where_nothing_listens_the_error_comes_at_once_and_names_the_address() {
    for (host, shown) in [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("[::1]", "[::1]")] {
        // Bound, but not listening: nobody else can get the port meanwhile.
        let holder = std::net::UdpSocket::bind((host.trim_matches(['[', ']']), 0)).unwrap();
        let mut dial = dial(holder.local_addr().unwrap().port());
        dial.host = host.to_owned();
        let start = Instant::now();
        let error = Dialler::new().dial(&dial).unwrap_err();
        assert!(start.elapsed() < PLENTY / 2, "a refused connection is tried until the limit");
        assert_eq!(
            error.to_string(),
            format!("no answer from tcp://{shown}:{} (limit 30s): no connection could be made", dial.port)
        );
        assert_eq!(error.failure(), LoadFailure::HandshakeUnreachable);
    }
}

// R036
#[test]
fn a_silent_peer_costs_the_limit_and_delays_nobody_else() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let good = listen();
    let dialler = Dialler::new();
    // The one that hangs is let go only after the others are done: no measured time decides.
    let hanging = {
        let (dialler, dial) = (dialler.clone(), dial(silent.local_addr().unwrap().port()));
        std::thread::spawn(move || dialler.dial(&dial))
    };
    let line = silent.accept().unwrap();
    let others: Vec<_> = (0..20)
        .map(|_| {
            let (dialler, dial) = (dialler.clone(), dial(good.port()));
            std::thread::spawn(move || dialler.dial(&dial))
        })
        .collect();
    for other in others {
        assert_eq!(other.join().unwrap().unwrap(), card());
    }
    assert!(!hanging.is_finished(), "the dial to the silent peer ended before its limit");
    drop(line);
    let error = hanging.join().unwrap().unwrap_err();
    assert!(matches!(error, DialError::NoAnswer { contact: Contact::Connected, .. }), "{error:?}");
}

// H-20
#[test]
fn the_limit_holds_over_connection_and_answer() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let zeromq = Fake::answering(None);
    for (port, contact) in
        [(tcp.local_addr().unwrap().port(), Contact::Connected), (zeromq.port, Contact::Greeted)]
    {
        let mut dial = dial(port);
        dial.limit = SHORT;
        let start = Instant::now();
        let error = Dialler::new().dial(&dial).unwrap_err();
        let took = start.elapsed();
        assert!(took >= SHORT && took < SHORT + Duration::from_secs(5), "{took:?}");
        assert_eq!(
            error.to_string(),
            format!("no answer from tcp://127.0.0.1:{port} (limit 300ms): {contact}")
        );
    }
    let mut dial = dial(zeromq.port);
    dial.limit = Duration::ZERO;
    assert!(matches!(Dialler::new().dial(&dial), Err(DialError::NoAnswer { .. })));
    // A limit beyond any clock is no reason to panic.
    let good = listen();
    dial.port = good.port();
    dial.limit = Duration::MAX;
    assert_eq!(Dialler::new().dial(&dial).unwrap(), card());
}

// R039
#[test]
fn services_that_are_not_zeromq_end_with_a_clear_error() {
    let curve: &[u8] = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0CURVE\0\0\0\0";
    for (says, reached) in [
        (&b""[..], Contact::Connected),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", Contact::Connected),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Contact::Connected),
        (&[0; 3000], Contact::Connected),
        (&[0xff; 3000], Contact::Connected),
        // Begins like ZeroMQ, and then says no more.
        (curve, Contact::Greeted),
    ] {
        for hangs_up in [true, false] {
            let (port, thread) = tcp_service(says, hangs_up);
            let mut dial = dial(port);
            dial.limit = SHORT;
            let start = Instant::now();
            let error = Dialler::new().dial(&dial).unwrap_err();
            assert!(start.elapsed() < SHORT + Duration::from_secs(5), "{says:?}");
            assert!(error.to_string().contains(&format!("tcp://127.0.0.1:{port}")), "{error}");
            let DialError::NoAnswer { contact, .. } = error else { panic!("{says:?}: {error:?}") };
            assert_eq!(contact, reached, "{says:?}");
            thread.join().unwrap();
        }
    }
}

#[test]
fn answers_that_make_no_sense_are_malformed_and_name_the_address() {
    let accepted = Answer::Accepted(card()).encode(Some(&fingerprint())).unwrap();
    let mut unsound = card();
    unsound.workers.pop();
    let unsound = Answer::Accepted(unsound).encode(Some(&fingerprint())).unwrap();
    let no_fingerprint = Answer::Accepted(card()).encode(None).unwrap();
    for frames in [
        vec![b"".to_vec()],
        vec![b"garbage".to_vec()],
        vec![outer("another", PROTOCOL_VERSION, b"")],
        vec![outer(SERVICE, PROTOCOL_VERSION, b"\xc1")],
        vec![accepted[..accepted.len() - 1].to_vec()],
        vec![accepted.clone(), accepted.clone()],
        vec![accepted.clone(); 100],
        vec![unsound],
        vec![no_fingerprint],
    ] {
        let fake = Fake::answering(Some(frames));
        let error = Dialler::new().dial(&dial(fake.port)).unwrap_err();
        let start = format!("handshake with tcp://127.0.0.1:{}: ", fake.port);
        assert!(error.to_string().starts_with(&start), "{error}");
        assert_eq!(error.failure(), LoadFailure::HandshakeMalformed, "{error}");
    }
}

// H-4
#[test]
fn another_version_is_told_as_such_not_as_a_decoding_error() {
    for body in [&b""[..], b"\xc1\xc1\xc1", &[0x9f; 5000]] {
        let fake = Fake::answering(Some(vec![outer(SERVICE, PROTOCOL_VERSION + 1, body)]));
        let error = Dialler::new().dial(&dial(fake.port)).unwrap_err();
        assert_eq!(error.failure(), LoadFailure::Incompatible);
        assert_eq!(handshake(error), HandshakeError::Version { theirs: PROTOCOL_VERSION + 1 });
    }
}

// H-5, R038
#[test]
fn the_wrong_engine_and_the_wrong_life_are_told_with_both_names() {
    let listener = listen();
    let dialler = Dialler::new();
    let mut lost = dial(listener.port());
    lost.query.wanted = id("p-9");
    let error = dialler.dial(&lost).unwrap_err();
    assert_eq!(error.failure(), LoadFailure::WrongPeer);
    assert_eq!(
        error.to_string(),
        format!(
            "handshake with tcp://127.0.0.1:{}: refused (WrongEngine): engine p-9 is wanted, but this is engine p-0 \
             in life {LIFE}",
            listener.port()
        )
    );
    let mut late = dial(listener.port());
    late.wanted_life = Incarnation::from_random(9);
    let error = dialler.dial(&late).unwrap_err();
    assert_eq!(error.failure(), LoadFailure::WrongPeer);
    assert_eq!(
        error.to_string(),
        format!(
            "handshake with tcp://127.0.0.1:{}: wanted engine p-0 in life 0000000000000009, but p-0 in life {LIFE} \
             answers",
            listener.port()
        )
    );
}

// H-4
#[test]
fn engines_that_do_not_fit_are_told_with_the_fields() {
    let other = fingerprint().with("model", "model-b");
    let listener = Listener::bind(ListenerConfig::default(), card_with(2, &other, b"a")).unwrap();
    let error = Dialler::new().dial(&dial(listener.port())).unwrap_err();
    assert_eq!(error.failure(), LoadFailure::Incompatible);
    let HandshakeError::Incompatible { differences } = handshake(error) else { panic!("another error") };
    assert_eq!(differences.len(), 1);
    assert_eq!(differences[0].to_string(), "model: ours model-a, theirs model-b");

    let listener = listen();
    let mut wide = dial(listener.port());
    wide.query.topology = Topology { stages: 3, ..Topology::of(4) };
    let error = Dialler::new().dial(&wide).unwrap_err();
    assert_eq!(error.failure(), LoadFailure::Incompatible);
    let HandshakeError::Refused { code: RefusalCode::Incompatible, message } = handshake(error) else {
        panic!("another error")
    };
    assert_eq!(message, "topology: 4 ranks cannot be shared out over 3 pipeline stages");
}

#[test]
fn hosts_that_name_nobody_are_told_as_such() {
    let dialler = Dialler::new();
    let error = |host: &str, port: u16| {
        let mut dial = dial(port);
        dial.host = host.to_owned();
        dialler.dial(&dial).unwrap_err()
    };
    let unknown = error("no-such-host.invalid", 7);
    assert!(matches!(unknown, DialError::Resolve { .. }), "{unknown:?}");
    let text =
        "tcp://no-such-host.invalid:7 cannot be dialled: host \"no-such-host.invalid\" does not resolve: ";
    assert!(unknown.to_string().starts_with(text), "{unknown}");
    assert_eq!(unknown.failure(), LoadFailure::HandshakeUnreachable);
    for (host, port) in [("", 7), ("[]", 7), ("0.0.0.0", 7), ("::", 7), ("[::]", 7), ("127.0.0.1", 0)] {
        let error = error(host, port);
        assert!(matches!(error, DialError::NotAnAddress { .. }), "{host}:{port}: {error:?}");
    }
    for host in ["a b", "a\0b", "tcp://127.0.0.1", "127.0.0.1:80", "::1:2:3:4:5:6:7:8:9", &"x".repeat(300)] {
        let error = error(host, 7);
        assert!(matches!(error, DialError::Resolve { .. }), "{host:?}: {error:?}");
    }
}

#[test]
fn many_dials_leave_no_sockets_behind() {
    // More than a context has sockets for, if each kept its own.
    let listener = listen();
    let dialler = Dialler::new();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (dialler, dial) = (dialler.clone(), dial(listener.port()));
            std::thread::spawn(move || {
                for _ in 0..150 {
                    assert_eq!(dialler.dial(&dial).unwrap(), card());
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let nobody = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let dead = dial(nobody.local_addr().unwrap().port());
    for _ in 0..400 {
        let error = dialler.dial(&dead).unwrap_err();
        assert!(matches!(error, DialError::NoAnswer { .. }), "{error:?}");
    }
    assert_eq!(dialler.dial(&dial(listener.port())).unwrap(), card());
}
