//! The functions that are used, as a table.

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::ffi::CStr;

use libloading::os::unix::Library;

use crate::abi::{
    AmHandlerParam, EpParams, Handle, MemMapParams, Params, RequestParam, Status, StatusPtr, WorkerParams,
};
use crate::load::symbol;

/// Where the functions are.
pub(crate) struct Libraries {
    pub(crate) ucp: Library,
    pub(crate) ucs: Library,
}

/// Type of `ucp_get_version`.
pub(crate) type GetVersion = unsafe extern "C" fn(*mut c_uint, *mut c_uint, *mut c_uint);

macro_rules! api {
    ($($library:ident fn $name:ident($($arg:ident: $t:ty),*) $(-> $r:ty)?;)*) => {
        /// The functions of UCX that are used. Their meaning is that of `ucp.h`.
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs)] // The names are UCX's, which documents them.
        pub struct Api {
            $(pub $name: unsafe extern "C" fn($($arg: $t),*) $(-> $r)?,)*
            /// Major, minor and release number.
            pub version: (u32, u32, u32),
        }

        impl Api {
            /// Looks every function up; the error is the name of the first that is missing.
            pub(crate) fn resolve(
                from: &Libraries,
                version: (u32, u32, u32),
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let name = CStr::from_bytes_with_nul(name.as_bytes()).map_err(|_| stringify!($name))?;
                        // SAFETY: the signature is that of the header; the version has been checked.
                        unsafe { symbol(&from.$library, name) }.ok_or(stringify!($name))?
                    },)*
                    version,
                })
            }
        }
    };
}

api! {
    ucs fn ucs_status_string(status: Status) -> *const c_char;
    ucp fn ucp_config_read(prefix: *const c_char, file: *const c_char, config: *mut Handle) -> Status;
    ucp fn ucp_config_modify(config: Handle, name: *const c_char, value: *const c_char) -> Status;
    ucp fn ucp_config_release(config: Handle);
    ucp fn ucp_init_version(major: c_uint, minor: c_uint, params: *const Params, config: Handle, context: *mut Handle) -> Status;
    ucp fn ucp_cleanup(context: Handle);
    ucp fn ucp_worker_create(context: Handle, params: *const WorkerParams, worker: *mut Handle) -> Status;
    ucp fn ucp_worker_destroy(worker: Handle);
    ucp fn ucp_worker_progress(worker: Handle) -> c_uint;
    ucp fn ucp_worker_get_efd(worker: Handle, fd: *mut c_int) -> Status;
    ucp fn ucp_worker_arm(worker: Handle) -> Status;
    ucp fn ucp_worker_get_address(worker: Handle, address: *mut *mut c_void, length: *mut usize) -> Status;
    ucp fn ucp_worker_release_address(worker: Handle, address: *mut c_void);
    ucp fn ucp_worker_set_am_recv_handler(worker: Handle, param: *const AmHandlerParam) -> Status;
    ucp fn ucp_ep_create(worker: Handle, params: *const EpParams, ep: *mut Handle) -> Status;
    ucp fn ucp_ep_close_nbx(ep: Handle, param: *const RequestParam) -> StatusPtr;
    ucp fn ucp_ep_print_info(ep: Handle, stream: *mut libc::FILE);
    ucp fn ucp_ep_rkey_unpack(ep: Handle, buffer: *const c_void, rkey: *mut Handle) -> Status;
    ucp fn ucp_rkey_destroy(rkey: Handle);
    ucp fn ucp_rkey_pack(context: Handle, memh: Handle, buffer: *mut *mut c_void, size: *mut usize) -> Status;
    ucp fn ucp_rkey_buffer_release(buffer: *mut c_void);
    ucp fn ucp_mem_map(context: Handle, params: *const MemMapParams, memh: *mut Handle) -> Status;
    ucp fn ucp_mem_unmap(context: Handle, memh: Handle) -> Status;
    ucp fn ucp_get_nbx(ep: Handle, buffer: *mut c_void, count: usize, remote: u64, rkey: Handle, param: *const RequestParam) -> StatusPtr;
    ucp fn ucp_am_send_nbx(ep: Handle, id: c_uint, header: *const c_void, header_length: usize, buffer: *const c_void, count: usize, param: *const RequestParam) -> StatusPtr;
    ucp fn ucp_request_free(request: *mut c_void);
}

impl Api {
    /// What a status means, in UCX's words.
    pub fn status_text(&self, status: Status) -> String {
        // SAFETY: the function takes any number and returns a string that lives as long as the library.
        let text = unsafe { (self.ucs_status_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: not null, and a C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// What UCX prints about an endpoint, among it the lanes that it uses.
    ///
    /// # Safety
    ///
    /// `ep` must be an endpoint that is not closed, and this thread its worker's.
    pub unsafe fn ep_info(&self, ep: Handle) -> Option<String> {
        let (mut text, mut size) = (core::ptr::null_mut::<c_char>(), 0usize);
        // SAFETY: two places that live until the stream is closed.
        let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut size) };
        if stream.is_null() {
            return None;
        }
        // SAFETY: the endpoint is the caller's promise, the stream was just opened and is closed once.
        unsafe {
            (self.ucp_ep_print_info)(ep, stream);
            libc::fclose(stream);
        }
        if text.is_null() {
            return None;
        }
        // SAFETY: a closed memory stream leaves a C string, which is ours to free.
        unsafe {
            let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
            libc::free(text.cast());
            Some(copy)
        }
    }
}
