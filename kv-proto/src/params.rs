//! Transfer parameters: the JSON that a router carries from a client to P, and from P to D.
//!
//! The keys are those which vLLM, llm-d and the example proxies pass already (`do_remote_prefill`,
//! `remote_block_ids`, `remote_host`, …), so that routers need not change. What is ours travels in the one extra
//! key [`EXTRA_KEY`]. Keys that we do not know are kept and given back.
//!
//! A client can see and forge all of it. Parameters *locate* a hand-over; they prove nothing. Whether the lease
//! is real and held is decided between the workers.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::blocks::{BLOCKS_MAX, BlockList};
use crate::ids::{BlockId, EngineId, IdError, Incarnation, LeaseId, LeaseRef, RequestId};
use crate::layout::hex;

/// The key under which our own fields travel.
pub const EXTRA_KEY: &str = "kv_connector";
/// Version of the fields under [`EXTRA_KEY`].
pub const EXTRA_VERSION: u64 = 1;
/// Longest host name or address literal, in bytes (a DNS name has at most 253).
pub const HOST_MAX_BYTES: usize = 255;
/// Most block groups.
pub const GROUPS_MAX: usize = 64;
/// Most tokens one hand-over may claim.
pub const TOKENS_MAX: u64 = 1 << 26;

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
}

/// Where a hand-over can be read, as P told it and D received it.
#[derive(Debug, Clone, PartialEq, Hash)]
pub struct RemotePrefill {
    /// P's engine id.
    pub engine: EngineId,
    /// P's name for the request: a label.
    pub request: RequestId,
    /// Host of P's handshake listener: a name or an address literal.
    pub host: String,
    /// Port of P's handshake listener.
    pub port: u16,
    /// P's rank count, as the router claims it. A hint: the handshake decides.
    pub ranks: u32,
    /// Tokens whose KV the blocks hold, from the start of the prompt.
    pub tokens: u32,
    /// Tokens in one of P's blocks.
    pub block_tokens: u32,
    /// P's blocks by group; item `i` of a group holds the tokens from `i * block_tokens`.
    pub blocks: Vec<BlockList>,
    /// The life of P that granted the lease.
    pub incarnation: Incarnation,
    /// The lease that keeps the blocks; `None` if P pinned nothing.
    pub lease: Option<LeaseId>,
    /// Digest of the tokens, see [`token_digest`].
    pub token_digest: String,
    /// Keys that are not ours, unchanged.
    pub other: Map<String, Value>,
}

/// Parameters of one request.
#[derive(Debug, Clone, PartialEq, Hash)]
pub enum TransferParams {
    /// Router to P: compute the prompt, keep its blocks, say where they are.
    RemoteDecode {
        /// Keys that are not ours, unchanged.
        other: Map<String, Value>,
    },
    /// P to router to D: the prompt was computed elsewhere.
    RemotePrefill(Box<RemotePrefill>),
}

/// Names one offer beyond doubt: what P handed out, as P knows it and as D received it.
///
/// P's workers get it with the grant, D's workers send it with `ReadDone`. Parameters that were changed on the way,
/// to other blocks or to another prompt, give another digest, and their load is not confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OfferDigest([u64; 2]);

impl OfferDigest {
    /// Wraps bytes, for tests and codecs.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        let number = u128::from_be_bytes(bytes);
        Self([(number >> 64) as u64, number as u64])
    }
}

/// Digest of the first tokens of a prompt: SHA-256 over the ids as little-endian 32-bit numbers, its first 16
/// bytes in hexadecimal. Both sides compute it over the same number of tokens, so that a router that changed the
/// prompt on the way is noticed.
pub fn token_digest(tokens: &[u32]) -> String {
    let mut digest = Sha256::new();
    for token in tokens {
        digest.update(token.to_le_bytes());
    }
    hex(&digest.finalize()[..16])
}

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

impl TransferParams {
    /// Reads what came with a request. `Ok(None)` means that nothing is handed over: both flags are absent or
    /// false.
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
            (true, true) => Err(ParamsError::Contradiction {
                field: "do_remote_decode",
                value: "true".to_owned(),
                other: "do_remote_prefill",
                other_value: "true".to_owned(),
            }),
            (true, false) => Ok(Some(Self::RemoteDecode { other: fields.0 })),
            (false, true) => Ok(Some(Self::RemotePrefill(Box::new(RemotePrefill::take(fields)?)))),
        }
    }

    /// Writes the JSON that a router carries. `parse` of it gives the same value.
    pub fn to_json(&self) -> Value {
        match self {
            Self::RemoteDecode { other } => {
                let mut object = other.clone();
                object.insert("do_remote_decode".to_owned(), Value::Bool(true));
                object.insert("do_remote_prefill".to_owned(), Value::Bool(false));
                Value::Object(object)
            }
            Self::RemotePrefill(remote) => remote.to_json(),
        }
    }
}

impl RemotePrefill {
    fn take(mut fields: Fields) -> Result<Self, ParamsError> {
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
            incarnation,
            lease,
            token_digest: digest,
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
        for group in &self.blocks {
            if u64::from(group.len()) != block_count {
                return contradiction(
                    "remote_block_ids",
                    format!("{} blocks", group.len()),
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

    /// The lease with the life that granted it; `None` if P pinned nothing.
    pub fn lease_ref(&self) -> Option<LeaseRef> {
        self.lease.map(|lease| LeaseRef { incarnation: self.incarnation, lease })
    }

    /// The digest of this offer: SHA-256 over everything that says what the blocks hold and which they are, its
    /// first 16 bytes. Addresses and labels are left out; they only locate.
    pub fn digest(&self) -> OfferDigest {
        let mut digest = Sha256::new();
        digest.update(self.incarnation.get().to_le_bytes());
        digest.update(self.lease.map_or(0, |lease| lease.0).to_le_bytes());
        digest.update(self.tokens.to_le_bytes());
        digest.update(self.block_tokens.to_le_bytes());
        digest.update(self.token_digest.as_bytes());
        for group in &self.blocks {
            digest.update(group.len().to_le_bytes());
            for block in group.iter() {
                digest.update(block.0.to_le_bytes());
            }
        }
        let mut short = [0; 16];
        short.copy_from_slice(&digest.finalize()[..16]);
        OfferDigest::from_bytes(short)
    }

    /// Number of blocks handed over, per group.
    pub fn block_count(&self) -> u32 {
        self.blocks.first().map_or(0, BlockList::len)
    }

    fn to_json(&self) -> Value {
        let groups: Vec<Vec<u32>> = self.blocks.iter().map(|g| g.iter().map(|b| b.0).collect()).collect();
        let mut extra = json!({
            "version": EXTRA_VERSION,
            "tokens": self.tokens,
            "block_tokens": self.block_tokens,
            "blocks": self.block_count(),
            "token_digest": self.token_digest,
            "incarnation": self.incarnation.to_hex(),
        });
        if let Some(LeaseId(lease)) = self.lease {
            extra["lease"] = json!(lease);
        }
        let mut object = self.other.clone();
        for (key, value) in [
            ("do_remote_prefill", json!(true)),
            ("do_remote_decode", json!(false)),
            ("remote_engine_id", json!(self.engine.as_str())),
            ("remote_request_id", json!(self.request.as_str())),
            ("remote_host", json!(self.host)),
            ("remote_port", json!(self.port)),
            ("tp_size", json!(self.ranks)),
            ("remote_block_ids", json!(groups)),
            ("remote_num_tokens", json!(self.tokens)),
            (EXTRA_KEY, extra),
        ] {
            object.insert(key.to_owned(), value);
        }
        Value::Object(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> RemotePrefill {
        RemotePrefill {
            engine: EngineId::new("p-0").unwrap(),
            request: RequestId::new("cmpl, 1 ü").unwrap(),
            host: "127.0.0.1".to_owned(),
            port: 5600,
            ranks: 1,
            tokens: 40,
            block_tokens: 16,
            blocks: vec![[4, 5, 9].into_iter().map(BlockId).collect()],
            incarnation: Incarnation::from_random(7),
            lease: Some(LeaseId(3)),
            token_digest: token_digest(&[1, 2, 3]),
            other: Map::new(),
        }
    }

    /// What is changed in a sound value, and what the refusal says then.
    type Case = (fn(&mut Value), &'static str);

    fn refuse(change: impl FnOnce(&mut Value)) -> String {
        let mut value = TransferParams::RemotePrefill(Box::new(sample())).to_json();
        change(&mut value);
        TransferParams::parse(&value).unwrap_err().to_string()
    }

    #[test]
    fn what_is_written_is_read_again_and_unknown_keys_survive() {
        let mut remote = sample();
        remote.other.insert("transfer_mode".to_owned(), json!("pull"));
        let params = TransferParams::RemotePrefill(Box::new(remote));
        assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
        let ask =
            json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_host": null, "x": [1]});
        let Ok(Some(parsed)) = TransferParams::parse(&ask) else { panic!("refused") };
        assert_eq!(parsed.to_json(), ask);
    }

    #[test]
    fn requests_without_a_hand_over_are_plain() {
        for value in [json!(null), json!({}), json!({"do_remote_prefill": false, "x": 1})] {
            assert_eq!(TransferParams::parse(&value), Ok(None));
        }
    }

    #[test]
    fn a_flat_block_list_is_one_group() {
        let mut value = TransferParams::RemotePrefill(Box::new(sample())).to_json();
        value["remote_block_ids"] = json!([4, 5, 9]);
        let Ok(Some(TransferParams::RemotePrefill(remote))) = TransferParams::parse(&value) else {
            panic!("refused")
        };
        assert_eq!(remote.blocks, sample().blocks);
    }

    #[test]
    fn every_missing_key_is_named() {
        for key in [
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "tp_size",
            "remote_block_ids",
            "kv_connector",
        ] {
            let text = refuse(|v| drop(v.as_object_mut().unwrap().remove(key)));
            assert_eq!(text, format!("{key} is missing"));
        }
        for key in ["version", "tokens", "block_tokens", "blocks", "token_digest", "incarnation"] {
            let text = refuse(|v| drop(v[EXTRA_KEY].as_object_mut().unwrap().remove(key)));
            assert_eq!(text, format!("kv_connector.{key} is missing"));
        }
    }

    #[test]
    fn wrong_types_and_ranges_name_the_field_and_the_value() {
        let cases: [Case; 9] = [
            (|v| v["remote_port"] = json!("5600"), "remote_port must be a whole number, got \"5600\""),
            (|v| v["remote_port"] = json!(-1), "remote_port is -1; 1 to 65535 are allowed"),
            (|v| v["remote_port"] = json!(70000), "remote_port is 70000; 1 to 65535 are allowed"),
            (|v| v["remote_port"] = json!(1.5), "remote_port must be a whole number, got 1.5"),
            (|v| v["do_remote_prefill"] = json!("yes"), "do_remote_prefill must be a boolean, got \"yes\""),
            (
                |v| v["remote_block_ids"] = json!([[1, -2, 3]]),
                "remote_block_ids is -2; 0 to 4294967294 are allowed",
            ),
            (
                |v| v["remote_block_ids"] = json!({"a": 1}),
                "remote_block_ids must be a list of block ids, or one such list per group, got {\"a\":1}",
            ),
            (
                |v| v["remote_request_id"] = json!("x".repeat(10_240)),
                "remote_request_id: request_id is 10240 bytes long, at most 1024 are allowed",
            ),
            (
                |v| v[EXTRA_KEY]["incarnation"] = json!("xyz"),
                "kv_connector.incarnation must be 16 lower-case hexadecimal digits, got \"xyz\"",
            ),
        ];
        for (change, text) in cases {
            assert_eq!(refuse(change), text);
        }
        assert_eq!(
            TransferParams::parse(&json!([1])).unwrap_err().to_string(),
            "kv_transfer_params must be an object, got a list"
        );
    }

    #[test]
    fn contradictions_name_both_fields_and_both_values() {
        let cases: [Case; 6] = [
            (
                |v| v["do_remote_decode"] = json!(true),
                "do_remote_decode says true, but do_remote_prefill says true",
            ),
            (
                |v| v["remote_block_ids"] = json!([[4, 5]]),
                "remote_block_ids says 2 blocks, but kv_connector.blocks says 3",
            ),
            (
                |v| v["remote_block_ids"] = json!([]),
                "remote_block_ids says no group, but kv_connector.blocks says 3",
            ),
            (
                |v| v[EXTRA_KEY]["tokens"] = json!(49),
                "remote_num_tokens says 40, but kv_connector.tokens says 49",
            ),
            (
                |v| {
                    v[EXTRA_KEY]["tokens"] = json!(49);
                    v["remote_num_tokens"] = json!(49);
                },
                "kv_connector.tokens says 49 (in 4 blocks of 16), but kv_connector.blocks says 3",
            ),
            (
                |v| drop(v[EXTRA_KEY].as_object_mut().unwrap().remove("lease")),
                "kv_connector.lease says none, but kv_connector.blocks says 3",
            ),
        ];
        for (change, text) in cases {
            assert_eq!(refuse(change), text);
        }
    }

    #[test]
    fn an_offer_that_was_changed_on_the_way_has_another_digest() {
        let ours = sample().digest();
        assert_eq!(sample().digest(), ours);
        let changed = [
            RemotePrefill { blocks: vec![[4, 5, 8].into_iter().map(BlockId).collect()], ..sample() },
            RemotePrefill { blocks: vec![[5, 4, 9].into_iter().map(BlockId).collect()], ..sample() },
            RemotePrefill { token_digest: token_digest(&[1, 2, 4]), ..sample() },
            RemotePrefill { lease: Some(LeaseId(4)), ..sample() },
            RemotePrefill { incarnation: Incarnation::from_random(8), ..sample() },
            RemotePrefill { tokens: 41, ..sample() },
        ];
        for other in changed {
            assert_ne!(other.digest(), ours, "{other:?}");
        }
        let elsewhere = RemotePrefill { host: "elsewhere".to_owned(), port: 1, ..sample() };
        assert_eq!(elsewhere.digest(), ours, "where P is found is not what it offers");
    }

    #[test]
    fn nothing_pinned_is_a_normal_case() {
        let remote = RemotePrefill { tokens: 0, blocks: vec![BlockList::default()], lease: None, ..sample() };
        let params = TransferParams::RemotePrefill(Box::new(remote));
        assert_eq!(TransferParams::parse(&params.to_json()), Ok(Some(params)));
    }

    #[test]
    fn the_digest_sees_every_token() {
        assert_ne!(token_digest(&[1, 2]), token_digest(&[2, 1]));
        assert_ne!(token_digest(&[1]), token_digest(&[1, 0]));
        assert_eq!(token_digest(&[]).len(), 32);
    }
}
