//! Parameters from JSON: each field is checked, and one that cannot be is named.

use serde_json::{Map, Value};

use super::{
    ALTERNATIVES_KEY, ALTERNATIVES_MAX, EXTRA_KEY, EXTRA_VERSION, GROUPS_MAX, HOST_MAX_BYTES, ParamsError,
    RemotePrefill, TOKENS_MAX, TransferParams, marks,
};
use crate::blocks::{BLOCKS_MAX, BlockList};
use crate::ids::{BlockId, EngineId, Incarnation, LeaseId, RequestId};
use crate::params::PrefixMarks;

fn shorten(value: &Value) -> String {
    let mut text = value.to_string();
    if text.len() > 60 {
        let cut = (0..=57).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
        text.truncate(cut);
        text.push_str("...");
    }
    text
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Takes keys out of an object, so that what remains is what we do not know.
struct Fields(Map<String, Value>);

impl Fields {
    fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key).filter(|v| !v.is_null())
    }

    fn flag(&mut self, field: &'static str) -> Result<bool, ParamsError> {
        match self.take(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(v) => Err(ParamsError::WrongType { field, expected: "a boolean", got: shorten(&v) }),
        }
    }

    fn required(&mut self, key: &str, field: &'static str) -> Result<Value, ParamsError> {
        self.take(key).ok_or(ParamsError::Missing { field })
    }

    fn text(&mut self, key: &str, field: &'static str) -> Result<String, ParamsError> {
        match self.required(key, field)? {
            Value::String(text) => Ok(text),
            v => Err(ParamsError::WrongType { field, expected: "a string", got: shorten(&v) }),
        }
    }

    fn number(&mut self, key: &str, field: &'static str, min: u64, max: u64) -> Result<u64, ParamsError> {
        number(&self.required(key, field)?, field, min, max)
    }
}

fn number(value: &Value, field: &'static str, min: u64, max: u64) -> Result<u64, ParamsError> {
    if !value.is_number() {
        return Err(ParamsError::WrongType { field, expected: "a whole number", got: shorten(value) });
    }
    match value.as_u64() {
        Some(n) if (min..=max).contains(&n) => Ok(n),
        None if value.as_f64().is_some_and(|f| f.fract() != 0.0) => {
            Err(ParamsError::WrongType { field, expected: "a whole number", got: shorten(value) })
        }
        _ => Err(ParamsError::OutOfRange { field, got: shorten(value), min, max }),
    }
}

fn block_groups(value: &Value) -> Result<Vec<BlockList>, ParamsError> {
    const FIELD: &str = "remote_block_ids";
    let wrong = |v: &Value| ParamsError::WrongType {
        field: FIELD,
        expected: "a list of block ids, or one such list per group",
        got: shorten(v),
    };
    let Value::Array(items) = value else { return Err(wrong(value)) };
    let flat = items.iter().all(Value::is_number);
    // Older routers carry one flat list.
    let groups: Vec<&[Value]> = if flat && !items.is_empty() {
        vec![items.as_slice()]
    } else {
        items
            .iter()
            .map(|v| v.as_array().map(Vec::as_slice).ok_or_else(|| wrong(v)))
            .collect::<Result<_, _>>()?
    };
    if groups.len() > GROUPS_MAX {
        return Err(ParamsError::TooMany { field: FIELD, got: groups.len(), limit: GROUPS_MAX });
    }
    groups
        .into_iter()
        .map(|ids| {
            if ids.len() > BLOCKS_MAX as usize {
                return Err(ParamsError::TooMany {
                    field: FIELD,
                    got: ids.len(),
                    limit: BLOCKS_MAX as usize,
                });
            }
            ids.iter()
                .map(|id| number(id, FIELD, 0, u64::from(u32::MAX) - 1).map(|n| BlockId(n as u32)))
                .collect::<Result<BlockList, _>>()
        })
        .collect()
}

/// Positions of the groups' first blocks; absent: all 0.
fn firsts(value: Option<Value>, groups: usize) -> Result<Vec<u32>, ParamsError> {
    const FIELD: &str = "kv_connector.firsts";
    match value {
        None => Ok(vec![0; groups]),
        Some(Value::Array(items)) if items.len() == groups => items
            .iter()
            .map(|item| number(item, FIELD, 0, u64::from(BLOCKS_MAX)).map(|first| first as u32))
            .collect(),
        Some(Value::Array(items)) => Err(ParamsError::Contradiction {
            field: FIELD,
            value: format!("{} groups", items.len()),
            other: "remote_block_ids",
            other_value: format!("{groups} groups"),
        }),
        Some(v) => Err(ParamsError::WrongType {
            field: FIELD,
            expected: "a list with a position per group",
            got: shorten(&v),
        }),
    }
}

/// Digests of shorter prefixes. The offer's own digest covers them, so that changed ones are not confirmed.
fn prefix_marks(value: Option<Value>) -> Result<PrefixMarks, ParamsError> {
    const FIELD: &str = "kv_connector.marks";
    const DIGESTS: &str = "kv_connector.marks.digests";
    let object = match value {
        None => return Ok(PrefixMarks::default()),
        Some(Value::Object(object)) => object,
        Some(v) => {
            return Err(ParamsError::WrongType { field: FIELD, expected: "an object", got: shorten(&v) });
        }
    };
    let mut fields = Fields(object);
    let every = fields.number("every", "kv_connector.marks.every", 1, TOKENS_MAX)? as u32;
    let items = match fields.required("digests", DIGESTS)? {
        Value::Array(items) => items,
        v => {
            return Err(ParamsError::WrongType {
                field: DIGESTS,
                expected: "a list of digests",
                got: shorten(&v),
            });
        }
    };
    if items.len() > marks::MARKS_MAX {
        return Err(ParamsError::TooMany { field: DIGESTS, got: items.len(), limit: marks::MARKS_MAX });
    }
    let digest = |item: &Value| {
        let digits = item.as_str().filter(|text| text.len() == 32);
        digits.and_then(|text| u128::from_str_radix(text, 16).ok()).ok_or_else(|| ParamsError::WrongType {
            field: DIGESTS,
            expected: "32 hexadecimal digits each",
            got: shorten(item),
        })
    };
    Ok(PrefixMarks { every, digests: items.iter().map(digest).collect::<Result<_, _>>()? })
}

impl TransferParams {
    /// Reads what came with a request. `Ok(None)` means that nothing is handed over: both flags are absent or
    /// false. Both of them true make a [`Self::Relay`].
    pub fn parse(value: &Value) -> Result<Option<Self>, ParamsError> {
        let object = match value {
            Value::Null => return Ok(None),
            Value::Object(object) => object.clone(),
            other => return Err(ParamsError::NotAnObject { got: kind(other) }),
        };
        let mut fields = Fields(object);
        let decode = fields.flag("do_remote_decode")?;
        let prefill = fields.flag("do_remote_prefill")?;
        match (decode, prefill) {
            (false, false) => Ok(None),
            (true, true) => Ok(Some(Self::Relay(Box::new(RemotePrefill::take(fields)?)))),
            (true, false) => Ok(Some(Self::RemoteDecode { other: fields.0 })),
            (false, true) => Ok(Some(Self::RemotePrefill(Box::new(RemotePrefill::take(fields)?)))),
        }
    }
}

/// The offers beside the first one. None of them may bring others.
fn alternatives(value: Option<Value>) -> Result<Vec<RemotePrefill>, ParamsError> {
    let field = ALTERNATIVES_KEY;
    let items = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(v) => {
            return Err(ParamsError::WrongType { field, expected: "a list of offers", got: shorten(&v) });
        }
    };
    if items.len() > ALTERNATIVES_MAX {
        return Err(ParamsError::TooMany { field, got: items.len(), limit: ALTERNATIVES_MAX });
    }
    let within = |index| move |source| ParamsError::Alternative { index, source: Box::new(source) };
    items.into_iter().enumerate().map(|(i, item)| alternative(item).map_err(within(i))).collect()
}

fn alternative(item: Value) -> Result<RemotePrefill, ParamsError> {
    let object = match item {
        Value::Object(object) => object,
        other => return Err(ParamsError::NotAnObject { got: kind(&other) }),
    };
    let mut fields = Fields(object);
    for (field, must, expected) in [("do_remote_decode", false, "false"), ("do_remote_prefill", true, "true")]
    {
        let flag = fields.flag(field)?;
        if flag != must {
            return Err(ParamsError::WrongType { field, expected, got: flag.to_string() });
        }
    }
    match fields.take(ALTERNATIVES_KEY) {
        Some(v) if v.as_array().is_none_or(|list| !list.is_empty()) => Err(ParamsError::WrongType {
            field: ALTERNATIVES_KEY,
            expected: "empty in an offer that is one itself",
            got: shorten(&v),
        }),
        _ => RemotePrefill::take_one(fields),
    }
}

impl RemotePrefill {
    /// The offers in parameters that were refused which can be read by themselves, so that they can be given back.
    pub fn readable(value: &Value) -> Vec<Self> {
        let Value::Object(object) = value else { return Vec::new() };
        let mut first = object.clone();
        // A relay's first offer is one as well.
        first.remove("do_remote_decode");
        let others = match first.remove(ALTERNATIVES_KEY) {
            Some(Value::Array(items)) => items,
            _ => Vec::new(),
        };
        std::iter::once(Value::Object(first))
            .chain(others.into_iter().take(ALTERNATIVES_MAX))
            .filter_map(|item| alternative(item).ok())
            .collect()
    }

    fn take(mut fields: Fields) -> Result<Self, ParamsError> {
        let others = fields.take(ALTERNATIVES_KEY);
        let first = Self::take_one(fields)?;
        Ok(Self { alternatives: alternatives(others)?, ..first })
    }

    fn take_one(mut fields: Fields) -> Result<Self, ParamsError> {
        let id = |field| move |source| ParamsError::Id { field, source };
        let engine = EngineId::new(fields.text("remote_engine_id", "remote_engine_id")?)
            .map_err(id("remote_engine_id"))?;
        let request = RequestId::new(fields.text("remote_request_id", "remote_request_id")?)
            .map_err(id("remote_request_id"))?;
        let host = fields.text("remote_host", "remote_host")?;
        if host.is_empty() {
            return Err(ParamsError::Missing { field: "remote_host" });
        }
        if host.len() > HOST_MAX_BYTES {
            return Err(ParamsError::TooMany {
                field: "remote_host",
                got: host.len(),
                limit: HOST_MAX_BYTES,
            });
        }
        let port = fields.number("remote_port", "remote_port", 1, 65_535)? as u16;
        let ranks = fields.number("tp_size", "tp_size", 1, 65_535)? as u32;
        let blocks = block_groups(&fields.required("remote_block_ids", "remote_block_ids")?)?;

        let extra = match fields.required(EXTRA_KEY, EXTRA_KEY)? {
            Value::Object(object) => object,
            v => {
                return Err(ParamsError::WrongType {
                    field: EXTRA_KEY,
                    expected: "an object",
                    got: shorten(&v),
                });
            }
        };
        let mut extra = Fields(extra);
        extra.number("version", "kv_connector.version", EXTRA_VERSION, EXTRA_VERSION)?;
        let tokens = extra.number("tokens", "kv_connector.tokens", 0, TOKENS_MAX)? as u32;
        let block_tokens = extra.number("block_tokens", "kv_connector.block_tokens", 1, 65_536)? as u32;
        let block_count = extra.number("blocks", "kv_connector.blocks", 0, u64::from(BLOCKS_MAX))?;
        let digest = extra.text("token_digest", "kv_connector.token_digest")?;
        if digest.len() > 128 {
            return Err(ParamsError::TooMany {
                field: "kv_connector.token_digest",
                got: digest.len(),
                limit: 128,
            });
        }
        let incarnation = extra.text("incarnation", "kv_connector.incarnation")?;
        let incarnation = Incarnation::from_hex(&incarnation).ok_or_else(|| ParamsError::WrongType {
            field: "kv_connector.incarnation",
            expected: "16 lower-case hexadecimal digits",
            got: shorten(&Value::String(incarnation)),
        })?;
        let firsts = firsts(extra.take("firsts"), blocks.len())?;
        let marks = prefix_marks(extra.take("marks"))?;
        let lease = match extra.take("lease") {
            None => None,
            Some(v) => Some(LeaseId(number(&v, "kv_connector.lease", 0, u64::MAX)?)),
        };
        let shown = match fields.take("remote_num_tokens") {
            None => u64::from(tokens),
            Some(v) => number(&v, "remote_num_tokens", 0, TOKENS_MAX)?,
        };
        let remote = Self {
            engine,
            request,
            host,
            port,
            ranks,
            tokens,
            block_tokens,
            blocks,
            firsts,
            incarnation,
            lease,
            token_digest: digest,
            marks,
            alternatives: Vec::new(),
            other: fields.0,
        };
        if shown != u64::from(tokens) {
            return Err(ParamsError::Contradiction {
                field: "remote_num_tokens",
                value: shown.to_string(),
                other: "kv_connector.tokens",
                other_value: tokens.to_string(),
            });
        }
        remote.check(block_count)?;
        Ok(remote)
    }

    /// Fields that contradict each other name both.
    fn check(&self, block_count: u64) -> Result<(), ParamsError> {
        let contradiction = |field, value: String, other, other_value: String| {
            Err(ParamsError::Contradiction { field, value, other, other_value })
        };
        for (index, group) in self.blocks.iter().enumerate() {
            let first = self.first(index);
            let reaches = u64::from(group.len()) + u64::from(first);
            if reaches != block_count || (group.is_empty() && block_count > 0) {
                let from = if first == 0 { String::new() } else { format!(" from position {first}") };
                return contradiction(
                    "remote_block_ids",
                    format!("{} blocks{from}", group.len()),
                    "kv_connector.blocks",
                    block_count.to_string(),
                );
            }
        }
        if self.blocks.is_empty() && block_count > 0 {
            return contradiction(
                "remote_block_ids",
                "no group".to_owned(),
                "kv_connector.blocks",
                block_count.to_string(),
            );
        }
        let needed = u64::from(self.tokens).div_ceil(u64::from(self.block_tokens));
        if needed != block_count {
            return contradiction(
                "kv_connector.tokens",
                format!("{} (in {needed} blocks of {})", self.tokens, self.block_tokens),
                "kv_connector.blocks",
                block_count.to_string(),
            );
        }
        // No mark may stand for more than is offered.
        let marked = self.marks.digests.len() as u64 * u64::from(self.marks.every);
        if marked > u64::from(self.tokens) && self.tokens > 0 {
            return contradiction(
                "kv_connector.marks",
                format!("{marked} tokens"),
                "kv_connector.tokens",
                self.tokens.to_string(),
            );
        }
        match self.lease {
            Some(lease) if block_count == 0 => {
                contradiction("kv_connector.lease", lease.to_string(), "kv_connector.blocks", "0".to_owned())
            }
            None if block_count > 0 => contradiction(
                "kv_connector.lease",
                "none".to_owned(),
                "kv_connector.blocks",
                block_count.to_string(),
            ),
            _ => Ok(()),
        }
    }
}
