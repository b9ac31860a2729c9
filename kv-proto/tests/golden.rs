//! Committed bytes of everything that crosses a process boundary. `KV_UPDATE_GOLDEN=1` writes them anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Tests fail by panicking.
#![allow(dead_code, reason = "the shared module serves several test binaries")]

mod common;

use std::collections::BTreeSet;
use std::fmt::{Debug, Write as _};
use std::fs;
use std::path::PathBuf;

use common::{LIFE, REFUSALS, engine, engine_card, fingerprint, refused};
use kv_proto::handshake::{Answer, HandshakeError, Query, WorkerCard};
use kv_proto::message::WorkerMessage;
use kv_proto::{Plan, Report, TransferParams};

const ADVICE: &str = "A byte that changes on the wire is a decision about the protocol's version: peers of the old \
                      form are in use. Either undo the change, or raise PROTOCOL_VERSION (a field that old readers \
                      may ignore and whose absence means what held before needs no new version) and run the test \
                      again with KV_UPDATE_GOLDEN=1.";

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join("golden")
}

fn to_hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(32) {
        for byte in line {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    assert_eq!(digits.len() % 2, 0, "half a byte");
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Compares what is written now with what was committed, and collects what differs.
struct Golden {
    update: bool,
    seen: BTreeSet<String>,
    differing: Vec<String>,
}

impl Golden {
    fn new() -> Self {
        let update = std::env::var_os("KV_UPDATE_GOLDEN").is_some_and(|v| v == "1");
        Self { update, seen: BTreeSet::new(), differing: Vec::new() }
    }

    /// The committed text of a file, which must be `now`.
    fn text(&mut self, file: String, now: &str) -> String {
        let path = folder().join(&file);
        if self.update {
            fs::create_dir_all(folder()).unwrap();
            fs::write(&path, now).unwrap();
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        if committed != now {
            self.differing.push(format!("{file}: committed\n{committed}now\n{now}"));
        }
        assert!(self.seen.insert(file), "two values have one name");
        committed
    }

    /// Checks both directions: a value gives the committed bytes, and those give the value.
    fn bytes<T: PartialEq + Debug, E: Debug>(
        &mut self,
        name: &str,
        value: &T,
        encoded: Result<Vec<u8>, E>,
        decode: impl Fn(&[u8]) -> T,
    ) {
        let committed = self.text(format!("{name}.hex"), &to_hex(&encoded.unwrap()));
        // What is not there was told already.
        if !committed.is_empty() {
            assert_eq!(
                decode(&from_hex(&committed)),
                *value,
                "{name}: the committed bytes mean something else now"
            );
        }
    }

    fn params(&mut self, name: &str, params: &TransferParams) {
        let now = serde_json::to_string_pretty(&params.to_json()).unwrap() + "\n";
        let committed = self.text(format!("{name}.json"), &now);
        if !committed.is_empty() {
            let value = serde_json::from_str(&committed).unwrap();
            assert_eq!(TransferParams::parse(&value).as_ref(), Ok(&Some(params.clone())), "{name}");
        }
    }

    fn finish(self) {
        assert!(self.differing.is_empty(), "{}\n\n{ADVICE}", self.differing.join("\n"));
        let there: BTreeSet<String> = fs::read_dir(folder())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(there, self.seen, "files that no value has");
    }
}

#[test]
fn everything_on_the_wire_is_as_committed() {
    let mut golden = Golden::new();
    for (name, message) in common::messages() {
        let name = format!("message_{name}");
        golden.bytes(&name, &message, message.encode(), |b| WorkerMessage::decode(b).unwrap());
    }
    let plan = common::plan();
    golden.bytes("plan", &plan, plan.encode(), |b| Plan::decode(b).unwrap());
    let report = common::report();
    golden.bytes("report", &report, report.encode(), |b| Report::decode(b).unwrap());
    let card = common::worker_card(0);
    golden.bytes("worker_card", &card, card.encode(), |b| WorkerCard::decode(b).unwrap());

    let query = (common::query(), Some(fingerprint()));
    golden.bytes("query", &query, query.0.encode(&fingerprint()), |b| Query::decode(b).unwrap());
    let read = |bytes: &[u8]| Answer::decode(bytes, &fingerprint(), &engine("p-0"), LIFE);
    let accepted = Answer::Accepted(engine_card()).encode(Some(&fingerprint()));
    golden.bytes("answer_accepted", &Ok(engine_card()), accepted, read);
    for code in REFUSALS {
        let Answer::Refused { message, .. } = refused(code) else { unreachable!() };
        let expected = Err(HandshakeError::Refused { code, message });
        let name = format!("answer_refused_{code:?}").to_lowercase();
        golden.bytes(&name, &expected, refused(code).encode(Some(&fingerprint())), read);
    }

    golden.params("params_remote_decode", &common::remote_decode());
    golden
        .params("params_remote_prefill", &TransferParams::RemotePrefill(Box::new(common::remote_prefill())));
    golden.finish();
}
