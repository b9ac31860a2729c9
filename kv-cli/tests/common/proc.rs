//! What the system knows of a process.

use std::path::PathBuf;

fn of(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// State and parent of a process; `None` if there is none.
fn stat(pid: u32) -> Option<(char, u32)> {
    let text = std::fs::read_to_string(of(pid).join("stat")).ok()?;
    // The name stands in brackets and may hold anything.
    let mut fields = text[text.rfind(')')? + 1..].split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Whether a process still does anything.
pub(crate) fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// The processes that a process started and that live.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    all.filter(|pid| is_alive(*pid) && stat(*pid).is_some_and(|(_, p)| p == parent)).collect()
}

/// TCP ports at which a process listens.
pub(crate) fn listening(pid: u32) -> Vec<u16> {
    let open: Vec<String> = std::fs::read_dir(of(pid).join("fd"))
        .unwrap()
        .filter_map(|entry| {
            let target = std::fs::read_link(entry.ok()?.path()).ok()?;
            Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let table = std::fs::read_to_string(of(pid).join("net/tcp")).unwrap();
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let listens = fields.get(3) == Some(&"0A")
                && open.iter().any(|inode| fields.get(9) == Some(&inode.as_str()));
            let port = fields.get(1)?.rsplit(':').next()?;
            listens.then(|| u16::from_str_radix(port, 16).ok())?
        })
        .collect()
}

/// Ends a process at once, as the system does when it is short of memory.
pub(crate) fn kill(pid: u32) {
    let done = std::process::Command::new("sh").args(["-c", &format!("kill -9 {pid}")]).status().unwrap();
    assert!(done.success());
}

/// Asks a process to end, as a shell does.
pub(crate) fn terminate(pid: u32, signal: &str) {
    let done =
        std::process::Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap();
    assert!(done.success());
}
