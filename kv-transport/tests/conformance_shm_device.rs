//! The shm transport against the conformance suite, with all memory on a device that is made of host memory.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use kv_testkit::conformance::device::{OnDevice, host_device};
    use kv_testkit::conformance::{self, shm::ShmHarness};

    // Device memory goes over the socket, whatever lanes are on. The transport never claims `one_sided`, so its case is
    // skipped; reads out of the process are off all the same, so that no other way could carry the bytes unseen.
    static HARNESS: OnDevice<ShmHarness> =
        OnDevice::of_host_memory(ShmHarness { map: true, read_process: false }, "shm, device memory");

    // Its thread is none of the transport's, which are counted.
    if host_device().is_err() {
        return ExitCode::FAILURE;
    }
    conformance::main(&HARNESS)
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    ExitCode::SUCCESS
}
