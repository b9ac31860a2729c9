//! Libraries that are absent, too old or damaged, each in a process of its own: what is loaded once stays.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed step is a failed test.
#![cfg(target_os = "linux")]

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use kv_ucx_sys::{LIBRARY_VARIABLE, LoadError, load};

const ROLE: &str = "KV_UCX_TEST_ROLE";

fn skip(why: &str) {
    std::io::stderr().write_all(format!("SKIPPED: {why}\n").as_bytes()).unwrap();
}

/// Runs the other half in a process that looks for UCX in this folder; what it printed.
fn in_folder(folder: &Path, role: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "the_other_process"])
        .env(ROLE, role)
        .env(LIBRARY_VARIABLE, folder)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{role}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
    text.lines().find_map(|line| line.split_once("@@ ")).expect(role).1.to_owned()
}

#[test]
#[ignore = "the other half of the tests here, which start it"]
fn the_other_process() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    match load(None) {
        Ok(api) => println!("@@ loaded {:?} {}", api.version, api.status_text(-25)),
        Err(LoadError::NotLoaded { library, .. }) => println!("@@ not loaded {library}"),
        Err(LoadError::MissingFunction { function, .. }) => println!("@@ missing {function}"),
        Err(LoadError::WrongVersion { major, minor, .. }) => println!("@@ version {major}.{minor}"),
        Err(other) => println!("@@ {other}"),
    }
}

/// Makes libraries of these names out of C.
fn fake(folder: &Path, ucp: &str) -> bool {
    for (name, code) in [("libucs.so.0", "int nothing;"), ("libucp.so.0", ucp)] {
        let source = folder.join("fake.c");
        std::fs::write(&source, code).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(folder.join(name)).arg(&source);
        match compiler.status() {
            Ok(status) => assert!(status.success()),
            Err(_) => return false,
        }
    }
    true
}

#[test]
fn what_is_wrong_with_a_library_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert!(in_folder(path, "absent").starts_with("not loaded"), "an empty folder");
    std::fs::write(path.join("libucs.so.0"), b"not a library").unwrap();
    assert!(in_folder(path, "garbage").starts_with("not loaded"), "a file of garbage");

    let version = |major: u32, minor: u32| {
        format!(
            "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) {{ *a = {major}; *b = {minor}; *c = 0; }}"
        )
    };
    if !fake(path, "int nothing;") {
        return skip("there is no C compiler to make bad libraries with");
    }
    assert_eq!(in_folder(path, "damaged"), "missing ucp_get_version");
    for (major, minor) in [(1, 12), (2, 13), (0, 99)] {
        fake(path, &version(major, minor));
        assert_eq!(in_folder(path, "old"), format!("version {major}.{minor}"));
    }
    fake(path, &version(1, 13));
    assert!(in_folder(path, "hollow").starts_with("missing uc"));
}

#[test]
fn the_systems_ucx_is_found_and_speaks() {
    match load(None) {
        Ok(api) => {
            assert!(api.version.0 == 1 && api.version.1 >= 13);
            assert_eq!(api.status_text(-25), "Connection reset by remote peer");
            assert!(std::ptr::eq(load(Some(Path::new("/nowhere"))).unwrap(), api), "one UCX in one process");
        }
        Err(LoadError::NotLoaded { library, reason }) => skip(&format!("{library}: {reason}")),
        Err(other) => panic!("{other}"),
    }
}
