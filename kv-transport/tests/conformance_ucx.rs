//! The ucx transport over its TCP lanes against the conformance suite of the contract.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use kv_testkit::conformance::{self, ucx::UcxHarness};

    conformance::main(&UcxHarness { lanes: "tcp,self" })
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    println!("ignored: this transport is for Linux");
    ExitCode::SUCCESS
}
