//! The tables.

use std::io::{IsTerminal, stdout};

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Color, Table};
use serde_json::{Value, json};

use super::measure::{BothSides, Latencies, Measured, Row};
use super::peers::PeersRow;
use super::shape::show_bytes;

/// Characters of a full bar.
const BAR: usize = 20;

/// Everything as one JSON object.
pub(super) fn as_json(measured: &[Measured], peers: &[PeersRow]) -> Value {
    let rows: Vec<_> = measured.iter().flat_map(|measured| &measured.rows).collect();
    let beside: Vec<_> = measured.iter().flat_map(|measured| &measured.beside).collect();
    json!({ "rows": rows, "beside": beside, "peers": peers })
}

/// A bar of eighths of characters: `share` of the full width.
fn bar(share: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(head.to_vec());
    table
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn coloured(text: String, color: Color) -> Cell {
    let cell = Cell::new(text);
    if stdout().is_terminal() { cell.fg(color) } else { cell }
}

fn both(cpu: BothSides) -> String {
    format!("{:.2} + {:.2}", cpu.consumer, cpu.producer)
}

/// The tables of one run, as text.
pub(super) fn as_tables(measured: &[Measured], peers: &[PeersRow]) -> String {
    let mut text = String::new();
    let rows: Vec<(&Row, BothSides)> =
        measured.iter().flat_map(|one| one.rows.iter().zip(one.plain_cpu.iter().copied())).collect();
    let fastest = rows.iter().map(|(row, _)| row.memcpy_gbps.max(row.gbps.median)).fold(0.0, f64::max);
    let mut speed = table(&[
        "block",
        "moved by",
        "GB/s",
        "",
        "lowest – highest",
        "of memcpy",
        "of plain TCP",
        "CPU s/GB",
    ]);
    for (row, plain_cpu) in &rows {
        let line = |name: String, gbps: f64, color, spread, ratios: [String; 2], cpu| {
            vec![
                right(show_bytes(row.block_bytes)),
                Cell::new(name),
                right(format!("{gbps:.2}")),
                coloured(bar(gbps / fastest), color),
                right(spread),
                right(ratios[0].clone()),
                right(ratios[1].clone()),
                right(cpu),
            ]
        };
        let ratio = |ratio: f64| format!("{ratio:.2}");
        let none = || [String::new(), String::new()];
        let own = if row.lane == row.transport {
            row.transport.clone()
        } else {
            format!("{} ({})", row.transport, row.lane)
        };
        let spread = format!("{:.2} – {:.2}", row.gbps.min, row.gbps.max);
        let ratios = [ratio(row.ratio_memcpy), ratio(row.ratio_plain_tcp)];
        speed.add_row(line(
            "memcpy".into(),
            row.memcpy_gbps,
            Color::DarkGrey,
            String::new(),
            none(),
            String::new(),
        ));
        speed.add_row(line(
            "plain TCP".into(),
            row.plain_tcp_gbps,
            Color::DarkGrey,
            String::new(),
            none(),
            both(*plain_cpu),
        ));
        speed.add_row(line(own, row.gbps.median, Color::Green, spread, ratios, both(row.cpu_s_per_gb)));
    }
    text.push_str(&format!("{speed}\n"));

    let mut small = table(&["moved by", "1 x 4 KiB p50", "p99", "64 x 32 KiB p50", "p99", "idle cores"]);
    for one in measured {
        let Some(row) = one.rows.first() else { continue };
        let line = |name: &str, latency: &Latencies, idle: String| {
            let us = |us: f64| right(format!("{us:.1} us"));
            let Latencies { one, some } = latency;
            vec![Cell::new(name), us(one.p50), us(one.p99), us(some.p50), us(some.p99), right(idle)]
        };
        small.add_row(line("plain TCP", &one.plain_latency, String::new()));
        small.add_row(line(&row.transport, &row.latency_us, format!("{:.4}", row.idle_cores)));
    }
    text.push_str(&format!("{small}\n"));

    let mut beside = table(&["a small read beside a large one", "p50", "p99", "the large one meanwhile"]);
    for row in measured.iter().flat_map(|one| &one.beside) {
        beside.add_row(vec![
            Cell::new(format!("{}: {} beside {}", row.transport, row.small, show_bytes(row.large_bytes))),
            right(format!("{:.0} us", row.p50_us)),
            right(format!("{:.0} us", row.p99_us)),
            right(format!("{:.2} GB/s", row.large_gbps)),
        ]);
    }
    text.push_str(&format!("{beside}\n"));

    if !peers.is_empty() {
        let head = [
            "moved by",
            "consumers",
            "block",
            "slowest",
            "mean",
            "fastest GB/s",
            "slowest of mean",
            "all together",
            "producer's peak beside its pool",
            "its idle cores",
        ];
        let mut many = table(&head);
        for row in peers {
            let beside = row.producer_peak_bytes.saturating_sub(row.producer_pool_bytes);
            many.add_row(vec![
                Cell::new(&row.transport),
                right(row.peers.to_string()),
                right(show_bytes(row.block_bytes)),
                right(format!("{:.3}", row.slowest_gbps)),
                right(format!("{:.3}", row.mean_gbps)),
                right(format!("{:.3}", row.fastest_gbps)),
                right(format!("{:.2}", row.ratio_slowest_mean)),
                right(format!("{:.2}", row.sum_gbps)),
                right(format!("{} MiB", beside >> 20)),
                right(format!("{:.4}", row.producer_idle_cores)),
            ]);
        }
        text.push_str(&format!("{many}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_share() {
        assert_eq!(bar(0.0), "");
        assert_eq!(bar(1.0).chars().count(), BAR);
        assert_eq!(bar(7.0), bar(1.0));
        assert_eq!(bar(0.5).chars().count(), BAR / 2);
        assert_eq!(bar(1.0 / 160.0), "▏");
    }
}
