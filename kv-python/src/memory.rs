//! Memory of Python objects, for transports.
#![allow(unsafe_code)] // Wrapping an engine's KV cache is what this module is for; the block states its reason.

use std::sync::Arc;

use kv_connector::transport::Memory;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::errors::ConfigError;

/// One memory: an object with a writable, contiguous buffer (numpy array, bytearray, mmap), or a tuple of address,
/// number of bytes and an owner that keeps them alive.
pub(crate) fn memory_of(index: usize, given: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let wrong = |why: String| ConfigError::new_err(format!("memories[{index}]: {why}"));
    let (address, bytes, owner) = match given.extract::<(usize, usize, Py<PyAny>)>() {
        Ok(parts) => parts,
        Err(_) => {
            let py = given.py();
            let view = py.import("builtins")?.getattr("memoryview")?.call1((given,))?;
            let view = view.call_method1("cast", ("B",)).map_err(|e| wrong(e.to_string()))?;
            let buffer = PyBuffer::<u8>::get(&view).map_err(|e| wrong(e.to_string()))?;
            if buffer.readonly() {
                return Err(wrong("the buffer cannot be written to".to_owned()));
            }
            // The view, which is kept, keeps the buffer from being moved or freed.
            (buffer.buf_ptr() as usize, buffer.len_bytes(), view.unbind())
        }
    };
    if address == 0 || bytes == 0 || isize::try_from(bytes).is_err() {
        return Err(wrong(format!("{bytes} bytes at address {address:#x} are no memory")));
    }
    let keep: Arc<Py<PyAny>> = Arc::new(owner);
    // SAFETY: the object's own buffer, or what the caller of this documented interface says is one, lives as long as
    // `keep`; Rust code takes no reference into it, only copies by address.
    Ok(unsafe { Memory::foreign(address as *mut u8, bytes, keep) })
}
