//! `kvx fault-proxy`: a TCP proxy that does to connections what a plan says.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use kv_testkit::faults::proxy::{FaultProxy, ProxyPlan, ProxyReport};
use serde_json::json;

use crate::error::Failure;
use crate::serve::{parent_gone, runtime};
use crate::sim::table;

#[derive(Args)]
#[command(
    after_long_help = "A worker's port cannot be led through the proxy as such, because workers tell each \
    other their addresses in the handshake; the handshake's own port can, by the router's parameters \
    (remote_host, remote_port), and so can any HTTP server."
)]
pub(crate) struct FaultProxyArgs {
    /// Where to listen, HOST:PORT; port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    listen: String,
    /// Where to forward to, HOST:PORT.
    #[arg(long, value_name = "ADDR", required_unless_present = "example")]
    to: Option<String>,
    /// What is to go wrong: a file in TOML, or in JSON if it begins with a brace.
    #[arg(long, value_name = "FILE", required_unless_present = "example")]
    plan: Option<PathBuf>,
    /// Say everything as JSON, one object a line: first where it listens, at last what happened.
    #[arg(long)]
    json: bool,
    /// Print a plan with comments, and do nothing else.
    #[arg(long)]
    example: bool,
    /// End when standard input ends.
    #[arg(long)]
    with_parent: bool,
}

pub(crate) fn run(args: &FaultProxyArgs) -> Result<(), Failure> {
    let (Some(to), Some(file), false) = (&args.to, &args.plan, args.example) else {
        print!("{}", ProxyPlan::EXAMPLE);
        return Ok(());
    };
    let named = |field: &str| format!("{field} {}", file.display());
    let text = std::fs::read_to_string(file).map_err(|e| Failure::new(named("read --plan"), e))?;
    let plan = ProxyPlan::parse(&text).map_err(|e| Failure::new(named("--plan"), e))?;
    let report = runtime()?.block_on(async {
        // Before anything is said: who has read that line may end us.
        let mut end = Signals::new().map_err(|e| Failure::new("listen to signals", e))?;
        let proxy = FaultProxy::start(&args.listen, to, &plan)
            .await
            .map_err(|e| Failure::new("start (--listen, --to)", e))?;
        if args.json {
            println!("{}", json!({ "listening": proxy.address().to_string() }));
        } else {
            println!("listening at {}", proxy.address());
        }
        // Standard output may be a pipe, whose reader waits for this line.
        std::io::stdout().flush().map_err(|e| Failure::new("write to standard output", e))?;
        tokio::select! {
            () = end.next() => {}
            () = parent_gone(args.with_parent) => {}
        }
        Ok(proxy.stop().await)
    })?;
    say(&report, args.json);
    Ok(())
}

#[cfg(unix)]
struct Signals(tokio::signal::unix::Signal, tokio::signal::unix::Signal);

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self(signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        // Without a way to be told, the process ends as the system ends it.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    }
}

fn say(report: &ProxyReport, as_json: bool) {
    if as_json {
        let object = json!({
            "connections": report.connections,
            "upstream_failed": report.upstream_failed,
            "bytes_up": report.bytes_up,
            "bytes_down": report.bytes_down,
            "faults": report.faults,
            "recording": ProxyPlan::from_recording(&report.recorded).to_json(),
        });
        println!("{object}");
        return;
    }
    let mut table = table(["fault", "struck"]);
    for (name, count) in &report.faults {
        table.add_row([(*name).to_owned(), count.to_string()]);
    }
    println!(
        "{table}\n{} connections, {} without upstream; {} bytes up, {} down",
        report.connections, report.upstream_failed, report.bytes_up, report.bytes_down
    );
}
