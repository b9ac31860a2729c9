//! Types, structs and constants of the UCP interface, as UCX 1.13 has them.
//!
//! Later versions of major 1 only append to these structs, and every field that is read is announced by a bit of a
//! mask, so what is declared here holds for them too. `tests/abi.rs` compares all of it with the real headers.

use core::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`: zero is good, one is "in progress", negative is an error. A packed enum in C, hence one byte.
pub type Status = i8;
/// What a non-blocking call returns: null for done, a small negative number for an error, else a request.
pub type StatusPtr = *mut c_void;
/// A handle that UCX gave out. Which kind it is stands with the function.
pub type Handle = *mut c_void;
/// `ucp_send_nbx_callback_t`
pub type SendCallback = unsafe extern "C" fn(request: *mut c_void, status: Status, user_data: *mut c_void);
/// `ucp_err_handler_cb_t`
pub type ErrorCallback = unsafe extern "C" fn(arg: *mut c_void, ep: Handle, status: Status);
/// `ucp_am_recv_callback_t`
pub type AmCallback = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmRecvParam,
) -> Status;

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident : $t:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $t = $value;)*
        /// Every constant declared here, under the name that C gives it, for the comparison with the headers.
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $name as i64)),*];
    };
}

constants! {
    /// Done well.
    UCS_OK: Status = 0;
    /// Not done yet.
    UCS_INPROGRESS: Status = 1;
    /// No memory.
    UCS_ERR_NO_MEMORY: Status = -4;
    /// No lane leads there.
    UCS_ERR_UNREACHABLE: Status = -6;
    /// The address is not one.
    UCS_ERR_INVALID_ADDR: Status = -7;
    /// Arming: there are events to be handled first.
    UCS_ERR_BUSY: Status = -15;
    /// Ended because the endpoint was closed.
    UCS_ERR_CANCELED: Status = -16;
    /// It took too long.
    UCS_ERR_TIMED_OUT: Status = -20;
    /// The peer said no.
    UCS_ERR_REJECTED: Status = -23;
    /// There is no connection.
    UCS_ERR_NOT_CONNECTED: Status = -24;
    /// The peer is gone.
    UCS_ERR_CONNECTION_RESET: Status = -25;
    /// The peer does not answer.
    UCS_ERR_ENDPOINT_TIMEOUT: Status = -80;
    /// Below every error.
    UCS_ERR_LAST: Status = -100;
    /// `ucp_params.features` is set.
    UCP_PARAM_FIELD_FEATURES: u64 = 1;
    /// `ucp_params.mt_workers_shared` is set.
    UCP_PARAM_FIELD_MT_WORKERS_SHARED: u64 = 32;
    /// Remote memory access.
    UCP_FEATURE_RMA: u64 = 2;
    /// Sleeping on a descriptor.
    UCP_FEATURE_WAKEUP: u64 = 16;
    /// Active messages.
    UCP_FEATURE_AM: u64 = 64;
    /// `ucp_worker_params.thread_mode` is set.
    UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1;
    /// One thread uses the worker.
    UCS_THREAD_MODE_SINGLE: c_uint = 0;
    /// `ucp_ep_params.address` is set.
    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
    /// `ucp_ep_params.err_mode` is set.
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 2;
    /// `ucp_ep_params.err_handler` is set.
    UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 4;
    /// The loss of a peer ends its requests.
    UCP_ERR_HANDLING_MODE_PEER: c_uint = 1;
    /// Close without waiting for the peer.
    UCP_EP_CLOSE_FLAG_FORCE: u32 = 1;
    /// `ucp_mem_map_params.address` is set.
    UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1;
    /// `ucp_mem_map_params.length` is set.
    UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 2;
    /// `ucp_request_param_t.cb` is set.
    UCP_OP_ATTR_FIELD_CALLBACK: u32 = 2;
    /// `ucp_request_param_t.user_data` is set.
    UCP_OP_ATTR_FIELD_USER_DATA: u32 = 4;
    /// `ucp_request_param_t.flags` is set.
    UCP_OP_ATTR_FIELD_FLAGS: u32 = 16;
    /// `ucp_request_param_t.memh` is set.
    UCP_OP_ATTR_FIELD_MEMH: u32 = 256;
    /// The receiver learns the endpoint by which to answer.
    UCP_AM_SEND_FLAG_REPLY: u32 = 1;
    /// The message travels with its data, whatever its length.
    UCP_AM_SEND_FLAG_EAGER: u32 = 2;
    /// `ucp_am_handler_param.id` is set.
    UCP_AM_HANDLER_PARAM_FIELD_ID: u64 = 1;
    /// `ucp_am_handler_param.flags` is set.
    UCP_AM_HANDLER_PARAM_FIELD_FLAGS: u64 = 2;
    /// `ucp_am_handler_param.cb` is set.
    UCP_AM_HANDLER_PARAM_FIELD_CB: u64 = 4;
    /// Messages are handed over whole.
    UCP_AM_FLAG_WHOLE_MSG: u32 = 1;
    /// `ucp_am_recv_param.reply_ep` is set.
    UCP_AM_RECV_ATTR_FIELD_REPLY_EP: u64 = 1;
    /// The data did not come along and has to be fetched.
    UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;
}

/// `ucp_params_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // The names are UCX's, which documents them.
pub struct Params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
}

/// `ucp_worker_params_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct WorkerParams {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; 16],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}

/// `ucp_err_handler_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct ErrHandler {
    pub cb: Option<ErrorCallback>,
    pub arg: *mut c_void,
}

/// `ucs_sock_addr_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct SockAddr {
    pub addr: *const c_void,
    pub addrlen: u32,
}

/// `ucp_ep_params_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct EpParams {
    pub field_mask: u64,
    pub address: *const c_void,
    pub err_mode: c_uint,
    pub err_handler: ErrHandler,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: SockAddr,
    pub conn_request: Handle,
    pub name: *const c_char,
    pub local_sockaddr: SockAddr,
}

/// `ucp_mem_map_params_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct MemMapParams {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub flags: c_uint,
    pub prot: c_uint,
    pub memory_type: c_uint,
    /// Of later versions. Guarded by the mask; room for it costs nothing.
    pub later: [u64; 4],
}

/// `ucp_request_param_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct RequestParam {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub cb: Option<SendCallback>,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    pub recv_info: *mut c_void,
    pub memh: Handle,
    /// Of later versions. Guarded by the mask; room for it costs nothing.
    pub later: [u64; 4],
}

/// `ucp_am_handler_param_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct AmHandlerParam {
    pub field_mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub cb: Option<AmCallback>,
    pub arg: *mut c_void,
}

/// `ucp_am_recv_param_t`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // As above.
pub struct AmRecvParam {
    pub recv_attr: u64,
    pub reply_ep: Handle,
}

macro_rules! zeroed {
    ($($name:ident),*) => {
        $(impl $name {
            /// All fields unset, to be named by the mask once they are set.
            pub const fn unset() -> Self {
                // SAFETY: numbers, pointers and optional functions; all of them may be zero.
                unsafe { core::mem::zeroed() }
            }
        })*
    };
}

zeroed!(Params, WorkerParams, EpParams, MemMapParams, RequestParam, AmHandlerParam);

/// What a non-blocking call said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// Done at once. Its callback is not called.
    Done,
    /// Refused or failed at once. Its callback is not called.
    Failed(Status),
    /// Under way. Its callback will be called, and the request has to be freed then.
    Pending(*mut c_void),
}

impl Posted {
    /// Reads what a non-blocking call returned.
    pub fn read(returned: StatusPtr) -> Self {
        let number = returned as isize;
        match Status::try_from(number) {
            Ok(UCS_OK) => Self::Done,
            Ok(status) if (UCS_ERR_LAST..UCS_OK).contains(&status) => Self::Failed(status),
            _ => Self::Pending(returned),
        }
    }
}
