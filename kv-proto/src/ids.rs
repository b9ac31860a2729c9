//! Identifiers. Each is a type of its own, so that a block cannot stand where a rank is meant.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest engine id that is accepted, in bytes.
///
/// Engine ids travel in every router parameter and every handshake; 256 bytes hold a UUID with a host name.
pub const ENGINE_ID_MAX_BYTES: usize = 256;

/// Longest request id that is accepted, in bytes.
///
/// A request id is a label chosen by clients. It never crosses the worker-to-worker wire, so the limit only
/// bounds what a client can make the scheduler process keep.
pub const REQUEST_ID_MAX_BYTES: usize = 1024;

/// Why a textual id was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum IdError {
    /// The id has no characters.
    #[error("{field} is empty")]
    Empty {
        /// Name of the id.
        field: &'static str,
    },
    /// The id is longer than allowed.
    #[error("{field} is {bytes} bytes long, at most {limit} are allowed")]
    TooLong {
        /// Name of the id.
        field: &'static str,
        /// Length of what was given.
        bytes: usize,
        /// Longest length allowed.
        limit: usize,
    },
    /// The id holds a control character.
    #[error("{field} holds the control character U+{code:04X} at byte {at}")]
    Control {
        /// Name of the id.
        field: &'static str,
        /// The character's code point.
        code: u32,
        /// Where it stands.
        at: usize,
    },
}

fn check_text(field: &'static str, text: &str, limit: usize) -> Result<(), IdError> {
    if text.is_empty() {
        return Err(IdError::Empty { field });
    }
    if text.len() > limit {
        return Err(IdError::TooLong { field, bytes: text.len(), limit });
    }
    if let Some((at, c)) = text.char_indices().find(|(_, c)| c.is_control()) {
        return Err(IdError::Control { field, code: c as u32, at });
    }
    Ok(())
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $field:literal, $limit:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Checks and wraps a text: not empty, bounded, no control characters. Any other character,
            /// commas, spaces and non-ASCII letters included, is welcome.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                check_text($field, &text, $limit)?;
                Ok(Self(text))
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

text_id!(
    /// Name of one serving instance, the same over all its ranks. Operators may choose it; two lives of an
    /// engine may share it, which is why an [`Incarnation`] stands beside it wherever it matters.
    EngineId,
    "engine_id",
    ENGINE_ID_MAX_BYTES
);

text_id!(
    /// A request's name inside one engine. It is a label: clients choose it, two engines may give the same
    /// request different ones, and nothing but the engine's own scheduler half uses it as a key.
    RequestId,
    "request_id",
    REQUEST_ID_MAX_BYTES
);

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

number_id!(
    /// A lease, unique within one incarnation of its producer: a counter that is never reused.
    LeaseId(u64),
    "lease-"
);
number_id!(
    /// One load of one request on the consumer, unique within one incarnation of the consumer.
    LoadId(u64),
    "load-"
);
number_id!(
    /// One copy between an engine's device blocks and its host pool, unique within one incarnation of the engine: a counter
    /// that is never reused.
    CopyId(u64),
    "copy-"
);
number_id!(
    /// Index of a worker process within its engine, from 0.
    Rank(u32),
    "rank-"
);
number_id!(
    /// Index of a block in an engine's pool.
    BlockId(u32),
    "block-"
);
number_id!(
    /// Number of a try at ending a lease, unique within one incarnation of the consumer: the number of the load
    /// that read, or 0 if nothing was read. A repeated message carries the same number; a second load under the
    /// same lease carries another, so that it cannot take the first one's confirmation for its own.
    Attempt(u64),
    "attempt-"
);

/// One life of an engine process: drawn at random when the process starts, never reused.
///
/// Leases, keys and connections of another incarnation are void, also when the engine id and the address are
/// the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(u64);

impl Incarnation {
    /// Wraps a number that the caller drew from the operating system's random source.
    pub const fn from_random(number: u64) -> Self {
        Self(number)
    }

    /// The number, for codecs.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Sixteen lower-case hexadecimal digits, as in JSON, whose numbers cannot carry 64 bits safely.
    pub fn to_hex(self) -> String {
        format!("{:016x}", self.0)
    }

    /// Reads what [`Incarnation::to_hex`] wrote; `None` for anything else.
    pub fn from_hex(text: &str) -> Option<Self> {
        let plain = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !plain {
            return None;
        }
        u64::from_str_radix(text, 16).ok().map(Self)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incarnation({:016x})", self.0)
    }
}

/// A lease named from anywhere: the incarnation that granted it and its id there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseRef {
    /// The producer's life.
    pub incarnation: Incarnation,
    /// The lease in that life.
    pub lease: LeaseId,
}

impl fmt::Display for LeaseRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.lease, self.incarnation)
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_with_commas_spaces_and_letters_of_any_script_are_accepted() {
        for label in ["a,b,c", "two words", "größe-日本-🙂", &"x".repeat(REQUEST_ID_MAX_BYTES)] {
            assert_eq!(RequestId::new(label).unwrap().as_str(), label);
        }
    }

    #[test]
    fn bad_labels_name_the_field_and_the_figures() {
        let long = RequestId::new("x".repeat(10_240)).unwrap_err();
        assert_eq!(long.to_string(), "request_id is 10240 bytes long, at most 1024 are allowed");
        assert_eq!(EngineId::new("").unwrap_err(), IdError::Empty { field: "engine_id" });
        assert_eq!(
            RequestId::new("a\nb").unwrap_err(),
            IdError::Control { field: "request_id", code: 10, at: 1 }
        );
    }

    #[test]
    fn incarnations_survive_text() {
        for n in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef] {
            let life = Incarnation::from_random(n);
            assert_eq!(Incarnation::from_hex(&life.to_hex()), Some(life));
        }
        for bad in ["", "1", "0123456789ABCDEF", "+123456789abcdef", "00000000000000000"] {
            assert_eq!(Incarnation::from_hex(bad), None, "{bad}");
        }
    }
}
