//! The tcp transport against the conformance suite, with all memory on a CUDA device: a real one if there is one, else one of
//! a driver that is made of host memory. Without a C compiler to build that with, all cases are ignored with the reason.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use kv_testkit::conformance::cuda::{Driver, device, driver};
    use kv_testkit::conformance::device::OnDevice;
    use kv_testkit::conformance::{self, tcp::TcpHarness};

    static REAL: OnDevice<TcpHarness> = OnDevice::of_cuda(TcpHarness::ONE, "tcp, CUDA memory");
    static FAKE: OnDevice<TcpHarness> =
        OnDevice::of_cuda(TcpHarness::ONE, "tcp, CUDA memory of a fake driver");

    let harness = match driver() {
        Ok(Driver::Real) => &REAL,
        Ok(Driver::Fake) => &FAKE,
        Err(code) => return code,
    };
    // What the driver starts is none of the transport's, which are counted. Without a device the cases say so.
    device().ok();
    conformance::main(harness)
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    ExitCode::SUCCESS
}
