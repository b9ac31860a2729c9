//! Harnesses of transports whose regions lie on a CUDA device, real or made of host memory.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::{Arc, OnceLock};

use kv_transport::cuda::{CudaDevice, DeviceUnavailable};
use kv_transport::{Device, Memory};

use super::device::OnDevice;
use super::{HarnessError, Unavailable};

/// Set in a process that runs with the driver that is made of host memory.
const FAKED: &str = "KV_FAKE_CUDA";

/// The driver that is made of host memory, as C.
const SOURCE: &str = include_str!("../../fake-cuda/cuda.c");

/// A CUDA driver made of host memory, compiled by the system's compiler. It is removed when dropped.
#[derive(Debug)]
pub struct FakeDriver {
    folder: tempfile::TempDir,
}

impl FakeDriver {
    /// Compiles it; `old` leaves a function out, as an old driver does.
    pub fn build(old: bool) -> Result<Self, Unavailable> {
        let folder = tempfile::tempdir()?;
        let source = folder.path().join("cuda.c");
        std::fs::write(&source, SOURCE)?;
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-pthread", "-o"]).arg(folder.path().join("libcuda.so"));
        compiler.arg(&source).args(old.then_some("-DOLD"));
        match compiler.output() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(Unavailable::Cannot("there is no C compiler here to build a fake CUDA driver with"))
            }
            Err(error) => Err(error.into()),
            Ok(output) if !output.status.success() => {
                Err(format!("cc: {}", String::from_utf8_lossy(&output.stderr)).into())
            }
            Ok(_) => Ok(Self { folder }),
        }
    }

    /// A command that runs a program of ours with it.
    pub fn command(&self, program: PathBuf) -> Command {
        let mut command = Command::new(program);
        // What else the program needs is found as before.
        let mut paths = vec![self.folder.path().to_path_buf()];
        paths.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
        if let Ok(joined) = std::env::join_paths(paths) {
            command.env("LD_LIBRARY_PATH", joined);
        }
        command.env(FAKED, "1");
        command
    }
}

/// Where device memory comes from in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// A real device.
    Real,
    /// One that is made of host memory.
    Fake,
}

/// Finds a driver: the machine's own, or else a fake one, with which this program is run again; then it is to end with the
/// code that is returned.
pub fn driver() -> Result<Driver, ExitCode> {
    let faked = std::env::var_os(FAKED).is_some();
    if faked || CudaDevice::probe().is_ok() {
        return Ok(if faked { Driver::Fake } else { Driver::Real });
    }
    let fake = match FakeDriver::build(false) {
        Ok(fake) => fake,
        // The cases say why they are skipped.
        Err(Unavailable::Cannot(_)) => return Ok(Driver::Real),
        Err(Unavailable::Failed(_)) => return Err(ExitCode::FAILURE),
    };
    let program = std::env::current_exe().map_err(|_| ExitCode::FAILURE)?;
    let status = fake.command(program).args(std::env::args_os().skip(1)).status();
    let code = status.ok().and_then(|status| u8::try_from(status.code()?).ok());
    Err(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// The first device of this process.
pub fn device() -> Result<&'static CudaDevice, DeviceUnavailable> {
    static DEVICE: OnceLock<Result<CudaDevice, DeviceUnavailable>> = OnceLock::new();
    DEVICE.get_or_init(|| CudaDevice::open(0)).as_ref().map_err(Clone::clone)
}

/// The same memory by way of a stream of its own, which does not wait for that of [`device`] and its transports.
#[allow(unsafe_code)] // One address is named twice; the block states its reason.
pub(super) fn elsewhere(memory: &Memory) -> Option<Memory> {
    static OTHER: OnceLock<Option<CudaDevice>> = OnceLock::new();
    let place = memory.place();
    let other = OTHER.get_or_init(|| CudaDevice::open(0).ok()).as_ref()?;
    if place.device != Some(other.id()) {
        return None;
    }
    // SAFETY: the memory is of this device, and is kept.
    unsafe { other.memory(place.address, memory.len(), Arc::new(memory.clone())) }.ok()
}

fn memory(bytes: usize) -> Result<Memory, HarnessError> {
    Ok(device()?.allocate(bytes)?)
}

impl<H> OnDevice<H> {
    /// On the first CUDA device; without one the cases are skipped.
    pub const fn of_cuda(inner: H, name: &'static str) -> Self {
        Self { inner, name, memory, missing: || device().err().map(|error| error.to_string()) }
    }
}
