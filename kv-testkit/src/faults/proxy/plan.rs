//! What is to go wrong with the connections through a proxy, and what did.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::faults::choose::{self, PlanError, RULES_MAX, Which};

/// Which of the two streams of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Direction {
    /// From the client to the upstream.
    Up,
    /// From the upstream to the client.
    Down,
    /// Each of the two.
    #[default]
    Both,
}

impl Direction {
    pub(super) fn includes(self, other: Self) -> bool {
        self == Self::Both || self == other
    }
}

/// Where in a stream a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Place {
    /// When so many bytes have been forwarded; a corrupted byte is the one after them.
    After(u64),
    /// At each chunk that is read, with this probability.
    PerChunk(f64),
}

/// A fault of a connection or of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProxyFault {
    /// The connection is reset as soon as it is accepted.
    Refuse,
    /// The connection is accepted; what comes is swallowed, and nothing is ever answered.
    Hang,
    /// The client is answered noise, then its stream ends. The upstream hears nothing.
    Garbage {
        /// How many bytes of noise.
        bytes: u32,
    },
    /// Every chunk waits before it is forwarded.
    Delay {
        /// How long, in milliseconds.
        delay_ms: u64,
    },
    /// No more than so many bytes are forwarded in a second.
    Throttle {
        /// Bytes per second.
        bytes_per_s: u64,
    },
    /// Nothing is read and nothing forwarded.
    Stall {
        /// For so many milliseconds; for ever, if not given.
        for_ms: Option<u64>,
    },
    /// Both streams end.
    Cut,
    /// Both connections are reset.
    Reset,
    /// This stream ends, the other one goes on.
    HalfClose,
    /// What comes is swallowed; the stream does not end.
    Silence,
    /// A byte is changed.
    Corrupt,
}

impl ProxyFault {
    /// Its name in a file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Hang => "hang",
            Self::Garbage { .. } => "garbage",
            Self::Delay { .. } => "delay",
            Self::Throttle { .. } => "throttle",
            Self::Stall { .. } => "stall",
            Self::Cut => "cut",
            Self::Reset => "reset",
            Self::HalfClose => "half_close",
            Self::Silence => "silence",
            Self::Corrupt => "corrupt",
        }
    }

    /// Whether it is about the connection as a whole, so that no stream to the upstream exists.
    pub(super) const fn is_of_connection(self) -> bool {
        matches!(self, Self::Refuse | Self::Hang | Self::Garbage { .. })
    }

    /// Whether it goes on from its place, and has nothing to strike again.
    pub(super) const fn is_lasting(self) -> bool {
        matches!(self, Self::Delay { .. } | Self::Throttle { .. })
    }
}

/// One rule of a proxy's plan.
#[derive(Debug, Clone, PartialEq)]
pub struct ProxyRule {
    pub(super) fault: ProxyFault,
    pub(super) direction: Direction,
    pub(super) which: Which,
    pub(super) limit: Option<u64>,
    pub(super) place: Place,
    pub(super) draw: Option<u64>,
}

impl ProxyRule {
    /// Every connection suffers this fault, in both directions, from its first byte.
    pub fn new(fault: ProxyFault) -> Self {
        let (direction, place) = (Direction::Both, Place::After(0));
        Self { fault, direction, which: Which::All, limit: None, place, draw: None }
    }

    /// Only these connections.
    #[must_use]
    pub fn which(mut self, which: Which) -> Self {
        self.which = which;
        self
    }

    /// At most so many connections.
    #[must_use]
    pub fn limit(mut self, limit: u64) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Only this stream.
    #[must_use]
    pub fn direction(mut self, direction: Direction) -> Self {
        self.direction = direction;
        self
    }

    /// At this place of the stream.
    #[must_use]
    pub fn place(mut self, place: Place) -> Self {
        self.place = place;
        self
    }

    fn check(&self, rule: &str) -> Result<(), PlanError> {
        let field = |name: &str| format!("{rule}.{name}");
        self.which.check(rule)?;
        if self.limit == Some(0) {
            return Err(PlanError::value(field("limit"), 0, "at least 1 is allowed"));
        }
        if let Place::PerChunk(p) = self.place {
            if self.fault.is_of_connection() || self.fault.is_lasting() {
                return Err(PlanError::Unused { field: field("per_chunk"), fault: self.fault.name() });
            }
            if !(p > 0.0 && p <= 1.0) {
                let expected = "more than 0 and at most 1 is allowed";
                return Err(PlanError::value(field("per_chunk"), p, expected));
            }
        }
        match self.fault {
            ProxyFault::Throttle { bytes_per_s: 0 } => {
                Err(PlanError::value(field("bytes_per_s"), 0, "at least 1 is allowed"))
            }
            ProxyFault::Garbage { bytes } if !(1..=1 << 24).contains(&bytes) => {
                Err(PlanError::value(field("bytes"), bytes, "1 to 16777216 are allowed"))
            }
            _ => Ok(()),
        }
    }
}

/// A rule as it stands in a file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    fault: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    direction: Option<Direction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    probability: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_chunk: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    for_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    draw: Option<u64>,
}

impl Row {
    fn into_rule(self, rule: &str) -> Result<ProxyRule, PlanError> {
        let field = |name: &str| format!("{rule}.{name}");
        let missing = |name: &str, expected| PlanError::Missing { field: field(name), expected };
        let name = self.fault.ok_or_else(|| missing("fault", "it says what is to happen"))?;
        let fault = match name.as_str() {
            "refuse" => ProxyFault::Refuse,
            "hang" => ProxyFault::Hang,
            "garbage" => ProxyFault::Garbage { bytes: self.bytes.unwrap_or(64) },
            "delay" => ProxyFault::Delay {
                delay_ms: self.delay_ms.ok_or_else(|| missing("delay_ms", "it says how long, in ms"))?,
            },
            "throttle" => ProxyFault::Throttle {
                bytes_per_s: self
                    .bytes_per_s
                    .ok_or_else(|| missing("bytes_per_s", "it says how many bytes pass in a second"))?,
            },
            "stall" => ProxyFault::Stall { for_ms: self.for_ms },
            "cut" => ProxyFault::Cut,
            "reset" => ProxyFault::Reset,
            "half_close" => ProxyFault::HalfClose,
            "silence" => ProxyFault::Silence,
            "corrupt" => ProxyFault::Corrupt,
            _ => {
                let known = "known are refuse, hang, garbage, delay, throttle, stall, cut, reset, \
                             half_close, silence and corrupt";
                return Err(PlanError::value(field("fault"), format!("{name:?}"), known));
            }
        };
        let of_stream = !fault.is_of_connection();
        for (name, given, used) in [
            ("direction", self.direction.is_some(), of_stream),
            ("after_bytes", self.after_bytes.is_some(), of_stream),
            ("per_chunk", self.per_chunk.is_some(), of_stream && !fault.is_lasting()),
            ("delay_ms", self.delay_ms.is_some(), matches!(fault, ProxyFault::Delay { .. })),
            ("bytes_per_s", self.bytes_per_s.is_some(), matches!(fault, ProxyFault::Throttle { .. })),
            ("for_ms", self.for_ms.is_some(), matches!(fault, ProxyFault::Stall { .. })),
            ("bytes", self.bytes.is_some(), matches!(fault, ProxyFault::Garbage { .. })),
        ] {
            if given && !used {
                return Err(PlanError::Unused { field: field(name), fault: fault.name() });
            }
        }
        let place = match (self.after_bytes, self.per_chunk) {
            (Some(_), Some(_)) => {
                return Err(PlanError::value(field("per_chunk"), "given", "not beside after_bytes"));
            }
            (after, None) => Place::After(after.unwrap_or(0)),
            (None, Some(probability)) => Place::PerChunk(probability),
        };
        let which = Which::from_fields(rule, self.probability, self.pattern.as_deref(), self.at)?;
        let direction = self.direction.unwrap_or_default();
        let built = ProxyRule { fault, direction, which, limit: self.limit, place, draw: self.draw };
        built.check(rule)?;
        Ok(built)
    }
}

impl From<ProxyRule> for Row {
    fn from(rule: ProxyRule) -> Self {
        let (probability, pattern, at) = rule.which.into_fields();
        let mut row = Self {
            fault: Some(rule.fault.name().to_owned()),
            probability,
            pattern,
            at,
            limit: rule.limit,
            draw: rule.draw,
            ..Self::default()
        };
        if !rule.fault.is_of_connection() {
            row.direction = Some(rule.direction);
            match rule.place {
                Place::After(bytes) => row.after_bytes = Some(bytes),
                Place::PerChunk(probability) => row.per_chunk = Some(probability),
            }
        }
        match rule.fault {
            ProxyFault::Garbage { bytes } => row.bytes = Some(bytes),
            ProxyFault::Delay { delay_ms } => row.delay_ms = Some(delay_ms),
            ProxyFault::Throttle { bytes_per_s } => row.bytes_per_s = Some(bytes_per_s),
            ProxyFault::Stall { for_ms } => row.for_ms = for_ms,
            _ => {}
        }
        row
    }
}

/// What is to go wrong with connections. All rules that choose a connection strike it; of those that are about the
/// connection as a whole, the first.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ProxyPlan {
    pub(super) seed: u64,
    pub(super) rules: Vec<ProxyRule>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    rules: Vec<Row>,
}

impl ProxyPlan {
    /// A plan file with comments, which [`ProxyPlan::parse`] reads.
    pub const EXAMPLE: &'static str = include_str!("example.toml");

    /// A plan without rules, that throws its dice from a seed.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, rules: Vec::new() }
    }

    /// One rule more. Refuses what cannot be, by field and value.
    pub fn rule(mut self, rule: ProxyRule) -> Result<Self, PlanError> {
        let number = self.rules.len();
        if number >= RULES_MAX {
            return Err(PlanError::value("rules", number + 1, format!("at most {RULES_MAX} are allowed")));
        }
        rule.check(&format!("rules[{number}]"))?;
        self.rules.push(rule);
        Ok(self)
    }

    /// Reads a plan in TOML, or in JSON if it begins with a brace.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let file: PlanFile = choose::parse(text)?;
        file.rules.into_iter().enumerate().try_fold(Self::seeded(file.seed), |plan, (number, row)| {
            plan.rule(row.into_rule(&format!("rules[{number}]"))?)
        })
    }

    /// The plan as a JSON file that [`ProxyPlan::parse`] reads.
    pub fn to_json(&self) -> serde_json::Value {
        let rules: Vec<Row> = self.rules.iter().cloned().map(Row::from).collect();
        serde_json::json!({ "seed": self.seed, "rules": rules })
    }

    /// The plan under which the same connections suffer the same again at the same bytes.
    pub fn from_recording(recorded: &[ProxyInjected]) -> Self {
        let rules = recorded.iter().map(|injected| ProxyRule {
            fault: injected.fault,
            direction: injected.direction,
            which: Which::At(vec![injected.connection]),
            limit: None,
            place: Place::After(injected.at_byte),
            draw: Some(injected.draw),
        });
        Self { seed: 0, rules: rules.collect() }
    }
}

/// A fault that was injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyInjected {
    /// Into which connection, counted from 1.
    pub connection: u64,
    /// Into which stream; both, if into the connection.
    pub direction: Direction,
    /// After how many bytes of the stream.
    pub at_byte: u64,
    /// What was done.
    pub fault: ProxyFault,
    /// What decided over everything that the fault left to chance.
    pub draw: u64,
}

/// What went through a proxy, and what was done to it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProxyReport {
    /// Connections accepted.
    pub connections: u64,
    /// Connections for which the upstream could not be reached.
    pub upstream_failed: u64,
    /// Bytes forwarded to the upstream.
    pub bytes_up: u64,
    /// Bytes forwarded to clients.
    pub bytes_down: u64,
    /// How often each fault struck, by its name.
    pub faults: BTreeMap<&'static str, u64>,
    /// The first [`RULES_MAX`] of them, in their order.
    pub recorded: Vec<ProxyInjected>,
}
