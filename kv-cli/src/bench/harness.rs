//! Rows for a harness that runs several transfer libraries by turns: one JSON object a shape and line.

use serde_json::{Value, json};

use super::args::Harness;
use super::child::Timed;
use super::measure::Pair;
use super::shape::Shape;
use super::stats::{GB, machine_busy_s, quantile};
use super::wire::{Job, Way};
use crate::error::Failure;

/// A shape as the harness names it, and how many transfers it wants timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HarnessShape {
    pub(super) name: &'static str,
    pub(super) shape: Shape,
    pub(super) transfers: u64,
}

/// No shape is timed for longer, once it has been timed often enough.
const LIMIT_S: f64 = 3.0;
/// Often enough.
const LEAST: u64 = 30;
/// A shape of more transfers than this is a small one: more of them come first that do not count.
const MANY: u64 = 50;
/// Below this the machine's own clock of busy time is too coarse.
const COARSE_S: f64 = 0.15;

impl HarnessShape {
    pub(super) fn all() -> [Self; 7] {
        let shape = |name, block_bytes, blocks, transfers| Self {
            name,
            shape: Shape { block_bytes, blocks },
            transfers,
        };
        [
            shape("bulk-16k", 16 << 10, 16384, 3),
            shape("bulk-32k", 32 << 10, 8192, 3),
            shape("bulk-64k", 64 << 10, 4096, 3),
            shape("bulk-128k", 128 << 10, 2048, 3),
            shape("bulk-1m", 1 << 20, 256, 3),
            shape("small-64x32k", 32 << 10, 64, 300),
            shape("small-1x4k", 4 << 10, 1, 1000),
        ]
    }
}

/// Measures and prints row by row. A shape that cannot be done is a row too.
pub(super) fn run(wanted: &Harness) -> Result<(), Failure> {
    let mut pair = Pair::start(&wanted.config, &wanted.common, false)?;
    for shape in &wanted.shapes {
        let row = match measure(&mut pair, wanted, *shape) {
            Ok(row) => row,
            Err(failure) => {
                // The processes may be in any state now.
                pair = Pair::start(&wanted.config, &wanted.common, false)?;
                let mut row = head(wanted, *shape);
                row["error"] = json!(failure.to_string());
                row
            }
        };
        println!("{row}");
    }
    Ok(())
}

fn head(wanted: &Harness, of: HarnessShape) -> Value {
    json!({
        "peer": format!("kv-{}", wanted.config.transport),
        "config": wanted.name,
        "shape": of.name,
        "block": of.shape.block_bytes,
        "n": of.shape.blocks,
        "bytes": of.shape.bytes(),
        "thp": u8::from(wanted.common.huge_pages),
        "contiguous": 0,
    })
}

fn measure(pair: &mut Pair, wanted: &Harness, of: HarnessShape) -> Result<Value, Failure> {
    let job = Job { way: Way::Transport, shape: of.shape, inflight: wanted.common.inflight };
    let mut row = head(wanted, of);
    if wanted.verify {
        let (bad, spilled) = pair.consumer.check(job)?;
        row["verify_bad_blocks"] = json!(bad);
        row["verify_spilled_blocks"] = json!(spilled);
        row["verified"] = json!((bad, spilled) == (0, 0));
    }
    let warm = if of.transfers < MANY { 1 } else { MANY };
    pair.time(job, warm, warm, 0.0)?;
    let busy = machine_busy_s();
    let (timed, producer_cpu) = pair.time(job, of.transfers.min(LEAST), of.transfers, LIMIT_S)?;
    let others =
        busy.zip(machine_busy_s()).map(|(before, after)| after - before - timed.cpu_s - producer_cpu);
    figures(&mut row, of, &timed, producer_cpu, others);
    Ok(row)
}

fn figures(row: &mut Value, of: HarnessShape, timed: &Timed, producer_cpu: f64, others: Option<f64>) {
    let at = |share| quantile(&timed.seconds, share).unwrap_or(0.0);
    let transfers = timed.seconds.len() as f64;
    let moved = of.shape.bytes() as f64 * transfers / GB;
    row["its"] = json!(timed.seconds.len());
    if of.transfers < MANY {
        row["samples_s"] = json!(timed.seconds);
    }
    row["med_s"] = json!(at(0.5));
    row["p99_s"] = json!(at(0.99));
    row["min_s"] = json!(at(0.0));
    row["max_s"] = json!(at(1.0));
    row["gbps"] = json!(of.shape.bytes() as f64 / at(0.5).max(1e-9) / GB);
    row["cpu_init_s_per_gb"] = json!(timed.cpu_s / moved);
    row["cpu_tgt_s_per_gb"] = json!(producer_cpu / moved);
    row["cpu_us_per_xfer"] = json!((timed.cpu_s + producer_cpu) / transfers * 1e6);
    if let Some(others) = others.filter(|_| timed.wall_s > COARSE_S) {
        row["others_busy_cores"] = json!(others.max(0.0) / timed.wall_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_fields_that_the_harness_reads() {
        let of = HarnessShape::all()[2];
        let seconds = vec![0.1, 0.2, 0.3];
        let timed = Timed { seconds, cpu_s: 0.3, wall_s: 0.6 };
        let mut row = json!({});
        figures(&mut row, of, &timed, 0.15, Some(0.06));
        let number = |name: &str| row[name].as_f64().unwrap();
        assert_eq!((number("med_s"), number("min_s"), number("max_s")), (0.2, 0.1, 0.3));
        assert!((number("gbps") - 0.268435456 / 0.2).abs() < 1e-9);
        assert!((number("cpu_init_s_per_gb") - 0.3 / (3.0 * 0.268435456)).abs() < 1e-9);
        assert!((number("cpu_tgt_s_per_gb") * 2.0 - number("cpu_init_s_per_gb")).abs() < 1e-9);
        assert!((number("others_busy_cores") - 0.1).abs() < 1e-9);
        assert!((number("cpu_us_per_xfer") - 150_000.0).abs() < 1e-6);
        assert_eq!(row["samples_s"].as_array().unwrap().len(), 3);
        let short = Timed { wall_s: 0.01, ..timed };
        let mut row = json!({});
        figures(&mut row, of, &short, 0.15, Some(0.06));
        assert!(row.get("others_busy_cores").is_none());
    }

    #[test]
    fn shapes_of_the_harness_move_the_same_bytes_as_each_other() {
        let all = HarnessShape::all();
        assert!(all[..5].iter().all(|shape| shape.shape.bytes() == 256 << 20));
        assert!(all.iter().all(|shape| shape.shape.check(512 << 20).is_ok()));
    }
}
