//! Errors of the commands: what was tried, and what came in the way.

use std::fmt;

/// A command could not do its work.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    why: String,
}

impl Failure {
    pub(crate) fn new(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { what: what.into(), why: why.to_string() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}
