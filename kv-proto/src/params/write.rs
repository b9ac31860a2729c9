//! Parameters as JSON.

use serde_json::{Value, json};

use super::{ALTERNATIVES_KEY, EXTRA_KEY, EXTRA_VERSION, RemotePrefill, TransferParams};
use crate::ids::LeaseId;

impl TransferParams {
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
            Self::Relay(remote) => {
                let mut value = remote.to_json();
                value["do_remote_decode"] = Value::Bool(true);
                value
            }
        }
    }
}

impl RemotePrefill {
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
        if self.firsts.iter().any(|first| *first > 0) {
            extra["firsts"] = json!(self.firsts);
        }
        if self.marks.every > 0 {
            let digests: Vec<String> = self.marks.digests.iter().map(|d| format!("{d:032x}")).collect();
            extra["marks"] = json!({"every": self.marks.every, "digests": digests});
        }
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
        if !self.alternatives.is_empty() {
            let others = self.alternatives.iter().map(Self::to_json).collect();
            object.insert(ALTERNATIVES_KEY.to_owned(), Value::Array(others));
        }
        Value::Object(object)
    }
}
