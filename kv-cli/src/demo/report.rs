//! What the demonstration found, as a table for people and an object for programs.

use std::collections::BTreeMap;
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Color, ContentArrangement, Table};
use serde_json::{Value, json};

use clap::ValueEnum;
use kv_connector::recovery::Policy;
use kv_testkit::engine::cache_layout::CacheLayout;

use super::args::{AbortMode, FaultMode, Shape, Shapes};
use super::client::{Ending, Seen, Wish};
use super::staging;
use crate::serve::KindArg;

/// What an engine's error says of a load that failed.
const LOAD_FAILED: &str = "could not be loaded";

fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

impl Shape {
    fn json(&self) -> Value {
        json!({ "ranks": self.ranks, "layout": self.layout.to_string(), "block_tokens": self.block_tokens })
    }

    fn text(&self) -> String {
        let ranks = if self.ranks == 1 { "rank" } else { "ranks" };
        format!("{} {ranks}, {}, blocks of {} tokens", self.ranks, self.layout, self.block_tokens)
    }
}

impl Shapes {
    /// What they are if nobody asks for anything else.
    fn usual() -> Self {
        let one = Shape { ranks: 1, layout: CacheLayout::default(), block_tokens: 16 };
        Self { producer: one, consumer: one, tiny: Some((KindArg::Gqa, 4)) }
    }

    fn json(&self) -> Value {
        let (kind, heads) = self.tiny.unzip();
        json!({
            "producer": self.producer.json(),
            "consumer": self.consumer.json(),
            "model_kind": kind.as_ref().map(name_of),
            "kv_heads": heads,
        })
    }

    /// One line, if they are not the usual ones.
    fn line(&self) -> Option<String> {
        let usual = Self::usual();
        if (self.producer, self.consumer) == (usual.producer, usual.consumer)
            && (self.tiny.is_none() || self.tiny == usual.tiny)
        {
            return None;
        }
        let model = self.tiny.map_or_else(String::new, |(kind, heads)| {
            format!("; {} model of {heads} KV heads", name_of(&kind))
        });
        Some(format!("shapes    P: {}; D: {}{model}", self.producer.text(), self.consumer.text()))
    }
}

/// One request beside its reference.
pub(crate) struct Row {
    pub(crate) wish: Wish,
    pub(crate) reference: Option<Vec<u32>>,
    pub(crate) seen: Seen,
}

/// The engines' figures after everything has settled.
pub(crate) struct Figures {
    /// `None` if P was killed for good.
    pub(crate) producer: Option<Value>,
    pub(crate) consumer: Value,
    /// What decode engines said before they were killed.
    pub(crate) former: Vec<Value>,
    /// Processes that ended and should not have.
    pub(crate) ended: Vec<&'static str>,
}

impl Figures {
    fn producer(&self) -> &Value {
        self.producer.as_ref().unwrap_or(&Value::Null)
    }

    /// Sums a figure over the lives of D.
    fn sum(&self, pointer: &str) -> u64 {
        let of = |figures: &Value| figures.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
        self.former.iter().chain([&self.consumer]).map(of).sum()
    }

    /// Why loads failed, over the lives of D.
    fn reasons(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for figures in self.former.iter().chain([&self.consumer]) {
            for (name, count) in figures["connector"]["loads"]["failed"].as_object().into_iter().flatten() {
                *all.entry(name.clone()).or_default() += count.as_u64().unwrap_or(0);
            }
        }
        all
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Judgement {
    Equal,
    Wrong,
    Aborted,
    NotPrefilled,
    Error,
    Hung,
}

impl Row {
    fn judge(&self) -> Judgement {
        match (&self.seen.ending, &self.reference) {
            (Ending::Answered { tokens, .. }, Some(reference)) if tokens == reference => Judgement::Equal,
            (Ending::Answered { .. }, _) => Judgement::Wrong,
            (Ending::Aborted, _) => Judgement::Aborted,
            (Ending::NotPrefilled(_), _) => Judgement::NotPrefilled,
            (Ending::Error(_), _) => Judgement::Error,
            (Ending::Hung, _) => Judgement::Hung,
        }
    }

    fn figure(&self, pointer: &str) -> u64 {
        match &self.seen.ending {
            Ending::Answered { usage, .. } => usage.pointer(pointer).and_then(Value::as_u64).unwrap_or(0),
            _ => 0,
        }
    }
}

/// The whole outcome.
pub(crate) struct Outcome {
    rows: Vec<Row>,
    figures: Figures,
    fault: FaultMode,
    policy: Policy,
    shapes: Shapes,
}

fn milliseconds(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e5).round() / 100.0
}

/// The value below which the given share of a sorted list lies.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get(((last as f64) * share).round() as usize).copied()
}

impl Outcome {
    pub(crate) fn new(
        rows: Vec<Row>,
        figures: Figures,
        fault: FaultMode,
        policy: Policy,
        shapes: Shapes,
    ) -> Self {
        Self { rows, figures, fault, policy, shapes }
    }

    fn count(&self, judgement: Judgement) -> usize {
        self.rows.iter().filter(|row| row.judge() == judgement).count()
    }

    fn sum(&self, pointer: &str) -> u64 {
        self.rows.iter().map(|row| row.figure(pointer)).sum()
    }

    /// Requests that P answered and nobody aborted.
    fn requests(&self) -> usize {
        self.rows.len() - self.count(Judgement::Aborted) - self.count(Judgement::NotPrefilled)
    }

    fn held(figures: &Value) -> u64 {
        // An engine that no longer tells holds everything for all we know.
        figures["blocks_held"].as_u64().unwrap_or(u64::MAX)
    }

    /// What host pools hold in the end.
    fn staged_in_the_end(&self) -> [u64; 2] {
        [self.figures.producer.as_ref().map_or(0, staging::held), staging::held(&self.figures.consumer)]
    }

    /// Blocks held in the end. An engine that was killed for good holds nothing.
    fn held_in_the_end(&self) -> [u64; 2] {
        [self.figures.producer.as_ref().map_or(0, Self::held), Self::held(&self.figures.consumer)]
    }

    /// Whether every answer equals its reference and nothing is held. Under a fault requests that P never answered do
    /// not count, and with the policy `fail` a request may end with the error that says that its load failed.
    pub(crate) fn is_good(&self) -> bool {
        // Answers that were all computed here would be equal too, and show nothing.
        let handed_over = self.sum("/prompt_tokens_details/external_tokens") > 0;
        let faulty = self.fault != FaultMode::None;
        let clean = if faulty && self.policy == Policy::Fail { self.clean_errors() } else { 0 };
        let p_may_die = matches!(self.fault, FaultMode::KillPrefill | FaultMode::Mixed);
        handed_over
            && self.requests() > 0
            && self.count(Judgement::Equal) + clean == self.requests()
            && (p_may_die || self.count(Judgement::NotPrefilled) == 0)
            && (faulty || !self.has_turns() || self.read_back() > 0)
            && if faulty { self.has_struck() } else { self.is_calm() }
            && self.figures.ended.is_empty()
            && self.held_in_the_end() == [0, 0]
            && self.staged_in_the_end() == [0, 0]
    }

    /// Whether conversations were to have more than one turn.
    fn has_turns(&self) -> bool {
        self.rows.iter().any(|row| !row.wish.more.is_empty() || !row.wish.since.is_empty())
    }

    /// Tokens that P has read back from D, in its last life.
    fn read_back(&self) -> u64 {
        self.figures.producer()["connector"]["loads"]["remote_tokens"].as_u64().unwrap_or(0)
    }

    /// What became of answers that D kept, and of P's loads from there.
    fn read_back_json(&self) -> Value {
        let producer = self.figures.producer();
        let loads = &producer["connector"]["loads"];
        let kept = |end: &str| self.figures.sum(&format!("/connector/leases/{end}"));
        json!({
            "tokens": self.read_back(),
            "loads": loads["ordered"],
            "loaded": loads["loaded"],
            "loads_failed": loads["failed"],
            "tokens_recomputed": producer["recovered"]["tokens_recomputed"],
            "kept": {
                "granted": kept("granted"),
                "confirmed": kept("confirmed"),
                "released": kept("released"),
                "expired": kept("expired"),
                "consumer_lost": kept("consumer_lost"),
                "revoked": kept("revoked"),
            },
        })
    }

    /// Errors that say what failed.
    fn clean_errors(&self) -> usize {
        let clean = |row: &&Row| matches!(&row.seen.ending, Ending::Error(why) if why.contains(LOAD_FAILED));
        self.rows.iter().filter(clean).count()
    }

    /// Without a fault, and if no client went away, no load fails.
    fn is_calm(&self) -> bool {
        let aborts = self.rows.iter().any(|row| row.wish.abort != AbortMode::None);
        let read_back = &self.figures.producer()["connector"]["loads"]["failed"];
        let none_failed = read_back.as_object().is_none_or(serde_json::Map::is_empty);
        aborts || (none_failed && self.figures.reasons().is_empty())
    }

    /// Whether the fault did anything. A killed D has taken its figures along, and what is random may miss.
    fn has_struck(&self) -> bool {
        let reasons = self.figures.reasons();
        if self.fault == FaultMode::Corrupt {
            return reasons.contains_key("corrupt");
        }
        matches!(self.fault, FaultMode::KillDecode | FaultMode::Mixed)
            || !reasons.is_empty()
            || self.figures.sum("/workers/retried") > 0
    }

    fn pull_gbps(&self) -> f64 {
        let seconds = self.sum("/load/read_us") as f64 / 1e6;
        if seconds == 0.0 { 0.0 } else { self.sum("/load/bytes") as f64 / seconds / 1e9 }
    }

    fn first_tokens(&self) -> Vec<f64> {
        let mut all: Vec<f64> =
            self.rows.iter().filter_map(|row| row.seen.first_token).map(milliseconds).collect();
        all.sort_by(f64::total_cmp);
        all
    }

    pub(crate) fn json(&self) -> Value {
        let leases = &self.figures.producer()["connector"]["leases"];
        let [held_p, held_d] = self.held_in_the_end();
        let held = |count: u64| if count == u64::MAX { Value::Null } else { count.into() };
        let failed = &self.figures.consumer["connector"]["loads"]["failed"];
        let first = self.first_tokens();
        json!({
            "shapes": self.shapes.json(),
            "requests": self.requests(),
            "aborted": self.count(Judgement::Aborted),
            "not_prefilled": self.count(Judgement::NotPrefilled),
            "equal": self.count(Judgement::Equal),
            "wrong": self.count(Judgement::Wrong),
            "errors": self.count(Judgement::Error),
            "hung": self.count(Judgement::Hung),
            "prompt_tokens": self.sum("/prompt_tokens"),
            "external_tokens": self.sum("/prompt_tokens_details/external_tokens"),
            "read_back": self.read_back_json(),
            "blocks_held": {
                "producer": held(held_p),
                "consumer": held(held_d),
            },
            "staging": staging::figures(self.figures.producer(), &self.figures.consumer),
            "leases": {
                "granted": leases["granted"],
                "confirmed": leases["confirmed"],
                "released": leases["released"],
                "expired": leases["expired"],
                "consumer_lost": leases["consumer_lost"],
                "lapsed": failed["lapsed"].as_u64().unwrap_or(0),
            },
            "fault": name_of(&self.fault),
            "policy": self.policy.name(),
            "recovered": {
                "requests": self.figures.sum("/recovered/requests"),
                "ended": self.figures.sum("/recovered/ended"),
                "tokens_recomputed": self.figures.sum("/recovered/tokens_recomputed"),
                "tokens_kept": self.figures.sum("/recovered/tokens_kept"),
                "loads_not_begun": self.figures.sum("/breakers/loads_refused"),
                "pulls_retried": self.figures.sum("/workers/retried"),
            },
            "reasons": self.figures.reasons(),
            "loads_failed": failed,
            "early_ends": self.figures.producer()["workers"]["early_ends"],
            "preempted": self.figures.consumer["preempted"],
            "pull_gbps": (self.pull_gbps() * 1000.0).round() / 1000.0,
            "ttft_ms": { "p50": quantile(&first, 0.5), "p99": quantile(&first, 0.99) },
        })
    }

    /// The table of requests and the summary below it; above it the shapes, if they are not the usual ones.
    pub(crate) fn text(&self, colour: bool) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
        if !colour {
            table.force_no_tty();
        }
        table.set_header([
            "request",
            "prompt",
            "from P",
            "cached",
            "bytes",
            "ranges",
            "pull",
            "first token",
            "answer",
        ]);
        for column in 1..8 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        for row in &self.rows {
            let judgement = row.judge();
            let (word, shade) = match judgement {
                Judgement::Equal => ("equal".to_owned(), Color::Green),
                Judgement::Wrong => ("WRONG".to_owned(), Color::Red),
                Judgement::Aborted => ("aborted".to_owned(), Color::Yellow),
                Judgement::Hung => ("HUNG".to_owned(), Color::Red),
                Judgement::NotPrefilled | Judgement::Error => match &row.seen.ending {
                    Ending::NotPrefilled(why) => (format!("not prefilled: {why}"), Color::Red),
                    Ending::Error(why) => (format!("error: {why}"), Color::Red),
                    _ => (String::new(), Color::Red),
                },
            };
            let number = |value: u64| if value == 0 { String::new() } else { value.to_string() };
            let pulled = row.figure("/load/read_us") + row.figure("/load/confirm_us");
            table.add_row([
                Cell::new(&row.wish.id),
                Cell::new(row.wish.prompt.len() + row.wish.since.len()),
                Cell::new(number(row.figure("/prompt_tokens_details/external_tokens"))),
                Cell::new(number(row.figure("/prompt_tokens_details/cached_tokens"))),
                Cell::new(number(row.figure("/load/bytes"))),
                Cell::new(number(row.figure("/load/ranges"))),
                Cell::new(if pulled == 0 { String::new() } else { format!("{:.2} ms", pulled as f64 / 1e3) }),
                Cell::new(
                    row.seen.first_token.map_or_else(String::new, |t| format!("{:.1} ms", milliseconds(t))),
                ),
                Cell::new(word).fg(shade),
            ]);
        }
        let shapes = self.shapes.line().map_or_else(String::new, |line| line + "\n");
        format!("{shapes}{table}\n{}", self.summary())
    }

    fn summary(&self) -> String {
        let json = self.json();
        let n = |pointer: &str| json.pointer(pointer).map_or_else(String::new, Value::to_string);
        let share = if self.sum("/prompt_tokens") == 0 {
            0.0
        } else {
            100.0 * self.sum("/prompt_tokens_details/external_tokens") as f64
                / self.sum("/prompt_tokens") as f64
        };
        let lines = [
            format!(
                "answers   {} of {} equal the reference, {} wrong, {} errors, {} hung, {} aborted, {} not prefilled",
                n("/equal"),
                n("/requests"),
                n("/wrong"),
                n("/errors"),
                n("/hung"),
                n("/aborted"),
                n("/not_prefilled")
            ),
            format!(
                "tokens    {} of {} prompt tokens came from P ({share:.1} %)",
                n("/external_tokens"),
                n("/prompt_tokens")
            ),
            format!(
                "leases    {} granted: {} confirmed, {} released, {} expired; {} loads found theirs lapsed",
                n("/leases/granted"),
                n("/leases/confirmed"),
                n("/leases/released"),
                n("/leases/expired"),
                n("/leases/lapsed")
            ),
            if self.has_turns() {
                format!(
                    "read back {} tokens of answers, in {} loads; {} answers kept: {} read, {} expired, {} taken back",
                    n("/read_back/tokens"),
                    n("/read_back/loaded"),
                    n("/read_back/kept/granted"),
                    n("/read_back/kept/confirmed"),
                    n("/read_back/kept/expired"),
                    n("/read_back/kept/revoked")
                )
            } else {
                String::new()
            },
            format!(
                "blocks    {} held on P, {} held on D",
                n("/blocks_held/producer"),
                n("/blocks_held/consumer")
            ),
            staging::line(&json["staging"]),
            if self.fault == FaultMode::None {
                String::new()
            } else {
                format!(
                    "recovery  {} requests went on after their load failed ({} tokens computed here, {} kept), {} ended, {} pulls tried again, {} loads not begun; {}",
                    n("/recovered/requests"),
                    n("/recovered/tokens_recomputed"),
                    n("/recovered/tokens_kept"),
                    n("/recovered/ended"),
                    n("/recovered/pulls_retried"),
                    n("/recovered/loads_not_begun"),
                    n("/reasons")
                )
            },
            format!(
                "speed     {} GB/s in pulls; first token {} ms at the median, {} ms at the 99th percentile",
                n("/pull_gbps"),
                n("/ttft_ms/p50"),
                n("/ttft_ms/p99")
            ),
        ];
        lines.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
