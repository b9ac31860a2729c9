//! Processes of `kvx`, started by the tests and ended by them.
#![allow(dead_code)] // Each test file uses a part of it.

pub(crate) mod proc;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_testkit::engine::model::{Chunk, ModelConfig, Shard, SoloReduce, VecStore, Weights};
use reqwest::header::HeaderValue;
use serde_json::{Value, json};

/// How long the tests wait for a fact.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Starts `kvx` with piped standard streams.
pub(crate) fn kvx(arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_kvx"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for a process, and kills it if it does not end.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + limit;
    while Instant::now() < until {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        // A child's end can only be asked for.
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// Collects what a process says.
fn collect(mut from: impl Read + Send + 'static) -> Receiver<String> {
    let (to, all) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        let _ = to.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    all
}

/// Runs a command to its end: exit code, standard output, standard error.
pub(crate) fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut child = kvx(arguments);
    drop(child.stdin.take());
    let out = collect(child.stdout.take().unwrap());
    let err = collect(child.stderr.take().unwrap());
    let status = wait(&mut child, LIMIT);
    let (out, err) = (out.recv().unwrap(), err.recv().unwrap());
    let status = status.unwrap_or_else(|| panic!("kvx {arguments:?} did not end within {LIMIT:?}: {err}"));
    (status.code().unwrap(), out, err)
}

/// An engine process.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    pub(crate) url: String,
    pub(crate) handshake_port: u16,
    said: Arc<Mutex<String>>,
}

impl Server {
    /// `kvx serve` with these arguments, ready.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::run("serve", arguments)
    }

    /// `kvx route` with these arguments, ready.
    pub(crate) fn route(arguments: &[&str]) -> Self {
        Self::run("route", arguments)
    }

    fn run(command: &str, arguments: &[&str]) -> Self {
        let mut child = kvx(&[&[command, "--with-parent"], arguments].concat());
        let stdin = child.stdin.take();
        let said = Arc::new(Mutex::new(String::new()));
        let (mut err, hears) = (child.stderr.take().unwrap(), said.clone());
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = err.read(&mut part) {
                hears.lock().unwrap().push_str(&String::from_utf8_lossy(&part[..count]));
            }
        });
        let (to, first) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = to.send(line);
            }
        });
        let line = first.recv_timeout(LIMIT).unwrap_or_else(|_| {
            let _ = child.kill();
            panic!("not ready: {}", said.lock().unwrap())
        });
        let ready: Value = serde_json::from_str(&line).unwrap();
        Self {
            child,
            stdin,
            url: format!("http://{}", ready["ready"].as_str().unwrap()),
            handshake_port: ready["handshake_port"].as_u64().unwrap_or(0) as u16,
            said,
        }
    }

    /// An engine with a connector whose limits are short.
    pub(crate) fn connected(name: &str, more: &[&str]) -> Self {
        let config = json!({
            "engine_id": name,
            "handshake_limit_ms": 2000,
            "connect_limit_ms": 2000,
            "peer_wait_ms": 3000,
            "read_limit_ms": 5000,
            "confirm_limit_ms": 2000,
            "lease_ttl_ms": 4000,
            "lease_renewal_ms": 4000,
            "renew_every_ms": 500,
            "retry_max_ms": 1000,
        });
        Self::start(&[&["--connector", &config.to_string()], more].concat())
    }

    /// What it wrote to standard error so far.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub(crate) async fn post(&self, id: &[u8], body: String) -> (u16, Value) {
        let answer = client()
            .post(format!("{}/v1/completions", self.url))
            .header("x-request-id", HeaderValue::from_bytes(id).unwrap())
            .body(body)
            .timeout(LIMIT)
            .send()
            .await
            .unwrap();
        let status = answer.status().as_u16();
        (status, answer.json().await.unwrap())
    }

    /// Asks for a completion.
    pub(crate) async fn ask(&self, id: &str, prompt: &[u32], count: u32, params: &Value) -> (u16, Value) {
        let body = json!({
            "prompt": prompt,
            "max_tokens": count,
            "ignore_eos": true,
            "kv_transfer_params": params,
        });
        self.post(id.as_bytes(), body.to_string()).await
    }

    /// Has it compute a prompt for somebody else; gives the parameters.
    pub(crate) async fn prefill(&self, id: &str, prompt: &[u32]) -> Value {
        let params = json!({ "do_remote_decode": true, "do_remote_prefill": false });
        let (status, answer) = self.ask(id, prompt, 1, &params).await;
        assert_eq!(status, 200, "{answer}");
        answer["kv_transfer_params"].clone()
    }

    pub(crate) async fn stats(&self) -> Value {
        client().get(format!("{}/stats", self.url)).timeout(LIMIT).send().await.unwrap().json().await.unwrap()
    }

    /// Waits until no block is held and no request is left.
    pub(crate) async fn settled(&self) -> Value {
        let until = Instant::now() + LIMIT;
        loop {
            let stats = self.stats().await;
            if stats["blocks_held"] == 0 && stats["unfinished"] == 0 {
                return stats;
            }
            assert!(Instant::now() < until, "not settled within {LIMIT:?}: {stats}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends it as a parent does that dies: nothing is said, its standard input ends.
    pub(crate) fn end(&mut self) -> Option<ExitStatus> {
        drop(self.stdin.take());
        wait(&mut self.child, Duration::from_secs(20))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// Runs a test's asynchronous part.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// The tests of these files start many processes that compute; they take turns.
pub(crate) fn my_turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A prompt of `len` tokens; `salt` makes others of it.
pub(crate) fn prompt(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i * 7 + i * (13 + 2 * salt) + salt * 101) % 251).collect()
}

/// What the engines' own model answers when it is run by itself.
pub(crate) fn reference(prompt: &[u32], count: u32) -> Vec<u32> {
    let weights = Weights::seeded(&ModelConfig::tiny(), 7).unwrap();
    let config = weights.config();
    let mut shard = Shard::new(config, &weights, 0, 1).unwrap();
    let blocks: Vec<u32> = (0..(prompt.len() as u32 + count).div_ceil(16)).collect();
    let (layers, heads) = (config.num_hidden_layers, shard.cache_heads());
    let mut store = VecStore::new(layers, blocks.len(), 16, heads, config.head_size());
    let mut all = prompt.to_vec();
    let mut start = 0;
    while all.len() < prompt.len() + count as usize {
        let chunk =
            Chunk { tokens: &all[start..], start, blocks: &blocks, window_blocks: &[], wants_token: true };
        let next = shard.forward(&[chunk], 16, &mut store, &mut SoloReduce).unwrap();
        start = all.len();
        all.push(next[0].unwrap());
    }
    all.split_off(prompt.len())
}

/// The tokens of an answer.
pub(crate) fn tokens(answer: &Value) -> Vec<u32> {
    serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap_or_else(|_| panic!("{answer}"))
}

/// The text of a refusal.
pub(crate) fn refusal((status, answer): (u16, Value)) -> String {
    assert_eq!(status, 400, "{answer}");
    assert_eq!(answer["error"]["code"], 400);
    answer["error"]["message"].as_str().unwrap().to_owned()
}
