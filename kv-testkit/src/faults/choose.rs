//! What plans of every kind have in common: how a rule chooses, how a file is read, what is wrong with it.

use std::fmt;
use std::str::FromStr;

use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::sim::Dice;

/// Rules that a plan may have. Each is looked at for every operation, so there is an end.
pub const RULES_MAX: usize = 10_000;

/// What is wrong with a plan. Fields are named by their path, as in `rules[2].percent`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// It is neither TOML nor JSON.
    #[error("the plan is not {format}: {reason}")]
    Syntax {
        /// What it was taken for: JSON if it begins with a brace, else TOML.
        format: &'static str,
        /// What the parser says, with the place.
        reason: String,
    },
    /// A field is of another type, or not known here.
    #[error("{field}: {reason}")]
    Shape {
        /// The field.
        field: String,
        /// What was found and what is possible.
        reason: String,
    },
    /// A value that cannot be.
    #[error("{field} is {value}; {expected}")]
    Value {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// A field that the fault needs.
    #[error("{field} is missing; {expected}")]
    Missing {
        /// The field.
        field: String,
        /// What it says.
        expected: &'static str,
    },
    /// A field that the fault has no use for.
    #[error("{field} means nothing for the fault {fault}")]
    Unused {
        /// The field.
        field: String,
        /// The rule's fault.
        fault: &'static str,
    },
}

impl PlanError {
    pub(super) fn value(
        field: impl Into<String>,
        value: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Value { field: field.into(), value: value.to_string(), expected: expected.into() }
    }
}

/// Reads a plan: JSON if it begins with a brace, else TOML.
pub(super) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, PlanError> {
    // Each from its own kind of value: TOML has numbers that JSON has not, and a null in their place means "absent".
    if text.trim_start().starts_with('{') {
        let json: serde_json::Value = serde_json::from_str(text)
            .map_err(|e| PlanError::Syntax { format: "JSON", reason: e.to_string() })?;
        serde_path_to_error::deserialize(json).map_err(|e| shape(e.path(), e.inner()))
    } else {
        let toml: toml::Value = toml::from_str(text)
            .map_err(|e| PlanError::Syntax { format: "TOML", reason: e.to_string().trim().to_owned() })?;
        serde_path_to_error::deserialize(toml)
            .map_err(|e| shape(e.path(), &e.inner().to_string().lines().next().unwrap_or_default()))
    }
}

fn shape(path: &serde_path_to_error::Path, reason: &dyn fmt::Display) -> PlanError {
    let path = path.to_string();
    let field = if path == "." { "the plan".to_owned() } else { path };
    PlanError::Shape { field, reason: reason.to_string() }
}

/// A pattern such as `XOOXO`: `X` is a fault, `O` is none. It repeats for ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(Vec<bool>);

impl Pattern {
    /// Whether the operation at a position, counted from 0, is struck.
    pub fn strikes(&self, position: u64) -> bool {
        let length = self.0.len() as u64;
        length > 0 && self.0[(position % length) as usize]
    }
}

impl FromStr for Pattern {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let expected = "it is made of X (a fault) and O (none), 1 to 4096 of them, at least one X";
        let refused = || PlanError::value("pattern", format!("{text:?}"), expected);
        if text.len() > 4096 || !text.contains('X') {
            return Err(refused());
        }
        let letters = text.chars().map(|letter| match letter {
            'X' => Ok(true),
            'O' => Ok(false),
            _ => Err(refused()),
        });
        Ok(Self(letters.collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|struck| f.write_str(if *struck { "X" } else { "O" }))
    }
}

/// Which of the things that a rule is about it strikes. Things are counted from 1.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Which {
    /// Every one.
    All,
    /// Each with this probability, above 0 and at most 1.
    Probability(f64),
    /// Those under an `X`; the first letter is for the first.
    Pattern(Pattern),
    /// These.
    At(Vec<u64>),
}

impl Which {
    /// Of the three ways to say it in a file, at most one.
    pub(super) fn from_fields(
        rule: &str,
        probability: Option<f64>,
        pattern: Option<&str>,
        at: Option<Vec<u64>>,
    ) -> Result<Self, PlanError> {
        let field = |name: &str| format!("{rule}.{name}");
        let given =
            [("probability", probability.is_some()), ("pattern", pattern.is_some()), ("at", at.is_some())];
        let mut given = given.iter().filter(|(_, is)| *is).map(|(name, _)| *name);
        if let (Some(first), Some(second)) = (given.next(), given.next()) {
            return Err(PlanError::value(field(second), "given", format!("not beside {first}")));
        }
        let which = match (probability, pattern, at) {
            (Some(p), _, _) => Self::Probability(p),
            (_, Some(text), _) => {
                let parsed: Result<Pattern, _> = text.parse();
                Self::Pattern(parsed.map_err(|error| match error {
                    PlanError::Value { value, expected, .. } => {
                        PlanError::Value { field: field("pattern"), value, expected }
                    }
                    other => other,
                })?)
            }
            (_, _, Some(at)) => Self::At(at),
            _ => Self::All,
        };
        which.check(rule)?;
        Ok(which)
    }

    /// Refuses what strikes nothing or cannot be.
    pub(super) fn check(&self, rule: &str) -> Result<(), PlanError> {
        match self {
            Self::Probability(p) if !(*p > 0.0 && *p <= 1.0) => Err(PlanError::value(
                format!("{rule}.probability"),
                p,
                "more than 0 and at most 1 is allowed",
            )),
            Self::At(at) if at.is_empty() || at.contains(&0) => Err(PlanError::value(
                format!("{rule}.at"),
                format!("{at:?}"),
                "it is a list of positions, counted from 1",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn into_fields(self) -> (Option<f64>, Option<String>, Option<Vec<u64>>) {
        match self {
            Self::All => (None, None, None),
            Self::Probability(p) => (Some(p), None, None),
            Self::Pattern(pattern) => (None, Some(pattern.to_string()), None),
            Self::At(at) => (None, None, Some(at)),
        }
    }
}

/// A rule's way to choose, and how far it has come.
#[derive(Debug)]
pub(super) struct Chooser {
    which: Which,
    limit: Option<u64>,
    dice: Dice,
    seen: u64,
    struck: u64,
}

impl Chooser {
    /// `dice` are the rule's own, so that one rule's throws do not shift another's.
    pub(super) fn new(which: Which, limit: Option<u64>, dice: Dice) -> Self {
        Self { which, limit, dice, seen: 0, struck: 0 }
    }

    /// Looks at the next thing that the rule is about: whether it would be struck.
    pub(super) fn next(&mut self) -> bool {
        self.seen += 1;
        let chosen = match &self.which {
            Which::All => true,
            // Thrown whether or not the limit is reached, so that the limit changes nothing else.
            Which::Probability(p) => chance(&mut self.dice, *p),
            Which::Pattern(pattern) => pattern.strikes(self.seen - 1),
            Which::At(at) => at.contains(&self.seen),
        };
        chosen && self.limit.is_none_or(|limit| self.struck < limit)
    }

    /// It was struck by this rule and not by an earlier one.
    pub(super) fn strike(&mut self) {
        self.struck += 1;
    }
}

/// True with a probability.
pub(super) fn chance(dice: &mut Dice, probability: f64) -> bool {
    // 53 bits are what a double holds exactly.
    ((dice.number() >> 11) as f64) < probability * (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_repeats_exactly() {
        let pattern: Pattern = "XOOXO".parse().unwrap();
        let struck: String =
            (0..12).map(|position| if pattern.strikes(position) { 'X' } else { 'O' }).collect();
        assert_eq!(struck, "XOOXOXOOXOXO");
        assert_eq!(pattern.to_string(), "XOOXO");
        for bad in ["", "OOO", "XOx", "X O"] {
            let refused = bad.parse::<Pattern>().unwrap_err().to_string();
            assert!(refused.contains(&format!("{bad:?}")), "{refused}");
        }
    }

    #[test]
    fn chance_keeps_its_probability_and_its_seed() {
        let struck = |seed, p| {
            let mut chooser = Chooser::new(Which::Probability(p), None, Dice::new(seed));
            (0..10_000).map(|_| chooser.next()).collect::<Vec<_>>()
        };
        let count = |seed, p| struck(seed, p).iter().filter(|s| **s).count();
        assert_eq!(struck(3, 0.3), struck(3, 0.3));
        assert_ne!(struck(3, 0.3), struck(4, 0.3));
        assert!((2800..3200).contains(&count(3, 0.3)), "{}", count(3, 0.3));
        assert_eq!(count(3, 1.0), 10_000);
    }

    #[test]
    fn a_limit_ends_a_rule() {
        let mut chooser = Chooser::new(Which::All, Some(2), Dice::new(0));
        let mut struck = 0;
        for _ in 0..5 {
            if chooser.next() {
                chooser.strike();
                struck += 1;
            }
        }
        assert_eq!(struck, 2);
    }
}
