//! What the documents promise is tested: every rule of the protocol has a test that cites it, every promise a canary,
//! and every entry of the field reports names tests that exist.
//!
//! A test cites a rule in its name (`h18_…`) or in the comment directly above its attributes (`// H-18, R029`).
#![allow(clippy::unwrap_used, clippy::panic)] // A failed check is a failed test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// Rules that have no test yet, each with its reason.
const NOT_YET: &[(u32, &str)] = &[];

/// Promises that no canary names, each with the reason why it is watched all the same.
const WITHOUT_CANARY: &[(u32, &str)] = &[];

const PROMISES: RangeInclusive<u32> = 1..=8;
const TRANSPORT_RULES: RangeInclusive<u32> = 1..=12;
const REPORTS: RangeInclusive<u32> = 1..=115;

/// Kinds of field reports of which every entry must be in the document.
const COVERED: &[(&str, RangeInclusive<u32>)] = &[
    ("producer side", 1..=11),
    ("consumer side", 12..=18),
    ("memory reused in flight", 19..=25),
    ("notices", 26..=30),
    ("peer failure and restart", 31..=37),
    ("preemption, chunked prefill and asynchronous scheduling", 67..=72),
    ("deadlock and capacity", 73..=78),
    ("identity", 79..=84),
    ("operations", 107..=111),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Every Rust source of the workspace but this one, which plants wrong citations.
fn sources() -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                walk(&path, found);
            } else if name.ends_with(".rs") && path != root().join(file!()) {
                found.push(path);
            }
        }
    }
    let mut files = Vec::new();
    walk(root(), &mut files);
    let shown = |path: &Path| path.strip_prefix(root()).unwrap().display().to_string();
    files.iter().map(|path| (shown(path), fs::read_to_string(path).unwrap())).collect()
}

/// The numbers that follow a prefix at the beginning of a word: of `H-3, SSH-2` those after `H-` are 3.
fn numbers(prefix: &str, text: &str) -> BTreeSet<u32> {
    let follows = |(at, _): (usize, &str)| {
        let inside = text[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_');
        let rest = &text[at + prefix.len()..];
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        if inside { None } else { rest[..end].parse().ok() }
    };
    text.match_indices(prefix).filter_map(follows).collect()
}

/// What a test's name cites: of `r026_r028_ends_are_counted` that is (r, 26) and (r, 28).
fn cited_by_name(name: &str) -> Vec<(char, u32)> {
    let citation = |part: &str| {
        let kind = part.chars().next().filter(|kind| "hprt".contains(*kind))?;
        Some((kind, part[1..].parse().ok()?))
    };
    name.split('_').map_while(citation).collect()
}

/// A test function, and the rules that it cites.
#[derive(Debug, PartialEq)]
struct Test {
    name: String,
    rules: BTreeSet<u32>,
}

fn tests_of(source: &str) -> Vec<Test> {
    let mut found = Vec::new();
    let (mut above, mut is_test) = (String::new(), false);
    for line in source.lines().map(str::trim) {
        if line.starts_with("//") {
            above.push_str(line);
            above.push('\n');
        } else if line.starts_with("#[") {
            is_test |= line == "#[test]" || line.starts_with("#[tokio::test");
        } else if let (true, Some((_, rest))) = (is_test, line.split_once("fn ")) {
            let name = rest.split('(').next().unwrap_or(rest).to_owned();
            let mut rules = numbers("H-", &above);
            rules.extend(cited_by_name(&name).into_iter().filter(|(kind, _)| *kind == 'h').map(|(_, n)| n));
            found.push(Test { name, rules });
            (above, is_test) = (String::new(), false);
        } else if !is_test {
            above.clear();
        }
    }
    found
}

/// The rules of the protocol: lines that begin with `- **H-n**`.
fn rules_of(document: &str) -> BTreeSet<u32> {
    let number = |line: &str| line.strip_prefix("- **H-")?.split_once("** ")?.0.parse().ok();
    document.lines().filter_map(number).collect()
}

fn rules() -> BTreeSet<u32> {
    rules_of(&read("docs/protocol.md"))
}

/// The canaries with the first line of their documentation.
fn canaries_of(source: &str) -> Vec<(String, String)> {
    let (_, body) = source.split_once("pub enum Canary {").unwrap();
    let (body, _) = body.split_once("\n}").unwrap();
    let mut found = Vec::new();
    let mut first = None;
    for line in body.lines().map(str::trim) {
        match line.strip_prefix("/// ") {
            Some(text) => drop(first.get_or_insert(text.to_owned())),
            None if line.ends_with(',') => {
                found.push((line.trim_end_matches(',').to_owned(), first.take().unwrap_or_default()));
            }
            None => {}
        }
    }
    found
}

/// What the document of field reports says wrongly, given the rules and the tests that there are.
fn faults_of(document: &str, rules: &BTreeSet<u32>, tests: &BTreeSet<String>) -> Vec<String> {
    let mut faults = Vec::new();
    let mut seen = BTreeSet::new();
    for row in document.lines().filter(|line| line.starts_with("| R")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [entry, _, cited, shown] = cells[..] else {
            faults.push(format!("not four cells: {row}"));
            continue;
        };
        let number = entry.strip_prefix('R').filter(|n| n.len() == 3).and_then(|n| n.parse().ok());
        match number.filter(|n| REPORTS.contains(n)) {
            Some(number) if seen.insert(number) => {}
            Some(_) => faults.push(format!("{entry} comes twice")),
            None => faults.push(format!("{entry} is no entry")),
        }
        faults.extend(numbers("H-", cited).difference(rules).map(|n| format!("{entry}: there is no H-{n}")));
        let named: Vec<&str> = shown.split('`').skip(1).step_by(2).collect();
        let unknown = named.iter().filter(|name| !tests.contains(**name));
        faults.extend(unknown.map(|name| format!("{entry}: there is no test {name}")));
        if named.is_empty() && !shown.starts_with("cannot arise: ") && !shown.starts_with("not yet: ") {
            faults.push(format!("{entry}: neither a test nor a reason: {shown:?}"));
        }
    }
    for (kind, numbers) in COVERED {
        let missing = numbers.clone().filter(|n| !seen.contains(n));
        faults.extend(missing.map(|n| format!("R{n:03} is missing ({kind})")));
    }
    faults
}

#[test]
fn every_rule_is_cited_by_a_test() {
    let mut cited: BTreeMap<u32, usize> = BTreeMap::new();
    let mut count = 0;
    for test in sources().iter().flat_map(|(_, source)| tests_of(source)) {
        count += 1;
        test.rules.iter().for_each(|rule| *cited.entry(*rule).or_default() += 1);
    }
    assert!(count > 300, "only {count} tests were found");
    let rules = rules();
    let excused: BTreeSet<u32> = NOT_YET.iter().map(|(rule, _)| *rule).collect();
    let silent: Vec<_> = rules.iter().filter(|r| !cited.contains_key(r) && !excused.contains(r)).collect();
    assert!(silent.is_empty(), "no test cites H-{silent:?}");
    let idle: Vec<_> = excused.iter().filter(|r| cited.contains_key(r) || !rules.contains(r)).collect();
    assert!(idle.is_empty(), "needs no excuse: H-{idle:?}");
}

#[test]
fn what_is_cited_exists() {
    let rules = rules();
    for (file, source) in sources() {
        let unknown: Vec<_> = numbers("H-", &source).difference(&rules).copied().collect();
        assert!(unknown.is_empty(), "{file} cites H-{unknown:?}, which does not exist");
        for test in tests_of(&source) {
            for (kind, number) in cited_by_name(&test.name) {
                let exists = match kind {
                    'h' => rules.contains(&number),
                    'p' => PROMISES.contains(&number),
                    't' => TRANSPORT_RULES.contains(&number),
                    _ => REPORTS.contains(&number),
                };
                assert!(exists, "{file}: {} cites {kind}{number}, which does not exist", test.name);
            }
        }
    }
}

#[test]
fn every_promise_has_a_canary() {
    let canaries = canaries_of(&read("kv-testkit/src/sim/canary.rs"));
    assert!(canaries.len() >= 15, "{canaries:?}");
    let mut promises = BTreeSet::new();
    for (name, text) in &canaries {
        let (breaks, _) = text.split_once(": ").unwrap_or_default();
        let number = |prefix| breaks.strip_prefix(prefix).and_then(|n: &str| n.parse::<u32>().ok());
        let exists = match (number("P"), number("T-"), number("H-")) {
            (Some(promise), ..) => promises.insert(promise) || PROMISES.contains(&promise),
            (_, Some(rule), _) => TRANSPORT_RULES.contains(&rule),
            (.., Some(rule)) => rules().contains(&rule),
            _ => false,
        };
        assert!(exists, "canary {name} does not say what it breaks: {text:?}");
    }
    for promise in PROMISES {
        let excused = WITHOUT_CANARY.iter().any(|(excused, _)| *excused == promise);
        assert_ne!(promises.contains(&promise), excused, "P{promise}: a canary or an excuse, and not both");
    }
}

#[test]
fn field_reports_name_tests_and_rules_that_exist() {
    let sources = sources();
    let tests = sources.iter().flat_map(|(_, source)| tests_of(source)).map(|test| test.name).collect();
    let faults = faults_of(&read("docs/field-reports.md"), &rules(), &tests);
    assert!(faults.is_empty(), "docs/field-reports.md:\n{}", faults.join("\n"));
}

#[test]
fn the_checks_see_what_they_are_for() {
    assert_eq!(numbers("H-", "H-3, (H-18) SSH-2.0 xH-4 H-x"), [3, 18].into());
    assert_eq!(cited_by_name("r026_p2_p3x_h4_late"), [('r', 26), ('p', 2)]);
    assert_eq!(rules_of("- **H-1** One.\n  H-2 within.\n- **H-3**\n- **H-4** Four."), [1, 4].into());

    let source = "// H-9\nlet x = 1;\n// H-7, R015\n#[test]\n#[ignore]\nfn one() {}\n// H-8\nfn no_test() {}\n\
                  /// H-5\n#[tokio::test]\nasync fn h6_two() {}\n// H-1\n\n#[test]\nfn three() {}";
    let test = |name: &str, rules: &[u32]| Test { name: name.into(), rules: rules.iter().copied().collect() };
    assert_eq!(tests_of(source), [test("one", &[7]), test("h6_two", &[5, 6]), test("three", &[])]);

    let canary = "pub enum Canary {\n    /// P1: first.\n    /// More.\n    One,\n    Two,\n}\n";
    assert_eq!(canaries_of(canary), [("One".into(), "P1: first.".into()), ("Two".into(), String::new())]);

    let row = |n: u32| format!("| R{n:03} | text | H-1 | `a_test`; not yet: more |");
    let all: Vec<String> = COVERED.iter().flat_map(|(_, numbers)| numbers.clone()).map(row).collect();
    let faults = |more: &str, all: &[String]| {
        faults_of(&format!("{}\n{more}", all.join("\n")), &[1].into(), &["a_test".to_owned()].into())
    };
    assert!(faults("", &all).is_empty());
    assert_eq!(faults("", &all[1..]), ["R001 is missing (producer side)"]);
    for (planted, fault) in [
        ("| R050 | text | – | `no_test` |", "R050: there is no test no_test"),
        ("| R050 | text | H-2 | `a_test` |", "R050: there is no H-2"),
        ("| R050 | text | H-1 | sure |", "R050: neither a test nor a reason: \"sure\""),
        ("| R116 | text | H-1 | `a_test` |", "R116 is no entry"),
        ("| R1 | text | H-1 | `a_test` |", "R1 is no entry"),
        ("| R001 | text | H-1 | `a_test` |", "R001 comes twice"),
        ("| R050 | text | `a_test` |", "not four cells: | R050 | text | `a_test` |"),
    ] {
        assert_eq!(faults(planted, &all), [fault]);
    }
}
