//! The processes of a demonstration, and what can be done to them while requests are under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use kv_testkit::engine::cache_layout::CacheLayout;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::args::{DemoArgs, FaultMode};
use super::children::Running;
use super::{LEASE_TTL, prompts};
use crate::error::Failure;
use crate::serve::MemoryArg;

/// How long the router sends again what a decode engine had in hand when it was gone.
const RESEND_FOR_S: u64 = 60;
/// Size of a portion under faults: small, so that the tiny model's loads have several.
const PORTION_BYTES: u64 = 32 << 10;
/// A lease that is shorter than a read, and that read.
const LAPSE_MS: u64 = 400;

/// P, D, the router, and a proxy before P's handshake port if the fault needs one.
pub(crate) struct Stage {
    args: Arc<DemoArgs>,
    client: reqwest::Client,
    prefill: Option<Running>,
    decode: Option<Running>,
    router: Running,
    proxy: Option<Running>,
    /// Arguments to start an engine again with, at the ports that it had.
    prefill_again: Vec<String>,
    decode_again: Vec<String>,
    /// Where D was, in case it is gone.
    decode_url: String,
    /// What decode engines said before they were killed.
    former: Vec<Value>,
    /// Plans of faults, as files; they live as long as the processes that read them.
    _plans: TempDir,
}

/// How one of the engines is built.
struct Build {
    ranks: u32,
    layout: CacheLayout,
    block_tokens: u32,
    blocks: u32,
    memory: MemoryArg,
}

/// Arguments of an engine.
fn engine(args: &DemoArgs, build: &Build) -> Vec<String> {
    let Build { ranks, layout, block_tokens, blocks, memory } = build;
    let mut all = vec!["serve".to_owned()];
    for (option, value) in [
        ("--ranks", ranks.to_string()),
        ("--cache-layout", layout.to_string()),
        ("--block-tokens", block_tokens.to_string()),
        ("--kv-blocks", blocks.to_string()),
    ] {
        all.extend([option.to_owned(), value]);
    }
    if let Some(model) = &args.model {
        all.extend(["--model".to_owned(), model.to_string_lossy().into_owned()]);
    } else {
        let kind = args.model_kind.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default();
        all.extend(["--model-kind".to_owned(), kind, "--kv-heads".to_owned(), args.heads().to_string()]);
    }
    if *memory == MemoryArg::Device {
        all.extend(["--memory", "device", "--staging-blocks"].map(str::to_owned));
        all.push(args.staging_blocks.to_string());
    }
    if args.async_schedule {
        all.push("--async-schedule".to_owned());
    }
    all
}

/// The reference: one engine that stands alone, on one rank and in the usual layout, whatever the others are.
pub(crate) fn reference(args: &DemoArgs) -> Result<Running, Failure> {
    let block_tokens = prompts::BLOCK_TOKENS as u32;
    let (layout, memory) = (CacheLayout::default(), MemoryArg::Host);
    let mut arguments = engine(args, &Build { ranks: 1, layout, block_tokens, blocks: 2048, memory });
    arguments.push("--alone".to_owned());
    Running::start("the reference engine", &arguments)
}

/// The connector's configuration of one side.
pub(crate) fn config(args: &DemoArgs, engine_id: &str, handshake_port: u64) -> Value {
    let lease = if args.fault == FaultMode::Lapse { LAPSE_MS } else { LEASE_TTL.as_millis() as u64 };
    let mut config = json!({
        "engine_id": engine_id,
        "handshake_port": handshake_port,
        "transport": args.transport,
        "lease_ttl_ms": lease,
        "lease_renewal_ms": lease,
        "lease_max_ms": if args.fault == FaultMode::Lapse { LAPSE_MS } else { 600_000 },
        "renew_every_ms": 1000,
    });
    if args.fault != FaultMode::None {
        config["portion_bytes"] = json!(PORTION_BYTES);
        config["handshake_limit_ms"] = json!(2_000);
        config["retry_max_ms"] = json!(1_000);
    }
    if args.fault == FaultMode::Corrupt {
        config["checksums"] = json!(true);
    }
    config
}

/// What D's transports suffer.
fn transport_faults(args: &DemoArgs) -> Option<String> {
    let rule = |fields: &str| format!("[[rules]]\non = \"read\"\n{fields}\n");
    let rules = match args.fault {
        FaultMode::DropConnection => rule("fault = \"disconnect\"\npattern = \"OOOOX\"\narrive_percent = 50"),
        FaultMode::Stall => rule("fault = \"stall\"\npattern = \"OOOOX\"\nlimit = 6"),
        FaultMode::Corrupt => rule("fault = \"corrupt\"\npattern = \"OOOOX\"\nbytes = 1"),
        FaultMode::Lapse => {
            let slow = 2 * LAPSE_MS;
            rule(&format!("fault = \"delay\"\npattern = \"OOOOX\"\ndelay_ms = {slow}"))
        }
        FaultMode::Mixed => [
            rule("fault = \"disconnect\"\nprobability = 0.04\narrive_percent = 50"),
            rule("fault = \"truncate\"\nprobability = 0.04\narrive_percent = 30"),
            rule("fault = \"stall\"\nprobability = 0.01"),
        ]
        .concat(),
        _ => return None,
    };
    Some(format!("seed = {}\n{rules}", args.seed))
}

/// What the proxy before P's handshake port does to every connection.
fn handshake_fault(fault: FaultMode) -> Option<&'static str> {
    match fault {
        FaultMode::HandshakeRefused => Some("[[rules]]\nfault = \"refuse\"\n"),
        FaultMode::HandshakeHang => Some("[[rules]]\nfault = \"hang\"\n"),
        FaultMode::HandshakeGarbage => Some("[[rules]]\nfault = \"garbage\"\nbytes = 64\n"),
        _ => None,
    }
}

fn with_connector(mut arguments: Vec<String>, config: &Value) -> Vec<String> {
    arguments.extend(["--connector".to_owned(), config.to_string()]);
    arguments
}

impl Stage {
    pub(crate) fn set(args: &Arc<DemoArgs>, client: &reqwest::Client) -> Result<Self, Failure> {
        let plans = tempfile::tempdir().map_err(|e| Failure::new("make a folder for plans", e))?;
        let write = |name: &str, text: &str| -> Result<String, Failure> {
            let file = plans.path().join(name);
            std::fs::write(&file, text).map_err(|e| Failure::new(format!("write {}", file.display()), e))?;
            Ok(file.to_string_lossy().into_owned())
        };
        let mut p = engine(
            args,
            &Build {
                ranks: args.prefill_ranks,
                layout: args.prefill_layout,
                block_tokens: args.prefill_block,
                blocks: 2048,
                memory: args.prefill_memory,
            },
        );
        let mut d = engine(
            args,
            &Build {
                ranks: args.decode_ranks,
                layout: args.decode_layout,
                block_tokens: args.decode_block,
                blocks: args.kv_blocks,
                memory: args.decode_memory,
            },
        );
        d.extend(["--policy".to_owned(), args.policy.name().to_owned()]);
        if args.unmoved {
            d.push("--unmoved".to_owned());
        }
        if let Some(plan) = transport_faults(args) {
            d.extend(["--faults".to_owned(), write("transport.toml", &plan)?]);
        }
        let prefill = Running::start(
            "the prefill engine",
            &with_connector(p.clone(), &config(args, "demo-prefill", 0)),
        )?;
        let decode =
            Running::start("the decode engine", &with_connector(d.clone(), &config(args, "demo-decode", 0)))?;
        let mut route =
            ["route", "--prefill", &prefill.url, "--decode", &decode.url].map(str::to_owned).to_vec();
        if matches!(args.fault, FaultMode::KillDecode | FaultMode::Mixed) {
            route.extend(["--resend-for".to_owned(), RESEND_FOR_S.to_string()]);
        }
        let router = Running::start("the router", &route)?;
        let port = |running: &Running| running.said["handshake_port"].as_u64().unwrap_or(0);
        let proxy = match handshake_fault(args.fault) {
            None => None,
            Some(plan) => {
                let to = format!("127.0.0.1:{}", port(&prefill));
                let plan = write("handshake.toml", plan)?;
                Some(Running::proxy(&to, &plan)?)
            }
        };
        let at =
            |running: &Running| ["--http".to_owned(), format!("127.0.0.1:{}", running.port().unwrap_or(0))];
        p.extend(at(&prefill));
        d.extend(at(&decode));
        Ok(Self {
            args: args.clone(),
            client: client.clone(),
            prefill_again: with_connector(p, &config(args, "demo-prefill", port(&prefill))),
            decode_again: with_connector(d, &config(args, "demo-decode", port(&decode))),
            decode_url: decode.url.clone(),
            prefill: Some(prefill),
            decode: Some(decode),
            router,
            proxy,
            former: Vec::new(),
            _plans: plans,
        })
    }

    pub(crate) fn url(&self) -> String {
        self.router.url.clone()
    }

    /// The port that leads to P's handshake through the proxy.
    pub(crate) fn proxy_port(&self) -> Option<u16> {
        self.proxy.as_ref().and_then(Running::port)
    }

    /// Stops requests between P and D, or lets them go on.
    pub(crate) async fn gate(&self, shut: bool) {
        let url = format!("{}/demo/gate", self.router.url);
        // A router that does not hear it is found out by what follows.
        let _ = self.client.post(url).json(&json!({ "shut": shut })).send().await;
    }

    /// Waits until so many requests stand at the gate; P has answered them all.
    pub(crate) async fn at_the_gate(&self, count: usize) {
        let url = format!("{}/demo/gate", self.router.url);
        self.until(Duration::from_secs(20), || async {
            get(&self.client, &url).await["waiting"].as_u64().unwrap_or(0) >= count as u64
        })
        .await;
    }

    /// Waits until D has requests in hand.
    pub(crate) async fn d_is_busy(&self) {
        self.until(Duration::from_secs(20), || async {
            self.consumer().await["unfinished"].as_u64() > Some(0)
        })
        .await;
    }

    async fn until<F: Future<Output = bool>>(&self, limit: Duration, fact: impl Fn() -> F) {
        let end = Instant::now() + limit;
        while !fact().await && Instant::now() < end {
            // Other processes give no event for these facts; they are asked again, until the limit.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) fn signal_prefill(&self, signal: Signal) {
        if let Some(prefill) = &self.prefill {
            prefill.signal(signal);
        }
    }

    pub(crate) async fn kill_prefill(&mut self) -> Result<(), Failure> {
        let Some(prefill) = self.prefill.take() else { return Ok(()) };
        blocking(move || {
            prefill.kill();
            Ok(())
        })
        .await
    }

    pub(crate) async fn restart_prefill(&mut self) -> Result<(), Failure> {
        self.kill_prefill().await?;
        let again = self.prefill_again.clone();
        self.prefill = Some(blocking(move || Running::start("the prefill engine", &again)).await?);
        Ok(())
    }

    pub(crate) async fn restart_decode(&mut self) -> Result<(), Failure> {
        self.former.push(self.consumer().await);
        let (old, again) = (self.decode.take(), self.decode_again.clone());
        let new = blocking(move || {
            if let Some(old) = old {
                old.kill();
            }
            Running::start("the decode engine", &again)
        });
        self.decode = Some(new.await?);
        Ok(())
    }

    /// What P says; nothing of it if it was killed for good.
    pub(crate) async fn producer(&self) -> Option<Value> {
        match &self.prefill {
            Some(prefill) => Some(get(&self.client, &format!("{}/stats", prefill.url)).await),
            None => None,
        }
    }

    pub(crate) async fn consumer(&self) -> Value {
        get(&self.client, &format!("{}/stats", self.decode_url)).await
    }

    /// What decode engines said before they were killed.
    pub(crate) fn former(&self) -> &[Value] {
        &self.former
    }

    /// Names of processes that ended and should not have.
    pub(crate) fn ended(&mut self) -> Vec<&'static str> {
        let all = [self.prefill.as_mut(), self.decode.as_mut(), Some(&mut self.router), self.proxy.as_mut()];
        all.into_iter().flatten().filter_map(|p| p.has_ended().then(|| p.name())).collect()
    }

    pub(crate) fn args(&self) -> &DemoArgs {
        &self.args
    }
}

async fn get(client: &reqwest::Client, url: &str) -> Value {
    let answer = client.get(url).timeout(Duration::from_secs(10)).send().await;
    match answer {
        Ok(answer) => answer.json().await.unwrap_or(Value::Null),
        Err(_) => Value::Null,
    }
}

/// Starting and ending processes waits, so it has a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Failure::new("a thread of the demonstration", e))?
}
