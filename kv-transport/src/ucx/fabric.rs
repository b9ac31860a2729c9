//! What is shared by all threads: UCX's context, and memory that is registered with it.
#![allow(unsafe_code)] // Calls into a C library; each block states its reason.

use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use kv_ucx_sys::abi::{self, Handle, MemMapParams, Params, Status};
use kv_ucx_sys::{Api, LIBRARY_VARIABLE};

use super::NAME;
use super::config::UcxConfig;
use crate::error::TransportError;
use crate::memory::Memory;

/// Prefix of the variables by which users set UCX up.
const USER_PREFIX: &str = "UCX_";
/// Size of the buffers by which UCX cuts what goes over TCP.
const SEGMENT: &str = "512k";

/// A context of UCX. It is made for use by several threads, so registering needs no help of the worker's thread.
pub(super) struct Fabric {
    pub(super) api: &'static Api,
    context: Handle,
}

// SAFETY: the context was made with `mt_workers_shared`, which makes UCX guard it by a lock of its own.
unsafe impl Send for Fabric {}
// SAFETY: as above.
unsafe impl Sync for Fabric {}

impl Fabric {
    pub(super) fn open(config: &UcxConfig) -> Result<Arc<Self>, TransportError> {
        let api = kv_ucx_sys::load(config.library.as_deref()).map_err(|error| {
            let problem = format!("{error}; {LIBRARY_VARIABLE} can name another place");
            TransportError::Library { transport: NAME, problem }
        })?;
        let mut settings = null_mut();
        // SAFETY: null means the default prefix and no file; one place to write to.
        let status = unsafe { (api.ucp_config_read)(null(), null(), &raw mut settings) };
        check(api, "ucp_config_read", status)?;
        let context = configure(api, settings, config).and_then(|()| {
            let params = Params {
                field_mask: abi::UCP_PARAM_FIELD_FEATURES | abi::UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                features: abi::UCP_FEATURE_RMA | abi::UCP_FEATURE_AM | abi::UCP_FEATURE_WAKEUP,
                mt_workers_shared: 1,
                ..Params::unset()
            };
            let mut context = null_mut();
            // 1.13 is the interface that the structs are those of; newer libraries take that.
            // SAFETY: the structs are as declared by that version, and live through the call.
            let status = unsafe {
                (api.ucp_init_version)(
                    1,
                    kv_ucx_sys::OLDEST_MINOR,
                    &raw const params,
                    settings,
                    &raw mut context,
                )
            };
            check(api, "ucp_init", status).map(|()| context)
        });
        // SAFETY: read above, released once.
        unsafe { (api.ucp_config_release)(settings) };
        let (major, minor, release) = api.version;
        tracing::debug!(major, minor, release, "UCX is loaded");
        Ok(Arc::new(Self { api, context: context? }))
    }

    /// The handle, for those in this module's neighbourhood that make workers of it.
    pub(super) fn context(&self) -> Handle {
        self.context
    }

    /// Registers memory with UCX, for as long as the result lives.
    pub(super) fn map(self: &Arc<Self>, memory: Memory) -> Result<Mapped, TransportError> {
        if memory.is_empty() {
            let what = "a region of no bytes";
            return Err(TransportError::Unsupported { transport: NAME, what });
        }
        let base = memory.base().map_err(|_| TransportError::Unsupported {
            transport: NAME,
            what: "a region in device memory",
        })?;
        let params = MemMapParams {
            field_mask: abi::UCP_MEM_MAP_PARAM_FIELD_ADDRESS | abi::UCP_MEM_MAP_PARAM_FIELD_LENGTH,
            address: base.cast(),
            length: memory.len(),
            ..MemMapParams::unset()
        };
        let mut memh = null_mut();
        // SAFETY: the memory is kept alive by `Mapped` until it is unmapped.
        let status = unsafe { (self.api.ucp_mem_map)(self.context, &raw const params, &raw mut memh) };
        check(self.api, "ucp_mem_map", status)?;
        let mut mapped = Mapped { fabric: Arc::clone(self), memh, memory, rkey: vec![] };
        let (mut buffer, mut size) = (null_mut(), 0);
        // SAFETY: the memory was mapped in this context just now; two places to write to.
        let status = unsafe { (self.api.ucp_rkey_pack)(self.context, memh, &raw mut buffer, &raw mut size) };
        check(self.api, "ucp_rkey_pack", status)?;
        // SAFETY: UCX gave out that many bytes, which are copied and then released once.
        unsafe {
            mapped.rkey = std::slice::from_raw_parts(buffer.cast::<u8>(), size).to_vec();
            (self.api.ucp_rkey_buffer_release)(buffer);
        }
        Ok(mapped)
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // SAFETY: workers and mapped memory hold this alive, so nothing of the context is left.
        unsafe { (self.api.ucp_cleanup)(self.context) }
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("version", &self.api.version).finish_non_exhaustive()
    }
}

/// Memory known to UCX.
pub(super) struct Mapped {
    fabric: Arc<Fabric>,
    memh: Handle,
    pub(super) memory: Memory,
    /// What a peer's UCX needs.
    pub(super) rkey: Vec<u8>,
}

// SAFETY: the handle is only read by UCX, and unmapping is guarded by the lock of the context.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub(super) fn memh(&self) -> Handle {
        self.memh
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped in this context, unmapped once; nothing uses it, for whoever does holds this alive.
        let status = unsafe { (self.fabric.api.ucp_mem_unmap)(self.fabric.context, self.memh) };
        if status != abi::UCS_OK {
            tracing::error!(status, "UCX did not unmap memory");
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapped({:?})", self.memory)
    }
}

/// Sets what this transport needs, unless the user has set it, and then what the configuration says.
fn configure(api: &Api, settings: Handle, config: &UcxConfig) -> Result<(), TransportError> {
    let keep_alive = format!("{}ms", config.keep_alive.as_millis().max(1));
    let chosen = config.settings.iter().rev().find(|(name, _)| name == "TLS").map(|(_, value)| value.clone());
    let chosen = chosen.or_else(|| std::env::var(format!("{USER_PREFIX}TLS")).ok());
    // UCX warns of settings for lanes that it was told not to use.
    let uses = |names: &[&str]| chosen.as_deref().is_none_or(|chosen| may_use(chosen, names));
    let (tcp, shared) = (uses(&["tcp"]), uses(&["sm", "shm", "mm", "posix", "sysv", "xpmem"]));
    // Until 1.16 a setting of a lane was looked for under its name without the lane's.
    let (tcp_rx, tcp_tx) = match api.version {
        (1, 0..=16, _) => ("RX_SEG_SIZE", "TX_SEG_SIZE"),
        _ => ("TCP_RX_SEG_SIZE", "TCP_TX_SEG_SIZE"),
    };
    let free = |name: &str| {
        let by_user = std::env::var_os(format!("{USER_PREFIX}{name}")).is_some();
        let by_config = config.settings.iter().any(|(set, _)| set == name || format!("TCP_{set}") == name);
        !by_user && !by_config
    };
    // The one must not be less than the other, so whoever sets one decides on both.
    let tcp = tcp && free("TCP_RX_SEG_SIZE") && free("TCP_TX_SEG_SIZE");
    let ours = [
        // Without it shared memory is not used where the loss of a peer has to be noticed.
        (shared && free("MM_ERROR_HANDLING"), "MM_ERROR_HANDLING", "y"),
        (free("KEEPALIVE_INTERVAL"), "KEEPALIVE_INTERVAL", keep_alive.as_str()),
        // With the default of 8 KiB most of the time goes into fragments.
        (tcp, tcp_rx, SEGMENT),
        (tcp, tcp_tx, SEGMENT),
    ];
    for (_, name, value) in ours.into_iter().filter(|(wanted, ..)| *wanted) {
        if !modify(api, settings, name, value) {
            tracing::warn!(name, value, "this UCX does not know a setting");
        }
    }
    for (name, value) in &config.settings {
        if !modify(api, settings, name, value) {
            return Err(TransportError::BadConfig {
                transport: NAME,
                what: "UCX refuses one of the `settings`",
            });
        }
    }
    Ok(())
}

/// Whether a list of transports, as UCX takes it, leaves one of these.
fn may_use(list: &str, names: &[&str]) -> bool {
    match list.strip_prefix('^') {
        Some(without) => names.iter().any(|name| !without.split(',').any(|word| word == *name)),
        None => list.split(',').any(|word| word == "all" || names.contains(&word.trim_start_matches('\\'))),
    }
}

fn modify(api: &Api, settings: Handle, name: &str, value: &str) -> bool {
    let (Some(name), Some(value)) = (kv_ucx_sys::setting(name), kv_ucx_sys::setting(value)) else {
        return false;
    };
    // SAFETY: two C strings that live through the call.
    unsafe { (api.ucp_config_modify)(settings, name.as_ptr(), value.as_ptr()) == abi::UCS_OK }
}

/// Makes an error of a status.
pub(super) fn check(api: &Api, operation: &'static str, status: Status) -> Result<(), TransportError> {
    if status == abi::UCS_OK {
        return Ok(());
    }
    let (code, meaning) = (i64::from(status), api.status_text(status));
    Err(TransportError::Fabric { transport: NAME, operation, code, meaning })
}

#[cfg(test)]
mod tests {
    use super::may_use;

    #[test]
    fn lists_of_transports_are_understood() {
        for (list, tcp) in [
            ("all", true),
            ("tcp,self", true),
            ("rc,\\tcp", true),
            ("^tcp", false),
            ("^rc,ud", true),
            ("posix", false),
        ] {
            assert_eq!(may_use(list, &["tcp"]), tcp, "{list}");
        }
        assert!(may_use("posix,cma", &["sm", "posix"]) && !may_use("tcp", &["sm", "posix"]));
    }
}
