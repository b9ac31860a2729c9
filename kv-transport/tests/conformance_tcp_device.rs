//! The tcp transport against the conformance suite, with all memory on a device that is made of host memory.

use std::process::ExitCode;

use kv_testkit::conformance::device::{OnDevice, host_device};
use kv_testkit::conformance::{self, tcp::TcpHarness};

static HARNESS: OnDevice<TcpHarness> = OnDevice::of_host_memory(TcpHarness::ONE, "tcp, device memory");

fn main() -> ExitCode {
    // Its thread is none of the transport's, which are counted.
    if host_device().is_err() {
        return ExitCode::FAILURE;
    }
    conformance::main(&HARNESS)
}
