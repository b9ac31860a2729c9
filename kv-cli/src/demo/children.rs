//! The processes of the demonstration. Each ends when we end, in whatever way: it watches its standard input.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use crate::error::Failure;

/// How long a process may take until it is ready.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a process may take to end when its standard input ends.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A process of this program, ready and reachable.
pub(crate) struct Running {
    name: &'static str,
    child: Child,
    stdin: Option<ChildStdin>,
    /// Base URL of its HTTP server.
    pub(crate) url: String,
    /// What it said when it was ready.
    pub(crate) said: Value,
}

impl Running {
    /// Starts this program with `arguments` and waits until it says where it listens.
    pub(crate) fn start(name: &'static str, arguments: &[String]) -> Result<Self, Failure> {
        let failed = |why: String| Failure::new(format!("start {name}"), why);
        let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
        let mut child = Command::new(program)
            .args(arguments)
            .arg("--with-parent")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // With its workers a group of its own, so that a signal reaches all of an engine and nobody else.
            .process_group(0)
            .spawn()
            .map_err(|e| failed(e.to_string()))?;
        let stdin = child.stdin.take();
        let Some(stdout) = child.stdout.take() else { return Err(failed("no output".to_owned())) };
        let (line, ready) = channel();
        std::thread::spawn(move || {
            for text in BufReader::new(stdout).lines().map_while(Result::ok) {
                // After the first line nobody listens; the pipe is still emptied.
                let _ = line.send(text);
            }
        });
        let mut running = Self { name, child, stdin, url: String::new(), said: Value::Null };
        match ready.recv_timeout(START_LIMIT) {
            Ok(text) => {
                let value: Value = serde_json::from_str(&text).map_err(|e| failed(format!("{e}: {text}")))?;
                let address = value["ready"]
                    .as_str()
                    .or(value["listening"].as_str())
                    .ok_or_else(|| failed(text.clone()))?
                    .to_owned();
                running.url = format!("http://{address}");
                running.said = value;
                Ok(running)
            }
            Err(RecvTimeoutError::Timeout) => Err(failed(format!("not ready within {START_LIMIT:?}"))),
            // It has said why on standard error.
            Err(RecvTimeoutError::Disconnected) => Err(failed("it ended".to_owned())),
        }
    }

    /// Starts a proxy of faults.
    pub(crate) fn proxy(to: &str, plan: &str) -> Result<Self, Failure> {
        let arguments = ["fault-proxy", "--json", "--to", to, "--plan", plan].map(str::to_owned);
        Self::start("the proxy", &arguments)
    }

    /// Whether it has ended, though it should not have.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends a signal to the process and all that it has started.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // A group that is gone has nothing left to hear it.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Ends it as a crash would, and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }

    /// Port of its HTTP server.
    pub(crate) fn port(&self) -> Option<u16> {
        self.url.rsplit(':').next()?.parse().ok()
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let until = Instant::now() + STOP_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
