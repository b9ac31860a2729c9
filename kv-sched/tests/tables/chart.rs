//! Transition tables: every state of a machine against every input, by driving the machine, as Markdown that is
//! committed and compared.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::words::numbers;

/// A machine with what surrounds it in a table.
pub(crate) trait Machine {
    /// The same machine once more.
    fn again(&self) -> Self;
    /// Its state, in the machine's own words.
    fn state(&self) -> String;
    /// All of it, as `{:?}` writes it.
    fn all(&self) -> String;
    /// Its counters, as `{:?}` writes them.
    fn counters(&self) -> Vec<String>;
}

/// Something that can happen to a machine, and what comes out of it then.
pub(crate) type Input<M> = (&'static str, fn(&mut M) -> Vec<String>);

/// One file of tables.
pub(crate) struct Chart<'a, M> {
    /// Its name, without the ending.
    pub(crate) file: &'a str,
    /// Which crate's tests write it.
    pub(crate) package: &'a str,
    /// What it is, in two sentences.
    pub(crate) about: &'a str,
    /// The machine's states as a drawing.
    pub(crate) drawing: &'a str,
    /// How a state was reached, and the machine in it.
    pub(crate) states: Vec<(&'a str, M)>,
    /// What happens in each of them.
    pub(crate) inputs: &'a [Input<M>],
}

/// What became of one input in one state.
struct Cell {
    /// The next state, if it is another one.
    next: Option<String>,
    /// What came out, what was counted, what was noted.
    out: Vec<String>,
}

impl Cell {
    fn short(&self) -> &str {
        match (&self.next, &self.out[..]) {
            (Some(next), _) => next,
            (None, []) => ".",
            (None, _) => "=",
        }
    }

    fn long(&self) -> String {
        let next = self.next.iter().map(|next| format!("**{next}**"));
        let all: Vec<String> = next.chain(self.out.iter().cloned()).collect();
        format!("-> {}", if all.is_empty() { "nothing".to_owned() } else { all.join("; ") })
    }
}

/// Columns of a line of text.
const WIDTH: usize = 120;

const LEGEND: &str = "\
`.` nothing happens; `=` the state stays, but something comes out, is counted or is noted; anything else is the next
state. *Noted* means that nothing comes out, but the machine remembers something, such as a new deadline.";

impl<M: Machine> Chart<'_, M> {
    fn cell(&self, machine: &M, input: &Input<M>) -> Cell {
        let mut after = machine.again();
        let mut out = (input.1)(&mut after);
        let next = Some(after.state()).filter(|state| *state != machine.state());
        let silent = next.is_none() && out.is_empty();
        let (before, now) = (machine.counters(), after.counters());
        let known: Vec<_> = before.iter().flat_map(|text| numbers(text)).collect();
        for counter in now.iter().flat_map(|text| numbers(text)) {
            if !known.contains(&counter) {
                out.push(format!("counts {}", counter.0));
            }
        }
        let without = |all: String, counters: &[String]| {
            counters.iter().fold(all, |all, text| all.replace(text.as_str(), ""))
        };
        if silent && without(machine.all(), &before) != without(after.all(), &now) {
            out.insert(0, "noted".to_owned());
        }
        Cell { next, out }
    }

    fn text(&self) -> String {
        let names: Vec<String> = self.states.iter().map(|(_, machine)| machine.state()).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(!names[..i].contains(name), "{}: two columns are {name}", self.file);
        }
        let rows: Vec<Vec<Cell>> = (self.inputs.iter())
            .map(|input| self.states.iter().map(|(_, machine)| self.cell(machine, input)).collect())
            .collect();

        let mut text = format!("# States: {}\n\n{}\n\n", self.file.replace('-', " "), self.about);
        let _ = write!(text, "```text\n{}\n```\n\n", self.drawing.trim_matches('\n'));
        let _ = write!(
            text,
            "Written by driving the machine itself: `KV_UPDATE_TABLES=1 cargo test -p {} --test tables` writes it \
             anew.\n\n## Next states\n\n{LEGEND}\n\n",
            self.package
        );
        let mut overview = vec![["input"].into_iter().chain(names.iter().map(String::as_str)).collect()];
        for ((input, _), cells) in self.inputs.iter().zip(&rows) {
            overview.push([*input].into_iter().chain(cells.iter().map(Cell::short)).collect());
        }
        text.push_str(&markdown(&overview));

        for (i, ((reached, _), name)) in self.states.iter().zip(&names).enumerate() {
            let _ = write!(text, "\n## From: {name}\n\nReached by: {reached}.\n\n");
            let mut groups: Vec<(String, Vec<&str>)> = Vec::new();
            for ((input, _), cells) in self.inputs.iter().zip(&rows) {
                let becomes = cells[i].long();
                match groups.iter_mut().find(|(other, _)| *other == becomes) {
                    Some((_, inputs)) => inputs.push(*input),
                    None => groups.push((becomes, vec![*input])),
                }
            }
            for (becomes, inputs) in groups {
                text.push_str(&item(&inputs, &becomes));
            }
        }
        text
    }

    /// Compares the tables with those that are committed, or writes them if `KV_UPDATE_TABLES` is 1.
    pub(crate) fn check(&self) {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/states");
        let path = folder.join(format!("{}.md", self.file));
        let text = self.text();
        if std::env::var_os("KV_UPDATE_TABLES").is_some_and(|value| value == "1") {
            std::fs::create_dir_all(&folder).unwrap();
            return std::fs::write(&path, text).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
        if committed == text {
            return;
        }
        let gone =
            committed.lines().filter(|line| !text.lines().any(|other| other == *line)).map(|l| ("-", l));
        let new =
            text.lines().filter(|line| !committed.lines().any(|other| other == *line)).map(|l| ("+", l));
        let difference: Vec<String> = gone.chain(new).map(|(sign, line)| format!("{sign} {line}")).collect();
        panic!(
            "docs/states/{}.md is not what the machine does:\n{}\n\nA changed rule must be a visible, intended \
             difference. If it is intended, write the tables with `KV_UPDATE_TABLES=1 cargo test -p {} --test tables` \
             and commit them together with the change.",
            self.file,
            difference.join("\n"),
            self.package
        );
    }
}

/// A list's item in lines of the width: inputs are not broken, what becomes of them is between words.
fn item(inputs: &[&str], becomes: &str) -> String {
    let mut words: Vec<String> = inputs.iter().map(|input| format!("`{input}`,")).collect();
    words.last_mut().map(String::pop);
    words.extend(becomes.split(' ').map(str::to_owned));
    let (mut text, mut column) = ("-".to_owned(), 1);
    for word in words {
        let length = word.chars().count() + 1;
        if column + length > WIDTH {
            text.push_str("\n ");
            column = 1;
        }
        let _ = write!(text, " {word}");
        column += length;
    }
    text + "\n"
}

/// A table whose columns are in line in the text too. The first row is its head.
fn markdown(rows: &[Vec<&str>]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(text, "| {cell:width$} ");
        }
        text.push_str("|\n");
        if i == 0 {
            text.extend(widths.iter().map(|width| format!("| {} ", "-".repeat(*width))));
            text.push_str("|\n");
        }
    }
    text
}
