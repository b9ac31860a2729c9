//! `kvx plan` end to end: what it says of engines that fit, of such that do not, and of files that cannot be used.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use std::path::Path;

use common::run as kvx;
use serde_json::{Value, json};

/// Shape files with what differs from a plain one: P as TOML is made by others, here both are JSON.
struct Files(tempfile::TempDir);

impl Files {
    fn of(p: Value, d: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, change) in [("p.json", p), ("d.json", d)] {
            let mut shape =
                json!({ "layers": 4, "heads": 8, "head_size": 16, "dtype": "bf16", "block_tokens": 16 });
            for (key, value) in change.as_object().unwrap() {
                shape[key] = value.clone();
            }
            std::fs::write(folder.path().join(name), shape.to_string()).unwrap();
        }
        Self(folder)
    }

    fn plan(&self, more: &[&str]) -> (i32, String, String) {
        let path = |name: &str| self.0.path().join(name).display().to_string();
        kvx(&[&["plan", &path("p.json"), &path("d.json")], more].concat())
    }

    fn json(&self, more: &[&str]) -> (i32, Value) {
        let (code, out, err) = self.plan(&[more, &["--json"]].concat());
        let last = out.lines().last().unwrap_or_else(|| panic!("nothing said: {err}"));
        (code, serde_json::from_str(last).unwrap())
    }
}

fn example(folder: &Path) -> (i32, String, String) {
    kvx(&["plan", "--example", &folder.display().to_string()])
}

#[test]
fn the_example_is_written_once_and_fits() {
    let folder = tempfile::tempdir().unwrap();
    let (code, out, err) = example(folder.path());
    assert_eq!(code, 0, "{err}");
    assert_eq!(out.lines().count(), 2, "{out}");
    let (code, _, err) = example(folder.path());
    assert_eq!(code, 2, "what is there already is left alone");
    assert!(err.contains("prefill.toml"), "{err}");

    let path = |name: &str| folder.path().join(name).display().to_string();
    let (code, out, err) = kvx(&["plan", &path("prefill.toml"), &path("decode.toml")]);
    assert_eq!(code, 0, "{err}");
    let expected = [
        "D0   ◄─┬─ P0   layers 0-31, heads 0-1",
        "       └─ P1   layers 0-31, heads 2-3",
        "D1   ◄─┬─ P2   layers 0-31, heads 4-5",
        "       └─ P3   layers 0-31, heads 6-7",
        "P3   waits for one ending, from D 1",
        "checksums cannot be compared: blocks differ",
    ];
    for line in expected {
        assert!(out.lines().any(|l| l == line), "{line:?} is not in\n{out}");
    }
    assert!(!out.contains('\u{1b}'), "colours only on a terminal");
}

#[test]
fn the_json_has_exactly_the_promised_fields() {
    let (code, all) = Files::of(json!({ "ranks": 2 }), json!({ "ranks": 4 })).json(&["--tokens", "40"]);
    assert_eq!(code, 0, "{all}");
    assert_eq!((&all["fits"], &all["tokens"]), (&json!(true), &json!(40)));
    // Two heads of four layers, keys and values, 16 elements of two bytes.
    let token = 2 * 4 * 2 * 16 * 2;
    let sample = json!({ "bytes": 48 * token, "pieces": 3 * 8, "ranges": 3 * 8, "ranges_scattered": 3 * 8 });
    let mut reader = json!({
        "rank": 3,
        "sources": [{
            "rank": 1,
            "reads": [{ "group": 0, "kind": "full attention", "layers": [0, 1, 2, 3], "heads": [6, 7] }],
        }],
        "silent": [],
        "bytes_per_token": token,
        "bytes_per_block": 16 * token,
        "state_bytes": 0,
        "covered": true,
        "identical": false,
    });
    for (key, value) in sample.as_object().unwrap() {
        reader[key] = value.clone();
        reader["sources"][0][key] = value.clone();
    }
    assert_eq!(all["consumer"][3], reader);
    assert_eq!(all["producer"], json!([{ "rank": 0, "readers": [0, 1] }, { "rank": 1, "readers": [2, 3] }]));
}

#[test]
fn neighbours_are_joined_and_alike_blocks_are_noticed() {
    let (code, all) = Files::of(json!({}), json!({})).json(&["--tokens", "160"]);
    assert_eq!(code, 0);
    let reader = &all["consumer"][0];
    let counts = ["pieces", "ranges", "ranges_scattered"].map(|key| reader[key].as_u64().unwrap());
    assert_eq!(counts, [80, 8, 80], "keys and values of four layers, ten blocks");
    assert_eq!(reader["identical"], true);
    // All layers of a block in one row: a block is one piece.
    let packed = json!({ "outermost": "block" });
    let (_, all) = Files::of(packed.clone(), packed).json(&["--tokens", "160"]);
    let reader = &all["consumer"][0];
    assert_eq!((&reader["pieces"], &reader["ranges"]), (&json!(10), &json!(1)));
}

#[test]
fn ranks_without_use_are_only_told() {
    let mla = json!({ "mla": true, "heads": 1, "ranks": 4 });
    let files = Files::of(mla, json!({ "mla": true, "heads": 1, "ranks": 2 }));
    let (code, out, err) = files.plan(&[]);
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("D1   ◄─┬─ P2   layers 0-3, heads 0\n       └─ P3   nothing to read: only told\n"),
        "{out}"
    );
    let (_, all) = files.json(&[]);
    assert_eq!(all["consumer"][1]["silent"], json!([3]));
}

#[test]
fn groups_stages_and_tokens_that_are_dealt_out_are_shown() {
    let groups = json!({
        "groups": [
            { "kind": "full", "layers": "0,2" },
            { "kind": "state", "layers": "1,3", "parts": 8, "part_size": 64 },
        ],
    });
    let mut staged = groups.clone();
    (staged["stages"], staged["ranks"]) = (json!(2), json!(4));
    let (code, out, err) = Files::of(staged, groups).plan(&[]);
    assert_eq!(code, 0, "{err}{out}");
    for line in [
        "P0   full attention: layers 0, heads 0-3; state: layers 1, parts 0-3",
        "P3   full attention: layers 2",
    ] {
        assert!(out.contains(line), "{line:?} is not in\n{out}");
    }
    let latent =
        |ranks: u32, context: u32| json!({ "mla": true, "heads": 1, "ranks": ranks, "context": context });
    let (_, all) = Files::of(latent(4, 4), latent(2, 2)).json(&[]);
    let sources: Vec<&Value> = all["consumer"].as_array().unwrap().iter().map(|r| &r["sources"]).collect();
    assert_eq!((&sources[1][0]["rank"], &sources[1][1]["rank"]), (&json!(1), &json!(3)), "{all}");
    assert!(all["consumer"].as_array().unwrap().iter().all(|r| r["covered"] == true), "{all}");
    // The last blocks are read whole by those who have a part in them.
    assert_eq!(sources[0].as_array().unwrap().len(), 2);
}

#[test]
fn what_does_not_fit_is_refused_in_a_sentence() {
    let files = Files::of(json!({ "dtype": "f8_e4m3" }), json!({}));
    let (code, out, _) = files.plan(&[]);
    assert_eq!(code, 1);
    let sentence = "layer layers.0: dtype ours bf16, theirs f8_e4m3; elements are not converted";
    assert_eq!(out, format!("refused   D0 cannot read from P: {sentence}\n"));
    let (code, object) = files.json(&[]);
    assert_eq!(code, 1);
    assert_eq!(object, json!({ "fits": false, "rank": 0, "error": sentence }));
    let window = json!({ "groups": [{ "kind": "window", "window": 64, "layers": "0-3" }] });
    let (code, out, _) = Files::of(window, json!({})).plan(&[]);
    assert_eq!(code, 1);
    assert!(out.contains("its blocks hold full attention here, window of 64 tokens there"), "{out}");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let bad = |change: Value| {
        let (code, out, err) = Files::of(json!({}), change).plan(&[]);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains("d.json"), "{err}");
        err
    };
    for (change, words) in [
        (
            json!({ "ranks": 3 }),
            "8 heads cannot be shared out over 3 ranks of a stage; one of the two must divide the other",
        ),
        (json!({ "ranks": 4, "stages": 3 }), "4 ranks cannot be shared out over 3 pipeline stages"),
        (json!({ "kernel_tokens": 5 }), "a block of 16 tokens is no whole number of kernel blocks of 5"),
        (json!({ "block_tokens": 0 }), "block_tokens is 0; 1 to 1024 are allowed"),
        (json!({ "layer": 3 }), "unknown field `layer`"),
        (json!({ "dtype": "int7" }), "unknown variant `int7`"),
        (
            json!({ "layers_per_stage": [3] }),
            "layers_per_stage has 1 stages and 3 layers; there are 1 stages and 4 layers",
        ),
        (json!({ "groups": [{ "kind": "full", "layers": "0-2" }] }), "layer 3 is in no group"),
        (json!({ "groups": [{ "kind": "full", "layers": "0-4" }] }), "group 0 has layer 4; there are 4"),
        (json!({ "groups": [{ "kind": "window", "layers": "0-3" }] }), "group 0: window is missing"),
        (json!({ "mla": true }), "heads is 8; a model with mla has 1"),
    ] {
        let said = bad(change);
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    let (code, _, err) = kvx(&["plan", "/nowhere/p.toml", "/nowhere/d.toml"]);
    assert_eq!(code, 2);
    assert!(err.contains("/nowhere/p.toml"), "{err}");
    let (code, _, err) = kvx(&["plan"]);
    assert_eq!(code, 2, "{err}");
}

#[test]
fn the_help_says_what_it_is_for() {
    let (code, out, _) = kvx(&["plan", "--help"]);
    assert_eq!(code, 0);
    for word in ["shape files", "--example", "--tokens", "--json", "exit code"] {
        assert!(out.contains(word), "{word}: {out}");
    }
}
