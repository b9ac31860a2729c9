//! What the tests share: sound values, and peers that libzmq would not let misbehave.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kv_handshake::{Dial, Listener, ListenerConfig};
use kv_proto::handshake::{EngineCard, Query, TransportCard, WorkerCard};
use kv_proto::{
    BlockLayout, BlockOrder, Dtype, EngineId, Fingerprint, Incarnation, Rank, RegionKind, RegionLayout,
    Topology,
};
use serde::Serialize;

/// For what must happen, and on a busy machine may take its time.
pub(crate) const PLENTY: Duration = Duration::from_secs(30);
/// For what must not happen before it.
pub(crate) const SHORT: Duration = Duration::from_millis(300);

pub(crate) const LIFE: Incarnation = Incarnation::from_random(0x1111);

pub(crate) fn id(text: &str) -> EngineId {
    EngineId::new(text).unwrap()
}

pub(crate) fn layout() -> BlockLayout {
    let region = RegionLayout {
        layer: "layers.0".to_owned(),
        kind: RegionKind::KeyValue,
        group: 0,
        memory: 0,
        base: 0,
        block_stride: 1024,
        block_bytes: 1024,
        dtype: Dtype::F32,
        heads: 2,
        heads_total: 0,
        head_size: 8,
    };
    BlockLayout { block_tokens: 16, blocks: 4, kernel_tokens: 0, order: BlockOrder::HeadsTokens, groups: vec![], regions: vec![region] }
}

/// The fingerprint does not depend on the rank count here, so that a topology can differ alone.
pub(crate) fn fingerprint() -> Fingerprint {
    Fingerprint::of("model-a", &layout(), Topology::of(1))
}

pub(crate) fn card_with(ranks: u32, fingerprint: &Fingerprint, address: &[u8]) -> EngineCard {
    let worker = |rank| WorkerCard {
        rank: Rank(rank),
        memory_sizes: vec![4096],
        layout: layout(),
        fingerprint: fingerprint.clone(),
        transports: vec![TransportCard {
            name: "tcp".to_owned(),
            address: address.to_vec(),
            keys: vec![b"key".to_vec().into()],
        }],
    };
    EngineCard {
        engine: id("p-0"),
        incarnation: LIFE,
        topology: Topology::of(ranks),
        workers: (0..ranks).map(worker).collect(),
        renew_every_ms: 0,
    }
}

pub(crate) fn card() -> EngineCard {
    card_with(2, &fingerprint(), b"address")
}

pub(crate) fn query() -> Query {
    Query {
        engine: id("d-0"),
        incarnation: Incarnation::from_random(0x2222),
        rank: Rank(1),
        topology: Topology::of(2),
        wanted: id("p-0"),
    }
}

pub(crate) fn query_bytes() -> Vec<u8> {
    query().encode(&fingerprint()).unwrap()
}

pub(crate) fn dial(port: u16) -> Dial {
    Dial {
        host: "127.0.0.1".to_owned(),
        port,
        query: query(),
        fingerprint: fingerprint(),
        wanted_life: LIFE,
        limit: PLENTY,
    }
}

pub(crate) fn listen() -> Listener {
    Listener::bind(ListenerConfig::default(), card()).unwrap()
}

/// The outer form as any version writes it, for what the types of this version cannot express.
#[derive(Serialize)]
struct Outer<'a> {
    service: &'a str,
    version: u32,
    #[serde(with = "serde_bytes")]
    body: &'a [u8],
    unknown_to_this_version: [u8; 3],
}

pub(crate) fn outer(service: &str, version: u32, body: &[u8]) -> Vec<u8> {
    rmp_serde::to_vec_named(&Outer { service, version, body, unknown_to_this_version: [1, 2, 3] }).unwrap()
}

/// Waits for a fact, with a limit.
pub(crate) fn until(what: &str, mut fact: impl FnMut() -> bool) {
    let start = Instant::now();
    while !fact() {
        assert!(start.elapsed() < PLENTY, "never came true: {what}");
        std::thread::yield_now();
    }
}

/// A DEALER or REQ of libzmq, that gives up after a while.
pub(crate) fn client(context: &zmq::Context, kind: zmq::SocketType, port: u16) -> zmq::Socket {
    let socket = context.socket(kind).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_rcvtimeo(PLENTY.as_millis() as i32).unwrap();
    socket.connect(&format!("tcp://127.0.0.1:{port}")).unwrap();
    socket
}

/// A DEALER written by hand, which can stop anywhere, claim any length and never read.
pub(crate) struct RawPeer(pub(crate) TcpStream);

/// Signature, version 3.0, mechanism NULL, not a server, filler.
pub(crate) fn greeting() -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    bytes.extend(b"NULL");
    bytes.resize(64, 0);
    bytes
}

pub(crate) fn ready() -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend([0, 0, 0, 6]);
    body.extend(b"DEALER");
    let mut bytes = vec![4, body.len() as u8];
    bytes.extend(body);
    bytes
}

/// A last frame with an eight-byte length.
pub(crate) fn frame(payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![2];
    bytes.extend((payload.len() as u64).to_be_bytes());
    bytes.extend(payload);
    bytes
}

impl RawPeer {
    pub(crate) fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(PLENTY)).unwrap();
        stream.set_write_timeout(Some(PLENTY)).unwrap();
        Self(stream)
    }

    /// Connects and greets, and has seen the other's greeting.
    pub(crate) fn greet(port: u16) -> Self {
        let mut peer = Self::connect(port);
        peer.0.write_all(&[greeting(), ready()].concat()).unwrap();
        let mut theirs = [0; 66];
        peer.0.read_exact(&mut theirs).unwrap();
        let mut command = vec![0; theirs[65].into()];
        peer.0.read_exact(&mut command).unwrap();
        assert!(command.starts_with(b"\x05READY"), "{command:?}");
        peer
    }

    /// Whether the other side closed the connection, or never does within the limit given.
    pub(crate) fn is_closed_within(&mut self, limit: Duration) -> bool {
        self.0.set_read_timeout(Some(limit)).unwrap();
        let mut sink = [0; 4096];
        loop {
            match self.0.read(&mut sink) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return e.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}
