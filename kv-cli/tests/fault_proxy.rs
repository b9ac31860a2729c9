//! `kvx fault-proxy` before a server that answers what it hears.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout};
use std::time::{Duration, Instant};

use common::proc::terminate;
use common::{LIMIT, Server, block_on, kvx, my_turn, prompt, reference, run, tokens, wait};
use serde_json::Value;

/// A server that sends back what it gets. It lives as long as the test's process.
fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut &stream, &mut &stream);
                let _ = stream.shutdown(Shutdown::Write);
            });
        }
    });
    address
}

struct Proxy {
    child: Child,
    out: BufReader<ChildStdout>,
    address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Proxy {
    fn under(plan: &str) -> Self {
        Self::before(echo(), plan)
    }

    fn before(to: SocketAddr, plan: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("plan.toml");
        std::fs::write(&file, plan).unwrap();
        let mut child =
            kvx(&["fault-proxy", "--to", &to.to_string(), "--plan", file.to_str().unwrap(), "--json"]);
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let first: Value = serde_json::from_str(&line).unwrap();
        let address = first["listening"].as_str().unwrap().parse().unwrap();
        Self { child, out, address, _folder: folder }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Says something and ends; what comes back before the stream ends, and how it ends.
    fn ask(&self, text: &[u8]) -> (Vec<u8>, Option<ErrorKind>) {
        let mut stream = self.connect();
        // The proxy may have ended the connection before it is spoken to; what comes back tells.
        let _ = stream.write_all(text);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let ended = stream.read_to_end(&mut answer).err().map(|error| error.kind());
        (answer, ended)
    }

    /// Ends it with a signal; what it counted.
    fn end(mut self, signal: &str) -> Value {
        terminate(self.child.id(), signal);
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        let status = wait(&mut self.child, LIMIT).expect("it ends");
        assert_eq!(status.code(), Some(0));
        serde_json::from_str(rest.lines().last().unwrap()).unwrap()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // It has ended already, or is not to outlive a test that failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[test]
fn without_rules_every_byte_passes() {
    for signal in ["INT", "TERM"] {
        let proxy = Proxy::under("");
        assert_eq!(proxy.ask(&text(300_000)), (text(300_000), None));
        let report = proxy.end(signal);
        assert_eq!(report["connections"], 1);
        assert_eq!((&report["bytes_up"], &report["bytes_down"]), (&300_000.into(), &300_000.into()));
        assert_eq!(report["faults"], serde_json::json!({}));
    }
}

#[test]
fn a_cut_comes_after_exactly_so_many_bytes_and_by_the_pattern() {
    let plan = "[[rules]]\nfault = 'cut'\ndirection = 'down'\npattern = 'XOOXO'\nafter_bytes = 1000";
    let proxy = Proxy::under(plan);
    for number in 1..=6 {
        let (answer, ended) = proxy.ask(&text(5000));
        let whole = if [1, 4, 6].contains(&number) { 1000 } else { 5000 };
        assert_eq!((answer, ended), (text(5000)[..whole].to_vec(), None), "connection {number}");
    }
    let report = proxy.end("TERM");
    assert_eq!(report["faults"]["cut"], 3);
    assert_eq!(report["recording"]["rules"][1]["at"], serde_json::json!([4]));
}

#[test]
fn a_stall_says_nothing_and_does_not_end() {
    let plan = "[[rules]]\nfault = 'stall'\ndirection = 'down'\nafter_bytes = 3\nat = [1]\n
        [[rules]]\nfault = 'stall'\nfor_ms = 60\nat = [2]\ndirection = 'up'";
    let proxy = Proxy::under(plan);
    let mut stream = proxy.connect();
    stream.write_all(b"abcdef").unwrap();
    let mut three = [0; 3];
    stream.read_exact(&mut three).unwrap();
    assert_eq!(&three, b"abc");
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let silent = stream.read(&mut three).unwrap_err().kind();
    assert!(matches!(silent, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{silent:?}");
    let begun = Instant::now();
    assert_eq!(proxy.ask(b"later"), (b"later".to_vec(), None));
    assert!(begun.elapsed() >= Duration::from_millis(60));
    assert_eq!(proxy.end("INT")["faults"]["stall"], 2);
}

#[test]
fn corruption_changes_one_byte_and_its_recording_changes_it_again() {
    let at_byte = "[[rules]]\nfault = 'corrupt'\ndirection = 'up'\nafter_bytes = 500\nat = [2]";
    let by_chance = "seed = 5\n[[rules]]\nfault = 'corrupt'\nper_chunk = 1.0\ndirection = 'down'";
    for (plan, place) in [(at_byte, Some(500)), (by_chance, None)] {
        let proxy = Proxy::under(plan);
        let clean = proxy.ask(&text(1000)).0;
        let answer = proxy.ask(&text(1000)).0;
        let changed: Vec<usize> = (0..1000).filter(|i| answer[*i] != text(1000)[*i]).collect();
        match place {
            Some(place) => assert_eq!((changed, clean.clone()), (vec![place], text(1000))),
            None => assert!(!changed.is_empty() && clean != text(1000)),
        }
        let recording = proxy.end("TERM")["recording"].to_string();
        let again = Proxy::under(&recording);
        assert_eq!((again.ask(&text(1000)).0, again.ask(&text(1000)).0), (clean, answer));
    }
}

#[test]
fn connections_are_refused_answered_garbage_hung_and_reset() {
    let plan = "seed = 1
        [[rules]]\nfault = 'refuse'\nat = [1]
        [[rules]]\nfault = 'garbage'\nbytes = 40\nat = [2, 3]
        [[rules]]\nfault = 'reset'\ndirection = 'up'\nafter_bytes = 100\nat = [4]
        [[rules]]\nfault = 'hang'\nat = [5]";
    let proxy = Proxy::under(plan);
    let (answer, ended) = proxy.ask(b"x");
    assert_eq!((answer.len(), ended), (0, Some(ErrorKind::ConnectionReset)), "refused");
    let (first, second) = (proxy.ask(&text(100)), proxy.ask(&text(100)));
    assert_eq!((first.0.len(), second.0.len(), first.1), (40, 40, None), "garbage");
    assert!(first.0 != second.0 && first.0 != text(100)[..40]);
    assert_eq!(proxy.ask(&text(5000)).1, Some(ErrorKind::ConnectionReset), "reset");
    let mut hung = proxy.connect();
    hung.write_all(b"hello?").unwrap();
    hung.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(hung.read(&mut [0]).is_err(), "hung");
    assert_eq!(proxy.ask(b"well"), (b"well".to_vec(), None));
    let report = proxy.end("TERM");
    assert_eq!(report["faults"], serde_json::json!({ "garbage": 2, "hang": 1, "refuse": 1, "reset": 1 }));
    assert_eq!(report["connections"], 6);
}

#[test]
fn streams_are_silenced_half_closed_delayed_and_throttled() {
    let plan = "
        [[rules]]\nfault = 'half_close'\ndirection = 'up'\nafter_bytes = 10\nat = [1]
        [[rules]]\nfault = 'delay'\ndelay_ms = 60\ndirection = 'down'\nat = [2]
        [[rules]]\nfault = 'throttle'\nbytes_per_s = 20000\ndirection = 'up'\nat = [3]
        [[rules]]\nfault = 'silence'\ndirection = 'up'\nafter_bytes = 2\nat = [4]";
    let proxy = Proxy::under(plan);
    assert_eq!(proxy.ask(&text(100)), (text(10), None), "the upstream heard an end after ten bytes");
    for (what, len) in [("delay", 5), ("throttle", 2000)] {
        let begun = Instant::now();
        assert_eq!(proxy.ask(&text(len)), (text(len), None), "{what}");
        assert!(begun.elapsed() >= Duration::from_millis(60), "{what}: {:?}", begun.elapsed());
    }
    let mut stream = proxy.connect();
    stream.write_all(b"abcd").unwrap();
    let mut two = [0; 2];
    stream.read_exact(&mut two).unwrap();
    assert_eq!(&two, b"ab");
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(stream.read(&mut two).is_err(), "the rest was swallowed, and nothing ended");
    let report = proxy.end("TERM");
    for name in ["half_close", "delay", "throttle", "silence"] {
        assert_eq!(report["faults"][name], 1, "{report}");
    }
}

#[test]
fn an_upstream_that_is_not_there_costs_the_connection_only() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let proxy = Proxy::before(nobody, "");
    let (answer, ended) = proxy.ask(b"x");
    assert_eq!((answer.len(), ended), (0, Some(ErrorKind::ConnectionReset)));
    assert_eq!(proxy.end("TERM")["upstream_failed"], 1);
}

#[test]
fn the_example_is_a_plan_and_bad_ones_cost_exit_code_2() {
    let (code, example, err) = run(&["fault-proxy", "--example"]);
    assert_eq!(code, 0, "{err}");
    let proxy = Proxy::under(&example);
    assert_eq!(proxy.ask(b"through"), (b"through".to_vec(), None));
    proxy.end("TERM");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.toml");
    let path = file.to_str().unwrap();
    for (rule, words) in [
        ("fault = 'burn'", "rules[0].fault is \"burn\"; known are refuse, hang"),
        ("direction = 'up'", "rules[0].fault is missing"),
        ("fault = 'cut'\ndirection = 'left'", "rules[0].direction: unknown variant `left`"),
        ("fault = 'cut'\nafter_bytes = -1", "rules[0].after_bytes: invalid value: integer `-1`"),
        ("fault = 'cut'\nper_chunk = 2.0", "rules[0].per_chunk is 2; more than 0"),
        ("fault = 'cut'\nper_chunk = 0.5\nafter_bytes = 1", "rules[0].per_chunk is given; not beside"),
        ("fault = 'delay'", "rules[0].delay_ms is missing"),
        ("fault = 'throttle'\nbytes_per_s = 0", "rules[0].bytes_per_s is 0; at least 1"),
        ("fault = 'refuse'\nafter_bytes = 5", "rules[0].after_bytes means nothing for the fault refuse"),
        ("fault = 'garbage'\nbytes = 0", "rules[0].bytes is 0; 1 to 16777216"),
        ("fault = 'cut'\npattern = 'OO'", "rules[0].pattern is \"OO\""),
        ("fault = 'cut'\nprobability = 7", "rules[0].probability"),
    ] {
        std::fs::write(&file, format!("[[rules]]\n{rule}")).unwrap();
        let (code, out, err) = run(&["fault-proxy", "--to", "127.0.0.1:1", "--plan", path]);
        assert_eq!((code, out.as_str()), (2, ""), "{rule}: {err}");
        assert!(err.contains(words) && err.contains(path), "{words:?} is missing: {err}");
    }
    std::fs::write(&file, "").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (arguments, words) in [
        (vec!["--to", "127.0.0.1:1", "--plan", "no/such/plan"], "no/such/plan"),
        (vec!["--to", "127.0.0.1:1", "--plan", path, "--listen", &address], address.as_str()),
        (vec!["--to", "nowhere", "--plan", path], "nowhere"),
        (vec!["--plan", path], "--to"),
    ] {
        let (code, _, err) = run(&[vec!["fault-proxy"], arguments].concat());
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(words), "{words:?} is missing: {err}");
    }
}

#[test]
fn the_handshake_of_real_engines_goes_through_the_proxy_by_the_routers_params() {
    let _turn = my_turn();
    let (p, d) = (Server::connected("p", &[]), Server::connected("d", &[]));
    let port: SocketAddr = format!("127.0.0.1:{}", p.handshake_port).parse().unwrap();
    block_on(async {
        // The connections of a D that got nowhere may come again, so the faults have a proxy of their own.
        for (plan, from_p) in
            [("[[rules]]\nfault = 'garbage'", 0), ("[[rules]]\nfault = 'hang'", 0), ("", 40)]
        {
            let proxy = Proxy::before(port, plan);
            let prompt = prompt(from_p + plan.len() as u32, 40);
            let mut params = p.prefill("r", &prompt).await;
            params["remote_port"] = proxy.address.port().into();
            let (status, answer) = d.ask("r", &prompt, 5, &params).await;
            assert_eq!((status, tokens(&answer)), (200, reference(&prompt, 5)), "{answer}");
            let external = &answer["usage"]["prompt_tokens_details"]["external_tokens"];
            assert_eq!(*external, from_p, "{plan}: {answer}");
            let report = proxy.end("TERM");
            assert!(report["connections"].as_u64() > Some(0), "{report}");
        }
        p.settled().await;
        d.settled().await;
    });
}
