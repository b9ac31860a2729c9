//! Transports, memory, and a peer made of a plain socket.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Address, Event, LossReason, Memory, OpId, PeerId, ReadLimits, ReadOutcome, ReadPart, ReadRange,
    ReadRequest, RegionId, RegionKey, Transport,
};

/// No step of a test takes this long unless something is broken.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn transport() -> TcpTransport {
    TcpTransport::bind(TcpConfig::default()).unwrap()
}

pub(crate) async fn event(transport: &TcpTransport) -> Event {
    tokio::time::timeout(LIMIT, transport.next_event()).await.expect("no event").expect("closed")
}

/// The next event, which has to be the completion of this read.
pub(crate) async fn completion(transport: &TcpTransport, op: u64) -> ReadOutcome {
    match event(transport).await {
        Event::ReadCompleted { op: completed, outcome } if completed == OpId(op) => outcome,
        other => panic!("{other:?} instead of the completion of op-{op}"),
    }
}

/// The next event, which has to be the loss of this peer.
pub(crate) async fn loss(transport: &TcpTransport, peer: PeerId) -> LossReason {
    match event(transport).await {
        Event::PeerLost { peer: lost, reason } if lost == peer => reason,
        other => panic!("{other:?} instead of the loss of {peer}"),
    }
}

/// Connects `from` to `to`: the ids of `to` at `from` and of `from` at `to`.
pub(crate) async fn link(from: &TcpTransport, to: &TcpTransport) -> (PeerId, PeerId) {
    let there = from.connect(&to.address(), LIMIT).unwrap();
    assert_eq!(event(from).await, Event::Connected { peer: there });
    match event(to).await {
        Event::Accepted { peer } => (there, peer),
        other => panic!("{other:?}"),
    }
}

/// Bytes that differ everywhere and from seed to seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

pub(crate) fn memory(bytes: &[u8]) -> Memory {
    let memory = Memory::allocate(bytes.len()).unwrap();
    memory.write(0, bytes).unwrap();
    memory
}

pub(crate) fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// Registers bytes and returns what a peer needs.
pub(crate) fn offer(transport: &TcpTransport, bytes: &[u8]) -> (RegionId, RegionKey) {
    let region = transport.register(memory(bytes)).unwrap();
    (region, transport.key(region).unwrap())
}

pub(crate) fn range(remote_offset: u64, local_offset: u64, len: u64) -> ReadRange {
    ReadRange { remote_offset, local_offset, len }
}

pub(crate) const PATIENT: ReadLimits = ReadLimits { total: LIMIT, stall: LIMIT };

pub(crate) fn request(
    op: u64,
    peer: PeerId,
    key: &RegionKey,
    region: RegionId,
    ranges: Vec<ReadRange>,
) -> ReadRequest {
    let parts = vec![ReadPart { key: key.clone(), region, ranges }];
    ReadRequest { op: OpId(op), peer, parts, limits: PATIENT }
}

/// A frame as it came from the wire.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) code: u8,
    pub(crate) id: u64,
    pub(crate) body: Vec<u8>,
}

pub(crate) const READ: u8 = 1;
pub(crate) const DATA: u8 = 2;
pub(crate) const END: u8 = 3;
pub(crate) const MESSAGE: u8 = 4;
pub(crate) const PING: u8 = 5;
pub(crate) const PONG: u8 = 6;
pub(crate) const CANCEL: u8 = 7;

pub(crate) fn frame(kind: u8, code: u8, id: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, code, 0, 0];
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

pub(crate) fn preface(nonce: &[u8], expected: &[u8]) -> Vec<u8> {
    preface_of(0, nonce, expected)
}

pub(crate) fn preface_of(further: u32, nonce: &[u8], expected: &[u8]) -> Vec<u8> {
    let mut bytes = b"kvTCP\r\n\x1a\x01\0\0\0".to_vec();
    for granted in [128u32, 1 << 20, 1024, further, 0] {
        bytes.extend_from_slice(&granted.to_le_bytes());
    }
    bytes.extend_from_slice(nonce);
    bytes.extend_from_slice(expected);
    bytes
}

/// Port and nonce in an address.
pub(crate) fn parse_address(address: &Address) -> (u16, Vec<u8>) {
    let bytes = address.as_bytes();
    (u16::from_le_bytes([bytes[3], bytes[4]]), bytes[5..21].to_vec())
}

pub(crate) fn make_address(host: &str, port: u16, nonce: &[u8; 16]) -> Address {
    let mut bytes = vec![b'k', b'a', 1];
    bytes.extend_from_slice(&port.to_le_bytes());
    bytes.extend_from_slice(nonce);
    bytes.push(host.len() as u8);
    bytes.extend_from_slice(host.as_bytes());
    Address::from_bytes(bytes).unwrap()
}

pub(crate) const RAW_NONCE: [u8; 16] = [42; 16];

/// A peer that does exactly what a test says.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    /// A listening socket and its address.
    pub(crate) fn listen() -> (TcpListener, Address) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, make_address("127.0.0.1", port, &RAW_NONCE))
    }

    pub(crate) fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Connects to a transport, as a peer, and exchanges prefaces.
    pub(crate) fn connect(to: &TcpTransport) -> Self {
        let (port, nonce) = parse_address(&to.address());
        let mut raw = Self::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap());
        raw.send(&preface(&RAW_NONCE, &nonce));
        let answer = raw.take(64);
        assert_eq!(answer[32..48], nonce);
        raw
    }

    /// A transport connects to a raw peer; the transport's id of it.
    pub(crate) async fn serve(from: &TcpTransport) -> (Self, PeerId) {
        let (listener, address) = Self::listen();
        let peer = from.connect(&address, LIMIT).unwrap();
        let raw = Self::accept(&listener);
        assert_eq!(event(from).await, Event::Connected { peer });
        (raw, peer)
    }

    pub(crate) fn accept(listener: &TcpListener) -> Self {
        let mut raw = Self::new(listener.accept().unwrap().0);
        let theirs = raw.take(64);
        assert_eq!(theirs[48..], RAW_NONCE);
        raw.send(&preface(&RAW_NONCE, &[0; 16]));
        raw
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub(crate) fn send_frame(&mut self, kind: u8, code: u8, id: u64, body: &[u8]) {
        self.send(&frame(kind, code, id, body));
    }

    pub(crate) fn any_frame(&mut self) -> Frame {
        let head = self.take(16);
        let len = u32::from_le_bytes(head[4..8].try_into().unwrap());
        let id = u64::from_le_bytes(head[8..].try_into().unwrap());
        Frame { kind: head[0], code: head[1], id, body: self.take(len as usize) }
    }

    /// The next frame that is no ping; pings are answered.
    pub(crate) fn frame(&mut self) -> Frame {
        loop {
            let frame = self.any_frame();
            match frame.kind {
                PING => self.send_frame(PONG, 0, frame.id, &[]),
                _ => return frame,
            }
        }
    }

    /// Returns once everything sent before has been taken note of.
    pub(crate) fn sync(&mut self) {
        self.send_frame(PING, 0, 0x5eed, &[]);
        loop {
            let frame = self.frame();
            if (frame.kind, frame.id) == (PONG, 0x5eed) {
                return;
            }
        }
    }

    /// Waits until the other side has closed.
    pub(crate) fn closed(&mut self) {
        let start = Instant::now();
        let mut bytes = [0; 4096];
        loop {
            assert!(start.elapsed() < LIMIT);
            match self.0.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// The body of a `Read` frame.
pub(crate) fn read_body(op: u64, key: &RegionKey, ranges: &[(u64, u32)]) -> Vec<u8> {
    let mut body = op.to_le_bytes().to_vec();
    body.extend_from_slice(&key.as_bytes()[3..]);
    for (offset, len) in ranges {
        body.extend_from_slice(&offset.to_le_bytes());
        body.extend_from_slice(&len.to_le_bytes());
    }
    body
}

/// A key such as a transport gives out.
pub(crate) fn any_key() -> RegionKey {
    let mut bytes = vec![b'k', b'k', 1];
    bytes.extend_from_slice(&[9; 16]);
    RegionKey::from_bytes(bytes).unwrap()
}
