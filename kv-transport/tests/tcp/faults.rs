//! Peers that are late, silent, slow, or gone.

use std::any::Any;
use std::io::ErrorKind;
use std::io::Write;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Event, LossReason, Memory, OpId, ReadError, ReadLimits, RegionId, Transport, TransportError,
};

use crate::support::*;

/// A server sends half of the data, the read ends, then comes the rest.
async fn late_data(limits: ReadLimits, end: impl FnOnce(&TcpTransport), expected: ReadError) {
    let client = transport();
    let (mut raw, peer) = Raw::serve(&client).await;
    let destination = Memory::allocate(300_000).unwrap();
    let region = client.register(destination.clone()).unwrap();
    let mut request =
        request(1, peer, &any_key(), region, vec![range(0, 0, 100_000), range(0, 150_000, 100_000)]);
    request.limits = limits;
    client.read(request).unwrap();
    let asked = raw.frame();
    let data = frame(DATA, 0, asked.id, &[1; 200_000]);
    raw.send(&data[..150_016]);
    if expected == ReadError::Cancelled {
        // Cancel in the middle of the chunk rather than before it.
        wait(|| contents(&destination)[199_999] == 1).await;
    }
    end(&client);
    let outcome = completion(&client, 1).await;
    assert_eq!((outcome.result, outcome.arrived.count()), (Err(expected), 0));

    // The destination belongs to its owner again.
    destination.write(0, &[7; 300_000]).unwrap();
    client.deregister(region).unwrap();
    raw.send(&data[150_016..]);
    raw.send_frame(END, 0, asked.id, &[]);
    raw.sync();
    assert!(contents(&destination) == vec![7; 300_000], "written after the completion");

    // The connection is as good as before.
    let region = client.register(destination.clone()).unwrap();
    client.read(crate::support::request(2, peer, &any_key(), region, vec![range(0, 10, 4)])).unwrap();
    let asked = raw.frame();
    assert_eq!(asked.kind, READ);
    raw.send_frame(DATA, 0, asked.id, b"next");
    raw.send_frame(END, 0, asked.id, &[]);
    assert_eq!(completion(&client, 2).await.result, Ok(()));
    assert_eq!(contents(&destination)[9..15], *b"\x07next\x07");
}

async fn wait(fact: impl Fn() -> bool) {
    let start = Instant::now();
    while !fact() {
        assert!(start.elapsed() < LIMIT, "waited in vain");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

const SHORT: Duration = Duration::from_millis(150);

#[tokio::test]
async fn t3_no_write_after_cancel() {
    late_data(PATIENT, |client| client.cancel(OpId(1)), ReadError::Cancelled).await;
}

#[tokio::test]
async fn t3_no_write_after_timeout() {
    late_data(ReadLimits { total: SHORT, stall: LIMIT }, |_| {}, ReadError::TimedOut).await;
}

#[tokio::test]
async fn t3_no_write_after_stall() {
    late_data(ReadLimits { total: LIMIT, stall: SHORT }, |_| {}, ReadError::Stalled).await;
}

#[tokio::test]
async fn t8_a_read_that_trickles_does_not_stall_but_times_out() {
    let client = transport();
    let (mut raw, peer) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(100_000).unwrap()).unwrap();
    let mut request = request(1, peer, &any_key(), region, vec![range(0, 0, 100_000)]);
    request.limits = ReadLimits { total: Duration::from_millis(600), stall: Duration::from_millis(300) };
    client.read(request).unwrap();
    let asked = raw.frame();
    let data = frame(DATA, 0, asked.id, &[1; 100_000]);
    raw.send(&data[..16]);
    let start = Instant::now();
    let trickle = async {
        for byte in &data[16..] {
            raw.send(&[*byte]);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        outcome = completion(&client, 1) => assert_eq!(outcome.result, Err(ReadError::TimedOut)),
        () = trickle => panic!("never ended"),
    }
    assert!(start.elapsed() > Duration::from_millis(450), "{:?}", start.elapsed());
}

#[tokio::test]
async fn t6_a_socket_closed_in_the_middle_of_a_chunk() {
    let config = TcpConfig { chunk_max_bytes: 1000, ..TcpConfig::default() };
    let client = TcpTransport::bind(config).unwrap();
    let (mut raw, peer) = Raw::serve(&client).await;
    let destination = Memory::allocate(4096).unwrap();
    let region = client.register(destination.clone()).unwrap();
    // Two chunks: the first holds ranges 0, 1 and a part of 2.
    let ranges = vec![range(0, 0, 400), range(500, 400, 400), range(0, 2000, 400), range(0, 3000, 400)];
    client.read(request(1, peer, &any_key(), region, ranges)).unwrap();
    client.read(request(2, peer, &any_key(), region, vec![range(0, 900, 10)])).unwrap();
    // The second read is asked for before the chunks of the first, or between them.
    let asked_of_first = |raw: &mut Raw| loop {
        let asked = raw.frame();
        if asked.body.len() > 24 + 12 {
            break asked;
        }
    };
    let asked = asked_of_first(&mut raw);
    raw.send_frame(DATA, 0, asked.id, &[5; 1000]);
    raw.send_frame(END, 0, asked.id, &[]);
    let asked = asked_of_first(&mut raw);
    raw.send(&frame(DATA, 0, asked.id, &[6; 600])[..16 + 450]);
    drop(raw);
    let mut outcomes = [event(&client).await, event(&client).await].map(|event| match event {
        Event::ReadCompleted { op, outcome } => (op.0, outcome),
        other => panic!("{other:?}"),
    });
    outcomes.sort_by_key(|(op, _)| *op);
    let lost = Err(ReadError::PeerLost(LossReason::ClosedByPeer));
    let arrived = &outcomes[0].1.arrived;
    assert_eq!((0..4).map(|index| arrived.contains(index)).collect::<Vec<_>>(), [true, true, false, false]);
    assert_eq!([&outcomes[0].1.result, &outcomes[1].1.result], [&lost, &lost]);
    assert_eq!(loss(&client, peer).await, LossReason::ClosedByPeer);
    client.deregister(region).unwrap();
    assert_eq!(contents(&destination)[..800], [5; 800]);
}

#[tokio::test]
async fn t8_a_silent_peer_is_lost() {
    let config = TcpConfig {
        keep_alive: Duration::from_millis(50),
        silence_limit: Duration::from_millis(300),
        ..TcpConfig::default()
    };
    let client = TcpTransport::bind(config).unwrap();
    let (mut raw, peer) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 10)])).unwrap();
    // As long as pings are answered, a slow answer is just that.
    let start = Instant::now();
    raw.0.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut asked = vec![0; 16 + 36];
    std::io::Read::read_exact(&mut raw.0, &mut asked).unwrap();
    raw.0.set_read_timeout(Some(LIMIT)).unwrap();
    while start.elapsed() < Duration::from_millis(600) {
        let ping = raw.take(16);
        assert_eq!(ping[0], PING);
        raw.send_frame(PONG, 0, 0, &[]);
    }
    let outcome = completion(&client, 1).await;
    assert_eq!(outcome.result, Err(ReadError::PeerLost(LossReason::Silent)));
    assert_eq!(loss(&client, peer).await, LossReason::Silent);
}

#[tokio::test]
async fn t8_quiet_peers_keep_each_other() {
    let config = TcpConfig {
        keep_alive: Duration::from_millis(20),
        silence_limit: Duration::from_millis(400),
        incoming_max: 1,
        ..TcpConfig::default()
    };
    let a = TcpTransport::bind(config.clone()).unwrap();
    let b = TcpTransport::bind(config).unwrap();
    let (b_at_a, a_at_b) = link(&a, &b).await;
    // One side is idle; later it is deaf as well, because it takes no messages.
    let quiet = tokio::time::timeout(Duration::from_millis(600), a.next_event()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    for number in 0..10 {
        a.send(b_at_a, vec![number]).unwrap();
    }
    let quiet = tokio::time::timeout(Duration::from_millis(900), a.next_event()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    for number in 0..10 {
        assert_eq!(event(&b).await, Event::Message { peer: a_at_b, bytes: vec![number] });
    }
}

#[tokio::test]
async fn t8_connecting_has_a_limit() {
    let client = transport();
    let (listener, address) = Raw::listen();
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
    let peer = client.connect(&address, Duration::from_millis(400)).unwrap();
    // Limits of reads run before the connection stands.
    let mut request = request(1, peer, &any_key(), region, vec![range(0, 0, 10)]);
    request.limits.total = SHORT;
    client.read(request).unwrap();
    let held = listener.accept().unwrap();
    assert_eq!(completion(&client, 1).await.result, Err(ReadError::TimedOut));
    assert_eq!(loss(&client, peer).await, LossReason::ConnectTimedOut);
    drop(held);
}

#[tokio::test]
async fn t8_messages_to_a_peer_that_reads_nothing_are_bounded() {
    let config = TcpConfig {
        message_queue_max: 50,
        serve_limit: Duration::from_millis(400),
        silence_limit: Duration::from_secs(60),
        ..TcpConfig::default()
    };
    let client = TcpTransport::bind(config).unwrap();
    let (raw, peer) = Raw::serve(&client).await;
    let start = Instant::now();
    let mut sent = 0;
    loop {
        assert!(sent < 500 && start.elapsed() < LIMIT, "{sent} messages were taken");
        match client.send(peer, vec![0; 1 << 20]) {
            Ok(()) => sent += 1,
            Err(TransportError::SendQueueFull { peer: full, queued: 50 }) if full == peer => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(loss(&client, peer).await, LossReason::SlowReader);
    drop(raw);
}

/// Memory whose end can be seen.
fn watched(len: usize) -> (Memory, Weak<dyn Any + Send + Sync>) {
    let mut owner = vec![3u8; len].into_boxed_slice();
    let base = owner.as_mut_ptr();
    let keep: Arc<dyn Any + Send + Sync> = Arc::new(owner);
    let weak = Arc::downgrade(&keep);
    #[allow(unsafe_code)] // Foreign memory is the only kind whose end can be watched.
    // SAFETY: the box lives in `keep`, and nobody holds a reference into it.
    let memory = unsafe { Memory::foreign(base, len, keep) };
    (memory, weak)
}

/// A server that is in the middle of a chunk far larger than all buffers, to a peer that has read its header.
async fn serving(serve_limit: Duration) -> (TcpTransport, Raw, RegionId, Weak<dyn Any + Send + Sync>) {
    let config = TcpConfig {
        chunk_max_bytes: 64 << 20,
        bytes_in_flight_per_peer: 64 << 20,
        serve_limit,
        silence_limit: Duration::from_secs(60),
        ..TcpConfig::default()
    };
    let server = TcpTransport::bind(config).unwrap();
    let (memory, weak) = watched(64 << 20);
    let region = server.register(memory).unwrap();
    let key = server.key(region).unwrap();
    let mut raw = Raw::connect(&server);
    assert!(matches!(event(&server).await, Event::Accepted { .. }));
    raw.send_frame(READ, 0, 1, &read_body(1, &key, &[(0, 64 << 20)]));
    raw.send_frame(READ, 0, 2, &read_body(1, &key, &[(0, 100)]));
    let head = raw.take(16);
    assert_eq!(head[..8], [DATA, 0, 0, 0, 0, 0, 0, 4]);
    (server, raw, region, weak)
}

#[tokio::test]
async fn t9_a_region_that_goes_during_a_read_yields_no_success() {
    let (server, mut raw, region, _) = serving(LIMIT).await;
    server.deregister(region).unwrap();
    raw.take(64 << 20);
    // After all bytes: they are not to be trusted. What was queued behind fails without any.
    assert_eq!(raw.frame(), Frame { kind: END, code: 1, id: 1, body: vec![] });
    assert_eq!(raw.frame(), Frame { kind: END, code: 1, id: 2, body: vec![] });
}

#[tokio::test]
async fn t9_data_that_is_not_to_be_trusted_is_no_success() {
    let client = transport();
    let (mut raw, peer) = Raw::serve(&client).await;
    let region = client.register(Memory::allocate(4096).unwrap()).unwrap();
    client.read(request(1, peer, &any_key(), region, vec![range(0, 0, 100)])).unwrap();
    let asked = raw.frame();
    raw.send_frame(DATA, 0, asked.id, &[1; 100]);
    raw.send_frame(END, 1, asked.id, &[]);
    let outcome = completion(&client, 1).await;
    assert_eq!((outcome.result, outcome.arrived.count()), (Err(ReadError::UnknownKey), 0));
}

#[tokio::test]
async fn t4_memory_lives_as_long_as_it_is_sent_from() {
    let (server, raw, region, memory) = serving(LIMIT).await;
    server.deregister(region).unwrap();
    assert!(memory.strong_count() > 0, "freed while in use");
    drop(raw);
    assert!(matches!(event(&server).await, Event::PeerLost { .. }));
    wait(|| memory.strong_count() == 0).await;
}

#[tokio::test]
async fn t8_serving_a_slow_reader_ends() {
    let (server, mut raw, region, memory) = serving(Duration::from_millis(300)).await;
    let Event::PeerLost { reason, .. } = event(&server).await else { panic!() };
    assert_eq!(reason, LossReason::SlowReader);
    server.deregister(region).unwrap();
    wait(|| memory.strong_count() == 0).await;
    raw.closed();
}

#[tokio::test]
async fn t7_a_cancelled_request_is_answered_without_data() {
    let (_server, mut raw, _, _) = serving(LIMIT).await;
    raw.send_frame(CANCEL, 0, 1, &[]);
    raw.sync_after(64 << 20);
    assert_eq!(raw.frame(), Frame { kind: END, code: 0, id: 1, body: vec![] });
    // The pong to our ping goes first, then the end of the second.
    let mut frames = [raw.frame(), raw.frame()];
    frames.sort_by_key(|frame| frame.kind);
    assert_eq!(frames[0], Frame { kind: END, code: 3, id: 2, body: vec![] });
}

impl Raw {
    /// Sends a ping, then takes the rest of some data.
    fn sync_after(&mut self, len: usize) {
        self.send_frame(PING, 0, 1, &[]);
        self.take(len);
    }
}

#[tokio::test]
async fn t8_messages_that_nobody_takes_stop_the_sender_and_none_is_lost() {
    let config = TcpConfig { incoming_bytes: 1 << 20, ..TcpConfig::default() };
    let server = TcpTransport::bind(config).unwrap();
    let mut raw = Raw::connect(&server);
    let Event::Accepted { peer } = event(&server).await else { panic!() };
    raw.0.set_nonblocking(true).unwrap();
    let message = frame(MESSAGE, 0, 0, &pattern(100_000, 5));
    let (mut written, mut last) = (0, Instant::now());
    while last.elapsed() < Duration::from_millis(300) {
        match raw.0.write(&message[written % message.len()..]) {
            Ok(bytes) => (written, last) = (written + bytes, Instant::now()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Err(error) => panic!("{error}"),
        }
        assert!(written < 64 << 20, "nothing holds the sender back");
    }
    raw.0.set_nonblocking(false).unwrap();
    let total = written.div_ceil(message.len());
    let rest = message[written % message.len()..].to_vec();
    let mut writer = raw.0.try_clone().unwrap();
    let rest = if written % message.len() == 0 { vec![] } else { rest };
    let sending = std::thread::spawn(move || writer.write_all(&rest).unwrap());
    for _ in 0..total {
        assert_eq!(event(&server).await, Event::Message { peer, bytes: message[16..].to_vec() });
    }
    sending.join().unwrap();
}
