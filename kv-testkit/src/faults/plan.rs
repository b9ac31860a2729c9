//! What is to go wrong with a transport, and what did.

use std::collections::BTreeMap;

use kv_transport::ReadError;
use serde::{Deserialize, Serialize};

use super::choose::{self, PlanError, RULES_MAX, Which};

/// What a rule is about. Each kind of operation is counted by itself, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum On {
    /// Reads.
    Read,
    /// Messages sent.
    Send,
    /// Connections asked for.
    Connect,
}

impl On {
    /// Its name in a file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Send => "send",
            Self::Connect => "connect",
        }
    }
}

/// The error that a failed read reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailWith {
    /// A failure of the fabric, with the code -5.
    #[default]
    Fabric,
    /// Not finished within its limit.
    TimedOut,
    /// No byte for too long.
    Stalled,
    /// The peer does not know the region.
    UnknownKey,
    /// The peer refused a range.
    RemoteRange,
}

impl FailWith {
    pub(super) fn error(self) -> ReadError {
        match self {
            Self::Fabric => ReadError::Fabric { code: -5 },
            Self::TimedOut => ReadError::TimedOut,
            Self::Stalled => ReadError::Stalled,
            Self::UnknownKey => ReadError::UnknownKey,
            Self::RemoteRange => ReadError::RemoteRange,
        }
    }
}

/// A fault. What it does to each kind of operation stands in the table of the crate's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A read fails with nothing arrived; a message is refused; a peer cannot be reached.
    Fail {
        /// A read's error.
        error: FailWith,
    },
    /// A read, a message, or the news of a connection waits. Within a read's limits: if they end first, it fails.
    Delay {
        /// How long, in milliseconds.
        delay_ms: u64,
    },
    /// Part of a read arrives, then it fails.
    Truncate {
        /// How many of a hundred bytes arrive, in the order of the ranges: 0 to 99.
        arrive_percent: u8,
        /// Its error.
        error: FailWith,
    },
    /// A read reports success, but bytes of its destination are wrong (breaks T-2); a message arrives changed
    /// (breaks T-5).
    Corrupt {
        /// How many bytes are changed; all, if there are fewer.
        bytes: u32,
    },
    /// Nothing happens until a limit of the read, or a cancel, ends it; a connection runs into its limit.
    Stall,
    /// The peer is lost: in the middle of a read, after a message, or as soon as it is connected.
    Disconnect {
        /// How many of a hundred bytes of a read arrive before: 0 to 99.
        arrive_percent: u8,
    },
    /// A read fails at once, and its destination is written later all the same (breaks T-3).
    LateWrite {
        /// How much later, in milliseconds.
        delay_ms: u64,
    },
    /// A message is accepted and never arrives.
    Drop,
}

impl Fault {
    /// Its name in a file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fail { .. } => "fail",
            Self::Delay { .. } => "delay",
            Self::Truncate { .. } => "truncate",
            Self::Corrupt { .. } => "corrupt",
            Self::Stall => "stall",
            Self::Disconnect { .. } => "disconnect",
            Self::LateWrite { .. } => "late_write",
            Self::Drop => "drop",
        }
    }

    /// Whether an operation of this kind can suffer it.
    pub const fn fits(self, on: On) -> bool {
        match self {
            Self::Fail { .. } | Self::Delay { .. } | Self::Disconnect { .. } => true,
            Self::Truncate { .. } | Self::LateWrite { .. } => matches!(on, On::Read),
            Self::Corrupt { .. } => matches!(on, On::Read | On::Send),
            Self::Stall => matches!(on, On::Read | On::Connect),
            Self::Drop => matches!(on, On::Send),
        }
    }
}

/// Names of worker messages that a rule can be about.
pub(super) const MESSAGES: &[&str] = &[
    "hello",
    "welcome",
    "unwelcome",
    "renew",
    "relist",
    "not_held",
    "read_done",
    "confirmed",
    "lapsed",
    "release",
];

/// Whether bytes are a worker message of this name: a map of one entry whose key is the name.
pub(super) fn is_message(bytes: &[u8], name: &str) -> bool {
    let tag = [0x81, 0xa0 | name.len() as u8];
    bytes.strip_prefix(&tag).is_some_and(|rest| rest.starts_with(name.as_bytes()))
}

/// One rule of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    on: On,
    message: Option<String>,
    which: Which,
    limit: Option<u64>,
    fault: Fault,
    draw: Option<u64>,
}

impl Rule {
    /// Every operation of this kind suffers this fault.
    pub fn new(on: On, fault: Fault) -> Self {
        Self { on, message: None, which: Which::All, limit: None, fault, draw: None }
    }

    /// Only these of them.
    #[must_use]
    pub fn which(mut self, which: Which) -> Self {
        self.which = which;
        self
    }

    /// At most so many.
    #[must_use]
    pub fn limit(mut self, limit: u64) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Only worker messages of this name, such as `read_done`; others do not count for the positions.
    #[must_use]
    pub fn message(mut self, name: &str) -> Self {
        self.message = Some(name.to_owned());
        self
    }

    pub(super) fn parts(&self) -> (On, Option<&str>, &Which, Option<u64>, Fault, Option<u64>) {
        (self.on, self.message.as_deref(), &self.which, self.limit, self.fault, self.draw)
    }

    fn check(&self, rule: &str) -> Result<(), PlanError> {
        let field = |name: &str| format!("{rule}.{name}");
        self.which.check(rule)?;
        if !self.fault.fits(self.on) {
            let expected = format!("operations of kind {} cannot suffer it", self.on.name());
            return Err(PlanError::value(field("fault"), format!("{:?}", self.fault.name()), expected));
        }
        if let Some(name) = &self.message {
            if self.on != On::Send {
                return Err(PlanError::value(
                    field("message"),
                    format!("{name:?}"),
                    "only with on = \"send\"",
                ));
            }
            if !MESSAGES.contains(&name.as_str()) {
                let expected = format!("known are {}", MESSAGES.join(", "));
                return Err(PlanError::value(field("message"), format!("{name:?}"), expected));
            }
        }
        if self.limit == Some(0) {
            return Err(PlanError::value(field("limit"), 0, "at least 1 is allowed"));
        }
        match self.fault {
            Fault::Truncate { arrive_percent: percent, .. }
            | Fault::Disconnect { arrive_percent: percent }
                if percent > 99 =>
            {
                Err(PlanError::value(field("arrive_percent"), percent, "0 to 99 are allowed"))
            }
            Fault::Corrupt { bytes: 0 } => Err(PlanError::value(field("bytes"), 0, "at least 1 is allowed")),
            _ => Ok(()),
        }
    }
}

/// A rule as it stands in a file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    on: Option<On>,
    fault: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    probability: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<FailWith>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arrive_percent: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    draw: Option<u64>,
}

impl Row {
    fn into_rule(mut self, rule: &str) -> Result<Rule, PlanError> {
        let field = |name: &str| format!("{rule}.{name}");
        let missing = |name: &str, expected| PlanError::Missing { field: field(name), expected };
        let on = self.on.ok_or_else(|| missing("on", "it is read, send or connect"))?;
        let name = self.fault.take().ok_or_else(|| missing("fault", "it says what is to happen"))?;
        let error = self.error.take();
        let (delay_ms, arrive, bytes) = (self.delay_ms.take(), self.arrive_percent.take(), self.bytes.take());
        let delay = || delay_ms.ok_or_else(|| missing("delay_ms", "it says how long, in milliseconds"));
        let arrive_percent = arrive.unwrap_or(50);
        // Beside the fault: which of error, delay_ms, arrive_percent and bytes it has a use for.
        let (fault, used) = match name.as_str() {
            "fail" => {
                (Fault::Fail { error: error.unwrap_or_default() }, [on == On::Read, false, false, false])
            }
            "delay" => (Fault::Delay { delay_ms: delay()? }, [false, true, false, false]),
            "truncate" => {
                let error = error.unwrap_or_default();
                (Fault::Truncate { arrive_percent, error }, [true, false, true, false])
            }
            "corrupt" => (Fault::Corrupt { bytes: bytes.unwrap_or(1) }, [false, false, false, true]),
            "stall" => (Fault::Stall, [false; 4]),
            "disconnect" => (Fault::Disconnect { arrive_percent }, [false, false, on == On::Read, false]),
            "late_write" => (Fault::LateWrite { delay_ms: delay()? }, [false, true, false, false]),
            "drop" => (Fault::Drop, [false; 4]),
            _ => {
                let known =
                    "known are fail, delay, truncate, corrupt, stall, disconnect, late_write and drop";
                return Err(PlanError::value(field("fault"), format!("{name:?}"), known));
            }
        };
        let given = [
            ("error", error.is_some()),
            ("delay_ms", delay_ms.is_some()),
            ("arrive_percent", arrive.is_some()),
            ("bytes", bytes.is_some()),
        ];
        for ((name, given), used) in given.into_iter().zip(used) {
            if given && !used {
                return Err(PlanError::Unused { field: field(name), fault: fault.name() });
            }
        }
        let which = Which::from_fields(rule, self.probability, self.pattern.as_deref(), self.at)?;
        let built = Rule { on, message: self.message, which, limit: self.limit, fault, draw: self.draw };
        built.check(rule)?;
        Ok(built)
    }
}

impl From<Rule> for Row {
    fn from(rule: Rule) -> Self {
        let (probability, pattern, at) = rule.which.into_fields();
        let mut row = Self {
            on: Some(rule.on),
            fault: Some(rule.fault.name().to_owned()),
            message: rule.message,
            probability,
            pattern,
            at,
            limit: rule.limit,
            draw: rule.draw,
            ..Self::default()
        };
        match rule.fault {
            Fault::Fail { error } => row.error = (rule.on == On::Read).then_some(error),
            Fault::Delay { delay_ms } | Fault::LateWrite { delay_ms } => row.delay_ms = Some(delay_ms),
            Fault::Truncate { arrive_percent, error } => {
                row.arrive_percent = Some(arrive_percent);
                row.error = Some(error);
            }
            Fault::Corrupt { bytes } => row.bytes = Some(bytes),
            Fault::Disconnect { arrive_percent } => {
                row.arrive_percent = (rule.on == On::Read).then_some(arrive_percent);
            }
            Fault::Stall | Fault::Drop => {}
        }
        row
    }
}

/// What is to go wrong, and when. For each operation the first rule that strikes it counts; the others take note of
/// the operation all the same.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FaultPlan {
    seed: u64,
    rules: Vec<Rule>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    rules: Vec<Row>,
}

impl FaultPlan {
    /// A plan without rules, that throws its dice from a seed.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, rules: Vec::new() }
    }

    /// One rule more. Refuses what cannot be, by field and value.
    pub fn rule(mut self, rule: Rule) -> Result<Self, PlanError> {
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

    /// The plan as a JSON file that [`FaultPlan::parse`] reads.
    pub fn to_json(&self) -> String {
        let rules: Vec<Row> = self.rules.iter().cloned().map(Row::from).collect();
        serde_json::json!({ "seed": self.seed, "rules": rules }).to_string()
    }

    /// The plan under which the same operations suffer exactly the same again, down to the bytes changed.
    pub fn from_recording(recording: &Recording) -> Self {
        let rules = recording.faults.iter().map(|injected| Rule {
            on: injected.on,
            message: None,
            which: Which::At(vec![injected.position]),
            limit: None,
            fault: injected.fault,
            draw: Some(injected.draw),
        });
        Self { seed: 0, rules: rules.collect() }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The rules, in their order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }
}

/// A fault that was injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injected {
    /// Into what kind of operation.
    pub on: On,
    /// Into which of this kind, counted from 1 over all operations that were accepted or struck.
    pub position: u64,
    /// What was done to it.
    pub fault: Fault,
    /// What decided over everything that the fault left to chance.
    pub draw: u64,
}

/// Everything that was injected, in its order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recording {
    /// The faults.
    pub faults: Vec<Injected>,
}

impl Recording {
    /// How often each kind of operation suffered each fault, by their names.
    pub fn counts(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        let mut counts = BTreeMap::new();
        for injected in &self.faults {
            *counts.entry((injected.on.name(), injected.fault.name())).or_default() += 1;
        }
        counts
    }

    /// As a plan file in JSON: read again, it injects exactly this.
    pub fn to_json(&self) -> String {
        FaultPlan::from_recording(self).to_json()
    }
}
