//! The tcp transport with several connections to each peer against the conformance suite of the contract.

use std::process::ExitCode;

use kv_testkit::conformance::{self, tcp::TcpHarness};

fn main() -> ExitCode {
    conformance::main(&TcpHarness::THREE)
}
