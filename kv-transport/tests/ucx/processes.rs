//! Peers in processes of their own.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kv_transport::ucx::{UcxConfig, UcxTransport};
use kv_transport::{Address, Event, PeerId, RegionKey, Transport, TransportError};

use crate::support::*;

const ROLE: &str = "KV_TRANSPORT_TEST_ROLE";
const LANES: &str = "KV_TRANSPORT_TEST_LANES";

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// The other process.
pub(crate) struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    pub(crate) fn start(role: &str) -> Self {
        Self::start_on(role, TCP)
    }

    pub(crate) fn start_on(role: &str, lanes: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "processes::the_other_process"])
            .env(ROLE, role)
            .env(LANES, lanes)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// The words after a mark that nothing else prints.
    pub(crate) fn words(&mut self) -> Vec<String> {
        for line in self.output.by_ref().lines() {
            if let Some((_, words)) = line.unwrap().split_once("@@ ") {
                return words.split(' ').map(str::to_owned).collect();
            }
        }
        panic!("the other process ended");
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Says a line to it.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.input.take());
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A process that offers 64 MiB, connected, and the key.
pub(crate) async fn serving(reader: &UcxTransport, lanes: &str) -> (Other, PeerId, RegionKey) {
    let mut other = Other::start_on("serve", lanes);
    let words = other.words();
    let peer = reader.connect(&Address::from_bytes(from_hex(&words[0])).unwrap(), LIMIT).unwrap();
    assert_eq!(event(reader).await, Event::Connected { peer });
    (other, peer, RegionKey::from_bytes(from_hex(&words[1])).unwrap())
}

#[test]
#[ignore = "the other half of the tests here, which start it"]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let lanes = std::env::var(LANES).unwrap();
    let say = |words: String| {
        println!("@@ {words}");
        std::io::stdout().flush().unwrap();
    };
    match role.as_str() {
        "serve" => {
            let server = transport(&lanes).unwrap();
            let (_, key) = offer(&server, &pattern(64 << 20, 1));
            say(format!("{} {}", to_hex(server.address().as_bytes()), to_hex(key.as_bytes())));
            std::io::stdin().lines().next();
        }
        "read" => {
            let reader = transport(&lanes).unwrap();
            let line = std::io::stdin().lines().next().unwrap().unwrap();
            let (address, key) = line.split_once(' ').unwrap();
            let key = RegionKey::from_bytes(from_hex(key)).unwrap();
            let peer = reader.connect(&Address::from_bytes(from_hex(address)).unwrap(), LIMIT).unwrap();
            let region = reader.register(memory(&vec![0; 64 << 20])).unwrap();
            let mut ops = 0..;
            let mut submit =
                || reader.read(request(ops.next().unwrap(), peer, &key, region, vec![range(0, 0, 64 << 20)]));
            for _ in 0..4 {
                submit().unwrap();
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(event(&reader));
            say("reading".into());
            // Until somebody ends this.
            while let Event::ReadCompleted { .. } = runtime.block_on(event(&reader)) {
                submit().ok();
            }
        }
        "no library" => {
            let config = UcxConfig { library: Some("/nowhere/at/all".into()), ..UcxConfig::default() };
            match UcxTransport::open(config) {
                Err(TransportError::Library { problem, .. }) if problem.contains("/nowhere/at") => {
                    say("refused".into());
                }
                other => panic!("{other:?}"),
            }
        }
        "threads" => {
            let count = |place: &str| std::fs::read_dir(place).unwrap().count();
            let now = || (count("/proc/self/task"), count("/proc/self/fd"));
            // The first one starts what UCX keeps for the life of the process.
            let Some(first) = transport(&lanes) else { return say("skipped".into()) };
            drop(first);
            let before = now();
            for _ in 0..5 {
                let (a, b) = (transport(&lanes).unwrap(), transport(&lanes).unwrap());
                let peer = a.connect(&b.address(), LIMIT).unwrap();
                a.send(peer, vec![1]).unwrap();
                assert!(now().0 >= before.0 + 2);
                let start = Instant::now();
                drop(a);
                drop(b);
                assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
            }
            assert_eq!(now(), before);
            say("done".into());
        }
        "idle" => {
            let Some(a) = transport(&lanes) else { return say("skipped".into()) };
            let b = transport(&lanes).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let used = runtime.block_on(async {
                link(&a, &b).await;
                let before = processor_ticks();
                // Nothing happens but pings.
                let quiet = tokio::time::timeout(Duration::from_secs(3), a.next_event()).await;
                assert!(quiet.is_err(), "{quiet:?}");
                processor_ticks() - before
            });
            say(format!("used {used}"));
        }
        other => panic!("{other}"),
    }
}

/// Hundredths of a second that this process has used.
fn processor_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let words: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    words[11].parse::<u64>().unwrap() + words[12].parse::<u64>().unwrap()
}

/// Both threads sleep: a thread that polls would use 300 ticks.
#[test]
fn idle_peers_use_next_to_nothing() {
    for lanes in [TCP, SHARED] {
        let words = Other::start_on("idle", lanes).words();
        if let [_, used] = &words[..] {
            assert!(used.parse::<u64>().unwrap() < 30, "{lanes}: {used} ticks in 3 s");
        }
    }
}
