//! Device memory over tcp when copies fail, are slow, or the device is lost, and when pinned memory is short.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed step is a failed test.

use std::time::{Duration, Instant};

use kv_testkit::device::HostDevice;
use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Address, DeviceError, Event, LossReason, Memory, OpId, PeerId, ReadError, ReadLimits, ReadOutcome,
    ReadPart, ReadRange, ReadRequest, RegionId, RegionKey, Transport, TransportError,
};

const LIMIT: Duration = Duration::from_secs(20);
/// For what must not happen.
const MOMENT: Duration = Duration::from_millis(100);
const CHUNK: usize = 64 << 10;
const BYTES: usize = 4 << 20;
const OLD: u8 = 0xa5;

/// Two endpoints, each with a device of its own, a region on it, and pinned memory for some chunks.
struct Ends {
    server: TcpTransport,
    client: TcpTransport,
    peer: PeerId,
    key: RegionKey,
    source: (RegionId, Memory),
    into: (RegionId, Memory),
    there: HostDevice,
    here: HostDevice,
}

fn bytes() -> Vec<u8> {
    (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

async fn event(of: &TcpTransport) -> Event {
    tokio::time::timeout(LIMIT, of.next_event()).await.expect("no event in time").expect("closed")
}

async fn quiet(of: &TcpTransport) {
    let early = tokio::time::timeout(MOMENT, of.next_event()).await;
    assert!(early.is_err(), "too early: {early:?}");
}

fn endpoint() -> TcpTransport {
    let config =
        TcpConfig { chunk_max_bytes: CHUNK as u32, staging_bytes: 8 * CHUNK, ..TcpConfig::default() };
    TcpTransport::bind(config).unwrap()
}

/// The first bytes of a region into the first of another.
fn request(op: u64, peer: PeerId, key: &RegionKey, region: RegionId, len: usize) -> ReadRequest {
    let range = ReadRange { remote_offset: 0, local_offset: 0, len: len as u64 };
    let parts = vec![ReadPart { key: key.clone(), region, ranges: vec![range] }];
    let limits = ReadLimits { total: LIMIT, stall: LIMIT };
    ReadRequest { op: OpId(op), peer, parts, limits }
}

/// Registers memory and says how peers name it.
fn offer(of: &TcpTransport, memory: &Memory) -> RegionKey {
    of.key(of.register(memory.clone()).unwrap()).unwrap()
}

/// Waits until nothing more is asked of a device.
fn settled(device: &HostDevice) {
    loop {
        let (before, _) = device.copies();
        if !device.wait_for(2 * MOMENT, |started, _| started > before) {
            return;
        }
    }
}

impl Ends {
    async fn new() -> Self {
        let (server, client) = (endpoint(), endpoint());
        let (there, here) = (HostDevice::new().unwrap(), HostDevice::new().unwrap());
        let (source, into) = (there.allocate(BYTES).unwrap(), here.allocate(BYTES).unwrap());
        source.write(0, &bytes()).unwrap();
        into.write(0, &vec![OLD; BYTES]).unwrap();
        let source = (server.register(source.clone()).unwrap(), source);
        let into = (client.register(into.clone()).unwrap(), into);
        let key = server.key(source.0).unwrap();
        let peer = client.connect(&server.address(), LIMIT).unwrap();
        assert_eq!(event(&client).await, Event::Connected { peer });
        assert!(matches!(event(&server).await, Event::Accepted { .. }));
        Self { server, client, peer, key, source, into, there, here }
    }

    fn submit(&self, op: u64) {
        let range = ReadRange { remote_offset: 0, local_offset: 0, len: BYTES as u64 };
        let parts = vec![ReadPart { key: self.key.clone(), region: self.into.0, ranges: vec![range] }];
        let limits = ReadLimits { total: LIMIT, stall: LIMIT };
        self.client.read(ReadRequest { op: OpId(op), peer: self.peer, parts, limits }).unwrap();
    }

    async fn completed(&self, op: u64) -> ReadOutcome {
        match event(&self.client).await {
            Event::ReadCompleted { op: ended, outcome } if ended == OpId(op) => outcome,
            other => panic!("{other:?}"),
        }
    }

    async fn read(&self, op: u64) -> ReadOutcome {
        self.submit(op);
        self.completed(op).await
    }

    async fn works(&self, op: u64) {
        self.into.1.write(0, &vec![OLD; BYTES]).unwrap();
        assert_eq!(self.read(op).await.result, Ok(()));
        assert!(contents(&self.into.1) == bytes());
    }

    /// Takes everything down, and counts what is left on the devices.
    fn end(self) {
        let Self { server, client, there, here, source, into, .. } = self;
        client.deregister(into.0).unwrap();
        server.deregister(source.0).unwrap();
        drop((server, client, source, into));
        for device in [there, here] {
            assert_eq!((device.allocations(), device.pinned()), (0, 0), "leaked");
        }
    }
}

#[tokio::test]
async fn a_copy_that_fails_at_the_source_fails_its_read_by_name() {
    let ends = Ends::new().await;
    ends.there.fail_after(5);
    let outcome = ends.read(1).await;
    assert_eq!(outcome.result, Err(ReadError::RemoteDevice));
    assert!(ReadError::RemoteDevice.may_retry());
    ends.works(2).await;
    ends.end();
}

#[tokio::test]
async fn a_copy_that_fails_at_the_destination_fails_its_read_by_name() {
    let ends = Ends::new().await;
    ends.here.fail_after(5);
    let outcome = ends.read(1).await;
    let named = matches!(outcome.result, Err(ReadError::Device(DeviceError::Failed { .. })));
    assert!(named && !outcome.arrived.contains(0), "{outcome:?}");
    ends.works(2).await;
    ends.end();
}

#[tokio::test]
async fn t3_a_cancelled_read_completes_after_its_last_copy() {
    let ends = Ends::new().await;
    let (before, _) = ends.here.copies();
    ends.here.hold();
    ends.submit(1);
    assert!(ends.here.wait_for(LIMIT, |started, _| started > before));
    ends.client.cancel(OpId(1));
    quiet(&ends.client).await;
    let (region, reads) = (ends.into.0, 1);
    assert_eq!(ends.client.deregister(region), Err(TransportError::RegionInUse { region, reads }));
    ends.here.release();
    let outcome = ends.completed(1).await;
    assert_eq!(outcome.result, Err(ReadError::Cancelled));
    let (started, done) = ends.here.copies();
    assert_eq!(started, done, "a copy goes on after the completion");
    // The next owner's bytes stay, whatever still comes over the connection.
    ends.into.1.write(0, &vec![7; BYTES]).unwrap();
    let copies = ends.here.copies();
    quiet(&ends.client).await;
    assert_eq!(ends.here.copies(), copies);
    assert!(contents(&ends.into.1).iter().all(|byte| *byte == 7));
    ends.works(2).await;
    ends.end();
}

#[tokio::test]
async fn t3_a_read_of_a_lost_peer_completes_after_its_last_copy() {
    let ends = Ends::new().await;
    let (before, _) = ends.here.copies();
    ends.here.hold();
    ends.submit(1);
    assert!(ends.here.wait_for(LIMIT, |started, _| started > before));
    ends.server.shutdown(LIMIT).await;
    quiet(&ends.client).await;
    ends.here.release();
    let outcome = ends.completed(1).await;
    assert_eq!(outcome.result, Err(ReadError::PeerLost(LossReason::ClosedByPeer)));
    let (started, done) = ends.here.copies();
    assert_eq!(started, done, "a copy goes on after the completion");
    let lost = Event::PeerLost { peer: ends.peer, reason: LossReason::ClosedByPeer };
    assert_eq!(event(&ends.client).await, lost);
}

#[tokio::test]
async fn t11_shutdown_keeps_its_limit_and_completions_wait_for_copies() {
    let ends = Ends::new().await;
    let (before, _) = ends.here.copies();
    ends.here.hold();
    ends.submit(1);
    assert!(ends.here.wait_for(LIMIT, |started, _| started > before));
    let start = Instant::now();
    ends.client.shutdown(Duration::from_secs(1)).await;
    assert!(start.elapsed() < LIMIT / 2);
    quiet(&ends.client).await;
    ends.here.release();
    assert_eq!(ends.completed(1).await.result, Err(ReadError::Closed));
    assert!(matches!(event(&ends.client).await, Event::PeerLost { reason: LossReason::Closed, .. }));
    assert_eq!(tokio::time::timeout(LIMIT, ends.client.next_event()).await.unwrap(), None);
}

#[tokio::test]
async fn t11_a_device_that_hangs_does_not_hold_up_a_drop() {
    let Ends { client, here, into, key, peer, server, .. } = Ends::new().await;
    let (before, _) = here.copies();
    here.hold();
    let range = ReadRange { remote_offset: 0, local_offset: 0, len: BYTES as u64 };
    let parts = vec![ReadPart { key, region: into.0, ranges: vec![range] }];
    let limits = ReadLimits { total: LIMIT, stall: LIMIT };
    client.read(ReadRequest { op: OpId(1), peer, parts, limits }).unwrap();
    assert!(here.wait_for(LIMIT, |started, _| started > before));
    let start = Instant::now();
    drop((client, into, server));
    assert!(start.elapsed() < LIMIT / 2);
    assert_eq!(here.allocations(), 1, "memory was freed under a copy");
    here.release();
    let gone = tokio::task::spawn_blocking(move || {
        let start = Instant::now();
        while (here.allocations(), here.pinned()) != (0, 0) && start.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        (here.allocations(), here.pinned())
    });
    assert_eq!(gone.await.unwrap(), (0, 0), "leaked");
}

#[tokio::test]
async fn short_pinned_memory_slows_reads_and_fails_none() {
    let ends = Ends::new().await;
    ends.here.limit_pinned(CHUNK);
    ends.there.limit_pinned(2 * CHUNK);
    // More at a time than there is memory for.
    (1..5).for_each(|op| ends.submit(op));
    let mut left = vec![1, 2, 3, 4];
    while !left.is_empty() {
        match event(&ends.client).await {
            Event::ReadCompleted { op, outcome } => {
                assert_eq!(outcome.result, Ok(()));
                left.retain(|other| OpId(*other) != op);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(contents(&ends.into.1) == bytes());
    assert!(ends.here.pinned() <= CHUNK && ends.there.pinned() <= 2 * CHUNK);
    ends.end();
}

#[tokio::test]
async fn without_any_pinned_memory_reads_fail_by_name_until_there_is_some() {
    // Slots that were made once stay, so the destination comes first: it wants one before the source is asked.
    let ends = Ends::new().await;
    ends.there.limit_pinned(0);
    ends.here.limit_pinned(0);
    let refused = ends.read(1).await.result.unwrap_err();
    let named = match &refused {
        ReadError::Device(DeviceError::Failed { meaning, .. }) => meaning.contains("pinned"),
        _ => false,
    };
    assert!(named, "{refused:?}");
    // Nobody is told what happened to others before.
    ends.here.limit_pinned(BYTES);
    assert_eq!(ends.read(2).await.result, Err(ReadError::RemoteDevice));
    ends.there.limit_pinned(BYTES);
    assert_eq!(ends.read(3).await.result, Ok(()));
    ends.works(4).await;
    ends.end();
}

#[tokio::test]
async fn a_lost_device_fails_its_reads_and_leaves_the_connection() {
    let ends = Ends::new().await;
    let near = Memory::allocate(8).unwrap();
    let plain = Memory::allocate(8).unwrap();
    plain.write(0, b"KV bytes").unwrap();
    let key = ends.server.key(ends.server.register(plain).unwrap()).unwrap();
    ends.there.lose();
    assert_eq!(ends.read(1).await.result, Err(ReadError::RemoteDevice));
    ends.here.lose();
    let region = ends.client.register(near.clone()).unwrap();
    let range = |len| vec![ReadRange { remote_offset: 0, local_offset: 0, len }];
    let limits = ReadLimits { total: LIMIT, stall: LIMIT };
    let peer = ends.peer;
    for (op, region, lost) in [(2, ends.into.0, true), (3, region, false)] {
        let parts = vec![ReadPart { key: key.clone(), region, ranges: range(8) }];
        ends.client.read(ReadRequest { op: OpId(op), peer, parts, limits }).unwrap();
        let result = ends.completed(op).await.result;
        match result {
            Err(ReadError::Device(DeviceError::Lost { .. })) if lost => {}
            Ok(()) if !lost => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(contents(&near), b"KV bytes");
}

#[tokio::test]
async fn t9_a_region_that_goes_while_it_is_copied_is_not_read() {
    let Ends { server, client, there, source, into, key, peer, .. } = Ends::new().await;
    let (before, _) = there.copies();
    there.hold();
    // One chunk: the copy of all that is asked for is under way when the region goes.
    let range = ReadRange { remote_offset: 0, local_offset: 0, len: CHUNK as u64 };
    let parts = vec![ReadPart { key, region: into.0, ranges: vec![range] }];
    let limits = ReadLimits { total: LIMIT, stall: LIMIT };
    client.read(ReadRequest { op: OpId(1), peer, parts, limits }).unwrap();
    assert!(there.wait_for(LIMIT, |started, _| started > before));
    server.deregister(source.0).unwrap();
    drop(source);
    assert_eq!(there.allocations(), 1, "memory was freed under a copy");
    // The device is busy, and everything else goes on.
    client.send(peer, b"hello".to_vec()).unwrap();
    assert!(matches!(event(&server).await, Event::Message { bytes, .. } if bytes == b"hello"));
    there.release();
    match event(&client).await {
        Event::ReadCompleted { outcome, .. } => assert_eq!(outcome.result, Err(ReadError::UnknownKey)),
        other => panic!("{other:?}"),
    }
    assert!(contents(&into.1).iter().all(|byte| *byte == OLD), "bytes of a region that is gone");
}

/// A read whose copy into the device hangs, and one into host memory that waits for the source: `leave` ends the connection.
async fn a_lost_peer_ends_what_no_copy_holds(reason: LossReason, leave: impl AsyncFnOnce(&Ends)) {
    let ends = Ends::new().await;
    let near = Memory::allocate(BYTES).unwrap();
    let plain = ends.client.register(near.clone()).unwrap();
    let (before, _) = ends.here.copies();
    ends.here.hold();
    ends.client.read(request(1, ends.peer, &ends.key, ends.into.0, CHUNK)).unwrap();
    assert!(ends.here.wait_for(LIMIT, |started, _| started > before));
    ends.there.hold();
    ends.client.read(request(2, ends.peer, &ends.key, plain, BYTES)).unwrap();
    settled(&ends.there);
    leave(&ends).await;
    let lost = Err(ReadError::PeerLost(reason.clone()));
    assert_eq!(ends.completed(2).await.result, lost);
    // Its destination is free at once, and nothing more is accepted.
    ends.client.deregister(plain).unwrap();
    let unknown = TransportError::UnknownPeer { peer: ends.peer };
    let refused = ends.client.read(request(3, ends.peer, &ends.key, ends.into.0, 8)).unwrap_err();
    assert_eq!(refused, unknown);
    assert_eq!(ends.client.send(ends.peer, vec![1]), Err(unknown.clone()));
    assert_eq!(ends.client.disconnect(ends.peer), Err(unknown));
    // The loss is told after the last completion, and that comes after the copy.
    ends.client.cancel(OpId(1));
    quiet(&ends.client).await;
    ends.here.release();
    assert_eq!(ends.completed(1).await.result, lost);
    assert_eq!(event(&ends.client).await, Event::PeerLost { peer: ends.peer, reason });
    ends.there.release();
}

#[tokio::test]
async fn t6_a_lost_peer_ends_what_no_copy_holds() {
    let leave = async |ends: &Ends| ends.server.shutdown(LIMIT).await;
    a_lost_peer_ends_what_no_copy_holds(LossReason::ClosedByPeer, leave).await;
}

#[tokio::test]
async fn t6_a_peer_let_go_of_ends_what_no_copy_holds() {
    let leave = async |ends: &Ends| ends.client.disconnect(ends.peer).unwrap();
    a_lost_peer_ends_what_no_copy_holds(LossReason::Disconnected, leave).await;
}

#[tokio::test]
async fn t8_a_device_that_hangs_leaves_messages_and_other_reads_alone() {
    let ends = Ends::new().await;
    let (near, far) = (Memory::allocate(BYTES).unwrap(), Memory::allocate(BYTES).unwrap());
    far.write(0, &bytes()).unwrap();
    let (plain, key) = (ends.client.register(near.clone()).unwrap(), offer(&ends.server, &far));
    let (before, _) = ends.here.copies();
    ends.here.hold();
    // Far more than there are slots for, so that every slot is under a copy that hangs.
    ends.submit(1);
    assert!(ends.here.wait_for(LIMIT, |started, _| started > before));
    settled(&ends.here);
    ends.client.send(ends.peer, b"who".to_vec()).unwrap();
    let Event::Message { peer: back, .. } = event(&ends.server).await else { panic!("no message") };
    ends.server.send(back, b"me".to_vec()).unwrap();
    let answer = Event::Message { peer: ends.peer, bytes: b"me".to_vec() };
    assert_eq!(event(&ends.client).await, answer);
    ends.client.read(request(2, ends.peer, &key, plain, BYTES)).unwrap();
    assert_eq!(ends.completed(2).await.result, Ok(()));
    assert!(contents(&near) == bytes());
    ends.here.release();
    assert_eq!(ends.completed(1).await.result, Ok(()));
    assert!(contents(&ends.into.1) == bytes());
    ends.end();
}

#[tokio::test]
async fn t8_a_device_without_a_free_slot_leaves_other_devices_alone() {
    let ends = Ends::new().await;
    let other = HostDevice::new().unwrap();
    let far = other.allocate(BYTES).unwrap();
    far.write(0, &bytes()).unwrap();
    let key = offer(&ends.server, &far);
    let near = Memory::allocate(BYTES).unwrap();
    let place = ends.client.register(near.clone()).unwrap();
    ends.there.limit_pinned(2 * CHUNK);
    ends.there.hold();
    // Some of its chunks have no slot, and all of them are before those of the other device.
    ends.client.read(request(1, ends.peer, &ends.key, ends.into.0, 4 * CHUNK)).unwrap();
    settled(&ends.there);
    ends.client.read(request(2, ends.peer, &key, place, BYTES)).unwrap();
    assert_eq!(ends.completed(2).await.result, Ok(()));
    assert!(contents(&near) == bytes());
    ends.there.release();
    assert_eq!(ends.completed(1).await.result, Ok(()));
}

#[tokio::test]
async fn t2_a_read_does_not_succeed_before_its_last_copy_does() {
    let ends = Ends::new().await;
    // One range a chunk, so that what arrived can be told from what did not.
    let count = (BYTES / CHUNK) as u64;
    let ranges: Vec<_> = (0..count)
        .map(|i| {
            let offset = (count - 1 - i) * CHUNK as u64;
            ReadRange { remote_offset: offset, local_offset: offset, len: CHUNK as u64 }
        })
        .collect();
    // Copies are behind the bytes, so that the last chunk has come when the first ones are done.
    ends.here.delay(Duration::from_millis(2));
    ends.here.fail_after(count - 1);
    let parts = vec![ReadPart { key: ends.key.clone(), region: ends.into.0, ranges }];
    let limits = ReadLimits { total: LIMIT, stall: LIMIT };
    ends.client.read(ReadRequest { op: OpId(1), peer: ends.peer, parts, limits }).unwrap();
    let outcome = ends.completed(1).await;
    assert!(matches!(outcome.result, Err(ReadError::Device(DeviceError::Failed { .. }))), "{outcome:?}");
    assert_eq!(outcome.arrived.count() as u64, count - 1);
    ends.here.delay(Duration::ZERO);
    ends.works(2).await;
    ends.end();
}

/// Hands one connection on, and stops carrying what comes from the listener's side when told.
struct Gate {
    address: Address,
    shut: std::sync::Arc<std::sync::atomic::AtomicBool>,
    ends: [std::net::TcpStream; 2],
}

impl Gate {
    /// A way to a transport, over which `peer` is connected to it.
    async fn connect(to: &TcpTransport, client: &TcpTransport) -> (Self, PeerId) {
        use std::io::{Read, Write};
        use std::sync::atomic::{AtomicBool, Ordering};
        let mut address = to.address().as_bytes().to_vec();
        // Tag and version come before the port.
        let port = u16::from_le_bytes([address[3], address[4]]);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        address[3..5].copy_from_slice(&listener.local_addr().unwrap().port().to_le_bytes());
        let address = Address::from_bytes(address).unwrap();
        let peer = client.connect(&address, LIMIT).unwrap();
        let shut = std::sync::Arc::new(AtomicBool::new(false));
        let stop = std::sync::Arc::clone(&shut);
        let ends = tokio::task::spawn_blocking(move || {
            let near = listener.accept().unwrap().0;
            let far = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            // Small, so that whoever sends is stopped soon.
            far.set_recv_buffer_size(64 << 10).unwrap();
            far.connect(&std::net::SocketAddr::from(([127, 0, 0, 1], port)).into()).unwrap();
            let far = std::net::TcpStream::from(far);
            let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to).ok());
            let (mut from, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(some @ 1..) = from.read(&mut bytes) {
                    if stop.load(Ordering::SeqCst) || to.write_all(&bytes[..some]).is_err() {
                        return;
                    }
                }
            });
            [near, far]
        });
        let ends = ends.await.unwrap();
        assert_eq!(event(client).await, Event::Connected { peer });
        (Self { address, shut, ends }, peer)
    }

    fn shut(&self) {
        self.shut.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.ends.iter().for_each(|end| drop(end.shutdown(std::net::Shutdown::Both)));
    }
}

#[tokio::test]
async fn t8_peers_that_stop_reading_leave_pinned_memory_to_others() {
    const STOPPED: usize = 3;
    const READERS: u64 = 6;
    let (server, there) = (endpoint(), HostDevice::new().unwrap());
    let source = there.allocate(BYTES).unwrap();
    source.write(0, &bytes()).unwrap();
    let key = offer(&server, &source);
    let mut stopped = vec![];
    for _ in 0..STOPPED {
        let client = endpoint();
        let (gate, peer) = Gate::connect(&server, &client).await;
        assert_ne!(gate.address, server.address());
        gate.shut();
        // More than the buffers of the system take.
        for op in 0..4 {
            let region = client.register(Memory::allocate(BYTES).unwrap()).unwrap();
            client.read(request(op, peer, &key, region, BYTES)).unwrap();
        }
        stopped.push((gate, client));
    }
    settled(&there);
    let mut readers = vec![];
    for op in 0..READERS {
        let client = endpoint();
        let peer = client.connect(&server.address(), LIMIT).unwrap();
        assert_eq!(event(&client).await, Event::Connected { peer });
        let near = Memory::allocate(BYTES).unwrap();
        let region = client.register(near.clone()).unwrap();
        client.read(request(op, peer, &key, region, BYTES)).unwrap();
        readers.push((client, near));
    }
    // Sooner than the connections of the stopped ones are given up.
    for (client, near) in &readers {
        let ended = tokio::time::timeout(LIMIT / 4, client.next_event()).await;
        match ended.expect("a reader waits for peers that stopped").unwrap() {
            Event::ReadCompleted { outcome, .. } => assert_eq!(outcome.result, Ok(())),
            other => panic!("{other:?}"),
        }
        assert!(contents(near) == bytes());
    }
    assert!(there.pinned() <= 8 * CHUNK);
}
