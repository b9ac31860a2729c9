//! Small reads whose request the caller's own thread writes. The number of their chunk tells them from others.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{Address, Event, Memory, PeerId, ReadError, ReadLimits, RegionId, Transport};

use crate::support::*;

/// A client that does not look at its sockets by itself for a long time, and a peer of it.
async fn drowsy() -> (TcpTransport, Raw, PeerId, RegionId, Memory) {
    let config = TcpConfig {
        keep_alive: Duration::from_secs(100),
        silence_limit: Duration::from_secs(300),
        ..TcpConfig::default()
    };
    let client = TcpTransport::bind(config).unwrap();
    let (mut raw, peer) = Raw::serve(&client).await;
    raw.sync();
    let memory = Memory::allocate(1 << 20).unwrap();
    let region = client.register(memory.clone()).unwrap();
    (client, raw, peer, region, memory)
}

fn is_posted(frame: &Frame) -> bool {
    assert_eq!(frame.kind, READ);
    frame.id >> 63 == 1
}

/// A way to a transport that counts the requests which callers' threads have written.
fn counting(to: &TcpTransport) -> (Address, Arc<AtomicU64>) {
    let (port, nonce) = parse_address(&to.address());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address =
        make_address("127.0.0.1", listener.local_addr().unwrap().port(), &nonce.try_into().unwrap());
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            far.set_nodelay(true).unwrap();
            near.set_nodelay(true).unwrap();
            let (back, forth) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut &forth, &mut &back));
            let count = Arc::clone(&counted);
            std::thread::spawn(move || hand_on(near, far, &count));
        }
    });
    (address, count)
}

fn hand_on(mut near: TcpStream, mut far: TcpStream, count: &AtomicU64) -> std::io::Result<()> {
    let mut preface = [0; 64];
    near.read_exact(&mut preface)?;
    far.write_all(&preface)?;
    loop {
        let mut head = [0; 16];
        near.read_exact(&mut head)?;
        let len = u32::from_le_bytes(head[4..8].try_into().unwrap());
        let mut body = vec![0; len as usize];
        near.read_exact(&mut body)?;
        let frame = Frame {
            kind: head[0],
            code: head[1],
            id: u64::from_le_bytes(head[8..].try_into().unwrap()),
            body,
        };
        count.fetch_add(u64::from(frame.kind == READ && is_posted(&frame)), Ordering::Relaxed);
        far.write_all(&[&head[..], &frame.body].concat())?;
    }
}

/// Reads until the short way is taken, which it is once the connection's task sleeps. Returns the request of that read.
async fn posted(
    client: &TcpTransport,
    raw: &mut Raw,
    peer: PeerId,
    region: RegionId,
    limits: ReadLimits,
) -> (u64, Frame) {
    for op in 1..=1000 {
        let mut small = request(op, peer, &any_key(), region, vec![range(0, 0, 4)]);
        small.limits = limits;
        client.read(small).unwrap();
        let asked = raw.frame();
        if is_posted(&asked) {
            return (op, asked);
        }
        raw.send_frame(DATA, 0, asked.id, b"seen");
        raw.send_frame(END, 0, asked.id, &[]);
        assert_eq!(completion(client, op).await.result, Ok(()));
    }
    panic!("no read took the short way");
}

#[tokio::test]
async fn a_posted_read_is_answered() {
    let (client, mut raw, peer, region, memory) = drowsy().await;
    let (op, asked) = posted(&client, &mut raw, peer, region, PATIENT).await;
    raw.send_frame(DATA, 0, asked.id, b"here");
    raw.send_frame(END, 0, asked.id, &[]);
    assert_eq!(completion(&client, op).await.result, Ok(()));
    assert_eq!(contents(&memory)[..5], *b"here\0");
    client.deregister(region).unwrap();
}

#[tokio::test]
async fn t8_a_posted_read_keeps_its_limits_though_nothing_else_would_wake_the_task() {
    let short = Duration::from_millis(200);
    for (limits, error) in [
        (ReadLimits { total: LIMIT, stall: short }, ReadError::Stalled),
        (ReadLimits { total: short, stall: LIMIT }, ReadError::TimedOut),
    ] {
        let (client, mut raw, peer, region, _) = drowsy().await;
        let (op, asked) = posted(&client, &mut raw, peer, region, limits).await;
        let outcome = completion(&client, op).await;
        assert_eq!((outcome.result, outcome.arrived.count()), (Err(error), 0));
        let cancelled = raw.frame();
        assert_eq!((cancelled.kind, cancelled.id), (CANCEL, asked.id));
    }
}

#[tokio::test]
async fn t3_t7_a_posted_read_that_was_cancelled_is_not_written_any_more() {
    let (client, mut raw, peer, region, memory) = drowsy().await;
    let (op, asked) = posted(&client, &mut raw, peer, region, PATIENT).await;
    client.cancel(kv_transport::OpId(op));
    assert_eq!(completion(&client, op).await.result, Err(ReadError::Cancelled));
    memory.write(0, &[7; 8]).unwrap();
    raw.send_frame(DATA, 0, asked.id, b"late");
    raw.send_frame(END, 0, asked.id, &[]);
    assert_eq!(raw.frame().kind, CANCEL);
    raw.sync();
    assert_eq!(contents(&memory)[..8], [7; 8]);
}

#[tokio::test]
async fn t6_posted_reads_end_with_their_peer() {
    let (client, mut raw, peer, region, _) = drowsy().await;
    let (op, _) = posted(&client, &mut raw, peer, region, PATIENT).await;
    drop(raw);
    assert!(matches!(completion(&client, op).await.result, Err(ReadError::PeerLost(_))));
    loss(&client, peer).await;
    client.deregister(region).unwrap();
}

#[tokio::test]
async fn no_more_is_posted_than_kept_free_and_nothing_waits_for_it() {
    let (client, mut raw, peer, region, _) = drowsy().await;
    let (first, asked) = posted(&client, &mut raw, peer, region, PATIENT).await;
    let mut open = vec![asked];
    for op in 2000..2040 {
        client.read(request(op, peer, &any_key(), region, vec![range(0, 8 * (op - 1999), 8)])).unwrap();
        open.push(raw.frame());
    }
    let short = open.iter().filter(|frame| is_posted(frame)).count();
    assert!((1..=16).contains(&short), "{short} of 41 were posted");
    for frame in open.iter().rev() {
        let len = if frame.id == open[0].id { 4 } else { 8 };
        raw.send_frame(DATA, 0, frame.id, &vec![3; len]);
        raw.send_frame(END, 0, frame.id, &[]);
    }
    let mut ended = 0;
    while ended < 41 {
        if let Event::ReadCompleted { op, outcome } = event(&client).await {
            assert!(op.0 == first || (2000..2040).contains(&op.0));
            assert_eq!(outcome.result, Ok(()));
            ended += 1;
        }
    }
    // What ended made room: the short way is open again.
    posted(&client, &mut raw, peer, region, PATIENT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t2_small_reads_of_many_threads_beside_large_ones() {
    const SMALL: u64 = 1000;
    let (server, client) = (transport(), Arc::new(transport()));
    let bytes = pattern(8 << 20, 5);
    let (_, key) = offer(&server, &bytes);
    let (address, posted) = counting(&server);
    let peer = client.connect(&address, LIMIT).unwrap();
    assert_eq!(event(&client).await, Event::Connected { peer });
    let large = Memory::allocate(8 << 20).unwrap();
    let large_region = client.register(large.clone()).unwrap();
    let threads: Vec<_> = (0..3u64)
        .map(|thread| {
            let (client, key) = (Arc::clone(&client), key.clone());
            std::thread::spawn(move || {
                let memory = Memory::allocate(SMALL as usize * 256).unwrap();
                let region = client.register(memory.clone()).unwrap();
                for index in 0..SMALL {
                    let from = (thread * 7919 + index * 104_729) % (8 << 20);
                    let from = from.min((8 << 20) - 256);
                    let op = (thread + 1) * 10_000 + index;
                    client
                        .read(request(op, peer, &key, region, vec![range(from, index * 256, 256)]))
                        .unwrap();
                }
                memory
            })
        })
        .collect();
    let started = Instant::now();
    client.read(request(1, peer, &key, large_region, vec![range(0, 0, 8 << 20)])).unwrap();
    let mut ended = HashMap::new();
    let mut larges = 1;
    while ended.len() < 3 * SMALL as usize || larges > 0 {
        assert!(started.elapsed() < 4 * LIMIT);
        let Event::ReadCompleted { op, outcome } = event(&client).await else { continue };
        assert_eq!(outcome.result, Ok(()), "{op}");
        if op.0 < 10_000 {
            larges -= 1;
            if ended.len() < 3 * SMALL as usize {
                larges += 1;
                client.read(request(op.0 + 1, peer, &key, large_region, vec![range(0, 0, 8 << 20)])).unwrap();
            }
        } else {
            assert!(ended.insert(op, ()).is_none(), "{op} twice");
        }
    }
    assert!(posted.load(Ordering::Relaxed) > 0, "no read took the short way");
    assert!(contents(&large) == bytes);
    for (thread, handle) in (0..3u64).zip(threads) {
        let memory = contents(&handle.join().unwrap());
        for index in 0..SMALL {
            let from = ((thread * 7919 + index * 104_729) % (8 << 20)).min((8 << 20) - 256) as usize;
            let to = index as usize * 256;
            assert!(memory[to..to + 256] == bytes[from..from + 256], "{thread} {index}");
        }
    }
}
