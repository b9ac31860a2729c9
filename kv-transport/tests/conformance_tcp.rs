//! The tcp transport against the conformance suite of the contract.

use std::process::ExitCode;

use kv_testkit::conformance::{self, tcp::TcpHarness};

fn main() -> ExitCode {
    conformance::main(&TcpHarness::ONE)
}
