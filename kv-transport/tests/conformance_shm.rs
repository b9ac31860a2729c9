//! The shm transport, memory mapped, against the conformance suite of the contract.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use kv_testkit::conformance::{self, shm::ShmHarness};

    conformance::main(&ShmHarness { map: true, read_process: true })
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    println!("ignored: this transport is for Linux");
    ExitCode::SUCCESS
}
