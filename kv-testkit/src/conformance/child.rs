//! A peer in a process of its own: this same program, started again.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_transport::{Address, Event, RegionKey};

use super::Harness;
use super::harness::{HarnessError, REMOTE_BYTES, Remote, Unavailable, remote_contents};

/// Says to a started program that it is to be the peer.
const ROLE: &str = "KV_CONFORMANCE_ROLE";
/// Stands before what the peer says, since others may print too.
const MARK: &str = "@@ ";
/// How long a process may take to obey a signal.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A [`Remote`] made of this program, started again: it can be stopped and killed for good. Unix only.
#[derive(Debug)]
pub struct ChildPeer {
    child: Child,
    address: Address,
    key: RegionKey,
    // Its end tells the peer that nobody wants it any more, even if this process is killed.
    _input: ChildStdin,
}

impl ChildPeer {
    /// Starts the peer; [`main`](super::main) in it serves with an endpoint of the same harness.
    pub fn start() -> Result<Box<dyn Remote>, Unavailable> {
        if !cfg!(unix) {
            return Err(Unavailable::Cannot("processes are stopped by signals, which this system has not"));
        }
        let mut child = Command::new(std::env::current_exe()?)
            .env(ROLE, "serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let told =
            output.ok_or("no output of the peer".into()).and_then(|output| listen(BufReader::new(output)));
        match (input, told) {
            (Some(input), Ok((address, key))) => Ok(Box::new(Self { child, address, key, _input: input })),
            (_, told) => {
                child.kill().ok();
                child.wait().ok();
                Err(told.err().unwrap_or_else(|| "no input of the peer".into()).into())
            }
        }
    }

    fn signal(&self, name: &str) -> Result<(), Unavailable> {
        let script = format!("kill -{name} {}", self.child.id());
        let status = Command::new("sh").args(["-c", &script]).status()?;
        if status.success() { Ok(()) } else { Err(format!("`{script}` failed").into()) }
    }
}

impl ChildPeer {
    /// Whether every thread of it stands still, as far as the system tells.
    fn has_stopped(&self) -> bool {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.child.id())) else { return true };
        threads.flatten().all(|thread| {
            // `number (name) state …`; a thread that is gone stands still too.
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 't', 'Z', 'X']))
        })
    }
}

impl Remote for ChildPeer {
    fn address(&self) -> Address {
        self.address.clone()
    }

    fn key(&self) -> RegionKey {
        self.key.clone()
    }

    fn stop(&mut self) -> Result<(), Unavailable> {
        self.signal("STOP")?;
        // The signal is only on its way yet, and each thread obeys in its own time.
        let start = Instant::now();
        while !self.has_stopped() {
            if start.elapsed() > STOP_LIMIT {
                return Err(format!("the peer did not stop within {STOP_LIMIT:?}").into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Unavailable> {
        self.signal("CONT")
    }

    fn kill(&mut self) -> Result<(), Unavailable> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for ChildPeer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// What the peer says of itself.
fn listen(output: impl BufRead) -> Result<(Address, RegionKey), HarnessError> {
    for line in output.lines() {
        let line = line?;
        let Some((_, words)) = line.split_once(MARK) else { continue };
        let (address, key) = words.split_once(' ').ok_or("the peer said half of what it should")?;
        return Ok((Address::from_bytes(from_hex(address)?)?, RegionKey::from_bytes(from_hex(key)?)?));
    }
    Err("the peer's process ended before it served; what it printed says why".into())
}

/// Serves, if this process was started as a [`ChildPeer`]; then the process is to end with what is returned.
/// [`main`](super::main) does this by itself.
pub fn serve_if_asked(harness: &dyn Harness) -> Option<ExitCode> {
    if std::env::var(ROLE).ok()? != "serve" {
        return None;
    }
    // The process ends with its input, whatever the transport does then.
    std::thread::spawn(|| {
        std::io::stdin().lines().for_each(drop);
        std::process::exit(0);
    });
    match serve(harness) {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "the peer of the conformance suite: {error}");
            Some(ExitCode::FAILURE)
        }
    }
}

fn serve(harness: &dyn Harness) -> Result<(), HarnessError> {
    let transport = harness.endpoint()?;
    let memory = harness.memory(REMOTE_BYTES)?;
    memory.write(0, &remote_contents())?;
    let key = transport.key(transport.register(memory)?)?;
    let mut output = std::io::stdout();
    writeln!(output, "{MARK}{} {}", to_hex(transport.address().as_bytes()), to_hex(key.as_bytes()))?;
    output.flush()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    while let Some(event) = runtime.block_on(Arc::clone(&transport).next_event()) {
        if let Event::Message { peer, bytes } = event {
            // A sender that is gone wants no answer.
            transport.send(peer, bytes).ok();
        }
    }
    Ok(())
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>, HarnessError> {
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}
