//! msgpack in map form, with limits.
//!
//! Map form lets a field be added: an older reader ignores it, and a newer reader that misses it takes the
//! default, which must be the old behaviour. What comes from outside is bounded by the length of its frame
//! *before* it is decoded, and no decoder here allocates more than the frame's own length suggests.

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Longest plan or report, in bytes. They stay inside one engine; the limit catches a runaway.
pub const STEP_MAX_BYTES: usize = 64 << 20;
/// Longest handshake query or answer, in bytes.
pub const HANDSHAKE_MAX_BYTES: usize = 16 << 20;
/// Longest worker-to-worker message, in bytes.
pub const WORKER_MESSAGE_MAX_BYTES: usize = 1 << 20;

/// Why bytes could not be decoded, or a value not encoded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Longer than allowed.
    #[error("{what} of {bytes} bytes is longer than the {limit} allowed")]
    TooLong {
        /// What it is.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// Longest length allowed.
        limit: usize,
    },
    /// Of another version of the protocol: the processes of one engine are not of one build.
    #[error("{what} is of protocol version {theirs}, ours is {ours}")]
    Version {
        /// What it is.
        what: &'static str,
        /// Our version.
        ours: u32,
        /// Its version.
        theirs: u32,
    },
    /// Not what it should be.
    #[error("{what} cannot be decoded: {reason}")]
    Malformed {
        /// What it should have been.
        what: &'static str,
        /// The decoder's words.
        reason: String,
    },
    /// A value that msgpack cannot express; a defect of the caller's.
    #[error("{what} cannot be encoded: {reason}")]
    Unencodable {
        /// What it is.
        what: &'static str,
        /// The encoder's words.
        reason: String,
    },
}

/// What says which kind a frame is. A frame of another kind is then an error, and not an empty value.
#[derive(Serialize, serde::Deserialize)]
struct Kind<T> {
    kind: String,
    version: u32,
    body: T,
}

/// Encodes in map form, with the kind and the protocol's version in front.
pub(crate) fn encode_kind<T: Serialize>(
    what: &'static str,
    limit: usize,
    value: &T,
) -> Result<Vec<u8>, CodecError> {
    encode(what, limit, &Kind { kind: what.to_owned(), version: crate::PROTOCOL_VERSION, body: value })
}

/// Decodes what [`encode_kind`] encoded.
pub(crate) fn decode_kind<T: DeserializeOwned>(
    what: &'static str,
    limit: usize,
    bytes: &[u8],
) -> Result<T, CodecError> {
    let Kind { kind, version, body } = decode::<Kind<T>>(what, limit, bytes)?;
    if kind != what {
        let got: String = kind.chars().take(40).collect();
        return Err(CodecError::Malformed { what, reason: format!("it says that it is a {got:?}") });
    }
    if version != crate::PROTOCOL_VERSION {
        return Err(CodecError::Version { what, ours: crate::PROTOCOL_VERSION, theirs: version });
    }
    Ok(body)
}

/// Encodes in map form.
pub(crate) fn encode<T: Serialize>(
    what: &'static str,
    limit: usize,
    value: &T,
) -> Result<Vec<u8>, CodecError> {
    let bytes = rmp_serde::to_vec_named(value)
        .map_err(|e| CodecError::Unencodable { what, reason: e.to_string() })?;
    if bytes.len() > limit {
        return Err(CodecError::TooLong { what, bytes: bytes.len(), limit });
    }
    Ok(bytes)
}

/// Decodes; bytes left over at the end are an error.
pub(crate) fn decode<T: DeserializeOwned>(
    what: &'static str,
    limit: usize,
    bytes: &[u8],
) -> Result<T, CodecError> {
    if bytes.len() > limit {
        return Err(CodecError::TooLong { what, bytes: bytes.len(), limit });
    }
    let malformed = |reason: String| CodecError::Malformed { what, reason };
    let mut rest = bytes;
    let mut decoder = rmp_serde::Deserializer::new(&mut rest);
    // Our deepest value has fewer than ten levels; a deeper one could exhaust the stack.
    decoder.set_max_depth(32);
    let value = T::deserialize(&mut decoder).map_err(|e| malformed(e.to_string()))?;
    if !rest.is_empty() {
        return Err(malformed(format!("{} bytes follow its end", rest.len())));
    }
    Ok(value)
}
