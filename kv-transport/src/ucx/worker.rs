//! UCX's worker and its endpoints, behind an interface that cannot be misused: what UCX still uses is kept alive
//! here, and a closed endpoint cannot be named again.
//!
//! All of it belongs to one thread. UCX calls back only from calls of that thread into it, so what it tells is kept
//! in a variable of the thread and taken with [`Worker::drain`].
#![allow(unsafe_code)] // Calls into a C library; each block states its reason.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::Arc;

use kv_ucx_sys::abi::{
    self, AmHandlerParam, AmRecvParam, EpParams, ErrHandler, Handle, Posted, RequestParam, Status,
    WorkerParams,
};

use super::fabric::{Fabric, Mapped, check};
use super::frame::{Body, FRAME_MAX_BYTES, Frame};
use crate::error::TransportError;

/// The number under which our active messages travel.
const AM_ID: u32 = 0;
/// Endpoints made in search of the one that a peer's message came by.
const PAIRING_TRIES: usize = 8;
/// Longest frame that bytes come beside; what is longer is none of ours.
const BESIDE_MAX_BYTES: usize = 64;
/// Room after bytes that UCX parses without being told their length.
const PARSE_MARGIN: usize = 4096;

/// Number of an endpoint of one worker. Never used twice.
pub(super) type EpId = u64;
/// Number of something posted. Never used twice.
pub(super) type PostId = u64;

/// By which endpoint of UCX a message came. Only to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReplyTo(usize);

/// What UCX told.
#[derive(Debug)]
pub(super) enum Told {
    /// Something posted has ended: UCX does not touch its memory any more.
    Ended { post: PostId, status: Status },
    /// A message came.
    Frame { reply_to: Option<ReplyTo>, bytes: Vec<u8> },
    /// So many bytes came that a peer was asked for. They are in place, if their landing was there and had room.
    Landed { token: u64, fetch: u64, bytes: u64, fits: bool },
    /// An endpoint has failed, and has to be closed.
    Failed { ep: EpId, status: Status },
}

enum Raw {
    Ended { post: PostId, status: Status, request: *mut c_void },
    Told(Told),
}

thread_local! {
    static INBOX: RefCell<Vec<Raw>> = const { RefCell::new(Vec::new()) };
    static LANDINGS: RefCell<HashMap<u64, Landing>> = RefCell::new(HashMap::new());
}

/// Where bytes go that a peer was asked for.
struct Landing {
    token: u64,
    into: Arc<Mapped>,
    offset: u64,
    len: u64,
}

/// Puts bytes to their place: straight from UCX's buffer, for a copy on the way costs half of the speed.
fn land(frame: Vec<u8>, bytes: &[u8]) {
    let Some(Frame { token, body: Body::Bytes { fetch, at } }) = Frame::decode(frame) else { return };
    let len = bytes.len() as u64;
    let fits = LANDINGS.with(|landings| {
        let Ok(landings) = landings.try_borrow() else { return true };
        // Without one the read has ended, and nothing is written for it.
        let Some(landing) = landings.get(&fetch).filter(|landing| landing.token == token) else {
            return true;
        };
        len <= landing.len
            && at <= landing.len - len
            && landing.into.memory.write(landing.offset + at, bytes).is_ok()
    });
    put(Raw::Told(Told::Landed { token, fetch, bytes: len, fits }));
}

/// Puts something into the thread's inbox. Never panics, because its callers are called by C.
fn put(raw: Raw) {
    INBOX.with(|inbox| {
        if let Ok(mut inbox) = inbox.try_borrow_mut() {
            inbox.push(raw);
        }
    });
}

unsafe extern "C" fn on_ended(request: *mut c_void, status: Status, user_data: *mut c_void) {
    put(Raw::Ended { post: user_data as PostId, status, request });
}

unsafe extern "C" fn on_failed(arg: *mut c_void, _ep: Handle, status: Status) {
    put(Raw::Told(Told::Failed { ep: arg as EpId, status }));
}

unsafe extern "C" fn on_message(
    _arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmRecvParam,
) -> Status {
    // SAFETY: UCX hands over a parameter that lives through the call.
    let Some(param) = (unsafe { param.as_ref() }) else { return abi::UCS_OK };
    // We always send the data along. What came otherwise is a stranger's; to return says that nobody wants it.
    if param.recv_attr & abi::UCP_AM_RECV_ATTR_FLAG_RNDV != 0
        || (data.is_null() && length > 0)
        || length > FRAME_MAX_BYTES
        || header_length > BESIDE_MAX_BYTES
    {
        return abi::UCS_OK;
    }
    let view = |from: *const c_void, length: usize| match length {
        0 => &[][..],
        // SAFETY: without the flag above both are that many bytes, valid through the call.
        _ => unsafe { std::slice::from_raw_parts(from.cast::<u8>(), length) },
    };
    if header_length > 0 {
        land(view(header, header_length).to_vec(), view(data, length));
        return abi::UCS_OK;
    }
    let bytes = view(data, length).to_vec();
    let has_reply = param.recv_attr & abi::UCP_AM_RECV_ATTR_FIELD_REPLY_EP != 0;
    let reply_to = has_reply.then_some(ReplyTo(param.reply_ep as usize));
    put(Raw::Told(Told::Frame { reply_to, bytes }));
    abi::UCS_OK
}

/// Pause between two looks where UCX has nothing to be woken by.
const NO_WAKE_PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

/// The worker itself, kept alive by the keys that were unpacked with it.
struct Inner {
    fabric: Arc<Fabric>,
    handle: Handle,
    destroyed: Cell<bool>,
}

impl Inner {
    fn destroy(&self) {
        if !self.destroyed.replace(true) {
            // SAFETY: destroyed once, by the thread that made it.
            unsafe { (self.fabric.api.ucp_worker_destroy)(self.handle) }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// A peer's key, unpacked for one endpoint.
pub(super) struct Rkey {
    inner: Rc<Inner>,
    ep: EpId,
    handle: Handle,
}

impl Drop for Rkey {
    fn drop(&mut self) {
        if !self.inner.destroyed.get() {
            // SAFETY: unpacked once and destroyed once, while the worker lives and nothing posted uses it.
            unsafe { (self.inner.fabric.api.ucp_rkey_destroy)(self.handle) }
        }
    }
}

impl fmt::Debug for Rkey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rkey(ep {})", self.ep)
    }
}

/// What UCX uses until it says that a post has ended. Nothing reads it; it is there to live.
#[derive(Debug)]
#[allow(dead_code)] // As the comment says.
enum Keep {
    Message(Vec<u8>),
    Bytes(Vec<u8>, Arc<Mapped>),
    Get(Arc<Mapped>, Rc<Rkey>),
    Close,
}

/// See the module.
pub(super) struct Worker {
    kept: HashMap<PostId, Keep>,
    eps: HashMap<EpId, Handle>,
    numbers: u64,
    /// Where peers reach this worker.
    pub(super) address: Vec<u8>,
    inner: Rc<Inner>,
}

impl Worker {
    /// Made in the thread that uses it.
    pub(super) fn new(fabric: Arc<Fabric>) -> Result<Self, TransportError> {
        let api = fabric.api;
        let params = WorkerParams {
            field_mask: abi::UCP_WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode: abi::UCS_THREAD_MODE_SINGLE,
            ..WorkerParams::unset()
        };
        let mut handle = null_mut();
        // SAFETY: the context lives as long as `fabric`, which the worker holds.
        let status = unsafe { (api.ucp_worker_create)(fabric.context(), &raw const params, &raw mut handle) };
        check(api, "ucp_worker_create", status)?;
        let inner = Rc::new(Inner { fabric, handle, destroyed: Cell::new(false) });
        let handler = AmHandlerParam {
            field_mask: abi::UCP_AM_HANDLER_PARAM_FIELD_ID
                | abi::UCP_AM_HANDLER_PARAM_FIELD_FLAGS
                | abi::UCP_AM_HANDLER_PARAM_FIELD_CB,
            id: AM_ID,
            flags: abi::UCP_AM_FLAG_WHOLE_MSG,
            cb: Some(on_message),
            ..AmHandlerParam::unset()
        };
        // SAFETY: the parameter lives through the call, the function for ever.
        let status = unsafe { (api.ucp_worker_set_am_recv_handler)(handle, &raw const handler) };
        check(api, "ucp_worker_set_am_recv_handler", status)?;
        let (mut bytes, mut length) = (null_mut(), 0);
        // SAFETY: two places to write to.
        let status = unsafe { (api.ucp_worker_get_address)(handle, &raw mut bytes, &raw mut length) };
        check(api, "ucp_worker_get_address", status)?;
        // SAFETY: UCX gave out that many bytes, which are copied and then released once.
        let address = unsafe {
            let copy = std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec();
            (api.ucp_worker_release_address)(handle, bytes);
            copy
        };
        INBOX.with(|inbox| inbox.borrow_mut().clear());
        LANDINGS.with(|landings| landings.borrow_mut().clear());
        Ok(Self { kept: HashMap::new(), eps: HashMap::new(), numbers: 0, address, inner })
    }

    /// The descriptor that becomes readable when there is something to do, once [`Worker::arm`] said yes.
    pub(super) fn wake_fd(&self) -> Result<BorrowedFd<'_>, TransportError> {
        let (api, mut fd) = (self.inner.fabric.api, -1);
        // SAFETY: one place to write to.
        let status = unsafe { (api.ucp_worker_get_efd)(self.inner.handle, &raw mut fd) };
        check(api, "ucp_worker_get_efd", status)?;
        // SAFETY: the descriptor is the worker's and open as long as it lives, which the borrow sees to.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Lets UCX work. Says whether it did anything.
    pub(super) fn progress(&mut self) -> bool {
        // SAFETY: this thread's worker.
        !self.inner.destroyed.get()
            && unsafe { (self.inner.fabric.api.ucp_worker_progress)(self.inner.handle) } != 0
    }

    /// Whether one may sleep until the descriptor becomes readable.
    pub(super) fn arm(&mut self) -> bool {
        if self.inner.destroyed.get() {
            return false;
        }
        // SAFETY: this thread's worker.
        match unsafe { (self.inner.fabric.api.ucp_worker_arm)(self.inner.handle) } {
            abi::UCS_OK => true,
            abi::UCS_ERR_BUSY => false,
            status => {
                // It cannot wake us: rather look now and then than without a pause.
                tracing::debug!(status, "UCX cannot be waited for");
                std::thread::sleep(NO_WAKE_PAUSE);
                false
            }
        }
    }

    /// Whether UCX told something that was not taken yet: also calls other than [`Worker::progress`] make it tell.
    pub(super) fn has_told(&self) -> bool {
        INBOX.with(|inbox| !inbox.borrow().is_empty())
    }

    /// Takes what UCX told.
    pub(super) fn drain(&mut self) -> Vec<Told> {
        let raw = INBOX.with(|inbox| std::mem::take(&mut *inbox.borrow_mut()));
        raw.into_iter()
            .map(|raw| match raw {
                Raw::Told(told) => told,
                Raw::Ended { post, status, request } => {
                    if !self.inner.destroyed.get() {
                        // SAFETY: the request's callback has been called, so it is over, and freed once.
                        unsafe { (self.inner.fabric.api.ucp_request_free)(request) }
                    }
                    self.kept.remove(&post);
                    Told::Ended { post, status }
                }
            })
            .collect()
    }

    /// Makes an endpoint to a worker's address.
    pub(super) fn create_ep(&mut self, address: &[u8]) -> Result<EpId, Status> {
        self.numbers += 1;
        let ep = self.numbers;
        // UCX is not told how long the address is: zeros after it end whatever it may read too much.
        let mut padded = address.to_vec();
        padded.resize(address.len() + PARSE_MARGIN, 0);
        let params = EpParams {
            field_mask: abi::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | abi::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | abi::UCP_EP_PARAM_FIELD_ERR_HANDLER,
            address: padded.as_ptr().cast(),
            err_mode: abi::UCP_ERR_HANDLING_MODE_PEER,
            err_handler: ErrHandler { cb: Some(on_failed), arg: ep as *mut c_void },
            ..EpParams::unset()
        };
        let mut handle = null_mut();
        // SAFETY: the address lives through the call and was made by UCX, as its checksum says.
        let status = unsafe {
            (self.inner.fabric.api.ucp_ep_create)(self.inner.handle, &raw const params, &raw mut handle)
        };
        if status != abi::UCS_OK {
            return Err(status);
        }
        self.eps.insert(ep, handle);
        Ok(ep)
    }

    /// The endpoint by which a message came, made ours: the one whose other end is the sender's, so that closing
    /// it stops what the sender does with it. Adds those that were made on the way to it, itself included.
    pub(super) fn pair(
        &mut self,
        address: &[u8],
        reply_to: ReplyTo,
        made: &mut Vec<EpId>,
    ) -> Result<EpId, Status> {
        let known = self.eps.iter().find(|(_, handle)| **handle as usize == reply_to.0);
        if let Some((ep, _)) = known {
            return Ok(*ep);
        }
        // UCX pairs the endpoints of two workers by the order in which they were made. An attempt that ended early
        // leaves the sides out of step, and a few more endpoints bring them in step again. Another may be that of a message
        // that is still on its way, so they are not closed here.
        for _ in 0..PAIRING_TRIES {
            let ep = self.create_ep(address)?;
            made.push(ep);
            if self.eps.get(&ep).is_some_and(|handle| *handle as usize == reply_to.0) {
                return Ok(ep);
            }
        }
        Err(abi::UCS_ERR_NOT_CONNECTED)
    }

    /// Sends an active message. With `reply` the receiver learns by which endpoint.
    pub(super) fn send(&mut self, ep: EpId, bytes: Vec<u8>, reply: bool) -> Result<Option<PostId>, Status> {
        let handle = *self.eps.get(&ep).ok_or(abi::UCS_ERR_NOT_CONNECTED)?;
        let (post, mut param) = self.param();
        param.op_attr_mask |= abi::UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = abi::UCP_AM_SEND_FLAG_EAGER | if reply { abi::UCP_AM_SEND_FLAG_REPLY } else { 0 };
        // SAFETY: the endpoint is open; the bytes are kept, unmoved, until UCX says that it is done with them.
        let returned = unsafe {
            (self.inner.fabric.api.ucp_am_send_nbx)(
                handle,
                AM_ID,
                std::ptr::null(),
                0,
                bytes.as_ptr().cast(),
                bytes.len(),
                &raw const param,
            )
        };
        self.posted(post, returned, Keep::Message(bytes))
    }

    /// Sends bytes of our memory, with a frame beside them.
    pub(super) fn send_bytes(
        &mut self,
        ep: EpId,
        frame: Vec<u8>,
        source: &Arc<Mapped>,
        offset: u64,
        len: u64,
    ) -> Result<Option<PostId>, Status> {
        let handle = *self.eps.get(&ep).ok_or(abi::UCS_ERR_NOT_CONNECTED)?;
        if !source.memory.contains(offset, len) || frame.len() > BESIDE_MAX_BYTES {
            return Err(abi::UCS_ERR_INVALID_ADDR);
        }
        let base = source.memory.base().map_err(|_| abi::UCS_ERR_INVALID_ADDR)?;
        let (post, mut param) = self.param();
        param.op_attr_mask |= abi::UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = abi::UCP_AM_SEND_FLAG_EAGER;
        // SAFETY: the endpoint is open; the bytes lie inside the memory, as checked above. Frame and memory are kept,
        // unmoved, until UCX says that it is done with them.
        let returned = unsafe {
            (self.inner.fabric.api.ucp_am_send_nbx)(
                handle,
                AM_ID,
                frame.as_ptr().cast(),
                frame.len(),
                base.add(offset as usize).cast(),
                len as usize,
                &raw const param,
            )
        };
        self.posted(post, returned, Keep::Bytes(frame, Arc::clone(source)))
    }

    /// From now on bytes that come for this fetch are written there, until [`Worker::forget`].
    pub(super) fn expect(&self, fetch: u64, token: u64, into: &Arc<Mapped>, offset: u64, len: u64) {
        let landing = Landing { token, into: Arc::clone(into), offset, len };
        LANDINGS.with(|landings| landings.borrow_mut().insert(fetch, landing));
    }

    /// From now on nothing is written for this fetch (rule T-3). All of it is done by this thread.
    pub(super) fn forget(&self, fetch: u64) {
        LANDINGS.with(|landings| landings.borrow_mut().remove(&fetch));
    }

    /// Unpacks a peer's key.
    pub(super) fn unpack(&mut self, ep: EpId, packed: &[u8]) -> Result<Rc<Rkey>, Status> {
        let handle = *self.eps.get(&ep).ok_or(abi::UCS_ERR_NOT_CONNECTED)?;
        let mut padded = packed.to_vec();
        padded.resize(packed.len() + PARSE_MARGIN, 0);
        let mut rkey = null_mut();
        // SAFETY: the endpoint is open; the bytes were made by UCX, as their checksum says, and zeros follow.
        let status = unsafe {
            (self.inner.fabric.api.ucp_ep_rkey_unpack)(handle, padded.as_ptr().cast(), &raw mut rkey)
        };
        if status != abi::UCS_OK {
            return Err(status);
        }
        Ok(Rc::new(Rkey { inner: Rc::clone(&self.inner), ep, handle: rkey }))
    }

    /// Starts to read from a peer's memory into ours. `None` says that it is done already.
    pub(super) fn get(
        &mut self,
        rkey: &Rc<Rkey>,
        remote: u64,
        local: &Arc<Mapped>,
        offset: u64,
        len: u64,
    ) -> Result<Option<PostId>, Status> {
        let handle = *self.eps.get(&rkey.ep).ok_or(abi::UCS_ERR_NOT_CONNECTED)?;
        if !local.memory.contains(offset, len) {
            return Err(abi::UCS_ERR_INVALID_ADDR);
        }
        let base = local.memory.base().map_err(|_| abi::UCS_ERR_INVALID_ADDR)?;
        let (post, mut param) = self.param();
        param.op_attr_mask |= abi::UCP_OP_ATTR_FIELD_MEMH;
        param.memh = local.memh();
        // SAFETY: inside the memory, as checked above, so the sums fit. Memory and key are kept until UCX says
        // that it is done with them.
        let returned = unsafe {
            let into = base.add(offset as usize);
            (self.inner.fabric.api.ucp_get_nbx)(
                handle,
                into.cast(),
                len as usize,
                remote,
                rkey.handle,
                &raw const param,
            )
        };
        self.posted(post, returned, Keep::Get(Arc::clone(local), Rc::clone(rkey)))
    }

    /// Starts to close an endpoint; it cannot be used from now on. `None` says that it is done already.
    pub(super) fn close(&mut self, ep: EpId, force: bool) -> Option<PostId> {
        let handle = self.eps.remove(&ep)?;
        let (post, mut param) = self.param();
        if force {
            param.op_attr_mask |= abi::UCP_OP_ATTR_FIELD_FLAGS;
            param.flags = abi::UCP_EP_CLOSE_FLAG_FORCE;
        }
        // SAFETY: the endpoint is open until here and not named again.
        let returned = unsafe { (self.inner.fabric.api.ucp_ep_close_nbx)(handle, &raw const param) };
        self.posted(post, returned, Keep::Close).ok().flatten()
    }

    /// What UCX says about an endpoint.
    pub(super) fn info(&self, ep: EpId) -> Option<String> {
        let handle = *self.eps.get(&ep)?;
        // SAFETY: an open endpoint of this thread's worker.
        unsafe { self.inner.fabric.api.ep_info(handle) }
    }

    /// The last resort: without its worker UCX writes nothing any more, whatever it has not told.
    pub(super) fn destroy(&mut self) {
        // While UCX ends what is left, all that it may use is still there.
        self.inner.destroy();
        self.eps.clear();
        self.kept.clear();
        LANDINGS.with(|landings| landings.borrow_mut().clear());
    }

    fn param(&mut self) -> (PostId, RequestParam) {
        self.numbers += 1;
        let param = RequestParam {
            op_attr_mask: abi::UCP_OP_ATTR_FIELD_CALLBACK | abi::UCP_OP_ATTR_FIELD_USER_DATA,
            cb: Some(on_ended),
            user_data: self.numbers as *mut c_void,
            ..RequestParam::unset()
        };
        (self.numbers, param)
    }

    fn posted(&mut self, post: PostId, returned: *mut c_void, keep: Keep) -> Result<Option<PostId>, Status> {
        match Posted::read(returned) {
            Posted::Done => Ok(None),
            Posted::Failed(status) => Err(status),
            Posted::Pending(_) => {
                self.kept.insert(post, keep);
                Ok(Some(post))
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("endpoints", &self.eps.len()).finish_non_exhaustive()
    }
}
