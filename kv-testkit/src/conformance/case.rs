//! Rules, cases and verdicts.

use std::fmt;
use std::time::Duration;

use super::bench::Bench;
use super::harness::Unavailable;

/// A rule of the transport contract; see [`kv_transport::contract::Transport`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // Their meaning stands with the contract.
pub enum Rule {
    T1,
    T2,
    T3,
    T4,
    T5,
    T6,
    T7,
    T8,
    T9,
    T10,
    T11,
    T12,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::T1,
        Self::T2,
        Self::T3,
        Self::T4,
        Self::T5,
        Self::T6,
        Self::T7,
        Self::T8,
        Self::T9,
        Self::T10,
        Self::T11,
        Self::T12,
    ];
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "T-{}", *self as u8 + 1)
    }
}

/// Why a case ended early.
#[derive(Debug)]
pub(super) enum End {
    /// A rule was seen broken, perhaps not the one that the case is about.
    Broken { rule: Rule, what: String },
    /// This transport or harness cannot be tried in this way.
    Cannot(String),
}

impl From<Unavailable> for End {
    fn from(unavailable: Unavailable) -> Self {
        match unavailable {
            Unavailable::Cannot(why) => Self::Cannot(why.into()),
            // A harness that fails proves nothing, so the first rule stands for "nothing could be tried".
            Unavailable::Failed(error) => {
                Self::Broken { rule: Rule::T1, what: format!("the harness failed: {error}") }
            }
        }
    }
}

pub(super) type Outcome = Result<(), End>;

/// A case: what is tried of one rule.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub(super) rule: Rule,
    pub(super) name: &'static str,
    /// Counts what the process has; nothing else may run meanwhile.
    pub(super) alone: bool,
    pub(super) run: fn(&Bench) -> Outcome,
}

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// The rule was kept.
    Kept,
    /// The rule was broken.
    Broken {
        /// What was seen.
        what: String,
    },
    /// Another rule was broken on the way, so that this one could not be judged. That fails a run as well.
    NotJudged {
        /// The rule that was broken.
        rule: Rule,
        /// What was seen.
        what: String,
    },
    /// The case did not end in its time.
    Hung {
        /// Its time.
        limit: Duration,
    },
    /// The case does not apply.
    Skipped {
        /// Why not.
        reason: String,
    },
}

/// A case and its verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseReport {
    /// The rule that it is about.
    pub rule: Rule,
    /// Its name, which begins with the rule.
    pub name: &'static str,
    /// How it ended.
    pub verdict: Verdict,
}

impl CaseReport {
    /// Whether the case saw its own rule broken; a case that hangs or panics has.
    pub fn caught(&self) -> bool {
        matches!(self.verdict, Verdict::Broken { .. } | Verdict::Hung { .. })
    }
}

/// The cases of a module, named after their functions.
macro_rules! cases {
    ($rule:ident: $($name:ident),* $(,)?) => {
        pub(super) const CASES: &[$crate::conformance::case::Case] = &[$(
            $crate::conformance::case::Case {
                rule: $crate::conformance::Rule::$rule,
                name: stringify!($name),
                alone: matches!($crate::conformance::Rule::$rule, $crate::conformance::Rule::T11),
                run: $name,
            },
        )*];
    };
}

/// Ends a case unless something holds.
macro_rules! check {
    ($rule:ident, $fact:expr, $($what:tt)*) => {
        if !$fact {
            return Err($crate::conformance::case::End::Broken {
                rule: $crate::conformance::Rule::$rule,
                what: format!($($what)*),
            });
        }
    };
}

/// A broken rule.
macro_rules! broken {
    ($rule:ident, $($what:tt)*) => {
        $crate::conformance::case::End::Broken { rule: $crate::conformance::Rule::$rule, what: format!($($what)*) }
    };
}

pub(super) use {broken, cases, check};
