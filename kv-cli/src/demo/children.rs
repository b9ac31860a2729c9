//! The processes of the demonstration. Each ends when we end, in whatever way: it watches its standard input.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

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
        let mut running = Self { name, child, stdin, url: String::new() };
        match ready.recv_timeout(START_LIMIT) {
            Ok(text) => {
                let value: Value = serde_json::from_str(&text).map_err(|e| failed(format!("{e}: {text}")))?;
                let address = value["ready"].as_str().ok_or_else(|| failed(text.clone()))?;
                running.url = format!("http://{address}");
                Ok(running)
            }
            Err(RecvTimeoutError::Timeout) => Err(failed(format!("not ready within {START_LIMIT:?}"))),
            // It has said why on standard error.
            Err(RecvTimeoutError::Disconnected) => Err(failed("it ended".to_owned())),
        }
    }

    /// Whether it has ended, though it should not have.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
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
