//! House rules that a machine can check.
#![allow(clippy::unwrap_used, clippy::panic)] // A failed check is a failed test.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// Sources of the state machines: the whole of the crates that are nothing else, and the machines' folders.
const MACHINES: &[&str] = &["kv-proto/src", "kv-sched/src", "kv-recovery/src", "kv-worker/src/machine"];

/// What a machine must not touch, and why.
const FORBIDDEN: &[(&str, &str)] = &[
    ("Instant", "reads a clock"),
    ("SystemTime", "reads a clock"),
    ("std::time::UNIX_EPOCH", "reads a clock"),
    ("elapsed(", "reads a clock"),
    ("rand", "draws randomness"),
    ("getrandom", "draws randomness"),
    ("RandomState", "draws randomness"),
    ("HashMap", "iterates in no order"),
    ("HashSet", "iterates in no order"),
    ("std::net", "does IO"),
    ("std::fs", "does IO"),
    ("std::io", "does IO"),
    ("std::process", "does IO"),
    ("std::env", "does IO"),
    ("std::thread", "starts threads"),
    ("tokio", "drags a runtime in"),
    ("zmq", "does IO"),
    ("println!", "does IO"),
    ("unsafe", "is unsafe"),
];

/// The words of `FORBIDDEN` that a source uses outside comments and strings of its documentation.
fn offences(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in source.lines().enumerate() {
        let code = line.split("//").next().unwrap_or("");
        for (word, why) in FORBIDDEN {
            let hit = code.match_indices(word).any(|(at, _)| {
                let before = code[..at].chars().next_back();
                let after = code[at + word.len()..].chars().next();
                let inner = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
                !inner(before) && (word.ends_with(['(', '!']) || !inner(after))
            });
            if hit {
                found.push(format!("line {}: {word} {why}", number + 1));
            }
        }
    }
    found
}

#[test]
fn machines_read_no_clock_draw_no_randomness_and_do_no_io() {
    let mut checked = 0;
    let mut all = Vec::new();
    for folder in MACHINES {
        let mut files = Vec::new();
        rust_files(&root().join(folder), &mut files);
        for file in files {
            checked += 1;
            for offence in offences(&fs::read_to_string(&file).unwrap()) {
                all.push(format!("{}, {offence}", file.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(checked >= 20, "only {checked} files were found");
    assert!(all.is_empty(), "a state machine\n{}", all.join("\n"));
}

#[test]
fn the_check_sees_what_it_is_for() {
    for planted in [
        "let now = std::time::Instant::now();",
        "let now = SystemTime::now();",
        "use std::collections::HashMap;",
        "let x: HashSet<u32> = x;",
        "use std::net::TcpStream;",
        "std::fs::read(path)",
        "std::thread::spawn(f);",
        "rand::random::<u64>()",
        "getrandom::u64()",
        "tokio::time::sleep(d).await",
        "println!(\"x\")",
    ] {
        assert!(!offences(planted).is_empty(), "not seen: {planted}");
    }
    for fine in ["// an Instant is not read here", "/// tokio", "operand", "BTreeMap", "from_random(1)"] {
        assert!(offences(fine).is_empty(), "wrongly seen: {fine}");
    }
}

/// Names of the packages that a package is built from, dev-dependencies left out.
fn dependencies(package: &str) -> Vec<String> {
    let output = std::process::Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--package", package, "--edges", "normal", "--prefix", "none"])
        .current_dir(root())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    text.lines().filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
}

#[test]
fn the_scheduler_half_names_no_runtime_and_no_socket_library() {
    for package in ["kv-sched", "kv-recovery", "kv-proto"] {
        let all = dependencies(package);
        assert!(all.contains(&package.to_owned()));
        for word in ["tokio", "mio", "socket2", "zmq", "async-trait", "rustix", "libc"] {
            assert!(!all.iter().any(|name| name == word), "{package} depends on {word}");
        }
    }
}

#[test]
fn siblings_do_not_depend_on_siblings() {
    let ours = ["kv-sched", "kv-worker", "kv-transport", "kv-recovery", "kv-handshake"];
    for package in ours {
        for name in dependencies(package) {
            let allowed = name == package || (package == "kv-worker" && name == "kv-transport");
            assert!(allowed || !ours.contains(&name.as_str()), "{package} depends on {name}");
        }
    }
}

#[test]
fn unsafe_code_stands_only_where_memory_demands_it() {
    const ALLOWED: &[&str] = &[
        "kv-cli/src/bench/pages.rs",
        "kv-python/src/memory.rs",
        "kv-testkit/src/conformance/cuda.rs",
        "kv-testkit/src/device.rs",
        "kv-transport/src/cuda/calls.rs",
        "kv-transport/src/cuda/mod.rs",
        "kv-transport/src/device.rs",
        "kv-transport/src/memory.rs",
        "kv-transport/src/stream/pool.rs",
        "kv-transport/src/stream/staging.rs",
        "kv-transport/src/shm/registry.rs",
        "kv-transport/src/shm/window.rs",
        "kv-transport/src/stream/vectored.rs",
        "kv-transport/src/ucx/fabric.rs",
        "kv-transport/src/ucx/worker.rs",
        "kv-ucx-sys/src/lib.rs",
        "kv-worker/src/staging/executor.rs",
    ];
    let mut files = Vec::new();
    for folder in fs::read_dir(root()).unwrap() {
        let source = folder.unwrap().path().join("src");
        if source.is_dir() {
            rust_files(&source, &mut files);
        }
    }
    rust_files(&root().join("src"), &mut files);
    for file in files {
        let name = file.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).unwrap();
        let has = text.lines().any(|l| l.split("//").next().unwrap_or("").contains("allow(unsafe_code)"));
        assert!(!has || ALLOWED.contains(&name.as_str()), "{name} allows unsafe code");
    }
}

/// Licences that may be in what we ship; the same list stands in `deny.toml`.
const LICENCES: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Whether a licence expression can be met with the list: one of alternatives, all of what is joined by AND.
fn is_met(expression: &str) -> bool {
    let plain = expression.replace(['(', ')'], " ").replace('/', " OR ");
    // "A AND B OR C" does not occur without brackets; with them, every part of an AND must offer something.
    plain.split(" AND ").all(|part| part.split(" OR ").any(|one| LICENCES.contains(&one.trim())))
}

#[test]
fn licences_are_those_that_are_allowed() {
    let output = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 50, "only {} packages", packages.len());
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none");
        assert!(is_met(licence), "{} {}: {licence}", package["name"], package["version"]);
    }
    assert!(!is_met("GPL-3.0") && !is_met("none") && is_met("GPL-2.0 OR MIT") && !is_met("MIT AND GPL-2.0"));
    let deny = fs::read_to_string(root().join("deny.toml")).unwrap();
    for licence in LICENCES {
        assert!(deny.contains(&format!("\"{licence}\"")), "deny.toml lacks {licence}");
    }
}

#[test]
fn rules_are_numbered_and_the_architecture_stays_short() {
    let rules = fs::read_to_string(root().join("docs/protocol.md")).unwrap();
    // A rule keeps its number for good, and stands where a hand-over's life brings it.
    let numbers: std::collections::BTreeSet<u32> = rules
        .lines()
        .filter_map(|line| line.strip_prefix("- **H-")?.split("**").next()?.parse().ok())
        .collect();
    let count = rules.lines().filter(|line| line.starts_with("- **H-")).count();
    assert!(count >= 20);
    assert_eq!(numbers, (1..=count as u32).collect(), "rules are numbered without a gap, each once");
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    assert!(architecture.lines().count() < 110, "ARCHITECTURE.md stays under two pages");
}

#[test]
fn the_example_of_a_transport_is_as_short_as_its_guide_says() {
    let guide = fs::read_to_string(root().join("docs/write-a-transport.md")).unwrap();
    assert!(guide.contains("under 200 lines of code"));
    let example = root().join("kv-testkit/examples/custom_transport/transport.rs");
    let text = fs::read_to_string(example).unwrap();
    let code = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count();
    assert!(code < 200, "{code} lines are not blank and no comment");
}
