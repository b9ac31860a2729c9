//! The plan as a picture and a table.

use std::io::{IsTerminal, stdout};

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Color, Table};

use super::sketch::{Reader, Share, Sketch};

/// Colours, where somebody looks.
struct Paint {
    on: bool,
}

impl Paint {
    fn paint(&self, code: &str, text: &str) -> String {
        if self.on { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }

    fn green(&self, text: &str) -> String {
        self.paint("32", text)
    }

    fn grey(&self, text: &str) -> String {
        self.paint("90", text)
    }
}

/// All of it, as text.
pub(super) fn as_text(sketch: &Sketch) -> String {
    let paint = Paint { on: stdout().is_terminal() };
    let mut text = String::new();
    for reader in &sketch.consumer {
        text.push_str(&picture(reader, &paint));
    }
    text.push_str(&format!("{}\n", table(sketch, paint.on)));
    for served in &sketch.producer {
        let ranks = spans(&served.readers);
        let what = if served.readers.len() == 1 { "one ending, from D" } else { "endings from D" };
        text.push_str(&format!("P{:<3} waits for {what} {ranks}\n", served.rank));
    }
    let alike = sketch.consumer.iter().all(|reader| reader.identical);
    let checksums =
        if alike { "can be compared: blocks are alike" } else { "cannot be compared: blocks differ" };
    text.push_str(&format!("checksums {checksums}\n"));
    text
}

fn picture(reader: &Reader, paint: &Paint) -> String {
    let mut branches: Vec<(u32, String)> = Vec::new();
    for source in &reader.sources {
        let reads: Vec<String> =
            source.reads.iter().map(|share| words(share, source.reads.len() > 1)).collect();
        branches.push((source.rank, paint.green(&reads.join("; "))));
    }
    for rank in &reader.silent {
        branches.push((*rank, paint.grey("nothing to read: only told")));
    }
    branches.sort_by_key(|(rank, _)| *rank);
    let last = branches.len().saturating_sub(1);
    let name = format!("D{}", reader.rank);
    let mut text = String::new();
    for (index, (rank, what)) in branches.iter().enumerate() {
        let (left, arm) = match (index, last) {
            (0, 0) => (format!("{name:<4} ◄─"), "──"),
            (0, _) => (format!("{name:<4} ◄─"), "┬─"),
            (i, last) if i == last => ("       ".to_owned(), "└─"),
            _ => ("       ".to_owned(), "├─"),
        };
        text.push_str(&format!("{left}{arm} P{rank:<3} {what}\n"));
    }
    text
}

fn words(share: &Share, several: bool) -> String {
    let unit = if share.kind == "state" { "parts" } else { "heads" };
    let of = if several { format!("{}: ", share.kind) } else { String::new() };
    format!("{of}layers {}, {unit} {}", spans(&share.layers), spans(&share.heads))
}

/// Numbers in ascending order, shortened: `0-3,7`.
fn spans(numbers: &[u32]) -> String {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match spans.last_mut() {
            Some((_, end)) if *end + 1 == *number => *end = *number,
            _ => spans.push((*number, *number)),
        }
    }
    let one = |(from, to): &(u32, u32)| if from == to { from.to_string() } else { format!("{from}-{to}") };
    spans.iter().map(one).collect::<Vec<_>>().join(",")
}

fn table(sketch: &Sketch, coloured: bool) -> Table {
    let has_state = sketch.consumer.iter().any(|reader| reader.state_bytes > 0);
    let mut head = vec!["rank", "reads from", "only told", "B/token", "B/block"];
    if has_state {
        head.push("B/state");
    }
    let sample = format!("B for {} tokens", sketch.tokens);
    head.extend([sample.as_str(), "pieces", "ranges", "B/range", "if scattered", "covered"]);
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(head);
    if !coloured {
        table.force_no_tty();
    }
    let right = |n: u64| Cell::new(n).set_alignment(CellAlignment::Right);
    for reader in &sketch.consumer {
        let sources: Vec<u32> = reader.sources.iter().map(|source| source.rank).collect();
        let covered = Cell::new(if reader.covered { "once" } else { "NOT ONCE" });
        let color = if reader.covered { Color::Green } else { Color::Red };
        let mut row = vec![
            Cell::new(format!("D{}", reader.rank)),
            Cell::new(format!("P {}", spans(&sources))),
            Cell::new(if reader.silent.is_empty() {
                String::new()
            } else {
                format!("P {}", spans(&reader.silent))
            }),
            right(reader.bytes_per_token),
            right(reader.bytes_per_block),
        ];
        if has_state {
            row.push(right(reader.state_bytes));
        }
        row.extend([
            right(reader.sample.bytes),
            right(reader.sample.pieces),
            right(reader.sample.ranges),
            right(reader.sample.bytes.checked_div(reader.sample.ranges).unwrap_or(0)),
            right(reader.sample.ranges_scattered),
            if coloured { covered.fg(color) } else { covered },
        ]);
        table.add_row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shortened_to_spans() {
        assert_eq!(spans(&[]), "");
        assert_eq!(spans(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }
}
