//! CUDA devices, by the driver alone: no toolkit is needed, neither to build nor to run.
//!
//! [`CudaDevice::probe`] says what there is and never panics. [`CudaDevice::memory`] names memory that an engine allocated, in
//! the device's primary context, which is the one that PyTorch and the CUDA runtime use. Copies go over a stream of their own,
//! which does not wait for the engine's: bytes that a kernel writes may be offered to peers when that kernel has ended.
#![allow(unsafe_code)] // The driver's functions are foreign; each block states its reason.

mod calls;

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUstream};
use thiserror::Error;

use self::calls::{Calls, Code, NOT_READY, is_end};
use crate::device::{CopyRange, Copying, Device, DeviceError, DeviceId, Direction};
use crate::memory::{Memory, MemoryError};

/// `CU_STREAM_NON_BLOCKING`: not ordered with the default stream.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: nobody asks when, only whether.
const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
const PINNED_PORTABLE: u32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: what this thread does is no part of a graph that another one captures.
const CAPTURE_RELAXED: u32 = 2;
const NAME_BYTES: usize = 256;

/// Why no CUDA device can be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceUnavailable {
    /// There is no libcuda.
    #[error("no CUDA driver: libcuda.so was not found")]
    NoDriver,
    /// The driver is too old.
    #[error("the CUDA driver has no function {name}")]
    MissingFunction {
        /// The function.
        name: &'static str,
    },
    /// The driver works, and there is no such device.
    #[error("there is no CUDA device {ordinal}: the driver has {count}")]
    NoDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The driver does not work; without a device many drivers say so like this.
    #[error("{operation} failed: {meaning} (code {code})")]
    Failed {
        /// What was tried.
        operation: &'static str,
        /// The driver's code.
        code: u32,
        /// What the driver says that it means.
        meaning: String,
    },
}

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaDriver {
    /// The newest version of CUDA that the driver speaks: 12080 is 12.8.
    pub version: u32,
    /// Names of the devices, by their number.
    pub devices: Vec<String>,
}

/// A device of CUDA's. Clones are the same.
#[derive(Clone)]
pub struct CudaDevice(Arc<Inner>);

struct Inner {
    calls: &'static Calls,
    ordinal: u32,
    name: String,
    device: CUdevice,
    context: CUcontext,
    stream: CUstream,
}

// SAFETY: contexts and streams may be used by any thread, and by several at a time.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl CudaDevice {
    /// What there is; at least one device.
    pub fn probe() -> Result<CudaDriver, DeviceUnavailable> {
        let calls = Calls::get()?;
        let mut version = 0;
        // SAFETY: a place to write to.
        check(calls, "cuDriverGetVersion", unsafe { (calls.cuDriverGetVersion)(&raw mut version) })?;
        let count = count(calls)?;
        if count == 0 {
            return Err(DeviceUnavailable::NoDevice { ordinal: 0, count });
        }
        let devices = (0..count).map(|ordinal| Ok(find(calls, ordinal)?.1)).collect::<Result<_, _>>()?;
        Ok(CudaDriver { version: u32::try_from(version).unwrap_or(0), devices })
    }

    /// A device by its number, counted as `CUDA_VISIBLE_DEVICES` lets this process see them.
    pub fn open(ordinal: u32) -> Result<Self, DeviceUnavailable> {
        let calls = Calls::get()?;
        let count = count(calls)?;
        if ordinal >= count {
            return Err(DeviceUnavailable::NoDevice { ordinal, count });
        }
        let (device, name) = find(calls, ordinal)?;
        let mut context = null_mut();
        // SAFETY: a device that the driver gave out, and a place to write to. `Inner` releases it once.
        let code = unsafe { (calls.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        check(calls, "cuDevicePrimaryCtxRetain", code)?;
        let mut inner = Inner { calls, ordinal, name, device, context, stream: null_mut() };
        let mut stream = null_mut();
        // SAFETY: a place to write to; the context is current. `Inner` destroys it once.
        let made = inner.inside("cuStreamCreate", || unsafe {
            (calls.cuStreamCreate)(&raw mut stream, STREAM_NON_BLOCKING)
        });
        inner.stream = stream;
        made.map_err(|error| match error {
            DeviceError::Failed { operation, code, meaning, .. } => {
                DeviceUnavailable::Failed { operation, code: code as u32, meaning }
            }
            other => {
                DeviceUnavailable::Failed { operation: "cuStreamCreate", code: 0, meaning: other.to_string() }
            }
        })?;
        Ok(Self(Arc::new(inner)))
    }

    /// Zeroed memory on the device.
    pub fn allocate(&self, bytes: usize) -> Result<Memory, MemoryError> {
        if bytes == 0 {
            return Err(MemoryError::BadLength { bytes });
        }
        let Inner { calls, stream, .. } = *self.0;
        let mut address = 0;
        // SAFETY: a place to write to; the context is current.
        self.0.inside("cuMemAlloc", || unsafe { (calls.cuMemAlloc_v2)(&raw mut address, bytes) })?;
        let block = Block { device: self.clone(), address };
        // SAFETY: so many bytes were just allocated; they are freed after the wait at the earliest.
        self.0.inside("cuMemsetD8Async", || unsafe { (calls.cuMemsetD8Async)(address, 0, bytes, stream) })?;
        if let Err(error) = self.0.synchronize() {
            if !matches!(error, DeviceError::Lost { .. }) {
                // For all that is known the driver still writes there.
                std::mem::forget(block);
            }
            return Err(error.into());
        }
        // SAFETY: the block is freed when it is dropped.
        unsafe { self.memory(address, bytes, Arc::new(block)) }
    }

    /// Names memory that somebody else allocated on this device, such as an engine's KV cache.
    ///
    /// # Safety
    ///
    /// `address` must be valid in the device's primary context for `len` bytes as long as `keep` is alive.
    pub unsafe fn memory(
        &self,
        address: u64,
        len: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Memory, MemoryError> {
        // SAFETY: what the caller promises.
        unsafe { Memory::device(Arc::new(self.clone()), address, len, keep) }
    }
}

fn check(calls: &Calls, operation: &'static str, code: Code) -> Result<(), DeviceUnavailable> {
    if code == 0 { Ok(()) } else { Err(calls.unavailable(operation, code)) }
}

fn count(calls: &Calls) -> Result<u32, DeviceUnavailable> {
    let mut count = 0;
    // SAFETY: a place to write to.
    check(calls, "cuDeviceGetCount", unsafe { (calls.cuDeviceGetCount)(&raw mut count) })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn find(calls: &Calls, ordinal: u32) -> Result<(CUdevice, String), DeviceUnavailable> {
    let mut device = 0;
    // SAFETY: a place to write to; the driver checks the number.
    let code = unsafe { (calls.cuDeviceGet)(&raw mut device, ordinal as c_int) };
    check(calls, "cuDeviceGet", code)?;
    let mut name = [0 as c_char; NAME_BYTES];
    // SAFETY: a buffer of the length that is named, one byte less so that the last stays zero.
    let code = unsafe { (calls.cuDeviceGetName)(name.as_mut_ptr(), NAME_BYTES as c_int - 1, device) };
    check(calls, "cuDeviceGetName", code)?;
    // SAFETY: the last byte is zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok((device, name.to_string_lossy().into_owned()))
}

impl Inner {
    fn id(&self) -> DeviceId {
        DeviceId { kind: "cuda", number: u64::from(self.ordinal) }
    }

    /// Calls the driver with the context current, and leaves the thread's own context as it was. Engines capture graphs while
    /// this goes on; the driver then refuses many calls to all threads but those that say that they have no part in it.
    fn call(&self, call: impl FnOnce() -> Code) -> Code {
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: a place to read from and to write to; it is about this thread alone.
        let relaxed = unsafe { (self.calls.cuThreadExchangeStreamCaptureMode)(&raw mut mode) } == 0;
        let code = self.in_context(call);
        if relaxed {
            // SAFETY: as above. What could not be set back would not have been set.
            unsafe { (self.calls.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        }
        code
    }

    fn in_context(&self, call: impl FnOnce() -> Code) -> Code {
        // SAFETY: the context is retained while `self` lives.
        let code = unsafe { (self.calls.cuCtxPushCurrent_v2)(self.context) };
        if code != 0 {
            return code;
        }
        let code = call();
        let mut popped = null_mut();
        // SAFETY: a place to write to; this thread pushed the context just now.
        let left = unsafe { (self.calls.cuCtxPopCurrent_v2)(&raw mut popped) };
        if code == 0 { left } else { code }
    }

    fn inside(&self, operation: &'static str, call: impl FnOnce() -> Code) -> Result<(), DeviceError> {
        match self.call(call) {
            0 => Ok(()),
            code => Err(self.error(operation, code)),
        }
    }

    fn error(&self, operation: &'static str, code: Code) -> DeviceError {
        let (device, meaning) = (self.id(), self.calls.meaning(code));
        if is_end(code) {
            return DeviceError::Lost { device, meaning: format!("{operation}: {meaning} (code {code})") };
        }
        DeviceError::Failed { device, operation, code: i64::from(code), meaning }
    }

    /// Waits for everything on the stream.
    fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream lives as long as `self`.
        self.inside("cuStreamSynchronize", || unsafe { (self.calls.cuStreamSynchronize)(self.stream) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.stream.is_null() {
            // SAFETY: destroyed once. What is still on it ends by itself; whoever waits for that holds `self`.
            self.call(|| unsafe { (self.calls.cuStreamDestroy_v2)(self.stream) });
        }
        // SAFETY: retained once. A driver that is shut down already says so, which is as good.
        unsafe { (self.calls.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// Memory that this module allocated.
struct Block {
    device: CudaDevice,
    address: u64,
}

impl Drop for Block {
    fn drop(&mut self) {
        let inner = &self.device.0;
        // SAFETY: allocated once, and nobody uses it any more.
        let freed = inner.inside("cuMemFree", || unsafe { (inner.calls.cuMemFree_v2)(self.address) });
        if let Err(error) = freed {
            tracing::warn!(%error, "device memory was not freed");
        }
    }
}

/// Pinned memory.
struct Pinned {
    device: CudaDevice,
    base: usize,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let inner = &self.device.0;
        let base = self.base as *mut c_void;
        // SAFETY: allocated once, and nobody uses it any more.
        let freed = inner.inside("cuMemFreeHost", || unsafe { (inner.calls.cuMemFreeHost)(base) });
        if let Err(error) = freed {
            tracing::warn!(%error, "pinned memory was not freed");
        }
    }
}

impl Device for CudaDevice {
    fn id(&self) -> DeviceId {
        self.0.id()
    }

    fn name(&self) -> String {
        self.0.name.clone()
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Memory, DeviceError> {
        let calls = self.0.calls;
        let mut base = null_mut();
        // SAFETY: a place to write to.
        self.0.inside("cuMemHostAlloc", || unsafe {
            (calls.cuMemHostAlloc)(&raw mut base, bytes, PINNED_PORTABLE)
        })?;
        let keep = Arc::new(Pinned { device: self.clone(), base: base as usize });
        // The driver does not say what is in it, and uninitialised bytes must not be looked at.
        // SAFETY: so many bytes were just allocated, and nobody else has them.
        unsafe { base.cast::<u8>().write_bytes(0, bytes) };
        // SAFETY: freed when `keep` is dropped; nobody refers to it.
        Ok(unsafe { Memory::foreign(base.cast(), bytes, keep) })
    }

    unsafe fn copy(
        &self,
        direction: Direction,
        ranges: &[CopyRange],
    ) -> Result<Box<dyn Copying>, DeviceError> {
        let Inner { calls, stream, .. } = *self.0;
        let mut event = null_mut();
        // SAFETY: a place to write to.
        self.0.inside("cuEventCreate", || unsafe {
            (calls.cuEventCreate)(&raw mut event, EVENT_DISABLE_TIMING)
        })?;
        let mut under_way =
            UnderWay { device: self.clone(), event, recorded: false, failed: None, told: false, ended: None };
        let (mut operation, mut submitted, mut recorded) = ("cuMemcpyAsync", 0, false);
        let started = self.0.call(|| {
            for CopyRange { device, host, len } in ranges {
                // SAFETY: the caller keeps both sides valid until the copy has ended.
                let code = match direction {
                    Direction::ToHost => unsafe {
                        (calls.cuMemcpyDtoHAsync_v2)(host.cast(), *device, *len, stream)
                    },
                    Direction::ToDevice => unsafe {
                        (calls.cuMemcpyHtoDAsync_v2)(*device, host.cast_const().cast(), *len, stream)
                    },
                };
                if code != 0 {
                    return code;
                }
                submitted += 1;
            }
            operation = "cuEventRecord";
            // SAFETY: event and stream are alive and of this context.
            let code = unsafe { (calls.cuEventRecord)(event, stream) };
            recorded = code == 0;
            code
        });
        if started != 0 {
            let error = self.0.error(operation, started);
            if submitted == 0 || is_end(started) {
                return Err(error);
            }
            // Some ranges are under way, and fail as a whole when they have ended.
            under_way.failed = Some(error);
            // SAFETY: event and stream are alive and of this context.
            recorded |= self.0.call(|| unsafe { (calls.cuEventRecord)(event, stream) }) == 0;
        }
        under_way.recorded = recorded;
        Ok(Box::new(under_way))
    }
}

struct UnderWay {
    device: CudaDevice,
    event: CUevent,
    /// Whether the event tells the end; if not, it has come when the stream is empty.
    recorded: bool,
    /// Why not all of it was submitted.
    failed: Option<DeviceError>,
    /// Whether an odd answer was spoken of.
    told: bool,
    ended: Option<Result<(), DeviceError>>,
}

// SAFETY: events may be used by any thread.
unsafe impl Send for UnderWay {}

impl Copying for UnderWay {
    fn poll(&mut self) -> Result<bool, DeviceError> {
        let inner = &self.device.0;
        if self.ended.is_none() {
            let (operation, code) = if self.recorded {
                // SAFETY: the event lives as long as `self`.
                ("cuEventQuery", inner.call(|| unsafe { (inner.calls.cuEventQuery)(self.event) }))
            } else {
                // SAFETY: the stream lives as long as `inner`.
                ("cuStreamQuery", inner.call(|| unsafe { (inner.calls.cuStreamQuery)(inner.stream) }))
            };
            self.ended = match code {
                0 => Some(self.failed.take().map_or(Ok(()), Err)),
                NOT_READY => None,
                code if is_end(code) => Some(Err(inner.error(operation, code))),
                // The question failed, which says nothing about the copy: it is asked again.
                code => {
                    if !std::mem::replace(&mut self.told, true) {
                        let error = inner.error(operation, code);
                        tracing::warn!(%error, "it is not known whether a copy has ended");
                    }
                    None
                }
            };
        }
        match &self.ended {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(error)) => Err(error.clone()),
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let inner = &self.device.0;
        // SAFETY: destroyed once; a copy that still goes on does not need it.
        inner.call(|| unsafe { (inner.calls.cuEventDestroy_v2)(self.event) });
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({}, {})", self.0.id(), self.0.name)
    }
}
