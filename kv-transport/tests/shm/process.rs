//! Peers in processes of their own: killed, stopped, and of another user.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kv_transport::shm::{ShmConfig, ShmTransport};
use kv_transport::{Address, Event, LossReason, Memory, PeerId, ReadError, RegionId, RegionKey, Transport};

use crate::support::{LIMIT, bind, completion, contents, event, filled, loss, range, request};

const ROLE: &str = "KV_TRANSPORT_TEST_ROLE";
const VISIT: &str = "KV_TRANSPORT_TEST_VISIT";
const BYTES: usize = 32 << 20;

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// The other process.
struct Other {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn start(role: &str, change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "--nocapture", "process::the_other_process"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn words(&mut self) -> Vec<String> {
        for line in self.output.by_ref().lines() {
            if let Some((_, words)) = line.unwrap().split_once("@@ ") {
                return words.split(' ').map(str::to_owned).collect();
            }
        }
        panic!("the other process ended");
    }

    /// Stops it, and waits until it has stopped: the signal alone is no fact yet.
    fn stop(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-STOP", &pid]).status().unwrap().success());
        let end = Instant::now() + LIMIT;
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            if stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')) {
                return;
            }
            assert!(Instant::now() < end, "it does not stop: {stat}");
            std::thread::yield_now();
        }
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
    let say = |words: String| {
        println!("@@ {words}");
        std::io::stdout().flush().unwrap();
    };
    if role == "intrude" {
        say(intrude(&from_hex(&std::env::var(VISIT).unwrap())));
        return;
    }
    let transport = bind();
    if role == "visit" {
        let address = Address::from_bytes(from_hex(&std::env::var(VISIT).unwrap())).unwrap();
        let peer = transport.connect(&address, LIMIT).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        say(runtime.block_on(loss(&transport, peer)).to_string());
    } else {
        let key = |shared| transport.key(transport.register(filled(BYTES, shared, 5)).unwrap()).unwrap();
        let keys = [key(true), key(false)].map(|key| to_hex(key.as_bytes()));
        say(format!("{} {} {}", to_hex(transport.address().as_bytes()), keys[0], keys[1]));
    }
    std::io::stdin().lines().next();
}

/// Connects without any of our own checks, says what a peer would say, and tells what came back.
fn intrude(address: &[u8]) -> String {
    use std::os::linux::net::SocketAddrExt;

    // "ks" 1, host 16, nonce 16, name 16.
    let (nonce, name) = (&address[19..35], to_hex(&address[35..51]));
    let mut preface = b"kvTCP\r\n\x1a\x01\0\0\0".to_vec();
    for granted in [128u32, 1 << 20, 1024, 0, 0] {
        preface.extend_from_slice(&granted.to_le_bytes());
    }
    preface.extend_from_slice(&[7; 16]);
    preface.extend_from_slice(nonce);
    let mut question = b"kvSHM\r\n\x01".to_vec();
    question.extend_from_slice(nonce);
    question.resize(64, 0);
    let mut answers = vec![];
    for (socket, words) in [("c", preface), ("g", question)] {
        let at =
            std::os::unix::net::SocketAddr::from_abstract_name(format!("kv-shm-{name}-{socket}")).unwrap();
        let mut stream = std::os::unix::net::UnixStream::connect_addr(&at).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        // It may be closed before all was said.
        stream.write_all(&words).ok();
        let mut answer = vec![];
        stream.read_to_end(&mut answer).ok();
        answers.push(answer.len().to_string());
    }
    answers.join(" ")
}

/// A peer in another process, with keys of its shared and of its other memory.
async fn elsewhere(config: ShmConfig) -> (Other, ShmTransport, PeerId, [RegionKey; 2]) {
    let mut other = Other::start("serve", |_| {});
    let words = other.words();
    let client = ShmTransport::bind(config).unwrap();
    let peer = client.connect(&Address::from_bytes(from_hex(&words[0])).unwrap(), LIMIT).unwrap();
    assert_eq!(event(&client).await, Event::Connected { peer });
    let key = |at: usize| RegionKey::from_bytes(from_hex(&words[at])).unwrap();
    (other, client, peer, [key(1), key(2)])
}

fn destination(client: &ShmTransport) -> (Memory, RegionId) {
    let memory = Memory::allocate(BYTES).unwrap();
    (memory.clone(), client.register(memory).unwrap())
}

#[tokio::test]
async fn t2_memory_of_another_process_arrives_on_both_lanes() {
    let (_other, client, peer, keys) = elsewhere(ShmConfig::default()).await;
    let (memory, region) = destination(&client);
    let expected = contents(&filled(BYTES, false, 5));
    for (op, key) in keys.iter().enumerate() {
        memory.write(0, &vec![0; BYTES]).unwrap();
        client.read(request(op as u64, peer, key, region, vec![range(0, 0, BYTES as u64)])).unwrap();
        assert_eq!(completion(&client, op as u64).await.result, Ok(()));
        assert!(contents(&memory) == expected);
    }
    assert_eq!(client.lane(peer).as_deref(), Some("mixed"));
}

#[tokio::test]
async fn a_stopped_process_can_be_read_and_is_silent_in_the_end() {
    let config = ShmConfig {
        keep_alive: Duration::from_millis(100),
        silence_limit: Duration::from_millis(500),
        ..ShmConfig::default()
    };
    let (other, client, peer, keys) = elsewhere(config).await;
    let (_, region) = destination(&client);
    for (op, key) in keys.iter().enumerate() {
        client.read(request(op as u64, peer, key, region, vec![range(0, 0, 64)])).unwrap();
        assert_eq!(completion(&client, op as u64).await.result, Ok(()));
    }
    other.stop();
    for (op, key) in keys.iter().enumerate() {
        client.read(request(10 + op as u64, peer, key, region, vec![range(0, 0, 1 << 20)])).unwrap();
        assert_eq!(completion(&client, 10 + op as u64).await.result, Ok(()));
    }
    assert_eq!(loss(&client, peer).await, LossReason::Silent);
}

#[tokio::test]
async fn t8_a_peer_that_stopped_before_it_was_asked_costs_a_limit_and_no_more() {
    let (other, client, peer, keys) = elsewhere(ShmConfig::default()).await;
    let (_, region) = destination(&client);
    other.stop();
    let mut read = request(1, peer, &keys[0], region, vec![range(0, 0, BYTES as u64)]);
    read.limits.stall = Duration::from_millis(200);
    let start = Instant::now();
    client.read(read).unwrap();
    assert_eq!(completion(&client, 1).await.result, Err(ReadError::Stalled));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    // A cancel is heard while the peer is asked, too.
    client.read(request(2, peer, &keys[0], region, vec![range(0, 0, BYTES as u64)])).unwrap();
    client.cancel(kv_transport::OpId(2));
    assert_eq!(completion(&client, 2).await.result, Err(ReadError::Cancelled));
}

#[tokio::test]
async fn t6_a_killed_process_is_noticed_at_once_and_nothing_crashes_or_is_written_later() {
    let mut lost_in_a_read = 0;
    for round in 0..6u64 {
        let (mut other, client, peer, keys) = elsewhere(ShmConfig::default()).await;
        let (memory, region) = destination(&client);
        let key = &keys[(round % 2) as usize];
        client.read(request(0, peer, key, region, vec![range(0, 0, 64)])).unwrap();
        assert_eq!(completion(&client, 0).await.result, Ok(()));
        let whole = || vec![range(0, 0, BYTES as u64)];
        client.read(request(1, peer, key, region, whole())).unwrap();
        other.child.kill().unwrap();
        let start = Instant::now();
        let mut op = 1;
        // Until the loss is told, reads either bring what was there or say what happened.
        loop {
            match event(&client).await {
                Event::PeerLost { reason, .. } => {
                    assert_eq!(reason, LossReason::ClosedByPeer);
                    break;
                }
                Event::ReadCompleted { outcome, .. } => {
                    match outcome.result {
                        Ok(()) => {}
                        Err(ReadError::PeerLost(LossReason::ClosedByPeer)) => lost_in_a_read += 1,
                        Err(other) => panic!("{other}"),
                    }
                    op += 1;
                    // Refused once the loss is on its way.
                    client.read(request(op, peer, key, region, whole())).ok();
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        memory.write(0, &vec![0xee; BYTES]).unwrap();
        other.child.wait().unwrap();
        assert!(contents(&memory).iter().all(|byte| *byte == 0xee), "written after the loss");
    }
    assert!(lost_in_a_read > 0, "no kill fell into a read");
}

#[test]
fn a_process_of_another_user_gets_nothing() {
    if !rustix::process::geteuid().is_root() {
        println!("left out: only root can start a process of another user");
        return;
    }
    let here = bind();
    let mut other = Other::start("visit", |command| {
        command.uid(65_534).env(VISIT, to_hex(here.address().as_bytes()));
    });
    let words = other.words().join(" ");
    // Whichever of the two looks first.
    let refused =
        words.starts_with("could not be reached: permission denied") || words == "closed by the peer";
    assert!(refused, "{words}");
    // One that leaves our own checks out gets not a byte, at neither socket.
    let mut intruder = Other::start("intrude", |command| {
        command.uid(65_534).env(VISIT, to_hex(here.address().as_bytes()));
    });
    assert_eq!(intruder.words(), ["0", "0"]);
    // The same words from this user are answered, so that it is not they that were refused.
    let mut friend = Other::start("intrude", |command| {
        command.env(VISIT, to_hex(here.address().as_bytes()));
    });
    let answers = friend.words();
    assert!(answers[0] != "0" && answers[1] != "0", "{answers:?}");
}
