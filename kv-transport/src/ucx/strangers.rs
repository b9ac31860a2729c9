//! Peers that break the protocol of reads by messages. It costs them their connection, and the read if it is one; the
//! process and whoever else is connected go on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::address::{Endpoint, Key};
use super::config::UcxConfig;
use super::fabric::{Fabric, Mapped};
use super::frame::{Body, Frame, Wanted, Window};
use super::home::Home;
use super::worker::{EpId, Told, Worker};
use super::{Arc, Transport, UcxTransport};
use crate::contract::{
    Address, Event, OpId, PeerId, ReadLimits, ReadPart, ReadRange, ReadRequest, RegionKey,
};
use crate::error::{LossReason, ReadError, TransportError};
use crate::memory::Memory;

/// No step of a test takes this long unless something is broken.
const LIMIT: Duration = Duration::from_secs(20);
/// What the stranger calls its connection.
const OWN: u64 = 77;
const LEN: usize = 4096;
/// What no peer has.
const MARK: u8 = 0x55;

fn config() -> UcxConfig {
    UcxConfig { settings: vec![("TLS".into(), "tcp,self".into())], ..UcxConfig::default() }
}

/// A transport, or `None` where the machine has no UCX.
fn transport() -> Option<UcxTransport> {
    match UcxTransport::open(config()) {
        Ok(transport) => Some(transport),
        Err(TransportError::Library { problem, .. }) => {
            use std::io::Write;
            // Past the harness, which would keep it back.
            std::io::stderr().write_all(format!("SKIPPED, no UCX here: {problem}\n").as_bytes()).unwrap();
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Speaks the protocol word by word, over a worker of its own.
struct Stranger {
    worker: Worker,
    endpoint: Endpoint,
    ep: EpId,
    /// What the other side calls the connection.
    token: u64,
    heard: VecDeque<Body>,
    /// Bytes that came beside frames, by their fetch.
    landed: Vec<(u64, u64)>,
    memory: Arc<Mapped>,
}

impl Stranger {
    fn new() -> Self {
        let fabric = Fabric::open(&config()).unwrap();
        let memory = Arc::new(fabric.map(Memory::allocate(LEN).unwrap()).unwrap());
        let pattern: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
        memory.memory.write(0, &pattern).unwrap();
        let worker = Worker::new(fabric).unwrap();
        let mut life = [0; 16];
        getrandom::fill(&mut life).unwrap();
        let endpoint = Endpoint { life, home: Home::default(), worker: worker.address.clone() };
        Self { worker, endpoint, ep: 0, token: 0, heard: VecDeque::new(), landed: vec![], memory }
    }

    fn window() -> Window {
        Window { messages: 16, bytes: 1 << 20 }
    }

    fn post(&mut self, bytes: Vec<u8>, reply: bool) {
        self.worker.send(self.ep, bytes, reply).unwrap();
    }

    fn say(&mut self, body: Body) {
        let frame = Frame { token: self.token, body };
        self.post(frame.encode(), false);
    }

    /// Sends bytes of its memory, with a frame beside them.
    fn send_beside(&mut self, frame: Vec<u8>, offset: u64, len: u64) {
        let memory = Arc::clone(&self.memory);
        self.worker.send_bytes(self.ep, frame, &memory, offset, len).unwrap();
    }

    fn send_bytes(&mut self, fetch: u64, at: u64, len: u64) {
        let frame = Frame { token: self.token, body: Body::Bytes { fetch, at } };
        self.send_beside(frame.encode(), at.min(LEN as u64 - len), len);
    }

    /// Lets UCX work, greets whoever says hello, and keeps the rest.
    fn turn(&mut self) {
        self.worker.progress();
        for told in self.worker.drain() {
            match told {
                Told::Frame { reply_to, bytes } => match Frame::decode(bytes).unwrap().body {
                    Body::Hello { token, address, .. } => {
                        let address = Address::from_bytes(address).unwrap();
                        let peer = Endpoint::decode(&address).unwrap();
                        self.ep = self.worker.pair(&peer.worker, reply_to.unwrap(), &mut vec![]).unwrap();
                        self.token = token;
                        self.say(Body::Welcome { token: OWN, window: Self::window() });
                    }
                    Body::Welcome { token, .. } => self.token = token,
                    Body::Ping => self.say(Body::Pong),
                    body => self.heard.push_back(body),
                },
                Told::Landed { fetch, bytes, .. } => self.landed.push((fetch, bytes)),
                Told::Ended { .. } | Told::Failed { .. } => {}
            }
        }
    }

    fn until(&mut self, what: &str, mut fact: impl FnMut(&mut Self) -> bool) {
        let until = Instant::now() + LIMIT;
        while !fact(self) {
            assert!(Instant::now() < until, "{what}: {:?}", self.heard);
            self.turn();
            std::thread::yield_now();
        }
    }

    /// The next word, which has to be of this kind.
    fn hear<T>(&mut self, what: &str, of: impl Fn(&Body) -> Option<T>) -> T {
        self.until(what, |stranger| !stranger.heard.is_empty());
        let body = self.heard.pop_front().unwrap();
        of(&body).unwrap_or_else(|| panic!("{body:?} instead of {what}"))
    }

    /// The transport's next event, while the stranger goes on.
    async fn event(&mut self, transport: &UcxTransport) -> Event {
        let until = Instant::now() + LIMIT;
        loop {
            self.turn();
            if let Ok(event) = tokio::time::timeout(Duration::from_millis(1), transport.next_event()).await {
                return event.expect("the transport goes on");
            }
            assert!(Instant::now() < until, "no event");
        }
    }

    async fn loss(&mut self, transport: &UcxTransport, peer: PeerId) -> LossReason {
        match self.event(transport).await {
            Event::PeerLost { peer: lost, reason } if lost == peer => reason,
            other => panic!("{other:?} instead of the loss of {peer}"),
        }
    }

    /// Connects to a transport as a reader does.
    async fn connected_to(transport: &UcxTransport) -> (Self, PeerId) {
        let mut stranger = Self::new();
        let there = Endpoint::decode(&transport.address()).unwrap();
        stranger.ep = stranger.worker.create_ep(&there.worker).unwrap();
        let address = stranger.endpoint.encode().unwrap().as_bytes().to_vec();
        let hello = Body::Hello { expected: there.life, token: OWN, window: Self::window(), address };
        stranger.post(Frame { token: 0, body: hello }.encode(), true);
        stranger.until("Welcome", |stranger| stranger.token != 0);
        match stranger.event(transport).await {
            Event::Accepted { peer } => (stranger, peer),
            other => panic!("{other:?}"),
        }
    }

    /// Is connected to by a transport, as an owner is.
    async fn connected_by(transport: &UcxTransport) -> (Self, PeerId) {
        let mut stranger = Self::new();
        let peer = transport.connect(&stranger.endpoint.encode().unwrap(), LIMIT).unwrap();
        assert_eq!(stranger.event(transport).await, Event::Connected { peer });
        let lanes = transport.lanes(peer).unwrap();
        assert!(super::lanes::are_emulated(&lanes), "reads are by messages: {lanes:?}");
        (stranger, peer)
    }

    fn open(&mut self, ticket: u64, key: &Key) {
        self.say(Body::Open { ticket, regions: vec![(key.region, key.nonce)] });
        let opened = |body: &Body| match body {
            Body::Opened { ticket: of, known: true } if *of == ticket => Some(()),
            _ => None,
        };
        self.hear("Opened", opened);
    }
}

fn request(op: u64, peer: PeerId, key: &RegionKey, into: crate::contract::RegionId, len: u64) -> ReadRequest {
    let ranges = vec![ReadRange { remote_offset: 0, local_offset: 0, len }];
    let parts = vec![ReadPart { key: key.clone(), region: into, ranges }];
    ReadRequest { op: OpId(op), peer, parts, limits: ReadLimits { total: LIMIT, stall: LIMIT } }
}

/// Whoever else is there reads from the transport.
async fn is_well(owner: &UcxTransport, key: &RegionKey) {
    let reader = transport().unwrap();
    let peer = reader.connect(&owner.address(), LIMIT).unwrap();
    assert_eq!(reader.next_event().await, Some(Event::Connected { peer }));
    let into = reader.register(Memory::allocate(LEN).unwrap()).unwrap();
    reader.read(request(1, peer, key, into, LEN as u64)).unwrap();
    match tokio::time::timeout(LIMIT, reader.next_event()).await.unwrap() {
        Some(Event::ReadCompleted { outcome, .. }) => assert_eq!(outcome.result, Ok(())),
        other => panic!("{other:?}"),
    }
}

// R104
#[tokio::test]
async fn t10_whoever_asks_for_what_it_has_not_opened_gets_nothing_and_loses_its_connection() {
    let Some(owner) = transport() else { return };
    let key = owner.key(owner.register(Memory::allocate(LEN).unwrap()).unwrap()).unwrap();
    let known = Key::decode(&key).unwrap();
    let other =
        Key::decode(&owner.key(owner.register(Memory::allocate(LEN).unwrap()).unwrap()).unwrap()).unwrap();
    let right =
        Wanted { fetch: 9, ticket: 5, region: known.region, nonce: known.nonce, offset: 0, len: LEN as u64 };
    let wrong = [
        ("another ticket", Wanted { ticket: 6, ..right }),
        ("a region that was not opened", Wanted { region: other.region, nonce: other.nonce, ..right }),
        ("another registration", Wanted { nonce: known.nonce.wrapping_add(1), ..right }),
        ("more than there is", Wanted { len: LEN as u64 + 1, ..right }),
        ("what lies behind", Wanted { offset: LEN as u64, len: 1, ..right }),
        ("what wraps around", Wanted { offset: u64::MAX, len: 2, ..right }),
        ("all that can be said", Wanted { len: u64::MAX, ..right }),
    ];
    for (what, wanted) in wrong {
        let (mut stranger, peer) = Stranger::connected_to(&owner).await;
        stranger.open(5, &known);
        stranger.say(Body::Fetch(wanted));
        assert_eq!(
            stranger.loss(&owner, peer).await,
            LossReason::Protocol("bytes that were not opened"),
            "{what}"
        );
        assert_eq!(stranger.landed, [], "{what}");
    }
    // After the read was closed its regions are not open any more.
    let (mut stranger, peer) = Stranger::connected_to(&owner).await;
    stranger.open(5, &known);
    stranger.say(Body::Done { ticket: 5 });
    stranger.hear("Held", |body| matches!(body, Body::Held { ticket: 5, held: true }).then_some(()));
    stranger.say(Body::Fetch(right));
    assert_eq!(stranger.loss(&owner, peer).await, LossReason::Protocol("bytes that were not opened"));
    is_well(&owner, &key).await;
}

// R104
#[tokio::test]
async fn t10_a_question_that_is_cut_is_none_and_the_next_one_is_answered() {
    let Some(owner) = transport() else { return };
    let key = owner.key(owner.register(Memory::allocate(LEN).unwrap()).unwrap()).unwrap();
    let Key { region, nonce, .. } = Key::decode(&key).unwrap();
    let (mut stranger, _) = Stranger::connected_to(&owner).await;
    stranger.open(5, &Key::decode(&key).unwrap());
    let wanted = |fetch| Wanted { fetch, ticket: 5, region, nonce, offset: 0, len: LEN as u64 };
    let token = stranger.token;
    let whole = Frame { token, body: Body::Fetch(wanted(1)) }.encode();
    for cut in [1, 15, 16, 24, whole.len() - 1] {
        stranger.post(whole[..cut].to_vec(), false);
    }
    stranger.post([&whole[..], &[0]].concat(), false);
    // One for a connection that nobody has.
    stranger.post(Frame { token: token ^ 1, body: Body::Fetch(wanted(2)) }.encode(), false);
    stranger.say(Body::Fetch(wanted(3)));
    stranger.until("the bytes", |stranger| !stranger.landed.is_empty());
    assert_eq!(stranger.landed, [(3, LEN as u64)], "only what was asked for");
    is_well(&owner, &key).await;
}

/// A read of 1000 bytes from the stranger, and the number under which they were asked for.
async fn asked(reader: &UcxTransport, op: u64) -> (Stranger, PeerId, Memory, u64) {
    let (mut stranger, peer) = Stranger::connected_by(reader).await;
    let memory = Memory::allocate(LEN).unwrap();
    memory.write(0, &[MARK; LEN]).unwrap();
    let into = reader.register(memory.clone()).unwrap();
    let life = stranger.endpoint.life;
    let key = Key { life, region: 1, nonce: 2, base: 0, len: LEN as u64, rkey: vec![1] };
    reader.read(request(op, peer, &key.encode().unwrap(), into, 1000)).unwrap();
    let ticket = stranger.hear("Open", |body| match body {
        Body::Open { ticket, regions } if regions == &[(1, 2)] => Some(*ticket),
        _ => None,
    });
    stranger.say(Body::Opened { ticket, known: true });
    let fetch = stranger.hear("Fetch", |body| match body {
        Body::Fetch(Wanted { fetch, offset: 0, len: 1000, .. }) => Some(*fetch),
        _ => None,
    });
    (stranger, peer, memory, fetch)
}

fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

fn marked_from(bytes: &[u8], from: usize) -> bool {
    bytes[from..].iter().all(|byte| *byte == MARK)
}

// R104
#[tokio::test]
async fn t10_an_owner_that_sends_other_bytes_than_were_asked_for_loses_its_connection_and_the_read_fails() {
    let Some(reader) = transport() else { return };
    type Deed = fn(&mut Stranger, u64);
    let wrong: [(&str, usize, Deed); 6] = [
        ("more bytes", 0, |s, fetch| s.send_bytes(fetch, 0, 1001)),
        ("bytes behind the last", 0, |s, fetch| s.send_bytes(fetch, 1000, 1)),
        ("bytes over the last", 0, |s, fetch| s.send_bytes(fetch, 999, 2)),
        ("bytes at no place at all", 0, |s, fetch| s.send_bytes(fetch, u64::MAX, 2)),
        ("no bytes", 0, |s, fetch| s.send_bytes(fetch, 0, 0)),
        ("some of them twice", 600, |s, fetch| {
            s.send_bytes(fetch, 0, 600);
            s.send_bytes(fetch, 0, 600);
        }),
    ];
    for (op, (what, written, deed)) in (0..).zip(wrong) {
        let (mut stranger, peer, memory, fetch) = asked(&reader, op).await;
        deed(&mut stranger, fetch);
        let reason = LossReason::Protocol("other bytes than were asked for");
        match stranger.event(&reader).await {
            Event::ReadCompleted { op: of, outcome } if of == OpId(op) => {
                assert_eq!(outcome.result, Err(ReadError::PeerLost(reason.clone())), "{what}");
            }
            other => panic!("{what}: {other:?}"),
        }
        assert_eq!(stranger.loss(&reader, peer).await, reason, "{what}");
        assert!(marked_from(&bytes_of(&memory), written), "{what}: nothing else was written");
    }
    // The word for bytes without bytes has no place in a connection.
    let (mut stranger, peer, _, fetch) = asked(&reader, 100).await;
    stranger.say(Body::Bytes { fetch, at: 0 });
    assert!(matches!(stranger.event(&reader).await, Event::ReadCompleted { .. }));
    assert_eq!(stranger.loss(&reader, peer).await, LossReason::Protocol("what has no place in a connection"));
    let key = reader.key(reader.register(Memory::allocate(LEN).unwrap()).unwrap()).unwrap();
    is_well(&reader, &key).await;
}

// R104
#[tokio::test]
async fn t10_bytes_that_nobody_asked_for_are_written_nowhere_and_the_read_goes_on() {
    let Some(reader) = transport() else { return };
    let (mut stranger, _, memory, fetch) = asked(&reader, 1).await;
    let token = stranger.token;
    stranger.send_bytes(fetch + 1000, 0, 1000);
    let whole = Frame { token, body: Body::Bytes { fetch, at: 0 } }.encode();
    for cut in [1, 15, 16, 24, whole.len() - 1] {
        stranger.send_beside(whole[..cut].to_vec(), 0, 1000);
    }
    // Beside a frame of another kind, and for a connection that nobody has.
    stranger.send_beside(Frame { token, body: Body::Ping }.encode(), 0, 1000);
    stranger.send_beside(Frame { token: token ^ 1, body: Body::Bytes { fetch, at: 0 } }.encode(), 0, 1000);
    // Frames do not overtake each other here, so that all of it has come when the half that is asked for has.
    stranger.send_bytes(fetch, 500, 500);
    let until = Instant::now() + LIMIT;
    while marked_from(&bytes_of(&memory), 500) {
        assert!(Instant::now() < until, "nothing came");
        stranger.turn();
    }
    assert!(bytes_of(&memory)[..500].iter().all(|byte| *byte == MARK), "only what was asked for is written");
    stranger.send_bytes(fetch, 0, 500);
    let ticket = stranger.hear("Done", |body| match body {
        Body::Done { ticket } => Some(*ticket),
        _ => None,
    });
    stranger.say(Body::Held { ticket, held: true });
    match stranger.event(&reader).await {
        Event::ReadCompleted { outcome, .. } => assert_eq!(outcome.result, Ok(())),
        other => panic!("{other:?}"),
    }
    let mut sent = vec![0; 1000];
    stranger.memory.memory.read(0, &mut sent).unwrap();
    let bytes = bytes_of(&memory);
    assert_eq!(bytes[..1000], sent);
    assert!(marked_from(&bytes, 1000));
}

// R104
#[tokio::test]
async fn t3_what_an_owner_sends_after_the_read_has_ended_is_written_nowhere() {
    let Some(reader) = transport() else { return };
    let (mut stranger, peer, memory, fetch) = asked(&reader, 1).await;
    reader.cancel(OpId(1));
    match stranger.event(&reader).await {
        Event::ReadCompleted { outcome, .. } => assert_eq!(outcome.result, Err(ReadError::Cancelled)),
        other => panic!("{other:?}"),
    }
    stranger.send_bytes(fetch, 0, 1000);
    // It has sent what it was asked for: what comes again is as what nobody asked for.
    stranger.send_bytes(fetch, 0, 1000);
    stranger.say(Body::Message(vec![1]));
    assert_eq!(stranger.event(&reader).await, Event::Message { peer, bytes: vec![1] });
    assert!(marked_from(&bytes_of(&memory), 0));
}
