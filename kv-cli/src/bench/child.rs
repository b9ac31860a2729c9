//! The two sides as processes of their own. Each ends when its standard input does, so none outlives us.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::wire::{Answer, Ask, Job, MARK, ProducerAt, Setup};
use crate::error::Failure;

/// For a process to end by itself.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks whether it has.
const STOP_PAUSE: Duration = Duration::from_millis(2);

/// A side that is running.
pub(super) struct Process {
    name: &'static str,
    child: Child,
    stdin: Option<ChildStdin>,
    answers: Receiver<String>,
    /// For the answer to what was asked last.
    limit: Duration,
}

/// What a process has used so far; its largest memory since [`Process::forget_peak`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    pub(super) cpu_s: f64,
    pub(super) peak_bytes: u64,
}

/// What timed transfers took.
#[derive(Debug, Clone)]
pub(super) struct Timed {
    pub(super) seconds: Vec<f64>,
    pub(super) cpu_s: f64,
    pub(super) wall_s: f64,
}

/// Tells what is marked as an answer from what else is printed, until the output ends.
fn listen(mut output: impl BufRead, mut answer: impl FnMut(String), mut other: impl FnMut(&str)) {
    let mut line = vec![];
    while output.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\n', '\r']);
        // Whoever prints besides may have left its line unfinished.
        let (before, words) =
            text.split_once(MARK).map_or((text, None), |(before, words)| (before, Some(words)));
        if words.is_none() || !before.is_empty() {
            other(before);
        }
        if let Some(words) = words {
            answer(words.to_owned());
        }
        line.clear();
    }
}

impl Process {
    pub(super) fn start(name: &'static str) -> Result<Self, Failure> {
        let failed = |why: String| Failure::new(format!("start the {name}"), why);
        let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
        let mut child = Command::new(program)
            .arg("bench-side")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| failed(e.to_string()))?;
        let stdin = child.stdin.take();
        let Some(stdout) = child.stdout.take() else { return Err(failed("no output".to_owned())) };
        let (line, answers) = channel();
        std::thread::spawn(move || {
            // Nobody waits for answers any more if they cannot be sent; what else is printed is still of interest.
            listen(BufReader::new(stdout), |text| drop(line.send(text)), |text| eprintln!("{text}"));
        });
        Ok(Self { name, child, stdin, answers, limit: Duration::ZERO })
    }

    /// Asks, without waiting for the answer.
    pub(super) fn tell(&mut self, ask: &Ask) -> Result<(), Failure> {
        let failed = |why: String| Failure::new(format!("ask the {}", self.name), why);
        let text = serde_json::to_string(ask).map_err(|e| failed(e.to_string()))?;
        let Some(stdin) = &mut self.stdin else { return Err(failed("it was told to end".to_owned())) };
        self.limit = ask.limit();
        writeln!(stdin, "{text}").and_then(|()| stdin.flush()).map_err(|e| failed(e.to_string()))
    }

    /// The next answer.
    pub(super) fn hear(&mut self) -> Result<Answer, Failure> {
        let failed = |why: String| Failure::new(self.name, why);
        match self.answers.recv_timeout(self.limit) {
            Ok(text) => match serde_json::from_str(&text) {
                Ok(Answer::Failed(why)) => Err(failed(why)),
                Ok(answer) => Ok(answer),
                Err(error) => Err(failed(format!("{error}: {text}"))),
            },
            Err(RecvTimeoutError::Timeout) => {
                let threads = threads(self.child.id());
                Err(failed(format!("no answer within {:?}; its threads: {threads}", self.limit)))
            }
            Err(RecvTimeoutError::Disconnected) => Err(failed("it ended".to_owned())),
        }
    }

    fn strange(&self, answer: &Answer) -> Failure {
        Failure::new(self.name, format!("it answered with something else: {answer:?}"))
    }

    /// Makes it what it is to be. Returns how it is reached, if it is a producer.
    pub(super) fn set_up(&mut self, setup: Setup) -> Result<Option<ProducerAt>, Failure> {
        self.tell(&Ask::Setup(Box::new(setup)))?;
        match self.hear()? {
            Answer::Ready { producer } => Ok(producer),
            other => Err(self.strange(&other)),
        }
    }

    /// What carries a consumer's bytes.
    pub(super) fn lane(&mut self) -> Result<String, Failure> {
        self.tell(&Ask::Lane)?;
        match self.hear()? {
            Answer::Lane(lane) => Ok(lane),
            other => Err(self.strange(&other)),
        }
    }

    pub(super) fn used(&mut self) -> Result<Used, Failure> {
        self.tell(&Ask::Used)?;
        match self.hear()? {
            Answer::Used { cpu_s, peak_bytes } => Ok(Used { cpu_s, peak_bytes }),
            other => Err(self.strange(&other)),
        }
    }

    /// Whether its largest memory counts from now on, and not since its start.
    pub(super) fn forget_peak(&mut self) -> Result<bool, Failure> {
        self.tell(&Ask::ForgetPeak)?;
        match self.hear()? {
            Answer::PeakForgotten(done) => Ok(done),
            other => Err(self.strange(&other)),
        }
    }

    /// One transfer, compared byte for byte: blocks that are wrong, and blocks that changed without being asked for.
    pub(super) fn check(&mut self, job: Job) -> Result<(u64, u64), Failure> {
        self.tell(&Ask::Check(job))?;
        self.checked()
    }

    /// What was asked with [`Ask::Check`].
    pub(super) fn checked(&mut self) -> Result<(u64, u64), Failure> {
        match self.hear()? {
            Answer::Checked { bad, spilled } => Ok((bad, spilled)),
            other => Err(self.strange(&other)),
        }
    }

    /// What was asked with [`Ask::Time`].
    pub(super) fn timed(&mut self) -> Result<Timed, Failure> {
        match self.hear()? {
            Answer::Timed { seconds, cpu_s, wall_s } => Ok(Timed { seconds, cpu_s, wall_s }),
            other => Err(self.strange(&other)),
        }
    }

    /// What was asked with [`Ask::Count`]: transfers, and the seconds that they took together.
    pub(super) fn counted(&mut self) -> Result<(u64, f64), Failure> {
        match self.hear()? {
            Answer::Counted { transfers, wall_s } => Ok((transfers, wall_s)),
            other => Err(self.strange(&other)),
        }
    }

    /// What was asked with [`Ask::Beside`]: seconds of the small reads, GB/s of the large ones.
    pub(super) fn beside(&mut self) -> Result<(Vec<f64>, f64), Failure> {
        match self.hear()? {
            Answer::Beside { seconds, gbps } => Ok((seconds, gbps)),
            other => Err(self.strange(&other)),
        }
    }
}

/// What the threads of a process do, as far as the system tells: name, state, and what each waits for in the kernel.
fn threads(process: u32) -> String {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else { return "unknown".to_owned() };
    let of = |task: std::fs::DirEntry| {
        let text = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let stat = text("stat");
        // The name may hold anything, brackets too; what follows its last one does not.
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?');
        let call = text("syscall");
        let call = call.split_whitespace().next().unwrap_or("?").to_owned();
        format!("{} ({state}, in {}, call {call})", text("comm").trim_end(), text("wchan"))
    };
    tasks.flatten().map(of).collect::<Vec<_>>().join("; ")
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let until = Instant::now() + STOP_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(STOP_PAUSE);
        }
        if matches!(self.child.try_wait(), Ok(None)) {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_library_prints_is_no_answer() {
        let output = b"[1700.5] ucp_context.c: INFO\n@@ {\"Failed\":\"a\"}\nno end@@ \"b\"\n\xff\xfe\n@@ \"c\"\r\n@@ last";
        let (mut answers, mut others) = (vec![], vec![]);
        listen(&output[..], |text| answers.push(text), |text| others.push(text.to_owned()));
        assert_eq!(answers, ["{\"Failed\":\"a\"}", "\"b\"", "\"c\"", "last"]);
        assert_eq!(others, ["[1700.5] ucp_context.c: INFO", "no end", "\u{fffd}\u{fffd}"]);
    }

    #[test]
    fn what_a_silent_process_does_is_told() {
        let (say, hear) = channel::<()>();
        let waits =
            std::thread::Builder::new().name("waits (1) S".into()).spawn(move || hear.recv()).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        // A thread has its name a moment after its start.
        while !threads(std::process::id()).contains("waits (1) S (S") {
            assert!(Instant::now() < until, "{}", threads(std::process::id()));
            std::thread::yield_now();
        }
        drop(say);
        assert!(waits.join().unwrap().is_err());
        assert_eq!(threads(u32::MAX), "unknown");
    }
}
