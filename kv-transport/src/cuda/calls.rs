//! The calls of the CUDA driver that are used, found by name at run time.
//!
//! cudarc finds the library and knows the types. Its own wrappers are not called: they panic where a function is missing,
//! and return an enum, which a driver that is newer than cudarc could give a value that is none of it.
#![allow(unsafe_code)] // Functions of a foreign library are looked up here; each block states its reason.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUstream};

use super::DeviceUnavailable;

/// What every call returns; zero is success.
pub(super) type Code = c_uint;
/// `CUDA_ERROR_NOT_READY`: what was asked about goes on.
pub(super) const NOT_READY: Code = 600;

/// Whether nothing goes on after this code, because the context, the device or the driver is gone for good. All other codes are
/// about the call, whatever it asked about: copies go on.
pub(super) fn is_end(code: Code) -> bool {
    // The driver is shut down; errors of memory and links that cannot be corrected; faults of a kernel that damage the context;
    // the context is destroyed.
    matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
}

macro_rules! calls {
    ($($name:ident($($arg:ty),*);)*) => {
        /// The functions, all of which the driver has.
        #[allow(non_snake_case)] // Their names are the driver's.
        pub(super) struct Calls {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        fn load() -> Result<Calls, DeviceUnavailable> {
            // SAFETY: loads the driver, whose initialisers are taken to be sound. Without this question the next
            // call could panic.
            if !unsafe { sys::is_culib_present() } {
                return Err(DeviceUnavailable::NoDriver);
            }
            // SAFETY: as above.
            let library = unsafe { sys::culib() };
            Ok(Calls {
                $($name: {
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the type is that of this function in the driver's header, and has not changed since the
                    // version that its name says.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>(name.as_bytes()) };
                    match found {
                        Ok(function) => *function,
                        Err(_) => return Err(DeviceUnavailable::MissingFunction { name: stringify!($name) }),
                    }
                },)*
            })
        }
    };
}

calls! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorString(Code, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamQuery(CUstream);
    cuThreadExchangeStreamCaptureMode(*mut c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventDestroy_v2(CUevent);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
}

impl Calls {
    /// The driver, ready to be used. The answer stays the same while the process lives.
    pub(super) fn get() -> Result<&'static Self, DeviceUnavailable> {
        static CALLS: OnceLock<Result<Calls, DeviceUnavailable>> = OnceLock::new();
        let calls = CALLS.get_or_init(|| {
            let calls = load()?;
            // SAFETY: the driver may be initialised any number of times; it has no flags.
            let code = unsafe { (calls.cuInit)(0) };
            if code == 0 { Ok(calls) } else { Err(calls.unavailable("cuInit", code)) }
        });
        calls.as_ref().map_err(Clone::clone)
    }

    pub(super) fn unavailable(&self, operation: &'static str, code: Code) -> DeviceUnavailable {
        DeviceUnavailable::Failed { operation, code, meaning: self.meaning(code) }
    }

    /// What the driver says that a code means.
    pub(super) fn meaning(&self, code: Code) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the driver writes a pointer to a string of its own that lives for ever, or null.
        let known = unsafe { (self.cuGetErrorString)(code, &raw mut text) } == 0 && !text.is_null();
        if !known {
            return "a code that the driver does not explain".into();
        }
        // SAFETY: as above; it ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
