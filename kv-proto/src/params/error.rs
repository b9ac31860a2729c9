//! Why parameters are refused.

use thiserror::Error;

use crate::ids::IdError;

/// Why parameters were refused. The request that brought them pays, nobody else.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ParamsError {
    /// Not a JSON object.
    #[error("kv_transfer_params must be an object, got {got}")]
    NotAnObject {
        /// What was given.
        got: &'static str,
    },
    /// A key that must be there is absent or null.
    #[error("{field} is missing")]
    Missing {
        /// The key, with its path.
        field: &'static str,
    },
    /// A value of another type.
    #[error("{field} must be {expected}, got {got}")]
    WrongType {
        /// The key, with its path.
        field: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What was given, shortened.
        got: String,
    },
    /// A number outside its range.
    #[error("{field} is {got}; {min} to {max} are allowed")]
    OutOfRange {
        /// The key, with its path.
        field: &'static str,
        /// What was given, shortened.
        got: String,
        /// Smallest value allowed.
        min: u64,
        /// Largest value allowed.
        max: u64,
    },
    /// A text id that cannot be.
    #[error("{field}: {source}")]
    Id {
        /// The key, with its path.
        field: &'static str,
        /// What is wrong with it.
        source: IdError,
    },
    /// Too long a list or text.
    #[error("{field} has {got} items, at most {limit} are allowed")]
    TooMany {
        /// The key, with its path.
        field: &'static str,
        /// How many there are.
        got: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Two fields that cannot both be true.
    #[error("{field} says {value}, but {other} says {other_value}")]
    Contradiction {
        /// The one key.
        field: &'static str,
        /// Its value.
        value: String,
        /// The other key.
        other: &'static str,
        /// Its value.
        other_value: String,
    },
    /// One of the other offers is wrong.
    #[error("alternatives[{index}]{}", within(source))]
    Alternative {
        /// Its place in the list, from 0.
        index: usize,
        /// What is wrong with it; its fields are named as if it stood alone.
        source: Box<ParamsError>,
    },
}

/// What is wrong with a part, to be read after the part's name.
fn within(source: &ParamsError) -> String {
    match source {
        ParamsError::NotAnObject { got } => format!(" must be an object, got {got}"),
        field => format!(".{field}"),
    }
}
