//! The auto transport, over shm and tcp, against the conformance suite of the contract.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use kv_testkit::conformance::{self, shm::AutoHarness};

    conformance::main(&AutoHarness)
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    println!("ignored: it needs shm, which is for Linux");
    ExitCode::SUCCESS
}
