//! The tcp transport in processes of its own: what ends with them, and what their end does to others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed step is a failed test.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Address, Event, LossReason, Memory, OpId, PeerId, ReadError, ReadLimits, ReadPart, ReadRange,
    ReadRequest, RegionKey, Transport,
};

const LIMIT: Duration = Duration::from_secs(10);
const ROLE: &str = "KV_TRANSPORT_TEST_ROLE";

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

async fn event(transport: &TcpTransport) -> Event {
    tokio::time::timeout(LIMIT, transport.next_event()).await.expect("no event").expect("closed")
}

/// The other process.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn start(role: &str) -> Self {
        let mut child = Command::new("sh")
            .args(["-c", "ulimit -n 64; exec \"$0\" --ignored --exact --nocapture the_other_process"])
            .arg(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// The words after a mark that nothing else prints.
    fn words(&mut self) -> Vec<String> {
        for line in self.output.by_ref().lines() {
            if let Some((_, words)) = line.unwrap().split_once("@@ ") {
                return words.split(' ').map(str::to_owned).collect();
            }
        }
        panic!("the other process ended");
    }

    fn say(&mut self) {
        self.input.write_all(b"\n").unwrap();
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
#[ignore = "the other half of the tests here, which start it"]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let wait = || {
        std::io::stdin().lines().next();
    };
    let say = |words: String| {
        println!("@@ {words}");
        std::io::stdout().flush().unwrap();
    };
    match role.as_str() {
        "serve" => {
            let server = TcpTransport::bind(TcpConfig::default()).unwrap();
            let region = server.register(Memory::allocate(64 << 20).unwrap()).unwrap();
            let (address, key) = (server.address(), server.key(region).unwrap());
            say(format!("{} {}", to_hex(address.as_bytes()), to_hex(key.as_bytes())));
            wait();
        }
        "no descriptors" => {
            let server = TcpTransport::bind(TcpConfig::default()).unwrap();
            let mut files = vec![];
            while let Ok(file) = File::open("/dev/null") {
                files.push(file);
            }
            assert!(!files.is_empty());
            say(to_hex(server.address().as_bytes()));
            wait();
            drop(files);
            wait();
        }
        "threads" => {
            let count = |place: &str| std::fs::read_dir(place).unwrap().count();
            let now = || (count("/proc/self/task"), count("/proc/self/fd"));
            // A process's first runtime opens what all later ones share, such as the pipe for signals.
            drop(TcpTransport::bind(TcpConfig::default()).unwrap());
            let before = now();
            let (a, b) = (
                TcpTransport::bind(TcpConfig::default()).unwrap(),
                TcpTransport::bind(TcpConfig::default()).unwrap(),
            );
            let peer = a.connect(&b.address(), LIMIT).unwrap();
            a.send(peer, vec![1]).unwrap();
            assert_eq!(now().0, before.0 + 2);
            let start = Instant::now();
            drop(a);
            drop(b);
            assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
            assert_eq!(now(), before);
            say("done".into());
        }
        other => panic!("{other}"),
    }
}

#[test]
fn t11_drop_ends_threads_and_sockets() {
    assert_eq!(Other::start("threads").words(), ["done"]);
}

/// A peer in another process, and a read from it that takes long.
async fn reading(config: TcpConfig) -> (Other, TcpTransport, PeerId) {
    let mut other = Other::start("serve");
    let words = other.words();
    let client = TcpTransport::bind(config).unwrap();
    let peer = client.connect(&Address::from_bytes(from_hex(&words[0])).unwrap(), LIMIT).unwrap();
    assert_eq!(event(&client).await, Event::Connected { peer });
    other.signal("-STOP");
    let region = client.register(Memory::allocate(64 << 20).unwrap()).unwrap();
    let key = RegionKey::from_bytes(from_hex(&words[1])).unwrap();
    let ranges = vec![ReadRange { remote_offset: 0, local_offset: 0, len: 64 << 20 }];
    let limits = ReadLimits { total: LIMIT, stall: LIMIT };
    let parts = vec![ReadPart { key, region, ranges }];
    client.read(ReadRequest { op: OpId(1), peer, parts, limits }).unwrap();
    (other, client, peer)
}

async fn assert_lost(client: &TcpTransport, peer: PeerId, reason: LossReason) {
    match event(client).await {
        Event::ReadCompleted { op: OpId(1), outcome } => {
            assert_eq!(outcome.result, Err(ReadError::PeerLost(reason.clone())));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(event(client).await, Event::PeerLost { peer, reason });
}

#[tokio::test]
async fn t6_a_killed_process_ends_reads_from_it() {
    let (mut other, client, peer) = reading(TcpConfig::default()).await;
    other.child.kill().unwrap();
    assert_lost(&client, peer, LossReason::ClosedByPeer).await;
}

#[tokio::test]
async fn t8_a_stopped_process_is_silent() {
    let config = TcpConfig {
        keep_alive: Duration::from_millis(100),
        silence_limit: Duration::from_millis(500),
        ..TcpConfig::default()
    };
    let (_other, client, peer) = reading(config).await;
    assert_lost(&client, peer, LossReason::Silent).await;
}

#[tokio::test]
async fn accepting_survives_a_lack_of_descriptors() {
    let mut other = Other::start("no descriptors");
    let address = Address::from_bytes(from_hex(&other.words()[0])).unwrap();
    let client = TcpTransport::bind(TcpConfig::default()).unwrap();
    let peer = client.connect(&address, LIMIT).unwrap();
    let early = tokio::time::timeout(Duration::from_millis(300), client.next_event()).await;
    assert!(early.is_err(), "{early:?}");
    other.say();
    assert_eq!(event(&client).await, Event::Connected { peer });
}
